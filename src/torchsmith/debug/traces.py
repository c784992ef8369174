"""TORCHSMITH_TRACE: everything that happened, for programs to read: a folder, and in it one file of JSON lines for each process.

In: every event. Out: lines {"time", "thread", "kind", ...the event's fields} in FOLDER/torchsmith_trace_PID.jsonl. Of the texts that passes
make, those that logs print are kept: what was captured, the functional graph, the generated source.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import events
from ..codes import CODES
from ..options import TEXT_LOGS, trace_folder

_KEPT = tuple(f"{name}." for name in TEXT_LOGS.values())


def plain(value: Any) -> Any:
    """A field as JSON has it: numbers, texts and containers stay, a dataclass is its fields, all else is its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value)


class TraceWriter:
    """Appends a line for each event; the first file that cannot be written ends it, with a word on stderr."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock, self.failed = folder, threading.Lock(), False

    def __call__(self, event: events.Event) -> None:
        fields = event.fields
        if self.failed or (event.kind == "artifact" and not str(fields["name"]).startswith(_KEPT)):
            return
        line = {"time": time.time(), "thread": threading.get_ident(), "kind": event.kind}
        if fields.get("code") in CODES:
            line["why"] = CODES[fields["code"]].explanation
        line |= {k: plain(v() if k == "text" and callable(v) else v) for k, v in fields.items()}
        try:
            with self.lock:
                self.folder.mkdir(parents=True, exist_ok=True)
                with open(self.folder / f"torchsmith_trace_{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        except OSError as e:
            self.failed = True
            print(f"torchsmith: cannot write the trace in {self.folder}: {e}", file=sys.stderr)


def start_trace() -> None:
    """Listen from now on, where the environment names a folder."""
    folder = trace_folder()
    if folder is not None:
        events.listen(TraceWriter(folder))
