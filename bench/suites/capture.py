"""What capture costs: the time from a call to its graph, what a break adds to a call, a first call that compiles in the background."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from .harness import Row, child, load_rows, save

NOTE = (
    "Traces: CPU milliseconds from the call of `capture` to its graph and guards, under no_grad, median (least) of the repeats; the two "
    "depths of a model interleaved in one process. Breaks: CPU microseconds a call, least of nine bursts; the cost is what the call takes "
    "longer than the same tensor code without a break. Background: first call over eager's, median of fresh copies."
)
BARS = {"BERT-base": 150, "Llama, 12 layers": 200, "resnet50": 120}  # CPU ms
BREAK_BAR, GRAPHS_BAR, FIRST_BAR = 10, 3, 1.2  # us a call; graphs of a loop; times eager's


def traces() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    """Models with small numbers in them: capture's time does not know of sizes."""
    import torch

    from models import torchvision_models

    torchvision_models()

    def llama(n: int) -> tuple[Any, dict[str, Any]]:
        import transformers

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
        config = transformers.LlamaConfig(num_hidden_layers=n, max_position_embeddings=64, **sizes)
        return transformers.LlamaModel(config).eval(), {"input_ids": torch.randint(0, 99, (1, 16)), "use_cache": False}

    def bert(n: int) -> tuple[Any, dict[str, Any]]:
        import transformers

        config = transformers.BertConfig(hidden_size=48, num_hidden_layers=n, intermediate_size=64, vocab_size=100)
        return transformers.BertModel(config).eval(), {"input_ids": torch.randint(0, 99, (1, 16))}

    def encoder(n: int) -> tuple[Any, dict[str, Any]]:
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        return torch.nn.TransformerEncoder(layer, n, enable_nested_tensor=False).eval(), {"src": torch.randn(2, 8, 32)}

    def resnet() -> tuple[Any, dict[str, Any]]:
        return torchvision_models().resnet50(weights=None).eval(), {"x": torch.randn(1, 3, 64, 64)}

    return {
        "BERT-base": lambda: bert(12), "BERT, 48 layers": lambda: bert(48), "Llama, 12 layers": lambda: llama(12),
        "Llama, 48 layers": lambda: llama(48), "nn.TransformerEncoder, 12 layers": lambda: encoder(12),
        "nn.TransformerEncoder, 48 layers": lambda: encoder(48), "resnet50": resnet,
    }  # fmt: skip


GROUPS = (("BERT-base", "BERT, 48 layers"), ("Llama, 12 layers", "Llama, 48 layers"),
          ("nn.TransformerEncoder, 12 layers", "nn.TransformerEncoder, 48 layers"), ("resnet50",))  # fmt: skip


def trace_times(names: list[str], repeats: int) -> Row:
    import torch

    from torchsmith.capture.start import capture

    made = {n: traces()[n]() for n in names}
    times: dict[str, list[float]] = {n: [] for n in names}
    with torch.no_grad():
        for turn in range(repeats + 1):
            for n, (model, kwargs) in made.items():
                start = time.process_time()
                got = capture(model.forward.__func__, (model,), kwargs)
                if turn:  # the first fills tables
                    times[n].append((time.process_time() - start) * 1e3)
                nodes = len(got.graph.graph.nodes)
                made[n] = model, kwargs
                times.setdefault(f"{n} nodes", []).append(nodes)
    return {n: {"ms": statistics.median(times[n]), "least": min(times[n]), "nodes": times[f"{n} nodes"][0]} for n in names}


def break_programs() -> dict[str, tuple[Any, Any]]:
    """By name: a function with a break, and the same tensor code without it."""
    import torch

    import torchsmith

    @torchsmith.compiler.disable
    def note() -> None:
        return None

    def free(x: Any) -> Any:
        return (x + 1) * 2

    def a_call(x: Any) -> Any:
        y = x + 1
        note()
        return y * 2

    def a_branch(x: Any) -> Any:
        y = x + 1
        if y.sum() > -1e9:
            return y * 2
        return y * 3

    def deeper(x: Any) -> Any:
        return a_call(x.sin()).cos()

    def deeper_free(x: Any) -> Any:
        return free(x.sin()).cos()

    def deepest(x: Any) -> Any:
        return deeper(x + 0.5) * 3

    def deepest_free(x: Any) -> Any:
        return deeper_free(x + 0.5) * 3

    def in_with(x: Any) -> Any:
        with torch.no_grad():
            y = x + 1
            note()
            return y * 2

    def in_try(x: Any) -> Any:
        try:
            y = x + 1
            note()
            return y * 2
        except ValueError:
            return x

    return {
        "a call of a function that is not compiled": (a_call, free), "if on a tensor's value": (a_branch, free),
        "in a function that is called": (deeper, deeper_free), "two calls deep": (deepest, deepest_free),
        "in with": (in_with, free), "in try": (in_try, free),
    }  # fmt: skip


