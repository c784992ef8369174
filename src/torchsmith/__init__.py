"""torchsmith: a compiler for PyTorch programs. The public names, resolved lazily so that torchsmith.runtime works without torch."""

from __future__ import annotations

import gc
import time
from importlib import import_module
from typing import Any

__version__ = "0.1.0"
IMPORTED = time.time()  # files of ours that changed later are not what runs (runtime/cache.py)

_PUBLIC = {
    "compile": "api",
    "explain": "api",
    "mark_dynamic": "api",
    "mark_static": "api",
    "mark_static_address": "api",
    "mark_unbacked": "api",
    "maybe_mark_dynamic": "api",
    "ConstraintViolation": "capture.state",
    "Unsupported": "codes",
    "RecompileLimitHit": "capture.state",
    "BackendFailed": "codes",
    "compiler": "compiler",
    "refreeze": "compiler",
    "aot": "aot",
    "export": "export",
    "Dim": "export",
    "ExportedProgram": "export",
    "standalone_compile": "backends.standalone",
    "CompiledArtifact": "backends.standalone",
}


def __getattr__(name: str) -> Any:
    home = _PUBLIC.get(name)
    if home is None:
        near = f"; did you mean torchsmith.compiler.{name}?" if name in getattr(globals().get("compiler"), "__all__", ()) else ""
        raise AttributeError(f"module 'torchsmith' has no attribute {name!r}{near}")
    module = _imported(f"torchsmith.{home}")
    value = module if home == name else getattr(module, name)
    globals()[name] = value
    return value


def _imported(name: str) -> Any:
    """The module, without a garbage collection in the middle: what an import makes lives on, and a full collection walks all of torch."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_on:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*_PUBLIC, *(name for name in globals() if name.startswith("__"))})
