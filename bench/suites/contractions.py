"""Every contraction by itself: GFLOP/s, share of the measured peak, and ATen's best operator's time over ours.

In: the shapes of bench/shapes.py in four sets: "models" (distinct layers of the ten models), "transformer" (linears at M = 1, 16, 128,
1024), "changing" (both operands change), "random" (seeded, unknown to any tuner). Ours is the compiled graph of the one layer, called
without guards; a convolution gets channels-last activations (ATen chooses between both orders), and the conversions around a single layer
count. `kernel` is the longest launch alone. Weights are hot: the figures of whole models are in the suite `seeds`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from typing import Any

from paired import Call, Pairing, Protocol, geomean, pairing

from .harness import Row, load_rows, save

DTYPES = ("float32", "bfloat16")
MORE = ("float64",)  # on request
SETS = ("models", "transformer", "changing", "random")
PAIRED = Protocol(pairs=8, burst_s=0.004, idle_s=0.0)
SMOKE = Protocol(pairs=2, burst_s=0.001, idle_s=0.0)
COMPUTE_BOUND = 60  # flops per byte of least traffic: above, the target is 75 % of the peak
NOTE = (
    "`ratio` is the time of ATen's best operator (packed weights where ATen can) over ours: above 1, torchsmith is faster; median of "
    "paired bursts with a bootstrap 95 % interval. `% of peak` is 2 x multiply-adds / time over the multiply-add peak measured beside it, "
    "with the whole call's time; `kernel` the same of the longest launch alone. `error`: max|ours - float64| / max|float64|; a * marks "
    "more than twice ATen's."
)


def chosen(args: argparse.Namespace) -> list[tuple[str, str, Any]]:
    """(set, dtype, shape) that the arguments name."""
    import shapes

    sets = {"models": shapes.of_models(tuple(args.batches)), "transformer": shapes.of_transformers()}
    sets |= {"changing": shapes.of_changing(), "random": shapes.at_random()}
    rows = [(kind, dtype, s) for dtype in args.dtypes for kind in SETS for s in sets[kind]]
    return [(k, d, s) for k, d, s in rows if re.search(args.only, f"{k} {s.origin} {d} {s.name}")]


def suite(args: argparse.Namespace) -> list[Row]:
    import torch

    torch.set_num_threads(args.threads)
    rows = load_rows(args.out, "contractions") if args.resume else []
    known = {(r["set"], r["dtype"], r["name"], r["threads"]) for r in rows}
    protocol = SMOKE if args.quick else PAIRED
    for kind, dtype, shape in chosen(args):
        if (kind, dtype, shape.name, args.threads) in known:
            continue
        row: Row = {"set": kind, "dtype": dtype, "name": shape.name, "origin": shape.origin, "threads": args.threads}
        row |= {"mflop": shape.flops / 1e6, "flop_per_byte": shape.flops / shape.bytes}
        try:
            row |= measure(shape, dtype, None if args.prepare else protocol, args.threads)
        except Exception as e:  # one shape that fails is a line in the table
            row["error"] = f"{type(e).__name__}: {str(e)[:200]}"
        rows.append(row)
        print(line(row), flush=True)
        if len(rows) % 16 == 0:  # a run that is cut off goes on with --resume
            save(args.out, "contractions", rows, table(rows), NOTE)
    save(args.out, "contractions", rows, table(rows), NOTE)
    return rows


def measure(shape: Any, dtype: str, protocol: Protocol | None, threads: int) -> Row:
    """Compile, compare with float64, and (with a protocol) time one shape against ATen's candidates."""
    import torch
    from aten import operation
    from launches import keeping_graphs
    from peak import peak

    import torchsmith

    op = operation(shape, getattr(torch, dtype))
    with torch.no_grad():
        with keeping_graphs() as graphs:
            torchsmith.compiler.reset()
            result = torchsmith.compile(op.module)(*op.inputs)
        if not graphs:
            raise RuntimeError("not compiled")
        graph = graphs[-1]
        scale = float(op.reference.abs().max()) or 1.0
        others = {name: float((call().double() - op.reference).abs().max()) / scale for name, call in op.candidates.items()}
        row: Row = {
            "value": {"ours": float((result.double() - op.reference).abs().max()) / scale, **others},
            "externs": list(graph.externs),
        }
        if protocol is None:
            return row
        best = min(op.candidates, key=lambda name: _seconds(op.candidates[name], protocol))
        row["aten"] = best
        before = peak(dtype, threads)
        row |= _compare(graph.call, op.candidates[best], protocol).as_dict()
        launches = [graph.profile() for _ in range(7)]
        row["peak"] = max(before, peak(dtype, threads))
        # An extern call is no launch: nothing to say of its kernel.
        row["kernel_ms"] = 1e3 * statistics.median(max(ts) for ts in launches) if launches[0] and not row["externs"] else None
        row["gflops"] = shape.flops / row["a_ms"] / 1e6
    return row


