"""Python's data model, carried out by the machine: truth, arithmetic, comparison, items, iteration, strings.

In: the machine and its values. Out: a value, or Raised. Special methods written in Python are inlined; a tensor operand makes a
node; everything else is done natively on plain objects and images.
"""

from __future__ import annotations

import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..codes import Unsupported
from ..graph import tracing
from ..graph.sizes import SymTypes
from . import arrays, floats, overrides, tensor_attrs, transforms
from .arrays import ArrayValue
from .attributes import Raised, class_guard, find
from .protocol import Machine
from .source import TensorKey
from .world import CONTAINERS, MISSING, NULL, SCALARS, Identity, container_base, has_image, held, item_of

Function = types.FunctionType
Tensor = torch.Tensor
_PLAIN = SCALARS | set(SymTypes)


def special(m: Machine, t: type, name: str) -> Any:
    """The special method `name` of a class when it is written in Python, else None."""
    if t in _PLAIN or t in CONTAINERS or t is tuple or t is ArrayValue or t is Driven:
        return None
    f = find(m, t, name)
    class_guard(m, t, name, f)
    return f if issubclass(type(f), Function) else None


_NUMBERS = frozenset({int, float, complex, bool, *SymTypes})
_VALUES = (int, float, complex, str, bytes, tuple)
_SEQUENCES = (str, bytes, bytearray, list, tuple, deque)
_JUDGES: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "__str__": (str, str), "__repr__": (str, repr), "__format__": (str, format), "__bool__": (bool, bool), "__len__": (int, len),
    "__hash__": (int, hash), "__index__": (int, operator.index), "__int__": (int, int), "__float__": (float, float),
    "__complex__": (complex, complex),
}  # special methods whose results CPython looks at: the class that passes, and who looks


def outcome(m: Machine, name: str, f: Any, args: list[Any]) -> Any:
    """What the special method `name` of args[0], written in Python, comes to: CPython refuses or changes results of other classes."""
    made = m.call(f, args, {})
    good, judge = _JUDGES[name]
    t = type(made)
    if t is Identity and name == "__hash__":
        return made
    if t is good and (name not in ("__len__", "__hash__") or 0 <= made < 2**60):
        return made
    if t in SymTypes:
        if t is {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}.get(good) and (name != "__len__" or truth(m, made >= 0)):
            return made
        made = m.with_numbers(made)
    elif t not in SCALARS:
        raise Unsupported("CAP014", at=m.loc(), detail=f"{type(args[0]).__name__}.{name} that returns {t.__name__}")
    return m.native(judge, [type(type(args[0]).__name__, (), {name: lambda *_: made})()], {}, plain=True)


# ---------------------------------------------------------------- truth



def truth(m: Machine, value: Any) -> bool:
    """bool(value)."""
    t = type(value)
    if t in SCALARS:
        return bool(value)
    if issubclass(type(value), Tensor):
        own = tensor_attrs.users_method(m, value, "__bool__")
        return m.tensor_truth(value) if own is None else outcome(m, "__bool__", own, [value])  # type: ignore[no-any-return]
    if t is ArrayValue:
        return bool(arrays.value_of(m, value, "__bool__"))
    track = m.world.tracks.get(id(value))
    for name in ("__bool__", "__len__"):
        f = special(m, t, name)
        if f is not None:
            return bool(outcome(m, name, f, [value]))
        if find(m, t, name) is not MISSING:
            break
    if track is not None and container_base(t):
        m.world.use(track)
        if track.image is None:
            n = held(value)
            m.world.guard(track.source, "length", n)
            return n > 0
        return len(track.image) > 0
    if track is not None:
        m.world.use(track)
    if t in SymTypes:
        m.recorder.facts.loc = m.loc()
    return bool(m.native(bool, [value], {}))


def as_list(m: Machine, value: Any, cls: Any = list) -> Any:
    """list(value): behind `__iter__` Python asks a class of the program's how long it is."""
    it = iterate(m, value)
    _hint(m, value)
    return m.native(cls, [it], {}, plain=True)


