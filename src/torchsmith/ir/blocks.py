"""Blocks: statements of a kernel that are tiles with a text of their own, each with its meaning in plain loops (no torch).

    Contract   register tile of a multiply-add Fold       Product    block product of operands as they lie
    Paired     tile of a bfloat16 product                 Banded     tile of a grouped convolution
    Transpose       block read along n, laid out along m       Interleave      right-hand side of a Paired, in pairs of k

A block declares what walkers ask of it (ir/kernel.py); schedule/ makes it, emit/ prints it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from . import dtype as dt
from .dtype import DType
from .expr import Axis, Const, Expr, Fold, Load, Op, Var, const, convert, op, substitute, walk
from .kernel import ZERO, Block, Loop, StoreStmt
from .linear import conjuncts, const_of, linear


@dataclass(frozen=True, slots=True)
class Contract(Block):
    """One register tile of a multiply-add Fold, left in the scratch array `acc` (row-major, `width` columns of `dtype`):

        acc[first + m, n] = sum over taps and k of a(m, taps, k) * b(taps, k, n)        m < rows, n < width;  `add`: += instead of =

    a: Load over Axis m, the taps' axes and k, affine in m and k; where its mask (a conjunction of linear bounds) fails the product is 0.
    b: Load with n contiguous: of a packed operand, or of one that lies as it is, of which `wide` columns may be read (None: `width`).
    Rows from `live` on and columns from `wide` on do not exist: their accumulators hold no meaning.
    prefetch: a hint without meaning, over the taps' axes; step k of a tap may prefetch lanes * prefetch_vectors elements of b's buffer,
    which another tile will need, from element prefetch + lanes * prefetch_vectors * k on. With prefetch_vectors 0: 16 steps may ask for
    `prefetch_share` elements, in turn.
    prefetch_rows: a hint about rows of `a` that lie behind each other, k contiguous, and come from beyond the second-level cache, as the
    next tile's will. Without taps 0 or 1: step k may ask for line k of them. With taps: 16 steps may ask for `prefetch_rows` elements, in
    turn, of what the last taps read behind this tile's rows.
    tails: a hint too, for rows whose number is known at run time only: fewer rows, falling, for which partial tiles get text of their own.
    parts: a power of two; above 1, that many neighbours of k lie beside each other in the lanes, so that few columns fill a vector: lane n
    takes the elements k * parts + n % parts, and b(taps, k, n) is packed for it. `rest`: what the last step of k has, if it is not whole.
    Then `a` is contiguous along k and its mask holds no k.
    where: a conjunction over m, taps and k; products count only where it holds, even beside an infinite `b`. What `a` is beyond is 0.
    """

    OPEN: ClassVar[frozenset[str]] = frozenset({"taps", "extent", "a", "b", "prefetch", "where"})
    acc: str
    rows: int
    vectors: int
    m: Axis
    live: Expr
    taps: tuple[tuple[Axis, Expr], ...]
    k: Axis
    extent: Expr
    n: Axis
    a: Load
    b: Load
    prefetch: Expr | None = None
    prefetch_vectors: int = 0
    prefetch_share: Expr = ZERO
    wide: Expr | None = None
    first: Expr = ZERO
    add: bool = False
    prefetch_rows: Expr = ZERO
    tails: tuple[int, ...] = ()
    parts: int = 1
    rest: int = 0
    where: Expr | None = None
    vector_bytes: int = 64  # of one vector of sums

    @property
    def dtype(self) -> DType:
        """Of the sums."""
        return dt.f64 if self.a.dtype is dt.f64 else dt.f32

    @property
    def steps(self) -> Expr:
        """Of k."""
        return self.extent if self.parts == 1 else op("floordiv", self.extent + (self.parts - 1), const(self.parts))

    @property
    def lanes(self) -> int:
        """Sums in a vector."""
        return self.vector_bytes // self.dtype.itemsize

    @property
    def width(self) -> int:
        return self.lanes * self.vectors

    def meaning(self) -> Loop:
        """The same tile in plain statements: what the verifier checks and the interpreter runs."""
        a, b, where = self.a, self.b, conjuncts(self.where)
        if self.parts > 1:
            at = self.k * self.parts + op("mod", self.n, const(self.parts))
            index = tuple(substitute(i, {self.k: at}) for i in a.index)
            where = [substitute(t, {self.k: at}) for t in where]
            a = _only_where(Load(a.buf, a.dtype, index), [*conjuncts(a.mask), *([op("lt", at, self.extent)] if self.rest else ())])
        a, b = _only_where(a, where), _only_where(b, where)
        total = multiply_add((*self.taps, (self.k, self.steps)), a, b, self.dtype)
        store = StoreStmt(self.acc, ((self.first + self.m) * self.width + self.n,), total, "add" if self.add else "set")
        wide = const(self.width) if self.wide is None else self.wide
        return Loop(self.m, self.live, "serial", (Loop(self.n, wide, "vector", (store,)),))


@dataclass(frozen=True, slots=True)
class Product(Block):
    """A block product of f32 operands that lie as they are, into the scratch array `out` (rows of `pitch` elements):

        out[m, n] = sum over k of a(m, k) * b(k, n)         m < rows, n < columns;  `add`: += instead of =

    a: Load affine in m and k. b: Load with n contiguous. Both `b` and `out` have room up to the next multiple of 16 columns; what lies
    there holds no meaning.
    """

    OPEN: ClassVar[frozenset[str]] = frozenset({"extent"})
    out: str
    pitch: int
    m: Axis
    rows: Expr
    n: Axis
    columns: Expr
    k: Axis
    extent: Expr
    a: Load
    b: Load
    add: bool = False

    def meaning(self) -> Loop:
        """The same block in plain statements."""
        old, partial = Var("product_a0", dt.f32), Var("product_b0", dt.f32)
        update, combine = op("add", old, op("mul", self.a, self.b)), op("add", old, partial)
        total = Fold(((self.k, self.extent),), (Const(dt.f32, 0.0),), (update,), (combine,), prefix="product_")
        store = StoreStmt(self.out, (self.m * self.pitch + self.n,), total, "add" if self.add else "set")
        return Loop(self.m, self.rows, "serial", (Loop(self.n, self.columns, "vector", (store,)),))


@dataclass(frozen=True, slots=True)
class Transpose(Block):
    """A block read along n and laid out along m, as f32 (f64 as it is), in the scratch array `out` (rows of `pitch` elements):

        out[n, m] = source(m, n) where m < rows, else 0         n < columns, m < rows rounded up to `room` bytes
    """

    out: str
    pitch: int
    m: Axis
    rows: Expr
    n: Axis
    columns: Expr
    source: Load
    room: int = 64

    def meaning(self) -> Loop:
        """The same block in plain statements."""
        s = self.source
        inside = Load(s.buf, s.dtype, s.index, op("lt", self.m, self.rows), Const(s.dtype, 0))
        made = dt.f64 if s.dtype is dt.f64 else dt.f32
        lanes = self.room // made.itemsize
        store = StoreStmt(self.out, (self.n * self.pitch + self.m,), convert(inside, made))
        wide = op("floordiv", self.rows + (lanes - 1), const(lanes)) * lanes
        return Loop(self.n, self.columns, "serial", (Loop(self.m, wide, "vector", (store,)),))


@dataclass(frozen=True, slots=True)
class Banded(Block):
    """One tile of a grouped convolution, left in the scratch array `acc` (row-major, lanes * vectors columns, f32): lanes hold output
    channels, `per` of each group side by side, and every lane meets the input channels of its own group only.

        acc[m, l] = sum over taps, w and c of a(m, taps, w, c, g = l // per) * b(taps, w, c, l)        m < rows, l < lanes * vectors

    m and w step along the same dimension of `a`, so that tiles read each of its columns once. a: Load, affine in m, w, c and g; where
    its mask (a conjunction of bounds) fails the product is 0. b: Load of a packed buffer, l contiguous. `groups` groups of `a` may be
    read; rows from `live` on do not exist: their accumulators hold no meaning.
    """

    acc: str
    rows: int
    vectors: int
    per: int
    m: Axis
    live: Expr
    taps: tuple[tuple[Axis, Expr], ...]
    w: Axis
    width: int
    c: Axis
    channels: int
    g: Axis
    groups: Expr
    lane: Axis
    a: Load
    b: Load
    lanes: int = 16

    def column_bounds(self) -> tuple[list[Expr], list[Expr], list[Expr]] | None:
        """The mask of `a` as (conditions on the taps, least columns, ends of columns); None if it is of another form, which has no text.

        Column j of a tile is what row m reads through window element w where m * stride + w * dilation = j.
        """
        stride, dilation = self.steps
        inner = {self.m, self.w, self.c, self.g}
        fixed: list[Expr] = []
        least: list[Expr] = []
        ends: list[Expr] = []
        for test in conjuncts(self.a.mask):
            if not inner & set(walk(test)):
                fixed.append(test)
                continue
            if not isinstance(test, Op) or test.name not in ("ge", "lt") or inner & set(walk(test.args[1])):
                return None
            terms = linear(test.args[0]).terms
            if {self.c, self.g} & set(terms) or const_of(terms.get(self.m, const(0))) != stride:
                return None
            if (self.w in terms and const_of(terms[self.w]) != dilation) or (self.width > 1 and self.w not in terms):
                return None
            start = substitute(test.args[0], {self.m: const(0), self.w: const(0)})
            (least if test.name == "ge" else ends).append(linear(test.args[1] - start).expr())
        return fixed, least, ends

    @property
    def steps(self) -> tuple[int, int]:
        """(stride, dilation): how far m and w step along the dimension of `a` that they share."""
        for i in self.a.index:
            terms = linear(i).terms
            if self.m in terms:
                return const_of(terms[self.m]) or 0, const_of(terms.get(self.w, const(1))) or 1
        return 1, 1

    def meaning(self) -> Loop:
        """The same tile in plain statements."""
        lanes = self.lanes * self.vectors
        group = op("min", op("floordiv", self.lane, const(self.per)), self.groups - 1)
        loops = (*self.taps, (self.w, const(self.width)), (self.c, const(self.channels)))
        total = multiply_add(loops, substitute(self.a, {self.g: group}), self.b)
        store = StoreStmt(self.acc, (self.m * lanes + self.lane,), total)
        return Loop(self.m, self.live, "serial", (Loop(self.lane, const(lanes), "vector", (store,)),))


def _only_where(load: Load, tests: list[Expr]) -> Load:
    """`load` where `tests` hold too, zero elsewhere."""
    every = dict.fromkeys([*conjuncts(load.mask), *tests])
    mask = functools.reduce(lambda x, y: op("and", x, y), every) if every else None
    return Load(load.buf, load.dtype, load.index, mask, None if mask is None else Const(load.dtype, 0.0))


def multiply_add(axes: tuple[tuple[Axis, Expr], ...], a: Expr, b: Expr, dtype: DType = dt.f32) -> Fold:
    """Sum over `axes` of a * b in `dtype`."""
    old, partial = Var("tile_a0", dtype), Var("tile_b0", dtype)
    update = op("add", old, op("mul", convert(a, dtype), convert(b, dtype)))
    return Fold(axes, (Const(dtype, 0.0),), (update,), (op("add", old, partial),), prefix="tile_")


@dataclass(frozen=True, slots=True)
class Paired(Block):
    """A tile of a bfloat16 product, left in the scratch array `acc` (row-major, 16 * vectors columns, f32):

        acc[first + m, n] = sum over taps and k < depth of a(m, taps, k) * b(taps, k, n)        m < rows, n < 16 * vectors

    a: Load affine in m and k, k side by side; its mask, if any, says which taps exist and holds no m or k. b: Load of a packed buffer:
    dense, pairs of k side by side for each n, each tap with zeros up to a multiple of 32 of k; `joined`: all taps behind each other, with
    zeros at their end only (then `a` has no mask). Sums are taken as the machine's bfloat16 instructions do, which treat denormals as
    zero. Rows from `live` on do not exist.
    prefetch: a hint without meaning, over the taps' axes; each 32 of k may prefetch `prefetch_lines` lines of 64 bytes of b's buffer, one
    behind the other from element `prefetch` on, which other tiles will need.
    """

    STRIDED: ClassVar[bool] = False
    acc: str
    rows: int
    vectors: int
    m: Axis
    live: Expr
    taps: tuple[tuple[Axis, Expr], ...]
    k: Axis
    depth: int
    n: Axis
    a: Load
    b: Load
    joined: bool = False
    prefetch: Expr | None = None
    prefetch_lines: int = 0
    first: Expr = ZERO

    def meaning(self) -> Loop:
        """The same tile in plain statements."""
        lanes = 16 * self.vectors
        total = multiply_add((*self.taps, (self.k, const(self.depth))), self.a, self.b)
        store = StoreStmt(self.acc, ((self.first + self.m) * lanes + self.n,), total)
        return Loop(self.m, self.live, "serial", (Loop(self.n, const(lanes), "vector", (store,)),))


@dataclass(frozen=True, slots=True)
class Interleave(Block):
    """The right-hand side of a Paired, laid out in the scratch array `out` (bf16, rows of `pitch` elements, one for each pair of k):

        out[k // 2, 2 * n + k % 2] = source(k, n) where k < depth and n < columns, else 0         k < room, a multiple of 32; 2 * n < pitch

    source: Load, contiguous along n or along k.
    """

    STRIDED: ClassVar[bool] = False
    out: str
    pitch: int
    n: Axis
    columns: Expr
    k: Axis
    depth: Expr
    room: int
    source: Load

    def meaning(self) -> Loop:
        """The same block in plain statements."""
        s = self.source
        test = op("and", op("lt", self.k, self.depth), op("lt", self.n, self.columns))
        inside = Load(s.buf, s.dtype, s.index, test, Const(s.dtype, 0.0))
        at = op("floordiv", self.k, const(2)) * self.pitch + self.n * 2 + op("mod", self.k, const(2))
        store = StoreStmt(self.out, (at,), inside)
        return Loop(self.k, const(self.room), "serial", (Loop(self.n, const(self.pitch // 2), "vector", (store,)),))
