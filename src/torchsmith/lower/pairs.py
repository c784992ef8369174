"""Complex values as pairs of real ones: read from memory, written to memory. In: Refs of complex memory, Pairs; out: Pairs, Refs.

Complex memory is read and written as real memory with one more dimension, of size 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, const, op, select
from ..ir.program import Buffer, Layout
from .numerics import cast
from .ref import ONE, ZERO, Index, Pair, Ref, known

if TYPE_CHECKING:
    from .core import Builder

PARTS: dict[DType, DType] = {dt.c64: dt.f32, dt.c128: dt.f64}
TWO = const(2)


def _alias(cx: Builder, root: str, shape: Sequence[Expr], strides: Sequence[Expr], offset: Expr) -> str:
    """A buffer of real values (*shape, 2) that lies in complex memory."""
    b = cx.buffers[root]
    name = cx.fresh("c")
    steps = (*(s * TWO for s in strides), ONE)
    cx.strides[name] = steps
    cx.buffers[name] = Buffer(name, PARTS[b.dtype], (*shape, TWO), Layout(steps, offset * TWO), b.role, root, cx.loc)
    return name


def split(d: DType, parts: Ref) -> Pair:
    """Real values (*shape, 2) as complex ones of dtype `d`."""
    shape = parts.shape[:-1]
    return Pair(d, parts.remap(shape, lambda i: (*i, ZERO)), parts.remap(shape, lambda i: (*i, ONE)))


def _of_memory(cx: Builder, ref: Ref) -> Pair | None:
    s = ref.strided
    if s is None or cx.buffers[s.root].storage_of is not None:
        return None
    cx.require(s.root)
    parts = cx.ref(_alias(cx, s.root, ref.shape, s.strides, s.offset))
    return split(ref.dtype, parts)


def pair_of(cx: Builder, value: Any, d: DType) -> Pair | None:
    """A Pair of parts of dtype PARTS[d]; a number has no dimensions. None where the value cannot be read so."""
    if isinstance(value, Ref) and value.dtype.kind == "opaque":
        value = _of_memory(cx, value) if value.dtype in PARTS else None
    part = PARTS[d]
    if isinstance(value, Pair):
        if value.dtype is d:
            return value
        re, im = value.re, value.im
        return Pair(d, Ref(part, re.shape, lambda i: cast(re.load(i), part)), Ref(part, im.shape, lambda i: cast(im.load(i), part)))
    if isinstance(value, Ref):
        real = value
        return Pair(d, Ref(part, real.shape, lambda i: cast(real.load(i), part)), Ref(part, real.shape, lambda i: Const(part, 0.0)))
    if isinstance(value, (bool, int, float, complex)):
        z = complex(value)
        return Pair(d, Ref(part, (), lambda i: Const(part, z.real)), Ref(part, (), lambda i: Const(part, z.imag)))
    if isinstance(value, Expr):  # a size, or a number that varies
        return Pair(d, Ref(part, (), lambda i: cast(value, part)), Ref(part, (), lambda i: Const(part, 0.0)))
    return None


def in_memory(cx: Builder, pair: Pair, strides: Sequence[Expr] | None, role: Any = "temp") -> Ref:
    """The pair written to complex memory of these strides (row-major, if None)."""
    name = cx.buffer(pair.dtype, pair.shape, strides, required=True, role=role)
    alias = _alias(cx, name, pair.shape, cx.strides[name], ZERO)
    cx.fill(alias, lambda i: interleaved(pair, i))
    return cx.ref(name)


def written_back(cx: Builder, target: str, value: Any) -> tuple[str, str]:
    """(real memory of the complex buffer `target`, a buffer that holds what it takes)."""
    pair = pair_of(cx, value, value.dtype) if value.dtype in PARTS else None
    if pair is None:
        raise Unsupported("LOW001", at=cx.loc, detail=f"write-back of {value.dtype}")
    name = cx.buffer(PARTS[pair.dtype], (*pair.shape, TWO))
    cx.fill(name, lambda i: interleaved(pair, i))
    return _alias(cx, target, pair.shape, cx.strides[target], ZERO), name


def interleaved(pair: Pair, i: Index) -> Expr:
    which = known(i[-1])
    if which is not None:
        return (pair.im if which else pair.re).load(i[:-1])
    return select(op("eq", i[-1], ZERO), pair.re.load(i[:-1]), pair.im.load(i[:-1]))
