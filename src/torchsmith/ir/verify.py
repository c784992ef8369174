"""Hold every invariant that the headers of program.py, kernel.py and plan.py state (no torch).

In: a Program, a Scheduled or a Plan. Out: nothing, or a VerifyError that names the invariant and prints the offending element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, NoReturn

from . import dtype as dt
from .bounds import Ranges
from .expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, walk
from .kernel import Block, Kernel, Let, Loop, Param, Require, Scheduled, Scratch, Stmt, StoreStmt, expressions, statements
from .ops import OPS
from .plan import Alloc, Arena, Call, Free, Given, Input, Launch, Plan, PlanCond, PlanRepeat, ResultPlace, Segment, State, Taken
from .print import print_element
from .program import (
    Bind,
    BufArg,
    Buffer,
    Check,
    Cond,
    Extern,
    Fresh,
    InputResult,
    Program,
    Repeat,
    Result,
    SizeResult,
    Stage,
    Store,
    ViewResult,
    root_of,
)


class VerifyError(Exception):
    """`invariant` is broken by `element`."""

    def __init__(self, invariant: str, detail: str, element: Any = None) -> None:
        self.invariant, self.detail = invariant, detail
        try:
            shown = "" if element is None else "\n" + print_element(element)
        except KeyError:  # not an element of a body: its repr says enough
            shown = f"\n{element!r}"
        super().__init__(f"[{invariant}] {detail}{shown}")


def fail(invariant: str, detail: str, element: Any = None) -> NoReturn:
    raise VerifyError(invariant, detail, element)


# ---------------------------------------------------------------- expressions
class Scope:
    """What an expression may name at one place: axes, vars, symbols, and how buffers look."""

    def __init__(self, arrays: dict[str, tuple[dt.DType, int]], symbols: frozenset[Sym]) -> None:
        self.arrays, self.symbols = arrays, symbols
        self._typed: set[Expr] = set()
        self._free: dict[Expr, frozenset[Expr]] = {}

    def check(self, e: Expr, axes: Iterable[Axis], names: Iterable[Var], at: Any) -> None:
        """Types and bindings of everything in `e`."""
        for node in walk(e) if e not in self._typed else ():
            if node not in self._typed:
                self._type(node, at)
                self._typed.add(node)
        free = free_leaves(e, self._free)
        unbound = free - set(axes) - set(names)
        if unbound:
            fail("bound", f"{', '.join(sorted(map(repr, unbound)))} is not bound here", at)

    def host(self, e: Expr, at: Any) -> None:
        """An expression the host evaluates: symbols and 0-d buffers only."""
        self.check(e, (), (), at)
        for node in walk(e):
            if isinstance(node, Fold) or (isinstance(node, Load) and node.index):
                fail("host", f"the host cannot evaluate {node!r}", at)

    def _type(self, node: Expr, at: Any) -> None:
        complaint = _TYPES[type(node)](self, node)
        if complaint:
            fail("types", f"{complaint} in {node!r}", at)


def free_leaves(e: Expr, found: dict[Expr, frozenset[Expr]]) -> frozenset[Expr]:
    """The axes and vars that `e` uses and no Fold inside it binds; `found`: those of nodes that were looked at, filled."""
    for node in walk(e) if e not in found else ():
        if node in found:
            continue
        if isinstance(node, Axis | Var):
            found[node] = frozenset({node})
        elif isinstance(node, Fold):
            n, k = len(node.axes), len(node.init)
            outside = frozenset[Expr]().union(*(found[a] for a in node.args[: n + k]))
            inside = frozenset[Expr]().union(*(found[a] for a in node.update)) - set(node.axes)
            merge = frozenset[Expr]().union(*(found[a] for a in node.combine))
            states = {node.state(i, side) for i in range(k) for side in "ab"}
            found[node] = outside | (inside - {node.state(i) for i in range(k)}) | (merge - states)
        else:
            found[node] = frozenset[Expr]().union(*(found[a] for a in node.args))
    return found[e]


def _type_op(s: Scope, e: Op) -> str | None:
    row = OPS.get(e.name)
    return f"unknown operator {e.name}" if row is None else row.complaint(tuple(a.dtype for a in e.args), e.dtype)


def _type_load(s: Scope, e: Load) -> str | None:
    known = s.arrays.get(e.buf)
    if known is None:
        return f"unknown buffer {e.buf}"
    dtype, rank = known
    if dtype is not e.dtype:
        return f"{e.buf} holds {dtype}, not {e.dtype}"
    if rank != len(e.index):
        return f"{e.buf} has {rank} dimensions, not {len(e.index)}"
    if any(i.dtype is not dt.index for i in e.index):
        return "an index that is not of dtype index"
    if e.mask is not None and e.other is not None and (e.mask.dtype is not dt.bool_ or e.other.dtype is not e.dtype):
        return "a mask that is not bool, or another value of another dtype,"
    return None


def _type_fold(s: Scope, e: Fold) -> str | None:
    if len(e.update) != len(e.init) or not 0 <= e.pick < len(e.init):
        return "init, update and pick do not match"
    if e.combine and len(e.combine) != len(e.init):
        return "combine does not match the state"
    for start, after in zip(e.init, e.update, strict=True):
        if start.dtype is not after.dtype:
            return f"state goes from {start.dtype} to {after.dtype}"
    for start, after in zip(e.init, e.combine, strict=False):
        if start.dtype is not after.dtype:
            return f"combine turns {start.dtype} into {after.dtype}"
    if e.order == "any" and not e.combine:
        return "order any without combine"
    return "an extent that is not an index" if any(n.dtype is not dt.index for n in e.extents) else None


def _type_sym(s: Scope, e: Sym) -> str | None:
    return None if e in s.symbols else "a symbol that is not defined (yet)"


_TYPES: dict[type, Callable[..., str | None]] = {
    Const: lambda s, e: None,
    Axis: lambda s, e: None,
    Var: lambda s, e: None,
    Sym: _type_sym,
    Op: _type_op,
    Cast: lambda s, e: None,
    Load: _type_load,
    Fold: _type_fold,
}


# ---------------------------------------------------------------- Program
def verify_program(program: Program) -> None:
    """Raise VerifyError if `program` breaks an invariant of program.py."""
    _Body(program).run(program.body)


def verify_scheduled(scheduled: Scheduled) -> None:
    """Raise VerifyError if `scheduled` breaks an invariant of program.py or kernel.py."""
    body = _Body(scheduled.program)
    body.run(scheduled.body)


class _Body:
    """Walks a body in order, knowing what has been written and which symbols are defined."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers = program.buffers
        self.symbols: set[Sym] = set()
        self.written: set[str] = set()
        self.arrays = {name: (b.dtype, len(b.shape)) for name, b in program.buffers.items()}
        self.ranges = Ranges({s.sym: (s.lo, s.hi) for s in program.symbols})
        self._frame()

    def scope(self) -> Scope:
        return Scope(self.arrays, frozenset(self.symbols))

    def _frame(self) -> None:
        p = self.program
        for s in p.symbols:
            if s.sym in self.symbols:
                fail("symbols", f"{s.sym!r} is defined twice")
            if s.hi is not None and s.hi < s.lo:
                fail("symbols", f"{s.sym!r} lies in the empty range {s.lo}..{s.hi}")
            if s.origin[:1] != ("bound",):
                self.symbols.add(s.sym)
        for name, b in p.buffers.items():
            if name != b.name:
                fail("buffers", f"buffer {b.name} is filed under {name}")
            if not name.isidentifier():
                fail("buffers", f"{name!r} is not an identifier")
            if b.storage_of is not None and b.storage_of not in p.buffers:
                fail("buffers", f"{name} lies in the unknown buffer {b.storage_of}")
            if b.layout is not None and not b.layout.splits and len(b.layout.strides) != len(b.shape):
                fail("buffers", f"{name}: {len(b.layout.strides)} strides for {len(b.shape)} dimensions")
            if any(e.dtype is not dt.index for e in b.shape):
                fail("buffers", f"{name}: a size that is not an index")
        for group, role in ((p.inputs, "input"), (p.consts, "const"), (p.steady, "steady buffer")):
            for name in group:
                if name and name not in p.buffers:
                    fail("inputs", f"unknown {role} {name}")
                if name and role == "input" and p.buffers[name].role not in ("input", "state"):
                    fail("inputs", f"{name} is an input of role {p.buffers[name].role}")
        for name, b in p.buffers.items():
            if b.role in ("input", "const", "state"):
                self.written.add(name)

    # -------------------------------------------------------- elements
    def run(self, body: Iterable[Any]) -> None:
        """The whole body, then the tail."""
        self.block(body)
        defined = {s for b in self.buffers.values() for e in b.shape for s in walk(e) if isinstance(s, Sym)}
        if not defined <= self.symbols:
            fail("symbols", f"sizes use undefined symbols {sorted(map(repr, defined - self.symbols))}")
        self._tail()

    def block(self, body: Iterable[Any]) -> None:
        for e in body:
            self._HANDLERS[type(e)](self, e)

    def reads(self, names: Iterable[str], at: Any) -> None:
        for name in names:
            b = self.buffers.get(name)
            if b is None:
                fail("buffers", f"unknown buffer {name}", at)
            if name not in self.written and root_of(self.buffers, name) not in self.written:
                fail("written before read", f"{name} is read before anything writes it", at)

    def writes(self, name: str, at: Any, again: bool = False) -> None:
        b = self.buffers.get(name)
        if b is None:
            fail("buffers", f"unknown buffer {name}", at)
        if b.role in ("input", "const"):
            fail("inputs are read only", f"{name} of role {b.role} is written outside write_backs", at)
        if again and name not in self.written:
            fail("updates", f"{name} is accumulated into before it is initialised", at)
        if not again and name in self.written and b.role != "state":
            fail("single writing", f"{name} is written twice", at)
        self.written.update((name, root_of(self.buffers, name)))

    def loads(self, roots: Iterable[Expr], at: Any, own: frozenset[str] = frozenset()) -> None:
        self.reads((n.buf for e in roots for n in walk(e) if isinstance(n, Load) and n.buf not in own), at)

    def stage(self, s: Stage) -> None:
        scope = self.scope()
        axes = [a for a, _ in s.axes]
        if len(set(axes)) != len(axes):
            fail("bound", "an axis is bound twice", s)
        if s.scan and not axes:
            fail("scan", "a scan stage without axes", s)
        if len(s.carry) != len(s.carry_next) or (s.carry and not s.scan):
            fail("scan", "carry and carry_next do not match, or the stage is no scan", s)
        for _, extent in s.axes:
            scope.check(extent, (), (), s)
        outer = axes[:-1] if s.scan else axes
        names = [v for v, _ in s.carry]
        for var, init in s.carry:
            scope.check(init, outer, (), s)
            if var.dtype is not init.dtype:
                fail("types", f"{var!r} starts as {init.dtype}", s)
        for var, value in s.lets:
            scope.check(value, axes, names, s)
            if var.dtype is not value.dtype:
                fail("types", f"{var!r} is bound to {value.dtype}", s)
            if var in names:
                fail("bound", f"{var!r} is bound twice", s)
            names.append(var)
        for (var, _), after in zip(s.carry, s.carry_next, strict=True):
            scope.check(after, axes, names, s)
            if var.dtype is not after.dtype:
                fail("types", f"{var!r} becomes {after.dtype}", s)
        if not s.stores:
            fail("stores", "a stage without stores", s)
        roots = [*(e for _, e in s.axes), *(e for _, e in s.carry), *s.carry_next, *(e for _, e in s.lets)]
        for store in s.stores:
            roots += [*store.index, store.value, *(() if store.mask is None else (store.mask,))]
            self._store(store, axes, names, scope, s)
        self.loads(roots, s)
        loaded = (n.buf for e in roots for n in walk(e) if isinstance(n, Load))
        one_name((*loaded, *(t.buf for t in s.stores)), {t.buf for t in s.stores}, self.buffers, s)
        for store in s.stores:
            self.writes(store.buf, s, again=store.mode != "set" or (not store.unique and store.buf in self.written))

    def _store(self, store: Store, axes: list[Axis], names: list[Var], scope: Scope, s: Stage) -> None:
        b = self.buffers.get(store.buf)
        if b is None:
            fail("buffers", f"unknown buffer {store.buf}", s)
        if len(store.index) != len(b.shape):
            fail("types", f"{store.buf} has {len(b.shape)} dimensions, not {len(store.index)}", s)
        if store.value.dtype is not b.dtype:
            fail("types", f"{store.value.dtype} is stored into {store.buf} of {b.dtype}", s)
        for e in (*store.index, store.value, *(() if store.mask is None else (store.mask,))):
            scope.check(e, axes, names, s)
        if any(e.dtype is not dt.index for e in store.index) or (store.mask is not None and store.mask.dtype is not dt.bool_):
            fail("types", "an index that is not an index, or a mask that is not bool", s)
        if store.mask is None:  # a constant index that is provably outside
            ranges = self.ranges.inside(s.axes)
            for i, n in zip(store.index, b.shape, strict=True):
                where, limit = ranges.interval(i), ranges.interval(n)
                empty = any(ranges.interval(e).lo == 0 for _, e in s.axes)
                low = where.hi is not None and where.hi < 0
                high = where.lo is not None and limit.hi is not None and where.lo >= limit.hi
                if (low or high) and not empty:
                    fail("in range", f"{store.buf}: index {i!r} is outside 0..{n!r}", s)

    def check(self, c: Check) -> None:
        self.scope().host(c.cond, c)
        if c.cond.dtype is not dt.bool_:
            fail("types", "a condition that is not bool", c)
        self.loads((c.cond,), c)

    def extern(self, x: Extern) -> None:
        names: list[str] = []
        for e in x.leaves:
            if isinstance(e, BufArg):
                names.append(e.buf)
            elif isinstance(e, Expr):
                self.scope().host(e, x)
                self.loads((e,), x)
        self.reads(names, x)
        for name in x.mutates:
            if name not in names and name not in x.outs:
                fail("extern", f"{name} is mutated but is no argument", x)
        for name in x.outs:
            if name:
                self.writes(name, x, again=name in x.mutates)
        for sym, out, _ in x.binds:
            if sym in self.symbols:
                fail("symbols", f"{sym!r} is defined twice", x)
            if not 0 <= out < len(x.outs):
                fail("extern", f"no result number {out}", x)
            self.symbols.add(sym)

    def bind(self, b: Bind) -> None:
        self.scope().host(b.value, b)
        self.loads((b.value,), b)
        if b.sym in self.symbols:
            fail("symbols", f"{b.sym!r} is defined twice", b)
        self.symbols.add(b.sym)

    def cond(self, c: Cond) -> None:
        self.scope().host(c.pred, c)
        self.loads((c.pred,), c)
        before, symbols = set(self.written), set(self.symbols)
        self.block(c.then)
        then = self.written
        self.written, self.symbols = set(before), set(symbols)
        self.block(c.orelse)
        roles = ("output", "state")
        ours = {n for n in then ^ self.written if self.buffers[n].role in roles}
        if ours:
            fail("cond", f"only one side writes {sorted(ours)}", c)
        self.written &= then
        self.symbols = symbols

    def repeat(self, r: Repeat) -> None:
        self.scope().host(r.count, r)
        symbols = set(self.symbols)
        self.symbols.add(r.sym)
        self.block(r.body)
        self.symbols = symbols

    def kernel(self, k: Kernel) -> None:
        verify_kernel(k)
        for p in k.params:
            b = self.buffers.get(p.buf)
            if b is None:
                fail("buffers", f"unknown buffer {p.buf}", k)
            # A template may see rows that lie behind each other as one axis: another shape, but never more memory.
            mine, all_of_it = (_bytes(x, {}, {}) for x in (replace(b, shape=p.shape, layout=p.layout), b))
            if b.dtype is not p.dtype or (b.shape != p.shape and mine is not None and all_of_it is not None and mine > all_of_it):
                fail("params", f"{p.buf} is declared {p.dtype} {p.shape} but is {b.dtype} {b.shape}", k)
        if not set(k.syms) <= self.symbols:
            fail("symbols", f"undefined symbols {set(k.syms) - self.symbols}", k)
        initialised = {s.buf for s in statements(k.body) if isinstance(s, StoreStmt)}
        one_name((p.buf for p in k.params), {p.buf for p in k.params if p.written}, self.buffers, k)
        self.reads((p.buf for p in k.params if not p.written and p.buf not in initialised), k)
        for p in k.params:
            if p.written:
                self.writes(p.buf, k, again=p.buf in self.written)

    _HANDLERS: dict[type, Callable[..., None]] = {
        Stage: stage, Check: check, Extern: extern, Bind: bind, Cond: cond, Repeat: repeat, Kernel: kernel,
    }  # fmt: skip

    # -------------------------------------------------------- results
    def _tail(self) -> None:
        p = self.program
        for r in p.results:
            verify_result(r, p.inputs, self.buffers)
            if isinstance(r, Fresh):
                self.reads((r.buf,), r)
        for target, source in p.write_backs:
            a, b = p.buffers.get(target), p.buffers.get(source)
            if a is None or b is None:
                fail("write_backs", f"unknown buffer in {target} <- {source}")
            if a.role not in ("input", "state"):
                fail("write_backs", f"{target} is no input")
            if a.dtype is not b.dtype or a.shape != b.shape:
                fail("write_backs", f"{target} <- {source} changes dtype or shape")
            self.reads((source,), None)


