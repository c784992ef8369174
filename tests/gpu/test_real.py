"""On a GPU: random operators draw eager's numbers, call by call, and leave the generator where eager does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stepping import stepper

import torchsmith
from torchsmith.events import recording
from torchsmith.lower.draws import KINDS, compare, known_draws

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE = "cuda"


def both(fn: Callable[..., Any], *args: Any, calls: int = 4, externs: set[str] | None = None) -> None:
    """The same numbers as eager's in each of some calls, and the same generator behind them."""
    compiled = torchsmith.compile(fn, fullgraph=True)
    with recording() as got:
        for seed in (1, None, (1 << 63) + 5, None)[:calls]:
            if seed is not None:
                torch.manual_seed(seed)  # the GPU's too
            before, host = torch.cuda.get_rng_state(), torch.get_rng_state()
            wanted, after, host_after = fn(*args), torch.cuda.get_rng_state(), torch.get_rng_state()
            torch.cuda.set_rng_state(before)
            torch.set_rng_state(host)
            found = compiled(*args)
            assert torch.equal(torch.cuda.get_rng_state(), after) and torch.equal(torch.get_rng_state(), host_after)
            for a, b in zip(found, wanted, strict=True):
                assert a.dtype is b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    for e in got:
        assert e.kind != "fallback", e
        if e.kind == "graph" and externs is not None:
            assert set(e.fields["report"].externs) == externs


def test_this_torch_is_known() -> None:
    blocks, kinds = known_draws("cuda:0")
    assert blocks > 0 and kinds == KINDS, list(itertools.islice(compare(torch.device("cuda:0"), blocks), 5))


