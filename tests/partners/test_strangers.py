"""Programs that nobody had in mind: what eager's results are beside their values, under backends that know values only."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import compiler

HAS_XLA = all(importlib.util.find_spec(m) for m in ("jax", "torchax"))
FUNCTIONAL = ["aot_eager", pytest.param("openxla", marks=pytest.mark.skipif(not HAS_XLA, reason="not installed"))]


def compiled(fn, backend):
    return torchsmith.compile(fn, backend=compiler.aot_autograd(fw_compiler=_forward) if backend == "user's" else backend)


def _forward(gm, example_inputs):
    return gm.forward


@pytest.mark.parametrize("backend", ["user's", *FUNCTIONAL])
def test_equal_results_are_two_tensors(backend):
    def equal(x):
        return x.sort(0).values, x.sort(0).values, x.exp(), x.exp()

    a, b, c, d = compiled(equal, backend)(torch.randn(3, 4))
    assert len({t.data_ptr() for t in (a, b, c, d)}) == 4 and torch.equal(a, b) and torch.equal(c, d)


@pytest.mark.parametrize("backend", ["user's", *FUNCTIONAL])
def test_a_steps_loss_requires_grad_and_its_graph_is_spent(backend):
    model = nn.Linear(4, 2)
    step_of = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        step_of.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        step_of.step()
        return loss

    loss = compiled(step, backend)(torch.randn(3, 4))
    assert loss.requires_grad and not loss.is_leaf
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("backend", ["user's", *FUNCTIONAL])
def test_results_made_under_inference_mode(backend):
    model = nn.Linear(4, 2)

    def inside(x):
        with torch.inference_mode():
            return model(x)

    found = compiled(inside, backend)(torch.randn(3, 4))
    assert found.is_inference() and not found.requires_grad


@pytest.mark.parametrize("backend", ["eager", "user's", *FUNCTIONAL])
def test_gradients_that_the_program_turns_on(backend):
    weight = nn.Parameter(torch.randn(4))

    def turned_on(x):
        with torch.enable_grad():
            return x * weight

    with torch.no_grad():
        found = compiled(turned_on, backend)(torch.ones(4))
    found.sum().backward()
    assert torch.equal(weight.grad, torch.ones(4))
