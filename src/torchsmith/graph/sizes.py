"""Symbolic sizes: SizeFacts (what is assumed of each symbol) and SizeNode (the node behind torch.SymInt).

In: fresh symbols with hint, origin and range. Out: torch.SymInts whose arithmetic builds ir Exprs, and the list of conditions
that were assumed when Python asked a size a yes-or-no question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx.experimental.sym_node

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.bounds import Ranges
from ..ir.expr import SIGNED, Cast, Const, Expr, Op, Sym, const, walk
from ..ir.number import number_of
from ..ir.program import Symbol
from .polynomial import Poly, Range, add, divide, expr, interval, normal, poly, settled
from .solve import NEGATED, holds_around, solutions, within

Number = int | float | bool
Text = str  # SizeNode has a method of that name, which torch's protocol asks for
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
COMPARE_ORDER = ("lt", "le", "gt", "ge")
# guard `symbol op c` -> (c + this is the least, c + this is the greatest value)
_BOUNDS: dict[str, tuple[int | None, int | None]] = {"eq": (0, 0), "lt": (None, -1), "le": (None, 0), "gt": (1, None), "ge": (0, None)}
LARGEST = 2**30  # size of a symbol by default: below it index arithmetic on lanes is 32 bits wide, rounding up to tiles included
SymTypes = (torch.SymInt, torch.SymFloat, torch.SymBool)
TRUE, FALSE = Const(dt.bool_, True), Const(dt.bool_, False)


def _from(least: int, r: Range) -> Range:
    return (least if r[0] is None else max(r[0], least), r[1])


class SizeFacts:
    """Symbols, their ranges, and the conditions assumed of them; append-only while capturing.

    `guards` are Exprs that must hold, in the order they were assumed; `locs` says which user line asked. After `freeze()` a
    condition that does not follow goes to `late`: the compiler's own assumptions, to be handed back with the compiled call.
    `symbols` keep the declared ranges; `range` and `pinned` know what the guards have made of them.
    """

    def __init__(self) -> None:
        self.symbols: dict[str, Symbol] = {}
        self.hints: dict[str, int | None] = {}
        self.guards: list[Expr] = []
        self.late: list[Expr] = []
        self.locs: dict[Expr, str] = {}
        self.loc = ""
        self.region: Any = None  # the checkpointed part of the program at hand (graph/region.py)
        self.frozen = False
        self.passed_over: dict[tuple[str, Expr], None] = {}  # what torch's code was told of sizes at this line without its being assumed
        self.is_promise = False  # one graph is for all declared sizes: no choice is made for those at hand alone
        self.own_draws = False  # random operators are written with counters, not with eager's generator
        self.kernels_chosen = False  # the program says which kernels attention may take, which is not said to torch
        self.calls = 0  # torch functions under way: what asks about sizes is torch's code, not the program
        self.guesses = True  # a truth that torch asks for may be taken for False, and checked when the graph runs
        self.guessed = 0  # how often one was
        self.reads_data = False  # the value of a one-element tensor may become a symbol (a graph that stands alone)
        self.fixed: set[str] = set()  # floats, by symbol: a number that is computed of them is needed as a constant
        self.loose: frozenset[str] = frozenset()  # inputs, by name: numbers that have had too many values to assume one more
        self.sources: dict[str, Any] = {}  # what symbols were made of, where the frontend says so
        self.when_assumed: Callable[[Expr, str], None] | None = None  # told each condition on such values: running has to check it
        self.needed: list[tuple[Expr, str]] = []  # what rules take for granted of tensors' values, which the program does not check itself
        # told what was read of the process (a function and what it gave), to be guarded
        self.when_asked: Callable[[Callable[[], Any], Any], None] | None = None
        self.has_devices = False  # some tensor stands for one on another device than cpu
        self.spoken = False  # Python code of the program runs: text of a size is that of its number
        self.read_at: dict[str, str] = {}  # symbol of a tensor's value -> the user's line that read it
        self.dims: dict[str, str] = {}  # symbol of a declared dimension -> its name
        self._known: set[Expr] = set()
        self._narrowed: dict[str, Range] = {}
        self._constants: dict[str, float] = {}  # floats that the guards leave one value
        self._values: dict[str, torch.SymInt] = {}

    def fresh(self, hint: int | None, origin: tuple[str | int, ...], lo: int = 1, hi: int | None = None) -> torch.SymInt:
        """A new symbol. hint None: its value is known only at run time (a size that data tell; may it be negative, a tensor's value)."""
        if hi is None and hint is not None:
            hi = LARGEST
        prefix = "s" if hint is not None else "u" if lo >= 0 else SIGNED
        name = f"{prefix}{sum(n.startswith(prefix) for n in self.symbols)}"
        sym = Sym(name)
        self.symbols[name] = Symbol(sym, origin, lo, hi)
        self.hints[name] = hint
        value = torch.SymInt(SizeNode(sym, hint, self, "int"))
        self._values[name] = value
        return value

    def fresh_value(self, dtype: torch.dtype) -> torch.SymInt | torch.SymFloat:
        """A new symbol for the one number in a tensor of this dtype: known only when the graph runs."""
        if not dtype.is_floating_point:
            span = torch.iinfo(dtype)
            value = self.fresh(None, ("bound",), span.min, span.max)
            self.read_at[str(value.node.expr.name)] = self.loc
            return value
        name = f"v{sum(n.startswith('v') for n in self.symbols)}"
        sym = Sym(name, dt.f64)
        self.symbols[name] = Symbol(sym, ("bound",))
        self.hints[name], self.read_at[name] = None, self.loc
        return torch.SymFloat(SizeNode(sym, None, self, "float"))

    def fresh_float(self, hint: float, origin: tuple[str | int, ...]) -> torch.SymFloat:
        """A new symbol for a Python float from outside."""
        name = f"f{sum(n.startswith('f') for n in self.symbols)}"
        sym = Sym(name, dt.f64)
        self.symbols[name] = Symbol(sym, origin)
        self.hints[name] = hint  # type: ignore[assignment]
        return torch.SymFloat(SizeNode(sym, hint, self, "float"))

    def floats(self) -> frozenset[str]:
        """The floats from outside that vary, by what they were made of."""
        return frozenset(str(s) for name, s in self.sources.items() if name in self.symbols and self.symbols[name].sym.dtype is dt.f64)

    def said(self, e: Expr) -> str:
        """Text of a condition or size that names the lines that read its numbers."""
        text = print_condition(e, self.dims | {name: f"[item() at {at}]" for name, at in self.read_at.items()})
        return text[1:-1] if text.startswith("(") else text

    def unmet(self, cond: Expr, loc: str) -> str:
        return f"{self.said(cond)} does not hold" + (f"; {loc} needs it" if loc else "")

    def is_read(self, e: Expr) -> bool:
        """Has a tensor's value a part in it?"""
        return any(isinstance(x, Sym) and x.name in self.read_at for x in walk(e))

    def depends_on_data(self, cond: Expr) -> bool:
        return any(isinstance(x, Sym) and x.name in self.symbols and self.symbols[x.name].origin == ("bound",) for x in walk(cond))

    def freeze(self) -> SizeFacts:
        """No more guards of the user's program; what is assumed from now on is the compiler's."""
        self.frozen = True
        return self

    def range(self, name: str) -> Range:
        row = self.symbols.get(name)
        return self._narrowed.get(name) or ((None, None) if row is None or row.sym.dtype is dt.f64 else (row.lo, row.hi))

    def beyond_ranges(self) -> tuple[Expr, ...]:
        """What was assumed that the declared ranges do not say: (d0 % 4 == 0,)."""
        ranges = SizeFacts()
        ranges.symbols.update(self.symbols)
        return tuple(c for c in (*self.guards, *self.late) if ranges.decide(c) is None)

    def pinned(self) -> dict[str, int | float]:
        """Symbols that the guards leave one value: the program is for that size or number only."""
        found = {name: self.range(name) for name in self.symbols}
        return {name: lo for name, (lo, hi) in found.items() if lo is not None and lo == hi} | self._constants

    def bound(self, e: Expr) -> Range:
        """Interval of an index Expr under the assumed ranges."""
        return interval(poly(e), self.range)

    def decide(self, cond: Expr, least: int | None = None) -> bool | None:
        """True or False when `cond` follows from the ranges and guards (and, given `least`, from no symbol being below it), else None."""
        if isinstance(cond, Const):
            return bool(cond.value)
        if cond in self._known:
            return True
        if not isinstance(cond, Op):
            return None
        if cond.name in COMPARE:
            return self._decide_comparison(cond, least)
        sides = [self.decide(a, least) for a in cond.args]
        if cond.name == "not":
            return None if sides[0] is None else not sides[0]
        if cond.name == "and":
            return False if False in sides else True if None not in sides else None
        if cond.name == "or":
            return True if True in sides else False if None not in sides else None
        return None

    def _decide_comparison(self, cond: Op, least: int | None) -> bool | None:
        if Op(NEGATED[cond.name], dt.bool_, cond.args) in self._known:
            return False
        a, b = cond.args
        if a.dtype is not dt.index or b.dtype is not dt.index:
            return self._decide_floats(cond, least)
        difference = add(poly(a), poly(b), -1)
        lo, hi = interval(difference, self.range if least is None else lambda name: _from(least, self.range(name)))  # the sign of a - b
        if lo is not None and lo == hi:
            return COMPARE[cond.name](lo, 0)
        if lo is not None and lo > 0:
            return cond.name in ("ne", "gt", "ge")
        if hi is not None and hi < 0:
            return cond.name in ("ne", "lt", "le")
        if lo is not None and lo >= 0 and cond.name in ("ge", "lt"):
            return cond.name == "ge"
        if hi is not None and hi <= 0 and cond.name in ("le", "gt"):
            return cond.name == "le"
        by_cases = self._decide_by_cases(cond.name, difference, least)
        answer = self._decide_of_one(cond, least) if by_cases is None else by_cases
        if answer is not None:
            return answer
        other = _comparison(cond.name, settled(expr(difference)), const(0))  # sizes rounded up to multiples are seen to be multiples
        return None if other is cond or not _is_simpler(other, cond) else self.decide(other, least)

    def _decide_floats(self, cond: Op, least: int | None) -> bool | None:
        """A question about numbers computed from sizes, by the bounds of both sides: 1.5 * n >= -1. NaN comes of no sizes."""
        found = [n for n in walk(*cond.args) if n.dtype is not dt.f64 or isinstance(n, Sym)]
        if any(n.dtype is not dt.index for n in found):
            return None
        leaf: dict[Expr, Range] = {n: self.range(n.name) for n in found if isinstance(n, Sym)}
        if least is not None:
            leaf = {n: _from(least, r) for n, r in leaf.items()}
        (low, high), (least_other, most_other) = map(Ranges(leaf).reals, cond.args)
        name = cond.name
        if high < least_other or (high == least_other and name in ("le", "gt")):
            return name in ("lt", "le", "ne")
        if low > most_other or (low == most_other and name in ("ge", "lt")):
            return name in ("gt", "ge", "ne")
        return None

    def _decide_by_cases(self, name: str, difference: Poly, least: int | None) -> bool | None:
        """A question about a minimum or maximum is one about what it is of: min(n, 4) <= n."""
        found = _chosen(difference)
        if found is None:
            return None
        is_least, sides = found
        answers = [self.decide(_comparison(name, expr(side), const(0)), least) for side in sides]
        if answers[0] is answers[1]:
            return answers[0]
        if name in (("le", "lt") if is_least else ("ge", "gt")):  # one will do
            return True if True in answers else None
        return False if name in COMPARE_ORDER and False in answers else None

    def _decide_of_one(self, cond: Op, least: int | None) -> bool | None:
        """A question about one symbol, answered where all of its sizes have one answer: (n - 2) // 2 * 2 < n."""
        name = _only_symbol(cond)
        sizes = (None, None) if name is None else self.range(name) if least is None else _from(least, self.range(name))
        if sizes[0] is None:
            return None
        for c, answer in ((cond, True), (Op(NEGATED[cond.name], dt.bool_, cond.args), False)):
            around = holds_around(c, sizes[0])
            if around is not None:
                return answer if within(sizes, around) else None
        return None

    def assume(self, cond: Expr, loc: str = "") -> None:
        """Record that `cond` holds (once, and only when it does not follow already)."""
        known = self.decide(cond)
        if known is not None:
            if not known:
                raise Unsupported("GRA008", at=loc or self.loc, detail=print_condition(cond))
            return
        self._known.add(cond)
        smaller = self._reduced(cond)
        if smaller is not cond:
            self.assume(smaller, loc)
            return
        bounds = _parts(cond) or self._bounds(cond)
        if bounds is not None:
            for c in bounds:
                self.assume(c, loc)
            return
        self._narrow(cond)
        if self.depends_on_data(cond):  # no input tells it: the graph has a check of its own
            if self.is_read(cond):
                self.needed.append((cond, loc or self.loc))
            if self.when_assumed is not None:
                self.when_assumed(cond, loc or self.loc)
            return
        (self.late if self.frozen else self.guards).append(cond)
        self.locs.setdefault(cond, loc or self.loc)

    def _reduced(self, cond: Expr) -> Expr:
        """A comparison without the positive factors of both sides: b*n*8 == m*n*8 -> b == m."""
        if not isinstance(cond, Op) or cond.name not in COMPARE or any(a.dtype is not dt.index for a in cond.args):
            return cond
        p = add(poly(cond.args[0]), poly(cond.args[1]), -1)
        shared = math.gcd(*p.values())
        common = [x for x in min(p, key=len, default=()) if isinstance(x, Sym) and (self.range(x.name)[0] or 0) > 0]
        factor: list[Expr] = []
        for x in common:
            factor.append(x)
            if any(m.count(x) < factor.count(x) for m in p):
                factor.pop()
        if shared <= 1 and not factor:
            return cond
        less = divide(p, {tuple(factor): shared})
        return cond if less is None else _comparison(cond.name, expr(less), const(0))

    def _bounds(self, cond: Expr) -> list[Expr] | None:
        """A condition that is an interval of one symbol, as its bounds: (n - 3) // 3 + 1 > 0 -> n >= 3. None where it is not, is a single
        size, or is spelt so already."""
        name = _only_symbol(cond)
        if name is None or not isinstance(cond, Op) or cond.name not in NEGATED or isinstance(cond.args[0], Sym) or _is_of_floats(cond):
            return None
        sizes, size = self.range(name), self.hints.get(name)
        found = None if size is None else solutions(cond, size, sizes)
        if found is None:
            return None
        symbol, (low, high) = self.symbols[name].sym, found
        if low is not None and low == high:
            return None
        ends = (("ge", low, sizes[0]), ("le", high, sizes[1]))
        return [Op(op, dt.bool_, (symbol, const(end))) for op, end, known in ends if end is not None and end != known]

    def _narrow(self, cond: Expr) -> None:
        """What a guard on one symbol says of its range."""
        if not (isinstance(cond, Op) and cond.name in _BOUNDS and isinstance(cond.args[0], Sym) and isinstance(cond.args[1], Const)):
            return
        if cond.args[0].dtype is dt.f64:
            if cond.name == "eq":
                self._constants[cond.args[0].name] = float(cond.args[1].value)
            return
        name, value = cond.args[0].name, int(cond.args[1].value)
        below, above = _BOUNDS[cond.name]
        lo, hi = self.range(name)
        if below is not None:
            lo = value + below if lo is None else max(lo, value + below)
        if above is not None:
            hi = value + above if hi is None else min(hi, value + above)
        self._narrowed[name] = (lo, hi)

    def number(self, e: Expr) -> Expr:
        """`e`, or the number that the ranges and guards leave it: min(s0, 1) is 1, and so is s0 where it was assumed to be. What data tell
        keeps its name, for running has to tell it."""
        if not isinstance(e, (Op, Sym)) or e.dtype is not dt.index or (isinstance(e, Sym) and self.depends_on_data(e)):
            return e
        lo, hi = interval(poly(e), self.range)
        if lo is not None and lo == hi:
            return const(lo)
        return const(1) if self.decide(_comparison("eq", e, const(1))) else e

    def ask_likely(self, cond: Expr, hint: bool | None, loc: str) -> bool:
        """`ask`, where the sizes 0 and 1 may share the answer of all others: nothing is assumed if that is also the answer at hand."""
        known = self.decide(cond)
        of_more = self.decide(cond, 2) if known is None else None
        if of_more is not None and hint in (of_more, None):
            self.pass_over(cond, hint)
            return of_more
        return self.ask(cond, hint, loc)

    def pass_over(self, cond: Expr, hint: bool | None) -> None:
        """Remember an answer that is right for every size as long as nothing raises, so that it was not assumed."""
        if hint is not None:
            if self.passed_over and next(iter(self.passed_over))[0] != self.loc:
                self.passed_over.clear()
            self.passed_over[self.loc, cond if hint else negate(cond)] = None

    def confirm(self) -> None:
        """The program sees an exception that other answers at this line might have spared it: assume those that were given."""
        given, self.passed_over = self.passed_over, {}
        for loc, cond in given:
            if loc == self.loc:
                self.ask(cond, True)

    def ask(self, cond: Expr, hint: bool | None, loc: str = "") -> bool:
        """Answer a yes-or-no question about sizes by its hint and assume the answer from now on."""
        known = self.decide(cond)
        if known is not None:
            return known
        if hint is None:
            if not self.calls or not _compares_sizes(cond):
                raise Unsupported("GRA004", at=loc or self.loc, detail=self.said(cond))
            hint = isinstance(cond, Op) and cond.name == "eq"  # torch's code needs them to be equal; running checks it
        self.assume(cond if hint else negate(cond), loc)
        return hint

    def at_most(self, a: Expr, b: Expr) -> bool:
        """Is a <= b? Assumed from now on where it holds of the sizes at hand; a caller must be right with the answer no, too."""
        cond = _comparison("le", a, b)
        known = self.decide(cond)
        if known is None:
            sizes = number_of(a, self.hints), number_of(b, self.hints)
            if None in sizes or sizes[0] > sizes[1]:
                return False
            self.assume(cond)
        return known is not False


def print_condition(e: Expr, names: Mapping[str, str] | None = None) -> str:
    """Readable text of a size or a condition; names: what to call symbols. It does not depend on the printer of loop bodies."""
    signs = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
             "gt": ">", "ge": ">=", "and": "and", "or": "or"}  # fmt: skip
    if isinstance(e, Const):
        return str(e.value)
    if isinstance(e, Sym):
        return names.get(e.name, e.name) if names else e.name
    if isinstance(e, Op) and e.name in signs:
        return f"({print_condition(e.args[0], names)} {signs[e.name]} {print_condition(e.args[1], names)})"
    if isinstance(e, Cast) and e.dtype is dt.index and isinstance(e.args[0], Op) and e.args[0].name == "trunc":
        return f"int({print_condition(e.args[0].args[0], names)})"
    name = e.name if isinstance(e, Op) else f"{type(e).__name__.lower()}_{e.dtype.name}"
    return f"{name}({', '.join(print_condition(a, names) for a in e.args)})"


