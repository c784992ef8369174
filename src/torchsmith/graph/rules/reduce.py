"""Shape rules of reductions, scans, sorting and softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...codes import Unsupported
from ..layout import Size, are_equal, broadcast, contiguous_strides, float_dtype, is_dense, propagate_strides, require, sum_dtype
from ..tracing import current, device_of, fresh, make, rule
from .views import axes, axis, copy_strides

aten = torch.ops.aten
Tensor = torch.Tensor


def reduced(self: Tensor, dim: Any, keepdim: bool) -> tuple[Size, ...]:
    """Sizes after reducing `dim` (None or () is all dimensions)."""
    n = self.dim()
    if n > 64:
        raise RuntimeError("only tensors with up to 64 dims are supported")
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return (1,) * n if keepdim else ()
    among = axes(dim, n)
    return tuple(1 if d in among else s for d, s in enumerate(self.shape) if keepdim or d not in among)


def result(self: Tensor, dim: Any, keepdim: bool, dtype: torch.dtype) -> Tensor:
    shape = reduced(self, dim, keepdim)
    return fresh(shape, dtype)


def require_elements(self: Tensor, dim: Any, name: str) -> None:
    """An extreme of nothing is none: all elements, or those along each dimension of `dim`, have to be some."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        if any(n == 0 for n in self.shape):
            raise RuntimeError(f"{name}(): Expected reduction dim to be specified for input.numel() == 0.")
        return
    for d in dim if isinstance(dim, (tuple, list)) else (dim,):
        if self.dim() and self.shape[axis(d, self.dim())] == 0:
            raise IndexError(f"{name}(): Expected reduction dim {d} to have non-zero size.")


def _orders(self: Tensor, name: str, *refused: torch.dtype) -> None:
    """Only numbers of these dtypes are compared."""
    if self.dtype.is_complex or self.dtype in refused:
        raise RuntimeError(f"{name}(): does not support {self.dtype} input")


