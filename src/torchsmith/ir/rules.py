"""Rewrites applied when an Op is built: fills expr.SIMPLIFY (no torch).

In: an operator's name, dtype and operands. Out: a simpler node, or None to build it as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from . import dtype as dt
from .dtype import DType
from .expr import SIMPLIFY, Const, Expr
from .ops import OPS, wrap

Rule = Callable[[str, DType, tuple[Expr, ...]], Expr | None]
FAULTS = frozenset({"floordiv", "mod", "truncdiv", "fmod"})


def fold_constants(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    """Whole-number and bool operators on constants; floats are left to the machine that runs them."""
    if dtype.is_float or not all(isinstance(a, Const) and not a.dtype.is_float for a in args):
        return None
    values = [a.value for a in args if isinstance(a, Const)]
    if name in FAULTS and values[1] == 0:
        return None
    result = OPS[name].scalar(*values)
    return Const(dtype, bool(result) if dtype is dt.bool_ else wrap(dtype, int(result)))


def _index_identity(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    found = fold_constants(name, dtype, args)
    if found is not None or dtype is not dt.index or len(args) != 2:
        return found
    a, b = args
    zero, one = Const(dt.index, 0), Const(dt.index, 1)
    if name == "add":
        return b if a is zero else a if b is zero else None
    if name == "sub":
        return zero if a is b else a if b is zero else None
    if name == "mul":
        return zero if zero in (a, b) else b if a is one else a if b is one else None
    if name == "floordiv":
        return a if b is one else None
    if name == "mod":
        return zero if b is one else None
    return None


for _name, _row in OPS.items():
    if _name != "bitcast" and _row.over - {"float"}:
        SIMPLIFY[_name] = _index_identity
