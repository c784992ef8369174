"""What a user declared of a dimension before tracing: a named unknown with a range, and a size as a linear expression of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DeclaredSymbol:
    """One unknown. kind: "named" (a Dim), "dynamic" or "auto"; `said` are the bounds the user stated, `lo` and `hi` those that hold now."""

    name: str
    kind: str
    said: tuple[int | None, int | None]
    lo: int
    hi: int | None

    @classmethod
    def of(cls, name: str, kind: str, low: int | None, high: int | None) -> DeclaredSymbol:
        """Without a stated minimum a size is at least 1."""
        return cls(name, kind, (low, high), 1 if low is None else low, high)


@dataclass(slots=True)
class DeclaredSize:
    """A dimension's size: scale * symbol + shift."""

    symbol: DeclaredSymbol
    scale: int = 1
    shift: int = 0
