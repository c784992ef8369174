"""Plans with hand-written kernel texts, built and loaded: what the tests of the native host share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchsmith.emit.host import describe, emit_host, packing_key
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Expr, Sym, const
from torchsmith.ir.kernel import Kernel, Param, Scheduled
from torchsmith.ir.program import Buffer, Fresh, Layout, Program, Symbol
from torchsmith.options import Options
from torchsmith.runtime.build import build, kernel_name
from torchsmith.runtime.load import load
from torchsmith.runtime.manifest import Manifest
from torchsmith.schedule.memory.plan import plan

MAP = """
typedef __INT64_TYPE__ int64_t; typedef __INT32_TYPE__ int32_t; typedef __INT16_TYPE__ int16_t; typedef __INT8_TYPE__ int8_t;
typedef __UINT64_TYPE__ uint64_t; typedef __UINT32_TYPE__ uint32_t;
typedef __UINT16_TYPE__ uint16_t; typedef __UINT8_TYPE__ uint8_t;
void TS_KERNEL(void *const *bufs, const int64_t *syms, int64_t lo, int64_t hi) {
  const T_ *x = bufs[0]; T_ *y = bufs[1];
  for (int64_t i = lo; i < hi; i++) y[i] = E_;
}
"""


def map_text(expr: str, ctype: str = "float") -> str:
    """A kernel y[i] = expr(x[i])."""
    return MAP.replace("T_ ", ctype + " ").replace("E_;", expr + ";")


def buffer(
    name: str, *shape: Expr | int, role: str = "temp", d: dt.DType = dt.f32, strides: Sequence[int | Expr] | None = None,
    storage_of: str | None = None,
) -> Buffer:  # fmt: skip
    sizes = tuple(const(s) if isinstance(s, int) else s for s in shape)
    if strides is None:
        steps: list[Expr] = []
        step: Expr = const(1)
        for e in reversed(sizes):
            steps.append(step)
            step = step * e
        steps.reverse()
    else:
        steps = [const(s) if isinstance(s, int) else s for s in strides]
    return Buffer(name, d, sizes, Layout(tuple(steps), const(0)), role, storage_of)  # type: ignore[arg-type]


def kernel(
    name: str, src: Sequence[Buffer], dst: Sequence[Buffer], n: Expr | int, grain: int = 1 << 30, syms: Sequence[Sym] = ()
) -> Kernel:
    """A kernel of n grid items whose body is text, given to `run` under this name."""
    params = tuple(Param(b.name, b.dtype, b.shape, b.layout, b in dst) for b in (*src, *dst))  # type: ignore[arg-type]
    from torchsmith.ir.expr import Axis

    return Kernel(name, params, tuple(syms), ((Axis("g"), const(n) if isinstance(n, int) else n),), const(grain), (), ())


def compile_library(body: Sequence[Kernel], texts: dict[str, str]) -> Path:
    """The library of kernels from inputs to results, as `compile_body` builds it."""
    buffers = {p.buf: Buffer(p.buf, p.dtype, p.shape, p.layout, "output" if p.written else "input") for k in body for p in k.params}
    inputs = tuple(n for n, b in buffers.items() if b.role == "input")
    results = tuple(Fresh(n) for n, b in buffers.items() if b.role == "output")
    made = plan(Scheduled(Program("g", (), inputs, buffers, (), results, (), ()), tuple(body)), Options())
    given = [texts[k.name] for k in made.kernels]
    return build(emit_host(made, [kernel_name(t) for t in given]), given, Options())


def compile_body(
    buffers: Sequence[Buffer], body: Sequence[Any], results: Sequence[Any], texts: dict[str, str], *, symbols: Sequence[Symbol] = (),
    write_backs: Sequence[tuple[str, str]] = (), eager: Callable[..., Any] | None = None, inputs: Sequence[str] | None = None,
    options: Options | None = None, consts: Sequence[str] = (), frozen: bool = False,
    tail: Sequence[Any] = (), threads: int = 0, pool: str = "torch", discard: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Plan, print, build and load."""
    options = options or Options()
    names = tuple(b.name for b in buffers if b.role == "input") if inputs is None else tuple(inputs)
    program = Program("g", tuple(symbols), names, {b.name: b for b in buffers}, (), tuple(results), tuple(write_backs), tuple(consts))
    made = plan(Scheduled(program, tuple(body)), options)
    given = [texts[k.name] for k in made.kernels]
    kernels = [kernel_name(t) for t in given]
    path: Path = build(emit_host(made, kernels), given, options)
    return load(
        path, Manifest.of(describe(made) | {"packing": packing_key(made, kernels)}), eager=eager, name="g", frozen=frozen, tail=tail,
        threads=threads, pool=pool, discard=discard,
    )  # fmt: skip
