"""Shape rules of quantisation that computes in floats (fake quantisation): results lie as their input does."""

from __future__ import annotations

from typing import Any

import torch

from ...codes import Unsupported
from ..tracing import make, rule
from .create import copy_strides

aten = torch.ops.aten
Tensor = torch.Tensor


def _like(model: Tensor, dtype: torch.dtype) -> Tensor:
    return make(model.shape, copy_strides(model, None), dtype)


@rule(
    aten.fake_quantize_per_tensor_affine_cachemask.default, aten.fake_quantize_per_channel_affine_cachemask.default,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
)  # fmt: skip
def with_mask(self: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The rounded values, and which of them were in range."""
    return _like(self, self.dtype), _like(self, torch.bool)


@rule(aten._fused_moving_avg_obs_fq_helper_functional.default)
def observed(
    self: Tensor, observer_on: Tensor, fake_quant_on: Tensor, running_min: Tensor, running_max: Tensor, scale: Tensor, zero_point: Tensor,
    *rest: Any, **named: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same, and the new ranges, scales and zero points; ranges of rows that are not known yet take their sizes from the data."""
    ranges = (running_min, running_max, scale, zero_point)
    if any(type(n) is int and n == 0 for t in ranges for n in t.shape):
        raise Unsupported("GRA009", detail="ranges that have no size yet")
    return (*with_mask(self), *(_like(t, t.dtype) for t in ranges))


@rule(aten._fake_quantize_learnable_per_tensor_affine.default, aten._fake_quantize_learnable_per_channel_affine.default)
def learnable(self: Tensor, *rest: Any) -> Tensor:
    return _like(self, self.dtype)


@rule(
    aten._fake_quantize_learnable_per_tensor_affine_backward.default, aten._fake_quantize_learnable_per_channel_affine_backward.default,
)  # fmt: skip
def learnable_backward(grad: Tensor, self: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(self, self.dtype), _like(scale, scale.dtype), _like(zero_point, zero_point.dtype)
