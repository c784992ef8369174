"""Which Stages are made by a template, and what fusion, grouping, splitting, repacking and layouts have to know of them: one table.

In: a Stage. Out: the template's name and the Stage as that template sees it. What it makes of it stands in schedule/kernels.py (FORMS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...ir.expr import Axis, Load
from ...ir.program import Buffer, Stage
from . import attention, contraction
from .gated import recognise_gated


@dataclass(frozen=True, slots=True)
class Template:
    """`recognise` gives the Stage as the template sees it, or None; the others are asked of that. `nested`: only in bodies that repeat.

    is_operand: is this load read again and again, so that no value may be computed in its place? refuses: why the second argument, a
    Stage with more fused into it, is worse than the first. order: dimensions of the stored buffer from outermost to innermost. rows: an
    operand whose rows a tile reads side by side, and the axis from one to the next.
    """

    recognise: Callable[[Stage], Any | None]
    nested: bool = False
    is_operand: Callable[[Any, Load], bool] = lambda seen, use: False
    refuses: Callable[[Any, Any], str | None] = lambda before, after: None
    order: Callable[[Any, Mapping[str, Buffer]], list[int] | None] = lambda seen, buffers: None
    rows: Callable[[Any], tuple[Load, Axis] | None] = lambda seen: None


TEMPLATES: dict[str, Template] = {
    "attention": Template(attention.recognise_attention, is_operand=attention.is_operand, order=attention.order_of),
    "contraction": Template(
        contraction.recognise, False, contraction.is_operand, contraction.loses_rows, contraction.order_of, contraction.tiled_rows
    ),
    "gated": Template(recognise_gated, nested=True),
}


def recognised(stage: Stage, nested: bool = False) -> tuple[str, Any] | None:
    """The first template that takes the Stage, and how it sees it."""
    for name, template in TEMPLATES.items():
        found = template.recognise(stage) if nested or not template.nested else None
        if found is not None:
            return name, found
    return None
