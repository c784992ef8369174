"""Rows for Python's builtins and the standard library's C functions: isinstance, getattr, zip, sorted, itertools ..."""

from __future__ import annotations

import abc
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import logging
import math
import operator
import os
import reprlib
import sys
import types
import typing
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..codes import Unsupported
from . import arrays, calls, floats, policy, torch_rows
from . import attributes as at
from . import protocols as pr
from .arrays import ArrayMethod, ArrayValue
from .attributes import Raised
from .calls import Args, Kwargs, row
from .opcodes import NULL
from .protocol import Machine
from .source import Attr, Computed, FixedObject
from .world import MISSING, PINNED_TYPES, SCALARS, Identity, container_base, is_constant, own_dict

Tensor = torch.Tensor
Function = types.FunctionType
_cls: Any
_fn: Any


# ---------------------------------------------------------------- types and attributes


def type_of(m: Machine, value: Any) -> type:
    if issubclass(type(value), Tensor):
        return m.recorder.info(value).cls  # type: ignore[no-any-return]
    if type(value) is ArrayValue:
        return value.cls
    track = m.world.tracks.get(id(value))
    if track is not None:
        m.world.use(track)
    if issubclass(type(value), (calls.TensorMethod, ArrayMethod)):
        return types.BuiltinMethodType
    return int if type(value) is Identity else at.NUMBERS.get(type(value), type(value))


@row(type)
def type_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1:
        return type_of(m, args[0])
    cls = m.native(type, args, kwargs, plain=True)
    m.world.fresh_pinned.add(id(cls))
    m.world.keep.append(cls)
    return cls


@row(isinstance)
def isinstance_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    value, classes = args
    if issubclass(type(classes), tuple):
        return any(isinstance_(m, [value, c], {}) for c in classes)
    if issubclass(type(classes), types.UnionType):
        return any(isinstance_(m, [value, c], {}) for c in classes.__args__)
    t = type_of(m, value)
    if issubclass(type(value), Tensor):
        if issubclass(type(classes), type) and issubclass(t, classes):
            return True
        if type(classes) is type(torch.FloatTensor):  # as torch.FloatTensor: a dtype, a layout and a device
            return (value.dtype, value.layout, value.is_cuda) == (classes.dtype, classes.layout, classes.is_cuda)
        mark = {torch.nn.Parameter: "_is_param", torch.nn.Buffer: "_is_buffer"}.get(classes)
        return mark is not None and pr.truth(m, getattr_(m, [value, mark, False], {}))
    check = pr.special(m, type(classes), "__instancecheck__")
    if check is not None and type(classes).__module__ not in ("abc", "typing", "enum") and not type(classes).__module__.startswith("torch"):
        return pr.truth(m, m.call(check, [classes, value], {}))
    if t in (torch.SymInt, torch.SymFloat, torch.SymBool):
        plain = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[t]
        if classes in (int, float, bool):
            return issubclass(plain, classes)
    if getattr(type(classes), "__instancecheck__", None) in _PLAIN_CHECKS:
        return _is_subclass(m, t, classes)  # isinstance would ask the object for __class__
    if type(value) is ArrayValue:
        raise arrays.refuse(m, "isinstance() of an array and a class with a check of its own")
    return m.native(isinstance, [value, classes], {}, plain=True)


_PLAIN_CHECKS = (type.__instancecheck__, abc.ABCMeta.__instancecheck__)



def _is_subclass(m: Machine, t: type, cls: Any) -> bool:
    """issubclass(t, cls): what an abstract class was told by `register` may change, so that is asked again before each call."""
    found: bool = m.native(issubclass, [t, cls], {}, plain=True)
    settled = not issubclass(type(cls), abc.ABCMeta) or cls in t.__mro__ or id(t) in m.world.fresh_pinned
    if not settled and not (policy.is_trusted(t.__module__) and policy.is_trusted(cls.__module__)):
        m.world.guard(Computed(issubclass, (t, cls), ()), "equals", found)
    return found


