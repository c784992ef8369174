"""C functions called by a program: what they are given of the outside world, and what their exceptions mean.

In: the function and its arguments as the machine knows them. Out: its result; Raised with the program's exception; Unsupported where it
would see, or call, what no guard tells of.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..codes import Unsupported
from ..graph.sizes import SymTypes
from . import arrays, floats, policy, protocol, tensor_attrs, torch_rows
from . import attributes as at
from .attributes import Raised
from .source import FixedObject
from .world import (
    CONTAINERS,
    PINNED_TYPES,
    SCALARS,
    UNCHANGING,
    Identity,
    Momentary,
    Ticket,
    Track,
    container_base,
    entries,
    has_image,
    ticket,
)

if TYPE_CHECKING:
    from .machine import Machine

_NOTHING = contextlib.nullcontext()
_OF_KINDS = (TypeError, AttributeError, ValueError, RuntimeError, AssertionError, SystemError, BufferError)  # about what kind a value is
_VALUES = (int, float, complex, str, bytes, tuple)  # objects of a program's class derived from these are looked into like these
_TEXT = frozenset({repr, str, format, ascii})
_TEXT_METHODS = frozenset({"__repr__", "__str__", "__format__", "__mod__", "__rmod__", "format_map"})
# C functions that ask of an object what it is, and nothing of what it holds
_BY_IDENTITY = frozenset({operator.is_, operator.is_not, operator.eq, operator.ne, operator.contains, operator.setitem, tuple, list, set, dict, bool, None})

_OF_ITS_OWN = frozenset({iter, reversed, bool, len})  # with operators: what the class has for these, in Python, is called before


def _makes_text(fn: Any, args: list[Any]) -> bool:
    """Does this C function write its arguments out?"""
    if fn in _TEXT:
        return True
    if fn in (operator.mod, operator.imod):
        return type(args[0]) in (str, bytes)
    return getattr(fn, "__name__", "") in _TEXT_METHODS and not isinstance(getattr(fn, "__self__", None), (int, float, complex))


_FROM_KEYS = (dict.fromkeys, OrderedDict.fromkeys)
_FILLING = (dict, OrderedDict, defaultdict, dict.update, *_FROM_KEYS)


def runs_python(key: Any) -> bool:
    """Does finding this key in a dictionary or set, or among others, call a `__hash__` or `__eq__` in Python?"""
    if type(key) in (tuple, list):
        return any(map(runs_python, key))
    t = type(key)
    return t not in SCALARS and (type(t.__hash__) is types.FunctionType or type(t.__eq__) is types.FunctionType)


def _is_index(value: Any) -> bool:
    """Is this an object that a method in Python makes a number of, or a slice of such?"""
    if type(value) is slice:
        return any(map(_is_index, (value.start, value.stop, value.step)))
    return bool(type(value).__flags__ & 0x200) and hasattr(type(value), "__index__")


def _holds_objects(m: Machine, value: Any) -> bool:
    """Does this container hold, at any depth, objects of classes in Python? These may be compared."""
    inside = (*value, *value.values()) if isinstance(value, dict) else (value.start, value.stop, value.step) if type(value) is slice else value
    found = False
    for x in inside:
        t = type(x)
        if t in SCALARS or issubclass(t, torch.Tensor):
            continue
        if t.__flags__ & 0x200:
            found = True
            _compared(m, t)
        elif t in _SCANNED:
            found = _holds_objects(m, x) or found
    return found


def _compared(m: Machine, t: type) -> None:
    """C asks of objects of this class whether they are equal: how they say so is relied on."""
    if t not in m.compared:
        m.compared.add(t)
        for name in ("__eq__", "__hash__"):
            at.class_guard(m, t, name, at.find(m, t, name))


_SCANNED = frozenset({list, tuple, dict, set, frozenset, deque, slice, type({}.values()), type({}.items())})


def _keys(fn: Any, args: list[Any]) -> Any:
    """What a call of a C function puts into a set or a dictionary, or looks up there."""
    if fn in (set, frozenset, set.update):
        return args[-1] if args and type(args[-1]) in (list, tuple, set, frozenset, dict) else ()
    holder = getattr(fn, "__self__", None)
    if fn in _FILLING or (getattr(fn, "__name__", "") == "update" and issubclass(type(holder), dict)):
        given = args[0 if fn in _FROM_KEYS else -1] if args else ()
        if type(given) not in (list, dict):
            return ()
        return [k[0] if type(k) is tuple and k and fn not in _FROM_KEYS else k for k in given]
    if fn in (set.add, operator.setitem, operator.getitem, operator.delitem, operator.contains):
        holder, args = args[0], args[1:2]
    if issubclass(type(holder), dict):
        return args[:1]  # a value or a default may be any object
    return args if issubclass(type(holder), (set, frozenset)) else ()


def _is_of_container(fn: Any) -> bool:
    return container_base(type(getattr(fn, "__self__", None))) is not None


@functools.cache
def _has_state_in_c(t: type) -> bool:
    """Does a class in C keep something in these objects (exceptions, iterators, matches), of which no guard tells?"""
    return next(base for base in t.__mro__ if not base.__flags__ & 0x200) is not object


_OPERATORS_THAT_WRITE = frozenset({"setitem", "delitem"} | {n for n in dir(operator) if n.startswith("i") and "__i" + n[1:] + "__" in dir(operator)})


def _may_write_arguments(fn: Any) -> bool:
    """Is this a function of a module in C that may change a container it is given (heapq.heapify, operator.setitem)? Methods say so
    themselves (policy.MUTATING)."""
    if type(fn) is not types.BuiltinFunctionType or not isinstance(fn.__self__, types.ModuleType | None):
        return False
    return fn.__name__ in _OPERATORS_THAT_WRITE if fn.__module__ == "_operator" else fn.__module__ != "builtins"


def _holds_symbols(value: Any) -> bool:
    return type(value) in SymTypes or (type(value) in (tuple, list) and any(map(_holds_symbols, value)))


def _contents(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    base = next((b for b in (list, set) if isinstance(container, b)), None)
    return [] if base is None else list(base.__iter__(container))  # an `__iter__` of the program is not asked


def native(m: Machine, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], plain: bool = False, store: bool = False) -> Any:
    """Run a C function now. plain: arguments are used as they are; store: they are only kept, not looked into."""
    risky = tensors = False
    lent: list[tuple[Track, list[Any]]] = []  # images that a C function may write, and what they held
    if not plain:
        if not store:
            for k, a in enumerate(args):
                t = type(a)
                if t in SCALARS:
                    continue
                if t is Ticket and k == 0 and fn in (operator.add, operator.iadd) and type(args[1]) is int:
                    return ticket(a + args[1], a.source, a.more + args[1])
                if issubclass(t, Momentary) and (_tells_identity(m, fn, args) if t is Identity else not _looks_up(m, fn, args)):
                    settle(m, a)
                args[k] = _argument(m, a, t, fn)
            kwargs = {k: a if type(a) in SCALARS else _argument(m, a, type(a), fn) for k, a in kwargs.items()}
            if m.world.tracks and not _is_shallow(fn):
                writes = _may_write_arguments(fn)
                args[:] = [a if type(a) in SCALARS else _whole(m, a, writes) for a in args]
                kwargs = {k: a if type(a) in SCALARS else _whole(m, a, writes) for k, a in kwargs.items()}
                fn = _with_whole_holder(m, fn)
            if _makes_text(fn, args) and any(_shows_unknown(m, a) for a in (*args, *kwargs.values())):
                raise Unsupported("CAP011", at=m.loc(), detail="text of an object from outside, or with an address")
        for a in (*args, *kwargs.values()) if kwargs else args:
            t = type(a)
            if t in SCALARS:
                continue
            if issubclass(type(a), torch.Tensor) or (t in (list, tuple, dict) and _has_tensor(a)):
                tensors = True
            elif t is types.FunctionType or t is types.MethodType or t.__flags__ & 0x200:
                risky = risky or not store
                if not store and t is not types.FunctionType and t is not types.MethodType:
                    _compared(m, t)
            if t in _SCANNED and not store:
                risky = _holds_objects(m, a) or risky
        holder = getattr(fn, "__self__", None)
        if type(holder) in (list, tuple, deque, slice) and not store:
            risky = _holds_objects(m, holder) or risky
        if not store and _may_write_arguments(fn):
            known = [(m.world.tracks.get(id(a)), a) for a in args]
            lent = [(track, _contents(a)) for track, a in known if track is not None and a is track.image and not track.dirty]
    if plain or store:
        risky = any(map(_is_index, (*args, *kwargs.values())))  # a number, asked for natively
    for key in _keys(fn, args):
        if type(key) not in SCALARS:
            _compared(m, type(key))
            m.world.tell_apart(key)
            risky = risky or runs_python(key)
    facts = m.recorder.facts
    if not store and any(type(a) is torch.SymFloat for a in args):
        args = floats.for_native(m, fn, args)
    spoken, facts.spoken = facts.spoken, True
    try:
        with torch_rows.Recording(m) if tensors else _NOTHING, no_python(m) if risky else _NOTHING:
            made = fn(*args, **kwargs)
        return made if tensors else _itself(m, made)
    except (Unsupported, Raised):
        raise
    except BaseException as e:  # the program's exception: a handler of the program may take it
        if not isinstance(e, (Exception, GeneratorExit, SystemExit)) and id(e) not in m.told and not any(a is e or a is type(e) for a in args):
            raise  # an interrupt, or a signal of ours
        given = (*args, *kwargs.values())
        if any(map(_holds_symbols, given)) and id(e) not in m.told and not isinstance(e, StopIteration):  # or the symbol's: it has no hash, say
            if any(hasattr(type(a), "__next__") for a in (*given, getattr(fn, "__self__", None))):  # what was taken from it is gone
                raise Unsupported("CAP006", at=m.loc(), detail=at.saying(e)) from None
            args = [with_numbers(m, a) for a in args]
            return native(m, fn, args, {k: with_numbers(m, v) for k, v in kwargs.items()}, plain, store)
        e.__traceback__ = None
        if id(e) not in m.told:  # made in C: its context is the machine's
            inner = e.__context__
            if inner is not None and id(inner) not in m.told:
                e.__context__ = None
        m.arrived()
        if isinstance(e, (RuntimeError, ValueError, IndexError)) and (tensors or any(map(_holds_symbols, args))):
            facts.confirm()
        if e is not m.raised and isinstance(e, _OF_KINDS) and any(_stands_for(m, a) for a in (*args, *kwargs.values())):
            m.suspects[id(e)] = e
        raise Raised(e) from None
    finally:
        facts.spoken = spoken
        for track, before in lent:
            now = _contents(track.image)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                m.world.change(track)


def _itself(m: Machine, value: Any) -> Any:
    """The container from outside for its image: max(a, b) is one of them, class and all."""
    track = m.world.tracks.get(id(value)) if container_base(type(value)) else None
    return track.obj if track is not None and value is not track.obj and value is track.image else value


def with_numbers(m: Machine, value: Any) -> Any:
    """The numbers at hand in the place of symbols, in tuples and lists too."""
    if type(value) in SymTypes:
        return floats.pinned(m, value)
    return type(value)(with_numbers(m, x) for x in value) if _holds_symbols(value) else value


def _stands_for(m: Machine, value: Any) -> bool:
    """Is this what stands for something of the program, and not the thing itself?"""
    t = type(value)
    if t in SCALARS:
        return False
    if t in (list, tuple):
        return any(_stands_for(m, x) for x in value)
    if t in at.NUMBERS or t in (tensor_attrs.TensorMethod, arrays.ArrayValue, arrays.ArrayMethod) or issubclass(t, torch.Tensor):
        return True
    return id(value) in m.world.tracks and container_base(t) is None


def _argument(m: Machine, a: Any, t: type, fn: Any) -> Any:
    """What a C function may look into: images of outside containers; never an outside object."""
    track = m.world.tracks.get(id(a))
    if track is None:
        if t in (list, tuple) and m.world.tracks and not _is_shallow(fn):
            return _with_images(m, a, t)
        if t is slice and m.world.tracks:
            return slice(*(_argument(m, x, type(x), fn) for x in (a.start, a.stop, a.step)))
        return a
    if has_image(t) or track.image is not None:
        asks_itself = any(fn is f for f in _OF_ITS_OWN) or getattr(fn, "__module__", "") == "_operator"
        if not asks_itself and not issubclass(t, getattr(fn, "__objclass__", Track)):  # else it is a method of the container's own
            _refuse_speaker(m, t, track)
        return m.world.image(track)
    if t is types.FunctionType or t is types.MethodType or issubclass(type(a), PINNED_TYPES) or t is types.CellType:
        return a
    if t.__hash__ is object.__hash__ and t.__eq__ is object.__eq__ and (not _has_state_in_c(t) or fn in _BY_IDENTITY or _is_of_container(fn)):
        m.world.tell_apart(a)
        return a  # compared by identity only; anything Python it might run is caught
    raise Unsupported("CAP011", at=m.loc(), detail=f"{t.__name__} from {track.source} given to a C function")


def _tells_identity(m: Machine, fn: Any, args: list[Any]) -> bool:
    """Is a number that id() gave more here than a name for an object among others of this capture?"""
    holder = args[0]
    if container_base(type(holder)) or type(holder) in (tuple, frozenset):
        return id(holder) in m.world.tracks or any(type(x) is int for x in holder)
    return fn not in (operator.eq, operator.ne) or any(type(a) is not Identity for a in args)


def _looks_up(m: Machine, fn: Any, args: list[Any]) -> bool:
    """Does a line of torch's own look a Ticket up in a dictionary, or put it there? Numbers in it were given out before."""
    return issubclass(type(args[0] if fn in _ON_DICTIONARIES else getattr(fn, "__self__", None)), dict) and at.is_torchs(m)


