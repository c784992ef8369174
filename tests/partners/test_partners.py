"""Backends written for torch.compile (entry points of group torch_dynamo_backends) under our capture: what they get, what they assume."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

import torchsmith
from torchsmith import events
from torchsmith.backends import registry
from torchsmith.backends.partners import as_partner


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Point:
    """An entry point, as importlib.metadata gives it."""

    def __init__(self, fn, name, group="torch_dynamo_backends"):
        self.load, self.name, self.group = (lambda: fn), name, group


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


def test_numbers_are_symbols_too():
    seen = []
    fn = torchsmith.compile(lambda x, n: x.repeat(n, 1) * x.shape[0], backend=as_partner(looking(seen)), dynamic=True)
    for n, k in ((3, 2), (3, 5), (7, 3), (2, 9)):
        x = torch.randn(n, 4)
        torch.testing.assert_close(fn(x, k), x.repeat(k, 1) * n)
    assert [s["kinds"] for s in seen] == [[torch.Tensor], [torch.Tensor, torch.SymInt]]  # a number is one until it changes


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

    fn = torchsmith.compile(lambda x: x.sin(), backend=as_partner(backend), dynamic=True, fullgraph=True)
    for n in (5, 6, 9, 3, 4, 5):
        x = torch.randn(n, 2)
        torch.testing.assert_close(fn(x), x.sin())
    assert len(asked) > 1


def test_a_partners_aot_autograd_trains_with_sizes_that_vary():
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    graphs = []

    def compiler(gm, inputs):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.GELU())
    other = copy.deepcopy(net)
    fn = torchsmith.compile(other, backend=as_partner(aot_autograd(fw_compiler=compiler, bw_compiler=compiler)), dynamic=True)
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
    fn = torchsmith.compile(lambda x, k: x * k + x.shape[0], backend=as_partner(looking(seen)), dynamic=True)
    for n, k in ((3, 0.5), (5, 1.5), (3, 2.5), (7, 3.5)):
        x = torch.randn(n, 4)
        torch.testing.assert_close(fn(x, k), x * k + n)
    assert seen


def test_a_partner_that_raises_is_named():
    def partner(gm, inputs):
        raise ImportError("its library is another version")

    x = torch.randn(3)
    with pytest.warns(UserWarning, match="backend 'partner' raised ImportError: its library is another version"):
        torch.testing.assert_close(torchsmith.compile(lambda x: x + 1, backend=as_partner(partner), dynamic=True)(x), x + 1)
    with pytest.raises(torchsmith.BackendFailed, match="backend 'partner' raised ImportError"):
        torchsmith.compile(lambda x: x + 2, backend=as_partner(partner), fullgraph=True)(x)
