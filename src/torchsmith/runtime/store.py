"""A private folder of files that are whole or absent: atomic writes, owner, mode and digest checked on every read (no torch).

In: bytes under a name. Out: the same bytes or None; whatever was damaged or foreign is deleted and reported.
A stored file ends with its SHA-256 (TRAILER + 32 bytes): linkers and the loader ignore what follows an ELF image.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from functools import cache
from pathlib import Path

from .. import events, options
from ..codes import Unsupported

TRAILER = b"torchsmith-sha256:"
KINDS = ("obj", "lib", "graph", "tuned")
TAIL = len(TRAILER) + 32
USED: set[tuple[str, str]] = set()  # (kind, name) of what this process wrote or read
MOST_BYTES = 2 << 30  # of all files; the ones used longest ago go first
STALE_SECONDS = 3600  # a temporary file this old belongs to a process that died


def folder(kind: str) -> Path:
    """The folder for `kind` (one of KINDS) under the cache root."""
    return _root(options.cache_dir(), os.getpid()) / kind


@cache
def _root(wanted: Path, pid: int) -> Path:
    """The cache root if it is ours and private, else a temporary one for this process."""
    try:
        root = wanted / "v1"
        for part in (root, *(root / k for k in KINDS)):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = part.stat()
            if info.st_uid != os.getuid():
                raise PermissionError(f"{part} belongs to somebody else")
            if stat.S_IMODE(info.st_mode) & 0o077:
                part.chmod(0o700)
        mode = wanted.stat().st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise PermissionError(f"others may write to {wanted}")
        probe = root / f".probe{pid}"
        probe.write_bytes(b"")
        probe.unlink()
        return root
    except OSError as e:
        events.emit("cache", code="RUN003", detail=f"{wanted}: {e}; using a temporary folder")
        cure = "TORCHSMITH_CACHE_DIR names another folder"
        events.warn(f"torchsmith: the cache {wanted} cannot be used ({e}): every start will be cold. {cure}")
    try:
        root = Path(tempfile.mkdtemp(prefix="torchsmith-"))
        for kind in KINDS:
            (root / kind).mkdir(mode=0o700)
    except OSError as e:
        raise Unsupported("RUN003", detail=str(e)) from e
    atexit.register(lambda: shutil.rmtree(root, ignore_errors=True) if os.getpid() == pid else None)
    return root


@cache
def tidy(root: Path, pid: int) -> None:
    """Once a process: delete what dead writers left, and the oldest files of a cache that has grown too large."""
    rows: list[tuple[float, int, Path]] = []
    for path in root.glob("*/*"):
        with contextlib.suppress(OSError):
            info = path.stat()
            if path.name.startswith(".new") and time.time() - info.st_mtime > STALE_SECONDS:
                path.unlink()
            else:
                rows.append((info.st_mtime, info.st_size, path))
    total = sum(size for _, size, _ in rows)
    for _, size, path in sorted(rows):
        if total <= MOST_BYTES:
            break
        total -= size
        with contextlib.suppress(OSError):
            path.unlink()


def put(path: Path, content: bytes) -> None:
    """Write content and its digest under a temporary name, then rename: readers see all of it or nothing."""
    tidy(path.parent.parent, os.getpid())
    handle, temp = -1, ""
    try:
        handle, temp = tempfile.mkstemp(dir=path.parent, prefix=".new")
        with os.fdopen(handle, "wb") as f:
            f.write(content + TRAILER + hashlib.sha256(content).digest())
        os.replace(temp, path)
        USED.add((path.parent.name, path.name))
    except OSError as e:
        if temp:
            with contextlib.suppress(OSError):
                os.unlink(temp)
        raise Unsupported("RUN003", detail=f"{path}: {e}") from e


def get(path: Path) -> bytes | None:
    """The content, or None when there is no whole file of ours."""
    try:
        with open(path, "rb") as f:
            info = os.fstat(f.fileno())
            raw = f.read()
    except FileNotFoundError:
        return None
    except OSError as e:
        events.emit("cache", code="RUN003", detail=f"{path}: {e}")
        return None
    private = info.st_uid == os.getuid() and not info.st_mode & 0o022 and stat.S_ISREG(info.st_mode)
    content, mark, digest = raw[:-TAIL], raw[-TAIL:-32], raw[-32:]
    if private and mark == TRAILER and hashlib.sha256(content).digest() == digest:
        if time.time() - info.st_mtime > STALE_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(path)  # `tidy` deletes by last use
        USED.add((path.parent.name, path.name))
        return content
    events.emit("cache", name="damaged", path=str(path))
    with contextlib.suppress(OSError):
        path.unlink()
    return None
