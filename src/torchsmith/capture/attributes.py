"""Python's attribute protocol, carried out by the machine: reads guard, writes to outside objects go to overlays.

In: the machine, an object, a name. Out: the value, or Raised with the exception Python would raise. No descriptor, property or
__getattr__ written in Python runs natively: they are inlined.
"""

from __future__ import annotations

import enum
import functools
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ..codes import Unsupported
from . import _frame, policy
from .protocol import Machine
from .source import Attr, FixedObject, Item, TypeOf
from .world import CONTAINERS, COUNTERS, DELETED, MISSING, NULL, PINNED_TYPES, SCALARS, Ticket, Track, own_dict, ticket

Function = types.FunctionType
_MODULE_GETATTR = torch.nn.Module.__getattr__
_MODULE_SETATTR = torch.nn.Module.__setattr__
_MODULE_DELATTR = torch.nn.Module.__delattr__
_DATA_C = (types.GetSetDescriptorType, types.MemberDescriptorType)


_HEAP = 0x200  # Py_TPFLAGS_HEAPTYPE: a class whose attributes can be changed


class Raised(Exception):
    """An exception of the program being captured, on its way to a handler."""

    def __init__(self, exc: BaseException) -> None:
        super().__init__(exc)
        self.exc = exc


def saying(exc: BaseException) -> str:
    """Its class, and its text where that is of plain values: else the program's __str__ would run, on tensors that have no values."""
    cls = type(exc)
    told = not isinstance(cls.__str__, types.FunctionType) and all(type(a) in SCALARS for a in exc.args)
    return f"{cls.__name__}: {exc}" if told else cls.__name__


def find(m: Machine, cls: type, name: str) -> Any:
    """Lookup along the mro, without binding."""
    key = (cls, name)
    got = m.found.get(key)
    if got is None:
        got = MISSING
        for base in cls.__mro__:
            written = m.class_writes.get((base, name), MISSING) if m.class_writes else MISSING
            if written is not MISSING and base is not cls:  # no guard says that the classes between have none of their own
                raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__}.{name}, which was written to {base.__name__}")
            if written is not MISSING and written is not DELETED:
                got = written
                break
            if written is MISSING and name in base.__dict__:
                got = base.__dict__[name]
                break
        m.found[key] = got
    return got


def is_users(m: Machine, cls: type, name: str) -> bool:
    """Is this special method of a class written in Python, and not by a library?"""
    found = find(m, cls, name)
    found = getattr(found, "__func__", found)
    return issubclass(type(found), Function) and not policy.is_library_file(found.__code__.co_filename)


def class_guard(m: Machine, cls: type, name: str, value: Any) -> None:
    """A class attribute that was relied on must stay what it is, and one that is MISSING must stay away (classes written in C are what
    they are)."""
    if not _may_change(m, cls, name):
        return
    owner = FixedObject(cls, cls.__qualname__)
    source = Attr(owner, name, "type")
    if value is MISSING:
        m.world.guard(owner, "missing", name)
    elif type(value) in _WRAPPERS and not policy.is_trusted(cls.__module__):  # held by its functions, which can be held weakly
        m.world.guard(source, "type", type(value))
        for part in _WRAPPERS[type(value)]:
            m.world.pin_weakly(getattr(value, part), Attr(source, part, "getattr"))
    else:
        m.world.pin_weakly(value, source)


_WRAPPERS: dict[type, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"), classmethod: ("__func__",), staticmethod: ("__func__",), functools.cached_property: ("func", "attrname"),
}  # fmt: skip


def own_guard(m: Machine, cls: type, name: str, value: Any) -> None:
    """An object's own attribute counts, whatever its class holds by that name (`value`), as long as that is no data descriptor."""
    if (cls, name) in m.own_names:
        return
    m.own_names.add((cls, name))
    if value is MISSING:
        class_guard(m, cls, name, MISSING)
    elif _may_change(m, cls, name):
        m.world.guard(Attr(FixedObject(cls, cls.__qualname__), name, "type"), "type", type(value))


def _may_change(m: Machine, cls: type, name: str) -> bool:
    """Could this attribute of a class be another one in a later call?"""
    return bool(cls.__flags__ & _HEAP) and id(cls) not in m.world.fresh_pinned and not is_written(m, cls, name)


_OF_CONTAINERS = ("__iter__", "__len__", "__getitem__", "__contains__", "__eq__", "__lt__", "__bool__", "keys", "items", "values")


def speaks_for_itself(m: Machine, cls: type) -> bool:
    """Does a class that extends a container say in Python what it holds, or what it is equal to? C asks it, and not what stands for it."""
    if not cls.__flags__ & _HEAP:
        return False
    found = [find(m, cls, name) for name in _OF_CONTAINERS]
    for name, value in zip(_OF_CONTAINERS, found, strict=True):
        class_guard(m, cls, name, value)
    return any(issubclass(type(value), Function) for value in found)


