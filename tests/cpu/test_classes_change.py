"""Compiled for an object of one class, called with one of another: what is asked of the object follows from its class, and of a number
or a text of the program's own class also from its value. Each question is put to every object behind every other one, beside eager."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchsmith


def _returns(value: Any) -> Any:
    return lambda self, *rest: value


def _class(name: str, base: type = object, **results: Any) -> type:
    return type(name, (base,), {f"__{k}__": _returns(v) for k, v in results.items()})


Int = _class("Int", int)
Float = _class("Float", float)
Text = _class("Text", str)
Row = _class("Row", tuple)
Loud = _class("Loud", int, str="loud", repr="L", bool=False, index=3, int=33, float=3.5, len=7, format="F", eq=1, hash=9)
J = _class("J", str="j", repr="JR", bool=False, index=4, int=3, float=4.5, len=8, contains=False, format="JF", eq=True, hash=8, call=78)
K = _class("K", str="k", repr="KR", bool=True, index=2, int=5, float=5.5, len=9, contains=True, format="KF", eq=False, hash=7, call=79)
K.foo = 6  # type: ignore[attr-defined]

TEXT, PERCENT = "{} {!r}", "%s %r"
GROUPS = [
    [Int(4), Int(2), Int(0), 4, Loud(4), Loud(2), True],
    [Float(2.5), Float(1.5), 2.5, Int(2), None],
    [Text("ab"), Text("c"), "ab", b"ab", Row("ab")],
    [Row((1, 2)), Row((1, 3)), (1, 2), [1, 2], {1: 2}, Row()],
    [J(), K(), None, 4, "q", J(), [1], len, int, ...],
]
QUESTIONS: list[Callable[..., Any]] = [
    lambda x, a: str.format("{} {!r}", a, a),
    lambda x, a: TEXT.format(a, a),
    lambda x, a: f"{a} {a!r} {a:>4}",
    lambda x, a: PERCENT % (a, a),
    lambda x, a: (str(a), repr(a), ",".join(map(str, [a]))),
    lambda x, a: (bool(a), not a, 1 if a else 2, a and 3),
    lambda x, a: (len(a), a[0]),
    lambda x, a: (a is None, a == 4, a != 4, a in (4, 2.5, "ab")),
    lambda x, a: (int(a), float(a)),
    lambda x, a: ([1, 2, 3, 4, 5, 6][a], [1, 2, 3][:a], "xy" * a),
    lambda x, a: operator.index(a),
    lambda x, a: hash(a) == 8,
    lambda x, a: (callable(a), isinstance(a, int), type(a).__name__, getattr(a, "foo", 0)),
    lambda x, a: a(),
    lambda x, a: 1 in a,
    lambda x, a: [*a],
    lambda x, a: (a + a, -a, abs(a)),
    lambda x, a: math.sqrt(a),
    lambda x, a: x * a + 1,
    lambda x, a: torch.tensor(a),
    lambda x, a: torch.zeros(a),
    lambda x, a: torch.full((2,), a),
    lambda x, a: x[a:],
    lambda x, a: x.reshape(a, -1),
]


def _answer(f: Callable[..., Any], *args: Any) -> Any:
    try:
        made = f(*args)
    except Exception as e:
        return type(e).__name__, str(e)
    return (made.dtype, made.tolist()) if isinstance(made, torch.Tensor) else (type(made), repr(made))


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_another_class(number: int) -> None:
    question = QUESTIONS[number]
    x = torch.ones(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in GROUPS:
            for start in range(len(group)):
                asked: dict[str, Any] = {}
                exec("def f(x, a):\n    return question(x, a)", {"question": question}, asked)  # a function without entries
                compiled = torchsmith.compile(asked["f"], backend="eager")
                for a in group[start:] + group[:start]:
                    assert _answer(compiled, x, a) == _answer(question, x, a), (type(a), a)


RESULTS = [5, 5.5, "s", None, True, -1, (1,), 2**70, Text("q"), Int(3), [1]]
METHODS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "__str__": (str, lambda a: f"{a}", lambda a: f"{a:>3}"),
    "__repr__": (repr, str, lambda a: f"{a!r:>4}"),
    "__format__": (format, lambda a: f"{a:>3}"),
    "__len__": (len, bool),
    "__bool__": (bool, lambda a: not a),
    "__hash__": (hash,),
    "__index__": (int, float, lambda a: [1, 2, 3, 4, 5, 6][a]),
    "__int__": (int,),
    "__float__": (float,),
}


@pytest.mark.parametrize("name", METHODS)
def test_results_of_special_methods(name: str) -> None:
    """CPython refuses some results of special methods, and changes others; so does a compiled function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for result in RESULTS:
            made = type("Own", (), {name: lambda self, *rest, result=result: result})()
            for question in METHODS[name]:
                compiled = torchsmith.compile(lambda x, a, question=question: (x + 1, question(a)), backend="eager")
                assert _answer(lambda a, c=compiled: c(torch.ones(2), a)[1], made) == _answer(question, made), (name, result)
