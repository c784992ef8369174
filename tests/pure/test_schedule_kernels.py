"""Fusion and grouping: the number of kernels, and answers equal to the interpreter's, whatever the heuristics choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from emit_harness import run
from program_kit import F32, Kit, f, random

from torchsmith.ir import dtype as dt
from torchsmith.ir.bounds import Ranges, simplify_index
from torchsmith.ir.expr import Axis, Cast, Const, Expr, Load, Sym, Var, const, op, substitute
from torchsmith.ir.interpret import run_program
from torchsmith.ir.kernel import Kernel, Scheduled
from torchsmith.ir.linear import const_of
from torchsmith.ir.program import BufArg, Buffer, Extern, Layout, Program, Stage, Store, Symbol, dense
from torchsmith.ir.target import CPU, cuda
from torchsmith.ir.verify import VerifyError, verify_program, verify_scheduled
from torchsmith.options import Options
from torchsmith.schedule.access import collect, flat
from torchsmith.schedule.blocks import form_blocks
from torchsmith.schedule.deps import grain, repeated
from torchsmith.schedule.fusion.fuse import can_fuse, fuse
from torchsmith.schedule.fusion.group import Grouper
from torchsmith.schedule.kernels import form_kernels
from torchsmith.schedule.memory.layouts import choose_layouts, rows_apart

Case = tuple[Program, dict[str, np.ndarray], int]
CASES: dict[str, Callable[[], Case]] = {}


def case(fn: Callable[[], Case]) -> Callable[[], Case]:
    CASES[fn.__name__] = fn
    return fn


@case
def chain() -> Case:
    k = Kit()
    x = k.input("x", (1003,))
    a = k.stage("a", (1003,), lambda i: op("cos", x(i)))
    b = k.stage("b", (1003,), lambda i: op("mul", a(i), f(2)))
    k.stage("y", (1003,), lambda i: op("add", op("sin", a(i)), b(i)), out=True)
    return k.program("y"), {"x": random((1003,))}, 1


@case
def broadcast() -> Case:
    k = Kit()
    x, s = k.input("x", (3, 5, 37)), k.input("s", (5,))
    k.stage("y", (3, 5, 37), lambda i, j, m: op("mul", x(i, j, m), s(j)), out=True)
    return k.program("y"), {"x": random((3, 5, 37)), "s": random((5,), 1)}, 1


def _softmax(rows: int | str, n: int | str, rn: tuple[int, int], axis: int = 1) -> Case:
    k = Kit()
    shape = (rows, n)
    x = k.input("x", shape)
    at = (x) if axis == 1 else (lambda i, r: x(r, i))
    kept, run_over = (rows, n) if axis == 1 else (n, rows)
    m = k.stage("m", (kept,), lambda i: k.fold((run_over,), -np.inf, lambda r: at(i, r), "max"))
    s = k.stage("s", (kept,), lambda i: k.fold((run_over,), 0, lambda r: op("exp", op("sub", at(i, r), m(i)))))
    pick = (lambda i, j: i) if axis == 1 else (lambda i, j: j)
    k.stage("y", shape, lambda i, j: op("div", op("exp", op("sub", x(i, j), m(pick(i, j)))), s(pick(i, j))), out=True)
    return k.program("y"), {"x": random(rn)}, 1


@case
def softmax() -> Case:
    return _softmax(19, 133, (19, 133))


@case
def softmax_short() -> Case:
    return _softmax(7, 5, (7, 5))


@case
def softmax_symbolic() -> Case:
    return _softmax("s0", "s1", (11, 45))


@case
def softmax_columns() -> Case:
    program, data, _ = _softmax(40, 70, (40, 70), axis=0)
    return program, data, 2


@case
def turned_and_then_reversed() -> Case:
    """`v` runs over the axes of `t` in the other order; what comes then keeps neither of them outside, and `v` reads what is not yet stored."""
    k = Kit()
    n = 24
    x, z = k.input("x", (n, n)), k.input("z", (n, n))
    t = k.stage("t", (n, n), lambda i, j: op("max", z(i, j), f(-3)), out=True)
    v = k.stage("v", (n, n), lambda i, j: op("add", x(i, j), t(j, i)), out=True)
    k.stage("y", (n, n), lambda i, j: op("cos", v(op("sub", const(n - 1), i), op("sub", const(n - 1), j))), out=True)
    return k.program("t", "v", "y"), {"x": random((n, n)), "z": random((n, n), 1)}, 1


@case
def layer_norm_of_sum() -> Case:
    k = Kit()
    n = 100
    x, y, w = k.input("x", (40, n)), k.input("y", (40, n)), k.input("w", (n,))
    h = k.stage("h", (40, n), lambda i, j: op("add", x(i, j), y(i, j)), out=True)
    mean = k.stage("mean", (40,), lambda i: op("div", k.fold((n,), 0, lambda r: h(i, r)), f(n)))
    var = k.stage("var", (40,), lambda i: k.fold((n,), 0, lambda r: op("mul", op("sub", h(i, r), mean(i)), op("sub", h(i, r), mean(i)))))
    k.stage("z", (40, n), lambda i, j: op("mul", op("mul", op("sub", h(i, j), mean(i)), op("rsqrt", op("add", var(i), f(1)))), w(j)), out=True)
    return k.program("h", "z"), {"x": random((40, n)), "y": random((40, n), 1), "w": random((n,), 2)}, 1


@case
def batch_norm_channels_first() -> Case:
    k = Kit()
    x = k.input("x", (4, 16, 14, 14))
    mean = k.stage("mean", (16,), lambda c: op("div", k.fold((4, 14, 14), 0, lambda n, h, w: x(n, c, h, w)), f(784)))
    k.stage("y", (4, 16, 14, 14), lambda n, c, h, w: op("max", op("sub", x(n, c, h, w), mean(c)), f(0)), out=True)
    return k.program("y"), {"x": random((4, 16, 14, 14))}, 1


@case
def batch_norm_channels_last() -> Case:
    k = Kit()
    order = (0, 2, 3, 1)
    x = k.input("x", (4, 16, 14, 14), order=order)
    mean = k.stage("mean", (16,), lambda c: op("div", k.fold((4, 14, 14), 0, lambda n, h, w: x(n, c, h, w)), f(784)))
    k.stage("y", (4, 16, 14, 14), lambda n, c, h, w: op("max", op("sub", x(n, c, h, w), mean(c)), f(0)), out=True, order=order)
    return k.program("y"), {"x": random((4, 16, 14, 14))}, 2


@case
def sum_of_everything() -> Case:
    k = Kit()
    x = k.input("x", (300000,))
    k.stage("y", (), lambda: k.fold((300000,), 0, x), out=True)
    return k.program("y"), {"x": random((300000,))}, 2


@case
def column_sums_in_two_steps() -> Case:
    k = Kit()
    x = k.input("x", (5000, 33))
    k.stage("y", (33,), lambda c: k.fold((5000,), 0, lambda r: x(r, c)), out=True)
    return k.program("y"), {"x": random((5000, 33))}, 2


@case
def transpose() -> Case:
    k = Kit()
    x = k.input("x", (33, 50))
    k.stage("y", (50, 33), lambda i, j: op("add", x(j, i), f(1)), out=True)
    return k.program("y"), {"x": random((33, 50))}, 1


@case
def reshape_with_division() -> Case:
    k = Kit()
    x = k.input("x", (6, 4, 5))
    a = k.stage("a", (4, 6, 5), lambda i, j, m: x(j, i, m))
    k.stage("y", (24, 5), lambda i, m: op("neg", a(op("floordiv", i, const(6)), op("mod", i, const(6)), m)), out=True)
    return k.program("y"), {"x": random((6, 4, 5))}, 1


@case
def pooling_with_border() -> Case:
    k = Kit()
    x = k.input("x", (2, 3, 15, 17))
    r = k.stage("r", (2, 3, 15, 17), lambda n, c, h, w: op("max", x(n, c, h, w), f(0)))
    del r

    def window(n: Expr, c: Expr, h: Expr, w: Expr) -> Callable[[Expr, Expr], Expr]:
        def at(i: Expr, j: Expr) -> Expr:
            y, z = h * 2 - 1 + i, w * 2 - 1 + j
            inside = op("and", op("and", op("ge", y, const(0)), op("lt", y, const(15))), op("and", op("ge", z, const(0)), op("lt", z, const(17))))
            return Load("r", F32, (n, c, y, z), inside, Const(F32, -np.inf))

        return at

    k.stage("y", (2, 3, 8, 9), lambda n, c, h, w: k.fold((3, 3), -np.inf, window(n, c, h, w), "max"), out=True)
    return k.program("y"), {"x": random((2, 3, 15, 17))}, 1


@case
def gather_rows() -> Case:
    k = Kit()
    w, i = k.input("w", (50, 37)), k.input("i", (11,), dt.i64)
    k.stage("y", (11, 37), lambda a, b: w(Cast(dt.index, i(a)), b), out=True)
    return k.program("y"), {"w": random((50, 37)), "i": np.random.default_rng(0).integers(0, 50, 11)}, 1


@case
def several_types() -> Case:
    k = Kit()
    a, b = k.input("a", (70,), dt.i64), k.input("b", (70,), dt.u8)
    c = k.stage("c", (70,), lambda i: op("lt", a(i), Cast(dt.i64, b(i))))
    k.stage("y", (70,), lambda i: op("where", c(i), Cast(dt.f64, a(i)), Cast(dt.f64, b(i))), out=True)
    k.stage("z", (70,), lambda i: op("floordiv", a(i), Const(dt.i64, -7)), out=True)
    k.stage("w", (70,), lambda i: Cast(dt.i8, op("mul", a(i), a(i))), out=True)
    data = {"a": random((70,), 0, "int64"), "b": np.random.default_rng(1).integers(0, 90, 70).astype(np.uint8)}
    return k.program("y", "z", "w"), data, 1


@case
def empty() -> Case:
    k = Kit()
    x = k.input("x", (3, 0))
    k.stage("y", (3,), lambda i: k.fold((0,), 0, lambda r: x(i, r)), out=True)
    k.stage("z", (3, 0), lambda i, j: op("exp", x(i, j)), out=True)
    return k.program("y", "z"), {"x": random((3, 0))}, 2


@case
def scan_over_rows() -> Case:
    k = Kit()
    k.input("x", (20, 30))
    i, j, v = Axis("i0"), Axis("i1"), Var("c", F32)
    nxt = op("add", v, Load("x", F32, (i, j)))
    shape = (const(20), const(30))
    k.buffers["y"] = Buffer("y", F32, shape, dense(shape), "output")
    k.body.append(Stage(((i, shape[0]), (j, shape[1])), (Store("y", (i, j), nxt),), scan=True, carry=((v, f(0)),), carry_next=(nxt,)))
    return k.program("y"), {"x": random((20, 30))}, 1


@case
def scatter_add() -> Case:
    k = Kit()
    z = k.input("x", (9, 33))
    k.input("i", (20,), dt.i64)
    k.input("u", (20, 33))
    shape = (const(9), const(33))
    k.stage("y", (9, 33), z, out=True)
    i, j = Axis("i0"), Axis("i1")
    store = Store("y", (Cast(dt.index, Load("i", dt.i64, (i,))), j), Load("u", F32, (i, j)), "add", unique=False)
    k.body.append(Stage(((i, const(20)), (j, shape[1])), (store,), origin="scatter"))
    return k.program("y"), {"x": random((9, 33)), "i": np.random.default_rng(0).integers(0, 9, 20), "u": random((20, 33), 2)}, 2


def check(name: str, options: Options) -> int:
    program, data, _ = CASES[name]()
    verify_program(program)
    want = run_program(program, [data[n].copy() for n in program.inputs])
    fused = fuse(program, options)
    verify_program(fused)
    scheduled = form_kernels(fused, options)
    verify_scheduled(scheduled)
    env = {s.sym.name: data[program.inputs[s.origin[1]]].shape[s.origin[2]] for s in program.symbols}  # type: ignore[index]
    for chunks in (1, 3):
        got = run(scheduled, data, env, chunks)
        for r, w in zip(program.results, want, strict=True):
            np.testing.assert_allclose(got[r.buf].astype(np.float64), np.asarray(w, np.float64), rtol=2e-5, atol=1e-4)  # type: ignore[union-attr]
    return sum(isinstance(k, Kernel) for k in scheduled.body)


@pytest.mark.parametrize("name", sorted(CASES))
def test_kernels(name: str) -> None:
    assert check(name, Options()) == CASES[name]()[2]


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(
    "name",
    ["chain", "softmax", "layer_norm_of_sum", "pooling_with_border", "several_types", "reshape_with_division", "turned_and_then_reversed"],
)
def test_chaos_never_changes_answers(name: str, seed: int) -> None:
    check(name, replace(Options(), chaos=seed))


@pytest.mark.parametrize("fuel", [0, 1, 2])
def test_fuel_bounds_fusion(fuel: int) -> None:
    program, _, _ = CASES["chain"]()
    assert len(fuse(program, replace(Options(), fuel=fuel)).body) == 3 - fuel
    check("chain", replace(Options(), fuel=fuel))


def test_a_fold_is_not_run_in_a_wider_loop() -> None:
    program, _, _ = CASES["softmax"]()
    m, s, y = (e for e in program.body if isinstance(e, Stage))
    assert can_fuse(m, s) is not None
    assert can_fuse(s, y) is not None


def test_stages_do_not_move_across_an_extern_that_reads_a_view_of_what_they_write() -> None:
    k = Kit()
    x = k.input("x", (8, 8))
    a = k.stage("a", (8, 8), lambda i, j: op("mul", x(i, j), f(2)))
    shape = (const(64),)
    k.buffers["v"] = Buffer("v", F32, shape, dense(shape), "temp", storage_of="a")
    k.buffers["e"] = Buffer("e", F32, (const(8), const(8)), dense((const(8), const(8))), "temp")
    k.body.append(Extern("own::op", (BufArg("v"),), (), ("e",)))
    k.stage("y", (8, 8), lambda i, j: op("add", Load("e", F32, (i, j)), a(i, j)), out=True)
    program = k.program("y")
    k.buffers["a"] = replace(k.buffers["a"], layout=dense((const(8), const(8))))
    scheduled = form_kernels(fuse(program, Options()), Options())
    assert [type(e).__name__ for e in scheduled.body] == ["Kernel", "Extern", "Kernel"]


@pytest.mark.parametrize("former", [form_kernels, form_blocks])
def test_stages_do_not_move_across_what_tells_a_size_that_they_use(former: Callable[..., Scheduled]) -> None:
    """`a` may not wait for the extern, which reads it, and `y` may not come before it."""
    k = Kit()
    x, told = k.input("x", (8,)), Sym("u0")
    a = k.stage("a", (8,), lambda i: op("mul", x(i), f(2)))
    k.buffers["e"] = Buffer("e", F32, (told,), dense((told,)), "temp")
    k.body.append(Extern("own::op", (BufArg("a"),), (), ("e",), binds=((told, 0, 0),)))
    k.stage("y", (8,), lambda i: op("add", op("mul", x(i), a(i)), Cast(F32, told)), out=True)
    program = k.program("y")
    program = replace(program, symbols=(*program.symbols, Symbol(told, ("bound",), 0, 8)), target=cuda(90) if former is form_blocks else CPU)
    scheduled = former(program, Options())
    verify_scheduled(scheduled)
    assert [type(e).__name__ for e in scheduled.body] == ["Kernel", "Extern", "Kernel"]


@pytest.mark.parametrize("former", [form_kernels, form_blocks])
def test_memory_that_a_kernel_writes_has_one_name_in_it(former: Callable[..., Scheduled]) -> None:
    """A stage that reads what the one before wrote under another name has a kernel of its own, and the verifier refuses one for both."""
    k, shape = Kit(), (const(4), const(4))
    x = k.input("x", (4, 4))
    k.stage("t", (4, 4), lambda i, j: op("mul", x(i, j), f(2)), out=True)
    k.buffers["v"] = Buffer("v", F32, shape, dense(shape, (1, 0)), "temp", storage_of="t")
    k.stage("y", (4, 4), lambda i, j: op("add", Load("v", F32, (i, j)), x(i, j)), out=True)
    program = k.program("t", "y")
    if former is form_blocks:
        program = replace(program, target=cuda(90))
    scheduled = former(program, Options())
    verify_scheduled(scheduled)
    assert len(scheduled.body) == 2
    apart = replace(program, buffers=program.buffers | {"v": replace(program.buffers["v"], storage_of=None, role="input")}, inputs=("x", "v"))
    joined = former(apart, Options()).body
    assert len(joined) == 1
    with pytest.raises(VerifyError, match="one name"):
        verify_scheduled(replace(scheduled, body=joined))


@pytest.mark.parametrize("out", [False, True])
def test_long_chains_do_not_exhaust_the_stack(out: bool) -> None:
    k = Kit()
    x = k.input("x", (70,))
    for n in range(400):
        x = k.stage(f"a{n}", (70,), lambda i, x=x, n=n: op("max", op("add", x(i), f(0.01 * n)), f(-1)), out=out or n == 399)
    program = k.program("a399")
    data = {"x": random((70,))}
    (want,) = run_program(program, [data["x"]])
    scheduled = form_kernels(fuse(program, Options()), Options())
    np.testing.assert_allclose(run(scheduled, data)["a399"], want, rtol=1e-5)
    assert len(scheduled.body) <= 12


def test_equal_kernels_have_equal_text() -> None:
    from torchsmith.emit.c import emit_kernel

    texts = set()
    for offset in (0, 3):
        k = Kit()
        k.folds = offset
        x = k.input(f"x{offset}", (12, 64))
        k.stage(f"y{offset}", (12,), lambda i, k=k, x=x: k.fold((64,), 0, lambda r: x(i, r)), out=True)
        (kernel,) = form_kernels(k.program(f"y{offset}"), Options()).body
        assert isinstance(kernel, Kernel)
        texts.add(emit_kernel(kernel))
    assert len(texts) == 1


@pytest.mark.parametrize(("first", "is_cut"), [(1024, True), (512, True), (1000, False)])
def test_joined_parts_are_read_by_loops_without_masks(first: int, is_cut: bool) -> None:
    """x and z behind each other along the vector axis: where the border is a border of blocks no lane is masked."""
    from torchsmith.emit.c import emit_kernel

    k = Kit()
    k.input("x", (3, first))
    k.input("z", (3, 1024))

    def at(i: Expr, j: Expr) -> Expr:
        below, rest = op("lt", j, const(first)), op("ge", j, const(first))
        other = Load("z", F32, (i, j - first), rest, f(0))
        return op("where", below, Load("x", F32, (i, j), below, f(0)), other)

    k.stage("y", (3, first + 1024), at, out=True)
    data = {"x": random((3, first)), "z": random((3, 1024), 1)}
    scheduled = form_kernels(k.program("y"), Options())
    np.testing.assert_array_equal(run(scheduled, data)["y"], np.concatenate([data["x"], data["z"]], 1))
    (kernel,) = scheduled.body
    assert isinstance(kernel, Kernel)
    text = emit_kernel(kernel)
    assert ("ldm_" in text[text.index("void TS_KERNEL") :]) is not is_cut


@pytest.mark.parametrize(("extent", "itemsize", "step"), [(1024, 4, 1040), (512, 8, 520), (2048, 2, 2080)])
def test_rows_do_not_share_a_set_of_the_cache(extent: int, itemsize: int, step: int) -> None:
    d = {2: dt.bf16, 4: dt.f32, 8: dt.f64}[itemsize]
    shape = (const(3), const(extent), const(7))
    got = rows_apart(Buffer("a", d, shape, dense(shape, (0, 2, 1)), "temp"), (0, 2, 1), 64).layout
    assert got is not None and got.strides == (const(7 * step), const(1), const(step))


def test_a_grain_follows_sizes_that_vary() -> None:
    """What is worth a thread is known at the call: a guess would leave a thousand keys of attention to one thread."""
    n = Sym("n")
    least = grain(1 << 20, repeated({(): 128}, [n]))
    found = [const_of(simplify_index(substitute(least, {n: const(v)}), Ranges())) for v in (0, 1, 64, 1 << 20)]
    assert found == [8192, 8192, 128, 1]
    assert const_of(grain(1000, repeated({(): 10}, [const(5)]))) == 20


def test_the_grain_of_a_reduction_follows_its_length() -> None:
    """Rows of a thousand elements are worth more threads than rows of ten."""
    k, n = Kit(), Sym("n")
    x = k.input("x", (64, "n"))
    k.stage("y", (64,), lambda i: k.fold(("n",), 0, lambda r: x(i, r)), out=True)
    (kernel,) = (e for e in form_kernels(fuse(k.program("y"), Options()), Options()).body if isinstance(e, Kernel))
    shares = [substitute(kernel.grain, {n: const(v)}) for v in (10, 1000, 100000)]
    found = [const_of(simplify_index(e, Ranges())) or 0 for e in shares]
    assert found[0] > 50 * found[1] and found[2] == 1


def test_an_axis_in_two_parts_does_not_follow_one_of_them() -> None:
    """Channels-last images seen with batch and channels as one axis: its neighbours are neighbours in memory, not 36 elements apart."""
    kit = Kit()
    x = kit.input("x", (3, 8, 6, 6), order=(0, 2, 3, 1))
    kit.stage("y", (24, 6, 6), lambda i, j, k: op("mul", x(op("floordiv", i, const(8)), op("mod", i, const(8)), j, k), f(2.0)))
    y = kit.load("y")
    kit.stage("half", (24, 3, 6), lambda i, j, k: y(i, op("floordiv", j, const(2)), k))
    half = kit.load("half")
    kit.stage("z", (24, 6, 6), lambda i, j, k: op("add", y(i, k, j), half(i, op("floordiv", j, const(2)), k)), out=True)
    buffers = choose_layouts(kit.program("z"))
    assert buffers["y"].layout == dense(buffers["y"].shape)
    assert buffers["half"].layout == dense(buffers["half"].shape)


def test_nothing_steps_through_a_dimension_of_size_1() -> None:
    """Its stride is arbitrary: an axis that reads the one row that was appended to a cache looked like the widest, and went outermost."""
    i, j = Axis("i"), Axis("j")
    buffer = Buffer("x", F32, (const(4), const(1)), Layout((const(8), const(5000)), const(0)), "input")
    (access,) = collect([Load("x", F32, (i, op("sub", j, Sym("n"))))], [], {"x": buffer}).items
    assert set(access.coefs) == {i}


def test_equal_stages_have_equal_indices() -> None:
    """Axes are numbered in each group, so that what is known of an index in one layer is known in all."""
    k = Kit()
    x = k.input("x", (64, 96))
    for name in "ab":
        k.stage(name, (64, 96), lambda i, j: op("mul", x(i, j), f(2.0)), out=True)
    p = k.program("a", "b")
    grouper = Grouper(p.buffers, Options())
    one, other = (grouper.single(s) for s in p.body if isinstance(s, Stage))
    assert one.members[0].stores[0].index == other.members[0].stores[0].index
    joined = grouper.join(one, one.stages[0])
    both = one if joined is None else joined
    assert both.names == len({a for m in both.members for a, _ in m.axes})
    at = flat(Layout((const(96), const(1)), const(0)), one.members[0].stores[0].index)
    assert flat(Layout((const(96), const(1)), const(0)), other.members[0].stores[0].index) is at
