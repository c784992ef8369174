"""Matrix products and convolutions as multiply-add Folds. In: Refs; out: one stage per result.

    mm(a, b)[i, j] = Fold(k: a0 + a[i, k] * b[k, j])

The schedule recognises the shape of the Fold and gives it the contraction template; nothing here names a kernel. A row declines (and the
operator stays an extern call) for complex numbers and booleans, and where `options.native_contractions` is off.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, Op, const, op, walk
from ..ir.program import Stage, Store
from ..options import Options
from .cat import conjunction, masked
from .core import Builder
from .numerics import cast, ir_dtype, scalar
from .pool import per_dim, window
from .ref import ZERO, Index, Ref, constant, is_one, known, size
from .table import lowers

aten = torch.ops.aten
# dtype of the operands -> that of their sum: small floats and integers are summed wider, and rounded (or wrapped) once at the end
SUMS: dict[DType, DType] = {
    dt.f32: dt.f32, dt.bf16: dt.f32, dt.f16: dt.f32, dt.f64: dt.f64,
    dt.i64: dt.i64, dt.i32: dt.i32, dt.i16: dt.i32, dt.i8: dt.i32, dt.u8: dt.i32,
}  # fmt: skip


def _declines(cx: Builder, *operands: Ref) -> bool:
    """Does the product stay an extern call?"""
    return not cx.options.native_contractions or any(r.dtype not in SUMS for r in operands)


def dot(
    cx: Builder, extents: Sequence[Expr], a: Callable[[Index], Expr], b: Callable[[Index], Expr], dtype: DType | None = None
) -> Expr:
    """Sum over `extents` of a(index) * b(index), in the dtype that SUMS names for that of the result."""
    acc = SUMS[dtype or cx.dtype]

    def step(index: Index, state: tuple[Expr, ...]) -> list[Expr]:
        return [op("add", state[0], op("mul", cast(a(index), acc), cast(b(index), acc)))]

    return cx.fold(extents, [Const(acc, 0.0 if acc.is_float else 0)], step, lambda x, y: [op("add", x[0], y[0])])


def _matrices(cx: Builder, a: Ref, b: Ref, finish: Callable[[Index, Expr], Expr]) -> Ref:
    """finish(index, sum over k of a[..., i, k] * b[..., k, j]) for every [..., i, j]."""

    def at(index: Index) -> Expr:
        *lead, i, j = index
        return finish(index, dot(cx, [a.shape[-1]], lambda k: a.load((*lead, i, k[0])), lambda k: b.load((*lead, k[0], j))))

    return cx.stage(at)


def _is_ours(cx: Builder, a: Ref, b: Ref) -> bool:
    """Is a product that a device's library could compute faster as a kernel of our own, for what is computed along with it?"""
    if cx.device == "cpu" or a.rank != 2 or not a.dtype.is_float or a.dtype not in SUMS or b.dtype is not a.dtype:
        return False
    return _is_row(a, b) or _is_activated(cx, a, b) or _has_some_rows(a, b) or _is_thin(cx, a, b)


WHOLE_ROW = 8192


def _is_row(a: Ref, b: Ref) -> bool:
    """One row times a matrix whose columns lie contiguous, short enough to be there at once: reading the matrix is all the work.

    Measured on an H100 in a decoder: 11264 columns of 2048 16.4 us (the library's 17.8), 2048 of 5632 9.6 (11.9); in vgg16, whose 4096
    columns of 25088 are walked in steps, the model took 1.3 times as long.
    """
    inner = known(b.shape[0])
    return is_one(a.shape[0]) and b.strided is not None and is_one(b.strided.strides[0]) and inner is not None and inner <= WHOLE_ROW


def _little_work(a: Ref, b: Ref) -> tuple[int, int, int] | None:
    """Rows, terms of a sum, and columns of a product of 16-bit numbers, if they are constant and few."""
    rows, inner, columns = (known(n) for n in (*a.shape, b.shape[1]))
    if rows is None or inner is None or columns is None or a.dtype not in dt.HALF or rows * inner * columns > LITTLE_WORK:
        return None
    return rows, inner, columns


SOME_ROWS = 256


def _has_some_rows(a: Ref, b: Ref) -> bool:
    """A product whose rows are few tiles, with little work: the library's kernel takes as long as ours, which takes along what follows and
    begins before the one ahead of it ends (measured on an H200: vit_small 334 us, 379 with the library's; BERT 450 and 463)."""
    sizes = _little_work(a, b)
    if sizes is None:
        return False
    rows, inner, columns = sizes
    return inner % 64 == 0 and columns % LEAST_SIDE == 0 and FEW_ROWS <= rows <= SOME_ROWS


