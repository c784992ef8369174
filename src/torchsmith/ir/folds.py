"""Shapes of Folds that schedules and printers look for (no torch). In: a Fold; out: its parts, or None."""

from __future__ import annotations

from . import dtype as dt
from .dtype import DType
from .expr import Const, Expr, Fold, Op


def multiply_add(fold: Fold, dtypes: tuple[DType, ...] = (dt.f32,)) -> tuple[Expr, Expr] | None:
    """The two factors of a Fold that adds products up in one of these dtypes, from zero, in any order."""
    if len(fold.init) != 1 or fold.dtype not in dtypes or fold.init[0] is not Const(fold.dtype, 0.0) or fold.order != "any":
        return None
    update, state = fold.update[0], fold.state(0)
    if not isinstance(update, Op) or update.name != "add":
        return None
    product = update.args[1] if update.args[0] is state else update.args[0] if update.args[1] is state else None
    if not isinstance(product, Op) or product.name != "mul":
        return None
    return product.args[0], product.args[1]
