"""Split loop axes that are only used in pieces, so that divisions leave the loop body: Stage in, Stage out.

    for k < 12: x[k // 4, k % 4]      ->      for k0 < 3: for k1 < 4: x[k0, k1]

A reshape between a product and what it reads leaves such indices (flattened channels, merged heads); split, they are affine again.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..ir.expr import Axis, Expr, Fold, Load, Op, const, substitute, walk
from ..ir.linear import const_of, simplify_index
from ..ir.program import Stage

Axes = tuple[tuple[Axis, Expr], ...]


def split_axes(stage: Stage) -> Stage:
    """Split the axes of `stage` and of the Folds in it wherever constants divide them evenly."""
    if stage.scan or stage.lets or len(stage.stores) != 1:
        return stage
    store = stage.stores[0]
    loads = [e for e in walk(store.value) if isinstance(e, Load)]
    divided = _divisors(loads)
    if not divided:
        return stage
    pieces: dict[Axis, Axes] = {}
    folds = [e for e in walk(store.value) if isinstance(e, Fold)]
    for axis, extent in (*stage.axes, *(x for f in folds for x in zip(f.axes, f.extents, strict=True))):
        parts = _pieces(axis, const_of(extent), divided.get(axis, set()))
        if parts:
            pieces[axis] = parts
    if not pieces:
        return stage
    axes = _split(stage.axes, pieces)
    extents = dict(axes) | {a: e for f in folds for a, e in _split(tuple(zip(f.axes, f.extents, strict=True)), pieces)}
    table: dict[Expr, Expr] = {axis: _join(parts) for axis, parts in pieces.items()}

    def rebuild(e: Expr) -> Expr:
        """The value over the pieces: Folds get their new axes, indices lose their divisions."""
        memo: dict[Expr, Expr] = {}
        for node in walk(e):
            if isinstance(node, Fold):
                k = len(node.axes)
                args = [memo[a] for a in node.args[k:]]
                n = len(node.init)
                fold_axes = _split(tuple(zip(node.axes, node.extents, strict=True)), pieces)
                init, update, combine = tuple(args[:n]), tuple(args[n : 2 * n]), tuple(args[2 * n :])
                memo[node] = Fold(fold_axes, init, update, combine, node.order, node.pick, node.prefix)
            elif node in table:
                memo[node] = table[node]
            else:
                memo[node] = node.rebuild(tuple(memo[a] for a in node.args)) if node.args else node
                if isinstance(memo[node], Op) and memo[node].dtype.kind == "index":
                    memo[node] = simplify_index(memo[node], extents)
        return memo[e]

    index = tuple(simplify_index(substitute(i, table), extents) for i in store.index)
    return replace(stage, axes=axes, stores=(replace(store, index=index, value=rebuild(store.value)),))


def _divisors(loads: list[Load]) -> dict[Axis, set[int]]:
    """Axis -> where indices cut it: 4 for k // 4 and k % 4, 4 and 12 for (k // 4) % 3."""
    found: dict[Axis, set[int]] = {}

    def cut(e: Expr) -> tuple[Axis, int] | None:
        """e as axis // step."""
        if isinstance(e, Axis):
            return e, 1
        if isinstance(e, Op) and e.name == "floordiv":
            inner, c = cut(e.args[0]), const_of(e.args[1])
            if inner is not None and c is not None:
                found.setdefault(inner[0], set()).add(inner[1] * c)
                return inner[0], inner[1] * c
        return None

    for load in loads:
        for e in walk(*load.index):
            if isinstance(e, Op) and e.name in ("floordiv", "mod"):
                inner, c = cut(e.args[0]), const_of(e.args[1])
                if inner is not None and c is not None:
                    found.setdefault(inner[0], set()).add(inner[1] * c)
    return found


def _pieces(axis: Axis, extent: int | None, divisors: set[int]) -> Axes:
    """axis < 12 cut at {4}  ->  (axis_0 < 3, axis_1 < 4); () where a cut does not divide evenly."""
    cuts = [1, *sorted(d for d in divisors if extent is not None and 1 < d < extent)]
    if extent is None or len(cuts) == 1:
        return ()
    bounds = [*cuts, extent]
    if any(b % a for a, b in itertools.pairwise(bounds)):
        return ()
    sizes = [b // a for a, b in itertools.pairwise(bounds)]
    return tuple((Axis(f"{axis.name}_{j}"), const(n)) for j, n in enumerate(reversed(sizes)))


def _split(axes: Axes, pieces: dict[Axis, Axes]) -> Axes:
    return tuple(part for axis, extent in axes for part in pieces.get(axis, ((axis, extent),)))


def _join(parts: Axes) -> Expr:
    """axis_0 * 4 + axis_1"""
    total: Expr = const(0)
    for axis, extent in parts:
        total = total * extent + axis
    return total
