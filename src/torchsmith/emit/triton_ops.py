"""One row per scalar operator of ir/ops.py: how it is spelled in Triton, on blocks and single values alike.

In: operator name, dtype of the operands (float16 and bfloat16 arrive as float32), operand texts. Out: a Triton expression and the functions
that it calls. Integers wrap; a shift by what is out of range, a division by zero and floats out of an integer's range follow ir/ops.py as
far as it defines them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.ops import MULTIPLIERS, OPS, WEYL
from ..ir.rows import rows
from . import triton_math

Functions = tuple[tuple[str, str], ...]
Row = Callable[[str, tuple[str, ...]], str]
ROWS: dict[str, Row] = {}
TYPES = {"f64": "tl.float64", "f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16", "i64": "tl.int64", "i32": "tl.int32",
         "i16": "tl.int16", "i8": "tl.int8", "u8": "tl.uint8", "bool": "tl.int1"}  # fmt: skip
FLOATS = ("f32", "f64")
WIDTH = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8}


@dataclass(frozen=True, slots=True)
class Text:
    """An expression and what must stand before the kernel."""

    text: str
    functions: Functions = ()


row = rows(ROWS, "row")


def _infix(sign: str) -> Row:
    return lambda t, a: f"({a[0]} {sign} {a[1]})"


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("bitand", "&"), ("bitor", "|"), ("xor", "^"), ("eq", "=="), ("ne", "!="),
                     ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("and", "&"), ("or", "|")):  # fmt: skip
    row(_name)(_infix(_sign))


@row("div")
def _div(t: str, a: tuple[str, ...]) -> str:
    return f"tl.div_rn({a[0]}, {a[1]})" if t == "f32" else f"({a[0]} / {a[1]})"


@row("not")
def _not(t: str, a: tuple[str, ...]) -> str:
    return f"({a[0]} == 0)"


@row("bitnot")
def _bitnot(t: str, a: tuple[str, ...]) -> str:
    return f"(~{a[0]})"


@row("neg")
def _neg(t: str, a: tuple[str, ...]) -> str:
    return f"({a[0]} * -1.0)" if t in FLOATS else f"(-{a[0]})"  # Triton's minus is 0 - x, which has no -0


@row("abs")
def _abs(t: str, a: tuple[str, ...]) -> str:
    return a[0] if t in ("u8", "bool") else f"tl.abs({a[0]})"


@row("sign")
def _sign_row(t: str, a: tuple[str, ...]) -> str:
    if t == "bool":
        return a[0]
    return f"(({a[0]} > 0).to({TYPES[t]}) - ({a[0]} < 0).to({TYPES[t]}))"


def _least(sign: str, word: str) -> Row:
    def print_row(t: str, a: tuple[str, ...]) -> str:
        if t == "bool":
            return f"({a[0]} {word} {a[1]})"
        return f"tl.where({a[0]} {sign} {a[1]}, {a[0]}, {a[1]})"

    return print_row


LESSER = {"min": _least("<", "&"), "max": _least(">", "|")}  # of integers


@row("where")
def _where(t: str, a: tuple[str, ...]) -> str:
    return f"tl.where({a[0]}, {a[1]}, {a[2]})"


@row("isnan")
def _isnan(t: str, a: tuple[str, ...]) -> str:
    return f"({a[0]} != {a[0]})"


@row("isinf")
def _isinf(t: str, a: tuple[str, ...]) -> str:
    return f'(tl.abs({a[0]}) == float("inf"))'


@row("signbit")
def _signbit(t: str, a: tuple[str, ...]) -> str:
    return f"({a[0]}.to({triton_math.BITS[t][0]}, bitcast=True) < 0)"


@row("truncdiv")
def _truncdiv(t: str, a: tuple[str, ...]) -> str:
    return f"({a[0]} // {a[1]})"


@row("floordiv")
def _floordiv(t: str, a: tuple[str, ...]) -> str:
    if t == "u8":
        return f"({a[0]} // {a[1]})"
    return f"({a[0]} // {a[1]} - (({a[0]} % {a[1]} != 0) & (({a[0]} < 0) != ({a[1]} < 0))).to({TYPES[t]}))"


@row("mod")
def _mod(t: str, a: tuple[str, ...]) -> str:
    if t == "u8":
        return f"({a[0]} % {a[1]})"
    return f"({a[0]} % {a[1]} + tl.where(({a[0]} % {a[1]} != 0) & (({a[0]} < 0) != ({a[1]} < 0)), {a[1]}, 0).to({TYPES[t]}))"


@row("shl")
def _shl(t: str, a: tuple[str, ...]) -> str:
    low = "" if t == "u8" else f"({a[1]} >= 0) & "
    return f"tl.where({low}({a[1]} < {WIDTH[t]}), {a[0]} << tl.where({low}({a[1]} < {WIDTH[t]}), {a[1]}, 0).to({TYPES[t]}), 0).to({TYPES[t]})"


@row("shr")
def _shr(t: str, a: tuple[str, ...]) -> str:
    most = WIDTH[t] - 1
    if t == "u8":
        return f"tl.where({a[1]} < 8, {a[0]} >> tl.where({a[1]} < 8, {a[1]}, 0).to({TYPES[t]}), 0).to({TYPES[t]})"
    return f"({a[0]} >> tl.where(({a[1]} >= 0) & ({a[1]} < {most}), {a[1]}, {most}).to({TYPES[t]}))"


@row("fmod")
def _fmod(t: str, a: tuple[str, ...]) -> str:
    return f"({a[0]} % {a[1]})"  # of integers: the sign of the dividend


@row("pow")
def _pow(t: str, a: tuple[str, ...]) -> str:
    return f"ipow_{t}({a[0]}, {a[1]})"


def _philox_text() -> str:
    """The ten rounds; the product of two 32-bit words is one instruction."""
    return f"""@triton.jit