def is_written(m: Machine, cls: type, name: str) -> bool:
    """Did the program write this class attribute itself?"""
    if not m.class_writes:
        return False
    first = next((base for base in cls.__mro__ if (base, name) in m.class_writes or name in base.__dict__), None)
    return (first, name) in m.class_writes


def _class_value(m: Machine, cls: type, name: str, value: Any) -> Any:
    if is_written(m, cls, name):
        return value
    source = Attr(FixedObject(cls, cls.__qualname__), name, "type")
    return ticket(value, source) if (cls, name) in COUNTERS and type(value) is int and is_torchs(m) else m.world.wrap(value, source)


def is_torchs(m: Machine) -> bool:
    """Is the line that runs one of torch's own?"""
    return policy.is_torch_file(m.frames[-1].code.code.co_filename)


# ---------------------------------------------------------------- reading

ATTR_ROWS: dict[type, Callable[[Any, Any, str], Any]] = {}
SEALED: set[type] = set()  # stand-ins whose attributes cannot be set


def load_attr(m: Machine, obj: Any, name: str) -> Any:
    """`obj.name`."""
    t = type(obj)
    row = ATTR_ROWS.get(t)
    if row is not None:
        return row(m, obj, name)
    if issubclass(type(obj), torch.Tensor):
        return m.tensor_attr(obj, name)
    if issubclass(type(obj), type):
        return _class_attr(m, obj, name)
    if issubclass(type(obj), types.ModuleType):
        return _python_module_attr(m, obj, name)
    return _instance_attr(m, obj, t, name)


def attr_or(m: Machine, obj: Any, name: str, default: Any) -> Any:
    try:
        return load_attr(m, obj, name)
    except Raised as r:
        if isinstance(r.exc, AttributeError):
            m.take(r.exc)
            return default
        raise


def _instance_attr(m: Machine, obj: Any, t: type, name: str) -> Any:
    getattribute = m.found.get((t, "__getattribute__"))
    if getattribute is None:
        getattribute = find(m, t, "__getattribute__")
        class_guard(m, t, "__getattribute__", getattribute)
    if issubclass(type(getattribute), Function):
        try:
            return m.call(getattribute, [obj, name], {})
        except Raised as r:
            fallback = find(m, t, "__getattr__")
            if not isinstance(r.exc, AttributeError) or not issubclass(type(fallback), Function):
                raise
            m.take(r.exc)
            return m.call(fallback, [obj, name], {})
    if _looks_up_itself(getattribute) and id(obj) in m.world.tracks:
        value = _of_thread(m, obj, t, name)
        if value is not MISSING:
            return value
        raise Unsupported("CAP011", at=m.loc(), detail=f"{t.__name__}.{name}: this class, written in C, looks attributes up in its own way")
    return default_getattribute(m, obj, t, name, fallback=True)


def _of_thread(m: Machine, obj: Any, t: type, name: str) -> Any:
    """An attribute of a threading.local from outside: read anew by each call, in its thread. MISSING for any other object, and what its class has."""
    if not issubclass(t, threading.local) or find(m, t, name) is not MISSING:
        return MISSING
    track = m.world.tracks[id(obj)]
    m.world.use(track)
    if track.attrs is not None and name in track.attrs:
        return track.attrs[name]
    try:
        value = getattr(obj, name)
    except (AttributeError, ReferenceError):  # another thread may have it; what a proxy stood for may be gone
        return MISSING
    return m.world.wrap(value, Attr(track.source, name, "getattr"))


@functools.cache
def _looks_up_itself(method: Any) -> bool:
    """Is this `__getattribute__` (`__setattr__`) of a class in C that does not do what object's does? (threading.local, weakref.proxy)"""
    owner = getattr(method, "__objclass__", None)
    return owner is not None and owner not in _OWN_ROWS and bool(_frame.own_lookup(owner))


def looks_up_itself(m: Machine, t: type) -> bool:
    """May an attribute of such an object be another one than its dictionary and its class say?"""
    return is_users(m, t, "__getattribute__") or _looks_up_itself(find(m, t, "__getattribute__"))


_OWN_ROWS = frozenset({type, super, types.ModuleType, types.MethodType, types.FunctionType, types.GenericAlias, object})


