"""Proofs that every Load and Store of a program lies inside its buffer, for every size that the symbols allow (no torch).

In: a Program. Out: for each index that is not proved a Doubt: what must hold of the sizes (`cond`, which the host can check when the
program is called), or that nothing is known; and the program with those Checks, and masks where nothing is known. An index that comes
out of memory is the affair of the Check that lowering writes for it.

A claim is `e >= 0` for an index expression e. Axes lie in 0 .. extent - 1 and every extent around an access is at least 1 (else the access
does not happen); symbols lie in their ranges; what a Load's or Store's mask says holds. The rules, tried in this order:

    the interval of e, or of e over symbols counted from their least value, is not negative; or that of a bound of e over symbols
    e - f >= 0 where f >= 0 is known                        (masks, extents)
    k*(a // b), k*(a % b), k*min(a, b), k*max(a, b)         are replaced by what bounds them, for either sign of k
    an axis goes to the end where e is least                (the sign of what it is multiplied by must be provable)

What is left over symbols alone is the condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import dtype as dt
from .algebra import Terms, atoms_of, mul, product_of, terms_of, total
from .bounds import Ranges
from .expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, op, substitute, walk
from .linear import conjuncts
from .nested import every
from .program import Check, Cond, Program, Repeat, Stage, Store

DEPTH = 12
STEPS = 200  # claims looked at for one access: what is proved at all takes a handful, and what is not would be searched for a minute
TRIES = 3_000  # inequalities tried for one access (a proof takes hundreds), for those of a program that are not proved together, and for
TRIES_OF_PROGRAM, TRIES_THEN = 20_000, 300  # one access after that: with sixty facts about sizes each takes seconds
ZERO, ONE = const(0), const(1)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Index number `dim` of an access to `buf` is not proved to lie in 0 .. size-1. cond: what proves it, None where nothing does."""

    buf: str
    dim: int
    index: Expr
    size: Expr
    cond: Expr | None
    stage: Stage
    at: Load | Store | None  # None: `index` is how often a loop runs, and may be negative

    def __str__(self) -> str:
        if self.at is None:
            return f"a loop of {self.stage.origin} runs {self.index!r} times, which is not proved not to be negative"
        return f"{self.buf}: index {self.index!r} of dimension {self.dim} is not proved to lie below {self.size!r}"


def doubts(program: Program, assumed: Iterable[Expr] = (), hints: Mapping[str, int] | None = None) -> Iterator[Doubt]:
    """Accesses of the program's stages that are not proved. `assumed`: what holds of the sizes; `hints`: an example of them."""
    known = Known(program, assumed, hints or {})
    for stage in stages_of(program):
        yield from _Prover(program, known, stage).doubts()


