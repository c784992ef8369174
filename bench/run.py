"""The measuring commands: steady state, compile time, per-call overhead, operator coverage.

    python bench/run.py --suite seeds      ten models, batch 1 and 8, against eager, torch.compile (and freezing), ONNX Runtime, OpenVINO
    python bench/run.py --suite compile    first call in fresh processes, empty and filled caches
    python bench/run.py --suite overhead   the cost of a call: tiny functions, BERT with a no-op backend
    python bench/run.py --suite op_db      bench/op_db.py, whole

In: --models, --batches, --peers narrow a run; --quick is a smoke run whose figures mean nothing. Out: a table on stdout and
bench/results/<suite>.json and .md. The protocol of every comparison is in bench/paired.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from paired import PAIRS, QUICK, Protocol, geomean  # noqa: E402

from models import MODELS  # noqa: E402  (the script's own folder comes first)

PEER_NAMES = ("eager", "torch.compile", "torch.compile freezing", "onnxruntime", "openvino")
FREEZING = "torch.compile freezing"
Row = dict[str, Any]


# ---------------------------------------------------------------- where and with what
def about() -> dict[str, str]:
    """Date, hardware and versions: what a figure is worth nothing without."""
    cpuinfo = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().replace("\t", "").split("\n") if ":" in line)
    cpu, flags = cpuinfo.get("model name", "?").strip(), cpuinfo.get("flags", "")
    wide = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "SSE"
    found = {}
    for package in ("torch", "torchvision", "transformers", "timm", "onnxruntime", "openvino"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu}, {os.cpu_count()} cores, {wide}",
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(HERE), "rev-parse", "--short", "HEAD"),
        "compiler": _output("cc", "--version").split("\n")[0],
        **found,
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "?"


def child(case: dict[str, Any], env: dict[str, str] | None = None, timeout: float = 3600) -> Row:
    """Run one case in a fresh process; its result, or {"error": ...}."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, str(HERE / "run.py"), "--case", json.dumps(case), "--case-out", str(out)]
        try:
            done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer in {timeout:.0f} s"}
        if out.exists():
            return dict(json.loads(out.read_text()))
        return {"error": f"exit code {done.returncode}: {done.stderr.strip()[-400:]}"}


# ---------------------------------------------------------------- seeds: steady state
def case_seeds(case: dict[str, Any]) -> Row:
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


def suite_seeds(args: argparse.Namespace) -> list[Row]:
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
            print(seeds_table([row]).split("\n")[2], flush=True)
            save(args.out, "seeds", rows, seeds_table(rows))
    return rows


def seeds_table(rows: list[Row]) -> str:
    """One line per model and batch, geomeans last. Ratios are peer's time over torchsmith's: above 1, torchsmith is faster."""
    peers = [p for p in PEER_NAMES if any(p in r.get("peers", {}) or p in r.get("failed", {}) for r in rows)]
    titles = [f"vs {p} [95 %]" for p in peers]
    out = ["| model | batch | torchsmith ms | eager ms | " + " | ".join(titles) + " | A/A | error |", "|---" * (6 + len(peers)) + "|"]
    for r in rows:
        if isinstance(r.get("error"), str):
            out.append(f"| {r['model']} | {r['batch']} | failed: {r['error'][-200:]} |")
            continue
        cells = []
        for p in peers:
            m = r["peers"].get(p)
            cells.append(f"{m['ratio']:.2f} [{m['low']:.2f}, {m['high']:.2f}]" if m else "failed" if p in r["failed"] else "-")
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
    return "\n".join(out)


# ---------------------------------------------------------------- compile: first calls
def tree_cpu() -> float:
    """CPU seconds of this process, its finished children and its living descendants."""
    tick = os.sysconf("SC_CLK_TCK")
    stats: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # it ended meanwhile
            stats[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15])) / tick
    family = {os.getpid()}
    while True:
        more = {pid for pid, (parent, _) in stats.items() if parent in family} - family
        if not more:
            return sum(stats[pid][1] for pid in family if pid in stats)
        family |= more


def case_compile(case: dict[str, Any]) -> Row:
    """One first call in this process. Imports and the model's construction are not counted, the compilers' own imports included."""
    import torch

    from models import inputs_of, make_model

    model, inputs = make_model(case["model"]), inputs_of(case["model"], 1)
    if case["compiler"] == "torchsmith":
        import torchsmith
        import torchsmith.capture.machine
        import torchsmith.pipeline

        compile_: Callable[..., Any] = torchsmith.compile
    else:
        import torch._inductor.compile_fx

        compile_ = torch.compile
    with torch.no_grad():
        model(*inputs)  # thread pools and the operators' own first-call work belong to nobody
        cpu, wall = tree_cpu(), time.perf_counter()
        compile_(model)(*inputs)
        return {"cpu": round(tree_cpu() - cpu, 2), "wall": round(time.perf_counter() - wall, 2)}