def default_getattribute(m: Machine, obj: Any, t: type, name: str, fallback: bool) -> Any:
    """object.__getattribute__, then __getattr__ when `fallback`."""
    world = m.world
    track: Track | None = world.tracks.get(id(obj))
    cattr = find(m, t, name)
    if cattr is not MISSING and _is_data(m, type(cattr)):
        return _get_descriptor(m, cattr, obj, t, name, track)
    if track is not None:
        attrs, d, is_known = track.attrs, _dict_of(obj), False
        inner = world.tracks.get(id(d))
        if inner is not None and inner.image is not None:  # the dictionary was read whole: writes of both kinds are in its image
            if name in inner.image:
                own_guard(m, t, name, cattr)
                return inner.image[name]
        elif attrs is not None and name in attrs:
            if attrs[name] is not DELETED:
                own_guard(m, t, name, cattr)
                return attrs[name]
            is_known = True  # that it was there is guarded already
        elif d is not None and name in d:
            world.use(track)
            own_guard(m, t, name, cattr)
            if attrs and name in _STATE and issubclass(t, torch.nn.Module):
                _show_writes(m, attrs, name, world.wrap(d[name], Attr(track.source, name, "instance")))
            return world.wrap(d[name], Attr(track.source, name, "instance"))
        world.use(track)
        if d is not None and not is_known and (cattr is not MISSING or find(m, t, "__getattr__") is not _MODULE_GETATTR):
            alone = issubclass(type(obj), dict)  # its own dictionary is asked
            if issubclass(type(obj), torch.nn.Module):
                alone = cattr is MISSING or any(name in (d.get(where) or ()) for where, _ in _DICTS)
            world.guard(Attr(track.source, "__dict__", "own") if alone else track.source, "missing", name)
    else:
        d = _dict_of(obj)
        if d is not None and name in d:
            own_guard(m, t, name, cattr)
            if type(d[name]) is Ticket and not is_torchs(m):
                m.settle(d[name])
            return d[name]
    if cattr is not MISSING:
        return _get_descriptor(m, cattr, obj, t, name, track)
    if fallback:
        getter = find(m, t, "__getattr__")
        if getter is _MODULE_GETATTR:
            return _module_attr(m, obj, name, track)
        if issubclass(type(getter), Function):
            class_guard(m, t, "__getattr__", getter)
            return m.call(getter, [obj, name], {})
        if getter is not MISSING:
            return m.call(_in_c(m, t, "__getattr__", getter), [obj, name], {})
        class_guard(m, t, "__getattr__", MISSING)
    class_guard(m, t, name, MISSING)
    raise Raised(_attribute_error(obj, t, name))


def _in_c(m: Machine, t: type, name: str, method: Any) -> Any:
    """A special method of a class that is a function in C: `__getattr__ = dict.__getitem__`."""
    if type(method) not in (types.WrapperDescriptorType, types.MethodDescriptorType):
        raise Unsupported("CAP011", at=m.loc(), detail=f"{t.__name__}.{name} is a {type(method).__name__}")
    class_guard(m, t, name, method)
    return method


def _attribute_error(obj: Any, t: type, name: str) -> AttributeError:
    return AttributeError(f"'{t.__name__}' object has no attribute '{name}'", name=name, obj=obj)


def _dict_of(obj: Any) -> dict[str, Any] | None:
    d = own_dict(obj)
    return d if type(d) is dict else None


def _is_data(m: Machine, dt: type) -> bool:
    """Does a descriptor of this class come before an object's own attribute when it is read?"""
    got = m.data_types.get(dt)
    if got is None:
        got = m.data_types[dt] = (hasattr(dt, "__set__") or hasattr(dt, "__delete__")) and hasattr(dt, "__get__")
    return bool(got)


def _bound(m: Machine, obj: Any, t: type, name: str) -> Any:
    try:
        return getattr(obj, name)
    except AttributeError as e:
        raise Raised(e) from None


def _is_property(m: Machine, cattr: Any, method: str) -> bool:
    """Is this a property, or of a class that extends it and leaves this method as it is?"""
    t = type(cattr)
    return t is property or (issubclass(t, property) and find(m, t, method) is vars(property)[method])


