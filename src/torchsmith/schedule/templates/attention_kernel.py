"""Attention -> Kernel: scores of one block of queries and keys at a time, in scratch; a running maximum and sum (online softmax).

In: an Attention, its Stage's stores, layouts. Out: a Kernel over (batch axes, blocks of W queries):

    transpose q[W, E] into qt[E, W];  top = -inf, sum = 0, o[W, D] = 0
    for each block of J keys:
        s[J, W] = k[J, E] @ qt;  s = score(s);  new = max(top, s over J);  shrink = exp(top - new);  s = exp(s - new)
        sum = sum * shrink + s over J;  o *= shrink;  o += s^T @ v[J, D]
    out = o / sum

Queries run over lanes, so that K and V are read where they lie, and maximum, exponential and sum go down the lanes without reductions.
What a score reads of a matrix over queries and keys (a mask) is transposed into scratch like q. Keys that a mask leaves out for a whole
block are not computed.

In bfloat16 both products are made of pairs (Paired): q is interleaved once, K read where it lies; weights are transposed and rounded,
and V is interleaved,
block by block:

        s[J, W] = k[J, E] @ interleaved q;  ...;  p[W, J] = bfloat16 of s transposed;  o = o * shrink + p @ interleaved v
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir import dtype as dt
from ...ir.blocks import Interleave, Paired, Product, Transpose
from ...ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Var, const, convert, op, select, substitute, walk
from ...ir.kernel import Kernel, Let, Scratch, Stmt, StoreStmt
from ...ir.linear import const_of, linear
from ...ir.program import Buffer, Store
from ...ir.target import Target
from .. import deps
from ..fusion.group import Group
from ..loops.build import finish
from .attention import DOT, OUT, Attention
from .attention_few import FEW, FewRows
from .attention_parts import LANES, LOWEST, blocks_of, key_limit, least, over, stride_along

QUERIES = 48  # of a block: three vectors, so that a tile of 8 keys fills the registers
MANY = 1024  # keys from which on a block has two tiles of queries: their pages are walked half as often
DEPTH = 128  # elements of a row of q that a register tile runs over at a time: with QUERIES columns they stay in the first-level cache
KEYS = 64  # the most keys of a block
TILE = 8  # keys of a register tile
CHAINS = 4  # running maxima and sums that go down a block side by side
WORK = 1 << 20  # multiply-adds worth a thread
TALL = 32  # rows of a tile of pairs, and its columns: two vectors
PAIRED_KEYS, LIMITED_KEYS = 128, 64  # the most keys of a block of pairs, and under a causal mask, where the last block is part empty
TRANSPOSED = frozenset({dt.f32, dt.bf16, dt.f16, dt.bool_})


@dataclass(frozen=True)
class Shape:
    """Sizes of a block: W queries, J keys, rows of E and D elements (`pitch`: D rounded up to whole tiles of `step` columns)."""

    queries: int
    keys: int
    e: int
    d: int
    step: int = LANES

    @property
    def pitch(self) -> int:
        return -(-self.d // self.step) * self.step


def choose_shape(a: Attention) -> Shape:
    """Blocks no wider than there are queries, and blocks of keys of nearly one size."""
    e, d, rows, keys = (const_of(x[1]) for x in (a.e, a.d, a.i, a.j))
    assert e is not None and d is not None
    wide = QUERIES if keys is None or keys <= MANY else 2 * QUERIES
    wide = wide if rows is None else min(wide, -(-rows // LANES) * LANES)
    return Shape(wide, KEYS if keys is None else -(-keys // (-(-keys // KEYS) * TILE)) * TILE, e, d)


def paired_shape(a: Attention, most: int) -> Shape:
    """The same for products of pairs: queries of a tile, and whole tiles of at most `most` keys."""
    e, d, rows, keys = (const_of(x[1]) for x in (a.e, a.d, a.i, a.j))
    assert e is not None and d is not None
    blocks = 1 if keys is None else -(-keys // most)
    return Shape(TALL if (rows or TALL) > LANES else LANES, most if keys is None else -(-keys // (blocks * TALL)) * TALL, e, d, TALL)


def has_pairs(a: Attention, buffers: Mapping[str, Buffer]) -> bool:
    """Are all operands bfloat16 whose rows lie side by side?"""
    rows = ((a.q, a.e[0], a.i[0]), (a.k, a.e[0], a.j[0]), (a.v, a.d[0], a.j[0]))
    for x, along, across in rows:
        layout = buffers[x.buf].layout
        if x.dtype is not dt.bf16 or layout is None or layout.splits or layout.pad or stride_along(x, across, buffers) is None:
            return False
        unit = stride_along(x, along, buffers)
        if unit is None or const_of(unit) != 1:
            return False
    return True


def from_both_ends(n: Axis, count: Expr) -> Expr:
    """0, count - 1, 1, count - 2, ...: under a causal mask, any run of blocks is then about as long as any other."""
    half = op("floordiv", n, const(2))
    return half + op("mod", n, const(2)) * (count - 1 - half * 2)


class _Former:
    """State of making one kernel."""

    def __init__(self, a: Attention, buffers: Mapping[str, Buffer]) -> None:
        limit = key_limit(a.score, a.i[0], a.j[0])
        self.a, self.buffers, self.shape = a, buffers, self.shape_of(a, limit is not None)
        self.scratch: list[Scratch] = []
        self.qb, self.kb, self.i, self.j, self.e, self.d = (Axis(n) for n in ("qb", "kb", "il", "jl", "el", "dl"))
        s = self.shape
        block = self.qb if limit is None else from_both_ends(self.qb, blocks_of(a.i[1], s.queries))
        self.row, self.key = block * s.queries + self.i, self.kb * s.keys + self.j
        self.wide = least(s.queries, a.i[1] - block * s.queries, a.i[1])
        self.keys = a.j[1]
        if limit is not None:  # the last query of the block sees keys up to its own limit
            self.keys = op("max", const(0), op("min", self.keys, block * s.queries + self.wide + limit))
            self.near: Expr = op("min", const(s.keys), self.keys - self.kb * s.keys)
        else:
            self.near = least(s.keys, self.keys - self.kb * s.keys, self.keys)
        self.chains = blocks_of(self.near, CHAINS)
        self.lanes = const(s.queries) if const_of(self.wide) is not None else blocks_of(self.wide, LANES) * LANES

    def shape_of(self, a: Attention, limited: bool) -> Shape:
        """`limited`: by a causal mask."""
        return choose_shape(a)

    def array(self, name: str, size: int, dtype: dt.DType = dt.f32) -> str:
        self.scratch.append(Scratch(name, dtype, size))
        return name

    def at(self, load: Load) -> Load:
        """An operand with the block's axes in place of the Stage's."""
        a = self.a
        out = substitute(load, {a.i[0]: self.row, a.j[0]: self.key, a.e[0]: self.e, a.d[0]: self.d})
        assert isinstance(out, Load)
        return out

    def transposed(self, name: str, size: int, source: Load, across: tuple[Axis, Expr]) -> Stmt:
        """name[across, i] = source(i, across), as f32."""
        axis, extent = across
        w = self.shape.queries
        self.array(name, size)
        unit = stride_along(source, axis, self.buffers)
        lies = stride_along(source, self.i, self.buffers) is not None
        if unit is not None and const_of(unit) == 1 and source.dtype in TRANSPOSED and lies:
            return Transpose(name, w, self.i, self.wide, axis, extent, source)
        store = StoreStmt(name, (axis * w + self.i,), convert(source, dt.f32))
        return over(axis, extent, over(self.i, self.wide, store, vector=True))

    # ------------------------------------------------------------ the score
    def scaled(self) -> tuple[list[Stmt], Expr]:
        """(what multiplies the transposed queries, the score without that factor): q k c -> (q c) k where only q k c is used."""
        score = self.a.score
        users = {x for x in walk(score) if DOT in x.args}
        factors = [x.args[1] for x in users if isinstance(x, Op) and x.name == "mul" and x.args[0] is DOT and isinstance(x.args[1], Const)]
        if len(users) != 1 or not factors:
            return [], score
        z = Axis("z")
        at = Load("qt", dt.f32, (z,))
        scale = over(z, const(self.shape.e * self.shape.queries), StoreStmt("qt", (z,), op("mul", at, factors[0])), vector=True)
        return [scale], substitute(score, dict.fromkeys(users, DOT))

    def score(self, of_dot: Expr) -> tuple[list[Stmt], Expr]:
        """(what fills scratch before a block, the score of [j, i] reading it)."""
        a, w = self.a, self.shape.queries
        dot = Load("s", dt.f32, (self.j * w + self.i,))
        value = substitute(of_dot, {DOT: dot, a.i[0]: self.row, a.j[0]: self.key})
        fill: list[Stmt] = []
        table: dict[Expr, Expr] = {}
        for x in deps.loads_in(value):
            if x is dot or self.i not in deps.free_axes(x):
                continue
            if stride_along(x, self.i, self.buffers) is const(0) and (x.mask is None or self.i not in deps.free_axes(x.mask)):
                table[x] = substitute(x, {self.i: const(0), self.qb: const(0)})  # the same for every query
                continue
            name = f"mask{len(fill)}"
            if x.dtype in TRANSPOSED and x.mask is None:
                fill.append(self.transposed(name, self.shape.keys * w, x, (self.j, self.near)))
                here = Load(name, dt.f32, (self.j * w + self.i,))
                table[x] = op("ne", here, Const(dt.f32, 0.0)) if x.dtype is dt.bool_ else convert(here, x.dtype)
                if x.dtype is not dt.bool_:
                    table[Cast(dt.f32, x)] = here
                continue
            self.array(name, self.shape.keys * w, x.dtype)
            store = StoreStmt(name, (self.j * w + self.i,), x)
            fill.append(over(self.j, self.near, over(self.i, self.wide, store, vector=True)))
            table[x] = Load(name, x.dtype, (self.j * w + self.i,))
        return fill, substitute(value, table)

    # ------------------------------------------------------------ statements
    def softmax(self, score: Expr) -> tuple[Stmt, ...]:
        """Scores become weights relative to the running maximum; `top`, `sum` and `shrink` follow."""
        w, i, j = self.shape.queries, self.i, self.j
        cell = (j * w + i,)
        s = Load("s", dt.f32, cell)
        lane = {n: Load(n, dt.f32, (i,)) for n in ("top", "sum")}
        new, base = Var("new", dt.f32), Var("base", dt.f32)
        statements: list[Stmt] = []
        if score is not s:
            statements.append(over(j, self.near, StoreStmt("s", cell, score)))
        total = op("mul", lane["sum"], Load("shrink", dt.f32, (i,)))
        rest = self.chains * CHAINS - self.near
        if const_of(rest) != 0:  # so that all chains are of one length
            x = Axis("xl")
            statements.append(over(x, rest, StoreStmt("s", ((self.near + x) * w + i,), LOWEST)))
        statements += [
            Let(new, op("max", lane["top"], self.fold("max", LOWEST))),
            Let(base, select(op("eq", new, LOWEST), Const(dt.f32, 0.0), new)),  # -inf - -inf would be NaN
            StoreStmt("shrink", (i,), op("exp", op("sub", lane["top"], base))),
            StoreStmt("top", (i,), new),
            over(j, self.chains * CHAINS, StoreStmt("s", cell, op("exp", op("sub", s, base)))),
            StoreStmt("sum", (i,), op("add", total, self.fold("add", Const(dt.f32, 0.0)))),
        ]
        return tuple(statements)

    def fold(self, name: str, init: Expr) -> Expr:
        """The scores of a lane, reduced over the block's keys: every fourth key in a chain of its own."""
        r, prefix, w = Axis(f"r_{name}"), f"{name}_", self.shape.queries
        old, other = ([Var(f"{prefix}{side}{c}", dt.f32) for c in range(CHAINS)] for side in "ab")
        values = [Load("s", dt.f32, ((r * CHAINS + c) * w + self.i,)) for c in range(CHAINS)]
        update = tuple(op(name, a, v) for a, v in zip(old, values, strict=True))
        combine = tuple(op(name, a, b) for a, b in zip(old, other, strict=True))
        fold = Fold(((r, self.chains),), (init,) * CHAINS, update, combine, prefix=prefix)
        pairs = [op(name, fold.picking(c), fold.picking(c + 1)) for c in range(0, CHAINS, 2)]
        return op(name, *pairs)

    def operand(self, name: str, load: Load, row: tuple[Axis, int], pitch: int, plain: bool) -> tuple[list[Stmt], Load]:
        """A block of K or V: read where it lies if that is possible, else copied to scratch as f32."""
        if plain and load.dtype is dt.f32:
            return [], load
        self.array(name, self.shape.keys * pitch)
        axis, extent = row
        store = StoreStmt(name, (self.j * pitch + axis,), convert(load, dt.f32))
        copy = over(self.j, self.near, over(axis, const(extent), store, vector=True))
        return [copy], Load(name, dt.f32, (self.j * pitch + axis,))

    def block(self, of_dot: Expr) -> tuple[Stmt, ...]:
        """One block of keys."""
        a, s = self.a, self.shape
        w, i, j, d = s.queries, self.i, self.j, self.d
        k, v = self.at(a.k), self.at(a.v)
        unit = stride_along(v, d, self.buffers)
        copy_k, k = self.operand("kf", k, (self.e, s.e), s.e, True)
        copy_v, v = self.operand("vf", v, (d, s.d), s.pitch, s.d % LANES == 0 and unit is not None and const_of(unit) == 1)
        fill, score = self.score(of_dot)
        qt = Load("qt", dt.f32, (self.e * w + i,))
        o = Load("o", dt.f32, (i * s.pitch + d,))
        shrunk = StoreStmt("o", o.index, op("mul", o, Load("shrink", dt.f32, (i,))))
        return (
            *copy_k, *fill,
            *(self.product(k, qt, first) for first in range(0, s.e, DEPTH)),
            over(i, self.lanes, *self.softmax(score), vector=True),
            *copy_v,
            over(i, self.wide, over(d, const(s.pitch), shrunk, vector=True)),
            Product("o", s.pitch, i, self.wide, d, const(s.d), j, self.near, Load("s", dt.f32, (j * w + i,)), v, add=True),
        )  # fmt: skip

    def product(self, k: Load, qt: Load, first: int) -> Stmt:
        """Scores of the block from elements `first` on of the rows."""
        s, count = self.shape, min(DEPTH, self.shape.e - first)
        a, b = (substitute(x, {self.e: self.e + first}) for x in (k, qt))
        assert isinstance(a, Load)
        assert isinstance(b, Load)
        return Product("s", s.queries, self.j, self.near, self.i, self.wide, self.e, const(count), a, b, add=first > 0)

    def queries(self) -> Stmt:
        """qt[E, W]."""
        return self.transposed("qt", self.shape.e * self.shape.queries, self.at(self.a.q), (self.e, const(self.shape.e)))

    def body(self, stores: tuple[Store, ...]) -> tuple[Stmt, ...]:
        a, s = self.a, self.shape
        w, i, d = s.queries, self.i, self.d
        zero = Const(dt.f32, 0.0)
        scale, of_dot = self.scaled()
        transpose = self.queries()
        for name, size in (("s", s.keys * w), ("top", w), ("sum", w), ("shrink", w), ("o", w * s.pitch)):
            self.array(name, size)
        z = Axis("z")
        start = (
            over(i, const(w), StoreStmt("top", (i,), LOWEST), StoreStmt("sum", (i,), zero), vector=True),
            over(z, const(w * s.pitch), StoreStmt("o", (z,), zero), vector=True),
        )
        blocks = over(self.kb, blocks_of(self.keys, s.keys), *self.block(of_dot))
        portion = op("div", Const(dt.f32, 1.0), Load("sum", dt.f32, (i,)))
        if a.safe:
            portion = select(op("eq", Load("top", dt.f32, (i,)), LOWEST), zero, portion)
        invert = over(i, const(w), StoreStmt("shrink", (i,), portion), vector=True)
        result = op("mul", Load("o", dt.f32, (i * s.pitch + d,)), Load("shrink", dt.f32, (i,)))
        table: dict[Expr, Expr] = {OUT: result, a.i[0]: self.row, a.d[0]: d}
        out = tuple(StoreStmt(t.buf, tuple(substitute(x, table) for x in t.index), substitute(t.value, table), t.mode) for t in stores)
        return (transpose, *scale, *start, blocks, invert, over(i, self.wide, over(d, const(s.d), *out, vector=True)))


