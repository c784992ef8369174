"""Guards: read the world they speak of, evaluate them slowly (the definition), explain the one that failed, flatten them for C.

In: Source and Guard values (capture/source.py) and one call's locals, globals and closure. Out: truth, words, or the plain tuples
that `_frame.Entry` takes. The C checker (csrc/frame/guards.c) must agree with `holds` on every guard; tests compare them.
"""

from __future__ import annotations

import struct
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._device import DeviceContext

from ..codes import Unsupported
from ..ir.expr import Cast, Const, Expr, Sym
from ..ir.number import number_of
from ..runtime.host_torch import switches, watched
from . import _frame, overrides
from .source import (
    VIEWS,
    Attr,
    Cell,
    Computed,
    FixedObject,
    Global,
    GlobalState,
    Guard,
    Item,
    Local,
    PartOf,
    Source,
    TensorGuard,
    TensorKey,
    TensorOf,
    TensorProperty,
    TypeOf,
    referent,
)

MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the entry function: parameters by name, its globals, closure cells by name."""

    locals: Mapping[str, Any]
    globals: dict[str, Any]
    closure: Mapping[str, types.CellType]
    symbols: Mapping[str, Source] = field(default_factory=dict)  # where the sizes come from that conditions speak of


# ---------------------------------------------------------------- the world as guards see it


def _autocast() -> tuple[Any, ...]:
    rows = []
    for device in ("cpu", "cuda"):
        on = torch.is_autocast_enabled(device)
        rows.append((device, on, torch.get_autocast_dtype(device) if on else None))
    return (*rows, torch.is_autocast_cache_enabled() if any(r[1] for r in rows) else None)


_CPU = torch.device("cpu")


_function_modes = overrides.caller_modes


def default_device() -> torch.device | None:
    """Both `with torch.device(...)` and set_default_device are modes; asking torch would call the modes' own functions. None: no mode."""
    return next((m.device for m in reversed(_function_modes()) if isinstance(m, DeviceContext)), None)


def global_state() -> GlobalState:
    """The present process and thread state."""
    modes = _function_modes()
    return GlobalState(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast=_autocast(),
        default_dtype=torch.get_default_dtype(),
        default_device=default_device() or _CPU,
        torch_function=overrides.caller_level(),
        switches=switches(),
        torch_function_modes=tuple(map(type, modes)),
    )


def _raw_keys(t: torch.Tensor) -> int:
    return torch._C._dispatch_keys(t).raw_repr()


def tensor_guard(t: torch.Tensor, dynamic: Iterable[int] = ()) -> TensorGuard:
    """The metadata of `t`; sizes of `dynamic` dimensions, and strides that may depend on them, are left open."""
    open_dims = set(dynamic)
    sizes = tuple(None if i in open_dims else s for i, s in enumerate(t.shape))
    narrowest = min((t.stride(i) for i in open_dims), default=None)
    strides = tuple(None if i in open_dims or (narrowest is not None and s >= narrowest) else s for i, s in enumerate(t.stride()))
    return TensorGuard(type(t), t.dtype, t.device, t.requires_grad, sizes, strides if open_dims else tuple(t.stride()), _raw_keys(t))


def is_like(t: torch.Tensor, want: TensorGuard) -> bool:
    """Would `t` have this very guard, in which nothing is left open?"""
    return (
        type(t) is want.type and t.dtype is want.dtype and t.requires_grad is want.requires_grad and t.shape == want.sizes
        and t.stride() == want.strides and _raw_keys(t) == want.dispatch_keys and t.device == want.device
    )  # fmt: skip


# ---------------------------------------------------------------- slow evaluation: the definition


def _own_dict(obj: Any) -> Any:
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return found


def _type_lookup(obj: Any, name: str) -> Any:
    for cls in (obj if isinstance(obj, type) else type(obj)).__mro__:
        if name in vars(cls):
            return vars(cls)[name]
    return MISSING


_MODULE_DICTS = {"param": "_parameters", "buffer": "_buffers", "module": "_modules"}


