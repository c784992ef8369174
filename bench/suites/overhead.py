"""The cost of a call: tiny functions, and BERT with a backend that does nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from paired import Protocol

from .harness import Row, child, load_rows, protocol_of, save

NOTE = "Microseconds per call under no_grad; both compilers in one process."


def noop_backend(gm: Any, example_inputs: Any) -> Callable[..., Any]:
    """A backend whose compiled graph costs nothing: it returns the first call's results again."""
    kept: list[Any] = []

    def call(*args: Any) -> Any:
        if not kept:
            kept.append(gm(*args))
        return kept[0]

    return call


def tiny_functions() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    import torch

    x = torch.randn(8)
    linear = torch.nn.Linear(8, 8).eval()
    return {
        "sin(cos(x)), 8 floats": (lambda x: torch.sin(torch.cos(x)), (x,)),
        "x + y, 8 floats": (lambda x, y: x + y, (x, torch.randn(8))),
        "softmax, 8 floats": (lambda x: torch.softmax(x, 0), (x,)),
        "Linear(8, 8) and relu": (torch.nn.Sequential(linear, torch.nn.ReLU()).eval(), (torch.randn(1, 8),)),
    }


def first_output(model: Any) -> Any:
    """BERT without the object around its results: what is left of a call is guards and dispatch."""
    import torch

    class FirstOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Any) -> Any:
            return self.inner(ids)[0]

    return FirstOutput().eval()


def run_case(case: dict[str, Any]) -> Row:
    import torch
    from paired import compare, is_noisy

    import torchsmith
    from models import inputs_of, make_model

    protocol = Protocol(**case["protocol"])
    tiny = tiny_functions()
    row: Row = {"name": case["name"]}
    if case["name"] in tiny:
        fn, inputs = tiny[case["name"]]
        ours, theirs, eager = torchsmith.compile(fn), torch.compile(fn), fn
    else:
        model, inputs = make_model("BERT_pytorch"), inputs_of("BERT_pytorch")
        eager = first_output(model) if "guards" in case["name"] else model
        ours, theirs = torchsmith.compile(eager, backend=noop_backend), torch.compile(eager, backend=noop_backend)
    with torch.no_grad():
        calls = [lambda f=f: f(*inputs) for f in (ours, theirs, eager)]
        for call in calls:
            call()

        for attempt in range(2):
            control = compare(calls[0], calls[0], protocol)
            row |= {"control": control.as_dict(), "noisy": is_noisy(control), "attempts": attempt + 1}
            row["torch.compile"] = compare(calls[0], calls[1], protocol).as_dict()
            if case["name"] in tiny:
                row["eager"] = compare(calls[0], calls[2], protocol).as_dict()
            if not row["noisy"]:
                break
    return row


OVERHEAD_BERT = ("BERT, no-op backend, whole call", "BERT, no-op backend, guards and dispatch alone")


def suite(args: argparse.Namespace) -> list[Row]:
    rows = load_rows(args.out, "overhead") if args.resume else []
    for name in (*tiny_functions(), *OVERHEAD_BERT):
        if any(r["name"] == name for r in rows):
            continue
        row = {"name": name} | child({"suite": "overhead", "name": name, "protocol": protocol_of(args)})
        rows.append(row)
        print(table([row]).split("\n")[2], flush=True)
    save(args.out, "overhead", rows, table(rows), NOTE)
    return rows


def table(rows: list[Row]) -> str:
    out = ["| call | torchsmith us | torch.compile us | torch.compile over torchsmith [95 %] | eager us | A/A |", "|---" * 6 + "|"]
    for r in rows:
        if "torch.compile" not in r:
            out.append(f"| {r['name']} | failed: {r.get('error', '')[-300:]} |")
            continue
        m, eager = r["torch.compile"], r.get("eager")
        ratio = f"{m['ratio']:.2f} [{m['low']:.2f}, {m['high']:.2f}]"
        cells = [f"{m['a_ms'] * 1e3:.2f}", f"{m['b_ms'] * 1e3:.2f}", ratio, f"{eager['b_ms'] * 1e3:.2f}" if eager else "-"]
        out.append("| " + " | ".join([r["name"], *cells, f"{r['control']['ratio']:.3f}{' too noisy' if r['noisy'] else ''}"]) + " |")
    return "\n".join(out)
