"""Shape rules of views of tensors whose sizes vary (views of known sizes run torch's own meta kernels)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...codes import Unsupported
from ..layout import (
    UNKNOWN,
    Size,
    Sizes,
    are_equal,
    clamp_index,
    contiguous_strides,
    format_strides,
    from_front,
    hint_of,
    is_contiguous,
    is_dense,
    is_less,
    is_one,
    is_static_one,
    is_symbolic,
    is_told,
    likely,
    propagate_strides,
    require,
    require_size,
    same,
)
from ..tracing import RULES, current, make, rule

aten = torch.ops.aten
Tensor = torch.Tensor


def strided(base: Tensor, sizes: Sequence[Size], strides: Sequence[Size], offset: Size | None = None) -> Tensor:
    """A view of `base`'s storage."""
    return torch.as_strided(base, sizes, strides, base.storage_offset() if offset is None else offset)


def axis(dim: int, n: int) -> int:
    """A dimension counted from the front; IndexError as torch raises it."""
    m = max(n, 1)
    if not -m <= dim < m:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-m}, {m - 1}], but got {dim})")
    return dim % m


def axes(dims: Any, n: int) -> list[int]:
    """One dimension or several, counted from the front; RuntimeError where one is named twice."""
    found = [axis(d, n) for d in (dims if isinstance(dims, (tuple, list)) else (dims,))]
    if len(set(found)) != len(found):
        raise RuntimeError("dim appears multiple times in the list of dims")
    return found


def view(*ops: Any) -> Any:
    """Register a rule that applies to symbolic sizes only; known sizes go to torch's meta view kernel."""

    def add(fn: Any) -> Any:
        for op in ops:
            rule(op)(_choose(op, fn))
        return fn

    return add


SAFE = {aten.unsafe_split.Tensor: aten.split.Tensor, aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default}