_ON_DICTIONARIES = frozenset({operator.contains, operator.getitem, operator.setitem, operator.delitem})


def settle(m: Machine, number: Momentary) -> None:
    """What follows from this number holds for this number: for an object with this id(), and where the counter stands."""
    if isinstance(number, Ticket):
        return m.world.guard(number.source, "equals", int(number) - number.more)
    assert isinstance(number, Identity)
    obj, source = number.of, None
    if issubclass(type(obj), torch.Tensor):
        info = m.recorder.info(obj)
        obj, source = info.real, info.source
    elif (track := m.world.tracks.get(id(obj))) is not None:
        obj, source = track.obj, track.source
    elif m.world.has_own_address(obj):
        raise Unsupported("CAP011", at=m.loc(), detail="the address of an object that the program made")
    if source is not None and not isinstance(source, FixedObject):
        m.world.guard(source, "identity", obj)


def _with_images(m: Machine, a: Any, t: type) -> Any:
    for x in a:
        if container_base(type(x)) or (type(x) not in SCALARS and issubclass(type(x), _VALUES)):
            track = m.world.tracks.get(id(x))
            if track is not None and x is not track.image:
                if t is list:
                    return [_argument(m, y, type(y), None) for y in a]
                return tuple([_argument(m, y, type(y), None) for y in a])
    return a


