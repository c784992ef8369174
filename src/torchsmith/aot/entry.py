"""Entry: a whole program ready to be compiled ahead of time. What export makes, what the package compiler takes.

In: nothing. Out: the value, and what tells tied tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..graph.sizes import SizeFacts
from ..graph.spec import FunctionalGraph, TensorSpec

PARAMETER, BUFFER, CONSTANT = 1, 2, 3


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


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one: tied weights."""
    same = (a.dtype, a.shape, a.stride(), a.data_ptr()) == (b.dtype, b.shape, b.stride(), b.data_ptr())
    return a is b or (same and a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
