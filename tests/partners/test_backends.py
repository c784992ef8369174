"""Backends by name: the table of rows, other runtimes under our capture, ours under PyTorch's, and graphs that servers bring."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchsmith
from torchsmith import compiler, events
from torchsmith.backends import registry
from torchsmith.backends.partition import cut
from torchsmith.backends.standalone import CompiledArtifact, standalone_compile

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import effects as effects_cases

RUNTIMES = {"openxla": ("jax", "torchax"), "onnxrt": ("onnxruntime", "onnxscript"), "openvino": ("openvino",), "tvm": ("tvm",)}


def needs(name: str, *marks):
    missing = [m for m in RUNTIMES.get(name, ()) if importlib.util.find_spec(m) is None]
    return pytest.param(name, marks=[pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}"), *marks])


FUNCTIONAL = [pytest.param("aot_eager"), pytest.param("aot_eager_decomp_partition"), *map(needs, RUNTIMES)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 4)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return torch.softmax(self.out(y), -1), y


def plain(gm, inputs):
    return gm.forward


def close(a, b, tol=1e-4):
    a, b = (a, b) if isinstance(a, (tuple, list)) else ((a,), (b,))
    assert len(a) == len(b)
    for p, q in zip(a, b, strict=True):
        assert p.shape == q.shape and p.dtype == q.dtype and p.stride() == q.stride()
        assert (p - q).abs().max() <= tol * q.abs().max().clamp(min=1e-6) if p.is_floating_point() else torch.equal(p, q)


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# ---------------------------------------------------------------- names


def test_the_documents_names_are_listed():
    names = set(compiler.list_backends(exclude_tags=()))
    assert {"inductor", "torchsmith", "eager", "aot_eager", "aot_eager_decomp_partition", "cudagraphs", "openxla", "openxla_eval",
            "onnxrt", "openvino", "tvm", "ipex", "tensorrt"} <= names  # fmt: skip
    assert "eager" not in compiler.list_backends(exclude_tags="debug")
    assert "eager" not in compiler.list_backends() and "openxla_eval" not in compiler.list_backends()


@pytest.mark.parametrize("name", ["tvm", "ipex", "tensorrt"])
def test_a_missing_package_is_named(name):
    row = registry.ROWS[name]
    if registry.is_installed(row):
        pytest.skip("installed")
    with pytest.raises(RuntimeError, match=f"{name}.*{row.needs[0]}.*pip install"):
        torchsmith.compile(lambda x: x + 1, backend=name)


def test_a_wrong_name_is_told_the_right_one():
    with pytest.raises(RuntimeError, match="did you mean 'inductor'"):
        torchsmith.compile(lambda x: x, backend="inducter")


@pytest.mark.parametrize("name, options, said", [
    ("onnxrt", {"provider": []}, "backend 'onnxrt': unknown option 'provider'; did you mean 'providers'"),
    ("openvino", {"devise": "CPU"}, "did you mean 'device'"),
    ("openxla", {"providers": []}, "it has no options of its own"),
    ("aot_eager", {"speed": 1}, "it has no options of its own"),
])  # fmt: skip
def test_a_wrong_option_is_told_the_right_one(name, options, said):
    if not registry.is_installed(registry.ROWS[name]):
        pytest.skip("not installed")
    with pytest.raises(RuntimeError, match=said):
        torchsmith.compile(lambda x: x, backend=name, options=options)


def test_options_that_nobody_takes():
    """torch.compile's backend would raise TypeError for them."""
    with pytest.raises(RuntimeError, match="backend 'plain' takes no options, and 'speed' is none of torchsmith's"):
        torchsmith.compile(torch.sin, backend=plain, options={"speed": 1})
    assert torch.equal(torchsmith.compile(torch.sin, backend=plain, options={"cpp.threads": 1})(torch.ones(2)), torch.ones(2).sin())


def test_a_mode_is_known():
    with pytest.raises(RuntimeError, match="did you mean 'max-autotune'"):
        torchsmith.compile(lambda x: x, backend="aot_eager", mode="max-autotun")
    x = torch.randn(3)
    close(torchsmith.compile(lambda x: x + 1, backend="aot_eager", options={"cpp.threads": 1, "epilogue_fusion": True})(x), x + 1)


