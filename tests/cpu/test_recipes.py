"""The recipes in docs/recipes, followed: a device, a template, an operator, a guard and a pass enter by rows of tables alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from torchsmith import compile, events, pipeline
from torchsmith.capture import calls, guards
from torchsmith.capture.machine import Machine
from torchsmith.capture.source import Attr, GuardKind
from torchsmith.emit import printers
from torchsmith.emit.c import emit_kernel
from torchsmith.graph.tracing import RULES, rule
from torchsmith.ir.expr import Expr, Op, op, substitute, walk
from torchsmith.ir.kernel import Kernel
from torchsmith.ir.program import Program, Stage
from torchsmith.ir.target import Target, Vectors
from torchsmith.ir.verify import verify_program
from torchsmith.lower import devices
from torchsmith.lower.pointwise import map_elements
from torchsmith.lower.table import NAMED, lowers_foreign
from torchsmith.options import Options
from torchsmith.runtime import build as building
from torchsmith.schedule import formers
from torchsmith.schedule import kernels as forming
from torchsmith.schedule.loops.single import plain_kernel
from torchsmith.schedule.templates import table as templates


def run(fn: Any, *args: torch.Tensor) -> tuple[Any, list[Any]]:
    """(result, events) of one graph that is compiled anew."""
    with torch.no_grad(), events.recording() as found:
        got = compile(fn, options={"force_disable_caches": True, "check": 2}, fullgraph=True)(*args)
    assert not [e for e in found if e.kind == "fallback"]
    return got, found


# ---------------------------------------------------------------- add-a-device: kernels that take their arguments in one structure
TOY: Any = Target("toy", "toy", "cpu", vectors=Vectors(32, 16, masks=False, pairs=False))  # type: ignore[arg-type]
CALL = "typedef struct { void *const *bufs; const long long *syms; long long lo, hi; } toy_call;\n"
HEAD = "void TS_KERNEL(void *const *bufs, const i64 *syms, i64 lo, i64 hi) {\n"


def print_toy(kernel: Kernel) -> str:
    text = emit_kernel(kernel)
    assert HEAD in text
    names = "void *const *bufs = call->bufs; const i64 *syms = (const i64 *)call->syms, lo = call->lo, hi = call->hi;"
    return CALL + text.replace(HEAD, f"static void toy(const toy_call *call) {{\n  {names}\n")


def toy_objects(job: building.Job, kernels: Mapping[str, str]) -> Iterator[building.Task]:
    entry = "void TS_KERNEL(void *const *b, const long long *s, long long lo, long long hi) { toy_call c = {b, s, lo, hi}; toy(&c); }\n"
    return building.COMPILERS["c"](job, {name: text + entry for name, text in kernels.items()})


def test_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setitem(devices.TARGETS, "cpu", lambda options: TOY)
    monkeypatch.setitem(formers.FORMERS, "toy", forming.form_kernels)
    monkeypatch.setitem(printers.PRINTERS, "toy", lambda k: (made.append(k.target.name), print_toy(k))[1])
    monkeypatch.setitem(building.COMPILERS, "toy", toy_objects)
    layer = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.GELU(), torch.nn.Linear(40, 5))
    x = torch.randn(9, 30)
    got, _ = run(layer, x)
    torch.testing.assert_close(got, layer(x).detach())
    assert made and set(made) == {"toy"}


def test_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that speaks C is its row alone: 32-byte registers, six of them."""
    six = Target("cpu:six", "c", "cpu", vectors=Vectors(32, 6, masks=False, pairs=False))
    monkeypatch.setitem(devices.TARGETS, "cpu", lambda options: six)
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 20, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(20, 9, 1))
    x = torch.randn(1, 3, 11, 7)
    got, found = run(layer, x)
    torch.testing.assert_close(got, layer(x).detach(), rtol=1e-4, atol=1e-5)
    assert not any(e.kind == "extern" for e in found)


# ---------------------------------------------------------------- add-a-template: stages that compute an angle
def recognise_angle(stage: Stage) -> Op | None:
    found = [e for s in stage.stores for e in walk(s.value) if isinstance(e, Op) and e.name == "atan2"]
    return found[0] if len(stage.stores) == 1 and found else None


def form_angle(stage: Stage, angle: Op, f: forming.Forming) -> tuple[Kernel, ...]:
    return (replace(plain_kernel(stage, f.buffers), kind="angle"),)


def test_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(templates.TEMPLATES, "angle", templates.Template(recognise_angle))
    monkeypatch.setitem(forming.FORMS, "angle", form_angle)
    x, y = torch.randn(7, 20), torch.randn(7, 20)
    got, found = run(lambda x, y: (torch.atan2(x, y) + 1, (x * y).sum(1)), x, y)
    torch.testing.assert_close(got, (torch.atan2(x, y) + 1, (x * y).sum(1)))
    assert [e.fields["what"] for e in found if e.kind == "kernel"].count("angle") == 1
    assert kernels_of(lambda x, y: torch.atan2(x * 2, y), x, y) == 1
    monkeypatch.setitem(templates.TEMPLATES, "angle", templates.Template(recognise_angle, is_operand=lambda angle, use: use in walk(angle)))
    assert kernels_of(lambda x, y: torch.atan2(x * 2, y), x, y) == 2  # x * 2 is not computed in the place of an operand
    assert kernels_of(lambda x, y: torch.atan2(x, y) + x * 2, x, y) == 1


