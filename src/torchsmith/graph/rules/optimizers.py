"""Functions over lists of tensors that torch.optim calls (`foreach`, `fused`), written tensor by tensor.

In: lists of tracing tensors and numbers. Out: what torch's functions give; kernels are joined again where graphs are scheduled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..tracing import Tracing, function_rule

Tensor = torch.Tensor


def _is_list(v: Any) -> bool:
    return isinstance(v, (list, tuple))


def _bound(fn: Any, of_number: Any, is_in_place: bool) -> Callable[..., Any]:
    """`maximum` with a number is a clamp."""

    def one(t: Tensor, bound: Any) -> Tensor:
        found: Tensor = fn(t, bound) if isinstance(bound, Tensor) else of_number(t, bound)
        return t.copy_(found) if is_in_place else found

    return one


def _scaled(name: str) -> Callable[..., Any]:
    return lambda t, a, b, value=1: getattr(Tensor, name)(t, a, b, value=value)


ONE: dict[str, Callable[..., Any]] = {
    "norm": lambda t, order=2, dtype=None: torch.linalg.vector_norm(t, order, dtype=dtype), "max": torch.max, "pow": torch.pow,
    "copy_": lambda t, source, non_blocking=False: t.copy_(source),
    "maximum": _bound(torch.maximum, torch.clamp_min, False), "maximum_": _bound(torch.maximum, torch.clamp_min, True),
    "minimum": _bound(torch.minimum, torch.clamp_max, False), "minimum_": _bound(torch.minimum, torch.clamp_max, True),
    **{name: _scaled(name) for name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_")},
}  # fmt: skip


def _each(name: str) -> None:
    fn = getattr(torch, f"_foreach_{name}", None)
    one = ONE.get(name) or getattr(Tensor, name, None)
    if fn is None or one is None:
        return

    def foreach(trace: Tracing, call: Any, *args: Any, **kwargs: Any) -> Any:
        if "self" in kwargs:
            args = (kwargs.pop("self"), *args)
        n = next(len(a) for a in (*args, *kwargs.values()) if _is_list(a))
        rows = [[a[i] if _is_list(a) else a for a in args] for i in range(n)]
        named = [{k: v[i] if _is_list(v) else v for k, v in kwargs.items()} for i in range(n)]
        done = [one(*row, **options) for row, options in zip(rows, named, strict=True)]
        return args[0] if name.endswith("_") else tuple(done)

    function_rule(fn)(foreach)


for _name in [n.removeprefix("_foreach_") for n in dir(torch) if n.startswith("_foreach_")]:
    _each(_name)


# ---------------------------------------------------------------- fused


def _number(trace: Tracing, t: Tensor) -> Any:
    """The value of a step counter, known when the graph runs."""
    before, trace.facts.reads_data = trace.facts.reads_data, True
    try:
        return t.item()
    finally:
        trace.facts.reads_data = before


def _rate(trace: Tracing, lr: Any) -> Any:
    """A learning rate; torch's fused kernels read that of a tensor too, once for all parameters."""
    return _number(trace, lr) if isinstance(lr, Tensor) else lr


def _scaled_step(grads: Any, state: tuple[Any, ...], grad_scale: Tensor | None, found_inf: Tensor | None) -> Callable[[], None]:
    """What GradScaler asks of a fused step: gradients are divided by grad_scale; where found_inf is 1 nothing of it happens. The callable
    that is returned ends the step."""
    tensors = [t for part in (grads, *state) for t in part] if found_inf is not None else []
    old = [t.clone() for t in tensors]
    if grad_scale is not None:
        for grad in grads:
            grad.div_(grad_scale)

    def end() -> None:
        for t, before in zip(tensors, old, strict=True):
            t.copy_(torch.where(found_inf == 1, before, t))  # type: ignore[arg-type, call-overload]

    return end


def _fused(fn: Any, rule: Callable[..., None]) -> None:
    """torch's fused kernels move no version counters, nor do graphs with them. Capture counts on the counters to see what is written."""

    def fused(trace: Tracing, call: Any, *lists: Any, **options: Any) -> None:
        written = tuple(t for part in lists for t in part) if trace.records else ()
        with torch.autograd._unsafe_preserve_version_counter(written) if written else contextlib.nullcontext():
            rule(trace, *lists, **options)

    function_rule(fn)(fused)


