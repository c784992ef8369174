"""Paired tiles: bfloat16 products on AMX, on dot products of pairs and widened: one text for all of them, against NumPy."""

from __future__ import annotations

import emit_harness
import numpy as np
import pytest
from emit_harness import launch
from test_contraction import multiply_add
from test_emit_targets import flags_for

from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Cast, Load, const
from torchsmith.ir.kernel import Paired
from torchsmith.ir.program import Buffer, Stage, Store
from torchsmith.schedule.contraction import recognise
from torchsmith.schedule.kernels import stage_kernel
from torchsmith.schedule.layouts import dense
from torchsmith.schedule.paired import form_paired

TARGETS = {
    "native": emit_harness.FLAGS, "no tiles": [*emit_harness.FLAGS, "-mno-amx-bf16"], "avx2": flags_for("x86-64-v3"),
    "generic": flags_for("x86-64"),
}  # fmt: skip


def halves(x: np.ndarray) -> np.ndarray:
    """float32 values that bfloat16 holds, as its bits."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("m", "n", "k"), [(32, 32, 64), (37, 40, 32), (5, 9, 34), (70, 16, 608), (13, 40, 35), (1, 33, 130), (35, 7, 1)])
def test_product(target: str, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_harness, "FLAGS", TARGETS[target])
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    shapes = {"x": (m, k), "w": (n, k), "y": (m, n)}
    kinds = {"x": dt.bf16, "w": dt.bf16, "y": dt.f32}
    buffers = {s: Buffer(s, kinds[s], tuple(map(const, e)), dense(tuple(map(const, e))), "temp") for s, e in shapes.items()}
    a, b = Load("x", dt.bf16, (i, r)), Load("w", dt.bf16, (j, r))
    product = multiply_add(((r, const(k)),), Cast(dt.f32, a), Cast(dt.f32, b))
    found = recognise(Stage(((i, const(m)), (j, const(n))), (Store("y", (i, j), product),)))
    assert found is not None
    formed = form_paired(found, buffers)
    assert formed is not None
    packing, kernel, packed = formed
    buffers[packed.name] = packed
    assert isinstance(kernel.body[0], Paired)
    rng = np.random.default_rng(0)
    x, w = ((rng.standard_normal(shapes[s]).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32) for s in "xw")
    arrays = {"x": halves(x), "w": halves(w), "y": np.zeros((m, n), np.float32)}
    arrays["y_packed"] = np.full(int(np.prod([e.value for e in packed.shape])), 0x7FC0, np.uint16)
    launch(stage_kernel(packing, buffers), arrays, {})
    launch(kernel, arrays, {}, chunks=3)
    np.testing.assert_allclose(arrays["y"], x.astype(np.float64) @ w.T.astype(np.float64), rtol=1e-5, atol=1e-4)
