"""Layouts of temporaries: row-major, or in the order in which their main operand lies.

In: a Program. Out: its buffers, each with a layout. A contraction writes vectors along the axis that only its packed operand depends on,
so that dimension goes innermost (a convolution's channels: channels-last). Rows that a contraction tiles are set apart by a cache line
where they would lie a multiple of 4 KB apart: a tile's rows would share the few places of one set of the first-level cache, and each would
push the others out. Wrong choices cost time, never correctness.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...ir.expr import Axis, Expr, Load, const, walk
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Cond, Element, Extern, Program, Repeat, Stage, Store
from ..access import flat
from ..deps import estimate, reads, stage_loads, writes
from ..fusion.fuse import simple_axes
from ..templates.attention import Attention, recognise_attention
from ..templates.contraction import ONE_COLUMN, Contraction, dense, recognise
from ..templates.windows import Padded

FAR = 4  # times the bytes between rows that share a set of the first-level cache: rows that share one of the second level too
MANY_ROWS, MANY_COLUMNS = 256, 512  # of a product, from which on a copy of its rows is paid for


def _main_order(stage: Stage, buffer: Buffer, product: Contraction | None, buffers: dict[str, Buffer]) -> list[int] | None:
    """Dimensions of the stored buffer in the order of the largest operand that has them all."""
    store = next(s for s in stage.stores if s.buf == buffer.name)
    axes = simple_axes(stage, store)
    if axes is None:
        return None
    attention = recognise_attention(stage)
    if attention is not None:  # as the queries lie: what was split into heads is joined again
        return _order_of(attention, buffers)
    if product is not None and product.n[0] is not ONE_COLUMN:
        # where axes were split to see the product, its dimension is the one indexed by a part of it
        parts = product.stage.stores[0].index
        last = max((d for d, i in enumerate(parts) if product.n[0] in set(walk(i))), default=len(axes) - 1)
        return [*(d for d in range(len(axes)) if d != last), last]
    best: tuple[int, list[int]] | None = None
    for x in stage_loads(stage):
        layout = buffers[x.buf].layout
        if layout is None or layout.splits:
            continue
        at: dict[Axis, int] = {}
        for i, stride in zip(x.index, layout.strides, strict=True):
            for a in linear(i).terms:  # a window's index (2 * i + r - 1) follows i too
                if isinstance(a, Axis):
                    at[a] = at.get(a, 0) + estimate(stride)
        wide = [d for d, a in enumerate(axes) if a is not None]
        if not all(axes[d] in at and at[axes[d]] > 0 for d in wide):  # type: ignore[index]
            continue
        order = sorted(range(len(axes)), key=lambda d: (-at[axes[d]], d) if axes[d] is not None else (-(1 << 60), d))  # type: ignore[index]
        size = 1
        for e in buffers[x.buf].shape:
            size *= estimate(e)
        if best is None or size > best[0]:
            best = (size, order)
    return best[1] if best is not None else None


def _order_of(a: Attention, buffers: dict[str, Buffer]) -> list[int] | None:
    """Dimensions of the result from the farthest step of the queries to the nearest, the values' columns innermost."""
    layout = buffers[a.q.buf].layout
    if layout is None:
        return None
    total: Expr = const(0)
    for i, step in zip(a.q.index, layout.strides, strict=True):
        total = total + i * step
    steps = linear(total).terms

    def reach(index: Expr) -> int:
        axes = [x for x in walk(index) if isinstance(x, Axis)]
        return -1 if a.d[0] in axes else min((estimate(steps[x]) for x in axes if x in steps), default=1 << 60)

    index = a.stage.stores[0].index
    return sorted(range(len(index)), key=lambda d: -reach(index[d]))


def choose_layouts(program: Program) -> dict[str, Buffer]:
    """Every buffer gets a layout."""
    buffers = dict(program.buffers)
    chosen: dict[str, tuple[int, ...] | None] = {}  # buffer -> the order taken for it here
    crowded: set[str] = set()  # left-hand operands of contractions whose rows share a set of the cache
    fixed = {b.storage_of for b in buffers.values() if b.storage_of is not None}  # what others see the strides of

    def visit(body: tuple[Element, ...]) -> None:
        for e in body:
            if isinstance(e, Stage):
                product = recognise(e)
                if product is not None and _share_a_set(product, buffers, program.target.caches.turn):
                    crowded.add(product.a.buf)
                for s in e.stores:
                    b = buffers[s.buf]
                    if b.layout is None:
                        order = _main_order(e, b, product, buffers)
                        chosen[s.buf] = None if order is None else tuple(order)
                        buffers[s.buf] = replace(b, layout=dense(b.shape, chosen[s.buf]))
            elif isinstance(e, Cond):
                visit(e.then)
                visit(e.orelse)
            elif isinstance(e, Repeat):
                visit(e.body)
            elif isinstance(e, Extern):
                fixed.update(reads(e), writes(e))

    visit(program.body)
    for name in crowded & chosen.keys() - fixed:
        b = buffers[name]
        if b.role == "temp" and b.storage_of is None:
            buffers[name] = rows_apart(b, chosen[name], program.target.caches.line)
    return {n: b if b.layout is not None else replace(b, layout=dense(b.shape)) for n, b in buffers.items()}


def _share_a_set(c: Contraction, buffers: dict[str, Buffer], size: int) -> bool:
    """Do the rows of a tile lie a multiple of `size` apart?"""
    layout = buffers[c.a.buf].layout
    if layout is None:
        return False
    step = const_of(flat(layout, c.a.index).terms.get(c.rows[-1][0], const(0)))
    return step is not None and step != 0 and step * c.a.dtype.itemsize % size == 0


def rows_apart(buffer: Buffer, order: tuple[int, ...] | None, line: int) -> Buffer:
    """The buffer with a line between its innermost rows."""
    inner = order[-1] if order else len(buffer.shape) - 1
    extent = buffer.shape[inner]
    wide = extent + line // buffer.dtype.itemsize
    return replace(buffer, layout=dense(tuple(wide if d == inner else e for d, e in enumerate(buffer.shape)), order))


def copied_apart(c: Contraction, buffers: dict[str, Buffer]) -> Padded | None:
    """A copy of rows that share a set of the cache and do not lie as this pass likes (inputs), where enough columns meet each."""
    source = buffers[c.a.buf]
    layout, rows = source.layout, math.prod(estimate(e) for _, e in c.rows)
    if layout is None or layout.splits or layout.pad or c.a.mask is not None or c.taps:
        return None
    if not _share_a_set(c, buffers, FAR * c.target.caches.turn):
        return None
    if rows < MANY_ROWS or estimate(c.n[1]) < MANY_COLUMNS or math.prod(estimate(n) for n in source.shape) > rows * estimate(c.k[1]):
        return None
    order = tuple(sorted(range(len(source.shape)), key=lambda d: -estimate(layout.strides[d])))
    axes = tuple(Axis(f"i{d}") for d in range(len(order)))
    copy = Buffer(f"{c.stage.stores[0].buf}_apart", source.dtype, source.shape, None, "temp", None, c.stage.loc)
    copy = rows_apart(copy, order, c.target.caches.line)
    store = Store(copy.name, axes, Load(source.name, source.dtype, axes))
    stage = Stage(tuple(zip(axes, source.shape, strict=True)), (store,), loc=c.stage.loc, origin="copy")
    return Padded(stage, source, copy, replace(c, a=Load(copy.name, source.dtype, c.a.index)))


__all__ = ["choose_layouts", "dense"]
