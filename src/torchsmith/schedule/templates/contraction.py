"""Recognise multiply-add Folds and give them the contraction template: register tiles, packed right-hand operands, fused epilogues.

In: a Stage (and the pointwise Stages that read its result). Out: a pack Stage with its buffer, and one Kernel.

    out[.., m, n] = f(sum over taps, k of a(.., m, taps, k) * b(.., taps, k, n))

n is the axis that only `b` depends on, m the innermost axis that only `a` depends on; axes of both are batches. `b` is packed to
[batch.., n tile, taps.., k, 16 * vectors] so that a tile reads it in order; n past the end is packed as zeros. Of few
columns 2, 4, 8 or 16 neighbours of k lie beside each other in the lanes (`parts_of`), so that vectors are full; a tile whose results lie
contiguous along m is transposed in registers before they are stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...ir import dtype as dt
from ...ir import memo
from ...ir.blocks import Contract, Transpose
from ...ir.bounds import NOTHING_KNOWN
from ...ir.dtype import DType
from ...ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, op, substitute, walk
from ...ir.folds import multiply_add
from ...ir.kernel import Kernel, Loop, Param, Scratch, Stmt, StoreStmt
from ...ir.linear import conjuncts, const_of, linear
from ...ir.program import Buffer, Stage, Store, dense, point_number
from ...ir.target import CPU, Target
from ..access import flat
from ..deps import estimate, parameters
from ..fusion.affine import split_axes
from .tiling import Tiling, Work

TAILS = (6, 4, 2, 1)
OUTER = 2  # row axes outside of the tiled one that every kernel has: images, and rows of an image
PARTS = (1, 2, 4, 8, 16)
WORTH = 0.85  # of the time without parts
NARROW = 4  # vectors; a row of more reads its packed operand more often than it multiplies
NEARLY, EXACT = 1.1, 1.6  # times the least time that more parts may take; of one row, whose few results have nothing to average errors over
SHORT = 8  # an inner loop below this many steps spends its time on starting
SHARED = 8  # row tiles from which on each takes an equal share of what the next tile of `b` needs
STRIDE = 4  # pixels from one row of a window's tile to the next up to which rows count as lying behind each other
LONG = 64  # steps of k from which on the next rows of `a` are worth asking for
STORAGE = frozenset({dt.f32, dt.bf16, dt.f16})  # of operands that are summed in float32
SUMMED = (dt.f32, dt.f64)


@dataclass(frozen=True, slots=True)
class Contraction:
    """A Stage seen as a product. `value` is the Stage's value with the Fold replaced by `acc`."""

    stage: Stage
    fold: Fold
    a: Load
    b: Load
    batch: tuple[tuple[Axis, Expr], ...]
    rows: tuple[tuple[Axis, Expr], ...]  # m axes, the tiled one last
    n: tuple[Axis, Expr]
    taps: tuple[tuple[Axis, Expr], ...]
    k: tuple[Axis, Expr]
    value: Expr
    where: Expr | None = None  # as in Contract
    target: Target = CPU  # whose tiles it is given

    @property
    def lanes(self) -> int:
        """Sums in a vector."""
        return self.target.vectors.lanes(self.fold.dtype.itemsize)


ONE_ROW, ONE_COLUMN = Axis("m_one"), Axis("n_one")


def _factor(e: Expr, summed: DType) -> Load | None:
    """A factor's Load: x, or Cast(f32, x) of a narrower float."""
    if summed is dt.f64:
        return e if isinstance(e, Load) and e.dtype is dt.f64 else None
    if isinstance(e, Cast) and e.dtype is dt.f32:
        e = e.args[0]
    return e if isinstance(e, Load) and e.dtype in STORAGE else None


def acc_of(summed: DType) -> Var:
    """What stands for the product in a Contraction's value."""
    return Var("acc", summed)


ACC = acc_of(dt.f32)
ACCS = tuple(acc_of(d) for d in SUMMED)

def _axes_of(e: Load) -> frozenset[Expr]:
    return frozenset(x for x in walk(e) if isinstance(x, Axis))


