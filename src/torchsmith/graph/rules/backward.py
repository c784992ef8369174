"""Derivatives that autograd computes by operators of their own, written with ordinary operators; shapes of those that stay calls.

In: the operator's own arguments (tracing tensors). Out: tracing tensors. The formulas are the derivatives of the forward definitions in
torch's documentation; in float16 and bfloat16 they are computed in float32 and rounded once, as eager's kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..layout import contiguous_strides, format_strides, is_contiguous, is_shape, propagate_strides, same, suggest_format
from ..tracing import device_of, fresh, make, part, rule
from .create import copy_strides
from .nn import RESAMPLING, _pool, convolution_format, format_3d

aten = torch.ops.aten
Tensor = torch.Tensor
NARROW = (torch.float16, torch.bfloat16)
NONE, MEAN, SUM = 0, 1, 2


def _wide(*values: Any) -> Any:
    """Narrow floats in float32."""
    found = tuple(aten._to_copy.default(v, dtype=torch.float32) if isinstance(v, Tensor) and v.dtype in NARROW else v for v in values)
    return found[0] if len(found) == 1 else found


def _like(value: Tensor, model: Tensor) -> Tensor:
    return value if value.dtype == model.dtype else aten._to_copy.default(value, dtype=model.dtype)


def _reshaped(t: Tensor, shape: Sequence[Any]) -> Tensor:
    return (t if is_contiguous(t) else t.clone(memory_format=torch.contiguous_format)).view(shape)


def _contiguous(t: Tensor) -> Tensor:
    return _with_strides(t, contiguous_strides(tuple(t.shape)))


def _zero(model: Tensor) -> Tensor:
    return torch.zeros((), dtype=model.dtype)


Strides = Callable[[Tensor, Sequence[Tensor]], Sequence[Any]]  # of the result, as eager's kernel chooses them for these operands


def _as_listed(out: Tensor, tensors: Sequence[Tensor]) -> Sequence[Any]:
    """A tensor iterator over the gradient and the input."""
    return propagate_strides(tuple(out.shape), tensors[:2])


def _input_first(out: Tensor, tensors: Sequence[Tensor]) -> Sequence[Any]:
    return propagate_strides(tuple(out.shape), tensors[1::-1])


def _by_rows(out: Tensor, tensors: Sequence[Tensor]) -> Sequence[Any]:
    return contiguous_strides(tuple(out.shape))


def _like_grad(out: Tensor, tensors: Sequence[Tensor]) -> Sequence[Any]:
    return copy_strides(tensors[0], None)


def _like_input(out: Tensor, tensors: Sequence[Tensor]) -> Sequence[Any]:
    return copy_strides(tensors[1], None)


def _as_computed(out: Tensor, tensors: Sequence[Tensor]) -> Sequence[Any]:
    return out.stride()


def _with_strides(t: Tensor, strides: Sequence[Any]) -> Tensor:
    """`t` in memory with these strides, those of dimensions of one element too."""
    if all(same(a, b) for a, b in zip(t.stride(), strides, strict=True)):
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=device_of(t)).copy_(t)


def pointwise(*ops: Any, strides: Strides = _as_listed) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a formula on real tensors, which are widened for it; the result has the first tensor's dtype and these strides."""

    def add(formula: Callable[..., Any]) -> Callable[..., Any]:
        @part(*ops)
        def backward(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if any(not t.is_floating_point() for t in tensors):
                return NotImplemented
            wide = _wide(*args) if len(args) > 1 else (_wide(*args),)
            out = _like(formula(*wide, **dict(zip(kwargs, (_wide(v) for v in kwargs.values()), strict=True))), tensors[0])
            return _with_strides(out, strides(out, tensors))

        return formula

    return add


# ---------------------------------------------------------------- activation functions


@pointwise(aten.threshold_backward.default, strides=_input_first)
def threshold(grad: Tensor, x: Tensor, threshold: Any) -> Tensor:
    return torch.where(x <= threshold, _zero(grad), grad)


@pointwise(aten.logit_backward.default)
def logit(grad: Tensor, x: Tensor, eps: Any = None) -> Tensor:
    slope = grad / (x * (1 - x))
    if eps is not None and eps >= 0:
        return torch.where((x < eps) | (x > 1 - eps), _zero(grad), slope)
    steep = torch.where((x == 0) | (x == 1), grad * math.inf, slope)
    return torch.where((x < 0) | (x > 1), _zero(grad) + math.nan, steep)


@pointwise(aten.hardtanh_backward.default)
def hardtanh(grad: Tensor, x: Tensor, low: Any, high: Any) -> Tensor:
    return torch.where((x <= low) | (x >= high), _zero(grad), grad)


@pointwise(aten.gelu_backward.default)
def gelu(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        t = torch.tanh(beta * (x + kappa * x * x * x))
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (beta * (1 + 3 * kappa * x * x)))
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return grad * (cdf + x * (torch.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))))


