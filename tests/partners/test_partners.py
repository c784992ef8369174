"""Backends written for torch.compile (entry points of group torch_dynamo_backends) under our capture: what they get, what they assume."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd as dynamo_aot
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

import torchsmith
from torchsmith import compiler, events
from torchsmith.backends import registry
from torchsmith.backends.xla import precision


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Point:
    """An entry point, as importlib.metadata gives it."""

    def __init__(self, fn, name, group="torch_dynamo_backends"):
        self.load, self.name, self.group, self.value, self.dist = (lambda: fn), name, group, "toy:backend", None


def looking(seen):
    """A backend that asks what such backends ask."""
    def toy(gm, example_inputs, *, options=None):
        nodes = list(gm.graph.nodes)
        given = [n for n in nodes if n.op == "placeholder"]
        mode = TracingContext.get().fake_mode
        values = [n.meta["example_value"] for n in nodes if n.op != "output"]
        fakes = [v for v in values if isinstance(v, torch.Tensor)]
        assert len(given) == len(example_inputs) and all(isinstance(v, FakeTensor) and v.fake_mode is mode for v in fakes)
        assert not any(n.op in ("get_attr", "call_module") for n in nodes)  # parameters are inputs
        assert all("File " in n.stack_trace for n in nodes if n.op.startswith("call"))
        kinds = [type(v) for v in example_inputs]
        seen.append({"shapes": [tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in values], "kinds": kinds, "options": options})
        return gm.forward

    return toy


def test_what_a_partner_receives(monkeypatch):
    """Found by its entry point, with its options; fake values of one mode, PyTorch's symbols, lifted parameters, a tracing context."""
    seen = []
    monkeypatch.setattr(registry, "_from_packages", lambda: {"toy": Point(looking(seen), "toy")})
    assert "toy" in torchsmith.compiler.list_backends()
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    fn = torchsmith.compile(net, backend="toy", dynamic=True, options={"speed": 1})
    for n in (5, 7, 2):
        x = torch.randn(n, 4)
        torch.testing.assert_close(fn(x), net(x))
    assert len(seen) == 1 and seen[0]["options"] == {"speed": 1}
    assert seen[0]["kinds"] == [torch.Tensor, nn.Parameter, nn.Parameter]
    rows = seen[0]["shapes"][0][0]
    assert isinstance(rows, torch.SymInt) and rows.node.expr.is_Symbol
    assert [s[0].node.expr == rows.node.expr for s in seen[0]["shapes"][3:]] == [True, True]  # the results' too
    torch.testing.assert_close(fn(torch.ones(1, 4)), net(torch.ones(1, 4)))  # PyTorch's symbols are not 1
    assert len(seen) == 2


def test_a_graph_without_operators_is_no_backends():
    """As under torch.compile."""
    seen = []
    x = torch.randn(3)
    for f, arg in ((lambda x: x, x), (lambda n: n + 1, 3)):
        assert torchsmith.compile(f, backend=looking(seen))(arg) is f(arg)
    assert not seen


def test_numbers_are_symbols_too():
    seen = []
    fn = torchsmith.compile(lambda x, n: x.repeat(n, 1) * x.shape[0], backend=looking(seen), dynamic=True)
    for n, k in ((3, 2), (3, 5), (7, 3), (2, 9)):
        x = torch.randn(n, 4)
        torch.testing.assert_close(fn(x, k), x.repeat(k, 1) * n)
    assert [s["kinds"] for s in seen] == [
        [torch.SymInt, torch.Tensor], [torch.SymInt, torch.Tensor, torch.SymInt]  # a number is one until it changes
    ]  # fmt: skip


@pytest.mark.parametrize("question", [
    int, lambda rows: rows > 4, lambda rows: rows % 2 == 0, lambda rows: max(rows, 6) == 6, lambda rows: rows == 5,
])  # fmt: skip
def test_what_a_partner_assumes_is_guarded(question):
    asked = []

    def backend(gm, inputs):
        answer = question(next(n for n in gm.graph.nodes if n.op == "placeholder").meta["example_value"].shape[0])
        answer = bool(answer) if isinstance(answer, torch.SymBool) else answer
        asked.append(answer)

        def run(*a):
            right = question(a[0].shape[0])
            assert right == answer, "called where its answer does not hold"
            return gm.forward(*a)

        return run

    fn = torchsmith.compile(lambda x: x.sin(), backend=backend, dynamic=True, fullgraph=True)
    for n in (5, 6, 9, 3, 4, 5):
        x = torch.randn(n, 2)
        torch.testing.assert_close(fn(x), x.sin())
    assert len(asked) > 1


def test_a_partners_aot_autograd_trains_with_sizes_that_vary():
    graphs = []

    def record(gm, inputs):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.GELU())
    other = copy.deepcopy(net)
    fn = torchsmith.compile(other, backend=dynamo_aot(fw_compiler=record, bw_compiler=record), dynamic=True)
    with events.recording() as got:
        for n in (5, 7, 3):
            x = torch.randn(n, 4)
            net(x).sin().sum().backward()
            fn(x).sin().sum().backward()
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)
    torch.testing.assert_close(other[1].running_mean, net[1].running_mean)
    assert len(graphs) == 2 and not [e for e in got if e.kind == "fallback"]