@memo.by_identity  # fusion, grouping, layouts and splitting ask the same of each
def recognise(stage: Stage) -> Contraction | None:
    """The Stage (its axes split where that makes its operands affine) as a contraction, or None."""
    if any(s.mask is not None for s in stage.stores) or not any(isinstance(e, Fold) for s in stage.stores for e in walk(s.value)):
        return None
    found = readings(stage)
    # Either side of a matrix product could be packed: take the one that gives vectors along the result's last dimension, else the second
    # factor. A reading with one row is the last resort: split axes may show more (a transposed convolution's), and leave fewer products
    # that share nothing.
    return min(found, key=lambda c: (c.n[0] is ONE_COLUMN, c.rows[0][0] is ONE_ROW, not _is_along(c), batches(c)), default=None)


def readings(stage: Stage) -> list[Contraction]:
    """Every way to see the Stage as a contraction."""
    return [c for s in dict.fromkeys((stage, split_axes(stage, ragged=True))) for c in _readings(s)]


def _is_along(c: Contraction) -> bool:
    """Is the result's last dimension n, and does every `b` meet rows of its own?"""
    return c.stage.stores[0].index[-1] is c.n[0] and all(x in _axes_of(c.a) for x, _ in c.batch)


def batches(c: Contraction) -> int:
    """How many products with operands of their own."""
    return math.prod(estimate(e) for x, e in c.batch if x in _axes_of(c.a))


def is_operand(c: Contraction, use: Load) -> bool:
    """Is `use` in the sum? What it reads would be computed again for every tile."""
    return use in set(walk(c.fold))


def loses_rows(before: Contraction, after: Contraction) -> str | None:
    """Does `after` have more products that share nothing? A cut leaves axes that no longer split into rows and phases."""
    return "a contraction would lose its rows" if batches(after) > batches(before) else None


def order_of(c: Contraction, buffers: Mapping[str, Buffer]) -> list[int] | None:
    """Dimensions of the result with the columns innermost; where axes were split to see the product, that which a part of them indexes."""
    if c.n[0] is ONE_COLUMN:
        return None
    parts = c.stage.stores[0].index
    last = max((d for d, i in enumerate(parts) if c.n[0] in set(walk(i))), default=len(parts) - 1)
    return [*(d for d in range(len(parts)) if d != last), last]


def tiled_rows(c: Contraction) -> tuple[Load, Axis]:
    """The left-hand operand, and the axis that tiles follow."""
    return c.a, c.rows[-1][0]


def _readings(stage: Stage) -> Iterator[Contraction]:
    """The ways to see a Stage as a contraction: either factor may be the packed one."""
    if stage.scan or stage.lets or len(stage.stores) != 1:
        return
    store = stage.stores[0]
    if store.mode != "set" or any(e is const(0) for _, e in stage.axes):
        return
    if not store.unique and not _is_injective(store.index):
        return
    folds = [e for e in walk(store.value) if isinstance(e, Fold)]
    factors = _factors(folds[0]) if len(folds) == 1 else None
    if factors is None:
        return
    for a, b in (factors, factors[::-1]):
        found = _classify(stage, folds[0], a, b)
        if found is not None:
            yield found


def _is_injective(index: tuple[Expr, ...]) -> bool:
    """Is each dimension a multiple of an axis of its own?"""
    terms = [linear(i).terms for i in index]
    axes = [x for t in terms for x in t]
    return all(len(t) <= 1 for t in terms) and len(set(axes)) == len(axes) and all(isinstance(x, Axis) for x in axes)


def _factors(fold: Fold) -> tuple[Load, Load] | None:
    """The two Loads of a multiply-add Fold that starts at zero."""
    found = multiply_add(fold, SUMMED)
    if found is None:
        return None
    a, b = (_factor(e, fold.dtype) for e in found)
    return None if a is None or b is None else (a, b)


