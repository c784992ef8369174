"""Layouts of temporaries: row-major, or in the order in which their main operand lies.

In: a Program. Out: its buffers, each with a layout. What a template stores lies as its row says (a convolution's channels innermost:
channels-last). Rows that a template's tile reads side by side are set apart by a cache line
where they would lie a multiple of 4 KB apart: a tile's rows would share the few places of one set of the first-level cache, and each would
push the others out. Wrong choices cost time, never correctness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ...ir.expr import Axis, Const, Expr, Load, Op, const, walk
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Cond, Element, Extern, Program, Repeat, Stage, dense
from ..access import flat
from ..deps import estimate, reads, stage_loads, writes
from ..fusion.fuse import simple_axes
from ..templates.table import TEMPLATES, recognised


def _main_order(stage: Stage, buffer: Buffer, buffers: dict[str, Buffer]) -> list[int] | None:
    """Dimensions of the stored buffer in the order of the largest operand that has them all."""
    store = next(s for s in stage.stores if s.buf == buffer.name)
    axes = simple_axes(stage, store)
    if axes is None:
        return None
    found = recognised(stage)
    wanted = TEMPLATES[found[0]].order(found[1], buffers) if found is not None else None
    if wanted is not None:
        return wanted
    best: tuple[int, list[int]] | None = None
    for x in stage_loads(stage):
        layout = buffers[x.buf].layout
        if layout is None or layout.splits:
            continue
        at: dict[Axis, int] = {}
        split = {a for e in walk(*x.index) if isinstance(e, Op) and e.name == "mod" for a in walk(e) if isinstance(a, Axis)}
        for i, stride in zip(x.index, layout.strides, strict=True):
            for a, step in _followed(i, estimate(stride), split):
                at[a] = at.get(a, 0) + step
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


def _followed(index: Expr, stride: int, split: Collection[Axis]) -> Iterator[tuple[Axis, int]]:
    """Axes that an index follows, and about how far apart the elements of neighbours lie: a window's index (2 * i + r - 1) follows i, and
    so does the window of an element ((i + 1) // 2); but not i // 8 where i % 8 is another index: neighbours differ in that one."""
    for a in linear(index).terms:
        if isinstance(a, Axis):
            yield a, stride
        elif isinstance(a, Op) and a.name == "floordiv" and isinstance(a.args[1], Const):
            found = _followed(a.args[0], max(1, stride // max(1, int(a.args[1].value))), split)
            yield from ((b, step) for b, step in found if b not in split)


def choose_layouts(program: Program) -> dict[str, Buffer]:
    """Every buffer gets a layout."""
    buffers = dict(program.buffers)
    chosen: dict[str, tuple[int, ...] | None] = {}  # buffer -> the order taken for it here
    crowded: set[str] = set()  # left-hand operands of contractions whose rows share a set of the cache
    fixed = {b.storage_of for b in buffers.values() if b.storage_of is not None}  # what others see the strides of

    def visit(body: tuple[Element, ...]) -> None:
        for e in body:
            if isinstance(e, Stage):
                found = recognised(e)
                rows = TEMPLATES[found[0]].rows(found[1]) if found is not None else None
                if rows is not None and share_a_set(*rows, buffers, program.target.caches.turn):
                    crowded.add(rows[0].buf)
                for s in e.stores:
                    b = buffers[s.buf]
                    if b.layout is None:
                        order = _main_order(e, b, buffers)
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


def share_a_set(rows: Load, axis: Axis, buffers: Mapping[str, Buffer], size: int) -> bool:
    """Do rows, of which the next one is a step of `axis` away, lie a multiple of `size` apart?"""
    layout = buffers[rows.buf].layout
    if layout is None:
        return False
    step = const_of(flat(layout, rows.index).terms.get(axis, const(0)))
    return step is not None and step != 0 and step * rows.dtype.itemsize % size == 0


def rows_apart(buffer: Buffer, order: tuple[int, ...] | None, line: int) -> Buffer:
    """The buffer with a line between its innermost rows."""
    inner = order[-1] if order else len(buffer.shape) - 1
    extent = buffer.shape[inner]
    wide = extent + line // buffer.dtype.itemsize
    return replace(buffer, layout=dense(tuple(wide if d == inner else e for d, e in enumerate(buffer.shape)), order))
