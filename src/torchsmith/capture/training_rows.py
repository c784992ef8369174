"""Rows for training: backward passes, and what torch.optim does besides arithmetic.

In: the machine and a call's arguments. Out: the machine's value; gradients go through capture/gradients.py.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _use_grad_for_differentiable

from ..codes import Unsupported
from ..graph.tracing import device_of
from . import torch_rows
from .protocol import Args, Kwargs, Machine
from .tensor_methods import tensor_method
from .torch_rows import row
from .world import own_dict

Tensor = torch.Tensor


def _given(signature: inspect.Signature, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _tensors(m: Machine, value: Any) -> list[Any]:
    return [value] if value is None or issubclass(type(value), Tensor) else m.listed(value)


_BACKWARD = inspect.signature(Tensor.backward)
_ENGINE = inspect.signature(torch.autograd.backward)
_GRAD = inspect.signature(torch.autograd.grad)


@tensor_method("backward")
def backward(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    given = _given(_BACKWARD, [t, *args], kwargs)
    return _backward(m, [t], [given["gradient"]], given)


@tensor_method("register_hook")
def register_hook(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    (hook,) = (*args, *kwargs.values())
    return m.gradients.own_hooks.add(t, hook)


@tensor_method("retain_grad")
def retain_grad(m: Machine, t: Any, args: Args, kwargs: Kwargs) -> Any:
    m.gradients.retain(t)


@row(torch.autograd.backward)
def engine_backward(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    given = _given(_ENGINE, args, kwargs)
    if given["grad_variables"] is not None:
        raise Unsupported("AUT004", at=m.loc(), detail="backward(grad_variables=...)")
    tensors = _tensors(m, given["tensors"])
    grads = _tensors(m, given["grad_tensors"])
    return _backward(m, tensors, [None] * len(tensors) if given["grad_tensors"] is None else grads, given)


def _backward(m: Machine, tensors: list[Any], grads: list[Any], given: dict[str, Any]) -> Any:
    if given["create_graph"]:
        raise Unsupported("AUT004", at=m.loc(), detail="backward(create_graph=True)")
    inputs = None if given["inputs"] is None else _tensors(m, given["inputs"])
    m.gradients.backward(tensors, grads, given["retain_graph"], inputs)


@row(torch.autograd.grad)
def autograd_grad(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    given = _given(_GRAD, args, kwargs)
    if given["is_grads_batched"]:
        raise Unsupported("AUT004", at=m.loc(), detail="autograd.grad(is_grads_batched=True)")
    outputs, inputs = _tensors(m, given["outputs"]), _tensors(m, given["inputs"])
    grads = [None] * len(outputs) if given["grad_outputs"] is None else _tensors(m, given["grad_outputs"])
    zeros = bool(given["materialize_grads"])
    unused = bool(given["allow_unused"]) or zeros
    found = m.gradients.grad(outputs, inputs, grads, given["retain_graph"], bool(given["create_graph"]), unused)
    if zeros:
        found = tuple(m.record("function", torch.zeros_like, (x,), {}) if g is None else g for g, x in zip(found, inputs, strict=True))
    return found


# ---------------------------------------------------------------- optimizers


@row(torch.autograd.profiler.record_function)
def record_function(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A name for the profiler: nothing that a graph does."""
    return contextlib.nullcontext()


