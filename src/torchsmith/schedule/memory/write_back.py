"""Write-backs become kernels: inputs take their final values when nothing can fail any more (no torch).

In: Scheduled, whose program lists (input, source) pairs. Out: the program without them, and a body that ends with the copies; a
kernel that computes the source may write the input itself when nobody needs the old value afterwards.

    k(x -> t); ...; x := t                     becomes  ...; k(x -> x)         or  k(x -> t); ...; copy(t -> x)
    copy(x -> t); scatter(v -> t); ...; x := t  becomes  scatter(v -> x); ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...ir import dtype as dt
from ...ir.expr import Axis, Const, Expr, Load, Sym, const, op, substitute, walk
from ...ir.kernel import Block, Kernel, Let, Loop, Param, Scheduled, Stmt, StoreStmt, expressions, rewrite, statements
from ...ir.program import Bind, BufArg, Buffer, Check, Cond, Extern, ExternArg, Fresh, Program, Repeat, dense
from ...ir.rules import is_op
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
    found = _Body(buffers, (*body, *copies))
    ends: list[Kernel] = []
    for dst, src in pairs:
        if _is_private(program, found, dst, src, pairs) and (_scatter_in_place(found, dst, src) or _write_directly(found, dst, src)):
            for name in found.views.pop(src, ()):
                buffers[name] = replace(buffers[name], storage_of=dst)
                found.views.setdefault(dst, []).append(name)
            del buffers[src]
        else:
            ends.append(copy(f"write_back_{dst}", buffers[src], buffers[dst]))
    return replace(program, buffers=buffers, write_backs=()), (*found.nodes, *ends)


class _Body:
    """The nodes while write-backs are taken out one by one, and where each buffer occurs."""

    def __init__(self, buffers: dict[str, Buffer], nodes: Sequence[Node]) -> None:
        self.buffers = buffers
        self.views: dict[str, list[str]] = {}
        for name, b in buffers.items():
            if b.storage_of is not None:
                self.views.setdefault(b.storage_of, []).append(name)
        self.take(nodes)

    def take(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.last_failing = max((i for i, n in enumerate(nodes) if can_fail(n)), default=-1)
        self.at: dict[str, set[int]] = {}
        for i, node in enumerate(nodes):
            for name in reads(node) | writes(node):
                self.at.setdefault(name, set()).add(i)

    def sees_otherwise(self, old: str, new: Buffer) -> bool:
        """Does a kernel take `old` in a form that `new` does not have, lying otherwise: in another shape (rows of two dimensions as one),
        or as an operand of a block, which is made for the strides of `old`?"""
        have = self.buffers[old]
        kernels = [n for i in self.at.get(old, ()) if isinstance(n := self.nodes[i], Kernel)]
        folded = any(p.buf == old and p.shape != have.shape for n in kernels for p in n.params)
        if have.layout == new.layout:
            return folded and any(p.buf == new.name for n in kernels for p in n.params)
        blocks = [s for n in kernels for s in statements(n.body) if isinstance(s, Block)]
        return folded or any(_load_indices(e, old) for s in blocks for e in expressions(s))

    def rename(self, old: str, new: Buffer) -> None:
        """Kernels that read or write `old` use `new`."""
        at = self.at.pop(old, set())
        for i in at:
            node = self.nodes[i]
            self.nodes[i] = _rename(node, self.buffers[old], new) if isinstance(node, Kernel) else node
        self.at.setdefault(new.name, set()).update(at)


def _dense(buffer: Buffer) -> Buffer:
    return replace(buffer, layout=dense(buffer.shape))


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


def _is_private(program: Program, body: _Body, dst: str, src: str, pairs: list[tuple[str, str]]) -> bool:
    """`src` is a temp that only becomes `dst`, element by element, and `dst` becomes nothing else."""
    a, b = body.buffers[src], body.buffers[dst]
    if src.endswith("_old") or a.role != "temp" or a.storage_of is not None or a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if b.storage_of is not None or b.layout is None or (a.layout is not None and (a.layout.splits or a.layout.pad)):
        return False
    if any(isinstance(r, Fresh) and r.buf == src for r in program.results) or [s for _, s in pairs].count(src) > 1:
        return False
    shown = {r.buf for r in program.results if isinstance(r, Fresh)}
    return not any(s == dst for _, s in pairs) and shown.isdisjoint(body.views.get(dst, ()))


def _scatter_in_place(body: _Body, dst: str, src: str) -> bool:
    """Scatter into the input itself instead of into a copy of it; not when the old value is read, or could be written twice.

    A later step may fail, and then the call is repeated eagerly: that is right because what is written does not depend on `dst`.
    """
    if dst in body.views or body.buffers[src].layout != body.buffers[dst].layout or body.sees_otherwise(src, body.buffers[dst]):
        return False
    writers, views = _writers(body, src), set(body.views.get(src, ()))
    if len(writers) < 2 or not _is_copy(body.nodes[writers[0]], src, dst):
        return False
    for i, node in enumerate(body.nodes):
        if isinstance(node, Cond | Repeat):
            return False
        if isinstance(node, Extern) and (dst in node.buffers or (views | {src}) & set(node.mutates) or set(node.outs) & {src, dst}):
            return False
        if isinstance(node, Check | Bind) and any(
            isinstance(e, Load) and e.buf in (src, dst) for e in walk(node.cond if isinstance(node, Check) else node.value)
        ):
            return False
        if isinstance(node, Kernel) and i != writers[0] and any(p.buf == dst for p in node.params):
            return False
        if i in writers[1:] and not _only_sets(node, src):
            return False
    body.take([_rename_node(n, body.buffers[src], body.buffers[dst]) for i, n in enumerate(body.nodes) if i != writers[0]])
    return True


def _writers(body: _Body, buf: str) -> list[int]:
    """The kernels that write `buf`."""
    found = sorted(body.at.get(buf, ()))
    return [i for i in found if isinstance(n := body.nodes[i], Kernel) and any(p.buf == buf and p.written for p in n.params)]


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


def _rename_node(node: Node, old: Buffer, new: Buffer) -> Node:
    """Kernels and externs with buffer `old` replaced by `new`."""

    def argument(arg: ExternArg) -> ExternArg:
        if isinstance(arg, BufArg) and arg.buf == old.name:
            return BufArg(new.name)
        return tuple(argument(a) for a in arg) if isinstance(arg, tuple) else arg

    if isinstance(node, Kernel):
        return _rename(node, old, new)
    if isinstance(node, Extern):
        return replace(
            node, args=tuple(argument(a) for a in node.args), kwargs=tuple((k, argument(v)) for k, v in node.kwargs)
        )
    return node


def _write_directly(body: _Body, dst: str, src: str) -> bool:
    """Let the one kernel that computes `src` write `dst`; not when somebody could see the difference."""
    at = _writers(body, src)
    if len(at) != 1 or src in body.views or body.sees_otherwise(src, body.buffers[dst]):
        return False
    k = at[0]
    writer = body.nodes[k]
    assert isinstance(writer, Kernel)
    views = body.views.get(dst, ())
    if body.last_failing > k or any(i > k for n in (dst, *views) for i in body.at.get(n, ())):  # and what still reads the old value
        return False
    if any(p.buf in views for p in writer.params):
        return False
    if any(i < k or not isinstance(body.nodes[i], Kernel) for i in body.at[src]):
        return False
    reads_old = any(p.buf == dst for p in writer.params)
    if reads_old and not reads_where_it_writes(writer.body, src, dst):
        return False
    if reads_old and any(p.written for p in writer.params if p.buf == dst):
        return False
    body.rename(src, body.buffers[dst])
    renamed = body.nodes[k]
    if body.buffers[dst].dtype is dt.bool_ and isinstance(renamed, Kernel):
        body.nodes[k] = replace(renamed, body=_written_alone(renamed.body, dst, {}))
    return True


def _written_alone(body: tuple[Stmt, ...], dst: str, lets: dict[Expr, Expr]) -> tuple[Stmt, ...]:
    """The statements, which store no element of `dst` that keeps its value: a bool that is read and stored is 0 or 1, and the memory may
    hold another byte."""
    made: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop):
            s = replace(s, body=_written_alone(s.body, dst, dict(lets)))
        elif isinstance(s, Let):
            lets[s.var] = s.value
        elif isinstance(s, StoreStmt) and s.buf == dst and s.mode == "set":
            found = _changed(s.value, Load(dst, dt.bool_, s.index), lets)
            if found is not None:
                mask, value = found
                s = replace(s, value=value, mask=mask if s.mask is None else op("and", s.mask, mask))
        made.append(s)
    return tuple(made)


def _changed(value: Expr, old: Expr, lets: dict[Expr, Expr]) -> tuple[Expr, Expr] | None:
    """When `value` is another than `old`, and what it is then; None: it may always be."""
    value = lets.get(value, value)
    if not is_op(value, "where"):
        return None
    test, *sides = value.args
    for side, other, when in zip(sides, reversed(sides), (op("not", test), test), strict=True):
        if lets.get(side, side) is old:
            return when, other
        found = _changed(side, old, lets)
        if found is not None:
            return op("or", when, found[0]), op("where", when, other, found[1])
    return None


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


def _rename(kernel: Kernel, was: Buffer, new: Buffer) -> Kernel:
    """The kernel with buffer `was` replaced by `new`, as one parameter, in the shape in which the kernel takes it."""
    old = was.name
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
        q = p
        if p.buf == old:
            folded = p.shape != was.shape
            q = Param(new.name, new.dtype, p.shape if folded else new.shape, p.layout if folded else new.layout, p.written)
        have = params.get(q.buf)
        params[q.buf] = replace(q, written=q.written or have.written) if have else q
    sizes = [*new.shape, *new.layout.strides]
    syms = dict.fromkeys((*kernel.syms, *sorted((n for n in walk(*sizes) if isinstance(n, Sym)), key=lambda s: s.name)))
    body = tuple(rewrite(s, table, {old: new.name}) for s in kernel.body)
    return replace(kernel, params=tuple(params.values()), syms=tuple(syms), body=body)


def _all(es: tuple[Expr, ...], table: dict[Expr, Expr]) -> tuple[Expr, ...]:
    return tuple(substitute(e, table) for e in es)
