"""Losses: a pointwise expression, then no reduction, the mean or the sum. In: Refs; out: one stage (two where a weight is summed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir.expr import Const, Expr, op, select
from .core import Builder
from .gather import position_of
from .numerics import cast, opmath, rounded_to
from .pointwise import c, element
from .reduce import Split, accumulator, total
from .ref import ZERO, Index, Ref, constant, known
from .table import lowers

NONE, MEAN, SUM = 0, 1, 2


def broadcast_shape(*refs: Ref) -> tuple[Expr, ...]:
    """The shape to which all operands broadcast."""
    rank = max(r.rank for r in refs)
    shape = []
    for d in range(1, rank + 1):
        sizes = [r.shape[-d] for r in refs if r.rank >= d]
        shape.append(next((n for n in sizes if known(n) != 1), sizes[0]))
    return tuple(reversed(shape))


def reduced(cx: Builder, fn: Callable[..., Expr], reduction: int, *operands: Any) -> Ref:
    """fn over the broadcast operands, then `reduction`."""
    d = cx.dtype
    refs = [a for a in operands if isinstance(a, Ref)]

    def value(i: Index) -> Expr:
        return fn(*(element(a, i, d) for a in operands))

    if reduction == NONE:
        return cx.stage(lambda i: cast(value(i), d))
    shape = broadcast_shape(*refs)
    how = Split(shape, tuple(range(len(shape))), False)
    acc = accumulator(d, how)
    # eager rounds the elements to the result's dtype before it reduces them
    at = total(cx, how, lambda i: cast(cast(value(i), d), opmath(d)), acc)
    if reduction == SUM:
        return cx.stage(lambda i: cast(at(()), d))
    return cx.stage(lambda i: cast(op("div", at(()), cast(how.count, acc)), d))


@lowers("aten.mse_loss.default")
def mse_loss(cx: Builder, x: Ref, y: Ref, reduction: int = MEAN) -> Ref:
    def value(a: Expr, b: Expr) -> Expr:
        d = op("sub", a, b)
        return op("mul", d, d)

    return reduced(cx, value, reduction, x, y)


@lowers("aten.l1_loss.default")
def l1_loss(cx: Builder, x: Ref, y: Ref, reduction: int = MEAN) -> Ref:
    return reduced(cx, lambda a, b: op("abs", op("sub", a, b)), reduction, x, y)


@lowers("aten.smooth_l1_loss.default")
def smooth_l1_loss(cx: Builder, x: Ref, y: Ref, reduction: int = MEAN, beta: Any = 1.0) -> Ref:
    def value(a: Expr, b: Expr) -> Expr:
        d = op("abs", op("sub", a, b))
        if beta == 0:
            return d
        near = op("div", op("mul", op("mul", c(d, 0.5), d), d), c(d, beta))
        return select(op("lt", d, c(d, beta)), near, op("sub", d, c(d, 0.5 * beta)))

    return reduced(cx, value, reduction, x, y)


@lowers("aten.huber_loss.default")
def huber_loss(cx: Builder, x: Ref, y: Ref, reduction: int = MEAN, delta: Any = 1.0) -> Ref:
    def value(a: Expr, b: Expr) -> Expr:
        d = op("abs", op("sub", a, b))
        near = op("mul", op("mul", c(d, 0.5), d), d)
        return select(op("le", d, c(d, delta)), near, op("mul", c(d, delta), op("sub", d, c(d, 0.5 * delta))))

    return reduced(cx, value, reduction, x, y)


@lowers("aten.soft_margin_loss.default")
def soft_margin_loss(cx: Builder, x: Ref, y: Ref, reduction: int = MEAN) -> Ref:
    d = cx.dtype

    def value(a: Expr, b: Expr) -> Expr:
        product = rounded_to(op("mul", op("neg", b), a), d)
        return op("log1p", rounded_to(op("exp", product), d))

    return reduced(cx, value, reduction, x, y)


@lowers("aten.binary_cross_entropy.default")
def binary_cross_entropy(cx: Builder, x: Ref, y: Ref, weight: Any = None, reduction: int = MEAN) -> Ref:
    """(y - 1) * max(log1p(-x), -100) - y * max(log(x), -100), for x in [0, 1]."""

    def outside(i: Index) -> Expr:
        e = cast(x.load(i), opmath(x.dtype))
        return op("not", op("and", op("ge", e, c(e, 0.0)), op("le", e, c(e, 1.0))))

    cx.check_none(x.shape, outside, "RangeError", "all elements of input should be between 0 and 1")

    def value(a: Expr, b: Expr, *w: Expr) -> Expr:
        floor = c(a, -100.0)
        no = op("mul", op("sub", b, c(b, 1.0)), op("max", op("log1p", op("neg", a)), floor))
        loss = op("sub", no, op("mul", b, op("max", op("log", a), floor)))
        return op("mul", loss, w[0]) if w else loss

    return reduced(cx, value, reduction, x, y, *(() if weight is None else (weight,)))


@lowers("aten.binary_cross_entropy_with_logits.default")
def bce_with_logits(cx: Builder, x: Ref, y: Ref, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN) -> Ref:
    """(1 - y) * x - (1 + (pos_weight - 1) * y) * logsigmoid(x)."""
    extra = [w for w in (weight, pos_weight) if w is not None]

    def value(a: Expr, b: Expr, *w: Expr) -> Expr:
        log_sigmoid = op("sub", op("min", a, c(a, 0.0)), op("log1p", op("exp", op("neg", op("abs", a)))))
        if pos_weight is not None:
            factor = op("add", c(a, 1.0), op("mul", op("sub", w[-1], c(a, 1.0)), b))
            log_sigmoid = op("mul", factor, log_sigmoid)
        loss = op("sub", op("mul", op("sub", c(a, 1.0), b), a), log_sigmoid)
        return op("mul", loss, w[0]) if weight is not None else loss

    return reduced(cx, value, reduction, x, y, *extra)


# ---------------------------------------------------------------- negative log likelihood
def _nll(cx: Builder, x: Ref, target: Ref, weight: Any, reduction: int, ignore: Any, classes: int) -> tuple[Ref, ...]:
    """-weight[t] * x[.., t, ..] at target t, skipping `ignore`; the second result is the weight that counted."""
    n = x.shape[classes]
    ignored_value = constant(ignore)

    def ignored(i: Index) -> Expr:
        return op("eq", target.load(i), Const(target.dtype, ignored_value))

    def outside(i: Index) -> Expr:
        t = position_of(target, i)
        return op("and", op("not", ignored(i)), op("or", op("lt", t, ZERO), op("ge", t, n)))

    cx.check_none(target.shape, outside, "IndexError", "Target is out of bounds.")
    d = cx.dtype
    compute = opmath(d)
    zero = Const(compute, 0.0)

    def safe(i: Index) -> Expr:
        """The target, or class 0 for an ignored one."""
        return select(ignored(i), ZERO, position_of(target, i))

    def weight_at(i: Index) -> Expr:
        w = Const(compute, 1.0) if weight is None else cast(weight.load((safe(i),)), compute)
        return select(ignored(i), zero, w)

    def loss_at(i: Index) -> Expr:
        place = (*i[:classes], safe(i), *i[classes:])
        value = op("neg", cast(x.load(place), compute))
        if weight is not None:
            value = op("mul", value, weight_at(i))
        return select(ignored(i), zero, value)

    out, counted = cx.spec
    if reduction == NONE:
        return (
            cx.stage(lambda i: cast(loss_at(i), d), out.shape, d, out.strides),
            cx.stage(lambda i: Const(d, 0.0), counted.shape, d, counted.strides),
        )
    how = Split(target.shape, tuple(range(target.rank)), False)
    acc = accumulator(d, how)
    losses, weights = total(cx, how, loss_at, acc), total(cx, how, weight_at, acc)
    counted_ref = cx.stage(lambda i: cast(weights(()), d), (), d, ())

    def result(_: Index) -> Expr:
        summed = losses(())
        return cast(op("div", summed, weights(())) if reduction == MEAN else summed, d)

    return cx.stage(result, (), d, ()), counted_ref


@lowers("aten.nll_loss_forward.default")
def nll_loss_forward(cx: Builder, x: Ref, target: Ref, weight: Any, reduction: int, ignore: Any) -> tuple[Ref, ...]:
    return _nll(cx, x, target, weight, reduction, ignore, x.rank - 1)


@lowers("aten.nll_loss2d_forward.default")
def nll_loss2d_forward(cx: Builder, x: Ref, target: Ref, weight: Any, reduction: int, ignore: Any) -> tuple[Ref, ...]:
    return _nll(cx, x, target, weight, reduction, ignore, 1)


@lowers("aten.multi_margin_loss.default")
def multi_margin_loss(cx: Builder, x: Ref, target: Ref, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = MEAN) -> Any:
    """The mean over classes c other than the target t of weight[t] * max(0, margin - x[t] + x[c]) ** p."""
    if x.rank not in (1, 2) or p not in (1, 2) or isinstance(margin, Expr):
        return NotImplemented
    d, n = cx.dtype, x.shape[-1]
    compute = opmath(d)
    rows = x.shape[:-1]

    def target_of(i: Index) -> Expr:
        return position_of(target, (i or (ZERO,)) if target.rank else ())

    outside = lambda i: op("or", op("lt", position_of(target, i), ZERO), op("ge", position_of(target, i), n))
    cx.check_none(target.shape, outside, "RangeError", "target out of range")

    def loss(i: Index) -> Expr:
        t = target_of(i)
        hit = cast(x.load((*i, t)), compute)

        def term(k: Index) -> Expr:
            z = op("add", op("sub", Const(compute, float(margin)), hit), cast(x.load((*i, k[0])), compute))
            z = select(op("gt", z, Const(compute, 0.0)), z, Const(compute, 0.0))  # 0 for NaN, as in eager
            z = op("mul", z, z) if p == 2 else z
            z = z if weight is None else op("mul", z, cast(weight.load((t,)), compute))
            return select(op("eq", k[0], t), Const(compute, 0.0), z)

        over = Split((n,), (0,), False)
        return op("div", cast(total(cx, over, term, accumulator(d, over))(()), compute), cast(n, compute))

    if reduction == NONE:
        return cx.stage(lambda i: cast(loss(i), d))
    losses = cx.stage(lambda i: cast(loss(i), d), rows, d) if rows else None
    if losses is None:
        return cx.stage(lambda i: cast(loss(()), d))
    how = Split(rows, (0,), False)
    at = total(cx, how, lambda i: cast(losses.load(i), compute), accumulator(d, how))
    return cx.stage(lambda i: cast(at(()) if reduction == SUM else op("div", at(()), cast(rows[0], accumulator(d, how))), d))
