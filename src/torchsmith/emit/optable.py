"""One row per scalar operator of ir/ops.py: how it is spelled in C, on vectors of lanes and on single values.

In: operator name, register kind of the operands, whether they are vectors, operand texts. Out: a C expression and the snippets it calls.
Booleans are xi32 masks (0 or -1) in vectors and int (0 or 1) in scalars; half floats are computed as f32 by the caller.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ir.rows import rows

# reg: "f32" "f64" "i32" "i64" "i16" "i8" "u8" "bool"
Row = Callable[[str, bool, tuple[str, ...]], str]
ROWS: dict[str, Row] = {}
row = rows(ROWS, "row")


def call(name: str, reg: str, vec: bool, args: tuple[str, ...]) -> str:
    return f"{name}_{'x' if vec else ''}{reg}({', '.join(args)})"


def to_mask(text: str, reg: str, vec: bool) -> str:
    """A comparison's result as a boolean register."""
    if not vec or reg in ("f32", "i32"):
        return text
    if reg in ("f64", "i64"):
        return f"CV({text}, xi32)"
    return f"up_xi8({text})" if reg in ("i8", "u8") else f"CV({text}, xi32)"


def _infix(sign: str) -> Row:
    def print_row(reg: str, vec: bool, a: tuple[str, ...]) -> str:
        return f"({a[0]} {sign} {a[1]})"

    return print_row


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("bitand", "&"), ("bitor", "|"), ("xor", "^"), ("div", "/")):
    row(_name)(_infix(_sign))

_BOOL_COMPARE = {  # on masks
    "eq": "(~({0} ^ {1}))", "ne": "({0} ^ {1})", "lt": "(~{0} & {1})", "le": "(~{0} | {1})", "gt": "({0} & ~{1})", "ge": "({0} | ~{1})",
}  # fmt: skip


def _compare(name: str, sign: str) -> Row:
    def print_row(reg: str, vec: bool, a: tuple[str, ...]) -> str:
        if reg == "bool" and vec:
            return _BOOL_COMPARE[name].format(*a)
        return to_mask(f"({a[0]} {sign} {a[1]})", reg, vec)

    return print_row


for _name, _sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    row(_name)(_compare(_name, _sign))


@row("and")
def _and(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return f"({a[0]} & {a[1]})"


@row("or")
def _or(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return f"({a[0]} | {a[1]})"


@row("not")
def _not(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return f"(~{a[0]})" if vec else f"(!{a[0]})"


@row("bitnot")
def _bitnot(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return f"(~{a[0]})"


@row("neg")
def _neg(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return f"(-{a[0]})"


@row("abs")
def _abs(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    if reg in ("f32", "f64"):
        return call("abs", reg, vec, a)
    if reg in ("u8", "bool"):
        return a[0]
    return call("sel", reg, vec, (f"({a[0]} < 0)", f"(-{a[0]})", a[0]))


@row("sign")
def _sign_row(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    if reg in ("f32", "f64"):
        return call("sign", reg, vec, a)
    if reg == "bool":
        return a[0]
    return f"(({a[0]} < 0) - ({a[0]} > 0))" if vec else f"(({a[0]} > 0) - ({a[0]} < 0))"


def _minmax(name: str, sign: str) -> Row:
    def print_row(reg: str, vec: bool, a: tuple[str, ...]) -> str:
        if reg in ("f32", "f64"):
            return call(name, reg, vec, a)
        if reg == "bool":
            return f"({a[0]} {'|' if 'max' in name else '&'} {a[1]})"
        return call("sel", reg, vec, (f"({a[0]} {sign} {a[1]})", a[0], a[1]))

    return print_row


for _name, _sign in (("min", "<"), ("max", ">"), ("fmin", "<"), ("fmax", ">")):
    row(_name)(_minmax(_name, _sign))


def _call_row(name: str) -> Row:
    return lambda reg, vec, a: call(name, reg, vec, a)


for _name, _target in (("truncdiv", "tdiv"), ("floordiv", "fdiv"), ("mod", "fmod"), ("shl", "shl"), ("shr", "shr"), ("copysign", "copysign"),
                       ("fma", "fma"), ("floor", "floor"), ("ceil", "ceil"), ("trunc", "trunc"), ("round", "rint"), ("sqrt", "sqrt"),
                       ("rsqrt", "rsqrt"), ("remainder", "remainder")):  # fmt: skip
    row(_name)(_call_row(_target))
for _name in ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "atan2", "erf", "erfc", "lgamma", "sigmoid", "hypot", "nextafter", "digamma", "erfinv", "ndtr", "gelu", "i0", "i0e", "i1", "i1e", "erfcx", "ndtri", "log_ndtr"]:  # fmt: skip
    row(_name)(_call_row(_name.replace("_", "")))


@row("fmod")
def _fmod(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return call("frem" if reg in ("f32", "f64") else "tmod", reg, vec, a)


@row("pow")
def _pow(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return call("pow", reg, vec, a)


@row("philox")
def _philox(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return call("philox", reg, vec, a)


@row("isnan")
def _isnan(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return to_mask(f"({a[0]} != {a[0]})", reg, vec)


@row("isinf")
def _isinf(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    inf = "__builtin_inff()" if reg == "f32" else "__builtin_inf()"
    return to_mask(f"({call('abs', reg, vec, a)} == {inf})", reg, vec)


@row("signbit")
def _signbit(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    return to_mask(f"({call('asi', reg, vec, a)} < 0)", reg, vec)


@row("where")
def _where(reg: str, vec: bool, a: tuple[str, ...]) -> str:
    if not vec:
        return f"({a[0]} ? {a[1]} : {a[2]})"
    if reg == "bool":
        return call("sel", "i32", True, a)
    wide = {"f64": f"CV({a[0]}, xi64)", "i64": f"CV({a[0]}, xi64)", "i16": f"CV({a[0]}, xi16)", "bf16": f"CV({a[0]}, xi16)",
            "f16": f"CV({a[0]}, xi16)", "i8": f"down_xi8({a[0]})", "u8": f"down_xi8({a[0]})"}  # fmt: skip
    reg_type = {"bf16": "u16", "f16": "u16"}.get(reg, reg)
    return call("sel", reg_type, True, (wide.get(reg, a[0]), a[1], a[2]))
