"""Results written over an operand that dies: a residual sum then moves two streams through memory instead of three.

In: the buffers and what touches them, in the order of a call. Out: the buffers, some temporaries with `storage_of` another one.

A kernel may write `new` over `old` where it reads each element of `old` in the innermost block that stores that element of `new`, not
after that, both lying alike; where nothing reads `old` later; and where every loop moves the store, so that nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...ir.expr import Axis, walk
from ...ir.kernel import Kernel, Loop, Stmt, StoreStmt
from ...ir.linear import const_of
from ...ir.program import Buffer
from .write_back import reads_where_it_writes


def write_in_place(given: Mapping[str, Buffer], uses: list[tuple[Kernel | None, set[str]]], free: set[str]) -> dict[str, Buffer]:
    """`uses`: for each element of the body its Kernel (if it is one) and the buffers that it touches, by root. `free`: temporaries whose
    memory is the plan's to choose."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, (_, names) in enumerate(uses):
        for n in names:
            first.setdefault(n, at)
            last[n] = at
    buffers = dict(given)
    for at, (kernel, names) in enumerate(uses):
        if kernel is None:
            continue
        ending = {n for n in names & free if last[n] == at and first[n] < at}
        for new in (p for p in kernel.params if p.written and p.buf in free and first[p.buf] == at and last[p.buf] > at):
            for old in (p for p in kernel.params if not p.written and p.buf in ending):
                alike = (old.dtype.itemsize, old.shape, old.layout) == (new.dtype.itemsize, new.shape, new.layout)
                same = (buffers[old.buf].layout, buffers[old.buf].shape) == (buffers[new.buf].layout, buffers[new.buf].shape)
                if alike and same and _may_replace(kernel, new.buf, old.buf):
                    buffers[new.buf] = replace(buffers[new.buf], storage_of=old.buf)
                    ending.discard(old.buf)
                    break
    return buffers


def _may_replace(kernel: Kernel, new: str, old: str) -> bool:
    moving = {x for x, e in kernel.grid if const_of(e) != 1}
    stores = list(_stores(kernel.body, moving))
    mine = [(s, around) for s, around in stores if s.buf == new]
    if len(mine) != 1 or not reads_where_it_writes(kernel.body, new, old):
        return False
    store, around = mine[0]
    return store.mode == "set" and around <= {x for i in store.index for x in walk(i) if isinstance(x, Axis)}


def _stores(body: tuple[Stmt, ...], around: set[Axis]) -> Iterator[tuple[StoreStmt, set[Axis]]]:
    """Every store with the axes of the loops around it."""
    for s in body:
        if isinstance(s, Loop):
            yield from _stores(s.body, around if const_of(s.extent) == 1 else around | {s.axis})
        elif isinstance(s, StoreStmt):
            yield s, around


