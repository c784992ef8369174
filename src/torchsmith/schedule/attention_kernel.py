"""Attention -> Kernel: scores of one block of queries and keys at a time, in scratch; a running maximum and sum (online softmax).

In: an Attention, its Stage's stores, layouts. Out: a Kernel over (batch axes, blocks of W queries):

    turn q[W, E] into qt[E, W];  top = -inf, sum = 0, o[W, D] = 0
    for each block of J keys:
        s[J, W] = k[J, E] @ qt;  s = score(s);  new = max(top, s over J);  shrink = exp(top - new);  s = exp(s - new)
        sum = sum * shrink + s over J;  o *= shrink;  o += s^T @ v[J, D]
    out = o / sum

Queries run over lanes, so that K and V are read where they lie, and maximum, exponential and sum go down the lanes without reductions.
What a score reads of a matrix over queries and keys (a mask) is turned into scratch like q. Keys that a causal mask leaves out for a whole
block are not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..ir import dtype as dt
from ..ir.expr import Axis, Cast, Const, Expr, Fold, Load, Op, Var, const, convert, op, select, substitute, walk
from ..ir.kernel import Kernel, Let, Loop, Product, Scratch, Stmt, StoreStmt, Turn
from ..ir.linear import const_of, linear
from ..ir.program import Buffer, Store
from . import deps
from .attention import DOT, OUT, Attention
from .draft import finish
from .group import Group

LANES = 16
QUERIES = (48, 32, 16)  # widths of a block of queries
KEYS = 64  # the most keys of a block
BLOCK_BYTES = 40 << 10  # of q and o, which stay in the first-level cache
WORK = 1 << 20  # multiply-adds worth a thread
TURNED = frozenset({dt.f32, dt.bf16, dt.f16, dt.bool_})
LOWEST = Const(dt.f32, float("-inf"))


@dataclass(frozen=True)
class Shape:
    """Sizes of a block: W queries, J keys, rows of E and D elements (`pitch`: D rounded up to whole vectors)."""

    queries: int
    keys: int
    e: int
    d: int

    @property
    def pitch(self) -> int:
        return -(-self.d // LANES) * LANES


def choose_shape(a: Attention) -> Shape:
    """Blocks of queries as wide as the first-level cache and the number of queries allow; blocks of keys of one size."""
    e, d, rows, keys = (const_of(x[1]) for x in (a.e, a.d, a.i, a.j))
    assert e is not None and d is not None
    row = 4 * (e + -(-d // LANES) * LANES)
    fits = [w for w in QUERIES if w * row <= BLOCK_BYTES and (rows is None or w < rows + LANES)] or [LANES]
    if keys is None:
        return Shape(fits[0], KEYS, e, d)
    return Shape(fits[0], -(-keys // -(-keys // KEYS)), e, d)


def _blocks(n: Expr, size: int) -> Expr:
    return op("floordiv", n + (size - 1), const(size))


def _least(size: int, rest: Expr, whole: Expr) -> Expr:
    """min(size, rest), as a constant where blocks divide the whole."""
    known = const_of(whole)
    if known is not None and (known % size == 0 or known < size):
        return const(min(size, known))
    return op("min", const(size), rest)


def stride_along(load: Load, axis: Axis, buffers: Mapping[str, Buffer]) -> Expr | None:
    """Elements from one step of `axis` to the next; None where the address is not linear in it."""
    layout = buffers[load.buf].layout
    assert layout is not None
    total: Expr = const(0)
    for i, step in zip(load.index, layout.strides, strict=True):
        total = total + i * step
    lin = linear(total)
    if any(axis in set(walk(atom)) and atom is not axis for atom in lin.terms):
        return None
    return lin.terms.get(axis, const(0))


class _Former:
    """State of making one kernel."""

    def __init__(self, a: Attention, buffers: Mapping[str, Buffer]) -> None:
        self.a, self.buffers, self.shape = a, buffers, choose_shape(a)
        self.scratch: list[Scratch] = []
        self.qb, self.kb, self.i, self.j, self.e, self.d = (Axis(n) for n in ("qb", "kb", "il", "jl", "el", "dl"))
        s = self.shape
        self.row, self.key = self.qb * s.queries + self.i, self.kb * s.keys + self.j
        self.wide = _least(s.queries, a.i[1] - self.qb * s.queries, a.i[1])
        limit = key_limit(a.score, a.i[0], a.j[0])
        self.keys = a.j[1]
        if limit is not None:  # the last query of the block sees keys up to its own limit
            self.keys = op("max", const(0), op("min", self.keys, self.qb * s.queries + self.wide + limit))
            self.near: Expr = op("min", const(s.keys), self.keys - self.kb * s.keys)
        else:
            self.near = _least(s.keys, self.keys - self.kb * s.keys, self.keys)
        self.lanes = const(s.queries) if const_of(self.wide) is not None else _blocks(self.wide, LANES) * LANES

    def array(self, name: str, size: int, dtype: dt.DType = dt.f32) -> str:
        self.scratch.append(Scratch(name, dtype, size))
        return name

    def over(self, axis: Axis, extent: Expr, *body: Stmt, vector: bool = False) -> Loop:
        return Loop(axis, extent, "vector" if vector else "serial", body)

    def at(self, load: Load) -> Load:
        """An operand with the block's axes in place of the Stage's."""
        a = self.a
        out = substitute(load, {a.i[0]: self.row, a.j[0]: self.key, a.e[0]: self.e, a.d[0]: self.d})
        assert isinstance(out, Load)
        return out

    def turned(self, name: str, size: int, source: Load, across: tuple[Axis, Expr]) -> Stmt:
        """name[across, i] = source(i, across), as f32."""
        axis, extent = across
        w = self.shape.queries
        self.array(name, size)
        unit = stride_along(source, axis, self.buffers)
        if unit is not None and const_of(unit) == 1 and source.dtype in TURNED and stride_along(source, self.i, self.buffers) is not None:
            return Turn(name, w, self.i, self.wide, axis, extent, source)
        store = StoreStmt(name, (axis * w + self.i,), convert(source, dt.f32))
        return self.over(axis, extent, self.over(self.i, self.wide, store, vector=True))

    # ------------------------------------------------------------ the score
    def score(self) -> tuple[list[Stmt], Expr]:
        """(what fills scratch before a block, the score of [j, i] reading it)."""
        a, w = self.a, self.shape.queries
        dot = Load("s", dt.f32, (self.j * w + self.i,))
        value = substitute(a.score, {DOT: dot, a.i[0]: self.row, a.j[0]: self.key})
        fill: list[Stmt] = []
        table: dict[Expr, Expr] = {}
        for x in deps.loads_in(value):
            if x is dot or self.i not in deps.free_axes(x):
                continue
            if stride_along(x, self.i, self.buffers) is const(0) and (x.mask is None or self.i not in deps.free_axes(x.mask)):
                table[x] = substitute(x, {self.i: const(0), self.qb: const(0)})  # the same for every query
                continue
            name = f"mask{len(fill)}"
            if x.dtype in TURNED and x.mask is None:
                fill.append(self.turned(name, self.shape.keys * w, x, (self.j, self.near)))
                here = Load(name, dt.f32, (self.j * w + self.i,))
                table[x] = op("ne", here, Const(dt.f32, 0.0)) if x.dtype is dt.bool_ else convert(here, x.dtype)
                if x.dtype is not dt.bool_:
                    table[Cast(dt.f32, x)] = here
                continue
            self.array(name, self.shape.keys * w, x.dtype)
            store = StoreStmt(name, (self.j * w + self.i,), x)
            fill.append(self.over(self.j, self.near, self.over(self.i, self.wide, store, vector=True)))
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
            statements.append(self.over(j, self.near, StoreStmt("s", cell, score)))
        total = op("mul", lane["sum"], Load("shrink", dt.f32, (i,)))
        statements += [
            Let(new, op("max", lane["top"], self.fold("max", LOWEST, s))),
            Let(base, select(op("eq", new, LOWEST), Const(dt.f32, 0.0), new)),  # -inf - -inf would be NaN
            StoreStmt("shrink", (i,), op("exp", op("sub", lane["top"], base))),
            StoreStmt("top", (i,), new),
            self.over(j, self.near, StoreStmt("s", cell, op("exp", op("sub", s, base)))),
            StoreStmt("sum", (i,), op("add", total, self.fold("add", Const(dt.f32, 0.0), s))),
        ]
        return tuple(statements)

    def fold(self, name: str, init: Expr, s: Load) -> Expr:
        """The scores of a lane, reduced over the block's keys."""
        r, prefix = Axis(f"r_{name}"), f"{name}_"
        old, other = Var(f"{prefix}a0", dt.f32), Var(f"{prefix}b0", dt.f32)
        value = substitute(s, {self.j: r})
        return Fold(((r, self.near),), (init,), (op(name, old, value),), (op(name, old, other),), prefix=prefix)

    def operand(self, name: str, load: Load, row: tuple[Axis, int], pitch: int, plain: bool) -> tuple[list[Stmt], Load]:
        """A block of K or V: read where it lies if that is possible, else copied to scratch as f32."""
        if plain and load.dtype is dt.f32:
            return [], load
        self.array(name, self.shape.keys * pitch)
        axis, extent = row
        store = StoreStmt(name, (self.j * pitch + axis,), convert(load, dt.f32))
        copy = self.over(self.j, self.near, self.over(axis, const(extent), store, vector=True))
        return [copy], Load(name, dt.f32, (self.j * pitch + axis,))

    def block(self) -> tuple[Stmt, ...]:
        """One block of keys."""
        a, s = self.a, self.shape
        w, i, j, d = s.queries, self.i, self.j, self.d
        k, v = self.at(a.k), self.at(a.v)
        unit = stride_along(v, d, self.buffers)
        copy_k, k = self.operand("kf", k, (self.e, s.e), s.e, True)
        copy_v, v = self.operand("vf", v, (d, s.d), s.pitch, s.d % LANES == 0 and unit is not None and const_of(unit) == 1)
        fill, score = self.score()
        qt = Load("qt", dt.f32, (self.e * w + i,))
        o = Load("o", dt.f32, (i * s.pitch + d,))
        shrunk = StoreStmt("o", o.index, op("mul", o, Load("shrink", dt.f32, (i,))))
        return (
            *copy_k, *fill,
            Product("s", w, j, self.near, i, self.wide, self.e, const(s.e), k, qt),
            self.over(i, self.lanes, *self.softmax(score), vector=True),
            *copy_v,
            self.over(i, self.wide, self.over(d, const(s.pitch), shrunk, vector=True)),
            Product("o", s.pitch, i, self.wide, d, const(s.d), j, self.near, Load("s", dt.f32, (j * w + i,)), v, add=True),
        )  # fmt: skip

    def body(self, stores: tuple[Store, ...]) -> tuple[Stmt, ...]:
        a, s = self.a, self.shape
        w, i, d = s.queries, self.i, self.d
        zero = Const(dt.f32, 0.0)
        turn = self.turned("qt", s.e * w, self.at(a.q), (self.e, const(s.e)))
        for name, size in (("s", s.keys * w), ("top", w), ("sum", w), ("shrink", w), ("o", w * s.pitch)):
            self.array(name, size)
        z = Axis("z")
        start = (
            self.over(i, const(w), StoreStmt("top", (i,), LOWEST), StoreStmt("sum", (i,), zero), vector=True),
            self.over(z, const(w * s.pitch), StoreStmt("o", (z,), zero), vector=True),
        )
        blocks = self.over(self.kb, _blocks(self.keys, s.keys), *self.block())
        portion = op("div", Const(dt.f32, 1.0), Load("sum", dt.f32, (i,)))
        if a.safe:
            portion = select(op("eq", Load("top", dt.f32, (i,)), LOWEST), zero, portion)
        invert = self.over(i, const(w), StoreStmt("shrink", (i,), portion), vector=True)
        result = op("mul", Load("o", dt.f32, (i * s.pitch + d,)), Load("shrink", dt.f32, (i,)))
        table: dict[Expr, Expr] = {OUT: result, a.i[0]: self.row, a.d[0]: d}
        out = tuple(StoreStmt(t.buf, tuple(substitute(x, table) for x in t.index), substitute(t.value, table), t.mode) for t in stores)
        return (turn, *start, blocks, invert, self.over(i, self.wide, self.over(d, const(s.d), *out, vector=True)))