# What a library's product does not take along. (Gelu it takes along only as its approximation.)
ACTIVATIONS = frozenset({
    aten.gelu.default, aten.relu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default, aten.hardswish.default,
    aten.hardtanh.default, aten.relu6.default,
})  # fmt: skip
HALF_TYPES = frozenset({torch.float16, torch.bfloat16})
FEW_ROWS, SHORT_SUMS, LITTLE_WORK = 32, 320, 3.2e8


def _is_activated(cx: Builder, a: Ref, b: Ref) -> bool:
    """A small product of 16-bit numbers that only an activation reads, which then is no kernel of its own.

    Measured on an H100: models with sums of 384 and 768 terms are 3 and 5 % faster with the library's product and a kernel for gelu, though
    alone, in warm caches, ours were the faster."""
    sizes = _little_work(a, b)
    if sizes is None or len(cx.readers) != 1 or cx.readers[0].target not in ACTIVATIONS:
        return False
    rows, inner, columns = sizes
    return min(rows, columns) >= FEW_ROWS and 16 <= inner <= SHORT_SUMS


FEW_TERMS, MANY_RESULTS = 32, 1 << 16
ADDING = frozenset({aten.add.Tensor, aten.sub.Tensor})


def _is_thin(cx: Builder, a: Ref, b: Ref) -> bool:
    """A sum in float32 of so few terms that its results are most of what is read and written, and one reader takes them element by element:
    the gradient of a weight by a small batch, which then is never in memory when an optimizer reads it. Measured on an H200 with 16 images,
    in a step of SGD with momentum: 4096 x 9216 146 us, and 220 with the library's product; alexnet's step 1.12 ms and 1.27."""
    rows, inner, columns = (known(n) for n in (*a.shape, b.shape[1]))
    if rows is None or inner is None or columns is None or a.dtype is not dt.f32:
        return False
    if len(cx.readers) != 1 or cx.readers[0].target not in ADDING:
        return False
    return LEAST_SIDE <= inner <= FEW_TERMS and min(rows, columns) >= LEAST_SIDE and rows * columns >= MANY_RESULTS


OWN_SUMS = 1152  # terms of a convolution's sums that are ours
ONE_STEP = 32  # of an image's first convolution, whose sums one step of a product takes
LEAST_SIDE = 16


def is_own_convolution(node: fx.Node, options: Options) -> bool:
    """A device's convolution of 16-bit numbers by constant sizes: is it faster as a product of our own, with whatever follows?

    Measured on an H200: windows of one element 2.0 to 2.9 us and the library's 2.7 to 4.4 (mnasnet1_0 and mobilenet_v2, one image), which
    takes a bias along only with a relu; 3 x 3 windows of 3 channels 12 us and 39 with the copy that the library needs (squeezenet1_1, 16).
    """
    if node.target is not aten.convolution.default or options.libtorch == "forbid":
        return False
    x, w, bias, _, _, dilation, transposed, _, groups = node.args
    spec, weight, out = x.meta["spec"], w.meta["spec"], node.meta["spec"]  # type: ignore[union-attr]
    if transposed or groups != 1 or spec.device == "cpu" or spec.dtype not in HALF_TYPES or weight.dtype is not spec.dtype:
        return False
    sizes = [known(n) for n in (*out.shape, *weight.shape)]
    if len(sizes) != 8 or None in sizes:
        return False
    n, _, height, width, columns, inner, *window = (s for s in sizes if s is not None)
    rows, taps = n * height * width, math.prod(window)
    if min(rows, columns, inner * taps) < LEAST_SIDE:
        return False
    if taps > 1:
        return inner * taps <= ONE_STEP and {*dilation} == {1}  # type: ignore[misc]
    takes_more = bias is not None or any(u.target in ACTIVATIONS for u in node.users)
    return takes_more and inner <= OWN_SUMS and rows * inner * columns <= LITTLE_WORK


@lowers("aten.mm.default", "aten.bmm.default")
def lower_mm(cx: Builder, a: Ref, b: Ref, *_: Any) -> Any:
    if _declines(cx, a, b) and not _is_ours(cx, a, b):
        return NotImplemented
    return _matrices(cx, a, b, lambda _, total: cast(total, cx.dtype))


