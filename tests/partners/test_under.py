"""torch.compile(backend="torchsmith"): programs of under_programs.py against eager; tokens, threads, modes, errors."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy import functions as fn
from under_programs import PROGRAMS

import torchsmith
from torchsmith import events
from torchsmith.backends.foreign import Foreign, evaluate
from torchsmith.backends.torch_compile import torchsmith as ours
from torchsmith.codes import Unsupported
from torchsmith.graph.sizes import SizeFacts
from torchsmith.ir.nested import leaves


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def same(mine, eager, tolerance):
    mine, eager = leaves(mine), leaves(eager)
    assert len(mine) == len(eager)
    for a, b in zip(mine, eager, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        assert a.stride() == b.stride() or not b.numel()
        real = b.is_floating_point() or b.is_complex()
        most = float(b.detach().abs().max()) if b.numel() and real else 0.0
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=max(tolerance * most, 1e-5 if real else 0.0))


def grads(t):
    return [x.grad for x in leaves(t) if isinstance(x, torch.Tensor)]


def go_back(out):
    roots = [o for o in leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
    if roots:
        torch.stack([o.float().sin().sum() for o in roots]).sum().backward()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.heavy] if p.heavy else []) for n, p in PROGRAMS.items()])
def test_a_program_equals_eager(name):
    p = PROGRAMS[name]
    fn = p.make()
    other = copy.deepcopy(fn)
    with torch.set_grad_enabled(p.train), events.recording() as got:
        compiled = torch.compile(other, backend=ours, dynamic=p.dynamic)
        for k, args in enumerate(p.calls()):
            theirs = copy.deepcopy(args)  # what shares memory still does
            torch.manual_seed(k)
            want = fn(*args)
            torch.manual_seed(k)
            mine = compiled(*theirs)
            if p.train:
                go_back(want)
                go_back(mine)
            same((mine, theirs, grads(theirs)), (want, args, grads(args)), p.tolerance)
            if isinstance(fn, nn.Module):
                same(list(other.state_dict().values()), list(fn.state_dict().values()), p.tolerance)
                same(grads(list(other.parameters())), grads(list(fn.parameters())), p.tolerance)
    assert {e.fields["code"] for e in got if e.kind == "fallback"} <= {"GRA010"}  # operators that become several
    graphs = [e.fields["report"].road for e in got if e.kind == "graph"]
    assert set(graphs) == {"native"} or name == "recurrent"  # PyTorch's capture breaks at an LSTM


def test_calls_in_the_order_of_tokens():
    """PyTorch orders checks by tokens; an inverse that does not exist is still eager's error, with gradients and without."""
    def f(x):
        return torch.linalg.inv(x) * 2

    compiled, x = torch.compile(f, backend=ours), torch.randn(3, 3, requires_grad=True)
    with events.recording() as got:
        compiled(x).sum().backward()
    assert torch.allclose(x.grad, torch.autograd.grad(f(x).sum(), x)[0], rtol=1e-3, atol=1e-4)
    assert [e.fields["report"].road for e in got if e.kind == "graph"] == ["native", "native"]
    for singular in (torch.zeros(3, 3), torch.zeros(3, 3, requires_grad=True)):
        with pytest.raises(torch.linalg.LinAlgError, match=r"linalg.inv: .*singular"):
            compiled(singular)


def test_threads_share_what_is_compiled():
    def f(x):
        return torch.softmax(x @ x.t(), -1).sum(0)

    compiled, wrong = torch.compile(f, backend=ours, dynamic=True), []

    def work(k):
        for n in (3, 5, 9, 4, 7):
            x = torch.randn(n + k, 4)
            if not torch.allclose(compiled(x), f(x), atol=1e-5):
                wrong.append((k, n))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_modes_and_options():
    x = torch.randn(3)
    for how in ({"mode": "reduce-overhead"}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"cpp.threads": 1}}):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(lambda x: x.sin() * 2, backend=ours, **how)(x), x.sin() * 2)
    for how, said in (({"mode": "fast"}, "unknown mode 'fast'"), ({"options": {"epilog": 1}}, "unknown option 'epilog'")):
        with pytest.raises(Exception, match=said):
            torch.compile(lambda x: x.cos(), backend=ours, **how)(x)


_A, _B = sympy.Symbol("a", integer=True, positive=True), sympy.Symbol("b", integer=True, positive=True)
NUMBERS = [  # 7 for a, 3 for b
    (_A**2, 49), (_A + 2 * _B - 1, 12), (fn.FloorDiv(_A, _B), 2), (fn.FloorDiv(_A - 20, _B), -5), (fn.Mod(_A, _B), 1),
    (fn.PythonMod(_A - 20, _B), 2), (fn.ModularIndexing(_A, _B, 2), 0), (fn.Max(_A, _B), 7), (fn.Min(_A, _B), 3),
    (sympy.And(sympy.Lt(_B, _A), sympy.Gt(_B, 1)), True), (sympy.Eq(_A, _B), False), (sympy.Ne(_A, _B), True),
    (fn.Where(sympy.Lt(_B, _A), _A, _B), 7), (fn.CeilToInt(fn.IntTrueDiv(_A, _B)), 3), (fn.FloorToInt(fn.IntTrueDiv(_A, _B)), 2),
    (fn.TruncToInt(fn.IntTrueDiv(_A, _B)), 2), (fn.RoundToInt(fn.IntTrueDiv(_A, _B)), 2), (fn.Identity(_A), 7),
    (fn.CleanDiv(_A * _B, _B), 7),
    (fn.PowByNatural(_A, sympy.Integer(3)), 343), (sympy.Abs(_A - 3 * _B), 2), (fn.ToFloat(_A) / 2, 3.5), (sympy.Integer(5), 5),
]  # fmt: skip


