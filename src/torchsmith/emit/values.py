"""What printed values are: their text, dtype and register, shared by the printers of statements, expressions and folds.

In: nothing. Out: Val, the register names of dtypes, the exceptions that ask for another number of lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..codes import Unsupported
from ..ir.dtype import HALF, DType
from ..ir.expr import Op
from ..ir.linear import const_of

REG = {"f64": "f64", "f32": "f32", "bf16": "u16", "f16": "u16", "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8", "u8": "u8",
       "bool": "i32", "index": "i64"}  # fmt: skip
STORED = {**REG, "bool": "u8"}


class TooWide(Exception):
    """A vector of 8-byte elements appeared in a kernel with the lanes of 4-byte ones: print it again with half as many."""


class TooNarrow(Exception):
    """A statement laid out for the lanes of 4-byte elements appeared in a kernel with half as many: print it with all, 8-byte vectors in
    two registers."""


@dataclass(frozen=True, slots=True)
class Val:
    """A printed value: its C text (a name or a literal), its dtype, whether it is a vector; `narrow`: an index vector held in xi32."""

    text: str
    dtype: DType
    vec: bool
    narrow: bool = False

    @property
    def reg(self) -> str:
        return "i32" if self.narrow else REG[self.dtype.name]


def power(printer: Any, e: Op, at: int) -> tuple[Any, int, str]:
    """Of a ** n, n a constant: (a as a printed value, n, the text of a ** abs(n) by squarings, each of which has a name; "" for 1).
    Raises Unsupported("EMI001")."""
    n, v = const_of(e.args[1]), printer.emit(e.args[0])
    if n is None or v.dtype in HALF:
        raise Unsupported("EMI001", detail=f"powi by {e.args[1]}")
    result, x, m = "", v, abs(n)
    while m:
        if m & 1:
            result = f"({result} * {x.text})" if result else x.text
        m >>= 1
        if m:
            x = printer.define(f"{x.text} * {x.text}", v, at)
    return v, n, result


def lane_iota(lanes: int) -> str:
    return f"(xi32){{{', '.join(str(k) for k in range(lanes))}}}"
