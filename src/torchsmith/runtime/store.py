"""A private folder of files that are whole or absent: atomic writes, owner, mode and digest checked on every read (no torch).

In: bytes under a name. Out: the same bytes or None; whatever was damaged or foreign is deleted and reported.
A stored file ends with the SHA-256 of its kind, name and content (TRAILER + 32 bytes), so that one under another's name is foreign;
linkers and the loader ignore what follows an ELF image.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from .. import events, options
from ..codes import Unsupported
from .files import NEW, replace_file

TRAILER = b"torchsmith-sha256:"
KINDS = ("obj", "lib", "graph", "tuned")
TAIL = len(TRAILER) + 32
USED: set[tuple[str, str]] = set()  # (kind, name) of what this process wrote or read
MOST_BYTES = 2 << 30  # of all files; the ones used longest ago go first
_NOBODY = 65534  # who owns what a container shows of the machine outside
STALE_SECONDS = 3600  # a temporary file this old belongs to a process that died

T = TypeVar("T")


def folder(kind: str) -> Path:
    """The folder for `kind` (one of KINDS) under the cache root."""
    return _root(options.cache_dir(), os.getpid()) / kind


@cache
def _root(wanted: Path, pid: int) -> Path:
    """The cache root if it is ours and private, else a temporary one for this process. A relative name counts from its first use."""
    wanted = wanted.absolute()
    try:
        root = wanted / "v1"
        for part in (root, *(root / k for k in KINDS)):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = part.stat()
            if info.st_uid != os.getuid():
                raise PermissionError(f"{part} belongs to somebody else")
            if stat.S_IMODE(info.st_mode) & 0o077:
                part.chmod(0o700)
        _refuse_foreign(wanted)
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


def _refuse_foreign(wanted: Path) -> None:
    """PermissionError where somebody else could put another folder in the place of ours: the owners and modes of it and all above it."""
    real = wanted.resolve()
    for part in (real, *real.parents):
        info = part.stat()
        if info.st_uid not in (os.getuid(), 0, _NOBODY):
            raise PermissionError(f"{part} belongs to somebody else")
        if info.st_mode & (0o022 if part is real else 0o002) and not info.st_mode & stat.S_ISVTX:
            raise PermissionError(f"others may write to {part}")


def _digest(path: Path, content: bytes) -> bytes:
    """Of a file's content in its place."""
    return hashlib.sha256(f"{path.parent.name}/{path.name}\n".encode() + content).digest()


@cache
def tidy(root: Path, pid: int) -> None:
    """Once a process: delete what dead writers left, and the oldest files of a cache that has grown too large."""
    rows: list[tuple[float, int, Path]] = []
    for path in root.glob("*/*"):
        with contextlib.suppress(OSError):
            info = path.stat()
            if path.name.startswith(NEW) and time.time() - info.st_mtime > STALE_SECONDS:
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

    def write() -> None:
        replace_file(path, lambda f: f.write(content + TRAILER + _digest(path, content)))

    try:
        try:
            write()
        except FileNotFoundError:  # somebody deleted the cache meanwhile
            _root.cache_clear()
            folder(path.parent.name)
            write()
        USED.add((path.parent.name, path.name))
    except OSError as e:
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
    if private and mark == TRAILER and _digest(path, content) == digest:
        if time.time() - info.st_mtime > STALE_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(path)  # `tidy` deletes by last use
        USED.add((path.parent.name, path.name))
        return content
    drop(path)
    return None


def read(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """What `parse` makes of the content, or None when there is no whole file of ours. One that `parse` refuses is deleted: whoever wrote it
    wrote all of it, and it is wrong all the same."""
    content = get(path)
    if content is None:
        return None
    try:
        return parse(content)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        drop(path, repr(e))
        return None


def drop(path: Path, why: str = "") -> None:
    """Delete a file that is damaged, and say so."""
    events.emit("cache", name="damaged", path=str(path), detail=why)
    with contextlib.suppress(OSError):
        path.unlink()


def image(content: bytes) -> bytes:
    """`content`, an object or library: ValueError where it is no ELF image or ends before its section headers, which are written last."""
    if len(content) < 64 or content[:4] != b"\x7fELF":
        raise ValueError("no ELF image")
    ((begin,), (size, count)) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    if begin + size * count > len(content):
        raise ValueError("an ELF image that is cut off")
    return content
