"""Small products that are cheap as plain loops: dot, matrix times vector, outer products, trace, cross. In: Refs; out: one stage.

Matrix products and convolutions have a file of their own (contraction.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, convert, op, select
from .core import Builder
from .loss import broadcast_shape
from .numerics import cast, held, opmath, rounded_to, scalar
from .reduce import Split, accumulator, norm_of, total
from .ref import ONE, Index, Ref, known, product
from .search import position
from .table import lowers, lowers_foreign
from .views import diagonal, wrap_dim, wrap_dims


@lowers("aten.dot.default", "aten.vdot.default")
def lower_dot(cx: Builder, x: Ref, y: Ref) -> Any:
    d = cx.dtype
    how = Split(x.shape, (0,), False)
    acc = accumulator(d, how)
    at = total(cx, how, lambda i: op("mul", cast(x.load(i), acc), cast(y.load(i), acc)), acc)
    return cx.stage(lambda i: cast(at(i), d))


def _times_vector(cx: Builder, x: Ref, y: Ref) -> Any:
    """index -> the row's product with y, in the accumulator's dtype."""
    how = Split(x.shape, (1,), False)
    acc = accumulator(cx.dtype, how)
    return total(cx, how, lambda i: op("mul", cast(x.load(i), acc), cast(y.load((i[1],)), acc)), acc)


@lowers("aten.mv.default")
def lower_mv(cx: Builder, x: Ref, y: Ref) -> Any:
    d = cx.dtype
    at = _times_vector(cx, x, y)
    return cx.stage(lambda i: cast(at(i), d))


@lowers("aten.addmv.default")
def lower_addmv(cx: Builder, x: Ref, a: Ref, b: Ref, beta: Any = 1, alpha: Any = 1) -> Any:
    d = cx.dtype
    at = _times_vector(cx, a, b)

    def value(i: Index) -> Expr:
        product = at(i)
        product = op("mul", product, scalar(alpha, product.dtype)) if alpha != 1 else product
        if beta == 0:  # a beta of 0 hides what x holds, NaN too
            return cast(product, d)
        return cast(op("add", op("mul", cast(x.at(i), product.dtype), scalar(beta, product.dtype)), product), d)

    return cx.stage(value)


@lowers("aten.addr.default")
def lower_addr(cx: Builder, x: Ref, a: Ref, b: Ref, beta: Any = 1, alpha: Any = 1) -> Any:
    d = cx.dtype
    if d.kind == "bool":
        return NotImplemented
    compute = opmath(d)

    def value(i: Index) -> Expr:
        left = rounded_to(op("mul", scalar(alpha, compute), cast(a.load((i[0],)), compute)), d)
        outer = rounded_to(op("mul", left, cast(b.load((i[1],)), compute)), d)
        if beta == 0:
            return cast(outer, d)
        return cast(op("add", rounded_to(op("mul", scalar(beta, compute), cast(x.at(i), compute)), d), outer), d)

    return cx.stage(value)


@lowers("aten.trace.default")
def lower_trace(cx: Builder, x: Ref) -> Any:
    d = cx.dtype
    along = diagonal(x, 0, 0, 1, op("min", x.shape[0], x.shape[1]))
    how = Split(along.shape, (0,), False)
    acc = accumulator(d, how)
    at = total(cx, how, lambda i: cast(along.load(i), acc), acc)
    return cx.stage(lambda i: cast(at(i), d))


@lowers("aten.linalg_cross.default")
def lower_cross(cx: Builder, x: Ref, y: Ref, dim: int = -1) -> Any:
    d = cx.dtype
    compute = opmath(d)
    dim = wrap_dim(dim, len(cx.shape))

    def value(i: Index) -> Expr:
        def read(ref: Ref, turn: int) -> Expr:
            return cast(ref.at((*i[:dim], (i[dim] + turn) % 3, *i[dim + 1 :])), compute)

        first = rounded_to(op("mul", read(x, 1), read(y, 2)), d)
        return cast(op("sub", first, rounded_to(op("mul", read(x, 2), read(y, 1)), d)), d)

    return cx.stage(value)


@lowers("aten.dist.default")
def lower_dist(cx: Builder, x: Ref, y: Ref, order: Any = 2) -> Any:
    from_shape = broadcast_shape(x, y)
    d = cx.dtype
    compute = opmath(d)

    def difference(i: Index) -> Expr:
        return cast(op("sub", cast(x.at(i), compute), cast(y.at(i), compute)), d)

    return norm_of(cx, Ref(d, from_shape, difference), float(order), None, False)


MANY = 25  # rows beyond which eager takes the square of a distance from a matrix product


@lowers("aten._cdist_forward.default")
def lower_cdist(cx: Builder, x: Ref, y: Ref, order: float, mode: Any = None) -> Any:
    """(.., p, m) and (.., r, m) -> (.., p, r): norms of differences of rows."""
    rows = [known(x.shape[-2]), known(y.shape[-2])]
    if order == 2 and mode != 2 and (mode == 1 or any(n is None or n > MANY for n in rows)):
        return NotImplemented
    d, order = cx.dtype, held(order, cx.dtype)
    shape = (*cx.shape, x.shape[-1])

    def difference(i: Index) -> Expr:
        e = op("sub", x.at((*i[:-2], i[-1])), y.at((*i[:-3], *i[-2:])))
        if order == math.inf:  # eager's maximum passes NaN over
            return select(op("isnan", e), Const(d, 0.0), e)
        if order == 0:  # and its count is NaN
            return select(op("isnan", e), e, select(op("eq", e, Const(d, 0.0)), e, Const(d, 1.0)))
        return e

    return norm_of(cx, Ref(d, shape, difference), float(order) or 1.0, (len(shape) - 1,), False)


@lowers("aten._trilinear.default")
def lower_trilinear(
    cx: Builder, x: Ref, y: Ref, z: Ref, new_x: Sequence[int], new_y: Sequence[int], new_z: Sequence[int], dims: Sequence[int], _: int = 1
) -> Any:
    """The sum over `dims` of x * y * z, each with new dimensions of size 1 at the places named."""
    rank = x.rank + len(new_x)

    def widened(ref: Ref, new: Sequence[int]) -> Ref:
        places = wrap_dims(new, rank) if new else ()
        old = [k for k in range(rank) if k not in places]
        shape: list[Expr] = [ONE] * rank
        for k, n in zip(old, ref.shape, strict=True):
            shape[k] = n
        return ref.remap(shape, lambda i: [i[k] for k in old])

    parts = [widened(r, n) for r, n in ((x, new_x), (y, new_y), (z, new_z))]
    d = cx.dtype
    compute = opmath(d)
    how = Split(broadcast_shape(*parts), wrap_dims(dims, rank), False)
    if not cx.is_ours(how.shape):
        return NotImplemented

    def term(i: Index) -> Expr:
        a, b, c = (cast(p.at(i), compute) for p in parts)
        return op("mul", op("mul", a, c), b)

    at = total(cx, how, term, accumulator(d, how))
    return cx.stage(lambda i: cast(at(i), d))


GATHERED = 1 << 18  # products of numbers for which a plain loop, whose rows find their matrix by an index, is as fast as a call into torch


@lowers("aten._grouped_mm.default")
@lowers_foreign("transformers.grouped_mm_fallback.default")
def lower_grouped_mm(cx: Builder, x: Ref, weight: Ref, ends: Ref | None = None, bias: Ref | None = None, dtype: Any = None) -> Any:
    """(s, k) times (groups, k, n) -> (s, n): rows below ends[0] take the first matrix, below ends[1] the second, ..; rows behind are 0."""
    if ends is None or bias is not None or dtype is not None or x.rank != 2 or weight.rank != 3:
        return NotImplemented
    work = known(product((*cx.shape, x.shape[1])))
    if not cx.is_alone and (work is None or work > GATHERED):
        return NotImplemented
    groups, d = weight.shape[0], cx.dtype
    of_row = cx.stage(lambda i: convert(position(cx, groups, lambda k: convert(ends.load((k,)), dt.index), i[0], True), dt.i64),
                      (x.shape[0],), dt.i64, (ONE,))  # fmt: skip
    how = Split((*cx.shape, x.shape[1]), (2,), False)
    acc = accumulator(d, how)

    def term(i: Index) -> Expr:
        row, column, k = i
        group = op("min", convert(of_row.load((row,)), dt.index), groups - 1)
        return op("mul", cast(x.load((row, k)), acc), cast(weight.load((group, k, column)), acc))

    at = total(cx, how, term, acc)
    return cx.stage(lambda i: select(op("lt", convert(of_row.load(i[:1]), dt.index), groups), cast(at(i), d), Const(d, 0)))