def _hint(m: Machine, value: Any) -> None:
    """operator.length_hint, which makes room for items: of what a `__len__` or `__length_hint__` says nothing is kept, and a TypeError is none."""
    t = type(value)
    asks = special(m, t, "__len__")
    try:
        if asks is not None:
            outcome(m, "__len__", asks, [value])
        if asks is not None or find(m, t, "__len__") is not MISSING:
            return
    except Raised as r:
        if not isinstance(r.exc, TypeError):
            raise
        m.take(r.exc)
    asks = special(m, t, "__length_hint__")
    said = NotImplemented
    try:
        said = NotImplemented if asks is None else m.call(asks, [value], {})
    except Raised as r:
        if not isinstance(r.exc, TypeError):
            raise
        m.take(r.exc)
    if said is not NotImplemented:
        m.native(operator.length_hint, [type("Said", (), {"__length_hint__": lambda _: said})()], {}, plain=True)  # refuses what is no length


def as_index(m: Machine, value: Any) -> Any:
    """A number for C, which asks an object for its `__index__` and may make another exception of what that raises."""
    asks = special(m, type(value), "__index__") if type(value).__flags__ & 0x200 and not issubclass(type(value), (int, Tensor)) else None
    return value if asks is None else outcome(m, "__index__", asks, [value])


def snapshot(m: Machine, value: Any) -> Any:
    """What extend() and its like walk through: of a list or deque its items as they are now, for it may be what grows."""
    items = iterate(m, value)
    return list(items) if container_base(type(value)) in (list, deque) else items


def filling(m: Machine, value: Any) -> Any:
    """What a new set is filled with: of a set or dictionary the order is taken over, and no hash is asked for again."""
    t = type(value)
    return _operand(m, value) if t is dict or issubclass(t, (set, frozenset)) else m.listed(value)


# ---------------------------------------------------------------- operators

BINARY: dict[str, tuple[Callable[[Any, Any], Any], str, str]] = {
    "+": (operator.add, "__add__", "__radd__"), "-": (operator.sub, "__sub__", "__rsub__"), "*": (operator.mul, "__mul__", "__rmul__"),
    "/": (operator.truediv, "__truediv__", "__rtruediv__"), "//": (operator.floordiv, "__floordiv__", "__rfloordiv__"),
    "%": (operator.mod, "__mod__", "__rmod__"), "**": (operator.pow, "__pow__", "__rpow__"), "@": (operator.matmul, "__matmul__", "__rmatmul__"),
    "<<": (operator.lshift, "__lshift__", "__rlshift__"), ">>": (operator.rshift, "__rshift__", "__rrshift__"),
    "&": (operator.and_, "__and__", "__rand__"), "|": (operator.or_, "__or__", "__ror__"), "^": (operator.xor, "__xor__", "__rxor__"),
}  # fmt: skip
INPLACE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "+=": (operator.iadd, "__iadd__"), "-=": (operator.isub, "__isub__"), "*=": (operator.imul, "__imul__"),
    "/=": (operator.itruediv, "__itruediv__"), "//=": (operator.ifloordiv, "__ifloordiv__"), "%=": (operator.imod, "__imod__"),
    "**=": (operator.ipow, "__ipow__"), "@=": (operator.imatmul, "__imatmul__"), "<<=": (operator.ilshift, "__ilshift__"),
    ">>=": (operator.irshift, "__irshift__"), "&=": (operator.iand, "__iand__"), "|=": (operator.ior, "__ior__"), "^=": (operator.ixor, "__ixor__"),
}  # fmt: skip
COMPARE: dict[str, tuple[Callable[[Any, Any], Any], str, str]] = {
    "<": (operator.lt, "__lt__", "__gt__"), "<=": (operator.le, "__le__", "__ge__"), "==": (operator.eq, "__eq__", "__eq__"),
    "!=": (operator.ne, "__ne__", "__ne__"), ">": (operator.gt, "__gt__", "__lt__"), ">=": (operator.ge, "__ge__", "__le__"),
}  # fmt: skip
UNARY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "-": (operator.neg, "__neg__"), "+": (operator.pos, "__pos__"), "~": (operator.invert, "__invert__"),
}  # fmt: skip


