"""Rows for Python's builtins and the standard library's C functions: isinstance, getattr, zip, sorted, itertools ..."""

from __future__ import annotations

import abc
import functools
import math
import operator
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch

from ..codes import Unsupported
from ..graph import tracing
from ..graph.sizes import SymTypes
from . import arrays, calls, floats, policy, tensor_attrs
from . import attributes as at
from . import protocols as pr
from .arrays import ArrayMethod, ArrayValue
from .attributes import Raised
from .calls import row
from .protocol import Args, Kwargs, Machine
from .source import Computed, FixedObject
from .tensor_attrs import TensorMethod
from .world import DELETED, MISSING, NULL, SCALARS, Identity, Momentary, container_base

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
    if issubclass(type(value), (TensorMethod, ArrayMethod)):
        return types.BuiltinMethodType
    return int if issubclass(type(value), Momentary) else at.class_of_number(m, value) or type(value)


@row(type)
def type_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1:
        return type_of(m, args[0])
    cls = new_class(m, [type, *args], kwargs)
    init = at.find(m, type(cls), "__init__")
    if issubclass(type(init), Function):
        m.call(init, [cls, *args], kwargs)
    return cls


class _Shield:
    """Stands before the bases of a class that is being made, so that no `__init_subclass__` of theirs runs natively."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


@row(type.__new__)
def new_class(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A class. What its body and its bases do when it is made (`__set_name__`, `__init_subclass__`) is interpreted as any code."""
    if len(args) == 4:  # what comes from outside holds other things in another call
        args = [*args[:2], *(m.world.image(t) if (t := m.world.of(a)) is not None and container_base(type(a)) else a for a in args[2:])]
    if len(args) != 4 or type(args[3]) is not dict or not all(issubclass(type(b), type) for b in args[2]):
        return m.made(m.native(type.__new__, args, kwargs, plain=True))
    meta, name, bases, names = args
    for base in bases:
        meta = type(base) if issubclass(type(base), meta) else meta
    if meta is not args[0] and (own := at.find(m, meta, "__new__")) is not type.__new__:
        return m.call(getattr(own, "__func__", own), [meta, name, bases, names], kwargs)
    named = {k: v for k, v in names.items() if at.is_users(m, type(v), "__set_name__")}
    told = any(at.is_users(m, base, "__init_subclass__") for base in bases)
    body = {k: None if k in named else v for k, v in names.items()}
    body.setdefault("__module__", m.frames[-1].globals.get("__name__"))  # Python asks the frame below
    cls = m.made(m.native(type.__new__, [meta, name, (_Shield, *bases) if told else bases, body], {} if told else kwargs, plain=True))
    if told:
        m.native(type.__setattr__, [cls, "__bases__", bases], {}, plain=True)
    for key, value in named.items():
        type.__setattr__(cls, key, value)
    for key, value in named.items():
        m.call(at.find(m, type(value), "__set_name__"), [value, cls, key], {})
    if told:
        m.call(at.load_attr(m, super(cls, cls), "__init_subclass__"), [], kwargs)
    return cls


