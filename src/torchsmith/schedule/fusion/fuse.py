"""Vertical fusion: a producer's value takes the place of its consumers' loads; dead stages and buffers go.

In: a Program. Out: a Program with fewer Stages.

    t[i] = f(x[i]);  y[i, j] = g(t[i])        becomes        y[i, j] = g(f(x[i]))

Legality (`can_fuse`) is apart from profit (`score`), which may be wrong without harm.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ...ir import dtype as dt
from ...ir import memo
from ...ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, const, op, rewrite, select, substitute, walk
from ...ir.linear import const_of, linear
from ...ir.program import Element, Program, Stage, Store
from ...options import Options
from .. import deps
from ..access import simplify
from ..deps import Work, free_axes, numel, operations, reads, repeated, stage_loads, together, writes
from ..templates.table import TEMPLATES, recognised

COSTS = {  # in simple operations; others 1
    "div": 4, "sqrt": 5, "rsqrt": 8, "exp": 12, "exp2": 12, "sigmoid": 16, "tanh": 20, "erf": 30, "log": 14, "sin": 24, "cos": 24,
    "floordiv": 4, "mod": 4, "truncdiv": 12, "fmod": 20, "remainder": 20, "expm1": 14, "log1p": 18, "pow": 80, "bitcast": 0,
    "philox": 100,
}  # fmt: skip
MAX_DEPTH = 100  # levels of one expression: passes walk them by recursion
MATH_COST = 60  # other elementary functions


@dataclass(frozen=True, slots=True)
class Reason:
    """Why two stages may not be joined."""

    text: str


_WORK: dict[Expr, Work] = memo.table({})


def own_cost(e: Expr) -> int:
    if isinstance(e, Load):
        return 1
    if isinstance(e, Op):
        if e.dtype is dt.index:
            return 0
        return COSTS.get(e.name, MATH_COST if e.name in _MATH else 1)
    return 1 if isinstance(e, Cast) and e.dtype is not dt.index else 0


_MATH = frozenset(
    "tan asin acos atan atan2 sinh cosh asinh acosh atanh erfc lgamma digamma erfinv hypot log2 log10 nextafter".split()  # noqa: SIM905
)


def cost(e: Expr) -> int:
    """Operations for one element, Folds multiplied by their trips, unknown sizes guessed."""
    return operations(work_of(e))


def work_of(e: Expr) -> Work:
    """The same, with sizes that vary apart."""
    done = _WORK.get(e)
    if done is not None:
        return done
    own, inner = 0, list[Work]()
    seen, stack = {e}, [e]
    while stack:
        node = stack.pop()
        own += own_cost(node)
        args = node.args
        if isinstance(node, Fold):
            bodies = set(node.update)
            inner.append(repeated(together(map(work_of, dict.fromkeys(node.update))), node.extents))
            args = tuple(a for a in args if a not in bodies)
        new = [a for a in dict.fromkeys(args) if a not in seen]
        seen.update(new)
        stack += new
    _WORK[e] = made = together([{(): own}, *inner])
    return made


# ---------------------------------------------------------------- legality


def simple_axes(stage: Stage, store: Store) -> tuple[Axis | None, ...] | None:
    """The axis that each dimension of the store's index is (None: constant 0), when the store is one element per iteration."""
    out: list[Axis | None] = []
    for i in store.index:
        if isinstance(i, Axis) and i not in out:
            out.append(i)
        elif isinstance(i, Const) and i.value == 0:
            out.append(None)
        else:
            return None
    return tuple(out) if {a for a in out if a is not None} == {a for a, _ in stage.axes} else None


def can_inline(producer: Stage) -> Reason | None:
    """May this Stage's value stand in place of loads of its buffer?"""
    if producer.scan or len(producer.stores) != 1 or producer.lets:
        return Reason("scan, several stores or lets")
    store = producer.stores[0]
    if store.mode != "set" or not store.unique or store.mask is not None:
        return Reason("store accumulates or is partial")
    if simple_axes(producer, store) is None:
        return Reason("store index is not the stage's axes")
    return None


