"""Scaled dot-product attention, written out as its definition: scores, softmax, product. In: Refs; out: one stage per step.

    s[b, h, i, j] = q[b, h, i, :] . k[b, h', j, :] * scale + mask       h' = h / (heads of q per head of k);  -inf where causal and j > i
    p = softmax over j of s, 0 in rows that are -inf throughout;    out[b, h, i, d] = sum over j of p[b, h, i, j] * v[b, h', j, d]

The schedule recognises the chain and computes it block by block (schedule/fusion/merge_attention.py), as it does for attention that a
user wrote out. The row declines (and the operator stays an extern call) for dropout and where `options.native_contractions` is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..graph import attention as _attention_operators  # noqa: F401  (enters its operators)
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, op, select
from .contraction import SUMS, dot
from .core import Builder
from .numerics import cast, scalar
from .reduce import Split, accumulator, fold_with, hold, total
from .ref import ZERO, Index, Ref, is_one, known
from .table import lowers


def _shared_head(h: Expr, heads: Expr, shared: Expr) -> Expr:
    """The head of k or v that head `h` of q reads."""
    if heads is shared:
        return h
    if is_one(shared):
        return ZERO
    return op("floordiv", h, op("floordiv", heads, shared))


@lowers("aten._scaled_dot_product_flash_attention_for_cpu.default")
def lower_flash_attention(
    cx: Builder, q: Ref, k: Ref, v: Ref, dropout: Any = 0.0, is_causal: Any = False, mask: Ref | None = None, scale: Any = None
) -> Any:
    """(out, log of the sum of exponentials, 0 where nothing is summed)."""
    return _attention(cx, q, k, v, dropout, is_causal, mask, scale)


@lowers("aten.scaled_dot_product_attention.default")
def lower_attention(
    cx: Builder, q: Ref, k: Ref, v: Ref, mask: Ref | None = None, dropout: Any = 0.0, is_causal: Any = False,
    scale: Any = None, enable_gqa: Any = False,
) -> Any:  # fmt: skip
    """The operator that is not yet taken apart for a device; a mask of booleans says where scores count. Leading dimensions as in eager."""
    if q.rank != 4 or not (q.rank == k.rank == v.rank) or (mask is not None and mask.rank > 4):
        return NotImplemented
    if not enable_gqa and not (q.shape[1] is k.shape[1] and k.shape[1] is v.shape[1]):
        return NotImplemented
    found = _attention(cx, q, k, v, dropout, is_causal, mask, scale)
    return found if found is NotImplemented else found[0]


FEW_KEYS = 1024


def _is_of_one_query(cx: Builder, q: Ref, k: Ref) -> bool:
    """One query a head on a GPU: scores, and their softmax with the sum over values, are two small kernels; the library makes tiles of many
    queries (16 heads of 128, 512 keys, float16: 10 us on an H200)."""
    keys = known(k.shape[2])
    return cx.device != "cpu" and is_one(q.shape[2]) and q.dtype in dt.HALF and keys is not None and keys <= FEW_KEYS


def _scores(cx: Builder, q: Ref, k: Ref, is_causal: Any, mask: Ref | None, factor: Expr, acc: DType) -> Ref:
    """The scores of every query and key, -inf where a key does not count."""
    lowest = Const(acc, float("-inf"))
    b, h, n, _ = q.shape

    def score(index: Index) -> Expr:
        *lead, i, j = index
        at = (lead[0], _shared_head(lead[1], h, k.shape[1]))
        value = op("mul", dot(cx, [q.shape[3]], lambda e: q.load((*lead, i, e[0])), lambda e: k.load((*at, j, e[0]))), factor)
        if mask is not None and mask.dtype is dt.bool_:
            value = select(mask.at(index[4 - mask.rank :]), value, lowest)
        elif mask is not None:
            value = op("add", value, cast(mask.at(index[4 - mask.rank :]), acc))
        return select(op("le", j, i), value, lowest) if is_causal else value

    return hold(cx, (b, h, n, k.shape[2]), acc, score)


def _factor(q: Ref, scale: Any, acc: DType) -> Expr | None:
    """`scale`, or what eager takes for it. None: of heads whose width varies or is 0."""
    if scale is None:
        width = known(q.shape[-1])
        return scalar(1.0 / math.sqrt(width), acc) if width else None
    return scalar(scale, acc)


def _attention(cx: Builder, q: Ref, k: Ref, v: Ref, dropout: Any, is_causal: Any, mask: Ref | None, scale: Any) -> Any:
    if dropout or q.dtype not in SUMS or not q.dtype.is_float or not (cx.options.native_contractions or _is_of_one_query(cx, q, k)):
        return NotImplemented
    acc = SUMS[q.dtype]
    factor = _factor(q, scale, acc)
    if factor is None:
        return NotImplemented
    lowest, keys = Const(acc, float("-inf")), k.shape[2]
    b, h, n, _ = q.shape
    s = _scores(cx, q, k, is_causal, mask, factor, acc)
    how = Split(s.shape, (3,), True)
    top = hold(cx, how.kept, acc, fold_with(cx, how, "max", lowest, s.load))

    def power(i: Index) -> Expr:
        return op("exp", op("sub", s.load(i), top.at(i)))

    summed = total(cx, how, power, accumulator(acc, how))
    below = hold(cx, how.kept, acc, lambda i: cast(summed(i), acc))
    none = Const(acc, 0.0)
    p = hold(cx, s.shape, acc, lambda i: select(op("eq", top.at(i), lowest), none, op("div", power(i), below.at(i))))

    def product(index: Index) -> Expr:
        *lead, i, d = index
        at = (lead[0], _shared_head(lead[1], h, v.shape[1]))
        return cast(dot(cx, [keys], lambda j: p.load((*lead, i, j[0])), lambda j: v.load((*at, j[0], d))), cx.dtype)

    out = cx.stage(product)

    def log(i: Index) -> Expr:
        """0 in rows without a key: the backward kernel takes it from scores of -inf, and exp makes 0 of what is left."""
        most = top.load((*i, ZERO))
        return select(op("eq", most, lowest), none, op("add", most, op("log", below.load((*i, ZERO)))))

    return out, Ref(acc, (b, h, n), log)


# ---------------------------------------------------------------- with gradients (graph/attention.py)


@lowers("torchsmith_attention.forward.default")
def lower_attention_forward(cx: Builder, q: Ref, k: Ref, v: Ref, mask: Ref | None, is_causal: Any, scale: Any) -> Any:
    """A call of the library's, unless nothing may need it."""
    return _attention(cx, q, k, v, 0.0, is_causal, mask, scale) if cx.is_alone else NotImplemented


