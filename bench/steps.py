"""Training steps beside eager and float64: the ten models, and the small ones of other kinds (bench/training_cases.py).

    python bench/steps.py [--only REGEX ...] [--ways whole attached] [--out FOLDER]

`whole` compiles the step (forward, loss, backward, optimizer) and `attached` the model alone, whose loss and backward() stay outside.
Every step starts from eager's state. What it leaves (parameters, gradients, buffers, the optimizer's state, results) is compared with the
same step in float64, each kind as one vector: |ours - float64| <= 2 x |eager - float64| + 4 eps x |float64|. The table has the worst of
these ratios (below 1 holds), and the worst single tensor's. In: nothing. Out: a table on stdout and bench/results/steps.md; exit status 1
where something misses the bar or differs, or where a whole step is neither one graph nor has a code.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(1, str(HERE.parent / "tests" / "cpu"))

from suites.harness import about  # noqa: E402  (the script's own folder comes first)
from training_cases import CASES, TIMED, case_of  # noqa: E402
from training_harness import difference, triples  # noqa: E402

from models import MODELS  # noqa: E402

WAYS = ("whole", "attached")
STEPS = 3
HEAD = "| what | way | graphs | codes | extern calls | worst kind | of the bar | worst tensor | of the bar | seconds | |"


class Parts:
    """A model whose own modules are compiled, for steps that call those."""

    def __init__(self, model: nn.Module, compile: Callable[[nn.Module], Any]) -> None:
        self.model, self.made = model, {name: compile(m) for name, m in model.named_children()}

    def __getattr__(self, name: str) -> Any:
        return self.made[name] if name in self.made else getattr(self.model, name)


def run_case(name: str, way: str) -> dict[str, Any]:
    import torchsmith
    from torchsmith.debug.explain import explanation
    from torchsmith.events import recording

    case, began = case_of(name), time.perf_counter()

    def run(model: nn.Module) -> Callable[..., Any]:
        if way == "whole":
            return torchsmith.compile(case.step)  # type: ignore[no-any-return]
        has_forward = type(model).forward is not nn.modules.module._forward_unimplemented
        instead: Any = torchsmith.compile(model) if has_forward else Parts(model, torchsmith.compile)
        return lambda m, *rest: case.step(instead, *rest)

    def batches() -> Iterator[tuple[Any, ...]]:
        for n in range(2 if name in MODELS else STEPS):
            torch.manual_seed(100 + n)
            yield case.batch()

    errors: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    worst, why = ("", 0.0), ""
    with recording() as got:
        for what, a, b, c in triples(case.model, case.make, case.step, batches(), run):
            why = why or (f"{what}: {d}" if (d := difference(a, b)) else "")
            if not why and isinstance(b, Tensor) and b.is_floating_point() and b.numel():
                ours, eagers, size = (float(t.double().norm()) for t in (a.detach() - c.detach(), b.detach() - c.detach(), c.detach()))
                for kind, value in zip((0, 1, 2), (ours, eagers, size), strict=True):
                    errors[kind_of(what)][kind] += value**2
                worst = max(worst, (what, of_bar(ours, eagers, size)), key=lambda w: w[1])
    e = explanation(got)
    kinds = {k: of_bar(*(x**0.5 for x in v)) for k, v in errors.items()}
    kind = max(kinds, key=lambda k: kinds[k]) if kinds else ""
    codes = [str(r) for r in (*e.breaks, *e.fallbacks)]
    return {
        "name": name, "way": way, "graphs": len(e.graphs), "codes": sorted(set(codes)), "externs": sorted(set(e.extern_calls)), "why": why,
        "kind": kind, "ratio": kinds.get(kind, 0.0), "worst": worst, "native": all(g.road == "native" for g in e.graphs),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def kind_of(what: str) -> str:
    step, _, name = what.partition(": ")
    for start, kind in (("optimizer", "optimizer"), ("result", "results")):
        if name.startswith(start):
            return f"{step}: {kind}"
    return f"{step}: {'gradients' if name.endswith('.grad') else 'state'}"


def of_bar(ours: float, eager: float, size: float) -> float:
    """Our error as a part of what is allowed."""
    bar = 2 * eager + 4 * torch.finfo(torch.float32).eps * size + 1e-12
    return ours / bar if ours == ours else float("inf")


def holds(row: dict[str, Any]) -> bool:
    return not row.get("error") and not row["why"] and row["ratio"] <= 1 and (row["native"] or bool(row["codes"]))


def line(row: dict[str, Any]) -> str:
    if row.get("error"):
        return f"| {row['name']} | {row['way']} | | | | | | | | | ERROR {row['error']} |"
    codes = " ".join(sorted({c[c.index("[") + 1 : c.index("]")] for c in row["codes"]}))
    worst = row["worst"]
    externs = " ".join(x.replace("aten.", "") for x in row["externs"])
    cells = (row["name"], row["way"], row["graphs"], codes, externs, row["kind"], f"{row['ratio']:.2f}", worst[0],
             f"{worst[1]:.2f}", f"{row['seconds']:.0f}", row["why"] or ("ok" if holds(row) else "MISSED"))  # fmt: skip
    return "| " + " | ".join(str(c) for c in cells) + " |"


def child(name: str, way: str) -> dict[str, Any]:
    """One case in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, str(Path(__file__)), "--case", name, way, "--case-out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if out.exists():
            return json.loads(out.read_text())  # type: ignore[no-any-return]
        said = done.stderr.strip().split("\n")[-1][:300]
        return {"name": name, "way": way, "error": f"{said} ({done.returncode})".replace("|", "/")}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="*", default=[], metavar="REGEX")
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    p.add_argument("--out", type=Path, default=HERE / "results")
    p.add_argument("--inline", action="store_true", help="in this process, errors with their tracebacks")
    p.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    p.add_argument("--case-out", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.case:
        warnings.simplefilter("ignore")
        args.case_out.write_text(json.dumps(run_case(*args.case)))
        return 0
    names = [n for n in (*CASES, *TIMED, *MODELS) if not args.only or any(re.fullmatch(r, n) for r in args.only)]
    rows = []
    print(HEAD, flush=True)
    for name in names:
        for way in args.ways:
            rows.append(run_case(name, way) if args.inline else child(name, way))
            print(line(rows[-1]), flush=True)
            for code in rows[-1].get("codes", ()):
                print(f"    {code}", flush=True)
    good = sum(map(holds, rows))
    whole = [r for r in rows if r["way"] == "whole" and not r.get("error")]
    one = sum(not r["codes"] and r["native"] for r in whole)
    said = [f"{good} of {len(rows)} hold; {one} of {len(whole)} whole steps are native graphs, one per state of the optimizer, no code."]
    args.out.mkdir(parents=True, exist_ok=True)
    facts = about() | {"command": "python bench/steps.py"}
    codes = [f"- {r['name']}, {r['way']}: {c}" for r in rows for c in r.get("codes", ())]
    head = ["# bench/steps.py", "", *(f"- {k}: {v}" for k, v in facts.items()), "", *said, ""]
    body = [*head, HEAD, "|---" * 11 + "|", *map(line, rows), "", *codes]
    (args.out / "steps.md").write_text("\n".join([*body, ""]))
    print(said[0])
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
