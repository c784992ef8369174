"""Attention of which gradients are wanted, on a GPU: one operator and its derivative (graph/attention.py) where the library has it, and
wherever something is dropped.
Those of the library's forwards that programs call by name."""

from __future__ import annotations

from typing import Any

import torch

from ...codes import Unsupported
from ..attention import NAMESPACE, STATES, scores
from ..layout import broadcast, same
from ..tracing import Tracing, current, device_of, fresh, make, rule
from . import nn
from .views import copy_strides

aten = torch.ops.aten
ops = getattr(torch.ops, NAMESPACE)
Tensor = torch.Tensor
LIBRARIES = {"cuda"}  # types of devices whose library has it
TYPES = frozenset({torch.float16, torch.bfloat16})  # products of float32 are faster apart, in TF32
MULTIPLE = 8  # of the numbers in a row of a head: 16 bytes


def library_takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool) -> bool:
    """Is this a call that the library's attention computes with its gradients, and that it may?"""
    if device_of(q).type not in LIBRARIES or q.dtype not in TYPES or dropout_p or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    if any(t.dim() != 4 or t.dtype is not q.dtype or not same(t.stride(-1), 1) for t in (q, k, v)):
        return False
    if any(type(n) is not int or n % MULTIPLE or n == 0 for n in (q.shape[3], v.shape[3])) or not same(q.shape[3], k.shape[3]):
        return False
    if not all(same(q.shape[d], t.shape[d]) for t in (k, v) for d in (0, 1)) or not same(k.shape[2], v.shape[2]):
        return False
    if any(type(n) is int and n == 0 for t in (q, k) for n in t.shape):
        return False
    if mask is None:
        return True
    whole = (*q.shape[:3], k.shape[2])
    fits = all(same(n, whole[i - mask.dim()]) or (type(n) is int and n == 1) for i, n in enumerate(mask.shape))
    return mask.dtype in (torch.bool, q.dtype) and mask.dim() <= 4 and fits and not is_causal and not mask.requires_grad


def library_draws(trace: Tracing, q: Tensor, dropout_p: float) -> bool:
    """Does a kernel of the library's draw here? Which one is found out when it is called."""
    found = device_of(q).type in LIBRARIES and dropout_p > 0 and not trace.facts.own_draws
    if found and trace.facts.kernels_chosen:
        raise Unsupported("LOW003", at=trace.facts.loc, detail="dropout in attention under sdpa_kernel")
    return found


def _lying(like: Tensor, width: Any) -> Tensor:
    b, h, n, _ = like.shape
    return make((b, h, n, width), (n * h * width, width, h * width, 1), like.dtype)


@rule(ops.forward.default)
def attention_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    b, h, n, _ = q.shape
    return _lying(q, v.shape[3]), fresh((b, h, n), torch.float32)


@rule(ops.backward.default)
def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_lying(t, t.shape[3]) for t in (q, k, v))


@rule(ops.dropped.default)
def attention_dropped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wanted: Any, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    state = fresh((STATES[device_of(q).type],), torch.uint8)
    lead = q.shape[:-2] if enable_gqa else broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if any(not same(a, b) for t in (q, v) for a, b in zip(lead, t.shape[:-2], strict=False)) and not enable_gqa:
        return fresh((*lead, q.shape[-2], v.shape[-1]), q.dtype), state  # of products
    return nn.attention(q, k, v, mask, dropout_p, is_causal), state


@rule(ops.dropped_backward.default)
def attention_dropped_backward(
    grad: Tensor, state: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wanted: Any, *how: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    def like(t: Tensor | None, needed: bool) -> Tensor:
        if t is None or not needed:
            return fresh((0,), grad.dtype)
        return fresh(t.shape, t.dtype) if t is mask or t.dim() != 4 or t.dtype is torch.float64 else _lying(t, t.shape[3])

    return tuple(like(t, needed) for t, needed in zip((q, k, v, mask), wanted, strict=True))


@rule(aten._efficient_attention_forward.default)
def efficient_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    raise Unsupported("LOW005", at=current().facts.loc, detail="the seeds of _efficient_attention_forward, which lie in the host's memory")


@rule(aten._flash_attention_forward.default)
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: Any, max_k: Any, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, **options: Any,
) -> Any:  # fmt: skip
    """(batch, places, heads, width), of sequences of one length."""
    if cum_seq_q is not None or cum_seq_k is not None or return_debug_mask or query.dim() != 4:
        return NotImplemented
    out = make(query.shape, copy_strides(query, None), query.dtype)
    log = fresh((query.shape[0], query.shape[2], query.shape[1]), torch.float32)
    return out, log, fresh((2,), torch.uint64), fresh((), torch.uint64), fresh((0,), query.dtype)


class Attention(torch.autograd.Function):
    """In: q, k, v, mask, is_causal, scale; out: one value for each query."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
        out, log = current().dispatch(ops.forward.default, given, {})
        ctx.save_for_backward(*given[:4], out, log)
        ctx.how = given[4:]
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *given, out, log = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative that is differentiated again
            wanted = [t for t in given[:3] if t.requires_grad]
            q, k, v, mask = given
            again = torch.matmul(torch.ops.aten._safe_softmax(scores(q, k, mask, *ctx.how), -1), v)
            found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
            return *(next(found) if t.requires_grad else None for t in given[:3]), None, None, None
        return *ops.backward.default(grad, *given, out, log, *ctx.how), None, None, None


class DroppedAttention(torch.autograd.Function):
    """In: q, k, v, mask, dropout_p, is_causal, scale, enable_gqa; out: one value for each query."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
        ctx.how = (list(ctx.needs_input_grad[:4]), *given[4:])
        out, state = current().dispatch(ops.dropped.default, (*given[:4], *ctx.how), {})
        ctx.save_for_backward(*given[:4], state)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # eager's kernels have no derivative of it either, but for one
            raise Unsupported("AUT004", at=current().facts.loc, detail="a derivative of a derivative of attention with dropout")
        *given, state = ctx.saved_tensors
        found = ops.dropped_backward.default(grad, state, *given, *ctx.how)
        return *(t if needed else None for t, needed in zip(found, ctx.how[0], strict=True)), None, None, None, None
