"""Text of a Program, a Scheduled and a Plan, one line per element, each with the user's file:line (no torch).

The listing of a Program reads back through ir/parse.py; those of a Scheduled and a Plan are for people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .blocks import Banded, Contract, Interleave, Paired, Product, Transpose
from .dtype import DType
from .expr import Axis, Expr, const
from .kernel import Kernel, Let, Loop, Require, Scheduled, StoreStmt
from .linear import const_of
from .plan import Alloc, Arena, Call, Free, Given, Input, Launch, Plan, PlanCond, PlanRepeat, ResultPlace, Segment, State, Taken
from .program import (
    Bind,
    BufArg,
    Buffer,
    Check,
    Cond,
    Enum,
    Extern,
    Fresh,
    InputResult,
    Layout,
    Program,
    Repeat,
    SizeResult,
    Stage,
    Store,
    Symbol,
    ViewResult,
)
from .target import CPU
from .text import print_expr

__all__ = ["print_element", "print_expr", "print_kernel", "print_plan", "print_program", "print_scheduled"]

Lines = Iterator[str]


def print_program(program: Program) -> str:
    """The whole Program; parse.parse_program gives it back."""
    return "\n".join((*_head(program), "body:", *_block(program.body), *_tail(program))) + "\n"


def print_scheduled(scheduled: Scheduled) -> str:
    """The Program's frame with kernels in place of stages."""
    return "\n".join((*_head(scheduled.program), "body:", *_block(scheduled.body), *_tail(scheduled.program))) + "\n"


def print_plan(plan: Plan) -> str:
    """Places, then the two entries step by step, then the kernels."""
    lines = [f"plan {plan.name}", f"workspace: {print_expr(plan.workspace)}", *_symbols(plan.symbols)]
    lines.append(f"inputs: {_names(plan.inputs)}")
    if plan.consts:
        lines.append(f"state: {plan.state} bytes from inputs {', '.join(map(str, plan.consts))}")
    lines.append("buffers:")
    for name, b in plan.buffers.items():
        place = plan.places.get(name)
        where = "no place" if place is None else _PLACES[type(place)](place)
        lines.append(f"  {_buffer(b)} @ {where}{_loc(b.loc)}")
    for title, steps in (("prepare", plan.prepare), ("run", plan.run)):
        lines += [f"{title}:", *_block(steps)]
    lines += ["results:", *(f"  {_result(r)}" for r in plan.results)]
    for i, kernel in enumerate(plan.kernels):
        lines += [f"kernel {i}:", *_indented(_kernel(kernel))]
    return "\n".join(lines) + "\n"


def print_kernel(kernel: Kernel) -> str:
    """One kernel."""
    return "\n".join(_kernel(kernel)) + "\n"


def print_element(e: Any) -> str:
    """One element of a body, a step or a statement."""
    return "\n".join(_ELEMENTS[type(e)](e))


# ---------------------------------------------------------------- frame
def _head(p: Program) -> Lines:
    yield f"program {p.name}"
    yield from _symbols(p.symbols)
    yield f"inputs: {_names(p.inputs)}"
    yield f"consts: {_names(p.consts)}"
    if p.steady:
        yield f"steady: {_names(p.steady)}"
    yield "buffers:"
    for b in p.buffers.values():
        yield f"  {_buffer(b)}{_loc(b.loc)}"


def _tail(p: Program) -> Lines:
    yield "results:"
    for r in p.results:
        yield f"  {_result(r)}"
    yield "write_backs:"
    for target, source in p.write_backs:
        yield f"  {target} <- {source}"
    yield f"notes: {json.dumps(list(p.notes))}"
    if p.target is not CPU:
        yield f"target: {json.dumps([p.target.name, p.device])}"


def _symbols(symbols: Iterable[Symbol]) -> Lines:
    yield "symbols:"
    for s in symbols:
        yield f"  {print_expr(s.sym)} = {json.dumps(list(s.origin))} in {s.lo}..{'' if s.hi is None else s.hi}"


def _names(names: Iterable[str]) -> str:
    return json.dumps(list(names))


def _loc(loc: str) -> str:
    return f"  # {loc}" if loc else ""


def _exprs(es: Iterable[Expr]) -> str:
    return "[" + ", ".join(map(print_expr, es)) + "]"


def _axes(axes: Iterable[tuple[Axis, Expr]]) -> str:
    return ", ".join(f"{a.name} < {print_expr(n)}" for a, n in axes)


def _buffer(b: Buffer) -> str:
    more = f" layout {_layout(b.layout)}" if b.layout is not None else ""
    more += f" on {b.device}" if b.device != "cpu" else ""
    return f"{b.name}: {b.dtype}{_exprs(b.shape)} {b.role}{f' storage_of {b.storage_of}' if b.storage_of else ''}{more}"


