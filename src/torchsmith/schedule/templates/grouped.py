"""Grouped and depthwise convolutions: the contraction template for few channels a group, several groups side by side in a vector.

In: a Contraction with a batch axis that is its group. Out: a pack kernel and a kernel of Banded tiles, or None where the form does not fit
(then the dense template runs group by group, or the plain loops do).

    out[.., m, o] = f(sum over taps, w, c of a[.., m * stride + w * dilation, channel of o's group and c] * b[o, taps, w, c])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir import dtype as dt
from ...ir.blocks import Banded
from ...ir.expr import Axis, Const, Expr, Load, const, op, substitute, walk
from ...ir.kernel import Kernel, Loop, Scratch, Stmt, StoreStmt
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Stage, Store, dense
from ..access import flat
from .contraction import ACC, ONE_COLUMN, Contraction, _least, _product, params_of, where_of

TALL = 0.75  # of the registers are accumulators; the rest holds weights and a column
FEW = 3  # window elements of the widest row whose weights stay in registers beside them


@dataclass(frozen=True, slots=True)
class Group:
    """How the axes of a Contraction fall into a Banded tile."""

    group: tuple[Axis, Expr]
    per: int  # output channels of a group in one tile
    together: int  # groups in one tile
    vectors: int
    rest: tuple[tuple[Axis, Expr], ...]  # other batch axes
    taps: tuple[tuple[Axis, Expr], ...]
    window: tuple[Axis, int]
    channel: tuple[Axis, int]
    stride: int
    dilation: int


def group_of(c: Contraction, buffers: Mapping[str, Buffer]) -> Group | None:
    """The Contraction as Banded tiles, if it has that form and gains by it."""
    m = c.rows[-1][0]
    layout = buffers[c.a.buf].layout
    if layout is None or layout.splits or not c.batch or c.fold.dtype is not dt.f32:
        return None
    at = flat(layout, c.a.index)
    loops = (*c.taps, c.k)
    sizes = {x: const_of(e) for x, e in loops}
    shared = next((i for i in c.a.index if m in linear(i).terms), None)
    if shared is None or m not in at.terms or const_of(at.terms[m]) is None:
        return None
    terms = linear(shared).terms
    stride = const_of(terms[m]) or 0
    # Rows of an image may share a dimension with its columns (tokens seen as an image): their taps are as good as in one of their own.
    windows = sorted((x for x, _ in loops if x in terms and (const_of(terms[x]) or 0) > 0), key=lambda x: const_of(terms[x]) or 0)
    group = next((x for x in reversed(c.batch) if x[0] in at.terms and x[0] not in terms), None)
    if group is None or stride < 1 or not all(isinstance(x, Axis) for x in terms):
        return None
    step = const_of(at.terms[group[0]])
    index = next((linear(i).terms for i in c.a.index if group[0] in linear(i).terms), None)
    channels = [x for x, _ in loops if index is not None and x in index]
    if index is None or len(channels) > 1 or step is None or step < 1:
        return None
    channel = channels[0] if channels else Axis("c_one")
    window = windows[0] if windows else Axis("w_one")
    deep, wide = sizes.get(channel, 1), sizes.get(window, 1)
    near = const_of(at.terms.get(channel, const(1)))
    per = const_of(c.n[1])
    if deep is None or wide is None or near is None or per is None or wide > 8:
        return None
    taps = tuple(x for x in loops if x[0] not in (channel, window))
    rest = tuple(x for x in c.batch if x is not group)
    dilation = (const_of(terms[window]) or 1) if windows else 1
    together, vectors, lanes = 1, 1, c.lanes
    if per < lanes:
        together = min(lanes // per, max(1, (2 * lanes - 1 - (deep - 1) * near) // step + 1))
        if near != 1 or ((together - 1) * step + (deep - 1) * near + 1 > 2 * lanes):
            return None
    elif wide == 1:
        return None
    else:
        vectors = 2 if per % (2 * lanes) == 0 else 1
    if together == 1 and per < lanes:
        return None if wide == 1 else Group(group, per, 1, 1, rest, taps, (window, wide), (channel, deep), stride, dilation)
    return Group(group, per, together, vectors, rest, taps, (window, wide), (channel, deep), stride, dilation)


def rows_of(g: Group, extent: int | None, registers: int) -> int:
    """Results of one tile: the fewest loads and multiply-adds over the whole row, within the registers."""
    wide = g.window[1]
    most = max(1, (int(TALL * registers) - max(0, wide - FEW)) // g.vectors)
    if extent is None:
        return min(most, 14)

    def work(rows: int) -> tuple[float, int]:
        columns = len({m * g.stride + w * g.dilation for m in range(rows) for w in range(wide)})
        busy = max(rows * wide * g.vectors + columns, 4 * wide * min(g.channel[1], 2))  # short chains wait for their own sums
        return -(-extent // rows) * (busy + 4), rows

    return min(work(r) for r in range(1, min(most, extent) + 1))[1]


def form_grouped(c: Contraction, buffers: dict[str, Buffer]) -> tuple[Stage, Kernel] | None:
    """The Stage that packs `b`, and the kernel; the packed buffer is entered in `buffers`."""
    g = group_of(c, buffers)
    if g is None:
        return None
    one = c.n[0] is ONE_COLUMN
    mt, ml, nt, lane = Axis("mt"), Axis("ml"), Axis("nt"), Axis("nl")
    (m, m_extent), (n, n_extent) = c.rows[-1], c.n
    rows, width = rows_of(g, const_of(m_extent), c.target.vectors.registers), c.lanes * g.vectors
    used = g.per * g.together if g.per < c.lanes else width
    at: dict[Expr, Expr] = {}
    if g.together > 1:
        tiles: tuple[tuple[Axis, Expr], ...] = ((nt, op("floordiv", g.group[1] + (g.together - 1), const(g.together))),)
        at[g.group[0]] = nt * g.together + (lane if g.per == 1 else op("floordiv", lane, const(g.per)))
        inside, most = (const(0) if g.per == 1 else op("mod", lane, const(g.per))), used
        left = (g.group[1] - nt * g.together) * g.per
        groups = _least(g.together, g.group[1] - nt * g.together, g.group[1])
    else:
        tiles = (g.group, (nt, op("floordiv", n_extent + (width - 1), const(width))))
        inside, most = nt * width + lane, min(used, width)
        left, groups = n_extent - nt * width, const(1)
    if not one:
        at[n] = inside
    total = g.group[1] * g.per if g.together > 1 else n_extent
    wide = _least(most, left, total)
    packing, packed = _pack(c, g, tiles, lane, at, left, most, width)

    first = Axis("ng")
    of_a: dict[Expr, Expr] = {m: mt * rows + ml}
    if g.together > 1:
        of_a[g.group[0]] = nt * g.together + first
    a = substitute(c.a, of_a)
    where = (*(x for x, _ in g.rest), *(x for x, _ in tiles), *(x for x, _ in g.taps), g.window[0], g.channel[0], lane)
    b = Load(packed.name, packed.dtype, where)
    assert isinstance(a, Load)
    live = _least(rows, m_extent - mt * rows, m_extent)
    per = g.per if g.together > 1 else width
    tile = Banded("acc", rows, g.vectors, per, ml, live, g.taps, *g.window, *g.channel, first, groups, lane, a, b, c.lanes)
    if tile.column_bounds() is None:
        return None
    buffers[packed.name] = packed
    table: dict[Expr, Expr] = {ACC: Load("acc", dt.f32, (ml * width + lane,)), m: mt * rows + ml, **at}
    (store,) = c.stage.stores
    stores = (replace(store, value=c.value),)
    body: tuple[Stmt, ...] = tuple(
        StoreStmt(
            s.buf, tuple(linear(substitute(i, table)).expr() for i in s.index), _tidied(substitute(s.value, table)), s.mode,
            where_of(s, table),
        ) for s in stores
    )
    epilogue = Loop(ml, live, "serial", (Loop(lane, wide, "vector", body),))
    m_tiles = (*c.rows[:-1], (mt, op("floordiv", m_extent + (rows - 1), const(rows))))
    is_small = _product([*packed.shape]) * packed.dtype.itemsize <= c.target.caches.near
    grid = (*g.rest, *m_tiles[:-1], *tiles, m_tiles[-1]) if is_small else (*g.rest, *tiles, *m_tiles)
    steps = rows * g.vectors * g.window[1] * g.channel[1] * max(1, _product([e for _, e in g.taps]))
    params, syms = params_of(stores, c, packed, buffers, grid)
    scratch = (Scratch("acc", dt.f32, rows * width),)
    origins = (c.stage.place,)
    grain = const(max(1, 4096 // steps))
    return packing, Kernel("grouped", params, syms, grid, grain, scratch, (tile, epilogue), origins=origins, kind="grouped")


def _tidied(e: Expr) -> Expr:
    """Indices of loads in linear form: (l // 4) * 4 + l % 4 is l again."""
    table: dict[Expr, Expr] = {}
    for x in walk(e):
        if isinstance(x, Load):
            table[x] = Load(x.buf, x.dtype, tuple(linear(i).expr() for i in x.index), x.mask, x.other)
    return substitute(e, table)


def _pack(
    c: Contraction, g: Group, tiles: tuple[tuple[Axis, Expr], ...], lane: Axis, at: dict[Expr, Expr], left: Expr, most: int, width: int
) -> tuple[Stage, Buffer]:
    """The Stage that writes `b` in tile order, zeros in lanes without a channel."""
    axes = (*g.rest, *tiles, *g.taps, (g.window[0], const(g.window[1])), (g.channel[0], const(g.channel[1])), (lane, const(width)))
    load = substitute(c.b, at)
    assert isinstance(load, Load)
    exact = most == width and const_of(_least(most, left, left)) == width
    inside = op("lt", lane, op("min", const(most), left))
    if c.b.mask is not None:
        inside = op("and", inside, substitute(c.b.mask, at))
    value: Expr = load if exact else Load(load.buf, load.dtype, load.index, inside, Const(load.dtype, 0.0))
    names: dict[Expr, Expr] = {x: Axis(f"i{j}") for j, (x, _) in enumerate(axes)}
    renamed = tuple((names[x], e) for x, e in axes)
    name = f"{c.stage.stores[0].buf}_packed"
    shape = tuple(e for _, e in axes)
    store = Store(name, tuple(x for x, _ in renamed), substitute(value, names))  # type: ignore[misc]
    buffer = Buffer(name, c.b.dtype, shape, dense(shape), "temp", None, c.stage.loc)
    return Stage(renamed, (store,), loc=c.stage.loc, origin="pack"), buffer  # type: ignore[arg-type]
