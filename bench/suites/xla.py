"""The XLA document's two tables: the bridge (`backend="openxla"`) against tracing on every call, eager, and our own compiler.

On a GPU, all of it in four minutes: models and kinds prepare side by side and measure one after the other. It needs jax with its CUDA
plugin, and torchax, a wheel without dependencies that we need:

    pip download --no-deps -d .whl torchax==0.0.13                        # where there is a network
    pip install --no-deps --no-index --find-links .whl torchax            # there
    python bench/run.py --suite xla --device cuda --batches 1 --pairs 4 --jobs 20 --limit 225 --seconds 230
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

from paired import Protocol, compare, geomean

from .harness import Row, Turns, keep, run_by_kind, table_by_kind

KINDS = ("inference", "training")
WHO = ("lazy", "eager", "native")
STEPS = 20
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
    "(forward, loss, backward, SGD with weight decay); `programs` is the number of XLA programs that one step became, with codes of what "
    "torch ran. losses off: over 20 steps from one start with eager's draws, the largest difference of the bridge's loss from eager's, "
    "over the largest loss; twin's: that of eager from itself with weights moved by 1e-7."
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


def steps_of(name: str, model: Any, inputs: Any) -> Callable[..., Callable[[], Any]]:
    """(how, moved) -> a call of one training step on weights of its own, which gives the prediction; the weights start off by `moved`."""
    import torch

    with torch.no_grad():
        out = model(*inputs)
    out = out if isinstance(out, torch.Tensor) else out[1]
    target = torch.randint(0, out.shape[1], (out.shape[0],), generator=torch.Generator().manual_seed(1)).to(out.device)

    def make(how: Callable[..., Any], moved: float = 0.0) -> Callable[[], Any]:
        own = copy.deepcopy(model).train()
        with torch.no_grad():
            for p in own.parameters():
                p.mul_(1 + moved * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)).to(p.device))
        optimizer = torch.optim.SGD(own.parameters(), lr=1e-4, weight_decay=1e-2)
        step = how(train_model)
        return lambda: step(own, inputs, target, optimizer)

    make.target = target  # type: ignore[attr-defined]
    return make


def losses(call: Callable[[], Any], target: Any) -> list[float]:
    """The losses of the next STEPS steps, with the same draws for every call."""
    import torch

    found = []
    for k in range(STEPS):
        torch.manual_seed(k)
        pred = call()
        found.append(float(torch.nn.functional.cross_entropy(pred.detach().float(), target)))
    return found


def furthest(found: list[float], want: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, want, strict=True)) / max(map(abs, want))


def run_case(case: dict[str, Any]) -> Row:
    import torch

    import torchsmith
    from models import inputs_of, make_model
    from torchsmith import events
    from torchsmith.backends import xla

    model = make_model(case["model"]).to(case["device"])
    inputs = tuple(t.to(case["device"]) for t in inputs_of(case["model"], case["batch"]))
    protocol = Protocol(**case["protocol"])
    called: list[str] = []
    real = xla.program

    def counted(plain: Any) -> Any:
        run = real(plain)
        return lambda *args: (called.append(plain.name), run(*args))[1]

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
        row: Row = {"peers": {}, "failed": []}
        if case["kind"] == "training":
            want = losses(calls["eager"], make.target)
            row["losses"] = {"bridge": furthest(losses(calls["bridge"], make.target), want),
                             "twin": furthest(losses(make(how["eager"], 1e-7), make.target), want), "last": want[-1]}  # fmt: skip
        else:
            calls["bridge"]()
        called.clear()
        calls["bridge"]()
        programs = len(called)
        codes = sorted({e.fields["code"] for e in got if e.kind == "fallback"})
        row |= {"programs": programs, "codes": codes}
        for who in case["who"]:
            done(calls[who], case["device"])()
        with Turns.mine():
            for who in case["who"]:
                row["peers"][who] = compare(*(done(calls[w], case["device"]) for w in ("bridge", who)), protocol).as_dict()
                keep(case, row)
    return row


def done(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The call, until its results are there."""
    import torch

    return call if device == "cpu" else lambda: (call(), torch.cuda.synchronize())


def suite(args: argparse.Namespace) -> list[Row]:
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def case_of(kind: str, model: str, known: Row) -> Row | None:
        who = [w for w in reversed(WHO) if w not in known.get("peers", {})]  # the slowest last
        if model not in DOCUMENT[kind] or not (who or (kind == "training" and "losses" not in known)):
            return None
        return {"suite": "xla", "who": who, "device": device}

    return run_by_kind(args, "xla" if device == "cpu" else "xla_cuda", KINDS, case_of, table, NOTE)


def table(rows: list[Row]) -> str:
    def cells(r: Row) -> list[str]:
        ours, eager, native = (f"{r['peers'][w]['ratio']:.2f}" if w in r["peers"] else "-" for w in WHO)
        said = ", ".join([str(r["programs"]), *r["codes"]])
        losses = f"{r['losses']['bridge']:.0e} / {r['losses']['twin']:.0e}" if "losses" in r else ""
        return [ours, f"{DOCUMENT[r['kind']][r['model']]:.2f}", eager, native, said, losses]

    def means(found: list[Row]) -> list[str]:
        ours, eager, native = (f"{geomean([r['peers'][w]['ratio'] for r in found if w in r['peers']]):.2f}" for w in WHO)
        return [ours, f"{geomean([DOCUMENT[r['kind']][r['model']] for r in found]):.2f}", eager, native, "", ""]

    columns = ("speedup over lazy", "document", "over eager", "over native", "programs", "losses off / twin's")
    return table_by_kind(rows, KINDS, columns, cells, means)
