"""Rules of torch functions above the dispatcher whose numbers vary: torch's own code would ask for the numbers at hand, in its argument
parser (a `float` of a schema) or in a derivative. They are written with operators that take a symbol.

In: a function's arguments, some of them torch.SymFloat. Out: its result; plain numbers go to the function itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..tracing import Tracing, device_of, function_rule
from .functions import is_watched

aten = torch.ops.aten
Tensor = torch.Tensor
_NONE, _MEAN = 0, 1  # reductions of losses
_PLAIN = (torch.float32, torch.float64)


def _varies(number: Any) -> bool:
    return isinstance(number, torch.SymFloat)


def _as_tensor(trace: Tracing, number: Any, dtype: torch.dtype, beside: Tensor) -> Tensor:
    return trace.made_on(device_of(beside), torch.full, ((), number), {"dtype": dtype})  # type: ignore[no-any-return]


@function_rule(torch.pow, Tensor.pow, Tensor.__pow__)
def power(trace: Tracing, call: Any, self: Any, exponent: Any, **kwargs: Any) -> Tensor:
    """The derivative asks whether a number is 0, and none of a tensor."""
    if kwargs or not _varies(exponent) or not isinstance(self, Tensor) or not self.is_floating_point() or not is_watched(self):
        return call(self, exponent, **kwargs)  # type: ignore[no-any-return]
    return torch.pow(self, _as_tensor(trace, exponent, torch.float64, self))


@function_rule(torch.lerp, Tensor.lerp)
def lerp(trace: Tracing, call: Any, self: Tensor, end: Tensor, weight: Any, **kwargs: Any) -> Tensor:
    if kwargs or not _varies(weight) or self.dtype not in _PLAIN or not is_watched(self, end):
        return call(self, end, weight, **kwargs)  # type: ignore[no-any-return]
    return torch.lerp(self, end, _as_tensor(trace, weight, self.dtype, self))


@function_rule(torch.celu)
def celu(trace: Tracing, call: Any, input: Tensor, alpha: Any = 1.0) -> Tensor:
    if not _varies(alpha):
        return call(input, alpha)  # type: ignore[no-any-return]
    return torch._C._nn.elu(input, alpha, 1.0, 1.0 / alpha)


@function_rule(torch._C._nn.huber_loss)
def huber_loss(trace: Tracing, call: Any, input: Tensor, target: Tensor, reduction: int = _MEAN, delta: Any = 1.0) -> Tensor:
    if not _varies(delta) or delta <= 0:
        return call(input, target, reduction, delta)  # type: ignore[no-any-return]
    return _reduced(_huber(input, target, delta), reduction)


@function_rule(torch._C._nn.smooth_l1_loss)
def smooth_l1_loss(trace: Tracing, call: Any, input: Tensor, target: Tensor, reduction: int = _MEAN, beta: Any = 1.0) -> Tensor:
    if not _varies(beta) or beta <= 0:
        return call(input, target, reduction, beta)  # type: ignore[no-any-return]
    return _reduced(_huber(input, target, beta) / beta, reduction)


def _huber(input: Tensor, target: Tensor, delta: Any) -> Tensor:
    """z * (|d| - z / 2) where z is |d|, at most delta: half of a square near to 0, a line beyond."""
    away = (input - target).abs()
    near = away.clamp(max=delta)
    return near * (away - 0.5 * near)


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == _NONE else loss.mean() if reduction == _MEAN else loss.sum()


@function_rule(torch._C._nn.cross_entropy_loss)
def cross_entropy_loss(
    trace: Tracing, call: Any, input: Tensor, target: Tensor, weight: Any = None, reduction: int = _MEAN, ignore_index: int = -100,
    label_smoothing: Any = 0.0,
) -> Tensor:  # fmt: skip
    """With labels that are smoothed by a number that varies: the loss of the target, and the mean over all classes."""
    smoothing = label_smoothing
    if not _varies(smoothing) or weight is not None or target.is_floating_point() or not 0 < smoothing <= 1:
        return call(input, target, weight, reduction, ignore_index, smoothing)  # type: ignore[no-any-return]
    classes = 1 if input.dim() > 1 else 0
    logs = F.log_softmax(input, classes)
    chosen = F.nll_loss(logs, target, ignore_index=ignore_index, reduction=("none", "mean", "sum")[reduction])
    ignored = target == ignore_index
    every = -logs.sum(classes).masked_fill(ignored, 0.0)
    if reduction == _MEAN:
        every = every.sum() / (~ignored).sum()
    elif reduction != _NONE:
        every = every.sum()
    return (1 - smoothing) * chosen + every * (smoothing / input.shape[classes])


@function_rule(torch.dropout)
def dropout(trace: Tracing, call: Any, input: Tensor, p: Any, train: bool) -> Tensor:
    """On a GPU eager draws and multiplies in one kernel, whose numbers are others than those of bernoulli."""
    on_host = device_of(input).type == "cpu" or trace.facts.own_draws
    if (on_host and not _varies(p)) or not train or not 0 < p < 1 or input.numel() == 0:
        return call(input, p, train)  # type: ignore[no-any-return]
    if not on_host:
        return torch.native_dropout(input, p, train)[0]
    mask = torch.empty_like(input)
    trace.dispatch(aten.bernoulli_.float, (mask, 1 - p), {})
    return input * mask.div_(1 - p)


def _drawing(name: str, func: Any, first: float, second: float | None) -> None:
    def draw(trace: Tracing, call: Any, self: Tensor, *numbers: Any, generator: Any = None, **named: Any) -> Tensor:
        varies = any(map(_varies, numbers)) and not any(isinstance(n, Tensor) for n in numbers)
        if not varies or named or generator is not None or self.requires_grad:
            return call(self, *numbers, generator=generator, **named)  # type: ignore[no-any-return]
        both = numbers if second is None else (*numbers, *(first, second)[len(numbers) :])
        trace.dispatch(func, (self, *both), {})
        return self

    function_rule(getattr(Tensor, name))(draw)


_drawing("normal_", aten.normal_.default, 0.0, 1.0)
_drawing("uniform_", aten.uniform_.default, 0.0, 1.0)
_drawing("bernoulli_", aten.bernoulli_.float, 0.5, None)
