"""What stands before and behind sums along a row, inside of them: Program in, Program out (no torch), for devices where a launch costs more
than a little work that is done again.

    m = mean over q of x[q]^2;   y[k] = x[k] * rsqrt(m) * g[k];   z[j] = sum over k of y[k] * w[j, k]
        becomes    z[j] = sum over k of x[k] * rsqrt(mean over q of x[q]^2) * g[k] * w[j, k]

    z[j] = sum over k of y[k] * w[j, k];   h[i] = silu(z[i]) * z[i + n], which reads each z once
        becomes    h[i] = silu(sum over k of y[k] * w[i, k]) * sum over k of y[k] * w[i + n, k]

A program of such sums holds the whole row: its norm, or its softmax, is a sum more over what the program has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...ir.expr import Axis, Const, Fold, Load, walk
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Element, Program, Stage
from .. import deps
from ..deps import free_axes, numel
from ..templates.block_products import product_in
from .fuse import can_inline, cost, has_fold, inline, overwritten

ROW = 8192  # elements that a program holds
SHORT = 2048  # and of those that it computes,
DEAR, FEW = 32, 256  # with at most so many operations for each, where more sums than these read the row
LEAST = 512  # results of sums that are worth a thought


def near_sums(program: Program) -> Program:
    """On the top level of the body."""
    body: list[Element | None] = list(program.body)
    roots, keep = deps.roots_of(program.buffers), deps.pinned(program)
    written = deps.writers(program.body, roots)
    readers: dict[str, set[int]] = {}
    for at, e in enumerate(program.body):
        for buf in deps.reads(e):
            readers.setdefault(buf, set()).add(at)

    def is_free(at: int) -> bool:
        """May this element's value be computed elsewhere?"""
        s = body[at]
        return isinstance(s, Stage) and can_inline(s) is None and s.stores[0].buf not in keep and len(written.get(s.stores[0].buf, ())) == 1

    for at in range(len(body)):
        s = body[at]
        if not isinstance(s, Stage) or not is_free(at):
            continue
        users = sorted(readers.get(s.stores[0].buf, ()))
        reader = body[users[0]] if len(users) == 1 else None
        if not isinstance(reader, Stage) or reader.scan or reader.lets:
            continue
        found = [at]
        if _sums(reader, s, program.buffers):
            found = _parts(body, at, readers, written, is_free)
        elif not (_is_sums(s, program.buffers) and _reads_once(reader, s)):
            continue
        parts = [body[k] for k in found]
        if not found or any(isinstance(p, Stage) and overwritten(p, k, users, written, roots) for k, p in zip(found, parts, strict=True)):
            continue
        stages = [p for p in parts if isinstance(p, Stage)]
        whole = _joined(stages)
        if found != [at] and not (_is_row(whole) and (_is_cheap(stages) or _readers_of_a_row(reader, s) <= FEW)):
            continue
        body[users[0]] = inline(whole, reader)
        for k in found:
            body[k] = None
        for buf in deps.reads(whole):
            readers[buf] = readers[buf] - set(found) | set(users)
    if all(a is b for a, b in zip(body, program.body, strict=True)):
        return program
    return replace(program, body=tuple(e for e in body if e is not None))


def _parts(
    body: Sequence[Element | None], at: int, readers: Mapping[str, set[int]], written: Mapping[str, list[int]],
    is_free: Callable[[int], bool],
) -> list[int]:  # fmt: skip
    """The Stage at `at`, and the sums of its rows that only these Stages read, in order; [] where it has none."""
    s = body[at]
    assert isinstance(s, Stage)
    found, todo = {at}, sorted(deps.reads(s))
    while todo:
        buf = todo.pop()
        places = written.get(buf, [])
        k = places[0] if len(places) == 1 else -1
        e = body[k] if k >= 0 else None
        if k in found or not isinstance(e, Stage) or not is_free(k) or not has_fold(e.stores[0].value):
            continue
        if numel(x for _, x in e.axes) < numel(x for _, x in s.axes):
            found.add(k)
            todo += sorted(deps.reads(e))
    while True:  # what others read too stays where it is
        kept = {k for k in found if k == at or readers[body[k].stores[0].buf] <= found}  # type: ignore[union-attr]
        if kept == found:
            return sorted(found) if len(found) > 1 else []
        found = kept


