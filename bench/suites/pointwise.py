"""Pointwise functions, row reductions and data movement against torch: elements per second, one thread.

In: --only (names that match). Out: rows for bench/results/pointwise.json and .md.

Results are given memory that the process has kept: whether malloc has unmapped a large block between two calls, and which of the two then
pays for fresh pages, is a matter of what else was allocated, and decided such rows (0.23 to 1.4 for one kernel).

Functions alone are timed as kernels: the printed text called in a C loop on 16 K elements, against torch's operator with `out=`, from whose time a
call on 16 elements is taken off (dispatch is not the question here). Fused operators are timed as calls of torchsmith.compile against eager, whole.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import ulp

import torchsmith
from torchsmith.emit.c import emit_kernel
from torchsmith.ir.linear import const_of
from torchsmith.runtime.toolchain import toolchain

from .harness import Row, keep_memory, load_rows, save

SMALL, LARGE = 1 << 14, 1 << 22
Maker = Callable[[int], tuple[Any, ...]]

# function -> torch's operator with out=, range of the arguments
ALONE: dict[str, tuple[Callable[..., Any], tuple[float, float]]] = {
    n: (getattr(torch, n), r) for n, r in {
        "exp": (-10, 10), "exp2": (-10, 10), "expm1": (-5, 5), "log": (1e-3, 1e3), "log2": (1e-3, 1e3), "log10": (1e-3, 1e3), "log1p": (-0.9, 100), "sin": (-10, 10),
        "cos": (-10, 10), "tan": (-10, 10), "asin": (-1, 1), "acos": (-1, 1), "atan": (-10, 10), "sinh": (-5, 5), "cosh": (-5, 5), "tanh": (-5, 5), "asinh": (-100, 100),
        "acosh": (1, 100), "atanh": (-1, 1), "erf": (-3, 3), "erfc": (-3, 3), "erfinv": (-1, 1), "sqrt": (0, 100), "rsqrt": (1e-3, 100), "sigmoid": (-8, 8),
        "lgamma": (0.1, 30), "digamma": (0.1, 30), "pow": (0.1, 10), "atan2": (-5, 5), "hypot": (-5, 5),
    }.items()
}  # fmt: skip
ALONE |= {
    "silu": (torch.ops.aten.silu.out, (-8, 8)), "gelu": (torch.ops.aten.gelu.out, (-5, 5)), "mish": (torch.ops.aten.mish.out, (-8, 8)),
    "gelu_tanh": (lambda x, out: torch.ops.aten.gelu.out(x, approximate="tanh", out=out), (-5, 5)),
    "softplus": (torch.ops.aten.softplus.out, (-8, 8)), "log_sigmoid": (torch.ops.aten.log_sigmoid.out, (-8, 8)),
}  # fmt: skip

TIMER = r"""
#include <time.h>
#include <stdint.h>
typedef void (*kernel)(void *const *, const int64_t *, int64_t, int64_t);
double timer(kernel k, void *const *bufs, int64_t hi, int64_t reps) {
  struct timespec a, b; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
  for (int64_t i = 0; i < reps; i++) k(bufs, 0, 0, hi);
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b); return (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
}
"""


def best(run: Callable[[], None], reps: int, rounds: int) -> float:
    """Least CPU seconds of this thread a call over `rounds` bursts: who else wants the processor does not count."""
    run()
    least = 1e9
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(reps):
            run()
        least = min(least, (time.thread_time() - began) / reps)
    return least


def alone(name: str, folder: Path, n: int = SMALL, rounds: int = 7) -> dict[str, Any]:
    """One function on n elements in the first-level caches."""
    function, (low, high) = ALONE[name]
    two = name in ulp.BINARY
    kernel = ulp.kernel_of((ulp.BINARY if two else ulp.UNARY)[name][0], 2 if two else 1, n)
    (folder / f"{name}.c").write_text(TIMER + emit_kernel(kernel))
    library = folder / f"{name}.so"
    subprocess.run(["gcc", *toolchain().flags, "-fvisibility=default", "-shared", "-DTS_KERNEL=kernel_", f"{name}.c", "-o", str(library)], cwd=folder, check=True)
    lib = ctypes.CDLL(str(library))
    lib.timer.restype = ctypes.c_double
    xs = [torch.rand(n) * (high - low) + low for _ in range(1 + two)]
    y, z = torch.empty(n), torch.empty(n)
    where = {"y": y} | {f"x{k}": x for k, x in enumerate(xs)}
    bufs = (ctypes.c_void_p * len(kernel.params))(*(where[p.buf].data_ptr() for p in kernel.params))
    hi = 1
    for _, extent in kernel.grid:
        hi *= const_of(extent) or 1
    tiny, few = torch.empty(16), [x[:16].clone() for x in xs]
    reps = 400
    mine, theirs, dispatch = 1e9, 1e9, 1e9
    for _ in range(rounds):
        mine = min(mine, lib.timer(lib.kernel_, bufs, ctypes.c_int64(hi), ctypes.c_int64(reps)) / reps)
        theirs = min(theirs, best(lambda: function(*xs, out=z), reps // 4, 2))
        dispatch = min(dispatch, best(lambda: function(*few, out=tiny), reps // 4, 2))
    theirs = max(theirs - dispatch, 1e-9)
    off = (y - z).abs().div(z.abs().clamp_min(1e-3)).max().item()
    return {"name": name, "elements": n, "ours_us": mine * 1e6, "torch_us": theirs * 1e6, "ours_gels": n / mine / 1e9, "torch_gels": n / theirs / 1e9,
            "ratio": theirs / mine, "apart": off}  # fmt: skip


def _norm(rows: int, columns: int) -> tuple[Any, ...]:
    return torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)


def _half(n: int) -> tuple[Any, ...]:
    return (torch.randn(n).bfloat16(),)


def _flat(n: int) -> tuple[Any, ...]:
    return (torch.randn(n),)


def _rows(n: int) -> tuple[Any, ...]:
    columns = 128 if n == SMALL else 1024
    return _norm(n // columns, columns)


def _image(n: int) -> torch.Tensor:
    side = 16 if n == SMALL else 64
    return torch.randn(n // (64 * side * side) or 1, 64, side, side)


# fused operator -> (function, arguments for n elements)
FUSED: dict[str, tuple[Callable[..., Any], Maker]] = {
    "softmax": (lambda x, w, b: F.softmax(x, -1), _rows),
    "log_softmax": (lambda x, w, b: F.log_softmax(x, -1), _rows),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), _rows),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, w.shape, w), _rows),
    "group_norm": (lambda x, w, b: F.group_norm(x, 8, w, b), lambda n: (_image(n), torch.randn(64), torch.randn(64))),
    "cross_entropy": (F.cross_entropy, lambda n: (_rows(n)[0], torch.randint(0, 100, (_rows(n)[0].shape[0],)))),
    "gelu": (F.gelu, _flat),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), _flat),
    "gelu bf16": (F.gelu, _half),
    "silu": (F.silu, _flat),
    "softmax bf16": (lambda x: F.softmax(x.view(-1, 128), -1), _half),
    "layer_norm bf16": (lambda x: F.layer_norm(x.view(-1, 128), (128,)), _half),
    "sum of all": (torch.sum, _flat),
    "sum of rows": (lambda x, w, b: x.sum(1), _rows),
    "sum of columns": (lambda x, w, b: x.sum(0), _rows),
    "sum of narrow columns": (lambda x: x.view(-1, 8).sum(0), _flat),
    "add": (lambda x: x + 1, _flat),
    "permute": (lambda x: x.permute(0, 2, 3, 1).contiguous(), lambda n: (_image(n),)),
    "transpose": (lambda x, w, b: x.t().contiguous(), _rows),
    "permute heads": (lambda x: x.view(-1, 32, 4, 32).transpose(1, 2).contiguous(), _flat),
    "cat": (lambda x: torch.cat([x, x], 1), lambda n: (_image(n),)),
    "cat flat": (lambda x: torch.cat([x, x]), _flat),
    "upsample bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), lambda n: (_image(n),)),
    "upsample nearest": (lambda x: F.interpolate(x, scale_factor=2), lambda n: (_image(n),)),
    "max_pool": (lambda x: F.max_pool2d(x, 2), lambda n: (_image(n),)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 1, 1), lambda n: (_image(n),)),
    "cumsum": (lambda x, w, b: x.cumsum(1), _rows),
    "argmax": (lambda x, w, b: x.argmax(1), _rows),
    "where": (lambda x: torch.where(x > 0, x, x * 0.1), _flat),
    "std": (lambda x, w, b: x.std(1), _rows),
}  # fmt: skip


def fused(name: str, n: int, rounds: int = 7) -> dict[str, Any]:
    """One call of the compiled function against one of eager."""
    function, make = FUSED[name]
    args = make(n)
    with torch.inference_mode():
        args = tuple(a.clone() for a in args)
        compiled = torchsmith.compile(function, fullgraph=True)
        want, got = function(*args), compiled(*args)
        off = (want.double() - got.double()).abs().max().item()
        reps = 200 if n == SMALL else 1
        pairs = [(best(lambda: compiled(*args), reps, 1), best(lambda: function(*args), reps, 1)) for _ in range(rounds)]
    mine, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {"name": name, "elements": n, "ours_us": mine * 1e6, "torch_us": theirs * 1e6, "ours_gels": n / mine / 1e9, "torch_gels": n / theirs / 1e9,
            "ratio": statistics.median(b / a for a, b in pairs), "apart": off}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| function | elements | torchsmith us | torch us | torchsmith Gel/s | torch Gel/s | torch's time over ours | apart |", "|---|---|---|---|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['elements']} | {r['ours_us']:.1f} | {r['torch_us']:.1f} | {r['ours_gels']:.2f} | {r['torch_gels']:.2f} | {r['ratio']:.2f} | {r['apart']:.1e} |" for r in rows]
    return "\n".join(lines)


NOTE = (
    "One thread. Functions alone: the kernel on 16 K elements in cache against torch's operator with out=, less torch's dispatch (a call on 16"
    " elements), least time of several bursts. Fused operators: calls of torchsmith.compile against eager's, whole, CPU time of the thread, medians of"
    " bursts in turn and of their ratios; malloc keeps what is freed. `apart`: largest difference of results."
)


def suite(args: argparse.Namespace) -> list[Row]:
    """All cases, or those whose name matches --only; with --prepare only compiled."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_memory()
    rounds = 1 if args.quick or args.prepare else 15
    rows = load_rows(args.out, "pointwise") if args.resume else []
    done = {(r["kind"], r["name"], r["elements"]) for r in rows}

    def add(kind: str, row: Row) -> None:
        rows.append({"kind": kind} | row)
        print(table([row]).rsplit("\n", maxsplit=1)[-1], flush=True)
        save(args.out, "pointwise", rows, table(rows), NOTE)

    with tempfile.TemporaryDirectory() as folder:
        for name in ALONE:
            if re.search(args.only, f"alone {name}") and ("alone", name, SMALL) not in done:
                add("alone", alone(name, Path(folder), rounds=min(rounds, 7)))
    for name in FUSED:
        for n in (SMALL, LARGE):
            if re.search(args.only, f"fused {name}") and ("fused", name, n) not in done:
                add("fused", fused(name, n, rounds))
    return rows
