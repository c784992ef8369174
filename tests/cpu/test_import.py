"""In a process with torch and torchsmith alone: what an import costs, and that nobody's other compiler is pulled in."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FOREIGN = """
import sys
import torch
before = set(sys.modules)
import torchsmith

def fn(x):
    return torch.sin(torch.cos(x))

x = torch.randn(8)
assert torch.allclose(torchsmith.compile(fn)(x), fn(x))
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.LayerNorm(4))
with torch.no_grad():
    y = torch.randn(2, 3)
    assert torch.allclose(torchsmith.compile(model)(y), model(y), atol=1e-6)
new = sorted(set(sys.modules) - before)
print([m for m in new if m.startswith(("torch._dynamo", "torch._inductor", "torch._functorch", "torch.jit", "sympy", "triton"))])
"""

LOADED = """
import sys
import torch
before = set(sys.modules)
import torchsmith
torchsmith.compile
new = set(sys.modules) - before
import sysconfig
ours = {m for m in new if m.split(".")[0] == "torchsmith"}
print(len(ours), sorted({m.split(".")[0] for m in new - ours} - sys.stdlib_module_names - {"torch", sysconfig._get_sysconfigdata_name()}))
"""


def run(program: str, cache: Path, *flags: str) -> str:
    env = {**os.environ, "TORCHSMITH_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "src")}
    env["PYTHONPYCACHEPREFIX"] = str(cache / "bytecode")
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run([sys.executable, *flags, "-c", program], env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("\n")[-1]


def test_compiling_loads_no_other_compiler(tmp_path: Path) -> None:
    assert run(FOREIGN, tmp_path) == "[]"


def test_optimised_python_imports_and_compiles_too(tmp_path: Path) -> None:
    """python -OO drops docstrings, for which dataclasses then print the defaults of their fields, and assertions."""
    program = """
import importlib, pkgutil
import torch, torchsmith
for m in pkgutil.walk_packages(torchsmith.__path__, "torchsmith."):
    if not m.name.endswith(("__main__", "triton_worker")):
        importlib.import_module(m.name)
report = torchsmith.explain(lambda x: (x * 2).relu())(torch.ones(3))
print(__doc__, str(report).startswith("graphs: 1   breaks: 0   kernels: 1"))
"""
    assert run(program, tmp_path, "-OO") == "None True"


def test_an_import_loads_little(tmp_path: Path) -> None:
    """What is loaded is what an import costs: some 75 modules of ours take 0.1 s, where no other package comes with them."""
    count, others = run(LOADED, tmp_path).split(" ", 1)
    assert int(count) <= 80 and others == "[]"

def test_what_sources_import_is_declared() -> None:
    """What a module imports when it is itself imported is installed with torchsmith; torch itself does not need numpy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    declared = {re.split(r"\W", row)[0] for row in rows} | {"torchsmith"} | set(sys.stdlib_module_names)
    undeclared = set()
    for path in (ROOT / "src" / "torchsmith").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            undeclared |= {(n.split(".")[0], path.name) for n in names if n.split(".")[0] not in declared}
    assert undeclared <= {("triton", "triton_worker.py")}  # a process of its own, which is started where triton is
