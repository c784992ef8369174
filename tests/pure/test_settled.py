"""The spelling of sizes that comparisons use: equal in value everywhere, and equal where sizes are rounded up to a multiple."""

from __future__ import annotations

import operator
import random

from torchsmith.graph.polynomial import normal, settled
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Const, Expr, Op, Sym, const

S, T = Sym("s0", dt.index), Sym("s1", dt.index)
PYTHON = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod, "min": min}


def value(e: Expr, at: dict[str, int]) -> int:
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Sym):
        return at[e.name]
    assert isinstance(e, Op)
    return int(PYTHON[e.name](*(value(a, at) for a in e.args)))


def random_size(r: random.Random, depth: int) -> Expr:
    if depth == 0:
        return r.choice([S, T, const(r.randint(-9, 9))])
    name = r.choice(list(PYTHON))
    right = const(r.randint(1, 9)) if name in ("floordiv", "mod") else random_size(r, depth - 1)
    return normal(name, random_size(r, depth - 1), right)


def test_the_same_number() -> None:
    r = random.Random(1)
    for _ in range(2000):
        e = random_size(r, r.randint(1, 4))
        at = {"s0": r.randint(1, 50), "s1": r.randint(1, 50)}
        assert value(e, at) == value(settled(e), at), (e, settled(e), at)


def test_common_factors_of_a_quotient() -> None:
    """view(batch, -1, 4): the batch leaves the quotient, whatever the other size is."""
    both = normal("mul", S, T)
    assert normal("floordiv", normal("mul", both, const(16)), normal("mul", S, const(32))) is normal("floordiv", T, const(2))
    twice = normal("floordiv", normal("sub", normal("mul", both, S), normal("mul", both, const(3))), normal("mul", both, const(-2)))
    for s, t in ((1, 1), (4, 7), (5, 2)):
        assert value(twice, {"s0": s, "s1": t}) == (s * s * t - 3 * s * t) // (-2 * s * t)


def test_rounded_up_is_a_multiple() -> None:
    minus = normal("mod", normal("sub", const(0), S), const(8))
    for rest in (minus, normal("mod", normal("sub", const(8), normal("mod", S, const(8))), const(8))):
        n = normal("add", S, rest)
        assert settled(normal("mul", normal("floordiv", n, const(8)), const(8))) is settled(n)
        assert settled(normal("floordiv", normal("mul", n, const(64)), const(512))) is settled(normal("floordiv", n, const(8)))
