"""The tiling decision of a contraction: what it is, what it may depend on, and the cost model behind the default.

In: Work, the sizes of one contraction as numbers. Out: Tilings, the best guess first; `mode="max-autotune"` measures the rest of them.
Nothing here knows a model or an operator: equal Work, equal decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from ...ir.target import CPU, Target

UNKNOWN = 1 << 20  # what a symbolic size counts as
TYPICAL = (1, 8, 30, 100, 1000)  # rows that are known at run time only: a tile should serve all of these
BATCHES = (1, 2, 4, 8, 32)  # the same, where rows are known to be a multiple of a number
ALIASED = 0.7  # what is left of the speed where the rows of a tile share too few sets
CANDIDATES = 6  # most tilings that are measured
WORTH = 0.8  # tilings whose score is below this part of the best are not measured

Sweep = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class Tiling:
    """rows x vectors accumulators in registers. sweep "rows": all column tiles for a row tile, then the next row tile, so
    that results are written in order; "columns": the packed operand's tile stays in the first-level cache while the rows pass."""

    rows: int
    vectors: int
    sweep: Sweep

    def __str__(self) -> str:
        return f"{self.rows}x{self.vectors} by {self.sweep}"


@dataclass(frozen=True, slots=True)
class Work:
    """batch x outer x m x n results of taps x k multiply-adds each; m is the tiled row axis, `outer` the product of the others; None:
    known at run time only. a, b: storage dtypes; multiple: what divides an m that is not known (the image of a batch of them). step: bytes
    from one row of a to the next, where known. parts: elements of k beside each other in the lanes."""

    batch: int | None
    outer: int | None
    m: int | None
    n: int | None
    taps: int | None
    k: int | None
    a: str
    b: str
    multiple: int = 1
    step: int | None = None
    parts: int = 1
    target: Target = CPU

    @property
    def key(self) -> str:
        """Text that names this work in a file of remembered decisions."""
        values = [getattr(self, f.name) for f in fields(self) if f.name != "target"] + [self.target.name] * (self.target is not CPU)
        return " ".join("?" if v is None else str(int(v)) if isinstance(v, bool) else str(v) for v in values)

    def __str__(self) -> str:
        def product(*sizes: int | None) -> str:
            return " x ".join("?" if s is None else str(s) for s in sizes if s != 1) or "1"

        return f"{product(self.batch, self.outer, self.m)} rows, {product(self.n)} columns, {product(self.taps, self.k)} products"

    @property
    def lanes(self) -> int:
        """Sums in a vector."""
        return self.target.vectors.lanes(8 if self.a == "f64" else 4)

    @property
    def packed_bytes(self) -> int:
        sizes = [64 if v is None else v for v in (self.batch, self.n, self.taps, self.k)]
        return sizes[0] * sizes[1] * sizes[2] * sizes[3] * {"f32": 4, "f64": 8}.get(self.b, 2)


def score(work: Work, rows: int, vectors: int) -> float:
    """Useful multiply-adds per cycle, as a part of the most that is possible.

    A tile step costs rows * vectors multiply-adds, two a cycle, or what takes longer: its loads (rows of a, vectors of b and their
    prefetches), or the stream of b from the second-level cache, some 24 bytes a cycle. Rows that are a power of two apart drive each other
    out of the first-level cache.
    """
    unknown = TYPICAL if work.multiple == 1 else tuple(work.multiple * b for b in BATCHES)
    sizes, n = (work.m,) if work.m else unknown, (work.n or UNKNOWN) * work.parts
    useful = sum(m / (-(-m // rows) * rows) for m in sizes) / len(sizes) * n / (-(-n // (work.lanes * vectors)) * work.lanes * vectors)
    steps = rows * vectors
    caches = work.target.caches
    if work.step and rows * math.gcd(work.step, caches.turn) > caches.ways * caches.turn:
        useful *= ALIASED
    return useful * steps / max(steps, 1.2 * (2 * vectors + rows), 5.3 * vectors, 8) * steps / (steps + 0.4)


def default_sweep(work: Work) -> Sweep:
    """A packed operand that stays in the second-level cache is swept for every row tile."""
    return "rows" if work.packed_bytes <= work.target.caches.near else "columns"


def candidates(work: Work, most: int = CANDIDATES) -> tuple[Tiling, ...]:
    """Tilings worth measuring, the default first; then other tiles of about its score, then the other sweep."""
    m, n = work.m or UNKNOWN, (work.n or UNKNOWN) * work.parts
    scored: list[tuple[float, int, int]] = []
    registers = work.target.vectors.registers
    for rows in range(1, min(registers // 2, m) + 1):
        # beside the accumulators a register per vector of b and one for a: a tile without them spills in every step
        for vectors in range(1, min((registers - 1) // (rows + 1), 8, -(-n // work.lanes)) + 1):
            scored.append((score(work, rows, vectors), rows, vectors))
    first = 0
    for i, row in enumerate(scored):
        if row[0] > scored[first][0] + 1e-9:
            first = i
    best, rows, vectors = scored[first]
    sweep = default_sweep(work)
    other: Sweep = "columns" if sweep == "rows" else "rows"
    near = sorted((-s, r, v) for s, r, v in scored if (r, v) != (rows, vectors) and s >= WORTH * best)
    tiles = [(rows, vectors), *_apart([(r, v) for _, r, v in near], (rows, vectors), most)]
    found = [Tiling(rows, vectors, sweep), Tiling(rows, vectors, other), *(Tiling(r, v, sweep) for r, v in tiles[1:])]
    return tuple(found[:most])


def _apart(tiles: list[tuple[int, int]], first: tuple[int, int], most: int) -> list[tuple[int, int]]:
    """Some of `tiles`, best first, no two with equal vectors and nearly equal rows."""
    kept = [first]
    for rows, vectors in tiles:
        if len(kept) <= most and all(v != vectors or abs(r - rows) >= max(2, rows // 4) for r, v in kept):
            kept.append((rows, vectors))
    return kept[1:]


def best_score(work: Work) -> float:
    tiling = choose_tiling(work)
    return score(work, tiling.rows, tiling.vectors)


def choose_tiling(work: Work) -> Tiling:
    return candidates(work, 1)[0]
