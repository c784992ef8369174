"""Elementary functions as C text templates, one text for vectors and scalars (see vector.py); only what a kernel uses is pasted.

In: (function, float type). Out: template text. At most 4 ulp on f32; polynomials are own minimax fits (relative error, mpmath).
f32 functions without a text of their own are computed in f64 (kernels that use them run 8 lanes) and rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from math import cos, erfc, pi, sqrt, tanh
from struct import pack, unpack

MATH: dict[tuple[str, str], str] = {}
ATTR = "static inline __attribute__((always_inline)) "
_CONST = re.compile(r"\bK\(([^()]*)\)")


def instantiate(text: str, t: str, vec: bool) -> str:
    """A template for float type `t`."""
    x = "x" if vec else ""
    i, u = ("i32", "u32") if t == "f32" else ("i64", "u64")
    suffix = {"f32": "f", "f64": ""}[t]
    text = _CONST.sub(lambda m: m.group(1) + suffix, text)
    if t == "f32":  # gcc 13 refuses a double constant beside a vector of float, even an infinite one
        text = text.replace('__builtin_nan("")', '__builtin_nanf("")').replace("__builtin_inf()", "__builtin_inff()")
    bits = {"f32": ("0x7fffffff", "0x3f800000", "(int)0xbf800000u"), "f64": ("0x7fffffffffffffffll", "0x3ff0000000000000ll", "(i64)0xbff0000000000000ull")}[t]
    for word, value in (("KMAX", bits[0]), ("KMONE", bits[2]), ("KONE", bits[1])):
        text = text.replace(word, value)
    text = text.replace("FLT", x + t).replace("INT", x + i).replace("UNS", x + u).replace("MSK", x + i if vec else "int")
    return ATTR + text.replace("@", f"_{x}{t}").replace("%", f"_{x}{i}").replace("$", f"_{x}f64")


def define(name: str, t: str, text: str) -> None:
    if (name, t) in MATH:
        raise ValueError(f"{name} on {t} is defined twice")
    MATH[name, t] = text


def float32(x: float) -> float:
    """The float32 nearest to x."""
    return float(unpack("f", pack("f", x))[0])


def horner(coefs: tuple[float, ...], x: str) -> str:
    """Highest power first; fma chain."""
    text = f"((FLT){{0}} + K({coefs[0]!r}))"
    for c in coefs[1:]:
        text = f"fma@({text}, {x}, (FLT){{0}} + K({c!r}))"
    return text


# ---------------------------------------------------------------- what AVX-512 has as instructions
for _t, _min, _up, _n, _q, _bits, _bias in (("f32", "0x1p-126", "0x1p23", 23, "0x3f400000", 252, 127), ("f64", "0x1p-1022", "0x1p52", 52, "0x3fe8000000000000ll", 2044, 1023)):
    define("splitg", _t, f"""FLT splitg@(FLT x, FLT *e) {{
  MSK tiny = x < K({_min}); FLT v = sel@(tiny, x * K({_up}), x), inf = (FLT){{0}} + K(0x1p{_bias}) * K(2.0);
  INT b = asi@(v), k = (b - {_q}) >> {_n};
  FLT f = tof@(k) - sel@(tiny, (FLT){{0}} + K({_n}.0), (FLT){{0}});
  *e = sel@(x == K(0.0), -inf, sel@(x == inf, inf, f));
  return sel@(x >= K(0.0), asf@(b - (k << {_n})), inf - inf);
}}""")
    # in two factors, so that the first product is exact and denormal results are rounded once; a is near 1
    define("scalefg", _t, f"""FLT scalefg@(FLT a, FLT b) {{
  INT n = toi@(maxi@((FLT){{0}} - K({_bits}.0), mini@((FLT){{0}} + K({_bits}.0), b))), h = n >> 1;
  return a * asf@((h + {_bias}) << {_n}) * asf@((n - h + {_bias}) << {_n});
}}""")

EXP32 = (0.0013950701730265816, 0.008368953880030793, 0.04166620243844204, 0.1666651830349437, 0.5000000096306947)
# n + ROUND holds the whole number nearest to n
ROUND32 = "K(0x1.8p+23)"
# what would be 0 is 0 before it is scaled: an instruction whose result underflows takes 200 cycles (a mask of -inf before a softmax)
define("exp", "f32", f"""FLT exp@(FLT x) {{
  x = mini@((FLT){{0}} + K(89.0), x);
  FLT n = fma@(x, (FLT){{0}} + K(0x1.715476p+0), (FLT){{0}} + {ROUND32}) - {ROUND32};
  FLT r = fma@(n, (FLT){{0}} - K(0x1.62e4p-1), x); r = fma@(n, (FLT){{0}} - K(0x1.7f7d1cp-20), r);
  return scalef@(sel@(x < K(-104.0), (FLT){{0}}, {horner((*EXP32, 1.0, 1.0), "r")}), n);
}}""")

SIN32 = (2.7182380455655774e-06, -0.0001983932722497608, 0.008333329362573503, -0.16666666641429223)
COS32 = (-2.720956203502711e-07, 2.4799511914016582e-05, -0.001388888372299431, 0.041666666622476756)
# n = nearest whole number of quarter turns, r = x - n pi/2 in three parts
_TRIG32 = f"""
  FLT n = rint@(x * K(0x1.45f306p-1));
  FLT r = fma@(n, (FLT){{0}} - K(0x1.921fb4p+0), x); r = fma@(n, (FLT){{0}} - K(0x1.4442d0p-24), r);
  r = fma@(n, (FLT){{0}} - K(0x1.846988p-48), r);
  INT q = toi@(n);
  if (any%(not@(abs@(x) < K(30000.0)))) {{ FLT big; INT bq; reduce@(x, &big, &bq); MSK w = abs@(x) < K(30000.0); r = sel@(w, r, big); q = sel%(w, q, bq); }}
  FLT z = r * r;
  FLT s = fma@({horner(SIN32, "z")} * z, r, r);
  FLT c = fma@({horner(COS32, "z")} * z, z, fma@(z, (FLT){{0}} - K(0.5), (FLT){{0}} + K(1.0)));
