"""What the backward pass computes again: gradients stay eager's under every budget, and less is kept."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


def test_what_is_compared_with_its_largest_is_kept() -> None:
    """Computed again by another kernel, in other bits, it might equal none."""
    for fn, again in ((lambda y: y.sin(), ("aten.elu",)), (lambda y: y.amax(0), ()), (lambda y: y[None].amax((0, 1)), ())):
        found = torchsmith.explain(lambda x, fn=fn: fn(F.elu(x)))(torch.randn(6, 5, requires_grad=True))
        assert found.graphs[0].recomputed == again


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(Block() for _ in range(3)), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    wide = operator is torch.ops.aten.addmm.default and args[2].shape[1] == 64
    return CheckpointPolicy.MUST_SAVE if wide else CheckpointPolicy.PREFER_RECOMPUTE


def selecting() -> Any:
    return create_selective_checkpoint_contexts(policy)


def broken() -> Any:
    raise ValueError("no contexts")


PRODUCTS = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
WAYS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda block, x: block(x),
    "all": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "listed": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=PRODUCTS),
    "policy": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=selecting),
}


def test_checkpoints_and_their_policies() -> None:
    """What a checkpointed part of the program keeps is what its policy says, block by block; gradients stay eager's."""
    kept, again = {}, {}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        model, x = Blocks(way), torch.randn(6, 16)
        twin = copy.deepcopy(model)
        torch.manual_seed(5)
        found = torchsmith.explain(model)(x)
        found.result.backward()
        torch.manual_seed(5)
        twin(x).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        (graph,) = found.graphs
        assert graph.road == "native" and not found.fallbacks and not found.breaks
        kept[name], again[name] = graph.saved[0], graph.recomputed
    wide, row = 6 * 64 * 4, 6 * 16 * 4
    assert "aten.addmm" in again["all"] and "aten.native_layer_norm" in again["all"]
    assert kept["all"] <= kept["plain"] - 3 * wide and kept["all"] >= 2 * row, "what enters a block is kept"
    assert "aten.addmm" not in again["listed"] and "aten.native_layer_norm" in again["listed"]
    assert kept["all"] + 3 * wide <= kept["policy"] <= kept["listed"] <= kept["plain"]


def test_a_policy_that_is_none() -> None:
    """Contexts of another kind, or none at all, are a break: eager's checkpoint runs, and raises."""
    x = torch.randn(3, requires_grad=True)
    fn = torchsmith.compile(lambda x: checkpoint(torch.sin, x * 2, use_reentrant=False, context_fn=broken))
    with pytest.raises(ValueError, match="no contexts"):
        fn(x)


def test_every_budget_keeps_no_more_than_it_says() -> None:
    """From 1 to 0 ever less is kept, and at most that part of what the default keeps, as long as something can be computed again."""
    torch.manual_seed(0)
    model, x = Blocks(WAYS["plain"]).eval(), torch.randn(6, 16)
    kept = []
    for budget in (1.0, 0.75, 0.5, 0.25, 0.0):
        found = torchsmith.explain(copy.deepcopy(model), options={"activation_memory_budget": budget})(x)
        kept.append(found.graphs[0].saved[0])
        assert kept[-1] <= max(budget * kept[0], kept[0] / 20)
    assert kept == sorted(set(kept), reverse=True) and kept[1] > kept[0] / 2, kept


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_nothing_is_computed_again_from_what_the_program_may_write(budget: float) -> None:
    """Inputs and results that eager does not save may change before the backward pass."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return (y + 1).exp().sum(), y

    compiled = torchsmith.compile(f, options={"activation_memory_budget": budget})
    for fn in (f, compiled):
        leaf = torch.linspace(-1, 1, 5000, requires_grad=True)
        x = leaf * 1
        loss, y = fn(x)
        with torch.no_grad():
            x.add_(1)
            y.mul_(3)
        loss.backward()
        if fn is f:
            want = leaf.grad
    torch.testing.assert_close(leaf.grad, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_in_a_checkpointed_part_move_as_often_as_in_eager(reentrant: bool) -> None:
    """Eager runs the part once more when it goes backwards, and with it what it writes."""
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part, self.head = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.part, self.first(x), use_reentrant=reentrant))

    torch.manual_seed(0)
    model, x = Part(), torch.randn(5, 6)
    twin = copy.deepcopy(model)
    for net, m in ((torchsmith.compile(model), model), (twin, twin)):
        net(x).square().sum().backward()
        m.eval()
        net(x).square().sum().backward()
    assert int(model.part[1].num_batches_tracked) == int(twin.part[1].num_batches_tracked) == 2
    for a, b in zip([*model.buffers(), *(p.grad for p in model.parameters())], [*twin.buffers(), *(p.grad for p in twin.parameters())],
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_a_long_chain_that_is_computed_again():
    """Longer than Python's stack is deep."""

    def chain(x):
        for _ in range(400):
            x = x.sin() * 1.01
        return x

    x = torch.randn(3, requires_grad=True)
    (found,) = torch.autograd.grad(torchsmith.compile(chain, backend="aot_eager")(x).sum(), x)
    (wanted,) = torch.autograd.grad(chain(x).sum(), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_does_not_keep_the_generator_draws_again(reentrant: bool) -> None:
    """Its gradient is of other random numbers, and the generator moves on in the backward pass."""
    part = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def f(x: Tensor) -> Tensor:
        return checkpoint(part, x, use_reentrant=reentrant, preserve_rng_state=False)

    x, found = torch.randn(5, 6, requires_grad=True), []
    for fn in (torchsmith.compile(f), f):
        torch.manual_seed(0)
        x.grad = None
        fn(x).sum().backward()
        found.append([x.grad, torch.get_rng_state()])
    torch.testing.assert_close(*found)
