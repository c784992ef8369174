"""Stages -> Kernels: grouping, loop order, the vector axis, layouts of temporaries.

In: a Program (after vertical fusion). Out: Scheduled.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import Load, Sym, const, walk
from ..ir.kernel import Kernel, Let, Loop, Param, Scheduled, Stmt, StoreStmt
from ..ir.linear import const_of
from ..ir.program import Buffer, Cond, Element, Program, Repeat, Stage
from ..options import Options
from .contraction import Contraction, choose_tile, form_contraction, pack, recognise
from .layouts import choose_layouts, dense


def stage_kernel(stage: Stage, buffers: dict[str, Buffer]) -> Kernel:
    """One stage, one kernel."""
    exprs = [e for s in stage.stores for e in (*s.index, s.value, *((s.mask,) if s.mask is not None else ()))]
    exprs += [*stage.carry_next, *(e for _, e in (*stage.carry, *stage.lets))]
    nodes = list(walk(*exprs, *(e for _, e in stage.axes)))
    written = [s.buf for s in stage.stores]
    names = dict.fromkeys([*written, *(n.buf for n in nodes if isinstance(n, Load))])
    chosen = {n: buffers[n].layout or dense(buffers[n].shape) for n in names}
    params = tuple(Param(n, buffers[n].dtype, buffers[n].shape, chosen[n], n in written) for n in names)
    for p in params:
        nodes += list(walk(p.layout.offset, *p.layout.strides))
    syms = tuple(dict.fromkeys(n for n in nodes if isinstance(n, Sym)))
    stores = [StoreStmt(s.buf, s.index, s.value, s.mode, s.mask) for s in stage.stores]
    body: tuple[Stmt, ...] = (*(Let(v, e) for v, e in stage.lets), *stores)
    if stage.scan:
        *outer, (axis, extent) = stage.axes
        carry = tuple((v, e, after) for (v, e), after in zip(stage.carry, stage.carry_next, strict=True))
        loop = Loop(axis, extent, "scan", body, carry)
        return Kernel(stage.origin or "k", params, syms, tuple(outer), const(1), (), (loop,), origins=(stage.origin, stage.loc))
    if not all(s.unique for s in stage.stores):  # in index order, by one thread
        for axis, extent in reversed(stage.axes):
            body = (Loop(axis, extent, "serial", body),)
        return Kernel(stage.origin or "k", params, syms, (), const(1), (), body, origins=(stage.origin, stage.loc))
    if stage.axes:
        *outer, (axis, extent) = stage.axes
        body = (Loop(axis, extent, "vector", body),)
        return Kernel(stage.origin or "k", params, syms, tuple(outer), const(1), (), body, origins=(stage.origin, stage.loc))
    return Kernel(stage.origin or "k", params, syms, (), const(1), (), body, origins=(stage.origin, stage.loc))


def contraction_kernels(c: Contraction, buffers: dict[str, Buffer]) -> tuple[Kernel, Kernel]:
    """Pack the right-hand operand (into a new buffer, entered in `buffers`), then multiply."""
    tile = choose_tile(const_of(c.rows[-1][1]), const_of(c.n[1]))
    packing, packed = pack(c, f"{c.stage.stores[0].buf}_packed", tile[1])
    buffers[packed.name] = packed
    (store,) = c.stage.stores
    stores = (replace(store, value=c.value),)
    origins = (c.stage.origin, c.stage.loc)
    return stage_kernel(packing, buffers), form_contraction(c, stores, packed, tile, buffers, origins)


def form_kernels(program: Program, options: Options) -> Scheduled:
    """Group stages into kernels."""
    buffers = choose_layouts(program)

    def form(body: tuple[Element, ...]) -> tuple[Element, ...]:
        out: list[Element] = []
        for e in body:
            if isinstance(e, Stage):
                product = recognise(e)
                if product is not None:
                    out.extend(contraction_kernels(product, buffers))  # type: ignore[arg-type]
                else:
                    out.append(stage_kernel(e, buffers))  # type: ignore[arg-type]
            elif isinstance(e, Cond):
                out.append(Cond(e.pred, form(e.then), form(e.orelse)))
            elif isinstance(e, Repeat):
                out.append(Repeat(e.sym, e.count, form(e.body)))
            else:
                out.append(e)
        return tuple(out)

    return Scheduled(replace(program, buffers=buffers), form(program.body))  # type: ignore[arg-type]
