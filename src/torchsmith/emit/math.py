"""Elementary functions as C text templates, one text for vectors and scalars (see vector.py); only what a kernel uses is pasted.

In: (function, float type). Out: template text. At most 4 ulp on f32; polynomials are own minimax fits (relative error, mpmath).
f32 functions without a text of their own are computed in f64 (kernels that use them run 8 lanes) and rounded.
"""

from __future__ import annotations

MATH: dict[tuple[str, str], str] = {}


def define(name: str, t: str, text: str) -> None:
    if (name, t) in MATH:
        raise ValueError(f"{name} on {t} is defined twice")
    MATH[name, t] = text


def horner(coefs: tuple[float, ...], x: str, suffix: str = "") -> str:
    """Highest power first; fma chain."""
    text = f"((FLT){{0}} + K({coefs[0]!r}))"
    for c in coefs[1:]:
        text = f"fma@({text}, {x}, (FLT){{0}} + K({c!r}))"
    return text


EXP32 = (0.0013950701730265816, 0.008368953880030793, 0.04166620243844204, 0.1666651830349437, 0.5000000096306947)
define("exp", "f32", f"""FLT exp@(FLT x) {{
  x = maxi@((FLT){{0}} + K(-105.0), mini@((FLT){{0}} + K(89.0), x));
  FLT n = rint@(x * K(0x1.715476p+0));
  FLT r = fma@(n, (FLT){{0}} - K(0x1.62e4p-1), x); r = fma@(n, (FLT){{0}} - K(0x1.7f7d1cp-20), r);
  FLT p = {horner(EXP32, "r")};
  p = fma@(p * r, r, r) + K(1.0);
  return scalef@(p, n);
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
  x = maxi@((FLT){{0}} + K(-160.0), mini@((FLT){{0}} + K(129.0), x));
  FLT n = rint@(x), f = x - n, r = f * K(0x1.62e43p-1); r = fma@(f, (FLT){{0}} + K(-0x1.05c61p-29), r);
  FLT p = {horner(EXP32, "r")};
  return scalef@(fma@(p * r, r, r) + K(1.0), n);
}}""")
# x = 2^e m, m in [sqrt 1/2, sqrt 2); s = f / (2 + f), log m = f - (f f / 2 - s (f f / 2 + s s R))
LOG32 = (0.29874406569069945, 0.39977450095052264, 0.6666677704791921)
define("logm", "f32", f"""FLT logm@(FLT x, FLT *e) {{
  MSK tiny = x < K(0x1p-126); x = sel@(tiny, x * K(0x1p23), x);
  INT b = asi@(x), k = (b - 0x3f3504f3) >> 23;
  FLT f = asf@(b - (k << 23)) - K(1.0), s = f / (f + K(2.0)), z = s * s, h = f * f * K(0.5);
  *e = tof@(k) - sel@(tiny, (FLT){{0}} + K(23.0), (FLT){{0}});
  return f - (h - s * (h + z * {horner(LOG32, "z")}));
}}""")
_LOGEND = """
  y = sel@(x == K(0.0), (FLT){0} - __builtin_inf@F(), y);
  y = sel@(x < K(0.0), (FLT){0} + __builtin_nan@F(""), y);
  return sel@(x < __builtin_inf@F(), y, x + x);
"""
def _logs(t: str, hi: str, lo: str, f: str) -> None:
    end = _LOGEND.replace("@F", f) + "}"
    # the last line keeps NaN and +inf; a negative or NaN x never passes x < inf as itself
    end = end.replace("return sel@(x < __builtin_inf", "y = sel@(x == __builtin_inf").replace(", y, x + x);", ", x, y); return sel@(x != x, x, y);")
    define("log", t, f"FLT log@(FLT x) {{ FLT e, m = logm@(x, &e); FLT y = fma@(e, (FLT){{0}} + K({hi}), fma@(e, (FLT){{0}} + K({lo}), m));" + end)
    define("log2", t, "FLT log2@(FLT x) { FLT e, m = logm@(x, &e); FLT y = fma@(m, (FLT){0} + K(0x1.71547652b82fep+0), e);" + end)
    define("log10", t, "FLT log10@(FLT x) { FLT e, m = logm@(x, &e); FLT y = fma@(e, (FLT){0} + K(0x1.34413509f79ffp-2), m * K(0x1.bcb7b1526e50ep-2));" + end)
    define("log1p", t, "FLT log1p@(FLT v) { FLT x = v + K(1.0), c = sel@(v >= K(1.0), K(1.0) - (x - v), v - (x - K(1.0))) / x, e, m = logm@(x, &e);"
           f" c = sel@(x > K(0.0), sel@(x < __builtin_inf{f}(), c, (FLT){{0}}), (FLT){{0}}); FLT y = fma@(e, (FLT){{0}} + K({hi}), fma@(e, (FLT){{0}} + K({lo}), c) + m);"
           " y = sel@(v == K(0.0), v, y);" + end)


