"""Files and folders that are whole or absent, whatever ends their writer: an error, an interrupt, a full disk (no torch).

A name is chosen before anything is made under it, and all is done inside of the `try` that deletes it: only a process that is killed leaves
a file, which `store.tidy` knows by its prefix.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

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
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temp)
        if isinstance(error, OSError) and error.filename == str(temp):  # say what the caller named
            raise OSError(error.errno, error.strerror, str(target)) from None
        raise


def scratch(prefix: str) -> Path:
    """A name for a temporary folder that nobody else has. Raises OSError."""
    return Path(tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(8)}"


@contextmanager
def work_folder(prefix: str = "torchsmith-build-", kept: bool = False) -> Iterator[Path]:
    """A private folder among the temporary ones, which is deleted at the end; with `kept` only where the body fails. Raises OSError.

    An interrupt between the body's end and ours drops this generator, which runs what follows `yield` all the same.
    """
    path = scratch(prefix)
    stays = False
    try:
        try:
            path.mkdir(mode=0o700)
            yield path
            stays = kept
        finally:
            if not stays:
                shutil.rmtree(path, ignore_errors=True)
    finally:  # again: an interrupt may come while that runs
        if not stays:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def place_of(path: str | os.PathLike[str] | None, name: str) -> Iterator[Path]:
    """`path`; without one a file's or folder's place, of this name, in a new folder, which goes again where the body fails."""
    if path is not None:
        yield Path(path)
        return
    with work_folder("torchsmith-aot-", kept=True) as folder:
        yield folder / name


@contextmanager
def all_or_none(paths: Iterable[Path]) -> Iterator[None]:
    """Where the body fails, those of `paths` are deleted that were not there before: files, and folders that are empty then (each named
    before what is in it)."""
    new = [p for p in paths if not p.exists()]
    try:
        yield
    except BaseException:
        for path in reversed(new):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise


class _Pool(ThreadPoolExecutor):
    """Takes tasks after the end of the main thread too, where other threads and compilations in the background go on."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # whoever asks for the result gets it, as from a thread
            done.set_exception(error)
        return done


@contextmanager
def workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for the body's tasks. They have ended when this has, whatever ends it; tasks that have not begun are not begun then."""
    pool = _Pool(count)
    try:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
    finally:  # again: an interrupt may come while that waits
        pool.shutdown(cancel_futures=True)
