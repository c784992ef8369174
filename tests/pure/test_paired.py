"""Paired tiles: bfloat16 products on AMX, on dot products of pairs and widened: one text for all of them, against NumPy."""

from __future__ import annotations

import emit_harness
import numpy as np
import pytest
from emit_harness import launch
from test_contraction import multiply_add
from test_emit_targets import flags_for

from torchsmith.ir import dtype as dt
from torchsmith.ir.blocks import Paired, Transpose
from torchsmith.ir.dtype import DType
from torchsmith.ir.expr import Axis, Cast, Load, const, convert
from torchsmith.ir.kernel import Kernel
from torchsmith.ir.program import Buffer, Stage, Store
from torchsmith.schedule.kernels import stage_kernel
from torchsmith.schedule.memory.layouts import dense
from torchsmith.schedule.templates.contraction import pack, readings, recognise
from torchsmith.schedule.templates.paired import form_changing_pairs, form_paired, rows_of
from torchsmith.schedule.templates.windows import narrow_k, widen

TARGETS = {
    "native": emit_harness.FLAGS, "no tiles": [*emit_harness.FLAGS, "-mno-amx-bf16"], "avx2": flags_for("x86-64-v3"),
    "generic": flags_for("x86-64"), "tiles": [*emit_harness.FLAGS, emit_harness.SOFTWARE_TILES],
}  # fmt: skip


def halves(x: np.ndarray) -> np.ndarray:
    """float32 values that bfloat16 holds, as its bits."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random float32 values that bfloat16 holds."""
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def form(stage: Stage, shapes: dict[str, tuple[int, ...]]) -> tuple[Stage, Kernel, dict[str, Buffer]]:
    """The packing, the kernel and their buffers: x and w in bfloat16, y in float32."""
    buffers = {
        s: Buffer(s, dt.f32 if s == "y" else dt.bf16, tuple(map(const, e)), dense(tuple(map(const, e))), "temp") for s, e in shapes.items()
    }
    found = recognise(stage)
    assert found is not None
    formed = form_paired(narrow_k(found, buffers), buffers)
    assert formed is not None
    packing, kernel, packed = formed
    return packing, kernel, {**buffers, packed.name: packed}