def test_options_are_forwarded():
    seen = {}

    def backend(gm, inputs, *, mode=None, options=None):
        seen.update(options or {}, mode=mode)
        return gm.forward

    x = torch.randn(3)
    torchsmith.compile(lambda x: x + 1, backend=backend, options={"speed": 9, "suppress_errors": False})(x)
    assert seen == {"speed": 9, "mode": None}
    torchsmith.compile(lambda x: x + 2, backend=backend, mode="max-autotune")(x)
    assert seen["mode"] == "max-autotune"
    chosen = registry.resolve_backend("aot_eager")
    assert pickle.loads(pickle.dumps(chosen)) == chosen


@pytest.mark.parametrize("result, said", [
    (lambda gm, i: None, "returned NoneType, not a callable"),
    (lambda gm, i: lambda *a: None, "returned NoneType, not a tuple of 2 results"),
    (lambda gm, i: lambda *a: gm.forward(*a)[:1], "returned 1 results instead of 2"),
    (lambda gm, i: lambda *a: (a[0][:1], a[0]), "result 0 has shape"),
    (lambda gm, i: lambda *a: (a[0].double(), a[0]), "result 0 is torch.float64"),
    (lambda gm, i: lambda *a: (a[0].to("meta"), a[0]), "result 0 lies on meta instead of cpu"),
    (lambda gm, i: lambda *a: (a[0].to_sparse(), a[0]), "result 0 has the layout torch.sparse_coo"),
    (lambda gm, i: lambda *a: [n.meta["example_value"] for n in gm.graph.nodes if n.op.startswith("call")], "result 0 is FakeTensor"),
])  # fmt: skip
def test_nonsense_from_a_backend_is_named_and_run_eagerly(result, said):
    def f(x):
        return x.sin(), x + 1

    x = torch.randn(3)
    c = torchsmith.compile(f, backend=result)
    with pytest.warns(UserWarning, match=said):
        close(c(x), f(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(c(x), f(x))
    with pytest.raises(Exception, match=said):
        torchsmith.compile(f, backend=result, fullgraph=True)(x)


def test_nonsense_from_a_functional_backend():
    def three(fg, name):
        return lambda *a: (torch.zeros(1),)

    three.dialect = "functional"
    x = torch.randn(4)
    with pytest.warns(UserWarning, match=r"result 0 has shape \(1,\) instead of \(4,\)"):
        close(torchsmith.compile(lambda x: x.sin(), backend=three)(x), x.sin())
    with pytest.raises(RuntimeError, match="result 0 has shape"):
        torchsmith.compile(lambda x: x.cos(), backend=three, fullgraph=True)(x)


# ---------------------------------------------------------------- runtimes under our capture


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_model_equals_eager(name):
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    c = torchsmith.compile(net, backend=name)
    with events.recording() as got:
        close(c(x), net(x))
    assert not [e for e in got if e.kind == "fallback"]
    net.out.weight.mul_(2)  # a weight that changes is seen
    close(c(x), net(x))


def effects(x, y):
    x.add_(1)
    z = x * y
    return z.t(), x, z, y.expand(2, *y.shape).contiguous(), x.shape[0]


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_writes_aliases_and_strides(name):
    c = torchsmith.compile(effects, backend=name)
    for n in (3, 4, 5):
        a, b, y = torch.randn(n, 4), None, torch.randn(n, 4)
        b = a.clone()
        got, want = c(a, y), effects(b, y)
        close(got[:4], want[:4])
        close(a, b)
        assert got[1] is a and got[0].data_ptr() == got[2].data_ptr() and got[4] == n
        assert got[3].data_ptr() != y.data_ptr()


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_what_a_runtime_lacks_runs_between(name):
    def f(x):
        a = torch.linalg.inv(x @ x.t() + torch.eye(3))
        return torch.dropout(a.exp(), 0.5, True) + torch.rand(3)

    c, x = torchsmith.compile(f, backend=name), torch.randn(3, 3)
    torch.manual_seed(5)
    want = f(x)
    torch.manual_seed(5)
    close(c(x), want, 1e-3)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_bfloat16_autocast_and_integers(name):
    def f(x, w, i):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        return y.float().relu(), i[i > 0].sum() if False else i * 2, x.argmax(-1)

    x, w, i = torch.randn(4, 8), torch.randn(8, 8), torch.arange(5)
    close(torchsmith.compile(f, backend=name)(x, w, i), f(x, w, i), 2e-2)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_sizes_that_data_tell_run_eagerly(name):
    def f(x):
        return x[x > 0] * 2

    x = torch.randn(7)
    with events.recording() as got:
        close(torchsmith.compile(f, backend=name)(x), f(x))
    assert name == "aot_eager" or {e.fields["code"] for e in got if e.kind == "fallback"} <= {"BCK001", "GRA009", "CAP020"}


@pytest.mark.parametrize("case", effects_cases.CASES)
@pytest.mark.parametrize("name", [*FUNCTIONAL[:3], *(needs(n, pytest.mark.heavy) for n in ("onnxrt", "openvino", "tvm"))])
def test_what_programs_do_beyond_arithmetic(name, case):
    """Right, and what another side ran has a code; docs/backends.md prints the same."""
    found = effects_cases.run_case(name, case)
    assert found.right, found.said
    assert set(found.codes) <= {"CAP018", "CAP020", "CAP023", "BCK002", "BCK005"}
    assert case != "break" or found.codes


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_forward_and_backward_run_in_the_backend(name):
    """loss.backward() outside of the compiled function: two graphs, both given to the backend."""
    with torch.enable_grad():
        net, x = Net(), torch.randn(2, 3, 8, 8)
        other = copy.deepcopy(net)
        step = torchsmith.compile(other, backend=name)
        for _ in range(2):
            net(x)[0].square().sum().backward()
            with events.recording() as got:
                step(x)[0].square().sum().backward()
            assert {e.fields["code"] for e in got if e.kind == "fallback"} <= {"BCK005"}  # operators that a converter has not, or wrongly
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_attention_whose_decomposition_gives_another_second_result(name):
    """Torch's gives the weights where the operator gives the logarithms of their sums, which backward reads."""
    def f(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    with torch.enable_grad(), events.recording() as got:
        q = torch.randn(1, 2, 8, 4, requires_grad=True)
        want = torch.autograd.grad(f(q).sin().sum(), q)[0]
        torchsmith.compile(f, backend=name)(q).sin().sum().backward()
    torch.testing.assert_close(q.grad, want, rtol=1e-4, atol=1e-5)
    assert {e.fields["code"] for e in got if e.kind == "fallback"} <= {"BCK002", "BCK005"}


def test_aot_autograd_gives_aten_graphs_to_compilers():
    seen = []

    def made_by(kind, boxed=False):
        def compile_it(gm, examples):
            assert {n.op for n in gm.graph.nodes} <= {"placeholder", "call_function", "output"}
            assert [tuple(n.meta["val"].shape) for n in gm.graph.nodes if n.op == "placeholder"] == [tuple(e.shape) for e in examples]
            seen.append((kind, {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}))
            if not boxed:
                return gm.forward

            def call(given):
                return gm.forward(*given)

            call._boxed_call = True
            return call

        return compile_it

    silu = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}
    backend = compiler.aot_autograd(
        fw_compiler=made_by("forward"), bw_compiler=made_by("backward", boxed=True), inference_compiler=made_by("inference"),
        decompositions=silu,
    )  # fmt: skip
    net, x = nn.Sequential(nn.Linear(4, 3), nn.SiLU(), nn.BatchNorm1d(3)), torch.randn(5, 4)
    other = copy.deepcopy(net)
    fn = torchsmith.compile(other, backend=backend)
    with torch.enable_grad():
        for _ in range(2):
            net(x).sin().sum().backward()
            fn(x).sin().sum().backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    close(other[2].running_mean, net[2].running_mean)
    close(fn(x), net(x))
    assert [kind for kind, _ in seen] == ["forward", "backward", "inference"]
    assert "aten.sigmoid.default" in seen[0][1] and "aten.silu.default" not in seen[0][1]
    with pytest.raises(TypeError, match="fw_compiler is callable, not NoneType"):
        compiler.aot_autograd(fw_compiler=None)


@pytest.mark.parametrize("bad, said", [
    (lambda gm, i: None, "returned NoneType, not a callable"),
    (lambda gm, i: lambda *a: (torch.zeros(7),), "result"),
    (lambda gm, i: 1 / 0, "division by zero"),
])  # fmt: skip
def test_nonsense_backwards_is_named_and_run_by_torch(bad, said):
    backend = compiler.aot_autograd(fw_compiler=lambda gm, i: gm.forward, bw_compiler=bad)
    w, x = torch.randn(4, requires_grad=True), torch.randn(4)
    with torch.enable_grad(), pytest.warns(UserWarning, match=said):
        torchsmith.compile(lambda x, w: (x * w).sin().sum(), backend=backend)(x, w).backward()
    torch.testing.assert_close(w.grad, x * (x * w).cos())
    with torch.enable_grad(), pytest.raises(Exception, match=said):
        torchsmith.compile(lambda x, w: (x * w).cos().sum(), backend=backend, fullgraph=True)(x, w).backward()


def test_what_fails_for_sizes_of_a_call_runs_in_torch():
    """No size is known while the graph is compiled, so the backend's refusal comes with the call."""
    backend = compiler.aot_autograd(fw_compiler=lambda gm, i: 1 / 0 if i[0].shape[0] == 6 else gm.forward)
    x = torch.randn(5, 2)
    torchsmith.mark_dynamic(x, 0)
    fn = torchsmith.compile(lambda x: x.sin(), backend=backend)
    with events.recording() as got:
        for y in (x, torch.randn(6, 2)):
            close(fn(y), y.sin())
    assert [e.fields["code"] for e in got if e.kind == "fallback"] == ["BCK003"]


def test_an_operator_is_distrusted_for_its_dtypes_only():
    """One that the runtime refuses, or gets wrong, goes to torch; the same on other dtypes, and the rest of its graph, do not."""
    from torchsmith.backends.partition import partitioned
    from torchsmith.backends.plain import by_operator, run_plain
    from torchsmith.codes import Unsupported

    given, distrusted = [], set()

    def adapter(plain):
        names = [str(n.target) for n in plain.graph.nodes if n.op == "call_function"]
        if "aten.cos.default" in names:
            raise Unsupported("BCK003", detail="no cosine")
        given.append(names)
        wrong = {torch.ops.aten.sin.default} if plain.inputs[0].dtype == torch.float64 else set()
        return by_operator(plain, lambda n: torch.ops.aten.exp.default if n.target in wrong else n.target)

    def backend(fg, name):
        return run_plain(fg, lambda plain: partitioned(plain, lambda n: True, adapter, distrusted), name)

    backend.dialect = "functional"
    fn = torchsmith.compile(lambda x: (x.sin() * 2).cos() + 1, backend=backend)
    for dtype in (torch.float64, torch.float32):
        x = torch.randn(4, dtype=dtype)
        with events.recording() as got:
            for _ in range(2):
                close(fn(x), ((x.sin() * 2).cos() + 1))
        said = " ".join(e.fields["detail"] for e in got if e.kind == "fallback")
        assert "aten.cos.default: no cosine" in said and ("aten.sin.default" in said) == (dtype == torch.float64)
    assert ["aten.sin.default", "aten.mul.Tensor"] in given


def test_a_runtime_that_writes_to_its_inputs_is_not_believed():
    """What it wrote is undone, and does not widen what counts as equal."""
    from torchsmith.backends.partition import partitioned
    from torchsmith.backends.plain import by_operator, run_plain

    def adapter(plain):
        right = by_operator(plain)

        def run(*inputs):
            results = right(*inputs)
            inputs[0].mul_(1e6)
            return results

        return run

    def backend(fg, name):
        return run_plain(fg, lambda plain: partitioned(plain, lambda n: True, adapter, set()), name)

    backend.dialect = "functional"
    fn = torchsmith.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.randn(4)
    kept = x.clone()
    for _ in range(2):
        close(fn(x), kept.sin() + 1)
        assert torch.equal(x, kept)


@pytest.mark.parametrize("name", RUNTIMES)
def test_an_operator_without_a_row_is_written_out(name):
    """Its decomposition is asked about as the graph is, operands included."""
    if not registry.is_installed(registry.ROWS[name]):
        pytest.skip("not installed")
    from torchsmith.backends import onnxrt, openvino, tvm, xla_rows
    from torchsmith.backends.partition import expand
    from torchsmith.backends.plain import by_operator, run_plain

    seen = []
    takes = {"openxla": lambda n: xla_rows.kernel_of(n.target) is not None, "onnxrt": onnxrt.takes, "openvino": openvino.takes,
             "tvm": tvm.takes}[name]  # fmt: skip

    def adapter(plain):
        seen.append(expand(plain, lambda n: n.target is not torch.ops.aten.silu_backward.default and takes(n)))
        return by_operator(seen[-1])

    def backend(fg, name):
        return run_plain(fg, adapter, name)

    backend.dialect = "functional"
    g, x = torch.randn(4), torch.randn(4)
    close(torchsmith.compile(torch.ops.aten.silu_backward, backend=backend)(g, x), torch.ops.aten.silu_backward(g, x))
    assert len([n for n in seen[0].graph.nodes if n.op == "call_function"]) > 1


CONVOLUTIONS = {  # x, weight, stride, padding, dilation, groups
    "groups": ((2, 4, 9, 7), (6, 2, 3, 3), 2, 1, 1, 2), "depthwise": ((1, 4, 9, 7), (8, 1, 3, 3), 1, 2, 2, 4),
    "1d": ((2, 4, 9), (4, 1, 3), 1, 1, 1, 4),
    "strides and no batch": ((6, 8, 9), (9, 2, 1, 2), 3, 1, 1, 3), "a large kernel": ((1, 4, 12, 9), (4, 1, 9, 9), 1, 4, 1, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.skipif(not registry.is_installed(registry.ROWS["openxla"]), reason="not installed")
def test_convolutions_in_groups_stay_in_xla(name):
    """Forward, gradients, and transposed: no operator is left to torch, as one that gives wrong numbers would be."""
    shape, kernel, stride, padding, dilation, groups = CONVOLUTIONS[name]
    over = {1: (F.conv1d, F.conv_transpose1d), 2: (F.conv2d, F.conv_transpose2d)}[len(kernel) - 2]
    turned = (shape[1 - len(kernel)], kernel[0] // groups, *kernel[2:])
    for fn, weight in ((over[0], kernel), (over[1], turned)):
        more = (stride, padding, dilation, groups) if fn is over[0] else (stride, 0, 0, groups, dilation)

        def f(x, w, fn=fn, more=more):
            return fn(x, w, None, *more).sin()

        given = [torch.randn(s, requires_grad=True) for s in (shape, weight)]
        other = [t.detach().clone().requires_grad_() for t in given]
        with torch.enable_grad(), events.recording() as got:
            want, result = f(*given), torchsmith.compile(f, backend="openxla")(*other)
            for out in (want, result):
                out.sum().backward()
        assert not [e for e in got if e.kind == "fallback"]
        for mine, eager in zip([result, *[t.grad for t in other]], [want, *[t.grad for t in given]], strict=True):
            close(mine, eager)


def test_results_through_narrow_numbers_are_as_rough_as_those():
    from torchsmith.backends.partition import CLOSE, roughness
    from torchsmith.backends.plain import run_plain

    seen = []

    def backend(fg, name):
        return run_plain(fg, lambda plain: seen.append(roughness(plain)) or 1 / 0, name)

    backend.dialect = "functional"
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        fn = torchsmith.compile(lambda x, i: ((x.bfloat16() @ x.bfloat16()).float(), x.sin(), i + 1), backend=backend)
        fn(torch.ones(2, 2), torch.arange(3))
    assert seen == [[CLOSE[torch.bfloat16], CLOSE[torch.float32], 0.0]]


def test_rounding_that_a_graph_makes_large_is_no_fault():
    """Each operator alone is torch's; together a last place in the middle moves the result, as a ReLU at zero does in a deep network."""
    from torchsmith.backends.partition import partitioned
    from torchsmith.backends.plain import by_operator, run_plain

    for wrong in (False, True):
        calls, distrusted = [], set()

        def adapter(plain, calls=calls, wrong=wrong):
            def run(*inputs):
                calls.append(len(plain.graph.nodes))
                found = [t.to(torch.float32) for t in by_operator(plain)(*[t.double() for t in inputs])]
                return [-t for t in found] if wrong and len(plain.graph.nodes) > 4 else found

            return run

        def backend(fg, name, adapter=adapter, distrusted=distrusted):
            return run_plain(fg, lambda plain: partitioned(plain, lambda n: True, adapter, distrusted), name)

        def f(x):
            return ((x + 0.1).cos() * 1e5).sin()

        backend.dialect = "functional"
        fn, x = torchsmith.compile(f, backend=backend), torch.zeros(4)  # the inputs' last places move nothing
        with events.recording() as got:
            fn(x)
            before = len(calls)
            assert (fn(x) - f(x)).abs().max() <= (0.0 if wrong else 0.1)
        assert [e.fields["code"] for e in got if e.kind == "fallback"] == ["BCK005"] * wrong and not distrusted
        assert (len(calls) > before) != wrong


@pytest.mark.skipif(importlib.util.find_spec("torchax") is None, reason="torchax is not installed")
def test_a_piece_of_xla_lies_on_one_device():
    from torchsmith.backends import xla
    from torchsmith.backends.plain import PlainGraph
    from torchsmith.graph.spec import TensorSpec

    def piece(*devices):
        specs = [TensorSpec(torch.float32, (3,), (1,), d) for d in devices]
        graph = torch.fx.Graph()
        for i, spec in enumerate(specs):
            graph.placeholder(f"x{i}").meta["spec"] = spec
        graph.output(())
        return PlainGraph(graph, tuple(specs), "piece")

    assert xla.place(piece("cpu")).platform == xla.place(piece()).platform == "cpu"
    with pytest.raises(ValueError, match="cpu and cuda:0"):
        xla.place(piece("cuda:0", "cpu"))


@pytest.mark.skipif(not registry.is_installed(registry.ROWS["openxla"]), reason="not installed")
def test_strides_of_single_elements_say_nothing_to_xla():
    fn = torchsmith.compile(lambda x: (x.t() @ x, x + 1), backend="openxla", fullgraph=True)
    for x in (torch.randn(5, 1), torch.randn(1, 5).t(), torch.empty_strided((5, 1), (1, 7)).fill_(2)):
        torch.testing.assert_close(fn(x), (x.t() @ x, x + 1))


def train_model(model, data, target, optimizer):
    """As in the XLA document."""
    pred = model(data)
    loss = torch.nn.CrossEntropyLoss()(pred, target)
    loss.backward()
    optimizer.step()
    return pred


@pytest.mark.parametrize("name", [needs("openxla"), needs("onnxrt", pytest.mark.heavy)])
def test_a_whole_training_step_is_one_program(name, monkeypatch):
    """Forward, loss, backward and optimizer, dropout with eager's draws: the gap that the document names."""
    from torchsmith.backends import xla

    real, programs = xla.program, []
    monkeypatch.setattr(xla, "program", lambda plain: programs.append(plain) or real(plain))
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 5))
    other = copy.deepcopy(net)
    x, target = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2) for m in (net, other))
    step = torchsmith.compile(train_model, backend=name)
    with torch.enable_grad(), events.recording() as got:
        for i in range(3):
            torch.manual_seed(i)
            want = train_model(net, x, target, one)
            torch.manual_seed(i)
            torch.testing.assert_close(step(other, x, target, two), want, rtol=1e-4, atol=1e-5)
    for (p, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=p)
    assert {e.fields["code"] for e in got if e.kind == "fallback"} <= {"BCK005"}  # what a converter gets wrong is torch's
    if name == "openxla":
        assert not [e for e in got if e.kind == "fallback"]
        assert len(programs) == 2  # the first step (no momentum yet) and all later ones


@pytest.mark.skipif(importlib.util.find_spec("torchax") is None, reason="torchax is not installed")
def test_a_transformers_step_is_one_xla_program(monkeypatch):
    """Attention with dropout draws in the middle; its draws move in front, and all else is one program."""
    from torchsmith.backends import xla

    real, programs = xla.program, []
    monkeypatch.setattr(xla, "program", lambda plain: programs.append(plain) or real(plain))
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, activation="gelu", batch_first=True)
    net = nn.Sequential(nn.Embedding(11, 8), layer, nn.Flatten(), nn.Linear(24, 5))
    other = copy.deepcopy(net)
    x, target = torch.randint(0, 11, (4, 3)), torch.randint(0, 5, (4,))
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=1e-2) for m in (net, other))
    step = torchsmith.compile(train_model, backend="openxla")
    with torch.enable_grad(), events.recording() as got:
        for i in range(3):
            one.zero_grad()
            two.zero_grad()
            torch.manual_seed(i)
            want = train_model(net, x, target, one)
            torch.manual_seed(i)
            torch.testing.assert_close(step(other, x, target, two), want, rtol=1e-4, atol=1e-5)
    assert not [e for e in got if e.kind == "fallback"]
    assert len(programs) == sum(e.kind == "graph" for e in got) == 1


