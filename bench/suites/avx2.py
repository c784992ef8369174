"""AVX2 by option: code for x86-64-v3 against torch.compile with freezing and vectors of 256 bits, one thread, batch 1.

In: the models. Out: two tables. "all AVX2": ATen, oneDNN and MKL are limited to it, as a machine without AVX-512 would be; "only ATen":
ATEN_CPU_CAPABILITY alone, where oneDNN still takes this machine's AVX-512. Times are the process's own (its processor time), so that a
machine that others use distorts them little; bursts of both take turns.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from paired import Protocol, geomean, pairing

from .harness import Row, child, protocol_of, save

ATEN = {"ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_FREEZING": "1", "OMP_NUM_THREADS": "1"}
LIMITS = {"all AVX2": ATEN | {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, "only ATen": ATEN}
CPU, BITS = "x86-64-v3", 256
NOTE = (
    "ms of processor time per call, one thread, batch 1; ratio: torch.compile's time over torchsmith's (above 1: torchsmith is faster), "
    "median of bursts that take turns, with a bootstrap 95 % interval. `error`: max|compiled - eager| / max|eager|."
)


def run_case(case: dict[str, Any]) -> Row:
    """One model under one set of limits: both in this process."""
    import torch
    from torch._inductor import config

    import torchsmith
    from models import inputs_of, make_model, worst_error

    torch.set_num_threads(1)
    protocol = Protocol(**case["protocol"])
    model, inputs = make_model(case["model"]), inputs_of(case["model"], 1)
    config.cpp.simdlen = BITS
    with torch.no_grad():
        want = model(*inputs)
        ours = torchsmith.compile(model, fullgraph=True, options={"cpu": CPU})  # an error, not eager times
        error = worst_error(want, ours(*inputs))
        theirs = torch.compile(model, dynamic=False)
        theirs(*inputs)
        times: dict[int, list[float]] = {0: [], 1: []}
        counts = [_count(call, inputs, protocol.burst_s) for call in (ours, theirs)]
        while len(times[0]) < protocol.pairs:
            for who in (0, 1, 1, 0):
                times[who].append(_burst((ours, theirs)[who], inputs, counts[who]))
    return {"model": case["model"], "limits": case["limits"], "error": error, "pair": pairing(times[0], times[1]).as_dict()}


def _burst(call: Any, inputs: Any, count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        call(*inputs)
    return (time.process_time() - began) / count


def _count(call: Any, inputs: Any, seconds: float) -> int:
    _burst(call, inputs, 1)
    return max(1, round(seconds / max(_burst(call, inputs, 1), 1e-9)))


def suite(args: argparse.Namespace) -> list[Row]:
    rows = []
    for limits, env in LIMITS.items():
        for model in args.models:
            case = {"suite": "avx2", "model": model, "limits": limits, "protocol": protocol_of(args)}
            rows.append({"model": model, "limits": limits} | child(case, env, timeout=900))
            print(table(rows[-1:]).split("\n")[2], flush=True)
            save(args.out, "avx2", rows, table(rows), NOTE)
    return rows


def table(rows: list[Row]) -> str:
    out = ["| limits | model | torchsmith ms | torch.compile ms | ratio [95 %] | error |", "|---" * 6 + "|"]
    for r in rows:
        if "pair" not in r:
            out.append(f"| {r['limits']} | {r['model']} | failed: {str(r.get('error', ''))[-200:]} |")
            continue
        p = r["pair"]
        ratio = f"{p['ratio']:.2f} [{p['low']:.2f}, {p['high']:.2f}]"
        out.append(f"| {r['limits']} | {r['model']} | {p['a_ms']:.3g} | {p['b_ms']:.3g} | {ratio} | {r['error']:.1e} |")
    for limits in LIMITS:
        ratios = [r["pair"]["ratio"] for r in rows if r["limits"] == limits and "pair" in r]
        if ratios:
            out.append(f"| {limits} | geomean of {len(ratios)} | | | {geomean(ratios):.2f} | |")
    return "\n".join(out)
