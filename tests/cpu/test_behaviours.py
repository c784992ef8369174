"""Each behaviour, compiled without kernels: results, changes of what was passed, exceptions with type and message, printed text, warnings,
and which results are, or share memory with, which other results and arguments."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from behaviours import BEHAVIOURS, State

import torchsmith

torch.manual_seed(0)
X = torch.rand(2, 3) * 2 - 1
ATOMS = (int, float, str, bytes, bool, complex, type(None), type, torch.dtype, torch.device, torch.layout, torch.Size, range)


def seen(value: Any, met: dict[int, int], memory: dict[int, int], depth: int = 8) -> Any:
    """A value as plain data; objects and memory by the order in which they were met."""
    if isinstance(value, ATOMS):
        return type(value).__name__, repr(value)
    known = id(value) in met
    number = met.setdefault(id(value), len(met))
    if known or depth == 0:
        return "again", number

    def inner(v: Any) -> Any:
        return seen(v, met, memory, depth - 1)

    if isinstance(value, torch.Tensor):
        shared = memory.setdefault(value.untyped_storage().data_ptr(), len(memory)) if value.numel() else -1
        what = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset(), value.requires_grad, shared
        return "tensor", number, what, repr(value.detach().double().flatten().tolist())
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return type(value).__name__, number, [inner(v) for v in value]
    if isinstance(value, dict):
        return type(value).__name__, number, [(inner(k), inner(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, value))
    if isinstance(value, BaseException):
        return type(value).__name__, [inner(v) for v in value.args]
    if hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__, number, [(k, inner(v)) for k, v in vars(value).items()]
    return type(value).__name__


def observed(call: Any) -> dict[str, Any]:
    """All that one call of it does; what is kept alive keeps addresses apart."""
    x = X.clone()
    state, text = State(x), io.StringIO()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with contextlib.redirect_stdout(text), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result: Any = call(x, state)
        except Exception as error:
            result = error
    met: dict[int, int] = {}
    memory: dict[int, int] = {}
    said = [(w.category, str(w.message)) for w in warned]
    said = [(c, text) for c, text in said if not text.startswith("torchsmith") and "Triggered internally" not in text]  # C++ warns once
    return {"arguments": seen([x, state], met, memory), "result": seen(result, met, memory), "text": text.getvalue(), "warnings": said}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(name: str) -> None:
    fn = BEHAVIOURS[name]

    def around(x, s):
        y = x * 2
        out = fn(y, s)
        return out, y + 1

    compiled = torchsmith.compile(around, backend="eager")
    for turn in ("first", "second"):
        want, got = observed(around), observed(compiled)
        for part in want:
            assert got[part] == want[part], f"{part} of the {turn} call"


def test_there_are_many() -> None:
    assert len(BEHAVIOURS) >= 600
