"""Products that share their left-hand operand and meet in one value (the gates of a recurrent cell): one kernel, one pass over the operand.

In: a Stage. Out: a Gated, and from it a pack Stage with its buffer, and one Kernel.

    s[g] = sum over taps, k of a(m, taps, k) * b(taps, k, n, g);   stores of f(s[0], s[1], ..)(m, n)

`b` is packed to [batch.., n tile, taps.., k, g, lanes], so that one register tile holds the sums of all gates for the same n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir.blocks import Contract
from ...ir.expr import Axis, Const, Expr, Fold, Load, Var, const, op, substitute, walk
from ...ir.kernel import Kernel, Let, Loop, Scratch, Stmt, StoreStmt
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Stage, Store, dense
from .contraction import ONE_COLUMN, Contraction, _classify, _factors, _least, _next_tile, params_of, tails_of, work_of
from .tiling import default_sweep, score

MOST = 16  # products in one kernel are fewer


@dataclass(frozen=True, slots=True)
class Gated:
    """A Stage seen as several products. `c` is the first of them; product g reads `c.b` with `step` * g added to its index."""

    c: Contraction
    folds: tuple[Fold, ...]
    step: tuple[int, ...]


def recognise_gated(stage: Stage) -> Gated | None:
    """The Stage as products of one left-hand operand, or None."""
    if stage.scan or stage.lets or any(s.mode != "set" or s.mask is not None or not s.unique for s in stage.stores):
        return None
    folds = tuple(dict.fromkeys(e for e in walk(*(s.value for s in stage.stores)) if isinstance(e, Fold)))
    pairs = [_factors(f) for f in folds]
    if not 2 <= len(folds) < MOST or not _is_free_of_order(stage):
        return None
    first = folds[0]
    for turned in (False, True):
        found: list[tuple[tuple[int, ...], Fold, Load, Load]] = []  # how far its `b` is from the first one's
        for fold, pair in zip(folds, pairs, strict=True):
            if pair is None or fold.extents != first.extents:
                return None
            table: dict[Expr, Expr] = dict(zip(fold.axes, first.axes, strict=True))
            a, b = (substitute(e, table) for e in (pair[::-1] if turned else pair))
            assert isinstance(a, Load) and isinstance(b, Load)
            away = _between(found[0][3] if found else b, b)
            if away is None or (found and a is not found[0][2]):
                break
            found.append((away, fold, a, b))
        if len(found) < len(folds):
            continue
        found.sort(key=lambda x: x[0])
        low, high = found[0][0], found[1][0]
        step = tuple(j - i for i, j in zip(low, high, strict=True))
        if any(x[0] != tuple(i + k * s for i, s in zip(low, step, strict=True)) for k, x in enumerate(found)):
            continue
        c = _classify(stage, first, found[0][2], found[0][3])
        if c is not None and c.n[0] is not ONE_COLUMN:
            return Gated(c, tuple(x[1] for x in found), step)
    return None


def _between(a: Load, b: Load) -> tuple[int, ...] | None:
    """What is added to the index from `a` to `b`, if that is constant and all else is alike."""
    if a.buf != b.buf or a.mask is not None or b.mask is not None:
        return None
    steps = [const_of(linear(j - i).expr()) for i, j in zip(a.index, b.index, strict=True)]
    return None if None in steps else tuple(s or 0 for s in steps)


def _is_free_of_order(stage: Stage) -> bool:
    """No iteration reads what another one stores: loads of a stored buffer are at the store's own index, or surely elsewhere."""
    for s in stage.stores:
        for x in walk(*(e for t in stage.stores for e in (*t.index, t.value))):
            if not isinstance(x, Load) or x.buf != s.buf or x.index == s.index:
                continue
            if not any(const_of(linear(i - j).expr()) not in (None, 0) for i, j in zip(s.index, x.index, strict=True)):
                return False
    return True


