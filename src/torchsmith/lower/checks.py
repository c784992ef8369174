"""Operators that only check their argument: a Check of the program, without a call into torch.

In: the tensor that holds what went wrong. Just in time a failed check repeats the call eagerly, so that the exception is eager's own.
"""

from __future__ import annotations

from ..ir.expr import Const, op
from .core import Builder
from .numerics import boolean
from .ref import Ref
from .table import lowers


@lowers("aten._linalg_check_errors.default")
def lower_linalg_check(cx: Builder, info: Ref, api_name: str, is_matrix: bool) -> None:
    """LAPACK's info of each matrix: 0 is success."""
    said = f"{api_name}: a matrix is singular or the algorithm failed"
    cx.check_none(info.shape, lambda i: op("ne", info.load(i), Const(info.dtype, 0)), "linalg", said)


@lowers("aten._assert_async.default", "aten._assert_async.msg")
def lower_assert(cx: Builder, value: Ref, message: str = "Expected Tensor with single nonzero value, but got zero") -> None:
    cx.check_none(value.shape, lambda i: op("not", boolean(value.load(i))), "assertion", message)
