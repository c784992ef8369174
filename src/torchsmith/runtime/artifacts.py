"""What this process has compiled, as bytes for another process or machine (no torch).

In: the files of the build cache that were written or read since the process began. Out: one archive; loading puts its files into the
cache, where they are found by their keys like any others. A key covers compiler, options, versions and processor: what does not fit is
never met.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from dataclasses import dataclass, field

from . import store

MAGIC = b"torchsmith artifacts 1\n"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """Names of files, by kind ("graph", "lib", "obj", "tuned")."""

    artifacts: dict[str, list[str]] = field(default_factory=dict)

    def empty(self) -> bool:
        return not self.artifacts


def save() -> tuple[bytes, CacheInfo] | None:
    """(bytes, what is in them), or None where nothing was compiled."""
    found: dict[str, list[str]] = {}
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        for kind, name in sorted(store.USED):
            content = store.get(store.folder(kind) / name)
            if content is not None:
                archive.writestr(zipfile.ZipInfo(f"{kind}/{name}"), content)
                found.setdefault(kind, []).append(name)
    data = body.getvalue()
    return (MAGIC + hashlib.sha256(data).digest() + data, CacheInfo(found)) if found else None


def load(data: bytes) -> CacheInfo:
    """Put what `save` gave into the cache. Only what comes from somebody you trust: it is code. Raises ValueError for anything else."""
    head, rest = data[: len(MAGIC)], data[len(MAGIC) :]
    if head != MAGIC or hashlib.sha256(rest[32:]).digest() != rest[:32]:
        raise ValueError("these are not (or no longer) bytes of torchsmith.compiler.save_cache_artifacts")
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(io.BytesIO(rest[32:])) as archive:
        names = [entry.partition("/")[::2] for entry in archive.namelist()]
        if any(kind not in store.KINDS or not _NAME.fullmatch(name) for kind, name in names):
            raise ValueError("the artifacts name files outside of the cache")
        for kind, name in names:
            store.put(store.folder(kind) / name, archive.read(f"{kind}/{name}"))
            found.setdefault(kind, []).append(name)
    return CacheInfo(found)
