"""Entry: a whole program ready to be compiled ahead of time. What export makes, what the package compiler takes.

In: nothing. Out: the value, and what tells tied tensors.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..graph.sizes import SizeFacts
from ..graph.spec import FunctionalGraph, TensorSpec

PARAMETER, BUFFER, CONSTANT = 1, 2, 3


def children(spec: Any) -> list[Any]:
    """The parts of a pytree structure (torch renamed the attribute)."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


@dataclass(frozen=True, slots=True)
class Constant:
    """One weight, buffer or lifted tensor under all of its names (tied weights have several), and the placeholder it fills."""

    names: tuple[str, ...]
    value: torch.Tensor
    type: int
    placeholder: int


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of the flat arguments: the placeholder it fills with its declared spec, or None with the constant it must equal."""

    name: str
    placeholder: int | None
    spec: TensorSpec | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A functional graph, and what its placeholders and results are to the user.

    `returned` has one entry per leaf of the result: the number of one of functional.outputs, or None with its constant in `values`.
    facts: symbols with origin ("size", placeholder, dimension) or ("size", placeholder, dimension, scale, offset) and declared ranges.
    labels: symbol name -> the dimension's name as the user wrote it.
    """

    name: str
    functional: FunctionalGraph
    facts: SizeFacts
    arguments: tuple[Argument, ...]
    constants: tuple[Constant, ...]
    returned: tuple[int | None, ...]
    values: tuple[Any, ...]
    in_spec: str  # pytree text, as torch.utils._pytree.treespec_dumps writes it
    out_spec: str
    labels: dict[str, str] = field(default_factory=dict)


def spec_text(spec: Any) -> str:
    """A pytree structure as text. Named tuples that have no registered name, torch's (topk, sort) among them, come back as plain tuples."""

    def plain(node: Any) -> Any:
        if node.is_leaf():
            return node
        kind, parts = node.type, [plain(c) for c in children(node)]
        if kind.__module__ == "torch.return_types" or (kind is namedtuple and not _is_registered(node.context)):
            return pytree.TreeSpec(tuple, None, parts)
        return pytree.TreeSpec(kind, node.context, parts)

    return pytree.treespec_dumps(plain(spec))


def _is_registered(cls: type) -> bool:
    row = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
    return row is not None and row.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one: tied weights."""
    same = (a.dtype, a.shape, a.stride(), a.data_ptr()) == (b.dtype, b.shape, b.stride(), b.data_ptr())
    return a is b or (same and a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
