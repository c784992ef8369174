"""Programs as people write them that must be one native graph at every size, whatever torch computes of it (extern calls are allowed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchsmith
from torchsmith.debug.explain import explanation
from torchsmith.events import recording

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[Any, ...], ...]]] = {}


def program(*calls: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function, and the arguments of its calls in turn."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = (fn, calls)
        return fn

    return add


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def run(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result of `fn`, which must have been one graph or an entry that exists."""
    with recording() as got:
        result = fn(*args)
    e = explanation(got)
    assert not e.breaks and not e.fallbacks and all(g.road == "native" for g in e.graphs) and len(e.graphs) <= 1, str(e)
    return result


@program((seeded(20), seeded(20, 3)), (seeded(30), seeded(30, 3)))
def mask_used_twice(scores: Tensor, boxes: Tensor) -> tuple[Tensor, ...]:
    mask = scores > 0
    return scores[mask][:, None] * boxes[mask], torch.where(mask)[0], torch.nonzero(mask)[:, 0] + torch.where(mask)[0]


@program((seeded(20),), (seeded(31),))
def best_of_unknown_many(scores: Tensor) -> tuple[Tensor, ...]:
    """topk of as many as there are, at most 7: k is computed from a size that only the data tell."""
    kept = scores > 0.2
    where = torch.where(kept)[0]
    best, at = scores[kept].topk(min(7, where.size(0)))
    return best, where[at] % 3, torch.div(where[at], 3, rounding_mode="floor")


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    fn, calls = PROGRAMS[name]
    compiled = torchsmith.compile(fn)
    with torch.inference_mode():
        for args in (*calls, calls[0]):
            torch.testing.assert_close(run(compiled, args), fn(*args), rtol=2e-5, atol=2e-5)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        for _ in range(times):
            x = self.linear(x).sin()
        return x


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_forward_behind_a_decorator(mode: Any) -> None:
    """Its signature is (*args, **kwargs), self among them; under no_grad no gradients are needed, whoever calls."""
    module = Decorated()
    compiled = torchsmith.compile(module, fullgraph=True)
    x = seeded(2, 4)
    with mode():
        torch.testing.assert_close(run(compiled, (x,)), module(x))
        torch.testing.assert_close(run(compiled, (x, 3)), module(x, 3))
        with recording() as got:
            torchsmith.compile(module)(x, times=1)
        assert explanation(got).graph_count == 1
        assert not compiled(x).requires_grad


def test_gradients_beside_a_region_without() -> None:
    """Only where all of it is under no_grad are gradients not needed."""
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = linear(x).abs().amax()
        return linear(x) / scale

    x = seeded(2, 4)
    torchsmith.compile(fn)(x).sum().backward()
    got, linear.weight.grad = linear.weight.grad, None
    fn(x).sum().backward()
    torch.testing.assert_close(got, linear.weight.grad)
