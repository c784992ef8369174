"""Packages: one file that PyTorch's loaders, torchsmith's loaders with and without torch, and plain C programs run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fresh
from torchsmith import aot
from torchsmith.codes import Unsupported
from torchsmith.runtime.package import PackageError

ROOT = Path(__file__).resolve().parents[2]
C_PROGRAM = r"""
#include "torchsmith/package.h"
int main(int argc, char **argv) {
  torchsmith_model *m;
  if (torchsmith_load(argv[1], argc > 2 ? argv[2] : NULL, NULL, &m)) { printf("load: %s\n", torchsmith_error()); return 2; }
  for (int64_t n = 1; n <= 2; n++) {
    float x[20];
    for (int i = 0; i < 20; i++) x[i] = 0.1f * (float)i - 1.0f;
    int64_t sizes[] = {n, 10};
    tsm_tensor in = {x, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, out = {0};
    int rc = torchsmith_run(m, &in, 1, &out, 1);
    if (rc) { printf("run %d: %s\n", rc, torchsmith_model_error(m)); return 3; }
    for (int64_t i = 0; i < n; i++) printf("%.6f\n", (double)((float *)out.data)[i]);
    torchsmith_release(m, &out);
  }
  tsm_tensor bad = {NULL, (int64_t[]){1, 10}, NULL, 2, TSM_F64, 0, 0, NULL}, out = {0};
  printf("status %d\n", (int)torchsmith_run(m, &bad, 1, &out, 1));
  printf("status %d\n", (int)torchsmith_run(m, &bad, 0, &out, 1));
  torchsmith_free(m);
  return 0;
}
"""


class Perceptron(torch.nn.Module):
    """The model of the AOTInductor documents."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(10, 16)
        self.relu = torch.nn.ReLU()
        self.fc2 = torch.nn.Linear(16, 1)
        self.sigmoid = torch.nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sigmoid(self.fc2(self.relu(self.fc1(x))))


def exported(model: torch.nn.Module, *args: Any, dynamic: Any = None, **kwargs: Any) -> Any:
    return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic)


@pytest.fixture(scope="module")
def model() -> Perceptron:
    torch.manual_seed(0)
    return Perceptron().eval()


@pytest.fixture(scope="module")
def built(model: Perceptron, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with model.pt2 and model.so, batch 1 to 1024."""
    folder = tmp_path_factory.mktemp("aot")
    program = exported(model, torch.randn(8, 10), dynamic={"x": {0: torch.export.Dim("batch", min=1, max=1024)}})
    assert aot.compile_and_package(program, package_path=folder / "model.pt2") == str(folder / "model.pt2")
    assert aot.aot_compile(program, options={"aot_inductor.output_path": str(folder / "model.so")}) == str(folder / "model.so")
    return folder


@pytest.mark.parametrize("name", ["model.pt2", "model.so"])
def test_own_loader(built: Path, model: Perceptron, name: str) -> None:
    loaded = aot.load_package(built / name)
    with torch.no_grad():
        for n in (1, 2, 7, 1024):
            x = torch.randn(n, 10)
            torch.testing.assert_close(loaded(x), model(x))
    assert loaded.get_constant_fqns() == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


@pytest.mark.parametrize(
    ("x", "said", "status"),
    [
        (torch.randn(8, 11), "size 10 expected at dimension 1, got 11", 5),
        (torch.randn(0, 10), "between 1 and 1024, got 0", 5),
        (torch.randn(1025, 10), "between 1 and 1024, got 1025", 5),
        (torch.randn(8, 10).double(), "dtype float32 expected, got float64", 3),
        (torch.randn(80), "2 dimensions expected, got 1", 4),
        (torch.randn(8, 20)[:, ::2], "stride at dimension 0", 6),
    ],
)
def test_bad_inputs_are_refused(built: Path, x: torch.Tensor, said: str, status: int) -> None:
    loaded = aot.load_package(built / "model.pt2")
    with pytest.raises(PackageError, match=said) as caught:
        loaded(x)
    assert caught.value.status == status
    assert "input 0 (x)" in str(caught.value)


def test_wrong_structure(built: Path) -> None:
    loaded = aot.load_package(built / "model.pt2")
    x = torch.randn(8, 10)
    with pytest.raises(TypeError, match="1 positional argument; it was given 2"):
        loaded(x, x)
    with pytest.raises(TypeError, match="1 positional argument; it was given 0, batch="):
        loaded(batch=x)


def test_torch_loads_it(built: Path, model: Perceptron) -> None:
    """PyTorch's own loader, unchanged."""
    loaded = torch._inductor.aoti_load_package(str(built / "model.pt2"))
    with torch.no_grad():
        for n in (1, 3, 1024):
            x = torch.randn(n, 10)
            torch.testing.assert_close(loaded(x), model(x))
    with pytest.raises(RuntimeError, match="between 1 and 1024, got 1025" if torch.__version__ >= "2.13" else "API call failed"):
        loaded(torch.randn(1025, 10))
    state = {k: v + 1 for k, v in model.state_dict().items()}
    loaded.load_constants(state, check_full_update=True)
    other = Perceptron()
    other.load_state_dict(state)
    x = torch.randn(4, 10)
    torch.testing.assert_close(loaded(x), other(x).detach())
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(built / "model.so"), 1)
    for n in (8, 2):
        x = torch.randn(n, 10)
        torch.testing.assert_close(runner.run([x])[0], model(x).detach())


