"""First calls in fresh processes, with empty and filled caches."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paired import geomean

from .harness import Row, child, load_rows, save, tree_cpu

MULTIPLIES = re.compile(r"aten\.(convolution|mm|addmm|bmm|baddbmm|linear|scaled_dot)")
BARS = {"resnet50": (6.0, 12, 500_000), "BERT_pytorch": (6.0, 12, 500_000)}  # CPU seconds, contraction kernels, bytes
NOTE = (
    "CPU seconds of the process and its children from call to return, wall time in brackets, one fresh process per figure; "
    "imports and building the model are not counted. torch.compile uses one compile thread (worker processes would add their own start)."
)


def run_case(case: dict[str, Any]) -> Row:
    """One first call in this process. Imports and the model's construction are not counted, the compilers' own imports included."""
    import torch

    from models import inputs_of, make_model

    model, inputs = make_model(case["model"]), inputs_of(case["model"], 1)
    if case["compiler"] == "torchsmith":
        import torchsmith
        import torchsmith.capture.start
        import torchsmith.pipeline

        compile_: Callable[..., Any] = torchsmith.compile
    else:
        import torch._inductor.compile_fx

        compile_ = torch.compile
    with torch.no_grad(), counting() as counts:
        model(*inputs)  # thread pools and the operators' own first-call work belong to nobody
        cpu, wall = tree_cpu(), time.perf_counter()
        compile_(model)(*inputs)
        row = {"cpu": round(tree_cpu() - cpu, 2), "wall": round(time.perf_counter() - wall, 2)}
    return row | counts


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """What torchsmith makes inside the block: distinct kernels, distinct kernels that multiply, bytes of the libraries."""
    from torchsmith import events, pipeline

    emit = pipeline.print_kernel
    texts: dict[str, bool] = {}
    counts: dict[str, int] = {}

    def watched(kernel: Any, *rest: Any) -> str:
        text = emit(kernel, *rest)
        texts[text] = texts.get(text, False) or (bool(MULTIPLIES.search(" ".join(kernel.origins))) and "pack" not in kernel.name)
        return text

    pipeline.print_kernel = watched
    try:
        with events.recording() as got:
            yield counts
    finally:
        pipeline.print_kernel = emit
    libraries = {e.fields["report"].library for e in got if e.kind == "graph"} - {""}
    if texts:
        counts |= {"kernels": len(texts), "contractions": sum(texts.values())}
    if libraries:
        counts["bytes"] = sum(Path(path).stat().st_size for path in libraries)


def suite(args: argparse.Namespace) -> list[Row]:
    rows = load_rows(args.out, "compile") if args.resume else []
    for model in args.models:
        if any(r["model"] == model for r in rows):
            continue
        row: Row = {"model": model}
        for compiler in ("torchsmith", "torch.compile"):
            if compiler not in ("torchsmith", *args.peers):
                continue
            with tempfile.TemporaryDirectory() as cache:
                env = {"TORCHSMITH_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                case = {"suite": "compile", "model": model, "compiler": compiler}
                row[compiler] = {state: child(case, env, timeout=900) for state in args.states}
        rows.append(row)
        print(table([row]).split("\n")[2], flush=True)
        save(args.out, "compile", rows, table(rows), NOTE)
    return rows


def table(rows: list[Row]) -> str:
    columns = [(c, s) for c in ("torchsmith", "torch.compile") for s in ("cold", "warm")]
    titles = ["model", *(f"{c} {s}: CPU s (wall)" for c, s in columns), "cold ratio", "kernels (that multiply)", "library, KB"]
    out = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    ratios = []
    for r in rows:
        got = {(c, s): r.get(c, {}).get(s) or {"error": "-"} for c, s in columns}
        cells = [f"{v['cpu']:.2f} ({v['wall']:.2f})" if "cpu" in v else v["error"][-60:] for v in got.values()]
        ours, theirs = got["torchsmith", "cold"].get("cpu"), got["torch.compile", "cold"].get("cpu")
        ratios += [theirs / ours] if ours and theirs else []
        out.append("| " + " | ".join([r["model"], *cells, f"{theirs / ours:.1f}" if ours and theirs else "-", *_made(r)]) + " |")
    out.append(f"| geomean | | | | | {geomean(ratios):.2f} (of {len(ratios)}) |" if ratios else "| geomean | | | | | - |")
    return "\n".join([*out, "", *(_bar(r) for r in rows if r["model"] in BARS)])


def _made(r: Row) -> list[str]:
    cold = r.get("torchsmith", {}).get("cold", {})
    if "kernels" not in cold:
        return ["-", "-"]
    return [f"{cold['kernels']} ({cold['contractions']})", f"{cold.get('bytes', 0) / 1000:.0f}"]


def _bar(r: Row) -> str:
    """Whether a model keeps its bars of CPU seconds, contraction kernels and library size."""
    cold, bars = r.get("torchsmith", {}).get("cold", {}), BARS[r["model"]]
    got = [cold.get(k) for k in ("cpu", "contractions", "bytes")]
    marks = [f"{g} of {bar} {what}{'' if g is not None and g <= bar else ' MISSED'}"
             for g, bar, what in zip(got, bars, ("CPU s", "contraction kernels", "bytes"), strict=True)]  # fmt: skip
    return f"- {r['model']}: {', '.join(marks)}"
