"""Row axes of a contraction that lie behind each other in memory become one, so that tiles do not end where a batch or an image row does.

In: a Contraction and the buffers with their layouts. Out: the same product over fewer row axes and taps, and the buffers as its kernel sees
them: a buffer of [s0, s1, 24] read at [i0, i1, k] is one of [s0 * s1, 24] read at [j, k].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.expr import Axis, Expr, Load, Var, const, op, substitute, walk
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Layout
from .contraction import Contraction, only_where

Index = tuple[Expr, ...]


def merge_rows(c: Contraction, buffers: Mapping[str, Buffer]) -> tuple[Contraction, dict[str, Buffer]]:
    """Taps of extent 1 go, then the two innermost row axes become one while that is possible."""
    ones: dict[Expr, Expr] = {t: const(0) for t, e in c.taps if const_of(e) == 1}
    if ones:
        a, b = substitute(c.a, ones), substitute(c.b, ones)
        assert isinstance(a, Load) and isinstance(b, Load)
        where = None if c.where is None else substitute(c.where, ones)
        c = replace(c, a=a, b=b, where=where, taps=tuple(t for t in c.taps if t[0] not in ones))
    seen = dict(buffers)
    while len(c.rows) > 1:
        merged = _merge_two(c, seen)
        if merged is None:
            break
        c = merged
    return c, seen


def _merge_two(c: Contraction, buffers: dict[str, Buffer]) -> Contraction | None:
    """The two innermost row axes as one; `buffers` gets the reshaped ones. None where some access forbids it."""
    (o, o_extent), (m, m_extent) = c.rows[-2:]
    store = c.stage.stores[0]
    loads = [e for e in walk(c.value, c.a, c.b) if isinstance(e, Load)]
    places: dict[str, tuple[int, int]] = {}
    for buf, index in ((store.buf, store.index), *((e.buf, e.index) for e in loads)):
        place = _place(index, o, m, m_extent)
        if place is None or (place and places.setdefault(buf, place) != place):
            return None
        if place and place[0] != place[1]:
            layout = buffers[buf].layout
            if layout is None or layout.splits or layout.pad:
                return None
            if op("mul", m_extent, layout.strides[place[1]]) is not layout.strides[place[0]]:
                return None
    untouched = {e.buf for e in loads if not _place(e.index, o, m, m_extent)} & set(places)
    bare = substitute(c.value, {e: Var(e.buf, e.dtype) for e in loads})
    masks = [x for e in loads if e.mask is not None and e.other is not None for x in (e.mask, e.other)]
    masks += [e for e in (store.mask, c.where) if e is not None]
    if untouched or any(x in (o, m) for x in walk(bare, *masks)):
        return None
    row, extent = Axis(f"{o.name}_{m.name}"), op("mul", o_extent, m_extent)

    def moved(buf: str, index: Index) -> Index:
        if buf not in places:
            return index
        outer, inner = places[buf]
        if outer == inner:
            return tuple(row if d == inner else i for d, i in enumerate(index))
        away = (index[outer] - o) * m_extent  # an index of o + 1 begins one run of m later
        return tuple(row + away if d == inner else i for d, i in enumerate(index) if d != outer)

    table: dict[Expr, Expr] = {e: Load(e.buf, e.dtype, moved(e.buf, e.index), e.mask, e.other) for e in loads}
    for buf, (outer, inner) in places.items():
        if outer == inner:
            continue
        b = buffers[buf]
        assert b.layout is not None
        shape = tuple(b.shape[outer] * m_extent if d == inner else n for d, n in enumerate(b.shape) if d != outer)
        strides = tuple(s for d, s in enumerate(b.layout.strides) if d != outer)
        buffers[buf] = replace(b, shape=shape, layout=Layout(strides, b.layout.offset))
    a = table[c.a]
    assert isinstance(a, Load)
    axes = (*(x for x in c.stage.axes if x[0] not in (o, m)), (row, extent))
    stage = replace(c.stage, axes=axes, stores=(replace(store, index=moved(store.buf, store.index)),))
    return replace(c, stage=stage, a=a, rows=(*c.rows[:-2], (row, extent)), value=substitute(c.value, table))


def _place(index: Index, o: Axis, m: Axis, m_extent: Expr) -> tuple[int, int] | tuple[()] | None:
    """The dimensions that `o` (with what it is shifted by) and `m` index, or the one that both index as one row; () where neither occurs;
    None where they occur otherwise."""
    joint = o * m_extent + m
    shifted = [i for i in index if i is not joint and not any(x in (o, m) for x in walk(linear(i - o).expr()))]
    at_o, at_m, at_both = ([d for d, i in enumerate(index) if i in among] for among in (shifted, [m], [joint]))
    mixed = any(x in (o, m) for i in index if i not in shifted and i is not m and i is not joint for x in walk(i))
    if mixed or len(at_both) > 1 or (at_both and (at_o or at_m)):
        return None
    if at_both:
        return at_both[0], at_both[0]
    if not at_o and not at_m:
        return ()
    return (at_o[0], at_m[0]) if len(at_o) == len(at_m) == 1 else None


def merge_apart(c: Contraction, buffers: Mapping[str, Buffer]) -> tuple[Contraction, dict[str, Buffer]] | None:
    """The two innermost row axes as one although image rows are longer than what is read of them: what a row of the product finds between
    them is computed, but not stored. For `a` in a dense buffer with the two in dimensions of their own.

        o < 8, m < 8: x[(o + r) * 10 + m + q]      becomes      row < 78: x[row + r * 10 + q], stored where row % 10 < 8
    """
    if len(c.rows) < 2:
        return None
    (o, o_extent), (m, m_extent) = c.rows[-2:]
    layout, source, store, n = buffers[c.a.buf].layout, buffers[c.a.buf], c.stage.stores[0], const_of(m_extent)
    of_o, of_m = ([d for d, i in enumerate(c.a.index) if x in set(walk(i))] for x in (o, m))
    if layout is None or layout.splits or layout.pad or len(of_o) != 1 or len(of_m) != 1 or of_o == of_m or n is None:
        return None
    if c.a.buf in {e.buf for e in walk(c.value, c.b) if isinstance(e, Load)} | {store.buf}:
        return None
    if const_of(o_extent) is None or any(x in (o, m) for e in (c.a.mask, c.where) if e is not None for x in walk(e)):
        return None
    (d_o,), (d_m,) = of_o, of_m
    if op("mul", source.shape[d_m], layout.strides[d_m]) is not layout.strides[d_o]:
        return None
    at = linear(c.a.index[d_o] * source.shape[d_m] + c.a.index[d_m])
    far, near = (const_of(at.terms.get(x, const(0))) or 0 for x in (o, m))
    if near <= 0 or far % near or far // near < n or any(x in (o, m) for t in at.terms if t not in (o, m) for x in walk(t)):
        return None
    pitch, row = far // near, Axis(f"{o.name}_{m.name}")
    extent = const((const_of(o_extent) or 1) * pitch - (pitch - n))
    place = linear(substitute(at.expr(), {o: const(0), m: row})).expr()
    index = tuple(place if d == d_m else i for d, i in enumerate(c.a.index) if d != d_o)
    shape = tuple(source.shape[d_o] * e if d == d_m else e for d, e in enumerate(source.shape) if d != d_o)
    strides = tuple(e for d, e in enumerate(layout.strides) if d != d_o)
    table: dict[Expr, Expr] = {o: op("floordiv", row, const(pitch)), m: op("mod", row, const(pitch))}
    real = op("lt", m, m_extent)
    read = {e: only_where(e, real) for e in walk(c.value) if isinstance(e, Load) and {o, m} & set(walk(e))}
    value = substitute(substitute(c.value, dict(read.items())), table)
    mask = substitute(real if store.mask is None else op("and", store.mask, real), table)
    axes = (*(x for x in c.stage.axes if x[0] not in (o, m)), (row, extent))
    stage = replace(c.stage, axes=axes, stores=(replace(store, index=tuple(substitute(i, table) for i in store.index), mask=mask),))
    moved = Load(c.a.buf, c.a.dtype, index, c.a.mask, c.a.other)
    seen = {**buffers, c.a.buf: replace(source, shape=shape, layout=Layout(strides, layout.offset))}
    return replace(c, stage=stage, a=moved, rows=(*c.rows[:-2], (row, extent)), value=value), seen
