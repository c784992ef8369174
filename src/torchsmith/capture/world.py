"""What the machine knows of the world outside the frame: where each object came from, what was relied on, what was changed.

The machine's values are ordinary Python objects. An object made during capture is itself ("fresh"). A number or string read from
outside is itself too, once an "equals" guard pins it. Classes, functions and modules are pinned by identity. Every other object
from outside is tracked by identity: reading a part of it gives a guard, and writing to it goes to an overlay (attributes) or to an
image (a private copy of a container), never to the object; finish replays the overlay after the graph has run. A tensor from
outside is replaced by its tracing tensor and becomes a placeholder.
"""

from __future__ import annotations

import datetime
import enum
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Set
from typing import Any

import numpy as np
import torch

from ..codes import Unsupported
from . import _frame, policy
from .source import (
    ORDERED_VIEWS,
    VIEWS,
    Attr,
    Cell,
    FixedObject,
    Global,
    Guard,
    Item,
    Local,
    PartOf,
    Source,
    TensorKey,
    TensorOf,
    TypeOf,
    referent,
)

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()
NULL: Any = type("Null", (), {"__repr__": lambda self: "<null>"})()  # no value: an empty place of a stack, a deleted global
DELETED: Any = type("Deleted", (), {"__repr__": lambda self: "<deleted>"})()

SCALARS = frozenset({int, float, str, bytes, bool, type(None), complex, type(Ellipsis), type(NotImplemented)})
CONTAINERS = frozenset({list, dict, set, OrderedDict, defaultdict, deque})
PINNED_TYPES: tuple[type, ...] = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType,
    types.GenericAlias, types.UnionType, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, property, staticmethod,
    classmethod, range, slice, torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops._OpNamespace, torch._ops._Ops,
    torch.Generator, torch.finfo, torch.iinfo, torch.torch_version.TorchVersion,
)  # fmt: skip


def is_binding(fn: Any) -> bool:
    """Is this a function of C++, whose `__self__` is a record that pybind11 keeps about it and no object that has the function?"""
    t = type(fn.__self__)
    return t.__name__ == "PyCapsule" or t.__module__.startswith("pybind11")


def is_method(fn: Any) -> bool:
    """Is this a method in C, bound to an object that is no module and no class?"""
    t = type(fn)
    if not issubclass(t, types.BuiltinFunctionType):  # a method in C that knows its class is of a type below
        return t is types.MethodWrapperType and not issubclass(type(fn.__self__), PINNED_TYPES)
    return not issubclass(type(fn.__self__), (types.ModuleType, type, type(None))) and not is_binding(fn)


def _says_all(t: type, name: str) -> bool:
    """Is a method of such an object known by its name, and what it does by what the object holds?"""
    is_kind = container_base(t) is not None or t in SCALARS or issubclass(t, torch.Tensor)
    return is_kind and sum(name in base.__dict__ for base in t.__mro__) == 1


# Objects in C that nobody can change: what is equal to one is as good as it.
UNCHANGING = frozenset({re.Pattern, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone})


_BASES: dict[type, type | None] = {t: t for t in CONTAINERS}


def held(container: Any) -> int:
    """How many items a container has; a `__len__` of the program is not asked."""
    base: Any = container_base(type(container))
    return int(base.__len__(container))


def container_base(t: type) -> type | None:
    """The builtin container a class is or extends, else None."""
    if t not in _BASES:
        _BASES[t] = next((b for b in (OrderedDict, defaultdict, deque, dict, list, set) if issubclass(t, b)), None)
    return _BASES[t]


def entries(table: Any) -> Any:
    """A dictionary's items, as the builtin that it extends has them: move_to_end may have given them another order."""
    return OrderedDict.items(table) if issubclass(type(table), OrderedDict) else dict.items(table)


def has_image(t: type) -> bool:
    """Can objects of this class from outside be read whole?"""
    return container_base(t) is not None or t in _IMAGE


def own_dict(obj: Any) -> Any:
    """An object's __dict__ without asking its class; None where it has none."""
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None


class Momentary(int):
    """A number that other calls do not have. In effects and results it is asked for again; whatever else follows from it pins it."""


