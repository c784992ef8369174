"""The first kernel: sin(cos(x)), printed, compiled and run."""

from __future__ import annotations

import numpy as np
from emit_harness import run

from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Load, const, op
from torchsmith.ir.program import Buffer, Fresh, Program, Stage, Store
from torchsmith.options import Options
from torchsmith.schedule.fusion.fuse import fuse
from torchsmith.schedule.kernels import form_kernels
from torchsmith.schedule.memory.layouts import dense


def test_sin_cos() -> None:
    n = 10003
    i = Axis("i0")
    shape = (const(n),)
    buffers = {name: Buffer(name, dt.f32, shape, dense(shape) if role != "temp" else None, role)
               for name, role in (("x", "input"), ("t", "temp"), ("y", "output"))}  # fmt: skip
    body = (
        Stage(((i, const(n)),), (Store("t", (i,), op("cos", Load("x", dt.f32, (i,)))),), origin="cos"),
        Stage(((i, const(n)),), (Store("y", (i,), op("sin", Load("t", dt.f32, (i,)))),), origin="sin"),
    )
    program = Program("p", (), ("x",), buffers, body, (Fresh("y"),))
    scheduled = form_kernels(fuse(program, Options()), Options())
    x = (np.random.default_rng(0).standard_normal(n) * 100).astype(np.float32)
    x[:4] = [1e30, np.inf, np.nan, -3e38]
    y = run(scheduled, {"x": x})["y"]
    with np.errstate(invalid="ignore"):
        want = np.sin(np.cos(x.astype(np.float64)))
    np.testing.assert_allclose(y, want, rtol=3e-7, atol=1e-7)
