"""Pointwise operators: one expression per element. In: operands as Refs and numbers; out: one Stage over the broadcast shape.

Laws: operands are converted to the common dtype that eager's promotion gives, then to its compute dtype (float32 for the half formats);
the result is converted to the dtype of the node's spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, op, select
from ..ir.ops import OPS
from .core import Builder
from .numerics import HIGHEST, IR_DTYPES, LOWEST, TORCH_DTYPES, boolean, cast, number_dtype, opmath, result_type, rounded_to, scalar
from .ref import Index, Ref, known
from .table import lowers, overload


def common_dtype(*operands: Any) -> DType:
    """Eager's promoted dtype of tensors and numbers."""
    kinds = []
    for a in operands:
        if isinstance(a, Ref):
            kinds.append((TORCH_DTYPES[a.dtype], "dim" if a.shape else "zero"))
        else:
            kinds.append((number_dtype(a), "number"))
    return IR_DTYPES[result_type(kinds)]


def rounded(value: Any, d: DType) -> Any:
    """A Python number as a tensor of dtype `d` would hold it."""
    if isinstance(value, Expr) and d in dt.HALF:
        return cast(cast(value, dt.f32), d)
    if isinstance(value, (int, float)) and d in dt.HALF:
        return torch.tensor(value, dtype=TORCH_DTYPES[d]).item()
    return value


def element(a: Any, index: Index, common: DType, compute: DType | None = None, exact: bool = False) -> Expr:
    """Operand `a` at `index`, converted to `common` and then to the compute dtype.

    `exact`: numbers and 0-d tensors skip the rounding to a half format, as eager's arithmetic kernels do.
    """
    compute = compute or opmath(common)
    if not isinstance(a, Ref):
        return scalar(a if exact else rounded(a, common), compute)
    value = a.at(index)
    if a.shape or compute is common or not exact:
        value = cast(value, common)
    return cast(value, compute)


def map_elements(cx: Builder, fn: Callable[..., Expr], *operands: Any, common: DType | None = None, exact: bool = False) -> Ref:
    """stage out[i] = Cast(spec dtype, fn(operands at i in the compute dtype)); the common dtype is the result's unless given."""
    common = common or cx.dtype
    result = cx.dtype
    return cx.stage(lambda i: cast(fn(*(element(a, i, common, None, exact and k > 0) for k, a in enumerate(operands))), result))


def rows(table: dict[str, Callable[..., Expr]], names: Sequence[str] = ("default",), exact: bool = False) -> None:
    """Enter pointwise rows `name -> fn` whose common dtype is the result's; overloads that an operator lacks are skipped. `exact`: operands
    behind the first one, if they are numbers or 0-d tensors, skip the rounding to a half format."""
    for name, fn in table.items():
        overloads = [o for o in (f"aten.{name}.{n}" for n in names) if overload(o) is not None]

        def rule(cx: Builder, *operands: Any, fn: Callable[..., Expr] = fn) -> Ref:
            return map_elements(cx, fn, *operands, exact=exact)

        if not overloads:
            raise ValueError(f"no operator aten.{name} with overloads {names}")
        lowers(*overloads)(rule)


def c(e: Expr, value: Any) -> Expr:
    """A number in e's dtype."""
    return cast(value, e.dtype) if isinstance(value, Expr) else Const(e.dtype, value)


def direct(name: str) -> Callable[..., Expr]:
    return lambda *args: op(name, *args)


# ---------------------------------------------------------------- one operand, float result (integers are promoted by the spec)
FLOAT_UNARY = {
    name: direct(name.removeprefix("special_"))
    for name in (
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2", "expm1",
        "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "erf", "erfc", "erfinv", "lgamma", "digamma", "sigmoid", "i0",
        "special_i0e", "special_i1", "special_i1e", "special_ndtri", "special_log_ndtr", "special_erfcx",
    )
    if OPS[name.removeprefix("special_")].native
}  # fmt: skip
rows(FLOAT_UNARY)


def reciprocal(x: Expr) -> Expr:
    return op("div", c(x, 1.0), x)


def nonfinite(x: Expr) -> Expr:
    return op("or", op("isnan", x), op("isinf", x))


def sinc(x: Expr) -> Expr:
    scaled = op("mul", x, c(x, math.pi))
    return select(op("eq", x, c(x, 0.0)), c(x, 1.0), op("div", op("sin", scaled), scaled))


