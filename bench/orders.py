"""The XLA document's training step on its ten models, in every order that programs write it in: how many graphs, how many compilations.

    python bench/orders.py [--only REGEX ...] [--ways document item ...] [--steps 200] [--rows FILE] [--out FOLDER]

Ways: `document` (forward, loss, backward, optimizer.step(), as typed), `item` (returns loss.item()), zero_grad `first`, `between` forward
and backward, or `last`, and `cosine`: Adam under a cosine schedule for --steps steps. A way holds where `torchsmith.explain` and every call
show one graph without a break or a fallback, where two steps (SGD with momentum; the optimizer's state is made in the first) take at most
two compilations, all steps of `cosine` too, and where after two steps all parameters as one vector are not more than twice as far from
float64's as eager's are, or 1e-5 (1e-1 under Adam, for whose first steps a gradient that is rounding alone is as good as any), in parts of
the way that they went; bench/steps.py looks closer. Images are 64 x 64 where the model takes them, so that many steps are affordable.
With --rows the table is of all rows in that file, to which this run's are added: models can be run in pieces.
In: nothing. Out: a table on stdout and bench/results/orders.md; exit status 1 where a way does not hold.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(1, str(HERE.parent / "tests" / "cpu"))

from suites.harness import about  # noqa: E402  (the script's own folder comes first)

from models import MODELS, inputs_of, make_model  # noqa: E402

HEAD = "| model | way | graphs | breaks and fallbacks | compilations | steps | error | eager's | seconds | |"


def loss_of(model: Any, data: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    pred = model(data)
    pred = pred if isinstance(pred, Tensor) else pred[1]
    return pred, F.cross_entropy(pred, target)


def document(model: Any, data: Tensor, target: Tensor, optimizer: Any) -> Tensor:
    loss_fn = torch.nn.CrossEntropyLoss()
    pred = model(data)
    pred = pred if isinstance(pred, Tensor) else pred[1]
    loss = loss_fn(pred, target)
    loss.backward()
    optimizer.step()
    return pred


def item(model: Any, data: Tensor, target: Tensor, optimizer: Any) -> float:
    _, loss = loss_of(model, data, target)
    loss.backward()
    optimizer.step()
    return loss.item()


def first(model: Any, data: Tensor, target: Tensor, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    _, loss = loss_of(model, data, target)
    loss.backward()
    optimizer.step()
    return loss


def between(model: Any, data: Tensor, target: Tensor, optimizer: Any) -> Tensor:
    _, loss = loss_of(model, data, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def last(model: Any, data: Tensor, target: Tensor, optimizer: Any) -> Tensor:
    _, loss = loss_of(model, data, target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


STEPS: dict[str, Callable[..., Any]] = {
    "document": document, "item": item, "first": first, "between": between, "last": last, "cosine": first,
}  # fmt: skip


def batch_of(name: str, number: int) -> tuple[Tensor, Tensor]:
    (data, *_) = inputs_of(name, 2, number)
    if data.dim() == 4 and name != "timm_vision_transformer":
        data = data[..., :64, :64].contiguous()
    elif data.dim() == 2:
        data = data[:, :32].contiguous()
    return data, torch.randint(0, 700, (2,))


def far(a: nn.Module, b: nn.Module) -> float:
    """The distance of two models' parameters, as one vector."""
    rows = zip(a.parameters(), b.parameters(), strict=True)
    return float(sum((p.detach().double() - q.detach().double()).square().sum() for p, q in rows)) ** 0.5