def test_safe_softmax_in_jax():
    jax = pytest.importorskip("jax")
    from torchsmith.backends.xla_rows import kernel_of

    x = torch.randn(2, 4)
    x[0], x[1, 1] = -torch.inf, -torch.inf
    op = torch.ops.aten._safe_softmax.default
    torch.testing.assert_close(torch.from_dlpack(kernel_of(op)(jax.numpy.asarray(x.numpy()), -1)), op(x, -1))


def whole_numbers(a, b, c):
    sums = a.sum(), a.prod(), a.cumsum(0), c.cumsum(0, dtype=c.dtype)
    return a % 5, a**2, a * b, a + b, a ^ b, ~a, -a, a << 2, torch.cat([a, b]), c + c, *sums


@pytest.mark.parametrize("name", RUNTIMES)
def test_integers_wrap_around_as_eagers(name):
    """Numbers of the first call are small; what is right for them is wrong for others in a runtime that saturates or has fewer bits."""
    if not registry.is_installed(registry.ROWS[name]):
        pytest.skip("not installed")
    fn, real = torchsmith.compile(whole_numbers, backend=name), torch.linspace(0, 3, 5, dtype=torch.float64)
    for a in (torch.tensor([7, 5, 12]), torch.tensor([-7, 2**62 + 5, -(2**40)]), torch.tensor([2**33 + 1, -(2**63), 2**63 - 1])):
        b, c = torch.tensor([2, 2**41 if a[0] != 7 else 3, -3]), torch.tensor([1, 250 if a[0] != 7 else 2, 9], dtype=torch.uint8)
        for mine, want in zip(fn(a, b, c), whole_numbers(a, b, c), strict=True):
            assert torch.equal(mine, want)
    close(torchsmith.compile(lambda x: x.sin().exp(), backend=name)(real), real.sin().exp(), 1e-12)


