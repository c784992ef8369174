"""Iterators from outside: what is taken from them, where they stand afterwards, and loops over modules that go on behind a break."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from capturing import same

import torchsmith
from torchsmith.codes import Unsupported

X = torch.arange(6.0).reshape(2, 3) / 7
ROWS = [X[0] + 1, X[1] * 2, X[0] - X[1], X[1] + 5]
NAMED = dict(zip("abc", ROWS, strict=False))


def moved(it: Any, n: int = 1) -> Any:
    for _ in range(n):
        next(it)
    return it


def twice() -> Any:
    numbers = iter([1, 2, 3, 4, 5])
    return zip(numbers, numbers, strict=False)


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter(list(ROWS)),
    "list, moved": lambda: moved(iter(list(ROWS)), 2),
    "list, at its end": lambda: moved(iter(list(ROWS)), 4),
    "tuple": lambda: iter(tuple(ROWS)),
    "range": lambda: moved(iter(range(2, 9, 2))),
    "text": lambda: iter("abcd"),
    "bytes": lambda: iter(b"ab"),
    "keys": lambda: moved(iter(dict(NAMED))),
    "values": lambda: moved(iter(NAMED.values())),
    "items": lambda: iter(NAMED.items()),
    "set": lambda: iter({3}),
    "reversed": lambda: reversed(list(ROWS)),
    "enumerate": lambda: moved(enumerate(list(ROWS), 5)),
    "zip": lambda: moved(zip(ROWS, range(9), strict=False)),
    "strict zip": lambda: zip(ROWS, [1, 2], strict=True),
    "map": lambda: map(torch.sin, ROWS),
    "map of a closure": lambda: map(lambda v, w: v * w, ROWS, [1, 2, 3]),
    "filter": lambda: filter(None, [0, 1, 2, 0, 3]),
    "count": lambda: itertools.count(3, 2),
    "repeat": lambda: itertools.repeat(ROWS[0], 3),
    "one list twice": twice,
    "enumerate over zip": lambda: moved(enumerate(zip(ROWS, "abcd", strict=True))),
    "enumerate over map": lambda: enumerate(map(torch.sin, ROWS)),
    "generator": lambda: (v + 1 for v in ROWS),
    "chain": lambda: itertools.chain(ROWS, [1.0]),
}


def number(v: Any) -> Any:
    if isinstance(v, torch.Tensor):
        return v
    if isinstance(v, tuple):
        return sum(map(number, v))
    return float(ord(v[0])) if isinstance(v, str) else float(v)


def two_of(x, it):
    return x * 2 + number(next(it)), next(it, None)


def some(x, it):
    for k, v in enumerate(it):
        if k == 2:
            break
        x = x + number(v) * 2
    return x, it


def as_list(x, it):
    return x + 1, list(itertools.islice(it, 7))


def with_breaks(x, it):
    x = x + number(next(it))
    print(x.sum().item() > 100)
    for k, v in zip(range(5), it, strict=False):
        x = x + number(v)
        if k == 2:
            print(x.sum().item() > 100)
    return x * 2, it


def seen(fn: Any, make: Any) -> Any:
    it, text = make(), io.StringIO()
    with redirect_stdout(text):
        try:
            result = fn(X, it)
        except Exception as error:
            result = type(error), str(error)
    result = tuple("the iterator" if v is it else v for v in result)
    try:
        rest: Any = list(itertools.islice(it, 9))
    except ValueError as error:
        rest = str(error)
    return result, rest, text.getvalue()


@pytest.mark.parametrize("make", ITERATORS.values(), ids=list(ITERATORS))
@pytest.mark.parametrize("fn", [two_of, some, as_list, with_breaks])
def test_what_is_taken(fn, make):
    compiled = torchsmith.compile(fn, backend="eager")
    for _ in range(2):
        same(seen(compiled, make), seen(fn, make))


@pytest.mark.parametrize("name", ["list, moved", "values", "enumerate", "zip", "map", "filter", "enumerate over zip"])
def test_one_graph(name):
    compiled = torchsmith.compile(some, backend="eager", fullgraph=True)
    same(seen(compiled, ITERATORS[name]), seen(some, ITERATORS[name]))


def test_another_place_is_another_program():
    compiled = torchsmith.compile(two_of, backend="eager", fullgraph=True)
    for n in (0, 1, 2, 1):
        same(compiled(X, moved(iter(ROWS), n)), two_of(X, moved(iter(ROWS), n)))
    with pytest.raises(Unsupported, match="CAP011"):
        torchsmith.compile(two_of, backend="eager", fullgraph=True)(X, ITERATORS["generator"]())


class Shown(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x):
        y = self.inner(x)
        print(bool(y.sum() > 1e9))
        return torch.relu(y)


class Looped(torch.nn.Module):
    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({f"layer{k}": layer for k, layer in enumerate(layers)})

    def forward(self, x):
        for k, (name, layer) in enumerate(self.layers.items()):
            x = layer(x) + k * len(name)
        return x * 2


@pytest.mark.parametrize("kind", [lambda layers: torch.nn.Sequential(*layers), Looped])
@pytest.mark.parametrize(("breaks", "at_most"), [((3,), 4), ((3, 4), 6), ((2, 6), 5), (range(10), 6)])
def test_a_loop_over_modules_goes_on_behind_a_break(kind, breaks, at_most):
    torch.manual_seed(0)
    others = [torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.LayerNorm(3)]
    net = kind([Shown() if k in breaks else copy.deepcopy(others[k % 3]) for k in range(10)])
    graphs: list[Any] = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled = torchsmith.compile(net, backend=backend)
    text = io.StringIO()
    with redirect_stdout(text):
        for _ in range(2):
            same(compiled(X), net(X))
    assert text.getvalue() == "False\n" * 4 * len(breaks)
    assert len(graphs) <= at_most
