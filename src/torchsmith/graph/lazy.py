"""Tensors that are still to be conjugated or negated when read (`is_conj`, `is_neg`), as inputs and results of a captured graph.

In: a captured GraphModule. Out: one whose inputs and results all are what their memory holds, and what stands around its call: views that
take the bit off the inputs and set it on the results. They are views to autograd too, so that gradients pass through them as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._mode_utils import no_dispatch

from ..ir.nested import leaves
from .functionalise import goes_backwards
from .layout import is_lazy
from .tracing import device_of, remember_device

Call = Callable[..., Sequence[Any]]
Bits = tuple[bool, bool]
DETACH = ("detach", torch.detach, torch.Tensor.detach)  # no views to autograd
TURNS = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)  # of each bit


def bits_of(t: torch.Tensor) -> Bits:
    return t.is_conj(), t.is_neg()


def turned(t: torch.Tensor, bits: Bits) -> torch.Tensor:
    """The view of the same memory with these bits turned: as its own inverse it takes off what it sets."""
    for op, turns in zip(TURNS, bits, strict=True):
        t = op(t) if turns else t
    return t


def plain(gm: fx.GraphModule) -> tuple[fx.GraphModule, Callable[[Call], Call], tuple[Bits | None, ...]] | None:
    """The graph on plain memory, how its call takes the place of the call of `gm`, and the bits of its inputs. None: `gm` is such a graph,
    or goes backwards itself (its leaves are the program's)."""
    with torch._C.DisableTorchFunction():
        given = [n for n in gm.graph.nodes if n.op == "placeholder"]
        taken = tuple(_bits(n) for n in given)
        results = [r if isinstance(r, fx.Node) else None for r in leaves(gm.graph.output_node().args[0])]
        set_ = {k: bits for k, r in enumerate(results) if r is not None and (bits := _bits(r)) is not None}
        if not (any(taken) or set_) or goes_backwards(gm):
            return None
        itself = {k: given.index(results[k]) for k in set_ if results[k] in given}
        apart = frozenset(k for k, r in enumerate(results) if k in set_ and r is not None and r.target in DETACH)
        return _rewritten(gm, taken, set_), _around(taken, set_, itself, apart), taken


def _bits(node: fx.Node) -> Bits | None:
    val = node.meta.get("val")
    return bits_of(val) if isinstance(val, torch.Tensor) and is_lazy(val) else None


def _rewritten(gm: fx.GraphModule, taken: Sequence[Bits | None], set_: dict[int, Bits]) -> fx.GraphModule:
    graph, now = fx.Graph(), dict[fx.Node, fx.Node]()
    bits = iter(taken)
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        now[node] = made = graph.node_copy(node, now.__getitem__)
        own = next(bits) if node.op == "placeholder" else None
        if own is not None:
            made.meta["val"] = _memory(node.meta["val"], own)
            now[node] = _turned(graph, made, own, node.meta.get("loc"))
    results = leaves(gm.graph.output_node().args[0])
    outs = [now[r] if isinstance(r, fx.Node) else r for r in results]
    for k, own in set_.items():
        outs[k] = _turned(graph, outs[k], own, None)
        outs[k].meta["val"] = _memory(results[k].meta["val"], own)
    graph.output(tuple(outs))
    kind = next(t for t in type(gm).__mro__ if not t.__qualname__.endswith("GraphModuleImpl"))  # made for each object
    module: fx.GraphModule = kind(gm, graph)
    module.meta.update(gm.meta)
    return module


def _turned(graph: fx.Graph, node: fx.Node, bits: Bits, loc: Any) -> fx.Node:
    for op, turns in zip(TURNS, bits, strict=True):
        if turns:
            node = graph.call_function(op, (node,))
            node.meta["loc"] = loc or ""
    return node


def _memory(val: torch.Tensor, bits: Bits) -> torch.Tensor:
    with no_dispatch(), torch.enable_grad():
        return remember_device(turned(val, bits), device_of(val))


def _around(
    taken: Sequence[Bits | None], set_: dict[int, Bits], itself: dict[int, int], apart: frozenset[int]
) -> Callable[[Call], Call]:
    inputs_turned = [(i, bits) for i, bits in enumerate(taken) if bits is not None]

    def around(call: Call) -> Call:
        def lazy(*inputs: Any) -> Sequence[Any]:
            given = list(inputs)
            with torch.enable_grad():  # whatever the caller's mode is: they require grad if what they show does
                for i, bits in inputs_turned:
                    given[i] = turned(inputs[i], bits)
            outs = list(call(*given))
            with torch.enable_grad():
                for k, bits in set_.items():
                    outs[k] = inputs[itself[k]] if k in itself else turned(outs[k], bits)
                    outs[k] = outs[k].detach() if k in apart else outs[k]
            return tuple(outs)

        return lazy

    return around