def _classify(stage: Stage, fold: Fold, a: Load, b: Load) -> Contraction | None:
    """Sort the axes, with `b` as the packed operand."""
    # A loop of one iteration is none (a transposed convolution with one tap a phase), unless there is no other.
    every = list(zip(fold.axes, fold.extents, strict=True))
    loops = [(x, e) for x, e in every if e is not const(1)] or every[:1]
    idle: dict[Expr, Expr] = {x: const(0) for x in fold.axes if x not in dict(loops)}
    a, b = _without(a, idle), _without(b, idle)
    if not set(conjuncts(b.mask)) <= set(conjuncts(a.mask)):
        return None  # where `b` does not exist (a tap that this phase of a transposed convolution lacks) the mask of `a` has to say so
    # Of what `b` is masked from, that beyond its own axes only says that padding is left out.
    own = {x for i in b.index for x in walk(i)}
    beyond = [t for t in conjuncts(b.mask) if not {x for x in walk(t) if isinstance(x, Axis)} <= own]
    if any(isinstance(t, Op) and t.name == "ge" for t in conjuncts(b.mask) if t not in beyond):
        return None  # `b` is the image: its padding is no part of it
    if beyond:
        b = every_of(Load(b.buf, b.dtype, b.index), [t for t in conjuncts(b.mask) if t not in beyond])
    in_a, in_b = _axes_of(a), _axes_of(b)
    free = [(x, e) for x, e in stage.axes if x not in in_a and x in in_b]
    if any(isinstance(x, Load) and x is not a for x in walk(a)):
        return None
    if a.mask is not None and a.other is not Const(a.dtype, 0.0):
        return None  # padded with something else
    # Of several axes that only `b` has (a transposed convolution's phases, heads) the result's last or else the longest are the columns,
    # the others are batches.
    last = stage.stores[0].index[-1] if stage.stores[0].index else None
    n = max(free, key=lambda x: (x[0] is last, estimate(x[1]))) if free else (ONE_COLUMN, const(1))
    if any(isinstance(x, Load) and x is not b for x in walk(b)):
        return None
    batch = tuple(x for x in stage.axes if x[0] in in_b and x[0] is not n[0])
    # A product with one row (a vector times a matrix) has lost its row axis: give it one.
    rows = tuple(x for x in stage.axes if x[0] not in in_b) or ((ONE_ROW, const(1)),)
    if not loops or any(x not in in_a or x not in in_b for x, _ in loops) or (len(free) > 1 and rows[0][0] is ONE_ROW):
        return None
    if not free and not _slides(a, rows[-1][0], {x for x, _ in loops}):
        return None  # sums of products row by row, without an operand that is used again
    # The inner loop runs over channels; where they are few (an image's three), over taps that the padding may cut, if those are more.
    masked = set(walk(a.mask)) if a.mask is not None else set()
    free_k = [x for x in loops if x[0] not in masked]
    k = max(free_k or loops, key=lambda x: const_of(x[1]) or 1 << 30)
    if a.mask is not None and (const_of(k[1]) or SHORT) < SHORT:
        k = max(reversed(loops), key=lambda x: const_of(x[1]) or 0)
    taps = tuple(x for x in loops if x is not k)
    if not all(is_affine(e, (rows[-1][0], k[0])) for e in a.index):
        return None
    value = _product_first(substitute(stage.stores[0].value, {fold: acc_of(fold.dtype)}))
    return Contraction(stage, fold, a, b, batch, rows, n, taps, k, value, conjunction(beyond))


def _product_first(e: Expr) -> Expr:
    """x + product is product + x: what reads the sums is one text, however it was written."""
    memo: dict[Expr, Expr] = {}
    has: dict[Expr, bool] = {}
    for x in walk(e):
        has[x] = x in ACCS or any(has[a] for a in x.args)
        args = tuple(memo[a] for a in x.args)
        if isinstance(x, Op) and x.name in ("add", "mul") and x.dtype.is_float and has[x.args[1]] and not has[x.args[0]]:
            args = args[::-1]
        memo[x] = x.rebuild(args) if args and args != x.args else x
    return memo[e]


def _without(e: Load, table: dict[Expr, Expr]) -> Load:
    out = substitute(e, table) if table else e
    assert isinstance(out, Load)
    return out