def binary(m: Machine, sign: str, a: Any, b: Any) -> Any:
    """`a sign b`, also in place."""
    ta, tb = type(a), type(b)
    if ta is ArrayValue or tb is ArrayValue:
        return _of_array(m, sign, a, b)
    if sign in INPLACE:
        fn, name = INPLACE[sign]
        if ta not in _PLAIN:
            if issubclass(type(a), Tensor):
                own = tensor_attrs.users_method(m, a, name)
                return m.call(own, [a, b], {}) if own is not None else m.record("function", fn, (a, _operand(m, b)), {})
            f = special(m, ta, name)
            if f is not None:
                out = m.call(f, [a, b], {})
                if out is not NotImplemented:
                    return out
                return _dyadic(m, sign, *BINARY[sign[:-1]], a, b)
            track = m.world.tracks.get(id(a))
            if track is not None and container_base(ta):
                m.native(fn, [m.world.change(track), list(iterate(m, b)) if ta is list and sign == "+=" else b], {})
                return a
            if ta is list and sign == "+=":
                m.native(list.extend, [a, as_list(m, b)], {})
                return a
            if hasattr(ta, name) and not issubclass(type(b), Tensor):
                return m.native(fn, [a, b], {})
    fn, name, reflected = BINARY[sign.removesuffix("=")]
    if ta in _PLAIN and tb in _PLAIN:
        if (ta in SymTypes or tb in SymTypes) and (floats.varies(a) or floats.varies(b)):
            return floats.apply(m, fn, [a, b])
        return m.native(fn, [a, b], {}) if ta is not torch.SymInt and tb is not torch.SymInt else m.symbolic(fn, a, b)
    if (ta in SymTypes and issubclass(tb, np.generic)) or (tb in SymTypes and issubclass(ta, np.generic)):
        return m.native(fn, [m.with_numbers(a), m.with_numbers(b)], {})  # NumPy's own number: its type and rounding tell of the value
    return _dyadic(m, sign, fn, name, reflected, a, b)


def _of_array(m: Machine, sign: str, a: Any, b: Any) -> Any:
    """`a sign b` where one of them is an array: a class in Python on the other side has its say first."""
    if any(type(x).__flags__ & 0x200 and not issubclass(type(x), Tensor) for x in (a, b) if type(x) is not ArrayValue):
        raise arrays.refuse(m, f"{sign} of an array and an object of a class in Python")
    return arrays.binary(m, sign, a, b)


def _operand(m: Machine, value: Any) -> Any:
    track = m.world.tracks.get(id(value))
    return m.world.image(track) if track is not None and container_base(type(value)) else value


def _dyadic(m: Machine, sign: str, fn: Callable[[Any, Any], Any], name: str, reflected: str, a: Any, b: Any) -> Any:
    ta, tb = type(a), type(b)
    f, g = special(m, ta, name), special(m, tb, reflected)
    tensor_a, tensor_b = issubclass(type(a), Tensor), issubclass(type(b), Tensor)
    if tensor_a or tensor_b:
        own = tensor_attrs.users_method(m, a, name) if tensor_a else tensor_attrs.users_method(m, b, reflected) if f is None else None
        if own is not None:
            return m.call(own, [a, b] if tensor_a else [b, a], {})
        numbers = tensor_a and issubclass(tb, (int, float, complex))  # which torch takes as such, whatever they say of themselves
        if (f is not None and not tensor_a) or (g is not None and not tensor_b and not numbers):
            pass
        else:
            return m.record("function", fn, (_operand(m, a), _operand(m, b)), {})
    if f is not None or g is not None:
        both = all(issubclass(t, (*_VALUES, frozenset)) or container_base(t) for t in (ta, tb))
        if both and f is None and (ta is tb or ta not in tb.__mro__):
            raise Unsupported("CAP014", at=m.loc(), detail=f"{ta.__name__}.{name} beside {tb.__name__}.{reflected}")
        tries = []
        if f is not None and not tensor_a:
            tries.append((f, a, b))
        elif name == "__ne__" and not tensor_a:
            tries.append((None, a, b))
        compares = sign in COMPARE
        if not tensor_b and (compares or ta is not tb):
            if g is not None:
                tries.append((g, b, a))
            elif name == "__ne__":
                tries.append((None, b, a))
            if len(tries) > 1 and ta is not tb and ta in tb.__mro__ and (compares or find(m, ta, reflected) is not find(m, tb, reflected)):
                tries.reverse()
        for h, x, y in tries:
            out = m.call(h, [x, y], {}) if h is not None else _not_equal(m, x, y)
            if out is not NotImplemented:
                return out
        in_c = all(issubclass(t, _VALUES) or container_base(t) for t in (ta, tb))
        if in_c or (sign[0] in "+*" and (issubclass(ta, _SEQUENCES) or issubclass(tb, _SEQUENCES))):  # the methods of C's class are next
            raise Unsupported("CAP014", at=m.loc(), detail=f"{ta.__name__}.{name}, which gave NotImplemented")
        if name in ("__eq__", "__ne__"):
            return is_same(m, a, b) is (name == "__eq__")
        raise Raised(TypeError(_unsupported(sign, ta.__name__, tb.__name__)))
    if name == "__ne__" and (_derives_ne(m, ta) or _derives_ne(m, tb)):
        for x, y in ((a, b), (b, a)):
            out = _not_equal(m, x, y)
            if out is not NotImplemented:
                return out
        return not is_same(m, a, b)
    if sign in "|+*":
        no_copy_of_class(m, a)
        no_copy_of_class(m, b)
    return m.native(fn, [a, b], {})


