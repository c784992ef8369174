"""docs/backends.md: what each backend was run on here, and with what result.

    python bench/backends.py [--models resnet18 ...] [--batches 1 8] [--backends openxla ...]

In: the backends that `list_backends` names, and ours under torch.compile ("under"). Out: two tables between the two marks in
docs/backends.md: models, and what programs do beyond arithmetic (effects.py). A backend whose package is not installed
gets the message that its use gives; rows of backends that are not asked for stay, with the date of their run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from effects import CASES, run_case  # noqa: E402
from suites.harness import about  # noqa: E402

import torchsmith  # noqa: E402
from models import MODELS, inputs_of, make_model, worst_error  # noqa: E402
from torchsmith import compiler, events  # noqa: E402
from torchsmith.backends import registry  # noqa: E402

PAGE = HERE.parent / "docs" / "backends.md"
UNDER = "under"  # torch.compile(model, backend="torchsmith")
BEGIN, END = "<!-- table: bench/backends.py -->", "<!-- end of table -->"


def compile_for(name: str) -> tuple[Callable[..., Any], str]:
    """Whose compile, and the backend that it is told."""
    return (torch.compile, "torchsmith") if name == UNDER else (torchsmith.compile, name)


def label(name: str) -> str:
    return "`torchsmith` under `torch.compile`" if name == UNDER else f"`{name}`"


def run(name: str, model: Any, inputs: Any) -> tuple[float, float, list[str]]:
    """Error against eager, seconds of the first call, codes of what ran eagerly."""
    with torch.no_grad():
        want = model(*inputs)
        torch.compiler.reset()
        compile, backend = compile_for(name)
        compiled = compile(model, backend=backend)
        began = time.perf_counter()
        with events.recording() as got:
            result = compiled(*inputs)
        took = time.perf_counter() - began
    return worst_error(want, result), took, sorted({e.fields["code"] for e in got if e.kind == "fallback"})


def row_of(name: str, models: list[str], batches: list[int]) -> str:
    row = registry.ROWS["torchsmith" if name == UNDER else name]
    dialect = "PyTorch's graphs" if name == UNDER else row.dialect
    packages = []
    for package in row.needs:
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    try:
        registry.choose(compile_for(name)[1])
    except registry.InvalidBackend as why:
        return f"| {label(name)} | {dialect} | not installed | {why} |"
    worst, codes, slowest, where = 0.0, set(), 0.0, models[0]
    for model in models:
        made = make_model(model)
        for batch in batches:
            error, took, eager = run(name, made, inputs_of(model, batch))
            codes |= set(eager)
            slowest = max(slowest, took)
            if error >= worst:
                worst, where = error, f"{model}, batch {batch}"
            print(f"{name} {model} {batch}: {error:.1e} {took:.1f} s {eager}", flush=True)
    result = f"equal within {worst:.1e} of the maximum ({where})" + (f"; eager: {', '.join(sorted(codes))}" if codes else "")
    return f"| {label(name)} | {dialect} | {', '.join(packages) or 'torchsmith'} | {len(models)} models, batch {' and '.join(map(str, batches))}: {result}; first call at most {slowest:.0f} s; {about()['date'][:10]} |"  # noqa: E501


CODES = (
    "Codes say what ran elsewhere: a break by Python (CAP), operators (BCK005) or the whole graph (BCK002) by torch. GRA010 is no "
    "fallback: a shape was learned by running an operator once."
)


def effects() -> list[str]:
    """The second table."""
    lines = [f"| backend | {' | '.join(CASES)} |", "|---" * (len(CASES) + 1) + "|"]
    for name in [*registry.ROWS, UNDER]:
        if name == UNDER or registry.is_installed(registry.ROWS[name]):
            compile, backend = compile_for(name)
            torch.compiler.reset()
            lines.append(f"| {label(name)} | {' | '.join(str(run_case(backend, case, compile)) for case in CASES)} |")
    return [*lines, "", CODES]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", default=list(MODELS))
    p.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    p.add_argument("--backends", nargs="+", default=[*(n for n in compiler.list_backends(exclude_tags=()) if n in registry.ROWS), UNDER])
    args = p.parse_args()
    facts = about()
    rows = {n: row_of(n, args.models, args.batches) for n in args.backends}
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    first = old.split("| backend |")[1]
    kept = {line.split(" | ")[0][2:]: line for line in first.splitlines() if line.startswith("| `")}
    kept |= {label(n): r for n, r in rows.items()}
    names = [label(n) for n in (*registry.ROWS, UNDER) if label(n) in kept]
    lines = ["| backend | takes | package | result |", "|---|---|---|---|", *(kept[n] for n in names)]
    made = f"Made by `python bench/backends.py` on {facts['date']}, {facts['cpu']}, torch {facts['torch']}, Python {facts['python']}."
    PAGE.write_text(before + "\n".join([BEGIN, "", *lines, "", *effects(), "", made, "", END]) + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