@pytest.mark.parametrize("expr, value", NUMBERS, ids=[str(e) for e, _ in NUMBERS])
def test_numbers_of_the_other_capture(expr, value):
    facts = SizeFacts()
    found = evaluate(expr, {_A: facts.fresh(7, ("size", 0, 0)), _B: facts.fresh(3, ("size", 0, 1))})
    assert (found.node.hint if hasattr(found, "node") else found) == value


def test_a_number_that_no_input_tells():
    with pytest.raises(Unsupported, match="BCK004"):
        evaluate(_A + sympy.Symbol("c", integer=True), {_A: SizeFacts().fresh(7, ("size", 0, 0))})


def test_functions_of_ours_are_opaque_to_torch_compile():
    """torch.compile breaks at a compiled function and looks into none of our frames; what follows is its own again."""
    graphs, x = [], torch.randn(4, 5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU())
    inner, compiled = torchsmith.compile(lambda x: x.sin() + 1), torchsmith.compile(model)

    def backend(gm, inputs):
        graphs.append([n.name for n in gm.graph.nodes if n.op.startswith("call")])
        return gm.forward

    torch.compiler.reset()
    outer = torch.compile(lambda x: compiled(inner(x.cos())).sin(), backend=backend)
    want = model(x.cos().sin() + 1).sin()
    for _ in range(2):
        got = outer(x)
        torch.testing.assert_close(got, want)
    got.sum().backward()
    assert graphs == [["cos"], ["sin"]] and model[0].weight.grad is not None
    whole = torch.compile(compiled, backend=backend)
    torch.testing.assert_close(whole(x), model(x))
    assert len(graphs) == 2


def test_dynamos_names_mean_the_same_here():
    """Its graph_break and error_on_graph_break inside of a compiled function; its registered backends by name."""
    x = torch.randn(4, 5)

    def parts(x):
        y = x + 1
        torch._dynamo.graph_break("here")
        with torch._dynamo.error_on_graph_break(True):
            y = y * 2
            with torch._dynamo.error_on_graph_break(False):
                torch._dynamo.graph_break()
        return y - 1

    def strict(x):
        with torch._dynamo.error_on_graph_break(True):
            torch._dynamo.graph_break()
        return x

    with events.recording() as got:
        torch.testing.assert_close(torchsmith.compile(parts, backend="eager")(x), parts(x))
    assert "graph_break('here')" in str([e.fields.get("detail") for e in got if e.kind == "graph_break"])
    with pytest.raises(Unsupported, match="graph_break"):
        torchsmith.compile(strict, backend="eager")(x)
    torch._dynamo.register_backend(lambda gm, inputs: gm.forward, name="of_torchs_registry")
    torch.testing.assert_close(torchsmith.compile(lambda x: x + 1, backend="of_torchs_registry")(x), x + 1)


def test_memory_that_pytorch_joined_is_checked():
    """PyTorch hands inputs that share memory over as one tensor and does not guard that they do: the next ones' is smaller."""

    def f(x, y):
        x.add_(1)
        y.mul_(2)
        return x + y

    compiled, t = torch.compile(f, backend="torchsmith"), torch.randn(4, 4)
    u = t.clone()
    torch.testing.assert_close(compiled(t[:3], t[1:]), f(u[:3], u[1:]))
    torch.testing.assert_close(t, u)
    refused = pytest.raises(RuntimeError, match="out of bounds")
    with events.recording() as got, pytest.warns(UserWarning, match="must have 2 dimensions, not 1"), refused:
        compiled(torch.randn(3, 4), torch.randn(3, 4))
    assert any(e.fields.get("code") == "BCK007" for e in got)


def test_memory_that_holds_values_conjugated_is_not_read_as_it_is():
    """Their graphs run eagerly (GRA011)."""
    compiled, z = torch.compile(lambda x: (x * 2, x.abs()), backend="torchsmith"), torch.randn(3, dtype=torch.complex64)
    with events.recording() as got, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in (z, z.conj(), z.imag, z.conj().imag):
            torch.testing.assert_close(compiled(t), (t * 2, t.abs()))
    assert [e.fields["code"] for e in got if e.kind == "fallback"] == ["GRA011", "GRA011"]


def test_the_users_tensors_carry_nothing_of_a_compilation():
    layer = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    for scale in (2.0, 3.0):  # graphs that share parameters
        gm = torch.fx.symbolic_trace(torch.nn.Sequential(layer, torch.nn.Hardtanh(-scale, scale)))
        (got,) = torchsmith.standalone_compile(gm, (x,))(x)
        torch.testing.assert_close(got, layer(x).clamp(-scale, scale).detach())
        assert not layer.weight.__dict__
        copy.deepcopy(gm)

    def loss(a):
        return torch.nn.functional.cross_entropy(a, torch.tensor([0, 1]), label_smoothing=0.1)

    a = torch.randn(2, 3, requires_grad=True)
    torch.compile(loss, backend="torchsmith")(a).backward()  # PyTorch copies the backward graph, constants included
    want = torch.autograd.grad(loss(a), a)[0]
    torch.testing.assert_close(a.grad, want)


def test_results_are_handed_on_as_they_came():
    """Nothing is copied per call where every result is computed; what native code gives beyond them is left out."""
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (x.sin(), x.cos()))(torch.randn(3))
    given = (1, 2)
    assert Foreign(gm, [torch.randn(3)]).around(lambda x: given)(0) is given
    assert Foreign(gm, [torch.randn(3)]).around(lambda x: (1, 2, 3))(0) == given