def run(packing: Stage, kernel: Kernel, buffers: dict[str, Buffer], x: np.ndarray, w: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    arrays = {"x": halves(x), "w": halves(w), "y": np.zeros(shape, np.float32)}
    arrays["y_packed"] = np.full(int(np.prod([e.value for e in buffers["y_packed"].shape])), 0x7FC0, np.uint16)  # type: ignore[attr-defined]
    launch(stage_kernel(packing, buffers), arrays, {})
    launch(kernel, arrays, {}, chunks=3)
    return arrays["y"]


SIZES = [
    (32, 32, 64), (37, 40, 32), (5, 9, 34), (70, 16, 608), (13, 40, 35), (1, 33, 130), (35, 7, 1), (33, 100, 33), (17, 1, 63), (49, 17, 95),
    (31, 65, 31), (65, 530, 255), (33, 2080, 600),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_product(target: str, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_harness, "FLAGS", TARGETS[target])
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    a, b = Load("x", dt.bf16, (i, r)), Load("w", dt.bf16, (j, r))
    product = multiply_add(((r, const(k)),), Cast(dt.f32, a), Cast(dt.f32, b))
    stage = Stage(((i, const(m)), (j, const(n))), (Store("y", (i, j), product),))
    packing, kernel, buffers = form(stage, {"x": (m, k), "w": (n, k), "y": (m, n)})
    assert isinstance(kernel.body[0], Paired)
    rng = np.random.default_rng(0)
    x, w = bf16(rng, m, k), bf16(rng, n, k)
    got = run(packing, kernel, buffers, x, w, (m, n))
    np.testing.assert_allclose(got, x.astype(np.float64) @ w.T.astype(np.float64), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_results_along_rows_are_turned(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-first: stored in vectors along the rows of a tile."""
    monkeypatch.setattr(emit_harness, "FLAGS", TARGETS[target])
    m, n, k = 75, 40, 36
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    product = multiply_add(((r, const(k)),), Cast(dt.f32, Load("x", dt.bf16, (i, r))), Cast(dt.f32, Load("w", dt.bf16, (j, r))))
    stage = Stage(((j, const(n)), (i, const(m))), (Store("y", (j, i), product),))
    buffers = {
        s: Buffer(s, dt.f32 if s == "y" else dt.bf16, tuple(map(const, e)), dense(tuple(map(const, e))), "temp")
        for s, e in {"x": (m, k), "w": (n, k), "y": (n, m)}.items()
    }
    found = next(c for c in readings(stage) if c.b.buf == "w")
    formed = form_paired(found, buffers)
    assert formed is not None
    packing, kernel, packed = formed
    assert any(isinstance(s, Transpose) for s in kernel.body)
    rng = np.random.default_rng(0)
    x, w = bf16(rng, m, k), bf16(rng, n, k)
    got = run(packing, kernel, {**buffers, packed.name: packed}, x, w, (n, m))
    np.testing.assert_allclose(got, w.astype(np.float64) @ x.T.astype(np.float64), rtol=1e-5, atol=1e-4)


# images, rows of one, channels, columns, taps, stride; whether all taps are copied side by side
WINDOWS = [
    (2, 20, 3, 40, 7, 2, True), (3, 37, 24, 150, 3, 1, True), (1, 9, 33, 70, 5, 3, True), (2, 33, 152, 9, 3, 1, False),
    (1, 70, 40, 5, 3, 1, True), (2, 33, 32, 20, 3, 2, False),
    (1, 40, 64, 640, 9, 1, False), (1, 33, 24, 2100, 9, 1, True),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("images", "m", "k", "n", "taps", "stride", "joined"), WINDOWS)
def test_windows(
    target: str, images: int, m: int, k: int, n: int, taps: int, stride: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emit_harness, "FLAGS", TARGETS[target])
    h, i, j, t, r = Axis("i0"), Axis("i1"), Axis("i2"), Axis("r0"), Axis("r1")
    size = (m - 1) * stride + 2 * taps
    a, b = Load("x", dt.bf16, (h, i * stride + t * 2, r)), Load("w", dt.bf16, (j, t, r))
    product = multiply_add(((t, const(taps)), (r, const(k))), Cast(dt.f32, a), Cast(dt.f32, b))
    stage = Stage(((h, const(images)), (i, const(m)), (j, const(n))), (Store("y", (h, i, j), product),))
    packing, kernel, buffers = form(stage, {"x": (images, size, k), "w": (n, taps, k), "y": (images, m, n)})
    (tile,) = (s for s in kernel.body if isinstance(s, Paired))
    assert tile.joined is joined
    rng = np.random.default_rng(0)
    x, w = bf16(rng, images, size, k), bf16(rng, n, taps, k)
    got = run(packing, kernel, buffers, x, w, (images, m, n))
    want = sum(x[:, u * 2 : u * 2 + m * stride : stride].astype(np.float64)[:, :m] @ w[:, u].T.astype(np.float64) for u in range(taps))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-4)


def test_rows_fill_hardware_tiles() -> None:
    assert [rows_of(m) for m in (1, 7, 16, 17, 32, 48, 64, None)] == [1, 7, 16, 17, 32, 32, 32, 32]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("along", ["n", "k"])
@pytest.mark.parametrize(("batch", "m", "n", "k"), [(1, 32, 32, 64), (3, 37, 40, 33), (2, 5, 9, 31), (1, 300, 7, 95), (2, 33, 50, 1), (1, 1100, 20, 600)])
def test_changing_operand(target: str, along: str, batch: int, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_harness, "FLAGS", TARGETS[target])
    h, i, j, r = Axis("i0"), Axis("i1"), Axis("i2"), Axis("r0")
    shapes = {"x": (batch, m, k), "w": (batch, k, n) if along == "n" else (batch, n, k), "y": (batch, m, n)}
    buffers = {
        s: Buffer(s, dt.f32 if s == "y" else dt.bf16, tuple(map(const, e)), dense(tuple(map(const, e))), "temp") for s, e in shapes.items()
    }
    a, b = Load("x", dt.bf16, (h, i, r)), Load("w", dt.bf16, (h, r, j) if along == "n" else (h, j, r))
    product = multiply_add(((r, const(k)),), Cast(dt.f32, a), Cast(dt.f32, b))
    found = recognise(Stage(((h, const(batch)), (i, const(m)), (j, const(n))), (Store("y", (h, i, j), product),)))
    assert found is not None
    kernel = form_changing_pairs(found, buffers)
    assert kernel is not None
    rng = np.random.default_rng(0)
    x, w = bf16(rng, *shapes["x"]), bf16(rng, *shapes["w"])
    arrays = {"x": halves(x), "w": halves(w), "y": np.zeros(shapes["y"], np.float32)}
    launch(kernel, arrays, {}, chunks=3)
    want = x.astype(np.float64) @ (w if along == "n" else w.transpose(0, 2, 1)).astype(np.float64)
    np.testing.assert_allclose(arrays["y"], want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("m", "dtype", "copied"), [(8, dt.f16, True), (7, dt.f16, False), (64, dt.bf16, True), (64, dt.f32, False)])
def test_rows_are_widened_once(m: int, dtype: DType, copied: bool) -> None:
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    sizes = {"x": (m, 40), "w": (24, 40), "y": (m, 24)}
    buffers = {
        s: Buffer(s, dt.f32 if s == "y" else dtype, tuple(map(const, e)), dense(tuple(map(const, e))), "temp") for s, e in sizes.items()
    }
    a, b = Load("x", dtype, (i, r)), Load("w", dtype, (j, r))
    product = multiply_add(((r, const(40)),), convert(a, dt.f32), convert(b, dt.f32))
    found = recognise(Stage(((i, const(m)), (j, const(24))), (Store("y", (i, j), product),)))
    assert found is not None
    wide = widen(found, buffers)
    assert (wide is not None) is copied
    if wide is not None:
        assert wide.product.a.dtype is dt.f32 and wide.copy.dtype is dt.f32
        assert pack(wide.product, "packed", 1)[1].dtype is dt.f32
