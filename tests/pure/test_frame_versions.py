"""Every supported Python that is installed here: the frame extension is built in a temporary folder and tested without torch; what the
sources take from Python's library is there."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
ASK = "import sysconfig; print(sysconfig.get_path('include')); print(sysconfig.get_config_var('EXT_SUFFIX'))"


def interpreter(version: str) -> tuple[str, list[str]] | None:
    """Another installed Python of this version that runs and has headers, and its answers."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return None
    places = [*map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))), shutil.which(f"python{version}")]
    for python in filter(None, places):
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and (Path(asked.stdout.split()[0]) / "Python.h").exists():
            return python, asked.stdout.split()
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_builds_and_passes(version: str, tmp_path: Path) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no other Python {version} with headers here")
    python, (include, suffix) = found
    package = tmp_path / "torchsmith" / "capture"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    sources = sorted(map(str, (ROOT / "csrc" / "frame").glob("*.c")))
    cc = (sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [cc, "-O1", "-g", "-std=gnu11", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{include}", *sources, "-o", str(package / f"_frame{suffix}")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    test = ROOT / "tests" / "pure" / "test_frame_hook.py"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([python, "-X", "faulthandler", str(test)], capture_output=True, text=True, env=env, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr


LATER = {"math.sumprod"}  # asked for with hasattr
MISSING = """
import importlib, json, sys
for module, name in json.load(sys.stdin):
    if not hasattr(importlib.import_module(module), name):
        try: importlib.import_module(f"{module}.{name}")
        except ImportError: print(f"{module}.{name}")
"""


@cache
def taken() -> list[tuple[str, str]]:
    """(module, name) of all that torchsmith reads of modules of Python's library."""
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "src" / "torchsmith").rglob("*.py"):
        nodes, modules = list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))), dict[str, str]()
        for node in nodes:
            if isinstance(node, ast.Import):
                modules |= {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {(node.module or "", a.name) for a in node.names}
        read = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in modules)
        found |= {(modules[n.value.id], n.attr) for n in read}  # type: ignore[attr-defined]
    return sorted((m, name) for m, name in found if m.split(".")[0] in sys.stdlib_module_names and m != "__future__")


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_taken_of_the_library_is_there(version: str) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no other Python {version} with headers here")
    done = subprocess.run([found[0], "-c", MISSING], input=json.dumps(taken()), capture_output=True, text=True, check=True)
    assert len(taken()) > 200 and set(done.stdout.split()) <= LATER
