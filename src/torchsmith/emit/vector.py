"""The C text under every kernel: vector types and the small functions (select, fma, partial loads, conversions) that kernels use.

In: a lane count (of the target's registers: 16, 8 or 4, or half as many where 8-byte elements are computed) and the names a kernel uses. Out: include-free C text, only what is used.

Snippets are templates, instantiated for vectors and for scalars, named `<name>_<type>`:
FLT, INT, UNS stand for the float type and the integers of its size; @ for the suffix of FLT, % for that of INT,
$ for that of the f64 of the same shape. K(c) is a literal.
Masks of vector comparisons are vectors of INT (0 or -1), scalar comparisons are int.
"""

from __future__ import annotations

import re
from functools import lru_cache

from ..codes import Unsupported
from ..ir.ops import MULTIPLIERS, OPS, WEYL
from .math import ATTR, FAST, MATH, fast_text, instantiate

SCALARS = {
    "f32": "float", "f64": "double", "i8": "signed char", "u8": "unsigned char", "i16": "short", "u16": "unsigned short",
    "i32": "int", "u32": "unsigned", "i64": "__INT64_TYPE__", "u64": "__UINT64_TYPE__",
}  # fmt: skip
SIZES = {"f32": 4, "f64": 8, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}

# name -> text; the name is what calls look like, "sel_xf32" is found by its prefix before the type suffix
TEMPLATES: dict[str, str] = {}  # for float types, one text for vector and scalar
VECTOR: dict[str, str] = {}  # full name -> text, $L lanes; #if inside
NARROW: dict[tuple[str, int], str] = {}  # (full name, lanes) -> text for targets without masks
SCALAR: dict[str, str] = {}  # full name -> text


@lru_cache(maxsize=8)
def prelude(lanes: int) -> str:
    """Type names."""
    lines = [f"typedef {c} {n};" for n, c in SCALARS.items()]
    lines += [f"typedef {n} x{n} __attribute__((vector_size({SIZES[n] * lanes})));" for n in SCALARS]
    lines += [f"typedef x{n} x{n}u __attribute__((aligned({SIZES[n]}), may_alias));" for n in SCALARS]
    lines += [f"typedef {n} {n}a __attribute__((may_alias));" for n in SCALARS]
    lines.append("#define CV(x, t) __builtin_convertvector(x, t)")
    return "\n".join(lines) + "\n"


def vector(name: str, text: str, lanes: int = 0) -> None:
    """Define a vector snippet, `lanes`: for so many on targets without masks, where another is for the rest."""
    if (name in VECTOR and not lanes) or (name, lanes) in NARROW:
        raise ValueError(f"snippet {name} is defined twice")
    if lanes:
        NARROW[name, lanes] = text
    else:
        VECTOR[name] = text


def scalar(name: str, text: str) -> None:
    """Define a scalar snippet."""
    if name in SCALAR:
        raise ValueError(f"snippet {name} is defined twice")
    SCALAR[name] = text


def template(name: str, text: str) -> None:
    """Define a function for f32 and f64, vectors and scalars at once."""
    if name in TEMPLATES:
        raise ValueError(f"template {name} is defined twice")
    TEMPLATES[name] = text


# ---------------------------------------------------------------- select and bits
for _t, _m in (("f32", "i32"), ("i32", "i32"), ("u32", "i32"), ("f64", "i64"), ("i64", "i64"), ("u64", "i64"), ("i16", "i16"), ("u16", "i16"),
               ("i8", "i8"), ("u8", "i8")):  # fmt: skip
    vector(f"sel_x{_t}", f"{ATTR}x{_t} sel_x{_t}(x{_m} m, x{_t} a, x{_t} b) {{ return (x{_t})(((x{_m})a & m) | ((x{_m})b & ~m)); }}")
    scalar(f"sel_{_t}", f"{ATTR}{_t} sel_{_t}(int m, {_t} a, {_t} b) {{ return m ? a : b; }}")
for _f, _i in (("f32", "i32"), ("f64", "i64")):
    vector(f"asi_x{_f}", f"#define asi_x{_f}(x) ((x{_i})(x))")
    vector(f"asf_x{_f}", f"#define asf_x{_f}(x) ((x{_f})(x))")
    vector(f"toi_x{_f}", f"#define toi_x{_f}(x) CV(x, x{_i})")
    vector(f"tof_x{_f}", f"#define tof_x{_f}(x) CV(x, x{_f})")
    vector(f"not_x{_f}", f"#define not_x{_f}(m) (~(m))")
    scalar(f"asi_{_f}", f"{ATTR}{_i} asi_{_f}({_f} x) {{ {_i} r; __builtin_memcpy(&r, &x, sizeof r); return r; }}")
    scalar(f"asf_{_f}", f"{ATTR}{_f} asf_{_f}({_i} x) {{ {_f} r; __builtin_memcpy(&r, &x, sizeof r); return r; }}")
    scalar(f"toi_{_f}", f"#define toi_{_f}(x) (({_i})(x))")
    scalar(f"tof_{_f}", f"#define tof_{_f}(x) (({_f})(x))")
    scalar(f"not_{_f}", f"#define not_{_f}(m) (!(m))")

