"""Contractions whose right-hand operand changes: in place and through panels, float32 and float64, against NumPy; nothing past an end counts."""

from __future__ import annotations

import emit_harness
import numpy as np
import pytest
from emit_harness import launch
from test_emit_targets import flags_for

from torchsmith.ir import dtype as dt
from torchsmith.ir.blocks import Contract, Transpose
from torchsmith.ir.dtype import DType
from torchsmith.ir.expr import Axis, Const, Expr, Fold, Load, Sym, Var, const, op
from torchsmith.ir.kernel import Kernel, Loop, Stmt
from torchsmith.ir.program import Buffer, Layout, Stage, Store
from torchsmith.ir.verify import verify_kernel
from torchsmith.options import Options
from torchsmith.schedule.templates.contraction import recognise
from torchsmith.schedule.templates.products import Product, product_kernels

NUMPY = {dt.f32: np.float32, dt.f64: np.float64}
# how w[k, n] lies: strides of (k, n) as factors of (K, N)
LAYOUTS = {
    "row-major": lambda k, n: (n, 1), "turned": lambda k, n: (1, k), "padded rows": lambda k, n: (n + 5, 1), "apart": lambda k, n: (2 * n, 2),
    "one set": lambda k, n: (1024, 1),
}  # fmt: skip
SHAPES = [(1, 1, 1), (1, 40, 33), (3, 1, 9), (5, 17, 1), (7, 33, 19), (14, 100, 300), (64, 16, 64), (129, 50, 70), (200, 47, 515), (33, 129, 1100)]
Size = int | Sym


def kernels(m: Size, n: Size, k: Size, d: DType, layout: str) -> list[Kernel]:
    """y[m, n] = x[m, k] @ w[k, n] + y0[n]."""
    i, j, r = Axis("i0"), Axis("i1"), Axis("r0")
    m, n, k = (const(e) if isinstance(e, int) else e for e in (m, n, k))
    dense = lambda *strides: Layout(tuple(s if isinstance(s, Expr) else const(s) for s in strides), const(0))
    buffers = {
        "x": Buffer("x", d, (m, k), dense(k, 1), "input"),
        "w": Buffer("w", d, (k, n), dense(*LAYOUTS[layout](k, n)), "input"),
        "y0": Buffer("y0", d, (n,), dense(1), "input"),
        "y": Buffer("y", d, (m, n), dense(n, 1), "temp"),
    }
    a0, b0 = Var("fa0", d), Var("fb0", d)
    fold = Fold(((r, k),), (Const(d, 0.0),), (op("add", a0, op("mul", Load("x", d, (i, r)), Load("w", d, (r, j)))),), (op("add", a0, b0),), prefix="f")
    stage = Stage(((i, m), (j, n)), (Store("y", (i, j), op("add", fold, Load("y0", d, (j,)))),))
    c = recognise(stage)
    if c is None:
        pytest.skip("no contraction")
    made = list(product_kernels(Product(stage, c, buffers, set(), Options(), {})))
    for kernel in made:
        verify_kernel(kernel)
    return made


def spaced(values: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """`values` laid out with `strides` (in elements) in memory that is NaN everywhere else."""
    out = np.full(sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) + 200, np.nan, values.dtype)
    np.lib.stride_tricks.as_strided(out, values.shape, [s * values.itemsize for s in strides])[...] = values
    return out


def check(made: list[Kernel], m: int, n: int, k: int, d: DType, layout: str, syms: dict[str, int], chunks: int = 3) -> np.ndarray:
    rng = np.random.default_rng(m + n + k)
    x, w, y0 = (rng.standard_normal(s).astype(NUMPY[d]) for s in ((m, k), (k, n), (n,)))
    y = np.full(m * n + 64, 7.5, NUMPY[d])
    arrays = {"x": spaced(x, (k, 1)), "w": spaced(w, LAYOUTS[layout](k, n)), "y0": spaced(y0, (1,)), "y": y}
    for kernel in made:
        for p in kernel.params:
            if p.buf not in arrays:
                arrays[p.buf] = np.full(int(np.prod([e.value for e in p.shape])), np.nan, NUMPY[d])
        launch(kernel, arrays, {s.name: syms[s.name] for s in kernel.syms}, chunks=chunks)
    want = x.astype(np.float64) @ w.astype(np.float64) + y0
    bound = 1e-5 if d is dt.f32 else 1e-13
    np.testing.assert_allclose(y[: m * n].reshape(m, n), want, rtol=bound, atol=bound * np.sqrt(k))
    assert (y[m * n :] == 7.5).all()
    return y


@pytest.mark.parametrize("d", [dt.f32, dt.f64], ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_against_numpy(m: int, n: int, k: int, layout: str, d: DType) -> None:
    made = kernels(m, n, k, d, layout)
    one, many = (check(made, m, n, k, d, layout, {}, chunks) for chunks in (1, 5))
    np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("d", [dt.f32, dt.f64], ids=str)
@pytest.mark.parametrize("layout", ["row-major", "turned"])
def test_sizes_known_at_run_time_only(layout: str, d: DType) -> None:
    made = kernels(Sym("m"), Sym("n"), Sym("k"), d, layout)
    for m, n, k in SHAPES:
        check(made, m, n, k, d, layout, {"m": m, "n": n, "k": k})


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("d", [dt.f32, dt.f64], ids=str)
@pytest.mark.parametrize("layout", ["row-major", "turned"])
@pytest.mark.parametrize(("m", "n", "k"), [(9, 45, 37), (70, 40, 300)])
def test_older_instruction_sets(m: int, n: int, k: int, layout: str, d: DType, march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_harness, "FLAGS", flags_for(march))
    check(kernels(m, n, k, d, layout), m, n, k, d, layout, {})


def statements(body: tuple[Stmt, ...]) -> list[Stmt]:
    return [x for s in body for x in (s, *(statements(s.body) if isinstance(s, Loop) else ()))]


@pytest.mark.parametrize("d", [dt.f32, dt.f64], ids=str)
def test_nothing_is_packed_that_is_contiguous(d: DType) -> None:
    for m, layout, through in ((4, "row-major", None), (300, "row-major", None), (4, "turned", Transpose), (300, "turned", Transpose)):
        made = kernels(m, 64, 700, d, layout)
        assert len(made) == 1
        found = statements(made[0].body)
        (contract,) = (s for s in found if isinstance(s, Contract))
        assert (contract.b.buf == "w") == (through is None)
        assert through is None or any(isinstance(s, through) for s in found)


def test_rows_that_share_a_set_of_the_cache_are_copied() -> None:
    """Rows of w a multiple of 4 KB apart: their tile of columns goes through a panel; others are read in place."""
    for layout, copied in (("one set", True), ("padded rows", False)):
        (kernel,) = kernels(100, 64, 300, dt.f32, layout)
        assert any(s.name == "panel" for s in kernel.scratch) == copied
