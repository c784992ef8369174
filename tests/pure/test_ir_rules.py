"""Rules and bounds against plain arithmetic: what is built means the same as what was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchsmith.ir import dtype as dt
from torchsmith.ir.bounds import Ranges, simplify_index
from torchsmith.ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var, const, convert, op, select, substitute, walk
from torchsmith.ir.linear import conjuncts, is_invariant, linear
from torchsmith.ir.ops import OPS, wrap
from torchsmith.ir.rules import drop_precision_casts

AXES = tuple(Axis(n) for n in "ijk")
SYMS = (Sym("s0"), Sym("s1"))
BINARY = ("add", "sub", "mul", "floordiv", "mod", "min", "max")


@st.composite
def trees(draw: st.DrawFn, depth: int = 4) -> tuple:
    """Nested tuples (name, a, b), leaves are ints and Exprs: a recipe that both sides can follow."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.one_of(st.integers(-9, 12), st.sampled_from(AXES + SYMS)))
    name = draw(st.sampled_from(BINARY))
    a = draw(trees(depth=depth - 1))
    if name in ("floordiv", "mod"):
        b = draw(st.one_of(st.integers(1, 12), st.sampled_from(SYMS)))
    else:
        b = draw(trees(depth=depth - 1))
    return (name, a, b)


def build(tree: object) -> Expr:
    if isinstance(tree, Expr):
        return tree
    if isinstance(tree, int):
        return const(tree)
    name, a, b = tree  # type: ignore[misc]
    return op(name, build(a), build(b))


def value(tree: object, env: dict[Expr, int]) -> int:
    if isinstance(tree, Expr):
        return env[tree]
    if isinstance(tree, int):
        return tree
    name, a, b = tree  # type: ignore[misc]
    return OPS[name].scalar(value(a, env), value(b, env))


def evaluate(e: Expr, env: dict[Expr, int]) -> int:
    memo: dict[Expr, int] = {}
    for node in walk(e):
        if isinstance(node, Const):
            memo[node] = node.value  # type: ignore[assignment]
        elif isinstance(node, Op):
            memo[node] = OPS[node.name].scalar(*(memo[a] for a in node.args))
        else:
            memo[node] = env[node]
    return memo[e]


ENV = st.tuples(*([st.integers(0, 11)] * 3), *([st.integers(1, 9)] * 2))


@settings(max_examples=600, deadline=None)
@given(trees(), ENV)
def test_index_rules_keep_the_value(tree: object, numbers: tuple[int, ...]) -> None:
    env = dict(zip(AXES + SYMS, numbers, strict=True))
    assert evaluate(build(tree), env) == value(tree, env)


@settings(max_examples=600, deadline=None)
@given(trees(), ENV)
def test_ranges_keep_the_value_and_hold_it(tree: object, numbers: tuple[int, ...]) -> None:
    i, j, k = AXES
    s0, s1 = SYMS
    ranges = Ranges({s0: (1, 9), s1: (1, None)}, {i: const(12), j: s0, k: s1})
    numbers = (numbers[0], numbers[1] % numbers[3], numbers[2] % numbers[4], *numbers[3:])
    env = dict(zip(AXES + SYMS, numbers, strict=True))
    e = build(tree)
    expected = value(tree, env)
    simple = simplify_index(e, ranges)
    assert evaluate(simple, env) == expected
    for x in (e, simple):
        where = ranges.interval(x)
        assert where.lo is None or where.lo <= expected
        assert where.hi is None or expected <= where.hi
        d = ranges.divisor(x)
        assert expected % d == 0 if d else expected == 0


@settings(max_examples=300, deadline=None)
@given(trees(), ENV)
def test_linear_forms_keep_the_value(tree: object, numbers: tuple[int, ...]) -> None:
    env = dict(zip(AXES + SYMS, numbers, strict=True))
    form = linear(build(tree))
    assert evaluate(form.expr(), env) == value(tree, env)
    assert all(is_invariant(c) and c is not const(0) for c in form.terms.values()) and is_invariant(form.const)


