"""Compilations beside the program: one thread that does what it is given, in order, under the modes of the call that asked.

In: functions without arguments. Nothing waits for them but `wait`, and a fork for an import that one is in. A forked child starts without
the thread and with nothing to do.
A trace made while the program goes on is right wherever its guards hold: every part of the world is read once, and guarded with what was read
(`World.guard`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import events
from .guards import global_state

SWITCH = 0.0005  # seconds after which the program gets the interpreter back; Python's own 0.005 would be felt at every operator
PAUSE = 0.01  # seconds before a job begins: the call that asked for it has returned by then
IMPORT_SECONDS = 10  # that a fork waits at most
_CHANGED = threading.Condition()
_JOBS: deque[Callable[[], None]] = deque()
_STATE: dict[str, Any] = {"thread": None, "busy": False, "closed": False}


def submit(job: Callable[[], None]) -> None:
    """Do `job` later, in the thread, which is started if there is none."""
    with _CHANGED:
        if _STATE["closed"]:
            return
        _JOBS.append(job)
        if _STATE["thread"] is None:
            thread = threading.Thread(target=_run, name="torchsmith compiles", daemon=True)
            _STATE["thread"] = thread
            thread.start()
        _CHANGED.notify_all()


def wait(timeout: float | None = None) -> bool:
    """Until all that was asked for is done; False if `timeout` seconds were not enough."""
    end = None if timeout is None else time.monotonic() + timeout
    with _CHANGED:
        while _JOBS or _STATE["busy"]:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            _CHANGED.wait(left)
    return True


def _run() -> None:
    while True:
        with _CHANGED:
            while not _JOBS:
                _CHANGED.wait()
            job = _JOBS.popleft()
            _STATE["busy"] = True
        time.sleep(PAUSE)
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH))
        shorter = sys.getswitchinterval()
        try:
            job()
        except BaseException as error:  # a job keeps what it raises; this would be ours
            events.emit("fallback", code="API005", detail=f"{type(error).__name__}: {error}")
        finally:
            if sys.getswitchinterval() == shorter:  # nobody else set it meanwhile
                sys.setswitchinterval(before)
            del job  # and the arguments that it holds
            with _CHANGED:
                _STATE["busy"] = False
                _CHANGED.notify_all()


def _close() -> None:
    """The program ends: nothing more is begun."""
    with _CHANGED:
        _STATE["closed"] = True
        _JOBS.clear()
    wait(5)


def _before_fork() -> None:
    """Until the thread is in no import: the child would find the module half made, and locked by a thread that it has not."""
    thread = _STATE["thread"]
    end = time.monotonic() + IMPORT_SECONDS
    while thread not in (None, threading.current_thread()) and _imports(thread.ident) and time.monotonic() < end:
        time.sleep(SWITCH)


def _imports(thread: int | None) -> bool:
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _after_fork() -> None:
    _CHANGED.__init__()  # type: ignore[misc]  # the parent's thread may hold it
    _JOBS.clear()
    _STATE.update(thread=None, busy=False)


atexit.register(_close)
os.register_at_fork(before=_before_fork, after_in_child=_after_fork)

# ---------------------------------------------------------------- modes


def modes() -> Callable[[], contextlib.AbstractContextManager[None]] | None:
    """What makes another thread compute under this thread's modes; None where that cannot be done."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return None
    state = global_state()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(state.inference_mode))
            stack.enter_context(torch.set_grad_enabled(state.grad_enabled))
            *rows, cached = state.autocast
            for device, on, dtype in rows:
                if on:
                    stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cached))
            yield

    return entered