def _layout(layout: Layout) -> str:
    more = f" splits {json.dumps(layout.splits)}" if layout.splits else ""
    more += f" pad {json.dumps(layout.pad)}" if layout.pad else ""
    more += f" fill {layout.fill!r}" if layout.fill is not None else ""
    return f"{_exprs(layout.strides)} offset {print_expr(layout.offset)}{more}"


_RESULTS: dict[type, Callable[[Any], str]] = {
    Fresh: lambda r: f"fresh {r.buf}",
    InputResult: lambda r: f"input {r.index}",
    ViewResult: lambda r: f"{'part' if r.apart else 'view'} {json.dumps(r.of)} {r.dtype} {_exprs(r.shape)} {_exprs(r.strides)} "
    f"offset {print_expr(r.offset)}",
    SizeResult: lambda r: f"size {print_expr(r.value)}",
}


def _result(r: Any) -> str:
    return _RESULTS[type(r)](r)


_PLACES: dict[type, Callable[[Any], str]] = {
    Input: lambda p: f"input {p.index}",
    Arena: lambda p: f"arena {print_expr(p.offset)}",
    ResultPlace: lambda p: f"result {p.index}",
    Given: lambda p: "given",
    Taken: lambda p: f"taken {print_expr(p.size)}",
    State: lambda p: f"state {print_expr(p.offset)}",
}


# ---------------------------------------------------------------- bodies
def _indented(lines: Iterable[str]) -> Lines:
    for line in lines:
        yield "  " + line


def _block(elements: Iterable[Any]) -> Lines:
    for e in elements:
        yield from _indented(_ELEMENTS[type(e)](e))


def _store(s: Store) -> str:
    unique = "" if s.unique else " repeated"
    mask = f" if {print_expr(s.mask)}" if s.mask is not None else ""
    return f"store {s.mode}{unique} {s.buf}{_exprs(s.index)} = {print_expr(s.value)}{mask}"


def _stage(s: Stage) -> Lines:
    yield f"stage {json.dumps(s.origin)} [{_axes(s.axes)}]{' scan' if s.scan else ''}{_loc(s.loc)}"
    for (var, init), after in zip(s.carry, s.carry_next, strict=True):
        yield f"  carry {print_expr(var)} = {print_expr(init)} then {print_expr(after)}"
    for var, value in s.lets:
        yield f"  let {print_expr(var)} = {print_expr(value)}"
    for store in s.stores:
        yield "  " + _store(store)


def _check(c: Check) -> Lines:
    yield f"check {json.dumps(c.kind)} {json.dumps(c.message)} {print_expr(c.cond)}{_loc(c.loc)}"


def _argument(a: Any) -> str:
    if isinstance(a, tuple):
        return "(" + "".join(_argument(x) + "," for x in a) + ")"
    if isinstance(a, Expr):
        return f"<{print_expr(a)}>"
    form = _ARGUMENTS.get(type(a))
    return form(a) if form is not None else repr(a)


_ARGUMENTS: dict[type, Callable[[Any], str]] = {
    BufArg: lambda a: f"&{a.buf}",
    Enum: lambda a: f"enum {json.dumps(a.kind)} {json.dumps(a.value)}",
    DType: lambda a: f"dtype {a}",
    str: json.dumps,
}


def _extern(x: Extern) -> Lines:
    args = "".join(_argument(a) + "," for a in x.args)
    kwargs = "".join(f"{k}={_argument(v)}," for k, v in x.kwargs)
    more = f" mutates {_names(x.mutates)}" if x.mutates else ""
    more += "".join(f" binds {print_expr(sym)} {out} {dim}" for sym, out, dim in x.binds)
    yield f"extern {x.op}({args}{kwargs}) -> {_names(x.outs)} {x.returned} via {x.via}{more}{_loc(x.loc)}"


def _cond(c: Any) -> Lines:
    yield f"if {print_expr(c.pred)} then"
    yield from _block(c.then)
    yield "else"
    yield from _block(c.orelse)


def _repeat(r: Any) -> Lines:
    yield f"repeat {print_expr(r.sym)} < {print_expr(r.count)} do"
    yield from _block(r.body)


def _bind(b: Bind) -> Lines:
    yield f"bind {print_expr(b.sym)} = {print_expr(b.value)}"


# ---------------------------------------------------------------- kernels and steps
def _kernel(k: Kernel) -> Lines:
    grain = f" grain {print_expr(k.grain)}" if k.grid else ""
    yield f"kernel {k.name} {k.target.name} grid [{_axes(k.grid)}]{grain}{_loc(', '.join(k.origins))}"
    for p in k.params:
        yield f"  param {'write' if p.written else 'read'} {p.buf}: {p.dtype}{_exprs(p.shape)} layout {_layout(p.layout)}"
    if k.syms:
        yield f"  syms {', '.join(map(print_expr, k.syms))}"
    if k.tiles:
        yield f"  tiles {', '.join(f'{t.axis.name}: {t.size} {t.how}' for t in k.tiles)} warps {k.launch[0]} stages {k.launch[1]}"
    for s in k.scratch:
        yield f"  scratch {s.name}: {s.dtype}[{s.size}]"
    yield from _block(k.body)


