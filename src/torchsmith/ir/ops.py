"""The table of scalar operators: name -> signature, dtypes, kind, whether emit prints it, and its meaning as a Python function.

In: nothing. Out: OPS, read by the verifier (types), the rules (constant folding), the interpreter (definition), lower and emit (native).

Signatures: one letter per operand, then ">" and the result. T one dtype of the row's `over`; b bool; n an integer constant; i an i32;
w an i64; e result i32; * any dtype (bitcast: the result's dtype is given by the node).
Scalar functions take Python numbers and give the exact or float64 result; the caller wraps integers and rounds floats to the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .dtype import DType

OpKind = Literal["arith", "compare", "logic", "bit", "math", "select"]
Scalar = Callable[..., Any]

FLOAT, INT, BOOL, INDEX = frozenset({"float"}), frozenset({"int", "uint"}), frozenset({"bool"}), frozenset({"index"})
NUMBER = FLOAT | INT | INDEX
WHOLE = INT | INDEX
BITS = INT | BOOL
ANY = NUMBER | BOOL


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operator. `over` are the dtype kinds T may have; `native`: emit/ prints it; `scalar` defines it on Python numbers."""

    name: str
    signature: str
    over: frozenset[str]
    kind: OpKind
    native: bool
    scalar: Scalar
    meaning: str

    @property
    def arity(self) -> int:
        return self.signature.index(">")

    def complaint(self, operands: tuple[DType, ...], result: DType) -> str | None:
        """Why these dtypes do not fit the signature; None when they do."""
        if len(operands) != self.arity:
            return f"{self.name} takes {self.arity} operands, not {len(operands)}"
        letters = {"b": "bool", "i": "i32", "w": "i64", "e": "i32"}
        common: DType | None = None
        for letter, d in zip(self.signature.replace(">", ""), (*operands, result), strict=True):
            if letter == "T":
                if d.kind not in self.over:
                    return f"{self.name} is not defined on {d}"
                if common is not None and common is not d:
                    return f"{self.name} mixes {common} and {d}"
                common = d
            elif letter == "n":
                if not (d.is_int or d.kind == "index"):
                    return f"{self.name} takes an integer constant, not {d}"
            elif letter != "*" and d.name != letters[letter]:
                return f"{self.name} takes {letters[letter]} here, not {d}"
        return None


OPS: dict[str, OpRow] = {}


def define(
    name: str, signature: str, over: frozenset[str], kind: OpKind, meaning: str, *, native: bool = True
) -> Callable[[Scalar], Scalar]:
    """Add the row `name` with the decorated function as its scalar definition."""

    def add(fn: Scalar) -> Scalar:
        if name in OPS:
            raise ValueError(f"operator {name} is defined twice")
        if ">" not in signature or set(signature) - set("Tbniwe*>"):
            raise ValueError(f"operator {name}: bad signature {signature!r}")
        OPS[name] = OpRow(name, signature, over, kind, native, fn, meaning)
        return fn

    return add


def wrap(dtype: DType, value: int) -> int:
    """`value` modulo the width of an integer dtype (two's complement); index is unbounded."""
    if dtype.kind == "index":
        return value
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "int" and value >> (bits - 1) else value


NAN, INF = math.nan, math.inf


def _total(fn: Callable[..., float], at_domain: float = NAN) -> Scalar:
    """`fn` made total: a domain error gives `at_domain`, overflow gives infinity."""

    def run(*args: float) -> float:
        try:
            return fn(*args)
        except ValueError:
            return at_domain
        except OverflowError:
            return INF

    return run


