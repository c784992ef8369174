"""Gradients of the program being captured: what `.grad` holds, and what backward() does to it.

In: the machine's tensors. Out: one node of the captured graph for each backward pass (torch.autograd.grad of the leaves it reaches), then
`.grad` as eager's accumulation leaves it, kept beside the tensors. finish writes what differs at the end; what ends as it began, or was
replaced on the way, never leaves the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..codes import Unsupported
from ..graph import tracing
from ..graph.layout import contiguous_strides, is_dense
from ..graph.sizes import expr_of
from ..graph.tracing import device_of
from . import hooks
from .attributes import Raised
from .protocol import Machine
from .source import Attr
from .world import MISSING

Tensor = torch.Tensor
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Gradients:
    """`.grad` of every tensor the program has asked for or changed."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.written: dict[int, tuple[Tensor, Any]] = {}  # by id of the tracing tensor: it, and what `.grad` is now
        self.spent: set[Any] = set()  # nodes of autograd's graph that a backward pass has freed
        self.made: dict[int, Tensor] = {}  # leaves that a backward pass gave a gradient, by id
        self.moved: dict[int, tuple[Tensor, Tensor, int]] = {}  # inputs whose memory is another's now: them, that one, their version then
        self.moves = 0
        self.own_hooks = hooks.OwnHooks(machine)
        self.retained: list[tuple[Tensor, int]] = []  # own tensors that keep their gradient, and where they were told so
        self.stale: set[int] = set()  # those that autograd knew with their old memory
        self.switched: list[Any] = []  # Infos of inputs of which the program said whether they require grad
        self.read_before: set[int] = set()  # ids of those that operators had read until then
        self.switched_at = -1  # the outermost frame's instruction where it first did

    # ------------------------------------------------------------ .grad

    def read(self, t: Tensor) -> Any:
        """`t.grad`."""
        known = self.written.get(id(t))
        if known is not None:
            return known[1]
        info = self.m.recorder.info(t)
        if info.real is None or info.source is None:
            return None
        return self.m.world.wrap(info.real.grad if info.real.is_leaf else None, Attr(info.source, "grad", "getattr"))

    def write(self, t: Tensor, value: Any) -> None:
        """`t.grad = value`, under torch's conditions."""
        info = self.m.recorder.info(t)
        if value is not None:
            if not issubclass(type(value), Tensor):
                raise Unsupported("CAP026", at=self.m.loc(), detail=f"tensor.grad = a {type(value).__name__}")
            if value.dtype != t.dtype or tuple(value.shape) != tuple(t.shape) or value is t:
                raise Unsupported("CAP026", at=self.m.loc(), detail="tensor.grad = a tensor of another dtype or shape")
        if not info.leaf:
            raise Unsupported("CAP026", at=self.m.loc(), detail="tensor.grad = ... of a tensor that is no leaf")
        self.read(t)
        self.written[id(t)] = (t, value)

    def hooks(self, t: Tensor, name: str) -> Any:
        """The hooks of a tensor: none, under a guard. Those that are there would be skipped, so they are refused."""
        info = self.m.recorder.info(t)
        if info.real is None or info.source is None:
            return None
        found = getattr(info.real, name)
        source = Attr(info.source, name, "getattr")
        if found:
            raise Unsupported("AUT002", at=self.m.loc(), detail=f"{name} of {info.source}")
        if found is None:
            self.m.world.guard(source, "equals", None)
        else:
            self.m.world.guard(source, "length", 0)
        return None

    def _hooks_of(self, leaf: Tensor, name: str) -> list[Any]:
        """What a leaf's hooks are, under a guard."""
        info = self.m.recorder.info(leaf)
        if info.real is None or info.source is None:
            return []
        if not getattr(info.real, name):
            self.hooks(leaf, name)
            return []
        found = self.m.world.wrap(getattr(info.real, name), Attr(info.source, name, "getattr"))
        return self.m.listed(self.m.call(self.m.attr(found, "values"), [], {}))

    def _hooked(self, hooks: list[Any], value: Tensor) -> Tensor:
        """A gradient as the hooks leave it."""
        for hook in hooks:
            new = self.m.call(hook, [value], {})
            if new is not None:
                if not issubclass(type(new), Tensor) or (new.dtype, tuple(new.shape)) != (value.dtype, tuple(value.shape)):
                    raise Unsupported("AUT002", at=self.m.loc(), detail="a hook gives another kind of tensor than the gradient")
                value = new
        return value

    def retain(self, t: Tensor) -> None:
        """`t.retain_grad()` of a tensor that the program makes."""
        m, info = self.m, self.m.recorder.info(t)
        if t.is_leaf and t.requires_grad:
            return  # it keeps its gradient anyway
        if info.real is not None or not t.requires_grad or m.is_whole or m.recorder.bodies or m.contexts:
            raise Unsupported("CAP026", at=m.loc(), detail="tensor.retain_grad()")
        if not any(t is other for other, _ in self.retained):
            self.retained.append((t, max(m.frames[0].steps - 1, 0)))
            self.moves += 1

    def check_retained(self) -> None:
        """The program is done: a gradient that only a later backward pass gives would be kept nowhere, unless all of it comes from outside,
        to a result that nothing else is made of."""
        for t, step in self.retained:
            if id(t) in self.written:
                continue
            if not self.m.recorder.info(t).node.users and not t._is_view() and not self.own_hooks.are_on(t):
                self.m.effects.append((Tensor.retain_grad, [t], {}))
            else:
                error = Unsupported("CAP026", at=self.m.loc(), detail="tensor.retain_grad() of what no backward pass of the program reaches")
                error.step = step
                raise error

    def _retained(self, visited: set[Any], is_all: bool) -> list[Tensor]:
        """The tensors that keep what a pass over these nodes gives them. is_all: it goes on to all leaves."""
        found = [(t, step) for t, step in self.retained if t.grad_fn in visited]
        for t, step in found:
            if not is_all or self.own_hooks.are_on(t):  # autograd.grad gives what its hooks have not seen
                error = Unsupported("CAP026", at=self.m.loc(), detail="tensor.retain_grad() with hooks, or for a pass that stops on its way")
                error.step = step
                raise error
        return [t for t, _ in found]

    def _keep(self, t: Tensor, value: Tensor) -> None:
        """What a retained gradient becomes: never a tensor that was there."""
        now = self.read(t)
        fresh = self.m.record("method", "clone", (value,), {}) if now is None else self.m.record("method", "add", (now, value), {})
        self.written[id(t)] = (t, fresh)

    # ------------------------------------------------------------ .data

    def set_data(self, t: Tensor, value: Any) -> None:
        """`t.data = value`: from here on t's memory is value's. Its operators read value; an input takes it when the program is done."""
        m, r = self.m, self.m.recorder

        def refuse(why: str) -> None:
            raise Unsupported("CAP026", at=m.loc(), detail=f"tensor.data = {why}")

        if not issubclass(type(value), Tensor):
            refuse(f"a {type(value).__name__}")
        info, memory = r.info(t), tracing.storage(value)
        if (tuple(t.shape), t.dtype, t.stride(), device_of(t)) != (tuple(value.shape), value.dtype, value.stride(), device_of(value)):
            refuse("a tensor of another layout or dtype")
        if memory == tracing.storage(t) and _starts_at(t) is _starts_at(value):
            return  # `t.data *= 2`: what it takes is its own memory
        if m.recorder.bodies or m.contexts or r.is_inference(t) or r.is_inference(value) or torch.is_inference_mode_enabled():
            refuse("... here")
        if info.real is None or info.source is None or t.grad_fn is not None or t._is_view():
            refuse("... of a tensor that is not an input")
        if memory in r.by_memory or memory == tracing.storage(t):
            refuse("memory of an input")  # writes to one are then writes to the other
        data = m.record("function", getattr, (value, "data"), {})
        if any(_is_differentiated(user) for user in info.node.users):
            self.stale.add(id(t))
        info.data = r.info(data).node
        if t.requires_grad:  # a leaf on the new memory stands for it
            leaf = m.record("method", "detach", (data,), {})
            leaf.requires_grad_()
            info.data = r.effect_method("requires_grad_", leaf, (True,))
        self.moved[id(t)] = (t, data, t._version)
        self.moves += 1

    def check_results(self, results: Sequence[Tensor]) -> None:
        """Gradients that flow out of the program must not reach what took other memory, or says now whether it requires grad: the graph
        autograd has outside is of the inputs as they came."""
        if self.moved and results:
            self._reached(results, is_end=True)
        if any(i.is_differentiated for i in self.switched) or (results and not all(self._is_told_first(i) for i in self.switched)):
            error = Unsupported("CAP026", at=self.m.loc(), detail="requires_grad of an input, where results require grad")
            error.step = self.switched_at
            raise error
        for info in self.switched:  # the graph is traced again from what the inputs are when it is called
            info.tensor.requires_grad_(info.real.requires_grad)

    # ------------------------------------------------------------ .requires_grad

    def _is_told_first(self, info: Any) -> bool:
        """Does the input require grad from before anything reads it? Then autograd may be told so before the graph runs."""
        return info.tensor.requires_grad and not info.real.requires_grad and id(info) not in self.read_before

    def switch(self, info: Any) -> None:
        """The program is about to say whether an input requires grad. It is told so when the program is done."""
        m = self.m
        if m.is_whole or m.contexts or m.recorder.bodies or m.recorder.is_inference(info.tensor) or torch.is_inference_mode_enabled():
            raise Unsupported("CAP026", at=m.loc(), detail="requires_grad of an input here")
        if info.source is None or not info.real.is_leaf or info.tensor.grad_fn is not None or info.real._is_view():
            raise Unsupported("CAP026", at=m.loc(), detail="requires_grad of an input that is no leaf")
        m.stamps.need_autograd()
        if not info.switched:
            info.switched = True
            if info.node.users:
                self.read_before.add(id(info))
            self.switched.append(info)
        self.moves += 1
        if self.switched_at < 0:
            self.switched_at = max(m.frames[0].steps - 1, 0)

    # ------------------------------------------------------------ backward

    def backward(self, tensors: Sequence[Tensor], grads: Sequence[Any], retain_graph: Any, inputs: Sequence[Tensor] | None) -> None:
        """torch.autograd.backward: gradients of the leaves (or of `inputs`) are added to their `.grad`."""
        m = self.m
        m.stamps.need_autograd()
        if not any(t.requires_grad for t in tensors):
            raise Raised(RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"))
        if torch.is_inference_mode_enabled():
            raise Unsupported("AUT004", at=m.loc(), detail="backward() in inference mode")
        found, visited = self._reached(tensors)
        if inputs is not None:
            if not all(t.is_leaf for t in inputs):
                raise Unsupported("AUT004", at=m.loc(), detail="backward(inputs=...) of a tensor that is no leaf")
            wanted = {id(t) for t in inputs}
            found = [t for t in found if id(t) in wanted]
        kept = self._retained(visited, inputs is None)
        if not found and not kept:
            return
        hooked = {id(leaf): [self._hooks_of(leaf, name) for name in _HOOKS] for leaf in found}
        are_hooked = any(any(rows) for rows in hooked.values())
        turns, values = self._grad_in_turns(visited, tensors, [*found, *kept], grads, retain_graph, False, True, are_hooked)
        if not retain_graph:
            self.spent |= visited
        before, m.grad_mode = m.grad, False
        try:
            taken = {i.tensor.untyped_storage()._cdata for i in m.recorder.real.values() if i.is_made}
            for t, value in zip(kept, values[len(found) :], strict=True):
                if value is not None:
                    self._keep(t, value)
            for leaf, value in sorted(zip(found, values, strict=False), key=lambda row: turns.get(id(row[0]), 0)):
                if value is None:
                    continue
                first, last = hooked[id(leaf)]
                if first:
                    taken.add(value.untyped_storage()._cdata)  # a hook may have kept it
                    value = self._hooked(first, value)
                    taken.add(value.untyped_storage()._cdata)
                self.made[id(leaf)] = leaf
                self._accumulate(leaf, value, taken)
                for hook in last:
                    if m.call(hook, [leaf], {}) is not None:
                        raise Unsupported("AUT002", at=m.loc(), detail="a hook after the accumulation gives a value")
        finally:
            m.grad_mode = before

    def grad(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Any], retain_graph: Any, create_graph: bool, unused: bool
    ) -> tuple[Any, ...]:
        """torch.autograd.grad."""
        self.m.stamps.need_autograd()
        _, visited = self._reached(outputs, inputs)
        self._retained(visited, False)
        hooked = [self._hooks_of(t, "_backward_hooks") if t.is_leaf else [] for t in inputs]
        turns, values = self._grad_in_turns(visited, outputs, inputs, grads, retain_graph, create_graph, unused, any(hooked))
        if any(hooked):
            values, before = list(values), self.m.grad
            self.m.grad_mode = create_graph
            try:
                for k in sorted(range(len(inputs)), key=lambda k: turns.get(id(inputs[k]), 0)):
                    if values[k] is not None:
                        values[k] = self._hooked(hooked[k], values[k])
            finally:
                self.m.grad_mode = before
        if not (create_graph if retain_graph is None else retain_graph):
            self.spent |= visited
        return tuple(values)

    def spent_of(self, results: Sequence[Tensor]) -> list[bool]:
        """Has a backward pass used up what autograd knows of each of these: its own node, or all those on every way from it to a leaf? What
        lies on the way to another result is not used up: that one's gradient can still be asked for."""
        nodes = [t.grad_fn for t in results]
        if not self.spent:
            return [False] * len(nodes)
        return [n is not None and (n in self.spent or self._leads_to_spent(n, set(nodes) - {n})) for n in nodes]

    def _leads_to_spent(self, start: Any, others: set[Any]) -> bool:
        seen, todo = {start}, [start]
        while todo:
            node = todo.pop()
            following = [n for n, _ in node.next_functions if n is not None]
            if not following or any(n in others for n in following):
                return False
            new = [n for n in following if n not in self.spent and n not in seen]
            seen.update(new)
            todo += new
        return True

    def _grad_in_turns(
        self, visited: set[Any], outputs: Any, leaves: Any, grads: Any, retain_graph: Any, create_graph: bool, unused: bool, are_hooked: bool
    ) -> tuple[dict[int, int], Any]:  # fmt: skip
        """The leaves' gradients, and by id of a hooked leaf when its turn comes in autograd's engine."""
        order: list[int] = []
        handles = [t.register_hook(functools.partial(_note, order, id(t))) for t in leaves] if are_hooked else []
        try:
            values = self._grad(visited, outputs, leaves, grads, retain_graph, create_graph, unused)
        finally:
            for handle in handles:
                handle.remove()
        return {i: n for n, i in enumerate(order)}, values

    def _grad(self, visited: set[Any], outputs: Any, inputs: Any, grads: Any, retain_graph: Any, create_graph: bool, unused: bool) -> Any:
        m = self.m
        given = tuple(grads) if any(g is not None for g in grads) else None
        args = (tuple(outputs), tuple(inputs), given, retain_graph, create_graph, True, unused)
        return hooks.gradients(m, self.own_hooks.met(visited), args)

    def _reached(
        self, tensors: Sequence[Tensor], inputs: Sequence[Tensor] = (), is_end: bool = False
    ) -> tuple[list[Tensor], set[Any]]:  # fmt: skip
        """The leaves behind `tensors` in autograd's graph, and its nodes on the way. Beyond `inputs` it does not look. is_end: the program
        is done, and `tensors` are its results."""
        lost = self.moved if is_end else self.stale
        stop = {t.grad_fn for t in inputs if t.grad_fn is not None}
        outside = not inputs or any(self.m.recorder.info(t).real is not None for t in inputs)  # may the way to one lead past the program?
        leaves: dict[int, Tensor] = {}
        todo = [t.grad_fn for t in reversed(tensors) if t.grad_fn is not None]
        for t in tensors:
            if t.requires_grad and t.grad_fn is None:
                if id(t) in lost:
                    raise Unsupported("CAP026", at=self.m.loc(), detail="tensor.data = ... of a tensor that gradients reach afterwards")
                leaves[id(t)] = t
        seen = set(todo)
        while todo:
            node = todo.pop()
            if node.name() == _ACCUMULATE:
                leaf: Tensor = node.variable  # type: ignore[attr-defined]
                if id(leaf) in lost:
                    raise Unsupported("CAP026", at=self.m.loc(), detail="tensor.data = ... of a tensor that gradients reach afterwards")
                leaves.setdefault(id(leaf), leaf)
                continue
            if node in stop:
                continue
            if node.name() == "torch::autograd::Error" and outside:
                raise Unsupported("AUT003", at=self.m.loc())
            for following, _ in reversed(node.next_functions):
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
        return list(leaves.values()), {n for n in seen if n.name() != _ACCUMULATE}

    def _accumulate(self, leaf: Tensor, value: Tensor, taken: set[int]) -> None:
        """What autograd's accumulation does: the first gradient becomes `.grad`, in the leaf's memory order; others are added in place."""
        m = self.m
        now = self.read(leaf)
        if now is not None:
            if now.requires_grad:
                raise Unsupported("AUT004", at=m.loc(), detail="a .grad that requires grad itself")
            m.record("method", "add_", (now, value), {})
            return
        memory = value.untyped_storage()._cdata
        if memory in taken or not _has_layout_of(value, leaf):
            strides = tuple(leaf.stride()) if is_dense(leaf) else None
            if strides is None:
                fresh = m.record("function", torch.empty, (tuple(leaf.shape),), {"dtype": value.dtype, "device": device_of(leaf)})
            else:
                fresh = m.record("function", torch.empty_strided, (tuple(leaf.shape), strides), {"dtype": value.dtype, "device": device_of(leaf)})
            m.record("method", "copy_", (fresh, value), {})
            value = fresh
        taken.add(value.untyped_storage()._cdata)
        self.written[id(leaf)] = (leaf, value)

    # ------------------------------------------------------------ the end

    def changes(self) -> list[tuple[Any, Any]]:
        """(Info of a tensor from outside, what its `.grad` becomes) where that is another object than before."""
        found = []
        for t, value in self.written.values():
            info = self.m.recorder.info(t)
            before = None if info.real is None else info.real.grad
            after = value if value is None else self.m.recorder.real_tensor(value)
            if info.real is not None and after is not before:
                found.append((info, value))
        return found

    def never_written(self) -> list[str]:
        """Leaves from outside whose gradient was computed and is in no `.grad` at the end: no memory is written for it."""
        infos = ((self.m.recorder.info(t), self.written.get(i)) for i, t in self.made.items())
        return [str(info.source) for info, now in infos if info.real is not None and now is not None and now[1] is None]

    def own(self) -> list[tuple[Any, Tensor, Any]]:
        """(Info, tensor, `.grad`) of the leaves that the program made and that have a gradient now."""
        found = ((self.m.recorder.info(t), t, value) for t, value in self.written.values())
        return [(info, t, value) for info, t, value in found if info.real is None and value is not None]

    def replay(self, b: Any) -> None:
        """Statements of finish that write `.grad` of tensors from outside."""
        for t, value, version in self.moved.values():
            b.lines.append(f"{b.value(t)}.data = {b.value(value)}")
            if t._version > version:
                b.lines.append(f"{b.const(torch.autograd.graph.increment_version)}({b.value(t)})")
        for info in self.switched:
            if info.tensor.requires_grad != info.real.requires_grad:
                b.lines.append(f"{b.const(_tell)}({b.source(info.source)}, {info.tensor.requires_grad})")
        for info, value in self.changes():
            b.lines.append(f"{b.source(info.source)}.grad = {b.value(value)}")

    def replay_own(self, b: Any) -> None:
        """The same of leaves made by the program, as far as they get out: as results, in effects, or as another's `.grad`. Comes last."""
        todo = self.own()
        while True:  # a gradient that is written makes its tensor known
            out = [row for row in todo if row[0].node in b.index]
            if not out:
                return
            for _, t, value in out:
                if not t.is_leaf:
                    b.lines.append(f"{b.value(t)}.retain_grad()")
                b.lines.append(f"{b.value(t)}.grad = {b.value(value)}")
            todo = [row for row in todo if not any(row is o for o in out)]


def _starts_at(t: Tensor) -> Any:
    """The storage offset, as an expression; the program has not asked for it."""
    with torch._C.DisableTorchFunction():
        return expr_of(t.storage_offset())


def _tell(t: Tensor, requires_grad: bool) -> None:
    """The program's requires_grad_, which whoever follows torch's functions has seen."""
    with torch._C.DisableTorchFunction():
        t.requires_grad_(requires_grad)


def _note(order: list[int], leaf: int, grad: Tensor) -> None:
    order.append(leaf)


def _is_differentiated(node: Any) -> bool:
    """Does autograd know of a result of this call?"""
    found = node.meta.get("val")
    return any(issubclass(type(x), Tensor) and x.requires_grad for x in (found if type(found) in (tuple, list) else (found,)))


def _has_layout_of(value: Tensor, leaf: Tensor) -> bool:
    """autograd's rule for taking a gradient as it is: the strides of a dense leaf, else contiguous."""
    strides = leaf.stride() if is_dense(leaf) else contiguous_strides(tuple(leaf.shape))
    return all(n == 1 or a == b for n, a, b in zip(leaf.shape, value.stride(), strides, strict=True))


__all__ = ["MISSING", "Gradients"]
