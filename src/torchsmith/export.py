"""The namespace torchsmith.export: torch.export's names for torchsmith's exporter. It can be called itself, as `export` in it."""

from __future__ import annotations

import sys
import types
from typing import Any

from .aot.dims import Dim, dims
from .aot.exporting import export, from_torch
from .aot.program import ExportedProgram, GraphSignature
from .aot.saved import load, save

__all__ = ["Dim", "ExportedProgram", "GraphSignature", "dims", "export", "from_torch", "load", "save"]


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> ExportedProgram:
        """export(module, args, kwargs=None, *, dynamic_shapes=None, ...): see export."""
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