class Identity(Momentary):
    """id() of an object, `of`: good for telling objects apart while capturing."""

    of: Any


class Ticket(Momentary):
    """What a counter outside said when the call began, and `more`: a key that no dictionary of torch's own has yet."""

    source: Source
    more: int


def ticket(value: int, source: Source, more: int = 0) -> Ticket:
    """`more` is part of the value already."""
    made = Ticket(value)
    made.source, made.more = source, more
    return made


COUNTERS = frozenset({(torch.utils.hooks.RemovableHandle, "next_id")})  # attributes of classes that number what torch makes


class Track:
    """An object from outside: where it came from, its image or overlay, whether its type is guarded."""

    __slots__ = ("_attrs", "_image", "appended", "dirty", "obj", "reads", "settle", "source", "used")

    def __init__(self, obj: Any, source: Source) -> None:
        self.obj, self.source = obj, source
        self._image: Any = None
        self.appended: list[Any] | None = None  # what was appended to a list that nobody has looked into
        self.settle: Callable[[Track], Any] | None = None
        self.dirty = False  # the image was changed
        self._attrs: dict[str, Any] | None = None
        self.reads: list[int] | None = None  # of what was changed: World.reads
        self.used = False

    @property
    def attrs(self) -> dict[str, Any] | None:
        """Attributes written (or DELETED)."""
        if self.reads is not None:
            self.reads[0] += 1
        return self._attrs

    @attrs.setter
    def attrs(self, value: dict[str, Any] | None) -> None:
        self._attrs = value

    @property
    def image(self) -> Any:
        """A private container holding wrapped items, or None as long as nobody has looked into it."""
        if self.reads is not None:
            self.reads[0] += 1
        if self._image is None and self.appended is not None and self.settle is not None:
            self.settle(self)
        return self._image

    @image.setter
    def image(self, value: Any) -> None:
        self._image = value


def _differ(a: Any, b: Any) -> bool:
    return type(a) is not type(b) or (a != b and not (a != a and b != b))


def item_of(base: Source, key: Any) -> Source:
    """The source of base[key]; entries of nn.Module's dictionaries are named as attributes."""
    if isinstance(base, Attr) and base.via == "instance" and issubclass(type(key), str):
        via = _MODULE_DICTS.get(base.name)
        if via is not None:
            return Attr(base.base, key, via)  # type: ignore[arg-type]
    return Item(base, key)


_MODULE_DICTS = {"_modules": "module", "_parameters": "param", "_buffers": "buffer"}


def root_of(source: Source) -> Source:
    while isinstance(source, (Attr, Item, TypeOf, TensorOf, PartOf)):
        source = source.base
    return source


