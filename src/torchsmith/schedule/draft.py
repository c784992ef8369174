"""One Group -> one Kernel: statements, folds hoisted and shared, axes split, merged and ordered, the vector axis, scratch, grid.

In: a Group, buffers with layouts, which buffers the kernel may keep to itself. Out: a Kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..ir import dtype as dt
from ..ir.expr import Axis, Expr, Fold, Load, Sym, Var, const, op, select, substitute, walk
from ..ir.kernel import Kernel, Let, Loop, Param, Scratch, Stmt, StoreStmt
from ..ir.linear import const_of
from ..ir.program import Buffer
from . import deps
from .access import Access, chains, collect, map_folds, merge_table, simplify, splits
from .deps import estimate, free_axes, numel
from .fuse import cost, simple_axes
from .group import Group
from .rows import TILE_U, TILE_V, column_loops, find_shared, row_walk, shared_row, tile_partner, transposing_tile

LANES = 16
GRAIN = 16384  # element operations of one grid item, where an axis is cut into blocks
THREAD = 1 << 17  # element operations worth a thread: some 10 us, against 2 us to wake one
SCRATCH_BYTES = 1 << 16
DEEP = 40  # levels of an expression from which on it gets a name, so that later ones do not grow out of it
BLOCK = 4096  # elements of a long vector loop that one grid item takes
GATHER = 14.0  # a strided vector load against a contiguous one


@dataclass
class Nest:
    """Inner loops over `axes` around stores (and lets); without axes: stores once per outer iteration."""

    axes: list[tuple[Axis, Expr]]
    body: list[Let | StoreStmt]


@dataclass
class Draft:
    outer: list[tuple[Axis, Expr]]
    seq: list[Let | Nest] = field(default_factory=list)

    def extents(self) -> dict[Axis, Expr]:
        out = dict(self.outer)
        for item in self.seq:
            if isinstance(item, Nest):
                out.update(item.axes)
        out.update(deps.fold_extents(*self.roots()))
        return out

    def roots(self) -> list[Expr]:
        return [e for s in self.statements() for e in _exprs(s)]

    def statements(self) -> Iterator[Let | StoreStmt]:
        for item in self.seq:
            if isinstance(item, Nest):
                yield from item.body
            else:
                yield item

    def map(self, fn: Callable[[Expr], Expr]) -> None:
        self.seq = [
            Nest(item.axes, [_map(s, fn) for s in item.body]) if isinstance(item, Nest) else _map(item, fn)  # type: ignore[misc]
            for item in self.seq
        ]


def _exprs(s: Let | StoreStmt) -> list[Expr]:
    if isinstance(s, Let):
        return [s.value]
    return [*s.index, s.value, *(() if s.mask is None else (s.mask,))]


def _map(s: Let | StoreStmt, fn: Callable[[Expr], Expr]) -> Let | StoreStmt:
    if isinstance(s, Let):
        return Let(s.var, fn(s.value))
    return StoreStmt(s.buf, tuple(fn(i) for i in s.index), fn(s.value), s.mode, None if s.mask is None else fn(s.mask))


# ---------------------------------------------------------------- statements of a group


class Drafter:
    """Turns the members of a group into a sequence of lets and nests."""

    def __init__(self, group: Group, buffers: Mapping[str, Buffer], own: set[str]) -> None:
        self.group, self.buffers, self.own = group, buffers, own
        self.draft = Draft(list(group.outer))
        self.kept = {a for a, _ in group.outer}
        self.counter = itertools.count()
        self.scalars: dict[str, tuple[tuple[Axis | None, ...], Var]] = {}  # buffer -> its value per outer iteration
        self.place: dict[str, int] = {}  # buffer -> position in seq of the nest that stores it
        self.folds: dict[Expr, tuple[Var, int]] = {}
        self.names: dict[Axis, Axis] = {}

    def var(self, dtype: dt.DType) -> Var:
        return Var(f"l{next(self.counter)}", dtype)

    def run(self) -> Draft:
        for m in self.group.members:
            inner = [x for x in m.axes if x[0] not in self.kept]
            for t in m.stores:
                axes = simple_axes(m, t)
                assert axes is not None
                self.store(t.buf, t.index, axes, self.forward(t.value), inner)
        return self.draft

    def forward(self, e: Expr) -> Expr:
        """Loads of what is a scalar of this outer iteration become its variable."""
        memo: dict[Expr, Expr] = {}

        def go(x: Expr) -> Expr:
            done = memo.get(x)
            if done is None:
                done = x.rebuild(tuple(go(a) for a in x.args)) if x.args else x
                if isinstance(done, Load) and done.buf in self.scalars:
                    var = self.scalars[done.buf][1]
                    done = var if done.mask is None or done.other is None else select(done.mask, var, done.other)
                memo[x] = done
            return done

        return go(e)

    def store(self, buf: str, index: tuple[Expr, ...], axes: tuple[Axis | None, ...], value: Expr, inner: list[tuple[Axis, Expr]]) -> None:
        seq = self.draft.seq
        if not inner:
            value, _ = self.hoist(value)
            var = self.var(value.dtype)
            seq.append(Let(var, value))
            self.scalars[buf] = (axes, var)
            if buf not in self.own:
                seq.append(Nest([], [StoreStmt(buf, index, var)]))
            self.place[buf] = len(seq) - 1
            return
        at, table = self.nest_for(value, inner)
        if at is not None:
            sub: dict[Expr, Expr] = dict(table.items())
            value, index = substitute(value, sub), tuple(substitute(i, sub) for i in index)
        value, ready = self.hoist(value)
        if at is None or ready >= at:
            seq.append(Nest(list(inner) if at is None else list(seq[at].axes), []))  # type: ignore[union-attr]
            at = len(seq) - 1
        nest = seq[at]
        assert isinstance(nest, Nest)
        stored = {s.buf: s for s in nest.body if isinstance(s, StoreStmt)}
        value = _reuse(value, stored)
        if deps.depth(value) > DEEP:
            var = self.var(value.dtype)
            nest.body.append(Let(var, value))
            value = var
        nest.body.append(StoreStmt(buf, index, value))
        self.place[buf] = at

    def nest_for(self, value: Expr, inner: list[tuple[Axis, Expr]]) -> tuple[int | None, dict[Axis, Axis]]:
        """The last nest with the same inner extents whose stores `value` reads, if at all, at its own index; and the renaming."""
        loads = deps.loads_in(value)
        last = max((self.place[x.buf] for x in loads if x.buf in self.place), default=-1)
        for k in range(len(self.draft.seq) - 1, -1, -1):
            nest = self.draft.seq[k]
            if not isinstance(nest, Nest) or not nest.axes:
                continue
            if k < last:
                return None, {}
            table = self.match(nest, inner, loads)
            if table is not None:
                return k, table
        return None, {}

    def match(self, nest: Nest, inner: list[tuple[Axis, Expr]], loads: tuple[Load, ...]) -> dict[Axis, Axis] | None:
        if len(nest.axes) != len(inner):
            return None
        table: dict[Axis, Axis] = {}
        stored = {s.buf: s for s in nest.body if isinstance(s, StoreStmt)}
        mine = dict(inner)
        theirs = dict(nest.axes)
        for x in loads:
            if x.buf in stored:
                for i, j in zip(x.index, stored[x.buf].index, strict=True):
                    if i is j:
                        continue
                    if not (isinstance(i, Axis) and isinstance(j, Axis) and i in mine and j in theirs and mine[i] is theirs[j]):
                        return None
                    if table.setdefault(i, j) is not j:
                        return None
        if len(set(table.values())) != len(table):
            return None
        free = [a for a in nest.axes if a[0] not in table.values()]
        for a, e in inner:
            if a not in table:
                for k, (b, f) in enumerate(free):
                    if e is f:
                        table[a] = b
                        del free[k]
                        break
                else:
                    return None
        return table

    def hoist(self, value: Expr) -> tuple[Expr, int]:
        """Folds that only depend on outer axes become lets. The position in seq after which `value` can be evaluated."""
        ready = -1
        memo: dict[Expr, Expr] = {}
        seq = self.draft.seq

        def go(e: Expr) -> Expr:
            nonlocal ready
            done = memo.get(e)
            if done is not None:
                return done
            if isinstance(e, Fold) and free_axes(e) <= self.kept and not _free_states(e):
                known = self.folds.get(e)
                if known is None:
                    var = self.var(e.dtype)
                    seq.append(Let(var, e))
                    known = self.folds[e] = (var, len(seq) - 1)
                done, at = known
                ready = max(ready, at)
            else:
                done = e.rebuild(tuple(go(a) for a in e.args)) if e.args else e
                if isinstance(done, Var):
                    for at, s in enumerate(seq):
                        if isinstance(s, Let) and s.var is done:
                            ready = max(ready, at)
            memo[e] = done
            return done

        return go(value), ready


def _free_states(e: Fold) -> bool:
    """Does it read the state of a Fold around it?"""
    own = {e.state(i, s) for i in range(len(e.init)) for s in "ab"}
    inside = [x for x in walk(e) if isinstance(x, Fold)]
    for f in inside:
        own |= {f.state(i, s) for i in range(len(f.init)) for s in "ab"}
    return any(isinstance(x, Var) and x not in own and not x.name.startswith("l") for x in walk(e))


def _reuse(value: Expr, stored: dict[str, StoreStmt]) -> Expr:
    """A load of what this very iteration stored is the stored value."""
    memo: dict[Expr, Expr] = {}

    def go(e: Expr) -> Expr:
        done = memo.get(e)
        if done is None:
            done = e
            if isinstance(e, Load) and e.buf in stored and stored[e.buf].index == e.index:
                v = stored[e.buf].value
                done = v if e.mask is None or e.other is None else select(e.mask, v, e.other)
            elif e.args:
                done = e.rebuild(tuple(go(a) for a in e.args))
            memo[e] = done
        return done

    return go(value)


# ---------------------------------------------------------------- folds in canonical form


def fold_height(e: Expr) -> int:
    return max((1 + fold_height(f) for f in walk(*e.args) if isinstance(f, Fold)), default=0)


def tidy_fold(f: Fold, buffers: Mapping[str, Buffer]) -> Fold:
    """Axes ordered by stride and merged (order any), names r<height>_<k>, states f<height>_."""
    height = fold_height(f)
    axes = list(zip(f.axes, f.extents, strict=True))
    update = f.update
    if f.order == "any" and len(axes) > 1:
        found = collect(update, [], buffers)
        axes.sort(key=lambda x: -_step(found.items, x[0]))
    if len(axes) > 1:
        found = collect(update, [], buffers)
        merged: list[tuple[Axis, Expr]] = []
        table: dict[Expr, Expr] = {}
        for n, chain in enumerate(chains(axes, found)):
            if len(chain) == 1 or not _adjacent(chain, axes):
                merged += chain
                continue
            new = Axis(f"{f.prefix}m{n}")
            size: Expr = const(1)
            for _, e in chain:
                size = op("mul", size, e)
            table |= merge_table(chain, new)
            merged.append((new, size))
        axes = merged
        update = tuple(substitute(u, table) for u in update)
        update = tuple(simplify(u, dict(axes) | deps.fold_extents(*update)) for u in update)
    names: dict[Expr, Expr] = {a: Axis(f"r{height}_{k}") for k, (a, _) in enumerate(axes)}
    prefix = f"f{height}_"
    states: dict[Expr, Expr] = {
        f.state(i, s): Var(f"{prefix}{s}{i}", f.init[i].dtype) for i in range(len(f.init)) for s in "ab"
    }
    ren = lambda e: substitute(e, names | states)
    return Fold(
        tuple((names[a], e) for a, e in axes), f.init, tuple(map(ren, update)), tuple(map(ren, f.combine)), f.order, f.pick, prefix,  # type: ignore[misc]
    )


def _adjacent(chain: list[tuple[Axis, Expr]], axes: list[tuple[Axis, Expr]]) -> bool:
    """Does the chain stand in `axes` in this order, without others between?"""
    order = [a for a, _ in axes]
    at = order.index(chain[0][0])
    return [a for a, _ in chain] == order[at : at + len(chain)]


def _step(items: list[Access], axis: Axis) -> int:
    """How far apart in memory two iterations of `axis` are: the largest stride over all accesses (0: none)."""
    worst = 0
    for x in items:
        if axis in x.coefs:
            worst = max(worst, abs(estimate(x.coefs[axis])))
        elif axis in x.rough:
            worst = max(worst, 1 << 20)
    return worst


def merge_folds(seq: list[Let | Nest]) -> list[Let | Nest]:
    """Neighbouring lets of Folds over equal axes run as one loop with several states."""
    out: list[Let | Nest] = []
    run: list[Let] = []

    def flush() -> None:
        folds = [s.value for s in run]
        if len({f.picking(0) for f in folds}) > 1:  # type: ignore[attr-defined]
            joint, at = _joint(folds)  # type: ignore[arg-type]
            out.extend(Let(s.var, joint.picking(at[s.value.picking(0)] + s.value.pick)) for s in run)  # type: ignore[attr-defined]
        else:
            out.extend(run)
        run.clear()

    for item in seq:
        if isinstance(item, Let) and isinstance(item.value, Fold) and item.value.order == "any" and item.value.combine:
            f = item.value
            names = {s.var for s in run}
            fits = run and (run[0].value.axes, run[0].value.extents, run[0].value.prefix) == (f.axes, f.extents, f.prefix)  # type: ignore[attr-defined]
            if run and (not fits or any(x in names for x in walk(f))):
                flush()
            run.append(item)
        else:
            flush()
            out.append(item)
    flush()
    return out


def _joint(folds: list[Fold]) -> tuple[Fold, dict[Fold, int]]:
    """One Fold with the states of all; where each one's states begin."""
    init: list[Expr] = []
    update: list[Expr] = []
    combine: list[Expr] = []
    at: dict[Fold, int] = {}
    for f in folds:
        key = f.picking(0)
        if key in at:
            continue
        k = at[key] = len(init)
        shift: dict[Expr, Expr] = {
            f.state(i, s): Var(f"{f.prefix}{s}{i + k}", f.init[i].dtype) for i in range(len(f.init)) for s in "ab"
        }
        init += f.init
        update += [substitute(u, shift) for u in f.update]
        combine += [substitute(c, shift) for c in f.combine]
    f = folds[0]
    return Fold(tuple(zip(f.axes, f.extents, strict=True)), tuple(init), tuple(update), tuple(combine), "any", 0, f.prefix), at


