"""Memory plan: where every buffer lives and when (no torch).

In: Scheduled (kernels, checks, extern calls in order). Out: Plan (places, arena size, steps with allocations and releases).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...codes import Unsupported
from ...ir.bounds import Ranges
from ...ir.expr import Const, Expr, Load, const, op, substitute, walk
from ...ir.kernel import Kernel, Scheduled
from ...ir.plan import (
    Alloc,
    Arena,
    Call,
    Free,
    Given,
    Input,
    Launch,
    Place,
    Plan,
    PlanCond,
    PlanRepeat,
    ResultPlace,
    State,
    Step,
    Taken,
)
from ...ir.program import Bind, Buffer, Check, Cond, Extern, Fresh, Program, Repeat, SizeResult, root_of
from ...options import Options
from ..deps import pinned
from .arena import ALIGN, pack, pack_static
from .in_place import write_in_place
from .write_back import end_with_write_backs

Node = Kernel | Check | Extern | Bind | Cond | Repeat


def plan(scheduled: Scheduled, options: Options) -> Plan:
    """Place every buffer, then write the steps."""
    program, body = end_with_write_backs(scheduled)
    body = _plan_shared_results(program, body)
    roots = {name: root_of(program.buffers, name) for name in program.buffers}
    first, body = _split_prepare(program, body, roots)
    program = replace(program, buffers=_in_place(program, first, body, roots))
    roots = {name: root_of(program.buffers, name) for name in program.buffers}
    bound, derived = _symbols(body)
    uses = _Uses(program)
    uses.block(body, 0)
    places = _fixed_places(program, body)
    state, total_state = _place_state(program, first, body, roots)
    places |= state
    lives = uses.lives(roots)
    sizes = {n: substitute(nbytes(b), derived) for n, b in program.buffers.items() if roots[n] == n and n not in places}
    dynamic = {n for n, e in sizes.items() if n in lives and any(x in bound for x in walk(e))}
    places |= {n: Taken(nbytes(program.buffers[n])) for n in dynamic}
    arena = {n: e for n, e in sizes.items() if n in lives and n not in dynamic}
    offsets, total = pack(arena, lives, Ranges({x.sym: (x.lo, x.hi) for x in program.symbols}))
    places |= {n: Arena(o) for n, o in offsets.items()}
    for name, root in roots.items():
        if root in places:
            places.setdefault(name, places[root])
    kept = {r.buf for r in program.results if isinstance(r, Fresh)}
    kept |= {roots[b] for r in program.results if isinstance(r, SizeResult) for b in _loads(r.value)}
    writer = _Writer(places, roots, frozenset(kept), set(bound))
    prepare = writer.block(first, top=True)
    run = writer.block(body, top=True)
    inputs = {roots[b] for n in first for b, _ in touched(n)}
    consts = tuple(i for i, name in enumerate(program.inputs) if name in inputs)
    missing = [r.buf for r in program.results if isinstance(r, Fresh) and r.buf not in writer.allocated]
    allocs = tuple(Alloc(b) for b in dict.fromkeys(missing) if isinstance(places[b], ResultPlace))
    buffers = {n: b for n, b in program.buffers.items() if n in places}
    kernels = tuple(k if k.target is program.target else replace(k, target=program.target) for k in writer.kernels)
    return Plan(
        program.name, program.symbols, program.inputs, buffers, places, kernels, total, prepare, (*run, *allocs),
        program.results, total_state, consts, program.target, program.device,
        program.steady,
    )  # fmt: skip


def _in_place(program: Program, first: tuple[Kernel, ...], body: tuple[Node, ...], roots: dict[str, str]) -> dict[str, Buffer]:
    """The buffers, those that are written over a dying one marked. Kernels of blocks load nothing that others store meanwhile."""
    if program.target.language != "c":
        return program.buffers
    others = (*first, *(n for n in body if not isinstance(n, Kernel)))
    free = program.buffers.keys() - pinned(program) - {b for n in others for b, _ in touched(n)}
    return write_in_place(program.buffers, [(n if isinstance(n, Kernel) else None, {roots[b] for b, _ in touched(n)}) for n in body], free)


# ---------------------------------------------------------------- buffers


def nbytes(buffer: Buffer) -> Expr:
    """Bytes from the buffer's base to the end of its last element, padding included, rounded up to the alignment."""
    layout = buffer.layout
    elements: Expr = const(1)
    if layout is None:
        for extent in buffer.shape:
            elements = elements * extent
    else:
        pads = layout.pad or ((0, 0),) * len(buffer.shape)
        extents: list[Expr] = [e + (lo + hi) for e, (lo, hi) in zip(buffer.shape, pads, strict=True)]
        inner: list[Expr] = []
        for axis, factor in layout.splits:
            extents[axis] = (extents[axis] + (factor - 1)) // factor
            inner.append(const(factor))
        elements = elements + layout.offset
        for extent, stride in zip((*extents, *inner), layout.strides, strict=True):
            elements = elements + (extent - 1) * stride
        if not isinstance(elements, Const) and any(not isinstance(e, Const) for e in buffer.shape):
            elements = op("max", const(0), elements)  # an empty dimension makes the formula negative
    total = _align(elements * buffer.dtype.itemsize)
    return const(max(0, int(total.value))) if isinstance(total, Const) else total