def no_copy_of_class(m: Machine, value: Any) -> None:
    """The image of a container from outside is of the builtin class: what makes another one of the program's own class is left to Python."""
    t = type(value)
    if t.__flags__ & 0x200 and issubclass(t, (OrderedDict, defaultdict, deque)) and id(value) in m.world.tracks:
        raise Unsupported("CAP011", at=m.loc(), detail=f"another {t.__name__} made of one from outside")


def _not_equal(m: Machine, a: Any, b: Any) -> Any:
    """object.__ne__: the opposite of what an `__eq__` in Python says, if it says anything."""
    if not _derives_ne(m, type(a)):
        return NotImplemented
    out = m.call(special(m, type(a), "__eq__"), [a, b], {})
    return out if out is NotImplemented else not truth(m, out)


def _derives_ne(m: Machine, t: type) -> bool:
    return find(m, t, "__ne__") is object.__ne__ and special(m, t, "__eq__") is not None


def _unsupported(sign: str, a: str, b: str) -> str:
    if sign in COMPARE:
        return f"'{sign}' not supported between instances of '{a}' and '{b}'"
    return f"unsupported operand type(s) for {'** or pow()' if sign == '**' else sign}: '{a}' and '{b}'"


def compare(m: Machine, sign: str, a: Any, b: Any) -> Any:
    """`a sign b` for < <= == != > >=."""
    fn, name, reflected = COMPARE[sign]
    ta, tb = type(a), type(b)
    if ta in _PLAIN and tb in _PLAIN:
        if (floats.varies(a) or floats.varies(b)) and ta in floats.NUMBERS and tb in floats.NUMBERS:
            return floats.compare(m, fn, a, b)
        return m.native(fn, [a, b], {}) if ta not in SymTypes and tb not in SymTypes else m.symbolic(fn, a, b)
    if ta is ArrayValue or tb is ArrayValue:
        return _of_array(m, sign, a, b)
    if torch.torch_version.TorchVersion in (ta, tb):  # a constant of the process
        return m.native(fn, [a, b], {}, plain=True)
    if (a is None or b is None) and sign in ("==", "!="):
        other = b if a is None else a
        if issubclass(type(other), Tensor):
            return sign == "!="
    if sign in ("==", "!=") and issubclass(type(a), (list, tuple, dict)) and issubclass(type(b), (list, tuple, dict)):
        same = _same_items(m, _operand(m, a), _operand(m, b))
        if same is not None:
            return same if sign == "==" else not same
    return _dyadic(m, sign, fn, name, reflected, a, b)


def _same_items(m: Machine, a: Any, b: Any) -> bool | None:
    """Equality of containers that hold tensors or objects: element by element, as Python does (identity first)."""
    if type(a) is not type(b) or type(a) not in (list, tuple):
        return None
    if all(type(x) in SCALARS for x in a) and all(type(x) in SCALARS for x in b):
        return None
    if len(a) != len(b):
        return False
    return all(m.world.canonical(x) is m.world.canonical(y) or truth(m, compare(m, "==", x, y)) for x, y in zip(a, b))


def unary(m: Machine, sign: str, a: Any) -> Any:
    fn, name = UNARY[sign]
    if issubclass(type(a), Tensor):
        own = tensor_attrs.users_method(m, a, name)
        return m.call(own, [a], {}) if own is not None else m.record("function", fn, (a,), {})
    if type(a) is ArrayValue:
        return arrays.unary(m, sign, a)
    f = special(m, type(a), name)
    return m.call(f, [a], {}) if f is not None else m.native(fn, [a], {})


