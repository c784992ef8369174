"""GPU code on a machine without a GPU: a torch function becomes Triton texts, which Triton's interpreter runs."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import itertools
import json
import linecache
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from graph_harness import graph_of
from lower_harness import call_eager, flat, to_array

from torchsmith.emit.printers import print_kernel
from torchsmith.graph.tracing import remember_device
from torchsmith.ir import dtype as dt
from torchsmith.ir.interpret import _Machine, run_scheduled
from torchsmith.ir.kernel import Kernel, Scheduled
from torchsmith.ir.verify import verify_kernel, verify_program
from torchsmith.lower import lower
from torchsmith.lower.numerics import TORCH_DTYPES
from torchsmith.options import Options
from torchsmith.schedule.formers import form
from torchsmith.schedule.fusion.fuse import fuse
from torchsmith.schedule.fusion.merge_attention import merge_attention

CUDA = torch.device("cuda:0")


def _repair_interpreter() -> None:
    """A comparison of single values says it is of their type, and loses its own when it is spread over a block."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        return TensorHandle(np.full(ret_ty.shape, arg.data.reshape(-1)[0], dtype=arg.data.dtype), arg.dtype.scalar)

    InterpreterBuilder.create_splat = create_splat


_repair_interpreter()


def _interpret_assembly() -> None:
    """The instructions that texts name, which the interpreter refuses."""
    import triton.language as tl

    functions = {"sin.approx.f32 $0, $1;": np.sin, "cos.approx.f32 $0, $1;": np.cos}

    def inline_asm_elementwise(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
        (x,) = args
        return tl.tensor(type(x.handle)(functions[asm](x.handle.data), x.handle.dtype), x.type)

    tl.inline_asm_elementwise = inline_asm_elementwise


_interpret_assembly()
_SPANS: dict[str, tuple[int, int]] = {}  # addresses of the elements that a kernel may touch, while it runs


def _watch_addresses() -> None:
    """Whatever a text loads or stores lies in one of its tensors: where a mask hides a lane nothing is touched."""
    from triton.runtime.interpreter import InterpreterBuilder

    def watched(name: str, pointers: int, mask: int) -> None:
        real = getattr(InterpreterBuilder, name)

        def call(self: Any, *args: Any) -> Any:
            at = args[pointers].data[args[mask].data]
            size = args[pointers].get_element_ty().primitive_bitwidth // 8 or 1
            inside = np.zeros(at.shape, bool)
            for first, last in _SPANS.values():
                inside |= (at >= first) & (at + size <= last)
            far = [int(a) - first for a in at[~inside][:3] for first, _ in _SPANS.values()]
            assert inside.all(), f"{name} outside of {list(_SPANS)}: {far}"
            return real(self, *args)

        setattr(InterpreterBuilder, name, call)

    for name, pointers, mask in (("create_masked_load", 0, 1), ("create_masked_store", 0, 2), ("create_atomic_rmw", 1, 3)):
        watched(name, pointers, mask)


_watch_addresses()
_NUMBERS = itertools.count()
_LOADED: dict[str, Any] = {}


def scheduled_of(
    fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: bool = False, options: Options | None = None
) -> tuple[Scheduled, tuple[torch.Tensor, ...]]:
    """The kernels of `fn` for a GPU, verified, and the constants that its call appends to the inputs."""
    options = options or Options()
    there = [a if a.dim() == 0 and getattr(a, "on_host", False) else remember_device(meta_like(a), CUDA) for a in args]
    fg = graph_of(fn, *there, dynamic=tuple(range(len(args))) if dynamic else ())
    program = lower(fg, options)
    verify_program(program)
    program = fuse(merge_attention(program, options), options)
    verify_program(program)
    scheduled = form(program, options)
    for k in scheduled.body:
        if isinstance(k, Kernel):
            verify_kernel(k)
    return scheduled, fg.consts


def meta_like(a: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")


def texts_of(scheduled: Scheduled) -> list[str]:
    return [print_kernel(k) for k in scheduled.body if isinstance(k, Kernel)]


def function_of(text: str) -> Any:
    """The jit function of a text."""
    if text not in _LOADED:
        name = f"<triton {next(_NUMBERS)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        space: dict[str, Any] = {"__name__": name}
        exec(compile(text, name, "exec"), space)
        _LOADED[text] = space[json.loads(text.partition("\n")[0].removeprefix("#"))["name"]]
    return _LOADED[text]


class TritonMachine(_Machine):
    """The reference interpreter, except that kernels run as their Triton text."""

    def kernel(self, k: Kernel) -> None:
        held: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        spans: dict[str, tuple[int, int]] = {}
        for p in k.params:
            array = self.writable(p.buf) if p.written else self.read(p.buf)
            strides = [int(self.value(s)) for s in p.layout.strides]
            offset = int(self.value(p.layout.offset))
            size = offset + 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) if array.size else offset + 1
            memory = torch.zeros(max(size, 1), dtype=TORCH_DTYPES[p.dtype])
            view = memory.as_strided(array.shape, strides, offset)
            if array.size:  # elements may share memory
                at = torch.arange(size).as_strided(array.shape, strides, offset)
                memory[at.reshape(-1)] = torch.from_numpy(np.array(array)).to(memory.dtype).reshape(-1)
            held[p.buf] = memory, view
            first = memory.data_ptr() + offset * memory.element_size()
            spans[p.buf] = first, (memory.data_ptr() + size * memory.element_size() if array.size else first)
        syms = [self.syms[s] if s in self.syms else self.value(s) for s in k.syms]
        programs = int(self.value(k.programs))
        fn = function_of(print_kernel(k))
        if programs:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                numbers = (float(s) if x.dtype is dt.f64 else int(s) for s, x in zip(syms, k.syms, strict=True))
                with patch.dict(_SPANS, spans, clear=True):
                    fn[(programs,)](*(m for m, _ in held.values()), *numbers)
        for p in k.params:
            if p.written:
                made = held[p.buf][1]
                self.arrays[p.buf][...] = (made.float() if made.dtype == torch.bfloat16 else made).numpy()

    _HANDLERS = {**_Machine._HANDLERS, Kernel: kernel}


def run_triton(scheduled: Scheduled, inputs: Sequence[Any]) -> list[Any]:
    return TritonMachine(scheduled.program, inputs, call_eager).run(scheduled.body)


def check_triton(
    fn: Callable[..., Any], *args: torch.Tensor, rtol: float | None = None, atol: float | None = None, dynamic: bool = False,
    exact: bool = False, options: Options | None = None,
) -> Scheduled:
    """Triton's interpreter on the texts, and ours on the kernels, give what eager gives."""
    scheduled, consts = scheduled_of(fn, args, dynamic, options)
    expected = flat(fn(*args))
    inputs = [to_array(a) for a in (*args, *consts)]
    ways = {"kernels": run_scheduled(scheduled, [np.array(i) for i in inputs], call_eager), "triton": run_triton(scheduled, inputs)}
    for way, got in ways.items():
        assert len(got) == len(expected)
        for k, (g, e) in enumerate(zip(got, expected, strict=True)):
            actual = torch.from_numpy(np.array(g)).to(e.dtype)
            torch.testing.assert_close(actual, e, rtol=0 if exact else rtol, atol=0 if exact else atol, equal_nan=True,
                                       msg=lambda m, w=way, k=k: f"{w}, result {k}: {m}")  # fmt: skip
    return scheduled
