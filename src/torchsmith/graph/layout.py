"""The laws of sizes, strides and dtypes that eager's CPU kernels follow: broadcasting, stride propagation, type promotion.

In: sizes, strides and dtypes of operands. Out: those of results. Sizes may be SymInts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..codes import Unsupported
from ..ir.expr import Sym, walk
from ..ir.number import number_of
from .polynomial import Range, interval, poly, settled
from .sizes import LARGEST, SizeNode, expr_of

Size = Any  # int | torch.SymInt
Sizes = tuple[Size, ...]


UNKNOWN = 1 << 30  # hint_of a size that is known only at run time


def is_symbolic(sizes: Sequence[Size]) -> bool:
    return any(type(s) is torch.SymInt for s in sizes)


def same(a: Size, b: Size) -> bool:
    """Are two sizes equal, without assuming anything that does not follow?"""
    if type(a) is int and type(b) is int:
        return a == b
    x, y = expr_of(a), expr_of(b)
    return x is y or settled(x) is settled(y)


def is_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Are all sizes equal, without assuming anything that does not follow?"""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def is_less(a: Size, b: Size) -> bool | None:
    """a < b; None where only running tells."""
    try:
        return bool(a < b)
    except Unsupported as why:
        if why.code != "GRA004":
            raise
        return None


def require(cond: bool | torch.SymBool) -> bool:
    """Whether what a call needs holds. Where only running tells, it is assumed: the graph gets a check."""
    if isinstance(cond, bool):
        return cond
    return cond.node.expect_true() if cond.node.hint is None else bool(cond)  # type: ignore[no-any-return]