class World:
    """Everything one capture reads from and writes to outside."""

    def __init__(
        self, loc: Callable[[], str], tensor: Callable[[torch.Tensor, Source], Any],
        number: Callable[[int | float, Source], Any] = lambda value, source: None,
    ) -> None:  # fmt: skip
        """tensor, number: what stands for a tensor, and for an integer or float if it is to vary (None: it is pinned)."""
        self.loc, self._tensor, self._number = loc, tensor, number
        self.varies: Callable[[Source], bool] = lambda source: False  # were other numbers seen in this tuple?
        self.tracks: dict[int, Track] = {}
        self.keep: list[Any] = []
        self.guards: dict[Any, Guard] = {}
        self.cell_sources: dict[int, Source] = {}  # where contents of cells from outside come from
        self.tuples: dict[int, Source] = {}  # where tuples of constants came from
        self.changed: list[Track] = []  # in order of first change
        self.pinned: dict[int, Source] = {}
        self.by_code = False  # functions in cells of the one that is captured may be others in the next call, with the same code
        self.fresh_pinned: set[int] = set()  # classes and functions made during capture
        self.global_writes: dict[tuple[int, str], tuple[dict[str, Any], Source, Any]] = {}  # by namespace and name; NULL: deleted
        self.array_scalar: Callable[[Any, Source], Any] = lambda scalar, source: MISSING
        self.array: Callable[[Any, Source], Any] = lambda array, source: MISSING  # what stands for an array of NumPy
        self.walks: list[Track] = []  # iterators from outside that were looked into
        self.walk: Callable[[Track], Any] = lambda track: None  # makes the image of one
        self.attribute: Callable[[Any, str], Any] = getattr  # an attribute as the program reads it
        self.real_tensor: Callable[[Any], Any] = lambda tensor: tensor  # the tensor outside that a tracing tensor stands for
        self.told: dict[int, Any] = {}  # objects from outside that the program told from others: none may be another one in a later call
        self.growing: Set[str] = frozenset()  # dictionaries of which neither keys nor length are assumed
        self.writes = 0  # changes of the world so far
        self.reads = [0]  # how often what was changed was looked at, or may have been
        self.log: list[tuple[str, Any, Source, Any]] | None = None  # every reading, repeated ones too: ("guard", value, source, kind),
        # ("track", object, source, None), ("tensor", ...), ("tuple", ...), ("number", ...), ("use", ...); kept for stamps.py

    def let_go(self) -> None:
        """Drop all that was read from outside."""
        for held in (self.tracks, self.keep, self.changed, self.walks, self.tuples, self.pinned, self.global_writes):
            held.clear()
        self.log = None

    # ------------------------------------------------------------ guards

    def guard(self, source: Source, kind: Any, value: Any, loc: str = "") -> None:
        """Add one condition, once. What was read before with another result was changed meanwhile, by another thread."""
        if self.log is not None:
            self.log.append(("guard", value, source, kind))
        if self.growing and kind in ("length", "dict_keys") and str(source) in self.growing:
            raise Unsupported("GRA015", at=self.loc(), detail=str(source))
        key = (source, kind, value if kind == "missing" else None)
        known = self.guards.get(key)
        if known is None:
            self.guards[key] = Guard(source, kind, value, loc or self.loc())
        elif known.value is not value and _differ(known.value, value):
            raise Unsupported("CAP036", at=self.loc(), detail=str(source))

    def use(self, track: Track) -> None:
        """The machine is going to rely on what kind of object this is."""
        if not track.used:
            track.used = True
            self.guard(track.source, "type", type(track.obj))

    # ------------------------------------------------------------ reading

    def wrap(self, obj: Any, source: Source | None) -> Any:
        """The machine's value for an object read from `source` (None: from a trusted namespace)."""
        row = _WRAP.get(type(obj))
        if row is not None:
            return row(self, obj, source)
        return self._wrap_other(obj, source)

    def _wrap_other(self, obj: Any, source: Source | None) -> Any:
        if issubclass(type(obj), torch.Tensor):
            return self._tensor(obj, source or FixedObject(obj, "tensor"))
        if issubclass(type(obj), PINNED_TYPES):
            return self.pin(obj, source)
        if issubclass(type(obj), tuple) and type(obj).__new__ is not tuple.__new__ and hasattr(type(obj), "_fields"):
            return _wrap_tuple(self, obj, source)
        if issubclass(type(obj), tuple) and hasattr(type(obj), "n_sequence_fields") and is_constant(tuple(obj)):
            return self._equals(obj, source)  # sys.version_info and the like
        if isinstance(obj, np.dtype):
            return self._equals(obj, source)
        if type(obj).__module__ == "numpy" and hasattr(obj, "dtype") and type(obj).__hash__ is not None:  # a number, not an array without axes
            made = self.array_scalar(obj, source) if source is not None and self.varies(source) else MISSING
            return self._equals(obj, source) if made is MISSING else made
        return self.track(obj, source or FixedObject(obj, type(obj).__name__))

    def _equals(self, obj: Any, source: Source | None) -> Any:
        if source is not None and not isinstance(source, FixedObject):
            self.guard(source, "equals", obj)
        return obj

    def _number_or_constant(self, obj: int | float, source: Source | None) -> Any:
        varying = None if source is None else self._number(obj, source)
        return self._equals(obj, source) if varying is None else varying

    def has_own_address(self, obj: Any) -> bool:
        """Is this an object that the program made, which each call makes anew at another address?"""
        t = type(obj)
        if t in SCALARS or id(obj) in self.tracks:
            return False
        return id(obj) in self.fresh_pinned or not issubclass(t, PINNED_TYPES)

    def pin(self, obj: Any, source: Source | None) -> Any:
        """An object that is a constant once its identity is guarded."""
        if is_method(obj):
            if source is not None and isinstance(root_of(source), Local) and _says_all(type(obj.__self__), obj.__name__):
                return self._method(obj, source)
            if not is_constant(obj.__self__):
                self.track(obj.__self__, FixedObject(obj.__self__, obj.__name__))  # what it belongs to is from outside
        if source is not None and not isinstance(source, FixedObject):
            if isinstance(root_of(source), (Local, Cell) if self.by_code else Local) and issubclass(type(obj), types.FunctionType):
                return self.track(obj, source)  # made anew for each call perhaps: guarded by its code instead
            self.guard(source, "identity", obj)
            self.pinned.setdefault(id(obj), source)
            self.keep.append(obj)
        return obj

    def pin_weakly(self, obj: Any, source: Source) -> None:
        """An attribute of a class: what a function is made of is looked up there, too, so that no entry keeps one that was replaced."""
        self.guard(source, "equals" if type(obj) in SCALARS else "identity", obj)
        if issubclass(type(obj), types.FunctionType):
            self.pinned.setdefault(id(obj), source)
            self.keep.append(obj)

    def _method(self, obj: Any, source: Source) -> Any:
        """A method in C of an object: `out.append` is made anew by each call, so what counts is whose method it is, and its name."""
        self.track(obj, source)
        self.guard(Attr(source, "__name__"), "equals", obj.__name__)
        owner = self.wrap(obj.__self__, Attr(source, "__self__"))
        return obj if owner is obj.__self__ else self.attribute(owner, obj.__name__)

    def note(self, what: str, value: Any, source: Source) -> None:
        """For the log: something was read."""
        if self.log is not None:
            self.log.append((what, value, source, None))

    def track(self, obj: Any, source: Source) -> Any:
        if self.log is not None:
            self.log.append(("track", obj, source, None))
        known = self.tracks.get(id(obj))
        if known is not None:
            if known.source != source:
                self.guard(source, "alias", known.source)
            return obj
        self.tracks[id(obj)] = track = Track(obj, source)
        self.keep.append(obj)
        if not issubclass(type(source), FixedObject):
            self.use(track)  # whatever is asked of it, `is` and str() too, follows from its class
        return obj

    def of(self, obj: Any) -> Track | None:
        return self.tracks.get(id(obj))

    def key(self, key: Any) -> Any:
        """What stands for a dictionary's key: tensors are found by identity, so their tracing tensors are, and other objects too."""
        if is_by_identity(key):
            return self.wrap(key, FixedObject(key, type(key).__name__))
        return self._tensor(key, FixedObject(key, "tensor")) if issubclass(type(key), torch.Tensor) else key

    def canonical(self, obj: Any) -> Any:
        """An image stands for its object wherever identity matters."""
        track = self.tracks.get(id(obj))
        return obj if track is None else track.obj

    def tell_apart(self, obj: Any) -> None:
        """The program relies on which object this is among others of its class."""
        track = self.tracks.get(id(obj))
        if track is not None or issubclass(type(obj), torch.Tensor):
            found = self.real_tensor(obj) if track is None else track.obj
            self.told[id(found)] = found

    def guard_apart(self, tensors: Iterable[tuple[Any, Source]]) -> None:
        """Objects that the program told apart or wrote to are no other object of their class, in every call. tensors: those from outside."""
        owners = {t.source.base for t in self.changed if isinstance(t.source, Attr) and t.source.via == "own"}  # through their __dict__
        told = {id(t.obj) for t in self.changed} | {id(t.obj) for t in self.tracks.values() if t.source in owners} | self.told.keys()
        if not told:
            return
        groups: dict[type, tuple[dict[Source, None], dict[Source, None]]] = {}  # told apart, others
        known = [(torch.Tensor, *row) for row in tensors] + [(type(t.obj), t.obj, t.source) for t in self.tracks.values()]
        for cls, obj, source in known:
            if _may_be_shared(source):
                groups.setdefault(cls, ({}, {}))[id(obj) not in told][source] = None
        for apart, others in groups.values():
            if apart and len(apart) + len(others) > 1:
                self.guard(next(iter(apart)), "distinct", (tuple(apart), tuple(others)))

    # ------------------------------------------------------------ containers

    def image(self, track: Track) -> Any:
        """A private container with the same contents, all of which are now relied on."""
        if track.reads is not None:
            self.reads[0] += 1
        if track._image is None:
            row = _IMAGE.get(type(track.obj)) or _IMAGE.get(container_base(type(track.obj)) or object)
            if row is None:
                raise Unsupported("CAP011", at=self.loc(), detail=f"{type(track.obj).__name__} from {track.source}")
            self.use(track)
            track._image = row(self, track)
            for (space, name), (_, _, value) in self.global_writes.items():
                if space == id(track.obj):
                    put(track._image, name, value)
            if track.appended is not None:
                track._image += track.appended
                track.appended, track.dirty = None, True
            self.tracks[id(track.image)] = track
            self.keep.append(track.image)
        return track.image

    def append(self, track: Track, value: Any) -> None:
        """list.append to a list from outside: does not say that anybody relies on its length."""
        self.writes += 1
        if track._image is not None:
            self.change(track).append(value)
            return
        self.use(track)
        if track.appended is None:
            track.appended, track.settle = [], self.image
            self._mark(track)
        track.appended.append(value)

    def change(self, track: Track) -> Any:
        """The image of a container that is about to be written."""
        self.writes += 1
        image = self.image(track)
        if not track.dirty:
            track.dirty = True
            self._mark(track)
        return image

    def _mark(self, track: Track) -> None:
        if track.reads is None:
            track.reads = self.reads
            self.changed.append(track)

    def changed_containers(self) -> set[int]:
        """Containers from outside that do not hold what they held, by the id of their Track."""
        return {id(t) for t in self.changed if t.appended is not None or (t.dirty and not self.is_as_it_was(t))}

    def is_as_it_was(self, track: Track) -> bool:
        """Does a dictionary hold what it held, in the same order? (`state["momentum_buffer"] = buffer` of every step.)"""
        image, obj = track.image, track.obj
        if type(image) is not dict or type(obj) is not dict:
            return False

        def real(x: Any) -> Any:
            return self.real_tensor(x) if issubclass(type(x), torch.Tensor) else self.canonical(x)

        def is_pinned(k: Any) -> bool:  # what it held is what it holds in every call: no number that varies
            return (item_of(track.source, k), "equals", None) in self.guards

        return len(image) == len(obj) and all(
            real(k) is j and ((is_pinned(k) and type(v) is type(w) and v == w) if type(v) in SCALARS else real(v) is w)
            for (k, v), (j, w) in zip(image.items(), obj.items(), strict=True)
        )

    # ------------------------------------------------------------ attributes

    def set_attr(self, track: Track, name: str, value: Any) -> None:
        """Write (or DELETED) to an object from outside: remembered, replayed by finish."""
        self.writes += 1
        if track.attrs is None:
            track.attrs = {}
        if track.attrs.get(name) is DELETED:
            del track.attrs[name]
        track.attrs[name] = value
        self._mark(track)
        inner = self.tracks.get(id(own_dict(track.obj)))
        if inner is not None and inner.image is not None:
            put(inner.image, name, value)

    def dict_of(self, track: Track) -> Any:
        """An outside object's __dict__; what was written to the object is in its image."""
        d = own_dict(track.obj)
        self.wrap(d, Attr(track.source, "__dict__", "own"))
        if track.attrs:
            inner = self.tracks[id(d)]
            if inner.image is None:
                image = self.image(inner)
                for name, value in track.attrs.items():
                    put(image, name, value)
        return d

    def track_pinned(self, obj: Any) -> Track:
        """A Track for a class, function or module that is about to be written to."""
        track = self.tracks.get(id(obj))
        if track is None:
            self.track(obj, self.pinned.get(id(obj)) or FixedObject(obj, getattr(obj, "__name__", "object")))
            track = self.tracks[id(obj)]
        return track


