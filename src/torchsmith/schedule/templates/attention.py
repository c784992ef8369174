"""Recognise attention in the body of a Stage. In: a Stage; out: the Stage read as an Attention, or None.

    out[i, d] = Fold_j (exp(s - Fold_j' max s) / Fold_j'' exp(s - ..)) * v[j, d]      s = f(Fold_e q[i, e] * k[j, e])

Such Stages come from merge_attention.py. The Stage is the definition, and what the interpreter runs; attention_kernel.py makes a kernel of
it that keeps scores in scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir import dtype as dt
from ...ir import memo
from ...ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, substitute, walk
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Stage
from .. import deps
from ..fusion.affine import split_axes
from ..fusion.fold_shapes import factor, multiply_add, strip_casts

WIDEST = 512  # elements of a row of q or v: a block of both stays in the second-level cache


@dataclass(frozen=True, slots=True)
class Attention:
    """A Stage seen as attention. `score` is f of DOT, the product of q and k; `value` the Stage's value with the outer Fold as OUT."""

    stage: Stage
    fold: Fold
    dot: Fold
    q: Load
    k: Load
    v: Load
    score: Expr
    safe: bool  # rows whose scores are all -inf give 0, not NaN
    batch: tuple[tuple[Axis, Expr], ...]
    i: tuple[Axis, Expr]
    j: tuple[Axis, Expr]
    e: tuple[Axis, Expr]
    d: tuple[Axis, Expr]
    value: Expr


DOT, OUT = Var("dot", dt.f32), Var("out", dt.f32)


# ---------------------------------------------------------------- one Stage


@memo.by_identity
def recognise_attention(stage: Stage) -> Attention | None:
    """The Stage (its axes split where that makes its operands affine) as attention, or None."""
    if stage.scan or stage.lets or len(stage.stores) != 1 or stage.stores[0].mode != "set" or stage.stores[0].mask is not None:
        return None
    outer = outer_product(stage.stores[0].value)
    if outer is None or not any(isinstance(x, Fold) for u in outer.update for x in walk(u)) or is_wide(stage.stores[0].value):
        return None
    found = [a for s in dict.fromkeys((stage, split_axes(stage))) if (a := _read(s)) is not None]
    # one query for each of several heads that share keys: the heads are the rows
    return next((a for a in found if a.i[1] is not const(1)), found[0] if found else None)


def is_wide(value: Expr) -> bool:
    """Does it compute on 8-byte elements? The kernel's vectors hold 4-byte ones. Integers made of axes are narrow; sizes need not be."""
    for x in walk(value):
        if x.dtype.itemsize == 8 and x.dtype is not dt.index:
            sized = isinstance(x, Cast) and x.arg.dtype is dt.index and any(isinstance(y, Sym) for y in walk(x.arg))
            if sized or isinstance(x, Load | Sym):
                return True
    return False


def outer_product(value: Expr) -> Fold | None:
    """The one multiply-add Fold that stands outside of every other."""
    seen: set[Expr] = set()
    tops: list[Fold] = []
    stack = [value]
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if isinstance(x, Fold):
            tops.append(x)
        else:
            stack.extend(x.args)
    return tops[0] if len(tops) == 1 and multiply_add(tops[0]) is not None else None


def _read(stage: Stage) -> Attention | None:
    value = stage.stores[0].value
    outer = outer_product(value)
    if outer is None or len(outer.axes) != 1:
        return None
    factors = multiply_add(outer)
    assert factors is not None
    for weight, other in (factors, factors[::-1]):
        v, parts = factor(other), softmax_of(weight, outer.axes[0])
        if v is not None and v.mask is None and parts is not None:
            return _classify(stage, outer, parts[0], parts[1], v)
    return None


def softmax_of(weight: Expr, j: Axis) -> tuple[Expr, bool] | None:
    """(score, safe) of a softmax over `j`: exp(s - m) / l, or 0 where m is -inf."""
    e, safe = strip_casts(weight), False
    if isinstance(e, Op) and e.name == "where" and isinstance(e.args[1], Const) and e.args[1].value == 0.0:
        test = e.args[0]
        if not (isinstance(test, Op) and test.name == "eq" and test.args[1] is Const(dt.f32, float("-inf"))):
            return None
        top, e, safe = test.args[0], strip_casts(e.args[2]), True
    else:
        top = None
    if not (isinstance(e, Op) and e.name == "div"):
        return None
    above, below = strip_casts(e.args[0]), strip_casts(e.args[1])
    if not (isinstance(above, Op) and above.name == "exp" and isinstance(above.args[0], Op) and above.args[0].name == "sub"):
        return None
    score, m = above.args[0].args
    if score.dtype is not dt.f32 or (top is not None and top is not m):
        return None
    largest, total = _reduced(strip_casts(m), "max"), _reduced(below, "add")
    if largest is None or total is None:
        return None
    here: dict[Expr, Expr] = {largest[0]: j}
    if strip_casts(substitute(largest[1], here)) is not strip_casts(score):
        return None
    return (score, safe) if strip_casts(substitute(total[1], {total[0]: j})) is above else None


