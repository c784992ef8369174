# ruff: noqa  (programs as users write them)
"""Small programs that live for several calls, as users write them: each is run as it is and compiled by tests/cpu/test_lives.py.

A row is a function of `compiled`, which returns a function or module as it is, or compiled. It makes a world of its own, calls what it
compiled several times, changes things in between, and returns what it saw.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import io
import itertools
import logging
import math
import operator
import sys
import types
import typing
import warnings
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.nn.utils import parametrizations, parametrize

LIVES = {}


def life(fn):
    assert fn.__name__ not in LIVES, fn.__name__
    LIVES[fn.__name__] = fn
    return fn


def grid(*shape):
    return torch.arange(float(math.prod(shape))).reshape(shape) / 7 - 0.4


def told(error):
    """An exception as plain data: its type, text, notes, and what it came from."""
    if error is None:
        return None
    return type(error).__name__, str(error), told(error.__cause__), told(error.__context__), error.__suppress_context__, getattr(error, "__notes__", None)


def attempt(fn, *args, **kwargs):
    try:
        return "returned", fn(*args, **kwargs)
    except Exception as e:
        return "raised", told(e)


def lines(error):
    """The functions through which an exception came."""
    out, tb = [], error.__traceback__
    while tb is not None:
        out.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    return out


# ---------------------------------------------------------------- NumPy


@life
def numpy_in_and_out(compiled):
    @compiled
    def f(a, x):
        b = np.sin(a) * 2 + a.mean(axis=0)
        return b, x + torch.from_numpy(b).float(), b.dtype, b.shape, type(b) is np.ndarray

    return [f(np.arange(6.0).reshape(2, 3), grid(2, 3)), f(np.ones((2, 3), np.float32), grid(2, 3)), f(np.arange(6).reshape(2, 3), grid(2, 3))]


@life
def numpy_writes_into_its_argument(compiled):
    @compiled
    def f(a):
        a[0] = 5
        a[:, 1] += 1
        v = a[1:]
        v *= 2
        return v, a.sum(), np.shares_memory(v, a)

    a = np.arange(6.0).reshape(2, 3)
    return [f(a), a, f(a), a.copy()]


@life
def numpy_shares_memory_with_a_tensor(compiled):
    @compiled
    def f(x):
        a = x.numpy()
        a += 1
        y = torch.from_numpy(a)
        y.mul_(2)
        return a, y, x

    x = grid(3)
    a, y, z = f(x)
    return [x, a, y, z is x, a[0] == x[0].item(), f(x)]


@life
def numpy_numbers_keep_their_type(compiled):
    @compiled
    def f(a, n):
        s, t = a.sum(), a[0]
        return type(s).__name__, type(t).__name__, type(t * n).__name__, type(np.float32(n) * 2).__name__, s * n, t + 1, np.float64(2) ** n

    return [f(np.arange(3, dtype=np.float32), 2), f(np.arange(3), 2.5), f(np.arange(3, dtype=np.int8), 3), f(np.array([True, False]), 4)]


@life
def numpy_errors(compiled):
    @compiled
    def f(a, b):
        return a @ b

    @compiled
    def g(a, b):
        try:
            return np.concatenate([a, b], axis=3)
        except Exception as e:
            return type(e).__name__, str(e)

    return [attempt(f, np.ones((2, 3)), np.ones((2, 3))), g(np.ones(2), np.ones(3)), attempt(f, np.ones(2), np.ones(2))]


@life
def numpy_masks_and_where(compiled):
    @compiled
    def f(a, x):
        m = a > a.mean()
        return a[m], np.where(m, a, -a), np.nonzero(m), np.argsort(a)[::-1], np.clip(a, 0, 1), x[torch.as_tensor(m)]

    return [f(np.array([1.0, 3, 2]), grid(3)), f(np.array([0.0, 0, 5]), grid(3))]


@life
def numpy_random_and_dtypes(compiled):
    @compiled
    def f(x, kind):
        r = np.random.default_rng(3).normal(size=3)
        return x.numpy().astype(kind) + r.astype(kind), np.zeros_like(r, dtype=kind).dtype, np.linspace(0, 1, 3, dtype=kind)

    return [f(grid(3), np.float32), f(grid(3), "float64"), f(grid(3), np.float16)]


@life
def numpy_object_and_string_arrays(compiled):
    @compiled
    def f(x, names):
        return [n.upper() for n in names], x * len(names), names[0], np.char.add(names, "!")

    return [f(grid(2), np.array(["a", "b"])), f(grid(2), np.array(["c"]))]


# ---------------------------------------------------------------- objects with __torch_function__, modes


class Tagged:
    def __init__(self, t, tag):
        self.t, self.tag = t, tag

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        tags = [a.tag for a in args if isinstance(a, Tagged)]
        out = func(*[a.t if isinstance(a, Tagged) else a for a in args], **(kwargs or {}))
        return Tagged(out, "+".join(tags) + ":" + func.__name__)


class Metric(torch.Tensor):
    scale = 3

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Metric):
            out.steps = max([getattr(a, "steps", 0) for a in args if isinstance(a, Metric)], default=0) + 1
        return out


class Plain(torch.Tensor):
    pass


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@life
def tagged_objects(compiled):
    @compiled
    def f(a, b):
        c = torch.add(a, b)
        d = torch.cat([c.t, torch.sin(c).t])
        return c.tag, d, torch.mul(c, 2).tag

    return [f(Tagged(grid(2), "a"), grid(2)), f(grid(2), Tagged(grid(2), "b")), f(Tagged(grid(2), "a"), Tagged(grid(2), "b"))]


@life
def subclass_with_state(compiled):
    @compiled
    def f(m):
        n = (m * 2 + 1).relu()
        return n, type(n).__name__, n.steps, m.scale, isinstance(n, Metric), n.as_subclass(torch.Tensor)

    return [f(grid(3).as_subclass(Metric)), f(f(grid(3).as_subclass(Metric))[0])]


@life
def subclass_and_tensor_in_turn(compiled):
    @compiled
    def f(x):
        return type(x + 1).__name__, x * 2

    return [f(grid(2)), f(grid(2).as_subclass(Plain)), f(nn.Parameter(grid(2)).detach()), f(grid(2).as_subclass(Metric)), f(grid(2))]


@life
def mode_around_a_call(compiled):
    @compiled
    def f(x):
        return torch.sin(x).add(1).view(-1)

    out = [f(grid(2))]
    with Counting() as mode:
        out.append(f(grid(2)))
    return out + [mode.names, f(grid(2))]


@life
def mode_inside_a_call(compiled):
    @compiled
    def f(x):
        with Counting() as mode:
            y = torch.cos(x) * 2
            with torch._C.DisableTorchFunction():
                y = y + 1
        return y, mode.names

    return [f(grid(2)), f(grid(3))]


@life
def mode_that_changes_results(compiled):
    class Double(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    @compiled
    def f(x):
        return torch.sin(x) + torch.cos(x)

    with Double():
        first = f(grid(2))
    return [first, f(grid(2))]


# ---------------------------------------------------------------- repeated blocks


class Block(nn.Module):
    def __init__(self, d=4, gain=1.0):
        super().__init__()
        self.lin, self.norm, self.gain = nn.Linear(d, d), nn.LayerNorm(d), gain
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.count += 1
        self.calls += 1
        return x + self.gain * F.gelu(self.lin(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, n=4, d=4, **kw):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(d, **kw) for _ in range(n))

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x


def inside(m):
    return [(b.count.item(), b.calls, b.gain) for b in m.blocks]


@life
def stack_counts(compiled):
    m = Stack()
    f = compiled(m)
    return [f(grid(2, 4)), inside(m), f(grid(2, 4)), inside(m)]


@life
def stack_with_one_other_gain(compiled):
    m = Stack()
    m.blocks[2].gain = 0.5
    f = compiled(m)
    out = [f(grid(2, 4))]
    m.blocks[1].gain = -1.0
    out.append(f(grid(2, 4)))
    m.blocks[3].gain = torch.tensor(2.0)
    return out + [f(grid(2, 4)), inside(m)]


@life
def stack_with_hooks(compiled):
    m, seen = Stack(), []
    f = compiled(m)
    out = [f(grid(2, 4))]
    h = m.blocks[1].register_forward_hook(lambda mod, a, o: o * 2)
    out.append(f(grid(2, 4)))
    k = m.blocks[2].register_forward_pre_hook(lambda mod, a: (a[0] + 1,))
    g = m.blocks[3].register_forward_hook(lambda mod, a, o: seen.append(tuple(o.shape)))
    out.append(f(grid(2, 4)))
    h.remove(), k.remove()
    out.append(f(grid(2, 4)))
    g.remove()
    return out + [f(grid(2, 4)), seen]


@life
def stack_with_shared_block(compiled):
    m = Stack()
    m.blocks[3] = m.blocks[0]
    f = compiled(m)
    out = [f(grid(2, 4)), inside(m)]
    m.blocks[0].lin.weight.data.zero_()
    return out + [f(grid(2, 4)), inside(m)]


@life
def stack_with_tied_weights(compiled):
    m = Stack()
    for b in m.blocks:
        b.lin.weight = m.blocks[0].lin.weight
    f = compiled(m)
    x = grid(2, 4).requires_grad_()
    f(x).sum().backward()
    out = [x.grad, m.blocks[0].lin.weight.grad, m.blocks[2].lin.bias.grad]
    m.blocks[2].lin.weight = nn.Parameter(torch.eye(4))
    return out + [f(grid(2, 4))]


@life
def stack_with_an_attribute_of_one_instance(compiled):
    m = Stack()
    m.blocks[2].forward = types.MethodType(lambda self, x: x * 3, m.blocks[2])
    f = compiled(m)
    out = [f(grid(2, 4))]
    del m.blocks[2].forward
    return out + [f(grid(2, 4)), inside(m)]


@life
def stack_with_other_class_between(compiled):
    class Loud(Block):
        def forward(self, x):
            print("loud", tuple(x.shape))
            return super().forward(x) + 1

    m = Stack()
    m.blocks[1] = Loud()
    f = compiled(m)
    out = [f(grid(2, 4)), f(grid(3, 4))]
    m.blocks[0].__class__ = Loud
    return out + [f(grid(2, 4))]


@life
def stack_grows_and_shrinks(compiled):
    m = Stack(2)
    f = compiled(m)
    out = [f(grid(2, 4))]
    torch.manual_seed(4)
    m.blocks.append(Block())
    out.append(f(grid(2, 4)))
    del m.blocks[0]
    return out + [f(grid(2, 4)), inside(m)]


@life
def stack_of_lists_and_dicts(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(4) * i) for i in range(3)])
            self.extra = nn.ParameterDict({"k": nn.Parameter(torch.ones(4))})

        def forward(self, x, which=None):
            for s in self.scales:
                x = x + s
            return {n: h(x * self.extra["k"]) for n, h in self.heads.items() if which is None or n in which}

    m = Net()
    f = compiled(m)
    out = [f(grid(2, 4)), f(grid(2, 4), ["a"]), f(grid(2, 4), which=("b", "c"))]
    m.heads["c"] = nn.Identity()
    m.scales.append(nn.Parameter(torch.ones(4)))
    return out + [f(grid(2, 4)), f(grid(2, 4), "c")]


@life
def block_that_returns_state(compiled):
    class Cell(nn.Module):
        def __init__(self, i):
            super().__init__()
            self.i, self.last = i, None

        def forward(self, x, cache):
            self.last = x * (self.i + 1)
            cache.append(self.last)
            return self.last + (cache[-2] if len(cache) > 1 else 0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.ModuleList(Cell(i) for i in range(4))

        def forward(self, x, cache=None):
            cache = [] if cache is None else cache
            for c in self.cells:
                x = c(x, cache)
            return x, cache

    m = Net()
    f = compiled(m)
    y, cache = f(grid(3))
    return [y, cache, cache[1] is m.cells[1].last, f(grid(3), [grid(3)]), [c.last for c in m.cells]]


# ---------------------------------------------------------------- breaks at any depth


def announce(text, value=None):
    print(text, end=";")
    return value


@life
def break_in_with_in_try_in_for(compiled):
    class Guarded:
        def __init__(self, log):
            self.log = log

        def __enter__(self):
            self.log.append("in")
            return self

        def __exit__(self, kind, value, tb):
            self.log.append(kind and kind.__name__)
            return kind is KeyError

    @compiled
    def f(x, log):
        total = x
        for i in range(4):
            with Guarded(log) as g:
                try:
                    total = total + i
                    print(f"{total.sum().item():.3f}")
                    if i == 2:
                        raise KeyError(i)
                    total = total * 2
                except ValueError:
                    total = total * 0
                finally:
                    log.append(i)
                    total = total - 1
        return total

    log = []
    return [f(grid(3), log), f(grid(3), log), log]


@life
def break_in_comprehensions(compiled):
    @compiled
    def f(xs):
        a = [x * x.sum().item() for x in xs]
        b = {i: x + announce(i, 1) for i, x in enumerate(xs)}
        c = {round(x.mean().item(), 3) for x in xs}
        d = [y for x in xs if bool(x.sum() > 0) for y in x]
        return a, b, sorted(c), d, tuple(x.max().item() for x in xs)

    return [f([grid(3), grid(2) + 1]), f([grid(3), grid(2) - 1])]


@life
def break_in_a_callee(compiled):
    def inner(x):
        y = x * 2
        print(f"{y.sum().item():.4f}")
        return y + 1

    def middle(x, k):
        z = inner(x + k)
        return z * k

    @compiled
    def f(x):
        a = x.sin()
        b = middle(a, 2) + middle(a, k=3)
        return b.cos()

    return [f(grid(3)), f(grid(4))]


@life
def break_in_a_callee_with_cells(compiled):
    def make(x):
        n = 0
        kept = x * 2

        def step(v):
            nonlocal n, kept
            n += 1
            announce(f"{kept.sum().item():.3f}")
            kept = kept + v
            return kept * n

        return step, lambda: (n, kept)

    @compiled
    def f(x):
        step, look = make(x)
        return step(x) + step(x + 1), look()

    return [f(grid(3)), f(grid(3) + 1)]


@life
def break_in_a_method_and_property(compiled):
    class Thing:
        def __init__(self, x):
            self.x, self.reads = x, 0

        @property
        def level(self):
            self.reads += 1
            return self.x.mean().item()

        def update(self, d):
            self.x = self.x + d
            announce("update")
            self.x = self.x * 2
            return self

        def __enter__(self):
            announce("enter", self.x.sum().item())
            return self.x

        def __exit__(self, *a):
            announce("exit")

        def __iter__(self):
            for r in self.x:
                announce("row")
                yield r

    @compiled
    def f(t, d):
        with t as inner:
            y = t.update(d).update(1).x + inner
        if t.level > 0:
            y = y + 1
        return y, [r * 2 for r in t]

    t = Thing(grid(3))
    return [f(t, 1), t.reads, t.x, f(t, -5.5), t.reads, t.x]


@life
def break_in_a_sort_key_and_map(compiled):
    @compiled
    def f(xs):
        a = sorted(xs, key=lambda x: -x.sum().item())
        b = list(map(lambda x: announce("m", x * 2), a))
        c = functools.reduce(lambda p, q: p + q.sum().item(), b, 0.0)
        return a, b, c, max(xs, key=lambda x: x.max().item()) is xs[1]

    return [f([grid(2), grid(3) + 1, grid(4) - 1])]


@life
def break_in_except_and_finally(compiled):
    @compiled
    def f(x, bad):
        try:
            try:
                y = x + 1
                if bad:
                    raise ValueError("bad")
            except ValueError as e:
                print(e, f"{y.sum().item():.3f}")
                y = y * 3
                raise RuntimeError("worse") from e
            finally:
                print("first")
                y = y + 2
        except RuntimeError as e:
            return y, told(e)
        return y

    return [f(grid(3), False), f(grid(3), True), f(grid(3), False)]


@life
def break_in_while_with_else(compiled):
    @compiled
    def f(x, limit):
        n = 0
        while x.abs().max().item() < limit:
            x = x * 2
            n += 1
            if n > 6:
                break
        else:
            x = x + 100
        return x, n

    return [f(grid(3), 2), f(grid(3), 3), f(grid(3), 1e9), f(grid(3), 0)]


@life
def break_with_deleted_names(compiled):
    @compiled
    def f(x):
        a = x + 1
        b = a * 2
        del a
        print("cut")
        try:
            return a
        except UnboundLocalError as e:
            print(e)
        c = b + 1
        del b
        print("cut again")
        return c, sorted(locals())

    return [f(grid(3)), f(grid(4))]


@life
def break_in_nested_functions_with_try(compiled):
    def deep(x, n):
        try:
            if n == 0:
                print("bottom")
                raise LookupError(f"{x.sum().item():.3f}")
            return deep(x + n, n - 1)
        finally:
            print("up", n)

    @compiled
    def f(x):
        try:
            return deep(x, 3)
        except LookupError as e:
            return x * 2, told(e), lines(e)

    return [f(grid(3)), f(grid(3))]


@life
def break_between_unpackings(compiled):
    @compiled
    def f(x):
        (a, *b), c = (x, announce("1", x + 1), x + 2), announce("2", x * 2)
        d = [a, *announce("3", b), *(announce(i, c) for i in range(2))]
        e = {"k": announce("4", d[0]), **{"z": announce("5", c)}}
        return dict(e, q=announce("6", a)), (lambda *p, **k: (p, k))(*d, **announce("7", e))

    return [f(grid(2))]


@life
def break_in_operators(compiled):
    class Odd:
        def __init__(self, v):
            self.v = v

        def __add__(self, o):
            announce("add")
            return Odd(self.v + o)

        __radd__ = __add__

        def __getitem__(self, i):
            announce(f"get {i}")
            return self.v[i]

        def __lt__(self, o):
            return announce("lt", self.v.sum().item() < o)

        def __bool__(self):
            return announce("bool", True)

        def __eq__(self, o):
            return announce("eq", NotImplemented)

    @compiled
    def f(x):
        o = Odd(x)
        p = 1 + o + 2
        return p.v, p[0], p[1:], p < 3, (1 if p else 2), p == o, p != o, not p, 0 < p[0].item() < 2

    return [f(grid(3))]


@life
def break_inside_vmap_and_grad(compiled):
    def loss(w, x):
        return ((x * w) ** 2).sum()

    @compiled
    def f(w, x):
        g = torch.func.grad(loss)(w, x)
        print(f"{g.sum().item():.3f}")
        h = torch.func.vmap(lambda r: r * g.sum())(x)
        return g, h

    return [f(grid(3), grid(2, 3)), f(grid(3), grid(4, 3))]


@life
def break_under_no_grad_and_autocast(compiled):
    @compiled
    def f(x, w):
        with torch.no_grad():
            a = x @ w
            print("in no_grad", a.requires_grad)
            b = a * 2
        with torch.autocast("cpu", torch.bfloat16):
            c = x @ w
            print(c.dtype)
            d = x @ w + 1
        return a.requires_grad, b, c.dtype, d.dtype, (x @ w).requires_grad, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    return [f(grid(2, 3).requires_grad_(), grid(3, 2))]


# ---------------------------------------------------------------- generators, nonlocal, cells


@life
def generator_with_send_and_close(compiled):
    def talk(x):
        try:
            got = yield x
            while got is not None:
                x = x * got
                got = yield x
            return "told"
        finally:
            print("closed")

    @compiled
    def f(x):
        g = talk(x)
        a = next(g)
        b = g.send(2)
        try:
            g.send(None)
        except StopIteration as e:
            end = e.value
        h = talk(x)
        next(h)
        h.close()
        return a, b, end

    return [f(grid(2)), f(grid(3))]


@life
def generator_that_outlives_the_call(compiled):
    def rows(x, log):
        for i, r in enumerate(x):
            log.append(i)
            yield r * 2

    @compiled
    def f(x, log):
        g = rows(x, log)
        first = next(g)
        return first + 1, g

    log = []
    first, g = f(grid(3, 2), log)
    out = [first, list(log)]
    return out + [next(g), list(log), list(g), log]


@life
def generator_from_outside(compiled):
    @compiled
    def f(x, g):
        return x * next(g), [x + v for v in itertools.islice(g, 2)]

    g = (i * i for i in range(10))
    return [f(grid(2), g), f(grid(2), g), next(g)]


@life
def generator_that_raises(compiled):
    def source(x):
        yield x
        raise ValueError("dry")

    @compiled
    def f(x):
        out = []
        try:
            for v in source(x):
                out.append(v + 1)
        except ValueError as e:
            out.append(told(e))
        return out

    @compiled
    def g(x):
        def bad():
            yield x
            raise StopIteration(3)

        return attempt(lambda: list(bad()))

    return [f(grid(2)), g(grid(2))]


@life
def generator_itself_compiled(compiled):
    @compiled
    def f(x, n):
        for i in range(n):
            x = x * 2
            got = yield x
            if got is not None:
                x = x + got
        return x

    g = f(grid(2), 3)
    return [next(g), g.send(1), list(g), list(f(grid(3), 2))]


@life
def closure_changed_between_calls(compiled):
    k, scale = 2, torch.ones(2)

    @compiled
    def f(x):
        return x * k + scale

    out = [f(grid(2))]
    k = 5
    out.append(f(grid(2)))
    scale = scale + 1
    out.append(f(grid(2)))
    k = 0.5
    out.append(f(grid(2)))
    k = grid(2)
    out.append(f(grid(2)))
    del k
    return out + [attempt(f, grid(2))]


@life
def closure_written_inside(compiled):
    n, last = 0, None

    @compiled
    def f(x):
        nonlocal n, last
        n += 1
        last = x * n
        return last

    return [f(grid(2)), n, last, f(grid(2)), n, last, f(grid(2)) is last]


@life
def closures_made_inside(compiled):
    @compiled
    def f(x):
        acc = [x]

        def add(v):
            acc[0] = acc[0] + v
            return acc[0]

        def late():
            return after * 2

        after = x + 3
        return add, late, [lambda i=i: x * i for i in range(2)], [lambda: after for _ in range(2)]

    add, late, early, lates = f(grid(2))
    return [add(1), add(1), late(), [e() for e in early], lates[0]() is lates[1](), add.__name__, add.__qualname__, late.__closure__ is not None]


@life
def cells_in_classes(compiled):
    @compiled
    def f(x):
        k = x * 2

        class Local:
            size = x.shape[0]

            def get(self):
                return k + self.size

        return Local().get(), Local.__name__, Local.size

    return [f(grid(2)), f(grid(3))]


@life
def recursion_and_globals(compiled):
    space = {"n": 0, "torch": torch}
    exec("def fact(x, n):\n    global n_calls\n    n_calls = n\n    return x if n == 0 else fact(x, n - 1) * n\n", space)
    f = compiled(space["fact"])
    out = [f(grid(2), 3), space["n_calls"]]
    space["fact"] = lambda x, n: x - 1
    return out + [f(grid(2), 3), space["n_calls"]]


# ---------------------------------------------------------------- exceptions


@life
def exceptions_from_and_context(compiled):
    class Own(Exception):
        def __init__(self, code, *, why="none"):
            super().__init__(f"own {code}")
            self.code, self.why = code, why

    @compiled
    def f(x, how):
        try:
            y = x + 1
            {}[how]
        except KeyError as e:
            if how == "from":
                raise Own(1, why="from") from e
            if how == "none":
                raise Own(2) from None
            if how == "bare":
                raise
            if how == "note":
                e.add_note("a note")
                raise
            raise Own(3)

    def all_of(how):
        try:
            return f(grid(2), how)
        except Exception as e:
            return told(e), getattr(e, "code", None), getattr(e, "why", None), lines(e)[-1]

    return [all_of(h) for h in ("from", "none", "bare", "note", "context", "from")]


@life
def exceptions_of_torch(compiled):
    @compiled
    def f(x, how):
        y = x * 2
        if how == 0:
            return y @ y
        if how == 1:
            return y.view(7)
        if how == 2:
            return torch.cat([y, y[0]])
        if how == 3:
            return F.linear(y, torch.ones(2, 9))
        if how == 4:
            return y[5]
        if how == 5:
            return y.sum(dim=4)
        if how == 6:
            return torch.zeros(2, dtype="float")
        return F.cross_entropy(y, torch.tensor([7, 0]))

    return [attempt(f, grid(2, 3), i) for i in range(8)]


@life
def exceptions_leave_writes_behind(compiled):
    @compiled
    def f(x, log, box):
        x.add_(1)
        log.append("a")
        box["k"] = x * 2
        if len(log) > 1:
            x.mul_(3)
            raise ValueError(f"after {len(log)}")
        log.append("b")
        return x

    x, log, box = grid(2), [], {}
    return [attempt(f, x, log, box), x.clone(), attempt(f, x, log, box), x.clone(), log, box]


@life
def exceptions_groups_and_assert(compiled):
    @compiled
    def f(x, how):
        assert x.dim() == 1, f"dims {x.dim()}"
        try:
            if how:
                raise ExceptionGroup("many", [ValueError(1), TypeError("t"), ValueError(2)])
        except* ValueError as g:
            x = x + len(g.exceptions)
        except* TypeError as g:
            x = x * 10
        return x

    return [f(grid(2), False), f(grid(2), True), attempt(f, grid(2, 2), False)]


@life
def exceptions_in_hooks_and_exits(compiled):
    class Swap:
        def __enter__(self):
            return self

        def __exit__(self, kind, value, tb):
            if kind is ZeroDivisionError:
                raise TypeError("swapped") from value
            return kind is OSError

    @compiled
    def f(x, error):
        y = x
        with Swap(), contextlib.suppress(KeyError):
            y = y + 1
            if error is not None:
                raise error
            y = y * 2
        return y

    return [f(grid(2), None), f(grid(2), OSError(1)), attempt(f, grid(2), ZeroDivisionError("z")), f(grid(2), KeyError(2)), attempt(f, grid(2), ValueError("v"))]


@life
def exceptions_as_values(compiled):
    @compiled
    def f(x):
        errors = [ValueError("a"), KeyError("b"), IndexError(3)]
        out = []
        for e in errors:
            try:
                raise e
            except (ValueError, IndexError) as caught:
                out.append((caught is e, str(caught), caught.args))
            except LookupError as caught:
                out.append((repr(caught), isinstance(caught, KeyError)))
        return x * len(out), out, errors[0]

    return [f(grid(2))]


@life
def exceptions_retry(compiled):
    @compiled
    def f(x, failures):
        for attempt_ in range(5):
            try:
                x = x + 1
                if failures:
                    raise failures.pop()
            except (ValueError, TypeError) as e:
                print("retry", attempt_, type(e).__name__)
                continue
            else:
                print("well")
                break
            finally:
                print("tidy")
        else:
            return "never"
        return x, attempt_

    return [f(grid(2), []), f(grid(2), [ValueError(), TypeError()]), attempt(f, grid(2), [OSError("o"), ValueError()]), f(grid(2), [ValueError()] * 9)]


# ---------------------------------------------------------------- text


@life
def text_of_values(compiled):
    @compiled
    def f(x, n):
        print("x", x, n, sep="|")
        print(f"{n:>4} {x.shape} {x.mean():.3f} {x.dtype!r}")
        sys.stdout.write("written\n")
        print(*[1, 2], file=sys.stdout, flush=True)
        return x * n

    return [f(grid(2), 2), f(grid(2), 3), f(grid(3), 2.5)]


@life
def text_of_warnings(compiled):
    @compiled
    def f(x, k):
        warnings.warn(f"k is {k}")
        y = x * k
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        with warnings.catch_warnings(record=True) as inner:
            warnings.simplefilter("always")
            warnings.warn("hidden")
        return y, [str(w.message) for w in inner]

    return [f(grid(2), 2), f(grid(2), 3)]


@life
def text_of_warnings_as_errors(compiled):
    @compiled
    def f(x):
        y = x + 1
        warnings.warn("loud", UserWarning)
        return y

    out = [f(grid(2))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out.append(attempt(f, grid(2)))
    return out + [f(grid(2))]


@life
def text_of_logging(compiled):
    log = logging.getLogger("lives.text")
    log.propagate = False
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(funcName)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    @compiled
    def f(x, n):
        log.debug("not seen %s", x)
        log.info("n is %d", n)
        y = x * n
        log.warning("sum %.3f", y.sum())
        if log.isEnabledFor(logging.DEBUG):
            y = y + 1
        return y

    out = [f(grid(2), 2)]
    log.setLevel(logging.DEBUG)
    out.append(f(grid(2), 3))
    return out + [stream.getvalue()]


@life
def text_redirected_inside(compiled):
    @compiled
    def f(x):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            print("inside", x.shape)
            y = x + 1
            print(f"{y.sum().item():.2f}")
        print("outside")
        return y, out.getvalue()

    return [f(grid(2)), f(grid(3))]


@life
def text_print_replaced(compiled):
    said = []
    space = {"print": lambda *a, **k: said.append(a), "torch": torch}
    exec("def f(x):\n    print('n', x.shape[0])\n    return x + 1\n", space)
    f = compiled(space["f"])
    out = [f(grid(2)), list(said)]
    del space["print"]
    return out + [f(grid(2)), said]


# ---------------------------------------------------------------- classes of every kind


@dataclasses.dataclass
class Config:
    rate: float = 0.5
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])
    name: str = "c"

    def __post_init__(self):
        self.half = self.rate / 2

    @property
    def twice(self):
        return self.rate * 2


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: typing.Any = dataclasses.field(default=None, compare=False)
    made: typing.ClassVar[list] = []


@dataclasses.dataclass(slots=True, kw_only=True)
class Output:
    loss: typing.Any = None
    logits: typing.Any = None


class Mode(enum.Enum):
    TRAIN = "t"
    TEST = "e"

    @property
    def short(self):
        return self.value * 2

    @classmethod
    def parse(cls, text):
        return cls(text)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()
    C = A | B


class Point(typing.NamedTuple):
    x: typing.Any
    y: typing.Any = 2

    def norm(self):
        return (self.x**2).sum() + self.y


@life
def dataclasses_in_and_out(compiled):
    @compiled
    def f(c, x):
        c.sizes.append(x.shape[0])
        c.name += "!"
        d = dataclasses.replace(c, rate=c.rate + 1)
        return x * c.twice + d.half, d, Output(loss=x.sum(), logits=x), dataclasses.asdict(c)

    c = Config()
    out = [f(c, grid(2)), f(c, grid(3)), c]
    c.rate = 4.0
    out.append(f(c, grid(2)))
    o = out[0][2]
    return out + [o.loss, o.logits, o.__slots__]


@life
def dataclasses_frozen(compiled):
    @compiled
    def f(p, x):
        try:
            p.a = 3
        except dataclasses.FrozenInstanceError as e:
            print(type(e).__name__, e)
        q = Frozen(p.a + 1, x)
        Frozen.made.append(q.a)
        return x * q.a, q > p, q == Frozen(p.a + 1), hash(q) == hash(Frozen(p.a + 1)), {p: 1}.get(Frozen(p.a)), max(p, q).a

    Frozen.made.clear()
    return [f(Frozen(1), grid(2)), f(Frozen(5, 3), grid(2)), list(Frozen.made)]


@life
def enums(compiled):
    @compiled
    def f(x, mode, level, flags):
        if mode is Mode.TRAIN:
            x = x * 2
        if level > Level.LOW:
            x = x + level
        if Flags.A in flags:
            x = x - flags.value
        return x, mode.short, Mode.parse("e"), Mode["TRAIN"].name, [m.value for m in Mode], flags | Flags.B, {mode: 1}[mode], f"{level}", isinstance(level, int)

    return [
        [str(v) for v in f(grid(2), Mode.TRAIN, Level.LOW, Flags.A)],
        [str(v) for v in f(grid(2), Mode.TEST, Level.HIGH, Flags.B)],
        [str(v) for v in f(grid(2), Mode.TEST, Level.LOW, Flags.C)],
        attempt(f, grid(2), Mode.TEST, None, Flags.C),
    ]


@life
def named_tuples(compiled):
    @compiled
    def f(p):
        q = p._replace(y=p.y + 1)
        a, b = q
        return q, a * b, q.norm(), Point(a), Point._fields, q[:1], isinstance(q, tuple), q == (a, b) if b > 9 else None, q._asdict()

    return [f(Point(grid(2), 3)), f(Point(grid(2), 4.5)), f(Point(y=1, x=grid(3)))]


@life
def properties_and_descriptors(compiled):
    class Positive:
        def __set_name__(self, owner, name):
            self.name = "_" + name

        def __get__(self, obj, owner=None):
            return self if obj is None else getattr(obj, self.name)

        def __set__(self, obj, value):
            if value < 0:
                raise ValueError(f"{self.name} below zero")
            setattr(obj, self.name, value)

    class Cached:
        def __init__(self, fn):
            self.fn = fn

        def __get__(self, obj, owner):
            value = obj.__dict__[self.fn.__name__] = self.fn(obj)
            return value

    class Thing:
        size = Positive()

        def __init__(self, size):
            self.size, self.made = size, 0

        @Cached
        def table(self):
            self.made += 1
            return torch.arange(float(self.size))

        @property
        def area(self):
            return self.size**2

        @area.setter
        def area(self, v):
            self.size = int(v**0.5)

        @area.deleter
        def area(self):
            self.size = 0

        def __getattr__(self, name):
            if name.startswith("auto_"):
                return name[5:]
            raise AttributeError(f"none {name}")

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)
            if name == "logged":
                print("set", name)

    @compiled
    def f(t, x):
        t.logged = 1
        y = x * t.size + t.table.sum() + t.table.sum() + t.area
        t.area = 9
        z = y + t.size
        del t.area
        return z, t.size, t.auto_name, attempt(lambda: t.other), attempt(setattr, t, "size", -1), getattr(t, "no", 5)

    t = Thing(3)
    return [f(t, grid(2)), t.made, vars(t), f(Thing(2), grid(2))]


@life
def slots_and_weakrefs(compiled):
    class Slotted:
        __slots__ = ("a", "b", "__weakref__")

        def __init__(self, a):
            self.a = a

    @compiled
    def f(s, x):
        before = hasattr(s, "b")
        s.b = x + s.a
        s.a += 1
        r = weakref.ref(s)
        return before, s.b, r() is s, attempt(lambda: setattr(s, "c", 1))

    s = Slotted(2)
    return [f(s, grid(2)), s.a, s.b, f(s, grid(2)), s.a]


@life
def metaclasses_and_abc(compiled):
    class Registry(type):
        seen = {}

        def __new__(mcs, name, bases, space, **kw):
            cls = super().__new__(mcs, name, bases, space, **kw)
            mcs.seen[name] = cls
            return cls

        def __call__(cls, *a):
            obj = super().__call__(*a)
            obj.born = len(a)
            return obj

        def __getitem__(cls, k):
            return f"{cls.__name__}[{k}]"

        def __contains__(cls, k):
            return k == 3

        def __len__(cls):
            return 7

    class Base(metaclass=Registry):
        def __init__(self, k=1):
            self.k = k

        def __init_subclass__(cls, /, tag="none", **kw):
            cls.tag = tag

    class Op(abc.ABC):
        @abc.abstractmethod
        def run(self, x): ...

    class Sin(Op):
        def run(self, x):
            return x.sin()

    @compiled
    def f(x):
        b = Base(2)

        class Made(Base, tag="made"):
            pass

        return x * b.k + b.born, Base["q"], 3 in Base, len(Base), Made.tag, Made().born, sorted(Registry.seen), Sin().run(x), attempt(Op), isinstance(Sin(), Op)

    return [f(grid(2))]


@life
def functools_of_all_kinds(compiled):
    calls = []

    @functools.lru_cache(maxsize=2)
    def cached(n):
        calls.append(n)
        return n * 2

    @functools.singledispatch
    def show(v):
        return "any"

    @show.register
    def _(v: int):
        return "int"

    @show.register(torch.Tensor)
    def _(v):
        return v + 1

    def deco(fn):
        @functools.wraps(fn)
        def inner(*a, **k):
            return fn(*a, **k) * 2

        return inner

    class Thing:
        def __init__(self):
            self.n = 0

        @functools.cached_property
        def value(self):
            self.n += 1
            return torch.ones(2) * self.n

        @functools.singledispatchmethod
        def take(self, v):
            return "other"

        @take.register
        def _(self, v: str):
            return v + "!"

        part = functools.partialmethod(lambda self, a, b: a - b, 10)

    @deco
    def double(x, k=1):
        """doc"""
        return x + k

    @compiled
    def f(x, t, n):
        p = functools.partial(double, k=3)
        q = functools.partial(p, x)
        return cached(n) * x, cached(n), show(3), show(x), show("s"), q(), p.keywords, double.__name__, double.__doc__, t.value + t.value, t.take("a"), t.take(1), t.part(4), functools.reduce(torch.add, [x, x, x])

    t = Thing()
    return [f(grid(2), t, 1), f(grid(2), t, 1), f(grid(2), t, 2), f(grid(2), Thing(), 3), f(grid(2), t, 1), calls, t.n, cached.cache_info()]


@life
def cached_on_tensors_and_methods(compiled):
    class Rope(nn.Module):
        def __init__(self):
            super().__init__()
            self.made = []

        @functools.lru_cache(maxsize=None)
        def table(self, n):
            self.made.append(n)
            return torch.arange(float(n))

        def forward(self, x):
            return x + self.table(x.shape[-1])

    m = Rope()
    f = compiled(m)
    return [f(grid(3)), f(grid(3)), f(grid(4)), f(grid(3)), m.made, m.table(3) is m.table(3)]


@life
def itertools_of_all_kinds(compiled):
    @compiled
    def f(xs, n):
        c = itertools.count(n, 2)
        cyc = itertools.cycle([1, -1])
        a, b = itertools.tee(iter(xs))
        return (
            [x * next(c) for x in xs], [x * s for x, s in zip(xs, cyc)], sum(itertools.chain.from_iterable([xs, xs])), list(itertools.accumulate(xs)), next(a) is next(b),
            [k for k, g in itertools.groupby(range(6), lambda i: i // n)], list(itertools.dropwhile(lambda v: v < n, range(4))), [p + q for p, q in itertools.pairwise(xs)],
            list(itertools.filterfalse(lambda v: v % 2, range(5))), [tuple(v) for v in itertools.zip_longest(range(2), "abc", fillvalue=n)], next(c),
            list(itertools.accumulate(range(4), operator.mul, initial=1)), [i for i in itertools.islice(itertools.count(), 2, 8, n)],
        )

    return [f([grid(2), grid(2) + 1, grid(2) * 2], 2), f([grid(2), grid(2) + 1], 3)]


@life
def contextlib_of_all_kinds(compiled):
    log = []

    @contextlib.contextmanager
    def scope(name, swallow=False):
        log.append(("in", name))
        try:
            yield len(name)
        except KeyError as e:
            log.append(("caught", name, str(e)))
            if not swallow:
                raise
        finally:
            log.append(("out", name))

    @scope("deco")
    def decorated(x):
        return x * 3

    @compiled
    def f(x, k):
        with scope("a") as n, scope("bb") as m:
            x = x + n * m
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope("stack"))
            stack.callback(log.append, "callback")
            x = x * 2
        with scope("s", swallow=True):
            x = x + 1
            raise KeyError(k)
        with contextlib.nullcontext(5) as five, contextlib.closing(io.StringIO()) as text:
            text.write("t")
        return decorated(x) + five, text.closed

    return [f(grid(2), 1), f(grid(2), 2), log]


@life
def collections_of_all_kinds(compiled):
    class Bag(dict):
        def __missing__(self, k):
            return f"no {k}"

    class Items(list):
        def total(self):
            return sum(self)

    class Table(collections.UserDict):
        def __setitem__(self, k, v):
            super().__setitem__(k.upper(), v)

    class Seq(collections.abc.Sequence):
        def __init__(self, v):
            self.v = v

        def __len__(self):
            return len(self.v)

        def __getitem__(self, i):
            return self.v[i]

    @compiled
    def f(x, q, c, o, bag):
        q.append(x.shape[0])
        c.update("ab")
        o["new"] = x
        o.move_to_end("new", last=False)
        d = collections.defaultdict(list)
        d["k"].append(x)
        bag["z"] = 1
        t = Table(a=x)
        t["b"] = x + 1
        s = Seq([x, x * 2])
        m = collections.ChainMap({"a": 1}, bag)
        return list(q), c.most_common(), list(o), d, bag["no"], Items([x, x]).total(), list(t), [v for v in s], s.index(x) if len(s) > 9 else -1, list(reversed(s)), m["z"], c - collections.Counter("a")

    q, c, o, bag = collections.deque(maxlen=2), collections.Counter("b"), collections.OrderedDict(a=1), Bag()
    return [f(grid(2), q, c, o, bag), f(grid(3), q, c, o, bag), list(q), c, list(o), bag]


@life
def match_statements(compiled):
    @compiled
    def f(v, x):
        match v:
            case torch.Tensor(shape=(n,)):
                return v + x.sum(), n
            case torch.Tensor():
                return v.shape
            case 0 | 1:
                return x + v
            case int(n) if n > 10:
                return x * n
            case [a, b]:
                return x + a + b
            case [a, *rest]:
                return x * len(rest), a
            case {"k": k, **others}:
                return x - k, others
            case Point(x=p, y=2):
                return p, "two"
            case Point(p, q):
                return p * q
            case Mode.TRAIN:
                return "train"
            case str() as s:
                return s + "!"
            case None:
                return "none"
            case _:
                return "other", type(v).__name__

    values = [0, 1, 5, 11, [1, 2], (3, 4), [1, 2, 3], {"k": 1, "z": 2}, {"q": 1}, Point(grid(2)), Point(grid(2), 3), Mode.TRAIN, Mode.TEST, "s", None, grid(4), grid(2, 2), []]
    return [f(v, grid(2)) for v in values]


@life
def walrus_fstrings_and_conditions(compiled):
    @compiled
    def f(x, n):
        if (m := n * 2) > 5 and (y := x + m) is not None:
            x = y
        out = [z for v in range(n) if (z := v * 2) > 1]
        w = f"{m=} {n!s:>3} {x.shape[0]:03d} {'q' * n}" + "%s" % n
        return x, out, w, z if n > 1 else None, 0 if not x.dim() else (1 if n % 2 else 2), x is not None or 1 / 0, n and x

    return [f(grid(2), 2), f(grid(2), 3), attempt(f, grid(2), 4), f(grid(2), 1), f(grid(2), 0)]


@life
def arguments_of_all_kinds(compiled):
    @compiled
    def f(a, /, b, c=3, *args, d, e=5, **kw):
        kw["new"] = 1
        return a + b * c, args, d, e, sorted(kw.items(), key=lambda p: p[0])

    k = {"z": 1}
    return [
        f(grid(2), 1, d=2), f(grid(2), 1, 2, 3, 4, d=5, e=6, q=7), f(grid(2), b=2, d=grid(2)), f(grid(2), 1, d=1, **k), k, f(*[grid(2), 2], **{"d": 3}),
        attempt(f, grid(2)), attempt(f, grid(2), 1), attempt(f, a=grid(2), b=1, d=1), attempt(f, grid(2), 1, b=2, d=1),
    ]


@life
def mutable_default_arguments(compiled):
    @compiled
    def f(x, seen=[], table={}):
        seen.append(len(seen))
        table.setdefault("first", x)
        return x * len(seen), seen, table["first"]

    def inner(x, log=[]):
        log.append(x.shape[0])
        return x + len(log)

    @compiled
    def g(x):
        return inner(inner(x))

    return [f(grid(2)), f(grid(2) + 1), f(grid(2), []), f(grid(2)), g(grid(2)), g(grid(2)), inner.__defaults__]


@life
def defaults_changed_between_calls(compiled):
    def inner(x, k=2, *, j=1):
        return x * k + j

    @compiled
    def f(x):
        return inner(x)

    out = [f(grid(2))]
    inner.__defaults__ = (5,)
    out.append(f(grid(2)))
    inner.__kwdefaults__ = {"j": 3}
    out.append(f(grid(2)))
    inner.__code__ = (lambda x, k=2, *, j=1: x - k - j).__code__
    return out + [f(grid(2))]


# ---------------------------------------------------------------- what changes between calls


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)
        self.drop, self.bn = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.zeros(3))
        self.flag, self.scale = False, 1.0

    def forward(self, x):
        y = self.drop(self.bn(self.a(x)))
        if self.flag:
            y = y.relu()
        return self.b(y) * self.scale + self.shift


@life
def module_attributes_changed(compiled):
    m = Small().eval()
    f = compiled(m)
    out = [f(grid(2, 3))]
    m.flag = True
    out.append(f(grid(2, 3)))
    m.scale = 2.5
    out.append(f(grid(2, 3)))
    m.scale = 3
    out.append(f(grid(2, 3)))
    m.shift = torch.ones(3)
    out.append(f(grid(2, 3)))
    m.shift.add_(1)
    out.append(f(grid(2, 3)))
    m.a = nn.Linear(3, 4, bias=False)
    m.a.weight.data.fill_(0.1)
    out.append(f(grid(2, 3)))
    m.drop = nn.Identity()
    out.append(f(grid(2, 3)))
    del m.flag
    return out + [attempt(f, grid(2, 3))]


@life
def train_and_eval_switched(compiled):
    m = Small()
    f = compiled(m)
    out = []
    for mode in (True, False, True):
        m.train(mode)
        torch.manual_seed(3)
        out += [f(grid(2, 3)), m.bn.running_mean.clone(), m.bn.num_batches_tracked.item(), m.training]
    m.drop.eval()
    out.append(f(grid(2, 3)))
    m.bn.momentum = None
    return out + [f(grid(2, 3)), m.bn.running_mean.clone()]


@life
def parameters_replaced_and_loaded(compiled):
    m = Small().eval()
    f = compiled(m)
    state = copy.deepcopy(m.state_dict())
    out = [f(grid(2, 3))]
    m.a.weight = nn.Parameter(torch.ones(4, 3))
    out.append(f(grid(2, 3)))
    m.load_state_dict(state)
    out.append(f(grid(2, 3)))
    m.load_state_dict({k: v * 2 for k, v in state.items()}, assign=True)
    out.append(f(grid(2, 3)))
    m.double()
    out.append(f(grid(2, 3).double()))
    m.float()
    out.append(f(grid(2, 3)))
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.ones_like(p))
    out.append(f(grid(2, 3)))
    m.requires_grad_(False)
    out.append(f(grid(2, 3)).requires_grad)
    torch.nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in m.parameters())), m.parameters())
    return out + [f(grid(2, 3)), sorted(f.state_dict()) == sorted(m.state_dict()), [n for n, _ in f.named_parameters()] == [n for n, _ in m.named_parameters()]]


@life
def hooks_of_all_kinds(compiled):
    m, log = Small().eval(), []
    f = compiled(m)
    x = grid(2, 3).requires_grad_()
    out = [f(x)]
    handles = [
        m.register_forward_pre_hook(lambda mod, a, k: (log.append("pre"), (tuple(v * 2 for v in a), k))[1], with_kwargs=True),
        m.a.register_forward_hook(lambda mod, a, k, o: o + 1, with_kwargs=True),
        m.register_full_backward_hook(lambda mod, gi, go: log.append(("back", tuple(go[0].shape)))),
        m.b.weight.register_hook(lambda g: g * 10),
        m.b.register_forward_hook(lambda mod, a, o: log.append("always"), always_call=True),
    ]
    y = f(x)
    y.sum().backward()
    out += [y, x.grad, m.b.weight.grad, list(log)]
    for h in handles:
        h.remove()
    m.zero_grad()
    x.grad = None
    f(x).sum().backward()
    return out + [x.grad, m.b.weight.grad, log]


@life
def global_hooks(compiled):
    m, log = nn.Linear(3, 2), []
    with torch.no_grad():
        m.weight.fill_(0.5), m.bias.zero_()
    f = compiled(m)
    out = [f(grid(2, 3))]
    h = nn.modules.module.register_module_forward_hook(lambda mod, a, o: log.append(type(mod).__name__) or o * 2)
    try:
        out.append(f(grid(2, 3)))
    finally:
        h.remove()
    return out + [f(grid(2, 3)), log]


@life
def parametrized_modules(compiled):
    class Sym(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).t()

    torch.manual_seed(0)
    m = nn.Linear(3, 3)
    f = compiled(m)
    out = [f(grid(2, 3))]
    parametrize.register_parametrization(m, "weight", Sym())
    out.append(f(grid(2, 3)))
    parametrize.remove_parametrizations(m, "weight")
    out.append(f(grid(2, 3)))
    w = parametrizations.weight_norm(m)
    return out + [f(grid(2, 3)), sorted(dict(m.named_parameters()))]


@life
def methods_replaced_on_class(compiled):
    class Net(nn.Module):
        def forward(self, x):
            return self.act(x) + self.k

        def act(self, x):
            return x.sin()

        k = 1

    m = Net()
    f = compiled(m)
    out = [f(grid(2))]
    Net.act = lambda self, x: x.cos()
    out.append(f(grid(2)))
    Net.k = 5
    out.append(f(grid(2)))
    m.k = 7
    out.append(f(grid(2)))
    m.act = lambda x: x * 0
    out.append(f(grid(2)))
    Net.forward = lambda self, x: x - 100
    return out + [f(grid(2))]


@life
def module_lists_of_functions(compiled):
    fns = [torch.sin, torch.cos]
    table = {"relu": F.relu, "own": lambda v: v * 2}

    @compiled
    def f(x, name):
        for g in fns:
            x = g(x)
        return table[name](x)

    out = [f(grid(2), "relu"), f(grid(2), "own")]
    fns.append(torch.exp)
    out.append(f(grid(2), "own"))
    table["own"] = torch.neg
    out.append(f(grid(2), "own"))
    fns[0] = torch.abs
    return out + [f(grid(2), "own"), attempt(f, grid(2), "no")]


@life
def settings_of_torch_changed(compiled):
    @compiled
    def f(x):
        return torch.ones(2).dtype, x @ x.t(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.tensor([1.5]).dtype

    out = [f(grid(2, 2))]
    torch.set_default_dtype(torch.float64)
    try:
        out.append(f(grid(2, 2)))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        out.append(f(grid(2, 2).requires_grad_()))
    with torch.inference_mode():
        out.append(f(grid(2, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        out.append(f(grid(2, 2)))
    with torch.device("meta"):
        out.append(f(grid(2, 2))[0])
    return out + [f(grid(2, 2))]


@life
def arguments_of_changing_kinds(compiled):
    @compiled
    def f(x, k):
        return x * 2 if k is None else x + k if not isinstance(k, str) else len(k) * x

    return [f(grid(2), k) for k in (None, 1, 2, 3, 2.5, True, "ab", "abc", grid(2), grid(2, 2), grid(2).double(), torch.tensor(3), np.float32(2), 1 + 2j, None, -1)]


@life
def sizes_strides_and_dtypes_change(compiled):
    @compiled
    def f(x):
        return x.reshape(-1), x.sum(0), x.t() if x.dim() < 3 else x.shape, x.stride(), x * x.shape[0]

    return [f(grid(2, 3)), f(grid(4, 3)), f(grid(3, 4).t()), f(grid(1, 1)), f(grid(0, 3)), f(grid(6)), f(grid(2, 3, 4)), f(grid(2, 3).int()), f(grid(2, 3).expand(2, 3)), f(grid(3)[None].expand(5, 3)), f(grid(4, 6)[::2, ::3])]


@life
def same_tensor_twice(compiled):
    @compiled
    def f(a, b):
        a.add_(1)
        return a * b, a is b

    x, y = grid(2), grid(2)
    z = grid(4)
    return [f(x, y), f(x, x), f(z[:2], z[1:3]), z, f(z[:2], z[:2]), z, f(x, y.view(-1)), x, y]


@life
def out_arguments_and_views(compiled):
    @compiled
    def f(x, out):
        v = x.view(-1)[1:]
        torch.add(v, 1, out=out)
        v.mul_(2)
        w = x.t()
        w[0] = 9
        return v, w, out, x[0]

    x, o = grid(2, 3), torch.empty(5)
    r = f(x, o)
    return [r, x, o, r[2] is o, r[0].data_ptr() == x.data_ptr() + 4, f(x, torch.empty(0))]


@life
def tensors_as_attributes(compiled):
    class Bag:
        pass

    @compiled
    def f(x, bag):
        x.tag = "seen"
        bag.x, bag.y = x, x * 2
        bag.y.note = [1]
        x.requires_grad_(True)
        return getattr(x, "tag"), bag.y.note, x.requires_grad, hasattr(x, "nope")

    b, x = Bag(), grid(2)
    return [f(x, b), x.tag, b.x is x, b.y.note, x.requires_grad]


@life
def gradients_and_steps(compiled):
    m = Small().eval()
    opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    @compiled
    def step(x, t):
        opt.zero_grad()
        loss = F.mse_loss(m(x), t)
        loss.backward()
        opt.step()
        return loss.detach()

    out = [step(grid(2, 3), grid(2, 3)) for _ in range(3)]
    opt.param_groups[0]["lr"] = 0.01
    out.append(step(grid(2, 3), grid(2, 3)))
    return out + [m.a.weight.detach().clone(), m.a.weight.grad.clone(), len(opt.state)]


@life
def autograd_functions(compiled):
    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.save_for_backward(x)
            ctx.k = k
            return x.clamp(max=k)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (x < ctx.k) * 5, None

    @compiled
    def f(x, k):
        return (Clamp.apply(x, k) * 2).sum()

    out = []
    for k in (0.0, 0.1, 5):
        x = grid(4).requires_grad_()
        y = f(x, k)
        y.backward()
        out += [y, x.grad]
    return out


@life
def gradients_inside(compiled):
    @compiled
    def f(x):
        y = x.detach().requires_grad_()
        z = (y**3).sum()
        (g,) = torch.autograd.grad(z, y, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), y)
        return g.detach(), h, y.grad

    return [f(grid(3)), f(grid(4))]


@life
def checkpointed(compiled):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh())

    @compiled
    def f(x):
        return checkpoint(m, x, use_reentrant=False).sum()

    x = grid(2, 3).requires_grad_()
    torch.manual_seed(5)
    y = f(x)
    y.backward()
    return [y, x.grad, m[0].weight.grad]


@life
def compiled_things_call_each_other(compiled):
    @compiled
    def inner(x, k):
        print("inner", k)
        return x * k

    @compiled
    def outer(x):
        return inner(x, 2) + inner(x, k=3) + (lambda g: g(x, 4))(inner)

    return [outer(grid(2)), inner(grid(2), 5), outer(grid(3)), inner.__name__, outer.__name__]


@life
def methods_and_statics(compiled):
    class Net:
        n = 0

        def __init__(self, k):
            self.k = k

        def run(self, x):
            type(self).n += 1
            return x * self.k

        @classmethod
        def make(cls, k):
            return cls(k)

        @staticmethod
        def plus(x):
            return x + 1

        def __call__(self, x):
            return self.run(self.plus(x))

    a, b = Net.make(2), Net(3)
    f, g, h, c = compiled(a.run), compiled(b.run), compiled(Net.plus), compiled(a.__call__)
    out = [f(grid(2)), g(grid(2)), h(grid(2)), c(grid(2)), Net.n]
    a.k = 7
    return out + [f(grid(2)), g(grid(2)), c(grid(2)), Net.n]


@life
def decorated_methods(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.log = nn.Parameter(torch.ones(2)), []

        @compiled
        def step(self, x, *, k=1):
            self.log.append(k)
            return x * self.w * k

        def forward(self, x):
            return self.step(x) + self.step(x, k=2)

    m, n = Net(), Net()
    n.w.data.fill_(3)
    return [m(grid(2)), n(grid(2)), m.log, n.log, copy.deepcopy(n)(grid(2)), m.step(grid(3).expand(1, 3)[:, :2])]


@life
def copies_of_compiled_modules(compiled):
    m = Small().eval()
    f = compiled(m)
    out = [f(grid(2, 3))]
    g = copy.deepcopy(f)
    with torch.no_grad():
        m.b.bias.add_(1)
    out += [f(grid(2, 3)), g(grid(2, 3))]
    h = compiled(copy.deepcopy(m))
    return out + [h(grid(2, 3)), len(list(f.parameters())), f.training, f.eval() is not None, f.b is m.b]


@life
def lazy_modules(compiled):
    torch.manual_seed(0)
    m = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2))
    f = compiled(m)
    return [f(grid(2, 4)).shape, type(m[0]).__name__, m[0].weight.shape, f(grid(2, 4)), attempt(f, grid(2, 5))]


@life
def recurrent_modules(compiled):
    torch.manual_seed(0)
    m = nn.LSTM(3, 4, batch_first=True)
    f = compiled(m)
    y, (h, c) = f(grid(2, 5, 3))
    packed = nn.utils.rnn.pack_padded_sequence(grid(2, 5, 3), [5, 3], batch_first=True)
    z, _ = f(packed)
    return [y, h, c, f(grid(2, 2, 3), (h, c)), z.data, z.batch_sizes]


@life
def sequential_slices(compiled):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh())

    @compiled
    def f(x, k):
        return m[:k](x), m[-1](x), len(m), [type(c).__name__ for c in m.children()]

    out = [f(grid(2, 3), 1), f(grid(2, 3), 3)]
    m[1] = nn.Sigmoid()
    out.append(f(grid(2, 3), 3))
    m.append(nn.Identity())
    return out + [f(grid(2, 3), 5)]


@life
def module_calls_by_every_road(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lin = nn.Linear(3, 3)

        def forward(self, x, mask=None, *, scale=1):
            y = self.lin(x) * scale
            return y if mask is None else y.masked_fill(mask, 0)

        def features(self, x):
            return self.lin(x).relu()

    m = Net()
    f = compiled(m)
    return [f(grid(2, 3)), f(grid(2, 3), grid(2, 3) > 0), f(x=grid(2, 3), scale=2), f.forward(grid(2, 3)), f.features(grid(2, 3)), f.lin(grid(2, 3)), f.__call__(grid(2, 3), scale=3), attempt(f), attempt(f, grid(2, 3), bad=1)]


@life
def functional_calls(compiled):
    m = Small().eval()

    @compiled
    def f(params, x):
        return torch.func.functional_call(m, params, (x,))

    params = {k: v.detach().clone() * 2 for k, v in m.named_parameters()}
    out = [f(params, grid(2, 3)), m(grid(2, 3))]
    params["a.weight"] = torch.zeros(4, 3)
    return out + [f(params, grid(2, 3)), f({}, grid(2, 3))]


@life
def swapped_submodules_in_a_loop(compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(3, 3) for _ in range(3)]  # a plain list
            for i, layer in enumerate(self.layers):
                with torch.no_grad():
                    layer.weight.fill_(0.1 * i), layer.bias.fill_(i)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = Net()
    f = compiled(m)
    out = [f(grid(2, 3))]
    m.layers.reverse()
    out.append(f(grid(2, 3)))
    m.layers[1] = nn.ReLU()
    out.append(f(grid(2, 3)))
    m.layers = tuple(m.layers[:1])
    return out + [f(grid(2, 3))]


@life
def data_that_tells(compiled):
    @compiled
    def f(x):
        idx = x.nonzero().squeeze(1)
        sel = x[x > 0]
        parts = torch.split(x, [1, x.shape[0] - 1])
        u, inv, cnt = torch.unique((x * 3).int(), return_inverse=True, return_counts=True)
        return idx.shape[0], sel * 2, sel.numel() > 2, parts, u, inv, cnt, x[: int(cnt.max())], x.repeat_interleave(torch.arange(x.shape[0]))

    return [f(grid(5)), f(grid(5) - 1), f(grid(8)), f(grid(3) * 0)]


@life
def control_flow_operators(compiled):
    from torch._higher_order_ops import associative_scan, map as map_, scan, while_loop

    @compiled
    def f(x, k):
        a = torch.cond(x.sum() > k, lambda v: v.sin(), lambda v: v.cos() * k, (x,))
        i, b = while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0), x))
        c, ys = scan(lambda c, v: (c + v, c * v), torch.zeros(()), x, dim=0)
        d = associative_scan(lambda p, q: p + q, x, dim=0, combine_mode="generic")
        return a, i, b, c, ys, d, map_(lambda v, w: v * w, x, torch.tensor(2.0))

    return [f(grid(4), 0), f(grid(4), 100), f(grid(6), -5)]


@life
def identity_of_results(compiled):
    @compiled
    def f(x, items):
        y = x + 1
        items.append(y)
        d = {"a": items, "b": [y, y], "x": x}
        d["self"] = d
        return d, items, y, (x, x), x.view_as(x) is x

    items = []
    d, back, y, xs, flag = f(grid(2), items)
    return [back is items, d["a"] is items, d["b"][0] is y, items[0] is y, xs[0] is xs[1], d["self"] is d, flag, len(items)]


@life
def objects_made_inside(compiled):
    class Cache:
        live = 0

        def __init__(self):
            self.keys = []
            Cache.live += 1

        def update(self, k):
            self.keys.append(k)
            return torch.cat(self.keys)

        def __len__(self):
            return len(self.keys)

        def __del__(self):
            Cache.live -= 1

    @compiled
    def f(x, cache=None):
        cache = cache or Cache()
        y = cache.update(x)
        return y, cache

    y, c = f(grid(2))
    z, d = f(grid(2), c)
    out = [y, z, c is d, len(c), Cache.live]
    del c, d
    return out + [Cache.live]


@life
def numbers_big_and_exact(compiled):
    @compiled
    def f(x, n, r):
        return x * (n % 7), n**2, n // 3, -n // 3, n << 3, r * 2, round(r, 1), divmod(n, 4), int(r), float(n), n / 4, math.isclose(r, 0.5), complex(n, r), n.bit_length(), r.hex(), x + n / 3

    return [f(grid(2), 5, 0.5), f(grid(2), 6, 0.25), f(grid(2), -7, float("inf") * 0 if False else 1e300), f(grid(2), 2**40, -0.0), f(grid(2), True, 1.5)]


@life
def strings_and_patterns(compiled):
    import re

    pattern = re.compile(r"layer(\d+)\.(\w+)")

    @compiled
    def f(x, names):
        total = x
        for n in names:
            if m := pattern.fullmatch(n):
                total = total + int(m[1]) * len(m.group(2))
            elif n.endswith(("bias", "b")):
                total = total - 1
        return total, ",".join(sorted(set(names))), names[0].encode().hex(), "{:>8}|{!r}".format(names[-1], names)

    return [f(grid(2), ["layer1.w", "x.bias"]), f(grid(2), ["layer12.weight", "q"]), f(grid(2), ["b"])]


@life
def random_numbers_of_all_kinds(compiled):
    import random

    @compiled
    def f(x):
        a = torch.rand(2)
        b = random.random()
        c = np.random.rand()
        d = F.dropout(x, 0.5, training=True)
        e = torch.randint(0, 9, (2,), generator=torch.Generator().manual_seed(3))
        return a + b + c, d, e, torch.bernoulli(torch.full((3,), 0.5)), random.choice([1, 2, 3])

    out = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        out += [f(grid(3)), torch.rand(1), random.random(), np.random.rand()]
    return out


@life
def threads_of_calls(compiled):
    import threading

    @compiled
    def f(x, k):
        y = x * k
        print(end="")
        return y + k

    got = {}

    def work(i):
        got[i] = [f(grid(2 + i % 3), i % 4) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    return [got[i] for i in range(8)]


@life
def inplace_on_everything(compiled):
    @compiled
    def f(x, d, l):
        x += 1
        x[0] = x[1]
        x[1:] *= 2
        x.t_() if x.dim() == 2 else None
        d["k"] += x
        l += [x.clone()]
        l[0] = d["k"]
        l2 = l
        l2 *= 2
        x.resize_(2) if x.numel() == 9 else None
        return x, l2 is l

    x, d, l = grid(3), {"k": grid(3)}, [0]
    k = d["k"]
    return [f(x, d, l), x, d, l, d["k"] is k, f(grid(2, 2), {"k": grid(2, 2)}, [0]), f(grid(3, 3), {"k": grid(3, 3)}, [0])]


@life
def super_and_inheritance(compiled):
    class A:
        def run(self, x):
            return x + 1

    class B(A):
        def run(self, x):
            return super().run(x) * 2

    class C(A):
        def run(self, x):
            return super(C, self).run(x) - 3

    class D(B, C):
        def run(self, x):
            fs = [super(D, self).run for _ in range(2)]
            return fs[0](x) + fs[1](x)

        @classmethod
        def kind(cls):
            return [c.__name__ for c in cls.__mro__]

    @compiled
    def f(o, x):
        return o.run(x), type(o).kind(), isinstance(o, C), issubclass(D, A), o.run.__func__ is D.run

    return [f(D(), grid(2)), f(D(), grid(3))]


@life
def proxies_and_getattr(compiled):
    class Proxy:
        def __init__(self, inner):
            object.__setattr__(self, "_inner", inner)
            object.__setattr__(self, "_log", [])

        def __getattr__(self, name):
            self._log.append(name)
            return getattr(self._inner, name)

        def __setattr__(self, name, value):
            setattr(self._inner, name, value)

        def __dir__(self):
            return ["a"]

    m = Small().eval()

    @compiled
    def f(p, x):
        p.scale = p.scale + 1
        return p.a(x), p(x) if callable(p) else p.forward(x), p.scale, dir(p)

    p = Proxy(m)
    return [f(p, grid(2, 3)), f(p, grid(2, 3)), p._log, m.scale]


@life
def operators_on_mixed_things(compiled):
    class V:
        def __init__(self, t):
            self.t = t

        def __rmul__(self, o):
            return V(self.t * o)

        def __matmul__(self, o):
            return self.t @ (o.t if isinstance(o, V) else o)

        def __iadd__(self, o):
            self.t = self.t + o
            return self

        def __neg__(self):
            return V(-self.t)

        def __contains__(self, k):
            return k in (1, 2)

        def __index__(self):
            return 1

        def __float__(self):
            return 2.5

        def __hash__(self):
            return 3

        def __eq__(self, o):
            return isinstance(o, V)

        def __format__(self, spec):
            return f"V<{spec}>"

        def __len__(self):
            return self.t.shape[0]

    @compiled
    def f(x):
        v = V(x)
        w = v
        v += 1
        return (2 * v).t, v @ v, w is v, (-v).t, 1 in v, [5, 6][v], float(v), {v: 1}[V(0)], f"{v:abc}", len(v), v == V(1), v != 3, x @ x, "ab"[v], list(range(9))[v:]

    return [f(grid(3)), f(grid(2))]


@life
def star_imports_of_state(compiled):
    module = types.ModuleType("settings")
    module.RATE, module.fn, module.sub = 2, torch.sin, types.SimpleNamespace(k=grid(2), deep={"n": 1})

    @compiled
    def f(x):
        module.calls = getattr(module, "calls", 0) + 1
        module.sub.deep["n"] += 1
        return module.fn(x) * module.RATE + module.sub.k * module.sub.deep["n"]

    out = [f(grid(2)), module.calls]
    module.RATE = 5
    out.append(f(grid(2)))
    module.fn = torch.cos
    out.append(f(grid(2)))
    module.sub = types.SimpleNamespace(k=1, deep={"n": 100})
    return out + [f(grid(2)), module.calls, module.sub.deep]


@life
def dictionaries_that_change(compiled):
    @compiled
    def f(d, x):
        for k in list(d):
            if k.startswith("t"):
                d[k] = d[k] + x
            elif k == "drop":
                d.pop(k)
        d.setdefault("seen", []).append(len(d))
        return {**d, "n": len(d)}, list(d.items())[0][0], d.get("none"), "t1" in d

    d = {"t1": grid(2), "drop": 1}
    out = [f(d, grid(2)), list(d)]
    d["t2"] = 3
    out.append(f(d, grid(2)))
    del d["t1"]
    out.append(f(d, grid(2)))
    return out + [d, attempt(f, {"a": 1, "tq": "s"}, grid(2)), f({}, grid(2))]


@life
def lists_while_iterated(compiled):
    @compiled
    def f(items, x):
        for i, v in enumerate(items):
            if v == 2:
                items.append(7)
            x = x + v
        for v in reversed(items):
            x = x * 2 if v > 5 else x
        items[1:3] = [x.shape[0]] * 3
        items.sort(key=lambda v: -v)
        return x, items, items[::-1], [*items, *items[:1]], sum(items), items.index(x.shape[0]), items.count(2)

    a = [1, 2, 3]
    return [f(a, grid(2)), a, attempt(f, [3], grid(2)), f([2, 9], grid(2))]


@life
def sets_and_frozensets(compiled):
    @compiled
    def f(s, x):
        s.add(x.dim())
        s |= {5}
        s -= {1}
        t = frozenset(s)
        return x * len(s), sorted(s), t & {5, 9}, {t: 1}[frozenset([2, 5])] if 2 in s else None, s.isdisjoint([3]), sorted(s ^ {5, 8}), min(s)

    s = {1, 2}
    return [f(s, grid(2)), s, f(s, grid(2, 2)), f({7}, grid(2))]


@life
def async_is_left_alone(compiled):
    @compiled
    async def f(x):
        return x + 1

    def drive(c):
        try:
            c.send(None)
        except StopIteration as e:
            return e.value

    return [drive(f(grid(2))), drive(f(grid(3)))]


@life
def type_checks(compiled):
    @compiled
    def f(v):
        return (
            isinstance(v, (int, float)), isinstance(v, int | str), type(v) in (list, tuple), isinstance(v, collections.abc.Sequence), isinstance(v, collections.abc.Mapping),
            callable(v), hasattr(v, "__len__"), torch.is_tensor(v), isinstance(v, torch.FloatTensor), isinstance(v, nn.Parameter), type(v).__name__, isinstance(v, typing.Hashable), issubclass(type(v), object),
        )

    return [f(v) for v in (1, True, 2.5, "s", [1], (1,), {"a": 1}, None, grid(2), grid(2).int(), nn.Parameter(grid(2)), nn.Linear(1, 1), torch.sin, Point(1), Mode.TEST, Level.LOW, range(3), np.zeros(2))]


@life
def signatures_and_inspection(compiled):
    import inspect

    @compiled
    def f(x, k: int = 2) -> torch.Tensor:
        """The document."""
        return x * k

    return [str(inspect.signature(f)), f.__doc__, f.__name__, f(grid(2)), f(grid(2), k=3), inspect.unwrap(f).__name__]


@life
def locals_globals_and_eval(compiled):
    @compiled
    def f(x, n):
        m = n + 1
        a = sorted(locals())
        b = eval("n * 2")
        space = {}
        exec("z = 4", space)
        return x * b + space["z"], a, "torch" in globals(), vars(Config(rate=1.0))["rate"], m

    return [f(grid(2), 2), f(grid(2), 3)]


@life
def float_arguments_that_vary(compiled):
    @compiled
    def f(x, p, n):
        return F.dropout(x, p, training=False) * p + n, x**p, x.clamp(-p, p), round(p * n, 3), x if p > 0.5 else -x, int(p * 10), f"{p:.2f}", min(p, n), p == 0.5, x.roll(n), torch.full((n,), p)

    return [f(grid(3), p, n) for p, n in ((0.5, 1), (0.25, 2), (0.75, 3), (0.5, 4), (1.0, 1), (0.0, 5))]


@life
def tensor_truth_in_expressions(compiled):
    @compiled
    def f(x, y):
        a = x.sum() or y.sum()
        b = (x > 0).all() and y
        c = not x.any()
        d = [v for v in x if v > 0]
        e = max(x[0], x[1])
        g = sorted(x.tolist(), reverse=True)
        h = x[0] in [x[1], x[0]]
        i = 1 if x[0] < y[0] < 100 else 2
        return a, b, c, d, e, g, h, i, x[0] == 1, sum(x), any(x > 5), all(v > -9 for v in x)

    return [f(grid(3), grid(3) + 1), f(grid(3) + 5, grid(3)), f(torch.zeros(3), torch.zeros(3))]


@life
def try_inside_loops_with_continue(compiled):
    @compiled
    def f(x, items):
        out = []
        for v in items:
            try:
                if v == "skip":
                    continue
                if v == "stop":
                    break
                out.append(x / v)
            except TypeError:
                out.append(type(v).__name__)
                continue
            finally:
                out.append("f")
            out.append("e")
        else:
            out.append("done")
        return out

    return [f(grid(2), [1, "skip", "q", 2]), f(grid(2), [1, "stop", 2]), f(grid(2), [])]


@life
def with_of_changing_managers(compiled):
    managers = [contextlib.nullcontext(), torch.no_grad(), torch.enable_grad()]

    @compiled
    def f(x, i):
        with managers[i]:
            y = x * 2
        with torch.set_grad_enabled(i == 1):
            z = x * 3
        return y.requires_grad, z.requires_grad, torch.is_grad_enabled(), y

    x = grid(2).requires_grad_()
    return [f(x, i) for i in (0, 1, 2, 1)]


@life
def global_counter_and_stop(compiled):
    state = {"step": 0, "best": None}

    @compiled
    def f(x):
        state["step"] += 1
        s = x.sum().item()
        if state["best"] is None or s > state["best"]:
            state["best"] = s
            state["kept"] = x * 2
        return x + state["step"]

    return [f(grid(2)), f(grid(2) + 1), f(grid(2)), state]


@life
def buffers_replaced_inside(compiled):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("extra", None)
            self.n = 0

        def forward(self, x):
            self.n += 1
            self.mean = self.mean + (x.mean(0) - self.mean) / self.n
            if self.extra is None:
                self.extra = x[0].clone()
            self.extra.add_(1)
            return x - self.mean

    m = Mean()
    f = compiled(m)
    out = [f(grid(2, 3)), f(grid(2, 3) + 1), m.mean, m.extra, m.n, sorted(m.state_dict())]
    m.load_state_dict({"mean": torch.ones(3), "extra": torch.ones(3)})
    return out + [f(grid(2, 3)), m.extra]


@life
def kv_cache_grows(compiled):
    class Attn(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.qkv = nn.Linear(4, 12)

        def forward(self, x, past=None):
            q, k, v = self.qkv(x).chunk(3, -1)
            if past is not None:
                k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
            return F.scaled_dot_product_attention(q, k, v), (k, v)

    m = Attn()
    f = compiled(m)
    out, past = [], None
    for i in range(5):
        y, past = f(grid(1, 2 if i == 0 else 1, 4) + i, past)
        out += [y, past[0].shape]
    return out


@life
def static_cache_written(compiled):
    cache = torch.zeros(1, 8, 4)

    @compiled
    def f(x, pos):
        cache[:, pos] = x
        cache.index_copy_(1, pos + 1, x * 2)
        return cache[:, : int(pos.max()) + 1].sum(1)

    return [f(grid(1, 1, 4) + i, torch.tensor([i])) for i in range(4)] + [cache]


@life
def named_state_in_hooks(compiled):
    m, acts = Small().eval(), {}

    def keep(name):
        def hook(mod, a, o):
            acts[name] = o.detach()

        return hook

    for n, c in m.named_children():
        c.register_forward_hook(keep(n))
    f = compiled(m)
    return [f(grid(2, 3)), dict(acts), f(grid(3, 3)), acts]


@life
def unusual_returns(compiled):
    @compiled
    def f(x, k):
        return [None, NotImplemented, ..., x.shape, x.dtype, slice(1, x.shape[0]), range(k), type(x), torch.Size([k]), x.device, f"{k}", (), {}, {1: (x,)}, lambda: x * k, zip([1], [2]), iter([x])]

    out = []
    for k in (1, 2):
        r = f(grid(3), k)
        out.append([*r[:14], r[14](), list(r[15]), next(r[16])])
    return out
