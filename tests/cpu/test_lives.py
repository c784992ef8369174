"""Each program of lives.py and lives_models.py, as it is and compiled without kernels, with sizes that vary or not: results, changes,
exceptions with their causes, printed text, warnings, and which results are or share memory with which others."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from typing import Any

import lives_models  # noqa: F401  (fills LIVES)
import numpy as np
import pytest
import torch
from lives import LIVES
from test_behaviours import seen

import torchsmith


def lived(program: Any, compiled: Any) -> dict[str, Any]:
    """All that a program showed, compiled so."""
    text = io.StringIO()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with contextlib.redirect_stdout(text), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result: Any = program(compiled)
        except Exception as error:
            result = error
    said = [(w.category, str(w.message)) for w in warned]
    said = [(c, line) for c, line in said if not line.startswith("torchsmith") and "Triggered internally" not in line]
    return {"result": seen(result, {}, {}, 12), "text": text.getvalue(), "warnings": said}


@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
@pytest.mark.parametrize("name", LIVES)
def test_life(name: str, dynamic: bool | None) -> None:
    want = lived(LIVES[name], lambda fn: fn)
    got = lived(LIVES[name], torchsmith.compile(backend="eager", dynamic=dynamic))
    for part in want:
        assert got[part] == want[part], part
