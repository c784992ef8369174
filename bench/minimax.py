"""Minimax polynomials for emit/math.py: Remez exchange on a weighted error, in mpmath.

In: f and weight w on [a, b], a degree. Out: coefficients, highest power first, and the largest |w (p - f)|.

    python bench/minimax.py            prints the fits of the table FITS (those of emit/math.py)

Each fit names what is approximated and how the error is weighed: by default relative to the function that the polynomial serves.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np

Function = Callable[[Any], Any]


def remez(f: Function, a: Any, b: Any, degree: int, weight: Function = lambda x: 1, rounds: int = 12) -> tuple[list[Any], Any]:
    """Coefficients (constant term first) of the polynomial with the least largest |weight (p - f)| on [a, b]."""
    a, b, n = mp.mpf(a), mp.mpf(b), degree + 2
    points = [(a + b) / 2 + (b - a) / 2 * mp.cos(mp.pi * (2 * k + 1) / (2 * n)) for k in range(n)][::-1]
    grid = [(a + b) / 2 - (b - a) / 2 * mp.cos(mp.pi * (k + mp.mpf(1) / 2) / (24 * n)) for k in range(24 * n)]
    values = [(f(x), weight(x)) for x in grid]
    coefs: list[Any] = []
    worst = mp.inf
    for _ in range(rounds):
        rows = mp.matrix(n, n)
        right = mp.matrix(n, 1)
        for i, x in enumerate(points):
            for j in range(degree + 1):
                rows[i, j] = x**j
            rows[i, degree + 1] = (-1) ** i / weight(x)
            right[i] = f(x)
        solved = mp.lu_solve(rows, right)
        coefs = [solved[j] for j in range(degree + 1)]
        error = [w * (mp.polyval(coefs[::-1], x) - v) for x, (v, w) in zip(grid, values, strict=True)]
        # one extremum per run of equal sign, then the n largest neighbours
        runs: list[int] = []
        for k, e in enumerate(error):
            if runs and (error[runs[-1]] > 0) == (e > 0):
                if abs(e) > abs(error[runs[-1]]):
                    runs[-1] = k
            else:
                runs.append(k)
        while len(runs) > n:
            runs.pop(0 if abs(error[runs[0]]) < abs(error[runs[-1]]) else -1)
        worst = max(abs(e) for e in error)
        if len(runs) < n or worst < 1.01 * min(abs(error[k]) for k in runs):
            break
        points = [grid[k] for k in runs]
    return coefs, worst


def rounded(x: Any, bits: int) -> float:
    return float(x) if bits == 64 else struct.unpack("f", struct.pack("f", float(x)))[0]


def fit(f: Function, a: Any, b: Any, degree: int, weight: Function = lambda x: 1, bits: int = 32) -> tuple[list[float], float]:
    """As `remez`, highest power first, in numbers of the format: rounded one after the other from the constant term up, and what a rounding
    has changed is taken up by the later ones (least squares). The error is that of the result.
    """
    coefs = remez(f, a, b, degree, weight)[0]
    a, b = mp.mpf(a), mp.mpf(b)
    points = [(a + b) / 2 - (b - a) / 2 * mp.cos(mp.pi * (k + mp.mpf(1) / 2) / 400) for k in range(400)]
    scale = np.array([float(abs(weight(x))) for x in points])
    done: list[float] = []
    for k in range(degree + 1):
        done.append(rounded(coefs[k], bits))
        powers = np.array([[float(x) ** j for j in range(k + 1, degree + 1)] for x in points])
        if powers.shape[1]:  # sum of later changes = - (change of this one)
            off = np.array([float((done[k] - coefs[k]) * x**k) for x in points])
            change = np.linalg.lstsq(powers * scale[:, None], -off * scale, rcond=None)[0]
            coefs = [*coefs[: k + 1], *(c + d for c, d in zip(coefs[k + 1 :], change, strict=True))]
    error = max(abs(weight(x) * (mp.polyval([mp.mpf(c) for c in done[::-1]], x) - f(x))) for x in points)
    return done[::-1], float(error)


def _logp(x: Any) -> Any:
    """(log(1 + x) - x + x^2 / 2) / x^3"""
    if abs(x) < mp.mpf("1e-4"):
        return mp.mpf(1) / 3 - x / 4 + x**2 / 5 - x**3 / 6 + x**4 / 7
    return (mp.log1p(x) - x + x * x / 2) / x**3


def _root(f: Function, scale: Any = 1) -> Function:
    """(f(sqrt z) / sqrt z - 1) / z, as a function of z: for f(x) = x + x^3 P(x^2)"""
    def run(z: Any) -> Any:
        x = mp.sqrt(z)
        return (f(x) / x - scale) / z

    return run


def mills(u: Any, k: Any, s: Any) -> Any:
    """exp(a^2 / s) erfc-like tail, times (a + k) / k, a = k (1 + u) / (1 - u); s = 1: erfc, s = 2: normal distribution"""
    a = k * (1 + u) / (1 - u)
    return mp.exp(a * a / s) * mp.erfc(a / mp.sqrt(s)) * (a + k) / k * (1 if s == 1 else mp.mpf(1) / 2)


def _lgamma_near(t: Any) -> Any:
    """lgamma(t) / ((t - 1) (t - 2))"""
    t += mp.mpf("1e-20") if t in (1, 2) else 0
    return mp.loggamma(t) / ((t - 1) * (t - 2))


def _lgamma_tail(z: Any) -> Any:
    """What Stirling's formula lacks at w = 1 / sqrt z, times w"""
    w = 1 / mp.sqrt(z)
    return (mp.loggamma(w) - ((w - mp.mpf(1) / 2) * mp.log(w) - w + mp.log(2 * mp.pi) / 2)) * w


