"""Rows for functions of the standard library: copy, warnings, logging, functools, os.environ, print."""

from __future__ import annotations

import collections
import contextlib
import copy
import copyreg
import dataclasses
import enum
import functools
import importlib.util
import logging
import os
import reprlib
import sys
import types
import typing
import warnings
from collections import defaultdict, deque
from typing import Any

import torch

from ..codes import Unsupported
from ..graph import tracing
from ..graph.layout import is_dense
from . import arrays, torch_rows
from . import attributes as at
from . import protocols as pr
from .arrays import ArrayValue
from .attributes import Raised
from .builtin_rows import identity
from .calls import row
from .native import no_python
from .protocol import Args, Kwargs, Machine
from .resume import Later
from .source import Attr, Computed, FixedObject, Item
from .tensors import extent
from .world import MISSING, PINNED_TYPES, SCALARS, Identity, container_base, entries, is_constant, own_dict

Tensor = torch.Tensor


def blank(t: type) -> Any:
    """An instance without attributes of a class that adds nothing in C to object, else None."""
    try:
        return types.SimpleNamespace.__new__(t) if issubclass(t, types.SimpleNamespace) else object.__new__(t)
    except TypeError:
        return None


# methods that copies are made by, and what fills copies of lists and dictionaries
_OF_COPIES = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "append", "__setitem__")
_OF_FILLED = ("__iter__", "items", "extend", "update", "add")  # of containers


def _refuse_shared(m: Machine, t: Any, memo: dict[Any, Any]) -> None:
    """A deep copy is a clone only of a tensor that shows the whole of its memory, and shares it with no other one that is copied with it."""
    if t.requires_grad or not is_dense(t):
        raise Unsupported("CAP011", at=m.loc(), detail="a deep copy of a tensor that requires grad, or is no dense one")
    infos = {tracing.storage(i.tensor): i for i in m.recorder.real.values() if i.tensor is not None}
    own, memory = infos.get(tracing.storage(t)), tracing.storage(t)
    for key in memo:
        other: Any = key.of if type(key) is Identity else None
        if not issubclass(type(other), Tensor):
            continue
        info = infos.get(tracing.storage(other))
        if tracing.storage(other) == memory or (own is not None and info is not None and _overlap(own.real, info.real)):
            raise Unsupported("CAP011", at=m.loc(), detail="deep copies of tensors that share memory")
        if own is not None and info is not None:
            assert own.source is not None and info.source is not None  # inputs
            m.world.guard(own.source, "no_overlap", (info.source,))


def _overlap(a: Any, b: Any) -> bool:
    (low, high), (other_low, other_high) = extent(a), extent(b)
    return bool(a.numel() and b.numel()) and low < other_high and other_low < high


def _copied(m: Machine, obj: Any, memo: dict[Any, Any], deep: bool) -> Any:
    """copy.copy and copy.deepcopy, by the protocol's parts that Python objects use. memo: the program's own, which it may look into."""
    t = type(obj)
    if t in SCALARS or t in at.NUMBERS or is_constant(obj) or issubclass(t, PINNED_TYPES) or issubclass(t, enum.Enum) or (t in (types.MethodType, tuple) and not deep):
        return obj
    key = identity(m, obj)
    if deep and key in memo:
        return memo[key]
    if t is ArrayValue:
        memo[key] = obj if obj.is_scalar else arrays.method(m, obj, "copy", [], {})
        return memo[key]
    if issubclass(t, Tensor):
        if deep:
            _refuse_shared(m, obj, memo)
        memo[key] = m.record("method", "clone", (obj,), {}) if deep else m.record("method", "view_as", (obj, obj), {})
        return memo[key]
    own = pr.special(m, t, "__deepcopy__" if deep else "__copy__")
    if own is not None:
        out = m.call(own, [obj, memo] if deep else [obj], {})
        memo[key] = out
        return out
    at.class_guard(m, t, "__new__", at.find(m, t, "__new__"))
    if issubclass(t, torch.nn.Module) or any(pr.special(m, t, name) for name in (*_OF_COPIES, *(_OF_FILLED if container_base(t) else ()))) or at.is_users(m, t, "__new__"):
        raise Unsupported("CAP011", at=m.loc(), detail=f"a copy of a {t.__name__}")

    def part(x: Any) -> Any:
        return _copied(m, x, memo, True) if deep else x

    if t is types.MethodType:
        return types.MethodType(at.load_attr(m, obj, "__func__"), part(at.load_attr(m, obj, "__self__")))
    if t is tuple:
        parts = tuple(part(x) for x in obj)
        if key not in memo:  # else what it holds led back to it
            memo[key] = obj if all(x is y for x, y in zip(parts, obj, strict=True)) else parts
        return memo[key]
    base: Any = container_base(t)
    if base is None and blank(t) is None:
        raise Unsupported("CAP011", at=m.loc(), detail=f"a copy of a {t.__name__}")
    track = m.world.of(obj)
    new: Any = base.__new__(t) if base is not None else blank(t)
    memo[key] = new
    if base is not None:
        body = m.world.image(track) if track is not None else obj
        if base is deque:
            deque.__init__(new, (), body.maxlen)
        if issubclass(base, dict):
            if base is defaultdict:
                new.default_factory = body.default_factory
            for k, v in entries(body):
                base.__setitem__(new, part(k), part(v))
        elif base is set:
            set.update(new, [part(x) for x in body] if deep else body)
        else:
            base.extend(new, [part(x) for x in body])
    if own_dict(obj if track is None else track.obj) is not None and base is not t:
        d = at.load_attr(m, obj, "__dict__")
        for k, v in m.mapped(d).items():
            new.__dict__[k] = part(v)
    for name in copyreg._slotnames(t):  # type: ignore[attr-defined]
        value = at.attr_or(m, obj, name, MISSING)
        if value is not MISSING:
            object.__setattr__(new, name, part(value))
    return new


