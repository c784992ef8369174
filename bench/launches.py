"""Below the front door: the native graphs behind a compiled callable, so that a bench can call and profile them.

In: whatever compiles inside `keeping_graphs()`. Out: Graph values with the inputs of their first call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchsmith import pipeline
from torchsmith.ir.blocks import Contract
from torchsmith.ir.linear import const_of
from torchsmith.ir.plan import Launch
from torchsmith.runtime import cache, host_torch


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


@dataclass(frozen=True, slots=True)
class Timed:
    """A launch that `profile` times: the operators it came from, and the tile of a contraction."""

    kind: str
    what: str


@contextmanager
def timed_launches() -> Iterator[list[list[Timed]]]:
    """Per graph compiled inside the block: its timed launches in order. The graph cache is passed by, so that there is a plan to see."""
    kept: list[list[Timed]] = []
    emit, find = pipeline.emit, cache.find

    def watched(plan: Any, options: Any) -> Any:
        kept.append([_timed(plan.kernels[s.kernel]) for s in plan.run if isinstance(s, Launch) and _is_timed(s)])
        return emit(plan, options)

    pipeline.emit, cache.find = watched, lambda key: None
    try:
        yield kept
    finally:
        pipeline.emit, cache.find = emit, find


def _is_timed(step: Launch) -> bool:
    """A launch that is not worth a second thread does not pass through the host."""
    n, grain = const_of(step.grid), const_of(step.grain)
    return n is None or grain is None or n > grain


def _timed(kernel: Any) -> Timed:
    origins = " ".join(kernel.origins)
    operators = ",".join(dict.fromkeys(re.findall(r"aten\.(\w+)", origins))) or kernel.name
    contract = next((s for s in kernel.body if isinstance(s, Contract)), None)
    return Timed(operators if contract is None else f"contraction: {operators}", f"{contract.rows}x{contract.vectors}" if contract else "")


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