@row(issubclass)
def issubclass_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 2 and issubclass(type(args[1]), tuple):
        return any(issubclass_(m, [args[0], c], {}) for c in args[1])
    if len(args) == 2 and issubclass(type(args[0]), type) and issubclass(type(args[1]), type):
        return _is_subclass(m, *args)
    return m.native(issubclass, args, {}, plain=True)


@row(callable)
def callable_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    type_of(m, args[0])
    return callable(args[0]) or issubclass(type(args[0]), (calls.TensorMethod, ArrayMethod))


@row(getattr)
def getattr_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 3:
        return at.attr_or(m, args[0], args[1], args[2])
    return at.load_attr(m, args[0], args[1])


@row(hasattr)
def hasattr_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return at.attr_or(m, args[0], args[1], MISSING) is not MISSING


@row(setattr)
def setattr_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    at.store_attr(m, *args)


@row(delattr)
def delattr_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    at.delete_attr(m, *args)


@row(torch.nn.Module.__setattr__)
def module_setattr(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    at.module_setattr(m, *args)


@row(torch.nn.Module.__delattr__)
def module_delattr(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    track = m.world.of(args[0])
    if track is None:
        return m.inline(torch.nn.Module.__delattr__, args, kwargs)
    at.load_attr(m, *args)
    m.world.set_attr(track, args[1], at.DELETED)


@row(torch.nn.Module.__getattr__)
def module_getattr(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return at._module_attr(m, args[0], args[1], m.world.of(args[0]))


@row(torch.nn.Module.__call__)
def module_call(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return calls._call_module(m, args[0], args[1:], kwargs)


@row(vars)
def vars_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        raise Unsupported("CAP014", at=m.loc(), detail="vars()")
    return at.load_attr(m, args[0], "__dict__")


@row(id)
def id_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    obj = args[0]
    found = Identity(id(m.recorder.real_tensor(obj) if issubclass(type(obj), Tensor) else m.world.canonical(obj)))
    found.of = obj
    m.world.tell_apart(obj)
    return found


def blank(t: type) -> Any:
    """An instance without attributes of a class that adds nothing in C to object, else None."""
    try:
        return types.SimpleNamespace.__new__(t) if issubclass(t, types.SimpleNamespace) else object.__new__(t)
    except TypeError:
        return None


def _copied(m: Machine, obj: Any, memo: dict[int, Any], deep: bool) -> Any:
    """copy.copy and copy.deepcopy, by the protocol's parts that Python objects use."""
    t = type(obj)
    if t in SCALARS or is_constant(obj) or issubclass(t, PINNED_TYPES) or issubclass(t, (types.MethodType, enum.Enum)):
        return obj
    key = id(m.world.canonical(obj))
    if deep and key in memo:
        return memo[key]
    if t is ArrayValue:
        memo[key] = obj if obj.is_scalar else arrays.method(m, obj, "copy", [], {})
        return memo[key]
    if issubclass(t, Tensor):
        memo[key] = m.record("method", "clone", (obj,), {}) if deep else m.record("method", "view_as", (obj, obj), {})
        return memo[key]
    own = pr.special(m, t, "__deepcopy__" if deep else "__copy__")
    if own is not None:
        out = m.call(own, [obj, {}] if deep else [obj], {})
        memo[key] = out
        return out
    if issubclass(t, torch.nn.Module) or pr.special(m, t, "__reduce_ex__") or pr.special(m, t, "__getstate__"):
        raise Unsupported("CAP011", at=m.loc(), detail=f"a copy of a {t.__name__}")

    def part(x: Any) -> Any:
        return _copied(m, x, memo, True) if deep else x

    if t is tuple:
        return tuple(part(x) for x in obj)
    base: Any = container_base(t)
    if base is None and blank(t) is None:
        raise Unsupported("CAP011", at=m.loc(), detail=f"a copy of a {t.__name__}")
    track = m.world.of(obj)
    new: Any = base.__new__(t) if base is not None else blank(t)
    memo[key] = new
    if base is not None:
        body = m.world.image(track) if track is not None else obj
        if issubclass(base, dict):
            if base is defaultdict:
                new.default_factory = body.default_factory
            for k, v in dict.items(body):
                base.__setitem__(new, k, part(v))
        elif base is set:
            set.update(new, body)
        else:
            base.extend(new, [part(x) for x in body])
    if own_dict(obj if track is None else track.obj) is not None and base is not t:
        d = at.load_attr(m, obj, "__dict__")
        for k, v in m.mapped(d).items():
            new.__dict__[k] = part(v)
    return new


@row(copy.deepcopy)
def deepcopy_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return _copied(m, args[0], {}, True)


@row(copy.copy)
def copy_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return _copied(m, args[0], {}, False)


@row(hash)
def hash_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    f = pr.special(m, type(args[0]), "__hash__")
    if f is not None:
        return pr.outcome(m, "__hash__", f, [args[0]])
    if issubclass(type(args[0]), Tensor) or m.world.of(args[0]) is not None:
        raise Unsupported("CAP011", at=m.loc(), detail="hash() of an object from outside")
    return m.native(hash, args, {})


@row(super)
def super_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        frame = m.frames[-1]
        names = frame.code.names
        cell = frame.fast[names.index("__class__")]
        cls = m.load_cell(cell, "__class__") if type(cell) is types.CellType else cell
        first = m.taken_up(frame.fast[0])
        if type(first) is types.CellType:
            first = m.load_cell(first)
        args = [cls, first]
    if issubclass(type(args[1]), Tensor):
        raise Unsupported("CAP021", at=m.loc(), detail="super() of a tensor")
    return m.native(super, args, {}, plain=True)


@row(dir)
def dir_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    raise Unsupported("CAP014", at=m.loc(), detail="dir()")


@row(globals)
def globals_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    g = m.frames[-1].globals
    return m.world.wrap(g, FixedObject(g, "globals()"))


@row(locals)
def locals_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    frame = m.frames[-1]
    if frame.names is not None:
        return frame.names

    out = {}
    for name, value in zip(frame.code.names, frame.fast):
        if type(value) is types.CellType:
            try:
                value = m.load_cell(value, name)
            except Raised:
                continue
        if value is not NULL:
            out[name] = value
    return out


# ---------------------------------------------------------------- conversions


@row(bool)
def bool_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return pr.truth(m, args[0]) if args else False


@row(operator.truth)
def truth_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return pr.truth(m, args[0])


@row(operator.not_)
def not_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return not pr.truth(m, args[0])


@row(len)
def len_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return pr.length(m, args[0])


def _number(cls: type, name: str) -> Any:
    def convert(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        if args:
            value = args[0]
            if issubclass(type(value), Tensor):
                return m.tensor_value(value, name, f"{cls.__name__}(tensor)", args[1:], kwargs)
            if type(value) is ArrayValue:
                return arrays.value_of(m, value, name)
            for special in (name,) if issubclass(type(value), (int, float, complex)) else (name, "__index__"):
                f = pr.special(m, type(value), special)
                if f is not None:
                    made = pr.outcome(m, special, f, [value])
                    return made if special == name else convert(m, [made], {})
            if floats.varies(value):
                return value if cls is float and type(value) is torch.SymFloat else floats.apply(m, cls, args, kwargs)
            if type(value) in (torch.SymInt, torch.SymFloat, torch.SymBool):
                if cls is int:
                    return value if type(value) is torch.SymInt else m.symbolic(torch.sym_int, value)
                return m.symbolic(torch.sym_float, value)
        return m.native(cls, args, kwargs)

    return convert


for _cls, _name in ((int, "__int__"), (float, "__float__"), (complex, "__complex__")):
    row(_cls)(_number(_cls, _name))


@row(str)
def str_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and not kwargs:
        return pr.to_str(m, args[0])
    return m.native(str, args, kwargs)


@row(repr)
def repr_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return pr.to_str(m, args[0], "__repr__")


@row(format)
def format_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return pr.to_str(m, args[0], "__format__", args[1] if len(args) > 1 else "")


def _collect(cls: type) -> Any:
    def build(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        if not args:
            return cls()
        return m.native(cls, [pr.iterate(m, args[0])], kwargs, plain=True)

    return build


for _cls in (list, tuple, set, frozenset):
    row(_cls)(_collect(_cls))


@row(torch.Size)
def size_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.native(torch.Size, [m.listed(args[0])] if args else [], {}, plain=True)


@row(deque)
def deque_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.native(deque, [pr.iterate(m, args[0]), *args[1:]] if args else [], kwargs, plain=True)


def _mapping(cls: type) -> Any:
    def build(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        args = list(args)
        lead = [args.pop(0)] if cls is defaultdict and args else []
        if args:
            source = args[0]
            if issubclass(type(source), dict) or pr.special(m, type(source), "keys") or hasattr(type(source), "keys"):
                args = [m.mapped(source)]
            else:
                args = [[tuple(m.unpack(pair, 2)) for pair in m.listed(source)]]
        return m.native(cls, lead + args, kwargs, plain=True)

    return build


for _cls in (dict, OrderedDict, defaultdict):
    row(_cls)(_mapping(_cls))


# ---------------------------------------------------------------- iteration


@row(iter)
def iter_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 2:
        return m.native(iter, [m.callback(args[0]), args[1]], {}, plain=True)
    return pr.iterate(m, args[0])


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
        return m.native(cls, [pr.iterate(m, args[0]), *args[1:]] if args else [], kwargs, plain=True)

    return build


for _cls in (enumerate, itertools.islice, itertools.cycle, itertools.pairwise, itertools.combinations, itertools.permutations,
             itertools.combinations_with_replacement, itertools.tee, itertools.compress):  # fmt: skip
    row(_cls)(_first_iterable(_cls))


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
        return pr.iterator(m, m.call(f, [value], {}))
    if issubclass(type(value), (list, tuple, range, str, dict, deque)) or hasattr(type(value), "__reversed__"):
        return m.native(reversed, [value], {})
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


def _interpreted(m: Machine, fn: Any) -> Any:
    """What an iterator of Python's calls in the place of `fn`; where the iterator leaves the capture it gets `fn` itself."""

    def run(*args: Any) -> Any:
        return _calling(m, fn, *args)

    run.__dict__["_torchsmith_interprets"] = fn
    return run


def _predicate(m: Machine, fn: Any) -> Any:
    """As `_interpreted`, and the answer is True or False; None asks for the truth of the item."""

    def run(x: Any) -> bool:
        return _truth_of(m, x if fn is None else _calling(m, fn, x))

    run.__dict__["_torchsmith_interprets"] = fn
    return run


@row(map)
def map_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.native(map, [_interpreted(m, args[0]), *(pr.iterate(m, a) for a in args[1:])], kwargs, plain=True)


@row(itertools.starmap)
def starmap_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return itertools.starmap(_interpreted(m, args[0]), pr.iterate(m, args[1]))


def _filtering(make: Any) -> None:
    row(make)(lambda m, args, kwargs: make(_predicate(m, args[0]), pr.iterate(m, args[1])))


for _make in (filter, itertools.filterfalse, itertools.takewhile, itertools.dropwhile):
    _filtering(_make)


@row(itertools.groupby)
def groupby_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    key = kwargs.get("key", args[1] if len(args) > 1 else None)
    return itertools.groupby(pr.iterate(m, args[0]), m.callback(key))


@row(itertools.accumulate)
def accumulate_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    fn = args[1] if len(args) > 1 else kwargs.get("func")
    return itertools.accumulate(pr.iterate(m, args[0]), _interpreted(m, fn or operator.add), initial=kwargs.get("initial"))


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


def _extreme(fn: Any, sign: str) -> Any:
    def pick(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        key = kwargs.get("key")
        items = list(_stepped(m, args[0])) if len(args) == 1 else list(args)
        if not items:
            if "default" in kwargs:
                return kwargs["default"]
            raise Raised(ValueError(f"{fn.__name__}() arg is an empty sequence"))
        # among integers only: of an integer and a float, Python gives the one that is chosen, of its own type
        if key is None and any(type(x) is torch.SymInt for x in items) and all(type(x) in (int, torch.SymInt) for x in items):
            best = items[0]
            for x in items[1:]:
                best = m.symbolic(torch.sym_min if fn is min else torch.sym_max, best, x)
            return best
        if key is None and any(floats.is_told_by_running(x) for x in items) and all(type(x) in (float, torch.SymFloat) for x in items):
            return floats.extreme(m, fn, items)
        keys = items if key is None else [m.call(key, [x], {}) for x in items]
        best = 0
        for i in range(1, len(items)):
            if pr.truth(m, pr.compare(m, sign, keys[i], keys[best])):
                best = i
        return items[best]

    return pick


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
    return _sorted_items(m, m.listed(args[0]), kwargs)


@row(abs)
def abs_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if issubclass(type(value), Tensor):
        return m.record("method", "abs", (value,), {})
    if type(value) is ArrayValue:
        return m.call(np.absolute, [value], {})
    if floats.varies(value):
        return floats.apply(m, abs, args)
    f = pr.special(m, type(value), "__abs__")
    return m.call(f, [value], {}) if f is not None else m.native(abs, args, {})


@row(round)
def round_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if issubclass(type(args[0]), Tensor):
        decimals = args[1] if len(args) > 1 else kwargs.get("ndigits")
        return m.record("method", "round", (args[0],), {} if decimals is None else {"decimals": decimals})
    if type(args[0]) is ArrayValue:
        raise arrays.refuse(m, "round() of an array")
    if any(map(floats.varies, args)):
        return floats.apply(m, round, args, kwargs)
    return m.native(round, args, kwargs)


@row(pow)
def pow_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return pr.binary(m, "**", *args) if len(args) == 2 else m.native(pow, args, kwargs)


@row(divmod)
def divmod_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if any(issubclass(type(a), torch.Tensor) for a in args):
        names = " and ".join(f"'{type(a).__name__}'" for a in args)
        raise Raised(TypeError(f"unsupported operand type(s) for divmod(): {names}"))
    return pr.binary(m, "//", *args), pr.binary(m, "%", *args)


# ---------------------------------------------------------------- operator module

for _sign, (_fn, _n, _r) in pr.BINARY.items():
    row(_fn)((lambda s: lambda m, args, kwargs: pr.binary(m, s, *args))(_sign))
for _sign, (_fn, _n) in pr.INPLACE.items():
    row(_fn)((lambda s: lambda m, args, kwargs: pr.binary(m, s, *args))(_sign))
for _sign, (_fn, _n, _r) in pr.COMPARE.items():
    row(_fn)((lambda s: lambda m, args, kwargs: pr.compare(m, s, *args))(_sign))
for _sign, (_fn1, _n) in pr.UNARY.items():
    row(_fn1)((lambda s: lambda m, args, kwargs: pr.unary(m, s, *args))(_sign))
row(operator.getitem)(lambda m, args, kwargs: pr.getitem(m, *args))
row(operator.setitem)(lambda m, args, kwargs: pr.setitem(m, *args))
row(operator.delitem)(lambda m, args, kwargs: pr.delitem(m, *args))
row(operator.contains)(lambda m, args, kwargs: pr.contains(m, *args))
row(operator.is_)(lambda m, args, kwargs: pr.is_same(m, *args))
row(operator.is_not)(lambda m, args, kwargs: not pr.is_same(m, *args))


# ---------------------------------------------------------------- math on symbolic sizes


def _math(fn: Any) -> Any:
    def apply(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        if any(issubclass(type(a), Tensor) for a in args):
            raise Unsupported("CAP020", at=m.loc(), detail=f"math.{fn.__name__} of a tensor")
        if any(map(floats.varies, args)):
            return floats.apply(m, fn, args, kwargs)
        if any(type(a) in (torch.SymInt, torch.SymFloat) for a in args):
            known = {math.ceil: "ceil", math.floor: "floor", math.trunc: "trunc", math.sqrt: "sqrt"}.get(fn)
            if known == "sqrt":
                return m.symbolic(torch.sym_sqrt, *args)
            if known:
                return m.symbolic(fn, *args)
            raise Unsupported("CAP023", at=m.loc(), detail=f"math.{fn.__name__} of a size")
        return m.native(fn, args, kwargs)

    return apply


for _fn in (math.ceil, math.floor, math.trunc, math.sqrt, math.log, math.log2, math.exp, math.pow):
    row(_fn)(_math(_fn))


@row(math.prod)
def prod_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    out = kwargs.get("start", 1)
    for x in _stepped(m, args[0]):
        out = pr.binary(m, "*", out, x)
    return out


# ---------------------------------------------------------------- standard library


@row(warnings.warn)
def warn(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Shown once the graph has run, as coming from the user's line."""
    given = dict(zip(("message", "category", "stacklevel", "source"), args, strict=False)) | kwargs
    level = given.get("stacklevel", 1)
    if type(level) is not int or not 1 <= level <= len(m.frames) or given.keys() - {"message", "category", "stacklevel"}:
        raise Unsupported("CAP016", at=m.loc(), detail="a warning that is attributed to the caller")
    frame = m.frames[-level]
    message, category = given["message"], given.get("category") or UserWarning
    show = functools.partial(_warn_at, frame.code.code.co_filename, frame.ins.line, frame.globals)
    m.effects.append((show, [message, type(message) if issubclass(type(message), Warning) else category], {}))


def _warn_at(filename: str, line: int, space: dict[str, Any], message: Any, category: Any) -> None:
    registry = space.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, filename, line, space.get("__name__", "<string>"), registry)


def _logging(level: int | None) -> Any:
    def log(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        logger = args[0]
        if not issubclass(type(logger), logging.Logger):
            raise Unsupported("CAP016", at=m.loc(), detail="logging")
        wanted = args[1] if level is None else level
        _guard_logger(m, logger, m.world.of(logger))
        if logger.isEnabledFor(wanted):  # shown once the graph has run
            if not all(is_constant(a) for a in (*args[1:], *kwargs.values())):
                raise Unsupported("CAP016", at=m.loc(), detail="an enabled log message of more than constants")
            frame = next((f for f in reversed(m.frames) if f.globals is not vars(logging)), m.frames[-1])
            at = (frame.code.code.co_filename, frame.ins.line, frame.code.code.co_name)
            if kwargs.keys() - {"extra"}:
                raise Unsupported("CAP016", at=m.loc(), detail="a log message with options")
            m.effects.append((functools.partial(_log_at, at), [logger, wanted, *args[(2 if level is None else 1) :]], kwargs))

    return log


def _log_at(at: tuple[str, int, str], logger: Any, level: int, message: Any, *args: Any, extra: Any = None) -> None:
    """Logger.log, as coming from the user's line."""
    filename, line, name = at
    logger.handle(logger.makeRecord(logger.name, level, filename, line, message, args, None, name, extra))


def _guard_logger(m: Machine, logger: Any, track: Any) -> None:
    m.world.guard(Attr(FixedObject(logger, f"logger {logger.name}"), "level", "instance"), "equals", logger.level)
    m.world.guard(Attr(FixedObject(logger.manager, "logging.manager"), "_disable", "getattr"), "equals", logger.manager.disable)
    parent = logger.parent
    while parent is not None:
        m.world.guard(Attr(FixedObject(parent, f"logger {parent.name}"), "level", "instance"), "equals", parent.level)
        parent = parent.parent


for _name, _level in (("debug", 10), ("info", 20), ("warning", 30), ("error", 40), ("critical", 50), ("exception", 40)):
    row(getattr(logging.Logger, _name))(_logging(_level))
row(logging.Logger.log)(_logging(None))


@row(logging.Logger.isEnabledFor)
def is_enabled_for(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    _guard_logger(m, args[0], None)
    return args[0].isEnabledFor(args[1])


@row(logging.getLogger)
def get_logger(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.world.wrap(logging.getLogger(*args), None)


@row(typing._BaseGenericAlias.__call__)  # type: ignore[attr-defined]
def generic_call(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Stack[int](...): an object of Stack, which may hold what it was made as."""
    alias, *rest = args
    if not alias._inst:
        return m.inline(typing._BaseGenericAlias.__call__, args, kwargs)  # type: ignore[attr-defined]
    made = m.call(at.load_attr(m, alias, "__origin__"), rest, kwargs)
    with contextlib.suppress(Raised):
        at.store_attr(m, made, "__orig_class__", alias)
    return made


def _dispatched(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """singledispatch: the function that is registered for a class, without the cache that is kept by weak references."""
    m.function_source(fn)
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__, strict=True))
    if len(args) != 1 or kwargs or m.load_cell(cells["cache_token"]) is not None:  # abstract classes may take others in
        return m.inline(fn, args, kwargs)
    registry = m.load_cell(cells["registry"])
    track = m.world.of(registry)
    return m.native(functools._find_impl, [args[0], registry if track is None else m.world.image(track)], {}, plain=True)  # type: ignore[attr-defined]


torch_rows.BY_CODE[functools.singledispatch(lambda x: x).dispatch.__code__] = _dispatched


@row(functools.cmp_to_key)
def cmp_to_key(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.native(functools.cmp_to_key, [m.callback(a) for a in args], {k: m.callback(v) for k, v in kwargs.items()})


def _representation(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """What reprlib and dataclasses wrap around a __repr__: an object inside of its own text is dots."""
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__, strict=True))
    key = id(m.world.canonical(args[0]))
    if key in m.shown:
        return m.load_cell(cells["fillvalue"]) if "fillvalue" in cells else "..."
    m.shown.add(key)
    try:
        return m.call(fn.__wrapped__, args, kwargs)
    finally:
        m.shown.discard(key)


for _wrap in (dataclasses._recursive_repr, reprlib.recursive_repr()):  # type: ignore[attr-defined]
    torch_rows.BY_CODE[_wrap(lambda self: "").__code__] = _representation


@row(print)
def print_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Printed once the graph has run; only what cannot change until then."""
    args = [pr.to_str(m, a) if issubclass(type(a), BaseException) else a for a in args]
    if not all(is_constant(a) for a in (*args, *kwargs.values())):
        raise Unsupported("CAP016", at=m.loc(), detail="print of more than constants")
    redirected = m.global_writes.get((id(sys.__dict__), "stdout"))
    if redirected is not None and "file" not in kwargs:
        kwargs = {**kwargs, "file": redirected[2]}
    m.effects.append((print, list(args), kwargs))


@row(os._Environ.__getitem__)
def environ_getitem(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """One variable of the environment, guarded."""
    raw = vars(os.environ)["_data"]
    data = m.world.wrap(raw, FixedObject(raw, "os.environ"))
    value = pr._read_key(m, m.world.of(data), os.environ.encodekey(args[1]))
    if value is MISSING:
        raise Raised(KeyError(args[1]))
    return os.environ.decodevalue(value)


row(os.getenv)(lambda m, args, kwargs: m.inline(os.getenv, args, kwargs))
row(os.fspath)(lambda m, args, kwargs: m.native(os.fspath, args, kwargs))


@row(typing.cast)
def cast_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return args[1]


def _handled(m: Machine) -> Any:
    """The exception that is being handled; where it is none of this function's, only the caller knows. contextlib asks only to order the
    contexts of exceptions that leave an ExitStack; those make the frame eager."""
    if m.exc is None and m.frames[-1].code.code.co_filename == contextlib.__file__:
        return None
    if m.exc is None:
        raise Unsupported("CAP016", at=m.loc(), detail="the exception that is being handled")
    track = m.world.of(m.exc)
    if track is not None:
        m.world.use(track)
    return m.exc


@row(sys.exc_info)
def exc_info(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    found = _handled(m)
    return (None, None, None) if found is None else (type(found), found, None)


if hasattr(sys, "exception"):
    row(sys.exception)(lambda m, args, kwargs: _handled(m))


@row(sys.intern, sys.getrecursionlimit)
def interned(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return args[0] if args else sys.getrecursionlimit()


@row(collections.namedtuple)
def namedtuple_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A class made inside: Python writes its source and runs that."""
    if not all(type(a) in SCALARS or is_constant(a) or type(a) is list for a in (*args, *kwargs.values())):
        raise Unsupported("CAP014", at=m.loc(), detail="a namedtuple whose fields or defaults are no constants")
    kwargs = {"module": m.frames[-1].globals.get("__name__", "__main__"), **kwargs}
    cls = m.native(collections.namedtuple, [m.listed(a) if type(a) is list else a for a in args], kwargs, plain=True)
    m.world.fresh_pinned.add(id(cls))
    m.world.keep.append(cls)
    return cls


@row(sys._getframe)
def getframe(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    raise Unsupported("CAP014", at=m.loc(), detail="sys._getframe")


@row(functools.partial)
def partial_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.native(functools.partial, args, kwargs, plain=True)


for _cls in (property, classmethod, staticmethod, slice, types.MethodType, types.SimpleNamespace, object):
    row(_cls)((lambda c: lambda m, args, kwargs: m.native(c, args, kwargs, plain=True))(_cls))


@row(types.CellType)
def cell_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return types.CellType(*args)


@row(range)
def range_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if any(type(a) is torch.SymInt for a in args):
        m.recorder.facts.loc = m.loc()
        args = [int(a) for a in args]
    return m.native(range, args, kwargs)


# ---------------------------------------------------------------- how many arguments

_NO_NAMES: frozenset[str] = frozenset()
_MOST: dict[Any, int] = {  # positional arguments at the most; a row reads those that it knows
    **dict.fromkeys((callable, id, hash, bool, len, list, tuple, set, frozenset, reversed, any, all, abs, repr, vars, dir, operator.not_,
                     operator.truth, operator.neg, operator.pos, operator.invert, math.ceil, math.floor, math.trunc, math.sqrt, math.exp), 1),
    **dict.fromkeys((isinstance, issubclass, hasattr, delattr, iter, next, format, divmod, filter, itertools.filterfalse, itertools.takewhile,
                     itertools.dropwhile, itertools.starmap, math.log, math.pow, operator.getitem, operator.delitem, operator.contains), 2),
    **dict.fromkeys((getattr, setattr, functools.reduce, operator.setitem), 3),
}  # fmt: skip
_NAMED: dict[Any, tuple[int, frozenset[str] | None]] = {  # and by which names it takes them; None: by any
    **{fn: (n, _NO_NAMES) for fn, n in _MOST.items()},
    sum: (2, frozenset({"start"})), sorted: (1, frozenset({"key", "reverse"})), round: (2, frozenset({"number", "ndigits"})),
    min: (sys.maxsize, frozenset({"key", "default"})), max: (sys.maxsize, frozenset({"key", "default"})), dict: (1, None),
    itertools.groupby: (2, frozenset({"iterable", "key"})), itertools.accumulate: (2, frozenset({"iterable", "func", "initial"})),
}  # fmt: skip


def _counted(fn: Any, most: int, names: frozenset[str] | None) -> None:
    found = calls.ROWS[fn]

    def counted(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        if len(args) > most or (names is not None and not names.issuperset(kwargs)):  # the exception is the function's own: arguments are counted before all else
            m.native(fn, [None] * len(args), dict.fromkeys(kwargs), plain=True)
            raise Unsupported("CAP014", at=m.loc(), detail=f"{fn.__name__} with {len(args)} arguments")
        return found(m, args, kwargs)

    calls.ROWS[fn] = counted


for _fn, (_most, _names) in _NAMED.items():
    if _fn in calls.ROWS:
        _counted(_fn, _most, _names)
