"""Small programs of every feature of Python, each a module of its own with state that lives from call to call.

A program of programs.txt begins with `### family/name` and defines `program(x, n)`; `STATE` is what it changes, `between(i)` runs
before call i. It is called five times with other sizes and numbers, as it is and compiled: results, arguments, state, printed text,
warnings and exceptions (with notes, causes and contexts) are the same.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_behaviours import seen

import torchsmith

HEAD, *TEXTS = Path(__file__).with_name("programs.txt").read_text().split("\n### ")
PROGRAMS = dict(text.split("\n", 1) for text in TEXTS)
CALLS = 5


def loaded(name: str) -> types.ModuleType:
    """A fresh module of this program, with its source where `inspect` looks for it."""
    module = types.ModuleType("stranger")
    source, file = f"{HEAD}\n{PROGRAMS[name]}", f"/programs/{name}.py"
    sys.modules["stranger"] = module
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), vars(module))
    return module


def told(e: BaseException | None, depth: int = 4) -> Any:
    """An exception and what it came from."""
    if e is None or depth == 0:
        return None
    inner = [told(x, depth - 1) for x in getattr(e, "exceptions", ())]
    context = "hidden" if e.__suppress_context__ else told(e.__context__, depth - 1)
    return type(e).__name__, str(e), tuple(getattr(e, "__notes__", ())), told(e.__cause__, depth - 1), context, inner


def called(module: types.ModuleType, fn: Callable[..., Any], i: int) -> dict[str, Any]:
    x = torch.rand((2, 3, 2, 4, 5)[i], 3, generator=torch.Generator().manual_seed(i)) * 2 - 1
    torch.manual_seed(i)
    random.seed(i)
    np.random.seed(i)
    getattr(module, "between", lambda i: None)(i)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = fn(x, i + 1)
            result = (type(result).__name__, list(result)) if isinstance(result, Iterator) else result
        except (Exception, SystemExit) as e:
            result = ("raised", told(e))
    said = [(w.category.__name__, str(w.message)) for w in warned]
    ours = ("torchsmith", "`torch.jit.script` is")  # a use of it inside of torch.func's own code
    said = [(c, text) for c, text in said if not text.startswith(ours) and "Triggered internally" not in text]
    met: dict[int, int] = {}
    memory: dict[int, int] = {}
    values = {"result": result, "argument": x, "state": getattr(module, "STATE", None)}
    shown = {k: re.sub(r"0x[0-9a-f]+", "0x", repr(seen(v, met, memory))) for k, v in values.items()}
    return {**shown, "text": text.getvalue(), "warnings": said}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    module = loaded(name)
    want = [called(module, module.program, i) for i in range(CALLS)]
    for dynamic in (None, True):
        module = loaded(name)
        compiled = torchsmith.compile(module.program, dynamic=dynamic, backend="eager")
        for i in range(CALLS):
            got = called(module, compiled, i)
            for part in got:
                assert got[part] == want[i][part], f"{part} of call {i}, dynamic={dynamic}"
    sys.modules.pop("stranger")


def test_there_are_many() -> None:
    assert len(PROGRAMS) >= 370
