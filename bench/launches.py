"""Below the front door: the native graphs behind a compiled callable, so that a bench can call and profile them.

In: whatever compiles inside `keeping_graphs()`. Out: Graph values with the inputs of their first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchsmith.runtime import host_torch


@dataclass(slots=True)
class Graph:
    """One loaded library. `inputs`: what it was called with first."""

    native: Callable[..., Any]
    externs: tuple[str, ...]
    inputs: tuple[Any, ...] = field(default=())

    def call(self) -> Any:
        return self.native(*self.inputs)

    def profile(self) -> list[float]:
        """Seconds of each kernel launch of one call, in order."""
        return list(self.native.profile(*self.inputs))  # type: ignore[attr-defined]


@contextmanager
def keeping_graphs() -> Iterator[list[Graph]]:
    """The graphs that are loaded inside the block, in the order of their first calls."""
    kept: list[Graph] = []
    load = host_torch.graph

    def graph(library: str, manifest: Any, *rest: Any, **settings: Any) -> Any:
        made = Graph(load(library, manifest, *rest, **settings), tuple(e.op for e in manifest.externs))

        def first(*inputs: Any) -> Any:
            if not made.inputs:
                made.inputs = inputs
                kept.append(made)
            return made.native(*inputs)

        return first

    host_torch.graph = graph
    try:
        yield kept
    finally:
        host_torch.graph = load