def philox(key, low, high, word):
  k = key.to(tl.uint32)
  l = (key >> 32).to(tl.uint32)
  a = low.to(tl.uint32)
  b = (low >> 32).to(tl.uint32)
  c = high.to(tl.uint32)
  d = (high >> 32).to(tl.uint32)
  for _ in tl.static_range(0, 10):
    p = a.to(tl.uint64) * {MULTIPLIERS[0]}
    q = c.to(tl.uint64) * {MULTIPLIERS[1]}
    a = (q >> 32).to(tl.uint32) ^ b ^ k
    b = q.to(tl.uint32)
    c = (p >> 32).to(tl.uint32) ^ d ^ l
    d = p.to(tl.uint32)
    k = k + {WEYL[0]}
    l = l + {WEYL[1]}
  return tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d))).to(tl.int64)
"""


def _integer_pow(t: str) -> Functions:
    """Square and multiply; of a negative exponent what 1 / a**-b truncates to."""
    w = WIDTH[t]
    sign = "" if t == "u8" else f"""
  odd = (b & 1) != 0
  return tl.where(b < 0, tl.where(a == 1, 1, tl.where(a == -1, tl.where(odd, -1, 1), 0)).to({TYPES[t]}), r)"""
    return ((f"ipow_{t}", f"""@triton.jit
def ipow_{t}(a, b):
  r = a * 0 + b * 0 + 1
  x = a
  n = b
  for _ in tl.static_range(0, {w}):
    r = tl.where((n & 1) != 0, r * x, r)
    x = x * x
    n = n >> 1{sign or chr(10) + "  return r"}
"""),)  # fmt: skip


# operators that take floats through triton_math; the same names there
MATH_NAMES = {"round": "rint", "fmod": "frem", "log_ndtr": "logndtr"}


def spell(name: str, t: str, args: tuple[str, ...], fast: bool = False, small: str = "") -> Text | None:
    """The text of operator `name` on operands of dtype `t`; None where there is none. fast: 11 bits of the result are kept; small: the 16-bit
    dtype that the operands come from, too."""
    if name not in OPS:
        return None
    made = MATH_NAMES.get(name, name)
    if t in FLOATS and name not in ("where", "sign", "isnan", "isinf", "signbit", "neg"):
        table = triton_math.NATIVE | triton_math.NATIVE64 | triton_math.NATIVE32
        if made in table or triton_math.is_known(made, t):
            return Text(*triton_math.call(made, t, args, fast, small))
    if name in LESSER:
        return Text(LESSER[name](t, args))
    if name == "pow":
        return Text(_pow(t, args), _integer_pow(t)) if t in WIDTH else None
    if name == "philox":
        return Text(f"philox({', '.join(args)})", (("philox", _philox_text()),))
    found = ROWS.get(name)
    return None if found is None or (name == "fmod" and t in FLOATS) else Text(found(t, args))