def test_draws_move_in_front_of_what_is_taken():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.ops.aten.sin.default, (x,))
    r = graph.call_function(torch.ops.aten.rand.default, ([3],))
    b = graph.call_function(torch.ops.aten.mul.Tensor, (a, r))
    graph.output((b,))
    for n in graph.nodes:
        n.meta["spec"] = None
    pieces = cut(graph, lambda n: True)
    assert [(p.taken, [n.name for n in p.nodes]) for p in pieces] == [(False, [r.name]), (True, [a.name, b.name])]


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_a_partners_own_backend_runs_under_our_capture():
    """The entry point that OpenVINO's package registers for torch.compile."""
    from importlib.metadata import entry_points

    (point,) = [p for p in entry_points(group="torch_dynamo_backends") if p.name == "openvino"]
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(torchsmith.compile(net, backend=point.load())(x), net(x), 1e-2)  # it computes in bfloat16 where there is AMX


# ---------------------------------------------------------------- ours under PyTorch's capture


def test_under_torch_compile():
    from torchsmith.backends.torch_compile import torchsmith as backend

    def f(x, w):
        return torch.softmax(x @ w, -1).sum(1) * x.shape[0]

    c = torch.compile(f, backend=backend)
    with events.recording() as got:
        for n in (4, 5, 9, 1):
            x, w = torch.randn(n, 8), torch.randn(8, 8)
            torch.testing.assert_close(c(x, w), f(x, w))
    assert [e.fields["report"].road for e in got if e.kind == "graph"] == ["native"] * 3  # 4; any above 1; 1


