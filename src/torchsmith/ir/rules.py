"""Rewrites applied when a node is built: fills expr.SIMPLIFY (no torch).

In: an operator's name (or "cast"), dtype and operands. Out: a simpler node, or None to build it as it is.

Rules are typed. On `index`: canonical sums (ir/algebra.py) and decisions by intervals. On tensor integers and bools: exact laws that
survive wrapping. On floats only what holds bit for bit for every value: x*1, x/1, x-0, --x; never x*0, x-x, x+0 or reassociation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from . import algebra, memo
from . import dtype as dt
from .bounds import NOTHING_KNOWN, decide
from .dtype import DType
from .expr import SIMPLIFY, Cast, Const, Expr, Op, const, convert, op, walk
from .ops import OPS, wrap
from .rows import rows

Rule = Callable[[str, DType, tuple[Expr, ...]], Expr | None]
TRUE, FALSE = Const(dt.bool_, True), Const(dt.bool_, False)
FAULTS = frozenset({"floordiv", "mod", "truncdiv", "fmod"})  # undefined for divisor 0: such a node is kept
NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


rule = rows(SIMPLIFY, "rule", {*OPS, "cast"})


def round_to(dtype: DType, value: float) -> float:
    """The nearest value of a float dtype, ties to even; f64 -> bf16 and f16 go through f32 as eager's conversions do."""
    if dtype is dt.f64 or not math.isfinite(value):
        return value
    try:
        single: float = struct.unpack("<f", struct.pack("<f", value))[0]
        if dtype is dt.f16:
            single = struct.unpack("<e", struct.pack("<e", single))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    if dtype is dt.bf16:
        (bits,) = struct.unpack("<I", struct.pack("<f", single))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        single = struct.unpack("<f", struct.pack("<I", bits))[0]
    return single