def one_name(touched: Iterable[str], written: Set[str], buffers: Mapping[str, Buffer], at: Any) -> None:
    """What writes memory touches it under no other name: nothing would say which of the loads see the stores."""
    changed, names = {root_of(buffers, n) for n in written}, dict[str, str]()
    for n in touched:
        root = root_of(buffers, n)
        if root in changed and names.setdefault(root, n) != n:
            fail("one name", f"{names[root]} and {n} are the same memory, which is written", at)


def verify_result(r: Result, inputs: tuple[str, ...], buffers: dict[str, Buffer]) -> None:
    """A result names something that exists."""
    if isinstance(r, Fresh):
        if r.buf not in buffers:
            fail("results", f"unknown buffer {r.buf}")
        if buffers[r.buf].role == "input":
            fail("results", f"{r.buf} is an input: a fresh result needs its own storage")
    elif isinstance(r, InputResult):
        if not 0 <= r.index < len(inputs):
            fail("results", f"there is no input {r.index}")
    elif isinstance(r, ViewResult):
        if isinstance(r.of, int) and not 0 <= r.of < len(inputs):
            fail("results", f"there is no input {r.of}")
        if isinstance(r.of, str) and r.of not in buffers:
            fail("results", f"unknown buffer {r.of}")
        if len(r.shape) != len(r.strides):
            fail("results", f"a view with {len(r.shape)} sizes and {len(r.strides)} strides")
    elif not isinstance(r, SizeResult):
        fail("results", f"{r!r} is no result")


