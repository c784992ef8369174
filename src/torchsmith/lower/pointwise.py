"""Pointwise operators: one expression per element. In: operands as Refs and numbers; out: one Stage over the broadcast shape.

Laws: operands are converted to the common dtype that eager's promotion gives, then to its compute dtype (float32 for the half formats);
the result is converted to the dtype of the node's spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, op, select
from ..ir.ops import OPS
from .core import Builder
from .numerics import IR_DTYPES, TORCH_DTYPES, cast, number_dtype, opmath, result_type, scalar
from .ref import Index, Ref
from .table import lowers


def common_dtype(*operands: Any) -> DType:
    """Eager's promoted dtype of tensors and numbers."""
    kinds = []
    for a in operands:
        if isinstance(a, Ref):
            kinds.append((TORCH_DTYPES[a.dtype], "dim" if a.shape else "zero"))
        else:
            kinds.append((number_dtype(a), "number"))
    return IR_DTYPES[result_type(kinds)]


def element(a: Any, index: Index, common: DType, compute: DType | None = None) -> Expr:
    """Operand `a` at `index`, converted to `common` and then to the compute dtype.

    Numbers and 0-d tensors skip the rounding to a half format, as eager's kernels do.
    """
    compute = compute or opmath(common)
    if not isinstance(a, Ref):
        return scalar(a, compute)
    value = a.at(index)
    if a.shape or compute is common:
        value = cast(value, common)
    return cast(value, compute)


def map_elements(cx: Builder, fn: Callable[..., Expr], *operands: Any, common: DType | None = None) -> Ref:
    """stage out[i] = Cast(spec dtype, fn(operands at i in the compute dtype)); the common dtype is the result's unless given."""
    common = common or cx.dtype
    result = cx.dtype
    return cx.stage(lambda i: cast(fn(*(element(a, i, common) for a in operands)), result))


def rows(table: dict[str, Callable[..., Expr]], names: Sequence[str] = ("default",)) -> None:
    """Enter pointwise rows `name -> fn` whose common dtype is the result's."""
    for name, fn in table.items():
        overloads = [f"aten.{name}.{o}" for o in names]

        def rule(cx: Builder, *operands: Any, fn: Callable[..., Expr] = fn) -> Ref:
            return map_elements(cx, fn, *operands)

        lowers(*overloads)(rule)


def c(e: Expr, value: float) -> Const:
    """A constant of e's dtype."""
    return Const(e.dtype, value)


def direct(name: str) -> Callable[..., Expr]:
    return lambda *args: op(name, *args)


# ---------------------------------------------------------------- one operand, float result (integers are promoted by the spec)
FLOAT_UNARY = {
    name: direct(name)
    for name in (
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2", "expm1",
        "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "erf", "erfc", "erfinv", "lgamma", "digamma", "sigmoid", "i0",
    )
    if OPS[name].native
}  # fmt: skip
rows(FLOAT_UNARY)


# ---------------------------------------------------------------- two operands
def add_scaled(x: Expr, y: Expr, alpha: Expr) -> Expr:
    one = isinstance(alpha, Const) and alpha.value == 1
    if x.dtype is dt.bool_:
        return op("or", x, y if one else op("and", y, alpha))
    return op("add", x, y if one else op("mul", alpha, y))


@lowers("aten.add.Tensor", "aten.add.Scalar")
def add(cx: Builder, x: Any, y: Any, alpha: Any = 1) -> Ref:
    return map_elements(cx, add_scaled, x, y, alpha)


def mul_values(x: Expr, y: Expr) -> Expr:
    return op("and", x, y) if x.dtype is dt.bool_ else op("mul", x, y)


rows({"mul": mul_values}, ("Tensor", "Scalar"))
_ = (math, torch, select)
