"""Shapes of Folds that several recognisers look for. In: expressions; out: their parts, or None."""

from __future__ import annotations

from ..ir import dtype as dt
from ..ir.expr import Cast, Const, Expr, Fold, Load, Op

STORAGE = frozenset({dt.f32, dt.bf16, dt.f16})


def multiply_add(fold: Fold) -> tuple[Expr, Expr] | None:
    """The two factors of a Fold that adds products up in f32, from zero, in any order."""
    if len(fold.init) != 1 or fold.dtype is not dt.f32 or fold.init[0] is not Const(dt.f32, 0.0) or fold.order != "any":
        return None
    update, state = fold.update[0], fold.state(0)
    if not isinstance(update, Op) or update.name != "add":
        return None
    product = update.args[1] if update.args[0] is state else update.args[0] if update.args[1] is state else None
    if not isinstance(product, Op) or product.name != "mul":
        return None
    return product.args[0], product.args[1]


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
