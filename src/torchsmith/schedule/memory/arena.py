"""Offsets in one workspace of blocks that are not all alive together (no torch).

In: sizes in bytes, numbers or expressions of input symbols, and when each block lives. Out: offsets, and the height of the whole.

Sizes that vary are packed as they would be for typical sizes. What that packing puts below a block that is alive with it stays below it
for every size: the block starts where the highest of them ends.

    a: s0 * 256, b: s0 * 64, c: 4096; all alive together     ->     a at 0, c at s0 * 256, b at s0 * 256 + 4096
    a: s0 * 256, b: 4096, then c alive with both gone        ->     c at 0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...ir.bounds import Ranges, simplify_index
from ...ir.expr import Const, Expr, const, op
from ..deps import estimate

ALIGN = 64
Lives = Mapping[str, tuple[int, int]]  # first and last moment, inclusive


def pack(sizes: Mapping[str, Expr], lives: Lives, ranges: Ranges) -> tuple[dict[str, Expr], Expr]:
    """All blocks. `ranges`: of the symbols in sizes. All sizes are multiples of ALIGN."""
    sizes = {n: simplify_index(e, ranges) for n, e in sizes.items()}
    typical = {n: -(-max(0, estimate(e)) // ALIGN) * ALIGN for n, e in sizes.items()}
    starts, height = pack_static(typical, lives)
    if all(isinstance(e, Const) for e in sizes.values()):
        return {n: const(at) for n, at in starts.items()}, const(height)
    offsets: dict[str, Expr] = {}
    ends: dict[str, Expr] = {}
    under: dict[str, set[str]] = {}  # alive with it and below it
    for name in sorted(sizes, key=lambda n: (starts[n], starts[n] + typical[n], n)):
        first, last = lives[name]
        below = {m for m in ends if lives[m][0] <= last and first <= lives[m][1]}
        under[name] = below
        direct = below.difference(*(under[m] for m in below))
        offsets[name] = highest((ends[m] for m in sorted(direct)), ranges)
        ends[name] = offsets[name] + sizes[name]
    beneath = set[str]().union(*under.values())
    return offsets, highest((e for n, e in ends.items() if n not in beneath), ranges)


def highest(values: Iterable[Expr], ranges: Ranges) -> Expr:
    """The maximum of numbers that are at least 0."""
    left: list[Expr] = []
    for v in dict.fromkeys(values):
        if not any(ranges.is_le(v, other) for other in left):
            left = [*(other for other in left if not ranges.is_le(other, v)), v]
    total = left[0] if left else const(0)
    for v in left[1:]:
        total = op("max", total, v)
    return total


def pack_static(sizes: Mapping[str, int], lives: Lives) -> tuple[dict[str, int], int]:
    """Greedy by size: the largest first, each into the tightest gap among those alive with it. All sizes are aligned."""
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[str, int] = {}
    height = 0
    for name in sorted(sizes, key=lambda n: (-sizes[n], lives[n], n)):
        size, (first, last) = sizes[name], lives[name]
        best, tightest, edge = -1, -1, 0
        for offset, end, a, b in placed:  # ordered by offset
            if b < first or last < a:
                continue
            gap = offset - edge
            if gap >= size and (best < 0 or gap < tightest):
                best, tightest = edge, gap
            edge = max(edge, end)
        at = best if best >= 0 else edge
        offsets[name] = at
        height = max(height, at + size)
        row = (at, at + size, first, last)
        lo, hi = 0, len(placed)
        while lo < hi:
            mid = (lo + hi) // 2
            lo, hi = (mid + 1, hi) if placed[mid] < row else (lo, mid)
        placed.insert(lo, row)
    return offsets, height
