"""Parameters whose memory was freed after packing (options freezing_discard_parameters): what is left of them, and the error they give.

In: parameters that only `prepare` read. Out: the same objects, now of class DiscardedParameter, with metadata and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

METADATA = frozenset({
    "__get__", "__hash__", "__len__", "dim", "ndimension", "size", "stride", "numel", "nelement", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_inference", "storage_offset", "untyped_storage", "__repr__", "__reduce_ex__",
    "has_names", "get_device", "requires_grad_", "type",
})  # fmt: skip


class DiscardedParameter(torch.nn.Parameter):
    """A parameter that lives on only in what compiled graphs packed of it. Whatever would read it is an error."""

    _torchsmith_was = torch.nn.Parameter  # for guards

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in METADATA - {"__repr__", "__reduce_ex__"} and not (name == "__get__" and getattr(func, "__self__", None) in _DATA):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "__repr__" and isinstance(args[0], cls):
            return f"DiscardedParameter(shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        raise RuntimeError(
            f"{name}: this parameter was discarded after torchsmith had packed it (options freezing_discard_parameters=True). The model "
            "runs only through its compiled graphs; to use the parameter again give it new values: load_state_dict(..., assign=True)"
        )


_DATA = (torch.Tensor.data, torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH, torch.Tensor.real, torch.Tensor.imag)


def discard(*tensors: torch.Tensor) -> None:
    """Free the memory of those that are plain parameters and own it alone; others stay as they are."""
    for t in tensors:
        if type(t) is not torch.nn.Parameter:
            continue
        storage = t.untyped_storage()
        if not storage.resizable() or torch._C._storage_Use_Count(storage._cdata) > ALONE:
            continue  # somebody else looks at this memory: a view, a state_dict, a tied parameter
        with torch.no_grad():
            storage.resize_(0)
        t.__class__ = DiscardedParameter


ALONE = 2  # the parameter's own reference and that of the storage object at hand
