"""Does eager accept this call? Torch's own meta kernel says so, on tensors of the sizes at hand, where it is a kernel and no reference.

In: an operator and its tracing arguments. Out: nothing, or the exception that the meta kernel raises. Shape rules (graph/rules) say what a
result looks like for all sizes, and ask about sizes that vary; what else eager refuses (dtypes, ranks, numbers out of range) its own
kernel is asked, once for each operator and kind of arguments.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from .layout import UNKNOWN, SymTypes, hint_of
from .schema import info

aten = torch.ops.aten

# Operators whose meta kernel refuses what eager's CPU kernel takes, or warns of what running warns of.
UNASKED: frozenset[OpOverload] = frozenset({
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
})  # fmt: skip
MOST = 4096  # answers remembered
_ACCEPTED: set[Any] = set()


@cache
def is_asked(func: OpOverload) -> bool:
    """Has it a meta kernel in C++ or one that is written as such? References in Python (torch._refs) would load torch's own compiler."""
    row = info(func)
    if func.namespace != "aten" or func in UNASKED or row.is_view or row.is_data_shaped or row.is_value_needed:
        return False
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta"):  # its parts would be asked, references among them
        return False
    written = next((table[func] for table in global_decomposition_table.values() if func in table), None)
    return written is None or written.__module__ == "torch._meta_registrations"


class _Unknown(Exception):
    """A number that only running tells."""


def ask(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what torch's meta kernel raises for this call."""
    if not is_asked(func):
        return
    try:
        key = func, _kind(args), _kind(kwargs)
        if key in _ACCEPTED:
            return
        plain, named = _plain(args), _plain(kwargs)
    except (_Unknown, TypeError):  # a number is not known, or an argument has no hash: rules and running have to tell
        return
    try:
        with torch._C.DisableTorchFunction(), no_dispatch():
            func(*plain, **named)
    except NotImplementedError:  # there is no such kernel
        pass
    if len(_ACCEPTED) >= MOST:
        _ACCEPTED.clear()
    _ACCEPTED.add(key)


def _number(v: Any) -> Any:
    if v.node.hint is None:
        raise _Unknown
    return v.node.hint


def _kind(value: Any) -> Any:
    """What of an argument the answer can depend on."""
    if isinstance(value, torch.Tensor):
        sizes = tuple([hint_of(n) for n in value.shape])
        if UNKNOWN in sizes:
            raise _Unknown
        return sizes, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_kind(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _kind(v)) for k, v in value.items()])
    if isinstance(value, SymTypes):
        value = _number(value)
    return type(value), value


def _plain(value: Any) -> Any:
    """The argument at the sizes at hand, on no device."""
    if isinstance(value, torch.Tensor):
        if not value._has_symbolic_sizes_strides and value.device.type == "meta":
            return value
        with torch._C.DisableTorchFunction(), no_dispatch():
            strides = [hint_of(n) for n in value.stride()]
            return torch.empty_strided([hint_of(n) for n in value.shape], strides, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)([_plain(v) for v in value]) if not hasattr(value, "_fields") else value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, torch.device):
        return torch.device("meta")
    return _number(value) if isinstance(value, SymTypes) else value
