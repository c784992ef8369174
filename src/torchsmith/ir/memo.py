"""What passes remember of expressions while a graph is compiled, and the one place that forgets it (no torch).

In: tables and caches whose keys hold expressions. Out: forget(), called after every graph: expressions are interned weakly, and live no
longer than the values that hold them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=dict)  # type: ignore[type-arg]
F = TypeVar("F")
V = TypeVar("V")
R = TypeVar("R")
_CLEAR: list[Callable[[], object]] = []
_LAST: list[Callable[[], object]] = []


def table(empty: T) -> T:
    """A dictionary that is emptied after every graph; another thread may empty it at any time."""
    _CLEAR.append(empty.clear)
    return empty


def by_identity(function: Callable[[V], R]) -> Callable[[V], R]:
    """Remembers what `function` said of each value, for functions of one frozen value. A value is known by its identity: hashing a stage
    or a kernel goes through all of it, at every question; an equal one that was made apart is asked again."""
    known: dict[int, tuple[V, R]] = table({})

    @functools.wraps(function)
    def asked(value: V) -> R:
        found = known.get(id(value))
        if found is None:  # the table holds the value too, so that no other one takes its place in memory
            found = known[id(value)] = (value, function(value))
        return found[1]

    return asked


def last(function: F) -> F:
    """Decorates what has to be done when the tables are empty."""
    _LAST.append(function)  # type: ignore[arg-type]
    return function


def forget() -> None:
    for clear in (*_CLEAR, *_LAST):
        clear()
