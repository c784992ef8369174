"""The same text on other targets: older instruction sets, and as C++17; every native operator has text."""

from __future__ import annotations

import subprocess

import emit_harness
import numpy as np
import pytest
from emit_harness import FLAGS
from test_emit_math import SPECIAL, apply
from test_schedule_kernels import CASES, check

from torchsmith.emit.c import SPECIAL as SPECIAL_OPS
from torchsmith.emit.c import emit_kernel
from torchsmith.emit.optable import ROWS
from torchsmith.ir import dtype as dt
from torchsmith.ir.kernel import Kernel
from torchsmith.ir.ops import OPS
from torchsmith.options import Options
from torchsmith.schedule.fusion.fuse import fuse
from torchsmith.schedule.kernels import form_kernels


def flags_for(march: str) -> list[str]:
    return [f"-march={march}" if f == "-march=native" else f for f in FLAGS if "prefer" not in f]


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("name", ["softmax", "pooling_with_border", "several_types", "gather_rows", "batch_norm_channels_last"])
def test_older_instruction_sets(name: str, march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_harness, "FLAGS", flags_for(march))
    check(name, Options())


@pytest.mark.parametrize("name", ["exp", "sin", "tanh", "erf", "log", "floor", "round"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_functions_without_fma(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_harness, "FLAGS", flags_for("x86-64"))
    x = np.array([*SPECIAL, 0.3, -7.25, 41.5], np.float32 if dtype == "f32" else np.float64)
    want = np.array([float(OPS[name].scalar(float(v))) for v in x])
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(apply(name, dt.DTYPES[dtype], x), want.astype(x.dtype), rtol=3e-6, atol=1e-38 if dtype == "f32" else 0)


@pytest.mark.parametrize("name", ["softmax", "pooling_with_border", "several_types", "scatter_add", "scan_over_rows"])
def test_text_is_cxx_too(name: str) -> None:
    program, _, _ = CASES[name]()
    for k in form_kernels(fuse(program, Options()), Options()).body:
        if isinstance(k, Kernel):
            subprocess.run(["g++", "-std=gnu++17", "-fsyntax-only", "-march=native", "-w", "-DTS_KERNEL=kernel", "-x", "c++", "-"],
                           input=emit_kernel(k).encode(), check=True)  # fmt: skip


@pytest.mark.parametrize("name", sorted(n for n, row in OPS.items() if row.native))
def test_every_native_operator_has_text(name: str) -> None:
    assert name in ROWS or name in SPECIAL_OPS
