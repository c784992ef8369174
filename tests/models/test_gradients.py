"""Gradients are never lost and never wrong: outputs, gradients and buffers equal eager's, and the forward runs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchsmith
from models import inputs_of, make_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


def pair() -> tuple[Net, Net]:
    torch.manual_seed(3)
    one, two = Net(), Net()
    two.load_state_dict(one.state_dict())
    return one, two


def same_state(a: nn.Module, b: nn.Module) -> None:
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"gradient of {n}: {m}")
        torch.testing.assert_close(p, q, msg=lambda m, n=name: f"{n}: {m}")
    for (name, p), (_, q) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, n=name: f"buffer {n}: {m}")


def test_training_steps_equal_eager() -> None:
    model, twin = pair()
    compiled = torchsmith.compile(model)
    runs: list[tuple[Any, nn.Module]] = [(compiled, model), (twin, twin)]
    losses = []
    for call, owner in runs:
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(11)
        lost = []
        for _ in range(3):
            x = torch.randn(4, 3, 8, 8)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(call(x), torch.tensor([0, 1, 2, 3]))
            loss.backward()
            optimizer.step()
            lost.append(loss.item())
        losses.append(lost)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    same_state(model, twin)
    assert int(model.norm.num_batches_tracked) == 3


def test_it_is_native() -> None:
    model, _ = pair()
    e = torchsmith.explain(model)(torch.randn(2, 3, 8, 8))
    assert e.result.requires_grad
    assert not e.fallbacks and not e.breaks and e.graph_count == 1 and e.graphs[0].road == "native", str(e)
    assert int(model.norm.num_batches_tracked) == 1


def test_input_gradient_and_no_grad_take_turns() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (torch.tanh(x @ w) ** 2).sum()

    compiled = torchsmith.compile(fn)
    for _ in range(2):
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
        want = torch.autograd.grad(fn(x, w), x)[0]
        torch.testing.assert_close(torch.autograd.grad(compiled(x, w), x)[0], want)
        with torch.no_grad():
            got = compiled(x, w)
            assert not got.requires_grad
            torch.testing.assert_close(got, fn(x, w))
        torch.testing.assert_close(compiled(x.detach(), w), fn(x.detach(), w))


def test_grad_mode_borders_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        return x / scale + x.detach()

    x = torch.randn(5, requires_grad=True)
    want = torch.autograd.grad(fn(x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(torchsmith.compile(fn)(x).sum(), x)[0], want)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 100


def test_custom_backward_is_kept() -> None:
    def fn(x: Tensor) -> Tensor:
        return Doubled.apply(torch.sin(x)).sum()

    x = torch.randn(5, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(torchsmith.compile(fn)(x), x)[0], torch.cos(x) * 100)


@pytest.mark.parametrize(
    "write", [lambda t: t.mul_(2), lambda t: t[1:].add_(1), lambda t: t.copy_(torch.ones(4))], ids=["mul_", "slice add_", "copy_"]
)
def test_writes_into_inputs(write: Callable[[Tensor], Any]) -> None:
    def fn(x: Tensor, p: Tensor) -> Tensor:
        write(x)
        return (x * p).sum()

    p = torch.randn(4, requires_grad=True)
    results = []
    for call in (fn, torchsmith.compile(fn)):
        x = torch.arange(4.0)
        out = call(x, p)
        results.append((out, x, torch.autograd.grad(out, p)[0]))
    torch.testing.assert_close(results[1], results[0])


def test_whole_model_in_train_mode() -> None:
    model, twin = make_model("bert_small").train(), make_model("bert_small").train()
    (ids,) = inputs_of("bert_small", 2)
    outputs = []
    for call in (torchsmith.compile(model), twin):
        torch.manual_seed(4)
        out = call(ids)
        (out.last_hidden_state.square().mean() + out.pooler_output.sum()).backward()
        outputs.append(out)
    torch.testing.assert_close(outputs[0].last_hidden_state, outputs[1].last_hidden_state)
    same_state(model, twin)
