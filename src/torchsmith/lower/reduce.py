"""Reductions: Folds inside a Stage over the kept axes. In: a Ref and dimensions; out: one Stage per value.

Accuracy: sums run in an accumulator that keeps the error within twice that of eager's cascade; var and std accumulate in float64 as
eager does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, const, convert, op, select
from ..ir.program import Stage, Store
from .core import Builder
from .numerics import boolean, cast, held, highest, lowest, opmath, scalar
from .pointwise import c
from .ref import ONE, ZERO, Index, Ref, known, product
from .table import lowers
from .views import wrap_dim, wrap_dims

# Longest float32 sum that one accumulator may hold: along the innermost dimension many vector lanes share it, elsewhere one lane has all.
INNER_TERMS, OUTER_TERMS = 1024, 64
COLUMNS = 16  # wider rows are added up row by row


@dataclass(frozen=True, slots=True)
class Split:
    """Kept and folded dimensions of a reduction over `dims` of `shape`; `join` puts an element's index together again."""

    shape: tuple[Expr, ...]
    dims: tuple[int, ...]
    keep: bool

    @property
    def kept(self) -> tuple[Expr, ...]:
        if self.keep:
            return tuple(ONE if d in self.dims else n for d, n in enumerate(self.shape))
        return tuple(n for d, n in enumerate(self.shape) if d not in self.dims)

    @property
    def folded(self) -> tuple[Expr, ...]:
        return tuple(self.shape[d] for d in self.dims)

    @property
    def count(self) -> Expr:
        return product(self.folded)

    def join(self, outer: Index, inner: Index) -> Index:
        given, folded = iter(outer), iter(inner)
        index = []
        for d in range(len(self.shape)):
            if d in self.dims:
                index.append(next(folded))
                if self.keep:
                    next(given)
            else:
                index.append(next(given))
        return tuple(index)


def split_of(x: Ref, dims: Any, keep: bool) -> Split:
    return Split(x.shape, wrap_dims(dims, x.rank), keep)


def accumulator(d: DType, how: Split) -> DType:
    """The dtype in which a sum of `d` runs."""
    d = opmath(d)
    if d is not dt.f32:
        return dt.i64 if d.kind in ("int", "uint", "bool") else d
    count = known(how.count)
    inner = bool(how.dims) and how.dims[-1] == len(how.shape) - 1
    return dt.f32 if count is not None and count <= (INNER_TERMS if inner else OUTER_TERMS) else dt.f64


def fold_over(
    cx: Builder, shape: Sequence[Expr], init: Sequence[Expr], step: Callable[[Index, tuple[Expr, ...]], Sequence[Expr]],
    merge: Callable[[tuple[Expr, ...], tuple[Expr, ...]], Sequence[Expr]] | None,
) -> Expr:  # fmt: skip
    """`cx.fold` without loops over dimensions of size 1: an innermost one would leave nothing to run over lanes."""
    keep = [d for d, n in enumerate(shape) if n is not ONE] or list(range(len(shape)))[-1:]

    def whole(index: Index) -> Index:
        given = iter(index)
        return tuple(next(given) if d in keep else ZERO for d in range(len(shape)))

    return cx.fold([shape[d] for d in keep], init, lambda i, s: step(whole(i), s), merge)


def total(cx: Builder, how: Split, value: Callable[[Index], Expr], acc: DType, blocks: bool = False) -> Callable[[Index], Expr]:
    """outer index -> sum of value(index) over the folded dimensions, in `acc`; with `blocks` long sums of float32 values in two steps."""

    def fold(shape: Sequence[Expr], d: DType, term: Callable[[Index], Expr]) -> Expr:
        return fold_over(cx, shape, [Const(d, 0)], lambda i, s: [op("add", s[0], cast(term(i), d))], lambda a, b: [op("add", a[0], b[0])])

    def at(outer: Index) -> Expr:
        if not how.dims:  # -0.0 added to nothing is 0.0
            return op("add", Const(acc, 0), cast(value(how.join(outer, ())), acc))
        parts = blocks_of(how) if blocks and acc is dt.f64 else None
        if parts is None:
            return fold(how.folded, acc, lambda i: value(how.join(outer, i)))
        return fold(parts.outer, acc, lambda j: fold(parts.inner, dt.f32, lambda i: value(how.join(outer, parts.join(j, i)))))

    return at


