"""What a capture relied on: for each thing the world can change, a guard that then fails; and effects that happen exactly once."""

from __future__ import annotations

import bisect
import collections
import fractions
import functools
import itertools
import json
import types

import numpy as np
import pytest
import torch
from capturing import Run, same
from torch.utils.hooks import RemovableHandle

import torchsmith
from torchsmith.codes import Unsupported
from torchsmith.events import recording

X = torch.ones(2, 3)
FACTOR = 2
SETTINGS = {"scale": 3, "names": ["a", "b"]}
NUMBERS = [1, 2, 3]
COUNT = 0


class Options:
    depth = 1

    def __init__(self):
        self.flag = True
        self.pair = (1, 2)
        self.inner = types.SimpleNamespace(v=5)

    def scaled(self, x):
        return x * 2


OPTIONS = Options()


def helper(x, k=3):
    return x * k


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)
        self.bn = torch.nn.BatchNorm1d(3)
        self.drop = torch.nn.Dropout(0.5)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.ReLU()])
        self.register_buffer("shift", torch.ones(3))
        self.scale = 2.0

    def forward(self, x):
        x = self.bn(self.fc(x)) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.drop(x)


def stale(run: Run, *args, **kwargs) -> None:
    assert run.failing(*args, **kwargs) is not None, "nothing noticed the change"


@pytest.mark.parametrize(
    "other",
    [torch.ones(3, 3), torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2).T, torch.ones(2, 3).requires_grad_(), torch.nn.Parameter(X), None, 4],
)
def test_tensor_argument(other):
    run = Run(lambda x: x * 2, X)
    assert run.failing(torch.zeros(2, 3)) is None
    stale(run, other)


@pytest.mark.parametrize(("first", "other"), [(2, 3), (2, 2.0), (True, 1), ("a", "b"), (None, 1), ((1, 2), (1, 3)), (0.0, -0.0), (b"a", b"b")])
def test_constant_argument(first, other):
    run = Run(lambda x, k: (x, k), X, first)
    assert run.failing(X, first) is None
    stale(run, X, other)


def test_list_and_dict_arguments():
    run = Run(lambda xs, d: [v * 2 for v in xs] + [d["k"]], [X, X + 1], {"k": 1})
    assert run.failing([X, X + 3], {"k": 1}) is None
    stale(run, [X], {"k": 1})
    stale(run, (X, X), {"k": 1})
    stale(run, [X, 3], {"k": 1})
    stale(run, [X, X + 1], {"k": 2})
    stale(run, [X, X + 1], {})
    run = Run(lambda d: [d[k] for k in d], {"a": X, "b": X + 1})
    stale(run, {"b": X, "a": X})
    run = Run(lambda d: "z" in d, {"a": X})
    stale(run, {"a": X, "z": 1})


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, v: (x, torch.tensor(v)),
        lambda x, v: (x, torch.LongTensor(v)),
        lambda x, v: x[v[0], v[1]],
        lambda x, v: torch.tensordot(x, x, dims=v),
        lambda x, v: (x, str(v), f"{v}"),
        lambda x, v: (x, json.dumps({"v": v})),
        lambda x, v: (x, v < [[0], [1]], v.count([1])),
        lambda x, v: (x, bisect.bisect(v, [1])),
        lambda x, v: (x, list(itertools.starmap(abs, v))),
        lambda x, v: (x, complex(v[0][0], v[1][0])),
    ],
)
def test_lists_of_lists(fn):
    x = torch.arange(9.0).view(3, 3)
    run = Run(fn, x, [[1], [0]])
    assert run.failing(x, [[1], [0]]) is None
    stale(run, x, [[0], [0]])
    stale(run, x, [[1], [1]])
    compiled = torchsmith.compile(fn, backend="eager")
    for v in ([[1], [0]], [[1], [1]], [[0], [1]]):
        same(compiled(x, v), fn(x, v))


def test_lists_of_lists_that_the_program_changes():
    def fn(x, v):
        v[0].append(7)
        return x, str(v), json.dumps(v), max(v), v.index(v[0]), [1, 7] in v, torch.tensor([v[0], v[0]])

    compiled = torchsmith.compile(fn, backend="eager")
    for first in (1, 2, 3):
        mine, theirs = [[first], [2, 0]], [[first], [2, 0]]
        same(compiled(X, mine), fn(X, theirs))
        assert mine == theirs


