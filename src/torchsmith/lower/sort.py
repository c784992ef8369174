"""Sorting along one dimension: sort, topk, kthvalue, median and their relatives. In: Refs; out: stages that rank blocks and merge runs.

    rank     block of at most BLOCK elements -> a sorted run: each element's place is how many of its block come before it
    repeat   runs of w, one behind the other, become runs of 4 w: two merges, each output element one step of a scan

Equals keep their order, NaN counts as the greatest. Who wants the first k of a long row finds the last of them bit by bit, by counting, and
sorts those only. Eager's unstable sorts order equals in a way of their own: where a program sees it (in the positions), they are native if
libtorch is forbidden, else calls into torch; so is choosing from many elements, which torch does faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, Load, Sym, Var, const, convert, op, select
from ..ir.program import Repeat, Stage, Store
from .cat import conjunction, masked
from .core import Builder
from .numerics import cast, lowest, opmath
from .ref import ONE, ZERO, Index, Ref, known, product, size
from .table import lowers
from .views import reshape, wrap_dim

ALONE, BLOCK = 64, 64  # elements of a row that is ranked whole; of a block that is ranked before merging
LONGEST = 2**40  # elements of a row whose length is a symbol


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows [*outer, n] of keys, in the operand's dtype, and of their positions (i64), to be sorted; `keep` of a row count."""

    keys: str
    places: str
    outer: tuple[Expr, ...]
    n: Expr
    keep: Expr
    falling: bool


def _code(e: Expr, falling: bool) -> Expr:
    """An integer that is less the earlier `e` comes: the bits of a float, those below the sign turned where it is negative."""
    if e.dtype.is_float:
        e = cast(e, opmath(e.dtype))
        d = dt.i64 if e.dtype is dt.f64 else dt.i32
        most = Const(d, 2 ** (8 * d.itemsize - 1) - 1)
        bits = op("bitcast", op("add", e, Const(e.dtype, 0.0)), dtype=d)  # -0.0 + 0.0 is 0.0
        turned = op("xor", bits, op("bitand", op("shr", bits, Const(d, 8 * d.itemsize - 1)), most))
        e = select(op("isnan", e), most, turned)
    elif e.dtype.itemsize < 4:
        e = cast(e, dt.i32)
    return op("bitnot", e) if falling else e


def _before(a: Expr, b: Expr, falling: bool) -> Expr:
    """Does `a` come strictly before `b`?"""
    a, b = (cast(e, dt.u8 if e.dtype is dt.bool_ else opmath(e.dtype)) for e in (a, b))
    if not a.dtype.is_float:
        return op("gt" if falling else "lt", a, b)
    return op("and", op("not", op("le" if falling else "ge", a, b)), op("not", op("isnan", b if falling else a)))


def _ceil(a: Expr, b: Expr) -> Expr:
    return op("floordiv", a + b - 1, b)


def _rank(cx: Builder, r: Runs, x: Ref, dim: int, block: Expr) -> None:
    """Fill r with the sorted blocks of x."""
    zero = Const(x.dtype, 0)
    count = _ceil(r.n, block)
    axes = cx.axes((*r.outer, count, block))
    *outer, b, e = axes
    start = b * block
    even = known(r.n % block) == 0

    def key(k: Expr) -> Expr:
        at = start + k
        index = (*outer[:dim], at, *outer[dim:])
        return x.load(index) if even else masked(x, index, op("lt", at, r.n), zero)

    mine = key(e)
    code = _code(mine, r.falling)

    def step(j: tuple[Expr, ...], s: tuple[Expr, ...]) -> list[Expr]:
        other = _code(key(j[0]), r.falling)
        first = select(op("lt", convert(j[0], dt.i32), convert(e, dt.i32)), op("le", other, code), op("lt", other, code))
        if not even:
            first = op("and", first, op("lt", start + j[0], r.n))
        return [op("add", s[0], convert(first, dt.i32))]

    rank = cx.fold([block], [Const(dt.i32, 0)], step, lambda a, b: [op("add", a[0], b[0])])
    place = convert(rank, dt.index)
    tests = [] if even else [op("lt", start + e, r.n)]
    if r.keep is not r.n:
        tests.append(op("lt", place, r.keep))
    mask = conjunction(tests) if tests else None
    at = (*outer, start + place)
    stores = (Store(r.keys, at, mine, mask=mask), Store(r.places, at, convert(start + e, dt.i64), mask=mask))
    cx.body.append(Stage(tuple(zip(axes, (*r.outer, count, block), strict=True)), stores, loc=cx.loc, origin=cx.origin))


