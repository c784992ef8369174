"""Run a capture the slow way and compare with eager: guards by their definition, the graph eagerly, finish in Python."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

from torchsmith.capture import guards as gd
from torchsmith.capture.asked import Asked
from torchsmith.capture.captured import Captured
from torchsmith.capture.start import capture


def entry(fn: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(fn, torch.nn.Module):
        return type(fn).forward, (fn, *args)
    if inspect.ismethod(fn):
        return fn.__func__, (fn.__self__, *args)
    return fn, args


def call_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> gd.Call:
    bound = inspect.signature(fn, follow_wrapped=False).bind(*args, **kwargs)
    bound.apply_defaults()
    return gd.Call(bound.arguments, fn.__globals__, dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)))


class Run:
    """One captured function and the means to call it again."""

    def __init__(self, fn: Any, *args: Any, dynamic: bool | None = None, **kwargs: Any) -> None:
        self.fn, args = entry(fn, args)
        self.captured: Captured = capture(self.fn, args, kwargs, Asked(dynamic=dynamic))
        bad = self.failing(*args, entered=True, **kwargs)
        assert bad is None, f"the guard is false for the call it was made from: {bad}"

    @property
    def symbols(self) -> dict[str, Any]:
        return getattr(self.captured.facts, "sources", {})

    def failing(self, *args: Any, entered: bool = False, **kwargs: Any) -> str | None:
        """The first guard that does not hold for this call, as text."""
        bad = gd.first_failure(self.captured.guards, call_of(self.fn, args, kwargs), self.symbols)
        return None if bad is None else gd.print_guard(bad)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the captured form (methods and modules: with self)."""
        call = call_of(self.fn, args, kwargs)
        outs = self.captured.graph(*[gd.evaluate(s, call) for s in self.captured.inputs])
        finish = self.captured.finish
        if finish.recipe is not None:
            return _follow(finish.recipe, outs, call)
        namespace = dict(finish.namespace)
        exec(finish.text or "", namespace)
        return namespace["finish"](outs, call.locals, call.globals, call.closure)


def _follow(recipe: tuple[Any, ...], outs: tuple[Any, ...], call: gd.Call) -> Any:
    kind = recipe[0]
    if kind == "out":
        return outs[recipe[1]]
    if kind == "const":
        return recipe[1]
    if kind == "source":
        return gd.evaluate(recipe[1], call)
    if kind == "dict":
        return {k: _follow(r, outs, call) for k, r in recipe[1]}
    return (tuple if kind == "tuple" else list)([_follow(r, outs, call) for r in recipe[1:]])


def same(a: Any, b: Any, path: str = "result") -> None:
    """Equal in type, structure and value."""
    if isinstance(b, torch.Tensor):
        assert isinstance(a, torch.Tensor), path
        assert a.requires_grad == b.requires_grad, f"{path}.requires_grad"
        torch.testing.assert_close(a, b, equal_nan=True, check_stride=True, msg=lambda m: f"{path}: {m}")
        return
    assert type(a) is type(b), f"{path}: {type(a)} is not {type(b)}"
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for k in a:
            same(a[k], b[k], f"{path}[{k!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{i}]")
    elif callable(a):
        return
    elif hasattr(a, "__dict__") and (type(a).__eq__ is object.__eq__ or dataclasses.is_dataclass(a)):
        same(a.__dict__, b.__dict__, f"{path}.__dict__")
    elif not callable(a):
        assert a == b, path