def _attribute(obj: Any, name: str, via: str) -> Any:
    if via == "type":
        return _type_lookup(obj, name)
    if via == "referent":
        return referent(obj) if isinstance(obj, (weakref.ref, *VIEWS)) else MISSING
    if via in ("slot", "getattr"):
        return getattr(obj, name, MISSING)
    if via == "own":
        own = _own_dict(obj)
        return MISSING if own is None else own
    if via != "instance" and name in (_own_dict(obj) or _NO_NAMES):  # which Python asks first
        return MISSING
    return names_of(obj, via).get(name, MISSING)


def names_of(obj: Any, via: str) -> Any:
    """The dictionary in which an attribute of an object is found: via "instance", "param", "buffer" or "module"."""
    own = _own_dict(obj)
    if own is None:
        return _NO_NAMES
    return own if via == "instance" else own.get(_MODULE_DICTS[via], _NO_NAMES)


_NO_NAMES: Mapping[str, Any] = {}


def _from_globals(namespace: Any, name: str) -> Any:
    found = (vars(namespace) if isinstance(namespace, types.ModuleType) else namespace).get(name, MISSING)
    if found is MISSING:
        builtins = namespace.get("__builtins__", {}) if isinstance(namespace, dict) else vars(namespace).get("__builtins__", {})
        found = (vars(builtins) if isinstance(builtins, types.ModuleType) else builtins).get(name, MISSING)
    return found


