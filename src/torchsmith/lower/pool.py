"""Pooling: Folds over the window, with masked loads at the borders. In: a Ref and window parameters; out: one stage per result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, const, convert, op, select
from .cat import conjunction, masked
from .core import Builder
from .gather import check_range, position_of
from .indexing import update
from .numerics import cast, lowest, opmath
from .ref import ONE, ZERO, Index, Ref, constant, known, product, size
from .table import lowers
from .views import reshape


def per_dim(value: Any, rank: int, default: Sequence[int] | None = None) -> tuple[int, ...]:
    """A window parameter for each spatial dimension: one number stands for all, none for the default."""
    listed = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not listed and default is not None:
        return tuple(default)
    return tuple(map(constant, listed * rank if len(listed) == 1 else listed))


def window(
    x: Ref, rank: int, i: Index, k: Index, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[Index, Expr]:
    """(input index, is it inside?) of window element k at output element i."""
    lead = x.rank - rank
    place: list[Expr] = list(i[:lead])
    tests: list[Expr] = []
    for d in range(rank):
        n = x.shape[lead + d]
        at = i[lead + d] * stride[d] + k[d] * dilation[d] - padding[d]
        if padding[d]:
            tests.append(op("ge", at, ZERO))
        tests.append(op("lt", at, n))
        place.append(at)
    return tuple(place), conjunction(tests)


def _always_inside(x: Ref, rank: int, out: Sequence[Expr], kernel: Any, stride: Any, padding: Any, dilation: Any) -> bool:
    """Does no window reach over the border? Known for constant sizes only."""
    for d in range(rank):
        n, m = known(x.shape[x.rank - rank + d]), known(out[len(out) - rank + d])
        if n is None or m is None or padding[d] or (m - 1) * stride[d] + (kernel[d] - 1) * dilation[d] >= n:
            return False
    return True


def _max_pool(rank: int) -> Any:
    def rule(cx: Builder, x: Ref, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False) -> Any:
        k_size = per_dim(kernel, rank)
        s, p, g = per_dim(stride, rank, k_size), per_dim(padding, rank), per_dim(dilation, rank)
        extents = [size(k) for k in k_size]
        low = lowest(x.dtype)
        inside_all = _always_inside(x, rank, cx.shape, k_size, s, p, g)

        def read(i: Index, k: Index) -> tuple[Expr, Expr, Index]:
            place, inside = window(x, rank, i, k, s, p, g)
            if inside_all:
                return x.load(place), Const(dt.bool_, True), place
            return masked(x, place, inside, low), inside, place

        return _greatest(cx, x, rank, extents, read)

    return rule


def _greatest(cx: Builder, x: Ref, rank: int, extents: Sequence[Expr], read: Callable[[Index, Index], tuple[Expr, Expr, Index]]) -> Any:
    """The greatest element of each window, and its place if the node has two results; `read`: (element, is it inside?, place)."""
    low, lead = lowest(x.dtype), x.rank - rank

    def best(i: Index) -> Expr:
        return cx.fold(extents, [low], lambda k, a: [op("max", a[0], read(i, k)[0])], lambda a, b: [op("max", a[0], b[0])])

    def where_best(i: Index) -> Expr:
        """First of the greatest; a NaN takes over whenever met, as eager's loop does."""

        def step(k: Index, a: tuple[Expr, ...]) -> list[Expr]:
            value, inside, place = read(i, k)
            number: Expr = ZERO
            for d in range(rank):
                number = number * x.shape[lead + d] + place[lead + d]
            take = op("or", op("gt", value, a[0]), op("lt", a[1], Const(dt.i64, 0)))
            if x.dtype.is_float:
                take = op("or", take, op("isnan", value))
            take = op("and", inside, take)
            return [select(take, value, a[0]), select(take, convert(number, dt.i64), a[1])]

        return cx.fold(extents, [low, Const(dt.i64, -1)], step, None, 1)

    if isinstance(cx.spec, (tuple, list)):
        return cx.stages(best, where_best)
    return cx.stage(best)


lowers("aten.max_pool2d_with_indices.default", "aten.max_pool2d.default")(_max_pool(2))
lowers("aten.max_pool3d_with_indices.default", "aten.max_pool3d.default")(_max_pool(3))
lowers("aten.max_pool1d_with_indices.default", "aten.max_pool1d.default")(_max_pool(1))


