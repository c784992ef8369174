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
define("sin", "f32", f"FLT sin@(FLT x) {{{_TRIG32}  FLT y = sel@((q & 1) != 0, c, s); return asf@(asi@(y) ^ ((q & 2) << 30)); }}")
define("cos", "f32", f"FLT cos@(FLT x) {{{_TRIG32}  FLT y = sel@((q & 1) != 0, s, c); return asf@(asi@(y) ^ (((q + 1) & 2) << 30)); }}")