def _cell_value(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _item(base: Any, key: Any) -> Any:
    if isinstance(base, types.CellType):
        return _cell_value(base)
    if isinstance(base, (list, tuple)):
        return base[key] if isinstance(key, int) and -len(base) <= key < len(base) else MISSING
    if isinstance(base, dict):
        return dict.get(base, key.ref() if type(key) is TensorKey else key, MISSING)
    if isinstance(base, types.MappingProxyType):  # of a class
        return base.get(key, MISSING)
    return MISSING


def _property(t: Any, name: str, dim: int) -> Any:
    if not isinstance(t, torch.Tensor):
        return MISSING
    if name == "item":
        return t.item()
    if name == "storage_offset":
        return t.storage_offset()
    if dim >= t.dim():
        return MISSING
    return t.size(dim) if name == "size" else t.stride(dim)


def _eval_global(s: Global, call: Call) -> Any:
    return _from_globals(call.globals if s.namespace is None else s.namespace.value, s.name)


def _eval_computed(s: Computed, call: Call) -> Any:
    numbers = tuple(evaluate(source, call) for _, source in s.symbols)
    if any(n is MISSING for n in numbers):
        return MISSING
    try:
        return s.value(numbers)
    except Exception:  # the function itself shall raise it
        return MISSING


def _eval_made(s: TensorOf | PartOf, base: Any) -> Any:
    try:
        return s.make((base,))
    except Exception:  # no array, or no such iterator, any more
        return MISSING


EVALUATE: dict[type, Callable[[Any, Call, Any], Any]] = {  # the last argument is the value of the source's base
    Local: lambda s, call, base: call.locals.get(s.name, MISSING),
    Global: lambda s, call, base: _eval_global(s, call),
    Cell: lambda s, call, base: _cell_value(call.closure[s.name]) if s.name in call.closure else MISSING,
    FixedObject: lambda s, call, base: s.value,
    Attr: lambda s, call, base: _attribute(base, s.name, s.via),
    Item: lambda s, call, base: _item(base, s.key),
    TypeOf: lambda s, call, base: type(base),
    TensorProperty: lambda s, call, base: _property(base, s.name, s.dim),
    TensorOf: lambda s, call, base: _eval_made(s, base),
    PartOf: lambda s, call, base: _eval_made(s, base),
    Computed: lambda s, call, base: _eval_computed(s, call),
}


def evaluate(source: Source, call: Call) -> Any:
    """The value a source has in this call; MISSING where there is none."""
    base = getattr(source, "base", None)
    value = None if base is None else evaluate(base, call)
    return MISSING if value is MISSING else EVALUATE[type(source)](source, call, value)


def same_constant(a: Any, b: Any) -> bool:
    """Exact type and ==; floats by bits, sets in their order: a program may iterate over them."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if type(a) is complex:
        return same_constant((a.real, a.imag), (b.real, b.imag))
    if type(a) in (set, frozenset):
        return same_constant(tuple(a), tuple(b))
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same_constant, a, b))
    return bool(a == b)


def keys_of(d: Mapping[Any, Any]) -> tuple[Any, ...]:
    """A dictionary's keys as guards name them."""
    return tuple(TensorKey(k) if isinstance(k, torch.Tensor) else k for k in d)


def _weak(key: Any) -> Any:
    return key.ref if type(key) is TensorKey else key


def _holds_tensor(g: Guard, v: Any, call: Call) -> bool:
    return isinstance(v, torch.Tensor) and not _tensor_differences(g.value, v)


def _guarded_type(t: torch.Tensor) -> Any:
    """A parameter that exists only in packed form stays what it was."""
    return getattr(type(t), "_torchsmith_was", type(t))


def _tensor_differences(want: TensorGuard, t: torch.Tensor) -> list[str]:
    """What differs, in words; empty: the guard holds."""
    rows: list[tuple[str, Any, Any]] = [
        ("type", want.type, _guarded_type(t)), ("dtype", want.dtype, t.dtype), ("device", want.device, t.device),
        ("requires_grad", want.requires_grad, t.requires_grad), ("number of dimensions", len(want.sizes), t.dim()),
    ]  # fmt: skip
    found = [f"{name} was {was}, is {now}" for name, was, now in rows if was != now]
    if not found:
        for i, (was, now) in enumerate(zip(want.sizes, t.shape, strict=True)):
            if was is not None and was != now:
                found.append(f"size of dimension {i} was {was}, is {now}")
        for i, (was, now) in enumerate(zip(want.strides, t.stride(), strict=True)):
            if was is not None and was != now:
                found.append(f"stride of dimension {i} was {was}, is {now}")
    if not found and want.dispatch_keys != _raw_keys(t):
        found.append("dispatch keys differ (conjugate, negated, inference or functorch tensor)")
    return found


def _missing(v: Any, name: Any) -> bool:
    if isinstance(v, dict):
        return (name.ref() if type(name) is TensorKey else name) not in v
    if isinstance(v, type):
        return _type_lookup(v, name) is MISSING
    own = _own_dict(v) or {}
    return name not in own and all(name not in (own.get(d) or ()) for d in _MODULE_DICTS.values())


def _holds_function(g: Guard, v: Any, call: Call) -> bool:
    if not isinstance(v, types.FunctionType):
        return False
    code, defaults, kwdefaults = g.value
    have, want = v.__defaults__ or (), defaults or ()
    more, wanted = v.__kwdefaults__ or {}, kwdefaults or {}
    return (
        v.__code__ is code
        and len(have) == len(want)
        and all(map(_same_default, want, have))
        and more.keys() == wanted.keys()
        and all(_same_default(wanted[k], more[k]) for k in wanted)
    )


class _Held(weakref.ref[Any]):
    """A default value that an entry does not keep alive; a user's reference is another class's."""

    __slots__ = ()


def _held(value: Any) -> Any:
    try:
        return _Held(value)
    except TypeError:  # of a type without weak references
        return value


def _same_default(want: Any, have: Any) -> bool:
    return have is want or (type(want) is _Held and have is not None and want() is have)


def _holds_distinct(g: Guard, v: Any, call: Call) -> bool:
    told, others = ([id(evaluate(s, call)) for s in part] for part in g.value)
    return len(set(told)) == len(told) and not set(told) & set(others)


def _holds_no_overlap(g: Guard, v: Any, call: Call) -> bool:
    if not isinstance(v, torch.Tensor):
        return False
    lo, hi = _frame.tensor_info(v)[5:]
    for source in g.value:
        if source == g.source:
            continue
        other = evaluate(source, call)
        if not isinstance(other, torch.Tensor):
            return False
        lo2, hi2 = _frame.tensor_info(other)[5:]
        if lo < hi2 and lo2 < hi:
            return False
    return True


def identity_value(g: Guard) -> Any:
    return g.value() if isinstance(g.value, weakref.ref) else g.value


# ---------------------------------------------------------------- size conditions

_SHAPE_OPS = {
    "not": 2, "neg": 3, "abs": 4, "add": 5, "sub": 6, "mul": 7, "floordiv": 8, "mod": 9, "truncdiv": 10, "min": 11, "max": 12,
    "eq": 13, "ne": 14, "lt": 15, "le": 16, "gt": 17, "ge": 18, "and": 19, "or": 20, "div": 21,
}  # fmt: skip
_OF_FLOATS = frozenset({"neg", "abs", "add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"})


def symbols_of(e: Expr) -> set[str]:
    if isinstance(e, Sym):
        return {e.name}
    return set().union(*map(symbols_of, e.args)) if e.args else set()


# ---------------------------------------------------------------- words


def _print_tensor(g: Guard) -> str:
    t: TensorGuard = g.value
    sizes = ", ".join("?" if s is None else str(s) for s in t.sizes)
    strides = ", ".join("?" if s is None else str(s) for s in t.strides)
    grad = ", requires_grad" if t.requires_grad else ""
    return f"{g.source}: {t.type.__name__} {str(t.dtype).removeprefix('torch.')}[{sizes}] strides [{strides}] on {t.device}{grad}"


def _describe(v: Any) -> str:
    if isinstance(v, (type, types.FunctionType, types.ModuleType)):
        return str(getattr(v, "__qualname__", None) or getattr(v, "__name__", "object"))
    if isinstance(v, torch.nn.Module):
        return type(v).__name__
    text = repr(v) if not isinstance(v, torch.Tensor) else f"tensor of shape {tuple(v.shape)}"
    return text if len(text) <= 80 else text[:77] + "..."


def _print_state(s: GlobalState) -> str:
    parts = ["grad on" if s.grad_enabled else "grad off"]
    parts += ["inference mode"] if s.inference_mode else []
    parts += [f"autocast {r[0]} {r[2]}" for r in s.autocast if isinstance(r, tuple) and r[1]]
    return ", ".join([*parts, str(s.default_dtype), str(s.default_device)])


def _why_state(g: Guard, v: Any, call: Call) -> str:
    now = global_state()
    pairs = [(f, getattr(g.value, f), getattr(now, f)) for f in g.value.__dataclass_fields__]
    pairs += [(f, a, b) for (f, a), (_, b) in zip(g.value.switches, now.switches)]
    return "; ".join(f"{f} was {a}, is {b}" for f, a, b in pairs if a != b and f != "switches") or "global state changed"


def _why_shape(g: Guard, v: Any, call: Call) -> str:
    names = symbols_of(g.value)
    values = ", ".join(f"{n} = {evaluate(s, call)} ({s})" for n, s in call.symbols.items() if n in names)
    return f"the condition {g.value!r} on sizes fails: {values}"


def _why_tensor(g: Guard, v: Any, call: Call) -> str:
    differences = _tensor_differences(g.value, v) if isinstance(v, torch.Tensor) else [f"was a tensor, is {_describe(v)}"]
    return f"{g.source}: {'; '.join(differences)}"


# ---------------------------------------------------------------- flattening for C

_LOCAL, _GLOBAL, _GLOBAL_IN, _CELL, _FIXED, _INSTANCE, _MODULE_DICT = range(7)
_TYPE_ATTR, _GETATTR, _ITEM_SEQ, _ITEM_DICT, _CONTENTS, _TYPE_OF, _PROPERTY, _OWN_DICT, _COMPUTED, _REFERENT = range(7, 17)
_RECIPE_TAGS = {"out": 0, "const": 1, "source": 2, "tuple": 3, "list": 4, "dict": 5}


FlatGuard = tuple[str, int, Any, tuple[int, ...]]


class Flattener:
    """Builds the node list of one Entry: each Source once, bases first."""

    def __init__(self, names: Sequence[str], free_names: Sequence[str], symbols: Mapping[str, Source]) -> None:
        self.names, self.free_names, self.symbols = tuple(names), tuple(free_names), symbols
        self.nodes: list[tuple[int, int, int, Any, Any]] = []
        self.index: dict[Source, int] = {}

    def node(self, source: Source) -> int:
        """Number of the node for `source`."""
        found = self.index.get(source)
        if found is None:
            row = FLATTEN[type(source)](self, source)
            found = self.index[source] = len(self.nodes)
            self.nodes.append(row)
        return found

    def guard(self, g: Guard) -> FlatGuard:
        """The C form of one guard."""
        return KINDS[g.kind].flat(self, g)

    def shape(self, e: Expr) -> tuple[int, ...] | None:
        """Postfix program of a size condition, or None where it needs Python."""
        if isinstance(e, Const):
            return (0, int(e.value)) if isinstance(e.value, (bool, int)) and abs(e.value) < 2**62 else None
        if isinstance(e, Sym):
            return None if e.dtype.is_float else (1, self.node(self.symbols[e.name]))
        op = None if e.dtype.is_float else _SHAPE_OPS.get(getattr(e, "name", ""))
        parts = [self.shape(a) for a in e.args]
        if op is None or any(p is None for p in parts):
            return None
        return (*(x for p in parts for x in p or ()), op) if len(parts) < 3 else None

    def floats(self, e: Expr) -> tuple[int, ...] | None:
        """Postfix program of a condition on floats (and integers among them), or None where it needs Python."""
        if isinstance(e, Const):
            return (0, *struct.unpack("q", struct.pack("d", e.value))) if e.dtype.is_float else None
        if isinstance(e, Cast) and e.dtype.is_float and isinstance(e.arg, Sym) and not e.arg.dtype.is_float:
            return (1, self.node(self.symbols[e.arg.name]))
        if isinstance(e, Sym):
            return (1, self.node(self.symbols[e.name])) if e.dtype.is_float else None
        if getattr(e, "name", "") in ("and", "or", "not") or (getattr(e, "name", "") in _OF_FLOATS and all(a.dtype.is_float for a in e.args)):
            parts = [self.floats(a) for a in e.args]
        else:
            return None
        return None if None in parts else (*(x for p in parts for x in p or ()), _SHAPE_OPS[e.name])  # type: ignore[attr-defined]

    def recipe(self, recipe: Any, extra: list[int]) -> tuple[int, Any]:
        """C form of a result recipe; `extra` collects the nodes that its sources need."""
        tag, *rest = recipe
        if tag in ("out", "const"):
            return _RECIPE_TAGS[tag], rest[0]
        if tag == "source":
            extra.append(self.node(rest[0]))
            return _RECIPE_TAGS[tag], len(extra) - 1
        if tag == "dict":
            pairs = rest[0] if len(rest) == 1 and (not rest[0] or isinstance(rest[0][0], tuple)) else rest
            return _RECIPE_TAGS[tag], tuple((k, self.recipe(sub, extra)) for k, sub in pairs)
        items = rest[0] if len(rest) == 1 and (not rest[0] or not isinstance(rest[0][0], str)) else rest
        return _RECIPE_TAGS[tag], tuple(self.recipe(sub, extra) for sub in items)


def _flat_local(f: Flattener, s: Local) -> tuple[int, int, int, Any, Any]:
    return _LOCAL, -1, f.names.index(s.name), s.name, None


def _flat_global(f: Flattener, s: Global) -> tuple[int, int, int, Any, Any]:
    if s.namespace is None:
        return _GLOBAL, -1, 0, s.name, None
    return _GLOBAL_IN, -1, 0, s.name, s.namespace.value


def _flat_attr(f: Flattener, s: Attr) -> tuple[int, int, int, Any, Any]:
    base = f.node(s.base)
    if s.via in _MODULE_DICTS:
        return _MODULE_DICT, base, 0, s.name, _MODULE_DICTS[s.via]
    return {"instance": _INSTANCE, "type": _TYPE_ATTR, "own": _OWN_DICT, "referent": _REFERENT}.get(s.via, _GETATTR), base, 0, s.name, None


def _flat_item(f: Flattener, s: Item) -> tuple[int, int, int, Any, Any]:
    base = f.node(s.base)
    if s.key == "cell_contents":  # C looks whether the base is a cell
        return _CONTENTS, base, 0, s.key, None
    if type(s.key) is int and abs(s.key) < 2**31:  # C looks whether the base is a sequence or a dictionary
        return _ITEM_SEQ, base, s.key, s.key, None
    return _ITEM_DICT, base, 0, _weak(s.key), None


FLATTEN: dict[type, Callable[[Flattener, Any], tuple[int, int, int, Any, Any]]] = {
    Local: _flat_local,
    Global: _flat_global,
    Cell: lambda f, s: (_CELL, -1, f.free_names.index(s.name), s.name, None),
    FixedObject: lambda f, s: (_FIXED, -1, 0, s.value, None),
    Attr: _flat_attr,
    Item: _flat_item,
    TypeOf: lambda f, s: (_TYPE_OF, f.node(s.base), 0, None, None),
    TensorProperty: lambda f, s: (_PROPERTY, f.node(s.base), s.dim, s.name, None),
    TensorOf: lambda f, s: (_COMPUTED, -1, 0, s.make, (f.node(s.base),)),
    PartOf: lambda f, s: (_COMPUTED, -1, 0, s.make, (f.node(s.base),)),
    Computed: lambda f, s: (_COMPUTED, -1, 0, s.value, tuple(f.node(source) for _, source in s.symbols)),
}


# ---------------------------------------------------------------- the kinds


def _flat_shape(f: Flattener, g: Guard) -> FlatGuard:
    unknown = symbols_of(g.value) - set(f.symbols)
    if unknown:
        raise Unsupported("API009", at=g.loc, detail=f"{', '.join(sorted(unknown))} in {g.value!r}")
    node = f.node(g.source)
    for name, code in (("shape", f.shape(g.value)), ("floats", f.floats(g.value))):
        if code is not None:
            return name, node, g.value, code
    names, expr = sorted(symbols_of(g.value)), g.value

    def condition(*values: Any) -> bool:
        return bool(number_of(expr, dict(zip(names, values, strict=True))))

    return "python", node, condition, tuple(f.node(f.symbols[n]) for n in names)


def _holds_shape(g: Guard, v: Any, call: Call) -> bool:
    given = {n: evaluate(s, call) for n, s in call.symbols.items()}
    value = number_of(g.value, {n: v for n, v in given.items() if v is not MISSING})
    return value is not None and bool(value)


def _flat_state(f: Flattener, g: Guard) -> FlatGuard:
    want = g.value
    return g.kind, f.node(g.source), lambda: want == global_state(), ()


def _flat_plain(f: Flattener, g: Guard) -> FlatGuard:
    return g.kind, f.node(g.source), g.value, ()


def _length(v: Any) -> int | str:
    """What a container holds; a `__len__` of the program is not asked."""
    base = next((b for b in (dict, list, tuple, set) if isinstance(v, b)), None)
    return int(base.__len__(v)) if base is not None else len(v) if hasattr(v, "__len__") else "unknown"


def _why_not(g: Guard, v: Any, call: Call) -> str:
    return f"no longer true: {KINDS[g.kind].text(g)}"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of guard: its definition, given the value of its source; Python-like text; why it does not hold, in words; its C form,
    (name in csrc/frame/guards.c, node, value, numbers). What C has no words for is "python": a function of the values of the nodes that
    `numbers` names."""

    holds: Callable[[Guard, Any, Call], bool]
    text: Callable[[Guard], str]
    why: Callable[[Guard, Any, Call], str] = _why_not
    flat: Callable[[Flattener, Guard], FlatGuard] = _flat_plain


KINDS: dict[str, Kind] = {
    "tensor": Kind(_holds_tensor, _print_tensor, _why_tensor),
    "identity": Kind(
        lambda g, v, call: (v is identity_value(g) and v is not None) or (v is None and g.value is None),
        lambda g: f"{g.source} is {_describe(identity_value(g))}",
        flat=lambda f, g: ("weak_identity" if isinstance(g.value, weakref.ref) else "identity", f.node(g.source), g.value, ()),
    ),
    "type": Kind(
        lambda g, v, call: type(v) is g.value,
        lambda g: f"type({g.source}) is {_describe(g.value)}",
        lambda g, v, call: f"{g.source} was of type {_describe(g.value)}, is of type {_describe(type(v))}",
    ),
    "equals": Kind(
        lambda g, v, call: same_constant(v, g.value),
        lambda g: f"{g.source} == {_describe(g.value)}",
        lambda g, v, call: f"{g.source} was {_describe(g.value)}, is {_describe(v)}",
    ),
    "length": Kind(
        lambda g, v, call: _length(v) == g.value,
        lambda g: f"len({g.source}) == {g.value}",
        lambda g, v, call: f"len({g.source}) was {g.value}, is {_length(v)}",
    ),
    "dict_keys": Kind(
        lambda g, v, call: isinstance(v, (dict, types.MappingProxyType)) and same_constant(keys_of(v), tuple(g.value)),
        lambda g: f"tuple({g.source}) == {_describe(g.value)}",
        flat=lambda f, g: (g.kind, f.node(g.source), tuple(map(_weak, g.value)), ()),
    ),
    "missing": Kind(
        lambda g, v, call: _missing(v, g.value),
        lambda g: f"{g.value!r} not in {g.source}",
        flat=lambda f, g: (g.kind, f.node(g.source), _weak(g.value), ()),
    ),
    "global_state": Kind(
        lambda g, v, call: g.value == global_state(), lambda g: f"global state is {_print_state(g.value)}", _why_state, _flat_state
    ),
    "no_overlap": Kind(
        _holds_no_overlap,
        lambda g: f"{g.source} shares no memory with {', '.join(str(s) for s in g.value if s != g.source)}",
        flat=lambda f, g: (g.kind, f.node(g.source), g.value, tuple(f.node(s) for s in g.value)),
    ),
    "shape": Kind(_holds_shape, lambda g: f"{g.value!r}", _why_shape, _flat_shape),
    "alias": Kind(
        lambda g, v, call: v is evaluate(g.value, call),
        lambda g: f"{g.source} is {g.value}",
        flat=lambda f, g: (g.kind, f.node(g.source), f.node(g.value), ()),
    ),
    "distinct": Kind(
        _holds_distinct,
        lambda g: f"{' and each of '.join(', '.join(map(str, part)) for part in g.value if part)} are different objects",
        flat=lambda f, g: (g.kind, f.node(g.source), len(g.value[0]), tuple(f.node(s) for part in g.value for s in part)),
    ),
    "function": Kind(_holds_function, lambda g: f"{g.source} is the function at {g.value[0].co_filename}:{g.value[0].co_firstlineno}"),
}


def print_guard(g: Guard) -> str:
    """One guard as Python-like text."""
    text = KINDS[g.kind].text(g)
    return f"{text}  # {g.loc}" if g.loc else text


def holds(guard: Guard, call: Call, symbols: Mapping[str, Source] | None = None) -> bool:
    """Is the guard true for this call? The slow definition of what C checks."""
    call = replace(call, symbols=symbols) if symbols else call
    v = evaluate(guard.source, call)
    return v is not MISSING and KINDS[guard.kind].holds(guard, v, call)


def explain(g: Guard, call: Call, symbols: Mapping[str, Source] | None = None) -> str:
    """Why this guard does not hold for this call, in words."""
    call = replace(call, symbols=symbols) if symbols else call
    v = evaluate(g.source, call)
    return f"{g.source} no longer exists" if v is MISSING else KINDS[g.kind].why(g, v, call)


def first_failure(guards: Sequence[Guard], call: Call, symbols: Mapping[str, Source] | None = None) -> Guard | None:
    """The first guard that does not hold, or None."""
    return next((g for g in guards if not holds(g, call, symbols)), None)


def _is_plain_object(value: Any) -> bool:
    t = type(value)
    return bool(t.__flags__ & 0x200) and t.__weakrefoffset__ != 0 and not isinstance(value, (type, weakref.ref))


def weaken(g: Guard) -> Guard:
    """Objects of the program, modules, tensors, functions and default values are held weakly: an entry keeps no model alive, nor what a
    closure holds."""
    if g.kind == "identity" and (_is_plain_object(g.value) or isinstance(g.value, (torch.nn.Module, torch.Tensor, types.FunctionType))):
        return Guard(g.source, g.kind, weakref.ref(g.value), g.loc)
    if g.kind == "function":
        code, defaults, kwdefaults = g.value
        weak = None if kwdefaults is None else {k: _held(v) for k, v in kwdefaults.items()}
        return Guard(g.source, g.kind, (code, None if defaults is None else tuple(map(_held, defaults)), weak), g.loc)
    return g


def make_entry(
    guards: Sequence[Guard],
    inputs: Sequence[Source],
    recipe: Any,
    finish: Callable[..., Any] | None,
    call: Callable[..., Any],
    *,
    names: Sequence[str],
    free_names: Sequence[str],
    globals: dict[str, Any] | None = None,
    symbols: Mapping[str, Source] | None = None,
    name: str = "graph",
    source: Any = None,
    resume: Any = None,
    anew: bool | Callable[[Exception], bool] = False,
) -> Any:
    """The `_frame.Entry` of one compilation. resume: the site at which it ends. anew: where it raises, the function itself is
    run; a function is asked with the exception whether that is so."""
    f = Flattener(names, free_names, symbols or {})
    rows = tuple(f.guard(g) for g in guards)
    graph_inputs = [f.node(s) for s in inputs]
    extra: list[int] = []
    flat = f.recipe(recipe, extra) if recipe is not None else (1, None)
    return _frame.Entry(tuple(f.nodes), rows, (*graph_inputs, *extra), len(graph_inputs), call, flat, finish, name, source, globals, resume, anew)


# ---------------------------------------------------------------- set-up of the C side


def _examples() -> list[torch.Tensor]:
    """Tensors that differ in every field the probe looks for."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(2, 9, requires_grad=True)
        out = [
            torch.zeros(3, 5), torch.zeros(4, 7, dtype=torch.float64).t(), torch.zeros(2, 3, 4, 5, 6, 7),
            torch.zeros(11, dtype=torch.int64), torch.zeros((), dtype=torch.bool),
            torch.empty(6, 2, device="meta"), torch.empty(5, 3, 2, device="meta", dtype=torch.bfloat16),
            torch.zeros(2, 2, 2, 2, 3, 2, 2, dtype=torch.int16).transpose(0, 4), torch.zeros(13, dtype=torch.complex64).conj(),
            leaf, torch.nn.Parameter(torch.zeros(8, 3)), leaf * 2, torch.zeros(5, 6)[1:, ::2],
        ]  # fmt: skip
    with torch.inference_mode():
        out.append(torch.zeros(7, 2))
    return out


def setup() -> dict[str, Any]:
    """Tell the C side about this torch: returns what the probe found."""
    lib = Path(torch.__file__).parent / "lib"
    C = torch._C
    # inference mode off and dispatch modes away: the examples must be ordinary tensors
    with torch.inference_mode(False), torch.enable_grad(), C.DisableTorchFunctionSubclass():
        leaves: list[torch.Tensor] = []
        for _ in range(12):
            on, off = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
            leaves += [on, off.requires_grad_(False), on * 2]
        itemsizes = {d: d.itemsize for d in vars(torch).values() if isinstance(d, torch.dtype)}
        getter = C.TensorBase.__dict__["requires_grad"]
        cpu = str(lib / "libtorch_cpu.so")
        found = _frame.setup_tensor(cpu, C.TensorBase, getter, _raw_keys, _examples(), itemsizes, tuple(leaves))
    plain, precisions = watched()
    foreign = 0
    for key in ("Tracer", "Python", "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode",
                "FuncTorchVmapMode", "PythonDispatcher", "PreDispatch", "Functionalize"):  # fmt: skip
        foreign |= C.DispatchKeySet(C._dispatch_key_parse(key)).raw_repr()  # type: ignore[attr-defined]
    found["state"] = _frame.setup_state(
        str(lib / "libtorch_cpu.so"), str(lib / "libc10.so"),
        C._dispatch_tls_local_include_set().raw_repr(), C._dispatch_tls_local_exclude_set().raw_repr(), foreign,
        vars(torch.autograd.forward_ad), tuple(f"_ZNK2at7Context{row[1]}Ev" for row in plain), tuple(row[2] for row in precisions),
    )  # fmt: skip
    return found


def _requires_grad(t: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return t.requires_grad


PROBED = setup()
_frame.set_plain_reader(_requires_grad)
