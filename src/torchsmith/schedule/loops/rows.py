"""Rows kept on the stack: dear values shared by a Fold and a later loop, column reductions in memory order, transposing tiles.

In: drafts of kernels. Out: the same drafts with scratch rows. Each is a choice of speed only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...ir.expr import Axis, Expr, Fold, Load, Var, const, op, substitute, walk
from ...ir.kernel import Let, Loop, Scratch, Stmt, StoreStmt
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, dense
from ..access import Accesses
from ..deps import estimate, numel
from ..fusion.fuse import cost

ROW = 8192  # elements of a shared row
WORTH = 10  # operations that are dearer than a store and a load in the first-level cache
TILE_V, TILE_U = 32, 16


def row_walk(f: Fold) -> tuple[Fold, Expr, Expr] | None:
    """(the Fold that reads the row, the element it reads, the row's length) of a sum over one axis, or over blocks of one."""
    if len(f.axes) != 1:
        return None
    nested = {x for u in f.update for x in walk(u) if isinstance(x, Fold)}
    if not nested:
        return f, f.axes[0], f.extents[0]
    inner = nested.pop()
    if nested or len(inner.axes) != 1 or const_of(inner.extents[0]) is None:
        return None
    return inner, op("add", op("mul", f.axes[0], inner.extents[0]), inner.axes[0]), op("mul", f.extents[0], inner.extents[0])


def find_shared(f: Fold, point: Expr, values: list[Expr], axis: Axis) -> Expr | None:
    """The largest dear subexpression of the Fold's update, a function of `point`, that occurs, as one of `axis`, in `values`."""
    loops = {x for x in walk(point) if isinstance(x, Axis)}
    states = {f.state(i, s) for i in range(len(f.init)) for s in "ab"}
    there = set(walk(*values))
    best: tuple[int, Expr] | None = None
    for e in walk(*f.update):
        if isinstance(e, Fold | Load) or not e.dtype.is_float:
            continue
        nodes = list(walk(e))
        if point not in nodes or any(n in states or isinstance(n, Fold) for n in nodes):
            continue
        price = cost(e)
        if price < WORTH or (best is not None and price <= best[0]):
            continue
        moved = substitute(e, {point: axis})
        if moved in there and not loops & set(walk(moved)):
            best = (price, e)
    return best[1] if best is not None else None


def shared_row(e: Expr, extent: Expr, name: str) -> Buffer | None:
    """A row buffer for `e`, when it fits the stack."""
    n = const_of(extent)
    if n is None or not 16 <= n <= ROW:
        return None
    return Buffer(name, e.dtype, (extent,), dense((extent,)), "temp")




def column_loops(
    inner: tuple[Let | StoreStmt, ...], lane: Axis, extent: Expr, width: int, scratch: list[Scratch]
) -> tuple[Stmt, ...] | None:
    """A Fold inside a vector loop, turned inside out: its loops outermost, a row of states in scratch, memory read in order.

        for v: s = fold_r u(x[r, v])      becomes      S[:] = init; for r: for v: S[v] = u(S[v], x[r, v]); for v: s = S[v]
    """
    folds = {e.picking(0) for s in inner for e in walk(*_values(s)) if isinstance(e, Fold)}
    lets = [s for s in inner if isinstance(s, Let) and isinstance(s.value, Fold)]
    if len(folds) != 1 or not lets or width < 32 or len({s.value.picking(0) for s in lets}) != 1:  # type: ignore[attr-defined]
        return None
    (f,) = folds
    states = {f.state(i, s) for i in range(len(f.init)) for s in "ab"}
    if any(isinstance(x, Var) and x not in states for x in walk(*f.update, *f.init)) or set(f.axes) & set(walk(*f.extents)):
        return None
    if numel(f.extents) < 32 or width * len(f.init) > 4096 or any(isinstance(x, Fold) for x in walk(*f.update)):
        return None
    if any(lane in t and set(f.axes) & set(t) for x in walk(*f.update) if isinstance(x, Load) for t in (linear(i).terms for i in x.index)):
        return None  # a window: what it reads is read again, and its sums are better off in registers, in parts
    if any(e.picking(0) is f and not any(e is s.value for s in lets) for s in inner for e in walk(*_values(s)) if isinstance(e, Fold)):
        return None
    rows = [f"own_state{k}" for k in range(len(f.init))]
    scratch += [Scratch(n, i.dtype, width) for n, i in zip(rows, f.init, strict=True)]
    loads: list[Expr] = [Load(n, i.dtype, (lane,)) for n, i in zip(rows, f.init, strict=True)]
    begin = Loop(lane, extent, "vector", tuple(StoreStmt(n, (lane,), i) for n, i in zip(rows, f.init, strict=True)))
    old = {f.state(k, "a"): loads[k] for k in range(len(rows))}
    news = [Var(f"n{k}", i.dtype) for k, i in enumerate(f.init)]
    update: tuple[Stmt, ...] = (
        *(Let(v, substitute(u, old)) for v, u in zip(news, f.update, strict=True)),  # type: ignore[arg-type]
        *(StoreStmt(n, (lane,), v) for n, v in zip(rows, news, strict=True)),
    )
    middle: Stmt = Loop(lane, extent, "vector", update)
    for axis, e in reversed(list(zip(f.axes, f.extents, strict=True))):
        middle = Loop(axis, e, "serial", (middle,))
    table: dict[Expr, Expr] = {f.picking(k): loads[k] for k in range(len(rows))}
    end = Loop(lane, extent, "vector", tuple(_replaced(s, table) for s in inner))
    return (begin, middle, end)


def _values(s: Let | StoreStmt) -> tuple[Expr, ...]:
    return (s.value,) if isinstance(s, Let) else (*s.index, s.value, *(() if s.mask is None else (s.mask,)))


def _replaced(s: Let | StoreStmt, table: dict[Expr, Expr]) -> Let | StoreStmt:
    if isinstance(s, Let):
        return Let(s.var, substitute(s.value, table))
    mask = None if s.mask is None else substitute(s.mask, table)
    return StoreStmt(s.buf, tuple(substitute(i, table) for i in s.index), substitute(s.value, table), s.mode, mask)


def tile_partner(grid: list[tuple[Axis, Expr]], vector: Axis, found: Accesses) -> Axis | None:
    """The axis along which loads lie contiguous that step far along `vector`: transposing them needs a tile of both."""
    if vector in found.impure:
        return None
    for x in found.items:
        step = x.stride(vector)
        if x.store or step is None or abs(step) < 16:
            continue
        for a, e in grid:
            if x.stride(a) == 1 and a not in found.impure and estimate(e) >= 8:
                return a
    return None


def transposing_tile(
    inner: tuple[Let | StoreStmt, ...], u: tuple[Axis, Expr], v: tuple[Axis, Expr], strided: Mapping[Load, bool], names: Iterator[int],
    scratch: list[Scratch],
) -> tuple[list[tuple[Axis, Expr]], tuple[Stmt, ...]]:
    """(grid axes of the tiles, body): far-stepping loads are copied row by row into a small square, then read across.

        for u: for v: y[u, v] = f(x[v, u])      becomes      for v, u in tile: t[v, u] = x[v, u];  for u, v in tile: y[u, v] = f(t[v, u])
    """
    ub, ui, vb, vi = (Axis(f"t{next(names)}") for _ in range(4))
    nu, nv = _part(u[1], ub, TILE_U), _part(v[1], vb, TILE_V)
    at: dict[Expr, Expr] = {u[0]: op("add", ub * TILE_U, ui), v[0]: op("add", vb * TILE_V, vi)}
    pitch = TILE_U + 1  # odd, so that a column does not fall into one cache set
    table: dict[Expr, Expr] = {}
    fill: list[Stmt] = []
    for k, x in enumerate(x for x, far in strided.items() if far):
        name = f"own_tile{k}"
        scratch.append(Scratch(name, x.dtype, TILE_V * pitch))
        place = op("add", vi * pitch, ui)
        fill.append(StoreStmt(name, (place,), substitute(x, at)))
        table[x] = Load(name, x.dtype, (place,))
    rest = tuple(_replaced(_replaced(s, table), at) for s in inner)
    body: tuple[Stmt, ...] = (
        Loop(vi, nv, "serial", (Loop(ui, nu, "vector", tuple(fill)),)),
        Loop(ui, nu, "serial", (Loop(vi, nv, "vector", rest),)),
    )
    return [(ub, _count(u[1], TILE_U)), (vb, _count(v[1], TILE_V))], body


def _part(extent: Expr, block: Axis, size: int) -> Expr:
    n = const_of(extent)
    return const(size) if n is not None and n % size == 0 else op("min", const(size), op("sub", extent, block * size))


def _count(extent: Expr, size: int) -> Expr:
    return op("floordiv", op("add", extent, const(size - 1)), const(size))
