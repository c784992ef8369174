"""A graph on its way to another one: FunctionalGraph in, FunctionalGraph out, with what leaves it and what is constant kept in view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..graph.spec import FreshOutput, FunctionalGraph, TensorSpec
from ..ir.expr import Expr, const
from .core import constant_inputs
from .ref import contiguous_strides


def lies(like: TensorSpec, shape: Sequence[Expr | int], strides: Sequence[Expr | int] = (), dtype: torch.dtype | None = None) -> TensorSpec:
    """A tensor of this shape on the device of `like`, of its dtype or another; row-major without `strides`."""
    sizes, steps = (tuple(const(n) if isinstance(n, int) else n for n in row) for row in (shape, strides))
    return TensorSpec(dtype or like.dtype, sizes, steps or contiguous_strides(sizes), like.device)


class Rewriter:
    """A copy of the graph that may be changed, and how its outputs are called then."""

    def __init__(self, fg: FunctionalGraph) -> None:
        self.fg, self.graph = fg, fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self.graph.graph_copy(fg.graph, copies)
        self.nodes = [copies[n] for n in fg.graph.nodes if n in copies]
        renamed = {old.name: new for old, new in copies.items()}
        self.kept = {o.node: renamed[o.node] for o in fg.outputs if isinstance(o, FreshOutput)}
        self.kept |= {name: renamed[name] for _, name in fg.write_backs}
        numbers = set(constant_inputs(fg))
        self.constants = {n for k, n in enumerate(x for x in self.nodes if x.op == "placeholder") if k in numbers}

    def make(self, target: Any, args: Sequence[Any], like: fx.Node, spec: TensorSpec, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta.update(loc=like.meta.get("loc", ""), spec=spec)
        return node

    def swap(self, old: fx.Node, new: fx.Node) -> None:
        """`new` is what `old` was."""
        old.replace_all_uses_with(new)
        self.kept = {name: new if n is old else n for name, n in self.kept.items()}
        self.graph.erase_node(old)

    def done(self) -> FunctionalGraph:
        for node in self.graph.nodes:
            if node.op == "output":
                self.graph.erase_node(node)
        self.graph.output(tuple(self.kept.values()))
        outputs = tuple(FreshOutput(self.kept[o.node].name) if isinstance(o, FreshOutput) else o for o in self.fg.outputs)
        backs = tuple((i, self.kept[name].name) for i, name in self.fg.write_backs)
        return replace(self.fg, graph=self.graph, outputs=outputs, write_backs=backs)
