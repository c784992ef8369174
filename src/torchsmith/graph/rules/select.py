"""Shape rules of joining, indexing, gathering, scattering and padding; data-dependent sizes get fresh symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...codes import Unsupported
from ..layout import (
    Size,
    are_equal,
    broadcast,
    broadcasts_to,
    contiguous_strides,
    format_strides,
    from_front,
    is_shape,
    is_static_one,
    is_zero,
    require,
    result_dtype,
    same,
    strides_by_rows,
    suggest_format,
)
from ..sizes import expr_of
from ..tracing import RULES, current, device_of, fresh, make, part, rule
from .pointwise import check_number
from .views import axes, axis, copy_strides, strided, transpose, unsqueeze

aten = torch.ops.aten
Tensor = torch.Tensor


@rule(aten.cat.default)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [t for t in tensors if not (t.dim() == 1 and type(t.shape[0]) is int and t.shape[0] == 0)]
    dtype = result_dtype(*tensors)
    if not parts:
        return fresh((0,), dtype)
    first = parts[0]
    d = axis(dim, first.dim())
    total: Size = 0
    for t in parts:
        if t.dim() != first.dim():
            raise RuntimeError("Tensors must have same number of dimensions")
        for i in range(first.dim()):
            if i != d and not are_equal((t.shape[i],), (first.shape[i],)):
                raise RuntimeError(
                    f"Sizes of tensors must match except in dimension {d}. Expected size {first.shape[i]} but got size {t.shape[i]}"
                )
        total = total + t.shape[d]
    shape = [total if i == d else s for i, s in enumerate(first.shape)]
    formats = {suggest_format(t) for t in parts}
    return make(shape, format_strides(shape, formats.pop() if len(formats) == 1 else None), dtype)


@part(aten._chunk_cat.default)
def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int) -> Tensor:
    """Each tensor in as many parts along `dim`, padded where they do not come out even; parts of the same number stand side by side."""
    if num_chunks < 1 or any(is_zero(n) for t in tensors for n in t.shape) or len({t.dtype for t in tensors}) != 1:
        raise RuntimeError("_chunk_cat expects positive num_chunks and non-empty tensors of one dtype")
    d = axis(dim, tensors[0].dim()) if len({t.dim() for t in tensors}) == 1 else dim
    if not all(0 <= d < t.dim() and are_equal(t.shape[:d], tensors[0].shape[:d]) for t in tensors):
        raise RuntimeError("_chunk_cat expects same sizes of 0,...,dim-1 dimensions for all tensors")
    parts = []
    for t in tensors:
        missing = (-t.shape[d]) % num_chunks
        if not (type(missing) is int and missing == 0):
            t = aten.constant_pad_nd.default(t, [*[0, 0] * (t.dim() - d - 1), 0, missing], 0)
        parts.append(t.reshape(*t.shape[:d], num_chunks, -1))
    return aten.cat.default(parts, d + 1)  # type: ignore[no-any-return]


@rule(aten.stack.default)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    for t in tensors:
        if not are_equal(t.shape, first.shape):
            raise RuntimeError(f"stack expects each tensor to be equal size, but got {list(first.shape)} and {list(t.shape)}")
    d = axis(dim, first.dim() + 1)
    if d == first.dim():
        return cat([unsqueeze(t, d) for t in tensors], d)
    joined = cat(tensors, d)  # eager joins along the dimension and splits it
    if not joined._has_symbolic_sizes_strides:
        return joined.view(*first.shape[:d], len(tensors), *first.shape[d:])
    strides = list(joined.stride())
    shape = (*first.shape[:d], len(tensors), *first.shape[d:])
    return make(shape, (*strides[:d], first.shape[d] * strides[d], *strides[d:]), joined.dtype)


@rule(aten.embedding.default)
def embedding(weight: Tensor, indices: Tensor, padding_idx: Size = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"Expected tensor for argument #1 'indices' to be of type Long or Int; got {indices.dtype}")
    return fresh((*indices.shape, weight.shape[1]), weight.dtype)


@rule(aten.embedding_renorm.default)
def embedding_renorm(self: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    if self.dim() != 2:
        raise RuntimeError(f"Expected 2-dimensional tensor, but got {self.dim()}-dimensional tensor for argument #1 'self'")
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"Expected tensor for argument #2 'indices' to be of type Long or Int; got {indices.dtype}")
    return same_strides(self)


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Behind the bags eager returns what its gradient needs; summing quickly it does not fill the bag of each index."""
    if offsets.dim() != 1 or indices.dim() != 1:
        raise RuntimeError(f"embedding_bag: indices and offsets have one dimension, not {indices.dim()} and {offsets.dim()}")
    bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    if device_of(weight).type != "cpu":
        spare = fresh((bags, weight.shape[1]) if mode == 2 else (0,), indices.dtype)
        return fresh((bags, weight.shape[1]), weight.dtype), fresh(indices.shape, indices.dtype), fresh(offsets.shape, indices.dtype), spare
    is_quick = mode == 0 and padding_idx < 0 and weight.dtype is not torch.float64 and same(weight.stride(1), 1)
    return (
        fresh((bags, weight.shape[1]), weight.dtype), fresh((0,) if is_quick else indices.shape, offsets.dtype),
        fresh((bags,), offsets.dtype), fresh((bags, weight.shape[1]) if mode == 2 else (bags,), offsets.dtype),
    )  # fmt: skip


