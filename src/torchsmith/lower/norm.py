"""Normalisation: layer, group, batch and rms and weight norm as a few stages (moments, scale and shift, apply). In: Refs; out: Refs.

The stages carry no mark of the operator: fusion makes one kernel of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, op
from .core import Builder
from .numerics import cast, ir_dtype, opmath
from .pointwise import c
from .reduce import Split, accumulator, hold, moments, moments_at_once, total
from .ref import ZERO, Index, Ref, is_zero
from .table import lowers
from .views import reshape


def _rstd(squares: Expr, count: Expr, eps: float) -> Expr:
    """1 / sqrt(variance + eps), the variance given as a sum of squares."""
    d = squares.dtype
    return op("div", Const(d, 1.0), op("sqrt", op("add", op("div", squares, cast(count, d)), Const(d, eps))))


def _affine(value: Expr, weight: Expr | None, bias: Expr | None) -> Expr:
    if weight is not None:
        value = op("mul", value, weight)
    return value if bias is None else op("add", value, bias)


def _casting(value: Callable[[Index], Expr], d: DType) -> Callable[[Index], Expr]:
    return lambda i: cast(value(i), d)


# ---------------------------------------------------------------- layer norm
def layer_norm(cx: Builder, x: Ref, normalized: int, weight: Ref | None, bias: Ref | None, eps: float) -> tuple[Any, Ref, Ref]:
    """(value at an index, mean, rstd): moments over the last `normalized` dimensions."""
    compute = opmath(x.dtype)
    how = Split(x.shape, tuple(range(x.rank - normalized, x.rank)), True)
    acc = accumulator(compute, how)
    mean, squares = moments(cx, how, lambda i: cast(x.load(i), compute), acc, compute is dt.f32)
    rstd = hold(cx, how.kept, compute, lambda i: cast(_rstd(squares.at(i), how.count, eps), compute))

    def at(i: Index) -> Expr:
        centred = op("sub", cast(x.load(i), compute), cast(mean.at(i), compute))
        w = None if weight is None else cast(weight.at(i), compute)
        b = None if bias is None else cast(bias.at(i), compute)
        return _affine(op("mul", centred, rstd.at(i)), w, b)

    return at, mean, rstd


@lowers("aten.native_layer_norm.default")
def lower_native_layer_norm(cx: Builder, x: Ref, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Ref, ...]:
    at, mean, rstd = layer_norm(cx, x, len(shape), weight, bias, eps)
    out, mean_spec, rstd_spec = cx.spec
    d = ir_dtype(out.dtype)
    y = cx.stage(lambda i: cast(at(i), d))
    stats = []
    for spec, value in ((mean_spec, mean), (rstd_spec, rstd)):
        e = ir_dtype(spec.dtype)
        stats.append(cx.stage(_casting(value.at, e), spec.shape, e, spec.strides))
    return (y, *stats)


@lowers("aten.layer_norm.default")
def lower_layer_norm(cx: Builder, x: Ref, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = True) -> Ref:
    at, *_ = layer_norm(cx, x, len(shape), weight, bias, eps)
    d = cx.dtype
    return cx.stage(lambda i: cast(at(i), d))


# ---------------------------------------------------------------- rms norm
_EPS = {dt.f32: 2.0**-23, dt.f64: 2.0**-52, dt.bf16: 2.0**-23, dt.f16: 2.0**-23}


def _squares(cx: Builder, x: Ref, how: Split, compute: DType) -> Callable[[Index], Expr]:
    """The sum of all x * x that are folded."""

    def squared(i: Index) -> Expr:
        v = cast(x.load(i), compute)
        return op("mul", v, v)

    return total(cx, how, squared, accumulator(compute, how), compute is dt.f32)


def rms_norm(cx: Builder, x: Ref, normalized: int, weight: Ref | None, eps: float | None) -> tuple[Any, Ref]:
    """x * rsqrt(mean(x * x) + eps) * weight."""
    compute = opmath(x.dtype)
    how = Split(x.shape, tuple(range(x.rank - normalized, x.rank)), True)
    at_sum = _squares(cx, x, how, compute)
    rstd = hold(cx, how.kept, compute, lambda i: cast(_rstd(at_sum(i), how.count, _EPS[x.dtype] if eps is None else eps), compute))

    def at(i: Index) -> Expr:
        return _affine(op("mul", cast(x.load(i), compute), rstd.at(i)), None if weight is None else cast(weight.at(i), compute), None)

    return at, rstd


@lowers("aten.rms_norm.default")
def lower_rms_norm(cx: Builder, x: Ref, shape: Any, weight: Any = None, eps: Any = None) -> Ref:
    at, _ = rms_norm(cx, x, len(shape), weight, eps)
    d = cx.dtype
    return cx.stage(lambda i: cast(at(i), d))


@lowers("aten._fused_rms_norm.default")
def lower_fused_rms_norm(cx: Builder, x: Ref, shape: Any, weight: Any = None, eps: Any = None) -> tuple[Ref, ...]:
    at, rstd = rms_norm(cx, x, len(shape), weight, eps)
    d, spec = cx.dtype, cx.spec[1]
    e = ir_dtype(spec.dtype)
    y = cx.stage(lambda i: cast(at(i), d))
    return y, cx.stage(lambda i: cast(rstd.at(i), e), spec.shape, e, spec.strides)


# ---------------------------------------------------------------- weight norm
@lowers("aten._weight_norm_interface.default")
def lower_weight_norm(cx: Builder, v: Ref, g: Ref, dim: int = 0) -> tuple[Ref, Ref]:
    """v * (g / |v|), the norm over all dimensions but `dim`; and the norm."""
    compute = opmath(v.dtype)
    how = Split(v.shape, tuple(k for k in range(v.rank) if k != dim % v.rank), True)
    squares = _squares(cx, v, how, compute)
    norm = hold(cx, how.kept, compute, lambda i: op("sqrt", cast(squares(i), compute)))
    d, spec = cx.dtype, cx.spec[1]
    e = ir_dtype(spec.dtype)
    y = cx.stage(lambda i: cast(op("mul", cast(v.load(i), compute), op("div", cast(g.at(i), compute), norm.at(i))), d))
    return y, cx.stage(lambda i: cast(norm.at(i), e), spec.shape, e, spec.strides)


# ---------------------------------------------------------------- group norm
@lowers("aten.native_group_norm.default")
def lower_native_group_norm(cx: Builder, x: Ref, weight: Any, bias: Any, n: Any, channels: Any, inner: Any, groups: int, eps: float) -> Any:
    """Moments of (batch, group) over the group's channels and all positions."""
    c_size = x.shape[1]
    per_group = c_size // groups
    grouped = reshape(x, (x.shape[0], cx.spec[1].shape[1], per_group, *x.shape[2:]))
    compute = opmath(x.dtype)
    how = Split(grouped.shape, tuple(range(2, grouped.rank)), True)
    acc = accumulator(compute, how)
    mean, squares = moments(cx, how, lambda i: cast(grouped.load(i), compute), acc, compute is dt.f32)
    rstd = hold(cx, how.kept, compute, lambda i: cast(_rstd(squares.at(i), how.count, eps), compute))
    d = cx.dtype
    zeros = (ZERO,) * (grouped.rank - 2)

    def at(i: Index) -> Expr:
        group = (i[0], i[1] // per_group, *zeros)
        centred = op("sub", cast(x.load(i), compute), cast(mean.load(group), compute))
        w = None if weight is None else cast(weight.load((i[1],)), compute)
        b = None if bias is None else cast(bias.load((i[1],)), compute)
        return _affine(op("mul", centred, rstd.load(group)), w, b)

    y = cx.stage(lambda i: cast(at(i), d))
    stats = []
    for spec, value in zip(cx.spec[1:], (mean, rstd), strict=True):
        e = ir_dtype(spec.dtype)
        per_group_ref = value.remap(spec.shape, lambda i: (*i, *zeros))
        stats.append(cx.stage(_casting(per_group_ref.load, e), spec.shape, e, spec.strides))
    return (y, *stats)


# ---------------------------------------------------------------- batch norm
def _per_channel(cx: Builder, x: Ref, compute: DType, mean: Any, rstd: Any, weight: Ref | None, bias: Ref | None) -> Any:
    """value at an index: x * scale + shift with one scale and shift a channel, as eager folds them."""
    channels = (x.shape[1],)

    def scale_of(i: Index) -> Expr:
        r = cast(rstd(i), compute)
        return r if weight is None else op("mul", r, cast(weight.load(i), compute))

    scale = hold(cx, channels, compute, scale_of)

    def shift_of(i: Index) -> Expr:
        moved = op("mul", cast(mean(i), compute), scale.load(i))
        return op("neg", moved) if bias is None else op("sub", cast(bias.load(i), compute), moved)

    shift = hold(cx, channels, compute, shift_of)
    return lambda i: op("add", op("mul", cast(x.load(i), compute), scale.load((i[1],))), shift.load((i[1],)))


def _deviations(var: Ref, compute: DType, eps: float) -> Ref:
    """1 / sqrt(var + eps)."""

    def rstd(i: Index) -> Expr:
        v = cast(var.load(i), compute)
        return op("div", c(v, 1.0), op("sqrt", op("add", v, c(v, eps))))

    return Ref(compute, var.shape, rstd)


def batch_norm_inference(cx: Builder, x: Ref, weight: Any, bias: Any, mean: Ref, var: Ref, eps: float) -> Ref:
    compute = opmath(x.dtype)
    at = _per_channel(cx, x, compute, mean.load, _deviations(var, compute, eps).load, weight, bias)
    d = cx.dtype
    return cx.stage(lambda i: cast(at(i), d))


def _batch_norm_evaluated(cx: Builder, x: Ref, weight: Any, bias: Any, mean: Ref, var: Ref, eps: float) -> tuple[Ref, ...]:
    """(y, mean, rstd): the statistics that it normalises with, or empty ones, as the device's kernel has them."""
    y = batch_norm_inference(cx, x, weight, bias, mean, var, eps)
    return (y, *_statistics(cx, cx.spec[1:3], mean, _deviations(var, opmath(x.dtype), eps)))


def batch_norm_training(cx: Builder, x: Ref, weight: Any, bias: Any, eps: float) -> tuple[Ref, Ref, Ref, Ref, Expr]:
    """(y, mean, rstd, sum of squared deviations: each of one number a channel in float64; count)."""
    compute = opmath(x.dtype)
    how = Split(x.shape, tuple(d for d in range(x.rank) if d != 1), True)
    if compute is dt.f32 and cx.device != "cpu":  # a pass over memory costs more than arithmetic
        mean, squares = moments_at_once(cx, how, x.load)
    else:
        mean, squares = moments(cx, how, lambda i: cast(x.load(i), compute), dt.f64)
    rstd = hold(cx, how.kept, dt.f64, lambda i: _rstd(squares.load(i), how.count, eps))

    def channel(ref: Ref) -> Ref:
        return ref.remap((x.shape[1],), lambda i: [i[0] if d == 1 else ZERO for d in range(x.rank)])

    means, rstds = channel(mean), channel(rstd)
    at = _per_channel(cx, x, compute, means.load, rstds.load, weight, bias)
    d = cx.dtype
    return cx.stage(lambda i: cast(at(i), d)), means, rstds, channel(squares), how.count


def _statistics(cx: Builder, specs: Any, *values: Ref | None) -> tuple[Ref, ...]:
    """Results of one number a channel; an empty one (inference) has no elements."""
    refs = []
    for spec, value in zip(specs, values, strict=True):
        d = ir_dtype(spec.dtype, cx.loc)
        if value is None or (spec.shape and is_zero(spec.shape[0])):
            refs.append(cx.stage(_casting(lambda _: Const(dt.i64, 0), d), spec.shape, d, spec.strides))
        else:
            refs.append(cx.stage(_casting(value.load, d), spec.shape, d, spec.strides))
    return tuple(refs)


def _moved(cx: Builder, running: Ref, new: Any, momentum: float) -> Ref:
    """(1 - momentum) * running + momentum * new."""

    def at(i: Index) -> Expr:
        m = Const(dt.f64, momentum)
        old = cast(running.load(i), dt.f64)
        return cast(op("add", op("mul", m, new(i)), op("mul", op("sub", Const(dt.f64, 1.0), m), old)), running.dtype)

    return hold(cx, running.shape, running.dtype, at)


def _unbiased(squares: Ref, count: Expr) -> Any:
    n = cast(count, dt.f64)
    return lambda i: op("div", squares.load(i), op("sub", n, Const(dt.f64, 1.0)))


@lowers("aten._native_batch_norm_legit_functional.default", "aten._batch_norm_with_update_functional.default")
def lower_batch_norm_functional(cx: Builder, x: Ref, weight: Any, bias: Any, mean: Ref, var: Ref, *rest: Any) -> tuple[Ref, ...]:
    """(y, mean, rstd, new running mean, new running variance)."""
    training, momentum, eps = rest if len(rest) == 3 else (True, *rest)
    with_reserve = len(cx.spec) == 6
    if not training:
        y, *stats = _batch_norm_evaluated(cx, x, weight, bias, mean, var, eps)
        moved = (mean, var)
    else:
        y, means, rstds, squares, count = batch_norm_training(cx, x, weight, bias, eps)
        stats = [*_statistics(cx, cx.spec[1:3], means, rstds)]
        moved = (_moved(cx, mean, means.load, momentum), _moved(cx, var, _unbiased(squares, count), momentum))
    reserve = _statistics(cx, cx.spec[3:4], None) if with_reserve else ()
    return (y, *stats, *reserve, *moved)


@lowers("aten._native_batch_norm_legit_no_training.default")
def lower_batch_norm_no_training(cx: Builder, x: Ref, weight: Any, bias: Any, mean: Ref, var: Ref, momentum: float, eps: float) -> Any:
    return _batch_norm_evaluated(cx, x, weight, bias, mean, var, eps)


@lowers("aten.native_batch_norm.default")
def lower_native_batch_norm(
    cx: Builder, x: Ref, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """In training with running statistics this one writes them, which a functional graph cannot hold."""
    if not training:
        return _batch_norm_evaluated(cx, x, weight, bias, mean, var, eps)
    if mean is not None or var is not None:
        return NotImplemented
    y, means, rstds, _squares, _count = batch_norm_training(cx, x, weight, bias, eps)
    return (y, *_statistics(cx, cx.spec[1:], means, rstds))


@lowers("aten._native_batch_norm_legit.no_stats")
def lower_batch_norm_no_stats(cx: Builder, x: Ref, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    y, means, rstds, _squares, _count = batch_norm_training(cx, x, weight, bias, eps)
    return (y, *_statistics(cx, cx.spec[1:], means, rstds))


@lowers("aten.batch_norm.default")
def lower_batch_norm(
    cx: Builder, x: Ref, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool = True
) -> Any:
    if not training:
        return batch_norm_inference(cx, x, weight, bias, mean, var, eps)
    if mean is not None or var is not None:
        return NotImplemented
    return batch_norm_training(cx, x, weight, bias, eps)[0]