def _choose(op: Any, fn: Any) -> Any:
    native = SAFE.get(op, op)  # torch drops the alias of an unsafe view as soon as it makes it

    def choose(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._has_symbolic_sizes_strides or any(_is_symbolic(a) for a in args) or any(_is_symbolic(a) for a in kwargs.values()):
            return fn(self, *args, **kwargs)
        return native(self, *args, **kwargs)

    return choose


def _is_symbolic(v: Any) -> bool:
    if isinstance(v, (tuple, list)):
        return any(type(x) is torch.SymInt for x in v)
    return type(v) is torch.SymInt


@view(aten.alias.default, aten.detach.default, aten.lift_fresh.default)
def alias(self: Tensor) -> Tensor:
    return strided(self, self.shape, self.stride())


@view(aten.transpose.int)
def transpose(self: Tensor, dim0: int, dim1: int) -> Tensor:
    n = self.dim()
    a, b = axis(dim0, n), axis(dim1, n)
    sizes, strides = list(self.shape), list(self.stride())
    if n:
        sizes[a], sizes[b], strides[a], strides[b] = sizes[b], sizes[a], strides[b], strides[a]
    return strided(self, sizes, strides)


@view(aten.t.default)
def t(self: Tensor) -> Tensor:
    if self.dim() > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {self.dim()}D")
    return transpose(self, 0, 1) if self.dim() == 2 else alias(self)


@view(aten.permute.default)
def permute(self: Tensor, dims: Sequence[int]) -> Tensor:
    order = [axis(d, self.dim()) for d in dims]
    if len(order) != self.dim() or len(set(order)) != self.dim():
        raise RuntimeError(f"permute(): {list(dims)} is no order of {self.dim()} dimensions")
    return strided(self, [self.shape[d] for d in order], [self.stride(d) for d in order])


@view(aten.unsqueeze.default)
def unsqueeze(self: Tensor, dim: int) -> Tensor:
    d = axis(dim, self.dim() + 1)
    sizes, strides = list(self.shape), list(self.stride())
    step = sizes[d] * strides[d] if d < self.dim() else 1
    return strided(self, [*sizes[:d], 1, *sizes[d:]], [*strides[:d], step, *strides[d:]])


@view(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(self: Tensor, dim: Any = None) -> Tensor:
    """A size that only running tells is not 1, which running checks."""
    n = self.dim()
    among = range(n) if dim is None else axes(dim, n)
    keep = [d for d in range(n) if d not in among or not is_one(self.shape[d])]
    for d in keep:
        if d in among and is_told(self.shape[d]):
            require(self.shape[d] != 1)
    return strided(self, [self.shape[d] for d in keep], [self.stride(d) for d in keep])


@view(aten.expand.default)
def expand(self: Tensor, size: Sequence[Size], *, implicit: bool = False) -> Tensor:
    lead = len(size) - self.dim()
    if lead < 0:
        raise RuntimeError(f"expand: the number of sizes provided ({len(size)}) must be at least that of dimensions ({self.dim()})")
    sizes: list[Size] = [0] * len(size)
    strides: list[Size] = [0] * len(size)
    for i in range(len(size) - 1, -1, -1):
        want = size[i]
        have = 1 if i < lead else self.shape[i - lead]
        step = self.stride(i - lead) if i >= lead else 1 if i == len(size) - 1 else sizes[i + 1] * strides[i + 1]
        if type(want) is int and want == -1:
            want = have
        if not same(have, want):
            if is_static_one(have) or (not is_told(want) and is_one(have)):
                step = 0
            elif not require(have == want):
                raise RuntimeError(
                    f"The expanded size of the tensor ({want}) must match the existing size ({have}) at non-singleton dimension {i}"
                )
        sizes[i], strides[i] = want, step
    return strided(self, sizes, strides)


@view(aten.slice.Tensor)
def slice_(self: Tensor, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1) -> Tensor:
    d = axis(dim, self.dim())
    n = self.shape[d]
    lo, hi = clamp_index(0 if start is None else start, n), clamp_index(n if end is None else end, n)
    if hi is not n and lo is not hi:
        empty = is_less(hi, lo)
        hi = torch.sym_max(hi, lo) if empty is None else lo if empty else hi
    count = hi - lo if type(step) is int and step == 1 else (hi - lo + step - 1) // step
    sizes, strides = list(self.shape), list(self.stride())
    offset = self.storage_offset() + lo * strides[d]
    sizes[d], strides[d] = count, strides[d] * step
    return strided(self, sizes, strides, offset)


@view(aten.select.int)
def select(self: Tensor, dim: int, index: Size) -> Tensor:
    d = axis(dim, self.dim())
    n = self.shape[d]
    if not (require(index >= -n) and require(index < n)):
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(self.shape)} at dimension {d}")
    sizes, strides = list(self.shape), list(self.stride())
    offset = self.storage_offset() + from_front(index, n) * strides[d]
    del sizes[d], strides[d]
    return strided(self, sizes, strides, offset)


@rule(aten.as_strided.default)  # the meta kernel does not look at the storage's end
def as_strided(self: Tensor, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None) -> Tensor:
    if storage_offset is not None:
        current().when_offset_read(self)
        if not require(storage_offset >= 0):
            raise RuntimeError(f"Tensor: invalid storage offset {storage_offset}")
    last = self.storage_offset() if storage_offset is None else storage_offset
    for n, step in zip(size, stride, strict=True):
        last = last + (n - 1) * step
    end = self.untyped_storage().nbytes() // self.element_size()
    if last >= end and math.prod(size) != 0:  # of a size that data tell, it may be known only that it fits
        raise RuntimeError(f"as_strided: sizes {list(size)} and strides {list(stride)} reach beyond the {end} elements of the storage")
    return strided(self, size, stride, storage_offset)


@view(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(self: Tensor, split_size: Size, dim: int = 0) -> list[Tensor]:
    d = axis(dim, self.dim())
    n = self.shape[d]
    if split_size < 0 or (split_size == 0 and n != 0):
        raise RuntimeError(f"split expects split_size be non-negative, but got split_size={split_size}")
    count = _parts(n, split_size) if not same(n, split_size) else 1
    return [slice_(self, d, i * split_size, n if i == count - 1 else (i + 1) * split_size) for i in range(max(count, 1))]


def _parts(n: Size, size: Size) -> int:
    """How many parts of `size` make n. Asked as two bounds: one Expr of both is no interval of n where size depends on it (chunk)."""
    if is_symbolic((n, size)) and max(hint_of(n), hint_of(size)) < UNKNOWN:
        count = -(-hint_of(n) // hint_of(size))
        if n <= count * size and n > (count - 1) * size:
            return count
    return int((n + size - 1) // size)


@view(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(self: Tensor, split_sizes: Sequence[Size], dim: int = 0) -> list[Tensor]:
    d = axis(dim, self.dim())
    out, at, offset, step = [], 0, self.storage_offset(), self.stride(d)
    for s in split_sizes:
        sizes = list(self.shape)
        sizes[d] = s
        out.append(strided(self, sizes, self.stride(), offset + at * step))
        at = at + s
    if not are_equal((at,), (self.shape[d],)) or not all(map(require_size, split_sizes)):
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {self.shape[d]}, but got split_sizes={list(split_sizes)}"
        )
    return out


@view(aten.unbind.int)
def unbind(self: Tensor, dim: int = 0) -> list[Tensor]:
    return [select(self, dim, i) for i in range(int(self.shape[axis(dim, self.dim())]))]


@view(aten.diagonal.default)
def diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    a, b = axis(dim1, self.dim()), axis(dim2, self.dim())
    rows, cols = self.shape[a], self.shape[b]
    if a == b:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    length = torch.sym_max(torch.sym_min(rows, cols - offset) if offset >= 0 else torch.sym_min(rows + offset, cols), 0)
    if same(length, 0):  # nothing is read, and nothing lies beyond the memory
        offset = 0
    start = self.storage_offset() + (offset * self.stride(b) if offset >= 0 else -offset * self.stride(a))
    keep = [d for d in range(self.dim()) if d not in (a, b)]
    return strided(
        self, [*(self.shape[d] for d in keep), length], [*(self.stride(d) for d in keep), self.stride(a) + self.stride(b)], start
    )


@view(aten.unfold.default)
def unfold(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
    if step <= 0 or size < 0:
        raise RuntimeError(f"size is {size} and step is {step} but must be >= 0 and > 0")
    d = axis(dimension, self.dim())
    sizes, strides = list(self.shape), list(self.stride())
    if not require(size <= sizes[d]):
        raise RuntimeError(f"maximum size for tensor at dimension {d} is {sizes[d]} but size is {size}")
    sizes[d] = (sizes[d] - size) // step + 1
    return strided(self, [*sizes, size], _unfolded(strides, d, step))


def _unfolded(strides: list[Size], d: int, step: int) -> list[Size]:
    out = [*strides, strides[d]]
    out[d] = strides[d] * step
    return out


def infer(size: Sequence[Size], numel: Size) -> list[Size]:
    """view(-1, ...): the missing size."""
    unknown = [i for i, s in enumerate(size) if type(s) is int and s == -1]
    if not unknown:
        return list(size)
    rest: Size = 1
    for i, s in enumerate(size):
        if i != unknown[0]:
            rest = rest * s
    if not require(rest != 0):
        raise RuntimeError(f"cannot reshape tensor of 0 elements into shape {list(size)} because the unspecified dimension is ambiguous")
    out = list(size)
    out[unknown[0]] = numel // rest
    if type(rest) is int and type(numel) is int and numel % rest:
        raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {numel}")
    return out


def view_strides(
    old: Sequence[Size], strides: Sequence[Size], new: Sequence[Size], equal: Callable[[Size, Size], bool] = same
) -> Sizes | None:
    """Strides of a view of sizes `new`, or None where the memory does not allow one. Dimensions of size 1 get eager's strides too: they
    decide which memory format a convolution keeps.

    Both shapes are cut into runs of equal element counts, innermost first; in a run the old dimensions must be contiguous to each other.
    """
    if not old:
        return (1,) * len(new)
    out: list[Size] = [0] * len(new)
    position = len(new) - 1
    step = strides[-1]  # of the run's next dimension in `new`
    count: Size = 1  # the run's elements in `old`
    outer = step  # where a dimension must lie to belong to the run
    for d in range(len(old) - 1, -1, -1):
        if not is_static_one(old[d]):
            count, outer = count * old[d], old[d] * strides[d]
        if d and (is_static_one(old[d - 1]) or equal(strides[d - 1], outer)):
            continue
        have: Size = 1
        while position >= 0 and (is_static_one(new[position]) or not equal(have, count)):
            out[position] = step
            have, step = have * new[position], step * new[position]
            position -= 1
            if type(have) is int and type(count) is int and have > count:
                return None
        if not equal(have, count) and likely(have != count):
            return None
        if d:
            step = outer = strides[d - 1]
            count = 1
    while position >= 0:
        if not is_one(new[position]):
            return None
        out[position] = out[position + 1] * new[position + 1] if position + 1 < len(new) else 1
        position -= 1
    return tuple(out)


@view(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def view_(self: Tensor, size: Sequence[Size], stride: Any = None) -> Tensor:
    new = infer(size, self.numel())
    if stride is not None:
        return strided(self, new, stride)
    odd = self.dim() > 0 and is_static_one(self.shape[-1]) and not same(self.stride(-1), 1)
    strides = contiguous_strides(new) if is_contiguous(self) and not odd else view_strides(self.shape, self.stride(), new)
    if strides is None and is_symbolic((*self.shape, *new)):  # possible for the sizes at hand, where some are 1?
        ones = [1 if n == 1 else n for n in self.shape]
        strides = view_strides(ones, self.stride(), new, lambda a, b: bool(a == b))
    if strides is None:
        raise RuntimeError("view size is not compatible with input tensor's size and stride: use .reshape(...) instead")
    if not same(math.prod(new), self.numel()) and not require(math.prod(new) == self.numel()):
        raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {self.numel()}")
    return strided(self, new, strides)


for _op in (aten.view_as_real.default, aten.view_as_complex.default, aten._conj.default, aten._neg_view.default):
    rule(_op)(_op)  # torch's own rule takes symbols


@rule(aten.view.dtype)
def view_dtype(self: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool and self.dtype is not dtype:  # a bool of ours is 0 or 1
        raise Unsupported("GRA006", at=current().facts.loc, detail=f"the bytes of {self.dtype} as torch.bool")
    return _choose(aten.view.dtype, reinterpret)(self, dtype)  # type: ignore[no-any-return]


def reinterpret(self: Tensor, dtype: torch.dtype) -> Tensor:
    have, want = self.element_size(), dtype.itemsize
    if have < want:
        current().when_offset_read(self)
    sizes, strides, offset = list(self.shape), list(self.stride()), self.storage_offset()
    if have > want and not same(strides[-1], 1):
        raise RuntimeError(f"self.stride(-1) must be 1 to view {self.dtype} as {dtype} (different element sizes), but got {strides[-1]}")
    if have > want:
        sizes[-1], strides, offset = sizes[-1] * (have // want), [*(s * (have // want) for s in strides[:-1]), 1], offset * (have // want)
    elif have < want:
        ratio = want // have
        if not all(require(n % ratio == 0) for n in (sizes[-1], offset, *strides[:-1])) or not same(strides[-1], 1):
            raise RuntimeError(f"sizes {sizes} and strides {strides} do not fit {dtype}, an element of which is {ratio} of {self.dtype}")
        sizes[-1], strides, offset = sizes[-1] // ratio, [*(s // ratio for s in strides[:-1]), 1], offset // ratio
    return make((0,), (1,), dtype).set_(self.untyped_storage(), offset, sizes, strides)


@rule(aten.clone.default)
def clone(self: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return make(self.shape, copy_strides(self, memory_format), self.dtype)


def copy_strides(self: Tensor, memory_format: torch.memory_format | None) -> Sizes:
    """Strides of a copy: preserve_format keeps a dense layout and otherwise sorts as an element-wise kernel does."""
    shape = tuple(self.shape)
    if memory_format not in (None, torch.preserve_format):
        return format_strides(shape, memory_format)
    return tuple(self.stride()) if is_dense(self) else propagate_strides(shape, (self,))


@rule(aten._to_copy.default)
def to_copy(
    self: Tensor, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: torch.memory_format | None = None,
) -> Tensor:  # fmt: skip
    return make(self.shape, copy_strides(self, memory_format), self.dtype if dtype is None else dtype)


# Views that come as copies: the view's sizes, dense.
COPIES = """alias detach transpose.int t permute unsqueeze squeeze squeeze.dim squeeze.dims expand slice.Tensor select.int split.Tensor
    split_with_sizes unbind.int diagonal unfold view"""


def _copying(op: Any) -> Any:
    def copy(*args: Any, **kwargs: Any) -> Any:
        made = RULES[op](*args, **kwargs)
        if isinstance(made, Tensor):
            return make(made.shape, copy_strides(made, torch.contiguous_format), made.dtype)
        return [make(t.shape, copy_strides(t, torch.contiguous_format), t.dtype) for t in made]

    return copy


for _name in COPIES.split():
    _packet, _, _overload = _name.partition(".")
    rule(getattr(getattr(aten, f"{_packet}_copy"), _overload or "default"))(
        _copying(getattr(getattr(aten, _packet), _overload or "default"))
    )
