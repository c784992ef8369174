"""Contractions whose right-hand operand changes from call to call: read where it lies, or block by block through scratch.

In: a Contraction, its tiling, layouts. Out: one Kernel; None where `b` lies otherwise than below (then it is packed as a constant is, on
every call).

    n contiguous:                 tiles read b in place, the last one only the columns that exist
    the same, no taps, and steps of k a multiple of 4 KB apart, or
    k contiguous, no taps:        per block of rows and tile of columns, for each chunk of k:
                                      panel[k, n] = b[k, n], transposed in registers;  each tile of rows:  acc += a @ panel

Elsewhere a copy of rows that are contiguous does not pay: prefetching hides where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.blocks import Contract, Transpose
from ...ir.expr import Axis, Expr, Load, const, op, substitute, walk
from ...ir.kernel import Kernel, Loop, Scratch, Stmt, StoreStmt
from ...ir.linear import Linear, const_of
from ...ir.program import Buffer
from ..access import flat
from .contraction import Contraction, _least, _product, acc_of, form_contraction, params_of, where_of
from .tiling import Tiling

PANEL = 32 << 10  # bytes of a panel: it stays in the first-level cache while the rows pass
ROWS = 192  # of a block: what a panel costs is spread over them
ITEMS = 16  # blocks that keep threads busy


def form_changing(c: Contraction, tiling: Tiling, buffers: dict[str, Buffer], origins: tuple[str, ...]) -> Kernel | None:
    """The kernel of `c`; its result goes where c.stage stores it."""
    at = _address(c, buffers)
    if at is None:
        return None
    if const_of(at.terms.get(c.n[0], const(0))) == 1:
        if _is_copied(c, at):
            return _through_panels(c, tiling, buffers, origins, copied=True)
        (store,) = c.stage.stores
        return form_contraction(c, (replace(store, value=c.value),), None, tiling, buffers, origins)
    return _through_panels(c, tiling, buffers, origins) if const_of(at.terms.get(c.k[0], const(0))) == 1 and not c.taps else None


def is_along_n(c: Contraction, buffers: Mapping[str, Buffer]) -> bool:
    """Does `b` lie contiguous along n?"""
    at = _address(c, buffers)
    return at is not None and const_of(at.terms.get(c.n[0], const(0))) == 1


def _address(c: Contraction, buffers: Mapping[str, Buffer]) -> Linear | None:
    """The element number of `b`, if n and k step through it evenly."""
    layout = buffers[c.b.buf].layout
    if layout is None or layout.splits or layout.pad or c.b.mask is not None or c.b.dtype is not c.fold.dtype:
        return None
    at = flat(layout, c.b.index)
    axes = (c.n[0], c.k[0])
    return None if any(atom not in axes and any(x in axes for x in walk(atom)) for atom in at.terms) else at


def _is_copied(c: Contraction, at: Linear) -> bool:
    """Do all of k of a tile of columns share the few places of one set of the caches? Then a copy is made before rows meet it."""
    step = const_of(at.terms.get(c.k[0], const(0)))
    return step is not None and step * c.fold.dtype.itemsize % c.target.caches.turn == 0 and not c.taps


def _through_panels(
    c: Contraction, tiling: Tiling, buffers: dict[str, Buffer], origins: tuple[str, ...], copied: bool = False
) -> Kernel | None:
    rows, vectors, width = tiling.rows, tiling.vectors, c.lanes * tiling.vectors
    (m, m_extent), (n, n_extent), (k, k_extent) = c.rows[-1], c.n, c.k
    depth = max(64, PANEL // c.target.vectors.bytes // vectors // 16 * 16)
    whole = (const_of(k_extent) or 1 << 30) <= 2 * depth  # one panel holds all of k
    depth = const_of(k_extent) or 1 if whole else depth
    tiles = _tiles_of_block(c, tiling)
    mb, mt, ml, nt, nl, kb, kl = (Axis(x) for x in ("mb", "mt", "ml", "nt", "nl", "kb", "kl"))
    start = mb * (rows * tiles)
    row, column, step = start + mt * rows + ml, nt * width + nl, kl if whole else kb * depth + kl
    live = _least(rows, m_extent - start - mt * rows, m_extent)
    wide = _least(width, n_extent - nt * width, n_extent)
    deep = k_extent if whole else _least(depth, k_extent - kb * depth, k_extent)
    in_block = _least(tiles, op("floordiv", m_extent - start + (rows - 1), const(rows)), op("floordiv", m_extent + (rows - 1), const(rows)))
    a, b = substitute(c.a, {m: row, k: step}), substitute(c.b, {n: column, k: step})
    assert isinstance(a, Load)
    assert isinstance(b, Load)
    layout = buffers[b.buf].layout
    at = flat(layout, b.index) if layout is not None else None
    if at is None or any(atom is not kl and kl in walk(atom) for atom in at.terms):
        return None  # a division that no k below k_extent feels, but the last panel's end might
    panel = Load("panel", b.dtype, (kl * width + nl,))
    size = c.target.vectors.bytes
    fill: Stmt = Transpose("panel", width, nl, wide, kl, deep, b, size)
    if copied:
        fill = Loop(kl, deep, "serial", (Loop(nl, wide, "vector", (StoreStmt("panel", panel.index, b),)),))
    elif const_of(at.terms.get(kl, const(0))) != 1:
        return None
    first = const(0) if whole else mt * rows
    contract = Contract("acc", rows, vectors, ml, live, (), kl, deep, nl, a, panel, first=first, add=not whole, vector_bytes=size)
    summed = c.fold.dtype
    table: dict[Expr, Expr] = {acc_of(summed): Load("acc", summed, ((first + ml) * width + nl,)), m: row, n: column}
    (store,) = c.stage.stores
    stores = (replace(store, value=c.value),)
    index, value = tuple(substitute(i, table) for i in store.index), substitute(c.value, table)
    result = StoreStmt(store.buf, index, value, store.mode, where_of(store, table))
    epilogue = Loop(ml, live, "serial", (Loop(nl, wide, "vector", (result,)),))
    size = rows * width * (1 if whole else tiles)
    body: tuple[Stmt, ...]
    if whole:
        body = (fill, _over(mt, in_block, contract, epilogue))
    else:
        z = Axis("z")
        zero = Loop(z, const(size), "vector", (StoreStmt("acc", (z,), c.fold.init[0]),))
        chunks = op("floordiv", k_extent + (depth - 1), const(depth))
        body = (zero, Loop(kb, chunks, "serial", (fill, _over(mt, in_block, contract))), _over(mt, in_block, epilogue))
    blocks = op("floordiv", m_extent + (rows * tiles - 1), const(rows * tiles))
    columns = op("floordiv", n_extent + (width - 1), const(width))
    grid = (*c.batch, *c.rows[:-1], (mb, blocks), (nt, columns))
    grain = const(max(1, 4096 // (rows * tiles * vectors * max(1, _product([k_extent])))))
    params, syms = params_of(stores, c, buffers[c.b.buf], buffers, grid)
    scratch = (Scratch("acc", summed, size), Scratch("panel", b.dtype, depth * width))
    return Kernel("contraction", params, syms, grid, grain, scratch, body, origins=origins, kind="contraction")


def _over(axis: Axis, extent: Expr, *body: Stmt) -> Loop:
    return Loop(axis, extent, "serial", body)


def _tiles_of_block(c: Contraction, tiling: Tiling) -> int:
    """Tiles of rows that share a panel: of nearly equal blocks, fewer where that gives every thread some."""
    most, m = max(1, ROWS // tiling.rows), const_of(c.rows[-1][1])
    if m is None:
        return most
    tiles = -(-m // tiling.rows)
    others = _product([e for _, e in (*c.batch, *c.rows[:-1])]) * -(-(const_of(c.n[1]) or 1 << 20) // (c.lanes * tiling.vectors))
    blocks = max(-(-tiles // most), min(-(-ITEMS // others), max(1, tiles // 4)))
    return -(-tiles // blocks)