# C functions that look at a container's items, but not into these: what items hold need not be relied on
_SHALLOW = frozenset({
    len, iter, next, list, tuple, bool, zip, enumerate, reversed, isinstance, issubclass, type, id, callable, setattr, getattr, hasattr,
    operator.is_, operator.is_not, operator.getitem, operator.setitem, operator.delitem, operator.truth, operator.not_,
    operator.length_hint, operator.add, operator.iadd, operator.concat, operator.iconcat, operator.mul, operator.imul,
})  # fmt: skip
_SHALLOW_METHODS = frozenset({
    "append", "extend", "insert", "pop", "clear", "reverse", "copy", "get", "keys", "values", "items", "setdefault", "popitem", "add",
    "appendleft", "popleft", "extendleft", "rotate", "move_to_end", "discard", "__getitem__", "__setitem__", "__delitem__", "__len__",
    "__iter__", "__reversed__", "__new__", "__init__", "__setattr__", "__getattribute__", "__delattr__", "__next__", "__add__",
    "__iadd__", "__mul__", "__imul__", "__copy__", "__missing__", "__or__", "__ior__", "__ror__", "fromkeys",
})  # fmt: skip


def _is_shallow(fn: Any) -> bool:
    try:
        return fn in _SHALLOW or getattr(fn, "__name__", "") in _SHALLOW_METHODS
    except TypeError:  # it has no hash
        return False