def is_same(m: Machine, a: Any, b: Any) -> bool:
    """`a is b`."""
    if a is b:
        return True
    if torch.SymBool in (type(a), type(b)):
        return floats.pinned(m, a) is floats.pinned(m, b)
    world = m.world
    if world.canonical(a) is world.canonical(b):
        return True
    if issubclass(type(a), Tensor) and issubclass(type(b), Tensor):
        m.recorder.differ(a, b)
    elif type(a) is type(b):
        world.tell_apart(a)
    return False


def contains(m: Machine, container: Any, item: Any) -> bool:
    """`item in container`."""
    t = type(container)
    track = m.world.tracks.get(id(container))
    own = tensor_attrs.users_method(m, container, "__contains__") if issubclass(type(container), Tensor) else None
    if own is not None:
        return truth(m, m.call(own, [container, item], {}))
    if issubclass(type(container), Tensor) and (type(item) in _NUMBERS or issubclass(type(item), Tensor)) and not (m.modes or m.subclasses):
        return m.tensor_truth(m.record("method", "any", (compare(m, "==", item, container),), {}))
    f = special(m, t, "__contains__")
    if f is not None:
        return truth(m, m.call(f, [container, item], {}))
    if track is not None and track.image is None and issubclass(type(track.obj), dict) and m.is_key(item):
        return _read_key(m, track, item) is not MISSING
    if t is ArrayValue:
        raise arrays.refuse(m, "in an array")
    if find(m, t, "__contains__") is MISSING and (special(m, t, "__iter__") or (find(m, t, "__iter__") is MISSING and special(m, t, "__getitem__"))):
        return any(is_same(m, x, item) or truth(m, compare(m, "==", x, item)) for x in iterate(m, container))
    if track is not None and not has_image(t) and find(m, t, "__contains__") is MISSING:
        raise Unsupported("CAP011", at=m.loc(), detail=f"looking for something in a {t.__name__} from outside")  # it is read up to there
    if t in (list, tuple) and (_has_objects(container) or type(item) not in SCALARS):
        body = _operand(m, container)
        return any(is_same(m, x, item) or truth(m, compare(m, "==", x, item)) for x in body)
    if type(item) is torch.SymInt and (issubclass(t, dict) or t in (set, frozenset)):
        return _key_of(m, container, item) is not MISSING
    return bool(m.native(operator.contains, [container, item], {}))


def _key_of(m: Machine, container: Any, number: Any) -> Any:
    """The key that a number that varies is, or MISSING: one comparison, and one guard, for each key it might be. A symbol has no hash."""
    body = _operand(m, container)
    keys = [k for k in body if type(k) in (int, float, bool, *SymTypes)]
    if len(keys) != len(body) or len(keys) > 16:
        number = floats.pinned(m, number)
        return number if number in body else MISSING
    return next((k for k in keys if truth(m, compare(m, "==", number, k))), MISSING)


def _has_objects(items: Any) -> bool:
    return any(type(x) not in SCALARS for x in items)


# ---------------------------------------------------------------- items


def _read_key(m: Machine, track: Any, key: Any) -> Any:
    """One entry of a dictionary from outside, or MISSING: guards that entry alone."""
    m.world.use(track)
    if issubclass(type(key), Tensor):
        return _read_tensor_key(m, track, key)
    written = m.global_writes.get((id(track.obj), key)) if m.global_writes else None
    if written is not None:
        return MISSING if written[2] is NULL else written[2]
    try:
        value = dict.get(track.obj, key, MISSING)
    except TypeError as e:
        raise Raised(e) from None
    if value is MISSING:
        m.world.guard(track.source, "missing", key)
        return MISSING
    value = m.world.wrap(value, item_of(track.source, key))
    m.has_key(track, key)
    return value


def _read_tensor_key(m: Machine, track: Any, key: Any) -> Any:
    """The same where the key is a tensor: an optimizer's state."""
    real = m.recorder.info(key).real
    if real is None:
        return MISSING  # made here: no dictionary from outside can hold it
    value, name = dict.get(track.obj, real, MISSING), TensorKey(real)
    if value is MISSING:
        m.world.guard(track.source, "missing", name)
        return MISSING
    return m.world.wrap(value, item_of(track.source, name))


