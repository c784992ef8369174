"""Padding: constant, reflection, replication. In: a Ref and (lo, hi) pairs, last dimension first; out: one stage of an index map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir.expr import Expr, op
from .cat import conjunction, masked
from .core import Builder
from .numerics import scalar
from .ref import ZERO, Index, Ref, is_zero, known, size
from .table import lowers


def _lows(x: Ref, pad: Sequence[Any]) -> list[Expr]:
    """Elements before the first, for each dimension of x."""
    found: list[Expr] = [ZERO] * x.rank
    for k in range(len(pad) // 2):
        found[x.rank - 1 - k] = size(pad[2 * k])
    return found


@lowers("aten.constant_pad_nd.default")
def lower_constant_pad(cx: Builder, x: Ref, pad: Sequence[Any], value: Any = 0) -> Ref:
    lows, fill = _lows(x, pad), scalar(value, x.dtype)

    def at(i: Index) -> Expr:
        place = [k - lo for k, lo in zip(i, lows, strict=True)]
        tests = []
        for d, n in enumerate(x.shape):
            if n is cx.shape[d] and is_zero(lows[d]):
                continue
            before = known(lows[d])
            if before is None or before > 0:
                tests.append(op("ge", place[d], ZERO))
            tests.append(op("lt", place[d], n))
        return masked(x, tuple(place), conjunction(tests), fill)

    return cx.stage(at)


def _mapped(cx: Builder, x: Ref, pad: Sequence[Any], back: Callable[[Expr, Expr], Expr]) -> Ref:
    """Each padded dimension reads from back(position without padding, size)."""
    lows = _lows(x, pad)
    padded = {x.rank - 1 - k for k in range(len(pad) // 2)}

    def at(i: Index) -> Expr:
        return x.load(tuple(back(k - lows[d], x.shape[d]) if d in padded else k for d, k in enumerate(i)))

    return cx.stage(at)


@lowers("aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default")
def lower_reflection_pad(cx: Builder, x: Ref, pad: Sequence[Any]) -> Ref:
    """... 2 1 | 0 1 2 3 | 2 1 ...: the distance to the last element is folded back at both ends."""

    def back(k: Expr, n: Expr) -> Expr:
        above = op("max", k, -k)
        return op("min", above, (n - 1) * 2 - above)

    return _mapped(cx, x, pad, back)


@lowers("aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default")
def lower_replication_pad(cx: Builder, x: Ref, pad: Sequence[Any]) -> Ref:
    return _mapped(cx, x, pad, lambda k, n: op("min", op("max", k, ZERO), n - 1))
