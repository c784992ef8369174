"""Reading and writing by index tensors: advanced indexing, index_put, scatter, index_add, take, put and their relatives.

In: Refs; out: checks that all indices are in range, then a gathering stage, or a copy and a stage of scattered stores. A scattered store
is not unique: iterations run in index order, so that of several values for one element the last one stays, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Const, Expr, convert, op, select
from ..ir.program import Stage, Store
from .cat import conjunction, masked
from .core import Builder
from .gather import check_range, position_of, wrapped
from .numerics import cast, highest, lowest, opmath, rounded_to, scalar
from .pointwise import check_fits
from .ref import ONE, ZERO, Index, Ref, constant, is_one, known, product, size
from .table import lowers
from .views import reshape, wrap_dim

OUT_OF_RANGE = "index out of range in self"


def copied(cx: Builder, x: Ref, d: DType | None = None, strides: Sequence[Expr] | None = None) -> str:
    """A new buffer that starts as `x`."""
    d = d or x.dtype
    name = cx.buffer(d, x.shape, strides)
    cx.fill(name, lambda i: cast(x.load(i), d))
    return name


def accumulator(cx: Builder, x: Ref, wide: bool) -> tuple[str, Callable[[], Ref]]:
    """A buffer that starts as `x` and takes more values, and what gives the result: `wide`, a sum of halves is rounded at the end alone."""
    if not wide or opmath(x.dtype) is x.dtype:
        name = copied(cx, x, strides=cx.out.strides)
        return name, lambda: cx.ref(name)
    name = copied(cx, x, opmath(x.dtype))
    return name, lambda: cx.stage(lambda i: cast(cx.ref(name).load(i), x.dtype))


def update(
    cx: Builder, name: str, shape: Sequence[Expr], place: Callable[[Index], Index], value: Callable[[Index], Expr], mode: Any = "set"
) -> None:
    """buffer[place(i)] mode= value(i) for every i of `shape`, in order."""
    axes = cx.axes(shape)
    store = Store(name, tuple(place(axes)), value(axes), mode, False)
    cx.body.append(Stage(tuple(zip(axes, shape, strict=True)), (store,), loc=cx.loc, origin=cx.origin))


def broadcast_shape(refs: Sequence[Ref]) -> tuple[Expr, ...]:
    rank = max((r.rank for r in refs), default=0)
    shape: list[Expr] = [ONE] * rank
    for r in refs:
        for d, n in enumerate(r.shape, rank - r.rank):
            if is_one(shape[d]):
                shape[d] = n
    return tuple(shape)


def _outside(dim: int, n: Expr) -> str:
    """The text of a check; a size that varies has no number yet."""
    return f"index is out of bounds for dimension {dim}" + (f" with size {n.value}" if isinstance(n, Const) else "")


# ---------------------------------------------------------------- x[i, :, j]
class Advanced:
    """Where advanced indexing reads: the index tensors broadcast to `middle`, which stands at `start` of the result."""

    def __init__(self, x: Ref, indices: Sequence[Ref | None]) -> None:
        self.x = x
        self.given = {d: r for d, r in enumerate(indices) if r is not None}
        self.middle = broadcast_shape(list(self.given.values()))
        dims = sorted(self.given)
        together = dims == list(range(dims[0], dims[-1] + 1))
        self.start = dims[0] if together else 0
        free = [d for d in range(x.rank) if d not in self.given]
        self.before = [d for d in free if together and d < dims[0]]
        self.after = [d for d in free if d not in self.before]

    @property
    def shape(self) -> tuple[Expr, ...]:
        sizes = self.x.shape
        return (*(sizes[d] for d in self.before), *self.middle, *(sizes[d] for d in self.after))

    def check(self, cx: Builder) -> None:
        for d, r in self.given.items():
            n = self.x.shape[d]
            check_range(cx, r, n, negative=True, message=_outside(d, n))

    def place(self, i: Index) -> Index:
        """Result index -> index into x."""
        b, m = len(self.before), len(self.middle)
        at = i[b : b + m]
        found: list[Expr] = [ZERO] * self.x.rank
        for d, k in zip(self.before, i[:b], strict=True):
            found[d] = k
        for d, k in zip(self.after, i[b + m :], strict=True):
            found[d] = k
        for d, r in self.given.items():
            found[d] = wrapped(convert(r.at(at), dt.index), self.x.shape[d])
        return tuple(found)


def is_position(r: Ref) -> bool:
    return r.dtype in (dt.i64, dt.i32)


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor")
def lower_index(cx: Builder, x: Ref, indices: Sequence[Ref | None]) -> Any:
    if not all(r is None or is_position(r) for r in indices) or all(r is None for r in indices):
        return NotImplemented  # masks give sizes that depend on data
    how = Advanced(x, indices)
    how.check(cx)
    return cx.stage(lambda i: x.load(how.place(i)))


def _masked_put(cx: Builder, x: Ref, mask: Ref, values: Ref) -> Any:
    """x[mask] = one value for all, or one that does not vary along the masked dimensions."""
    tail = x.rank - mask.rank
    if values.rank > tail and not all(is_one(n) for n in values.shape[: values.rank - tail]):
        return NotImplemented
    if mask.dtype is not dt.bool_:
        return NotImplemented
    value = values.remap(values.shape[-tail:], lambda i: (*(ZERO,) * (values.rank - tail), *i)) if values.rank > tail and tail else values

    def at(i: Index) -> Expr:
        new = value.at(i[mask.rank :]) if tail else values.load((ZERO,) * values.rank)
        return select(mask.load(i[: mask.rank]), new, x.load(i))

    return cx.stage(at)


@lowers("aten.index_put.default", "aten._unsafe_index_put.default")
def lower_index_put(cx: Builder, x: Ref, indices: Sequence[Ref | None], values: Ref, accumulate: bool = False) -> Any:
    given = [r for r in indices if r is not None]
    if len(given) == 1 and indices[0] is not None and not is_position(given[0]) and not accumulate:
        return _masked_put(cx, x, given[0], values)
    if not given or not all(is_position(r) for r in given):
        return NotImplemented
    how = Advanced(x, indices)
    how.check(cx)
    name, rounded = accumulator(cx, x, accumulate and cx.device != "cpu")  # eager rounds each sum of the processor's
    update(cx, name, how.shape, how.place, lambda i: cast(values.at(i), cx.buffers[name].dtype), "add" if accumulate else "set")
    return rounded()


# ---------------------------------------------------------------- scatter
def _along(x: Ref, dim: int, index: Ref) -> Callable[[Index], Index]:
    return lambda i: (*i[:dim], position_of(index, i), *i[dim + 1 :])


MODES = {"add": "add", "sum": "add", "mean": "add", "multiply": "mul", "prod": "mul", "amax": "max", "amin": "min"}


def neutral(mode: str, d: DType) -> Expr:
    return {"add": scalar(0, d), "mul": scalar(1, d), "max": lowest(d), "min": highest(d)}[mode]


def _scatter(cx: Builder, x: Ref, dim: int, index: Ref, value: Callable[[Index], Expr], mode: str) -> Any:
    if x.rank == 0 or index.rank == 0:
        return NotImplemented
    dim = wrap_dim(dim, x.rank)
    check_range(cx, index, x.shape[dim], negative=False, message=_outside(dim, x.shape[dim]))
    name, rounded = accumulator(cx, x, mode != "set")
    update(cx, name, index.shape, _along(x, dim, index), lambda i: cast(value(i), cx.buffers[name].dtype), mode)
    return rounded()


@lowers("aten.scatter.src")
def lower_scatter(cx: Builder, x: Ref, dim: int, index: Ref, src: Ref) -> Any:
    return _scatter(cx, x, dim, index, src.load, "set")


@lowers("aten.scatter.value")
def lower_scatter_value(cx: Builder, x: Ref, dim: int, index: Ref, value: Any) -> Any:
    return _scatter(cx, x, dim, index, lambda i: scalar(value, x.dtype), "set")


@lowers("aten.scatter.reduce")
def lower_scatter_by(cx: Builder, x: Ref, dim: int, index: Ref, src: Ref, reduce: str) -> Any:
    return _scatter(cx, x, dim, index, src.load, MODES[reduce])


@lowers("aten.scatter.value_reduce")
def lower_scatter_value_by(cx: Builder, x: Ref, dim: int, index: Ref, value: Any, reduce: str) -> Any:
    return _scatter(cx, x, dim, index, lambda i: scalar(value, x.dtype), MODES[reduce])


@lowers("aten.scatter_add.default")
def lower_scatter_add(cx: Builder, x: Ref, dim: int, index: Ref, src: Ref) -> Any:
    return _scatter(cx, x, dim, index, src.load, "add")


def _reduce_into(
    cx: Builder, x: Ref, shape: Sequence[Expr], place: Callable[[Index], Index], value: Callable[[Index], Expr], how: str, include: bool,
    wide: bool = False,
) -> Ref:  # fmt: skip
    """x reduced with the values scattered to it; without `include`, an element that receives any forgets what it was."""
    d, mode = x.dtype, MODES[how]
    name, rounded = accumulator(cx, x, wide)
    inner = cx.buffers[name].dtype
    if not include:
        update(cx, name, shape, place, lambda i: neutral(mode, inner))
    update(cx, name, shape, place, lambda i: cast(value(i), inner), mode)
    total = rounded()
    if how != "mean":
        return total
    counts = cx.buffer(dt.i64, x.shape)
    cx.fill(counts, lambda i: Const(dt.i64, int(include)))
    update(cx, counts, shape, place, lambda i: Const(dt.i64, 1), "add")
    count, compute = cx.ref(counts), opmath(d)

    def mean(i: Index) -> Expr:
        n = op("max", count.load(i), Const(dt.i64, 1))
        a, b = cast(total.load(i), compute), cast(n, compute)
        return cast(op("div" if d.is_float else "floordiv", a, b), d)

    return cx.stage(mean)


@lowers("aten.scatter_reduce.two")
def lower_scatter_reduce(cx: Builder, x: Ref, dim: int, index: Ref, src: Ref, reduce: str, include_self: bool = True) -> Any:
    if x.rank == 0 or index.rank == 0:
        return NotImplemented
    dim = wrap_dim(dim, x.rank)
    check_range(cx, index, x.shape[dim], negative=False, message=_outside(dim, x.shape[dim]))
    return _reduce_into(cx, x, index.shape, _along(x, dim, index), src.load, reduce, include_self, wide=True)


# ---------------------------------------------------------------- index_add and relatives: one index for a whole slice
def _slices(cx: Builder, x: Ref, dim: int, index: Ref, negative: bool = False) -> tuple[int, Callable[[Index], Index], tuple[Expr, ...]]:
    """(dim, source index -> index into x, the source's shape)."""
    dim = wrap_dim(dim, x.rank)
    check_range(cx, index, x.shape[dim], negative=negative, message=OUT_OF_RANGE)

    def place(i: Index) -> Index:
        k = position_of(index, (i[dim],) if index.rank else ())
        return (*i[:dim], wrapped(k, x.shape[dim]) if negative else k, *i[dim + 1 :])

    return dim, place, (*x.shape[:dim], product(index.shape), *x.shape[dim + 1 :])


@lowers("aten.index_add.default")
def lower_index_add(cx: Builder, x: Ref, dim: int, index: Ref, source: Ref, alpha: Any = 1) -> Any:
    if x.rank == 0 or source.rank != x.rank:
        return NotImplemented
    dim, place, shape = _slices(cx, x, dim, index)
    plain, compute = known(alpha) == 1, opmath(x.dtype)

    def value(i: Index) -> Expr:
        e = source.load(i)
        return e if plain else cast(op("mul", cast(e, compute), rounded_to(scalar(alpha, compute), x.dtype)), x.dtype)

    # eager scatters these, and adds the others in x's own dtype
    name, rounded = accumulator(cx, x, plain and x.rank > 1 and index.dtype is dt.i64 and dim in (0, x.rank - 1))
    update(cx, name, shape, place, lambda i: cast(value(i), cx.buffers[name].dtype), "add")
    return rounded()


@lowers("aten.index_copy.default")
def lower_index_copy(cx: Builder, x: Ref, dim: int, index: Ref, source: Ref) -> Any:
    if x.rank == 0 or source.rank != x.rank:
        return NotImplemented
    _, place, shape = _slices(cx, x, dim, index)
    name = copied(cx, x, strides=cx.out.strides)
    update(cx, name, shape, place, source.load)
    return cx.ref(name)


def _fill(cx: Builder, x: Ref, dim: int, index: Ref, value: Expr) -> Any:
    if x.rank == 0:
        return NotImplemented
    _, place, shape = _slices(cx, x, dim, index, negative=True)
    name = copied(cx, x, strides=cx.out.strides)
    update(cx, name, shape, place, lambda i: value)
    return cx.ref(name)


@lowers("aten.index_fill.int_Scalar")
def lower_index_fill(cx: Builder, x: Ref, dim: int, index: Ref, value: Any) -> Any:
    return _fill(cx, x, dim, index, scalar(value, x.dtype))


@lowers("aten.index_fill.int_Tensor")
def lower_index_fill_by(cx: Builder, x: Ref, dim: int, index: Ref, value: Ref) -> Any:
    check_fits(cx, value, x.dtype)
    return _fill(cx, x, dim, index, cast(value.at(()), x.dtype))


@lowers("aten.index_reduce.default")
def lower_index_reduce(cx: Builder, x: Ref, dim: int, index: Ref, source: Ref, reduce: str, include_self: bool = True) -> Any:
    if x.rank == 0 or source.rank != x.rank:
        return NotImplemented
    _, place, shape = _slices(cx, x, dim, index)
    return _reduce_into(cx, x, shape, place, source.load, reduce, include_self)


# ---------------------------------------------------------------- flat indices
def _flat(cx: Builder, x: Ref, index: Ref) -> tuple[Ref, Callable[[Index], Expr]]:
    flat = reshape(x, (product(x.shape),))
    n = flat.shape[0]
    check_range(cx, index, n, negative=True, message="out of range: tried to access index on a tensor of too few elements")
    return flat, lambda i: wrapped(position_of(index, i), n)


@lowers("aten.take.default")
def lower_take(cx: Builder, x: Ref, index: Ref) -> Ref:
    flat, place = _flat(cx, x, index)
    return cx.stage(lambda i: flat.load((place(i),)))


@lowers("aten.put.default")
def lower_put(cx: Builder, x: Ref, index: Ref, source: Ref, accumulate: bool = False) -> Any:
    flat, place = _flat(cx, x, index)
    name = copied(cx, flat)
    values = reshape(source, index.shape)
    update(cx, name, index.shape, lambda i: (place(i),), values.load, "add" if accumulate else "set")
    whole = reshape(cx.ref(name), x.shape)
    return cx.stage(whole.load)


# ---------------------------------------------------------------- windows as columns
def _window_sizes(kernel: Any, dilation: Any, padding: Any, stride: Any) -> list[tuple[int, int, int, int]]:
    def two(v: Any) -> list[int]:
        listed = list(v) if isinstance(v, (tuple, list)) else [v]
        return list(map(constant, listed * 2 if len(listed) == 1 else listed))

    return list(zip(two(kernel), two(dilation), two(padding), two(stride), strict=True))


@lowers("aten.im2col.default")
def lower_im2col(cx: Builder, x: Ref, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    (kh, dh, ph, sh), (kw, dw, pw, sw) = _window_sizes(kernel, dilation, padding, stride)
    h, w = x.shape[-2:]
    columns = (w + (2 * pw - dw * (kw - 1) - 1)) // size(sw) + 1

    def at(i: Index) -> Expr:
        k, window = i[-2], i[-1]
        row = (window // columns) * sh + (k // size(kw)) % size(kh) * dh - ph
        col = (window % columns) * sw + k % size(kw) * dw - pw
        tests = [op("lt", row, h), op("lt", col, w)]
        if ph:
            tests.append(op("ge", row, ZERO))
        if pw:
            tests.append(op("ge", col, ZERO))
        place = (*i[:-2], k // size(kh * kw), row, col)
        return masked(x, place, conjunction(tests), Const(x.dtype, 0)) if ph or pw else x.load(place)

    return cx.stage(at)


@lowers("aten.col2im.default")
def lower_col2im(cx: Builder, x: Ref, output_size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    (kh, dh, ph, sh), (kw, dw, pw, sw) = _window_sizes(kernel, dilation, padding, stride)
    h, w = cx.shape[-2:]
    rows = (h + (2 * ph - dh * (kh - 1) - 1)) // size(sh) + 1
    columns = (w + (2 * pw - dw * (kw - 1) - 1)) // size(sw) + 1
    acc = opmath(x.dtype)

    def at(i: Index) -> Expr:
        def element(k: Index) -> Expr:
            y, z = i[-2] + ph - k[0] * dh, i[-1] + pw - k[1] * dw
            tests = [op("ge", y, ZERO), op("ge", z, ZERO), op("lt", y // size(sh), rows), op("lt", z // size(sw), columns)]
            if sh > 1:
                tests.append(op("eq", y % size(sh), ZERO))
            if sw > 1:
                tests.append(op("eq", z % size(sw), ZERO))
            place = (*i[:-3], (i[-3] * kh + k[0]) * kw + k[1], (y // size(sh)) * columns + z // size(sw))
            return cast(masked(x, place, conjunction(tests), Const(x.dtype, 0)), acc)

        total = cx.fold(
            [size(kh), size(kw)], [Const(acc, 0)], lambda k, s: [op("add", s[0], element(k))], lambda a, b: [op("add", a[0], b[0])]
        )
        return cast(total, x.dtype)

    return cx.stage(at)
