"""Plain graphs as torch.export's programs, which other runtimes' own converters read.

In: a PlainGraph. Out: a torch.export.ExportedProgram of it, whose inputs are the graph's; parameters are inputs like others, so that a
change of a weight is seen.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .plain import PlainGraph, numbers


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what converters say of their own deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def export(plain: PlainGraph) -> Any:
    """An ExportedProgram. Raises what torch.export raises."""
    mode = FakeTensorMode()
    with mode:
        examples = tuple(torch.empty_strided(numbers(s.shape), numbers(s.strides), dtype=s.dtype) for s in plain.inputs)
    with torch.no_grad():
        return import_module("torch.export").export(plain.module(), examples, strict=False)