@lowers("aten.addmm.default", "aten.baddbmm.default")
def lower_addmm(cx: Builder, bias: Ref, a: Ref, b: Ref, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * bias + alpha * (a @ b); beta 0 ignores the bias, NaN included."""
    if _declines(cx, bias, a, b) and not (bias.dtype in SUMS and _is_ours(cx, a, b)):
        return NotImplemented
    acc = SUMS[cx.dtype]

    def finish(index: Index, total: Expr) -> Expr:
        value = total if alpha == 1 else op("mul", total, scalar(alpha, acc))
        if beta != 0:
            added = cast(bias.at(index[len(index) - bias.rank :]), acc)
            value = op("add", value, added if beta == 1 else op("mul", added, scalar(beta, acc)))
        return cast(value, cx.dtype)

    return _matrices(cx, a, b, finish)


def is_native_convolution(node: fx.Node, options: Options) -> bool:
    """Will the row for aten.convolution take this call?"""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return options.native_contractions and ir_dtype(x.meta["spec"].dtype) in SUMS


@lowers("aten.convolution.default")
def lower_convolution(
    cx: Builder, x: Ref, w: Ref, bias: Ref | None, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any, groups: int
) -> Any:
    """out[n, o, p] = bias[o] + sum over c, r of x[n, g * C / groups + c, p * stride + r * dilation - padding] * w[o, c, r]."""
    if not transposed and _is_one_for_each(cx, w, groups):
        return _each_channel(cx, x, w, bias, stride, padding, dilation)
    if _declines(cx, x, w) and not is_own_convolution(cx.node, cx.options):
        return NotImplemented
    rank = x.rank - 2
    s, p, d = per_dim(stride, rank), per_dim(padding, rank), per_dim(dilation, rank)
    if (transposed or {*s, *d} != {1} or any(p) or any(not is_one(k) for k in w.shape[2:])) and _divides(cx, x):
        x = cx.stage(x.load, x.shape, x.dtype)
    if transposed:
        return _transposed(cx, x, w, bias, s, p, d, groups)
    taps = [size(k) for k in w.shape[2:]]
    inside = _never_leaves(x, cx.shape, [known(t) for t in taps], s, p, d)
    channels, wide = w.shape[1], op("floordiv", w.shape[0], const(groups))
    depthwise = groups > 1 and is_one(channels)

    def at(index: Index) -> Expr:
        n, o, *_ = index
        first = ZERO if groups == 1 else o if is_one(wide) else op("floordiv", o, wide)

        def image(k: Index) -> Expr:
            channel, tap = (first, k) if depthwise else (first * channels + k[0] if groups > 1 else k[0], k[1:])
            place, test = window(x, rank, (n, channel, *index[2:]), tap, s, p, d)
            return x.load(place) if inside else masked(x, place, test, Const(x.dtype, 0.0))

        def weight(k: Index) -> Expr:
            return w.load((o, ZERO, *k) if depthwise else (o, *k))

        return _with_bias(cx, dot(cx, taps if depthwise else [channels, *taps], image, weight), bias, o)

    return cx.stage(at)


@lowers("aten.convolution_backward.default")
def lower_convolution_backward(
    cx: Builder, grad: Ref, x: Ref, w: Ref, _: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any, groups: int,
    mask: Sequence[bool],
) -> Any:  # fmt: skip
    """The image's gradient is a transposed convolution, the weight's a product where that is the faster road."""
    each = _is_one_for_each(cx, w, groups)
    if (_declines(cx, grad, x, w) and not each) or transposed or list(mask) not in ([True, False, False], [False, True, False]):
        return NotImplemented  # graph/rules/backward.py asks for each gradient alone
    rank = x.rank - 2
    s, p, d = per_dim(stride, rank), per_dim(padding, rank), per_dim(dilation, rank)
    if each:
        return (_image_of_each(cx, grad, x, w, s, p, d), None, None) if mask[0] else (None, _weight_of_each(cx, grad, x, w, s, p, d), None)
    if mask[0]:
        return _transposed(cx, grad, w, None, s, p, d, groups), None, None
    if not _is_native_product(cx, grad.shape, w.shape, p, groups):
        return NotImplemented

    def at(index: Index) -> Expr:
        o, c = index
        extents = (grad.shape[0], *grad.shape[2:])

        def image(k: Index) -> Expr:
            return x.load((k[0], c, *(y * s[i] for i, y in enumerate(k[1:]))))

        return cast(dot(cx, extents, lambda k: grad.load((k[0], o, *k[1:])), image, w.dtype), w.dtype)

    made = cx.stage(at, w.shape[:2], w.dtype)
    return None, made.remap(w.shape, lambda i: i[:2]), None


MOST_TAPS = 25


def _is_one_for_each(cx: Builder, w: Ref, groups: int) -> bool:
    """Does a device's convolution, or its gradient, have one filter for each channel? Libraries take several times as long for it as its
    bytes do (measured on an H200, 16 images in float32: 37 us for a weight's gradient in mnasnet1_0)."""
    taps = [known(n) for n in w.shape[2:]]
    if cx.device == "cpu" or w.rank != 4 or not w.dtype.is_float or w.dtype not in SUMS or None in taps:
        return False
    return groups > 1 and known(w.shape[0]) == groups and is_one(w.shape[1]) and math.prod(n for n in taps if n is not None) <= MOST_TAPS


def _taps(w: Ref) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(n) for n in map(known, w.shape[2:]) if n is not None)))


