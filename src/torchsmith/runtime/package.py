"""A compiled model from a file, called with plain sequences (torch comes in through host_torch, and only where it is loaded).

In: path of a package or a model library. Out: Loaded: run(sequence of tensors or arrays) -> list.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import _native


class PackageError(RuntimeError):
    """A package or model refused something; `status` is its code (csrc/include/torchsmith/model.h)."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


NEEDS_LIBTORCH = 17  # status of a model whose operators need libtorch, where none is loaded

_native.setup_packages(PackageError)


class Loaded:
    """One model. Several threads may run it at once."""

    def __init__(
        self, path: str | os.PathLike[str], model_name: str = "model", *, threads: int = 0, verify: bool = False, device: int = 0
    ) -> None:
        self.native = _native.Package(os.fspath(path), model_name, threads, verify, device)
        self.info: dict[str, Any] = json.loads(self.native.info())
        self.native.writes([i.get("written", False) for i in self.info["inputs"]])

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Arrays that offer a buffer or DLPack -> NumPy arrays where NumPy is there, else objects with a buffer and `__dlpack__`."""
        return [_as_numpy(a) for a in self.native.run(inputs)]

    def run_torch(self, inputs: Sequence[Any]) -> list[Any]:
        return self.native.run_torch(inputs)

    def load_constants(self, values: Mapping[str, Any]) -> None:
        """Names as in the module; a call that runs meanwhile sees all old values or all new ones."""
        self.native.load_constants({name: _detached(v) for name, v in values.items()})


def use_torch() -> bool:
    """Whether torch is loaded in this process; then tensors go straight to the model."""
    if "torch" not in sys.modules:
        return False
    from . import host_torch

    host_torch.setup()
    return True


def _detached(value: Any) -> Any:
    """A tensor's values without its history, as they lie in memory."""
    return value.detach().resolve_neg().resolve_conj() if hasattr(value, "detach") else value


def _as_numpy(array: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if array is None or numpy is None or array.__dlpack_device__()[0] != 1 or array.dtype in (2, 12):
        return array  # on a device, or of a dtype that NumPy has not: bfloat16, complex32
    return numpy.asarray(array)
