"""How Python sees the result: a recipe for plain results, generated Python text where objects are built or effects replayed.

In: the machine after the frame returned, and its result. Out: Captured, with the graph's outputs in order.
"""

from __future__ import annotations

import abc
import builtins
import collections
import contextlib
import copyreg
import dataclasses
import enum
import functools
import itertools
import operator
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from ..codes import Unsupported
from ..graph import tracing
from ..graph.functionalise import goes_backwards
from ..graph.sizes import SymTypes
from ..graph.spec import assumes
from . import _frame, arrays, assemble, iterators, overrides, policy
from .arrays import ArrayMethod, ArrayValue
from .captured import Captured, Finish
from .floats import is_of_data
from .protocol import Machine
from .protocols import Driven
from .resume import Later, Stop, Unbound, can_be_missed, is_data, is_missed
from .source import (
    ITSELF,
    ORDERED_VIEWS,
    VIEWS,
    Attr,
    Cell,
    Computed,
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
from .tensor_attrs import TensorMethod
from .tensors import extent
from .world import CONTAINERS, DELETED, NULL, PINNED_TYPES, SCALARS, UNCHANGING, Identity, Ticket, Track, entries, is_method

if TYPE_CHECKING:
    from .frame import Frame

_LITERALS = frozenset({int, str, bytes, bool, type(None)})


class _Builder:
    """Writes the statements of `finish`, one object at a time; an object met twice is built once."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.reads: list[str] = []  # what is read from outside is read before anything is changed
        self.read_names: dict[Source, str] = {}
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {}
        self.constants: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.outs: list[torch.fx.Node] = []
        self.index: dict[Any, int] = {}
        self.sources: dict[Source, str] = {}
        self.keep: list[Any] = []
        self.written: set[int] = set()  # containers (their tracks) whose contents the lines so far have written
        self.moves = iterators.moves(machine) if machine.world.walks else []

    # ------------------------------------------------------------ leaves

    def out(self, node: Any) -> int:
        if node not in self.index:
            if node.meta.get("or_number"):
                raise Unsupported("CAP020", at=self.m.loc(), detail="min() or max(), which gives a tensor or a number,")
            self.index[node] = len(self.outs)
            self.outs.append(node)
        return self.index[node]

    def const(self, value: Any) -> str:
        if type(value) in _LITERALS:
            return repr(value)
        name = self.constants.get(id(value))
        if name is None:
            name = self.constants[id(value)] = f"k{len(self.namespace)}"
            self.namespace[name] = value
            self.keep.append(value)
        return name

    def source(self, s: Source) -> str:
        """Python text that reads a source."""
        if isinstance(s, Local):
            return f"L[{s.name!r}]"
        if isinstance(s, Global):
            space = "G" if s.namespace is None else self.const(s.namespace.value)
            if s.name not in (self.m.entry.__globals__ if s.namespace is None else s.namespace.value):
                space = self.const(vars(builtins))
            return f"{space}[{s.name!r}]"
        if isinstance(s, Cell):
            return f"C[{s.name!r}].cell_contents"
        if isinstance(s, FixedObject):
            return self.const(s.value)
        if isinstance(s, TypeOf):
            return f"type({self.source(s.base)})"
        if isinstance(s, Item):
            base = self.source(s.base)
            if isinstance(s.key, TensorKey):
                return f"{base}[{self.const(s.key.ref)}()]"
            return f"{base}.cell_contents" if s.key == "cell_contents" else f"{base}[{self.const(s.key)}]"
        if isinstance(s, Computed) and not s.symbols:
            return f"{self.const(s.fn)}({', '.join(map(repr, s.args))})"
        if isinstance(s, (TensorOf, PartOf)):
            return f"{self.const(s.make)}(({self.source(s.base)},))"
        if isinstance(s, Attr):
            base = self.source(s.base)
            row = {"param": "_parameters", "buffer": "_buffers", "module": "_modules"}.get(s.via)
            if row:
                return f"{base}.{row}[{s.name!r}]"
            if s.via == "referent":
                return f"{self.const(referent)}({base})"
            if s.via == "type":
                return f"{self.const(_of_class)}({base}, {s.name!r})"
            return f"{base}.{s.name}" if s.name.isidentifier() else f"getattr({base}, {s.name!r})"
        raise Unsupported("CAP015", at=self.m.loc(), detail=f"a value from {s}")

    def read(self, s: Source) -> str:
        """A name for what a source holds before the effects."""
        name = self.read_names.get(s)
        if name is None:
            name = self.read_names[s] = f"r{len(self.reads)}"
            self.reads.append(f"{name} = {self.source(s)}")
        return name

    # ------------------------------------------------------------ values

    def value(self, v: Any) -> str:
        """An expression for a machine value; statements it needs are written before."""
        t = type(v)
        if t in _LITERALS:
            return repr(v)
        if t in SCALARS:
            return self.const(v)
        if issubclass(type(v), torch.Tensor):
            return self._tensor(v)
        if t in SymTypes:
            node = self.m.recorder.fx(v)
            return f"outs[{self.out(node)}]" if issubclass(type(node), torch.fx.Node) else repr(node)
        known = self.names.get(id(v))
        if known is not None:
            return known
        if policy.is_of_machine(v):
            if v.__dict__[policy.INTERPRETS] is NotImplemented:
                raise Unsupported("CAP015", at=self.m.loc(), detail="a function of the bytecode machine")
            return self.value(v.__dict__[policy.INTERPRETS])
        track = self.m.world.tracks.get(id(v))
        source = track.source if track is not None else self.m.world.tuples.get(id(v)) if t in (tuple, torch.Size) else None
        if source is not None:
            self.names[id(v)] = self.read(source)
            self.keep.append(v)
            return self.names[id(v)]
        if t is Later:
            return self.read(v.source)
        if _is_bound(v):  # a method in C: of the object that the caller gets, not of what stood for it
            return self._name(v, f"{self.value(self.m.world.canonical(v.__self__))}.{v.__name__}")
        if issubclass(t, enum.Enum) and id(t) in self.m.world.fresh_pinned:
            raise Unsupported("CAP015", at=self.m.loc(), detail=f"a member of {t.__qualname__}, a class made inside")
        if id(v) not in self.m.world.fresh_pinned and issubclass(type(v), PINNED_TYPES) and t not in (slice, range):
            return self.const(v)
        row = _BUILD.get(t)
        if row is not None:
            return row(self, v)
        if issubclass(type(v), np.ndarray):
            raise Unsupported("CAP060", at=self.m.loc(), detail="an array that NumPy made")
        top = t.__module__.partition(".")[0]
        if t in UNCHANGING or t in _MARKS or v is _NO_METADATA or issubclass(type(v), enum.Enum) or top == "typing" or (top == "numpy" and not t.__flags__ & 0x200):
            return self.const(v)
        if issubclass(type(v), tuple) and type(v).__new__ is not object.__new__:
            return self._tuple_like(v)
        return self._object(v)

    def _class(self, cls: type) -> str:
        """The class of an object that the program made: one that was made inside is made anew."""
        return self.value(cls) if id(cls) in self.m.world.fresh_pinned else self.const(cls)

    def _tensor(self, v: torch.Tensor) -> str:
        info = self.m.recorder.info(v)
        if info.source is not None:
            return self.read(info.source)
        if info.cls is torch.nn.Parameter:
            why = Unsupported("CAP015", at=info.place[1], detail="a Parameter that was made inside")
            why.step = info.place[0]  # behind it the frame goes on with a leaf that others know
            raise why
        text = f"outs[{self.out(info.node)}]"
        if not overrides.is_subclass(info.cls):
            return text
        return self.names.get(id(v)) or self._name(v, f"{self.const(overrides.as_subclass)}({text}, {self._class(info.cls)})")

    def array(self, v: ArrayValue) -> str:
        if v.source is not None and not v.is_scalar:
            return self._name(v, self.read(v.source))
        make = arrays.scalar_of if v.is_scalar else arrays.fixed_of if v.is_fixed else arrays.array_of
        return self._name(v, f"{self.const(make)}(outs[{self.out(self.m.recorder.node_of(v.tensor))}])")

    def _name(self, v: Any, text: str) -> str:
        if id(v) in self.names:  # what it holds led back to it
            return self.names[id(v)]
        name = self.names[id(v)] = f"v{len(self.names)}"
        self.keep.append(v)
        self.lines.append(f"{name} = {text}")
        return name

    def _tuple_like(self, v: tuple[Any, ...]) -> str:
        items = ", ".join(self.value(x) for x in tuple.__iter__(v))
        cls = self._class(type(v))
        items += "," * (len(items) > 0)
        if hasattr(type(v), "n_sequence_fields"):
            return self._name(v, f"{cls}(({items}))")
        name = self._name(v, f"tuple.__new__({cls}, ({items}))")
        self._attributes(v, name)
        return name

    def _object(self, v: Any) -> str:
        """An instance of a user's class, attribute by attribute."""
        t = type(v)
        if t in (types.GeneratorType, types.FrameType, Driven):
            raise Unsupported("CAP015", at=self.m.loc(), detail=t.__name__)
        base = next((b for b in (OrderedDict, dict, list, set, BaseException, types.SimpleNamespace, *_EXACT) if issubclass(t, b)), object)
        if base in _EXACT and t.__flags__ & 0x200:
            name = self._name(v, f"{self.const(base)}.__new__({self._class(type(v))}, {self.value(_EXACT[base](v))})")
            self._attributes(v, name)
            return name
        if base is object and _is_made_in_c(t):
            raise Unsupported("CAP015", at=self.m.loc(), detail=f"{t.__module__}.{t.__qualname__}")
        if base is BaseException:
            return self._exception(v)
        name = self._name(v, f"{self.const(base)}.__new__({self._class(type(v))})")
        if issubclass(type(v), dict):
            put = "OrderedDict" if issubclass(type(v), OrderedDict) else "dict"
            self.namespace.setdefault("OrderedDict", OrderedDict)
            if issubclass(type(v), OrderedDict):
                self.lines.append(f"OrderedDict.__init__({name})")
            elif issubclass(type(v), defaultdict):
                self.lines.append(f"{name}.default_factory = {self.value(v.default_factory)}")
            for k, x in entries(v):
                self.lines.append(f"{put}.__setitem__({name}, {self.value(k)}, {self.value(x)})")
        elif issubclass(type(v), list):
            self.lines.append(f"list.extend({name}, [{', '.join(self.value(x) for x in list.__iter__(v))}])")
        elif issubclass(type(v), set):
            self.lines.append(f"set.update({name}, [{', '.join(self.value(x) for x in set.__iter__(v))}])")
        self._attributes(v, name)
        return name

    def _exception(self, v: BaseException) -> str:
        """An exception that the program made, as the class in C below its own makes it."""
        made = next(t for t in type(v).__mro__ if not t.__flags__ & 0x200)
        args = [v.message, type(v.args[1])(v.exceptions)] if isinstance(v, BaseExceptionGroup) else list(v.args)
        values = [self.value(a) for a in args]
        name = self._name(v, f"{self.const(made)}.__new__({', '.join([self._class(type(v)), *values])})")
        if vars(made).get("__init__") not in (None, vars(BaseException)["__init__"]):
            self.lines.append(f"{self.const(made)}.__init__({', '.join([name, *values])})")
        if not isinstance(v, BaseExceptionGroup):
            self.lines.append(f"{name}.args = {self.value(v.args)}")
            members = {k for t in made.__mro__[:-2] for k, d in vars(t).items() if type(d) is types.MemberDescriptorType}
            for k in sorted(members):
                if getattr(v, k) is not None:
                    self.lines.append(f"{name}.{k} = {self.value(getattr(v, k))}")
        for k in ("__cause__", "__context__"):
            if getattr(v, k) is not None:
                self.lines.append(f"{name}.{k} = {self.value(getattr(v, k))}")
        if v.__suppress_context__ != (v.__cause__ is not None):
            self.lines.append(f"{name}.__suppress_context__ = {v.__suppress_context__}")
        self._attributes(v, name)
        return name

    def _attributes(self, v: Any, name: str) -> None:
        """What an object's dictionary and slots hold."""
        t = type(v)
        d = getattr(v, "__dict__", None)
        if d:
            for k, x in d.items():
                self.lines.append(f"{name}.__dict__[{k!r}] = {self.value(x)}")
        for slot in copyreg._slotnames(t):  # type: ignore[attr-defined]
            if type(getattr(t, slot, None)) is types.MemberDescriptorType and hasattr(v, slot):  # else a subclass has a property there
                self.lines.append(f"object.__setattr__({name}, {slot!r}, {self.value(getattr(v, slot))})")


_EXACT: dict[type, Any] = {  # an object's value as its builtin class has it
    int: int.__pos__, float: float.__pos__, complex: complex.__pos__, str: str.__str__, bytes: lambda v: bytes.__getitem__(v, slice(None)),
    frozenset: lambda v: frozenset(frozenset.__iter__(v)),
}  # fmt: skip


def _of_class(cls: type, name: str) -> Any:
    """What a class holds by this name, unbound: what a descriptor gives is something else."""
    return next(base.__dict__[name] for base in cls.__mro__ if name in base.__dict__)


def _is_bound(v: Any) -> bool:
    """Is this a method in C bound to an object (`[].append`), and not a function of a module or class?"""
    return is_method(v) and not issubclass(type(v.__self__), PINNED_TYPES)


def _is_made_in_c(t: type) -> bool:
    """Whether object.__new__ refuses this class: its instances hold more than attributes."""
    try:
        object.__new__(t)
    except TypeError:
        return True
    return False


def _build_list(b: _Builder, v: list[Any]) -> str:
    name = b._name(v, "[]")
    items = ", ".join(b.value(x) for x in v)
    if items:
        b.lines.append(f"{name} += [{items}]")
    return name


def _build_tuple(b: _Builder, v: tuple[Any, ...]) -> str:
    items = ", ".join([b.value(x) for x in v])
    return b._name(v, f"tuple([{items}])" if v else "()")  # of a literal Python would make one constant wherever it stands


def _build_dict(b: _Builder, v: dict[Any, Any]) -> str:
    name = b._name(v, "{}")
    for k, x in v.items():
        b.lines.append(f"{name}[{b.value(k)}] = {b.value(x)}")
    return name


def _build_ordered(b: _Builder, v: Any) -> str:
    name = b._name(v, f"{b.const(OrderedDict)}()")
    for k, x in v.items():
        b.lines.append(f"{name}[{b.value(k)}] = {b.value(x)}")
    return name


def _build_defaultdict(b: _Builder, v: Any) -> str:
    name = b._name(v, f"{b.const(defaultdict)}({b.value(v.default_factory)})")
    for k, x in v.items():
        b.lines.append(f"{name}[{b.value(k)}] = {b.value(x)}")
    return name


def _build_set(b: _Builder, v: Any) -> str:
    if type(v) is set and all(type(x) in SCALARS for x in v):  # in the order that it has
        return b._name(v, f"{b.const(_frame.clone_set)}({b.const(_frame.clone_set(v))})")
    if type(v) is frozenset:
        if all(type(x) in SCALARS for x in v):  # never changes: itself, in the order that it has
            return b.const(v)
        return b._name(v, f"frozenset([{', '.join(b.value(x) for x in v)}])")
    name = b._name(v, "set()")  # what it holds may lead back to it
    b.lines.append(f"{name}.update([{', '.join(b.value(x) for x in v)}])")
    return name


def _build_deque(b: _Builder, v: Any) -> str:
    name = b._name(v, f"{b.const(deque)}((), {v.maxlen!r})")
    if v:
        b.lines.append(f"{name}.extend([{', '.join(b.value(x) for x in v)}])")
    return name


def _build_class(b: _Builder, cls: type) -> str:
    """A class that was made while capturing, made anew in each call: empty first, for what it holds may lead back to it. Raises
    Unsupported("CAP015") where making or filling one does more: the frame is split where it is made."""
    bases, own = cls.__bases__, dict(cls.__dict__)
    told = any("__init_subclass__" in vars(t) for t in cls.__mro__[1:-1])
    named = any(hasattr(type(v), "__set_name__") and type(v) is not property for v in own.values())
    shadowing = any(k in own and type(own[k]) not in _BY_PYTHON and k not in _SETTABLE for t in (type, object) for k, d in vars(t).items() if hasattr(d, "__set__"))
    if type(cls) not in _PLAIN_METAS or told or named or shadowing:
        raise Unsupported("CAP015", at=b.m.loc(), detail=f"{cls.__qualname__}, a class made inside")
    first = {k: own.pop(k) for k in ("__module__", "__qualname__", "__doc__", "__slots__") if k in own}
    first.setdefault("__qualname__", cls.__qualname__)
    name = b._name(cls, f"{b.const(type(cls))}({cls.__name__!r}, ({''.join(f'{b._class(t)}, ' for t in bases)}), {first!r})")
    for k, v in own.items():
        if type(v) not in _BY_PYTHON:
            b.lines.append(f"{b.const(type.__setattr__)}({name}, {k!r}, {_member(b, v)})")
    return name


def _member(b: _Builder, v: Any) -> str:
    """What such a class holds: functions in their wrappers, and values."""
    t, fresh = type(v), b.m.world.fresh_pinned
    if t in (staticmethod, classmethod):
        return f"{b.const(t)}({_member(b, v.__func__)})"
    if t is property:
        parts = ", ".join("None" if f is None else _member(b, f) for f in (v.fget, v.fset, v.fdel))
        return f"{b.const(t)}({parts}, {v.__doc__!r})"
    if t is types.FunctionType and id(v) not in fresh and id(v) not in b.m.world.pinned and (v.__closure__ or v.__defaults__ or v.__kwdefaults__):
        return b.names.get(id(v)) or _build_function(b, v)  # made by exec, as namedtuple's
    return b.const(v) if t is _FIELD_GETTER else b.value(v)


_MARKS = frozenset(map(type, (dataclasses.MISSING, dataclasses._FIELD, dataclasses._HAS_DEFAULT_FACTORY)))  # type: ignore[attr-defined]
_SETTABLE = frozenset({"__module__", "__qualname__", "__doc__", "__annotations__", "__abstractmethods__", "__type_params__"})
_PLAIN_METAS = frozenset({type, type(torch.Tensor), abc.ABCMeta})
_ABC_STATE = type(vars(abc.ABC)["_abc_impl"])
_BY_PYTHON = (types.GetSetDescriptorType, types.MemberDescriptorType, _ABC_STATE)  # what Python itself puts into a class
_NO_METADATA = dataclasses.field().metadata
_FIELD_GETTER = type(collections.namedtuple("_Pair", "a").a)  # type: ignore[attr-defined]  # of a namedtuple: it knows its place only


def _build_size(b: _Builder, v: Any) -> str:
    return b._name(v, f"{b.const(torch.Size)}(({', '.join(b.value(x) for x in v)}{',' if len(v) else ''}))")


def _build_slice(b: _Builder, v: slice) -> str:
    return f"slice({b.value(v.start)}, {b.value(v.stop)}, {b.value(v.step)})"


def _build_method(b: _Builder, v: types.MethodType) -> str:
    return b._name(v, f"{b.const(types.MethodType)}({b.value(v.__func__)}, {b.value(v.__self__)})")


def _build_partial(b: _Builder, v: Any) -> str:
    keywords = ", ".join(f"**{{{k!r}: {b.value(x)}}}" for k, x in v.keywords.items())
    args = ", ".join([b.value(v.func), *(b.value(x) for x in v.args)])
    return b._name(v, f"{b.const(type(v))}({args}{', ' + keywords if keywords else ''})")


def _build_function(b: _Builder, v: types.FunctionType) -> str:
    """A closure made during capture: its cells hold rebuilt values. What leads back to the function finds it by its name."""
    fresh = [cell for cell in v.__closure__ or () if id(cell) not in b.names]
    cells = [_name_cell(b, cell) for cell in v.__closure__ or ()]
    closure = f"({', '.join(cells)},)" if cells else "None"
    space = "G" if v.__globals__ is b.m.entry.__globals__ else b.const(v.__globals__)
    name = b._name(v, f"{b.const(types.FunctionType)}({b.const(v.__code__)}, {space}, {v.__name__!r}, None, {closure})")
    for cell in fresh:
        _fill_cell(b, cell)
    if v.__defaults__:
        b.lines.append(f"{name}.__defaults__ = {b.value(v.__defaults__)}")
    if v.__kwdefaults__:
        b.lines.append(f"{name}.__kwdefaults__ = {b.value(v.__kwdefaults__)}")
    b.lines.append(f"{name}.__qualname__ = {v.__qualname__!r}")
    twin = types.FunctionType(v.__code__, v.__globals__, v.__name__, None, v.__closure__)
    for k in ("__doc__", "__module__", *(("__annotations__",) if sys.version_info < (3, 14) else ())):
        if getattr(v, k) != getattr(twin, k):
            b.lines.append(f"{name}.{k} = {b.value(getattr(v, k))}")
    if v.__dict__:
        b.lines.append(f"{name}.__dict__.update({b.value(dict(v.__dict__))})")
    return name


def _cell(b: _Builder, source: Source) -> str:
    """The cell whose contents a source is."""
    return f"C[{source.name!r}]" if isinstance(source, Cell) else b.read(cast(Item, source).base)


def _name_cell(b: _Builder, cell: Any) -> str:
    known = b.names.get(id(cell))
    if known is not None:
        return known
    if id(cell) in b.m.cell_sources:
        return b._name(cell, _cell(b, b.m.cell_sources[id(cell)]))
    return b._name(cell, f"{b.const(types.CellType)}()")


def _fill_cell(b: _Builder, cell: Any) -> None:
    """What a cell that the program made holds."""
    if id(cell) not in b.m.cell_sources:
        with contextlib.suppress(ValueError):  # it is empty
            content = cell.cell_contents
            b.lines.append(f"{b.names[id(cell)]}.cell_contents = {b.value(content)}")


def _build_cell(b: _Builder, cell: Any) -> str:
    name = _name_cell(b, cell)
    _fill_cell(b, cell)
    return name


def _build_iterator(b: _Builder, v: Any) -> str:
    """An iterator of Python's own, where it stands."""
    place = iterators.place_of(v) if type(v) in iterators.TABLES else None
    if place == iterators.CHANGED:
        raise Unsupported("CAP015", at=b.m.loc(), detail="an iterator of what has another size since")
    table = None if place is None else iterators.held((v,))
    if table is not None and _keeps_order(b, table):
        target = b.value(b.m.world.canonical(table))
        track = b.m.world.tracks.get(id(table))
        if track is not None and track.dirty and id(track) not in b.written:
            _replay_container(b, track, target)
        name = b._name(v, f"iter({target}{iterators.way(v)})")  # it is to notice changes of what it walks through
        b.lines.append(f"{b.const(iterators.move_to)}({name}, {place})")
        return name
    make, args, *state = v.__reduce__()
    name = b._name(v, f"{b.const(make)}({', '.join(b.value(a) for a in args)})")
    if state and state[0] is not None:
        b.lines.append(f"{name}.__setstate__({b.value(state[0])})")
    return name


def _keeps_order(b: _Builder, table: Any) -> bool:
    """Has the dictionary or set that the caller gets the same things in the same places? A set that is made anew has objects elsewhere."""
    track = b.m.world.tracks.get(id(table))
    return isinstance(table, dict) or (track is not None and not track.dirty) or (type(table) is set and all(type(x) in SCALARS for x in table))


def _build_view(b: _Builder, v: Any) -> str:
    """keys(), values() or items() of a dictionary: of the one that the caller gets."""
    kind = next(name for name, t in zip(("keys", "values", "items"), VIEWS, strict=True) if issubclass(type(v), t))
    return b._name(v, f"{b.value(b.m.world.canonical(referent(v)))}.{kind}()")


_ITERATORS: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter(range(2**70))), type(iter("")), type(iter("\u0101")), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(reversed([])), enumerate, zip, map, filter, reversed,
    *((itertools.count, itertools.repeat, itertools.chain, itertools.islice, itertools.cycle, itertools.accumulate, itertools.product,
       itertools.combinations, itertools.permutations, itertools.starmap, itertools.takewhile, itertools.dropwhile, itertools.filterfalse,
       itertools.compress, itertools.zip_longest)
      if sys.version_info < (3, 12) else ()),
)  # fmt: skip
_BUILD: dict[type, Any] = {
    **dict.fromkeys(_ITERATORS, _build_iterator), super: lambda b, v: f"super({b.value(v.__thisclass__)}, {b.value(v.__self__)})",
    **dict.fromkeys(_PLAIN_METAS, _build_class), list: _build_list, tuple: _build_tuple, dict: _build_dict, OrderedDict: _build_ordered, defaultdict: _build_defaultdict,
    set: _build_set, frozenset: _build_set, deque: _build_deque, torch.Size: _build_size, slice: _build_slice,
    ArrayValue: lambda b, v: b.array(v), ArrayMethod: lambda b, v: f"{b.value(v.__self__)}.{v.__name__}",
    TensorMethod: lambda b, v: f"{b.value(v.__self__)}.{v.__name__}", types.MethodType: _build_method, types.FunctionType: _build_function, types.CellType: _build_cell,
    range: lambda b, v: b.const(v), types.MappingProxyType: lambda b, v: b._name(v, f"{b.const(types.MappingProxyType)}({b.value(b.m.world.canonical(referent(v)))})"),
    weakref.ref: lambda b, v: b._name(v, f"{b.const(weakref.ref)}({b.const(set) + '()' if v() is None else b.value(v())})"),
    Identity: lambda b, v: f"id({b.value(v.of)})", Ticket: lambda b, v: f"({b.read(v.source)} + {v.more})",
    overrides.Disabled: lambda b, v: b._name(v, f"{b.const(v.stands_for)}()"),
    **dict.fromkeys((*VIEWS, *ORDERED_VIEWS), _build_view),
}  # fmt: skip


