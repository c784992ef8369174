"""What a graph on a GPU computes in the host's memory, taken out of it: torch's operators do it before the graph runs.

In: a FunctionalGraph with inputs or results in the host's memory beside tensors on another device. Out: the graph that is left, which
takes what crosses as further inputs, and the call of the whole.

A program that moves its own batch (`x.to(self.weight.device)`), that indexes with a tensor of the host, or that gives one back beside its
results is one of the host's part and a graph on one device. What comes back from the device in the middle of a program ends its graph
before (capture), so nothing of the host's part waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..ir.expr import Expr, Sym, walk
from ..ir.nested import leaves
from ..ir.program import dense
from .eager import asked, eager_callable, symbol_values, view_of
from .schema import may_draw
from .spec import FreshOutput, FunctionalGraph, InputOutput, Output, TensorSpec, ViewOutput

HOST = "cpu"
ITEM = torch.ops.aten._local_scalar_dense.default
# Operators on a device that take tensors of the host which are no single numbers.
TAKES_ARRAYS = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.copy.default})


@dataclass(frozen=True, slots=True)
class HostPart:
    """The host's part of `whole`, and where `rest`, the graph that is left on `device`, stands in it."""

    whole: FunctionalGraph
    rest: FunctionalGraph
    part: FunctionalGraph  # gives the values that cross, then the results of its own
    device: str
    crossing: tuple[int | str, ...]  # what `rest` takes behind the caller's inputs: inputs by number, values of the part by name
    moved: tuple[bool, ...]  # of these: goes to the device (a number stays where it is)
    own: tuple[int, ...]  # results that the part gives
    kept: tuple[int, ...]  # results that `rest` gives

    def begin(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], tuple[Any, ...]]:
        """What the part gives, and what `rest` takes behind the caller's inputs."""
        values = eager_callable(self.part)(*inputs)
        by_name = dict(zip((c for c in self.crossing if isinstance(c, str)), values, strict=False))
        given = [by_name[c] if isinstance(c, str) else inputs[c] for c in self.crossing]
        device = torch.device(self.device)
        return values, tuple(v.contiguous().to(device) if moves else v for v, moves in zip(given, self.moved, strict=True))

    def end(self, inputs: Sequence[Any], values: Sequence[Any], outs: Sequence[Any]) -> tuple[Any, ...]:
        """The results of the whole, of what the part and `rest` gave."""
        results = dict(zip(self.kept, outs, strict=True))
        fresh = iter(values[sum(isinstance(c, str) for c in self.crossing) :])
        results |= {i: self._result(self.whole.outputs[i], inputs, fresh) for i in self.own}
        return tuple(results[i] for i in range(len(self.whole.outputs)))

    def _result(self, out: Output, inputs: Sequence[Any], fresh: Iterator[Any]) -> Any:
        if isinstance(out, ViewOutput):
            assert isinstance(out.of, int)
            return view_of(inputs[out.of], out.spec, symbol_values(self.whole, inputs))
        return inputs[out.index] if isinstance(out, InputOutput) else next(fresh)


def _sizes(node: fx.Node) -> list[Expr]:
    """The sizes in a node's results and arguments."""
    given = [v for v in leaves((node.args, tuple(node.kwargs.values()), node.meta.get("spec"))) if isinstance(v, Expr)]
    return given + [e for s in _specs(node) for e in _sizes_of(s)]


def _sizes_of(spec: TensorSpec) -> list[Expr]:
    return [e for e in (*spec.shape, *spec.strides, spec.offset) if isinstance(e, Expr)]


def _told(fg: FunctionalGraph) -> set[Sym]:
    """What only running tells."""
    return {s.sym for s in fg.symbols if s.origin == ("bound",)}


def _is_item(node: fx.Node, inputs: dict[fx.Node, Any]) -> bool:
    """Does it read a number in the host's memory? What is left reads it too: the tensor crosses, and is a symbol there."""
    if node.target is not ITEM:
        return False
    (of,) = node.all_input_nodes
    (spec,) = _specs(of) or [inputs[of]]
    return spec.device == HOST and not spec.shape and isinstance(node.meta["spec"], Sym)


def _is_array(node: fx.Node) -> bool:
    return any(s.device == HOST and s.shape for s in _specs(node))


def _specs(node: fx.Node) -> list[TensorSpec]:
    return [s for s in leaves(node.meta.get("spec")) if isinstance(s, TensorSpec)]


