"""Banded tiles: grouped and depthwise convolutions on channels-last input, against NumPy, on several instruction sets, and interpreted."""

from __future__ import annotations

from dataclasses import replace

import emit_harness
import numpy as np
import pytest
from emit_harness import NP, launch
from test_contraction import channels_last, multiply_add
from test_emit_targets import flags_for

from torchsmith.emit.c import emit_kernel
from torchsmith.ir import dtype as dt
from torchsmith.ir.blocks import Banded
from torchsmith.ir.dtype import DType
from torchsmith.ir.expr import Axis, Cast, Const, Load, const, convert, op
from torchsmith.ir.program import Buffer, Stage, Store
from torchsmith.options import Options
from torchsmith.schedule.kernels import stage_kernel
from torchsmith.schedule.memory.layouts import dense
from torchsmith.schedule.templates.contraction import recognise
from torchsmith.schedule.templates.grouped import form_grouped
from torchsmith.schedule.templates.products import Product, product_kernels

# channels in, channels out, groups, height, width, window, stride, padding, dilation
CASES = [
    (16, 16, 4, 6, 15, 3, 1, 1, 1), (32, 32, 4, 5, 7, 3, 2, 1, 1), (24, 24, 3, 5, 6, 3, 1, 0, 1), (8, 16, 4, 7, 7, 3, 1, 1, 1),
    (16, 8, 4, 7, 7, 5, 1, 2, 1), (9, 9, 3, 5, 5, 3, 1, 2, 2), (20, 20, 20, 9, 30, 3, 1, 1, 1), (33, 33, 33, 9, 8, 5, 2, 2, 1),
    (64, 64, 4, 5, 9, 3, 1, 1, 1), (64, 64, 2, 5, 9, 3, 2, 1, 1), (16, 16, 4, 5, 9, 1, 1, 0, 1), (5, 10, 5, 6, 6, 3, 1, 1, 1),
]  # fmt: skip


def stage_of(c, o, g, h, w, k, s, p, d, stored: DType = dt.f32) -> tuple[Stage, dict[str, Buffer], dict[str, np.ndarray], np.ndarray]:
    span = d * (k - 1) + 1
    oh, ow = (h + 2 * p - span) // s + 1, (w + 2 * p - span) // s + 1
    shapes = {"x": (1, c, h, w), "w": (o, c // g, k, k), "y": (1, o, oh, ow)}
    buffers = {n: Buffer(n, dt.f32 if n == "y" else stored, tuple(map(const, e)), dense(tuple(map(const, e))) if n == "w" else channels_last(e), "temp") for n, e in shapes.items()}
    oc, y, x, ci, r, q = (Axis(n) for n in ("i1", "i2", "i3", "r0", "r1", "r2"))
    iy, ix = y * s + r * d - p, x * s + q * d - p
    mask = op("and", op("and", op("ge", iy, const(0)), op("lt", iy, const(h))), op("and", op("ge", ix, const(0)), op("lt", ix, const(w))))
    first = oc if o == g else op("floordiv", oc, const(o // g))
    channel = first if c == g else first * (c // g) + ci
    at = (const(0), channel, iy, ix)
    load = Load("x", stored, at, mask, Const(stored, 0.0)) if p else Load("x", stored, at)
    deep = () if c == g else ((ci, const(c // g)),)
    weight = Load("w", stored, (oc, const(0) if c == g else ci, r, q))
    product = multiply_add((*deep, (r, const(k)), (q, const(k))), convert(load, dt.f32), convert(weight, dt.f32))
    stage = Stage(((oc, const(o)), (y, const(oh)), (x, const(ow))), (Store("y", (const(0), oc, y, x), product),))
    rng = np.random.default_rng(0)
    image, kernel = (rng.standard_normal(shapes[n]).astype(np.float32) for n in "xw")
    if stored is dt.bf16:
        image, kernel = ((v.view(np.uint32) & 0xFFFF0000).view(np.float32) for v in (image, kernel))
    padded = np.pad(image.astype(np.float64), ((0, 0), (0, 0), (p, p), (p, p)))
    want = np.zeros(shapes["y"])
    for i in range(o):
        for j in range(c // g):
            for a in range(k):
                for b in range(k):
                    part = padded[0, i // (o // g) * (c // g) + j, a * d : a * d + (oh - 1) * s + 1 : s, b * d : b * d + (ow - 1) * s + 1 : s]
                    want[0, i] += part * kernel[i, j, a, b]
    arrays = {"w": kernel, "x": np.ascontiguousarray(image.transpose(0, 2, 3, 1)), "y": np.zeros((1, oh, ow, o), np.float32)}
    if stored is dt.bf16:
        arrays |= {n: (arrays[n].view(np.uint32) >> 16).astype(np.uint16) for n in "xw"}
    return stage, buffers, arrays, want.transpose(0, 2, 3, 1)


def run(case: tuple[int, ...], result: DType = dt.f32, stored: DType = dt.f32) -> None:
    stage, buffers, arrays, want = stage_of(*case, stored=stored)
    if result is not dt.f32:
        stage = replace(stage, stores=(replace(stage.stores[0], value=Cast(result, stage.stores[0].value)),))
        buffers["y"] = replace(buffers["y"], dtype=result)
        arrays["y"] = arrays["y"].astype(NP[result.name])
    found = recognise(stage)
    assert found is not None
    formed = form_grouped(found, buffers)
    assert formed is not None
    assert isinstance(formed[1].body[0], Banded)
    packed = buffers["y_packed"]
    arrays["y_packed"] = np.full(int(np.prod([e.value for e in packed.shape])), 0x7FC0 if stored is dt.bf16 else np.nan, NP[packed.dtype.name])
    launch(stage_kernel(formed[0], buffers), arrays, {})
    launch(formed[1], arrays, {}, chunks=3)
    np.testing.assert_allclose(arrays["y"], want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_numpy(case: tuple[int, ...]) -> None:
    run(case)


@pytest.mark.parametrize("march", ["x86-64-v3", "native"])
@pytest.mark.parametrize("case", CASES)
def test_bfloat16(case: tuple[int, ...], march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widened as it is spread over the lanes."""
    monkeypatch.setattr(emit_harness, "FLAGS", flags_for(march))
    run(case, stored=dt.bf16)


def test_groups_of_four_are_spread() -> None:
    """In bfloat16 too, without a copy in float32: one group alone fills a quarter of a vector of pairs."""
    stage, buffers, _, _ = stage_of(32, 32, 8, 6, 15, 3, 1, 0, 1, stored=dt.bf16)
    found = recognise(stage)
    assert found is not None
    kernels = product_kernels(Product(stage, found, buffers, {"w"}, Options(), {}))
    assert len(kernels) == 2
    assert "spread_xbf16" in emit_kernel(kernels[-1])


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("case", CASES[:2] + CASES[6:8])
def test_older_instruction_sets(case: tuple[int, ...], march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_harness, "FLAGS", flags_for(march))
    run(case)


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "native"])
@pytest.mark.parametrize("case", CASES[:2] + CASES[6:10])
def test_results_of_eight_bytes(case: tuple[int, ...], march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile keeps its 16 lanes beside vectors of two registers."""
    monkeypatch.setattr(emit_harness, "FLAGS", flags_for(march))
    run(case, dt.f64)
