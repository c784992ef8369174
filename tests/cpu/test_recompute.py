"""What the backward pass computes again: gradients stay eager's under every budget, and less is kept."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchsmith


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.conv, self.batch = nn.Linear(16, 32), nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer, self.drop, self.head = nn.LayerNorm(32), nn.Dropout(0.3), nn.Linear(32, 4)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        a = self.drop(F.gelu(self.layer(self.one(x))) * torch.sigmoid(self.one(x)))
        b = torch.relu(self.batch(self.conv(image))).mean((2, 3))
        return self.head(torch.tanh(a)).log_softmax(-1).sum() + (b**3).sum() + b.exp().mean()


def test_budgets() -> None:
    torch.manual_seed(0)
    model, x, image = Net(), torch.randn(6, 16), torch.randn(6, 3, 10, 10)
    kept = []
    for budget in (1.0, 0.5, 0):
        ours, twin = copy.deepcopy(model), copy.deepcopy(model)
        torch.manual_seed(5)
        found = torchsmith.explain(ours, options={"activation_memory_budget": budget})(x, image)
        found.result.backward()
        torch.manual_seed(5)
        twin(x, image).backward()
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        for a, b in zip(ours.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(a, b)  # statistics moved once, though the norm was computed again
        (graph,) = found.graphs
        assert graph.road == "native" and not found.fallbacks
        assert not any("dropout" in op or "bernoulli" in op for op in graph.recomputed), "draws are never repeated"
        assert "aten.tanh" in graph.recomputed and ("aten.convolution" in graph.recomputed) == (budget < 1)
        assert "kept for backward" in str(found) and "temporaries: " in str(found) and graph.peak > 0
        kept.append(graph.saved[0])
    assert kept[1] <= kept[0] / 2 and kept[2] < kept[1]


def test_a_dropped_mask_is_kept_as_it_was_drawn() -> None:
    """Everything is computed again but the draws."""
    fn = torchsmith.compile(lambda x: F.dropout(torch.sin(x), 0.5).exp().sum(), options={"activation_memory_budget": 0.0})
    x = torch.randn(100, requires_grad=True)
    torch.manual_seed(1)
    fn(x).backward()
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    F.dropout(torch.sin(y), 0.5).exp().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("budget", [1.5, -0.1])
def test_a_budget_out_of_range(budget: float) -> None:
    with pytest.raises(RuntimeError, match=r"'activation_memory_budget' is a number from 0 to 1"):
        torchsmith.compile(lambda x: x, options={"activation_memory_budget": budget})
