"""The Folds of a Draft: axes in order and merged, equal ones once, neighbours in one loop, rows that a Fold and a later loop share.

In: a Draft, or its sequence. Out: the same with fewer, tidier Folds.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.expr import Axis, Expr, Fold, Load, Var, const, op, substitute, walk
from ...ir.kernel import Let, StoreStmt
from ...ir.program import Buffer
from .. import deps
from ..access import Access, chains, collect, merge_table, simplify
from ..deps import estimate
from .draft import Draft, Nest, exprs_of, map_statement
from .rows import find_shared, row_walk, shared_row


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
    """Lets of Folds over equal axes run as one loop with several states: a Fold goes up to the last such loop that it can go to, past lets
    that it does not use and stores that it does not read."""
    runs: list[list[Let] | Let | Nest] = []
    for item in seq:
        if not (isinstance(item, Let) and isinstance(item.value, Fold) and item.value.order == "any" and item.value.combine):
            runs.append(item)
            continue
        run = _open_run(runs, item.value)
        if run is None:
            runs.append([item])
        else:
            run.append(item)
    out: list[Let | Nest] = []
    for r in runs:
        if not isinstance(r, list):
            out.append(r)
            continue
        folds = [let.value for let in r if isinstance(let.value, Fold)]
        if len({f.picking(0) for f in folds}) > 1:
            joint, at = _joint(folds)
            out += [Let(let.var, joint.picking(at[f.picking(0)] + f.pick)) for let, f in zip(r, folds, strict=True)]
        else:
            out += r
    return out


def _open_run(runs: list[list[Let] | Let | Nest], f: Fold) -> list[Let] | None:
    """The last loop over the axes of `f` with which `f` can run."""
    used = {x for x in walk(f) if isinstance(x, Var)}
    read = {x.buf for x in walk(f) if isinstance(x, Load)}
    for r in reversed(runs):
        if isinstance(r, Nest):
            if read & {s.buf for s in r.body if isinstance(s, StoreStmt)}:
                return None
            continue
        lets = r if isinstance(r, list) else [r]
        if used & {let.var for let in lets}:
            return None
        g = lets[0].value
        if isinstance(r, list) and isinstance(g, Fold) and (g.axes, g.extents, g.prefix) == (f.axes, f.extents, f.prefix):
            return r
    return None


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


def dedupe(seq: list[Let | Nest]) -> list[Let | Nest]:
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
            out.append(Nest(item.axes, [map_statement(s, lambda e: substitute(e, table)) for s in item.body]) if table else item)
    return out


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
            e = find_shared(f, point, [x for s in nest.body for x in exprs_of(s)], axis)
            row = shared_row(e, extent, f"own_row{len(rows)}") if e is not None else None
            if e is None or row is None:
                continue
            rows[row.name] = row
            table: dict[Expr, Expr] = {substitute(e, {point: axis}): Load(row.name, row.dtype, (axis,))}
            nest.body = [map_statement(s, lambda x, t=table: substitute(x, t)) for s in nest.body]  # type: ignore[misc]
            fill = Nest([(axis, extent)], [StoreStmt(row.name, (axis,), substitute(e, {point: axis}))])
            used: dict[Expr, Expr] = {e: Load(row.name, row.dtype, (point,))}
            d.seq[k - 1 : k] = [fill, Let(item.var, substitute(item.value, used))]
            k += 1
            break
    return (buffers, own) if not rows else ({**buffers, **rows}, own | set(rows))