@lowers("torchsmith_attention.backward.default")
def lower_attention_backward(
    cx: Builder, grad: Ref, q: Ref, k: Ref, v: Ref, mask: Ref | None, out: Ref, log: Ref, is_causal: Any, scale: Any
) -> Any:  # fmt: skip
    """p = exp(s - log);    d = p * (grad @ v.T - sum of grad * out) * scale;    d @ k, d.T @ q, p.T @ grad"""
    if not cx.is_alone or not cx.options.native_contractions or q.dtype not in SUMS:
        return NotImplemented
    acc = SUMS[q.dtype]
    factor = _factor(q, scale, acc)
    if factor is None:
        return NotImplemented
    s = _scores(cx, q, k, is_causal, mask, factor, acc)
    own = hold(cx, s.shape[:3], acc, lambda i: dot(cx, [v.shape[3]], lambda e: grad.load((*i, e[0])), lambda e: out.load((*i, e[0]))))
    p = hold(cx, s.shape, acc, lambda i: op("exp", op("sub", s.load(i), cast(log.load(i[:3]), acc))))

    def slope(i: Index) -> Expr:
        given = dot(cx, [v.shape[3]], lambda e: grad.load((*i[:3], e[0])), lambda e: v.load((*i[:2], i[3], e[0])))
        return op("mul", op("mul", p.load(i), op("sub", given, own.load(i[:3]))), factor)

    d = hold(cx, s.shape, acc, slope)
    n, m = q.shape[2], k.shape[2]

    def gradient(like: Ref, extent: Expr, slopes: Callable[[Index, Expr], Expr], other: Ref) -> Ref:
        def at(i: Index) -> Expr:
            return cast(dot(cx, [extent], lambda j: slopes(i, j[0]), lambda j: other.load((*i[:2], j[0], i[3]))), cx.dtype)

        return cx.stage(at, like.shape, cx.dtype)

    return (
        gradient(q, m, lambda i, j: d.load((*i[:3], j)), k),
        gradient(k, n, lambda i, j: d.load((*i[:2], j, i[2])), q),
        gradient(v, n, lambda i, j: p.load((*i[:2], j, i[2])), grad),
    )
