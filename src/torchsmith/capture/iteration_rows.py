"""Rows for what iterates: iter, zip, map, itertools, reduce, any, sum, min, sorted."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from ..codes import Unsupported
from ..graph import tracing
from . import floats, native, policy
from . import protocols as pr
from .attributes import Raised
from .calls import row
from .protocol import Args, Kwargs, Machine
from .world import SCALARS

_cls: Any


@row(iter)
def iter_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 2:
        _compared(m, None)(args[1])
        return m.native(iter, [_compared(m, args[0]), args[1]], {}, plain=True)
    return pr.begin(m, args[0])


@row(next)
def next_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    try:
        return pr.advance(m, args[0])
    except Raised as r:
        if len(args) > 1 and isinstance(r.exc, StopIteration):
            return args[1]
        raise


def _lazy(cls: Any) -> Any:
    def build(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        return m.native(cls, [pr.iterate(m, a) for a in args], kwargs, plain=True)

    return build


for _cls in (zip, itertools.chain, itertools.product, itertools.zip_longest):
    row(_cls)(_lazy(_cls))


def _first_iterable(cls: Any) -> Any:
    def build(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        if "iterable" in kwargs:
            kwargs = {**kwargs, "iterable": pr.iterate(m, kwargs["iterable"])}
        return m.native(cls, [pr.iterate(m, args[0]), *(pr.as_index(m, a) for a in args[1:])] if args else [], kwargs, plain=True)

    return build


for _cls in (enumerate, itertools.islice, itertools.cycle, itertools.pairwise, itertools.combinations, itertools.permutations,
             itertools.combinations_with_replacement, itertools.tee):  # fmt: skip
    row(_cls)(_first_iterable(_cls))


@row(itertools.compress)
def compress_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    given = [*args, *(kwargs[name] for name in ("data", "selectors")[len(args) :] if name in kwargs)]
    if len(given) != 2 or len(args) + len(kwargs) != 2:
        return m.native(itertools.compress, args, kwargs, plain=True)  # refuses it
    return itertools.compress(pr.iterate(m, given[0]), map(interpreted(m, bool), pr.iterate(m, given[1])))


@row(itertools.chain.from_iterable)
def chain_from(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return (x for part in pr.iterate(m, args[0]) for x in _real(m, part))


def _real(m: Machine, value: Any) -> Iterator[Any]:
    try:
        yield from pr.iterate(m, value)
    except Raised as r:
        raise m.leaving(r.exc) from None


@row(reversed)
def reversed_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    f = pr.special(m, type(value), "__reversed__")
    if f is not None:
        made = m.call(f, [value], {})
        return pr.driven(m, made) if hasattr(type(made), "__next__") else made  # reversed() does not ask what it is
    if issubclass(type(value), (list, tuple, range, str, dict, deque)) or hasattr(type(value), "__reversed__"):
        return m.native(reversed, [value], {})
    if not hasattr(type(value), "__getitem__"):
        raise Raised(TypeError(f"'{type(value).__name__}' object is not reversible"))
    n = pr.length(m, value)
    return iter([pr.getitem(m, value, i) for i in range(n - 1, -1, -1)])


def _calling(m: Machine, fn: Any, *args: Any) -> Any:
    try:
        return m.call(fn, list(args), {})
    except Raised as r:
        raise m.leaving(r.exc) from None


def _truth_of(m: Machine, value: Any) -> bool:
    try:
        return pr.truth(m, value)
    except Raised as r:
        raise m.leaving(r.exc) from None


def interpreted(m: Machine, fn: Any) -> Any:
    """What an iterator of Python's calls in the place of `fn`; where the iterator leaves the capture it gets `fn` itself."""

    def run(*args: Any) -> Any:
        return _calling(m, fn, *args)

    return policy.of_machine(run, fn)