# What objects that C code writes out and compares by their contents hold
_HOLDING: dict[type, Callable[[Any], list[Any]]] = {
    BaseException: lambda e: [*BaseException.args.__get__(e)],  # type: ignore[attr-defined]
    functools.partial: lambda p: [*p.args, *p.keywords.values()], types.SimpleNamespace: lambda n: [*vars(n).values()],
}  # fmt: skip


def _whole(m: Machine, a: Any, writes: bool = False, above: tuple[int, ...] = ()) -> Any:
    """A container for a C function that may look into what its items hold: containers from outside among these are relied on, and where the
    program has other contents for them than they have, images are in their places. writes: it may change `a` itself.
    Raises Unsupported("CAP011") where that would need another object than `a`."""
    t = type(a)
    base = tuple if issubclass(t, tuple) else t if t in _VIEWS else container_base(t)
    held = next((held for cls, held in _HOLDING.items() if issubclass(t, cls)), None) if base is None else None
    if (base is None and held is None) or id(a) in above:
        return a
    above = (*above, id(a))
    inside = held(a) if held is not None else [v for _, v in entries(a)] if issubclass(base, dict) else list(base.__iter__(a))  # type: ignore
    items = [x if type(x) in SCALARS else _whole_item(m, x, above) for x in inside]
    if all(x is y for x, y in zip(inside, items, strict=True)):
        return a
    make = _OTHER_ITEMS.get(tuple if hasattr(t, "_fields") else t)
    if writes or make is None:
        raise Unsupported("CAP011", at=m.loc(), detail=f"a {t.__name__} of changed containers given to a C function")
    return make(a, items)


