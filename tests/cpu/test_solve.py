"""Conditions on one size, solved and held against trying every size."""

from __future__ import annotations

import random

import pytest
import torch

import torchsmith
from torchsmith.graph.polynomial import interval, poly
from torchsmith.graph.sizes import COMPARE, SizeFacts, print_condition
from torchsmith.graph.solve import holds_around, solutions
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Expr, Op, Sym, const
from torchsmith.ir.number import number_of

N, M = Sym("s0"), Sym("s1")
FAR = 400


def made_up(depth: int, rng: random.Random) -> Expr:
    if not depth:
        return rng.choice([N, N, const(rng.randint(-6, 9))])
    name = rng.choice(["add", "sub", "mul", "floordiv", "mod", "min"])
    a = made_up(depth - 1, rng)
    if name == "mul":
        return Op(name, dt.index, (a, const(rng.randint(-3, 4))))
    return Op(name, dt.index, (a, const(rng.randint(1, 5)) if name in ("floordiv", "mod") else made_up(depth - 1, rng)))


@pytest.mark.parametrize("seed", range(20))
def test_solutions_are_those_that_trying_finds(seed: int) -> None:
    rng, solved = random.Random(seed), 0
    for _ in range(50):
        cond = Op(rng.choice(list(COMPARE)), dt.bool_, (made_up(rng.randint(1, 3), rng), const(rng.randint(-5, 12))))
        size = rng.randint(1, 12)
        holds = {n: bool(number_of(cond, {"s0": n})) for n in range(-FAR, FAR)}
        low = next((n + 1 for n in range(size, -FAR - 1, -1) if not holds.get(n, True)), None)
        high = next((n - 1 for n in range(size, FAR) if not holds[n]), None)
        around = holds_around(cond, size)
        if around is None:  # does not hold there, or it cannot tell
            continue
        assert holds[size] and around == (low, high)
        valid = [n for n in range(1, FAR) if holds[n]]
        whole = valid == list(range(valid[0], valid[-1] + 1))
        assert solutions(cond, size, (1, None)) == ((valid[0], None if valid[-1] == FAR - 1 else valid[-1]) if whole else None)
        solved += 1
    assert solved > 5


def test_conditions_become_bounds() -> None:
    facts = SizeFacts()
    n = facts.fresh(9, ("size", 0, 0))
    assert (n - 3) // 3 + 1 > 0 and n >= 3  # the second follows
    assert (n - 2) // 2 * 2 < n and not facts.guards[1:]  # always
    assert (n + 1) // 2 == 5 and n <= 10 and n > 8
    assert [print_condition(g) for g in facts.guards] == ["(s0 >= 3)", "(s0 >= 9)", "(s0 <= 10)"]
    assert n % 4 == 1  # no interval: stays what it is
    assert print_condition(facts.guards[-1]) == "(mod(s0, 4) == 1)" or "%" in print_condition(facts.guards[-1])


def test_products_of_sizes_from_their_least() -> None:
    """(n - 1) * (m - 1) >= 0, multiplied out."""
    difference = Op("add", dt.index, (Op("sub", dt.index, (Op("sub", dt.index, (Op("mul", dt.index, (N, M)), N)), M)), const(1)))
    assert interval(poly(difference), lambda name: (1, 2**30))[0] == 0
    assert interval(poly(difference), lambda name: (3, None))[0] == 4


def test_minima_are_asked_of_what_they_are_of() -> None:
    facts = SizeFacts()
    n, m = facts.fresh(9, ("size", 0, 0)), facts.fresh(5, ("size", 0, 1))
    least, most = torch.sym_min(n, 4), torch.sym_max(n - 2, m)
    assert least <= n and least <= 4 and least > 0 and most >= m and not most < n - 2 and not facts.guards
    assert least >= 3  # n is
    assert [print_condition(g) for g in facts.guards] == ["(s0 >= 3)"]
    assert torch.sym_min(n, n + 1) is n or torch.sym_min(n, n + 1) == n


def test_functions_of_sizes_are_captured_for_all_sizes() -> None:
    def sizes(x: torch.Tensor, n: int) -> torch.Tensor:
        chosen = torch.sym_ite(n > 5, n, 3)
        return x * torch.sym_sqrt(x.shape[0]) + torch.sym_sum([n, x.shape[0], 2]) - chosen + torch.sym_sum(())

    compiled = torchsmith.compile(sizes, backend="eager", dynamic=True, fullgraph=True)
    for n in (4, 7, 9):
        assert torch.equal(compiled(torch.ones(n, 2), n), sizes(torch.ones(n, 2), n))