class Named(list):
    pass


def held(n):
    counted = collections.Counter(a=n, b=2)
    return types.SimpleNamespace(counted=counted, named=(Named([n]), Named([2])), lists=([1], [n]), shown={"a": [n]})


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, h: (x, type(max(h.named[0], h.named[1])), type([h.named[0], 1][0]), max(h.named) is h.named[1]),
        lambda x, h: (x, dict(h.counted) == h.counted, h.counted == {"a": 1, "b": 2}, h.counted != {"a": 1}),
        lambda x, h: (x, str((h.counted, 1)), str([{"k": h.counted}])),
        lambda x, h: (x, h.lists.count([2]), [2] in h.lists, h.shown.items() == {"a": [2]}.items()),
    ],
)
def test_containers_of_classes_given_to_c_functions(fn):
    compiled = torchsmith.compile(fn, backend="eager", options={"warn_eager": False})
    for n in (2, 1, 3):
        same(compiled(X, held(n)), fn(X, held(n)))


class Whole(int):
    pass


def test_values_of_classes_in_lists_given_to_c_functions():
    for fn in (lambda x, v: (x, np.array(v)), lambda x, v: (x, hash(tuple(v)))):
        for kind in (Whole, fractions.Fraction):
            compiled = torchsmith.compile(fn, backend="eager", options={"warn_eager": False})
            for n in (2, 3):
                got, want = compiled(X, [kind(n)]), fn(X, [kind(n)])
                assert np.array_equal(got[1], want[1])


def test_same_tensor_given_twice():
    run = Run(lambda a, b: a.add_(1) + b, X.clone(), X.clone())
    y = X.clone()
    stale(run, y, y)
    run = Run(lambda a, b: a.add_(1) + b, y, y)
    stale(run, X.clone(), X.clone())


def test_written_input_that_overlaps_another():
    run = Run(lambda a, b: a.add_(1) + b, torch.ones(2), torch.ones(2))
    base = torch.ones(3)
    stale(run, base[:2], base[1:])
    with pytest.raises(Unsupported, match="CAP013"):
        Run(lambda a, b: a.add_(1) + b, base[:2], base[1:])


def test_global_number(monkeypatch):
    run = Run(lambda x: x * FACTOR, X)
    monkeypatch.setitem(globals(), "FACTOR", 5)
    stale(run, X)


def test_global_dictionary_and_list(monkeypatch):
    run = Run(lambda x: x * SETTINGS["scale"], X)
    monkeypatch.setitem(SETTINGS, "other", 1)
    assert run.failing(X) is None
    monkeypatch.setitem(SETTINGS, "scale", 4)
    stale(run, X)
    run = Run(lambda x: x * sum(NUMBERS), X)
    monkeypatch.setitem(globals(), "NUMBERS", [1, 2, 4])
    stale(run, X)


def test_global_function(monkeypatch):
    run = Run(lambda x: helper(x), X)
    monkeypatch.setitem(globals(), "helper", lambda x: x)
    stale(run, X)


def test_function_defaults_and_code(monkeypatch):
    run = Run(lambda x: helper(x), X)
    monkeypatch.setattr(helper, "__defaults__", (9,))
    stale(run, X)
    monkeypatch.undo()
    assert run.failing(X) is None
    monkeypatch.setattr(helper, "__code__", (lambda x, k=3: x).__code__)
    stale(run, X)


def test_closure():
    def make():
        k = 2

        def change(v):
            nonlocal k
            k = v

        return (lambda x: x * k), change

    fn, change = make()
    run = Run(fn, X)
    change(5)
    stale(run, X)


def test_closure_of_an_inner_function():
    def make():
        k = 2

        def inner(x):
            return x * k

        def change(v):
            nonlocal k
            k = v

        return inner, change

    inner, change = make()
    run = Run(lambda x: inner(x), X)
    change(5)
    stale(run, X)


def test_object_attributes(monkeypatch):
    def fn(x):
        return (x if OPTIONS.flag else -x) * OPTIONS.inner.v + OPTIONS.pair[0] * OPTIONS.depth

    for target, name, value in ((OPTIONS, "flag", False), (OPTIONS.inner, "v", 6), (OPTIONS, "pair", (3, 2)), (Options, "depth", 4), (OPTIONS, "depth", 2)):
        run = Run(fn, X)
        with monkeypatch.context() as m:
            m.setattr(target, name, value, raising=False)
            stale(run, X)
        vars(OPTIONS).pop("depth", None)  # some versions of monkeypatch leave the class's value on the instance
        assert run.failing(X) is None


