"""Stages -> Kernels of a language that computes on blocks: plain statements, and tiles that say which axes are blocks.

In: a Program (after vertical fusion). Out: Scheduled. What a kernel means is in its statements; tiles are hints, so that the reference
interpreter runs it as it stands.

    y[i, j] = exp(x[i, j] - max over k of x[i, k])
        becomes    grid i: m = Fold(row, max, x[i, row]); for row: y[i, row] = exp(x[i, row] - m)

A kernel loads nothing that it stores (programs wait for nobody's stores): what a later loop reads of an earlier one is computed again, and
since equal expressions are printed once, a row that is there at once is loaded once. Axes become at most three: what the grid walks one by
one, blocks of neighbouring grid positions, and an inner "row" that Folds and inner loops of equal extent share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from ..ir import dtype as dt
from ..ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Var, const, convert, op, rewrite, select, substitute, walk
from ..ir.kernel import Kernel, Let, Loop, Require, Scheduled, Stmt, StoreStmt, Tile
from ..ir.linear import const_of
from ..ir.program import Buffer, Check, Cond, Element, Program, Repeat, Stage, Store
from ..ir.target import Target
from ..options import Options
from . import deps
from .access import Access, collect, flat, map_folds, merge_table, simplify
from .deps import estimate, free_axes, numel
from .fusion.fuse import guard, simple_axes
from .fusion.group import WINDOW, Group, Grouper, Item, is_ordered, rename, same_axes, stage_work
from .fusion.near_sums import near_sums
from .fusion.rematerialize import rematerialize
from .fusion.split import contiguous_axis, in_two_steps
from .join_kernels import is_small, join_kernels
from .kernels import NOTHING, Decisions, Own, Ready, formed, nobody
from .loops.axes import collapse, order_axes, split_axes
from .loops.build import finish
from .loops.draft import Draft, Drafter, Nest, drop_unread, exprs_of, map_statement
from .loops.folds import dedupe, merge_folds, tidy_fold
from .loops.special import Walk
from .memory.layouts import choose_layouts
from .templates.block_products import parts_of_sum, pow2, product_in, product_of, product_tiles

Axes = list[tuple[Axis, Expr]]
ELEMENTS = 1024  # of a program that only maps elements
STEP = 2048  # elements of a row that is walked in steps
WALKED = 128  # times the elements of a row that few programs may walk in narrow columns
WASTE = 2.0  # lanes for each element of a long row that is held whole: more are walked in steps
WARPS = 8  # of a program that sums long columns
HELD = WARPS * 32 * 4 * 40  # bytes of registers for what its threads sum up
PROGRAMS = 4  # for each processor, of a sum in parts
SECTOR, LINE = 32, 128  # bytes: fewer of them beside each other are read in vain; of a line of the cache
AGAIN = 2  # times that what a group made may be computed once more for its neighbours
SHORT = 16  # trips of a Fold that are not worth a dimension of their own, where its steps are far
WINDOW_LOADS, SHARED = 6, 0.8  # loads from which on neighbours may share them, and the share of loads that they must leave
MOST_NEIGHBOURS, REGISTERS, LANES = 8, 208, 768  # computed by a lane; what their loads may fill; lanes of a processor at least
FOR_ALL = 4  # rows of a program that computes something for all of them
SIDE = 64  # of a tile whose loads and stores lie along different axes
ATOMIC = {
    "add": frozenset({dt.f32, dt.f64, dt.f16, dt.i32, dt.i64}), "min": frozenset({dt.i32, dt.i64}), "max": frozenset({dt.i32, dt.i64})
}  # fmt: skip

OF_BOOLS = {"add": "or", "max": "or", "mul": "and", "min": "and"}  # what it is to accumulate so into bool


# ---------------------------------------------------------------- grouping


class BlockGrouper(Grouper):
    """Which Stages share a kernel: programs are many, and a row that one program holds is small."""

    def __init__(self, buffers: Mapping[str, Buffer], options: Options, target: Target) -> None:
        super().__init__(buffers, options)
        self.weights = target.weights

    def single(self, s: Stage) -> Group:
        found = product_in(s, self.buffers)
        return replace(super().single(s), closed=is_ordered(s) or (found is not None and (found.is_half or not found.is_thin)))

    def partners(self, items: list[Item], s: Stage) -> list[int]:
        """Also the group that made what `s` reads, however long ago: optimizers that go through lists of tensors come back to it late."""
        found = super().partners(items, s)
        if found or len(items) <= WINDOW or any(isinstance(e, Fold) for e in walk(*deps.stage_exprs(s))):
            return found
        wanted = deps.reads(s)
        far = (k for k in reversed(range(len(items) - WINDOW)) if isinstance(g := items[k], Group) and not g.closed and wanted & g.writes)
        return list(itertools.islice(far, 1))

    def sibling_mapping(self, g: Group, s: Stage) -> dict[Axis, Axis] | None:
        """Also stages that read the same rows in inner loops of their own: (i, j) and i with a Fold over j."""
        found = super().sibling_mapping(g, s) or self.windows_mapping(g, s)
        if found is not None:
            return found
        extents, outer, out = dict(s.axes), dict(g.outer), dict[Axis, Axis]()
        for u in deps.stage_loads(s):
            if numel(self.buffers[u.buf].shape) <= 4096:
                continue
            for x in {x for m in g.members for x in deps.stage_loads(m) if x.buf == u.buf}:
                for i, j in zip(x.index, u.index, strict=True):
                    if not (isinstance(i, Axis) and isinstance(j, Axis) and i in outer and extents.get(j) is outer[i]):
                        continue
                    if out.get(i, j) is j and (i in out or j not in out.values()):
                        out[i] = j
        return out or None

    def windows_mapping(self, g: Group, s: Stage) -> dict[Axis, Axis] | None:
        """Stages over the same axes that read the same windows, each in a Fold of its own."""
        out = same_axes(g, s)
        if out is None:
            return None

        def window(x: Load) -> Expr | None:
            inner = [a for a in dict.fromkeys(a for a in walk(*x.index) if isinstance(a, Axis)) if a not in out]
            return substitute(x, {a: Axis(f"any{k}") for k, a in enumerate(inner)}) if inner else None

        mine = {window(x) for x in deps.stage_loads(rename(s, {a: d for d, a in out.items()}))} - {None}
        return out if mine and mine & {window(x) for m in g.members for x in deps.stage_loads(m)} else None

    def worth(self, g: Group, s: Stage, outer: tuple[tuple[Axis, Expr], ...], joined: list[Stage]) -> bool:
        if len(joined) > self.options.max_fusion_size or len({x.buf for m in joined for x in deps.stage_loads(m)}) > 24:
            return False
        kept = {a for a, _ in outer}
        inner = [[x for x in m.axes if x[0] not in kept] for m in joined]
        if any(product_in(m, self.buffers) is not None for m in joined):  # tiles, and what else is done with their elements
            folding = [m for m in joined if any(isinstance(e, Fold) for e in walk(*deps.stage_exprs(m)))]
            return not any(inner) and len(outer) == len(g.outer) and len(folding) == 1
        if not any(inner) and len(outer) == len(g.outer):
            return True
        longest = max(self.trips_inside(m, kept) for m in joined)
        if longest > SHORT:
            return False
        if not any(isinstance(e, Fold) for m in joined for e in walk(*deps.stage_exprs(m))):
            return False  # elements and what is broadcast to them: an inner loop would only take programs away
        rows, total = numel(e for _, e in outer), sum(stage_work(m) for m in joined)
        lengths = {numel(e for _, e in axes) for axes in inner if axes}
        widest = max(lengths, default=1)
        if len(lengths) > 1 and total > 16 * self.weights.registers:
            return False  # what the first loop stores the second computes anew, and reads none of it
        least = SECTOR // 4
        strided = any(self.strided(m, kept) for m in joined)
        walked = pow2(widest) * least > self.weights.registers // 2
        if strided and (walked or longest):  # one program has that many columns
            rows //= least
        if strided and walked:  # in steps
            if rows < self.weights.processors // 4:
                return False
            if rows < 2 * self.weights.processors and total > WALKED * self.weights.registers:
                return False
        if rows < self.weights.processors // 2 and total > 16 * self.weights.registers:
            return False  # too few programs for so much
        if widest > 4 * self.weights.registers:
            return False
        if total > 16 * self.weights.registers and self.made_again(joined[-1], g.writes) > AGAIN:
            return False
        if self.chance is not None:
            return self.chance.random() < 0.5
        return True

    def made_again(self, s: Stage, written: Set[str]) -> int:
        """How often an element of `s` would compute what it reads of the group beside its own place."""
        own = {a for a, _ in s.axes}
        extents = deps.fold_extents(*deps.stage_exprs(s))
        beside = {x for x in deps.stage_loads(s) if x.buf in written and not all(isinstance(i, Axis | Const) for i in x.index)}
        return sum(numel(extents[a] for a in free_axes(x) - own if a in extents) for x in beside)

    def trips_inside(self, m: Stage, kept: set[Axis]) -> int:
        """How long a Fold would run once for each step of an inner loop: a short one is written out for each. Whoever reads the value of a
        long one would compute it again, too."""
        folds = [f for f in walk(*deps.stage_exprs(m)) if isinstance(f, Fold)]
        inside = (f for f in folds if free_axes(f) & {a for a, _ in m.axes} and not free_axes(f) <= kept)
        return max((numel(f.extents) for f in inside), default=0)


# ---------------------------------------------------------------- one group


def forward(d: Draft) -> None:
    """Loads of what an earlier nest of the kernel stored become the stored value, at the index of the load."""
    stored: dict[str, tuple[tuple[Expr, ...], Expr]] = {}
    memo: dict[Expr, Expr] = {}

    def value_at(load: Load) -> Expr:
        index, value = stored[load.buf]
        table: dict[Expr, Expr] = {i: at for i, at in zip(index, load.index, strict=True) if isinstance(i, Axis) and i is not at}
        value = substitute(value, table) if table else value
        if load.mask is None or load.other is None:
            return value
        moved = frozenset(a for at in table.values() for a in walk(at) if isinstance(a, Axis))
        return select(load.mask, guard(value, load.mask, moved), load.other)  # what does not move was loaded for the store, in range

    def go(e: Expr) -> Expr:
        return rewrite(e, lambda x: value_at(x) if isinstance(x, Load) and x.buf in stored else x, memo)

    seq: list[Let | Nest] = []
    for item in d.seq:
        memo.clear()
        if isinstance(item, Let):
            seq.append(Let(item.var, go(item.value)))
            continue
        named: dict[Expr, Expr] = {}
        body: list[Let | StoreStmt] = []
        fresh: dict[str, tuple[tuple[Expr, ...], Expr]] = {}
        for s in item.body:
            s = map_statement(s, go)
            body.append(s)
            if isinstance(s, Let):
                named[s.var] = substitute(s.value, named)
            else:
                fresh[s.buf] = (s.index, substitute(s.value, named))
        stored |= fresh
        seq.append(Nest(item.axes, body))
    d.seq = seq


def flatten(axes: Axes, new: Axis) -> tuple[Expr, dict[Expr, Expr]]:
    """(extent, what each axis is in terms of `new`): the axes as one, the last fastest."""
    total: Expr = const(1)
    for _, e in axes:
        total = op("mul", total, e)
    return total, ({axes[0][0]: new} if len(axes) == 1 else merge_table(axes, new))


def is_block_fold(f: Fold) -> bool:
    return f.order == "any" and bool(f.combine)


class Builder:
    """One group on its way to a kernel."""

    def __init__(self, group: Group, buffers: Mapping[str, Buffer], own: set[str], target: Target) -> None:
        self.group, self.buffers, self.own, self.target = group, buffers, own, target
        self.rows: dict[Expr, Axis] = {}  # extent -> the axis that Folds and loops of so many elements share
        self.names = itertools.count()

    def draft(self) -> Draft:
        d = Drafter(self.group, self.buffers, self.own, nested=True).run()
        forward(d)
        drop_unread(d, self.own)
        memo: dict[Expr, Expr] = {}
        known = d.extents()
        d.map(lambda e: simplify(e, known, memo))
        split_axes(d, self.names)
        collapse(d, self.buffers, self.names)
        tidied: dict[Expr, Expr] = {}
        d.map(lambda e: map_folds(e, lambda f: tidy_fold(f, self.buffers), tidied))
        return d

    def row(self, extent: Expr) -> Axis:
        return self.rows.setdefault(extent, Axis(f"row{len(self.rows)}"))

    def flat_rows(self, d: Draft) -> None:
        """Folds that stand alone and inner loops run over one axis each; those of equal extent over the same."""
        outer = dict(d.outer)
        for item in d.seq:
            if isinstance(item, Let) and isinstance(item.value, Fold) and is_block_fold(item.value):
                continue
            if isinstance(item, Nest) and item.axes:
                stores = [s for s in item.body if isinstance(s, StoreStmt)]
                found = collect([s.value for s in item.body], stores, self.buffers)
                axes = order_axes(item.axes, found.items, None)
                total, _ = flatten(axes, Axis("none"))
                axis = self.row(total)
                _, table = flatten(axes, axis)
                known = {**outer, axis: total, **deps.fold_extents(*(e for s in item.body for e in exprs_of(s)))}
                memo: dict[Expr, Expr] = {}
                item.body = [map_statement(s, lambda e: simplify(substitute(e, table), known, memo)) for s in item.body]  # noqa: B023
                item.axes = [(axis, total)]
        seq: list[Let | Nest] = []
        for item in d.seq:
            if isinstance(item, Let) and isinstance(item.value, Fold) and is_block_fold(item.value):
                seq.append(Let(item.var, self.flat_fold(item.value, outer)))
            else:
                seq.append(item)
        d.seq = merge_folds(dedupe(seq))

    def flat_fold(self, f: Fold, outer: Mapping[Axis, Expr]) -> Fold:
        axes = list(zip(f.axes, f.extents, strict=True))
        if not all(free_axes(e) <= set(outer) for e in f.extents):
            return f
        total, _ = flatten(axes, Axis("none"))
        axis = self.row(total)
        _, table = flatten(axes, axis)
        known = {**outer, axis: total, **deps.fold_extents(*f.update)}
        update = tuple(simplify(substitute(u, table), known) for u in f.update)
        return Fold(((axis, total),), f.init, update, f.combine, f.order, f.pick, f.prefix)

    # ------------------------------------------------------------ the grid
    def regroup(self, d: Draft, parts: list[Axes]) -> Axes:
        """The outer axes as one axis per part; those in no part come first, as one."""
        taken = {a for p in parts for a, _ in p}
        rest = [x for x in d.outer if x[0] not in taken]
        grid: Axes = []
        table: dict[Expr, Expr] = {}
        for part in ([rest] if rest else []) + [p for p in parts if p]:
            if len(part) == 1:
                grid.append(part[0])
                continue
            axis = Axis(f"x{next(self.names)}")
            total, made = flatten(part, axis)
            table |= made
            grid.append((axis, total))
        if table:
            d.outer = grid
            d.map(lambda e: substitute(e, table))
            memo: dict[Expr, Expr] = {}
            known = d.extents()
            d.map(lambda e: simplify(e, known, memo))
        d.outer = grid
        return grid

    def accesses(self, d: Draft) -> list[Access]:
        stores = [s for s in d.statements() if isinstance(s, StoreStmt)]
        return collect([s.value for s in d.statements()], stores, self.buffers).items

    def kernel(self, name: str) -> Kernel:
        d = self.draft()
        inner = any(isinstance(i, Nest) and i.axes for i in d.seq)
        folds = [i.value for i in d.seq if isinstance(i, Let) and isinstance(i.value, Fold) and is_block_fold(i.value)]
        found = self.accesses(d)
        d.outer = order_axes(d.outer, found, None)
        launch, stages = None, 2
        if not inner and len(folds) == 1:
            launch = self.multiply(d, found)
        if launch is not None:
            tiles, (warps, stages) = launch
        elif not inner and (not folds or all(self.is_short(f, found) for f in folds)):
            together = 1 if any(isinstance(e, Fold) for e in walk(*d.roots())) else self.share_windows(d, found)
            tiles, warps = self.map_elements(d, self.accesses(d) if together > 1 else found, together)
        else:
            tiles, warps = self.walk_rows(d)
        body: list[Stmt] = []
        for item in d.seq:
            if isinstance(item, Let):
                body.append(item)
            else:
                loop: tuple[Stmt, ...] = tuple(item.body)
                for axis, extent in reversed(item.axes):
                    loop = (Loop(axis, extent, "vector", loop),)
                body += loop
        made = finish(name, tuple(d.outer), const(1), (), tuple(body), self.buffers, self.group)
        return replace(made, target=self.target, tiles=tuple(tiles), launch=(warps, stages))

    def multiply(self, d: Draft, found: list[Access]) -> tuple[list[Tile], tuple[int, int]] | None:
        """Tiles of a product, its rows and columns being the last two axes of the grid."""
        values = tuple(s.value for s in d.statements())
        p = product_of(tuple(d.outer), values, self.buffers)
        if p is None:
            return None
        if len(p.fold.axes) > 1:
            axes = order_axes(list(zip(p.fold.axes, p.fold.extents, strict=True)), found, None)
            fold = replace_axes(p.fold, axes)
            d.map(lambda e: map_folds(e, lambda f: fold.picking(f.pick) if f.picking(0) is p.fold else f, {}))
        self.flat_rows(d)
        grid = self.regroup(d, [list(p.rows), list(p.columns)])
        (fold,) = {f.picking(0) for f in walk(*(s.value for s in d.statements())) if isinstance(f, Fold)}
        return product_tiles(p, tuple(grid), fold, self.target)

    def is_short(self, f: Fold, found: list[Access]) -> bool:
        """Few trips whose loads do not lie beside each other: every lane does its own."""
        n = 1
        for e in f.extents:
            n *= const_of(e) or 1 << 20
        return n <= SHORT and not any(x.stride(a) == 1 for x in found for a in f.axes if not x.store)

    # ------------------------------------------------------------ element by element
    def share_windows(self, d: Draft, found: list[Access]) -> int:
        """Neighbours whose windows overlap are computed by one lane, which loads what they share once: how many, along one axis of `d`.

        y[x] = f(t[x - 1], t[x], t[x + 1])  becomes  y[2x] = f(t[2x - 1], t[2x], t[2x + 1]); y[2x + 1] = f(t[2x], t[2x + 1], t[2x + 2])

        On an H200 those with a filter for each channel take 7 us for 14 (mnasnet1_0, 16 images) and 7 for 10 (mobilenet_v2).
        """
        now, total = self.loads_of(d), numel(e for _, e in d.outer)
        stores = [s for s in d.statements() if isinstance(s, StoreStmt)]
        if len(now) < WINDOW_LOADS or any(s.mode != "set" or s.mask is not None for s in stores):
            return 1
        best, least, chosen = 1, SHARED * len(now), d
        for a, extent in d.outer:
            n = const_of(extent)
            if n is None or any(x.store and x.stride(a) in (None, 0, 1) for x in found) or not may_overlap(now, a, self.buffers):
                continue
            for count in (k for k in range(2, MOST_NEIGHBOURS + 1) if n % k == 0 and total >= k * LANES * self.target.weights.processors):
                made = neighbours_of(d, a, count)
                loads = self.loads_of(made)
                moving = {x for x in loads if a in free_axes(x)}
                held = sum(x.dtype.itemsize for x in loads)  # of four elements in words
                if len(moving) < count * sum(a in free_axes(x) for x in now) and held <= REGISTERS and len(loads) < least * count:
                    best, least, chosen = count, len(loads) / count, made
        if best > 1:
            d.outer, d.seq = chosen.outer, chosen.seq
        return best

    def loads_of(self, d: Draft) -> set[Load]:
        return {x for x in walk(*d.roots()) if isinstance(x, Load)}

    def map_elements(self, d: Draft, found: list[Access], together: int = 1) -> tuple[list[Tile], int]:
        total = numel(e for _, e in d.outer)
        if not d.outer:
            return [], 1
        across = self.crossing(d, found)
        if across is not None:
            t, s = across
            grid = self.regroup(d, [[t], [s]])
            tiles = [Tile(a, min(SIDE, pow2(estimate(e))), "lanes") for a, e in grid[-2:]]
            return tiles, max(1, min(8, tiles[0].size * tiles[1].size // 512))
        (x,) = self.regroup(d, [list(d.outer)])
        size = ELEMENTS if together == 1 else ELEMENTS // 2
        while size > 128 and total < size * 2 * self.target.weights.processors:
            size //= 2
        size = min(size, pow2(total))
        return [Tile(x[0], size, "lanes")], max(1, min(4, size // 128))

    def crossing(self, d: Draft, found: list[Access]) -> tuple[tuple[Axis, Expr], tuple[Axis, Expr]] | None:
        """(axis along which a load is contiguous, axis along which the stores are), where they differ and the first one is long."""
        extents = dict(d.outer)
        long = [a for a, e in d.outer if estimate(e) >= SIDE // 8]
        stores = [a for x in found if x.store for a, e in d.outer if estimate(e) >= SHORT // 4 and x.stride(a) == 1]
        if not stores:
            return None
        s = stores[0]
        for x in found:
            step = x.stride(s)
            if not x.store and step is not None and step not in (0, 1):
                for t in long:
                    if t is not s and x.stride(t) == 1:
                        return (t, extents[t]), (s, extents[s])
        return None

    # ------------------------------------------------------------ rows
    def walk_rows(self, d: Draft) -> tuple[list[Tile], int]:
        self.flat_rows(d)
        inner = {a: e for e, a in self.rows.items()}
        beside = self.neighbours(d, inner)
        grid = self.regroup(d, [[beside]] if beside is not None else [list(d.outer)] if d.outer else [])
        bound = {a for i in d.seq if isinstance(i, Nest) for a, _ in i.axes}
        bound |= {a for f in walk(*d.roots()) if isinstance(f, Fold) for a in f.axes}
        lengths = {a: e for e, a in self.rows.items() if a in bound}
        limit = self.target.weights.registers
        longest = max((estimate(e) for e in lengths.values()), default=1)
        x = grid[-1] if grid else None
        tiles: list[Tile] = []
        rows = estimate(x[1]) if x is not None else 1
        if beside is not None and x is not None:  # neighbours lie beside each other, rows apart
            sizes = [i.itemsize for i in self.accesses(d) if i.stride(x[0]) == 1 and i.axes() & set(lengths)]
            least = SECTOR // min(sizes, default=4)
            total, lanes = numel(e for _, e in grid), columns(rows, min(sizes, default=4))
            while lanes > least and total < lanes * self.target.weights.processors:
                lanes //= 2
            tiles.append(Tile(x[0], lanes, "lanes"))
            again = {a for i in d.seq if isinstance(i, Nest) for a, _ in i.axes}
            few = total <= lanes * self.target.weights.processors
            for a, e in lengths.items():
                n, step = const_of(e), max(1, (4096 if few else self.step_beside(d, a)) // lanes)
                whole = n is not None and pow2(n) * lanes <= limit // 2 and (few or a in again or pow2(n) <= step)
                tiles.append(Tile(a, pow2(n or 1), "row") if whole else Tile(a, step, "steps"))
            return tiles, WARPS if longest * lanes >= 4096 else 4
        wide = pow2(longest)
        lanes = 1
        while lanes * 2 * wide <= ELEMENTS * 2 and rows >= lanes * 4 * self.target.weights.processors:
            lanes *= 2
        shared, far = self.beside_shared(d, x[0]) if x is not None else (False, 0)
        if shared and lanes == 1 and 1 <= far <= 2 and wide <= STEP and rows >= 4 * FOR_ALL * self.target.weights.processors:
            lanes = FOR_ALL // far
        if x is not None and lanes > 1:
            tiles.append(Tile(x[0], lanes, "lanes"))
        for a, e in lengths.items():
            n = const_of(e)
            whole = n is not None and pow2(n) * lanes <= limit and (n <= STEP or pow2(n) <= WASTE * n)
            step = STEP * (4 if rows < 2 * self.target.weights.processors else 2) // lanes  # few programs: more of each at a time
            tiles.append(Tile(a, pow2(n or 1), "row") if whole else Tile(a, min(step, pow2(n or step)), "steps"))
        held = max((t.size for t in tiles if t.how != "lanes"), default=1) * (1 if shared and wide > STEP // 2 else lanes)
        return tiles, 1 if held <= 256 else 2 if held <= 512 else 4 if held <= 2048 else 8 if held <= 8192 else 16

    def beside_shared(self, d: Draft, x: Axis) -> tuple[bool, int]:
        """Is there a Fold that does not vary along `x`, and how many loads of the others do?"""
        folds = [i.value for i in d.seq if isinstance(i, Let) and isinstance(i.value, Fold)]
        apart = [f for f in folds if x in free_axes(f)]
        return len(apart) < len(folds), len({u for f in apart for u in deps.loads_in(*f.update) if x in free_axes(u)})

    def step_beside(self, d: Draft, row: Axis) -> int:
        """Elements of a step along `row` in 8 warps whose states and loads leave registers for four programs at once."""
        folds = {f.picking(0) for f in walk(*d.roots()) if isinstance(f, Fold) and row in f.axes}
        states = sum(max(4, i.dtype.itemsize) for f in folds for i in f.init)
        loads = {x for f in folds for x in walk(*f.update) if isinstance(x, Load) and row in set(walk(x))}
        size = HELD // max(1, states + sum(max(4, x.dtype.itemsize) for x in loads))
        return min(4096, max(1024, pow2(size + 1) // 2))

    def neighbours(self, d: Draft, inner: Mapping[Axis, Expr]) -> tuple[Axis, Expr] | None:
        """The outer axis along which memory is contiguous, where it is so for more elements than along the rows."""
        found = self.accesses(d)
        along = sum(self.weigh(i, inner) for i in found if any(i.stride(a) == 1 for a in inner))
        best = max(d.outer, key=lambda x: sum(self.weigh(i, inner) for i in found if i.stride(x[0]) == 1), default=None)
        if best is None or estimate(best[1]) < 4:
            return None
        return best if sum(self.weigh(i, inner) for i in found if i.stride(best[0]) == 1) > along else None

    def weigh(self, x: Access, lengths: Mapping[Axis, Expr]) -> int:
        """Elements that an access touches for one grid position."""
        return numel(lengths[a] for a in x.axes() if a in lengths)


def may_overlap(loads: Set[Load], axis: Axis, buffers: Mapping[str, Buffer]) -> bool:
    """Could neighbours along `axis` load the same element? Asked before drafts are made of which most would be thrown away: not where all
    places are linear in it, and no two of a buffer are few steps apart."""
    offsets: dict[tuple[str, frozenset[tuple[Expr, Expr]]], tuple[int, set[int]]] = {}
    for x in loads:
        if axis not in free_axes(x):
            continue
        layout = buffers[x.buf].layout
        assert layout is not None
        place = flat(layout, x.index)
        step, offset = const_of(place.terms.get(axis, const(0))), const_of(place.const)
        rest = frozenset((atom, coef) for atom, coef in place.terms.items() if atom is not axis)
        apart = [atom for atom, _ in rest] if x.mask is None else [*(atom for atom, _ in rest), x.mask]
        if not step or offset is None or any(axis in free_axes(e) for e in apart):
            return True
        known = offsets.setdefault((x.buf, rest), (step, set()))
        if known[0] != step:
            return True
        known[1].add(offset)
    return any(p + step * k in there for step, there in offsets.values() for p in there for k in range(1, MOST_NEIGHBOURS))


def neighbours_of(d: Draft, axis: Axis, count: int) -> Draft:
    """`count` neighbours along `axis` in each step of it."""
    outer = [(a, const((const_of(e) or 0) // count) if a is axis else e) for a, e in d.outer]
    made = Draft(outer)
    for k in range(count):
        table: dict[Expr, Expr] = {axis: op("add", op("mul", axis, const(count)), const(k))}
        for item in d.seq:
            for s in item.body if isinstance(item, Nest) else (item,):
                moved = map_statement(s, lambda e: substitute(e, table))  # noqa: B023
                if isinstance(moved, Let):
                    if moved.value is s.value and k:  # type: ignore[union-attr]
                        continue  # the same for all
                    if k:
                        var = Var(f"{moved.var.name}_{k}", moved.var.dtype)
                        table[moved.var] = var
                        moved = Let(var, moved.value)
                    made.seq.append(moved)
                else:
                    made.seq.append(Nest([], [moved]))
    memo: dict[Expr, Expr] = {}
    known = made.extents()
    made.map(lambda e: simplify(e, known, memo))
    return made


def columns(n: int, itemsize: int) -> int:
    """How many of `n` columns beside each other one program takes: a line of memory. Wider tiles leave fewer rows to each program, whose
    threads then add up among themselves for longer than they load."""
    return min(LINE // itemsize, pow2(n))


def replace_axes(f: Fold, axes: Axes) -> Fold:
    """The same Fold, whose order does not matter, over its axes in another order."""
    return Fold(tuple(axes), f.init, f.update, f.combine, f.order, f.pick, f.prefix)


# ---------------------------------------------------------------- order matters


def build_ordered(group: Group, buffers: Mapping[str, Buffer], name: str, target: Target) -> Kernel:
    """Scans, scatters and partial stores. Scans walk their axis one by one; scatters that accumulate are atomic where the device can, else
    axes that do not index the store are walked in order; of several that set one element any may win, as in eager."""
    (s,) = group.members
    atomic = all(t.mode == "set" or buffers[t.buf].dtype in ATOMIC.get(t.mode, ()) for t in s.stores) and not s.scan
    w = Walk.of(s, ordered=not atomic and any(t.mode != "set" for t in s.stores))
    if not atomic:
        w.body = [_read_and_set(b, buffers) if isinstance(b, StoreStmt) else b for b in w.body]
    total = numel(e for _, e in w.free)
    names = itertools.count()
    grid: Axes = []
    tiles: list[Tile] = []
    if w.free:
        free = order_axes(w.free, w.accesses(buffers).items, None)
        x = free[0]
        if len(free) > 1:
            axis = Axis(f"x{next(names)}")
            extent, table = flatten(free, axis)
            known = {**w.extents, axis: extent}
            again: dict[Expr, Expr] = {}

            def flat(e: Expr) -> Expr:
                return simplify(substitute(e, table), known, again)

            w.body = [map_statement(b, flat) for b in w.body]
            w.carry = tuple((v, flat(i), flat(n)) for v, i, n in w.carry)
            w.serial = [(a, flat(e)) for a, e in w.serial]
            x = (axis, extent)
        grid = [x]
        size = ELEMENTS // 4
        while size > 32 and total < size * 2 * target.weights.processors:
            size //= 2
        tiles = [Tile(x[0], min(size, pow2(total)), "lanes")]
    made = finish(name, tuple(grid), const(1), (), w.nest(), buffers, group)
    return replace(made, target=target, tiles=tuple(tiles), launch=(max(1, min(4, tiles[0].size // 64)) if tiles else 1, 2))


def _read_and_set(t: StoreStmt, buffers: Mapping[str, Buffer]) -> StoreStmt:
    """A store that accumulates, as one that reads what is there and sets."""
    if t.mode == "set":
        return t
    old = Load(t.buf, buffers[t.buf].dtype, t.index)
    return replace(t, value=op(OF_BOOLS[t.mode] if old.dtype is dt.bool_ else t.mode, old, t.value), mode="set")


# ---------------------------------------------------------------- sums


def _summand(f: Fold) -> Expr | None:
    """What `f` adds up, if it is a sum in any order that begins with 0."""
    if len(f.init) != 1 or not is_block_fold(f) or not isinstance(f.init[0], Const) or f.init[0].value != 0:
        return None
    update, combine, state = f.update[0], f.combine[0], f.state(0)
    if not (isinstance(update, Op) and update.name == "add" and isinstance(combine, Op) and combine.name == "add"):
        return None
    rest = [x for x in update.args if x is not state]
    return rest[0] if len(rest) == 1 and state not in set(walk(rest[0])) else None


def _sum(f: Fold, axes: Axes, term: Expr) -> Fold:
    """The sum of `term` over `axes`, in its dtype."""
    a, b = (Var(f"{f.prefix}{side}0", term.dtype) for side in "ab")
    return Fold(tuple(axes), (Const(term.dtype, 0),), (op("add", a, term),), (op("add", a, b),), "any", 0, f.prefix)


def plain_sum(f: Fold) -> Expr:
    """Sums that were written wider, or in two steps, because one long chain of additions loses bits: blocks add up in many short ones.

    sum over i of f64(t32) -> f64(sum over i of t32);    sum over i of (sum over j of t) -> sum over i, j of t
    """
    term = _summand(f)
    if term is None:
        return f
    if f.init[0].dtype is dt.f64 and isinstance(term, Cast) and term.arg.dtype in (dt.f32, dt.f16, dt.bf16):
        narrow = _sum(f, list(zip(f.axes, f.extents, strict=True)), convert(term.arg, dt.f32))
        return convert(plain_sum(narrow), dt.f64)
    inner = term if isinstance(term, Fold) else None
    nested = _summand(inner) if inner is not None else None
    if inner is None or nested is None or any(free_axes(e) & set(f.axes) for e in inner.extents):
        return f
    axes = [*zip(f.axes, f.extents, strict=True), *zip(inner.axes, inner.extents, strict=True)]
    return _sum(f, axes, nested) if len({a for a, _ in axes}) == len(axes) else f


def plain_sums(program: Program) -> Program:
    memo: dict[Expr, Expr] = {}

    def go(e: Expr) -> Expr:
        return map_folds(e, plain_sum, memo)

    def visit(e: Element) -> Element:
        if isinstance(e, Cond):
            return replace(e, then=tuple(map(visit, e.then)), orelse=tuple(map(visit, e.orelse)))
        if isinstance(e, Repeat):
            return replace(e, body=tuple(map(visit, e.body)))
        if not isinstance(e, Stage):
            return e
        stores = tuple(replace(t, value=go(t.value), index=tuple(map(go, t.index))) for t in e.stores)
        lets, carry = tuple((v, go(x)) for v, x in e.lets), tuple((v, go(x)) for v, x in e.carry)
        return replace(e, stores=stores, lets=lets, carry=carry, carry_next=tuple(map(go, e.carry_next)))

    return replace(program, body=tuple(map(visit, program.body)))


# ---------------------------------------------------------------- few results of much


def split_long(program: Program, target: Target) -> tuple[Program, dict[str, Buffer]]:
    """Reductions with too few results to keep the device busy run in two steps, on the top level of the body. Out: the layouts too.

    y = f(Fold over k < n of u)    becomes    p[c] = Fold over k < s of u at c * s + k, while that is below n;    y = f(Fold over c of p[c])
    """
    buffers, lying = dict(program.buffers), choose_layouts(program)
    body: list[Element] = []
    for e in program.body:
        body.extend(_split_stage(e, buffers, lying, target) if isinstance(e, Stage) else (e,))
    if len(body) == len(program.body):
        return program, lying
    program = replace(program, body=tuple(body), buffers=buffers)
    return program, choose_layouts(program)


def _split_stage(s: Stage, buffers: dict[str, Buffer], lying: Mapping[str, Buffer], target: Target) -> list[Stage]:
    """`lying`: the buffers with the layouts that they will probably have."""
    if s.scan or s.lets or any(t.mode != "set" or simple_axes(s, t) is None for t in s.stores):
        return [s]
    folds = {f.picking(0) for f in walk(*(t.value for t in s.stores)) if isinstance(f, Fold)}
    folds -= {g.picking(0) for f in folds for u in f.update for g in walk(u) if isinstance(g, Fold)}
    f = max(folds, key=lambda g: numel(g.extents), default=None)
    if f is None or any(numel(g.extents) >= min(numel(f.extents), target.weights.registers) for g in folds - {f}):
        return [s]
    if not is_block_fold(f) or any(const_of(e) is None for e in f.extents):
        return [s]
    if any(isinstance(g, Fold) for g in walk(*f.update)):
        return [s]
    trips, results = numel(f.extents), numel(e for _, e in s.axes)
    product = product_in(s, buffers)
    if product is not None:
        parts = parts_of_sum(product, target)
        size = _whole_parts(trips, -(-trips // (parts * 64)) * 64, 64, lambda count: 0)  # a part with a mask is no product of tiles
        if parts < 2 or trips <= size:
            return [s]
        found = collect([], [StoreStmt(t.buf, t.index, t.value) for t in s.stores], lying).items
        inner = order_axes(list(zip(f.axes, f.extents, strict=True)), found, None)
        outer = order_axes(list(s.axes), [i for i in found if i.store], None)  # parts lie as the result
        return _in_parts(replace(s, axes=tuple(outer)), f, buffers, trips, size, -(-trips // size), inner)
    beside = contiguous_axis(s, f, lying)
    width = 0 if beside is None else estimate(beside[1])
    itemsize = min((x.dtype.itemsize for x in walk(*f.update) if isinstance(x, Load)), default=4)
    programs = results // width * -(-width // columns(width, itemsize)) if width else results
    each = trips * results // max(1, programs)
    processors = target.weights.processors
    if programs >= (2 if width else 1) * processors or each < 32 * STEP or trips < 128:  # programs of columns are narrow
        return [s]
    least = 2 * STEP if beside is None else 32  # whole steps of walk_rows, which need no mask
    size = max(least, -(-trips * programs // (PROGRAMS * processors)))
    size = _whole_parts(trips, -(-size // least) * least, least, lambda count: -count * programs % processors / (count * programs))
    count = -(-trips // size)
    return [s] if count < 2 else _in_parts(s, f, buffers, trips, size, count)


def _whole_parts(trips: int, size: int, least: int, idle: Callable[[int], float]) -> int:
    """A multiple of `least` near `size` that divides `trips`, so that no part needs a mask; else `size`. idle: what share of the device the
    last of so many parts leave idle."""
    near = [n for n in range(least, 2 * size + 1, least) if 2 * n >= size and trips % n == 0]
    return min(near, key=lambda n: (round(4 * idle(trips // n)), max(n, size) / min(n, size)), default=size)


def _in_parts(
    s: Stage, f: Fold, buffers: dict[str, Buffer], trips: int, size: int, count: int, order: Axes | None = None
) -> list[Stage]:
    """`count` parts of `size` steps of the Fold's axes in this order."""
    chunk, part, whole = Axis("chunk"), Axis("part"), Axis("whole")
    _, table = flatten(order or list(zip(f.axes, f.extents, strict=True)), whole)
    at = op("add", op("mul", chunk, const(size)), part)
    inside = op("lt", at, const(trips))
    known = {**dict(s.axes), chunk: const(count), part: const(size)}

    def placed(u: Expr, state: Expr) -> Expr:
        u = substitute(u, table)
        u = substitute(u, {whole: at})
        if count * size != trips:  # loads elsewhere than along the parts are in range in every one
            u = select(inside, guard(u, inside, frozenset((chunk, part))), state)
        return simplify(u, known)

    updates = tuple(placed(u, f.state(i)) for i, u in enumerate(f.update))
    return in_two_steps(s, f, buffers, ((chunk, const(count)),), ((part, const(size)),), updates)


