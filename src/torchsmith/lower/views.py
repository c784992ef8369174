"""View operators: index maps on Refs, never stages. In: a Ref and sizes, dimensions, strides; out: a Ref that reads the same memory.

Strides and offset are carried along where the view is affine, so that an extern can be handed the memory itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.expr import Const, Expr, const, op
from ..ir.program import point_number
from .core import Builder
from .numerics import convert, ir_dtype
from .ref import ONE, ZERO, Index, Ref, Strided, constant, contiguous_strides, is_one, known, product, same_strides, size
from .table import lowers


def wrap_dim(d: int, rank: int) -> int:
    """A dimension number counted from the front; a 0-d tensor has dimension 0 and -1."""
    rank = max(rank, 1)
    return d + rank if d < 0 else d


def wrap_dims(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """Sorted dimension numbers; None or an empty list: all of them."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return tuple(range(rank))
    listed = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({wrap_dim(int(d), rank) for d in listed if rank}))


def _steps(ref: Ref, make: Callable[[Strided], Strided | None]) -> Strided | None:
    return None if ref.strided is None else make(ref.strided)


# ---------------------------------------------------------------- maps
def permute(ref: Ref, dims: Sequence[int]) -> Ref:
    """out[i0, i1, ...] = ref[..] where axis k of out is axis dims[k] of ref."""
    inverse = {d: k for k, d in enumerate(dims)}
    return ref.remap(
        [ref.shape[d] for d in dims],
        lambda i: [i[inverse[k]] for k in range(len(dims))],
        _steps(ref, lambda s: Strided(s.root, tuple(s.strides[d] for d in dims), s.offset)),
    )


def expand(ref: Ref, shape: Sequence[Expr]) -> Ref:
    """Broadcast to `shape`: new and size-1 dimensions repeat with stride 0."""
    if tuple(shape) == ref.shape:
        return ref
    extra = len(shape) - ref.rank

    def strides(s: Strided) -> Strided:
        kept = tuple(ZERO if is_one(n) and not is_one(m) else x for n, m, x in zip(ref.shape, shape[extra:], s.strides, strict=True))
        return Strided(s.root, (ZERO,) * extra + kept, s.offset)

    repeated = [is_one(n) and not is_one(m) for n, m in zip(ref.shape, shape[extra:], strict=True)]
    return ref.remap(shape, lambda i: [ZERO if r else x for r, x in zip(repeated, i[extra:], strict=True)], _steps(ref, strides))


def slice_dim(ref: Ref, dim: int, start: Expr, length: Expr, step: int = 1) -> Ref:
    """out[.., i, ..] = ref[.., start + i * step, ..]."""
    shape = (*ref.shape[:dim], length, *ref.shape[dim + 1 :])

    def strides(s: Strided) -> Strided:
        x = s.strides[dim]
        return Strided(s.root, (*s.strides[:dim], x * step, *s.strides[dim + 1 :]), s.offset + start * x)

    return ref.remap(shape, lambda i: (*i[:dim], start + i[dim] * step, *i[dim + 1 :]), _steps(ref, strides))


def select_dim(ref: Ref, dim: int, at: Expr) -> Ref:
    """out[.., ..] = ref[.., at, ..]."""
    return ref.remap(
        (*ref.shape[:dim], *ref.shape[dim + 1 :]),
        lambda i: (*i[:dim], at, *i[dim:]),
        _steps(ref, lambda s: Strided(s.root, (*s.strides[:dim], *s.strides[dim + 1 :]), s.offset + at * s.strides[dim])),
    )


def unsqueeze(ref: Ref, dim: int) -> Ref:
    """A new dimension of size 1; its stride is what eager gives (size * stride of the next one)."""

    def strides(s: Strided) -> Strided:
        new = s.strides[dim] * ref.shape[dim] if dim < ref.rank else ONE
        return Strided(s.root, (*s.strides[:dim], new, *s.strides[dim:]), s.offset)

    return ref.remap((*ref.shape[:dim], ONE, *ref.shape[dim:]), lambda i: (*i[:dim], *i[dim + 1 :]), _steps(ref, strides))


