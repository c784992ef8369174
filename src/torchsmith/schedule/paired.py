"""Products of bfloat16: the contraction template for instructions that multiply pairs (AMX tiles, AVX-512-BF16 dot products).

In: a Contraction of two bfloat16 operands whose `a` lies plain. Out: the Stage that packs `b`, and a kernel of Paired tiles; None where the
form does not fit. `b` is packed with k in pairs: [batch.., n tile, taps.., k / 2, (n in tile, k % 2)]; an odd k ends with a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import dtype as dt
from ..ir.expr import Axis, Expr, Load, const, op, substitute, walk
from ..ir.kernel import Kernel, Loop, Paired, Scratch, Stmt, StoreStmt
from ..ir.linear import const_of, linear
from ..ir.program import Buffer, Stage, Store
from .access import flat
from .contraction import ACC, ONE_COLUMN, Contraction, _least, _params, _product, dense, only_where
from .deps import estimate
from .tiling import CACHED, LANES

TILE = 16  # rows of one hardware tile
TAPS = 1024  # most taps: a kernel keeps the place of each


def has_pairs(c: Contraction) -> bool:
    """Is it a product for this template, once its `a` lies plain?"""
    taps = [const_of(e) for _, e in c.taps]
    known = const_of(c.k[1]) is not None and None not in taps and _product([e for _, e in c.taps]) <= TAPS
    return c.a.dtype is dt.bf16 and c.b.dtype is dt.bf16 and known and c.n[0] is not ONE_COLUMN


def fills_pairs(c: Contraction) -> bool:
    """Does one group of a grouped convolution give pairs enough work alone? Half of a vector of columns, and as many channels."""
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
    packing, packed = _pack(c, k, LANES * vectors)
    return packing, _kernel(c, k, vectors, packed, buffers), packed


def rows_of(m: int | None) -> int:
    """Rows of a tile, two hardware tiles at most: as few tiles as can be, then as even as can be."""
    if m is None:
        return 2 * TILE

    def price(rows: int) -> tuple[int, int]:
        halves = -(-rows // TILE)
        return -(-m // rows) * (halves * TILE + 12) + (0 if m % rows == 0 else 8), -rows

    return min(range(1, min(2 * TILE, m) + 1), key=price)


def _pack(c: Contraction, k: int, width: int) -> tuple[Stage, Buffer]:
    """The Stage that writes `b` in tile order and pairs, zeros past the end of n."""
    n, extent = c.n
    tile, pair, lane = Axis("nt"), Axis("kp"), Axis("nl")
    tiles = op("floordiv", extent + (width - 1), const(width))
    axes = (*c.batch, (tile, tiles), *c.taps, (pair, const((k + 1) // 2)), (lane, const(2 * width)))
    at, element = tile * width + op("floordiv", lane, const(2)), pair * 2 + op("mod", lane, const(2))
    value = substitute(c.b, {n: at, c.k[0]: element})
    assert isinstance(value, Load)
    if (const_of(extent) or 1) % width != 0:
        value = only_where(value, op("lt", at, extent))
    if k % 2:
        value = only_where(value, op("lt", element, const(k)))
    names: dict[Expr, Expr] = {x: Axis(f"i{j}") for j, (x, _) in enumerate(axes)}
    name = f"{c.stage.stores[0].buf}_packed"
    shape = tuple(e for _, e in axes)
    index = tuple(names[x] for x, _ in axes)
    store = Store(name, index, substitute(value, names))
    buffer = Buffer(name, dt.bf16, shape, dense(shape), "temp", None, c.stage.loc)
    return Stage(tuple(zip(index, shape, strict=True)), (store,), loc=c.stage.loc, origin="pack"), buffer  # type: ignore[arg-type]


def _kernel(c: Contraction, k: int, vectors: int, packed: Buffer, buffers: dict[str, Buffer]) -> Kernel:
    (m, m_extent), (n, n_extent) = c.rows[-1], c.n
    rows, width = rows_of(const_of(m_extent)), LANES * vectors
    mt, ml, nt, nl, pair, part = Axis("mt"), Axis("ml"), Axis("nt"), Axis("nl"), Axis("kp"), Axis("kr")
    row, column = mt * rows + ml, nt * width + nl
    live, wide = _least(rows, m_extent - mt * rows, m_extent), _least(width, n_extent - nt * width, n_extent)
    a = substitute(c.a, {m: row, c.k[0]: pair * 2 + part})
    a = Load(c.a.buf, dt.bf16, tuple(linear(i).expr() for i in a.index), a.mask, a.other) if isinstance(a, Load) else a
    b = Load(packed.name, dt.bf16, (*(x for x, _ in c.batch), nt, *(x for x, _ in c.taps), pair, nl * 2 + part))
    assert isinstance(a, Load)
    tile = Paired("acc", rows, vectors, ml, live, c.taps, pair, k, part, nl, a, b)
    table: dict[Expr, Expr] = {ACC: Load("acc", dt.f32, (ml * width + nl,)), m: row, n: column}
    (store,) = c.stage.stores
    stores = (replace(store, value=c.value),)
    body: tuple[Stmt, ...] = tuple(
        StoreStmt(s.buf, tuple(substitute(i, table) for i in s.index), substitute(s.value, table), s.mode) for s in stores
    )
    epilogue = Loop(ml, live, "serial", (Loop(nl, wide, "vector", body),))
    n_tiles = (nt, op("floordiv", n_extent + (width - 1), const(width)))
    m_tiles = (*c.rows[:-1], (mt, op("floordiv", m_extent + (rows - 1), const(rows))))
    is_small = 2 * _product([*packed.shape]) <= CACHED
    grid = (*c.batch, *m_tiles, n_tiles) if is_small else (*c.batch, n_tiles, *m_tiles)
    steps = rows * vectors * k * max(1, _product([e for _, e in c.taps]))
    params, syms = _params((tile, epilogue), stores, c, packed, buffers, [e for _, e in grid])
    scratch = (Scratch("acc", dt.f32, rows * width),)
    origins = (c.stage.origin, c.stage.loc)
    return Kernel("contraction", params, syms, grid, const(max(1, 32768 // steps)), scratch, (tile, epilogue), origins=origins)