@row(isinstance)
def isinstance_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    value, classes = args
    if issubclass(type(classes), tuple):
        return any(isinstance_(m, [value, c], {}) for c in classes)
    if issubclass(type(classes), types.UnionType):
        return any(isinstance_(m, [value, c], {}) for c in classes.__args__)
    t = type_of(m, value)
    check = pr.special(m, type(classes), "__instancecheck__")
    if check is not None and type(classes).__module__ not in ("abc", "typing", "enum") and not type(classes).__module__.startswith("torch"):
        return t is classes or pr.truth(m, m.call(check, [classes, value], {}))
    if issubclass(type(value), Tensor):
        if issubclass(type(classes), type) and issubclass(t, classes):
            return True
        if type(classes) is type(torch.FloatTensor):  # as torch.FloatTensor: a dtype, a layout and a device
            return (value.dtype, value.layout, value.is_cuda) == (classes.dtype, classes.layout, classes.is_cuda)
        mark = {torch.nn.Parameter: "_is_param", torch.nn.Buffer: "_is_buffer"}.get(classes)
        return mark is not None and pr.truth(m, getattr_(m, [value, mark, False], {}))
    if t in SymTypes:
        plain = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[t]
        if classes in (int, float, bool):
            return issubclass(plain, classes)
    if getattr(type(classes), "__instancecheck__", None) in _PLAIN_CHECKS:
        if _is_subclass(m, t, classes):
            return True
        if at.find(m, t, "__class__") is object.__dict__["__class__"] and not at.looks_up_itself(m, t):
            return False
        said = at.attr_or(m, value, "__class__", t)  # a proxy says what it stands for
        return said is not t and issubclass(type(said), type) and _is_subclass(m, said, classes)
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
    if len(args) == 2 and at.is_users(m, type(args[1]), "__subclasscheck__"):
        return pr.truth(m, m.call(pr.special(m, type(args[1]), "__subclasscheck__"), [args[1], args[0]], {}))
    if len(args) == 2 and issubclass(type(args[0]), type) and issubclass(type(args[1]), type):
        return _is_subclass(m, *args)
    return m.native(issubclass, args, {}, plain=True)


@row(callable)
def callable_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    t = type_of(m, args[0])
    at.class_guard(m, t, "__call__", at.find(m, t, "__call__"))
    return callable(args[0]) or issubclass(type(args[0]), (TensorMethod, ArrayMethod))


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
    m.world.set_attr(track, args[1], DELETED)


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
    found = at.attr_or(m, args[0], "__dict__", MISSING)
    if found is MISSING:
        raise Raised(TypeError("vars() argument must have __dict__ attribute"))
    return found


def identity(m: Machine, obj: Any) -> Identity:
    """id(obj)."""
    found = Identity(id(m.recorder.real_tensor(obj) if issubclass(type(obj), Tensor) else m.world.canonical(obj)))
    found.of = obj
    return found


@row(id)
def id_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    m.world.tell_apart(args[0])
    return identity(m, args[0])


@row(hash)
def hash_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    f = pr.special(m, type(args[0]), "__hash__")
    if f is not None:
        return pr.outcome(m, "__hash__", f, [args[0]])
    if issubclass(type(args[0]), Tensor) or m.world.of(args[0]) is not None:
        raise Unsupported("CAP011", at=m.loc(), detail="hash() of an object from outside")
    if _is_hashed_by_address(m, args[0]):
        raise Unsupported("CAP011", at=m.loc(), detail="hash() of an object that the program made")
    return m.native(hash, args, {})


def _is_hashed_by_address(m: Machine, obj: Any) -> bool:
    if issubclass(type(obj), (tuple, frozenset)):
        return any(_is_hashed_by_address(m, x) for x in obj)
    return type(obj).__hash__ is object.__hash__ and m.world.has_own_address(obj)


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
    """Of what only running tells a truth that the graph gives, where the program does not choose by it at once."""
    if not args:
        return False
    value, frame = args[0], m.frames[-1]
    if frame.code.instrs[frame.index].name.startswith(("POP_JUMP", "UNARY_NOT", "TO_BOOL")):
        return pr.truth(m, value)
    if issubclass(type(value), Tensor) and m.recorder.facts.reads_data and tensor_attrs.users_method(m, value, "__bool__") is None:
        known = tracing.current().known_value(value, "__bool__")
        if known is NotImplemented and all(type(n) is int and n == 1 for n in value.shape) and not value.dtype.is_complex:
            value = m.recorder.read_number(m.record("method", "to", (m.record("method", "ne", (value, 0), {}), torch.int64), {}))
    if type(value) in (torch.SymInt, torch.SymFloat) and value.node.hint is None:
        return m.symbolic(operator.ne, value, 0)
    return value if type(value) is torch.SymBool and value.node.hint is None else pr.truth(m, value)


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
            if cls is complex:
                return m.native(cls, [m.with_numbers(a) for a in args], {k: m.with_numbers(v) for k, v in kwargs.items()})
            if floats.varies(value):
                return value if cls is float and type(value) is torch.SymFloat else floats.apply(m, cls, args, kwargs)
            if type(value) in SymTypes:
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
        given = args[0]
        if cls in (tuple, frozenset) and type(given) is cls:
            return given
        if cls in (list, tuple) and not kwargs:
            return pr.as_list(m, given, cls)
        return m.native(cls, [pr.filling(m, given)], kwargs, plain=True)

    return build


