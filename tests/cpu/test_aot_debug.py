"""What helps where a package is wrong: values printed while it runs, and small programs that fail as the large one does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchsmith
from torchsmith import aot
from torchsmith.lower.table import LOWERINGS

ROOT = Path(__file__).resolve().parents[2]
PRINTER = "aot_inductor.debug_intermediate_value_printer"
C_PROGRAM = r"""
#include "torchsmith/package.h"
int main(int argc, char **argv) {
  torchsmith_model *m;
  if (torchsmith_load(argv[1], "model", NULL, &m)) { printf("load: %s\n", torchsmith_error()); return 2; }
  float x[6] = {1, 2, 3, -4, 5, 6};
  int64_t sizes[] = {2, 3};
  tsm_tensor in = {x, sizes, NULL, 2, TSM_F32, 0, 0, NULL}, out[2] = {{0}};
  int rc = torchsmith_run(m, &in, 1, out, 2);
  torchsmith_free(m);
  return rc;
}
"""


class Two(torch.nn.Module):
    """Two kernels: a row sum that a second pass divides by, and a bfloat16 result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin() + x.relu().sum(0), (x * 2).bfloat16()


def package(folder: Path, **options: Any) -> str:
    program = torch.export.export(Two(), (torch.randn(2, 3),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=1, max=9)}})
    return aot.compile_and_package(program, package_path=str(folder / "model.pt2"), inductor_configs=options)


X = torch.tensor([[1.0, 2.0, 3.0], [-4.0, 5.0, 6.0]])


@pytest.mark.parametrize("level", ["2", 2])
def test_values_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str], level: Any) -> None:
    loaded = aot.load_package(package(tmp_path, **{PRINTER: level}))
    capfd.readouterr()
    got = loaded(X)
    torch.testing.assert_close(got, Two()(X))
    said = capfd.readouterr().err
    assert "given: input0 f32[2, 3]: min -4, max 6, mean 2.16667, 0 nan, 0 inf; first 1 2 3 -4 5 6" in said
    assert f"f32[3] at {__file__}:" in said and "min 1, max 9, mean 5.66667, 0 nan, 0 inf; first 1 7 9" in said
    assert "bf16[" in said and "min -8, max 12, mean 4.33333" in said
    loaded(torch.tensor([[float("nan"), float("inf"), 0.0]]))
    said = capfd.readouterr().err
    assert "run 2" in said and "given: input0 f32[1, 3]: min 0, max 0, mean 0, 1 nan, 1 inf" in said


def test_normal_packages_hold_nothing_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = package(tmp_path)
    assert b"torchsmith: run" not in Path(path).read_bytes()
    aot.load_package(path)(X)
    assert not capfd.readouterr().err


def test_names_only_and_filter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    aot.load_package(package(tmp_path, **{PRINTER: "3"}))(X)
    names = [line for line in capfd.readouterr().err.splitlines() if "launch" in line]
    assert len(names) >= 2 and all("tsk_" in n and "min" not in n for n in names)
    wanted = names[0].split(": ")[-1].split()[0]
    aot.load_package(package(tmp_path, **{PRINTER: "2", "aot_inductor.filtered_kernel_names": f"nothing,{wanted}"}))(X)
    said = capfd.readouterr().err
    assert wanted in said and "given" not in said and "launch 2" not in said
    aot.load_package(package(tmp_path, **{PRINTER: "2", "aot_inductor.filtered_kernel_names": "no_such_kernel"}))(X)
    assert "launch" not in capfd.readouterr().err


def test_values_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHSMITH_VALUES_DIR", str(tmp_path / "values"))
    aot.load_package(package(tmp_path, **{PRINTER: "1"}))(X)
    assert not capfd.readouterr().err
    files = {p.name: np.load(p) for p in (tmp_path / "values").glob("*.npy")}
    assert np.array_equal(files["run1_launch0_input0.npy"], X.numpy())
    assert any(f.dtype == np.float32 and np.array_equal(f, X.relu().sum(0).numpy()) for f in files.values())
    (half,) = (f for n, f in files.items() if n.endswith(".bf16.npy"))
    assert np.array_equal(half.view(np.int16), (X * 2).bfloat16().view(torch.int16).numpy())


