"""Write-backs become kernels: inputs take their final values when nothing can fail any more (no torch).

In: Scheduled, whose program lists (input, source) pairs. Out: the program without them, and a body that ends with the copies; a
kernel that computes the source may write the input itself when nobody needs the old value afterwards.

    k(x -> t); ...; x := t                     becomes  ...; k(x -> x)         or  k(x -> t); ...; copy(t -> x)
    copy(x -> t); scatter(v -> t); ...; x := t  becomes  scatter(v -> x); ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ...ir.expr import Axis, Const, Expr, Load, Sym, const, substitute, walk
from ...ir.kernel import Block, Kernel, Let, Loop, Param, Scheduled, Stmt, StoreStmt, expressions, rewrite
from ...ir.program import Bind, BufArg, Buffer, Check, Cond, Extern, ExternArg, Fresh, Layout, Program, Repeat
from ...ir.target import Language, Target
from ..blocks import block_copy
from ..deps import reads, writes
from .order import can_fail, order

Node = Kernel | Check | Extern | Bind | Cond | Repeat

COPY_GRAIN = 32768  # elements worth a thread


def end_with_write_backs(scheduled: Scheduled) -> tuple[Program, tuple[Node, ...]]:
    """The whole pass."""
    program, body = scheduled.program, order(scheduled)
    if not program.write_backs:
        return program, body
    copy = functools.partial(COPIES[program.target.language], program.target)
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
                copies.append(copy(f"save_{src}", buffers[src], buffers[temp]))
            src = temp
        pairs.append((dst, src))
    body = (*body, *copies)
    ends: list[Kernel] = []
    for dst, src in pairs:
        direct = None
        if _is_private(program, buffers, dst, src, pairs):
            direct = _scatter_in_place(buffers, body, dst, src) or _write_directly(buffers, body, dst, src)
        if direct is not None:
            body = direct
            for name, b in buffers.items():
                if b.storage_of == src:
                    buffers[name] = replace(b, storage_of=dst)
            del buffers[src]
        else:
            ends.append(copy(f"write_back_{dst}", buffers[src], buffers[dst]))
    return replace(program, buffers=buffers, write_backs=()), (*body, *ends)


def _dense(buffer: Buffer) -> Buffer:
    """The same array, row-major without gaps."""
    strides: list[Expr] = []
    step: Expr = const(1)
    for extent in reversed(buffer.shape):
        strides.append(step)
        step = step * extent
    return replace(buffer, layout=Layout(tuple(reversed(strides)), const(0)))


def copy_kernel(target: Target, name: str, src: Buffer, dst: Buffer) -> Kernel:
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


def _copy_blocks(target: Target, name: str, src: Buffer, dst: Buffer) -> Kernel:
    src, dst = (b if b.layout is not None else _dense(b) for b in (src, dst))
    return block_copy(name, src, dst, target)


COPIES: dict[Language, Callable[[Target, str, Buffer, Buffer], Kernel]] = {"c": copy_kernel, "triton": _copy_blocks}


def _is_private(program: Program, buffers: dict[str, Buffer], dst: str, src: str, pairs: list[tuple[str, str]]) -> bool:
    """`src` is a temp that only becomes `dst`, element by element, and `dst` becomes nothing else."""
    a, b = buffers[src], buffers[dst]
    if src.endswith("_old") or a.role != "temp" or a.storage_of is not None or a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if b.storage_of is not None or b.layout is None or (a.layout is not None and (a.layout.splits or a.layout.pad)):
        return False
    if any(isinstance(r, Fresh) and r.buf == src for r in program.results) or [s for _, s in pairs].count(src) > 1:
        return False
    return not any(s == dst for _, s in pairs) and not any(o.storage_of == dst for o in buffers.values())


def _scatter_in_place(buffers: dict[str, Buffer], body: tuple[Node, ...], dst: str, src: str) -> tuple[Node, ...] | None:
    """Scatter into the input itself instead of into a copy of it; None when the old value is read, or could be written twice.

    A later step may fail, and then the call is repeated eagerly: that is right because what is written does not depend on `dst`.
    """
    if buffers[src].layout != buffers[dst].layout:
        return None
    writers = [i for i, n in enumerate(body) if isinstance(n, Kernel) and any(p.buf == src and p.written for p in n.params)]
    views = {name for name, b in buffers.items() if b.storage_of == src}
    if len(writers) < 2 or not _is_copy(body[writers[0]], src, dst):
        return None
    for i, node in enumerate(body):
        if isinstance(node, Cond | Repeat):
            return None
        if isinstance(node, Extern) and (dst in _names(node) or (views | {src}) & set(node.mutates) or set(node.outs) & {src, dst}):
            return None
        if isinstance(node, Check | Bind) and any(
            isinstance(e, Load) and e.buf in (src, dst) for e in walk(node.cond if isinstance(node, Check) else node.value)
        ):
            return None
        if isinstance(node, Kernel) and i != writers[0] and any(p.buf == dst for p in node.params):
            return None
        if i in writers[1:] and not _only_sets(node, src):
            return None
    return tuple(_rename_node(n, src, buffers[dst]) for i, n in enumerate(body) if i != writers[0])


def _is_copy(node: Node, src: str, dst: str) -> bool:
    """The kernel does nothing but src[i] = dst[i]."""
    if not isinstance(node, Kernel) or {p.buf for p in node.params} != {src, dst} or node.scratch:
        return False
    body = node.body
    lets: dict[Expr, Expr] = {}
    while len(body) == 1 and isinstance(body[0], Loop) and not body[0].carry:
        body = body[0].body
    for stmt in body[:-1]:
        if not isinstance(stmt, Let):
            return False
        lets[stmt.var] = stmt.value
    last = body[-1] if body else None
    if not isinstance(last, StoreStmt) or last.buf != src or last.mode != "set" or last.mask is not None:
        return False
    value = substitute(last.value, lets)
    return isinstance(value, Load) and value.buf == dst and value.index == last.index and value.mask is None


def _only_sets(node: Node, src: str) -> bool:
    """The kernel stores into `src` without reading it or adding to it."""

    def stores(body: tuple[Stmt, ...]) -> bool:
        return all(stores(s.body) if isinstance(s, Loop) else not (isinstance(s, StoreStmt) and s.buf == src and s.mode != "set")
                   for s in body)

    if not isinstance(node, Kernel) or not stores(node.body):
        return False
    return not any(_load_indices(e, src) for s in node.body for e in expressions(s))


def _names(extern: Extern) -> set[str]:
    """Buffers among the arguments."""
    found: set[str] = set()
    stack: list[ExternArg] = [*extern.args, *(v for _, v in extern.kwargs)]
    while stack:
        arg = stack.pop()
        if isinstance(arg, BufArg):
            found.add(arg.buf)
        elif isinstance(arg, tuple):
            stack.extend(arg)
    return found


def _rename_node(node: Node, old: str, new: Buffer) -> Node:
    """Kernels and externs with buffer `old` replaced by `new`."""

    def argument(arg: ExternArg) -> ExternArg:
        if isinstance(arg, BufArg) and arg.buf == old:
            return BufArg(new.name)
        return tuple(argument(a) for a in arg) if isinstance(arg, tuple) else arg

    if isinstance(node, Kernel):
        return _rename(node, old, new)
    if isinstance(node, Extern):
        return replace(
            node, args=tuple(argument(a) for a in node.args), kwargs=tuple((k, argument(v)) for k, v in node.kwargs)
        )
    return node


def _write_directly(buffers: dict[str, Buffer], body: tuple[Node, ...], dst: str, src: str) -> tuple[Node, ...] | None:
    """Let the one kernel that computes `src` write `dst`; None when somebody could see the difference."""
    b = buffers[dst]
    if any(o.storage_of == src for o in buffers.values()):
        return None
    at = [i for i, n in enumerate(body) if isinstance(n, Kernel) and any(p.buf == src and p.written for p in n.params)]
    if len(at) != 1:
        return None
    k = at[0]
    writer = body[k]
    assert isinstance(writer, Kernel)
    for later in body[k + 1 :]:  # whatever can fail, or still reads the old value, must come before
        names = reads(later) | writes(later)
        if can_fail(later) or dst in names or (src in names and not isinstance(later, Kernel)):
            return None
    if any(src in reads(earlier) | writes(earlier) for earlier in body[:k]):
        return None
    reads_old = any(p.buf == dst for p in writer.params)
    if reads_old and not reads_where_it_writes(writer.body, src, dst):
        return None
    if reads_old and any(p.written for p in writer.params if p.buf == dst):
        return None
    return tuple(_rename(n, src, b) if isinstance(n, Kernel) else n for n in body)


def reads_where_it_writes(body: tuple[Stmt, ...], src: str, dst: str) -> bool:
    """Every read of `dst` has the index at which the same innermost block stores `src`, and comes before that store."""
    for stmt in body:
        carried = isinstance(stmt, Loop) and any(_load_indices(e, dst) for _, a, b in stmt.carry for e in (a, b))
        if isinstance(stmt, Loop) and (carried or not reads_where_it_writes(stmt.body, src, dst)):
            return False
    stores = [i for i, s in enumerate(body) if isinstance(s, StoreStmt) and s.buf == src]
    for i, stmt in enumerate(body):
        found: set[tuple[Expr, ...]] = set()
        if isinstance(stmt, Let):
            found = _load_indices(stmt.value, dst)
        elif isinstance(stmt, Block) and any(_load_indices(e, dst) for e in expressions(stmt)):
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