SIZES = [(7,), (10, 3), (64, 64), (16, 128, 768), (1, 999_999), (8_400_001,), (3_000_002,), (9_000_000,)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dropout(size: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(size, dtype=dtype, device=DEVICE)
    both(lambda x: (F.dropout(x * 2, 0.3), F.dropout(x, 0.1)), x, externs={"torchsmith.take_draws.default"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_of_other_layouts(dtype: torch.dtype) -> None:
    x = torch.randn(8, 12, 30, 50, dtype=dtype, device=DEVICE)
    both(lambda x: (F.dropout(x, 0.3),), x.transpose(1, 3))
    both(lambda x: (F.dropout(x, 0.3),), x.to(memory_format=torch.channels_last))
    both(lambda x: (F.dropout(x[:, :, ::2], 0.3),), x)
    both(lambda x: (F.dropout(x[..., 1:], 0.3),), x)
    both(lambda x: (F.dropout((x + 1)[2:], 0.3),), x)


def test_an_odd_address() -> None:
    """Eager deals its numbers out by the operand's address: the call is eager's."""
    f = torchsmith.compile(lambda x: F.dropout(x, 0.5))
    for x in (torch.randn(4096, device=DEVICE), torch.randn(4097, device=DEVICE)[1:]):
        torch.cuda.manual_seed(3)
        found = f(x)
        torch.cuda.manual_seed(3)
        assert torch.equal(found, F.dropout(x, 0.5))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_distributions(size: tuple[int, ...]) -> None:
    def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.rand(size, device=x.device), torch.rand_like(x), torch.empty_like(x).uniform_(-3, 4.7)
        made = (*made, torch.empty_like(x).bernoulli_(0.3), torch.randint(-5, 77, size, device=x.device))
        return (*made, torch.randint(-(1 << 62), 1 << 62, size, device=x.device))

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        both(several, torch.empty(size, dtype=dtype, device=DEVICE), externs={"torchsmith.take_draws.default"})


MASKS: dict[str, Callable[[torch.dtype], torch.Tensor | None]] = {
    "no mask": lambda dtype: None,
    "booleans": lambda dtype: torch.arange(40, device=DEVICE).expand(3, 1, 24, 40) < 33,
    "true everywhere": lambda dtype: torch.ones(3, 1, 24, 40, dtype=torch.bool, device=DEVICE),
    "expanded": lambda dtype: torch.randn(3, 1, 24, 1, dtype=dtype, device=DEVICE).expand(3, 4, 24, 40),
    "with a gradient": lambda dtype: torch.randn(3, 4, 24, 40, dtype=dtype, device=DEVICE, requires_grad=True),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def attention_inputs(dtype: torch.dtype, kind: str, width: int = 32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(3, n, 4, width, dtype=dtype, device=DEVICE).transpose(1, 2).requires_grad_() for n in (24, 40, 40)]
    mask = MASKS[kind](dtype)
    return made if mask is None else [*made, mask]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Draws before, between and behind; 0.125 is a rate that all libraries take."""
    first = F.scaled_dot_product_attention(q + torch.rand_like(q), k * 2, v * 2, mask, 0.1)
    return F.dropout(F.scaled_dot_product_attention(F.dropout(first, 0.2), k, v, mask, 0.125, scale=0.2), 0.3)


@pytest.mark.parametrize("mode", ["whole step", "backward outside", "not recorded", "products in forward"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_in_attention(dtype: torch.dtype, kind: str, mode: str) -> None:
    """Forward, backward and the generator behind each, call by call; no two calls drop the same."""
    given = attention_inputs(dtype, kind)
    leaves = [t for t in given if t.requires_grad]

    def run(f: Callable[..., torch.Tensor], *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kernels = [torch.nn.attention.SDPBackend.MATH] if mode == "products in forward" else []
        with torch.nn.attention.sdpa_kernel(kernels) if kernels else torch.enable_grad():
            out = f(*given)
        return (out.detach(), *torch.autograd.grad((out * out).mean() + torch.rand((), device=DEVICE), leaves))

    def step(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = attend(*given)
        return out.detach(), *torch.autograd.grad((out * out).mean() + torch.rand((), device=DEVICE), [t for t in given if t.requires_grad])

    options = {"triton.cudagraphs": mode != "not recorded"}
    compiled = torchsmith.compile(step if mode == "whole step" else attend, options=options)
    seen = []
    with recording() as got:
        for seed in (1, None, 2, None):
            if seed is not None:
                torch.manual_seed(seed)
            before = torch.cuda.get_rng_state()
            wanted, after = step(*given) if mode == "whole step" else run(attend, *given), torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)
            found = compiled(*given) if mode == "whole step" else run(compiled, *given)
            assert torch.equal(torch.cuda.get_rng_state(), after)
            for a, b in zip(found, wanted, strict=True):  # libraries add gradients up in any order
                near = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 2e-2)
                torch.testing.assert_close(a, b, rtol=0.0, atol=near * b.abs().max().item())
            seen.append(found[0])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert not [e for e in got if e.kind in ("fallback", "graph_break")]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_in_attention_without_gradients(dtype: torch.dtype, kind: str) -> None:
    with torch.no_grad():
        both(lambda *given: (attend(*given),), *attention_inputs(dtype, kind))
        both(lambda *given: (attend(*given),), *attention_inputs(dtype, kind, 36))


def test_torchs_own_draws_keep_their_turn() -> None:
    x = torch.randn(1000, 100, device=DEVICE)
    both(lambda x: (F.dropout(x * 2, 0.5), torch.randn_like(x), torch.rand_like(x), F.dropout(x * 3, 0.2)), x)


def test_draws_on_the_host() -> None:
    x = torch.randn(5, 3, device=DEVICE)
    both(lambda x: (x * torch.rand(()), x + torch.randn(3).to(x.device)), x)


def test_sizes_that_vary() -> None:
    f = torchsmith.compile(lambda x: F.dropout(x * 2, 0.4), dynamic=True)
    for n in (3, 700, 40_000, 5):
        x = torch.randn(n, 96, device=DEVICE)
        torch.cuda.manual_seed(n)
        found = f(x)
        torch.cuda.manual_seed(n)
        assert torch.equal(found, F.dropout(x * 2, 0.4))


def test_a_training_step_is_recorded_with_its_dropouts() -> None:
    """Each replay draws eager's numbers: losses and parameters are eager's for many steps, and no draw ends a segment."""
    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        blocks = [m for _ in range(4) for m in (torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Dropout(0.2))]
        return torch.nn.Sequential(*blocks, torch.nn.Linear(256, 10)).to(DEVICE)

    losses = []
    for compiled in (False, True):
        model = net()
        step = stepper(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        step = torchsmith.compile(step, fullgraph=True) if compiled else step
        torch.manual_seed(5)
        data = [(torch.randn(64, 256, device=DEVICE), torch.randint(0, 10, (64,), device=DEVICE)) for _ in range(8)]
        losses.append([step(x, y).item() for x, y in data])
        if compiled:
            said = str(torchsmith.explain(stepper(model, torch.optim.SGD(model.parameters(), lr=0.05)))(*data[0]))
            assert "2 segments" in said, said  # the products that read the data, which move, are made between them
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-4)


def test_a_second_derivative_repeats_the_draws() -> None:
    f = torchsmith.compile(lambda x: F.dropout(x * x * x, 0.5))
    x = torch.randn(4096, device=DEVICE, requires_grad=True)
    y = f(x)
    torch.rand(5, device=DEVICE)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    kept = (y != 0).float() * 2
    torch.testing.assert_close(first, 3 * x * x * kept)
    torch.testing.assert_close(second, 6 * x * kept)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_statistics_and_pooling(dtype: torch.dtype, form: torch.memory_format) -> None:
    """Statistics in one pass, far from 0 too, and gradients that are gathered: beside float64 no worse than eager's."""
    def step(norm: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.max_pool2d(torch.relu(norm(x)), 3, 2, 1)
        return (y, *torch.autograd.grad((y * y).sum(), [x, *norm.parameters()]))

    torch.manual_seed(0)
    x = (torch.randn(16, 64, 56, 56, device=DEVICE) + torch.linspace(-50, 50, 64, device=DEVICE).view(1, -1, 1, 1)).to(dtype)
    x = x.contiguous(memory_format=form).requires_grad_()
    norms = [torch.nn.BatchNorm2d(64).to(DEVICE) for _ in range(3)]
    exact = step(norms[0].double(), x.detach().double().requires_grad_())
    theirs, ours = step(norms[1], x), torchsmith.compile(step, fullgraph=True)(norms[2], x)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norms[2], name), getattr(norms[0], name).float(), rtol=1e-4, atol=1e-4)
    for a, b, e in zip(ours, theirs, exact, strict=True):
        assert a.stride() == b.stride()
        worst, bar = (a.double() - e).abs().max(), (b.double() - e).abs().max()
        assert worst <= 2 * bar + 1e-6, (worst, bar)


def test_a_stream_that_is_captured_is_eagers() -> None:
    f, x = torchsmith.compile(lambda x: F.dropout(x * 2, 0.5)), torch.randn(4096, device=DEVICE)
    f(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(x)
    torch.cuda.manual_seed(9)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    torch.cuda.manual_seed(9)
    assert torch.equal(first, F.dropout(x * 2, 0.5))


def compared(fn: Callable[..., Any], *args: Any, breaks: int = 0) -> None:
    compiled = torchsmith.compile(fn, fullgraph=not breaks)
    with recording() as got:
        for _ in range(3):
            mine, theirs = ([a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
            found, wanted = compiled(*mine), fn(*theirs)
            for a, b in zip((*found, *mine), (*wanted, *theirs), strict=True):
                torch.testing.assert_close(a, b)
                assert a.device == b.device and a.stride() == b.stride()
    assert not [e for e in got if e.kind == "fallback"], [e.fields for e in got if e.kind == "fallback"]


def test_a_batch_that_the_program_moves() -> None:
    weight, x = torch.randn(6, 6, device=DEVICE), torch.randn(4, 6)
    compared(lambda x, w: ((x + 1).to(w.device) @ w, x.t(), x * 2, w.sum(), x), x, weight)
    compared(lambda x, w: (w[x.long().abs().sum(1) % 6], torch.ones(3), w.sin()), x, weight)
    compared(lambda x, w: (w.mul_(x[0].cuda()), torch.rand([]) < 2), x, weight)
    compared(lambda x, w: (w * x[0, 0], torch.full((), 3.0) * w, w[torch.tensor([1, 2])]), x, weight)
    with pytest.raises(RuntimeError, match="same device"):
        torchsmith.compile(lambda x, w: x[0] + w)(x, weight)


def test_a_training_step_on_a_batch_that_the_program_moves() -> None:
    x = torch.randn(4, 6)

    def step(fn: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layer = torch.nn.Linear(6, 3).to(DEVICE)
        for _ in range(3):
            loss, mean = fn(layer, x)
            loss.backward()
            assert not mean.is_cuda
        return [p.grad for p in layer.parameters()]

    def loss(layer: Any, x: torch.Tensor) -> Any:
        return layer(x.to(layer.weight.device)).square().sum(), x.mean()

    with recording() as got:
        compiled = step(torchsmith.compile(loss, fullgraph=True))
    assert not [e for e in got if e.kind == "fallback"]
    torch.testing.assert_close(compiled, step(loss))
