"""Choose where temporaries lie: every buffer without a required layout gets dense strides in some order of its dimensions.

In: a Program. Out: its buffers, all with layouts. A contraction writes vectors along the axis that only its packed operand depends on, so
that dimension goes innermost (a convolution's channels: channels-last). What is computed from a buffer of the same rank follows its order,
so that loops run contiguously on both sides. Wrong choices cost time, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.expr import Axis, Load, walk
from ..ir.linear import const_of
from ..ir.program import Buffer, Cond, Element, Program, Repeat, Stage
from .contraction import dense, recognise


def choose_layouts(program: Program) -> dict[str, Buffer]:
    """Every buffer of the program, with a layout."""
    orders: dict[str, tuple[int, ...]] = {}
    for stage in _stages(program.body):
        order = _order(stage, program.buffers, orders)
        for store in stage.stores:
            if order is not None and len(order) == len(store.index):
                orders.setdefault(store.buf, order)
    return {n: b if b.layout is not None else replace(b, layout=dense(b.shape, orders.get(n))) for n, b in program.buffers.items()}


def _stages(body: tuple[Element, ...]) -> Iterator[Stage]:
    for e in body:
        if isinstance(e, Stage):
            yield e
        elif isinstance(e, Cond):
            yield from _stages((*e.then, *e.orelse))
        elif isinstance(e, Repeat):
            yield from _stages(e.body)


def _order(stage: Stage, buffers: dict[str, Buffer], orders: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The order of dimensions that suits what `stage` writes, or None for row-major."""
    product = recognise(stage)
    if product is not None:
        axes = [i for i in stage.stores[0].index if isinstance(i, Axis)]
        if len(axes) == len(stage.stores[0].index) and product.n[0] in axes:
            last = axes.index(product.n[0])
            return (*(d for d in range(len(axes)) if d != last), last)
        return None
    rank = len(stage.stores[0].index)
    for e in walk(*(s.value for s in stage.stores)):
        if isinstance(e, Load) and len(e.index) == rank and rank > 2:
            b = buffers[e.buf]
            order = orders.get(e.buf) or (_order_of(b) if b.layout is not None else None)
            if order is not None:
                return order
    return None


def _order_of(buffer: Buffer) -> tuple[int, ...] | None:
    """Dimensions from the largest stride to the smallest, where all are known and none overlaps."""
    assert buffer.layout is not None
    strides = [const_of(s) for s in buffer.layout.strides]
    if any(s is None or s == 0 for s in strides):
        return None
    return tuple(sorted(range(len(strides)), key=lambda d: (-(strides[d] or 0), d)))


__all__ = ["choose_layouts", "dense"]
