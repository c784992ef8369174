"""Shape rules of quantisation that computes in floats (fake quantisation): results lie as their input does."""

from __future__ import annotations

from typing import Any

import torch

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


@rule(aten._fake_quantize_learnable_per_tensor_affine.default, aten._fake_quantize_learnable_per_channel_affine.default)
def learnable(self: Tensor, *rest: Any) -> Tensor:
    return _like(self, self.dtype)


@rule(
    aten._fake_quantize_learnable_per_tensor_affine_backward.default, aten._fake_quantize_learnable_per_channel_affine_backward.default,
)  # fmt: skip
def learnable_backward(grad: Tensor, self: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(self, self.dtype), _like(scale, scale.dtype), _like(zero_point, zero_point.dtype)
