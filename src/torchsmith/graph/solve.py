"""Conditions on one size, solved: the sizes around a known one for which a condition holds.

In: a comparison of index Exprs over one symbol. Out: an interval. What add, mul by a number, floordiv and mod by a number make of a
symbol n repeats itself: f(n + period) = f(n) + rise. So for each of `period` sizes the condition holds along a ray, and a few checks
settle it for all sizes. No torch.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ..ir import dtype as dt
from ..ir.expr import Const, Expr, Op, Sym, walk
from ..ir.number import number_of
from .polynomial import Range

NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
PERIODS = 128  # longer periods are not searched: each size of one is a check


def _repeat(e: Expr) -> tuple[int, int] | None:
    """(period, rise) of an Expr over one symbol; None where it has none, as n * n."""
    if isinstance(e, Const):
        return 1, 0
    if isinstance(e, Sym):
        return 1, 1
    if not isinstance(e, Op) or e.dtype is not dt.index:
        return None
    one, two = [_repeat(a) for a in e.args] if len(e.args) == 2 else (None, None)
    if one is None or two is None:
        return None
    (p, a), (q, b) = one, two
    period = math.lcm(p, q)
    a, b = a * (period // p), b * (period // q)
    if e.name in ("add", "sub"):
        return period, a + b if e.name == "add" else a - b
    if e.name in ("min", "max"):
        return (period, a) if a == b else None
    left, right = e.args
    if e.name == "mul" and isinstance(right, Const):
        return period, a * int(right.value)
    if e.name == "mul" and isinstance(left, Const):
        return period, b * int(left.value)
    if e.name in ("floordiv", "mod") and isinstance(right, Const) and int(right.value) > 0:
        times = int(right.value) // math.gcd(a, int(right.value))
        return period * times, a * times // int(right.value) if e.name == "floordiv" else 0
    return None


def _first_false(name: str, v: int, d: int) -> int | None:
    """The least k >= 0 for which `v + d * k <name> 0` is false; None where it always holds."""
    if name in ("lt", "le"):
        name, v, d = {"lt": "gt", "le": "ge"}[name], -v, -d
    if not {"eq": v == 0, "ne": v != 0, "gt": v > 0, "ge": v >= 0}[name]:
        return 0
    if name == "eq":
        return 1 if d else None
    if name == "ne":
        return -v // d if d and v % d == 0 and -v // d > 0 else None
    if d >= 0:
        return None
    return v // -d + 1 if name == "ge" else -(v // d)


@lru_cache(maxsize=4096)
def holds_around(cond: Expr, size: int) -> Range | None:
    """The largest interval of integers around `size` in which `cond` holds throughout; None where it does not hold at `size` or where
    this cannot tell (several symbols, products of sizes, long periods)."""
    if not isinstance(cond, Op) or cond.name not in NEGATED or any(a.dtype is not dt.index for a in cond.args):
        return None
    names = {x.name for x in walk(cond) if isinstance(x, Sym)}
    both = Op("sub", dt.index, cond.args)
    found = _repeat(both) if len(names) == 1 else None
    if found is None or found[0] > PERIODS:
        return None
    (period, rise), name = found, next(iter(names))
    ends: list[int | None] = []
    for sign in (-1, 1):
        end: int | None = None
        for i in range(period):
            k = _first_false(cond.name, number_of(both, {name: size + sign * i}), sign * rise)
            if k is not None and (end is None or i + k * period < end):
                end = i + k * period
        ends.append(end)
    if ends[0] == 0:
        return None
    return (None if ends[0] is None else size - ends[0] + 1, None if ends[1] is None else size + ends[1] - 1)


def within(r: Range, outer: Range) -> bool:
    """Does every size of `r` lie in `outer`?"""
    low = outer[0] is None or (r[0] is not None and r[0] >= outer[0])
    return low and (outer[1] is None or (r[1] is not None and r[1] <= outer[1]))


def solutions(cond: Op, size: int, sizes: Range) -> Range | None:
    """The sizes among `sizes` for which `cond` holds, where those are one interval with `size` in it; else None."""
    around = holds_around(cond, size)
    if around is None:
        return None
    low = None if sizes[0] is None else sizes[0] if around[0] is None else max(around[0], sizes[0])
    high = sizes[1] if around[1] is None else around[1] if sizes[1] is None else min(around[1], sizes[1])
    low = around[0] if low is None else low
    against = Op(NEGATED[cond.name], dt.bool_, cond.args)
    if low is not None and low != sizes[0]:
        below = holds_around(against, low - 1)
        if below is None or not within((sizes[0], low - 1), below):
            return None
    if high is not None and high != sizes[1]:
        above = holds_around(against, high + 1)
        if above is None or not within((high + 1, sizes[1]), above):
            return None
    return low, high
