"""Linear forms and ranges of index expressions: sums of coefficient x atom, interval bounds, and div/mod simplification (no torch).

In: index Exprs and the extents of their axes. Out: dictionaries {atom: coefficient}, integer intervals, simpler index Exprs.
An atom is an Axis or any node that is not linear in axes (a floordiv, a mod, a loaded index); a coefficient holds no loop index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import dtype as dt
from .expr import Axis, Cast, Const, Expr, Fold, Load, Op, Rand, Sym, Var, const, op

Range = tuple[int | None, int | None]  # inclusive; None: unbounded
Extents = Mapping[Any, Any]  # an Axis or a Sym lies in [0, extent); or the Range of a Sym
ONE, ZERO = const(1), const(0)


def is_invariant(e: Expr) -> bool:
    """True when `e` holds constants and run-time symbols only."""
    if isinstance(e, Const | Sym):
        return True
    if isinstance(e, Axis | Var | Load | Fold | Rand):
        return False
    return all(is_invariant(a) for a in e.args)


def const_of(e: Expr) -> int | None:
    """The integer of an index constant."""
    return int(e.value) if isinstance(e, Const) else None


def conjuncts(e: Expr | None) -> list[Expr]:
    """a and b and c -> a, b, c."""
    if e is None:
        return []
    return [x for a in e.args for x in conjuncts(a)] if isinstance(e, Op) and e.name == "and" else [e]


class Linear:
    """const + sum(coef * atom); zero coefficients are absent."""

    __slots__ = ("const", "terms")

    def __init__(self, terms: dict[Expr, Expr] | None = None, constant: Expr = ZERO) -> None:
        self.terms: dict[Expr, Expr] = terms if terms is not None else {}
        self.const = constant

    def plus(self, other: Linear, times: Expr = ONE) -> Linear:
        """self + times * other."""
        terms = dict(self.terms)
        for atom, coef in other.terms.items():
            total = op("add", terms.get(atom, ZERO), coef if times is ONE else op("mul", times, coef))
            if total is ZERO:
                terms.pop(atom, None)
            else:
                terms[atom] = total
        return Linear(terms, op("add", self.const, other.const if times is ONE else op("mul", times, other.const)))

    def expr(self) -> Expr:
        """Back to an expression."""
        total: Expr = self.const
        for atom, coef in self.terms.items():
            total = op("add", total, atom if coef is ONE else op("mul", atom, coef))
        return total


def linear(e: Expr) -> Linear:
    """The linear form of an index expression, with x//d*d + x%d put together again."""
    return _rejoin(_linear(e))


def _linear(e: Expr) -> Linear:
    if is_invariant(e):
        return Linear(None, e)
    if isinstance(e, Op):
        if e.name == "add":
            return _linear(e.args[0]).plus(_linear(e.args[1]))
        if e.name == "sub":
            return _linear(e.args[0]).plus(_linear(e.args[1]), const(-1))
        if e.name == "neg":
            return Linear().plus(_linear(e.args[0]), const(-1))
        if e.name == "mul":
            a, b = e.args
            if is_invariant(b):
                return Linear().plus(_linear(a), b)
            if is_invariant(a):
                return Linear().plus(_linear(b), a)
    return Linear({e: ONE})


def _rejoin(lin: Linear) -> Linear:
    # c*d*(x//d) + c*(x%d) -> c*x; the same with x = y//p, whose x//d is written y//(p*d)
    for atom, coef in lin.terms.items():
        if isinstance(atom, Op) and atom.name == "mod":
            x, d = atom.args
            if not is_invariant(d):
                continue
            outer = op("mul", coef, d)
            for other, c in lin.terms.items():
                if c is outer and isinstance(other, Op) and other.name == "floordiv" and _is_quotient(other, x, d):
                    rest = Linear({k: v for k, v in lin.terms.items() if k is not atom and k is not other}, lin.const)
                    return _rejoin(rest.plus(_linear(x), coef))
    return lin


