"""Hooks that the program puts on tensors that it makes.

In: the machine, a tensor and its hook. Out: a handle for the program. The hook is interpreted as a body of its own where eager's engine
would call it: a backward pass of the program becomes one node `Pass(bodies)`, and what gradients from outside will reach gets one node
`Hooked(body)` at the end. Both run the bodies as autograd's own hooks.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..codes import Unsupported
from . import transforms
from .protocol import Machine

Tensor = torch.Tensor
_FIXED = (Tensor, int, float, complex, bool, str, bytes, type(None), types.ModuleType, types.BuiltinFunctionType, types.FunctionType, type)


class Handle:
    """What register_hook gives the program."""

    def __init__(self, tensor: Tensor, hook: Any, step: int) -> None:
        self.tensor, self.hook, self.step, self.node, self.removed = tensor, hook, step, tensor.grad_fn, False

    def remove(self) -> None:
        self.removed = True


class OwnHooks:
    """The hooks on the program's own tensors, in order."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.handles: list[Handle] = []

    def add(self, t: Tensor, hook: Any) -> Handle:
        m, info = self.m, self.m.recorder.info(t)
        if info.real is not None or not t.requires_grad or t.grad_fn is None or m.is_whole or m.modes or m.subclasses:
            raise Unsupported("CAP026", at=m.loc(), detail="tensor.register_hook()")
        if m.recorder.bodies or m.contexts or m.recorder.regions or not _is_closed(m, hook):
            raise Unsupported("CAP026", at=m.loc(), detail="tensor.register_hook() here")
        self.handles.append(Handle(t, hook, max(m.frames[0].steps - 1, 0)))
        m.gradients.moves += 1
        self._captured(self.handles[-1])  # a hook that cannot be captured is a break here
        return self.handles[-1]

    def are_on(self, t: Tensor) -> bool:
        return any(h.tensor is t and not h.removed for h in self.handles)

    def met(self, visited: set[Any]) -> list[tuple[Tensor, transforms.Captured]]:
        """The hooks that a backward pass over these nodes meets."""
        found = [h for h in self.handles if not h.removed and h.node in visited]
        return [(h.tensor, self._captured(h)) for h in found]

    def register(self) -> None:
        """The program is done: from here on the hooks are autograd's."""
        for h in self.handles:
            if not h.removed:
                got = self._captured(h)
                self.m.record("function", Hooked(got.graph), (h.tensor, *values(got)), {})

    def _captured(self, h: Handle) -> transforms.Captured:
        m, t = self.m, h.tensor
        before, known = state_of_objects(m), m.recorder.versions()
        grad = transforms.like(t)
        try:
            got = transforms.capture_body(m, h.hook, [grad])
            (constant,) = got.constants or ((),)
            if constant is None:
                made = next(iter(reversed(got.graph.nodes))).args[0][0].meta["val"]
                fits = (made.dtype, tuple(made.shape)) == (t.dtype, tuple(t.shape))
            else:
                fits = constant == (None,)
            if not fits or state_of_objects(m) != before or m.recorder.written_since(known) or t.grad_fn is not h.node:
                raise Unsupported("CAP026", at=m.loc(), detail="tensor.register_hook() with a hook that changes something else")
        except Unsupported as e:
            e.step = h.step
            raise
        return got


def state_of_objects(m: Machine) -> Any:
    """What the program has made of Python's objects so far, to be compared."""
    attributes = [(id(t), tuple((k, id(v)) for k, v in (t.attrs or {}).items())) for t in m.world.changed]
    return m.changes(), m.world.changed_containers(), len(m.effects), attributes


def _is_closed(m: Machine, hook: Any) -> bool:
    """A Python function that writes to no cell, and holds nothing that the program made and may change."""
    if type(hook) is not types.FunctionType or any(i.opname in ("STORE_DEREF", "DELETE_DEREF") for i in dis.get_instructions(hook)):
        return False
    held = [c.cell_contents for c in hook.__closure__ or () if not _is_empty(c)]
    held += [*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()]
    return all(isinstance(v, _FIXED) or m.world.tracks.get(id(v)) is not None for v in held)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def values(got: transforms.Captured) -> list[Any]:
    return [n.meta["val"] if issubclass(type(n), fx.Node) else n for n in got.around]


def _hook(graph: fx.Graph, lifted: Sequence[Any]) -> Any:
    def run(grad: Tensor) -> Any:
        return next(iter(transforms.run_body(graph, (grad, *lifted))), None)

    return run


class Hooked:
    """The target of a node: the body becomes a hook of a tensor."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.__name__ = self.__qualname__ = f"hooked_{id(graph):x}"

    def __call__(self, t: Tensor, *lifted: Any) -> None:
        if t.requires_grad:
            t.register_hook(_hook(self.graph, lifted))


class Pass:
    """The target of a node: autograd.grad with hooks on some tensors."""

    goes_backwards = True

    def __init__(self, graphs: Sequence[fx.Graph]) -> None:
        self.graphs = tuple(graphs)
        self.__name__ = self.__qualname__ = f"pass_{id(self):x}"

    def __call__(self, tensors: Sequence[Tensor], lifted: Sequence[Sequence[Any]], *args: Any) -> Any:
        rows = zip(self.graphs, tensors, lifted, strict=True)
        handles = [t.register_hook(_hook(graph, held)) for graph, t, held in rows]
        try:
            return torch.autograd.grad(*args)
        finally:
            for handle in handles:
                handle.remove()


def gradients(m: Machine, met: Sequence[tuple[Tensor, transforms.Captured]], args: tuple[Any, ...]) -> Any:
    """autograd.grad as a node."""
    if not met:
        return m.record("function", torch.autograd.grad, args, {})
    target = Pass([got.graph for _, got in met])
    return m.record("function", target, (tuple(t for t, _ in met), tuple(tuple(values(got)) for _, got in met), *args), {})