def numbered(m: Machine, key: Any) -> Any:
    """A tensor's index in which tensors of one integer are their numbers, as torch reads them."""
    t = type(key)
    if t is tuple:
        return tuple([numbered(m, k) for k in key])
    if t is slice:
        return slice(numbered(m, key.start), numbered(m, key.stop), numbered(m, key.step))
    if issubclass(t, Tensor) and not key.dim() and key.dtype in _INTEGERS and not m.recorder.bodies:
        return m.tensor_value(key, "__index__", "a tensor as an index")
    return key


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


_BASIC = (int, torch.SymInt, slice, type(None), type(Ellipsis))


def has_varying(key: Any) -> bool:
    """Is a place of this index a number that varies? (torch's own indexing would want to know it; in slices it does not.)"""
    if type(key) is tuple:
        return any(type(k) is torch.SymInt for k in key) and all(type(k) in _BASIC for k in key)
    return type(key) is torch.SymInt


def getitem(m: Machine, obj: Any, key: Any) -> Any:
    """`obj[key]`."""
    t = type(obj)
    if t in (list, tuple, str, range, bytes) or (issubclass(t, Tensor) and not hasattr(type(key), "__getitem__")):
        key = as_index(m, key)
    if issubclass(type(obj), Tensor):
        own = tensor_attrs.users_method(m, obj, "__getitem__")
        if own is not None:
            return m.call(own, [obj, key], {})
        key = m.index_key(key)
        if has_varying(key):
            return m.record("function", operator.getitem, (obj, key), {})
        tensors = transforms.index_of(m, key) if m.recorder.bodies else None
        if tensors is not None:
            return m.record("function", torch.ops.aten.index.Tensor, (obj, tensors), {})
        return m.record("function", operator.getitem, (obj, numbered(m, key)), {})
    if t is ArrayValue:
        return arrays.getitem(m, obj, key)
    if type(key) is ArrayValue:
        raise Unsupported("CAP020", at=m.loc(), detail="an array's value as a key")
    track = m.world.tracks.get(id(obj))
    if issubclass(type(key), Tensor) and t in (list, tuple):
        known = MISSING if key.is_floating_point() or key.is_complex() else tracing.current().known_value(key, "__index__")
        if type(known) is not int:
            raise Unsupported("CAP020", at=m.loc(), detail="a tensor as a sequence index")
        key = known
    f = special(m, t, "__getitem__")
    if f is not None:
        return m.call(f, [obj, key], {})
    if track is not None and track.image is None:
        return _item_outside(m, track, key)
    if t in (list, tuple) and track is None and type(key) is int and -len(obj) <= key < len(obj):
        found = obj[key]
        if type(found) in SCALARS or issubclass(type(found), Tensor):  # the rest of the container is not looked through
            return found
    if issubclass(type(obj), type):
        return m.native(operator.getitem, [obj, key], {}) if not special(m, type(obj), "__getitem__") else None
    if t is defaultdict and (key := m.with_numbers(key)) not in (track.image if track is not None else obj):
        return _make_default(m, m.world.change(track) if track is not None else obj, key)
    if issubclass(type(obj), dict):
        found = _key_of(m, obj, key) if type(key) is torch.SymInt else key
        key = m.with_numbers(key) if found is MISSING else m.with_numbers(found)
        missing = special(m, t, "__missing__")
        if missing is not None and not dict.__contains__(obj if track is None else track.image, key):
            return m.call(missing, [obj, key], {})
    return m.native(operator.getitem, [obj, key], {})


def _item_outside(m: Machine, track: Any, key: Any) -> Any:
    """An item of a container from outside that was not read whole."""
    obj, base = track.obj, container_base(type(track.obj))
    if base is not None and issubclass(base, dict):
        key = m.with_numbers(key)
    if base is list and type(key) is int:
        m.world.use(track)
        n = list.__len__(obj)
        m.world.guard(track.source, "length", n)
        if -n <= key < n:
            key %= n
            return m.world.wrap(list.__getitem__(obj, key), item_of(track.source, key))
    elif base in (dict, OrderedDict) and m.is_key(key):
        value = _read_key(m, track, key)
        if value is MISSING:
            missing = special(m, type(obj), "__missing__")
            if missing is not None:
                return m.call(missing, [obj, key], {})
            raise Raised(KeyError(key))
        return value
    elif base is defaultdict:
        if m.is_key(key):
            value = _read_key(m, track, key)
            if value is not MISSING:
                return value
        body = m.world.image(track)
        body = m.world.change(track) if key not in body else body
        return getitem(m, body, key) if key in body else _make_default(m, body, key)
    return m.native(operator.getitem, [m.world.image(track), key], {})