def _slides(a: Load, m: Axis, loops: set[Axis]) -> bool:
    """Does a window move over `a` along m: is there a dimension in which m and a summed axis step together?"""
    return any(m in terms and loops & set(terms) for terms in (linear(i).terms for i in a.index))


def is_affine(e: Expr, axes: tuple[Axis, ...]) -> bool:
    """Do `axes` occur in `e` only as linear terms?"""
    return all(atom in axes or not any(x in axes for x in walk(atom)) for atom in linear(e).terms)


def work_of(c: Contraction, buffers: Mapping[str, Buffer] | None = None) -> Work:
    """The sizes that a tiling may depend on."""
    layout = buffers[c.a.buf].layout if buffers is not None else None
    step = const_of(flat(layout, c.a.index).terms.get(c.rows[-1][0], const(0))) if layout is not None else None

    def product(axes: tuple[tuple[Axis, Expr], ...]) -> int | None:
        sizes = [const_of(e) for _, e in axes]
        return None if None in sizes else math.prod(s for s in sizes if s is not None)

    return Work(
        batch=product(c.batch),
        outer=product(c.rows[:-1]),
        m=product(c.rows[-1:]),
        n=product((c.n,)),
        taps=product(c.taps),
        k=product((c.k,)),
        a=c.a.dtype.name,
        b=c.b.dtype.name,
        multiple=1 if const_of(c.rows[-1][1]) is not None else max(1, NOTHING_KNOWN.divisor(c.rows[-1][1])),
        step=None if step is None else step * c.a.dtype.itemsize,
        target=c.target,
    )


