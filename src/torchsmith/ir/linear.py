"""Index expressions as linear forms in loop indices: a view of the canonical sums of ir/algebra.py (no torch).

In: index Exprs. Out: dictionaries {atom: coefficient} and what is left.
An atom is an Axis or any node that is not linear in axes (a floordiv, a mod, a loaded index); a coefficient holds no loop index.
"""

from __future__ import annotations

from .algebra import Terms, atoms_of, is_positive_constant, product_of, rejoin, terms_of, total
from .expr import Axis, Const, Expr, Fold, Load, Op, Sym, Var, const, op

ONE, ZERO = const(1), const(0)


def is_invariant(e: Expr) -> bool:
    """True when `e` holds constants and run-time symbols only."""
    if isinstance(e, Const | Sym):
        return True
    if isinstance(e, Axis | Var | Load | Fold):
        return False
    return all(is_invariant(a) for a in e.args)


def const_of(e: Expr) -> int | None:
    """The integer of an index constant."""
    return int(e.value) if isinstance(e, Const) else None


def conjuncts(e: Expr | None) -> list[Expr]:
    """a and b and c -> a, b, c; true -> nothing."""
    if e is None or (isinstance(e, Const) and e.value):
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


def is_size(e: Expr) -> bool:
    """A product of symbols and positive constants: what an address divides by is a size or a stride."""
    while isinstance(e, Op) and e.name == "mul" and (isinstance(e.args[1], Sym) or is_positive_constant(e.args[1])):
        e = e.args[0]
    return isinstance(e, Sym) or is_positive_constant(e)


def linear(e: Expr) -> Linear:
    """The linear form of an index expression, with x // d * d + x % d put together again."""
    terms, constant = terms_of(e)
    if any(isinstance(a, Op) and a.name == "mod" for t in terms for a in atoms_of(t)):
        terms, constant = rejoin(dict(terms), constant, is_size)
    out: dict[Expr, Expr] = {}
    fixed: Terms = {}
    for term, k in terms.items():
        if k == 0:
            continue
        atoms = atoms_of(term)
        moving = [a for a in atoms if not is_invariant(a)]
        if not moving:
            fixed[term] = k
            continue
        coef = total({product_of([a for a in atoms if is_invariant(a)]): k}, 0) if len(moving) < len(atoms) else const(k)
        atom = product_of(moving)
        out[atom] = op("add", out[atom], coef) if atom in out else coef
    return Linear(out, total(fixed, constant))
