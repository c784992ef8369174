"""Shape rules of neural-network operators: convolution, pooling, normalisation, resampling, attention, losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...codes import Unsupported
from ..layout import (
    Size,
    are_equal,
    broadcast,
    broadcasts_to,
    format_strides,
    hint_of,
    is_contiguous,
    is_symbolic,
    is_zero,
    propagate_strides,
    require,
    result_dtype,
    same,
    suggest_format,
)
from ..tracing import RULES, current, device_of, fresh, make, rule
from .pointwise import elementwise
from .views import axis, copy_strides, slice_, unsqueeze

aten = torch.ops.aten
Tensor = torch.Tensor
CONTIGUOUS = torch.contiguous_format


def _spread(v: Any, n: int) -> list[Size]:
    values = list(v) if isinstance(v, (tuple, list)) else [v]
    return values * n if len(values) == 1 else values


def _vector(t: Tensor | None, n: Size, name: str, *dtypes: torch.dtype) -> None:
    """An operand with one number for each channel or class."""
    if t is None:
        return
    if t.dim() != 1 or not are_equal(t.shape, (n,)):
        raise RuntimeError(f"expected {name} to be 1-dimensional with {n} elements, but got {name} of size {list(t.shape)} instead")
    if dtypes and t.dtype not in dtypes:
        raise RuntimeError(f"expected {name} of type {dtypes[0]}, but got {t.dtype}")


def _affine(dtype: torch.dtype, *operands: Tensor | None) -> None:
    """Weight and bias of a normalisation: of the input's dtype, or all in float32 where that is a half format."""
    kinds = {t.dtype for t in operands if t is not None}
    if len(kinds) > 1 or not kinds <= {dtype, torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype}:
        raise RuntimeError(f"mixed dtype (CPU): expect parameters of type {dtype}, but got {sorted(map(str, kinds))}")


