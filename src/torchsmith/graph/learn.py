"""Shapes of operators that have no rule: by one run on made-up CPU data, or by torch's meta kernel. Both are counted.

Kernels of another device may leave other strides and dtypes than the CPU's: there torch's fake tensors of that device are asked first.

An operator registered with `torch.library` that has a fake of its own is asked through that, with symbolic sizes as they are.

In: an operator and its tracing arguments, all sizes known. Out: tracing tensors of the results' sizes, strides and dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._library import fake_impl
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from ..codes import Unsupported
from ..events import emit
from .schema import info
from .sizes import SizeFacts, SymTypes

RUN_LIMIT = 1 << 18  # elements of all arguments: beyond it, the meta kernel is asked first


def map_tensors(fn: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(fn, v) for v in value)
    if isinstance(value, dict):
        return {k: map_tensors(fn, v) for k, v in value.items()}
    return value


def made_up(t: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the same sizes and strides: zeros for integers (valid as indices), small positive numbers for floats."""
    if t.device.type != "meta":
        return t
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    if t.dtype.is_floating_point or t.dtype.is_complex:
        data = torch.arange(extent, dtype=torch.float64).mul_(0.7548776662466927).remainder_(1.0).to(t.dtype)
    else:
        data = torch.zeros(extent, dtype=t.dtype)
    return data.as_strided(t.shape, t.stride())


def to_meta(t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided or t.is_quantized:
        raise Unsupported("GRA011", detail=f"{t.layout} {t.dtype}")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _by_running(func: OpOverload, args: Any, kwargs: Any) -> Any:
    kwargs = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in kwargs.items()}
    state = torch.get_rng_state() if info(func).is_random else None
    try:
        return map_tensors(to_meta, func(*map_tensors(made_up, args), **map_tensors(made_up, kwargs)))
    finally:
        if state is not None:
            torch.set_rng_state(state)


def _by_meta_kernel(func: OpOverload, args: Any, kwargs: Any) -> Any:
    return func(*args, **{k: torch.device("meta") if isinstance(v, torch.device) else v for k, v in kwargs.items()})


class _NewSizes:
    """What a registered fake gets from `torch.library.get_ctx()`: sizes that only running tells."""

    def __init__(self, facts: SizeFacts) -> None:
        self.facts = facts

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> torch.SymInt:
        return self.facts.fresh(None, ("bound",), min, max)

    create_unbacked_symint = new_dynamic_size


def _on_device(device: torch.device) -> Any:
    """A way to ask torch's fake tensors of a device, which need not be there."""

    def ask(func: OpOverload, args: Any, kwargs: Any) -> Any:
        def fake(t: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

        with FakeTensorMode():
            kwargs = {k: device if isinstance(v, torch.device) else v for k, v in kwargs.items()}
            found = func(*map_tensors(fake, args), **map_tensors(fake, kwargs))
        return map_tensors(to_meta, found)

    return ask


def by_fake(fake: Any, args: Any, kwargs: Any, facts: SizeFacts) -> Any:
    """Shapes by a registered fake, which knows sizes that vary and sizes that depend on data."""
    with fake_impl.set_ctx_getter(lambda: _NewSizes(facts)):
        return fake(*args, **kwargs)


def shapes(func: OpOverload, args: Any, kwargs: Any, facts: SizeFacts, device: torch.device) -> Any:
    """Ask torch what comes out on `device`.

    Running is exact about strides and needs no Python meta kernel, but costs a run: only for small aten operators.
    """
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, (args, kwargs))
    if any(t._has_symbolic_sizes_strides for t in tensors) or _has_symbols((args, kwargs)):
        emit("fallback", code="GRA005", op=str(func), loc=facts.loc)
        args, kwargs = specialise(args), specialise(kwargs)
        tensors = []
        map_tensors(tensors.append, (args, kwargs))
    can_run = func.namespace in ("aten", "torchvision", "prims")
    small = sum(t.numel() for t in tensors) <= RUN_LIMIT
    ways = [("GRA010", _by_running), ("GRA001", _by_meta_kernel)]
    if not can_run:
        ways = ways[1:]
    elif not small:
        ways = ways[::-1]
    if device.type != "cpu":
        ways = [("GRA001", _on_device(device)), *reversed(ways)]
    failed = ""
    for code, way in ways:
        try:
            with torch._C.DisableTorchFunction():  # what listens there is not meant
                result = way(func, args, kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as e:  # any kernel's refusal: the next way may do
            failed = failed or f"{type(e).__name__}: {e}".split("\n", 1)[0][:200]
            continue
        emit("fallback", code=code, op=str(func), loc=facts.loc)
        return result
    raise Unsupported("GRA002", at=facts.loc, detail=f"{func}: {failed}")


def specialise(value: Any) -> Any:
    """The same arguments at the sizes at hand, which are assumed from now on (Unsupported where a size is not known yet)."""
    if isinstance(value, torch.Tensor):
        if not value._has_symbolic_sizes_strides:
            return value
        sizes, strides = [int(s) for s in value.shape], [int(s) for s in value.stride()]
        with torch._C.DisableTorchFunction():
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return type(value)(specialise(v) for v in value)
    if isinstance(value, dict):
        return {k: specialise(v) for k, v in value.items()}
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    return bool(value) if isinstance(value, torch.SymBool) else value


def _has_symbols(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_symbols(v) for v in value)
    if isinstance(value, dict):
        return any(_has_symbols(v) for v in value.values())
    return isinstance(value, SymTypes)
