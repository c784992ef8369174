"""embedding_bag: sums and means of rows of a table. In: Refs; out: a check of indices, and stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, convert, op, select
from .core import Builder
from .gather import check_range, position_of
from .indexing import update
from .numerics import ir_dtype
from .ref import ONE, ZERO, Index, Ref, known
from .search import position
from .table import lowers

SUM, MEAN = 0, 1


@lowers("aten._embedding_bag_forward_only.default", "aten._embedding_bag.default")
def lower_embedding_bag(
    cx: Builder, table: Ref, indices: Ref, starts: Ref, by_frequency: bool = False, mode: int = 0, sparse: bool = False,
    weights: Ref | None = None, has_end: bool = False, padding: int = -1,
) -> Any:  # fmt: skip
    """Bag b holds the indices from starts[b] to starts[b + 1], the last one to the end. What only gradients need is as eager fills it."""
    quick = known(cx.spec[1].shape[0]) == 0  # summing quickly, eager does not count
    if mode not in (SUM, MEAN) or (mode == SUM) != quick or padding >= 0 or has_end or table.dtype not in (dt.f32, dt.f64):
        return NotImplemented
    count, bags, d = indices.shape[0], starts.shape[0], table.dtype
    check_range(cx, indices, table.shape[0], negative=False, message="index out of range in self")

    def start(b: Expr) -> Expr:
        return position_of(starts, (b,))

    def end(b: Expr) -> Expr:
        following = b + 1
        inside = op("lt", following, bags)
        return select(inside, start(select(inside, following, ZERO)), count)

    if known(bags) != 0:
        cx.check_none((ONE,), lambda i: op("ne", start(ZERO), ZERO), "RuntimeError", "offsets[0] has to be 0")
        wrong = "offsets have to increase, up to the number of indices"
        cx.check_none((bags,), lambda i: op("gt", start(i[0]), end(i[0])), "RuntimeError", wrong)
    of_index = cx.stage(lambda i: convert(position(cx, bags, start, i[0], True) - 1, dt.i64), (count,), dt.i64, (ONE,))
    bag = lambda k: op("max", position_of(of_index, (k,)), ZERO)  # -1 where the check above fails
    name = cx.buffer(d, cx.spec[0].shape, cx.spec[0].strides)
    cx.fill(name, lambda i: Const(d, 0.0))

    def value(i: Index) -> Expr:
        row = table.load((position_of(indices, i[:1]), i[1]))
        return row if weights is None else op("mul", row, weights.load(i[:1]))

    update(cx, name, (count, table.shape[1]), lambda i: (bag(i[0]), i[1]), value, "add")
    total = cx.ref(name)

    def size(b: Expr) -> Expr:
        return convert(end(b) - start(b), dt.i64)

    if mode == MEAN:
        sums = total
        one = Const(dt.i64, 1)
        total = cx.stage(lambda i: op("div", sums.load(i), convert(op("max", size(i[0]), one), d)), cx.spec[0].shape, d, cx.spec[0].strides)

    def filled(spec: Any, value: Callable[[Expr], Expr]) -> Ref:
        e = ir_dtype(spec.dtype, cx.loc)
        return cx.stage(lambda i: Const(e, 0) if quick else convert(value(i[0]), e), spec.shape, e, spec.strides)

    return (total, filled(cx.spec[1], lambda k: of_index.load((k,))), filled(cx.spec[2], size), filled(cx.spec[3], size))
