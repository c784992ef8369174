"""What max-autotune found out on this processor, remembered between processes: decisions by the key of their work (no torch).

In: keys and decisions, both plain text. Out: the same, from one JSON file per processor in the cache folder; a file that is damaged or not
ours is ignored and written again.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from .. import events
from ..codes import Unsupported
from . import store
from .build import digest
from .toolchain import cpu_features

VERSION = 1  # of the file; also raised when templates change so much that old decisions mislead


@dataclass(frozen=True, slots=True)
class Tuned:
    """One decision: `chosen` is a candidate's text, `gain` how many times as fast as the default's it ran, where it was measured."""

    chosen: str
    gain: float


@cache
def processor() -> str:
    """What decisions depend on: model name, features, cache sizes."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    name = re.search(r"^model name\s*:(.*)$", text, re.M)
    sizes = []
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            sizes.append(" ".join((entry / fact).read_text(encoding="utf-8").strip() for fact in ("level", "type", "size")))
    return "\n".join((name.group(1).strip() if name else "", " ".join(cpu_features()), *sizes))


def _path() -> Path:
    return store.folder("tuned") / f"{digest(str(VERSION), processor())}.json"


def recall() -> dict[str, Tuned]:
    """Everything remembered for this processor."""

    def parse(content: bytes) -> dict[str, Tuned]:
        return {str(k): Tuned(str(v["chosen"]), float(v["gain"])) for k, v in json.loads(content).items()}

    return store.read(_path(), parse) or {}


def remember(found: Mapping[str, Tuned]) -> None:
    """Add to what is remembered. A cache that cannot be written is no error: the next process measures again."""
    rows = recall() | dict(found)
    text = json.dumps({k: asdict(v) for k, v in sorted(rows.items())}, indent=0)
    try:
        store.put(_path(), text.encode())
    except Unsupported as e:
        events.emit("cache", code=e.code, detail=e.detail)
