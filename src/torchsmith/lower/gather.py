"""Reading by index tensors: embedding, index_select, gather. In: Refs; out: a check that all indices are in range, then one stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, convert, op, select
from .core import Builder
from .ref import ZERO, Index, Ref, known
from .table import lowers
from .views import wrap_dim


def position_of(indices: Ref, i: Index) -> Expr:
    """An element of an index tensor as an index."""
    return convert(indices.load(i), dt.index)


def check_range(cx: Builder, indices: Ref, n: Expr, *, negative: bool, message: str) -> None:
    """All indices lie in [0, n), or in [-n, n) where negative ones count from the end."""

    def bad(i: Index) -> Expr:
        k = position_of(indices, i)
        return op("or", op("lt", k, -n if negative else ZERO), op("ge", k, n))

    cx.check_none(indices.shape, bad, "IndexError", message)


def wrapped(k: Expr, n: Expr) -> Expr:
    """A negative index counts from the end."""
    return select(op("lt", k, ZERO), k + n, k)


@lowers("aten.embedding.default")
def lower_embedding(cx: Builder, weight: Ref, indices: Ref, *_: Any) -> Ref:
    check_range(cx, indices, weight.shape[0], negative=False, message="index out of range in self")
    return cx.stage(lambda i: weight.load((position_of(indices, i[:-1]), i[-1])))


@lowers("aten.index_select.default")
def lower_index_select(cx: Builder, x: Ref, dim: int, indices: Ref) -> Any:
    if x.rank == 0:
        return cx.stage(lambda i: x.load(()))
    dim = wrap_dim(dim, x.rank)
    check_range(cx, indices, x.shape[dim], negative=False, message="index out of range in self")
    at: Callable[[Index], Index] = lambda i: (i[dim],) if indices.rank else ()
    return cx.stage(lambda i: x.load((*i[:dim], position_of(indices, at(i)), *i[dim + 1 :])))


@lowers("aten.gather.default")
def lower_gather(cx: Builder, x: Ref, dim: int, indices: Ref, sparse_grad: bool = False) -> Any:
    if any(known(n) == 0 for n in indices.shape):
        return cx.stage(lambda i: Const(x.dtype, 0))
    if x.rank == 0 or x.rank != indices.rank:
        return NotImplemented
    dim = wrap_dim(dim, x.rank)
    n = x.shape[dim]
    check_range(cx, indices, n, negative=False, message=f"index out of bounds for dimension {dim}")
    return cx.stage(lambda i: x.load((*i[:dim], position_of(indices, i), *i[dim + 1 :])))
