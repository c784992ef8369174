"""The numerics bar of bench/numerics.py, held by a sample: at most twice the error of eager against float64, special values as in eager."""

from __future__ import annotations

import pytest
import torch
from numerics import CASES, Outcome, check_case, check_model, check_special, judge

BY_NAME = {c.name: c for c in CASES}
SAMPLE = [
    "linear", "mv", "one row of activations", "linear long sum", "conv2d 3x3 stride 2", "conv2d depthwise", "conv2d transposed",
    "attention, causal",
]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_error_of_float32(name: str) -> None:
    outcome = check_case(BY_NAME[name], torch.float32)
    assert outcome.holds, outcome.row()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_error_of_other_dtypes(dtype: torch.dtype) -> None:
    outcome = check_case(BY_NAME["conv2d 3x3"], dtype)
    assert outcome.holds, outcome.row()


@pytest.mark.parametrize(("name", "which", "where"), [
    ("linear", "inf", 0), ("linear", "nan", 1), ("linear", "denormal", 0), ("conv2d 3x3", "inf", 0), ("conv2d 3x3", "huge", 0),
])  # fmt: skip
def test_special_values(name: str, which: str, where: int) -> None:
    outcome = check_special(BY_NAME[name], which, where)
    assert outcome.holds, outcome.row()


def test_error_of_a_model() -> None:
    outcome = check_model("bert_small")
    assert outcome.holds, outcome.row()


def test_the_bar_can_be_missed() -> None:
    want = torch.randn(100, dtype=torch.float64)
    eager = want.float()
    assert judge("same", eager, eager, want).holds
    assert not judge("off", eager + 1e-4, eager, want).holds
    assert not judge("nan", eager * float("nan"), eager, want).holds
    assert isinstance(judge("shape", eager[:5], eager, want), Outcome) and not judge("shape", eager[:5], eager, want).holds
