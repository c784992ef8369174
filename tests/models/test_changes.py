"""What a user changes between calls is noticed: weights, modes, submodules, closures, globals, hooks. A stale entry would answer wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchsmith

SCALE = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act: nn.Module = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 5)
        self.factor = 1.0
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.drop(y)) * self.factor * SCALE + self.shift


def net() -> Net:
    torch.manual_seed(3)
    model = Net()
    with torch.no_grad():
        model.norm.running_mean.uniform_(-0.3, 0.3)
        model.norm.running_var.uniform_(0.5, 2)
        model.norm.weight.uniform_(0.5, 2)
    return model.eval()


def add_in_place(m: Net) -> None:
    with torch.no_grad():
        m.conv.weight.add_(0.5)


def add_to_data(m: Net) -> None:
    m.head.weight.data.add_(0.5)


def write_through_numpy(m: Net) -> None:
    m.head.weight.detach().numpy()[...] *= -1


def load_state(m: Net) -> None:
    m.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in m.state_dict().items()})


def replace_parameter(m: Net) -> None:
    m.head.weight = nn.Parameter(m.head.weight.detach() * 3)


def replace_data(m: Net) -> None:
    m.head.weight.data = m.head.weight.detach() * 3


def swap_submodule(m: Net) -> None:
    m.act = nn.Tanh()


def swap_for_other_class(m: Net) -> None:
    m.drop = nn.Softmax(1)  # type: ignore[assignment]


def change_attribute(m: Net) -> None:
    m.factor = 3.0


def change_buffer(m: Net) -> None:
    m.shift = torch.full((5,), 7.0)


def change_module_option(m: Net) -> None:
    m.norm.eps = 1.0


def add_pre_hook(m: Net) -> None:
    m.head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def add_hook(m: Net) -> None:
    m.act.register_forward_hook(lambda module, args, out: out + 1)


def replace_forward(m: Net) -> None:
    m.act.forward = lambda x: x * x  # type: ignore[method-assign]


def remove_bias(m: Net) -> None:
    m.head.bias = None  # type: ignore[assignment]


CHANGES: list[Callable[[Net], None]] = [
    add_in_place, add_to_data, write_through_numpy, load_state, replace_parameter, replace_data, swap_submodule, swap_for_other_class,
    change_attribute, change_buffer, change_module_option, add_pre_hook, add_hook, replace_forward, remove_bias,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_change_is_noticed(change: Callable[[Net], None]) -> None:
    model, x = net(), torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    compiled = torchsmith.compile(model)
    with torch.no_grad():
        before = compiled(x)
        torch.testing.assert_close(before, model(x))
        change(model)
        want = model(x)
        assert not torch.allclose(want, before), "the change must be visible, or this test shows nothing"
        torch.testing.assert_close(compiled(x), want)
        torch.testing.assert_close(compiled(x), want)


def test_train_and_eval() -> None:
    model, twin = net(), net()
    compiled = torchsmith.compile(model)
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for mode in (False, True, False, True):
            model.train(mode)
            twin.train(mode)
            torch.manual_seed(5)
            want = twin(x)
            torch.manual_seed(5)
            torch.testing.assert_close(compiled(x), want)
            for (name, a), (_, b) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
                torch.testing.assert_close(a, b, msg=name)


def test_global_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), torch.randn(2, 3, 6, 6)
    compiled = torchsmith.compile(model)
    with torch.no_grad():
        compiled(x)
        monkeypatch.setitem(globals(), "SCALE", -1.0)
        torch.testing.assert_close(compiled(x), model(x))


def test_closure_is_noticed() -> None:
    factor: Any = 2.0

    def fn(x: Tensor) -> Tensor:
        return torch.sin(x) * factor

    compiled, x = torchsmith.compile(fn), torch.randn(7)
    torch.testing.assert_close(compiled(x), fn(x))
    for factor in (3.0, torch.tensor(4.0), torch.arange(7), -1):  # noqa: B007  (fn reads it)
        torch.testing.assert_close(compiled(x), fn(x))


def test_argument_kinds_are_noticed() -> None:
    def fn(x: Tensor, k: Any = 2, flag: bool = False, **rest: Any) -> Any:
        y = x * k + rest.get("more", 0)
        return y.sum() if flag else y

    compiled, x = torchsmith.compile(fn), torch.randn(4, 6)
    for args, kwargs in (
        ((x,), {}), ((x, 3), {}), ((x, 3.0), {}), ((x, True), {}), ((x.double(),), {}), ((x.t(),), {}), ((x[:, ::2],), {}),
        ((x, 2, True), {}),
        ((x,), {"more": 1}), ((x,), {"more": x}), ((x.to(torch.int32), 2), {}), ((x[0],), {}), ((x[:0],), {}), ((x[0, 0],), {}),
    ):  # fmt: skip
        want, got = fn(*args, **kwargs), compiled(*args, **kwargs)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride() and got.dtype == want.dtype


@pytest.mark.roads("AUT001")
def test_modes_are_noticed() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w) + torch.ones(4)

    compiled, x, w = torchsmith.compile(fn), torch.randn(4, 4), torch.randn(4, 4)
    assert compiled(x, w).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = fn(x, w), compiled(x, w)
        assert want.dtype == got.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    with torch.inference_mode():
        assert compiled(x, w).is_inference()
    assert not compiled(x, w).is_inference()
    w.requires_grad_()
    assert compiled(x, w).requires_grad
    with torch.no_grad():
        assert not compiled(x, w).requires_grad
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert compiled(x, w).dtype == fn(x, w).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_overlapping_inputs_are_noticed() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    compiled = torchsmith.compile(fn)
    a, b = torch.zeros(4), torch.zeros(4)
    torch.testing.assert_close(compiled(a, b), torch.zeros(4))
    base = torch.zeros(6)
    torch.testing.assert_close(compiled(base[:4], base[2:]), torch.tensor([2.0, 2.0, 0.0, 0.0]))
    same = torch.zeros(4)
    torch.testing.assert_close(compiled(same, same), torch.full((4,), 2.0))
