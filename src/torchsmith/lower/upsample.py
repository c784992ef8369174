"""Resizing by interpolation: nearest, linear, cubic, in one to three dimensions. In: a Ref; out: one stage of weighted loads.

Source positions are computed in the dtype and the order of operations of eager's CPU kernels, since a floor depends on the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, convert, op, select
from ..ir.rules import round_to
from .core import Builder
from .numerics import cast, opmath
from .ref import ZERO, Index, Ref, known, size
from .table import lowers

Taps = list[tuple[Expr, Expr]]  # (source index, weight) along one dimension


def _scales(spec: Any, rank: int) -> list[float | None]:
    """One scale factor (or None) for each spatial dimension."""
    listed = [v for v in spec if not isinstance(v, Ref)]
    if len(listed) == 1 and isinstance(listed[0], (tuple, list)):
        listed = list(listed[0])
    listed = [float(v) if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0 else None for v in listed]
    return listed if len(listed) == rank else [None] * rank


def _sizes(x: Ref, cx: Builder, rank: int) -> list[tuple[Expr, Expr]]:
    """(size, result size) of each spatial dimension."""
    return list(zip(x.shape[-rank:], cx.shape[-rank:], strict=True))


def _ratio(n: Expr, m: Expr, scale: float | None, align: bool, d: DType) -> Expr:
    """How far the source moves from one element of the result to the next."""
    a, b = known(n), known(m)
    if align:
        if a is not None and b is not None:
            return Const(d, round_to(d, (a - 1) / (b - 1)) if b > 1 else 0.0)
        steps = convert(op("max", m - 1, size(1)), d)
        return op("where", op("gt", m, size(1)), op("div", convert(n - 1, d), steps), Const(d, 0.0))
    if scale is not None:
        return Const(d, round_to(d, 1.0 / scale))
    if a is not None and b is not None:
        return Const(d, round_to(d, round_to(d, a) / b))
    return op("div", convert(n, d), convert(m, d))


# ---------------------------------------------------------------- nearest
def _nearest_index(o: Expr, n: Expr, m: Expr, scale: float | None, exact: bool, whole: bool) -> Expr:
    """The source of result element o: floor(o * n/m), or of its centre; in float32, as eager computes it.

    whole: sizes that are equal, or doubled, decide against the scale (in two dimensions, as eager has it)."""
    whole = whole or scale is None
    if n is m and (scale is None or (whole and not exact)):
        return o
    a, b = known(n), known(m)
    if a is not None and b is not None:
        found = _nearest_whole(o, a, b, scale, exact, whole)
        if found is not None:
            return found
    elif scale is not None and whole and not exact:
        scaled = _nearest_index(o, n, m, scale, exact, False)
        return select(op("eq", n, m), o, select(op("eq", m, n * 2), o // 2, scaled))
    elif not exact and (by := known(m // n)) is not None and (scale is None or scale == by):
        return o // by
    at: Expr = convert(o, dt.f32)
    if exact:
        at = op("add", at, Const(dt.f32, 0.5))
    return op("min", convert(op("floor", op("mul", at, _ratio(n, m, scale, False, dt.f32))), dt.index), n - 1)


def _nearest_whole(o: Expr, n: int, m: int, scale: float | None, exact: bool, whole: bool) -> Expr | None:
    """The same in whole numbers, where that gives the same for every element."""
    if m == 2 * n and not exact and whole:
        return o // 2
    ratio = round_to(dt.f32, 1.0 / scale if scale is not None else round_to(dt.f32, n) / m)
    plain = [min(int(round_to(dt.f32, (k + 0.5 if exact else k) * ratio)), n - 1) for k in range(m)]
    if not exact and plain == [k * n // m for k in range(m)]:
        return o * n // size(m)
    if exact and plain == [((2 * k + 1) * n) // (2 * m) for k in range(m)]:
        return (o * (2 * n) + n) // size(2 * m)
    return None


def _nearest(rank: int, exact: bool) -> Any:
    def rule(cx: Builder, x: Ref, output_size: Any, *scales: Any) -> Any:
        sizes, factors = _sizes(x, cx, rank), _scales(scales, rank)

        def at(i: Index) -> Expr:
            place = [_nearest_index(o, n, m, f, exact, rank == 2) for o, (n, m), f in zip(i[-rank:], sizes, factors, strict=True)]
            return x.load((*i[:-rank], *place))

        return cx.stage(at)

    return rule


for _rank in (1, 2, 3):
    lowers(f"aten.upsample_nearest{_rank}d.default", f"aten.upsample_nearest{_rank}d.vec")(_nearest(_rank, False))
    lowers(f"aten._upsample_nearest_exact{_rank}d.default", f"aten._upsample_nearest_exact{_rank}d.vec")(_nearest(_rank, True))


# ---------------------------------------------------------------- linear and cubic
def _position(o: Expr, n: Expr, m: Expr, scale: float | None, align: bool, d: DType, clip: bool) -> Expr:
    """The real source position of result element o."""
    at, ratio = convert(o, d), _ratio(n, m, scale, align, d)
    if align:
        return op("mul", at, ratio)
    moved = op("sub", op("mul", ratio, op("add", at, Const(d, 0.5))), Const(d, 0.5))
    return op("max", moved, Const(d, 0.0)) if clip else moved


def _linear_taps(o: Expr, n: Expr, m: Expr, scale: float | None, align: bool, d: DType) -> Taps:
    one = Const(d, 1.0)
    if n is m:  # the element and nothing of itself: infinities are NaN, as in eager
        return [(o, one), (o, Const(d, 0.0))]
    at = _position(o, n, m, scale, align, d, True)
    if scale is not None and not align and (known(n) is None or known(m) is None):
        at = select(op("eq", n, m), convert(o, d), at)  # equal sizes are a copy, whatever the scale
    low = op("min", convert(op("floor", at), dt.index), n - 1)
    high = op("min", low + 1, n - 1)
    if known(n) is None or known(m) is None:
        high = select(op("eq", n, m), low, high)
    part = op("min", op("max", op("sub", at, convert(low, d)), Const(d, 0.0)), one)
    return [(low, op("sub", one, part)), (high, part)]


def cubic_weights(t: Expr, d: DType) -> list[Expr]:
    """Weights of the four neighbours at distances 1+t, t, 1-t, 2-t: cubic convolution with a = -0.75."""

    def c(v: float) -> Expr:
        return Const(d, v)

    def near(x: Expr) -> Expr:  # ((a+2) x - (a+3)) x x + 1
        return op("add", op("mul", op("mul", op("sub", op("mul", c(1.25), x), c(2.25)), x), x), c(1.0))

    def far(x: Expr) -> Expr:  # ((a x - 5a) x + 8a) x - 4a
        inner = op("add", op("mul", op("sub", op("mul", c(-0.75), x), c(-3.75)), x), c(-6.0))
        return op("sub", op("mul", inner, x), c(-3.0))

    rest = op("sub", c(1.0), t)
    return [far(op("add", t, c(1.0))), near(t), near(rest), far(op("add", rest, c(1.0)))]


def _cubic_taps(o: Expr, n: Expr, m: Expr, scale: float | None, align: bool, d: DType) -> Taps:
    at = _position(o, n, m, scale, align, d, False)
    floor = op("floor", at)
    first = op("max", op("min", convert(floor, dt.index), n + 2), size(-3))  # changes no tap: with bounds, the index is a narrow one
    weights = cubic_weights(op("sub", at, floor), d)
    return [(op("max", op("min", first + (k - 1), n - 1), ZERO), w) for k, w in enumerate(weights)]


def weighted(x: Ref, lead: Index, taps: Sequence[Taps], d: DType) -> Expr:
    """Sum over all combinations of taps, the last dimension innermost."""
    if not taps:
        return cast(x.load(lead), d)
    total: Expr | None = None
    for place, weight in taps[0]:
        part = weighted(x, (*lead, place), taps[1:], d)
        if len(taps[0]) == 1:
            return part
        part = op("mul", weight, part)
        total = part if total is None else op("add", total, part)
    assert total is not None
    return total


def _smooth(rank: int, how: Any) -> Any:
    def rule(cx: Builder, x: Ref, output_size: Any, align: bool = False, *scales: Any) -> Any:
        if not x.dtype.is_float:
            return NotImplemented
        sizes, factors, d = _sizes(x, cx, rank), _scales(scales, rank), opmath(x.dtype)

        def at(i: Index) -> Expr:
            taps = [how(o, n, m, f, align, d) for o, (n, m), f in zip(i[-rank:], sizes, factors, strict=True)]
            return cast(weighted(x, i[:-rank], taps, d), x.dtype)

        return cx.stage(at)

    return rule


lowers("aten.upsample_linear1d.default", "aten.upsample_linear1d.vec")(_smooth(1, _linear_taps))
lowers("aten.upsample_bilinear2d.default", "aten.upsample_bilinear2d.vec")(_smooth(2, _linear_taps))
lowers("aten.upsample_trilinear3d.default", "aten.upsample_trilinear3d.vec")(_smooth(3, _linear_taps))
lowers("aten.upsample_bicubic2d.default", "aten.upsample_bicubic2d.vec")(_smooth(2, _cubic_taps))


# ---------------------------------------------------------------- with antialiasing
def _triangle(t: Expr, d: DType) -> Expr:
    return op("max", op("sub", Const(d, 1.0), op("abs", t)), Const(d, 0.0))


def _smooth_cubic(t: Expr, d: DType) -> Expr:
    """Cubic convolution with a = -0.5."""

    def c(v: float) -> Expr:
        return Const(d, v)

    x = op("abs", t)
    near = op("add", op("mul", op("mul", op("sub", op("mul", c(1.5), x), c(2.5)), x), x), c(1.0))
    far = op("mul", op("sub", op("mul", op("add", op("mul", op("sub", x, c(5.0)), x), c(8.0)), x), c(4.0)), c(-0.5))
    return select(op("lt", x, c(1.0)), near, select(op("lt", x, c(2.0)), far, c(0.0)))


def _averaged(cx: Builder, x: Ref, axis: int, m: Expr, scale: float | None, align: bool, kernel: Any, reach: float) -> Ref | None:
    """`x` resized to `m` along `axis`: the mean by weight of those that the widened kernel covers. None where sizes are symbolic."""
    n, d = x.shape[axis], opmath(x.dtype)
    ratio = _ratio(n, m, scale, align, d)
    if not isinstance(ratio, Const) or not isinstance(n, Const):
        return None
    wide = max(float(ratio.value), 1.0)
    support, inverse = Const(d, round_to(d, reach * wide)), Const(d, round_to(d, 1.0 / wide))
    half, longest = Const(d, 0.5), math.ceil(reach * wide) * 2 + 1

    def at(i: Index) -> Expr:
        center = op("mul", ratio, op("add", convert(i[axis], d), half))

        def bound(e: Expr) -> Expr:
            return op("max", convert(op("trunc", op("add", e, half)), dt.index), ZERO)

        first = bound(op("sub", center, support))
        count = op("min", bound(op("add", center, support)), n) - first

        def step(k: Index, s: tuple[Expr, ...]) -> list[Expr]:
            place = first + k[0]
            away = op("add", op("sub", convert(place, d), center), half)
            weight = select(op("lt", k[0], count), kernel(op("mul", away, inverse), d), Const(d, 0.0))
            value = cast(x.load((*i[:axis], op("min", place, n - 1), *i[axis + 1 :])), d)
            return [op("add", s[0], op("mul", weight, value)), op("add", s[1], weight)]

        zero = Const(d, 0.0)
        found = cx.fold([size(longest)], [zero, zero], step, lambda a, b: [op("add", p, q) for p, q in zip(a, b, strict=True)])
        total, weights = found.picking(0), found.picking(1)
        mean = op("div", total, select(op("eq", weights, zero), Const(d, 1.0), weights))  # odd scales reach no element of weight
        return cast(mean, x.dtype)

    return cx.stage(at, (*x.shape[:axis], m, *x.shape[axis + 1 :]), x.dtype)


def _antialiased(kernel: Any, reach: float) -> Any:
    def rule(cx: Builder, x: Ref, output_size: Any, align: bool, *scales: Any) -> Any:
        if not x.dtype.is_float or align or not cx.is_ours(cx.shape):
            return NotImplemented
        factors = _scales(scales, 2)
        rows = _averaged(cx, x, x.rank - 1, cx.shape[-1], factors[1], align, kernel, reach)
        done = rows and _averaged(cx, rows, x.rank - 2, cx.shape[-2], factors[0], align, kernel, reach)
        return NotImplemented if done is None else cx.stage(done.load)

    return rule


lowers("aten._upsample_bilinear2d_aa.default", "aten._upsample_bilinear2d_aa.vec")(_antialiased(_triangle, 1.0))
lowers("aten._upsample_bicubic2d_aa.default", "aten._upsample_bicubic2d_aa.vec")(_antialiased(_smooth_cubic, 2.0))
