"""NumPy meaning of operators and conversions, for the interpreter (no torch).

In: an operator or a Cast on arrays. Out: arrays. bf16 lives in float32 arrays that hold rounded values; index in int64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from . import dtype as dt
from .dtype import DType
from .expr import Const
from .ops import MULTIPLIERS, OPS, WEYL
from .rows import rows

Array = Any  # np.ndarray of the dtype's carrier

CARRIERS: dict[DType, Any] = {
    dt.f64: np.float64, dt.f32: np.float32, dt.bf16: np.float32, dt.f16: np.float16, dt.i64: np.int64, dt.i32: np.int32,
    dt.i16: np.int16, dt.i8: np.int8, dt.u8: np.uint8, dt.bool_: np.bool_, dt.index: np.int64,
    dt.c64: np.complex64, dt.c128: np.complex128, dt.c32: np.uint32, dt.u16: np.uint16, dt.u32: np.uint32, dt.u64: np.uint64,
}  # fmt: skip

NUMPY: dict[str, Callable[..., Array]] = {}


# Operators without a row are their scalar function, element by element.
define = rows(NUMPY, "NumPy meaning", OPS)


def round_bf16(a: Array) -> Array:
    """float32 -> the nearest bf16, ties to even, still held in float32."""
    a = np.asarray(a, np.float32)
    bits = a.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(a), a, rounded)


def literal(e: Const) -> Array:
    """A constant as a 0-d array."""
    value = np.asarray(e.value, np.float64 if e.dtype.is_float else None).astype(CARRIERS[e.dtype])
    return round_bf16(value) if e.dtype is dt.bf16 else value


def convert(a: Array, source: DType, target: DType) -> Array:
    """C's value conversion as x86 does it: an unrepresentable float becomes the least integer of the wide type, then wraps."""
    if target is dt.bool_:
        return a != 0
    if target is dt.bf16:
        return round_bf16(a.astype(np.float32))
    carrier = CARRIERS[target]
    if source.is_float and not target.is_float:
        wide = np.int64 if target in (dt.i64, dt.index, dt.u8) else np.int32
        info = np.iinfo(wide)
        exact = np.trunc(a.astype(np.float64))
        inside = (exact >= float(info.min)) & (exact < -float(info.min))
        return np.where(inside, np.where(inside, exact, 0).astype(wide), wide(info.min)).astype(carrier)
    if target is dt.f16:
        return a.astype(np.float32).astype(np.float16)
    return a.astype(carrier)


def bitcast(a: Array, source: DType, target: DType) -> Array:
    """The same bits under another dtype of the same size."""
    if source is dt.bf16:
        a = (np.asarray(a, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if target is dt.bf16:
        return (np.asarray(a).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(a).view(CARRIERS[target]).reshape(np.shape(a))


def apply(name: str, dtype: DType, operands: tuple[Array, ...], dtypes: tuple[DType, ...]) -> Array:
    """One operator on broadcast arrays, the result in `dtype`."""
    if name == "bitcast":
        return bitcast(operands[0], dtypes[0], dtype)
    fn = NUMPY.get(name)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        if fn is not None:
            result = fn(*operands)
        else:
            rows = np.broadcast_arrays(*operands)
            flat = [OPS[name].scalar(*(v.item() for v in values)) for values in zip(*(r.ravel() for r in rows), strict=True)]
            result = np.array(flat, np.float64 if dtype.is_float else None).reshape(rows[0].shape)
        result = np.asarray(result)
        return round_bf16(result) if dtype is dt.bf16 else result.astype(CARRIERS[dtype], copy=False)


def _ufuncs(**named: Any) -> None:
    for name, fn in named.items():
        define(name.rstrip("_"))(fn)


_ufuncs(
    add=np.add, sub=np.subtract, mul=np.multiply, div=np.divide, neg=np.negative, abs=np.abs, min=np.minimum, max=np.maximum,
    fmin=np.fmin, fmax=np.fmax, fmod=np.fmod, eq=np.equal, ne=np.not_equal, lt=np.less, le=np.less_equal, gt=np.greater,
    ge=np.greater_equal, and_=np.logical_and, or_=np.logical_or, not_=np.logical_not, xor=np.bitwise_xor, bitand=np.bitwise_and,
    bitor=np.bitwise_or, bitnot=np.invert, where=np.where, isnan=np.isnan, isinf=np.isinf, signbit=np.signbit,
    copysign=np.copysign, nextafter=np.nextafter, floor=np.floor, ceil=np.ceil, round=np.round, trunc=np.trunc,
    exp=np.exp, exp2=np.exp2, expm1=np.expm1, log=np.log, log2=np.log2, log10=np.log10, log1p=np.log1p, sqrt=np.sqrt,
    sin=np.sin, cos=np.cos, tan=np.tan, asin=np.arcsin, acos=np.arccos, atan=np.arctan, sinh=np.sinh, cosh=np.cosh, tanh=np.tanh,
    asinh=np.arcsinh, acosh=np.arccosh, atanh=np.arctanh, atan2=np.arctan2, hypot=np.hypot,
)  # fmt: skip


@define("floordiv")
def _floordiv(a: Array, b: Array) -> Array:
    return np.floor_divide(a, b)


@define("mod", "remainder")
def _mod(a: Array, b: Array) -> Array:
    return np.mod(a, b)


@define("truncdiv")
def _truncdiv(a: Array, b: Array) -> Array:
    q = np.floor_divide(a, b)
    exact = q * b == a
    return np.where(~exact & ((a < 0) != (b < 0)), q + np.ones_like(q), q)


@define("sign")
def _sign(a: Array) -> Array:
    return np.where(np.isnan(a), 0, np.sign(a)) if np.asarray(a).dtype.kind == "f" else np.sign(a)


@define("fma")
def _fma(a: Array, b: Array, c: Array) -> Array:
    if np.asarray(a).dtype == np.float32:  # the product is exact in float64
        return (a.astype(np.float64) * b + c).astype(np.float32)
    return a * b + c


@define("shl")
def _shl(a: Array, b: Array) -> Array:
    bits = np.asarray(a).dtype.itemsize * 8
    inside = (b >= 0) & (b < bits)
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0).astype(np.asarray(a).dtype)), 0)


