"""Attention of which gradients are wanted, on a GPU: operators on values, which torch's libraries compute. Two without dropout, of 16-bit
numbers, and two with it, of all.

B batches, H heads, N queries, M keys. q [B, H, N, D], k [B, H, M, D], v [B, H, M, E] of one floating dtype, their rows dense; mask: None,
or what is added to the scores, of their dtype, of sizes that broadcast to [B, H, N, M].

    forward   out [B, H, N, E], which lies as [B, N, H, E], and the logarithm of each query's sum of exponentials, float32, [B, H, N]
    backward  the gradients of q, k and v, which lie as out does

Eager's operators also hand a generator's state from one to the other, whose device depends on whether a stream is captured. Which library
computes a call is found out when it is made: a mask that is true everywhere is dropped after all shapes are known. Here they are written
with torch's operators for other devices.

    dropped            out, as eager's attention gives it, and where its dropout's numbers begin (STATES bytes)
    dropped_backward   the gradients of q, k, v and mask; an empty tensor for those that are not wanted

What a dropout leaves depends on the kernel as well as on the generator: each has an order of its own. So the call is eager's whole
operator, of tensors that require grad where eager's do, and backward makes it again, from the same state and by the same kernel, for
eager's derivative of it. Neither keeps what lies between.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..runtime.draws import generator_of

aten = torch.ops.aten
Tensor = torch.Tensor
NAMESPACE = "torchsmith_attention"
ROWS = 32  # the kernels that take masks pad the logarithms to a multiple of these
WIDEST = 256  # numbers in a row of a head that the flash kernels take
STATES = {"cuda": 16 + 1, "cpu": 5056 + 1}  # bytes of a generator's state, and one for the kernel
ALIGNED = 8  # elements: steps of a mask that the library takes are multiples of these
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _factor(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """[B, H, N, M], -inf where a key does not count."""
    found = torch.matmul(q, k.mT) * _factor(q, scale)
    if is_causal:
        found = found.masked_fill(torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).tril().logical_not(), -math.inf)
    return found if mask is None else found + mask


def _lying(t: Tensor) -> Tensor:
    """`t` as [B, N, H, E] lies."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    found = scores(q.float(), k.float(), mask, is_causal, scale)
    log = found.logsumexp(-1)
    log = log.masked_fill(log == -math.inf, 0.0)
    return _lying(torch.matmul((found - log.unsqueeze(-1)).exp(), v.float()).to(q.dtype)), log


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, log: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    g, wide = grad.float(), (q.float(), k.float(), v.float())
    p = (scores(*wide[:2], mask, is_causal, scale) - log[..., None]).exp()
    d = p * (torch.matmul(g, wide[2].mT) - (g * out.float()).sum(-1, keepdim=True)) * _factor(q, scale)
    made = torch.matmul(d, wide[1]), torch.matmul(d.mT, wide[0]), torch.matmul(p.mT, g)
    return tuple(_lying(t.to(q.dtype)) for t in made)  # type: ignore[return-value]


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as the library takes it: of all dimensions, its last one dense, steps along the others multiples of ALIGNED."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(s % ALIGNED for s in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask.contiguous(), (0, -mask.shape[-1] % ALIGNED))[..., : mask.shape[-1]]
    return mask.expand(*q.shape[:3], k.shape[2])


def _is_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """The fastest kernels take no mask; what is causal, as they see it, ends with the last key, not with the query's own."""
    if mask is not None or not torch.backends.cuda.flash_sdp_enabled() or not torch.backends.cuda.is_flash_attention_available():
        return False
    return q.shape[3] == v.shape[3] <= WIDEST and not (is_causal and q.shape[2] != k.shape[2])


def _library_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    if _is_flash(q, k, v, mask, is_causal):
        out, log = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, False, scale=scale)[:2]
        return _lying(out), log
    run = aten._scaled_dot_product_efficient_attention.default
    out, log = run(q, k, v, _aligned(mask, q, k), True, 0.0, is_causal, scale=scale)[:2]
    return out, log[..., : q.shape[2]].contiguous()