def _merge(cx: Builder, source: Runs, to: Runs, width: Expr) -> None:
    """Runs that start every `width` elements become runs that start every 2 * width."""
    n, keep = source.n, source.keep
    most = op("min", width, keep)
    out = op("min", op("min", width * 2, n), keep)
    shape = (*source.outer, _ceil(n, width * 2), out)
    axes = cx.axes(shape)
    *outer, run, p = axes
    start = run * (width * 2)
    middle = start + width
    left = op("min", n - start, most)
    right = op("max", op("min", n - middle, most), ZERO)
    taken = Var(f"s{cx.count}_0", dt.index)  # of the left run
    cx.count += 1
    rest = p - taken
    has_left, has_right = op("lt", taken, left), op("lt", rest, right)
    keys = cx.ref(source.keys)
    zero = Const(keys.dtype, 0)
    a, b = (masked(keys, (*outer, at), has, zero) for at, has in ((start + taken, has_left), (middle + rest, has_right)))
    use_right = op("and", has_right, op("or", op("not", has_left), _before(b, a, source.falling)))
    exists = op("lt", p, left + right)
    place = Load(source.places, dt.i64, (*outer, select(use_right, middle + rest, start + taken)), exists, Const(dt.i64, 0))
    at = (*outer, start + p)
    stores = (Store(to.keys, at, select(use_right, b, a), mask=exists), Store(to.places, at, place, mask=exists))
    bound = tuple(zip(axes, shape, strict=True))
    after = (select(use_right, taken, taken + 1),)
    cx.body.append(Stage(bound, stores, scan=True, carry=((taken, ZERO),), carry_next=after, loc=cx.loc, origin=cx.origin))


def sorted_rows(cx: Builder, x: Ref, dim: int, falling: bool, keep: Expr | None = None) -> tuple[Ref, Ref]:
    """(values, positions) of x with `dim` moved to the end, sorted along it; elements from `keep` on hold no meaning."""
    n = x.shape[dim]
    keep = n if keep is None else keep
    outer = (*x.shape[:dim], *x.shape[dim + 1 :])
    count = known(n)
    if count == 0:
        return tuple(Ref(d, (*outer, n), lambda i, d=d: Const(d, 0)) for d in (x.dtype, dt.i64))  # type: ignore[return-value,misc]
    alone = count is not None and count <= ALONE

    def runs(role: Any) -> Runs:
        names = [cx.buffer(d, (*outer, n), required=role == "state", role=role) for d in (x.dtype, dt.i64)]
        return Runs(names[0], names[1], outer, n, keep, falling)

    first = runs("temp" if alone else "state")
    if alone:
        _rank(cx, first, x, dim, n)
    else:
        _sort_long(cx, first, runs("temp"), x, dim)
    return cx.ref(first.keys), cx.ref(first.places)


def _sort_long(cx: Builder, first: Runs, second: Runs, x: Ref, dim: int) -> None:
    n, count = first.n, known(first.n)
    bound = BLOCK
    passes: Expr = ZERO
    while bound < (LONGEST if count is None else count):
        passes = passes + select(op("gt", n, const(bound)), ONE, ZERO)
        bound *= 4
    block = op("max", _ceil(n, op("shl", ONE, passes * 2)), ONE)
    _rank(cx, first, x, dim, block)
    outside, cx.body = cx.body, []
    step = Sym(cx.fresh("step"), dt.index)
    width = op("shl", block, step * 2)
    _merge(cx, first, second, width)
    _merge(cx, second, first, width * 2)
    outside.append(Repeat(step, passes, tuple(cx.body)))
    cx.body = outside


