"""The native host: results, views, numbers, write-backs, modes, threads, errors."""

import gc
import os
import re
import subprocess
import threading
import weakref

import pytest
import torch
from heap import held
from native_tools import buffer, compile_body, compile_library, kernel, map_text

import torchsmith
from torchsmith import events
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Load, Sym, const
from torchsmith.ir.program import Check, Fresh, InputResult, SizeResult, Symbol, ViewResult
from torchsmith.runtime import _native
from torchsmith.runtime.load import NativeError

SIN_COS = map_text("__builtin_sinf(__builtin_cosf(x[i]))")


def sin_cos(n: int = 8):
    x, y = buffer("x", n, role="input"), buffer("y", n, role="output")
    return compile_body([x, y], [kernel("k", [x], [y], n)], [Fresh("y")], {"k": SIN_COS})


def plus_one(n: int, **kw):
    x, t = buffer("x", n, role="input"), buffer("t", n)
    text = map_text("x[i] + 1").replace("bufs[1]", "bufs[0]")  # the planner lets the kernel write its input
    return compile_body([x, t], [kernel("k", [x], [t], n)], [], {"k": text}, write_backs=[("x", "t")], **kw)


def test_one_kernel() -> None:
    x = torch.randn(8)
    (y,) = sin_cos()(x)
    torch.testing.assert_close(y, x.cos().sin())
    assert not y.requires_grad and y.is_contiguous()


def test_results_follow_the_callers_mode() -> None:
    g, x = sin_cos(), torch.randn(8, requires_grad=True)
    assert not g(x)[0].requires_grad and not g(x)[0].is_inference()
    with torch.inference_mode():
        assert g(x)[0].is_inference()


@pytest.mark.parametrize("d", [d for d in dt.DTYPES.values() if d.kind not in ("index", "opaque")], ids=str)
def test_every_dtype(d: dt.DType) -> None:
    from torchsmith.runtime.externs_torch import DTYPES

    x, y = buffer("x", 5, role="input", d=d), buffer("y", 5, role="output", d=d)
    v = (torch.arange(5) % 2).to(DTYPES[d.name])
    (got,) = compile_body([x, y], [kernel("k", [x], [y], 5)], [Fresh("y")], {"k": map_text("x[i]", d.c)})(v)
    assert got.dtype == v.dtype and torch.equal(got, v)


