"""compile without capture: the whole function is one node of the captured graph, traced as it is.

In: a function. Out: a callable that compiles for the tensors it meets (static sizes, tensors in nested tuples, lists and dictionaries).
op_db uses it (`--compiler direct`) to tell what fails in capture from what fails on the road below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchsmith.graph.sizes import SizeFacts
from torchsmith.graph.tracing import tensor_like
from torchsmith.options import from_user
from torchsmith.pipeline import compile_graph


def compile(fn: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    kept: list[tuple[Callable[..., Any], list[Any]]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, shape = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not kept:
            kept.append(_compile(fn, leaves, shape, backend))
        run, result = kept[0]
        outs = [v for v in pytree.tree_leaves(run(*tensors)) if isinstance(v, torch.Tensor)]
        values, structure = result
        return pytree.tree_unflatten([outs.pop(0) if v is torch.Tensor else v for v in values], structure)

    return call


def _compile(fn: Callable[..., Any], leaves: list[Any], shape: Any, backend: str) -> tuple[Callable[..., Any], list[Any]]:
    result: list[Any] = []  # the flat results (torch.Tensor stands for a tensor) and their structure

    def target(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, torch.Tensor) else x for x in leaves], shape)
        flat, structure = pytree.tree_flatten(fn(*args, **kwargs))
        result[:] = [[torch.Tensor if isinstance(v, torch.Tensor) else v for v in flat], structure]
        return [v for v in flat if isinstance(v, torch.Tensor)]

    graph = torch.fx.Graph()
    facts = SizeFacts()
    inputs, real = [], [x for x in leaves if isinstance(x, torch.Tensor)]
    for number, x in enumerate(real):
        node = graph.placeholder(f"x{number}")
        node.meta |= {"val": tensor_like(x, facts=facts), "role": "input", "source": f"x{number}"}
        inputs.append(node)
    made = graph.call_function(target, tuple(inputs))
    made.meta["loc"] = "direct.py:1"
    graph.output((made,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    compiled = compile_graph(gm, facts, real, options=from_user(), backend=backend, name="direct")
    if not result:  # the road was not taken: structure from eager
        target(*real)
    return compiled.call, result