def _joined(parts: Sequence[Stage]) -> Stage:
    """The last of them, with the values of the others in place of its loads."""
    *before, last = parts
    for k in range(len(before) - 1, -1, -1):
        last = inline(before[k], last)
    return last


def _is_row(s: Stage) -> bool:
    """Elements of rows, each with sums over the whole of its row."""
    value, last = s.stores[0].value, s.stores[0].index[-1] if s.stores[0].index else None
    row = dict(s.axes).get(last) if isinstance(last, Axis) else None
    if row is None or const_of(row) is None or numel([row]) > SHORT:
        return False
    folds = [e for e in walk(value) if isinstance(e, Fold)]
    if not folds or any(last in free_axes(f) or numel(f.extents) != numel([row]) for f in folds):
        return False
    known = all(const_of(n) is not None for f in folds for n in f.extents)
    return known and all(x.mask is None and not any(isinstance(i, Load) for i in walk(*x.index)) for x in deps.stage_loads(s))


def _is_cheap(parts: Sequence[Stage]) -> bool:
    """A row, made of these, for each of many sums."""
    return sum(cost(p.stores[0].value) * numel(e for _, e in p.axes) for p in parts) <= DEAR * numel(e for _, e in parts[-1].axes)


def _readers_of_a_row(reader: Stage, s: Stage) -> int:
    (use,) = (x for x in deps.stage_loads(reader) if x.buf == s.stores[0].buf)
    return numel(e for a, e in reader.axes if a not in free_axes(use))


def _sums(s: Stage, producer: Stage, buffers: Mapping[str, Buffer]) -> bool:
    """Sums of what `producer` stores, row by row, times something else?"""
    uses = [x for x in deps.stage_loads(s) if x.buf == producer.stores[0].buf]
    if len(uses) != 1 or len(s.stores) != 1 or uses[0].mask is not None or not all(isinstance(i, Axis | Const) for i in uses[0].index):
        return False
    inside = [f for f in walk(s.stores[0].value) if isinstance(f, Fold) and uses[0] in set(walk(*f.update))]
    if len(inside) != 1 or inside[0].axes != uses[0].index[-1:] or set(inside[0].axes) & free_axes(uses[0]) != set(inside[0].axes):
        return False
    return numel(e for _, e in s.axes) >= LEAST and product_in(s, buffers) is None and not has_fold(producer.stores[0].value)


def _is_sums(s: Stage, buffers: Mapping[str, Buffer]) -> bool:
    """Sums along a row for each element, with one factor that all of them read."""
    folds = [f for f in walk(s.stores[0].value) if isinstance(f, Fold) and free_axes(f)]
    if len(folds) != 1 or numel(e for _, e in s.axes) < 2 * LEAST or product_in(s, buffers) is not None:
        return False
    (f,) = folds
    shared = any(isinstance(x, Load) and free_axes(x) <= set(f.axes) for x in walk(*f.update))
    return shared and all(const_of(n) is not None for n in f.extents) and numel(f.extents) <= ROW


def _reads_once(reader: Stage, s: Stage) -> bool:
    """Does `reader` read each element of what `s` stores once, in two halves?"""
    uses = [x for x in deps.stage_loads(reader) if x.buf == s.stores[0].buf]
    axes = [a for a, e in reader.axes if const_of(e) != 1]
    total = numel(e for _, e in reader.axes)
    if len(uses) != 2 or len(axes) != 1 or 2 * total != numel(e for _, e in s.axes) or any(map(has_fold, deps.stage_exprs(reader))):
        return False
    starts = []
    for x in uses:
        varying = [linear(i) for i in x.index if const_of(i) != 0]
        if x.mask is not None or len(varying) != 1 or list(varying[0].terms) != axes or const_of(varying[0].terms[axes[0]]) != 1:
            return False
        starts.append(const_of(varying[0].const))
    return sorted(starts, key=str) in ([0, total], [total, 0])