def test_training_under_torch_compile():
    from torchsmith.backends.torch_compile import torchsmith as backend

    with torch.enable_grad(), events.recording() as got:
        net, x = Net().train(), torch.randn(2, 3, 8, 8)
        other = copy.deepcopy(net)
        net(x)[0].square().sum().backward()
        torch.compile(other, backend=backend)(x)[0].square().sum().backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.norm.running_mean, net.norm.running_mean)
    assert [e.fields["report"].road for e in got if e.kind == "graph"] == ["native", "native"]


# ---------------------------------------------------------------- graphs that servers bring


def test_standalone_compile_saves_and_loads(tmp_path):
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x, w):
        return [torch.relu(x @ w), None, x.sum(0)]

    x, w = torch.randn(4, 8), torch.randn(8, 3)
    gm = make_fx(f, tracing_mode="symbolic")(x, w)
    artifact = standalone_compile(gm, [x, w])
    for kind in ("binary", "unpacked"):
        artifact.save(path=tmp_path / kind, format=kind)
        again = CompiledArtifact.load(path=tmp_path / kind, format=kind)
        for n in (4, 9):
            x = torch.randn(n, 8)
            got, want = again(x, w), f(x, w)
            assert got[1] is None
            torch.testing.assert_close(got[0], want[0])
            torch.testing.assert_close(got[2], want[2])
        for inputs, said in (((x,), r"takes 2 inputs \(x_1, w_1\), not 1"), ((x, 3), r"input 1 \(w_1\) must be a tensor, not int"),
                             ((x, w.double()), r"input 1 \(w_1\) must be torch.float32, not torch.float64"),
                             ((x, w[:5]), r"input 1 \(w_1\) must have shape .* which is \(8, 3\) here, not \(5, 3\)"),
                             ((torch.randn(8, 9).t(), w), r"input 0 \(x_1\) must have strides \(8, 1\), not \(1, 9\)")):  # fmt: skip
            for called in (artifact, again):
                with pytest.raises((TypeError, ValueError), match=said):
                    called(*inputs)
    assert len(again.expected.entries) == 1  # one check in C, whatever the sizes
    data = bytearray((tmp_path / "binary").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged|not a compiled artifact"):
        CompiledArtifact.load(path=tmp_path / "bad")
    with pytest.raises(ValueError, match="format"):
        artifact.save(path=tmp_path / "x", format="zip")


def test_standalone_compile_takes_what_servers_pass():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(4, 8)
    gm = make_fx(lambda x: (x.sin(),))(x)
    patches = {"config_patches": {"max_autotune": False, "enable_auto_functionalized_v2": False, "cpp.threads": 1}}
    artifact = standalone_compile(gm, (x,), dynamic_shapes="from_tracing_context", options=patches, donate_graph_module=True)
    torch.testing.assert_close(artifact(x)[0], x.sin())
    for options, said in (({"config_patches": {"cpp.thread": 1}}, "unknown option 'cpp.thread'; did you mean 'cpp.threads'"),
                          ({"config_patches": 3}, "config_patches is a dict of options, not int")):  # fmt: skip
        with pytest.raises((RuntimeError, TypeError), match=said):
            standalone_compile(gm, (x,), options=options)
    with pytest.raises(TypeError, match=r"input 0 \(x_1\) must be a tensor, not ndarray"):
        artifact(x.numpy())
    for nested in (lambda x: {"a": x.sin()}, lambda x: (x, (x.sin(),))):
        with pytest.raises(TypeError, match="a graph gives a flat list of results"):
            standalone_compile(make_fx(nested)(x), (x,))


def test_an_artifacts_constant_that_is_read_twice(tmp_path):
    net = nn.Linear(3, 3)
    net.register_buffer("b", torch.randn(3))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x) * self.net.b + self.net.b

    x = torch.randn(2, 3)
    artifact = standalone_compile(torch.fx.symbolic_trace(Twice()), [x])
    artifact.save(path=tmp_path / "a")
    close(CompiledArtifact.load(path=tmp_path / "a")(x)[0], Twice()(x))
    with pytest.raises(TypeError, match=r"gm is a torch\.fx\.GraphModule"):
        standalone_compile(Twice(), [x])


