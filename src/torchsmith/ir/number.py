"""The number that an expression over symbols stands for.

In: an Expr of constants, symbols and scalar operators. Out: a Python number, as the operators' definitions (ir/ops.py) compute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .expr import Cast, Const, Expr, Op, Sym
from .ops import OPS


def number_of(e: Expr, symbols: Mapping[str, Any], done: dict[Expr, Any] | None = None) -> Any:
    """None where there is no number: a symbol without one, a division of integers by zero, infinity or NaN as an integer, an expression
    that reads memory."""
    done = {} if done is None else done
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Sym):
        return symbols.get(e.name)
    if e not in done:
        done[e] = None
        args = [number_of(a, symbols, done) for a in e.args]
        if not any(a is None for a in args):
            with suppress(ZeroDivisionError, OverflowError, ValueError):
                if isinstance(e, Cast):
                    done[e] = (float if e.dtype.is_float else bool if e.dtype.name == "bool" else int)(args[0])
                elif isinstance(e, Op):
                    done[e] = OPS[e.name].scalar(*args)
    return done[e]