def test_from_plain_c(tmp_path: Path) -> None:
    path = package(tmp_path, **{PRINTER: "2"})
    (tmp_path / "main.c").write_text(C_PROGRAM)
    run = [*os.environ.get("CC", "cc").split(), f"-I{ROOT}/csrc/include", "main.c", "-o", "main", "-ldl", "-lpthread"]
    subprocess.run(run, cwd=tmp_path, check=True)
    done = subprocess.run([str(tmp_path / "main"), path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert "given: input0 f32[2, 3]: min -4, max 6" in done.stderr and "first 1 7 9" in done.stderr


def test_wrong_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="debug_intermediate_value_printer' is one of '0', '1', '2', '3', not '7'"):
        package(tmp_path, **{PRINTER: "7"})


def test_externs_and_strange_dtypes_just_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.linalg.inv(x.sin()).cos(), n * 3, x.half() + 1, (n > 1).int() == 1, x.double() * 0.5

    x, n = torch.eye(3) + 1, torch.arange(4, dtype=torch.int8)
    with torch.no_grad():
        got = torchsmith.compile(fn, options={"debug_values": "2"})(x, n)
    torch.testing.assert_close(got, fn(x, n))
    said = capfd.readouterr().err
    assert "linalg_inv_ex" in said and "wrote" in said.split("linalg_inv_ex")[1]
    assert "i8[4]" in said and "min 0, max 9, mean 4.5" in said
    assert "f16[3, 3]" in said and "min 2, max 3" in said and "f64[3, 3]" in said and "min 0.5, max 1" in said and "bool[4]" in said




# ---------------------------------------------------------------- the minifier
class Many(torch.nn.Module):
    """Some thirty operators, one of them erf."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + x.mean(1, keepdim=True)
            if k == 3:
                x = torch.erf(x * 0.5) + 1
        return torch.softmax(x, -1)


def many() -> Any:
    torch.manual_seed(0)
    return torch.export.export(Many().eval(), (torch.randn(4, 6),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2, max=9)}})


def break_erf(monkeypatch: pytest.MonkeyPatch, replacement: Any) -> None:
    monkeypatch.setitem(LOWERINGS, torch.ops.aten.erf.default, replacement)
    monkeypatch.setenv("TORCHSMITH_FORCE_DISABLE_CACHES", "1")


def crash(cx: Any, x: Any) -> Any:
    raise KeyError(f"broken for {x.rank} dimensions")


def wrong(cx: Any, x: Any) -> Any:
    return cx.stage(x.load)


def script_of(text: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "repro"}
    exec(text, scope)
    return scope


@pytest.mark.parametrize(("broken", "said"), [(crash, "KeyError"), (wrong, "wrong values")])
def test_minifier_finds_the_broken_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, said: str) -> None:
    program = many()
    with monkeypatch.context() as m:
        break_erf(m, broken)
        path = aot.minify_program(program, tmp_path / "repro.py")
        text = Path(path).read_text()
        with pytest.raises(KeyError if broken is crash else AssertionError):
            script_of(text)["main"]()
    assert said in text
    calls = [line for line in text.splitlines() if "= torch.ops." in line]
    assert len(calls) == 1 and "aten.erf.default(x0)" in calls[0] and f"{__file__}:" in calls[0]
    script_of(text)["main"]()  # without the injected mistake


def test_minifier_refuses_what_does_not_fail(tmp_path: Path) -> None:
    with pytest.raises(torchsmith.Unsupported, match="AOT080"):
        aot.minify_program(many(), tmp_path / "repro.py")
    assert not list(tmp_path.iterdir())


def test_failing_compilation_leaves_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHSMITH_DEBUG_DIR", str(tmp_path))
    break_erf(monkeypatch, crash)
    with pytest.raises(KeyError):
        aot.compile_and_package(many(), package_path=tmp_path / "m.pt2", inductor_configs={"aot_inductor.dump_aoti_minifier": True})
    said = capfd.readouterr().err
    (file,) = (tmp_path / "minifier").glob("*_repro.py")
    assert f"torchsmith: a script that fails alike: {file}" in said and "erf" in file.read_text()
    for options in ({"aot_inductor.dump_aoti_minifier": "yes"}, {"aot_inductor.repro_level": 7}):
        with pytest.raises(torchsmith.Unsupported, match="AOT051"):
            aot.compile_and_package(many(), inductor_configs=options)


def test_conversions_fix_no_size(tmp_path: Path) -> None:
    """torch.export puts a check of the operand's metadata before them."""
    loaded = aot.load_package(package(tmp_path))
    for n in (1, 2, 9):
        x = torch.randn(n, 3)
        torch.testing.assert_close(loaded(x), Two()(x))
