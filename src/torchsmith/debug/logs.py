"""TORCHSMITH_LOGS: readable lines on stderr as things happen.

In: events. Out: lines for the artifacts named in the variable: graph_breaks, recompiles, guards, kernels, graphs, cache, autotuning, times;
texts as in debug folders: graph_code, aot_graphs, output_code.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection
from typing import Any

from .. import events
from ..codes import CODES
from ..options import TEXT_LOGS, logs

Fields = dict[str, Any]


def _why(f: Fields) -> str:
    code = str(f.get("code", ""))
    row = CODES.get(code)
    where = f.get("loc") or f.get("at") or f.get("graph") or f.get("name") or "unknown place"
    detail = f" ({f['detail']})" if f.get("detail") else ""
    return f"{where}: [{code}] {row.explanation if row else ''}{detail}. {row.hint if row else ''}".rstrip()


def _graph(f: Fields) -> str:
    r = f["report"]
    why = f" because of {r.code}" if r.code else ""
    cached = ", from the cache" if r.cached else ""
    return f"graph {r.name}: {r.road}{why}{cached}, {r.operators} operators, {r.kernels} kernels, {len(r.externs)} extern calls {r.library}"


def _guards(f: Fields) -> str:
    listed = [str(g) for g in f.get("list", ())]
    return "\n".join([f"{f.get('name', '')}: {len(listed)} guards", *(f"  {g}" for g in listed)])


def _kernel(f: Fields) -> str:
    return f"{f.get('graph', '')}: {f.get('name', '')} from {', '.join(map(str, f.get('origins') or ()))}"


def _text(log: str) -> Callable[[Fields], str]:
    def text(f: Fields) -> str:
        if str(f["name"]).partition(".")[0] != TEXT_LOGS[log]:
            return ""
        made = f["text"]
        return f"{f['graph']}:\n{made() if callable(made) else made}"

    return text


# artifact -> {event kind: what is printed; "": nothing}
LOGS: dict[str, dict[str, Callable[[Fields], str]]] = {
    "graph_breaks": {"graph_break": _why, "fallback": _why},
    "recompiles": {
        "recompile": lambda f: f"{f.get('loc') or ''}: {f.get('name', '')} recompiles, this guard failed: {f.get('guard')}",
        "outdated": lambda f: f"{f.get('name', '')} runs as it is this once: the call changes what a compilation of it would assume",
    },
    "guards": {"guards": _guards},
    "kernels": {"kernel": _kernel},
    "graphs": {"graph": _graph},
    "cache": {"cache": lambda f: ", ".join(f"{k} {v}" for k, v in f.items())},
    "autotuning": {"tuned": lambda f: "\n".join(f"{f.get('graph', '')}: {line}" for line in f["lines"])},
    **{name: {"artifact": _text(name)} for name in TEXT_LOGS},
    "times": {"time": lambda f: f"{f.get('graph', '')} {f['name']}: {f['wall'] * 1e3:.1f} ms wall, {f['cpu'] * 1e3:.1f} ms CPU"},
}

_started: list[events.Listener] = []


def _say(text: str) -> None:
    """A line on stderr; where that is closed or full the program goes on without it."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def start_logs() -> None:
    """Listen for what TORCHSMITH_LOGS names; called once, when the front door is imported. Unknown names are said, not ignored."""
    wanted = logs()
    for name in sorted(wanted - LOGS.keys()):
        _say(f"torchsmith: TORCHSMITH_LOGS names {name!r}; known: {', '.join(LOGS)}")
    if not _started:
        show_logs(wanted)


def show_logs(wanted: Collection[str]) -> None:
    """Print these artifacts from now on, and no others."""
    while _started:
        events.unlisten(_started.pop())
    if not wanted:
        return
    rows = [(kind, name, line) for name in LOGS if name in wanted for kind, line in LOGS[name].items()]

    def show(event: events.Event) -> None:
        for kind, name, line in rows:
            text = line(event.fields) if kind == event.kind else ""
            if text:
                _say(f"[torchsmith {name}] {text}")

    _started.append(show)
    events.listen(show)
