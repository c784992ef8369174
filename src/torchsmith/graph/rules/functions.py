"""Rules of torch functions above the dispatcher: what would choose by device, and what reads a device."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.utils._mode_utils import no_dispatch

from ...codes import Unsupported
from ..autocast import FUNCTIONS
from ..layout import (
    CHANNELS_LAST_ORDER,
    FORMAT_NDIM,
    UNKNOWN,
    broadcast,
    broadcasts_to,
    hint_of,
    is_certain,
    is_channels_last,
    is_contiguous,
    is_one,
    is_told,
    likely,
    matches,
    same,
    suggest_format,
)
from ..sizes import SymTypes
from ..tracing import Tracing, device_of, function_rule, tensors_in
from .attention import Attention, DroppedAttention, library_draws, library_takes
from .nn import RESAMPLING, flash_applies, is_by_cudnn
from .views import axis, infer, view_strides

aten = torch.ops.aten
Tensor = torch.Tensor


def is_watched(*values: Any) -> bool:
    """Does autograd watch what is computed of these?"""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(values))


@function_rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul, aten.matmul.default)
def matmul(trace: Tracing, call: Any, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """Batches of unknown sizes, as torch's composite multiplies them: in torch 2.11 that one asks for plain numbers."""
    a, b = _lowered(trace, (a, b))
    is_fixed = not a._has_symbolic_sizes_strides and not b._has_symbolic_sizes_strides
    if kwargs or is_fixed or max(a.dim(), b.dim()) < 3 or not min(a.dim(), b.dim()):
        return call(a, b, **kwargs)  # type: ignore[no-any-return]
    if a.dim() == 1:
        return matmul(trace, call, b.mT, a)
    if b.dim() > 2:
        if a.dim() == 2 and is_watched(a):  # as below
            return matmul(trace, call, b.mT, a.t()).mT.contiguous()
        return _batches(trace, a, b)
    shape, strides = a.shape, a.stride()
    is_one_matrix = all(same(strides[i], strides[i + 1] * shape[i + 1]) for i in range(a.dim() - 2))
    if is_one_matrix or is_watched(b):  # a copy, where the gradient of an expanded matrix would be as large
        rows = reshape(trace, Tensor.reshape, a, math.prod(shape[:-1]), shape[-1])
        return (torch.mv(rows, b) if b.dim() == 1 else torch.mm(rows, b)).view(*shape[:-1], *b.shape[1:])
    batch = reshape(trace, Tensor.reshape, a, math.prod(shape[:-2]), *shape[-2:])
    right = b.unsqueeze(1) if b.dim() == 1 else b
    return torch.bmm(batch, right.expand(batch.shape[0], *right.shape)).view(*shape[:-1], *b.shape[1:])


def _lowered(trace: Tracing, operands: Any) -> Any:
    """The operands of a product as autocast casts them: what matmul decomposes into (mv, dot) is not cast where it is called itself."""
    dtype = trace.autocast.get(device_of(operands[0]).type)
    return operands if dtype is None else trace.cast(operands, dtype)


def _batches(trace: Tracing, a: Tensor, b: Tensor) -> Tensor:
    """(..., n, k) x (..., k, m) as one bmm over the broadcast batch; a is a matrix or more, b more than that."""
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    left, right = (t.expand(*lead, *t.shape[-2:]) for t in (a, b))
    if len(lead) == 1:
        return torch.bmm(left, right)
    n = math.prod(lead)
    out = torch.bmm(*(reshape(trace, Tensor.reshape, t, n, *t.shape[-2:]) for t in (left, right)))
    return out.view(*lead, a.shape[-2], b.shape[-1])


