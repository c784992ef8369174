"""Activation functions. In: a Ref and numbers; out: one pointwise stage."""

from __future__ import annotations

import math
import struct
from typing import Any

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, op, select
from .core import Builder
from .numerics import cast, ir_dtype, opmath
from .pointwise import c, map_elements, rows
from .ref import Index, Ref, size
from .table import lowers
from .views import slice_dim, wrap_dim

AWAY = 15.5  # exp(-AWAY) is as good as a float32


def relu(x: Expr) -> Expr:
    return op("max", x, c(x, 0))


def silu(x: Expr) -> Expr:
    """x / (1 + exp(-x)). No part is denormal (arithmetic with those takes 200 cycles), as exp(-x) would be beside a large x. Below -8
    both parts are smaller by one factor, such that the lower one is infinite just where the result would be denormal: there it is -0."""
    narrow = x.dtype.itemsize <= 4
    # exp(-x - shift) is infinite from where x exp(x) is no normal number; exp(-shift)
    shift, factor = (3.133941650390625, 0.04354581614749458) if narrow else (5.185944344582481, 0.005594650841692258)
    low, one = op("lt", x, c(x, -8.0)), c(x, 1.0)
    scale = select(low, c(x, factor), one)
    e = op("exp", op("sub", select(low, c(x, -shift), c(x, 0.0)), op("fmin", x, c(x, 20.0 if narrow else 40.0))))
    return op("div", op("mul", x, scale), op("add", e, scale))


def mish(x: Expr) -> Expr:
    """x tanh(log(1 + e)) = x n / (n + 2) with e = exp(x), n = e (e + 2); from 20 (in float32) on the factor is 1. Below -86, where it is
    e, it is kept from being denormal."""
    low = op("lt", x, c(x, -86.0))
    e = op("exp", op("add", op("min", x, c(x, 20.0 if x.dtype.itemsize <= 4 else 40.0)), select(low, c(x, AWAY), c(x, 0.0))))
    n = op("fma", e, e, op("add", e, e))  # one rounding less than a product of a sum
    return op("mul", op("mul", x, select(low, c(x, math.exp(-AWAY)), c(x, 1.0))), op("div", n, op("add", n, c(x, 2.0))))


def clipped(x: Expr) -> Expr:
    """min(max(x + 3, 0), 6)."""
    return op("min", op("max", op("add", x, c(x, 3.0)), c(x, 0.0)), c(x, 6.0))


rows(
    {
        "relu": relu,
        "relu6": lambda x: op("min", relu(x), c(x, 6)),
        "silu": silu,
        "mish": mish,
        "hardswish": lambda x: op("div", op("mul", x, clipped(x)), c(x, 6.0)),
        "hardsigmoid": lambda x: op("div", clipped(x), c(x, 6.0)),
    }
)


def gelu_exact(e: Expr) -> Expr:
    return op("gelu", e)


def gelu_tanh(x: Expr) -> Expr:
    """x (1 + tanh(t / 2)) / 2 with t = x (A + B x^2): x / (1 + e) or x e / (1 + e), e = exp(-|t|).

    What the roundings of t lose is put back into e, for an exponential makes it large.
    """
    narrow = x.dtype.itemsize <= 4
    a, b = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
    high, low = struct.unpack("2f", struct.pack("2f", a, b)) if narrow else (a, b)
    r = op("min", op("abs", x), c(x, 16.0 if narrow else 64.0))
    square = op("mul", r, r)
    lost = op("fma", r, r, op("neg", square))
    scaled = op("mul", square, c(x, b))
    w = op("add", scaled, c(x, high))
    back = op("sub", w, scaled)
    rest = op("add", op("sub", scaled, op("sub", w, back)), op("sub", c(x, high), back))
    rest = op("add", rest, op("fma", square, c(x, b), op("neg", scaled)))
    rest = op("add", rest, op("fma", lost, c(x, b), op("fma", square, c(x, b - low), c(x, a - high))))
    t = op("mul", r, w)
    less = op("fma", r, rest, op("fma", r, w, op("neg", t)))
    far = op("gt", t, c(x, 86.0))  # where e is nothing beside 1, and would be denormal
    e = op("exp", op("sub", select(far, c(x, AWAY), c(x, 0.0)), t))
    e = op("fma", e, op("neg", less), e)
    below = op("mul", op("mul", x, select(far, c(x, math.exp(-AWAY)), c(x, 1.0))), e)
    return op("div", select(op("lt", x, c(x, 0.0)), below, x), op("add", c(x, 1.0), e))


@lowers("aten.gelu.default")
def gelu(cx: Builder, x: Ref, approximate: str = "none") -> Ref:
    return map_elements(cx, gelu_tanh if approximate == "tanh" else gelu_exact, x)


def softplus_of(e: Expr, beta: Any, threshold: Any) -> Expr:
    scaled = op("mul", e, c(e, beta)) if beta != 1 else e
    soft = op("log1p", op("exp", scaled))
    return select(op("gt", scaled, c(e, threshold)), e, op("div", soft, c(e, beta)) if beta != 1 else soft)