def kernels_of(fn: Any, *args: torch.Tensor) -> int:
    got, found = run(fn, *args)
    torch.testing.assert_close(got, fn(*args))
    return sum(e.kind == "kernel" for e in found)


# ---------------------------------------------------------------- add-an-op: an operator of another library, as a row each
def test_an_operator() -> None:
    library = torch.library.Library("toy_recipes", "DEF")
    library.define("cube_plus(Tensor x, float by) -> Tensor")
    library.impl("cube_plus", lambda x, by: x * x * x + by, "CompositeExplicitAutograd")
    operator = torch.ops.toy_recipes.cube_plus.default

    @rule(operator)
    def shape(x: torch.Tensor, by: float) -> torch.Tensor:
        return torch.empty_like(x)

    @lowers_foreign("toy_recipes.cube_plus.default")
    def lower_cube_plus(cx: Any, x: Any, by: float) -> Any:
        return map_elements(cx, lambda e, b: op("add", op("mul", op("mul", e, e), e), b), x, by)

    try:
        x = torch.randn(50)
        got, found = run(lambda x: torch.ops.toy_recipes.cube_plus(x, 0.5) * 2, x)
        torch.testing.assert_close(got, (x**3 + 0.5) * 2)
        assert sum(e.kind == "kernel" for e in found) == 1 and not any(e.kind == "extern" for e in found)
    finally:
        NAMED.pop("toy_recipes.cube_plus.default")
        RULES.pop(operator)


# ---------------------------------------------------------------- add-a-guard: a number that was looked at for its parity only
class Box:
    count = 0


def is_even(box: Box) -> bool:
    raise AssertionError("its row is called")


def even_row(m: Machine, args: Any, kwargs: Any) -> bool:
    (box,) = args
    answer = box.count % 2 == 0
    m.world.guard(Attr(m.world.tracks[id(box)].source, "count", "instance"), "parity", answer)
    return answer


def flat_parity(f: guards.Flattener, g: guards.Guard) -> guards.FlatGuard:
    node, answer = f.node(g.source), g.value
    return "python", node, lambda count: (count % 2 == 0) == answer, (node,)


def test_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    words = lambda g: f"{g.source} is {'even' if g.value else 'odd'}"
    monkeypatch.setitem(guards.KINDS, "parity", guards.Kind(lambda g, v, call: (v % 2 == 0) == g.value, words, flat=flat_parity))
    monkeypatch.setitem(calls.ROWS, is_even, even_row)
    box, x = Box(), torch.ones(3)
    box.count = 4
    compiled = compile(lambda x, box: x + 1 if is_even(box) else x - 1, fullgraph=True, options={"force_disable_caches": True})
    with events.recording() as found:
        assert compiled(x, box)[0] == 2
        box.count = 6  # the same entry serves
        assert compiled(x, box)[0] == 2
        assert sum(e.kind == "graph" for e in found) == 1
        box.count = 7  # a stale entry would say 2
        assert compiled(x, box)[0] == 0
    (again,) = [e for e in found if e.kind == "recompile"]
    assert "count is even" in str(again.fields), again.fields


def test_every_kind_of_guard_has_its_row() -> None:
    assert set(get_args(GuardKind)) == set(guards.KINDS)
    with pytest.raises(ValueError, match="Entry: bad guard"):
        guards._frame.Entry(((4, -1, 0, None, None),), (("no such kind", 0, 0, ()),), (), 0, len, (1, None), None, "x", None, {})


# ---------------------------------------------------------------- add-a-pass: exp(log(e)) -> e, which shows in values below zero
def drop_inverses(program: Program, options: Options) -> Program:
    fuel, body = options.fuel, list(program.body)
    for at, stage in enumerate(body):
        for store in stage.stores if isinstance(stage, Stage) else ():
            table: dict[Expr, Expr] = {e: e.args[0].args[0] for e in walk(store.value)
                                       if isinstance(e, Op) and e.name == "exp" and isinstance(e.args[0], Op) and e.args[0].name == "log"}
            if table and fuel and isinstance(stage, Stage):
                fuel -= 1
                body[at] = replace(stage, stores=tuple(replace(s, value=substitute(s.value, table)) for s in stage.stores))
    return program if tuple(body) == program.body else replace(program, body=tuple(body))


def test_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[Program] = []
    row = pipeline.Pass("inverses", drop_inverses, lambda p: (verified.append(p), verify_program(p))[1])
    x = torch.tensor([-2.0, -0.5, 3.0])

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.log().exp() + 1

    torch.testing.assert_close(run(f, x)[0], f(x), equal_nan=True)
    monkeypatch.setattr(pipeline, "FRONT", (*pipeline.FRONT, row))
    got, found = run(f, x)
    torch.testing.assert_close(got, x + 1)
    assert len(verified) == 1 and [e.fields["name"] for e in found if e.kind == "time"].count("inverses") == 1
    run(lambda x: x + 2, x)
    assert len(verified) == 1  # nothing changed, nothing to verify
    with torch.no_grad():
        kept = compile(f, options={"force_disable_caches": True, "fuel": 0})(x)
    assert kept.isnan().sum() == 2
