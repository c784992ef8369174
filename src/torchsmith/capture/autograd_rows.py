"""torch.autograd.Function: one node that keeps its own backward when gradients are needed, its forward inlined when not.

In: the class and the arguments of `apply`. Out: the machine's value of the result. Either way forward is interpreted, so that what it
reads is guarded; for a node so is backward, what both recorded is taken back, and autograd then sees `apply` itself on tracing tensors.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from ..codes import Unsupported
from . import attributes as at
from . import hooks, torch_rows, transforms
from .attributes import Raised
from .calls import Args, Kwargs, row
from .protocol import Machine

Tensor = torch.Tensor


class Context:
    """What `ctx` is while forward is interpreted."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


_APPLY = vars(torch.autograd.Function)["apply"]  # a class method written in Python; from torch 2.15 one written in C


@row(getattr(_APPLY, "__func__", _APPLY))
def apply(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    cls, rest = args[0], args[1:]
    needs = tuple(issubclass(type(a), Tensor) and m.recorder.info(a).requires_grad for a in rest)
    if not (m.grad and any(needs)):
        return _distinct(m, _forward(m, cls, rest, kwargs, Context(needs)), rest)
    recorder = m.recorder
    mark, before = recorder.last_node(), hooks.state_of_objects(m)
    reads, ctx = m.world.reads[0], Context(needs)
    made = _forward(m, cls, rest, kwargs, ctx)
    around = _backward(m, cls, ctx, made)
    if reads != m.world.reads[0] or m.global_writes or m.cell_writes:  # it runs on the objects as they were before the program
        raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__} may read what the program changed before")
    if before != hooks.state_of_objects(m):
        raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__} changes Python objects")
    _guard_tensors(m, mark, around, rest)
    recorder.take_back(mark)
    return recorder.record("function", _callable(cls), tuple(rest), kwargs)


def _backward(m: Machine, cls: Any, ctx: Context, made: Any) -> list[Any]:
    """Interpret backward for what it reads; the nodes from around it that it reads."""
    fn = at.load_attr(m, cls, "backward")
    if fn is torch.autograd.Function.backward:
        return []
    results = made if type(made) is tuple else (made,)
    tensors = [transforms.like(t) for t in results if issubclass(type(t), Tensor)]

    def arguments(given: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        rest = iter(given)
        return [ctx, *(next(rest) if issubclass(type(t), Tensor) else None for t in results)], {}

    try:
        return transforms.capture_body(m, fn, tensors, arguments).around
    except Raised as error:
        raise Unsupported("CAP025", at=m.loc(), detail=f"{cls.__name__}.backward: {error.exc!r}") from error


def _guard_tensors(m: Machine, mark: Any, around: list[Any], args: Args) -> None:
    """Tensors from outside that come by another way than as arguments are the graph's constants: they must be the same objects."""
    recorded = itertools.takewhile(lambda n: n is not mark, reversed(m.recorder.graph.nodes))
    read = {n for node in recorded for n in node.all_input_nodes} | {n for n in around if isinstance(n, torch.fx.Node)}
    given = {id(a) for a in args}
    for info in m.recorder.real.values():
        if info.node in read and info.source is not None and id(info.tensor) not in given:
            m.world.guard(info.source, "identity", weakref.ref(info.real))


def _callable(cls: Any) -> Any:
    """A function that calls `cls.apply`: the graph's text can name it, which it cannot do with a bound method."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = f"apply_{cls.__name__}"
    return apply


def _forward(m: Machine, cls: Any, args: Args, kwargs: Kwargs, ctx: Context) -> Any:
    forward, setup = at.load_attr(m, cls, "forward"), at.load_attr(m, cls, "setup_context")
    grad, m.grad = m.grad, False
    try:
        if setup is torch.autograd.Function.setup_context:
            return m.call(forward, [ctx, *args], kwargs)
        made = m.call(forward, args, kwargs)
        m.call(setup, [ctx, tuple(args), made], {})
        return made
    finally:
        m.grad = grad


def _distinct(m: Machine, result: Any, args: Args) -> Any:
    """An input that forward returns comes back as another tensor on the same memory."""
    if issubclass(type(result), Tensor) and any(result is a for a in args):
        return m.record("method", "view_as", (result, result), {})
    if type(result) is tuple:
        return tuple(_distinct(m, r, args) for r in result)
    return result


def _define(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A class of this kind that the program defines. Torch counts them, and our own too: its number is no part of what the program does."""
    return fn(*args, **kwargs)


torch_rows.BY_CODE[type(torch.autograd.Function).__init__.__code__] = _define  # type: ignore[misc]