def _make_default(m: Machine, body: Any, key: Any) -> Any:
    if body.default_factory is None:
        raise Raised(KeyError(key))
    body[key] = m.call(body.default_factory, [], {})
    return body[key]


def setitem(m: Machine, obj: Any, key: Any, value: Any) -> None:
    """`obj[key] = value`."""
    if issubclass(type(obj), Tensor):
        own = tensor_attrs.users_method(m, obj, "__setitem__")
        m.tensor_setitem(obj, key, value) if own is None else m.call(own, [obj, key, value], {})
        return
    if type(obj) is ArrayValue:
        arrays.setitem(m, obj, key, value)
        return
    f = special(m, type(obj), "__setitem__")
    if f is not None:
        m.call(f, [obj, key, value], {})
        return
    track = m.world.tracks.get(id(obj))
    if track is not None and m.is_namespace(track):
        m.store_global(track.obj, _global_name(m, key), value)
        return
    if track is not None:
        obj = m.world.change(track)
    if type(key) is slice and issubclass(type(obj), list):
        if not has_items(m, value):
            raise Raised(TypeError("can only assign an iterable" if key.step in (None, 1) else "must assign iterable to extended slice"))
        value = as_list(m, begin(m, value))  # what it holds is looked at now
    m.native(operator.setitem, [obj, key, value], {}, store=True)


def delitem(m: Machine, obj: Any, key: Any) -> None:
    """`del obj[key]`."""
    f = special(m, type(obj), "__delitem__")
    if f is not None:
        m.call(f, [obj, key], {})
        return
    track = m.world.tracks.get(id(obj))
    if track is not None and m.is_namespace(track):
        if not contains(m, obj, key):
            raise Raised(KeyError(key))
        m.store_global(track.obj, _global_name(m, key), NULL)
        return
    if track is not None:
        obj = m.world.change(track)
    m.native(operator.delitem, [obj, key], {}, store=True)


def _global_name(m: Machine, key: Any) -> str:
    if type(key) is not str:
        raise Unsupported("CAP012", at=m.loc(), detail="a global whose name is no string")
    return key


def _refuse_handler(m: Machine, tensor: Any) -> None:
    if overrides.has_own_handler(m, tensor):
        raise Unsupported("CAP061", at=m.loc(), detail="len() or iteration of a tensor with a handler")


def length(m: Machine, obj: Any) -> Any:
    """len(obj)."""
    t = type(obj)
    if issubclass(type(obj), Tensor):
        if m.modes or m.subclasses:
            _refuse_handler(m, obj)
        own = tensor_attrs.users_method(m, obj, "__len__")
        if own is not None:
            return outcome(m, "__len__", own, [obj])
        if obj.dim() == 0:
            raise Raised(TypeError("len() of a 0-d tensor"))
        return obj.shape[0]
    if t is ArrayValue:
        return arrays.length(m, obj)
    track = m.world.tracks.get(id(obj))
    f = special(m, t, "__len__")
    if f is not None:
        return outcome(m, "__len__", f, [obj])
    if track is not None and container_base(t):
        if track.image is not None:
            return len(track.image)
        m.world.use(track)
        n = held(obj)
        m.world.guard(track.source, "length", n)
        return n
    return m.native(len, [obj], {})


# ---------------------------------------------------------------- iteration


class Driven:
    """A real iterator over an object whose __next__ is written in Python. As that it may be asked below itself, and again behind its end."""

    __slots__ = ("m", "obj", "step")

    def __init__(self, m: Machine, obj: Any, step: Any) -> None:
        self.m, self.obj, self.step = m, obj, step

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.m.call(self.step, [self.obj], {})
        except Raised as r:
            raise self.m.leaving(r.exc) from None


def _sequence(m: Machine, obj: Any, get: Any) -> Iterator[Any]:
    i = 0
    while True:
        try:
            value = m.call(get, [obj, i], {})
        except Raised as r:
            if isinstance(r.exc, IndexError):
                return
            raise m.leaving(r.exc) from None
        yield value
        i += 1


def iterate(m: Machine, obj: Any) -> Any:
    """iter(obj) as a real Python iterator that never runs user code natively."""
    return driven(m, begin(m, obj))