def can_fuse(producer: Stage, consumer: Stage) -> Reason | None:
    """May `producer` be inlined into `consumer`? Looks at axes and dependencies only."""
    why = can_inline(producer)
    if why is not None:
        return why
    store = producer.stores[0]
    uses = [x for x in stage_loads(consumer) if x.buf == store.buf]
    if store.buf in writes(consumer):
        return Reason("consumer writes the same buffer")
    if has_fold(store.value):
        extents = dict(consumer.axes)
        for u in uses:
            if u.mask is not None or not _is_renaming(u.index, extents) or len(free_of(u.index)) != len(consumer.axes):
                return Reason("a fold would run in a wider loop")
        if len(uses) > 1:
            return Reason("a fold would run twice")
        if any(u in set(walk(f)) for f in deps_folds(consumer) for u in uses):
            return Reason("a fold would run inside a fold")
    for name, template in TEMPLATES.items():
        if template.nested:
            continue
        seen = template.recognise(consumer)
        if seen is not None and any(template.is_operand(seen, u) for u in uses):
            return Reason(f"{name} operand")
        before = seen or template.recognise(producer)
        if before is None:
            continue
        after = template.recognise(inline(producer, consumer))
        loss = f"no {name} any more" if after is None else template.refuses(before, after)
        if loss is not None:
            return Reason(loss)
    return None


def deps_folds(s: Stage) -> list[Fold]:
    return [e for e in walk(*deps.stage_exprs(s)) if isinstance(e, Fold)]


def has_fold(e: Expr) -> bool:
    return any(isinstance(x, Fold) for x in walk(e))


def free_of(index: tuple[Expr, ...]) -> frozenset[Axis]:
    return frozenset().union(*(free_axes(i) for i in index)) if index else frozenset()


def _is_renaming(index: tuple[Expr, ...], extents: dict[Axis, Expr]) -> bool:
    """Does every element come from one iteration only? Each dimension is an axis, or axes joined: (b, h) read at b * H + h."""
    seen: set[Expr] = set()
    for i in index:
        joined = _joined(i, extents)
        if joined is None or seen & set(joined):
            return False
        seen.update(joined)
    return True


def _joined(e: Expr, extents: dict[Axis, Expr]) -> list[Axis] | None:
    """The axes of b * H + h, each with a step of all that lies inside of it; None if `e` is anything else."""
    if isinstance(e, Const) or e in extents:
        return [a for a in (e,) if isinstance(a, Axis)]
    lin = linear(e)
    left = {a: step for a, step in lin.terms.items() if isinstance(a, Axis) and a in extents}
    found: list[Axis] = []
    inner: Expr = const(1)
    while left and len(left) + len(found) == len(lin.terms):
        nxt = next((a for a, step in left.items() if step is inner), None)
        if nxt is None:
            return None
        del left[nxt]
        found.append(nxt)
        inner = op("mul", inner, extents[nxt])
    return found if len(found) == len(lin.terms) and const_of(lin.const) == 0 else None


# ---------------------------------------------------------------- profit


def score(producer: Stage, consumers: list[Stage], options: Options) -> float:
    """What inlining saves, in operations per element of the producer; positive: do it."""
    store = producer.stores[0]
    if options.chaos:
        return random.Random(f"{options.chaos}/{store.buf}").uniform(-1, 1)
    size = max(1, numel(e for _, e in producer.axes))
    work = cost(store.value)
    n_loads = sum(isinstance(x, Load) for x in walk(store.value))
    if n_loads == 0 and work <= 12:
        return 1.0
    evaluations = 0
    widened = False
    for c in consumers:
        extents = dict(c.axes) | deps.fold_extents(*deps.stage_exprs(c))
        total = numel(e for _, e in c.axes)
        for f in deps_folds(c):
            total = max(total, total * numel(f.extents))
        for u in stage_loads(c):
            if u.buf == store.buf:
                trips = numel(extents[a] for a in free_of(u.index) if a in extents)
                evaluations += max(trips, 1)
                widened |= total >= 4 * max(trips, 1) and size * 4 <= total
    duplication = evaluations / size
    if widened and work > 4 and not (duplication <= 1.01 and len(producer.axes) == 0):
        return -1.0  # would be evaluated again and again in the wider loop
    if duplication <= 1.01:
        return 1.0
    waste = work * (duplication - 1)
    saved = 5.0 + 1.0 * len(consumers)  # a store, loads and a launch
    return saved - waste - 1.5 * max(0, n_loads - 2) * (duplication - 1)


