"""A training step of a classifier, for tests with the fake driver and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def stepper(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