vector("tod_xf32", "#define tod_xf32(x) CV(x, xf64)")
vector("tos_xf32", "#define tos_xf32(x) CV(x, xf32)")
scalar("tod_f32", "#define tod_f32(x) ((f64)(x))")
scalar("tos_f32", "#define tos_f32(x) ((f32)(x))")

# ---------------------------------------------------------------- what the instruction set has
_S, _P = {"f32": "ps", "f64": "pd"}, {"f32": "f", "f64": ""}


def _isa(t: str, lanes: int, name: str) -> dict[str, str]:
    bits = SIZES[t] * 8 * lanes
    k, s = f"(({'unsigned short' if lanes == 16 else 'unsigned char'})-1)", _S[t]
    if bits == 512:
        has = "__AVX512F__"
        body = {
            "fma": f"__builtin_ia32_vfmadd{s}512_mask(a, b, c, {k}, 4)",
            "maxi": f"__builtin_ia32_max{s}512_mask(a, b, b, {k}, 4)",
            "mini": f"__builtin_ia32_min{s}512_mask(a, b, b, {k}, 4)",
            "floor": f"__builtin_ia32_rndscale{s}_mask(a, 9, a, {k}, 4)",
            "ceil": f"__builtin_ia32_rndscale{s}_mask(a, 10, a, {k}, 4)",
            "trunc": f"__builtin_ia32_rndscale{s}_mask(a, 11, a, {k}, 4)",
            "rint": f"__builtin_ia32_rndscale{s}_mask(a, 8, a, {k}, 4)",
            "sqrt": f"__builtin_ia32_sqrt{s}512_mask(a, a, {k}, 4)",
            "scalef": f"__builtin_ia32_scalef{s}512_mask(a, b, a, {k}, 4)",
        }
    elif bits >= 256:  # two registers have no instruction
        has = "TWO_REGISTERS" if bits > 512 else {"fma": "__FMA__", "scalef": "__AVX512VL__"}.get(name, "__AVX__")
        body = {
            "fma": f"__builtin_ia32_vfmadd{s}256(a, b, c)", "maxi": f"__builtin_ia32_max{s}256(a, b)",
            "mini": f"__builtin_ia32_min{s}256(a, b)",
            "floor": f"__builtin_ia32_round{s}256(a, 9)", "ceil": f"__builtin_ia32_round{s}256(a, 10)",
            "trunc": f"__builtin_ia32_round{s}256(a, 11)", "rint": f"__builtin_ia32_round{s}256(a, 8)",
            "sqrt": f"__builtin_ia32_sqrt{s}256(a)", "scalef": f"__builtin_ia32_scalef{s}256_mask(a, b, a, {k})",
        }  # fmt: skip
    else:  # 128 bits; half of a register has no instruction either
        rounds = {"floor": 9, "ceil": 10, "trunc": 11, "rint": 8}
        has = "HALF_A_REGISTER" if bits < 128 else "__SSE4_1__" if name in rounds else "__FMA__" if name == "fma" else "__SSE2__"
        has = "NO_INSTRUCTION" if name == "scalef" else has
        body = {
            "fma": f"__builtin_ia32_vfmadd{s}(a, b, c)", "maxi": f"__builtin_ia32_max{s}(a, b)", "mini": f"__builtin_ia32_min{s}(a, b)",
            "sqrt": f"__builtin_ia32_sqrt{s}(a)", "scalef": "", **{n: f"__builtin_ia32_round{s}(a, {mode})" for n, mode in rounds.items()},
        }  # fmt: skip
    return {"has": has, "body": body[name]}


_SCALAR_ISA = {
    "fma": "__builtin_fma$f(a, b, c)", "floor": "__builtin_floor$f(a)", "ceil": "__builtin_ceil$f(a)", "trunc": "__builtin_trunc$f(a)",
    "rint": "__builtin_rint$f(a)", "sqrt": "__builtin_sqrt$f(a)", "maxi": "(a > b ? a : b)", "mini": "(a < b ? a : b)",
    "scalef": "ldexp_$t(a, b)",
}  # fmt: skip
_PARAMS = {"fma": ("a", "b", "c"), "maxi": ("a", "b"), "mini": ("a", "b"), "scalef": ("a", "b")}


# one step of Newton and Markstein's correction from the 14 bits of the reciprocal root: rounded as the instruction rounds, at half its price
SQRT32 = """static inline __attribute__((always_inline)) xf32 sqrt_xf32(xf32 a) {
#ifdef __AVX512F__
  xu32 b = (xu32)a - 0x0d000000u;
  if (__builtin_expect(any_xi32((xi32)(b >= 0x72800000u)), 0)) return DIRECT;
  xf32 y = __builtin_ia32_rsqrt14ps512_mask(a, a, (unsigned short)-1), g = a * y, h = y * 0.5f, r = fma_xf32(-h, g, (xf32){0} + 0.5f);
  g = fma_xf32(g, r, g); h = fma_xf32(h, r, h);
  return fma_xf32(fma_xf32(-g, g, a), h, g);
#else
  xf32 r; for (int l = 0; l < 16; l++) r[l] = __builtin_sqrtf(a[l]); return r;
#endif
}"""


