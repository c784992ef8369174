"""Split loop axes that are only used in pieces, so that divisions leave the loop body: Stage in, Stage out.

    for k < 12: x[k // 4, k % 4]      ->      for k0 < 3: for k1 < 4: x[k0, k1]

A reshape between a product and what it reads leaves such indices (flattened channels, merged heads); split, they are affine again.
`ragged`: a result's axis that its divisor does not divide is split as well, into more than there is, and stored where it was:

    for y < 10: out[y] = f(x[y // 3, y % 3])      ->      for q < 4: for r < 3: out[q * 3 + r] = f(x[q, r]) if q * 3 + r < 10
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace

from ...ir.bounds import Ranges, simplify_index
from ...ir.expr import Axis, Const, Expr, Fold, Load, Op, const, op, substitute, walk
from ...ir.linear import conjuncts, const_of, is_invariant
from ...ir.program import Stage, point_number

Axes = tuple[tuple[Axis, Expr], ...]


def split_axes(stage: Stage, ragged: bool = False) -> Stage:
    """Split the axes of `stage` and of the Folds in it wherever what divides them divides their extents too, by form."""
    if stage.scan or stage.lets or len(stage.stores) != 1:
        return stage
    store = stage.stores[0]
    indices = [i for e in walk(store.value) if isinstance(e, Load) for i in e.index]
    if not any(isinstance(e, Op) and e.name in ("floordiv", "mod") for e in walk(*indices)):
        return stage
    folds = [e for e in walk(store.value) if isinstance(e, Fold)]
    every = (*stage.axes, *(x for f in folds for x in zip(f.axes, f.extents, strict=True)))
    whole = Ranges(extents=dict(every), sizes=True)
    divided = _divisors([simplify_index(i, whole) for i in indices])
    pieces: dict[Axis, Axes] = {}
    tests: dict[Expr, Axes] = {}  # of ragged splits: the condition, and the pieces it is about
    for axis, extent in every:
        cuts = divided.get(axis, ())
        parts = _pieces(axis, extent, cuts)
        if not parts and ragged and (axis, extent) in stage.axes and store.mask is None and store.mode == "set":
            parts = _ragged(axis, extent, list(cuts))
            if parts:
                tests[op("lt", point_number(parts), extent)] = parts
        if parts:
            pieces[axis] = parts
    if not pieces:
        return stage
    axes = _split(stage.axes, pieces)
    every = (*axes, *(x for f in folds for x in _split(tuple(zip(f.axes, f.extents, strict=True)), pieces)))
    ranges = Ranges(extents=dict(every), sizes=True)
    table: dict[Expr, Expr] = {axis: point_number(parts) for axis, parts in pieces.items()}

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
                made = node.rebuild(tuple(memo[a] for a in node.args)) if node.args else node
                memo[node] = _kept_inside(made, tests) if isinstance(made, Load) else made
                if isinstance(memo[node], Op) and memo[node].dtype.kind == "index":
                    memo[node] = simplify_index(memo[node], ranges)
        return memo[e]

    index = tuple(simplify_index(substitute(i, table), ranges) for i in store.index)
    mask = functools.reduce(lambda x, y: op("and", x, y), tests) if tests else store.mask
    return replace(stage, axes=axes, stores=(replace(store, index=index, value=rebuild(store.value), mask=mask),))


def _divisors(indices: list[Expr]) -> dict[Axis, dict[Expr, None]]:
    """Axis -> where indices cut it: 4 for k // 4 and k % 4, 4 and 12 for (k // 4) % 3."""
    found: dict[Axis, dict[Expr, None]] = {}

    def cut(e: Expr) -> tuple[Axis, Expr] | None:
        """e as axis // step."""
        if isinstance(e, Axis):
            return e, const(1)
        return divide(e) if isinstance(e, Op) and e.name == "floordiv" else None

    def divide(e: Op) -> tuple[Axis, Expr] | None:
        inner = cut(e.args[0])
        if inner is None or not is_invariant(e.args[1]):
            return None
        at = op("mul", inner[1], e.args[1])
        found.setdefault(inner[0], {})[at] = None
        return inner[0], at

    for e in walk(*indices):
        if isinstance(e, Op) and e.name in ("floordiv", "mod"):
            divide(e)
    return found


def _pieces(axis: Axis, extent: Expr, divisors: Iterable[Expr]) -> Axes:
    """axis < 12 cut at {4}  ->  (axis_0 < 3, axis_1 < 4); () where a cut does not divide evenly."""
    n = const_of(extent)
    cuts = [d for d in divisors if d is not const(1) and d is not extent and (n is None or const_of(d) is None or (const_of(d) or 0) < n)]
    if not cuts:
        return ()
    # what divides most of the others comes first
    ordered = sorted(cuts, key=lambda d: -sum(_quotient(other, d) is not None for other in cuts))
    sizes = [_quotient(b, a) for a, b in itertools.pairwise([const(1), *ordered, extent])]
    if None in sizes:
        return ()
    return tuple((Axis(f"{axis.name}_{j}"), n) for j, n in enumerate(reversed(sizes)) if n is not None)


def _ragged(axis: Axis, extent: Expr, cuts: list[Expr]) -> Axes:
    """axis < 10 cut at {3}  ->  (axis_0 < 4, axis_1 < 3); () unless both are numbers."""
    n, step = const_of(extent), const_of(cuts[0]) if len(cuts) == 1 else None
    if n is None or step is None or not 1 < step <= n:
        return ()
    return (Axis(f"{axis.name}_0"), const(-(-n // step))), (Axis(f"{axis.name}_1"), const(step))


def _kept_inside(load: Load, tests: dict[Expr, Axes]) -> Load:
    """`load` only where the `tests` hold that it needs: one piece alone takes no value that it did not take before, and what is asked
    whether it lies inside may be anything."""
    asked = {(t.name, t.args[0]) for t in conjuncts(load.mask) if isinstance(t, Op)}
    for test, parts in tests.items():
        pieces = {x for x, _ in parts}
        both = [i for i in load.index if pieces <= set(walk(i))]
        if any(("ge", i) not in asked or ("lt", i) not in asked for i in both):
            mask = test if load.mask is None else op("and", load.mask, test)
            load = Load(load.buf, load.dtype, load.index, mask, Const(load.dtype, 0) if load.other is None else load.other)
    return load


def _quotient(a: Expr, b: Expr) -> Expr | None:
    """a / b where that is exact by form."""
    q = op("floordiv", a, b)
    return q if op("mul", q, b) is a else None


def _split(axes: Axes, pieces: dict[Axis, Axes]) -> Axes:
    return tuple(part for axis, extent in axes for part in pieces.get(axis, ((axis, extent),)))