@rule(aten.convolution.default)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    n = weight.dim() - 2
    if input.dim() not in (n + 1, n + 2) or n < 1:
        raise RuntimeError(f"Expected {n + 1}D (unbatched) or {n + 2}D (batched) input to conv{n}d, but got {list(input.shape)}")
    for name, v, low in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1), ("output padding", output_padding, 0)):
        given = list(v) if isinstance(v, (tuple, list)) else [v]
        if len(given) not in (1, n):
            raise RuntimeError(f"expected {name} to be a single integer value or a list of {n} values to match the convolution dimensions")
        if any(x < low for x in given):
            raise RuntimeError(f"{name} of at least {low} expected, but got {given}")
    if groups <= 0 or weight.shape[0] < groups or weight.shape[0] % groups:
        raise RuntimeError(f"Given groups={groups}, expected weight to be divisible by it at dimension 0, but got {list(weight.shape)}")
    stride, padding, dilation, extra = _spread(stride, n), _spread(padding, n), _spread(dilation, n), _spread(output_padding, n)
    if transposed and any(e >= s and e >= d for e, s, d in zip(extra, stride, dilation, strict=True)):
        raise RuntimeError(f"output padding must be smaller than either stride or dilation, but got {extra}, {stride} and {dilation}")
    batched = input.dim() == n + 2
    spatial = input.shape[2:] if batched else input.shape[1:]
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    want = weight.shape[0] if transposed else weight.shape[1] * groups
    have = input.shape[1 if batched else 0]
    if not are_equal((have,), (want,)):
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight.shape)}, expected input to have {want} channels, got {have}"
        )
    if input.dtype != weight.dtype:
        raise RuntimeError(f"Input type ({input.dtype}) and weight type ({weight.dtype}) should be the same")
    _vector(bias, channels, "bias", input.dtype)
    out: list[Size] = []
    for i in range(n):
        k = dilation[i] * (weight.shape[2 + i] - 1)
        if transposed:
            out.append((spatial[i] - 1) * stride[i] - 2 * padding[i] + k + extra[i] + 1)
        else:
            span = spatial[i] + 2 * padding[i] - k - 1
            out.append((span // stride[i] if stride[i] != 1 else span) + 1)
        if not require(out[-1] > 0):
            raise RuntimeError("Calculated output size is too small")
    shape = [*([input.shape[0]] if batched else []), channels, *out]
    empty = batched and (is_zero(input.shape[0]) or is_zero(input.shape[1]))  # eager has a kernel for nothing
    wide = device_of(input).type == "cuda" and input.dtype is torch.float64  # cuDNN computes it in contiguous memory
    kept = CONTIGUOUS if empty or wide else convolution_format(input if batched else unsqueeze(input, 0), weight)
    if n == 3 and kept is not CONTIGUOUS:
        kept = format_3d(input if batched else unsqueeze(input, 0), weight, bias, (stride, padding, dilation, transposed, extra, groups))
        if batched:
            return fresh(shape, input.dtype, kept)
        return make(shape, format_strides((1, *shape), kept)[1:], input.dtype)
    if n == 1 and kept is not CONTIGUOUS:  # computed in two dimensions
        strides = list(format_strides((shape[0], channels, 1, out[0]) if batched else (1, channels, 1, out[0]), kept))
        return make(shape, strides[:2] + strides[3:] if batched else [strides[1], strides[3]], input.dtype)
    return fresh(shape, input.dtype, kept if batched else CONTIGUOUS)


def convolution_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    if weight.dim() == 3:  # an input that is permuted is copied first (one channel alone is not), a weight is not
        input, weight = unsqueeze(input if is_contiguous(input) else fresh(input.shape, input.dtype), 2), unsqueeze(weight, 2)
    formats = (suggest_format(input), suggest_format(weight))
    return next((f for f in formats if f is not CONTIGUOUS), CONTIGUOUS)


def format_3d(input: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]) -> torch.memory_format:
    """Which kernel eager picks in three dimensions depends on sizes and threads, and with it the order of its result: ask what it would
    pick for CPU tensors of these sizes. Their memory is never touched. What it asks of sizes that vary, for float32, is a guard."""
    if input.dtype is torch.float32 and is_symbolic((*input.shape, *weight.shape)):
        batch, area = input.shape[0], input.shape[0] * input.shape[1] * input.shape[2] * input.shape[3]
        for size, limit in ((batch, 1), (batch, 15), (area, 20480), *((k, bound) for k in weight.shape[-2:] for bound in (1, 3))):
            bool(size > limit)  # a guard
    x, w = (torch.empty_strided([hint_of(n) for n in t.shape], [hint_of(n) for n in t.stride()], dtype=t.dtype) for t in (input, weight))
    b = None if bias is None else torch.empty(bias.shape, dtype=bias.dtype)
    with torch.no_grad():
        backend = torch._C._select_conv_backend(x, w, b, *rest)
    picked: torch.memory_format = torch._C._conv_determine_backend_memory_format(x, w, backend)
    return picked


# ---------------------------------------------------------------- pooling


def _pooled(size: Size, kernel: Size, stride: Size, padding: Size, dilation: Size, ceil_mode: bool) -> Size:
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode:  # the last window starts inside the input or its left padding
        out = torch.sym_min(out, (size + padding - 1) // stride + 1)
    return out


def _pool(input: Tensor, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> list[Size]:
    kernel = _spread(kernel, n)
    stride = _spread(stride, n) if isinstance(stride, int) or stride else kernel
    padding, dilation = _spread(padding, n), _spread(dilation, n)
    if input.dim() not in (n + 1, n + 2) or any(len(v) != n for v in (kernel, stride, padding, dilation)):
        raise RuntimeError(f"pooling over {n} dimensions of an input of size {list(input.shape)}, with kernel {list(kernel)}")
    if any(v < 1 for v in (*kernel, *stride, *dilation)):
        raise RuntimeError("kernel size, stride and dilation should be greater than zero")
    if not all(require(s != 0) for s in input.shape[-n - 1 :]):
        raise RuntimeError(f"Expected input with non-zero sizes but for the batch, but got {list(input.shape)}")
    if any(p < 0 for p in padding):
        raise RuntimeError(f"pad must be non-negative, but got pad: {min(padding)}")
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        raise RuntimeError(f"pad should be at most half of effective kernel size, but got pad={padding}, kernel_size={kernel}")
    sizes = [_pooled(input.shape[i - n], kernel[i], stride[i], padding[i], dilation[i], ceil_mode) for i in range(n)]
    if not all(require(s > 0) for s in sizes):
        raise RuntimeError(f"Given input size: {list(input.shape)}. Calculated output size: {sizes}. Output size is too small")
    return [*input.shape[: input.dim() - n], *sizes]


def _max_pool(n: int) -> Any:
    def pooled(
        input: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        shape, kept = _pool(input, n, kernel_size, stride, padding, dilation, ceil_mode), suggest_format(input)
        return fresh(shape, input.dtype, kept), fresh(shape, torch.int64, kept)

    return pooled


rule(aten.max_pool2d_with_indices.default)(_max_pool(2))
rule(aten.max_pool3d_with_indices.default)(_max_pool(3))


@rule(aten.avg_pool2d.default)
def avg_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Tensor:
    return fresh(_pool(input, 2, kernel_size, stride, padding, 1, ceil_mode), input.dtype, suggest_format(input))


@rule(aten.avg_pool3d.default)
def avg_pool3d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Tensor:
    shape, kernel = _pool(input, 3, kernel_size, stride, padding, 1, ceil_mode), _spread(kernel_size, 3)
    if not all(require(n >= k) for n, k in zip(input.shape[-3:], kernel, strict=True)):
        raise RuntimeError(f"input image {list(input.shape[-3:])} smaller than kernel size {list(kernel)}")
    return fresh(shape, input.dtype)


def _check_adaptive(self: Tensor, output_size: Sequence[Size], n: int) -> None:
    if len(output_size) != n or self.dim() not in (n + 1, n + 2) or any(s < 0 for s in output_size):
        raise RuntimeError(f"adaptive pooling over {n} dimensions of an input of size {list(self.shape)} to {list(output_size)}")
    if not all(require(s != 0) for s in self.shape[1 if self.dim() == n + 2 else 0 :]):
        raise RuntimeError(f"Expected input to have non-zero size for non-batch dimensions, but got {list(self.shape)}")


@rule(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(self: Tensor, output_size: Sequence[Size]) -> Tensor:
    _check_adaptive(self, output_size, 2)
    return fresh([*self.shape[:-2], *output_size], self.dtype, suggest_format(self))


@rule(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(self: Tensor, output_size: Sequence[Size]) -> Tensor:
    _check_adaptive(self, output_size, 3)
    return fresh([*self.shape[:-3], *output_size], self.dtype)


@rule(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(self: Tensor, output_size: Sequence[Size]) -> tuple[Tensor, Tensor]:
    _check_adaptive(self, output_size, 2)
    shape = [*self.shape[:-2], *output_size]
    return fresh(shape, self.dtype, suggest_format(self)), fresh(shape, torch.int64, suggest_format(self))


@rule(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(self: Tensor, output_size: Sequence[Size]) -> tuple[Tensor, Tensor]:
    _check_adaptive(self, output_size, 3)
    shape = [*self.shape[:-3], *output_size]
    return fresh(shape, self.dtype), fresh(shape, torch.int64)


# ---------------------------------------------------------------- normalisation


def _statistics(dtype: torch.dtype, *params: Tensor | None, device: str = "cpu") -> torch.dtype:
    """Saved statistics are float32 when low-precision input meets float32 parameters, and on a GPU, whose kernels save what they sum in."""
    if device != "cpu" and dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    if dtype in (torch.bfloat16, torch.float16) and any(p is not None and p.dtype is torch.float32 for p in params):
        return torch.float32
    return dtype


@rule(aten.native_batch_norm.default)
def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if input.dim() < 2:
        raise RuntimeError(f"batch norm of a tensor of {input.dim()} dimensions")
    for name, t in (("weight", weight), ("bias", bias), ("running_mean", running_mean), ("running_var", running_var)):
        _vector(t, input.shape[1], name)
    if not training and (running_mean is None or running_var is None):
        raise RuntimeError("running_mean and running_var must be defined in evaluation mode")
    if training and any(n == 0 for n in input.shape):
        raise RuntimeError(f"input tensor must have at least one element, but got input_sizes = {list(input.shape)}")
    _affine(input.dtype, weight, bias, running_mean, running_var)
    device = device_of(input).type
    count = input.shape[1] if training or device != "cpu" else 0  # a GPU's kernel says what it normalised with in evaluation, too
    kind = _statistics(input.dtype, weight, bias, running_mean, device=device)
    strides = format_strides(tuple(input.shape), suggest_format(input)) if device == "cpu" else copy_strides(input, None)
    return make(input.shape, strides, input.dtype), fresh((count,), kind), fresh((count,), kind)


def is_by_cudnn(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, training: bool
) -> bool:
    """Does eager give this batch norm to cuDNN? That one wants plain memory; batch_norm copies what is not, and loses what is written."""
    if device_of(input).type != "cuda" or weight is None or bias is None or input.dim() < 3:
        return False
    if (running_mean is None) is not (running_var is None):
        return False
    is_wide = input.dtype is not torch.float16 or weight.dtype is torch.float32
    fits = is_wide and torch.bfloat16 not in (input.dtype, weight.dtype) and (training or running_mean is not None)
    is_small = hint_of(input.shape[0]) <= (880801 if training else 65535) and hint_of(input.numel()) < 2**31 - 1
    return fits and is_small and bool(current().asked(torch._C._get_cudnn_enabled))


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return native_batch_norm(input, weight, bias, None, None, True, momentum, eps)


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    out = native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return (*out, fresh(running_mean.shape, running_mean.dtype), fresh(running_var.shape, running_var.dtype))


@rule(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Between the statistics and what is written a reserve, which only cuDNN fills."""
    if is_by_cudnn(input, weight, bias, running_mean, running_var, True):
        if not all(is_contiguous(t) for t in (weight, bias, running_mean, running_var) if t is not None):
            raise RuntimeError("Expected contiguous tensor, but got non-contiguous tensor (while checking arguments for cudnn_batch_norm)")
        if suggest_format(input) is not CONTIGUOUS or not is_contiguous(input):
            raise Unsupported("GRA009", at=current().facts.loc, detail="the reserve of cuDNN's batch norm")
    out = batch_norm_functional(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*out[:3], fresh((0,), torch.uint8), *out[3:])


@rule(aten.native_layer_norm.default)
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[Size], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    n = input.dim() - len(normalized_shape)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and not are_equal(t.shape, normalized_shape):
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(t.shape)} and "
                f"normalized_shape = {list(normalized_shape)}"
            )
    _affine(input.dtype, weight, bias)
    if n < 0 or not normalized_shape or not are_equal(input.shape[n:], normalized_shape):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected input with shape [*, {list(normalized_shape)}], "
            f"but got input of size{list(input.shape)}"
        )
    shape = (*input.shape[:n], *(1 for _ in normalized_shape))
    kind = _statistics(input.dtype, weight, bias, device=device_of(input).type)
    return fresh(input.shape, input.dtype), fresh(shape, kind), fresh(shape, kind)


@rule(aten.native_group_norm.default)
def native_group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: Size, C: Size, HxW: Size, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not are_equal((input.numel(),), (N * C * HxW,)):
        raise RuntimeError(f"Expected X.numel() == N * C * HxW, but got {list(input.shape)} and {N}, {C}, {HxW}")
    _vector(weight, C, "weight")
    _vector(bias, C, "bias")
    _affine(input.dtype, weight, bias)
    if group <= 0 or not require(C % group == 0):
        raise RuntimeError(f"Expected number of channels in input to be divisible by num_groups, but got {C} channels and {group} groups")
    kind = _statistics(input.dtype, weight, bias)
    return fresh(input.shape, input.dtype, suggest_format(input)), fresh((N, group), kind), fresh((N, group), kind)


@rule(aten._fused_rms_norm.default)
def fused_rms_norm(input: Tensor, normalized_shape: Sequence[Size], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    n = input.dim() - len(normalized_shape)
    return fresh(input.shape, input.dtype), fresh((*input.shape[:n], *(1 for _ in normalized_shape)), input.dtype)


# ---------------------------------------------------------------- resampling and padding


def _resample(n: int) -> Any:
    def shape(self: Tensor, output_size: Sequence[Size], *args: Any, **named: Any) -> Tensor:
        if not all(require(s > 0) for s in (*output_size, *self.shape[2:])):
            sizes = f"{list(self.shape)} and output {list(output_size)}"
            raise RuntimeError(f"Input and output sizes should be greater than 0, but got {sizes}")
        return fresh([*self.shape[:2], *output_size], self.dtype, suggest_format(self))

    return shape


_RESAMPLING = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa"""
RESAMPLING = _RESAMPLING.split()
for _name in RESAMPLING:
    rule(getattr(aten, _name).default)(_resample(int(_name.removesuffix("_aa")[-2])))


def _pad(n: int, is_reflected: bool) -> Any:
    def shape(self: Tensor, padding: Sequence[Size]) -> Tensor:
        sizes = list(self.shape)
        fits = len(padding) == 2 * n and self.dim() in (n + 1, n + 2)
        if not fits or not all(require(s != 0) for s in self.shape[1 if self.dim() == n + 2 else 0 :]):
            raise RuntimeError(f"padding {list(padding)} of the last {n} dimensions of an input of size {list(self.shape)}")
        for i in range(n):
            if is_reflected and not all(require(p < sizes[-1 - i]) for p in padding[2 * i : 2 * i + 2]):
                raise RuntimeError(
                    "Argument #4: Padding size should be less than the corresponding input dimension, but got: padding "
                    f"({padding[2 * i]}, {padding[2 * i + 1]}) at dimension {self.dim() - 1 - i} of input {list(self.shape)}"
                )
            sizes[-1 - i] = sizes[-1 - i] + padding[2 * i] + padding[2 * i + 1]
            if not require(sizes[-1 - i] >= 1):
                raise RuntimeError(f"input {list(self.shape)} is too small. Calculated output size: {sizes[-1 - i]}")
        return fresh(sizes, self.dtype, suggest_format(self) if n > 1 else CONTIGUOUS)

    return shape


for _n in (1, 2, 3):
    rule(getattr(aten, f"reflection_pad{_n}d").default)(_pad(_n, True))
    rule(getattr(aten, f"replication_pad{_n}d").default)(_pad(_n, False))


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(self: Tensor, upscale_factor: int) -> Tensor:
    r = upscale_factor
    if r <= 0 or self.dim() < 3 or not require(self.shape[-3] % (r * r) == 0):
        raise RuntimeError(f"pixel_shuffle of an input of size {list(self.shape)} by {r}")
    *lead, c, h, w = self.shape
    return fresh([*lead, c // (r * r), h * r, w * r], self.dtype, suggest_format(self))


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(self: Tensor, downscale_factor: int) -> Tensor:
    r = downscale_factor
    if r <= 0 or self.dim() < 3 or not require(self.shape[-2] % r == 0) or not require(self.shape[-1] % r == 0):
        raise RuntimeError(f"pixel_unshuffle of an input of size {list(self.shape)} by {r}")
    *lead, c, h, w = self.shape
    return fresh([*lead, c * r * r, h // r, w // r], self.dtype, suggest_format(self))


@rule(aten.glu.default)
def glu(self: Tensor, dim: int = -1) -> Tensor:
    d = axis(dim, self.dim())
    n = self.shape[d]
    if n % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {d} is size {n}")
    halves = (slice_(self, d, 0, n // 2), slice_(self, d, n // 2, n))
    return make(halves[0].shape, propagate_strides(tuple(halves[0].shape), halves), self.dtype)


# ---------------------------------------------------------------- attention, whole


@rule(aten.scaled_dot_product_attention.default)
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """A GPU's kernels for 16-bit numbers keep the query's layout, those for float32 put heads inside of rows. Where neither takes the call
    it is made of products: rows that are not dense, those of a mask, too, and rows of float32, or beside a mask, that are no multiple of 16
    bytes."""
    shape = (*query.shape[:-1], value.shape[-1])
    widths = [t.shape[-1] for t in (query, value) if type(t.shape[-1]) is int]
    is_half, masks = query.dtype.itemsize == 2, () if attn_mask is None else (attn_mask,)
    in_parts = query.dtype is torch.float64 or ((masks or not is_half) and any(n % (16 // query.dtype.itemsize) for n in widths))
    if query.dim() != 4 or in_parts or not all(same(t.stride(-1), 1) for t in (query, key, value, *masks)):
        return fresh(shape, query.dtype)
    by_rows = masks and dropout_p * 16 % 1  # by the only library that takes a mask beside such a rate
    if is_half and not by_rows and same(query.shape[-1], value.shape[-1]):
        n = query.shape[-1]
        if type(n) is int and n % 8 and attn_mask is None:  # rows are padded to a multiple of 8 and cut off again
            return make(shape, fresh((*query.shape[:-1], n + -n % 8), query.dtype).stride(), query.dtype)
        return make(shape, copy_strides(query, None), query.dtype)
    _, h, n, d = shape
    return make(shape, (n * h * d, d, h * d, 1), query.dtype)


def _equal_here(a: Size, b: Size) -> bool:
    """Sizes that are equal at hand are assumed to stay so."""
    return same(a, b) or (hint_of(a) == hint_of(b) and bool(a == b))


def flash_applies(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, grouped: bool) -> bool:
    """Does eager's attention run its flash kernel on CPU?"""
    all_fit = all(
        t.dim() == 4 and t.dtype is query.dtype and t.dtype.is_floating_point and same(t.stride(-1), 1) for t in (query, key, value)
    )
    if not all_fit or dropout_p or (attn_mask is not None and (attn_mask.dim() not in (2, 4) or attn_mask.requires_grad)):
        return False
    if not all(_equal_here(query.shape[d], t.shape[d]) for t in (key, value) for d in (0, 3)):
        return False
    heads, shared = query.shape[1], key.shape[1]
    if not _equal_here(shared, value.shape[1]) or (not same(heads, shared) and not (grouped and heads % shared == 0)):
        return False
    return all(type(t.shape[2]) is not int or t.shape[2] != 0 for t in (query, key, value))


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The result keeps the query's layout."""
    b, h, n, _ = query.shape
    mask = options.get("attn_mask")
    if not same(key.shape[2], value.shape[2]) and key.shape[2] != value.shape[2]:
        raise RuntimeError(f"attention of {key.shape[2]} keys and {value.shape[2]} values")
    if mask is not None:
        whole = (b, h, n, key.shape[2])
        for have, want in zip(mask.shape, whole[4 - mask.dim() :], strict=True):
            if not same(have, want) and not (type(have) is int and have == 1) and have != want:
                raise RuntimeError(f"The expanded size of the tensor ({want}) must match the existing size ({have}) of the attention mask")
    kind = torch.float64 if query.dtype is torch.float64 else torch.float32
    return make(query.shape, copy_strides(query, None), query.dtype), make((b, h, n), (n * h, 1, h), kind)


# ---------------------------------------------------------------- losses


def _classes(target: Tensor, weight: Tensor | None, classes: Size, dtype: torch.dtype) -> None:
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {target.dtype}")
    _vector(weight, classes, "weight", dtype)


@rule(aten.nll_loss_forward.default)
def nll_loss(self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: Size) -> tuple[Tensor, Tensor]:
    if self.dim() not in (1, 2) or target.dim() > 1 or (self.dim() == 1 and target.dim() == 1 and not same(target.numel(), 1)):
        raise RuntimeError(f"multi-target not supported: input of size {list(self.shape)}, target of size {list(target.shape)}")
    if self.dim() == 2 and not are_equal(target.shape, self.shape[:1]):
        raise RuntimeError(f"size mismatch (got input: {list(self.shape)}, target: {list(target.shape)})")
    _classes(target, weight, self.shape[-1], self.dtype)
    shape = (self.shape[0],) if reduction == 0 and self.dim() == 2 else ()
    return fresh(shape, self.dtype), fresh((), self.dtype)


@rule(aten.nll_loss2d_forward.default)
def nll_loss2d(self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: Size) -> tuple[Tensor, Tensor]:
    if self.dim() != 4 or target.dim() != 3 or not are_equal(target.shape, (self.shape[0], *self.shape[2:])):
        raise RuntimeError(f"size mismatch (got input: {list(self.shape)}, target: {list(target.shape)})")
    _classes(target, weight, self.shape[1], self.dtype)
    return fresh((self.shape[0], *self.shape[2:]) if reduction == 0 else (), self.dtype), fresh((), self.dtype)


def _reduced_loss(operands: tuple[Tensor, ...], reduction: int) -> Tensor:
    if reduction not in (0, 1, 2):
        raise RuntimeError(f"{reduction} is not a valid value for reduction")
    broadcast(*(t.shape for t in operands))
    if reduction:
        return fresh((), result_dtype(*operands))
    return elementwise(operands, result_dtype(*operands))


@rule(aten.soft_margin_loss.default)
def soft_margin_loss(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    if not broadcasts_to(target.shape, self.shape):
        raise RuntimeError(f"output with shape {list(self.shape)} doesn't match the broadcast shape with {list(target.shape)}")
    return _reduced_loss((self, target), reduction)


@rule(aten.mse_loss.default)
def mse_loss(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduced_loss((self, target), reduction)


@rule(aten.smooth_l1_loss.default)
def smooth_l1_loss(self: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    if beta < 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
    return _reduced_loss((self, target), reduction)


@rule(aten.huber_loss.default)
def huber_loss(self: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    if delta <= 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")
    return _reduced_loss((self, target), reduction)


@rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    if not are_equal(self.shape, target.shape) or (weight is not None and not broadcasts_to(weight.shape, self.shape)):
        raise RuntimeError(f"binary cross entropy of an input of size {list(self.shape)} and a target of size {list(target.shape)}")
    if any(t is not None and t.dtype != self.dtype for t in (target, weight)):
        raise RuntimeError(f"binary cross entropy of {self.dtype} and a target or weight of another dtype")
    return fresh((), self.dtype) if reduction else make(self.shape, copy_strides(self, None), self.dtype)


@rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    self: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Unreduced it is computed in a copy of the target."""
    if not are_equal(self.shape, target.shape):
        raise RuntimeError(f"Target size ({list(target.shape)}) must be the same as input size ({list(self.shape)})")
    if any(t is not None and not broadcasts_to(t.shape, self.shape) for t in (weight, pos_weight)):
        raise RuntimeError(f"weight or pos_weight does not broadcast to the input of size {list(self.shape)}")
    kind = result_dtype(self, target, weight, pos_weight)
    return fresh((), kind) if reduction else elementwise((target,), kind)


@rule(aten.multi_margin_loss.default)
def multi_margin_loss(
    self: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    return fresh(() if reduction else target.shape, self.dtype)


# ---------------------------------------------------------------- sampling and windows


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Tensor:
    n = input.dim() - 2
    if n not in (2, 3) or grid.dim() != n + 2 or not are_equal(grid.shape[:1], input.shape[:1]) or not are_equal(grid.shape[-1:], (n,)):
        raise RuntimeError(f"grid_sampler(): input of size {list(input.shape)} and grid of size {list(grid.shape)}")
    if interpolation_mode not in (0, 1, 2) or padding_mode not in (0, 1, 2):  # eager returns whatever was in memory
        raise RuntimeError(f"grid_sampler(): interpolation mode {interpolation_mode} and padding mode {padding_mode}")
    if input.dtype != grid.dtype or not all(require(s != 0) for s in input.shape[2:]):
        raise RuntimeError(f"grid_sampler(): input of {input.dtype} and size {list(input.shape)} with a grid of {grid.dtype}")
    shape = (*input.shape[:2], *grid.shape[1:-1])
    return fresh(shape, input.dtype)


@rule(aten.im2col.default)
def im2col(self: Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    kernel, dilation, padding, stride = (_spread(v, 2) for v in (kernel_size, dilation, padding, stride))
    fits = self.dim() in (3, 4) and all(v >= 1 for v in (*kernel, *dilation, *stride))
    if not fits or not all(require(s != 0) for s in self.shape[self.dim() - 3 :]):
        raise RuntimeError(f"im2col of an input of size {list(self.shape)}, kernel {kernel}, dilation {dilation}, stride {stride}")
    if any(p < 0 for p in padding):
        raise RuntimeError(f"padding should be non-negative, but got {padding}")
    blocks: Size = 1
    for i in range(2):
        across = (self.shape[i - 2] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        if not require(across > 0):
            raise RuntimeError(f"Given input with spatial size {list(self.shape[-2:])}, the array of sliding blocks must be positive")
        blocks = blocks * across
    return fresh((*self.shape[:-3], self.shape[-3] * kernel[0] * kernel[1], blocks), self.dtype)


@rule(aten.col2im.default)
def col2im(self: Tensor, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    height, width = _spread(kernel_size, 2)
    return fresh((*self.shape[:-2], self.shape[-2] // (height * width), *_spread(output_size, 2)), self.dtype)


@rule(aten.affine_grid_generator.default)
def affine_grid(theta: Tensor, size: Sequence[Size], align_corners: bool) -> Tensor:
    return fresh((size[0], *size[2:], len(size) - 2), theta.dtype)


@rule(aten.channel_shuffle.default)
def channel_shuffle(self: Tensor, groups: int) -> Tensor:
    if groups < 1 or self.dim() < 3 or not require(self.shape[1] % groups == 0):
        raise RuntimeError(f"Number of channels must be divisible by groups. Got an input of size {list(self.shape)} and {groups} groups.")
    if device_of(self).type != "cpu":  # there eager has no kernel: channels in two dimensions, which a view has to give, and a copy
        rest: Size = 1
        for n in self.shape[2:]:
            rest = rest * n
        RULES[aten.view.default](self, (self.shape[0], groups, self.shape[1] // groups, rest))
        return fresh(self.shape, self.dtype)
    return fresh(self.shape, self.dtype, suggest_format(self))


@rule(aten._cdist_forward.default)
def cdist(x1: Tensor, x2: Tensor, p: float, compute_mode: int | None) -> Tensor:
    batch = broadcast(x1.shape[:-2], x2.shape[:-2])
    return fresh((*batch, x1.shape[-2], x2.shape[-2]), x1.dtype)


@rule(aten._euclidean_dist.default)
def euclidean_dist(x1: Tensor, x2: Tensor) -> Tensor:
    return cdist(x1, x2, 2.0, None)


@rule(aten._pdist_forward.default)
def pdist(self: Tensor, p: float = 2) -> Tensor:
    n = self.shape[0]
    return fresh((n * (n - 1) // 2,), self.dtype)


def _places(x: Tensor, sizes: Sequence[Size], rank: int, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    if x.dim() not in (rank + 1, rank + 2) or len(sizes) != rank:
        raise RuntimeError(f"pooling of {rank} dimensions of a tensor of {x.dim()} to {len(sizes)}")
    return tuple(fresh((*x.shape[:-rank], *sizes), d) for d in dtypes)


@rule(aten.fractional_max_pool2d.default)
def fractional_max_pool2d(self: Tensor, kernel_size: Any, output_size: Any, random_samples: Tensor) -> tuple[Tensor, ...]:
    return _places(self, output_size, 2, self.dtype, torch.int64)


@rule(aten.fractional_max_pool3d.default)
def fractional_max_pool3d(self: Tensor, kernel_size: Any, output_size: Any, random_samples: Tensor) -> tuple[Tensor, ...]:
    return _places(self, output_size, 3, self.dtype, torch.int64)


@rule(aten.max_unpool2d.default)
def max_unpool2d(self: Tensor, indices: Tensor, output_size: Any) -> Tensor:
    sizes = _places(self, output_size, 2, self.dtype)[0].shape
    return fresh(sizes, self.dtype, suggest_format(self))


@rule(aten.max_unpool3d.default)
def max_unpool3d(self: Tensor, indices: Tensor, output_size: Any, stride: Any, padding: Any) -> Tensor:
    return _places(self, output_size, 3, self.dtype)[0]


@rule(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    return fresh(() if reduction or self.dim() < 2 else self.shape[:1], self.dtype), fresh(target.shape, self.dtype)


@rule(aten._masked_softmax.default)
def masked_softmax(self: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None) -> Tensor:
    return fresh(self.shape, self.dtype)


@rule(aten._prelu_kernel.default)
def prelu(self: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype != self.dtype:
        raise RuntimeError(f"Found dtype {weight.dtype} but expected {self.dtype}")
    return elementwise((self, weight), self.dtype)


# ---------------------------------------------------------------- recurrent networks, whole


def _recurrent(
    input: Tensor, hidden: Tensor, params: Sequence[Tensor], layers: int, bidirectional: bool, batch_first: bool, projected: Size | None
) -> tuple[Tensor, Tensor]:
    directions = 2 if bidirectional else 1
    if input.dim() == 3 and input.shape[1 if batch_first else 0] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    width = (hidden.shape[-1] if projected is None else projected) * directions
    *lead, _ = input.shape
    if batch_first:  # the kernel computes time first
        b, n = lead
        return make((b, n, width), (width, b * width, 1), input.dtype), fresh(hidden.shape, input.dtype)
    return fresh((*lead, width), input.dtype), fresh(hidden.shape, input.dtype)


@rule(aten.lstm.input)
def lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out, h = _recurrent(input, hx[0], params, num_layers, bidirectional, batch_first, None)
    return out, h, fresh(hx[1].shape, input.dtype)


@rule(aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def gru(
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    return _recurrent(input, hx, params, num_layers, bidirectional, batch_first, None)
