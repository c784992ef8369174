"""Nested arguments and results without torch: the pytree text of a package read into functions (no torch).

In: the JSON that torch.utils._pytree.treespec_dumps writes. Out: Spec: flatten(value) -> leaves, unflatten(leaves) -> value. Tuples, lists,
dictionaries, OrderedDict, deque and None are read here; other registered types need torch, which the caller then asks.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


class UnknownNode(Exception):
    """A container type that only its own library can build."""


def plain(value: Any) -> Any:
    """A Python constant of arguments or results as JSON: itself, or its text by the name of its type (complex numbers, dtypes)."""
    return value if value is None or type(value) in (bool, int, float, str) else {type(value).__name__: repr(value)}


def unplain(stored: Any) -> Any:
    """The constant of a result again; of what results have, only complex numbers are no JSON values."""
    return complex(stored["complex"]) if isinstance(stored, dict) else stored


def constant_text(stored: Any) -> str:
    """The repr of a stored constant. Constants are the same where these are: 2 is not 2.0, 0.0 not -0.0, and nan is nan."""
    return str(*stored.values()) if isinstance(stored, dict) else repr(stored)


@dataclass(frozen=True, slots=True)
class Spec:
    """One node: kind None is a leaf."""

    kind: str | None
    keys: tuple[Any, ...]
    children: tuple[Spec, ...]

    @property
    def leaves(self) -> int:
        return 1 if self.kind is None else sum(c.leaves for c in self.children)

    def flatten(self, value: Any) -> Iterator[Any]:
        """Leaves in order. Raises ValueError when the structure differs."""
        if self.kind is None:
            yield value
            return
        for child, part in zip(self.children, PARTS[self.kind](self, value), strict=True):
            yield from child.flatten(part)

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        if self.kind is None:
            return next(leaves)
        return BUILD[self.kind](self, [c.unflatten(leaves) for c in self.children])


def read_spec(given: Any) -> Spec:
    """From the text, or from its parsed JSON: [1, node]."""
    if isinstance(given, str):
        given = json.loads(given)
    if not isinstance(given, list) or len(given) != 2 or given[0] != 1:
        raise UnknownNode("another protocol of nested arguments")
    return _node(given[1])


def _node(row: Any) -> Spec:
    kind = row["type"]
    children = tuple(_node(c) for c in row["children_spec"])
    if kind is None:
        return Spec(None, (), ())
    if kind not in PARTS:
        raise UnknownNode(kind)
    context = json.loads(row["context"]) if row["context"] else None
    keys = tuple(context) if kind in DICTS and context is not None else ()
    return Spec(kind, keys, children)


def _sequence(kind: type[Any]) -> Callable[[Spec, Any], Sequence[Any]]:
    def parts(spec: Spec, value: Any) -> Sequence[Any]:
        if not isinstance(value, kind) or len(value) != len(spec.children):
            raise ValueError(f"a {kind.__name__} of {len(spec.children)} expected, got {_describe(value)}")
        return list(value)

    return parts


def _mapping(spec: Spec, value: Any) -> Sequence[Any]:
    if not isinstance(value, dict) or set(value) != set(spec.keys):
        raise ValueError(f"a dictionary of {', '.join(map(repr, spec.keys)) or 'nothing'} expected, got {_describe(value)}")
    return [value[k] for k in spec.keys]


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dictionary of {', '.join(map(repr, value)) or 'nothing'}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple, deque)) else f"a {type(value).__name__}"


DICTS = ("builtins.dict", "collections.OrderedDict")
PARTS: dict[str, Callable[[Spec, Any], Sequence[Any]]] = {
    "builtins.tuple": _sequence(tuple), "builtins.list": _sequence(list), "collections.deque": _sequence(deque),
    "builtins.dict": _mapping, "collections.OrderedDict": _mapping,
}  # fmt: skip
BUILD: dict[str, Callable[[Spec, list[Any]], Any]] = {
    "builtins.tuple": lambda s, parts: tuple(parts), "builtins.list": lambda s, parts: parts,
    "collections.deque": lambda s, parts: deque(parts), "builtins.dict": lambda s, parts: dict(zip(s.keys, parts, strict=True)),
    "collections.OrderedDict": lambda s, parts: OrderedDict(zip(s.keys, parts, strict=True)),
}  # fmt: skip
