"""Steady state: the ten models and five outside ones, batch 1 and 8, against eager, torch.compile, ONNX Runtime, OpenVINO."""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

from paired import Protocol, geomean

from models import MODELS, OUTSIDE

from .harness import Row, child, load_rows, protocol_of, ratio_text, save

PEER_NAMES = ("eager", "torch.compile", "torch.compile freezing", "onnxruntime", "openvino")
BAR, OUTSIDE_BAR = 0.95, 0.9
FREEZING = "torch.compile freezing"
NOTE = (
    "Ratios are the peer's time over torchsmith's (above 1: torchsmith is faster), median of paired bursts with a bootstrap 95 % "
    "interval. `error`: max|compiled - eager| / max|eager|, the worst output."
)


def run_case(case: dict[str, Any]) -> Row:
    """One model and batch against several peers in this process."""
    import torch
    from paired import compare, is_noisy
    from peers import PEERS

    from models import check_sensitive, inputs_of, make_model, worst_error

    protocol = Protocol(**case["protocol"])
    model, inputs = make_model(case["model"]), inputs_of(case["model"], case["batch"])
    check_sensitive(model, case["model"])
    with torch.no_grad():
        want = model(*inputs)
    row: Row = {"model": case["model"], "batch": case["batch"], "peers": {}, "failed": {}}
    runners = {}
    for name in ("torchsmith", *case["peers"]):
        try:
            began = time.perf_counter()
            runners[name] = PEERS[name](model, inputs)
            error = worst_error(want, _shaped(want, runners[name]()))
            row["failed"].pop(name, None)
            row.setdefault("first_s", {})[name] = round(time.perf_counter() - began, 2)
            row.setdefault("error", {})[name] = error
        except Exception as e:  # a peer that cannot take a model is a line in the table
            row["failed"][name] = f"{type(e).__name__}: {str(e)[:200]}"
    ours = runners.pop("torchsmith", None)
    if ours is None:
        return row

    for attempt in range(2):
        control = compare(ours, ours, protocol)
        row["control"], row["noisy"] = control.as_dict(), is_noisy(control)
        row["peers"] = {name: compare(ours, runner, protocol).as_dict() for name, runner in runners.items()}
        row["attempts"] = attempt + 1
        if not row["noisy"]:
            break
    return row


def _shaped(want: Any, got: Any) -> Any:
    """Other runtimes return plain lists, sometimes with more outputs than eager's: the first ones are compared."""
    from models import tensors_of

    return list(tensors_of(got))[: len(list(tensors_of(want)))]


def suite(args: argparse.Namespace) -> list[Row]:
    if args.layers:
        from . import layers

        return layers.suite(args)
    rows = load_rows(args.out, "seeds") if args.resume else []
    for batch in args.batches:
        for model in args.models:
            if any(r["model"] == model and r["batch"] == batch for r in rows):
                continue
            here = [p for p in args.peers if p != FREEZING]
            case = {"suite": "seeds", "model": model, "batch": batch, "peers": here, "protocol": protocol_of(args)}
            row = {"model": model, "batch": batch, "peers": {}, "failed": {}} | child(case)
            if FREEZING in args.peers:
                frozen = child(case | {"peers": [FREEZING]}, {"TORCHINDUCTOR_FREEZING": "1"})
                row["failed"] |= frozen.get("failed", {}) | ({FREEZING: frozen["error"]} if isinstance(frozen.get("error"), str) else {})
                row["peers"] |= frozen.get("peers", {})
                row["control freezing"], row["noisy freezing"] = frozen.get("control"), frozen.get("noisy")
            rows.append(row)
            print(next(t for t in table([row]).split("\n") if t.startswith(f"| {model} ")), flush=True)
            save(args.out, "seeds", rows, table(rows), NOTE)
    return rows


def table(rows: list[Row]) -> str:
    """One line per model and batch, geomeans last. Ratios are peer's time over torchsmith's: above 1, torchsmith is faster."""
    peers = [p for p in PEER_NAMES if any(p in r.get("peers", {}) or p in r.get("failed", {}) for r in rows)]
    titles = [f"vs {p} [95 %]" for p in peers]
    out = ["| model | batch | torchsmith ms | eager ms | " + " | ".join(titles) + " | A/A | error |", "|---" * (6 + len(peers)) + "|"]
    for r in rows:
        if isinstance(r.get("error"), str):
            out.append(f"| {r['model']} | {r['batch']} | failed: {r['error'][-200:]} |")
            continue
        cells = [ratio_text(r, p) for p in peers]
        first = next(iter(r["peers"].values()), None)
        eager = r["peers"].get("eager")
        control = f"{r['control']['ratio']:.3f}{' too noisy' if r['noisy'] else ''}" if r.get("control") else "-"
        error = r.get("error", {}).get("torchsmith")
        ms = [f"{first['a_ms']:.3g}" if first else "-", f"{eager['b_ms']:.3g}" if eager else "-"]
        error_text = f"{error:.1e}" if error is not None else r["failed"].get("torchsmith", "-")
        out.append("| " + " | ".join([r["model"], str(r["batch"]), *ms, *cells, control, error_text]) + " |")
    for batch in sorted({r["batch"] for r in rows}):
        means = []
        for p in peers:
            found = [r["peers"][p]["ratio"] for r in rows if r["batch"] == batch and p in r.get("peers", {})]
            means.append(f"{geomean(found):.2f} (of {len(found)})" if found else "-")
        out.append("| " + " | ".join(["geomean", str(batch), "", "", *means, "", ""]) + " |")
    return "\n".join([*verdict(rows), "", *out])


def best_peer(r: Row) -> tuple[str, Row] | None:
    """The fastest peer of a cell, with its time over ours."""
    return min(r.get("peers", {}).items(), key=lambda item: item[1]["ratio"], default=None)


def verdict(rows: list[Row]) -> list[str]:
    """The ten models' geomeans; how many cells are not shown below the bar: the upper end of the interval of (best peer's time / ours)
    reaches it."""
    out = []
    for batch, p in itertools.product(sorted({r["batch"] for r in rows}), PEER_NAMES):
        ten = [r["peers"][p]["ratio"] for r in rows if r["batch"] == batch and r["model"] in MODELS and p in r.get("peers", {})]
        if ten:
            out.append(f"- the ten models, batch {batch}, {p}: geomean {geomean(ten):.2f} (of {len(ten)})")
    for title, names, bar in (("the ten models", MODELS, BAR), ("models outside the ten", OUTSIDE, OUTSIDE_BAR)):
        cells = {(r["model"], r["batch"]): best_peer(r) for r in rows if r["model"] in names}
        if not cells:
            continue
        below = [f"{m} b{b}: {c[0]} {c[1]['ratio']:.2f} [{c[1]['low']:.2f}, {c[1]['high']:.2f}]" if c else f"{m} b{b}: nothing measured"
                 for (m, b), c in cells.items() if c is None or c[1]["high"] < bar]  # fmt: skip
        ratios = [c[1]["ratio"] for c in cells.values() if c]
        text = f"- {title}: {len(cells) - len(below)} of {len(cells)} cells not shown below {bar} x best peer; geomean to the best peer "
        out += [text + f"{geomean(ratios):.2f}", *(f"  - below: {line}" for line in below)]
    return out