"""
define("sin", "f32", f"FLT sin@(FLT x) {{{_TRIG32}  FLT y = sel@((q & 1) != 0, c, s); return sel@(x == K(0.0), x, asf@(asi@(y) ^ ((q & 2) << 30))); }}")
define("cos", "f32", f"FLT cos@(FLT x) {{{_TRIG32}  FLT y = sel@((q & 1) != 0, s, c); return asf@(asi@(y) ^ (((q + 1) & 2) << 30)); }}")

# ---------------------------------------------------------------- f32, of their own
define("expm1", "f32", f"""FLT expm1@(FLT v) {{
  FLT x = maxi@((FLT){{0}} + K(-30.0), mini@((FLT){{0}} + K(89.0), v));
  FLT n = rint@(x * K(0x1.715476p+0));
  FLT r = fma@(n, (FLT){{0}} - K(0x1.62e4p-1), x); r = fma@(n, (FLT){{0}} - K(0x1.7f7d1cp-20), r);
  FLT p = {horner(EXP32, "r")};
  p = fma@(p * r, r, r);
  FLT t = scalef@((FLT){{0}} + K(0.5), n);
  return sel@(v == K(0.0), v, fma@(p, t, t - K(0.5)) * K(2.0));
}}""")
define("exp2", "f32", f"""FLT exp2@(FLT x) {{
  x = mini@((FLT){{0}} + K(129.0), x);
  FLT n = rint@(x), f = x - n, r = f * K(0x1.62e43p-1); r = fma@(f, (FLT){{0}} + K(-0x1.05c61p-29), r);
  FLT p = {horner(EXP32, "r")};
  return scalef@(sel@(x < K(-150.0), (FLT){{0}}, fma@(p * r, r, r) + K(1.0)), n);
}}""")
# x = 2^e m, m in [3/4, 3/2), by split; log m = f - f^2/2 + f^3 P(f) with f = m - 1, no division. split gives e = -inf for 0, inf for inf and
# m = NaN for what has no logarithm, so nothing else is needed.
LOG32 = (-0.04506963863968849, 0.10460668057203293, -0.1315910965204239, 0.14478012919425964, -0.16647495329380035, 0.19990918040275574,
         -0.250000923871994, 0.33333447575569153)  # fmt: skip
_LOGTAIL = f"z * fma@(f, {horner(LOG32, 'f')}, (FLT){{0}} - K(0.5))"
define("log", "f32", f"""FLT log@(FLT x) {{
  FLT e, m = split@(x, &e), f = m - K(1.0), z = f * f;
  FLT y = fma@(e, (FLT){{0}} + K(0x1.7f7d1cp-20), f * z * {horner(LOG32, "f")});
  y = fma@(z, (FLT){{0}} - K(0.5), y) + f;
  return fma@(e, (FLT){{0}} + K(0x1.62e4p-1), y);
}}""")
define("log2", "f32", f"""FLT log2@(FLT x) {{
  FLT e, m = split@(x, &e), f = m - K(1.0), z = f * f, t = {_LOGTAIL};
  return e + fma@(f, (FLT){{0}} + K(0x1.715476p+0), fma@(f, (FLT){{0}} + K(0x1.4ae0cp-26), t * K(0x1.715476p+0)));
}}""")
define("log10", "f32", f"""FLT log10@(FLT x) {{
  FLT e, m = split@(x, &e), f = m - K(1.0), z = f * f, t = {_LOGTAIL};
  FLT l = fma@(f, (FLT){{0}} - K(0x1.5b235ep-27), t * K(0x1.bcb7b2p-2));
  return fma@(e, (FLT){{0}} + K(0x1.344p-2), fma@(f, (FLT){{0}} + K(0x1.bcb7b2p-2), fma@(e, (FLT){{0}} + K(0x1.3509f8p-18), l)));
}}""")
# v 2^-e + (2^-e - 1) is m - 1 without the rounding of 1 + v
define("log1p", "f32", f"""FLT log1p@(FLT v) {{
  FLT x = v + K(1.0), e, m = split@(x, &e), s = scalef@((FLT){{0}} + K(1.0), -e), f = fma@(v, s, s - K(1.0));
  f = sel@((x > K(0.0)) & (x < __builtin_inff()), f, m - m);
  FLT z = f * f, y = fma@(e, (FLT){{0}} + K(0x1.7f7d1cp-20), f * z * {horner(LOG32, "f")});
  y = fma@(z, (FLT){{0}} - K(0.5), y) + f;
  return sel@(v == K(0.0), v, fma@(e, (FLT){{0}} + K(0x1.62e4p-1), y));
}}""")
# 2^n p = e^x
_EXPARTS32 = f"""FLT n = fma@(w, (FLT){{0}} + K(0x1.715476p+0), (FLT){{0}} + {ROUND32}) - {ROUND32};
  FLT r = fma@(n, (FLT){{0}} - K(0x1.62e4p-1), w); r = fma@(n, (FLT){{0}} - K(0x1.7f7d1cp-20), r);
  FLT p = {horner(EXP32, "r")}; p = fma@(p * r, r, r);
"""
TANH32 = (-0.00617595762014389, 0.021004291251301765, -0.05383651331067085, 0.13332441449165344, -0.3333331346511841)  # on [0, 9/16]
define("tanh", "f32", f"""FLT tanh@(FLT x) {{
  FLT a = abs@(x), z = x * x, w = mini@((FLT){{0}} + K(20.0), a + a);
  {_EXPARTS32}
  FLT y = K(1.0) - K(2.0) / (scalef@(p + K(1.0), n) + K(1.0));
  return sel@(a < K(0.5625), fma@({horner(TANH32, "z")} * z, x, x), copysign@(y, x));
}}""")
for _t in ("f32", "f64"):
    # e^-|x| never overflows
    define("sigmoid", _t, "FLT sigmoid@(FLT x) { FLT e = exp@(-abs@(x)); return sel@(x < K(0.0), e, (FLT){0} + K(1.0)) / (e + K(1.0)); }")
    define("rsqrt", _t, "FLT rsqrt@(FLT x) { return K(1.0) / sqrt@(x); }")
define("sinh", "f32", f"""FLT sinh@(FLT x) {{
  FLT w = mini@((FLT){{0}} + K(89.6), abs@(x));
  {_EXPARTS32}
  FLT t = scalef@((FLT){{0}} + K(0.25), n), q = fma@(p, t, t - K(0.25)), d = fma@(q, (FLT){{0}} + K(4.0), (FLT){{0}} + K(1.0));
  return copysign@((q + q / d) * K(2.0), x);
}}""")
define("cosh", "f32", f"""FLT cosh@(FLT x) {{
  FLT w = mini@((FLT){{0}} + K(90.0), abs@(x));
  {_EXPARTS32}
  FLT h = scalef@(p + K(1.0), n - K(1.0));
  return h + K(0.25) / h;
}}""")
ASIN32 = (0.04215705394744873, 0.024185476824641228, 0.045469023287296295, 0.0749531015753746, 0.16666752099990845)  # on [0, 1/2]
_ASIN32 = f"""FLT a = abs@(x); MSK big = a > K(0.5);
  FLT z = sel@(big, (K(1.0) - a) * K(0.5), x * x), s = sel@(big, sqrt@(z), a), p = fma@({horner(ASIN32, "z")} * z, s, s);