def put(image: dict[str, Any], name: str, value: Any) -> None:
    """What an attribute or global that is written (or deleted) does to the image of its dictionary."""
    if value is DELETED or value is NULL:
        image.pop(name, None)
    else:
        image[name] = value


# ---------------------------------------------------------------- rows: how an object of this exact type is read

_WRAP: dict[type, Callable[[World, Any, Source | None], Any]] = {}
_IMAGE: dict[type, Callable[[World, Track], Any]] = {}


def is_constant(obj: Any) -> bool:
    """Whether a value is immutable through and through and can be compared by a guard."""
    t = type(obj)
    return t in SCALARS or t is torch.Size or t is torch.dtype or t is torch.device or (t in (tuple, frozenset) and all(map(is_constant, obj)))


def _wrap_tuple(world: World, obj: Any, source: Source | None) -> Any:
    if source is None or (is_constant(obj) and not world.varies(source)):
        if source is None and not is_constant(obj):
            source = FixedObject(obj, "tuple")
        else:
            if source is not None and obj and type(obj) in (tuple, torch.Size):
                world.tuples.setdefault(id(obj), source)
                world.keep.append(obj)
            return world._equals(obj, source)
    assert source is not None
    world.note("tuple", obj, source)
    known = world.tracks.get(id(obj))
    if known is not None:
        if known.source != source:
            world.guard(source, "alias", known.source)
        return known.image
    track = Track(obj, source)
    world.use(track)
    world.guard(source, "length", len(obj))
    items = [world.wrap(x, Item(source, i)) for i, x in enumerate(obj)]
    track.image = torch.Size(items) if type(obj) is torch.Size else tuple.__new__(type(obj), items)
    world.tracks[id(obj)] = world.tracks[id(track.image)] = track
    world.keep += [obj, track.image]
    return track.image


