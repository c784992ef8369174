"""Calls of captured graphs that write to tensors: which they are, how partners see them, and what a partner wrote while it compiled.

In: a graph of torch calls. Out: the same graph with data flow through what it writes, so that tools that trace it again or drop dead code
keep the writes; inputs as they were.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

METHODS = {
    operator.iadd: "add_", operator.isub: "sub_", operator.imul: "mul_", operator.itruediv: "div_", operator.ifloordiv: "floor_divide_",
    operator.imod: "remainder_", operator.ipow: "pow_", operator.iand: "bitwise_and_", operator.ior: "bitwise_or_",
    operator.ixor: "bitwise_xor_",
}  # fmt: skip
SHIFTS = frozenset({operator.ilshift, operator.irshift})  # of floats they are no methods


def is_write(n: fx.Node) -> bool:
    """May running the call twice differ from running it once? Asked of names: in-place methods end with one underscore."""
    if n.op not in ("call_function", "call_method"):
        return False
    if n.target in METHODS or n.target in SHIFTS or "out" in n.kwargs:
        return True
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def written_through(graph: fx.Graph) -> None:
    """In place: augmented assignments of tensors as methods, and who reads a tensor after a method that writes it reads its result."""
    first: dict[fx.Node, fx.Node] = {}  # a method's result -> the tensor that it is
    last: dict[fx.Node, fx.Node] = {}  # the tensor -> the latest of its results
    for n in graph.nodes:
        given = n.args[0] if n.args else None
        n.args = fx.map_arg(n.args, lambda a: last.get(first.get(a, a), a))  # type: ignore[assignment]
        n.kwargs = fx.map_arg(n.kwargs, lambda a: last.get(first.get(a, a), a))  # type: ignore[assignment]
        if not (isinstance(given, fx.Node) and isinstance(given.meta.get("val"), torch.Tensor)):
            continue
        if n.target in METHODS:
            n.op, n.target = "call_method", METHODS[n.target]
        if n.op == "call_method" and is_write(n):
            first[n] = first.get(given, given)
            last[first[n]] = n


class Kept:
    """Tensors as they are now, to be made so again: their values, and how often they were written to."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        with torch._C.DisableTorchFunction():
            strided = [t for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided]
            self.rows = [(t, t.detach().clone(), t.grad_fn, t.requires_grad) for t in strided]
            self.counters = torch.autograd._unsafe_preserve_version_counter(tuple(row[0] for row in self.rows if not row[0].is_inference()))

    def put_back(self) -> str:
        """What cannot be taken back, in words; else ""."""
        stays = ""
        with torch._C.DisableTorchFunction(), torch.no_grad(), self.counters:
            for t, values, history, requires_grad in self.rows:
                if t.grad_fn is not history or t.requires_grad != requires_grad:
                    if history is not None or requires_grad or t._is_view():
                        stays = "autograd has recorded what it did to its inputs"
                    else:
                        t.detach_()
                with torch.inference_mode(t.is_inference()):
                    if not t.is_meta and not torch.equal(t, values):
                        t.copy_(values)
        return stays


@contextlib.contextmanager
def as_they_were(tensors: Sequence[Any]) -> Iterator[None]:
    """These have the same values afterwards."""
    kept = Kept(tensors)
    try:
        yield
    finally:
        kept.put_back()
