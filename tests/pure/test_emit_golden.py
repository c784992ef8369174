"""Printed kernels against files: a change of the printer shows as a diff (`--update-golden` rewrites them)."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_schedule_kernels import CASES

from torchsmith.emit.c import emit_kernel
from torchsmith.ir.kernel import Kernel
from torchsmith.options import Options
from torchsmith.schedule.fusion.fuse import fuse
from torchsmith.schedule.kernels import form_kernels

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["chain", "layer_norm_of_sum", "pooling_with_border", "column_sums_in_two_steps"])
def test_text(name: str, request: pytest.FixtureRequest) -> None:
    program, _, _ = CASES[name]()
    kernels = [k for k in form_kernels(fuse(program, Options()), Options()).body if isinstance(k, Kernel)]
    text = "\n".join(emit_kernel(k)[emit_kernel(k).index("void TS_KERNEL") :] for k in kernels)
    path = GOLDEN / f"{name}.c"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
