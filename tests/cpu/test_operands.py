"""Products of two operands that change, through the front door: sizes that vary, weights that are not frozen, threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torchsmith

F = torch.nn.functional
DTYPES = (torch.float32, torch.float64)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((got.double() - want).abs().max() <= 64 * torch.finfo(dtype).eps * max(1.0, float(want.abs().max())))


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "b[k, n]": lambda x, w: torch.relu(x @ w + 1),
    "b[n, k]": lambda x, w: F.linear(x, w.mT.contiguous()) * 2,
    "x @ x^T": lambda x, w: x @ x.mT + w.sum(),
    "batches that broadcast": lambda x, w: x[None, None] @ torch.stack([w, w * 2])[:, None],
    "einsum": lambda x, w: torch.einsum("ik,kj->ji", x, w),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_sizes_that_vary(name: str, dtype: torch.dtype) -> None:
    torchsmith.compiler.reset()
    fn = torchsmith.compile(PRODUCTS[name], dynamic=True)
    with torch.no_grad():
        for m, k, n in ((7, 40, 33), (1, 40, 33), (19, 700, 5), (130, 65, 64), (3, 2, 1)):
            x, w = numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype, seed=1)
            want = PRODUCTS[name](x.double(), w.double())
            assert close(fn(x, w), want, dtype), (m, k, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_layers_without_freezing(batch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.ReLU(), torch.nn.Linear(130, 9)).to(dtype).eval()
    compiled = torchsmith.compile(model, options={"freezing": False})
    x = numbers(batch, 70, dtype=dtype)
    with torch.no_grad():
        for _ in range(2):
            assert close(compiled(x), model.double()(x.double()) if dtype is torch.float64 else model(x).double(), dtype)
            for p in model.parameters():
                p.mul_(-1.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["n", "k"])
def test_threads_change_no_bit(layout: str, dtype: torch.dtype) -> None:
    x, w = numbers(150, 600, dtype=dtype), numbers(600, 210, dtype=dtype, seed=1)
    w = w if layout == "n" else w.mT.contiguous().mT
    torchsmith.compiler.reset()
    fn = torchsmith.compile(torch.matmul)
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(fn(x, w))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], r) for r in results) and close(results[0], x.double() @ w.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_result_may_replace_an_operand(dtype: torch.dtype) -> None:
    """A write back into `w` while tiles still read it would show."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w.copy_(x @ w)
        return w + 0

    x, w = numbers(64, 64, dtype=dtype), numbers(64, 64, dtype=dtype, seed=1)
    want = x.double() @ w.double()
    with torch.no_grad():
        torchsmith.compiler.reset()
        assert close(torchsmith.compile(fn)(x, w), want, dtype) and close(w, want, dtype)
