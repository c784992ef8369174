"""Which Stages are made by a template: one table that fusion, grouping, repacking and forming ask.

In: a Stage. Out: the template's name and the Stage as that template sees it. What it makes of it stands in schedule/kernels.py (FORMS).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...ir.program import Stage
from .attention import recognise_attention
from .contraction import recognise
from .gated import recognise_gated


@dataclass(frozen=True, slots=True)
class Template:
    """`recognise` gives the Stage as the template sees it, or None. `nested`: only in bodies that repeat."""

    recognise: Callable[[Stage], Any | None]
    nested: bool = False


TEMPLATES: dict[str, Template] = {
    "attention": Template(recognise_attention), "contraction": Template(recognise), "gated": Template(recognise_gated, nested=True),
}  # fmt: skip


def recognised(stage: Stage, nested: bool = False) -> tuple[str, Any] | None:
    """The first template that takes the Stage, and how it sees it."""
    for name, template in TEMPLATES.items():
        found = template.recognise(stage) if nested or not template.nested else None
        if found is not None:
            return name, found
    return None