def isa_text(name: str, t: str, lanes: int) -> str:
    """maxi/mini give b when either operand is NaN (as the instruction does); scalef is a * 2**b for whole b, rounded once."""
    params = _PARAMS.get(name, ("a",))
    if lanes == 1:
        decl = ", ".join(f"{t} {p}" for p in params)
        return f"{ATTR}{t} {name}_{t}({decl}) {{ return {_SCALAR_ISA[name].replace('$f', _P[t]).replace('$t', t)}; }}"
    row = _isa(t, lanes, name)
    decl = ", ".join(f"x{t} {p}" for p in params)
    if name == "scalef":
        return f"{ATTR}x{t} {name}_x{t}({decl}) {{\n#ifdef {row['has']}\n  return {row['body']};\n#else\n  return scalefg_x{t}(a, b);\n#endif\n}}"
    if name == "sqrt" and t == "f32" and lanes == 16:
        return SQRT32.replace("DIRECT", row["body"])
    lanewise = _SCALAR_ISA[name].replace("$f", _P[t]).replace("$t", t)
    for p in params:
        lanewise = re.sub(rf"\b{p}\b", f"{p}[l]", lanewise)
    return (
        f"{ATTR}x{t} {name}_x{t}({decl}) {{\n#ifdef {row['has']}\n  return {row['body']};\n#else\n"
        f"  x{t} r; for (int l = 0; l < {lanes}; l++) r[l] = {lanewise}; return r;\n#endif\n}}"
    )


ISA = frozenset(_SCALAR_ISA)

