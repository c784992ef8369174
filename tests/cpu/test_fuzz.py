"""Random tensor programs through lowering, fusion and kernels (interpreted) and as native code: equal to eager."""

from __future__ import annotations

import fuzz_calls
import fuzz_modules
import fuzz_sizes
import pytest
import torch
from fuzz import compare


@pytest.mark.parametrize("seed", range(40))
def test_interpreted_kernels(seed: int) -> None:
    compare(seed, 10, "sched")


@pytest.mark.parametrize("seed", range(300, 320))
def test_interpreted_lowering(seed: int) -> None:
    compare(seed, 14, "lower")


@pytest.mark.parametrize("seed", range(600, 606))
def test_native_code(seed: int) -> None:
    compare(seed, 14, "compile")


@pytest.mark.parametrize("seed", range(8))
def test_calls(seed: int) -> None:
    """Writes through views, 8-byte values beside products, results that share memory, sizes that change."""
    fuzz_calls.compare(seed, 8)


@pytest.mark.parametrize("seed", range(6))
def test_several_sizes(seed: int) -> None:
    with torch.inference_mode():
        fuzz_sizes.compare(seed, 5)


@pytest.mark.parametrize("seed", (2, 7, 11, 13))
def test_modules_that_change(seed: int) -> None:
    """Weights, sizes, modes, copies, threads and forks between calls."""
    fuzz_modules.compare(seed, 6)
