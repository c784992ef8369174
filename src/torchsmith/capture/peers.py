"""PyTorch's own compiler, seen from here: `torch.compiler.set_stance` and `torch.compiler.reset` reach torchsmith's functions too, and
what `torch.compile` does to frames ends where a function of torchsmith begins.

In: the module that holds those switches, when the program loads it (never loaded from here). Out: C looks at its stance before a
compiled function is called, and a reset over there is one here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _frame, policy

_HOLDER = "torch._dynamo.eval_frame"


class _Resets:
    """One of the things that torch.compiler.reset resets."""

    def __init__(self, reset: Callable[[], None]) -> None:
        self.reset = reset


class _AfterLoading(importlib.abc.MetaPathFinder):
    """Notes the holder of the switches as soon as its code has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        if name != _HOLDER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _noted(module)

            loader.exec_module = exec_module
        return spec


_resets: list[_Resets] = []


def watch(reset: Callable[[], None]) -> None:
    """Called once: `reset` forgets torchsmith's compilations."""
    _resets.append(_Resets(reset))
    _frame.setup_peer(torch._C._dynamo.eval_frame.set_eval_frame)
    if _HOLDER in sys.modules:
        _noted(sys.modules[_HOLDER])
    else:
        sys.meta_path.insert(0, _AfterLoading())


def _noted(module: types.ModuleType) -> None:
    now = getattr(module, "_stance", None)
    if now is not None:
        _frame.watch_stance(vars(module), now if _is_default(now) else None)
    rearm()


def rearm() -> None:
    """A reset forgets whom it has told."""
    known = getattr(sys.modules.get(_HOLDER), "cached_backends", None)
    if isinstance(known, dict):
        for told in _resets:
            known.setdefault(id(told), told)


def _is_default(stance: Any) -> bool:
    return getattr(stance, "stance", "") == "default" and getattr(stance, "backend", None) is None


def original(fn: Any) -> Any:
    """What torch.compile made `fn` of: that is compiled here. `fn` itself where it is nothing of torch.compile's."""
    while isinstance(fn, types.FunctionType) and fn.__globals__.get("__name__") == _HOLDER and "_torchdynamo_disable" not in fn.__dict__:
        inner = fn.__dict__.get("_torchdynamo_orig_callable")
        if not callable(inner):
            break
        fn = inner
    return fn


def is_marked(fn: Any) -> bool:
    """Does this function have the mark of compiler.disable, PyTorch's or ours?"""
    return isinstance(fn, types.FunctionType) and "_torchdynamo_disable" in fn.__dict__


def is_disabled(fn: Any) -> bool:
    """Did somebody ask for the mark? (What PyTorch marks of its optimizers is for its own sake.)"""
    own = fn.__dict__.get("_torchdynamo_orig_callable") if is_marked(fn) else None
    return is_marked(fn) and not (isinstance(own, types.FunctionType) and own.__code__.co_filename.startswith(policy.OPTIMIZERS))


def forced_backend() -> Any:
    """The backend that torch.compiler.set_stance(force_backend=...) names, or None."""
    return getattr(getattr(sys.modules.get(_HOLDER), "_stance", None), "backend", None)


def stance() -> str:
    """What torch.compiler.set_stance was told."""
    now = getattr(sys.modules.get(_HOLDER), "_stance", None)
    if now is None:
        return "default"
    if _is_default(now):
        _frame.watch_stance(vars(sys.modules[_HOLDER]), now)  # another object that says the same
    return str(now.stance)
