"""Kernels of one Stage whose order matters: scans, scatters, partial stores.

In: a closed Group. Out: a Kernel in which only axes that index the store run in parallel or over lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.expr import Axis, Expr, Var
from ...ir.kernel import Kernel, Let, Loop, Stmt, StoreStmt
from ...ir.linear import const_of
from ...ir.program import Buffer, Stage
from .. import deps
from ..access import Accesses, collect, simplify
from ..deps import grain, repeated, together
from ..fusion.fuse import work_of
from ..fusion.group import Group
from .axes import LANES, order_axes, vector_cost, weight_inside
from .build import THREAD, finish


@dataclass
class Walk:
    """A Stage whose order matters, taken apart: axes that may run in any order, those walked one by one, and its statements.

    extents: of all axes, those of Folds too. scan: the last axis of a scan, which `carry` (value, start, next) runs along.
    """

    extents: dict[Axis, Expr]
    free: list[tuple[Axis, Expr]]
    serial: list[tuple[Axis, Expr]]
    scan: tuple[tuple[Axis, Expr], ...]
    body: list[Let | StoreStmt]
    carry: tuple[tuple[Var, Expr, Expr], ...]

    @classmethod
    def of(cls, s: Stage, ordered: bool) -> Walk:
        """ordered: axes that do not index the stores are walked in order."""
        memo: dict[Expr, Expr] = {}
        extents = dict(s.axes) | deps.fold_extents(*deps.stage_exprs(s))

        def sim(e: Expr) -> Expr:
            return simplify(e, extents, memo)

        free = list(s.axes[:-1] if s.scan else s.axes)
        serial = [x for x in free if ordered and not all(x[0] in t.index for t in s.stores)]
        body: list[Let | StoreStmt] = [Let(v, sim(e)) for v, e in s.lets]
        for t in s.stores:
            mask = None if t.mask is None else sim(t.mask)
            body.append(StoreStmt(t.buf, tuple(map(sim, t.index)), sim(t.value), t.mode, mask))
        carry = tuple((v, sim(i), sim(n)) for (v, i), n in zip(s.carry, s.carry_next, strict=True))
        return cls(extents, [x for x in free if x not in serial], serial, s.axes[-1:] if s.scan else (), body, carry)

    def accesses(self, buffers: Mapping[str, Buffer], more: Sequence[Expr] = ()) -> Accesses:
        """Of the statements and of the expressions `more`."""
        lets, stores = [b.value for b in self.body if isinstance(b, Let)], [b for b in self.body if isinstance(b, StoreStmt)]
        return collect([*more, *lets], stores, buffers)

    def nest(self) -> tuple[Stmt, ...]:
        """The statements inside the loops that keep the order."""
        inner: tuple[Stmt, ...] = tuple(self.body)
        if self.scan:
            inner = (Loop(self.scan[0][0], self.scan[0][1], "scan", inner, self.carry),)
        for axis, extent in reversed(self.serial):
            inner = (Loop(axis, extent, "serial", inner),)
        return inner


def build_special(group: Group, buffers: Mapping[str, Buffer], name: str) -> Kernel:
    """Scans, scatters and partial stores: only axes that index the store run in parallel or over lanes, the others in order."""
    (s,) = group.members
    ordered = any(t.mode != "set" or not t.unique for t in s.stores)
    w = Walk.of(s, ordered)
    free, extents = w.free, w.extents
    found = w.accesses(buffers)
    found_all = w.accesses(buffers, [e for _, i, n in w.carry for e in (i, n)])
    vector = None
    if free:
        weigh = weight_inside(free, extents)
        cheap = min(free, key=lambda x: vector_cost(found_all.items, extents, x[0], weigh))
        scalar_ok = ordered or s.scan
        unit = all(x.stride(cheap[0]) in (0, 1) for x in found_all.items)
        small = (const_of(cheap[1]) or LANES) < 4
        vector = cheap[0] if (unit and not small) or not scalar_ok else None
    grid = order_axes(free, found.items, vector)
    each = together(({(): 1 + len(w.body)}, *(work_of(b.value) for b in w.body)))
    work = repeated(each, (e for _, e in (*w.serial, *w.scan)))
    inner = w.nest()
    if vector is not None:
        axis, extent = grid.pop()
        inner = (Loop(axis, extent, "vector", inner),)
        work = repeated(work, (extent,))
    return finish(name, tuple(grid), grain(THREAD, work), (), inner, buffers, group)