def suite_compile(args: argparse.Namespace) -> list[Row]:
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
        print(compile_table([row]).split("\n")[2], flush=True)
        save(args.out, "compile", rows, compile_table(rows))
    return rows


def compile_table(rows: list[Row]) -> str:
    columns = [(c, s) for c in ("torchsmith", "torch.compile") for s in ("cold", "warm")]
    out = ["| model | " + " | ".join(f"{c} {s}: CPU s (wall)" for c, s in columns) + " | cold ratio |", "|---" * (len(columns) + 2) + "|"]
    ratios = []
    for r in rows:
        got = {(c, s): r.get(c, {}).get(s) or {"error": "-"} for c, s in columns}
        cells = [f"{v['cpu']:.2f} ({v['wall']:.2f})" if "cpu" in v else v["error"][-60:] for v in got.values()]
        ours, theirs = got["torchsmith", "cold"].get("cpu"), got["torch.compile", "cold"].get("cpu")
        ratios += [theirs / ours] if ours and theirs else []
        out.append("| " + " | ".join([r["model"], *cells, f"{theirs / ours:.1f}" if ours and theirs else "-"]) + " |")
    out.append(f"| geomean | | | | | {geomean(ratios):.2f} (of {len(ratios)}) |" if ratios else "| geomean | | | | | - |")
    return "\n".join(out)


# ---------------------------------------------------------------- overhead: what a call costs
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


def case_overhead(case: dict[str, Any]) -> Row:
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


def suite_overhead(args: argparse.Namespace) -> list[Row]:
    rows = []
    for name in (*tiny_functions(), *OVERHEAD_BERT):
        row = {"name": name} | child({"suite": "overhead", "name": name, "protocol": protocol_of(args)})
        rows.append(row)
        print(overhead_table([row]).split("\n")[2], flush=True)
    save(args.out, "overhead", rows, overhead_table(rows))
    return rows


def overhead_table(rows: list[Row]) -> str:
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


# ---------------------------------------------------------------- common ground
def protocol_of(args: argparse.Namespace) -> dict[str, Any]:
    p = QUICK if args.quick else Protocol(pairs=args.pairs)
    return {"pairs": p.pairs, "burst_s": p.burst_s, "idle_s": p.idle_s}


def load_rows(folder: Path, suite: str) -> list[Row]:
    path = folder / f"{suite}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def save(folder: Path, suite: str, rows: list[Row], table: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = "python bench/run.py " + " ".join(a for a in sys.argv[1:] if not a.startswith("/"))
    facts = about() | {"command": command}
    (folder / f"{suite}.json").write_text(json.dumps({"about": facts, "rows": rows}, indent=1) + "\n")
    header = "\n".join([f"# bench/run.py --suite {suite}", "", *(f"- {k}: {v}" for k, v in facts.items()), "", NOTES[suite], "", ""])
    (folder / f"{suite}.md").write_text(header + table + "\n")


NOTES = {
    "seeds": "Ratios are the peer's time over torchsmith's (above 1: torchsmith is faster), median of paired bursts with a bootstrap 95 % "
    "interval. `error`: max|compiled - eager| / max|eager|, the worst output.",
    "compile": "CPU seconds of the process and its children from call to return, wall time in brackets, one fresh process per figure; "
    "imports and building the model are not counted. torch.compile uses one compile thread (worker processes would add their own start).",
    "overhead": "Microseconds per call under no_grad; both compilers in one process.",
}
CASES = {"seeds": case_seeds, "compile": case_compile, "overhead": case_overhead}
SUITES = {"seeds": suite_seeds, "compile": suite_compile, "overhead": suite_overhead}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--suite", choices=(*SUITES, "op_db"))
    p.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    p.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    p.add_argument("--peers", nargs="+", default=list(PEER_NAMES), choices=PEER_NAMES, metavar="PEER")
    p.add_argument("--pairs", type=int, default=PAIRS)
    p.add_argument("--states", nargs="+", default=["cold", "warm"], choices=("cold", "warm"), help="of the compile suite")
    p.add_argument("--quick", action="store_true", help="smoke run: a few short bursts, results in a temporary folder")
    p.add_argument("--resume", action="store_true", help="keep the rows that the last run wrote")
    p.add_argument("--out", type=Path, help="folder of the results; default: bench/results")
    p.add_argument("--case", help=argparse.SUPPRESS)
    p.add_argument("--case-out", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.case:
        case = json.loads(args.case)
        args.case_out.write_text(json.dumps(CASES[case["suite"]](case)))
        return 0
    if args.suite is None:
        p.error("--suite is needed")
    if args.out is None:
        args.out = Path(tempfile.gettempdir()) / "torchsmith_bench_quick" if args.quick else HERE / "results"
    if args.suite == "op_db":
        return subprocess.call([sys.executable, str(HERE / "op_db.py"), *(["--sample", "20"] if args.quick else [])])
    SUITES[args.suite](args)
    print(f"\n{(args.out / f'{args.suite}.md').read_text()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