def parts_of(c: Contraction, buffers: Mapping[str, Buffer]) -> int:
    """How many neighbours of k should lie beside each other in the lanes (Contract.parts): more than one where columns are too few to fill
    vectors, and sums so long that adding up the parts does not count."""
    layout, n, k = buffers[c.a.buf].layout, const_of(c.n[1]), const_of(c.k[1])
    if layout is None or layout.splits or n is None or k is None or (c.a.dtype, c.fold.dtype) != (dt.f32, dt.f32):
        return 1
    if c.a.mask is not None and c.k[0] in set(walk(c.a.mask)):
        return 1
    if const_of(flat(layout, c.a.index).terms.get(c.k[0], const(0))) != 1:
        return 1
    taps = _product([e for _, e in c.taps])

    def price(parts: int) -> float:
        """Of a row, in multiply-adds of a vector."""
        adding = 0 if parts == 1 else 8 + 2 * n * parts
        return taps * -(-k // parts) * -(-n * parts // c.lanes) + adding

    parts = [p for p in PARTS if p <= c.lanes]
    best = min((p for p in parts if p < c.lanes or n * p <= NARROW * c.lanes), key=price)
    few = const_of(c.rows[-1][1]) == 1 and len(c.rows) == 1
    # The more parts, the shorter and more exact each sum.
    more = [p for p in parts if (few or n * p <= NARROW * c.lanes) and price(p) <= (EXACT if few else NEARLY) * price(best)]
    return max((best, *more)) if price(best) < WORTH * price(1) else 1


def pack(c: Contraction, name: str, vectors: int, parts: int = 1) -> tuple[Stage, Buffer]:
    """The Stage that writes `b` in tile order, zeros past the end of n; in float32 where `a` is."""
    (n, extent), (k, k_extent), width = c.n, c.k, c.lanes * vectors
    tile, lane = Axis("nt"), Axis("nl")
    columns = width // parts
    tiles, steps = op("floordiv", extent + (columns - 1), const(columns)), op("floordiv", k_extent + (parts - 1), const(parts))
    axes = (*c.batch, (tile, tiles), *c.taps, (k, steps), (lane, const(width)))
    at, element = tile * columns + op("floordiv", lane, const(parts)), k * parts + op("mod", lane, const(parts))
    load = substitute(c.b, {n: at, k: element})
    assert isinstance(load, Load)
    exact = const_of(extent) is not None and (const_of(extent) or 0) % columns == 0
    load = load if exact else only_where(load, op("lt", at, extent))
    if parts > 1 and (const_of(k_extent) or 1) % parts:
        load = only_where(load, op("lt", element, k_extent))
    dtype = dt.f32 if c.a.dtype is dt.f32 else c.b.dtype
    value: Expr = load if dtype is c.b.dtype else Cast(dtype, load)
    names = {x: Axis(f"i{j}") for j, (x, _) in enumerate(axes)}
    renamed = tuple((names[x], e) for x, e in axes)
    store = Store(name, tuple(x for x, _ in renamed), substitute(value, dict(names.items())))
    shape = tuple(e for _, e in axes)
    buffer = Buffer(name, dtype, shape, dense(shape), "temp", None, c.stage.loc)
    return Stage(renamed, (store,), loc=c.stage.loc, origin="pack"), buffer


def every_of(load: Load, tests: list[Expr]) -> Load:
    """`load` where all of `tests` hold too, zero elsewhere."""
    for t in tests:
        load = only_where(load, t)
    return load


def conjunction(tests: list[Expr]) -> Expr | None:
    return functools.reduce(lambda x, y: op("and", x, y), tests) if tests else None


def only_where(load: Load, test: Expr) -> Load:
    """`load` where `test` holds too, zero elsewhere."""
    mask = test if load.mask is None else op("and", load.mask, test)
    return Load(load.buf, load.dtype, load.index, mask, Const(load.dtype, 0.0))


def form_contraction(
    c: Contraction, stores: tuple[Store, ...], packed: Buffer | None, tiling: Tiling, buffers: dict[str, Buffer], origins: tuple[str, ...],
    parts: int = 1,
) -> Kernel:  # fmt: skip
    """The kernel of `c` and its epilogue: `stores` over the axes of c.stage, reading the product as acc_of its dtype. Without `packed`,
    `b` is read where it lies; packed, k lies in `parts`."""
    rows, vectors, pitch = tiling.rows, tiling.vectors, c.lanes * tiling.vectors
    width = pitch // parts  # columns
    (m, m_extent), (n, n_extent) = c.rows[-1], c.n
    mt, ml, n_outer, n_inner, nl = Axis("mt"), Axis("ml"), Axis("no"), Axis("ni"), Axis("nl")
    nt, lane = n_outer + n_inner, nl if parts == 1 else Axis("nk")
    row, column = mt * rows + ml, nt * width + nl
    live, wide = _least(rows, m_extent - mt * rows, m_extent), _least(width, n_extent - nt * width, n_extent)
    a, b = substitute(c.a, {m: row}), substitute(c.b, {n: column})
    if packed is not None:
        b = Load(packed.name, packed.dtype, (*(x for x, _ in c.batch), nt, *(x for x, _ in c.taps), c.k[0], lane))
        # Taps that a phase of a transposed convolution lacks are packed as zeros, and need not be read.
        for test in conjuncts(c.b.mask):
            b = b if c.k[0] in set(walk(test)) else only_where(b, test)
    assert isinstance(a, Load)
    assert isinstance(b, Load)
    summed = c.fold.dtype
    total: list[Expr] = [Load("acc", summed, (ml * pitch + nl * parts + part,)) for part in range(parts)]
    while len(total) > 1:
        total = [op("add", x, y) for x, y in zip(total[::2], total[1::2], strict=True)]
    # Results that lie contiguous along the rows: the tile is transposed in registers, unless its rows are too few to be worth it.
    along_m, deep = _steps_by_one(stores, m, buffers), -(-rows // c.lanes) * c.lanes
    transposed = along_m and parts == 1 and 2 * rows >= c.lanes
    if transposed:
        total = [Load("transposed", summed, (nl * deep + ml,))]
    table: dict[Expr, Expr] = {acc_of(summed): total[0], m: row, n: column}
    body: tuple[Stmt, ...] = tuple(
        StoreStmt(s.buf, tuple(substitute(i, table) for i in s.index), substitute(s.value, table), s.mode, where_of(s, table))
        for s in stores
    )
    if along_m:
        epilogue = Loop(nl, wide, "serial", (Loop(ml, live, "vector", body),))
    else:
        epilogue = Loop(ml, live, "serial", (Loop(nl, wide, "vector", body),))
    tiles = op("floordiv", n_extent + (width - 1), const(width))
    m_tiles = (*c.rows[:-1], (mt, op("floordiv", m_extent + (rows - 1), const(rows))))
    # Which operand's tile stays is a question of extents only, so that kernels of either sweep can be one; so are rows of fewer axes.
    # Results that lie along the rows are written a few lines at a time, each whole, if a tile of columns stays while the rows pass.
    size = _product([e for _, e in (*c.rows, c.k)]) * c.a.dtype.itemsize
    by_columns = tiling.sweep == "columns" or (along_m and size <= c.target.caches.rows)
    before, after = (tiles, const(1)) if by_columns else (const(1), tiles)
    more = tuple((Axis(f"one{j}"), const(1)) for j in range(OUTER - len(c.rows[:-1])))
    grid = (*c.batch, (n_outer, before), *more, *m_tiles, (n_inner, after))
    prefetch = _next_tile(c, m_tiles, (nt, tiles), vectors) if packed is not None and parts == 1 else (None, 0, const(0))
    readable = None if packed is not None or const_of(wide) == width else wide
    far, tails = const(_asked_rows(c, tiling, buffers)), tails_of(rows, live, m_extent)
    contract = Contract(
        "acc", rows, vectors, ml, live, c.taps, c.k[0], c.k[1], lane, a, b, *prefetch, wide=readable, prefetch_rows=far, tails=tails,
        parts=parts,
        rest=(const_of(c.k[1]) or 0) % parts, where=None if c.where is None else substitute(c.where, {m: row}),
        vector_bytes=c.target.vectors.bytes,
    )  # fmt: skip
    steps = rows * vectors * max(1, _product([e for _, e in (*c.taps, c.k)]))
    grain = const(max(1, 4096 // steps))
    params, syms = params_of(stores, c, packed or buffers[c.b.buf], buffers, grid)
    scratch: tuple[Scratch, ...] = (Scratch("acc", summed, rows * pitch),)
    if not transposed:
        return Kernel("contraction", params, syms, grid, grain, scratch, (contract, epilogue), origins=origins, kind="contraction")
    tile = Load("acc", summed, (ml * pitch + nl,))
    transpose = Transpose("transposed", deep, ml, live, nl, wide, tile, c.target.vectors.bytes)
    scratch = (*scratch, Scratch("transposed", summed, width * deep))
    return Kernel("contraction", params, syms, grid, grain, scratch, (contract, transpose, epilogue), origins=origins, kind="contraction")


def where_of(s: Store, table: dict[Expr, Expr]) -> Expr | None:
    """The condition of a store over a tile's axes."""
    return None if s.mask is None else substitute(s.mask, table)


Axes = tuple[tuple[Axis, Expr], ...]


def _next_tile(c: Contraction, m_tiles: Axes, n_tile: tuple[Expr, Expr], vectors: int) -> tuple[Expr | None, int, Expr]:
    """While the row tiles pass over one tile of `b`, the next one comes from memory, a piece with each of the first of them. Of rows that
    are not known there are taken to be enough. Where one row tile reads a large tile once, what it asks for would be gone from the cache
    again when its turn comes, and would come from memory twice. Many row tiles of a window take equal shares: asking in vain costs the
    innermost loop a load."""
    sizes = [const_of(e) for _, e in (*c.taps, c.k)]
    others = [const_of(e) for _, e in (*c.batch, n_tile)]
    if None in sizes or None in others:
        return None, 0, const(0)
    passing = [const_of(e) for _, e in m_tiles]
    tiles = vectors if None in passing else math.prod(e or 1 for e in passing)
    by, steps = -(-vectors // tiles) if tiles > 1 else 1, math.prod(s or 1 for s in sizes)
    whole, piece = steps * c.lanes * vectors, steps * c.lanes * by
    if tiles == 1 and whole * c.b.dtype.itemsize > c.target.caches.rows:
        return None, 0, const(0)
    if c.taps and tiles >= SHARED and None not in passing:
        share = -(-c.lanes * vectors * 16 // tiles)
        return (point_number((*c.batch, n_tile)) + 1) * whole + point_number(m_tiles) * (steps * share // 16), 0, const(share)
    start = (point_number((*c.batch, n_tile)) + 1) * whole + op("min", point_number(m_tiles) * piece, const(whole - piece))
    return start + point_number(c.taps) * c.k[1] * (c.lanes * by), by, const(0)


def _asked_rows(c: Contraction, tiling: Tiling, buffers: Mapping[str, Buffer]) -> int:
    """Contract.prefetch_rows. Asking is worth it where a tile of rows meets all of `b` before the next one does, or where all rows are
    more than the cache holds. Elsewhere it costs: rows that share a set push each other out."""
    step, steps, size = work_of(c, buffers).step, const_of(c.k[1]), c.a.dtype.itemsize
    layout = buffers[c.a.buf].layout
    if layout is None or layout.splits or step is None or steps is None:
        return 0
    sizes = [const_of(e) for _, e in c.rows]
    many = None in sizes or math.prod(e or 1 for e in sizes) * step > c.target.caches.rows
    is_dense = const_of(flat(layout, c.a.index).terms.get(c.k[0], const(0))) == 1
    if c.taps:  # a window over an image: most of what the next tile reads is here; new are the last taps' rows behind this tile's
        is_row = is_dense and steps * size >= 64 and step <= STRIDE * steps * size and c.b.mask is None
        return -(-tiling.rows * step * 16 // (size * steps * _product([e for _, e in c.taps]))) if many and is_row else 0
    if c.a.mask is not None or not is_dense or not steps * size <= step <= steps * size + 64 or steps < LONG or tiling.rows > 64 // size:
        return 0
    return int(tiling.sweep == "rows" or many)


def _product(extents: list[Expr]) -> int:
    total = 1
    for e in extents:
        total *= const_of(e) or 64
    return total


def _least(limit: int, rest: Expr, extent: Expr) -> Expr:
    """min(limit, rest), as a constant where the tiles divide the extent."""
    known = const_of(extent)
    if NOTHING_KNOWN.divisor(extent) % limit == 0:
        return const(limit)
    if known is not None and known < limit:
        return const(known)
    return op("min", const(limit), rest)


def tails_of(rows: int, live: Expr, extent: Expr) -> tuple[int, ...]:
    """Row counts of partial tiles, where how many rows there are is known at run time only."""
    if const_of(live) is not None or const_of(extent) is not None:
        return ()
    return tuple(n for n in TAILS if n < rows)


def stores_along(c: Contraction, axis: Axis, buffers: dict[str, Buffer]) -> bool:
    """Does the result lie contiguous along `axis`?"""
    return _steps_by_one(c.stage.stores, axis, buffers)


def _steps_by_one(stores: tuple[Store, ...], m: Axis, buffers: dict[str, Buffer]) -> bool:
    """Do the results lie contiguous along m?"""

    def stride(s: Store) -> int | None:
        layout = buffers[s.buf].layout
        total: Expr = const(0)
        for i, step in zip(s.index, layout.strides if layout else (), strict=False):
            total = total + i * step
        return const_of(linear(total).terms.get(m, const(0)))

    return all(stride(s) == 1 for s in stores)


def params_of(
    stores: tuple[Store, ...], c: Contraction, operand: Buffer, buffers: dict[str, Buffer], grid: Iterable[tuple[Axis, Expr]]
) -> tuple[tuple[Param, ...], tuple[Sym, ...]]:
    """Every buffer the kernel touches, `operand` as its right-hand side, and every symbol in its extents, strides and values."""
    values = [e for s in stores for e in (*s.index, s.value)]
    values += [c.b] if operand.name == c.b.buf else []
    nodes = list(walk(*values, c.a, *(e for _, e in (*grid, *c.taps, c.k, *c.rows, c.n))))
    written = [s.buf for s in stores]
    read = [x.buf for x in nodes if isinstance(x, Load)]
    names = dict.fromkeys([*written, c.a.buf, operand.name, *read])
    table = {**buffers, operand.name: operand}
    return parameters(names, table, written, nodes)