# ---------------------------------------------------------------- the first k
def _counter(cx: Builder, n: Expr) -> dt.DType:
    """An integer that counts to n."""
    hi = cx.interval(n).hi
    return dt.i32 if hi is not None and hi < 2**31 else dt.i64


def codes_of(cx: Builder, x: Ref, dim: int, falling: bool) -> Ref:
    """Codes of x with `dim` moved to the end."""
    shape = (*x.shape[:dim], *x.shape[dim + 1 :], x.shape[dim])
    d = _code(Const(x.dtype, 0), falling).dtype
    return cx.stage(lambda i: _code(x.load((*i[:dim], i[-1], *i[dim:-1])), falling), shape, d)


def count_rows(cx: Builder, rows: Ref, test: Callable[[Expr], Expr], outer: Index, d: dt.DType) -> Expr:
    """How many elements of a row pass."""
    return cx.fold(
        [rows.shape[-1]], [Const(d, 0)], lambda k, s: [op("add", s[0], convert(test(rows.load((*outer, k[0]))), d))],
        lambda a, b: [op("add", a[0], b[0])],
    )  # fmt: skip


def nth_code(cx: Builder, codes: Ref, nth: Callable[[Index, dt.DType], Expr]) -> Ref:
    """The code number nth(row) of each row in order, from 0: found bit by bit, from the sign on."""
    d = codes.dtype
    bits = 8 * d.itemsize
    counter = _counter(cx, codes.shape[-1])

    def at(outer: Index) -> Expr:
        wanted = nth(outer, counter)

        def step(k: Index, s: tuple[Expr, ...]) -> list[Expr]:
            higher = op("xor", s[0], op("shl", Const(d, 1), cast(const(bits - 1) - k[0], d)))
            below = count_rows(cx, codes, lambda c: op("lt", c, higher), outer, counter)
            return [select(op("le", below, wanted), higher, s[0])]

        return cx.fold([const(bits)], [Const(d, -(2 ** (bits - 1)))], step)

    return cx.stage(at, codes.shape[:-1], d)


def _first(cx: Builder, x: Ref, dim: int, falling: bool, keep: Expr) -> tuple[Ref, Ref]:
    """(values [*outer, keep], positions) of the first `keep` of x in order, themselves in the order in which they lie."""
    codes = codes_of(cx, x, dim, falling)
    *outer, n = codes.shape
    bound = nth_code(cx, codes, lambda _, d: convert(keep - 1, d))
    counter = _counter(cx, n)
    shape = (*outer, op("max", keep, ONE))
    names = [cx.buffer(x.dtype, shape), cx.buffer(dt.i64, shape)]
    before = cx.stage(lambda i: count_rows(cx, codes, lambda c: op("lt", c, bound.load(i)), i, counter), outer, counter)
    axes = cx.axes(codes.shape)
    row, e = axes[:-1], axes[-1]
    taken, ties = (Var(f"s{cx.count}_{k}", dt.index) for k in (0, 1))
    cx.count += 1
    code, last = codes.load(axes), bound.load(row)
    sure, tie = op("lt", code, last), op("eq", code, last)
    fits = op("lt", ties, keep - convert(before.load(row), dt.index))
    mask = op("or", sure, op("and", tie, fits))
    at = (*row, taken)
    value = x.load((*row[:dim], e, *row[dim:]))
    stores = (Store(names[0], at, value, mask=mask), Store(names[1], at, convert(e, dt.i64), mask=mask))
    after = (taken + convert(mask, dt.index), ties + convert(tie, dt.index))
    bounds = tuple(zip(axes, codes.shape, strict=True))
    cx.body.append(
        Stage(bounds, stores, scan=True, carry=((taken, ZERO), (ties, ZERO)), carry_next=after, loc=cx.loc, origin=cx.origin)
    )
    return cx.ref(names[0]), cx.ref(names[1])