def _get_descriptor(m: Machine, cattr: Any, obj: Any, t: type, name: str, track: Track | None) -> Any:
    """A class attribute seen through an instance."""
    ct = type(cattr)
    if ct is Function:
        class_guard(m, t, name, cattr)
        return types.MethodType(cattr, obj)
    if _is_property(m, cattr, "__get__"):
        class_guard(m, t, name, cattr)
        if cattr.fget is None:
            raise Raised(AttributeError(f"property '{name}' of '{t.__name__}' object has no getter"))
        return m.call(cattr.fget, [obj], {})
    if ct is classmethod:
        class_guard(m, t, name, cattr)
        return _bind_class(cattr.__func__, t)
    if ct is staticmethod:
        class_guard(m, t, name, cattr)
        return cattr.__func__
    if ct is functools.cached_property:
        class_guard(m, t, name, cattr)
        if cattr.attrname is None:
            raise Raised(TypeError("Cannot use cached_property instance without calling __set_name__ on it."))
        value = m.call(cattr.func, [obj], {})
        _store_instance(m, obj, t, cattr.attrname, value)
        return value
    if ct in _DATA_C:
        return _slot(m, cattr, obj, t, name, track)
    getter = find(m, ct, "__get__")
    if getter is MISSING:
        if t.__module__ == "builtins" or id(t) in m.world.fresh_pinned:
            return cattr
        if policy.is_trusted(t.__module__) and (type(cattr) in SCALARS or issubclass(type(cattr), PINNED_TYPES)):
            class_guard(m, t, name, cattr)
            return cattr
        return _class_value(m, t, name, cattr)
    if issubclass(type(getter), Function):
        if issubclass(type(cattr), enum.property):
            return _native_get(cattr, obj, t)
        class_guard(m, t, name, cattr)
        return m.call(getter, [_class_value(m, t, name, cattr), obj, t], {})
    return _native_get(cattr, obj, t)


def _native_get(cattr: Any, obj: Any, t: type) -> Any:
    try:
        return cattr.__get__(obj, t)
    except AttributeError as e:
        raise Raised(e) from None


def _bind_class(func: Any, cls: type) -> Any:
    return types.MethodType(func, cls) if callable(func) else func.__get__(cls, cls)


_UNPACKS = frozenset({"saved_tensors", "saved_variables"})  # of autograd's own contexts: a read unpacks, by hooks of the program's


def _slot(m: Machine, cattr: Any, obj: Any, t: type, name: str, track: Track | None) -> Any:
    if name == "__class__":
        if track is not None:
            m.world.use(track)
        return t
    if name == "__traceback__" and not is_torchs(m):  # torch's own only look and raise again
        raise Unsupported("CAP014", at=m.loc(), detail="the traceback of an exception")
    if track is None:
        return _native_get(cattr, obj, t)
    if track.attrs is not None and name in track.attrs:
        if track.attrs[name] is DELETED:
            raise Raised(_attribute_error(obj, t, name))
        return track.attrs[name]
    if cattr.__objclass__ is torch._C._FunctionBase and name in _UNPACKS:
        raise Unsupported("CAP011", at=m.loc(), detail=f"ctx.{name}: hooks on saved tensors would run again when the graph is called")
    m.world.use(track)
    if name == "__dict__":
        return m.world.dict_of(track)
    try:
        value = cattr.__get__(obj, t)
    except AttributeError as e:
        raise Raised(e) from None
    return m.world.wrap(value, Attr(track.source, name, "slot"))


_DICTS = (("_parameters", "param"), ("_buffers", "buffer"), ("_modules", "module"))


_STATE = frozenset(where for where, _ in _DICTS)


def _show_writes(m: Machine, attrs: dict[str, Any], where: str, held: Any) -> None:
    """A module's dictionary is read after attributes of the module were written: it holds what nn.Module's __setattr__ put into it."""
    image = m.world.image(m.world.tracks[id(held)])
    for name, value in attrs.items():
        is_parameter = issubclass(type(value), torch.Tensor) and m.recorder.info(value).cls is torch.nn.Parameter
        home = "_parameters" if is_parameter else "_modules" if issubclass(type(value), torch.nn.Module) else None
        if value is DELETED or (home is not None and home != where):
            image.pop(name, None)
        elif home == where or name in image:
            image[name] = value


def _module_attr(m: Machine, obj: Any, name: str, track: Track | None) -> Any:
    """nn.Module.__getattr__: parameters, buffers, submodules."""
    for where, via in _DICTS:
        if track is None or (track.attrs and where in track.attrs):
            d = (track.attrs[where] if track is not None and track.attrs else obj.__dict__.get(where)) or {}
            if name in d:
                own_guard(m, type(obj), name, MISSING)
                return d[name]
            continue
        d = obj.__dict__.get(where)
        if d is None:
            continue
        inner = m.world.tracks.get(id(d))
        if inner is not None and inner.dirty:
            if name in inner.image:
                own_guard(m, type(obj), name, MISSING)
                return inner.image[name]
            continue
        if name in d:
            m.world.use(track)
            own_guard(m, type(obj), name, MISSING)
            return m.world.wrap(d[name], Attr(track.source, name, via))  # type: ignore[arg-type]
    if track is not None:
        m.world.guard(track.source, "missing", name)
    class_guard(m, type(obj), name, MISSING)
    raise Raised(_attribute_error(obj, type(obj), name))