def has_items(m: Machine, value: Any) -> bool:
    """Does the class of this value have what iter() asks for?"""
    t = type(value)
    return t not in SymTypes and (special(m, t, "__iter__") is not None or hasattr(t, "__iter__") or hasattr(t, "__getitem__"))


def driven(m: Machine, it: Any) -> Any:
    """A real iterator in the place of an object whose `__next__` is written in Python."""
    step = special(m, type(it), "__next__")
    return it if step is None else Driven(m, it, step)


def begin(m: Machine, obj: Any) -> Any:
    """iter(obj): an object with a `__next__` in Python is itself."""
    t = type(obj)
    if issubclass(type(obj), Tensor):
        if m.modes or m.subclasses:
            _refuse_handler(m, obj)
        own = tensor_attrs.users_method(m, obj, "__iter__")
        if own is not None:
            return _checked(m, m.call(own, [obj], {}))
        if obj.dim() == 0:
            raise Raised(TypeError("iteration over a 0-d tensor"))
        return iter(m.record("method", "unbind", (obj, 0), {}))
    if t is ArrayValue:
        return arrays.iterate(m, obj)
    track = m.world.tracks.get(id(obj))
    f = special(m, t, "__iter__")
    if f is not None:
        return _checked(m, m.call(f, [obj], {}))
    if track is not None and (has_image(t) or t is tuple or track.image is not None):
        return iter(m.world.image(track))
    if find(m, t, "__iter__") is MISSING:
        get = special(m, t, "__getitem__")
        if get is not None:
            return _sequence(m, obj, get)
    meta_iter = special(m, t, "__iter__") if issubclass(type(obj), type) else None
    if meta_iter is not None:
        return _checked(m, m.call(meta_iter, [obj], {}))
    if special(m, t, "__next__") is not None and find(m, t, "__iter__") is not MISSING:
        return obj
    if track is not None:
        raise Unsupported("CAP011", at=m.loc(), detail=f"iteration over {t.__name__} from {track.source}")
    return m.native(iter, [obj], {})


def _checked(m: Machine, it: Any) -> Any:
    """What `__iter__` returned."""
    if special(m, type(it), "__next__") is None and not hasattr(type(it), "__next__"):
        raise Raised(TypeError(f"iter() returned non-iterator of type '{type(it).__name__}'"))
    return it


def advance(m: Machine, it: Any) -> Any:
    """next(it); Raised(StopIteration) at the end."""
    step = special(m, type(it), "__next__")
    if step is not None:
        return m.call(step, [it], {})
    track = m.world.of(it)
    if track is not None:
        if track.image is None and not has_image(type(it)):
            raise Unsupported("CAP011", at=m.loc(), detail=f"an iterator from outside ({type(it).__name__})")
        it = m.world.image(track)
    return m.native(next, [it], {}, plain=True)


# ---------------------------------------------------------------- strings


def to_str(m: Machine, value: Any, kind: str = "__str__", spec: str = "") -> str:
    """str(), repr() or format() of a value."""
    if type(value) is torch.SymFloat and floats.varies(value):
        value = floats.pinned(m, value)
    t = type(value)
    if t in SCALARS:
        if spec:
            return str(m.native(format, [value, spec], {}))
        return repr(value) if kind == "__repr__" else str(value)
    if issubclass(type(value), Tensor):
        raise Unsupported("CAP020", at=m.loc(), detail="text of a tensor")
    if t is ArrayValue:
        raise Unsupported("CAP020", at=m.loc(), detail="text of an array")
    names = {"__str__": ("__str__", "__repr__"), "__repr__": ("__repr__",), "__format__": ("__format__", "__str__", "__repr__")}[kind]
    for name in names:
        f = special(m, t, name)
        if spec and name != "__format__":
            if t not in SymTypes and t.__format__ is object.__format__:
                m.native(object.__format__, [value, spec], {}, plain=True)  # raises
            break
        if f is not None:
            said = "__str__" if name == "__repr__" and kind != name else name
            return outcome(m, said, f, [value, spec] if name == "__format__" else [value])  # type: ignore[no-any-return]
        if f is None and find(m, t, name) is not getattr(object, name):  # a class in C says it
            break
    if issubclass(type(value), BaseException):
        return str(m.native(str if kind != "__repr__" else repr, [value], {}))
    fn: Any = {"__str__": str, "__repr__": repr}.get(kind)
    return str(m.native(fn, [value], {}) if fn else m.native(format, [value, spec], {}))
