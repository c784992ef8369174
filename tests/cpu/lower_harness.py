"""Runs a torch function through lowering and the reference interpreter, for comparison with eager."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchsmith.graph.spec import FreshOutput, FunctionalGraph, TensorSpec
from torchsmith.ir.expr import const
from torchsmith.ir.interpret import Tensor, run_program
from torchsmith.ir.program import Enum, Extern, Program
from torchsmith.ir.verify import verify_program
from torchsmith.lower import lower
from torchsmith.lower.numerics import TORCH_DTYPES
from torchsmith.lower.table import overload
from torchsmith.options import Options


def spec_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(value.dtype, tuple(map(const, value.shape)), tuple(map(const, value.stride())))
    if isinstance(value, (tuple, list)):
        return tuple(spec_of(v) for v in value)
    return None


def functional(fn: Any, args: tuple[torch.Tensor, ...]) -> FunctionalGraph:
    """A functional graph by torch's own tracer (tests only): ATen on values, static sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda *a: flat(fn(*a)), tracing_mode="real", decomposition_table={})(*args)
    names = []
    given = iter(args)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["spec"] = spec_of(next(given))
        if node.op == "call_function":
            node.meta["spec"] = spec_of(node.meta.get("val"))
            node.meta["loc"] = "test.py:1"
        if node.op == "output":
            out = node.args[0]
            names = [n.name for n in (out if isinstance(out, (tuple, list)) else (out,)) if n is not None]
    inputs = tuple(spec_of(a) for a in args)
    return FunctionalGraph(gm.graph, inputs, tuple(FreshOutput(n) for n in names), (), (), "")


def program_of(fn: Any, args: tuple[torch.Tensor, ...]) -> Program:
    program = lower(functional(fn, args), Options())
    verify_program(program)
    return program


def to_array(t: torch.Tensor) -> np.ndarray:
    """A tensor as the interpreter holds it: bf16 in float32."""
    t = t.detach()
    return (t.float() if t.dtype == torch.bfloat16 else t).contiguous().numpy().copy()


def call_eager(x: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    def value(a: Any) -> Any:
        if isinstance(a, Tensor):
            return torch.from_numpy(np.array(a.data)).to(TORCH_DTYPES[a.dtype])
        if isinstance(a, tuple):
            return [value(v) for v in a]
        if isinstance(a, Enum):
            return torch.device(a.value) if a.kind == "device" else getattr(torch, a.value)
        return a

    got = overload(x.op)(*(value(a) for a in args), **{k: value(v) for k, v in kwargs.items()})
    return [None if t is None else to_array(t) for t in (got if isinstance(got, (tuple, list)) else (got,))]


def interpret(program: Program, args: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    return run_program(program, [to_array(a) for a in args], call_eager)


def flat(value: Any) -> list[torch.Tensor]:
    return [t for v in value for t in flat(v)] if isinstance(value, (tuple, list)) else [] if value is None else [value]


def check(fn: Any, *args: torch.Tensor, rtol: float | None = None, atol: float | None = None, native: bool = True) -> Program:
    """Lowered and interpreted equals eager; `native`: without any extern call."""
    program = program_of(fn, args)
    if native:
        assert not [e.op for e in program.body if isinstance(e, Extern)]
    expected = flat(fn(*args))
    got = interpret(program, args)
    assert len(got) == len(expected)
    for g, e, r in zip(got, expected, program.results, strict=True):
        actual = torch.from_numpy(np.array(g)).to(e.dtype)
        torch.testing.assert_close(actual, e, rtol=rtol, atol=atol, equal_nan=True)
        strides = program.buffers[r.buf].layout.strides  # type: ignore[union-attr]
        if e.numel():
            assert [s.value for n, s in zip(e.shape, strides, strict=True) if n != 1] == [  # type: ignore[attr-defined]
                s for n, s in zip(e.shape, e.stride(), strict=True) if n != 1
            ]
    return program
