"""Products of bfloat16: the contraction template for instructions that multiply pairs (AMX tiles, AVX-512-BF16 dot products).

In: a Contraction of two bfloat16 operands. Out: Stages that prepare its operands, and a kernel of Paired tiles; None where the form does
not fit. `b` is packed with k in pairs: [batch.., n tile, taps.., k / 2, (n in tile, k % 2)]. An `a` that is padded, or whose k does not lie
side by side, is first copied into a buffer with the padding in it: tiles then read plain rows.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import dtype as dt
from ..ir.expr import Axis, Const, Expr, Load, Op, const, op, substitute
from ..ir.kernel import Kernel, Loop, Paired, Scratch, Stmt, StoreStmt
from ..ir.linear import const_of, linear, range_of
from ..ir.program import Buffer, Stage, Store
from .access import flat
from .contraction import ACC, ONE_COLUMN, Contraction, _least, _params, _product, dense
from .deps import estimate
from .tiling import CACHED, LANES

TILE = 16  # rows of one hardware tile
DEPTH = 32  # elements of k that one tile instruction takes


def form_paired(c: Contraction, buffers: dict[str, Buffer]) -> tuple[list[Stage], Kernel] | None:
    """The Stages before the kernel, and the kernel; new buffers are entered in `buffers`."""
    k = const_of(c.k[1])
    if c.a.dtype is not dt.bf16 or c.b.dtype is not dt.bf16 or k is None or k % 2 or c.n[0] is ONE_COLUMN:
        return None
    stages: list[Stage] = []
    if not _lies_plain(c, buffers):
        if k < DEPTH or (c.a.other is not None and c.a.other is not Const(dt.bf16, 0.0)):
            return None
        padded = _with_padding(c, buffers)
        if padded is None:
            return None
        stages, c = [padded[0]], replace(c, a=padded[1])
    vectors = 1 if (const_of(c.n[1]) or 2 * LANES) <= LANES else 2
    packing, packed = _pack(c, k, LANES * vectors)
    buffers[packed.name] = packed
    return [*stages, packing], _kernel(c, k, vectors, packed, buffers)


def _lies_plain(c: Contraction, buffers: dict[str, Buffer]) -> bool:
    """No padding, and the k of a row side by side?"""
    layout = buffers[c.a.buf].layout
    if c.a.mask is not None or layout is None or layout.splits:
        return False
    at = flat(layout, c.a.index)
    # an even start keeps pairs where one 32-bit load takes them
    return const_of(at.terms.get(c.k[0], const(0))) == 1


def _with_padding(c: Contraction, buffers: dict[str, Buffer]) -> tuple[Stage, Load] | None:
    """A copy of `a` over every index that is read, zeros outside, k innermost; and the Load of the copy."""
    extents = dict((*c.stage.axes, *c.taps, c.k))
    spans: list[tuple[int, int]] = []
    for i in c.a.index:
        lo, hi = range_of(i, extents)
        if lo is None or hi is None:
            return None
        spans.append((lo, hi))
    source = buffers[c.a.buf]
    last = next((d for d, i in enumerate(c.a.index) if c.k[0] in linear(i).terms), None)
    if last is None or any(const_of(n) is None for n in source.shape):
        return None
    axes = tuple(Axis(f"i{d}") for d in range(len(spans)))
    shape = tuple(const(hi - lo + 1) for lo, hi in spans)
    size = _product(list(shape))
    if size > 2 * _product(list(source.shape)) + 4096 or estimate(c.n[1]) < LANES:
        return None  # mostly padding, or hardly used again
    inside: Expr | None = None
    for axis, (lo, hi), n in zip(axes, spans, source.shape, strict=True):
        tests = [op("ge", axis + lo, const(0))] if lo < 0 else []
        tests += [op("lt", axis + lo, n)] if hi >= (const_of(n) or 0) else []
        for t in tests:
            inside = t if inside is None else op("and", inside, t)
    index = tuple(axis + lo for axis, (lo, _) in zip(axes, spans, strict=True))
    value: Expr = Load(c.a.buf, dt.bf16, index) if inside is None else Load(c.a.buf, dt.bf16, index, inside, Const(dt.bf16, 0.0))
    name = f"{c.stage.stores[0].buf}_padded"
    order = (*(d for d in range(len(spans)) if d != last), last)
    buffers[name] = Buffer(name, dt.bf16, shape, dense(shape, order), "temp", None, c.stage.loc)
    stage = Stage(tuple(zip(axes, shape, strict=True)), (Store(name, axes, value),), loc=c.stage.loc, origin="pad")
    if not _bounds_only(c.a, source):
        return None
    return stage, Load(name, dt.bf16, tuple(linear(i - lo).expr() for i, (lo, _) in zip(c.a.index, spans, strict=True)))


def _bounds_only(a: Load, source: Buffer) -> bool:
    """Does the mask of `a` say that its index lies inside, and nothing else?"""
    tests = [a.mask] if a.mask is not None else []
    while tests:
        t = tests.pop()
        if isinstance(t, Op) and t.name == "and":
            tests += t.args
        elif not (isinstance(t, Op) and any(
            t.args[0] is i and ((t.name == "ge" and const_of(t.args[1]) == 0) or (t.name == "lt" and t.args[1] is n))
            for i, n in zip(a.index, source.shape, strict=True)
        )):  # fmt: skip
            return False
    return True


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
    axes = (*c.batch, (tile, tiles), *c.taps, (pair, const(k // 2)), (lane, const(2 * width)))
    at = tile * width + op("floordiv", lane, const(2))
    load = substitute(c.b, {n: at, c.k[0]: pair * 2 + op("mod", lane, const(2))})
    assert isinstance(load, Load)
    exact = (const_of(extent) or 1) % width == 0
    value: Expr = load if exact else Load(load.buf, load.dtype, load.index, op("lt", at, extent), Const(load.dtype, 0.0))
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
    a = Load(c.a.buf, dt.bf16, tuple(linear(i).expr() for i in a.index)) if isinstance(a, Load) else a
    b = Load(packed.name, dt.bf16, (*(x for x, _ in c.batch), nt, *(x for x, _ in c.taps), pair, nl * 2 + part))
    assert isinstance(a, Load)
    tile = Paired("acc", rows, vectors, ml, live, c.taps, pair, k // 2, part, nl, a, b)
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

