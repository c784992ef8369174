"""Row axes of a contraction that lie behind each other in memory become one, so that tiles do not end where a batch or an image row does.

In: a Contraction and the buffers with their layouts. Out: the same product over fewer row axes and taps, and the buffers as its kernel sees
them: a buffer of [s0, s1, 24] read at [i0, i1, k] is one of [s0 * s1, 24] read at [j, k].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.expr import Axis, Expr, Load, Var, const, op, substitute, walk
from ..ir.linear import const_of, linear
from ..ir.program import Buffer, Layout
from .contraction import Contraction

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