# ---------------------------------------------------------------- axes


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


def collapse(d: Draft, buffers: Mapping[str, Buffer], names: Iterator[int]) -> None:
    """Axes that every access steps through as one become one."""
    stores = [s for s in d.statements() if isinstance(s, StoreStmt)]
    found = collect([e for s in d.statements() if isinstance(s, Let) for e in _exprs(s)], stores, buffers)
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


# ---------------------------------------------------------------- choosing the vector axis


def _waste(extent: Expr) -> float:
    n = const_of(extent)
    return 1.0 if n is None else -(-n // LANES) * LANES / max(n, 1)


def _access_cost(x: Access, axis: Axis) -> float:
    s = x.stride(axis)
    if s == 0:
        return 0.3
    return (1.0 if x.itemsize <= 4 else 2.0) if s == 1 else GATHER * (1.5 if x.store else 1.0)


def vector_cost(items: list[Access], extents: Mapping[Axis, Expr], axis: Axis, weigh: Callable[[Access], float]) -> float:
    """Cost per element of running `axis` over lanes."""
    w = _waste(extents[axis])
    return sum(weigh(x) * (_access_cost(x, axis) + 0.5) * w / LANES for x in items)


def choose_outer_vector(d: Draft, buffers: Mapping[str, Buffer]) -> Axis | None:
    """The outer axis to run over lanes; None: the Folds (or nothing) are vectorised instead."""
    extents = d.extents()
    stores = [s for s in d.statements() if isinstance(s, StoreStmt)]
    found = collect([e for s in d.statements() if isinstance(s, Let) for e in _exprs(s)], stores, buffers)
    outer = {a for a, _ in d.outer}

    def weigh(x: Access) -> float:
        return float(numel(extents[a] for a in x.axes() if a not in outer and a in extents))

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


# ---------------------------------------------------------------- the kernel


def build(group: Group, buffers: Mapping[str, Buffer], own: set[str], name: str) -> Kernel:
    """The whole way. `own`: buffers that only this group writes and reads."""
    names = itertools.count()
    d = Drafter(group, buffers, own).run()
    _drop_unread(d, own)
    memo: dict[Expr, Expr] = {}
    known = d.extents()
    d.map(lambda e: simplify(e, known, memo))
    split_axes(d, names)
    collapse(d, buffers, names)
    fold_memo: dict[Expr, Expr] = {}
    d.map(lambda e: map_folds(e, lambda f: tidy_fold(f, buffers), fold_memo))
    d.seq = merge_folds(_dedupe(d.seq))
    buffers, own = share_rows(d, buffers, own)
    nests = any(isinstance(i, Nest) and i.axes for i in d.seq)
    vector = None if nests else choose_outer_vector(d, buffers)
    stores = [s for s in d.statements() if isinstance(s, StoreStmt)]
    found = collect([e for s in d.statements() if isinstance(s, Let) for e in _exprs(s)], stores, buffers)
    work = sum(_statement_cost(s) * numel(e for _, e in item.axes) for item in d.seq if isinstance(item, Nest) for s in item.body)
    work += sum(_statement_cost(s) for s in d.seq if isinstance(s, Let))
    grid = order_axes(d.outer, found.items, vector)
    scratch: list[Scratch] = []
    body: list[Stmt] = []
    if vector is not None:
        axis, extent = grid.pop()
        inner: tuple[Stmt, ...] = tuple(y for s in d.seq for y in ((s,) if isinstance(s, Let) else s.body))
        column = _is_column(d, found.items, axis)
        block = block_size(extent, numel(e for _, e in grid), work, column)
        folded = any(isinstance(x, Fold) for x in walk(*d.roots()))
        partner = None if folded else tile_partner(grid, axis, found)
        if partner is not None:
            far = {x: _steps_far(x, axis, buffers) for s in inner for x in walk(*_exprs(s)) if isinstance(x, Load)}  # type: ignore[arg-type]
            u = next(x for x in grid if x[0] is partner)
            tiles, tiled = transposing_tile(inner, u, (axis, extent), far, names, scratch)  # type: ignore[arg-type]
            grid = [x for x in grid if x[0] is not partner] + tiles
            body = list(tiled)
            work *= TILE_U * TILE_V
        elif block is not None:
            part, lane = Axis("vb"), Axis("vl")
            at = op("add", op("mul", part, const(block)), lane)
            inner = tuple(_map(s, lambda e: substitute(e, {axis: at})) for s in inner)  # type: ignore[arg-type]
            n = const_of(extent)
            exact = n is not None and n % block == 0
            count = op("floordiv", op("add", extent, const(block - 1)), const(block))
            grid.append((part, const((n or 0) // block) if exact else count))
            rest = op("sub", extent, op("mul", part, const(block)))
            length = const(block) if exact else op("min", const(block), rest)
            turned = column_loops(inner, lane, length, block, scratch) if column else None  # type: ignore[arg-type]
            body = list(turned or (Loop(lane, length, "vector", inner),))
            work *= block
        else:
            width = const_of(extent)
            turned = column_loops(inner, axis, extent, width, scratch) if column and width is not None else None  # type: ignore[arg-type]
            body = list(turned or (Loop(axis, extent, "vector", inner),))
            work *= max(1, estimate(extent))
    else:
        keep = _scratch(d, own, buffers, scratch)
        for item in d.seq:
            if isinstance(item, Let):
                body.append(keep(item))  # type: ignore[arg-type]
            else:
                body.extend(_nest_loops(item, buffers, keep))
    grain = const(max(1, THREAD // max(1, work)))
    return finish(name, tuple(grid), grain, tuple(scratch), tuple(body), buffers, group)


def _statement_cost(s: Let | StoreStmt) -> int:
    return 1 + cost(s.value)


def share_rows(d: Draft, buffers: Mapping[str, Buffer], own: set[str]) -> tuple[Mapping[str, Buffer], set[str]]:
    """Dear values that a Fold and a later loop both compute are computed once, into a row: softmax's exponentials."""
    rows: dict[str, Buffer] = {}
    k = 0
    while k < len(d.seq):
        item = d.seq[k]
        k += 1
        walked = row_walk(item.value) if isinstance(item, Let) and isinstance(item.value, Fold) else None
        if walked is None:
            continue
        assert isinstance(item, Let)
        f, point, length = walked
        for nest in d.seq[k:]:
            if not isinstance(nest, Nest) or len(nest.axes) != 1 or nest.axes[0][1] is not length:
                continue
            axis, extent = nest.axes[0]
            e = find_shared(f, point, [x for s in nest.body for x in _exprs(s)], axis)
            row = shared_row(e, extent, f"own_row{len(rows)}") if e is not None else None
            if e is None or row is None:
                continue
            rows[row.name] = row
            table: dict[Expr, Expr] = {substitute(e, {point: axis}): Load(row.name, row.dtype, (axis,))}
            nest.body = [_map(s, lambda x, t=table: substitute(x, t)) for s in nest.body]  # type: ignore[misc]
            fill = Nest([(axis, extent)], [StoreStmt(row.name, (axis,), substitute(e, {point: axis}))])
            used: dict[Expr, Expr] = {e: Load(row.name, row.dtype, (point,))}
            d.seq[k - 1 : k] = [fill, Let(item.var, substitute(item.value, used))]
            k += 1
            break
    return (buffers, own) if not rows else ({**buffers, **rows}, own | set(rows))


def _is_column(d: Draft, items: list[Access], vector: Axis) -> bool:
    """Is this a reduction over rows, whose loads lie contiguous along the vector axis?"""
    folds = [s.value for s in d.seq if isinstance(s, Let) and isinstance(s.value, Fold)]
    if not folds:
        return False
    axes = {a for f in folds for a in f.axes}  # type: ignore[attr-defined]
    return all(x.stride(vector) in (0, 1) for x in items if x.axes() & axes)


def _steps_far(x: Load, axis: Axis, buffers: Mapping[str, Buffer]) -> bool:
    if x.mask is not None:
        return False
    for a in collect([x], [], buffers).items:
        if a.buf == x.buf:
            step = a.stride(axis)
            return step is not None and abs(step) >= 16
    return False


def block_size(extent: Expr, others: int, work: int, column: bool = False) -> int | None:
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


def _dedupe(seq: list[Let | Nest]) -> list[Let | Nest]:
    """Lets of equal Folds are one variable."""
    seen: dict[Expr, Var] = {}
    table: dict[Expr, Expr] = {}
    out: list[Let | Nest] = []
    for item in seq:
        if isinstance(item, Let):
            value = substitute(item.value, table) if table else item.value
            if isinstance(value, Fold) and value in seen:
                table[item.var] = seen[value]
                continue
            if isinstance(value, Fold):
                seen[value] = item.var
            out.append(Let(item.var, value))
        else:
            out.append(Nest(item.axes, [_map(s, lambda e: substitute(e, table)) for s in item.body]) if table else item)
    return out


def _drop_unread(d: Draft, own: set[str]) -> None:
    """Stores to the kernel's own buffers that nothing loads (their values were forwarded)."""
    while True:
        read = {x.buf for x in walk(*d.roots()) if isinstance(x, Load)}
        dead = {s.buf for s in d.statements() if isinstance(s, StoreStmt) and s.buf in own and s.buf not in read}
        if not dead:
            return
        for item in d.seq:
            if isinstance(item, Nest):
                item.body = [s for s in item.body if not (isinstance(s, StoreStmt) and s.buf in dead)]
        d.seq = [i for i in d.seq if not isinstance(i, Nest) or i.body]


def _scratch(d: Draft, own: set[str], buffers: Mapping[str, Buffer], out: list[Scratch]) -> Callable[[Let | StoreStmt], Let | StoreStmt]:
    """The kernel's own rows become stack arrays where they fit: index by the inner axes only."""
    places: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
    budget = SCRATCH_BYTES
    kept = {a for a, _ in d.outer}
    for item in d.seq:
        if not isinstance(item, Nest) or not item.axes:
            continue
        for s in item.body:
            if not isinstance(s, StoreStmt) or s.buf not in own:
                continue
            dims = tuple(k for k, i in enumerate(s.index) if not free_axes(i) <= kept)
            sizes = [const_of(buffers[s.buf].shape[k]) for k in dims]
            if None in sizes:
                continue
            size = 1
            for n in sizes:
                size *= n or 0
            if 0 < size * buffers[s.buf].dtype.itemsize <= budget:
                budget -= size * buffers[s.buf].dtype.itemsize
                strides = []
                layout = buffers[s.buf].layout
                assert layout is not None
                order = sorted(range(len(dims)), key=lambda j: -estimate(layout.strides[dims[j]]))
                step = 1
                strides = [0] * len(dims)
                for j in reversed(order):
                    strides[j] = step
                    step *= sizes[j] or 1
                places[s.buf] = (dims, tuple(strides), size)
                out.append(Scratch(s.buf, buffers[s.buf].dtype, size))
    memo: dict[Expr, Expr] = {}

    def index(buf: str, at: tuple[Expr, ...]) -> tuple[Expr, ...]:
        dims, strides, _ = places[buf]
        total: Expr = const(0)
        for k, step in zip(dims, strides, strict=True):
            total = op("add", total, op("mul", at[k], const(step)))
        return (total,)

    def go(e: Expr) -> Expr:
        done = memo.get(e)
        if done is None:
            done = e.rebuild(tuple(go(a) for a in e.args)) if e.args else e
            if isinstance(done, Load) and done.buf in places:
                done = Load(done.buf, done.dtype, index(done.buf, done.index), done.mask, done.other)
            memo[e] = done
        return done

    def keep(s: Let | StoreStmt) -> Let | StoreStmt:
        s = _map(s, go)
        return replace(s, index=index(s.buf, s.index)) if isinstance(s, StoreStmt) and s.buf in places else s

    return keep


def _nest_loops(nest: Nest, buffers: Mapping[str, Buffer], keep: Callable[[Let | StoreStmt], Let | StoreStmt]) -> list[Stmt]:
    """Loops of a nest, the best axis over lanes and innermost."""
    stores = [s for s in nest.body if isinstance(s, StoreStmt)]
    found = collect([s.value for s in nest.body], stores, buffers)
    body: tuple[Stmt, ...] = tuple(keep(s) for s in nest.body)
    if not nest.axes:
        return list(body)
    extents = dict(nest.axes)
    best = min((a for a, _ in nest.axes), key=lambda a: vector_cost(found.items, extents, a, lambda x: 3.0 if x.store else 1.0))
    for axis, extent in reversed(order_axes(nest.axes, found.items, best)):
        body = (Loop(axis, extent, "vector" if axis is best else "serial", body),)
    return list(body)


def finish(
    name: str, grid: tuple[tuple[Axis, Expr], ...], grain: Expr, scratch: tuple[Scratch, ...], body: tuple[Stmt, ...],
    buffers: Mapping[str, Buffer], group: Group,
) -> Kernel:
    """Parameters, symbols, origins."""
    roots = [*deps.map_stmts(body), *(e for _, e in grid)]
    nodes = list(walk(*roots))
    stack = {s.name for s in scratch}
    written = {s.buf for s in _stores(body)}
    order = dict.fromkeys([*(s.buf for s in _stores(body)), *(n.buf for n in nodes if isinstance(n, Load))])
    params = []
    for n in order:
        if n in stack:
            continue
        b = buffers[n]
        assert b.layout is not None
        params.append(Param(n, b.dtype, b.shape, b.layout, n in written))
        nodes += list(walk(b.layout.offset, *b.layout.strides))
    syms = tuple(dict.fromkeys(n for n in nodes if isinstance(n, Sym)))
    origins = tuple(dict.fromkeys(f"{s.origin} {s.loc}".strip() for s in group.stages))
    return Kernel(name, tuple(params), syms, grid, grain, scratch, body, origins=origins)


def _stores(body: tuple[Stmt, ...]) -> Iterator[StoreStmt]:
    for s in body:
        if isinstance(s, StoreStmt):
            yield s
        elif isinstance(s, Loop):
            yield from _stores(s.body)