def _wrap_view(world: World, obj: Any, source: Source | None) -> Any:
    """keys(), values() or items() of a dictionary from outside: the same of its image, which shows what the program writes to it."""
    source = source or FixedObject(obj, type(obj).__name__)
    known = world.tracks.get(id(obj))
    if known is not None:
        if known.source != source:
            world.guard(source, "alias", known.source)
        return known.image
    held = world.wrap(referent(obj), Attr(source, "mapping", "referent"))
    track = Track(obj, source)
    world.use(track)
    kind = next(name for name, t in zip(("keys", "values", "items"), VIEWS, strict=True) if issubclass(type(obj), t))
    track.image = getattr(world.image(world.tracks[id(held)]), kind)()
    world.note("track", obj, source)
    world.tracks[id(obj)] = world.tracks[id(track.image)] = track
    world.keep += [obj, track.image]
    return track.image


def _wrap_container(world: World, obj: Any, source: Source | None) -> Any:
    world.track(obj, source or FixedObject(obj, type(obj).__name__))
    world.use(world.tracks[id(obj)])
    return obj


_VALUES: frozenset[Any] = SCALARS | {torch.Size, torch.device, range, slice, types.GenericAlias, types.UnionType}
for _t in _VALUES | UNCHANGING:
    _WRAP[_t] = World._equals