def squeeze(ref: Ref, dims: Sequence[int]) -> Ref:
    """Drop the named dimensions that have size 1."""
    gone = {d for d in dims if ref.rank and is_one(ref.shape[d])}
    if not gone:
        return ref
    kept = [d for d in range(ref.rank) if d not in gone]

    def index(i: Index) -> list[Expr]:
        given = iter(i)
        return [ZERO if d in gone else next(given) for d in range(ref.rank)]

    return ref.remap(
        [ref.shape[d] for d in kept], index, _steps(ref, lambda s: Strided(s.root, tuple(s.strides[d] for d in kept), s.offset))
    )


def diagonal(ref: Ref, offset: int, dim1: int, dim2: int, length: Expr) -> Ref:
    """The diagonal of two dimensions, moved to the end."""
    rest = [d for d in range(ref.rank) if d not in (dim1, dim2)]
    low, high = max(-offset, 0), max(offset, 0)

    def index(i: Index) -> list[Expr]:
        given: dict[int, Expr] = dict(zip(rest, i, strict=False))
        given[dim1], given[dim2] = i[-1] + low, i[-1] + high
        return [given[d] for d in range(ref.rank)]

    def strides(s: Strided) -> Strided:
        a, b = s.strides[dim1], s.strides[dim2]
        return Strided(s.root, (*(s.strides[d] for d in rest), a + b), s.offset + a * low + b * high)

    return ref.remap((*(ref.shape[d] for d in rest), length), index, _steps(ref, strides))


def unfold(ref: Ref, dim: int, length: Expr, step: int, windows: Expr) -> Ref:
    """Windows of `length` every `step` along `dim`; the place in the window is a new last dimension."""

    def strides(s: Strided) -> Strided:
        x = s.strides[dim]
        return Strided(s.root, (*s.strides[:dim], x * step, *s.strides[dim + 1 :], x), s.offset)

    shape = (*ref.shape[:dim], windows, *ref.shape[dim + 1 :], length)
    return ref.remap(shape, lambda i: (*i[:dim], i[dim] * step + i[-1], *i[dim + 1 : -1]), _steps(ref, strides))


