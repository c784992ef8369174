# ruff: noqa  (programs as users write them)
"""What Python programs do, one behaviour a line: each is compiled and held against eager by tests/cpu/test_behaviours.py.

A row is a function of a tensor (2 x 3, between -1 and 1) and a State of fresh mutable objects; it may change them, print, warn or raise.
"""

from __future__ import annotations

import ast
import base64
import bisect
import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import heapq
import inspect
import io
import itertools
import json
import math
import operator
import pickle
import random
import re
import statistics
import string
import struct
import textwrap
import time
import types
import typing
import unicodedata
import uuid
import warnings
import weakref
import zlib

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class Box:
    """An ordinary object, with a property, operators and a container's protocol."""

    kind = "box"

    def __init__(self, v):
        self.v = v

    @property
    def double(self):
        return self.v * 2

    @double.setter
    def double(self, value):
        self.v = value / 2

    @classmethod
    def of(cls, v):
        return cls(v)

    @staticmethod
    def plus(a, b):
        return a + b

    def __add__(self, other):
        return Box(self.v + (other.v if isinstance(other, Box) else other))

    def __radd__(self, other):
        return Box(other + self.v)

    def __getitem__(self, i):
        return self.v[i]

    def __setitem__(self, i, value):
        self.v[i] = value

    def __len__(self):
        return len(self.v)

    def __contains__(self, item):
        return item == "inside"

    def __iter__(self):
        return iter((self.v, self.kind))

    def __call__(self, *args, **kwargs):
        return self.v, args, kwargs

    def __enter__(self):
        self.entered = True
        return self

    def __exit__(self, kind, error, trace):
        self.left = kind.__name__ if kind else None
        return kind is KeyError

    def __eq__(self, other):
        return isinstance(other, Box) and self.v is other.v

    __hash__ = None

    def __bool__(self):
        return self.kind == "box"

    def __repr__(self):
        return f"Box of {self.kind}"


class Quiet(Box):
    kind = "quiet"

    def __getattr__(self, name):
        if name.startswith("no_"):
            raise AttributeError(f"there is no {name}")
        return len(name)

    @property
    def double(self):
        return super().double + 1


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Key:
    """Equal by what it holds."""

    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return type(other) is Key and self.n == other.n

    def __hash__(self):
        return hash(self.n)


class Mistake(ValueError):
    def __init__(self, n):
        super().__init__(f"mistake {n}")
        self.n = n


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Data:
    a: typing.Any
    b: int = 2
    c: list = dataclasses.field(default_factory=list)


class State:
    """Fresh objects for one call."""

    def __init__(self, x):
        self.list, self.dict, self.set = [3, 1, 2], {"a": 1, "b": x}, {1, 2}
        self.tensors, self.box, self.quiet, self.deque = [x, x + 1], Box(x), Quiet(x), collections.deque([1, 2], 4)
        self.counter, self.default, self.order = collections.Counter("aab"), collections.defaultdict(list), collections.OrderedDict(a=1, b=2)
        self.layer = torch.nn.Linear(3, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(6.0).reshape(2, 3) / 7), self.layer.bias.fill_(0.5)
        self.keyed = {self.layer: "layer", self.layer.weight: "weight", Key(1): "key", Colour.RED: "red"}
        self.iterator, self.generator, self.enumerated = iter([4, 5, 6]), (i * 2 for i in range(4)), enumerate("ab")
        self.nested, self.data, self.n, self.f, self.text = {"k": [1, [2, x]]}, Data(x), 3, 0.5, "some text"


def raises(error):
    raise error


def attempt(fn, *args):
    try:
        return fn(*args)
    except Exception as e:
        return type(e).__name__, str(e)


def caught(fn, *kinds):
    try:
        return fn()
    except kinds as e:
        return "caught", type(e), e.args
    finally:
        print("finally")


def generate(x, n):
    for i in range(n):
        got = yield x * i
        if got is not None:
            x = x + got
    return "end"


def delegate(x):
    end = yield from generate(x, 2)
    yield end


PATTERN = re.compile(r"(?P<a>\w)(\d+)")
WORDS = {"one": 1, ("t", 2): 2, Colour.RED: 3, torch.float32: 4, int: 5, None: 6, 2.5: 7, frozenset({1}): 8, len: 9}
COUNT = itertools.count(5)


def named(match):
    return match.group("a").upper()


def hooked(x, s):
    y = x.clone().requires_grad_()
    z = y * 2
    z.register_hook(lambda g: s.list.append(1) or g * 3)
    z.sum().backward()
    return y.grad


def lazily(x):
    torch.manual_seed(2)
    layer = torch.nn.LazyLinear(2)
    return layer(x).shape, type(layer).__name__


@torch.jit.script
def scripted(x: torch.Tensor, n: int):
    return x * n + 1


async def later(x):
    return x + 1


def awaited(x):
    c = later(x)
    try:
        c.send(None)
    except StopIteration as e:
        return e.value


def under(context, fn):
    with context:
        return fn()


def half(it):
    return [next(it), next(it)]


