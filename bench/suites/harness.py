"""What every suite needs: where and with what it ran, a fresh process per case, result files.

In: rows. Out: <out>/<suite>.json and .md.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from crew import environments
from paired import QUICK, Protocol

BENCH = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def about() -> dict[str, str]:
    """Date, hardware and versions: what a figure is worth nothing without."""
    cpuinfo = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().replace("\t", "").split("\n") if ":" in line)
    cpu, flags = cpuinfo.get("model name", "?").strip(), cpuinfo.get("flags", "")
    wide = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "SSE"
    found = {}
    for package in ("torch", "torchvision", "transformers", "timm", "jax", "torchax", "onnxruntime", "openvino"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {wide}",
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(BENCH), "rev-parse", "--short", "HEAD"),
        "compiler": _output("cc", "--version").split("\n")[0],
        **found,
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "?"


def child(case: dict[str, Any], env: dict[str, str] | None = None, timeout: float = 3600) -> Row:
    """Run one case in a fresh process; its result, or {"error": ...}. A case that is out of time may have left a part of it (`keep`)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, str(BENCH / "run.py"), "--case", json.dumps(case | {"out": str(out)}), "--case-out", str(out)]
        try:
            done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            if not out.exists():
                return {"error": f"no answer in {timeout:.0f} s"}
        if out.exists():
            return dict(json.loads(out.read_text()))
        return {"error": f"exit code {done.returncode}: {done.stderr.strip()[-400:]}"}


def keep(case: dict[str, Any], row: Row) -> None:
    """In a case's process: what there is so far."""
    part = Path(case["out"]).with_suffix(".part")
    part.write_text(json.dumps(row))
    part.replace(case["out"])


class Turns:
    """Processes that prepare side by side and measure one after the other, on each GPU. In the parent: their environments, and when
    measuring begins, which is when all that were started are ready or after `patience` seconds."""

    NAME = "TORCHSMITH_BENCH_TURNS"

    def __init__(self, folder: str, device: str, jobs: int, patience: float) -> None:
        self.folder, self.jobs, self.patience, self.done = Path(folder), jobs, patience, 0
        self.environments = itertools.cycle(environments(device, jobs, max(1, (os.cpu_count() or 1) // jobs)))
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        end = time.monotonic() + self.patience
        while time.monotonic() < end and len(list(self.folder.glob("ready*"))) + self.done < self.jobs:
            time.sleep(0.2)
        (self.folder / "go").touch()

    def environment(self) -> dict[str, str]:
        return {**next(self.environments), self.NAME: str(self.folder)}

    @staticmethod
    @contextmanager
    def mine() -> Iterator[None]:
        """In a case's process: inside, no other one measures on this GPU."""
        if Turns.NAME not in os.environ:
            yield
            return
        folder = Path(os.environ[Turns.NAME])
        (folder / f"ready{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.1)
        with (folder / f"lock{os.environ.get('CUDA_VISIBLE_DEVICES', '')}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


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


def keep_memory() -> None:
    """Tell glibc's malloc to map nothing and to trim nothing, so that what one call frees serves the next."""
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
        libc.mallopt(parameter, value)


def protocol_of(args: argparse.Namespace) -> dict[str, Any]:
    p = QUICK if args.quick else Protocol(pairs=args.pairs)
    return {"pairs": p.pairs, "burst_s": p.burst_s, "idle_s": p.idle_s}


Case = Callable[[str, str, Row], Row | None]


def run_by_kind(
    args: argparse.Namespace, name: str, kinds: Sequence[str], case_of: Case, table: Callable[[list[Row]], str], note: str
) -> list[Row]:  # fmt: skip
    """A row per kind and model, each by a process of its own, written after each. case_of(kind, model, known row) -> what is left to run,
    None where nothing is. With --resume rows of the last run are kept; those that failed are tried again."""
    rows, lock, end = load_rows(args.out, name) if args.resume else [], threading.Lock(), time.monotonic() + args.seconds
    order = [(model, kind) for kind in kinds for model in args.models]

    def one(model: str, kind: str, turns: Turns | None) -> None:
        known = next((r for r in rows if (r["model"], r["kind"]) == (model, kind) and "error" not in r), {})
        case, left = case_of(kind, model, known), min(args.limit, end - time.monotonic())
        if case is not None and left > 0:
            row = {"model": model, "kind": kind, "batch": args.batches[0]} | known
            whole = {"model": model, "kind": kind, "batch": args.batches[0], "protocol": protocol_of(args)} | case
            found = child(whole, turns.environment() if turns else None, left)
            row |= {"error": found["error"]} if "error" in found else found | {"peers": {**row.get("peers", {}), **found["peers"]}}
            with lock:
                rows[:] = [r for r in rows if (r["model"], r["kind"]) != (model, kind)] + [row]
                rows.sort(key=lambda r: order.index((r["model"], r["kind"])) if (r["model"], r["kind"]) in order else len(order))
                print(kind, model, row.get("error") or {w: round(m["ratio"], 2) for w, m in row["peers"].items()}, flush=True)
                save(args.out, name, rows, table(rows), note)
        if turns:
            turns.done += 1

    if args.jobs == 1:
        for model, kind in order:
            one(model, kind, None)
        return rows
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        turns = Turns(folder, args.device or "cuda", min(args.jobs, len(order)), min(args.limit, args.seconds) / 2)
        for done in [pool.submit(one, model, kind, turns) for model, kind in order]:
            done.result()
    return rows


def table_by_kind(
    rows: list[Row], kinds: Sequence[str], columns: Sequence[str], cells: Callable[[Row], Sequence[str]],
    means: Callable[[list[Row]], Sequence[str]],
) -> str:  # fmt: skip
    """A table per kind: `cells` of each row that did not fail, and a last line of geomeans."""
    parts: list[str] = []
    for kind in kinds:
        found = [r for r in rows if r["kind"] == kind]
        if not found:
            continue
        parts += [f"## {kind}, batch {found[0]['batch']}", "", f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        right = [r for r in found if r.get("peers") and "error" not in r]
        for r in found:
            line = cells(r) if r in right else [f"failed: {r.get('error', '')[-200:]}".replace("\n", " "), *[""] * (len(columns) - 1)]
            parts.append(f"| {r['model']} | {' | '.join(line)} |")
        parts += [f"| geomean | {' | '.join(means(right))} |", ""]
    return "\n".join(parts)


def ratio_text(row: Row, peer: str) -> str:
    """A cell of a table: the peer's time over ours with its interval, or why there is none."""
    m = row["peers"].get(peer)
    return f"{m['ratio']:.2f} [{m['low']:.2f}, {m['high']:.2f}]" if m else "failed" if peer in row["failed"] else "-"


def load_rows(folder: Path, suite: str) -> list[Row]:
    path = folder / f"{suite}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def save(folder: Path, suite: str, rows: list[Row], table: str, note: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = "python bench/run.py " + " ".join(a for a in sys.argv[1:] if not a.startswith("/"))
    facts = about() | {"command": command}
    (folder / f"{suite}.json").write_text(json.dumps({"about": facts, "rows": rows}, indent=1) + "\n")
    header = "\n".join([f"# bench/run.py --suite {suite}", "", *(f"- {k}: {v}" for k, v in facts.items()), "", note, "", ""])
    (folder / f"{suite}.md").write_text(header + table + "\n")
