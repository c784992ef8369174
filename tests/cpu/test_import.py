"""In a process with torch and torchsmith alone: what an import costs, and that nobody's other compiler is pulled in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fresh

ROOT = Path(__file__).resolve().parents[2]

FRESH = """
import sys
import torch
before = set(sys.modules)
import torchsmith
torchsmith.compile
new = set(sys.modules) - before
import sysconfig
ours = {m for m in new if m.split(".")[0] == "torchsmith"}
others = sorted({m.split(".")[0] for m in new - ours} - sys.stdlib_module_names - {"torch", sysconfig._get_sysconfigdata_name()})

def fn(x):
    return torch.sin(torch.cos(x))

x = torch.randn(8)
assert torch.allclose(torchsmith.compile(fn)(x), fn(x))
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.LayerNorm(4))
with torch.no_grad():
    y = torch.randn(2, 3)
    assert torch.allclose(torchsmith.compile(model)(y), model(y), atol=1e-6)
new = sorted(set(sys.modules) - before)
foreign = [m for m in new if m.startswith(("torch._dynamo", "torch._inductor", "torch._functorch", "torch.jit", "sympy", "triton"))]
print(len(ours), others, foreign, sep="\t")
"""

def test_an_import_loads_little_and_compiling_no_other_compiler(tmp_path: Path) -> None:
    """What is loaded is what an import costs: some 75 modules of ours take 0.1 s, where no other package comes with them."""
    env = os.environ | {"TORCHSMITH_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    count, others, foreign = done.stdout.strip().split("\n")[-1].split("\t")
    assert int(count) <= 80 and others == "[]" and foreign == "[]"


def test_without_docstrings_and_assertions(tmp_path: Path) -> None:
    """As under `python -OO`, where dataclasses print the defaults of fields for lack of a docstring: our files compiled so, not torch's."""
    program = """
import importlib, importlib.machinery, pkgutil
import torch
importlib.machinery.SourceFileLoader.get_code = lambda self, name: compile(self.get_data(self.path), self.path, "exec", optimize=2)
import torchsmith
for m in pkgutil.walk_packages(torchsmith.__path__, "torchsmith."):
    if not m.name.endswith(("__main__", "triton_worker")):
        importlib.import_module(m.name)
report = torchsmith.explain(lambda x: (x * 2).relu())(torch.ones(3))
print(torchsmith.options.__doc__, str(report).startswith("graphs: 1   breaks: 0   kernels: 1"))
"""
    done = fresh.run(program, TORCHSMITH_CACHE_DIR=str(tmp_path))
    assert done.stdout.strip().endswith("None True"), done.stdout + done.stderr
