"""Matrix products and convolutions as multiply-add Folds. In: Refs; out: one stage per result.

    mm(a, b)[i, j] = Fold(k: a0 + a[i, k] * b[k, j])

The schedule recognises the shape of the Fold and gives it the contraction template; nothing here names a kernel. A row declines (and the
operator stays an extern call) for dtypes whose products are not accumulated in float32, for operands that change from call to call, and
where `options.native_contractions` is off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, op
from ..options import Options
from .cat import masked
from .core import Builder
from .numerics import cast, ir_dtype, scalar
from .pool import per_dim, window
from .ref import ZERO, Index, Ref, is_one, known, size
from .table import lowers

ACCUMULATED_IN_F32 = frozenset({dt.f32, dt.bf16, dt.f16})


def _declines(cx: Builder, packed: Ref, *others: Ref) -> bool:
    """Does the product stay an extern call? `packed` is the operand that is rearranged first: worth it where it is constant, so that
    the packed form is kept from call to call."""
    if not cx.options.native_contractions or any(r.dtype not in ACCUMULATED_IN_F32 for r in (packed, *others)):
        return True
    return packed.strided is None or packed.strided.root not in cx.constants


def dot(cx: Builder, extents: Sequence[Expr], a: Callable[[Index], Expr], b: Callable[[Index], Expr]) -> Expr:
    """Sum over `extents` of a(index) * b(index), in float32."""

    def step(index: Index, state: tuple[Expr, ...]) -> list[Expr]:
        return [op("add", state[0], op("mul", cast(a(index), dt.f32), cast(b(index), dt.f32)))]

    return cx.fold(extents, [Const(dt.f32, 0.0)], step, lambda x, y: [op("add", x[0], y[0])])


def _matrices(cx: Builder, a: Ref, b: Ref, finish: Callable[[Index, Expr], Expr]) -> Ref:
    """finish(index, sum over k of a[..., i, k] * b[..., k, j]) for every [..., i, j]."""

    def at(index: Index) -> Expr:
        *lead, i, j = index
        return finish(index, dot(cx, [a.shape[-1]], lambda k: a.load((*lead, i, k[0])), lambda k: b.load((*lead, k[0], j))))

    return cx.stage(at)


@lowers("aten.mm.default", "aten.bmm.default")
def lower_mm(cx: Builder, a: Ref, b: Ref, *_: Any) -> Any:
    if _declines(cx, b, a):
        return NotImplemented
    return _matrices(cx, a, b, lambda _, total: cast(total, cx.dtype))


@lowers("aten.addmm.default", "aten.baddbmm.default")
def lower_addmm(cx: Builder, bias: Ref, a: Ref, b: Ref, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * bias + alpha * (a @ b); beta 0 ignores the bias, NaN included."""
    if _declines(cx, b, a, bias):
        return NotImplemented

    def finish(index: Index, total: Expr) -> Expr:
        value = total if alpha == 1 else op("mul", total, scalar(alpha, dt.f32))
        if beta != 0:
            added = cast(bias.at(index[len(index) - bias.rank :]), dt.f32)
            value = op("add", value, added if beta == 1 else op("mul", added, scalar(beta, dt.f32)))
        return cast(value, cx.dtype)

    return _matrices(cx, a, b, finish)


def is_native_convolution(node: fx.Node, constant: Collection[fx.Node], options: Options) -> bool:
    """Will the row for aten.convolution take this call? `constant`: placeholders that keep their values."""
    x, w, transposed, groups = node.args[0], node.args[1], node.args[6], node.args[8]
    assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
    image, weight = x.meta["spec"], w.meta["spec"]
    taken = not transposed and _grouping(image.shape, weight.shape, groups) is not None
    return options.native_contractions and taken and w in constant and ir_dtype(image.dtype) in ACCUMULATED_IN_F32


def _grouping(image: Sequence[Expr], weight: Sequence[Expr], groups: Any) -> str | None:
    """ "dense", "depthwise", or None for what the row leaves to the extern call."""
    if len(image) < 3:
        return None
    if groups == 1:
        return "dense"
    return "depthwise" if is_one(weight[1]) and known(weight[0]) == known(image[1]) else None


@lowers("aten.convolution.default")
def lower_convolution(
    cx: Builder, x: Ref, w: Ref, bias: Ref | None, stride: Any, padding: Any, dilation: Any, transposed: bool, _: Any, groups: int
) -> Any:
    """out[n, o, p] = bias[o] + sum over c, r of x[n, g * C / groups + c, p * stride + r * dilation - padding] * w[o, c, r]."""
    rank = x.rank - 2
    grouping = _grouping(x.shape, w.shape, groups)
    if _declines(cx, w, x) or transposed or grouping is None:
        return NotImplemented
    depthwise = grouping == "depthwise"
    s, p, d = per_dim(stride, rank), per_dim(padding, rank), per_dim(dilation, rank)
    taps = [size(k) for k in w.shape[2:]]
    inside = _never_leaves(x, cx.shape, [known(t) for t in taps], s, p, d)

    def at(index: Index) -> Expr:
        n, o, *_ = index

        def image(k: Index) -> Expr:
            channel, tap = (o, k) if depthwise else (k[0], k[1:])
            place, test = window(x, rank, (n, channel, *index[2:]), tap, s, p, d)
            return x.load(place) if inside else masked(x, place, test, Const(x.dtype, 0.0))

        def weight(k: Index) -> Expr:
            return w.load((o, ZERO, *k) if depthwise else (o, *k))

        total = dot(cx, taps if depthwise else [w.shape[1], *taps], image, weight)
        if bias is not None:
            total = op("add", total, cast(bias.at((o,)), dt.f32))
        return cast(total, cx.dtype)

    return cx.stage(at)


def _never_leaves(x: Ref, out: Sequence[Expr], taps: Sequence[int | None], s: Sequence[int], p: Sequence[int], d: Sequence[int]) -> bool:
    """Does no window reach into the padding? Known for constant sizes only."""
    for i, k in enumerate(taps):
        n, m = known(x.shape[2 + i]), known(out[2 + i])
        if k is None or n is None or m is None or p[i] or (m - 1) * s[i] + (k - 1) * d[i] >= n:
            return False
    return True