_ORDERED = OrderedDict.fromkeys("")
_VIEWS = frozenset({type({}.values()), type({}.items()), type(_ORDERED.values()), type(_ORDERED.items())})

# How a container with other items is made
_OTHER_ITEMS: dict[type, Callable[[Any, list[Any]], Any]] = {
    list: lambda a, items: items, tuple: lambda a, items: tuple.__new__(type(a), items), deque: lambda a, items: deque(items, a.maxlen),
    dict: lambda a, items: dict(zip(a, items, strict=True)), OrderedDict: lambda a, items: OrderedDict(zip(a, items, strict=True)),
    defaultdict: lambda a, items: defaultdict(a.default_factory, zip(a, items, strict=True)),
}  # fmt: skip


def _whole_item(m: Machine, x: Any, above: tuple[int, ...]) -> Any:
    t: type = type(x)
    track = m.world.tracks.get(id(x))
    if track is None or x is track.image:
        return _whole(m, x, above=above)
    if container_base(t) is None:
        return _argument(m, x, t, None) if _is_value_of_library(t) or issubclass(t, _VALUES) else _whole(m, x, above=above)
    image = m.world.image(track)
    found = _whole(m, image, above=above)
    before, now = _contents(x), _contents(found)
    if len(before) == len(now) and all(p is q for p, q in zip(before, now, strict=True)):
        return x
    _refuse_speaker(m, t, track)
    return found


