"""A progress bar on stderr while max-autotune measures; silent where stderr is no terminal.

In: events "tuning". Out: one line that disappears when the graph is done.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import events

_BARS: dict[str, Any] = {}  # graph name -> (rich.progress.Progress, its task)
_started: list[events.Listener] = []


def start_progress() -> None:
    """Listen for measuring; called once, when the front door is imported."""
    if not _started:
        _started.append(show)
        events.listen(show)


def show(event: events.Event) -> None:
    if event.kind != "tuning" or not sys.stderr.isatty():
        return
    name, done, total = event.fields["graph"], event.fields["done"], event.fields["total"]
    if name not in _BARS:
        _BARS[name] = _bar(f"torchsmith: measuring {event.fields['decisions']} tilings of {name}", total)
    progress, task = _BARS[name]
    progress.update(task, completed=done)
    if done >= total:
        progress.stop()
        del _BARS[name]


def _bar(title: str, total: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import Progress

    progress = Progress(console=Console(file=sys.stderr), transient=True)
    progress.start()
    return progress, progress.add_task(title, total=total)
