"""Contractions -> Kernels: the rows of PRODUCTS are asked in order, and the first one that may and can makes the kernels.

In: a Stage seen as a Contraction, its surroundings. Out: Kernels: copies, packing, the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ...ir import dtype as dt
from ...ir.expr import Axis, Expr, walk
from ...ir.kernel import Choice, Kernel
from ...ir.linear import const_of
from ...ir.program import Buffer, Stage
from ...options import Options
from ..deps import estimate
from ..loops.single import plain_kernel, stage_kernel
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
    stores_along,
    work_of,
)
from .grouped import form_grouped, group_of
from .merge_rows import merge_apart, merge_rows
from .paired import TILE, fills_pairs, form_changing_pairs, form_paired, has_pairs, lies_plain
from .tiling import Tiling, best_score, candidates, choose_tiling
from .windows import close_bounds, copied_apart, drop_sure, join_taps, narrow_k, widen, with_padding

FULLER = 1.3  # times as fast another reading has to look
SHORT = 14  # rows; a tile of so many is full
EDGES = 0.9  # of the speed, where rows at the ends fall into padding


@dataclass(frozen=True)
class Product:
    """A Stage seen as `c`, and what is around it. Templates enter the buffers they make in `buffers`."""

    stage: Stage
    c: Contraction
    buffers: dict[str, Buffer]
    lasting: set[str]
    options: Options
    decided: Mapping[str, str]

    @property
    def changes(self) -> bool:
        """Does the right-hand operand change from call to call?"""
        return self.c.b.buf not in self.lasting

    @cached_property
    def full(self) -> Contraction:
        return _fuller(self.stage, self.c, self.buffers, self.lasting)

    @cached_property
    def plain(self) -> tuple[tuple[Kernel, ...], Contraction, dict[str, Buffer]]:
        """Copies that are made first, the product with rows and taps joined, and the buffers as it sees them."""
        return _plain_rows(self.full, self.buffers)

    @property
    def one_row(self) -> bool:
        return self.full.rows[0][0] is ONE_ROW and self.full.b.buf not in self.lasting


@dataclass(frozen=True, slots=True)
class ProductTemplate:
    """`legal`: may this template be asked? `form` makes the kernels, or gives None where the form does not fit."""

    name: str
    legal: Callable[[Product], bool]
    form: Callable[[Product], tuple[Kernel, ...] | None]


def _grouped(p: Product) -> tuple[Kernel, ...] | None:
    """Few channels a group: several groups side by side in a vector."""
    c, group = p.c, group_of(p.c, p.buffers)
    # A scalar that is converted for every product costs more than the product; depthwise tiles read whole vectors.
    # bfloat16 is converted as it is spread over the lanes of several groups.
    is_spread = group is not None and group.together > 1 and c.a.dtype is dt.bf16
    widened = widen(c, p.buffers) if group is not None and group.channel[1] > 1 and not is_spread else None
    if widened is not None:
        p.buffers[widened.copy.name] = widened.copy
    formed = form_grouped(c if widened is None else widened.product, p.buffers)
    if formed is None:
        return None
    before = () if widened is None else (stage_kernel(widened.stage, p.buffers),)
    return *before, stage_kernel(formed[0], p.buffers), formed[1]


def _grouped_alone(p: Product) -> tuple[Kernel, ...] | None:
    formed = form_grouped(p.full, p.buffers)
    return None if formed is None else (stage_kernel(formed[0], p.buffers), formed[1])


def _changing_pairs(p: Product) -> tuple[Kernel, ...] | None:
    copies, rows, seen = p.plain
    formed = form_changing_pairs(rows, seen)
    return None if formed is None else (*copies, formed)


def _pairs(p: Product) -> tuple[Kernel, ...] | None:
    copies, rows, seen = p.plain
    formed = form_paired(rows, seen)
    if formed is None:
        return None
    packing, product, packed = formed
    p.buffers[packed.name] = packed
    return (*copies, stage_kernel(packing, p.buffers), product)


def _dense(p: Product) -> tuple[Kernel, ...]:
    """Register tiles of the target; plain loops where they would not pay."""
    copies, rows, seen = p.plain
    wide = widen(rows, seen) or copied_apart(rows, seen)
    if wide is not None:
        name, rows = wide.copy.name, wide.product
        p.buffers[name], seen = wide.copy, {**seen, name: wide.copy}
        copies = (*copies, stage_kernel(wide.stage, {**seen, wide.source.name: wide.source}))
    c = close_bounds(rows)
    changes = c.b.buf not in p.lasting
    parts = 1 if changes else parts_of(c, seen)
    if c.n[0] is ONE_COLUMN and parts < c.lanes:  # a convolution whose channels do not lie side by side
        return (plain_kernel(p.stage, p.buffers),)
    tiling, choice = _tiling(c, parts, seen, p.options, p.decided)
    origins = (c.stage.place,)
    if changes:
        if c.rows[0][0] is ONE_ROW and not is_along_n(c, seen):
            return (plain_kernel(p.stage, p.buffers),)  # one row: transposing an operand would cost as much as the product
        changing = form_changing(c, tiling, seen, origins)
        if changing is not None:
            return (*copies, replace(changing, choice=choice))
    packing, packed = pack(c, f"{c.stage.stores[0].buf}_packed", tiling.vectors, parts)
    p.buffers[packed.name] = packed
    (store,) = c.stage.stores
    product = form_contraction(c, (replace(store, value=c.value),), packed, tiling, seen, origins, parts)
    return (*copies, stage_kernel(packing, p.buffers), replace(product, choice=choice))


PRODUCTS: tuple[ProductTemplate, ...] = (
    ProductTemplate("grouped", lambda p: not fills_pairs(p.c), _grouped),
    ProductTemplate("changing pairs", lambda p: p.full.b.buf not in p.lasting and not p.one_row, _changing_pairs),
    ProductTemplate("pairs", lambda p: not p.one_row, _pairs),
    ProductTemplate("grouped, where pairs do not lie plain", lambda p: fills_pairs(p.c), _grouped_alone),
    ProductTemplate("dense", lambda p: True, _dense),
)


def product_kernels(p: Product) -> tuple[Kernel, ...]:
    """The kernels of the first template that takes the product."""
    return next(made for t in PRODUCTS if t.legal(p) and (made := t.form(p)) is not None)


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
                copies = (stage_kernel(made.stage, {**seen, made.source.name: made.source, made.copy.name: made.copy}),)
                return copies, *_fuller_rows(joined, views)
    if c.a.mask is None:
        views = dict(seen)
        joined = join_taps(narrow, views)
        if estimate(joined.k[1]) > estimate(c.k[1]):
            return (), joined, views
    return (), c, seen


def _tiling(
    c: Contraction, parts: int, buffers: Mapping[str, Buffer], options: Options, decided: Mapping[str, str]
) -> tuple[Tiling, Choice | None]:
    """The tiling of `c`: as decided, else the default; under max-autotune also what could be decided."""
    work = replace(work_of(c, buffers), parts=parts)
    if not options.max_autotune:
        return choose_tiling(work), None
    known = {str(t): t for t in candidates(work)}
    choice = Choice(work.key, tuple(known), f"{c.stage.origin} {c.stage.loc} ({work})")
    return known.get(decided.get(work.key, ""), next(iter(known.values()))), choice