def _adam(is_decoupled: bool) -> Callable[..., Any]:
    def fused(
        trace: Tracing, params: Any, grads: Any, averages: Any, squares: Any, greatest: Any, steps: Any, *, lr: Any, beta1: Any,
        beta2: Any, weight_decay: Any, eps: Any, amsgrad: bool, maximize: bool, grad_scale: Any = None, found_inf: Any = None,
    ) -> None:  # fmt: skip
        lr = _rate(trace, lr)
        end = _scaled_step(grads, (params, averages, squares, greatest if amsgrad else ()), grad_scale, found_inf)
        for i, (p, grad, average, square) in enumerate(zip(params, grads, averages, squares, strict=True)):
            step = _number(trace, steps[i])
            grad = -grad if maximize else grad
            if weight_decay != 0 and is_decoupled:
                p.mul_(1 - lr * weight_decay)
            elif weight_decay != 0:
                grad = grad.add(p, alpha=weight_decay)
            average.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            below = square
            if amsgrad:
                greatest[i].copy_(torch.maximum(greatest[i], square))
                below = greatest[i]
            root = (1 - beta2**step) ** 0.5
            p.addcdiv_(average, (below.sqrt() / root).add_(eps), value=-(lr / (1 - beta1**step)))
        end()

    return fused


def _sgd(
    trace: Tracing, params: Any, grads: Any, buffers: Any, *, weight_decay: Any, momentum: Any, lr: Any, dampening: Any,
    nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: Any = None, found_inf: Any = None,
) -> None:  # fmt: skip
    lr = _rate(trace, lr)
    end = _scaled_step(grads, (params, buffers if momentum != 0 else ()), grad_scale, found_inf)
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        grad = -grad if maximize else grad
        grad = grad.add(p, alpha=weight_decay) if weight_decay != 0 else grad
        if momentum != 0:
            if is_first_step:
                buffers[i].copy_(grad)
            else:
                buffers[i].mul_(momentum).add_(grad, alpha=1 - dampening)
            grad = grad.add(buffers[i], alpha=momentum) if nesterov else buffers[i]
        p.add_(grad, alpha=-lr)
    end()


def _adagrad(
    trace: Tracing, params: Any, grads: Any, sums: Any, steps: Any, *, lr: Any, lr_decay: Any, weight_decay: Any, eps: Any,
    maximize: bool, grad_scale: Any = None, found_inf: Any = None,
) -> None:  # fmt: skip
    lr = _rate(trace, lr)
    end = _scaled_step(grads, (params, sums), grad_scale, found_inf)
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        rate = lr / (1 + (_number(trace, steps[i]) - 1) * lr_decay)
        grad = -grad if maximize else grad
        grad = grad.add(p, alpha=weight_decay) if weight_decay != 0 else grad
        sums[i].addcmul_(grad, grad, value=1)
        p.addcdiv_(grad, sums[i].sqrt().add_(eps), value=-rate)
    end()


_fused(torch._fused_adam_, _adam(False))
_fused(torch._fused_adamw_, _adam(True))
_fused(torch._fused_sgd_, _sgd)
_fused(torch._fused_adagrad_, _adagrad)


# ---------------------------------------------------------------- scaled gradients


@function_rule(torch._amp_foreach_non_finite_check_and_unscale_)
def unscale(trace: Tracing, call: Any, grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Gradients times inv_scale, in float32 at least; found_inf becomes 1 where one of them is infinite or NaN."""
    bad = None
    for grad in grads:
        here = torch.isfinite(grad).logical_not().any()
        bad = here if bad is None else bad | here
        exact = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
        grad.copy_(grad.to(exact) * inv_scale.to(exact))
    if bad is not None:
        found_inf.masked_fill_(bad, 1.0)


@function_rule(torch._amp_update_scale_)
def update_scale(
    trace: Tracing, call: Any, scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: Any, backoff: Any, interval: Any
) -> Tensor:
    """The next scale: smaller after a step that was skipped, larger after `interval` steps that were not, as long as it stays finite."""
    found, grown = found_inf != 0, tracker + 1
    is_due, larger = grown == interval, (scale.double() * growth).float()
    smaller = (scale.double() * backoff).float()
    new = torch.where(found, smaller, torch.where(is_due & torch.isfinite(larger), larger, scale))
    tracker.masked_fill_(found | is_due, 0)
    tracker.add_((found | is_due).logical_not().to(tracker.dtype))
    return scale.copy_(new)