# ---------------------------------------------------------------- Kernel
def verify_kernel(k: Kernel) -> None:
    """Raise VerifyError if `k` breaks an invariant of kernel.py."""
    arrays: dict[str, Param | Scratch] = {}
    listed: tuple[tuple[str, Param | Scratch], ...] = (*((p.buf, p) for p in k.params), *((s.name, s) for s in k.scratch))
    for name, array in listed:
        if name in arrays:
            fail("params", f"{name} is listed twice", k)
        arrays[name] = array
    ranks = {n: (p.dtype, len(p.shape) if isinstance(p, Param) else 1) for n, p in arrays.items()}
    scope = Scope(ranks, frozenset(k.syms))
    axes = tuple(a for a, _ in k.grid)
    for _, extent in k.grid:
        scope.check(extent, (), (), k)
    _statements(k.body, axes, (), scope, k, vector=False)
    stored = {s.buf for s in statements(k.body) if isinstance(s, StoreStmt)}
    for p in k.params:
        if p.written != (p.buf in stored):
            fail("params", f"{p.buf} is {'not ' if p.written else ''}written but declared otherwise", k)


def _statements(body: Iterable[Any], axes: tuple[Axis, ...], names: tuple[Var, ...], scope: Scope, k: Kernel, vector: bool) -> None:
    for s in body:
        if isinstance(s, Let):
            scope.check(s.value, axes, names, s)
            if s.var.dtype is not s.value.dtype:
                fail("types", f"{s.var!r} is bound to {s.value.dtype}", s)
            names = (*names, s.var)
        elif isinstance(s, StoreStmt):
            known = scope.arrays.get(s.buf)
            if known is None:
                fail("params", f"{s.buf} is stored to but not listed", s)
            if known[0] is not s.value.dtype or known[1] != len(s.index):
                fail("types", f"{s.buf} holds {known[0]} in {known[1]} dimensions", s)
            for e in (*s.index, s.value, *(() if s.mask is None else (s.mask,))):
                scope.check(e, axes, names, s)
        elif isinstance(s, Require):
            scope.check(s.cond, axes, names, s)
            if s.cond.dtype is not dt.bool_:
                fail("types", f"a condition of type {s.cond.dtype}", s)
        elif isinstance(s, Block):
            _statements((s.meaning(),), axes, names, scope, k, vector)
        elif isinstance(s, Loop):
            if s.axis in axes:
                fail("bound", f"{s.axis!r} is bound twice on one path", s)
            if vector and s.kind == "vector":
                fail("vector", "a vector loop inside a vector loop", s)
            if s.carry and s.kind != "scan":
                fail("scan", f"a {s.kind} loop carries state", s)
            scope.check(s.extent, axes, names, s)
            carried = tuple(v for v, _, _ in s.carry)
            for var, init, _ in s.carry:
                scope.check(init, axes, names, s)
                if var.dtype is not init.dtype:
                    fail("types", f"{var!r} starts as {init.dtype}", s)
            inner = (*names, *carried)
            _statements(s.body, (*axes, s.axis), inner, scope, k, vector or s.kind == "vector")
            bound = (*inner, *(b.var for b in s.body if isinstance(b, Let)))
            for var, _, after in s.carry:
                scope.check(after, (*axes, s.axis), bound, s)
                if var.dtype is not after.dtype:
                    fail("types", f"{var!r} becomes {after.dtype}", s)
        else:
            fail("statements", f"{s!r} is no statement", k)