def _is_quotient(e: Op, x: Expr, d: Expr) -> bool:
    """Is e = y//(p*d) another way to write x//d: is x = y//p?"""
    y, by = e.args
    if by is d:
        return y is x
    p = _quotient(by, d, const_of(d))
    return p is not None and (x is Op("floordiv", dt.index, (y, p)) or x is op("floordiv", y, p))


# ---------------------------------------------------------------- intervals


def _mul(a: int | None, b: int | None) -> int | None:
    return 0 if a == 0 or b == 0 else None if a is None or b is None else a * b


def range_of(e: Expr, extents: Extents) -> Range:
    """Inclusive interval of an index expression; axes lie in [0, extent), symbols without a range are sizes (at least 0)."""
    v = const_of(e)
    if v is not None:
        return v, v
    if isinstance(e, Axis | Sym):
        extent = extents.get(e)
        if isinstance(extent, tuple):
            return extent
        hi = range_of(extent, extents)[1] if extent is not None else None
        return 0, None if hi is None else max(hi - 1, 0)
    if isinstance(e, Cast):
        # whole numbers that f32 holds exactly are far below 2**31
        word = (-(2**31), 2**31 - 1)
        lo_hi = {"bool": (0, 1), "u8": (0, 255), "i8": (-128, 127), "i16": (-(2**15), 2**15 - 1), "i32": word, "f32": word}
        return lo_hi.get(e.arg.dtype.name, (None, None))
    if isinstance(e, Op):
        rule = _RANGES.get(e.name)
        if rule is not None:
            return rule(*(range_of(a, extents) for a in e.args))
    return None, None


def _r_add(a: Range, b: Range) -> Range:
    return (
        None if a[0] is None or b[0] is None else a[0] + b[0],
        None if a[1] is None or b[1] is None else a[1] + b[1],
    )


def _r_neg(a: Range) -> Range:
    return (None if a[1] is None else -a[1], None if a[0] is None else -a[0])


def _r_mul(a: Range, b: Range) -> Range:
    if None in a or None in b:
        if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
            return a[0] * b[0], _mul(a[1], b[1])
        return None, None
    corners = [x * y for x in a for y in b]  # type: ignore[operator]
    return min(corners), max(corners)


def _r_floordiv(a: Range, b: Range) -> Range:
    if b[0] is None or b[0] <= 0 or a[0] is None:
        return None, None
    lo = a[0] // b[0] if a[0] < 0 else 0 if b[1] is None else a[0] // b[1]
    return lo, None if a[1] is None else a[1] // (b[0] if a[1] >= 0 or b[1] is None else b[1])


def _r_mod(a: Range, b: Range) -> Range:
    if b[0] is None or b[0] <= 0:
        return None, None
    if a[0] is not None and a[1] is not None and a[0] >= 0 and a[1] < b[0]:
        return a
    return 0, None if b[1] is None else b[1] - 1


def _r_min(a: Range, b: Range) -> Range:
    hi = [x for x in (a[1], b[1]) if x is not None]
    return (None if a[0] is None or b[0] is None else min(a[0], b[0])), (min(hi) if hi else None)


def _r_max(a: Range, b: Range) -> Range:
    lo = [x for x in (a[0], b[0]) if x is not None]
    return (max(lo) if lo else None), (None if a[1] is None or b[1] is None else max(a[1], b[1]))


_RANGES: dict[str, Callable[..., Range]] = {
    "add": _r_add, "sub": lambda a, b: _r_add(a, _r_neg(b)), "neg": _r_neg, "mul": _r_mul, "floordiv": _r_floordiv, "mod": _r_mod,
    "min": _r_min, "max": _r_max, "where": lambda c, a, b: (_r_min(a, b)[0], _r_max(a, b)[1]),
}  # fmt: skip


# ---------------------------------------------------------------- simplification