def test_method_replaced(monkeypatch):
    run = Run(lambda x: OPTIONS.scaled(x), X)
    with monkeypatch.context() as m:
        m.setattr(Options, "scaled", lambda self, x: x)
        stale(run, X)
    with monkeypatch.context() as m:
        m.setattr(OPTIONS, "scaled", lambda x: x, raising=False)
        stale(run, X)


def test_object_of_another_class():
    class A:
        def f(self, x):
            return x

    class B:
        def f(self, x):
            return -x

    run = Run(lambda o, x: o.f(x), A(), X)
    assert run.failing(A(), X) is None
    stale(run, B(), X)


def test_missing_attribute():
    o = types.SimpleNamespace()
    run = Run(lambda o, x: x * getattr(o, "k", 1), o, X)
    o.k = 5
    stale(run, o, X)


def test_function_argument():
    run = Run(lambda f, x: f(x), lambda x: x + 1, X)
    stale(run, lambda x: x + 2, X)

    def make(k):
        return lambda x: x + k

    run = Run(lambda f, x: f(x), make(1), X)
    assert run.failing(make(1), X) is None
    stale(run, make(2), X)


def test_hooks_that_a_call_registers_and_removes():
    """The numbers of torch's handles go on as in eager, and are guarded only where something else follows from them."""
    net, counter = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), RemovableHandle

    def removed(x):
        with net[0].register_forward_pre_hook(lambda m, a: (a[0] + 1,)):
            h = net[1].register_forward_hook(lambda m, a, k, out: out * 2, with_kwargs=True, always_call=True, prepend=True)
            y = net(x)
        h.remove()
        return y

    def told(x):
        h = net.register_forward_hook(lambda m, a, out: out * 2)
        y = net(x)
        h.remove()
        return y + h.id, vars(h)["id"], counter.next_id, h

    def kept(x):
        return net[0].register_forward_hook(lambda m, a, out: out + 1), net(x)

    def shown(value):
        return vars(value).get("id") if type(value) is counter else [shown(v) for v in value] if isinstance(value, tuple) else str(value)

    for fn, times in ((removed, 1), (told, 3), (kept, 3)):
        outcomes, before = [], counter.next_id
        for call in (fn, torchsmith.compile(fn, backend="eager")):
            counter.next_id = 100
            net[0]._forward_hooks.clear()
            with recording() as events:
                outcomes.append([(shown(call(X)), counter.next_id, list(net[0]._forward_hooks)) for _ in range(3)])
        counter.next_id = before + 100
        assert outcomes[0] == outcomes[1], fn.__name__
        assert sum(e.kind == "guards" for e in events) == times, fn.__name__


def test_what_every_call_changes_is_left_to_python():
    """Dictionaries that grow and numbers that count calls are not compiled for each value up to the limit, to run eagerly from then on."""

    def counted(m, x, k):
        m.step += 1
        m.cache[m.step] = x.sum()
        return x * 2

    def grown(m, x, k):
        m.cache[len(m.cache)] = x
        return x * len(m.cache)

    def given(m, x, k):
        if k not in m.cache:
            m.cache[k] = x * 2
        return m.cache[k] + 1

    def listed(m, x, k):
        m.log.append(x.sum())
        return torch.stack(m.log[-3:]).mean() + x

    for fn, most in ((counted, 8), (grown, 12), (given, 16), (listed, 8)):
        outcomes = []
        for call in (fn, torchsmith.compile(fn, backend="eager")):
            m = types.SimpleNamespace(step=0, cache={}, log=[])
            with recording() as events:
                outcomes.append([(call(m, X, k).tolist(), m.step, str((m.cache, m.log))) for k in (*range(20), 3, 19)])
        assert outcomes[0] == outcomes[1], fn.__name__
        assert sum(e.kind == "guards" for e in events) <= most, fn.__name__
        assert not any(e.fields.get("code") == "API003" for e in events), fn.__name__


