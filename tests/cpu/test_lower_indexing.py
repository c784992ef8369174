"""Indexing, scatter, scans, padding and resizing: lowered and interpreted equals eager, without an extern call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lower_harness import call_eager, check, program_of, to_array
from road_harness import check_all

import torchsmith
from torchsmith import events
from torchsmith.ir.interpret import CheckFailed, run_program

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
LOOSE = {torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}


def make(*shape: int, dtype: torch.dtype = torch.float32, turned: bool = False) -> torch.Tensor:
    torch.manual_seed(len(shape))
    if turned:
        return make(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 9, shape, dtype=dtype)


def ints(n: int, *shape: int, low: int = 0) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randint(low, n, shape)


INDEXED: list[tuple[str, Any, tuple[int, ...], tuple[torch.Tensor, ...]]] = [
    ("x[i]", lambda x, i: x[i], (5, 4), (ints(5, 3, low=-5),)),
    ("x[:, i]", lambda x, i: x[:, i], (5, 4), (ints(4, 2, 3),)),
    ("x[i, j]", lambda x, i, j: x[i, j], (5, 4, 3), (ints(5, 2, 1), ints(4, 3))),
    ("x[i, :, j]", lambda x, i, j: x[i, :, j], (5, 4, 3), (ints(5, 2), ints(3, 2))),
    ("x[:, i, j]", lambda x, i, j: x[:, i, j], (5, 4, 3, 2), (ints(4, 2), ints(3, 2))),
    ("x[0-d]", lambda x, i: torch.ops.aten.index(x, [i]), (5, 4), (torch.tensor(-2),)),
    ("x[empty]", lambda x, i: x[i], (5, 4), (torch.zeros(0, dtype=torch.long),)),
    ("take", torch.take, (5, 4), (ints(20, 2, 3, low=-20),)),
    ("gather", lambda x, i: x.gather(1, i), (5, 4), (ints(4, 5, 7),)),
    ("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 0), (5, 4), (ints(5, 2, 4),)),
    ("index_select", lambda x, i: x.index_select(1, i), (5, 4), (ints(4, 6),)),
    ("scatter value", lambda x, i: x.scatter(0, i, 3), (5, 4), (ints(5, 2, 4),)),
    ("index_fill", lambda x, i: x.index_fill(1, i, 2), (5, 4), (torch.tensor([0, -1]),)),
    ("index_fill 0-d", lambda x, i, v: x.index_fill(1, i, v.to(x.dtype)), (5, 4), (torch.tensor(1), torch.tensor(2))),
    ("index_put scalar", lambda x, i, v: x.index_put((i,), v.to(x.dtype)), (5, 4), (ints(5, 3, low=-5), torch.tensor(2))),
    ("mask put", lambda x, m: x.masked_fill(m, 2), (5, 4), (make(5, 4, dtype=torch.bool),)),
    ("mask index_put", lambda x, m, v: x.index_put((m,), v.to(x.dtype)), (5, 4), (make(5, dtype=torch.bool), torch.tensor(1))),
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("row", INDEXED, ids=lambda r: r[0])
def test_reading_by_index(row: Any, dtype: torch.dtype, turned: bool) -> None:
    _, fn, shape, indices = row
    check(fn, make(*shape, dtype=dtype, turned=turned), *indices)


def put(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.index_put((i,), v, accumulate=True)


SCATTERED: list[tuple[str, Any, tuple[int, ...], torch.Tensor, tuple[int, ...]]] = [
    ("scatter", lambda x, i, v: x.scatter(0, i, v), (5, 4), ints(5, 3, 4), (3, 4)),
    ("scatter 1", lambda x, i, v: x.scatter(-1, i, v), (5, 4), ints(4, 5, 3), (6, 4)),
    ("scatter_add", lambda x, i, v: x.scatter_add(0, i, v), (5, 4), ints(5, 9, 3), (9, 4)),
    ("scatter_add 3d", lambda x, i, v: x.scatter_add(1, i, v), (2, 5, 3), ints(5, 2, 9, 3), (2, 9, 3)),
    ("index_put", put, (5, 4), ints(5, 7, low=-5), (7, 4)),
    ("index_put row", put, (5, 4), ints(5, 7), (4,)),
    ("index_put set", lambda x, i, v: x.index_put((i,), v), (5, 4), torch.tensor([3, 0, -4]), (3, 4)),
    ("index_put column", lambda x, i, v: torch.ops.aten.index_put(x, [None, i], v, True), (5, 4), ints(4, 7), (5, 7)),
    ("index_add", lambda x, i, v: x.index_add(0, i, v), (5, 4), ints(5, 7), (7, 4)),
    ("index_add alpha", lambda x, i, v: x.index_add(1, i, v, alpha=2), (5, 4), ints(4, 7), (5, 7)),
    ("index_copy", lambda x, i, v: x.index_copy(1, i, v), (5, 4), torch.tensor([3, 0]), (5, 2)),
    ("put", lambda x, i, v: x.put(i, v), (5, 4), torch.tensor([3, -1, 7]), (3,)),
    ("put accumulate", lambda x, i, v: x.put(i, v, accumulate=True), (5, 4), ints(20, 6, low=-20), (6,)),
    *(
        (f"scatter_reduce {how} {include}",
         lambda x, i, v, how=how, include=include: x.scatter_reduce(0, i, v, how, include_self=include), (5, 4), ints(4, 9, 4), (9, 4))
        for how in ("sum", "prod", "mean", "amax", "amin") for include in (True, False)
    ),
    *(
        (f"index_reduce {how} {include}",
         lambda x, i, v, how=how, include=include: x.index_reduce(0, i, v, how, include_self=include), (5, 4), ints(4, 9), (9, 4))
        for how in ("prod", "mean", "amax", "amin") for include in (True, False)
    ),
]  # fmt: skip


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", SCATTERED, ids=lambda r: r[0])
def test_writing_by_index(row: Any, dtype: torch.dtype, turned: bool) -> None:
    name, fn, shape, index, source = row
    if dtype == torch.uint8 and "mean" in name:
        pytest.skip("eager divides sums that overflowed")
    check(fn, make(*shape, dtype=dtype, turned=turned), index, make(*source, dtype=dtype), **LOOSE.get(dtype, {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_scatter(dtype: torch.dtype) -> None:
    check(lambda x, m, v: x.masked_scatter(m, v), make(3, 4, dtype=dtype), make(3, 4, dtype=torch.bool), make(20, dtype=dtype))
    check(lambda x, m, v: x.masked_scatter(m, v), make(3, 4, dtype=dtype), make(4, dtype=torch.bool), make(20, dtype=dtype))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i],
        lambda x, i: x.gather(0, i),
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.scatter(0, i, 1.0),
        lambda x, i: x.index_add(0, i, x.new_ones(2)),
        lambda x, i: F.embedding(i, x[:, None]),
    ],
)
def test_an_index_out_of_range_is_a_failed_check(fn: Any) -> None:
    x, good, bad = make(4), torch.tensor([0, 3]), torch.tensor([0, 4])
    check(fn, x, good)
    with pytest.raises(CheckFailed):
        program, consts = program_of(fn, (x, good))
        run_program(program, [to_array(a) for a in (x, bad, *consts)], call_eager)


SCANS = [torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("fn", SCANS, ids=lambda f: f.__name__)
def test_scans(fn: Any, dtype: torch.dtype, dim: int) -> None:
    if fn is torch.logcumsumexp and not dtype.is_floating_point:
        pytest.skip("floats only")
    for turned in (False, True):
        check(lambda x: fn(x, dim), make(3, 4, 5, dtype=dtype, turned=turned), **LOOSE.get(dtype, {}))


def test_scans_of_odd_values_and_sizes() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0, -float("inf"), float("inf"), float("inf"), 0.0])
    for fn in (torch.cumsum, torch.cummax, torch.cummin):
        check(lambda x, fn=fn: fn(x, 0), x)
    check(lambda x: torch.logcumsumexp(x, 0), torch.tensor([-float("inf"), -float("inf"), 1.0, float("inf"), float("inf")]))
    for fn in (torch.cumsum, torch.cumprod):
        check(lambda x, fn=fn: fn(x, 0), torch.tensor(2.0))
        check(lambda x, fn=fn: fn(x, 0), torch.zeros(0, 3))
    check(lambda x: torch.cumsum(x, 0, dtype=torch.float64), make(5))
    check(lambda x: torch.cummax(x, 1), torch.zeros(2, 0))


PADS: list[tuple[tuple[int, ...], list[int], tuple[str, ...]]] = [
    ((2, 3, 5), [1, 2], ("constant", "reflect", "replicate")),
    ((2, 3, 5), [-1, 2], ("constant",)),
    ((2, 3, 5, 4), [1, 2, 0, 3], ("constant", "reflect", "replicate")),
    ((2, 2, 3, 5, 4), [1, 2, 0, 3, 2, 1], ("constant", "reflect", "replicate")),
    ((4, 3), [1, 1, 2, -3], ("constant",)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [(s, p, m) for s, p, modes in PADS for m in modes], ids=str)
def test_pads(row: Any, dtype: torch.dtype) -> None:
    shape, pad, mode = row
    if not dtype.is_floating_point and mode in ("reflect", "replicate"):
        pytest.skip("floats only")
    for turned in (False, True):
        check(lambda x: F.pad(x, pad, mode), make(*shape, dtype=dtype, turned=turned))


SIZES = [{"size": 7}, {"size": 2}, {"scale_factor": 2.0}, {"scale_factor": 1.7}, {"scale_factor": 0.6}]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "cubic"])
def test_resizing(mode: str, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    names = {"linear": {1: "linear", 2: "bilinear", 3: "trilinear"}, "cubic": {2: "bicubic"}}
    for rank in (1, 2, 3):
        name = names.get(mode, dict.fromkeys((1, 2, 3), mode)).get(rank)
        if name is None:
            continue
        x = make(2, 3, *(5, 4, 3)[:rank], dtype=dtype)
        flags = [{}] if mode.startswith("nearest") else [{"align_corners": False}, {"align_corners": True}]
        for flag in flags:
            near = LOOSE.get(dtype, {"rtol": 1e-4, "atol": 1e-5})
            check(lambda x, flag=flag, name=name: F.interpolate(x, mode=name, **sizes, **flag), x, **near)
    if mode in names and dtype == torch.float32:
        fixed = {"recompute_scale_factor": True} if "scale_factor" in sizes else {}
        check(lambda x: F.interpolate(x, mode="bilinear", **sizes, **fixed), make(2, 3, 5, 4), rtol=1e-4, atol=1e-5)


WINDOWS = [((2, 3), 1, 0, 1), ((2, 3), (2, 1), (1, 2), 2), (3, 1, 1, (1, 3))]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("row", WINDOWS, ids=str)
def test_windows_as_columns(row: Any, dtype: torch.dtype) -> None:
    kernel, dilation, padding, stride = row
    check(lambda x: F.unfold(x, kernel, dilation, padding, stride), make(2, 3, 6, 7, dtype=dtype))
    check(lambda x: F.unfold(x, kernel, dilation, padding, stride), make(3, 6, 7, dtype=dtype, turned=True))
    columns = F.unfold(make(2, 3, 6, 7, dtype=dtype), kernel, dilation, padding, stride)
    check(lambda x: F.fold(x, (6, 7), kernel, dilation, padding, stride), columns, **LOOSE.get(dtype, {}))


def _cleared(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    loss = x.sum()
    loss[flag] = 0.0
    x[flag] = torch.arange(3.0)
    x[flag] += 1
    return loss + x


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_flag_as_index_is_a_mask_over_a_new_dimension(dynamic: bool) -> None:
    for fn in (lambda x, flag: x[flag], lambda x, flag: x.sum()[flag], _cleared):
        compiled = torchsmith.compile(fn, dynamic=dynamic)
        for flag in (torch.tensor(True), torch.tensor(False)):
            mine, theirs = torch.randn(3), torch.zeros(3)
            theirs.copy_(mine)
            with events.recording() as seen:
                got = compiled(mine, flag)
            assert not [e for e in seen if e.kind in ("fallback", "graph_break")]
            torch.testing.assert_close(got, fn(theirs, flag))
            torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_lists_and_tuples_in_an_index_are_what_torch_reads() -> None:
    def fn(x: torch.Tensor, at: torch.Tensor) -> Any:
        y = x.clone()
        y[[[0, 1], [2, 0]]] = 7
        y[(0, 1), (0, 1)] += 1
        y += x[:, (0, 2)].sum() + x[None, ((0, 1), (2, 2))].sum()
        return y, x[[[0, 1]]], x[[[0, 1], [1, 2]]], x[[slice(1, 2), 0]], x[[at, 0]], x[[None, 0]], x[[(0, 1), 1]], x[[[[0]]]], x[[0, 1]]

    x, at = torch.randn(3, 3), torch.tensor([2, 0])
    with events.recording() as seen:
        got = torchsmith.compile(fn)(x, at)
    assert not [e for e in seen if e.kind in ("fallback", "graph_break")]
    torch.testing.assert_close(got, fn(x, at))


# ---------------------------------------------------------------- the same rows, compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_halves_for_one_element_are_added_in_float(dtype: torch.dtype) -> None:
    """What is scattered is rounded once, at the end; as in eager, with positions of 4 bytes every addition is."""
    x, source, at = make(3, 5, dtype=dtype), make(90, 5, dtype=dtype), ints(3, 90)
    wide = at[:, None].expand(90, 5)

    def fn(x: torch.Tensor, s: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.scatter_add(0, w, s), x.scatter_reduce(0, w, s, "sum"), x.index_add(0, i, s), x.scatter_reduce(0, w, s, "mean")

    results = torchsmith.compile(fn)(x, source, at, wide)
    total = x.float().index_add(0, at, source.float()).to(dtype)
    mean = total / (1 + torch.bincount(at, minlength=3)).to(dtype)[:, None]
    for result, want in zip(results, (total, total, total, mean), strict=True):
        torch.testing.assert_close(result, want, rtol=0, atol=0)
    stepwise = torchsmith.compile(lambda x, s, i: x.index_add(0, i, s))(x, source, at.int())
    torch.testing.assert_close(stepwise, x.index_add(0, at.int(), source), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_compiled_indexing(dtype: torch.dtype) -> None:
    cases = [(name, fn, (make(*shape, dtype=dtype), *given)) for name, fn, shape, given in INDEXED]
    cases += [
        (name, fn, (make(*shape, dtype=dtype, turned=True), index, make(*source, dtype=dtype)))
        for name, fn, shape, index, source in SCATTERED
    ]
    check_all(cases, **LOOSE.get(dtype, {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_scans_pads_and_resizing(dtype: torch.dtype) -> None:
    x = make(3, 4, 5, dtype=dtype)
    cases: list[Any] = [(f"{fn.__name__} {dim}", lambda x, fn=fn, dim=dim: fn(x, dim), (x,)) for fn in SCANS for dim in (0, 1, 2)]
    for shape, pad, modes in PADS:
        cases += [(f"pad {mode} {pad}", lambda x, p=pad, m=mode: F.pad(x, p, m), (make(*shape, dtype=dtype),)) for mode in modes]
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        for sizes in SIZES:
            cases.append((f"{mode} {sizes}", lambda x, m=mode, s=sizes: F.interpolate(x, mode=m, **s), (make(2, 3, 5, 4, dtype=dtype),)))
    for kernel, dilation, padding, stride in WINDOWS:
        cases.append(("unfold", lambda x, w=(kernel, dilation, padding, stride): F.unfold(x, *w), (make(2, 3, 6, 7, dtype=dtype),)))
    cases.append(("masked_scatter", lambda x, m, v: x.masked_scatter(m, v), (x, make(3, 4, 5, dtype=torch.bool), make(60, dtype=dtype))))
    check_all(cases, **LOOSE.get(dtype, {"rtol": 1e-4, "atol": 1e-5}))
