"""One model layer by layer: our launches beside ONNX Runtime's and OpenVINO's nodes.

In: --layers MODEL, --batches, --threads. Out: a table on stdout and <out>/layers_MODEL_bN.md. The spine is the model's own list of
contractions (bench/shapes.py). Every runtime's contractions are laid along it: first by the size of their result, in order, then by order
alone. What is no contraction is summed by kind. A launch too small for a second thread is not timed in ours: the whole call's time says how
much is missing. Profiling slows every runtime a little; compare layers, and take whole-model figures from `seeds`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .harness import Row, about

ROUNDS, WARM = 9, 2
CONTRACTING = {
    "ours": re.compile(r"^contraction|\b(addmm|mm|mv|bmm|baddbmm|convolution)\b"),  # products may be plain loops, or grouped
    "onnxruntime": re.compile(r"Conv|Gemm|MatMul"),
    "openvino": re.compile(r"^(Convolution|FullyConnected|MatMul|GroupConvolution|Deconvolution)$"),
}
Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One timed step of a runtime. `size`: (rows, columns) of its result where known, columns in sixteens."""

    kind: str
    ms: float
    size: Size | None
    note: str = ""
    taps: int | None = None  # of a convolution's window, where known


Rounds = list[list[Node]]
Taker = tuple[Callable[[], Any], Callable[[], Rounds]]  # run once; what the runs so far took


def suite(args: argparse.Namespace) -> list[Row]:
    import peers
    import torch

    torch.set_num_threads(args.threads)
    peers.THREADS = args.threads
    for batch in args.batches:
        text = compare(args.layers, batch, [p for p in ("onnxruntime", "openvino") if p in args.peers], args.threads)
        print(text, flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"layers_{args.layers}_b{batch}.md").write_text(text + "\n")
    return []


def compare(name: str, batch: int, others: Sequence[str], threads: int) -> str:
    from peak import peak

    from models import inputs_of, make_model

    model, inputs = make_model(name), inputs_of(name, batch)
    makers: dict[str, Callable[[], Taker]] = {
        "ours": lambda: _ours(model, inputs), "onnxruntime": lambda: _onnxruntime(model, inputs, threads),
        "openvino": lambda: _openvino(model, inputs, threads),
    }  # fmt: skip
    takers = {who: makers[who]() for who in ("ours", *others)}
    for _ in range(WARM + ROUNDS):  # in turns: the clock drifts
        for run, _ in takers.values():
            time.sleep(0.02)
            run()
    nodes = {who: _medians(collect()[WARM:]) for who, (_, collect) in takers.items()}
    return _text(name, batch, threads, nodes, peak("float32", threads))


def _medians(rounds: Rounds) -> list[Node]:
    """Node by node. A node below the clock's step may be missing in some rounds: those rounds are left out."""
    usual = Counter(len(nodes) for nodes in rounds).most_common(1)[0][0]
    columns = zip(*(nodes for nodes in rounds if len(nodes) == usual), strict=True)
    return [replace(column[0], ms=statistics.median(n.ms for n in column)) for column in columns]


def _size(shape: Sequence[int], channels_at: int) -> Size | None:
    """(rows, columns) of a result; columns in sixteens, since blocked layouts pad them."""
    if not shape:
        return None
    columns = shape[channels_at]
    return math.prod(shape) // max(columns, 1), -(-columns // 16)


# ---------------------------------------------------------------- runtimes
def _ours(model: Any, inputs: Any) -> Taker:
    import torch
    from launches import keeping_graphs, timed_launches

    import torchsmith

    torchsmith.compiler.reset()
    with torch.no_grad(), keeping_graphs() as graphs, timed_launches() as launches:
        torchsmith.compile(model)(*inputs)
    graph, names = graphs[-1], launches[-1]

    rounds: Rounds = []

    def run() -> None:
        with torch.no_grad():
            times = graph.profile()
        if len(times) != len(names):
            raise RuntimeError(f"{len(times)} launches were timed and {len(names)} are known")
        rounds.append([Node(n.kind, 1e3 * t, None, n.what) for n, t in zip(names, times, strict=True)])

    return run, lambda: rounds


def _onnxruntime(model: Any, inputs: Any, threads: int) -> Taker:
    import onnxruntime as ort
    from peers import exported

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.enable_profiling = True
    settings.profile_file_prefix = str(Path(tempfile.mkdtemp(prefix="torchsmith-layers-")) / "ort")
    session = ort.InferenceSession(exported(model, inputs), settings, providers=["CPUExecutionProvider"])
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}

    def collect() -> Rounds:
        rounds: Rounds = []
        seen: set[str] = set()
        for event in json.loads(Path(session.end_profiling()).read_text()):
            if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
                continue
            if not rounds or event["name"] in seen:  # the next run
                rounds.append([])
                seen = set()
            seen.add(event["name"])
            rounds[-1].append(_onnx_node(event["args"], event["dur"] / 1e3))
        return rounds

    return lambda: session.run(None, feed), collect


