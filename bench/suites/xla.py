"""The XLA document's two tables: the bridge (`backend="openxla"`) against tracing on every call, eager, and our own compiler."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

from paired import Protocol, compare, geomean

from .harness import Row, child, load_rows, protocol_of, save

KINDS = ("inference", "training")
WHO = ("lazy", "eager", "native")
# The document's own ratios, Dynamo bridge over LazyTensor, on a TPU v4-8.
DOCUMENT = {
    "inference": {"resnet18": 2.59, "resnet50": 2.64, "resnext50_32x4d": 1.91, "alexnet": 1.28, "mobilenet_v2": 18.62, "mnasnet1_0": 2.68,
                  "vgg16": 1.33, "BERT_pytorch": 7.49, "squeezenet1_1": 2.29, "timm_vision_transformer": 3.52},
    "training": {"resnet50": 1.33, "resnet18": 1.33, "BERT_pytorch": 3.07, "resnext50_32x4d": 1.43, "alexnet": 1.12, "mobilenet_v2": 1.4,
                 "mnasnet1_0": 1.19, "vgg16": 0.81, "timm_vision_transformer": 1.87, "squeezenet1_1": 1.41},
}  # fmt: skip
NOTE = (
    "Time of the other over the bridge's, so above 1 the bridge is faster. lazy: the function is captured and functionalised anew on every "
    "call and its XLA program is found by the graph's text, which is what a lazy tensor does; native: torchsmith's own compiler. "
    "document: the same ratio (bridge over lazy) as the XLA document prints it, measured on a TPU v4-8. Training is one whole step "
    "(forward, loss, backward, SGD with weight decay); `programs` is the number of XLA programs it became."
)


def train_model(model: Any, data: Any, target: Any, optimizer: Any) -> Any:
    """As in the document."""
    import torch

    loss_fn = torch.nn.CrossEntropyLoss()
    pred = model(*data)
    pred = pred if isinstance(pred, torch.Tensor) else pred[1]
    loss = loss_fn(pred, target)
    loss.backward()
    optimizer.step()
    return pred


def retraced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, captured on every call; programs are kept by the text of the functional graph."""
    import torchsmith
    from torchsmith.backends import registry, xla

    kept: dict[str, Any] = {}

    def by_text(fg: Any, name: str, **keywords: Any) -> Any:
        if fg.key_text not in kept:
            kept[fg.key_text] = xla.compile_xla(fg, name)
        return kept[fg.key_text]

    backend = registry.Choice("lazy", "functional", by_text)

    def call(*args: Any) -> Any:
        return torchsmith.compile(fn, backend=backend)(*args)

    return call


def steps_of(name: str, model: Any, inputs: Any) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """how -> a call of one training step on weights of its own."""
    import torch

    with torch.no_grad():
        out = model(*inputs)
    out = out if isinstance(out, torch.Tensor) else out[1]
    target = torch.randint(0, out.shape[1], (out.shape[0],), generator=torch.Generator().manual_seed(1)).to(out.device)

    def make(how: Callable[..., Any]) -> Callable[[], Any]:
        own = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(own.parameters(), lr=1e-4, weight_decay=1e-2)
        step = how(train_model)
        return lambda: step(own, inputs, target, optimizer)

    return make


def run_case(case: dict[str, Any]) -> Row:
    import torch

    import torchsmith
    from models import inputs_of, make_model
    from torchsmith import events
    from torchsmith.backends import xla

    model = make_model(case["model"]).to(case["device"])
    inputs = tuple(t.to(case["device"]) for t in inputs_of(case["model"], case["batch"]))
    protocol = Protocol(**case["protocol"])
    programs: list[str] = []
    real = xla.program

    def counted(plain: Any) -> Any:
        programs.append(plain.name)
        return real(plain)

    xla.program = counted
    how: dict[str, Callable[..., Any]] = {
        "bridge": lambda f: torchsmith.compile(f, backend="openxla"), "lazy": retraced, "eager": lambda f: f, "native": torchsmith.compile,
    }  # fmt: skip
    with torch.set_grad_enabled(case["kind"] == "training"), events.recording() as got:
        if case["kind"] == "training":
            make = steps_of(case["model"], model, inputs)
            calls = {who: make(h) for who, h in how.items()}
        else:
            calls = {}
            for who, h in how.items():
                fn = h(model)
                calls[who] = lambda fn=fn: fn(*inputs)
        calls["bridge"]()
        count = len(programs)
        eager = [e.fields["code"] for e in got if e.kind == "fallback"]
        row: Row = {"peers": {}, "failed": [], "programs": count, "codes": sorted(set(eager))}
        for who in case["who"]:
            row["peers"][who] = compare(calls["bridge"], calls[who], protocol).as_dict()
    return row


def suite(args: argparse.Namespace) -> list[Row]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "xla" if device == "cpu" else "xla_cuda"
    rows = load_rows(args.out, name) if args.resume else []
    for kind in KINDS:
        for model in args.models:
            rows = [r for r in rows if "error" not in r or (r["model"], r["kind"]) != (model, kind)]  # a failed row is tried again
            if any(r["model"] == model and r["kind"] == kind for r in rows) or model not in DOCUMENT[kind]:
                continue
            case = {"suite": "xla", "model": model, "batch": args.batches[0], "kind": kind, "who": WHO, "device": device,
                    "protocol": protocol_of(args)}  # fmt: skip
            rows.append({"model": model, "kind": kind, "batch": args.batches[0]} | child(case))
            print(rows[-1].get("error") or {w: round(m["ratio"], 2) for w, m in rows[-1]["peers"].items()}, kind, model, flush=True)
            save(args.out, name, rows, table(rows), NOTE)
    print(table(rows))
    return rows


def table(rows: list[Row]) -> str:
    parts: list[str] = []
    for kind in KINDS:
        found = [r for r in rows if r["kind"] == kind]
        if not found:
            continue
        parts += [f"## {kind}, batch {found[0]['batch']}", ""]
        parts += ["| model | speedup over lazy | document | over eager | over native | programs |", "|---|---|---|---|---|---|"]
        for r in found:
            if "peers" not in r:
                parts.append(f"| {r['model']} | failed: {r.get('error', '')[-200:]} |")
                continue
            cells = [f"{r['peers'][w]['ratio']:.2f}" if w in r["peers"] else "-" for w in WHO]
            said = ", ".join(r["codes"]) or str(r["programs"])
            parts.append(f"| {r['model']} | {cells[0]} | {DOCUMENT[kind][r['model']]:.2f} | {cells[1]} | {cells[2]} | {said} |")
        means = [geomean([r["peers"][w]["ratio"] for r in found if w in r.get("peers", {})]) for w in WHO]
        document = geomean([DOCUMENT[kind][r["model"]] for r in found])
        parts += [f"| geomean | {means[0]:.2f} | {document:.2f} | {means[1]:.2f} | {means[2]:.2f} | |", ""]
    return "\n".join(parts)
