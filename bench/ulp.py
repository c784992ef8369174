"""Accuracy of the elementary functions as printed: every float32 input, in units in the last place, against double precision.

In: function names (none: all). Out: bench/results/ulp.md: per function the worst error, where it is, and how many special values differ.

    python bench/ulp.py [--stride N [--first K]] [--flags=-mavx2 ...] [names ...]

The text of each function is printed by the emitter (one kernel of 4096 elements), compiled with the flags of the road and called by a small C driver
that counts through all 2^32 bit patterns. References are glibc's double precision vector functions (libmvec, at most 4 ulp of a double, 2^-27 of a
float's), or the formula of the operator in them. Two-operand functions take 2^28 seeded pairs, a quarter of them with
special values (zeros, infinities, NaN, denormals, integers and halves, the largest, neighbours of 1). An error counts in units of the float that is nearest to
the reference, denormals included; infinity counts as 2^128; NaN against not NaN and a wrong sign of zero count as "special". Of the products x f(x) (gelu, silu, mish) those results are
counted that are normal numbers: where they would be denormal, silu is -0 as eager's is mostly, and the others have lost bits of f(x), as eager's.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchsmith.emit.c import emit_kernel
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Expr, Load, const, op
from torchsmith.ir.kernel import Kernel
from torchsmith.ir.linear import const_of
from torchsmith.ir.program import Buffer, Fresh, Program, Stage, Store
from torchsmith.lower import activation
from torchsmith.options import Options
from torchsmith.runtime.toolchain import toolchain
from torchsmith.schedule.kernels import form_kernels
from torchsmith.schedule.memory.layouts import dense

N = 4096

MVEC = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
        "erf", "erfc")  # fmt: skip
# function -> (its expression, the reference on 8 doubles; V(f, x) calls scalar f)
UNARY: dict[str, tuple[Callable[[Expr], Expr], str]] = {n: (lambda x, n=n: op(n, x), f"_ZGVeN8v_{n}(x)") for n in MVEC}  # type: ignore[misc]
UNARY |= {
    "sqrt": (lambda x: op("sqrt", x), "V(sqrt, x)"),
    "rsqrt": (lambda x: op("rsqrt", x), "1 / V(sqrt, x)"),
    "sigmoid": (lambda x: op("sigmoid", x), "1 / (1 + _ZGVeN8v_exp(-x))"),
    "silu": (activation.silu, "x / (1 + _ZGVeN8v_exp(-x))"),
    "mish": (activation.mish, "V(mish, x)"),
    "softplus": (activation.softplus_of, "V(softplus, x)"),
    "log_sigmoid": (activation.log_sigmoid_of, "V(logsigmoid, x)"),
    "gelu": (activation.gelu_exact, "x * 0.5 * _ZGVeN8v_erfc(x * -0x1.6a09e667f3bcdp-1)"),
    "gelu_tanh": (activation.gelu_tanh, "x / (1 + _ZGVeN8v_exp(x * (x * x * 0.044715 + 1) * -0x1.988453373a00ap+0))"),
    "lgamma": (lambda x: op("lgamma", x), "V(lgamma, x)"),
    "digamma": (lambda x: op("digamma", x), "V(digamma, x)"),
    "erfinv": (lambda x: op("erfinv", x), "V(erfinv, x)"),
}
BINARY: dict[str, tuple[Callable[[Expr, Expr], Expr], str]] = {
    "pow": (lambda x, y: op("pow", x, y), "_ZGVeN8vv_pow(x, y)"),
    "atan2": (lambda x, y: op("atan2", x, y), "_ZGVeN8vv_atan2(x, y)"),
    "hypot": (lambda x, y: op("hypot", x, y), "_ZGVeN8vv_hypot(x, y)"),
}
PRODUCTS = ("gelu", "gelu_tanh", "silu", "mish")
SLOW = ("lgamma", "digamma", "erfinv", "mish", "softplus", "log_sigmoid")  # scalar references: every SLOW_STRIDE-th input
SLOW_STRIDE = 7

DRIVER = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef double v8 __attribute__((vector_size(64)));
typedef long long m8 __attribute__((vector_size(64)));
typedef float f8 __attribute__((vector_size(32), aligned(4)));
DECLS
static inline v8 apply(double (*f)(double), v8 x) { v8 r; for (int k = 0; k < 8; k++) r[k] = f(x[k]); return r; }
#define V(f, x) apply(f, x)
static double mish(double x) { double e = exp(x < 40 ? x : 40), n = e * (e + 2); return x != x ? x : x * (n / (n + 2)); }
static double softplus(double x) { return x > 20 ? x : log1p(exp(x)); }
static double logsigmoid(double x) { return (x < 0 ? x : 0) - log1p(exp(-fabs(x))); }
static double erfinv(double y) {
  if (!(fabs(y) <= 1)) return NAN;
  if (fabs(y) == 1) return y * INFINITY;
  double w = log1p(-y * y), t = w / 2 + 4.330746750799873, x = copysign(sqrt(sqrt(t * t - w / 0.147) - t), y);
  if (fabs(y) < 1e-4) return y * (0.886226925452758 + y * y * 0.23201366653465444);
  for (int k = 0; k < 3; k++) {
    double f = fabs(y) < 0.5 ? erf(x) - y : ((1 - fabs(y)) - erfc(fabs(x))) * (y < 0 ? -1 : 1);
    f /= 1.1283791670955126 * exp(-x * x); x -= f / (1 + x * f);
  }
  return x;
}
static double digamma(double x) {
  if (x == 0) return copysign(INFINITY, -x);
  if (isinf(x)) return x > 0 ? x : NAN;
  if (x < 0) { double r = x - rint(x); return r == 0 ? NAN : digamma(1 - x) - M_PI / tan(M_PI * r); }
  double s = 0; for (; x < 16; x++) s -= 1 / x;
  double z = 1 / (x * x);
  return s + log(x) - 0.5 / x - z * (1 / 12. - z * (1 / 120. - z * (1 / 252. - z * (1 / 240. - z * (1 / 132. - z * 691 / 32760)))));
}
static v8 ref(v8 x, v8 y) { (void)y; return REF; }

typedef struct { double worst; float x, y, got; double want; long special; float sx, sy, sgot; double swant; double sum; long count; } result;
static uint64_t state;
static inline uint64_t draw(void) { uint64_t z = (state += 0x9e3779b97f4a7c15ull); z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull; z = (z ^ (z >> 27)) * 0x94d049bb133111ebull; return z ^ (z >> 31); }

static void judge(const float *x, const float *y, const float *out, int n, result *r) {
  v8 best = {0}, total = {0}, inf = (v8){0} + 0x1p128;
  m8 odd = {0};
  for (int k = 0; k < n; k += 8) {
    v8 a = __builtin_convertvector(*(const f8 *)(x + k), v8), b = __builtin_convertvector(*(const f8 *)(y + k), v8);
    v8 got = __builtin_convertvector(*(const f8 *)(out + k), v8), want = ref(a, b);
    m8 nan = (got != got) | (want != want), bad = (got != got) ^ (want != want);
    bad |= (got == 0) & (want == 0) & (((m8)got ^ (m8)want) < 0);
    odd |= bad;
    m8 over = want > inf, under = want < -inf;
    want = (v8)(((m8)inf & over) | ((m8)-inf & under) | ((m8)want & ~(over | under)));
    over = got > inf; under = got < -inf;
    got = (v8)(((m8)inf & over) | ((m8)-inf & under) | ((m8)got & ~(over | under)));
    m8 e = ((m8)want >> 52) & 2047, lo = e < 1023 - 126; e = (e & ~lo) | ((1023 - 126) & lo);
    m8 hi = e > 1023 + 127; e = (e & ~hi) | ((1023 + 127) & hi);
    m8 none = nan | (NORMAL & (want < 0x1p-126) & (want > -0x1p-126));
    v8 d = got - want; d = (v8)((m8)d & 0x7fffffffffffffffll & ~none);
    v8 err = d * (v8)((1023 + 23 + 1023 - e) << 52);
    total += err;
    m8 more = err > best; best = (v8)(((m8)err & more) | ((m8)best & ~more));
    double top = 0; for (int l = 0; l < 8; l++) top = best[l] > top ? best[l] : top;
    if (top > r->worst) for (int l = 0; l < 8; l++) if (err[l] > r->worst) { r->worst = err[l]; r->x = x[k + l]; r->y = y[k + l]; r->got = out[k + l]; r->want = want[l]; }
    long any = 0; for (int l = 0; l < 8; l++) any |= bad[l];
    if (any) for (int l = 0; l < 8; l++) if (bad[l]) { if (!r->special++) { r->sx = x[k + l]; r->sy = y[k + l]; r->sgot = out[k + l]; r->swant = want[l]; } }
  }
  for (int l = 0; l < 8; l++) r->sum += total[l];
  r->count += n;
}

void TS_KERNEL(void *const *bufs, const int64_t *syms, int64_t lo, int64_t hi);
void unary(int64_t stride, int64_t grid, result *r, int64_t first) {
  static float x[4096], y[4096]; void *bufs[2]; bufs[OUT] = y; bufs[1 - OUT] = x;
  for (uint64_t b = 0; b < 1ull << 32; b += 4096 * stride) {
    for (int k = 0; k < 4096; k++) { uint32_t i = (uint32_t)(b + k * stride + first); memcpy(x + k, &i, 4); }
    TS_KERNEL(bufs, 0, 0, grid);
    judge(x, x, y, 4096, r);
  }
}
enum { SPECIALS = 20 };
static const float SPECIAL[SPECIALS] = {0, INFINITY, NAN, 1, 2, 3, 0.5, 1.5, 1e10, 16777215, 16777216, 2147483648.f, 0x1p-149, 0x1.8p-140, 0x1p-126, 0x1.fffffcp-127,
                                        0x1.fffffep127, 0x1p64, 0x1.fffffep-1, 0x1.000002p0};
void binary(int64_t blocks, int64_t grid, result *r) {
  static float x[4096], y[4096], z[4096]; void *bufs[3] = {z, x, y};
  state = 7;
  for (int64_t b = 0; b < blocks; b++) {
    for (int k = 0; k < 4096; k++) {  /* any bits; the size of everyday numbers; results that neither vanish nor overflow; special values */
      uint64_t w = draw(); uint32_t i = (uint32_t)w, j = (uint32_t)(w >> 32);
      if (b % 4 == 1 || b % 4 == 2) { i = (i & 0x83ffffffu) + 0x3c000000u; j = (j & 0x87ffffffu) + 0x3c000000u; }
      memcpy(x + k, &i, 4); memcpy(y + k, &j, 4);
      if (b % 4 == 2 && x[k] != 0) y[k] = (float)((double)(int32_t)j * 0x1p-31 * 88 / log(fabs((double)x[k])));
      if (b % 4 == 3 && w % 3 != 0) x[k] = SPECIAL[(w >> 8) % SPECIALS] * (w & 1u << 16 ? -1 : 1);
      if (b % 4 == 3 && w % 3 != 1) y[k] = SPECIAL[(w >> 40) % SPECIALS] * (w & 1ull << 48 ? -1 : 1);
    }
    TS_KERNEL(bufs, 0, 0, grid);
    judge(x, y, z, 4096, r);
  }
}
"""