def form_attention(a: Attention, buffers: Mapping[str, Buffer]) -> Kernel:
    """The kernel of a Stage that was recognised."""
    former = _Former(a, buffers)
    (store,) = a.stage.stores
    body = former.body((replace(store, value=a.value),))
    s = former.shape
    grid = (*a.batch, (former.qb, _blocks(a.i[1], s.queries)))
    grain = const(max(1, WORK // (s.queries * max(1, deps.estimate(a.j[1])) * (s.e + s.d))))
    return finish("attention", grid, grain, tuple(former.scratch), body, buffers, Group([a.stage], a.stage.axes, True, stages=[a.stage]))


# ---------------------------------------------------------------- causal masks


def key_limit(score: Expr, i: Axis, j: Axis) -> Expr | None:
    """c such that the score is -inf, whatever the product, for every j > i + c; None where no such c can be read off."""
    if not (isinstance(score, Op) and score.name == "where"):
        return None
    test, yes, no = score.args
    found = [b for c in _conjuncts(test) if (b := _bound(c, i, j)) is not None] if no is LOWEST else []
    if yes is LOWEST and isinstance(test, Op) and test.name in _OPPOSITE:
        found = [b for b in (_bound(op(_OPPOSITE[test.name], *test.args), i, j),) if b is not None]
    return found[0] if found else None


_OPPOSITE = {"gt": "le", "ge": "lt", "lt": "ge", "le": "gt"}


def _conjuncts(e: Expr) -> list[Expr]:
    return [x for a in e.args for x in _conjuncts(a)] if isinstance(e, Op) and e.name == "and" else [e]


def _bound(test: Expr, i: Axis, j: Axis) -> Expr | None:
    """c of a test that implies j <= i + c."""
    if not (isinstance(test, Op) and test.name in _OPPOSITE):
        return None
    sides = [_as_index(x) for x in test.args]
    if sides[0] is None or sides[1] is None:
        return None
    low, high = (sides[0], sides[1]) if test.name in ("lt", "le") else (sides[1], sides[0])
    rest = linear(high - low + (-1 if test.name in ("lt", "gt") else 0))  # rest >= 0
    terms = dict(rest.terms)
    if const_of(terms.pop(i, const(0))) != 1 or const_of(terms.pop(j, const(0))) != -1 or deps.free_axes(rest.expr()) - {i, j}:
        return None
    return substitute(rest.expr(), {i: const(0), j: const(0)})


def _as_index(e: Expr) -> Expr | None:
    """An integer expression of axes and constants as an index."""
    if e.dtype is dt.index:
        return e
    if isinstance(e, Cast) and e.args[0].dtype is dt.index:
        return e.args[0]
    if isinstance(e, Const) and e.dtype.kind in ("int", "uint"):
        return const(int(e.value))
    if isinstance(e, Op) and e.name in ("add", "sub") and e.dtype.kind == "int":
        sides = [_as_index(x) for x in e.args]
        return None if sides[0] is None or sides[1] is None else op(e.name, sides[0], sides[1])
    return None