"""
define("asin", "f32", f"""FLT asin@(FLT x) {{
  {_ASIN32}
  return copysign@(sel@(big, K(0x1.921fb6p+0) - (p + p + K(0x1.777a5cp-25)), p), x);
}}""")
define("acos", "f32", f"""FLT acos@(FLT x) {{
  {_ASIN32}
  FLT q = p + p;
  return sel@(big, sel@(x < K(0.0), K(0x1.921fb6p+1) - (q + K(0x1.777a5cp-24)), q), K(0x1.921fb6p+0) - (copysign@(p, x) + K(0x1.777a5cp-25)));
}}""")
ATAN32 = (-0.0017912291223183274, 0.010903425514698029, -0.031155936419963837, 0.05793425068259239, -0.08401985466480255, 0.10951638221740723,
          -0.14264124631881714, 0.1999853551387787, -0.33333298563957214)  # fmt: skip
define("atan", "f32", f"""FLT atan@(FLT x) {{
  FLT a = abs@(x); MSK big = a > K(1.0);
  FLT t = sel@(big, K(-1.0) / a, a), z = t * t, low = sel@(big, (FLT){{0}} - K(0x1.777a5cp-25), (FLT){{0}});
  FLT p = t + fma@({horner(ATAN32, "z")} * z, t, low);
  return copysign@(sel@(big, (FLT){{0}} + K(0x1.921fb6p+0), (FLT){{0}}) + p, x);
}}""")
define("atan2", "f32", f"""FLT atan2@(FLT y, FLT x) {{
  FLT ax = abs@(x), ay = abs@(y), hi = maxi@(ax, ay), lo = mini@(ax, ay);
  FLT t = sel@(hi == K(0.0), (FLT){{0}}, sel@(lo == hi, (FLT){{0}} + K(1.0), lo / hi)), z = t * t, a = fma@({horner(ATAN32, "z")} * z, t, t);
  a = sel@(ay > ax, K(0x1.921fb6p+0) - (a + K(0x1.777a5cp-25)), a);
  a = sel@(asi@(x) < 0, K(0x1.921fb6p+1) - (a + K(0x1.777a5cp-24)), a);
  return copysign@(sel@((x != x) | (y != y), x + y, a), y);
}}""")
define("hypot", "f32", """FLT hypot@(FLT x, FLT y) {
  FLT a = abs@(x), b = abs@(y), hi = maxi@(a, b), lo = mini@(a, b), r = lo / sel@(hi == K(0.0), (FLT){0} + K(1.0), hi);
  FLT inf = (FLT){0} + __builtin_inff(), y2 = hi * sqrt@(fma@(r, r, (FLT){0} + K(1.0)));
  return sel@((a == inf) | (b == inf), inf, sel@((x != x) | (y != y), x + y, y2));
}""")
ERF32 = (-0.0005892703439016989, 0.004974315354324241, -0.02675417145714959, 0.11281490002406516, -0.3761246493276448, 1.1283791457551724)
# log2 erfc(a) near [0.94, 4]; 2**f = 1 + f Q(f)
LERFC32 = (-0.0017463878193157165, 0.022013890266256775, -0.13003901467199755, -0.940920955987868, -1.6145904993845062, -0.0031335384894209764)
EXP2Q32 = (0.00015476378406350104, 0.001340023480624054, 0.009618003554049421, 0.055503279138083644, 0.24022651349426882, 0.6931472061516458)
define("erf", "f32", f"""FLT erf@(FLT x) {{
  FLT a = mini@((FLT){{0}} + K(4.0), abs@(x)), z = a * a;
  FLT q = {horner(LERFC32, "a")}, n = rint@(q), f = q - n;
  FLT p = scalef@(fma@({horner(EXP2Q32, "f")}, f, (FLT){{0}} + K(1.0)), n);
  FLT y = sel@(a < K(0.9453125), a * {horner(ERF32, "z")}, K(1.0) - p);
  return copysign@(y, x);
}}""")
# exp(a a) erfc(a) (a + 2) / 2 and exp(a a / 2) N(-a) (a + 3) / 3 as polynomials in u = (a - k) / (a + k); the square in two parts
ERFCG32 = (1.8925685481008259e-06, 3.5830911656375974e-05, 2.1166904843994416e-05, -0.00029537364025600255, -0.0004139307711739093,
           0.0015292949974536896, 0.0032367906533181667, -0.010751919820904732, -0.018220633268356323, 0.13973572850227356, -0.34358036518096924,
           0.5107913613319397)  # fmt: skip
NDTRG32 = (1.7617858247831464e-05, 4.25301659561228e-05, -8.177311246981844e-05, -0.00034294126089662313, 0.0003421556029934436,
           0.0023226640187203884, -0.0034877401776611805, -0.01575416512787342, 0.07667259871959686, -0.16977733373641968, 0.24302789568901062)  # fmt: skip
_NEAR = f"c = sel@(a < K(0.5), fma@(-a, {horner(ERF32, '(x * x)')}, (FLT){{0}} + K(1.0)), c);"
_NEARN = f"c = sel@(a < K(0.75), fma@(-a * K(0.5), {horner(tuple(c * 0.5 ** (0.5 + 5 - k) for k, c in enumerate(ERF32)), '(x * x)')}, (FLT){{0}} + K(0.5)), c);"
# beyond the ends results are _whole and 0; what is 0 is so before it is scaled, as in exp; `up`: how many powers of 2 what is small is larger
for _name, _lo, _hi, _zero, _k, _half, _coefs, _whole, _far, _near in (
    ("erfc", -4.5, 10.1, 10.07, 2.0, "a", ERFCG32, 2.0, "<", _NEAR), ("ndtr", -14.3, 6.5, 14.2, 3.0, "(a * K(0.5))", NDTRG32, 1.0, ">", _NEARN)
):
    define(f"{_name}up", "f32", f"""FLT {_name}up@(FLT x, FLT up) {{
  FLT a = abs@(maxi@((FLT){{0}} + K({_lo}), mini@((FLT){{0}} + K({_hi}), x))), b = a + K({_k}), d = K({_k}) / b;
  FLT dl = fma@(d, (b - K({_k})) - a, fma@(-d, b, (FLT){{0}} + K({_k}))) * (d * K({1 / _k!r}));
  FLT u = fma@((FLT){{0}} - K(2.0), dl, fma@((FLT){{0}} - K(2.0), d, (FLT){{0}} + K(1.0)));
  FLT s = {_half} * a, l = fma@({_half}, a, -s), n = rint@(s * K(-0x1.715476p+0));
  FLT r = fma@(n, (FLT){{0}} - K(0x1.62e4p-1), -s); r = fma@(n, (FLT){{0}} - K(0x1.7f7d1cp-20), r) - l;
  FLT g = {horner(_coefs, "u")}; g = fma@(d, g, dl * g); FLT p = {horner(EXP32, "r")}, c = scalef@(sel@(a > K({_zero}), (FLT){{0}}, fma@(fma@(p * r, r, r), g, g)), n + up);
  {_near}
  return sel@(x {_far} K(0.0), K({_whole}) - c, c);
}}""")
    define(_name, "f32", f"FLT {_name}@(FLT x) {{ return {_name}up@(x, (FLT){{0}}); }}")
define("gelu", "f32", """FLT gelu@(FLT x) {
  MSK low = x < K(-8.0); FLT up = sel@(low, (FLT){0} + K(48.0), (FLT){0});  /* of a denormal N bits would be missing */
  return x * ndtrup@(x, up) * sel@(low, (FLT){0} + K(0x1p-48), (FLT){0} + K(1.0));
}""")
define("tan", "f32", f"FLT tan@(FLT x) {{{_TRIG32}  MSK o = (q & 1) != 0; return sel@(x == K(0.0), x, sel@(o, -c, s) / sel@(o, s, c)); }}")
# erfinv(x) / x by w = -log(1 - x^2): in w - 5/2 below 5, in sqrt w - 3 above (M. Giles, Approximating the erfinv function; own coefficients)
ERFINVA32 = (-1.4932013958635082e-10, -8.698477493851442e-09, 2.6522686269458973e-08, 4.647769173971028e-07, -3.4888364552898565e-06,
             -4.95617223350564e-06, 0.0002184351033065468, -0.0012527562212198973, -0.004177515860646963, 0.24664029479026794,
             1.5014094114303589)  # fmt: skip
ERFINVB32 = (0.00010888098768191412, -0.0003026935155503452, -4.696598261944018e-05, 0.001476122997701168, -0.0036025340668857098,
             0.005690703634172678, -0.007636171765625477, 0.009444760158658028, 1.0016748905181885, 2.832976818084717)  # fmt: skip
define("erfinv", "f32", f"""FLT erfinv@(FLT x) {{
  FLT a = abs@(x), w = -log@((K(1.0) - a) * (K(1.0) + a)), t = w - K(2.5), y = {horner(ERFINVA32, "t")};
  MSK far = not@(w < K(5.0));
  if (any%(far)) {{ FLT v = sqrt@(w) - K(3.0); y = sel@(far, sel@(w == __builtin_inff(), w, {horner(ERFINVB32, "v")}), y); }}
  return x * y;
}}""")
# log2 |x| in two parts: s = f / (2 + f), 2 s + s^3 Q(s^2), times log2 e; then y times that, and 2 to it
POW32 = (0.38602545857429504, 0.20403248071670532, 0.2862726151943207, 0.3999935984611511, 0.6666666865348816)
define("pow", "f32", f"""FLT pow@(FLT x, FLT y) {{
  FLT a = abs@(x), e, m = split@(a, &e), f = m - K(1.0), d = f + K(2.0), dl = f - (d - K(2.0)), i = K(1.0) / d;
  FLT s = f * i, sl = (fma@(-s, d, f) - s * dl) * i, z = s * s, zl = fma@(s, s, -z) + K(2.0) * s * sl;
  FLT q = z * {horner(POW32[:-1], "z")}, c = q + K(0x1.555556p-1), cl = (q - (c - K(0x1.555556p-1))) - K(0x1.555556p-26);
  FLT u = z * c, ul = fma@(z, c, -u) + (z * cl + zl * c), v = s * u, vl = fma@(s, u, -v) + (s * ul + sl * u);
  FLT t = s + s, k = t + v, kl = (v - (k - t)) + (vl + sl + sl);
  FLT h = k * K(0x1.715476p+0), l = fma@(k, (FLT){{0}} + K(0x1.715476p+0), -h) + fma@(k, (FLT){{0}} + K(0x1.4ae0cp-26), kl * K(0x1.715476p+0));
  FLT b = e + h, w = b + (l = (h - (b - e)) + l); l = l - (w - b);
  FLT p = y * w, pl = fma@(y, w, -p) + y * l;
  p = maxi@((FLT){{0}} + K(-300.0), mini@((FLT){{0}} + K(300.0), p)); pl = sel@(abs@(p) < K(290.0), pl, (FLT){{0}});
  FLT n = rint@(p), g = (p - n) + pl, r = g * K(0x1.62e43p-1); r = fma@(g, (FLT){{0}} + K(-0x1.05c61p-29), r);
  FLT P = {horner(EXP32, "r")}, out = scalef@(fma@(P * r, r, r) + K(1.0), n);
  FLT inf = (FLT){{0}} + __builtin_inff();
  if (any%(not@((x > K(0.0)) & (x < inf) & (abs@(y) < inf)))) {{
    FLT yi = trunc@(y), half = y * K(0.5);
    MSK whole = yi == y, odd = whole & (trunc@(half) != half), up = (y > K(0.0)) != (a < K(1.0));
    out = sel@((a == K(0.0)) | (a == inf), sel@((a == K(0.0)) == (y < K(0.0)), inf, (FLT){{0}}), out);
    out = sel@(abs@(y) == inf, sel@(a == K(1.0), (FLT){{0}} + K(1.0), sel@(up, inf, (FLT){{0}})), out);
    MSK minus = asi@(x) < 0;
    out = sel@(minus & odd, -out, out);
    out = sel@(minus & not@(whole) & (a != K(0.0)) & (a < inf), (FLT){{0}} + __builtin_nanf(""), out);
    out = sel@((x != x) | (y != y), x + y, out);
    out = sel@((x == K(1.0)) | (y == K(0.0)), (FLT){{0}} + K(1.0), out);
  }}
  return out;
}}""")

# ---------------------------------------------------------------- f64
EXP64 = (2.0924538107413668e-09, 2.5109147283811902e-08, 2.7557242440109814e-07, 2.7557243912083e-06, 2.4801587360955268e-05,
         0.00019841269886400605, 0.0013888888888866616, 0.008333333333321532, 0.0416666666666667, 0.16666666666666677, 0.5)  # fmt: skip
_RED64 = """FLT n = rint@(x * K(0x1.71547652b82fep+0));
  FLT r = fma@(n, (FLT){0} - K(0x1.62e42fee00000p-1), x); r = fma@(n, (FLT){0} - K(0x1.a39ef35793c76p-33), r);"""
define("exp", "f64", f"""FLT exp@(FLT x) {{
  x = maxi@((FLT){{0}} + K(-760.0), mini@((FLT){{0}} + K(710.0), x));
  {_RED64}
  FLT p = {horner(EXP64, "r")};
  return scalef@(fma@(p * r, r, r) + K(1.0), n);
}}""")
define("exp2", "f64", f"""FLT exp2@(FLT x) {{
  x = maxi@((FLT){{0}} + K(-1100.0), mini@((FLT){{0}} + K(1025.0), x));
  FLT n = rint@(x), f = x - n, r = f * K(0x1.62e42fefa39efp-1); r = fma@(f, (FLT){{0}} + K(0x1.abc9e3b39803fp-56), r);
  FLT p = {horner(EXP64, "r")};
  return scalef@(fma@(p * r, r, r) + K(1.0), n);
}}""")
define("expm1", "f64", f"""FLT expm1@(FLT v) {{
  FLT x = maxi@((FLT){{0}} + K(-60.0), mini@((FLT){{0}} + K(710.0), v));
  {_RED64}
  FLT p = {horner(EXP64, "r")};
  p = fma@(p * r, r, r);
  FLT t = scalef@((FLT){{0}} + K(0.5), n);
  return sel@(v == K(0.0), v, fma@(p, t, t - K(0.5)) * K(2.0));
}}""")
LOG64 = (0.14799090521841746, 0.15313753365782867, 0.1818357525619774, 0.22222198376830685, 0.2857142874415539, 0.3999999999940745,
         0.6666666666666735)  # fmt: skip
define("logm", "f64", f"""FLT logm@(FLT x, FLT *e) {{
  MSK tiny = x < K(0x1p-1022); x = sel@(tiny, x * K(0x1p52), x);
  INT b = asi@(x), k = (b - 0x3fe6a09e667f3bcdll) >> 52;
  FLT f = asf@(b - (k << 52)) - K(1.0), s = f / (f + K(2.0)), z = s * s, h = f * f * K(0.5);
  *e = tof@(k) - sel@(tiny, (FLT){{0}} + K(52.0), (FLT){{0}});
  return f - (h - s * (h + z * {horner(LOG64, "z")}));
}}""")
_LOGEND = """
  y = sel@(x == K(0.0), (FLT){0} - __builtin_inf(), y);
  y = sel@(x < K(0.0), (FLT){0} + __builtin_nan(""), y);
  y = sel@(x == __builtin_inf(), x, y); return sel@(x != x, x, y);
}"""
define("log", "f64", "FLT log@(FLT x) { FLT e, m = logm@(x, &e); FLT y = fma@(e, (FLT){0} + K(0x1.62e42fee00000p-1), fma@(e, (FLT){0} + K(0x1.a39ef35793c76p-33), m));" + _LOGEND)
define("log2", "f64", "FLT log2@(FLT x) { FLT e, m = logm@(x, &e); FLT y = fma@(m, (FLT){0} + K(0x1.71547652b82fep+0), e);" + _LOGEND)
define("log10", "f64", "FLT log10@(FLT x) { FLT e, m = logm@(x, &e); FLT y = fma@(e, (FLT){0} + K(0x1.34413509f79ffp-2), m * K(0x1.bcb7b1526e50ep-2));" + _LOGEND)
define("log1p", "f64", "FLT log1p@(FLT v) { FLT x = v + K(1.0), c = sel@(v >= K(1.0), K(1.0) - (x - v), v - (x - K(1.0))) / x, e, m = logm@(x, &e);"
       " c = sel@(x > K(0.0), sel@(x < __builtin_inf(), c, (FLT){0}), (FLT){0});"
       " FLT y = fma@(e, (FLT){0} + K(0x1.62e42fee00000p-1), fma@(e, (FLT){0} + K(0x1.a39ef35793c76p-33), c) + m); y = sel@(v == K(0.0), v, y);" + _LOGEND)
SIN64 = (-7.578624682773822e-13, 1.6058365176476955e-10, -2.5052104900407086e-08, 2.755731921414836e-06, -0.00019841269841254988,
         0.008333333333333323, -0.16666666666666666)  # fmt: skip
COS64 = (4.7380483236104937e-14, -1.1470291941083438e-11, 2.087675435467212e-09, -2.7557319215325723e-07, 2.480158730157138e-05,
         -0.0013888888888888874, 0.041666666666666664)  # fmt: skip
_TRIG64 = f"""
  FLT n = rint@(x * K(0x1.45f306dc9c883p-1));
  FLT r = fma@(n, (FLT){{0}} - K(0x1.921fb54442d18p+0), x); r = fma@(n, (FLT){{0}} - K(0x1.1a62633145c07p-54), r);
  r = fma@(n, (FLT){{0}} + K(0x1.f1976b7ed8fbcp-110), r);
  INT q = toi@(n);
  MSK w = abs@(x) < K(1e7);
  if (any%(not@(w))) {{ FLT big; INT bq; reduce@(x, &big, &bq); r = sel@(w, r, big); q = sel%(w, q, bq); }}
  FLT z = r * r;
  FLT s = fma@({horner(SIN64, "z")} * z, r, r);
  FLT c = fma@({horner(COS64, "z")} * z, z, fma@(z, (FLT){{0}} - K(0.5), (FLT){{0}} + K(1.0)));
