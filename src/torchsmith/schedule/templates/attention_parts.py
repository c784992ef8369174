"""What the kernels of attention share: blocks of an extent, strides of operands, and which keys a causal mask leaves out.

In: expressions of a Stage. Out: expressions.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import dtype as dt
from ...ir.expr import Axis, Cast, Const, Expr, Load, Op, const, op, substitute, walk
from ...ir.kernel import Loop, Stmt
from ...ir.linear import conjuncts, const_of, linear
from ...ir.program import Buffer
from .. import deps

LANES = 16
LOWEST = Const(dt.f32, float("-inf"))


def blocks_of(n: Expr, size: int) -> Expr:
    return op("floordiv", n + (size - 1), const(size))


def least(size: int, rest: Expr, whole: Expr) -> Expr:
    """min(size, rest), as a constant where blocks divide the whole."""
    known = const_of(whole)
    if known is not None and (known % size == 0 or known < size):
        return const(min(size, known))
    return op("min", const(size), rest)


def over(axis: Axis, extent: Expr, *body: Stmt, vector: bool = False) -> Loop:
    return Loop(axis, extent, "vector" if vector else "serial", body)


def stride_along(load: Load, axis: Axis, buffers: Mapping[str, Buffer]) -> Expr | None:
    """Elements from one step of `axis` to the next; None where the address is not linear in it."""
    layout = buffers[load.buf].layout
    assert layout is not None
    total: Expr = const(0)
    for i, step in zip(load.index, layout.strides, strict=True):
        total = total + i * step
    lin = linear(total)
    if any(axis in set(walk(atom)) and atom is not axis for atom in lin.terms):
        return None
    return lin.terms.get(axis, const(0))


# ---------------------------------------------------------------- causal masks


def key_limit(score: Expr, i: Axis, j: Axis) -> Expr | None:
    """c such that the score is -inf, whatever the product, for every j > i + c; None where no such c can be read off."""
    if not (isinstance(score, Op) and score.name == "where"):
        return None
    test, yes, no = score.args
    found = [b for c in conjuncts(test) if (b := _bound(c, i, j)) is not None] if no is LOWEST else []
    if yes is LOWEST and isinstance(test, Op) and test.name in _OPPOSITE:
        found = [b for b in (_bound(op(_OPPOSITE[test.name], *test.args), i, j),) if b is not None]
    return found[0] if found else None


_OPPOSITE = {"gt": "le", "ge": "lt", "lt": "ge", "le": "gt"}


def _bound(test: Expr, i: Axis, j: Axis) -> Expr | None:
    """c of a test that implies j <= i + c."""
    if not (isinstance(test, Op) and test.name in _OPPOSITE):
        return None
    sides = [_as_index(x) for x in test.args]
    if sides[0] is None or sides[1] is None:
        return None
    low, high = (sides[0], sides[1]) if test.name in ("lt", "le") else (sides[1], sides[0])
    rest = linear(high - low + (-1 if test.name in ("lt", "gt") else 0))  # rest >= 0
    terms = dict(rest.terms)
    if const_of(terms.pop(i, const(0))) != 1 or const_of(terms.pop(j, const(0))) != -1 or deps.free_axes(rest.expr()) - {i, j}:
        return None
    return substitute(rest.expr(), {i: const(0), j: const(0)})


def _as_index(e: Expr) -> Expr | None:
    """An integer expression of axes and constants as an index."""
    if e.dtype is dt.index:
        return e
    if isinstance(e, Cast) and e.args[0].dtype is dt.index:
        return e.args[0]
    if isinstance(e, Const) and e.dtype.kind in ("int", "uint"):
        return const(int(e.value))
    if isinstance(e, Op) and e.name in ("add", "sub") and e.dtype.kind == "int":
        sides = [_as_index(x) for x in e.args]
        return None if sides[0] is None or sides[1] is None else op(e.name, sides[0], sides[1])
    return None
