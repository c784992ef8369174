"""Whole training steps on the road of a GPU: right, recorded, and with counters of optimizers that stay in the host's memory."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from pretend import calls, generator, pretending
from stepping import stepper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchsmith
from torchsmith import pipeline
from torchsmith.compiler import reset
from torchsmith.events import recording
from torchsmith.graph.rules import attention, backward
from torchsmith.ir.nested import every
from torchsmith.ir.ops import OPS
from torchsmith.ir.plan import Call, Segment
from torchsmith.lower import core, devices, layout
from torchsmith.runtime import host_torch


@pytest.fixture
def fake() -> Iterator[ctypes.CDLL]:
    """Tensors without dimensions count as tensors in the host's memory, as an optimizer's counters are."""
    reset()

    def is_scalar(spec: Any, device: str) -> bool:
        return not spec.shape

    with ExitStack() as stack:
        for room in (core, devices):
            stack.enter_context(patch.object(room, "is_scalar", is_scalar))
        yield stack.enter_context(pretending())
    reset()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW of lists": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_steps(fake: ctypes.CDLL, make: Any) -> None:
    model, reference = net(), net()
    ours, theirs = make(model.parameters()), make(reference.parameters())
    compiled = torchsmith.compile(stepper(model, ours), options={"force_disable_caches": True})
    eager = stepper(reference, theirs)
    before = 0
    for i in range(6):
        x, y = torch.randn(12, 8), torch.randint(0, 4, (12,))
        torch.testing.assert_close(compiled(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
        if i == 3:
            before = calls("cuGraphLaunch")
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert calls("cuGraphLaunch") > before > 0
    state, wanted = ours.state_dict()["state"], copy.deepcopy(theirs.state_dict()["state"])
    for key, values in wanted.items():
        for name, value in values.items():
            torch.testing.assert_close(state[key][name], value, rtol=1e-4, atol=1e-5)
    assert calls("cuMemcpyDtoHAsync") <= 6 + 6  # once a step: are the classes in range? And the counters that the first step makes


class Dropping(torch.nn.Module):
    """Three layers, each with a dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, keep: Callable[..., torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            x = keep(torch.relu(layer(torch.softmax(x, 1))))
        return x


def drop(x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, 0.25, True)[0]


def test_dropout_is_part_of_the_record(fake: ctypes.CDLL) -> None:
    """One segment for the whole step; each replay has the numbers of its call, and the generator moves as eager's does."""
    model, reference = Dropping(), Dropping()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference))

    def stepping(model: torch.nn.Module, optimizer: torch.optim.Optimizer, keep: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x, keep).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    x = torch.randn(12, 8)
    for m, optimizer in ((model, ours), (reference, theirs)):  # its state is there
        stepping(m, optimizer, lambda x: x)(x)
    step = torchsmith.compile(stepping(model, ours, drop), options={"force_disable_caches": True})
    masks: list[torch.Tensor] = []
    eager = stepping(reference, theirs, lambda x: x * masks.pop(0).to(x.dtype) * (1 / 0.75))
    generator.offset = 0
    launches = []
    for i in range(5):
        if i == 3:
            generator.offset = 4 * 100
        first = generator.offset // 4
        masks += [numbers_of(12 * 8, first + k).view(12, 8) < 0.75 for k in range(3)]
        before = calls("cuGraphLaunch")
        x = torch.randn(12, 8)
        torch.testing.assert_close(step(x), eager(x))
        assert generator.offset == 4 * (first + 3)
        launches.append(calls("cuGraphLaunch") - before)
    assert launches[-2:] == [1, 1] and calls("cuGraphInstantiate") == 1
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def numbers_of(n: int, counter: int) -> torch.Tensor:
    """What few elements are compared with: four of a thread's."""
    words = [OPS["philox"].scalar(generator.seed, counter, e // 4, e % 4) for e in range(n)]
    return torch.tensor(words, dtype=torch.float64).float() * 2.0**-32 + 2.0**-33


def test_graphs_under_autograd_are_for_the_device_at_hand(fake: ctypes.CDLL) -> None:
    """Forward and backward apart, as one graph would be: kernels draw, for this architecture, and nothing is recorded if so said."""
    made: list[Any] = []
    at_hand, compiling, loading = pipeline.at_hand, pipeline.compile_functional, pipeline.load

    def compile_functional(fg: Any, options: Any, *rest: Any, **named: Any) -> Any:
        made.append(options.cuda_arch)
        return compiling(fg, options, *rest, **named)

    def load(*given: Any, **named: Any) -> Any:
        made.append(named["records"])
        return loading(*given, **named)

    for cudagraphs in (True, False):
        model, made[:] = Dropping(), []
        with (
            patch.object(pipeline, "at_hand", lambda fg, options: dataclasses.replace(at_hand(fg, options), cuda_arch=80)),
            patch.object(pipeline, "compile_functional", compile_functional), patch.object(pipeline, "load", load), recording() as got,
        ):  # fmt: skip
            compiled = torchsmith.compile(model, options={"force_disable_caches": True, "triton.cudagraphs": cudagraphs})
            for _ in range(4):
                first = generator.offset // 4
                x = torch.randn(12, 8)
                masks = [numbers_of(12 * 8, first + k).view(12, 8) < 0.75 for k in range(3)]
                found = compiled(x, drop)
                torch.testing.assert_close(found, model(x, lambda x, masks=masks: x * masks.pop(0).to(x.dtype) * (1 / 0.75)))
                found.square().mean().backward()
        assert made == [80, 8 if cudagraphs else 0] * 2
        called = {x for e in got if e.kind == "graph" for x in e.fields["report"].externs}
        assert called <= {"torchsmith.take_draws.default", "aten.addmm.default"}, called


def test_dropout_of_an_odd_address_is_eagers(fake: ctypes.CDLL) -> None:
    """The host program gives up before the generator moves."""
    f = torchsmith.compile(lambda x: drop(x) * 2, options={"force_disable_caches": True})
    for x, moved in ((torch.ones(64), 4), (torch.ones(65)[1:], 0)):
        generator.offset = 8
        with recording() as got:
            assert set(f(x).unique().tolist()) == {0.0, 2 * torch.tensor(1 / 0.75).item()}
        assert generator.offset == 8 + moved
        assert {e.fields["code"] for e in got if e.kind == "fallback"} == (set() if moved else {"RUN004"})  # of each function that runs


def test_a_number_of_the_host_that_the_device_computes(fake: ctypes.CDLL) -> None:
    """Eager's way is kept: the graph is not compiled."""
    def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        n.add_(x.sum())
        return x * 2

    g, x, n = torchsmith.compile(f), torch.ones(3, 4), torch.tensor(1.0)
    assert (g(x, n) == 2).all() and n == 13


def test_numbers_of_the_host(fake: ctypes.CDLL) -> None:
    """They are read at each call, computed on the host, written when the call has succeeded, and count as written."""
    def f(x: torch.Tensor, n: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        n.add_(1)
        k.mul_(3)
        return torch.softmax(x, 1) * (1 - 0.9 ** n.item()) + n * k

    g = torchsmith.compile(f)
    n, k, m, j = torch.tensor(1.0), torch.tensor(2), torch.tensor(1.0), torch.tensor(2)
    for _ in range(3):
        x, version = torch.randn(3, 4), n._version
        torch.testing.assert_close(g(x, n, k), f(x, m, j))
        assert n == m and k == j and n._version > version
    assert calls("cuMemcpyDtoHAsync") == 0


class Block(torch.nn.Module):
    """Convolutions of every kind, norms of batches, a residual and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.first, self.wide = torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.second, self.point = torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 16, 1)
        self.up, self.head = torch.nn.ConvTranspose2d(16, 8, 2, stride=2), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.first(self.stem(x))), 3, 2, 1)
        x = torch.relu(self.second(self.point(self.wide(x))) + x)
        return self.head(self.up(x).mean((2, 3)))


@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "backward outside"])
def test_gradients_of_convolutions_lie_channels_last(fake: ctypes.CDLL, whole: bool) -> None:
    """What the library's calls read and return, and what is kept for them, has the format in which the library computes."""
    torch.manual_seed(0)
    model, reference = Block(), Block()
    reference.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference))
    with patch.object(layout, "LIBRARY_DEVICES", {"cuda", "cpu"}):
        options = {"force_disable_caches": True}
        if whole:
            compiled = torchsmith.compile(stepper(model, ours), options=options)
        else:
            compiled = stepper(torchsmith.compile(model, options=options), ours)
        eager = stepper(reference, theirs)
        for _ in range(3):
            x, y = torch.randn(2, 3, 24, 24), torch.randint(0, 4, (2,))
            torch.testing.assert_close(compiled(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        assert a.stride() == b.stride()
        assert whole or (a.grad is None) == (b.grad is None)


class Seen(TorchDispatchMode):
    """How the operands of each operator lie."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[list[tuple[int, ...]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.calls.setdefault(str(func), []).append([tuple(t.stride()) for t in tensors])
        return func(*args, **(kwargs or {}))


def pooled(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operators that are calls, forward or back."""
    grid, samples = y[:, :2].permute(0, 2, 3, 1).tanh(), torch.full((2, 8, 2), 0.5)
    return (
        F.avg_pool2d(y, 3, 2, 1), F.adaptive_avg_pool2d(y, (5, 4)), F.fractional_max_pool2d(y, 2, output_size=5, _random_samples=samples),
        F.pad(y, (2, 1, 1, 2), mode="reflect"), F.pad(y, (2, 1, 1, 2), mode="replicate"), F.interpolate(y, scale_factor=2, mode="bilinear"),
        F.grid_sample(y, grid, align_corners=False), F.rrelu(y, training=False), torch.cdist(y, y),
        y.sort(1).values, y.topk(3, 1).values, y.kthvalue(2, 3).values, y.median(3).values,
    )  # fmt: skip


@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "backward outside"])
def test_calls_beside_convolutions_read_what_eagers_read(fake: ctypes.CDLL, whole: bool) -> None:
    """The format of convolutions is theirs alone. Other kernels of the library see by the strides which one of them is to run: of them
    avg_pool2d_backward's for channels-last images is wrong on GPUs where there is padding (torch 2.11)."""
    torch.manual_seed(0)
    first, second, x = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 1), torch.randn(2, 3, 13, 13)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = first(x)
        return sum((t.square().sum() for t in pooled(y)), second(torch.relu(y)).square().sum())

    def step(x: torch.Tensor, loss: Any = forward) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss(x), [first.weight, second.weight])

    def refused(*_: Any) -> None:
        raise RuntimeError("what torch runs is not recorded")

    options = {"force_disable_caches": True}
    joined, plans = pipeline.segment, []
    with (
        patch.object(layout, "LIBRARY_DEVICES", {"cuda", "cpu"}), patch.dict(host_torch.RECORDERS, {"cuda": (refused, refused)}),
        patch.object(pipeline, "segment", lambda p, o: plans.append(joined(p, o)) or plans[-1]),
    ):  # fmt: skip
        found = torchsmith.compile(step, options=options)(x) if whole else step(x, torchsmith.compile(forward, options=options))
    with Seen() as seen:
        wanted = step(x)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    checked = set()
    for plan in plans:
        for extern in (s.extern for s in every(plan.run) if isinstance(s, Call)):
            if extern.op in seen.calls and "convolution" not in extern.op:
                lies = [tuple(n.value for n in plan.buffers[b].layout.strides) for b in extern.buffers]
                assert lies in seen.calls[extern.op], (extern.op, lies, seen.calls[extern.op])
                checked.add(extern.op)
    assert len(plans) == 2 - whole and len(checked) >= 12, checked