def _div(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return NAN if a == 0 or a != a else math.copysign(INF, a) * math.copysign(1.0, b)


def _log(fn: Callable[[float], float], pole: float = 0.0) -> Scalar:
    def run(x: float) -> float:
        if x == pole:
            return -INF
        return NAN if x < pole else fn(x)

    return run


def _truncdiv(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def _fmod(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a - b * _truncdiv(a, b)
    return NAN if b == 0 or math.isinf(a) or a != a or b != b else math.fmod(a, b)


def _remainder(a: float, b: float) -> Any:
    r = _fmod(float(a), float(b))
    return r + b if r != 0 and (r < 0) != (b < 0) else r


def _min(a: Any, b: Any) -> Any:
    return a if a != a or a < b else b


def _max(a: Any, b: Any) -> Any:
    return a if a != a or a > b else b


# ---------------------------------------------------------------- arithmetic
define("add", "TT>T", NUMBER, "arith", "a + b")(lambda a, b: a + b)
define("sub", "TT>T", NUMBER, "arith", "a - b")(lambda a, b: a - b)
define("mul", "TT>T", NUMBER, "arith", "a * b")(lambda a, b: a * b)
define("div", "TT>T", FLOAT, "arith", "a / b, IEEE")(_div)
define("truncdiv", "TT>T", WHOLE, "arith", "quotient rounded towards zero")(_truncdiv)
define("floordiv", "TT>T", WHOLE, "arith", "quotient rounded down")(lambda a, b: a // b)
define("mod", "TT>T", WHOLE, "arith", "remainder with the divisor's sign")(lambda a, b: a % b)
define("fmod", "TT>T", FLOAT | INT, "arith", "remainder with the dividend's sign")(_fmod)
define("remainder", "TT>T", FLOAT, "arith", "float remainder with the divisor's sign")(_remainder)
define("neg", "T>T", NUMBER, "arith", "-a")(lambda a: -a)
define("abs", "T>T", NUMBER, "arith", "|a|")(abs)
define("sign", "T>T", NUMBER, "arith", "-1, 0 or 1; 0 for NaN")(lambda a: (a > 0) - (a < 0))
define("min", "TT>T", NUMBER | BOOL, "arith", "lesser; NaN if either is NaN")(_min)
define("max", "TT>T", NUMBER | BOOL, "arith", "greater; NaN if either is NaN")(_max)
define("fmin", "TT>T", FLOAT, "arith", "lesser, ignoring a NaN")(lambda a, b: b if a != a else a if b != b else min(a, b))
define("fmax", "TT>T", FLOAT, "arith", "greater, ignoring a NaN")(lambda a, b: b if a != a else a if b != b else max(a, b))
define("fma", "TTT>T", FLOAT, "arith", "a * b + c rounded once")(lambda a, b, c: a * b + c)

# ---------------------------------------------------------------- comparison and logic
define("eq", "TT>b", ANY, "compare", "a == b")(lambda a, b: a == b)
define("ne", "TT>b", ANY, "compare", "a != b")(lambda a, b: a != b)
define("lt", "TT>b", ANY, "compare", "a < b")(lambda a, b: a < b)
define("le", "TT>b", ANY, "compare", "a <= b")(lambda a, b: a <= b)
define("gt", "TT>b", ANY, "compare", "a > b")(lambda a, b: a > b)
define("ge", "TT>b", ANY, "compare", "a >= b")(lambda a, b: a >= b)
define("and", "TT>b", BOOL, "logic", "both")(lambda a, b: a and b)
define("or", "TT>b", BOOL, "logic", "either")(lambda a, b: a or b)
define("not", "T>b", BOOL, "logic", "negation")(lambda a: not a)
define("xor", "TT>T", BITS, "bit", "exclusive or, bitwise on integers")(lambda a, b: a ^ b)
define("bitand", "TT>T", BITS, "bit", "bitwise and")(lambda a, b: a & b)
define("bitor", "TT>T", BITS, "bit", "bitwise or")(lambda a, b: a | b)
define("bitnot", "T>T", INT, "bit", "bitwise complement")(lambda a: ~a)
define("where", "bTT>T", ANY, "select", "cond ? a : b, both evaluated")(lambda c, a, b: a if c else b)
define("isnan", "T>b", FLOAT, "compare", "is NaN")(lambda a: a != a)
define("isinf", "T>b", FLOAT, "compare", "is an infinity")(math.isinf)
define("signbit", "T>b", FLOAT, "compare", "sign bit, also of -0.0 and NaN")(lambda a: math.copysign(1.0, a) < 0)


@define("shl", "TT>T", WHOLE, "bit", "a << b; 0 where b is negative or not less than the width")
def _shl(a: int, b: int) -> int:
    return a << b if 0 <= b < 64 else 0


@define("shr", "TT>T", INT, "bit", "a >> b, arithmetic on signed; the sign's fill where b is out of range")
def _shr(a: int, b: int) -> int:
    return a >> b if 0 <= b < 64 else -(a < 0)


MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # of Philox4x32: those of its rounds, and what its key grows by


@define("philox", "wwww>w", INT, "bit", "word `d` (of 32 bits) of Philox4x32-10 with key `a` and counter `b` + `c` * 2**64")
def _philox(key: int, low: int, high: int, word: int) -> int:
    """Salmon and others, "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, key >> 32 & mask
    x = (low & mask, low >> 32 & mask, high & mask, high >> 32 & mask)
    for _ in range(10):
        p, q = MULTIPLIERS[0] * x[0], MULTIPLIERS[1] * x[2]
        x = (q >> 32 ^ x[1] ^ k0, q & mask, p >> 32 ^ x[3] ^ k1, p & mask)
        k0, k1 = k0 + WEYL[0] & mask, k1 + WEYL[1] & mask
    return x[word & 3]


# ---------------------------------------------------------------- bits of floats
define("copysign", "TT>T", FLOAT, "arith", "|a| with b's sign bit")(math.copysign)
define("nextafter", "TT>T", FLOAT, "arith", "next representable value after a towards b")(math.nextafter)
define("ldexp", "Ti>T", FLOAT, "arith", "a * 2**n")(_total(math.ldexp))
define("frexp_m", "T>T", FLOAT, "arith", "mantissa in [0.5, 1) of a; else a itself", native=False)(lambda a: math.frexp(a)[0])
define("frexp_e", "T>e", FLOAT, "arith", "exponent of a = m * 2**e", native=False)(lambda a: math.frexp(a)[1])
define("floor", "T>T", FLOAT, "math", "round down")(lambda a: float(math.floor(a)) if math.isfinite(a) else a)
define("ceil", "T>T", FLOAT, "math", "round up")(lambda a: math.copysign(math.ceil(a), a) if math.isfinite(a) else a)
define("round", "T>T", FLOAT, "math", "round half to even")(lambda a: math.copysign(round(a), a) if math.isfinite(a) else a)
define("trunc", "T>T", FLOAT, "math", "round towards zero")(lambda a: math.copysign(math.trunc(a), a) if math.isfinite(a) else a)


@define("bitcast", "*>*", ANY, "bit", "the same bits read as the node's dtype")
def _bitcast(a: Any) -> Any:
    raise NotImplementedError("bitcast needs both dtypes; the interpreter has it")


# ---------------------------------------------------------------- elementary functions
define("exp", "T>T", FLOAT, "math", "e**a")(_total(math.exp))
define("exp2", "T>T", FLOAT, "math", "2**a")(_total(math.exp2))
define("expm1", "T>T", FLOAT, "math", "e**a - 1")(_total(math.expm1))
define("log", "T>T", FLOAT, "math", "natural logarithm")(_log(math.log))
define("log2", "T>T", FLOAT, "math", "logarithm to base 2")(_log(math.log2))
define("log10", "T>T", FLOAT, "math", "logarithm to base 10")(_log(math.log10))
define("log1p", "T>T", FLOAT, "math", "log(1 + a)")(_log(math.log1p, -1.0))
define("sqrt", "T>T", FLOAT, "math", "square root, correctly rounded")(_total(math.sqrt))
define("rsqrt", "T>T", FLOAT, "math", "1 / sqrt(a)")(lambda a: _div(1.0, math.copysign(math.sqrt(a), a)) if a >= 0 else NAN)
define("sin", "T>T", FLOAT, "math", "sine")(_total(math.sin))
define("cos", "T>T", FLOAT, "math", "cosine")(_total(math.cos))
define("tan", "T>T", FLOAT, "math", "tangent")(_total(math.tan))
define("asin", "T>T", FLOAT, "math", "arc sine")(_total(math.asin))
define("acos", "T>T", FLOAT, "math", "arc cosine")(_total(math.acos))
define("atan", "T>T", FLOAT, "math", "arc tangent")(math.atan)
define("sinh", "T>T", FLOAT, "math", "hyperbolic sine")(lambda a: math.copysign(_total(math.sinh)(abs(a)), a))
define("cosh", "T>T", FLOAT, "math", "hyperbolic cosine")(_total(math.cosh))
define("tanh", "T>T", FLOAT, "math", "hyperbolic tangent")(math.tanh)
define("asinh", "T>T", FLOAT, "math", "inverse hyperbolic sine")(math.asinh)
define("acosh", "T>T", FLOAT, "math", "inverse hyperbolic cosine")(_total(math.acosh))
define("atanh", "T>T", FLOAT, "math", "inverse hyperbolic tangent")(
    lambda a: math.copysign(INF, a) if abs(a) == 1 else _total(math.atanh)(a)
)
define("atan2", "TT>T", FLOAT, "math", "angle of the point (b, a)")(math.atan2)
define("hypot", "TT>T", FLOAT, "math", "sqrt(a*a + b*b) without overflow")(_total(math.hypot))
define("sigmoid", "T>T", FLOAT, "math", "1 / (1 + exp(-a))")(lambda a: _div(1.0, 1.0 + _total(math.exp)(-a)))


@define("pow", "TT>T", FLOAT | INT, "math", "a ** b; integers wrap, a negative integer exponent gives what 1/a**-b truncates to")
def _pow(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        if b >= 0:
            return pow(a, b, 1 << 64)
        return 1 if a == 1 else (1 if b % 2 == 0 else -1) if a == -1 else 0
    try:
        return math.pow(a, b)
    except ValueError:  # 0 ** negative, negative ** fraction
        if a == 0:
            return math.copysign(INF, a) if b == int(b) and int(b) % 2 else INF
        return NAN
    except OverflowError:
        return -INF if a < 0 and b % 2 == 1 else INF


@define("powi", "Tn>T", FLOAT | INT, "math", "a ** n by multiplication, n an integer constant")
def _powi(a: Any, n: int) -> Any:
    return _pow(a, n) if isinstance(a, int) else _pow(a, float(n))


# ---------------------------------------------------------------- special functions
def _erfcx(a: float) -> float:
    if a < 20:
        return float(_total(math.exp)(a * a)) * math.erfc(a)
    z = 0.5 / a / a
    return 1 / math.sqrt(math.pi) / a * (1 - z * (1 - 3 * z * (1 - 5 * z * (1 - 7 * z * (1 - 9 * z)))))


define("erf", "T>T", FLOAT, "math", "error function")(math.erf)
define("erfc", "T>T", FLOAT, "math", "1 - erf(a)")(math.erfc)
define("erfcx", "T>T", FLOAT, "math", "exp(a * a) * erfc(a)")(_erfcx)
define("ndtr", "T>T", FLOAT, "math", "standard normal distribution function")(lambda a: 0.5 * math.erfc(-a * math.sqrt(0.5)))
define("gelu", "T>T", FLOAT, "math", "a * ndtr(a)")(lambda a: a * (0.5 * math.erfc(-a * math.sqrt(0.5))))
define("lgamma", "T>T", FLOAT, "math", "log|gamma(a)|")(_total(math.lgamma, INF))


@define("erfinv", "T>T", FLOAT, "math", "inverse of erf")
def _erfinv(y: float) -> float:
    if not -1 < y < 1:
        return math.copysign(INF, y) if abs(y) == 1 else NAN
    if y == 0:
        return y
    w = math.log1p(-y * y)
    t = 2 / (math.pi * 0.147) + w / 2
    x = math.copysign(math.sqrt(max(0.0, math.sqrt(max(0.0, t * t - w / 0.147)) - t)), y)
    for _ in range(4):  # Newton, on erfc where erf is flat
        f = math.erf(x) - y if abs(y) < 0.5 else math.copysign(1.0, y) * ((1 - abs(y)) - math.erfc(abs(x)))
        slope = 2 / math.sqrt(math.pi) * math.exp(-x * x)
        x -= f / slope / (1 + x * f / slope)
    return x


@define("digamma", "T>T", FLOAT, "math", "derivative of lgamma")
def _digamma(x: float) -> Any:
    if x == 0:
        return math.copysign(INF, -x)
    if math.isinf(x):
        return x if x > 0 else NAN
    if x != x or (x < 0 and x == math.floor(x)):
        return NAN
    if x < 0:  # reflection
        return _digamma(1 - x) - math.pi / math.tan(math.pi * x)
    s = 0.0
    while x < 12:
        s -= 1 / x
        x += 1
    z = 1 / (x * x)
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * 691 / 32760)))))
    return s + math.log(x) - 0.5 / x - series


def _bessel_i(order: int, x: float, scaled: bool) -> float:
    """Modified Bessel function of the first kind, times exp(-|x|) when `scaled`."""
    a = abs(x)
    if x != x or math.isinf(a):
        return math.copysign(0.0, x if order else 1.0) if scaled and x == x else NAN  # unscaled at infinity: NaN, as in eager
    if a < 30:
        q, term, total, k = a * a / 4, (a / 2) ** order, 0.0, 0
        while True:
            total += term
            k += 1
            term *= q / (k * (k + order))
            if term < total * 1e-18 or term == 0:
                break
        value = total * math.exp(-a) if scaled else total
    else:  # asymptotic
        mu, term, total = 4.0 * order * order, 1.0, 1.0
        for k in range(1, 25):
            term *= -(mu - (2 * k - 1) ** 2) / (k * 8 * a)
            total += term
        value = total / math.sqrt(2 * math.pi * a) * (1.0 if scaled else _total(math.exp)(a))
    return -value if order == 1 and x < 0 else value


define("i0", "T>T", FLOAT, "math", "modified Bessel function of order 0")(lambda x: _bessel_i(0, x, False))
define("i0e", "T>T", FLOAT, "math", "i0(a) * exp(-|a|)")(lambda x: _bessel_i(0, x, True))
define("i1", "T>T", FLOAT, "math", "modified Bessel function of order 1")(lambda x: _bessel_i(1, x, False))
define("i1e", "T>T", FLOAT, "math", "i1(a) * exp(-|a|)")(lambda x: _bessel_i(1, x, True))


@define("ndtri", "T>T", FLOAT, "math", "quantile of the standard normal distribution")
def _ndtri(p: float) -> float:
    return math.sqrt(2.0) * _erfinv(2 * p - 1) if p > 0.02 else -INF if p == 0 else NAN if not p > 0 else _ndtri_tail(p)


def _ndtri_tail(p: float) -> float:
    x = -math.sqrt(-2 * math.log(p))
    for _ in range(60):
        f = math.log(0.5 * math.erfc(-x / math.sqrt(2.0))) - math.log(p)
        slope = math.exp(-x * x / 2) / math.sqrt(2 * math.pi) / (0.5 * math.erfc(-x / math.sqrt(2.0)))
        x -= f / slope
    return x


@define("log_ndtr", "T>T", FLOAT, "math", "log of the standard normal distribution function")
def _log_ndtr(x: float) -> float:
    if x > -20:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2.0)))
    if math.isinf(x):
        return -INF
    z, term, total = 1 / (x * x), 1.0, 1.0
    for k in range(1, 12):
        term *= -(2 * k - 1) * z
        total += term
    return -x * x / 2 - math.log(-x) - 0.5 * math.log(2 * math.pi) + math.log(total)


@define("zeta", "TT>T", FLOAT, "math", "Hurwitz zeta: sum of (k + b) ** -a", native=False)
def _zeta(s: float, q: float) -> Any:
    if s == 1:
        return INF
    if s < 1 or s != s or q != q or q == -INF:
        return NAN
    if INF in (q, s):
        return 0.0 if q > 1 else 1.0 if q == 1 else INF
    if q <= 0:
        if q == math.floor(q):
            return INF
        if s != math.floor(s):
            return NAN
    total = 0.0
    for k in range(12):
        total += (q + k) ** -s
    x = q + 12
    total += x ** (1 - s) / (s - 1) + 0.5 * x**-s
    term = s * x ** (-s - 1)
    bernoulli = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
    factorial = 2.0
    for j, b in enumerate(bernoulli, 1):
        total += b / factorial * term
        term *= (s + 2 * j - 1) * (s + 2 * j) / (x * x)
        factorial *= (2 * j + 1) * (2 * j + 2)
    return total


@define("polygamma", "nT>T", FLOAT, "math", "n-th derivative of digamma, n an integer constant", native=False)
def _polygamma(n: int, x: float) -> Any:
    if n == 0:
        return _digamma(x)
    return (1 if n % 2 else -1) * math.factorial(n) * _zeta(n + 1.0, x)
