"""The road to another backend: hands it the captured or the functional graph, looks at what comes back, and says what became of it.

In: a Choice and a captured graph. Out: Compiled. Where a backend fails or returns nonsense the captured graph runs eagerly and a warning
names backend and reason; under fullgraph that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import events
from ..codes import Unsupported
from ..graph.functionalise import functionalise
from ..graph.sizes import SizeFacts
from ..options import Options
from ..pipeline import Compiled, Report, run_captured
from .registry import Choice

Call = Callable[..., Sequence[Any]]


class BadResult(RuntimeError):
    """A backend, or what it compiled, returned something else than the graph's results."""


def compile_by(
    choice: Choice, gm: torch.fx.GraphModule, facts: SizeFacts, inputs: Sequence[Any], options: Options, needs_grad: bool, name: str,
    fullgraph: bool,
) -> Compiled:  # fmt: skip
    """`gm` compiled by `choice`."""
    operators = sum(n.op in ("call_function", "call_method") for n in gm.graph.nodes)
    report = Report(name, choice.name, None, operators)
    if choice.name == "eager":
        return Compiled(gm.forward, tuple(facts.guards), report)
    try:
        if choice.dialect == "captured":
            call = choice(gm, list(inputs))
            if not callable(call):
                raise BadResult(f"it returned {type(call).__name__}, not a callable")
            return Compiled(watched(call, gm, choice.name, fullgraph), tuple(facts.guards), report)
        if needs_grad:
            return run_captured(gm, facts, Unsupported("AUT001"), operators, name)
        call = choice(functionalise(gm, facts), name)
        if not callable(call):
            raise BadResult(f"it returned {type(call).__name__}, not a callable")
        return Compiled(watched(call, gm, choice.name, fullgraph), (*facts.guards, *facts.late), report)
    except Unsupported as why:
        if why.code == "BCK003" and fullgraph:  # the runtime's own failure
            raise BadResult(why.detail) from why
        if fullgraph:
            raise
        if why.code == "BCK003":
            events.warn(f"torchsmith: {why}")
        return run_captured(gm, facts, why, operators, name)
    except Exception as error:  # a backend may raise anything
        if fullgraph or options.suppress_errors:
            raise
        failed = Unsupported("BCK003", detail=f"backend {choice.name!r} raised {type(error).__name__}: {error}")
        events.warn(f"torchsmith: {failed}. The program runs eagerly.")
        return run_captured(gm, facts, failed, operators, name)


def watched(call: Call, gm: torch.fx.GraphModule, name: str, fullgraph: bool) -> Call:
    """`call`, whose first results are held against the graph's: their number, types and shapes.

    Where they differ a warning says so and the captured graph runs from then on; it is an error under fullgraph, and where the graph writes
    to its inputs, since then nothing may happen twice.
    """
    expected = _flat(gm.graph.output_node().args[0])
    now: list[Call] = []

    def first(*args: Any) -> Sequence[Any]:
        results = call(*args)
        wrong = difference(results, expected)
        if wrong:
            error = BadResult(f"backend {name!r}: {wrong}")
            if fullgraph or _writes(gm):
                raise error
            events.warn(f"torchsmith: [BCK003] {error}. The program runs eagerly.")
            results = gm.forward(*args)
        now.append(gm.forward if wrong else call)
        return results

    def run(*args: Any) -> Sequence[Any]:
        return now[0](*args) if now else first(*args)

    return run


def difference(results: Any, expected: Sequence[Any]) -> str:
    """What is wrong with a backend's results, "" where nothing is."""
    if not isinstance(results, (tuple, list)):
        return f"what it compiled returned {type(results).__name__}, not a tuple of {len(expected)} results"
    if len(results) != len(expected):
        return f"what it compiled returned {len(results)} results instead of {len(expected)}"
    for i, (value, node) in enumerate(zip(results, expected, strict=True)):
        val = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(val, torch.Tensor):
            continue
        if not isinstance(value, torch.Tensor):
            return f"result {i} is {type(value).__name__}, not a tensor"
        if value.dim() != val.dim() or any(type(n) is int and n != m for n, m in zip(val.shape, value.shape, strict=True)):
            return f"result {i} has shape {tuple(value.shape)} instead of {tuple(val.shape)}"
        if value.dtype != val.dtype:
            return f"result {i} is {value.dtype} instead of {val.dtype}"
    return ""


def _flat(value: Any) -> list[Any]:
    return [x for v in value for x in _flat(v)] if isinstance(value, (tuple, list)) else [value]


def _writes(gm: torch.fx.GraphModule) -> bool:
    """May running the graph twice differ from running it once? Asked of names: in-place methods end with one underscore."""
    for n in gm.graph.nodes:
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or "out" in n.kwargs or name == "setitem"
        if n.op in ("call_function", "call_method") and in_place:
            return True
    return False
