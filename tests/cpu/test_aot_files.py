"""Damaged, foreign and hostile package files; the command line; headers for C, C++, CMake and pkg-config."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_aot import ROOT, Perceptron, exported

from torchsmith import aot
from torchsmith.aot.archive import TAIL
from torchsmith.aot.cli import main
from torchsmith.aot.weights import Block
from torchsmith.export import Dim, export, save
from torchsmith.runtime.model_library import paths
from torchsmith.runtime.package import PackageError


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    program = exported(Perceptron().eval(), torch.randn(8, 10), dynamic={"x": {0: torch.export.Dim("batch", min=1, max=1024)}})
    folder = tmp_path_factory.mktemp("files")
    aot.compile_and_package(program, package_path=folder / "model.pt2")
    aot.aot_compile(program, options={"aot_inductor.output_path": str(folder / "model.so")})
    return folder / "model.pt2"


def rewritten(package: Path, target: Path, change: Any) -> Path:
    """The package with `change(name, content)` applied to each member; it gives the new pair, or None to drop it."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(target, "w") as new:
        for i in old.infolist():
            pair = change(i.filename, old.read(i))
            if pair is not None:
                new.writestr(*pair)
    return target


@pytest.mark.parametrize("name", ["model.pt2", "model.so"])
def test_truncated_anywhere(package: Path, tmp_path: Path, name: str) -> None:
    content = package.with_name(name).read_bytes()
    for cut in (0, 3, 22, 64, 4096, len(content) // 2, len(content) - 4096, len(content) - 100, len(content) - 1):
        path = tmp_path / f"{cut}.{name}"
        path.write_bytes(content[:cut])
        with pytest.raises(PackageError, match=r"truncated|damaged|neither") as caught:
            aot.load_package(path)
        assert caught.value.status == 12


def test_flipped_bits_never_crash(package: Path, tmp_path: Path) -> None:
    """Whatever one byte of code, directory or manifest becomes: an error, or (padding, names of other members) no difference."""
    content = package.read_bytes()
    x = torch.randn(3, 10)
    want = aot.load_package(package)(x)
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        at = rng.randrange(len(content))
        changed = bytearray(content)
        changed[at] ^= 1 << rng.randrange(8)
        path = tmp_path / "flipped.pt2"
        path.write_bytes(changed)
        try:
            got = aot.load_package(path, verify=True)(x)
        except PackageError:
            refused += 1
            continue
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert refused > 20


def test_weights_are_verified_when_asked(package: Path, tmp_path: Path) -> None:
    content = bytearray(package.read_bytes())
    at = content.index(b"TSWEIGHT\x01\0\0\0")
    content[at + 64 + 8] ^= 1
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    aot.load_package(path)  # weights are mapped, not read
    with pytest.raises(PackageError, match="weights have another checksum"):
        aot.load_package(path, verify=True)
    assert main(["aot", "inspect", str(path)]) == 1


def test_names_that_lead_outside(package: Path, tmp_path: Path) -> None:
    for hostile in ("../evil", "model/../../evil", "/etc/evil", "a\\..\\evil"):
        path = rewritten(package, tmp_path / "p.pt2", lambda n, c: (n, c))
        with zipfile.ZipFile(path, "a") as z:
            z.writestr(hostile, b"x")
        with pytest.raises(PackageError, match="leads out of the package"):
            aot.load_package(path)


def test_future_format(package: Path, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="format 3, made by a newer torchsmith; this program reads up to 2") as caught:
        aot.load_package(rewritten(package, tmp_path / "p.pt2", _newer))
    assert caught.value.status == 13


def test_missing_weights(package: Path, tmp_path: Path) -> None:
    path = rewritten(package, tmp_path / "p.pt2", lambda n, c: None if n.endswith(".weights") else (n, c))
    with pytest.raises(PackageError, match=r"\.weights: No such file") as caught:
        aot.load_package(path)
    assert caught.value.status == 14


def test_weights_of_another_model(package: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    program = exported(Perceptron().eval(), torch.randn(8, 10), dynamic={"x": {0: torch.export.Dim("batch", min=1, max=1024)}})
    aot.compile_and_package(program, package_path=tmp_path / "other.pt2")
    with zipfile.ZipFile(tmp_path / "other.pt2") as z:
        foreign = next(z.read(i) for i in z.infolist() if i.filename.endswith(".weights"))
    path = rewritten(package, tmp_path / "p.pt2", lambda n, c: (n, foreign if n.endswith(".weights") else c))
    with pytest.raises(PackageError, match="weights of another model"):
        aot.load_package(path)


def test_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello " * 100)
    with zipfile.ZipFile(tmp_path / "foreign.zip", "w") as z:
        z.writestr("a/b", b"x")
    shutil.copyfile(shutil.which("true") or "/bin/true", tmp_path / "program.so")
    for name in ("text", "foreign.zip", "program.so", "absent"):
        with pytest.raises(PackageError, match=r"neither|no package|no model library|No such file"):
            aot.load_package(tmp_path / name)


def test_command_line(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aot", "inspect", str(package)]) == 0
    text = capsys.readouterr().out
    assert "input x: f32 [batch, 10]" in text and "size batch: 1 to 1024" in text and "all digests are right" in text
    x = np.random.default_rng(0).standard_normal((5, 10)).astype(np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    np.save(tmp_path / "x.npy", x)
    assert main(["aot", "run", str(package), str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz")]) == 0
    got = np.load(tmp_path / "out.npz")["output0"]
    np.testing.assert_array_equal(got, aot.load_package(package)(torch.from_numpy(x)).numpy())
    assert main(["aot", "run", str(package), str(tmp_path / "x.npy")]) == 0
    assert main(["aot", "bench", str(package), "--seconds", "0.01", "--size", "batch=3"]) == 0
    assert "batch=3: median" in capsys.readouterr().out
    np.save(tmp_path / "bad.npy", x.astype(np.float64))
    assert main(["aot", "run", str(package), str(tmp_path / "bad.npy")]) == 1
    assert "dtype float32 expected" in capsys.readouterr().err
    for name in ("text.npy", "text.npz", "empty.npy"):
        (tmp_path / name).write_text("" if name == "empty.npy" else "x = 1")
        assert main(["aot", "run", str(package), str(tmp_path / name)]) == 1
        assert f"{name} is no file of numbers" in capsys.readouterr().err
    with zipfile.ZipFile(tmp_path / "program.tsep", "w") as z:
        z.writestr("program.json", "{}")
    assert main(["aot", "run", str(package), str(tmp_path / "program.tsep")]) == 1
    assert "program.tsep lacks x; it has program.json" in capsys.readouterr().err
    assert main(["aot", "run", str(package), str(tmp_path / "x.npy"), str(tmp_path / "in.npz")]) == 1
    assert "in.npz holds several arrays" in capsys.readouterr().err
    assert main(["aot", "run", str(tmp_path / "absent.pt2")]) == 1
    assert main(["aot", "compile", str(package), "-o", str(tmp_path / "again.pt2")]) == 1
    assert "is compiled already: load it with load_package" in capsys.readouterr().err


def test_command_line_compiles_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model without any code of the user, kernels name torch's own lines."""
    save(export(torch.nn.Sequential(torch.nn.Linear(4, 4)), (torch.randn(2, 4),)), tmp_path / "program.tsep")
    for name, more in (("m.pt2", []), ("m.so", []), ("m.a", []), ("m", ["--option", "format=c"])):
        assert main(["aot", "compile", str(tmp_path / "program.tsep"), "-o", str(tmp_path / name), *more]) == 0
    assert (tmp_path / "m.h").exists() and (tmp_path / "m" / "CMakeLists.txt").exists()
    assert main(["aot", "inspect", str(tmp_path / "m.pt2")]) == 0
    assert "linear.py:" in capsys.readouterr().out


def test_command_line_without_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from torchsmith.aot.cli import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "p.tsep").write_bytes(b"")
    command = [sys.executable, "-c", code, "aot", "compile", str(tmp_path / "p.tsep"), "-o", "m.pt2"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 1 and done.stderr == "error: compile needs torch, which is not installed (running packages does not)\n"


def test_headers(package: Path, tmp_path: Path) -> None:
    """C11 and C++17, without a warning; found by pkg-config; the examples print what eager computes."""
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-missing-field-initializers", f"-I{paths()['include']}"]
    source = ROOT / "examples" / "aoti" / "plain"
    subprocess.run(["cc", "-std=gnu11", *flags, str(source / "main.c"), "-o", str(tmp_path / "c"), "-ldl"], check=True)
    subprocess.run(["c++", "-std=c++17", *flags, str(source / "main.cpp"), "-o", str(tmp_path / "cpp"), "-ldl"], check=True)
    want = aot.load_package(package)(torch.arange(80.0).reshape(8, 10) * 0.01).flatten()
    for program in ("c", "cpp"):
        for file in (package, package.with_name("model.so")):
            done = subprocess.run([tmp_path / program, file], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            got = torch.tensor([float(t) for t in done.stdout.split("\n")[1:9]])
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    if shutil.which("pkg-config"):
        env = {"PKG_CONFIG_PATH": str(paths()["pkgconfig"]), "PATH": "/usr/bin:/bin"}
        out = subprocess.run(["pkg-config", "--cflags", "torchsmith"], capture_output=True, text=True, env=env, check=True).stdout
        assert (Path(out.strip().removeprefix("-I")) / "torchsmith" / "package.h").exists()


LINKED = r"""
#include <stdio.h>
#include "net.h"
#include "other.h"
int main(int argc, char **argv) {
  tsm_config a = {.size = sizeof a, .threads = 1, .weights_path = argv[1]}, b = a;
  tsm_model *m, *o;
  b.weights_path = argv[2];
  if (net_create(&a, &m)) { puts(net_last_error()); return 1; }
  if (other_create(&b, &o)) { puts(other_last_error()); return 1; }
  float x[10];
  for (int i = 0; i < 10; i++) x[i] = 0.1f * (float)i;
  int64_t sizes[] = {1, 10};
  tsm_tensor in = {x, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, y = {0}, z = {0};
  if (net_run(m, &in, 1, &y, 1) || other_run(o, &in, 1, &z, 1)) { puts(net_last_error()); return 2; }
  printf("%.6f %.6f\n", (double)*(float *)y.data, (double)*(float *)z.data);
  net_release(&y);
  other_release(&z);
  net_delete(m);
  other_delete(o);
  a.weights_path = NULL;
  printf("%d\n", (int)net_create(&a, &m));
  return 0;
}
"""


@pytest.mark.parametrize("form", ["a", "c"])
def test_models_linked_into_a_program(tmp_path: Path, form: str) -> None:
    """Two models in one program, as static libraries and as C sources."""
    nets = [Perceptron().eval(), Perceptron().eval()]
    objects: list[str] = []
    for name, net in zip(("net", "other"), nets, strict=True):
        path = tmp_path / (f"{name}.a" if form == "a" else name)
        options = {"aot_inductor.output_path": str(path), "format": form, "cpu": "x86-64-v3"}
        assert aot.aot_compile(net, (torch.randn(1, 10),), options=options) == str(path)
        if form == "c":
            subprocess.run(["cmake", "-S", path, "-B", tmp_path / f"build_{name}"], check=True, capture_output=True)
            subprocess.run(["cmake", "--build", tmp_path / f"build_{name}"], check=True, capture_output=True)
            path = tmp_path / f"build_{name}" / f"lib{name}.a"
        objects.append(str(path))
    (tmp_path / "main.c").write_text(LINKED)
    folders = [tmp_path, tmp_path / "net", tmp_path / "other", paths()["include"]]
    command = ["cc", "-std=gnu11", "-Wall", "-Wno-missing-field-initializers", "-Werror", *(f"-I{f}" for f in folders), "main.c", *objects]
    subprocess.run([*command, "-o", "main", "-lm", "-ldl", "-lpthread"], cwd=tmp_path, check=True)
    weights = [str(tmp_path / ("." if form == "a" else n) / f"{n}.weights") for n in ("net", "other")]
    done = subprocess.run([tmp_path / "main", *weights], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    x = torch.arange(10.0).reshape(1, 10) * 0.1
    got = [float(t) for t in done.stdout.split()]
    torch.testing.assert_close(torch.tensor(got[:2]), torch.tensor([net(x).item() for net in nets]), atol=2e-6, rtol=0)
    assert got[2] == 14


def test_packages_of_format_1_stay_readable() -> None:
    """A package that the first version wrote, for any x86-64 processor."""
    path = ROOT / "tests" / "fixtures" / "package_format1.pt2"
    assert main(["aot", "inspect", str(path)]) == 0
    loaded = aot.load_package(path, verify=True)
    x = torch.arange(20.0).reshape(2, 10) / 20
    for call in range(2):
        got = loaded(x, {"t": torch.ones(10)})
        torch.testing.assert_close(got["out"].flatten(), torch.tensor([1.4735058546066284, 1.4975965023040771]) + call)
        torch.testing.assert_close(got["sum"], x + 1)
        assert got["none"] is None


def test_blocks_beyond_2_gb_are_whole() -> None:
    """Memory that is reserved, never touched: the size of a block is not cut to 32 bits."""
    t = torch.empty((1 << 32) + 24, dtype=torch.uint8)
    assert Block(0, t).content().nbytes == t.nbytes


CASES = {
    "dtype": 3, "rank": 4, "size": 5, "above": 5, "below": 5, "null": 1, "few": 2, "many": 2, "stride": 6, "alignment": 8, "unknown": 3,
    "good": 0,
}  # fmt: skip
ONLY = {
    "c": {"device": 7, "negative": 4, "sizes": 1, "inputs": 1, "outputs": 1, "output": 5},
    "c++": {"name": 15, "constant": 5},
}


@pytest.mark.parametrize("language", ["c", "c++"])
def test_bad_inputs_in_c_and_cpp(package: Path, tmp_path: Path, language: str) -> None:
    """Each wrong input and each wrong file has its status, in a C and in a C++ program; nothing crashes, and the model works on."""
    source = Path(__file__).with_name("bad_inputs.cpp")
    flags = ["-x", "c", "-std=gnu11"] if language == "c" else ["-std=c++17"]
    command = ["cc" if language == "c" else "c++", *flags, "-g", f"-I{paths()['include']}", str(source), "-x", "none"]
    subprocess.run([*command, "-fsanitize=address,undefined", "-o", str(tmp_path / "bad"), "-ldl"], check=True)

    def statuses(*args: Any) -> dict[str, int]:
        done = subprocess.run([tmp_path / "bad", *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}

    assert statuses(package) == CASES | ONLY[language]
    content = package.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(b"\x7fELF") + 300] ^= 4
    (tmp_path / "flipped.pt2").write_bytes(flipped)
    (tmp_path / "short.pt2").write_bytes(content[: len(content) // 2])
    future = rewritten(package, tmp_path / "future.pt2", _newer)
    lost = rewritten(package, tmp_path / "lost.pt2", lambda n, c: None if n.endswith(".weights") else (n, c))
    hostile = rewritten(package, tmp_path / "hostile.pt2", lambda n, c: (n, c))
    with zipfile.ZipFile(hostile, "a") as z:
        z.writestr("../evil", b"x")
    files = {"flipped.pt2": 12, "short.pt2": 12, "absent.pt2": 11, future.name: 13, lost.name: 14, hostile.name: 12, package: 0}
    assert {name: statuses(tmp_path / name, "verify")["load"] for name in files} == files


def _newer(name: str, content: bytes) -> tuple[str, bytes]:
    if name.endswith("torchsmith.json"):
        content = json.dumps(json.loads(content) | {"format": 3}).encode()
    return name, content


def test_few_weights_are_not_padded_to_pages(tmp_path: Path) -> None:
    model = torch.nn.Linear(10, 16).eval()
    path = aot.aot_compile(model, (torch.randn(3, 10),), options={"aot_inductor.output_path": str(tmp_path / "model.so")})
    content = Path(path).read_bytes()
    code, start, weights, *_ = TAIL.unpack(content[-TAIL.size :])
    assert code <= start < code + 64 and len(content) == start + weights + TAIL.size
    assert weights < 64 + 2 * 4 * (10 * 16 + 16) + 4 * 64  # a header, the packed matrix, what is read as it is, and gaps to lines


class Groups(torch.nn.Module):
    """Rows in fours, in bfloat16: sizes that divide by zero where there are fewer, and a dtype that NumPy has not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.view(x.shape[0] // 4, 4, -1).sum(1), x.to(torch.bfloat16) / 2


def test_command_line_with_open_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = Dim.DYNAMIC
    save(export(Groups(), (torch.randn(8, 3),), dynamic_shapes=({0: size, 1: size},)), tmp_path / "m.tsep")
    package = str(tmp_path / "m.pt2")
    assert main(["aot", "compile", str(tmp_path / "m.tsep"), "-o", package]) == 0
    assert main(["aot", "inspect", package]) == 0
    said = capsys.readouterr().out
    assert "size d0: 4 to any" in said and "must satisfy" in said and "[(d0 // 4)" in said
    for n, status in ((8, 0), (5, 1), (1, 1)):  # one row would leave view no size to find
        np.save(tmp_path / "x.npy", np.full((n, 3), 3, np.float32))
        assert main(["aot", "run", package, str(tmp_path / "x.npy"), "-o", str(tmp_path / "out.npz")]) == status
    assert "test_aot_files.py:" in capsys.readouterr().err
    out = np.load(tmp_path / "out.npz")
    assert (out["output0"] == 12).all() and out["output1"].dtype == np.float32 and (out["output1"] == 1.5).all()
    assert main(["aot", "bench", package, "--seconds", "0.01"]) == 0
    assert "d0=4, d1=1: median" in (said := capsys.readouterr().out) and "d0=64, d1=64: median" in said
    assert main(["aot", "bench", package, "--size", "d0"]) == 1
    (tmp_path / "text.pt2").write_text("no program")
    for name, words in (("text.pt2", "not an exported program"), ("absent.pt2", "No such file")):
        assert main(["aot", "compile", str(tmp_path / name), "-o", package]) == 1
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err