def take_out(fg: FunctionalGraph) -> HostPart | None:
    """None: the graph is on one device, or what it does in the host's memory can't be done before."""
    inputs = dict(zip((n for n in fg.graph.nodes if n.op == "placeholder"), fg.inputs, strict=True))
    places = {n: {s.device for s in _specs(n)} for n in fg.graph.nodes}
    places |= {n: {s.device} if isinstance(s, TensorSpec) else set() for n, s in inputs.items()}
    devices = set().union(*places.values()) - {HOST}
    if len(devices) != 1:
        return None
    (device,) = devices
    host = {n for n in inputs if places[n] == {HOST}}
    before: list[fx.Node] = []
    for node in (n for n in fg.graph.nodes if n.op == "call_function"):
        operands = {m for m in node.all_input_nodes if places[m]}
        if operands - host or (not operands and places[node] != {HOST}):
            if HOST in places[node]:
                return None  # it waits for the device
            continue
        before.append(node)
        if places[node] == {HOST}:  # else it is what moves to the device
            host.add(node)
    told = _told(fg) - {n.meta["spec"] for n in before if _is_item(n, inputs)}
    if told and any(not told.isdisjoint(walk(*_sizes(n))) for n in before):
        return None  # running tells a size
    return _cut(fg, device, inputs, places, before)


def _cut(
    fg: FunctionalGraph, device: str, inputs: dict[fx.Node, Any], places: dict[fx.Node, set[str]], before: list[fx.Node]
) -> HostPart | None:
    """None: what crosses is nothing that the device takes."""
    taken, placeholders = set(before), list(inputs)
    caller = len(placeholders) - len(fg.consts)  # inputs that a caller gives
    arrays = {n for n in placeholders[:caller] if places[n] == {HOST} and inputs[n].shape}
    by_name = {n.name: n for n in fg.graph.nodes}
    own = tuple(i for i, out in enumerate(fg.outputs) if _is_own(out, by_name, taken, arrays, placeholders))
    written = {placeholders[i] for i, _ in fg.write_backs}
    chained = any(isinstance(out, ViewOutput) and not isinstance(out.of, int) and out.of[1] in own for out in fg.outputs)
    told = _told(fg)
    varies = any(not told.isdisjoint(walk(*_sizes_of(out.spec))) for i in own if isinstance(out := fg.outputs[i], ViewOutput))
    anew = {n for n in before if _is_item(n, inputs)} | _new_numbers(fg, by_name, taken, inputs)
    if written & arrays or chained or varies or any(by_name[name] in taken - anew for _, name in fg.write_backs):
        return None
    left = [n for n in fg.graph.nodes if n.op == "call_function" and (n not in taken or n in anew)]
    used = {m for n in left for m in n.all_input_nodes}
    crossing = [n for n in (*placeholders, *before) if n in used and (n in arrays or n in taken - anew)]
    are_arrays = {n for n in crossing if n in arrays or _is_array(n)}
    if any(m.target not in TAKES_ARRAYS and not are_arrays.isdisjoint(m.all_input_nodes) for m in left):
        return None  # eager refuses it
    if not left or any(len(_specs(n)) != 1 or not isinstance(n.meta["spec"], TensorSpec) for n in crossing if n in taken):
        return None
    specs = [inputs[n] if n in inputs else n.meta["spec"] for n in crossing]
    if any(not told.isdisjoint(walk(*_sizes_of(s))) for s in specs):
        return None  # inputs have sizes that are known before
    moved = tuple(s.device == HOST and bool(s.shape) for s in specs)
    # What moves has no gaps there: a copy of elements with gaps between them would be laid out otherwise.
    there = {
        n: replace(s, device=device, strides=dense(s.shape).strides) if moves else s
        for n, s, moves in zip(crossing, specs, moved, strict=True)
    }
    kept = tuple(i for i in range(len(fg.outputs)) if i not in own)
    rest = _rest(fg, inputs, arrays, there, left, kept)
    names = tuple(n.name for n in crossing if n in taken)
    fresh = tuple(o.node for i in own if isinstance(o := fg.outputs[i], FreshOutput))
    needed, given = taken - anew, {*names, *fresh}
    read: set[Any] = set()  # what these compute sizes and numbers with
    for node in reversed(before):
        is_read = _is_item(node, inputs) and node.meta["spec"] in read
        if is_read or node in needed or node.name in given or not needed.isdisjoint(node.users):
            needed.add(node)
            read |= told.intersection(walk(*_sizes(node)))
    part = replace(fg, graph=_only(fg.graph, needed), outputs=tuple(map(FreshOutput, (*names, *fresh))), write_backs=())
    numbers = {n: k for k, n in enumerate(placeholders)}
    return HostPart(fg, rest, part, device, tuple(n.name if n in taken else numbers[n] for n in crossing), moved, own, kept)


