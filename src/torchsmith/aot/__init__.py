"""Ahead of time: exported programs become packages that PyTorch's own loaders run, and that run with neither libtorch nor Python.

In: names asked for. Out: the public functions, resolved when they are used, so that `load_package` works where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "aot_compile": "front", "compile_and_package": "front", "package": "front", "minify_program": "front",
    "load_package": "load", "PackagedModel": "load", "PackageError": "load",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'torchsmith.aot' has no attribute {name!r}")
    value = getattr(import_module(f"torchsmith.aot.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_PUBLIC, *(name for name in globals() if name.startswith("__"))})