def _tile(g: Gated) -> tuple[int, int]:
    """(rows, vectors of each gate) of the register tile."""
    gates, work = len(g.folds), work_of(g.c)
    work = replace(work, n=None if work.n is None else work.n * gates)
    registers = work.target.vectors.registers
    tallest = min(registers // 2, work.m or registers)
    fits = [(r, v) for r in range(1, tallest + 1) for v in range(1, (registers - 1) // (gates * (r + 1)) + 1)] or [(1, 1)]
    return max(fits, key=lambda t: score(work, t[0], gates * t[1]))


def form_gated(g: Gated, buffers: Mapping[str, Buffer]) -> tuple[Stage, Buffer, Kernel]:
    """The Stage that packs, its buffer, and the kernel."""
    c, gates = g.c, len(g.folds)
    rows, each = _tile(g)
    width, vectors, summed = c.lanes * each, gates * each, c.fold.dtype
    packing, packed = _pack(g, f"{c.stage.stores[0].buf}_gates", width)
    (m, m_extent), (n, n_extent) = c.rows[-1], c.n
    mt, ml, nt, nl, lane = Axis("mt"), Axis("ml"), Axis("nt"), Axis("nl"), Axis("lane")
    live, wide = _least(rows, m_extent - mt * rows, m_extent), _least(width, n_extent - nt * width, n_extent)
    flat = replace(packed, shape=(*packed.shape[:-2], const(gates * width)))
    flat = replace(flat, layout=dense(flat.shape))
    a = substitute(c.a, {m: mt * rows + ml})
    b = Load(flat.name, flat.dtype, (*(x for x, _ in c.batch), nt, *(x for x, _ in c.taps), c.k[0], nl))
    assert isinstance(a, Load)
    sums: dict[Expr, Expr] = {f: Load("acc", summed, (ml * (gates * width) + (lane + k * width),)) for k, f in enumerate(g.folds)}
    table: dict[Expr, Expr] = {**sums, m: mt * rows + ml, n: nt * width + lane}
    stores = tuple(replace(s, index=tuple(substitute(i, table) for i in s.index), value=substitute(s.value, table)) for s in c.stage.stores)
    found = [Var(f"new{k}", s.value.dtype) for k, s in enumerate(stores)]  # before any store: a cell reads its own old state
    body: tuple[Stmt, ...] = (
        *(Let(v, s.value) for v, s in zip(found, stores, strict=True)),
        *(StoreStmt(s.buf, s.index, v) for v, s in zip(found, stores, strict=True)),
    )
    epilogue = Loop(ml, live, "serial", (Loop(lane, wide, "vector", body),))
    n_tiles = (nt, op("floordiv", n_extent + (width - 1), const(width)))
    m_tiles = (*c.rows[:-1], (mt, op("floordiv", m_extent + (rows - 1), const(rows))))
    by_columns = default_sweep(replace(work_of(c), n=(const_of(n_extent) or c.lanes) * gates)) == "columns"
    grid = (*c.batch, n_tiles, *m_tiles) if by_columns else (*c.batch, *m_tiles, n_tiles)
    prefetch = _next_tile(c, m_tiles, n_tiles, vectors) if by_columns else (None, 0, const(0))
    contract = Contract(
        "acc", rows, vectors, ml, live, c.taps, c.k[0], c.k[1], nl, a, b, *prefetch, tails=tails_of(rows, live, m_extent),
        vector_bytes=c.target.vectors.bytes,
    )  # fmt: skip
    steps = rows * vectors
    for _, e in (*c.taps, c.k):
        steps *= const_of(e) or 64
    plain: tuple[Store, ...] = tuple(
        replace(s, value=substitute(s.value, {f: Const(summed, 0.0) for f in g.folds})) for s in c.stage.stores
    )
    params, syms = params_of(plain, c, flat, dict(buffers), grid)
    scratch = (Scratch("acc", summed, rows * gates * width),)
    kernel = Kernel(
        "gated", params, syms, grid, const(max(1, 4096 // steps)), scratch, (contract, epilogue), origins=(c.stage.place,),
        kind="contraction",
    )
    return packing, packed, kernel


def _pack(g: Gated, name: str, width: int) -> tuple[Stage, Buffer]:
    """The Stage that writes `b` in tile order, the gates of one tile side by side, zeros past the end of n."""
    c, (n, extent) = g.c, g.c.n
    tile, gate, lane = Axis("nt"), Axis("ng"), Axis("nl")
    tiles = op("floordiv", extent + (width - 1), const(width))
    axes = (*c.batch, (tile, tiles), *c.taps, c.k, (gate, const(len(g.folds))), (lane, const(width)))
    at = tile * width + lane
    index = tuple(substitute(i, {n: at}) + gate * s if s else substitute(i, {n: at}) for i, s in zip(c.b.index, g.step, strict=True))
    exact = (const_of(extent) or 1) % width == 0
    value = Load(c.b.buf, c.b.dtype, index) if exact else Load(c.b.buf, c.b.dtype, index, op("lt", at, extent), Const(c.b.dtype, 0.0))
    names: dict[Expr, Expr] = {x: Axis(f"i{j}") for j, (x, _) in enumerate(axes)}
    renamed = tuple((Axis(f"i{j}"), e) for j, (_, e) in enumerate(axes))
    shape = tuple(e for _, e in axes)
    buffer = Buffer(name, c.b.dtype, shape, dense(shape), "temp", None, c.stage.loc)
    store = Store(name, tuple(x for x, _ in renamed), substitute(value, names))
    return Stage(renamed, (store,), loc=c.stage.loc, origin="pack"), buffer