def test_every_kind_of_result() -> None:
    s = Sym("s0")
    x, y = buffer("x", s, role="input"), buffer("y", s, role="output")
    results = [
        ViewResult("y", (s // 2,), (const(2),), const(1), dt.f32), Fresh("y"), Fresh("y"), InputResult(0), SizeResult(s + 1),
        ViewResult(0, (s - 1,), (const(1),), const(1), dt.f32), ViewResult(0, (s,), (const(1),), const(0), dt.i32),
    ]  # fmt: skip
    g = compile_body([x, y], [kernel("k", [x], [y], s)], results, {"k": SIN_COS}, symbols=[Symbol(s, ("size", 0, 0))])
    for n in (2, 8, 301):
        base = torch.randn(n + 3)
        v = base[3:]
        odd, fresh, again, same, size, tail, typed = g(v)
        assert fresh is again and same is v and size == n + 1 and type(size) is int
        assert odd._base is fresh and torch.equal(odd, fresh[1::2]) and torch.allclose(fresh, v.cos().sin())
        assert torch.equal(tail, v[1:]) and tail.data_ptr() == v[1:].data_ptr() and tail._base is base
        assert torch.equal(typed, v.view(torch.int32))
        tail.zero_()
        assert v[1:].abs().sum() == 0


def test_write_back_bumps_the_version() -> None:
    g, x = plus_one(8), torch.zeros(8)
    version = x._version
    g(x)
    assert torch.equal(x, torch.ones(8)) and x._version > version
    with torch.inference_mode():
        y = torch.zeros(8)
        g(y)
    assert torch.equal(y, torch.ones(8))


def test_backward_notices_a_write_back() -> None:
    w = torch.ones(8, requires_grad=True)
    x = torch.ones(8)
    y = (w * x).sum()
    plus_one(8)(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_inputs_that_do_not_fit_are_refused() -> None:
    g = sin_cos()
    with pytest.raises(TypeError):
        g(3)
    with pytest.raises(TypeError):
        g()
    with pytest.raises(TypeError):
        g(torch.zeros(8), torch.zeros(8))


def test_a_failed_check_repeats_the_call_eagerly() -> None:
    x, ok, y = buffer("x", 8, role="input"), buffer("ok", role="input", d=dt.bool_), buffer("y", 8, role="output")
    body = [kernel("k", [x], [y], 8), Check(Load("ok", dt.bool_, ()), "index", "out of range")]
    seen = []

    def eager(x: torch.Tensor, ok: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append(ok.item())
        raise IndexError("as eager says")

    v = torch.randn(8)
    with pytest.raises(NativeError, match="out of range"):
        compile_body([x, ok, y], body, [Fresh("y")], {"k": SIN_COS})(v, torch.tensor(False))
    g = compile_body([x, ok, y], body, [Fresh("y")], {"k": SIN_COS}, eager=eager)
    g(v, torch.tensor(True))
    with events.recording() as got, pytest.raises(IndexError, match="as eager says"):
        g(v, torch.tensor(False))
    assert seen == [False] and [e.fields["code"] for e in got if e.kind == "fallback"] == ["RUN004"]


def big(n: int = 1 << 20, **kw):
    x, t, y = buffer("x", n, role="input"), buffer("t", n), buffer("y", n, role="output")
    body = [kernel("k", [x], [t], n, grain=4096), kernel("k2", [t], [y], n, grain=4096)]
    return compile_body([x, t, y], body, [Fresh("y")], {"k": map_text("x[i] + 1"), "k2": map_text("x[i] * 2")}, **kw)


def test_workspaces_are_reused() -> None:
    g, x = big(), torch.randn(1 << 20)
    g(x)
    before = _native.workspace_stats()
    for _ in range(10):
        g(x)
    assert _native.workspace_stats() == before
    _native.workspace_trim()
    assert _native.workspace_stats()["kept"] == 0
    assert torch.equal(g(x)[0], (x + 1) * 2)


def test_memory_of_a_large_call_is_given_back() -> None:
    n = Sym("n")
    x, t, y = buffer("x", n, role="input"), buffer("t", n), buffer("y", n, role="output")
    body = [kernel("k", [x], [t], n), kernel("k2", [t], [y], n)]
    g = compile_body([x, t, y], body, [Fresh("y")], {"k": SIN_COS, "k2": SIN_COS}, symbols=[Symbol(n, ("size", 0, 0))])
    gc.collect()
    g(torch.randn(1 << 24))
    assert _native.workspace_stats()["bytes"] >= 1 << 26
    small = torch.randn(8)
    for _ in range(1200):
        g(small)
    assert _native.workspace_stats()["bytes"] < 1 << 26
    assert torch.allclose(g(small)[0], small.cos().sin().cos().sin())


@pytest.mark.parametrize("pool", ["torch", "own"])
def test_many_threads_and_thread_counts(pool: str) -> None:
    g = big(1 << 16, pool=pool)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(seed))
        want = (x + 1) * 2
        wrong.extend(seed for _ in range(50) if not torch.equal(g(x)[0], want))

    before = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
    finally:
        torch.set_num_threads(before)
    assert not wrong


@pytest.mark.parametrize("pool", ["torch", "own"])
def test_thread_limit_of_a_graph(pool: str) -> None:
    """The kernel notes who runs it: never more threads than torch says, nor than the graph may use; one thread gets the whole range."""
    x = torch.randn(1 << 16)
    n, grain = 1 << 16, 4096
    text = map_text("me").replace("{\n", "{ extern long syscall(long, ...); float me = syscall(186);\n", 1)
    a, y = buffer("x", n, role="input"), buffer("y", n, role="output")
    body = [kernel("k", [a], [y], n, grain=grain)]
    before = torch.get_num_threads()
    try:
        for torchs, limit, most in ((4, 0, 4), (4, 2, 2), (4, 1, 1), (1, 4, 1), (2, 0, 2)):
            torch.set_num_threads(torchs)
            g = compile_body([a, y], body, [Fresh("y")], {"k": text}, threads=limit, pool=pool)
            assert all(1 <= len(g(x)[0].unique()) <= most for _ in range(20))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pool", ["torch", "own"])
def test_a_child_of_fork_has_threads_of_its_own(pool: str) -> None:
    g, x = big(1 << 16, pool=pool), torch.randn(1 << 16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(3):
            want = g(x)[0].numpy().tobytes()
        child = os.fork()
        if child == 0:  # torch's own parallel operators would wait for ever here
            good = all(g(x)[0].numpy().tobytes() == want for _ in range(20))
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert g(x)[0].numpy().tobytes() == want
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pool", ["torch", "own"])
def test_every_thread_flushes_denormals_as_the_caller_does(pool: str) -> None:
    g, x = big(1 << 16, pool=pool), torch.full((1 << 16,), 1e-45)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    n = 1 << 16
    a, b, y = buffer("x", n, role="input"), buffer("b", n), buffer("y", n, role="output")
    body = [kernel("k", [a], [b], n, grain=64), kernel("k", [b], [y], n, grain=64)]
    g = compile_body([a, b, y], body, [Fresh("y")], {"k": map_text("x[i] * 1.0f + 0.0f")}, pool=pool)
    try:
        for flush in (False, True, False):
            if not torch.set_flush_denormal(flush):
                pytest.skip("this processor cannot flush denormals")
            assert all(int((g(x)[0].view(torch.int32) != 0).sum()) == (0 if flush else n) for _ in range(20))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def test_a_library_needs_libc_only() -> None:
    """No OpenMP, no libtorch, no C++ runtime: what a program that loads it must have."""
    found = compile_library([kernel("k", [buffer("x", 8)], [buffer("y", 8)], 8)], {"k": SIN_COS})
    text = subprocess.run(["objdump", "-p", found], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED\s+(\S+)", text)) <= {"libc.so.6", "libm.so.6"}


def test_other_python_threads_run_during_a_call() -> None:
    """The kernel says that it runs, and waits for an answer (for a minute or so)."""
    asks = "volatile float *at = bufs[0]; at[1] = 1; for (volatile int64_t w = 0; at[0] == 0 && w < 20000000000; w++); for ("
    x, y = buffer("x", 2, role="input"), buffer("y", 2, role="output")
    g = compile_body([x, y], [kernel("k", [x], [y], 2)], [Fresh("y")], {"k": map_text("x[i]").replace("for (", asks)})
    shared = torch.zeros(2)

    def answer() -> None:
        while not shared[1] and not done.is_set():
            pass
        shared[0] = 1

    done = threading.Event()
    t = threading.Thread(target=answer)
    t.start()
    (got,) = g(shared)
    done.set()
    t.join()
    assert got.tolist() == [1, 1]


def test_tensors_and_graphs_are_freed() -> None:
    g, x = sin_cos(), torch.randn(8)
    (y,) = g(x)
    gone = weakref.ref(y)
    del y
    assert gone() is None

    class Eager:
        def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x,)

    eager = Eager()
    g = compile_body(
        [buffer("x", 8, role="input"), buffer("y", 8, role="output")],
        [kernel("k", [buffer("x", 8)], [buffer("y", 8)], 8)], [Fresh("y")], {"k": SIN_COS}, eager=eager,
    )  # fmt: skip
    eager.graph = g  # a cycle through the native object
    gone2 = weakref.ref(eager)
    del g, eager
    gc.collect()
    assert gone2() is None


def test_no_memory_is_an_error_not_a_crash() -> None:
    n = Sym("n")
    x, t, y = buffer("x", 8, role="input"), buffer("t", n), buffer("y", 8, role="output")
    body = [kernel("k", [x], [t], 8), kernel("k2", [t], [y], 8)]
    g = compile_body(
        [x, t, y], body, [Fresh("y")], {"k": SIN_COS, "k2": SIN_COS}, symbols=[Symbol(n, ("scalar", 1))], inputs=["x", ""]
    )
    g(torch.zeros(8), 8)
    with pytest.raises(NativeError, match="memory"):
        g(torch.zeros(8), 1 << 50)


def prepared(n: int = 1000, **kw):
    """y = (w + 1) * 2 + x in three kernels; the first one reads w only."""
    w, x = buffer("w", n, role="input"), buffer("x", n, role="input")
    p, y = buffer("p", n), buffer("y", n, role="output")
    add = map_text("x[i] * 2 + z[i]").replace("float *y = bufs[1]", "float *z = bufs[1], *y = bufs[2]")
    body = [kernel("k", [w], [p], n), kernel("k2", [p, x], [y], n)]
    return compile_body([w, x, p, y], body, [Fresh("y")], {"k": map_text("x[i] + 1"), "k2": add}, consts=["w"], **kw)


def prepares(g, *args: torch.Tensor) -> int:
    """Run, compare with eager, count how often constants were prepared."""
    with events.recording() as got:
        (y,) = g(*args)
    assert torch.equal(y, (args[0] + 1) * 2 + args[1])
    return sum(e.kind == "prepare" for e in got)


def test_constants_are_prepared_once_and_watched() -> None:
    g, w, x = prepared(), torch.nn.Parameter(torch.randn(1000)), torch.randn(1000)
    with torch.no_grad():
        assert [prepares(g, w, x), prepares(g, w, x + 1)] == [1, 0]
        w.add_(1)
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 0]
        w.data.mul_(2)  # moves no version counter
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 0]
        w.data = torch.randn(1000)
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 0]
        other = torch.nn.Parameter(w.detach().clone())
        assert [prepares(g, other, x), prepares(g, other, x), prepares(g, w, x), prepares(g, other, x)] == [1, 0, 0, 0]
        w.numpy()[...] = 3.0
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 0]
        w.data[517] = 4.0  # one element of a small tensor
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 0]
        _native.refreeze()
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 0]
        g.refreeze()
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 0]