LISTS = [
    lambda x, s: s.list.append(x) or s.list, lambda x, s: s.list.extend([x, 4]) or len(s.list), lambda x, s: s.list.insert(1, x) or s.list[1],
    lambda x, s: (s.list.pop(), s.list.pop(0), s.list), lambda x, s: s.list.sort() or s.list, lambda x, s: s.list.reverse() or s.list,
    lambda x, s: s.list.remove(1) or s.list, lambda x, s: s.list.clear() or s.list, lambda x, s: (s.list.index(2), s.list.count(3)),
    lambda x, s: sorted(s.list, reverse=True), lambda x, s: s.list.sort(key=lambda v: -v) or s.list, lambda x, s: s.list[::-1] + s.list[1:],
    lambda x, s: s.list.__setitem__(slice(0, 2), [x]) or s.list, lambda x, s: s.list.__delitem__(0) or s.list, lambda x, s: s.list * 2,
    lambda x, s: [x] * 3, lambda x, s: s.list == [3, 1, 2], lambda x, s: s.list < [3, 2], lambda x, s: s.list.copy() is s.list,
    lambda x, s: (max(s.list), min(s.list), sum(s.list)), lambda x, s: list(map(lambda a, b: a * b, s.list, (x, 2, x))),
    lambda x, s: [v for v in s.list if v > 1], lambda x, s: [(i, v) for i, v in enumerate(s.list, 5)], lambda x, s: list(zip(s.list, "abc")),
    lambda x, s: list(reversed(s.list)), lambda x, s: [a for b in s.nested.values() for a in b], lambda x, s: any(s.list) and all(s.list),
    lambda x, s: attempt(s.list.index, 9), lambda x, s: attempt(s.list.remove, 9), lambda x, s: attempt([].pop), lambda x, s: attempt(lambda: s.list[7]),
    lambda x, s: s.list.__iadd__((4, 5)), lambda x, s: operator.itemgetter(0, 2)(s.list), lambda x, s: s.list.extend(s.list) or s.list,
    lambda x, s: (lambda a, *b, c=0: (a, b, c))(*s.list, c=x), lambda x, s: [*s.list, *s.set, *"ab"], lambda x, s: s.tensors.append(s.tensors[0] + 1),
    lambda x, s: sum(s.tensors), lambda x, s: torch.stack(s.tensors).sum(0), lambda x, s: sum([[1], [2]], []), lambda x, s: max(s.tensors, key=id) is not None,
    lambda x, s: (3 in s.list, 9 not in s.list), lambda x, s: [i.shape for i in s.tensors], lambda x, s: list(itertools.chain(s.list, s.tensors[:1])),
    lambda x, s: bisect.bisect([1, 2, 3], 2), lambda x, s: heapq.nsmallest(2, s.list), lambda x, s: (heapq.heapify(s.list), s.list)[1],
]  # fmt: skip
DICTS = [
    lambda x, s: s.dict.update(c=x) or s.dict, lambda x, s: s.dict.pop("a"), lambda x, s: s.dict.setdefault("z", x), lambda x, s: s.dict.get("q", x),
    lambda x, s: list(s.dict.items()), lambda x, s: list(s.dict), lambda x, s: s.dict | {"a": x}, lambda x, s: {**s.dict, "a": 5},
    lambda x, s: s.dict.popitem(), lambda x, s: s.dict.clear() or s.dict, lambda x, s: {k: v for k, v in s.dict.items() if k > "a"},
    lambda x, s: attempt(lambda: s.dict["q"]), lambda x, s: attempt(s.dict.pop, "q"), lambda x, s: dict.fromkeys("ab", x), lambda x, s: len(s.dict),
    lambda x, s: "a" in s.dict and "q" not in s.dict, lambda x, s: dict(zip("ab", s.tensors)), lambda x, s: dict(s.dict, q=1) == s.dict,
    lambda x, s: s.default["new"].append(x) or s.default, lambda x, s: s.order.move_to_end("a") or list(s.order), lambda x, s: s.order.popitem(last=False),
    lambda x, s: s.counter.most_common(1), lambda x, s: s.counter.update("bb") or s.counter["b"], lambda x, s: s.counter["never"],
    lambda x, s: s.nested["k"][1].append(4) or s.nested, lambda x, s: s.dict.keys() & {"a"}, lambda x, s: s.dict.keys() == {"a", "b"},
    lambda x, s: {x.shape: 1, (1, 2): 2, None: 3}[torch.Size([2, 3])], lambda x, s: s.dict.__delitem__("a") or s.dict, lambda x, s: list(s.dict.values())[1],
    lambda x, s: {i: x * i for i in range(3)}, lambda x, s: collections.ChainMap({"a": x}, s.dict)["a"], lambda x, s: s.dict.copy() is s.dict,
    lambda x, s: (lambda **k: k)(**s.dict), lambda x, s: attempt(lambda: (lambda a: a)(**s.dict)), lambda x, s: max(s.dict, key=len), lambda x, s: sorted(s.dict),
    lambda x, s: s.dict.__ior__({"z": 1}), lambda x, s: [k for k in reversed(s.dict)], lambda x, s: dict(a=1) | dict(b=x), lambda x, s: attempt(lambda: {[]: 1}),
    lambda x, s: next(iter(s.dict.items())), lambda x, s: {True: "t", 1: "one", 1.0: "float"}, lambda x, s: {v: k for k, v in {"a": 1}.items()},
]  # fmt: skip
SETS_AND_MORE = [
    lambda x, s: s.set.add(5) or s.set, lambda x, s: s.set.discard(9) or s.set, lambda x, s: attempt(s.set.remove, 9), lambda x, s: s.set | {3},
    lambda x, s: s.set & {2, 4}, lambda x, s: s.set - {1}, lambda x, s: s.set ^ {1, 7}, lambda x, s: s.set <= {1, 2, 3}, lambda x, s: frozenset(s.set),
    lambda x, s: s.set.update([8]) or sorted(s.set), lambda x, s: {v % 2 for v in s.list}, lambda x, s: s.set.isdisjoint({5}), lambda x, s: len(s.set),
    lambda x, s: s.deque.appendleft(x) or list(s.deque), lambda x, s: s.deque.rotate(1) or list(s.deque), lambda x, s: s.deque.popleft(),
    lambda x, s: s.deque.extend([3, 4, 5]) or list(s.deque), lambda x, s: s.deque.maxlen, lambda x, s: Pair(x, 2)._replace(b=3), lambda x, s: Pair(1, x).b,
    lambda x, s: Pair(1, 2)._asdict(), lambda x, s: Pair._fields, lambda x, s: Pair(1, 2) == (1, 2), lambda x, s: attempt(Pair, 1),
    lambda x, s: (1, 2) + (3,), lambda x, s: (1, x)[1], lambda x, s: tuple(i * x for i in range(2)), lambda x, s: (1, 2) < (1, 3), lambda x, s: (1, 2).index(2),
    lambda x, s: attempt(lambda: (1, 2)[5]), lambda x, s: attempt(lambda: (1,) + [2]), lambda x, s: slice(1, 4).indices(3), lambda x, s: range(5)[::2],
    lambda x, s: (len(range(2, 9, 3)), 5 in range(9), range(3) == range(0, 3)), lambda x, s: list(range(3, 0, -1)), lambda x, s: divmod(17, 5),
    lambda x, s: bytes([1, 2]).hex(), lambda x, s: bytearray(b"ab").decode(), lambda x, s: complex(1, 2) * 2, lambda x, s: (7 // 2, -7 // 2, 7 % -3, 2**10),
    lambda x, s: (round(2.5), round(2.675, 2), abs(-3), pow(2, 5, 7)), lambda x, s: (int("12"), int("ff", 16), float("1e3"), bool([]), str(1.0)),
    lambda x, s: (1).bit_length() + (255).bit_count(), lambda x, s: (0.5).as_integer_ratio(), lambda x, s: attempt(int, "x"), lambda x, s: attempt(lambda: 1 / 0),
    lambda x, s: (math.sqrt(2), math.floor(-0.5), math.isnan(math.nan), math.inf), lambda x, s: attempt(math.sqrt, -1), lambda x, s: math.prod([1, 2, 3]),
    lambda x, s: isinstance(True, int) and issubclass(bool, int), lambda x, s: type(s.n) is int, lambda x, s: callable(len) and hasattr(x, "shape"),
    lambda x, s: (None or x) is x, lambda x, s: s.n and s.f, lambda x, s: not s.list, lambda x, s: 1 < s.n < 5, lambda x, s: (s.n == 3) is True,
]  # fmt: skip
STRINGS = [
    lambda x, s: s.text.upper(), lambda x, s: s.text.split(), lambda x, s: s.text.replace("t", "T", 1), lambda x, s: s.text[::-1], lambda x, s: s.text * 2,
    lambda x, s: "-".join(["a", "b"]), lambda x, s: s.text.find("text"), lambda x, s: attempt(s.text.index, "q"), lambda x, s: s.text.startswith(("s", "q")),
    lambda x, s: f"{s.n:>5}|{s.f:.3f}|{s.text!r:<12}|{s.n:b}", lambda x, s: "%s-%05.1f-%d" % (s.text, s.f, s.n), lambda x, s: "{0}{1[0]}{k}".format(1, s.list, k=s.f),
    lambda x, s: s.text.partition(" "), lambda x, s: s.text.title().swapcase(), lambda x, s: "a,b,,c".split(","), lambda x, s: " pad ".strip() + "|",
    lambda x, s: "abc".translate({97: "z"}), lambda x, s: "tab\there".expandtabs(4), lambda x, s: s.text.encode(), lambda x, s: "a" < "b" and "in" in "inside",
    lambda x, s: s.text.center(15, "*"), lambda x, s: "x1".isalnum() and "12".isdigit(), lambda x, s: ord("a") + int(chr(49)), lambda x, s: s.text.count("t"),
    lambda x, s: "line\nline".splitlines(), lambda x, s: string.ascii_lowercase[:3], lambda x, s: textwrap.shorten("a b c d e f", 5), lambda x, s: repr(s.text),
    lambda x, s: f"{x.shape} {x.dtype} {x.dim()}", lambda x, s: str(x.dtype).split(".")[-1], lambda x, s: f"{s.box} {s.box!r}", lambda x, s: format(s.f, ".2e"),
    lambda x, s: attempt(lambda: "a" + 1), lambda x, s: attempt(lambda: "{}".format()), lambda x, s: f"{'nested'!r:>10}{1 + 1}", lambda x, s: "".join(sorted("hello")),
    lambda x, s: "a".zfill(3).rjust(5, "."), lambda x, s: s.text.removeprefix("some").lstrip(), lambda x, s: "%(a)s" % {"a": 1}, lambda x, s: f"{s.list}{s.set}",
]  # fmt: skip
OBJECTS = [
    lambda x, s: s.box.double, lambda x, s: setattr(s.box, "double", x) or s.box.v, lambda x, s: (s.box + 1).v, lambda x, s: (1 + s.box).v, lambda x, s: s.box[0],
    lambda x, s: s.box.__setitem__(0, 1.0) or s.box.v, lambda x, s: len(s.box), lambda x, s: "inside" in s.box, lambda x, s: list(s.box)[1], lambda x, s: s.box(1, k=2),
    lambda x, s: Box.of(x).v, lambda x, s: Box.plus(x, 1), lambda x, s: s.box == Box(s.box.v), lambda x, s: s.box != 3, lambda x, s: bool(s.box) and not bool(s.quiet),
    lambda x, s: s.quiet.double, lambda x, s: s.quiet.whatever, lambda x, s: attempt(lambda: s.quiet.no_such), lambda x, s: attempt(lambda: s.box.missing),
    lambda x, s: getattr(s.box, "missing", x), lambda x, s: hasattr(s.box, "missing"), lambda x, s: setattr(s.box, "new", x) or s.box.new, lambda x, s: vars(s.box)["v"],
    lambda x, s: delattr(s.box, "v") or hasattr(s.box, "v"), lambda x, s: isinstance(s.quiet, Box), lambda x, s: type(s.quiet).__mro__[1].__name__, lambda x, s: s.quiet.kind,
    lambda x, s: Data(x).b, lambda x, s: Data(1) == Data(1), lambda x, s: dataclasses.replace(s.data, b=5).b, lambda x, s: dataclasses.astuple(Data(1, 2, [3])),
    lambda x, s: [f.name for f in dataclasses.fields(s.data)], lambda x, s: s.data.c.append(x) or s.data.c, lambda x, s: repr(Data(1)), lambda x, s: attempt(Data),
    lambda x, s: copy.copy(s.data).a is s.data.a, lambda x, s: Box(x).double + Quiet(x).double, lambda x, s: functools.partial(Box.plus, x)(2), lambda x, s: s.box.plus(1, x),
    lambda x, s: operator.attrgetter("v.shape")(s.box), lambda x, s: operator.methodcaller("plus", 1, 2)(s.box), lambda x, s: Box.__name__ + Box.of.__name__,
    lambda x, s: attempt(hash, s.box), lambda x, s: attempt(lambda: s.box.of()), lambda x, s: attempt(lambda: s.n.real.missing), lambda x, s: (s.box is s.box, s.box is not s.quiet),
    lambda x, s: typing.cast(int, x), lambda x, s: type("Made", (Box,), {"kind": "made"})(x).kind, lambda x, s: s.box.__class__.__name__, lambda x, s: Box.double.fget(s.box),
    lambda x, s: super(Quiet, s.quiet).double, lambda x, s: s.__dict__["n"], lambda x, s: (lambda b: setattr(b, "v", b.v + 1) or b)(s.box).v, lambda x, s: attempt(setattr, 3, "a", 1),
]  # fmt: skip
FUNCTIONS = [
    lambda x, s: list(generate(x, 3)), lambda x, s: list(delegate(x)), lambda x, s: next(generate(x, 1)), lambda x, s: sum(generate(x, 3)),
    lambda x, s: (lambda g: (next(g), g.send(1), attempt(g.throw, KeyError("k"))))(generate(x, 4)), lambda x, s: attempt(next, generate(x, 0)),
    lambda x, s: functools.reduce(lambda a, b: a + b, [x, x, 1]), lambda x, s: list(filter(None, [0, 1, 2])), lambda x, s: list(map(str, s.list)),
    lambda x, s: list(itertools.accumulate([1, 2, 3])), lambda x, s: list(itertools.product("ab", [1, 2])), lambda x, s: list(itertools.combinations([1, 2, 3], 2)),
    lambda x, s: [k for k, _ in itertools.groupby("aabb")], lambda x, s: list(itertools.islice(itertools.count(2), 3)), lambda x, s: list(itertools.zip_longest([1], [2, 3])),
    lambda x, s: list(itertools.repeat(x, 2)), lambda x, s: list(itertools.takewhile(lambda v: v > 1, s.list)), lambda x, s: list(itertools.pairwise(s.list)),
    lambda x, s: list(itertools.starmap(pow, [(2, 3)])), lambda x, s: list(itertools.permutations([1, 2])), lambda x, s: list(itertools.compress("abc", [1, 0, 1])),
    lambda x, s: (lambda n: (lambda: n + 1))(x)(), lambda x, s: [f() for f in [lambda i=i: x * i for i in range(2)]], lambda x, s: [f() for f in [lambda: i for i in range(2)]],
    lambda x, s: (lambda *a, **k: (a, k))(1, *s.list, z=x, **{"y": 2}), lambda x, s: attempt(lambda: (lambda a: a)()), lambda x, s: attempt(lambda: (lambda a: a)(1, a=2)),
    lambda x, s: (lambda a, /, b, *, c: (a, b, c))(1, b=x, c=3), lambda x, s: (lambda f: f(f, 4))(lambda f, n: 1 if n == 0 else n * f(f, n - 1)), lambda x, s: (y := x + 1) * y,
    lambda x, s: x if s.n > 2 else -x, lambda x, s: iter([1, x]).__next__(), lambda x, s: next(iter([]), x), lambda x, s: list(iter(lambda i=iter([1, 2, 0]): next(i), 0)),
    lambda x, s: (lambda: (yield))().gi_frame is not None, lambda x, s: len.__name__, lambda x, s: (lambda a=s.list: a.append(x) or a)(), lambda x, s: min(3, s.n, key=lambda v: -v),
    lambda x, s: eval("1 + 1"), lambda x, s: attempt(lambda: undefined_name), lambda x, s: (lambda a, b=2, *c: (lambda: (a, b, c)))(x)()[1:], lambda x, s: print(end="") is None,  # noqa: F821
]  # fmt: skip
EXCEPTIONS = [
    lambda x, s: raises(ValueError("plain")), lambda x, s: raises(Mistake(3)), lambda x, s: caught(lambda: raises(Mistake(4)), ValueError),
    lambda x, s: caught(lambda: raises(KeyError("k")), ValueError), lambda x, s: caught(lambda: s.list[9], IndexError), lambda x, s: caught(lambda: s.dict["q"], LookupError),
    lambda x, s: caught(lambda: x.missing, AttributeError), lambda x, s: caught(lambda: x + "a", TypeError), lambda x, s: x @ x, lambda x, s: x.view(7), lambda x, s: x[5],
    lambda x, s: torch.cat([x, x[:, :1]], 0), lambda x, s: caught(lambda: x.reshape(4), RuntimeError), lambda x, s: caught(lambda: torch.stack([x, x[0]]), RuntimeError),
    lambda x, s: caught(lambda: x.sum(5), IndexError), lambda x, s: attempt(lambda: [][0]), lambda x, s: attempt(lambda: None + 1), lambda x, s: attempt(lambda: None.shape),
    lambda x, s: attempt(lambda: len(3)), lambda x, s: attempt(lambda: 3()), lambda x, s: attempt(lambda: iter(3)), lambda x, s: attempt(lambda: [] < {}),  # noqa: F632
    lambda x, s: attempt(lambda: raises(StopIteration(3))), lambda x, s: raises(AssertionError("no")), lambda x, s: raises(NotImplementedError), lambda x, s: attempt(raises, 3),
    lambda x, s: attempt(lambda: next(iter(()))), lambda x, s: attempt(lambda: int([])), lambda x, s: attempt(lambda: float("q")), lambda x, s: attempt(lambda: zip([1], [1, 2], strict=True).__next__()),
    lambda x, s: attempt(lambda: list(zip([1], [1, 2], strict=True))), lambda x, s: attempt(lambda: [a for a, b in [(1,)]]), lambda x, s: attempt(lambda: (lambda a, b: 0)(*[1])),
    lambda x, s: attempt(lambda: F.linear(x, x[:, :2])), lambda x, s: attempt(lambda: F.softmax(x, 4)), lambda x, s: attempt(lambda: x.expand(3, 3)), lambda x, s: attempt(lambda: x.permute(0)),
    lambda x, s: attempt(lambda: torch.zeros(-1)), lambda x, s: attempt(lambda: x.squeeze(7)), lambda x, s: attempt(lambda: x.long() @ x), lambda x, s: attempt(lambda: x.transpose(0, 3)),
]  # fmt: skip
PRINTS = [
    lambda x, s: print("text", s.n, sep="-"), lambda x, s: print(s.list, s.dict["a"], end="!"), lambda x, s: print(x.shape, x.dtype), lambda x, s: print(), lambda x, s: print(x),
    lambda x, s: [print(i) for i in range(3)] and x, lambda x, s: print(f"{s.f:.2f}") or x * 2, lambda x, s: print(*s.list), lambda x, s: print(x.sum().item() > 0),
    lambda x, s: print("to a file", file=io.StringIO()), lambda x, s: warnings.warn("careful"), lambda x, s: warnings.warn("old", DeprecationWarning) or x + 1,
    lambda x, s: print(repr(s.box)), lambda x, s: attempt(lambda: print("before") or raises(Mistake(1))), lambda x, s: print(str(Mistake(2)), Mistake(2).args),
    lambda x, s: (print(1), x + 1, print(2))[1], lambda x, s: contextlib.redirect_stdout(io.StringIO()) is not None, lambda x, s: print(tuple(x.size()), x.numel()),
]  # fmt: skip
ALIASING = [
    lambda x, s: x, lambda x, s: (x, x), lambda x, s: [s.tensors[0], s.tensors], lambda x, s: s.list, lambda x, s: (s.list, s.list), lambda x, s: {"a": s.dict, "b": s.dict["b"]},
    lambda x, s: x.view(-1), lambda x, s: x[0], lambda x, s: x.t(), lambda x, s: (x.view(3, 2), x[1:]), lambda x, s: x.clone(), lambda x, s: x.detach(), lambda x, s: x.contiguous(),
    lambda x, s: (x.is_set_to(x), x.is_set_to(x.view(2, 3)), x.is_set_to(x[1:]), x.is_set_to(s.tensors[0])),
    lambda x, s: x.to(torch.float32), lambda x, s: x.float(), lambda x, s: x.expand(2, 3), lambda x, s: x.reshape(6), lambda x, s: x.t().reshape(6), lambda x, s: s.box.v,
    lambda x, s: s.tensors[0].add_(1), lambda x, s: s.tensors[0].mul_(2) is s.tensors[0], lambda x, s: s.tensors[0].view(-1).zero_(), lambda x, s: s.tensors[1][0].fill_(3.0),
    lambda x, s: s.tensors[0].copy_(s.tensors[1]), lambda x, s: s.tensors[1].__setitem__(0, 7.0), lambda x, s: s.tensors[1].t().add_(1), lambda x, s: operator.iadd(s.tensors[0], 1),
    lambda x, s: s.tensors.__setitem__(0, x) or s.tensors, lambda x, s: s.dict.update(b=x) or s.dict["b"] is x, lambda x, s: s.__dict__.update(extra=x) or s.extra, lambda x, s: setattr(s, "list", [x]),
    lambda x, s: setattr(s.box, "v", s.tensors[1]) or s.box.v is s.tensors[1], lambda x, s: s.tensors[0].unsqueeze(0).sub_(2), lambda x, s: [s.tensors[0].exp_(), s.tensors[0] + 0],
    lambda x, s: x.unbind(0), lambda x, s: x.split(1), lambda x, s: x.chunk(2, 1), lambda x, s: (s.tensors[0].masked_fill_(s.tensors[0] > 0, 0), s.tensors), lambda x, s: x.unflatten(0, (1, 2)),
    lambda x, s: torch.add(s.tensors[0], 1, out=s.tensors[1]), lambda x, s: (lambda a: (a.add_(1), a))(s.tensors[0].clone()), lambda x, s: s.nested["k"][1], lambda x, s: s.deque, lambda x, s: s.data,
    lambda x, s: x.squeeze(), lambda x, s: x.unsqueeze(0)[0], lambda x, s: x.swapaxes(0, 1), lambda x, s: x.narrow(0, 0, 1), lambda x, s: x.select(1, 2), lambda x, s: torch.ravel(x), lambda x, s: torch.flatten(x.t()),
]  # fmt: skip
TENSORS = [
    lambda x, s: x.tolist(), lambda x, s: x.sum().item(), lambda x, s: float(x[0, 0]), lambda x, s: int(x.argmax()), lambda x, s: bool((x > 5).any()), lambda x, s: len(x), lambda x, s: x.shape[0] * x.size(1),
    lambda x, s: x.max(1), lambda x, s: x.topk(2).indices, lambda x, s: x.sort(descending=True).values, lambda x, s: x.mean((0, 1), keepdim=True), lambda x, s: x.std(0), lambda x, s: x.unique(),
    lambda x, s: x[x > 0], lambda x, s: x.nonzero(), lambda x, s: torch.where(x > 0, x, -x), lambda x, s: x[..., None, :], lambda x, s: x[[0, 1], [1, 2]], lambda x, s: x[:, ::2], lambda x, s: x[torch.tensor([1, 0])],
    lambda x, s: 1 - x, lambda x, s: 2**x, lambda x, s: x // 0.3, lambda x, s: x % 0.3, lambda x, s: -abs(x), lambda x, s: (x > 0) & (x < 1), lambda x, s: ~(x > 0), lambda x, s: x != x, lambda x, s: x.eq(x).all(),
    lambda x, s: torch.zeros_like(x).type(), lambda x, s: x.new_ones(2), lambda x, s: torch.arange(s.n), lambda x, s: torch.tensor([s.f, 1]), lambda x, s: torch.tensor(s.list, dtype=torch.float64), lambda x, s: torch.full((2,), s.f),
    lambda x, s: x.to(torch.int32).sum(), lambda x, s: x.half() + 1, lambda x, s: (x.dtype, x.device.type, x.layout), lambda x, s: x.is_floating_point() and not x.is_cuda, lambda x, s: x.stride(), lambda x, s: x.requires_grad,
    lambda x, s: x.is_contiguous() and not x.t().is_contiguous(), lambda x, s: F.gelu(x), lambda x, s: F.softmax(x, -1), lambda x, s: F.layer_norm(x, (3,)), lambda x, s: F.pad(x, (1, 1)), lambda x, s: torch.einsum("ij,kj->ik", x, x),
    lambda x, s: torch.is_tensor(x) and not torch.is_tensor(3), lambda x, s: isinstance(x, torch.Tensor), lambda x, s: type(x) is torch.Tensor, lambda x, s: torch.is_grad_enabled(), lambda x, s: torch.get_default_dtype(),
    lambda x, s: [r.sum() for r in x], lambda x, s: torch.manual_seed(3) and torch.rand(2), lambda x, s: F.dropout(x, 0.5, True), lambda x, s: torch.cumsum(x, 1), lambda x, s: x.float().double().dtype, lambda x, s: x.T.shape == (3, 2),
    lambda x, s: torch.cat((x, *s.tensors)), lambda x, s: torch.meshgrid(x[0], x[1], indexing="ij"), lambda x, s: x.apply_(lambda v: v + 1) if s.n > 5 else x, lambda x, s: torch.finfo(x.dtype).eps, lambda x, s: torch.Size([1, 2]).numel(),
    lambda x, s: math.ceil(x.shape[0] / 2), lambda x, s: x.repeat(2, 1).shape, lambda x, s: torch.promote_types(x.dtype, torch.int64), lambda x, s: torch.result_type(x, 3), lambda x, s: x.sum().item() + s.n, lambda x, s: x.numpy().shape,
]  # fmt: skip
C_FUNCTIONS = [
    lambda x, s: PATTERN.match("a12").groups(), lambda x, s: PATTERN.sub(named, "a1 b22"), lambda x, s: [m.span() for m in PATTERN.finditer("a1 b22")], lambda x, s: re.findall(r"\d", "1a2"),
    lambda x, s: re.split(r"[,;]", "a,b;c"), lambda x, s: re.compile("(x)(y)?").fullmatch("x").groups("none"), lambda x, s: PATTERN.search("zz q7").group("a") * x.shape[0], lambda x, s: re.escape("a.b"),
    lambda x, s: attempt(lambda: re.compile("(")), lambda x, s: re.sub("t", lambda m: str(s.n), s.text), lambda x, s: (PATTERN.pattern, PATTERN.groups), lambda x, s: bool(re.match("q", s.text)),
    lambda x, s: json.loads('{"a": [1, 2.5, null]}'), lambda x, s: json.dumps({"a": s.list, "b": s.f}), lambda x, s: hashlib.md5(b"a").hexdigest(), lambda x, s: zlib.crc32(b"abc"), lambda x, s: struct.pack("<if", 1, 2.0),
    lambda x, s: base64.b64encode(b"ab"), lambda x, s: statistics.mean(s.list), lambda x, s: fractions.Fraction(1, 3) + 1 == fractions.Fraction(4, 3), lambda x, s: str(decimal.Decimal("1.10") * 2), lambda x, s: bisect.insort(s.list, 2) or s.list,
    lambda x, s: heapq.nsmallest(2, s.list), lambda x, s: unicodedata.name("a"), lambda x, s: "%s %d %.1f" % (s.text, s.n, s.f), lambda x, s: string.capwords(s.text), lambda x, s: textwrap.wrap(s.text, 4), lambda x, s: datetime.timedelta(days=2).total_seconds(),
    lambda x, s: datetime.date(2024, 2, 29).isoformat(), lambda x, s: math.comb(5, 2) + math.gcd(12, 18), lambda x, s: int.from_bytes(b"\x01\x02", "big"), lambda x, s: ast.literal_eval("[1, (2, 3)]"), lambda x, s: uuid.UUID(int=3).hex,
]  # fmt: skip
RANDOM_AND_TIME = [
    lambda x, s: x * random.random(), lambda x, s: [random.randint(1, 9) for _ in range(3)], lambda x, s: random.choice(s.list), lambda x, s: random.shuffle(s.list) or s.list, lambda x, s: random.sample(range(9), 3),
    lambda x, s: (random.seed(4), random.random(), x * random.uniform(0, 1)), lambda x, s: random.Random(3).random() * x, lambda x, s: np.random.rand(2).tolist(), lambda x, s: np.random.default_rng(3).integers(9), lambda x, s: x if random.random() > 0.5 else -x,
    lambda x, s: time.time() > 1e9, lambda x, s: time.perf_counter() <= time.perf_counter(), lambda x, s: (time.sleep(0), x + 1), lambda x, s: datetime.datetime.now().year > 2000, lambda x, s: (random.getstate() is not None, x * 2),
    lambda x, s: (torch.rand(2), torch.randn(1), random.random()), lambda x, s: torch.randint(0, 9, (3,)), lambda x, s: (torch.manual_seed(7), torch.rand(1), random.random())[1:], lambda x, s: F.dropout(x, 0.5) + random.random(),
]  # fmt: skip
ITERATORS = [
    lambda x, s: half(iter(s.list)), lambda x, s: (lambda it: (next(it), list(it)))(zip(s.list, "abc")), lambda x, s: (lambda it: (next(it), it, list(it)))(iter([x, 2, 3]))[::2], lambda x, s: [next(s.iterator), x, list(s.iterator)],
    lambda x, s: (half(s.generator), s.list)[0], lambda x, s: [v * x for v in s.generator], lambda x, s: (next(s.enumerated), list(s.enumerated)), lambda x, s: dict(zip(s.dict, map(str, s.list))), lambda x, s: list(zip(s.iterator, s.iterator)),
    lambda x, s: (lambda it: (next(it, None), next(it, None)))(filter(None, [0, x.shape[0]])), lambda x, s: next(COUNT) - next(COUNT), lambda x, s: (lambda m: (next(m), list(m)))(map(lambda v: v * x, s.list)), lambda x, s: list(itertools.islice(s.generator, 1)),
    lambda x, s: (lambda t: [next(t[0]), list(t[1])])(itertools.tee(s.list)), lambda x, s: types.MappingProxyType(s.dict)["a"], lambda x, s: list(types.MappingProxyType({"k": x}).items()), lambda x, s: attempt(lambda: next(iter(()))),
    lambda x, s: list(reversed(s.order)), lambda x, s: iter(s.list), lambda x, s: (lambda it: (list(it), list(it)))(iter(s.dict.items())), lambda x, s: s.dict.keys() & {"a", "q"}, lambda x, s: max(s.dict.items(), key=lambda p: p[0])[0],
]  # fmt: skip
KEYS = [
    lambda x, s: [WORDS[k] for k in ("one", ("t", 2), Colour.RED, torch.float32, int, None, 2.5, frozenset({1}), len)], lambda x, s: WORDS.get(Colour.BLUE, "no"), lambda x, s: {Colour.BLUE: x}[Colour.BLUE], lambda x, s: s.keyed[s.layer],
    lambda x, s: s.keyed[s.layer.weight], lambda x, s: {s.layer.weight: 1, s.layer.bias: 2}[s.layer.bias], lambda x, s: s.layer in s.keyed, lambda x, s: {type(x): 1, x.dtype: 2, x.device: 3}[x.dtype], lambda x, s: s.keyed.update({s.layer.bias: x}) or len(s.keyed),
    lambda x, s: {Key(1): x, Key(2): 2}[Key(1)], lambda x, s: s.keyed[Key(1)], lambda x, s: {x: 1}[x], lambda x, s: x in {x: 1}, lambda x, s: attempt(lambda: {[]: 1}), lambda x, s: {(1, x.shape): 2}[1, x.shape], lambda x, s: {Pair(1, 2): x}[(1, 2)],
    lambda x, s: {len: x}[len], lambda x, s: [type(k).__name__ for k in s.keyed], lambda x, s: {1: "a", True: "b", 1.0: "c"}, lambda x, s: {b"a": x}[b"a"],
]  # fmt: skip
CONTEXTS = [
    lambda x, s: under(torch.autocast("cpu", torch.bfloat16), lambda: (x @ x.t()).dtype), lambda x, s: under(torch.autocast("cpu", enabled=False), lambda: x @ x.t()), lambda x, s: under(sdpa_kernel(SDPBackend.MATH), lambda: F.scaled_dot_product_attention(x[None], x[None], x[None])),
    lambda x, s: under(torch.device("meta"), lambda: torch.zeros(2).device.type), lambda x, s: under(torch.device("cpu"), lambda: torch.ones(2) + x[:, 0]), lambda x, s: under(torch.profiler.record_function("f"), lambda: x * 2), lambda x, s: under(torch.no_grad(), lambda: (x * 2, torch.is_grad_enabled())),
    lambda x, s: under(torch.set_grad_enabled(False), lambda: torch.is_grad_enabled()), lambda x, s: under(torch.inference_mode(), lambda: (x * 2).is_inference()), lambda x, s: under(contextlib.suppress(ValueError), lambda: raises(ValueError("q"))), lambda x, s: under(contextlib.ExitStack(), lambda: x),
    lambda x, s: under(torch.autograd.graph.save_on_cpu(), lambda: x * 2), lambda x, s: under(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), lambda: x * 2), lambda x, s: under(torch.random.fork_rng(devices=[]), lambda: torch.rand(1)), lambda x, s: under(contextlib.nullcontext(3), lambda: x),
    lambda x, s: under(torch.autograd.profiler.profile(enabled=False), lambda: x + 1), lambda x, s: under(torch.amp.autocast("cpu"), lambda: F.linear(x, x).dtype), lambda x, s: (torch.set_default_dtype(torch.float64), torch.ones(1).dtype, torch.set_default_dtype(torch.float32))[1], lambda x, s: under(torch.backends.mkldnn.flags(enabled=False), lambda: x * 2),
    lambda x, s: under(warnings.catch_warnings(), lambda: x + 1), lambda x, s: under(torch.testing._internal.common_utils.freeze_rng_state() if s.n > 9 else contextlib.nullcontext(), lambda: x), lambda x, s: under(torch.autograd.set_detect_anomaly(False), lambda: x * 2), lambda x, s: (torch.set_default_device("cpu"), torch.ones(2).device.type, torch.set_default_device(None))[1],
]  # fmt: skip
KINDS = [
    lambda x, s: x.to_sparse().to_dense(), lambda x, s: torch.sparse.mm(x.to_sparse(), x.t()), lambda x, s: torch.nested.nested_tensor([x[0], x[1, :2]]).unbind()[1], lambda x, s: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize(), lambda x, s: hooked(x, s),
    lambda x, s: lazily(x), lambda x, s: scripted(x, 3), lambda x, s: scripted(x * 2, s.n) + 1, lambda x, s: awaited(x), lambda x, s: type(later).__name__, lambda x, s: inspect.iscoroutinefunction(later), lambda x, s: x.to_mkldnn().to_dense(), lambda x, s: x.to(torch.complex64).abs(),
    lambda x, s: torch.nn.Parameter(x).requires_grad, lambda x, s: torch.jit.is_scripting(), lambda x, s: torch.fx.symbolic_trace(torch.nn.ReLU())(x), lambda x, s: torch.linalg.eigvals(x[:, :2]).dtype, lambda x, s: torch.ops.aten.add.Tensor(x, 1), lambda x, s: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
    lambda x, s: pickle.loads(pickle.dumps(s.list)), lambda x, s: copy.deepcopy(s.layer)(x).shape, lambda x, s: torch.distributed.is_available() in (True, False), lambda x, s: x.register_hook if x.requires_grad else 0, lambda x, s: torch.get_default_device().type, lambda x, s: torch._dynamo.is_compiling() if s.n > 9 else 1,
    lambda x, s: torch.compiler.is_compiling() in (True, False), lambda x, s: s.layer.register_forward_hook(lambda m, a, o: o * 2) and s.layer(x), lambda x, s: torch.func.grad(lambda v: (v * v).sum())(x), lambda x, s: torch.vmap(lambda r: r.sum())(x), lambda x, s: x.numpy().sum(), lambda x, s: np.asarray(x).tolist(),
]  # fmt: skip


