"""Constant operands that a loop would read across memory get a copy that lies along its vector axis: Program in, Program out.

    y[n, c, h, w] = Fold(r, s) x[..] * w[c, 0, r, s]        y is stored with c innermost, w with s innermost
      ->  w1[c, 0, r, s] = w[c, 0, r, s]  (w1 stored with c innermost);  y[n, c, h, w] = Fold(r, s) x[..] * w1[c, 0, r, s]

The copy reads constants only, so the plan makes it once, in `prepare`. Depthwise convolutions are the case in point.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.expr import Axis, Expr, Load, const, substitute, walk
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Element, Program, Stage, Store, dense
from ..deps import estimate
from ..templates.table import recognised


def repack_constants(program: Program, buffers: dict[str, Buffer]) -> Program:
    """Insert the copies; `buffers` (with layouts) gains them."""
    if not program.consts:
        return program
    made: dict[tuple[str, int], str] = {}
    body: list[Element] = []
    for e in program.body:
        if isinstance(e, Stage) and e.stores and recognised(e) is None:
            e = _with_copies(e, set(program.consts), buffers, made, body)
        body.append(e)
    return replace(program, body=tuple(body)) if made else program


def _with_copies(
    stage: Stage, consts: set[str], buffers: dict[str, Buffer], made: dict[tuple[str, int], str], body: list[Element]
) -> Stage:
    """The Stage reading copies where they help; new copies are appended to `body` and `buffers`."""
    axis = _vector_axis(stage.stores[0], buffers)
    if axis is None:
        return stage
    work = 1
    for _, extent in stage.axes:
        work *= estimate(extent)
    table: dict[Expr, Expr] = {}
    for e in walk(*(s.value for s in stage.stores)):
        if not isinstance(e, Load) or e.buf not in consts:
            continue
        source = buffers[e.buf]
        d = _crossing(e, axis, source)
        if d is None or work < 2 * _count(source):
            continue
        name = made.get((e.buf, d))
        if name is None:
            name = made[e.buf, d] = f"{e.buf}_along{d}"
            order = (*(k for k in range(len(source.shape)) if k != d), d)
            buffers[name] = Buffer(name, source.dtype, source.shape, dense(source.shape, order), "temp", None, stage.loc)
            index = tuple(Axis(f"i{k}") for k in range(len(source.shape)))
            copy = Store(name, index, Load(e.buf, e.dtype, index))
            body.append(Stage(tuple(zip(index, source.shape, strict=True)), (copy,), loc=stage.loc, origin="repack"))
        table[e] = Load(name, e.dtype, e.index, e.mask, e.other)
    if not table:
        return stage
    stores = tuple(replace(s, value=substitute(s.value, table)) for s in stage.stores)
    return replace(stage, stores=stores)


def _vector_axis(store: Store, buffers: dict[str, Buffer]) -> Axis | None:
    """The axis along which the result is contiguous."""
    layout = buffers[store.buf].layout
    for i, step in zip(store.index, layout.strides if layout is not None else (), strict=False):
        if step is const(1) and isinstance(i, Axis):
            return i
    return None


def _crossing(load: Load, axis: Axis, source: Buffer) -> int | None:
    """The dimension in which `load` follows `axis` with a stride above one, or None."""
    assert source.layout is not None
    for d, (i, step) in enumerate(zip(load.index, source.layout.strides, strict=True)):
        if const_of(linear(i).terms.get(axis, const(0))) == 1 and (const_of(step) or 0) > 1:
            return d
    return None


def _count(buffer: Buffer) -> int:
    total = 1
    for extent in buffer.shape:
        total *= estimate(extent)
    return total
