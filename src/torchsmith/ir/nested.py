"""Nested arguments: what operators take and give are numbers, tensors, nodes, and tuples, lists and dictionaries of them (no torch)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def leaves(*values: Any) -> list[Any]:
    """What stands inside of nested tuples, lists and values of dictionaries, in order; other values stand for themselves."""
    found: list[Any] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Any]) -> None:
    for v in values:
        if isinstance(v, (tuple, list)):
            _collect(v, found)
        elif isinstance(v, dict):
            _collect(v.values(), found)
        else:
            found.append(v)


def every(body: Iterable[Any]) -> Iterator[Any]:
    """The elements or steps of a body, each followed by those inside of it."""
    for e in body:
        yield e
        yield from every(getattr(e, "inner", ()))
