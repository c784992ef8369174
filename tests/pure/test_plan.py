"""Memory plan: packing, liveness, write-backs and hazards."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from torchsmith.codes import Unsupported
from torchsmith.emit.host import emit_host
from torchsmith.ir import dtype as dt
from torchsmith.ir.bounds import Ranges
from torchsmith.ir.expr import Axis, Const, Expr, Load, Sym, const, op, substitute
from torchsmith.ir.kernel import Kernel, Loop, Param, Scheduled, StoreStmt
from torchsmith.ir.plan import Alloc, Arena, Call, Free, Given, Input, Launch, Plan, ResultPlace, State, Taken
from torchsmith.ir.print import print_plan
from torchsmith.ir.program import (
    Bind,
    BufArg,
    Buffer,
    Check,
    Cond,
    Extern,
    Fresh,
    Layout,
    Program,
    SizeResult,
    Symbol,
    ViewResult,
)
from torchsmith.ir.target import cuda
from torchsmith.ir.verify import VerifyError, verify_plan
from torchsmith.options import Options
from torchsmith.schedule.memory.arena import pack, pack_static
from torchsmith.schedule.memory.order import order
from torchsmith.schedule.memory.plan import nbytes, plan


def buffer(name: str, *shape: Expr | int, role: str = "temp", d: dt.DType = dt.f32, storage_of: str | None = None) -> Buffer:
    sizes = tuple(const(s) if isinstance(s, int) else s for s in shape)
    strides: list[Expr] = []
    step: Expr = const(1)
    for e in reversed(sizes):
        strides.append(step)
        step = step * e
    return Buffer(name, d, sizes, Layout(tuple(reversed(strides)), const(0)), role, storage_of)  # type: ignore[arg-type]


def unary(name: str, src: Buffer, dst: Buffer, fn: str = "sin", shift: int = 0) -> Kernel:
    """dst[i] = fn(src[i + shift]) over one dimension."""
    i = Axis("i")
    value = op(fn, Load(src.name, src.dtype, (i + shift,)))
    params = tuple(Param(b.name, b.dtype, b.shape, b.layout, b is dst) for b in (src, dst))  # type: ignore[arg-type]
    syms = tuple(s for s in dst.shape if isinstance(s, Sym))
    return Kernel(name, params, syms, (), const(1), (), (Loop(i, dst.shape[0], "vector", (StoreStmt(dst.name, (i,), value),)),))


def program(buffers: list[Buffer], results: tuple, symbols: tuple[Symbol, ...] = (), write_backs: tuple = ()) -> Program:
    inputs = tuple(b.name for b in buffers if b.role == "input")
    return Program("g", symbols, inputs, {b.name: b for b in buffers}, (), results, write_backs)


def make(buffers: list[Buffer], body: list, results: tuple, **kw) -> Plan:
    got = plan(Scheduled(program(buffers, results, **kw), tuple(body)), Options())
    verify_plan(got)
    assert print_plan(got)
    return got


def test_chain_reuses_the_arena() -> None:
    x, y = buffer("x", 1000, role="input"), buffer("y", 1000, role="output")
    temps = [buffer(f"t{i}", 1000) for i in range(4)]
    chain = [x, *temps, y]
    got = make(chain, [unary(f"k{i}", a, b) for i, (a, b) in enumerate(itertools.pairwise(chain))], (Fresh("y"),))
    assert got.workspace is const(4032)  # each is written over the one before
    assert got.places["x"] == Input(0) and got.places["y"] == ResultPlace(0)
    assert [type(s) for s in got.run] == [Launch] * 4 + [Alloc, Launch]


def test_what_reads_a_neighbour_is_not_written_in_place() -> None:
    x, y = buffer("x", 1000, role="input"), buffer("y", 1000, role="output")
    temps = [buffer(f"t{i}", 1000) for i in range(4)]
    chain = [x, *temps, y]
    got = make(chain, [unary(f"k{i}", a, b, shift=1) for i, (a, b) in enumerate(itertools.pairwise(chain))], (Fresh("y"),))
    assert got.workspace is const(2 * 4032)
    assert all(b.storage_of is None for b in got.buffers.values())


def binary(name: str, a: Buffer, b: Buffer, dst: Buffer, around: Expr | int = 1) -> Kernel:
    """dst[i] = a[i] + b[i], `around` times over."""
    i, j = Axis("i"), Axis("j")
    value = op("add", Load(a.name, a.dtype, (i,)), Load(b.name, b.dtype, (i,)))
    params = tuple(Param(x.name, x.dtype, x.shape, x.layout, x is dst) for x in dict.fromkeys((a, b, dst)))  # type: ignore[arg-type]
    loop = Loop(i, dst.shape[0], "vector", (StoreStmt(dst.name, (i,), value),))
    body = (loop,) if around == 1 else (Loop(j, const(around) if isinstance(around, int) else around, "serial", (loop,)),)
    return Kernel(name, params, (), (), const(1), (), body)


def test_a_sum_is_written_over_the_operand_that_dies() -> None:
    x, y = buffer("x", 1000, role="input"), buffer("y", 1000, role="output")
    a, b, c = (buffer(n, 1000) for n in "abc")
    first = [unary("k0", x, a), unary("k1", x, b)]
    got = make([x, y, a, b, c], [*first, binary("k2", a, b, c), binary("k3", c, a, y)], (Fresh("y"),))
    assert got.buffers["c"].storage_of == "b" and got.places["c"] == got.places["b"]  # `a` is read later
    assert got.workspace is const(2 * 4032)
    with pytest.raises(VerifyError, match="one name"):  # kernels of blocks load first and store last
        verify_plan(replace(got, target=cuda(90)))


@pytest.mark.parametrize("case", ["stored twice", "another size", "a result"])
def test_sums_that_need_a_place_of_their_own(case: str) -> None:
    x, y = buffer("x", 1000, role="input"), buffer("y", 1000, role="output")
    a, c = buffer("a", 1001 if case == "another size" else 1000, role="output" if case == "a result" else "temp"), buffer("c", 1000)
    sums = binary("k1", a, x, c, around=2 if case == "stored twice" else 1)
    results = (Fresh("y"), Fresh("a")) if case == "a result" else (Fresh("y"),)
    got = make([x, y, a, c], [unary("k0", x, a), sums, unary("k2", c, y)], results)
    assert got.buffers["c"].storage_of is None


def test_packing_never_overlaps() -> None:
    rng = random.Random(1)
    for _ in range(50):
        sizes = {f"b{i}": 64 * rng.randint(0, 20) for i in range(40)}
        lives = {n: tuple(sorted(rng.sample(range(60), 2))) for n in sizes}
        offsets, height = pack_static(sizes, lives)
        for a, m in sizes.items():
            assert offsets[a] + m <= height
            for b, n in sizes.items():
                if a < b and lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1] and m and n:
                    assert offsets[a] + m <= offsets[b] or offsets[b] + n <= offsets[a]
        peak = max(sum(sizes[n] for n in sizes if lives[n][0] <= t <= lives[n][1]) for t in range(60))
        assert peak <= height <= 1.5 * peak


def test_symbolic_sizes_stack_and_reuse() -> None:
    s = Sym("s0")
    x, y = buffer("x", s, role="input"), buffer("y", s, role="output")
    temps = [buffer(f"t{i}", s) for i in range(4)]
    chain = [x, *temps, y]
    got = make(
        chain, [unary(f"k{i}", a, b, shift=1) for i, (a, b) in enumerate(itertools.pairwise(chain))], (Fresh("y"),),
        symbols=(Symbol(s, ("size", 0, 0)),),
    )
    assert len({got.places[t.name] for t in temps}) == 2
    assert all(isinstance(got.places[t.name], Arena) for t in temps)


def test_blocks_of_different_symbolic_sizes_share_memory() -> None:
    """Sizes that are multiples of one symbol are packed as numbers are, and nothing overlaps whatever the symbols are."""
    s, t = Sym("s0"), Sym("s1")
    ranges = Ranges({s: (0, None), t: (1, 64)})
    lives = {"a": (0, 1), "b": (1, 2), "c": (2, 3), "d": (3, 4)}
    sizes = {"a": s * 512, "b": s * 256, "c": s * 384, "d": s * 128}
    offsets, total = pack(sizes, lives, ranges)
    assert total is s * 768 and offsets["c"] is const(0)
    rng = random.Random(2)
    for _ in range(30):
        sizes = {f"b{i}": rng.choice((const(1), s, t, s * t, t * t)) * (64 * rng.randint(0, 9)) for i in range(25)}
        lives = {n: tuple(sorted(rng.sample(range(40), 2))) for n in sizes}
        offsets, total = pack(sizes, lives, ranges)
        for at in ({s: const(0), t: const(1)}, {s: const(1), t: const(64)}, {s: const(500), t: const(3)}, {s: const(97), t: const(64)}):
            number = {n: (int(substitute(offsets[n], at).value), int(substitute(sizes[n], at).value)) for n in sizes}  # type: ignore[attr-defined]
            assert max(o + m for o, m in number.values()) <= int(substitute(total, at).value)  # type: ignore[attr-defined]
            for a, b in itertools.combinations(sizes, 2):
                (o, m), (p, n) = number[a], number[b]
                if lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1] and m and n:
                    assert o + m <= p or p + n <= o


def test_layout_with_padding_and_splits_counts() -> None:
    b = Buffer("b", dt.f32, (const(3), const(5)), Layout((const(64), const(16), const(1)), const(0), ((0, 2),)), "temp")
    # rows split by 2: (2, 2) x 5; strides outer row 64, column 16, inner row 1
    assert nbytes(b) is const(4 * (1 + 64 + 4 * 16 + 1) // 64 * 64 + (64 if 4 * 130 % 64 else 0))
    p = Buffer("p", dt.f32, (const(4),), Layout((const(1),), const(2), (), ((2, 2),)), "temp")
    assert int(nbytes(p).value) >= 4 * (2 + 4 + 2)  # type: ignore[attr-defined]


def test_given_results_are_freed_after_their_last_use() -> None:
    x, y = buffer("x", 8, role="input"), buffer("y", 8, role="output")
    g, h = buffer("g", 8), buffer("h", 8, role="output")
    body = [
        Extern("aten.sin.default", (BufArg("x"),), (), ("g",)),
        unary("k", g, y),
        Extern("aten.cos.default", (BufArg("y"),), (), ("h",)),
    ]
    got = make([x, y, g, h], body, (Fresh("y"), Fresh("h")))
    assert [type(s) for s in got.run] == [Call, Alloc, Launch, Free, Call]
    assert got.places["g"] == Given() and got.places["h"] == Given()


def test_size_bound_in_the_middle_gets_its_own_workspace() -> None:
    u = Sym("u0")
    x, n, t, y = buffer("x", 8, role="input"), buffer("n", u), buffer("t", u), buffer("y", u, role="output")
    body = [
        Extern("aten.nonzero.default", (BufArg("x"),), (), ("n",), (), ((u, 0, 0),)),
        unary("k", n, t), unary("k2", t, y),
    ]  # fmt: skip
    got = make([x, n, t, y], body, (Fresh("y"),), symbols=(Symbol(u, ("bound",)),))
    assert isinstance(got.places["t"], Taken) and got.workspace is const(0)
    assert [type(s).__name__ for s in got.run] == ["Call", "Alloc", "Launch", "Free", "Alloc", "Launch", "Free"]


def test_derived_symbols_are_expanded_in_arena_sizes() -> None:
    s, d = Sym("s0"), Sym("d")
    x, t, y = buffer("x", s, role="input"), buffer("t", d), buffer("y", s, role="output")
    got = make([x, t, y], [Bind(d, s * 2), unary("k", x, t), unary("k2", t, y)], (Fresh("y"),), symbols=(Symbol(s, ("size", 0, 0)),))
    assert "d" not in repr(got.workspace) and "s0" in repr(got.workspace)


def copies(p: Plan) -> list[tuple[str, str]]:
    """(source, destination) of the copy kernels, in order."""
    return [(s.bufs[0], s.bufs[1]) for s in p.run if isinstance(s, Launch) and p.kernels[s.kernel].origins == ("write back",)]


def test_write_back_is_direct_when_only_the_kernel_reads_the_input() -> None:
    x, t = buffer("x", 8, role="input"), buffer("t", 8)
    got = make([x, t], [unary("k", x, t)], (), write_backs=(("x", "t"),))
    assert copies(got) == [] and got.run[0].bufs == ("x",)
    assert got.kernels[0].params[0].written


@pytest.mark.parametrize("case", ["later read", "later check", "later extern", "shifted read", "also a result"])
def test_write_back_copies_when_somebody_could_see_it(case: str) -> None:
    x, t, y = buffer("x", 8, role="input"), buffer("t", 8), buffer("y", 8, role="output")
    body = [unary("k", x, t, shift=case == "shifted read"), unary("k2", x if case == "later read" else t, y)]
    if case == "later check":
        body.append(Check(op("lt", Load("y", dt.f32, (const(0),)), Const(dt.f32, 1.0)), "index", "out of range"))
    if case == "later extern":
        body.append(Extern("aten.sin.default", (BufArg("y"),), (), ("h",)))
    results = (Fresh("y"), Fresh("t")) if case == "also a result" else (Fresh("y"),)
    b, h = buffer("b", role="input", d=dt.bool_), buffer("h", 8)
    got = make([x, t, y, b, h], body, results, write_backs=(("x", "t"),))
    assert copies(got) == [("t", "x")]
    assert isinstance(got.run[-1], Launch)


@pytest.mark.parametrize("when", ["before", "after", "by the writer"])
def test_an_input_that_is_also_read_through_a_view(when: str) -> None:
    """A transposed weight of a product: the weight takes its new value in place where the product comes first."""
    x, v, t, y = buffer("x", 8, role="input"), buffer("v", 8, storage_of="x"), buffer("t", 8), buffer("y", 8, role="output")
    reader, writer = unary("read", v, y), unary("write", x, t)
    if when == "by the writer":
        reader, writer = unary("read", t, y), binary("write", x, v, t)
    got = make([x, v, t, y], [reader, writer] if when == "before" else [writer, reader], (Fresh("y"),), write_backs=(("x", "t"),))
    assert (copies(got) == []) is (when == "before")


def test_updates_follow_their_gradients_and_checks_come_first() -> None:
    """Two parameters, each with a gradient, a counter and a check of it; what can fail comes first, then nothing is copied."""
    names = ("g", "h", "c", "d", "t", "u")
    x, w, n, m = (buffer(b, 1 if b in "nm" else 100, role="input") for b in "xwnm")
    g, h, c, d, t, u = (buffer(b, 1 if b in "cd" else 100) for b in names)
    body: list[Any] = [unary("g", x, g), unary("h", g, h)]
    for source, grad, count, update in ((n, g, c, t), (m, h, d, u)):
        body += [unary("count", source, count), Check(op("lt", Load(count.name, dt.f32, (const(0),)), Const(dt.f32, 1.0)), "index", "-")]
        body += [unary("update", grad, update)]
    scheduled = Scheduled(program([x, w, n, m, g, h, c, d, t, u], (), write_backs=(("w", "t"), ("x", "u"))), tuple(body))
    found = [f"{k.name} {k.params[-1].buf}" if isinstance(k, Kernel) else type(k).__name__ for k in order(scheduled)]
    assert found == ["count c", "Check", "count d", "Check", "g g", "update t", "h h", "update u"]
    got = plan(scheduled, Options())
    verify_plan(got)
    assert copies(got) == []


@pytest.mark.parametrize("sure", [True, False])
def test_a_call_that_can_only_lack_memory_may_follow_a_write(sure: bool) -> None:
    x, y, t, z = buffer("x", 100, role="input"), buffer("y", 100, role="input"), buffer("t", 100), buffer("z", 100)
    call = Extern("aten.mm.default" if sure else "aten.sin.default", (BufArg("y"),), (), ("z",))
    got = make([x, y, t, z], [unary("k", x, t), call], (Fresh("z"),), write_backs=(("x", "t"),))
    verify_plan(got)
    text = emit_host(got, ("k", "c"))
    assert (copies(got) == []) is sure
    assert ("if (rc) { rc = TS_ERROR_LATE; goto fail; }" in text) is sure


def test_swapped_inputs_go_through_temps() -> None:
    x, y = buffer("x", 8, role="input"), buffer("y", 8, role="input")
    got = make([x, y], [], (), write_backs=(("x", "y"), ("y", "x")))
    assert copies(got) == [("y", "y_old"), ("x", "x_old"), ("y_old", "x"), ("x_old", "y")]
    assert got.places["x_old"] != got.places["y_old"]


def test_views_and_unwritten_results() -> None:
    x, y = buffer("x", 8, role="input"), buffer("y", 0, role="output")
    got = make([x, y], [], (ViewResult(0, (const(4),), (const(2),), const(1), dt.f32), Fresh("y")))
    assert got.run == (Alloc("y"),)


def test_a_buffer_that_views_another_shares_its_place() -> None:
    x, t = buffer("x", 8, role="input"), buffer("t", 8)
    v, y = buffer("v", 4, storage_of="t"), buffer("y", 8, role="output")
    u = buffer("u", 8)
    body = [unary("k", x, t), unary("k1", x, u), Extern("aten.sin.default", (BufArg("v"),), (), ("g",)), unary("k2", u, y)]
    got = make([x, t, v, u, y, buffer("g", 4)], body, (Fresh("y"),))
    assert got.places["v"] == got.places["t"] != got.places["u"]


def test_what_reads_only_constants_is_prepared() -> None:
    w, x, y = buffer("w", 8, role="input"), buffer("x", 8, role="input"), buffer("y", 8, role="output")
    p, q, r, t = buffer("p", 8), buffer("q", 8), buffer("r", 8), buffer("t", 8)
    body = [unary("k0", x, t), unary("k1", w, p), unary("k2", p, q), unary("k3", q, r), unary("k4", r, y)]
    prog = replace(program([w, x, y, p, q, r, t], (Fresh("y"),)), consts=("w",))
    got = plan(Scheduled(prog, tuple(body)), Options())
    assert [s.bufs for s in got.prepare] == [("w", "p"), ("p", "q"), ("q", "r")]  # type: ignore[union-attr]
    assert [s.bufs for s in got.run if isinstance(s, Launch)] == [("x", "t"), ("r", "y")]
    assert got.consts == (0,) and got.state == 128
    assert got.places["r"] != got.places["q"] and isinstance(got.places["r"], State)
    verify_plan(got)
    assert "state" in print_plan(got)


@pytest.mark.parametrize("case", ["result", "other writer", "written back", "not a const", "nobody reads"])
def test_what_must_not_be_prepared(case: str) -> None:
    w, x, y = buffer("w", 8, role="input"), buffer("x", 8, role="input"), buffer("y", 8, role="output")
    p = buffer("p", 8)
    body = [unary("k1", w, p), unary("k2", p, y)]
    results: tuple = (Fresh("y"), Fresh("p")) if case == "result" else (Fresh("y"),)
    if case == "other writer":
        body.insert(1, unary("k3", x, p))
    if case == "nobody reads":
        body = [unary("k1", w, p), unary("k2", x, y)]
    backs = (("w", "y"),) if case == "written back" else ()
    prog = replace(program([w, x, y, p], results, write_backs=backs), consts=() if case == "not a const" else ("w",))
    got = plan(Scheduled(prog, tuple(body)), Options())
    assert got.prepare == () and got.state == 0 and got.consts == ()
    verify_plan(got)


def scatter(name: str, value: Buffer, dst: Buffer, at: Expr, mode: str = "set", reads: bool = False) -> Kernel:
    """dst[at + i] (mode)= value[i] (+ dst[i])."""
    i = Axis("i")
    e: Expr = Load(value.name, value.dtype, (i,))
    if reads:
        e = op("add", e, Load(dst.name, dst.dtype, (i,)))
    params = tuple(Param(b.name, b.dtype, b.shape, b.layout, b is dst) for b in (value, dst))  # type: ignore[arg-type]
    store = StoreStmt(dst.name, (at + i,), e, mode)  # type: ignore[arg-type]
    return Kernel(name, params, (), (), const(1), (), (Loop(i, value.shape[0], "vector", (store,)),))


def identity(src: Buffer, dst: Buffer) -> Kernel:
    (kernel,) = (unary("copy", src, dst),)
    loop = kernel.body[0]
    assert isinstance(loop, Loop)
    return replace(kernel, body=(replace(loop, body=(StoreStmt(dst.name, (Axis("i"),), Load(src.name, src.dtype, (Axis("i"),))),)),))


@pytest.mark.parametrize("case", ["plain", "then extern and check", "extern reads it", "adds", "adds, then extern", "reads", "old value read"])
def test_scatter_goes_into_the_input_itself(case: str) -> None:
    x, v, t, y = buffer("x", 8, role="input"), buffer("v", 2, role="input"), buffer("t", 8), buffer("y", 8, role="output")
    ok, h, w = buffer("ok", role="input", d=dt.bool_), buffer("h", 8), buffer("w", 4, storage_of="t")
    mode = "add" if "adds" in case else "set"
    body = [identity(x, t), scatter("s", v, t, const(3), mode, case == "reads"), unary("k", t, y)]
    if "then extern" in case:
        body += [Extern("aten.sin.default", (BufArg("y"),), (), ("h",)), Check(Load("ok", dt.bool_, ()), "index", "no")]
    if case == "extern reads it":
        body.append(Extern("aten.cat.default", ((BufArg("w"), BufArg("t")),), (), ("h",)))
    if case == "old value read":
        body.append(unary("k2", x, h))
    got = make([x, v, t, y, ok, h, w], body, (Fresh("y"),), write_backs=(("x", "t"),))
    if case in ("plain", "then extern and check", "extern reads it"):
        assert copies(got) == [] and "t" not in got.buffers
        assert [s.bufs for s in got.run if isinstance(s, Launch)] == [("v", "x"), ("x", "y")]
        calls = [s.extern for s in got.run if isinstance(s, Call)]
        assert case != "extern reads it" or (calls[0].args == ((BufArg("w"), BufArg("x")),) and got.places["w"] == Input(0))
    else:
        assert copies(got) == [("t", "x")]


def test_numbers_read_from_given_results_keep_them_alive() -> None:
    x, g, y = buffer("x", 8, role="input"), buffer("g"), buffer("y", 8, role="output")
    body = [Extern("aten.sum.default", (BufArg("x"),), (), ("g",)), unary("k", x, y)]
    got = make([x, g, y], body, (Fresh("y"), SizeResult(Load("g", dt.f32, ()))))
    assert not [s for s in got.run if isinstance(s, Free)]  # the host program releases what is left at its end


def test_memory_before_its_size_is_refused() -> None:
    u = Sym("u0")
    x, n, t, y = buffer("x", 8, role="input"), buffer("n", u), buffer("t", u), buffer("y", 8, role="output")
    inner = (Extern("aten.nonzero.default", (BufArg("x"),), (), ("n",), (), ((u, 0, 0),)), unary("k", n, t), unary("k2", t, y))
    body = [Cond(Load("p", dt.bool_, ()), inner, (unary("k3", x, y),))]  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="SCH101"):
        make([x, n, t, y, buffer("p", role="input", d=dt.bool_)], body, (Fresh("y"),), symbols=(Symbol(u, ("bound",)),))
