"""Packages a module and runs the package in fresh processes that have no code of the module, for comparison with eager."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fresh
import torchsmith
from torchsmith import aot

ROOT = Path(__file__).resolve().parents[2]
OVERHEAD = 1 << 20  # bytes that a package may have beside its weights
CHILD = r"""
import json, sys
roads, package, folder = sys.argv[1:]
if roads == "numpy":
    sys.modules["torch"] = None
import numpy as np

def loaded(road):
    if road == "aoti":  # before anything of ours is there
        import torch
        return torch._inductor.aoti_load_package(package)
    from torchsmith import aot
    return aot.load_package(package)

def nested(shape, arrays):
    return [nested(s, arrays) for s in shape] if isinstance(shape, list) else arrays[shape]

def flat(value):
    return [x for v in value for x in flat(v)] if isinstance(value, (list, tuple)) else [value]

def worst_of(run, enter, leave):
    worst = []
    for call, shape in enumerate(json.load(open(f"{folder}/calls.json"))):
        stored = np.load(f"{folder}/{call}.npz")
        given = [enter(stored[f"in{i}"].copy()) for i in range(sum(k.startswith("in") for k in stored))]
        results = flat(run(*nested(shape, given)))
        assert len(results) == sum(k.startswith("out") for k in stored), len(results)
        got = {f"out{i}": leave(r) for i, r in enumerate(results)} | {f"after{i}": leave(t) for i, t in enumerate(given)}
        for name, array in got.items():
            want = stored[name]
            assert array.shape == want.shape and array.dtype == want.dtype, (call, name, array.shape, want.shape, array.dtype)
            scale = max(1e-6, float(abs(want).max())) if want.size else 1.0
            worst.append(float(abs(array.astype(np.float64) - want.astype(np.float64)).max()) / scale if want.size else 0.0)
    return max(worst)

far = {}
for road in roads.split(","):
    run = loaded(road)
    if road == "numpy":
        enter = leave = lambda a: a
    else:
        import torch
        enter, leave = torch.from_numpy, lambda t: t.numpy()
    far[road] = worst_of(run, enter, leave)
if roads == "numpy":
    assert "libtorch" not in open("/proc/self/maps").read()
print(json.dumps(far))
"""


def flat(value: Any) -> list[torch.Tensor]:
    return [t for v in value for t in flat(v)] if isinstance(value, (list, tuple)) else [value]


def numbered(value: Any, count: list[int]) -> Any:
    """The structure of arguments, each tensor by its number."""
    if isinstance(value, (list, tuple)):
        return [numbered(v, count) for v in value]
    count[0] += 1
    return count[0] - 1


def check_package(model: torch.nn.Module, calls: Sequence[tuple[Any, ...]], dynamic: Any, folder: Path, limit: float = 1e-5) -> Path:
    """Export with the middle call's arguments, package, and run all `calls` with our loader, with it on NumPy arrays where torch cannot be
    imported, and with PyTorch's loader. Results, and arguments after the call, are eager's up to `limit` of the largest."""
    package = folder / "model.pt2"
    with torch.no_grad():
        example = copy.deepcopy(calls[len(calls) // 2])
        program = torchsmith.export.export(copy.deepcopy(model), example, dynamic_shapes=dynamic)
        aot.compile_and_package(program, package_path=package)
        state = {id(t): t.nbytes for t in model.state_dict().values()}
        assert package.stat().st_size < sum(state.values()) + OVERHEAD, (package.stat().st_size, sum(state.values()))
        for number, args in enumerate(calls):
            stored = {f"in{i}": t.numpy().copy() for i, t in enumerate(flat(args))}
            given = copy.deepcopy(args)
            stored |= {f"out{i}": t.numpy().copy() for i, t in enumerate(flat(model(*given)))}
            stored |= {f"after{i}": t.numpy().copy() for i, t in enumerate(flat(given))}
            np.savez(folder / f"{number}.npz", **stored)  # type: ignore[arg-type]
    (folder / "calls.json").write_text(json.dumps([numbered(args, [0]) for args in calls]))
    for roads in ("numpy", "aoti,torch"):
        if roads == "numpy":
            env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
            command = [sys.executable, "-c", CHILD, roads, str(package), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        else:
            done = fresh.run(CHILD, roads, package, folder)
        assert done.returncode == 0, f"{roads}: {done.stderr}"
        far = json.loads(done.stdout.splitlines()[-1])
        assert len(far) == roads.count(",") + 1 and max(far.values()) <= limit, far
    return package