@function_rule(torch.reshape, Tensor.reshape, aten.reshape.default)
def reshape(trace: Tracing, call: Any, self: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
    """A view where the memory allows it for all sizes, or for those at hand, which are assumed then; else of a copy."""
    size = kwargs.get("shape") or (shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    if not self._has_symbolic_sizes_strides and not any(isinstance(s, SymTypes) for s in size):
        return call(self, *shape, **kwargs)  # type: ignore[no-any-return]
    new = infer(size, self.numel())
    if _shows(self, new, trace.facts.is_promise):
        return self.view(new)
    return _copied(trace, self, torch.contiguous_format, lambda: _may_show(self, new)).view(new)


@function_rule(Tensor.sum_to_size)
def sum_to_size(trace: Tracing, call: Any, self: Tensor, *size: Any, **kwargs: Any) -> Tensor:
    """A dimension that is 1 already is not summed: where all are, the result is the tensor itself."""
    wanted = kwargs.get("size") or (size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size)
    for n, want in zip(reversed(self.shape), reversed(wanted), strict=False):
        if type(n) is torch.SymInt and is_certain(want == 1):
            asked_equal(n, 1)
    return call(self, *size, **kwargs)  # type: ignore[no-any-return]


@function_rule(torch.linalg.vander)
def vander(trace: Tracing, call: Any, x: Tensor, *, N: Any = None) -> Tensor:
    """torch asks of a length that varies whether it is 1 as it asks of broadcasting, and then raises."""
    if N is None and x.dim():
        asked_equal(x.shape[-1], 1)
    return call(x) if N is None else call(x, N=N)  # type: ignore[no-any-return]


def _shows(t: Tensor, new: Any, for_all: bool) -> bool:
    """Is a view of sizes `new` possible? for_all: nothing is assumed of sizes other than 1."""
    if is_contiguous(t) or view_strides(t.shape, t.stride(), new) is not None:
        return True
    if any(hint_of(n) == 1 for n in t.shape) and view_strides(with_ones(t), t.stride(), new) is not None:
        return True
    shape, strides, sizes = ([hint_of(n) for n in ns] for ns in (t.shape, t.stride(), new))
    if for_all or None in (*shape, *strides, *sizes) or view_strides(shape, strides, sizes) is None:
        return False
    return view_strides(t.shape, t.stride(), new, lambda a, b: same(a, b) or likely(a == b)) is not None


def _copied(trace: Tracing, t: Tensor, memory_format: torch.memory_format, is_view: Callable[[], bool]) -> Tensor:
    """A copy for most sizes; for some, eager shows `t` itself. Whoever sees the memory of both asks `is_view`, which assumes its answer."""
    made = t.clone(memory_format=memory_format)
    trace.note_copy(t, made, is_view)
    return made


def _may_show(t: Tensor, new: Any) -> bool:
    """Is it a view for the sizes at hand? All that is asked of them on the way is assumed."""
    if _is_empty(t):
        return True
    return view_strides(_Asked(t.shape), t.stride(), new, asked_equal) is not None


class _Asked(Sequence[Any]):
    """Sizes; where one is read, it is asked whether it is 1. What inner dimensions already refuse needs no answer about the batch."""

    def __init__(self, shape: Sequence[Any]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return len(self.shape)

    def __getitem__(self, d: Any) -> Any:
        return 1 if asked_equal(self.shape[d], 1) else self.shape[d]


def _is_empty(t: Tensor) -> bool:
    """Has it no elements? The answer is assumed, but of what only running tells."""
    return any(hint_of(n) != UNKNOWN and asked_equal(n, 0) for n in t.shape)


def asked_equal(a: Any, b: Any) -> bool:
    """Are two sizes equal? The answer is assumed; of what only running tells, that they are not."""
    if same(a, b):
        return True
    question = a == b
    if isinstance(question, torch.SymBool) and question.node.hint is None:
        (a != b).node.expect_true()
        return False
    return bool(question)


def with_ones(t: Tensor) -> list[Any]:
    """The sizes; those that are 1 at hand are assumed to stay so."""
    return [1 if hint_of(n) == 1 and is_one(n) else n for n in t.shape]


@function_rule(torch.broadcast_tensors)
def broadcast_tensors(trace: Tracing, call: Any, *tensors: Tensor) -> Any:
    """Torch's composite keeps a size that only running tells, though it may be the 1 that broadcasts; `broadcast` says it is not."""
    if not any(is_told(n) for t in tensors for n in t.shape):
        return call(*tensors)
    shape = broadcast(*[t.shape for t in tensors])
    return tuple([t.expand(shape) for t in tensors])


def _in_format(t: Tensor, memory_format: torch.memory_format) -> bool:
    """Is it contiguous in this format, of its rank, for the sizes at hand? The answer is assumed."""
    if memory_format is torch.contiguous_format:
        return _is_empty(t) or matches(t.shape, t.stride(), range(t.dim() - 1, -1, -1), asked_equal, asked_equal)
    return matches(t.shape, t.stride(), CHANNELS_LAST_ORDER[t.dim()], asked_equal, asked_equal)


@function_rule(Tensor.is_contiguous)
def asks_contiguous(trace: Tracing, call: Any, self: Tensor, memory_format: Any = torch.contiguous_format) -> bool:
    """The program's own question, which it may branch on."""
    if not self._has_symbolic_sizes_strides or FORMAT_NDIM.get(memory_format, self.dim()) != self.dim():
        return call(self, memory_format=memory_format)  # type: ignore[no-any-return]
    return _in_format(self, memory_format)


@function_rule(Tensor.contiguous)
def contiguous(trace: Tracing, call: Any, self: Tensor, memory_format: Any = torch.contiguous_format) -> Tensor:
    """A copy unless it is known to be none. Torch would ask about each stride."""
    is_unfit = FORMAT_NDIM.get(memory_format, self.dim()) != self.dim()
    if not self._has_symbolic_sizes_strides or memory_format is torch.preserve_format or is_unfit:
        return call(self, memory_format=memory_format)  # type: ignore[no-any-return]
    if is_contiguous(self) if memory_format is torch.contiguous_format else is_channels_last(self):
        return self
    order = CHANNELS_LAST_ORDER[self.dim()] if memory_format in FORMAT_NDIM else range(self.dim() - 1, -1, -1)
    is_so = matches([hint_of(n) for n in self.shape], [hint_of(s) for s in self.stride()], order)  # for the sizes at hand
    if is_so and matches(with_ones(self), self.stride(), order, same if trace.facts.is_promise else asked_equal):
        return self
    return _copied(trace, self, memory_format, lambda: _in_format(self, memory_format))


@function_rule(torch.ravel, Tensor.ravel)
def ravel(trace: Tracing, call: Any, self: Tensor) -> Tensor:
    return contiguous(trace, Tensor.contiguous, self).view(-1)


@function_rule(Tensor.reshape_as)
def reshape_as(trace: Tracing, call: Any, self: Tensor, other: Tensor) -> Tensor:
    return reshape(trace, Tensor.reshape, self, other.shape)


@function_rule(torch.flatten, Tensor.flatten, aten.flatten.using_ints)
def flatten(trace: Tracing, call: Any, self: Tensor, start_dim: Any = 0, end_dim: Any = -1, **kwargs: Any) -> Tensor:
    if kwargs or not self._has_symbolic_sizes_strides or not isinstance(start_dim, int) or not isinstance(end_dim, int):
        return call(self, start_dim, end_dim, **kwargs)  # type: ignore[no-any-return]
    first, last = axis(start_dim, self.dim()), axis(end_dim, self.dim())
    if first >= last:
        return call(self, start_dim, end_dim)  # type: ignore[no-any-return]
    sizes = self.shape
    return reshape(trace, Tensor.reshape, self, *sizes[:first], math.prod(sizes[first : last + 1]), *sizes[last + 1 :])


@function_rule(F.linear, aten.linear.default)
def linear(trace: Tracing, call: Any, input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """The same for linear: contiguous rows with a bias are one addmm."""
    input, weight, bias = _lowered(trace, (input, weight, bias))
    if input.dim() < 3 or weight.dim() != 2 or not input._has_symbolic_sizes_strides:
        return call(input, weight, bias)  # type: ignore[no-any-return]
    if bias is not None and bias.dim() == 1 and is_contiguous(input):
        rows = input.view(math.prod(input.shape[:-1]), input.shape[-1])
        return torch.addmm(bias, rows, weight.t()).view(*input.shape[:-1], weight.shape[0])
    out = matmul(trace, torch.matmul, input, weight.t())
    return out if bias is None else out.add_(bias)


def _as_summand(mask: Tensor, query: Tensor) -> Tensor:
    """A mask of booleans as what is added to scores."""
    return torch.where(mask, 0.0, query.new_full((), -torch.inf))


@function_rule(F.scaled_dot_product_attention)
def attention(
    trace: Tracing,
    call: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Tensor:
    """On a meta tensor torch would pick the decomposition; on CPU eager picks the flash kernel where it applies."""
    if attn_mask is not None and attn_mask.dim() < 2:
        raise IndexError("an attention mask has two dimensions or more")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(f"an attention mask of {attn_mask.dtype} for queries of {query.dtype}")
    if dropout_p < 0:
        raise RuntimeError("a dropout of less than nothing")  # which some kernels of eager's ignore
    options = {"scale": scale, "enable_gqa": enable_gqa}
    watched, place = is_watched(query, key, value, attn_mask), device_of(query).type
    draws = library_draws(trace, query, dropout_p)
    if draws and watched:
        return DroppedAttention.apply(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)  # type: ignore[no-any-return]
    if watched and library_takes(query, key, value, attn_mask, dropout_p, is_causal):
        added = _as_summand(attn_mask, query) if attn_mask is not None and attn_mask.dtype is torch.bool else attn_mask
        return Attention.apply(query, key, value, added, is_causal, scale)  # type: ignore[no-any-return]
    if place != "cpu":
        if watched:
            with trace.without_autocast():
                return call(query, key, value, attn_mask, dropout_p, is_causal, **options)
        exact = attn_mask is None or draws  # the mask has a say in which kernel draws
        if not exact and attn_mask.dtype is torch.bool:
            attn_mask = _as_summand(attn_mask, query)  # the library would do that in every call, with three kernels
        if not exact and not is_one(attn_mask.shape[-1]) and not same(attn_mask.stride(-1), 1):
            attn_mask = attn_mask.contiguous()  # an expanded one sends the library to its slowest way
        return trace.dispatch(aten.scaled_dot_product_attention.default, (query, key, value, attn_mask, dropout_p, is_causal), options)
    if "cpu" in trace.autocast:
        query, key, value, attn_mask = trace.cast((query, key, value, attn_mask), trace.autocast["cpu"])
    if not flash_applies(query, key, value, attn_mask, dropout_p, enable_gqa):
        heads = query.shape[:-2] if enable_gqa else broadcast(query.shape[:-2], key.shape[:-2])
        if attn_mask is not None and not broadcasts_to(attn_mask.shape, (*heads, query.shape[-2], key.shape[-2])):
            raise RuntimeError("an attention mask of more elements than there are scores")  # it is added in place
        return call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = _as_summand(attn_mask, query)
    if attn_mask is not None:
        whole = (*query.shape[:3], key.shape[2])[-attn_mask.dim() :]
        if any(type(have) is not int and not same(have, want) for have, want in zip(attn_mask.shape, whole, strict=True)):
            attn_mask = attn_mask.expand(whole)  # a size that is found to be 1 is not written so: kernels would walk along it
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    return flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


@function_rule(torch._scaled_dot_product_attention_math)
def attention_of_products(
    trace: Tracing, call: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any,
    **options: Any,
) -> Any:  # fmt: skip
    if library_draws(trace, query, dropout_p):  # traced, its C++ would draw as on the processor
        raise Unsupported("LOW003", at=trace.facts.loc, detail="_scaled_dot_product_attention_math with dropout")
    return call(query, key, value, attn_mask, dropout_p, *rest, **options)


@function_rule(torch._native_multi_head_attention)
def whole_attention(
    trace: Tracing, call: Any, query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor,
    qkv_bias: Any, proj_weight: Tensor, proj_bias: Any, mask: Any = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: Any = None,
) -> Any:  # fmt: skip
    """nn.MultiheadAttention's short cut in eval mode, in its parts."""
    if query.dim() != 3 or mask_type not in (None, 0, 1, 2):
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return call(query, key, value, embed_dim, num_head, *projections, mask, need_weights, average_attn_weights, mask_type)
    biases = (None, None, None) if qkv_bias is None else qkv_bias.chunk(3)
    parts = zip((query, key, value), qkv_weight.chunk(3), biases, strict=True)
    q, k, v = (linear(trace, F.linear, x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2) for x, w, b in parts)
    weights: Any = None
    if mask is None and not need_weights:
        mixed = attention(trace, F.scaled_dot_product_attention, q, k, v)
    else:
        scores = matmul(trace, torch.matmul, q * (1.0 / math.sqrt(embed_dim // num_head)), k.transpose(-2, -1))
        if mask is not None:  # of any dtype: what is not zero is left out
            shape = {0: (1, 1, *mask.shape[-2:]), 1: (mask.shape[0], 1, 1, mask.shape[-1])}
            scores = scores.masked_fill(mask.to(torch.bool).view(shape.get(mask_type, mask.shape)), -torch.inf)
        weights = scores.softmax(-1)
        mixed = matmul(trace, torch.matmul, weights, v)
        weights = None if not need_weights else weights.mean(1) if average_attn_weights else weights
    return linear(trace, F.linear, flatten(trace, torch.flatten, mixed.transpose(1, 2), 2), proj_weight, proj_bias), weights


@function_rule(torch._transformer_encoder_layer_fwd)
def encoder_layer(
    trace: Tracing, call: Any, src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Any, proj_weight: Tensor,
    proj_bias: Any, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor,
    norm_bias_2: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor, mask: Any = None, mask_type: Any = None,
) -> Any:  # fmt: skip
    """nn.TransformerEncoderLayer's short cut in eval mode, in its parts."""
    if src.dim() != 3:
        norms, products = (norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2), (weight_1, bias_1, weight_2, bias_2)
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return call(src, embed_dim, num_heads, *projections, use_gelu, norm_first, eps, *norms, *products, mask, mask_type)

    def attend(x: Tensor) -> Tensor:
        rest = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
        return whole_attention(trace, torch._native_multi_head_attention, x, x, x, *rest, mask, False, True, mask_type)[0]  # type: ignore[no-any-return]

    def feed(x: Tensor) -> Tensor:
        inner = linear(trace, F.linear, x, weight_1, bias_1)
        return linear(trace, F.linear, F.gelu(inner) if use_gelu else F.relu(inner), weight_2, bias_2)

    def first(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        src = src + attend(first(src))
        return src + feed(second(src))
    src = first(src + attend(src))
    return second(src + feed(src))


@function_rule(torch.group_norm)
def group_norm(
    trace: Tracing, call: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = True
) -> Tensor:
    """Only on CPU does eager keep channels-last, and a tracing tensor does not look like CPU to torch: nor does its gradient."""
    kept = suggest_format(input)
    if kept is torch.contiguous_format or device_of(input).type != "cpu":
        return call(input, num_groups, weight, bias, eps, cudnn)
    if is_watched(input):
        input = aten.alias.default(input)  # a name of its own: others that read the input have gradients in other orders
        input.register_hook(lambda g: None if torch.is_grad_enabled() else g.contiguous(memory_format=kept))
    n, c, *rest = input.shape
    area: Any = 1
    for s in rest:
        area = area * s
    args = (input.contiguous(memory_format=kept), weight, bias, n, c, area, num_groups, eps)
    return aten.native_group_norm.default(*args)[0]


@function_rule(torch.batch_norm)
def batch_norm(
    trace: Tracing, call: Any, input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: Any,
    eps: Any, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """On a GPU eager makes the input contiguous for cuDNN, and the statistics, whose copies it then writes."""
    rest = (weight, bias, running_mean, running_var, training)
    is_lost = training and not all(is_contiguous(t) for t in (running_mean, running_var) if t is not None)
    is_plain = is_contiguous(input) or is_channels_last(input)
    if (is_lost or not is_plain) and cudnn_enabled and is_by_cudnn(input, *rest):
        if is_lost:
            raise Unsupported("GRA006", at=trace.facts.loc, detail="batch norm writes copies of running statistics that are not contiguous")
        input = input.contiguous(memory_format=suggest_format(input))
    return call(input, *rest, momentum, eps, cudnn_enabled)  # type: ignore[no-any-return]


def _resample(name: str) -> None:
    """interpolate: the output size computed here, for torch's composite asks for plain sizes of input and output."""
    op, names = getattr(aten, name).default, [a.name for a in getattr(aten, name).vec._schema.arguments]

    def resample(trace: Tracing, call: Any, *args: Any, **named: Any) -> Tensor:
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | named
        input, sizes, factors = (given.get(n) for n in ("input", "output_size", "scale_factors"))
        if not isinstance(input, Tensor) or not (input._has_symbolic_sizes_strides or any(isinstance(n, SymTypes) for n in sizes or ())):
            return call(*args, **named)  # type: ignore[no-any-return]
        if len(args) > len(names) or not given.keys() <= set(names) or (sizes is None) is (factors is None):
            return call(*args, **named)  # type: ignore[no-any-return]
        if sizes is None:
            sizes = [_scaled(n, f) for n, f in zip(input.shape[2:], factors or (), strict=True)]
        scales = [None] * len(sizes) if factors is None else list(factors)
        return op(input, sizes, *(given[n] for n in names if n == "align_corners"), *scales)  # type: ignore[no-any-return]

    function_rule(getattr(torch._C._nn, name))(resample)


def _scaled(n: Any, factor: float) -> Any:
    """The size that torch gives: the product cut off."""
    if factor == int(factor):
        return n * int(factor)
    return int(n * factor) if isinstance(n, int) else torch.sym_int(n * factor)


for _name in RESAMPLING:
    _resample(_name)


@function_rule(Tensor.storage_offset)
def storage_offset(trace: Tracing, call: Any, self: Tensor) -> Any:
    trace.when_offset_read(self)
    return call(self)


@function_rule(Tensor.device.__get__)  # type: ignore[attr-defined]
def device(trace: Tracing, call: Any, self: Tensor) -> torch.device:
    return device_of(self)


@function_rule(Tensor.is_cpu.__get__)  # type: ignore[attr-defined]
def is_cpu(trace: Tracing, call: Any, self: Tensor) -> bool:
    return device_of(self).type == "cpu"


@function_rule(Tensor.is_cuda.__get__)  # type: ignore[attr-defined]
def is_cuda(trace: Tracing, call: Any, self: Tensor) -> bool:
    return device_of(self).type == "cuda"


@function_rule(Tensor.is_meta.__get__)  # type: ignore[attr-defined]
def is_meta(trace: Tracing, call: Any, self: Tensor) -> bool:
    return device_of(self).type == "meta"


@function_rule(Tensor.to)
def to(trace: Tracing, call: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A move to the device where the tensor already is becomes no move; torch would see a move away from meta."""
    kwargs = dict(kwargs)
    if args and isinstance(args[0], Tensor):
        other = args[0]
        return to(trace, call, self, device_of(other), other.dtype, *args[1:], **kwargs)
    if args and isinstance(args[0], (str, torch.device, int)) and not isinstance(args[0], bool):
        kwargs["device"] = args[0]
        for name, v in zip(("dtype", "non_blocking", "copy"), args[1:], strict=False):
            kwargs[name] = v
        args = ()
    if isinstance(kwargs.get("other"), Tensor):
        other = kwargs.pop("other")
        kwargs.update(device=device_of(other), dtype=other.dtype)
    where = kwargs.pop("device", None)
    if where is None or trace.place(where) == device_of(self):
        kwargs.pop("non_blocking", None)
        if args and args[0] is None:
            args = ()
        if kwargs.get("dtype", 0) is None:
            kwargs.pop("dtype")
        return call(self, *args, **kwargs) if args or kwargs else self
    dtype, device = kwargs.get("dtype"), trace.place(where)
    options = {"dtype": dtype, "device": device, "memory_format": kwargs.get("memory_format")}
    return cast(Tensor, trace.made_on(device, aten._to_copy.default, (self,), options))


@function_rule(Tensor.cpu)
def cpu(trace: Tracing, call: Any, self: Tensor, **kwargs: Any) -> Tensor:
    return to(trace, Tensor.to, self, "cpu", **kwargs)


@function_rule(Tensor.cuda)
def cuda(trace: Tracing, call: Any, self: Tensor, device: Any = None, **kwargs: Any) -> Tensor:
    where = "cuda" if device is None else device
    return to(trace, Tensor.to, self, torch.device("cuda", where) if isinstance(where, int) else where)


@function_rule(torch.tensor)
def tensor(trace: Tracing, call: Any, data: Any, **kwargs: Any) -> Tensor:
    made = _tensor(trace, call, data, **kwargs)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _tensor(trace: Tracing, call: Any, data: Any, **kwargs: Any) -> Tensor:
    """Constants: a number becomes `full`, a list with symbolic sizes is stacked, other data stays a real tensor until it is used."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if isinstance(data, (bool, int, float, *SymTypes)):
        options = {"dtype": dtype, "device": device}
        made: Any = trace.made_on("cpu" if device is None else device, torch.full, ((), data), options)
        if not isinstance(data, SymTypes):
            with torch._C.DisableTorchFunction(), no_dispatch():
                made._ts_constant = torch.tensor(data, dtype=made.dtype)
        return made
    if _has_symbols(data):
        return torch.stack([_tensor(trace, call, d, **kwargs) for d in data])
    with torch._C.DisableTorchFunction(), no_dispatch():  # past every mode, those of an outer Tracing included
        real = torch.tensor(data, dtype=dtype)
    return trace.constant(real, device)


@function_rule(Tensor.copy_)
def copy_(trace: Tracing, call: Any, self: Tensor, src: Any, non_blocking: bool = False) -> Tensor:
    """A number is a tensor of the widest type of its kind, as torch's parser of arguments makes it."""
    if isinstance(src, (bool, int, float)):
        kind = torch.bool if isinstance(src, bool) else torch.int64 if isinstance(src, int) else torch.float64
        src = torch.full((), src, dtype=kind)
    return call(self, src, non_blocking)  # type: ignore[no-any-return]


@function_rule(torch.as_tensor, torch.asarray)
def as_tensor(trace: Tracing, call: Any, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    if isinstance(data, Tensor):
        copy, where = kwargs.get("copy"), device_of(data) if device is None else device
        out = to(trace, Tensor.to, data, where, data.dtype if dtype is None else dtype, copy=bool(copy))
        if copy is False and out is not data:
            raise ValueError(f"torch.asarray: a tensor of {data.dtype} is none of {out.dtype} without a copy")
        return out
    return tensor(trace, call, data, dtype=dtype, device=device, requires_grad=kwargs.get("requires_grad"))


@function_rule(torch.from_numpy)
def from_numpy(trace: Tracing, call: Any, data: Any) -> Tensor:
    with torch._C.DisableTorchFunction(), no_dispatch():
        real = torch.from_numpy(data)
    return trace.constant(real)


@function_rule(Tensor.new_tensor)
def new_tensor(trace: Tracing, call: Any, self: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    if isinstance(data, Tensor):
        made = data.detach().clone().to(dtype or self.dtype)
        return made.requires_grad_() if kwargs.get("requires_grad") else made
    where = device_of(self) if device is None else device
    return tensor(trace, call, data, dtype=dtype or self.dtype, device=where, requires_grad=kwargs.get("requires_grad"))


@function_rule(torch.tensor_split, Tensor.tensor_split)
def tensor_split(trace: Tracing, call: Any, *args: Any, **kwargs: Any) -> Any:
    def plain(parts: Any) -> Any:
        known = trace.known_data(parts) if isinstance(parts, Tensor) else None
        if known is None:
            return parts
        with torch._C.DisableTorchFunction(), no_dispatch():
            found = known.tolist()
        return tuple(found) if isinstance(found, list) else found

    named = kwargs.pop("tensor_indices_or_sections", None)
    if named is not None:
        named = plain(named)
        kwargs["indices" if isinstance(named, tuple) else "tensor_indices_or_sections" if isinstance(named, Tensor) else "sections"] = named
    self, *rest = *args[:1], *map(plain, args[1:])
    parts = rest[0] if rest else kwargs.get("sections")
    if not isinstance(parts, int) or not self._has_symbolic_sizes_strides or parts < 1:
        return call(self, *rest, **kwargs)
    d = axis(rest[1] if len(rest) > 1 else kwargs.get("dim", 0), self.dim())
    n = self.shape[d]  # the first n % parts of them have one more
    return tuple(torch.split(self, [(n - i + parts - 1) // parts for i in range(parts)], d))


@function_rule(F.pad)
def pad(trace: Tracing, call: Any, input: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    """Only some torch ask of unknown sizes what eager asks: whether the padding goes round more than once."""
    if mode == "circular" and input._has_symbolic_sizes_strides and any(p > input.shape[-1 - i // 2] for i, p in enumerate(pad)):
        raise RuntimeError("Padding value causes wrapping around more than once.")
    return call(input, pad, mode, value)  # type: ignore[no-any-return]


@function_rule(torch.max_pool1d)
def max_pool1d(trace: Tracing, call: Any, input: Tensor, kernel_size: Any, stride: Any = (), *args: Any, **kwargs: Any) -> Tensor:
    """Of a length that varies: by way of the positions, for which torch asks for no plain number."""
    if not input._has_symbolic_sizes_strides:
        return call(input, kernel_size, stride, *args, **kwargs)  # type: ignore[no-any-return]
    return torch.max_pool1d_with_indices(input, kernel_size, stride, *args, **kwargs)[0]


@function_rule(F.max_pool1d)
def max_pool1d_of_module(
    trace: Tracing, call: Any, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    if return_indices or not input._has_symbolic_sizes_strides:
        return call(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return torch.max_pool1d_with_indices(input, kernel_size, () if stride is None else stride, padding, dilation, ceil_mode)[0]


@function_rule(F.affine_grid)
def affine_grid(trace: Tracing, call: Any, theta: Tensor, size: Any, align_corners: Any = None) -> Tensor:
    """Torch's checks compare the sizes with each other, looking for the least."""
    if not any(isinstance(s, SymTypes) for s in size) or not theta.is_floating_point() or theta.dim() != 3 or len(size) not in (4, 5):
        return call(theta, size, align_corners)  # type: ignore[no-any-return]
    if not (torch.is_grad_enabled() and theta.requires_grad and _has_symbols(size)):
        return aten.affine_grid_generator.default(theta, list(size), bool(align_corners))  # type: ignore[no-any-return]
    d = theta.shape[-2]  # torch's derivative wants plain sizes: the grid of the identity, times theta
    identity = torch.eye(d, d + 1, dtype=theta.dtype, device=device_of(theta))[None]
    grid = aten.affine_grid_generator.default(identity, [1, *size[1:]], bool(align_corners))
    places = torch.cat([grid, torch.ones_like(grid[..., :1])], -1).reshape(1, -1, d + 1)
    return (places.expand(size[0], -1, -1) @ theta.mT).view(size[0], *size[2:], d)


@function_rule(torch.cdist)
def cdist(
    trace: Tracing, call: Any, x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> Tensor:
    """torch's composite asks whether there are more than 25 rows; the operator decides that for itself when it runs."""
    if not any(t._has_symbolic_sizes_strides for t in (x1, x2)) or p != 2 or compute_mode != "use_mm_for_euclid_dist_if_necessary":
        return call(x1, x2, p, compute_mode)  # type: ignore[no-any-return]
    return aten._cdist_forward.default(x1, x2, 2.0, None)  # type: ignore[no-any-return]


@function_rule(torch.ctc_loss)
def ctc_loss(
    trace: Tracing, call: Any, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """For the mean, torch's composite makes a tensor of lengths that are a list, and reads it."""
    if isinstance(target_lengths, Tensor) or reduction != 1:
        return call(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)  # type: ignore[no-any-return]
    each = call(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
    lengths = torch.tensor([max(n, 1) for n in target_lengths], dtype=each.dtype, device=device_of(each))
    return (each / lengths).mean()  # type: ignore[no-any-return]


@function_rule(torch.kron)
def kron(trace: Tracing, call: Any, input: Tensor, other: Tensor, **kwargs: Any) -> Tensor:
    """(a, c) x (b, d) as (a, 1, c, 1) * (1, b, 1, d), joined; torch's composite asks for plain sizes."""
    if kwargs or not any(t._has_symbolic_sizes_strides for t in (input, other)):
        return call(input, other, **kwargs)  # type: ignore[no-any-return]
    n = max(input.dim(), other.dim())
    left, right = ((1,) * (n - t.dim()) + tuple(t.shape) for t in (input, other))
    a = reshape(trace, Tensor.reshape, input, [s for size in left for s in (size, 1)])
    b = reshape(trace, Tensor.reshape, other, [s for size in right for s in (1, size)])
    return (a * b).view([x * y for x, y in zip(left, right, strict=True)])


def _spaced(fn: Any, op: Any) -> None:
    def spaced(trace: Tracing, call: Any, start: Any, end: Any, steps: Any, *rest: Any, **kwargs: Any) -> Tensor:
        """Torch's parser wants a plain number of steps; a tracing tensor's operator does not."""
        if not isinstance(steps, torch.SymInt) or isinstance(start, Tensor) or isinstance(end, Tensor) or kwargs.get("out") is not None:
            return call(start, end, steps, *rest, **kwargs)  # type: ignore[no-any-return]
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
        base = rest or ((kwargs["base"],) if "base" in kwargs else ())
        return trace.dispatch(op, (start, end, steps, *base), options)  # type: ignore[no-any-return]

    function_rule(fn)(spaced)


_spaced(torch.linspace, aten.linspace.default)
_spaced(torch.logspace, aten.logspace.default)


@function_rule(F.one_hot)
def one_hot(trace: Tracing, call: Any, input: Tensor, num_classes: Any = -1) -> Tensor:
    """Scattered, for that checks the classes when it runs; torch's own does not on tensors without data."""
    is_empty = any(type(n) is int and n == 0 for n in input.shape)
    if input.dtype is not torch.int64 or (isinstance(num_classes, int) and num_classes < 1) or is_empty:
        return call(input, num_classes)  # type: ignore[no-any-return]
    return torch.zeros(*input.shape, num_classes, dtype=torch.int64, device=device_of(input)).scatter(-1, input.unsqueeze(-1), 1)


@function_rule(Tensor.fill_diagonal_)
def fill_diagonal(trace: Tracing, call: Any, self: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """Torch's own takes the sizes at hand."""
    if self.dim() != 2 or wrap or not self._has_symbolic_sizes_strides:
        return call(self, fill_value, wrap)  # type: ignore[no-any-return]
    self.diagonal().fill_(fill_value)
    return self


@function_rule(torch.cov, Tensor.cov)
def cov(trace: Tracing, call: Any, input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """Without weights: torch's own asks whether the divisor, a tensor there, is positive (and warns)."""
    if fweights is not None or aweights is not None or input.dim() > 2 or input.dtype is torch.bool:
        return call(input, correction=correction, fweights=fweights, aweights=aweights)  # type: ignore[no-any-return]
    rows = input if input.is_floating_point() or input.is_complex() else input.to(torch.get_default_dtype())
    rows = rows if input.dim() == 2 else rows.view(1, -1)
    n = rows.shape[1]
    centred = rows - (rows.sum(1) / n).unsqueeze(1)
    return ((centred @ centred.mT.conj()) / torch.sym_max(n - correction, 0)).squeeze()


@function_rule(torch.corrcoef, Tensor.corrcoef)
def corrcoef(trace: Tracing, call: Any, input: Tensor) -> Tensor:
    if input.dim() > 2 or input.is_complex() or input.dtype is torch.bool:
        return call(input)  # type: ignore[no-any-return]
    c = cov(trace, torch.cov, input)
    if not c.dim():
        return c / c
    deviation = c.diag().sqrt()
    return (c / deviation.unsqueeze(1) / deviation.unsqueeze(0)).clamp(-1, 1)


@function_rule(torch.gradient)
def gradient(trace: Tracing, call: Any, input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
    """Central differences, and one-sided ones at both ends. Torch's own takes the sizes at hand."""
    plain = isinstance(spacing, (int, float)) and edge_order == 1 and (input.is_floating_point() or input.is_complex())
    if not plain or not input._has_symbolic_sizes_strides:
        return call(input, spacing=spacing, dim=dim, edge_order=edge_order)
    dims = [axis(d, input.dim()) for d in (range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim)]
    if len(set(dims)) < len(dims):
        raise RuntimeError("torch.gradient: a dimension appears multiple times in the list of dims")
    found = []
    for d in dims:
        n = input.shape[d]
        if n < 2:
            raise RuntimeError("torch.gradient expected each dimension size to be at least edge_order+1")
        inner = (input.narrow(d, 2, n - 2) - input.narrow(d, 0, n - 2)) / spacing
        first = (input.narrow(d, 1, 1) - input.narrow(d, 0, 1)) / spacing
        last = (input.narrow(d, n - 1, 1) - input.narrow(d, n - 2, 1)) / spacing
        found.append(torch.cat([first, inner / 2, last], d))
    return tuple(found)


@function_rule(torch.einsum)
def einsum(trace: Tracing, call: Any, equation: Any, *operands: Any) -> Tensor:
    """The order of three operands and more is planned for the sizes at hand: opt_einsum wants plain ones. It is right for all sizes."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    planner = torch.backends.opt_einsum
    is_planned = isinstance(equation, str) and len(tensors) > 2 and planner.enabled and planner.is_available()
    if not is_planned or not any(isinstance(t, Tensor) and t._has_symbolic_sizes_strides for t in tensors):
        return call(equation, *operands)  # type: ignore[no-any-return]
    shapes = [tuple(hint_of(n) for n in t.shape) for t in tensors]
    path = planner.get_opt_einsum().contract_path(equation, *shapes, shapes=True, optimize=planner.strategy)[0]
    return torch._VF.einsum(equation, tensors, path=[n for step in path for n in step])  # type: ignore[attr-defined,no-any-return]


def _over_everything(name: str, n: int) -> None:
    """F.avg_pool2d(x, x.shape[2:]): torch's parser wants plain sizes; a window of the whole image is a mean."""
    fn = getattr(F, name)

    def pool(
        trace: Tracing, call: Any, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *rest: Any, **kwargs: Any
    ) -> Tensor:  # fmt: skip
        kernel = tuple(kernel_size) if isinstance(kernel_size, (tuple, list)) else (kernel_size,) * n
        is_whole = len(kernel) == n < input.dim() and all(same(k, s) for k, s in zip(kernel, input.shape[-n:], strict=True))
        if any(isinstance(k, SymTypes) for k in kernel) and is_whole and padding in (0, [0] * n, (0,) * n) and not rest:
            return input.mean(tuple(range(-n, 0)), keepdim=True)
        return call(input, kernel_size, stride, padding, *rest, **kwargs)  # type: ignore[no-any-return]

    function_rule(fn)(pool)


for _n in (1, 2, 3):
    _over_everything(f"avg_pool{_n}d", _n)


@function_rule(torch.tril_indices)
def tril_indices(trace: Tracing, call: Any, row: Any, col: Any, offset: int = 0, **options: Any) -> Tensor:
    """Torch's parser wants plain sizes."""
    if not isinstance(row, SymTypes) and not isinstance(col, SymTypes):
        return call(row, col, offset, **options)  # type: ignore[no-any-return]
    rows, cols = _below(row, col, offset, False, options.get("device"))
    return torch.stack([rows, cols]).to(options.get("dtype") or torch.int64)


@function_rule(torch.triu_indices)
def triu_indices(trace: Tracing, call: Any, row: Any, col: Any, offset: int = 0, **options: Any) -> Tensor:
    """The elements below a diagonal from the last to the first, in a matrix that is turned by half."""
    if not isinstance(row, SymTypes) and not isinstance(col, SymTypes):
        return call(row, col, offset, **options)  # type: ignore[no-any-return]
    rows, cols = _below(row, col, col - row - offset, True, options.get("device"))
    return torch.stack([(row - 1) - rows, (col - 1) - cols]).to(options.get("dtype") or torch.int64)


def _below(rows: Any, cols: Any, offset: Any, is_reversed: bool, device: Any) -> tuple[Tensor, Tensor]:
    """Row and column of each element on the diagonal `offset` or below it. Rows have `first`, `first` + 1, ... elements up to `cols`."""
    skipped, first = (-offset, 1) if offset < 0 else (0, 1 + offset)  # empty rows at the top
    rows = rows - skipped

    def before(r: Any) -> Any:
        """Elements of the first r rows, as long as those grow."""
        return r * first + r * (r - 1) // 2

    growing = 0 if first >= cols else cols - first + 1
    if rows <= growing:
        growing = rows if rows > 0 else 0
    body = before(growing)
    count = body + (rows - growing) * cols if rows > 0 else 0
    at = torch.arange(count, device=device)
    at = (count - 1) - at if is_reversed else at
    past = at - body
    row, col = growing + past // cols, past % cols
    if not (type(growing) is int and growing == 0):
        b = 2 * first - 1
        r = ((((at * 8 + b * b).double().sqrt()) - b) / 2).long()
        r = r - (before(r) > at).long() + (before(r + 1) <= at).long()  # the root is rounded
        row, col = torch.where(past < 0, r, row), torch.where(past < 0, at - before(r), col)
    return row + skipped, col


@function_rule(torch.take_along_dim, Tensor.take_along_dim)
def take_along_dim(trace: Tracing, call: Any, input: Tensor, indices: Tensor, dim: Any = None, **kwargs: Any) -> Tensor:
    """Along `dim` as gather, all other dimensions broadcast; torch's composite asks for plain sizes."""
    symbolic = any(t._has_symbolic_sizes_strides for t in (input, indices))
    if dim is None or kwargs or input.dim() != indices.dim() or not symbolic:
        return call(input, indices, dim, **kwargs)  # type: ignore[no-any-return]
    d = axis(dim, input.dim())
    rest = broadcast(*((*t.shape[:d], 1, *t.shape[d + 1 :]) for t in (input, indices)))
    parts = (t.expand(*rest[:d], t.shape[d], *rest[d + 1 :]) for t in (input, indices))
    return torch.gather(next(parts), d, next(parts))


@function_rule(Tensor.type)
def type_(trace: Tracing, call: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Without arguments the name of a class such as torch.FloatTensor; a tracing tensor's own would be that of a meta tensor."""
    if args or kwargs or device_of(self).type != "cpu":
        return call(self, *args, **kwargs)
    with torch._C.DisableTorchFunction(), no_dispatch():
        return torch.empty(0, dtype=self.dtype).type()


@function_rule(Tensor.__getitem__)
def getitem(trace: Tracing, call: Any, self: Tensor, index: Any) -> Tensor:
    index = _as_torch_reads(index)
    if _is_flag(index):
        return call(self.unsqueeze(0), index.reshape(1))
    chosen = _positions(self, index)
    if chosen is None:
        return call(self, _with_tensors(trace, index))
    shown = call(self, chosen[0])
    for d, at in chosen[1]:
        shown = shown.select(d, at)
    return shown


def _as_torch_reads(index: Any) -> Any:
    """x[[[0, 1], [1, 2]]]: a short list that holds more than numbers is a tuple to a torch that still reads it so (it warns)."""
    if not isinstance(index, list) or len(index) >= 32 or not _reads_lists_as_tuples():
        return index
    is_tuple = any(i is None or i is Ellipsis or isinstance(i, (Tensor, Sequence, slice)) or getattr(i, "ndim", 0) for i in index)
    return tuple(index) if is_tuple else index


@functools.cache
def _reads_lists_as_tuples() -> bool:
    with torch._C.DisableTorchFunction(), no_dispatch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(1, 1)[[[0]]].dim() == 2  # the index as a tensor would add a dimension


def _positions(self: Tensor, index: Any) -> tuple[tuple[Any, ...], list[tuple[int, Any]]] | None:
    """x[:, n] of an n that varies, which torch would ask for: the index with `:` in its place, and the dimension and number of each, last
    first. None where there is none, or tensors are among the others."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(i, torch.SymInt) for i in parts):
        return None
    if any(isinstance(i, bool) or not isinstance(i, (int, slice, torch.SymInt, type(None), type(Ellipsis))) for i in parts):
        return None
    if sum(i is not None and i is not Ellipsis for i in parts) > self.dim() or sum(i is Ellipsis for i in parts) > 1:
        return None
    numbers: list[tuple[int, Any]] = []
    plain: list[Any] = []
    d = 0  # of the result of indexing with `plain`
    for i in parts:
        is_told = isinstance(i, torch.SymInt)
        if is_told:
            numbers.append((d, i))
        plain.append(slice(None) if is_told else i)
        taken = sum(j is not None and j is not Ellipsis for j in parts)
        d += self.dim() - taken if i is Ellipsis else 0 if isinstance(i, int) else 1
    return tuple(plain), numbers[::-1]


def _is_flag(index: Any) -> bool:
    """x[flag] of a 0-d tensor of bool is a mask over a new first dimension of size 1; torch would ask for its value."""
    return isinstance(index, Tensor) and index.dim() == 0 and index.dtype is torch.bool


@function_rule(Tensor.__setitem__)
def setitem(trace: Tracing, call: Any, self: Tensor, index: Any, value: Any) -> None:
    index = _as_torch_reads(index)
    if _is_flag(index):
        self, index = self.unsqueeze(0), index.reshape(1)
    elif _positions(self, index) is not None:
        self, index = getitem(trace, Tensor.__getitem__, self, index), Ellipsis
    call(self, _with_tensors(trace, index), value)


def _with_tensors(trace: Tracing, index: Any, is_part: bool = False) -> Any:
    """Lists of numbers, and tuples of them among the parts of an index, become constants; torch would make them meta tensors and forget the
    numbers."""
    sequence = (list, tuple) if is_part else list
    if isinstance(index, sequence) and all(isinstance(i, (bool, int, list, tuple, *SymTypes)) for i in index):
        return tensor(trace, None, index) if index else tensor(trace, None, [], dtype=torch.int64)
    if isinstance(index, tuple):
        return tuple(_with_tensors(trace, i, True) for i in index)
    if type(index).__module__ == "numpy":
        return tensor(trace, None, index)
    return index


def _has_symbols(data: Any) -> bool:
    return isinstance(data, (tuple, list)) and any(isinstance(d, SymTypes) or _has_symbols(d) for d in data)


def _in_float32(name: str) -> None:
    """Losses over composites: under autocast eager runs them in float32."""

    def loss(trace: Tracing, call: Any, *args: Any, **kwargs: Any) -> Tensor:
        tensors = tensors_in((args, kwargs))
        if tensors and device_of(tensors[0]).type in trace.autocast:
            args, kwargs = trace.cast(args, torch.float32), trace.cast(kwargs, torch.float32)
        return call(*args, **kwargs)

    function_rule(getattr(F, name))(loss)


for _name in FUNCTIONS.split():
    _in_float32(_name)


@function_rule(torch.native_channel_shuffle, aten.native_channel_shuffle.default)
def native_channel_shuffle(trace: Tracing, call: Any, x: Tensor, groups: int) -> Tensor:
    """Eager's kernel of the processor copies; the composite, which tracing tensors would get, may give a view."""
    return call(x, groups) if is_watched(x) else torch.channel_shuffle(x, groups)  # type: ignore[no-any-return]