@pointwise(aten.tanh_backward.default)
def tanh(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (1 - y * y)


@pointwise(aten.sigmoid_backward.default)
def sigmoid(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (1 - y) * y


@pointwise(aten.leaky_relu_backward.default, strides=_input_first)
def leaky_relu(grad: Tensor, x: Tensor, slope: Any, is_result: bool) -> Tensor:
    return torch.where(x > 0, grad, grad * slope)


@pointwise(aten.elu_backward.default)
def elu(grad: Tensor, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Tensor) -> Tensor:
    below = x + alpha * scale if is_result else torch.exp(x * input_scale) * (alpha * scale)
    return torch.where(x > 0, grad * scale, grad * input_scale * below)  # NaN stays


@pointwise(aten.silu_backward.default)
def silu(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@pointwise(aten.mish_backward.default)
def mish(grad: Tensor, x: Tensor) -> Tensor:
    s, t = torch.sigmoid(x), torch.tanh(torch.nn.functional.softplus(x))
    return grad * (t + x * s * (1 - t * t))


@pointwise(aten.softplus_backward.default)
def softplus(grad: Tensor, x: Tensor, beta: Any, threshold: Any) -> Tensor:
    return torch.where(x * beta > threshold, grad, grad * torch.sigmoid(x * beta))


@pointwise(aten.hardsigmoid_backward.default)
def hardsigmoid(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where((x > -3) & (x < 3), grad * (1.0 / 6), _zero(grad))


@pointwise(aten.hardswish_backward.default)
def hardswish(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= -3, _zero(grad), torch.where(x >= 3, grad, grad * (x / 3 + 0.5)))  # NaN stays


@pointwise(aten.log_sigmoid_backward.default, strides=_like_grad)
def log_sigmoid(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    z = torch.exp(-torch.abs(x))
    share = z / (1 + z)
    return grad * torch.where(x < 0, 1 - share, share)


@pointwise(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink(grad: Tensor, x: Tensor, lambd: Any) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), _zero(grad), grad)


@part(aten.glu_backward.default)
def glu(grad: Tensor, x: Tensor, dim: int) -> Any:
    if not x.is_floating_point():
        return NotImplemented
    half = x.shape[dim] // 2
    a, b = x.narrow(dim, 0, half), x.narrow(dim, half, half)
    g, a, b = _wide(grad, a, b)
    s = torch.sigmoid(b)
    return _contiguous(_like(torch.cat([s * g, (1 - s) * s * g * a], dim), x))


@part(aten._prelu_kernel_backward.default)
def prelu(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
    g, v, w = _wide(grad, x, weight)
    found = _like(torch.where(v > 0, g, w * g), x), _like(torch.where(v > 0, _zero(g), v * g), x)
    return tuple(_with_strides(t, _input_first(t, (grad, x))) for t in found)


@part(aten.native_dropout_backward.default)
def dropout(grad: Tensor, mask: Tensor, scale: float) -> Any:
    found = grad * mask * scale
    if device_of(grad).type == "cpu":
        return found
    if mask.dtype is not torch.bool or found.dtype is not grad.dtype:  # a kernel of floats
        raise RuntimeError(f"no gradient of dropout for {grad.dtype} and a mask of {mask.dtype}")
    return _with_strides(found, format_strides(tuple(grad.shape), suggest_format(grad))) if is_shape(found.shape, grad.shape) else found


# ---------------------------------------------------------------- softmax
def _check_softmax(grad: Tensor, input_dtype: torch.dtype) -> None:
    """A GPU's kernels widen halves of the gradient's float32 alone."""
    widened = grad.dtype is torch.float32 and input_dtype is torch.float16
    if device_of(grad).type != "cpu" and grad.dtype is not input_dtype and not widened:
        raise RuntimeError("expected input and grad types to match, or input to be at::Half and grad to be at::Float")


@part(aten._softmax_backward_data.default)
def softmax(grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    if not grad.is_floating_point():
        return NotImplemented
    _check_softmax(grad, input_dtype)
    g, p = _wide(grad, y)
    if device_of(grad).type == "cpu":
        found = (g - (g * p).sum(dim, keepdim=True)) * p
    else:
        if grad.dtype is not y.dtype:
            raise RuntimeError(f"expected scalar type {grad.dtype} but found {y.dtype}")
        product = _wide(grad * y)  # eager multiplies in a kernel of its own
        found = product - p * product.sum(dim, keepdim=True)
    return _contiguous(aten._to_copy.default(found, dtype=input_dtype))


@part(aten._log_softmax_backward_data.default)
def log_softmax(grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    if not grad.is_floating_point():
        return NotImplemented
    _check_softmax(grad, input_dtype)
    g, v = _wide(grad, y)
    return _contiguous(aten._to_copy.default(g - torch.exp(v) * g.sum(dim, keepdim=True), dtype=input_dtype))


# ---------------------------------------------------------------- losses


def _mean(value: Tensor, x: Tensor, reduction: int) -> Tensor:
    return value / x.numel() if reduction == MEAN else value


@pointwise(aten.mse_loss_backward.default, strides=_by_rows)
def mse_loss(grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    return _mean(2 * (x - y) * grad, x, reduction)


@pointwise(aten.smooth_l1_loss_backward.default, strides=_by_rows)
def smooth_l1_loss(grad: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    d = x - y
    slope = torch.sign(d) if beta == 0 else torch.where(d <= -beta, -1.0, torch.where(d >= beta, 1.0, d / beta))
    return _mean(slope * grad, x, reduction)


@pointwise(aten.huber_loss_backward.default, strides=_by_rows)
def huber_loss(grad: Tensor, x: Tensor, y: Tensor, reduction: int, delta: float) -> Tensor:
    d = x - y
    return _mean(torch.where(d <= -delta, -delta, torch.where(d >= delta, delta, d)) * grad, x, reduction)


@pointwise(aten.soft_margin_loss_backward.default, strides=_as_computed)
def soft_margin_loss(grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    z = torch.exp(-y * x)
    return _mean(-y * grad * z / (z + 1), x, reduction)


@pointwise(aten.binary_cross_entropy_backward.default, strides=_like_input)
def binary_cross_entropy(grad: Tensor, x: Tensor, y: Tensor, weight: Any = None, reduction: int = MEAN) -> Tensor:
    slope = grad * (x - y) / torch.clamp_min((1 - x) * x, 1e-12)
    return _mean(slope if weight is None else slope * weight, x, reduction)


def _nll(grad: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int, total: Tensor) -> Any:
    """-grad * weight[target] (over the sum of the weights that count, for the mean) where the class is the target's."""
    dim = 0 if x.dim() == 1 else 1
    g = grad / total if reduction == MEAN else grad
    if reduction == NONE:
        g = g.unsqueeze(dim) if x.dim() > 1 else g
    classes = torch.arange(x.shape[dim])
    if x.dim() > 2:
        classes = classes.view(-1, 1, 1)
    chosen = target.unsqueeze(dim) if x.dim() > 1 else target
    hit = (chosen == classes) & (chosen != ignore)
    if weight is not None:
        g = g * (weight.view(-1, 1, 1) if x.dim() > 2 else weight)
    return torch.where(hit, -g, _zero(g)).expand(x.shape)


part(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)(_nll)


# ---------------------------------------------------------------- normalisation


@part(aten.native_layer_norm_backward.default)
def layer_norm(
    grad: Tensor, x: Tensor, shape: Sequence[Any], mean: Tensor, rstd: Tensor, weight: Any, bias: Any, mask: Sequence[bool]
) -> Any:  # fmt: skip
    g, v, m, r, w = _wide(grad, x, mean, rstd, weight)
    first = x.dim() - len(shape)
    inner, outer = list(range(first, x.dim())), list(range(first))
    normal = (v - m) * r
    dx = dw = db = None
    if mask[0]:
        scaled = g if w is None else g * w
        dx = r * (scaled - scaled.mean(inner, keepdim=True) - normal * (scaled * normal).mean(inner, keepdim=True))
        dx = _contiguous(_like(dx, x))
    if mask[1] and weight is not None:
        dw = _like((g * normal).sum(outer) if outer else g * normal, weight)
    if mask[2] and bias is not None:
        db = _like(g.sum(outer) if outer else g, bias)
    return dx, dw, db


@part(aten.native_group_norm_backward.default)
def group_norm(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Any, n: Any, c: Any, area: Any, groups: int, mask: Sequence[bool]
) -> Any:  # fmt: skip
    g, v, m, r, w = _wide(grad, x, mean, rstd, weight)
    per = c // groups
    g4, v4 = (_reshaped(t, [n, groups, per, area]) for t in (g, v))
    normal = (v4 - m.view(n, groups, 1, 1)) * r.view(n, groups, 1, 1)
    dx = dw = db = None
    if mask[0]:
        scaled = g4 if w is None else g4 * w.view(1, groups, per, 1)
        inner = [2, 3]
        part4 = scaled - scaled.mean(inner, keepdim=True) - normal * (scaled * normal).mean(inner, keepdim=True)
        dx = _like((r.view(n, groups, 1, 1) * part4).view(x.shape), x)
        kept = suggest_format(x)
        dx = dx if kept is torch.contiguous_format else dx.clone(memory_format=kept)
    if mask[1]:
        dw = _like((g4 * normal).sum([0, 3]).view(-1), x if weight is None else weight)
    if mask[2]:
        db = _like(g4.sum([0, 3]).view(-1), x if weight is None else weight)
    return dx, dw, db


def _batch_norm(
    grad: Tensor, x: Tensor, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_invstd: Any, train: bool, eps: float,
    mask: Sequence[bool],
) -> Any:  # fmt: skip
    g, v, w = _wide(grad, x, weight)
    sums = [d for d in range(x.dim()) if d != 1]
    across = [1, -1] + [1] * (x.dim() - 2)
    mean, invstd = (save_mean, save_invstd) if train else (running_mean, torch.rsqrt(_wide(running_var) + eps))
    mean, invstd = (t.view(across) for t in _wide(mean, invstd))
    normal = (v - mean) * invstd
    kind = x if weight is None else weight
    db, dw = g.sum(sums, keepdim=True), (g * normal).sum(sums, keepdim=True)
    dx = None
    if mask[0]:
        count: Any = 1
        for d in sums:
            count = count * x.shape[d]
        factor = invstd if w is None else invstd * w.view(across)
        dx = (g - db / count - normal * (dw / count)) * factor if train else g * factor
        dx = _like(dx, x)
        kept = suggest_format(x)
        dx = dx.clone(memory_format=kept)
    return dx, _like(dw.view(-1), kind) if mask[1] else None, _like(db.view(-1), kind) if mask[2] else None


part(aten.native_batch_norm_backward.default)(_batch_norm)


@part(aten._weight_norm_interface.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """Directions of length one, and their lengths."""
    if v.dtype in NARROW or v.dtype != g.dtype:
        return NotImplemented
    norms = torch.linalg.vector_norm(v, 2, [d for d in range(v.dim()) if d != dim], True)
    return v * (g / norms), norms


@part(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> Any:
    if v.dtype in NARROW or v.dtype != g.dtype:
        return NotImplemented
    along = (grad * v).sum([d for d in range(v.dim()) if d != dim], True)
    return (g / norms) * (grad - v * (along / (norms * norms))), along / norms


# ---------------------------------------------------------------- tables and positions


@part(aten.embedding_dense_backward.default)
def embedding(grad: Tensor, indices: Tensor, num_weights: Any, padding_idx: int, scale_by_freq: bool) -> Any:
    if scale_by_freq or grad.dtype in NARROW:
        return NotImplemented
    width = grad.shape[-1]
    rows, flat = _reshaped(grad, [-1, width]), _reshaped(indices, [-1])
    if padding_idx >= 0:
        rows = torch.where((flat == padding_idx).unsqueeze(1), _zero(rows), rows)
    return torch.zeros((num_weights, width), dtype=grad.dtype).index_add(0, flat, rows)


def _to_places(grad: Tensor, x: Tensor, indices: Tensor, rank: int, keeps_format: bool = True) -> Tensor:
    """Each element of `grad` is added at its place in the image."""
    lead, count = list(x.shape[:-rank]), math.prod(grad.shape[-rank:])  # not -1: the batch may be empty
    flat = torch.zeros([*lead, math.prod(x.shape[-rank:])], dtype=grad.dtype)
    added = flat.scatter_add(-1, _reshaped(indices, [*lead, count]), _reshaped(grad, [*lead, count]))
    out = added.view(x.shape)
    kept = suggest_format(x) if keeps_format else torch.contiguous_format
    return out if kept is torch.contiguous_format else out.clone(memory_format=kept)


def _is_gathered(grad: Tensor, dilation: Any) -> bool:
    """Is it the images' elements that look for their windows (lower/pool.py)? Many threads could add to one element only in turns."""
    gaps = dilation if isinstance(dilation, (tuple, list)) else (dilation,)
    return device_of(grad).type != "cpu" and all(type(g) is int and g == 1 for g in gaps)


def _check_pooled(sizes: Sequence[Any], *tensors: Tensor) -> None:
    for t in tensors:
        if t.dim() != len(sizes) or any(a != b for a, b in zip(t.shape, sizes, strict=True)):
            raise RuntimeError(f"Expected a tensor of size {list(sizes)}, as pooling makes it, but got {list(t.shape)}")


@part(aten.max_pool2d_with_indices_backward.default)
def max_pool2d(grad: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: Tensor) -> Any:
    _check_pooled(_pool(x, 2, kernel, stride, padding, dilation, ceil), grad, indices)
    return NotImplemented if grad.dtype in NARROW or _is_gathered(grad, dilation) else _to_places(grad, x, indices, 2)


@part(aten.max_pool3d_with_indices_backward.default)
def max_pool3d(grad: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: Tensor) -> Any:
    _check_pooled(_pool(x, 3, kernel, stride, padding, dilation, ceil), grad, indices)
    return NotImplemented if grad.dtype in NARROW or _is_gathered(grad, dilation) else _to_places(grad, x, indices, 3)


@part(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d(grad: Tensor, x: Tensor, indices: Tensor) -> Any:
    return NotImplemented if grad.dtype in NARROW else _to_places(grad, x, indices, 2)


@part(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d(grad: Tensor, x: Tensor, indices: Tensor) -> Any:
    return NotImplemented if grad.dtype in NARROW else _to_places(grad, x, indices, 3, keeps_format=False)


def _adaptive_avg(grad: Tensor, x: Tensor, rank: int) -> Any:
    """Where windows are equally long, each element gets its window's share."""
    sizes = list(zip(x.shape[-rank:], grad.shape[-rank:], strict=True))
    if any(type(m) is not int or (m != 1 and (type(n) is not int or n % m)) for n, m in sizes):
        return NotImplemented
    lead = list(x.shape[:-rank])
    spread = [s for n, m in sizes for s in (m, n // m if m != 1 else n)]
    area: Any = 1
    for s in spread[1::2]:
        area = area * s
    shares = (grad / area).view(lead + [s for _, m in sizes for s in (m, 1)]).expand(lead + spread)
    out = shares.clone(memory_format=torch.contiguous_format).view(x.shape)
    return out.clone(memory_format=suggest_format(x)) if rank == 2 else out


@part(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d(grad: Tensor, x: Tensor) -> Any:
    return _adaptive_avg(grad, x, 2)


@part(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d(grad: Tensor, x: Tensor) -> Any:
    return _adaptive_avg(grad, x, 3)


@part(aten.select_backward.default)
def select(grad: Tensor, sizes: Sequence[Any], dim: int, index: Any) -> Tensor:
    return aten.select_scatter.default(torch.zeros(sizes, dtype=grad.dtype), grad, dim, index)  # type: ignore[no-any-return]


@part(aten.slice_backward.default)
def slice_(grad: Tensor, sizes: Sequence[Any], dim: int, start: Any, end: Any, step: Any) -> Tensor:
    return aten.slice_scatter.default(torch.zeros(sizes, dtype=grad.dtype), grad, dim, start, end, step)  # type: ignore[no-any-return]


@part(aten.diagonal_backward.default)
def diagonal(grad: Tensor, sizes: Sequence[Any], offset: int, dim1: int, dim2: int) -> Tensor:
    return aten.diagonal_scatter.default(torch.zeros(sizes, dtype=grad.dtype), grad, offset, dim1, dim2)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- calls: shapes only


@part(aten.convolution_backward.default)
def convolution_bias(grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> Any:
    """Each gradient alone: the bias's is a sum, which of the others are products and which calls is decided where they are lowered."""
    *how, mask = rest
    if (sum(mask) == 1 and not mask[2]) or grad.dtype in NARROW:
        return NotImplemented
    db = grad.sum([d for d in range(grad.dim()) if d != 1]) if mask[2] else None
    dx = aten.convolution_backward.default(grad, input, weight, None, *how, [True, False, False])[0] if mask[0] else None
    dw = aten.convolution_backward.default(grad, input, weight, None, *how, [False, True, False])[1] if mask[1] else None
    return dx, dw, db


@rule(aten.convolution_backward.default)
def convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    kept, channels = convolution_format(input, weight) if weight.dim() > 3 else torch.contiguous_format, grad.shape[1]
    if weight.dim() == 5 and kept is not torch.contiguous_format:
        bias = None if not bias_sizes else fresh(bias_sizes, weight.dtype)
        kept = format_3d(input, weight, bias, (stride, padding, dilation, transposed, output_padding, groups))
    return (
        fresh(input.shape, input.dtype, kept) if mask[0] else None,
        fresh(weight.shape, weight.dtype, kept) if mask[1] else None,
        fresh((channels,), grad.dtype) if mask[2] else None,
    )


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    """Gradients lie as (batch, row, head, column), seen as (batch, head, row, column)."""

    def like(t: Tensor) -> Tensor:
        b, h, n, d = t.shape
        return make((b, h, n, d), (n * h * d, d, h * d, 1), t.dtype)

    return like(query), like(key), like(value)


def _same_shape(position: int, keeps_format: bool, *ops: Any) -> None:
    def shape(*args: Any, **kwargs: Any) -> Tensor:
        model: Tensor = args[position]
        return fresh(model.shape, args[0].dtype, suggest_format(model) if keeps_format else torch.contiguous_format)

    rule(*ops)(shape)


_same_shape(
    1, True,
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default, aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default, aten.adaptive_max_pool2d_backward.default,
)  # fmt: skip
_same_shape(
    1, False,
    aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d_backward.default, aten.adaptive_max_pool3d_backward.default,
    aten.reflection_pad1d_backward.default, aten.replication_pad1d_backward.default,
    aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default, aten.rrelu_with_noise_backward.default,
    aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default, aten._pdist_backward.default,
    aten._dirichlet_grad.default,
)  # fmt: skip
_same_shape(
    1, True,
    aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default,
)  # fmt: skip


@rule(aten.reflection_pad3d_backward.default)
def reflection_pad3d(grad: Tensor, x: Tensor, padding: Any) -> Tensor:
    return fresh(x.shape, grad.dtype, suggest_format(x) if device_of(x).type == "cpu" else torch.contiguous_format)


def _resampled(keeps_format: bool, *ops: Any) -> None:
    def shape(grad: Tensor, output_size: Any, input_size: Sequence[Any], *rest: Any) -> Tensor:
        return fresh(tuple(input_size), grad.dtype, suggest_format(grad) if keeps_format else torch.contiguous_format)

    rule(*ops)(shape)


for _name in RESAMPLING:
    _resampled("bicubic" not in _name and not ("nearest" in _name and "3d" in _name), getattr(aten, f"{_name}_backward").default)


@rule(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def ctc_loss(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return fresh(log_probs.shape, log_probs.dtype)


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler(grad: Tensor, input: Tensor, grid: Tensor, mode: int, padding: int, align: bool, mask: Sequence[bool]) -> Any:
    return fresh(input.shape, input.dtype) if mask[0] else None, fresh(grid.shape, grid.dtype)


@rule(aten.embedding_dense_backward.default)
def embedding_rows(grad: Tensor, indices: Tensor, num_weights: Any, *rest: Any) -> Tensor:
    return fresh((num_weights, grad.shape[-1]), grad.dtype)


@rule(aten._embedding_bag_dense_backward.default)
def bag_rows(
    grad: Tensor, indices: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor, num_weights: Any, *rest: Any
) -> Tensor:
    return fresh((num_weights, grad.shape[1]), grad.dtype)


@rule(aten._embedding_bag_backward.default)
def bag_rows_if_dense(
    grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor, num_weights: Any,
    scale_grad_by_freq: bool, mode: int, sparse: bool, *rest: Any,
) -> Any:  # fmt: skip
    return NotImplemented if sparse else fresh((num_weights, grad.shape[1]), grad.dtype)


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def bag_weights(grad: Tensor, weight: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    return fresh(indices.shape, grad.dtype)


@rule(aten._cdist_backward.default)
def cdist(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    return fresh(x1.shape, x1.dtype)


@rule(aten.unfold_backward.default)
def unfold(grad: Tensor, sizes: Sequence[Any], dim: int, size: Any, step: Any) -> Tensor:
    """What no unfold makes is refused: eager's kernel would read beside it."""
    shape = list(sizes)
    if not -len(shape) <= dim < max(len(shape), 1) or step < 1:
        raise RuntimeError(f"unfold_backward of dimension {dim} of {shape} with step {step}")
    if shape:
        windows = (shape[dim] - size) // step + 1
        shape[dim] = windows
        _check_pooled([*shape, size], grad)
    return fresh(tuple(sizes), grad.dtype)


@rule(aten.masked_scatter_backward.default)
def masked_scatter(grad: Tensor, mask: Tensor, sizes: Sequence[Any]) -> Tensor:
    return fresh(tuple(sizes), grad.dtype)


@rule(aten._standard_gamma_grad.default)
def gamma(self: Tensor, output: Tensor) -> Tensor:
    return make(self.shape, propagate_strides(tuple(self.shape), [self, output]), self.dtype)


@rule(aten._masked_softmax_backward.default)
def masked_softmax(grad: Tensor, output: Tensor, *rest: Any) -> Tensor:
    return fresh(grad.shape, grad.dtype)