def test_constants_of_dead_modules_are_forgotten() -> None:
    g, x = prepared(1 << 20), torch.randn(1 << 20)
    for i in range(40):
        assert prepares(g, torch.randn(1 << 20), x) == 1
        if i == 5:
            before = held()
    assert held() - before < 4 << 20  # one of them
    many = [torch.randn(1 << 20) for _ in range(5)]
    assert [prepares(g, w, x) for w in many * 2] == [1] * 5 + [0] * 5


def test_inference_tensors_are_constant_only_when_frozen() -> None:
    with torch.inference_mode():
        w, x = torch.randn(1000), torch.randn(1000)
        g = prepared()
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 1]
        g, w = prepared(frozen=True), torch.randn(1000)
        assert [prepares(g, w, x), prepares(g, w, x)] == [1, 0]
    assert prepares(g, torch.randn(1000), x) == 1


def test_graphs_that_pack_alike_share_what_they_packed() -> None:
    one, two, w, x = prepared(), prepared(), torch.randn(1000), torch.randn(1000)
    assert [prepares(one, w, x), prepares(two, w, x)] == [1, 0]
    w.add_(1)
    assert [prepares(two, w, x), prepares(one, w, x)] == [1, 0]
    del one
    gc.collect()
    assert prepares(two, w, x) == 0
    assert prepares(prepared(999), w[:999], x[:999]) == 1


