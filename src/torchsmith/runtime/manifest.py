"""What a host must know of one compiled graph besides its library: plain JSON, no code (no torch).

In: the dict that emit.host.describe made, or JSON text from the cache. Out: Manifest.

    inputs   [{kind: tensor|number|unused, dtype, ndim, measured, written, read}]    measured: sizes and strides are read; read: by run
    results  [{kind: fresh, dtype} | {kind: same, of} | {kind: input, of}
              | {kind: view, of: [input|result, i], ndim, dtype, at, apart} | {kind: number, dtype, at}]    at: place in result_syms
    consts   [i]    inputs that `prepare` reads: it runs again when one of them changes
    packing  digest of what `prepare` does; graphs with the same one share its results
    state    bytes of what prepare computes
    device   on which kernels run: "cpu", or "cuda:0", where the index is meant for calls whose inputs say none
    segments [[launches, library calls]] that go to a device together
    externs  [{op, args, kwargs, returned, via, loc, tensors: [[dtype, ndim]], outs: [[dtype, ndim] | null], numbers, mutates}]
             an argument is null, bool, int, float, or [tensor, i] | [number, i, dtype] | [str, s] | [dtype, name]
             | [enum, kind, value] | [list, argument...]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1


@dataclass(frozen=True, slots=True)
class ExternRow:
    """One extern call, in the order in which the host program numbers them."""

    op: str
    args: list[Any]
    kwargs: dict[str, Any]
    returned: str
    via: str
    loc: str
    tensors: list[list[Any]]
    outs: list[list[Any] | None]
    numbers: list[str]
    mutates: list[int]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One compiled graph, described."""

    symbol: str
    name: str
    inputs: list[dict[str, Any]]
    results: list[dict[str, Any]]
    externs: list[ExternRow]
    kernels: int
    consts: list[int]
    state: int = 0
    packing: str = ""
    device: str = "cpu"
    segments: list[list[int]] = field(default_factory=list)
    peak: int = -1  # bytes of the call's workspace, which holds all temporaries but what externs return; -1: sizes vary
    abi: int = VERSION

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Manifest:
        """From emit.host.describe(plan) or from parsed JSON. Raises ValueError for anything else."""
        try:
            if given["abi"] != VERSION:
                raise ValueError(f"manifest version {given['abi']}, not {VERSION}")
            return cls(
                str(given["symbol"]), str(given["name"]), list(given["inputs"]), list(given["results"]),
                [ExternRow(**row) for row in given["externs"]], int(given["kernels"]),
                [int(i) for i in given["consts"]], int(given.get("state", 0)),
                str(given.get("packing", "")), str(given.get("device", "cpu")),
                [[int(n) for n in s] for s in given.get("segments", [])], int(given.get("peak", -1)),
            )  # fmt: skip
        except (KeyError, TypeError) as e:
            raise ValueError(f"not a manifest: {e!r}") from e

    def to_json(self) -> str:
        """Text that `from_json` reads back; NaN and infinities are written as Python's json does."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        return cls.of(json.loads(text))