@lowers("aten.softplus.default")
def softplus(cx: Builder, x: Ref, beta: Any = 1, threshold: Any = 20) -> Ref:
    return map_elements(cx, lambda e: softplus_of(e, beta, threshold), x)


def log_sigmoid_of(e: Expr) -> Expr:
    return op("sub", op("min", e, c(e, 0.0)), op("log1p", op("exp", op("neg", op("abs", e)))))


def elu_of(cx: Builder, x: Ref, alpha: Any, scale: Any, input_scale: Any) -> Ref:
    """x * scale above 0, expm1(x * input_scale) * alpha * scale below."""

    def value(e: Expr) -> Expr:
        above = op("mul", e, c(e, scale)) if scale != 1 else e
        inner = op("mul", e, c(e, input_scale)) if input_scale != 1 else e
        return select(op("gt", e, c(e, 0.0)), above, op("mul", op("expm1", inner), c(e, factor)))

    one = Const(dt.f64, 1.0)
    varies = isinstance(alpha, Expr) or isinstance(scale, Expr)
    factor = op("mul", c(one, alpha), c(one, scale)) if varies else alpha * scale
    return map_elements(cx, value, x)


@lowers("aten.elu.default")
def elu(cx: Builder, x: Ref, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Ref:
    return elu_of(cx, x, *(v if isinstance(v, Expr) else float(v) for v in (alpha, scale, input_scale)))


@lowers("aten.celu.default")
def celu(cx: Builder, x: Ref, alpha: Any = 1) -> Ref:
    return elu_of(cx, x, float(alpha), 1.0, 1.0 / float(alpha))


@lowers("aten.selu.default")
def selu(cx: Builder, x: Ref) -> Ref:
    return elu_of(cx, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)


@lowers("aten.leaky_relu.default")
def leaky_relu(cx: Builder, x: Ref, slope: Any = 0.01) -> Ref:
    return map_elements(cx, lambda e: select(op("gt", e, c(e, 0.0)), e, op("mul", e, c(e, slope))), x)


@lowers("aten.rrelu_with_noise.default")
def rrelu(cx: Builder, x: Ref, noise: Ref, low: Any = 0.125, high: Any = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    return NotImplemented if training else leaky_relu(cx, x, (float(low) + float(high)) / 2)


@lowers("aten._prelu_kernel.default")
def prelu(cx: Builder, x: Ref, weight: Ref) -> Ref:
    return map_elements(cx, lambda e, w: select(op("gt", e, c(e, 0.0)), e, op("mul", w, e)), x, weight)


@lowers("aten.threshold.default")
def threshold(cx: Builder, x: Ref, at: Any, value: Any) -> Ref:
    return map_elements(cx, lambda e, t, v: select(op("le", e, t), v, e), x, at, value, exact=True)


@lowers("aten.hardshrink.default")
def hardshrink(cx: Builder, x: Ref, width: Any = 0.5) -> Ref:
    def value(e: Expr, w: Expr) -> Expr:
        return select(op("and", op("ge", e, op("neg", w)), op("le", e, w)), c(e, 0.0), e)

    return map_elements(cx, value, x, width)


@lowers("aten.softshrink.default")
def softshrink(cx: Builder, x: Ref, width: Any = 0.5) -> Ref:
    """Moved towards 0 by `width`; NaN stays NaN."""

    def value(e: Expr, w: Expr) -> Expr:
        inside = select(op("lt", e, op("neg", w)), op("add", e, w), op("mul", e, c(e, 0.0)))
        return select(op("gt", e, w), op("sub", e, w), inside)

    return map_elements(cx, value, x, width, exact=True)


@lowers("aten.glu.default")
def glu(cx: Builder, x: Ref, dim: int = -1) -> Ref:
    dim = wrap_dim(dim, x.rank)
    half = cx.shape[dim]
    left, right = slice_dim(x, dim, size(0), half), slice_dim(x, dim, half, half)
    return map_elements(cx, lambda a, b: op("mul", a, op("sigmoid", b)), left, right)


@lowers("aten.log_sigmoid_forward.default")
def log_sigmoid_forward(cx: Builder, x: Ref) -> tuple[Ref, ...]:
    """(min(x, 0) - log1p(exp(-|x|)), exp(-|x|))."""
    compute = opmath(x.dtype)

    def decay(i: Index) -> Expr:
        return op("exp", op("neg", op("abs", cast(x.load(i), compute))))

    def value(i: Index) -> Expr:
        e = cast(x.load(i), compute)
        return cast(op("sub", op("min", e, c(e, 0.0)), op("log1p", decay(i))), x.dtype)

    out, buffer = cx.spec
    y = cx.stage(value, out.shape, ir_dtype(out.dtype), out.strides)
    if len(buffer.shape) != len(out.shape):
        return y, cx.stage(lambda i: Const(x.dtype, 0), buffer.shape, ir_dtype(buffer.dtype), buffer.strides)
    return y, cx.stage(lambda i: cast(decay(i), x.dtype), buffer.shape, ir_dtype(buffer.dtype), buffer.strides)


@lowers("aten.log_sigmoid.default")
def log_sigmoid(cx: Builder, x: Ref) -> Ref:
    return map_elements(cx, log_sigmoid_of, x)