def fold_constants(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    """Whole-number and bool operators on constants, and predicates on constant floats."""
    values = []
    for a in args:
        if not isinstance(a, Const) or (a.dtype.is_float and dtype is not dt.bool_):
            return None
        values.append(a.value)
    if dtype.is_float or (name in FAULTS and values[1] == 0):
        return None
    result = OPS[name].scalar(*values)
    return Const(dtype, bool(result) if dtype is dt.bool_ else wrap(dtype, int(result)))


def _polynomial(name: str, a: Expr, b: Expr) -> Expr:
    if name == "neg":
        return algebra.mul(a, Const(dt.index, -1))
    if name == "mul":
        return algebra.mul(a, b)
    return algebra.add(a, b, 1 if name == "add" else -1)


# Four of five sums and products of indices that a compilation builds were built in it before.
_RING: dict[tuple[str, Expr, Expr], Expr] = memo.table({})
MOST = 1 << 16


@rule("add", "sub", "mul", "neg")
def ring(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    if dtype is dt.index:
        a, b = args[0], args[-1]
        if isinstance(a, Const) and isinstance(b, Const):  # most of them, and the way through `algebra` is long
            return const(int(OPS[name].scalar(a.value) if name == "neg" else OPS[name].scalar(a.value, b.value)))
        found = _RING.get((name, a, b))
        if found is None:
            if len(_RING) >= MOST:
                _RING.clear()
            found = _RING[name, a, b] = _polynomial(name, a, b)
        return found
    return fold_float(name, dtype, args) if dtype.is_float else fold_constants(name, dtype, args) or whole_ring(name, dtype, args)


def whole_ring(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    if name == "neg":
        return args[0].args[0] if is_op(args[0], "neg") else None
    a, b = args
    if name == "mul":
        for x, y in ((a, b), (b, a)):
            if isinstance(y, Const) and y.value in (0, 1):
                return y if y.value == 0 else x  # x*0 -> 0, x*1 -> x
        return None
    if isinstance(b, Const) and b.value == 0:
        return a  # x+0, x-0 -> x
    places = _as_index(a, b)
    if places is not None:
        return convert(op(name, *places), dtype)
    if name == "sub":
        return Const(dtype, 0) if a is b else None
    return b if isinstance(a, Const) and a.value == 0 else None


def fold_float(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    """Laws that hold for every float, and + - * / on constants of f32 and f64 (one correct rounding)."""
    if name == "neg":
        a = args[0]
        return Const(dtype, -a.value) if isinstance(a, Const) else a.args[0] if is_op(a, "neg") else None
    a, b = args
    if isinstance(b, Const):
        if isinstance(a, Const) and dtype in (dt.f32, dt.f64):
            try:
                return Const(dtype, round_to(dtype, OPS[name].scalar(a.value, b.value)))
            except OverflowError:
                return None
        if name in ("mul", "div") and b.value == 1:
            return a  # x*1, x/1 -> x
        if name == "sub" and b is Const(dtype, 0.0):
            return a  # x-0 -> x; x+0 would turn -0 into 0
    if name == "mul" and isinstance(a, Const) and a.value == 1:
        return b
    return None


@rule("div")
def divide(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    return fold_float(name, dtype, args)


@rule("floordiv", "mod")
def divmod_rule(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    if dtype is not dt.index:
        return fold_constants(name, dtype, args) or unit_divisor(name, dtype, args)
    found = (algebra.floordiv if name == "floordiv" else algebra.mod)(*args)
    return decide(found, NOTHING_KNOWN) if isinstance(found, Op) and found.name in ("floordiv", "mod") else found


@rule("truncdiv", "fmod")
def truncating(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    return None if dtype.is_float else fold_constants(name, dtype, args) or unit_divisor(name, dtype, args)


def unit_divisor(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    """x/1 -> x, x%1 -> 0 on whole numbers."""
    if isinstance(args[1], Const) and args[1].value == 1:
        return args[0] if name in ("floordiv", "truncdiv") else Const(dtype, 0)
    return None


@rule("min", "max")
def extreme(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    a, b = args
    if a is b:
        return a
    if dtype.is_float:
        return None
    found = fold_constants(name, dtype, args)
    if found is not None or dtype is not dt.index:
        return found
    if isinstance(a, Const):
        a, b = b, a
    if is_op(a, name) and (b in a.args or (isinstance(b, Const) and isinstance(a.args[1], Const))):
        return a if b in a.args else op(name, a.args[0], op(name, a.args[1], b))  # min(min(x, 2), 3) -> min(x, 2)
    if not isinstance(b, Const) and algebra.order_key(b) < algebra.order_key(a):
        a, b = b, a
    return decide(Op(name, dtype, (a, b)), NOTHING_KNOWN)


@rule("eq", "ne", "lt", "le", "gt", "ge")
def compare(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    found = fold_constants(name, dtype, args)
    if found is not None:
        return found
    a, b = args
    if a is b and not a.dtype.is_float:
        return TRUE if name in ("eq", "le", "ge") else FALSE
    if a.dtype is dt.index:
        found = decide(Op(name, dtype, args), NOTHING_KNOWN)
        return found if isinstance(found, Const) else None
    places = _as_index(a, b)
    if places is not None:
        return op(name, *places)
    if a.dtype is dt.bool_ and isinstance(b, Const) and name in ("eq", "ne"):
        return a if (name == "eq") == b.value else op("not", a)
    return None


def _as_index(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """Two i64 values, at least one of them made of axes and sizes, as indices: kernels hold these in 4 bytes where they fit."""
    if a.dtype is not dt.i64:
        return None
    found = [x.arg if isinstance(x, Cast) and x.arg.dtype is dt.index else None for x in (a, b)]
    for i, x in enumerate((a, b)):
        if isinstance(x, Const) and abs(x.value) < 2**31:
            found[i] = Const(dt.index, x.value)
    return None if found[0] is None or found[1] is None else (found[0], found[1])


@rule("and", "or")
def logic(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    a, b = args
    absorbing, neutral = (FALSE, TRUE) if name == "and" else (TRUE, FALSE)
    if a is absorbing or b is absorbing:
        return absorbing
    if a is neutral or a is b:
        return b
    return a if b is neutral else None


@rule("not")
def negation(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    a = args[0]
    if isinstance(a, Const):
        return FALSE if a.value else TRUE
    if not isinstance(a, Op):
        return None
    if a.name == "not":
        return a.args[0]
    if a.name in NEGATED and (a.name in ("eq", "ne") or not a.args[0].dtype.is_float):  # !(x < y) is not x >= y for NaN
        return op(NEGATED[a.name], *a.args)
    return None


@rule("where")
def choose(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    c, a, b = args
    if isinstance(c, Const):
        return a if c.value else b
    if a is b:
        return a
    if dtype is dt.bool_ and isinstance(a, Const) and isinstance(b, Const):
        return c if a.value else op("not", c)
    return op("where", c.args[0], b, a) if is_op(c, "not") else None


@rule("sign", "abs", "xor", "bitand", "bitor", "bitnot", "shl", "shr", "powi", "isnan", "isinf", "signbit")
def on_constants(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    return fold_constants(name, dtype, args)


@rule("pow")
def power(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    return None if dtype.is_float else fold_constants(name, dtype, args)


# ---------------------------------------------------------------- conversions
# dtype -> the dtypes that hold each of its values exactly
EXACT: dict[DType, frozenset[DType]] = {
    dt.bool_: frozenset({dt.u8, dt.i8, dt.i16, dt.i32, dt.i64, dt.index, dt.f16, dt.bf16, dt.f32, dt.f64}),
    dt.u8: frozenset({dt.i16, dt.i32, dt.i64, dt.index, dt.f16, dt.bf16, dt.f32, dt.f64}),
    dt.i8: frozenset({dt.i16, dt.i32, dt.i64, dt.index, dt.f16, dt.bf16, dt.f32, dt.f64}),
    dt.i16: frozenset({dt.i32, dt.i64, dt.index, dt.f32, dt.f64}),
    dt.i32: frozenset({dt.i64, dt.index, dt.f64}),
    dt.i64: frozenset({dt.index}),
    dt.index: frozenset({dt.i64}),  # index is int64_t wherever it runs
    dt.f16: frozenset({dt.f32, dt.f64}),
    dt.bf16: frozenset({dt.f32, dt.f64}),
    dt.f32: frozenset({dt.f64}),
    dt.f64: frozenset(),
}


def is_exact(source: DType, target: DType) -> bool:
    """True if every value of `source` survives conversion to `target`."""
    return source is target or target in EXACT[source]


@rule("cast")
def convert_rule(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    """Cast(T, Cast(W, x)) -> Cast(T, x) where x -> W is exact; constants."""
    (a,) = args
    if a.dtype is dtype:
        return a
    if isinstance(a, Const):
        return convert_constant(a, dtype)
    if isinstance(a, Cast) and is_exact(a.arg.dtype, a.dtype):
        return a.arg if a.arg.dtype is dtype else convert_rule(name, dtype, a.args) or Cast(dtype, a.arg)
    return None


def convert_constant(a: Const, dtype: DType) -> Expr | None:
    value = round_to(a.dtype, float(a.value)) if a.dtype.is_float else a.value
    if dtype is dt.bool_:
        return Const(dtype, value != 0)
    if dtype.is_float:
        return Const(dtype, round_to(dtype, float(value))) if a.dtype.is_float or abs(value) < 2**53 else None
    if a.dtype.is_float:  # out of range is the machine's affair
        return Const(dtype, wrap(dtype, math.trunc(value))) if math.isfinite(value) and abs(value) < 2**31 else None
    return Const(dtype, wrap(dtype, int(value)))


def is_op(e: Expr, name: str) -> bool:
    return isinstance(e, Op) and e.name == name


def drop_precision_casts(e: Expr) -> Expr:
    """Cast(f32, Cast(bf16, x: f32)) -> x, for f16 too: intermediate results keep f32 precision.

    Not exact: used only when options.emulate_precision_casts is off. The last rounding, before a store, stays.
    """
    memo: dict[Expr, Expr] = {}
    for node in walk(e):
        made = node.rebuild(tuple(memo[a] for a in node.args)) if node.args else node
        if isinstance(made, Cast) and isinstance(made.arg, Cast):
            narrow, source = made.arg.dtype, made.arg.arg
            if narrow in dt.HALF and source.dtype is made.dtype:
                made = source
        memo[node] = made
    return memo[e]
