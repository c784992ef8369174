"""Products of bfloat16: the contraction template for instructions that multiply pairs (AMX tiles, AVX-512-BF16 dot products).

In: a Contraction of two bfloat16 operands whose `a` lies plain. Out: the Stage that packs `b`, and a kernel of Paired tiles; None where the
form does not fit. Tiles take 32 of k at a time, so `b` is packed with k in pairs and zeros up to a multiple of 32:

    each tap by itself:     [batch.., n tile, taps.., k / 2, (n in tile, k % 2)]     the rest of each tap's rows is copied
    taps joined:            [batch.., n tile, (taps.., k) / 2, (n in tile, k % 2)]     all rows are copied side by side
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...ir import dtype as dt
from ...ir.blocks import Interleave, Paired, Transpose
from ...ir.expr import Axis, Expr, Load, const, op, substitute, walk
from ...ir.kernel import Kernel, Loop, Scratch, Stmt, StoreStmt
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Stage, Store, dense, point_number
from ..access import flat
from ..deps import estimate
from .contraction import ACC, ONE_COLUMN, Axes, Contraction, _least, _product, only_where, params_of, stores_along, where_of

LANES = 16  # sums of a row of a hardware tile
TILE = 16  # rows of one hardware tile
TAPS = 1024  # most taps: a kernel keeps the place of each
DEEP = 32  # of k that a hardware tile takes
INTERLEAVED = 2048  # most of k of a tile of columns that is interleaved into scratch
ITEMS = 16  # blocks that keep threads busy
NEAR = 1 << 20  # bytes of packed tiles of columns that stay in the second-level cache
MANY = 16  # tiles of rows
HELD = 3 << 15  # most elements of the rows that are copied
COPY = 1.7  # time of copying a hardware tile of `a`, in products of two of them
PIECE = 3.0  # the same of 16 short pieces of rows
SPLIT = 1.3  # the same of a product that reads rows which do not begin with a line


def has_pairs(c: Contraction) -> bool:
    """Is it a product for this template, once its `a` lies plain?"""
    taps = [const_of(e) for _, e in c.taps]
    known = bool(const_of(c.k[1])) and None not in taps and _product([e for _, e in c.taps]) <= TAPS
    return c.target.vectors.pairs and c.a.dtype is dt.bf16 and c.b.dtype is dt.bf16 and known and (c.n[0] is not ONE_COLUMN or not c.batch)


def fills_pairs(c: Contraction) -> bool:
    """Does one group of a convolution give pairs enough work alone? Half of a vector of columns, and as many channels."""
    return has_pairs(c) and estimate(c.n[1]) >= LANES // 2 and estimate(c.k[1]) >= LANES // 2


def lies_plain(c: Contraction, buffers: Mapping[str, Buffer]) -> bool:
    """Is k of a row side by side, and does no row or k fall into padding?"""
    layout = buffers[c.a.buf].layout
    if layout is None or layout.splits:
        return False
    if c.a.mask is not None and any(x in (c.rows[-1][0], c.k[0]) or isinstance(x, Load) for x in walk(c.a.mask)):
        return False
    return const_of(flat(layout, c.a.index).terms.get(c.k[0], const(0))) == 1


def form_paired(c: Contraction, buffers: dict[str, Buffer]) -> tuple[Stage, Kernel, Buffer] | None:
    """The Stage that packs `b`, the kernel, and the packed buffer. `buffers`: as the kernel sees them."""
    k = const_of(c.k[1])
    if not has_pairs(c) or k is None or not lies_plain(c, buffers):
        return None
    vectors = 1 if (const_of(c.n[1]) or 2 * LANES) <= LANES else 2
    rows = rows_of(const_of(c.rows[-1][1]))
    joined = joins_taps(k, c, rows, vectors)
    packing, packed = _pack(c, k, LANES * vectors, joined)
    return packing, _kernel(c, k, rows, vectors, joined, packed, buffers), packed


def form_changing_pairs(c: Contraction, buffers: dict[str, Buffer]) -> Kernel | None:
    """The kernel of a product whose `b` changes from call to call: each tile of columns is interleaved into scratch, then all tiles of
    a block of rows meet it. None where `b` has taps, lies otherwise than along n or k, or is too deep."""
    k, layout = const_of(c.k[1]), buffers[c.b.buf].layout
    if not has_pairs(c) or k is None or k > INTERLEAVED or c.taps or c.b.mask is not None or not lies_plain(c, buffers):
        return None
    if layout is None or layout.splits or layout.pad:
        return None
    at = flat(layout, c.b.index)
    axes = (c.n[0], c.k[0])
    uneven = any(atom not in axes and any(x in axes for x in walk(atom)) for atom in at.terms)
    if uneven or all(const_of(at.terms.get(x, const(0))) != 1 for x in axes):
        return None
    vectors = 1 if (const_of(c.n[1]) or 2 * LANES) <= LANES else 2
    (m, m_extent), (n, n_extent), width, rows = c.rows[-1], c.n, LANES * vectors, rows_of(const_of(c.rows[-1][1]))
    mb, mt, ml, nt, nl = Axis("mb"), Axis("mt"), Axis("ml"), Axis("nt"), Axis("nl")
    columns = op("floordiv", n_extent + (width - 1), const(width))
    others = _product([e for _, e in (*c.batch, *c.rows[:-1])]) * (const_of(columns) or 16)
    tiles = _block(const_of(m_extent), rows, k, others, c.target.caches.rows)
    start = (mb * tiles + mt) * rows
    live, wide = _least(rows, m_extent - start, m_extent), _least(width, n_extent - nt * width, n_extent)
    left = op("floordiv", m_extent - mb * (tiles * rows) + (rows - 1), const(rows))
    in_block = _least(tiles, left, op("floordiv", m_extent + (rows - 1), const(rows)))
    a, b = substitute(c.a, {m: start + ml}), substitute(c.b, {n: nt * width + nl})
    assert isinstance(a, Load)
    assert isinstance(b, Load)
    a = Load(a.buf, dt.bf16, tuple(linear(i).expr() for i in a.index), a.mask, a.other)
    interleaved = Load("panel", dt.bf16, (op("floordiv", c.k[0], const(2)) * (2 * width) + nl * 2 + op("mod", c.k[0], const(2)),))
    interleave = Interleave("panel", 2 * width, nl, wide, c.k[0], const(k), -(-k // DEEP) * DEEP, b)
    tile = Paired("acc", rows, vectors, ml, live, (), c.k[0], k, nl, a, interleaved)
    results, transposed = _epilogue(c, rows, start, ml, nt * width, nl, live, wide, width, buffers)
    loop = Loop(mt, in_block, "serial", (tile, *results))
    grid = (*c.batch, *c.rows[:-1], (mb, op("floordiv", m_extent + (rows * tiles - 1), const(rows * tiles))), (nt, columns))
    params, syms = params_of(c.stage.stores, c, buffers[c.b.buf], buffers, grid)
    scratch = (Scratch("acc", dt.f32, rows * width), Scratch("panel", dt.bf16, -(-k // DEEP) * DEEP * width), *transposed)
    grain = const(max(1, 32768 // (rows * tiles * vectors * k)))
    origins = (c.stage.place,)
    return Kernel("contraction", params, syms, grid, grain, scratch, (interleave, loop), origins=origins, kind="contraction")


def _block(m: int | None, rows: int, k: int, others: int, cached: int) -> int:
    """Tiles of rows that share an interleaved panel: as many as stay in the second-level cache, unless that leaves threads without work."""
    if m is None:
        return 8
    tiles = -(-m // rows)
    blocks = max(-(-tiles * rows * k * 2 // cached), min(-(-ITEMS // others), tiles // 4))
    return -(-tiles // blocks)


def rows_of(m: int | None) -> int:
    """Rows of a tile, two hardware tiles at most: few hardware tiles first, which take the same time however many rows they have, then
    few tiles, then few rows."""
    if m is None:
        return 2 * TILE

    def price(rows: int) -> tuple[int, int]:
        whole, rest = divmod(m, rows)
        return whole * (-(-rows // TILE) * TILE + 12) + (0 if rest == 0 else -(-rest // TILE) * TILE + 20), rows

    return min(range(1, min(2 * TILE, m) + 1), key=price)


def joins_taps(k: int, c: Contraction, rows: int, vectors: int) -> bool:
    """Is it cheaper to copy the rows of all taps, once per row of tiles, than to fill up every tap to 32 of k and copy each rest?"""
    taps, tiles = _product([e for _, e in c.taps]), -(-estimate(c.n[1]) // (LANES * vectors))
    whole, each = -(-taps * k // DEEP), -(-k // DEEP)
    if taps == 1 or k % DEEP == 0 or c.a.mask is not None or rows * whole * DEEP > HELD:
        return False
    work = vectors * -(-rows // TILE)  # products of hardware tiles in a step
    if k < DEEP and k % 2 == 0:  # read where they lie, while the copy moves them piece by piece
        return whole * work * tiles + PIECE * taps * rows / TILE < taps * tiles * SPLIT * work
    return whole * (work * tiles + COPY * rows / TILE) < taps * tiles * (SPLIT * each * work + COPY * rows / TILE)


def _pack(c: Contraction, k: int, width: int, joined: bool) -> tuple[Stage, Buffer]:
    """The Stage that writes `b` in tile order and pairs, zeros past the ends of n and k."""
    n, extent = c.n
    tile, pair, lane = Axis("nt"), Axis("kp"), Axis("nl")
    tiles = op("floordiv", extent + (width - 1), const(width))
    taps = () if joined else c.taps
    deep = k * (_product([e for _, e in c.taps]) if joined else 1)
    axes = (*c.batch, (tile, tiles), *taps, (pair, const(-(-deep // DEEP) * (DEEP // 2))), (lane, const(2 * width)))
    at, element = tile * width + op("floordiv", lane, const(2)), pair * 2 + op("mod", lane, const(2))
    table: dict[Expr, Expr] = {n: at, c.k[0]: element}
    if joined:
        table[c.k[0]], left = op("mod", element, const(k)), op("floordiv", element, const(k))
        for axis, size in reversed(c.taps):
            table[axis], left = op("mod", left, size), op("floordiv", left, size)
    value = substitute(c.b, table)
    assert isinstance(value, Load)
    if (const_of(extent) or 1) % width != 0:
        value = only_where(value, op("lt", at, extent))
    if deep % DEEP:
        value = only_where(value, op("lt", element, const(deep)))
    names: dict[Expr, Expr] = {x: Axis(f"i{j}") for j, (x, _) in enumerate(axes)}
    name = f"{c.stage.stores[0].buf}_packed"
    shape = tuple(e for _, e in axes)
    index = tuple(names[x] for x, _ in axes)
    store = Store(name, index, substitute(value, names))
    buffer = Buffer(name, dt.bf16, shape, dense(shape), "temp", None, c.stage.loc)
    return Stage(tuple(zip(index, shape, strict=True)), (store,), loc=c.stage.loc, origin="pack"), buffer  # type: ignore[arg-type]


def _kernel(c: Contraction, k: int, rows: int, vectors: int, joined: bool, packed: Buffer, buffers: dict[str, Buffer]) -> Kernel:
    (m, m_extent), (_, n_extent) = c.rows[-1], c.n
    width = LANES * vectors
    mt, ml, nb, ni, nl = Axis("mt"), Axis("ml"), Axis("nb"), Axis("ni"), Axis("nl")
    tiles = op("floordiv", n_extent + (width - 1), const(width))
    passing = _product([e for _, e in c.rows[:-1]]) * -(-(const_of(m_extent) or 64) // rows)
    near = _near(const_of(tiles), _product([*packed.shape[len(c.batch) + 1 :]]), passing)
    nt = ni if near is None else nb * near + ni
    row = mt * rows + ml
    live, wide = _least(rows, m_extent - mt * rows, m_extent), _least(width, n_extent - nt * width, n_extent)
    a = substitute(c.a, {m: row})
    assert isinstance(a, Load)
    a = Load(c.a.buf, dt.bf16, tuple(linear(i).expr() for i in a.index), a.mask, a.other)
    element: Expr = c.k[0]
    if joined:
        element = const(0)
        for axis, size in (*c.taps, c.k):
            element = element * size + axis
    taps = () if joined else tuple(x for x, _ in c.taps)
    at = (op("floordiv", element, const(2)), nl * 2 + op("mod", element, const(2)))
    b = Load(packed.name, dt.bf16, (*(x for x, _ in c.batch), nt, *taps, *at))
    results, transposed = _epilogue(c, rows, mt * rows, ml, nt * width, nl, live, wide, width, buffers)
    m_tiles = (*c.rows[:-1], (mt, op("floordiv", m_extent + (rows - 1), const(rows))))
    if near is None:
        grid: tuple[tuple[Axis, Expr], ...] = (*c.batch, *m_tiles, (ni, tiles))
    else:
        grid = (*c.batch, (nb, op("floordiv", tiles, const(near))), *m_tiles, (ni, const(near)))
    prefetch, lines = (None, 0) if near is None else _prefetch(c, packed, (nb, ni), near, m_tiles, width, joined)
    tile = Paired("acc", rows, vectors, ml, live, c.taps, c.k[0], k, nl, a, b, joined, prefetch, lines)
    steps = rows * vectors * k * max(1, _product([e for _, e in c.taps]))
    params, syms = params_of(c.stage.stores, c, packed, buffers, grid)
    scratch = (Scratch("acc", dt.f32, rows * width), *transposed)
    origins = (c.stage.place,)
    grain = const(max(1, 32768 // steps))
    return Kernel("contraction", params, syms, grid, grain, scratch, (tile, *results), origins=origins, kind="contraction")


def _epilogue(
    c: Contraction, rows: int, start: Expr, ml: Axis, left: Expr, nl: Axis, live: Expr, wide: Expr, width: int, buffers: dict[str, Buffer]
) -> tuple[tuple[Stmt, ...], tuple[Scratch, ...]]:
    """What becomes of the sums of the tile at row `start`, column `left`, and scratch for it. Results contiguous along the rows are
    transposed in registers first."""
    (store,) = c.stage.stores
    deep = -(-rows // LANES) * LANES
    transposes = 2 * rows >= LANES and stores_along(c, c.rows[-1][0], buffers)
    acc = Load("transposed", dt.f32, (nl * deep + ml,)) if transposes else Load("acc", dt.f32, (ml * width + nl,))
    table: dict[Expr, Expr] = {ACC: acc, c.rows[-1][0]: start + ml, c.n[0]: left + nl}
    index, value = tuple(substitute(i, table) for i in store.index), substitute(c.value, table)
    body = StoreStmt(store.buf, index, value, store.mode, where_of(store, table))
    if not transposes:
        return (Loop(ml, live, "serial", (Loop(nl, wide, "vector", (body,)),)),), ()
    transpose = Transpose("transposed", deep, ml, live, nl, wide, Load("acc", dt.f32, (ml * width + nl,)))
    return (transpose, Loop(nl, wide, "serial", (Loop(ml, live, "vector", (body,)),))), (Scratch("transposed", dt.f32, width * deep),)


def _prefetch(
    c: Contraction, packed: Buffer, tile: tuple[Axis, Axis], near: int, m_tiles: Axes, width: int, joined: bool
) -> tuple[Expr | None, int]:
    """While the rows pass over `near` column tiles, the next ones come from memory, a piece with each tile."""
    taps, others, passing = packed.shape[len(c.batch) + 1 : -2], packed.shape[: len(c.batch) + 1], [const_of(e) for _, e in m_tiles]
    if None in passing or any(const_of(e) is None for e in others):
        return None, 0
    (nb, ni), lines = tile, -(-width // math.prod(e or 1 for e in passing))
    size, each = _product([*packed.shape[len(c.batch) + 1 :]]), lines * (const_of(packed.shape[-2]) or 0) // (DEEP // 2) * DEEP
    place = point_number(c.batch) * others[-1] * size + (nb + 1) * (near * size)
    place = place + (point_number(m_tiles) * near + ni) * (each * _product([*taps]))
    return (place if joined else place + point_number(c.taps) * each), lines


def _near(tiles: int | None, size: int, passing: int) -> int | None:
    """How many column tiles of `size` elements each row tile meets before the next one, so that they stay in the second-level cache; None:
    all there are. Where few row tiles pass, the next ones come in meanwhile and need room too."""
    if tiles is None:
        return 1
    room = NEAR if passing >= MANY else NEAR // 2
    near = next(n for n in range(tiles, 0, -1) if tiles % n == 0 and (2 * n * size <= (NEAR if n == tiles else room) or n == 1))
    return None if near == tiles else near