def _library_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, log: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad = _lying(grad)
    if _is_flash(q, k, v, mask, is_causal):
        state = log.new_empty(2, dtype=torch.uint64)  # of a generator: not read
        run, sizes = aten._scaled_dot_product_flash_attention_backward.default, (None, None, q.shape[2], k.shape[2])
        return tuple(map(_lying, run(grad, q, k, v, out, log, *sizes, 0.0, is_causal, state, state[0], scale=scale)))  # type: ignore[return-value]
    state, wanted = log.new_empty((), dtype=torch.int64), [True, True, True, False]
    log = torch.nn.functional.pad(log, (0, -q.shape[2] % ROWS))
    run = aten._scaled_dot_product_efficient_attention_backward.default
    found = run(grad, q, k, v, _aligned(mask, q, k), out, log, state, state, 0.0, wanted, is_causal, scale=scale)
    return tuple(map(_lying, found[:3]))  # type: ignore[return-value]


# ---------------------------------------------------------------- with dropout


@contextlib.contextmanager
def _as_in_eager(given: Sequence[Tensor | None], wanted: Sequence[bool]) -> Iterator[tuple[Tensor | None, ...]]:
    """The operands as leaves that require grad where eager's do: which kernel runs may depend on it."""
    with torch.enable_grad(), torch._C._DisableAutocast():
        yield tuple(None if t is None else t.detach().requires_grad_(needed) for t, needed in zip(given, wanted, strict=True))


def _generator(device: torch.device) -> Any:
    return torch.default_generator if device.type == "cpu" else generator_of(device)


def _kernel(given: Any, how: Any) -> int:
    *how, scale, enable_gqa = how
    return int(aten._fused_sdp_choice.default(*given, *how, scale=scale, enable_gqa=enable_gqa))


def _attend(given: Any, how: Any) -> Tensor:
    *how, scale, enable_gqa = how
    return aten.scaled_dot_product_attention.default(*given, *how, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]


def _dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wanted: Sequence[bool], *how: Any) -> tuple[Tensor, Tensor]:
    """Raises RuntimeError while a stream is captured, as its state is not known then: the call is repeated eagerly."""
    state = _generator(q.device).get_state()
    with _as_in_eager((q, k, v, mask), wanted) as given:
        kernel, out = _kernel(given, how), _attend(given, how)
    return out.detach(), torch.cat((state, state.new_tensor([kernel]))).to(q.device, non_blocking=True)


def _dropped_backward(
    grad: Tensor, state: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wanted: Sequence[bool], *how: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    """The state comes back from the device, which is waited for: libraries read it in the host's memory."""
    generator, at_first = _generator(q.device), state.cpu()
    now = generator.get_state()
    with _as_in_eager((q, k, v, mask), wanted) as given, contextlib.ExitStack() as stack:
        if _kernel(given, how) != at_first[-1]:  # other kernels are allowed by now
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend(int(at_first[-1]))))
        generator.set_state(at_first[:-1].clone())
        try:
            out = _attend(given, how)
        finally:
            generator.set_state(now)
        found = iter(torch.autograd.grad(out, [t for t, needed in zip(given, wanted, strict=True) if t is not None and needed], grad))
    return tuple(next(found) if needed else grad.new_empty(0) for needed in wanted)


_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? mask"
_HOW = "bool is_causal, float? scale"
for _name, _fn, _library, _schema in (
    ("forward", _forward, _library_forward, f"({_GIVEN}, {_HOW}) -> (Tensor, Tensor)"),
    ("backward", _backward, _library_backward, f"(Tensor grad, {_GIVEN}, Tensor out, Tensor log, {_HOW}) -> (Tensor, Tensor, Tensor)"),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _fn, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _library, "CUDA")
_DROPPING = "bool[] wanted, float dropout_p, bool is_causal, float? scale, bool enable_gqa"
_LIBRARY.define(f"dropped({_GIVEN}, {_DROPPING}) -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("dropped", _dropped, "CompositeExplicitAutograd")
_LIBRARY.define(f"dropped_backward(Tensor grad, Tensor state, {_GIVEN}, {_DROPPING}) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.impl("dropped_backward", _dropped_backward, "CompositeExplicitAutograd")
