"""options={"fallback_random": False}: random operators in kernels, repeatable, well distributed, the same forwards and backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchsmith
from torchsmith.events import recording

OWN = {"fallback_random": False}


def several(x: Tensor) -> tuple[Tensor, ...]:
    noise = torch.empty_like(x).uniform_(2, 3)
    normal = torch.randn(x.shape, dtype=x.dtype)
    return F.dropout(x, 0.3), torch.rand_like(x), normal, torch.bernoulli(x), noise, torch.empty_like(x).normal_(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws(dtype: torch.dtype) -> None:
    x = torch.linspace(0.1, 0.9, 40000, dtype=dtype).view(200, 200)
    compiled = torchsmith.compile(several, options=OWN, fullgraph=True)
    runs = []
    for seed in (3, None, 3, None):
        if seed is not None:
            torch.manual_seed(seed)
        with recording() as got:
            runs.append(compiled(x))
        for e in (e for e in got if e.kind == "graph"):
            assert set(e.fields["report"].externs) == {"aten.randint.low"}, "only seeds are drawn by torch"
    for a, b, c, d in zip(*runs, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b) and a.dtype is dtype
    dropped, uniform, normal, chosen, noise, _ = (t.double() for t in runs[0])
    assert abs((dropped == 0).double().mean() - 0.3) < 0.01
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.003
    assert abs(normal.mean()) < 0.02 and abs(normal.var() - 1) < 0.03 and abs((normal**4).mean() - 3) < 0.2
    assert abs((chosen - x.double()).mean()) < 0.01 and noise.min() >= 2 and noise.max() <= 3
    halves = torch.stack([uniform.flatten()[:-1], uniform.flatten()[1:]]) - 0.5  # neighbours know nothing of each other
    assert abs((halves[0] * halves[1]).mean() * 12) < 0.02


def test_backward_sees_the_same_draws() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Dropout(0.5))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(32))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x)
        return y, torch.autograd.grad(y.sum(), x)[0]

    outside, inside = torchsmith.compile(model, options=OWN), torchsmith.compile(step, options=OWN, fullgraph=True)
    for rows in (8, 16, 24):  # of any size
        x = (torch.rand(rows, 32) + 1).requires_grad_()
        y: Any = outside(x)
        y.sum().backward()
        assert torch.equal(y != 0, x.grad != 0) and 0.3 < (y == 0).float().mean() < 0.7
        y, grad = inside(x)
        assert torch.equal(y != 0, grad != 0)


def test_what_cannot_be_repeated_is_an_error() -> None:
    compiled = torchsmith.compile(lambda x: F.dropout(x * x, 0.5), options=OWN)
    x = torch.rand(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="fallback_random"):
        torch.autograd.grad(compiled(x).sum(), x, create_graph=True)


@torch.library.custom_op("torchsmith_own_draws::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: grad * 2)


def test_what_the_user_draws_is_no_draw_of_the_compilers() -> None:
    compiled = torchsmith.compile(lambda x: double(x).pow(2).sum(), options=OWN)
    x = torch.rand(8, requires_grad=True)
    (once,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), x)
    assert torch.allclose(once, 8 * x) and torch.allclose(twice, torch.full((8,), 8.0))


def test_eagers_draws_are_the_default() -> None:
    x = torch.rand(8, 8)
    compiled = torchsmith.compile(lambda x: F.dropout(x, 0.5))
    torch.manual_seed(0)
    ours = compiled(x)
    torch.manual_seed(0)
    assert torch.equal(ours, F.dropout(x, 0.5))