def test_numpy_without_torch(built: Path, model: Perceptron) -> None:
    code = f"""
import sys, json
sys.modules["torch"] = None
import numpy as np
from torchsmith import aot
m = aot.load_package({str(built / "model.pt2")!r}, verify=True)
x = (np.arange(30, dtype=np.float32).reshape(3, 10) / 30)
print(json.dumps(m(x).tolist()))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    x = torch.arange(30.0).reshape(3, 10) / 30
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), model(x).detach())


def test_plain_c(built: Path, model: Perceptron, tmp_path: Path) -> None:
    """A C program with libc alone, from a package and from a library."""
    (tmp_path / "main.c").write_text(C_PROGRAM)
    command = ["cc", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", f"-I{ROOT / 'csrc/include'}"]
    subprocess.run([*command, str(tmp_path / "main.c"), "-o", str(tmp_path / "main"), "-ldl"], check=True)
    x = torch.arange(20.0).reshape(2, 10) * 0.1 - 1
    want = [*model(x[:1]).flatten().tolist(), *model(x).flatten().tolist()]
    for name in ("model.pt2", "model.so"):
        done = subprocess.run([tmp_path / "main", built / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        lines = done.stdout.split("\n")
        torch.testing.assert_close(torch.tensor([float(t) for t in lines[:3]]), torch.tensor(want), atol=2e-6, rtol=0)
        assert lines[3:5] == ["status 3", "status 2"]
    done = subprocess.run([tmp_path / "main", built / "model.pt2", "other"], capture_output=True, text=True, check=False)
    assert "no model named other; it has: model" in done.stdout


def test_old_libc_is_enough(built: Path) -> None:
    """No symbol above GLIBC_2.28, and nothing needed but libc and libm."""
    text = subprocess.run(["objdump", "-T", built / "model.so"], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([0-9.]+)", text)}
    assert versions and max(versions) <= (2, 28)
    assert "GLIBCXX" not in text
    needed = subprocess.run(["objdump", "-p", built / "model.so"], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED\s+(\S+)", needed)) <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}


def test_new_constants(built: Path, model: Perceptron) -> None:
    loaded = aot.load_package(built / "model.pt2")
    x = torch.randn(5, 10)
    before = loaded(x)
    loaded.load_constants({"fc2.bias": torch.full((1,), 50.0)})
    torch.testing.assert_close(loaded(x), torch.ones(5, 1))
    loaded.load_constants(dict(model.named_parameters()), check_full_update=True)
    torch.testing.assert_close(loaded(x), before)
    with pytest.raises(PackageError, match="no constant named fc3"):
        loaded.load_constants({"fc3": x})
    with pytest.raises(PackageError, match=r"constant fc2\.bias: size 1 expected at dimension 0, got 5"):
        loaded.load_constants({"fc2.bias": torch.zeros(5)})


def test_externs_are_listed() -> None:
    class Sorts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x)

    with pytest.raises(Unsupported, match=r"AOT020.*test_aot.py:\d+"):
        aot.compile_and_package(exported(Sorts(), torch.eye(4)))


def test_switches_of_the_incumbent(model: Perceptron, tmp_path: Path) -> None:
    """Those without an effect are taken; those that would need one are refused with what does it here; unknown ones by name."""
    program = exported(model, torch.randn(2, 10))
    harmless = {"force_mmap_weights": True, "link_libtorch": True, "package_cpp_only": None, "enable_lto": True, "check_lowerbound": False}
    options = {f"aot_inductor.{k}": v for k, v in harmless.items()} | {"aot_inductor.metadata": {"owner": "me"}}
    path = aot.compile_and_package(program, package_path=tmp_path / "m.pt2", inductor_configs=options)
    assert aot.load_package(path).get_metadata()["metadata"] == {"owner": "me"}
    assert torch._inductor.aoti_load_package(str(path)).get_metadata()["owner"] == "me"
    refused = {"package_cpp_only": True, "package_constants_on_disk_format": "pickle_weights", "cross_target_platform": "windows",
               "custom_op_libs": ["x.so"], "compile_standalone": True, "debug_symbols": True, "metadata": {"owner": 3}}  # fmt: skip
    for key, value in refused.items():
        with pytest.raises(Unsupported, match=rf"AOT051.*{key}"):
            aot.compile_and_package(program, inductor_configs={f"aot_inductor.{key}": value})
    with pytest.raises(RuntimeError, match=r"unknown option 'aot_inductor\.no_such'"):
        aot.compile_and_package(program, inductor_configs={"aot_inductor.no_such": 1})
    with pytest.raises(Unsupported, match="AOT041"):
        aot.load_package(path).load_constants({}, user_managed=True)


def test_files_in_memory(model: Perceptron) -> None:
    buffer = io.BytesIO()
    assert aot.compile_and_package(exported(model, torch.randn(2, 10)), package_path=buffer) is buffer
    x = torch.randn(2, 10)
    for load in (aot.load_package, torch._inductor.aoti_load_package):
        buffer.seek(0)
        torch.testing.assert_close(load(buffer)(x), model(x).detach())


ENVIRONMENT = """
import sys, torch
from torchsmith import aot
from torchsmith.export import export
path = aot.compile_and_package(export(torch.nn.Linear(3, 4).eval(), (torch.ones(2, 3),)), package_path=sys.argv[1])
for load in (aot.load_package, torch._inductor.aoti_load_package):
    model = load(path)
    model(torch.ones(2, 3))
    for bad in (torch.ones(3, 3), torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2).t()):
        try:
            model(bad)
        except RuntimeError as e:
            # before 2.13 torch's loader does not hand the model's text on: it is on stderr
            assert "input 0" in str(e) or load is not aot.load_package and torch.__version__ < "2.13", e
        else:
            raise AssertionError("taken")
