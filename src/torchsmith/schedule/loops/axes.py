"""The axes of a Draft: taken apart, merged, ordered; which one runs over lanes, and in what blocks.

In: a Draft and the layouts of its buffers. Out: axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from ...ir.expr import Axis, Expr, Fold, Op, const, op, substitute, walk
from ...ir.kernel import Let, StoreStmt
from ...ir.linear import const_of
from ...ir.program import Buffer
from ..access import Access, chains, collect, merge_table, simplify, splits
from ..deps import estimate, numel
from .draft import Draft, Nest, exprs_of

LANES = 16
GRAIN = 16384  # element operations of one grid item, where an axis is cut into blocks
BLOCK = 4096  # elements of a long vector loop that one grid item takes
PIECE = 512  # elements between two bounds of an axis from which on a loop of their own pays
GATHER = 14.0  # a strided vector load against a contiguous one


def split_axes(d: Draft, names: Iterator[int]) -> None:
    """a with uses a // s and a % s -> two axes; merged again later where that costs nothing."""
    for _ in range(4):
        axes = [*d.outer, *(x for item in d.seq if isinstance(item, Nest) for x in item.axes)]
        found = splits(axes, d.roots())
        if not found:
            return
        table: dict[Expr, Expr] = {}
        pairs: dict[Axis, list[tuple[Axis, Expr]]] = {}
        extents = dict(axes)
        for a, s in found.items():
            hi, lo = Axis(f"s{next(names)}"), Axis(f"s{next(names)}")
            table[a] = op("add", op("mul", hi, const(s)), lo)
            pairs[a] = [(hi, const((const_of(extents[a]) or 0) // s)), (lo, const(s))]
        d.outer = [y for x in d.outer for y in pairs.get(x[0], [x])]
        for item in d.seq:
            if isinstance(item, Nest):
                item.axes = [y for x in item.axes for y in pairs.get(x[0], [x])]
        memo: dict[Expr, Expr] = {}
        d.map(lambda e, t=table: substitute(e, t))  # type: ignore[misc]
        known = d.extents()
        d.map(lambda e, k=known, m=memo: simplify(e, k, m))  # type: ignore[misc]


def cut_axes(d: Draft, names: Iterator[int]) -> None:
    """a < 4096 ? x[a] : y[a - 4096] -> a = hi * 4096 + lo, hi < 1 ? x[lo] : y[..]: what held lane by lane holds for whole loops.

    A vector whose lanes are all masked is not free: where its address lies outside of what is mapped, each load is a trap in the processor.
    """
    for a, extent in list(d.outer):
        n, bounds = const_of(extent), _bounds_of(a, d.roots())
        piece = math.gcd(n or 1, *bounds.values()) if bounds else 1
        if n is None or piece < PIECE or piece % LANES or piece == n:
            continue
        hi, lo = Axis(f"c{next(names)}"), Axis(f"c{next(names)}")
        tests: dict[Expr, Expr] = {e: op("lt" if e.name in ("lt", "le") else "ge", hi, const(at // piece)) for e, at in bounds.items()}
        whole: dict[Expr, Expr] = {a: op("add", op("mul", hi, const(piece)), lo)}
        parts = [(hi, const(n // piece)), (lo, const(piece))]
        d.outer = [y for x in d.outer for y in (parts if x[0] is a else [x])]
        d.map(lambda e, t=tests, w=whole: substitute(substitute(e, t), w))  # type: ignore[misc]


def _bounds_of(axis: Axis, roots: list[Expr]) -> dict[Op, int]:
    """Comparisons of `axis` alone with a number, and the first position on their other side."""
    out: dict[Op, int] = {}
    for e in walk(*roots):
        if isinstance(e, Op) and e.name in ("lt", "le", "gt", "ge") and e.args[0] is axis and const_of(e.args[1]) is not None:
            out[e] = (const_of(e.args[1]) or 0) + (e.name in ("le", "gt"))
    return out


def collapse(d: Draft, buffers: Mapping[str, Buffer], names: Iterator[int]) -> None:
    """Axes that every access steps through as one become one."""
    stores = [s for s in d.statements() if isinstance(s, StoreStmt)]
    found = collect([e for s in d.statements() if isinstance(s, Let) for e in exprs_of(s)], stores, buffers)
    table: dict[Expr, Expr] = {}
    made: dict[tuple[Axis, ...], Axis] = {}  # nests may share axes: equal chains become one axis

    def join(axes: list[tuple[Axis, Expr]]) -> list[tuple[Axis, Expr]]:
        out = []
        for chain in chains(axes, found):
            # an empty nest has nothing to gain, and no index to take a merged axis apart
            if len(chain) == 1 or any(e is const(0) for _, e in chain):
                out += chain
                continue
            size: Expr = const(1)
            for _, e in chain:
                size = op("mul", size, e)
            key = tuple(a for a, _ in chain)
            if key not in made:
                made[key] = Axis(f"m{next(names)}")
                table.update(merge_table(chain, made[key]))
            out.append((made[key], size))
        return out

    outer = join(d.outer)
    for item in d.seq:
        if isinstance(item, Nest):
            item.axes = join(item.axes)
    d.outer = outer
    if table:
        d.map(lambda e: substitute(e, table))


def _waste(extent: Expr) -> float:
    n = const_of(extent)
    return 1.0 if n is None else -(-n // LANES) * LANES / max(n, 1)


def _access_cost(x: Access, axis: Axis) -> float:
    s = x.stride(axis)
    if s == 0:
        return 0.3
    return (1.0 if x.itemsize <= 4 else 2.0) if s == 1 else GATHER * (1.5 if x.store else 1.0)


def weight_inside(outer: Iterable[tuple[Axis, Expr]], extents: Mapping[Axis, Expr]) -> Callable[[Access], float]:
    """How often an access is made for one position of the axes outside."""
    known = {a for a, _ in outer}
    return lambda x: float(numel(extents[a] for a in x.axes() if a not in known and a in extents))


def vector_cost(items: list[Access], extents: Mapping[Axis, Expr], axis: Axis, weigh: Callable[[Access], float]) -> float:
    """Cost per element of running `axis` over lanes."""
    w = _waste(extents[axis])
    return sum(weigh(x) * (_access_cost(x, axis) + 0.5) * w / LANES for x in items)


def choose_outer_vector(d: Draft, buffers: Mapping[str, Buffer]) -> Axis | None:
    """The outer axis to run over lanes; None: the Folds (or nothing) are vectorised instead."""
    extents = d.extents()
    stores = [s for s in d.statements() if isinstance(s, StoreStmt)]
    found = collect([e for s in d.statements() if isinstance(s, Let) for e in exprs_of(s)], stores, buffers)
    weigh = weight_inside(d.outer, extents)
    best: tuple[float, Axis | None] = (1e30, None)
    folds = [f for f in walk(*d.roots()) if isinstance(f, Fold)]  # nested ones first
    fold_axes = {a for f in folds for a in f.axes}
    if folds:
        scalar = 12.0 * len({f.picking(0) for f in folds if not any(f in set(walk(g)) and g is not f for g in folds)})
        for x in found.items:
            inner = [f.axes[-1] for f in folds if f.axes[-1] in x.axes()]
            if inner and folds[0].order == "any" and folds[0].combine:
                scalar += weigh(x) * (_access_cost(x, inner[0]) + 0.5) * _waste(extents[inner[0]]) / LANES
            else:
                scalar += weigh(x) * 1.0
        best = (scalar, None)
    for a, e in d.outer:
        if a in fold_axes:
            continue
        c = vector_cost(found.items, extents, a, weigh)
        small = const_of(e)
        if small is not None and small < 4 and len(d.outer) > 1:
            c *= 2
        if c < best[0]:
            best = (c, a)
    return best[1]


def order_axes(axes: list[tuple[Axis, Expr]], items: list[Access], last: Axis | None) -> list[tuple[Axis, Expr]]:
    """Widest steps outermost, `last` innermost."""
    def key(x: tuple[Axis, Expr]) -> int:
        return sum(abs(estimate(i.coefs[x[0]])) * (3 if i.store else 1) for i in items if x[0] in i.coefs)

    rest = sorted((x for x in axes if x[0] is not last), key=lambda x: -key(x))
    return rest + [x for x in axes if x[0] is last]


def is_column(d: Draft, items: list[Access], vector: Axis) -> bool:
    """Is this a reduction over rows, whose loads lie contiguous along the vector axis?"""
    folds = [s.value for s in d.seq if isinstance(s, Let) and isinstance(s.value, Fold)]
    if not folds:
        return False
    axes = {a for f in folds for a in f.axes}  # type: ignore[attr-defined]
    return all(x.stride(vector) in (0, 1) for x in items if x.axes() & axes)


def block_size(extent: Expr, others: int, work: int, column: bool) -> int | None:
    """Elements per grid item of a long vector axis; None: all of them."""
    n = const_of(extent)
    if n is None:
        return BLOCK
    if column:
        if n * others * work <= 2 * GRAIN or n < 32:
            return None
        target = 1024 if others >= 16 else max(64, min(1024, n * others // 16 // LANES * LANES))
        if n <= target:
            return None
        return next((b for b in range(target, 31, -LANES) if n % b == 0), target)
    total = n * max(1, others) * max(1, work)
    if total <= 2 * GRAIN or (n <= 2 * BLOCK and others >= 8):
        return None
    target = max(LANES, min(BLOCK, GRAIN // max(1, work)))
    for b in range(min(n, 2 * target) // LANES * LANES, max(LANES, target // 4) - 1, -LANES):
        if n % b == 0:
            return None if b == n else b
    if n <= 2 * target:
        return None
    return max(LANES, target // LANES * LANES)