def _python_module_attr(m: Machine, mod: types.ModuleType, name: str) -> Any:
    d = mod.__dict__
    written = m.global_writes.get((id(d), name))
    if written is not None:
        if written[2] is NULL:
            raise Raised(AttributeError(f"module {mod.__name__!r} has no attribute {name!r}", name=name, obj=mod))
        return written[2]
    if name not in d:
        try:
            value = getattr(mod, name)  # a lazy module imports here: done once, as eager would
        except AttributeError as e:
            m.world.guard(FixedObject(mod, mod.__name__), "missing", name)
            raise Raised(e) from None
        return m.world.wrap(value, Attr(FixedObject(mod, mod.__name__), name, "getattr"))
    return m.world.wrap(d[name], m.global_source(d, name))


def _class_attr(m: Machine, cls: type, name: str) -> Any:
    track = m.world.tracks.get(id(cls))
    if track is not None and track.attrs and name in track.attrs:
        if track.attrs[name] is DELETED and find(m, cls, name) is MISSING and not hasattr(type(cls), name):
            raise Raised(AttributeError(f"type object '{cls.__name__}' has no attribute '{name}'", name=name, obj=cls))
    meta = type(cls)
    mattr = find(m, meta, name) if meta is not type else type.__dict__.get(name, MISSING)
    is_users = meta is not type and not policy.is_trusted(meta.__module__) and type(mattr) not in _DATA_C
    if mattr is not MISSING and _is_data(m, type(mattr)):
        if is_users:
            return _get_descriptor(m, mattr, cls, meta, name, None)
        value = _bound(m, cls, cls, name)
        if name == "__dict__" and any(c is cls for c, _ in m.class_writes):
            raise Unsupported("CAP012", at=m.loc(), detail=f"{cls.__name__}.__dict__ behind a write to the class")
        if name == "__dict__" and id(cls) not in m.world.fresh_pinned:
            return m.world.wrap(value, Attr(FixedObject(cls, cls.__qualname__), "__dict__", "getattr"))
        return value if name != "__doc__" else m.world.wrap(value, None)
    value = find(m, cls, name)
    if value is not MISSING:
        own_guard(m, meta, name, mattr)
        vt = type(value)
        if vt is Function:
            class_guard(m, cls, name, value)
            return value
        if vt is classmethod:
            class_guard(m, cls, name, value)
            return _bind_class(value.__func__, cls)
        if vt is staticmethod:
            class_guard(m, cls, name, value)
            return value.__func__
        if issubclass(type(value), property) or vt is functools.cached_property:
            class_guard(m, cls, name, value)
            return value
        if issubclass(cls, enum.Enum):
            return _bound(m, cls, cls, name)
        getter = find(m, vt, "__get__")
        if getter is MISSING:
            if id(cls) in m.world.fresh_pinned:
                return value
            if cls.__module__ == "builtins":
                return value
            return _class_value(m, cls, name, value)
        if issubclass(type(getter), Function) and not policy.is_trusted(vt.__module__):
            return m.call(getter, [m.world.wrap(value, Attr(FixedObject(cls, cls.__qualname__), name, "type")), None, cls], {})
        class_guard(m, cls, name, value)
        return _bound(m, cls, cls, name)
    if is_users or mattr is MISSING:
        class_guard(m, cls, name, MISSING)
    if mattr is MISSING:
        class_guard(m, meta, name, MISSING)
        getter = find(m, meta, "__getattr__")
        class_guard(m, meta, "__getattr__", getter)
        if issubclass(type(getter), Function) and not policy.is_trusted(meta.__module__):
            return m.call(getter, [cls, name], {})
    elif is_users:
        return _get_descriptor(m, mattr, cls, meta, name, None)
    elif issubclass(type(mattr), Function):
        return types.MethodType(mattr, cls)
    return _bound(m, cls, cls, name)


def _function_attr(m: Machine, fn: Any, name: str) -> Any:
    track = m.world.tracks.get(id(fn))
    if name == "__dict__" and id(fn) not in m.world.fresh_pinned:
        return m.world.dict_of(m.world.track_pinned(fn))
    inner = m.world.tracks.get(id(fn.__dict__))
    if inner is not None and inner.image is not None:  # it was read whole: writes of both kinds are in its image
        if name in inner.image:
            return inner.image[name]
    elif track is not None and track.attrs and name in track.attrs:
        if track.attrs[name] is DELETED:
            raise Raised(_attribute_error(fn, type(fn), name))
        return track.attrs[name]
    elif name in fn.__dict__:
        if id(fn) in m.world.fresh_pinned:
            return fn.__dict__[name]
        return m.world.wrap(fn.__dict__[name], Attr(track.source if track else FixedObject(fn, fn.__qualname__), name, "instance"))
    if find(m, type(fn), name) is MISSING and id(fn) not in m.world.fresh_pinned:
        m.world.guard(track.source if track else FixedObject(fn, fn.__qualname__), "missing", name)
    value = _bound(m, fn, type(fn), name)
    if name in ("__defaults__", "__kwdefaults__", "__annotations__", "__closure__") and id(fn) not in m.world.fresh_pinned:
        return m.world.wrap(value, Attr(track.source if track else FixedObject(fn, fn.__qualname__), name, "getattr"))
    return value


