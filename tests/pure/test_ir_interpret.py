"""The interpreter against NumPy: operators, conversions, folds, scans, scattered stores, kernels, extern calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from torchsmith.ir import dtype as dt
from torchsmith.ir.arrays import CARRIERS, NUMPY, apply, convert, round_bf16
from torchsmith.ir.expr import Axis, Cast, Const, Expr, Fold, Load, Sym, Var, const, op, select
from torchsmith.ir.interpret import CheckFailed, InterpretError, run_program, run_scheduled
from torchsmith.ir.kernel import Kernel, Let, Loop, Param, Scheduled, StoreStmt
from torchsmith.ir.ops import OPS, wrap
from torchsmith.ir.program import BufArg, Buffer, Check, Extern, Fresh, Layout, Program, Stage, Store, Symbol, ViewResult
from torchsmith.ir.rules import round_to
from torchsmith.ir.verify import verify_program, verify_scheduled

R, J, K = Axis("i"), Axis("j"), Axis("k")
S = Sym("s0")
FLOATS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.7, -7.25, 11.0, 0.001, math.inf, -math.inf, math.nan]
INTS = [0, 1, -1, 2, 3, -5, 7, 100, -128, 127]


def operands(row: Any, d: dt.DType) -> list[tuple[Any, ...]]:
    pool = FLOATS if d.is_float else [False, True] if d is dt.bool_ else [v for v in INTS if d.kind != "uint" or v >= 0]
    sets = {"T": pool, "b": [False, True], "n": [2, 3], "i": [-3, 0, 4], "w": [3, -5, 1 << 40]}
    found: list[tuple[Any, ...]] = [()]
    for letter in row.signature[: row.arity]:
        found = [(*f, v) for f in found for v in sets[letter]]
    return found


@pytest.mark.parametrize("name", sorted(set(OPS) - {"bitcast"}))
def test_numpy_meaning_is_the_scalar_meaning(name: str) -> None:
    row = OPS[name]
    for d in (dt.f64, dt.f32, dt.i64, dt.i32, dt.i8, dt.u8, dt.bool_, dt.index):
        if d.kind not in row.over:
            continue
        dtypes = tuple({"b": dt.bool_, "n": dt.i64, "i": dt.i32, "w": dt.i64}.get(c, d) for c in row.signature[: row.arity])
        result = dt.bool_ if row.signature[-1] == "b" else {"e": dt.i32, "w": dt.i64}.get(row.signature[-1], d)
        for values in operands(row, d):
            if not d.is_float and name in ("floordiv", "mod", "truncdiv", "fmod") and values[1] == 0:
                continue
            if name == "nextafter" and d is dt.f32:  # a step of float32, not of float64
                continue
            if name == "pow" and values == (-math.inf, 0.5):  # NumPy takes the square root
                continue
            if name == "frexp_e" and not math.isfinite(values[0]):
                continue
            if name in ("shl", "shr") and not 0 <= values[1] < 8 * d.itemsize:
                continue
            arrays = tuple(np.asarray(v, CARRIERS[t]) for v, t in zip(values, dtypes, strict=True))
            got = apply(name, result, arrays, dtypes)
            expected = row.scalar(*(a.item() for a in arrays))
            assert got.dtype == CARRIERS[result]
            if result.is_float:
                expected = round_to(result, float(expected))
                np.testing.assert_allclose(got, expected, rtol=3e-7 if d is dt.f32 else 1e-14, err_msg=f"{name}{values}")
            elif result is dt.bool_:
                assert bool(got) == bool(expected), (name, values)
            else:
                assert int(got) == wrap(result, int(expected)), (name, d, values)


def test_every_numpy_meaning_belongs_to_an_operator() -> None:
    assert set(NUMPY) <= set(OPS)


SPECIAL = {
    "erfinv": [(0.5, 0.4769362762044699), (-0.999, -2.3267537655135246), (1e-3, 8.862271574665521e-4)],
    "digamma": [(1.0, -0.5772156649015329), (0.3, -3.5025242222001332), (-0.5, 0.03648997397857652), (20.0, 2.9705239922421498)],
    "i0": [(1.0, 1.2660658777520084), (10.0, 2815.716628466254), (40.0, 1.4894774793419916e16)],
    "i1": [(1.0, 0.565159103992485), (-10.0, -2670.988303701255)],
    "i0e": [(5.0, 0.1835408126093283)],
    "ndtri": [(0.975, 1.959963984540054), (1e-6, -4.753424308822899), (0.5, 0.0)],
    "log_ndtr": [(0.0, math.log(0.5)), (-30.0, -454.3212439955972), (3.0, -0.00135080996474819)],
    "zeta": [],
    "polygamma": [],
}


@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_special_functions(name: str) -> None:
    for x, expected in SPECIAL[name]:
        assert OPS[name].scalar(x) == pytest.approx(expected, rel=1e-10, abs=1e-14)
    assert OPS["zeta"].scalar(2.0, 1.0) == pytest.approx(math.pi**2 / 6, rel=1e-12)
    assert OPS["polygamma"].scalar(1, 1.0) == pytest.approx(math.pi**2 / 6, rel=1e-12)
    assert OPS["polygamma"].scalar(2, 0.7) == pytest.approx(-6.4098, rel=1e-2)


def test_conversions() -> None:
    x = np.array([1.9, -1.9, 3e9, -3e9, 1e20, math.nan, math.inf, 300.0], np.float32)
    assert convert(x, dt.f32, dt.i32).tolist() == [1, -1, *[-(2**31)] * 5, 300]
    assert convert(x, dt.f32, dt.i64).tolist() == [1, -1, 3000000000, -3000000000, *[-(2**63)] * 3, 300]
    assert convert(x[[0, 7]], dt.f32, dt.u8).tolist() == [1, 44]
    assert round_bf16(np.array([1.00390625, 1.01171875, 3.4e38], np.float32)).tolist() == [1.0, 1.015625, math.inf]
    assert convert(np.array([0.1]), dt.f64, dt.bool_).tolist() == [True]


def buffer(name: str, d: dt.DType, shape: tuple[Expr | int, ...], role: Any = "temp", **kw: Any) -> Buffer:
    sizes = tuple(const(n) if isinstance(n, int) else n for n in shape)
    return Buffer(name, d, sizes, kw.pop("layout", None), role, **kw)


def program(body: tuple[Any, ...], buffers: list[Buffer], results: tuple[Any, ...], symbols: tuple[Symbol, ...] = ()) -> Program:
    inputs = tuple(b.name for b in buffers if b.role == "input")
    p = Program("p", symbols, inputs, {b.name: b for b in buffers}, body, results)
    verify_program(p)
    return p


SIZED = (Symbol(S, ("size", 0, 0), 0, 100),)


def state(n: int, d: dt.DType = dt.f32) -> tuple[Var, Var]:
    return Var(f"a{n}", d), Var(f"b{n}", d)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_softmax_and_argmax(n: int) -> None:
    x = np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)
    a, b = state(0)
    at = Load("x", dt.f32, (R, K))
    top = Fold(((K, const(5)),), (Const(dt.f32, -math.inf),), (op("max", a, at),), (op("max", a, b),))
    shifted = op("exp", op("sub", at, Load("m", dt.f32, (R,))))
    total = Fold(((K, const(5)),), (Const(dt.f32, 0),), (op("add", a, shifted),), (op("add", a, b),))
    i0, i1 = state(1, dt.i64)
    better = op("gt", at, a)
    which = Fold(
        ((K, const(5)),), (Const(dt.f32, -math.inf), Const(dt.i64, 0)),
        (select(better, at, a), select(better, Cast(dt.i64, K), i0)),
        (select(op("gt", b, a), b, a), select(op("gt", b, a), i1, i0)), pick=1,
    )  # fmt: skip
    y = op("div", op("exp", op("sub", Load("x", dt.f32, (R, J)), Load("m", dt.f32, (R,)))), Load("s", dt.f32, (R,)))
    body = (
        Stage(((R, S),), (Store("m", (R,), top),)),
        Stage(((R, S),), (Store("s", (R,), total), Store("w", (R,), which))),
        Stage(((R, S), (J, const(5))), (Store("y", (R, J), y),)),
    )
    own = [buffer("x", dt.f32, (S, 5), "input"), buffer("m", dt.f32, (S,)), buffer("s", dt.f32, (S,))]
    p = program(body, [*own, buffer("y", dt.f32, (S, 5), "output"), buffer("w", dt.i64, (S,), "output")], (Fresh("y"), Fresh("w")), SIZED)
    got, where = run_program(p, [x])
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(got, e / e.sum(1, keepdims=True), rtol=1e-6)
    assert where.tolist() == x.argmax(1).tolist()


def test_scan_is_in_order_and_sequential_fold_too() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    a = Var("c", dt.f32)
    after = op("add", op("mul", a, Const(dt.f32, 2)), Load("x", dt.f32, (R, J)))
    zero = Const(dt.f32, 0)
    scan = Stage(((R, const(3)), (J, const(4))), (Store("y", (R, J), after),), scan=True, carry=((a, zero),), carry_next=(after,))
    v = Var("a0", dt.f32)
    step = op("add", op("mul", v, Const(dt.f32, 2)), Load("x", dt.f32, (R, K)))
    last = Fold(((K, const(4)),), (zero,), (step,), (), "sequential")
    fold = Stage(((R, const(3)),), (Store("z", (R,), last),))
    own = [buffer("x", dt.f32, (3, 4), "input"), buffer("y", dt.f32, (3, 4), "output"), buffer("z", dt.f32, (3,), "output")]
    y, z = run_program(program((scan, fold), own, (Fresh("y"), Fresh("z"))), [x])
    expected = np.zeros((3, 4), np.float32)
    run = np.zeros(3, np.float32)
    for t in range(4):
        run = run * 2 + x[:, t]
        expected[:, t] = run
    assert (y == expected).all()
    assert (z == expected[:, -1]).all()


def test_scattered_stores_with_duplicates() -> None:
    where, x = np.array([1, 3, 1, 1]), np.array([1, 2, 4, 8], np.float32)
    at = (Cast(dt.index, Load("n", dt.i64, (J,))),)
    value = Load("x", dt.f32, (J,))
    zero = Stage(((R, const(5)),), (Store("add", (R,), Const(dt.f32, 0)), Store("set", (R,), Const(dt.f32, 0))))
    keep = op("ne", Load("x", dt.f32, (J,)), Const(dt.f32, 4))
    more = Stage(((J, const(4)),), (Store("add", at, value, "add", False), Store("set", at, value, "set", False, keep)))
    own = [buffer("n", dt.i64, (4,), "input"), buffer("x", dt.f32, (4,), "input"), buffer("add", dt.f32, (5,), "output")]
    p = program((zero, more), [*own, buffer("set", dt.f32, (5,), "output")], (Fresh("add"), Fresh("set")))
    added, put = run_program(p, [where, x])
    assert added.tolist() == [0, 13, 0, 2, 0]
    assert put.tolist() == [0, 8, 0, 2, 0]
    with pytest.raises(InterpretError, match="leaves"):
        run_program(p, [where + 3, x])


def test_masked_load_checks_views_and_externs() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    inside = op("lt", J, const(3))
    padded = Load("x", dt.f32, (R, J), inside, Const(dt.f32, -1))
    body = (
        Stage(((R, const(2)), (J, const(4))), (Store("y", (R, J), padded),)),
        Stage((), (Store("bad", (), op("lt", Load("y", dt.f32, (const(0), const(0))), Const(dt.f32, 0))),)),
        Check(op("not", Load("bad", dt.bool_, ())), "IndexError", "negative"),
        Extern("aten.neg.default", (BufArg("v"),), (), ("z",)),
    )
    rows = Layout((const(4), const(1)), const(0))
    turned = Layout((const(1), const(4)), const(1))
    own = [
        buffer("x", dt.f32, (2, 3), "input"), buffer("y", dt.f32, (2, 4), layout=rows), buffer("bad", dt.bool_, ()),
        buffer("v", dt.f32, (3, 2), layout=turned, storage_of="y"), buffer("z", dt.f32, (3, 2), "output"),
    ]  # fmt: skip
    view = ViewResult("y", (const(2),), (const(4),), const(3), dt.f32)
    p = program(body, own, (Fresh("z"), view))
    z, tail = run_program(p, [x], lambda call, args, kwargs: [-args[0].data])
    assert z.tolist() == [[-1, -4], [-2, -5], [1, 1]]
    assert tail.tolist() == [-1, -1]
    with pytest.raises(CheckFailed, match="negative"):
        run_program(p, [x - 1])


def test_kernels_do_what_stages_do() -> None:
    x = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    rows, flat = Layout((const(8), const(1)), const(0)), Layout((const(1),), const(0))
    wide = (S, const(8))
    params = (Param("x", dt.f32, wide, rows, False), Param("y", dt.f32, wide, rows, True), Param("z", dt.f32, (S,), flat, True))
    a, b = state(0)
    total = Fold(((K, const(8)),), (Const(dt.f32, 0),), (op("add", a, Load("x", dt.f32, (R, K))),), (op("add", a, b),))
    mean, c = Var("mean", dt.f32), Var("c", dt.f32)
    after = op("add", c, Load("y", dt.f32, (R, K)))
    body = (
        Let(mean, op("div", total, Const(dt.f32, 8))),
        Loop(J, const(8), "vector", (StoreStmt("y", (R, J), op("sub", Load("x", dt.f32, (R, J)), mean)),)),
        StoreStmt("z", (R,), Const(dt.f32, 0)),
        Loop(K, const(8), "scan", (StoreStmt("z", (R,), after),), ((c, Const(dt.f32, 1), op("mul", c, c)),)),
    )
    k = Kernel("k", params, (S,), ((R, S),), const(1), (), body)
    own = [buffer("x", dt.f32, (S, 8), "input"), buffer("y", dt.f32, (S, 8), "output"), buffer("z", dt.f32, (S,), "output")]
    p = Program("p", SIZED, ("x",), {b.name: b for b in own}, (), (Fresh("y"), Fresh("z")))
    scheduled = Scheduled(p, (k,))
    verify_scheduled(scheduled)
    y, z = run_scheduled(scheduled, [x])
    np.testing.assert_allclose(y, x - x.mean(1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(z, 1 + y[:, -1], rtol=1e-6)
