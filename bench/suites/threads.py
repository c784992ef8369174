"""Throughput of two Python threads that share one compiled model, one native thread each, over that of one thread."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from paired import bootstrap

from .harness import Row, child, load_rows, protocol_of, save

NOTE = (
    "Calls per second of two Python threads over those of one, `torch.set_num_threads(1)`, the model and its packed weights shared; median "
    "of interleaved bursts, bootstrap 95 % interval. Two cores allow 2.0; the rest is memory bandwidth, shared caches and the GIL."
)
WHO = ("torchsmith", "eager", "onnxruntime")


def throughput(call: Callable[[], Any], n: int, seconds: float) -> float:
    """Calls per second of n threads that start together."""
    counts, gate, done = [0] * n, threading.Barrier(n + 1), threading.Event()

    def work(i: int) -> None:
        call()  # a thread's first call sets up its own state
        gate.wait()
        while not done.is_set():
            call()
            counts[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    gate.wait()
    began = time.perf_counter()
    time.sleep(seconds)
    done.set()
    for t in threads:
        t.join()
    return sum(counts) / (time.perf_counter() - began)


def run_case(case: dict[str, Any]) -> Row:
    import numpy as np
    import peers
    import torch

    from models import inputs_of, make_model

    torch.set_num_threads(1)
    peers.THREADS = 1
    model, inputs = make_model(case["model"]), inputs_of(case["model"], case["batch"])
    row: Row = {"model": case["model"], "batch": case["batch"], "who": {}}
    rounds, seconds = (2, 0.1) if case["protocol"]["burst_s"] < 0.02 else (15, 0.5)
    for who in WHO:
        if who not in ("torchsmith", *case["peers"]):
            continue
        call = peers.PEERS[who](model, inputs)
        call()
        ratios, ones = [], []
        for _ in range(rounds):
            one, two = (throughput(call, n, seconds) for n in (1, 2))
            ones.append(one)
            ratios.append(two / one)
        low, high = bootstrap(np.asarray(ratios))
        row["who"][who] = {"ratio": statistics.median(ratios), "low": low, "high": high, "one_per_s": statistics.median(ones)}
    return row


def suite(args: argparse.Namespace) -> list[Row]:
    rows = load_rows(args.out, "threads") if args.resume else []
    for model in args.models:
        if any(r["model"] == model for r in rows):
            continue
        case = {"suite": "threads", "model": model, "batch": 1, "peers": args.peers, "protocol": protocol_of(args)}
        rows.append({"model": model, "batch": 1} | child(case))
        print(table(rows[-1:]).split("\n")[2], flush=True)
        save(args.out, "threads", rows, table(rows), NOTE)
    return rows


def table(rows: list[Row]) -> str:
    out = ["| model | " + " | ".join(f"{w}: two over one [95 %] (calls/s of one)" for w in WHO) + " |", "|---" * (len(WHO) + 1) + "|"]
    for r in rows:
        if "who" not in r:
            out.append(f"| {r['model']} | failed: {r.get('error', '')[-300:]} |")
            continue
        cells = []
        for w in WHO:
            m = r["who"].get(w)
            cells.append(f"{m['ratio']:.2f} [{m['low']:.2f}, {m['high']:.2f}] ({m['one_per_s']:.3g})" if m else "-")
        out.append("| " + " | ".join([r["model"], *cells]) + " |")
    return "\n".join(out)