# ---------------------------------------------------------------- the pass


def block_kernel(group: Group, buffers: Mapping[str, Buffer], own: set[str], target: Target) -> Kernel:
    """One group, one kernel."""
    name = "_".join(dict.fromkeys(w for s in group.stages for w in (s.origin or "stage").split(",")))[:80]
    if group.closed and any(is_ordered(m) for m in group.members):
        return build_ordered(group, buffers, name, target)
    return Builder(group, buffers, own, target).kernel(name)


def block_copy(name: str, src: Buffer, dst: Buffer, target: Target) -> Kernel:
    """`dst[i...] = src[i...]`, each of which may lie in another buffer's memory."""
    src, dst = (replace(b, storage_of=None) for b in (src, dst))
    axes = tuple(Axis(f"c{k}") for k in range(len(dst.shape)))
    stage = Stage(tuple(zip(axes, dst.shape, strict=True)), (Store(dst.name, axes, Load(src.name, src.dtype, axes)),), origin=name)
    buffers = {src.name: src, dst.name: dst}
    group = BlockGrouper(buffers, Options(), target).single(stage)
    return block_kernel(group, buffers, set(), target)


def form_blocks(program: Program, options: Options, decided: Decisions = NOTHING, ready: Ready = nobody) -> Scheduled:
    """Group stages into kernels. `ready` is told of those that are not joined with others once they are formed, but of those that use
    what is written back: a plan has them write in place."""
    target = program.target
    written = frozenset(source for _, source in program.write_backs)
    program, buffers = split_long(near_sums(plain_sums(rematerialize(program))), target)
    ranges = tuple((s.sym, s.lo, s.hi) for s in program.symbols if s.sym.dtype is dt.index)

    def kernels_of(group: Group, own: Own, nested: bool) -> tuple[Kernel, ...]:
        made = block_kernel(group, buffers, own(), target)
        made = replace(made, ranges=tuple(r for r in ranges if r[0] in made.syms))
        if not is_small(made):
            say(made)
        return (made,)

    def say(kernel: Kernel) -> None:
        if written.isdisjoint(p.buf for p in kernel.params):
            ready(kernel)

    def grouped(body: Sequence[Element], nested: bool) -> list[Group | Element]:
        return BlockGrouper(buffers, options, target).grouped(tuple(body))

    made = formed(program, buffers, grouped, kernels_of, lambda c: on_device(c, buffers, target))
    made = join_kernels(made, deps.lasting(program))
    for element in made.body:
        if isinstance(element, Kernel) and is_small(element):
            say(element)
    return made


ASKED_THERE = frozenset({"IndexError", "RangeError"})  # kinds of Checks


def on_device(check: Check, buffers: Mapping[str, Buffer], target: Target) -> Check | Kernel:
    """A Check of values that eager's kernels ask about is asked on the device, in the order of its work, and stops it where they are wrong,
    as those do: the host waits for nothing. Conditions that eager asks on the host stay there."""
    loads = [e for e in walk(check.cond) if isinstance(e, Load)]
    if check.kind not in ASKED_THERE or not loads or any(buffers[x.buf].device != target.device for x in loads):
        return check
    body = (Require(check.cond, check.message),)
    made = finish("require", (), const(1), (), body, buffers, Group([], ()))
    return replace(made, target=target, launch=(1, 1), origins=(f"check {check.loc}".strip(),))