def stored(cx: Builder, e: Expr) -> Expr:
    """A value on the way to the result as a half format holds it: these kernels of eager's compute in the result's dtype."""
    return cast(cast(e, cx.dtype), e.dtype)


@lowers("aten.special_entr.default")
def entropy(cx: Builder, x: Ref) -> Ref:
    """-x log x for x > 0, 0 at 0, -inf below, NaN for NaN."""

    def value(e: Expr) -> Expr:
        at_or_below = select(op("eq", e, c(e, 0.0)), c(e, 0.0), c(e, -math.inf))
        return select(op("or", op("gt", e, c(e, 0.0)), op("isnan", e)), op("mul", op("neg", e), stored(cx, op("log", e))), at_or_below)

    return map_elements(cx, value, x)


rows(
    {
        "reciprocal": reciprocal,
        "deg2rad": lambda x: op("mul", x, c(x, math.pi / 180)),
        "rad2deg": lambda x: op("mul", x, c(x, 180 / math.pi)),
        "sinc": sinc,
    }
)


# ---------------------------------------------------------------- one operand, same dtype
def float_only(name: str) -> Callable[[Expr], Expr]:
    """Rounding of an integer is the integer."""
    return lambda x: op(name, x) if x.dtype.is_float else x


def sign(x: Expr) -> Expr:
    return x if x.dtype is dt.bool_ else op("sign", x)


rows(
    {
        "neg": direct("neg"),
        "abs": lambda x: x if x.dtype is dt.bool_ else op("abs", x),
        "sign": sign,
        "sgn": sign,
        "floor": float_only("floor"),
        "ceil": float_only("ceil"),
        "round": float_only("round"),
        "trunc": float_only("trunc"),
        "frac": lambda x: op("sub", x, op("trunc", x)),
        "square": lambda x: op("mul", x, x),
        "bitwise_not": lambda x: op("not", x) if x.dtype is dt.bool_ else op("bitnot", x),
    }
)


@lowers("aten.round.decimals")
def round_decimals(cx: Builder, x: Ref, decimals: int = 0) -> Any:
    if x.dtype not in (dt.f32, dt.f64):
        return NotImplemented
    power = 10.0 ** abs(decimals)
    if math.isinf(power):
        return NotImplemented

    def value(e: Expr) -> Expr:
        p = c(e, power)
        return op("div", op("round", op("mul", e, p)), p) if decimals > 0 else op("mul", op("round", op("div", e, p)), p)

    return map_elements(cx, value if decimals else float_only("round"), x)


@lowers("aten.nan_to_num.default")
def nan_to_num(cx: Builder, x: Ref, nan: Any = None, above: Any = None, below: Any = None) -> Any:
    d = x.dtype
    if not d.is_float:
        return x
    info = torch.finfo(TORCH_DTYPES[d])

    def value(e: Expr) -> Expr:
        high = c(e, info.max if above is None else above)
        low = c(e, info.min if below is None else below)
        e_inf = select(op("eq", e, c(e, math.inf)), high, select(op("eq", e, c(e, -math.inf)), low, e))
        return select(op("isnan", e), c(e, 0.0 if nan is None else nan), e_inf)

    return map_elements(cx, value, x)


@lowers("aten.logit.default", "aten.special_logit.default")
def logit(cx: Builder, x: Ref, eps: Any = None) -> Ref:
    def value(e: Expr) -> Expr:
        if eps is not None and eps >= 0:
            low = stored(cx, c(e, eps))
            high = stored(cx, op("sub", c(e, 1.0), low))
            e = select(op("lt", e, low), low, select(op("gt", e, high), high, e))
        return op("log", stored(cx, op("div", e, stored(cx, op("sub", c(e, 1.0), e)))))

    return map_elements(cx, value, x)


# ---------------------------------------------------------------- predicates of one operand
def predicates(table: dict[str, Callable[[Expr], Expr]], otherwise: Callable[[Expr], Expr]) -> None:
    """Rows whose result is bool: `otherwise` is the answer for integers and bools."""
    for name, fn in table.items():

        def rule(cx: Builder, x: Ref, fn: Callable[[Expr], Expr] = fn) -> Ref:
            compute = opmath(x.dtype)
            return cx.stage(lambda i: (fn if compute.is_float else otherwise)(cast(x.load(i), compute)))

        lowers(f"aten.{name}.default")(rule)