def _method_attr(m: Machine, method: types.MethodType, name: str) -> Any:
    track = m.world.tracks.get(id(method))
    if name in ("__self__", "__func__"):
        value = getattr(method, name)
        return value if track is None else m.world.wrap(value, Attr(track.source, name, "getattr"))
    if name in ("__call__", "__get__", "__class__", "__hash__", "__eq__", "__doc__"):
        return _bound(m, method, type(method), name)
    return load_attr(m, _method_attr(m, method, "__func__"), name)


def _super_attr(m: Machine, sup: Any, name: str) -> Any:
    """super().name: the next class along the mro, bound to the object."""
    if name == "__class__":
        return super
    owner, obj = sup.__thisclass__, sup.__self__
    start = sup.__self_class__
    mro = start.__mro__
    at = mro.index(owner) + 1
    for base in mro[at:]:
        if name in base.__dict__:
            value = base.__dict__[name]
            break
    else:
        if issubclass(type(obj), torch.nn.Module) and name == "__call__":
            return types.MethodType(torch.nn.Module.__call__, obj)
        raise Raised(AttributeError(f"'super' object has no attribute '{name}'"))
    vt = type(value)
    if vt is Function:
        class_guard(m, base, name, value)
        return value if obj is start else types.MethodType(value, obj)
    if vt is classmethod:
        return _bind_class(value.__func__, start)
    if vt is staticmethod:
        return value.__func__
    if _is_property(m, value, "__get__") and obj is not start:
        return m.call(value.fget, [obj], {})
    getter = find(m, vt, "__get__")
    if getter is MISSING:
        return m.world.wrap(value, Attr(FixedObject(base, base.__qualname__), name, "type"))
    if issubclass(type(getter), Function):
        return m.call(getter, [value, obj, start], {})
    if issubclass(type(obj), type) and obj is start:
        return value.__get__(None, obj)
    return _native_get(value, obj, start)