@settings(max_examples=300, deadline=None)
@given(trees(), trees(), ENV)
def test_proofs_are_true(a: object, b: object, numbers: tuple[int, ...]) -> None:
    i, j, k = AXES
    s0, s1 = SYMS
    ranges = Ranges({s0: (1, None), s1: (1, None)}, {i: const(12), j: s0, k: s1})
    numbers = (numbers[0], numbers[1] % numbers[3], numbers[2] % numbers[4], *numbers[3:])
    env = dict(zip(AXES + SYMS, numbers, strict=True))
    if ranges.is_lt(build(a), build(b)):
        assert value(a, env) < value(b, env)


def test_views_cancel() -> None:
    i, j, k = AXES
    s0, s1 = SYMS
    flat = i * 12 + j * 4 + k
    r = Ranges({}, {i: const(5), j: const(3), k: const(4)})
    assert simplify_index(flat // 12, r) is i
    assert simplify_index(flat // 4 % 3, r) is j
    assert simplify_index(flat % 4, r) is k
    assert (i // 4) * 4 + i % 4 is i
    assert (i // 8) * 8 + (i // 2 % 4) * 2 + i % 2 is i
    symbolic = (i * s0 + j) * s1 + k
    r = Ranges({s0: (1, None), s1: (1, None)}, {i: const(5), j: s0, k: s1})
    assert simplify_index(symbolic // s1 // s0, r) is i
    assert simplify_index(symbolic // s1 % s0, r) is j
    assert simplify_index(symbolic % s1, r) is k
    assert r.is_lt(symbolic, s0 * s1 * 5)
    assert not r.is_lt(symbolic, s0 * s1 * 5 - 1)
    assert (i + j) * s0 is s0 * j + i * s0
    deep = ((i * 4 + j) * s0 + k) * s1  # reshaped twice: (f*x + r) // (f*d) -> x // d
    assert simplify_index(deep // (s0 * s1), Ranges({s0: (0, None), s1: (0, None)}, {k: s0, j: const(4)})) is i * 4 + j
    merged = (i // (s0 * s1)) * s0 * s1 + (i // s1 % s0) * s1 + i % s1
    assert linear(merged).terms == {i: const(1)}
    assert merged is not i  # s1 might be negative; what an address divides by is not
    assert (k * 1104 + i) // 12696 * 12696 + ((k * 2 + i // 552) % 23) * 552 + i % 552 is k * 1104 + i


def test_symbols_and_floats_of_them_have_bounds() -> None:
    s0 = SYMS[0]
    half = op("floor", op("mul", Cast(dt.f32, s0), Const(dt.f32, 0.5)))
    assert Ranges({s0: (1, 9)}).interval(Cast(dt.index, half)) == (0, 4)
    assert Ranges({s0: (1, None)}).interval(Cast(dt.index, half)) == (0, None)
    assert Ranges({s0: (2**24 + 1, 2**24 + 1)}).interval(Cast(dt.index, Cast(dt.f32, s0))) == (2**24, 2**24)  # rounded as f32 is
    assert Ranges({s0: (-5, 9)}, sizes=True).interval(s0) == (-5, 9)
    assert Ranges({}, sizes=True).interval(s0) == (0, None)
    assert Ranges().interval(Cast(dt.index, Load("x", dt.f32, (const(0),)))) == (None, None)


INTS = (dt.i64, dt.i32, dt.i16, dt.i8, dt.u8)


@pytest.mark.parametrize("d", INTS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whole_numbers_fold_as_they_wrap(d: dt.DType, data: st.DataObject) -> None:
    bits = 8 * d.itemsize
    lo, hi = (0, 2**bits - 1) if d.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    name = data.draw(st.sampled_from([n for n, r in OPS.items() if "int" in r.over and r.signature == "TT>T" and n != "pow"]))
    a, b = data.draw(st.integers(lo, hi)), data.draw(st.integers(lo, hi).filter(lambda v: v != 0))
    assert op(name, Const(d, a), Const(d, b)) is Const(d, wrap(d, OPS[name].scalar(a, b)))


def test_floats_keep_their_laws() -> None:
    x = Load("x", dt.f32, (AXES[0],))
    zero, one = Const(dt.f32, 0.0), Const(dt.f32, 1.0)
    assert op("mul", x, zero) is not zero
    assert op("add", x, zero) is not x
    assert op("sub", x, x) is not zero
    assert op("mul", x, one) is x
    assert op("sub", x, zero) is x
    assert isinstance(op("sub", x, Const(dt.f32, -0.0)), Op)
    assert isinstance(op("not", op("lt", x, zero)).args[0], Op)
    assert op("not", op("lt", AXES[0], SYMS[0])).name == "ge"  # type: ignore[attr-defined]


def test_conversions() -> None:
    x = Load("x", dt.bf16, ())
    y = Load("y", dt.f32, ())
    assert convert(convert(x, dt.f32), dt.bf16) is x
    assert convert(convert(convert(x, dt.f32), dt.f64), dt.f32) is convert(x, dt.f32)
    narrowed = convert(convert(y, dt.bf16), dt.f32)
    assert isinstance(narrowed, Cast)
    assert drop_precision_casts(op("sin", narrowed)) is op("sin", y)
    assert convert(Const(dt.f64, 0.1), dt.f32).value == 0.10000000149011612  # type: ignore[attr-defined]
    assert convert(Const(dt.f32, 1.00390625), dt.bf16).value == 1.0  # type: ignore[attr-defined]
    assert convert(Const(dt.i64, 300), dt.u8) is Const(dt.u8, 44)
    assert convert(Const(dt.f16, 0.1), dt.f32) is Const(dt.f32, 0.0999755859375)  # what the narrow dtype has for it
    assert convert(Const(dt.bf16, 0.1), dt.f64) is Const(dt.f64, 0.10009765625)
    assert convert(Const(dt.f32, 0.1), dt.f64) is Const(dt.f64, 0.10000000149011612)


def test_select() -> None:
    c, x, y = Load("c", dt.bool_, ()), Load("x", dt.f32, ()), Load("y", dt.f32, ())
    assert select(Const(dt.bool_, True), x, y) is x
    assert select(op("not", c), x, y) is select(c, y, x)
    assert op("and", c, Const(dt.bool_, False)) is Const(dt.bool_, False)
    assert op("lt", AXES[0], const(0)) is Const(dt.bool_, False)


def test_a_mask_that_holds_for_certain_is_none() -> None:
    i = Axis("i")
    test = op("lt", i, const(1))
    load = Load("a", dt.f32, (i,), op("and", test, test), Const(dt.f32, 0.0))
    assert substitute(load, {i: const(0)}) == Load("a", dt.f32, (const(0),))
    assert conjuncts(Const(dt.bool_, True)) == [] and conjuncts(test) == [test]


def test_what_a_fold_binds_is_its_own() -> None:
    """`sum_r x[i, r]` at a row i that the same sum of another row tells: the outer sum's axis and state are renamed alone."""
    r, i = Axis("r1_0"), Axis("i")

    def row_sum(row: Expr) -> Fold:
        old, new = Var("f1_a0", dt.f32), Var("f1_b0", dt.f32)
        return Fold(((r, const(4)),), (Const(dt.f32, 0.0),), (op("add", old, Load("x", dt.f32, (row, r))),), (op("add", old, new),), prefix="f1_")

    inner = row_sum(i)
    outer = row_sum(Cast(dt.index, inner))
    (update,) = outer.update
    state, axis = Var("f2_a0", dt.f32), Axis("r2_0")
    renamed = substitute(update, {outer.state(0): state, r: axis})
    assert renamed is op("add", state, Load("x", dt.f32, (Cast(dt.index, inner), axis)))
    assert substitute(outer, {i: const(2)}) is row_sum(Cast(dt.index, row_sum(const(2))))
