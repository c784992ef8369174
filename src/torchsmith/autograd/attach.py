"""Two compiled graphs as one operation of eager's autograd.

In: a Cut, its compiled forward graph, and how to compile a backward graph. Out: a callable of the captured graph's inputs whose results
autograd knows. Parameters and inputs that backward reads are saved as autograd saves them, so that writing to them in between is eager's
error; what lies in between is one block, freed when the backward pass is not to be repeated.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import events
from ..codes import BackendFailed, Unsupported, define
from ..graph.eager import eager_callable
from ..graph.outputs import ViewOf
from ..graph.spec import FunctionalGraph, TensorSpec
from ..graph.tracing import plain_autograd
from ..ir.number import number_of
from ..runtime.draws import generator_states, put_back
from .joint import Backward, Cut, Joint, Orders, Slot

define("AUT006", "a derivative of a derivative was asked for, so the captured graph was repeated eagerly",
       "take both derivatives inside of one compiled function")
define("AUT007", "many gradients came in at once (is_grads_batched), so the captured graph was repeated eagerly",
       "take the derivatives one by one, or inside of the compiled function")

Call = Callable[..., Sequence[Any]]
Pass = tuple[Backward, Call, dict[int, tuple[int, ...]]]
_CHANGED = (
    "torchsmith: the captured graph cannot be repeated eagerly (for a derivative of a derivative, or is_grads_batched), because one of its "
    "inputs was changed since. Take the derivatives before, or inside of the compiled function."
)
_DRAWS = (
    "torchsmith: the captured graph cannot be repeated eagerly (for a derivative of a derivative, or is_grads_batched), because it drew "
    "random numbers of its own. Take the derivatives inside of the compiled function, or leave options={'fallback_random': True}."
)
_PARTLY = (
    "torchsmith: a result of a compiled function keeps its gradient or has a hook, and another result follows from it: it sees the "
    "gradient that comes from outside of the function, without what comes through the other result. Call backward() inside of it too."
)
_ORDERS = 4  # backward passes for other orders of the gradients than the results' own
_LARGE = 1024  # a size that stands for any
_AS_IT_IS = contextlib.nullcontext()
_ONE = threading.RLock()
os.register_at_fork(after_in_child=_ONE._at_fork_reinit)  # type: ignore[attr-defined]
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class NotRun(Exception):
    """The forward graph found that it cannot do this call, before it has written anything: the captured graph does it, under eager's
    autograd, or raises what eager raises."""


def not_run(*inputs: Any) -> Any:
    raise NotRun


class Attached:
    """One captured graph, compiled forwards and backwards."""

    def __init__(
        self, joint: Joint, cut: Cut, forward: Call, repeat: Call, compile_backward: Callable[[FunctionalGraph], Call],
        turns_on: bool = False,
    ) -> None:  # fmt: skip
        """repeat: the captured graph itself, for calls that the forward graph gives back (NotRun) and for derivatives of derivatives.
        turns_on: the caller is in no_grad, the program is not."""
        self.turns_on, self.own_draws = turns_on, joint.facts.own_draws
        self.cut, self.forward, self.repeat, self.compile_backward = cut, forward, repeat, compile_backward
        self.joint = joint  # other backward passes may be asked for
        # views that the program cut off (detach, .data): made anew of an input they would carry its gradient
        rows = zip(joint.outputs.results, joint.outs, strict=True)
        self.cut_off = tuple(k for k, (row, t) in enumerate(rows) if isinstance(row, ViewOf) and not t.requires_grad)
        self.switched = tuple(i for i in cut.leaves if i in joint.switched)
        self.said_partly = False
        self.passes: dict[tuple[tuple[int, ...], Orders], Pass] = {}
        slots = cut.backward.slots
        self.planned = {slots[n].at[0]: order for n, order in _planned(cut.backward).items()}
        shown = {s.at[0] for s in slots if s.kind == "kept" and s.at[0] < cut.shown}
        self.saved_inputs = tuple(dict.fromkeys(s.at[0] for s in slots if s.kind == "input"))
        self.saved_results = tuple(sorted(shown))
        inputs = enumerate(joint.rec.inputs[: joint.n_inputs])
        self.unwatched = tuple(i for i, t in inputs if isinstance(t, torch.Tensor) and i not in (*self.saved_inputs, *cut.written))
        parts = ((k, row.of) for k, row in enumerate(joint.outputs.results) if isinstance(row, ViewOf) and row.apart)
        self.parts = [(k, of[1]) for k, of in parts if isinstance(of, tuple) and of[1] in self.saved_results]
        self.function = type(_name([joint.outs[k] for k in cut.roots]), (torch.autograd.Function,), {
            "forward": staticmethod(self._forward), "backward": staticmethod(self._backward),
        })  # fmt: skip
        self.apply = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        own = self.turns_on and not torch.is_grad_enabled()
        with torch.enable_grad() if own else _AS_IT_IS:
            if not torch.is_grad_enabled():
                with contextlib.suppress(NotRun):
                    return tuple(self.forward(*inputs)[: self.cut.shown])
                return tuple(self.repeat(*inputs))
            told = [inputs[i] for i in self.switched]
            try:
                for t in told:
                    t.requires_grad_()
                return self._attached(inputs)
            except BaseException as error:
                for t in told:
                    t.requires_grad_(False)
                if type(error) is not NotRun:
                    raise
            return tuple(self.repeat(*inputs))

    def _attached(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        cut = self.cut
        if cut.roots:
            given: list[Any] = [inputs]
            got = self.apply(given, *[inputs[i] for i in cut.leaves])
            results, roots = given[1], got if type(got) is tuple else (got,)
        else:
            with torch.no_grad():
                results, roots = self.forward(*inputs), ()
        known = {id(results[k]): t for k, t in zip(cut.roots, roots, strict=True)}
        outs = [known.get(id(r), r) for r in results[: cut.shown]]
        for number, (kind, at), steps in cut.again:
            base = inputs[at] if kind == "input" else outs[at]
            outs[number] = _view(base, outs[number], steps)
        for number in self.cut_off:
            outs[number] = outs[number].detach()
        return tuple(outs)

    def prepare(self) -> None:
        """Compile the usual backward pass now."""
        if self.cut.roots:
            self._pass(tuple(range(len(self.cut.roots))))

    # ------------------------------------------------------------ called by autograd

    def _forward(self, ctx: Any, given: list[Any], *leaves: Any) -> Any:
        inputs, cut = given[0], self.cut
        if cut.may_draw:
            ctx.random = generator_states()
        results = list(self.forward(*inputs))
        for k, home in self.parts:  # their writes have to count as writes to what is kept
            if not results[k]._is_view():
                results[k] = results[home].as_strided(results[k].shape, results[k].stride(), results[k].storage_offset())
        for k in cut.roots:  # a view that was made in here could not be written to
            if results[k]._is_view():
                results[k] = results[k].detach()  # over the same memory, with its version counter
        given.append(results)
        ctx.set_materialize_grads(False)
        block = {k: results[k] for k in range(cut.shown, len(results))}
        tensors = [inputs[i] for i in self.saved_inputs if isinstance(inputs[i], torch.Tensor)]
        tensors += [results[k] for k in self.saved_results]
        ctx.numbers = {i: inputs[i] for i in self.saved_inputs if not isinstance(inputs[i], torch.Tensor)}
        ctx.sizes = {s: _size(inputs, s) for s in cut.backward.slots if s.kind == "size"}
        ctx.versions = _versions(inputs, self.unwatched)
        if _has_saving_hooks():  # they are to see everything that is kept
            ctx.order = tuple(k for k, t in block.items() if isinstance(t, torch.Tensor))
            tensors += [block.pop(k) for k in ctx.order]
        else:
            ctx.order = ()
        ctx.block, ctx.inputs = block, inputs
        ctx.inner = [weakref.ref(results[k]) for k in self.joint.inner]
        ctx.save_for_backward(*tensors)
        roots = tuple(results[k] for k in cut.roots)
        return roots if len(roots) > 1 else roots[0]

    def _backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)  # eager's error where they are gone
        inputs = {i: ctx.numbers[i] if i in ctx.numbers else next(saved) for i in self.saved_inputs}
        kept = {**ctx.block, **{k: next(saved) for k in self.saved_results}, **{k: next(saved) for k in ctx.order}}
        if not self.said_partly and any((t := r()) is not None and (t.retains_grad or t._backward_hooks) for r in ctx.inner):
            self.said_partly = True
            events.warn(_PARTLY)
        if torch.is_grad_enabled():
            return None, *self._again(ctx, kept, grads, "AUT006")
        if any(_is_batched(g) for g in grads if g is not None):
            return None, *self._again(ctx, kept, grads, "AUT007")
        grads = tuple(None if g is None else g.resolve_conj().resolve_neg() for g in grads)  # the graph reads their memory
        chosen = tuple(j for j, g in enumerate(grads) if g is not None)
        if not chosen:
            return (None,) * (1 + len(self.cut.leaves))
        backward, call, planned = self._pass(chosen, self._orders(chosen, grads))
        args = []
        for s in backward.slots:
            if s.kind == "input":
                args.append(inputs[s.at[0]])
            elif s.kind == "kept":
                args.append(kept[s.at[0]])
            elif s.kind == "tangent":
                args.append(_as_planned(grads[s.at[0]], planned.get(len(args))))
            else:
                args.append(ctx.sizes[s] if s in ctx.sizes else _size(ctx.inputs, s))  # asked for only where some roots have no gradient
        if not _keeps_graph():
            ctx.block = ctx.inputs = None
            kept.clear()
        results = call(*args)
        return None, *[None if n is None else results[n] for n in backward.grads]

    def _orders(self, chosen: tuple[int, ...], grads: Sequence[Any]) -> Orders:
        """The orders in memory in which these gradients come, or None where they are those that were planned (or none at all)."""
        for j in chosen:
            planned = self.planned.get(j)
            if not (planned is None or grads[j].permute(planned).is_contiguous()):
                found = tuple(self._order(j, grads[j]) for j in chosen)
                return None if not any(found) else found
        return None

    def _order(self, j: int, grad: torch.Tensor) -> tuple[int, ...] | None:
        planned = self.planned.get(j)
        if planned is None or not grad.numel() or grad.permute(planned).is_contiguous():
            return None
        order = tuple(sorted(range(grad.dim()), key=lambda d: (int(grad.shape[d] == 1), -int(grad.stride()[d]))))
        return order if grad.permute(order).is_contiguous() else None

    def _pass(self, chosen: tuple[int, ...], orders: Orders = None) -> Pass:
        """The backward graph for gradients of these roots in these orders: made when it is first needed."""
        found = self.passes.get((chosen, orders))
        if found is not None:
            return found
        with _ONE, plain_autograd():  # other threads may go backwards at the same time
            if (chosen, orders) not in self.passes:
                self.passes[chosen, orders] = self._made(chosen, orders)
        return self.passes[chosen, orders]

    def _made(self, chosen: tuple[int, ...], orders: Orders) -> Pass:
        if orders is not None:
            others = [orders for known, orders in self.passes if known == chosen and orders is not None]
            if len(others) < _ORDERS:
                with contextlib.suppress(Unsupported):  # it needs what was not kept: gradients are brought in the planned order
                    backward = self.joint.backward(chosen, orders)
                    return backward, self.compile_backward(backward.graph), _planned(backward)
            return self._pass(chosen)
        backward = self.cut.backward if len(chosen) == len(self.cut.roots) else self.joint.backward(chosen)
        return backward, self.compile_backward(backward.graph), _planned(backward)

    def _again(self, ctx: Any, kept: dict[int, Any], grads: Sequence[Any], code: str) -> list[Any]:
        """Gradients that can be differentiated, or many at once: the captured graph once more, under eager's autograd."""
        events.emit("fallback", code=code)
        if _versions(ctx.inputs, self.unwatched) != ctx.versions:
            raise RuntimeError(_CHANGED)
        if self.cut.draws and self.own_draws:
            raise RuntimeError(_DRAWS)
        now = generator_states() if self.cut.may_draw else None
        if now is not None:
            put_back(ctx.random)
        further = torch.is_grad_enabled()
        try:
            with torch.enable_grad():
                inputs = list(ctx.inputs)
                for i in self.cut.written:  # the repetition writes to copies, which begin as the inputs did if the results follow from that
                    inputs[i] = _copy(inputs[i], kept.get(self.cut.old.get(i, -1)))
                for i in set(self.cut.leaves).difference(self.cut.written):  # one may be made of another, outside of the graph
                    inputs[i] = torch.ops.aten.alias.default(inputs[i])
                outs = self.repeat(*inputs)
        finally:
            if now is not None:
                put_back(now)
        chosen = [(outs[k], g) for k, g in zip(self.cut.roots, grads, strict=True) if g is not None]
        leaves = [inputs[i] for i in self.cut.leaves]
        return list(torch.autograd.grad([t for t, _ in chosen], leaves, [g for _, g in chosen], create_graph=further, allow_unused=True))


