"""Extern calls: every shape of argument through the C shims and through Python, against eager."""

import sys
import threading
from typing import Any

import pytest
import torch
from heap import held
from native_tools import buffer, compile_body, kernel, map_text

import torchsmith
from torchsmith import events
from torchsmith.codes import Unsupported
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Sym, const
from torchsmith.ir.program import BufArg, Enum, Extern, Fresh, Symbol
from torchsmith.runtime import externs_torch
from torchsmith.runtime.load import NativeError
from torchsmith.runtime.values_only import values_only

IR = {v: k for k, v in externs_torch.DTYPES.items()}


def ir_dtype(t: torch.Tensor) -> dt.DType:
    return dt.DTYPES[IR[t.dtype]]


def call(op: str, args: tuple[Any, ...], *, via: str = "shim", planned: bool = False, arena: bool = False, **kwargs: Any) -> tuple:
    """Run one extern on these arguments (tensors become inputs); `arena`: tensors are copied into arena memory first."""
    overload = externs_torch.resolve(op)
    want = overload(*args, **kwargs)
    wants = want if isinstance(want, (tuple, list)) else (want,)
    buffers, inputs, body, texts = [], [], [], {}

    def lift(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            name = f"x{len(inputs)}"
            buffers.append(buffer(name, *a.shape, role="input", d=ir_dtype(a), strides=a.stride()))
            inputs.append(a)
            if not arena or not a.is_contiguous():
                return BufArg(name)
            buffers.append(buffer(name + "t", *a.shape, d=ir_dtype(a)))
            body.append(kernel(f"k{name}", [buffers[-2]], [buffers[-1]], a.numel()))
            texts[f"k{name}"] = map_text("x[i]", buffers[-1].dtype.c)
            return BufArg(name + "t")
        if isinstance(a, (tuple, list)):
            return tuple(lift(i) for i in a)
        if isinstance(a, torch.dtype):
            return Enum("dtype", str(a).removeprefix("torch."))
        return a

    lifted = tuple(lift(a) for a in args)
    named = tuple((k, lift(v)) for k, v in kwargs.items())
    outs = []
    for i, w in enumerate(wants):
        outs.append(f"y{i}")
        buffers.append(buffer(f"y{i}", *w.shape, role="output", d=ir_dtype(w), strides=w.stride()))
    body.append(Extern(op, lifted, named, tuple(outs), returned="planned" if planned else "as_given", via=via))  # type: ignore[arg-type]
    got = compile_body(buffers, body, [Fresh(o) for o in outs], texts)(*inputs)
    for g, w in zip(got, wants, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0, check_stride=True)
    return got


@pytest.fixture(params=["shim", "python"])
def via(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(externs_torch, "SHIM_OPS", frozenset())
    return request.param


X, W = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("aten.convolution.default", (X, W, torch.randn(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
    ("aten.convolution.default", (X, W, None, [2, 2], [0, 1], [1, 1], False, [0, 0], 1), {}),
    ("aten.cat.default", ([torch.randn(2, 3), torch.randn(1, 3)], 0), {}),
    ("aten.sort.stable", (torch.randn(5, 4),), {"stable": True, "dim": 0, "descending": True}),
    ("aten.topk.default", (torch.randn(5, 4), 2), {}),
    ("aten.cumsum.default", (torch.arange(6), 0), {"dtype": torch.float32}),
    ("aten.cumsum.default", (torch.arange(6), 0), {"dtype": None}),
    ("aten.index.Tensor", (torch.randn(5, 4), [None, torch.tensor([1, 0])]), {}),
    ("aten.index_put.default", (torch.randn(5), [torch.tensor([1, 3])], torch.randn(2), False), {}),
    ("aten.avg_pool2d.default", (X, [2, 2], [2, 2], [0, 0], False, True, None), {}),
    ("aten.avg_pool2d.default", (X, [2, 2], [2, 2], [0, 0], False, True, 3), {}),
    ("aten.max_pool2d_with_indices.default", (X, [2, 2], [2, 2], [0, 0], [1, 1], False), {}),
    ("aten.searchsorted.Tensor", (torch.arange(9.0), torch.rand(4) * 9), {"right": True, "side": None, "sorter": None}),
    ("aten.searchsorted.Tensor", (torch.arange(9.0), torch.rand(4) * 9), {"side": "right"}),
    ("aten._cdist_forward.default", (torch.randn(3, 4), torch.randn(5, 4), 2.0, None), {}),
    ("aten._embedding_bag.default",
     (torch.randn(9, 4), torch.tensor([1, 2, 3]), torch.tensor([0, 2]), False, 0, False, None, False, -1), {}),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", (torch.randn(1, 2, 8, 16),) * 3 + (0.0, True), {"scale": 0.3}),
    ("aten.addmv.default", (torch.randn(3), torch.randn(3, 4), torch.randn(4)), {"beta": 2, "alpha": 0.5}),
    ("aten.addmv.default", (torch.arange(3), torch.ones(3, 4, dtype=torch.int64), torch.arange(4)), {"beta": 2, "alpha": 3}),
    ("aten.roll.default", (torch.randn(3, 4), [1], [0]), {}),
    ("aten.tensor_split.sections", (torch.randn(4, 3), 2), {}),
]  # fmt: skip


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_as_given(case: Any, via: str, arena: bool) -> None:
    op, args, kwargs = case
    if "tensor_split" in op:
        with pytest.raises(NativeError):  # views of one tensor are no results of their own; here only the count is wrong
            call_split(args)
        return
    call(op, args, arena=arena, **kwargs)


def call_split(args: Any) -> None:
    x = buffer("x", 4, 3, role="input")
    g = compile_body([x, buffer("y", 2, 3)], [Extern("aten.tensor_split.sections", (BufArg("x"), 2), (), ("y",))], [Fresh("y")], {})
    g(args[0])


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm"])
def test_planned_products(op: str, via: str, arena: bool) -> None:
    a, b, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(5)
    one = {"mm": (a[0], b[0]), "addmm": (c, a[0], b[0]), "bmm": (a, b), "baddbmm": (c, a, b)}[op]
    extra = {"beta": 1, "alpha": 2.5} if "add" in op else {}
    call(f"aten.{op}.default", one, planned=True, arena=arena, **extra)
    call(f"aten.{op}.default", one, planned=False, arena=arena, **extra)


def test_integer_products_keep_their_dtype(via: str) -> None:
    a, b = torch.arange(6).reshape(2, 3), torch.arange(12).reshape(3, 4)
    call("aten.addmm.default", (torch.arange(4), a, b), planned=True, beta=2, alpha=3)


def test_parameters_that_require_grad_and_grad_mode_stays(via: str) -> None:
    w = torch.nn.Parameter(torch.randn(3, 3))
    x, y = buffer("x", 3, 3, role="input"), buffer("y", 3, 3, role="output")
    g = compile_body([x, y], [Extern("aten.mm.default", (BufArg("x"), BufArg("x")), (), ("y",))], [Fresh("y")], {})
    (got,) = g(w)
    assert torch.is_grad_enabled() and not got.requires_grad and torch.equal(got, (w @ w).detach())
    with torch.no_grad():
        g(w)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert g(w)[0].is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert g(w)[0].dtype is torch.float32
        assert (w @ w).dtype is torch.bfloat16


def test_run_time_numbers(via: str) -> None:
    k, s = Sym("k"), Sym("s", dt.f64)
    x, y, z = buffer("x", 9, role="input"), buffer("y", k), buffer("z", k, d=dt.i64)
    body = [Extern("aten.topk.default", (BufArg("x"), k), (), ("y", "z"))]
    g = compile_body([x, y, z], body, [Fresh("y"), Fresh("z")], {}, symbols=[Symbol(k, ("scalar", 1))], inputs=["x", ""])
    v = torch.randn(9)
    for n in (0, 3, 9):
        assert torch.equal(g(v, n)[0], v.topk(n)[0])
    y = buffer("y", 9)
    body = [Extern("aten.leaky_relu.default", (BufArg("x"), s), (), ("y",))]
    g = compile_body([x, y], body, [Fresh("y")], {}, symbols=[Symbol(s, ("scalar", 1))], inputs=["x", ""])
    assert torch.equal(g(v, 0.25)[0], torch.nn.functional.leaky_relu(v, 0.25))


def test_size_from_data(via: str) -> None:
    u = Sym("u")
    x, n, t, y = buffer("x", 9, role="input"), buffer("n", u, 1, d=dt.i64), buffer("t", u, 1, d=dt.i64), buffer("y", u, 1, d=dt.i64)
    body = [
        Extern("aten.nonzero.default", (BufArg("x"),), (), ("n",), (), ((u, 0, 0),)),
        kernel("k", [n], [t], u),
        kernel("k2", [t], [y], u),
    ]
    texts = {"k": map_text("x[i] + 1", "int64_t"), "k2": map_text("x[i] * 2", "int64_t")}
    g = compile_body([x, n, t, y], body, [Fresh("y")], texts, symbols=[Symbol(u, ("bound",))])
    for v in (torch.tensor([0.0, 1, 2, 0, 0, 3, 0, 0, 0]), torch.zeros(9), torch.ones(9)):
        # nonzero gives column-major strides; the planned layout is row-major, of width one
        assert torch.equal(g(v)[0], (v.nonzero() + 1) * 2)


def test_other_strides_are_copied_into_the_planned_ones(via: str) -> None:
    x, y = buffer("x", 2, 3, role="input", strides=(1, 2)), buffer("y", 2, 3, role="output")
    g = compile_body([x, y], [Extern("aten.neg.default", (BufArg("x"),), (), ("y",))], [Fresh("y")], {})
    v = torch.randn(3, 2).t()
    (got,) = g(v)
    assert got.stride() == (3, 1) and torch.equal(got, -v)


def test_wrong_plans_are_errors_not_crashes(via: str) -> None:
    x = buffer("x", 4, role="input")
    v = torch.randn(4)
    for y in (buffer("y", 5), buffer("y", 4, 1), buffer("y", 4, d=dt.f64)):
        g = compile_body([x, y], [Extern("aten.neg.default", (BufArg("x"),), (), ("y",))], [Fresh("y")], {})
        with pytest.raises(NativeError):
            g(v)
        g = compile_body(
            [x, y], [Extern("aten.neg.default", (BufArg("x"),), (), ("y",))], [Fresh("y")], {}, eager=lambda x: (x + 1,)
        )
        assert torch.equal(g(v)[0], v + 1)


def test_errors_of_operators_are_repeated_eagerly(via: str) -> None:
    x, y = buffer("x", 3, 4, role="input"), buffer("y", 3, 4, role="output")
    body = [Extern("aten.index.Tensor", (BufArg("x"), (BufArg("i"),)), (), ("y",))]
    i = buffer("i", 3, role="input", d=dt.i64)
    g = compile_body([x, i, y], body, [Fresh("y")], {}, eager=lambda x, i: (x[i],))
    v = torch.randn(3, 4)
    assert torch.equal(g(v, torch.tensor([0, 2, 1]))[0], v[[0, 2, 1]])
    with pytest.raises(IndexError, match="out of bounds"):
        g(v, torch.tensor([0, 2, 7]))


def test_unknown_operator_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="RUN005"):
        externs_torch.resolve("aten.no_such_thing.default")


def test_custom_operator_and_exceptions() -> None:
    lib = torch.library.Library("ts_test_externs", "DEF")
    lib.define("twice(Tensor x, int n) -> Tensor")

    def twice(x: torch.Tensor, n: int) -> torch.Tensor:
        if n < 0:
            raise ValueError("no")
        return x * 2 + n

    lib.impl("twice", twice, "CPU")
    n = Sym("n")
    x, y = buffer("x", 4, role="input"), buffer("y", 4)
    body = [Extern("ts_test_externs.twice.default", (BufArg("x"), n), (), ("y",))]
    g = compile_body([x, y], body, [Fresh("y")], {}, symbols=[Symbol(n, ("scalar", 1))], inputs=["x", ""])
    v = torch.randn(4)
    assert torch.equal(g(v, 3)[0], v * 2 + 3)
    with pytest.raises(ValueError, match="no"):
        g(v, -1)
    assert torch.equal(g(v, 3)[0], v * 2 + 3)


def test_shims_make_no_python_frame_and_no_leak() -> None:
    x, y = buffer("x", 8, 8, role="input"), buffer("y", 8, 8)
    z = buffer("z", 8, 8, role="output")
    body = [
        Extern("aten.mm.default", (BufArg("x"), BufArg("x")), (), ("y",), returned="planned"),
        Extern("aten.cat.default", ((BufArg("y"), BufArg("x")), const(0)), (), ("c",)),
        Extern("aten.mm.default", (BufArg("y"), BufArg("y")), (), ("z",), returned="planned"),
    ]
    c = buffer("c", 16, 8)
    g = compile_body([x, y, z, c], body, [Fresh("z"), Fresh("c")], {})
    v = torch.randn(8, 8)
    g(v)
    calls: list[Any] = []
    sys.setprofile(lambda frame, event, arg: calls.append((event, frame.f_code.co_name)) if event == "call" else None)
    g(v)
    sys.setprofile(None)
    assert calls == []

    for _ in range(2000):
        g(v)
    before = held()
    for _ in range(10000):
        g(v)
    assert held() - before < 200_000  # 20 bytes a call


def test_threads_share_a_graph(via: str) -> None:
    x, y, z = buffer("x", 64, 64, role="input"), buffer("y", 64, 64), buffer("z", 64, 64, role="output")
    body = [
        Extern("aten.mm.default", (BufArg("x"), BufArg("x")), (), ("y",), returned="planned"),
        Extern("aten.mm.default", (BufArg("y"), BufArg("x")), (), ("z",), returned="planned"),
    ]
    g = compile_body([x, y, z], body, [Fresh("z")], {})
    wrong = []

    def work(seed: int) -> None:
        v = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        want = v @ v @ v
        for _ in range(300):
            if not torch.equal(g(v)[0], want):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_constants_without_inputs_are_computed_in_every_run() -> None:
    """The zero state of an LSTM is a kernel that reads nothing: no constant input would ever start `prepare` for it."""
    torch.manual_seed(0)
    module, x = torch.nn.LSTM(4, 3).eval(), torch.randn(2, 1, 4)
    with torch.no_grad():
        (got, (h, c)), (want, (h0, c0)) = torchsmith.compile(module)(x), module(x)
    for a, b in ((got, want), (h, h0), (c, c0)):
        torch.testing.assert_close(a, b)


@torch.library.custom_op("torchsmith_written::both", mutates_args=("a", "b"))
def written_both(a: torch.Tensor, k: int, b: torch.Tensor) -> None:
    a.add_(k)
    b.mul_(k)


@torch.library.custom_op("torchsmith_written::grown", mutates_args=("x",))
def grown(x: torch.Tensor, y: torch.Tensor, *, k: float = 2.0) -> torch.Tensor:
    x.add_(y * k)
    return x.sum(0)


@grown.register_fake
def _(x, y, *, k=2.0):
    return x.new_empty(x.shape[1:])


def _whole_inputs(a, b):
    written_both(a, a.shape[0], b)
    return a @ b.t()


def _a_view(a, b):
    part = a[1:]
    return part, grown(part, b[1:], k=3.0), a + 1


def _turned(a, b):
    c = a.t()
    torch.ops.torchsmith_written.grown(c, b.t())
    return c * 1, a


def _one_memory_twice(a, b):
    written_both(a, 3, a)
    return a


@pytest.mark.parametrize("f", [_whole_inputs, _a_view, _turned, _one_memory_twice])
def test_custom_operators_that_write(f) -> None:
    """Copies are written to and given back, for all sizes; where an argument shares the memory, copies are not what eager sees."""
    fn = torchsmith.compile(f, dynamic=True)
    with events.recording() as got:
        for n in (4, 5, 7):
            a, b = torch.randn(n, 3), torch.randn(n, 3)
            mine = a.clone(), b.clone()
            torch.testing.assert_close((fn(*mine), mine), (f(a, b), (a, b)))
    roads = [e.fields["report"].road for e in got if e.kind == "graph"]
    assert roads == (["captured"] if f is _one_memory_twice else ["native"])


def test_a_form_on_values_is_found_by_its_name() -> None:
    """As a process does that loads what another one compiled."""
    for op in (torch.ops.torchsmith_written.both.default, torch.ops.torchsmith_written.grown.default):
        made = values_only(op)
        assert made is not None and externs_torch.resolve(str(made)) is made
    with pytest.raises(Unsupported, match="RUN005"):
        externs_torch.resolve("torchsmith_values.n7_4_unknown_both_default.default")
