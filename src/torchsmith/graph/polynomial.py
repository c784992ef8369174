"""Sizes in normal form: an index Expr becomes a sum of monomials and comes back in one canonical spelling.

In: index Exprs over add, sub, mul, neg, floordiv, mod, min, max. Out: Exprs such that equal polynomials are the same object, and
interval bounds of them. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from ..ir import dtype as dt
from ..ir.bounds import EVERYTHING, INTERVAL_OF, Interval, Ranges
from ..ir.expr import Cast, Const, Expr, Op, Sym, const, walk

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


def _common(a: Poly, b: Poly) -> Poly | None:
    """The largest monomial that divides all terms of both, where it has an atom: b of one term, such as the batch times a size."""
    if len(b) != 1 or not a:
        return None
    (shared, k) = next(iter(b.items()))
    for m in a:
        rest = list(m)
        shared = tuple([atom for atom in shared if atom in rest and not rest.remove(atom)])  # type: ignore[func-returns-value]
    return {shared: math.gcd(k, *a.values())} if shared else None


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
        if name == "floordiv" and (factor := _common(p, q)) is not None:  # (a*c) // (b*c) -> a // b
            return normal(name, *[expr(divide(x, factor) or {}) for x in (p, q)])
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


def _atom(e: Expr, ranges: Callable[[str], Range]) -> Range:
    if isinstance(e, Sym):
        return ranges(e.name)
    if isinstance(e, Cast):
        return Ranges({s: ranges(s.name) for s in walk(e) if isinstance(s, Sym)}).interval(e)
    if not isinstance(e, Op) or e.name not in INTERVAL_OF:
        return EVERYTHING
    return INTERVAL_OF[e.name](*(Interval(*interval(poly(a), ranges)) for a in e.args))


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
    return Interval(*a) & Interval(*b)


def _sum(p: Poly, atoms: Mapping[Expr, Range]) -> Range:
    total = Interval(0, 0)
    for m, c in p.items():
        term = Interval(c, c)
        for atom in m:
            term = INTERVAL_OF["mul"](term, Interval(*atoms[atom]))
        total = INTERVAL_OF["add"](total, term)
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