# ---------------------------------------------------------------- reshape
def _groups(old: Sequence[Expr], new: Sequence[Expr]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions with equal products: (2, 3, 4) to (6, 2, 2) is ([0, 1], [0]), ([2], [1, 2])."""
    groups: list[tuple[list[int], list[int]]] = []
    a = [d for d, n in enumerate(old) if not is_one(n)]
    b = [d for d, n in enumerate(new) if not is_one(n)]
    i = j = 0
    while i < len(a) or j < len(b):
        left, right = a[i : i + 1], b[j : j + 1]
        i, j = i + 1, j + 1
        while product([old[d] for d in left]) is not product([new[d] for d in right]):
            x, y = known(product([old[d] for d in left])), known(product([new[d] for d in right]))
            grow_left = i < len(a) and (j >= len(b) or (x is not None and (y is None or x < y)))
            if grow_left:
                left.append(a[i])
                i += 1
            elif j < len(b):
                right.append(b[j])
                j += 1
            elif i < len(a):
                left.append(a[i])
                i += 1
            else:
                break  # products that only symbols can prove equal
        groups.append((left, right))
    return groups


def _split(number: Expr, shape: Sequence[Expr]) -> list[Expr]:
    """The index of a row-major number."""
    index: list[Expr] = []
    for k in range(len(shape)):
        below = product(shape[k + 1 :])
        part = number if is_one(below) else number // below
        index.append(part if k == 0 else part % shape[k])
    return index


def reshape(ref: Ref, shape: Sequence[Expr], strided: Strided | None = None) -> Ref:
    """The same elements in row-major order under another shape."""
    shape = tuple(shape)
    if shape == ref.shape:
        return ref
    groups = _groups(ref.shape, shape)

    def index(i: Index) -> list[Expr]:
        given: dict[int, Expr] = {}
        for left, right in groups:
            number = point_number((i[d], shape[d]) for d in right)
            given.update(zip(left, _split(number, [ref.shape[d] for d in left]), strict=True))
        return [given.get(d, ZERO) for d in range(ref.rank)]

    return ref.remap(shape, index, strided)


def view_strides(ref: Ref, shape: Sequence[Expr]) -> Strided | None:
    """Strides under which the reshaped value is the same memory, where there are any."""
    s = ref.strided
    if s is None:
        return None
    strides: list[Expr | None] = [None] * len(shape)
    for left, right in _groups(ref.shape, shape):
        if not left or not right:
            return None
        # one run of memory: each dimension steps over all of the next one
        for d, e in itertools.pairwise(left):
            if s.strides[d] is not s.strides[e] * ref.shape[e]:
                return None
        if product([ref.shape[d] for d in left]) is not product([shape[d] for d in right]):
            return None
        step = s.strides[left[-1]]
        for d in reversed(right):
            strides[d] = step
            step = step * shape[d]
    running: Expr = ONE
    for d in reversed(range(len(shape))):
        mine = strides[d]
        if mine is None:
            strides[d] = mine = running
        running = mine * shape[d]
    return Strided(s.root, tuple(x for x in strides if x is not None), s.offset)


def view(cx: Builder, ref: Ref) -> Ref:
    """A reshape to the node's shape; its memory is the same where strides allow it."""
    return reshape(ref, cx.shape, view_strides(ref, cx.shape))


# ---------------------------------------------------------------- rows
@lowers(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten._reshape_alias.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.view_as.default",
    "aten.reshape_as.default",
    "aten.ravel.default",
    "aten.view_copy.default",
    "aten._reshape_copy.default",
)
def lower_view(cx: Builder, x: Ref, *_: Any) -> Ref:
    return view(cx, x)


@lowers(
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.alias_copy.default",
    "aten.detach_copy.default",
    "aten.positive.default",
    "aten.conj.default",
    "aten._conj.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
    "aten.real.default",
    "aten.conj_physical.default",
    "aten.data.default",
)
def lower_alias(cx: Builder, x: Ref, *_: Any) -> Ref:
    return x


@lowers("aten.permute.default", "aten.permute_copy.default")
def lower_permute(cx: Builder, x: Ref, dims: Sequence[int]) -> Ref:
    return permute(x, [wrap_dim(d, x.rank) for d in dims])


@lowers("aten.transpose.int", "aten.transpose_copy.int", "aten.swapaxes.default", "aten.swapdims.default")
def lower_transpose(cx: Builder, x: Ref, a: int, b: int) -> Ref:
    if x.rank == 0:
        return x
    dims = list(range(x.rank))
    a, b = wrap_dim(a, x.rank), wrap_dim(b, x.rank)
    dims[a], dims[b] = dims[b], dims[a]
    return permute(x, dims)


@lowers("aten.t.default", "aten.t_copy.default", "aten.numpy_T.default", "aten.matrix_H.default")
def lower_t(cx: Builder, x: Ref) -> Ref:
    return permute(x, list(reversed(range(x.rank))))


@lowers("aten.mT.default", "aten.mH.default", "aten.adjoint.default")
def lower_mt(cx: Builder, x: Ref) -> Ref:
    return lower_transpose(cx, x, -1, -2)


@lowers("aten.movedim.intlist", "aten.moveaxis.intlist", "aten.movedim.int", "aten.moveaxis.int")
def lower_movedim(cx: Builder, x: Ref, source: Any, target: Any) -> Ref:
    sources = [wrap_dim(d, x.rank) for d in (source if isinstance(source, (tuple, list)) else (source,))]
    targets = [wrap_dim(d, x.rank) for d in (target if isinstance(target, (tuple, list)) else (target,))]
    rest = iter(d for d in range(x.rank) if d not in sources)
    placed = dict(zip(targets, sources, strict=True))
    return permute(x, [placed[d] if d in placed else next(rest) for d in range(x.rank)]) if x.rank else x


@lowers("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default", "aten.expand_copy.default")
def lower_expand(cx: Builder, x: Ref, *_: Any) -> Ref:
    return expand(x, cx.shape)


def start_of(n: Expr, start: Any) -> Expr:
    """A slice's start, counted from the front and clamped at 0; past the end does not matter, since nothing is read then."""
    if start is None:
        return ZERO
    s = known(start)
    if s is None:
        first = op("where", op("lt", start, ZERO), start + n, start)
        return op("min", op("max", first, ZERO), n)
    if s >= 0:
        return size(min(s, int(n.value)) if isinstance(n, Const) else s)
    return size(max(s + int(n.value), 0)) if isinstance(n, Const) else op("max", n + s, ZERO)


@lowers("aten.slice.Tensor", "aten.slice_copy.Tensor")
def lower_slice(cx: Builder, x: Ref, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Ref:
    dim = wrap_dim(dim, x.rank)
    by = known(step)
    return slice_dim(x, dim, start_of(x.shape[dim], start), cx.shape[dim], by if by is not None else step)


@lowers("aten.narrow.default", "aten.narrow_copy.default")
def lower_narrow(cx: Builder, x: Ref, dim: int, start: Any, length: Any) -> Ref:
    dim = wrap_dim(dim, x.rank)
    return slice_dim(x, dim, position(x.shape[dim], start), cx.shape[dim])


def position(n: Expr, at: Any) -> Expr:
    """An element number that may count from the end."""
    p = known(at)
    if p is None:
        return op("where", op("lt", at, ZERO), at + n, at)
    return size(p) if p >= 0 else n + p


@lowers("aten.select.int", "aten.select_copy.int")
def lower_select(cx: Builder, x: Ref, dim: int, at: Any) -> Ref:
    dim = wrap_dim(dim, x.rank)
    return select_dim(x, dim, position(x.shape[dim], at))


@lowers("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def lower_unsqueeze(cx: Builder, x: Ref, dim: int) -> Ref:
    return unsqueeze(x, dim + x.rank + 1 if dim < 0 else dim)


@lowers("aten.squeeze.default", "aten.squeeze_copy.default")
def lower_squeeze(cx: Builder, x: Ref) -> Ref:
    return squeeze(x, range(x.rank))


@lowers("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.dim", "aten.squeeze_copy.dims")
def lower_squeeze_dims(cx: Builder, x: Ref, dims: Any) -> Ref:
    listed = (dims,) if isinstance(dims, int) else dims
    return squeeze(x, [wrap_dim(d, x.rank) for d in listed])


@lowers("aten.diagonal.default", "aten.diagonal_copy.default")
def lower_diagonal(cx: Builder, x: Ref, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Ref:
    return diagonal(x, offset, wrap_dim(dim1, x.rank), wrap_dim(dim2, x.rank), cx.shape[-1])


@lowers("aten.unfold.default", "aten.unfold_copy.default")
def lower_unfold(cx: Builder, x: Ref, dim: int, length: Any, step: Any) -> Any:
    if x.rank == 0:
        return unsqueeze(x, 0) if is_one(cx.shape[0]) else NotImplemented
    dim = wrap_dim(dim, x.rank)
    return unfold(x, dim, size(length), step, cx.shape[dim])


def _pieces(cx: Builder, x: Ref, dim: int) -> tuple[Ref, ...]:
    """Consecutive slices along `dim`, of the lengths that the specs give."""
    dim = wrap_dim(dim, x.rank)
    start: Expr = ZERO
    parts = []
    for spec in cx.spec:
        parts.append(slice_dim(x, dim, start, spec.shape[dim]))
        start = start + spec.shape[dim]
    return tuple(parts)


@lowers(
    "aten.split.Tensor",
    "aten.split.sizes",
    "aten.split_with_sizes.default",
    "aten.chunk.default",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
    "aten.unsafe_chunk.default",
    "aten.tensor_split.sections",
    "aten.tensor_split.indices",
    "aten.split_copy.Tensor",
    "aten.split_with_sizes_copy.default",
)
def lower_split(cx: Builder, x: Ref, _: Any, dim: int = 0) -> tuple[Ref, ...]:
    return _pieces(cx, x, dim)


@lowers("aten.unbind.int", "aten.unbind_copy.int")
def lower_unbind(cx: Builder, x: Ref, dim: int = 0) -> tuple[Ref, ...]:
    return tuple(select_dim(x, wrap_dim(dim, x.rank), size(k)) for k in range(len(cx.spec)))


@lowers("aten.flip.default")
def lower_flip(cx: Builder, x: Ref, dims: Sequence[int]) -> Ref:
    turned = {wrap_dim(d, x.rank) for d in dims}
    return x.remap(x.shape, lambda i: [n - 1 - k if d in turned else k for d, (n, k) in enumerate(zip(x.shape, i, strict=True))])


@lowers("aten.roll.default")
def lower_roll(cx: Builder, x: Ref, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Ref:
    if any(known(n) == 0 for n in x.shape):
        return x
    if not dims:
        total = product(x.shape)
        flat = reshape(x, (total,))
        return reshape(_roll(flat, {0: size(shifts[0])}), x.shape)
    by: dict[int, Expr] = {}
    for s, d in zip(shifts, dims, strict=True):
        d = wrap_dim(d, x.rank)
        by[d] = by.get(d, ZERO) + size(s)
    return _roll(x, by)


def _roll(x: Ref, by: dict[int, Expr]) -> Ref:
    """out[i] = x[(i - shift) mod n]."""
    return x.remap(x.shape, lambda i: [(k - by[d]) % x.shape[d] if d in by else k for d, k in enumerate(i)])


@lowers("aten.repeat.default", "aten.tile.default")
def lower_repeat(cx: Builder, x: Ref, _: Any) -> Ref:
    shape = cx.shape
    extra = len(shape) - x.rank
    if extra < 0:
        return NotImplemented

    def index(i: Index) -> list[Expr]:
        return [k if n is m else ZERO if is_one(n) else k % n for n, m, k in zip(x.shape, shape[extra:], i[extra:], strict=True)]

    return x.remap(shape, index)


@lowers("aten.repeat_interleave.self_int")
def lower_repeat_interleave(cx: Builder, x: Ref, repeats: Any, dim: int | None = None, output_size: Any = None) -> Ref:
    if known(repeats) == 0:
        return x.remap(cx.shape, lambda i: i)
    if dim is None:
        x, dim = reshape(x, (product(x.shape),)), 0
    dim = wrap_dim(dim, x.rank)
    return x.remap(cx.shape, lambda i: (*i[:dim], i[dim] // size(repeats), *i[dim + 1 :]))


def memory_order(shape: Sequence[Expr], strides: Sequence[Expr]) -> list[int] | None:
    """The dimensions from the slowest to the fastest, where they lie without gaps in memory."""
    plain, known_strides = list(range(len(shape))), [known(s) for s in strides]
    orders = [plain]
    if None not in known_strides:
        orders.append(sorted(plain, key=lambda d: -constant(strides[d])))
    for order in orders:
        sizes = [shape[d] for d in order]
        if same_strides(sizes, [strides[d] for d in order], contiguous_strides(sizes)):
            return order
    return None


@lowers("aten.as_strided.default")
def lower_as_strided(cx: Builder, x: Ref, shape: Sequence[Any], strides: Sequence[Any], offset: Any = None) -> Any:
    """Elements of x's memory, counted from its first element. Memory with gaps is no value: of an input it stays eager's."""
    s = x.strided
    order = None if s is None or x.whole is None else memory_order(x.shape, s.strides)
    if s is None or order is None:
        if s is not None and cx.buffers[s.root].role == "input":
            raise Unsupported("LOW003", at=cx.loc, detail="as_strided of an input with gaps in its memory")
        return NotImplemented
    steps, first = [size(k) for k in strides], size(offset) if offset is not None else ZERO
    flat = reshape(permute(x, order), (product(x.shape),))

    def index(i: Index) -> list[Expr]:
        total = first
        for k, step in zip(i, steps, strict=True):
            total = total + k * step
        return [total]

    return flat.remap(cx.shape, index, Strided(s.root, tuple(steps), s.offset + first))


BITS = {1: dt.i8, 2: dt.i16, 4: dt.i32, 8: dt.i64}


@lowers("aten.view.dtype")
def lower_view_dtype(cx: Builder, x: Ref, dtype: Any) -> Any:
    """Elements of another size: the bits of each are cut along the last dimension, or those of neighbours joined (little-endian)."""
    target = ir_dtype(dtype, cx.loc)
    if target is x.dtype:
        return x
    if dt.bool_ in (target, x.dtype) or "opaque" in (target.kind, x.dtype.kind):
        return NotImplemented
    mine, theirs = BITS[x.dtype.itemsize], BITS[target.itemsize]
    ratio = max(mine.itemsize, theirs.itemsize) // min(mine.itemsize, theirs.itemsize)

    def cut(i: Index) -> Expr:
        bits = op("bitcast", x.load((*i[:-1], op("floordiv", i[-1], const(ratio)))), dtype=mine)
        at = convert(op("mod", i[-1], const(ratio)) * (8 * theirs.itemsize), mine)
        return op("bitcast", convert(op("shr", bits, at), theirs), dtype=target)

    def joined(i: Index) -> Expr:
        whole: Expr | None = None
        for k in range(ratio):
            part = convert(op("bitcast", x.load((*i[:-1], i[-1] * ratio + k)), dtype=mine), theirs)
            part = op("bitand", part, Const(theirs, (1 << 8 * mine.itemsize) - 1)) if k < ratio - 1 else part
            part = op("shl", part, Const(theirs, 8 * mine.itemsize * k)) if k else part
            whole = part if whole is None else op("bitor", whole, part)
        assert whole is not None
        return op("bitcast", whole, dtype=target)

    if ratio == 1:
        return Ref(target, x.shape, lambda i: op("bitcast", x.load(i), dtype=target))
    return Ref(target, cx.shape, cut if theirs.itemsize < mine.itemsize else joined)


def same_memory(ref: Ref, strides: Sequence[Expr]) -> bool:
    return ref.strided is not None and same_strides(ref.shape, ref.strided.strides, strides)


@lowers("aten.clone.default", "aten.contiguous.default")
def lower_clone(cx: Builder, x: Ref, memory_format: Any = None) -> Ref:
    """Values do not alias: a clone is its operand where the strides agree, else one copying stage."""
    if same_memory(x, cx.out.strides):
        return x
    return cx.stage(x.load)


@lowers("aten.rot90.default")
def lower_rot90(cx: Builder, x: Ref, turns: int = 1, dims: Sequence[int] = (0, 1)) -> Ref:
    a, b = (wrap_dim(d, x.rank) for d in dims)
    turns %= 4
    if turns == 0:
        return x
    if turns == 2:
        return lower_flip(cx, x, (a, b))
    order = list(range(x.rank))
    order[a], order[b] = b, a
    return permute(lower_flip(cx, x, (b,)), order) if turns == 1 else lower_flip(cx, permute(x, order), (b,))


@lowers("aten.pixel_shuffle.default")
def lower_pixel_shuffle(cx: Builder, x: Ref, factor: int) -> Ref:
    """(.., c r r, h, w) -> (.., c, h r, w r)."""
    lead, (_, h, w), r = x.shape[:-3], x.shape[-3:], size(factor)
    split = reshape(x, (*lead, cx.shape[-3], r, r, h, w))
    k = len(lead)
    return reshape(permute(split, [*range(k), k, k + 3, k + 1, k + 4, k + 2]), cx.shape)


@lowers("aten.pixel_unshuffle.default")
def lower_pixel_unshuffle(cx: Builder, x: Ref, factor: int) -> Ref:
    lead, channels, r = x.shape[:-3], x.shape[-3], size(factor)
    h, w = cx.shape[-2:]
    split = reshape(x, (*lead, channels, h, r, w, r))
    k = len(lead)
    return reshape(permute(split, [*range(k), k, k + 2, k + 4, k + 1, k + 3]), cx.shape)


@lowers("aten.channel_shuffle.default")
def lower_channel_shuffle(cx: Builder, x: Ref, groups: int) -> Ref:
    """Channel g * (c / groups) + k goes to k * groups + g."""
    per = x.shape[1] // groups
    return x.remap(x.shape, lambda i: (i[0], (i[1] % groups) * per + i[1] // groups, *i[2:]))
