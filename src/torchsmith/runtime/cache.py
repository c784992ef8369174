"""The first cache level: a functional graph's key -> manifest and library, so that a warm process skips lower, schedule and emit.

In: the canonical text of a graph, options. Out: Found(manifest, library) or None. Nothing is unpickled; every file is private to the
user, written atomically, and its digest is checked before use (runtime/store.py). The second level, kernel text -> object, is build's.
Lines of the user's files are no part of the key, so an entry remembers which node of the graph made an extern call, not where it stood.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from .. import IMPORTED, __version__, events
from ..codes import Unsupported
from ..options import Options
from . import store
from .build import digest
from .manifest import Manifest
from .toolchain import Toolchain, cpu_features, toolchain


@dataclass(frozen=True, slots=True)
class Found:
    """A cache hit."""

    manifest: Manifest
    library: str
    tuned: tuple[str, ...] = ()  # what max-autotune said when this was compiled


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def source_digest() -> str:
    """Of what torchsmith's own files hold: an edited compiler must not meet results of its former self, whatever the times of its files.

    Where one changed after torchsmith was imported, as an upgrade under a running program does, it is a word of this process alone: what
    it compiles is not what compilers made of those files would find.
    """
    root = Path(__file__).parent.parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.stat().st_ctime > IMPORTED:
            return os.urandom(16).hex()
        text = path.read_bytes()
        found.update(f"{path.relative_to(root)} {len(text)}\n".encode() + text)
    return found.hexdigest()


def key_fields(key_text: str, options: Options, tools: Toolchain | None = None) -> dict[str, str]:
    """Everything that the compiled result depends on, by name."""
    return {
        "graph": key_text,
        "options": repr(options.codegen_key()),
        "torchsmith": __version__ + source_digest(),
        "torch": _torch_version(),
        "python": sys.version,
        "cpu": " ".join(cpu_features()),
        "compiler": (tools or toolchain(options)).identity,
    }


def _torch_version() -> str:
    """Of the torch that is loaded, else of the one installed."""
    loaded = sys.modules.get("torch")
    return str(getattr(loaded, "__version__", "")) or _version("torch")


def graph_key(key_text: str, options: Options) -> str:
    """Content address of one compilation."""
    return key_of(key_fields(key_text, options))


def key_of(fields: dict[str, str]) -> str:
    return digest(*(t for pair in sorted(fields.items()) for t in pair))


def _nodes_of(manifest: Manifest, nodes: Sequence[tuple[str, str]]) -> list[int]:
    """By extern call, which of the graph's nodes (operator, line) it stands for; -1 where none has its line."""
    found, met = [], Counter[tuple[str, str]]()
    for e in manifest.externs:
        here = [i for i, (_, loc) in enumerate(nodes) if loc == e.loc]
        same = [i for i in here if nodes[i][0] == e.op] or here
        found.append(same[min(met[e.op, e.loc], len(same) - 1)] if same else -1)
        met[e.op, e.loc] += 1
    return found


def find(key: str, nodes: Sequence[tuple[str, str]] = ()) -> Found | None:
    """The compilation under this key, whole and checked; damaged entries are deleted.

    `nodes`: operator and line ("file:line") of each node of the graph at hand, in order, for the lines of extern calls.
    """

    def parse(content: bytes) -> Found:
        entry = json.loads(content)
        manifest, library = Manifest.of(entry["manifest"]), store.folder("lib") / entry["library"]
        if library.parent != store.folder("lib"):
            raise ValueError(f"{library} is outside of the cache")
        tuned = tuple(str(line) for line in entry["tuned"])
        lines = [nodes[i][1] if i >= 0 else "" for i in entry["nodes"]]
        manifest = replace(manifest, externs=[replace(e, loc=at) for e, at in zip(manifest.externs, lines, strict=True)])
        return Found(manifest, str(library), tuned)

    found = store.read(store.folder("graph") / f"{key}.json", parse)
    if found is None or store.read(Path(found.library), store.image) is None:
        events.emit("cache", name="graph miss")
        return None
    events.emit("cache", name="graph hit")
    return found


def keep(key: str, manifest: Manifest, library: Path | str, tuned: Sequence[str] = (), nodes: Sequence[tuple[str, str]] = ()) -> str:
    """Remember a built library under its graph key; gives the library's path. A cache that cannot be written is no error."""
    entry = {
        "manifest": json.loads(manifest.to_json()), "library": Path(library).name, "tuned": list(tuned),
        "nodes": _nodes_of(manifest, nodes),
    }  # fmt: skip
    text = json.dumps(entry)
    try:
        store.put(store.folder("graph") / f"{key}.json", text.encode())
    except Unsupported as e:
        events.emit("cache", code=e.code, detail=e.detail)
    return str(library)