"""
define("sin", "f64", f"FLT sin@(FLT x) {{{_TRIG64}  FLT y = sel@((q & 1) != 0, c, s); return sel@(x == K(0.0), x, asf@(asi@(y) ^ ((q & 2) << 62))); }}")
define("cos", "f64", f"FLT cos@(FLT x) {{{_TRIG64}  FLT y = sel@((q & 1) != 0, s, c); return asf@(asi@(y) ^ (((q + 1) & 2) << 62)); }}")
define("tan", "f64", f"FLT tan@(FLT x) {{{_TRIG64}  MSK o = (q & 1) != 0; return sel@(x == K(0.0), x, sel@(o, -c, s) / sel@(o, s, c)); }}")
ATAN64 = (0.01518165627851616, -0.033461227290394205, 0.045029837431802944, -0.052182659081441214, 0.05877000385992547, -0.06666224581330005,
          0.07692282612054747, -0.09090908138080524, 0.11111111088000175, -0.1428571428538518, 0.19999999999997647, -0.33333333333333326)  # fmt: skip
define("atan", "f64", f"""FLT atan@(FLT x) {{
  FLT a = abs@(x); MSK big = a > K(2.414213562373095), mid = a > K(0.4142135623730951);
  FLT y = sel@(big, K(-1.0) / a, sel@(mid, (a - K(1.0)) / (a + K(1.0)), a)), z = y * y;
  FLT base = sel@(big, (FLT){{0}} + K(0x1.921fb54442d18p+0), sel@(mid, (FLT){{0}} + K(0x1.921fb54442d18p-1), (FLT){{0}}));
  FLT low = sel@(big, (FLT){{0}} + K(0x1.1a62633145c07p-54), sel@(mid, (FLT){{0}} + K(0x1.1a62633145c07p-55), (FLT){{0}}));
  FLT p = fma@({horner(ATAN64, "z")} * z, y, low) + y;
  return copysign@(base + p, x);
}}""")
define("atan2", "f64", """FLT atan2@(FLT y, FLT x) {
  FLT ax = abs@(x), ay = abs@(y), hi = max@(ax, ay), lo = min@(ax, ay);
  FLT t = sel@(hi == K(0.0), (FLT){0}, sel@(lo == hi, (FLT){0} + K(1.0), lo / hi)), a = atan@(t);
  a = sel@(ay > ax, (K(0x1.921fb54442d18p+0) - a) + K(0x1.1a62633145c07p-54), a);
  a = sel@(asi@(x) < 0, (K(0x1.921fb54442d18p+1) - a) + K(0x1.1a62633145c07p-53), a);
  return copysign@(sel@((x != x) | (y != y), x + y, a), y);
}""")
define("asin", "f64", "FLT asin@(FLT x) { FLT a = abs@(x); return copysign@(atan@(a / sqrt@((K(1.0) - a) * (K(1.0) + a))), x); }")
define("acos", "f64", "FLT acos@(FLT x) { return atan2@(sqrt@((K(1.0) - x) * (K(1.0) + x)), x); }")
define("sinh", "f64", """FLT sinh@(FLT x) {
  FLT a = abs@(x), e = expm1@(a), u = exp@(a * K(0.5));
  return copysign@(sel@(a > K(700.0), (u * K(0.5)) * u, (e + e / (e + K(1.0))) * K(0.5)), x);
}""")
define("cosh", "f64", """FLT cosh@(FLT x) {
  FLT a = abs@(x), t = exp@(a), u = exp@(a * K(0.5));
  return sel@(a > K(700.0), (u * K(0.5)) * u, t * K(0.5) + K(0.5) / t);
}""")
define("tanh", "f64", "FLT tanh@(FLT x) { FLT a = mini@((FLT){0} + K(22.0), abs@(x)), e = expm1@(a + a); return copysign@(e / (e + K(2.0)), x); }")
for _t in ("f32", "f64"):
    define("asinh", _t, """FLT asinh@(FLT x) {
  FLT a = abs@(x), b = sel@(a > K(1e8), (FLT){0} + K(1.0), a), q = b * b;
  FLT y = log1p@(b + q / (sqrt@(q + K(1.0)) + K(1.0)));
  return copysign@(sel@(a > K(1e8), log@(a) + K(0x1.62e42fefa39efp-1), y), x);
}""")
for _t in ("f32", "f64"):
    define("acosh", _t, """FLT acosh@(FLT x) {
  FLT t = sel@(x > K(1e8), (FLT){0} + K(1.0), x) - K(1.0), y = log1p@(t + sqrt@(t * (t + K(2.0))));
  y = sel@(x > K(1e8), log@(x) + K(0x1.62e42fefa39efp-1), y);
  return sel@(x < K(1.0), (FLT){0} + __builtin_nan(""), y);
}""")
for _t in ("f32", "f64"):
    define("atanh", _t, "FLT atanh@(FLT x) { FLT a = abs@(x); return copysign@(log1p@((a + a) / (K(1.0) - a)) * K(0.5), x); }")
ERF64 = (-7.801196917547424e-10, 1.3722979397846733e-08, -1.620917631061177e-07, 1.6447517679364533e-06, -1.492474465859819e-05,
         0.00012055295319951238, -0.0008548325989667251, 0.005223977607422596, -0.026866170643276083, 0.11283791670945252,
         -0.3761263890318355, 1.1283791670955126)  # fmt: skip
# exp(a a) erfc(a) (1 + 2 a) as a polynomial in (a - 2) / (a + 2), a in [0.45, 28]
ERFCX64 = (-9.670316094745119e-08, 3.857134285608631e-07, 1.3108848398773268e-07, -1.3216626224022518e-06, -9.449560103120633e-07,
           1.939810416243629e-06, 5.289278555623924e-06, 3.489044838096149e-06, -1.3489083578969994e-05, -3.63535612740354e-05,
           -1.5170294920571515e-06, 0.00015102516460036863, 0.0002063692339293902, -0.00045433904542788265, -0.0014568142258774854,
           0.0012713388270592972, 0.00872265389593177, -0.008034015076379717, -0.054220000992746036, 0.16405128003331904,
           -0.16603039761528007, -0.09276382658574525, 1.2769783815525286)  # fmt: skip
# a and a square in two parts
define("erfcsq", "f64", f"""FLT erfcsq@(FLT a, FLT s, FLT l) {{
  FLT t = (a - K(2.0)) / (a + K(2.0)), g = {horner(ERFCX64, "t")} / fma@(a, (FLT){{0}} + K(2.0), (FLT){{0}} + K(1.0)), w = exp@(-s);
  return fma@(-l * w, g, w * g);
}}""")
define("erfcpos", "f64", "FLT erfcpos@(FLT a) { a = mini@((FLT){0} + K(28.0), a); FLT s = a * a; return erfcsq@(a, s, fma@(a, a, -s)); }")
define("erf", "f64", f"""FLT erf@(FLT x) {{
  FLT a = abs@(x), z = a * a;
  return copysign@(sel@(a < K(1.0), a * {horner(ERF64, "z")}, K(1.0) - erfcpos@(a)), x);
}}""")
define("erfc", "f64", f"""FLT erfc@(FLT x) {{
  FLT a = abs@(x), z = a * a, c = erfcpos@(a), s = K(1.0) - x * {horner(ERF64, "z")};
  return sel@(a < K(0.5), s, sel@(x < K(0.0), K(2.0) - c, c));
}}""")
define("gelu", "f64", "FLT gelu@(FLT x) { return x * ndtr@(x); }")
define("ndtr", "f64", f"""FLT ndtr@(FLT x) {{
  FLT a = mini@((FLT){{0}} + K(39.5), abs@(x)), h = a * K(0.5), s = h * a, v = a * K(0x1.6a09e667f3bcdp-1);
  FLT c = K(0.5) * sel@(a < K(0.75), K(1.0) - v * {horner(ERF64, "s")}, erfcsq@(v, s, fma@(h, a, -s)));
  return sel@(x > K(0.0), K(1.0) - c, c);
}}""")
# log |x| in two parts: 2 s + s^3 (2/3 + z POW64(z)) with s = f / (2 + f) in two parts, z = s s; then y times that, and exp
POW64 = (0.1319635383611494, 0.1325681482562792, 0.15386757464845896, 0.18181784364100967, 0.2222222251995743, 0.285714285700994,
         0.40000000000002256)  # fmt: skip
define("pow", "f64", f"""FLT pow@(FLT x, FLT y) {{
  FLT a = abs@(x); MSK tiny = a < K(0x1p-1022); FLT v = sel@(tiny, a * K(0x1p52), a);
  INT b = asi@(v), k = (b - 0x3fe6a09e667f3bcdll) >> 52;
  FLT f = asf@(b - (k << 52)) - K(1.0), e = tof@(k) - sel@(tiny, (FLT){{0}} + K(52.0), (FLT){{0}});
  FLT d = f + K(2.0), dl = f - (d - K(2.0)), s = f / d, sl = (fma@(-s, d, f) - s * dl) / d;
  FLT z = s * s, zl = fma@(s, s, -z) + K(2.0) * s * sl;
  FLT q = z * {horner(POW64, "z")};
  FLT c = q + K(0x1.5555555555555p-1), cl = (q - (c - K(0x1.5555555555555p-1))) + K(0x1.5555555555555p-55);
  FLT u = z * c, ul = fma@(z, c, -u) + (z * cl + zl * c);
  FLT t = s * u, tl = fma@(s, u, -t) + (s * ul + sl * u);
  FLT m = s + s, h0 = m + t, l0 = (t - (h0 - m)) + (tl + sl + sl);
  FLT g = e * K(0x1.62e42fee00000p-1), h1 = g + h0, w1 = h1 - g, l1 = (g - (h1 - w1)) + (h0 - w1) + fma@(e, (FLT){{0}} + K(0x1.a39ef35793c76p-33), l0);
  FLT h = h1 + l1, l = l1 - (h - h1);
  FLT p = y * h, pl = fma@(y, h, -p) + y * l;
  p = maxi@((FLT){{0}} + K(-800.0), mini@((FLT){{0}} + K(800.0), p)); pl = sel@(abs@(p) < K(790.0), pl, (FLT){{0}});
  FLT n = rint@(p * K(0x1.71547652b82fep+0)), r = fma@(n, (FLT){{0}} - K(0x1.62e42fee00000p-1), p);
  r = fma@(n, (FLT){{0}} - K(0x1.a39ef35793c76p-33), r) + pl;
  FLT P = {horner(EXP64, "r")}, out = scalef@(fma@(P * r, r, r) + K(1.0), n);
  FLT inf = (FLT){{0}} + __builtin_inf(), yi = trunc@(y), half = y * K(0.5);
  MSK whole = yi == y, odd = whole & (trunc@(half) != half);
  MSK up = (y > K(0.0)) != (a < K(1.0));
  out = sel@((a == K(0.0)) | (a == inf), sel@((a == K(0.0)) == (y < K(0.0)), inf, (FLT){{0}}), out);
  out = sel@(abs@(y) == inf, sel@(a == K(1.0), (FLT){{0}} + K(1.0), sel@(up, inf, (FLT){{0}})), out);
  MSK minus = asi@(x) < 0;
  out = sel@(minus & odd, -out, out);
  out = sel@(minus & not@(whole) & (a != K(0.0)) & (a < inf), (FLT){{0}} + __builtin_nan(""), out);
  out = sel@((x != x) | (y != y), x + y, out);
  return sel@((x == K(1.0)) | (y == K(0.0)), (FLT){{0}} + K(1.0), out);
}}""")
define("hypot", "f64", """FLT hypot@(FLT x, FLT y) {
  FLT a = abs@(x), b = abs@(y), hi = max@(a, b), lo = min@(a, b), r = lo / sel@(hi == K(0.0), (FLT){0} + K(1.0), hi);
  FLT inf = (FLT){0} + __builtin_inf(), y2 = hi * sqrt@(fma@(r, r, (FLT){0} + K(1.0)));
  return sel@((a == inf) | (b == inf), inf, y2);
}""")
define("lgamma", "f64", """FLT lgamma@(FLT x) {
  MSK neg = x < K(0.5); FLT v = sel@(neg, K(1.0) - x, x), p = (FLT){0} + K(1.0), w = v;
  for (int k = 0; k < 9; k++) { MSK s = w < K(9.0); p = sel@(s, p * w, p); w = sel@(s, w + K(1.0), w); }
  FLT z = K(1.0) / (w * w), q = (FLT){0} + K(-3617.0) / K(122400.0);
  q = fma@(q, z, (FLT){0} + K(1.0) / K(156.0)); q = fma@(q, z, (FLT){0} - K(691.0) / K(360360.0)); q = fma@(q, z, (FLT){0} + K(1.0) / K(1188.0));
  q = fma@(q, z, (FLT){0} - K(1.0) / K(1680.0)); q = fma@(q, z, (FLT){0} + K(1.0) / K(1260.0)); q = fma@(q, z, (FLT){0} - K(1.0) / K(360.0));
  q = fma@(q, z, (FLT){0} + K(1.0) / K(12.0));
  FLT y = (w - K(0.5)) * log@(w) - w + K(0.9189385332046727) + q / w - log@(p);
  FLT inf = (FLT){0} + __builtin_inf();
  y = sel@(v == inf, inf, sel@((v == K(1.0)) | (v == K(2.0)), (FLT){0}, y));
  if (any%(neg)) {
    FLT fr = abs@(x - rint@(x));
    FLT other = -log@(sel@(fr < K(1e-9), fr, sin@(fr * K(3.141592653589793)) * K(0.3183098861837907))) - y;
    y = sel@(neg, sel@(fr == K(0.0), inf, other), y);
  }
  return sel@(x == -inf, inf, sel@(x != x, x, y));
}""")
# as exact as float32 asks for: a polynomial on [1, 3) that holds the zeros at 1 and 2, Stirling's formula from 3 on; what is negative has zeros
# that float32 comes close to, and goes the long way
LGAMMA_NEAR = (-9.682282667123032e-06, 1.931353576068967e-05, -7.2672308673153105e-06, 2.0234883237694713e-05, -9.175248379381169e-05,
               0.00019581595226639205, -0.0004019720484916625, 0.0009104976576300077, -0.002108944540686994, 0.004999482578958968,
               -0.012384114773462473, 0.03296494668987689, -0.10031730379275274, 0.42278433566013013)  # fmt: skip
LGAMMA_TAIL = (-0.0004557053373686696, 0.0007849324685167633, -0.002777595231264879, 0.08333333272913361)
define("lgammas", "f64", f"""FLT lgammas@(FLT x) {{
  FLT v = abs@(x); INT b = asi@(v), k = (b - 0x3fe6a09e667f3bcdll) >> 52;
  FLT f = asf@(b - (k << 52)) - K(1.0), d = f + K(2.0), i = K(1.0) / (d * v), s = f * (i * v), r = i * d, z = s * s;
  FLT l = fma@(tof@(k), (FLT){{0}} + K(0x1.62e42fefa39efp-1), fma@({horner(tuple(2 / (2 * j + 3) for j in range(4, -1, -1)), "z")} * z, s, s + s));
  MSK low = v < K(1.0); FLT u = v - sel@(low, (FLT){{0}} + K(1.0), (FLT){{0}} + K(2.0));
  FLT near = fma@(u * (u + K(1.0)), {horner(LGAMMA_NEAR, "u")}, sel@(low, -l, (FLT){{0}}));
  FLT far = fma@(v - K(0.5), l, K(0.9189385332046727) - v) + r * {horner(LGAMMA_TAIL, "(r * r)")};
  FLT y = sel@(v < K(3.0), near, far);
  y = sel@((v == K(0.0)) | (v == __builtin_inf()), (FLT){{0}} + __builtin_inf(), sel@(x != x, x, y));
  MSK neg = x < K(0.0);
  if (any%(neg)) y = sel@(neg, lgamma@(x), y);
  return y;
}}""")
define("digamma", "f64", """FLT digamma@(FLT x) {
  MSK neg = x < K(0.0); FLT v = sel@(neg, K(1.0) - x, x), s = (FLT){0};
  for (int k = 0; k < 12; k++) { MSK m = v < K(12.0); s = sel@(m, s - K(1.0) / v, s); v = sel@(m, v + K(1.0), v); }
  FLT z = K(1.0) / (v * v), q = (FLT){0} + K(1.0) / K(12.0);
  q = fma@(q, z, (FLT){0} - K(691.0) / K(32760.0)); q = fma@(q, z, (FLT){0} + K(1.0) / K(132.0)); q = fma@(q, z, (FLT){0} - K(1.0) / K(240.0));
  q = fma@(q, z, (FLT){0} + K(1.0) / K(252.0)); q = fma@(q, z, (FLT){0} - K(1.0) / K(120.0)); q = fma@(q, z, (FLT){0} + K(1.0) / K(12.0));
  FLT y = s + log@(v) - K(0.5) / v - z * q, inf = (FLT){0} + __builtin_inf();
  y = sel@(v == inf, inf, y);
  if (any%(neg)) {
    FLT r = x - rint@(x), refl = y - K(3.141592653589793) / tan@(r * K(3.141592653589793));
    y = sel@(neg, sel@(r == K(0.0), (FLT){0} + __builtin_nan(""), refl), y);
  }
  y = sel@(x == K(0.0), (FLT){0} - K(1.0) / x, y);
  return sel@((x != x) | (x == -inf), (FLT){0} + __builtin_nan(""), y);
}""")
define("erfinv", "f64", """FLT erfinv@(FLT y) {
  FLT a = abs@(y), w = log@((K(1.0) - a) * (K(1.0) + a)), t = w * K(0.5) + K(4.330746750799873);
  FLT x = sqrt@(maxi@((FLT){0}, sqrt@(maxi@((FLT){0}, t * t - w * K(6.802721088435375))) - t));
  for (int k = 0; k < 3; k++) {
    FLT f = sel@(a < K(0.5), erf@(x) - a, (K(1.0) - a) - erfc@(x)), d = exp@(-x * x) * K(1.1283791670955126);
    f = f / d; x = x - f / fma@(x, f, (FLT){0} + K(1.0));
  }
  x = sel@(a == K(1.0), (FLT){0} + __builtin_inf(), sel@(a == K(0.0), a, x));
  return sel@(a <= K(1.0), copysign@(x, y), (FLT){0} + __builtin_nan(""));
}""")

# ---------------------------------------------------------------- special functions
# Modified Bessel functions: power series below 30 (all terms positive), the asymptotic series from there on
define("besseli", "f64", """FLT besseli@(FLT a, f64 o, int scaled) {
  FLT b = mini@((FLT){0} + K(30.0), a), q = b * b * K(0.25), t = o == 0 ? (FLT){0} + K(1.0) : b * K(0.5), s = t;
  for (int k = 1; k < 80; k++) { t = t * q * (1.0 / (k * (k + o))); s = s + t; }
  FLT v = maxi@((FLT){0} + K(30.0), a), z = K(0.125) / v, u = (FLT){0} + K(1.0), w = u;
  for (int k = 1; k < 25; k++) { u = u * z * (((2 * k - 1) * (2 * k - 1) - 4 * o) / k); w = w + u; }
  w = w / (sqrt@(v) * K(2.5066282746310002));
  FLT h = exp@(v * K(0.5)), far = scaled ? w : w * h * h;  /* of infinity NaN, as in eager */
  return sel@(a < K(30.0), scaled ? s * exp@(-b) : s, sel@(a == a, far, a));
}""")
for _name, _o, _scaled in (("i0", "0.0", 0), ("i0e", "0.0", 1), ("i1", "1.0", 0), ("i1e", "1.0", 1)):
    _value = f"besseli@(abs@(x), {_o}, {_scaled})"
    define(_name, "f64", f"FLT {_name}@(FLT x) {{ FLT v = {_value}; return {'v' if _o == '0.0' else 'sel@(x < K(0.0), -v, v)'}; }}")
# exp(x x) erfc(x); from 28 on the asymptotic series
define("erfcx", "f64", f"""FLT erfcx@(FLT x) {{
  FLT a = maxi@((FLT){{0}} + K(0.45), mini@((FLT){{0}} + K(28.0), x)), t = (a - K(2.0)) / (a + K(2.0));
  FLT g = {horner(ERFCX64, "t")} / fma@(a, (FLT){{0}} + K(2.0), (FLT){{0}} + K(1.0));
  FLT v = maxi@((FLT){{0}} + K(28.0), x), z = K(0.5) / v / v;
  FLT far = K(0.5641895835477563) / v * (K(1.0) - z * (K(1.0) - K(3.0) * z * (K(1.0) - K(5.0) * z * (K(1.0) - K(7.0) * z * (K(1.0) - K(9.0) * z * (K(1.0) - K(11.0) * z))))));
  FLT b = maxi@((FLT){{0}} - K(26.6287357137514), mini@((FLT){{0}} + K(0.45), x)), s = b * b, e = exp@(s);
  e = sel@(x < K(-26.6287357137514), (FLT){{0}} + K(0x1p1023) * K(2.0), e);
  return sel@(x < K(-26.6287357137514), e, sel@(x < K(0.45), fma@(e, fma@(b, b, -s), e) * erfc@(b), sel@(x < K(28.0), g, sel@(x == x, far, x))));
}}""")
define("logndtr", "f64", """FLT logndtr@(FLT x) {
  FLT a = x * K(-0x1.6a09e667f3bcdp-1), b = maxi@((FLT){0} + K(0.7), a);
  FLT low = log@(erfcx@(b) * K(0.5)) - x * (x * K(0.5)), high = log1p@(erfc@(-a) * K(-0.5));
  return sel@(x < K(-1.0), sel@(abs@(x) == K(0x1p1023) * K(2.0), x, low), high);
}""")
# Newton on log N(x) = log p from the left, in the lower half; N(-x) = 1 - N(x)
define("ndtri", "f64", """FLT ndtri@(FLT p) {
  FLT q = mini@(p, K(1.0) - p), l = log@(q), x = -sqrt@(l * K(-2.0));
  x = sel@(q > K(0.02), (q - K(0.5)) * K(2.5066282746310002), x);
  for (int k = 0; k < 8; k++) {
    FLT c = logndtr@(x), d = exp@(fma@(x * K(-0.5), x, -c)) * K(0.3989422804014327);
    x = x - (c - l) / d;
  }
  FLT inf = (FLT){0} + K(0x1p1023) * K(2.0);
  x = sel@(p > K(0.5), -x, x);
  x = sel@(p == K(0.0), -inf, sel@(p == K(1.0), inf, x));
  return sel@((p >= K(0.0)) & (p <= K(1.0)), x, inf - inf);
}""")

# ---------------------------------------------------------------- f32 through f64
VIA_F64 = frozenset(["lgamma", "digamma", "i0", "i0e", "i1", "i1e", "erfcx", "log_ndtr", "ndtri"])
for _name in sorted(VIA_F64):
    _text = _name.replace("_", "")
    define(_text, "f32", f"FLT {_text}@(FLT x) {{ return tos@({'lgammas' if _text == 'lgamma' else _text}$(tod@(x))); }}")

# ---------------------------------------------------------------- piecewise polynomials, the coefficients chosen by permutations of registers (AVX-512)


def pieces(f: Callable[[float], float], parts: Sequence[tuple[float, float, float]], degree: int) -> list[list[float]]:
    """Coefficients by power, then by part. A part (middle, half width, unit): f(middle + unit t) interpolated where Chebyshev says, |unit t| <= half."""
    table = []
    for middle, half, unit in parts:
        nodes = [half / unit * cos(pi * (k + 0.5) / (degree + 1)) for k in range(degree + 1)]
        diff = [f(middle + unit * t) for t in nodes]  # Newton's divided differences, then powers of t
        for k in range(1, degree + 1):
            for j in range(degree, k - 1, -1):
                diff[j] = (diff[j] - diff[j - 1]) / (nodes[j] - nodes[j - k])
        coefs = [0.0] * (degree + 1)
        for d, t in zip(diff[::-1], nodes[::-1], strict=True):
            coefs = [d - t * coefs[0], *(coefs[k - 1] - t * coefs[k] for k in range(1, degree + 1))]
        table.append(coefs)
    return [[row[k] for row in table] for k in range(degree + 1)]


def _chosen(name: str, rows: list[list[float]], t: str) -> tuple[str, str]:
    """(tables, Horner's chain in `t` with coefficients chosen by k), 32 entries each."""
    def pick(j: int) -> str:
        return f"__builtin_ia32_vpermt2varps512_mask(k, *(const xf32 *)T[{j}], *(const xf32 *)(T[{j}] + 16), (unsigned short)-1)"

    numbers = ",\n    ".join("{" + ", ".join(f"{c:.9g}f" if "." in f"{c:.9g}" or "e" in f"{c:.9g}" else f"{c:.9g}.0f" for c in row) + "}" for row in rows)
    text = pick(len(rows) - 1)
    for j in range(len(rows) - 2, -1, -1):
        text = f"fma_xf32({text}, {t}, {pick(j)})"
    return f"static const f32 T[{len(rows)}][32] __attribute__((aligned(64))) = {{{numbers}}};", text


def _tail(name: str, f: Callable[[float], float], steps: float, top: float, careful: str, result: str) -> str:
    """A tail f(a), a = |x| up to `top`, on 32 equal parts, `steps` of them in 1 (so few bits that a product with it is exact in an fma)."""
    table, chain = _chosen(name, pieces(f, [(k / steps, 0.5 / steps, 1 / steps) for k in range(32)], 6), "t")
    return f"""{careful}
static inline __attribute__((always_inline)) xf32 {name}_xf32(xf32 x) {{
  {table}
  xf32 a = abs_xf32(x), m = fma_xf32(a, (xf32){{0}} + {steps!r}f, (xf32){{0}} + 0x1.8p+23f), n = m - 0x1.8p+23f;
  xf32 t = fma_xf32(a, (xf32){{0}} + {steps!r}f, -n); xi32 k = (xi32)m;
  if (__builtin_expect(any_xi32(~(a <= {top!r}f)), 0)) return {name}s_xf32(x);
  xf32 c = {chain};
  return {result};
}}"""


@cache
def fast_text(name: str) -> str:
    """Texts for 16 lanes of AVX-512 that replace those above in their usual range; one lane beyond it makes its vector take the careful way.

    gelu: x > 0: x - x N(-x), else x N(x). tanh: 4 parts an octave, from 1/16 to 9.
    """
    careful = f"static __attribute__((noinline)) {instantiate(MATH[name, 'f32'], 'f32', True).removeprefix(ATTR).replace(f'{name}_xf32', f'{name}s_xf32')}"
    if name == "gelu":
        return _tail(name, lambda a: 0.5 * erfc(a * sqrt(0.5)), 5.75, 5.4, careful, "fma_xf32(-a, c, maxi_xf32((xf32){0}, x))")
    if name == "erfc":
        return _tail(name, erfc, 7.75, 4.0, careful, "sel_xf32(x < 0.0f, 2.0f - c, c)")
    parts = []
    for k in range(32):  # the exponent's low bits and two of the mantissa, from 2^-8 on: the parts of 2^-4 come at 16
        low = 2.0 ** (-4 + (k % 32) // 4) * (1 + k % 4 / 4)
        parts.append((low * (1 + 0.5 / (4 + k % 4)), 0.5 * low / (4 + k % 4), 1.0))
    parts[0] = (0.0, 0.0782, 1.0)
    # exponent 127 - 4 = 123 = 3 mod 8: part k stands at (k + 12) mod 32
    rows = pieces(tanh, parts, 5)
    rows[0][0], rows[0][28] = 0.0, 1.0  # from 9 on, the middle of the last part, exactly 1: what follows may divide by 1 - tanh
    rows.append([p[0] for p in parts])
    rows = [[row[(k - 12) % 32] for k in range(32)] for row in rows]
    table, chain = _chosen(name, rows[:-1], "t")
    table = table.replace("T[6]", "T[7]").replace("}};", "},\n    {" + ", ".join(f"{c!r}f" for c in rows[-1]) + "}};")
    return f"""static inline __attribute__((always_inline)) xf32 tanh_xf32(xf32 x) {{
  {table}
  xf32 a = mini_xf32((xf32){{0}} + 9.0f, abs_xf32(x)); xi32 k = (xi32)maxi_xf32(a, (xf32){{0}} + 0x1p-4f) >> 21;
  xf32 t = a - __builtin_ia32_vpermt2varps512_mask(k, *(const xf32 *)T[6], *(const xf32 *)(T[6] + 16), (unsigned short)-1);
  return copysign_xf32({chain}, x);
}}"""


FAST = ("gelu", "erfc", "tanh")
