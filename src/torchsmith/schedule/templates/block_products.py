"""Products as kernels of blocks: which axes are a product's rows, columns and sums, and how large its tiles are.

In: a Stage (or what is left of a group of one). Out: Product, or None; tiles.

    y[b, m, n] = f(sum over k of x(b, m, k) * w(b, k, n))       m: axes that only one factor depends on, n: only the other, b: both

Factors may be any expressions: what fusion put in front of a product (padding, a norm, a conversion) is computed where tiles are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir import dtype as dt
from ...ir.expr import Axis, Cast, Expr, Fold, Load, walk
from ...ir.folds import multiply_add
from ...ir.kernel import Tile
from ...ir.program import Buffer, Stage
from ...ir.target import Target
from ..deps import free_axes, numel

Axes = tuple[tuple[Axis, Expr], ...]
LEAST = 16  # rows, columns and sums of a product of tiles
LARGE, MIDDLE = 128, 64
FEW_TERMS, FEW_ROWS = 32, 16  # of sums whose results are most of what is read and written; rows of their tiles, held in registers
DEEP = 512  # sums from which on they may be split over programs, and how many each gets at least
EACH = 256
LONG, WAVES = 1024, 4  # sums whose parts may be so many programs for each processor, where those of others are one


@dataclass(frozen=True, slots=True)
class Product:
    """One sum of products in a Stage, `rows` and `columns` in the Stage's order."""

    fold: Fold
    x: Expr
    w: Expr
    batch: Axes
    rows: Axes
    columns: Axes

    @property
    def is_half(self) -> bool:
        """Are both factors 16-bit numbers of one dtype, so that tensor cores take them as they are?"""
        found = {narrow(e).dtype for e in (self.x, self.w)}
        return len(found) == 1 and found <= set(dt.HALF)

    @property
    def is_thin(self) -> bool:
        """Are its sums short, so that what it reads and writes beside them is most of its work?"""
        return numel(self.fold.extents) <= FEW_TERMS


def narrow(e: Expr) -> Expr:
    """A factor without its conversion to the dtype of the sum."""
    return e.arg if isinstance(e, Cast) and e.dtype is dt.f32 and e.arg.dtype in dt.HALF else e


def product_of(axes: Axes, values: tuple[Expr, ...], buffers: Mapping[str, Buffer]) -> Product | None:
    """The one Fold in `values`, seen as a product over the grid `axes`."""
    folds = {f.picking(0) for f in walk(*values) if isinstance(f, Fold)}
    (fold,) = folds if len(folds) == 1 else (None,)
    parts = multiply_add(fold) if fold is not None and fold.combine else None
    if fold is None or parts is None or any(free_axes(e) for e in fold.extents):
        return None
    x, w = parts
    in_x, in_w = free_axes(x), free_axes(w)
    if not set(fold.axes) & in_x or not set(fold.axes) & in_w:
        return None
    rows = tuple(a for a in axes if a[0] in in_x and a[0] not in in_w)
    columns = tuple(a for a in axes if a[0] in in_w and a[0] not in in_x)
    both = tuple(a for a in axes if a[0] in in_x and a[0] in in_w)
    if not rows or not columns or len(rows) + len(columns) + len(both) != len(axes):
        return None
    m, n, k = (numel(e for _, e in part) for part in (rows, columns, tuple(zip(fold.axes, fold.extents, strict=True))))
    if max(m, n) < LEAST or k < LEAST or m * n < 4 * LEAST:
        return None
    lies = {load.buf for load in walk(x, w) if isinstance(load, Load)}
    if not lies <= set(buffers):
        return None
    # columns are the axes along which results lie beside each other: the last of the grid
    if axes[-1] in rows:
        return Product(fold, w, x, both, columns, rows)
    return Product(fold, x, w, both, rows, columns)


def product_in(s: Stage, buffers: Mapping[str, Buffer]) -> Product | None:
    """A Stage as a product."""
    if s.scan or s.lets or len(s.stores) != 1 or s.stores[0].mode != "set" or s.stores[0].mask is not None:
        return None
    return product_of(tuple(s.axes), (s.stores[0].value,), buffers)


def pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def sides(p: Product, target: Target) -> tuple[int, int, int]:
    """(rows, columns, sums) of a tile: large where that leaves enough programs."""
    m, n = (max(LEAST, pow2(numel(e for _, e in part))) for part in (p.rows, p.columns))
    most = LARGE if p.is_half else MIDDLE
    tm, tn = min(m, FEW_ROWS if p.is_thin and not p.is_half else most), min(n, most)
    count = numel(e for _, e in p.batch)
    while count * -(-m // tm) * -(-n // tn) < target.weights.processors and max(tm, tn) > (32 if p.is_half else LEAST):
        if tn >= tm:
            tn //= 2
        else:
            tm //= 2
    k = max(LEAST, pow2(numel(p.fold.extents)))
    return tm, tn, min(k, 64 if p.is_half else 16)


def product_tiles(p: Product, grid: Axes, fold: Fold, target: Target) -> tuple[list[Tile], tuple[int, int]]:
    """Tiles of the grid's last two axes and of the sum; (warps, stages)."""
    tm, tn, tk = sides(p, target)
    tiles = [Tile(grid[-2][0], tm, "lanes"), Tile(grid[-1][0], tn, "lanes"), Tile(fold.axes[0], tk, "dot")]
    return tiles, (8 if tm * tn >= LARGE * LARGE else 4, 3)


def parts_of_sum(p: Product, target: Target) -> int:
    """Into how many parts a long sum with few results is split."""
    trips = numel(p.fold.extents)
    if trips < DEEP:
        return 1
    tm, tn, _ = sides(p, target)
    m, n = (numel(e for _, e in part) for part in (p.rows, p.columns))
    programs = numel(e for _, e in p.batch) * -(-m // tm) * -(-n // tn)
    waves = WAVES if trips >= LONG else 1
    return max(1, min(trips // EACH, waves * target.weights.processors // max(1, programs)))