def _refuse_speaker(m: Machine, t: type, track: Track) -> None:
    """What stands for a container of such a class is no answer to what C asks of it."""
    if at.speaks_for_itself(m, t):
        raise Unsupported("CAP011", at=m.loc(), detail=f"{t.__name__} from {track.source} given to a C function")


@functools.cache
def _is_value_of_library(t: type) -> bool:
    """Does a class of the standard library say what is equal (Fraction, Path), by what no guard tells of?"""
    top = t.__module__.partition(".")[0]
    return t.__eq__ is not object.__eq__ and t not in UNCHANGING and top in sys.stdlib_module_names and top not in ("builtins", "types")


def _with_whole_holder(m: Machine, fn: Any) -> Any:
    """A C method of a container (list.index, list.count) looks into its items too."""
    holder = getattr(fn, "__self__", None)
    if type(holder) in SCALARS or (container_base(type(holder)) is None and type(holder) is not tuple):
        return fn
    whole = _whole(m, holder, fn.__name__ in policy.MUTATING)
    return fn if whole is holder else getattr(whole, fn.__name__)


def _says_address(m: Machine, a: Any, depth: int) -> bool:
    """Is the address of an object that the program made part of this value's text?"""
    t = type(a)
    if issubclass(t, types.MethodType):
        return _shows_unknown(m, a.__self__, depth) or _shows_unknown(m, a.__func__, depth)
    if issubclass(t, functools.partial):
        return any(_shows_unknown(m, x, depth) for x in (a.func, *a.args, *a.keywords.values()))
    if issubclass(t, BaseException):
        return any(_shows_unknown(m, x, depth) for x in a.args)
    if t is types.FunctionType:
        return id(a) in m.world.fresh_pinned
    return t.__repr__ in _WITH_ADDRESS and not issubclass(t, PINNED_TYPES)


_WITH_ADDRESS = frozenset({object.__repr__, types.GeneratorType.__repr__, types.CellType.__repr__, weakref.ref.__repr__})


def _shows_unknown(m: Machine, a: Any, depth: int = 4) -> bool:
    """Would the text of this value say what no guard knows: an address, or the inner state of an object from outside?"""
    t = type(a)
    if t in SCALARS:
        return False
    base = tuple if issubclass(t, tuple) else container_base(t) or t
    if base in CONTAINERS or base in (tuple, frozenset):
        track = m.world.tracks.get(id(a))
        if depth == 0:
            return True
        own = t if track is None else type(track.obj)
        if own.__repr__ is not t.__repr__ or (own is not t and base not in (list, dict)):  # an image is a plain container; others say their class
            return True
        inside = (*dict.keys(a), *dict.values(a)) if issubclass(base, dict) else list(base.__iter__(a))  # type: ignore[attr-defined]
        return any(_shows_unknown(m, x, depth - 1) for x in inside)
    return id(a) in m.world.tracks or issubclass(t, torch.Tensor) or (depth > 0 and _says_address(m, a, depth - 1))


def _has_tensor(value: Any) -> bool:
    for x in value.values() if type(value) is dict else value:
        if issubclass(type(x), torch.Tensor) or (type(x) in (list, tuple, dict) and _has_tensor(x)):
            return True
    return False


def _is_importing(frame: Any) -> bool:
    """Does the import system stand above it? What a library imports at first use is its own affair."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def no_python(m: protocol.Machine) -> Iterator[None]:
    """Refuse Python code of the user below a C function; the standard library, torch and the machine may run."""
    previous = sys.getprofile()
    if previous is not None and not callable(previous):  # a C profiler, which Python cannot put back
        yield
        return

    def watch(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and not policy.is_library_file(frame.f_code.co_filename) and not _is_importing(frame):
            raise Unsupported("CAP010", at=m.loc(), detail=f"{frame.f_code.co_qualname} called from C")

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(previous)
