"""Does eager accept this call, and what does it make of it? Torch's own kernels say so, once for each operator and kind of arguments.

In: an operator and its tracing arguments. Out: nothing, or the exception that the kernel raises. Shape rules (graph/rules) say what a
result looks like for all sizes, and ask about sizes that vary; what else eager refuses (dtypes, ranks, numbers out of range) is asked of

    ask      the meta kernel, at the sizes at hand, where it is a kernel and no reference
    compare  eager's CPU kernel, on small made-up data; what it returns is held against what the rule said, too: a wrong rule is loud
             (GRA014). An element-wise operator is asked at sizes of at most 2, others where the sizes at hand are small; of several
             dtypes in large tensors it is asked whether they go together
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import torch
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from ..codes import Unsupported
from ..ir.nested import leaves
from .layout import UNKNOWN, hint_of
from .schema import bind, info
from .sizes import SymTypes

aten = torch.ops.aten

# Operators whose meta kernel refuses what eager's CPU kernel takes, or warns of what running warns of.
UNASKED: frozenset[OpOverload] = frozenset({
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
})  # fmt: skip
# Operators whose results or refusals are about values, or about the memory beside a view: nothing can be learned from made-up ones (some
# kernels follow them out of memory). copy stands for copy_, whose target keeps its own strides.
_UNCOMPARED = """as_strided as_strided_copy as_strided_scatter copy empty empty_like empty_strided empty_permuted new_empty
    new_empty_strided resize _fft_r2c _fft_c2r _fft_c2c _assert_async _assert_scalar _functional_assert_async
    _functional_assert_scalar _ctc_loss segment_reduce linalg_ldl_solve"""
UNCOMPARED = frozenset(_UNCOMPARED.split())
MOST = 4096  # answers remembered
SMALL = 1 << 14  # elements of all operands and results: beyond it, only element-wise operators are compared, at other sizes
_ACCEPTED: set[Any] = set()
_COMPARED: set[Any] = set()


def forget() -> None:
    """Ask again about every operator."""
    _ACCEPTED.clear()
    _COMPARED.clear()


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
        with torch._C.DisableTorchFunction():
            key = func, _kind(args), _kind(kwargs)
            if key in _ACCEPTED:
                return
            plain, named = _plain(args), _plain(kwargs)
    except (_Unknown, TypeError):  # a number is not known, or an argument has no hash: rules and running have to tell
        return
    params = info(func).params
    if "device" in params and not _tensors((args, kwargs)):  # without one it would be made, and random numbers drawn
        named |= {"device": torch.device("meta")} | ({"generator": None} if "generator" in params else {})
    try:
        with torch._C.DisableTorchFunction(), no_dispatch():
            func(*plain, **named)
    except NotImplementedError:  # there is no such kernel
        pass
    if len(_ACCEPTED) >= MOST:
        _ACCEPTED.clear()
    _ACCEPTED.add(key)


# A gradient that a mask does not ask for: eager's kernels give some of them all the same.
NOTHING = "None"


@cache
def is_compared(func: OpOverload) -> bool:
    """Has it a CPU kernel whose answer on made-up data says something?"""
    row = info(func)
    if func.namespace != "aten" or func in UNASKED or row.writes or row.is_random or row.is_data_shaped or row.is_value_needed:
        return False
    if row.name.split(".")[1] in UNCOMPARED:
        return False
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU")


def _is_trusting(func: OpOverload) -> bool:
    """Kernels of derivatives do not check positions and lengths, which the forward kernel has made or checked: made-up ones could lead
    out of memory."""
    return "_backward" in func.name()


def _has_masks(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Are there masks among indices? How many elements they choose, and so what goes with them, is about values."""
    given = bind(func, args, kwargs).get("indices", ()) if "indices" in info(func).params else ()
    return isinstance(given, (list, tuple)) and any(t.dtype in (torch.bool, torch.uint8) for t in given if t is not None)


def compare(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, loc: str) -> None:
    """Raise what eager's kernel raises for such a call on made-up data; Unsupported("GRA014") where its result has another shape, dtype or
    order in memory than `result`. Where zeros are refused, ones are tried, since a divisor may not be zero."""
    if not is_compared(func):
        return
    with torch._C.DisableTorchFunction():
        _compare(func, args, kwargs, result, loc)


