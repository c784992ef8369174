"""Every elementary function against mpmath-free references: ulp errors on samples, special values exactly."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from emit_harness import run

from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Load, const, op
from torchsmith.ir.ops import OPS
from torchsmith.ir.program import Buffer, Fresh, Program, Stage, Store
from torchsmith.options import Options
from torchsmith.schedule.kernels import form_kernels
from torchsmith.schedule.memory.layouts import dense

# name -> (range of samples, allowed ulp in f32, in f64)
UNARY = {
    "exp": (-110, 95, 1.5, 2), "exp2": (-155, 130, 2, 2), "expm1": (-20, 90, 3, 3), "log": (1e-45, 1e38, 1.5, 2), "log2": (1e-45, 1e38, 2, 3),
    "log10": (1e-45, 1e38, 2, 3), "log1p": (-0.999, 1e10, 1.5, 3), "sin": (-1e5, 1e5, 2, 3), "cos": (-1e5, 1e5, 2, 3), "tan": (-1e5, 1e5, 4, 4),
    "asin": (-1, 1, 3, 4), "acos": (-1, 1, 2, 4), "atan": (-1e5, 1e5, 2, 3), "sinh": (-90, 90, 3, 4), "cosh": (-90, 90, 2, 4), "tanh": (-12, 12, 2, 4),
    "asinh": (-1e10, 1e10, 3, 4), "acosh": (1, 1e10, 3, 4), "atanh": (-1, 1, 3, 4), "erf": (-6, 6, 3, 4), "erfc": (-5, 10, 4, 6),
    "i0": (-80, 80, 2, 30), "i0e": (-1e3, 1e3, 2, 30), "i1": (-80, 80, 2, 30), "i1e": (-1e3, 1e3, 2, 30), "erfcx": (-5, 1e3, 2, 60),
    "log_ndtr": (-1e3, 6, 4, 1e4), "ndtri": (1e-30, 1, 4, 1e5), "ndtr": (-14, 8, 4, 6), "gelu": (-12, 8, 4, 6),
    "sigmoid": (-80, 80, 3, 3), "rsqrt": (1e-38, 1e38, 1.5, 1.5), "sqrt": (0, 1e38, 0.51, 0.51), "floor": (-1e9, 1e9, 0, 0), "ceil": (-1e9, 1e9, 0, 0),
    "round": (-100, 100, 0, 0), "trunc": (-1e9, 1e9, 0, 0), "lgamma": (-19.7, 100, 2, 1e7), "digamma": (-19.7, 100, 4, 1e7), "erfinv": (-1, 1, 3, 1e5),
    "abs": (-5, 5, 0, 0), "sign": (-5, 5, 0, 0), "neg": (-5, 5, 0, 0),
}  # fmt: skip
# where bench/ulp.py, which counts through all float32, found the largest errors (and where it found faults that are mended)
WORST = {
    "exp": [4.527576923370361, 88.72283, -103.97208, -103.97209, -104.0, -104.00001], "log2": [0.7435290813446045, 1.4141138], "log10": [0.7499755024909973], "log": [1.438539743423462],
    "sin": [-40508.5078125, 1.2308671e33, 3.4e38], "cos": [1.2308671462421757e33, -40508.5078125], "tan": [435162784.0], "asin": [0.5002448558807373],
    "sinh": [0.12134169787168503, 89.4159, 89.762855], "cosh": [3.844440221786499, 89.4159], "tanh": [0.5027318000793457, 0.060167551], "acosh": [1.0275322198867798],
    "erf": [-0.46324190497398376], "erfc": [1.8825465440750122, 7.953684329986572, 0.0009285177802667022, 4.0, -4.0, 10.053, 10.054, 10.06, 10.0699, 10.0701, 10.09, 10.2, -4.49, -4.51, 1e30],
    "gelu": [-6.084666728973389, -5.844058513641357, 0.0038429698, -5.4, 5.4, -100.0, 3.4e38, -14.4, 6.4, 6.6, 14.25], "sigmoid": [-88.72318267822266, -3.465116262435913],
    "exp2": [-149.0, -149.5, -149.99998, -150.0, -150.00002, -1e30], "ndtr": [-14.16, -14.17, -14.19, -14.21, -14.4, 6.49, 6.51, 14.25, 1e30],
    "erfinv": [0.0005188417853787541, 0.99999994], "sqrt": [2.117582241918006e-22, 7e-46],
}  # fmt: skip
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, -3e38, 2.0, 3.5, 2.5, -2.5, 1e20, 1e15, -3.0]


def samples(lo: float, hi: float, dtype: type, n: int = 4099) -> np.ndarray:
    """Uniform, and log-uniform towards 0 and towards the ends."""
    r = np.random.default_rng(1)
    u = r.uniform(lo, hi, n)
    with np.errstate(all="ignore"):
        g = np.exp(r.uniform(np.log(max(abs(lo), 1e-30) if lo > 0 else 1e-30), np.log(max(abs(lo), abs(hi))), n))
    g = np.clip(g * r.choice([-1, 1], n), lo, hi)
    return np.concatenate([u, g, np.array([lo, hi])]).astype(dtype)


def apply(name: str, dtype: dt.DType, *xs: np.ndarray) -> np.ndarray:
    n = xs[0].size
    i = Axis("i0")
    shape = (const(n),)
    names = [f"x{k}" for k in range(len(xs))]
    buffers = {b: Buffer(b, dtype, shape, dense(shape), "input") for b in names} | {"y": Buffer("y", dtype, shape, None, "output")}
    value = op(name, *(Load(b, dtype, (i,)) for b in names), dtype=dtype)
    program = Program("p", (), tuple(names), buffers, (Stage(((i, const(n)),), (Store("y", (i,), value),)),), (Fresh("y"),))
    return run(form_kernels(program, Options()), dict(zip(names, xs, strict=True)))["y"].copy()


def _inverse_normal(p: float) -> float:
    return NormalDist().inv_cdf(p) if 0 < p < 1 else math.inf * (p - 0.5) if p in (0, 1) else math.nan


def _inverse_erf(x: float) -> float:
    if abs(x) >= 1:
        return math.inf * x if abs(x) == 1 else math.nan
    y = _inverse_normal((1 + x) / 2) / math.sqrt(2)
    return y - (math.erf(y) - x) * math.sqrt(math.pi) / 2 * math.exp(y * y)  # exact near 0 too


# what mpmath takes a millisecond for: fewer samples; bench/ulp.py goes through all
SLOW = frozenset({"i0", "i0e", "i1", "i1e"}), frozenset({"ndtri", "erfinv"})

# in double precision, for float32: mpmath looks for roots, a millisecond each
QUICK = {"ndtri": _inverse_normal, "erfinv": _inverse_erf}


def exact(name: str, *xs: np.ndarray) -> np.ndarray:
    fn = (QUICK.get(name) if xs[0].dtype == np.float32 else None) or REFERENCE.get(name) or OPS[name].scalar
    return np.array([float(fn(*map(float, row))) for row in zip(*xs, strict=True)])


try:
    import mpmath as mp

    def _mp(fn):  # type: ignore[no-untyped-def]
        def run_(*a: float) -> float:
            if any(math.isnan(v) or math.isinf(v) for v in a):
                return math.nan
            try:
                with mp.workprec(160):
                    r = fn(*map(mp.mpf, a))
                    return math.nan if isinstance(r, mp.mpc) else float(r)
            except (ZeroDivisionError, ValueError):
                return math.nan

        return run_

    REFERENCE = {n: _mp(f) for n, f in {
        "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "exp": mp.exp, "log1p": mp.log1p, "expm1": mp.expm1, "erfc": mp.erfc, "erf": mp.erf, "tanh": mp.tanh,
        "sinh": mp.sinh, "cosh": mp.cosh, "sigmoid": lambda x: 1 / (1 + mp.exp(-x)), "lgamma": lambda x: mp.log(abs(mp.gamma(x))), "digamma": mp.digamma,
        "pow": mp.power, "log2": lambda x: mp.log(x, 2), "log10": mp.log10, "exp2": lambda x: mp.mpf(2) ** x, "erfinv": mp.erfinv,
        "i0": lambda x: mp.besseli(0, x), "i1": lambda x: mp.besseli(1, x), "i0e": lambda x: mp.besseli(0, x) * mp.exp(-abs(x)),
        "i1e": lambda x: mp.besseli(1, x) * mp.exp(-abs(x)), "erfcx": lambda x: mp.exp(x * x) * mp.erfc(x), "log_ndtr": lambda x: mp.log(mp.ncdf(x)),
        "ndtri": lambda p: -mp.sqrt(2) * mp.erfinv(1 - 2 * p), "ndtr": mp.ncdf, "gelu": lambda x: x * mp.ncdf(x), "asinh": mp.asinh, "acosh": mp.acosh, "atanh": mp.atanh, "rsqrt": lambda x: 1 / mp.sqrt(x),
    }.items()}  # fmt: skip
except ImportError:  # the C library through Python is nearly as good
    REFERENCE = {}


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the wanted value."""
    with np.errstate(all="ignore"):
        rounded = want.astype(got.dtype)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        error = np.abs(got.astype(np.float64) - want) / unit
    same = (got == rounded) | (np.isnan(got) & np.isnan(want))
    return np.where(same, 0.0, error)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary(name: str, dtype: str) -> None:
    lo, hi, ulp32, ulp64 = UNARY[name]
    t = np.float32 if dtype == "f32" else np.float64
    slow = name in SLOW[0] or (dtype == "f64" and name in SLOW[1])
    x = np.concatenate([samples(lo, hi, t, 601 if slow else 4099 if dtype == "f32" else 1501), np.array(WORST.get(name, []), t)])
    error = ulps(apply(name, dt.DTYPES[dtype], x), exact(name, x))
    worst = int(np.nanargmax(np.where(np.isnan(error), np.inf, error)))
    assert error[worst] <= (ulp32 if dtype == "f32" else ulp64), f"{name}({x[worst]!r}) is off by {error[worst]} ulp"


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", sorted(set(UNARY)))
def test_special_values(name: str, dtype: str) -> None:
    t = np.float32 if dtype == "f32" else np.float64
    x = np.array(SPECIAL, dtype=t)
    got = apply(name, dt.DTYPES[dtype], x)
    want = np.array([float(OPS[name].scalar(float(v))) for v in x])
    with np.errstate(all="ignore"):
        want = want.astype(t)
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-38 if t is np.float32 else 0)
    if name not in ("sigmoid", "lgamma", "digamma", "erfinv"):
        zero = np.isfinite(want) & (want == 0) & np.isfinite(x)
        assert (np.signbit(got[zero]) == np.signbit(want[zero])).all() or name in ("acosh", "floor", "ceil", "trunc", "round", "sign", "log_ndtr")


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_pow(dtype: str) -> None:
    t = np.float32 if dtype == "f32" else np.float64
    r = np.random.default_rng(2)
    x = np.concatenate([np.exp(r.uniform(-40, 40, 1000)), -np.exp(r.uniform(-4, 4, 300)), r.uniform(0.9, 1.1, 300)]).astype(t)
    y = np.concatenate([r.uniform(-2, 2, 1000), r.integers(-7, 8, 300), r.uniform(-300, 300, 300)]).astype(t)
    error = ulps(apply("pow", dt.DTYPES[dtype], x, y), exact("pow", x, y))
    assert error.max() <= 3
    grid = np.array([(a, b) for a in SPECIAL for b in SPECIAL], dtype=t)
    got = apply("pow", dt.DTYPES[dtype], grid[:, 0].copy(), grid[:, 1].copy())
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got, np.power(grid[:, 0], grid[:, 1]), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", ["atan2", "hypot", "fmod", "remainder", "min", "max", "fmin", "fmax", "copysign", "nextafter"])
def test_binary(name: str, dtype: str) -> None:
    t = np.float32 if dtype == "f32" else np.float64
    r = np.random.default_rng(3)
    grid = np.array([(a, b) for a in SPECIAL for b in SPECIAL], dtype=t)
    x = np.concatenate([grid[:, 0], r.standard_normal(500) * 100]).astype(t)
    y = np.concatenate([grid[:, 1], r.standard_normal(500)]).astype(t)
    got = apply(name, dt.DTYPES[dtype], x, y)
    fn = {"atan2": np.arctan2, "hypot": np.hypot, "fmod": np.fmod, "remainder": np.remainder, "min": np.minimum, "max": np.maximum,
          "fmin": np.fmin, "fmax": np.fmax, "copysign": np.copysign, "nextafter": np.nextafter}[name]  # fmt: skip
    with np.errstate(all="ignore"):
        want = fn(x, y)
        if name == "remainder":
            keep = np.isfinite(x) & np.isfinite(y)
            got, want = got[keep], want[keep]
    np.testing.assert_allclose(got, want, rtol=1e-6 if t is np.float32 else 1e-14, atol=0)
