"""Files and folders that are whole or absent, whatever ends their writer: an error, an interrupt, a full disk (no torch).

A name is chosen before anything is made under it, and all is done inside of the `try` that deletes it (the end of a `with` block is a place
where an interrupt may come between): only a process that is killed leaves a file, which `store.tidy` knows by its prefix.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..codes import Unsupported

NEW = ".new"  # what the name of a file begins with that is not whole yet


def replace_file(target: Path, write: Callable[[BinaryIO], object], mode: int = 0o600) -> None:
    """`write` is given a file to write and read, which becomes `target`: readers see all of it or nothing. Raises OSError.

    mode: permissions, less the process's mask.
    """
    temp = target.with_name(f"{NEW}{secrets.token_hex(8)}")
    try:
        with open(os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w+b") as file:
            write(file)
        os.replace(temp, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temp)
        raise


def scratch(prefix: str) -> Path:
    """A name for a folder of temporary files that nobody else has. Make it inside of a `try` whose `finally` calls `delete`.
    Unsupported: no place for temporary files."""
    try:
        return Path(tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(8)}"
    except OSError as e:
        raise Unsupported("RUN003", detail=str(e)) from e


def delete(folder: Path) -> None:
    """Delete `folder`, if it is there, and all that is in it; an interrupt does not stop that."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
