"""Sources and guards as data: where a captured value came from, and what must still hold for the capture to be right.

    Source = Local(name) | Global(name) | Cell(name) | Fixed(object) | Attr(base, name) | Item(base, key) | TypeOf(base)
           | DictKeys(base) | Length(base) | TensorProperty(base, name, dim) | TensorOf(base, make)
           | PartOf(base, name, make) | Computed(fn, args, symbols)
    Guard  = (source, kind, value, loc)

A Source is evaluated against one call: `locals` by parameter name, the function's `globals` and `closure`. The C checker
(csrc/frame/) turns a guard list into a tree by source; capture/guards.py prints the same list as readable Python.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..ir.expr import Expr
from ..ir.number import number_of


class Source:
    """Base; `str(source)` is Python-like text such as `L['self'].layers[0].weight`."""

    __slots__ = ()

    def is_unspecialized_nn_module(self) -> bool:
        """Is it something that a module holds?"""
        source: Any = self
        while hasattr(source, "base"):
            if getattr(source, "via", "") in ("module", "param", "buffer"):
                return True
            source = source.base
        return False

    is_unspecialized_builtin_nn_module = is_unspecialized_nn_module


def referent(obj: Any) -> Any:
    """What a weak reference, or a view of a dictionary, refers to."""
    return obj() if isinstance(obj, weakref.ref) else gc.get_referents(obj)[0]


VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
ORDERED_VIEWS: tuple[type, ...] = (type(OrderedDict().keys()), type(OrderedDict().values()), type(OrderedDict().items()))  # extend these


@dataclass(frozen=True, slots=True)
class Local(Source):
    name: str

    def __str__(self) -> str:
        return f"L['{self.name}']"


@dataclass(frozen=True, slots=True)
class Global(Source):
    """A name in a globals dict; `module` is that dict's owner when it is not the entry function's own."""

    name: str
    namespace: FixedObject | None = None

    def __str__(self) -> str:
        return f"G['{self.name}']" if self.namespace is None else f"{self.namespace}['{self.name}']"


@dataclass(frozen=True, slots=True)
class Cell(Source):
    """Contents of the entry function's closure cell `name`."""

    name: str

    def __str__(self) -> str:
        return f"C['{self.name}']"


@dataclass(frozen=True, eq=False, slots=True)
class FixedObject(Source):
    """An object kept alive by the entry (a globals dict of another module, a constant). Compared by identity."""

    value: Any
    label: str = "const"

    def __str__(self) -> str:
        return self.label

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedObject) and other.value is self.value

    def __hash__(self) -> int:
        return hash(("FixedObject", id(self.value)))


@dataclass(slots=True, init=False)
class Attr(Source):
    """`base.name`. `via` says how it is read: "instance" (obj.__dict__), "param"/"buffer"/"module" (nn.Module's dictionaries),
    "type" (a class attribute), "slot" (member descriptor), "own" (`__dict__`, whatever the class makes of that name), "getattr" (generic
    lookup), "referent" (what a weak reference, or a view of a dictionary, refers to)."""

    base: Source
    name: str
    via: Literal["instance", "param", "buffer", "module", "type", "slot", "own", "getattr", "referent"]
    _hash: int = field(repr=False, compare=False)  # these are made by the thousand and looked up; nobody writes to them

    def __init__(self, base: Source, name: str, via: Any = "getattr") -> None:
        self.base, self.name, self.via = base, name, via
        self._hash = hash((base, name, via))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{self.base}()" if self.name == "referent" else f"{self.base}.{self.name}"


class TensorKey:
    """A tensor that is a dictionary's key (an optimizer's state): compared by identity, and not kept alive."""

    __slots__ = ("number", "ref")

    def __init__(self, tensor: Any) -> None:
        self.ref, self.number = weakref.ref(tensor), id(tensor)

    def __eq__(self, other: object) -> bool:
        return type(other) is TensorKey and other.number == self.number and other.ref() is self.ref()

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        tensor = self.ref()
        return f"tensor {self.number:x}" + (", which is gone" if tensor is None else f" of shape {tuple(tensor.shape)}")


@dataclass(slots=True)
class Item(Source):
    """`base[key]` for an exact list, tuple or dict (key hashable and guarded by equality), or a `cell` (key "cell_contents")."""

    base: Source
    key: Any
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._hash = hash((self.base, self.key))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{self.base}[{self.key!r}]"


@dataclass(frozen=True, slots=True)
class TypeOf(Source):
    base: Source

    def __str__(self) -> str:
        return f"type({self.base})"


@dataclass(frozen=True, slots=True)
class TensorProperty(Source):
    """size(dim), stride(dim) or storage_offset of a tensor source: what a symbol stands for."""

    base: Source
    name: Literal["size", "stride", "storage_offset", "item"]
    dim: int = 0

    def __str__(self) -> str:
        return f"{self.base}.{self.name}({self.dim})"


