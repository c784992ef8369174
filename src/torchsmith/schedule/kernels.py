"""Stages -> Kernels: layouts, grouping, then one Kernel per group.

In: a Program (after vertical fusion). Out: Scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ..ir import dtype as dt
from ..ir.expr import Axis, Expr, Sym, walk
from ..ir.kernel import Choice, Kernel, Scheduled
from ..ir.linear import const_of
from ..ir.program import Buffer, Cond, Element, Program, Repeat, Stage
from ..ir.target import Target
from ..options import Options
from . import deps
from .attention import recognise_attention
from .attention_kernel import form_attention
from .build import build
from .changing import form_changing, is_along_n
from .contraction import (
    ONE_COLUMN,
    ONE_ROW,
    Contraction,
    form_contraction,
    is_affine,
    pack,
    parts_of,
    readings,
    recognise,
    stores_along,
    work_of,
)
from .deps import estimate
from .fuse import simple_axes
from .gated import form_gated, recognise_gated
from .group import Group, Grouper, group_stages
from .grouped import form_grouped, group_of
from .layouts import choose_layouts, copied_apart
from .merge_rows import merge_apart, merge_rows
from .paired import TILE, fills_pairs, form_changing_pairs, form_paired, has_pairs, lies_plain
from .repack import repack_constants
from .special import build_special
from .split import split_reductions
from .tiling import Tiling, best_score, candidates, choose_tiling
from .windows import close_bounds, drop_sure, join_taps, narrow_k, widen, with_padding

__all__ = ["choose_layouts", "form_kernels", "stage_kernel"]

FULLER = 1.3  # times as fast another reading has to look
SHORT = 14  # rows; a tile of so many is full
EDGES = 0.9  # of the speed, where rows at the ends fall into padding
Decisions = Mapping[str, str]
NOTHING: Decisions = MappingProxyType({})


def stage_kernel(stage: Stage, buffers: Mapping[str, Buffer]) -> Kernel:
    """One stage, one kernel."""
    return group_kernel(Grouper(buffers, Options()).single(stage), buffers, set())


def group_kernel(group: Group, buffers: Mapping[str, Buffer], own: set[str]) -> Kernel:
    """One group, one kernel."""
    name = "_".join(dict.fromkeys(w for s in group.stages for w in (s.origin or "stage").split(",")))[:80]
    return build_special(group, buffers, name) if group.closed else build(group, buffers, own, name)


def plain_kernel(stage: Stage, buffers: Mapping[str, Buffer]) -> Kernel:
    """The loops as they stand, without a template."""
    group = Grouper(buffers, Options()).single(stage)
    if simple_axes(stage, stage.stores[0]) is None:
        return build_special(group, buffers, stage.origin)
    return build(replace(group, closed=False), buffers, set(), stage.origin)


def contraction_kernels(
    stage: Stage, c: Contraction, buffers: dict[str, Buffer], lasting: set[str], options: Options, decided: Decisions
) -> tuple[Kernel, ...]:
    """The kernels of `stage`, seen as `c`. A constant right-hand operand is packed (into a new buffer, entered in `buffers`)."""
    alone = fills_pairs(c)
    group = None if alone else group_of(c, buffers)
    # A scalar that is converted for every product costs more than the product; depthwise tiles read whole vectors.
    # bfloat16 is converted as it is spread over the lanes of several groups.
    is_spread = group is not None and group.together > 1 and c.a.dtype is dt.bf16
    widened = widen(c, buffers) if group is not None and group.channel[1] > 1 and not is_spread else None
    if widened is not None:
        buffers[widened.copy.name] = widened.copy
    banded = None if alone else form_grouped(c if widened is None else widened.product, buffers)
    c = c if banded is not None else _fuller(stage, c, buffers, lasting)
    copies, rows, seen = ((), c, buffers) if banded is not None else _plain_rows(c, buffers)
    one_row = c.rows[0][0] is ONE_ROW and c.b.buf not in lasting
    changes = banded is None and not one_row and c.b.buf not in lasting
    in_pairs = form_changing_pairs(rows, seen) if changes else None
    if in_pairs is not None:
        return (*copies, in_pairs)
    paired = None if banded is not None or one_row else form_paired(rows, seen)
    if paired is not None:
        packing, product, packed = paired
        buffers[packed.name] = packed
        return (*copies, stage_kernel(packing, buffers), product)
    banded = form_grouped(c, buffers) if alone else banded
    if banded is not None:
        before = () if widened is None else (stage_kernel(widened.stage, buffers),)
        return *before, stage_kernel(banded[0], buffers), banded[1]
    wide = widen(rows, seen) or copied_apart(rows, seen)
    if wide is not None:
        name, rows = wide.copy.name, wide.product
        buffers[name], seen = wide.copy, {**seen, name: wide.copy}
        copies = (*copies, stage_kernel(wide.stage, {wide.source.name: wide.source, name: wide.copy}))
    c = close_bounds(rows)
    parts = parts_of(c, seen) if c.b.buf in lasting else 1
    if c.n[0] is ONE_COLUMN and parts < c.lanes:  # a convolution whose channels do not lie side by side
        return (plain_kernel(stage, buffers),)
    tiling, choice = _tiling(c, parts, seen, options, decided)
    origins = (c.stage.origin, c.stage.loc)
    if c.b.buf not in lasting:
        if c.rows[0][0] is ONE_ROW and not is_along_n(c, seen):
            return (plain_kernel(stage, buffers),)  # one row: transposing an operand would cost as much as the product
        changing = form_changing(c, tiling, seen, origins)
        if changing is not None:
            return (*copies, replace(changing, choice=choice))
    packing, packed = pack(c, f"{c.stage.stores[0].buf}_packed", tiling.vectors, parts)
    buffers[packed.name] = packed
    (store,) = c.stage.stores
    stores = (replace(store, value=c.value),)
    product = form_contraction(c, stores, packed, tiling, seen, origins, parts)
    return (*copies, stage_kernel(packing, buffers), replace(product, choice=choice))


def with_target(c: Contraction | None, target: Target) -> Contraction | None:
    return c if c is None or c.target is target else replace(c, target=target)


def _fuller(stage: Stage, c: Contraction, buffers: dict[str, Buffer], lasting: set[str]) -> Contraction:
    """`c`, or the same product with its factors exchanged: where output channels are few and lie apart, vectors hold neighbouring pixels,
    read in place."""
    if c.n[0] is ONE_COLUMN or stores_along(c, c.n[0], buffers) or c.b.buf not in lasting:
        return c
    others = [replace(r, target=c.target) for r in readings(stage) if r.b.buf == c.a.buf]
    others = [r for r in others if stores_along(r, r.n[0], buffers) and is_along_n(r, buffers)]
    mine = replace(work_of(c, buffers), parts=parts_of(c, buffers))
    best = max(others, key=lambda r: best_score(work_of(r, buffers)), default=None)
    return c if best is None or best_score(work_of(best, buffers)) < FULLER * best_score(mine) else best


def _longest_rows(c: Contraction, buffers: dict[str, Buffer]) -> Contraction:
    """`c` with the row axis last whose tiles are fullest, if the innermost one is too short for them (a deep layer's 3 x 4 x 6 results)."""
    pairs, masked = has_pairs(c), set(walk(c.a.mask)) if c.a.mask is not None else set[Expr]()
    if len(c.rows) == 1 or (const_of(c.rows[-1][1]) or SHORT) >= SHORT or not stores_along(c, c.n[0], buffers):
        return c

    def fullness(x: tuple[Axis, Expr]) -> float:
        m = const_of(x[1])
        if m is None or not all(is_affine(i, (x[0], c.k[0])) for i in c.a.index):
            return 0.0
        full = m / (-(-m // TILE) * TILE) if pairs else best_score(work_of(last(x), buffers))
        return full * (EDGES if x[0] in masked else 1.0)

    def last(x: tuple[Axis, Expr]) -> Contraction:
        return replace(c, rows=(*(y for y in c.rows if y is not x), x))

    best = max(c.rows, key=fullness)
    return last(best) if fullness(best) > FULLER * fullness(c.rows[-1]) else c


def _fuller_rows(c: Contraction, buffers: dict[str, Buffer]) -> tuple[Contraction, dict[str, Buffer]]:
    """`c` with its two innermost row axes as one, if tiles are so much fuller then that what they compute in vain does not count."""
    merged = merge_apart(c, buffers) if stores_along(c, c.n[0], buffers) else None
    if merged is None:
        return c, buffers
    m, rows = (estimate(x.rows[-1][1]) for x in (c, merged[0]))
    real = m * estimate(c.rows[-2][1])
    if has_pairs(c):
        now, then = m / (-(-m // TILE) * TILE), real / (-(-rows // TILE) * TILE)
    else:
        now, then = best_score(work_of(c, buffers)), best_score(work_of(*merged)) * real / rows
    return merged if then > FULLER * now else (c, buffers)


def _plain_rows(c: Contraction, buffers: dict[str, Buffer]) -> tuple[tuple[Kernel, ...], Contraction, dict[str, Buffer]]:
    """`c` with rows and taps joined where they lie behind each other, after a copy with padding where that pays; and its buffers."""
    c, seen = merge_rows(drop_sure(c), buffers)
    c = _longest_rows(c, seen)
    narrow, pairs, few = narrow_k(c, seen), has_pairs(c), c.target.vectors.lanes()
    if pairs and lies_plain(narrow, seen):
        joined = join_taps(narrow, seen)
        return (), *_fuller_rows(joined, seen)
    if pairs or (c.a.mask is not None and (const_of(narrow.k[1]) or few) < few):
        made = with_padding(narrow, seen, pairs)
        if made is not None:
            views = {**seen, made.copy.name: made.copy}
            joined = join_taps(made.product, views)
            if not pairs or lies_plain(joined, views):
                buffers[made.copy.name] = made.copy
                copies = (stage_kernel(made.stage, {made.source.name: made.source, made.copy.name: made.copy}),)
                return copies, *_fuller_rows(joined, views)
    if c.a.mask is None:
        views = dict(seen)
        joined = join_taps(narrow, views)
        if estimate(joined.k[1]) > estimate(c.k[1]):
            return (), joined, views
    return (), c, seen


def _tiling(
    c: Contraction, parts: int, buffers: Mapping[str, Buffer], options: Options, decided: Decisions
) -> tuple[Tiling, Choice | None]:
    """The tiling of `c`: as decided, else the default; under max-autotune also what could be decided."""
    work = replace(work_of(c, buffers), parts=parts)
    if not options.max_autotune:
        return choose_tiling(work), None
    known = {str(t): t for t in candidates(work)}
    choice = Choice(work.key, tuple(known), f"{c.stage.origin} {c.stage.loc} ({work})")
    return known.get(decided.get(work.key, ""), next(iter(known.values()))), choice


def hoist(body: Sequence[object], sym: Sym, buffers: Mapping[str, Buffer]) -> tuple[list[Kernel], list[object]]:
    """Kernels of a Repeat's body that compute the same in every iteration (packing weights), and the rest of it."""
    kernels = [e for e in body if isinstance(e, Kernel) and all(buffers[b].role == "temp" for b in deps.writes(e))]
    while True:  # a kernel that stays keeps those that read what it writes
        others = [e for e in body if all(e is not k for k in kernels)]
        written = frozenset[str]().union(*(deps.writes(e) for e in others)) if others else frozenset()
        again = [k for k in kernels if sym not in k.syms and not (deps.reads(k) | deps.writes(k)) & written]
        if len(again) == len(kernels):
            break
        kernels = again
    return kernels, others


def form_kernels(program: Program, options: Options, decided: Decisions = NOTHING) -> Scheduled:
    """Group stages into kernels. `decided`: for the keys of Choices that were measured, the candidate to take."""
    program = split_reductions(program)
    buffers = choose_layouts(program)
    program = repack_constants(program, buffers)
    keep = deps.pinned(program)
    lasting = deps.lasting(program)

    def form(body: tuple[Element, ...], nested: bool) -> tuple[Element, ...]:
        items = group_stages(body, buffers, options)
        readers: dict[str, int] = {}
        for item in items:
            for b in item.reads if isinstance(item, Group) else deps.reads(item):
                readers[b] = readers.get(b, 0) + 1
        out: list[Element] = []
        for item in items:
            if isinstance(item, Group):
                product = with_target(recognise(item.stages[0]), program.target) if item.closed else None
                attention = recognise_attention(item.stages[0]) if item.closed else None
                gates = recognise_gated(item.stages[0]) if item.closed and nested else None
                if attention is not None:
                    out.append(form_attention(attention, buffers, program.target))  # type: ignore[arg-type]
                elif product is not None:
                    out.extend(contraction_kernels(item.stages[0], product, buffers, lasting, options, decided))  # type: ignore[arg-type]
                elif gates is not None:
                    packing, packed, kernel = form_gated(replace(gates, c=replace(gates.c, target=program.target)), buffers)
                    buffers[packed.name] = packed
                    out += [stage_kernel(packing, buffers), kernel]  # type: ignore[list-item]
                else:
                    own = set() if nested else {b for b in item.writes if b not in keep and readers.get(b, 0) <= (b in item.reads)}
                    out.append(group_kernel(item, buffers, own))  # type: ignore[arg-type]
            elif isinstance(item, Cond):
                out.append(Cond(item.pred, form(item.then, True), form(item.orelse, True)))
            elif isinstance(item, Repeat):
                before, inner = hoist(form(item.body, True), item.sym, buffers)
                out += [*before, Repeat(item.sym, item.count, tuple(inner))]  # type: ignore[list-item, arg-type]
            else:
                out.append(item)
        return tuple(out)

    body = form(program.body, False)
    used = keep.union(*(deps.reads(e) | deps.writes(e) for e in body)) if body else keep
    return Scheduled(replace(program, buffers={n: b for n, b in buffers.items() if n in used}), body)  # type: ignore[arg-type]
