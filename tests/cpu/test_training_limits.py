"""Training where numbers are at their limits: saturated activation functions, NaN, and optimizers whose arithmetic in Python chooses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training_programs import Watch, frozen, mlp, unlike

import torchsmith
from torchsmith.events import recording

FAR = [math.inf, -math.inf, 1e30, -1e30, 1e4, -1e4, 100.0, -100.0, 30.0, -30.0, 20.0, -20.0, 12.0, -12.0, 9.5, -9.5] * 4
SATURATED = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": torch.erf, "softsign": F.softsign, "hardsigmoid": F.hardsigmoid,
    "atanh of tanh": lambda x: torch.atanh(torch.tanh(x)), "log of 1 - tanh": lambda x: torch.log1p(-torch.tanh(x)),
    "1 / (1 - tanh)": lambda x: 1 / (1 - torch.tanh(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", SATURATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated(name: str, dtype: torch.dtype) -> None:
    """From where it is 1 to the last bit, a function is exactly 1."""
    x = torch.tensor(FAR, dtype=dtype)
    got, want = torchsmith.compile(SATURATED[name])(x), SATURATED[name](x)
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got, want, equal_nan=True)


def test_an_infinite_feature_spoils_the_gradient() -> None:
    """tanh's slope is 0 there, and 0 times infinity is no number: a check for NaN sees it."""
    weight = torch.randn(12, 6).requires_grad_()
    x = torch.randn(8, 6)
    x[0, 0] = math.inf

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ weight.T).square().sum()

    (want,) = torch.autograd.grad(loss(weight, x), weight)
    (got,) = torch.autograd.grad(torchsmith.compile(loss)(weight, x), weight)
    assert want.isnan().any()
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("name", ["elu", "selu", "celu", "hardswish", "silu", "mish", "softplus", "gelu"])
def test_gradients_at_nan(name: str) -> None:
    """As in eager's vector code; its code for single elements lets the gradient pass in some of these."""
    x = torch.full((64,), math.nan).requires_grad_()
    f = getattr(F, name)
    (got,) = torch.autograd.grad(torchsmith.compile(f)(x).sum(), x)
    assert got.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["hardswish", "hardsigmoid", "hardtanh", "relu6", "softshrink", "hardshrink", "elu", "leaky_relu"])
def test_gradients_at_corners(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([-6.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0], dtype=dtype).requires_grad_()
    f = getattr(F, name)
    (want,) = torch.autograd.grad(f(x).sum(), x)
    (got,) = torch.autograd.grad(torchsmith.compile(f)(x).sum(), x)
    torch.testing.assert_close(got, want)


OPTIMIZERS = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05, weight_decay=0.1), "ASGD": lambda p: torch.optim.ASGD(p, 0.1, t0=2, foreach=True),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_choose_in_python(name: str) -> None:
    """`min(lr, 1 / step ** 0.5)`, `max(1.0, norm.item() / d)`: part of the graph."""

    def run(c: Any) -> list[Any]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, watch = c(step), Watch(model, optimizer)
        batches = [torch.randn(5, 6) for _ in range(5)]
        batches[4][0, 0] = math.nan
        return [frozen(watch(step(x))) for x in batches]

    want = run(lambda f: f)
    with recording() as got:
        ours = run(torchsmith.compile)
    assert not list(unlike(ours, want))
    assert not [e for e in got if e.kind in ("graph_break", "fallback")]


@pytest.mark.parametrize("pick", [min, max])
def test_extremes_of_numbers_that_running_tells(pick: Any) -> None:
    """Python keeps the first of two that do not compare."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x * pick(0.5, x[0].item(), y[0].item())

    compiled = torchsmith.compile(f, fullgraph=True)
    values = (-1.0, 0.0, -0.0, 0.5, 2.0, math.nan, math.inf)
    for a in values:
        for b in values:
            x, y = torch.tensor([a, 1.0]), torch.tensor([b, 1.0])
            got, want = compiled(x, y), f(x, y)
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.signbit(), want.signbit()), (a, b)
