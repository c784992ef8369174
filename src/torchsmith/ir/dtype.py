"""Element types of the IR: one frozen row per dtype, shared by every room (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["float", "int", "uint", "bool", "index", "opaque"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type: `name` as printed, `itemsize` in bytes, `kind` of arithmetic, `c` its storage type in C.

    There is one object per element type: compared by identity.
    """

    name: str
    itemsize: int
    kind: Kind
    c: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        return DTYPES.__getitem__, (self.name,)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        """True for signed and unsigned integers, not for bool and not for index."""
        return self.kind in ("int", "uint")


f64 = DType("f64", 8, "float", "double")
f32 = DType("f32", 4, "float", "float")
bf16 = DType("bf16", 2, "float", "uint16_t")
f16 = DType("f16", 2, "float", "_Float16")
i64 = DType("i64", 8, "int", "int64_t")
i32 = DType("i32", 4, "int", "int32_t")
i16 = DType("i16", 2, "int", "int16_t")
i8 = DType("i8", 1, "int", "int8_t")
u8 = DType("u8", 1, "uint", "uint8_t")
bool_ = DType("bool", 1, "bool", "uint8_t")
# Opaque: memory that only extern calls read and write; no expression has such a dtype.
c64 = DType("c64", 8, "opaque", "uint64_t")
c128 = DType("c128", 16, "opaque", "uint64_t")
c32 = DType("c32", 4, "opaque", "uint32_t")
u16 = DType("u16", 2, "opaque", "uint16_t")
u32 = DType("u32", 4, "opaque", "uint32_t")
u64 = DType("u64", 8, "opaque", "uint64_t")
# Sizes, strides and loop indices: exact and unbounded on paper, int64_t in generated code.
index = DType("index", 8, "index", "int64_t")

DTYPES: dict[str, DType] = {d.name: d for d in (f64, f32, bf16, f16, i64, i32, i16, i8, u8, bool_, c64, c128, c32, u16, u32, u64, index)}
DTYPE_ROWS = {name: i for i, name in enumerate(DTYPES) if name != "index"}  # of `enum ts_dtype` in csrc/torchsmith.h
HALF = (bf16, f16)  # computed in f32, rounded once