def _chosen(difference: Poly) -> tuple[bool, list[Poly]] | None:
    """A sum with a minimum or maximum in it: whether the sum is the lesser (or the greater) of two sums, and those."""
    for m, c in difference.items():
        atom = m[0] if len(m) == 1 else None
        if isinstance(atom, Op) and atom.name in ("min", "max"):
            rest = {k: v for k, v in difference.items() if k != m}
            return (atom.name == "min") is (c > 0), [add(rest, poly(a), c) for a in atom.args]
    return None


def _parts(cond: Expr) -> list[Expr] | None:
    """Conditions that together are this one: both sides of an `and`; min(a, b) >= c -> a >= c, b >= c."""
    if not isinstance(cond, Op) or cond.name not in ("and", *COMPARE_ORDER):
        return None
    if cond.name == "and":
        return list(cond.args)
    found = _chosen(add(poly(cond.args[0]), poly(cond.args[1]), -1)) if all(a.dtype is dt.index for a in cond.args) else None
    if found is None or found[0] is not (cond.name in ("ge", "gt")):
        return None
    return [_comparison(cond.name, expr(side), const(0)) for side in found[1]]


def _compares_sizes(cond: Expr) -> bool:
    """Does it ask whether two sizes are equal?"""
    if not isinstance(cond, Op) or cond.name not in ("eq", "ne") or any(a.dtype is not dt.index for a in cond.args):
        return False
    return len({x.name for x in walk(cond) if isinstance(x, Sym)}) > 1