def net_changes():
    def parameter(n):
        n.fc.weight = torch.nn.Parameter(torch.ones(4, 3))

    def drop_parameter_grad(n):
        n.fc.weight.requires_grad_(False)

    def hook(n):
        n.fc.register_forward_hook(lambda m, a, o: o * 2)

    def pre_hook(n):
        n.layers[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))

    def train(n):
        n.train()

    def train_inner(n):
        n.bn.train()

    def attribute(n):
        n.scale = 3.0

    def swap(n):
        n.fc = torch.nn.Sequential(torch.nn.Linear(3, 3))

    def append(n):
        n.layers.append(torch.nn.ReLU())

    def replace_layer(n):
        n.layers[1] = torch.nn.GELU()

    def forward_patched(n):
        n.fc.forward = lambda x: x

    def probability(n):
        n.train()
        n.drop.p = 0.1

    def no_bias(n):
        n.fc.bias = None

    def to_double(n):
        n.double()

    def buffer_gone(n):
        n.shift = None

    return [parameter, drop_parameter_grad, hook, pre_hook, train, train_inner, attribute, swap, append, replace_layer, forward_patched,
            probability, no_bias, to_double, buffer_gone]  # fmt: skip


@pytest.mark.parametrize("change", net_changes(), ids=lambda f: f.__name__)
def test_module(change):
    net = Net().eval()
    run = Run(net, X)
    assert run.failing(net, X) is None
    same(run(net, X), net(X))
    change(net)
    stale(run, net, X)


def test_weight_values_are_inputs():
    net = Net().eval()
    run = Run(net, X)
    with torch.no_grad():
        net.fc.weight.add_(1)
        net.shift.mul_(2)
    net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})
    assert run.failing(net, X) is None
    same(run(net, X), net(X))


def test_tied_weights():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    run = Run(net, X)
    assert sum(n.op == "placeholder" for n in run.captured.graph.graph.nodes) == 4
    net[1].weight = torch.nn.Parameter(torch.ones(3, 3))
    stale(run, net, X)


@pytest.mark.parametrize("name", ["grad", "inference", "dtype", "deterministic", "autocast"])
def test_global_state(name):
    run = Run(lambda x: x * 2, X)
    if name == "grad":
        with torch.no_grad():
            stale(run, X)
    elif name == "inference":
        with torch.inference_mode():
            stale(run, X)
    elif name == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            stale(run, X)
        finally:
            torch.set_default_dtype(torch.float32)
    elif name == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            stale(run, X)
        finally:
            torch.use_deterministic_algorithms(False)
    else:
        with torch.autocast("cpu"):
            stale(run, X)


def test_dynamic_sizes():
    run = Run(lambda x: x * x.shape[0] if x.shape[0] > 3 else x, torch.ones(5, 3), dynamic=True)
    for n in (4, 7):
        x = torch.rand(n, 3)
        assert run.failing(x) is None
        same(run(x), x * n)
    stale(run, torch.ones(3, 3))


# ---------------------------------------------------------------- effects

CALLS = collections.Counter()


def test_no_user_statement_runs_while_capturing():
    log = []

    class Counter:
        n = 0

    counter = Counter()

    def noted(x):
        global COUNT
        COUNT += 1
        counter.n += 1
        log.append(counter.n)
        CALLS["noted"] += 1
        return x + counter.n

    def fn(x):
        return noted(noted(x))

    run = Run(fn, X)
    assert (COUNT, counter.n, log, CALLS["noted"]) == (0, 0, [], 0)
    out = run(X)
    assert (COUNT, counter.n, log, CALLS["noted"]) == (2, 2, [1, 2], 2)
    same(out, X + 3)


def test_module_state_is_written_back():
    class Steps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.seen = []
            self.last = None

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            self.seen.append(x.sum())
            self.last = x
            self.extra = {"n": len(self.seen)}
            return x - self.mean

    a, b = Steps(), Steps()
    run = Run(a, X)
    same(run(a, X), b(X))
    same(a.mean, b.mean)
    assert "mean" in a._buffers
    same(a.seen, b.seen)
    assert a.last is X
    assert a.extra == b.extra


def test_returned_objects_keep_identity():
    items = [X]
    obj = types.SimpleNamespace(v=items)
    run = Run(lambda o, x: (o, o.v, x, (x, o)), obj, X)
    out = run(obj, X)
    assert out[0] is obj and out[1] is items and out[2] is X and out[3][1] is obj