def _inner(fn: Any, name: str) -> types.CodeType:
    """The code of a function that a decorator makes."""
    return next(c for c in fn.__code__.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _use_grad(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Optimizer.step in the grad mode that the optimizer asks for. torch's own would import its compiler, to tell it to break here."""
    step = fn.__closure__[fn.__code__.co_freevars.index("func")].cell_contents
    before = m.grad
    m.grad_mode = m.truth(m.call(dict.__getitem__, [m.attr(args[0], "defaults"), "differentiable"], {}))
    try:
        return m.call(step, args, kwargs)
    finally:
        m.grad_mode = before


torch_rows.BY_CODE[_inner(_use_grad_for_differentiable, "_use_grad")] = _use_grad


@row(torch._C._group_tensors_by_device_and_dtype)
def grouped(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Lists of tensors, in groups by the device and dtype of those in the first list; with their positions if asked for."""
    lists = [m.listed(x) for x in m.listed(args[0])]
    with_indices = bool(args[1] if len(args) > 1 else kwargs.get("with_indices", False))
    found: dict[Any, tuple[list[list[Any]], list[int]]] = {}
    for i, first in enumerate(lists[0]):
        columns, indices = found.setdefault((device_of(first), first.dtype), ([[] for _ in lists], []))
        for column, values in zip(columns, lists, strict=True):
            if values:
                column.append(values[i])
        if with_indices:
            indices.append(i)
    return found


# ---------------------------------------------------------------- gradient scaling


def _maybe_step(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """GradScaler: the optimizer's step, unless gradients are infinite or NaN. Both ways are in the graph: the step is computed, and what it
    wrote takes its old values again where it is to be skipped."""
    _, optimizer, state, *rest = args
    found = m.listed(m.call(dict.values, [m.call(dict.__getitem__, [state, "found_inf_per_device"], {})], {}))
    _refuse_unseen_steps(m, optimizer, rest or kwargs)
    before, m.grad_mode = m.grad, False
    try:
        total = found[0]
        for other in found[1:]:
            total = m.record("method", "add", (total, other), {})
        skipped = m.record("method", "ne", (total, 0), {})
        mark, known = m.recorder.node_of(skipped), m.recorder.versions()
        changed, effects = (_attributes(m), m.world.changed_containers()), len(m.effects)
        m.grad_mode = before
        result = m.call(m.attr(optimizer, "step"), [], {})
        m.grad_mode = False
        if result is not None or len(m.effects) != effects or (_attributes(m), m.world.changed_containers()) != changed:
            raise Unsupported("CAP020", at=m.loc(), detail="a step that is skipped changes Python objects (an optimizer's first step does)")
        for tensor in m.recorder.written_since(known):
            old = m.recorder.value_at(mark, tensor)
            kept = m.record("function", torch.where, (skipped, old, tensor), {})
            m.record("method", "copy_", (tensor, kept), {})
    finally:
        m.grad_mode = before


def _refuse_unseen_steps(m: Machine, optimizer: Any, arguments: Any) -> None:
    """Steps that may do more than to write tensors."""
    if arguments or m.world.of(optimizer) is None:
        raise Unsupported("CAP020", at=m.loc(), detail="a step with arguments, or of an optimizer made here, may have to be skipped")
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if m.truth(m.attr(optimizer, name)):
            raise Unsupported("CAP020", at=m.loc(), detail="an optimizer's hooks may have to be skipped")


def _attributes(m: Machine) -> Any:
    """Attributes of outside objects that end otherwise than they began, globals and cells."""
    wrong = []
    for track in m.world.changed:
        for name, value in (track.attrs or {}).items():
            own = own_dict(track.obj)
            if type(value) is not bool or own is None or own.get(name) is not value:
                wrong.append((id(track), name, id(value)))
    return wrong, m.gradients.moves, len(m.world.global_writes), len(m.cell_writes)


torch_rows.BY_CODE[torch.amp.GradScaler._maybe_opt_step.__code__] = _maybe_step


# ---------------------------------------------------------------- statistics


def _cumulative(self: Any, input: Tensor) -> Tensor:
    """_BatchNorm.forward in training with momentum=None: the running statistics are averages over all batches, of which a tensor counts."""
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    out = torch.nn.functional.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        factor = 1.0 / self.num_batches_tracked.double()
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_((1 - factor) * running + factor * new)
    return out


def _batch_norm(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Without a momentum torch's code makes a Python number of a tensor."""
    module = args[0]
    if m.attr(module, "momentum") is None and m.truth(m.attr(module, "training")) and m.truth(m.attr(module, "track_running_stats")):
        tracked = [m.attr(module, name) for name in ("num_batches_tracked", "running_mean", "running_var")]
        if all(issubclass(type(t), Tensor) for t in tracked):
            return m.inline(_cumulative, args, kwargs)
    return m.inline(fn, args, kwargs)


torch_rows.BY_CODE[torch.nn.modules.batchnorm._BatchNorm.forward.__code__] = _batch_norm


# ---------------------------------------------------------------- distributions


def _symmetric(self: Any, value: Tensor) -> Tensor:
    if value.shape[-2] != value.shape[-1]:
        return torch.full(value.shape[:-2], False, device=value.device)
    return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)


def _positive_definite(self: Any, value: Tensor) -> Tensor:
    symmetric = torch.distributions.constraints.symmetric.check(value)
    return torch.where(symmetric.all(), torch.linalg.cholesky_ex(value).info.eq(0), symmetric)


def _instead_of(check: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """A constraint's check that Python leaves early where values of tensors say so, as one that does not."""
    torch_rows.BY_CODE[check.__code__] = lambda m, fn, args, kwargs: m.inline(ours, args, kwargs)  # type: ignore[attr-defined]


_instead_of(torch.distributions.constraints._Symmetric.check, _symmetric)
_instead_of(torch.distributions.constraints._PositiveDefinite.check, _positive_definite)
