"""Horizontal grouping: which Stages share one kernel, and over which common outer axes.

In: a Program's body (after vertical fusion). Out: the body with Groups in place of Stages, in a legal order.

A Group runs all its members inside common loops over `outer`; what a member needs beyond (a row it maps, a Fold) runs inside. A member
may read what an earlier member wrote only at the same outer index: then the dependence stays within one outer iteration.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...ir import memo
from ...ir.expr import Axis, Const, Expr, Load, substitute, walk
from ...ir.program import Buffer, Check, Element, Stage
from ...options import Options
from .. import deps
from ..access import collect
from ..deps import estimate, numel, reads, stage_loads, writes
from ..templates.table import recognised
from .fuse import simple_axes

WINDOW = 40  # how far back a partner is looked for
SERIAL_WORK = 32768  # element operations below which one thread is enough
PARALLEL = 8  # outer iterations that keep the threads busy
ROW_BYTES = 1 << 19  # what one outer iteration may keep in the second-level cache (half a megabyte: x and y of a group of 8 x 64 x 64)


@dataclass
class Group:
    """Stages to run in one kernel. `outer`: the loops they share; members' axes are renamed so that shared ones are the same Axis."""

    members: list[Stage]
    outer: tuple[tuple[Axis, Expr], ...]
    closed: bool = False  # scans, scatters, contractions: nothing joins
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    stages: list[Stage] = field(default_factory=list)  # as they came, before renaming
    names: int = 0  # axes are numbered in each group anew: equal stages have equal indices, and what is known of them is found once

    def work(self) -> int:
        return sum(stage_work(m) for m in self.members)


Item = Group | Element


@memo.by_identity
def stage_work(s: Stage) -> int:
    n = numel(e for _, e in s.axes)
    f = numel(deps.fold_extents(*deps.stage_exprs(s)).values())
    return n * f


def is_ordered(s: Stage) -> bool:
    """Does the order of its iterations matter, or where they store? Such a Stage forms a kernel alone."""
    return s.scan or bool(s.lets) or any(
        t.mode != "set" or not t.unique or t.mask is not None or simple_axes(s, t) is None for t in s.stores
    )


def is_special(s: Stage) -> bool:
    """Stages that form a kernel alone."""
    return is_ordered(s) or recognised(s) is not None


def rename(s: Stage, table: Mapping[Axis, Axis]) -> Stage:
    sub: dict[Expr, Expr] = dict(table.items())
    stores = tuple(
        replace(t, index=tuple(substitute(i, sub) for i in t.index), value=substitute(t.value, sub),
                mask=None if t.mask is None else substitute(t.mask, sub)) for t in s.stores
    )  # fmt: skip
    return replace(
        s, axes=tuple((table.get(a, a), e) for a, e in s.axes), stores=stores,
        lets=tuple((v, substitute(e, sub)) for v, e in s.lets), carry=tuple((v, substitute(e, sub)) for v, e in s.carry),
        carry_next=tuple(substitute(e, sub) for e in s.carry_next),
    )


