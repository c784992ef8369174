"""The windows of a convolution as plain rows: padding goes into a copy of the image, and taps that lie behind each other in memory join k.

    x[y + r - 1, x + q - 1, c] inside the image, k = c        a copy with zeros around it
    x1[y + r, (x + q) * C + c], k = c, taps r, q         ->   x1[y + r, x * C + j], k = j < 3 * C, taps r

In: a Contraction and the buffers as its kernel sees them. Out: the same product, its new buffers, and the Stage that copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir import dtype as dt
from ...ir.bounds import Ranges
from ...ir.expr import Axis, Cast, Const, Expr, Load, Op, const, op, substitute, walk
from ...ir.linear import conjuncts, const_of, linear
from ...ir.program import Buffer, Layout, Stage, Store, dense
from ..access import flat
from ..deps import estimate
from ..memory.layouts import rows_apart, share_a_set
from .contraction import Contraction, _product, conjunction, every_of, tiled_rows

COPIED = 2  # most elements of the copy for one of the image; beyond, most of it is padding
PAIRED = 4  # the same of bfloat16: without rows that lie plain it is widened to float32, which takes several times as long
WORTH = 2  # times that an element is read, by vectors of columns
FEW_ROWS = 8  # below, converting costs less than a copy
FAR = 4  # times the bytes between rows that share a set of the first-level cache: rows that share one of the second level too
MANY_ROWS, MANY_COLUMNS = 256, 512  # of a product, from which on a copy of its rows is paid for
SMALL = 4096  # elements that may be copied whatever they were


def narrow_k(c: Contraction, buffers: Mapping[str, Buffer]) -> Contraction:
    """Where k does not fill a vector, the summed axis along which the image lies contiguous is k."""
    layout, lanes = buffers[c.a.buf].layout, c.target.vectors.lanes()
    if layout is None or layout.splits or (const_of(c.k[1]) or lanes) >= lanes:
        return c
    at = flat(layout, c.a.index).terms
    k = next((x for x in (*c.taps, c.k) if const_of(at.get(x[0], const(0))) == 1), c.k)
    return c if k is c.k else replace(c, k=k, taps=tuple(x for x in (*c.taps, c.k) if x is not k))


def drop_sure(c: Contraction) -> Contraction:
    """Without the conditions on `a` that always hold."""
    extents = dict((*c.stage.axes, *c.taps, c.k))
    ranges = Ranges(extents=extents, sizes=True)

    def is_sure(t: Expr) -> bool:
        if not isinstance(t, Op) or t.name not in ("ge", "lt"):
            return False
        lo, hi = ranges.interval(_at_worst(t.args[0] - t.args[1], extents, t.name == "lt"))
        return lo is not None and lo >= 0 if t.name == "ge" else hi is not None and hi < 0

    tests = conjuncts(c.a.mask)
    left = [t for t in tests if not is_sure(t)]
    if len(left) == len(tests):
        return c
    where = conjunction([t for t in conjuncts(c.where) if t in left])
    return replace(c, a=every_of(Load(c.a.buf, c.a.dtype, c.a.index), left), where=where)


def _at_worst(e: Expr, extents: Mapping[Axis, Expr], greatest: bool) -> Expr:
    """`e` where the axes that it adds up are at the end that makes it greatest (or least): i - n over i < n -> -1, whatever n."""
    terms = linear(e).terms
    inside = {x for atom in terms if not isinstance(atom, Axis) for x in walk(atom)}
    ends: dict[Expr, Expr] = {}
    for axis, by in terms.items():
        if isinstance(axis, Axis) and axis in extents and axis not in inside and const_of(by) is not None:
            ends[axis] = extents[axis] - 1 if ((const_of(by) or 0) > 0) == greatest else const(0)
    return linear(substitute(linear(e).expr(), ends)).expr()


def close_bounds(c: Contraction) -> Contraction:
    """Every condition x >= 0 on `a` is followed by x < n. Where the image ends behind what is read (stride 2), n is one more than the
    greatest x, so that the convolution is the same kernel as one whose windows reach into the padding on both sides.

    x >= 0 and y < 7  ->  x >= 0 and x < 15 and y < 7
    """
    ranges = Ranges(extents=dict((*c.stage.axes, *c.taps, c.k)), sizes=True)
    tests = conjuncts(c.a.mask)
    below = {t.args[0] for t in tests if isinstance(t, Op) and t.name == "lt"}
    closed: list[Expr] = []
    for t in tests:
        closed.append(t)
        x = t.args[0]
        if isinstance(t, Op) and t.name == "ge" and const_of(t.args[1]) == 0 and x not in below:
            last = ranges.interval(x).hi
            closed += [] if last is None else [op("lt", x, const(last + 1))]
    return c if len(closed) == len(tests) else replace(c, a=every_of(Load(c.a.buf, c.a.dtype, c.a.index), closed))


@dataclass(frozen=True, slots=True)
class Padded:
    """`stage` copies `source` (the image as it sees it) to `copy`; `product` reads the copy."""

    stage: Stage
    source: Buffer
    copy: Buffer
    product: Contraction


def with_padding(c: Contraction, buffers: Mapping[str, Buffer], has_pairs: bool) -> Padded | None:
    """A copy of `a` over every index that is read, zeros outside, k innermost; and the product that reads the copy. Where that is mostly
    padding, or padding is to be left out, only the dimensions that rows of a tile and k step through get some.

    What the mask asks beside "inside the image" stays a mask; it may not depend on the tiled row or on k.
    """
    made = _with_padding(c, buffers, False) if c.where is None or has_pairs else None
    return made or _with_padding(c, buffers, True)


def _with_padding(c: Contraction, buffers: Mapping[str, Buffer], narrow: bool) -> Padded | None:
    ranges = Ranges(extents=dict((*c.stage.axes, *c.taps, c.k)), sizes=True)
    a, source = c.a, buffers[c.a.buf]
    spans: list[tuple[int, int]] = []
    kept: list[Expr] = []  # indices of dimensions without padding
    for i, n in zip(a.index, source.shape, strict=True):
        lo, hi = ranges.interval(i)
        if lo is None or hi is None:
            return None
        if narrow and not {c.k[0], c.rows[-1][0]} & set(walk(i)):
            lo, hi = 0, (const_of(n) or 1) - 1
            kept.append(i)
        spans.append((lo, hi))
    last = next((d for d, i in enumerate(a.index) if c.k[0] in linear(i).terms), None)
    if last is None or any(const_of(n) is None for n in source.shape) or source.layout is None or source.layout.splits:
        return None
    size = math.prod(hi - lo + 1 for lo, hi in spans)
    reads = math.prod(estimate(e) for _, e in (*c.batch, *c.rows, *c.taps, c.k)) * -(-estimate(c.n[1]) // c.target.vectors.lanes())
    most = PAIRED if a.dtype is dt.bf16 else COPIED
    if size > most * _product([*source.shape]) + SMALL or reads < WORTH * size:
        return None  # mostly padding, or hardly used again
    other = [t for t in conjuncts(a.mask) if not _is_bound(t, a, source) or t.args[0] in kept]
    if any(x in (c.k[0], c.rows[-1][0]) for t in other for x in walk(t)) or a.other not in (None, Const(a.dtype, 0.0)):
        return None
    order = (*(d for d in range(len(spans)) if d != last), last)
    index, spans, source = [a.index[d] for d in order], [spans[d] for d in order], _turned(source, order)
    assert source.layout is not None
    steps, run, lanes = source.layout.strides, const_of(source.shape[-1]) or 0, c.target.vectors.lanes()
    if len(order) > 1 and run % lanes and spans[-1] == (0, run - 1) and steps[-1] is const(1) and steps[-2] is const(run):
        # few channels, and the pixels beside them: one run of memory, so one loop
        lo, hi = spans[-2]
        index = [*index[:-2], index[-2] * run + index[-1]]
        spans = [*spans[:-2], (lo * run, hi * run + run - 1)]
        shape = (*source.shape[:-2], op("mul", source.shape[-2], const(run)))
        source = replace(source, shape=shape, layout=Layout((*source.layout.strides[:-2], const(1)), source.layout.offset))
    axes = tuple(Axis(f"i{d}") for d in range(len(spans)))
    inside = [op("ge", x, const(-lo)) for x, (lo, _) in zip(axes, spans, strict=True) if lo < 0]
    inside += [op("lt", x, n - lo) for x, (lo, hi), n in zip(axes, spans, source.shape, strict=True) if hi >= (const_of(n) or 0)]
    name = f"{c.stage.stores[0].buf}_padded"
    sizes = tuple(const(hi - lo + 1) for lo, hi in spans)
    copy = Buffer(name, a.dtype, sizes, dense(sizes), "temp", None, c.stage.loc)
    value = every_of(Load(a.buf, a.dtype, tuple(x + lo for x, (lo, _) in zip(axes, spans, strict=True))), inside)
    stage = Stage(tuple(zip(axes, sizes, strict=True)), (Store(name, axes, value),), loc=c.stage.loc, origin="pad")
    read = tuple(linear(i - lo).expr() for i, (lo, _) in zip(index, spans, strict=True))
    return Padded(stage, source, copy, replace(c, a=every_of(Load(name, a.dtype, read), other)))


def _turned(b: Buffer, order: tuple[int, ...]) -> Buffer:
    """The same memory with its dimensions in another order."""
    assert b.layout is not None
    strides = tuple(b.layout.strides[d] for d in order)
    return replace(b, shape=tuple(b.shape[d] for d in order), layout=Layout(strides, b.layout.offset))


def _is_bound(t: Expr, a: Load, source: Buffer) -> bool:
    """Does `t` say that some index of `a` lies inside?"""
    return isinstance(t, Op) and any(
        t.args[0] is i and ((t.name == "ge" and const_of(t.args[1]) == 0) or (t.name == "lt" and t.args[1] is n))
        for i, n in zip(a.index, source.shape, strict=True)
    )


def widen(c: Contraction, buffers: Mapping[str, Buffer]) -> Padded | None:
    """A copy of `a` in float32: a tile that converts it one element at a time spends most of its time on that. None where it is float32
    already, only few rows meet each column, or most of what lies there is not read."""
    source, a = buffers[c.a.buf], c.a
    layout, rows = source.layout, math.prod(estimate(e) for _, e in c.rows)
    if a.dtype not in dt.HALF or c.fold.dtype is not dt.f32 or rows < FEW_ROWS or layout is None or layout.splits or layout.pad:
        return None
    read = math.prod(estimate(e) for _, e in (*c.batch, *c.rows, *c.taps, c.k))
    if math.prod(estimate(n) for n in source.shape) > COPIED * read:
        return None
    order = tuple(sorted(range(len(source.shape)), key=lambda d: -estimate(layout.strides[d])))
    axes = tuple(Axis(f"i{d}") for d in range(len(order)))
    copy = Buffer(f"{c.stage.stores[0].buf}_wide", dt.f32, source.shape, dense(source.shape, order), "temp", None, c.stage.loc)
    store = Store(copy.name, axes, Cast(dt.f32, Load(a.buf, a.dtype, axes)))
    stage = Stage(tuple(zip(axes, source.shape, strict=True)), (store,), loc=c.stage.loc, origin="widen")
    other = None if a.mask is None else Const(dt.f32, 0.0)
    return Padded(stage, source, copy, replace(c, a=Load(copy.name, dt.f32, a.index, a.mask, other)))


def join_taps(c: Contraction, buffers: dict[str, Buffer]) -> Contraction:
    """Taps one step of which is the whole of k become part of k, innermost first; `buffers` gets the view of `a` that this takes."""
    while True:
        found = next((j for t in c.taps if (j := _join(c, t, buffers)) is not None), None)
        if found is None:
            return c
        c = found


def _join(c: Contraction, tap: tuple[Axis, Expr], buffers: dict[str, Buffer]) -> Contraction | None:
    """The Contraction with `tap` in front of k, if element (tap + 1, 0) of a row follows element (tap, last k)."""
    (t, count), (k, extent) = tap, c.k
    source, a = buffers[c.a.buf], c.a
    layout, size, taps = source.layout, const_of(extent), const_of(count)
    if layout is None or layout.splits or layout.pad or size is None or taps is None or taps == 1:
        return None
    if a.mask is not None and any(x in (t, k) for x in walk(a.mask)):
        return None
    others = (e for root in (c.b, c.value) for e in walk(root))
    if any(isinstance(e, Load) and e.buf == a.buf for e in others) or any(s.buf == a.buf for s in c.stage.stores):
        return None
    of_t, of_k = ([d for d, i in enumerate(a.index) if any(x is axis for x in walk(i))] for axis in (t, k))
    if len(of_t) != 1 or len(of_k) != 1:
        return None
    (dt_,), (dk,) = of_t, of_k
    j = Axis(f"{t.name}_{k.name}")
    terms = linear(a.index[dt_]).terms
    if dt_ == dk:  # the run is one dimension already: t * size + k
        if const_of(terms.get(t, const(0))) != size or const_of(terms.get(k, const(0))) != 1:
            return None
        index = tuple(linear(substitute(i, {t: const(0), k: j})).expr() if d == dk else i for d, i in enumerate(a.index))
        seen = source
    else:
        if const_of(terms.get(t, const(0))) != 1 or a.index[dk] is not k or source.shape[dk] is not extent:
            return None
        if layout.strides[dt_] is not op("mul", source.shape[dk], layout.strides[dk]):
            return None
        joined = linear(substitute(a.index[dt_], {t: const(0)}) * size + j).expr()
        index = tuple(joined if d == dk else i for d, i in enumerate(a.index) if d != dt_)
        shape = tuple(op("mul", source.shape[dt_], n) if d == dk else n for d, n in enumerate(source.shape) if d != dt_)
        strides = tuple(s for d, s in enumerate(layout.strides) if d != dt_)
        seen = replace(source, shape=shape, layout=Layout(strides, layout.offset))
    apart: dict[Expr, Expr] = {t: op("floordiv", j, extent), k: op("mod", j, extent)}
    b = substitute(c.b, apart)
    assert isinstance(b, Load)
    buffers[a.buf] = seen
    moved = Load(a.buf, a.dtype, index, a.mask, a.other)
    where = None if c.where is None else substitute(c.where, apart)
    return replace(c, a=moved, b=b, where=where, k=(j, const(taps * size)), taps=tuple(x for x in c.taps if x is not tap))


def copied_apart(c: Contraction, buffers: dict[str, Buffer]) -> Padded | None:
    """A copy of rows that share a set of the cache and were not set apart by memory/layouts.py (inputs), where enough columns meet each."""
    source = buffers[c.a.buf]
    layout, rows = source.layout, math.prod(estimate(e) for _, e in c.rows)
    if layout is None or layout.splits or layout.pad or c.a.mask is not None or c.taps:
        return None
    if not share_a_set(*tiled_rows(c), buffers, FAR * c.target.caches.turn):
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
