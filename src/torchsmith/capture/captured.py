"""What one captured frame is: the graph, where its inputs come from, when it is right, and how Python sees its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx

from .resume import Stop
from .source import Guard, Source


@dataclass(frozen=True, slots=True)
class Finish:
    """How the frame's result is made from the graph's outputs.

    recipe: ("out", i) | ("const", object) | ("source", Source) | ("tuple", ...) | ("list", ...) | ("dict", ((key, recipe), ...)); or
    text: Python source of `def finish(outs, L, G, C)` where objects must be built or effects replayed; `namespace` are its constants.
    """

    recipe: tuple[Any, ...] | None
    text: str | None = None
    namespace: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Captured:
    """One frame: `inputs` has one source per placeholder, in order; `guards` are in the order they must be checked."""

    graph: torch.fx.GraphModule
    inputs: tuple[Source, ...]
    guards: tuple[Guard, ...]
    facts: Any
    finish: Finish
    needs_grad: bool = False  # autograd has to know of a result, or of a written input, after the call
    stop: Stop | None = None  # only a part of the frame: what finish makes is then the frame's state