def test_threads_with_other_constants() -> None:
    g, wrong = prepared(1 << 14), []

    def work(seed: int) -> None:
        r = torch.Generator().manual_seed(seed)
        w, x = torch.randn(1 << 14, generator=r), torch.randn(1 << 14, generator=r)
        want = (w + 1) * 2 + x
        wrong.extend(seed for _ in range(200) if not torch.equal(g(w, x)[0], want))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("n", [0, 1, 3, 17, 40, 4096, 4097])
def test_small_constants(n: int) -> None:
    g, w, x = prepared(n), torch.randn(n), torch.randn(n)
    assert prepares(g, w, x) == 1
    w.data.add_(1)
    assert prepares(g, w, x) == (n > 0)


def test_inputs_that_are_always_the_same() -> None:
    x, w, y = buffer("x", 4, role="input"), buffer("w", 4, role="input"), buffer("y", 4, role="output")
    text = map_text("x[i] + z[i]").replace("float *y = bufs[1]", "float *z = bufs[1], *y = bufs[2]")
    v, tail = torch.randn(4), torch.randn(4)
    ok = buffer("ok", role="input", d=dt.bool_)
    body = [kernel("k", [x, w], [y], 4), Check(Load("ok", dt.bool_, ()), "index", "no")]
    results = [Fresh("y"), ViewResult(2, (const(2),), (const(1),), const(2), dt.f32)]
    g = compile_body(
        [x, ok, w, y], body, results, {"k": text}, tail=[tail], eager=lambda *args: (len(args),), inputs=["x", "ok", "w"]
    )
    got, view = g(v, torch.tensor(True))
    assert torch.equal(got, v + tail) and view._base is tail
    assert g(v, torch.tensor(False)) == (2,)
    with pytest.raises(TypeError):
        g(v, v, v)


def test_views_of_inputs_that_nothing_else_uses() -> None:
    g = compile_body([], [], [ViewResult(0, (const(4),), (const(1),), const(0), dt.i32)], {}, inputs=[""])
    v = torch.randn(4)
    assert torch.equal(g(v)[0], v.view(torch.int32)) and g(v)[0].data_ptr() == v.data_ptr()
    assert g(v)[0]._base is v.view(torch.int32)._base
    i = torch.arange(4, dtype=torch.int32)
    assert torch.equal(g(i)[0], i)


def test_nothing_is_kept_of_inference_parameters_unless_frozen() -> None:
    def prepared_by(model: torch.nn.Module, x: torch.Tensor, **options: bool) -> int:
        compiled = torchsmith.compile(model, options=options)
        with events.recording() as got:
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x))
                model[0].weight.mul_(2)
                if options:
                    _native.refreeze()
        return sum(e.kind == "prepare" for e in got)

    with torch.inference_mode():
        model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.randn(4, 64)
        assert prepared_by(model, x) == 0
        assert prepared_by(model, x, freezing=True) == 2
    with torch.no_grad():
        assert prepared_by(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.randn(4, 64)) == 2
