"""flex_attention written out: scores, what the program's functions make of them (vmap over batch, heads and positions), softmax, product.

In: the machine and the call's arguments. Out: the attention's result. What eager refuses is left to eager. The blocks of a mask are a hint for
speed: its mask_mod alone says what is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..codes import Unsupported
from .attributes import attr_or
from .control_flow import _arguments
from .protocol import Machine

_NAMES = "query key value score_mod= block_mask= scale= enable_gqa= return_lse= kernel_options= return_aux="
_ANY_LENGTH = 1 << 30  # the block size of a mask that masks nothing


def flex_attention(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    query, key, value, score_mod, mask, scale, gqa, with_lse, _, aux = _arguments(_NAMES, args, kwargs)
    tensors = (query, key, value)
    mask_mod = None if mask is None else m.attr(mask, "mask_mod")
    if aux is not None or not _is_plain(m, tensors, mask, gqa) or getattr(mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise Unsupported("CAP051", at=m.loc(), detail="flex_attention of this kind")
    if scale is None:
        scale = m.inline(_scale, [query], {})
    return m.inline(_written_out, [*tensors, score_mod, mask_mod, scale, bool(with_lse)], {})


def _is_plain(m: Machine, tensors: tuple[Any, ...], mask: Any, gqa: Any) -> bool:
    """Is this a call that eager takes?"""
    if any(not issubclass(type(t), torch.Tensor) or t.dim() != 4 or t.dtype != tensors[0].dtype for t in tensors):
        return False
    query, key, value = (t.shape for t in tensors)
    if key[:3] != value[:3] or query[0] != key[0] or query[3] != key[3]:
        return False
    if query[1] % key[1] if gqa else query[1] != key[1]:
        return False
    if mask is None:
        return True
    lengths, block = attr_or(m, mask, "seq_lengths", None), attr_or(m, mask, "BLOCK_SIZE", (0, 0))
    return lengths is not None and (tuple(lengths) == (query[2], key[2]) or tuple(block) == (_ANY_LENGTH, _ANY_LENGTH))


def _scale(query: Any) -> Any:
    return 1.0 / math.sqrt(query.size(-1))


def _over_all(fn: Any, first: tuple[Any, ...]) -> Any:
    """fn of one score's place, for all places."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        fn = torch.func.vmap(fn, in_dims=first + dims)
    return fn


def _written_out(query: Any, key: Any, value: Any, score_mod: Any, mask_mod: Any, scale: Any, with_lse: bool) -> Any:
    heads = query.size(1) // key.size(1)
    if heads > 1:
        key, value = key.repeat_interleave(heads, dim=1), value.repeat_interleave(heads, dim=1)
    working = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = (query.to(working) @ key.to(working).transpose(-2, -1)) * scale
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    if score_mod is not None:
        scores = _over_all(score_mod, (0,))(scores, *places).to(working)
    if mask_mod is not None:
        scores = torch.where(_over_all(mask_mod, ())(*places), scores, -math.inf)
    out = torch._safe_softmax(scores, -1).to(query.dtype) @ value.to(query.dtype)
    return (out, torch.logsumexp(scores, -1)) if with_lse else out
