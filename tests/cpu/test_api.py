"""torchsmith.compile: torch.compile's meaning of every argument, on everything that can be compiled."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
import os
import pickle
import sys
import threading
import traceback
import warnings
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fresh
import torchsmith
from torchsmith import compiler, events
from torchsmith.capture.state import Settings


def module_level(x, scale=2):
    """Doc of module_level."""
    return x.sin() * scale


compiled_level = torchsmith.compile(module_level, backend="eager")


@torchsmith.compile(backend="eager")
def decorated_level(x):
    return x + 1


class Counting:
    """A backend that counts graphs and runs them eagerly."""

    def __init__(self):
        self.graphs, self.inputs = [], []

    def __call__(self, gm, example_inputs):
        self.graphs.append(gm)
        self.inputs.append(example_inputs)
        return gm.forward


def breaks(got):
    return [e.fields["code"] for e in got if e.kind == "graph_break"]


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 4)


# ---------------------------------------------------------------- what can be compiled


def test_function_keeps_its_looks(x):
    backend = Counting()
    c = torchsmith.compile(module_level, backend=backend)
    assert c.__name__ == "module_level" and c.__doc__ == "Doc of module_level." and c.__wrapped__ is module_level
    assert inspect.signature(c) == inspect.signature(module_level)
    assert torch.equal(c(x), module_level(x)) and torch.equal(c(x, scale=3), module_level(x, 3))
    assert len(backend.graphs) == 2
    assert torch.equal(c(x + 1), module_level(x + 1))
    assert len(backend.graphs) == 2
    with pytest.raises(TypeError, match=r"module_level\(\) got an unexpected keyword argument 'wrong'"):
        c(x, wrong=1)


def test_decorator_with_and_without_arguments(x):
    @torchsmith.compile
    def f(x):
        return x + 1

    @torchsmith.compile(backend="eager", fullgraph=True)
    def g(x):
        return x + 2

    assert torch.equal(f(x), x + 1) and torch.equal(g(x), x + 2)


def test_methods_and_callables(x):
    class A:
        def __init__(self, k):
            self.k = k

        @torchsmith.compile(backend="eager")
        def method(self, x):
            return x * self.k

        def plain(self, x):
            return x + self.k

        def __call__(self, x):
            return x - self.k

    a, b = A(2), A(3)
    assert torch.equal(a.method(x), x * 2) and torch.equal(b.method(x), x * 3) and torch.equal(A.method(a, x), x * 2)
    a.k = 5
    assert torch.equal(a.method(x), x * 5)
    c = torchsmith.compile(a.plain, backend="eager")
    assert torch.equal(c(x), x + 5)
    a.k = 6
    assert torch.equal(c(x), x + 6)
    assert torch.equal(torchsmith.compile(a, backend="eager")(x), x - 6)
    part = functools.partial(module_level, scale=7)
    assert torch.equal(torchsmith.compile(part, backend="eager")(x), module_level(x, 7))
    for op in (torch.sin, torch.ops.aten.sin, torch.ops.aten.sin.default):
        assert torch.equal(torchsmith.compile(op, backend="eager", fullgraph=True)(x), torch.sin(x))
    binding = torch.ops.aten.sin._op  # its __self__ is pybind11's record
    assert torch.equal(torchsmith.compile(lambda y: binding(y * 2) + 1, backend="eager")(x), torch.sin(x * 2) + 1)
    again = torchsmith.compile(torchsmith.compile(module_level), backend="eager")
    assert torch.equal(again(x), module_level(x)) and again.function is module_level


def test_classes(x):
    @torchsmith.compile(backend="eager")
    class M(torch.nn.Module):
        def forward(self, x):
            return x + 1

    assert isinstance(M(), torch.nn.Module) and torch.equal(M()(x), x + 1)


def test_pickle_and_copy_of_functions(x):
    assert pickle.loads(pickle.dumps(decorated_level)) is decorated_level  # by name, as functions are
    again = pickle.loads(pickle.dumps(compiled_level))  # its name means the original: that one, compiled again
    assert again.function is module_level and torch.equal(again(x), module_level(x))
    assert copy.deepcopy(compiled_level) is compiled_level


# ---------------------------------------------------------------- modules


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
        self.drop = torch.nn.Dropout(0.5)
        self.scale = 2.0

    def forward(self, x, *, shift=0.0):
        return self.drop(self.lin(x)) * self.scale + shift


def compiled_net(**kw):
    torch.manual_seed(0)
    net = Net().eval()
    backend = Counting()
    return net, torchsmith.compile(net, backend=backend, **kw), backend


def test_a_compiled_module_is_the_module_to_everyone(x):
    net, c, backend = compiled_net()
    assert isinstance(c, Net) and type(c).__name__ == "Net" and repr(c) == repr(net)
    assert torch.equal(c(x), net(x)) and torch.equal(c(x, shift=1.0), net(x, shift=1.0))
    assert list(c.state_dict()) == list(net.state_dict()) == ["lin.weight", "lin.bias"]
    assert [n for n, _ in c.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert c.lin is net.lin and type(net) is Net
    c.scale = 3.0
    assert net.scale == 3.0 and torch.equal(c(x), net(x))
    c.extra = torch.nn.Linear(1, 1)
    assert "extra" in dict(net.named_modules())
    del c.extra
    assert not hasattr(net, "extra")
    c.train()
    assert net.training and net.drop.training
    c.eval()
    assert not net.drop.training
    assert c._orig_mod is net
    n = len(backend.graphs)
    c(x)
    assert len(backend.graphs) == n


def test_weights_changes_are_noticed(x):
    net, c, _ = compiled_net()
    want = net(x)
    assert torch.equal(c(x), want)
    with torch.no_grad():
        net.lin.weight.mul_(2)
    assert torch.equal(c(x), net(x)) and not torch.equal(c(x), want)
    other = Net().eval()
    c.load_state_dict(other.state_dict())
    assert torch.equal(c(x), net(x))
    net.lin = torch.nn.Linear(4, 2)
    assert c(x).shape == (3, 2)
    c.to(torch.float64)
    assert torch.equal(c(x.double()), net(x.double()))
    c.requires_grad_(False)
    assert not c(x.double()).requires_grad


def test_hooks_run_once(x):
    net, c, _ = compiled_net()
    seen = []
    h1 = c.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    h2 = net.register_forward_hook(lambda m, a, out: seen.append("post") or out + 1)
    plain = net.forward(x) + 1
    assert torch.equal(c(x), plain) and seen == ["pre", "post"]
    h1.remove()
    h2.remove()
    h3 = net.lin.register_forward_hook(lambda m, a, out: out * 3)
    assert torch.equal(c(x), net(x))
    h3.remove()
    assert torch.equal(c(x), net(x))


def test_copies_pickles_and_functional_call(x):
    net, c, _ = compiled_net()
    want = c(x)
    d = copy.deepcopy(c)
    assert isinstance(d, Net) and d.lin is not net.lin and torch.equal(d(x), want)
    with torch.no_grad():
        d.lin.bias.add_(1)
    assert torch.equal(c(x), want) and not torch.equal(d(x), want)
    e = torchsmith.compile(net, backend="eager")
    f = pickle.loads(pickle.dumps(e))
    assert torch.equal(f(x), want) and f.lin is not net.lin and hasattr(f, "_orig_mod")
    zeros = {k: torch.zeros_like(v) for k, v in net.state_dict().items()}
    assert torch.equal(torch.func.functional_call(c, zeros, (x,)), torch.zeros(3, 4))
    assert torch.equal(c(x), want)


def test_sequential(x):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    c = torchsmith.compile(net, backend="eager")
    assert len(c) == 3 and c[0] is net[0] and list(c) == list(net)
    assert torch.equal(c(x), net(x)) and torch.equal(c[:2](x), net[:2](x))
    parent = torch.nn.ModuleDict({"a": c})
    assert list(parent.state_dict()) == ["a." + k for k in net.state_dict()]
    outer = torch.nn.Sequential(c, torch.nn.ReLU())
    assert torch.equal(torchsmith.compile(outer, backend="eager")(x), outer(x))


def test_gradients(x):
    net, c, _ = compiled_net()
    net(x).sum().backward()
    want = net.lin.weight.grad.clone()
    net.zero_grad()
    c(x).sum().backward()
    assert torch.equal(net.lin.weight.grad, want)
    with torch.no_grad():
        assert not c(x).requires_grad
    with torch.inference_mode():
        assert c(x).is_inference()
    assert c(x).requires_grad


# ---------------------------------------------------------------- arguments


def test_argument_errors():
    with pytest.raises(RuntimeError, match="Either mode or options"):
        torchsmith.compile(module_level, mode="default", options={"max_autotune": True})
    with pytest.raises(RuntimeError, match="no_such_option"):
        torchsmith.compile(module_level, options={"no_such_option": 1})
    with pytest.raises(RuntimeError, match="no-such-mode"):
        torchsmith.compile(module_level, mode="no-such-mode")
    with pytest.raises(RuntimeError, match="no_such_backend"):
        torchsmith.compile(module_level, backend="no_such_backend")
    with pytest.raises(TypeError):
        torchsmith.compile(3)
    with pytest.raises(ValueError, match="recompile_limit"):
        torchsmith.compile(module_level, recompile_limit=0)


def test_disable(x):
    assert torchsmith.compile(module_level, disable=True) is module_level
    code = "import torchsmith; f = lambda x: x; assert torchsmith.compile(f) is f"
    for name in ("TORCHSMITH_DISABLE", "TORCH_COMPILE_DISABLE"):
        assert fresh.run(code, **{name: "1"}).returncode == 0


def test_fullgraph(x):
    def f(x):
        return x + 1 if x.sum() < 1e9 else x  # a branch on data

    with pytest.raises(torchsmith.Unsupported):
        torchsmith.compile(f, fullgraph=True, backend="eager")(x)
    with events.recording() as got:
        assert torch.equal(torchsmith.compile(f, backend="eager")(x), x + 1)
    assert len(breaks(got)) == 1


def test_breaks_run_once_per_call_and_are_counted_once(x):
    calls = []

    def f(x):
        calls.append(1)
        return x + 1 if x.sum() < 1e9 else x

    c = torchsmith.compile(f, backend="eager")
    with events.recording() as got:
        for _ in range(50):
            assert torch.equal(c(x), x + 1)
    assert len(calls) == 50
    assert len(breaks(got)) == 1
    assert got[[e.kind for e in got].index("graph_break")].fields["loc"].startswith(__file__)


def helper_of_break(x):
    return torch.sin(x) + torch.cos(x)


def test_functions_called_after_a_break_are_compiled(x):
    net = Net().eval()

    def f(x):
        if x.sum() > 1e9:
            return x, x
        return helper_of_break(x), net(x)

    backend = Counting()
    c = torchsmith.compile(f, backend=backend)
    for _ in range(3):
        a, b = c(x)
        assert torch.equal(a, helper_of_break(x)) and torch.equal(b, net(x))
    assert len(backend.graphs) == 2


def test_compiling_what_is_disabled_compiles_it(x):
    """What is asked for last holds, as under torch.compile; a function that is disabled here is left alone there."""
    backend = Counting()
    off = compiler.disable(lambda x: x.sin() + 1)
    with events.recording() as got:
        assert torch.equal(torchsmith.compile(off, backend=backend)(x), off(x))
    assert len(backend.graphs) == 1 and not [e for e in got if e.kind == "graph_break"]
    assert off._torchdynamo_disable


def test_disabled_functions_stay_out(x):
    ran = []

    @compiler.disable
    def outside(x):
        ran.append(compiler.is_compiling())
        return helper_of_break(x)

    def f(x):
        return outside(x) + 1

    backend = Counting()
    c = torchsmith.compile(f, backend=backend)
    assert torch.equal(c(x), f(x))
    assert ran == [False, False] and len(backend.graphs) == 1  # what stands behind the call


def test_recompile_limit(x):
    def f(x, n):
        return x * n

    backend = Counting()
    c = torchsmith.compile(f, backend=backend, recompile_limit=3, dynamic=False)
    with warnings.catch_warnings(record=True) as seen, events.recording() as got:
        warnings.simplefilter("always")
        for n in range(1, 7):
            assert torch.equal(c(x, f"{n}" and n + 0.5), x * (n + 0.5))
    messages = [str(w.message) for w in seen if "recompile_limit" in str(w.message)]
    assert len(messages) == 1 and "L['n']" in messages[0] and __file__ in messages[0]
    assert len(backend.graphs) == 3 and breaks(got) == ["API003"]
    full = torchsmith.compile(f, backend="eager", recompile_limit=1, fullgraph=True, dynamic=False)
    full(x, 0.5)
    with pytest.raises(torchsmith.RecompileLimitHit, match=r"L\['n'\]"):
        full(x, 1.5)


def test_recompiles_are_explained(x):
    c = torchsmith.compile(module_level, backend="eager", dynamic=False)
    c(x)
    with events.recording() as got:
        c(x.double())
    (e,) = [e for e in got if e.kind == "recompile"]
    assert "float64" in e.fields["guard"] and "L['x']" in e.fields["guard"]


def test_sizes_become_dynamic():
    backend = Counting()
    c = torchsmith.compile(module_level, backend=backend)
    for n in (4, 5, 6, 7, 8, 9):
        t = torch.randn(n, 3)
        assert torch.equal(c(t), module_level(t))
    assert len(backend.graphs) <= 3
    marked = Counting()
    c = torchsmith.compile(module_level, backend=marked)
    for n in (4, 5, 6):
        t = torch.randn(n, 3)
        torchsmith.mark_dynamic(t, 0)
        assert torch.equal(c(t), module_level(t))
    assert len(marked.graphs) == 1
    fixed = Counting()
    c = torchsmith.compile(module_level, backend=fixed, dynamic=True)
    for n in (4, 5):
        t = torch.randn(n, 3)
        torchsmith.mark_static(t, 0)
        c(t)
    assert len(fixed.graphs) == 2
    static = Counting()
    c = torchsmith.compile(module_level, backend=static, dynamic=False)
    for n in (4, 5, 6):
        c(torch.randn(n, 3))
    assert len(static.graphs) == 3


def test_dynamic_sizes_do_not_loosen_layouts():
    """An entry for any size is still one for this memory layout, and not for broadcasting."""

    def f(a, b):
        return (a + b).reshape(-1)

    backend = Counting()
    c = torchsmith.compile(f, backend=backend, dynamic=True)
    calls = [(torch.randn(4, 6), torch.randn(4, 6)), (torch.randn(5, 7), torch.randn(5, 7))]
    for a, b in calls:
        assert torch.equal(c(a, b), f(a, b))
    n = len(backend.graphs)
    for a, b in [
        (torch.randn(7, 5).t(), torch.randn(5, 7)), (torch.randn(5, 14)[:, ::2], torch.randn(5, 7)), (torch.randn(1, 7), torch.randn(5, 7)),
        (torch.randn(5, 7), torch.randn(5, 1)), (torch.randn(7, 5).t(), torch.randn(7, 5).t()), (torch.randn(0, 7), torch.randn(0, 7)),
        (torch.randn(5, 9)[:, :7], torch.randn(5, 7)),
    ]:  # fmt: skip
        got, want = c(a, b), f(a, b)
        assert torch.equal(got, want) and got.stride() == want.stride()
    assert len(backend.graphs) > n


def test_dynamic_sizes_run_natively():
    c = torchsmith.compile(lambda a, b: (a + b).sin().sum(-1), dynamic=True)
    with events.recording() as got:
        for n in (4, 5, 9):
            a, b = torch.randn(n, n + 1), torch.randn(n, n + 1)
            torch.testing.assert_close(c(a, b), (a + b).sin().sum(-1))
    assert [e.fields["report"].road for e in got if e.kind == "graph"] == ["native"]


def test_exceptions_keep_type_and_traceback(x):
    def inner(x):
        raise KeyError("from the user")

    def f(x):
        return inner(x + 1)

    c = torchsmith.compile(f, backend="eager")
    for _ in range(3):
        with pytest.raises(KeyError, match="from the user") as e:
            c(x)
        names = [frame.name for frame in traceback.extract_tb(e.value.__traceback__)]
        assert names[-2:] == ["f", "inner"]


def test_custom_backend_gets_module_and_inputs(x):
    seen = {}

    def backend(gm, example_inputs):
        seen["gm"], seen["inputs"] = gm, example_inputs
        return gm.forward

    def f(a, b):
        return a @ b, a.sum()

    c = torchsmith.compile(f, backend=backend)
    p, q = c(x, x.t())
    assert torch.equal(p, x @ x.t()) and torch.equal(q, x.sum())
    assert isinstance(seen["gm"], torch.fx.GraphModule) and len(seen["inputs"]) >= 1

    def bad(gm, example_inputs):
        raise ZeroDivisionError("in the backend")

    with pytest.raises(torchsmith.BackendFailed, match="in the backend"):
        torchsmith.compile(f, backend=bad, fullgraph=True)(x, x.t())
    with pytest.warns(UserWarning, match="'bad' raised ZeroDivisionError: in the backend"):
        assert torch.equal(torchsmith.compile(f, backend=bad)(x, x.t())[0], x @ x.t())
    with events.recording() as got:
        assert torch.equal(torchsmith.compile(f, backend=bad, options={"suppress_errors": True})(x, x.t())[0], x @ x.t())
    assert fallbacks(got) == ["API008"]


def test_named_backends(x):
    backend = Counting()
    compiler.register_backend(backend, name="test_api_counting")
    assert "test_api_counting" in compiler.list_backends() and "eager" not in compiler.list_backends()
    assert {"eager", "aot_eager", "inductor"} <= set(compiler.list_backends(exclude_tags=None))
    torchsmith.compile(module_level, backend="test_api_counting")(x)
    assert len(backend.graphs) == 1
    torchsmith.compile(module_level, backend="aot_eager")(x)


def test_default_backend(x):
    backend = Counting()
    compiler.set_default_backend(backend)
    try:
        assert compiler.get_default_backend() is backend
        torchsmith.compile(module_level)(x)
        assert len(backend.graphs) == 1
    finally:
        compiler.set_default_backend(None)
    assert compiler.get_default_backend() == "inductor"


def test_nothing_keeps_models_alive(x):
    @torchsmith.compile(backend="eager")
    def f(m, x):
        return m(x)

    net = Net().eval()
    f(net, x)
    c = torchsmith.compile(net, backend="eager")
    c(x)
    refs = [weakref.ref(net), weakref.ref(net.lin.weight), weakref.ref(c)]
    del net, c
    gc.collect()
    assert [r() for r in refs] == [None, None, None]
    other = Net().eval()
    assert torch.equal(f(other, x), other(x))


RELEASED = {
    "function": ("def g(x): return x + 1\ndef f(x): return g(x)", "g", "g = None"),
    "in a list": ("d = [lambda x: x + 2]\ndef f(x): return d[0](x)", "d[0]", "d.clear()"),
    "attribute": ("o = Plain(); o.g = lambda x: x + 2\ndef f(x): return o.g(x)", "o.g", "del o.g"),
    "closure": ("make = lambda o: lambda x: x * o.v\nheld = Plain(v=2.0); g = make(held)\ndef f(x): return g(x)", "held", "held = g = 0"),
    "net in a closure": ("def make(o): return lambda x: o(x)\nn = Net(); g = make(n)\ndef f(x): return g(x)", "n", "g = n = None"),
    "default": ("held = Plain(v=2.0)\ndef g(x, o=held, *, q=held): return x * o.v * q.v\ndef f(x): return g(x)", "held", "g = held = None"),
    "hook": ("n = Net(); held = Plain(v=2.0)\nn.register_forward_hook(lambda m, i, out, o=held: out * o.v)\ndef f(x): return n(x)",
             "held", "n = held = None"),
    "after a break": ("def g(x):\n  print(end='')\n  return x\ndef f(x): return g(x) * 2", "g", "g = None"),
    "equal modules": ("n = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in 'abc'))\ndef f(x): return n(x)", "n[2].weight", "n = None"),
    "method": ("K.m = OF(lambda h: lambda self, x: x * h.v)\ndef f(x): return K().m(x)", "held", "held = None; K.m = lambda self, x: x"),
    "property": ("K.p = property(OF(lambda h: lambda self: h.v))\ndef f(x): return x * K().p", "held", "held = None; del K.p"),
    "static method": ("K.s = staticmethod(OF(lambda h: lambda: h.v))\ndef f(x): return x * K.s()", "held", "held = None; del K.s"),
    "class method": ("K.s = classmethod(OF(lambda h: lambda cls: h.v))\ndef f(x): return x * K().s()", "held", "held = None; del K.s"),
    "special method": ("K.__mul__ = OF(lambda h: lambda self, x: x * h.v)\ndef f(x): return K() * x", "held", "held = None; del K.__mul__"),
    "cached property": ("import functools\nK.p = functools.cached_property(OF(lambda h: lambda self: h.v)); K.p.__set_name__(K, 'p')\n"
                        "def f(x): return x * K().p", "held", "held = None; del K.p"),
    "class attribute": ("class K: pass\nK.a = Plain(v=2.0)\ndef f(x): return x * K.a.v", "K.a", "K.a = None"),
    "method of an object": ("o = Plain(v=2.0); Plain.m = lambda self, x: x * self.v; g = o.m\ndef f(x): return g(x)", "o", "o = g = None"),
    "partial": ("import functools\ng = functools.partial(lambda y, x: x * y.v, Plain(v=2.0))\ndef f(x): return g(x)",
                "g.args[0]", "g = None"),
    "dictionary": ("d = {'a': Plain(v=2.0)}\ndef f(x): return x * d['a'].v", "d['a']", "d = None"),
    "generator": ("def g():\n  yield 1.0\n  yield 2.0\ndef f(x): return x * sum(g())", "g", "g = None"),
}  # fmt: skip


@pytest.mark.parametrize("program", RELEASED)
def test_nothing_keeps_what_a_program_lets_go(program):
    text, held, drop = RELEASED[program]

    class Plain:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    space = {"torch": torch, "Net": lambda: Net().eval(), "Plain": Plain, "__name__": "released"}
    if "OF(" in text:  # a class with a function over something held
        exec("class K: pass\nheld = Plain(v=2.0)\ndef OF(make): return make(held)", space)
    exec(text, space)
    f = torchsmith.compile(space["f"], backend="eager")
    for _ in range(2):
        assert torch.equal(f(torch.ones(2, 4)), space["f"](torch.ones(2, 4)))
    gone = weakref.ref(eval(held, space))
    exec(drop, space)
    gc.collect()
    assert gone() is None


def test_calls_leak_nothing(x):
    net, c, _ = compiled_net()

    def broken(x):
        return x + 1 if x.sum() < 1e9 else x

    d = torchsmith.compile(broken, backend="eager")

    def toggle():
        net.scale = 2.0
        c(x)

    for work in (lambda: c(x), lambda: c(x=x), lambda: d(x), toggle):
        for _ in range(50):
            work()
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(300):
            work()
        gc.collect()
        assert sys.getallocatedblocks() - before < 100


# ---------------------------------------------------------------- calls that are not ours


def fallbacks(got):
    return [e.fields["code"] for e in got if e.kind == "fallback"]


def test_other_tracers_get_the_plain_function(x):
    c = torchsmith.compile(module_level, backend="eager")
    c(x)

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            return False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with events.recording() as got, Mode():
        assert torch.equal(c(x), module_level(x))
    assert seen and "API001" in fallbacks(got)
    with events.recording() as got:
        assert torch.allclose(torch.vmap(c)(x), torch.vmap(module_level)(x))
        assert torch.allclose(torch.func.grad(lambda t: c(t).sum())(x), torch.func.grad(lambda t: module_level(t).sum())(x))
    assert fallbacks(got).count("API001") == 2
    with events.recording() as got:
        traced = torch.fx.symbolic_trace(lambda t: c(t) + 1)
    assert "API002" in fallbacks(got) and any(n.op == "call_method" and n.target == "sin" for n in traced.graph.nodes)


def test_subclasses_come_out(x):
    class Sub(torch.Tensor):
        pass

    c = torchsmith.compile(module_level, backend="eager")
    s = x.as_subclass(Sub)
    with events.recording() as got:
        out = c(s)
    assert type(out) is Sub and not fallbacks(got)


def test_stances(x):
    backend = Counting()
    c = torchsmith.compile(module_level, backend=backend, dynamic=False)
    with compiler.set_stance("force_eager"):
        assert torch.equal(c(x), module_level(x)) and not backend.graphs
    c(x)
    assert len(backend.graphs) == 1
    with compiler.set_stance("eager_on_recompile"):
        c(x)
        c(x.double())
    assert len(backend.graphs) == 1
    with compiler.set_stance("fail_on_recompile"):
        c(x)
        with pytest.raises(RuntimeError, match="recompil"):
            c(x.double())
    with pytest.raises(RuntimeError):
        compiler.set_stance("no such stance")

    @compiler.set_stance("force_eager")
    def under():
        return c(x.double())

    under()
    assert len(backend.graphs) == 1
    c(x.double())
    assert len(backend.graphs) == 2


def test_reset(x):
    backend = Counting()
    c = torchsmith.compile(module_level, backend=backend)
    c(x)
    compiler.reset()
    c(x)
    assert len(backend.graphs) == 2


# ---------------------------------------------------------------- threads, fork, profiler


def test_two_threads(x):
    net, c, backend = compiled_net()
    want = net(x)
    wrong = []

    def work():
        for i in range(100):
            if not torch.equal(c(x), want):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # every thread comes to its first call before one has compiled
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(usual)
    assert not wrong and len(backend.graphs) == 1


def test_fork(x):
    _net, c, _ = compiled_net()
    want = c(x)
    pid = os.fork()
    if pid == 0:
        try:
            ok = torch.equal(c(x), want) and torch.equal(c(x.double().float()), want) and c(x[:2]).shape == (2, 4)
        except BaseException:
            ok = False
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_profiler_shows_the_name(x):
    c = torchsmith.compile(module_level, backend="eager", name="my_region")
    c(x)
    with torch.profiler.profile() as prof:
        c(x)
    assert any("my_region" in e.name for e in prof.events())


def test_explain(x):
    e = torchsmith.explain(module_level, backend="eager")(x)
    assert len(e.graphs) == 1 and not e.breaks


def test_closures_and_globals(x):
    k = 2.0

    def f(x):
        return x * k

    c = torchsmith.compile(f, backend="eager")
    assert torch.equal(c(x), x * 2.0)
    k = 3.0
    assert torch.equal(c(x), x * 3.0)


def test_settings_are_compared_by_identity():
    assert Settings(print) != Settings(print)


def test_pythons_collector_is_as_before(x):
    """While we compile it looks rarely; what the user sets meanwhile stays."""
    before, seen = gc.get_threshold(), []

    def backend(gm, inputs, change=None):
        seen.append(gc.get_threshold())
        if change:
            gc.set_threshold(*change)
        return gm.forward

    def failing(gm, inputs):
        raise KeyError("backend")

    try:
        torchsmith.compile(lambda x: x + 1, backend=backend)(x)
        assert seen[0][0] > before[0] and gc.get_threshold() == before
        with pytest.raises(Exception, match="backend"):
            torchsmith.compile(lambda x: x + 2, backend=failing, fullgraph=True)(x)
        assert gc.get_threshold() == before
        torchsmith.compile(lambda x: x + 3, backend=functools.partial(backend, change=(123, 4, 5)))(x)
        assert gc.get_threshold() == (123, 4, 5)
        gc.set_threshold(0)
        torchsmith.compile(lambda x: x + 4, backend=backend)(x)
        assert seen[-1][0] == gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def raises_where_large(x, store):
    y = torch.rand(3) + x
    if torch.isnan(x).any() or (y > 50).any():
        raise ValueError(f"large: {y.max():.3f}")
    assert (y > -50).all(), "small"
    store.add_(1)
    return y + 1


def caught(x):
    try:
        if x.max() > 5:
            raise ValueError("large")
    except ValueError as error:
        return x - len(str(error))
    return x + 1


def outcome(fn, *args):
    torch.manual_seed(3)
    try:
        return str(fn(*args)), torch.rand(2)
    except (ValueError, AssertionError) as error:
        return f"{type(error)} {str(error)[:12]}", torch.rand(2)


@torch.no_grad()
def test_a_way_that_only_raises_is_checked():
    explained = torchsmith.explain(raises_where_large)(torch.zeros(3), torch.zeros(1))
    assert [g.road for g in explained.graphs] == ["native"] and not explained.breaks
    for fn in (raises_where_large, caught):
        compiled = torchsmith.compile(fn)
        for value in (0.0, math.nan, 60.0, -60.0, 1.0):
            stores = [[torch.zeros(1)] if fn is raises_where_large else [] for _ in range(2)]
            want, got = (outcome(f, torch.full((3,), value), *store) for f, store in zip((fn, compiled), stores, strict=True))
            assert got[0] == want[0] and torch.equal(got[1], want[1]) and stores[0] == stores[1], value


@torch.no_grad()
def test_after_a_visible_write_a_way_that_raises_is_a_break():
    def writes(x):
        x.add_(1)
        if (x > 3).any():
            raise ValueError("large")
        return x * 2

    compiled, x = torchsmith.compile(writes), torch.full((2,), 4.0)
    with pytest.raises(ValueError, match="large"):
        compiled(x)
    assert x.tolist() == [5.0, 5.0]


@torch.no_grad()
def test_distributions_validate_in_the_graph():
    def fn(mean, deviation):
        d = torch.distributions.Normal(mean, deviation, validate_args=True)  # the default is off once torch.compile was used
        sample = d.rsample()
        return sample, d.log_prob(sample)

    torch.manual_seed(0)
    want = fn(torch.zeros(3), torch.ones(3))
    torch.manual_seed(0)
    explained = torchsmith.explain(fn)(torch.zeros(3), torch.ones(3))
    assert not explained.breaks and explained.extern_calls == ("aten.normal_functional.default",)
    torch.testing.assert_close(explained.result, want)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torchsmith.compile(fn)(torch.zeros(3), -torch.ones(3))


def test_python_types_are_dtypes():
    explained = torchsmith.explain(lambda n: (torch.ones(n, dtype=bool), torch.zeros(n, dtype=float), torch.arange(n, dtype=int)))(3)
    assert not explained.breaks
    assert [t.dtype for t in explained.result] == [torch.bool, torch.float64, torch.int64]


def test_a_program_of_torch_export_is_one_graph() -> None:
    """What it checks of its inputs included, around which torch patches settings of its own compiler."""
    net, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("b", min=2, max=64)},))
    fn = torchsmith.compile(program.module(), fullgraph=True, dynamic=True)
    for n in (5, 7, 2):
        x = torch.randn(n, 4)
        torch.testing.assert_close(fn(x), net(x))
    with pytest.raises(AssertionError, match="Guard failed"):
        fn(torch.randn(70, 4))