@define("shr")
def _shr(a: Array, b: Array) -> Array:
    bits = np.asarray(a).dtype.itemsize * 8
    inside = (b >= 0) & (b < bits)
    shifted = np.right_shift(a, np.where(inside, b, 0).astype(np.asarray(a).dtype))
    return np.where(inside, shifted, np.where(a < 0, -1, 0).astype(shifted.dtype))


@define("philox")
def _philox(key: Array, low: Array, high: Array, word: Array) -> Array:
    def halves(a: Array) -> tuple[Array, Array]:
        wide = np.asarray(a).astype(np.uint64)
        return wide & mask, wide >> half

    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    (m, n), (v, w) = (tuple(map(np.uint64, pair)) for pair in (MULTIPLIERS, WEYL))
    (k0, k1), (a, b), (c, d) = halves(key), halves(low), halves(high)
    for _ in range(10):
        p, q = m * a, n * c
        a, b, c, d = q >> half ^ b ^ k0, q & mask, p >> half ^ d ^ k1, p & mask
        k0, k1 = k0 + v & mask, k1 + w & mask
    return np.choose(np.asarray(word) & 3, np.broadcast_arrays(a, b, c, d)).astype(np.int64)


@define("ldexp")
def _ldexp(a: Array, n: Array) -> Array:
    return np.ldexp(a, n)


@define("frexp_m")
def _frexp_m(a: Array) -> Array:
    return np.frexp(a)[0]


@define("frexp_e")
def _frexp_e(a: Array) -> Array:
    return np.frexp(a)[1]


@define("rsqrt")
def _rsqrt(a: Array) -> Array:
    return np.ones_like(a) / np.sqrt(a)


@define("sigmoid")
def _sigmoid(a: Array) -> Array:
    one = np.ones_like(a)
    return one / (one + np.exp(-a))


@define("pow")
def _pow(a: Array, b: Array) -> Array:
    if np.asarray(a).dtype.kind == "f":
        return np.power(a, b)
    rows = np.broadcast_arrays(a, b)
    kind = rows[0].dtype
    flat = [OPS["pow"].scalar(int(x), int(y)) & 0xFFFFFFFFFFFFFFFF for x, y in zip(rows[0].ravel(), rows[1].ravel(), strict=True)]
    return np.array(flat, np.uint64).astype(kind).reshape(rows[0].shape)


@define("powi")
def _powi(a: Array, n: Array) -> Array:
    return np.power(a, np.asarray(n, np.asarray(a).dtype)) if np.asarray(a).dtype.kind == "f" else _pow(a, np.asarray(n))
