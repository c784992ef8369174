"""Extern calls as a model library carries them: data for csrc/native/operator.c, without a name of Python (no torch).

Made by runtime/externs_torch.py from a manifest's rows, written as C text by emit/model.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Number:
    """A constant (a double by its bits), or with a slot the run-time number of that place, whose kind is the value."""

    value: int
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Param:
    """One argument in the letters of csrc/native/libtorch.h."""

    letter: str
    numbers: tuple[Number, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One extern call as a model library carries it: csrc/native/libtorch.h documents the fields of ts_operator."""

    name: str
    overload: str
    said: str
    symbol: str
    version: int
    params: tuple[Param, ...]
    tensors: tuple[tuple[str, int], ...]
    outs: tuple[tuple[str, int], ...]
    is_planned: bool