def test_what_our_words_do_not_say_is_compiled_for_each_set_of_sizes():
    seen = []
    fn = torchsmith.compile(lambda x, k: x * k + x.shape[0], backend=looking(seen), dynamic=True)
    for n, k in ((3, 0.5), (5, 1.5), (3, 2.5), (7, 3.5)):
        x = torch.randn(n, 4)
        torch.testing.assert_close(fn(x, k), x * k + n)
    assert seen


def test_a_partner_that_raises_is_named():
    def partner(gm, inputs):
        raise ImportError("its library is another version")

    x = torch.randn(3)
    with pytest.warns(UserWarning, match="backend 'partner' raised ImportError: its library is another version"):
        torch.testing.assert_close(torchsmith.compile(lambda x: x + 1, backend=partner, dynamic=True)(x), x + 1)
    with pytest.raises(torchsmith.BackendFailed, match="backend 'partner' raised ImportError"):
        torchsmith.compile(lambda x: x + 2, backend=partner, fullgraph=True)(x)


def traced(gm, inputs):
    return make_fx(gm)(*inputs)


def as_it_is(gm, inputs):
    return make_boxed_func(gm.forward)


def boxed(gm, inputs):
    return aot_module_simplified(gm, inputs, fw_compiler=as_it_is)


def rewritten(gm, inputs):
    assert torch.fx.replace_pattern(gm, lambda a: torch.sin(a) + 0, lambda a: torch.cos(torch.pi / 2 - a))  # traces symbolically
    gm.recompile()
    return gm


class Interpreted:
    def __init__(self, gm, inputs):
        self.gm = gm

    def __call__(self, *args):
        return torch.fx.Interpreter(self.gm).run(*args)


def scripted(gm, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(gm, tuple(inputs))


def interpreted(gm, inputs):
    return Interpreted(gm, inputs)


USERS = {  # backend -> how often it is asked for sizes that vary
    "traced": (traced, 4), "boxed": (boxed, 1), "rewritten": (rewritten, 1), "interpreted": (interpreted, 1),
    "scripted": (scripted, 5), "handed on": (compiler.lookup_backend("inductor"), 1),
    "to a functional backend": (compiler.lookup_backend("aot_eager"), 1), "aot": (dynamo_aot(fw_compiler=as_it_is), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", USERS)
def test_backends_that_users_write(name):
    """Callables, not registered: with example inputs they trace, prove and rewrite; a size that varies is no constant to them."""
    backend, times = USERS[name]
    asked = []

    def counting(gm, inputs):
        asked.append(inputs)
        return backend(gm, inputs)

    def f(x):
        rows = x.shape[0]
        return (torch.sin(x) + 0) * rows, torch.arange(rows * 2) + rows

    fn = torchsmith.compile(f, backend=counting, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for n in (5, 7, 2, 9):
            x = torch.randn(n, 3)
            for mine, want in zip(fn(x), f(x), strict=True):
                torch.testing.assert_close(mine, want)
    assert len(asked) == times


def runs_it_first(gm, inputs):
    gm(*inputs)
    return gm.forward


def traced_again(gm, inputs):
    return torch.fx.symbolic_trace(gm).forward


def without_dead_code(gm, inputs):
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm.forward


def exported(gm, inputs):
    return torch.export.export(gm, tuple(inputs), strict=False).module()


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.norm.num_batches_tracked = None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        y = self.norm(x).sin()
        y.mul_(2)
        y **= 2
        return y * self.count


@pytest.mark.parametrize("backend", [runs_it_first, traced_again, without_dead_code, exported])
def test_writes_happen_once_whatever_a_backend_does_to_its_graph(backend):
    net = Writing()
    other = copy.deepcopy(net)
    fn = torchsmith.compile(other, backend=backend, fullgraph=True)
    for _ in range(2):
        x = torch.randn(4, 3)
        torch.testing.assert_close(fn(x), net(x))
    torch.testing.assert_close(other.state_dict(), net.state_dict())


def test_a_class_is_a_backend():
    x = torch.randn(3)
    torch.testing.assert_close(torchsmith.compile(lambda x: x.sin(), backend=Interpreted, fullgraph=True)(x), x.sin())


def test_what_a_backend_did_to_its_graph_before_it_failed_is_not_seen():
    def spoils(gm, inputs):
        for n in gm.graph.nodes:
            n.target = torch.cos if n.target is torch.sin else n.target
        gm.recompile()
        raise ValueError("enough")

    x = torch.randn(3)
    with pytest.warns(UserWarning, match="backend 'spoils' raised ValueError: enough"):
        torch.testing.assert_close(torchsmith.compile(lambda x: torch.sin(x) + 1, backend=spoils)(x), x.sin() + 1)


@pytest.mark.parametrize("wide", [True, False])
def test_xla_multiplies_as_exactly_as_torch_does_on_a_gpu(wide, monkeypatch):
    """Its own default for float32 there is TF32; convolutions have a switch of their own."""
    asked = {("cuda", "matmul"): "tf32" if wide else "none", ("cuda", "conv"): "ieee" if wide else "tf32"}
    monkeypatch.setattr(torch._C, "_get_fp32_precision_getter", lambda *names: asked[names])
    assert precision(torch.ops.aten.addmm.default) == ("tensorfloat32" if wide else "float32")
    assert precision(torch.ops.aten.convolution.default) == ("float32" if wide else "tensorfloat32")