def _count(call: Call, protocol: Protocol) -> int:
    """Calls that last a burst."""
    call()
    began = time.perf_counter()
    call()
    once = max(time.perf_counter() - began, 1e-7)
    return max(1, round(protocol.burst_s / once))


def _burst(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def _seconds(call: Call, protocol: Protocol) -> float:
    count = _count(call, protocol)
    return min(_burst(call, count) for _ in range(3))


def _compare(ours: Call, theirs: Call, protocol: Protocol) -> Pairing:
    """paired.compare for bursts of milliseconds: both sides use torch's own threads, so no idle time is needed between them."""
    counts = _count(ours, protocol), _count(theirs, protocol)
    times: tuple[list[float], list[float]] = [], []
    for pair in range(protocol.pairs):
        for who in (0, 1) if pair % 2 == 0 else (1, 0):
            times[who].append(_burst((ours, theirs)[who], counts[who]))
    return pairing(*times)


# ---------------------------------------------------------------- text
def _is_imprecise(r: Row) -> bool:
    """Beyond twice ATen's error, and beyond four units of rounding of the largest value."""
    ours, others = r["value"]["ours"], [v for k, v in r["value"].items() if k != "ours"]
    eps = {"float32": 2.0**-23, "float64": 2.0**-49, "bfloat16": 2.0**-7}[r["dtype"]]  # the reference is float64 too, and rounded itself
    return not ours <= max(2 * max(others, default=0.0), 4 * eps)


def line(r: Row) -> str:
    head = [r["set"], r["dtype"], r["name"], r["origin"], str(r["threads"])]
    if "error" in r:
        return "| " + " | ".join([*head, f"failed: {r['error']}"]) + " |"
    value = f"{r['value']['ours']:.1e}{'*' if _is_imprecise(r) else ''}{' ' + ', '.join(r['externs']) if r['externs'] else ''}"
    if "ratio" not in r:
        return "| " + " | ".join([*head, "", "", "", "", "", value]) + " |"
    kernel = f"{100 * r['mflop'] / r['kernel_ms'] / r['peak']:.0f}" if r["kernel_ms"] else "-"
    cells = [f"{r['a_ms'] * 1e3:.1f}", f"{r['gflops']:.0f}", f"{100 * r['gflops'] / r['peak']:.0f} ({kernel})"]
    return "| " + " | ".join([*head, *cells, f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]", r["aten"], value]) + " |"


def table(rows: list[Row]) -> str:
    """The summary first: what issue and lead ask for; then one line per shape."""
    titles = ["set", "dtype", "threads", "shapes", "geomean ratio", "below 0.8", "% of peak, median"]
    titles += ["compute-bound: shapes, median % of peak", "extern"]
    out = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for kind, dtype, threads in dict.fromkeys((r["set"], r["dtype"], r["threads"]) for r in rows):
        found = [r for r in rows if (r["set"], r["dtype"], r["threads"]) == (kind, dtype, threads)]
        timed = [r for r in found if "ratio" in r]
        shares = [100 * r["gflops"] / r["peak"] for r in timed]
        bound = [100 * r["gflops"] / r["peak"] for r in timed if r["flop_per_byte"] >= COMPUTE_BOUND]
        cells = [f"{len(timed)} of {len(found)}", f"{geomean([r['ratio'] for r in timed]):.2f}", str(sum(r["ratio"] < 0.8 for r in timed))]
        cells += [f"{statistics.median(shares):.0f}" if shares else "-", f"{len(bound)}, {statistics.median(bound):.0f}" if bound else "-"]
        out.append("| " + " | ".join([kind, dtype, str(threads), *cells, str(sum(bool(r.get("externs")) for r in found))]) + " |")
    titles = ["set", "dtype", "shape", "from", "threads", "us", "GFLOP/s", "% of peak (kernel)", "ratio [95 %]", "ATen's best"]
    titles += ["error, extern calls"]
    out += ["", "| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    return "\n".join([*out, *map(line, rows)])