# ---------------------------------------------------------------- Plan
def verify_plan(plan: Plan) -> None:
    """Raise VerifyError if `plan` breaks an invariant of plan.py."""
    symbols = {s.sym for s in plan.symbols if s.origin[:1] != ("bound",)}
    for name in plan.buffers:
        if name not in plan.places:
            fail("places", f"{name} has no place")
    for name, place in plan.places.items():
        if name not in plan.buffers:
            fail("places", f"{name} has a place but is no buffer")
        if isinstance(place, Input) and not 0 <= place.index < len(plan.inputs):
            fail("places", f"{name}: there is no input {place.index}")
        if isinstance(place, ResultPlace) and not 0 <= place.index < len(plan.results):
            fail("places", f"{name}: there is no result {place.index}")
    for r in plan.results:
        verify_result(r, plan.inputs, plan.buffers)
    for k in plan.kernels:
        verify_kernel(k)
    walker = _Steps(plan, symbols)
    walker.preparing = True
    walker.block(plan.prepare)
    walker.preparing = False
    walker.block(plan.run)
    _no_overlap(plan)


def depends_on_itself(kernel: Kernel, buf: str) -> bool:
    """Would running the kernel twice give something else? A call that fails is repeated, so such writes to inputs come after what fails."""

    def adds(body: tuple[Stmt, ...]) -> bool:
        return any(adds(s.body) if isinstance(s, Loop) else isinstance(s, StoreStmt) and s.buf == buf and s.mode != "set" for s in body)

    reads = any(isinstance(n, Load) and n.buf == buf for s in kernel.body for e in expressions(s) for n in walk(e))
    return reads or adds(kernel.body)


