"""The operator table: every row answers on samples, with the dtype its signature promises."""

import pytest

from torchsmith.emit.c import emit_kernel
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Const, Fold, Load, Sym, const, op
from torchsmith.ir.kernel import Kernel, Loop, Param, StoreStmt
from torchsmith.ir.ops import OPS, define
from torchsmith.ir.print import print_expr
from torchsmith.ir.program import Layout


def test_a_row_is_defined_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        define("add", "TT>T", frozenset({"int"}), "arith", "again")(lambda a, b: a)


@pytest.mark.parametrize("name", sorted(set(OPS) - {"bitcast"}))
def test_scalar_definition_answers(name: str) -> None:
    row = OPS[name]
    samples = {"T": 0.5 if "float" in row.over else 1, "b": True, "n": 2, "i": 3, "w": 4}
    row.scalar(*[samples[c] for c in row.signature.split(">")[0]])


LOOP = Axis("i")
ROWS = Layout((const(1),), const(0))
KINDS = {"float": (dt.f32, dt.f64), "int": (dt.i64, dt.i32, dt.i16, dt.i8), "uint": (dt.u8,), "bool": (dt.bool_,)}


@pytest.mark.parametrize("name", sorted(n for n, r in OPS.items() if r.native and n != "bitcast"))
def test_what_is_native_is_printed(name: str) -> None:
    row = OPS[name]
    for d in [d for kind in sorted(row.over) for d in KINDS.get(kind, ())]:
        letters = {"T": Load("x", d, (LOOP,)), "b": Load("m", dt.bool_, (LOOP,)), "n": Const(dt.i64, 3), "i": Load("n", dt.i32, (LOOP,)),
                   "w": Load("w", dt.i64, (LOOP,))}  # fmt: skip
        value = op(name, *(letters[c] for c in row.signature[: row.arity]))
        own = {"x": d, "m": dt.bool_, "n": dt.i32, "w": dt.i64}
        params = (*(Param(n, t, (const(100),), ROWS, False) for n, t in own.items()), Param("y", value.dtype, (const(100),), ROWS, True))
        body = Loop(LOOP, const(100), "vector", (StoreStmt("y", (LOOP,), value),))
        assert "TS_KERNEL" in emit_kernel(Kernel("k", params, (), (), const(1), (), (body,)))


def test_expressions_print() -> None:
    i, k, s = Axis("i"), Axis("k"), Sym("s0")
    x = Load("x", dt.f32, (i, k))
    total = Fold(((k, s),), (Const(dt.f32, 0),), (op("add", Load("x", dt.f32, (i, k)), op("sin", x)),))
    assert print_expr(total) == "fold.any{k < $s0}(0.0:f32; add(x:f32[i, k], sin(x:f32[i, k])); ).0"
    assert repr((i * 4 + k) // 3 % s) == "((((i * 4) + k) // 3) % $s0)"
    assert repr(i * 0 + 3) == "3"
