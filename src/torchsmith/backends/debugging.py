"""aot_eager and aot_eager_decomp_partition: the functional graph by torch's own operators, to tell which stage of the road is at fault.

In: a FunctionalGraph. Out: a call. The second also writes operators out by torch's decompositions, as compilers of few operators want them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..graph.eager import eager_callable
from ..graph.spec import FunctionalGraph
from .partition import decompositions, is_random
from .plain import PlainGraph, Run, by_operator, run_plain
from .watch import Undone, versions


def aot_eager(fg: FunctionalGraph, name: str, **keywords: Any) -> Callable[..., tuple[Any, ...]]:
    run = eager_callable(fg)

    def call(*inputs: Any) -> tuple[Any, ...]:
        before = versions(inputs)
        try:
            return run(*inputs)
        except Exception as error:  # the program's own, as a rule
            if versions(inputs) != before:
                raise
            raise Undone(str(error)) from error

    return call


def aot_eager_decomp_partition(fg: FunctionalGraph, name: str, **keywords: Any) -> Callable[..., tuple[Any, ...]]:
    return run_plain(fg, decomposed, name)


def decomposed(plain: PlainGraph) -> Run:
    """The graph by torch's operators, each that has a decomposition by it."""
    table = decompositions()

    def instead(node: fx.Node) -> Any:
        return node.target if is_random(node) else table.get(node.target, node.target)

    return by_operator(plain, instead)
