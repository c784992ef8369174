"""Programs exported for sizes that vary without a name: their packages against eager at both ends of the range and between."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchsmith import aot
from torchsmith.codes import Unsupported
from torchsmith.export import Dim, export, load, save

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {}


def program(example: tuple[int, ...], *others: tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function of one tensor: the example's sizes, of which negative ones vary, and other sizes."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = (fn, example, others)
        return fn

    return add


class Whole(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> Any:
        return self.fn(*args)


def exported(fn: Callable[..., Any], *examples: tuple[int, ...]) -> Any:
    args = tuple(torch.randn(*map(abs, e)) for e in examples)
    return export(Whole(fn), args, dynamic_shapes=(tuple({d: Dim.DYNAMIC for d, n in enumerate(e) if n < 0} for e in examples),))


@program((-2, 6, 2, 4), (1, 6, 2, 4), (4, 6, 2, 4))
def prefill_and_decode(x: Tensor) -> Tensor:
    """Keys of a cache, repeated for each query head, before the cache is written again: a batch of 1 makes no view of the copy."""
    b, cache = x.shape[0], torch.zeros(4, 8, 2, 4)
    cache[:b, :6] = x
    first = cache[:b, :6, :, None].expand(b, 6, 2, 2, 4).reshape(b, 6, 4, 4)
    cache[:b, 6:7] = x[:, :1]
    return cache[:b, :7, :, None].expand(b, 7, 2, 2, 4).reshape(b, 7, 4, 4) + first.sum(1, keepdim=True)


@program((-2, -20, -17, 4), (1, 1, 1, 4), (1, 8, 4, 4), (3, 9, 21, 4))
def shifted_windows(x: Tensor) -> Tensor:
    """A mask and attention in windows: padding to whole ones, the number of windows through floats."""
    ws, (b, h, w, c) = 4, x.shape
    x = F.pad(x, (0, 0, 0, -w % ws, 0, (ws - h % ws) % ws)).roll((-2, -2), (1, 2))
    _, rows, columns, _ = x.shape
    mask = torch.zeros((1, rows, columns, 1))
    for i, part in enumerate((slice(0, -ws), slice(-ws, -2), slice(-2, None))):
        mask[:, part] = i
    mask = mask.view(1, rows // ws, ws, columns // ws, ws, 1).transpose(2, 3).reshape(-1, ws * ws)
    cut = x.view(b, rows // ws, ws, columns // ws, ws, c).transpose(2, 3).contiguous().view(-1, ws * ws, c)
    cut = (cut @ cut.mT).softmax(-1) @ cut + mask.repeat(b, 1)[..., None]
    n = int(cut.shape[0] / (rows * columns / ws / ws))
    cut = cut.view(n, rows // ws, columns // ws, ws, ws, -1).transpose(2, 3).reshape(n, rows, columns, -1)
    return cut.roll((2, 2), (1, 2))[:, :h, :w].contiguous()


@program((-9, -5), (1, 1), (4, 2), (17, 3))
def parts(x: Tensor) -> list[Tensor]:
    return [*(t.cumsum(0) for t in torch.tensor_split(x, 3)), *x.tensor_split(2, dim=1)]


@program((-6, 5), (2, 5), (3, 5), (33, 5))
def windows_and_triangles(x: Tensor) -> tuple[Tensor, ...]:
    n = x.shape[0]
    bells = torch.hann_window(n), torch.hamming_window(n, periodic=False), torch.blackman_window(n), torch.bartlett_window(n)
    corners = torch.triu_indices(n, n), torch.tril_indices(n, n, -1), torch.triu_indices(n, n, 1), torch.tril_indices(n, 5 * n, 1)
    return *bells, *corners, torch.fft.fftfreq(n, 0.5), torch.fft.rfftfreq(n), torch.linspace(-1, 2, n)


@program((-6, -5), (1, 1), (2, 9), (31, 4))
def numbers_of_sizes(x: Tensor) -> tuple[Tensor, ...]:
    n, m = x.shape
    half = x[: round(n / 2)]
    classes = F.one_hot(torch.arange(n), n + 2)
    half = torch.cat([half, x[: n >> 1], x.new_ones((1 + n << 1) & 3, m), x.new_ones(7 & -n, m)])
    return x * n**-0.5 + math.sqrt(m), half, x / x.shape.numel(), classes, x.view(torch.int32) & 255, x * math.sqrt(n * m)


@program((2, -7, 4, -8), (2, 1, 4, 8), (2, 3, 4, 1), (2, 16, 4, 17))
def products(x: Tensor) -> tuple[Tensor, ...]:
    q = x.transpose(1, 2)
    return q @ q.mT, q[:, :1].mT @ q, torch.matmul(q[0], q.mT), x.reshape(2, -1, 4)


@program((1, 4, -16, -12), (1, 4, 1, 1), (1, 4, 2, 5), (1, 4, 9, 33))
def whole_images(x: Tensor) -> tuple[Tensor, ...]:
    return F.avg_pool2d(x, x.shape[2:]), x.flatten(2).mT.reshape(1, x.shape[2], x.shape[3], 4), x.flatten(1, 2)


@program((-3, 8), (1, 8), (2, 8), (17, 8))
def cells(x: Tensor) -> tuple[Tensor, ...]:
    w, v, b = torch.ones(16, 8) / 8, torch.ones(16, 4) / 4, torch.arange(16.0) / 16
    h, c = torch.lstm_cell(x, (x[:, :4], x[:, 4:]), w, v, b, b)
    g = torch.gru_cell(x, h, w[:12], v[:12], b[:12], b[:12])
    return h, c, g, torch.rnn_tanh_cell(x, g, w[:4], v[:4])


@program((2, -64), (2, 9), (2, 31), (2, 100))
def spectra(x: Tensor) -> tuple[Tensor, ...]:
    w = torch.hann_window(16)
    bands = torch.stft(x, 16, window=w, return_complex=True)
    return torch.istft(bands, 16, window=w), torch.istft(bands, 16, window=w, length=x.shape[1]), torch.istft(bands[0], 16, 4, window=w)


@program((4, -16), (4, 7), (4, 24), (4, 1))
def padded_to_groups(x: Tensor) -> tuple[Tensor, ...]:
    return F.pad(x, (0, -x.shape[1] % 8)).view(4, -1, 8).sum(-1), F.pad(x, (-x.shape[1] % 3, 0)).view(4, 3, -1).amax(1)


@program((-2, 3, -16), (1, 3, 3), (3, 3, 17), (2, 3, 40))
def pools(x: Tensor) -> tuple[Tensor, ...]:
    ceil, places = nn.MaxPool1d(3, 2, ceil_mode=True)(x), F.max_pool1d(x, 3, return_indices=True)[1]
    return F.max_pool1d(x, 3), torch.max_pool1d(x, 2, 1, 1, 2), ceil, places


@pytest.mark.parametrize("name", PROGRAMS)
def test_packages_at_every_size(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    fn, example, others = PROGRAMS[name]
    made = exported(fn, example)
    path = str(tmp_path / "model.pt2")
    aot.compile_and_package(made, package_path=path, inductor_configs={"libtorch": "allow"})  # transforms are libtorch's
    run, module = aot.load_package(path), made.module()
    for sizes in (tuple(map(abs, example)), *others):
        x = torch.randn(sizes)
        want = fn(x)
        torch.testing.assert_close(module(x), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)


def cut(x: Tensor) -> Tensor:
    return x.view(x.shape[0] // 2, 2, x.shape[1] // 3, 3).sum((1, 3))


def test_conditions_that_no_range_describes_are_asked_of_every_call(tmp_path: Path) -> None:
    made = exported(cut, (-8, -6))
    assert "d0" in str(made.range_constraints) and len(made.conditions) == 1 and "test_export_sizes.py:" in str(made)
    file = io.BytesIO()
    save(made, file)
    again = load(file)
    assert str(again) == str(made) and again.conditions == made.conditions
    path = str(tmp_path / "cut.pt2")
    aot.compile_and_package(again, package_path=path)
    for run in (made.module(), again.module(), aot.load_package(path)):
        x = torch.randn(4, 9)
        torch.testing.assert_close(run(x), cut(x))
        with pytest.raises((ValueError, RuntimeError), match=r"must satisfy .*because of .*test_export_sizes.py:"):
            run(torch.randn(5, 9))


def test_errors_of_packages_name_sizes_as_the_user_does(tmp_path: Path) -> None:
    n = Dim("rows")
    made = export(Whole(lambda x, y, i: (x[i], y.sum())), (torch.randn(8, 3), torch.randn(17), torch.tensor([1])),
                  dynamic_shapes=(({0: n}, {0: 2 * n + 1}, None),))  # fmt: skip
    run = aot.load_package(aot.compile_and_package(made, package_path=tmp_path / "model.pt2"))
    with pytest.raises(aot.PackageError, match=r"index is out of bounds for dimension 0$"):
        run(torch.randn(4, 3), torch.randn(9), torch.tensor([4]))
    with pytest.raises(aot.PackageError, match=r"size at dimension 0 must be \(rows \* 2\) \+ 1: got 8 where 9 was expected"):
        run(torch.randn(4, 3), torch.randn(8), torch.tensor([1]))


def test_names_are_a_promise_for_all_sizes() -> None:
    n = Dim("n")
    with pytest.raises(Unsupported, match="AOT061"):
        export(Whole(cut), (torch.randn(8, 6),), dynamic_shapes=(({0: n},),))
    assert repr(export(Whole(parts), (torch.randn(8, 6),), dynamic_shapes=(({0: n},),)).range_constraints) == "{'n': [1, inf]}"
    made = export(Whole(shifted_windows), (torch.randn(2, 5, 6, 4),), dynamic_shapes=(({1: n, 2: Dim("m")},),))
    assert repr(made.range_constraints) == "{'n': [1, inf], 'm': [1, inf]}" and not made.conditions


def test_a_package_tells_the_conditions_that_its_program_tells(tmp_path: Path) -> None:
    # one of two sizes, which no range describes; a bound in many words, which is a range
    for fn, count in ((lambda x, y: x[: y.shape[0]] + y, 1), (lambda x, y: x + y[0] if x.shape[0] * 2 + 1 < 90 else x, 0)):
        made = exported(fn, (-9, 5), (-7, 5))
        run = aot.load_package(aot.compile_and_package(made, package_path=str(tmp_path / "told.pt2")))
        assert len(made.conditions) == len(run.info["conditions"]) == count, (str(made), run.info["conditions"])


INDEX = torch.zeros(3, 5, dtype=torch.int64)
OUTSIDE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]] = {
    # a program, sizes that it was exported with, sizes that eager refuses
    "gather": (lambda x, y: x.gather(0, (y > 9).long()), ((-4, -5), (-3, -5)), ((4, 5), (3, 6))),
    "scatter": (lambda x, y: x.scatter(0, (y > 9).long(), y), ((-4, -5), (-3, -5)), ((4, 5), (3, 6))),
    "scatter_add": (lambda x, y: x.scatter_add(1, (y[:, :2] > 9).long(), y), ((-4, -5), (-4, -5)), ((4, 5), (5, 5))),
    "index_add": (lambda x, y: x.index_add(0, (y[:, 0] > 9).long(), y), ((-4, -5), (-3, -5)), ((4, 5), (3, 6))),
    "select_scatter": (lambda x, y: x.select_scatter(y, 0, 1), ((-4, -5), (-5,)), ((4, 5), (6,))),
    "as_strided": (lambda x: x.as_strided((x.shape[0], 2), (x.shape[1], 1)), ((-4, -5),), ((4, 1),)),
    "unfold": (lambda x: x.unfold(0, 3, 1), ((-4, -5),), ((2, 5),)),
    "circular": (lambda x: F.pad(x, (2, 2), mode="circular"), ((1, -4, -5),), ((1, 4, 1),)),
    "attention": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), ((1, 1, -4, 8), (-4, -4)), ((1, 1, 4, 8), (3, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_sizes_that_eager_refuses_are_refused(name: str) -> None:
    fn, examples, bad = OUTSIDE[name]
    made = exported(fn, *examples)
    good = [torch.randn(*map(abs, e)) for e in examples]
    torch.testing.assert_close(made.module()(*good), fn(*good))
    wrong = [torch.randn(*sizes) for sizes in bad]
    with pytest.raises((RuntimeError, IndexError)):
        fn(*wrong)
    leaves = made.flat_arguments(wrong, {})
    with pytest.raises(ValueError):  # by the declared sizes: what a package asks too
        made.check(leaves)


class Both(NamedTuple):
    first: Tensor
    second: Tensor


def test_named_tuples_leave_a_package_as_tuples(tmp_path: Path) -> None:
    made = exported(lambda x: (x.topk(2), Both(x, x + 1)), (-4, 5))
    path = str(tmp_path / "named.pt2")
    aot.compile_and_package(made, package_path=path, inductor_configs={"libtorch": "allow"})
    x = torch.randn(3, 5)
    (values, places), (first, second) = aot.load_package(path)(x)
    assert torch.equal(values, x.topk(2).values) and torch.equal(places, x.topk(2).indices)
    assert torch.equal(first, x) and torch.equal(second, x + 1)
    top, both = made.module()(x)
    assert torch.equal(top.values, values) and torch.equal(both.second, second)
