"""Random tensor programs through lowering, fusion and kernels (interpreted) and as native code: equal to eager."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fuzz_calls
import fuzz_chains
import fuzz_directions
import fuzz_foreign
import fuzz_harness
import fuzz_layers
import fuzz_modules
import fuzz_numbers
import fuzz_rules
import fuzz_sizes
import fuzz_state
import pytest
import torch
from fuzz import compare
from fuzz_harness import Draw


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", (1001, 1013, 2009))
def test_layers_that_are_trained(seed: int) -> None:
    """Gradients of inputs and parameters in any memory order, and whole steps."""
    fuzz_layers.compare(seed, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_rules_and_eager_accept_alike(dtype: torch.dtype) -> None:
    """Operators with arguments changed in one place or two, of a few entries of torch's operator database."""
    calls = fuzz_rules.corpus(dtype, "*", Draw(3), entries=25)
    assert not [f"{fuzz_rules.text(call)}: {why}" for call, why in fuzz_rules.findings(calls, 3, 80)]


@pytest.mark.filterwarnings("ignore")
def test_numbers_that_vary() -> None:
    """Every number of some operators: of the rules of many, and of a few as an argument of a compiled function."""
    ops = fuzz_numbers.operators()
    known = fuzz_numbers.database_calls(torch.float32, 6)
    named = (torch.ops.aten.clamp.default, torch.ops.aten.leaky_relu.default)
    found = [
        f
        for op in ops
        if op in known or op in named
        for f in fuzz_numbers.findings(op, fuzz_numbers.calls_of(op, known, torch.float32), op not in named)
    ]
    assert len(found) > 200
    assert [f"{fuzz_rules.text(call)} {place}: {why}" for call, place, why in found if why] == []


@pytest.mark.parametrize("seed", (5, 26, 34, 43, 47, 51, 9160, 9179))
def test_state_shared_with_others(seed: int) -> None:
    """Globals of modules, classes, locks, foreign context managers, exceptions, patches between calls."""
    assert fuzz_state.compare(seed, 8) == []


@pytest.mark.parametrize("first", range(300, 400, 20))
def test_arrays_and_objects_that_handle_torch_functions(first: int) -> None:
    """NumPy, `__torch_function__`, subclasses of Tensor and modes; captured, and run by torch."""
    for seed in range(first, first + 20):
        assert fuzz_foreign.compare(seed, 5, "eager") == []


@pytest.mark.filterwarnings("ignore")
def test_chains_of_public_operators() -> None:
    """Samples of torch's operator database and other public names on values of earlier steps; sizes that change."""
    found = fuzz_chains.findings(fuzz_chains.Corpus(), range(12), lambda what: None)
    assert [(seed, why) for seed, why, _ in found if why] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("direction", fuzz_directions.DIRECTIONS)
def test_single_calls_of_one_kind(direction: str) -> None:
    found = fuzz_chains.findings(fuzz_chains.Corpus(), range(3, 4), lambda what: None, direction=direction)
    assert [(seed, why) for seed, why, _ in found if why] == []


def test_many_processes(tmp_path: Path) -> None:
    """bench/fuzz.py: two programs of each of two fuzzers in two processes."""
    out = tmp_path / "found.md"
    command = [sys.executable, "bench/fuzz.py", "sizes", "state", "--programs", "2", "--jobs", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    told = out.read_text()
    assert "4 programs" in told and all(re.search(rf"\| {name} \| 2 \| 1 \| [\d.]+ \| 0 \|", told) for name in ("sizes", "state")), told


def test_texts_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_harness, "DEVICE", "cuda")
    text = "torch.zeros((2, 3), dtype=torch.int64) + torch.tensor(5) * torch.from_numpy(x.numpy())"
    made = "torch.zeros((2, 3), dtype=torch.int64, device='cuda') + torch.tensor(5, device='cuda')"
    assert fuzz_harness.placed(text) == f"{made} * torch.asarray(device='cuda', obj=x.cpu().numpy())"