def _partials() -> None:
    _BUILD[functools.partial] = _build_partial


_partials()


# ---------------------------------------------------------------- effects


def _remove(obj: Any, name: str) -> None:
    """`del obj.name`; the program may have made what it deletes."""
    remove = torch.nn.Module.__delattr__ if isinstance(obj, torch.nn.Module) else type.__delattr__ if isinstance(obj, type) else object.__delattr__
    with contextlib.suppress(AttributeError):
        if isinstance(obj, types.ModuleType):
            delattr(obj, name)
        else:  # what the class makes of it was interpreted
            remove(obj, name)


def _replay(b: _Builder) -> None:
    """Statements that do to the outside world what the program did."""
    m = b.m
    m.gradients.replay(b)
    for track in sorted(m.world.changed, key=lambda t: isinstance(t.source, Attr) and t.source.via == "own"):  # a __dict__ has it all
        target = b.read(track.source)
        if track.appended is not None:
            b.lines.append(f"list.extend({target}, [{', '.join(b.value(x) for x in track.appended)}])")
        elif track.dirty and id(track) not in b.written:
            _replay_container(b, track, target)
        for name, value in (track.attrs or {}).items():
            if value is DELETED:
                b.lines.append(f"{b.const(_remove)}({target}, {name!r})")
            elif _plain_setattr(track):
                b.lines.append(f"setattr({target}, {name!r}, {b.value(value)})")
            else:
                is_module = issubclass(type(track.obj), torch.nn.Module)
                base = b.const(torch.nn.Module) if is_module else "type" if issubclass(type(track.obj), type) else "object"
                b.lines.append(f"{base}.__setattr__({target}, {name!r}, {b.value(value)})")
    for space, source, value in m.global_writes.values():
        where = "G" if source.namespace is None else b.const(space)
        b.lines.append(f"{where}.pop({source.name!r}, None)" if value is NULL else f"{where}[{source.name!r}] = {b.value(value)}")
    for cell, value in m.cell_writes.values():
        source = m.cell_sources[id(cell)]
        where = _cell(b, source)
        b.lines.append(f"del {where}.cell_contents" if value is NULL else f"{where}.cell_contents = {b.value(value)}")
    for move, track, how in b.moves:
        b.lines.append(f"{b.const(move)}({b.read(track.source)}, {b.const(how)})")
    for fn, args, kwargs in m.effects:
        text = ", ".join([*(b.value(a) for a in args), *(f"{k}={b.value(v)}" for k, v in kwargs.items())])
        b.lines.append(f"{b.const(fn)}({text})")


