"""Tensors made from numbers: full, arange, eye, ... In: numbers and the node's spec; out: one stage of the index alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, convert, op, select
from .core import Builder
from .numerics import cast, scalar
from .ref import Index, Ref, known
from .table import lowers


def filled(cx: Builder, value: Any) -> Ref:
    d = cx.dtype
    return cx.stage(lambda i: scalar(value, d))


@lowers("aten.full.default")
def lower_full(cx: Builder, shape: Any, value: Any, *_: Any) -> Ref:
    return filled(cx, value)


@lowers("aten.full_like.default", "aten.new_full.default", "aten.fill.Scalar")
def lower_full_like(cx: Builder, x: Ref, *rest: Any) -> Ref:
    return filled(cx, rest[0] if not isinstance(rest[0], (tuple, list)) else rest[1])


@lowers("aten.fill.Tensor")
def lower_fill(cx: Builder, x: Ref, value: Ref) -> Ref:
    d = cx.dtype
    return cx.stage(lambda i: cast(value.at(()), d))


@lowers(
    "aten.zeros.default",
    "aten.zeros_like.default",
    "aten.new_zeros.default",
    "aten.zero.default",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.new_empty.default",
    "aten.empty_strided.default",
    "aten.new_empty_strided.default",
    "aten.empty_permuted.default",
    "aten._efficientzerotensor.default",
)
def lower_zeros(cx: Builder, *_: Any) -> Ref:
    """What empty tensors hold is not defined; zeros are the reproducible choice."""
    return filled(cx, 0)


@lowers("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def lower_ones(cx: Builder, *_: Any) -> Ref:
    return filled(cx, 1)


@lowers("aten.scalar_tensor.default")
def lower_scalar_tensor(cx: Builder, value: Any, *_: Any) -> Ref:
    return filled(cx, value)


@lowers("aten.arange.default")
def lower_arange(cx: Builder, end: Any, *_: Any) -> Any:
    return sequence(cx, 0, 1)


@lowers("aten.arange.start")
def lower_arange_start(cx: Builder, start: Any, end: Any, *_: Any) -> Any:
    return sequence(cx, start, 1)


@lowers("aten.arange.start_step")
def lower_arange_step(cx: Builder, start: Any, end: Any, step: Any = 1, *_: Any) -> Any:
    return sequence(cx, start, step)


def sequence(cx: Builder, start: Any, step: Any) -> Any:
    """start + i * step, in float64 or int64 as eager accumulates it."""
    d = cx.dtype
    acc = (dt.f64 if d is dt.f64 else dt.f32) if d.is_float else dt.i64
    if d.is_float:
        acc = dt.f64  # eager computes float sequences in double

    def at(i: Index) -> Expr:
        n = cast(convert(i[0], dt.i64), acc)
        return cast(op("add", scalar(start, acc), op("mul", n, scalar(step, acc))), d)

    return cx.stage(at)


@lowers("aten.eye.default", "aten.eye.m")
def lower_eye(cx: Builder, *_: Any) -> Ref:
    d = cx.dtype
    return cx.stage(lambda i: select(op("eq", i[0], i[1]), scalar(1, d), scalar(0, d)))


def _spaced(cx: Builder, start: Any, end: Any, steps: Any, of: Callable[[Expr], Expr]) -> Any:
    """`of` evenly spaced numbers. Both halves count from their own end, so that the last element is exact."""
    d = cx.dtype
    if not d.is_float or d in dt.HALF:
        return NotImplemented
    n, first, end = scalar(steps, dt.index), scalar(start, d), scalar(end, d)
    if known(steps) == 1:
        return cx.stage(lambda i: of(first))

    def number(e: Expr) -> Expr:
        return cast(convert(e, dt.i64), d)

    last = n - Const(dt.index, 1)
    by = op("div", op("sub", end, first), number(last))

    def at(i: Index) -> Expr:
        low = op("add", first, op("mul", by, number(i[0])))
        high = op("sub", end, op("mul", by, number(last - i[0])))
        value = select(op("lt", i[0], op("floordiv", n, Const(dt.index, 2))), low, high)
        return of(value if known(steps) is not None else select(op("eq", n, Const(dt.index, 1)), first, value))

    return cx.stage(at)


@lowers("aten.linspace.default")
def lower_linspace(cx: Builder, start: Any, end: Any, steps: Any, *_: Any) -> Any:
    return _spaced(cx, start, end, steps, lambda e: e)


@lowers("aten.logspace.default")
def lower_logspace(cx: Builder, start: Any, end: Any, steps: Any, base: Any = 10.0, *_: Any) -> Any:
    return _spaced(cx, start, end, steps, lambda e: op("pow", scalar(base, cx.dtype), e))


def _triangle(cx: Builder, x: Ref, test: str, diagonal: int) -> Ref:
    d = x.dtype
    zero = scalar(0, d)
    return cx.stage(lambda i: select(op(test, i[-1] - i[-2], scalar(diagonal, dt.index)), x.load(i), zero))


@lowers("aten.tril.default")
def lower_tril(cx: Builder, x: Ref, diagonal: int = 0) -> Ref:
    return _triangle(cx, x, "le", diagonal)


@lowers("aten.triu.default")
def lower_triu(cx: Builder, x: Ref, diagonal: int = 0) -> Ref:
    return _triangle(cx, x, "ge", diagonal)
