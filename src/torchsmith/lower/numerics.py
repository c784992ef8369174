"""Dtypes of torch and of the IR: translation, type promotion as eager does it, and the dtype in which an operator computes."""

from __future__ import annotations

from ctypes import c_float
from typing import Any

import torch

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, convert, op
from ..runtime.externs_torch import DTYPES

IR_DTYPES: dict[torch.dtype, DType] = {theirs: dt.DTYPES[ours] for ours, theirs in DTYPES.items()}
TORCH_DTYPES: dict[DType, torch.dtype] = {ours: theirs for theirs, ours in IR_DTYPES.items()}

# the range of each integer dtype
LOWEST = {dt.i64: -(2**63), dt.i32: -(2**31), dt.i16: -(2**15), dt.i8: -128, dt.u8: 0}
HIGHEST = {dt.i64: 2**63 - 1, dt.i32: 2**31 - 1, dt.i16: 2**15 - 1, dt.i8: 127, dt.u8: 255}


def ir_dtype(d: torch.dtype, at: str = "") -> DType:
    """The IR's dtype for a torch dtype, or Unsupported."""
    found = IR_DTYPES.get(d)
    if found is None:
        raise Unsupported("LOW001", at=at, detail=str(d).removeprefix("torch."))
    return found


def opmath(d: DType) -> DType:
    """The dtype in which eager computes on `d`: float for the half formats, itself otherwise."""
    return dt.f32 if d in dt.HALF else d


def held(x: float, d: DType) -> float:
    """The number that `d` has for x: float32 takes what is beyond it for infinite."""
    return c_float(x).value if d is dt.f32 else x


def lowest(d: DType) -> Const:
    """The neutral element of max: -inf, or the least integer, or False."""
    if d.is_float:
        return Const(d, -float("inf"))
    return Const(d, False if d is dt.bool_ else LOWEST[d])


def highest(d: DType) -> Const:
    """The neutral element of min."""
    if d.is_float:
        return Const(d, float("inf"))
    return Const(d, True if d is dt.bool_ else HIGHEST[d])


def number_dtype(value: bool | int | float | Expr) -> torch.dtype:
    """The torch dtype a Python scalar stands for in type promotion."""
    if isinstance(value, Expr):
        return torch.float64 if value.dtype.is_float else torch.bool if value.dtype is dt.bool_ else torch.int64
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.get_default_dtype()


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Two ranks of operands: the lower one counts only by category (bool < integer < float)."""
    if higher is None or lower is None:
        return higher if lower is None else lower
    if higher.is_floating_point:
        return higher
    return torch.promote_types(higher, lower) if higher == torch.bool or lower.is_floating_point else higher


def result_type(operands: list[tuple[torch.dtype, str]]) -> torch.dtype:
    """Eager's promotion over (dtype, rank) with rank "dim" (tensors), "zero" (0-d tensors) or "number" (Python scalars)."""
    found: dict[str, torch.dtype | None] = {"dim": None, "zero": None, "number": None}
    for d, rank in operands:
        if rank == "number" and d.is_floating_point:
            d = torch.get_default_dtype()
        before = found[rank]
        found[rank] = d if before is None else torch.promote_types(before, d)
    result = _combine(found["dim"], _combine(found["zero"], found["number"]))
    assert result is not None
    return result


def boolean(e: Expr) -> Expr:
    """`e != 0` as a bool."""
    return e if e.dtype is dt.bool_ else op("ne", e, Const(e.dtype, 0))


def cast(e: Expr, d: DType) -> Expr:
    """Value conversion as eager does it: to bool is `!= 0`; constants of a compute dtype fold."""
    if e.dtype is d:
        return e
    if d is dt.bool_:
        return Const(d, e.value != 0) if isinstance(e, Const) else boolean(e)
    return convert(e, d)


def rounded_to(e: Expr, d: DType) -> Expr:
    """`e` as eager holds it between two kernels on dtype `d`: through a half format and back."""
    return cast(cast(e, d), e.dtype) if d in dt.HALF else e


def scalar(value: Any, d: DType) -> Expr:
    """A Python number or Expr as a value of dtype `d`."""
    if isinstance(value, Expr):
        return cast(value, d)
    if d.is_float:
        return Const(d, float(value))
    if d is dt.bool_:
        return Const(d, bool(value))
    value = int(value)
    if d in LOWEST and not LOWEST[d] <= value <= HIGHEST[d]:
        bits = 8 * d.itemsize
        value &= (1 << bits) - 1
        value -= (1 << bits) if d.kind == "int" and value >> (bits - 1) else 0
    return Const(d, value)