def _plain_setattr(track: Track) -> bool:
    t = type(track.obj)
    return issubclass(t, (types.ModuleType, types.FunctionType, threading.local)) or (issubclass(t, torch.nn.Module) and t.__setattr__ is torch.nn.Module.__setattr__)


def _replay_container(b: _Builder, track: Track, target: str) -> None:
    """The container takes its image's contents, by the builtin's own methods: a subclass's would run twice."""
    b.written.add(id(track))
    image = track.image
    base = b.const(type(image))
    if issubclass(type(image), dict):
        pairs = ", ".join(f"({b.value(k)}, {b.value(x)})" for k, x in image.items())
        name = f"w{len(b.lines)}"
        b.lines.append(f"{name} = [{pairs}]")
        b.lines.append(f"{base}.clear({target})")
        put = b.const(OrderedDict) if issubclass(type(image), OrderedDict) else "dict"
        b.lines.append(f"for k, x in {name}: {put}.__setitem__({target}, k, x)")
        return
    name = f"w{len(b.lines)}"
    b.lines.append(f"{name} = [{', '.join(b.value(x) for x in image)}]")
    if type(image) is list:
        b.lines.append(f"list.__setitem__({target}, slice(None), {name})")
    elif type(image) is set and all(type(x) in SCALARS for x in image):  # in the order that the program's own writes would have given
        b.lines.append(f"{b.const(_frame.refill_set)}({target}, {b.const(_frame.clone_set(image))})")
    else:
        b.lines.append(f"{base}.clear({target})")
        b.lines.append(f"{base}.{'extend' if issubclass(type(image), deque) else 'update'}({target}, {name})")