def _align(e: Expr) -> Expr:
    if isinstance(e, Const):
        return const(-(-int(e.value) // ALIGN) * ALIGN)
    return (e + (ALIGN - 1)) // ALIGN * ALIGN


def _loads(e: Expr) -> Iterator[str]:
    for node in walk(e):
        if isinstance(node, Load):
            yield node.buf


def touched(node: Node) -> Iterator[tuple[str, bool]]:
    """(buffer, written) of one element, nested ones included."""
    if isinstance(node, Kernel):
        for p in node.params:
            yield p.buf, p.written
    elif isinstance(node, Extern):
        yield from ((b, b in node.mutates) for b in node.buffers)
        yield from ((b, False) for e in node.numbers for b in _loads(e))
        yield from ((b, True) for b in node.outs if b)
    elif isinstance(node, Check):
        yield from ((b, False) for b in _loads(node.cond))
    elif isinstance(node, Bind):
        yield from ((b, False) for b in _loads(node.value))
    else:
        yield from ((b, False) for b in _loads(node.pred if isinstance(node, Cond) else node.count))
        for inner in node.inner:
            yield from touched(inner)  # type: ignore[arg-type]


def _children(node: Node) -> tuple[tuple[Node, ...], ...]:
    if isinstance(node, Cond):
        return (node.then, node.orelse)  # type: ignore[return-value]
    if isinstance(node, Repeat):
        return (node.body,)  # type: ignore[return-value]
    return ()


def _all_nodes(body: tuple[Node, ...]) -> Iterator[Node]:
    for node in body:
        yield node
        for block in _children(node):
            yield from _all_nodes(block)


def _symbols(body: tuple[Node, ...]) -> tuple[set[Expr], dict[Expr, Expr]]:
    """Symbols whose value exists only in the middle of a run, and the others that Binds derive from input symbols."""
    bound: set[Expr] = set()
    derived: dict[Expr, Expr] = {}
    for node in _all_nodes(body):
        if isinstance(node, Extern):
            bound.update(sym for sym, _, _ in node.binds)
        elif isinstance(node, Repeat):
            bound.add(node.sym)
        elif isinstance(node, Bind):
            value = substitute(node.value, derived)
            if any(isinstance(e, Load) or e in bound for e in walk(value)):
                bound.add(node.sym)
            else:
                derived[node.sym] = value
    return bound, derived


# ---------------------------------------------------------------- liveness


@dataclass(slots=True)
class _Uses:
    """First and last moment of every buffer on one clock that runs through nested blocks."""

    program: Program
    clock: int = 0
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def block(self, body: tuple[Node, ...], depth: int) -> None:
        for node in body:
            start = self.clock
            inner = _children(node)
            outside = set(self.first)
            for blk in inner:
                self.clock += 1
                self.block(blk, depth + 1)
            self.clock += 1
            if isinstance(node, Repeat):  # what comes from outside, or is carried, lives through every iteration
                for buf, _ in touched(node):
                    if buf in outside or self.program.buffers[buf].role == "state":
                        self.note(buf, start)
                        self.note(buf, self.clock)
            for buf, _ in touched(replace_children(node)):
                self.note(buf, self.clock)
        if depth == 0:
            for r in self.program.results:
                if isinstance(r, SizeResult):
                    for buf in _loads(r.value):
                        self.note(buf, self.clock + 1)

    def note(self, buf: str, at: int) -> None:
        self.first[buf] = min(self.first.get(buf, at), at)
        self.last[buf] = max(self.last.get(buf, at), at)

    def lives(self, roots: dict[str, str]) -> dict[str, tuple[int, int]]:
        """Root buffer -> (first, last)."""
        out: dict[str, tuple[int, int]] = {}
        for name, first in self.first.items():
            a, b = out.get(roots[name], (first, first))
            out[roots[name]] = (min(a, first), max(b, self.last[name]))
        return out


def replace_children(node: Node) -> Node:
    """The node without its nested blocks."""
    if isinstance(node, Cond):
        return replace(node, then=(), orelse=())
    if isinstance(node, Repeat):
        return replace(node, body=())
    return node


# ---------------------------------------------------------------- prepare


def _split_prepare(
    program: Program, body: tuple[Node, ...], roots: dict[str, str]
) -> tuple[tuple[Kernel, ...], tuple[Node, ...]]:
    """Kernels that read constants only, or what such kernels wrote, run once: body -> (those, the rest).

    A buffer that anything else writes, that is a result, or whose size is symbolic stays in the run.
    """
    if not program.consts:
        return (), body
    written = {roots[b] for n in _all_nodes(body) for b, w in touched(n) if w}
    const_bufs = {b for b in program.consts if b not in written}
    fixed = {roots[r.buf] for r in program.results if isinstance(r, Fresh)} | {b for b in program.inputs if b}
    candidates = [n for n in body if isinstance(n, Kernel) and not n.syms]
    while True:  # a writer that falls out takes its readers and fellow writers along
        chosen: list[Kernel] = []
        known = set(const_bufs)
        for k in candidates:
            reads = {roots[p.buf] for p in k.params if not p.written}
            writes = {roots[p.buf] for p in k.params if p.written}
            static = all(isinstance(nbytes(program.buffers[b]), Const) for b in writes)
            if reads <= known and static and not writes & fixed:
                chosen.append(k)
                known |= writes
        taken = {id(k) for k in chosen}
        others = {roots[b] for n in body if id(n) not in taken for b, w in touched(n) if w}
        spoiled = [k for k in chosen if any(p.written and roots[p.buf] in others for p in k.params)]
        if not spoiled:
            break
        candidates = [k for k in chosen if all(k is not s for s in spoiled)]
    read_later = {roots[b] for n in body if id(n) not in taken for b, _ in touched(n)}
    is_read = any(roots[p.buf] in read_later for k in chosen for p in k.params if p.written)
    if not is_read or not any(roots[p.buf] in const_bufs for k in chosen for p in k.params):
        return (), body  # nothing is gained, or there is no constant input whose arrival would start `prepare`
    return tuple(chosen), tuple(n for n in body if id(n) not in taken)


def _place_state(
    program: Program, first: tuple[Kernel, ...], body: tuple[Node, ...], roots: dict[str, str]
) -> tuple[dict[str, Place], int]:
    """Offsets in the state block: what the run reads lives for ever, steps between only while prepare runs."""
    later = {roots[b] for n in body for b, _ in touched(n)}
    lives: dict[str, tuple[int, int]] = {}
    for at, k in enumerate(first):
        for p in k.params:
            root = roots[p.buf]
            if root in program.inputs:
                continue
            start, _ = lives.get(root, (at, at))
            lives[root] = (start, len(first) if root in later else at)
    sizes: dict[str, int] = {}
    for name in lives:
        size = nbytes(program.buffers[name])
        assert isinstance(size, Const)
        sizes[name] = int(size.value)
    offsets, height = pack_static(sizes, lives)
    return {n: State(const(o)) for n, o in offsets.items()}, height


# ---------------------------------------------------------------- places


def _fixed_places(program: Program, body: tuple[Node, ...]) -> dict[str, Place]:
    """Inputs, results and what externs return."""
    places: dict[str, Place] = {name: Input(i) for i, name in enumerate(program.inputs) if name}
    for node in _all_nodes(body):
        if isinstance(node, Extern) and node.returned == "as_given":
            places |= {buf: Given() for buf in node.outs if buf}
    for i, result in enumerate(program.results):
        if isinstance(result, Fresh) and result.buf not in places:
            places[result.buf] = ResultPlace(i)
    return places


def _plan_shared_results(program: Program, body: tuple[Node, ...]) -> tuple[Node, ...]:
    """An as_given out that lives across blocks, or has several writers, becomes planned: one owner must know when to free it. So does on a
    device a result that is expected at the same address in the next call: only then can the call be recorded."""
    writers: dict[str, int] = {}
    for node in _all_nodes(body):
        if not _children(node):
            for buf, written in touched(node):
                writers[buf] = writers.get(buf, 0) + written
    top = {b for r in program.results if isinstance(r, Fresh) for b in (r.buf,)}
    steady = top.intersection(program.steady) if program.target.device != "cpu" else set()

    def fix(block: tuple[Node, ...], depth: int) -> tuple[Node, ...]:
        local = [b for n in block for b, _ in touched(n)]
        out: list[Node] = []
        for node in block:
            if isinstance(node, Extern) and node.returned == "as_given":
                escapes = any(b in steady or writers[b] > 1 or (depth and (b in top or total[b] != local.count(b))) for b in node.outs if b)
                node = replace(node, returned="planned") if escapes else node
            elif isinstance(node, Cond):
                node = replace(node, then=fix(node.then, depth + 1), orelse=fix(node.orelse, depth + 1))  # type: ignore[arg-type]
            elif isinstance(node, Repeat):
                node = replace(node, body=fix(node.body, depth + 1))  # type: ignore[arg-type]
            out.append(node)
        return tuple(out)

    total: dict[str, int] = {}
    for node in body:
        for buf, _ in touched(node):
            total[buf] = total.get(buf, 0) + 1
    return fix(body, 0)


# ---------------------------------------------------------------- steps


@dataclass(slots=True)
class _Writer:
    """Turns the body into steps."""

    places: dict[str, Place]
    roots: dict[str, str]
    kept: frozenset[str]  # read after the last step: results, and what numbers among the results are read from
    unknown: set[Expr]  # symbols that are not bound yet
    kernels: list[Kernel] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    allocated: set[str] = field(default_factory=set)

    def block(self, body: tuple[Node, ...], top: bool) -> tuple[Step, ...]:
        steps: list[Step] = []
        last = {self.roots[b]: i for i, n in enumerate(body) for b, _ in touched(n)}
        for i, node in enumerate(body):
            names = list(dict.fromkeys(self.roots[b] for b, _ in touched(node)))
            if top:  # results and taken workspaces are asked for at the top, so that every path has them
                for b in names:
                    place = self.places[b]
                    if b not in self.allocated and isinstance(place, ResultPlace | Taken):
                        if isinstance(place, Taken) and any(e in self.unknown for e in walk(place.size)):
                            raise Unsupported("SCH101", at=node.loc if isinstance(node, Extern) else "", detail=b)
                        self.allocated.add(b)
                        steps.append(Alloc(b))
            steps.append(self.step(node))
            if isinstance(node, Extern):
                self.unknown -= {sym for sym, _, _ in node.binds}
            elif isinstance(node, Bind):
                self.unknown.discard(node.sym)
            for b in names:
                place = self.places[b]
                ends = last[b] == i and (top if isinstance(place, Taken) else isinstance(place, Given))
                if ends and b not in self.kept and (top or self.owns(body, b)):
                    steps.append(Free(b))
        return tuple(steps)

    @staticmethod
    def owns(body: tuple[Node, ...], buf: str) -> bool:
        return any(isinstance(n, Extern) and buf in n.outs for n in body)

    def step(self, node: Node) -> Step:
        if isinstance(node, Kernel):
            number = self.numbers.get(id(node))
            if number is None:
                number = self.numbers[id(node)] = len(self.kernels)
                self.kernels.append(node)
            if node.target.language == "triton":
                return Launch(number, tuple(p.buf for p in node.params), tuple(node.syms), node.programs, const(1))
            grid: Expr = const(1)
            for _, extent in node.grid:
                grid = grid * extent
            return Launch(number, tuple(p.buf for p in node.params), tuple(node.syms), grid, node.grain)
        if isinstance(node, Extern):
            return Call(node)
        if isinstance(node, Cond):
            return PlanCond(node.pred, self.block(node.then, False), self.block(node.orelse, False))  # type: ignore[arg-type]
        if isinstance(node, Repeat):
            return PlanRepeat(node.sym, node.count, self.block(node.body, False))  # type: ignore[arg-type]
        return node
