"""Packages under stress: threads, new weights meanwhile, sanitizers, valgrind, memory, files, large weights."""

from __future__ import annotations

import ctypes
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz_packages
import pytest
import torch
from test_aot import ROOT, exported

from torchsmith import aot
from torchsmith.runtime.model_library import paths

STRESS = Path(__file__).with_name("model_stress.c")
SANITIZE = {
    "none": [], "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=alignment,signed-integer-overflow", "-fno-sanitize-recover=undefined"],
}  # fmt: skip


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(10, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4), torch.nn.Sigmoid()).eval()


def stress_program(folder: Path, cpu: str, sanitizer: str) -> list[str]:
    """model_stress.c and a model's C sources, all compiled with one sanitizer; the command without its counts."""
    program = exported(net(), torch.randn(8, 10), dynamic={"input": {0: torch.export.Dim("batch", min=1, max=96)}})
    aot.aot_compile(program, options={"aot_inductor.output_path": str(folder / "net"), "format": "c", "cpu": cpu})
    flags = " ".join(["-g", *SANITIZE[sanitizer]])
    command = ["cmake", "-S", str(folder / "net"), "-B", str(folder / "build"), f"-DCMAKE_C_FLAGS={flags}"]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(folder / "build")], check=True, capture_output=True)
    includes = [f"-I{folder / 'net'}", f"-I{paths()['include']}"]
    compiler = ["cc", "-O1", "-std=gnu11", *flags.split(), *includes, str(STRESS), str(folder / "build" / "libnet.a")]
    subprocess.run([*compiler, "-o", str(folder / "stress"), "-lm", "-ldl", "-lpthread"], check=True)
    return [str(folder / "stress"), str(folder / "net" / "net.weights")]


def run_stress(command: list[str], threads: int, calls: int, env: dict[str, str] | None = None) -> int:
    """KB by which the memory in use grew."""
    full = [*command, str(threads), str(calls)]
    done = subprocess.run(full, capture_output=True, text=True, check=False, env=os.environ | (env or {}), timeout=1200)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-4000:])
    print(done.stdout.strip())
    return int(re.findall(r"growth (-?\d+) KB", done.stdout)[0])


@pytest.mark.parametrize("calls", [1000, pytest.param(12500, marks=pytest.mark.heavy)])
def test_threads_and_new_weights(tmp_path: Path, calls: int) -> None:
    """8 threads on one model, weights replaced meanwhile: every result is whole; memory stays (12,500 each: 100,000 calls)."""
    growth = run_stress(stress_program(tmp_path, "native", "none"), 8, calls)
    assert growth < 2048


@pytest.mark.heavy
@pytest.mark.parametrize(("sanitizer", "calls"), [("thread", 10000), ("address", 2000)])
def test_sanitizers(tmp_path: Path, sanitizer: str, calls: int) -> None:
    """ThreadSanitizer; AddressSanitizer with leaks and undefined behaviour: no report."""
    env = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=97", "ASAN_OPTIONS": "detect_leaks=1 exitcode=97"}
    run_stress(stress_program(tmp_path, "native", sanitizer), 8, calls, env)


READER = r"""
#include "torchsmith/package.h"
int main(int argc, char **argv) { /* no file of these may be a model; none may do harm */
  int loaded = 0;
  for (int i = 1; i < argc; i++) {
    torchsmith_model *m = NULL;
    if (torchsmith_load(argv[i], "model", NULL, &m)) continue;
    loaded++;
    torchsmith_free(m);
  }
  printf("%d of %d\n", loaded, argc - 1);
  return 0;
}
"""


def test_sanitizers_on_damaged_files(tmp_path: Path) -> None:
    """The loader's header, with leaks: truncated packages, and packages with a byte changed in their directory or anywhere."""
    program = exported(net(), torch.randn(8, 10))
    aot.compile_and_package(program, package_path=tmp_path / "model.pt2")
    content, rng = (tmp_path / "model.pt2").read_bytes(), random.Random(0)
    files = []
    for k in range(120):
        changed = bytearray(content)
        if k % 3 == 0:
            changed = changed[: rng.randrange(len(changed))]
        else:
            changed[rng.randrange(len(changed) - 2000 if k % 3 == 1 else 0, len(changed))] ^= 1 << rng.randrange(8)
        files.append(tmp_path / f"{k}.pt2")
        files[-1].write_bytes(changed)
    (tmp_path / "main.c").write_text(READER)
    flags = ["-g", "-O1", *SANITIZE["address"], f"-I{paths()['include']}"]
    subprocess.run(["cc", *flags, "main.c", "-o", "main", "-ldl"], cwd=tmp_path, check=True)
    env = os.environ | {"ASAN_OPTIONS": "detect_leaks=1 exitcode=97"}
    done = subprocess.run([tmp_path / "main", *files], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0 and int(done.stdout.split()[0]) < 60, (done.stdout, done.stderr[-3000:])


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1, 5, 9])
def test_sanitizers_on_random_calls_and_files(seed: int) -> None:
    """Right and wrong calls, updates of constants and damaged files, drawn (fuzz_packages.py): tied, empty and 18-dimensional constants,
    NULLs, sizes that overflow, allocators that fail."""
    assert fuzz_packages.compare(seed, 1500, 24) == []