def _filters(cx: Builder, w: Ref) -> dict[tuple[int, ...], Ref]:
    """For each tap the numbers of all channels, beside each other and as wide as the sums."""
    acc = SUMS[w.dtype]
    (channel,) = cx.axes((w.shape[0],))
    named = {tap: cx.buffer(acc, (w.shape[0],)) for tap in _taps(w)}
    stores = tuple(Store(name, (channel,), cast(w.load((channel, ZERO, *map(const, tap))), acc)) for tap, name in named.items())
    cx.body.append(Stage(((channel, w.shape[0]),), stores, loc=cx.loc, origin=cx.origin))
    return {tap: cx.ref(name) for tap, name in named.items()}


def _each_channel(cx: Builder, x: Ref, w: Ref, bias: Ref | None, stride: Any, padding: Any, dilation: Any) -> Ref:
    """out[n, o, y] = bias[o] + sum over t of x[n, o, y * s + t * d - p] * w[o, 0, t], its taps written out."""
    rank, filters = x.rank - 2, _filters(cx, w)
    s, p, d = per_dim(stride, rank), per_dim(padding, rank), per_dim(dilation, rank)
    inside = _never_leaves(x, cx.shape, [known(t) for t in w.shape[2:]], s, p, d)

    def at(index: Index) -> Expr:
        total: Expr = Const(SUMS[w.dtype], 0.0)
        for tap, numbers in filters.items():
            place, test = window(x, rank, index, tuple(map(const, tap)), s, p, d)
            value = x.load(place) if inside else masked(x, place, test, Const(x.dtype, 0.0))
            total = op("fma", cast(value, total.dtype), numbers.load((index[1],)), total)
        return _with_bias(cx, total, bias, index[1])

    return cx.stage(at)


def _image_of_each(cx: Builder, grad: Ref, x: Ref, w: Ref, s: Sequence[int], p: Sequence[int], d: Sequence[int]) -> Ref:
    """dx[n, o, y] = sum over t of grad[n, o, (y + p - t * d) / s] * w[o, 0, t], where the division leaves no rest."""
    filters, acc = _filters(cx, w), SUMS[w.dtype]

    def at(index: Index) -> Expr:
        total: Expr = Const(acc, 0.0)
        for tap, numbers in filters.items():
            place, tests = list(index[:2]), list[Expr]()
            for i, t in enumerate(tap):
                far = index[2 + i] + (p[i] - t * d[i])
                if s[i] > 1:
                    tests.append(op("eq", op("mod", far, const(s[i])), ZERO))
                    far = op("floordiv", far, const(s[i]))
                tests += [op("ge", far, ZERO), op("lt", far, grad.shape[2 + i])]
                place.append(far)
            test = conjunction(tests)
            value = cast(masked(grad, tuple(place), test, Const(grad.dtype, 0.0)), acc)
            met = op("fma", value, numbers.load((index[1],)), total)
            total = op("where", test, met, total)  # no output met the tap there, even if it is infinite
        return cast(total, x.dtype)

    return cx.stage(at, x.shape, x.dtype, cx.spec[0].strides)


