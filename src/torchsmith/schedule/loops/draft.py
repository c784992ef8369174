"""The members of a Group as one sequence of lets and nests: the Draft that a kernel is made from.

In: a Group, which buffers the kernel may keep to itself. Out: a Draft, folds of the outer axes hoisted out of the nests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...ir import dtype as dt
from ...ir.expr import Axis, Expr, Fold, Load, Var, rewrite, select, substitute, walk
from ...ir.kernel import Let, StoreStmt
from ...ir.program import Buffer
from .. import deps
from ..deps import free_axes
from ..fusion.fuse import simple_axes
from ..fusion.group import Group

DEEP = 40  # levels of an expression from which on it gets a name, so that later ones do not grow out of it


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
        return [e for s in self.statements() for e in exprs_of(s)]

    def statements(self) -> Iterator[Let | StoreStmt]:
        for item in self.seq:
            if isinstance(item, Nest):
                yield from item.body
            else:
                yield item

    def map(self, fn: Callable[[Expr], Expr]) -> None:
        self.seq = [
            Nest(item.axes, [map_statement(s, fn) for s in item.body]) if isinstance(item, Nest) else map_statement(item, fn)  # type: ignore[misc]
            for item in self.seq
        ]


def exprs_of(s: Let | StoreStmt) -> list[Expr]:
    if isinstance(s, Let):
        return [s.value]
    return [*s.index, s.value, *(() if s.mask is None else (s.mask,))]


def map_statement(s: Let | StoreStmt, fn: Callable[[Expr], Expr]) -> Let | StoreStmt:
    if isinstance(s, Let):
        return Let(s.var, fn(s.value))
    return StoreStmt(s.buf, tuple(fn(i) for i in s.index), fn(s.value), s.mode, None if s.mask is None else fn(s.mask))


class Drafter:
    """Turns the members of a group into a sequence of lets and nests. nested: Folds inside of Folds are lets too, where they can be."""

    def __init__(self, group: Group, buffers: Mapping[str, Buffer], own: set[str], nested: bool = False) -> None:
        self.group, self.buffers, self.own, self.nested = group, buffers, own, nested
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

        def change(x: Expr) -> Expr:
            if not isinstance(x, Load) or x.buf not in self.scalars:
                return x
            var = self.scalars[x.buf][1]
            return var if x.mask is None or x.other is None else select(x.mask, var, x.other)

        return rewrite(e, change, {})

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
                    if i is j and i not in mine:
                        continue  # of the loops around both
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
                    fold = e.rebuild(tuple(map(go, e.args))) if self.nested else e
                    var = self.var(e.dtype)
                    seq.append(Let(var, fold))
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


def drop_unread(d: Draft, own: set[str]) -> None:
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
