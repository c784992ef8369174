"""The record that rooms write and debug reads: typed events, counted by kind, handed to listeners (no torch)."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """kind: "graph_break", "recompile", "outdated", "fallback", "guard", "kernel", "extern", "time", "graph", "cache"; fields as given."""

    kind: str
    fields: dict[str, Any]


Listener = Callable[[Event], None]

COUNTS: Counter[tuple[str, str]] = Counter()  # (kind, code or name) -> how often in this process
_LISTENERS: list[Listener] = []
_LOCK = threading.Lock()


def emit(kind: str, **fields: Any) -> None:
    """Record one event. `code` (or `name`) in fields is what COUNTS groups by."""
    with _LOCK:
        COUNTS[kind, str(fields.get("code") or fields.get("name") or "")] += 1
        listeners = tuple(_LISTENERS)
    for listener in listeners:
        listener(Event(kind, fields))


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn(text: str) -> None:
    """A warning at the line of the user's program, wherever below it this package noticed."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def listen(listener: Listener) -> None:
    """Hand every later event to `listener` until `unlisten`."""
    with _LOCK:
        _LISTENERS.append(listener)


def unlisten(listener: Listener) -> None:
    with _LOCK:
        _LISTENERS.remove(listener)


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Collect the events emitted inside the block (by any thread)."""
    got: list[Event] = []
    listen(got.append)
    try:
        yield got
    finally:
        unlisten(got.append)


@contextmanager
def timed(name: str, **fields: Any) -> Iterator[None]:
    """Emit a "time" event with wall and CPU seconds of the block."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        emit("time", name=name, wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, **fields)
