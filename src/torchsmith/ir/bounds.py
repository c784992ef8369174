"""What is known of index expressions: intervals, divisibility, proofs of order, given the ranges of axes and symbols (no torch).

In: an index Expr and Ranges. Out: an Interval, a divisor, a proof (True) or ignorance (False).
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import NamedTuple

from . import dtype as dt
from .algebra import atoms_of, rejoin, terms_of, total
from .expr import SIGNED, Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, op, substitute, walk

LIMITS = {"i64": (-(2**63), 2**63 - 1), "i32": (-(2**31), 2**31 - 1), "i16": (-(2**15), 2**15 - 1), "i8": (-128, 127),
          "u8": (0, 255), "bool": (0, 1)}  # fmt: skip


class Interval(NamedTuple):
    """All whole numbers from lo to hi; None where unbounded."""

    lo: int | None
    hi: int | None

    def __and__(self, other: Interval) -> Interval:
        lo = self.lo if other.lo is None else other.lo if self.lo is None else max(self.lo, other.lo)
        hi = self.hi if other.hi is None else other.hi if self.hi is None else min(self.hi, other.hi)
        return Interval(lo, hi)


EVERYTHING = Interval(None, None)
NATURAL = Interval(0, None)


def _span(values: Iterable[float]) -> Interval:
    found = list(values)
    lo, hi = min(found), max(found)
    return Interval(None if math.isinf(lo) else int(lo), None if math.isinf(hi) else int(hi))


def _ends(i: Interval) -> tuple[float, float]:
    return (-math.inf if i.lo is None else i.lo, math.inf if i.hi is None else i.hi)


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b


def _add(a: Interval, b: Interval) -> Interval:
    return Interval(None if a.lo is None or b.lo is None else a.lo + b.lo, None if a.hi is None or b.hi is None else a.hi + b.hi)


def _mul(a: Interval, b: Interval) -> Interval:
    if a.lo is not None and a.hi is not None and b.lo is not None and b.hi is not None:  # exact, no floats
        corners = (a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi)
        return Interval(min(corners), max(corners))
    if a.lo is not None and b.lo is not None and a.lo >= 0 and b.lo >= 0:
        return Interval(a.lo * b.lo, None if a.hi is None or b.hi is None else a.hi * b.hi)
    return _span(_times(x, y) for x in _ends(a) for y in _ends(b))


def _neg(a: Interval) -> Interval:
    return Interval(None if a.hi is None else -a.hi, None if a.lo is None else -a.lo)


def _floordiv(a: Interval, b: Interval) -> Interval:
    if b.lo is None or b.lo < 1:
        return NATURAL if a.lo is not None and a.lo >= 0 and b.lo is not None and b.lo >= 0 else EVERYTHING
    # a // b moves towards 0 (or -1) as b grows: the extremes lie at b.lo and b.hi
    lo = None if a.lo is None else a.lo // b.lo if a.lo < 0 else (0 if b.hi is None else a.lo // b.hi)
    hi = None if a.hi is None else a.hi // b.lo if a.hi >= 0 else (-1 if b.hi is None else a.hi // b.hi)
    return Interval(lo, hi)


def _mod(a: Interval, b: Interval) -> Interval:
    if b.lo is not None and b.lo >= 1:
        if a.lo is not None and a.hi is not None and a.lo >= 0 and a.hi < b.lo:
            return a
        hi = None if b.hi is None else b.hi - 1
        if a.lo is not None and a.lo >= 0 and a.hi is not None:
            hi = a.hi if hi is None else min(hi, a.hi)
        return Interval(0, hi)
    return NATURAL if b.lo is not None and b.lo >= 0 else EVERYTHING


def _min(a: Interval, b: Interval) -> Interval:
    his = [h for h in (a.hi, b.hi) if h is not None]
    return Interval(None if a.lo is None or b.lo is None else min(a.lo, b.lo), min(his) if his else None)


def _max(a: Interval, b: Interval) -> Interval:
    return _neg(_min(_neg(a), _neg(b)))


def _union(a: Interval, b: Interval) -> Interval:
    return Interval(
        None if a.lo is None or b.lo is None else min(a.lo, b.lo), None if a.hi is None or b.hi is None else max(a.hi, b.hi)
    )


def _abs(a: Interval) -> Interval:
    return _max(a, _neg(a)) & NATURAL


def _shl(a: Interval, b: Interval) -> Interval:
    if a.lo is None or a.lo < 0 or b.lo is None or b.lo < 0:
        return EVERYTHING
    return Interval(a.lo << min(b.lo, 63), None if a.hi is None or b.hi is None or b.hi > 63 else a.hi << b.hi)


INTERVAL_OF: dict[str, Callable[..., Interval]] = {
    "add": _add, "sub": lambda a, b: _add(a, _neg(b)), "mul": _mul, "neg": _neg, "floordiv": _floordiv, "mod": _mod, "abs": _abs,
    "min": _min, "max": _max, "where": lambda c, a, b: _union(a, b), "sign": lambda a: Interval(-1, 1),
    "shl": _shl,
}  # fmt: skip
Real = tuple[float, float]


def _corners(fn: Callable[[float, float], float]) -> Callable[[Real, Real], list[float]]:
    return lambda a, b: [fn(x, y) for x in a for y in b]


def _quotients(a: Real, b: Real) -> list[float]:
    return [math.nan] if b[0] <= 0 <= b[1] else [x / y for x in a for y in b]


def _stepped(fn: Callable[[float], float]) -> Callable[[Real], list[float]]:
    return lambda a: [float(fn(x)) if math.isfinite(x) else x for x in a]


REALS: dict[str, Callable[..., list[float]]] = {  # values at the ends of monotonic functions; a NaN: nothing is known
    "add": _corners(lambda x, y: x + y), "sub": _corners(lambda x, y: x - y), "mul": _corners(lambda x, y: x * y), "div": _quotients,
    "min": _corners(min), "max": _corners(max), "neg": lambda a: [-x for x in a],
    "floor": _stepped(math.floor), "ceil": _stepped(math.ceil), "trunc": _stepped(math.trunc), "round": _stepped(round),
}  # fmt: skip


def _rounded(x: float, dtype: dt.DType) -> float:
    """x as a float of `dtype`; of narrow floats nothing is known."""
    if dtype is dt.f64 or not math.isfinite(x):
        return x
    if dtype is not dt.f32 or abs(x) > 1e38:
        return math.copysign(math.inf, x)
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found


Leaf = Mapping[Expr, tuple[int | None, int | None]]


class Ranges:
    """Ranges of leaves (`leaf`, inclusive ends) and extents of axes, which may be symbolic. Axes are never negative.

    An Axis with a symbolic extent is known to be < extent only through `is_lt`; with a constant one also by its interval.
    `sizes`: an index symbol without a range is a size, at least 0; else nothing is known of it.
    """

    def __init__(self, leaf: Leaf | None = None, extents: Mapping[Axis, Expr] | None = None, sizes: bool = False) -> None:
        self.leaf = dict(leaf or {})
        self.extents = dict(extents or {})
        self.sizes = sizes
        self._memo: MutableMapping[Expr, Interval] = {}

    def inside(self, axes: Iterable[tuple[Axis, Expr]]) -> Ranges:
        """The same knowledge, with more axes bound."""
        return Ranges(self.leaf, {**self.extents, **dict(axes)}, self.sizes)

    def bind(self, axis: Axis, extent: Expr) -> None:
        """`axis` runs to `extent` from here on."""
        if self.extents.get(axis) is not extent:
            self.extents[axis] = extent
            if axis in self._memo:
                self._memo.clear()

    def interval(self, e: Expr) -> Interval:
        """Where the value of a whole-number or bool `e` lies."""
        memo, todo = self._memo, [e] if e not in self._memo else []
        while todo:
            node = todo[-1]
            missing = [a for a in node.args if a not in memo] if _is_told_by_operands(node) else ()
            todo.extend(missing)
            if not missing:
                memo[todo.pop()] = self._one(node)
        return memo[e]

    def _one(self, e: Expr) -> Interval:
        given = self.leaf.get(e)
        found = _INTERVALS[type(e)](self, e)
        return found if given is None else found & Interval(*given)

    def _axis(self, e: Axis) -> Interval:
        extent = self.extents.get(e)
        if extent is None:
            return NATURAL
        hi = self.interval(extent).hi
        return Interval(0, None if hi is None else hi - 1)

    def _op(self, e: Op) -> Interval:
        how = INTERVAL_OF.get(e.name)
        if how is None or e.dtype.is_float or e.dtype is dt.bool_:
            return Interval(*LIMITS.get(e.dtype.name, (None, None)))
        found = how(*(self._memo[a] for a in e.args))
        limit = LIMITS.get(e.dtype.name)
        if limit is not None:  # tensor integers wrap: outside the dtype nothing is known
            lo, hi = _ends(found)
            return found if limit[0] <= lo and hi <= limit[1] else Interval(*limit)
        return found

    def _cast(self, e: Cast) -> Interval:
        limit = Interval(*LIMITS.get(e.dtype.name, (None, None)))
        if e.arg.dtype.is_float:  # a conversion cuts off
            lo, hi = self.reals(e.arg)
            return limit & Interval(math.trunc(lo) if math.isfinite(lo) else None, math.trunc(hi) if math.isfinite(hi) else None)
        inner = self._memo[e.arg]
        lo, hi = _ends(inner)
        low, high = _ends(limit)
        return inner if low <= lo and hi <= high and e.dtype is not dt.bool_ else limit

    def reals(self, e: Expr) -> Real:
        """Bounds of a float `e` over index expressions. Rounding keeps order, so the rounded ends are ends of what is rounded."""
        low, high = -math.inf, math.inf
        if isinstance(e, Const):
            low = high = float(e.value)
        elif isinstance(e, Cast):
            low, high = self.reals(e.arg) if e.arg.dtype.is_float else _ends(self.interval(e.arg))
        elif isinstance(e, Op) and e.name in REALS:
            corners = REALS[e.name](*(self.reals(a) for a in e.args))
            if not any(map(math.isnan, corners)):
                low, high = min(corners), max(corners)
        return _rounded(low, e.dtype), _rounded(high, e.dtype)

    def divisor(self, e: Expr) -> int:
        """The greatest known d such that d divides every value of the index `e` (0 for the constant 0)."""
        if isinstance(e, Const):
            return abs(int(e.value))
        if isinstance(e, Op):
            if e.name == "add":
                return math.gcd(*(self.divisor(a) for a in e.args))
            if e.name == "mul":
                return math.prod(self.divisor(a) for a in e.args)
            if e.name in ("min", "max", "where", "mod"):
                return math.gcd(*(self.divisor(a) for a in e.args[-2:]))
        i = self.interval(e)
        return abs(i.lo) if i.lo is not None and i.lo == i.hi else 1

    # ------------------------------------------------------------ proofs
    def is_nonnegative(self, e: Expr) -> bool:
        """True if `e` >= 0 is proved."""
        lo = self.interval(e).lo
        if lo is not None and lo >= 0:
            return True
        return self._lowest(e, 6)

    def _lowest(self, e: Expr, depth: int) -> bool:
        """Put each axis of symbolic extent where it makes `e` least, then look again."""
        lo = self.interval(e).lo
        if lo is not None and lo >= 0:
            return True
        if depth == 0:
            return False
        for axis in [n for n in walk(e) if isinstance(n, Axis)]:
            extent = self.extents.get(axis)
            if extent is None:
                continue
            slope = self._slope(e, axis)
            if slope is None:
                continue
            end = const(0) if slope >= 0 else extent - 1
            return self._lowest(substitute(e, {axis: end}), depth - 1)
        return False

    def _slope(self, e: Expr, axis: Axis) -> int | None:
        """Sign of the coefficient of `axis` in `e` if e is linear in it and the sign is known, else None."""
        terms, _ = terms_of(e)
        sign = 0
        for term, coefficient in terms.items():
            if axis not in set(walk(term)):
                continue
            atoms = atoms_of(term)
            others = [a for a in atoms if a is not axis]
            if len(others) != len(atoms) - 1 or any(axis in set(walk(o)) for o in others):
                return None
            if not all(_is_natural(self.interval(o)) for o in others):
                return None
            here = 1 if coefficient > 0 else -1
            if sign not in (0, here):
                return None
            sign = here
        return sign

    def is_le(self, a: Expr, b: Expr) -> bool:
        """True if a <= b is proved."""
        return self.is_nonnegative(b - a)

    def is_lt(self, a: Expr, b: Expr) -> bool:
        """True if a < b is proved."""
        return self.is_nonnegative(b - a - 1)

    def is_within(self, e: Expr, extent: Expr) -> bool:
        """True if 0 <= e < extent is proved."""
        return self.is_nonnegative(e) and self.is_lt(e, extent)


def _is_told_by_operands(e: Expr) -> bool:
    """Does the interval of `e` come from those of its operands?"""
    if isinstance(e, Cast):
        return not e.arg.dtype.is_float
    return isinstance(e, Op) and not e.dtype.is_float and e.dtype is not dt.bool_


def _is_natural(i: Interval) -> bool:
    return i.lo is not None and i.lo >= 0


def _limit(r: Ranges, e: Expr) -> Interval:
    return Interval(*LIMITS.get(e.dtype.name, (None, None)))


_INTERVALS: dict[type, Callable[..., Interval]] = {
    Const: lambda r, e: EVERYTHING if e.dtype.is_float else Interval(int(e.value), int(e.value)),
    Sym: lambda r, e: NATURAL if r.sizes and e.dtype is dt.index and e not in r.leaf and not e.name.startswith(SIGNED) else _limit(r, e),
    Var: _limit,
    Load: _limit,
    Fold: _limit,
    Axis: Ranges._axis,
    Op: Ranges._op,
    Cast: Ranges._cast,
}

class _OnNodes(MutableMapping[Expr, Interval]):
    """Intervals that depend on the node alone live as long as the node."""

    def __contains__(self, e: object) -> bool:
        return isinstance(e, Expr) and e._bounds is not None

    def __getitem__(self, e: Expr) -> Interval:
        found: Interval = e._bounds
        return found

    def __setitem__(self, e: Expr, found: Interval) -> None:
        object.__setattr__(e, "_bounds", found)

    def __delitem__(self, e: Expr) -> None:
        object.__setattr__(e, "_bounds", None)

    def __iter__(self) -> Iterator[Expr]:
        return iter(())

    def __len__(self) -> int:
        return 0


NOTHING_KNOWN = Ranges()
NOTHING_KNOWN._memo = _OnNodes()


def simplify_index(e: Expr, ranges: Ranges) -> Expr:
    """`e` rebuilt with div, mod, min, max and comparisons removed where `ranges` decides them.

    (i * 4 + j) // 4 with j < 4  ->  i
    """
    memo: dict[Expr, Expr] = {}
    for node in walk(e):
        args = tuple(memo[a] for a in node.args)
        memo[node] = decide(node.rebuild(args) if args else node, ranges)
    return memo[e]


def decide(e: Expr, ranges: Ranges) -> Expr:
    """One node whose operands are already simple, under `ranges`."""
    if not isinstance(e, Op) or not e.args or e.args[-1].dtype is not dt.index:
        return e
    rule = DECISIONS.get(e.name)
    return e if rule is None else rule(e, ranges)


def _decide_divmod(e: Op, ranges: Ranges) -> Expr:
    a, b = e.args
    if ranges.is_within(a, b):
        return const(0) if e.name == "floordiv" else a
    i, j = ranges.interval(a), ranges.interval(b)
    if j.lo is not None and j.lo == j.hi and j.lo > 0 and i.lo is not None and i.hi is not None and i.lo // j.lo == i.hi // j.lo:
        q = i.lo // j.lo  # all values of a lie in one block of b
        return const(q) if e.name == "floordiv" else a - q * j.lo
    terms, constant = terms_of(a)
    if not terms or j.lo is None or j.lo < 0 or j.hi == 0:  # by 0: in a nest that never runs
        return e
    # q*b + r with 0 <= r < b: the terms that b divides, and the rest if it is small enough
    q_terms: dict[Expr, int] = {}
    r_terms: dict[Expr, int] = {}
    for t, c in terms.items():
        whole = _quotient(t, c, b)
        if whole is None:
            r_terms[t] = c
        else:
            q_terms[whole[0]] = q_terms.get(whole[0], 0) + whole[1]
    rest = total(r_terms, constant)
    if q_terms and ranges.is_within(rest, b):
        return rest if e.name == "mod" else total(*_merged(q_terms.items()))
    for f in _divisors_of(b):  # (f*x + r) // (f*d) -> x // d, (f*x + r) % (f*d) -> f * (x % d) + r where 0 <= r < f
        exact = {t: found for t, c in terms.items() if (found := _quotient(t, c, f)) is not None}
        low = total({t: c for t, c in terms.items() if t not in exact}, constant)
        d = _quotient(*next(iter(terms_of(b)[0].items())), f)
        if exact and d is not None and (low is _ZERO or ranges.is_within(low, f)):
            x = total(*_merged(exact.values()))
            divided = decide(op(e.name, x, total(*_merged([d]))), ranges)
            return divided if e.name == "floordiv" else divided * f + low
    return e


def _merged(terms: Iterable[tuple[Expr, int]]) -> tuple[dict[Expr, int], int]:
    """A sum of term * coefficient as `total` takes it."""
    out: dict[Expr, int] = {}
    for t, c in terms:
        out[t] = out.get(t, 0) + c
    return {t: c for t, c in out.items() if t is not _ONE}, out.get(_ONE, 0)


def _divisors_of(b: Expr) -> list[Expr]:
    """The proper factors of a product of at most four symbols and a constant, single ones first."""
    terms, constant = terms_of(b)
    if constant or len(terms) != 1:
        return []
    ((mono, k),) = terms.items()
    atoms = atoms_of(mono) + [const(k)] * (k > 1)
    subsets = (c for n in range(1, len(atoms)) for c in itertools.combinations(atoms, n)) if len(atoms) <= 5 else ()
    return list(dict.fromkeys(functools.reduce(lambda x, y: x * y, c) for c in subsets))


_ZERO, _ONE = const(0), const(1)


def _quotient(term: Expr, coefficient: int, b: Expr) -> tuple[Expr, int] | None:
    """term * coefficient / b as (term, coefficient) when it divides exactly by form."""
    if isinstance(b, Const):
        return (term, coefficient // int(b.value)) if coefficient % int(b.value) == 0 else None
    terms, constant = terms_of(b)
    if constant or len(terms) != 1:
        return None
    ((mono, k),) = terms.items()
    if coefficient % k:
        return None
    left = atoms_of(term)
    for f in atoms_of(mono):
        if f not in left:
            return None
        left.remove(f)
    rest: Expr = _ONE
    for f in left:
        rest = rest * f
    return rest, coefficient // k


def _decide_extreme(e: Op, ranges: Ranges) -> Expr:
    a, b = e.args
    if ranges.is_le(a, b):
        return a if e.name == "min" else b
    if ranges.is_le(b, a):
        return b if e.name == "min" else a
    return e


def _decide_order(e: Op, ranges: Ranges) -> Expr:
    a, b = (e.args[1], e.args[0]) if e.name in ("gt", "ge") else e.args
    strict = e.name in ("lt", "gt")
    if ranges.is_lt(a, b) if strict else ranges.is_le(a, b):
        return Const(dt.bool_, True)
    if ranges.is_le(b, a) if strict else ranges.is_lt(b, a):
        return Const(dt.bool_, False)
    return e


def _decide_equal(e: Op, ranges: Ranges) -> Expr:
    a, b = e.args
    if ranges.is_lt(a, b) or ranges.is_lt(b, a):
        return Const(dt.bool_, e.name == "ne")
    return e


def _decide_sum(e: Op, ranges: Ranges) -> Expr:
    terms, constant = terms_of(e)
    if not any(isinstance(a, Op) and a.name == "mod" for t in terms for a in atoms_of(t)):
        return e
    return total(*rejoin(dict(terms), constant, lambda c: _is_natural(ranges.interval(c))))


DECISIONS: dict[str, Callable[[Op, Ranges], Expr]] = {
    "add": _decide_sum,
    "floordiv": _decide_divmod, "mod": _decide_divmod, "min": _decide_extreme, "max": _decide_extreme,
    "lt": _decide_order, "le": _decide_order, "gt": _decide_order, "ge": _decide_order, "eq": _decide_equal, "ne": _decide_equal,
}  # fmt: skip