for _cls in (list, tuple, set, frozenset):
    row(_cls)(_collect(_cls))


@row(torch.Size)
def size_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.native(torch.Size, [pr.as_list(m, args[0])] if args else [], {}, plain=True)


@row(deque)
def deque_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if "iterable" in kwargs:
        kwargs = {**kwargs, "iterable": pr.iterate(m, kwargs["iterable"])}
    return m.native(deque, [pr.iterate(m, args[0]), *args[1:]] if args else [], kwargs, plain=True)


def _mapping(cls: type) -> Any:
    def build(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        args = list(args)
        lead = [args.pop(0)] if cls is defaultdict and args else []
        if args:
            source = args[0]
            if issubclass(type(source), dict) or pr.special(m, type(source), "keys") or hasattr(type(source), "keys"):
                args[0] = m.mapped(source)
            else:
                pairs = m.listed(source)
                args[0] = pairs if any(type(p) in SCALARS for p in pairs) else [tuple(m.unpack(pair, 2)) for pair in pairs]
        return m.native(cls, lead + args, kwargs, plain=True)

    return build


for _cls in (dict, OrderedDict, defaultdict):
    row(_cls)(_mapping(_cls))


# ---------------------------------------------------------------- numbers


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
    if issubclass(type(args[0]), Tensor) and hasattr(Tensor, "__round__"):
        decimals = args[1] if len(args) > 1 else kwargs.get("ndigits")
        return m.record("method", "round", (args[0],), {} if decimals is None else {"decimals": decimals})
    if type(args[0]) is ArrayValue:
        raise arrays.refuse(m, "round() of an array")
    if any(map(floats.varies, args)):
        return floats.apply(m, round, args, kwargs)
    f = pr.special(m, type(args[0]), "__round__")
    if f is not None:
        return m.call(f, [v for v in (*args, *kwargs.values()) if v is not None], {})
    return m.native(round, args, kwargs)


@row(pow)
def pow_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return pr.binary(m, "**", *args) if len(args) == 2 and not kwargs else m.native(pow, args, kwargs)


@row(divmod)
def divmod_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    special = pr.special(m, type(args[0]), "__divmod__") or pr.special(m, type(args[1]), "__rdivmod__")
    if any(issubclass(type(a), torch.Tensor) for a in args) and special is None:
        names = " and ".join(f"'{type(a).__name__}'" for a in args)
        raise Raised(TypeError(f"unsupported operand type(s) for divmod(): {names}"))
    if special is None and any(type(a) in (ArrayValue, *SymTypes) for a in args):
        return pr.binary(m, "//", *args), pr.binary(m, "%", *args)
    return pr._dyadic(m, "divmod()", divmod, "__divmod__", "__rdivmod__", *args)


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


@row(functools.partial)
def partial_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.native(functools.partial, args, kwargs, plain=True)


for _cls in (property, classmethod, staticmethod, slice, types.MethodType, types.SimpleNamespace, object):
    row(_cls)((lambda c: lambda m, args, kwargs: m.native(c, args, kwargs, plain=True))(_cls))


@row(types.FunctionType)
def function_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.made(m.native(types.FunctionType, args, kwargs, plain=True))


@row(types.CellType)
def cell_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return types.CellType(*args)


@row(range)
def range_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if any(type(a) is torch.SymInt for a in args):
        m.recorder.facts.loc = m.loc()
        args = [int(a) for a in args]
    return m.native(range, args, kwargs)
