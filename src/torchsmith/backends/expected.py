"""What an artifact was compiled for, input by input: types, sizes, strides, and what is assumed of sizes that vary.

In: a FunctionalGraph and the names of its inputs, or the JSON that `to_json` gave. Out: Expected, whose `check` names the input that is at
fault. Inputs like those of an earlier call are compared by the check of guards in C, sizes that vary included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..capture.guards import make_entry, tensor_guard
from ..capture.source import Guard, Local, Source, TensorProperty
from ..graph.eager import origin_value
from ..graph.layout import is_lazy
from ..graph.sizes import LARGEST, print_condition
from ..graph.spec import FunctionalGraph, TensorSpec
from ..ir.expr import Const, Expr, Sym, const, op
from ..ir.number import number_of
from ..ir.parse import parse_expr

LIMIT = 4  # kinds of inputs (classes, gradients, strides of single elements) that C knows
NO_GLOBALS: dict[str, Any] = {}


def same_steps(shape: Sequence[int], a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Are two strides of this shape alike? Those of a dimension of one element say nothing."""
    return all(n < 2 or x == y for n, x, y in zip(shape, a, b, strict=True))


def _place(origin: tuple[str | int, ...], places: Sequence[Source]) -> Source:
    """Where a symbol's number is read: an input, a size or a stride of it."""
    kind, number, *dim = origin
    return TensorProperty(places[int(number)], kind, int(dim[0])) if dim else places[int(number)]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Expected:
    """`rows`: per input what it has to be, None for one that nothing reads; `conditions`: what is assumed of `symbols` (name -> origin)."""

    names: tuple[str, ...]
    rows: tuple[TensorSpec | Expr | None, ...]
    symbols: tuple[tuple[str, tuple[str | int, ...]], ...]
    conditions: tuple[Expr, ...]
    entries: list[Any] = field(default_factory=list)  # checks in C

    @classmethod
    def of(cls, fg: FunctionalGraph, names: Sequence[str], conditions: Sequence[Expr]) -> Expected:
        told = [s for s in fg.symbols if s.origin[0] != "bound"]
        ranges = [op("ge", s.sym, const(s.lo)) for s in told if s.lo > 0]
        ranges += [op("le", s.sym, const(s.hi)) for s in told if s.hi is not None and s.hi < LARGEST]
        symbols = tuple((s.sym.name, s.origin) for s in told)
        return cls(tuple(names), tuple(fg.inputs[: len(names)]), symbols, (*ranges, *conditions))

    def check(self, inputs: Sequence[Any]) -> None:
        """Raises TypeError, ValueError for inputs that the code was not compiled for."""
        if len(inputs) != len(self.names):
            raise TypeError(f"the graph takes {len(self.names)} inputs ({', '.join(self.names)}), not {len(inputs)}")
        for entry in self.entries:
            if entry.check(inputs, NO_GLOBALS, None):
                return
        for i, (row, value) in enumerate(zip(self.rows, inputs, strict=True)):
            if isinstance(row, TensorSpec):
                self._is_tensor(f"input {i} ({self.names[i]})", row, value)
            elif row is not None and (isinstance(value, torch.Tensor) or not isinstance(value, (int, float))):
                raise TypeError(f"input {i} ({self.names[i]}) must be a number, not {type(value).__name__}")
        symbols = {name: origin_value(origin, inputs) for name, origin in self.symbols}
        for i, (row, value) in enumerate(zip(self.rows, inputs, strict=True)):
            if isinstance(row, TensorSpec):
                self._has_sizes(f"input {i} ({self.names[i]})", row, value, symbols)
        for condition in self.conditions:
            if number_of(condition, symbols) in (False, 0):
                numbers = ", ".join(f"{k} = {v}" for k, v in symbols.items())
                raise ValueError(f"the artifact was compiled for {print_condition(condition)}; here {numbers}")
        if len(self.entries) < LIMIT and all(kind in ("size", "stride", "scalar") and len(at) < 3 for _, (kind, *at) in self.symbols):
            self.entries.append(self._entry(inputs))

    def _entry(self, inputs: Sequence[Any]) -> Any:
        """The check, in C, of inputs of the classes, devices and steps of these."""
        places: list[Source] = [Local(name) for name in self.names]
        symbols = {name: _place(origin, places) for name, origin in self.symbols}
        guards: list[Guard] = []
        numbers: list[Guard] = []
        for at, row, value in zip(places, self.rows, inputs, strict=True):
            if not isinstance(row, TensorSpec):
                guards += [] if row is None else [Guard(at, "type", type(value), "")]
                continue
            pairs = zip(row.shape, row.strides, strict=True)
            open_dims = [d for d, pair in enumerate(pairs) if not all(isinstance(n, Const) for n in pair)]
            guards.append(Guard(at, "tensor", tensor_guard(value, open_dims), ""))
            for d in open_dims:
                for kind, wanted in (("size", row.shape[d]), ("stride", row.strides[d])):
                    place = TensorProperty(at, kind, d)  # type: ignore[arg-type]
                    if isinstance(wanted, Sym) and symbols.get(wanted.name) == place:
                        continue
                    mine = Sym(f"{kind}_{len(symbols)}")
                    symbols[mine.name] = place
                    numbers.append(Guard(place, "shape", op("eq", mine, wanted), ""))
        conditions = [Guard(places[0], "shape", c, "") for c in self.conditions]
        names = self.names
        return make_entry([*guards, *numbers, *conditions], (), None, None, len, names=names, free_names=(), symbols=symbols)

    def _is_tensor(self, what: str, row: TensorSpec, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{what} must be a tensor, not {type(value).__name__}")
        if value.dtype != row.dtype:
            raise TypeError(f"{what} must be {row.dtype}, not {value.dtype}")
        if is_lazy(value):
            raise ValueError(f"{what}: its memory holds negated or conjugated values; call resolve_neg() or resolve_conj()")
        if value.device.type != torch.device(row.device).type:
            raise TypeError(f"{what} must lie on {row.device}, not {value.device}")
        if value.dim() != len(row.shape):
            raise ValueError(f"{what} must have {len(row.shape)} dimensions, not {value.dim()}")

    def _has_sizes(self, what: str, row: TensorSpec, value: torch.Tensor, symbols: dict[str, Any]) -> None:
        shape = tuple(number_of(s, symbols) for s in row.shape)
        if any(a is not None and a != b for a, b in zip(shape, value.shape, strict=True)):
            said = ", ".join(print_condition(s) for s in row.shape)
            here = "" if said == str(shape)[1:-1].rstrip(",") else f", which is {shape} here"
            raise ValueError(f"{what} must have shape ({said}){here}, not {tuple(value.shape)}")
        strides = tuple(number_of(s, symbols) for s in row.strides)
        if value.numel() and not same_steps(value.shape, strides, value.stride()):
            raise ValueError(f"{what} must have strides {strides}, not {value.stride()}: it was compiled for that layout")

    def to_json(self) -> dict[str, Any]:
        def row(r: Any) -> Any:
            if isinstance(r, TensorSpec):
                return [str(r.dtype).removeprefix("torch."), list(map(repr, r.shape)), list(map(repr, r.strides)), r.device]
            return r if r is None else repr(r)

        rows, conditions = list(map(row, self.rows)), list(map(repr, self.conditions))
        return {"names": self.names, "rows": rows, "symbols": self.symbols, "conditions": conditions}

    @classmethod
    def from_json(cls, given: Any) -> Expected:
        """Raises KeyError, ValueError, TypeError for anything else than what to_json gave."""
        def exprs(texts: Sequence[str]) -> tuple[Expr, ...]:
            return tuple(map(parse_expr, texts))

        def row(r: Any) -> Any:
            if r is None or isinstance(r, str):
                return r if r is None else parse_expr(r)
            dtype = getattr(torch, r[0])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{r[0]} is no dtype")
            return TensorSpec(dtype, exprs(r[1]), exprs(r[2]), str(r[3]))

        symbols = tuple((str(n), tuple(o)) for n, o in given["symbols"])
        return cls(tuple(given["names"]), tuple(map(row, given["rows"])), symbols, exprs(given["conditions"]))
