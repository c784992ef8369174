"""From a library and its manifest to a callable of the graph's inputs (torch comes in through host_torch only).

In: library path, manifest. Out: `_native.Graph`: call(*inputs) -> tuple of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..codes import Unsupported
from . import _native
from .manifest import Manifest


def arch_of(device: str) -> int:
    """The architecture of a device ("cuda:1": 90 for sm_90), 0 for the processor. Raises Unsupported("RUN010") without a driver."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return 0
    try:
        return _native.cuda_arch(int(index or 0))
    except ImportError as e:
        raise Unsupported("RUN010", detail=str(e)) from e


class NativeError(RuntimeError):
    """Native code reported an error and there was no eager function to repeat the call with."""


def load(
    library: Path | str, manifest: Manifest, *, eager: Callable[..., Any] | None = None, name: str = "", frozen: bool = False,
    tail: Sequence[Any] = (), threads: int = 0, pool: str = "torch", discard: bool = False, records: int = 8, writes: Sequence[int] = (),
) -> Callable[..., tuple[Any, ...]]:  # fmt: skip
    """The compiled graph, called with all inputs but the last ones, which are `tail`, made of the program's own data.

    `eager` takes what the caller gives and returns the same tuple; it repeats calls that fail natively. `frozen`: constants that are
    inference tensors, whose writes cannot be seen, may be prepared once. The callable's `refreeze()` forgets what was prepared.
    `threads`: at most so many run a kernel; 0: as many as torch uses. `pool`: "torch" or "own".
    `discard`: free the memory of parameters that only `prepare` reads. `records`: recorded launches kept of a segment on a device, 0: none.
    `writes`: by input, how often eager moves its version counter (0 of one that is written: through `.data`); without it once if written.
    """
    from . import host_torch

    try:
        return host_torch.graph(str(library), manifest, eager, name, frozen, tail, threads, pool, discard, records, writes)
    except ImportError as e:
        raise Unsupported("RUN010", detail=str(e)) from e
    except OSError as e:
        raise Unsupported("RUN003", detail=str(e)) from e
