"""The namespace torchsmith.export: torch.export's names for torchsmith's exporter. It can be called itself, as `export` in it."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch.utils import _pytree as pytree

from .aot.dims import AdditionalInputs, Dim, ShapesCollection, dims
from .aot.exporting import export, from_torch
from .aot.program import ExportedProgram, GraphSignature
from .aot.saved import load, save

__all__ = [
    "AdditionalInputs", "Dim", "ExportedProgram", "GraphSignature", "ShapesCollection", "dims", "export", "from_torch", "load",
    "register_dataclass", "save",
]  # fmt: skip


def register_dataclass(cls: type, *, serialized_type_name: str | None = None) -> None:
    """Arguments and results may hold objects of this dataclass; a package's caller has to register it too, under the same name."""
    name = serialized_type_name or f"{cls.__module__}.{cls.__qualname__}"
    pytree.register_dataclass(cls, serialized_type_name=name)


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> ExportedProgram:
        """export(module, args, kwargs=None, *, dynamic_shapes=None, ...): see export."""
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
