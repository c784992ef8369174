"""Linear forms and ranges of index expressions: sums of coefficient x atom, interval bounds, and div/mod simplification (no torch).

In: index Exprs and the extents of their axes. Out: dictionaries {atom: coefficient}, integer intervals, simpler index Exprs.
An atom is an Axis or any node that is not linear in axes (a floordiv, a mod, a loaded index); a coefficient holds no loop index.
"""

from __future__ import annotations

from . import dtype as dt
from .bounds import Ranges
from .expr import Axis, Const, Expr, Fold, Load, Op, Rand, Sym, Var, const, op

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


# ---------------------------------------------------------------- simplification


def simplify_index(e: Expr, ranges: Ranges, memo: dict[Expr, Expr] | None = None) -> Expr:
    """(a*d + b)//d -> a, (a*d + b)%d -> b where 0 <= b < d; sums in linear form."""
    memo = {} if memo is None else memo
    done = memo.get(e)
    if done is not None:
        return done
    if not e.args:
        return e
    out = e.rebuild(tuple(simplify_index(a, ranges, memo) for a in e.args))
    if isinstance(out, Op) and out.dtype is dt.index:
        if out.name in ("floordiv", "mod"):
            out = _divide(out.name, out.args[0], out.args[1], ranges)
        elif out.name in ("add", "sub", "mul", "neg"):
            out = linear(out).expr()
    memo[e] = out
    return out


def _below(e: Expr, d: Expr, ranges: Ranges) -> bool:
    """0 <= e < d for certain."""
    if e is ZERO or (isinstance(e, Axis) and ranges.extents.get(e) is d):
        return True
    lo, hi = ranges.interval(e)
    least = ranges.interval(d).lo
    return lo is not None and hi is not None and least is not None and lo >= 0 and hi < least


def _divide(name: str, x: Expr, d: Expr, ranges: Ranges) -> Expr:
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
    if _below(r, d, ranges):
        return whole.expr() if name == "floordiv" else r
    for f in _factors(d):  # (f*x + r) // (f*e) -> x // e, (f*x + r) % (f*e) -> f * (x % e) + r where 0 <= r < f
        high, low, k = Linear(), Linear(None, rest.const), const_of(f)
        for atom, coef in rest.terms.items():
            quotient = _quotient(coef, f, k)
            (high if quotient is not None else low).terms[atom] = coef if quotient is None else quotient
        e = _quotient(d, f, k)
        if high.terms and e is not None and _below(low.expr(), f, ranges):
            part = _divide(name, high.expr(), e, ranges)
            if name == "floordiv":
                return linear(op("add", whole.expr(), part)).expr()
            return linear(op("add", op("mul", part, f), low.expr())).expr()
    # (x // a) // b -> x // (a*b); (x // a) stays linear otherwise
    if name == "floordiv":
        if n is not None and n > 0 and not whole.terms and isinstance(r, Op) and r.name == "floordiv":
            m = const_of(r.args[1])
            if m is not None and m > 0:
                return linear(op("add", _divide("floordiv", r.args[0], const(m * n), ranges), whole.const)).expr()
        return Linear({op("floordiv", r, d): ONE}).plus(whole).expr()
    if isinstance(r, Op) and r.name == "mod" and n is not None:  # (x % (a*n)) % n -> x % n
        m = const_of(r.args[1])
        if m is not None and n > 0 and m % n == 0:
            return _divide("mod", r.args[0], d, ranges)
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
