"""From Triton texts to machine code for a GPU, in worker processes, cached by text (no torch, no triton in this process).

In: texts of emit/triton.py and a compute capability. Out: Images, in the same order. Works on machines without a GPU.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import events
from ..codes import Unsupported
from ..options import Options
from . import store
from .build import digest
from .files import scratch, workers
from .images import IMAGE_COMPILERS, IMAGE_STARTERS, Image

WORKER = Path(__file__).with_name("triton_worker.py")
SECONDS = 300
EARLY = 8  # processes that are started before there is a text
EACH = 12  # texts that one of them compiles in the time that another takes to start


@cache
def triton_version() -> str:
    """Raises Unsupported("RUN006") where triton is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError as e:
        raise Unsupported("RUN006", detail="triton is not installed") from e


class _Worker:
    """One process, asked one text at a time; started by the first."""

    def __init__(self) -> None:
        # single-threaded text work: no thread pools that a library might start
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")} | {"OMP_NUM_THREADS": "1"}
        if "PYTHONPATH" in os.environ:
            env["PYTHONPATH"] = os.environ["PYTHONPATH"]
        self.folder = scratch("torchsmith-triton-")
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(self.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            encoding="utf-8", errors="replace", env=env,
        )  # fmt: skip

    def ask(self, text: str, arch: int) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(SECONDS, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps({"text": text, "arch": arch}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError as e:
            raise Unsupported("RUN006", detail=f"the process that compiles Triton text: {e}") from e
        finally:
            timer.cancel()
        if not line:
            raise Unsupported("RUN006", detail="the process that compiles Triton text died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # it was not given the time


class _Workers:
    """Idle workers of this process. A process that was forked starts its own."""

    def __init__(self) -> None:
        self.lock, self.idle, self.pid = threading.Lock(), list[_Worker](), os.getpid()
        self.starter: threading.Thread | None = None

    def forget_parents(self) -> None:
        if self.pid != os.getpid():
            self.idle, self.pid, self.starter = [], os.getpid(), None

    def take(self) -> _Worker:
        self.wait()
        with self.lock:
            self.forget_parents()
            while self.idle:
                worker = self.idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.end()  # it died while nobody asked
        return _Worker()

    def give(self, worker: _Worker) -> None:
        with self.lock:
            self.idle.append(worker)

    def prepare(self, count: int) -> None:
        """Have so many processes started, if none is there yet: by a thread, since each takes some milliseconds."""

        def start() -> None:
            with contextlib.suppress(OSError):  # who needs one says so
                for _ in range(count):
                    self.give(_Worker())

        with self.lock:
            self.forget_parents()
            if self.starter is not None:
                return
            starter = threading.Thread(target=start, daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                starter.start()
                self.starter = starter

    def wait(self) -> None:
        """Until the processes that were asked for are there. A process that was forked has no such thread."""
        starter = self.starter if self.pid == os.getpid() else None
        if starter is not None:
            starter.join()

    def count_for(self, texts: int) -> int:
        """How many of them shall compile so many texts: those that are there, and more where that is worth their start."""
        self.wait()
        with self.lock:
            self.forget_parents()
            return max(1, len(self.idle) or min(texts, EARLY), -(-texts // EACH))

    def end(self) -> None:
        if self.pid == os.getpid():
            self.wait()
            for worker in self.idle:
                worker.end()
            self.idle = []


_WORKERS = _Workers()
atexit.register(_WORKERS.end)


def compile_images(texts: Sequence[str], arch: int, options: Options) -> tuple[Image, ...]:
    """Images of all texts. Raises Unsupported("RUN006") where triton is missing or refuses one."""
    version, caching = triton_version(), not options.force_disable_caches

    def place(text: str) -> Path:
        return store.folder("obj") / f"{digest('cubin', version, str(arch), text)}.cubin"

    def one(text: str) -> Image:
        worker = _WORKERS.take()
        try:
            answer = worker.ask(text, arch)
        except BaseException:
            worker.end()
            raise
        _WORKERS.give(worker)
        if "error" in answer:
            raise Unsupported("RUN006", detail=answer["error"])
        if caching:
            store.put(place(text), json.dumps(answer).encode())
        return _unpack(answer)

    made: dict[str, Image] = {}
    missing: list[str] = []
    for text in dict.fromkeys(texts):
        image = store.read(place(text), lambda content: _unpack(json.loads(content))) if caching else None
        events.emit("cache", name="object hit" if image is not None else "object miss")
        if image is None:
            missing.append(text)
        else:
            made[text] = image
    missing.sort(key=len, reverse=True)  # the long ones first: nobody waits for one that is begun last
    with events.timed("cubins", kernels=len(made) + len(missing)), workers(min(_jobs(options), _WORKERS.count_for(len(missing)))) as pool:
        made |= zip(missing, pool.map(one, missing), strict=True)
    return tuple(made[t] for t in texts)


def start_workers(options: Options) -> None:
    """Texts will come: have the processes ready by then, which takes them most of a second."""
    with contextlib.suppress(Unsupported):  # compile_images says so
        triton_version()
        _WORKERS.prepare(min(EARLY, _jobs(options)))


def _jobs(options: Options) -> int:
    return max(1, options.compile_threads or len(os.sched_getaffinity(0)))


def _unpack(answer: dict[str, Any]) -> Image:
    data, ptx = base64.b64decode(answer["cubin"]), base64.b64decode(answer["ptx"])
    return Image(data, answer["symbol"], answer["warps"], answer["shared"], answer["scratch"], ptx, answer["waits"])


IMAGE_COMPILERS["triton"] = compile_images
IMAGE_STARTERS["triton"] = start_workers
