"""Numbers that eager refuses because a dtype cannot hold them ("value cannot be converted to type float without overflow").

In: an operator and its tracing arguments. Out: nothing; or eager's exception for a number at hand; for one that varies, a guard on the
range that eager takes. Which numbers an operator takes is asked of eager's own kernel, on tensors of few elements, once for each operator,
parameter and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from . import learn
from .schema import info
from .sizes import SymTypes

_HARMLESS = 65504  # every float dtype holds it
_NUMBERS = frozenset({"number", "float", "Optional[number]", "Optional[float]"})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTS = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32)
_ENDS: dict[type, tuple[float | int, ...]] = {
    float: tuple(sorted({float(torch.finfo(d).max) for d in _FLOATS} | {float(torch.iinfo(d).max) for d in _INTS[1:]})),
    int: tuple(sorted({1} | {torch.iinfo(d).max for d in _INTS[1:]} | {-torch.iinfo(d).min for d in _INTS[1:]} | {_HARMLESS})),
}
_COUNTING = frozenset({"aten::arange", "aten::range"})  # their numbers say how many elements there are: too many to try
_FAR: dict[type, Any] = {float: 1e300, int: 1 << 62}


def ask(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments; those that vary are known to be in range from here on, or are the numbers at hand where no range is known."""
    row = info(func)
    if row.is_composite or row.is_random or func.namespace != "aten" or func._schema.name in _COUNTING:
        return args, kwargs
    for name, value in (*zip(row.params, args, strict=False), *kwargs.items()):
        kind = type(value)
        is_large = kind in (float, int) and not -_HARMLESS <= value <= _HARMLESS
        if (is_large or kind in (torch.SymFloat, torch.SymInt)) and _takes_number(func, name):
            args, kwargs = _checked(func, name, value, args, kwargs)
    return args, kwargs


@cache
def _takes_number(func: OpOverload, name: str) -> bool:
    return any(a.name == name and str(a.type) in _NUMBERS for a in func._schema.arguments)


def _checked(func: OpOverload, name: str, value: Any, args: Any, kwargs: Any) -> Any:
    call = _probe(func, name, args, kwargs)
    hint = value.node.hint if type(value) in (torch.SymFloat, torch.SymInt) else value
    if call is None or (type(value) in (torch.SymFloat, torch.SymInt) and hint is None):
        return args, kwargs
    if hint is value:
        if math.isfinite(value):
            said = call(value)
            if said is not None:
                raise said
        return args, kwargs
    kind = type(hint)
    span = _span(func, name, kind, _dtypes(args, kwargs), call)
    if span is None:
        return args, kwargs
    lo, hi = span
    if lo <= hint <= hi and (value >= lo) and (value <= hi):
        return args, kwargs
    args = tuple(learn.specialise(a) if a is value else a for a in args)
    kwargs = {k: learn.specialise(a) if a is value else a for k, a in kwargs.items()}
    return _checked(func, name, kind(hint), args, kwargs)


_SPANS: dict[Any, tuple[Any, Any] | None] = {}


def _span(func: OpOverload, name: str, kind: type, dtypes: Any, call: Callable[[Any], Exception | None]) -> tuple[Any, Any] | None:
    """The numbers that eager takes: None for all, (0, -1) where they are not those of a dtype."""
    key = func, name, kind, dtypes
    if key not in _SPANS:
        far = _FAR[kind]
        _SPANS[key] = None if call(far) is None and call(-far) is None else (-_end(kind, lambda v: call(-v)), _end(kind, call))
    return _SPANS[key]


def _end(kind: type, call: Callable[[Any], Exception | None]) -> Any:
    """The largest number taken, of those that end a dtype's range."""
    if call(_FAR[kind]) is None:
        return math.inf if kind is float else 1 << 63
    taken: float = 0
    for end in _ENDS[kind]:
        if call(end) is not None:
            break
        taken = end
    return taken


def _dtypes(args: Any, kwargs: Any) -> Any:
    every = (*args, *kwargs.values())
    return tuple(a.dtype if isinstance(a, torch.Tensor) else a if isinstance(a, torch.dtype) else type(a) for a in every)


def _probe(func: OpOverload, name: str, args: Any, kwargs: Any) -> Callable[[Any], Exception | None] | None:
    """A function that gives eager's complaint about a value of this parameter, or None; None where the call cannot be tried."""
    params = info(func).params

    def tried(at: str, given: Any, value: Any) -> Any:
        if at == name:
            return value
        if isinstance(given, torch.Tensor):
            return torch.ones((2,) * given.dim(), dtype=given.dtype)  # eager checks no number that fills one element
        if isinstance(given, (list, tuple)):
            if any(isinstance(x, torch.Tensor) for x in given):
                return [tried("", x, value) for x in given]
            return [2] * len(given) if at in ("size", "shape") else [_plain(x) for x in given]
        if isinstance(given, torch.device):
            return torch.device("cpu")
        return _plain(given)

    def call(value: Any) -> Exception | None:
        plain = tuple(tried(p, a, value) for p, a in zip(params, args, strict=False))
        named = {k: tried(k, a, value) for k, a in kwargs.items()}
        with torch._C.DisableTorchFunction(), no_dispatch(), torch.no_grad():
            try:
                func(*plain, **named)
            except RuntimeError as error:
                if "without overflow" in str(error) or "out of bounds" in str(error):
                    return error
        return None

    def usual(value: Any) -> bool:
        plain = tuple(tried(p, a, value) for p, a in zip(params, args, strict=False))
        with torch._C.DisableTorchFunction(), no_dispatch(), torch.no_grad():
            func(*plain, **{k: tried(k, a, value) for k, a in kwargs.items()})
        return True

    try:
        usual(1)
    except Exception:  # not on these sizes, or a number is not known: nothing can be said
        return None
    return call


def _plain(value: Any) -> Any:
    if type(value) in SymTypes:
        if value.node.hint is None:
            raise ValueError("unknown")
        return value.node.hint
    return value


__all__ = ["ask"]