class Result(ctypes.Structure):
    _fields_ = [("worst", ctypes.c_double), ("x", ctypes.c_float), ("y", ctypes.c_float), ("got", ctypes.c_float), ("want", ctypes.c_double),
                ("special", ctypes.c_long), ("sx", ctypes.c_float), ("sy", ctypes.c_float), ("sgot", ctypes.c_float), ("swant", ctypes.c_double),
                ("sum", ctypes.c_double), ("count", ctypes.c_long)]  # fmt: skip


def kernel_of(fn: Callable[..., Expr], operands: int, n: int = N, dtype: dt.DType = dt.f32) -> Kernel:
    """y[i] = fn(x0[i], ...) for n elements."""
    i, shape = Axis("i0"), (const(n),)
    names = [f"x{k}" for k in range(operands)]
    buffers = {b: Buffer(b, dtype, shape, dense(shape), "input") for b in names} | {"y": Buffer("y", dtype, shape, None, "output")}
    value = fn(*(Load(b, dtype, (i,)) for b in names))
    stage = Stage(((i, const(n)),), (Store("y", (i,), value),))
    (kernel,) = form_kernels(Program("p", (), tuple(names), buffers, (stage,), (Fresh("y"),)), Options()).body
    assert isinstance(kernel, Kernel)
    return kernel


