"""Compiles a torch function through the whole road below the functional graph, for comparison with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from graph_harness import graph_of
from lower_harness import flat

from torchsmith.options import Options
from torchsmith.pipeline import compile_functional
from torchsmith.runtime.load import load


def compiled(fn: Any, args: tuple[torch.Tensor, ...]) -> Callable[..., Sequence[Any]]:
    """`fn` as native code for arguments like `args`."""
    fg = graph_of(fn, *args)
    manifest, library, _ = compile_functional(fg, Options(force_disable_caches=True), "test")
    call = load(library, manifest, eager=lambda *a: flat(fn(*a)), name="test")
    return lambda *a: call(*a, *fg.consts)


def check_all(cases: Sequence[tuple[str, Any, tuple[torch.Tensor, ...]]], **near: Any) -> None:
    """All cases as one graph, so that one library holds their kernels; every wrong one is named."""
    args = tuple(a for _, _, own in cases for a in own)

    def everything(*given: torch.Tensor) -> list[torch.Tensor]:
        rest, results = list(given), []
        for _, fn, own in cases:
            taken, rest = rest[: len(own)], rest[len(own) :]
            results += flat(fn(*taken))
        return results

    names = [name for name, fn, own in cases for _ in flat(fn(*own))]
    got = compiled(everything, args)(*args)
    wrong = []
    for name, actual, expected in zip(names, got, everything(*args), strict=True):
        try:
            torch.testing.assert_close(actual, expected, equal_nan=True, **near)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
        if actual.stride() != expected.stride() and expected.numel():
            wrong.append(f"{name}: strides {actual.stride()} instead of {expected.stride()}")
    assert not wrong, "\n".join(wrong)