# ---------------------------------------------------------------- recipe


def _recipe(b: _Builder, v: Any) -> tuple[Any, ...] | None:
    """The recipe of a plain result, or None where text is needed."""
    t = type(v)
    m = b.m
    if t is Later:
        return ("source", v.source)
    if issubclass(type(v), torch.Tensor):
        info = m.recorder.info(v)
        if info.source is None and (overrides.is_subclass(info.cls) or info.cls is torch.nn.Parameter):
            return None
        return ("source", info.source) if info.source is not None else ("out", b.out(info.node))
    if t in SCALARS:
        return ("const", v)
    if t in SymTypes:
        node = m.recorder.fx(v)
        return ("out", b.out(node)) if issubclass(type(node), torch.fx.Node) else ("const", node)
    track = m.world.tracks.get(id(v))
    if track is not None:
        return ("source", track.source)
    if t in (tuple, torch.Size) and id(v) in m.world.tuples:
        return ("source", m.world.tuples[id(v)])
    if t in (tuple, list):
        parts = [_recipe(b, x) for x in v]
        if None in parts:
            return None
        return ("tuple" if t is tuple else "list", *parts)
    if t is dict and all(type(k) in SCALARS for k in v):
        pairs = [(k, _recipe(b, x)) for k, x in v.items()]
        return None if any(r is None for _, r in pairs) else ("dict", tuple(pairs))
    if (
        issubclass(type(v), PINNED_TYPES)
        and id(v) not in m.world.fresh_pinned
        and t not in CONTAINERS
        and t not in _HOLDING
        and not _is_bound(v)
        and not policy.is_of_machine(v)
    ):
        return ("const", v)
    return None


