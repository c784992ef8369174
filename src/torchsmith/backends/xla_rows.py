"""JAX rows for ATen operators that torchax's table lacks or answers otherwise: attention, batch norms, and derivatives.

In: JAX arrays and plain numbers, as the operator's schema has them. Out: JAX arrays. Derivatives of operators that XLA knows are JAX's own
(jax.vjp of the forward row); the others are written out.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import operator
import re
import sys
import types
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ..ir.rows import rows
from .plain import numbers

aten = torch.ops.aten
ROWS: dict[Any, Callable[..., Any]] = {}
Array = Any


row = rows(ROWS, "row")  # what operators are in JAX


def _jax() -> Any:
    return import_module("jax")


def _np() -> Any:
    return import_module("jax.numpy")


_NAMES = {torch.bool: "bool_", torch.bfloat16: "bfloat16"}


def dtype_of(dtype: torch.dtype) -> Any:
    return _np().dtype(getattr(_np(), _NAMES.get(dtype, str(dtype).removeprefix("torch."))))


def as_planned(value: Any, spec: Any) -> Any:
    """`value` with the dtype that eager gives it. Raises ValueError where its shape is another."""
    if isinstance(spec, tuple):
        return tuple(as_planned(v, s) for v, s in zip(value, spec, strict=False))
    if spec is None or not hasattr(spec, "shape"):
        return value
    value = _np().asarray(value)
    if tuple(value.shape) != numbers(spec.shape):
        raise ValueError(f"a row gives {tuple(value.shape)} instead of {numbers(spec.shape)}")
    return value.astype(dtype_of(spec.dtype))


@cache
def table() -> dict[Any, Any]:
    """torchax's rows: operator (or packet of overloads) -> function of JAX arrays.

    Importing torchax itself would rename a device of the whole process; its table is loaded without that, and leaves nothing in
    sys.modules. torchax names some overloads that newer torch versions no longer have: they get placeholders, and the import is tried
    again.
    """
    if "torchax" in sys.modules:
        return _rows()
    spec = importlib.util.find_spec("torchax")
    if spec is None:
        raise ImportError("torchax is not installed")
    try:
        for _ in range(100):
            sys.modules["torchax"] = package = types.ModuleType("torchax")
            package.__path__ = list(spec.submodule_search_locations or ())
            try:
                return _rows()
            except AttributeError as error:
                named = re.search(r"underlying op of 'aten\.(\w+)' has no overload name '(\w+)'", str(error))
                if named is None:
                    raise
                setattr(getattr(torch.ops.aten, named[1]), named[2], object())
                _forget()
        raise ImportError("torchax does not fit this version of torch")
    finally:
        _forget()


def _rows() -> dict[Any, Any]:
    import_module("torchax.ops.jaten")
    registry = import_module("torchax.ops.ops_registry").all_aten_ops
    return {op: row.func for op, row in registry.items() if row.is_jax_function and not row.needs_env}


def _forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "torchax"]:
        del sys.modules[name]


def kernel_of(target: Any) -> Callable[..., Any] | None:
    """What computes `target` on JAX arrays; our rows come first."""
    if target is operator.getitem:
        return operator.getitem
    found = ROWS.get(target)
    if found is None:
        rows = table()
        found = rows.get(target) or rows.get(getattr(target, "overloadpacket", None))
    return found


def _forward(op: Any) -> Callable[..., Any]:
    found = kernel_of(op)
    if found is None:
        raise NotImplementedError(f"{op} has no row")
    return found


def _pull(forward: Callable[..., Array], grad: Array, *at: Array) -> tuple[Array, ...]:
    """What `grad` of forward(*at) gives for each of `at`."""
    _, back = _jax().vjp(forward, *at)
    return tuple(back(grad))


# ---------------------------------------------------------------- attention


def _scores(q: Array, k: Array, mask: Array | None, causal: bool, scale: float | None) -> Array:
    np = _np()
    s = np.einsum("...qe,...ke->...qk", q, k).astype(np.promote_types(q.dtype, np.float32))
    s = s * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == np.bool_ else s + mask
    return s


def _softmax(x: Array, dim: int) -> Array:
    """0 where a whole line is masked out, in derivatives too."""
    np = _np()
    dead = (x == -np.inf).all(dim, keepdims=True)
    return np.where(dead, 0, _jax().nn.softmax(np.where(dead, 0, x), axis=dim))


def _attention(q: Array, k: Array, v: Array, mask: Array | None, causal: bool, scale: float | None) -> Array:
    weights = _softmax(_scores(q, k, mask, causal, scale), -1)
    return _np().einsum("...qk,...ke->...qe", weights.astype(v.dtype), v)


@row(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(
    q: Array, k: Array, v: Array, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Array = None, scale: Any = None
) -> Any:
    if dropout_p:
        raise NotImplementedError("dropout inside of attention")
    scores = _scores(q, k, attn_mask, is_causal, scale)
    return _attention(q, k, v, attn_mask, is_causal, scale), _jax().nn.logsumexp(scores, axis=-1)


@row(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(
    grad: Array, q: Array, k: Array, v: Array, out: Array, logsumexp: Array, dropout_p: float, is_causal: bool, *,
    attn_mask: Array = None, scale: Any = None,
) -> Any:  # fmt: skip
    return _pull(lambda a, b, c: _attention(a, b, c, attn_mask, is_causal, scale), grad, q, k, v)


@row(aten._safe_softmax.default)
def safe_softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    """What attention with dropout is made of."""
    return _softmax(x if dtype is None else x.astype(dtype_of(dtype)), dim)


# ---------------------------------------------------------------- norms


def _over(x: Array, channels: Array) -> Array:
    return channels.reshape((1, -1) + (1,) * (x.ndim - 2))


@row(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, training: bool, momentum: float, eps: float
) -> Any:
    """Result, saved mean and inverse deviation, and what the running statistics become (variance over n - 1)."""
    np = _np()
    axes, wide = (0, *range(2, x.ndim)), np.promote_types(x.dtype, np.float32)
    count = x.size // x.shape[1]
    mean, var = (x.astype(wide).mean(axes), x.astype(wide).var(axes)) if training else (running_mean, running_var)
    invstd = 1 / np.sqrt(var + eps)
    y = (x - _over(x, mean)) * _over(x, invstd)
    y = y if weight is None else y * _over(x, weight)
    y = y if bias is None else y + _over(x, bias)
    if not training:
        return y, np.zeros((0,), wide), np.zeros((0,), wide), running_mean, running_var
    new_mean = (1 - momentum) * running_mean + momentum * mean
    return y, mean, invstd, new_mean, (1 - momentum) * running_var + momentum * var * (count / max(count - 1, 1))


@row(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad: Array, x: Array, weight: Array, mean: Array, var: Array, save_mean: Array, save_invstd: Array, train: bool, eps: float, mask: Any
) -> Any:
    np = _np()
    axes = (0, *range(2, x.ndim))
    count = x.size // x.shape[1]
    mean = save_mean if train else mean
    invstd = save_invstd if train else 1 / np.sqrt(var + eps)
    wide = x.astype(invstd.dtype)
    g, centred = grad.astype(invstd.dtype), wide - _over(x, mean)
    sum_g, dot = g.sum(axes), (g * centred).sum(axes)
    scale = invstd if weight is None else invstd * weight
    if train:
        g = g - _over(x, sum_g / count) - centred * _over(x, dot * invstd * invstd / count)
    return g * _over(x, scale), dot * invstd, sum_g


@row(aten.native_layer_norm_backward.default)
def layer_norm_backward(grad: Array, x: Array, shape: Any, mean: Array, rstd: Array, weight: Array, bias: Array, mask: Any) -> Any:
    np = _np()
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    outer = tuple(range(x.ndim - len(shape)))
    g, hat = grad.astype(rstd.dtype), (x.astype(rstd.dtype) - mean) * rstd
    scaled = g if weight is None else g * weight
    n = math.prod(shape)
    dx = (scaled - scaled.sum(inner, keepdims=True) / n - hat * (scaled * hat).sum(inner, keepdims=True) / n) * rstd
    nothing = np.zeros(tuple(shape), rstd.dtype)
    return dx, (g * hat).sum(outer) if mask[1] else nothing, g.sum(outer) if mask[2] else nothing


# ---------------------------------------------------------------- convolutions and pools

TAPS = 64  # a kernel of more elements is left to XLA's convolution


@row(aten.convolution.default)
def convolution(
    x: Array, weight: Array, bias: Array | None, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
    groups: int,
) -> Array:  # fmt: skip
    """XLA's processors run convolutions in groups, and their gradients still more, up to 300 times slower than sums of products."""
    simple = not transposed and groups > 1 and x.ndim == weight.ndim and math.prod(weight.shape[2:]) <= TAPS
    if simple and 0 not in (*x.shape, *weight.shape) and _jax().default_backend() == "cpu":
        out = _by_taps(x, weight, *(list(v) * (weight.ndim - 2 if len(v) == 1 else 1) for v in (stride, padding, dilation)), groups=groups)
        return out if bias is None else out + bias.reshape(-1, *[1] * (weight.ndim - 2))
    if transposed and groups > 1:  # torchax's row takes the inputs of a group, then the outputs of all groups
        parts = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        weight = parts.swapaxes(0, 1).reshape(weight.shape)
    return table()[aten.convolution](x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _by_taps(x: Array, weight: Array, stride: Any, padding: Any, dilation: Any, *, groups: int) -> Array:
    """A convolution as a sum over the kernel's elements: products of channels with shifted images."""
    np, outs, kernel = _np(), weight.shape[0], weight.shape[2:]
    wide = np.promote_types(x.dtype, np.float32) if np.issubdtype(x.dtype, np.floating) else x.dtype
    images = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding))).astype(wide)
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(images.shape[2:], kernel, stride, dilation, strict=True)]
    images = images.reshape(x.shape[0], groups, -1, *images.shape[2:])
    factors = weight.astype(wide).reshape(groups, outs // groups, -1, *kernel)
    total: Array = 0
    for tap in itertools.product(*map(range, kernel)):
        cut = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, s, n in zip(tap, dilation, stride, sizes, strict=True))
        part, factor = images[:, :, :, *cut], factors[:, :, :, *tap]
        if factor.shape[2] == 1:  # one input channel per group: nothing to sum
            total = total + part * factor.reshape(groups, -1, *[1] * len(kernel))
        else:
            total = total + np.einsum("goc,ngcp->ngop", factor, part.reshape(*part.shape[:3], -1))
    return total.reshape(x.shape[0], outs, *sizes).astype(x.dtype)


