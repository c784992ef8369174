"""Scripts that no test runs (bench, examples) use names and arguments of torchsmith, and of each other, that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import torchsmith
from torchsmith.options import compiler_command

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(ROOT / "bench").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
NAMES = {str(script.relative_to(ROOT)): script for script in SCRIPTS}
MISSING = object()


def texts(script: Path) -> Iterator[ast.Module]:
    """The script, and the programs for other processes that it has in strings."""
    tree = ast.parse(script.read_text())
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import torchsmith" in inspect.cleandoc(node.value):
            try:
                yield ast.parse(inspect.cleandoc(node.value))
            except SyntaxError:  # a sentence, or a template
                continue


def member(holder: Any, name: str) -> Any:
    """An attribute of a module, or a module in it."""
    if not hasattr(holder, name) and hasattr(holder, "__path__"):
        try:
            return importlib.import_module(f"{holder.__name__}.{name}")
        except ModuleNotFoundError:
            return MISSING
    return getattr(holder, name, MISSING)


def imported(tree: ast.Module) -> Iterator[tuple[str, Any, str]]:
    """(name in the script, object of torchsmith, what was written) of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] == "torchsmith":
                    found = importlib.import_module(a.name)
                    yield (a.asname, found, a.name) if a.asname else ("torchsmith", importlib.import_module("torchsmith"), a.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchsmith":
            holder = importlib.import_module(str(node.module))
            for a in node.names:
                yield a.asname or a.name, member(holder, a.name), f"{node.module}.{a.name}"


def bound(tree: ast.Module) -> set[str]:
    """Names that something else than an import binds anywhere in the script."""
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}