def _onnx_node(facts: dict[str, Any], ms: float) -> Node:
    def shapes(which: str) -> list[list[int]]:
        return [next(iter(entry.values()), []) for entry in facts.get(which) or []]

    is_conv = "Conv" in facts["op_name"]
    weights = shapes("input_type_shape")[1:2] if is_conv else []
    taps = math.prod(weights[0][2:]) if weights else None
    return Node(facts["op_name"], ms, _size(next(iter(shapes("output_type_shape")), []), 1 if is_conv else -1), "", taps)


def _openvino(model: Any, inputs: Any, threads: int) -> Taker:
    import openvino as ov
    from peers import openvino_model

    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "PERF_COUNT": True}
    compiled = ov.Core().compile_model(openvino_model(model, inputs), "CPU", settings)
    request = compiled.create_infer_request()
    feed = [t.numpy() for t in inputs]
    shapes = {}
    for node in compiled.get_runtime_model().get_ordered_ops():
        if node.get_output_size() and node.get_output_partial_shape(0).is_static:
            shapes[node.get_friendly_name()] = list(node.get_output_shape(0))

    rounds: Rounds = []

    def run() -> None:
        request.infer(feed, share_inputs=True)
        rounds.append([])
        for info in request.get_profiling_info():
            ms, is_conv = info.real_time.total_seconds() * 1e3, "Conv" in info.node_type
            if ms > 0:
                size = _size(shapes.get(info.node_name, []), 1 if is_conv else -1)
                rounds[-1].append(Node(info.node_type, ms, size, info.exec_type, 1 if is_conv and "1x1" in info.exec_type else None))

    return run, lambda: rounds


# ---------------------------------------------------------------- laying side by side
def _is_contraction(who: str, kind: str) -> bool:
    return CONTRACTING[who].search(kind) is not None


def align(wanted: Sequence[tuple[Size | None, int | None]], nodes: Sequence[Node]) -> list[Node | None]:
    """For each wanted result (and its taps) a node: equal sizes in order first, the rest in order."""
    left = list(nodes)
    found: list[Node | None] = [None] * len(wanted)
    for i, (size, taps) in enumerate(wanted):
        match = next((n for n in left if n.size == size and (n.taps is None or taps is None or n.taps == taps)), None)
        if match is not None:
            found[i] = match
            left.remove(match)
    for i in (i for i, n in enumerate(found) if n is None):
        if left and sum(n is None for n in found[i:]) <= len(left):
            found[i] = left.pop(0)
    return found


def _text(name: str, batch: int, threads: int, nodes: dict[str, list[Node]], top: float) -> str:
    from shapes import of_model

    spine = [s for s in of_model(name, batch) if s.kind != "bmm"]
    wanted = [(_size(s.result, 1 if s.kind == "conv" else -1), math.prod(s.w[2:]) if s.kind == "conv" else None) for s in spine]
    columns = {}
    for who, found in nodes.items():
        products = [n for n in found if _is_contraction(who, n.kind)]
        columns[who] = align(wanted, products)
    others = [who for who in nodes if who != "ours"]
    titles = ["layer", "MFLOP", *(f"{who} ms" for who in nodes), "ours % of peak", "lost to the best, ms", "our tile"]
    out = [f"# {name}, batch {batch}, {threads} threads, peak {top:.0f} GFLOP/s, {about()['date']}, {about()['commit']}", ""]
    out += ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    merged: dict[str, list[Any]] = {}
    for i, s in enumerate(spine):
        times = [columns[who][i] for who in nodes]
        row = merged.setdefault(s.name, [0, s.flops / 1e6, [0.0] * len(nodes), ""])
        row[0] += 1
        row[2] = [t + (n.ms if n else math.nan) for t, n in zip(row[2], times, strict=True)]
        row[3] = times[0].note if times[0] else row[3]
    lost = 0.0
    for layer, (count, mflop, times, note) in merged.items():
        best = min([t for t in times[1:] if t == t], default=math.nan)
        behind = times[0] - best
        lost += max(behind, 0) if behind == behind else 0
        share = f"{100 * count * mflop / times[0] / top:.0f}" if times[0] == times[0] else "-"
        cells = [f"{count} x {layer}", f"{count * mflop:.0f}", *(f"{t:.3f}" for t in times), share, f"{behind:+.3f}", note]
        out.append("| " + " | ".join(cells) + " |")
    out += ["", f"Layers where a peer is faster cost {lost:.2f} ms together.", ""]
    out += [_rest(who, found, [n for n in columns[who] if n]) for who, found in nodes.items()]
    return "\n".join([*out, *([] if others else ["no peers"])])


def _rest(who: str, nodes: Sequence[Node], used: Sequence[Node]) -> str:
    """What is no matched contraction, by kind."""
    kinds: Counter[str] = Counter()
    taken = {id(n) for n in used}
    for n in nodes:
        if id(n) not in taken:
            kinds[n.kind] += n.ms
    listed = ", ".join(f"{kind} {ms:.3f}" for kind, ms in kinds.most_common(14))
    return f"- {who}: {sum(n.ms for n in nodes):.3f} ms in all, {sum(n.ms for n in used):.3f} in the layers above; the rest: {listed}"
