"""Numbers that pick elements, held against the sizes that they pick from before another runtime sees them.

In: a PlainGraph. Out: what to look at: in its inputs before each call, and in numbers that it computes itself after it, before anything is
written. Other runtimes clamp such numbers, read zeros, or read past the end; torch raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.eager import fitted
from .plain import PlainGraph, numbers

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Picked:
    """Values of `of`, an input or a number that the graph computes, as `steps` leave them, lie in [low, high) or are `but`."""

    of: fx.Node
    steps: tuple[fx.Node, ...]
    low: int
    high: int
    but: int | None = None

    def holds(self, t: Any) -> bool:
        for n in self.steps:
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda _, t=t: t)  # type: ignore[arg-type, misc]
            t = fitted(n, args, kwargs, {})
        if self.but is not None:
            t = t[t != self.but]
        if not t.numel():
            return True
        least, most = torch.aminmax(t)
        return self.low <= int(least) and int(most) < self.high


Row = Callable[[fx.Node], list[tuple[Any, int, int, int | None]]]  # (index, low, high, but) of one node
ROWS: dict[Any, Row] = {}


def _size(node: Any, dim: int) -> int:
    return numbers(node.meta["spec"].shape)[dim] if node.meta["spec"].shape else 1


def _along(n: fx.Node) -> list[tuple[Any, int, int, int | None]]:
    """(x, dim, index, ...)"""
    x, dim, index = n.args[:3]
    return [(index, 0, _size(x, dim), None)]  # type: ignore[arg-type]


def _listed(n: fx.Node) -> list[tuple[Any, int, int, int | None]]:
    """(x, indices, ...)"""
    rows: list[tuple[Any, int, int, int | None]] = []
    for d, index in enumerate(n.args[1]):  # type: ignore[arg-type, var-annotated]
        if isinstance(index, fx.Node) and index.meta["spec"].dtype not in (torch.bool, torch.uint8):
            size = _size(n.args[0], d)
            rows.append((index, -size, size, None))
    return rows


def _classes(n: fx.Node, first: int) -> list[tuple[Any, int, int, int | None]]:
    """(..., input, target, weight, reduction, ignore_index), the input being argument `first`."""
    x: Any = n.args[first]
    but: Any = n.args[first + 4]
    return [(n.args[first + 1], 0, _size(x, 1 if len(x.meta["spec"].shape) > 1 else 0), but)]


for _op in (
    aten.gather.default, aten.index_select.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default,
    aten.scatter_reduce.two, aten.index_add.default,
):  # fmt: skip
    ROWS[_op] = _along
for _op in (aten.index.Tensor, aten.index_put.default):
    ROWS[_op] = _listed
for _op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
    ROWS[_op] = lambda n: _classes(n, 0)
for _op in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
    ROWS[_op] = lambda n: _classes(n, 1)
ROWS[aten.embedding.default] = lambda n: [(n.args[1], 0, _size(n.args[0], 0), None)]
ROWS[aten._embedding_bag.default] = lambda n: [(n.args[1], 0, _size(n.args[0], 0), None)]
ROWS[aten.embedding_dense_backward.default] = lambda n: [(n.args[1], 0, int(n.args[2]), None)]  # type: ignore[arg-type]

SAME = frozenset({  # operators that give elements of their one operand
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims,
    aten.expand.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.clone.default, aten._to_copy.default,
    aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default,
})  # fmt: skip


DIVISIONS = frozenset({
    aten.div.Tensor_mode, aten.floor_divide.default, aten.remainder.Tensor, aten.remainder.Scalar_Tensor, aten.fmod.Tensor,
    aten.take.default, aten.put.default,
})  # fmt: skip
REMAINDERS = DIVISIONS | {aten.div.Scalar_mode, aten.floor_divide.Scalar, aten.remainder.Scalar, aten.fmod.Scalar}


WRAPS = frozenset({
    aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.prod.default, aten.prod.dim_int, aten.cumsum.default,
    aten.cumprod.default,
})  # fmt: skip


def is_torchs(n: fx.Node) -> bool:
    """Does eager raise for values that only running tells, wrap around, or round once, where other runtimes give some number? Divisions of
    integers by tensors do, powers and products of integers, remainders of floats: others compute x - y * (x / y)."""
    if n.target not in REMAINDERS and n.target not in WRAPS:
        return False
    spec = n.meta["spec"]
    if spec.dtype.is_floating_point:
        return n.target in REMAINDERS
    return n.target in (aten.take.default, aten.put.default) or (not spec.dtype.is_complex and n.target in DIVISIONS | WRAPS)


COUNTS = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})  # the same at every call


def picked(plain: PlainGraph) -> list[Picked]:
    """What the graph's operators ask of their indices."""
    found: dict[Any, Picked] = {}
    for n in plain.graph.nodes:
        for index, low, high, but in ROWS[n.target](n) if n.op == "call_function" and n.target in ROWS else ():
            steps: list[fx.Node] = []
            while isinstance(index, fx.Node) and index.target in SAME and len(index.all_input_nodes) == 1:
                steps.append(index)
                index = index.all_input_nodes[0]
            if isinstance(index, fx.Node) and index.target not in COUNTS:
                row = Picked(index, tuple(reversed(steps)), low, high, but)
                found[row] = row
    return list(found)