class _Steps:
    """Walks the steps of a Plan in order."""

    def __init__(self, plan: Plan, symbols: set[Sym]) -> None:
        self.plan, self.symbols = plan, symbols
        self.alive: set[str] = set()
        self.wrote_input: Launch | None = None
        self.preparing = False

    def block(self, steps: Iterable[Any]) -> None:
        for s in steps:
            self._HANDLERS[type(s)](self, s)

    def _known(self, name: str, at: Any) -> None:
        if name not in self.plan.buffers:
            fail("buffers", f"unknown buffer {name}", at)

    def alloc(self, s: Alloc) -> None:
        self._known(s.buf, s)
        place = self.plan.places[s.buf]
        if not isinstance(place, ResultPlace | Taken):
            fail("places", f"{s.buf} is allocated but is no result", s)
        if isinstance(place, Taken):
            self._host(place.size, s)
            self.alive.add(s.buf)

    def launch(self, s: Launch) -> None:
        if not 0 <= s.kernel < len(self.plan.kernels):
            fail("launch", f"there is no kernel {s.kernel}", s)
        kernel = self.plan.kernels[s.kernel]
        if len(s.bufs) != len(kernel.params) or len(s.syms) != len(kernel.syms):
            fail("launch", f"{kernel.name} takes {len(kernel.params)} buffers and {len(kernel.syms)} symbols", s)
        for name, p in zip(s.bufs, kernel.params, strict=True):
            self._known(name, s)
            if self.plan.buffers[name].dtype is not p.dtype:
                fail("types", f"{name} holds {self.plan.buffers[name].dtype}, {kernel.name} wants {p.dtype}", s)
            self._given(name, s)
            place = self.plan.places[name]
            if p.written and isinstance(place, Input) and depends_on_itself(kernel, p.buf):
                self.wrote_input = s
            if p.written and isinstance(place, State) != self.preparing:
                fail("prepare", f"{name} is {'no state' if self.preparing else 'state'} and may not be written here", s)
        if self.plan.target.language != "c":  # there a result may be written over an operand (schedule/memory/in_place.py)
            one_name(s.bufs, {b for b, p in zip(s.bufs, kernel.params, strict=True) if p.written}, self.plan.buffers, s)
        for e in (*s.syms, s.grid, s.grain):
            self._host(e, s)

    def segment(self, s: Segment) -> None:
        self.block(s.steps)

    def _given(self, name: str, at: Any) -> None:
        if isinstance(self.plan.places[name], Given | Taken) and self.plan.buffers[name].storage_of is None and name not in self.alive:
            fail("given", f"{name} is used before its Call or after its Free", at)

    def _host(self, e: Expr, at: Any) -> None:
        for node in walk(e):
            if isinstance(node, Sym) and node not in self.symbols:
                fail("symbols", f"{node!r} is not defined yet", at)
            if isinstance(node, Axis | Var | Fold):
                fail("host", f"the host cannot evaluate {node!r}", at)

    def call(self, s: Call) -> None:
        for a in s.extern.leaves:
            if isinstance(a, BufArg):
                self._known(a.buf, s)
                self._given(a.buf, s)
            elif isinstance(a, Expr):
                self._host(a, s)
        for name in s.extern.outs:
            if name:
                self._known(name, s)
                self.alive.add(name)
        self.symbols |= {sym for sym, _, _ in s.extern.binds}

    def free(self, s: Free) -> None:
        self._known(s.buf, s)
        if s.buf not in self.alive:
            fail("given", f"{s.buf} is freed before its Call or twice", s)
        self.alive.discard(s.buf)

    def bind(self, s: Bind) -> None:
        self._host(s.value, s)
        self.symbols.add(s.sym)

    def check(self, s: Check) -> None:
        self._host(s.cond, s)
        if self.wrote_input is not None:
            fail("write_backs after checks", "an input is written before this Check", s)

    def cond(self, s: PlanCond) -> None:
        self._host(s.pred, s)
        alive = set(self.alive)
        self.block(s.then)
        self.alive = alive
        self.block(s.orelse)

    def repeat(self, s: PlanRepeat) -> None:
        self._host(s.count, s)
        self.symbols.add(s.sym)
        self.block(s.body)

    _HANDLERS: dict[type, Callable[..., None]] = {
        Alloc: alloc, Launch: launch, Segment: segment, Call: call, Free: free, Bind: bind, Check: check, PlanCond: cond,
        PlanRepeat: repeat,
    }  # fmt: skip