@row(copy.deepcopy)
def deepcopy_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    memo = args[1] if len(args) > 1 else kwargs.get("memo")
    if kwargs.keys() - {"memo"} or len(args) not in (1, 2) or type(memo) not in (dict, type(None)) or m.world.of(memo) is not None:
        raise Unsupported("CAP011", at=m.loc(), detail="a memo of copy.deepcopy from outside")
    return _copied(m, args[0], {} if memo is None else memo, True)


@row(copy.copy)
def copy_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return _copied(m, args[0], {}, False)


@row(warnings.warn)
def warn(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Shown once the graph has run, as coming from the user's line."""
    given = dict(zip(("message", "category", "stacklevel", "source"), args, strict=False)) | kwargs
    level = given.get("stacklevel", 1)
    if type(level) is not int or not 1 <= level <= len(m.frames) or given.keys() - {"message", "category", "stacklevel"}:
        raise Unsupported("CAP016", at=m.loc(), detail="a warning that is attributed to the caller")
    frame = m.frames[-level]
    message, category = given["message"], given.get("category") or UserWarning
    category = type(message) if issubclass(type(message), Warning) else category
    if not issubclass(type(category), type) or not issubclass(category, Warning):
        m.native(warnings.warn, ["", category], {}, plain=True)  # raises
    what = message if type(message) is str else False, category, frame.globals.get("__name__", "<string>"), frame.ins.line
    if _is_error(*what) or _is_recorded_here(m):
        raise Unsupported("CAP016", at=m.loc(), detail="a warning that becomes an exception, or that the program records")
    m.world.guard(Computed(_is_error, what, ()), "equals", False)
    show = functools.partial(_warn_at, frame.code.code.co_filename, frame.ins.line, frame.globals)
    m.effects.append((show, [message, category], {}))


def _is_error(text: Any, category: type, module: str, line: int) -> bool:
    """Does a filter turn this warning into an exception? text: False where it is not known."""
    for action, message, cls, where, number in warnings.filters:
        if _matches(message, text) and _matches(where, module) and issubclass(category, cls) and number in (0, line):
            return action == "error"
    return warnings.defaultaction == "error"  # type: ignore[attr-defined]


def _is_recorded_here(m: Machine) -> bool:
    """Does catch_warnings(record=True) put warnings into a list that the program has at hand?"""
    said = getattr(getattr(warnings, "_showwarnmsg_impl", None), "__self__", None)
    if type(said) is not list:
        return False
    values = [v for f in m.frames for v in (*f.fast, *f.stack)]
    return id(said) in m.world.tracks or any((v.obj if type(v) is Later else v) is said for v in values)


def _matches(pattern: Any, text: Any) -> bool:
    """As a filter asks: of a pattern, or of a text that has to be the same."""
    return pattern is None or text is False or (pattern == text if type(pattern) is str else bool(pattern.match(text)))


def _filtering(fn: Any) -> Any:
    """What changes the filters of warnings, as warnings are shown: once the graph has run, in their order."""

    def later(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        region: Any = args[0] if args and type(args[0]) is warnings.catch_warnings else None
        frame = m.frames[-1]
        is_read = region is not None and region._record and not (region._entered or frame.code.instrs[frame.index].name == "POP_TOP")
        if region is not None and (m.world.of(region) is None) and (is_read or "error" in (region._filter or ())):
            raise Unsupported("CAP016", at=m.loc(), detail="warnings that are recorded")
        if "error" in args or "error" in kwargs.values() or not all(is_constant(a) or issubclass(type(a), type) or a is region for a in args):
            raise Unsupported("CAP016", at=m.loc(), detail="a filter that turns warnings into exceptions")
        m.effects.append((fn, args, kwargs))

    return later


for _fn in (warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings):
    row(_fn)(_filtering(_fn))
row(warnings.catch_warnings.__enter__)(_filtering(warnings.catch_warnings.__enter__))
row(warnings.catch_warnings.__exit__)(lambda m, args, kwargs: _filtering(warnings.catch_warnings.__exit__)(m, args[:1], {}))


def _warn_at(filename: str, line: int, space: dict[str, Any], message: Any, category: Any) -> None:
    registry = space.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, filename, line, space.get("__name__", "<string>"), registry)


def _logging(level: int | None) -> Any:
    def log(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        logger = args[0]
        if not issubclass(type(logger), logging.Logger):
            raise Unsupported("CAP016", at=m.loc(), detail="logging")
        wanted = args[1] if level is None else level
        _guard_logger(m, logger)
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


def _guard_logger(m: Machine, logger: Any) -> None:
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
    _guard_logger(m, args[0])
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


for _wrap in (reprlib.recursive_repr(), getattr(dataclasses, "_recursive_repr", reprlib.recursive_repr())):  # its own until 3.12
    torch_rows.BY_CODE[_wrap(lambda self: "").__code__] = _representation


@row(print)
def print_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Printed once the graph has run; only what cannot change until then."""
    if any(issubclass(type(kwargs.get(k)), str) and type(kwargs[k]) is not str for k in ("sep", "end")):
        raise Unsupported("CAP016", at=m.loc(), detail="print of more than constants")
    if kwargs.keys() - {"sep", "end", "file", "flush"} or not all(kwargs.get(k) is None or type(kwargs[k]) is str for k in ("sep", "end")):
        return m.native(print, [], {**kwargs, "file": None}, plain=True)  # the exception is its own
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


@row(importlib.import_module)  # as `import` does
def import_module(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    given: Any = dict(zip(("name", "package"), args, strict=False)) | kwargs
    name: str = importlib.util.resolve_name(given["name"], given.get("package"))
    found = m.native(importlib.import_module, [name], {}, plain=True) if name not in sys.modules else sys.modules[name]
    return m.world.wrap(found, Item(FixedObject(sys.modules, "sys.modules"), name))


@row(__import__)  # as `import` does
def import_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    given: Any = dict(zip(("name", "globals", "locals", "fromlist", "level"), args, strict=False)) | kwargs
    name, names, level = given.get("name"), given.get("fromlist", ()), given.get("level", 0)
    is_plain = type(name) is str and (names is None or type(names) is tuple) and level == 0
    if not is_plain or len(args) > 5 or not kwargs.keys() <= {"name", "globals", "locals", "fromlist", "level"}:
        raise Unsupported("CAP016", at=m.loc(), detail="__import__")
    return m.import_name(m.frames[-1], name, names, 0)


@row(sys.intern)
def interned(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return args[0]


def _asked_before_each_call(fn: Any) -> None:
    """A setting of the process."""
    row(fn)(lambda m, args, kwargs: m.world.wrap(m.native(fn, args, kwargs, plain=True), Computed(fn, (), ())))


for _setting in (sys.getrecursionlimit, sys.getswitchinterval):
    _asked_before_each_call(_setting)


@row(collections.namedtuple)
def namedtuple_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A class made inside: Python writes its source and runs that."""
    if not all(type(a) in SCALARS or is_constant(a) or type(a) is list for a in (*args, *kwargs.values())):
        raise Unsupported("CAP014", at=m.loc(), detail="a namedtuple whose fields or defaults are no constants")
    kwargs = {"module": m.frames[-1].globals.get("__name__", "__main__"), **{k: m.listed(a) if type(a) is list else a for k, a in kwargs.items()}}
    return m.made(m.native(collections.namedtuple, [m.listed(a) if type(a) is list else a for a in args], kwargs, plain=True))


@row(dataclasses._process_class)  # type: ignore[attr-defined]
def dataclass_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A dataclass made inside: its module writes methods as text and runs that."""
    cls = args[0]
    if id(cls) not in m.world.fresh_pinned:
        return m.inline(dataclasses._process_class, args, kwargs)  # type: ignore[attr-defined]
    before = set(map(id, vars(cls).values()))
    with no_python(m):
        made = m.made(m.native(dataclasses._process_class, args, kwargs, plain=True))  # type: ignore[attr-defined]
    m.found.clear()
    for value in vars(made).values():
        if type(value) is types.FunctionType and id(value) not in before:
            m.made(value)
    return made


@row(sys.exit)
def exit_(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    raise Raised(SystemExit(*args))


@row(sys._getframe)
def getframe(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    raise Unsupported("CAP014", at=m.loc(), detail="sys._getframe")