_HOLDING = frozenset({slice, property, staticmethod, classmethod})  # may hold what stands for the program's values


def _has_shared(v: Any, seen: set[int]) -> bool:
    if type(v) in (list, dict):
        if id(v) in seen:
            return True
        seen.add(id(v))
    if type(v) in (list, tuple):
        return any(_has_shared(x, seen) for x in v)
    return type(v) is dict and any(_has_shared(x, seen) for x in v.values())


def finished(m: Machine, result: Any) -> Captured:
    """Close the graph and say how the result is made."""
    world = m.world
    m.gradients.own_hooks.register()
    m.gradients.check_retained()
    b = _Builder(m)
    m.effects += overrides.changes(m)
    owners = {t.source for t in world.changed if t.attrs}  # whose attributes are written one by one, deletions too: their __dict__ says how it ends
    for track in world.changed:
        is_own = isinstance(track.source, Attr) and track.source.via == "own" and track.source.base in owners
        track.dirty = track.dirty and (is_own or not world.is_as_it_was(track))
    world.changed = [t for t in world.changed if t.dirty or t.attrs or t.appended]
    grad = m.grad != m.grad_before
    has_effects = bool(world.changed or m.global_writes or m.cell_writes or m.effects or b.moves or grad or m.gradients.changes() or m.gradients.own() or m.gradients.moved or m.gradients.switched)
    m.recorder.acts = has_effects
    recipe = None if has_effects or _has_shared(result, set()) else _recipe(b, result)
    if recipe is not None:
        finish = Finish(recipe)
    else:
        b = _Builder(m)
        text = b.value(result)
        _replay(b)
        m.gradients.replay_own(b)
        if grad:
            b.lines.append(f"{b.const(overrides.set_grad)}({m.grad})")
        body = "\n".join(f"    {line}" for line in [*b.reads, *b.lines, f"return {text}"])
        finish = Finish(None, f"def finish(outs, L, G, C):\n{body}\n", b.namespace)
    return closed(m, b, finish)


