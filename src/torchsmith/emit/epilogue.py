"""What reads a register tile's sums -> C text: from registers where the tile is whole and the statements are short, else from the scratch.

In: a Contract being printed and the statements behind it. Out: lines in the emitter's open scope.
"""

from __future__ import annotations

from ..ir import dtype as dt
from ..ir.blocks import Contract
from ..ir.expr import Expr, Load, Op, const, substitute, walk
from ..ir.kernel import Let, Loop, Stmt, StoreStmt
from ..ir.linear import const_of
from .c import Emitter
from .math import MATH
from .tile import empty_registers, named_test, plus, text_of, times, vectors_of
from .values import Val


def fetch_results(self: Emitter, s: Contract, rest: tuple[Stmt, ...], partial: bool) -> None:
    """Ask for the lines that the epilogue will write, and read elsewhere, while the sums are taken. A partial tile does where values are
    long (the gates of a cell): of few rows most tiles are partial, and what a long epilogue waits for is little beside what it takes."""
    inner = _columns_loop(s, rest)
    if inner is None or (partial and _register_loop(s, rest) is not None):
        return
    columns = self.ranges.interval(inner.extent).hi
    if columns is None:
        return
    wanted: dict[tuple[str, str], int] = {}
    values: list[Expr] = []
    for x in inner.body:
        values += [x.value] if isinstance(x, Let | StoreStmt) else []
    stored = [(x.buf, x.index, 1) for x in inner.body if isinstance(x, StoreStmt)]
    for buf, index, write in (*stored, *((e.buf, e.index, 0) for e in walk(*values) if isinstance(e, Load) and e.buf != s.acc)):
        at = self.address(buf, index)
        if const_of(at.terms.get(inner.axis, const(0))) != 1 or s.m not in at.terms or any(s.m in set(walk(t)) for t in at.terms if t is not s.m):
            continue
        start = text_of(self, substitute(at.expr(), {s.m: const(0), inner.axis: const(0)}))
        name, dtype = self.base(buf)
        for m in range(s.rows):
            row = plus(start, times(str(m), text_of(self, at.terms[s.m])))
            for line in range(0, columns * dtype.itemsize, 64):
                wanted.setdefault((f"{name} + {plus(row, str(line // dtype.itemsize))}", buf), write)
    for (place, _), write in wanted.items():
        self.line(f"__builtin_prefetch({place}, {write});")


def epilogue(self: Emitter, s: Contract, rest: tuple[Stmt, ...], names: list[tuple[str, str]], partial: bool) -> None:
    """`rest`, from registers where the tile is whole and the statements are short; else from the scratch."""
    inner = None if partial else _register_loop(s, rest)
    if inner is not None:
        whole = [f"{text_of(self, e)} == {n}" for e, n in ((s.live, s.rows), (inner.extent, s.width)) if const_of(e) is None]
        test = named_test(self, whole) if whole else ""
        if whole:
            self.open(f"if ({test}) {{", [])
        _from_registers(self, s, inner)
        if not whole:
            return
        self.close()
        self.open(f"if (!{test}) {{", [])
    for c, place in names:
        self.line(f"{place} = {c};")
    empty_registers(self)
    self.block(rest)
    if inner is not None:
        self.close()


def _register_loop(s: Contract, rest: tuple[Stmt, ...]) -> Loop | None:
    """The loop over columns, if `rest` is one nest over the tile with short values, stored along the columns."""
    inner = _columns_loop(s, rest)
    if inner is None or inner.axis is not s.n:
        return None
    if not all(isinstance(x, StoreStmt) and x.mode == "set" and _is_short(x.value) for x in inner.body):
        return None
    if const_of(s.live) not in (None, s.rows):
        return None
    return inner


def _columns_loop(s: Contract, rest: tuple[Stmt, ...]) -> Loop | None:
    """The loop over columns, if `rest` is one nest over the tile, rows outside."""
    if len(rest) != 1 or not isinstance(rest[0], Loop) or rest[0].axis is not s.m or rest[0].extent is not s.live:
        return None
    inner = rest[0].body[0]
    return inner if len(rest[0].body) == 1 and isinstance(inner, Loop) and inner.kind == "vector" else None


def _is_short(value: Expr) -> bool:
    """Few operators, and none that is a function of its own: the text stands there once for every accumulator."""
    ops = [e for e in walk(value) if isinstance(e, Op) and e.dtype is not dt.index]
    return len(ops) <= 16 and not any((e.name, t) in MATH for e in ops for t in ("f32", "f64"))


def _from_registers(self: Emitter, s: Contract, inner: Loop) -> None:
    """Store the whole tile, one column of vectors after the other: what belongs to a column is loaded once."""
    wide = const_of(inner.extent) or s.width
    before = self.vector_axis, self.vector_level, self.axis_text
    self.ranges.bind(s.m, const(s.rows))
    self.ranges.bind(s.n, inner.extent)
    for v in range(vectors_of(self, s)):
        alive = min(self.lanes, wide - self.lanes * v)
        if alive <= 0:
            break
        self.open("{", [s.n])
        self.vector_axis, self.vector_level, self.axis_text = s.n, len(self.scopes) - 1, str(self.lanes * v)
        self.tail = "" if alive == self.lanes else str(alive)
        for m in range(s.rows):
            self.open("{", [s.m])
            self.scopes[-1].memo[s.m] = Val(str(m), dt.index, False)
            for x in inner.body:
                for e in walk(x.value):  # type: ignore[union-attr]
                    if isinstance(e, Load) and e.buf == s.acc:
                        self.scopes[-1].memo[e] = Val(f"c{m}_{v}", s.dtype, True)
            self.block(inner.body)
            self.close()
        self.close()
        self.tail = ""
    self.vector_axis, self.vector_level, self.axis_text = before
