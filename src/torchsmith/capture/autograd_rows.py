"""torch.autograd.Function: one node that keeps its own backward when gradients are needed, its forward inlined when not.

In: the class and the arguments of `apply`. Out: the machine's value of the result. Either way forward is interpreted, so that what it
reads is guarded; for a node so is backward. Then what both recorded is taken back, and autograd sees `apply` itself on tracing tensors;
where that would be given more than tensors and numbers (a module whose weights backward reads), or asks for the class of a number that
varies, forward stays in the graph, and a node `Own(body)` gives its results the interpreted backward.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from ..codes import Unsupported
from ..graph import tracing
from ..graph.sizes import SymTypes
from . import attributes as at
from . import hooks, tensors, torch_rows, transforms
from .attributes import Raised
from .calls import is_allowed, row
from .protocol import Args, Kwargs, Machine

Tensor = torch.Tensor


class Context:
    """What `ctx` is while forward is interpreted."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True
        self.dirty: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


_APPLY = vars(torch.autograd.Function)["apply"]  # a class method written in Python; from torch 2.15 one written in C


@row(getattr(_APPLY, "__func__", _APPLY))
def apply(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    cls, rest = args[0], args[1:]
    if is_allowed(cls):
        return _apply_itself(m, cls, rest, kwargs)
    needs = tuple(issubclass(type(a), Tensor) and m.recorder.info(a).requires_grad for a in rest)
    _check_transforms(m, cls)
    if not (m.grad and any(needs)):
        grad, m.grad_mode = m.grad, False  # in the graph too: what forward reads besides its arguments may require gradients
        ctx = Context(needs)
        try:
            made = _forward(m, cls, rest, kwargs, ctx)
        finally:
            m.grad_mode = grad
        return _distinct(m, made, rest, ctx)
    recorder = m.recorder
    mark, before = recorder.last_node(), hooks.state_of_objects(m)
    reads, told, ctx = m.world.reads[0], m.classes_told, Context(needs)
    made = _forward(m, cls, rest, kwargs, ctx)
    got = _backward(m, cls, ctx, made)
    if reads != m.world.reads[0] or m.global_writes or m.cell_writes:  # it runs on the objects as they were before the program
        raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__} may read what the program changed before")
    if before != hooks.state_of_objects(m):
        raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__} changes Python objects")
    # its own code would see of a size that varies another class than int
    if got is not None and not kwargs and (told != m.classes_told or not all(map(_is_plain, rest))):
        again = _backward(m, cls, ctx, made, watched=True)
        if before != hooks.state_of_objects(m) or again is None or again.constants != got.constants:
            raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__}.backward does something else when it is differentiated")
        return _own(m, cls, (got, again), ctx, made, rest)
    _guard_tensors(m, mark, [] if got is None else got.around, rest)
    recorder.take_back(mark)
    return _apply_itself(m, cls, rest, kwargs)


def _apply_itself(m: Machine, cls: Any, rest: Args, kwargs: Kwargs) -> Any:
    """A node that calls the class."""
    fn, args, kwargs = tensors.with_containers(m, _callable(cls), rest, kwargs)
    return m.recorder.record("function", fn, tuple(args), kwargs)


def _backward(m: Machine, cls: Any, ctx: Context, made: Any, watched: bool = False) -> transforms.Captured | None:
    """Interpret backward: what it reads, and what it does to the gradients of the tensors among the results. watched: where its own
    derivative is asked for."""
    fn = at.load_attr(m, cls, "backward")
    if fn is torch.autograd.Function.backward:
        return None
    results = made if type(made) is tuple else (made,)
    known = [issubclass(type(t), Tensor) and (ctx.materialize_grads or _may_have_gradient(t, ctx)) for t in results]
    tensors = [transforms.like(t) for t, k in zip(results, known, strict=True) if k]

    def arguments(given: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        rest = iter(given)
        return [ctx, *(next(rest) if k else None for k in known)], {}

    try:
        return (transforms.capture_watched if watched else transforms.capture_body)(m, fn, tensors, arguments)
    except Raised as error:
        raise Unsupported("CAP025", at=m.loc(), detail=f"{cls.__name__}.backward: {error.exc!r}") from error


def _may_have_gradient(t: Tensor, ctx: Context) -> bool:
    return (t.is_floating_point() or t.is_complex()) and all(t is not x for x in ctx.non_differentiable)


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, *SymTypes})


def _is_plain(value: Any) -> bool:
    """May this be an argument of a node?"""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return issubclass(type(value), Tensor) or type(value) in _PLAIN