def _reduced(e: Expr, name: str) -> tuple[Axis, Expr] | None:
    """(axis, what it reduces) of a Fold of one state over one axis from the identity of `name`."""
    if not isinstance(e, Fold) or len(e.init) != 1 or len(e.axes) != 1 or e.order != "any" or not isinstance(e.init[0], Const):
        return None
    update, state = e.update[0], e.state(0)
    start = float("-inf") if name == "max" else 0.0
    if not (isinstance(update, Op) and update.name == name and e.init[0].value == start and update.args[0] is state):
        return None
    return e.axes[0], update.args[1]


def _classify(stage: Stage, outer: Fold, score: Expr, safe: bool, v: Load) -> Attention | None:
    """Find the first product in the score, and sort the axes."""
    (j,), (keys,) = outer.axes, outer.extents
    folds = [x for x in walk(score) if isinstance(x, Fold)]
    loads = [factor(x) for x in multiply_add(folds[0]) or ()] if len(folds) == 1 else []
    if len(loads) != 2 or len(folds[0].axes) != 1:
        return None
    uses = [x is not None and j in deps.free_axes(x) for x in loads]
    if sum(uses) != 1:
        return None
    k, q = loads[uses.index(True)], loads[uses.index(False)]
    assert k is not None and q is not None
    if k.mask is not None or q.mask is not None or any(isinstance(x, Load) for y in (q, k, v) for i in y.index for x in walk(i)):
        return None
    (e,), (width,) = folds[0].axes, folds[0].extents
    in_q, in_k, in_v = (deps.free_axes(x) for x in (q, k, v))
    score = substitute(score, {folds[0]: DOT})
    columns = [x for x in stage.axes if x[0] in in_v and x[0] not in in_q | in_k | deps.free_axes(score)]
    rows = [x for x in stage.axes if x[0] in in_q and x[0] not in in_k | in_v]
    i = rows[-1] if rows else (Axis("m_one"), const(1))
    if len(columns) != 1 or const_of(keys) == 0 or any(not 1 <= (const_of(n) or 0) <= WIDEST for n in (width, columns[0][1])):
        return None
    d = columns[0]
    if not (_is_affine(q, i[0], e) and _is_affine(k, j, e) and _is_affine(v, j, d[0])):
        return None
    batch = tuple(x for x in stage.axes if x not in (i, d))
    value = substitute(stage.stores[0].value, {outer: OUT})
    if any(isinstance(x, Fold) for x in walk(value)):
        return None
    return Attention(stage, outer, folds[0], q, k, v, score, safe, batch, i, (j, keys), (e, width), d, value)


def _is_affine(load: Load, *axes: Axis) -> bool:
    """Do `axes` occur in the indices only as linear terms?"""
    return all(atom in axes or not any(x in axes for x in walk(atom)) for e in load.index for atom in linear(e).terms)


def is_operand(attention: Attention, use: Load) -> bool:
    """Is `use` one of the three matrices (which are read again and again), not a mask?"""
    return any(use.buf == x.buf for x in (attention.q, attention.k, attention.v))


def order_of(a: Attention, buffers: Mapping[str, Buffer]) -> list[int] | None:
    """Dimensions of the result as the queries lie, from their farthest step to the nearest (what was split into heads is joined again), the
    values' columns innermost."""
    layout = buffers[a.q.buf].layout
    if layout is None:
        return None
    total: Expr = const(0)
    for i, step in zip(a.q.index, layout.strides, strict=True):
        total = total + i * step
    steps = linear(total).terms

    def reach(index: Expr) -> int:
        axes = [x for x in walk(index) if isinstance(x, Axis)]
        return -1 if a.d[0] in axes else min((deps.estimate(steps[x]) for x in axes if x in steps), default=1 << 60)

    index = a.stage.stores[0].index
    return sorted(range(len(index)), key=lambda d: -reach(index[d]))
