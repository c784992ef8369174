"""Compile and run printed kernels with the system C compiler, on NumPy arrays."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from software_tiles import in_software
from torchsmith.emit.c import emit_kernel
from torchsmith.ir.expr import Const, Expr, Op, Sym
from torchsmith.ir.kernel import Kernel, Scheduled
from torchsmith.ir.program import Program

NP = {"f64": np.float64, "f32": np.float32, "bf16": np.uint16, "f16": np.float16, "i64": np.int64, "i32": np.int32, "i16": np.int16,
      "i8": np.int8, "u8": np.uint8, "bool": np.bool_}  # fmt: skip
FLAGS = ["-O2", "-march=native", "-mprefer-vector-width=512", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-w"]
SOFTWARE_TILES = "-DSOFTWARE_TILES"
DIR = Path(tempfile.gettempdir()) / f"torchsmith-emit-{os.getuid()}"


def build(text: str, flags: list[str] | None = None) -> ctypes.CDLL:
    """A shared library of one kernel, exported as `kernel`."""
    flags = flags or FLAGS
    DIR.mkdir(exist_ok=True, mode=0o700)
    so = DIR / (hashlib.sha256((text + " ".join(flags)).encode()).hexdigest()[:24] + ".so")
    if not so.exists():
        part = so.with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", *flags, "-shared", "-DTS_KERNEL=kernel", "-x", "c", "-", "-o", str(part)], input=text.encode(), check=True)
        part.rename(so)
    return ctypes.CDLL(str(so))


def value(e: Expr, env: dict[str, int]) -> int:
    """A size expression as a number."""
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Sym):
        return env[e.name]
    assert isinstance(e, Op)
    a = [value(x, env) for x in e.args]
    return {"add": lambda: a[0] + a[1], "mul": lambda: a[0] * a[1], "sub": lambda: a[0] - a[1], "floordiv": lambda: a[0] // a[1],
            "mod": lambda: a[0] % a[1], "min": lambda: min(a), "max": lambda: max(a), "neg": lambda: -a[0]}[e.name]()  # fmt: skip


def launch(kernel: Kernel, arrays: dict[str, np.ndarray], env: dict[str, int], chunks: int = 2, flags: list[str] | None = None) -> None:
    """Run `kernel` on buffers (flat arrays, element 0 first), the grid cut into `chunks` parts."""
    text, flags = emit_kernel(kernel), flags or FLAGS
    lib = build(in_software(text) if SOFTWARE_TILES in flags else text, flags)
    n = 1
    for _, extent in kernel.grid:
        n *= value(extent, env)
    bufs = (ctypes.c_void_p * max(1, len(kernel.params)))(*(arrays[p.buf].ctypes.data for p in kernel.params))
    syms = (ctypes.c_int64 * max(1, len(kernel.syms)))(*(env[s.name] for s in kernel.syms))
    edges = sorted({0, n, *(n * c // chunks for c in range(1, chunks))})
    for lo, hi in itertools.pairwise(edges):
        lib.kernel(bufs, syms, ctypes.c_int64(lo), ctypes.c_int64(hi))


def run(scheduled: Scheduled, inputs: dict[str, np.ndarray], env: dict[str, int] | None = None, chunks: int = 2) -> dict[str, np.ndarray]:
    """Every kernel in order; the results are all buffers by name, shaped."""
    env = env or {}
    program: Program = scheduled.program
    flat: dict[str, np.ndarray] = {}
    views: dict[str, np.ndarray] = {}
    for name, b in program.buffers.items():
        shape = tuple(value(e, env) for e in b.shape)
        strides = tuple(value(e, env) for e in b.layout.strides) if b.layout else ()
        size = value(b.layout.offset, env) + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
        dtype = np.dtype(NP[b.dtype.name])
        # guard elements behind the end: a kernel that writes too far is seen
        raw = np.frombuffer(bytearray(b"\xab" * ((size + 64) * dtype.itemsize)), dtype=dtype)
        flat[name] = raw
        view = np.lib.stride_tricks.as_strided(raw[value(b.layout.offset, env):], shape, tuple(s * dtype.itemsize for s in strides))
        views[name] = view
        if name in inputs:
            view[...] = inputs[name]
    for k in scheduled.body:
        if isinstance(k, Kernel):
            launch(k, flat, env, chunks)
    for name, raw in flat.items():
        assert (raw[-64:].view(np.uint8) == 0xAB).all(), f"{name} was written beyond its end"
    return views