NUMBERS: dict[Any, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def class_of_number(m: Machine, value: Any) -> Any:
    """The class that the program sees of a number that varies; None of anything else."""
    kind = NUMBERS.get(type(value))
    if kind is not None and not policy.is_trusted(str(m.frames[-1].globals.get("__name__", ""))):
        m.classes_told += 1
    return kind


def _scalar_attr(m: Machine, obj: Any, name: str) -> Any:
    if name == "__class__":
        return class_of_number(m, obj) or type(obj)
    kind = NUMBERS.get(type(obj))
    if kind is not None and not hasattr(kind, name):
        raise Raised(_attribute_error(obj, kind, name))
    if kind is not None:  # what a method of a symbol gives is not what the number's own does
        m.recorder.facts.loc = m.loc()
        obj = kind(obj)
    return _bound(m, obj, type(obj), name)


def _container_attr(m: Machine, obj: Any, name: str) -> Any:
    track = m.world.tracks.get(id(obj))
    if track is not None and name in ("default_factory", "maxlen"):
        return getattr(m.world.image(track), name)
    return _bound(m, obj, type(obj), name)


_PLAIN_OBJECTS: frozenset[Any] = SCALARS | {tuple, frozenset, torch.Size, range, slice, torch.dtype, torch.device, torch.layout, torch.memory_format,
                     torch.SymInt, torch.SymFloat, torch.SymBool, types.BuiltinFunctionType, types.MethodDescriptorType,
                     types.WrapperDescriptorType, types.MethodWrapperType, types.GeneratorType, types.CodeType}  # fmt: skip
for _t in _PLAIN_OBJECTS:
    ATTR_ROWS[_t] = _scalar_attr
for _t in CONTAINERS:
    ATTR_ROWS[_t] = _container_attr
ATTR_ROWS[types.FunctionType] = _function_attr
ATTR_ROWS[types.MethodType] = _method_attr
ATTR_ROWS[types.ModuleType] = _python_module_attr
ATTR_ROWS[type] = _class_attr
ATTR_ROWS[super] = _super_attr
for _t in (torch._ops.OpOverloadPacket, torch._ops._OpNamespace):  # what they look up they keep
    ATTR_ROWS[_t] = lambda m, obj, name: _bound(m, obj, type(obj), name)


def _cell_attr(m: Machine, cell: Any, name: str) -> Any:
    if name == "cell_contents":
        value = m.cell_value(cell)
        if value is NULL:
            raise Raised(ValueError("Cell is empty"))
        return value
    return _bound(m, cell, type(cell), name)


ATTR_ROWS[types.CellType] = _cell_attr


# ---------------------------------------------------------------- writing


def store_attr(m: Machine, obj: Any, name: str, value: Any) -> None:
    """`obj.name = value`."""
    if issubclass(type(obj), torch.Tensor):
        m.tensor_setattr(obj, name, value)
        return
    if type(obj) in SEALED:
        raise Unsupported("CAP060", at=m.loc(), detail=f"{name} of an array is set")
    t = type(obj)
    if t in NUMBERS:  # a number has no place for it
        m.native(setattr, [NUMBERS[t](), name, value], {}, plain=True)
    setter = find(m, t, "__setattr__")
    class_guard(m, t, "__setattr__", setter)
    if setter is _MODULE_SETATTR:
        module_setattr(m, obj, name, value)
    elif issubclass(type(setter), Function):
        m.call(setter, [obj, name, value], {})
    elif issubclass(t, threading.local) and find(m, t, name) is MISSING and m.world.of(obj) is not None:
        m.world.use(m.world.tracks[id(obj)])
        m.world.set_attr(m.world.tracks[id(obj)], name, value)
    elif _looks_up_itself(setter):
        raise Unsupported("CAP012", at=m.loc(), detail=f"{t.__name__}.{name} = ...: this class, written in C, sets attributes in its own way")
    elif setter is not object.__setattr__ and getattr(setter, "__name__", "") != "__setattr__":
        m.call(_in_c(m, t, "__setattr__", setter), [obj, name, value], {})
    else:
        default_setattr(m, obj, t, name, value)


def default_setattr(m: Machine, obj: Any, t: type, name: str, value: Any) -> None:
    """object.__setattr__."""
    if issubclass(type(obj), types.ModuleType):
        m.store_global(obj.__dict__, name, value)
        return
    if t is types.CellType and name == "cell_contents":
        m.store_cell(obj, value)
        return
    if issubclass(type(obj), PINNED_TYPES):
        if id(obj) in m.world.fresh_pinned:
            m.native(type.__setattr__ if issubclass(type(obj), type) else setattr, [obj, name, value], {}, store=True)
            m.found.clear()
        else:
            m.world.set_attr(m.world.track_pinned(obj), name, value)
            _note_class_write(m, obj, name, value)
        return
    if name == "default_factory" and issubclass(t, defaultdict) and (track := m.world.of(obj)) is not None:
        m.world.image(track).default_factory = value  # the image asks it too
    cattr = find(m, t, name)
    if cattr is not MISSING and (_is_data(m, type(cattr)) or hasattr(type(cattr), "__set__")):
        ct = type(cattr)
        if _is_property(m, cattr, "__set__"):
            if cattr.fset is None:
                raise Raised(AttributeError(f"property '{name}' of '{t.__name__}' object has no setter"))
            m.call(cattr.fset, [obj, value], {})
            return
        setter = find(m, ct, "__set__")
        if issubclass(type(setter), Function):
            m.call(setter, [m.world.wrap(cattr, Attr(FixedObject(t, t.__qualname__), name, "type")), obj, value], {})
            return
        if setter is MISSING:
            raise Raised(AttributeError("__set__"))
        if name in ("__dict__", "__class__") and (m.world.of(obj) is not None or m.world.of(value) is not None):
            raise Unsupported("CAP012", at=m.loc(), detail=f"{t.__name__}.{name} = ...")
        track = m.world.of(obj)
        if track is None:
            m.native(ct.__set__, [cattr, obj, value], {}, store=True)
        else:
            m.world.set_attr(track, name, value)
        return
    own_guard(m, t, name, cattr)
    _store_instance(m, obj, t, name, value)


def _store_instance(m: Machine, obj: Any, t: type, name: str, value: Any) -> None:
    track = m.world.of(obj)
    if track is not None:
        m.world.use(track)
        if _dict_of(obj) is None and not issubclass(type(obj), type):
            raise Raised(_cannot_write(m, t, name))
        m.world.set_attr(track, name, value)
    else:
        m.native(object.__setattr__ if not issubclass(type(obj), type) else type.__setattr__, [obj, name, value], {}, store=True)


def module_setattr(m: Machine, obj: Any, name: str, value: Any) -> None:
    """nn.Module.__setattr__ on a module from outside: remembered whole; on a module made here: carried out."""
    track = m.world.of(obj)
    if track is None:
        m.inline(_MODULE_SETATTR, [obj, name, value], {})
        return
    cattr = find(m, type(obj), name)
    if issubclass(type(cattr), property):
        default_setattr(m, obj, type(obj), name, value)
        return
    m.world.use(track)
    m.world.set_attr(track, name, value)


def delete_attr(m: Machine, obj: Any, name: str) -> None:
    """`del obj.name`."""
    t = type(obj)
    deleter = find(m, t, "__delattr__")
    class_guard(m, t, "__delattr__", deleter)
    track = m.world.of(obj)
    if issubclass(type(deleter), Function) and not (deleter is _MODULE_DELATTR and track is not None):
        m.call(deleter, [obj, name], {})
        return
    if deleter is not object.__delattr__ and getattr(deleter, "__name__", "") != "__delattr__":
        m.call(_in_c(m, t, "__delattr__", deleter), [obj, name], {})
        return
    default_delattr(m, obj, t, name)


def default_delattr(m: Machine, obj: Any, t: type, name: str) -> None:
    """object.__delattr__."""
    if issubclass(type(obj), PINNED_TYPES) and id(obj) in m.world.fresh_pinned:
        m.native(type.__delattr__ if issubclass(type(obj), type) else delattr, [obj, name], {}, plain=True)
        m.found.clear()
        return
    if t is types.CellType and name == "cell_contents":
        m.store_cell(obj, NULL)
        return
    track = m.world.of(obj)
    cattr = MISSING if issubclass(type(obj), PINNED_TYPES) else find(m, t, name)
    if _is_property(m, cattr, "__delete__"):
        class_guard(m, t, name, cattr)
        if cattr.fdel is None:
            raise Raised(AttributeError(f"property '{name}' of '{t.__name__}' object has no deleter"))
        m.call(cattr.fdel, [obj], {})
        return
    remover = MISSING if cattr is MISSING else find(m, type(cattr), "__delete__")
    if issubclass(type(remover), Function):
        m.call(remover, [_class_value(m, t, name, cattr), obj], {})
        return
    if remover is MISSING and cattr is not MISSING and hasattr(type(cattr), "__set__"):
        raise Raised(AttributeError("__delete__"))
    if remover is MISSING and not issubclass(type(obj), PINNED_TYPES):
        own_guard(m, t, name, cattr)
    if track is None and not issubclass(type(obj), PINNED_TYPES):
        m.native(object.__delattr__, [obj, name], {})
        return
    if track is None or issubclass(type(obj), (types.ModuleType, torch.nn.Module, *PINNED_TYPES)):
        load_attr(m, obj, name)
    else:
        _has_own(m, obj, t, name, track)
    if issubclass(type(obj), types.ModuleType):
        m.store_global(obj.__dict__, name, NULL)
        return
    m.world.set_attr(track or m.world.track_pinned(obj), name, DELETED)
    _note_class_write(m, obj, name, DELETED)


def _has_own(m: Machine, obj: Any, t: type, name: str, track: Track) -> None:
    """Does an object from outside have an attribute of its own by this name? What its class has does not count."""
    cattr = find(m, t, name)
    if cattr is not MISSING and type(cattr) in _DATA_C:
        try:
            _slot(m, cattr, obj, t, name, track)
        except Raised as r:
            raise Raised(AttributeError(name)) from r
        return
    d = _dict_of(obj)
    if d is None:
        raise Raised(_cannot_write(m, t, name))
    inner = m.world.tracks.get(id(d))
    if inner is not None and inner.image is not None:
        has = name in inner.image
    elif track.attrs is not None and name in track.attrs:
        has = track.attrs[name] is not DELETED
    else:
        m.world.use(track)
        has = name in d
        if has:
            m.world.wrap(d[name], Attr(track.source, name, "instance"))
        else:
            m.world.guard(track.source if not issubclass(type(obj), dict) else Attr(track.source, "__dict__", "own"), "missing", name)
    if not has:
        raise Raised(AttributeError(f"'{t.__name__}' object has no attribute '{name}'"))


def _cannot_write(m: Machine, t: type, name: str) -> AttributeError:
    """What Python says where an object without a dictionary has no place for this attribute."""
    if find(m, t, name) is MISSING:
        return AttributeError(f"'{t.__name__}' object has no attribute '{name}'")
    return AttributeError(f"'{t.__name__}' object attribute '{name}' is read-only")


def _note_class_write(m: Machine, obj: Any, name: str, value: Any) -> None:
    if issubclass(type(obj), type):
        m.class_writes[obj, name] = value
        m.found.clear()


__all__ = ["Item", "Raised", "TypeOf", "attr_or", "delete_attr", "find", "load_attr", "store_attr"]
