"""The documents' example model ahead of time: cold compilation, size of the library, and what a C program pays to load and call it."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from .harness import BENCH, Row, child, save

FRESH, STARTS, ROUNDS, CALLS = 3, 50, 21, 200_000
BARS = {"compile_s": 1.5, "library_kb": 60, "start_ms": 5, "rss_mb": 5, "call_us": 0.2, "refused_us": 0.3}
UNITS = {"cpu_s": "s of all processors to compile", "load_ms": "ms to load", "kept_us": "us of a call whose output the model allocates"}
WORDS = {
    "compile_s": "s to compile, empty cache", "library_kb": "KB of the library", "start_ms": "ms from start to result",
    "rss_mb": "MB of memory at most", "call_us": "us of a call at batch 1", "refused_us": "us of a call refused at its last check",
} | UNITS  # fmt: skip
NOTE = (
    "Linear(10, 16), ReLU, Linear(16, 1), sigmoid, batch 1 to 1024 (examples/aoti/library). Compiled from the exported program on, in "
    "processes that have imported torch, each with an empty cache. bench/example.c loads the library with torchsmith/package.h: time from "
    "posix_spawn to the first result, calls by one thread with every input checked. Medians."
)


def run_case(case: dict[str, Any]) -> Row:
    """Compile in this process; its cache is empty."""
    import torch

    import torchsmith

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1), torch.nn.Sigmoid()).eval()
    batch = torchsmith.export.Dim("batch", min=1, max=1024)
    with torch.no_grad():
        began, cpu = time.perf_counter(), os.times()
        options = {"aot_inductor.output_path": case["path"]}
        torchsmith.aot.aot_compile(model, (torch.randn(8, 10),), dynamic_shapes=({0: batch},), options=options)
        took, after = time.perf_counter() - began, os.times()
    used = sum(after[:4]) - sum(cpu[:4])
    return {"compile_s": took, "cpu_s": used, "library_kb": Path(case["path"]).stat().st_size / 1e3}


def _started(program: str, path: str) -> Row:
    """One run of the C program, from the moment before it is started."""
    out, into = os.pipe()
    began = time.monotonic_ns()
    process = os.posix_spawn(program, [program, path], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, into, 1)])
    os.close(into)
    with os.fdopen(out) as lines:
        main, loaded, first, kilobytes = map(int, lines.read().split())
    os.waitpid(process, 0)
    return {"start_ms": (first - began) / 1e6, "load_ms": (loaded - main) / 1e6, "rss_mb": kilobytes / 1024}


def suite(args: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path, program = str(Path(folder) / "model.so"), str(Path(folder) / "example")
        include = str(BENCH.parent / "csrc" / "include")
        subprocess.run(["cc", "-O2", f"-I{include}", str(BENCH / "example.c"), "-o", program, "-ldl"], check=True)
        made = []
        for n in range(1 if args.quick else FRESH):
            made.append(child({"suite": "aot-example", "path": path}, {"TORCHSMITH_CACHE_DIR": str(Path(folder) / f"cache{n}")}))
            if "error" in made[-1]:
                raise RuntimeError(made[-1]["error"])
        starts = [_started(program, path) for _ in range(STARTS)]
        rounds, calls = (3, "1000") if args.quick else (ROUNDS, str(CALLS))
        runs = [subprocess.run([program, path, calls], check=True, capture_output=True, text=True).stdout.split() for _ in range(rounds)]
    called = [dict(zip(("call_us", "kept_us", "refused_us"), (float(v) / 1e3 for v in run), strict=True)) for run in runs]
    row = {k: statistics.median(r[k] for r in rows) for rows in (made, starts, called) for k in rows[0]}
    save(args.out, "aot-example", [row], table([row]), NOTE)
    return [row]


def table(rows: list[Row]) -> str:
    """A line per figure, with its bar."""
    (row,) = rows
    lines = [f"| {WORDS[k]} | {v:.3g} | {BARS.get(k, '')} |" for k, v in row.items()]
    return "\n".join(["| what | median | at most |", "|---|---|---|", *lines])
