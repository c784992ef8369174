"""What passes remember of expressions while a graph is compiled, and the one place that forgets it (no torch).

In: tables and caches whose keys hold expressions. Out: forget(), called after every graph: expressions are interned weakly, and live no
longer than the values that hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=dict)  # type: ignore[type-arg]
F = TypeVar("F")
_CLEAR: list[Callable[[], object]] = []


def table(empty: T) -> T:
    """A dictionary that is emptied after every graph; another thread may empty it at any time."""
    _CLEAR.append(empty.clear)
    return empty


def forgets(function: F) -> F:
    """Decorates a function under lru_cache."""
    _CLEAR.append(function.cache_clear)  # type: ignore[attr-defined]
    return function


def forget() -> None:
    for clear in _CLEAR:
        clear()
