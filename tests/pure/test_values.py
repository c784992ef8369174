"""The values of the road: hash-consing and rebuilding of expressions."""

from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Const, Load, Op, const, op, substitute


def test_equal_structure_is_one_object() -> None:
    i = Axis("i")
    assert Load("x", dt.f32, (i,)) is Load("x", dt.f32, (Axis("i"),))
    assert Const(dt.f32, 0.0) is not Const(dt.f32, -0.0)


def test_substitute_rebuilds_only_what_contains_the_leaf() -> None:
    i, j = Axis("i"), Axis("j")
    e = Op("sin", dt.f32, (Load("x", dt.f32, (i,)),))
    assert substitute(e, {j: i}) is e
    assert substitute(e, {i: j}) is op("sin", Load("x", dt.f32, (j,)))
    assert const(3) is const(3)