@dataclass(frozen=True, slots=True)
class Blocks:
    """Folded dimensions cut in two: `inner` are the last ones, as many elements as float32 may add, `outer` the rest."""

    outer: tuple[Expr, ...]
    inner: tuple[Expr, ...]
    step: int  # elements of the first inner dimension in one block

    def join(self, outer: Index, inner: Index) -> Index:
        cut = op("add", op("mul", outer[-1], const(self.step)), inner[0])
        return (*outer[:-1], cut, *inner[1:])


def blocks_of(how: Split) -> Blocks | None:
    """Blocks of a sum along the innermost dimension, or over a few columns, where sizes are known and blocks of a good size divide them."""
    sizes = [known(n) for n in how.folded]
    columns = known(product(how.shape[how.dims[-1] + 1 :]))
    if None in sizes or columns is None or columns > COLUMNS:
        return None
    terms = INNER_TERMS if how.dims[-1] == len(how.shape) - 1 else OUTER_TERMS
    inside, first = 1, len(sizes)
    while first and inside * sizes[first - 1] <= terms:  # type: ignore[operator]
        first -= 1
        inside *= sizes[first]  # type: ignore[operator]
    if not first:
        return None
    n = sizes[first - 1]
    step = max(d for d in range(1, terms // inside + 1) if n % d == 0)  # type: ignore[operator]
    if inside * step < terms // 4:
        return None
    return Blocks((*how.folded[: first - 1], const(n // step)), (const(step), *how.folded[first:]), step)  # type: ignore[operator]


def fold_with(cx: Builder, how: Split, name: str, init: Expr, value: Callable[[Index], Expr]) -> Callable[[Index], Expr]:
    """outer index -> fold of value(index) by the associative operator `name`."""

    def at(outer: Index) -> Expr:
        if not how.dims:
            return value(how.join(outer, ()))

        def step(i: Index, s: tuple[Expr, ...]) -> list[Expr]:
            return [op(name, s[0], value(how.join(outer, i)))]

        return fold_over(cx, how.folded, [init], step, lambda a, b: [op(name, a[0], b[0])])

    return at


def reads(x: Ref, d: DType) -> Callable[[Index], Expr]:
    return lambda i: cast(x.load(i), d)


def hold(cx: Builder, shape: Sequence[Expr], d: DType, value: Callable[[Index], Expr]) -> Ref:
    """An intermediate value, in a stage of its own."""
    return cx.stage(value, tuple(shape), d)


# ---------------------------------------------------------------- sums
def sum_of(cx: Builder, x: Ref, dims: Any, keep: bool, value: Callable[[Expr], Expr] = lambda e: e) -> Ref:
    how = split_of(x, dims, keep)
    result = cx.dtype
    acc = accumulator(result, how)
    compute = opmath(x.dtype) if x.dtype.is_float and not (acc is dt.f64 and result is dt.f64) else acc
    rows = how.dims[-1:] == (x.rank - 1,) and len(how.dims) < x.rank  # sums of rows stay what attention is known by
    if compute is dt.f32 and acc is dt.f64 and not rows:
        at = total(cx, how, lambda i: value(cast(x.load(i), compute)), acc, True)
    else:
        at = total(cx, how, lambda i: value(cast(cast(x.load(i), compute), acc if compute.kind == acc.kind else compute)), acc)
    return cx.stage(lambda i: cast(at(i), result))


@lowers("aten.sum.default")
def lower_sum_all(cx: Builder, x: Ref, dtype: Any = None) -> Ref:
    return sum_of(cx, x, None, False)


@lowers("aten.sum.dim_IntList")
def lower_sum(cx: Builder, x: Ref, dims: Any, keep: bool = False, dtype: Any = None) -> Ref:
    return sum_of(cx, x, dims, keep)


def _nan_as_zero(e: Expr) -> Expr:
    return select(op("isnan", e), c(e, 0.0), e) if e.dtype.is_float else e


@lowers("aten.nansum.default")
def lower_nansum(cx: Builder, x: Ref, dims: Any = None, keep: bool = False, dtype: Any = None) -> Ref:
    return sum_of(cx, x, dims, keep, _nan_as_zero)


def mean_of(cx: Builder, x: Ref, dims: Any, keep: bool) -> Ref:
    how = split_of(x, dims, keep)
    result = cx.dtype
    acc = accumulator(result, how)
    at = total(cx, how, lambda i: cast(x.load(i), opmath(result)), acc, opmath(result) is dt.f32)
    return cx.stage(lambda i: cast(op("div", at(i), cast(how.count, acc)), result))


@lowers("aten.mean.default")
def lower_mean_all(cx: Builder, x: Ref, dtype: Any = None) -> Ref:
    return mean_of(cx, x, None, False)


@lowers("aten.mean.dim")
def lower_mean(cx: Builder, x: Ref, dims: Any, keep: bool = False, dtype: Any = None) -> Ref:
    return mean_of(cx, x, dims, keep)


def prod_of(cx: Builder, x: Ref, dims: Any, keep: bool) -> Ref:
    how = split_of(x, dims, keep)
    result = cx.dtype
    acc = accumulator(result, how)
    at = fold_with(cx, how, "mul", Const(acc, 1), reads(x, acc))
    return cx.stage(lambda i: cast(at(i), result))


@lowers("aten.prod.default")
def lower_prod_all(cx: Builder, x: Ref, dtype: Any = None) -> Ref:
    return prod_of(cx, x, None, False)


@lowers("aten.prod.dim_int")
def lower_prod(cx: Builder, x: Ref, dim: int, keep: bool = False, dtype: Any = None) -> Ref:
    return prod_of(cx, x, dim, keep)


@lowers("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def lower_count_nonzero(cx: Builder, x: Ref, dims: Any = None) -> Ref:
    how = split_of(x, dims, False)
    return cx.stage(total(cx, how, lambda i: boolean(x.load(i)), dt.i64))


# ---------------------------------------------------------------- extremes
def extreme(cx: Builder, x: Ref, dims: Any, keep: bool, name: str) -> Callable[[Index], Expr]:
    how = split_of(x, dims, keep)
    init = lowest(x.dtype) if name == "max" else highest(x.dtype)
    return fold_with(cx, how, name, init, x.load)


@lowers("aten.amax.default")
def lower_amax(cx: Builder, x: Ref, dims: Any = (), keep: bool = False) -> Ref:
    return cx.stage(extreme(cx, x, dims, keep, "max"))


@lowers("aten.amin.default")
def lower_amin(cx: Builder, x: Ref, dims: Any = (), keep: bool = False) -> Ref:
    return cx.stage(extreme(cx, x, dims, keep, "min"))


@lowers("aten.max.default")
def lower_max_all(cx: Builder, x: Ref) -> Ref:
    return cx.stage(extreme(cx, x, None, False, "max"))


@lowers("aten.min.default")
def lower_min_all(cx: Builder, x: Ref) -> Ref:
    return cx.stage(extreme(cx, x, None, False, "min"))


@lowers("aten.aminmax.default")
def lower_aminmax(cx: Builder, x: Ref, dim: int | None = None, keep: bool = False) -> tuple[Ref, ...]:
    return cx.stages(extreme(cx, x, dim, keep, "min"), extreme(cx, x, dim, keep, "max"))


def best_with_index(cx: Builder, how: Split, value: Callable[[Index], Expr], d: DType, name: str) -> Callable[[Index], Any]:
    """outer index -> Fold of (best value, its number in the folded dimensions): the first one wins, a NaN beats all numbers."""
    better_name = "gt" if name == "max" else "lt"

    def better(x: Expr, i: Expr, y: Expr, j: Expr) -> Expr:
        """Does (x, i) beat (y, j)?"""
        wins, ties = op(better_name, x, y), op("eq", x, y)
        if d.is_float:
            nan_x, nan_y = op("isnan", x), op("isnan", y)
            wins = op("or", wins, op("and", nan_x, op("not", nan_y)))
            ties = op("or", ties, op("and", nan_x, nan_y))
        return op("or", wins, op("and", ties, op("lt", i, j)))

    last = Const(dt.i64, 2**63 - 1)
    init = [lowest(d) if name == "max" else highest(d), last]

    def at(outer: Index) -> Any:
        def step(i: Index, s: tuple[Expr, ...]) -> list[Expr]:
            number: Expr = ZERO
            for k, n in zip(i, how.folded, strict=True):
                number = number * n + k
            x, j = value(how.join(outer, i)), convert(number, dt.i64)
            take = better(x, j, s[0], s[1])
            return [select(take, x, s[0]), select(take, j, s[1])]

        def merge(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> list[Expr]:
            take = better(b[0], b[1], a[0], a[1])
            return [select(take, b[0], a[0]), select(take, b[1], a[1])]

        return fold_over(cx, how.folded, init, step, merge)

    return at


def _arg(cx: Builder, x: Ref, dim: int | None, keep: bool, name: str) -> Ref:
    if x.rank == 0:
        return cx.stage(lambda i: Const(dt.i64, 0))
    how = split_of(x, dim, keep)
    at = best_with_index(cx, how, lambda i: _ordered(x.load(i)), _ordered_dtype(x.dtype), name)
    return cx.stage(lambda i: at(i).picking(1))


def _ordered_dtype(d: DType) -> DType:
    return dt.u8 if d is dt.bool_ else opmath(d)


def _ordered(e: Expr) -> Expr:
    return cast(e, _ordered_dtype(e.dtype))


@lowers("aten.argmax.default")
def lower_argmax(cx: Builder, x: Ref, dim: int | None = None, keep: bool = False) -> Ref:
    return _arg(cx, x, dim, keep, "max")


@lowers("aten.argmin.default")
def lower_argmin(cx: Builder, x: Ref, dim: int | None = None, keep: bool = False) -> Ref:
    return _arg(cx, x, dim, keep, "min")


def _extreme_dim(cx: Builder, x: Ref, dim: int, keep: bool, name: str) -> tuple[Ref, ...]:
    if x.rank == 0:
        return cx.stages(lambda i: x.load(()), lambda i: Const(dt.i64, 0))
    how = split_of(x, dim, keep)
    at = best_with_index(cx, how, lambda i: _ordered(x.load(i)), _ordered_dtype(x.dtype), name)
    shared: dict[Index, Any] = {}

    def once(i: Index) -> Any:
        if i not in shared:
            shared[i] = at(i)
        return shared[i]

    return cx.stages(lambda i: cast(once(i).picking(0), x.dtype), lambda i: once(i).picking(1))


@lowers("aten.max.dim")
def lower_max_dim(cx: Builder, x: Ref, dim: int, keep: bool = False) -> tuple[Ref, ...]:
    return _extreme_dim(cx, x, dim, keep, "max")


@lowers("aten.min.dim")
def lower_min_dim(cx: Builder, x: Ref, dim: int, keep: bool = False) -> tuple[Ref, ...]:
    return _extreme_dim(cx, x, dim, keep, "min")


# ---------------------------------------------------------------- truth
def _truth(cx: Builder, x: Ref, dims: Any, keep: bool, name: str) -> Ref:
    how = split_of(x, dims, keep)
    at = fold_with(cx, how, name, Const(dt.bool_, name == "and"), lambda i: boolean(x.load(i)))
    return cx.stage(lambda i: cast(at(i), cx.dtype))


def _lower_truth(sign: str) -> Callable[..., Ref]:
    def lower(cx: Builder, x: Ref, dims: Any = None, keep: bool = False) -> Ref:
        if isinstance(dims, (tuple, list)) and not dims:
            return cx.stage(lambda i: cast(boolean(x.load(i)), cx.dtype))
        return _truth(cx, x, dims, keep, sign)

    return lower


lowers("aten.any.default", "aten.any.dim", "aten.any.dims", "aten._is_any_true.default")(_lower_truth("or"))
lowers("aten.all.default", "aten.all.dim", "aten.all.dims", "aten._is_all_true.default")(_lower_truth("and"))


# ---------------------------------------------------------------- moments
def moments(cx: Builder, how: Split, value: Callable[[Index], Expr], acc: DType, blocks: bool = False) -> tuple[Ref, Ref]:
    """(mean, sum of squared deviations) over the folded dimensions, each kept with size 1, in `acc`: two passes, as exact as Welford's.

    With `blocks` values are float32, and so are deviations: the mean's rounding adds to the variance less than that of the values has.
    """
    kept = Split(how.shape, how.dims, True)
    sum_at = total(cx, kept, value, acc, blocks)
    mean = hold(cx, kept.kept, acc, lambda i: op("div", sum_at(i), cast(kept.count, acc)))

    def squared(i: Index) -> Expr:
        v = value(i) if blocks else cast(value(i), acc)
        d = op("sub", v, cast(mean.at(i), v.dtype))
        return op("mul", d, d)

    squares_at = total(cx, kept, squared, acc, blocks)
    return mean, hold(cx, kept.kept, acc, squares_at)


def moments_at_once(cx: Builder, how: Split, value: Callable[[Index], Expr]) -> tuple[Ref, Ref]:
    """The same of values that are float32, in one pass: sums of them and of their squares in float64, which holds each square exactly. What
    the difference of the two loses shows where the mean is a million deviations from 0, where float32 has lost more."""
    d = dt.f64
    kept = Split(how.shape, how.dims, True)

    def step(at: Index, outer: Index, sums: tuple[Expr, ...]) -> list[Expr]:
        v = cast(value(kept.join(outer, at)), d)
        return [op("add", sums[0], v), op("add", sums[1], op("mul", v, v))]

    axes = cx.axes(kept.kept)
    added = cx.fold(
        kept.folded, [Const(d, 0.0)] * 2, lambda i, s: step(i, axes, s), lambda a, b: [op("add", x, y) for x, y in zip(a, b, strict=True)]
    )
    names = [cx.buffer(d, kept.kept) for _ in range(2)]
    stores = tuple(Store(name, axes, added.picking(k)) for k, name in enumerate(names))
    cx.body.append(Stage(tuple(zip(axes, kept.kept, strict=True)), stores, loc=cx.loc, origin=cx.origin))
    first, second = map(cx.ref, names)
    mean = hold(cx, kept.kept, d, lambda i: op("div", first.load(i), cast(kept.count, d)))

    def squares(i: Index) -> Expr:
        return op("max", op("sub", second.load(i), op("mul", first.load(i), mean.load(i))), Const(d, 0.0))

    return mean, hold(cx, kept.kept, d, squares)


def kept_index(how: Split, outer: Index) -> Index:
    """A result index -> index into a value that keeps the folded dimensions with size 1."""
    return how.join(outer, (ZERO,) * len(how.dims)) if how.dims else tuple(outer)


def _variance(
    cx: Builder, x: Ref, dims: Any, correction: Any, keep: bool, root: bool
) -> tuple[Callable[[Index], Expr], Callable[[Index], Expr]]:
    how = split_of(x, dims, keep)
    acc = dt.f64
    mean, squares = moments(cx, how, lambda i: cast(x.load(i), acc), acc)
    count = cast(how.count, acc)
    none = Const(acc, 0.0)
    free = op("max", op("sub", count, scalar(correction, acc)), none)
    if not isinstance(correction, int | float) or correction < 0:
        free = select(op("gt", count, none), free, none)  # of no values it is NaN, whatever the correction

    def at(outer: Index) -> Expr:
        var = op("div", squares.load(kept_index(how, outer)), free)
        return op("sqrt", var) if root else var

    return at, lambda outer: mean.load(kept_index(how, outer))


def _correction(value: Any) -> Any:
    return 1 if value is None else value


def _lower_variance(cx: Builder, x: Ref, dims: Any, correction: Any, keep: bool, root: bool, with_mean: bool) -> Any:
    var, mean = _variance(cx, x, dims, correction, keep, root)
    d = cx.dtype
    if with_mean:
        return cx.stages(lambda i: cast(var(i), d), lambda i: cast(mean(i), d))
    return cx.stage(lambda i: cast(var(i), d))


def _variance_rows() -> None:
    for packet, root, with_mean in (("var", False, False), ("std", True, False), ("var_mean", False, True), ("std_mean", True, True)):

        def of_all(cx: Builder, x: Ref, unbiased: bool = True, root: bool = root, with_mean: bool = with_mean) -> Any:
            return _lower_variance(cx, x, None, int(unbiased), False, root, with_mean)

        def of_dims(
            cx: Builder, x: Ref, dims: Any, unbiased: bool = True, keep: bool = False, root: bool = root, with_mean: bool = with_mean
        ) -> Any:
            return _lower_variance(cx, x, dims, int(unbiased), keep, root, with_mean)

        def corrected(
            cx: Builder,
            x: Ref,
            dims: Any = None,
            correction: Any = None,
            keep: bool = False,
            root: bool = root,
            with_mean: bool = with_mean,
        ) -> Any:
            return _lower_variance(cx, x, dims, _correction(correction), keep, root, with_mean)

        lowers(f"aten.{packet}.default")(of_all)
        lowers(f"aten.{packet}.dim")(of_dims)
        lowers(f"aten.{packet}.correction")(corrected)


_variance_rows()


# ---------------------------------------------------------------- norms
def norm_of(cx: Builder, x: Ref, order: float, dims: Any, keep: bool) -> Ref:
    """Of one element it is its absolute value, whose powers overflow."""
    how = split_of(x, dims, keep)
    result = cx.dtype
    compute = opmath(result)
    acc = accumulator(result, how)

    def magnitude(i: Index) -> Expr:
        return op("abs", cast(x.load(i), compute))

    is_one = op("eq", how.count, ONE) if (cx.interval(how.count).lo or 0) <= 1 else None

    def unless_one(one: Expr, more: Expr) -> Expr:
        return more if is_one is None else select(is_one, one, more)

    if known(how.count) == 1 and order:
        return cx.stage(lambda i: cast(magnitude(how.join(i, (ZERO,) * len(how.dims))), result))
    if order == math.inf:
        at = fold_with(cx, how, "max", Const(compute, 0.0), magnitude)
    elif order == -math.inf:
        at = fold_with(cx, how, "min", Const(compute, math.inf), magnitude)
    elif order == 0:
        at = total(cx, how, lambda i: boolean(cast(x.load(i), compute)), acc)
    elif order == 1:
        at = total(cx, how, magnitude, acc)
    elif order == 2:
        squares = total(cx, how, lambda i: unless_one(v := cast(magnitude(i), acc), op("mul", v, v)), acc)
        at = lambda i: unless_one(squares(i), op("sqrt", squares(i)))
    else:
        power = held(order, compute)
        root = 1.0 / power if power else math.copysign(math.inf, power)
        powers = total(cx, how, lambda i: unless_one(v := cast(magnitude(i), acc), op("pow", v, Const(acc, power))), acc)
        at = lambda i: unless_one(powers(i), op("pow", powers(i), Const(acc, root)))
    return cx.stage(lambda i: cast(at(i), result))


@lowers("aten.linalg_vector_norm.default")
def lower_vector_norm(cx: Builder, x: Ref, order: Any = 2, dims: Any = None, keep: bool = False, dtype: Any = None) -> Any:
    if isinstance(order, Expr):
        return NotImplemented
    return norm_of(cx, x, float(order), dims, keep)


@lowers("aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype", "aten.norm.ScalarOpt_dtype")
def lower_norm(cx: Builder, x: Ref, order: Any = 2, dims: Any = None, keep: Any = False, dtype: Any = None) -> Any:
    if not isinstance(dims, (tuple, list, type(None))):  # ScalarOpt_dtype has the dtype here
        dims, keep = None, False
    return norm_of(cx, x, 2.0 if order is None else float(order), dims, bool(keep))


# ---------------------------------------------------------------- exponentials
def softmax_parts(cx: Builder, x: Ref, dim: int, compute: DType) -> tuple[Ref, Ref]:
    """(max, sum of exp(x - max)) along `dim`, kept with size 1."""
    how = Split(x.shape, (wrap_dim(dim, x.rank),) if x.rank else (), True)
    top = hold(cx, how.kept, compute, fold_with(cx, how, "max", lowest(compute), reads(x, compute)))
    acc = accumulator(compute, how)
    at = total(cx, how, lambda i: op("exp", op("sub", cast(x.load(i), compute), top.at(i))), acc)
    return top, hold(cx, how.kept, compute, lambda i: cast(at(i), compute))


@lowers("aten._softmax.default")
def lower_softmax(cx: Builder, x: Ref, dim: int, half_to_float: bool) -> Any:
    compute = opmath(x.dtype)
    if not compute.is_float:  # eager takes integers where there are none
        return NotImplemented
    top, below = softmax_parts(cx, x, dim, compute)
    return cx.stage(lambda i: cast(op("div", op("exp", op("sub", cast(x.load(i), compute), top.at(i))), below.at(i)), cx.dtype))


@lowers("aten._log_softmax.default")
def lower_log_softmax(cx: Builder, x: Ref, dim: int, half_to_float: bool) -> Any:
    compute = opmath(x.dtype)
    if not compute.is_float:
        return NotImplemented
    top, below = softmax_parts(cx, x, dim, compute)

    def at(i: Index) -> Expr:
        return op("sub", op("sub", cast(x.load(i), compute), top.at(i)), op("log", below.at(i)))

    return cx.stage(lambda i: cast(at(i), cx.dtype))


@lowers("aten.softmax.int", "aten.special_softmax.default")
def lower_softmax_int(cx: Builder, x: Ref, dim: int, dtype: Any = None) -> Any:
    return lower_softmax(cx, _as(x, cx.dtype), dim, False)


@lowers("aten.log_softmax.int", "aten.special_log_softmax.default")
def lower_log_softmax_int(cx: Builder, x: Ref, dim: int, dtype: Any = None) -> Any:
    return lower_log_softmax(cx, _as(x, cx.dtype), dim, False)


def _as(x: Ref, d: DType) -> Ref:
    return x if x.dtype is d else Ref(d, x.shape, lambda i: cast(x.load(i), d))


@lowers("aten.logsumexp.default", "aten.special_logsumexp.default")
def lower_logsumexp(cx: Builder, x: Ref, dims: Any, keep: bool = False) -> Ref:
    """max + log(sum(exp(x - max))), with an infinite maximum taken as 0."""
    result = cx.dtype
    compute = opmath(result)
    how = split_of(x, dims, keep)
    kept = Split(how.shape, how.dims, True)
    empty = known(how.count) == 0
    if empty:
        return cx.stage(lambda i: Const(result, -math.inf))
    raw = hold(cx, kept.kept, compute, fold_with(cx, kept, "max", lowest(compute), reads(x, compute)))

    def top(i: Index) -> Expr:
        m = raw.at(i)
        return select(op("isinf", m), c(m, 0.0), m)

    at = total(cx, how, lambda i: op("exp", op("sub", cast(x.load(i), compute), top(i))), accumulator(compute, how))
    return cx.stage(lambda i: cast(op("add", op("log", cast(at(i), compute)), top(kept_index(how, i))), result))


@lowers("aten._safe_softmax.default")
def lower_safe_softmax(cx: Builder, x: Ref, dim: int, dtype: Any = None) -> Ref:
    """softmax, but 0 in a row that is all -inf."""
    compute = opmath(x.dtype)
    top, below = softmax_parts(cx, x, dim, compute)

    def at(i: Index) -> Expr:
        value = op("div", op("exp", op("sub", cast(x.load(i), compute), top.at(i))), below.at(i))
        return cast(select(op("eq", top.at(i), c(value, -math.inf)), c(value, 0.0), value), cx.dtype)

    return cx.stage(at)


@lowers("aten.renorm.default")
def lower_renorm(cx: Builder, x: Ref, order: Any, dim: int, limit: Any) -> Any:
    """Slices along `dim` whose norm exceeds `limit` are scaled to it."""
    if (float(order) != 2.0 and float(order) != 1.0) or not x.dtype.is_float:
        return NotImplemented
    compute = opmath(x.dtype)
    dim = wrap_dim(dim, x.rank)
    how = Split(x.shape, tuple(d for d in range(x.rank) if d != dim), True)
    acc = accumulator(compute, how)

    def magnitude(i: Index) -> Expr:
        e = op("abs", cast(x.load(i), acc))
        return op("mul", e, e) if float(order) == 2.0 else e

    at = total(cx, how, magnitude, acc)

    def factor(i: Index) -> Expr:
        norm = op("sqrt", at(i)) if float(order) == 2.0 else at(i)
        scaled = op("div", Const(acc, float(limit)), op("add", norm, Const(acc, 1e-7)))
        return cast(select(op("gt", norm, Const(acc, float(limit))), scaled, Const(acc, 1.0)), compute)

    scale = hold(cx, how.kept, compute, factor)
    return cx.stage(lambda i: cast(op("mul", cast(x.load(i), compute), scale.at(i)), cx.dtype))