# ---------------------------------------------------------------- exponent and mantissa: split (its generic text is splitg, in math.py)
def _split_text(t: str) -> str:
    """On AVX-512 getexp and getmant know zero, infinity, denormals and what is below 0 by themselves."""
    s, text = _S[t], f"{ATTR}x{t} split_x{t}(x{t} x, x{t} *e) {{\n"
    word = "#if"
    for lanes, bits in ((64 // SIZES[t], 512), (32 // SIZES[t], 256)):
        k = f"({'unsigned short' if lanes == 16 else 'unsigned char'})-1"
        name, tail = f"{s}{bits}_mask", ", 4" if bits == 512 else ""
        has = "__AVX512F__" if bits == 512 else "__AVX512VL__"
        text += f"{word} defined({has}) && $L == {lanes}\n  x{t} m = __builtin_ia32_getmant{name}(x, 11, x, {k}{tail});\n"
        text += f"  *e = __builtin_ia32_getexp{name}(x, x, {k}{tail}) - __builtin_ia32_getexp{name}(m, m, {k}{tail}); return m;\n"
        word = "#elif"
    return text + f"#else\n  return splitg_x{t}(x, e);\n#endif\n}}"


for _t in ("f32", "f64"):
    vector(f"split_x{_t}", _split_text(_t))
    scalar(f"split_{_t}", f"#define split_{_t}(x, e) splitg_{_t}(x, e)")
vector("any_xi32", """static inline __attribute__((always_inline)) int any_xi32(xi32 m) {
#if defined(__AVX512F__) && $L == 16
  return __builtin_ia32_ptestmd512(m, m, (unsigned short)-1) != 0;
#else
  int r = 0; for (int l = 0; l < $L; l++) r |= m[l]; return r;
#endif
}""")
vector("any_xi32", """static inline __attribute__((always_inline)) int any_xi32(xi32 m) {
#ifdef __AVX__
  return __builtin_ia32_movmskps256((float __attribute__((vector_size(32))))m) != 0;
#else
  int r = 0; for (int l = 0; l < 8; l++) r |= m[l]; return r;
#endif
}""", 8)
vector("any_xi64", """static inline __attribute__((always_inline)) int any_xi64(xi64 m) {
  i64 r = 0; for (int l = 0; l < $L; l++) r |= m[l]; return r != 0;
}""")
scalar("any_i32", "#define any_i32(m) (m)")
scalar("any_i64", "#define any_i64(m) (m)")

# ---------------------------------------------------------------- loads and stores of n < lanes elements
_KTYPE = {16: "unsigned short", 8: "unsigned char"}
_MASKED = {  # (type, lanes) -> (load, store) builtins of AVX-512
    ("f32", 16): ("loadups512_mask", "storeups512_mask"), ("i32", 16): ("loaddqusi512_mask", "storedqusi512_mask"),
    ("f32", 8): ("loadups256_mask", "storeups256_mask"), ("i32", 8): ("loaddqusi256_mask", "storedqusi256_mask"),
    ("u16", 16): ("loaddquhi256_mask", "storedquhi256_mask"), ("u16", 8): ("loaddquhi128_mask", "storedquhi128_mask"),
    ("f64", 8): ("loadupd512_mask", "storeupd512_mask"), ("i64", 8): ("loaddqudi512_mask", "storedqudi512_mask"),
}  # fmt: skip
_CTYPE = {"f32": "float", "f64": "double", "i32": "int", "i64": "long long", "u16": "short"}


def partial_text(name: str, t: str, lanes: int, masks: bool) -> str:
    """ldn: the first n lanes, others 0; stn: writes n lanes; ldm/stm: lanes where the xi32 mask m holds (others keep o / memory)."""
    k = _KTYPE.get(lanes, "")
    row = _MASKED.get((t, lanes))
    bits = f"__attribute__((vector_size({SIZES[t] * lanes}))) {_CTYPE.get(t, '')}"
    testm = "__builtin_ia32_ptestmd512(m, m, (unsigned short)-1)" if lanes == 16 else "__builtin_ia32_ptestmd256(m, m, (unsigned char)-1)"
    open_, close = ("", "")
    head = {
        "ldn": f"{ATTR}x{t} ldn_x{t}(const {t}a *p, int n)",
        "stn": f"{ATTR}void stn_x{t}({t}a *p, x{t} v, int n)",
        "ldm": f"{ATTR}x{t} ldm_x{t}(const {t}a *p, xi32 m, x{t} o)",
        "stm": f"{ATTR}void stm_x{t}({t}a *p, x{t} v, xi32 m)",
    }[name]
    slow = {
        "ldn": f"x{t} r = {{}}; __builtin_memcpy(&r, p, (unsigned)n * {SIZES[t]}u); return r;",
        "stn": f"__builtin_memcpy(p, &v, (unsigned)n * {SIZES[t]}u);",
        "ldm": f"for (int l = 0; l < {lanes}; l++) if (m[l]) o[l] = p[l]; return o;",
        "stm": f"for (int l = 0; l < {lanes}; l++) if (m[l]) p[l] = v[l];",
    }[name]
    if row is not None and masks:
        load, store = row
        nmask = f"({k})((1u << n) - 1u)"

        def through(point: str) -> str:
            return {
                "ldn": f"return (x{t})__builtin_ia32_{load}((const {point} *)p, ({bits}){{}}, {nmask});",
                "stn": f"__builtin_ia32_{store}(({point} *)p, ({bits})v, {nmask});",
                "ldm": f"return (x{t})__builtin_ia32_{load}((const {point} *)p, ({bits})o, {testm});",
                "stm": f"__builtin_ia32_{store}(({point} *)p, ({bits})v, {testm});",
            }[name]

        text = f"  {through(_CTYPE[t])}\n"
        if SIZES[t] * lanes < 64:  # clang's 256-bit ones take pointers to vectors
            text = f"#ifdef __clang__\n  {through(bits)}\n#else\n{text}#endif\n"
        test = "#if defined(__AVX512VL__) && defined(__AVX512BW__)\n" if t == "u16" else "#ifdef __AVX512VL__\n"
        open_, close = test, "#endif\n"
        return f"{head} {{\n{open_}{text}#else\n  {slow}\n{close}}}"
    if not masks and (t, lanes) in _AVX:
        return f"{head} {{\n#ifdef __AVX__\n  {_avx_text(name, t, lanes)}\n#else\n  {slow}\n#endif\n}}"
    return f"{head} {{ {slow} }}"


# Types whose parts AVX loads and stores by a mask of sign bits -> (suffix, C type of the memory, type of the mask).
_AVX = {
    ("f32", 8): ("ps256", "float", "xi32"), ("i32", 8): ("ps256", "float", "xi32"), ("f64", 4): ("pd256", "double", "xi64"),
    ("i64", 4): ("pd256", "double", "xi64"),
}  # fmt: skip


def _avx_text(name: str, t: str, lanes: int) -> str:
    suffix, c, mask = _AVX[t, lanes]
    kind = f"{c} __attribute__((vector_size(32)))"
    iota = ", ".join(str(i) for i in range(lanes))
    wide = "CV(m, xi64)" if mask == "xi64" else "m"
    made = f"((({mask}){{{iota}}}) < n)" if name in ("ldn", "stn") else wide
    vec = mask.replace("xi", "long long" if mask == "xi64" else "int").removesuffix("64").removesuffix("32")
    bits = f"({vec} __attribute__((vector_size(32))))({made})"
    load = f"(x{t})__builtin_ia32_maskload{suffix}((const {kind} *)p, {bits})"
    return {
        "ldn": f"return {load};", "ldm": f"return sel_x{t}({wide}, {load}, o);",
        "stn": f"__builtin_ia32_maskstore{suffix}(({kind} *)p, {bits}, ({kind})v);",
        "stm": f"__builtin_ia32_maskstore{suffix}(({kind} *)p, {bits}, ({kind})v);",
    }[name]


# ---------------------------------------------------------------- argument reduction for sine and cosine, any magnitude
# Payne and Hanek: x = m 2^e; the bits of 2/pi that matter for x 2/pi mod 4 are 192 from place e - 2 on.
scalar("reduce_f64", """static void reduce_f64(f64 x, f64 *r, i64 *q) {
  static const u64 T[] = {0, 0xa2f9836e4e441529ull, 0xfc2757d1f534ddc0ull, 0xdb6295993c439041ull, 0xfe5163abdebbc561ull,
    0xb7246e3a424dd2e0ull, 0x6492eea09d1921cull, 0xfe1deb1cb129a73eull, 0xe88235f52ebb4484ull, 0xe99c7026b45f7e41ull,
    0x3991d639835339f4ull, 0x9c845f8bbdf9283bull, 0x1ff897ffde05980full, 0xef2f118b5a0a6d1full, 0x6d367ecf27cb09b7ull,
    0x4f463f669e5fea2dull, 0x7527bac7ebe5f17bull, 0x3d0739f78a5292eaull, 0x6bfb5fb11f8d5d08ull, 0x56033046fc7b6babull,
    0xf0cfbc209af4361dull, 0xa9e391615ee61b08ull};
  u64 b; __builtin_memcpy(&b, &x, 8);
  int e = (int)((b >> 52) & 2047) - 1075, p, s, w; u64 m = (b & 0xfffffffffffffull) | 0x10000000000000ull;
  if (e > 971) { *r = x - x; *q = 0; return; }
  if (e < -60) { *r = x; *q = 0; return; }
  p = e - 2 + 64; w = p >> 6; s = p & 63;
  u64 h[3]; for (int k = 0; k < 3; k++) h[k] = s ? (T[w + k] << s) | (T[w + k + 1] >> (64 - s)) : T[w + k];
  unsigned __int128 lo = (unsigned __int128)m * h[2], mid = (unsigned __int128)m * h[1] + (u64)(lo >> 64);
  u64 top = m * h[0] + (u64)(mid >> 64), low = (u64)mid, last = (u64)lo;
  i64 n = (i64)(top >> 62); top = (top << 2) | (low >> 62); low = (low << 2) | (last >> 62);
  n += (i64)(top >> 63);
  f64 d = (f64)(i64)top * 0x1p-64 + (f64)low * 0x1p-128;
  d = d * 0x1.921fb54442d18p+0;
  *r = b >> 63 ? -d : d; *q = b >> 63 ? -n : n;
}""")
scalar("reduce_f32", "static void reduce_f32(f32 x, f32 *r, i32 *q) { f64 d; i64 n; reduce_f64(x, &d, &n); *r = (f32)d; *q = (i32)n; }")
for _f, _i in (("f32", "i32"), ("f64", "i64")):
    vector(f"reduce_x{_f}", f"static __attribute__((noinline)) void reduce_x{_f}(x{_f} x, x{_f} *r, x{_i} *q) {{ "
           f"for (int l = 0; l < $L; l++) {{ {_f} d; {_i} n; reduce_{_f}(x[l], &d, &n); (*r)[l] = d; (*q)[l] = n; }} }}")  # fmt: skip

for _t in ("f32", "i32"):
    _b = {"f32": "gathersiv16sf", "i32": "gathersiv16si"}[_t]
    _c, _load, _permute = {
        "f32": ("float", "loadups512_mask", "permvarsf512_mask"), "i32": ("int", "loaddqusi512_mask", "permvarsi512_mask"),
    }[_t]  # fmt: skip
    vector(f"gat_x{_t}", f"""{ATTR}x{_t} gat_x{_t}(const {_t}a *p, xi32 at) {{
#if defined(__AVX512F__) && $L == 16
  /* elements near each other, the first and last in the outer lanes (resizing): a load and a permutation; a gather takes 25 cycles */
  xi32 off = at - at[0]; const unsigned last = (unsigned)off[15];
  if (last < 16 && (unsigned short)__builtin_ia32_ucmpd512_mask(off, (xi32){{0}} + (i32)last, 2, (unsigned short)-1) == 65535) {{
    x{_t} r = (x{_t})__builtin_ia32_{_load}((const {_c} *)(p + at[0]), (x{_t}){{0}}, (unsigned short)((2u << last) - 1));
    return (x{_t})__builtin_ia32_{_permute}(r, off, r, (unsigned short)-1);
  }}
  return (x{_t})__builtin_ia32_{_b}((x{_t}){{0}}, (const void *)p, at, (unsigned short)-1, 4);
#else
  x{_t} r; for (int l = 0; l < $L; l++) r[l] = p[at[l]]; return r;
#endif
}}""")

    vector(f"gam_x{_t}", f"""{ATTR}x{_t} gam_x{_t}(const {_t}a *p, xi32 at, xi32 m, x{_t} o) {{
#if defined(__AVX512F__) && $L == 16
  return (x{_t})__builtin_ia32_{_b}(o, (const void *)p, at, __builtin_ia32_ptestmd512(m, m, (unsigned short)-1), 4);
#else
  for (int l = 0; l < $L; l++) if (m[l]) o[l] = p[at[l]]; return o;
#endif
}}""")

PUT = {"f32": ("movaps512", 16), "i32": ("movdqa32_512", 16), "f64": ("movapd512", 8)}
for _t, (_b, _width) in PUT.items():
    vector(f"put_x{_t}", f"""#if defined(__AVX512F__) && $L == {_width}
#define put_x{_t}(v, l, x) v = __builtin_ia32_{_b}_mask(({_t})(x) - (x{_t}){{0}}, v, ({_KTYPE[_width]})(1u << (l)))
#else
#define put_x{_t}(v, l, x) (v)[l] = (x)
#endif""")

# ---------------------------------------------------------------- conversions that gcc prints badly in one step
def _narrowing(name: str, source: str, target: str, builtin: str, arg: str, result: str, slow: str) -> None:
    """One instruction on AVX-512, two steps of the compiler elsewhere."""
    k = "(unsigned short)-1"
    vector(name, f"""{ATTR}x{target} {name}(x{source} x) {{
#if defined(__AVX512F__) && $L == 16
  return (x{target})__builtin_ia32_{builtin}512_mask(({arg})x, ({result}){{0}}, {k});
#else
  return {slow};
#endif
}}""")


_narrowing("up_xu8", "u8", "i32", "pmovzxbd", "char __attribute__((vector_size(16)))", "xi32", "CV(CV(x, xu16), xi32)")
_narrowing("up_xi8", "i8", "i32", "pmovsxbd", "char __attribute__((vector_size(16)))", "xi32", "CV(CV(x, xi16), xi32)")
_narrowing("up_xu16", "u16", "i32", "pmovzxwd", "xi16", "xi32", "CV(x, xi32)")
_narrowing("up_xi16", "i16", "i32", "pmovsxwd", "xi16", "xi32", "CV(x, xi32)")
_narrowing("down_xu8", "i32", "u8", "pmovdb", "xi32", "char __attribute__((vector_size(16)))", "CV(CV(x, xu16), xu8)")
_narrowing("down_xi8", "i32", "i8", "pmovdb", "xi32", "char __attribute__((vector_size(16)))", "CV(CV(x, xi16), xi8)")
_narrowing("down_xu16", "i32", "u16", "pmovdw", "xi32", "xi16", "CV(x, xu16)")
vector("f_xbf16", f"{ATTR}xf32 f_xbf16(xu16 x) {{ return (xf32)(up_xu16(x) << 16); }}")
vector("h_xbf16", f"""{ATTR}xu16 h_xbf16(xf32 x) {{
#if defined(__AVX512BF16__) && defined(__AVX512DQ__) && $L == 16 /* one instruction, which takes denormals for zeros; as text, see dot_pairs */
  if (__builtin_expect(!__builtin_ia32_fpclassps512_mask(x, 0x20, (unsigned short)-1), 1)) {{
    xu16 r; __asm__("vcvtneps2bf16 %1, %0" : "=v"(r) : "v"(x)); return r;
  }}
#endif
  xu32 b = (xu32)x, r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16; xi32 nan = x != x;
  return down_xu16((xi32)((r & ~(xu32)nan) | (0x7fc0u & (xu32)nan)));
}}""")
scalar("f_bf16", f"{ATTR}f32 f_bf16(u16 x) {{ u32 b = (u32)x << 16; f32 r; __builtin_memcpy(&r, &b, 4); return r; }}")
scalar("h_bf16", f"""{ATTR}u16 h_bf16(f32 x) {{
  u32 b; __builtin_memcpy(&b, &x, 4); return (u16)(x != x ? 0x7fc0u : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}}""")
scalar("ldexp_f32", """static inline f32 ldexp_f32(f32 a, f32 b) {
  i64 n = b > -300.0f ? b < 300.0f ? (i64)b : 300 : -300, e = (n + 1023) << 52; f64 p; __builtin_memcpy(&p, &e, 8); return (f32)((f64)a * p);
}""")
scalar("ldexp_f64", """static inline f64 ldexp_f64(f64 a, f64 b) {
  i64 n = b > -2200.0 ? b < 2200.0 ? (i64)b : 2200 : -2200, e; f64 p;
  for (; n > 1000; n -= 1000) a *= 0x1p1000;
  for (; n < -1000; n += 900) a *= 0x1p-900;
  e = (n + 1023) << 52; __builtin_memcpy(&p, &e, 8); return a * p;
}""")
scalar("f_f16", f"{ATTR}f32 f_f16(u16 x) {{ _Float16 h; __builtin_memcpy(&h, &x, 2); return (f32)h; }}")
scalar("h_f16", f"{ATTR}u16 h_f16(f32 x) {{ _Float16 h = (_Float16)x; u16 r; __builtin_memcpy(&r, &h, 2); return r; }}")
scalar("hd_f16", f"{ATTR}u16 hd_f16(f64 x) {{ _Float16 h = (_Float16)x; u16 r; __builtin_memcpy(&r, &h, 2); return r; }}")
_LOOP16 = "  x{r} r; for (int l = 0; l < $L; l++) r[l] = {f}_f16(x[l]); return r;"
vector("f_xf16", f"""{ATTR}xf32 f_xf16(xu16 x) {{
#if defined(__AVX512F__) && $L == 16
  return __builtin_ia32_vcvtph2ps512_mask((xi16)x, (xf32){{}}, (unsigned short)-1, 4);
#elif defined(__F16C__) && $L == 8
  return __builtin_ia32_vcvtph2ps256((xi16)x);
#else
{_LOOP16.format(r="f32", f="f")}
#endif
}}""")
vector("h_xf16", f"""{ATTR}xu16 h_xf16(xf32 x) {{
#if defined(__AVX512F__) && $L == 16
  return (xu16)__builtin_ia32_vcvtps2ph512_mask(x, 0, (xi16){{}}, (unsigned short)-1);
#elif defined(__F16C__) && $L == 8
  return (xu16)__builtin_ia32_vcvtps2ph256(x, 0);
#else
{_LOOP16.format(r="u16", f="h")}
#endif
}}""")

# ---------------------------------------------------------------- arithmetic with PyTorch's meaning
template("max", "FLT max@(FLT a, FLT b) { return sel@(a != a, a, maxi@(a, b)); }")  # maxi gives b when either is NaN
template("min", "FLT min@(FLT a, FLT b) { return sel@(a != a, a, mini@(a, b)); }")
for _n in ("max", "min"):  # masked: where a is NaN it stays, elsewhere the instruction gives b if b is NaN
    for _t, _s, _l, _k in (("f32", "ps", 16, "unsigned short"), ("f64", "pd", 8, "unsigned char")):
        vector(f"{_n}_x{_t}", f"""{ATTR}x{_t} {_n}_x{_t}(x{_t} a, x{_t} b) {{
#if defined(__AVX512F__) && $L == {_l}
  return __builtin_ia32_{_n}{_s}512_mask(a, b, a, __builtin_ia32_cmp{_s}512_mask(a, a, 7, ({_k})-1, 4), 4);
#else
  return sel_x{_t}(a != a, a, {_n}i_x{_t}(a, b));
#endif
}}""")
template("fmax", "FLT fmax@(FLT a, FLT b) { return sel@(b != b, a, maxi@(a, b)); }")
template("fmin", "FLT fmin@(FLT a, FLT b) { return sel@(b != b, a, mini@(a, b)); }")
template("abs", "FLT abs@(FLT x) { return asf@(asi@(x) & KMAX); }")
template("copysign", "FLT copysign@(FLT a, FLT b) { return asf@((asi@(a) & KMAX) | (asi@(b) & ~KMAX)); }")
template("sign", "FLT sign@(FLT x) { return sel@(x > K(0.0), (FLT){0} + K(1.0), sel@(x < K(0.0), (FLT){0} - K(1.0), (FLT){0})); }")
for _t in ("i32", "i64", "i16", "i8", "u8"):
    _guard = "b == 0 ? 0 : a / b" if _t[0] == "u" else f"b == 0 ? 0 : b == -1 ? ({_t})(0 - (u64)a) : ({_t})(a / b)"
    _gmod = "b == 0 ? 0 : a % b" if _t[0] == "u" else f"b == 0 || b == -1 ? 0 : ({_t})(a % b)"
    scalar(f"tdiv_{_t}", f"{ATTR}{_t} tdiv_{_t}({_t} a, {_t} b) {{ return {_guard}; }}")
    scalar(f"tmod_{_t}", f"{ATTR}{_t} tmod_{_t}({_t} a, {_t} b) {{ return {_gmod}; }}")
    scalar(f"fdiv_{_t}", f"{ATTR}{_t} fdiv_{_t}({_t} a, {_t} b) {{ {_t} q = tdiv_{_t}(a, b), r = tmod_{_t}(a, b); "
                         f"return ({_t})(q - (r != 0 && (r < 0) != (b < 0))); }}")
    scalar(f"fmod_{_t}", f"{ATTR}{_t} fmod_{_t}({_t} a, {_t} b) {{ {_t} r = tmod_{_t}(a, b); "
                         f"return ({_t})(r + (r != 0 && (r < 0) != (b < 0) ? b : 0)); }}")
    scalar(f"shl_{_t}", f"{ATTR}{_t} shl_{_t}({_t} a, {_t} b) {{ return b < 0 || b >= {8 * SIZES[_t]} ? 0 : ({_t})((u64)a << b); }}")
    scalar(f"shr_{_t}", f"{ATTR}{_t} shr_{_t}({_t} a, {_t} b) {{ return b < 0 || b >= {8 * SIZES[_t]} ? (a < 0 ? -1 : 0) : ({_t})(a >> b); }}")
    scalar(f"pow_{_t}", f"{ATTR}{_t} pow_{_t}({_t} a, {_t} b) {{ if (b < 0) return ({_t})(a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0); "
                        f"u64 r = 1, x = (u64)a; for (u64 n = (u64)b; n; n >>= 1) {{ if (n & 1) r *= x; x *= x; }} return ({_t})r; }}")
    for _n in ("tdiv", "tmod", "fdiv", "fmod", "shl", "shr", "pow"):
        vector(f"{_n}_x{_t}", f"static inline x{_t} {_n}_x{_t}(x{_t} a, x{_t} b) {{ x{_t} r; for (int l = 0; l < $L; l++) "
                              f"r[l] = {_n}_{_t}(a[l], b[l]); return r; }}")

scalar("philox_i64", f"""static inline i64 philox_i64(i64 key, i64 low, i64 high, i64 word) {{
  u32 k = (u32)key, l = (u32)((u64)key >> 32), a = (u32)low, b = (u32)((u64)low >> 32), c = (u32)high, d = (u32)((u64)high >> 32);
  for (int i = 0; i < 10; i++, k += {WEYL[0]}u, l += {WEYL[1]}u) {{
    u64 p = (u64)a * {MULTIPLIERS[0]}u, q = (u64)c * {MULTIPLIERS[1]}u;
    a = (u32)(q >> 32) ^ b ^ k; b = (u32)q; c = (u32)(p >> 32) ^ d ^ l; d = (u32)p;
  }}
  word &= 3;
  return (i64)(word == 0 ? a : word == 1 ? b : word == 2 ? c : d);
}}""")
vector("philox_xi64", """static inline xi64 philox_xi64(xi64 key, xi64 low, xi64 high, xi64 word) {
  xi64 r; for (int l = 0; l < $L; l++) r[l] = philox_i64(key[l], low[l], high[l], word[l]); return r;
}""")

scalar("frem_f64", """static f64 frem_f64(f64 x, f64 y) {
  f64 a = x < 0 ? -x : x, b = y < 0 ? -y : y, t;
  if (!(b > 0) || !(a < __builtin_inf())) return x != x || y != y ? x + y : __builtin_nan("");
  if (a >= b) {
    for (t = b; t <= a * 0.5;) t += t;
    for (; t >= b && a >= b; t *= 0.5) if (a >= t) a -= t;
  }
  return __builtin_copysign(a, x);
}""")
scalar("frem_f32", """static f32 frem_f32(f32 x, f32 y) {
  f64 a = x, b = y, q = a / b;
  if (q < 0x1p50 && q > -0x1p50 && b - b == 0) {
    f64 r = __builtin_fma(-(f64)(i64)q, b, a);
    if (a > 0 ? r < 0 : r > 0) r += (r < 0) == (b < 0) ? -b : b;
    return __builtin_copysignf((f32)r, x);
  }
  return (f32)frem_f64(a, b);
}""")
for _t in ("f32", "f64"):
    _b, _i, _one = ("f", "i32", "1") if _t == "f32" else ("", "i64", "1")
    scalar(f"remainder_{_t}", f"static inline {_t} remainder_{_t}({_t} a, {_t} b) {{ {_t} r = frem_{_t}(a, b); "
                              f"return r != 0 && (r < 0) != (b < 0) ? r + b : r; }}")
    scalar(f"nextafter_{_t}", f"""static inline {_t} nextafter_{_t}({_t} a, {_t} b) {{
  if (a != a || b != b) return a + b;
  if (a == b) return b;
  if (a == 0) return __builtin_copysign{_b}(asf_{_t}(1), b);
  return asf_{_t}(asi_{_t}(a) + ((a < b) == (a > 0) ? 1 : -1));
}}""")
    for _n in ("frem", "remainder", "nextafter"):
        vector(f"{_n}_x{_t}", f"static inline x{_t} {_n}_x{_t}(x{_t} a, x{_t} b) {{ x{_t} r; for (int l = 0; l < $L; l++) "
                              f"r[l] = {_n}_{_t}(a[l], b[l]); return r; }}")

_NAME = re.compile(r"\b([a-z][a-z0-9]*)_(x?)([a-z]+[0-9]+)\b")


@lru_cache(maxsize=4096)
def snippet(full: str, lanes: int, masks: bool = True) -> str | None:
    """Text of one snippet by the name a call uses; None when there is none (then it is the compiler's business)."""
    m = _NAME.fullmatch(full)
    if m is None:
        return None
    name, vec, t = m.groups()
    if name in FAST and full.endswith("_xf32") and lanes == 16:
        slow = instantiate(MATH[name, t], t, True)
        return f"#ifdef __AVX512F__\n{fast_text(name)}\n#else\n{slow}\n#endif"
    if name in ISA and t in _S:
        return isa_text(name, t, lanes if vec else 1)
    if name in ("ldn", "stn", "ldm", "stm") and vec:
        return partial_text(name, t, lanes, masks)
    found = None if masks else NARROW.get((full, lanes))
    found = found or (VECTOR if vec else SCALAR).get(full)
    if found is not None:
        return found.replace("$L", str(lanes))
    special = MATH.get((name, t))
    text = special if special is not None else TEMPLATES.get(name)
    if text is None or t not in _S:
        return None
    return instantiate(text, t, bool(vec))


def close(names: set[str], lanes: int, masks: bool = True) -> str:
    """The text of the named snippets and all they use, definitions before uses."""
    done: dict[str, str] = {}
    active: set[str] = set()

    def add(full: str) -> None:
        if full in done or full in active:
            return
        text = snippet(full, lanes, masks)
        if text is None:
            if full.split("_", maxsplit=1)[0] in OPS:  # an operator without text; other names are the caller's own functions
                raise Unsupported("EMI001", detail=f"function {full}")
            return
        active.add(full)
        for m in _NAME.finditer(text):
            add(m.group(0))
        done[full] = text

    for name in sorted(names):
        add(name)
    return "\n".join(done.values()) + ("\n" if done else "")
