"""The road to another backend: hands it the captured or the functional graph, looks at what comes back, and says what became of it.

In: a Choice and a captured graph. Out: Compiled. Where gradients flow a functional backend gets the forward graph and, when it is first
needed, the backward graph. Where a backend fails or returns nonsense the graph runs eagerly and a warning names backend and reason; under
fullgraph that is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import events
from ..autograd.attach import attach
from ..autograd.joint import Joint
from ..capture.entries import modes, set_modes
from ..capture.overrides import plain
from ..codes import BackendFailed, Unsupported
from ..graph.eager import eager_callable
from ..graph.functionalise import functionalise
from ..graph.sizes import SizeFacts
from ..graph.spec import FunctionalGraph
from ..options import Options
from ..pipeline import Compiled, Report, as_in_eager, as_spent, run_captured, under_inference
from ..runtime.draws import generator_states, put_back
from .registry import Choice, with_versions
from .watch import Call, of_captured, of_functional, said, watched


def compile_by(
    choice: Choice, gm: torch.fx.GraphModule, facts: SizeFacts, inputs: Sequence[Any], options: Options, needs_grad: bool, name: str,
    fullgraph: bool,
) -> Compiled:  # fmt: skip
    """`gm` compiled by `choice`."""
    operators = sum(n.op in ("call_function", "call_method") for n in gm.graph.nodes)
    report = Report(name, choice.name, None, operators)
    if choice.name == "eager" or not operators:
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
            call = watched(captured(choice, gm, inputs), of_captured(gm), gm.forward, gm.meta["written"], choice.name, fullgraph)
        elif joint is None:
            fg = functionalise(gm, facts)
            call = as_in_eager(functional(choice, fg, name, fullgraph, repeat=gm.forward), gm, fg, inputs)
        else:
            attached = attach(
                joint, parts, functional(choice, parts.forward, name, fullgraph, "forward"), gm.forward,
                lambda fg: backward(choice, fg, f"{name}_backward", fullgraph), not gm.meta.get("grad", True),
            )  # fmt: skip
            if facts.symbols:  # what its compilation assumes of sizes has to be guarded
                attached.prepare()
            call = under_inference(gm.meta.get("inference"), as_spent(attached, gm))
        return Compiled(call, (*facts.guards, *facts.late), report)
    except Unsupported as why:
        if why.code == "BCK003":  # the runtime's own failure
            why = _failed(choice, why, fullgraph)
        elif fullgraph:
            raise
        return run_captured(gm, facts, why, operators, name)
    except Exception as error:  # a backend may raise anything
        return run_captured(gm, facts, _failed(choice, error, fullgraph or options.suppress_errors), operators, name)


def _failed(choice: Choice, error: Exception, is_error: bool) -> Unsupported:
    """What the user is told of a backend that raised. Raises BackendFailed where it `is_error`."""
    text = f"backend {choice.name!r} {said(error)}{with_versions(choice.name, error)}"
    if is_error:
        raise BackendFailed(text) from error
    failed = Unsupported("BCK003", detail=text)
    events.warn(f"torchsmith: [BCK003] {text}. The program runs eagerly; with fullgraph=True this is an error.")
    return failed


def captured(choice: Choice, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """What a backend of captured graphs gives. Handlers of torch functions, off while capturing, are on: symbolic tracing needs
    them. It may run the graph, which leaves no trace in modes and draws."""
    before, random = modes(), generator_states()
    try:
        with torch._C._EnableTorchFunction():
            from .partners import as_partner  # sympy comes with it, so only who needs it loads it

            return as_partner(choice)(gm, [plain(value) for value in inputs])
    finally:
        set_modes(before)
        put_back(random)


def functional(
    choice: Choice, fg: FunctionalGraph, name: str, fullgraph: bool, part: str = "__call__", repeat: Call | None = None
) -> Call:  # fmt: skip
    """A functional graph by the backend, watched; `repeat` does the same with the program's own order of writes and exceptions."""
    with torch._C._EnableTorchFunction():
        made = choice(fg, name, part=part)
    written = [i for i, _ in fg.write_backs if fg.roles[i] != "const"]
    return watched(made, of_functional(fg), repeat or eager_callable(fg), written, choice.name, fullgraph, writes_last=True)


def backward(choice: Choice, fg: FunctionalGraph, name: str, fullgraph: bool) -> Call:
    """A backward graph by the backend. Raises Unsupported where it cannot: torch then runs it (autograd/attach.py)."""
    try:
        return functional(choice, fg, name, fullgraph, "backward")
    except Unsupported:
        raise
    except Exception as error:  # a backend may raise anything
        raise _failed(choice, error, fullgraph) from error