@rule(aten.index_select.default)
def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if not self.dim():
        if not are_equal((index.numel(),), (1,)):
            raise RuntimeError(f"index_select(): Index to scalar can have only 1 value, got {index.numel()} value(s)")
        return fresh((), self.dtype)
    d = axis(dim, self.dim())
    return fresh([index.numel() if i == d else s for i, s in enumerate(self.shape)], self.dtype)


def _fits(inner: Sequence[Size], outer: Sequence[Size], but: int, what: str) -> None:
    """Each size of `inner` but one is within that of `outer`, so that what indexes the one stays inside the other."""
    if any(d != but and not same(a, b) and not require(a <= b) for d, (a, b) in enumerate(zip(inner, outer, strict=True))):
        raise RuntimeError(f"Expected index {list(inner)} to be no larger than {what} {list(outer)} apart from dimension {but}")


def _equal_ranks(**tensors: Tensor) -> None:
    if len({max(t.dim(), 1) for t in tensors.values()}) > 1:
        raise RuntimeError(f"{' and '.join(tensors)} should have the same number of dimensions")


@rule(aten.gather.default)
def gather(self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    d = axis(dim, self.dim())
    if not _is_empty(index):
        _equal_ranks(index=index, self=self)
        if self.dim() == index.dim():
            _fits(index.shape, self.shape, d, "self")
    return fresh(index.shape, self.dtype)


def _is_empty(t: Tensor) -> bool:
    return any(type(s) is int and s == 0 for s in t.shape)


def kept(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An updated copy of self that keeps a dense layout."""
    return make(self.shape, copy_strides(self, None), self.dtype)


rule(aten.zero.default)(kept)


@rule(aten.put.default)
def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    if index.dtype is not torch.int64 or source.dtype != self.dtype:
        raise RuntimeError(f"put_(): Expected a long tensor for index and a source of {self.dtype}, but got {index.dtype}, {source.dtype}")
    if not are_equal((index.numel(),), (source.numel(),)):
        raise IndexError("put_(): Expected source and index to have the same number of elements")
    if any(n == 0 for n in self.shape) and not any(n == 0 for n in index.shape):
        raise IndexError("put_(): Tried to put elements into an empty tensor")
    return kept(self)


def same_strides(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An updated copy with the very strides of self, gaps included, unless self overlaps itself."""
    overlaps = any(type(s) is int and s == 0 and not is_static_one(n) for n, s in zip(self.shape, self.stride(), strict=True))
    return kept(self) if overlaps else make(self.shape, self.stride(), self.dtype)


def _into_view(view: Any) -> Any:
    """A copy of self with `src` written into a view of it: the view's sizes are those of src."""

    def scatter(self: Tensor, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shape = RULES[view](self, *args, **kwargs).shape
        if len(shape) != src.dim() or any(not same(a, b) and a != b for a, b in zip(shape, src.shape, strict=True)):
            raise RuntimeError(f"expected src to have a size equal to the slice of self. src size = {src.shape}, slice size = {shape}")
        return same_strides(self)

    return scatter


rule(aten.slice_scatter.default)(_into_view(aten.slice.Tensor))
rule(aten.select_scatter.default)(_into_view(aten.select.int))
rule(aten.diagonal_scatter.default)(_into_view(aten.diagonal.default))


def row_major(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An updated copy of self in row-major order."""
    return fresh(self.shape, self.dtype)


@rule(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
      aten.scatter_reduce.two)  # fmt: skip
def scatter(self: Tensor, dim: int, index: Tensor, src: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(src, Tensor) and src.dtype != self.dtype:
        raise RuntimeError("scatter(): Expected self.dtype to be equal to src.dtype")
    if not _is_empty(index):
        d, source = axis(dim, self.dim()), src if isinstance(src, Tensor) else index
        _equal_ranks(index=index, self=self, src=source)
        if self.dim() == index.dim() == source.dim():
            _fits(index.shape, self.shape, d, "self")
            _fits(index.shape, source.shape, -1, "src")
    return row_major(self)


@rule(aten.index_copy.default)
def index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if index.dtype is not torch.int64:
        raise RuntimeError(f"index_copy_(): Expected a long tensor for index, but got {index.dtype}")
    return index_add(self, dim, index, source)


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    if index.dtype is not torch.int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")
    if index.dim() > 1:
        raise IndexError("Index has to be a vector/scalar")
    if isinstance(value, Tensor) and value.dim():
        raise RuntimeError(f"Only supports 0-dimensional value tensor, but got tensor with {value.dim()} dimension(s).")
    axis(dim, self.dim())
    check_number(value, self.dtype)
    return kept(self)


@rule(aten.index_add.default, aten.index_reduce.default)
def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """source has self's sizes, and one row for each index."""
    if index.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"index_add_(): Expected dtype int32/int64 for index, but got {index.dtype}")
    if source.dtype != self.dtype:
        raise RuntimeError(f"self and source expected to have the same dtype, but got {self.dtype} and {source.dtype}")
    if index.dim() > 1:
        raise IndexError("Index is supposed to be a vector")
    d = axis(dim, self.dim())
    if self.dim() and source.dim() == self.dim():
        wanted = [index.numel() if i == d else s for i, s in enumerate(self.shape)]
        if any(not same(a, b) and a != b for a, b in zip(wanted, source.shape, strict=True)):
            raise RuntimeError(f"source has sizes {list(source.shape)}; they should be {wanted}, with one row for each index")
    return row_major(self)


@rule(aten.masked_scatter.default)
def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    return fresh(broadcast(self.shape, mask.shape), self.dtype)


def _reach(size: Sequence[Size], stride: Sequence[Size], offset: Size) -> Any:
    """The number of elements of the memory up to the last one of a strided view."""
    return offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


@part(aten.as_strided_copy.default)
def as_strided_copy(self: Tensor, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None) -> Tensor:
    return torch.as_strided(self, size, stride, storage_offset).clone(memory_format=torch.contiguous_format)  # type: ignore[arg-type]


@part(aten.as_strided_scatter.default)
def as_strided_scatter_in_memory(self: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Into a part of some memory: offsets count from its start, so all of it is copied."""
    start = self.storage_offset()
    if storage_offset is None or same(start, 0):
        return NotImplemented
    if not are_equal(tuple(size), src.shape):
        raise RuntimeError(f"expected src to have a size equal to the slice of self. src size = {src.shape}, slice size = {size}")
    count = torch.sym_max(_reach(self.shape, self.stride(), start), _reach(size, stride, storage_offset))
    memory = torch.as_strided(self, (count,), (1,), 0).clone()
    memory.as_strided(size, stride, storage_offset).copy_(src)
    return memory.as_strided(self.shape, self.stride(), start)


@rule(aten.as_strided_scatter.default)
def as_strided_scatter(self: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Tensor:
    view = RULES[aten.as_strided.default](self, size, stride, storage_offset)
    if not are_equal(view.shape, src.shape):
        raise RuntimeError(f"expected src to have a size equal to the slice of self. src size = {src.shape}, slice size = {view.shape}")
    return same_strides(self)


@rule(aten.copy.default)
def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    broadcast(self.shape, src.shape)
    return make(self.shape, copy_strides(self, None), self.dtype)


@rule(aten.take.default)
def take(self: Tensor, index: Tensor) -> Tensor:
    if index.dtype is not torch.int64:
        raise RuntimeError(f"take(): Expected a long tensor for index, but got {index.dtype}")
    return fresh(index.shape, self.dtype)


@rule(aten.tril.default, aten.triu.default)
def tril(self: Tensor, diagonal: int = 0) -> Tensor:
    return fresh(self.shape, self.dtype)


@rule(aten.roll.default)
def roll(self: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    """Eager joins two slices."""
    count, places = (len(v) if isinstance(v, (tuple, list)) else 1 for v in (shifts, dims))
    if not count or (count != places and not (count == 1 and not places)):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {shifts}, dims: {dims}")
    if places and not self.dim():
        raise IndexError("Dimension specified as 0 but tensor has no dimensions")
    for d in dims if isinstance(dims, (tuple, list)) else (dims,):
        axis(d, self.dim())
    return make(self.shape, format_strides(tuple(self.shape), suggest_format(self) if dims else None), self.dtype)


@rule(aten.flip.default)
def flip(self: Tensor, dims: Sequence[int]) -> Tensor:
    axes(dims, self.dim())
    return make(self.shape, copy_strides(self, None), self.dtype)


@rule(aten.repeat.default)
def repeat(self: Tensor, repeats: Sequence[Size]) -> Tensor:
    lead = len(repeats) - self.dim()
    if lead < 0:
        raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    return fresh([r if i < lead else self.shape[i - lead] * r for i, r in enumerate(repeats)], self.dtype)


@rule(aten.constant_pad_nd.default)
def constant_pad(self: Tensor, pad: Sequence[Size], value: Any = 0) -> Tensor:
    shape = list(self.shape)
    if len(pad) % 2 or len(pad) > 2 * self.dim():
        raise RuntimeError(f"Length of pad must be even and no more than twice {self.dim()} dimensions, but is {len(pad)}")
    check_number(value, self.dtype)
    for i in range(len(pad) // 2):
        d = self.dim() - 1 - i
        left = shape[d]
        for p in (pad[2 * i], pad[2 * i + 1]):  # what is cut away has to be there, before anything is added
            left = left + torch.sym_min(p, 0)
            if not require(left >= 0):
                raise RuntimeError(f"The input size {self.shape[d]}, plus negative padding {pad[2 * i]} and {pad[2 * i + 1]} is negative")
        shape[d] = shape[d] + pad[2 * i] + pad[2 * i + 1]
    format = suggest_format(self)
    is_usual = is_shape(tuple(self.stride()), format_strides(tuple(self.shape), format))
    if not is_usual and all(p <= 0 for p in pad):  # a clone of what is left, in the order of the input
        return make(shape, copy_strides(strided(self, shape, self.stride()), None), self.dtype)
    return make(shape, format_strides(shape, format), self.dtype)


INDEX_DTYPES = (torch.int64, torch.int32, torch.bool, torch.uint8)


def _is_mask(t: Tensor) -> bool:
    return t.dtype in (torch.bool, torch.uint8)


def _check_indices(self: Tensor, indices: Sequence[Tensor | None]) -> None:
    """What eager asks of x[indices]: dtypes of indices, their number, the sizes of masks."""
    d = 0
    for number, t in enumerate(indices):
        if t is None:
            d += 1
            continue
        if t.dtype not in INDEX_DTYPES:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        taken = t.dim() if _is_mask(t) else 1
        if d + taken > self.dim():
            raise IndexError(f"too many indices for tensor of dimension {self.dim()}")
        if _is_mask(t) and not are_equal(t.shape, self.shape[d : d + taken]):
            raise IndexError(f"The shape of the mask {list(t.shape)} at index {number} does not match {list(self.shape)} from {d} on")
        d += taken


@part(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_by_masks_too(self: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Masks beside other indices are the positions of what they choose: their counts are known before they have to agree."""
    given = [t for t in indices if t is not None]
    if len(given) < 2 or not any(map(_is_mask, given)):
        return NotImplemented
    _check_indices(self, indices)
    positions: list[Tensor | None] = []
    for t in indices:
        positions += aten.nonzero(t).unbind(1) if t is not None and _is_mask(t) else [t]
    return aten.index(self, positions)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Advanced indexing: indexed dimensions go to the front unless adjacent; sizes and strides as eager's kernel restrides them."""
    _check_indices(self, indices)
    shape, before, after, common, given = _indexed(self, indices)
    return make(shape, _index_strides(self, before, after, common, given, shape), self.dtype)


def _indexed(self: Tensor, indices: Sequence[Tensor | None]) -> tuple[Any, list[int], list[int], Any, list[Tensor]]:
    """(shape of x[indices], dimensions before and after the indexed ones, shape of the indices together, the indices)."""
    expanded: list[Tensor | None] = []
    for t in indices:
        if t is not None and _is_mask(t):
            where = aten_nonzero(t)
            expanded.extend(fresh((where.shape[0],), torch.int64) for _ in range(t.dim()))
        else:
            expanded.append(t)
    expanded += [None] * (self.dim() - len(expanded))
    at = [i for i, t in enumerate(expanded) if t is not None]
    given = [t for t in expanded if t is not None]
    try:
        common = broadcast(*(t.shape for t in given))
    except RuntimeError as e:
        raise IndexError(f"shape mismatch: indices of shapes {[list(t.shape) for t in given]} do not broadcast together") from e
    if at and at[-1] - at[0] + 1 == len(at):
        before, after = list(range(at[0])), list(range(at[-1] + 1, self.dim()))
    else:
        before, after = [], [d for d in range(self.dim()) if d not in at]
    return (*(self.shape[d] for d in before), *common, *(self.shape[d] for d in after)), before, after, common, given


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Values broadcast to x[indices]; how many elements a mask chooses only running tells, so of those only the rest is asked."""
    _check_indices(self, indices)
    if values.dtype != self.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {self.dtype} for the destination and {values.dtype} for the "
            "source."
        )
    masks = [t for t in indices if t is not None and _is_mask(t)]
    if not masks:
        shape: Sequence[Size] = _indexed(self, indices)[0]
        lead = 0
    elif len(masks) == 1 and indices[0] is masks[0] and all(t is None for t in indices[1:]):
        shape = self.shape[masks[0].dim() :]
        lead = max(values.dim() - len(shape), 0)
    else:
        return kept(self)
    if not broadcasts_to(values.shape[lead:], shape):
        raise RuntimeError(f"shape mismatch: values of shape {list(values.shape)} do not broadcast to the indexed shape {list(shape)}")
    return kept(self)


def _clamped(self: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    if any(t is not None and t.dtype not in (torch.int64, torch.int32) for t in indices):
        raise RuntimeError("tensors used as indices must be long or int tensors")
    return [t if t is None else aten.clamp.default(t, -n, n - 1) for t, n in zip(indices, self.shape, strict=False)]


@part(aten._unsafe_masked_index.default)
def masked_index(self: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: Any) -> Any:
    """x[indices] where the mask is true; elsewhere the indices may be anything."""
    if any(map(is_zero, self.shape)):
        return NotImplemented
    return aten.masked_fill.Scalar(aten._unsafe_index.Tensor(self, _clamped(self, indices)), aten.logical_not.default(mask), fill)


@part(aten._unsafe_masked_index_put_accumulate.default)
def masked_index_put(self: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Any:
    if any(map(is_zero, self.shape)):
        return NotImplemented
    added = aten.masked_fill.Scalar(values, aten.logical_not.default(mask), 0)
    return aten._unsafe_index_put.default(self, _clamped(self, indices), added, True)


def _index_strides(self: Tensor, before: list[int], after: list[int], common: Any, indices: list[Tensor], shape: Any) -> Any:
    """The element-wise kernel behind indexing sees self restrided over the result and the indices reshaped into it."""
    if len(shape) <= 1:
        return contiguous_strides(shape)
    lead, tail = len(before), len(after)
    rows = [(shape, [self.stride(d) for d in before] + [0] * len(common) + [self.stride(d) for d in after])]
    for t in indices:
        own = [0] * (len(common) - t.dim()) + [0 if is_static_one(s) else st for s, st in zip(t.shape, t.stride(), strict=True)]
        rows.append((shape, [0] * lead + own + [0] * tail))
    return strides_by_rows(tuple(shape), rows)


@rule(aten.bucketize.Tensor)
def bucketize(self: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")
    return fresh(self.shape, torch.int32 if out_int32 else torch.int64)


@rule(aten.searchsorted.Tensor)
def searchsorted(
    sorted_sequence: Tensor, self: Tensor, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Tensor:
    if side not in (None, "left", "right") or (side == "left" and right):
        raise RuntimeError(f"torch.searchsorted(): side can only be 'left' or 'right' but got {side}")
    lead = sorted_sequence.shape[:-1]
    if sorted_sequence.dim() != 1 and (not self.dim() or not are_equal(lead, self.shape[:-1])):
        raise RuntimeError("torch.searchsorted(): boundaries should have 1 dimension or the first dimensions of the values")
    if sorter is not None and (sorter.dtype is not torch.int64 or not are_equal(sorter.shape, sorted_sequence.shape)):
        raise RuntimeError("torch.searchsorted(): boundary and sorter must have the same size, and sorter be of type Long")
    return fresh(self.shape, torch.int32 if out_int32 else torch.int64)


@rule(aten.diag_embed.default)
def diag_embed(self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    n = self.dim() + 1
    a, b = axis(dim1, n), axis(dim2, n)
    width = self.shape[-1] + abs(offset)
    rest = list(self.shape[:-1])
    return fresh([width if d in (a, b) else rest.pop(0) for d in range(n)], self.dtype)


@rule(aten.multinomial.default)
def multinomial(self: Tensor, num_samples: Size, replacement: bool = False, *, generator: Any = None) -> Tensor:
    return fresh((*self.shape[:-1], num_samples), torch.int64)


@rule(aten.block_diag.default)
def block_diag(tensors: Sequence[Tensor]) -> Tensor:
    shapes = [(1,) * (2 - t.dim()) + tuple(t.shape) for t in tensors]
    return fresh([sum(s[d] for s in shapes) for d in range(2)], result_dtype(*tensors))


@rule(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    return fresh(elements.shape if isinstance(elements, Tensor) else (), torch.bool)


@part(aten.narrow_copy.default)
def narrow_copy(self: Tensor, dim: int, start: Any, length: Any) -> Tensor:
    begin = from_front(start, self.shape[axis(dim, self.dim())])
    return aten.slice(self, dim, begin, begin + length).clone(memory_format=torch.contiguous_format)


@rule(aten.rot90.default)
def rot90(self: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    if len(dims) != 2 or self.dim() < 2:
        raise RuntimeError(f"expected total rotation dims == 2 and total dims >= 2, but got {len(dims)} and {self.dim()}")
    a, b = (axis(d, self.dim()) for d in dims)
    if a == b:
        raise RuntimeError(f"expected rotation dims to be different, but got {list(dims)}")
    turned = transpose(self, a, b) if k % 2 else self
    return make(turned.shape, copy_strides(turned, None), self.dtype)


# ---------------------------------------------------------------- sizes that depend on the data


def unbacked(hi: Size | None = None) -> torch.SymInt:
    facts = current().facts
    return facts.fresh(None, ("bound",), 0, hi if type(hi) is int else None)


@rule(aten.nonzero.default)
def aten_nonzero(self: Tensor) -> Tensor:
    """A mask that is used twice has one count, so that what it selects can be told to be of one size."""
    counted = current().counted
    if id(self) not in counted:
        counted[id(self)] = (self, unbacked(self.numel()))
    n = counted[id(self)][1]
    return make((n, self.dim()), (1, n), torch.int64)  # the kernel fills one row per dimension


@rule(aten.bincount.default)
def bincount(self: Tensor, weights: Tensor | None = None, minlength: Size = 0) -> Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return fresh((current().facts.fresh(None, ("bound",), minlength if type(minlength) is int else 0, None),), dtype)


@rule(aten.masked_select.default)
def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    shape = broadcast(self.shape, mask.shape)
    return fresh((unbacked(math.prod(shape)),), self.dtype)


@rule(aten._unique2.default)
def unique2(self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    n = unbacked(self.numel())
    empty = fresh((0,), torch.int64)
    inverse = fresh(self.shape, torch.int64) if return_inverse else empty
    return fresh((n,), self.dtype), inverse, fresh((n,), torch.int64) if return_counts else fresh((0,), torch.int64)


@rule(aten._unique.default)
def unique(self: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, Tensor]:
    return unique2(self, sorted, return_inverse)[:2]


@rule(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, zero_infinity: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The second result has a place for every label of the longest target and for the blanks around them: the data tell how many."""
    steps, batch = log_probs.shape[:2]
    places = unbacked() if isinstance(target_lengths, Tensor) else 2 * max(target_lengths, default=0) + 1
    return fresh((batch,), log_probs.dtype), fresh((batch, steps, places), log_probs.dtype)


@rule(aten.unique_consecutive.default)
def unique_consecutive(self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> Any:
    if dim is not None:
        return unique_dim(self, dim, True, return_inverse, return_counts)
    return unique2(self, True, return_inverse, return_counts)


@rule(aten.unique_dim.default, aten.unique_dim_consecutive.default)
def unique_dim(
    self: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel computes the inverse and, where asked, the counts; unique rows are moved back from the front."""
    d = axis(dim, self.dim())
    if type(self.shape[d]) is int and self.shape[d] == 0:
        raise Unsupported("GRA009", at=current().facts.loc, detail="unique rows of an empty tensor")
    n = unbacked(self.shape[d])
    rows = (n, *(s for i, s in enumerate(self.shape) if i != d))
    steps = list(contiguous_strides(rows))
    front = steps.pop(0)
    steps.insert(d, front)
    shape = [n if i == d else s for i, s in enumerate(self.shape)]
    return make(shape, steps, self.dtype), fresh((self.shape[d],), torch.int64), fresh((n,), torch.int64)


@rule(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: Tensor, *, output_size: Size | None = None) -> Tensor:
    return fresh((unbacked() if output_size is None else output_size,), torch.int64)


@rule(aten._local_scalar_dense.default)
def item(self: Tensor) -> Any:
    known = current().known_value(self, "item")
    if known is not NotImplemented:
        return known
    facts, numbers = current().facts, current().numbers
    if self.dtype == torch.bool and not facts.guesses:
        raise Unsupported("GRA003", at=facts.loc, detail="bool()")
    if self.dtype != torch.bool:
        if not facts.reads_data or self.dtype.is_complex:
            raise Unsupported("GRA003", at=facts.loc, detail="item()")
        if id(self) not in numbers:
            numbers[id(self)] = (self, facts.fresh_value(self.dtype))
        return numbers[id(self)][1]
    # A torch function asks whether something is wrong. The graph says no and checks that; if it fails, the call is repeated eagerly.
    trace = current()
    facts.guessed += 1
    fine = trace.operator(aten.logical_not.default, (self,), {})
    trace.operator(aten._assert_async.msg, (fine, "a condition was expected to be false"), {})
    return False


@rule(aten._assert_scalar.default)
def assert_scalar(self: Any, assert_msg: str) -> None:
    """The node is the check; what it says is known from here on."""
    facts = current().facts
    told, facts.when_assumed = facts.when_assumed, None
    try:
        facts.assume(expr_of(self))
    finally:
        facts.when_assumed = told


@rule(aten.sym_constrain_range.default)
def sym_constrain_range(size: Any, *, min: int | None = None, max: int | None = None) -> None:
    if min is not None:
        require(size >= min)
    if max is not None:
        require(size <= max)


@rule(aten.sym_constrain_range_for_size.default)
def sym_constrain_range_for_size(size: Any, *, min: int | None = None, max: int | None = None) -> None:
    sym_constrain_range(size, min=0 if min is None else min, max=max)


@rule(aten._assert_async.default, aten._assert_async.msg)
def assert_async(self: Tensor, assert_msg: str = "") -> None:
    return None