def _only_symbol(cond: Expr) -> str | None:
    names = {x.name for x in walk(cond) if isinstance(x, Sym)}
    return names.pop() if len(names) == 1 else None


def _is_of_floats(cond: Expr) -> bool:
    return any(isinstance(x, Sym) and x.dtype is dt.f64 for x in walk(cond))


def _is_simpler(a: Expr, b: Expr) -> bool:
    return isinstance(a, Const) or sum(1 for _ in walk(a)) < sum(1 for _ in walk(b))


def negate(cond: Expr) -> Expr:
    if isinstance(cond, Op) and cond.name in NEGATED:
        return Op(NEGATED[cond.name], dt.bool_, cond.args)
    if isinstance(cond, Op) and cond.name == "not":
        return cond.args[0]
    return Op("not", dt.bool_, (cond,))


def _comparison(name: str, a: Expr, b: Expr) -> Expr:
    """One spelling per comparison of sizes: everything on the left, the constant on the right."""
    if a.dtype is not dt.index or b.dtype is not dt.index:
        return Op(name, dt.bool_, (a, b))
    p = add(poly(a), poly(b), -1)
    rest = p.pop((), 0)
    if not p:
        return TRUE if COMPARE[name](rest, 0) else FALSE
    if all(c < 0 for c in p.values()):
        flip = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
        p, rest, name = {m: -c for m, c in p.items()}, -rest, flip.get(name, name)
    return Op(name, dt.bool_, (expr(p), const(-rest)))


