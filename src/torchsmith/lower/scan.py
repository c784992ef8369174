"""Running sums, products, extremes along one dimension. In: a Ref and a dimension; out: one scan stage for all results.

Accumulation is in the dtype that eager uses: float64 for float32, float32 for the half formats, int64 for integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, Var, convert, op, select
from ..ir.program import Stage, Store
from .cat import masked
from .core import Builder
from .numerics import boolean, cast, highest, ir_dtype, lowest
from .ref import Index, Ref, product
from .table import lowers
from .views import reshape, wrap_dim

State = tuple[Expr, ...]


def scan(
    cx: Builder,
    names: Sequence[str],
    dim: int,
    init: Sequence[Expr],
    step: Callable[[Index, State], Sequence[Expr]],
) -> None:
    """Fill the buffers `names`, all of one shape: state' = step(index, state) in order along `dim`; buffer k takes state'[k]."""
    shape = cx.buffers[names[0]].shape
    axes = cx.axes(shape)
    order = [d for d in range(len(shape)) if d != dim] + [dim]
    number = cx.count
    cx.count += 1
    state = tuple(Var(f"s{number}_{k}", e.dtype) for k, e in enumerate(init))
    after = tuple(step(axes, state))
    stores = tuple(Store(name, axes, cast(after[k], cx.buffers[name].dtype)) for k, name in enumerate(names))
    bound = tuple((axes[d], shape[d]) for d in order)
    cx.body.append(
        Stage(bound, stores, scan=True, carry=tuple(zip(state, init, strict=True)), carry_next=after, loc=cx.loc, origin=cx.origin)
    )


def _accumulator(d: DType) -> DType:
    if d is dt.f32:
        return dt.f64
    return dt.f32 if d in dt.HALF else d if d.is_float else dt.i64


def _running(cx: Builder, x: Ref, dim: int, start: float, combine: Callable[[Expr, Expr], Expr]) -> Any:
    d = cx.dtype
    acc = _accumulator(d)
    if x.rank == 0:
        return cx.stage(lambda i: cast(x.load(()), d))
    name = cx.buffer(d, x.shape, cx.out.strides)
    scan(cx, [name], wrap_dim(dim, x.rank), [Const(acc, start)], lambda i, s: [combine(s[0], cast(cast(x.load(i), d), acc))])
    return cx.ref(name)


@lowers("aten.cumsum.default")
def lower_cumsum(cx: Builder, x: Ref, dim: int, dtype: Any = None) -> Any:
    return _running(cx, x, dim, 0, lambda a, e: op("add", a, e))


@lowers("aten.cumprod.default")
def lower_cumprod(cx: Builder, x: Ref, dim: int, dtype: Any = None) -> Any:
    return _running(cx, x, dim, 1, lambda a, e: op("mul", a, e))


@lowers("aten.logcumsumexp.default")
def lower_logcumsumexp(cx: Builder, x: Ref, dim: int) -> Any:
    if not x.dtype.is_float:
        return NotImplemented

    def combine(a: Expr, e: Expr) -> Expr:
        low, high = op("min", a, e), op("max", a, e)
        same = op("and", op("eq", low, high), op("isinf", low))  # two equal infinities: their difference would be NaN
        return select(same, e, op("add", op("log1p", op("exp", op("sub", low, high))), high))

    return _running(cx, x, dim, -math.inf, combine)


def _extreme(cx: Builder, x: Ref, dim: int, name: str) -> tuple[Ref, ...]:
    """(running extreme, where it was last met); a NaN stays."""
    values, indices = cx.spec
    if x.rank == 0:
        return cx.stages(lambda i: x.load(()), lambda i: Const(dt.i64, 0))
    d = dt.u8 if x.dtype is dt.bool_ else x.dtype
    dim = wrap_dim(dim, x.rank)
    names = [cx.buffer(x.dtype, x.shape, values.strides), cx.buffer(ir_dtype(indices.dtype), x.shape, indices.strides)]
    first = lowest(d) if name == "ge" else highest(d)

    def step(i: Index, s: State) -> list[Expr]:
        e = cast(x.load(i), d)
        take = op(name, e, s[0])
        if d.is_float:
            take = op("or", op("isnan", e), op("and", op("not", op("isnan", s[0])), take))
        return [select(take, e, s[0]), select(take, convert(i[dim], dt.i64), s[1])]

    scan(cx, names, dim, [first, Const(dt.i64, 0)], step)
    return tuple(cx.ref(n) for n in names)


@lowers("aten.cummax.default")
def lower_cummax(cx: Builder, x: Ref, dim: int) -> tuple[Ref, ...]:
    return _extreme(cx, x, dim, "ge")


@lowers("aten.cummin.default")
def lower_cummin(cx: Builder, x: Ref, dim: int) -> tuple[Ref, ...]:
    return _extreme(cx, x, dim, "le")


@lowers("aten.masked_scatter.default")
def lower_masked_scatter(cx: Builder, x: Ref, mask: Ref, source: Ref) -> Any:
    """The k-th true element takes the k-th element of `source`."""
    n = product(cx.shape)
    wide = reshape(Ref(dt.bool_, cx.shape, lambda i: boolean(mask.at(i))), (n,))
    flat = reshape(source, (product(source.shape),))
    count = cx.buffer(dt.i64, (n,))
    scan(cx, [count], 0, [Const(dt.i64, 0)], lambda i, s: [op("add", s[0], cast(wide.load(i), dt.i64))])
    number = reshape(cx.ref(count), cx.shape)
    limit = convert(flat.shape[0], dt.i64)
    message = "masked_scatter: expected self and source to have same dtypes but mask selects more elements than source has"
    cx.check_none((n,), lambda i: op("gt", cx.ref(count).load(i), limit), "RuntimeError", message)

    def at(i: Index) -> Expr:
        return masked(flat, (convert(number.load(i), dt.index) - 1,), boolean(mask.at(i)), x.at(i))

    return cx.stage(at)