predicates({
    "isnan": direct("isnan"),
    "isinf": direct("isinf"),
    "isposinf": lambda x: op("eq", x, c(x, math.inf)),
    "isneginf": lambda x: op("eq", x, c(x, -math.inf)),
}, lambda x: Const(dt.bool_, False))  # fmt: skip
predicates({"isfinite": lambda x: op("not", nonfinite(x)), "isreal": lambda x: Const(dt.bool_, True)}, lambda x: Const(dt.bool_, True))
predicates({"signbit": direct("signbit")}, lambda x: op("lt", x, c(x, 0)))
predicates({"logical_not": lambda x: op("eq", x, c(x, 0.0))}, lambda x: op("not", boolean(x)))


# ---------------------------------------------------------------- arithmetic of two operands
def add_scaled(x: Expr, y: Expr, alpha: Expr) -> Expr:
    one = isinstance(alpha, Const) and alpha.value == 1
    if x.dtype is dt.bool_:
        return op("or", x, y if one else op("and", y, alpha))
    return op("add", x, y if one else op("mul", alpha, y))


def sub_scaled(x: Expr, y: Expr, alpha: Expr) -> Expr:
    one = isinstance(alpha, Const) and alpha.value == 1
    return op("sub", x, y if one else op("mul", alpha, y))


def mul_values(x: Expr, y: Expr) -> Expr:
    return op("and", x, y) if x.dtype is dt.bool_ else op("mul", x, y)


rows({"add": add_scaled, "sub": sub_scaled}, ("Tensor", "Scalar"))
rows({"rsub": lambda x, y, alpha: sub_scaled(y, x, alpha)}, ("Tensor", "Scalar"))
rows({"mul": mul_values}, ("Tensor", "Scalar"), exact=True)
rows({"div": direct("div"), "true_divide": direct("div")}, ("Tensor", "Scalar"), exact=True)


def guarded_divisor(cx: Builder, y: Any, d: DType) -> Callable[[Expr], Expr]:
    """Check that no integer divisor is 0; gives a wrapper that makes the division itself harmless."""
    if not d.is_int:
        return lambda e: e
    if isinstance(y, (int, float)) and not isinstance(y, bool) and int(y) != 0:
        return lambda e: e
    shape = y.shape if isinstance(y, Ref) else ()
    cx.check_none(shape, lambda i: op("eq", element(y, i, d), Const(d, 0)), "RuntimeError", "ZeroDivisionError")
    return lambda e: select(op("eq", e, Const(d, 0)), Const(d, 1), e)


def floor_quotient(x: Expr, y: Expr, d: DType) -> Expr:
    """Floats: (x - fmod(x, y)) / y, corrected to the floor; x / y where y is 0. Steps on tensors round to `d`, as eager's do."""
    zero = c(x, 0.0)
    rest = rounded_to(op("fmod", x, y), d)
    quotient = rounded_to(op("div", rounded_to(op("sub", x, rest), d), y), d)
    crossed = op("and", op("ne", rest, zero), op("ne", op("lt", y, zero), op("lt", rest, zero)))
    quotient = select(crossed, rounded_to(op("sub", quotient, c(x, 1.0)), d), quotient)
    floored = op("floor", quotient)
    floored = select(op("gt", op("sub", quotient, floored), c(x, 0.5)), op("add", floored, c(x, 1.0)), floored)
    exact = op("div", x, y)
    result = select(op("eq", quotient, zero), op("copysign", zero, exact), floored)
    return select(op("eq", y, zero), exact, result)


def divide_rounding(cx: Builder, x: Any, y: Any, mode: str | None) -> Ref:
    """div with rounding_mode None, "trunc" or "floor"."""
    d = cx.dtype
    if mode is None:
        return map_elements(cx, direct("div"), x, y, exact=True)
    if d.is_float:
        between = d if isinstance(y, Ref) and any(known(n) != 1 for n in y.shape) else opmath(d)
        if mode == "floor":
            return map_elements(cx, lambda a, b: floor_quotient(a, b, between), x, y, exact=True)
        return map_elements(cx, lambda a, b: op("trunc", rounded_to(op("div", a, b), between)), x, y, exact=True)
    safe = guarded_divisor(cx, y, d)
    name = "floordiv" if mode == "floor" else "truncdiv"
    return map_elements(cx, lambda a, b: op(name, a, safe(b)), x, y)


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(cx: Builder, x: Any, y: Any, rounding_mode: str | None = None) -> Ref:
    return divide_rounding(cx, x, y, rounding_mode)


