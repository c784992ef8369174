"""Values that are cheaper to compute again than to read: Program in, Program out (no torch), for devices whose memory is the slow part.

    y[i, c] = max(x[i, c] * w[c], 0);   s[c] = sum over i of (y[i, c] > 0 ? g[i, c] * x[i, c] : 0)
        becomes    ...                  s[c] = sum over i of (max(x[i, c] * w[c], 0) > 0 ? g[i, c] * x[i, c] : 0)

A Stage that reads what such a value is made from at the same place anyway has no need to read the value: the backward pass of a norm and
an activation reads the norm's input and the activation's result. Stages beside it, which will probably share its kernel, follow it where
they read one operand in place of the value. A value that nothing reads any more is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir import dtype as dt
from ...ir.expr import Axis, Cast, Const, Expr, Load, Op, substitute, walk
from ...ir.program import Buffer, Program, Stage
from .. import deps
from ..deps import numel
from .fuse import can_inline, inline, overwritten

LEAST = 1 << 16  # elements that are worth a thought
NARROW = 64  # times smaller is what is read beside them: a number for each channel
MOST = 16  # operations
BESIDE = 4  # places in the body
CHEAP = frozenset(("add", "sub", "mul", "neg", "abs", "min", "max", "fma", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "where"))


def rematerialize(program: Program) -> Program:
    """On the top level of the body."""
    buffers = program.buffers
    cheap = {s.stores[0].buf: s for s in program.body if isinstance(s, Stage) and _is_cheap(s, buffers)}
    roots = deps.roots_of(buffers)
    written = deps.writers(program.body, roots)
    made = {buf: places[0] for buf, places in written.items() if len(places) == 1}
    missing: dict[str, dict[int, int]] = {}  # value -> where it is read, and how many wide operands are not read there
    for at, s in enumerate(program.body):
        if not isinstance(s, Stage) or s.scan or s.lets:
            continue
        for buf in deps.reads(s) & cheap.keys() & made.keys():
            count = None if overwritten(cheap[buf], made[buf], [at], written, roots) else _missing(s, cheap[buf], buffers)
            if count is not None:
                missing.setdefault(buf, {})[at] = count
    body = list(program.body)
    for buf, places in missing.items():
        for at, count in places.items():
            s = body[at]
            beside = count == 1 and any(places.get(at + k) == 0 for k in range(-BESIDE, BESIDE + 1))
            if isinstance(s, Stage) and (count == 0 or beside):
                body[at] = inline(cheap[buf], s)
    if all(a is b for a, b in zip(body, program.body, strict=True)):
        return program
    kept = deps.pinned(program).union(*(deps.reads(e) for e in body))
    return replace(program, body=tuple(e for e in body if not (isinstance(e, Stage) and deps.writes(e) <= cheap.keys() - kept)))


def _is_cheap(s: Stage, buffers: Mapping[str, Buffer]) -> bool:
    """Is its one value a little arithmetic of values at the same place, and of numbers that many places share?"""
    if can_inline(s) is not None or numel(e for _, e in s.axes) < LEAST:
        return False
    nodes = list(walk(s.stores[0].value))
    work = [e for e in nodes if isinstance(e, Op) and e.dtype is not dt.index]
    plain = all(isinstance(e, Op | Cast | Const | Load | Axis) for e in nodes)
    return plain and len(work) <= MOST and all(e.name in CHEAP for e in work) and any(_is_wide(x, s, buffers) for x in deps.stage_loads(s))


def _is_wide(x: Load, s: Stage, buffers: Mapping[str, Buffer]) -> bool:
    return numel(buffers[x.buf].shape) * NARROW > numel(e for _, e in s.axes)


def _missing(s: Stage, producer: Stage, buffers: Mapping[str, Buffer]) -> int | None:
    """How many wide operands of the producer's value `s` does not load where it loads the value; None where it does so under a mask."""
    mine = deps.stage_loads(s)
    places = [x for x in mine if x.buf == producer.stores[0].buf]
    wide = [x for x in deps.stage_loads(producer) if _is_wide(x, producer, buffers)]
    if any(x.mask is not None for x in (*places, *wide)):
        return None
    axes = producer.stores[0].index
    tables: list[dict[Expr, Expr]] = [{a: i for a, i in zip(axes, x.index, strict=True) if isinstance(a, Axis)} for x in places]
    return len({substitute(w, t) for w in wide for t in tables} - set(mine))