# ---------------------------------------------------------------- rows
def _moved(i: Index, dim: int) -> Index:
    """Index of x -> index of its rows."""
    return (*i[:dim], *i[dim + 1 :], i[dim])


def _order_shows(cx: Builder) -> bool:
    """Does the program see in which order eager's unstable sorts leave equals, and may it have that order from eager?"""
    return 1 in cx.read and not cx.is_alone


def _eager_selects(cx: Builder, x: Ref) -> bool:
    """Does torch choose elements of `x`, because the program sees which of equals, or because it is faster where there are many?"""
    return _order_shows(cx) or not cx.is_ours(x.shape)


def _scalars(cx: Builder, x: Ref) -> Any:
    return cx.stages(lambda i: x.load(()), lambda i: Const(dt.i64, 0))


def _sort(cx: Builder, x: Ref, dim: int, falling: bool) -> Any:
    if x.rank == 0:
        return _scalars(cx, x)
    dim = wrap_dim(dim, x.rank)
    values, places = sorted_rows(cx, x, dim, falling)
    return cx.stages(lambda i: values.load(_moved(i, dim)), lambda i: places.load(_moved(i, dim)))


@lowers("aten.sort.stable")
def lower_sort_stable(cx: Builder, x: Ref, stable: bool | None = False, dim: int = -1, descending: bool = False) -> Any:
    return _sort(cx, x, dim, descending) if stable or not _order_shows(cx) else NotImplemented


@lowers("aten.sort.default")
def lower_sort(cx: Builder, x: Ref, dim: int = -1, descending: bool = False) -> Any:
    return NotImplemented if _order_shows(cx) else _sort(cx, x, dim, descending)


@lowers("aten.topk.default")
def lower_topk(cx: Builder, x: Ref, k: Any, dim: int = -1, largest: bool = True, in_order: bool = True) -> Any:
    if _eager_selects(cx, x) or x.dtype is dt.bool_:  # eager refuses bool
        return NotImplemented
    if x.rank == 0:
        return _scalars(cx, x)
    dim = wrap_dim(dim, x.rank)
    keep = cx.shape[dim]
    n = known(x.shape[dim])
    if keep is x.shape[dim] or (n is not None and n <= ALONE):
        values, places = sorted_rows(cx, x, dim, largest, keep)
    else:
        few, found = _first(cx, x, dim, largest, keep)
        values, chosen = sorted_rows(cx, few, few.rank - 1, largest)
        places = Ref(dt.i64, chosen.shape, lambda i: found.load((*i[:-1], convert(chosen.load(i), dt.index))))
    return cx.stages(lambda i: values.load(_moved(i, dim)), lambda i: places.load(_moved(i, dim)))


