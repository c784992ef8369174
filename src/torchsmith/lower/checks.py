"""Operators that only check their argument: a Check of the program, without a call into torch.

In: the tensor that holds what went wrong. Just in time a failed check repeats the call eagerly, so that the exception is eager's own.
"""

from __future__ import annotations

from ..ir import dtype as dt
from ..ir.expr import Cast, Const, Expr, Load, Sym, op
from ..ir.program import Check
from .core import Builder, is_of_host
from .numerics import boolean, cast
from .ref import ZERO, Ref
from .table import lowers


@lowers("aten._linalg_check_errors.default")
def lower_linalg_check(cx: Builder, info: Ref, api_name: str, is_matrix: bool) -> None:
    """LAPACK's info of each matrix: 0 is success."""
    said = f"{api_name}: a matrix is singular or the algorithm failed"
    cx.check_none(info.shape, lambda i: op("ne", info.load(i), Const(info.dtype, 0)), "linalg", said)


@lowers("aten._assert_scalar.default")
def lower_assert_scalar(cx: Builder, cond: Expr | bool | float, message: str) -> None:
    """A condition on numbers that are known by now."""
    if isinstance(cond, Expr) or not cond:
        test = boolean(cond) if isinstance(cond, Expr) else Const(dt.bool_, False)
        cx.body.append(Check(test, "assertion", message, cx.loc))


@lowers("aten._local_scalar_dense.default")
def lower_item(cx: Builder, value: Ref) -> Expr:
    """The one number of a tensor becomes a symbol's value."""
    if cx.spec in cx.bound:
        return cx.spec
    wide = dt.f64 if value.dtype.is_float else dt.i64
    known = cast(value.load(()), wide) if not value.shape else None
    beside = any(s.origin[0] == "element" for s in cx.symbols)  # do tensors in the host's memory stand beside those of a device?
    if known is not None and beside and is_of_host(known) and isinstance(cx.spec, Sym):  # no need to ask the device
        cx.bind(cx.spec, known if wide is dt.f64 else Cast(dt.index, known))
        return cx.spec
    held = cx.stage(lambda _: cast(value.load((ZERO,) * len(value.shape)), wide), (), wide, ())
    assert held.whole is not None and isinstance(cx.spec, Sym)
    cx.require(held.whole)
    number = Load(held.whole, wide, ())
    cx.bind(cx.spec, number if wide is dt.f64 else Cast(dt.index, number))
    return cx.spec


@lowers("aten._assert_async.default", "aten._assert_async.msg")
def lower_assert(cx: Builder, value: Ref, message: str = "Expected Tensor with single nonzero value, but got zero") -> None:
    cx.check_none(value.shape, lambda i: op("not", boolean(value.load(i))), "assertion", message)