# ---------------------------------------------------------------- the pass


def inline_value(producer: Stage, use: Load) -> Expr:
    """The producer's value at the index of `use`; where the use is masked, so is every load inside."""
    store = producer.stores[0]
    axes = simple_axes(producer, store)
    assert axes is not None
    table: dict[Expr, Expr] = {a: i for a, i in zip(axes, use.index, strict=True) if a is not None}
    value = substitute(store.value, table)
    if use.mask is None or use.other is None:
        return value
    return select(use.mask, guard(value, use.mask), use.other)


def guard(value: Expr, mask: Expr, along: frozenset[Axis] | None = None) -> Expr:
    """Loads under `value` only where `mask` holds: the rest of the value may then be anything. along: only those that one of
    these moves."""
    memo: dict[Expr, Expr] = {}

    def go(e: Expr) -> Expr:
        done = memo.get(e)
        if done is None:
            out = e.rebuild(tuple(go(a) for a in e.args)) if e.args else e
            if isinstance(out, Load) and (along is None or not along.isdisjoint(walk(out))):
                if out.mask is None:
                    out = Load(out.buf, out.dtype, out.index, mask, Const(out.dtype, 0))
                else:
                    out = Load(out.buf, out.dtype, out.index, op("and", mask, out.mask), out.other)
            done = memo[e] = out
        return done

    return go(value)


def inline(producer: Stage, consumer: Stage) -> Stage:
    """The consumer with every load of the producer's buffer replaced."""
    buf = producer.stores[0].buf
    memo: dict[Expr, Expr] = {}

    def go(e: Expr) -> Expr:
        return rewrite(e, lambda x: inline_value(producer, x) if isinstance(x, Load) and x.buf == buf else x, memo)

    stores = tuple(
        replace(s, index=tuple(go(i) for i in s.index), value=go(s.value), mask=None if s.mask is None else go(s.mask))
        for s in consumer.stores
    )
    joined = any(not isinstance(i, Axis | Const) for u in stage_loads(consumer) if u.buf == buf for i in u.index)
    if joined and has_fold(producer.stores[0].value):
        extents = dict(consumer.axes) | deps.fold_extents(*(s.value for s in stores))
        stores = tuple(replace(s, value=simplify(s.value, extents)) for s in stores)
    origin = producer.origin if not consumer.origin else consumer.origin if not producer.origin else f"{producer.origin},{consumer.origin}"
    return replace(
        consumer, stores=stores, lets=tuple((v, go(e)) for v, e in consumer.lets), carry=tuple((v, go(e)) for v, e in consumer.carry),
        carry_next=tuple(go(e) for e in consumer.carry_next), origin=origin, loc=consumer.loc or producer.loc,
    )


def drop_unit_axes(stage: Stage) -> Stage:
    """Axes of extent 1 are the constant 0."""
    ones: dict[Axis, Const] = {a: Const(dt.index, 0) for a, e in stage.axes if isinstance(e, Const) and e.value == 1}
    if stage.scan and stage.axes and stage.axes[-1][0] in ones:
        del ones[stage.axes[-1][0]]
    if not ones:
        return stage
    table: dict[Expr, Expr] = {a: zero for a, zero in ones.items()}  # noqa: C416

    def sub(e: Expr) -> Expr:
        return substitute(e, table)

    stores = tuple(
        replace(s, index=tuple(map(sub, s.index)), value=sub(s.value), mask=None if s.mask is None else sub(s.mask)) for s in stage.stores
    )
    return replace(
        stage, axes=tuple(x for x in stage.axes if x[0] not in ones), stores=stores, lets=tuple((v, sub(e)) for v, e in stage.lets),
        carry=tuple((v, sub(e)) for v, e in stage.carry), carry_next=tuple(map(sub, stage.carry_next)),
    )