def _no_overlap(plan: Plan) -> None:
    """Arena places that are live at the same step must not overlap: tried with every symbol at its least, and with different sizes."""
    live: dict[str, tuple[int, int]] = {}
    steps = [s for group in plan.run for s in (group.steps if isinstance(group, Segment) else (group,))]
    for at, step in enumerate(steps):
        for name in _names(step, plan):
            root = root_of(plan.buffers, name)
            first, _ = live.get(root, (at, at))
            live[root] = (first, at)
    places = [(n, p, plan.buffers[n]) for n in live if isinstance(p := plan.places[n], Arena)]
    tables: list[dict[Expr, Expr]] = [{s.sym: const(s.lo) for s in plan.symbols}]
    if not isinstance(plan.workspace, Const):
        for apart in (3, 50, 700):
            tables.append({s.sym: const(max(s.lo, min(s.hi or 1 << 20, 2 + apart * (i + 1)))) for i, s in enumerate(plan.symbols)})
    for table in tables:
        spans = []
        memo: dict[Expr, Expr] = {}
        total = _number(plan.workspace, table, memo)
        for name, place, b in places:
            start, size = _number(place.offset, table, memo), _bytes(b, table, memo)
            if start is None or size is None:
                continue
            spans.append((start, start + size, *live[name], name))
            if total is not None and start + size > total:
                fail("workspace", f"{name} ends at {start + size}, behind the workspace of {plan.workspace!r} bytes")
        spans.sort()
        for i, (_, end, first, last, name) in enumerate(spans):
            for other in spans[i + 1 :]:
                if other[0] >= end:
                    break
                if other[2] <= last and first <= other[3]:
                    fail("arena overlap", f"{name} and {other[4]} are live together and overlap")