def _max_pool_backward(rank: int) -> Any:
    """What the windows over an element give it: those that name its place, in their order, as eager's kernels on a GPU add them."""

    def rule(
        cx: Builder, grad: Ref, x: Ref, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: Ref
    ) -> Any:  # fmt: skip
        k_size = per_dim(kernel, rank)
        s, p = per_dim(stride, rank, k_size), per_dim(padding, rank)
        if not x.dtype.is_float or any(g != 1 for g in per_dim(dilation, rank)):
            return NotImplemented
        lead, compute, d = x.rank - rank, opmath(x.dtype), cx.dtype
        most = [-(-k // step) for k, step in zip(k_size, s, strict=True)]  # windows over an element, in one dimension

        def at(i: Index) -> Expr:
            spot: Expr = ZERO
            for n, e in zip(x.shape[lead:], i[lead:], strict=True):
                spot = spot * n + e
            wanted = convert(spot, dt.i64)

            def given(k: Index) -> Expr:
                place: list[Expr] = list(i[:lead])
                tests: list[Expr] = []
                for a in range(rank):
                    last = op("floordiv", i[lead + a] + p[a], const(s[a]))
                    e = last + k[a] - (most[a] - 1)
                    tests += [op("ge", e, ZERO), op("lt", e, grad.shape[lead + a])]
                    place.append(e)
                inside = conjunction(tests)
                named = masked(indices, tuple(place), inside, Const(dt.i64, -1))
                value = masked(grad, tuple(place), inside, Const(grad.dtype, 0))
                return select(op("eq", named, wanted), cast(value, compute), Const(compute, 0))

            return cast(cx.fold([const(n) for n in most], [Const(compute, 0)], lambda k, a: [op("add", a[0], given(k))]), d)

        return cx.stage(at)

    return rule


lowers("aten.max_pool2d_with_indices_backward.default")(_max_pool_backward(2))
lowers("aten.max_pool3d_with_indices_backward.default")(_max_pool_backward(3))


def _avg_pool(rank: int) -> Any:
    def rule(
        cx: Builder, x: Ref, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False, count_pad: bool = True,
        divisor: int | None = None,
    ) -> Any:  # fmt: skip
        k_size = per_dim(kernel, rank)
        s, p, g = per_dim(stride, rank, k_size), per_dim(padding, rank), (1,) * rank
        extents = [size(k) for k in k_size]
        compute = opmath(x.dtype)
        if not compute.is_float:
            return NotImplemented
        lead = x.rank - rank
        inside_all = _always_inside(x, rank, cx.shape, k_size, s, p, g)
        zero = Const(x.dtype, 0)

        def at(i: Index) -> Expr:
            def element(k: Index) -> Expr:
                place, inside = window(x, rank, i, k, s, p, g)
                return cast(x.load(place) if inside_all else masked(x, place, inside, zero), compute)

            summed = cx.fold(extents, [Const(compute, 0)], lambda k, a: [op("add", a[0], element(k))], lambda a, b: [op("add", a[0], b[0])])
            if divisor is not None:
                count: Expr = Const(compute, divisor)
            elif inside_all:
                count = Const(compute, math.prod(k_size))
            else:
                count = cast(
                    product([_covered(x.shape[lead + d], i[lead + d], k_size[d], s[d], p[d], count_pad) for d in range(rank)]), compute
                )
            return cast(op("div", summed, count), cx.dtype)

        return cx.stage(at)

    return rule


def _covered(n: Expr, i: Expr, kernel: int, stride: int, padding: int, count_pad: bool) -> Expr:
    """How many elements of the window count: those inside the (padded, if count_pad) input."""
    start = i * stride - padding
    end = op("min", start + kernel, n + padding)
    if count_pad:
        return end - start
    return op("min", end, n) - op("max", start, ZERO)


lowers("aten.avg_pool2d.default")(_avg_pool(2))
lowers("aten.avg_pool3d.default")(_avg_pool(3))
lowers("aten.avg_pool1d.default")(_avg_pool(1))


class _Windows:
    """The windows [floor(o n / m), ceil((o+1) n / m)) of adaptive pooling from n to m elements in each dimension.

    extents: of the longest window; even: are all of them as long as that?
    """

    def __init__(self, x: Ref, rank: int, out: Sequence[Expr]) -> None:
        self.lead = x.rank - rank
        self.sizes = list(zip(x.shape[self.lead :], out[-rank:], strict=True))
        self.extents: list[Expr] = []
        self.even = True
        for n, m in self.sizes:
            a, b = known(n), known(m)
            if b == 0 or a == 0:  # no element, and nothing to divide by
                self.extents.append(ONE)
                self.even = False
            elif b == 1:
                self.extents.append(n)
            elif a is not None and b is not None:
                self.extents.append(size(max((-(-(o + 1) * a // b) - o * a // b for o in range(b)), default=1)))
                self.even = self.even and a % b == 0
            else:
                self.extents.append((n + (m - 1)) // m + 1)
                self.even = False

    def bounds(self, i: Index) -> list[tuple[Expr, Expr]]:
        """(start, end) of the window of output element i."""
        pairs = [(n, ONE if known(m) == 0 else m) for n, m in self.sizes]
        return [(o * n // m, ((o + 1) * n + (m - 1)) // m) for o, (n, m) in zip(i[self.lead :], pairs, strict=True)]

    def place(self, i: Index, k: Index) -> tuple[Index, Expr]:
        """(input index, does it belong to the window?) of window element k at output element i."""
        bounds = self.bounds(i)
        inner = [start + j for (start, _), j in zip(bounds, k, strict=True)]
        tests = [] if self.even else [op("lt", at, end) for at, (_, end) in zip(inner, bounds, strict=True)]
        return (*i[: self.lead], *inner), conjunction(tests) if tests else Const(dt.bool_, True)


def _adaptive_avg_pool(rank: int) -> Any:
    def rule(cx: Builder, x: Ref, _: Any) -> Any:
        compute, windows, zero = opmath(x.dtype), _Windows(x, rank, cx.shape), Const(x.dtype, 0)
        if windows.even and all(known(n) == 1 for n in windows.extents):
            return cx.stage(lambda i: op("add", x.load(i), zero))  # nothing to sum: what follows may read it in passing

        def at(i: Index) -> Expr:
            def element(k: Index) -> Expr:
                place, inside = windows.place(i, k)
                return cast(x.load(place) if windows.even else masked(x, place, inside, zero), compute)

            summed = cx.fold(
                windows.extents, [Const(compute, 0)], lambda k, a: [op("add", a[0], element(k))], lambda a, b: [op("add", a[0], b[0])]
            )
            count = product(windows.extents if windows.even else [end - start for start, end in windows.bounds(i)])
            return cast(op("div", summed, cast(count, compute)), cx.dtype)

        return cx.stage(at)

    return rule


def _adaptive_max_pool(rank: int) -> Any:
    def rule(cx: Builder, x: Ref, _: Any) -> Any:
        windows, low = _Windows(x, rank, cx.shape), lowest(x.dtype)

        def read(i: Index, k: Index) -> tuple[Expr, Expr, Index]:
            place, inside = windows.place(i, k)
            return x.load(place) if windows.even else masked(x, place, inside, low), inside, place

        return _greatest(cx, x, rank, windows.extents, read)

    return rule


for _rank in (2, 3):
    lowers(f"aten.adaptive_max_pool{_rank}d.default")(_adaptive_max_pool(_rank))
lowers("aten._adaptive_avg_pool2d.default", "aten.adaptive_avg_pool2d.default")(_adaptive_avg_pool(2))
lowers("aten._adaptive_avg_pool3d.default", "aten.adaptive_avg_pool3d.default")(_adaptive_avg_pool(3))
lowers("aten.adaptive_avg_pool1d.default")(_adaptive_avg_pool(1))


# ---------------------------------------------------------------- back to where the greatest were
def _max_unpool(rank: int) -> Any:
    def rule(cx: Builder, x: Ref, indices: Ref, output_size: Any, *_: Any) -> Any:
        lead = x.rank - rank
        area = product(cx.shape[lead:])
        check_range(cx, indices, area, negative=False, message="found an invalid max index")
        name = cx.buffer(x.dtype, (*x.shape[:lead], area))
        cx.fill(name, lambda i: Const(x.dtype, 0))
        update(cx, name, x.shape, lambda i: (*i[:lead], position_of(indices, i)), x.load)
        flat = reshape(cx.ref(name), cx.shape)
        return cx.stage(flat.load)

    return rule


for _rank in (2, 3):
    lowers(f"aten.max_unpool{_rank}d.default")(_max_unpool(_rank))
