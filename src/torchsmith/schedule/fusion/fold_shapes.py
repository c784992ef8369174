"""Shapes of Folds that several recognisers look for. In: expressions; out: their parts, or None."""

from __future__ import annotations

from ...ir import dtype as dt
from ...ir.expr import Cast, Expr, Load
from ...ir.folds import multiply_add

__all__ = ["STORAGE", "factor", "multiply_add", "strip_casts"]

STORAGE = frozenset({dt.f32, dt.bf16, dt.f16})


def factor(e: Expr) -> Load | None:
    """A factor's Load: x, or Cast(f32, x) of a narrower float."""
    if isinstance(e, Cast) and e.dtype is dt.f32:
        e = e.args[0]
    return e if isinstance(e, Load) and e.dtype in STORAGE else None


def strip_casts(e: Expr) -> Expr:
    """`e` without conversions between floats around it: the roundings of a softmax's ends."""
    while isinstance(e, Cast) and e.dtype.is_float and e.args[0].dtype.is_float:
        e = e.args[0]
    return e