class Grouper:
    """State of one pass over a body."""

    def __init__(self, buffers: Mapping[str, Buffer], options: Options) -> None:
        self.buffers, self.options, self.fuel = buffers, options, options.fuel
        self.roots = deps.roots_of(buffers)
        self.chance = random.Random(options.chaos) if options.chaos else None

    def single(self, s: Stage) -> Group:
        member = rename(s, {a: Axis(f"g{k}") for k, (a, _) in enumerate(s.axes)})
        return Group([member], member.axes, is_special(s), reads(s), writes(s), [s], len(s.axes))

    # ------------------------------------------------------------ legality
    def mapping(self, g: Group, s: Stage) -> dict[Axis, Axis] | None:
        """outer axis -> axis of `s`, as far as dependences allow; None when they cannot share a kernel at all."""
        if s.stores and (writes(s) & (g.writes | g.reads)):
            return None
        if self.roots and self.crosses(g, s):
            return None
        flow = reads(s) & g.writes
        if not flow:
            return self.sibling_mapping(g, s)
        extents = dict(s.axes)
        found: dict[Axis, Axis] = {}
        lost: set[Axis] = set()
        for m in g.members:
            for t in m.stores:
                if t.buf not in flow:
                    continue
                at = simple_axes(m, t)
                if at is None:
                    return None
                where = {a: j for j, a in enumerate(at) if a is not None}
                for u in stage_loads(s):
                    if u.buf != t.buf:
                        continue
                    for d, e in g.outer:
                        i = u.index[where[d]] if d in where else None
                        if isinstance(i, Axis) and extents.get(i) is e and found.get(d, i) is i:
                            found[d] = i
                        else:
                            lost.add(d)
        used: set[Axis] = set()
        out: dict[Axis, Axis] = {}
        for d, a in found.items():
            if d not in lost and a not in used:
                out[d] = a
                used.add(a)
        return out

    def crosses(self, g: Group, s: Stage) -> bool:
        """Does one of them write memory that the other touches under another name? In one kernel nothing would order the two."""
        changed = deps.rooted(g.writes | writes(s), self.roots)
        theirs = {n: self.roots.get(n, n) for n in g.reads | g.writes}
        mine = {n: self.roots.get(n, n) for n in reads(s) | writes(s)}
        return any(a != b and m in changed and m == t for a, m in mine.items() for b, t in theirs.items())

    def sibling_mapping(self, g: Group, s: Stage) -> dict[Axis, Axis] | None:
        """Independent stages share a kernel when they run over the same axes and load the same elements (or are tiny)."""
        out = same_axes(g, s)
        if out is None:
            return None
        mine = {x for x in stage_loads(rename(s, {a: d for d, a in out.items()})) if len(x.index) >= 1}
        theirs = {x for m in g.members for x in stage_loads(m)}
        shared = [x for x in mine & theirs if _covers(x, g.outer)]
        tiny = numel(e for _, e in g.outer) <= 4096 and stage_work(s) <= 4096 and g.work() <= 16384
        return out if shared or tiny else None

    # ------------------------------------------------------------ profit
    def worth(self, g: Group, s: Stage, outer: tuple[tuple[Axis, Expr], ...], joined: list[Stage]) -> bool:
        if len(joined) > self.options.max_fusion_size or len({x.buf for m in joined for x in stage_loads(m)}) > 40:
            return False
        kept = {a for a, _ in outer}
        inner = [[x for x in m.axes if x[0] not in kept] for m in joined]
        if not any(inner) and len(outer) == len(g.outer):
            return True
        total = sum(stage_work(m) for m in joined)
        if numel(e for _, e in outer) < PARALLEL and total > SERIAL_WORK:
            return False
        widest = max(numel(e for _, e in axes) for axes in inner)
        live = len({b for m in joined for b in reads(m) | writes(m)})
        if widest * 4 * min(live, 4) > ROW_BYTES * (4 if total <= SERIAL_WORK else 1):
            return False
        if self.chance is not None:
            return self.chance.random() < 0.5
        return not any(self.strided(m, kept) for m in joined)

    def strided(self, m: Stage, kept: set[Axis]) -> bool:
        """Does the member's inner loop (or Fold) step over memory that the outer loops walk contiguously?"""
        folds = deps.fold_extents(*deps.stage_exprs(m))
        inner = {a for a, _ in m.axes if a not in kept} | set(folds)
        if not inner:
            return False
        extents = dict(m.axes) | folds
        found = collect([t.value for t in m.stores], [], self.buffers)
        for x in found.items:
            axes = [a for a in x.axes() if a in extents and estimate(extents[a]) > 1]
            if not any(a in inner for a in axes):
                continue
            unit = [a for a in axes if x.stride(a) == 1]
            if unit and unit[0] in kept and numel(extents[a] for a in inner if a in axes) > 1:
                return True
        return False

    # ------------------------------------------------------------ joining
    def grouped(self, body: tuple[Element, ...]) -> list[Item]:
        """Stages become Groups; everything else keeps its place among them."""
        items: list[Item] = []
        for e in body:
            if isinstance(e, Stage):
                self.add(items, e)
            else:
                items.append(e)
        return items

    def join(self, g: Group, s: Stage) -> Group | None:
        """`g` with `s` as a further member, or None."""
        table = self.mapping(g, s)
        if table is None:
            return None
        outer = tuple(x for x in g.outer if x[0] in table)
        back = {a: d for d, a in table.items() if d in dict(outer)}
        fresh = itertools.count(g.names)
        names = {a: back.get(a) or Axis(f"g{next(fresh)}") for a, _ in s.axes}
        member = rename(s, names)
        joined = [*g.members, member]
        if not self.worth(g, s, outer, joined):
            return None
        return Group(joined, outer, False, g.reads | reads(s), g.writes | writes(s), [*g.stages, s], next(fresh))

    def add(self, items: list[Item], s: Stage) -> None:
        """Append `s`, joined to an earlier group where that is legal and pays."""
        alone = self.single(s)
        if not alone.closed:
            order = self.partners(items, s)
            for k in order:
                g = items[k]
                assert isinstance(g, Group)
                between = items[k + 1 :]
                down = not any(self.conflict(g, x) for x in between)
                up = not down and not any(isinstance(x, Check) or deps.defines(x) or self.conflict(alone, x) for x in between)
                if not down and not up:
                    continue
                merged = self.join(g, s) if self.fuel else None
                if merged is None:
                    continue
                self.fuel -= 1
                if down:
                    del items[k]
                    items.append(merged)
                else:
                    items[k] = merged
                return
        items.append(alone)

    def conflict(self, a: Group, b: Item) -> bool:
        """May `a` not pass `b`?"""
        r, w = (b.reads, b.writes) if isinstance(b, Group) else (reads(b), writes(b))
        r, w = deps.rooted(r, self.roots), deps.rooted(w, self.roots)
        mine = deps.rooted(a.writes, self.roots)
        return bool(mine & (r | w) or w & deps.rooted(a.reads, self.roots))

    def partners(self, items: list[Item], s: Stage) -> list[int]:
        """Groups to try, those that produce what `s` reads first, the latest first."""
        near = range(len(items) - 1, max(-1, len(items) - 1 - WINDOW), -1)
        groups = [k for k in near if isinstance(items[k], Group) and not items[k].closed]  # type: ignore[union-attr]
        flow = [k for k in groups if reads(s) & items[k].writes]  # type: ignore[union-attr]
        return flow + [k for k in groups if k not in flow and (reads(s) & items[k].reads or stage_work(s) <= 4096)]  # type: ignore[union-attr]


def same_axes(g: Group, s: Stage) -> dict[Axis, Axis] | None:
    """The group's loops and the stage's axes, one by one, where they have equal extents in the same order; else None."""
    if len(s.axes) != len(g.outer) or any(e is not f for (_, e), (_, f) in zip(s.axes, g.outer, strict=True)):
        return None
    return {d: a for (d, _), (a, _) in zip(g.outer, s.axes, strict=True)}


def _covers(x: Load, outer: tuple[tuple[Axis, Expr], ...]) -> bool:
    axes = {a for i in x.index for a in walk(i) if isinstance(a, Axis)}
    return all(a in axes for a, e in outer if not (isinstance(e, Const) and e.value == 1))
