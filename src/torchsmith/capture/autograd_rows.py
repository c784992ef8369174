"""torch.autograd.Function: one node that keeps its own backward when gradients are needed, its forward inlined when not.

In: the class and the arguments of `apply`. Out: the machine's value of the result. Either way forward is interpreted, so that what it
reads is guarded; for a node, what it recorded is taken back, and autograd then sees `apply` itself on tracing tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from ..codes import Unsupported
from . import attributes as at
from .calls import Args, Kwargs, row
from .protocol import Machine

Tensor = torch.Tensor


class Context:
    """What `ctx` is while forward is interpreted."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


_APPLY = vars(torch.autograd.Function)["apply"]  # a class method written in Python; from torch 2.15 one written in C


@row(getattr(_APPLY, "__func__", _APPLY))
def apply(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    cls, rest = args[0], args[1:]
    needs = tuple(issubclass(type(a), Tensor) and m.recorder.info(a).requires_grad for a in rest)
    if not (m.grad and any(needs)):
        return _distinct(m, _forward(m, cls, rest, kwargs, needs), rest)
    recorder = m.recorder
    mark = recorder.last_node()
    before = (m.changes(), len(m.effects))
    _forward(m, cls, rest, kwargs, needs)
    if before != (m.changes(), len(m.effects)):
        raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__}.forward changes Python objects")
    recorder.take_back(mark)
    return recorder.record("function", _callable(cls), tuple(rest), kwargs)


_CALLABLES: dict[Any, Any] = {}


def _callable(cls: Any) -> Any:
    """A function that calls `cls.apply`: the graph's text can name it, which it cannot do with a bound method."""
    if cls not in _CALLABLES:

        def apply(*args: Any, **kwargs: Any) -> Any:
            return cls.apply(*args, **kwargs)

        apply.__name__ = apply.__qualname__ = f"apply_{cls.__name__}"
        _CALLABLES[cls] = apply
    return _CALLABLES[cls]


def _forward(m: Machine, cls: Any, args: Args, kwargs: Kwargs, needs: tuple[bool, ...]) -> Any:
    ctx = Context(needs)
    forward, setup = at.load_attr(m, cls, "forward"), at.load_attr(m, cls, "setup_context")
    grad, m.grad = m.grad, False
    try:
        if setup is torch.autograd.Function.setup_context:
            return m.call(forward, [ctx, *args], kwargs)
        return m.call(forward, args, kwargs)
    finally:
        m.grad = grad


def _distinct(m: Machine, result: Any, args: Args) -> Any:
    """An input that forward returns comes back as another tensor on the same memory."""
    if issubclass(type(result), Tensor) and any(result is a for a in args):
        return m.record("method", "view_as", (result, result), {})
    if type(result) is tuple:
        return tuple(_distinct(m, r, args) for r in result)
    return result