"""


def test_environment_of_the_documents(tmp_path: Path) -> None:
    """Inputs are checked whatever AOTI_RUNTIME_CHECK_INPUTS says; freezing changes nothing; the value printer prints."""
    env = {"AOTI_RUNTIME_CHECK_INPUTS": "0", "TORCHINDUCTOR_FREEZING": "1", "AOT_INDUCTOR_DEBUG_INTERMEDIATE_VALUE_PRINTER": "2"}
    done = fresh.run(ENVIRONMENT, tmp_path / "m.pt2", **env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Error: input 0") >= 3  # torch's loader: the model says it there, whoever hands it on
    assert "(contraction) wrote" in done.stderr, done.stderr


def test_several_models(model: Perceptron, built: Path, tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: dict[str, torch.Tensor]) -> dict[str, Any]:
            return {"sum": a + b["t"], "none": None, "pair": (b["t"].t(), a)}

    a, t = torch.randn(3, 4), torch.randn(3, 4)
    path = aot.package(tmp_path / "two.pt2", {"model": str(built / "model.so"), "model2": exported(Sum(), a, {"t": t})})
    x = torch.randn(9, 10)
    torch.testing.assert_close(aot.load_package(path)(x), model(x).detach())
    out = aot.load_package(path, "model2")(a, {"t": t})
    assert out["none"] is None and list(out) == ["sum", "none", "pair"]
    torch.testing.assert_close(out["sum"], a + t)
    torch.testing.assert_close(out["pair"][0], t.t())
    assert out["pair"][0].data_ptr() == t.data_ptr() and out["pair"][1].data_ptr() == a.data_ptr()
    load_package = pytest.importorskip("torch._inductor.package").load_package  # PyTorch's loader, by name
    torch.testing.assert_close(load_package(path)(x), model(x).detach())
    out = load_package(path, model_name="model2")(a, {"t": t})
    torch.testing.assert_close(out["sum"], a + t)
    torch.testing.assert_close(out["pair"][0], t.t())
    with pytest.raises(RuntimeError, match="model3"):
        load_package(path, model_name="model3")
