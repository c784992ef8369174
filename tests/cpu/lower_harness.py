"""Runs a torch function through lowering and the reference interpreter, for comparison with eager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from graph_harness import captured, graph_of

from torchsmith.graph.sizes import SizeFacts
from torchsmith.ir.interpret import Tensor, run_program
from torchsmith.ir.program import Enum, Extern, Fresh, Program
from torchsmith.ir.verify import verify_program
from torchsmith.lower import lower
from torchsmith.lower.numerics import TORCH_DTYPES
from torchsmith.lower.ref import known
from torchsmith.lower.table import overload
from torchsmith.options import Options
from torchsmith.pipeline import Report, compile_graph


def program_of(
    fn: Any, args: tuple[torch.Tensor, ...], dynamic: tuple[int, ...] = (), role: str = "input"
) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """The verified Program, and the tensors that its call appends to the inputs; `role` is that of every argument."""
    fg = graph_of(fn, *args, dynamic=dynamic)
    fg = replace(fg, roles=tuple(role if r == "input" else r for r in fg.roles))
    program = lower(fg, Options())
    verify_program(program)
    return program, fg.consts


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


def interpret(fn: Any, args: tuple[torch.Tensor, ...], dynamic: tuple[int, ...] = ()) -> list[np.ndarray]:
    program, consts = program_of(fn, args, dynamic)
    return run_program(program, [to_array(a) for a in (*args, *consts)], call_eager)


def flat(value: Any) -> list[torch.Tensor]:
    return [t for v in value for t in flat(v)] if isinstance(value, (tuple, list)) else [] if value is None else [value]


def check(
    fn: Any,
    *args: torch.Tensor,
    rtol: float | None = None,
    atol: float | None = None,
    native: bool = True,
    dynamic: bool = False,
    role: str = "input",
) -> Program:
    """Lowered and interpreted equals eager, layouts of fresh results too; `native`: without any extern call."""
    program, consts = program_of(fn, args, tuple(range(len(args))) if dynamic else (), role)
    if native:
        assert not [e.op for e in program.body if isinstance(e, Extern)]
    expected = flat(fn(*args))
    got = run_program(program, [to_array(a) for a in (*args, *consts)], call_eager)
    assert len(got) == len(expected)
    for g, e, r in zip(got, expected, program.results, strict=True):
        if not isinstance(e, torch.Tensor):
            assert g == e
            continue
        actual = torch.from_numpy(np.array(g)).to(e.dtype)
        torch.testing.assert_close(actual, e, rtol=rtol, atol=atol, equal_nan=True)
        if isinstance(r, Fresh) and e.numel() and not dynamic:
            strides = program.buffers[r.buf].layout.strides  # type: ignore[union-attr]
            assert [known(s) for n, s in zip(e.shape, strides, strict=True) if n != 1] == [
                s for n, s in zip(e.shape, e.stride(), strict=True) if n != 1
            ]
    return program


def check_native(
    fn: Any, *args: torch.Tensor, rtol: float | None = None, atol: float | None = None, dynamic: bool = False, libtorch: str = "allow"
) -> Report:
    """The whole road below capture: compiled equals eager, and runs natively."""
    facts = SizeFacts()
    gm = captured(fn, args, facts, tuple(range(len(args))) if dynamic else ())
    done = compile_graph(gm, facts.freeze(), args, options=Options(libtorch=libtorch))
    assert done.report.road == "native", done.report
    expected, got = flat(fn(*args)), list(done.call(*args))
    assert len(got) == len(expected)
    for k, (g, e) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(g, e, rtol=rtol, atol=atol, equal_nan=True, check_stride=True, msg=lambda m, k=k: f"result {k}: {m}")
    return done.report
