"""Gradients of convolutions: the image's is a product of ours, the weight's one or a call; both equal eager's, whatever the layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchsmith
from torchsmith.events import recording

aten = torch.ops.aten
# image, weight, stride, padding, dilation, groups; is the weight's gradient a call?
CASES: dict[str, tuple[Any, ...]] = {
    "3 x 3": ((2, 16, 9, 11), (32, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1, True),
    "stride, rows left over": ((2, 8, 10, 9), (16, 8, 3, 2), (2, 3), (1, 0), (1, 1), 1, True),
    "dilation": ((2, 8, 9, 9), (8, 8, 3, 3), (1, 2), (2, 1), (2, 1), 1, True),
    "1 x 1": ((3, 24, 5, 7), (40, 24, 1, 1), (1, 1), (0, 0), (1, 1), 1, False),
    "1 x 1, stride": ((3, 24, 6, 7), (16, 24, 1, 1), (2, 2), (0, 0), (1, 1), 1, False),
    "depthwise": ((2, 16, 8, 8), (16, 1, 3, 3), (2, 2), (1, 1), (1, 1), 16, True),
    "groups": ((2, 16, 8, 8), (32, 4, 3, 3), (1, 1), (1, 1), (1, 1), 4, True),
    "1-d": ((2, 8, 15), (8, 8, 4), (2,), (1,), (1,), 1, True),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_eagers(name: str) -> None:
    shape, weight, stride, padding, dilation, groups, is_called = CASES[name]
    torch.manual_seed(0)
    x, w = torch.randn(shape), torch.randn(weight)
    y = aten.convolution(x, w, None, stride, padding, dilation, False, (0,) * len(stride), groups)

    def fn(grad: Tensor, x: Tensor, w: Tensor) -> Any:
        x, grad = torch.relu(x), grad * 2  # made by kernels, which choose how they lie
        return aten.convolution_backward(grad, x, w, [w.shape[0]], stride, padding, dilation, False, [0] * len(stride), groups, [True] * 3)

    grad = torch.randn_like(y)
    with recording() as got:
        found = torchsmith.compile(fn, fullgraph=True)(grad, x, w)
    want = fn(*(t.double() for t in (grad, x, w)))
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    (report,) = [e.fields["report"] for e in got if e.kind == "graph"]
    assert report.road == "native" and report.externs == (("aten.convolution_backward.default",) if is_called else ())


def test_gradients_that_leave_have_eagers_strides() -> None:
    """A call may say another stride where one element lies in a dimension; kernels do not care, who reads `.stride()` does. And a 1 x 1
    image whose gradient's mask holds for certain is a plain product."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 5, groups=4, padding=2), nn.ReLU()
    model, x = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1)), torch.randn(3, 3, 12, 12)

    def step(m: Any, x: Tensor) -> None:
        m(x).square().mean().backward()

    step(model, x)
    want = [p.grad for p in model.parameters()]
    for way in (torchsmith.compile(step, fullgraph=True), lambda m, x: step(torchsmith.compile(m), x)):
        model.zero_grad()
        way(model, x)
        for p, w in zip(model.parameters(), want, strict=True):
            assert p.grad is not None and w is not None and p.grad.stride() == w.stride()
            torch.testing.assert_close(p.grad, w)
