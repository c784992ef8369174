"""Training steps at batch 8: eager, torch.compile's best, ours around the model only and around the whole step; ms and peak bytes.

All columns of a row share one model and one optimizer, so each continues where the last one stopped. A step is forward, loss, backward(),
optimizer.step(), zero_grad(); what is trained stands in bench/training_cases.py. One thread; the ratios are of the process's CPU time,
which work beside it disturbs less than the clock on the wall. Peak: the most resident memory during one step above that before it, after
all idle memory was given back.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paired import Protocol, calls_per_burst, geomean, is_noisy, pairing
from training_cases import TIMED, case_of, timed_step

from models import MODELS

from .harness import Row, child, load_rows, protocol_of, save, tree_cpu

BATCH, LR = 8, 1e-5
BUDGET_S = 30.0  # CPU seconds of bursts for one model, after two rounds
BARS = {"mlp3": 3.0, "transformer": 3.0, "lstm_classifier": 1.0}  # whole step over eager; the ten: 0.95 each, 1.2 in geomean
ONE, MEAN, PEER = 0.95, 1.2, 1.15
COLD, SECOND = 5.0, {"resnet18": 1.5, "BERT_pytorch": 1.5}  # first step: torch.compile's over ours; CPU s in the second process
EAGER, THEIRS, THEIR_STEP, OURS, STEP = "eager", "torch.compile", "torch.compile + step", "ours", "ours, whole step"
COLUMNS = (EAGER, THEIRS, THEIR_STEP, OURS, STEP)
FIRST = (EAGER, STEP, OURS, THEIRS, THEIR_STEP)  # the order of first calls: the whole step finds nothing cached
NOTE = (
    "One thread. A cell: milliseconds of CPU time of one training step (median of interleaved bursts), of wall time in brackets, and its "
    "peak memory above what was resident before it, in MB. The machine ran other work, hence CPU time; the ratios are of it. "
    "`torch.compile`: the model compiled; `+ step`: also optimizer.step. Ratios: eager's (the better torch.compile's) time over our "
    "whole step, bootstrap 95 % interval; above 1 ours is faster. First step: CPU seconds of the process and its children above a later "
    "step, caches empty (`ours` finds the kernels of the whole step); in brackets until the third step was done, where lazy state of "
    "optimizers compiles once more; second process: the whole step with caches that a process like it has filled, of which in the system "
    "(the first touch of memory, mostly). "
    f"The ten: SGD with momentum and decay, batch {BATCH}; mlp3, transformer (width 128, length 32), lstm_classifier: AdamW, batch 32."
)


def runners(name: str, columns: list[str]) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """The model that all share, and per column a call that takes one step and returns its loss."""
    import torch

    import torchsmith

    case = case_of(name, timed_step, BATCH, LR)
    model, step, batch = case.model, case.step, case.batch()
    (optimizer,) = case.make(model)
    made: dict[str, Callable[[], Any]] = {EAGER: lambda: step(model, optimizer, *batch)}
    if STEP in columns:
        whole = torchsmith.compile(step)
        made[STEP] = lambda: whole(model, optimizer, *batch)
    if OURS in columns:
        ours = torchsmith.compile(model)
        made[OURS] = lambda: step(ours, optimizer, *batch)
    if THEIRS in columns or THEIR_STEP in columns:
        import torch._inductor.compile_fx  # nobody's first call pays for imports

        theirs = torch.compile(model)
        update = SimpleNamespace(step=torch.compile(optimizer.step), zero_grad=optimizer.zero_grad)
        made[THEIRS] = lambda: step(theirs, optimizer, *batch)
        made[THEIR_STEP] = lambda: step(theirs, update, *batch)
    return model, {c: made[c] for c in FIRST if c in columns}


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes that one call adds to what is resident, at the most."""
    from torchsmith.runtime import _native

    gc.collect()
    _native.workspace_trim()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    run()
    return max(0, resident("VmHWM") - before)


