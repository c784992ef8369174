"""Random operators written with integer arithmetic: options={"fallback_random": False}.

In: a random operator's arguments. Out: its result, made of one number that torch's generator draws for each operator and a counter for each
element, mixed by the finaliser of SplitMix64. What is made so is fused as other arithmetic is, in forward and in backward; the same seed
gives the same draws. They are not eager's. Operators without a row, and those that are given a generator, draw as eager does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..tracing import DRAWS, device_of

aten = torch.ops.aten
Tensor = torch.Tensor


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_STEP, _FIRST, _SECOND = (_signed(w) for w in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is dtype else aten._to_copy.default(t, dtype=dtype)


def _shifted(z: Tensor, by: int) -> Tensor:
    """z >> by without its sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _words(shape: Sequence[Any], device: torch.device) -> Tensor:
    """64 random bits for each element."""
    seed = torch.randint(-(1 << 62), 1 << 62, (1,), dtype=torch.int64, device=device)
    counter = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    return _mixed(seed + (counter + 1) * _STEP).view(list(shape))


def _unit(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiples of the dtype's last bit in [0, 1), each as likely."""
    bits = _MANTISSA[dtype]
    return _cast(_shifted(words, 64 - bits), dtype) * 2.0**-bits


def _uniform(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _unit(_words(shape, device), dtype)


def _normal(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Box and Muller's cosine."""
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    words = _words(shape, device)
    radius = (-2.0 * torch.log1p(-_unit(words, exact))).sqrt()
    return _cast(radius * torch.cos(2.0 * math.pi * _unit(_mixed(words ^ _STEP), exact)), dtype)


def _less(shape: Sequence[Any], probability: Any, device: torch.device) -> Tensor:
    exact = torch.float64 if isinstance(probability, Tensor) and probability.dtype is torch.float64 else torch.float32
    return _uniform(shape, exact, device) < probability


def _draws(*ops: Any) -> Callable[[Any], Any]:
    def add(fn: Any) -> Any:
        def unless_generator(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if generator is None else NotImplemented

        for op in ops:
            DRAWS[op] = unless_generator
        return fn

    return add


def _made(draw: Any, shape: Sequence[Any], dtype: torch.dtype | None, layout: Any, device: Any) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if dtype not in _MANTISSA or layout not in (None, torch.strided):
        return NotImplemented
    return draw(shape, dtype, torch.device(device or "cpu"))


@_draws(aten.rand.default, aten.rand.generator)
def rand(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
    return _made(_uniform, size, dtype, layout, device)


@_draws(aten.randn.default, aten.randn.generator)
def randn(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
    return _made(_normal, size, dtype, layout, device)


def _like(draw: Any) -> Any:
    def like(
        self: Tensor, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, memory_format: Any = None
    ) -> Any:
        made = _made(draw, self.shape, dtype or self.dtype, layout, device or device_of(self))
        if made is NotImplemented:
            return made
        return torch.empty_like(self, dtype=made.dtype, memory_format=memory_format or torch.preserve_format).copy_(made)

    return like


_draws(aten.rand_like.default)(_like(_uniform))
_draws(aten.randn_like.default)(_like(_normal))


@_draws(aten.uniform_.default)
def uniform_(self: Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    if self.dtype not in _MANTISSA:
        return NotImplemented
    return self.copy_(_uniform(self.shape, self.dtype, device_of(self)) * (high - low) + low)


@_draws(aten.normal_.default)
def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    if self.dtype not in _MANTISSA:
        return NotImplemented
    return self.copy_(_normal(self.shape, self.dtype, device_of(self)) * std + mean)


@_draws(aten.bernoulli_.float)
def bernoulli_(self: Tensor, p: float = 0.5) -> Any:
    return self.copy_(_less(self.shape, p, device_of(self)))


@_draws(aten.bernoulli.p)
def bernoulli_p(self: Tensor, p: float = 0.5) -> Any:
    return _cast(_less(self.shape, p, device_of(self)), self.dtype)


@_draws(aten.bernoulli.default)
def bernoulli(self: Tensor) -> Any:
    return _cast(_less(self.shape, self, device_of(self)), self.dtype)
