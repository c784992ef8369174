"""The Dispatcher: binding arguments, trying entries, misses, results by recipe (capture and compilers are stand-ins here)."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from torchsmith.capture import _frame, guards
from torchsmith.capture.source import Attr, FixedObject, Guard, Item, Local


def entry_for(fn, guard_rows, inputs, call, recipe=("out", 0), finish=None):
    code = fn.__code__
    n = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return guards.make_entry(
        guard_rows, inputs, recipe, finish, call, names=code.co_varnames[:n], free_names=code.co_freevars, globals=fn.__globals__
    )


def echo(*args):
    return args


def test_positional_and_keyword_arguments_bind_as_python_does():
    def f(a, b=2, /, c=3, *rest, d, e=5, **more):
        return a, b, c, rest, d, e, more

    d = _frame.Dispatcher(f, lambda *a: _frame.RUN_PLAIN)
    names = ["a", "b", "c", "d", "e", "rest", "more"]
    assert list(d.names) == names
    d.entries = (entry_for(f, [], [Local(n) for n in names], echo, ("tuple", *[("out", i) for i in range(7)])),)
    calls = [((1,), {"d": 4}), ((1, 7), {"d": 4, "c": 9}), ((1, 2, 3, 4, 5), {"d": 0, "x": 1}), ((1,), {"e": 1, "d": 2, "a": 3})]
    for args, kwargs in calls:
        a, b, c, rest, dd, e, more = f(*args, **kwargs)
        assert d(*args, **kwargs) == (a, b, c, dd, e, rest, more)
    for args, kwargs in [((), {"d": 1}), ((1,), {}), ((1,), {"d": 1, "c": 1, "b": 2, "a": 0})]:
        try:
            want = f(*args, **kwargs)
        except TypeError as error:
            with pytest.raises(TypeError) as got:
                d(*args, **kwargs)
            assert str(got.value) == str(error)
        else:
            assert len(d(*args, **kwargs)) == len(want)


def test_a_bound_object_goes_to_the_rest_of_the_arguments():
    def f(*args, key=0):
        return args, key

    d = _frame.Dispatcher(f, lambda *a: _frame.RUN_PLAIN, "self")
    d.entries = (entry_for(f, [], [Local("args"), Local("key")], echo, ("tuple", ("out", 0), ("out", 1), ("out", 0))),)
    for args, kwargs in [((), {}), ((1, 2), {}), ((1,), {"key": 3})]:
        want, key = f("self", *args, **kwargs)
        assert d(*args, **kwargs) == (want, key, want)


def test_defaults_are_read_at_the_call():
    def f(a, b=1):
        return a, b

    d = _frame.Dispatcher(f, lambda *a: _frame.RUN_PLAIN)
    d.entries = (entry_for(f, [], [Local("a"), Local("b")], echo, ("tuple", ("out", 0), ("out", 1))),)
    assert d(0) == (0, 1)
    f.__defaults__ = (7,)
    assert d(0) == (0, 7)
    f.__code__ = (lambda a, b=1: "new code").__code__
    assert d(0) == "new code"


def test_recipes_build_nested_results():
    def f(x):
        return x

    marker = object()
    recipe = ("dict", (("a", ("list", ("out", 1), ("const", marker))), ("b", ("tuple", ("source", Local("x")), ("out", 0)))))
    d = _frame.Dispatcher(f, lambda *a: _frame.RUN_PLAIN)
    d.entries = (entry_for(f, [], [], lambda: ("zero", "one"), recipe),)
    x = object()
    assert d(x) == {"a": ["one", marker], "b": (x, "zero")}


def test_finish_sees_locals_globals_and_cells():
    cell_value = 3

    def f(x):
        return x, cell_value

    def finish(outs, L, G, C):
        C["cell_value"].cell_contents += 1
        return outs, L, G is globals()

    d = _frame.Dispatcher(f, lambda *a: _frame.RUN_PLAIN)
    d.entries = (entry_for(f, [], [Local("x")], lambda x: (x + 1,), None, finish),)
    assert d(1) == ((2,), {"x": 1}, True)
    assert cell_value == 4


def test_entries_are_tried_until_one_fits_and_misses_ask():
    def f(x):
        return "eager"

    asked = []

    def on_miss(d, fn, args, kwargs):
        asked.append((fn, args, kwargs))
        return _frame.RUN_HOOKED

    d = _frame.Dispatcher(f, on_miss)
    d.entries = tuple(entry_for(f, [Guard(Local("x"), "equals", i)], [], lambda i=i: (f"entry {i}",)) for i in range(5))
    for i in (3, 0, 4, 1, 3, 3, 2):
        assert d(i) == f"entry {i}"
    assert not asked
    assert d(9) == "eager" and d(x=9) == "eager"
    assert asked == [(f, (9,), {}), (f, (), {"x": 9})]


def test_methods_bind_self():
    class A:
        def f(self, x):
            return self, x

    original = A.f
    d = _frame.Dispatcher(original, lambda *a: _frame.RUN_PLAIN)
    d.entries = (entry_for(original, [], [Local("self"), Local("x")], echo, ("tuple", ("out", 0), ("out", 1))),)
    A.f = d
    a = A()
    assert a.f(1) == (a, 1) and A.f(a, 2) == (a, 2)
    bound = _frame.Dispatcher(original, lambda *a: _frame.RUN_PLAIN, a)
    bound.entries = d.entries
    assert bound(5) == (a, 5) and bound(x=5) == (a, 5)
    A.g = bound  # a bound method as the attribute of a class is not bound again
    assert A().g(6) == (a, 6) and A.g(6) == (a, 6) and isinstance(bound, _frame.Dispatcher)


def test_exceptions_pass_through_and_nothing_leaks():
    def f(x):
        return x

    def fails(x):
        raise KeyError("mine")

    d = _frame.Dispatcher(f, lambda *a: _frame.RUN_PLAIN)
    d.entries = (entry_for(f, [], [Local("x")], fails),)
    with pytest.raises(KeyError, match="mine"):
        d(object())

    class Thing:
        pass

    t = Thing()
    ref = weakref.ref(t)
    d.entries = (entry_for(f, [Guard(Local("x"), "type", Thing)], [Local("x")], lambda x: (1,)),)
    assert d(t) == 1
    del t
    assert ref() is None
    again = weakref.ref(d)
    d.state = d  # a cycle
    del d
    gc.collect()
    assert again() is None


def test_recursion_and_threads():
    def f(x):
        return x

    d = _frame.Dispatcher(f, lambda *a: _frame.RUN_PLAIN)
    d.entries = (entry_for(f, [Guard(Local("x"), "type", int)], [Local("x")], lambda x: (x if x == 0 else d(x - 1) + 1,)),)
    assert d(50) == 50
    wrong = []

    def work():
        for i in range(2000):
            if d(i % 7) != i % 7:
                wrong.append(i)
            if i % 50 == 0:
                d.entries = (*d.entries,)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_static_values_of_a_module_are_recorded_and_noticed():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.flag = True

        def forward(self, x):
            return x

    net = Net()
    inner = Attr(Local("self"), "inner", "module")
    weight = Attr(inner, "weight", "param")
    rows = [
        Guard(FixedObject(None), "global_state", guards.global_state()),
        Guard(Local("self"), "type", Net),
        Guard(Attr(Local("self"), "flag", "instance"), "equals", True),
        Guard(inner, "type", torch.nn.Linear),
        Guard(weight, "tensor", guards.tensor_guard(net.inner.weight)),
        Guard(Attr(inner, "_forward_hooks", "instance"), "length", 0),
        Guard(Local("x"), "tensor", guards.tensor_guard(torch.ones(2))),
    ]
    seen = []

    def call(x, w):
        seen.append(w)
        return (x,)

    d = _frame.Dispatcher(Net.forward, lambda *a: _frame.RUN_PLAIN)
    e = entry_for(Net.forward, rows, [Local("x"), weight], call, ("const", "hit"))
    d.entries = (e,)
    x = torch.ones(2)
    assert e.recorded is None
    assert d(net, x) == "hit" and e.recorded is not None
    assert d(net, x) == "hit" and seen[-1] is net.inner.weight
    net.flag = False
    assert d(net, x) is x
    net.flag = True
    assert d(net, x) == "hit"
    net.inner = torch.nn.Linear(2, 2)
    assert d(net, x) == "hit" and seen[-1] is net.inner.weight
    net.inner.weight.requires_grad_(False)
    assert d(net, x) is x
    net.inner.weight.requires_grad_(True)
    assert d(net, x) == "hit"
    net.inner.weight.data = torch.zeros(2, 3)
    assert d(net, x) is x
    net.inner.weight.data = torch.zeros(2, 2)
    assert d(net, x) == "hit"
    with torch.no_grad():
        assert d(net, x) is x
    handle = net.inner.register_forward_hook(lambda *a: None)
    assert d(net, x) is x
    handle.remove()
    assert d(net, x) == "hit"
    net.inner.__class__ = type("Other", (torch.nn.Linear,), {})
    assert d(net, x) is x


def test_list_items_are_looked_at_on_every_call():
    def f(xs):
        return "eager"

    d = _frame.Dispatcher(f, lambda *a: _frame.RUN_PLAIN)
    rows = [Guard(Local("xs"), "type", list), Guard(Local("xs"), "length", 2), Guard(Item(Local("xs"), 1), "equals", 5)]
    d.entries = (entry_for(f, rows, [], lambda: ("hit",)),)
    xs = [1, 5]
    assert d(xs) == "hit"
    xs[1] = 6
    assert d(xs) == "eager"
    xs[1] = 5
    assert d(xs) == "hit"
    xs.append(1)
    assert d(xs) == "eager"
