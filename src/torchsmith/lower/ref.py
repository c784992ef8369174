"""Ref: a lowered value, read through an index map. In: a buffer, or another Ref and a map; out: element expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, Load, const, convert

Index = tuple[Expr, ...]
ZERO, ONE = const(0), const(1)


@dataclass(frozen=True, slots=True)
class Strided:
    """This value is memory of buffer `root`, if that lies in its spec's strides: element i at offset + sum(i * strides)."""

    root: str
    strides: tuple[Expr, ...]
    offset: Expr


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor value. `load(index)` is one element, of `dtype`. `strided`: how an extern could read it without a copy.

    `whole`: the name of the buffer whose content this is, unchanged; None for a view or a computed map.
    """

    dtype: DType
    shape: tuple[Expr, ...]
    load: Callable[[Index], Expr]
    strided: Strided | None = None
    whole: str | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    def remap(self, shape: Sequence[Expr], index: Callable[[Index], Sequence[Expr]], strided: Strided | None = None) -> Ref:
        """A view: element i of the result is element index(i) of this."""
        load = self.load
        return Ref(self.dtype, tuple(shape), lambda i: load(tuple(index(i))), strided)

    def at(self, index: Index) -> Expr:
        """The element that broadcasting to the space of `index` reads: aligned right, dimensions of size 1 repeated."""
        extra = len(index) - len(self.shape)
        return self.load(tuple(ZERO if is_one(n) else i for i, n in zip(index[extra:], self.shape, strict=True)))


@dataclass(frozen=True, slots=True)
class Pair:
    """A complex tensor value of `dtype` as its real and its imaginary part (lower/complex.py)."""

    dtype: DType
    re: Ref
    im: Ref

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.re.shape


def is_one(e: Expr) -> bool:
    return e is ONE


def is_zero(e: Expr) -> bool:
    return e is ZERO


def known(e: Expr | int) -> int | None:
    """The value of a constant Expr, else None."""
    if isinstance(e, int):
        return e
    return int(e.value) if isinstance(e, Const) else None


def constant(e: Expr | int) -> int:
    """The value of an argument that is part of the program's structure; the graph has pinned it (graph/schema.py, SYMBOLIC)."""
    value = known(e)
    if value is None:
        raise Unsupported("LOW006", detail=repr(e))
    return value


def size(e: Expr | int) -> Expr:
    """A size or index argument as an index Expr."""
    if isinstance(e, Expr):
        return e if e.dtype is dt.index else convert(e, dt.index)
    return const(int(e))


def product(sizes: Sequence[Expr]) -> Expr:
    total: Expr = ONE
    for n in sizes:
        total = n if is_one(total) else total if is_one(n) else total * n
    return total


FEW = 4096  # elements for which a call into torch costs more than a loop that reads one element at a time


def is_small(shape: Sequence[Expr]) -> bool:
    """Are there known to be few elements? Where torch's kernel is the faster one, ours serves small tensors."""
    count = known(product(shape))
    return count is not None and count <= FEW


def contiguous_strides(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """Row-major strides; a size of 0 or 1 counts as 1, as eager does."""
    strides: list[Expr] = []
    running: Expr = ONE
    for n in reversed(shape):
        strides.append(running)
        if not (is_one(n) or is_zero(n)):
            running = n if is_one(running) else running * n
    return tuple(reversed(strides))


def overlaps(shape: Sequence[Expr], strides: Sequence[Expr]) -> bool:
    """Do elements share memory, as those of an expanded tensor do?"""
    return any(is_zero(s) and not is_one(n) for n, s in zip(shape, strides, strict=True))


def same_strides(shape: Sequence[Expr], a: Sequence[Expr], b: Sequence[Expr]) -> bool:
    """Do both place every element alike? Strides of dimensions of size 1 do not matter; nothing matters when there is no element."""
    if any(is_zero(n) for n in shape):
        return True
    return all(is_one(n) or x is y for n, x, y in zip(shape, a, b, strict=True))


def of_buffer(name: str, dtype: DType, shape: tuple[Expr, ...], strides: tuple[Expr, ...]) -> Ref:
    """The whole of buffer `name`."""
    return Ref(dtype, shape, lambda i: Load(name, dtype, tuple(i)), Strided(name, strides, ZERO), name)