_WRAP[int] = _WRAP[float] = World._number_or_constant
_WRAP[tuple] = _WRAP[torch.Size] = _wrap_tuple
_WRAP[frozenset] = lambda world, obj, source: (
    world._equals(obj, source)
    if all(is_constant(x) or issubclass(type(x), PINNED_TYPES) for x in obj)
    else world.track(obj, source or FixedObject(obj))
)
for _t in CONTAINERS:
    _WRAP[_t] = _wrap_container
for _t in (*VIEWS, *ORDERED_VIEWS):
    _WRAP[_t] = _wrap_view
for _t in (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType):
    _WRAP[_t] = World.pin
_WRAP[torch.Tensor] = lambda world, obj, source: world._tensor(obj, source or FixedObject(obj, "tensor"))
_WRAP[torch.nn.Parameter] = _WRAP[torch.Tensor]


def _wrap_array(world: World, obj: Any, source: Source | None) -> Any:
    source = source or FixedObject(obj, "array")
    made = world.array(obj, source)
    return world.track(obj, source) if made is MISSING else made


_WRAP[np.ndarray] = _wrap_array


def _wrap_cell(world: World, obj: Any, source: Source | None) -> Any:
    source = source or FixedObject(obj, "cell")
    world.cell_sources.setdefault(id(obj), Item(source, "cell_contents"))
    return world.track(obj, source)


