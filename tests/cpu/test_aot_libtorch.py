"""Packages with operators that only libtorch has: options={"libtorch": "allow"} calls them where a libtorch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heap import held
from test_aot import ROOT

import fresh
import torchsmith
from torchsmith import aot
from torchsmith.codes import Unsupported
from torchsmith.export import Dim
from torchsmith.runtime.model_library import paths

ALLOW = {"libtorch": "allow"}
# Before 2.13 libtorch prints the text of its errors and hands none out: callers of operators and of its loader see that something failed.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
Run = Callable[..., Any]


class Mixed(torch.nn.Module):
    """Operators of both roads: a shim function (sort), the dispatcher (inverse, Fourier), sizes known at run time only (nonzero); results
    that libtorch made, views of them, and generated code before, between and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.register_buffer("eye", torch.eye(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.relu(self.linear(x))
        values, order = torch.sort(h, dim=-1, descending=True)
        inverse = torch.linalg.inv(h.mT @ h + self.eye)
        spectrum = torch.fft.rfft(self.linear.weight + 0 * x[0, 0], norm="ortho").abs()
        return values + 1, order, inverse, inverse.mT, spectrum, torch.nonzero(y > 0), torch.linalg.cholesky(inverse + inverse.mT) * 2


def calls() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 6), torch.randn(n, 16)) for n in (8, 2, 33)]


@pytest.fixture(scope="module")
def model() -> Mixed:
    torch.manual_seed(0)
    return Mixed().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def package(model: Mixed, tmp_path_factory: pytest.TempPathFactory) -> str:
    n = Dim("n", min=2, max=64)
    program = torchsmith.export.export(model, calls()[0], dynamic_shapes={"x": {0: n}, "y": {0: n}})
    return aot.compile_and_package(program, package_path=tmp_path_factory.mktemp("libtorch") / "m.pt2", inductor_configs=ALLOW)


def on_arrays(path: str) -> Run:
    loaded = aot.load_package(path)
    return lambda *args: [torch.from_numpy(np.asarray(a)) for a in loaded.run_flat([t.numpy() for t in args])]


ROADS: dict[str, Callable[[str], Run]] = {
    "ours": aot.load_package, "arrays": on_arrays, "torch": torch._inductor.aoti_load_package,
}  # fmt: skip


@pytest.mark.parametrize("road", ROADS)
def test_equals_eager(model: Mixed, package: str, road: str) -> None:
    run = ROADS[road](package)
    for args in calls():
        for got, want in zip(run(*args), model(*args), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("count", [2000, pytest.param(100000, marks=pytest.mark.heavy)])
def test_memory_stays(package: str, road: str, count: int) -> None:
    run, args = ROADS[road](package), calls()[0]

    for _ in range(300):
        run(*args)
    before = held()
    for _ in range(count):
        run(*args)
    assert held() - before < max(200_000, 20 * count)


def test_what_is_called_is_said(package: str) -> None:
    named = aot.load_package(package).info["operators"]
    assert {n.split(" at ")[0] for n in named} >= {"aten.sort.default", "aten.linalg_inv_ex.default", "aten.nonzero.default"}
    assert all("test_aot_libtorch.py:" in n for n in named)


class Inverse(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x) + 1


def packed(module: torch.nn.Module, args: tuple[Any, ...], path: Path, options: dict[str, Any] | None = None) -> str:
    program = torchsmith.export.export(module, args)
    return aot.compile_and_package(program, package_path=path, inductor_configs=ALLOW | (options or {}))


WITHOUT = r"""
#include <stdio.h>
#include "torchsmith/package.h"
int main(int argc, char **argv) {
  torchsmith_model *m = NULL;
  int rc = torchsmith_load(argv[1], NULL, NULL, &m);
  printf("%d %d %s\n", rc, m == NULL, torchsmith_error());
  return 0;
}
"""


def test_without_libtorch_in_c(package: str, tmp_path: Path) -> None:
    """Loading fails, with its own status and a text that has the operators and the user's lines."""
    (tmp_path / "main.c").write_text(WITHOUT)
    program = str(tmp_path / "main")
    subprocess.run(["cc", f"-I{paths()['include']}", str(tmp_path / "main.c"), "-o", program, "-ldl"], check=True)
    said = subprocess.run([program, package], capture_output=True, text=True, check=True).stdout
    assert said.startswith("17 1 libtorch is not loaded in this process")
    assert "aten.sort.default at " in said and "test_aot_libtorch.py:" in said


def test_without_torch_in_python(package: str) -> None:
    code = "import sys; from torchsmith import aot\ntry: aot.load_package(sys.argv[1])\nexcept aot.PackageError as e: print(e.status, e)"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    said = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=True, env=env).stdout
    assert said.startswith("17 ") and "import torch first" in said and "aten.linalg_inv_ex.default at " in said


