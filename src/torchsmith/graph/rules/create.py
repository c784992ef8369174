"""Shape rules of operators that make new tensors from sizes and numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..layout import Size, broadcast, contiguous_strides, format_strides, number_dtype, require, require_size, same
from ..schema import overloads
from ..tracing import RULES, current, device_of, make, part, rule
from .pointwise import check_number
from .views import copy_strides

aten = torch.ops.aten
Tensor = torch.Tensor


def fresh(shape: Any, dtype: torch.dtype | None, memory_format: torch.memory_format | None = None) -> Tensor:
    for s in shape:
        if not require_size(s):
            raise RuntimeError(f"Trying to create tensor with negative dimension {s}: {list(shape)}")
    return make(shape, format_strides(shape, memory_format), torch.get_default_dtype() if dtype is None else dtype)


@rule(aten.empty.memory_format)
def empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, memory_format: Any = None
) -> Tensor:
    return fresh(size, dtype, memory_format)


@rule(aten.zeros.default, aten.ones.default, aten.rand.default, aten.randn.default, aten.rand.generator, aten.randn.generator)
def zeros(size: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return fresh(size, dtype)


@part(aten._efficientzerotensor.default)
def zeros_of_derivatives(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
    """What autograd takes for the derivative of a constant: of a tracing tensor it knows no device."""
    return NotImplemented if current().has_devices else torch.zeros(size, dtype=dtype)


@part(aten._new_zeros_with_same_feature_meta.default)
def zeros_of_tangents(self: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Any:
    if self_num_batch_dims:
        return NotImplemented
    return torch.empty_strided(other.shape, other.stride(), dtype=self.dtype, device=device_of(self)).zero_()


@rule(aten.full.default)
def full(size: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    kind = number_dtype(fill_value) if dtype is None else dtype
    check_number(fill_value, kind)
    return fresh(size, kind)


@rule(aten.scalar_tensor.default)
def scalar_tensor(s: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    if current().device_for((), options).type == "cuda":  # filled as any tensor; in the host's memory a half format makes infinity of it
        check_number(s, torch.get_default_dtype() if dtype is None else dtype)
    return fresh((), dtype)


@rule(aten.empty_strided.default)
def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return make(size, stride, torch.get_default_dtype() if dtype is None else dtype)


@rule(aten.empty_permuted.default)
def empty_permuted(size: Any, physical_layout: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    if sorted(d % max(len(size), 1) for d in physical_layout) != list(range(len(size))):
        raise RuntimeError(f"Duplicate dim not allowed: {list(physical_layout)} is no order of {len(size)} dimensions")
    strides = [0] * len(size)
    for d, s in zip(physical_layout, contiguous_strides([size[d] for d in physical_layout]), strict=True):
        strides[d] = s
    return make(size, strides, torch.get_default_dtype() if dtype is None else dtype)


@rule(aten.randint.low, aten.randint.low_generator)
def randint_low(low: Any, high: Any, size: Any, *, dtype: Any = torch.int64, **options: Any) -> Tensor:
    return fresh(size, torch.int64 if dtype is None else dtype)


@rule(aten.randint.default, aten.randint.generator)
def randint(high: Any, size: Any, *, dtype: Any = torch.int64, **options: Any) -> Tensor:
    return randint_low(0, high, size, dtype=dtype)


@rule(aten.randperm.default, aten.randperm.generator)
def randperm(n: Size, *, dtype: Any = torch.int64, **options: Any) -> Tensor:
    return fresh((n,), torch.int64 if dtype is None else dtype)


@rule(aten.eye.default)
def eye(n: Size, *, dtype: Any = None, **options: Any) -> Tensor:
    return fresh((n, n), dtype)


@rule(aten.eye.m)
def eye_m(n: Size, m: Size, *, dtype: Any = None, **options: Any) -> Tensor:
    return fresh((n, m), dtype)


@rule(
    aten.hann_window.default, aten.hann_window.periodic, aten.hamming_window.default, aten.hamming_window.periodic,
    aten.hamming_window.periodic_alpha, aten.hamming_window.periodic_alpha_beta, aten.blackman_window.default,
    aten.blackman_window.periodic, aten.bartlett_window.default, aten.bartlett_window.periodic, aten.kaiser_window.default,
    aten.kaiser_window.periodic, aten.kaiser_window.beta, aten.fft_fftfreq.default,
)  # fmt: skip
def window(n: Size, *shape: Any, dtype: Any = None, **options: Any) -> Tensor:
    return fresh((n,), dtype)


@rule(aten.fft_rfftfreq.default)
def rfftfreq(n: Size, d: float = 1.0, *, dtype: Any = None, **options: Any) -> Tensor:
    return fresh((n // 2 + 1,), dtype)


@rule(aten._standard_gamma.default, aten._sample_dirichlet.default)
def gamma(self: Tensor, generator: Any = None) -> Tensor:
    return fresh(self.shape, self.dtype)


@rule(aten.binomial.default)
def binomial(count: Tensor, prob: Tensor, generator: Any = None) -> Tensor:
    return fresh(broadcast(count.shape, prob.shape), count.dtype)


@rule(aten.normal.float_float)
def normal(mean: float, std: float, size: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return fresh(size, dtype)


@rule(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal_like(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    given = [t for t in (mean, std) if isinstance(t, Tensor)]
    return fresh(broadcast(*(t.shape for t in given)), given[0].dtype)


def _range(start: Any, end: Any, step: Any, dtype: Any) -> Tensor:
    if dtype is None:
        dtype = torch.int64 if all(isinstance(v, (int, torch.SymInt)) for v in (start, end, step)) else torch.get_default_dtype()
    if not dtype.is_floating_point:  # eager converts the numbers first
        is_rounded = [isinstance(v, (float, torch.SymFloat)) and math.isfinite(v) for v in (start, end, step)]
        start, end, step = (torch.sym_int(v) if r else v for v, r in zip((start, end, step), is_rounded, strict=True))
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if not require(start <= end if step > 0 else start >= end):
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    if all(isinstance(v, (int, torch.SymInt)) for v in (start, end, step)):
        count = end - start if same(step, 1) else -((start - end) // step)
    else:
        count = math.ceil((end - start) / step)
    return fresh((count,), dtype)


@rule(aten.arange.default)
def arange(end: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return _range(0, end, 1, dtype)


@rule(aten.arange.start)
def arange_start(start: Any, end: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return _range(start, end, 1, dtype)


@rule(aten.arange.start_step)
def arange_step(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **options: Any) -> Tensor:
    return _range(start, end, step, dtype)


def _spaced(start: Any, end: Any, steps: Size, *rest: Any, dtype: Any = None, **options: Any) -> Tensor:
    if dtype is None and any(isinstance(v, complex) or (isinstance(v, Tensor) and v.dtype.is_complex) for v in (start, end)):
        dtype = torch.complex64
    return fresh((steps,), dtype)


rule(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)(_spaced)
rule(aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor)(_spaced)


@rule(aten.tril_indices.default)
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = torch.int64, **options: Any) -> Tensor:
    count = sum(min(max(i + offset + 1, 0), col) for i in range(row))
    return fresh((2, count), torch.int64 if dtype is None else dtype)


@rule(aten.triu_indices.default)
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = torch.int64, **options: Any) -> Tensor:
    count = sum(min(max(col - i - offset, 0), col) for i in range(row))
    return fresh((2, count), torch.int64 if dtype is None else dtype)


def _like(self: Tensor, *values: Any, dtype: Any = None, memory_format: Any = None, **options: Any) -> Tensor:
    kind = self.dtype if dtype is None else dtype
    for v in (*values, *(options[k] for k in ("fill_value",) if k in options)):
        check_number(v, kind)
    return make(self.shape, copy_strides(self, memory_format), kind)


for _name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"):
    for _op in overloads("aten", _name):
        if not _op._schema.overload_name.endswith("out") and _op not in RULES:
            rule(_op)(_like)


@rule(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default)
def new_empty(self: Tensor, size: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return fresh(size, self.dtype if dtype is None else dtype)


@rule(aten.new_full.default)
def new_full(self: Tensor, size: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    check_number(fill_value, self.dtype if dtype is None else dtype)
    return fresh(size, self.dtype if dtype is None else dtype)


@rule(aten.new_empty_strided.default)
def new_empty_strided(self: Tensor, size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return make(size, stride, self.dtype if dtype is None else dtype)
