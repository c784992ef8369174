"""Complex arithmetic on pairs of real values. In: Pairs, complex memory, real Refs, numbers; out: Pairs, or real Refs.

No expression has a complex dtype: what is computed is the real and the imaginary part. Operators without a row here are extern calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..ir.expr import Const, Expr, op, select
from .core import Builder
from .numerics import cast
from .pairs import PARTS, TWO, interleaved, pair_of, split
from .reduce import Split, accumulator, split_of, total
from .ref import Index, Pair, Ref
from .table import lowers_pairs

Parts = tuple[Expr, Expr]


# ---------------------------------------------------------------- rows
def elementwise(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A row for operators on elements: fn(parts of each operand) gives the parts of the result, or one real value."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        def rule(cx: Builder, *args: Any) -> Any:
            kinds = [a.dtype for a in args if isinstance(a, (Pair, Ref)) and a.dtype in PARTS]
            d = cx.dtype if cx.dtype in PARTS else next(iter(kinds), None)
            pairs = [pair_of(cx, a, d) for a in args] if d is not None else [None]
            if any(p is None for p in pairs):
                return NotImplemented
            given: list[Pair] = [p for p in pairs if p is not None]

            def at(i: Index) -> Any:
                return fn(*((p.re.at(i), p.im.at(i)) for p in given))

            if cx.dtype not in PARTS:
                return cx.stage(lambda i: cast(at(i), cx.dtype)) if cx.dtype.kind != "opaque" else NotImplemented
            part = PARTS[cx.dtype]
            return Pair(cx.dtype, Ref(part, cx.shape, lambda i: at(i)[0]), Ref(part, cx.shape, lambda i: at(i)[1]))

        lowers_pairs(*names)(rule)
        return fn

    return add


@elementwise("aten.neg.default")
def neg(z: Parts) -> Parts:
    return op("neg", z[0]), op("neg", z[1])


@elementwise("aten._conj.default", "aten._conj_physical.default", "aten.conj_physical.default")
def conj(z: Parts) -> Parts:
    return z[0], op("neg", z[1])


def times(a: Parts, b: Parts) -> Parts:
    re = op("sub", op("mul", a[0], b[0]), op("mul", a[1], b[1]))
    return re, op("add", op("mul", a[0], b[1]), op("mul", a[1], b[0]))


@elementwise("aten.mul.Tensor", "aten.mul.Scalar")
def mul(a: Parts, b: Parts) -> Parts:
    return times(a, b)


@elementwise("aten.div.Tensor", "aten.div.Scalar")
def div(a: Parts, b: Parts) -> Parts:
    """Smith's method, as torch has it: by the divisor's larger part, and by its smaller one over that."""
    first = op("ge", op("abs", b[0]), op("abs", b[1]))
    large, small = select(first, b[0], b[1]), select(first, b[1], b[0])
    ratio = op("div", small, large)
    scale = op("div", Const(large.dtype, 1.0), op("add", large, op("mul", small, ratio)))
    re = select(first, op("add", a[0], op("mul", a[1], ratio)), op("add", op("mul", a[0], ratio), a[1]))
    im = select(first, op("sub", a[1], op("mul", a[0], ratio)), op("sub", op("mul", a[1], ratio), a[0]))
    zero = op("and", first, op("eq", large, Const(large.dtype, 0.0)))
    return tuple(select(zero, op("div", x, op("abs", large)), op("mul", y, scale)) for x, y in zip(a, (re, im), strict=True))  # type: ignore[return-value]


def _sum(name: str) -> Callable[[Parts, Parts, Parts], Parts]:
    def parts(a: Parts, b: Parts, alpha: Parts) -> Parts:
        scaled = times(b, alpha)  # by 1, too, as eager does: of infinite parts the others become NaN
        return op(name, a[0], scaled[0]), op(name, a[1], scaled[1])

    return parts


for _name in ("add", "sub"):
    elementwise(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_sum(_name))


@elementwise("aten.rsub.Scalar", "aten.rsub.Tensor")
def rsub(a: Parts, b: Parts, alpha: Parts) -> Parts:
    return _sum("sub")(b, a, alpha)


@elementwise("aten.abs.default")
def magnitude(z: Parts) -> Expr:
    return op("hypot", z[0], z[1])


@elementwise("aten.angle.default")
def angle(z: Parts) -> Expr:
    return op("atan2", z[1], z[0])


@elementwise("aten.exp.default")
def exp(z: Parts) -> Parts:
    """Of infinite parts as the C library has it: no direction turns an infinite or no length into NaN, and the real axis stays real."""
    size, zero = op("exp", z[0]), Const(z[1].dtype, 0.0)
    lost = op("or", op("isnan", z[1]), op("isinf", z[1]))
    no_length = op("and", lost, op("eq", z[0], Const(z[0].dtype, -math.inf)))
    re = select(op("and", lost, op("isinf", z[0])), size, op("mul", size, op("cos", z[1])))
    im = select(no_length, zero, op("mul", size, op("sin", z[1])))
    return re, select(op("eq", z[1], zero), z[1], im)


@elementwise("aten.polar.default")
def polar(size: Parts, turn: Parts) -> Parts:
    return op("mul", size[0], op("cos", turn[0])), op("mul", size[0], op("sin", turn[0]))


@elementwise("aten.complex.default")
def complex_of(re: Parts, im: Parts) -> Parts:
    return re[0], im[0]


@lowers_pairs("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def view_as_complex(cx: Builder, x: Any) -> Any:
    if not isinstance(x, Ref) or cx.dtype not in PARTS:
        return NotImplemented
    return split(cx.dtype, x)


@lowers_pairs("aten.view_as_real.default", "aten.view_as_real_copy.default")
def view_as_real(cx: Builder, z: Any) -> Any:
    pair = pair_of(cx, z, z.dtype) if z.dtype in PARTS else None
    return NotImplemented if pair is None else Ref(PARTS[pair.dtype], (*pair.shape, TWO), lambda i: interleaved(pair, i))


@lowers_pairs("aten._to_copy.default", "aten.clone.default")
def to_copy(cx: Builder, x: Any, *_: Any) -> Any:
    pair = pair_of(cx, x, cx.dtype) if cx.dtype in PARTS else None
    return NotImplemented if pair is None else pair


@lowers_pairs("aten.sum.default", "aten.mean.default")
def sum_of_all(cx: Builder, z: Any, dtype: Any = None) -> Any:
    return sum_of(cx, z)


@lowers_pairs("aten.sum.dim_IntList", "aten.mean.dim")
def sum_of(cx: Builder, z: Any, dims: Any = None, keep: bool = False, dtype: Any = None) -> Any:
    pair = pair_of(cx, z, cx.dtype) if cx.dtype in PARTS and z.dtype in PARTS else None
    if pair is None:
        return NotImplemented
    part, is_mean = PARTS[cx.dtype], cx.origin.startswith("aten.mean")
    how: Split = split_of(pair.re, dims, keep)
    acc = accumulator(part, how)

    def part_of(r: Ref) -> Ref:
        at = total(cx, how, lambda i: cast(r.load(i), acc), acc)
        return cx.stage(lambda i: cast(at(i), part), cx.shape, part)

    re, im = part_of(pair.re), part_of(pair.im)
    if not is_mean:
        return Pair(cx.dtype, re, im)

    def mean(i: Index) -> Parts:
        return div((re.at(i), im.at(i)), (cast(how.count, part), Const(part, 0.0)))

    return Pair(cx.dtype, Ref(part, cx.shape, lambda i: mean(i)[0]), Ref(part, cx.shape, lambda i: mean(i)[1]))