def burst(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """CPU and wall seconds per call."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - cpu) / count, (time.perf_counter() - wall) / count


def first_calls(run: Callable[[], Any]) -> tuple[float, float, float, float]:
    """The first call's result; CPU seconds of the first call, and of the first three, above three later ones; the first call's in the
    system."""
    began, system = tree_cpu(), os.times().system
    loss, first = float(run()), tree_cpu() - began
    system = os.times().system - system
    run()  # the second call of a lazy optimizer may compile once more
    run()
    three, later = tree_cpu() - began, burst(run, 1)[0]
    return loss, round(max(0.0, first - later), 2), round(max(0.0, three - 3 * later), 2), round(system, 2)


def run_case(case: dict[str, Any]) -> Row:
    import torch

    import torchsmith.capture.start
    import torchsmith.pipeline  # noqa: F401  (imports are nobody's first call)

    torch.set_num_threads(1)
    protocol = Protocol(**case["protocol"])
    row: Row = {"first_s": {}, "three_s": {}, "system_s": {}, "loss": {}, "failed": {}, "peak": {}, "ms": {}, "wall_ms": {}}
    model, found = runners(case["model"], case["columns"])
    start = copy.deepcopy(model.state_dict())  # with its metadata: some modules read a version
    for name, run in list(found.items()):
        model.load_state_dict(start)  # every column's first loss is of the same weights and draws
        torch.manual_seed(1)
        try:
            row["loss"][name], row["first_s"][name], row["three_s"][name], row["system_s"][name] = first_calls(run)
        except Exception as e:  # a column that cannot take a model is a cell of the table
            row["failed"][name] = f"{type(e).__name__}: {str(e)[:200]}"
            del found[name]
    if case.get("second"):
        return row
    for kind in ("first_s", "three_s"):
        if THEIR_STEP in row[kind] and THEIRS in row[kind]:
            row[kind][THEIR_STEP] = round(row[kind][THEIR_STEP] + row[kind][THEIRS], 2)  # its model was compiled for the other
    counts = {name: 1 if burst(run, 1)[0] > protocol.burst_s else calls_per_burst(run, protocol) for name, run in found.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    again: list[float] = []
    last, began = STEP if STEP in found else list(found)[-1], time.process_time()
    while len(again) < 2 or (len(again) < protocol.pairs and time.process_time() - began < BUDGET_S):
        for name in (*found, *reversed(found)):
            times[name].append(burst(found[name], counts[name]))
        again.append(burst(found[last], counts[last])[0])
    cpu = {name: [t[0] for t in both] for name, both in times.items()}
    for key, part in (("ms", 0), ("wall_ms", 1)):
        row[key] = {name: sorted(t[part] for t in both)[len(both) // 2] * 1e3 for name, both in times.items()}
    control = pairing(cpu[last][1::2], again)
    row["control"], row["noisy"] = control.as_dict(), is_noisy(control)
    row["ratio"] = {name: pairing(cpu[last], t).as_dict() for name, t in cpu.items() if name != last}
    row["peak"] = {name: min(peak_of(run), peak_of(run)) for name, run in found.items()}
    return row


def suite(args: argparse.Namespace) -> list[Row]:
    rows = load_rows(args.out, "training") if args.resume else []
    columns = [c for c in COLUMNS if not c.startswith("torch.compile") or "torch.compile" in args.peers]
    for model in (*args.models, *(m for m in TIMED if args.models == list(MODELS))):
        if any(r["model"] == model and "ms" in r for r in rows):
            continue
        rows = [r for r in rows if r["model"] != model]
        case = {"suite": "training", "model": model, "columns": columns, "protocol": protocol_of(args)}
        with tempfile.TemporaryDirectory() as cache:
            env = {"TORCHSMITH_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
            env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
            row = {"model": model} | child(case, env)
            for _ in range(2):  # the first of these compiles what only a new optimizer needs: above, eager has made its state
                row["second"] = child(case | {"columns": [STEP], "second": True}, env)
        rows.append(row)
        print(table([row]).split("\n")[2], flush=True)
        save(args.out, "training", rows, table(rows), NOTE)
    return rows


def _best(r: Row) -> dict[str, Any] | None:
    """The faster torch.compile."""
    found = [r["ratio"][c] for c in (THEIRS, THEIR_STEP) if c in r.get("ratio", {})]
    return min(found, key=lambda m: float(m["ratio"])) if found else None


def _interval(m: dict[str, Any] | None) -> str:
    return f"{m['ratio']:.2f} [{m['low']:.2f}, {m['high']:.2f}]" if m else "-"


def _cell(r: Row, column: str) -> str:
    if column in r.get("failed", {}):
        return "failed"
    if column not in r["ms"]:
        return "-"
    return f"{r['ms'][column]:.3g} ({r['wall_ms'][column]:.3g}) / {r['peak'][column] / 1e6:.0f}"


def _first(r: Row, column: str) -> str:
    return f"{r['first_s'][column]:.1f} ({r['three_s'][column]:.1f})" if column in r["first_s"] else "-"


def _second(r: Row) -> dict[str, float]:
    return {k: r.get("second", {}).get(f"{k}_s", {}).get(STEP, float("nan")) for k in ("first", "three", "system")}


def table(rows: list[Row]) -> str:
    first = [f"first step: {c}" for c in (THEIRS, THEIR_STEP, STEP)]
    ratios = ["over eager [95 %]", "over torch.compile [95 %]"]
    titles = ["model", *(f"{c}: ms (wall) / MB" for c in COLUMNS), *ratios, *first, "second process, system", "loss moved", "A/A"]
    out = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for r in rows:
        if STEP not in r.get("ms", {}) or EAGER not in r["ms"]:
            out.append(f"| {r['model']} | failed: {(r.get('error') or str(r.get('failed', '')))[-300:]} |")
            continue
        moved = max(abs(v - r["loss"][EAGER]) / abs(r["loss"][EAGER]) for v in r["loss"].values())
        control = f"{r['control']['ratio']:.3f}{' too noisy' if r['noisy'] else ''}"
        ratios = [_interval(r["ratio"].get(EAGER)), _interval(_best(r))]
        firsts = [*(_first(r, c) for c in (THEIRS, THEIR_STEP, STEP)), "{first:.1f} ({three:.1f}), {system:.1f}".format(**_second(r))]
        out.append("| " + " | ".join([r["model"], *(_cell(r, c) for c in COLUMNS), *ratios, *firsts, f"{moved:.1e}", control]) + " |")
    return "\n".join([*out, "", *verdict(rows)])


def verdict(rows: list[Row]) -> list[str]:
    """The bars: speed of the whole step in geomean and in each row, memory in each row, first steps."""
    out = []
    rows = [r for r in rows if STEP in r.get("ms", {}) and EAGER in r["ms"]]
    ten = [r for r in rows if r["model"] in MODELS]
    if ten:
        mean = geomean([r["ratio"][EAGER]["ratio"] for r in ten])
        out.append(f"- whole step over eager, geomean of {len(ten)}: {mean:.2f} (bar {MEAN})")
        out += [f"  - below {ONE}: {r['model']} {r['ratio'][EAGER]['ratio']:.2f}" for r in ten if r["ratio"][EAGER]["ratio"] < ONE]
        alone = [r["ms"][EAGER] / r["ms"][OURS] for r in ten if OURS in r["ms"]]
        out.append(f"- model only over eager, geomean of {len(alone)}: {geomean(alone):.2f}")
        theirs = [r["ms"][EAGER] / min(r["ms"][c] for c in (THEIRS, THEIR_STEP) if c in r["ms"]) for r in ten if _best(r)]
        best = [m["ratio"] for r in ten if (m := _best(r))]
        if best:
            out.append(f"- the better torch.compile over eager, geomean of {len(theirs)}: {geomean(theirs):.2f}")
            out.append(f"- whole step over the better torch.compile, geomean of {len(best)}: {geomean(best):.2f} (bar {PEER})")
    for r in rows:
        if r["model"] in BARS:
            out.append(f"- {r['model']}: {r['ratio'][EAGER]['ratio']:.2f} x eager (bar {BARS[r['model']]})")
    fat = [(r["model"], r["peak"][STEP] / max(1, r["peak"][EAGER])) for r in rows]
    above = [f"- peak memory above eager's: {name} {ratio:.2f}" for name, ratio in fat if ratio > 1]
    out += above or ["- peak memory is at most eager's in every row"]
    cold = [(r["model"], r["first_s"][THEIRS] / max(0.01, r["first_s"][STEP])) for r in rows if THEIRS in r["first_s"]]
    if cold:
        out.append(f"- first step, cold, torch.compile's over ours, geomean of {len(cold)}: {geomean([c for _, c in cold]):.1f}")
        out += [f"  - below {COLD:.0f}: {name} {ratio:.1f}" for name, ratio in cold if ratio < COLD]
    for r in rows:
        if r["model"] in SECOND:
            took = "{first:.1f} CPU s, {system:.1f} of it in the system".format(**_second(r))
            out.append(f"- {r['model']}, second process: {took} (bar {SECOND[r['model']]})")
    return out
