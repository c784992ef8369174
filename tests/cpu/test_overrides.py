"""`__torch_function__` inside compiled code and around it: objects, subclasses of Tensor, modes. Results, classes and what handlers see."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchsmith
from torchsmith import Unsupported

X = torch.arange(6.0).reshape(2, 3)
SEEN: list[str] = []


class Duck:
    """No tensor, but torch's functions take it."""

    def __init__(self, v):
        self.v = v

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        SEEN.append(f"{func.__name__} of {[t.__name__ for t in types]}")

        def inner(a):
            return a.v if isinstance(a, Duck) else [inner(x) for x in a] if isinstance(a, (list, tuple)) else a

        return cls(func(*map(inner, args), **(kwargs or {})))


class Drake(Duck):
    pass


class Refuses:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


class Plain(torch.Tensor):
    def twice(self):
        return self * 2

    @property
    def rows(self):
        return self.shape[0]


class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        SEEN.append(func.__name__)
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 3 if func is torch.sin else out


class Unwraps(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        SEEN.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Twice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        SEEN.append(func.__name__)
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.sin else out


class Counts(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


def told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():
            return type(value).__name__, (value.as_subclass(torch.Tensor) * 1e4).round().tolist()
    if isinstance(value, (list, tuple)):
        return [told(v) for v in value]
    if isinstance(value, (Duck, Counts)):
        return type(value).__name__, told(list(value.__dict__.values()))
    return type(value).__name__, str(value).partition(" object at")[0]


def same(fn: Any, *args: Any, around: Any = contextlib.nullcontext, whole: bool = True, backend: str = "eager") -> None:
    def run(f: Any) -> Any:
        SEEN.clear()
        with around() as mode:
            try:
                out = f(*args)
            except Unsupported:
                raise
            except Exception as e:
                out = e
        return told(out), list(SEEN), told(mode)

    want = run(fn)
    compiled = torchsmith.compile(fn, backend=backend, fullgraph=whole)
    assert run(compiled) == want
    assert run(compiled) == want


def test_objects() -> None:
    rows = (
        lambda x: torch.add(Duck(x), 1),
        lambda x: x + Duck(x),
        lambda x: x.mul(Duck(x)),
        lambda x: torch.cat([Duck(x), x]),
        lambda x: torch.nn.functional.relu(Duck(x)),
        lambda x: torch.nn.functional.linear(x, Duck(x)),
        lambda x: torch.add(Duck(x), Drake(x)),
        lambda x: torch.stack([Drake(x), Duck(x)]).v[0],
        lambda x: x[Duck(torch.tensor([1, 0]))],
        lambda x: x == Duck(x),
        lambda x: torch.overrides.has_torch_function((x, Duck(x))),
        lambda x: torch.overrides.is_tensor_like(Duck(x)),
        lambda x: torch.nn.functional.softmax(Duck(x), dim=-1),
        lambda x: Duck(x).v + 1,
    )
    same(lambda x: [f(x) for f in rows], X)
    same(lambda d, x: torch.sub(d, x, alpha=2), Duck(X), X)
    same(lambda x: torch.add(x, Refuses()), X, whole=False)


def test_subclasses() -> None:
    def all_of(p):
        y = p * 2 + p.sum()
        z = torch.sin(p)
        return y, type(y) is Plain, isinstance(z, Plain), p.twice(), p.rows, p.T, p[0], torch.cat([p, p]), p.shape

    for cls in (Plain, Logged, Unwraps):
        x = X.as_subclass(cls)
        same(lambda s: [torch.sin(s) + 1, s.sum(), s.shape, s.T, s.mean(0).relu()], x)
    same(all_of, X.as_subclass(Plain))
    same(lambda x: [x.as_subclass(Plain) * 2, type(x.as_subclass(Plain)[0])], X)
    same(lambda p, x: [x + p, p + x, p.as_subclass(torch.Tensor) + 1], X.as_subclass(Plain), X)
    same(lambda s: torch.sin(s) + 1, X.as_subclass(Logged), backend="inductor")
    w = X.clone().as_subclass(Plain).requires_grad_()
    torchsmith.compile(lambda w: (w * w).sum(), backend="inductor")(w).backward()
    assert torch.equal(w.grad.as_subclass(torch.Tensor), 2 * X)


class Tagged(torch.Tensor):
    tag: str

    def __new__(cls, data: torch.Tensor, tag: str = "none") -> Any:
        return super().__new__(cls, data)

    def __init__(self, data: torch.Tensor, tag: str = "none") -> None:
        self.tag = tag


def test_subclasses_made_inside() -> None:
    def all_of(x):
        class Local(torch.Tensor):
            pass

        y = Plain(x * 2)
        kinds = isinstance(y, Plain), type(Local(x)) is Local
        return y, kinds, y.twice(), Tagged(x, "a").tag, torch.Tensor(x), torch.Tensor._make_subclass(Plain, x)

    def written(x):
        x = x + 1
        y = Plain(x)
        y += 1
        return x

    same(all_of, X)
    same(written, X)
    same(lambda x: torch.sin(Logged(x)) + 1, X, backend="inductor")
    assert torchsmith.compile(lambda x: Tagged(x + 1, "kept"), fullgraph=True)(X).tag == "kept"
    x = X.clone().requires_grad_()
    torchsmith.compile(lambda x: (Plain(x) * x).sum() + torch.Tensor._make_subclass(Plain, x).sum(), fullgraph=True)(x).backward()
    assert torch.equal(x.grad, 2 * X)


def test_modes_inside() -> None:
    def inside(x):
        with Twice():
            y = torch.sin(x) + torch.ones(3)
        return y, torch.sin(x)

    def nested(x):
        counts = Counts()
        with counts, Twice():
            y = torch.nn.functional.relu(torch.sin(x)).sum(0) + x.shape[0]
        return y, counts.n, x.T

    def breaks(x):
        with Twice():
            y = torch.sin(x)
            if y.sum() > 100:
                y = y + 1
            z = torch.sin(y)
        return z, torch.sin(x)

    same(inside, X)
    same(nested, X)
    same(breaks, X, whole=False)
    same(lambda x: [inside(x), torch.overrides._len_torch_function_stack()], X)
    with torch._C.DisableTorchFunctionSubclass():
        same(lambda s: torch.sin(s) + 0, X.as_subclass(Logged))


def test_modes_around() -> None:
    def fn(x):
        return torch.sin(x) + torch.ones(3), torch.nn.functional.relu(x), x[0]

    for around in (Twice, Counts):
        same(fn, X, around=around)
        same(fn, X, around=around, backend="inductor")
    compiled = torchsmith.compile(fn, backend="eager")
    for mode in (contextlib.nullcontext, Twice, contextlib.nullcontext):
        with mode():
            want, got = fn(X), compiled(X)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_modes_hear_what_the_program_calls_alone() -> None:
    """A Parameter is made in C++; values of NumPy's arrays and aliases that are remembered are no calls of torch's functions."""

    def makes(x):
        p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(x, requires_grad=False)
        return x + p, q * 2, torch.Tensor._make_subclass(Plain, x)

    def reads(x, a):
        return x + 1, a.tolist(), a[0].item(), float(a[1])

    def aliases(x):
        return type(x.data).__name__, type(x.detach().numpy()).__name__

    same(makes, X, around=Twice, whole=False)
    same(reads, X, np.arange(2.0), around=Twice, whole=False)
    torchsmith.compile(torch.neg)(X)  # from now on aliases are remembered, in eager too
    with Twice():
        SEEN.clear()
        aliases(X)
    assert SEEN == ["__get__", "detach", "numpy"]


class Keeps(TorchFunctionMode):
    """Gradients stay as they are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        SEEN.append(func.__name__)
        return None if func is torch._C._set_grad_enabled else func(*args, **(kwargs or {}))


def test_modes_see_grad_mode() -> None:
    """torch tells modes of torch functions when gradients are switched; what we switch around a graph or a break they do not hear."""

    def switches(x):
        with torch.no_grad():
            y = torch.sin(x)
            with torch.enable_grad():
                z = torch.sin(x)
        torch.set_grad_enabled(torch.is_grad_enabled())
        return y.requires_grad, z.requires_grad, z

    def breaks(x):
        with torch.no_grad(), Twice():
            y = torch.sin(x)
            if y.sum() > 100:
                y = y + 1
            z = torch.sin(y)
        return z.requires_grad, torch.sin(x).requires_grad

    x = X.clone().requires_grad_()
    for mode in (Twice, Counts, Keeps):
        same(switches, x, around=mode)

        def inside(x, mode=mode):
            with mode():
                return switches(x)

        same(inside, x)
    same(breaks, x, whole=False)
    same(breaks, x, whole=False, around=Keeps)


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, a):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a):
        self.a = a

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*(t.a if isinstance(t, Wrapper) else t for t in args), **(kwargs or {})))


def test_wrappers_run_eagerly() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    found = torchsmith.explain(lambda t: t * 2 + 1)(Wrapper(X))
    assert torch.equal(found.result.a, X * 2 + 1) and not found.graphs and "API002" in str(found)
    same_result = torchsmith.compile(lambda x: (Wrapper(x) * 2).a + 1, backend="eager")
    assert torch.equal(same_result(X), X * 2 + 1)
    with pytest.raises(Unsupported, match="CAP021"):
        torchsmith.compile(lambda x: (Wrapper(x) * 2).a + 1, backend="eager", fullgraph=True)(X)
    with Mode():
        assert torch.equal(torchsmith.compile(lambda x: x + 1, backend="eager")(X), X + 1)


def test_default_devices_one_in_the_other():
    """torch pushes and pops their modes in C; what breaks between is made on the inner one."""

    def f(x):
        with torch.device("meta") as outer:
            with torch.device("cpu"):
                a = torch.nn.Linear(2, 3).weight.device.type  # a break
                b = torch.ones(2).device.type
            c = torch.nn.Linear(2, 3).weight.device.type
        return x + 1, outer, a, b, c, torch.ones(2).device.type

    for given in (contextlib.nullcontext(), torch.device("cpu")):
        with given:
            assert torchsmith.compile(f, backend="eager")(X)[1:] == f(X)[1:]
    assert not torch.overrides._get_current_function_mode_stack()
