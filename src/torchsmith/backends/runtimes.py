"""What the adapters of other runtimes share: which nodes are theirs, how they refuse, whose memory results are.

In: a FunctionalGraph and a Runtime. Out: a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..codes import Unsupported
from ..graph.spec import FunctionalGraph, TensorSpec
from .partition import partitioned, specs_of
from .plain import Adapter, run_plain


@dataclass(frozen=True, slots=True)
class Runtime:
    """`takes`: does it compute a node's operator on these dtypes, on the processor? `distrusted`: those that were seen to fail or differ
    in this process (partition.kind_of)."""

    name: str
    takes: Callable[[fx.Node], bool]
    distrusted: set[Any] = field(default_factory=set)

    def compile(self, fg: FunctionalGraph, name: str, adapter: Adapter) -> Callable[..., tuple[Any, ...]]:
        """A call of `fg`. Raises Unsupported (BCK001, BCK002, BCK003)."""
        return run_plain(fg, lambda plain: partitioned(plain, self.takes, adapter, self.distrusted), name)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Whatever the runtime's converter or compiler raises is Unsupported (BCK003)."""
        try:
            yield
        except Exception as error:
            text = f"{self.name}: {type(error).__name__}: {error}".replace("\n", " ")[:300]
            raise Unsupported("BCK003", detail=text) from error


def is_on_cpu(node: fx.Node, knows: Callable[[torch.dtype], bool]) -> bool:
    """Do the node and its operands lie on the processor, in dtypes that the runtime knows?"""
    specs = [s for n in (node, *node.all_input_nodes) for s in specs_of(n)]
    return all(knows(s.dtype) and s.device == "cpu" for s in specs if isinstance(s, TensorSpec))


def apart(results: Iterable[torch.Tensor], inputs: Iterable[int]) -> Sequence[torch.Tensor]:
    """Results of memory of their own: runtimes hand one that is an input (their addresses), or another result, back as the same memory."""
    seen, made = set(inputs), []
    for t in results:
        made.append(t.clone() if t.data_ptr() in seen and t.numel() else t)
        seen.add(made[-1].data_ptr())
    return made