_logs("f32", "0x1.62e4p-1", "0x1.7f7d1cp-20", "f")
define("tanh", "f32", "FLT tanh@(FLT x) { FLT a = mini@((FLT){0} + K(10.0), abs@(x)), e = expm1@(a + a); return copysign@(e / (e + K(2.0)), x); }")
define("sigmoid", "f32", "FLT sigmoid@(FLT x) { return K(1.0) / (exp@(-x) + K(1.0)); }")
define("sigmoid", "f64", "FLT sigmoid@(FLT x) { return K(1.0) / (exp@(-x) + K(1.0)); }")
for _t in ("f32", "f64"):
    define("rsqrt", _t, "FLT rsqrt@(FLT x) { return K(1.0) / sqrt@(x); }")
ERF32 = (-0.0005892703439016989, 0.004974315354324241, -0.02675417145714959, 0.11281490002406516, -0.3761246493276448, 1.1283791457551724)
# log2 erfc(a): near [0.94, 4] for erf, on [0, 5.5] for 1 + erf; 2**f = 1 + f Q(f)
LERFC32 = (-0.0017463878193157165, 0.022013890266256775, -0.13003901467199755, -0.940920955987868, -1.6145904993845062, -0.0031335384894209764)
LERFCW32 = (-4.4361158276924354e-05, 0.00043702274034643684, -0.0014606562195075183, -0.000824701219748439, 0.028301477681582844,
            -0.14850646072220186, -0.9184098544492771, -1.6279093228508805, 2.167455174624137e-08)  # fmt: skip
