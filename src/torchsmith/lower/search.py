"""Looking values up: searchsorted, bucketize, isin, histc. In: Refs; out: stages of binary searches, folds and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, convert, op, select
from .cat import masked
from .core import Builder
from .gather import check_range
from .indexing import update
from .numerics import TORCH_DTYPES, cast, ir_dtype, result_type, scalar
from .ref import ZERO, Index, Ref, known, product
from .sort import sorted_rows
from .table import lowers
from .views import reshape

Read = Callable[[Index], Expr]


# ---------------------------------------------------------------- binary search
def position(cx: Builder, n: Expr, edge: Callable[[Expr], Expr], v: Expr, right: bool) -> Expr:
    """How many of edge(0 .. n-1), sorted, lie before `v` (`right`: or equal it); halved as eager does it, NaNs and all."""
    count = known(n)
    steps = 63 if count is None else count.bit_length()

    def step(_: Index, s: tuple[Expr, ...]) -> list[Expr]:
        low, high = s
        going = op("lt", low, high)
        middle = low + (high - low) // 2
        e = edge(select(going, middle, ZERO))
        beyond = op("not", op("gt" if right else "ge", e, v))
        return [select(op("and", going, beyond), middle + 1, low), select(op("and", going, op("not", beyond)), middle, high)]

    return cx.fold([Const(dt.index, steps)], [ZERO, n], step).picking(0)


def _search(cx: Builder, edges: Ref, value: Read, d: DType, right: bool, order: Ref | None = None) -> Any:
    n = edges.shape[-1]
    if known(n) == 0:
        return cx.stage(lambda i: Const(cx.dtype, 0))

    def at(i: Index) -> Expr:
        lead = i[: edges.rank - 1] if edges.rank > 1 else ()

        def edge(k: Expr) -> Expr:
            at = k if order is None else convert(order.load((*lead, k)), dt.index)
            return cast(edges.load((*lead, at)), d)

        found = position(cx, n, edge, cast(value(i), d), right)
        return convert(found, cx.dtype)

    return cx.stage(at)


def common(x: Ref, y: Ref) -> DType:
    """The dtype in which eager compares a value of `y` with edges `x`."""
    return ir_dtype(result_type([(TORCH_DTYPES[r.dtype], "dim" if r.rank else "zero") for r in (x, y)]))


@lowers("aten.searchsorted.Tensor")
def lower_searchsorted(
    cx: Builder, edges: Ref, values: Ref, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    if edges.dtype is not values.dtype and not (edges.rank and values.rank):
        return NotImplemented
    if sorter is not None:
        check_range(cx, sorter, edges.shape[-1], negative=False, message="torch.searchsorted(): sorter index out of range")
    return _search(cx, edges, values.load, common(edges, values), right or side == "right", sorter)


@lowers("aten.bucketize.Tensor")
def lower_bucketize(cx: Builder, values: Ref, edges: Ref, out_int32: bool = False, right: bool = False) -> Any:
    if edges.dtype is not values.dtype and not values.rank:
        return NotImplemented
    return _search(cx, edges, values.load, common(edges, values), right)


# ---------------------------------------------------------------- membership
FEW = 256  # elements to compare each element with; beyond, they are sorted


@lowers("aten.isin.Tensor_Tensor")
def lower_isin(cx: Builder, x: Ref, tests: Ref, assume_unique: bool = False, invert: bool = False) -> Any:
    n = product(tests.shape)
    count = known(n)
    many = count is None or count > FEW
    if many and not cx.is_alone:
        return NotImplemented
    d = ir_dtype(result_type([(TORCH_DTYPES[r.dtype], "dim" if r.rank else "zero") for r in (x, tests)]))
    among = reshape(tests, (n,))
    wide = Ref(d, (n,), lambda k: cast(among.load(k), d))
    ordered = sorted_rows(cx, wide, 0, False)[0] if many else wide

    def at(i: Index) -> Expr:
        v = cast(x.load(i), d)
        if many:
            place = position(cx, n, lambda k: ordered.load((k,)), v, False)
            exists = op("lt", place, n)
            found = op("and", exists, op("eq", masked(ordered, (place,), exists, Const(d, 0)), v))
        else:
            found = cx.any_of((n,), lambda k: op("eq", v, ordered.load(k)))
        return op("not", found) if invert else found

    return cx.stage(at)


@lowers("aten.isin.Tensor_Scalar")
def lower_isin_scalar(cx: Builder, x: Ref, test: Any, assume_unique: bool = False, invert: bool = False) -> Any:
    if isinstance(test, Expr) or (isinstance(test, float) and not x.dtype.is_float):
        return NotImplemented
    return cx.stage(lambda i: op("ne" if invert else "eq", x.load(i), scalar(test, x.dtype)))



# ---------------------------------------------------------------- counts
@lowers("aten.histc.default")
def lower_histc(cx: Builder, x: Ref, bins: int = 100, low: Any = 0, high: Any = 0) -> Any:
    """How many elements fall into each of `bins` equal parts of [low, high]; the last one has its upper edge too."""
    if isinstance(low, Expr) or isinstance(high, Expr) or not low < high or x.dtype not in (dt.f32, dt.f64):
        return NotImplemented  # equal edges mean: the values' own range
    d = x.dtype
    name = cx.buffer(d, cx.shape)
    cx.fill(name, lambda i: Const(d, 0.0))
    first, last = Const(d, float(low)), Const(d, float(high))

    def inside(i: Index) -> Expr:
        return op("and", op("ge", x.load(i), first), op("le", x.load(i), last))

    def place(i: Index) -> Index:
        e = select(inside(i), x.load(i), first)
        part = op("div", op("mul", op("sub", e, first), Const(d, float(bins))), op("sub", last, first))
        return (op("min", convert(op("trunc", part), dt.index), Const(dt.index, bins - 1)),)

    update(cx, name, x.shape, place, lambda i: select(inside(i), Const(d, 1.0), Const(d, 0.0)), "add")
    return cx.ref(name)