# ---------------------------------------------------------------- one of a row
def _one(cx: Builder, x: Ref, dim: int, keepdim: bool, nth: Callable[[Ref, Index, dt.DType], Expr], nans: bool) -> Any:
    """(value, position of the first such) of the element number nth(codes, row) in rising order; with `nans` a NaN anywhere wins."""
    codes = codes_of(cx, x, dim, False)
    found = nth_code(cx, codes, lambda row, d: nth(codes, row, d))
    most = Const(codes.dtype, 2 ** (8 * codes.dtype.itemsize - 1) - 1)
    n = codes.shape[-1]

    def place(row: Index) -> Expr:
        code = found.load(row)
        if nans and x.dtype.is_float:
            any_nan = cx.any_of((n,), lambda k: op("eq", codes.load((*row, k[0])), most))
            code = select(any_nan, most, code)
        none = convert(n, dt.i64)
        first = cx.fold(
            [n], [none], lambda k, s: [op("min", s[0], select(op("eq", codes.load((*row, k[0])), code), convert(k[0], dt.i64), none))],
            lambda a, b: [op("min", a[0], b[0])],
        )  # fmt: skip
        return first

    places = cx.stage(place, codes.shape[:-1], dt.i64)

    def row_of(i: Index) -> Index:
        return (*i[:dim], *i[dim + 1 :]) if keepdim else i

    def value(i: Index) -> Expr:
        row = row_of(i)
        at = convert(places.load(row), dt.index)  # of no elements, the size: then the median of all is NaN, or the least integer
        nothing = Const(x.dtype, math.nan) if x.dtype.is_float else lowest(x.dtype)
        return masked(x, (*row[:dim], at, *row[dim:]), op("lt", at, n), nothing)

    several = isinstance(cx.spec, (tuple, list))
    return cx.stages(value, lambda i: places.load(row_of(i))) if several else cx.stage(value)


@lowers("aten.kthvalue.default")
def lower_kthvalue(cx: Builder, x: Ref, k: Any, dim: int = -1, keepdim: bool = False) -> Any:
    if _eager_selects(cx, x) or x.dtype is dt.bool_:  # eager refuses bool
        return NotImplemented
    if x.rank == 0:
        return _scalars(cx, x)
    return _one(cx, x, wrap_dim(dim, x.rank), keepdim, lambda _, row, d: convert(size(k) - 1, d), False)


def _middle(codes: Ref, row: Index, d: dt.DType) -> Expr:
    return convert((codes.shape[-1] - 1) // 2, d)


def _middle_of_numbers(cx: Builder) -> Callable[[Ref, Index, dt.DType], Expr]:
    def nth(codes: Ref, row: Index, d: dt.DType) -> Expr:
        most = Const(codes.dtype, 2 ** (8 * codes.dtype.itemsize - 1) - 1)
        numbers = count_rows(cx, codes, lambda c: op("ne", c, most), row, d)
        return op("max", op("truncdiv", op("sub", numbers, Const(d, 1)), Const(d, 2)), Const(d, 0))

    return nth


def _median(cx: Builder, x: Ref, dim: int, keepdim: bool, ignoring: bool) -> Any:
    if x.dtype is dt.bool_:
        return NotImplemented  # eager's error
    nth = _middle_of_numbers(cx) if ignoring and x.dtype.is_float else _middle
    return _one(cx, x, dim, keepdim, nth, not ignoring)


def _median_dim(cx: Builder, x: Ref, dim: int, keepdim: bool, ignoring: bool) -> Any:
    if _eager_selects(cx, x):
        return NotImplemented
    if x.rank and known(x.shape[wrap_dim(dim, x.rank)]) == 0:
        return NotImplemented  # eager's error
    return _scalars(cx, x) if x.rank == 0 else _median(cx, x, wrap_dim(dim, x.rank), keepdim, ignoring)


def _median_all(cx: Builder, x: Ref, ignoring: bool) -> Any:
    n = product(x.shape)
    return _median(cx, reshape(x, (n,)), 0, False, ignoring)


@lowers("aten.median.dim")
def lower_median(cx: Builder, x: Ref, dim: int, keepdim: bool = False) -> Any:
    return _median_dim(cx, x, dim, keepdim, False)


@lowers("aten.nanmedian.dim")
def lower_nanmedian(cx: Builder, x: Ref, dim: int, keepdim: bool = False) -> Any:
    return _median_dim(cx, x, dim, keepdim, True)


@lowers("aten.median.default")
def lower_median_all(cx: Builder, x: Ref) -> Any:
    return _median_all(cx, x, False)


@lowers("aten.nanmedian.default")
def lower_nanmedian_all(cx: Builder, x: Ref) -> Any:
    return _median_all(cx, x, True)
