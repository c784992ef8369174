"""Switches of the pass runner and of fusion do what they say: fuel, CHECK=2, precision casts, epilogues; nothing is remembered for ever."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from torchsmith import compile, events, pipeline
from torchsmith.ir import memo
from torchsmith.ir.expr import Expr, walk
from torchsmith.ir.program import Program, Stage
from torchsmith.schedule import deps
from torchsmith.schedule.fusion import fuse


def compiled(fn: Any, args: tuple[Any, ...], **options: Any) -> tuple[Any, int]:
    """(result, number of kernels)."""
    with torch.no_grad(), events.recording() as found:
        got = compile(fn, options={"force_disable_caches": True, **options})(*args)
    assert not [e for e in found if e.kind == "fallback"]
    return got, sum(e.kind == "kernel" for e in found)


def softmax_twice(x: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x.sin() + 1, -1)
    return torch.softmax(y.exp() * 2, 0) + x.cos()


def test_fuel_counts_what_passes_do() -> None:
    x = torch.randn(9, 33)
    found = [compiled(softmax_twice, (x,), fuel=n) for n in (0, 2, -1)]
    for got, _ in found:
        torch.testing.assert_close(got, softmax_twice(x))
    counts = [n for _, n in found]
    assert counts[0] > counts[2] and counts == sorted(counts, reverse=True)


def test_check_2_verifies_after_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    verifiers = [p for p in pipeline.back() if p.name == "form_kernels"]
    assert verifiers and verifiers[0].level == 2
    monkeypatch.setattr(pipeline, "verify_scheduled", lambda value: seen.append("kernels"))
    compiled(softmax_twice, (torch.randn(4, 8),), check=1)
    assert not seen
    compiled(softmax_twice, (torch.randn(4, 8),), check=2)
    assert seen == ["kernels"]


def test_precision_casts_can_be_left_out() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return ((x + 1) * 3 - x) * 7

    x = torch.randn(1000, dtype=torch.bfloat16)
    exact = ((x.double() + 1) * 3 - x.double()) * 7
    as_eager, relaxed = (compiled(chain, (x,), emulate_precision_casts=on)[0] for on in (True, False))
    assert torch.equal(as_eager, chain(x))
    assert torch.equal(relaxed, exact.to(torch.bfloat16)) and not torch.equal(relaxed, as_eager)


def test_epilogues_can_stay_apart() -> None:
    layer, x = nn.Linear(20, 30), torch.randn(5, 20)
    joined, apart = (compiled(lambda t: torch.tanh(layer(t)), (x,), epilogue_fusion=on) for on in (True, False))
    torch.testing.assert_close(joined[0], apart[0])
    assert apart[1] == joined[1] + 1


def test_nothing_keeps_expressions_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Expr]] = []

    def watched(program: Program, options: Any) -> Program:
        made = fuse.fuse(program, options)
        kept.extend(weakref.ref(e) for s in made.body if isinstance(s, Stage) for e in walk(*deps.stage_exprs(s)) if e.args)
        return made

    front = tuple(p if p.name != "fuse" else pipeline.Pass("fuse", watched) for p in pipeline.FRONT)
    monkeypatch.setattr(pipeline, "FRONT", front)
    compiled(lambda x: torch.softmax(x * 1.2345 + 6.789, 1), (torch.randn(3, 17),))
    torch.compiler.reset()
    gc.collect()
    memo.forget()
    assert kept and not [r for r in kept if r() is not None]
