"""Tables of rows, and the decorator that fills one (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, TypeVar

R = TypeVar("R")


def rows(table: dict[Any, R], what: str, known: Container[Any] | None = None) -> Callable[..., Callable[[R], R]]:
    """The decorator that enters a function under its keys. A key that has a row already, or is none of `known`, is a ValueError."""

    def row(*keys: Any) -> Callable[[R], R]:
        def add(fn: R) -> R:
            for key in keys:
                if key in table:
                    raise ValueError(f"{key} has two {what}s")
                if known is not None and key not in known:
                    raise ValueError(f"unknown operator {key}")
                table[key] = fn
            return fn

        return add

    return row