@dataclass(frozen=True, slots=True)
class TensorOf(Source):
    """The tensor that stands for an array (or scalar) of NumPy: make((base,)), which raises ValueError where there is none."""

    base: Source
    make: Callable[[tuple[Any, ...]], Any]

    def __str__(self) -> str:
        return f"tensor({self.base})"


@dataclass(frozen=True, slots=True)
class PartOf(Source):
    """What an iterator is made of, by the name of the part: make((base,))."""

    base: Source
    name: str
    make: Callable[[tuple[Any, ...]], Any]

    def __str__(self) -> str:
        return f"{self.name} of {self.base}"


@dataclass(frozen=True, eq=False, slots=True)
class Computed(Source):
    """What a pure Python function gives for numbers of this call: fn(*args), each argument a plain number or an Expr over `symbols`
    (name, where its value comes from). Compared by function and arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    symbols: tuple[tuple[str, Source], ...]

    def __str__(self) -> str:
        named = dict(self.symbols)
        shown = (str(named.get(getattr(a, "name", ""), a)) for a in self.args)
        return f"{getattr(self.fn, '__qualname__', self.fn)}({', '.join(shown)})"

    def _key(self) -> tuple[Any, ...]:
        return (self.fn, tuple((type(a), repr(a) if isinstance(a, (int, float, str)) else id(a)) for a in self.args), self.symbols)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Computed) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def value(self, numbers: tuple[Any, ...]) -> Any:
        """The result for these values of `symbols`, in order. Raises what the function raises; ValueError where an argument is no number."""
        given = dict(zip((name for name, _ in self.symbols), numbers, strict=True))
        args = [number_of(a, given) if isinstance(a, Expr) else a for a in self.args]
        if any(a is None for a in args):
            raise ValueError("an argument is no number")
        return self.fn(*args)


ITSELF = -1  # among the dimensions of an input that vary: the input is an integer that does

GuardKind = Literal[
    "tensor",  # value: TensorGuard
    "identity",  # value: the object itself (`is`); the entry keeps it alive, or a weak reference where the value allows
    "type",  # value: exact type
    "equals",  # value: int/str/bool/float/None/tuple/enum...; exact type and ==, floats by bits
    "length",  # value: int, for list/tuple/dict/set
    "dict_keys",  # value: tuple of keys, in order
    "missing",  # value: name; the object has no such attribute / the dict no such key
    "global_state",  # value: GlobalState; source is FixedObject(None)
    "no_overlap",  # value: tuple of Sources of tensors; no written one shares memory with another
    "shape",  # value: ir Expr over symbols, must be true
    "alias",  # value: another Source; both are the same object
    "distinct",  # value: two tuples of Sources; the first ones are different objects, and none of the others
    "function",  # value: (code, defaults, kwdefaults); a Python function that was inlined
]


_OF_A_LOCAL = re.compile(r"^L\['(\w+)'\]")

# torch.compile's names of kinds of guards.
GUARD_TYPES = {
    "tensor": "TENSOR_MATCH", "identity": "ID_MATCH", "type": "TYPE_MATCH", "equals": "CONSTANT_MATCH", "length": "SEQUENCE_LENGTH",
    "dict_keys": "DICT_KEYS_MATCH", "global_state": "GLOBAL_STATE", "shape": "SHAPE_ENV", "alias": "DUPLICATE_INPUT", "function": "CLOSURE_MATCH",
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Guard:
    """One condition; `loc` is the user's line that made it necessary (shown on recompiles)."""

    source: Source
    kind: GuardKind
    value: Any
    loc: str = ""

    # what torch.compile calls these things: filters of guards (options={"guard_filter_fn": ...}) are written for both
    @property
    def name(self) -> str:
        text = str(self.source)
        return _OF_A_LOCAL.sub(r"\1", text)

    @property
    def guard_type(self) -> str:
        return GUARD_TYPES.get(self.kind, self.kind.upper())

    @property
    def derived_guard_types(self) -> tuple[str, ...]:
        return ()

    @property
    def has_value(self) -> bool:
        return True

    @property
    def orig_guard(self) -> Guard:
        return self

    @property
    def is_global(self) -> bool:
        source = self.source
        while hasattr(source, "base"):
            source = source.base
        return isinstance(source, Global)


@dataclass(frozen=True, slots=True)
class TensorGuard:
    """Metadata of a tensor argument or parameter. A size or stride of None is dynamic (not checked, bound to a symbol)."""

    type: type
    dtype: Any
    device: Any
    requires_grad: bool
    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    dispatch_keys: int  # raw key set, for conj/neg/inference/functorch bits


@dataclass(frozen=True, slots=True)
class GlobalState:
    """Process and thread state a graph depends on."""

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[Any, ...]
    default_dtype: Any
    default_device: Any
    torch_function: int  # which handlers are switched off: overrides.caller_level
    switches: tuple[tuple[str, Any], ...]  # by name: precisions, determinism, the libraries that may be used
    torch_function_modes: tuple[type, ...]