@lowers("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(cx: Builder, x: Any, y: Any) -> Ref:
    return divide_rounding(cx, x, y, "floor")


@lowers("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(cx: Builder, x: Any, y: Any) -> Ref:
    d = cx.dtype
    safe = guarded_divisor(cx, y, d)
    return map_elements(cx, lambda a, b: op("remainder", a, b) if d.is_float else op("mod", a, safe(b)), x, y)


@lowers("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(cx: Builder, x: Any, y: Any) -> Ref:
    safe = guarded_divisor(cx, y, cx.dtype)
    return map_elements(cx, lambda a, b: op("fmod", a, safe(b)), x, y)


# ---------------------------------------------------------------- powers
def pow_number(x: Expr, n: float, d: DType) -> Expr | None:
    """Exponents for which eager has a formula of its own; in bfloat16 it rounds in between."""
    square = rounded_to(op("mul", x, x), d) if d is dt.bf16 else op("mul", x, x)
    if n == 0.5:
        return op("sqrt", x)
    if n == 2:
        return op("mul", x, x)
    if n == 3:
        return op("mul", square, x)
    if n == -0.5:
        return op("div", c(x, 1.0), op("sqrt", x))
    if n == -1:
        return reciprocal(x)
    if n == -2:
        return op("div", c(x, 1.0), square)
    return None


@lowers("aten.pow.Tensor_Scalar")
def pow_scalar(cx: Builder, x: Ref, n: Any) -> Any:
    d = cx.dtype
    if isinstance(n, Expr):
        return map_elements(cx, direct("pow"), x, n)
    if n == 0:
        return cx.stage(lambda i: scalar(1, d))
    if n == 1:
        return map_elements(cx, lambda e: e, x)
    if d.is_float:
        return map_elements(cx, lambda e: pow_number(e, float(n), d) or op("pow", e, c(e, rounded(float(n), d))), x)
    return map_elements(cx, lambda e: op("powi", e, Const(dt.i64, int(n)), dtype=e.dtype), x) if d.is_int and n > 0 else NotImplemented


@lowers("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def pow_tensor(cx: Builder, x: Any, y: Any) -> Any:
    return NotImplemented if cx.dtype is dt.bool_ else map_elements(cx, direct("pow"), x, y)


# ---------------------------------------------------------------- extremes
rows({"maximum": direct("max"), "minimum": direct("min")})
rows({"max": direct("max"), "min": direct("min")}, ("other",))


def fmax(x: Expr, y: Expr) -> Expr:
    return op("fmax" if x.dtype.is_float else "max", x, y)


def fmin(x: Expr, y: Expr) -> Expr:
    return op("fmin" if x.dtype.is_float else "min", x, y)


rows({"fmax": fmax, "fmin": fmin})
rows({"clamp_min": direct("max"), "clamp_max": direct("min")}, ("default", "Tensor"))


@lowers("aten.clamp.default", "aten.clamp.Tensor", "aten.clip.default", "aten.clip.Tensor", "aten.hardtanh.default")
def clamp(cx: Builder, x: Ref, low: Any = None, high: Any = None) -> Ref:
    if cx.origin.startswith("aten.hardtanh"):
        low, high = -1 if low is None else low, 1 if high is None else high
    given = [a for a in (low, high) if a is not None]

    def value(e: Expr, *bounds: Expr) -> Expr:
        left = iter(bounds)
        if low is not None:
            e = op("max", e, next(left))
        return e if high is None else op("min", e, next(left))

    return map_elements(cx, value, x, *given)


# ---------------------------------------------------------------- more of two operands
def logaddexp(x: Expr, y: Expr) -> Expr:
    """max + log1p(exp(-|x - y|)); equal infinities give themselves."""
    value = op("add", op("max", x, y), op("log1p", op("exp", op("neg", op("abs", op("sub", x, y))))))
    return select(op("and", op("isinf", x), op("eq", x, y)), x, value)


def logaddexp2(x: Expr, y: Expr) -> Expr:
    powers = op("log1p", op("exp2", op("neg", op("abs", op("sub", x, y)))))
    value = op("add", op("max", x, y), op("mul", powers, c(x, 1 / math.log(2))))
    return select(op("and", op("isinf", x), op("eq", x, y)), x, value)


def xlogy_by(name: str) -> Callable[..., Ref]:
    """x * log(y), 0 where x is 0 unless y is NaN."""

    def rule(cx: Builder, *operands: Any) -> Ref:
        def value(x: Expr, y: Expr) -> Expr:
            product = select(op("eq", x, c(x, 0.0)), c(x, 0.0), op("mul", x, stored(cx, op(name, y))))
            return select(op("isnan", y), c(x, math.nan), product)

        return map_elements(cx, value, *operands)

    return rule


def heaviside(x: Expr, y: Expr) -> Expr:
    step = select(op("gt", x, c(x, 0)), c(x, 1), c(x, 0))
    return select(op("eq", x, c(x, 0)), y, step)


def bitwise(name: str, of_bool: str) -> Callable[[Expr, Expr], Expr]:
    return lambda x, y: op(of_bool if x.dtype is dt.bool_ else name, x, y)


rows({"atan2": direct("atan2"), "hypot": direct("hypot"), "logaddexp": logaddexp, "logaddexp2": logaddexp2})
rows({"heaviside": heaviside})
rows({"copysign": direct("copysign")}, ("Tensor", "Scalar"))
lowers("aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.xlogy.Scalar_Self")(xlogy_by("log"))
lowers("aten.special_xlog1py.default", "aten.special_xlog1py.other_scalar", "aten.special_xlog1py.self_scalar")(xlogy_by("log1p"))
rows(
    {"bitwise_and": bitwise("bitand", "and"), "bitwise_or": bitwise("bitor", "or"), "bitwise_xor": direct("xor")},
    ("Tensor", "Scalar", "Scalar_Tensor"),
)
rows({"bitwise_left_shift": direct("shl"), "bitwise_right_shift": direct("shr")}, ("Tensor", "Tensor_Scalar", "Scalar_Tensor"))
rows({"__lshift__": direct("shl"), "__rshift__": direct("shr")}, ("Tensor", "Scalar"))


# ---------------------------------------------------------------- comparisons and logic: the operands are promoted, the result is bool
def comparison(name: str) -> Callable[..., Ref]:
    def rule(cx: Builder, x: Any, y: Any) -> Ref:
        return map_elements(cx, direct(name), x, y, common=common_dtype(x, y))

    return rule


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(comparison(_name))


def logical(name: str) -> Callable[..., Ref]:
    def rule(cx: Builder, x: Ref, y: Ref) -> Ref:
        return cx.stage(lambda i: op(name, boolean(x.at(i)), boolean(y.at(i))))

    return rule


for _name, _op in (("logical_and", "and"), ("logical_or", "or"), ("logical_xor", "xor")):
    lowers(f"aten.{_name}.default")(logical(_op))


# ---------------------------------------------------------------- three operands
@lowers("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def where(cx: Builder, test: Ref, x: Any, y: Any) -> Ref:
    d = cx.dtype
    return cx.stage(lambda i: select(boolean(test.at(i)), element(x, i, d, d), element(y, i, d, d)))


def check_fits(cx: Builder, value: Any, d: DType) -> None:
    """A tensor's one number that eager reads and makes one of `d`: where it is beyond that, eager raises."""
    if not isinstance(value, Ref) or value.dtype is d or d is dt.bool_ or value.dtype is dt.bool_:
        return
    least, most = _range(d)
    if value.dtype.is_float <= d.is_float and least <= _range(value.dtype)[0] and _range(value.dtype)[1] <= most:
        return
    compute = opmath(value.dtype)
    if not value.dtype.is_float and least == 0:
        least = -most  # a negative integer is taken modulo the size

    def bad(_: Index) -> Expr:
        v = cast(value.load(()), compute)
        ends = [max(least, LOWEST.get(compute, least)), min(most, HIGHEST.get(compute, most))]
        beyond = op("or", op("lt", v, scalar(ends[0], compute)), op("gt", v, scalar(ends[1], compute)))
        if not compute.is_float:
            return beyond
        if d.is_float:
            return op("and", beyond, op("lt", op("abs", v), c(v, math.inf)))
        return op("or", beyond, op("ne", v, v))

    cx.check_none((), bad, "RuntimeError", "value cannot be converted without overflow")


def _range(d: DType) -> tuple[float, float]:
    """The least and the greatest finite number of a dtype."""
    found = torch.finfo(TORCH_DTYPES[d]) if d.is_float else torch.iinfo(TORCH_DTYPES[d])
    return found.min, found.max


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(cx: Builder, x: Ref, mask: Ref, value: Any) -> Ref:
    d = cx.dtype
    check_fits(cx, value, d)
    return cx.stage(lambda i: select(boolean(mask.at(i)), element(value, i, d, d), x.at(i)))


def lerp(start: Expr, end: Expr, weight: Expr) -> Expr:
    """From the nearer end, so that both ends are exact."""
    span = op("sub", end, start)
    near = op("add", start, op("mul", weight, span))
    far = op("sub", end, op("mul", span, op("sub", c(weight, 1.0), weight)))
    return select(op("lt", op("abs", weight), c(weight, 0.5)), near, far)


rows({"lerp": lerp}, ("Scalar", "Tensor"), exact=True)


@lowers("aten.addcmul.default")
def addcmul(cx: Builder, x: Ref, a: Ref, b: Ref, value: Any = 1) -> Ref:
    return map_elements(cx, lambda e, p, q, v: op("add", e, op("mul", op("mul", v, p), q)), x, a, b, value, exact=True)


@lowers("aten.addcdiv.default")
def addcdiv(cx: Builder, x: Ref, a: Ref, b: Ref, value: Any = 1) -> Ref:
    return map_elements(cx, lambda e, p, q, v: op("add", e, op("div", op("mul", v, p), q)), x, a, b, value, exact=True)


@lowers("aten.ldexp.Tensor")
def ldexp(cx: Builder, x: Ref, n: Ref) -> Ref:
    """x * 2**n: of whole n without the power, which could be beyond the dtype; else with the power in the result's dtype, as in eager."""
    if not n.dtype.is_int or not cx.dtype.is_float:
        return map_elements(cx, lambda e, k: op("mul", e, op("exp2", k)), x, n)
    compute = opmath(cx.dtype)

    def at(i: Index) -> Expr:
        k = op("min", op("max", cast(n.at(i), dt.i64), Const(dt.i64, -2200)), Const(dt.i64, 2200))
        return cast(op("ldexp", element(x, i, cx.dtype), cast(k, dt.i32), dtype=compute), cx.dtype)

    return cx.stage(at)


@lowers("aten.frexp.Tensor")
def frexp(cx: Builder, x: Ref) -> Any:
    if not OPS["frexp_m"].native:
        return NotImplemented
    compute = opmath(x.dtype)
    return cx.stages(
        lambda i: cast(op("frexp_m", cast(x.load(i), compute)), x.dtype),
        lambda i: op("frexp_e", cast(x.load(i), compute), dtype=dt.i32),
    )


@lowers("aten.nextafter.default")
def nextafter(cx: Builder, x: Ref, y: Ref) -> Any:
    """In the half formats the neighbour is one of theirs."""
    return NotImplemented if cx.dtype in dt.HALF else map_elements(cx, direct("nextafter"), x, y)


@lowers("aten.angle.default")
def angle(cx: Builder, x: Ref) -> Ref:
    """pi for negative numbers, 0 for others, NaN for NaN."""

    def value(e: Expr) -> Expr:
        turned = select(op("lt", e, c(e, 0.0)), c(e, math.pi), c(e, 0.0))
        return select(op("isnan", e), e, turned)

    return map_elements(cx, value, x)


@lowers("aten.mvlgamma.default", "aten.special_multigammaln.default")
def mvlgamma(cx: Builder, x: Ref, order: int) -> Ref:
    """log of the multivariate gamma function: p (p - 1) / 4 log(pi) + sum of lgamma(x - k / 2)."""

    def value(e: Expr) -> Expr:
        summed: Expr = c(e, order * (order - 1) / 4 * math.log(math.pi))
        for k in range(order):
            summed = op("add", summed, op("lgamma", op("sub", e, c(e, k / 2))))
        return summed

    low = (order - 1) / 2
    cx.check_none(
        x.shape,
        lambda i: op("le", element(x, i, cx.dtype), Const(opmath(cx.dtype), low)),
        "RuntimeError",
        f"All elements must be greater than {low}",
    )
    return map_elements(cx, value, x)