def filtered(x, how, **options):
    """Warnings in a region with filters of its own, and behind it."""
    with warnings.catch_warnings(**options) as seen:
        if how:
            warnings.simplefilter(how)
        warnings.warn("inside")
        x = x * 2
    warnings.warn("behind")
    return x, seen and [str(w.message) for w in seen]


def named_filter(x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a.*", category=DeprecationWarning)
        warnings.warn("abc", DeprecationWarning)
        warnings.warn("xbc", DeprecationWarning)
        warnings.resetwarnings()
        warnings.warn(FutureWarning("an object"))
    return x + 1


def counted(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("first")
        n = len(seen)
        warnings.warn("second")
    return x + n, len(seen)


class Shelf:
    """Items by number alone: no `__iter__`, no `__contains__`."""

    def __init__(self, *items):
        self.items = items

    def __getitem__(self, i):
        return self.items[i]


WARNINGS = [
    lambda x, s: filtered(x, "ignore"), lambda x, s: filtered(x, "always"), lambda x, s: filtered(x, None), lambda x, s: filtered(x, "always", record=True), lambda x, s: attempt(lambda: filtered(x, "error")),
    lambda x, s: filtered(x, "error"), lambda x, s: named_filter(x), lambda x, s: counted(x), lambda x, s: warnings.warn("text", int), lambda x, s: warnings.warn(DeprecationWarning("object")), lambda x, s: under(warnings.catch_warnings(), lambda: warnings.warn("in")),
]  # fmt: skip
MEMBERS = [
    lambda x, s: (1 in torch.tensor([1, 2]), 3 in torch.tensor([1, 2])), lambda x, s: (x[0, 0] in x, 9.0 in x, x + 1), lambda x, s: attempt(lambda: "a" in x), lambda x, s: x * 2 if 0 in torch.arange(s.n) else x, lambda x, s: [v in torch.ones(2) for v in (True, 1, 2.5)],
    lambda x, s: (2 in Shelf(1, 2), 5 in Shelf(1, 2), x), lambda x, s: (s.n in Shelf(s.n, x), list(Shelf(x, 1))), lambda x, s: (torch.allclose(x, x), torch.allclose(x, x + 1)), lambda x, s: x.isclose(x + 1).any().item(),
]  # fmt: skip


def noting(log, n):
    """Notes what happens to it; goes on after ValueError, ends with a value after KeyError."""
    try:
        while True:
            try:
                log.append((yield n))
            except ValueError as e:
                log.append(str(e))
    except GeneratorExit:
        log.append("exit")
        raise
    except KeyError:
        return "key"
    finally:
        log.append("end")


def through(log, inner):
    try:
        log.append((yield from inner))
        yield "more"
    finally:
        log.append("out")


class Own:
    """An iterator with `throw` and `close` of its own."""

    def __init__(self, log):
        self.log = log

    def __iter__(self):
        return self

    def __next__(self):
        return 5

    def throw(self, e):
        self.log.append(type(e).__name__)
        raise StopIteration(7)

    def close(self):
        self.log.append("closed")
        raise OSError("in close")


def entered(log, make, *steps):
    """What a generator that was begun says to each step."""
    g = make(log)
    next(g)
    return [attempt(step, g) for step in steps], log


def left_alone(x, log):
    g = noting(log, 1)
    next(g)
    log.append("before")
    return x * len(log)


def dropped(x, log):
    for _ in noting(log, 1):
        break
    log.append("after")
    g = noting(log, 2)
    next(g)
    g = None
    return x * len(log)


def nested(log):
    return through(log, through(log, noting(log, 1)))


GENERATORS = [
    lambda x, s: (x, entered(s.list, nested, lambda g: g.close(), next)), lambda x, s: (x, entered(s.list, nested, lambda g: g.send(x), lambda g: g.throw(ValueError("v")), lambda g: g.throw(KeyError(1)))),
    lambda x, s: (x, entered(s.list, nested, lambda g: g.throw(TypeError("t")), next)), lambda x, s: (x, entered(s.list, lambda log: through(log, Own(log)), lambda g: g.throw(OSError("o")), next)),
    lambda x, s: (x, entered(s.list, lambda log: through(log, Own(log)), lambda g: g.close())), lambda x, s: (x, entered(s.list, lambda log: through(log, [1, 2]), lambda g: g.throw(OSError("o")))),
    lambda x, s: (lambda o: (iter(o) is o, next(iter(o)) * x, [v for v, _ in zip(o, "ab")], type(iter(o)).__name__))(Own(s.list)), lambda x, s: (left_alone(x, s.list), s.list), lambda x, s: dropped(x, s.list), lambda x, s: left_alone(x, s.list) + x.sum().item(),
]  # fmt: skip


class Shop(type):
    """A metaclass with data, methods and descriptors of its own."""

    goods = {}
    price = 2

    def make(cls):
        if cls not in cls.goods:
            cls.goods[cls] = []
        cls.goods[cls].append(cls.price)
        return cls.goods[cls]

    @property
    def total(cls):
        return sum(cls.goods.get(cls, ())) + cls.price

    @classmethod
    def cheaper(mcs):
        mcs.price -= 1
        return mcs.price

    def __getattr__(cls, name):
        if name.startswith("w"):
            return name + cls.__name__
        raise AttributeError(name)


class Goods(metaclass=Shop):
    pass


def sold(x):
    Shop.goods, Shop.price = {}, 4
    return [x * len(Goods.make()), x * Goods.total, Goods.make(), Goods.wide, attempt(lambda: Goods.none), Goods.goods]


METACLASSES = [
    lambda x, s: (x * len(Goods.make()), Goods.goods.clear())[0], lambda x, s: [len(Goods.make()) - len(Goods.make()), Goods.total > 0], lambda x, s: sold(x), lambda x, s: (Goods.wide, hasattr(Goods, "none"), Goods.__name__),
]  # fmt: skip


class Twig:
    """A copy keeps its parent."""

    def __init__(self, v, parent=None):
        self.v, self.parent, self.twigs = v, parent, []

    def __deepcopy__(self, memo):
        new = memo[id(self)] = Twig(copy.deepcopy(self.v, memo), memo.get(id(self.parent)))
        new.twigs = [copy.deepcopy(t, memo) for t in self.twigs]
        return new


def grown(x):
    tree = Twig(x)
    tree.twigs = [Twig(x, tree), Twig([x], tree)]
    new = copy.deepcopy(tree)
    return new.v, new.twigs[0].parent is new, new.twigs[0].v is new.v, new.twigs[1].v


class Mixin:
    def __init__(self, **rest):
        super().__init__(**rest)


class Mixed(Mixin):
    def __init__(self, a, **rest):
        super().__init__(**rest)
        self.a = a


class Newed:
    def __new__(cls, *args):
        return super().__new__(cls, *args)


class OnlyNext:
    def __next__(self):
        return 1


def refused(x):
    """What object's own methods, and iter(), do not take."""
    made = [lambda: Mixed(1, b=2), lambda: Mixed(x).a, lambda: object().__init__(1), lambda: Newed(1), lambda: type(Newed()), lambda: OnlyNext().__init__(2), lambda: iter(OnlyNext())]
    return [attempt(fn) for fn in made]


def finalised(log):
    box = Twig(1)
    weakref.finalize(box, log.append, "gone")
    ref = weakref.ref(box, lambda r: log.append("called"))
    alone = weakref.ref(Twig(2))
    del box
    return log, ref(), alone()


COPIES = [
    lambda x, s: grown(x), lambda x, s: (lambda memo: (copy.deepcopy([s.tensors[0]], memo), copy.deepcopy(s.tensors, memo)))({}), lambda x, s: (x, finalised(s.list)), lambda x, s: (x, weakref.ref(Twig(1)))[1]() is None,
    lambda x, s: attempt(lambda: copy.deepcopy(x, memo=None)) is not x, lambda x, s: refused(x),
]  # fmt: skip


def told(e):
    """An exception with all that can be asked of it."""
    if e is None:
        return None
    inner = [told(i) for i in getattr(e, "exceptions", ())]
    return type(e).__name__, str(e), inner, getattr(e, "__notes__", None), told(e.__cause__), type(e.__context__).__name__


def group(*given):
    return ExceptionGroup("g", [e if isinstance(e, Exception) else e("of " + e.__name__) for e in given])


def sorted_out(make, log, again=None):
    """The handlers that a group meets, and what leaves them."""
    try:
        try:
            make()
        except* (ValueError, KeyError) as e:
            log.append(("first", told(e), len(e.exceptions)))
            if again == "bare":
                raise
            if again == "new":
                raise OSError("new")
            if again == "from":
                raise OSError("from") from e
        except* TypeError as e:
            log.append(("second", told(e)))
            if again:
                raise RuntimeError("second")
        else:
            log.append("else")
        finally:
            log.append("finally")
    except BaseException as e:
        return told(e), log
    return log


def wrong_kind(kind):
    try:
        raise ValueError("v")
    except* kind:
        pass


def in_turn(x, log):
    for e in (ValueError("a"), group(ValueError, KeyError), group(OSError)):
        try:
            try:
                raise e
            except* ValueError as g:
                x = x * len(g.exceptions) + 1
                log.append(g.message)
        except ExceptionGroup as left:
            log.append(left.exceptions)
    return x, log


def noted():
    e = group(ValueError, group(TypeError, KeyError))
    e.add_note("a note")
    raise e from OSError("why")


EXCEPTION_GROUPS = [
    lambda x, s: (x, sorted_out(lambda: None, s.list)), lambda x, s: (x, sorted_out(lambda: raises(group(ValueError, TypeError)), s.list)), lambda x, s: (x, sorted_out(lambda: raises(ValueError("alone")), s.list)),
    lambda x, s: (x, sorted_out(lambda: raises(group(ValueError, group(TypeError, KeyError, OSError))), s.list)), lambda x, s: (x, sorted_out(lambda: raises(group(OSError)), s.list)), lambda x, s: (x, sorted_out(lambda: raises(OSError("alone")), s.list)),
    lambda x, s: (x, sorted_out(lambda: raises(group(ValueError, OSError)), s.list, "bare")), lambda x, s: (x, sorted_out(lambda: raises(group(ValueError, TypeError, group(KeyError))), s.list, "new")),
    lambda x, s: (x, sorted_out(lambda: raises(group(KeyError, OSError)), s.list, "from")), lambda x, s: (x, sorted_out(noted, s.list)), lambda x, s: (x, sorted_out(noted, s.list, "bare")), lambda x, s: (x, sorted_out(lambda: raises(ValueError("alone")), s.list, "bare")),
    lambda x, s: [attempt(lambda: wrong_kind(k)) for k in (int, ExceptionGroup, "text", (KeyError, 3), ValueError)], lambda x, s: in_turn(x, s.list), lambda x, s: (in_turn(x, s.list), x.sum().item()),
]  # fmt: skip


class Rounded:
    def __round__(self, n=None):
        return "rounded", n


def texts_refused(x):
    return [attempt(f) for f in (lambda: f"{None:>5}", lambda: f"{x.shape:>20}", lambda: f"{2.5:d}", lambda: f"{[1]:d}", lambda: format((), "x"))]


def named_class(n):
    class Base:
        def __init_subclass__(cls, name=None, fn=None):
            cls.label = name, fn

    class Local(Base, name=n, fn=2):
        pass

    return Local.label


def evaluated(x, layer):
    layer.eval()
    y = layer(x)
    print(y.shape, len(vars(layer)) > 3, y.sum().item() > -1e9)
    return y * layer.training


MORE = [
    lambda x, s: (x, round(Rounded()), round(Rounded(), 2), round(Rounded(), None), round(Rounded(), ndigits=1)), lambda x, s: (x, texts_refused(x)), lambda x, s: (x, named_class("local")), lambda x, s: evaluated(x, s.layer),
]  # fmt: skip
GROUPS = {
    "lists": LISTS, "dicts": DICTS, "sets and more": SETS_AND_MORE, "strings": STRINGS, "objects": OBJECTS, "functions": FUNCTIONS, "exceptions": EXCEPTIONS,
    "prints": PRINTS, "aliasing": ALIASING, "tensors": TENSORS, "c functions": C_FUNCTIONS, "random and time": RANDOM_AND_TIME,
    "iterators": ITERATORS, "keys": KEYS, "contexts": CONTEXTS, "kinds": KINDS, "warnings": WARNINGS, "members": MEMBERS,
    "exception groups": EXCEPTION_GROUPS, "more": MORE, "copies": COPIES, "generators": GENERATORS, "metaclasses": METACLASSES,
}  # fmt: skip
BEHAVIOURS = {f"{group} {i}": fn for group, rows in GROUPS.items() for i, fn in enumerate(rows)}
