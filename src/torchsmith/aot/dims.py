"""Dim: what the user says of a dimension; and how a `dynamic_shapes` argument is read.

In: Dims and a nest of them that follows the arguments. Out: for each tensor leaf, {dimension: DeclaredSize}.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.utils import _pytree as pytree

from ..codes import Unsupported, define
from ..graph.declared import DeclaredSize, DeclaredSymbol

define("AOT062", "an argument is a container that torch can take apart but not put together around other values",
       "give the tensors it holds as arguments of their own")
define("AOT061", "a declared dimension cannot take all the sizes it was declared for", "change the declaration or the program")


@dataclass(frozen=True, slots=True)
class Hint:
    """Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, perhaps with bounds: a dimension without a name of its own."""

    kind: str  # "auto" | "dynamic" | "static"
    min: int | None = None
    max: int | None = None

    def __call__(self, *, min: int | None = None, max: int | None = None) -> Hint:
        _check_bounds(repr(self), min, max)
        return Hint(self.kind, min, max)

    def __repr__(self) -> str:
        return f"Dim.{self.kind.upper()}"


def _check_bounds(what: str, low: Any, high: Any) -> None:
    if not all(bound is None or (isinstance(bound, int) and not isinstance(bound, bool)) for bound in (low, high)):
        raise TypeError(f"{what}: min and max are integers, not {low!r} and {high!r}")
    if low is not None and low < 0:
        raise ValueError(f"{what}: min is {low}; sizes are not negative")
    if low is not None and high is not None and high < low:
        raise ValueError(f"{what}: max {high} is below min {low}")


class Dim:
    """A dimension that varies: `Dim("batch", min=1, max=1024)`. Dimensions with one Dim have equal sizes; `2 * d + 1` derives others.

    min: default 1, raised by itself where the program needs more; max: default none. A bound that is stated is kept or refused.
    Dim.AUTO: let the exporter find out; Dim.DYNAMIC: the same, but a single size is an error; Dim.STATIC: the size of the example.
    """

    AUTO: ClassVar[Hint] = Hint("auto")
    DYNAMIC: ClassVar[Hint] = Hint("dynamic")
    STATIC: ClassVar[Hint] = Hint("static")

    def __init__(self, name: str, *, min: int | None = None, max: int | None = None) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"Dim's name must be an identifier, not {name!r}")
        _check_bounds(f"Dim {name}", min, max)
        self.__name__, self.min, self.max = name, min, max

    def __repr__(self) -> str:
        bounds = "".join(f", {k}={v}" for k, v in (("min", self.min), ("max", self.max)) if v is not None)
        return f"Dim({self.__name__!r}{bounds})"

    def __add__(self, other: int) -> Derived:
        return Derived(self, 1, other)

    def __sub__(self, other: int) -> Derived:
        return Derived(self, 1, -other if isinstance(other, int) else other)

    def __mul__(self, other: int) -> Derived:
        return Derived(self, other, 0)

    __radd__, __rmul__ = __add__, __mul__


class Derived:
    """scale * dim + shift."""

    def __init__(self, root: Dim, scale: int, shift: int) -> None:
        if not isinstance(scale, int) or not isinstance(shift, int) or scale < 1:
            raise TypeError("a derived dimension is a positive integer times a Dim, plus an integer")
        self.root, self.scale, self.shift = root, scale, shift

    def __repr__(self) -> str:
        text = self.root.__name__ if self.scale == 1 else f"{self.scale}*{self.root.__name__}"
        return text if not self.shift else f"{text} {'+' if self.shift > 0 else '-'} {abs(self.shift)}"

    def __add__(self, other: int) -> Derived:
        return Derived(self.root, self.scale, self.shift + other)

    def __sub__(self, other: int) -> Derived:
        return Derived(self.root, self.scale, self.shift - other if isinstance(other, int) else other)

    def __mul__(self, other: int) -> Derived:
        return Derived(self.root, self.scale * other, self.shift * other)

    __radd__, __rmul__ = __add__, __mul__


def dims(*names: str, min: int | None = None, max: int | None = None) -> tuple[Dim, ...]:
    """Several Dims at once."""
    return tuple(Dim(name, min=min, max=max) for name in names)


class ShapesCollection:
    """Declarations by tensor instead of by place: `shapes[x] = {0: batch}` or `shapes[x][0] = batch`, given as `dynamic_shapes`."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Any, Any]] = {}  # id of a tensor -> it, its declarations

    def __setitem__(self, tensor: Any, row: Any) -> None:
        _check_is_tensor(tensor)
        if id(tensor) in self._rows and self._rows[id(tensor)][1] != row:
            raise ValueError(f"ShapesCollection has other sizes for this tensor already: {self._rows[id(tensor)][1]}")
        self._rows[id(tensor)] = (tensor, row)

    def __getitem__(self, tensor: Any) -> Any:
        _check_is_tensor(tensor)
        return self._rows.setdefault(id(tensor), (tensor, {}))[1]

    def __len__(self) -> int:
        return len(self._rows)

    def dynamic_shapes(self, m: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The declarations as a nest that follows the arguments of m."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        rows = self.rows(leaves)
        return _nest(m, [rows.get(n) for n in range(len(leaves))], spec)

    def rows(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Number of a leaf -> its declarations."""
        found = {number: self._rows[id(leaf)][1] for number, leaf in enumerate(leaves) if id(leaf) in self._rows}
        if len({id(leaves[n]) for n in found}) < len(self):
            raise ValueError("dynamic_shapes: a ShapesCollection names a tensor that is no argument")
        return found


def _check_is_tensor(key: Any) -> None:
    if not isinstance(key, Tensor):
        raise TypeError(f"a ShapesCollection is indexed by the tensors among the arguments, not by {type(key).__name__}")


def _nest(m: Any, rows: list[Any], spec: Any) -> dict[str, Any]:
    """Declarations of leaves as a nest that follows the arguments of m."""
    args, kwargs = pytree.tree_unflatten(rows, spec)
    return dict(inspect.signature(getattr(m, "forward", m)).bind(*args, **kwargs).arguments)


class AdditionalInputs:
    """Other calls of the same program, given as `dynamic_shapes`: the sizes in which they differ from the example vary."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
        if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping | None):
            said = type(kwargs if isinstance(args, tuple | list) else args).__name__
            raise TypeError(f"AdditionalInputs.add takes a call's arguments as a tuple, and its keyword arguments as a dict, not {said}")
        self._calls.append((tuple(args), dict(kwargs or {})))

    def dynamic_shapes(self, m: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The declarations as a nest that follows the arguments of m."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        rows = self.rows(leaves, spec)
        return _nest(m, [rows.get(n) for n in range(len(leaves))], spec)

    def verify(self, program: Any) -> None:
        """Run the program on every one of these calls: raises what the first that it does not take raises."""
        runs = program.module()
        for args, kwargs in self._calls:
            runs(*args, **kwargs)

    def rows(self, leaves: Sequence[Any], spec: Any) -> dict[int, Any]:
        """Number of a leaf -> its declarations."""
        rows: dict[int, Any] = {}
        for args, kwargs in self._calls:
            others, structure = pytree.tree_flatten((args, kwargs))
            if structure != spec:
                raise ValueError("AdditionalInputs: a call's arguments have another structure than the example's")
            for number, (a, b) in enumerate(zip(leaves, others, strict=True)):
                sizes, other = getattr(a, "shape", None), getattr(b, "shape", None)
                if sizes is None or other is None or len(sizes) != len(other):
                    if type(a) is not type(b) or sizes is not None or a != b:
                        raise ValueError(f"AdditionalInputs: {_told(b)} instead of {_told(a)} is no difference of sizes")
                    continue
                row = rows.setdefault(number, {})
                row.update({d: Dim.DYNAMIC for d, (n, m) in enumerate(zip(sizes, other, strict=True)) if n != m})
        return rows


def _told(leaf: Any) -> str:
    return f"a tensor of sizes {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def ours(row: Any) -> Any:
    """torch.export's Dim, derived dimension or hint as ours (by its attributes: that module is not imported); anything else as it is.

    Its Dim keeps an unstated minimum as 0 and an unstated maximum as an infinity that is no int.
    """
    if type(row).__module__ != "torch.export.dynamic_shapes":
        return row
    if hasattr(row, "fn"):
        shift = row.fn(0)
        return Derived(ours(row.root), row.fn(1) - shift, shift)
    if hasattr(row, "type"):
        return Hint(row.type.name.lower(), row.min, row.max)
    return Dim(row.__name__, min=row.min or None, max=row.max if type(row.max) is int else None)


Declared = dict[int, dict[int, DeclaredSize]]  # number of a flat leaf -> {dimension: size}


def read_shapes(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any
) -> tuple[Declared, dict[int, str]]:
    """What `dynamic_shapes` declares of each leaf of (args, kwargs), and each leaf's name for messages ("x", "mask[0]").

    shapes: a dictionary by parameter name, or a sequence by position; nested as the arguments are; at a tensor {dim: Dim}, a sequence
    with an entry for every dimension, or None. Raises ValueError naming the argument.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    try:
        numbered_args, numbered_kwargs = pytree.tree_unflatten(list(range(len(leaves))), spec)
    except Exception as e:  # a constructor of the user's or of torch's (PackedSequence) that looks at what it is given
        code = getattr(inspect.unwrap(forward), "__code__", None)
        at = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        raise Unsupported("AOT062", at=at, detail=f"{type(e).__name__}: {e}") from e
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*numbered_args, **numbered_kwargs).arguments
    except TypeError as e:
        raise TypeError(f"the example arguments do not fit {getattr(forward, '__qualname__', forward)}{signature}: {e}") from None
    named: dict[str, Any] = {}
    for p in signature.parameters.values():
        if p.name in bound:
            named.update(bound[p.name] if p.kind is p.VAR_KEYWORD else {p.name: bound[p.name]})
            if p.kind is p.VAR_KEYWORD and isinstance(shapes, Mapping) and p.name in shapes and p.name not in named:
                shapes = {**{k: v for k, v in shapes.items() if k != p.name}, **(shapes[p.name] or {})}  # {"kwargs": {"mask": ...}}
    names: dict[int, str] = {}
    for name, value in named.items():
        for path, number in pytree.tree_flatten_with_path(value)[0]:
            names[number] = name + pytree.keystr(path)
    declared: Declared = {}
    if shapes is not None:
        reader = _Reader(leaves, names, declared)
        if type(shapes).__module__ == "torch.export.dynamic_shapes":  # its ShapesCollection or AdditionalInputs
            shapes = shapes.dynamic_shapes(forward, tuple(args), dict(kwargs))
        if isinstance(shapes, ShapesCollection | AdditionalInputs):
            rows = shapes.rows(leaves) if isinstance(shapes, ShapesCollection) else shapes.rows(leaves, spec)
            for number, row in rows.items():
                reader.leaf(number, row, names[number])
        elif isinstance(shapes, Mapping):
            unknown = [k for k in shapes if k not in named]
            if unknown:
                raise ValueError(f"dynamic_shapes names {unknown[0]!r}; the arguments are {', '.join(named) or 'none'}")
            for k, v in shapes.items():
                reader.visit(named[k], v, k)
        else:
            values = list(named.values())
            if not isinstance(shapes, Sequence) or len(shapes) != len(values):
                raise ValueError(f"dynamic_shapes must have one entry for each of the {len(values)} arguments ({', '.join(named)})")
            for (k, value), v in zip(named.items(), shapes, strict=True):
                reader.visit(value, v, k)
    return declared, names


class _Reader:
    def __init__(self, leaves: list[Any], names: dict[int, str], declared: Declared) -> None:
        self.leaves, self.names, self.declared = leaves, names, declared
        self.symbols: dict[str, DeclaredSymbol] = {}
        self.roots: dict[str, Dim] = {}

    def visit(self, numbers: Any, shapes: Any, where: str) -> None:
        """Walk the arguments (leaf numbers in their place) and the declarations side by side."""
        if shapes is None:
            return
        if isinstance(numbers, int):
            self.leaf(numbers, shapes, where)
        elif isinstance(numbers, Mapping) and isinstance(shapes, Mapping):
            for k, v in shapes.items():
                if k not in numbers:
                    raise ValueError(f"dynamic_shapes has a key {k!r} that argument {where} has not")
                self.visit(numbers[k], v, f"{where}[{k!r}]")
        elif isinstance(numbers, (list, tuple)) and isinstance(shapes, (list, tuple)) and len(numbers) == len(shapes):
            for i, (n, v) in enumerate(zip(numbers, shapes, strict=True)):
                self.visit(n, v, f"{where}[{i}]")
        elif type(shapes) is type(numbers) and type(numbers) in pytree.SUPPORTED_NODES:  # a registered dataclass
            flat = pytree.SUPPORTED_NODES[type(numbers)].flatten_fn
            for n, v in zip(flat(numbers)[0], flat(shapes)[0], strict=True):
                self.visit(n, v, f"{where}")
        elif pytree.tree_leaves(numbers):
            children, rows = pytree.tree_leaves(numbers), list(shapes.values()) if isinstance(shapes, Mapping) else shapes
            if not isinstance(rows, (list, tuple)) or len(rows) != len(children):
                raise ValueError(f"dynamic_shapes of argument {where} does not have its structure")
            for n, v in zip(children, rows, strict=True):
                self.visit(n, v, self.names[n])

    def leaf(self, number: int, shapes: Any, where: str) -> None:
        tensor = self.leaves[number]
        rank = getattr(tensor, "dim", lambda: -1)()
        if rank < 0 and type(shapes) is type(tensor) and shapes == tensor:
            return
        if rank < 0 and isinstance(ours(shapes), Hint) and type(tensor) in (int, float, bool):
            if ours(shapes).kind == "dynamic":
                raise ValueError(f"dynamic_shapes: argument {where} is a number, which an exported program keeps: pass it in a tensor")
            return
        if rank < 0:
            raise ValueError(f"dynamic_shapes gives sizes to argument {where}, which is not a tensor but {type(tensor).__name__}")
        rows = dict(shapes) if isinstance(shapes, Mapping) else dict(enumerate(shapes))
        if not isinstance(shapes, Mapping) and len(rows) != rank:
            raise ValueError(f"dynamic_shapes of argument {where} has {len(rows)} entries for {rank} dimensions")
        for d, row in rows.items():
            if not isinstance(d, int) or not -rank <= d < rank:
                raise ValueError(f"dynamic_shapes of argument {where}: no dimension {d} in a tensor with {rank} dimensions")
            size = self.size(row, f"{where}.shape[{d % rank}]", tensor.shape[d])
            if size is not None:
                self.declared.setdefault(number, {})[d % rank] = size

    def size(self, row: Any, where: str, now: int) -> DeclaredSize | None:
        row = ours(row)
        if row is None or (isinstance(row, Hint) and row.kind == "static"):
            return None
        if isinstance(row, bool):
            raise ValueError(f"dynamic_shapes: {where} is {row!r}")
        if isinstance(row, int):
            if row != now:
                raise ValueError(f"dynamic_shapes says that {where} is always {row}; the example has {now}")
            return None
        if isinstance(row, Hint):
            name = f"d{len(self.symbols)}"
            self.symbols[name] = DeclaredSymbol.of(name, row.kind, row.min, row.max)
            return DeclaredSize(self.symbols[name])
        root, scale, shift = (row.root, row.scale, row.shift) if isinstance(row, Derived) else (row, 1, 0)
        if not isinstance(root, Dim):
            raise ValueError(f"dynamic_shapes: {where} is {row!r}, neither a Dim nor an int")
        name = root.__name__
        known = self.roots.setdefault(name, root)
        if (known.min, known.max) != (root.min, root.max):
            raise ValueError(f"two Dims are called {name!r} and have different ranges: {known} and {root}")
        symbol = self.symbols.setdefault(name, DeclaredSymbol.of(name, "named", root.min, root.max))
        return DeclaredSize(symbol, scale, shift)