def stopped(m: Machine, frame: Frame) -> Captured:
    """Close a capture in front of an instruction: the result is what the frame holds there, as far as it is still read."""
    code, ins = frame.code.code, frame.code.instrs[frame.index]
    reader = assemble.frame_reader(code)
    if reader is not None:
        raise Unsupported("CAP027", at=m.loc(), detail=f"the function uses {reader}")
    if assemble.touches(ins) is None:
        raise Unsupported("CAP028", at=m.loc(), detail=ins.name)
    if m.exc is not None and any(i.name == "CHECK_EG_MATCH" for i in frame.code.instrs):
        raise Unsupported("CAP028", at=m.loc(), detail="an except* that has begun")  # Python tells its parts by tracebacks
    if assemble.may_be_super(code, ins) and (frame.fast[0] is NULL or code.co_varnames[0] in code.co_cellvars):
        raise Unsupported("CAP028", at=m.loc(), detail="super()")
    if m.contexts:
        raise Unsupported("CAP028", at=m.loc(), detail="an open inference mode or autocast region")
    if m.handlers_off != m.handlers_before:
        raise Unsupported("CAP028", at=m.loc(), detail="torch functions whose handlers are disabled")
    if m.has_unfinished():  # one that is not read any more, too: what stands in its `finally` is still to come
        raise Unsupported("CAP028", at=m.loc(), detail="a generator that has begun")
    alive = assemble.live(code)[frame.index]
    own = ins.arg if ins.name in ("LOAD_FAST", "LOAD_FAST_CHECK", "DELETE_FAST") else -1
    slots = tuple(s for s in sorted(alive | _held(m, frame, alive)) if s != own or m.has_value(frame.fast[s]))
    stack = tuple(v is not NULL for v in frame.stack)
    values = [*(Unbound if frame.fast[s] is NULL else frame.fast[s] for s in slots), *(v for v in frame.stack if v is not NULL), *(() if m.exc is None else (m.exc,))]
    raised = {id(e) for e in m.all_raised}
    if raised and any(id(v) in raised for v in values):
        raise Unsupported("CAP028", at=m.loc(), detail="an exception that was raised, and has no traceback")
    varying = tuple(_varies(m, v) for v in values)
    carried = assemble.carried(code)[frame.index]
    data = [v.is_data if type(v) is Later else (type(v) in SymTypes and not k) or (type(v) is ArrayValue and v.is_scalar) for v, k in zip(values, varying)]
    for k, (s, v) in enumerate(zip(slots, values)):
        data[k] = data[k] or (s in carried and not varying[k] and is_data(v.obj if type(v) is Later else v))
    before = next((i for i in reversed(frame.code.instrs[: frame.index]) if i.name not in ("PRECALL", "EXTENDED_ARG")), None)
    kw_names = before.arg if before is not None and before.name == "KW_NAMES" else None
    done = finished(m, tuple(values))
    done.graph.meta["stops"] = True  # what it gives goes on in the frame
    return replace(done, stop=Stop(code, frame.index, slots, stack, m.exc is not None, kw_names, tuple(data), varying))