def _loop(loop: Loop) -> Lines:
    yield f"for {loop.axis.name} < {print_expr(loop.extent)} {loop.kind}:"
    for var, init, after in loop.carry:
        yield f"  carry {print_expr(var)} = {print_expr(init)} then {print_expr(after)}"
    yield from _block(loop.body)


def _store_stmt(s: StoreStmt) -> Lines:
    mask = f" if {print_expr(s.mask)}" if s.mask is not None else ""
    yield f"store {s.mode} {s.buf}{_exprs(s.index)} = {print_expr(s.value)}{mask}"


def _require(s: Require) -> Lines:
    yield f"require {print_expr(s.cond)} else {s.message!r}"


def _contract(c: Contract) -> Lines:
    wide = "" if c.wide is None else f" of {print_expr(c.wide)}"
    to = f"{c.acc}{'' if const_of(c.first) == 0 else f'[{print_expr(c.first)}]'}{' +=' if c.add else ''}"
    yield f"contract {to} {c.rows}x{c.width} [{_axes(((c.m, c.live), *c.taps, (c.k, c.extent)))}] lanes {c.n.name}{wide}"
    yield f"  {print_expr(c.a)}"
    yield f"  {print_expr(c.b)}"
    if c.prefetch is not None:
        yield f"  prefetch {print_expr(c.prefetch)} by {c.prefetch_vectors or print_expr(c.prefetch_share)}"
    if const_of(c.prefetch_rows) != 0:
        yield f"  prefetch rows {print_expr(c.prefetch_rows)}"
    if c.tails:
        yield f"  tails {c.tails}"
    if c.where is not None:
        yield f"  where {print_expr(c.where)}"
    if c.parts > 1:
        yield f"  parts {c.parts}{f' rest {c.rest}' if c.rest else ''}"


def _product(p: Product) -> Lines:
    yield f"product {p.out}[{p.pitch}] {'+=' if p.add else '='} [{_axes(((p.m, p.rows), (p.n, p.columns), (p.k, p.extent)))}]"
    yield f"  {print_expr(p.a)}"
    yield f"  {print_expr(p.b)}"


def _transpose(t: Transpose) -> Lines:
    yield f"transpose {t.out}[{t.pitch}] [{_axes(((t.m, t.rows), (t.n, t.columns)))}] = {print_expr(t.source)}"


def _banded(s: Banded) -> Lines:
    loops = ((s.m, s.live), *s.taps, (s.w, const(s.width)), (s.c, const(s.channels)), (s.g, s.groups))
    yield f"banded {s.acc} {s.rows}x{16 * s.vectors} [{_axes(loops)}] lanes {s.lane.name}, {s.per} a group"
    yield f"  {print_expr(s.a)}"
    yield f"  {print_expr(s.b)}"


def _paired(s: Paired) -> Lines:
    loops = ((s.m, s.live), *s.taps, (s.k, const(s.depth)))
    at = "" if s.first is const(0) else f"[{print_expr(s.first)}]"
    yield f"paired {s.acc}{at} {s.rows}x{16 * s.vectors} [{_axes(loops)}] lanes {s.n.name}{', taps joined' if s.joined else ''}"
    yield f"  {print_expr(s.a)}"
    yield f"  {print_expr(s.b)}"


def _interleave(s: Interleave) -> Lines:
    yield f"interleave {s.out}[{s.pitch}] [{_axes(((s.n, s.columns), (s.k, s.depth)))}, {s.room}] = {print_expr(s.source)}"


def _let(let: Let) -> Lines:
    yield f"let {print_expr(let.var)} = {print_expr(let.value)}"


def _launch(s: Launch) -> Lines:
    yield f"launch {s.kernel} ({', '.join(s.bufs)}) syms {_exprs(s.syms)} grid {print_expr(s.grid)} grain {print_expr(s.grain)}"


def _segment(s: Segment) -> Lines:
    yield f"segment {s.number}:"
    yield from _block(s.steps)


_ELEMENTS: dict[type, Callable[[Any], Lines]] = {
    Stage: _stage,
    Check: _check,
    Extern: _extern,
    Bind: _bind,
    Cond: _cond,
    Repeat: _repeat,
    PlanCond: _cond,
    PlanRepeat: _repeat,
    Kernel: _kernel,
    Loop: _loop,
    StoreStmt: _store_stmt,
    Require: _require,
    Contract: _contract,
    Product: _product,
    Transpose: _transpose,
    Banded: _banded,
    Paired: _paired,
    Interleave: _interleave,
    Let: _let,
    Launch: _launch,
    Segment: _segment,
    Alloc: lambda s: iter([f"alloc {s.buf}"]),
    Free: lambda s: iter([f"free {s.buf}"]),
    Call: lambda s: _extern(s.extern),
}
