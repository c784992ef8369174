"""grid_sample: an image read at real positions that a grid names. In: Refs; out: one stage of masked loads.

Positions are computed in the order of operations of eager's kernels, since what is rounded to an element depends on the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, const, convert, op, select
from .cat import conjunction, masked
from .core import Builder
from .ref import Index, Ref, known
from .table import lowers
from .upsample import cubic_weights

BILINEAR, NEAREST, CUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Along:
    """One spatial dimension of `n` elements: positions in [-1, 1] become element numbers, in dtype `d`. on_host: as eager's vectors of the
    processor have it, not as its kernels of a GPU."""

    n: Expr
    d: DType
    padding: int
    align: bool
    on_host: bool

    def c(self, v: float) -> Expr:
        return Const(self.d, v)

    @property
    def last(self) -> Expr:
        """The number of the last element."""
        return convert(self.n - 1, self.d)

    def position(self, at: Expr) -> Expr:
        half = op("mul", self.last if self.align else convert(self.n, self.d), self.c(0.5))
        scaled = op("mul", op("add", at, self.c(1.0)), half)
        return scaled if self.align else op("sub", scaled, self.c(0.5))

    def inside(self, x: Expr) -> Expr:
        """`x` moved into the image as the padding says; NaN becomes 0 where it is clipped."""
        if self.padding == ZEROS:
            return x
        if self.padding == REFLECTION:
            x = self.reflected(x)
        low = select(op("gt", x, self.c(0.0)), x, self.c(0.0))
        return op("min", low, self.last)

    def reflected(self, x: Expr) -> Expr:
        low = self.c(0.0 if self.align else -0.5)
        if not self.on_host:
            return self._folded(x, low)
        twice = op("mul", self.last if self.align else convert(self.n, self.d), self.c(2.0))
        away = op("abs", op("sub", x, low))
        extra = op("sub", away, op("mul", op("trunc", op("div", away, twice)), twice))
        found = op("add", op("min", extra, op("sub", twice, extra)), low)
        return select(op("gt", twice, self.c(0.0)), found, self.c(0.0))

    def _folded(self, x: Expr, low: Expr) -> Expr:
        """A GPU counts how often x is folded in 32 bits: the largest of such numbers, which is odd, stands for all that are larger."""
        span = self.last if self.align else convert(self.n, self.d)
        away = op("abs", op("sub", x, low))
        extra, times = op("fmod", away, span), op("floor", op("div", away, span))
        is_even = op("eq", op("mul", op("floor", op("mul", times, self.c(0.5))), self.c(2.0)), times)
        is_even = op("and", is_even, op("lt", times, self.c(2.0**31 - 1)))
        found = op("add", select(is_even, extra, op("sub", span, extra)), low)
        return select(op("gt", span, self.c(0.0)), found, self.c(0.0))

    def holds(self, x: Expr) -> Expr:
        """Is the whole number `x` an element? Asked before it becomes an index, which NaN and large numbers cannot."""
        return op("and", op("ge", x, self.c(0.0)), op("le", x, self.last))


def read(x: Ref, lead: Index, places: list[Expr], along: list[Along]) -> Expr:
    """x at whole numbers, 0 outside."""
    inside = conjunction([a.holds(p) for a, p in zip(along, places, strict=True)])
    index = [convert(select(inside, p, a.c(0.0)), dt.index) for a, p in zip(along, places, strict=True)]
    return masked(x, (*lead, *index), inside, Const(x.dtype, 0.0))


def nearest(x: Ref, lead: Index, at: list[Expr], along: list[Along]) -> Expr:
    return read(x, lead, [op("round", a.inside(p)) for a, p in zip(along, at, strict=True)], along)


def linear(x: Ref, lead: Index, at: list[Expr], along: list[Along]) -> Expr:
    """The two neighbours along each dimension, weighted by their nearness. Eager leaves out those outside, whose weights may be NaN; of
    images it adds products of zeros on a processor."""
    taps: list[list[tuple[Expr, Expr]]] = []
    for a, p in zip(along, at, strict=True):
        place = a.inside(p)
        low = op("floor", place)
        part = op("sub", place, low)
        taps.append([(low, op("sub", a.c(1.0), part)), (op("add", low, a.c(1.0)), part)])
    total: Expr | None = None
    for corner in itertools.product(*taps):
        weight = corner[-1][1]
        for _, w in reversed(corner[:-1]):
            weight = op("mul", weight, w)
        places = [p for p, _ in corner]
        term = op("mul", read(x, lead, places, along), weight)
        if len(along) == 3 or not along[0].on_host:
            term = select(conjunction([a.holds(p) for a, p in zip(along, places, strict=True)]), term, Const(x.dtype, 0.0))
        total = term if total is None else op("add", total, term)
    assert total is not None
    return total


def cubic(x: Ref, lead: Index, at: list[Expr], along: list[Along]) -> Expr:
    """The four neighbours along each dimension, each moved into the image on its own."""
    taps = []
    for a, p in zip(along, at, strict=True):
        low = op("floor", p)
        weights = cubic_weights(op("sub", p, low), a.d)
        taps.append([(a.inside(op("add", low, a.c(k - 1.0))), w) for k, w in enumerate(weights)])

    def sum_of(terms: list[Expr]) -> Expr:
        total = terms[0]
        for t in terms[1:]:
            total = op("add", total, t)
        return total

    rows = [sum_of([op("mul", read(x, lead, [y, z], along), w) for z, w in taps[1]]) for y, _ in taps[0]]
    return sum_of([op("mul", r, w) for r, (_, w) in zip(rows, taps[0], strict=True)])


HOW: dict[int, Callable[[Ref, Index, list[Expr], list[Along]], Expr]] = {BILINEAR: linear, NEAREST: nearest, CUBIC: cubic}


@lowers("aten.affine_grid_generator.default")
def lower_affine_grid(cx: Builder, theta: Ref, size: object, align: bool) -> object:
    """theta (batch, rank, rank + 1) times the places of the grid's elements, each in [-1, 1], innermost dimension first, and 1."""
    d, sizes = cx.dtype, cx.shape[1:-1]
    if d not in (dt.f32, dt.f64):
        return NotImplemented

    def place(k: Expr, n: Expr) -> Expr:
        """Of element k of n; both halves count from their own end."""
        number = lambda e: convert(convert(e, dt.i64), d)
        step = op("div", Const(d, 2.0), number(n - 1))
        low = op("add", Const(d, -1.0), op("mul", step, number(k)))
        high = op("sub", Const(d, 1.0), op("mul", step, number(n - 1 - k)))
        value = select(op("lt", k, n // 2), low, high)
        value = value if align else op("div", op("mul", value, number(n - 1)), number(n))
        return select(op("eq", n, const(1)), Const(d, 0.0), value)

    def at(i: Index) -> Expr:
        row = [theta.load((i[0], i[-1], const(c))) for c in range(len(sizes) + 1)]
        total = row[-1]
        for c, (k, n) in enumerate(reversed(list(zip(i[1:-1], sizes, strict=True)))):
            total = op("add", total, op("mul", place(k, n), row[c]))
        return total

    return cx.stage(at)


@lowers("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def lower_grid_sampler(cx: Builder, x: Ref, grid: Ref, interpolation: int, padding: int, align: bool) -> object:
    """x (batch, channels, *sizes) read at grid (batch, *result sizes, rank): the grid's last axis counts from the innermost dimension."""
    if x.dtype not in (dt.f32, dt.f64) or grid.dtype is not x.dtype or any(known(n) == 0 for n in x.shape) or not cx.is_ours(cx.shape):
        return NotImplemented
    rank = x.rank - 2
    along = [Along(n, x.dtype, padding, align, cx.device == "cpu") for n in x.shape[2:]]

    def at(i: Index) -> Expr:
        places = [a.position(grid.load((i[0], *i[2:], const(rank - 1 - d)))) for d, a in enumerate(along)]
        return HOW[interpolation](x, i[:2], places, along)

    return cx.stage(at)


