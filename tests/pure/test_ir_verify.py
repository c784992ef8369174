"""The verifier: a good Program passes, and each invariant has a case that breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Const, Fold, Load, Op, Sym, Var, const, op
from torchsmith.ir.kernel import Kernel, Let, Loop, Param, Scheduled, StoreStmt
from torchsmith.ir.plan import Alloc, Arena, Free, Given, Input, Launch, Plan, ResultPlace
from torchsmith.ir.print import print_plan, print_program, print_scheduled
from torchsmith.ir.program import Bind, BufArg, Buffer, Check, Extern, Fresh, InputResult, Layout, Program, Stage, Store, Symbol, ViewResult
from torchsmith.ir.verify import VerifyError, verify_kernel, verify_plan, verify_program, verify_scheduled

R, J, K = Axis("i"), Axis("j"), Axis("k")
S = Sym("s0")
X = Load("x", dt.f32, (R, J))
A0, B0 = Var("a0", dt.f32), Var("b0", dt.f32)
ROWS = Layout((const(4), const(1)), const(0))


def buffers(*extra: Buffer) -> dict[str, Buffer]:
    own = (
        Buffer("x", dt.f32, (S, const(4)), ROWS, "input"),
        Buffer("t", dt.f32, (S, const(4)), None, "temp"),
        Buffer("y", dt.f32, (S,), Layout((const(1),), const(0)), "output"),
        *extra,
    )
    return {b.name: b for b in own}


def total(buf: str) -> Fold:
    return Fold(((K, const(4)),), (Const(dt.f32, 0),), (op("add", A0, Load(buf, dt.f32, (R, K))),), (op("add", A0, B0),))


SIN = Stage(((R, S), (J, const(4))), (Store("t", (R, J), op("sin", X)),), loc="model.py:3", origin="aten.sin")
SUM = Stage(((R, S),), (Store("y", (R,), total("t")),), loc="model.py:4", origin="aten.sum")


def program(*body: Any, **changes: Any) -> Program:
    p = Program("p", (Symbol(S, ("size", 0, 0), 2, 100),), ("x",), buffers(), body or (SIN, SUM), (Fresh("y"),))
    return replace(p, **changes)


def test_a_good_program_passes_and_prints() -> None:
    p = program()
    verify_program(p)
    text = print_program(p)
    assert "model.py:3" in text
    assert "sin(x:f32[i, j])" in text


def stage(value: Any, index: Any = (R, J), buf: str = "t", **kw: Any) -> Stage:
    return Stage(((R, S), (J, const(4))), (Store(buf, index, value),), **kw)


BROKEN: list[tuple[str, Program]] = [
    ("written before read", program(SUM, SIN)),
    ("single writing", program(SIN, SIN, SUM)),
    ("inputs are read only", program(stage(X, buf="x"), SIN, SUM)),
    ("bound", program(stage(Load("x", dt.f32, (R, K))), SUM)),
    ("bound", program(stage(Var("v", dt.f32)), SUM)),
    ("bound", program(Stage(((R, S), (R, S)), SIN.stores), SUM)),
    ("types", program(stage(Load("x", dt.f32, (R,))), SUM)),
    ("types", program(stage(Load("x", dt.i64, (R, J))), SUM)),
    ("types", program(stage(Op("sin", dt.i64, (X,))), SUM)),
    ("types", program(stage(Op("add", dt.f32, (X, Const(dt.f64, 1)))), SUM)),
    ("types", program(stage(Op("nonsense", dt.f32, (X,))), SUM)),
    ("types", program(stage(op("lt", X, X)), SUM)),
    ("types", program(stage(X, index=(R,)), SUM)),
    ("types", program(stage(Op("add", dt.f32, (X, Sym("k", dt.f32)))), SUM)),
    ("types", program(stage(Load("nowhere", dt.f32, (R, J))), SUM)),
    ("types", program(stage(Fold(((K, const(4)),), (Const(dt.f32, 0),), (op("add", A0, X),))), SUM)),
    ("in range", program(stage(X, index=(R, J + 4)), SUM)),
    ("updates", program(Stage(SIN.axes, (Store("t", (R, J), X, "add"),)), SUM)),
    ("scan", program(replace(SIN, carry=((A0, Const(dt.f32, 0)),), carry_next=(X,)), SUM)),
    ("stores", program(replace(SIN, stores=()), SUM)),
    ("one name", program(SIN, replace(SUM, stores=(replace(SUM.stores[0], value=op("add", total("t"), Load("z", dt.f32, (R,)))),)), buffers=buffers(
        Buffer("z", dt.f32, (S,), Layout((const(1),), const(0)), "state", storage_of="y")))),
    ("host", program(SIN, SUM, Check(op("lt", Load("y", dt.f32, (const(0),)), Const(dt.f32, 0)), "IndexError", "no"))),
    ("extern", program(SIN, SUM, Extern("aten.x.default", (), (), (), mutates=("x",)))),
    ("written before read", program(Extern("aten.x.default", (BufArg("t"),), (), ("y",)))),
    ("symbols", program(Bind(S, const(3)), SIN, SUM)),
    ("symbols", program(symbols=(Symbol(S, ("size", 0, 0)), Symbol(S, ("size", 0, 1))))),
    ("buffers", program(stage(X, buf="nowhere"), SUM)),
    ("buffers", program(buffers=buffers(Buffer("z", dt.f32, (S,), ROWS, "temp")))),
    ("buffers", program(buffers=buffers(Buffer("z.1", dt.f32, (S,), None, "temp")))),
    ("inputs", program(inputs=("nowhere",))),
    ("results", program(results=(Fresh("x"),))),
    ("results", program(results=(InputResult(3),))),
    ("results", program(results=(ViewResult(0, (S,), (), const(0), dt.f32),))),
    ("write_backs", program(write_backs=(("x", "y"),))),
    ("write_backs", program(write_backs=(("t", "t"),))),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_program_is_named(number: int) -> None:
    invariant, p = BROKEN[number]
    with pytest.raises(VerifyError) as caught:
        verify_program(p)
    assert caught.value.invariant == invariant, caught.value


def test_a_scan_and_an_update_pass() -> None:
    after = op("add", A0, X)
    scan = Stage(SIN.axes, (Store("t", (R, J), after),), scan=True, carry=((A0, Const(dt.f32, 0)),), carry_next=(after,))
    more = Stage(SIN.axes, (Store("t", (R, J), X, "add"),))
    verify_program(program(scan, more, SUM))


PARAMS = (
    Param("x", dt.f32, (S, const(4)), ROWS, False),
    Param("y", dt.f32, (S,), Layout((const(1),), const(0)), True),
)
BODY = (Let(Var("v", dt.f32), total("x")), StoreStmt("y", (R,), Var("v", dt.f32)))
KERNEL = Kernel("k", PARAMS, (S,), ((R, S),), const(1), (), BODY, origins=("aten.sum model.py:4",))


def test_a_good_kernel_passes() -> None:
    verify_kernel(KERNEL)
    s = Scheduled(program(), (KERNEL,))
    verify_scheduled(s)
    assert "model.py:4" in print_scheduled(s)


VECTOR = Loop(J, const(4), "vector", (Loop(K, const(4), "vector", ()),))
BROKEN_KERNELS: list[tuple[str, Kernel]] = [
    ("params", replace(KERNEL, params=PARAMS[1:] + PARAMS)),
    ("params", replace(KERNEL, params=(PARAMS[0], replace(PARAMS[1], written=False)))),
    ("types", replace(KERNEL, params=PARAMS[1:])),
    ("types", replace(KERNEL, syms=())),
    ("bound", replace(KERNEL, grid=())),
    ("bound", replace(KERNEL, body=(*BODY, Loop(R, S, "serial", ())))),
    ("vector", replace(KERNEL, body=(*BODY, VECTOR))),
    ("types", replace(KERNEL, body=(StoreStmt("y", (R,), Const(dt.f64, 0)),))),
    ("scan", replace(KERNEL, body=(*BODY, Loop(J, S, "serial", (), ((A0, Const(dt.f32, 0), A0),))))),
]


@pytest.mark.parametrize("number", range(len(BROKEN_KERNELS)))
def test_a_broken_kernel_is_named(number: int) -> None:
    invariant, k = BROKEN_KERNELS[number]
    with pytest.raises(VerifyError) as caught:
        verify_kernel(k)
    assert caught.value.invariant == invariant, caught.value


def plan(**changes: Any) -> Plan:
    own = {n: b for n, b in buffers().items() if n != "t"}
    places = {"x": Input(0), "y": ResultPlace(0)}
    run = (Alloc("y"), Launch(0, ("x", "y"), (S,), S, const(1)))
    p = Plan("p", (Symbol(S, ("size", 0, 0)),), ("x",), own, places, (KERNEL,), const(0), (), run, (Fresh("y"),))  # type: ignore[arg-type]
    return replace(p, **changes)


def test_a_good_plan_passes() -> None:
    verify_plan(plan())
    assert "launch 0 (x, y)" in print_plan(plan())


def arena(first: int, second: int) -> Plan:
    rows = {n: Buffer(n, dt.f32, (const(8), const(4)), ROWS, "temp") for n in ("u", "v")}
    launch = Launch(0, ("x", "y"), (S,), S, const(1))
    two = (Alloc("y"), replace(launch, bufs=("u", "y")), replace(launch, bufs=("v", "y")), replace(launch, bufs=("u", "y")))
    places = {**plan().places, "u": Arena(const(first)), "v": Arena(const(second))}
    return plan(buffers={**plan().buffers, **rows}, places=places, run=two, workspace=const(256))


BROKEN_PLANS: list[tuple[str, Plan]] = [
    ("places", plan(places={"x": Input(0)})),
    ("places", plan(places={**plan().places, "x": Input(4)})),
    ("launch", plan(run=(Launch(3, (), (), S, const(1)),))),
    ("launch", plan(run=(Launch(0, ("x",), (S,), S, const(1)),))),
    ("symbols", plan(symbols=())),
    ("given", plan(places={**plan().places, "x": Given()})),
    ("given", plan(run=(Free("x"),))),
    ("arena overlap", arena(0, 64)),
    ("workspace", arena(0, 192)),
]


@pytest.mark.parametrize("number", range(len(BROKEN_PLANS)))
def test_a_broken_plan_is_named(number: int) -> None:
    invariant, p = BROKEN_PLANS[number]
    with pytest.raises(VerifyError) as caught:
        verify_plan(p)
    assert caught.value.invariant == invariant, caught.value


def test_arena_places_that_do_not_meet_pass() -> None:
    verify_plan(arena(0, 128))
