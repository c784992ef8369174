"""Canonical form of index expressions: a sum of products with integer coefficients, sorted, the constant last (no torch).

In: canonical operands. Out: the canonical result of + * // %, so that equal polynomials are one node.
Division by zero never happens at run time where an index is evaluated, so x*s // s -> x needs no proof that s != 0.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable

from . import dtype as dt
from .expr import Axis, Const, Expr, Op, Sym, const

Terms = dict[Expr, int]
EXPAND = 16  # a product of sums is multiplied out up to this many terms


def order_key(e: Expr) -> tuple[int, str]:
    """A total order that depends on structure alone: axes, symbols, then the rest."""
    found: tuple[int, str] | None = e._order
    if found is None:
        if isinstance(e, Axis):
            found = (0, e.name)
        elif isinstance(e, Sym):
            found = (1, e.name)
        else:
            fields = [str(part) for part in e._key[1:] if not isinstance(part, Expr | tuple)]
            text = f"{type(e).__name__}({','.join(fields)};{','.join(order_key(a)[1] for a in e.args)})"
            names = [a.name for a in getattr(e, "axes", ())]
            text += ",".join(names)
            found = (2, text if len(text) < 200 else hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        object.__setattr__(e, "_order", found)
    return found


def terms_of(e: Expr) -> tuple[Terms, int]:
    """(product -> coefficient, constant) of a canonical index expression. Do not change what it returns."""
    found: tuple[Terms, int] | None = e._terms
    if found is not None:
        return found
    if not isinstance(e, Op):
        return ({}, int(e.value)) if isinstance(e, Const) else ({e: 1}, 0)
    terms: Terms = {}
    constant = 0
    node: Expr = e
    parts: list[Expr] = []
    while isinstance(node, Op) and node.name == "add":
        parts.append(node.args[1])
        node = node.args[0]
    parts.append(node)
    for part in reversed(parts):
        if isinstance(part, Const):
            constant += int(part.value)
        elif isinstance(part, Op) and part.name == "mul" and isinstance(part.args[1], Const):
            terms[part.args[0]] = terms.get(part.args[0], 0) + int(part.args[1].value)
        else:
            terms[part] = terms.get(part, 0) + 1
    if e not in terms:
        object.__setattr__(e, "_terms", (terms, constant))
    return terms, constant


def total(terms: Terms, constant: int) -> Expr:
    """The canonical node of a sum: terms in order, the constant last."""
    live = [(t, c) for t, c in terms.items() if c]
    if len(live) > 1:
        live.sort(key=lambda tc: order_key(tc[0]))
    result: Expr | None = None
    for term, c in live:
        part = term if c == 1 else Op("mul", dt.index, (term, const(c)))
        result = part if result is None else Op("add", dt.index, (result, part))
    if result is None:
        return const(constant)
    return result if constant == 0 else Op("add", dt.index, (result, const(constant)))


def add(a: Expr, b: Expr, sign: int = 1) -> Expr:
    """a + sign * b, like terms collected."""
    ta, ca = terms_of(a)
    tb, cb = terms_of(b)
    if not tb:
        return a if cb == 0 else total(ta, ca + sign * cb)
    terms = dict(ta)
    for t, c in tb.items():
        terms[t] = terms.get(t, 0) + sign * c
    constant = ca + sign * cb
    if len(terms) > 1:
        terms, constant = rejoin(terms, constant)
    return total(terms, constant)


def is_positive_constant(c: Expr) -> bool:
    return isinstance(c, Const) and int(c.value) > 0


def rejoin(terms: Terms, constant: int, is_positive: Callable[[Expr], bool] = is_positive_constant) -> tuple[Terms, int]:
    """(x // c) * c + x % c -> x, and ((x // c) % m) * c + x % c -> x % (c * m); also with a common factor.

    Of a c that `is_positive` (or zero, where it never divides), x // c may be spelled y // (p * c) where x is y // p.
    """
    for low, k in list(terms.items()):
        atoms = atoms_of(low) if k else []
        for at, atom in enumerate(atoms):
            if not isinstance(atom, Op) or atom.name != "mod":
                continue
            found = _whole_of(terms, k, atoms[:at] + atoms[at + 1 :], atom, is_positive)
            if found is not None:
                high, joined = found
                rest = {t: n for t, n in terms.items() if t is not low and t is not high}
                more, c = terms_of(joined)
                for t, n in more.items():
                    rest[t] = rest.get(t, 0) + k * n
                return rejoin(rest, constant + k * c, is_positive)
    return terms, constant


def _whole_of(terms: Terms, k: int, common: list[Expr], low: Op, is_positive: Callable[[Expr], bool]) -> tuple[Expr, Expr] | None:
    """The term k * common * c * (x // c) to k * common * (x % c), and what they are together, without k."""
    x, c = low.args
    factors, step = (common, k * int(c.value)) if isinstance(c, Const) else (common + atoms_of(c), k)
    for high, n in terms.items():
        left = atoms_of(high) if n == step else []
        if len(left) != len(factors) + 1:
            continue
        for f in factors:
            if f in left:
                left.remove(f)
        whole = left[0]
        if len(left) != 1 or not isinstance(whole, Op):
            continue
        if whole.name == "floordiv" and _is_quotient(whole, x, c, is_positive):
            return high, mul_all(common, x)
        if whole.name == "mod" and isinstance(c, Const) and isinstance(whole.args[1], Const) and whole.args[0] is floordiv(x, c):
            return high, mul_all(common, mod(x, const(int(c.value) * int(whole.args[1].value))))
    return None


def _is_quotient(e: Op, x: Expr, c: Expr, is_positive: Callable[[Expr], bool]) -> bool:
    """Is e = y // b another spelling of x // c: is b = p * c with a positive c, and x = y // p?"""
    y, b = e.args
    if b is c:
        return y is x
    found = _split(b, c) if is_positive(c) else None
    return found is not None and not found[1] and not found[2] and floordiv(y, found[0]) is x


def mul_all(factors: list[Expr], e: Expr) -> Expr:
    """e times the atoms `factors`."""
    return functools.reduce(mul, factors, e)


def product_of(factors: list[Expr]) -> Expr:
    """The canonical product of atoms."""
    factors.sort(key=order_key)
    result = factors[0]
    for f in factors[1:]:
        result = Op("mul", dt.index, (result, f))
    return result


def atoms_of(term: Expr) -> list[Expr]:
    """The factors of a product without constant."""
    atoms: list[Expr] = []
    while isinstance(term, Op) and term.name == "mul" and not isinstance(term.args[1], Const):
        atoms.append(term.args[1])
        term = term.args[0]
    atoms.append(term)
    return atoms


def mul(a: Expr, b: Expr) -> Expr:
    """a * b, multiplied out."""
    ta, ca = terms_of(a)
    tb, cb = terms_of(b)
    if not tb:
        return a if cb == 1 else total({t: c * cb for t, c in ta.items()}, ca * cb) if cb else const(0)
    if not ta:
        return mul(b, a)
    if (len(ta) + (ca != 0)) * (len(tb) + (cb != 0)) > EXPAND:
        first, second = sorted((a, b), key=order_key)
        return Op("mul", dt.index, (first, second))
    terms: Terms = {}
    for t, c in ta.items():
        for u, d in tb.items():
            p = product_of(atoms_of(t) + atoms_of(u))
            terms[p] = terms.get(p, 0) + c * d
        if cb:
            terms[t] = terms.get(t, 0) + c * cb
    if ca:
        for u, d in tb.items():
            terms[u] = terms.get(u, 0) + d * ca
    return total(terms, ca * cb)


def _divide_term(term: Expr, c: int, factors: list[Expr], k: int) -> tuple[list[Expr], int] | None:
    """term*c / (factors*k), exactly, as (atoms, coefficient)."""
    if c % k:
        return None
    left = atoms_of(term)
    for f in factors:
        if f not in left:
            return None
        left.remove(f)
    return left, c // k


def _split(a: Expr, b: Expr) -> tuple[Expr, Terms, int] | None:
    """a = q*b + rest for a b that is one product: (q, rest's terms, rest's constant)."""
    tb, cb = terms_of(b)
    if tb and (cb or len(tb) != 1):
        return None
    factors: list[Expr]
    if tb:
        ((mono, k),) = tb.items()
        factors = atoms_of(mono)
    else:
        factors, k = [], cb
    ta, ca = terms_of(a)
    q: Terms = {}
    q_constant, rest = 0, {}
    for t, c in ta.items():
        found = _divide_term(t, c, factors, k)
        if found is None:
            rest[t] = c
        elif found[0]:
            p = product_of(found[0])
            q[p] = q.get(p, 0) + found[1]
        else:
            q_constant += found[1]
    constant = ca
    if not factors:
        q_constant, constant = q_constant + ca // k, ca % k
    return total(q, q_constant), rest, constant


def floordiv(a: Expr, b: Expr) -> Expr:
    """a // b, rounded down."""
    if isinstance(b, Const):
        k = int(b.value)
        if k == 1:
            return a
        if k == 0:
            return Op("floordiv", dt.index, (a, b))
        if k < 0:
            return floordiv(mul(a, const(-1)), const(-k))
    found = _split(a, b)
    if found is None:
        return const(1) if a is b else Op("floordiv", dt.index, (a, b))
    q, rest, constant = found
    if not rest and constant == 0:
        return q
    r = total(rest, constant)
    low = _floordiv_rest(r, b) if isinstance(b, Const) else Op("floordiv", dt.index, (r, b))
    return low if q is _ZERO else add(q, low)


_ZERO = const(0)


def _floordiv_rest(r: Expr, b: Const) -> Expr:
    """r // k, k > 1, where no coefficient of r is k or more."""
    k = int(b.value)
    terms, constant = terms_of(r)
    if not terms:
        return const(constant // k)
    g = math.gcd(k, *terms.values())
    if g > 1:  # (g*x + c) // (g*m) -> (x + c//g) // m
        return floordiv(total({t: c // g for t, c in terms.items()}, constant // g), const(k // g))
    if constant == 0 and len(terms) == 1:
        ((t, c),) = terms.items()
        if c == 1 and isinstance(t, Op) and len(t.args) == 2 and isinstance(t.args[1], Const):
            m = int(t.args[1].value)
            if t.name == "floordiv" and m > 0:  # (x // m) // k -> x // (m*k)
                return floordiv(t.args[0], const(m * k))
            if t.name == "mod" and m > 0 and m % k == 0:  # (x % (k*n)) // k -> (x // k) % n
                return mod(floordiv(t.args[0], b), const(m // k))
            if t.name == "mod" and 0 < m <= k:
                return const(0)
    return Op("floordiv", dt.index, (r, b))


def mod(a: Expr, b: Expr) -> Expr:
    """a % b with b's sign."""
    if isinstance(b, Const):
        k = int(b.value)
        if k in (1, -1):
            return const(0)
        if k <= 0:
            return Op("mod", dt.index, (a, b))
    if a is b:
        return const(0)
    found = _split(a, b)
    if found is None:
        return Op("mod", dt.index, (a, b))
    _, rest, constant = found
    if not rest and (constant == 0 or isinstance(b, Const)):
        return const(constant)
    if not isinstance(b, Const):
        return Op("mod", dt.index, (total(rest, constant), b))
    k = int(b.value)
    inner = [t for t in rest if isinstance(t, Op) and t.name == "mod" and isinstance(t.args[1], Const) and int(t.args[1].value) % k == 0]
    if inner:  # (x % (k*n)) % k -> x % k, inside sums too
        r: Expr = total({t: c for t, c in rest.items() if t not in inner}, constant)
        for nested in inner:
            r = add(r, mul(nested.args[0], const(rest[nested])))
        return mod(r, b)
    g = math.gcd(k, constant, *rest.values())
    if g > 1:  # (g*x) % (g*m) -> g * (x % m)
        return mul(mod(total({t: c // g for t, c in rest.items()}, constant // g), const(k // g)), const(g))
    if constant == 0 and len(rest) == 1:
        ((t, c),) = rest.items()
        if c == 1 and isinstance(t, Op) and t.name == "mod" and isinstance(t.args[1], Const) and 0 < int(t.args[1].value) <= k:
            return t
    return Op("mod", dt.index, (total(rest, constant), b))

