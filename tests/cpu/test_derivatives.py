"""Derivatives of operators, compiled with the program that asks for them, against eager and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchsmith
from torchsmith.events import recording

Program = Callable[[Tensor], Tensor]
LABELS = torch.tensor([1, 2, -100, 3, 4, 5])
PROGRAMS: dict[str, tuple[Program, ...]] = {
    "activations": (
        F.relu, F.relu6, F.hardtanh, F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.tanh, torch.sigmoid, F.leaky_relu, F.elu,
        F.selu, F.celu, F.silu, F.mish, F.softplus, F.hardsigmoid, F.logsigmoid, F.hardshrink, F.softshrink, lambda x: F.glu(x, 1),
        lambda x: F.prelu(x, x[0, :1]),
    ),
    "softmax": (lambda x: F.softmax(x, 1), lambda x: F.log_softmax(x, 0)),
    "losses": (
        lambda x: F.mse_loss(x, x.detach() * 0.5), lambda x: F.smooth_l1_loss(x, x.detach() * 0.5),
        lambda x: F.huber_loss(x, x.detach() * -3),
        lambda x: F.soft_margin_loss(x, x.detach().sign()), lambda x: F.binary_cross_entropy(x.sigmoid(), (x.detach() > 0).to(x.dtype)),
        lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), lambda x: F.nll_loss(x, LABELS, reduction="none"),
        lambda x: F.cross_entropy(x, LABELS, weight=torch.arange(8, dtype=x.dtype) + 1), lambda x: F.cross_entropy(x[0], torch.tensor(3)),
        lambda x: F.cross_entropy(x.view(1, 6, 2, 4), torch.tensor([[[0, 1, 2, 3], [4, -100, 0, 0]]])),
    ),
    "normalisation": (
        lambda x: F.layer_norm(x, (8,), x[0], x[1]), lambda x: F.group_norm(x.view(2, 6, 4), 3, x[0, :6], x[1, :6]),
        lambda x: F.batch_norm(x, None, None, x[0], x[1], True),
        lambda x: F.batch_norm(x, x.detach()[0], x.detach()[1].abs(), x[0], x[1], False),
    ),
    "places": (
        lambda x: x[2] * x[:, 1].sum(), lambda x: x[1:5:2, 2:], lambda x: x.diagonal(1),
        lambda x: F.embedding(torch.tensor([[1, 2], [1, 5]]), x, padding_idx=2), lambda x: F.max_pool2d(x.view(1, 1, 6, 8), 3, 2, 1),
        lambda x: F.adaptive_max_pool2d(x.view(1, 1, 6, 8), (2, 3)), lambda x: F.adaptive_avg_pool2d(x.view(1, 1, 6, 8), (2, 4)),
        lambda x: F.adaptive_avg_pool2d(x.view(1, 1, 6, 8), (1, 1)),
    ),
    "calls": (
        lambda x: F.conv2d(x.view(1, 1, 6, 8), x[:3, :3].reshape(1, 1, 3, 3), x[0, :1], padding=1), F.hardswish,
        lambda x: F.scaled_dot_product_attention(x.view(1, 2, 6, 4), x.view(1, 2, 6, 4) * 2, x.view(1, 2, 6, 4) + 1, is_causal=True),
        lambda x: F.interpolate(x.view(1, 1, 6, 8), scale_factor=2, mode="bilinear"), lambda x: F.avg_pool2d(x.view(1, 1, 6, 8), 2),
    ),
}  # fmt: skip


def gradient_of(programs: tuple[Program, ...]) -> Callable[[Tensor], list[Tensor]]:
    def run(x: Tensor) -> list[Tensor]:
        found = []
        for program in programs:
            leaf = x.detach().requires_grad_()
            y = program(leaf)
            weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape) * 0.1 + 1
            found.append(torch.autograd.grad((y.square() * weights).sum(), leaf)[0])
        return found

    return run


@pytest.mark.parametrize("family", PROGRAMS)
def test_gradients(family: str) -> None:
    torch.manual_seed(0)
    x, run = torch.randn(6, 8), gradient_of(PROGRAMS[family])
    with recording() as got:
        ours = torchsmith.compile(run, fullgraph=True)(x)
    (report,) = [e.fields["report"] for e in got if e.kind == "graph"]
    assert report.road == "native" and (family == "calls" or not report.externs), report
    for number, (a, b, c) in enumerate(zip(ours, run(x), run(x.double()), strict=True)):
        room = 2 * (b.double() - c).abs().max() + 4e-7 * c.abs().max() + 1e-12
        assert (a.double() - c).abs().max() <= room, f"{family} {number}"


def test_a_rule_that_would_cut_gradients_off_is_refused() -> None:
    """Whatever goes past autograd while an operand is watched stops the trace."""
    from torchsmith.codes import Unsupported
    from torchsmith.graph.sizes import SizeFacts
    from torchsmith.graph.tracing import Tracing, tensor_like, watched

    with Tracing(SizeFacts(), grad=True) as trace:
        real = torch.nn.Parameter(torch.ones(3))
        t = watched(tensor_like(real), real)
        assert (t * 2).requires_grad
        with pytest.raises(Unsupported, match="AUT004"):
            trace.dispatch(torch.ops.aten.mul.Tensor, (t, 2), {})
        with torch.no_grad():
            assert trace.dispatch(torch.ops.aten.mul.Tensor, (t, 2), {}).shape == (3,)


def test_ctc() -> None:
    """Lengths in tensors and in lists; the forward pass tells how many places there are."""
    torch.manual_seed(0)
    labels, lengths = torch.randint(1, 5, (2, 4)), (torch.tensor([6, 7]), torch.tensor([3, 4]))

    def run(x: Tensor, steps: Tensor, many: Tensor) -> tuple[Tensor, ...]:
        found = []
        for how in ((steps, many), ([6, 7], [3, 4])):
            leaf = x.detach().requires_grad_()
            loss = F.ctc_loss(leaf.log_softmax(-1), labels, *how, zero_infinity=True)
            found += [loss, *torch.autograd.grad(loss, leaf)]
        return tuple(found)

    x = torch.randn(7, 2, 5)
    with recording() as got:
        ours = torchsmith.compile(run, fullgraph=True)(x, *lengths)
    assert [e.fields["report"].road for e in got if e.kind == "graph"] == ["native"]
    for a, b in zip(ours, run(x, *lengths), strict=True):
        torch.testing.assert_close(a, b)