def _weight_of_each(cx: Builder, grad: Ref, x: Ref, w: Ref, s: Sequence[int], p: Sequence[int], d: Sequence[int]) -> Ref:
    """dw[o, 0, t] = sum over n, y of grad[n, o, y] * x[n, o, y * s + t * d - p]: the taps of a filter's row in one Fold, which reads the
    gradient once for all of them. The rows are an axis: all taps at once would not fit the registers."""
    rank, acc = x.rank - 2, SUMS[w.dtype]
    *rows, channel = cx.axes((*w.shape[2:-1], w.shape[0]))
    taps = constant(w.shape[-1])

    def step(k: Index, sums: tuple[Expr, ...]) -> list[Expr]:
        g = cast(grad.load((k[0], channel, *k[1:])), acc)
        places = (window(x, rank, (k[0], channel, *k[1:]), (*rows, const(t)), s, p, d) for t in range(taps))
        values = (cast(masked(x, place, test, Const(x.dtype, 0.0)), acc) for place, test in places)
        return [op("add", total, op("mul", g, v)) for total, v in zip(sums, values, strict=True)]

    fold = cx.fold(
        (grad.shape[0], *grad.shape[2:]), [Const(acc, 0.0)] * taps, step, lambda a, b: [op("add", *z) for z in zip(a, b, strict=True)]
    )
    axes, shape = (*rows, channel), (*w.shape[2:-1], w.shape[0])
    names = [cx.buffer(acc, shape) for _ in range(taps)]
    stores = tuple(Store(name, axes, fold.picking(k)) for k, name in enumerate(names))
    cx.body.append(Stage(tuple(zip(axes, shape, strict=True)), stores, loc=cx.loc, origin=cx.origin))
    sums = [cx.ref(name) for name in names]

    def at(index: Index) -> Expr:
        place = (*index[2:-1], index[0])
        value = sums[-1].load(place)
        for t in reversed(range(taps - 1)):
            value = op("where", op("eq", index[-1], const(t)), sums[t].load(place), value)
        return cast(value, w.dtype)

    return cx.stage(at, w.shape, w.dtype)


SMALL_PRODUCT = 150e6  # multiply-adds and additions of a weight's gradient up to which the call costs more than our product


def _is_native_product(cx: Builder, grad: Sequence[Expr], w: Sequence[Expr], padding: Sequence[int], groups: int) -> bool:
    """Is dw[o, c] = sum over n, y of grad[n, o, y] * x[n, c, y * s] faster as our product than as a call?

    Measured (AVX-512, one thread, float32) over the call's time: 96 to 24 channels at 56 x 56 3.0, 160 to 960 at 7 x 7 2.2, 64 to 128
    with stride 2 1.0; 256 to 64 at 56 x 56 0.63. With taps (3 x 3) 0.1: sums over an image's rows and columns leave the cache.
    """
    if groups != 1 or any(padding) or not all(is_one(k) for k in w[2:]):
        return False
    sizes = [known(n) for n in (grad[0], *grad[2:], w[0], w[1])]
    return cx.is_alone or (None not in sizes and 2 * math.prod(n for n in sizes if n is not None) <= SMALL_PRODUCT)


def _divides(cx: Builder, x: Ref) -> bool:
    """Is `x` a view whose places divide positions of the image (one put together from blocks, or rolled)? What slides over it would divide
    for every product."""
    axes = cx.axes(x.shape)
    divisions = (e for e in walk(x.load(axes)) if isinstance(e, Op) and e.name in ("floordiv", "mod"))
    return any(axis in axes[2:] for e in divisions for axis in walk(e))