def test_a_backend_of_functional_graphs():
    from torchsmith.backends.plain import by_operator, run_plain

    seen = []

    def backend(fg, name):
        return run_plain(fg, lambda plain: seen.append(plain) or by_operator(plain), name)

    backend.dialect = "functional"
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    z = x.clone()
    close(torchsmith.compile(effects, backend=backend)(x, y)[:4], effects(z, y)[:4])
    assert len(seen) == 1 and not any(n.op == "call_method" for n in seen[0].graph.nodes)


@pytest.mark.skipif(importlib.util.find_spec("torchax") is None, reason="torchax is not installed")
def test_weights_are_handed_to_xla_once_and_seen_when_written(monkeypatch):
    from torchsmith.backends import xla

    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval(), torch.randn(4, 8)
    fn, handed, real = torchsmith.compile(model, backend="openxla"), [], xla.to_jax
    monkeypatch.setattr(xla, "to_jax", lambda t: handed.append(t) or real(t))

    def check():
        del handed[:]
        torch.testing.assert_close(fn(x), model(x))
        return len(handed)

    with torch.no_grad():
        check()
        assert check() == 1  # x
        model[0].weight.add_(1)
        model[1].running_mean.uniform_()
        assert check() == 1
        model[0].weight.data = torch.randn(8, 8)
        assert check() == 2
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        check()
        assert check() == 2  # in another order: a copy, each time
