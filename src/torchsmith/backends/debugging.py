"""aot_eager and aot_eager_decomp_partition: the functional graph by torch's own operators, to tell which stage of the road is at fault.

In: a FunctionalGraph. Out: a call. The second also writes operators out by torch's decompositions, as compilers of few operators want them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..graph.eager import eager_callable
from ..graph.spec import FunctionalGraph, TensorSpec
from .partition import decompositions, is_random
from .plain import PlainGraph, Run, by_operator, like, numbers, run_plain
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
        own: Any = node.target
        written_out = own if is_random(node) else table.get(own, own)
        specs = node.meta["spec"]
        if written_out is own or not isinstance(specs, tuple):
            return written_out
        read: list[Any] = [u.args[1] for u in node.users]

        def parts(*args: Any, **kwargs: Any) -> Any:
            found = written_out(*args, **kwargs)
            if not all(_is(found[i], specs[i]) for i in read):  # of attention the weights, not the logarithms of their sums
                return own(*args, **kwargs)
            return [found[i] if i in read else like(spec) for i, spec in enumerate(specs)]

        return parts

    return by_operator(plain, instead)


def _is(value: Any, spec: Any) -> bool:
    if not isinstance(spec, TensorSpec):
        return True
    return isinstance(value, torch.Tensor) and value.dtype == spec.dtype and tuple(value.shape) == numbers(spec.shape)