def run_case(name: str, way: str, steps: int) -> dict[str, Any]:
    import torchsmith
    from torchsmith.events import recording

    began, step, is_long = time.perf_counter(), STEPS[way], way == "cosine"
    start = make_model(name).train()
    ours, eager, exact = copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start).double()
    runs = []
    for model, fn in ((ours, torchsmith.compile(step)), (eager, step), (exact, step)):
        kind, options = (torch.optim.Adam, {"lr": 1e-4}) if is_long else (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9})
        optimizer: Any = kind(model.parameters(), **options)  # type: ignore[arg-type]
        runs.append((model, fn, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200) if is_long else None))
    with recording() as got:
        for number in range(steps if is_long else 2):
            torch.manual_seed(number)
            args = batch_of(name, number % 4)
            for model, fn, optimizer, schedule in runs[: 3 if number < 2 else 1]:
                torch.manual_seed(1000 + number)
                data = args[0].double() if model is exact and args[0].is_floating_point() else args[0]
                fn(model, data, args[1], optimizer)
                if schedule is not None:
                    schedule.step()
            if number == 1:
                way_gone = far(start, exact)
                error, eagers = far(ours, exact) / way_gone, far(eager, exact) / way_gone
    seen = [f"{e.kind} {e.fields.get('code')} {e.fields.get('detail') or ''}" for e in got if e.kind in ("graph_break", "fallback")]
    compilations = sum(e.kind == "graph" for e in got)
    model, _, optimizer, _ = runs[0]
    graphs, breaks = 1, 0
    if way == "document":
        said = torchsmith.explain(step)(model, *args, optimizer)
        graphs, breaks = len(said.graphs), len(said.breaks) + len(said.fallbacks)
    roads = {e.fields["report"].road for e in got if e.kind == "graph"}
    is_close = error <= max(2 * eagers, 0.1 if is_long else 1e-5)
    holds = not seen and not breaks and graphs == 1 and compilations <= 2 and roads == {"native"} and is_close
    return {
        "name": name, "way": way, "graphs": graphs, "codes": sorted(set(seen))[:3], "compilations": compilations,
        "steps": steps if is_long else 2, "error": error, "eagers": eagers, "seconds": time.perf_counter() - began, "holds": holds,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    if row.get("failed"):
        return f"| {row['name']} | {row['way']} | | | | | | | | ERROR {row['failed']} |"
    cells = (row["name"], row["way"], row["graphs"], "; ".join(row["codes"]).replace("|", "/")[:200], row["compilations"], row["steps"],
             f"{row['error']:.1e}", f"{row['eagers']:.1e}", f"{row['seconds']:.0f}", "ok" if row["holds"] else "MISSED")  # fmt: skip
    return "| " + " | ".join(str(c) for c in cells) + " |"


def child(name: str, way: str, steps: int) -> dict[str, Any]:
    """One case in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, str(Path(__file__)), "--case", name, way, "--case-out", str(out), "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if out.exists():
            return json.loads(out.read_text())  # type: ignore[no-any-return]
        said = done.stderr.strip().split("\n")[-1][:300]
        return {"name": name, "way": way, "failed": f"{said} ({done.returncode})".replace("|", "/")}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="*", default=[], metavar="REGEX")
    p.add_argument("--ways", nargs="+", default=list(STEPS), choices=list(STEPS))
    p.add_argument("--steps", type=int, default=200, help="of the cosine schedule")
    p.add_argument("--out", type=Path, default=HERE / "results")
    p.add_argument("--rows", type=Path)
    p.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    p.add_argument("--case-out", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    warnings.simplefilter("ignore")
    if args.case:
        args.case_out.write_text(json.dumps(run_case(*args.case, args.steps)))
        return 0
    print(HEAD, flush=True)
    rows = []
    for name in MODELS:
        if args.only and not any(re.search(o, name) for o in args.only):
            continue
        for way in args.ways:
            rows.append(child(name, way, args.steps))
            print(line(rows[-1]), flush=True)
            if args.rows:
                with args.rows.open("a") as f:
                    f.write(json.dumps(rows[-1]) + "\n")
    if args.rows and args.rows.exists():
        known = {(r["name"], r["way"]): r for r in map(json.loads, args.rows.read_text().splitlines())}
        rows = sorted(known.values(), key=lambda r: (MODELS.index(r["name"]), list(STEPS).index(r["way"])))
    good = sum(bool(r.get("holds")) for r in rows)
    args.out.mkdir(parents=True, exist_ok=True)
    rule = "|---" * (HEAD.count("|") - 1) + "|"
    about_it = about() | {"command": f"python bench/orders.py --steps {args.steps}"}
    facts = [f"- {k}: {v}" for k, v in about_it.items()]
    title = "# The training step in every order"
    text = "\n".join([title, "", *facts, "", f"{good} of {len(rows)} hold.", "", HEAD, rule, *map(line, rows), ""])
    (args.out / "orders.md").write_text(text)
    print(f"{good} of {len(rows)} hold: {args.out / 'orders.md'}")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