def test_attention_with_gradients_is_the_librarys(fake: ctypes.CDLL) -> None:
    """Calls forward and back in one segment; a mask that is true everywhere is dropped."""

    def attend(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (x + 1).view(2, 11, 3, 2, 8).permute(2, 0, 3, 1, 4)
        masks = (torch.arange(11) < 9)[None, None, None].expand(2, 1, 11, 11), torch.ones(2, 1, 1, 11, dtype=torch.bool)
        found = [F.scaled_dot_product_attention(q, k, v, m) * 2 for m in masks]
        return torch.autograd.grad(found[0].sum() + found[1].square().sum(), x)[0], *found

    torch.manual_seed(0)
    joined, plans = pipeline.segment, []
    with (
        patch.object(attention, "LIBRARIES", {"cpu"}), patch.object(attention, "TYPES", {torch.float32}),
        patch.object(pipeline, "segment", lambda p, o: plans.append(joined(p, o)) or plans[-1]),
    ):
        x = torch.randn(2, 11, 48, requires_grad=True)
        for got, wanted in zip(torchsmith.compile(attend, options={"force_disable_caches": True})(x), attend(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
    made = [s.extern for s in every(plans[-1].run) if isinstance(s, Call)]
    assert [e.op.split(".")[1] for e in made] == ["forward"] * 2 + ["backward"] * 2
    assert sum(e.args[3 if "forward" in e.op else 4] is None for e in made) == 2
    assert sum(isinstance(s, Segment) for s in plans[-1].run) == 1 and not any(isinstance(s, Call) for s in plans[-1].run)


def test_library_calls_of_two_graphs() -> None:
    """What forward keeps for backward comes at the same addresses step by step, so the library calls that make and read it are recorded."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.Softmax(1))))
    reference = copy.deepcopy(model)
    reset()
    with pretending():
        compiled = torchsmith.compile(model, options={"force_disable_caches": True})
        for _ in range(16):
            x = torch.randn(500, 64)
            for m in (compiled, reference):
                m.zero_grad(set_to_none=False)
                m(x).square().mean().backward()
            for a, b in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
        assert calls("cuGraphLaunch") > 0
        joined, plans = pipeline.segment, []
        convolutions = (m for n in (3, 8) for m in (torch.nn.Conv2d(n, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()))
        head = (torch.nn.MaxPool2d(3, 2, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4))
        net = torch.nn.Sequential(*convolutions, *head)
        with (
            patch.object(layout, "LIBRARY_DEVICES", {"cuda", "cpu"}), patch.object(backward, "_is_gathered", lambda *a: True),
            patch.object(pipeline, "segment", lambda p, o: plans.append(joined(p, o)) or plans[-1]),
        ):  # fmt: skip
            torchsmith.compile(net, options={"force_disable_caches": True})(torch.randn(2, 3, 16, 16)).sum().backward()
    reset()
    assert len(plans) == 2
    for steps in (plan.run for plan in plans):  # the last product writes what the program sees, the first one back reads its gradient
        inside = [sum(isinstance(x, Call) for x in s.steps) for s in steps if isinstance(s, Segment)]
        assert sum(isinstance(s, Call) for s in steps) <= 2 and len(inside) <= 2 and max(inside) >= 2, inside


@pytest.mark.parametrize("whole", [False, True], ids=["backward outside", "whole step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_attention_with_dropout_is_eagers(fake: ctypes.CDLL, dtype: torch.dtype, whole: bool) -> None:
    """Eager's own operator, forward and back, with the same numbers, new ones in each call, and behind them the same generator."""

    def attend(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (x + 1).view(2, 11, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = (torch.arange(11) < 9)[None, None, None].expand(2, 1, 11, 11)
        first = F.scaled_dot_product_attention(q, k, v, mask, 0.25)
        second = F.scaled_dot_product_attention(first, k, v, bias, 0.5, scale=0.3)
        third = F.scaled_dot_product_attention(q[:, 0] * 2, k[:, 0].detach(), v[:1, 0], None, 0.5, True)
        return (first + second.square() + third).transpose(1, 2)

    def step(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attend(x, bias).square().mean(), (x, bias))

    def outside(f: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda x, bias: torch.autograd.grad(f(x, bias).square().mean() + torch.rand(3).sum(), (x, bias))

    torch.manual_seed(0)
    x, bias = torch.randn(2, 11, 48, dtype=dtype, requires_grad=True), torch.randn(2, 1, 11, 11, dtype=dtype, requires_grad=True)
    with patch.object(attention, "LIBRARIES", {"cpu"}), recording() as got:
        options = {"force_disable_caches": True}
        ours = torchsmith.compile(step, options=options) if whole else outside(torchsmith.compile(attend, options=options))
        theirs = step if whole else outside(attend)
        seen = []
        for _ in range(4):
            before = torch.get_rng_state()
            wanted, after = theirs(x, bias), torch.get_rng_state()
            torch.set_rng_state(before)
            found = ours(x, bias)
            assert torch.equal(torch.get_rng_state(), after)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0.0, atol=(0.03 if dtype is torch.bfloat16 else 1e-5) * float(b.abs().max()))
            seen.append(found[0])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert not [e for e in got if e.kind == "fallback"]
    externs = [x for e in got if e.kind == "graph" for x in e.fields["report"].externs]
    assert sum("dropped" in x for x in externs) >= 2, externs


def test_attention_whose_kernel_the_program_chooses_draws_as_eagers(fake: ctypes.CDLL) -> None:
    """It ends the graph: the kernel is chosen in torch, and so it is where the products are asked for by name."""

    def chosen(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, x, x, None, 0.5) * 2

    def named(x: torch.Tensor) -> torch.Tensor:
        return torch._scaled_dot_product_attention_math(x, x, x, None, 0.5)[0] * 2  # type: ignore[attr-defined,no-any-return]

    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    for f in (chosen, named):
        with patch.object(attention, "LIBRARIES", {"cpu"}), recording() as got:
            compiled = torchsmith.compile(f, options={"force_disable_caches": True})
            for seed in (0, 1):
                found = []
                for g in (compiled, f):
                    torch.manual_seed(seed)
                    found.append(torch.autograd.grad(g(x).square().sum(), x)[0])
                torch.testing.assert_close(*found)
        assert [e.fields["code"] for e in got if e.kind == "graph_break"][:1] == ["LOW003"]
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
