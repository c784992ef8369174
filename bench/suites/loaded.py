"""A machine that others use too: how much slower a call becomes when two processes that never wait are started beside it."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .harness import Row, child, protocol_of, save

NOTE = (
    "ms per call alone and beside two busy processes (`while True: pass`), all threads; medians of interleaved bursts. The last column is "
    "torchsmith's slowdown over ONNX Runtime's: below 1, torchsmith suffers less."
)
WHO = ("torchsmith", "onnxruntime", "openvino", "eager")
BUSY = 2


@contextmanager
def busy_processes() -> Iterator[None]:
    """Two processes that take whatever the scheduler gives them."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for p in others:
            p.kill()
            p.wait()


def medians(calls: dict[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """ms per call of each, in bursts that take turns."""
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(rounds):
        for who, call in calls.items():
            time.sleep(0.1)
            call()
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                call()
                count += 1
            times[who].append((time.perf_counter() - began) / count * 1e3)
    return {who: statistics.median(t) for who, t in times.items()}


def run_case(case: dict[str, Any]) -> Row:
    import torch
    from peers import PEERS, THREADS

    from models import inputs_of, make_model

    torch.set_num_threads(THREADS)
    model, inputs = make_model(case["model"]), inputs_of(case["model"], 1)
    calls = {}
    for who in WHO:
        if who in ("torchsmith", *case["peers"]):
            calls[who] = PEERS[who](model, inputs)
            calls[who]()
    rounds, seconds = (1, 0.1) if case["protocol"]["burst_s"] < 0.02 else (9, 0.4)  # a burst outlasts many time slices
    alone = medians(calls, rounds, seconds)
    with busy_processes():
        loaded = medians(calls, rounds, seconds)
    again = medians(calls, rounds, seconds)
    return {"model": case["model"], "who": {w: {"alone": alone[w], "loaded": loaded[w], "alone again": again[w]} for w in calls}}


def slowdown(m: dict[str, float]) -> float:
    return m["loaded"] / ((m["alone"] + m["alone again"]) / 2)


def suite(args: argparse.Namespace) -> list[Row]:
    rows = []
    for model in args.models:
        case = {"suite": "loaded", "model": model, "peers": args.peers, "protocol": protocol_of(args)}
        rows.append({"model": model} | child(case))
        print(table(rows[-1:]).split("\n")[2], flush=True)
        save(args.out, "loaded", rows, table(rows), NOTE)
    return rows


def table(rows: list[Row]) -> str:
    titles = [f"{w}: alone, loaded (slowdown)" for w in WHO]
    out = ["| model | " + " | ".join(titles) + " | over ONNX Runtime |", "|---" * (len(WHO) + 2) + "|"]
    for r in rows:
        if "who" not in r:
            out.append(f"| {r['model']} | failed: {r.get('error', '')[-300:]} |")
            continue
        found = [r["who"].get(w) for w in WHO]
        cells = [f"{m['alone']:.3g}, {m['loaded']:.3g} ({slowdown(m):.2f})" if m else "-" for m in found]
        ours, theirs = found[:2]
        cells.append(f"{slowdown(ours) / slowdown(theirs):.2f}" if ours and theirs else "-")
        out.append("| " + " | ".join([r["model"], *cells]) + " |")
    return "\n".join(out)