def _held(m: Machine, frame: Frame, alive: frozenset[int]) -> set[int]:
    """Variables that nothing reads any more and whose end the program would see: as in eager they live until the frame ends, where the
    frame gives them no other value. What the instruction works on may be given weak references by it."""
    code = frame.code.code
    n = assemble.touches(frame.code.instrs[frame.index]) or 0
    worked_on = {id(v) for v in frame.stack[len(frame.stack) - n :]} if n else set()
    others = alive | assemble.overwritten(code)[frame.index]
    plain = range(len(frame.fast) - len(code.co_freevars))
    return {s for s in plain if s not in others and frame.fast[s] is not NULL and _is_seen_ending(m, frame.fast[s], id(frame.fast[s]) in worked_on)}


def _is_seen_ending(m: Machine, v: Any, may_be: bool) -> bool:
    if type(v) is Later:
        v = v.obj
    elif (track := m.world.tracks.get(id(v))) is not None:
        if not m.later:
            return False  # the caller's
        v = track.obj
    elif issubclass(type(v), types.GeneratorType):
        return False  # the machine's own
    return is_missed(v) or (may_be and can_be_missed(type(v)))


def _varies(m: Machine, v: Any) -> bool:
    """Is this a number that differs from call to call, and is known before the graph runs?"""
    if type(v) is Later:
        return ITSELF in m.asked.dynamic_dims.get(str(v.source), ())
    return type(v) in (torch.SymInt, torch.SymFloat) and v.node.hint is not None and not is_of_data(m, v)


def can_hand_over(m: Machine, frame: Frame) -> bool:
    """Whether all that the outermost frame holds can be made anew outside: a quick look, which may say yes too often."""
    if m.contexts or m.handlers_off != m.handlers_before or assemble.touches(frame.code.instrs[frame.index]) is None:
        return False
    raised = {id(e) for e in m.all_raised}
    if m.exc is not None and not _can_move(m, m.exc, 0, raised):
        return False
    return all(_can_move(m, v, 3, raised) for v in (*frame.fast, *frame.stack))


def _can_move(m: Machine, v: Any, depth: int, raised: set[int]) -> bool:
    t = type(v)
    if id(v) in raised:
        return False
    if t in SCALARS or v is NULL or t is Later or t is ArrayValue or t in SymTypes or id(v) in m.world.tracks or issubclass(t, torch.Tensor):
        return True
    fresh = m.world.fresh_pinned
    if t in (types.GeneratorType, Driven) or issubclass(t, torch.nn.Module) or id(t) in fresh or (id(v) in fresh and issubclass(t, type)):
        return False
    if depth == 0:
        return True
    inner: Any = ()
    if t in (list, tuple, set, deque):
        inner = v
    elif issubclass(t, dict):
        inner = dict.values(v)
    elif t in _ITERATORS:
        inner = v.__reduce__()[1]
    elif policy.is_of_machine(v):
        if v.__dict__[policy.INTERPRETS] is NotImplemented:
            return False
        inner = (v.__dict__[policy.INTERPRETS],)
    elif t is types.FunctionType:
        inner = [c for c in v.__closure__ or () if id(c) not in m.cell_sources]
    elif t is types.CellType:
        try:
            inner = (v.cell_contents,)
        except ValueError:
            return True
    elif t is types.MethodType:
        inner = (v.__self__, v.__func__)
    elif t is functools.partial:
        inner = (v.func, *v.args, *v.keywords.values())
    elif t.__flags__ & 0x200 and type(getattr(v, "__dict__", None)) is dict:
        inner = v.__dict__.values()
    return all(_can_move(m, x, depth - 1, raised) for x in inner)


class _Graph(_LazyGraphModule):  # type: ignore[misc]
    """A captured graph. It is no module of the program: hooks on all modules do not see it."""

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return self.forward(*args, **kwargs)

    def _real_recompile(self) -> Any:
        made = super()._real_recompile()
        policy.SKIPPED.add(type(self).forward.__code__)  # met by the frame hook it would be captured again, and that graph again
        return made

    forward = _lazy_forward


def closed(m: Machine, b: _Builder, finish: Finish, *, keep: bool = False) -> Captured:
    """The graph ends with the outputs that `b` collected; its facts are final. keep: arguments stay inputs even if nothing reads them."""
    with torch._C.DisableTorchFunction():  # nothing of the program runs
        return _closed(m, b, finish, keep)