def fuse(program: Program, options: Options) -> Program:
    """Inline producers into consumers, the last producer first, and drop what nobody reads. On a device what is trivial goes first: without
    a constant to load, more values are worth computing again. A processor stores such values once: mobilenet_v2 trains a fifth faster."""
    on_device = program.target.language != "c"
    keep = deps.pinned(program)
    body: list[Element | None] = [drop_unit_axes(e) if isinstance(e, Stage) else e for e in program.body]
    readers: dict[str, set[int]] = {}
    for i, e in enumerate(body):
        if e is not None:
            for b in reads(e):
                readers.setdefault(b, set()).add(i)
    roots = deps.roots_of(program.buffers)
    written = deps.writers(tuple(e for e in body if e is not None), roots)
    fuel = options.fuel
    for p in sorted(range(len(body)), key=lambda p: (on_device and not _is_trivial(body[p]), -p)):
        stage = body[p]
        if not isinstance(stage, Stage):
            continue
        if not any(s.buf in keep or readers.get(s.buf, set()) - {p} for s in stage.stores):
            for b in reads(stage):
                readers.get(b, set()).discard(p)
            body[p] = None  # nobody looks
            continue
        buf = stage.stores[0].buf
        if len(stage.stores) != 1 or len(written.get(buf, ())) != 1 or fuel == 0:
            continue
        users = sorted(readers.get(buf, set()))
        consumers = [c for c in (body[u] for u in users) if isinstance(c, Stage)]
        if (buf in keep or len(consumers) != len(users) or not consumers) and not (buf in keep and _is_trivial(stage)):
            continue
        if any(can_fuse(stage, c) for c in consumers) or overwritten(stage, p, users, written, roots):
            continue
        if score(stage, consumers, options) <= 0 or not (options.epilogue_fusion or recognised(stage) is None):
            continue
        merged = [inline(stage, c) for c in consumers]
        if any(_too_big(m, options) for m in merged):
            continue
        fuel -= 1
        for u, m in zip([u for u in users if isinstance(body[u], Stage)], merged, strict=True):
            for b in reads(stage):
                readers.setdefault(b, set()).add(u)
            readers[buf].discard(u)
            body[u] = m
        if buf not in keep and not readers[buf]:
            for b in reads(stage):
                readers.get(b, set()).discard(p)
            body[p] = None
    new = tuple(e for e in body if e is not None)
    if all(a is b for a, b in zip(new, program.body, strict=False)) and len(new) == len(program.body):
        return program
    used = set(keep).union(*(reads(e) | writes(e) for e in new)) if new else set(keep)
    return replace(program, body=new, buffers={n: b for n, b in program.buffers.items() if n in used})


def _is_trivial(stage: Element | None) -> bool:
    """A constant or an index: cheaper to make than to load."""
    if not isinstance(stage, Stage) or len(stage.stores) != 1:
        return False
    return not any(isinstance(x, Load | Fold) for x in walk(stage.stores[0].value)) and cost(stage.stores[0].value) <= 4


def overwritten(stage: Stage, p: int, users: list[int], written: dict[str, list[int]], roots: dict[str, str]) -> bool:
    """Would a load move past a write of what it reads?"""
    last = max(users, default=p)
    return any(p < w <= last for b in deps.rooted(reads(stage), roots) for w in written.get(b, ()))


def _too_big(stage: Stage, options: Options) -> bool:
    nodes = sum(isinstance(e, Op) and e.dtype is not dt.index for e in walk(*deps.stage_exprs(stage)))
    loads = {x.buf for x in stage_loads(stage)}
    deep = max(deps.depth(s.value) for s in stage.stores)
    return nodes > 16 * options.max_fusion_size or len(loads) > 40 or deep > MAX_DEPTH



