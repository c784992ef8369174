"""The documents' programs in examples/aoti, as they stand: built with CMake, against ours and against PyTorch's headers, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fresh
from torchsmith.runtime.model_library import paths

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "aoti"
ENV = os.environ | {
    "PYTHONPATH": str(ROOT / "src"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LD_LIBRARY_PATH": ".",
    "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
}  # fmt: skip


def cmake(source: Path, build: Path, *options: str) -> None:
    for command in (["-S", str(source), "-B", str(build), *options], ["--build", str(build), "--config", "Release"]):
        done = subprocess.run(["cmake", *command], env=ENV, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def run(*command: Path | str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(script: Path, cwd: Path) -> str:
    done = fresh.run("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", script, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(text: str) -> list[float]:
    return [float(t) for t in re.findall(r"^\s*(0\.\d+|1|0)\s*$", text, re.M)]


def check_is_portable(library: Path) -> None:
    """It needs no libc younger than 2.28, and no C++."""
    names = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([0-9.]+)", names)}
    assert versions and max(versions) <= (2, 28) and "GLIBCXX" not in names


@pytest.mark.skipif(shutil.which("cmake") is None, reason="CMake is not installed")
def test_without_libtorch(tmp_path: Path) -> None:
    """Both model.py compile; our C and C++ programs run what they made, inference.py the package in both loaders of Python."""
    cmake(EXAMPLES / "plain", tmp_path / "plain", f"-Dtorchsmith_DIR={paths()['cmake']}")
    for folder, made in (("package", "model.pt2"), ("library", "model.so")):
        python(EXAMPLES / folder / "model.py", tmp_path)
        plain = numbers(run(tmp_path / "plain" / "example_c", made, cwd=tmp_path))
        assert len(plain) == 9 and plain[0] == plain[8]  # the second call is the first row alone
        assert len(numbers(run(tmp_path / "plain" / "example_cpp", made, cwd=tmp_path))) == 9
        assert (tmp_path / made).stat().st_size < 80_000
    check_is_portable(tmp_path / "model.so")
    with zipfile.ZipFile(tmp_path / "model.pt2") as z:
        (tmp_path / "packed.so").write_bytes(next(z.read(i) for i in z.infolist() if i.filename.endswith(".so")))
    check_is_portable(tmp_path / "packed.so")
    assert python(EXAMPLES / "package" / "inference.py", tmp_path).count("tensor(") == 2


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("cmake") is None, reason="CMake is not installed")
@pytest.mark.parametrize(("folder", "second"), [("package", 1), ("library", 2)])
def test_with_libtorch(tmp_path: Path, folder: str, second: int) -> None:
    """PyTorch's headers alone take a compiler 20 s; test_aot.py has the same two loaders by their names in Python."""
    cmake(EXAMPLES / folder, tmp_path)
    out = run("./aoti_example", cwd=tmp_path)
    assert "[ CPUFloatType{8,1} ]\nResult from the second inference:\n" in out and f"[ CPUFloatType{{{second},1}} ]" in out
    assert len(numbers(out)) == 8 + second and all(0 < v < 1 for v in numbers(out))