def test_shared_results_stay_shared():
    def fn(x):
        a = [x + 1]
        return a, {"a": a}

    out = Run(fn, X)(X)
    assert out[0] is out[1]["a"]


def test_hooks_run_in_the_graph():
    net = torch.nn.Linear(3, 3)
    net2 = torch.nn.Sequential(net)
    net.register_forward_hook(lambda m, args, out: out * 2)
    net.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    run = Run(net2, X)
    same(run(net2, X), net2(X))


# ---------------------------------------------------------------- refusals


def raising(x):
    raise ValueError("no")


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (lambda x: x if x.sum() > 0 else -x, "CAP020"),
        (lambda x: x * x.sum().item(), "CAP020"),
        (lambda x: print(x), "CAP016"),
        (lambda x: x.tolist(), "CAP020"),
        (raising, "CAP006"),
        (lambda x: torch.manual_seed(0), "CAP014"),
        (lambda x: open("/dev/null"), "CAP016"),
        (lambda x: __import__("time").time(), "CAP016"),
        (lambda x: f"{x}", "CAP020"),
        (lambda x: x.register_hook(print), "CAP026"),
        (lambda x: x @ torch.ones(7), "CAP025"),
    ],
)
def test_refused_with_code_and_line(fn, code):
    with pytest.raises(Unsupported) as e:
        Run(fn, X)
    assert e.value.code == code
    assert e.value.at.startswith(__file__.rsplit("/", 1)[0])


def test_functions_called_natively_are_noticed():
    @functools.total_ordering
    class Key:
        def __init__(self, k):
            self.k = k

        def __lt__(self, other):
            CALLS["lt"] += 1
            return self.k < other.k

        def __eq__(self, other):
            return self.k == other.k

        def __hash__(self):
            return hash(self.k)

    def fn(x):
        keys = sorted([Key(3), Key(1)])
        return x * keys[0].k, {Key(1): 2}[Key(1)] if False else 0, max(Key(1), Key(2)).k

    run = Run(fn, X)
    assert CALLS["lt"] == 0
    same(run(X), (X, 0, 2))


def test_identity_of_arguments():
    def fn(a, b):
        return a + b if a is b else a - b

    run = Run(fn, X.clone(), X.clone())
    stale(run, X, X)
    run = Run(fn, X, X)
    stale(run, X, X.clone())


def test_messages_come_after_the_graph(capsys):
    import logging
    import warnings

    log = logging.getLogger("torchsmith test")
    once = functools.lru_cache(None)(lambda text: log.warning(text))

    def fn(x):
        print("shape", x.shape)
        log.debug("never")
        once("once")
        warnings.warn("careful", stacklevel=1)
        return x + 1

    run = Run(fn, X)
    assert capsys.readouterr().out == ""
    with pytest.warns(UserWarning, match="careful"):
        run(X)
    assert capsys.readouterr().out == "shape torch.Size([2, 3])\n"
    log.setLevel(logging.DEBUG)
    stale(run, X)


@pytest.mark.parametrize("text", ["np.random.rand()", "datetime.datetime.now()", "random.random()", "os.urandom(1)", "time.time()"])
def test_nothing_that_varies_is_a_constant(text):
    import datetime
    import os
    import random
    import time

    import numpy as np

    names = {"np": np, "datetime": datetime, "random": random, "os": os, "time": time}
    fn = eval(f"lambda x: (x, {text})", names)
    with pytest.raises(Unsupported):
        Run(fn, X)


def test_id_is_that_of_the_object_of_the_call():
    compiled = torchsmith.compile(lambda x, o: (x + 1, id(o)), backend="eager")
    for o in (OPTIONS, Options(), OPTIONS):
        assert compiled(X, o)[1] == id(o)


def test_modules_as_keys() -> None:
    """A dictionary is asked for the module that the program has: another one is another key, and a guard notices."""
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    table = {first: 2.0, second: 5.0}

    def fn(x, layer):
        return x * table[layer], [k.weight.sum() for k in table], layer in table

    compiled = torchsmith.compile(fn, backend="eager", fullgraph=True)
    x = torch.rand(2, 3)
    for layer in (first, second, first):
        got, want = compiled(x, layer), fn(x, layer)
        assert torch.equal(got[0], want[0]) and got[2] == want[2] and all(map(torch.equal, got[1], want[1]))
    del table[first]
    with pytest.raises(KeyError):
        compiled(x, first)