def _number(e: Expr, table: dict[Expr, Expr], memo: dict[Expr, Expr]) -> int | None:
    """The value of `e` with sizes put in; None if something else is left. `memo`: of one table."""
    for node in walk(e):
        if node not in memo:
            known = table.get(node)
            memo[node] = known if known is not None else node.rebuild(tuple(memo[a] for a in node.args)) if node.args else node
    found = memo[e]
    return int(found.value) if isinstance(found, Const) else None


def _names(step: Any, plan: Plan) -> Iterator[str]:
    if isinstance(step, Launch):
        yield from step.bufs
    elif isinstance(step, Call):
        yield from step.extern.buffers
        yield from (n for n in step.extern.outs if n)
    elif isinstance(step, PlanCond | PlanRepeat):
        for s in step.inner:
            yield from _names(s, plan)
    elif isinstance(step, Check | Bind):
        e = step.cond if isinstance(step, Check) else step.value
        yield from (n.buf for n in walk(e) if isinstance(n, Load) and n.buf in plan.buffers)


def _bytes(b: Buffer, table: dict[Expr, Expr], memo: dict[Expr, Expr]) -> int | None:
    """Bytes from the buffer's base to its last element's end; None if not known."""
    size = [_number(e, table, memo) for e in b.shape]
    if 0 in size:
        return 0
    if b.layout is None or b.layout.splits or b.layout.pad:
        total = b.dtype.itemsize
        for n in size:
            if n is None:
                return None
            total *= n
        return total
    total = _number(b.layout.offset, table, memo) or 0
    for n, stride in zip(size, (_number(e, table, memo) for e in b.layout.strides), strict=True):
        if n is None or stride is None:
            return None
        total += (n - 1) * stride
    return (total + 1) * b.dtype.itemsize