class _PairedFormer(_Former):
    """The same with products of pairs."""

    def shape_of(self, a: Attention, limited: bool) -> Shape:
        return paired_shape(a, LIMITED_KEYS if limited else PAIRED_KEYS)

    def scaled(self) -> tuple[list[Stmt], Expr]:
        return [], self.a.score  # q is not to be rounded again

    def plain(self, load: Load) -> Load:
        """An operand of a block, its indices affine in the block's axes."""
        x = self.at(load)
        return Load(x.buf, x.dtype, tuple(linear(i).expr() for i in x.index))

    def interleaved(self, name: str, columns: Axis, k: Axis, width: int, room: int) -> Load:
        """Where (k, column) lies in a scratch array of pairs."""
        self.array(name, room * width, dt.bf16)
        return Load(name, dt.bf16, (op("floordiv", k, const(2)) * (2 * width) + columns * 2 + op("mod", k, const(2)),))

    def queries(self) -> Stmt:
        w, room = self.shape.queries, -(-self.shape.e // TALL) * TALL
        self.qt = self.interleaved("qt", self.i, self.e, w, room)
        return Interleave("qt", 2 * w, self.i, self.wide, self.e, const(self.shape.e), room, self.plain(self.a.q))

    def block(self, of_dot: Expr) -> tuple[Stmt, ...]:
        a, s, i, j = self.a, self.shape, self.i, self.j
        w, vectors = s.queries, s.queries // LANES
        kt, kl, dv, dl, z, out = (Axis(n) for n in ("kt", "kl", "dv", "dc", "z", "ol"))
        tile = Paired(
            "s", TALL, vectors, kl, least(TALL, self.near - kt * TALL, self.near), (), self.e, s.e, i,
            substitute(self.plain(a.k), {j: kt * TALL + kl}), self.qt, first=kt * TALL,  # type: ignore[arg-type]
        )  # fmt: skip
        fill, score = self.score(of_dot)
        done = self.chains * CHAINS
        none = over(z, const(s.keys) - done, StoreStmt("s", ((done + z) * w + i,), Const(dt.f32, 0.0)))
        self.array("pt", w * s.keys)
        self.array("p", w * s.keys, dt.bf16)
        self.array("ov", w * TALL)
        at = (i * s.keys + z,)
        weight = Cast(dt.bf16, Load("pt", dt.f32, at))
        transpose = Transpose("pt", s.keys, j, const(s.keys), i, const(w), Load("s", dt.f32, (j * w + i,)))
        rounded = over(i, const(w), over(z, const(s.keys), StoreStmt("p", at, weight), vector=True))
        left = dv * TALL
        v = substitute(self.plain(a.v), {self.d: left + dl})
        assert isinstance(v, Load)
        interleave = Interleave("vw", 2 * TALL, dl, least(TALL, s.d - left, const(s.d)), j, self.near, s.keys, v)
        p, interleaved = Load("p", dt.bf16, (i * s.keys + j,)), self.interleaved("vw", dl, j, TALL, s.keys)
        product = Paired("ov", w, TALL // LANES, i, self.lanes, (), j, s.keys, dl, p, interleaved)
        o, new = Load("o", dt.f32, (out * s.pitch + left + dl,)), Load("ov", dt.f32, (out * TALL + dl,))
        sums = op("fma", o, Load("shrink", dt.f32, (out,)), new)
        merge = over(out, self.wide, over(dl, const(TALL), StoreStmt("o", o.index, sums), vector=True))
        return (
            *fill,
            over(kt, blocks_of(self.near, TALL), tile),
            over(i, self.lanes, *self.softmax(score), *([] if const_of(done) == s.keys else [none]), vector=True),
            transpose, rounded,
            over(dv, const(s.pitch // TALL), interleave, product, merge),
        )  # fmt: skip


def form_attention(a: Attention, buffers: Mapping[str, Buffer], target: Target) -> Kernel:
    """The kernel of a Stage that was recognised."""
    (store,) = a.stage.stores
    stores = (replace(store, value=a.value),)
    rows = const_of(a.i[1])
    grid = a.batch
    if rows is not None and rows <= FEW:
        few = FewRows(a, buffers)
        body, scratch = few.body(stores), few.scratch
    else:
        former = (_PairedFormer if target.vectors.pairs and has_pairs(a, buffers) else _Former)(a, buffers)
        rows = former.shape.queries
        body, scratch = former.body(stores), former.scratch
        grid = (*grid, (former.qb, blocks_of(a.i[1], rows)))
    e, d = const_of(a.e[1]) or 1, const_of(a.d[1]) or 1
    grain = deps.grain(WORK, deps.repeated({(): rows * (e + d)}, (a.j[1],)))
    group = Group([a.stage], a.stage.axes, True, stages=[a.stage])
    return replace(finish("attention", grid, grain, tuple(scratch), body, buffers, group), kind="attention")