def resolve(node: ast.expr, known: dict[str, Any]) -> Any:
    """The object that a chain of names means, as far as modules go; None where that is not known."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        holder = resolve(node.value, known)
        return member(holder, node.attr) if isinstance(holder, types.ModuleType) else holder if holder is MISSING else None
    return None


def takes(function: Any, call: ast.Call) -> str:
    """Why a function cannot be called so; nothing where it can, or where the call does not show."""
    starred = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    if starred or not isinstance(function, types.FunctionType | type):
        return ""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*call.args, **{str(k.arg): k.value for k in call.keywords})
    except TypeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_what_scripts_use_of_torchsmith_is_there(name: str) -> None:
    wrong = []
    for tree in texts(NAMES[name]):
        found = list(imported(tree))
        wrong += [said for _, value, said in found if value is MISSING]
        known = {local: value for local, value, _ in found if local not in bound(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and resolve(node, known) is MISSING:
                wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Call) and (said := takes(resolve(node.func, known), node)):
                wrong.append(f"line {node.lineno}: {ast.unparse(node)}: {said}")
    assert not wrong


def test_what_benches_use_of_each_other_is_there() -> None:
    """`from paired import compare`: modules of bench are read, not imported."""
    top = ROOT / "bench"
    benches = {".".join(s.relative_to(top).with_suffix("").parts): ast.parse(s.read_text()) for s in SCRIPTS if s.is_relative_to(top)}
    wrong = []
    for module, tree in benches.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            where = ".".join(filter(None, [module.rsplit(".", node.level)[0] if node.level else "", node.module]))
            if where not in benches:
                continue
            defined = bound(benches[where]) | {
                n.asname or n.name if isinstance(n, ast.alias) else n.name
                for n in ast.walk(benches[where])
                if isinstance(n, ast.alias | ast.FunctionDef | ast.ClassDef)
            }
            wrong += [f"{module}: {where}.{a.name}" for a in node.names if a.name not in defined and f"{where}.{a.name}" not in benches]
    assert not wrong


def test_benches_take_help() -> None:
    """`--help` says what a script is for, and starts no measurement."""
    mains = [p for p in (ROOT / "bench").glob("*.py") if "\nif __name__ ==" in p.read_text()]
    assert mains and not [p.name for p in mains if "ArgumentParser(description=__doc__" not in p.read_text()]


def test_fuzzers_run_on_the_fake_device(tmp_path: Path) -> None:
    """A program is compiled as for a GPU, and nothing of ours fails meanwhile."""
    command = [sys.executable, str(ROOT / "bench" / "fuzz.py"), "--device", "fake", "--show", "sizes", "3"]
    own = os.environ | {"TORCHSMITH_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=own)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stdout + done.stderr


def test_fuzzers_compile_a_library_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose vectors have several widths, and the host program, without optimizations."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    unoptimized: Any = importlib.import_module("unoptimized")
    gcc = unoptimized.programs(compiler_command())
    if gcc is None:
        pytest.skip("the compiler is not gcc")
    started, run = list[str](), unoptimized.run
    monkeypatch.setattr(unoptimized, "run", lambda command, cwd: (started.append(command[0]), run(command, cwd)))

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2 + 1).sum(0), torch.sin(y.double()).to(torch.bfloat16), x @ x.T

    x, y = torch.linspace(-1, 1, 70).reshape(10, 7), torch.arange(9)
    with ExitStack() as stack:
        unoptimized.use(stack)
        got = torchsmith.compile(fn, options={"force_disable_caches": True})(x, y)
    torch.testing.assert_close(got, fn(x, y))
    assert started == [gcc.cc1, gcc.assembler, gcc.linker]


def test_results_are_held_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/doubles.py lets pass what is as near as eager; where eager says little it compiles in float64."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    doubles: Any = importlib.import_module("doubles")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    kwargs = {"input": torch.randn(4, 8)}
    asked = list[str]()

    def run(model: Any, call: Any, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        out = call(**kwargs).detach()
        return {"out": out, "far": (out * 1e9).sin() if asked else out, "best": out.argmax(-1)}

    def why(got: dict[str, torch.Tensor]) -> str:
        return doubles.wrong(layers, kwargs, [got], run(layers, layers.forward, kwargs), run, torch.float32)

    def compile_wrongly(fn: Any) -> Any:
        return lambda **kwargs: fn(**kwargs) + 1e-3

    good = run(layers, layers.forward, kwargs)
    assert why(good) == "" and why(good | {"out": good["out"] * (1 + 1e-6)}) == ""
    assert why(good | {"out": good["out"] + 1e-3}).startswith(".out: 0.001 from float64")
    assert why(good | {"best": good["best"].int()}).startswith(".best: ((4,), torch.int32")
    assert why(good | {"best": good["best"] + 1}) == ""  # the same model in float64 gives eager's
    monkeypatch.setattr(torchsmith, "compile", compile_wrongly)
    assert why(good) == ""
    assert why(good | {"best": good["best"] + 1}).startswith("float64: .out: differs by 0.001")
    asked.append("a result that rounding moves by all that it is")
    assert why(run(layers, layers.forward, kwargs)).startswith("float64: .out")


@pytest.mark.parametrize(("off", "is_narrow", "passes"), [(2e-6, True, True), (2e-6, False, False), (2e-5, True, False)])
def test_what_a_model_casts_is_not_held_to_float64(monkeypatch: pytest.MonkeyPatch, off: float, is_narrow: bool, passes: bool) -> None:
    """A model of doubles whose norm is computed in float32 is as near as that."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    doubles: Any = importlib.import_module("doubles")
    monkeypatch.setattr(torchsmith, "compile", lambda fn: lambda **kwargs: {"out": fn(**kwargs) * (1 + off)})

    class Net(torch.nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return (input.float() * 2).double() if is_narrow else input * 2

    def run(model: Any, call: Any, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        out = call(**kwargs)
        return out if isinstance(out, dict) else {"out": out}

    torch.manual_seed(0)
    said = doubles._wrong_in_doubles(Net(), {"input": torch.randn(8, 8, dtype=torch.float64)}, run, None)
    assert (said == "") == passes, said


def test_op_db_compares_what_eager_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager does not say twice is not compared; an input that is written otherwise is no rounding of the result."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    op_db = importlib.import_module("op_db")
    calls = 0

    def unsure(x: torch.Tensor, off: float) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        x.add_(1)
        return x * 2 + off, torch.tensor([calls])

    def verdict(compiled: Any) -> str:
        peer = types.SimpleNamespace(way=op_db.Way(), reset=lambda: None, compile=lambda fn: compiled, observe=lambda call: (call(), {}))
        entry = types.SimpleNamespace(op=unsure)
        return op_db.check_sample(peer, entry, types.SimpleNamespace(input=torch.ones(3), args=(0.0,), kwargs={}), 0, True)["verdict"]

    assert verdict(unsure) == "equal"
    assert verdict(lambda x, off: unsure(x, 1.0)) == "value"
    assert verdict(lambda x, off: unsure(x.clone(), off)) == "value"