@rule(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default, aten.prod.default, aten.prod.dim_int)
def sum_dims(self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return result(self, dim, keepdim, dtype or sum_dtype(self.dtype))


@rule(aten.mean.default, aten.mean.dim)
def mean_dims(self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if not (dtype or self.dtype).is_floating_point and not (dtype or self.dtype).is_complex:
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: {self.dtype}"
        )
    return result(self, dim, keepdim, dtype or self.dtype)


@rule(aten.amax.default, aten.amin.default)
def amax(self: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    _orders(self, "amax")
    require_elements(self, dim, "amax")
    return result(self, dim, keepdim, self.dtype)


@rule(aten.aminmax.default)
def aminmax(self: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    _orders(self, "aminmax")
    require_elements(self, dim, "aminmax")
    if dim is None and keepdim and device_of(self).type != "cpu":  # the kernel drops the dimensions that its schema keeps
        raise Unsupported("GRA009", at=current().facts.loc, detail="aminmax over everything that keeps dimensions")
    return result(self, dim, keepdim, self.dtype), result(self, dim, keepdim, self.dtype)


@rule(aten.any.default, aten.all.default, aten._is_all_true.default, aten._is_any_true.default)
def any_all(self: Tensor) -> Tensor:
    return result(self, None, False, torch.uint8 if self.dtype is torch.uint8 else torch.bool)


@rule(aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims)
def any_dims(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    if isinstance(dim, (tuple, list)) and not dim:  # over no dimension, here
        return make(self.shape, copy_strides(self, None), torch.uint8 if self.dtype is torch.uint8 else torch.bool)
    return result(self, dim, keepdim, torch.uint8 if self.dtype is torch.uint8 else torch.bool)


@rule(aten.argmax.default, aten.argmin.default)
def argmax(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    _orders(self, "argmax", torch.bool)
    require_elements(self, dim, "argmax")
    return result(self, dim, keepdim, torch.int64)


@rule(aten.max.default, aten.min.default)
def max_all(self: Tensor) -> Tensor:
    _orders(self, "max")
    require_elements(self, None, "max")
    return result(self, None, False, self.dtype)


@rule(aten.median.default, aten.nanmedian.default)
def median_all(self: Tensor) -> Tensor:
    _orders(self, "median", torch.bool)
    return result(self, None, False, self.dtype)


@rule(aten.max.dim, aten.min.dim)
def max_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    _orders(self, "max")
    require_elements(self, dim, "max")
    return result(self, dim, keepdim, self.dtype), result(self, dim, keepdim, torch.int64)


@rule(aten.median.dim, aten.nanmedian.dim)
def median_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    _orders(self, "median", torch.bool)
    require_elements(self, dim, "median")
    return result(self, dim, keepdim, self.dtype), result(self, dim, keepdim, torch.int64)


@rule(aten.var.correction, aten.std.correction)
def var(self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    if not self.dtype.is_floating_point and not self.dtype.is_complex:
        raise RuntimeError("std and var only support floating point and complex dtypes")
    return result(self, dim, keepdim, self.dtype.to_real() if self.dtype.is_complex else self.dtype)


@rule(aten.var_mean.correction, aten.std_mean.correction)
def var_mean(self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return var(self, dim, keepdim=keepdim), result(self, dim, keepdim, self.dtype)


@rule(aten.logsumexp.default)
def logsumexp(self: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if not dim and self.dim():
        raise RuntimeError("logsumexp over no dimension")
    return result(self, dim, keepdim, float_dtype(self.dtype))


def _has_identity(self: Tensor, order: Any, dim: Any) -> None:
    """Norms that are minima, and the largest absolute value, of no elements at all are refused."""
    if order is not None and (order < 0 or order == math.inf):
        require_elements(self, dim or None, "linalg.vector_norm")


@rule(aten.linalg_vector_norm.default)
def vector_norm(self: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    _has_identity(self, ord, dim)
    kind = dtype or self.dtype
    return result(self, dim, keepdim, kind.to_real() if kind.is_complex else kind)


@rule(aten.norm.ScalarOpt_dim, aten.norm.Scalar, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype)
def norm(self: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return vector_norm(self, p, dim, keepdim, dtype=dtype)


@rule(aten.count_nonzero.dim_IntList, aten.count_nonzero.default)
def count_nonzero(self: Tensor, dim: Any = None) -> Tensor:
    return result(self, dim, False, torch.int64)


# ---------------------------------------------------------------- same sizes


def dense(self: Tensor, dtype: torch.dtype) -> Tensor:
    return make(self.shape, contiguous_strides(tuple(self.shape)), dtype)


@rule(aten._softmax.default, aten._log_softmax.default)
def softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    axis(dim, self.dim())
    if half_to_float:
        raise RuntimeError("softmax with half to float conversion is not supported on CPU")
    return dense(self, self.dtype)


@rule(aten._safe_softmax.default)
def safe_softmax(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    axis(dim, self.dim())
    return dense(self, dtype or self.dtype)


@rule(aten.cumsum.default, aten.cumprod.default)
def cumsum(self: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    axis(dim, self.dim())
    return dense(self, dtype or sum_dtype(self.dtype))


@rule(aten.sort.default)
def sort(self: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    strides = tuple(self.stride()) if is_dense(self) else propagate_strides(tuple(self.shape), (self,))
    return make(self.shape, strides, self.dtype), make(self.shape, strides, torch.int64)


@rule(aten.sort.stable)
def sort_stable(self: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return sort(self, dim, descending)


@rule(aten.topk.default)
def topk(self: Tensor, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    d = axis(dim, self.dim())
    shape: Sequence[Size] = [k if i == d else s for i, s in enumerate(self.shape)]
    if not require(k >= 0) or not require(k <= (self.shape[d] if self.dim() else 1)):
        raise RuntimeError("selected index k out of range")
    strides = contiguous_strides(shape)
    return make(shape, strides, self.dtype), make(shape, strides, torch.int64)


@rule(aten.renorm.default)
def renorm(self: Tensor, p: Any, dim: int, maxnorm: Any) -> Tensor:
    return logcumsumexp(self, dim)


@rule(aten.logcumsumexp.default)
def logcumsumexp(self: Tensor, dim: int) -> Tensor:
    axis(dim, self.dim())
    return dense(self, self.dtype)


@rule(aten.cummax.default, aten.cummin.default)
def cummax(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    axis(dim, self.dim())
    return dense(self, self.dtype), dense(self, torch.int64)


@rule(aten.kthvalue.default)
def kthvalue(self: Tensor, k: Size, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    d = axis(dim, self.dim())
    n = self.shape[d] if self.dim() else 1
    if not require(n != 0):
        raise IndexError(f"kthvalue(): Expected reduction dim {d} to have non-zero size.")
    if not require(k >= 1) or not require(k <= n):
        raise RuntimeError(f"kthvalue(): selected number k out of range for dimension {d}")
    return result(self, dim, keepdim, self.dtype), result(self, dim, keepdim, torch.int64)


@rule(aten.segment_reduce.default)
def segment_reduce(
    data: Tensor, reduce: str, *, lengths: Tensor | None = None, indices: Any = None, offsets: Tensor | None = None, **options: Any
) -> Tensor:
    """One result for each segment: of each row of `lengths`, or between each two of `offsets`, along the last dimension of those."""
    given = lengths if offsets is None else offsets
    if given is None or (lengths is not None and offsets is not None) or indices is not None:
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined.")
    along = axis(options.get("axis", 0), data.dim())
    if not 0 <= along == given.dim() - 1:
        raise RuntimeError("segment_reduce(): Expected axis to be the last dimension of lengths.")
    if not are_equal(given.shape[:-1], data.shape[:along]):
        raise RuntimeError("segment_reduce(): Expected lengths and data to be alike up to axis.")
    count = given.shape[-1] if offsets is None else given.shape[-1] - 1
    return fresh((*given.shape[:-1], count, *data.shape[along + 1 :]), data.dtype)


@rule(aten._segment_reduce_backward.default)
def segment_reduce_backward(grad: Tensor, output: Tensor, data: Tensor, reduce: str, **options: Any) -> Tensor:
    return fresh(data.shape, grad.dtype)


@rule(aten.mode.default)
def mode(self: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return result(self, dim, keepdim, self.dtype), result(self, dim, keepdim, torch.int64)


@rule(aten.trace.default)
def trace(self: Tensor) -> Tensor:
    return make((), (), sum_dtype(self.dtype))


@rule(aten.dist.default)
def dist(self: Tensor, other: Tensor, p: Any = 2) -> Tensor:
    broadcast(self.shape, other.shape)
    if self.dtype != other.dtype:
        raise RuntimeError(f"dist of {self.dtype} and {other.dtype}")
    return make((), (), self.dtype.to_real() if self.dtype.is_complex else self.dtype)


@rule(aten.histc.default)
def histc(self: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    return make((bins,), (1,), self.dtype)


@rule(aten.nonzero_static.default)
def nonzero_static(self: Tensor, *, size: Size, fill_value: int = -1) -> Tensor:
    shape = (size, self.dim())
    strides = contiguous_strides(shape) if device_of(self).type == "cpu" else contiguous_strides(shape[::-1])[::-1]
    return make(shape, strides, torch.int64)
