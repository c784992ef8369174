"""Reductions with too few results to keep threads busy run in two steps: partial states in parallel, then their combination.

In: a Program. Out: a Program with such Stages split.

    y = f(Fold_k u)        becomes        p[c] = Fold_(k in chunk c) u;   y = f(Fold_c combine(a, p[c]))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...ir.expr import Axis, Expr, Fold, Load, const, op, substitute, walk
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Element, Program, Stage, Store
from ..deps import estimate, free_axes, numel
from ..templates.table import recognised
from .fuse import simple_axes

WORK = 1 << 17  # fold iterations below which one thread does it all
ENOUGH = 8  # results that are parallel enough
CHUNKS = 32


def split_reductions(program: Program) -> Program:
    """The whole pass, on the top level of the body."""
    buffers = dict(program.buffers)
    body: list[Element] = []
    for e in program.body:
        if isinstance(e, Stage):
            body.extend(split_stage(e, buffers))
        else:
            body.append(e)
    return program if len(body) == len(program.body) else replace(program, body=tuple(body), buffers=buffers)


def split_stage(s: Stage, buffers: dict[str, Buffer]) -> list[Stage]:
    if s.scan or s.lets or len(s.stores) != 1 or s.stores[0].mode != "set":
        return [s]
    if simple_axes(s, s.stores[0]) is None or recognised(s) is not None:
        return [s]
    folds = {f.picking(0) for f in walk(s.stores[0].value) if isinstance(f, Fold)}
    folds -= {g.picking(0) for f in folds for u in f.update for g in walk(u) if isinstance(g, Fold)}
    if len(folds) != 1:
        return [s]
    (f,) = folds
    if f.order != "any" or not f.combine:
        return [s]
    nested = {g.picking(0) for u in f.update for g in walk(u) if isinstance(g, Fold)}
    if any(not free_axes(g) & set(f.axes) for g in nested):
        return [s]  # every part would compute it anew
    trips = numel(e for g in (f, *nested) for e in g.extents)
    parallel = numel(e for _, e in s.axes)
    column = contiguous_axis(s, f, buffers)
    if column is not None:
        parallel //= max(1, estimate(column[1]))
    if trips * numel(e for _, e in s.axes) < WORK or parallel >= ENOUGH or trips < 256:
        return [s]
    return _split(s, f, buffers)


def contiguous_axis(s: Stage, f: Fold, buffers: Mapping[str, Buffer]) -> tuple[Axis, Expr] | None:
    """The stage axis along which the folded loads lie contiguous, if it is one (and not a fold axis)."""
    for x in walk(*f.update):
        if isinstance(x, Load) and set(f.axes) & set(walk(x)):
            layout = buffers[x.buf].layout
            strides = layout.strides if layout is not None else None
            for d, i in enumerate(x.index):
                unit = const_of(strides[d]) == 1 if strides is not None else d == len(x.index) - 1
                if unit:
                    terms = linear(i).terms
                    for a, e in s.axes:
                        if const_of(terms.get(a, const(0))) == 1:
                            return a, e
    return None


def _split(s: Stage, f: Fold, buffers: dict[str, Buffer]) -> list[Stage]:
    axes = list(zip(f.axes, f.extents, strict=True))
    first, n = axes[0][0], const_of(axes[0][1])
    chunk, part = Axis("chunk"), Axis("part")
    if n is not None and n >= CHUNKS:
        count = next((c for c in range(CHUNKS, 4 * CHUNKS) if n % c == 0), CHUNKS)
        size = -(-n // count)
        count = -(-n // size)
        extent: Expr = const(size) if count * size == n else op("min", const(size), op("sub", const(n), op("mul", chunk, const(size))))
        chunks: list[tuple[Axis, Expr]] = [(chunk, const(count))]
        table: dict[Expr, Expr] = {first: op("add", op("mul", chunk, const(size)), part)}
        rest = [(part, extent), *axes[1:]]
    else:
        chunks, total = [], 1
        while len(axes) > 1 and total < ENOUGH:
            chunks.append(axes.pop(0))
            total *= estimate(chunks[-1][1])
        table, rest = {}, axes
        if not chunks:
            return [s]
    return in_two_steps(s, f, buffers, chunks, rest, tuple(substitute(u, table) for u in f.update))


def in_two_steps(
    s: Stage, f: Fold, buffers: dict[str, Buffer], chunks: Iterable[tuple[Axis, Expr]], rest: Iterable[tuple[Axis, Expr]],
    update: tuple[Expr, ...],
) -> list[Stage]:  # fmt: skip
    """`s` as a Stage that folds each of `chunks` over `rest` by itself, and one that combines their results."""
    partial = Fold(tuple(rest), f.init, update, f.combine, f.order, 0, f.prefix)
    chunks = tuple(chunks)
    outer = (*chunks, *s.axes)
    index, shape = tuple(a for a, _ in outer), tuple(e for _, e in outer)
    names = [f"{s.stores[0].buf}_part{k}" for k in range(len(f.init))]
    for k, name in enumerate(names):
        buffers[name] = Buffer(name, f.init[k].dtype, shape, None, "temp", None, s.loc, buffers[s.stores[0].buf].device)
    one = Stage(outer, tuple(Store(n, index, partial.picking(k)) for k, n in enumerate(names)), loc=s.loc, origin=s.origin)
    loads: dict[Expr, Expr] = {f.state(k, "b"): Load(n, f.init[k].dtype, index) for k, n in enumerate(names)}
    final = Fold(chunks, f.init, tuple(substitute(c, loads) for c in f.combine), f.combine, f.order, 0, f.prefix)
    whole: dict[Expr, Expr] = {f.picking(k): final.picking(k) for k in range(len(f.init))}
    return [one, replace(s, stores=tuple(replace(t, value=substitute(t.value, whole)) for t in s.stores))]
