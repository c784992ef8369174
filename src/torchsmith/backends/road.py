"""The road to another backend: hands it the captured or the functional graph, looks at what comes back, and says what became of it.

In: a Choice and a captured graph. Out: Compiled. Where gradients flow a functional backend gets the forward graph and, when it is first
needed, the backward graph. Where a backend fails or returns nonsense the graph runs eagerly and a warning names backend and reason; under
fullgraph that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import events
from ..autograd.attach import attach
from ..autograd.joint import Joint
from ..codes import Unsupported
from ..graph.eager import eager_callable
from ..graph.functionalise import functionalise
from ..graph.sizes import SizeFacts
from ..graph.spec import FreshOutput, FunctionalGraph, InputOutput, TensorSpec, ViewOutput
from ..ir.expr import Const
from ..ir.nested import leaves
from ..options import Options
from ..pipeline import Compiled, Report, run_captured
from .registry import BadResult, Choice

Call = Callable[..., Sequence[Any]]
Tensor = tuple[torch.dtype, tuple[int | None, ...]]  # None: a size that varies


def compile_by(
    choice: Choice, gm: torch.fx.GraphModule, facts: SizeFacts, inputs: Sequence[Any], options: Options, needs_grad: bool, name: str,
    fullgraph: bool,
) -> Compiled:  # fmt: skip
    """`gm` compiled by `choice`."""
    operators = sum(n.op in ("call_function", "call_method") for n in gm.graph.nodes)
    report = Report(name, choice.name, None, operators)
    if choice.name == "eager":
        return Compiled(gm.forward, tuple(facts.guards), report)
    joint = None
    if needs_grad and choice.dialect == "functional":
        try:
            joint = Joint(gm, facts)
            parts = joint.cut()
        except Unsupported as why:  # the graph's fault, not the backend's
            return run_captured(gm, facts, why, operators, name)
    try:
        if choice.dialect == "captured":
            call = watched(choice(gm, list(inputs)), of_captured(gm), gm.forward, _writes(gm), choice.name, fullgraph)
        elif joint is None:
            call = functional(choice, functionalise(gm, facts), name, fullgraph)
        else:
            call = attach(
                joint, parts, functional(choice, parts.forward, name, fullgraph, "forward"), gm.forward,
                lambda fg: backward(choice, fg, f"{name}_backward", fullgraph),
            )  # fmt: skip
            if facts.symbols:  # what its compilation assumes of sizes has to be guarded
                call.prepare()
        return Compiled(call, (*facts.guards, *(facts.late if choice.dialect == "functional" else ())), report)
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
        return run_captured(gm, facts, _failed(choice, error), operators, name)


def _failed(choice: Choice, error: Exception) -> Unsupported:
    """What the user is told of a backend that raised."""
    failed = Unsupported("BCK003", detail=f"backend {choice.name!r} raised {type(error).__name__}: {error}")
    events.warn(f"torchsmith: {failed}. The program runs eagerly.")
    return failed


def functional(choice: Choice, fg: FunctionalGraph, name: str, fullgraph: bool, part: str = "__call__") -> Call:
    """A functional graph by the backend, its first results looked at."""
    return watched(choice(fg, name, part=part), of_functional(fg), eager_callable(fg), bool(fg.write_backs), choice.name, fullgraph)


def backward(choice: Choice, fg: FunctionalGraph, name: str, fullgraph: bool) -> Call:
    """A backward graph by the backend. Raises Unsupported where it cannot: torch then runs it (autograd/attach.py)."""
    try:
        return functional(choice, fg, name, fullgraph, "backward")
    except Unsupported:
        raise
    except Exception as error:  # a backend may raise anything
        if fullgraph:
            raise
        raise _failed(choice, error) from error


def watched(call: Any, expected: Sequence[Tensor | None], eager: Call, writes: bool, name: str, fullgraph: bool) -> Call:
    """`call`, if it is callable, whose first results are held against what is expected: their number, types and shapes.

    Where they differ a warning says so and `eager` runs from then on; it is an error under fullgraph, and where the graph writes to its
    inputs, since then nothing may happen twice. Raises BadResult.
    """
    if not callable(call):
        raise BadResult(f"it returned {type(call).__name__}, not a callable")
    now: list[Call] = []

    def first(*args: Any) -> Sequence[Any]:
        results: Sequence[Any] = call(*args)
        wrong = difference(results, expected)
        if wrong:
            error = BadResult(f"backend {name!r}: {wrong}")
            if fullgraph or writes:
                raise error
            events.warn(f"torchsmith: [BCK003] {error}. The program runs eagerly.")
            results = eager(*args)
        now.append(eager if wrong else call)
        return results

    def run(*args: Any) -> Sequence[Any]:
        return now[0](*args) if now else first(*args)

    return run


def difference(results: Any, expected: Sequence[Tensor | None]) -> str:
    """What is wrong with a backend's results, "" where nothing is."""
    if not isinstance(results, (tuple, list)):
        return f"what it compiled returned {type(results).__name__}, not a tuple of {len(expected)} results"
    if len(results) != len(expected):
        return f"what it compiled returned {len(results)} results instead of {len(expected)}"
    for i, (value, known) in enumerate(zip(results, expected, strict=True)):
        if known is None:
            continue
        dtype, shape = known
        if not isinstance(value, torch.Tensor):
            return f"result {i} is {type(value).__name__}, not a tensor"
        if value.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, value.shape, strict=True)):
            planned = tuple(m if n is None else n for n, m in zip(shape, value.shape, strict=True)) if value.dim() == len(shape) else shape
            return f"result {i} has shape {tuple(value.shape)} instead of {planned}"
        if value.dtype != dtype:
            return f"result {i} is {value.dtype} instead of {dtype}"
    return ""


def of_captured(gm: torch.fx.GraphModule) -> list[Tensor | None]:
    """The tensors that a captured graph gives; None for a number."""
    vals = [r.meta.get("val") if isinstance(r, torch.fx.Node) else None for r in leaves(gm.graph.output_node().args[0])]
    return [(v.dtype, tuple(n if type(n) is int else None for n in v.shape)) if isinstance(v, torch.Tensor) else None for v in vals]


def of_functional(fg: FunctionalGraph) -> list[Tensor | None]:
    """The tensors that a functional graph gives; None for a number."""
    specs = {n.name: n.meta.get("spec") for n in fg.graph.nodes}

    def known(out: Any) -> Tensor | None:
        spec = specs[out.node] if isinstance(out, FreshOutput) else fg.inputs[out.index] if isinstance(out, InputOutput) else None
        spec = out.spec if isinstance(out, ViewOutput) else spec
        if not isinstance(spec, TensorSpec):
            return None
        return spec.dtype, tuple(int(e.value) if isinstance(e, Const) else None for e in spec.shape)

    return [known(out) for out in fg.outputs]


def _writes(gm: torch.fx.GraphModule) -> bool:
    """May running the graph twice differ from running it once? Asked of names: in-place methods end with one underscore."""
    for n in gm.graph.nodes:
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or "out" in n.kwargs or name == "setitem"
        if n.op in ("call_function", "call_method") and in_place:
            return True
    return False