def _transposed(
    cx: Builder, x: Ref, w: Ref, bias: Ref | None, s: Sequence[int], p: Sequence[int], d: Sequence[int], groups: int
) -> Ref:
    """out[n, o, y] = bias[o] + sum over c, t of x[n, c, (y + p - t * d) / s] * w[c, o, t], where the division leaves no rest.

    Results y = q * s + f of one phase f read every s-th tap, and step through x by one: with y split into q and f, each phase is an
    ordinary convolution, and no loop divides. A result whose size is no multiple of s is cut out of a larger one. In dimensions with one
    tap results lie s apart, and those between them are the bias: results are filled with it first.
    """
    rank = x.rank - 2
    apart = [s[i] > 1 and known(w.shape[2 + i]) == 1 and p[i] == 0 for i in range(rank)]
    phases = [_phase(s[i], p[i], d[i], known(w.shape[2 + i]), w.shape[2 + i]) for i in range(rank)]
    channels, wide = op("floordiv", w.shape[0], const(groups)), w.shape[1]

    def at(index: Index) -> Expr:
        n, o, *spatial = index
        group, inner = (ZERO, o) if groups == 1 else (o, ZERO) if is_one(wide) else (op("floordiv", o, wide), op("mod", o, wide))
        first = ZERO if groups == 1 else group * channels

        def places(k: Index) -> tuple[Index, Index, Expr]:
            tests: list[Expr] = []
            where, taps = list[Expr](), list[Expr]()
            for i, (y, j) in enumerate(zip(spatial, k[1:], strict=True)):
                if apart[i]:
                    taps.append(ZERO)
                    where.append(y)
                    continue
                tap, place, live = phases[i][1](y, phases[i][0] - 1 - j)  # the last tap first: it reads the image forwards
                tests += [*live, op("ge", place, ZERO), op("lt", place, x.shape[2 + i])]
                taps.append(tap)
                where.append(place)
            return tuple(where), tuple(taps), conjunction(tests)

        def image(k: Index) -> Expr:
            where, _, test = places(k)
            return masked(x, (n, first + k[0], *where), test, Const(x.dtype, 0.0))

        def weight(k: Index) -> Expr:
            _, taps, test = places(k)  # where no input meets it: eager leaves that out, even if the weight is infinite
            return masked(w, (first + k[0], inner, *taps), test, Const(w.dtype, 0.0))

        return _with_bias(cx, dot(cx, [channels, *(count for count, _, _ in phases)], image, weight), bias, o)

    if any(apart):
        result = cx.stage(lambda i: cast(Const(cx.dtype, 0) if bias is None else bias.at((i[1],)), cx.dtype))
        axes = cx.axes(x.shape)
        shape = (*cx.shape[:2], *(x.shape[2 + i] if far else cx.shape[2 + i] for i, far in enumerate(apart)))
        place = (*axes[:2], *(y * s[i] if far else y for i, (y, far) in enumerate(zip(axes[2:], apart, strict=True))))
        assert result.whole is not None
        store = Store(result.whole, place, at(axes), unique=False)  # not what writes the element first
        cx.body.append(Stage(tuple(zip(axes, shape, strict=True)), (store,), loc=cx.loc, origin=cx.origin))
        return result
    sizes = [known(n) for n in cx.shape[2:]]
    if all(by == 1 or (n is not None and n % by == 0) for n, by in zip(sizes, s, strict=True)):
        return cx.stage(at)
    whole = (*cx.shape[:2], *(op("floordiv", n + (s[i] - 1), const(s[i])) * s[i] for i, n in enumerate(cx.shape[2:])))
    return cx.stage(at, whole, cx.dtype).remap(cx.shape, lambda i: i)


Place = Callable[[Expr, Expr], tuple[Expr, Expr, list[Expr]]]


def _phase(s: int, p: int, d: int, taps: int | None, extent: Expr) -> tuple[Expr, Place, bool]:
    """One dimension: how many taps a phase has, (y, j) -> (j-th tap, where it reads, when it exists), and do all phases have that many.

    The taps of phase f solve t * d = f + p modulo s: t = first(f) + j * step, with step = s / gcd(s, d).
    """
    common = math.gcd(s, d)
    step = s // common
    inverse = pow(d // common, -1, step) if step > 1 else 0
    exact = taps is not None and taps % step == 0

    def place(y: Expr, j: Expr) -> tuple[Expr, Expr, list[Expr]]:
        q, f = (y, ZERO) if s == 1 else (op("floordiv", y, const(s)), op("mod", y, const(s)))
        first = ZERO if step == 1 else op("mod", op("floordiv", f + p, const(common)) * inverse, const(step))
        tap = first + j * step
        live = [] if common == 1 else [op("eq", op("mod", f + p, const(common)), ZERO)]
        if not exact:
            live.append(op("lt", tap, extent))
        return tap, q + op("floordiv", f + p - first * d, const(s)) - j * (d // common), live

    return op("floordiv", extent + (step - 1), const(step)), place, exact


def _with_bias(cx: Builder, total: Expr, bias: Ref | None, o: Expr) -> Expr:
    if bias is not None:
        total = op("add", total, cast(bias.at((o,)), total.dtype))
    return cast(total, cx.dtype)


def _never_leaves(x: Ref, out: Sequence[Expr], taps: Sequence[int | None], s: Sequence[int], p: Sequence[int], d: Sequence[int]) -> bool:
    """Does no window reach into the padding? Known for constant sizes only."""
    for i, k in enumerate(taps):
        n, m = known(x.shape[2 + i]), known(out[2 + i])
        if k is None or n is None or m is None or p[i] or (m - 1) * s[i] + (k - 1) * d[i] >= n:
            return False
    return True