def predicate(m: Machine, fn: Any) -> Any:
    """As `interpreted`, and the answer is True or False; None asks for the truth of the item."""

    def run(x: Any) -> bool:
        return _truth_of(m, x if fn is None else _calling(m, fn, x))

    return policy.of_machine(run, fn)


@row(map)
def map_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.native(map, [interpreted(m, args[0]), *(pr.iterate(m, a) for a in args[1:])], kwargs, plain=True)


@row(itertools.starmap)
def starmap_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return itertools.starmap(interpreted(m, args[0]), map(interpreted(m, tuple), pr.iterate(m, args[1])))


def _filtering(make: Any) -> None:
    row(make)(lambda m, args, kwargs: make(predicate(m, args[0]), pr.iterate(m, args[1])))


for _make in (filter, itertools.filterfalse, itertools.takewhile, itertools.dropwhile):
    _filtering(_make)


@row(itertools.groupby)
def groupby_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    key = kwargs.get("key", args[1] if len(args) > 1 else None)
    return itertools.groupby(pr.iterate(m, args[0]), _compared(m, key))


def _compared(m: Machine, fn: Any) -> Any:
    """As `interpreted`, for what C compares; None gives the item."""

    def run(*args: Any) -> Any:
        made = args[0] if fn is None else _calling(m, fn, *args)
        if native.runs_python(made):
            raise Unsupported("CAP010", at=m.loc(), detail=f"{type(made).__qualname__}.__eq__ called from C")
        return made

    return policy.of_machine(run, fn)


@row(itertools.accumulate)
def accumulate_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    fn = args[1] if len(args) > 1 else kwargs.get("func")
    return itertools.accumulate(pr.iterate(m, args[0]), interpreted(m, fn or operator.add), initial=kwargs.get("initial"))


@row(operator.length_hint)
def length_hint_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if args and any(pr.special(m, type(args[0]), name) for name in ("__len__", "__length_hint__")):
        raise Unsupported("CAP014", at=m.loc(), detail="operator.length_hint of an object that says it in Python")
    return m.native(operator.length_hint, args, kwargs)


@row(functools.reduce)
def reduce_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    it = pr.iterate(m, args[1])
    items = m.listed(it)
    if len(args) > 2:
        items.insert(0, args[2])
    if not items:
        raise Raised(TypeError("reduce() of empty iterable with no initial value"))
    out = items[0]
    for x in items[1:]:
        out = m.call(args[0], [out, x], {})
    return out


@row(any)
def any_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    for x in _stepped(m, args[0]):
        if pr.truth(m, x):
            return True
    return False


@row(all)
def all_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    for x in _stepped(m, args[0]):
        if not pr.truth(m, x):
            return False
    return True


def _stepped(m: Machine, value: Any) -> Iterator[Any]:
    """Iterate inside a row: the program's exceptions stay Raised."""
    it = pr.iterate(m, value)
    while True:
        try:
            x = pr.advance(m, it)
        except Raised as r:
            if isinstance(r.exc, StopIteration):
                return
            raise
        yield x


@row(sum)
def sum_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    out = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if isinstance(out, (str, bytes, bytearray)):
        return m.native(sum, [[], out], {}, plain=True)  # refused, with what to do instead
    items = list(_stepped(m, args[0]))
    if all(type(x) in floats.NUMBERS for x in (out, *items)) and any(type(x) is float or floats.varies(x) for x in items):
        return floats.apply(m, floats.total, [out, *items])  # from 3.12 on Python's sum is better than one addition after the other
    for x in items:
        out = pr.binary(m, "+", out, x)
    return out


_EMPTY = "iterable argument is empty" if sys.version_info >= (3, 12) else "arg is an empty sequence"