EXP2Q32 = (0.00015476378406350104, 0.001340023480624054, 0.009618003554049421, 0.055503279138083644, 0.24022651349426882, 0.6931472061516458)
define("erf", "f32", f"""FLT erf@(FLT x) {{
  FLT a = mini@((FLT){{0}} + K(4.0), abs@(x)), z = a * a;
  FLT q = {horner(LERFC32, "a")}, n = rint@(q), f = q - n;
  FLT p = scalef@(fma@({horner(EXP2Q32, "f")}, f, (FLT){{0}} + K(1.0)), n);
  FLT y = sel@(a < K(0.9453125), a * {horner(ERF32, "z")}, K(1.0) - p);
  return copysign@(y, x);
}}""")
define("erf1p", "f32", f"""FLT erf1p@(FLT x) {{
  FLT a = mini@((FLT){{0}} + K(5.5), abs@(x));
  FLT q = {horner(LERFCW32, "a")}, n = rint@(q), f = q - n;
  FLT p = scalef@(fma@({horner(EXP2Q32, "f")}, f, (FLT){{0}} + K(1.0)), n);
  return sel@(x < K(0.0), p, K(2.0) - p);
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
_logs("f64", "0x1.62e42fee00000p-1", "0x1.a39ef35793c76p-33", "")
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
define("asinh", "f64", """FLT asinh@(FLT x) {
  FLT a = abs@(x), b = sel@(a > K(1e8), (FLT){0} + K(1.0), a), q = b * b;
  FLT y = log1p@(b + q / (sqrt@(q + K(1.0)) + K(1.0)));
  return copysign@(sel@(a > K(1e8), log@(a) + K(0x1.62e42fefa39efp-1), y), x);
}""")
define("acosh", "f64", """FLT acosh@(FLT x) {
  FLT t = sel@(x > K(1e8), (FLT){0} + K(1.0), x) - K(1.0), y = log1p@(t + sqrt@(t * (t + K(2.0))));
  y = sel@(x > K(1e8), log@(x) + K(0x1.62e42fefa39efp-1), y);
  return sel@(x < K(1.0), (FLT){0} + __builtin_nan(""), y);
}""")
define("atanh", "f64", "FLT atanh@(FLT x) { FLT a = abs@(x); return copysign@(log1p@((a + a) / (K(1.0) - a)) * K(0.5), x); }")
ERF64 = (-7.801196917547424e-10, 1.3722979397846733e-08, -1.620917631061177e-07, 1.6447517679364533e-06, -1.492474465859819e-05,
         0.00012055295319951238, -0.0008548325989667251, 0.005223977607422596, -0.026866170643276083, 0.11283791670945252,
         -0.3761263890318355, 1.1283791670955126)  # fmt: skip
# exp(a a) erfc(a) (1 + 2 a) as a polynomial in (a - 2) / (a + 2), a in [0.45, 28]
ERFCX64 = (-9.670316094745119e-08, 3.857134285608631e-07, 1.3108848398773268e-07, -1.3216626224022518e-06, -9.449560103120633e-07,
           1.939810416243629e-06, 5.289278555623924e-06, 3.489044838096149e-06, -1.3489083578969994e-05, -3.63535612740354e-05,
           -1.5170294920571515e-06, 0.00015102516460036863, 0.0002063692339293902, -0.00045433904542788265, -0.0014568142258774854,
           0.0012713388270592972, 0.00872265389593177, -0.008034015076379717, -0.054220000992746036, 0.16405128003331904,
           -0.16603039761528007, -0.09276382658574525, 1.2769783815525286)  # fmt: skip
define("erfcpos", "f64", f"""FLT erfcpos@(FLT a) {{
  a = mini@((FLT){{0}} + K(28.0), a);
  FLT t = (a - K(2.0)) / (a + K(2.0)), g = {horner(ERFCX64, "t")} / fma@(a, (FLT){{0}} + K(2.0), (FLT){{0}} + K(1.0));
  FLT s = a * a, l = fma@(a, a, -s), w = exp@(-s);
  return fma@(-l * w, g, w * g);
}}""")
define("erf", "f64", f"""FLT erf@(FLT x) {{
  FLT a = abs@(x), z = a * a;
  return copysign@(sel@(a < K(1.0), a * {horner(ERF64, "z")}, K(1.0) - erfcpos@(a)), x);
}}""")
define("erfc", "f64", f"""FLT erfc@(FLT x) {{
  FLT a = abs@(x), z = a * a, c = erfcpos@(a), s = K(1.0) - x * {horner(ERF64, "z")};
  return sel@(a < K(0.5), s, sel@(x < K(0.0), K(2.0) - c, c));
}}""")
# log |x| in two parts: 2 s + s^3 (2/3 + ...) with s = f / (2 + f) in two parts; then y times that, and exp
define("pow", "f64", f"""FLT pow@(FLT x, FLT y) {{
  FLT a = abs@(x); MSK tiny = a < K(0x1p-1022); FLT v = sel@(tiny, a * K(0x1p52), a);
  INT b = asi@(v), k = (b - 0x3fe6a09e667f3bcdll) >> 52;
  FLT f = asf@(b - (k << 52)) - K(1.0), e = tof@(k) - sel@(tiny, (FLT){{0}} + K(52.0), (FLT){{0}});
  FLT d = f + K(2.0), dl = f - (d - K(2.0)), s = f / d, sl = (fma@(-s, d, f) - s * dl) / d;
  FLT z = s * s, zl = fma@(s, s, -z) + K(2.0) * s * sl;
  FLT q = z * {horner(LOG64[:-1], "z")};
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
  FLT fr = abs@(x - rint@(x));
  FLT other = log@(K(3.141592653589793) / sin@(fr * K(3.141592653589793))) - y;
  other = sel@(fr == K(0.0), inf, other);
  y = sel@(neg, other, y);
  return sel@(x == -inf, inf, sel@(x != x, x, y));
}""")
define("digamma", "f64", """FLT digamma@(FLT x) {
  MSK neg = x < K(0.0); FLT v = sel@(neg, K(1.0) - x, x), s = (FLT){0};
  for (int k = 0; k < 12; k++) { MSK m = v < K(12.0); s = sel@(m, s - K(1.0) / v, s); v = sel@(m, v + K(1.0), v); }
  FLT z = K(1.0) / (v * v), q = (FLT){0} + K(1.0) / K(12.0);
  q = fma@(q, z, (FLT){0} - K(691.0) / K(32760.0)); q = fma@(q, z, (FLT){0} + K(1.0) / K(132.0)); q = fma@(q, z, (FLT){0} - K(1.0) / K(240.0));
  q = fma@(q, z, (FLT){0} + K(1.0) / K(252.0)); q = fma@(q, z, (FLT){0} - K(1.0) / K(120.0)); q = fma@(q, z, (FLT){0} + K(1.0) / K(12.0));
  FLT y = s + log@(v) - K(0.5) / v - z * q, inf = (FLT){0} + __builtin_inf();
  y = sel@(v == inf, inf, y);
  FLT r = x - rint@(x), refl = y - K(3.141592653589793) / tan@(r * K(3.141592653589793));
  y = sel@(neg, sel@(r == K(0.0), (FLT){0} + __builtin_nan(""), refl), y);
  y = sel@(x == K(0.0), copysign@(inf, -x), y);
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

# ---------------------------------------------------------------- f32 through f64
VIA_F64 = frozenset(["tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "pow", "hypot", "lgamma", "digamma", "erfinv"])
for _name in sorted(VIA_F64):
    _two = _name in ("atan2", "pow", "hypot")
    _args = "FLT x, FLT y" if _two else "FLT x"
    define(_name, "f32", f"FLT {_name}@({_args}) {{ return tos@({_name}$(tod@(x){', tod@(y)' if _two else ''})); }}")
