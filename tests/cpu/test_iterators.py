"""Iterators from outside: what is taken from them, where they stand afterwards, and loops over modules that go on behind a break."""

from __future__ import annotations

import builtins
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


# ---------------------------------------------------------------- what Python asks of an iterable


class Asked:
    """Writes down what it is asked; `says` tells how it answers to the question for its length."""

    def __init__(self, says: str) -> None:
        self.says, self.asked = says, []

    def __iter__(self):
        self.asked.append("iter")
        return iter(["1", "2"])

    def answer(self, name: str):
        self.asked.append(name)
        if self.says in ("TypeError", "ValueError"):
            raise getattr(builtins, self.says)(name)
        return {"negative": -1, "nothing": NotImplemented, "text": "2"}.get(self.says, 2)


class Long(Asked):
    def __len__(self):
        return self.answer("len")


class Hinted(Asked):
    def __length_hint__(self):
        return self.answer("hint")


class Both(Long, Hinted):
    pass


class Again:
    """An iterator that begins anew whenever it is asked for its iterator, and goes on behind its end."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        self.at += 1
        if self.at in (4, 7):
            raise StopIteration
        return self.at


def given(*args: Any) -> Any:
    return args


def first_and_others(them: Any) -> Any:
    a, *b = them
    return a, b


def pair(them: Any) -> Any:
    a, b = them
    return a, b


def replaced(them: Any) -> Any:
    out = [0, 1, 2]
    out[0:1] = them
    out += them
    out.extend(them)
    return out


TAKERS = [list, tuple, sorted, set, lambda v: [*v], lambda v: {*v}, lambda v: given(*v), lambda v: given(0, *v), first_and_others, pair,
          replaced, "".join, lambda v: list(map(str, v)), dict.fromkeys, lambda v: "1" in v, lambda v: list(zip(v, v, strict=False))]
ASKED = [Asked, Long, Hinted, Both, lambda says: Again(), lambda says: 5, lambda says: "ab", lambda says: iter("ab")]


@pytest.mark.parametrize("kind", ASKED)
def test_questions_for_the_length(kind):
    def taken(x, take, them):
        try:
            found = take(them)
        except Exception as e:
            found = type(e).__name__, str(e)
        return x + 1, found, getattr(them, "asked", None), getattr(them, "at", None)

    for says in ("", "TypeError", "ValueError", "negative", "nothing", "text") if isinstance(kind, type) else ("",):
        for take in TAKERS:
            compiled = torchsmith.compile(taken, backend="eager", options={"warn_eager": False})
            assert compiled(X, take, kind(says))[1:] == taken(X, take, kind(says))[1:]


@pytest.mark.parametrize("over", [itertools.pairwise, lambda it: zip(it, it, strict=False), enumerate, lambda it: itertools.islice(it, 5)])
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_an_iterator_that_asks_for_itself(over, depth):
    def fn(x):
        class Inner(Again):
            def __next__(self):
                value = super().__next__()
                if value == depth and walk is not None:
                    inner.append(next(walk, None))
                return value

        inner: list[Any] = []
        walk: Any = None
        walk = over(Inner())
        return x + 1, list(walk), list(itertools.islice(walk, 2)), inner

    assert torchsmith.compile(fn, backend="eager", options={"warn_eager": False})(X)[1:] == fn(X)[1:]


def test_a_number_that_varies_is_sent_once():
    def answers(x):
        got = yield x
        return got

    def program(x, k):
        def asked():
            got = yield from answers(x)
            yield -1 if got is None else got + 1

        def failing():
            yield 1
            raise ValueError(k)

        walk = asked()
        next(walk)
        try:
            total = sum(failing(), k)
        except ValueError as e:
            total = -e.args[0]
        return x * walk.send(k), total

    graphs: list[Any] = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled = torchsmith.compile(program, backend=backend, fullgraph=True)
    for k in range(2, 8):
        same(compiled(X, k), program(X, k))
    assert len(graphs) == 2