def are_equal(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether a call that needs equal sizes has them (see `require`)."""
    return len(a) == len(b) and all(same(x, y) or require(x == y) for x, y in zip(a, b, strict=True))


def require_size(s: Size) -> bool:
    """Whether `s` can be a dimension; what was read from a tensor is also bounded as all sizes are."""
    if type(s) is int or s.node.hint is not None:
        return bool(s >= 0)
    return require(s >= 0) and (not s.node.facts.is_read(s.node.expr) or require(s <= LARGEST))


def from_front(v: Size, n: Size) -> Size:
    """A position in n elements, counted from the end if negative, counted from the start."""
    negative = is_less(v, 0)
    if negative is None:  # only running tells
        return v + n * torch.sym_max(torch.sym_min(-v, 1), 0)
    return v + n if negative else v


def clamp_index(v: Size, n: Size) -> Size:
    """Where a slice of n elements starts or ends, counted from the end if negative: between 0 and n."""
    if type(v) is int and v >= (1 << 62):
        return n
    if same(v, n):
        return n
    negative = is_less(v, 0)
    if negative is None:
        return torch.sym_min(torch.sym_max(from_front(v, n), 0), n)
    if negative:
        v = v + n
        below = is_less(v, 0)
        return torch.sym_max(v, 0) if below is None else 0 if below else v
    beyond = is_less(n, v)
    return torch.sym_min(v, n) if beyond is None else n if beyond else v


def is_told(s: Size) -> bool:
    """A size that only running tells. Beside one, no other is taken for a 1 that broadcasts: they are equal, which running checks."""
    return type(s) is torch.SymInt and s.node.hint is None


def is_certain(fact: Any) -> bool:
    """Does what sizes are compared for hold whatever they are? Nothing is assumed of them."""
    return fact.node.statically_known_true() if isinstance(fact, torch.SymBool) else bool(fact)


def is_one(s: Size) -> bool:
    """Is the size 1? For a symbol: only if that follows from its range; else it is assumed not to be."""
    if type(s) is int:
        return s == 1
    one = s == 1
    if isinstance(one, torch.SymBool) and is_told(s):  # else it is not: where that matters, running checks it
        return is_certain(one)
    return bool(one)


def contiguous_strides(shape: Sequence[Size]) -> Sizes:
    out: list[Size] = []
    step: Size = 1
    for s in reversed(shape):
        out.append(step)
        step = step * (s if type(s) is not int or s > 1 else 1)
    return tuple(reversed(out))


def strides_in_order(shape: Sequence[Size], order: Sequence[int]) -> Sizes:
    """Dense strides, `order` naming the dimensions from fastest to slowest."""
    out: list[Size] = [0] * len(shape)
    step: Size = 1
    for d in order:
        out[d] = step
        step = step * (shape[d] if type(shape[d]) is not int or shape[d] > 1 else 1)
    return tuple(out)


CHANNELS_LAST_ORDER = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
FORMAT_NDIM = {torch.channels_last: 4, torch.channels_last_3d: 5}


def channels_last_strides(shape: Sequence[Size]) -> Sizes:
    """Plain products, so that an empty dimension gives stride 0, as torch has it."""
    out: list[Size] = [0] * len(shape)
    step: Size = 1
    for d in CHANNELS_LAST_ORDER[len(shape)]:
        out[d] = step
        step = step * shape[d]
    return tuple(out)


def format_strides(shape: Sequence[Size], memory_format: torch.memory_format | None) -> Sizes:
    """Strides of a fresh tensor of this format (contiguous_format, channels_last, channels_last_3d)."""
    if memory_format in FORMAT_NDIM:
        return channels_last_strides(shape)
    return contiguous_strides(shape)


def matches(
    shape: Sequence[Size], strides: Sequence[Size], order: Sequence[int], equal: Callable[[Size, Size], bool] = same,
    equals_one: Callable[[Size, Size], bool] = lambda s, one: type(s) is int and s == one,
) -> bool:  # fmt: skip
    """Are these the dense strides of `order` (fastest first), where the stride of a size-1 dimension does not matter?"""
    step: Size = 1
    for d in order:
        s = shape[d]
        if equals_one(s, 1):
            continue
        if not equal(strides[d], step):
            return False
        step = step * s
    return True


def is_contiguous(t: torch.Tensor) -> bool:
    if not t._has_symbolic_sizes_strides:
        return t.is_contiguous()
    is_empty = any(type(s) is int and s == 0 for s in t.shape)  # in other formats the strides of an empty tensor count
    return is_empty or matches(t.shape, t.stride(), range(t.dim() - 1, -1, -1))


def is_channels_last(t: torch.Tensor) -> bool:
    """Contiguous in the channels-last order of its 4 or 5 dimensions."""
    n = t.dim()
    if n not in CHANNELS_LAST_ORDER:
        return False
    if not t._has_symbolic_sizes_strides:
        return t.is_contiguous(memory_format=torch.channels_last if n == 4 else torch.channels_last_3d)
    return matches(t.shape, t.stride(), CHANNELS_LAST_ORDER[n])


def has_channels_last_strides(t: torch.Tensor) -> bool:
    """The looser test behind `suggest_memory_format`: strides ascend in channels-last order and the format is not ambiguous."""
    n = t.dim()
    if n not in CHANNELS_LAST_ORDER:
        return False
    shape, strides = t.shape, t.stride()
    least: Size = 0
    if strides[1] == 0:
        return False
    for d in CHANNELS_LAST_ORDER[n]:
        if not is_known_positive(shape[d]) or lt(strides[d], least):
            return False
        if d == 0 and same(least, strides[1]):
            return False  # N111 tensors read as contiguous
        least = strides[d]
        if gt_one(shape[d]):
            least = least * shape[d]
    return True


def is_known_positive(s: Size) -> bool:
    return s != 0 if type(s) is int else True


def gt_one(s: Size) -> bool:
    return s > 1 if type(s) is int else likely(s > 1)


def lt(a: Size, b: Size) -> bool:
    return likely(a < b)


def likely(question: Any) -> bool:
    """The answer to a question about memory order, which the stride of a dimension of size 1 must not decide."""
    if not isinstance(question, torch.SymBool):
        return bool(question)
    node: SizeNode = question.node
    return node.guard_size_oblivious()


def suggest_format(t: torch.Tensor) -> torch.memory_format:
    """The format eager's convolutions, pools and norms would keep."""
    if has_channels_last_strides(t):
        return torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return torch.contiguous_format


def is_dense(t: torch.Tensor) -> bool:
    """Non-overlapping and dense: some order of its dimensions is contiguous."""
    shape, strides = t.shape, t.stride()
    if is_contiguous(t):
        return True
    rest = [d for d in range(len(shape)) if not (type(shape[d]) is int and shape[d] == 1)]
    rest.sort(key=lambda d: rank_of(strides[d]))
    return matches(shape, strides, rest)


def is_lazy(t: torch.Tensor) -> bool:
    """Are the values in memory others than the tensor's: still to be negated or conjugated?"""
    return t.is_neg() or t.is_conj()


def overlaps(t: torch.Tensor) -> bool:
    """May two indices name one place in memory, at the hints of its sizes or where they are larger?"""
    if not t._has_symbolic_sizes_strides:
        return not t.is_contiguous() and _share_places(zip(t.stride(), t.shape, strict=True))
    now = [(hint_of(s), most(n)) for s, n in zip(t.stride(), t.shape, strict=True)]
    return _share_places(now) or _share_places((_grown(s), _grown(n)) for s, n in zip(t.stride(), t.shape, strict=True))


def _share_places(dimensions: Iterable[tuple[int, int]]) -> bool:
    reach = 0
    for stride, size in sorted(dimensions):
        if size > 1 and stride <= reach:
            return True
        reach += stride * max(size - 1, 0)
    return False


def _grown(v: Size) -> int:
    """`most` of a size where all symbols are 4 times what they are at hand, so that what they have to do with each other stays."""
    if type(v) is int or v.node.hint is None:
        return most(v)
    env = {name: 4 * h for name, h in v.node.facts.hints.items() if type(h) is int}
    found = number_of(v.node.expr, env)
    return hint_of(v) if found is None else int(found)


def most(n: Size) -> int:
    """`hint_of`, or how large a size that only running tells can be: the part of a slice is at most the whole."""
    if type(n) is int or n.node.hint is not None:
        return hint_of(n)
    facts = n.node.facts

    def at_hints(name: str) -> Range:
        hint = facts.hints.get(name)
        return facts.range(name) if hint is None else (hint, hint)  # type: ignore[no-any-return]

    high = interval(poly(n.node.expr), at_hints)[1]
    return UNKNOWN if high is None else high


def hint_of(v: Size) -> int:
    if type(v) is int:
        return v
    node: SizeNode = v.node
    return node.hint if node.hint is not None else UNKNOWN


def rank_of(v: Size) -> int:
    """`hint_of` of what is put in order: a size that varies and is 1 at hand, or 0, counts as 2, so that strides of other sizes are in the
    same order."""
    value = hint_of(v)
    if type(v) is int or value == UNKNOWN:
        return value
    hints: dict[str, Any] = v.node.facts.hints
    found = {x.name for x in walk(v.node.expr) if isinstance(x, Sym) and (hints.get(x.name) or 0) < 2}
    return value if not found else int(number_of(v.node.expr, hints | dict.fromkeys(found, 2)) or 0)


def broadcast(*shapes: Sequence[Size]) -> Sizes:
    """The broadcast of shapes; raises RuntimeError as torch does."""
    n = max((len(s) for s in shapes), default=0)
    out: list[Size] = [1] * n
    for shape in shapes:
        offset = n - len(shape)
        for i, s in enumerate(shape):
            have = out[offset + i]
            if have is s or same(have, s):
                continue
            if type(have) is int and have == 1:
                out[offset + i] = s
            elif (type(s) is int and s == 1) or (hint_of(have) == hint_of(s) != UNKNOWN and have == s):
                continue
            elif not is_told(s) and is_one(have):
                out[offset + i] = s
            elif (is_told(have) or not is_one(s)) and not require(have == s):
                raise RuntimeError(
                    f"The size of tensor a ({have}) must match the size of tensor b ({s}) at non-singleton dimension {offset + i}"
                )
            elif type(s) is int:
                out[offset + i] = s if not is_one(s) else have
    return tuple(out)


def broadcasts_to(sizes: Sequence[Size], shape: Sequence[Size]) -> bool:
    """Does an operand of `sizes` broadcast to `shape`? The one place where rules ask it: what is said of sizes that vary is assumed from
    now on, so that a dimension of the operand is either known to be 1 or equal to that of `shape`."""
    lead = len(shape) - len(sizes)
    if lead < 0:
        return False
    for have, want in zip(sizes, shape[lead:], strict=True):
        if same(have, want) or is_static_one(have):
            continue
        if not (not is_told(want) and is_one(have)) and not require(have == want):
            return False
    return True


def propagate_strides(shape: Sizes, operands: Sequence[torch.Tensor], *, with_number: bool = False) -> Sizes:
    """Strides that an element-wise kernel gives a new result of `shape` (the rules of eager's tensor iterator).

    All operands of the result's shape and one dense layout: that layout. Otherwise dimensions are sorted by the operands'
    strides, the first operand with an opinion wins. with_number: one more operand is a number, which eager makes a tensor of
    another shape; that is seen where a dimension of one element has a stride of its own.
    """
    n = len(shape)
    is_sorted = with_number and any(map(is_static_one, shape))
    if not is_sorted and all(len(t.shape) == n for t in operands) and all(
        a is b or same(a, b) for t in operands for a, b in zip(t.shape, shape, strict=True)
    ):
        if all(is_contiguous(t) for t in operands):
            return contiguous_strides(shape)
        if n in CHANNELS_LAST_ORDER and all(is_channels_last(t) for t in operands):
            return channels_last_strides(shape)
        first = operands[0].stride()
        if all(is_dense(t) for t in operands) and all(same(a, b) for t in operands[1:] for a, b in zip(t.stride(), first, strict=True)):
            return tuple(first)
    if n <= 1:
        return contiguous_strides(shape)
    return sorted_strides(shape, operands)


def sorted_strides(shape: Sizes, operands: Sequence[torch.Tensor]) -> Sizes:
    """Dimensions in the order of the operands' strides. Sizes that vary are compared by their hints: one order for all sizes."""
    return strides_by_rows(shape, [(t.shape, t.stride()) for t in operands])


def strides_by_rows(shape: Sizes, operands: Sequence[tuple[Sequence[Size], Sequence[Size]]]) -> Sizes:
    n = len(shape)
    sizes = [rank_of(s) for s in shape]
    rows = []
    for given, strides in operands:
        offset = n - len(given)
        row = [0] * n
        for i in range(len(given)):
            row[offset + i] = 0 if is_known_one(given[i]) and not is_known_one(shape[offset + i]) else rank_of(strides[i])
        rows.append(row)

    def is_larger(a: int, b: int) -> bool:
        """Of dimensions with the same stride (windows that overlap): the answer is assumed, but where one of them does not matter."""
        if UNKNOWN in (sizes[a], sizes[b]) or is_known_one(shape[a]) or is_known_one(shape[b]):
            return sizes[a] > sizes[b]
        return bool(shape[a] > shape[b])

    perm = dimension_order(n, rows, is_larger)
    if perm == list(range(n - 1, -1, -1)):
        return contiguous_strides(shape)
    out: list[Size] = [0] * n
    step: Size = 1
    for d in perm:
        out[d] = step
        step = step * shape[d]
    return tuple(out)


def dimension_order(n: int, rows: list[list[int]], is_larger: Callable[[int, int], bool]) -> list[int]:
    """Dimensions from fastest to slowest; a stride of 0 has no opinion, the first row that has one decides."""

    def should_swap(a: int, b: int) -> int:
        for row in rows:
            x, y = row[a], row[b]
            if x == 0 or y == 0:
                continue
            if x == y:
                if is_larger(a, b):
                    return 1
            else:
                return -1 if x < y else 1
        return 0

    perm = list(range(n - 1, -1, -1))
    for i in range(1, n):
        high = i
        for low in range(i - 1, -1, -1):
            c = should_swap(perm[low], perm[high])
            if c > 0:
                perm[low], perm[high] = perm[high], perm[low]
                high = low
            elif c < 0:
                break
    return perm


def is_static_one(s: Size) -> bool:
    return type(s) is int and s == 1


def is_known_one(s: Size) -> bool:
    """A size that is 1 by what was assumed counts."""
    return is_certain(s == 1)


def is_zero(s: Size) -> bool:
    return type(s) is int and s == 0


# ---------------------------------------------------------------- dtypes

COMPLEX_OF = {
    torch.float16: torch.complex32,
    torch.bfloat16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}


@lru_cache(maxsize=1024)
def promote(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    if a is None or b is None:
        return a or b
    return torch.promote_types(a, b)


@lru_cache(maxsize=1024)
def _combine(high: torch.dtype | None, low: torch.dtype | None) -> torch.dtype | None:
    """Operands of a higher rank (dimensioned > 0-d > Python number) decide within their category."""
    if high is None:
        return low
    if high.is_complex:
        return high
    if high.is_floating_point:
        return COMPLEX_OF[high] if low is not None and low.is_complex else high
    if high is torch.bool or (low is not None and (low.is_floating_point or low.is_complex)):
        return promote(high, low)
    return high


def number_dtype(v: Any) -> torch.dtype:
    """The dtype a Python number has in type promotion."""
    if isinstance(v, (bool, torch.SymBool)):
        return torch.bool
    if isinstance(v, (int, torch.SymInt)):
        return torch.int64
    if isinstance(v, complex):
        return COMPLEX_OF[torch.get_default_dtype()]
    return torch.get_default_dtype()


def result_dtype(*operands: Any) -> torch.dtype:
    """Type promotion over tensors and Python numbers."""
    dim: torch.dtype | None = None
    zero: torch.dtype | None = None
    number: torch.dtype | None = None
    for x in operands:
        if isinstance(x, torch.Tensor):
            if x.dim():
                dim = x.dtype if dim is None else promote(dim, x.dtype)
            else:
                zero = x.dtype if zero is None else promote(zero, x.dtype)
        elif x is not None:
            number = promote(number, number_dtype(x))
    found = _combine(dim, _combine(zero, number))
    if found is None:
        raise RuntimeError("at least one operand is needed")
    return found


def float_dtype(d: torch.dtype) -> torch.dtype:
    """Integers and bools become the default float in operators such as sqrt and div."""
    return d if d.is_floating_point or d.is_complex else torch.get_default_dtype()


def sum_dtype(d: torch.dtype) -> torch.dtype:
    return d if d.is_floating_point or d.is_complex else torch.int64
