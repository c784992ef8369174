"""Sizes in normal form: an index Expr becomes a sum of monomials and comes back in one canonical spelling.

In: index Exprs over add, sub, mul, neg, floordiv, mod, min, max. Out: Exprs such that equal polynomials are the same object, and
interval bounds of them. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from ..ir import dtype as dt
from ..ir.expr import Cast, Const, Expr, Op, Sym, const

Monomial = tuple[Expr, ...]  # atoms, sorted by spelling; () is the constant term
Poly = dict[Monomial, int]
Range = tuple[int | None, int | None]

ZERO, ONE = const(0), const(1)


@lru_cache(maxsize=65536)
def spelling(e: Expr) -> str:
    """A total order on atoms that does not depend on the process."""
    if isinstance(e, Sym):
        return e.name
    if isinstance(e, Const):
        return str(e.value)
    name = e.name if isinstance(e, Op) else type(e).__name__
    return f"{name}:{e.dtype.name}({','.join(spelling(a) for a in e.args)})"


def poly(e: Expr) -> Poly:
    """The polynomial of an index Expr; what is not add, sub, mul or neg is an atom."""
    if isinstance(e, Const):
        return {(): int(e.value)} if e.value else {}
    if isinstance(e, Op):
        if e.name == "add":
            return add(poly(e.args[0]), poly(e.args[1]))
        if e.name == "sub":
            return add(poly(e.args[0]), poly(e.args[1]), -1)
        if e.name == "neg":
            return add({}, poly(e.args[0]), -1)
        if e.name == "mul":
            return mul(poly(e.args[0]), poly(e.args[1]))
    return {(e,): 1}


def add(a: Poly, b: Poly, scale: int = 1) -> Poly:
    out = dict(a)
    for m, c in b.items():
        v = out.get(m, 0) + scale * c
        if v:
            out[m] = v
        else:
            del out[m]
    return out


def mul(a: Poly, b: Poly) -> Poly:
    out: Poly = {}
    for m, c in a.items():
        for n, d in b.items():
            out = add(out, {tuple(sorted(m + n, key=spelling)): c * d})
    return out


def _order(m: Monomial) -> tuple[int, tuple[str, ...]]:
    return (-len(m), tuple(spelling(a) for a in m))


def expr(p: Poly) -> Expr:
    """The canonical Expr: highest degree first, coefficient last in each product, constant term last."""
    total: Expr | None = None
    for m in sorted(p, key=_order):
        term: Expr | None = None
        for atom in m:
            term = atom if term is None else Op("mul", dt.index, (term, atom))
        if term is None:
            term = const(p[m])
        elif p[m] != 1:
            term = Op("mul", dt.index, (term, const(p[m])))
        total = term if total is None else Op("add", dt.index, (total, term))
    return ZERO if total is None else total


def divide(a: Poly, b: Poly) -> Poly | None:
    """a / b where b divides a; else None. Long division by the leading term: `_order` is kept by products."""
    lead, out = min(b, key=_order), {}
    while a:
        n = min(a, key=_order)
        rest = list(n)
        for atom in lead:
            if atom not in rest:
                return None
            rest.remove(atom)
        if a[n] % b[lead]:
            return None
        term = {tuple(rest): a[n] // b[lead]}
        out.update(term)
        a = add(a, mul(term, b), -1)
    return out


@lru_cache(maxsize=65536)
def normal(name: str, a: Expr, b: Expr) -> Expr:
    """`name(a, b)` on index Exprs in canonical spelling."""
    p, q = poly(a), poly(b)
    if name == "add":
        return expr(add(p, q))
    if name == "sub":
        return expr(add(p, q, -1))
    if name == "mul":
        return expr(mul(p, q))
    if name in ("floordiv", "mod"):
        quotient = divide(p, q) if q else None
        if quotient is not None:  # (a*b)//b -> a, (a*b) % b -> 0
            return expr(quotient) if name == "floordiv" else ZERO
        if isinstance(a, Const) and isinstance(b, Const):
            return const(int(a.value) // int(b.value) if name == "floordiv" else int(a.value) % int(b.value))
    elif isinstance(a, Const) and isinstance(b, Const):  # min, max
        return const(min(int(a.value), int(b.value)) if name == "min" else max(int(a.value), int(b.value)))
    elif a is b:
        return a
    return Op(name, dt.index, (a, b))


@lru_cache(maxsize=65536)
def settled(e: Expr) -> Expr:
    """A spelling for comparisons, in which sizes rounded up to a multiple are seen to be one: a % b -> a - b * (a // b), and what divides
    is taken out of quotients. (n + -n % 4) // 4 * 4 and n + (4 - n % 4) % 4 are both -4 * (-n // 4)."""
    if not isinstance(e, Op) or e.dtype is not dt.index or e.name not in ("add", "sub", "mul", "neg", "floordiv", "mod", "min", "max"):
        return e
    args = [settled(a) for a in e.args]
    if e.name == "neg":
        return normal("sub", ZERO, args[0])
    if e.name == "mod":
        return normal("sub", args[0], normal("mul", args[1], _quotient(*args)))
    return _quotient(*args) if e.name == "floordiv" else normal(e.name, *args)


def _quotient(a: Expr, b: Expr) -> Expr:
    """a // b; by a constant, without the terms that it divides and without common factors."""
    if not isinstance(b, Const) or int(b.value) <= 0:
        return normal("floordiv", a, b)
    k, p = int(b.value), poly(a)
    shift = p.pop((), 0)
    whole, rest = {m: c // k for m, c in p.items() if c % k == 0}, {m: c for m, c in p.items() if c % k}
    common = math.gcd(k, *rest.values())
    whole = add(whole, {(): shift // k} if shift // k else {})
    if not rest:
        return expr(whole)
    rest = add({m: c // common for m, c in rest.items()}, {(): v} if (v := shift % k // common) else {})
    k //= common
    low = expr(rest)
    by = low.args[1] if isinstance(low, Op) and low.name == "floordiv" else None
    if isinstance(by, Const) and int(by.value) > 0:
        low, k = low.args[0], k * int(by.value)  # x // m // k -> x // (m * k)
    return normal("add", expr(whole), low if k == 1 else Op("floordiv", dt.index, (low, const(k))))


# ---------------------------------------------------------------- intervals


def _times(a: Range, b: Range) -> Range:
    if None in a or None in b:
        if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
            return (a[0] * b[0], None if a[1] is None or b[1] is None else a[1] * b[1])
        if a[1] is not None and a[1] <= 0:  # turned about zero, until neither side is negative throughout
            return _negative(_times(_negative(a), b))
        if b[1] is not None and b[1] <= 0:
            return _negative(_times(a, _negative(b)))
        return (None, None)
    corners = [x * y for x in a for y in b if x is not None and y is not None]
    return (min(corners), max(corners))


def _negative(a: Range) -> Range:
    return (None if a[1] is None else -a[1], None if a[0] is None else -a[0])


def _divided(a: Range, b: Range) -> Range:
    """a // b of a positive b."""
    assert b[0] is not None
    least, most = b

    def end(v: int | None, by: int | None) -> int | None:
        return None if v is None else v // by if by is not None else -1 if v < 0 else 0

    low, high = a
    return end(low, most if low is None or low >= 0 else least), end(high, least if high is None or high >= 0 else most)


def _plus(a: Range, b: Range) -> Range:
    return (None if a[0] is None or b[0] is None else a[0] + b[0], None if a[1] is None or b[1] is None else a[1] + b[1])


def _atom(e: Expr, ranges: Callable[[str], Range]) -> Range:
    if isinstance(e, Sym):
        return ranges(e.name)
    if isinstance(e, Cast) and e.arg.dtype is dt.f64:  # cut off, as a conversion does
        low, high = _reals(e.arg, ranges)
        return (math.trunc(low) if math.isfinite(low) else None, math.trunc(high) if math.isfinite(high) else None)
    if not isinstance(e, Op):
        return (None, None)
    sides = [interval(poly(a), ranges) for a in e.args]
    if e.name == "mod" and sides[1][0] is not None and sides[1][0] > 0:
        return (0, None if sides[1][1] is None else sides[1][1] - 1)
    if e.name == "floordiv" and sides[1][0] is not None and sides[1][0] > 0:
        return _divided(sides[0], sides[1])
    if e.name == "max":
        lows = [s[0] for s in sides if s[0] is not None]
        return (max(lows) if lows else None, None if None in (sides[0][1], sides[1][1]) else max(s[1] for s in sides if s[1] is not None))
    if e.name == "min":
        highs = [s[1] for s in sides if s[1] is not None]
        return (None if None in (sides[0][0], sides[1][0]) else min(s[0] for s in sides if s[0] is not None), min(highs) if highs else None)
    return (None, None)


_STEPS: dict[str, Callable[[float], float]] = {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round}


def _reals(e: Expr, ranges: Callable[[str], Range]) -> tuple[float, float]:
    """Bounds of an f64 Expr over sizes. Rounding keeps order, so the ends computed in f64 are ends."""
    if isinstance(e, Const):
        return float(e.value), float(e.value)
    if isinstance(e, Cast) and e.arg.dtype is dt.index:
        lo, hi = interval(poly(e.arg), ranges)
        return -math.inf if lo is None else float(lo), math.inf if hi is None else float(hi)
    if isinstance(e, Op) and e.name in _STEPS:
        low, high = (_STEPS[e.name](v) if math.isfinite(v) else v for v in _reals(e.args[0], ranges))
        return float(low), float(high)
    if isinstance(e, Op) and e.name in ("add", "sub", "mul", "div"):
        a, b = (_reals(x, ranges) for x in e.args)
        if e.name == "div" and b[0] <= 0 <= b[1]:
            return -math.inf, math.inf
        fn = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y}[e.name]
        corners = [fn(x, y) for x in a for y in b]
        if not any(map(math.isnan, corners)):
            return min(corners), max(corners)
    return -math.inf, math.inf


def interval(p: Poly, ranges: Callable[[str], Range]) -> Range:
    """Bounds of a polynomial whose symbols lie in `ranges`; None is unbounded."""
    atoms = {atom: _atom(atom, ranges) for m in p for atom in m}
    total = _sum(p, atoms)
    if any(len(m) > 1 for m in p):  # n*m - n - m + 1, from n = 1 + a and m = 1 + b, is a*b
        for atom, (lo, _) in atoms.items():
            if lo:
                p = _shifted(p, atom, lo)
        above = {a: r if r[0] is None else (0, None if r[1] is None else r[1] - r[0]) for a, r in atoms.items()}
        total = _both(total, _sum(p, above))
    return total


def _both(a: Range, b: Range) -> Range:
    lows, highs = ([x for x in ends if x is not None] for ends in zip(a, b, strict=True))
    return (max(lows) if lows else None, min(highs) if highs else None)


def _sum(p: Poly, atoms: Mapping[Expr, Range]) -> Range:
    total: Range = (0, 0)
    for m, c in p.items():
        term: Range = (1, 1)
        for atom in m:
            term = _times(term, atoms[atom])
        if c < 0:
            term = (term[1], term[0])
        total = _plus(total, (None if term[0] is None else term[0] * c, None if term[1] is None else term[1] * c))
    return total


def _shifted(p: Poly, atom: Expr, by: int) -> Poly:
    """p with `atom + by` for `atom`."""
    out: Poly = {}
    for m, c in p.items():
        term: Poly = {(): c}
        for a in m:
            term = mul(term, {(a,): 1, (): by} if a is atom else {(a,): 1})
        out = add(out, term)
    return out