@row(aten.convolution_backward.default)
def convolution_backward(
    grad: Array, x: Array, weight: Array, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, mask: Any,
) -> Any:  # fmt: skip
    forward = _forward(aten.convolution.default)
    dx, dw = _pull(
        lambda a, w: forward(a, w, None, stride, padding, dilation, transposed, output_padding, groups), grad, x, weight
    )  # fmt: skip
    return dx, dw, grad.sum((0, *range(2, grad.ndim)))


@row(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    grad: Array, x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: Array
) -> Array:
    np = _np()
    planes = math.prod(x.shape[:-2])
    flat = np.zeros((planes, x.shape[-2] * x.shape[-1]), grad.dtype)
    at = indices.reshape(planes, -1)
    return flat.at[np.arange(planes)[:, None], at].add(grad.reshape(planes, -1)).reshape(x.shape)


@row(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(grad: Array, x: Array, *geometry: Any) -> Array:
    return _pull(lambda a: _forward(aten.avg_pool2d.default)(a, *geometry), grad, x)[0]


@row(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(grad: Array, x: Array) -> Array:
    return _pull(lambda a: _forward(aten._adaptive_avg_pool2d.default)(a, grad.shape[-2:]), grad, x)[0]


# ---------------------------------------------------------------- pointwise derivatives


@row(aten.threshold_backward.default)
def threshold_backward(grad: Array, x: Array, threshold: Any) -> Array:
    return _np().where(x <= threshold, 0, grad)


@row(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Array, x: Array, low: Any, high: Any) -> Array:
    return _np().where((x <= low) | (x >= high), 0, grad)


@row(aten.gelu_backward.default)
def gelu_backward(grad: Array, x: Array, *, approximate: str = "none") -> Array:
    return _pull(lambda a: _jax().nn.gelu(a, approximate=approximate == "tanh"), grad, x)[0]


@row(aten.tanh_backward.default)
def tanh_backward(grad: Array, out: Array) -> Array:
    return grad * (1 - out * out)


@row(aten.sigmoid_backward.default)
def sigmoid_backward(grad: Array, out: Array) -> Array:
    return grad * out * (1 - out)


@row(aten.silu_backward.default)
def silu_backward(grad: Array, x: Array) -> Array:
    return _pull(_jax().nn.silu, grad, x)[0]


@row(aten.native_dropout_backward.default)
def dropout_backward(grad: Array, mask: Array, scale: float) -> Array:
    return grad * mask * scale


# ---------------------------------------------------------------- losses and lookups


@row(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Array, out: Array, dim: int, dtype: Any) -> Array:
    return grad - _np().exp(out) * grad.sum(dim, keepdims=True)


@row(aten._softmax_backward_data.default)
def softmax_backward(grad: Array, out: Array, dim: int, dtype: Any) -> Array:
    new = grad * out
    return new - out * new.sum(dim, keepdims=True)


def _kept(x: Array, target: Array, weight: Array | None, ignore: int) -> tuple[Array, Array]:
    """Per row: a class that exists, and what its loss weighs (0 where it is ignored)."""
    np = _np()
    here = target != ignore
    safe = np.where(here, target, 0)
    return safe, np.where(here, np.ones((), x.dtype) if weight is None else weight[safe], 0).astype(x.dtype)


@row(aten.nll_loss_forward.default)
def nll_loss_forward(x: Array, target: Array, weight: Array | None, reduction: int, ignore: int) -> Any:
    np = _np()
    safe, w = _kept(x, target, weight, ignore)
    axis = x.ndim - 1
    loss = -np.take_along_axis(x, np.expand_dims(safe, axis), axis).squeeze(axis) * w
    total = w.sum()
    if reduction == 0:
        return loss, np.zeros((), x.dtype)
    return (loss.sum() / total if reduction == 1 else loss.sum()), total


@row(aten.nll_loss_backward.default)
def nll_loss_backward(
    grad: Array, x: Array, target: Array, weight: Array | None, reduction: int, ignore: int, total_weight: Array
) -> Array:
    np = _np()
    safe, w = _kept(x, target, weight, ignore)
    g = -w * (grad / total_weight if reduction == 1 else grad)
    return np.where(np.arange(x.shape[-1]) == np.expand_dims(safe, -1), np.expand_dims(g, -1), 0)


@row(aten.embedding_dense_backward.default)
def embedding_dense_backward(grad: Array, indices: Array, count: int, padding_idx: int, scale_by_freq: bool) -> Array:
    np = _np()
    flat, rows = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if scale_by_freq:
        rows = rows / np.zeros((count,), rows.dtype).at[flat].add(1)[flat][:, None]
    if padding_idx >= 0:
        rows = np.where((flat == padding_idx)[:, None], 0, rows)
    return np.zeros((count, rows.shape[-1]), rows.dtype).at[flat].add(rows)


@row(aten.select_backward.default)
def select_backward(grad: Array, sizes: Any, dim: int, index: int) -> Array:
    np = _np()
    return np.zeros(tuple(sizes), grad.dtype).at[(slice(None),) * (dim % len(sizes)) + (index,)].set(grad)


@row(aten.slice_backward.default)
def slice_backward(grad: Array, sizes: Any, dim: int, start: int, end: int, step: int) -> Array:
    np = _np()
    at = (slice(None),) * (dim % len(sizes)) + (slice(start, min(end, sizes[dim]), step),)
    return np.zeros(tuple(sizes), grad.dtype).at[at].set(grad)


# ---------------------------------------------------------------- what torch says of NaN


@row(aten.sign.default, aten.sgn.default)
def sign(x: Array) -> Array:
    np = _np()
    return np.where(np.isnan(x), 0, np.sign(x)).astype(x.dtype)


# ---------------------------------------------------------------- arguments that torchax's rows do not have


@row(aten.add.Scalar)
def add_scalar(x: Array, other: Any, alpha: Any = 1) -> Array:
    return x + other * alpha


@row(aten.mean.default, aten.mean.dim)
def mean(x: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    x = x if dtype is None else x.astype(dtype_of(dtype))
    return _np().mean(x, axis=None if dim is None or not len(dim) else tuple(dim), keepdims=keepdim)


# ---------------------------------------------------------------- tensors made of nothing


@row(aten.ones_like.default)
def ones_like(x: Array, **how: Any) -> Array:
    return _np().ones_like(x)


@row(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(x: Array, **how: Any) -> Array:
    return _np().zeros_like(x)


@row(aten.full_like.default)
def full_like(x: Array, value: Any, **how: Any) -> Array:
    return _np().full_like(x, value)
