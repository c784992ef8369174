"""Attention of few queries (a model that writes one token after the other): lanes run along rows of K and V. In, out: as attention_kernel.

    for each block of J keys:
        s[r, j] = score(Fold_e q[r, e] * k[j, e]);  new = max(top, s over j);  shrink = exp(top - new);  s = exp(s - new)
        sum = sum * shrink + s over j;  o *= shrink;  o[r, D] += s[r, J] @ v[J, D]
    out = o / sum

K and V are read once, in order, as they lie.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import dtype as dt
from ...ir.blocks import Product
from ...ir.expr import Axis, Const, Expr, Fold, Load, Var, const, convert, op, select, substitute
from ...ir.kernel import Let, Scratch, Stmt, StoreStmt
from ...ir.linear import const_of
from ...ir.program import Buffer, Store
from .attention import DOT, OUT, Attention
from .attention_parts import LANES, LOWEST, blocks_of, key_limit, least, over, stride_along

FEW = 3  # queries up to which a vector of queries would be mostly empty
KEYS = 256  # of a block


class FewRows:
    """State of making one kernel."""

    def __init__(self, a: Attention, buffers: Mapping[str, Buffer]) -> None:
        self.a, self.buffers = a, buffers
        self.scratch: list[Scratch] = []
        rows, width = const_of(a.i[1]), const_of(a.d[1])
        assert rows is not None and width is not None
        self.rows, self.width, self.pitch = rows, width, -(-width // LANES) * LANES
        self.i, self.kb, self.j, self.d = (Axis(n) for n in ("il", "kb", "jl", "dl"))
        self.key = self.kb * KEYS + self.j
        self.keys = a.j[1]
        limit = key_limit(a.score, a.i[0], a.j[0])
        if limit is not None:
            self.keys = op("max", const(0), op("min", self.keys, limit + rows))
        self.near = least(KEYS, self.keys - self.kb * KEYS, self.keys)

    def array(self, name: str, size: int) -> None:
        self.scratch.append(Scratch(name, dt.f32, size))

    def score(self) -> StoreStmt:
        """s[r, j], each a product along the lanes."""
        a = self.a
        at: dict[Expr, Expr] = {a.i[0]: self.i, a.j[0]: self.key}
        value = substitute(substitute(a.score, {DOT: a.dot}), at)
        return StoreStmt("s", (self.i * KEYS + self.j,), value)

    def reduced(self, name: str, init: Const) -> Fold:
        r, prefix = Axis(f"r_{name}"), f"{name}_"
        old, other = Var(f"{prefix}a0", dt.f32), Var(f"{prefix}b0", dt.f32)
        s = Load("s", dt.f32, (self.i * KEYS + r,))
        return Fold(((r, self.near),), (init,), (op(name, old, s),), (op(name, old, other),), prefix=prefix)

    def softmax(self) -> tuple[Stmt, ...]:
        i, j = self.i, self.j
        top, total, shrink = (Load(n, dt.f32, (i,)) for n in ("top", "sum", "shrink"))
        new, base = Var("new", dt.f32), Var("base", dt.f32)
        cell = Load("s", dt.f32, (i * KEYS + j,))
        o = Load("o", dt.f32, (i * self.pitch + self.d,))
        return (
            Let(new, op("max", top, self.reduced("max", LOWEST))),
            Let(base, select(op("eq", new, LOWEST), Const(dt.f32, 0.0), new)),  # -inf - -inf would be NaN
            StoreStmt("shrink", (i,), op("exp", op("sub", top, base))),
            StoreStmt("top", (i,), new),
            over(j, self.near, StoreStmt("s", cell.index, op("exp", op("sub", cell, base))), vector=True),
            StoreStmt("sum", (i,), op("add", op("mul", total, shrink), self.reduced("add", Const(dt.f32, 0.0)))),
            over(self.d, const(self.pitch), StoreStmt("o", o.index, op("mul", o, shrink)), vector=True),
        )

    def values(self) -> tuple[list[Stmt], Load]:
        """V where it lies, or a copy of the block."""
        a = self.a
        v = substitute(a.v, {a.j[0]: self.key, a.d[0]: self.d})
        assert isinstance(v, Load)
        unit = stride_along(v, self.d, self.buffers)
        if v.dtype is dt.f32 and self.width % LANES == 0 and unit is not None and const_of(unit) == 1:
            return [], v
        self.array("vf", KEYS * self.pitch)
        at = (self.j * self.pitch + self.d,)
        copy = over(self.d, const(self.width), StoreStmt("vf", at, convert(v, dt.f32)), vector=True)
        return [over(self.j, self.near, copy)], Load("vf", dt.f32, at)

    def body(self, stores: tuple[Store, ...]) -> tuple[Stmt, ...]:
        a, i, d = self.a, self.i, self.d
        rows, zero = const(self.rows), Const(dt.f32, 0.0)
        for name, size in (("s", self.rows * KEYS), ("top", LANES), ("sum", LANES), ("shrink", LANES), ("o", self.rows * self.pitch)):
            self.array(name, size)
        z = Axis("z")
        copy, v = self.values()
        weights = Load("s", dt.f32, (i * KEYS + self.j,))
        block = (
            over(self.j, self.near, over(i, rows, self.score())),
            over(i, rows, *self.softmax()),
            *copy,
            Product("o", self.pitch, i, rows, d, a.d[1], self.j, self.near, weights, v, add=True),
        )
        portion = op("div", Const(dt.f32, 1.0), Load("sum", dt.f32, (i,)))
        if a.safe:
            portion = select(op("eq", Load("top", dt.f32, (i,)), LOWEST), zero, portion)
        result = op("mul", Load("o", dt.f32, (i * self.pitch + d,)), portion)
        table: dict[Expr, Expr] = {OUT: result, a.i[0]: i, a.d[0]: d}
        out = tuple(StoreStmt(t.buf, tuple(substitute(x, table) for x in t.index), substitute(t.value, table), t.mode) for t in stores)
        return (
            over(i, rows, StoreStmt("top", (i,), LOWEST), StoreStmt("sum", (i,), zero)),
            over(z, const(self.rows * self.pitch), StoreStmt("o", (z,), zero), vector=True),
            over(self.kb, blocks_of(self.keys, KEYS), *block),
            over(i, rows, over(d, a.d[1], *out, vector=True)),
        )
