"""An Entry that was exported on one device, for another one: a program of CPU tensors becomes one for a GPU that need not be there.

In: Entry, torch's word for a type of device. Out: Entry whose inputs, results and everything between lie on that device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx

from ..graph.spec import FunctionalGraph, TensorSpec, ViewOutput
from .entry import Constant, Entry


def on_device(entry: Entry, device: str) -> Entry:
    """The same program on `device` ("cuda"). Values of constants stay where they are: a package stores them anyway."""

    def moved(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return replace(value, device=f"{device}:0" if device != "cpu" else device)
        if isinstance(value, torch.device):
            return torch.device(device, 0) if device != "cpu" else torch.device(device)
        if isinstance(value, ViewOutput):
            return replace(value, spec=moved(value.spec))
        return type(value)(map(moved, value)) if type(value) in (tuple, list) else value

    fg = entry.functional
    graph = torch.fx.Graph()
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in fg.graph.nodes:
        copy = made[node] = graph.node_copy(node, made.__getitem__)
        copy.args, copy.kwargs = moved(node_args(copy.args)), {k: moved(v) for k, v in copy.kwargs.items()}
        if "spec" in copy.meta:
            copy.meta["spec"] = moved(copy.meta["spec"])
    placed: FunctionalGraph = replace(
        fg, graph=graph, inputs=moved(fg.inputs), outputs=moved(fg.outputs), key_text=f"{fg.key_text}\non {device}",
    )  # fmt: skip
    arguments = tuple(replace(a, spec=moved(a.spec)) for a in entry.arguments)
    return replace(entry, functional=placed, arguments=arguments)


def node_args(args: Any) -> Any:
    """fx's own lists and tuples as plain ones."""
    return tuple(list(a) if isinstance(a, list) else tuple(a) if type(a) is not tuple and isinstance(a, tuple) else a for a in args)


def on_host(constants: tuple[Constant, ...]) -> tuple[Constant, ...]:
    """The same values, with the same strides, in the host's memory."""

    def copied(t: torch.Tensor) -> torch.Tensor:
        if t.device.type == "cpu":
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu").copy_(t)

    return tuple(replace(c, value=copied(c.value)) for c in constants)