def _compare(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, loc: str) -> None:
    if _is_trusting(func) and any(not (t.is_floating_point() or t.is_complex()) for t in _tensors((args, kwargs))):
        return
    if _has_masks(func, args, kwargs):
        return
    try:
        cap = 2 if torch.Tag.pointwise in func.tags else None
        if cap is None and _elements((args, kwargs, result)) > SMALL:
            if len({t.dtype for t in _tensors((args, kwargs))}) < 2:
                return
            cap = 4  # whether these dtypes go together: sizes that equal each other still do
        key = func, cap, _kind(args, cap), _kind(kwargs, cap)
        if key in _COMPARED:
            return
        plain = _plain_kinds(args, kwargs) if cap == 4 else ()
    except (_Unknown, TypeError):
        return
    with no_dispatch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if cap != 4 or any(_run(func, args, kwargs, cap, table)[1] is None for table in plain):
            found, refused = _run(func, args, kwargs, cap, {})
            if refused is not None and not isinstance(refused, torch.linalg.LinAlgError):
                raise refused
            if refused is None:
                mine, theirs = (_described(x, cap) for x in (result, found))
                if len(mine) != len(theirs) or any(a != b for a, b in zip(mine, theirs, strict=True) if a != NOTHING):
                    raise Unsupported("GRA014", at=loc, detail=f"{func}: {mine} instead of {theirs}")
    if len(_COMPARED) >= MOST:
        _COMPARED.clear()
    _COMPARED.add(key)


Kinds = dict[torch.dtype, torch.dtype]


def _run(func: OpOverload, args: Any, kwargs: Any, cap: int | None, table: Kinds) -> tuple[Any, Exception | None]:
    """What eager makes of zeros, else of ones, or what it raises."""
    refused: Exception | None = None
    for fill in (0, 1):
        try:
            return func(*_made_up(args, fill, cap, table), **_made_up(kwargs, fill, cap, table)), None
        except Exception as e:  # its type and words are the answer
            refused = refused or e
    return None, refused


def _plain_kinds(args: Any, kwargs: Any) -> tuple[Kinds, ...]:
    """Dtypes that go together if any do: everything in float32, or all floats in float32."""
    kinds = {t.dtype for t in _tensors((args, kwargs))}
    return dict.fromkeys(kinds, torch.float32), {k: torch.float32 for k in kinds if k.is_floating_point}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in leaves(value) if isinstance(t, torch.Tensor)]


def _described(value: Any, cap: int | None) -> list[Any]:
    """dtype, sizes and the strides that matter of every tensor; where sizes were cut, what that cannot have changed."""
    said: list[Any] = []
    for t in leaves(value):
        if not isinstance(t, torch.Tensor):
            said.append(NOTHING if t is None else "")
            continue
        sizes = [hint_of(n) for n in t.shape]
        steps = [hint_of(s) for s, n in zip(t.stride(), sizes, strict=True) if n > 1] if 0 not in sizes else []
        said.append((t.dtype, sizes, steps) if cap is None else (t.dtype, t.dim()))
    return said


def _elements(value: Any) -> int:
    """Of all tensors."""
    return sum(math.prod(hint_of(n) for n in t.shape) for t in _tensors(value))


def _made_up(value: Any, fill: int, cap: int | None, table: Kinds) -> Any:
    """The argument at the sizes at hand, or at most `cap`, on the CPU, full of one number; dtypes as `table` says."""
    if isinstance(value, torch.Tensor):
        sizes, kind = [hint_of(n) for n in value.shape], table.get(value.dtype, value.dtype)
        if cap is not None:
            return torch.full([min(n, cap) for n in sizes], fill, dtype=kind)
        strides = [hint_of(n) for n in value.stride()]
        extent = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
        return torch.full((extent,), fill, dtype=kind).as_strided(sizes, strides)
    if isinstance(value, (list, tuple)):
        return type(value)([_made_up(v, fill, cap, table) for v in value]) if not hasattr(value, "_fields") else value
    if isinstance(value, dict):
        return {k: _made_up(v, fill, cap, table) for k, v in value.items()}
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return _number(value) if isinstance(value, SymTypes) else value


def _number(v: Any) -> Any:
    if v.node.hint is None:
        raise _Unknown
    return v.node.hint


def _kind(value: Any, cap: int | None = None) -> Any:
    """What of an argument the answer can depend on."""
    if isinstance(value, torch.Tensor):
        sizes = tuple([hint_of(n) for n in value.shape])
        if UNKNOWN in sizes:
            raise _Unknown
        if cap is not None:
            return tuple([min(n, cap) for n in sizes]), value.dtype
        return sizes, tuple([hint_of(n) for n in value.stride()]), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_kind(v, cap) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _kind(v, cap)) for k, v in value.items()])
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
