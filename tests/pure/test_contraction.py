"""Contractions: matmul and convolution Folds through recognition, packing and the register-tiled kernel, against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emit_harness import launch

from torchsmith.emit.c import emit_kernel
from torchsmith.ir import dtype as dt
from torchsmith.ir.blocks import Contract
from torchsmith.ir.expr import Axis, Const, Fold, Load, Sym, Var, const, op, substitute
from torchsmith.ir.kernel import Kernel
from torchsmith.ir.program import Buffer, Layout, Stage, Store
from torchsmith.options import Options
from torchsmith.schedule.kernels import stage_kernel
from torchsmith.schedule.memory.layouts import dense
from torchsmith.schedule.templates.contraction import ACC, form_contraction, pack, recognise, work_of
from torchsmith.schedule.templates.merge_rows import merge_rows
from torchsmith.schedule.templates.products import Product, product_kernels
from torchsmith.schedule.templates.tiling import Tiling, choose_tiling
from torchsmith.schedule.templates.windows import drop_sure

A0, B0 = Var("fa0", dt.f32), Var("fb0", dt.f32)


def multiply_add(axes, a, b):
    return Fold(axes, (Const(dt.f32, 0.0),), (op("add", A0, op("mul", a, b)),), (op("add", A0, B0),), prefix="f")


def channels_last(shape) -> Layout:
    _, c, h, w = shape
    return Layout((const(c * h * w), const(1), const(c * w), const(c)), const(0))


def run(stage: Stage, buffers: dict[str, Buffer], arrays: dict[str, np.ndarray], epilogue=lambda v, index: v, tile=None) -> None:
    c = recognise(stage)
    assert c is not None
    tiling = Tiling(*tile, "columns") if tile else choose_tiling(work_of(c))
    packing, packed = pack(c, "packed", tiling.vectors)
    table = {**buffers, "packed": packed}
    arrays["packed"] = np.full(int(np.prod([e.value for e in packed.shape])), np.nan, np.float32)
    launch(stage_kernel(packing, table), arrays, {})
    store = stage.stores[0]
    stores = (Store(store.buf, store.index, epilogue(substitute(store.value, {c.fold: ACC}), store.index)),)
    launch(form_contraction(c, stores, packed, tiling, buffers, ()), arrays, {}, chunks=3)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 3, 7), (128, 96, 64), (33, 70, 19), (1, 200, 40), (14, 32, 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_with_bias_and_relu(m: int, n: int, k: int, transposed: bool) -> None:
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    shapes = {"x": (m, k), "w": (n, k) if transposed else (k, n), "b": (n,), "y": (m, n)}
    buffers = {s: Buffer(s, dt.f32, e, dense(e), "temp") for s, e in ((s, tuple(map(const, e))) for s, e in shapes.items())}
    rng = np.random.default_rng(0)
    arrays = {s: rng.standard_normal(e).astype(np.float32) for s, e in shapes.items()}
    w = Load("w", dt.f32, (j, r) if transposed else (r, j))
    product = multiply_add(((r, const(k)),), Load("x", dt.f32, (i, r)), w)
    stage = Stage(((i, const(m)), (j, const(n))), (Store("y", (i, j), product),))
    want = np.maximum(arrays["x"].astype(np.float64) @ (arrays["w"].T if transposed else arrays["w"]) + arrays["b"], 0)
    run(stage, buffers, arrays, lambda v, index: op("max", op("add", v, Load("b", dt.f32, (index[1],))), Const(dt.f32, 0.0)))
    np.testing.assert_allclose(arrays["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 6), (5, 2, 3), (3, 4, 2, 2)])
def test_vector_times_matrix_of_flattened_channels(shape: tuple[int, ...]) -> None:
    """y[j] = sum over k of x[k as an index of shape] * w[j, k], x stored with the first dimension innermost."""
    n, whole = 40, int(np.prod(shape))
    j, r = Axis("i0"), Axis("r0")
    index, rest = [], whole
    for size in shape:
        outer, rest = rest, rest // size
        index.append(r // rest if outer == whole else r // rest % size if rest > 1 else r % size)
    order = (*range(1, len(shape)), 0)
    buffers = {"x": Buffer("x", dt.f32, tuple(map(const, shape)), dense(tuple(map(const, shape)), order), "temp")}
    buffers |= {b: Buffer(b, dt.f32, e, dense(e), "temp") for b, e in (("w", (const(n), const(whole))), ("y", (const(n),)))}
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(shape).astype(np.float32), rng.standard_normal((n, whole)).astype(np.float32)
    arrays = {"x": np.ascontiguousarray(x.transpose(order)), "w": w, "y": np.zeros(n, np.float32)}
    product = multiply_add(((r, const(whole)),), Load("x", dt.f32, tuple(index)), Load("w", dt.f32, (j, r)))
    run(Stage(((j, const(n)),), (Store("y", (j,), product),)), buffers, arrays)
    np.testing.assert_allclose(arrays["y"], w.astype(np.float64) @ x.reshape(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [dense, channels_last])
@pytest.mark.parametrize(
    ("n", "c", "h", "w", "oc", "kh", "stride", "pad", "dilation"),
    [(2, 3, 9, 11, 20, 3, 1, 1, 1), (1, 16, 14, 14, 32, 3, 2, 1, 1), (1, 8, 7, 7, 40, 1, 1, 0, 1), (1, 5, 12, 10, 17, 3, 1, 2, 2), (1, 3, 30, 30, 64, 7, 2, 3, 1),
     (1, 16, 9, 20, 32, 5, 1, 2, 1), (1, 32, 6, 27, 32, 3, 1, 1, 1), (1, 3, 23, 47, 40, 11, 4, 2, 1), (1, 24, 5, 33, 16, 3, 1, 3, 3), (1, 64, 8, 15, 16, 3, 1, 1, 1)],
)
def test_convolution(layout, n, c, h, w, oc, kh, stride, pad, dilation) -> None:
    span = dilation * (kh - 1) + 1
    oh, ow = (h + 2 * pad - span) // stride + 1, (w + 2 * pad - span) // stride + 1
    shapes = {"x": (n, c, h, w), "w": (oc, c, kh, kh), "y": (n, oc, oh, ow)}
    layouts = {"x": layout, "y": layout, "w": dense}

    def buffer(s):
        shape = tuple(map(const, shapes[s]))
        at = channels_last(shapes[s]) if layouts[s] is channels_last else dense(shape)
        return Buffer(s, dt.f32, shape, at, "temp")

    buffers = {s: buffer(s) for s in shapes}
    b, o, y, x = (Axis(f"i{d}") for d in range(4))
    ci, r, s = (Axis(f"r{d}") for d in range(3))
    iy, ix = y * stride + r * dilation - pad, x * stride + s * dilation - pad
    mask = op("and", op("and", op("ge", iy, const(0)), op("lt", iy, const(h))), op("and", op("ge", ix, const(0)), op("lt", ix, const(w))))
    load = Load("x", dt.f32, (b, ci, iy, ix), mask, Const(dt.f32, 0.0)) if pad else Load("x", dt.f32, (b, ci, iy, ix))
    product = multiply_add(((ci, const(c)), (r, const(kh)), (s, const(kh))), load, Load("w", dt.f32, (o, ci, r, s)))
    stage = Stage(((b, const(n)), (o, const(oc)), (y, const(oh)), (x, const(ow))), (Store("y", (b, o, y, x), product),))
    rng = np.random.default_rng(0)
    image, weight = (rng.standard_normal(shapes[z]).astype(np.float32) for z in "xw")
    arrays = {"w": weight.copy(), "x": image.copy(), "y": np.zeros(shapes["y"], np.float32)}
    if layout is channels_last:
        arrays["x"], arrays["y"] = np.ascontiguousarray(image.transpose(0, 2, 3, 1)), np.zeros((n, oh, ow, oc), np.float32)
    run(stage, buffers, arrays)
    padded = np.pad(image.astype(np.float64), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    want = np.zeros(shapes["y"])
    for p in range(kh):
        for q in range(kh):
            part = padded[:, :, p * dilation : p * dilation + (oh - 1) * stride + 1 : stride, q * dilation : q * dilation + (ow - 1) * stride + 1 : stride]
            want += np.einsum("nchw,oc->nohw", part, weight[:, :, p, q].astype(np.float64))
    got = arrays["y"].transpose(0, 3, 1, 2) if layout is channels_last else arrays["y"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns_first", [False, True])
def test_any_number_of_rows_that_is_known_at_run_time(columns_first: bool) -> None:
    """Whole tiles and every kind of partial one, sums long enough to be cut, a last vector that is not full; results stored either way."""
    m, n, k = Sym("m"), 70, 400
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    shapes = {"x": (m, const(k)), "w": (const(n), const(k)), "y": (m, const(n))}
    buffers = {b: Buffer(b, dt.f32, e, dense(e, (1, 0) if b == "y" and columns_first else None), "temp") for b, e in shapes.items()}
    product = multiply_add(((r, const(k)),), Load("x", dt.f32, (i, r)), Load("w", dt.f32, (j, r)))
    c = recognise(Stage(((i, m), (j, const(n))), (Store("y", (i, j), op("max", product, Const(dt.f32, 0.0))),)))
    assert c is not None and c.b.buf == "w"
    tiling = choose_tiling(work_of(c))
    packing, packed = pack(c, "packed", tiling.vectors)
    table = {**buffers, "packed": packed}
    stores = (Store("y", (i, j), c.value),)
    kernel = form_contraction(c, stores, packed, tiling, buffers, ())
    assert next(s for s in kernel.body if isinstance(s, Contract)).tails
    rng = np.random.default_rng(0)
    w = rng.standard_normal((n, k)).astype(np.float32)
    weights = {"w": w, "packed": np.full(int(np.prod([e.value for e in packed.shape])), np.nan, np.float32)}
    launch(stage_kernel(packing, table), weights, {})
    for rows in range(1, 2 * tiling.rows + 2):
        x = rng.standard_normal((rows, k)).astype(np.float32)
        arrays = {**weights, "x": x, "y": np.full((n, rows) if columns_first else (rows, n), np.nan, np.float32)}
        launch(kernel, arrays, {"m": rows}, chunks=2)
        got = arrays["y"].T if columns_first else arrays["y"]
        np.testing.assert_allclose(got, np.maximum(x.astype(np.float64) @ w.T, 0), rtol=1e-4, atol=1e-4)


def test_rows_that_a_view_splits_by_a_symbol() -> None:
    """y[i] = x[i // s, i % s] @ w: two row axes as `x` lies, one again as it is read and written."""
    b, s, n, k = Sym("b"), Sym("s"), 40, 24
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    shapes = {"x": (b, s, const(k)), "w": (const(n), const(k)), "y": (b * s, const(n))}
    buffers = {name: Buffer(name, dt.f32, e, dense(e), "temp") for name, e in shapes.items()}
    at = i * k + r
    x = Load("x", dt.f32, (op("floordiv", at, s * k), op("mod", op("floordiv", at, const(k)), s), op("mod", at, const(k))))
    stage = Stage(((i, b * s), (j, const(n))), (Store("y", (i, j), multiply_add(((r, const(k)),), x, Load("w", dt.f32, (j, r)))),))
    c = recognise(stage)
    assert c is not None and c.b.buf == "w" and [e for _, e in c.rows] == [b, s]
    merged, seen = merge_rows(c, buffers)
    ((row, extent),) = merged.rows
    assert extent is b * s and merged.a.index == (row, merged.k[0]) and merged.stage.stores[0].index[0] is row
    assert seen["x"].shape == (b * s, const(k)) and seen["y"] is buffers["y"]


def test_rows_that_begin_later_are_one_row_axis_too() -> None:
    """y[i, j] = x[i + 1, j] @ w, as a recurrent layer reads the one before it: row (i + 1) * s + j."""
    b, s, n, k = Sym("b"), Sym("s"), 40, 24
    i, j, o, r = Axis("i0"), Axis("i1"), Axis("i2"), Axis("r0")
    shapes = {"x": (b + 1, s, const(k)), "w": (const(n), const(k)), "y": (b, s, const(n))}
    buffers = {name: Buffer(name, dt.f32, e, dense(e), "temp") for name, e in shapes.items()}
    product = multiply_add(((r, const(k)),), Load("x", dt.f32, (i + 1, j, r)), Load("w", dt.f32, (o, r)))
    c = recognise(Stage(((i, b), (j, s), (o, const(n))), (Store("y", (i, j, o), product),)))
    assert c is not None
    merged, seen = merge_rows(c, buffers)
    ((row, extent),) = merged.rows
    assert extent is b * s and merged.a.index == (row + s, merged.k[0]) and merged.stage.stores[0].index[0] is row
    assert seen["x"].shape[0] is (b + 1) * s
    turned = replace(buffers["x"], layout=dense(shapes["x"], (1, 0, 2)))
    assert len(merge_rows(c, {**buffers, "x": turned})[0].rows) == 2


@pytest.mark.parametrize("phases", [2, 9])
def test_phases_that_only_the_weights_know_are_batches(phases: int) -> None:
    """y[i * phases + f, j] = x[i] @ w[f, :, j], less than whole: the rows of a tile are x's, and what lies beyond is not stored."""
    m, k, n = 23 * phases - 1, 7, 5
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    shapes = {"x": (23, k), "w": (phases, k, n), "y": (m, n)}
    buffers = {s: Buffer(s, dt.f32, e, dense(e), "temp") for s, e in ((s, tuple(map(const, e))) for s, e in shapes.items())}
    rng = np.random.default_rng(0)
    arrays = {s: rng.standard_normal(e).astype(np.float32) for s, e in shapes.items()}
    x, w = Load("x", dt.f32, (op("floordiv", i, const(phases)), r)), Load("w", dt.f32, (op("mod", i, const(phases)), r, j))
    stage = Stage(((i, const(m)), (j, const(n))), (Store("y", (i, j), multiply_add(((r, const(k)),), x, w)),))
    c = recognise(stage)
    assert c is not None and [e for _, e in c.rows] == [const(23)] and c.n[1] is const(n) and [e for _, e in c.batch] == [const(phases)]
    packing, packed = pack(c, "packed", 1)
    arrays["packed"] = np.full(int(np.prod([e.value for e in packed.shape])), np.nan, np.float32)
    launch(stage_kernel(packing, {**buffers, "packed": packed}), arrays, {})
    stores = (replace(c.stage.stores[0], value=c.value),)
    launch(form_contraction(c, stores, packed, Tiling(4, 1, "rows"), buffers, ()), arrays, {}, chunks=3)
    want = np.einsum("ik,fkj->ifj", arrays["x"], arrays["w"]).reshape(-1, n)[:m]
    np.testing.assert_allclose(arrays["y"], want, rtol=1e-5, atol=1e-5)


def test_other_folds_are_not_contractions() -> None:
    i, r = Axis("i0"), Axis("r0")
    total = Fold(((r, const(4)),), (Const(dt.f32, 0.0),), (op("add", A0, Load("x", dt.f32, (i, r))),), (op("add", A0, B0),), prefix="f")
    assert recognise(Stage(((i, const(3)),), (Store("y", (i,), total),))) is None
    dot = multiply_add(((r, const(4)),), Load("x", dt.f32, (i, r)), Load("z", dt.f32, (i, r)))
    assert recognise(Stage(((i, const(3)),), (Store("y", (i,), dot),))) is None


def test_a_function_of_the_sums_leaves_the_registers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constants would stay in registers through the loop over k, and accumulators be spilled."""
    texts: list[str] = []
    monkeypatch.setattr("emit_harness.emit_kernel", lambda kernel: texts.append(emit_kernel(kernel)) or texts[-1])
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    shapes = {"x": (28, 40), "w": (40, 64), "y": (28, 64)}
    buffers = {s: Buffer(s, dt.f32, e, dense(e), "temp") for s, e in ((s, tuple(map(const, e))) for s, e in shapes.items())}
    rng = np.random.default_rng(0)
    arrays = {s: rng.standard_normal(e).astype(np.float32) for s, e in shapes.items()}
    product = multiply_add(((r, const(40)),), Load("x", dt.f32, (i, r)), Load("w", dt.f32, (r, j)))
    stage = Stage(((i, const(28)), (j, const(64))), (Store("y", (i, j), product),))
    run(stage, buffers, arrays, lambda v, index: op("sigmoid", v), tile=(14, 2))
    want = 1 / (1 + np.exp(-(arrays["x"].astype(np.float64) @ arrays["w"])))
    np.testing.assert_allclose(arrays["y"], want, rtol=1e-5, atol=1e-6)
    _, _, kernel = texts[-1].partition("TS_KERNEL(")
    _, _, behind = kernel.partition("c13_1;")
    assert behind.index("EMPTY_REGISTERS") < behind.index("sigmoid")


def test_the_next_tile_of_a_large_operand_is_prefetched() -> None:
    """The hint names the tile behind the one in use, and never reaches past the one behind that."""
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    buffers = {s: Buffer(s, dt.f32, e, dense(e), "temp") for s, e in ((n, tuple(map(const, e))) for n, e in (("x", (70, 256)), ("w", (256, 640)), ("y", (70, 640))))}
    product = multiply_add(((r, const(256)),), Load("x", dt.f32, (i, r)), Load("w", dt.f32, (r, j)))
    stage = Stage(((i, const(70)), (j, const(640))), (Store("y", (i, j), product),))
    c = recognise(stage)
    assert c is not None
    tiling = choose_tiling(work_of(c))
    assert tiling.sweep == "columns"
    _, packed = pack(c, "packed", tiling.vectors)
    kernel = form_contraction(c, (Store("y", (i, j), substitute(product, {c.fold: ACC})),), packed, tiling, buffers, ())
    (contract, *_) = kernel.body
    assert isinstance(contract, Contract) and contract.prefetch is not None
    start, by = contract.prefetch, contract.prefetch_vectors
    tile = 256 * 16 * tiling.vectors
    (nt, _), *_, (mt, rows), (inner, steps) = kernel.grid
    assert steps.value == 1
    for m in range(rows.value):
        first = substitute(start, {nt: const(3), inner: const(0), mt: const(m), **{x: const(0) for x, _ in kernel.grid[1:-2]}}).value
        assert 4 * tile <= first and first + 256 * 16 * by <= 5 * tile


@pytest.mark.parametrize(("k", "asks"), [(1024, True), (4096, False)])
def test_one_row_asks_for_no_next_tile_that_the_cache_cannot_keep(k: int, asks: bool) -> None:
    j, r = Axis("i0"), Axis("r0")
    buffers = {s: Buffer(s, dt.f32, e, dense(e), "temp") for s, e in ((n, tuple(map(const, e))) for n, e in (("x", (k,)), ("w", (k, 640)), ("y", (640,))))}
    product = multiply_add(((r, const(k)),), Load("x", dt.f32, (r,)), Load("w", dt.f32, (r, j)))
    c = recognise(Stage(((j, const(640)),), (Store("y", (j,), product),)))
    assert c is not None
    tiling = choose_tiling(work_of(c))
    _, packed = pack(c, "packed", tiling.vectors)
    (contract, *_) = form_contraction(c, (Store("y", (j,), substitute(product, {c.fold: ACC})),), packed, tiling, buffers, ()).body
    assert isinstance(contract, Contract) and (contract.prefetch is not None) == asks


@pytest.mark.parametrize(
    ("m", "k", "sweep", "lie", "far"),
    [
        (4096, 256, "rows", 256, True),  # every tile of rows is met once
        (128, 256, "columns", 256, False),  # rows that the cache keeps
        (8192, 256, "columns", 256, True),
        (4096, 256, "rows", 272, True),  # set apart by a line
        (4096, 256, "rows", 768, False),  # a part of longer rows: what follows the tile is not the next one
        (4096, 32, "rows", 32, False),
    ],
)
def test_rows_are_asked_for_where_they_come_from_far(m: int, k: int, sweep: str, lie: int, far: bool) -> None:
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    shapes = {"x": (m, k), "w": (k, 64), "y": (m, 64)}
    buffers = {s: Buffer(s, dt.f32, tuple(map(const, e)), dense(tuple(map(const, e))), "temp") for s, e in shapes.items()}
    buffers["x"] = Buffer("x", dt.f32, buffers["x"].shape, Layout((const(lie), const(1)), const(0)), "temp")
    product = multiply_add(((r, const(k)),), Load("x", dt.f32, (i, r)), Load("w", dt.f32, (r, j)))
    c = recognise(Stage(((i, const(m)), (j, const(64))), (Store("y", (i, j), product),)))
    assert c is not None
    _, packed = pack(c, "packed", 2)
    kernel = form_contraction(c, (Store("y", (i, j), substitute(product, {c.fold: ACC})),), packed, Tiling(8, 2, sweep), buffers, ())
    (contract, *_) = kernel.body
    assert isinstance(contract, Contract) and contract.prefetch_rows is const(int(far))


@pytest.mark.parametrize(("side", "channels", "asked"), [(112, 64, 25), (56, 256, 25), (14, 512, 0), (200, 8, 0)])
def test_windows_ask_for_rows_of_images_that_the_cache_does_not_keep(side: int, channels: int, asked: int) -> None:
    """14 rows of channels over 9 taps: 25 elements with 16 steps; small images and steps of less than a line ask for none."""
    contract, kernel = window(side, channels)
    assert contract.prefetch_rows is const(asked)
    text = emit_kernel(kernel)
    assert ("__builtin_prefetch(g + q" in text) == (asked > 0)
    assert not asked or f"* {asked} / 16" in text


@pytest.mark.parametrize(("side", "channels", "share"), [(14, 512, 37), (28, 64, 10), (7, 64, 0)])
def test_row_tiles_of_a_window_share_what_the_next_tile_of_columns_needs(side: int, channels: int, share: int) -> None:
    contract, kernel = window(side, channels)
    assert contract.prefetch is not None and contract.prefetch_share is const(share) and (contract.prefetch_vectors == 0) == (share > 0)
    assert ("__builtin_prefetch(f + q" in emit_kernel(kernel)) == (share > 0)
    if share:  # the pieces lie behind each other, from the beginning of the next tile to its end
        (nt, _), (row, rows), (mt, across), (inner, _) = [(a, e) for a, e in kernel.grid if not a.name.startswith("one")]
        tile, piece = 9 * channels * 32, 9 * channels * share // 16
        places = [(y, x) for y in range(rows.value) for x in range(across.value)]
        starts = [substitute(contract.prefetch, {nt: const(3), inner: const(0), row: const(y), mt: const(x)}).value for y, x in places]
        assert starts == [4 * tile + n * piece for n in range(len(places))] and starts[-1] + piece >= 5 * tile


def window(side: int, channels: int) -> tuple[Contract, Kernel]:
    """A 3x3 convolution by tiles of 14 rows and 32 columns."""
    i, j, n, ky, kx, k = Axis("i0"), Axis("i1"), Axis("i2"), Axis("r0"), Axis("r1"), Axis("r2")
    shapes = {"x": (side + 2, side + 2, channels), "w": (3, 3, channels, 64), "y": (side, side, 64)}
    buffers = {s: Buffer(s, dt.f32, tuple(map(const, e)), dense(tuple(map(const, e))), "temp") for s, e in shapes.items()}
    x, w = Load("x", dt.f32, (i + ky, j + kx, k)), Load("w", dt.f32, (ky, kx, k, n))
    product = multiply_add(((ky, const(3)), (kx, const(3)), (k, const(channels))), x, w)
    c = recognise(Stage(((i, const(side)), (j, const(side)), (n, const(64))), (Store("y", (i, j, n), product),)))
    assert c is not None
    _, packed = pack(c, "packed", 2)
    kernel = form_contraction(c, (Store("y", (i, j, n), substitute(product, {c.fold: ACC})),), packed, Tiling(14, 2, "columns"), buffers, ())
    (contract, *_) = kernel.body
    assert isinstance(contract, Contract)
    return contract, kernel


def test_bounds_that_hold_for_every_size_are_dropped() -> None:
    """i < m over i < m holds whatever m is, 2 * i - 1 >= 0 and i + 1 < m do not."""
    m, i, j, r = Sym("m"), Axis("i0"), Axis("i1"), Axis("r0")
    sure = [op("lt", i, m), op("ge", m - i - 1, const(0)), op("lt", i * 2 + r, m * 2 + 6), op("ge", m * 3 - i, const(1))]
    for test, holds in [*((t, True) for t in sure), (op("ge", i * 2 - 1, const(0)), False), (op("lt", i + 1, m), False), (op("lt", i * i, m), False)]:
        x = Load("x", dt.f32, (i, r), test, Const(dt.f32, 0.0))
        product = multiply_add(((r, const(8)),), x, Load("w", dt.f32, (j, r)))
        c = recognise(Stage(((i, m), (j, const(64))), (Store("y", (i, j), product),)))
        assert c is not None
        assert (drop_sure(c).a.mask is None) is holds, str(test)


@pytest.mark.parametrize(("k", "copies"), [(4096, 1), (1024, 0)])
def test_rows_that_share_sets_are_copied(k: int, copies: int) -> None:
    """Rows 16 KB apart push each other out of both caches: they are copied a line apart, if enough columns meet each."""
    m, n = 256, 512
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    shapes = {"x": (m, k), "w": (n, k), "y": (m, n)}
    buffers = {s: Buffer(s, dt.f32, e, dense(e), "temp") for s, e in ((s, tuple(map(const, e))) for s, e in shapes.items())}
    product = multiply_add(((r, const(k)),), Load("x", dt.f32, (i, r)), Load("w", dt.f32, (j, r)))
    stage = Stage(((i, const(m)), (j, const(n))), (Store("y", (i, j), product),))
    c = recognise(stage)
    assert c is not None
    kernels = product_kernels(Product(stage, c, buffers, {"w"}, Options(), {}))
    assert len(kernels) == 2 + copies
    rng = np.random.default_rng(0)
    arrays = {s: rng.standard_normal(e).astype(np.float32) for s, e in shapes.items()}
    for name in buffers.keys() - arrays.keys():
        layout = buffers[name].layout
        assert layout is not None
        last = sum((e.value - 1) * t.value for e, t in zip(buffers[name].shape, layout.strides, strict=True))  # type: ignore[attr-defined]
        arrays[name] = np.full(last + 1, np.nan, np.float32)
    for kernel in kernels:
        launch(kernel, arrays, {}, chunks=3)
    np.testing.assert_allclose(arrays["y"], arrays["x"].astype(np.float64) @ arrays["w"].T, rtol=1e-4, atol=1e-3)
