"""Ctrl-C at a place and not at a time: KeyboardInterrupt before any line or bytecode of torchsmith's Python code that a call runs."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torchsmith

LOAD_CONST = dis.opmap["LOAD_CONST"]
OURS = str(Path(torchsmith.__file__).parent), "<torchsmith"  # files, and code that is made


def _leaves_a_with(frame: FrameType) -> bool:
    """Is `__exit__(None, None, None)` next? Python lets no interrupt come between a body and that call, by which locks are released."""
    code, at = frame.f_code, frame.f_lasti
    return all(op == LOAD_CONST and code.co_consts[arg] is None for op, arg in zip(*[iter(code.co_code[at : at + 6])] * 2, strict=True))


def steps(call: Callable[[], object], at: int = 0, *, kind: str = "line", error: type[BaseException] = KeyboardInterrupt) -> int:
    """Run `call`, and raise `error` before its step number `at` (0: never), in this thread. How many steps it took.

    kind: "line", or "opcode" for the finest steps. What `call` raises otherwise is raised here too.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = kind == "opcode", kind == "line"
        if event == kind and not _leaves_a_with(frame):
            count += 1
            if count == at:
                raise error("at this step")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except error as e:
        if not at or e.args != ("at this step",):
            raise
    finally:
        sys.settrace(before)
    return count