@pytest.mark.parametrize("road", ROADS)
def test_checks_of_linear_algebra(tmp_path: Path, road: str) -> None:
    run = ROADS[road](packed(Inverse(), (torch.eye(4),), tmp_path / "m.pt2"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed" if OLD and road == "torch" else r"linalg\.inv.*singular"):
            run(torch.zeros(4, 4))
        out = run(2 * torch.eye(4))
        torch.testing.assert_close(out[0] if road == "arrays" else out, 0.5 * torch.eye(4) + 1)


def test_forbid_is_the_default_and_lists_lines() -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x) + torch.special.bessel_j0(x)

    program = torchsmith.export.export(Two(), (torch.eye(3),))
    for options in (None, {"libtorch": "forbid"}, {"aot_inductor.output_path": "x.so"}):
        said = r"AOT020.*linalg_inv_ex\.default at .*test_aot_libtorch.py:\d+.*special_bessel_j0\.default at .*:\d+"
        with pytest.raises(Unsupported, match=said):
            aot.aot_compile(program, options=options)
    with pytest.raises(RuntimeError, match="'libtorch' is one of 'allow', 'forbid', not 'maybe'"):
        aot.aot_compile(program, options={"libtorch": "maybe"})
    with pytest.raises(Unsupported, match=r"AOT051.*format='a'"):
        aot.aot_compile(program, options={"libtorch": "allow", "format": "a"})


def test_compiled_linear_algebra_raises_as_eager_does() -> None:
    """The check is no dead code although nobody reads a result of it."""
    compiled = torchsmith.compile(lambda x: torch.linalg.inv(x) + 1)
    for x in (torch.eye(3), torch.stack([torch.eye(3), 2 * torch.eye(3)])):
        torch.testing.assert_close(compiled(x), torch.linalg.inv(x) + 1)
        with pytest.raises(torch.linalg.LinAlgError, match=r"linalg\.inv.*singular"):
            compiled(torch.zeros_like(x))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_compile_may_forbid_too(needs_grad: bool) -> None:
    x = torch.eye(3, requires_grad=needs_grad)
    assert torch.equal(torchsmith.compile(lambda x: torch.linalg.inv(x) + 1)(x), x + 1)
    with pytest.raises(Unsupported, match=r"AOT020.*linalg_inv_ex"):
        torchsmith.compile(lambda x: torch.linalg.inv(x) + 2, options={"libtorch": "forbid"})(x)
    assert torch.equal(torchsmith.compile(lambda x: x + 2, options={"libtorch": "forbid"})(x), x + 2)


class Fails(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.torchsmith_test.fails(x) + 1


@pytest.mark.parametrize("road", ROADS)
def test_errors_of_operators(tmp_path: Path, road: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The operator's own error with its name and line (PyTorch's loader shows libtorch's text, ours is on stderr); the model works on."""
    run = ROADS[road](packed(Fails(), (torch.ones(4),), tmp_path / "m.pt2"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed" if OLD else "no zeros, please") as caught:
            run(torch.zeros(4))
        assert "test_aot_libtorch.py:" in (capfd.readouterr().err if road == "torch" else str(caught.value))
        out = run(torch.ones(4))
        assert torch.equal(out[0] if road == "arrays" else out, torch.ones(4) + 1)


def fails(x: torch.Tensor) -> torch.Tensor:
    if not x.all():
        raise ValueError("no zeros, please")
    return x.clone()


EVERY_KIND = torch.library.Library("torchsmith_test", "DEF")
EVERY_KIND.define(
    "kinds(Tensor x, Tensor? y, Tensor? none, Tensor[] lst, Tensor?[] m, int n, int? k, float a, float? b, bool c, str s, str? t, int[] p, "
    "float[] q, int[]? r, ScalarType? d, Device? e, Layout? f, MemoryFormat? g, SymInt z, *, bool? h=None) -> (Tensor, Tensor)"
)


def kinds(x: torch.Tensor, y: Any, none: Any, lst: Any, m: Any, n: int, k: Any, a: float, b: Any, c: bool, s: str, t: Any, p: Any, q: Any,
          r: Any, d: Any, e: Any, f: Any, g: Any, z: int, *, h: Any = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert none is None and m[1] is None and (s, t) == ("one", "two words") and (list(p), list(q), list(r)) == ([1, -2], [0.5], [7])
    assert (d, f, g, h) == (torch.float64, torch.strided, torch.channels_last, True) and str(e) == "cpu"
    return x + y * n + k * lst[0] - lst[1], m[0] * a + b + (1 if c else 0) + z


EVERY_KIND.impl("kinds", kinds, "CPU")
EVERY_KIND.define("fails(Tensor x) -> Tensor")
EVERY_KIND.impl("fails", fails, "CPU")
EVERY_KIND.impl("fails", torch.empty_like, "Meta")
EVERY_KIND.impl("kinds", lambda x, *args, **kwargs: (torch.empty_like(x), torch.empty_like(x)), "Meta")


class Kinds(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        one, two = torch.ops.torchsmith_test.kinds(
            x, y, None, [x + 1, x + 2], [x, None], 3, 5, 0.25, 1.5, True, "one", "two words", [1, -2], [0.5], [7], torch.float64,
            torch.device("cpu"), torch.strided, torch.channels_last, x.shape[0], h=True,
        )  # fmt: skip
        return one * two + y


@pytest.mark.parametrize("road", ROADS)
def test_every_kind_of_argument(tmp_path: Path, road: str) -> None:
    """A custom operator written in Python, with every type of libtorch's stable interface; memory stays, calls may come from threads."""
    x = torch.randn(4, 5)
    run = ROADS[road](packed(Kinds(), (x,), tmp_path / "m.pt2"))
    want = Kinds()(x)

    def work(times: int) -> None:
        for _ in range(times):
            out = run(x)
            assert torch.equal(out[0] if road == "arrays" else out, want)

    def together(times: int) -> None:
        threads = [threading.Thread(target=work, args=(times,)) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    together(100)
    before = held()
    together(500)
    assert held() - before < 400_000  # 200 bytes a call; PyTorch 2.13 itself leaks a std::string, 48 bytes, for each of the two texts


def test_custom_operators_must_be_registered(tmp_path: Path) -> None:
    """In a process that lacks the operator the call says which one, and where it was called."""
    path = packed(Fails(), (torch.ones(4),), tmp_path / "m.pt2")
    code = """if 1:
        import sys, torch
        from torchsmith import aot
        try: aot.load_package(sys.argv[1])(torch.ones(4))
        except aot.PackageError as e: print(e.status, e)
    """
    said = fresh.run(code, path).stdout
    assert said.startswith("17 torchsmith_test.fails.default at ") and "test_aot_libtorch.py:" in said
    assert OLD or "torchsmith_test::fails" in said


def test_arguments_without_a_place_are_refused(tmp_path: Path) -> None:
    lib = torch.library.Library("torchsmith_test_scalar", "DEF")
    lib.define("plus(Tensor x, Scalar n) -> Tensor")
    lib.impl("plus", lambda x, n: x + n, "CPU")
    lib.impl("plus", lambda x, n: torch.empty_like(x), "Meta")

    class Plus(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.torchsmith_test_scalar.plus(x, 2)

    with pytest.raises(Unsupported, match=r"test_aot_libtorch.py:\d+.*AOT023.*its argument n is a number"):
        packed(Plus(), (torch.ones(2),), tmp_path / "m.pt2")


def test_gradients_and_autocast_are_off_inside(tmp_path: Path) -> None:
    run = aot.load_package(packed(Mixed().eval(), calls()[0], tmp_path / "m.pt2"))
    x, y = calls()[0]
    want = run(x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(x.requires_grad_(), y)
    for a, b in zip(got, want, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b)
    assert torch.is_grad_enabled()


CPP = r"""
#include <iostream>
#include <torch/torch.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
int main(int argc, char **argv) {
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  auto x = torch::eye(4) * 4;
  bool good = torch::allclose(loader.run({x})[0], x / 16 + 1);
  try {
    loader.run({torch::zeros({4, 4})});
    good = false;
  } catch (const std::exception &e) {
    good = good && std::string(e.what()).find(TOLD) != std::string::npos;
  }
  std::cout << (good ? "good" : "bad") << std::endl;
}
"""


def test_compiling_needs_no_compiled_call_before(tmp_path: Path) -> None:
    """In a fresh process: shim functions and dtypes are known although nothing was compiled for this process."""
    code = """if 1:
        import sys, torch, torchsmith
        from torchsmith import aot
        from torchsmith.runtime.externs_torch import operator_row
        from torchsmith.runtime.manifest import ExternRow
        outs = [["f32", 1], ["i64", 1]]
        row = ExternRow("aten.sort.default", [["tensor", 0], -1, False], {}, "as_given", "", "", [["f32", 1]], outs, [], [])
        assert operator_row(row).symbol == "aoti_torch_cpu_sort"
        args = [["tensor", 0], ["list", 0], 0, 4]
        row = ExternRow("aten._fft_c2r.default", args, {}, "as_given", "", "", [["c64", 1]], [["f32", 1]], [], [])
        assert not operator_row(row).symbol
        row = ExternRow("aten.randn.default", [["list", 3]], {"dtype": ["dtype", "f64"]}, "as_given", "", "", [], [["f64", 1]], [], [])
        dtype = [p for p in operator_row(row).params if p.letter == "I"][0]
        assert dtype.numbers[0].value == 7, dtype
    """
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.heavy
def test_in_cpp(tmp_path: Path) -> None:
    """PyTorch's loader in a C++ program."""
    package = packed(Inverse(), (torch.eye(4),), tmp_path / "m.pt2")
    root = Path(torch.__file__).parent
    (tmp_path / "main.cpp").write_text(CPP)
    includes = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    source, program = str(tmp_path / "main.cpp"), str(tmp_path / "main")
    told = "failed" if OLD else "singular"
    subprocess.run(["c++", "-std=c++20", "-O0", f'-DTOLD="{told}"', *includes, source, "-o", program, *libraries], check=True)
    done = subprocess.run([program, package], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "good", (done.stdout, done.stderr)