@pytest.mark.heavy
def test_sanitizers_inside_torch(tmp_path: Path) -> None:
    """Calls of libtorch's operators, wrong calls, and printed values, with everything that is compiled under AddressSanitizer."""
    asked = [["cc", f"-print-file-name=lib{n}.so"] for n in ("asan", "ubsan", "stdc++")]
    found = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in asked]
    if not all(f.startswith("/") for f in found):
        pytest.skip("the compiler has no AddressSanitizer")
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "src"), "TORCHSMITH_CACHE_DIR": str(tmp_path / "cache"), "LD_PRELOAD": " ".join(found),
        "CC": " ".join(["cc", "-g", *SANITIZE["address"], "-Wl,--no-as-needed", "-lasan", "-lubsan"]),
        "ASAN_OPTIONS": "detect_leaks=0 exitcode=97 detect_odr_violation=0",
    }  # fmt: skip
    files = [str(ROOT / "tests" / "cpu" / f"test_aot_{n}.py") for n in ("libtorch", "debug")]
    chosen = "equals_eager or errors_of or checks_of or gradients or without or printed or saved or names_only"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", chosen]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=900)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "AddressSanitizer" not in said and "runtime error:" not in said, said[-3000:]


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind(tmp_path: Path) -> None:
    """The build for every x86-64 processor: nothing uninitialised is used, nothing leaks."""
    command = stress_program(tmp_path, "x86-64", "none")
    valgrind = ["valgrind", "-q", "--leak-check=full", "--show-leak-kinds=definite,indirect,possible", "--error-exitcode=97"]
    run_stress([*valgrind, *command], 4, 60)


FLAT = """
import os, sys, tempfile
sys.modules["torch"] = None
from heap import held
from torchsmith import aot
import numpy as np
x = np.ones((3, 10), np.float32)
m = aot.load_package(sys.argv[1])
for k in range(2000 + int(sys.argv[2])):
    m(x)
    if k == 2000:
        first = held()
assert held() - first < 100_000, held() - first
for k in range(60):  # loading and dropping
    m = aot.load_package(sys.argv[1])
    m(x)
    if k == 20:
        first = held()
del m
assert held() - first < 100_000, held() - first
assert not [line for line in open("/proc/self/maps") if "torchsmith-model" in line]
assert os.listdir(tempfile.gettempdir()) == [], os.listdir(tempfile.gettempdir())
"""


@pytest.mark.parametrize("calls", [5000, pytest.param(100000, marks=pytest.mark.heavy)])
def test_memory_and_files_stay(tmp_path: Path, calls: int) -> None:
    """The memory in use is flat over calls and over loads; the library is unmapped; no temporary file is left or made."""
    program = exported(net(), torch.randn(8, 10), dynamic={"input": {0: torch.export.Dim("batch", min=1, max=96)}})
    aot.compile_and_package(program, package_path=tmp_path / "model.pt2")
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "cpu")]), "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", FLAT, str(tmp_path / "model.pt2"), str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


def test_compiling_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    aot.compile_and_package(exported(net(), torch.randn(8, 10)), package_path=tmp_path / "model.pt2")
    assert os.listdir(tmp_path / "tmp") == []


def mapped_kb(path: Path) -> tuple[int, int]:
    """KB of this process's mappings of a file: (resident, of them copied)."""
    resident = copied = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1])
        elif inside and line.startswith("Anonymous:"):
            copied += int(line.split()[1])
    return resident, copied


def test_weights_are_mapped_not_copied(tmp_path: Path) -> None:
    """Loading 64 MB of weights reads none of them; running maps the page cache, and copies nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096, bias=False)).eval()
    path = tmp_path / "model.pt2"
    aot.compile_and_package(exported(model, torch.randn(1, 4096)), package_path=path)
    loaded = aot.load_package(path)
    assert mapped_kb(path)[0] < 1024
    x = torch.randn(1, 4096)
    torch.testing.assert_close(loaded(x), model(x).detach())
    resident, copied = mapped_kb(path)
    assert resident >= 60_000 and copied == 0


@pytest.mark.heavy
def test_weights_beyond_2_gb(tmp_path: Path) -> None:
    """A package, and a library, with offsets that need more than 32 bits; only what a call touches is read."""

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(1 << 20, 1100, dtype=torch.float32))
            self.bias = torch.nn.Parameter(torch.randn(1100))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table[ids] + self.bias

    model = Rows()
    ids = torch.tensor([0, 3, (1 << 20) - 1])
    with torch.no_grad():
        model.table[ids] = torch.randn(3, 1100)
    assert model.table.nbytes > 4 << 30
    path, library = tmp_path / "model.pt2", tmp_path / "model.so"
    program = exported(model, ids)
    aot.compile_and_package(program, package_path=path)
    want = model(ids).detach()
    for verify in (False, True):
        loaded = aot.load_package(path, verify=verify)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        torch.testing.assert_close(loaded(ids), want, rtol=0, atol=0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    del loaded
    path.unlink()
    aot.aot_compile(program, options={"aot_inductor.output_path": str(library)})
    torch.testing.assert_close(aot.load_package(library)(ids), want, rtol=0, atol=0)
    ctypes.CDLL(None).malloc_trim(0)