def _erfinv_of_w(w: Any) -> Any:
    """erfinv(x) / x with w = -log(1 - x^2)"""
    x2 = -mp.expm1(-w)
    x = mp.sqrt(x2)
    return mp.erfinv(x) / x


E = mp.mpf("1e-6")
# name -> (function, a, b, degree, weight, bits)
FITS: dict[str, tuple[Function, Any, Any, int, Function, int]] = {
    "LOG32": (_logp, -0.25, 0.5, 7, lambda x: x**3 / mp.log1p(x), 32),
    "TANH32": (_root(mp.tanh), E, 0.5625**2, 4, lambda z: z ** 1.5 / mp.tanh(mp.sqrt(z)), 32),
    "ASIN32": (_root(mp.asin), E, 0.25, 4, lambda z: z ** 1.5 / mp.asin(mp.sqrt(z)), 32),
    "ATAN32": (_root(mp.atan), E, 1, 8, lambda z: z ** 1.5 / mp.atan(mp.sqrt(z)), 32),
    "ERFCG32": (lambda u: mills(u, mp.mpf(2), 1), -1, (mp.mpf(10.1) - 2) / (mp.mpf(10.1) + 2), 11, lambda u: 1 / mills(u, mp.mpf(2), 1), 32),
    "NDTRG32": (lambda u: mills(u, mp.mpf(3), 2), -1, (mp.mpf(14.3) - 3) / (mp.mpf(14.3) + 3), 10, lambda u: 1 / mills(u, mp.mpf(3), 2), 32),
    "ERFINVA32": (lambda t: _erfinv_of_w(t + mp.mpf(2.5)), -2.499999, 2.5, 10, lambda t: 1 / _erfinv_of_w(t + mp.mpf(2.5)), 32),
    "POW64": (lambda z: ((2 * mp.atanh(mp.sqrt(z)) / mp.sqrt(z) - 2) / z - mp.mpf(2) / 3) / z, E, mp.mpf("0.02945"), 6, lambda z: z * z / 2, 64),
    "POW32": (lambda z: (2 * mp.atanh(mp.sqrt(z)) / mp.sqrt(z) - 2) / z, E, mp.mpf("0.0417"), 4, lambda z: 1, 32),
    "LGAMMA_NEAR": (lambda u: _lgamma_near(u + 2), -1, 1, 13, lambda u: 1 / _lgamma_near(u + 2), 64),
    "LGAMMA_TAIL": (_lgamma_tail, mp.mpf("1e-9"), mp.mpf(1) / 9, 3, lambda z: 1, 64),
    "ERFINVB32": (lambda t: _erfinv_of_w((t + 3) ** 2), mp.sqrt(5) - 3, mp.sqrt(mp.mpf(17)) - 3, 9, lambda t: 1 / _erfinv_of_w((t + 3) ** 2), 32),
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("fit", nargs="*", help="rows of FITS; all of them without")
    mp.mp.prec = 200
    for name in p.parse_args().fit or FITS:
        f, a, b, degree, weight, bits = FITS[name]
        coefs, error = fit(f, a, b, degree, weight, bits)
        print(f"{name} = {tuple(coefs)!r}  # {mp.nstr(mp.log(error, 2), 4)} bits", flush=True)


if __name__ == "__main__":
    main()
