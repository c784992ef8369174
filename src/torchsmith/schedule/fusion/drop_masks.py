"""Attention whose mask turned out to be true, or 0, everywhere needs none: Program in, Program out (no torch).

    stage [i, j]  m[i, j] = 0.0;    extern attention(q, k, v, m, ..)      ->      extern attention(q, k, v, None, ..)

Models make such masks where they cannot look at values, and a library's fastest kernels take no mask. Those draw other numbers than the
kernels that take one: an attention with dropout keeps its mask. Runs after `fuse`, which has put together what a mask is computed from.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.expr import Const
from ...ir.program import BufArg, Element, Extern, Program, Stage
from ...options import Options
from .. import deps
from ..memory.segment import DROPPING, drops_nothing

# Which argument it is.
MASKED = {
    "aten.scaled_dot_product_attention.default": 3, "torchsmith_attention.forward.default": 3, "torchsmith_attention.backward.default": 4,
}  # fmt: skip


def drop_masks(program: Program, options: Options) -> Program:
    """Only for masks that one Stage fills; where nothing else reads them, that Stage goes, too."""
    if not any(map(_may_drop, program.body)):
        return program
    roots = deps.roots_of(program.buffers)
    written = deps.writers(program.body, roots)
    full: dict[str, Stage] = {}
    for buf, places in written.items():
        stage = program.body[places[0]]
        if len(places) == 1 and isinstance(stage, Stage) and _lets_pass(stage):
            full[buf] = stage
    body: list[Element] = []
    for e in program.body:
        if isinstance(e, Extern) and _may_drop(e):
            at = MASKED[e.op]
            mask = e.args[at] if at < len(e.args) else None
            if isinstance(mask, BufArg) and roots.get(mask.buf, mask.buf) in full:
                e = replace(e, args=(*e.args[:at], None, *e.args[at + 1 :]))
        body.append(e)
    used = deps.pinned(replace(program, body=tuple(body))).union(*(deps.reads(e) for e in body))
    unread = {id(s) for buf, s in full.items() if buf not in deps.rooted(frozenset(used), roots)}
    return replace(program, body=tuple(e for e in body if id(e) not in unread))


def _may_drop(e: Element) -> bool:
    return isinstance(e, Extern) and e.op in MASKED and (e.op not in DROPPING or drops_nothing(e))


def _lets_pass(stage: Stage) -> bool:
    """Does it store true, or 0 to be added, unconditionally, into the one buffer that it writes?"""
    if stage.scan or stage.lets or len(stage.stores) != 1:
        return False
    store = stage.stores[0]
    if store.mode != "set" or store.mask is not None or not isinstance(store.value, Const):
        return False
    return store.value.value is True or (store.value.dtype.is_float and store.value.value == 0)
