"""One Group -> one Kernel: statements, folds hoisted and shared, axes split, merged and ordered, the vector axis, scratch, grid.

In: a Group, buffers with layouts, which buffers the kernel may keep to itself. Out: a Kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

from ...ir.expr import Axis, Expr, Fold, Load, const, op, substitute, walk
from ...ir.kernel import Kernel, Let, Loop, Scratch, Stmt, StoreStmt, expressions, statements, values_first
from ...ir.linear import const_of
from ...ir.program import Buffer
from ..access import collect, map_folds, simplify
from ..deps import Work, estimate, free_axes, grain, numel, operations, parameters, repeated, together
from ..fusion.fuse import work_of
from ..fusion.group import Group
from .axes import block_size, choose_outer_vector, collapse, cut_axes, is_column, order_axes, split_axes, vector_cost
from .draft import Draft, Drafter, Nest, drop_unread, exprs_of, map_statement
from .folds import dedupe, merge_folds, share_rows, tidy_fold
from .rows import TILE_U, TILE_V, column_loops, tile_partner, transposing_tile

THREAD = 1 << 17  # element operations worth a thread: some 10 us, against 2 us to wake one
SCRATCH_BYTES = 1 << 16


def build(group: Group, buffers: Mapping[str, Buffer], own: set[str], name: str) -> Kernel:
    """The whole way. `own`: buffers that only this group writes and reads."""
    names = itertools.count()
    d = Drafter(group, buffers, own).run()
    drop_unread(d, own)
    memo: dict[Expr, Expr] = {}
    known = d.extents()
    d.map(lambda e: simplify(e, known, memo))
    split_axes(d, names)
    collapse(d, buffers, names)
    cut_axes(d, names)
    fold_memo: dict[Expr, Expr] = {}
    d.map(lambda e: map_folds(e, lambda f: tidy_fold(f, buffers), fold_memo))
    d.seq = merge_folds(dedupe(d.seq))
    buffers, own = share_rows(d, buffers, own)
    nests = any(isinstance(i, Nest) and i.axes for i in d.seq)
    vector = None if nests else choose_outer_vector(d, buffers)
    stores = [s for s in d.statements() if isinstance(s, StoreStmt)]
    found = collect([e for s in d.statements() if isinstance(s, Let) for e in exprs_of(s)], stores, buffers)
    work = together(_work_of(item) for item in d.seq)
    grid = order_axes(d.outer, found.items, vector)
    scratch: list[Scratch] = []
    body: list[Stmt] = []
    if vector is not None:
        axis, extent = grid.pop()
        inner: tuple[Stmt, ...] = tuple(y for s in d.seq for y in ((s,) if isinstance(s, Let) else s.body))
        column = is_column(d, found.items, axis)
        block = block_size(extent, numel(e for _, e in grid), operations(work), column)
        folded = any(isinstance(x, Fold) for x in walk(*d.roots()))
        partner = None if folded else tile_partner(grid, axis, found)
        if partner is not None:
            far = {x: _steps_far(x, axis, buffers) for s in inner for x in walk(*exprs_of(s)) if isinstance(x, Load)}  # type: ignore[arg-type]
            u = next(x for x in grid if x[0] is partner)
            tiles, tiled = transposing_tile(inner, u, (axis, extent), far, names, scratch)  # type: ignore[arg-type]
            grid = [x for x in grid if x[0] is not partner] + tiles
            body = list(tiled)
            work = repeated(work, (const(TILE_U * TILE_V),))
        elif block is not None:
            part, lane = Axis("vb"), Axis("vl")
            at = op("add", op("mul", part, const(block)), lane)
            inner = tuple(map_statement(s, lambda e: substitute(e, {axis: at})) for s in inner)  # type: ignore[arg-type]
            n = const_of(extent)
            exact = n is not None and n % block == 0
            count = op("floordiv", op("add", extent, const(block - 1)), const(block))
            grid.append((part, const((n or 0) // block) if exact else count))
            rest = op("sub", extent, op("mul", part, const(block)))
            length = const(block) if exact else op("min", const(block), rest)
            turned = column_loops(inner, lane, length, block, scratch) if column else None  # type: ignore[arg-type]
            body = list(turned or (Loop(lane, length, "vector", inner),))
            work = repeated(work, (const(block),))
        else:
            width = const_of(extent)
            turned = column_loops(inner, axis, extent, width, scratch) if column and width is not None else None  # type: ignore[arg-type]
            body = list(turned or (Loop(axis, extent, "vector", inner),))
            work = repeated(work, (extent,))
    else:
        keep = _scratch(d, own, buffers, scratch)
        for item in d.seq:
            if isinstance(item, Let):
                body.append(keep(item))  # type: ignore[arg-type]
            else:
                body.extend(_nest_loops(item, buffers, keep))
    return finish(name, tuple(grid), grain(THREAD, work), tuple(scratch), tuple(body), buffers, group)


def _work_of(item: Let | Nest) -> Work:
    if isinstance(item, Let):
        return together(({(): 1}, work_of(item.value)))
    return repeated(together(({(): len(item.body)}, *(work_of(s.value) for s in item.body))), (e for _, e in item.axes))


def _steps_far(x: Load, axis: Axis, buffers: Mapping[str, Buffer]) -> bool:
    if x.mask is not None:
        return False
    for a in collect([x], [], buffers).items:
        if a.buf == x.buf:
            step = a.stride(axis)
            return step is not None and abs(step) >= 16
    return False


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
        s = map_statement(s, go)
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
    # lanes whose inner loops run differently often are no lanes
    uneven = {x for s in nest.body for f in walk(s.value) if isinstance(f, Fold) for x in walk(*f.extents) if isinstance(x, Axis)}
    even = [a for a, _ in nest.axes if a not in uneven]
    best = min(even, key=lambda a: vector_cost(found.items, extents, a, lambda x: 3.0 if x.store else 1.0), default=None)
    for axis, extent in reversed(order_axes(nest.axes, found.items, best)):
        body = (Loop(axis, extent, "vector" if axis is best else "serial", body),)
    return list(body)


def finish(
    name: str, grid: tuple[tuple[Axis, Expr], ...], grain: Expr, scratch: tuple[Scratch, ...], body: tuple[Stmt, ...],
    buffers: Mapping[str, Buffer], group: Group,
) -> Kernel:
    """Parameters, symbols, origins."""
    roots = [*(e for s in body for e in expressions(s)), *(e for _, e in grid)]
    nodes = list(walk(*roots))
    stack = {s.name for s in scratch}
    stored = [s.buf for s in statements(body) if isinstance(s, StoreStmt)]
    order = dict.fromkeys([*stored, *(n.buf for n in nodes if isinstance(n, Load))])
    params, syms = parameters([n for n in order if n not in stack], buffers, stored, nodes)
    origins = tuple(dict.fromkeys(s.place for s in group.stages))
    return Kernel(name, params, values_first(syms), grid, grain, scratch, body, origins=origins)
