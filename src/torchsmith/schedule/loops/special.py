"""Kernels of one Stage whose order matters: scans, scatters, partial stores.

In: a closed Group. Out: a Kernel in which only axes that index the store run in parallel or over lanes.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.expr import Axis, Expr
from ...ir.kernel import Kernel, Let, Loop, Stmt, StoreStmt
from ...ir.linear import const_of
from ...ir.program import Buffer
from .. import deps
from ..access import Access, collect, simplify
from ..deps import grain, numel, repeated, together
from ..fusion.fuse import work_of
from ..fusion.group import Group
from .axes import LANES, order_axes, vector_cost
from .build import THREAD, finish


def build_special(group: Group, buffers: Mapping[str, Buffer], name: str) -> Kernel:
    """Scans, scatters and partial stores: only axes that index the store run in parallel or over lanes, the others in order."""
    (s,) = group.members
    memo: dict[Expr, Expr] = {}
    extents = dict(s.axes) | deps.fold_extents(*deps.stage_exprs(s))

    def sim(e: Expr) -> Expr:
        return simplify(e, extents, memo)

    scan = s.axes[-1:] if s.scan else ()
    free = list(s.axes[:-1] if s.scan else s.axes)
    ordered = any(t.mode != "set" or not t.unique for t in s.stores)
    serial: list[tuple[Axis, Expr]] = []
    if ordered:
        serial = [x for x in free if not all(x[0] in t.index for t in s.stores)]
        free = [x for x in free if x not in serial]
    body: list[Stmt] = [Let(v, sim(e)) for v, e in s.lets]
    body += [StoreStmt(t.buf, tuple(map(sim, t.index)), sim(t.value), t.mode, None if t.mask is None else sim(t.mask)) for t in s.stores]
    stores = [b for b in body if isinstance(b, StoreStmt)]
    found = collect([b.value for b in body if isinstance(b, Let)], stores, buffers)
    carry = tuple((v, sim(i), sim(n)) for (v, i), n in zip(s.carry, s.carry_next, strict=True))
    found_all = collect([e for _, i, n in carry for e in (i, n)] + [b.value for b in body if isinstance(b, Let)], stores, buffers)
    vector = None
    if free:
        outer = {a for a, _ in free}

        def weigh(x: Access) -> float:
            return float(numel(extents[a] for a in x.axes() if a not in outer and a in extents))

        cheap = min(free, key=lambda x: vector_cost(found_all.items, extents, x[0], weigh))
        scalar_ok = ordered or s.scan
        unit = all(x.stride(cheap[0]) in (0, 1) for x in found_all.items)
        small = (const_of(cheap[1]) or LANES) < 4
        vector = cheap[0] if (unit and not small) or not scalar_ok else None
    grid = order_axes(free, found.items, vector)
    each = together(({(): 1 + len(body)}, *(work_of(b.value) for b in body if isinstance(b, Let | StoreStmt))))
    work = repeated(each, (e for _, e in (*serial, *scan)))
    inner: tuple[Stmt, ...] = tuple(body)
    if scan:
        inner = (Loop(scan[0][0], scan[0][1], "scan", inner, carry),)
    for axis, extent in reversed(serial):
        inner = (Loop(axis, extent, "serial", inner),)
    if vector is not None:
        axis, extent = grid.pop()
        inner = (Loop(axis, extent, "vector", inner),)
        work = repeated(work, (extent,))
    return finish(name, tuple(grid), grain(THREAD, work), (), inner, buffers, group)