def measure(name: str, stride: int, extra: list[str], first: int = 0) -> Result:
    """Compile and count through."""
    two = name in BINARY
    fn, reference = BINARY[name] if two else UNARY[name]
    kernel = kernel_of(fn, 2 if two else 1)
    grid = 1
    for _, extent in kernel.grid:
        grid *= const_of(extent) or 1
    out = [p.buf for p in kernel.params].index("y")
    decls = "\n".join(f"v8 _ZGVeN8v_{f}(v8);" for f in MVEC) + "\n" + "\n".join(f"v8 _ZGVeN8vv_{f}(v8, v8);" for f in BINARY)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "kernel.c").write_text(emit_kernel(kernel))
        (at / "driver.c").write_text(DRIVER.replace("DECLS", decls).replace("REF", reference).replace("OUT", str(out)).replace("NORMAL", "-1ll" if name in PRODUCTS else "0ll"))
        flags = list(toolchain().flags) if not extra else [f for f in toolchain().flags if not f.startswith("-m")] + extra
        subprocess.run(["gcc", *flags, "-DTS_KERNEL=ts_kernel", "-fvisibility=default", "-c", "kernel.c"], cwd=at, check=True)
        subprocess.run(["gcc", "-O2", "-march=native", "-w", "-fPIC", "-shared", "-DTS_KERNEL=ts_kernel", "driver.c", "kernel.o", "-o", "all.so", "-lmvec", "-lm"],
                       cwd=at, check=True)  # fmt: skip
        lib = ctypes.CDLL(str(at / "all.so"))
        found = Result()
        run, count = (lib.binary, max(1, (1 << 16) // stride)) if two else (lib.unary, stride)
        run(ctypes.c_int64(count), ctypes.c_int64(grid), ctypes.byref(found), ctypes.c_int64(first))
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else "")
    p.add_argument("names", nargs="*")
    p.add_argument("--stride", type=int, default=1)
    p.add_argument("--first", type=int, default=0, help="with --stride N, 0 to N - 1: N runs see every input")
    p.add_argument("--flags", nargs="*", default=[], help="other machine flags, as -mavx2")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    lines = ["| function | inputs | worst ulp | at | mean ulp | special values that differ | s |", "|---|---|---|---|---|---|---|"]
    print(*lines, sep="\n")
    for name in args.names or [*UNARY, *BINARY]:
        began = time.perf_counter()
        r = measure(name, args.stride * (SLOW_STRIDE if name in SLOW else 1), args.flags, args.first)
        place = f"({r.x!r}, {r.y!r})" if name in BINARY else f"{r.x!r}"
        special = f"{r.special}" + (f", first at {r.sx!r}{f', {r.sy!r}' if name in BINARY else ''}: {r.sgot!r} for {r.swant!r}" if r.special else "")
        seen = f"{r.count:,}" if r.count < 1 << 32 else "all"
        lines.append(f"| {name} | {seen} | {r.worst:.3f} | {place}: {r.got!r} for {r.want!r} | {r.sum / max(1, r.count):.4f} | {special} | {time.perf_counter() - began:.0f} |")
        print(lines[-1], flush=True)
    if args.out:
        head = f"# Accuracy of the elementary functions, float32\n\n- command: python bench/ulp.py{f' --stride {args.stride}' if args.stride > 1 else ''}\n"
        args.out.write_text(head + f"- flags: {' '.join(args.flags) or 'of this processor'}\n\n{__doc__}\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
