"""Results of a model held against eager's in float64.

In: a model, its inputs, what compiled gave, what eager gave, and how to run it. Out: where a result is wrong, "" where none is.

Compiled may be 8 times as far from float64 as eager is, for inputs as they are or moved by a digit (of each tensor the largest difference).
Where eager itself is far away that says little, and nothing where integers differ that come of floats: then the model is compiled in
float64 too, where it may differ by 1e-6 of a tensor's largest value, 1e-9 of the largest gradient and 8 times what moving the inputs by a
digit does, and with them what the model itself casts to fewer digits (norms in float32).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Run = Callable[[Any, Callable[..., Any], dict[str, Any]], Any]  # of a model, what is called, and its keyword arguments
FAR = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of a tensor's largest value: more says little
SLACK = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of it: always allowed
NOTHING = 0.1  # of it: eager's result says nothing


def leaves(value: Any, at: str = "", depth: int = 12) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values in results, caches and output objects."""
    if isinstance(value, (torch.Tensor, int, float, str, bool, type(None))):
        yield at, value
    elif depth == 0:
        return
    elif isinstance(value, dict) or hasattr(value, "items"):
        for k, v in value.items():
            yield from leaves(v, f"{at}.{k}", depth - 1)
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from leaves(v, f"{at}[{i}]", depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not hasattr(value, "to_diff_dict") and not callable(value):
        for k, v in vars(value).items():
            yield from leaves(v, f"{at}.{k}", depth - 1)


def difference(got: Any, want: Any, relative: float, absolute: float, with_values: bool = True) -> str:
    """Where two results differ, "" where they do not; without values only types, shapes, dtypes, devices and plain values count."""
    a, b = list(leaves(got)), list(leaves(want))
    if type(got) is not type(want):
        return f"type {type(got).__name__}, eager {type(want).__name__}"
    if [p for p, _ in a] != [p for p, _ in b]:
        odd = {p for p, _ in a} ^ {p for p, _ in b}
        return f"other parts: {sorted(odd)[:4]}"
    for (place, x), (_, y) in zip(a, b, strict=True):
        if isinstance(y, torch.Tensor):
            if not isinstance(x, torch.Tensor) or _kind(x) != _kind(y):
                return f"{place}: {_kind(x) if isinstance(x, torch.Tensor) else x}, eager {_kind(y)}"
            if with_values and not torch.allclose(x, y, rtol=relative, atol=absolute, equal_nan=True):
                return f"{place}: differs by {gap(x, y):.3g}, eager's maximum {y.abs().max().item():.3g}"
        elif type(x) is not type(y) or (x != y and not (x != x and y != y)):
            return f"{place}: {x!r}, eager {y!r}"
    return ""


def _kind(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device, x.requires_grad


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; where both are NaN or the same infinity there is none, where one is infinite."""
    if not b.numel():
        return 0.0
    kind = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    return float((a - b).abs().where((a != b) & ~(a.isnan() & b.isnan()), 0.0).nan_to_num(nan=torch.inf).max())


def size_of(x: torch.Tensor) -> float:
    """The largest finite value."""
    return float(x.abs().nan_to_num(posinf=0.0).max()) if x.numel() else 0.0


def floats(value: Any) -> dict[str, torch.Tensor]:
    return {at: x for at, x in leaves(value) if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) and x.numel()}


def integers(value: Any) -> dict[str, torch.Tensor]:
    return {at: x for at, x in leaves(value) if isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())}


def other_integer(got: Any, want: Any) -> str:
    """The place of the first tensor of integers that differ."""
    theirs = integers(want)
    return next((at for at, x in integers(got).items() if not torch.equal(x, theirs[at])), "")


class DrawsIn(TorchDispatchMode):
    """Random numbers of float64 are those of `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        single = [a.to(self.dtype) if isinstance(a, torch.Tensor) and a.dtype == torch.float64 else a for a in args]
        made = func(*single, **{k: self.dtype if v == torch.float64 else v for k, v in kwargs.items()})
        if func._schema.name.endswith("_"):
            return args[0].copy_(made)
        double = kwargs.get("dtype") == torch.float64 or any(a is not b for a, b in zip(args, single, strict=True))
        return tree_map(lambda v: v.double() if isinstance(v, torch.Tensor) and v.dtype == self.dtype and double else v, made)


class MovesCasts(TorchDispatchMode):
    """What float64 is cast to has its last digit moved, by numbers of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and args[0].dtype is torch.float64 and made.dtype in FAR
        return made * (1 + torch.finfo(made.dtype).eps * _noise(made)) if is_cast else made


def _noise(value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(value.device).manual_seed(value.numel())  # dropout draws from the other one
    return torch.randn(value.shape, dtype=torch.float32, device=value.device, generator=generator).to(value.dtype)


def as_doubles(value: Any) -> Any:
    return tree_map(lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, value)


def wrong(
    model: torch.nn.Module, kwargs: dict[str, Any], results: list[Any], want: Any, run: Run, dtype: torch.dtype,
    gradients: str | None = None,
) -> str:  # fmt: skip
    """Where one of the results of `run` is wrong, "" where none is; `want` is eager's. What lies at `gradients` has one scale."""
    for got in results:  # everything but the values of tensors
        if why := difference(got, want, 0.0, 0.0, with_values=False):
            return why
    doubles = copy.deepcopy(model).double()
    try:
        with DrawsIn(dtype), _by_definition():
            exact = floats(run(doubles, doubles.forward, as_doubles(kwargs)))
    except Exception:  # a dtype is written in the model
        return next(filter(None, (difference(got, want, 10 * FAR[dtype], 10 * FAR[dtype]) for got in results)), "")
    torch.manual_seed(4)
    near, ours = [floats(want), floats(run(model, model.forward, tree_map(_moved, kwargs)))], [floats(got) for got in results]
    steep = _steepest(exact, gradients)
    is_noisy = any(other_integer(got, want) for got in results)
    for place, x in exact.items():
        if any(place not in r or r[place].shape != x.shape for r in (*near, *ours)):
            is_noisy = True
            continue
        others = [gap(r[place], x) for r in near]
        size = size_of(x)
        is_noisy |= max(others) > FAR[dtype] * (size + 1e-3 * steep)
        for got in ours if max(others) < NOTHING * size else ():
            here = gap(got[place], x)
            if not here <= 8 * max(others) + SLACK[dtype] * (size + 0.1 * steep):
                return f"{place}: {here:.3g} from float64, eager {others[0]:.3g}, moved {others[1]:.3g}, maximum {size:.3g}"
    return _wrong_in_doubles(doubles, as_doubles(kwargs), run, gradients) if is_noisy else ""


def _wrong_in_doubles(doubles: torch.nn.Module, kwargs: dict[str, Any], run: Run, gradients: str | None) -> str:
    """Where the model, compiled in float64, is wrong."""
    import torchsmith

    with _by_definition():
        want = run(doubles, doubles.forward, kwargs)
        with MovesCasts():
            moved = floats(run(doubles, doubles.forward, tree_map(_moved, kwargs)))
    got = run(doubles, torchsmith.compile(doubles.forward), kwargs)
    if at := other_integer(got, want):
        return f"float64: {at}: other integers"
    ours, steep = floats(got), _steepest(floats(want), gradients)
    for place, x in floats(want).items():
        size, apart = size_of(x), gap(ours[place], x)
        if not apart <= 1e-6 * size + 1e-9 * steep + 8 * (gap(moved[place], x) if moved[place].shape == x.shape else torch.inf):
            return f"float64: {place}: differs by {apart:.3g}, eager's maximum {size:.3g}"
    return ""


def _steepest(parts: dict[str, torch.Tensor], gradients: str | None) -> float:
    """The largest value of all gradients."""
    return max((size_of(x) for at, x in parts.items() if gradients and at.startswith(gradients)), default=0.0)


def _by_definition() -> Any:
    """Attention without torch's kernel, which reads a mask of float32 beside float64 as if it were float64."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def _moved(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value * (1 + torch.finfo(value.dtype).eps * torch.randn_like(value)) if is_float else value
