"""What is printed reads back: the same node, an equal Program."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, op
from torchsmith.ir.ops import OPS
from torchsmith.ir.parse import ParseError, parse_expr, parse_program
from torchsmith.ir.print import print_expr, print_program
from torchsmith.ir.program import (
    Bind,
    BufArg,
    Buffer,
    Check,
    Cond,
    Enum,
    Extern,
    Fresh,
    InputResult,
    Layout,
    Program,
    Repeat,
    SizeResult,
    Stage,
    Store,
    Symbol,
    ViewResult,
)

R, J, K = Axis("i"), Axis("j"), Axis("k")
S = Sym("s0")


@st.composite
def expressions(draw: st.DrawFn, d: dt.DType = dt.f32, depth: int = 4) -> Expr:
    """Well-typed expressions, built raw so that no rule tidies them first."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        if d is dt.index:
            return draw(st.sampled_from((R, J, S, const(3), const(-2))))
        if d is dt.bool_:
            return draw(st.sampled_from((Const(d, True), Load("m", d, (R,)), Sym("flag", d))))
        literal = st.floats(width=32) if d.is_float else st.integers(-100, 100)
        leaves = (Var("a0", d), Load("x", d, (R, J)), Sym("k", d))
        return draw(st.one_of(st.builds(lambda v: Const(d, v), literal), st.sampled_from(leaves)))
    kind = draw(st.integers(0, 6))
    if kind == 0:
        return Cast(d, draw(expressions(draw(st.sampled_from((dt.f32, dt.i64, dt.bf16, dt.bool_, dt.index))), depth - 1)))
    if kind == 1 and d is not dt.index:
        index = (draw(expressions(dt.index, depth - 1)),)
        if draw(st.booleans()):
            return Load("y", d, index, draw(expressions(dt.bool_, depth - 1)), draw(expressions(d, depth - 1)))
        return Load("y", d, index)
    if kind == 2 and d.is_float:
        body = Op("add", d, (Var("p_a0", d), draw(expressions(d, depth - 1))))
        both = Op("add", d, (Var("p_a0", d), Var("p_b0", d)))
        return Fold(((K, S), (J, const(3))), (Const(d, 0),), (body,), (both,), "any", 0, "p_")
    gives = {"T": lambda r: r.over, "b": lambda r: {"bool"}}
    names = [n for n, r in OPS.items() if r.signature[-1] in gives and d.kind in gives[r.signature[-1]](r)]
    row = OPS[draw(st.sampled_from(sorted(names)))]
    if row.signature[-1] == "b":
        inner = draw(st.sampled_from([t for t in (dt.f32, dt.i64, dt.index, dt.bool_) if t.kind in row.over]))
        if d is not dt.bool_:
            return Const(d, 1)
    else:
        inner = d
    args = tuple(
        Const(dt.i32, 2) if c in "in" else draw(expressions(dt.bool_ if c == "b" else inner, depth - 1)) for c in row.signature[: row.arity]
    )
    return Op(row.name, d, args)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from((dt.f32, dt.bf16, dt.i64, dt.bool_, dt.index)).flatmap(expressions))
def test_expressions_read_back(e: Expr) -> None:
    text = print_expr(e)
    assert parse_expr(text) is e, text


def test_long_shared_parts_are_printed_once() -> None:
    e: Expr = Load("x", dt.f32, (R, J))
    for _ in range(60):
        e = op("add", op("mul", e, e), op("sin", e))
    text = print_expr(e)
    assert len(text) < 10000
    assert parse_expr(text) is e


def test_a_program_reads_back() -> None:
    x = Load("x", dt.f32, (R, J))
    a0 = Var("a0", dt.f32)
    after = op("add", a0, x)
    rows = Layout((S * 4, const(4), const(1)), const(0), ((1, 16),), ((0, 0), (1, 2)), -1.5)
    buffers = {
        b.name: b
        for b in (
            Buffer("x", dt.f32, (S, const(4)), Layout((const(4), const(1)), const(0)), "input", loc="a b.py:1"),
            Buffer("t", dt.bf16, (S, const(4)), None, "temp"),
            Buffer("y", dt.i64, (), rows, "output", "t"),
        )
    }
    args = (BufArg("x"), None, (1, S + 2, (2.5, True)), dt.bf16, "zeros", -3, -1e-05)
    body = (
        Stage(((R, S), (J, const(4))), (Store("t", (R, J), op("sin", x), "add", False, op("lt", R, S)),), loc="m.py:3", origin="aten.sin"),
        Stage(((R, S),), (Store("t", (R, J), a0),), ((Var("v", dt.f32), x),), True, ((a0, Const(dt.f32, 0)),), (after,)),
        Check(op("not", Load("bad", dt.bool_, ())), "IndexError", 'a "quoted"\nmessage', "m.py:4"),
        Extern("aten.conv.default", args, (("device", Enum("device", "cpu")),), ("y", ""), ("y",), ((Sym("u0"), 0, 1),), "planned", "shim"),
        Bind(Sym("u1"), S * 2),
        Cond(Load("p", dt.bool_, ()), (Bind(Sym("u2"), const(1)),), ()),
        Repeat(Sym("n"), S, (Check(Const(dt.bool_, True), "k", "m"),)),
    )  # fmt: skip
    view = ViewResult("y", (S,), (const(1),), const(2), dt.f32)
    results = (Fresh("y"), InputResult(0), view, ViewResult(0, (), (), const(0), dt.i64), SizeResult(S))
    symbols = (Symbol(S, ("size", 0, 0), 2, 9), Symbol(Sym("u0"), ("bound",)), Symbol(Sym("f", dt.f64), ("scalar", 1), -4))
    p = Program("p", symbols, ("x", ""), buffers, body, results, (("x", "t"),), ("w",), ("LOW001",))
    assert parse_program(print_program(p)) == p


@pytest.mark.parametrize("text", ["sin(", "nonsense(x:f32[i])", "(i + )", "3:f99", "x:f32[i] x"])
def test_wrong_text_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_expr(text)
