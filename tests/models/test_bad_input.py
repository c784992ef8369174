"""When the world fails: no compiler, a compiler that dies, a full disk, a damaged cache, two processes at once, errors in user code."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fresh
import torchsmith

PROGRAM = """
import sys, warnings
import torch
import torchsmith

def fn(x, y):
    return torch.softmax(torch.sin(x) * 2 + y, -1), (x + y).sum(0)

x, y = torch.randn(16, 33, generator=torch.Generator().manual_seed(0)), torch.ones(33)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    compiled = torchsmith.compile(fn, fullgraph="--fullgraph" in sys.argv)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, y), fn(x, y))
for w in said:
    if "torchsmith" in str(w.message):
        print("WARNING", str(w.message).replace("\\n", " "))
e = torchsmith.explain(fn)(x, y)
print("ROADS", *[g.road for g in e.graphs], "CACHED", *[g.cached for g in e.graphs])
"""


def start(folder: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(script), *args], env={**os.environ, "TORCHSMITH_CACHE_DIR": str(folder / "cache"), **env},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(folder: Path, *args: str, **env: str) -> tuple[int, str, str]:
    done = fresh.run(PROGRAM, *args, **{"TORCHSMITH_CACHE_DIR": str(folder / "cache"), **env})
    assert done.returncode >= 0, f"killed by signal {-done.returncode}: {done.stderr}"
    return done.returncode, done.stdout, done.stderr


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_no_compiler_warns_once_and_runs_eagerly(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, TORCHSMITH_CC="/nowhere/cc")
    assert code == 0, err
    warned = [line for line in out.split("\n") if line.startswith("WARNING")]
    assert len(warned) == 1, out
    assert "/nowhere/cc" in warned[0] and ("install" in warned[0] or "TORCHSMITH_CC" in warned[0]), warned


def test_no_compiler_under_fullgraph_is_an_error(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "--fullgraph", TORCHSMITH_CC="/nowhere/cc")
    assert code != 0 and "/nowhere/cc" in err


def test_dying_compiler_runs_eagerly_and_keeps_its_words(tmp_path: Path) -> None:
    """It answers questions about itself, and dies on every source."""
    dies = "*.c*) echo internal compiler error: the oven is on fire >&2; exit 4;;"
    cc = executable(tmp_path / "cc", f'#!/bin/sh\ncase "$*" in {dies} esac\nexec cc "$@"\n')
    code, out, err = run(tmp_path, TORCHSMITH_CC=str(cc))
    assert code == 0, err
    assert "WARNING" in out and "ROADS captured" in out
    log = re.search(r"see (\S+log\.txt)", out)
    assert log is not None and "the oven is on fire" in Path(log[1]).read_text()


def test_full_disk_runs_eagerly(tmp_path: Path) -> None:
    """No file may grow over 2 KiB: the objects cannot be written."""
    limited = executable(tmp_path / "limited", f'#!/bin/bash\ntrap "" XFSZ\nulimit -f 2\nexec "{sys.executable}" "$@"\n')
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [str(limited), "-B", str(script)],
        env={**os.environ, "TORCHSMITH_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_unusable_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, _, err = run(tmp_path, TORCHSMITH_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert code == 0, err


def test_damaged_cache_is_rebuilt(tmp_path: Path) -> None:
    """Whatever became of its files: compiling makes new ones, which the next compilation finds."""
    assert run(tmp_path)[0] == 0
    for damage in ("truncate", "garbage", "empty"):
        shutil.copytree(tmp_path / "cache", tmp_path / damage / "cache")
        files = [f for f in (tmp_path / damage).rglob("*") if f.is_file() and f.suffix != ".lock"]
        assert files
        for f in files:
            data = f.read_bytes()
            f.chmod(0o600)
            f.write_bytes({"truncate": data[: len(data) // 2], "garbage": os.urandom(len(data)), "empty": b""}[damage])
        code, out, err = run(tmp_path / damage)
        assert code == 0, f"{damage}: {err}"
        assert "ROADS native" in out and "CACHED True" in out, f"{damage}: {out}{err}"


def test_cache_is_private(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == 0
    folders = [f for f in (tmp_path / "cache").rglob("*") if f.is_dir()]
    assert folders and all(stat.S_IMODE(f.stat().st_mode) == 0o700 for f in folders)


def test_two_processes_at_once(tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=1200)
        assert process.returncode == 0 and "ROADS native" in out, err


def test_users_exception_keeps_type_and_traceback() -> None:
    class Mine(ValueError):
        pass

    def inner(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise Mine("three is not allowed")
        return x + 1

    compiled = torchsmith.compile(lambda x: inner(torch.sin(x)))
    compiled(torch.ones(2))
    with pytest.raises(Mine, match="three is not allowed") as caught:
        compiled(torch.ones(3))
    assert any("three is not allowed" in (f.line or "") for f in traceback.extract_tb(caught.value.__traceback__))


def same_error(fn: object, *args: object) -> None:
    assert callable(fn)
    with pytest.raises(Exception) as want:
        fn(*args)
    with pytest.raises(type(want.value)) as got:
        torchsmith.compile(fn)(*args)
    assert str(got.value) == str(want.value)


def test_errors_are_eagers() -> None:
    weight = torch.randn(5, 3)
    same_error(lambda i: torch.nn.functional.embedding(i, weight), torch.tensor([1, 7]))
    same_error(lambda x, i: x[i] + 1, torch.randn(4), torch.tensor([0, -5]))
    same_error(lambda x, i: torch.gather(x, 0, i), torch.randn(4), torch.tensor([4]))
    same_error(lambda x, y: x // y, torch.tensor([4, 5]), torch.tensor([1, 0]))
    same_error(lambda x, y: x @ y, torch.randn(3, 4), torch.randn(3, 4))
    same_error(lambda x, y: x + y, torch.randn(3), torch.randn(4))


def test_failing_call_writes_nothing_and_the_next_one_works() -> None:
    def fn(x: Tensor, i: Tensor) -> Tensor:
        return torch.sin(x)[i]

    compiled = torchsmith.compile(fn)
    x, fine = torch.randn(4), torch.tensor([0, 3])
    torch.testing.assert_close(compiled(x, fine), fn(x, fine))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([0, 9]))
    torch.testing.assert_close(compiled(x, fine), fn(x, fine))