def _name(roots: Sequence[torch.Tensor]) -> str:
    """The name of the node under which autograd knows these results: of the operations that make them, as its errors say it."""
    made = (t.grad_fn.name() for t in roots if t.grad_fn is not None)
    names = dict.fromkeys(re.sub(r"Backward\d*$", "", name).rpartition("::")[2] for name in made)
    return "_".join(n if n.isidentifier() else "Node" for n in list(names)[:4]) or "Compiled"


def _size(inputs: Sequence[Any], slot: Slot) -> int:
    number, dim, *rest = slot.at
    scale, shift = rest or (1, 0)
    return int((inputs[number].shape[dim] - shift) // scale)


def _versions(inputs: Sequence[Any], numbers: Sequence[int]) -> list[int]:
    return [-1 if (t := inputs[i]).is_inference() else t._version for i in numbers]


def _copy(t: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """A tensor over memory of its own, to autograd the same as `t`; it holds `value` (None: what `t` holds)."""
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
    if value is not None:
        with torch.no_grad():
            copy.copy_(value)
    return copy


def _is_batched(g: torch.Tensor) -> bool:
    return torch._C._functorch.is_legacy_batchedtensor(g) or torch._C._functorch.is_functorch_wrapped_tensor(g)


def _has_saving_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _planned(backward: Backward) -> dict[int, tuple[int, ...]]:
    """Per input of a backward graph that is a gradient and is read: its order in memory, outermost dimension first."""
    found, graph = {}, backward.graph
    at_hand = {name: max(hint, 2) for name, hint in graph.hints}  # sizes of 1 would not tell one dimension from another
    large = {s.sym.name: _LARGE for s in graph.symbols}
    for n, (slot, spec) in enumerate(zip(backward.slots, graph.inputs, strict=False)):  # constants come after the slots
        if slot.kind == "tangent" and isinstance(spec, TensorSpec):
            ranks = [tuple(number_of(s, values) or 0 for values in (large | at_hand, large)) for s in spec.strides]
            found[n] = tuple(sorted(range(len(ranks)), key=ranks.__getitem__, reverse=True))
    return found


def _as_planned(grad: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """A gradient in the order that the backward graph was compiled for."""
    if order is None or (ordered := grad.permute(order)).is_contiguous():
        return grad
    back = sorted(range(grad.dim()), key=order.__getitem__)
    return ordered.contiguous().permute(back)


def _pairs(t: torch.Tensor) -> torch.Tensor:
    """All of the memory of a real tensor as complex numbers."""
    count = t.untyped_storage().nbytes() // t.element_size()
    return torch.view_as_complex(t.as_strided((count // 2, 2), (2, 1), 0))


def _view(base: torch.Tensor, raw: torch.Tensor, steps: Any) -> torch.Tensor:
    if steps is None:
        if raw.dtype is not base.dtype:  # view_as_real(z), z.imag, bits
            to_complex = _pairs if raw.is_complex() else lambda t: t.view(raw.dtype)
            base = torch.view_as_real(base) if base.is_complex() else to_complex(base)
        return base.as_strided(raw.shape, raw.stride(), raw.storage_offset())
    if not steps:
        return torch.ops.aten.alias.default(base)  # another tensor
    start = base.storage_offset()
    for step in steps:
        if step.op is torch.ops.aten.as_strided.default:  # counted from the first element of the memory's own tensor
            size, stride, offset = step.args
            base = base.as_strided(size, stride, start + offset)
        else:
            base = step.op(base, *step.args, **step.kwargs)
    return base


def attach(
    joint: Joint, cut: Cut, forward: Call, repeat: Call, compile_backward: Callable[[FunctionalGraph], Call], turns_on: bool = False
) -> Attached:
    """The callable that takes the captured graph's place."""

    def compiled(graph: FunctionalGraph) -> Call:
        try:
            return compile_backward(graph)
        except Unsupported as why:
            events.emit("fallback", code=why.code, at=why.at, detail=f"backward: {why.detail}")
        except BackendFailed:  # under fullgraph
            raise
        except Exception as error:  # a bug of ours: as for the forward graph, the program goes on
            what = f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            events.emit("fallback", code="API005", detail=f"backward: {what}", traceback=text)
            events.warn(f"torchsmith: internal error while compiling a backward pass; it runs eagerly. {what}")
        return eager_callable(graph)

    return Attached(joint, cut, forward, repeat, compiled, turns_on)
