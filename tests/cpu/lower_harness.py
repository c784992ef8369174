"""Runs a torch function through lowering and the reference interpreter, for comparison with eager."""

from __future__ import annotations

from typing import Any

import torch

from torchsmith.graph.spec import FreshOutput, FunctionalGraph, TensorSpec
from torchsmith.ir.expr import const
from torchsmith.lower import lower
from torchsmith.options import Options


def spec_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(value.dtype, tuple(map(const, value.shape)), tuple(map(const, value.stride())))
    if isinstance(value, (tuple, list)):
        return tuple(spec_of(v) for v in value)
    return None


def functional(fn: Any, args: tuple[torch.Tensor, ...]) -> FunctionalGraph:
    """A functional graph by torch's own tracer (tests only): ATen on values, static sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(fn, tracing_mode="real", decomposition_table={})(*args)
    names = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["spec"] = spec_of(node.meta.get("val"))
            node.meta["loc"] = "test.py:1"
        if node.op == "output":
            out = node.args[0]
            names = [n.name for n in (out if isinstance(out, (tuple, list)) else (out,)) if n is not None]
    inputs = tuple(spec_of(a) for a in args)
    return FunctionalGraph(gm.graph, inputs, tuple(FreshOutput(n) for n in names), (), (), "")


def program_of(fn: Any, args: tuple[torch.Tensor, ...]) -> Any:
    return lower(functional(fn, args), Options())