def simplify_index(e: Expr, extents: Extents, memo: dict[Expr, Expr] | None = None) -> Expr:
    """(a*d + b)//d -> a, (a*d + b)%d -> b where 0 <= b < d; sums in linear form."""
    memo = {} if memo is None else memo
    done = memo.get(e)
    if done is not None:
        return done
    if not e.args:
        return e
    out = e.rebuild(tuple(simplify_index(a, extents, memo) for a in e.args))
    if isinstance(out, Op) and out.dtype is dt.index:
        if out.name in ("floordiv", "mod"):
            out = _divide(out.name, out.args[0], out.args[1], extents)
        elif out.name in ("add", "sub", "mul", "neg"):
            out = linear(out).expr()
    memo[e] = out
    return out


def _below(e: Expr, d: Expr, extents: Extents) -> bool:
    """0 <= e < d for certain."""
    if isinstance(e, Axis) and extents.get(e) is d:
        return True
    if e is ZERO:
        return True
    lo, hi = range_of(e, extents)
    least = range_of(d, extents)[0]
    return lo is not None and hi is not None and least is not None and lo >= 0 and hi < least


def _divide(name: str, x: Expr, d: Expr, extents: Extents) -> Expr:
    if not is_invariant(d):
        return op(name, x, d)
    lin = linear(x)
    whole, rest = Linear(), Linear()
    n = const_of(d)
    for atom, coef in lin.terms.items():
        quotient = _quotient(coef, d, n)
        if quotient is not None:
            whole.terms[atom] = quotient
        else:
            rest.terms[atom] = coef
    c = const_of(lin.const)
    if n is not None and n > 0 and c is not None:
        whole.const, rest.const = const(c // n), const(c % n)
    else:
        q = _quotient(lin.const, d, n)
        whole.const, rest.const = (q, ZERO) if q is not None else (ZERO, lin.const)
    r = rest.expr()
    if _below(r, d, extents):
        return whole.expr() if name == "floordiv" else r
    for f in _factors(d):  # (f*x + r) // (f*e) -> x // e, (f*x + r) % (f*e) -> f * (x % e) + r where 0 <= r < f
        high, low, k = Linear(), Linear(None, rest.const), const_of(f)
        for atom, coef in rest.terms.items():
            quotient = _quotient(coef, f, k)
            (high if quotient is not None else low).terms[atom] = coef if quotient is None else quotient
        e = _quotient(d, f, k)
        if high.terms and e is not None and _below(low.expr(), f, extents):
            part = _divide(name, high.expr(), e, extents)
            if name == "floordiv":
                return linear(op("add", whole.expr(), part)).expr()
            return linear(op("add", op("mul", part, f), low.expr())).expr()
    # (x // a) // b -> x // (a*b); (x // a) stays linear otherwise
    if name == "floordiv":
        if n is not None and n > 0 and not whole.terms and isinstance(r, Op) and r.name == "floordiv":
            m = const_of(r.args[1])
            if m is not None and m > 0:
                return linear(op("add", _divide("floordiv", r.args[0], const(m * n), extents), whole.const)).expr()
        return Linear({op("floordiv", r, d): ONE}).plus(whole).expr()
    if isinstance(r, Op) and r.name == "mod" and n is not None:  # (x % (a*n)) % n -> x % n
        m = const_of(r.args[1])
        if m is not None and n > 0 and m % n == 0:
            return _divide("mod", r.args[0], d, extents)
    return op("mod", r, d)


def _factors(d: Expr) -> list[Expr]:
    """The factors of a product, and what is left without its last one."""
    out: list[Expr] = []
    while isinstance(d, Op) and d.name == "mul":
        out += [d.args[1], d.args[0]]
        d = d.args[0]
    return list(dict.fromkeys(out))


def _quotient(coef: Expr, d: Expr, n: int | None) -> Expr | None:
    """coef / d when it is exact for certain."""
    c = const_of(coef)
    if n is not None and c is not None:
        return const(c // n) if n > 0 and c % n == 0 else None
    if coef is d:
        return ONE
    if isinstance(coef, Op) and coef.name == "mul":
        a, b = coef.args
        for mine, other in ((a, b), (b, a)):
            q = _quotient(mine, d, n)
            if q is not None:
                return op("mul", q, other)
    return None
