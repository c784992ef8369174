"""The namespace torchsmith.export: torch.export's names for torchsmith's exporter. It can be called itself, as `export` in it."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from .aot.dims import AdditionalInputs, Dim, ShapesCollection, dims
from .aot.exporting import draft_export, export, from_torch
from .aot.program import DraftReport, ExportedProgram, GraphSignature
from .aot.saved import load, save

__all__ = [
    "AdditionalInputs", "CustomDecompTable", "Dim", "DraftReport", "ExportGraphSignature", "ExportedProgram", "GraphSignature",
    "ShapesCollection", "default_decompositions", "dims", "draft_export", "export", "from_torch", "load", "register_dataclass",
    "save", "unflatten",
]  # fmt: skip

ExportGraphSignature = GraphSignature


class CustomDecompTable(dict[Any, Any]):
    """Operators that run_decompositions writes out. What is taken out of it, so that the program keeps it, need not be in it."""

    def __delitem__(self, op: Any) -> None:
        dict.pop(self, op, None)

    def pop(self, op: Any, default: Any = None) -> Any:
        return dict.pop(self, op, default)


def default_decompositions() -> CustomDecompTable:
    """For run_decompositions: empty, because a program is functional ATen already and the compiler decomposes operators itself."""
    return CustomDecompTable()


def unflatten(module: ExportedProgram, flat_args_adapter: Any = None) -> nn.Module:
    """The program as a module with the exported module's tree of submodules, which hold its parameters and buffers under their names.
    It runs as a whole: its submodules cannot be called or exchanged."""
    if not isinstance(module, ExportedProgram):
        raise TypeError(f"unflatten takes a program of torchsmith.export.export, not {type(module).__name__}")
    if flat_args_adapter is not None:
        raise ValueError("an exported program of torchsmith takes no flat_args_adapter: call it with the structure it was exported with")
    return module.module()


def register_dataclass(cls: type, *, serialized_type_name: str | None = None) -> None:
    """Arguments and results may hold objects of this dataclass; a package's caller has to register it too, under the same name."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise TypeError(f"register_dataclass takes a dataclass, not {cls!r}")
    name = serialized_type_name or f"{cls.__module__}.{cls.__qualname__}"
    pytree.register_dataclass(cls, serialized_type_name=name)


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> ExportedProgram:
        """export(module, args, kwargs=None, *, dynamic_shapes=None, ...): see export."""
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