def break_costs() -> Row:
    import torch

    import torchsmith
    from torchsmith.debug.explain import explanation
    from torchsmith.events import recording

    x = torch.randn(8)

    def cost(fn: Callable[[Any], Any], n: int = 2000) -> float:
        for _ in range(3):
            fn(x)
        found = []
        for _ in range(9):
            start = time.process_time()
            for _ in range(n):
                fn(x)
            found.append((time.process_time() - start) / n * 1e6)
        return min(found)

    rows: Row = {}
    with torch.no_grad():
        for name, (fn, free) in break_programs().items():
            with recording() as events:
                with_break = cost(torchsmith.compile(fn))
            graphs = explanation(events).graph_count
            rows[name] = {"us": with_break, "without": cost(torchsmith.compile(free)), "eager": cost(fn), "graphs": graphs}

        @torchsmith.compiler.disable
        def note() -> None:
            return None

        def loop(x: Any) -> Any:
            for _ in range(1000):
                x = x + 1
                note()
            return x

        with recording() as events:
            us = cost(torchsmith.compile(loop), 2)
        graphs = explanation(events).graph_count
        rows["1,000 times in a loop"] = {"us": us, "without": 0.0, "eager": cost(loop, 2), "graphs": graphs, "times": 1000}
    return rows


def first_calls(repeats: int) -> Row:
    """BERT's first call, compiled in the background, over eager's call; wall and the calling thread's CPU time."""
    import copy

    import torch

    import torchsmith
    from torchsmith.capture import background

    model, kwargs = traces()["BERT-base"]()
    ratios: dict[str, list[float]] = {"wall": [], "cpu": [], "second wall": [], "second cpu": []}

    def timed(call: Callable[..., Any]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.thread_time()
        call(**kwargs)
        return time.perf_counter() - wall, time.thread_time() - cpu

    with torch.no_grad():
        torchsmith.compile(lambda x: x + 1, options={"background": True})(torch.ones(2))
        background.wait()
        for _ in range(repeats):
            fresh = copy.deepcopy(model)
            compiled = torchsmith.compile(fresh, options={"background": True})
            eager = [timed(fresh) for _ in range(3)]
            wall, cpu = (statistics.median(t[k] for t in eager) for k in (0, 1))
            first, second = timed(compiled), timed(compiled)
            for name, value in zip(ratios, (first[0] / wall, first[1] / cpu, second[0] / wall, second[1] / cpu), strict=True):
                ratios[name].append(value)
            background.wait()
    return {k: statistics.median(v) for k, v in ratios.items()}


def run_case(case: dict[str, Any]) -> Row:
    if case["what"] == "trace":
        return trace_times(case["names"], case["repeats"])
    return break_costs() if case["what"] == "breaks" else first_calls(case["repeats"])


def suite(args: argparse.Namespace) -> list[Row]:
    repeats = 2 if args.quick else 9
    rows = load_rows(args.out, "capture") if args.resume else []
    cases: list[Row] = [{"what": "trace", "names": list(g), "repeats": repeats} for g in GROUPS]
    cases += [{"what": "breaks"}, {"what": "background", "repeats": repeats}]
    for case in cases:
        if any(r["case"] == case for r in rows):
            continue
        row = {"case": case, "found": child({"suite": "capture", **case}, timeout=900)}
        rows.append(row)
        print(table([row]), flush=True)
    save(args.out, "capture", rows, table(rows), NOTE)
    return rows


def table(rows: list[Row]) -> str:
    out: list[str] = []
    out += [f"failed: {r['case']}: {r['found']['error']}\n" for r in rows if "error" in r["found"]]
    rows = [r for r in rows if "error" not in r["found"]]
    found = {r["case"]["what"]: r["found"] for r in rows if r["case"]["what"] != "trace"}
    traced = [r["found"] for r in rows if r["case"]["what"] == "trace"]
    if traced:
        out += ["| trace to graph | CPU ms (least) | bar | nodes | over 12 layers |", "|---|---|---|---|---|"]
    for group in traced:
        first = next(iter(group.values()))
        for n, r in group.items():
            deep = f"{r['ms'] / first['ms']:.2f} (bar 2)" if r is not first else ""
            out.append(f"| {n} | {r['ms']:.0f} ({r['least']:.0f}) | {BARS.get(n, '')} | {r['nodes']} | {deep} |")
    if "breaks" in found:
        title = f"a break (bar: {BREAK_BAR} us a call; {GRAPHS_BAR} graphs of a loop)"
        out += ["", f"| {title} | us | without | cost us | eager us | graphs |", "|---" * 6 + "|"]
        for n, r in found["breaks"].items():
            times = r.get("times", 1)
            cost = (r["us"] - r["without"]) / times
            cells = [n, f"{r['us']:.2f}", f"{r['without']:.2f}", f"{cost:.2f}", f"{r['eager']:.2f}", str(r["graphs"])]
            out.append("| " + " | ".join(cells) + " |")
    if "background" in found:
        r = found["background"]
        out += ["", f"| BERT compiled in the background, over eager (bar: {FIRST_BAR}) | wall | thread's CPU |", "|---|---|---|"]
        out += [f"| first call | {r['wall']:.2f} | {r['cpu']:.2f} |"]
        out += [f"| second, while it compiles | {r['second wall']:.2f} | {r['second cpu']:.2f} |"]
    return "\n".join(out)