def _own(m: Machine, cls: Any, bodies: tuple[transforms.Captured, ...], ctx: Context, made: Any, args: Args) -> Any:
    """The results of forward, as autograd has to know them: with backward's body as their derivative."""
    got = bodies[0]
    results = list(made) if type(made) is tuple else [made]
    tensors = [t for t in results if issubclass(type(t), Tensor)]
    given = [k for k, a in enumerate(args) if issubclass(type(a), Tensor)]
    memory = {tracing.storage(args[k]) for k in given}
    grads, more = got.constants[: len(args)], got.constants[len(args) :]
    fits = len(grads) == len(args) and all(c == (None,) or (c is None and k in given) for k, c in enumerate(grads))
    is_fresh = not ctx.dirty and all(tracing.storage(t) not in memory for t in tensors)
    if not fits or any(c != (None,) for c in more) or not is_fresh or not ctx.materialize_grads or not tensors:
        raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__} is given more than tensors and numbers")
    constant = [k for k, t in enumerate(tensors) if any(t is x for x in ctx.non_differentiable)]
    places = [given.index(k) for k, c in enumerate(grads) if c is None]
    target = Own(cls.__name__, [b.graph for b in bodies], places, len(given), len(tensors), constant)
    shown = m.recorder.record("function", target, (*map(args.__getitem__, given), *tensors, *(tuple(hooks.values(b)) for b in bodies)), {})
    rest = iter(shown if type(shown) is tuple else (shown,))
    found = tuple(next(rest) if issubclass(type(r), Tensor) else r for r in results)
    return found if type(made) is tuple else found[0]


class Own:
    """The target of a node: of `inputs` tensors, `results` made of them, and what each body reads besides, the results with a body as their
    derivative. graphs: the body, and the one where it is differentiated itself; places: the inputs whose gradients it gives, in order;
    constant: results that are not differentiable."""

    def __init__(
        self, name: str, graphs: list[torch.fx.Graph], places: list[int], inputs: int, results: int, constant: list[int]
    ) -> None:  # fmt: skip
        self.graphs, self.places, self.inputs, self.results, self.constant = graphs, places, inputs, results, constant
        self.__name__ = self.__qualname__ = f"own_{name}_{id(graphs[0]):x}"

    def __call__(self, *args: Any) -> Any:
        border = self.inputs + self.results
        return _Given.apply(self, args[border:], *args[:border])


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Own, around: tuple[Any, ...], *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.own, ctx.around = own, around
        made = tuple(t.clone() for t in tensors[own.inputs :])
        ctx.mark_non_differentiable(*(made[k] for k in own.constant))
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        own: Own = ctx.own
        which = int(torch.is_grad_enabled())
        found = transforms.run_body(own.graphs[which], (*grads, *ctx.around[which]))
        given: list[Any] = [None] * (own.inputs + own.results)
        for k, g in zip(own.places, found, strict=True):
            given[k] = g
        return (None, None, *given)


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


def _check_transforms(m: Machine, cls: Any) -> None:
    """What torch.func does with the class must be what it does elsewhere: it refuses some, and a class may have a rule of its own for vmap."""
    around = [b for b in m.recorder.bodies if b.wraps]
    if not around:
        return
    base = torch.autograd.Function
    if at.load_attr(m, cls, "setup_context") is base.setup_context:
        raise Unsupported("CAP051", at=m.loc(), detail=f"{cls.__name__}, whose forward takes ctx")
    has_rule = at.load_attr(m, cls, "vmap") is not base.vmap
    if any(b.is_mapped for b in around) and (has_rule or not at.load_attr(m, cls, "generate_vmap_rule")):
        raise Unsupported("CAP051", at=m.loc(), detail=f"{cls.__name__} has {'a rule of its own' if has_rule else 'no rule'} for vmap")


def _distinct(m: Machine, result: Any, args: Args, ctx: Context) -> Any:
    """An input that forward returns comes back as another tensor on the same memory, which requires no grad; one that it wrote to and that
    requires none is returned itself."""
    if issubclass(type(result), Tensor) and any(result is a for a in args):
        if m.recorder.info(result).requires_grad:
            return m.record("method", "detach", (result,), {})
        return result if any(result is d for d in ctx.dirty) else m.record("method", "view_as", (result, result), {})
    if type(result) is tuple:
        return tuple(_distinct(m, r, args, ctx) for r in result)
    return result


def _define(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A class of this kind that the program defines. Torch counts them, and our own too: its number is no part of what the program does."""
    return fn(*args, **kwargs)


torch_rows.BY_CODE[type(torch.autograd.Function).__init__.__code__] = _define  # type: ignore[misc]
