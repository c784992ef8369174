"""Names that torch's code and our own cannot do without, and whether somebody has put something else in their place.

While one of them is replaced, capturing could fail anywhere, or believe a `len` that lies: calls that no entry fits run eagerly (CAP040).
Entries are compiled for what they were captured with, and their guards are C's.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch

_NAMES = """all any bool bytes callable classmethod complex delattr dict dir divmod enumerate filter float frozenset getattr hasattr hash id
    int isinstance issubclass iter len list map max memoryview min next object property range repr reversed round set setattr slice sorted
    staticmethod str sum super tuple type vars zip"""
_NEEDED: tuple[tuple[dict[str, Any], str, Any], ...] = (
    *((vars(builtins), name, vars(builtins)[name]) for name in _NAMES.split()),
    (vars(torch), "nn", torch.nn),
)


def replaced() -> str:
    """The first name that means something else than when this module was loaded, "" if all are as they were. It calls no builtin."""
    for space, name, value in _NEEDED:
        if space.get(name) is not value:
            return name
    return ""