def _extreme(fn: Any, sign: str) -> Any:
    def pick(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        key = kwargs.get("key")
        items = list(_stepped(m, args[0])) if len(args) == 1 else list(args)
        if not items:
            if "default" in kwargs:
                return kwargs["default"]
            raise Raised(ValueError(f"{fn.__name__}() {_EMPTY}"))
        # among integers only: of an integer and a float, Python gives the one that is chosen, of its own type
        if key is None and any(type(x) is torch.SymInt for x in items) and all(type(x) in (int, torch.SymInt) for x in items):
            best = items[0]
            for x in items[1:]:
                best = m.symbolic(torch.sym_min if fn is min else torch.sym_max, best, x)
            return best
        if key is None and any(floats.is_told_by_running(x) for x in items) and all(type(x) in (float, torch.SymFloat) for x in items):
            return floats.extreme(m, fn, items)
        if key is None and not m.splits and _is_choice(items):
            return _choice(m, sign, items)
        keys = items if key is None else [m.call(key, [x], {}) for x in items]
        best = 0
        for i in range(1, len(items)):
            if pr.truth(m, pr.compare(m, sign, keys[i], keys[best])):
                best = i
        return items[best]

    return pick


def _is_choice(items: list[Any]) -> bool:
    """Are these tensors with one element whose values nobody knows, of one dtype, and perhaps numbers that fit it?"""
    tensors = [x for x in items if issubclass(type(x), torch.Tensor)]
    numbers = [x for x in items if type(x) in (int, float, bool)]
    if len(tensors) + len(numbers) < len(items) or len({(t.dtype, t.shape) for t in tensors}) != 1 or tensors[0].numel() != 1:
        return False
    fit = all(torch.result_type(tensors[0], x) == tensors[0].dtype for x in numbers)
    return fit and len(items) > 1 and any(tracing.current().known_value(t, "item") is NotImplemented for t in tensors)


def _choice(m: Machine, sign: str, items: list[Any]) -> Any:
    """min and max in the graph, where the frame may not be split: as Python compares, the first where none is better."""
    best = items[0]
    for x in items[1:]:
        better = pr.compare(m, sign, x, best)
        if type(better) is bool:
            best = x if better else best
        else:
            best = m.record("function", torch.where, (better, x, best), {})
    if any(not issubclass(type(x), torch.Tensor) for x in items) and issubclass(type(best), torch.Tensor):
        m.recorder.info(best).node.meta["or_number"] = True  # what Python gives may be the number
    return best


row(min)(_extreme(min, "<"))
row(max)(_extreme(max, ">"))


class _Key:
    """A sort key compared by the machine."""

    __slots__ = ("m", "value")

    def __init__(self, m: Machine, value: Any) -> None:
        self.m, self.value = m, value

    def __lt__(self, other: Any) -> bool:
        try:
            return pr.truth(self.m, pr.compare(self.m, "<", self.value, other.value))
        except Raised as r:
            raise self.m.leaving(r.exc) from None


_COMPARED = type(functools.cmp_to_key(max))


def _sorted_items(m: Machine, items: list[Any], kwargs: Kwargs) -> list[Any]:
    key = kwargs.get("key")
    keys = items if key is None else [m.call(key, [x], {}) for x in items]
    wrap = keys if all(type(k) in SCALARS or type(k) is _COMPARED for k in keys) else [_Key(m, k) for k in keys]

    def ordered() -> list[int]:
        return sorted(range(len(items)), key=wrap.__getitem__, reverse=bool(kwargs.get("reverse", False)))

    return [items[i] for i in m.native(ordered, [], {}, plain=True)]


@row(sorted)
def sorted_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return _sorted_items(m, pr.as_list(m, args[0]), kwargs)


def _bisecting(fn: Any) -> None:
    def find(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        return m.native(fn, args, {k: m.callback(v) if k == "key" else v for k, v in kwargs.items()})

    row(fn)(find)


for _fn in (bisect.bisect_left, bisect.bisect_right, bisect.insort_left, bisect.insort_right):
    _bisecting(_fn)


@row(math.prod)
def prod_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    out = kwargs.get("start", 1)
    for x in _stepped(m, args[0]):
        out = pr.binary(m, "*", out, x)
    return out
