"""For tests of the graph room: a Python function as a captured graph of one call, and the comparison of what it does with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torchsmith.graph.eager import eager_callable
from torchsmith.graph.functionalise import functionalise
from torchsmith.graph.sizes import SizeFacts
from torchsmith.graph.spec import FunctionalGraph
from torchsmith.graph.tracing import tensor_like


def captured(fn: Callable[..., Any], args: tuple[Any, ...], facts: SizeFacts, dynamic: tuple[int, ...] = ()) -> fx.GraphModule:
    """One call_function node that runs `fn` (all of it sees the tracing mode). dynamic: argument numbers whose sizes are symbols."""
    graph = fx.Graph()
    nodes = []
    for i, a in enumerate(args):
        node = graph.placeholder(f"x{i}")
        sizes = tuple(facts.fresh(n, ("size", i, d)) if n > 1 else n for d, n in enumerate(a.shape)) if i in dynamic else None
        node.meta["val"] = tensor_like(a, sizes, facts)
        nodes.append(node)
    call = graph.call_function(lambda *a: [x for x in pytree.tree_leaves(fn(*a)) if x is not None], tuple(nodes))
    call.meta["loc"] = "test.py:1"
    graph.output(call)
    return fx.GraphModule(torch.nn.Module(), graph)


def graph_of(fn: Callable[..., Any], *args: torch.Tensor, dynamic: tuple[int, ...] = (), reads: bool = False) -> FunctionalGraph:
    """reads: values of one element may be numbers."""
    facts = SizeFacts()
    facts.reads_data = reads
    gm = captured(fn, args, facts, dynamic)
    return functionalise(gm, facts.freeze())


def fresh_copies(args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Copies that keep strides and the sharing of storage among arguments is not expected."""
    out = []
    for a in args:
        extent = 1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)) if a.numel() else 0
        memory = torch.empty(extent, dtype=a.dtype)
        if a.numel():
            memory.copy_(a.detach().as_strided((extent,), (1,)))
        out.append(memory.as_strided(a.shape, a.stride()))
    return out


def positions(t: torch.Tensor) -> set[int]:
    at = {t.storage_offset()}
    for n, s in zip(t.shape, t.stride(), strict=True):
        at = {p + k * s for p in at for k in range(n)}
    return at


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or a.dtype != b.dtype:
        return False
    return a.numel() > 10000 or bool(positions(a) & positions(b))


def alias_pattern(args: list[Any], outs: list[Any]) -> list[Any]:
    """Which results are arguments themselves, and which overlap what in memory."""
    pattern: list[Any] = []
    everything = [*args, *outs]
    for i, o in enumerate(outs):
        if not isinstance(o, torch.Tensor):
            pattern.append(None)
            continue
        same = next((k for k, a in enumerate(args) if a is o), None)
        shared = next(
            (
                (k, o.storage_offset() - a.storage_offset())
                for k, a in enumerate(everything[: len(args) + i])
                if isinstance(a, torch.Tensor) and overlaps(a, o)
            ),
            None,
        )
        pattern.append((same, shared))
    return pattern


def difference(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], fg: FunctionalGraph, *, exact: bool = True) -> str | None:
    """What eager does and the functional graph does not; None when they agree on values, layouts, aliases and mutations."""
    mine, theirs = fresh_copies(args), fresh_copies(args)
    with torch.no_grad():
        torch.manual_seed(0)
        want = [x for x in pytree.tree_leaves(fn(*theirs)) if x is not None]
        torch.manual_seed(0)
        got = list(eager_callable(fg)(*mine))
    if len(want) != len(got):
        return f"{len(got)} results, eager has {len(want)}"
    for i, (a, b) in enumerate(zip([*got, *mine], [*want, *theirs], strict=True)):
        what = f"result {i}" if i < len(got) else f"argument {i - len(got)}"
        if not isinstance(b, torch.Tensor):
            if a != b:
                return f"{what}: {a} is not {b}"
            continue
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{what}: {a.dtype} {list(a.shape)}, eager {b.dtype} {list(b.shape)}"
        if a.stride() != b.stride():
            return f"{what}: sizes {list(b.shape)} strides {a.stride()}, eager {b.stride()}"
        if not torch.equal(a, b) and not torch.allclose(a, b, equal_nan=True, **({} if exact else {"rtol": 1e-3, "atol": 1e-4})):
            return f"{what}: values differ"
    if alias_pattern(mine, got) != alias_pattern(theirs, want):
        return f"aliases {alias_pattern(mine, got)}, eager {alias_pattern(theirs, want)}"
    return None


def check(fn: Callable[..., Any], *args: torch.Tensor, dynamic: tuple[int, ...] = ()) -> FunctionalGraph:
    fg = graph_of(copy.copy(fn), *args, dynamic=dynamic)
    found = difference(fn, args, fg)
    assert found is None, f"{found}\n{fg.key_text}"
    return fg
