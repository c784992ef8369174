"""Joining and overwriting parts of tensors: cat, stack, the functional *_scatter of views. In: Refs; out: one stage of selections."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..codes import Unsupported
from ..ir import dtype as dt
from ..ir.expr import Const, Expr, Load, op, select, substitute, walk
from ..ir.program import Stage, Store
from .core import Builder
from .extern import lower_extern
from .numerics import cast
from .ref import ONE, ZERO, Index, Ref, constant, contiguous_strides, is_one, is_zero, known, same_strides, size
from .table import lowers
from .views import position, start_of, unsqueeze, wrap_dim

TRUE = Const(dt.bool_, True)
CHOSEN = 8  # parts among which one expression chooses, and that one stage stores


def conjunction(tests: Sequence[Expr]) -> Expr:
    found: Expr = TRUE
    for t in tests:
        found = t if found is TRUE else op("and", found, t)
    return found


def masked(x: Ref, index: Index, mask: Expr, other: Expr) -> Expr:
    """x[index] where mask holds, else `other`; never reads memory where it does not."""
    value = x.load(index)
    if isinstance(mask, Const):
        return value if mask.value else other
    if isinstance(value, Load) and value.mask is None:
        return Load(value.buf, value.dtype, value.index, mask, other)
    # a computed map over loads: each load is masked, then the whole is selected
    zero: dict[Expr, Expr] = {}
    for node in walk(value):
        if isinstance(node, Load):
            both = mask if node.mask is None else op("and", mask, node.mask)
            rest = Const(node.dtype, 0) if node.other is None else node.other
            zero[node] = Load(node.buf, node.dtype, node.index, both, rest)
    return select(mask, substitute(value, zero), other)


def join(cx: Builder, parts: Sequence[Ref], dim: int) -> Ref:
    """out[.., i, ..] = the part whose range holds i, at i minus its start."""
    d = cx.dtype
    starts: list[Expr] = [ZERO]
    for p in parts:
        starts.append(starts[-1] + p.shape[dim])
    if len(parts) > CHOSEN and d.kind != "opaque" and all(known(s) is not None for s in starts):
        return put_parts(cx, parts, dim, starts)

    def at(i: Index) -> Expr:
        def part(k: int, inside: Expr) -> Expr:
            index = (*i[:dim], i[dim] - starts[k], *i[dim + 1 :])
            return cast(masked(parts[k], index, inside, Const(parts[k].dtype, 0)), d)

        def among(first: int, end: int) -> Expr:
            """Of the parts first to end - 1. Halves keep the expression flat: passes walk it by recursion."""
            if end - first > CHOSEN:
                middle = (first + end) // 2
                return select(op("lt", i[dim], starts[middle]), among(first, middle), among(middle, end))
            value: Expr = Const(d, 0)
            for k in reversed(range(first, end)):
                if len(parts) == 1:
                    return cast(parts[k].load((*i[:dim], i[dim] - starts[k], *i[dim + 1 :])), d)
                below = op("lt", i[dim], starts[k + 1])
                inside = below if k == 0 else op("and", op("ge", i[dim], starts[k]), below)
                if k == len(parts) - 1:
                    inside = op("ge", i[dim], starts[k])
                value = part(k, inside) if k == end - 1 else select(below, part(k, inside), value)
            return value

        return among(0, len(parts))

    return cx.stage(at)


def put_parts(cx: Builder, parts: Sequence[Ref], dim: int, starts: Sequence[Expr]) -> Ref:
    """Every part is stored where it lies, several of one shape by one stage: what an element costs does not grow with the parts."""
    name = cx.buffer(cx.dtype, cx.shape, cx.out.strides, required=True, role="state")
    alike: dict[tuple[Expr, ...], list[int]] = {}
    for k, p in enumerate(parts):
        alike.setdefault(tuple(p.shape), []).append(k)
    for shape, numbers in alike.items():
        axes = cx.axes(shape)
        for some in (numbers[n : n + CHOSEN] for n in range(0, len(numbers), CHOSEN)):
            stores = tuple(
                Store(name, (*axes[:dim], axes[dim] + starts[k], *axes[dim + 1 :]), cast(parts[k].load(axes), cx.dtype)) for k in some
            )
            cx.body.append(Stage(tuple(zip(axes, shape, strict=True)), stores, loc=cx.loc, origin=cx.origin))
    return cx.ref(name)


@lowers("aten.cat.default")
def lower_cat(cx: Builder, parts: Sequence[Ref], dim: int = 0) -> Ref:
    rank = len(cx.shape)
    dim = wrap_dim(dim, rank)
    # eager skips 1-d tensors of no element whatever the others' rank is
    used = [p for p in parts if not (p.rank == 1 and is_zero(p.shape[0])) or rank == 1]
    used = [p for p in used if not is_zero(p.shape[dim])] or used[:1]
    if not used or any(p.rank != rank for p in used):
        return cx.stage(lambda i: Const(cx.dtype, 0))
    return join(cx, used, dim)


@lowers("aten.stack.default", "aten._stack.default")
def lower_stack(cx: Builder, parts: Sequence[Ref], dim: int = 0) -> Ref:
    dim = wrap_dim(dim, len(cx.shape))
    return join(cx, [unsqueeze(p, dim) for p in parts], dim)


# ---------------------------------------------------------------- x with a part replaced
@lowers("aten.slice_scatter.default")
def lower_slice_scatter(cx: Builder, x: Ref, src: Ref, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Ref:
    dim = wrap_dim(dim, x.rank)
    n = x.shape[dim]
    first = start_of(n, start)
    last = n if end is None else stop_of(n, end)
    by = size(step)

    def at(i: Index) -> Expr:
        k = i[dim]
        tests = [op("ge", k, first), op("lt", k, last)]
        if not is_one(by):
            tests.append(op("eq", (k - first) % by, ZERO))
        place = (*i[:dim], (k - first) if is_one(by) else (k - first) // by, *i[dim + 1 :])
        inside = conjunction(tests)
        return select(inside, cast(masked(src, broadcast(src, place), inside, Const(src.dtype, 0)), x.dtype), x.load(i))

    return cx.stage(at)


def stop_of(n: Expr, end: Any) -> Expr:
    e = known(end)
    if e is not None and e >= 2**62:
        return n
    if e is None:
        return op("min", op("where", op("lt", end, ZERO), end + n, end), n)
    if e < 0:
        return op("max", n + e, ZERO)
    return op("min", size(e), n)


def broadcast(src: Ref, index: Index) -> Index:
    """Index into a value that may have dimensions of size 1 less or fewer dimensions."""
    extra = len(index) - src.rank
    return tuple(ZERO if n is ONE else k for n, k in zip(src.shape, index[extra:], strict=True))


@lowers("aten.select_scatter.default")
def lower_select_scatter(cx: Builder, x: Ref, src: Ref, dim: int, at_index: Any) -> Ref:
    dim = wrap_dim(dim, x.rank)
    chosen = position(x.shape[dim], at_index)

    def at(i: Index) -> Expr:
        inside = op("eq", i[dim], chosen)
        place = broadcast(src, (*i[:dim], *i[dim + 1 :]))
        return select(inside, cast(masked(src, place, inside, Const(src.dtype, 0)), x.dtype), x.load(i))

    return cx.stage(at)


@lowers("aten.diagonal_scatter.default")
def lower_diagonal_scatter(cx: Builder, x: Ref, src: Ref, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Ref:
    a, b = wrap_dim(dim1, x.rank), wrap_dim(dim2, x.rank)
    low = max(-offset, 0)

    def at(i: Index) -> Expr:
        inside = op("eq", i[b] - i[a], size(offset))
        rest = tuple(k for d, k in enumerate(i) if d not in (a, b))
        place = broadcast(src, (*rest, i[a] - low))
        return select(inside, cast(masked(src, place, inside, Const(src.dtype, 0)), x.dtype), x.load(i))

    return cx.stage(at)


@lowers("aten.diag_embed.default")
def lower_diag_embed(cx: Builder, x: Ref, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Ref:
    rank = len(cx.shape)
    a, b = wrap_dim(dim1, rank), wrap_dim(dim2, rank)
    zero = Const(x.dtype, 0)

    def at(i: Index) -> Expr:
        inside = op("eq", i[b] - i[a], size(offset))
        rest = tuple(k for d, k in enumerate(i) if d not in (a, b))
        return masked(x, (*rest, i[a] - max(-offset, 0)), inside, zero)

    return cx.stage(at)


@lowers("aten.block_diag.default")
def lower_block_diag(cx: Builder, parts: Sequence[Ref]) -> Any:
    if any(p.rank != 2 for p in parts):
        return NotImplemented
    d = cx.dtype

    def at(i: Index) -> Expr:
        value: Expr = Const(d, 0)
        row: Expr = ZERO
        column: Expr = ZERO
        for p in parts:
            r, k = i[0] - row, i[1] - column
            inside = conjunction([op("ge", r, ZERO), op("lt", r, p.shape[0]), op("ge", k, ZERO), op("lt", k, p.shape[1])])
            value = select(inside, cast(masked(p, (r, k), inside, Const(p.dtype, 0)), d), value)
            row, column = row + p.shape[0], column + p.shape[1]
        return value

    return cx.stage(at)


@lowers("aten.as_strided_scatter.default")
def lower_as_strided_scatter(cx: Builder, x: Ref, src: Ref, shape: Sequence[Any], strides: Sequence[Any], offset: Any = None) -> Any:
    """Each element of x finds its place in the strided view, where that is one-to-one: strides of known sizes that nest. Torch's own counts
    the offset from the start of the storage, of which an input may be a later part."""
    s = x.strided
    sizes, steps, first = [known(n) for n in shape], [known(n) for n in strides], known(offset) if offset is not None else 0
    is_known = not (first is None or None in sizes or None in steps)
    order = sorted((k for k in range(len(sizes)) if sizes[k] != 1), key=lambda k: -constant(strides[k])) if is_known else []
    is_nested = all(constant(strides[a]) >= constant(strides[b]) * constant(shape[b]) for a, b in pairwise(order))
    is_whole = s is not None and x.whole is not None and same_strides(x.shape, s.strides, contiguous_strides(x.shape))
    if not (is_whole and is_known and is_nested and all(steps[k] for k in order)):
        if s is None or cx.buffers[s.root].role != "input":
            return NotImplemented
        if not is_whole:
            raise Unsupported("LOW003", at=cx.loc, detail="as_strided_scatter of an input that is not contiguous")
        return lower_extern(cx, cx.node, [cx.stage(x.load, x.shape, x.dtype), src, shape, strides, offset])

    def at(i: Index) -> Expr:
        number: Expr = ZERO
        for k, n in zip(i, x.shape, strict=True):
            number = number * n + k
        rest: Expr = number - size(offset if offset is not None else 0)
        tests = [op("ge", rest, ZERO)]
        place: list[Expr] = [ZERO] * len(sizes)
        for d in order:
            step = constant(strides[d])
            place[d] = rest // step
            rest = rest % step
            tests.append(op("lt", place[d], size(shape[d])))
        tests.append(op("eq", rest, ZERO))
        inside = conjunction(tests)
        return select(inside, cast(masked(src, tuple(place), inside, Const(src.dtype, 0)), x.dtype), x.load(i))

    return cx.stage(at)