_WRAP[types.CellType] = _wrap_cell


def _image_list(world: World, track: Track) -> Any:
    world.guard(track.source, "length", list.__len__(track.obj))
    return [world.wrap(x, Item(track.source, i)) for i, x in enumerate(list.__iter__(track.obj))]


def _image_deque(world: World, track: Track) -> Any:
    world.guard(Attr(track.source, "maxlen", "getattr"), "equals", track.obj.maxlen)
    world.guard(track.source, "length", len(track.obj))
    items = [world.wrap(x, Item(track.source, i)) for i, x in enumerate(deque.__iter__(track.obj))]
    return deque(items, track.obj.maxlen)


def _may_be_shared(source: Source) -> bool:
    """Could the user put the same object at another place? Not what is fixed, nor the dictionaries that make an object or a module."""
    if isinstance(source, Attr):
        return source.via not in ("own", "type") and not (source.via == "instance" and source.name in _OF_MODULES)
    return not isinstance(source, FixedObject)


_OF_MODULES = frozenset(torch.nn.Module().__dict__)


def is_by_identity(key: Any) -> bool:
    """An object (a module) that is equal to nothing but itself."""
    t = type(key)
    return bool(t.__flags__ & 0x200) and t.__hash__ is object.__hash__ and t.__eq__ is object.__eq__ and not issubclass(t, PINNED_TYPES)


def is_key(key: Any) -> bool:
    """Whether a dictionary key can be compared by a guard."""
    return is_constant(key) or is_by_identity(key) or issubclass(type(key), (*PINNED_TYPES, torch.Tensor)) or (type(key) is tuple and all(map(is_key, key)))


def _dict_items(world: World, track: Track) -> list[tuple[Any, Any]]:
    rows = entries(track.obj) if issubclass(type(track.obj), dict) else track.obj.items()
    keys = tuple(k for k, _ in rows)
    for key in keys:
        if not is_key(key):
            raise Unsupported("CAP011", at=world.loc(), detail=f"dictionary key of type {type(key).__name__} in {track.source}")
    named = tuple(TensorKey(k) if issubclass(type(k), torch.Tensor) else k for k in keys)
    world.guard(track.source, "dict_keys", named)
    return [(world.key(k), world.wrap(v, item_of(track.source, name))) for name, (k, v) in zip(named, rows, strict=True)]


def _image_set(world: World, track: Track) -> Any:
    if not all(is_key(x) and not issubclass(type(x), torch.Tensor) for x in track.obj):
        raise Unsupported("CAP011", at=world.loc(), detail=f"set of objects from {track.source}")
    held = _frame.clone_set(track.obj)  # in the order of the set outside
    world.guard(track.source, "equals", frozenset(track.obj) if issubclass(type(track.obj), frozenset) else held)
    return _frame.clone_set(held)


def _image_defaultdict(world: World, track: Track) -> Any:
    factory = world.wrap(track.obj.default_factory, Attr(track.source, "default_factory", "slot"))
    return defaultdict(factory, _dict_items(world, track))


def _image_proxy(world: World, track: Track) -> Any:
    """A proxy shows what the program writes to its dictionary; that of a class is read as it is."""
    over = referent(track.obj)
    if type(over) is dict and "__doc__" in over:
        return dict(_dict_items(world, track))
    if not issubclass(type(over), dict):
        raise Unsupported("CAP011", at=world.loc(), detail=f"a mappingproxy of a {type(over).__name__} from outside")
    held = world.wrap(over, Attr(track.source, "mapping", "referent"))
    return types.MappingProxyType(world.image(world.tracks[id(held)]))


_IMAGE[list] = _image_list
_IMAGE[dict] = lambda world, track: dict(_dict_items(world, track))
_IMAGE[OrderedDict] = lambda world, track: OrderedDict(_dict_items(world, track))
_IMAGE[defaultdict] = _image_defaultdict
_IMAGE[set] = _image_set
_IMAGE[frozenset] = _image_set
_IMAGE[deque] = _image_deque
_IMAGE[types.MappingProxyType] = _image_proxy

__all__ = ["DELETED", "MISSING", "NULL", "Cell", "Global", "Track", "World", "item_of", "policy", "put", "root_of"]
