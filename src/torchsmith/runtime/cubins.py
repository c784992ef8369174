"""From Triton texts to machine code for a GPU, in worker processes, cached by text (no torch, no triton in this process).

In: texts of emit/triton.py and a compute capability. Out: Images, in the same order. Works on machines without a GPU. Texts are begun as
they come, while the rest of the graph is compiled (begin_text); what is made of them is found in the cache.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import heapq
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import events
from ..codes import Unsupported
from ..options import Options
from . import store
from .build import digest
from .files import scratch
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
    """Workers of this process, of which some are idle. A process that was forked starts its own."""

    def __init__(self) -> None:
        self.lock, self.idle, self.pid = threading.Lock(), list[_Worker](), os.getpid()
        self.busy = set[_Worker]()
        self.starter: threading.Thread | None = None

    def forget_parents(self) -> None:
        if self.pid != os.getpid():
            self.idle, self.busy, self.pid, self.starter = [], set(), os.getpid(), None

    def take(self) -> _Worker:
        self.wait()
        with self.lock:
            self.forget_parents()
            while self.idle:
                worker = self.idle.pop()
                if worker.process.poll() is None:
                    self.busy.add(worker)
                    return worker
                worker.end()  # it died while nobody asked
        worker = _Worker()
        with self.lock:
            self.busy.add(worker)
        return worker

    def give(self, worker: _Worker) -> None:
        with self.lock:
            self.busy.discard(worker)
            self.idle.append(worker)

    def drop(self, worker: _Worker) -> None:
        with self.lock:
            self.busy.discard(worker)
        worker.end()

    def prepare(self, count: int) -> None:
        """Have so many processes started, if none is there yet: by a thread, since each takes some milliseconds."""

        def start() -> None:
            with contextlib.suppress(OSError):  # who needs one says so
                for _ in range(count):
                    worker = _Worker()
                    with self.lock:
                        self.idle.append(worker)

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
            return max(1, len(self.idle) + len(self.busy) or min(texts, EARLY), -(-texts // EACH))

    def end(self) -> None:
        if self.pid == os.getpid():
            self.wait()
            for worker in (*self.idle, *self.busy):  # nobody waits for what these do
                worker.end()
            self.idle, self.busy = [], set()


_WORKERS = _Workers()
atexit.register(_WORKERS.end)


class _Queue:
    """Texts that wait for a worker, the long ones first: nobody waits for one that is begun last. The threads that serve it end with it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[tuple[int, int, Future[Image], Callable[[], Image]]] = []
        self.numbers = itertools.count()
        self.threads = 0

    def add(self, length: int, task: Callable[[], Image], jobs: int) -> Future[Image]:
        """What `task` will give; `jobs` of them may run at once."""
        done: Future[Image] = Future()
        with self.lock:
            heapq.heappush(self.waiting, (-length, next(self.numbers), done, task))
            is_short = self.threads < min(jobs, _WORKERS.count_for(len(self.waiting) + self.threads))
            self.threads += is_short
        if is_short:
            try:
                threading.Thread(target=self.serve, daemon=True).start()
            except RuntimeError:  # the interpreter ends
                self.serve()
        return done

    def serve(self) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    self.threads -= 1
                    return
                *_, done, task = heapq.heappop(self.waiting)
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(task())
            except BaseException as error:  # whoever asks for the result gets it
                done.set_exception(error)


_QUEUE = _Queue()
_UNDER_WAY: dict[Path, Future[Image]] = {}  # place in the cache -> what will be put there


def _forget_parents() -> None:
    """A process that was forked has none of the threads."""
    _QUEUE.__init__()  # type: ignore[misc]
    _UNDER_WAY.clear()


os.register_at_fork(after_in_child=_forget_parents)


def _place(text: str, arch: int) -> Path:
    return store.folder("obj") / f"{digest('cubin', triton_version(), str(arch), text)}.cubin"


def _compile(text: str, arch: int, caching: bool) -> Image:
    worker = _WORKERS.take()
    try:
        answer = worker.ask(text, arch)
    except BaseException:
        _WORKERS.drop(worker)
        raise
    _WORKERS.give(worker)
    if "error" in answer:
        raise Unsupported("RUN006", detail=answer["error"])
    if caching:
        store.put(_place(text, arch), json.dumps(answer).encode())
    return _unpack(answer)


def _begin(text: str, arch: int, options: Options) -> Future[Image]:
    """The image of a text, one day; two who ask for the same one while it is made get the same."""
    caching = not options.force_disable_caches

    def add() -> Future[Image]:
        return _QUEUE.add(len(text), lambda: _compile(text, arch, caching), _jobs(options))

    if not caching:
        return add()
    place = _place(text, arch)
    found = _UNDER_WAY.get(place)
    if found is None:
        found = _UNDER_WAY[place] = add()
        found.add_done_callback(lambda _: _UNDER_WAY.pop(place, None))
    return found


def begin_text(text: str, arch: int, options: Options) -> None:
    """compile_images will be asked for this one: it is begun, if the cache lacks it."""
    with contextlib.suppress(Unsupported, OSError):  # compile_images says so
        if not options.force_disable_caches and not _place(text, arch).exists():
            _begin(text, arch, options)


def compile_images(texts: Sequence[str], arch: int, options: Options) -> tuple[Image, ...]:
    """Images of all texts. Raises Unsupported("RUN006") where triton is missing or refuses one."""
    triton_version()
    caching = not options.force_disable_caches
    made: dict[str, Image] = {}
    waits: dict[str, Future[Image]] = {}
    for text in dict.fromkeys(texts):
        begun = _UNDER_WAY.get(_place(text, arch)) if caching else None  # asked before the cache is, where it soon will be
        image = store.read(_place(text, arch), lambda content: _unpack(json.loads(content))) if caching and begun is None else None
        events.emit("cache", name="object hit" if image is not None else "object miss")
        if image is None:
            waits[text] = begun or _begin(text, arch, options)
        else:
            made[text] = image
    with events.timed("cubins", kernels=len(made) + len(waits)):
        try:
            for text, wait in waits.items():
                made[text] = _result(wait) or _compile(text, arch, caching)
        except BaseException:
            for wait in waits.values():
                wait.cancel()
            raise
    return tuple(made[t] for t in texts)


def _result(wait: Future[Image]) -> Image | None:
    """None where somebody else has asked for it and given up."""
    try:
        return wait.result()
    except CancelledError:
        return None


def start_workers(options: Options) -> Callable[[str, int], None]:
    """Texts will come: have the processes ready by then, which takes them most of a second."""
    with contextlib.suppress(Unsupported):  # compile_images says so
        triton_version()
        _WORKERS.prepare(min(EARLY, _jobs(options)))
    return lambda text, arch: begin_text(text, arch, options)


def _jobs(options: Options) -> int:
    return max(1, options.compile_threads or len(os.sched_getaffinity(0)))


def _unpack(answer: dict[str, Any]) -> Image:
    data, ptx = base64.b64decode(answer["cubin"]), base64.b64decode(answer["ptx"])
    return Image(data, answer["symbol"], answer["warps"], answer["shared"], answer["scratch"], ptx, answer["waits"])


IMAGE_COMPILERS["triton"] = compile_images
IMAGE_STARTERS["triton"] = start_workers