def _new_numbers(fg: FunctionalGraph, by_name: dict[str, fx.Node], taken: set[fx.Node], inputs: dict[fx.Node, Any]) -> set[fx.Node]:
    """The nodes of the host that make new values of numbers in its memory (an optimizer's counter). What is left makes them too, and
    writes them: nothing is written before it has run."""

    def is_number(node: fx.Node) -> bool:
        specs = _specs(node) or [s for s in [inputs.get(node)] if isinstance(s, TensorSpec)]
        return len(specs) == 1 and specs[0].device == HOST and not specs[0].shape

    def is_made_of_numbers(node: fx.Node) -> bool:
        if not isinstance(node.target, torch._ops.OpOverload) or may_draw(node.target, node.args, node.kwargs):
            return False
        return all(map(is_number, (node, *node.all_input_nodes)))

    found: set[fx.Node] = set()
    todo = [by_name[name] for _, name in fg.write_backs]
    while todo:
        node = todo.pop()
        if node in taken and is_made_of_numbers(node):
            found.add(node)
            todo += [n for n in node.all_input_nodes if n not in found]
    return found


def _rest(
    fg: FunctionalGraph, inputs: dict[fx.Node, Any], arrays: set[fx.Node], crossing: dict[fx.Node, TensorSpec], left: list[fx.Node],
    kept: Sequence[int],
) -> FunctionalGraph:  # fmt: skip
    """The graph of the nodes `left`, which gives the results `kept` and takes `crossing` between the caller's inputs and the constants."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    specs: list[Any] = []
    roles: list[str] = []

    def take(old: fx.Node, spec: Any, role: str, prefix: str = "") -> None:
        new[old] = graph.placeholder(prefix + old.name)
        new[old].meta.update(old.meta | {"spec": spec})
        specs.append(spec)
        roles.append(role)

    placeholders = list(inputs)
    caller = len(placeholders) - len(fg.consts)
    given = list(zip(placeholders, fg.roles or ("input",) * len(placeholders), strict=True))
    for node, role in given[:caller]:
        take(node, None if node in arrays else inputs[node], role)
    for node, spec in crossing.items():
        take(node, spec, "input", "host_")
    for node, role in given[caller:]:
        take(node, inputs[node], role)
    for node in left:
        new[node] = graph.node_copy(node, lambda n: new[n])

    renamed = {old.name: node.name for old, node in new.items()}
    place = {old: k for k, old in enumerate(kept)}
    later = {k: k + len(crossing) if k >= caller else k for k in range(len(placeholders))}

    def moved(out: Output) -> Output:
        if isinstance(out, FreshOutput):
            return FreshOutput(renamed[out.node])
        if isinstance(out, InputOutput):
            return InputOutput(later[out.index])
        if isinstance(out, ViewOutput):
            return replace(out, of=later[out.of] if isinstance(out.of, int) else ("out", place[out.of[1]]))
        return out

    made = replace(
        fg, graph=graph, inputs=tuple(specs), roles=tuple(roles), outputs=tuple(moved(fg.outputs[i]) for i in kept),
        write_backs=tuple((i, renamed[name]) for i, name in fg.write_backs), key_text=f"{fg.key_text}\nwithout the host's part",
        passing=tuple(place[i] for i in fg.passing if i in place),
    )  # fmt: skip
    by_name = {n.name: n for n in graph.nodes}
    graph.output(tuple(by_name[name] for name in asked(made)))
    return made


def _is_own(out: Output, by_name: dict[str, fx.Node], taken: set[fx.Node], arrays: set[fx.Node], placeholders: Sequence[fx.Node]) -> bool:
    """Is this a result of the host's part, an input in the host's memory, or a view of one?"""
    if isinstance(out, FreshOutput):
        return by_name[out.node] in taken
    if isinstance(out, InputOutput):
        return placeholders[out.index] in arrays
    return isinstance(out, ViewOutput) and isinstance(out.of, int) and placeholders[out.of] in arrays


def _only(graph: fx.Graph, nodes: set[fx.Node]) -> fx.Graph:
    """The graph with its placeholders and these nodes, of the same names."""
    out = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in nodes:
            new[node] = out.node_copy(node, lambda n: new[n])
            assert new[node].name == node.name
    out.output(())
    return out
