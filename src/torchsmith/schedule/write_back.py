"""Write-backs become kernels: inputs take their final values after the last Check and the last extern call (no torch).

In: Scheduled, whose program lists (input, source) pairs. Out: the program without them, and a body that ends with the copies; a
kernel that computes the source may write the input itself when nobody needs the old value afterwards.

    k(x -> t); ...; x := t        becomes        ...; k(x -> x)        or        k(x -> t); ...; copy(t -> x)
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import Axis, Const, Expr, Load, Sym, const, substitute, walk
from ..ir.kernel import Contract, Kernel, Let, Loop, Param, Scheduled, Stmt, StoreStmt, expressions, rewrite
from ..ir.program import Bind, Buffer, Check, Cond, Extern, Fresh, Layout, Program, Repeat

Node = Kernel | Check | Extern | Bind | Cond | Repeat

COPY_GRAIN = 32768  # elements worth a thread


def end_with_write_backs(scheduled: Scheduled) -> tuple[Program, tuple[Node, ...]]:
    """The whole pass."""
    program, body = scheduled.program, scheduled.body
    if not program.write_backs:
        return program, body
    buffers = dict(program.buffers)
    written = {dst for dst, _ in program.write_backs}
    copies: list[Kernel] = []
    pairs: list[tuple[str, str]] = []
    for dst, src in program.write_backs:
        if src == dst:
            continue
        if src in written:  # x, y = y, x: the old value of an input that is itself overwritten goes through a temp
            temp = f"{src}_old"
            if temp not in buffers:
                buffers[temp] = replace(_dense(buffers[src]), name=temp, role="temp", storage_of=None)
                copies.append(copy_kernel(f"save_{src}", buffers[src], buffers[temp]))
            src = temp
        pairs.append((dst, src))
    body = (*body, *copies)
    ends: list[Kernel] = []
    for dst, src in pairs:
        direct = None if src.endswith("_old") else _write_directly(program, buffers, body, dst, src, pairs)
        if direct is not None:
            body = direct
            del buffers[src]
        else:
            ends.append(copy_kernel(f"write_back_{dst}", buffers[src], buffers[dst]))
    return replace(program, buffers=buffers, write_backs=()), (*body, *ends)


def _dense(buffer: Buffer) -> Buffer:
    """The same array, row-major without gaps."""
    strides: list[Expr] = []
    step: Expr = const(1)
    for extent in reversed(buffer.shape):
        strides.append(step)
        step = step * extent
    return replace(buffer, layout=Layout(tuple(reversed(strides)), const(0)))


def copy_kernel(name: str, src: Buffer, dst: Buffer) -> Kernel:
    """`dst[i...] = src[i...]` over dst's shape: rows on the grid, the last dimension in the loop."""
    src, dst = (b if b.layout is not None else _dense(b) for b in (src, dst))
    assert src.layout is not None and dst.layout is not None
    axes = tuple((Axis(f"c{i}"), e) for i, e in enumerate(dst.shape))
    index = tuple(a for a, _ in axes)
    stmt: Stmt = StoreStmt(dst.name, index, Load(src.name, src.dtype, index))
    grid = axes[:-1]
    inner: Expr = const(1)
    if axes:
        axis, inner = axes[-1]
        unit = not src.layout.splits and not dst.layout.splits and src.layout.strides[-1] is dst.layout.strides[-1] is const(1)
        stmt = Loop(axis, inner, "vector" if unit else "serial", (stmt,))
    params = (
        Param(src.name, src.dtype, src.shape, src.layout, False),
        Param(dst.name, dst.dtype, dst.shape, dst.layout, True),
    )
    sizes = [e for p in params for e in (*p.shape, *p.layout.strides, p.layout.offset)]
    syms = sorted({n for n in walk(*sizes) if isinstance(n, Sym)}, key=lambda s: s.name)
    width = int(inner.value) if isinstance(inner, Const) else 64
    return Kernel(name, params, tuple(syms), grid, const(max(1, COPY_GRAIN // max(1, width))), (), (stmt,), origins=("write back",))


def _write_directly(
    program: Program, buffers: dict[str, Buffer], body: tuple[Node, ...], dst: str, src: str, pairs: list[tuple[str, str]]
) -> tuple[Node, ...] | None:
    """Let the one kernel that computes `src` write `dst`; None when somebody could see the difference."""
    a, b = buffers[src], buffers[dst]
    if a.role != "temp" or a.storage_of is not None or a.dtype is not b.dtype or a.shape != b.shape or b.layout is None:
        return None
    if any(isinstance(r, Fresh) and r.buf == src for r in program.results) or [s for _, s in pairs].count(src) > 1:
        return None
    if any(s == dst for _, s in pairs) or any(o.storage_of in (src, dst) for o in buffers.values()):
        return None
    if a.layout is not None and (a.layout.splits or a.layout.pad):
        return None
    at = [i for i, n in enumerate(body) if isinstance(n, Kernel) and any(p.buf == src and p.written for p in n.params)]
    if len(at) != 1:
        return None
    k = at[0]
    writer = body[k]
    assert isinstance(writer, Kernel)
    for later in body[k + 1 :]:  # whatever can fail, or still reads the old value, must come before
        if not isinstance(later, Kernel | Bind) or (isinstance(later, Kernel) and any(p.buf == dst for p in later.params)):
            return None
        if isinstance(later, Bind) and any(isinstance(e, Load) and e.buf in (src, dst) for e in walk(later.value)):
            return None
    for earlier in body[:k]:
        if isinstance(earlier, Kernel) and any(p.buf == src for p in earlier.params):
            return None
    reads_old = any(p.buf == dst for p in writer.params)
    if reads_old and not _reads_where_it_writes(writer.body, src, dst):
        return None
    if reads_old and any(p.written for p in writer.params if p.buf == dst):
        return None
    return tuple(_rename(n, src, b) if isinstance(n, Kernel) else n for n in body)


def _reads_where_it_writes(body: tuple[Stmt, ...], src: str, dst: str) -> bool:
    """Every read of `dst` has the index at which the same innermost block stores `src`, and comes before that store."""
    for stmt in body:
        carried = isinstance(stmt, Loop) and any(_load_indices(e, dst) for _, a, b in stmt.carry for e in (a, b))
        if isinstance(stmt, Loop) and (carried or not _reads_where_it_writes(stmt.body, src, dst)):
            return False
    stores = [i for i, s in enumerate(body) if isinstance(s, StoreStmt) and s.buf == src]
    for i, stmt in enumerate(body):
        found: set[tuple[Expr, ...]] = set()
        if isinstance(stmt, Let):
            found = _load_indices(stmt.value, dst)
        elif isinstance(stmt, Contract) and dst in (stmt.a.buf, stmt.b.buf):
            return False
        elif isinstance(stmt, StoreStmt):
            found = _load_indices(stmt.value, dst).union(*(_load_indices(e, dst) for e in stmt.index))
            found |= set() if stmt.mask is None else _load_indices(stmt.mask, dst)
        if found and not (len(stores) == 1 and i <= stores[0] and found == {body[stores[0]].index}):  # type: ignore[union-attr]
            return False
    return True


def _load_indices(e: Expr, buf: str) -> set[tuple[Expr, ...]]:
    return {n.index for n in walk(e) if isinstance(n, Load) and n.buf == buf}


def _rename(kernel: Kernel, old: str, new: Buffer) -> Kernel:
    """The kernel with buffer `old` replaced by `new`, as one parameter."""
    if not any(p.buf == old for p in kernel.params):
        return kernel
    assert new.layout is not None
    table: dict[Expr, Expr] = {}
    for n in (n for s in kernel.body for e in expressions(s) for n in walk(e)):
        if isinstance(n, Load) and n.buf == old:  # children come first, so an index that loads `old` is renamed already
            other = (None, None) if n.mask is None or n.other is None else (substitute(n.mask, table), substitute(n.other, table))
            table[n] = Load(new.name, n.dtype, _all(n.index, table), *other)
    params: dict[str, Param] = {}
    for p in kernel.params:
        q = Param(new.name, new.dtype, new.shape, new.layout, p.written) if p.buf == old else p
        have = params.get(q.buf)
        params[q.buf] = replace(q, written=q.written or have.written) if have else q
    sizes = [*new.shape, *new.layout.strides]
    syms = dict.fromkeys((*kernel.syms, *sorted((n for n in walk(*sizes) if isinstance(n, Sym)), key=lambda s: s.name)))
    body = tuple(rewrite(s, table, {old: new.name}) for s in kernel.body)
    return replace(kernel, params=tuple(params.values()), syms=tuple(syms), body=body)


def _all(es: tuple[Expr, ...], table: dict[Expr, Expr]) -> tuple[Expr, ...]:
    return tuple(substitute(e, table) for e in es)
