"""Debug folders: one for each graph, with what each pass made of it (TORCHSMITH_DEBUG=1, TORCH_COMPILE_DEBUG=1, the option trace.enabled).

In: events "artifact" (graph, name, text), "time", "kernel" and "graph". Out: files under options.debug_dir()/run_<time>_pid_<pid>/, and one
line with the folder's path on stderr when the graph is done. Files: captured_graph.py, functional_graph.txt, program_before_fusion.txt,
program_after_fusion.txt, kernels.txt, plan.txt, output_code.c (the generated source), report.txt.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .. import events
from ..options import debug_dir, wants_folders
from ..runtime.files import all_or_none


class FolderWriter:
    """Collects what belongs to a graph until its "graph" event, then writes the folder."""

    def __init__(self, root: Path, *, always: bool = True) -> None:
        self.root, self.always = root, always  # not always: only of graphs that were compiled with trace.enabled
        self.lock = threading.Lock()
        self.open: dict[tuple[int, str], dict[str, list[Any]]] = {}
        self.written = 0

    def __call__(self, event: events.Event) -> None:
        f = event.fields
        if event.kind in ("artifact", "time", "kernel", "fallback") and "graph" in f:
            with self.lock:
                kinds = self.open.setdefault((threading.get_ident(), str(f["graph"])), {})
                kinds.setdefault(event.kind, []).append(f)
        elif event.kind == "graph":
            with self.lock:
                kinds = self.open.pop((threading.get_ident(), str(f["name"])), {})
                if not (self.always or kinds.get("artifact")):
                    return
                number, self.written = self.written, self.written + 1
            self.write(number, f["report"], kinds)

    def write(self, number: int, report: Any, kinds: dict[str, list[Any]]) -> None:
        folder = self.root / f"{number:02d}_{re.sub(r'[^A-Za-z0-9_.-]+', '_', report.name)[:80]}"
        try:
            made = {a["name"]: a["text"]() if callable(a["text"]) else a["text"] for a in kinds.get("artifact", ())}
            made["report.txt"] = report_text(report, kinds)
            with all_or_none([folder, *(folder / name for name in made)]):
                folder.mkdir(parents=True, exist_ok=True)
                for name, text in made.items():
                    (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        except OSError as e:  # a full or read-only disk must not stop the program that is being looked at
            print(f"torchsmith: cannot write the debug folder {folder}: {e}", file=sys.stderr)
            return
        print(f"torchsmith: debug folder of graph {report.name}: {folder.resolve()}", file=sys.stderr, flush=True)


def report_text(report: Any, kinds: dict[str, list[Any]]) -> str:
    """Who runs the graph, from which kernels and extern calls, and what each pass cost."""
    out = [f"graph {report.name}: {report.road}" + (f" because of {report.code}" if report.code else "")]
    out += [f"fallback {f.get('code')} at {f.get('at') or '?'}: {f.get('detail') or ''}" for f in kinds.get("fallback", ())]
    out += [f"operators: {report.operators}", f"kernels: {report.kernels}"]
    out += [f"  {f.get('name')} from {', '.join(map(str, f.get('origins') or ()))}" for f in kinds.get("kernel", ())]
    out += [f"extern calls: {len(report.externs)}", *(f"  {name}" for name in report.externs)]
    out += [f"library: {report.library}"] if report.library else []
    out += ["times:"]
    out += [f"  {f['name']}: {f['wall'] * 1e3:.1f} ms wall, {f['cpu'] * 1e3:.1f} ms CPU" for f in kinds.get("time", ())]
    return "\n".join(out) + "\n"


_started: list[FolderWriter] = []


def start_folders() -> None:
    """Listen, from the first time that somebody asks for debug folders on: the environment, or options={"trace.enabled": True}."""
    if _started:
        return
    writer = FolderWriter(debug_dir() / f"run_{time.strftime('%Y_%m_%d_%H_%M_%S')}_pid_{os.getpid()}", always=wants_folders())
    _started.append(writer)
    events.listen(writer)