class Known:
    """What is assumed of sizes: equal ones become one symbol, multiples a factor times a new one, the rest inequalities."""

    def __init__(self, program: Program, assumed: Iterable[Expr], hints: Mapping[str, int]) -> None:
        self.leaves: dict[Expr, tuple[int | None, int | None]] = {s.sym: (s.lo, s.hi) for s in program.symbols if not s.sym.dtype.is_float}
        self.leaves.update({r.sym: (0, None) for r in every(program.body) if isinstance(r, Repeat)})
        self.table: dict[Expr, Expr] = {}
        self.back: dict[Expr, Expr] = {}
        self.hints: dict[Expr, int] = {Sym(name): value for name, value in hints.items()}
        self.facts: list[Expr] = []
        self.tries = TRIES_OF_PROGRAM
        waiting = [c for e in assumed for c in conjuncts(e)]
        for c in waiting:
            if isinstance(c, Op) and c.name == "eq" and c.args[0].dtype is dt.index:
                self._equal(*(substitute(x, self.table) for x in c.args))
        for c in waiting:
            self.facts += [substitute(f, self.table) for f in _of_condition(c)]
            if isinstance(c, Op) and c.name == "ge" and c.args[0] in self.leaves and isinstance(c.args[1], Const):
                lo, hi = self.leaves[c.args[0]]
                self.leaves[c.args[0]] = (max(lo or 0, int(c.args[1].value)), hi)
        self._name_quotients(program)
        for s in list(self.leaves):
            if s in self.table:
                lo, hi = self.leaves[s]
                self.facts += [self.table[s] - lo] if lo is not None else []
                self.facts += [const(hi) - self.table[s]] if hi is not None else []

    def _equal(self, a: Expr, b: Expr) -> None:
        terms, constant = terms_of(a - b)
        if not constant and len(terms) == 1:  # s % c == 0: s = c * q
            ((term, _),) = terms.items()
            if isinstance(term, Op) and term.name == "mod" and isinstance(term.args[1], Const) and term.args[0] in self.leaves:
                s, c = term.args[0], int(term.args[1].value)
                q = Sym(f"{getattr(s, 'name', 's')}_by_{c}")
                lo, hi = self.leaves[s]
                self.leaves[q] = (-(-(lo or 0) // c), None if hi is None else hi // c)
                self.back[q] = op("floordiv", s, const(c))
                self._put(s, mul(q, const(c)))
                return
        for term, c in sorted(terms.items(), key=lambda t: getattr(t[0], "name", ""), reverse=True):
            if isinstance(term, Sym) and abs(c) == 1 and not any(term in set(walk(t)) for t in terms if t is not term):
                self._put(term, mul(total({t: k for t, k in terms.items() if t is not term}, constant), const(-c)))
                return

    def _name_quotients(self, program: Program) -> None:
        """Sizes that hold s // c get a symbol for it, and those padded to a multiple of c, s + (c - s % c) % c, one for how often."""
        sizes = [e for b in program.buffers.values() for e in b.shape] + [e for s in stages_of(program) for _, e in s.axes]
        nodes = [n for n in walk(*sizes) if isinstance(n, Op) and n.dtype is dt.index and isinstance(n.args[-1], Const)]
        for n in nodes:
            c = int(n.args[-1].value)  # type: ignore[attr-defined]
            if n in self.table or c < 2 or not _is_over_symbols(n):
                continue
            x = self.of(n.args[0])
            if n.name == "mod":  # (c - s % c) % c = c*q - s
                terms, constant = terms_of(n.args[0])
                inner = next(iter(terms)) if len(terms) == 1 else None
                if constant != c or inner is None or terms[inner] != -1 or not isinstance(inner, Op) or inner.name != "mod":
                    continue
                if inner.args[1] is not n.args[1]:
                    continue
                s = self.of(inner.args[0])
                q = self._new(op("floordiv", inner.args[0] + (c - 1), const(c)))
                self.table[n] = mul(q, const(c)) - s
                self.facts += [mul(q, const(c)) - s, s - mul(q, const(c)) + (c - 1)]
        for n in nodes:
            x = self.of(n)
            if n in self.table or not isinstance(x, Op) or x.name != "floordiv" or not isinstance(x.args[1], Const):
                continue
            inside, c = x.args[0], int(x.args[1].value)
            if c > 1:
                q = self._new(n)
                self.table[n] = self.table[x] = q
                self.facts += [inside - mul(q, const(c)), mul(q, const(c)) + (c - 1) - inside]

    def _new(self, meaning: Expr) -> Sym:
        q = Sym(f"q_{len(self.back)}")
        i = Ranges(self.leaves).interval(self.of(meaning))
        self.leaves[q] = (max(i.lo or 0, 0), i.hi)
        self.back[q] = meaning
        return q

    def _put(self, symbol: Expr, value: Expr) -> None:
        self.table = {s: substitute(v, {symbol: value}) for s, v in self.table.items()} | {symbol: value}
        if isinstance(value, Sym) and symbol in self.leaves:
            (lo, hi), (lo2, hi2) = self.leaves[symbol], self.leaves.get(value, (0, None))
            ends = [h for h in (hi, hi2) if h is not None]
            self.leaves[value] = (max(lo or 0, lo2 or 0), min(ends) if ends else None)

    def of(self, e: Expr) -> Expr:
        """`e` over the symbols that are left: what a replacement makes may have a symbol of its own."""
        if not self.table:
            return e
        for _ in range(len(self.table)):
            before, e = e, substitute(e, self.table)
            if e is before:
                break
        return e

    def is_false(self, cond: Expr) -> bool:
        """Is the condition, in the program's own symbols, false for the example sizes?"""
        table: dict[Expr, Expr] = {s: const(v) for s, v in self.hints.items()}
        found = substitute(cond, table)
        return isinstance(found, Const) and not found.value


def stages_of(program: Program) -> list[Stage]:
    return [e for e in every(program.body) if isinstance(e, Stage)]


class Facts:
    """What holds at one place: ranges of axes and symbols, and expressions that are not negative there."""

    def __init__(self, ranges: Ranges, known: tuple[Expr, ...]) -> None:
        self.ranges, self.known = ranges, known

    def with_mask(self, mask: Expr | None) -> Facts:
        found = [f for c in conjuncts(mask) for f in _of_condition(c)]
        if not found:
            return self
        leaf = dict(self.ranges.leaf)
        for f in found:
            terms, constant = terms_of(f)
            if len(terms) == 1:  # k*t + c >= 0
                ((t, k),) = terms.items()
                lo, hi = leaf.get(t, (None, None))
                if k > 0:
                    lo = max(-(constant // k), lo if lo is not None else -(constant // k))
                else:
                    hi = min(constant // -k, hi if hi is not None else constant // -k)
                leaf[t] = lo, hi
        return Facts(Ranges(leaf, self.ranges.extents), (*self.known, *found))

    def inside(self, axes: Iterable[tuple[Axis, Expr]]) -> Facts:
        """In a loop that runs at least once: sizes of 0 do not get here."""
        pairs = [(a, _positive(n)) for a, n in axes]
        leaf = dict(self.ranges.leaf)
        known = list(self.known)
        for _, extent in pairs:
            if isinstance(extent, Sym):
                lo, hi = leaf.get(extent, (0, None))
                leaf[extent] = (max(1, lo or 0), hi)
            elif not isinstance(extent, Const):
                known += [part - 1 for part in _parts_of_minimum(extent)]
        return Facts(Ranges(leaf, {**self.ranges.extents, **dict(pairs)}), tuple(known))


def _positive(extent: Expr) -> Expr:
    """max(n, 0) -> n, where it is known not to be 0."""
    if isinstance(extent, Op) and extent.name == "max":
        for one, other in (extent.args, extent.args[::-1]):
            if isinstance(other, Const) and other.value <= 0:
                return _positive(one)
    return extent


def _parts_of_minimum(e: Expr) -> list[Expr]:
    return [p for a in e.args for p in _parts_of_minimum(a)] if isinstance(e, Op) and e.name == "min" else [e]


_FLIPPED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _of_condition(c: Expr, holds: bool = True) -> list[Expr]:
    """Expressions that are not negative where the comparison of indices `c` holds (or fails)."""
    if isinstance(c, Op) and c.name == "not":
        return _of_condition(c.args[0], not holds)
    if isinstance(c, Op) and c.name == "or" and not holds:
        return [f for a in c.args for f in _of_condition(a, False)]
    if not isinstance(c, Op) or c.name not in _FLIPPED or c.args[0].dtype is not dt.index:
        return []
    a, b = c.args
    name = c.name if holds else _FLIPPED[c.name]
    return {"lt": [b - a - 1], "le": [b - a], "gt": [a - b - 1], "ge": [a - b], "eq": [a - b, b - a], "ne": []}[name]


class _Prover:
    """The accesses of one stage."""

    def __init__(self, program: Program, known: Known, stage: Stage) -> None:
        self.program, self.known, self.stage = program, known, stage
        self.outside = Facts(Ranges(known.leaves), tuple(known.facts))
        self.proved: set[tuple[Expr, Expr, tuple[Expr, ...]]] = set()
        self.lets = dict(stage.lets)

    def doubts(self) -> Iterator[Doubt]:
        s = self.stage
        if _is_idle(e for _, e in s.axes):
            return
        facts = self.outside.inside((a, self.known.of(e)) for a, e in s.axes)
        yield from self.extents((e for _, e in s.axes), self.outside)
        roots = [e for _, e in s.carry] + list(s.carry_next) + [e for _, e in s.lets]
        yield from self.loads(roots, facts)
        for store in s.stores:
            inner = facts.with_mask(self.named(store.mask))
            yield from self.loads([*store.index, store.value, *(() if store.mask is None else (store.mask,))], facts)
            yield from self.access(store, inner)

    def named(self, e: Expr | None) -> Expr | None:
        """`e` with what the stage's lets stand for, where that is index arithmetic."""
        if e is None:
            return e
        table: dict[Expr, Expr] = {v: x for v, x in self.lets.items() if x.dtype is dt.index or x.dtype is dt.bool_}
        return self.known.of(substitute(e, table) if table else e)

    def loads(self, roots: Iterable[Expr], facts: Facts) -> Iterator[Doubt]:
        """Every Load under `roots`, each Fold's in the ranges of its axes."""
        stack = [(r, facts) for r in roots]
        done: set[tuple[Expr, int]] = set()
        keep: list[Facts] = []
        while stack:
            e, at = stack.pop()
            if (e, id(at)) in done:
                continue
            done.add((e, id(at)))
            if isinstance(e, Load):
                yield from self.access(e, at.with_mask(self.named(e.mask)))
            if isinstance(e, Fold):
                n, k = len(e.axes), len(e.init)
                yield from self.extents(e.extents, at)
                inner = at.inside((a, self.known.of(n)) for a, n in zip(e.axes, e.extents, strict=True))
                keep.append(inner)
                stack += [(a, at) for a in e.args[: n + k]]
                stack += [(a, inner) for a in e.args[n + k :]] if not _is_idle(e.extents) else []
            else:
                stack += [(a, at) for a in e.args]

    def extents(self, extents: Iterable[Expr], facts: Facts) -> Iterator[Doubt]:
        """How often loops run is at least 0: sizes of buffers are such numbers too."""
        for extent in extents:
            if isinstance(extent, Const | Sym):
                continue
            e = self.known.of(extent)
            if (e, e, facts.known) in self.proved or _comes_from_memory(e):
                continue
            left = self.remainder(e, facts)
            if left is not None:
                yield Doubt("", -1, extent, extent, self.condition([(left, e)], facts), self.stage, None)
            else:
                self.proved.add((e, e, facts.known))

    def access(self, at: Load | Store, facts: Facts) -> Iterator[Doubt]:
        for d, (given, size) in enumerate(zip(at.index, self.program.buffers[at.buf].shape, strict=True)):
            i, n = given, self.known.of(size)
            if isinstance(i, Axis) and facts.ranges.extents.get(i) is _positive(n):
                continue
            i = self.named(i) or i
            if (i, n, facts.known) in self.proved or _comes_from_memory(i):
                continue
            left = [(r, e) for e in (i, n - i - 1) if (r := self.remainder(e, facts)) is not None]
            if left:
                yield Doubt(at.buf, d, given, size, self.condition(left, facts), self.stage, at)
            else:
                self.proved.add((i, n, facts.known))

    def remainder(self, e: Expr, facts: Facts) -> Expr | None:
        """None where e >= 0 is proved, else what is left to prove."""
        claim = _Claim(facts, min(TRIES, max(TRIES_THEN, self.known.tries)))
        before = claim.tries
        left = claim.settle(e, DEPTH)
        if left is not None:
            self.known.tries -= before - claim.tries
        return left

    def sufficient(self, left: Expr, e: Expr, facts: Facts) -> Expr:
        """The remainder is not negative, or e is not where quotients and the like of sizes alone stand as they are: numbers to the host."""
        cond = op("ge", left, ZERO)
        exact = _Claim(facts, TRIES_THEN, is_exact=True).bound(e, False)
        return cond if exact is None or exact is left else op("or", cond, op("ge", exact, ZERO))

    def condition(self, left: list[tuple[Expr, Expr]], facts: Facts) -> Expr | None:
        """What the host checks of claims e >= 0 with their remainders: those hold, or some loop around the access has no iteration."""
        if any(not isinstance(x, Sym | Const | Op) for r, _ in left for x in walk(r)):
            return None
        conds = [self.sufficient(r, e, facts) for r, e in left]
        if any(isinstance(c, Const) and not c.value for c in conds):
            return None
        cond = conds[0]
        for c in conds[1:]:
            cond = op("and", cond, c)
        for extent in dict.fromkeys(facts.ranges.extents.values()):
            if not isinstance(extent, Const) and all(isinstance(x, Sym | Const | Op) for x in walk(extent)):
                cond = op("or", op("le", extent, ZERO), cond)
        cond = substitute(cond, self.known.back) if self.known.back else cond
        return None if self.known.is_false(cond) else cond


def _is_idle(extents: Iterable[Expr]) -> bool:
    """Is it a nest that never runs?"""
    return any(isinstance(e, Const) and e.value <= 0 for e in extents)


def _comes_from_memory(e: Expr) -> bool:
    return any(isinstance(n, Load | Var | Fold) or (isinstance(n, Cast) and n.arg.dtype is not dt.index) for n in walk(e))


# ---------------------------------------------------------------- claims


class _Claim:
    """is_exact: bounds keep what is over symbols alone as it is, instead of bounding it by less."""

    def __init__(self, facts: Facts, tries: int, is_exact: bool = False) -> None:
        self.facts, self.ranges, self.is_exact = facts, facts.ranges, is_exact
        self.left, self.tries = STEPS, tries
        self.tried: dict[Expr, tuple[int, Expr | None]] = {}  # how deep a claim was looked at, and what was left
        self.bounds: dict[tuple[Expr, bool], Expr | None] = {}

    def settle(self, e: Expr, depth: int) -> Expr | None:
        """None: e >= 0. Else something that implies it: over symbols only where that was reached."""
        if self.is_plain(e):
            return None
        if depth == 0 or not self.left or self.tries < 0:
            return e
        before = self.tried.get(e)
        if before is not None and (before[0] >= depth or before[1] is None):
            return before[1]
        self.left -= 1
        self.tried[e] = depth, e
        found = self._settle(e, depth)
        self.tried[e] = depth, found
        return found

    def _settle(self, e: Expr, depth: int) -> Expr | None:
        for f in self.facts.known:
            if self.is_plain(e - f):
                return None
        best: Expr = e
        low = self.bound(e, False)
        if low is not None and low is not e:
            if self.is_plain(low) or any(self.is_plain(low - f) for f in self.facts.known):
                return None
            best = low
        for way in (self.without_op, self.without_axis):
            for choices in way(e):  # one of the ways suffices, each by all of its claims
                left = [r for c in choices if (r := self.settle(c, depth - 1)) is not None]
                if not left:
                    return None
                if len(left) == 1 and _is_over_symbols(left[0]) and not _is_over_symbols(best):
                    best = left[0]
        for f in self.facts.known:
            if _shares(e, f) and self.settle_with(e, f, depth):
                return None
        return best

    def settle_with(self, e: Expr, f: Expr, depth: int) -> bool:
        return depth > DEPTH - 3 and self.settle(e - f, min(depth - 1, DEPTH - 4)) is None

    # -------- without search
    def is_plain(self, e: Expr) -> bool:
        """By its interval, or as a polynomial in what is at least 0 that has no negative coefficient."""
        self.tries -= 1
        lo = self.ranges.interval(e).lo
        if lo is not None and lo >= 0:
            return True
        terms, constant = terms_of(e)
        if len(terms) > 12:
            return False
        counted: dict[tuple[Expr, ...], int] = {(): constant}
        for term, c in terms.items():
            atoms = atoms_of(term)
            lows = [self.ranges.interval(a).lo for a in atoms]
            if any(n is None or n < 0 for n in lows) or len(atoms) > 6:
                return False
            parts: dict[tuple[Expr, ...], int] = {(): c}
            for a, n in zip(atoms, lows, strict=True):  # a = n + something that is not negative
                grown: dict[tuple[Expr, ...], int] = {}
                for key, k in parts.items():
                    more = tuple(sorted((*key, a), key=id))
                    grown[more] = grown.get(more, 0) + k
                    if n:
                        grown[key] = grown.get(key, 0) + k * n
                parts = grown
            for key, k in parts.items():
                counted[key] = counted.get(key, 0) + k
        return all(k >= 0 for k in counted.values())

    # -------- bounds over symbols
    def bound(self, e: Expr, up: bool) -> Expr | None:
        """An expression over symbols that is at least (up) or at most e, term by term; None where there is none."""
        key = (e, up)
        if key not in self.bounds:
            self.bounds[key] = None
            self.bounds[key] = self._bound(e, up)
        return self.bounds[key]

    def _bound(self, e: Expr, up: bool) -> Expr | None:
        terms, constant = terms_of(e)
        result: Expr = const(constant)
        for term, c in terms.items():
            atoms = atoms_of(term)
            ends = [self._end(a, up if c > 0 else not up) for a in atoms]
            part: Expr = const(c)
            for a, end in zip(atoms, ends, strict=True):
                if end is None or (len(atoms) > 1 and not (self._is_natural(a) and self.is_plain(end))):
                    return None
                part = mul(part, end)
            result = result + part
        return result

    def _end(self, a: Expr, up: bool) -> Expr | None:
        if isinstance(a, Sym | Const) or (self.is_exact and _is_over_symbols(a)):
            return a
        if isinstance(a, Axis) and a in self.ranges.extents:
            return self.bound(self.ranges.extents[a] - 1, True) if up else ZERO
        if isinstance(a, Op) and a.dtype is dt.index and a.name in _BOUNDED:
            found = getattr(self, f"_end_{a.name}")(a, up)
            if found is not None:
                return found  # type: ignore[no-any-return]
        i = self.ranges.interval(a)
        end = i.hi if up else i.lo
        return None if end is None else const(end)

    def _end_floordiv(self, a: Op, up: bool) -> Expr | None:
        x, b = a.args
        if not _is_over_symbols(b) or not self.is_plain(b - 1):
            return None
        end = self.bound(x, up)
        if end is None:
            return None
        if up and self.is_plain(b - 1 - end):
            return ZERO
        found = op("floordiv", end, b)
        for n in list(walk(found)):  # a sum's whole part is taken out: what stays of -1 // b is -1
            whole = isinstance(n, Op) and n.name == "floordiv" and isinstance(n.args[0], Const) and n.args[0].value < 0
            if whole and self.is_plain(n.args[0] + n.args[1]):
                found = substitute(found, {n: const(-1)})
        return found

    def _end_mod(self, a: Op, up: bool) -> Expr | None:
        x, b = a.args
        least = self.bound(b, False)
        if least is None or not self.is_plain(least - 1):
            return None
        if not up:
            return ZERO
        low, high, most = self.bound(x, False), self.bound(x, True), self.bound(b, True)
        if low is not None and high is not None and self.is_plain(low) and self.is_plain(least - 1 - high):
            return high
        return None if most is None else most - 1

    def _pick(self, ends: list[Expr | None], up: bool, name: str) -> Expr | None:
        """The minimum or maximum of the ends: one of them where that is proved; any of them where it is on the safe side."""
        safe = (name == "min") == up  # an upper bound of a minimum: each of its operands
        known = [x for x in ends if x is not None]
        if not known or (len(known) < len(ends) and not safe):
            return None
        found = known[0]
        for x in known[1:]:
            first, second = (found, x) if name == "min" else (x, found)
            if self.is_plain(first - second):
                found = x
            elif not self.is_plain(second - first):
                found = op(name, found, x)
        return found

    def _end_min(self, a: Op, up: bool) -> Expr | None:
        return self._pick([self.bound(x, up) for x in a.args], up, "min")

    def _end_max(self, a: Op, up: bool) -> Expr | None:
        return self._pick([self.bound(x, up) for x in a.args], up, "max")

    def _end_where(self, a: Op, up: bool) -> Expr | None:
        return self._pick([self.bound(x, up) for x in self.branches(a)], up, "max" if up else "min")

    def _end_abs(self, a: Op, up: bool) -> Expr | None:
        return self._pick([self.bound(a.args[0], True), self.bound(-a.args[0], True)], True, "max") if up else ZERO

    def branches(self, a: Op) -> list[Expr]:
        """What a where may give."""
        c, yes, no = a.args
        for holds, value in ((True, yes), (False, no)):
            facts = _of_condition(c, holds)
            if facts and all(self.is_plain(f) or any(self.is_plain(f - g) for g in self.facts.known) for f in facts):
                return [value]
        return [yes, no]

    # -------- ways to go on
    def without_op(self, e: Expr) -> Iterator[list[Expr]]:
        """e with one quotient, remainder, minimum or maximum replaced by what bounds it."""
        terms, _ = terms_of(e)
        for term, c in terms.items():
            atoms = atoms_of(term)
            for a in atoms:
                if not isinstance(a, Op) or a.name not in _BOUNDED or a.dtype is not dt.index:
                    continue
                others = list(atoms)
                others.remove(a)
                if any((lo := self.ranges.interval(o).lo) is None or lo < 0 for o in others):
                    continue
                k = mul(const(c), product_of(others)) if others else const(c)
                rest = e - mul(k, a)
                yield from getattr(self, f"_{a.name}")(a, k, rest, c > 0)
                return

    def _min(self, a: Op, k: Expr, rest: Expr, up: bool) -> Iterator[list[Expr]]:
        both = [rest + mul(k, x) for x in a.args]
        if up:
            yield both
        else:
            yield from ([x] for x in both)
            yield [both[0] + both[1]]  # min(a, b) <= (a + b) / 2

    def _max(self, a: Op, k: Expr, rest: Expr, up: bool) -> Iterator[list[Expr]]:
        yield from self._min(a, k, rest, not up)

    def _where(self, a: Op, k: Expr, rest: Expr, up: bool) -> Iterator[list[Expr]]:
        claims = [(rest + mul(k, x), _of_condition(a.args[0], x is a.args[1])) for x in self.branches(a)]
        yield [c for c, facts in claims if not any(self.is_plain(c - f) for f in facts)]

    def _abs(self, a: Op, k: Expr, rest: Expr, up: bool) -> Iterator[list[Expr]]:
        yield from self._max(Op("max", dt.index, (a.args[0], -a.args[0])), k, rest, up)

    def _mod(self, a: Op, k: Expr, rest: Expr, up: bool) -> Iterator[list[Expr]]:
        x, b = a.args
        if up:
            yield [rest, b - 1]
        else:
            yield [rest + mul(k, b - 1), b - 1]
            yield [rest + mul(k, x), x, b - 1]  # x % b <= x

    def _floordiv(self, a: Op, k: Expr, rest: Expr, up: bool) -> Iterator[list[Expr]]:
        x, b = a.args
        if up:  # x // b >= 0, or > x/b - 1
            yield [rest, x, b - 1]
            yield [mul(rest, b) + mul(k, x - b + 1), b - 1]
            return
        # k is negative: rest + k*(x // b) >= 0 follows from rest*b + k*x >= 0; for k = -1 from rest*b + b - 1 - x >= 0
        slack = b - 1 if k is const(-1) else ZERO
        yield [mul(rest, b) + slack + mul(k, x), b - 1]
        yield [rest + mul(k, x), x, b - 1]  # x // b <= x

    def without_axis(self, e: Expr) -> Iterator[list[Expr]]:
        """e with one axis at the end where it is least."""
        axes = [n for n in walk(e) if isinstance(n, Axis) and n in self.ranges.extents]
        for axis in axes:
            slope = self.slope(e, axis)
            if slope is not None:
                yield [substitute(e, {axis: ZERO if slope >= 0 else self.ranges.extents[axis] - 1})]
                return

    def slope(self, e: Expr, axis: Axis) -> int | None:
        """Sign of what `axis` is multiplied by in `e`, where e is linear in it and the sign is known."""
        terms, _ = terms_of(e)
        rising: Terms = {}
        constant = 0
        for term, c in terms.items():
            atoms = atoms_of(term)
            here = [a for a in atoms if a is axis]
            if not here and not any(axis in set(walk(a)) for a in atoms if isinstance(a, Op)):
                continue
            if len(here) != 1 or any(axis in set(walk(a)) for a in atoms if a is not axis):
                return None
            others = [a for a in atoms if a is not axis]
            if others:
                rising[product_of(others)] = rising.get(product_of(others), 0) + c
            else:
                constant += c
        if all(c >= 0 for c in rising.values()) and constant >= 0 and all(self._is_natural(t) for t in rising):
            return 1
        if all(c <= 0 for c in rising.values()) and constant <= 0 and all(self._is_natural(t) for t in rising):
            return -1
        by = total(rising, constant)
        return 1 if self.is_plain(by) else -1 if self.is_plain(-by) else None

    def _is_natural(self, e: Expr) -> bool:
        lo = self.ranges.interval(e).lo
        return lo is not None and lo >= 0


_BOUNDED = frozenset({"floordiv", "mod", "min", "max", "where", "abs"})


def _is_over_symbols(e: Expr) -> bool:
    return all(isinstance(x, Sym | Const | Op) for x in walk(e))


def _shares(e: Expr, f: Expr) -> bool:
    """May subtracting the fact help? It has a term of the claim."""
    mine = terms_of(e)[0]
    return any(t in mine for t in terms_of(f)[0])


# ---------------------------------------------------------------- programs


def with_checks(program: Program, assumed: Iterable[Expr] = (), hints: Mapping[str, int] | None = None) -> tuple[Program, list[Doubt]]:
    """The program with what is not proved made safe, and the doubts that were left.

    Where a condition on sizes decides, the call checks it; where nothing does, the access gets a mask.
    """
    checks: dict[Expr, Check] = {}
    masked: dict[int, dict[Load | Store, list[Doubt]]] = {}  # by stage
    found = list(doubts(program, assumed, hints))
    if not any(not s.sym.dtype.is_float for s in program.symbols):  # how often a body was repeated says little of where it got
        found = [d for d in found if not any(isinstance(n, Sym) for n in walk(d.index))]
    given = {s.sym for s in program.symbols if s.origin[:1] != ("bound",)}
    for d in found:
        if d.cond is not None and all(x in given for x in walk(d.cond) if isinstance(x, Sym)):
            what = f"an operand of {d.stage.origin} is smaller than what reads it"
            checks.setdefault(d.cond, Check(d.cond, "IndexError", what, d.stage.loc))
        elif d.at is not None:
            masked.setdefault(id(d.stage), {}).setdefault(d.at, []).append(d)
    if not found:
        return program, []
    body = _masked_body(program.body, masked) if masked else program.body
    return replace(program, body=(*checks.values(), *body)), [d for d in found if d.cond is None or d.cond not in checks]


def is_outside(doubt: Doubt) -> bool:
    """Is the access outside of its buffer for certain? Sizes are known, nothing masks it, and its index is linear in axes that all run."""
    if doubt.at is None or doubt.at.mask is not None or any(isinstance(n, Sym) for n in walk(doubt.index, doubt.size)):
        return False
    stage = doubt.stage
    folds = [f for f in walk(*(e for t in stage.stores for e in (*t.index, t.value))) if isinstance(f, Fold)]
    inner = [(a, e) for f in folds for a, e in zip(f.axes, f.extents, strict=True)]
    if any(not isinstance(e, Const) for _, e in stage.axes) or any(a in walk(doubt.index) and not isinstance(e, Const) for a, e in inner):
        return False
    return not any(isinstance(n, Op) and n.name in _BOUNDED for n in walk(doubt.index))


def _masked_body(body: Iterable[Any], masked: Mapping[int, Mapping[Load | Store, list[Doubt]]]) -> tuple[Any, ...]:
    made: list[Any] = []
    for e in body:
        if isinstance(e, Stage) and id(e) in masked:
            made.append(_masked_stage(e, masked[id(e)]))
        elif isinstance(e, Cond):
            made.append(replace(e, then=_masked_body(e.then, masked), orelse=_masked_body(e.orelse, masked)))
        elif isinstance(e, Repeat):
            made.append(replace(e, body=_masked_body(e.body, masked)))
        else:
            made.append(e)
    return tuple(made)


def _within(rows: list[Doubt], mask: Expr | None) -> Expr:
    for d in rows:
        for c in (op("ge", d.index, ZERO), op("lt", d.index, d.size)):
            mask = c if mask is None else op("and", mask, c)
    assert mask is not None
    return mask


def _masked_stage(stage: Stage, rows: Mapping[Load | Store, list[Doubt]]) -> Stage:
    table: dict[Expr, Expr] = {}
    for at, ds in rows.items():
        if isinstance(at, Load):
            other = at.other if at.other is not None else Const(at.dtype, 0)
            table[at] = Load(at.buf, at.dtype, at.index, _within(ds, at.mask), other)

    def of(e: Expr) -> Expr:
        return substitute(e, table)

    stores = []
    for s in stage.stores:
        mask = _within(rows[s], s.mask) if s in rows else s.mask
        stores.append(replace(s, index=tuple(map(of, s.index)), value=of(s.value), mask=None if mask is None else of(mask)))
    return replace(
        stage, stores=tuple(stores), lets=tuple((v, of(e)) for v, e in stage.lets), carry=tuple((v, of(e)) for v, e in stage.carry),
        carry_next=tuple(map(of, stage.carry_next)),
    )  # fmt: skip