def _dyadic(e: Expr) -> tuple[Expr, int] | None:
    """f64 arithmetic on sizes that is exact (below 2**53) as (n, d): it is n / d, d a power of two."""
    if isinstance(e, Cast) and e.arg.dtype is dt.index:
        return e.arg, 1
    if isinstance(e, Const) and math.isfinite(float(e.value)):
        n, d = float(e.value).as_integer_ratio()
        return (const(n), d) if max(abs(n), d) <= 1 << 20 else None
    if not isinstance(e, Op) or e.name not in ("add", "sub", "mul", "div"):
        return None
    a, b = (_dyadic(x) for x in e.args)
    if a is None or b is None:
        return None
    if e.name == "div":  # h * w / 7 is exact where h is a multiple of 7
        by = poly(b[0])
        exact = divide(poly(settled(normal("mul", a[0], const(b[1])))), by) if by else None
        if exact is not None:
            return expr(exact), a[1]
        power = int(b[0].value) if isinstance(b[0], Const) else 0
        is_exact = power > 0 and power & (power - 1) == 0 and power * a[1] <= 1 << 20
        return (normal("mul", a[0], const(b[1])), a[1] * power) if is_exact else None
    if e.name == "mul":
        return normal("mul", a[0], b[0]), a[1] * b[1]
    d = max(a[1], b[1])
    return normal(e.name, normal("mul", a[0], const(d // a[1])), normal("mul", b[0], const(d // b[1]))), d


def ratio_of(e: Expr) -> tuple[Expr, Expr] | None:
    """A quotient of sizes in f64 as two whole numbers, if rounding it up or down gives what dividing those does."""
    whole = _dyadic(e)
    parts = (_dyadic(e.args[0]), _dyadic(e.args[1])) if whole is None and isinstance(e, Op) and e.name == "div" else (whole, (const(1), 1))
    if parts[0] is None or parts[1] is None or parts[1][0] is const(0):
        return None
    (n, d), (m, c) = parts[0], parts[1]
    return normal("mul", n, const(c)), normal("mul", m, const(d))


def as_float(e: Expr) -> Expr:
    if isinstance(e, Const):
        return Const(dt.f64, e.value)
    return e if e.dtype is dt.f64 else Cast(dt.f64, e)


class SizeNode:
    """What torch asks of a symbolic number: an ir Expr (index, f64 or bool), its hint, and the facts it belongs to.

    Sharing one class for the three kinds is torch's protocol: SymInt, SymFloat and SymBool all hold such a node.
    """

    __slots__ = ("expr", "facts", "hint", "kind")

    def __init__(self, e: Expr, hint: Any, facts: SizeFacts, kind: Text) -> None:
        self.expr, self.hint, self.facts, self.kind = e, hint, facts, kind

    # -------- what torch asks about the node itself
    shape_env = None
    fx_node = None
    constant = None

    @property
    def pytype(self) -> type:
        return {"int": int, "float": float, "bool": bool}[self.kind]

    @property
    def _hint(self) -> Any:
        return self.hint

    def is_int(self) -> bool:
        return self.kind == "int"

    def is_float(self) -> bool:
        return self.kind == "float"

    def is_bool(self) -> bool:
        return self.kind == "bool"

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return self.hint is not None

    def require_hint(self, fallback: Any = None) -> Any:
        return self.hint if self.hint is not None else fallback

    def maybe_as_int(self) -> int | None:
        return int(self.expr.value) if isinstance(self.expr, Const) and self.kind == "int" else None

    def maybe_as_float(self) -> float | None:
        return float(self.expr.value) if isinstance(self.expr, Const) and self.kind == "float" else None

    def maybe_as_bool(self) -> bool | None:
        return bool(self.expr.value) if isinstance(self.expr, Const) and self.kind == "bool" else None

    def str(self) -> Text:
        return print_condition(self.expr)

    __str__ = __repr__ = str

    def _graph_repr(self) -> Text:
        """repr() of the SymInt: to the program a number, which is assumed from now on."""
        if not self.facts.spoken or self.facts.frozen:
            return self.str()
        return repr(self.guard_int() if self.kind == "int" else self.guard_float() if self.kind == "float" else self.bool_())

    def clone(self) -> SizeNode:
        return self

    # -------- constants become nodes
    def wrap_int(self, n: int) -> SizeNode:
        return SizeNode(const(n), n, self.facts, "int")

    def wrap_float(self, v: float) -> SizeNode:
        return SizeNode(Const(dt.f64, v), v, self.facts, "float")

    def wrap_bool(self, v: bool) -> SizeNode:
        return SizeNode(TRUE if v else FALSE, v, self.facts, "bool")

    # -------- questions that need an answer now
    def _decided(self, file: Text, line: int) -> bool:
        return self.facts.ask(self.expr, self.hint, self._loc(file, line))

    def _loc(self, file: Text, line: int) -> Text:
        return self.facts.loc or (f"{file}:{line}" if file else "")

    def guard_bool(self, file: Text = "", line: int = 0) -> bool:
        """torch's own C++ asks (Python comes through bool_): mostly whether a dimension of size 1 may be left out of a stride rule."""
        return self.facts.ask_likely(self.expr, self.hint, self._loc(file, line))

    guard_size_oblivious = guard_bool

    def bool_(self) -> bool:
        if self.kind == "bool":
            return self._decided("", 0)
        return self.ne(self.wrap_int(0))._decided("", 0)

    def expect_true(self, file: Text = "", line: int = 0) -> bool:
        """torch._check: assumed even where the value is unknown until run time. What is not so raises, so no other choice is lost."""
        if self.hint is None:
            known = len(self.facts.needed)
            self.facts.assume(self.expr, self._loc(file, line))
            del self.facts.needed[known:]
            return True
        answer = self._decided(file, line)
        if not answer:  # what raises now asked guard_or_false (is this size 1?) on its way, and might not raise if the answer were another
            self.facts.confirm()
        return answer

    # torch's promise where it asks these two: the answer False (True) is right for every size, the other one only quicker
    def guard_or_false(self, file: Text = "", line: int = 0) -> bool:
        if self.facts.decide(self.expr) is None and not self.hint:
            self.facts.pass_over(self.expr, self.hint)
            return False
        return self._decided(file, line)

    def guard_or_true(self, file: Text = "", line: int = 0) -> bool:
        if self.facts.decide(self.expr) is None and self.hint is not False:
            self.facts.pass_over(self.expr, self.hint)
            return True
        return self._decided(file, line)

    def statically_known_true(self, file: Text = "", line: int = 0) -> bool:
        return self.facts.decide(self.expr) is True

    def guard_int(self, file: Text = "", line: int = 0) -> int:
        """The program needs this very number: specialise."""
        if isinstance(self.expr, Const):
            return int(self.expr.value)
        if self.hint is None:
            said = self.facts.said(self.expr)
            raise Unsupported("GRA004", at=self.facts.loc, detail=said if said.startswith("int(") else f"int({said})")
        self._is_assumable()
        self.facts.assume(_comparison("eq", self.expr, const(self.hint)))
        return int(self.hint)

    def _is_assumable(self) -> None:
        if self.facts.loose:
            names = [str(self.facts.sources.get(x.name)) for x in walk(self.expr) if isinstance(x, Sym)]
            if any(n in self.facts.loose for n in names):
                raise Unsupported("GRA015", at=self.facts.loc, detail=names[0])

    def int_(self) -> int:
        return self.guard_int()

    def guard_float(self, file: Text = "", line: int = 0) -> float:
        if isinstance(self.expr, Const):
            return float(self.expr.value)
        if self.hint is None:
            raise Unsupported("GRA004", at=self.facts.loc, detail=f"float({self.facts.said(self.expr)})")
        self._is_assumable()
        self.facts.fixed |= {x.name for x in walk(self.expr) if isinstance(x, Sym) and x.dtype is dt.f64}
        inner = self.expr.args[0] if isinstance(self.expr, Cast) else None
        if inner is not None and inner.dtype is dt.index:  # float(s0): pin the integer
            self.facts.assume(_comparison("eq", inner, const(int(self.hint))))
        else:
            self.facts.assume(Op("eq", dt.bool_, (self.expr, Const(dt.f64, float(self.hint)))))
        return float(self.hint)

    # -------- arithmetic
    def _arith(self, other: SizeNode, name: Text, fn: Callable[[Any, Any], Any]) -> SizeNode:
        hint = None if self.hint is None or other.hint is None else fn(self.hint, other.hint)
        if self.kind == "float" or other.kind == "float":
            a, b = as_float(self.expr), as_float(other.expr)
            e: Expr = Const(dt.f64, float(hint or 0.0)) if isinstance(a, Const) and isinstance(b, Const) else Op(name, dt.f64, (a, b))
            return SizeNode(e, hint, self.facts, "float")
        return SizeNode(normal(name, self.expr, other.expr), hint, self.facts, "int")

    def add(self, other: SizeNode) -> SizeNode:
        return self._arith(other, "add", lambda a, b: a + b)

    def sub(self, other: SizeNode) -> SizeNode:
        return self._arith(other, "sub", lambda a, b: a - b)

    def mul(self, other: SizeNode) -> SizeNode:
        return self._arith(other, "mul", lambda a, b: a * b)

    def mod(self, other: SizeNode) -> SizeNode:
        return self._arith(other, "mod", lambda a, b: a % b)

    def int_floordiv(self, other: SizeNode) -> SizeNode:
        return self._arith(other, "floordiv", lambda a, b: a // b)

    floordiv = int_floordiv

    def lshift(self, other: SizeNode) -> SizeNode:
        return self.mul(self.wrap_int(1 << other.guard_int()))

    def rshift(self, other: SizeNode) -> SizeNode:
        return self.int_floordiv(self.wrap_int(1 << other.guard_int()))

    def bitwise_and(self, other: SizeNode) -> SizeNode:
        one, two = (other, self) if isinstance(self.expr, Const) else (self, other)
        mask = two.guard_int()
        if mask >= 0 and not mask & (mask + 1):  # the lowest bits
            return one.mod(one.wrap_int(mask + 1))
        return one.wrap_int(one.guard_int() & mask)

    def sym_min(self, other: SizeNode) -> SizeNode:
        first = self.facts.decide(self.le(other).expr)
        return self._arith(other, "min", min) if first is None else self if first else other

    def sym_max(self, other: SizeNode) -> SizeNode:
        first = self.facts.decide(self.ge(other).expr)
        return self._arith(other, "max", max) if first is None else self if first else other

    def _as_float_pair(self, other: SizeNode) -> tuple[SizeNode, SizeNode]:
        return self.sym_float(), other.sym_float()

    def int_truediv(self, other: SizeNode) -> SizeNode:
        whole = self.kind == other.kind == "int"
        if whole and any(isinstance(n.expr, Const) and abs(int(n.expr.value)) > 2**53 for n in (self, other)):
            return self.wrap_float(self.guard_int() / other.guard_int())  # Python divides integers exactly; as a float this one is rounded
        a, b = self._as_float_pair(other)
        return a._arith(b, "div", lambda x, y: x / y)

    truediv = float_truediv = int_truediv

    def pow_by_natural(self, other: SizeNode) -> SizeNode:
        n = other.guard_int()
        e: Expr = const(1)
        for _ in range(n):
            e = normal("mul", e, self.expr)
        return SizeNode(e, None if self.hint is None else self.hint**n, self.facts, "int")

    def float_pow(self, other: SizeNode) -> SizeNode:
        a, b = self._as_float_pair(other)
        return a._arith(b, "pow", lambda x, y: x**y)

    def pow(self, other: SizeNode) -> SizeNode:
        return self.float_pow(other) if "float" in (self.kind, other.kind) else self.pow_by_natural(other)

    def neg(self) -> SizeNode:
        return self.wrap_int(0).sub(self) if self.kind == "int" else self.wrap_float(-0.0).sub(self)

    def pos(self) -> SizeNode:
        return self

    def abs(self) -> SizeNode:
        if self.kind == "float":
            return SizeNode(Op("abs", dt.f64, (self.expr,)), None if self.hint is None else abs(self.hint), self.facts, "float")
        positive = self.ge(self.wrap_int(0))
        if self.hint is None and self.facts.decide(positive.expr) is None:
            return self.sym_max(self.neg())
        return self if positive.guard_bool() else self.neg()

    def sym_sum(self, args: list[SizeNode]) -> SizeNode:
        total = self.wrap_int(0)
        for a in args:
            total = total.add(a)
        return total

    def sym_float(self) -> SizeNode:
        if self.kind == "float":
            return self
        return SizeNode(as_float(self.expr), None if self.hint is None else float(self.hint), self.facts, "float")

    def _to_int(self, name: Text, fn: Callable[[float], int]) -> SizeNode:
        if self.kind == "int":
            return self
        hint, ratio = None if self.hint is None else fn(self.hint), ratio_of(self.expr)
        if ratio is not None and name == "trunc":
            sign = SizeNode(normal("mul", *ratio), hint, self.facts, "int")
            name = "floor" if sign.ge(sign.wrap_int(0)).guard_bool() else "ceil"
        if ratio is not None and name in ("floor", "ceil"):  # ceil(f64(n) / 2.0) -> -(-n // 2)
            n, m = ratio
            down = normal("floordiv", n if name == "floor" else normal("mul", n, const(-1)), m)
            return SizeNode(down if name == "floor" else normal("mul", down, const(-1)), hint, self.facts, "int")
        if ratio is not None and name == "round" and isinstance(ratio[1], Const) and int(ratio[1].value) > 0:
            n, m = ratio  # up from the half on, and at the half where that makes it even: (n + m // 2 - 1 + n // m % 2) // m
            k = int(m.value)  # type: ignore[attr-defined]
            up = const((k - 1) // 2) if k % 2 else normal("add", normal("mod", normal("floordiv", n, m), const(2)), const(k // 2 - 1))
            return SizeNode(normal("floordiv", normal("add", n, up), m), hint, self.facts, "int")
        return SizeNode(Cast(dt.index, Op(name, dt.f64, (self.expr,))), hint, self.facts, "int")

    def floor(self) -> SizeNode:
        return self._to_int("floor", math.floor)

    def ceil(self) -> SizeNode:
        return self._to_int("ceil", math.ceil)

    def trunc(self) -> SizeNode:
        return self._to_int("trunc", math.trunc)

    def round(self, ndigits: int | None = None) -> SizeNode:
        if ndigits is not None:
            return self.wrap_float(round(self.guard_float(), ndigits))
        return self._to_int("round", round)

    def sym_sqrt(self) -> SizeNode:
        x = self.sym_float()
        return SizeNode(Op("sqrt", dt.f64, (x.expr,)), None if x.hint is None else math.sqrt(x.hint), self.facts, "float")

    # -------- comparisons and logic
    def _compare(self, other: SizeNode, name: Text) -> SizeNode:
        hint = None if self.hint is None or other.hint is None else COMPARE[name](self.hint, other.hint)
        a, b = (self, other) if self.kind == other.kind else self._as_float_pair(other)
        left, right = (_dyadic(a.expr), _dyadic(b.expr)) if a.expr.dtype is dt.f64 else (None, None)
        if left is not None and right is not None:  # both exact: f64(n) >= 0.5 is 2 * n >= 1
            sides = normal("mul", left[0], const(right[1])), normal("mul", right[0], const(left[1]))
            return SizeNode(_comparison(name, *sides), hint, self.facts, "bool")
        return SizeNode(_comparison(name, a.expr, b.expr), hint, self.facts, "bool")

    def eq(self, other: SizeNode) -> SizeNode:
        return self._compare(other, "eq")

    def ne(self, other: SizeNode) -> SizeNode:
        return self._compare(other, "ne")

    def lt(self, other: SizeNode) -> SizeNode:
        return self._compare(other, "lt")

    def le(self, other: SizeNode) -> SizeNode:
        return self._compare(other, "le")

    def gt(self, other: SizeNode) -> SizeNode:
        return self._compare(other, "gt")

    def ge(self, other: SizeNode) -> SizeNode:
        return self._compare(other, "ge")

    def sym_and(self, other: SizeNode) -> SizeNode:
        hint = None if self.hint is None or other.hint is None else self.hint and other.hint
        return SizeNode(Op("and", dt.bool_, (self.expr, other.expr)), hint, self.facts, "bool")

    def sym_or(self, other: SizeNode) -> SizeNode:
        hint = None if self.hint is None or other.hint is None else self.hint or other.hint
        return SizeNode(Op("or", dt.bool_, (self.expr, other.expr)), hint, self.facts, "bool")

    def sym_not(self) -> SizeNode:
        return SizeNode(negate(self.expr), None if self.hint is None else not self.hint, self.facts, "bool")

    def sym_ite(self, a: SizeNode, b: SizeNode) -> SizeNode:
        if self.hint is None and a.kind == b.kind == "float" and self.facts.decide(self.expr) is None:
            return SizeNode(Op("where", dt.f64, (self.expr, a.expr, b.expr)), None, self.facts, "float")
        return a if self.guard_bool() else b

    and_, or_, not_ = sym_and, sym_or, sym_not

    # -------- memory formats of tensors with symbolic sizes: torch asks for these to fill its flags
    def _format(self, sizes: list[Any], strides: list[Any], order: tuple[int, ...] | None) -> SizeNode:
        n = len(sizes)
        if order is None:
            order = tuple(reversed(range(n)))
        elif len(order) != n:
            return self.wrap_bool(False)
        expected: SizeNode = self.wrap_int(1)
        answer = True
        for d in order:
            size, stride = self._lift(sizes[d]), self._lift(strides[d])
            one = size.facts.decide(_comparison("eq", size.expr, const(1)))
            if one is not True and stride.expr is not expected.expr:
                answer = False
                break
            expected = expected.mul(size)
        return self.wrap_bool(answer)

    def _lift(self, v: Any) -> SizeNode:
        return v if isinstance(v, SizeNode) else self.wrap_int(int(v))

    def is_contiguous(self, sizes: list[Any], strides: list[Any]) -> SizeNode:
        return self._format(sizes, strides, None)

    def is_channels_last_contiguous_2d(self, sizes: list[Any], strides: list[Any]) -> SizeNode:
        return self._format(sizes, strides, (1, 3, 2, 0))

    def is_channels_last_contiguous_3d(self, sizes: list[Any], strides: list[Any]) -> SizeNode:
        return self._format(sizes, strides, (1, 4, 3, 2, 0))

    is_channels_last_strides_2d = is_channels_last_contiguous_2d
    is_channels_last_strides_3d = is_channels_last_contiguous_3d

    def is_non_overlapping_and_dense(self, sizes: list[Any], strides: list[Any]) -> SizeNode:
        order = sorted(range(len(sizes)), key=lambda d: self._lift(strides[d]).hint or 0)
        return self._format(sizes, strides, tuple(order))

    is_non_overlapping_and_dense_indicator = is_non_overlapping_and_dense


def expr_of(value: torch.SymInt | torch.SymFloat | torch.SymBool | Number) -> Expr:
    """The Expr of a symbolic or plain number (ints become index constants)."""
    if isinstance(value, SymTypes):
        return value.node.expr
    if isinstance(value, bool):
        return TRUE if value else FALSE
    return Const(dt.f64, value) if isinstance(value, float) else const(value)


def symint(e: Expr, facts: SizeFacts) -> int | torch.SymInt:
    """The number of an index Expr: a plain int when it is known, else a SymInt over `facts`."""
    if isinstance(e, Const):
        return int(e.value)
    return torch.SymInt(SizeNode(e, number_of(e, facts.hints), facts, "int"))
