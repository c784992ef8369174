"""Autocast while tracing: torch's own autocast looks at a tensor's device and would pass tracing tensors by.

In: an operator below autograd and its arguments. Out: the arguments cast as eager's autocast would have cast them, or None when
nothing changes. What autograd watches is cast above it, where the torch function is called (CASTING), so that the cast is differentiated
too; so are composites that eager casts as a whole (FUNCTIONS; matmul and linear).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket

from ..codes import Unsupported
from .schema import overloads

PRODUCTS = "mm bmm addmm addbmm baddbmm convolution _addmm_activation scaled_dot_product_attention"
LOSSES = """mse_loss nll_loss_forward nll_loss2d_forward smooth_l1_loss huber_loss binary_cross_entropy multi_margin_loss
    multilabel_margin_loss_forward prod _cdist_forward soft_margin_loss"""
LOWER = {"cpu": PRODUCTS, "cuda": PRODUCTS + " mv addmv dot addr _prelu_kernel"}
FULL = {
    "cpu": LOSSES + """ avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
        max_pool3d_with_indices max_unpool2d max_unpool3d grid_sampler_2d grid_sampler_3d polar trace view_as_complex reflection_pad1d
        reflection_pad2d replication_pad1d replication_pad2d replication_pad3d cholesky cholesky_inverse linalg_cholesky_ex linalg_eig
        linalg_eigh _linalg_eigh linalg_inv_ex linalg_lstsq linalg_qr _linalg_solve_ex _linalg_svd geqrf orgqr ormqr triangular_solve
        _ctc_loss _fft_r2c _fft_c2r _fft_c2c linalg_householder_product _prelu_kernel""",
    "cuda": LOSSES + """ acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus native_layer_norm
        native_group_norm renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_trilinear3d upsample_bicubic2d _softmax _log_softmax cumprod cumsum linalg_vector_norm sum norm""",
}  # fmt: skip
# Python functions over composites that eager's autocast runs in float32.
FUNCTIONS = """cross_entropy kl_div cosine_embedding_loss hinge_embedding_loss margin_ranking_loss poisson_nll_loss triplet_margin_loss
    l1_loss binary_cross_entropy_with_logits"""


def _table(names: dict[str, str]) -> dict[str, frozenset[OpOverload]]:
    return {d: frozenset(op for name in text.split() for op in overloads("aten", name)) for d, text in names.items()}


LOWER_OPS, FULL_OPS = _table(LOWER), _table(FULL)


def autocast_state() -> dict[str, torch.dtype]:
    """Device type -> the dtype it autocasts to, for those that do now."""
    return {d: torch.get_autocast_dtype(d) for d in LOWER if torch.is_autocast_enabled(d)}


def target_dtype(func: OpOverload, device: str, state: dict[str, torch.dtype]) -> torch.dtype | None:
    """The dtype eager's autocast runs `func` in, None where it leaves it alone."""
    if device not in state:
        return None
    if func.namespace != "aten":
        return _of_custom(func, device)
    if func in LOWER_OPS[device]:
        return state[device]
    return torch.float32 if func in FULL_OPS[device] else None


def _of_custom(func: OpOverload, device: str) -> torch.dtype | None:
    """As target_dtype, of an operator of a library. Raises Unsupported where only the library's own kernel knows."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), f"Autocast{device.upper()}"):
        return None
    definition = OPDEFS.get(func.name())
    dtype = None if definition is None else definition._autocast_dtype.get(device)
    if dtype is None:
        raise Unsupported("CAP017", detail=f"{func} has a kernel of its own for it")
    return dtype


def cast_arguments(value: Any, dtype: torch.dtype, casts: dict[Any, Any] | None = None) -> Any:
    """Floating tensors (not float64) become `dtype`. casts: weights of this region that were cast already, as eager's cache keeps them."""
    if isinstance(value, torch.Tensor):
        if not value.dtype.is_floating_point or value.dtype in (torch.float64, dtype):
            return value
        if casts is None or not (value.dtype is torch.float32 and value.requires_grad and value.is_leaf):
            return torch.ops.aten._to_copy.default(value, dtype=dtype)
        key = (id(value), dtype, torch.is_grad_enabled())
        if key not in casts:
            casts[key] = (torch.ops.aten._to_copy.default(value, dtype=dtype), value)
        return casts[key][0]
    if isinstance(value, (list, tuple)):
        return type(value)(cast_arguments(v, dtype, casts) for v in value)
    if isinstance(value, dict):
        return {k: cast_arguments(v, dtype, casts) for k, v in value.items()}
    return value


# Torch functions and the operators they are: what is cast where they are called.
_CALLED = {
    "convolution": "convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", "_cdist_forward": "cdist",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss2d", "_softmax": "softmax", "_log_softmax": "log_softmax",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d", "max_pool3d_with_indices": "max_pool3d", "_prelu_kernel": "prelu",
    "_ctc_loss": "ctc_loss",
    "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "linalg_vector_norm": "norm",
}  # fmt: skip


def _casting() -> dict[Any, str]:
    """Torch function -> the operator whose row says how autocast treats it."""
    found: dict[Any, str] = {}
    c: Any = torch._C
    homes = (torch, torch.Tensor, c._nn, c._linalg, c._fft)
    for text in (*LOWER.values(), *FULL.values()):
        for name in text.split():
            for called in _CALLED.get(name, name).split():
                for home in homes:
                    fn = getattr(home, called, None)
                    if callable(fn):
                        found.setdefault(fn, name)
    return found


CASTING = _casting()


def cast_for(func: Any, device: str, state: dict[str, torch.dtype]) -> torch.dtype | None:
    """The dtype that eager's autocast runs a torch function in; None where it leaves it alone."""
    if isinstance(func, OpOverload):
        asked: Any = (func,)
    elif isinstance(func, OpOverloadPacket):
        asked = (getattr(func, name) for name in func.overloads())
    else:
        name = CASTING.get(func)
        asked = () if name is None else overloads("aten", name)
    return next((d for op in asked if (d := target_dtype(op, device, state)) is not None), None)