def _closed(m: Machine, b: _Builder, finish: Finish, keep: bool) -> Captured:
    recorder = m.recorder
    _guard_overlap(m)
    if m.bound:
        m.world.guard(FixedObject(Unbound), "distinct", ((FixedObject(Unbound),), tuple(m.bound)))
    m.world.guard_apart((i.real, i.source) for i in recorder.real.values() if i.source is not None)
    inputs = _drop_unused(m, b, keep)
    _drop_modes(recorder.graph)
    in_inference = recorder.results_inference(b.outs)
    recorder.graph.output(tuple(b.outs))
    graph = _Graph({}, recorder.graph)  # its Python is written when it is asked for
    guards = list(m.world.guards.values())
    for cond in recorder.facts.guards:
        guards.append(Guard(FixedObject(None), "shape", cond, recorder.facts.locs.get(cond, "")))
    recorder.facts.freeze()
    made = {id(i.node): i for i in recorder.infos.values()}
    watched = [k for k, n in enumerate(b.outs) if id(n) in made and made[id(n)].requires_grad and not made[id(n)].is_apart]
    used_up = m.gradients.spent_of([made[id(b.outs[k])].tensor for k in watched])
    spent = tuple(k for k, used in zip(watched, used_up, strict=True) if used)
    graph.meta["grad"] = m.grad_before
    graph.meta["written"] = recorder.inputs_in(tracing.current().written | tracing.current().statistics)  # numbers of inputs
    needs_grad = len(spent) < len(watched) or any(i.is_differentiated for i in recorder.real.values())
    m.gradients.check_results([made[id(b.outs[k])].tensor for k in watched if k not in spent])
    steps, draws = goes_backwards(graph), tracing.current().draws > 0
    graph.meta["seen"] = recorder.may_be_caught or recorder.acts  # what the graph has written before it fails is taken back
    graph.meta["anew"] = graph.meta["seen"] or steps or assumes(graph)  # where it fails, the function itself is run
    graph.meta["outdated"] = any(_outgrows(m, t) for t in m.world.changed)
    graph.meta["draws"] = draws  # a native one that may draw then, too: a repetition of the graph would draw again
    graph.meta["spent"] = spent  # results whose graph of autograd the program itself has used up
    graph.meta["inference"] = in_inference  # the inference mode under which results are made, where it is not the caller's
    if m.gradients.made:
        graph.meta["training"] = _parts(m)
    return Captured(graph, inputs, tuple(guards), recorder.facts, finish, needs_grad)


def _outgrows(m: Machine, track: Track) -> bool:
    """Does a dictionary take or lose keys that a guard names? The call then makes its own guards false, as an optimizer's first step does."""
    guard = m.world.guards.get((track.source, "dict_keys", None))
    return guard is not None and issubclass(type(track.image), dict) and len(guard.value) != len(track.image)


def _parts(m: Machine) -> dict[str, Any]:
    """Of a step that goes backwards, for explain: operators before, between and after its backward passes, and what becomes of gradients."""
    counts = [0]
    for node in m.recorder.graph.nodes:
        if node.op in ("call_function", "call_method") and node.target not in (operator.getitem, torch._C._set_grad_enabled):
            counts = [*counts, 0] if node.target is torch.autograd.grad or getattr(node.target, "goes_backwards", False) else [*counts[:-1], counts[-1] + 1]
    return {"operators": tuple(counts), "gradients": len(m.gradients.made), "never_written": tuple(m.gradients.never_written())}


def _drop_modes(graph: torch.fx.Graph) -> None:
    """Of changes of the grad mode with nothing between them the last one counts. Not while the graph grows: a node may mark a place in it."""
    for node in list(graph.nodes):
        if node.target is node.next.target is torch._C._set_grad_enabled:
            graph.erase_node(node)


def _drop_unused(m: Machine, b: _Builder, keep_arguments: bool) -> tuple[Source, ...]:
    """Placeholders nothing reads are no inputs; one that gives a size its meaning stays. Symbols then learn their input's number."""
    outs = set(b.outs)
    facts = m.recorder.facts
    measured = {s.origin[0] for s in facts.symbols.values()}
    keep: list[Source] = []
    placeholders = [n for n in m.recorder.graph.nodes if n.op == "placeholder"]
    for node, source in zip(placeholders, m.recorder.inputs, strict=True):
        if node.users or node in outs or node.name in measured or (keep_arguments and node.meta["role"] == "input"):
            for name, row in facts.symbols.items():
                if row.origin[0] == node.name:
                    kind, *rest = row.origin[1:]
                    facts.symbols[name] = replace(row, origin=(kind, len(keep), *rest))
            keep.append(source)
        else:
            m.recorder.graph.erase_node(node)
    return tuple(keep)


def _guard_overlap(m: Machine) -> None:
    """A graph that writes an input is right only if no other input that it reads shares its memory."""
    memory = tracing.current().written  # no version counter tells of writes through .data
    written = [i for i in m.recorder.real.values() if i.is_made and tracing.storage(i.tensor) in memory]
    if not written:
        return
    marked = {id(i) for i in written}
    infos = [i for i in m.recorder.real.values() if i.node.users or id(i) in marked]
    ends = sorted((extent(i.real), n) for n, i in enumerate(infos) if i.real is not None and i.real.numel())
    reach, holder = -1, -1
    for (lo, hi), n in ends:
        if lo < reach and (id(infos[n]) in marked or id(infos[holder]) in marked):
            raise Unsupported("CAP013", at=m.loc(), detail=f"{infos[n].source} and {infos[holder].source}")
        if hi > reach:
            reach, holder = hi, n
    arguments = [i.source for i in infos if i.node.meta["role"] == "input"]
    for i in written:
        assert i.source is not None  # an input
        others = tuple(s for s in (arguments if i.node.meta["role"] != "input" else [j.source for j in infos]) if s != i.source)
        if others:
            m.world.guard(i.source, "no_overlap", others)
