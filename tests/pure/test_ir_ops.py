"""The operator table: every row answers on samples, with the dtype its signature promises."""

import pytest

from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Const, Fold, Load, Sym, op
from torchsmith.ir.ops import OPS, define
from torchsmith.ir.print import print_expr


def test_a_row_is_defined_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        define("add", "TT>T", frozenset({"int"}), "arith", "again")(lambda a, b: a)


@pytest.mark.parametrize("name", sorted(set(OPS) - {"bitcast"}))
def test_scalar_definition_answers(name: str) -> None:
    row = OPS[name]
    samples = {"T": 0.5 if "float" in row.over else 1, "b": True, "n": 2, "i": 3}
    row.scalar(*[samples[c] for c in row.signature.split(">")[0]])


def test_expressions_print() -> None:
    i, k, s = Axis("i"), Axis("k"), Sym("s0")
    x = Load("x", dt.f32, (i, k))
    total = Fold(((k, s),), (Const(dt.f32, 0),), (op("add", Load("x", dt.f32, (i, k)), op("sin", x)),))
    assert print_expr(total) == "fold.any{k < $s0}(0.0:f32; add(x:f32[i, k], sin(x:f32[i, k])); ).0"
    assert repr((i * 4 + k) // 3 % s) == "((((i * 4) + k) // 3) % $s0)"
    assert repr(i * 0 + 3) == "3"
