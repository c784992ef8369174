"""Programs as people write them that must be one native graph at every size, whatever torch computes of it (extern calls are allowed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchsmith
from torchsmith.debug.explain import explanation
from torchsmith.events import recording

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[Any, ...], ...]]] = {}


def program(*calls: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function, and the arguments of its calls in turn."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = (fn, calls)
        return fn

    return add


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def run(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result of `fn`, which must have been one graph or an entry that exists."""
    with recording() as got:
        result = fn(*args)
    e = explanation(got)
    assert not e.breaks and not e.fallbacks and all(g.road == "native" for g in e.graphs) and len(e.graphs) <= 1, str(e)
    return result


@program((seeded(20), seeded(20, 3)), (seeded(30), seeded(30, 3)))
def mask_used_twice(scores: Tensor, boxes: Tensor) -> tuple[Tensor, ...]:
    mask = scores > 0
    return scores[mask][:, None] * boxes[mask], torch.where(mask)[0], torch.nonzero(mask)[:, 0] + torch.where(mask)[0]


@program((seeded(20),), (seeded(31),))
def best_of_unknown_many(scores: Tensor) -> tuple[Tensor, ...]:
    """topk of as many as there are, at most 7: k is computed from a size that only the data tell."""
    kept = scores > 0.2
    where = torch.where(kept)[0]
    best, at = scores[kept].topk(min(7, where.size(0)))
    return best, where[at] % 3, torch.div(where[at], 3, rounding_mode="floor")


@program((seeded(20), 5), (seeded(31), 9))
def slices_of_unknown_length(scores: Tensor, n: int) -> tuple[Tensor, ...]:
    kept = scores[scores > 0.2]
    return kept[:n] * 2, kept[-n:].sin(), kept[2:n].sum(), kept[:1000] + 1, kept[1000:].abs(), kept[: scores.shape[0]], kept[1:-1].exp()


@program((seeded(3, 8),), (seeded(2, 8),))
def numbers_in_tensors(x: Tensor) -> tuple[Tensor, ...]:
    """Python asks for the value of tensors that are made of numbers only."""
    count, sides = torch.div(8, 4, rounding_mode="trunc"), torch.tensor([4, 2])
    span = torch.tensor(min(5, 7))
    x = x + 1
    x += torch.sqrt(torch.tensor(4, dtype=torch.float) * 4).item()  # a write elsewhere
    if torch.tensor(3) > count:
        x = x * float(10 - span)
    return x.view(-1, count, 4), torch.arange(20.0)[10 - span : 10 + span], x.view(-1, *sides.tolist()), x[:, span // 2]


@program((seeded(1, 6, 5, 5), seeded(6, 3, 3, 3)), (seeded(1, 9, 5, 5), seeded(9, 3, 3, 3)))
def weights_per_sample(x: Tensor, weight: Tensor) -> Tensor:
    """One group for each sample: how many varies."""
    return torch.nn.functional.conv2d(x, weight, groups=x.shape[1] // 3)


def test_a_written_number_is_not_known() -> None:
    def fn(x: Tensor) -> Tensor:
        n = torch.tensor([2, 3])
        n[1:] += 1
        return x * n[1].item() + n.tolist()[1]

    x = seeded(3)
    with torch.inference_mode():
        assert torch.equal(torchsmith.compile(fn)(x), fn(x))


class Inference(nn.Module):
    """A write to what was made under inference mode, in a region of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        self.cache[: x.shape[0]] = x
        mask = torch.full((4, 4), float("-inf")).triu(1)
        mask[:, 0] = 0
        return torch.hstack([torch.zeros(4, 2), mask]).exp() @ x.new_ones(6, 2) + self.cache.sum()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_region_of_inference_mode(mode: Any) -> None:
    module = Inference()
    compiled = torchsmith.compile(module)
    with mode():
        before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        for rows in (2, 3):
            x = seeded(rows, 8)
            torch.testing.assert_close(run(compiled, (x,)), module(x))
            assert before == (torch.is_inference_mode_enabled(), torch.is_grad_enabled())


@torch.library.custom_op("torchsmith_whole::positive_rows", mutates_args=())
def positive_rows(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight)[x[:, 0] > 0]


@positive_rows.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    assert x.shape[1] == weight.shape[0]
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), weight.shape[1])


@torch.library.custom_op("torchsmith_whole::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x])


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2 * x.shape[0], *x.shape[1:])


@program((seeded(6, 4), seeded(4, 3)), (seeded(9, 4), seeded(4, 3)))
def custom_operators(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Operators whose registered fakes tell sizes that vary, and sizes that only the data tell."""
    rows = positive_rows(doubled(x) + 1, weight)
    return rows.sin(), rows.sum(0), doubled(rows)[: x.shape[0]] * 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    fn, calls = PROGRAMS[name]
    compiled = torchsmith.compile(fn)
    with torch.inference_mode():
        for args in (*calls, calls[0]):
            torch.testing.assert_close(run(compiled, args), fn(*args), rtol=2e-5, atol=2e-5)


def test_associative_scan() -> None:
    """A linear recurrence as transformers' state space models write it for compilers; its definition is a loop."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        backwards = associative_scan(torch.maximum, b, 1, reverse=True, combine_mode="generic")
        return *associative_scan(combine, (a, b), dim=1, combine_mode="generic"), backwards

    compiled = torchsmith.compile(fn)
    with torch.inference_mode():
        for n in (1, 2, 7, 12, 13, 9, 15):
            a, b = seeded(2, n, 3).sigmoid(), seeded(2, n, 3)
            state = torch.zeros(2, 3)
            want = torch.stack([state := a[:, i] * state + b[:, i] for i in range(n)], 1)
            got = run(compiled, (a, b))
            torch.testing.assert_close(got[1], want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[0], a.cumprod(1), rtol=1e-5, atol=1e-5)
            assert torch.equal(got[2], b.flip(1).cummax(1)[0].flip(1))


def test_what_torch_compiles_is_part_of_the_graph() -> None:
    """torch.compile(f), a decorated function or a module, is f inside of a program that we compile."""
    activation = torch.compile(lambda x: torch.nn.functional.silu(x) * 2, backend="eager")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.head = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.head(activation(self.linear(x)))

    module, x = Model(), seeded(2, 4)
    with torch.inference_mode():
        got = run(torchsmith.compile(module), (x,))
        hidden = module.linear(x)
        want = module.head._orig_mod(torch.nn.functional.silu(hidden) * 2)
    torch.testing.assert_close(got, want)


class Layer:
    """A sliding window of keys that counts what it has seen."""

    def __init__(self) -> None:
        self.seen, self.keys = 0, torch.zeros(1, 0, 4)

    def update(self, keys: Tensor) -> Tensor:
        self.seen += keys.shape[1]
        self.keys = torch.cat([self.keys, keys], 1)[:, -7:]
        return self.keys


def positions(x: Tensor, n: int) -> tuple[Any, ...]:
    return x[:, n:] * n + n / 2, torch.arange(n) + x.shape[0], n * 2


def written_at(x: Tensor, at: int) -> Tensor:
    cache = torch.zeros(2, 40)
    cache[:, at : at + x.shape[1]] = x
    return cache[:, : at + 2].cumsum(1)


def windowed(x: Tensor, layer: Layer) -> tuple[Any, ...]:
    keys, past = layer.update(x), max(layer.seen - 7, 0)
    return keys.sum(1) * past + torch.arange(past, layer.seen).sum(), layer.seen >= 7


@pytest.mark.parametrize("fn", [positions, written_at, windowed])
def test_an_integer_that_varies(fn: Callable[..., Any]) -> None:
    """0 and 1 are programs of their own, and so is a window that fills; all others share one."""
    compiled = torchsmith.compile(fn)
    mine, eager = Layer(), Layer()
    graphs = 0
    with torch.inference_mode():
        for n in (0, 1, 2, 5, 9, 7, 3, 12, 11, 20, 4):
            x = seeded(1, 1, 4) + n if fn is windowed else seeded(2, 30)[:, : 30 if fn is positions else 5]
            with recording() as got:
                result = compiled(x, mine if fn is windowed else n)
            want = fn(x, eager if fn is windowed else n)
            e = explanation(got)
            assert not e.breaks and all(g.road == "native" for g in e.graphs), str(e)
            graphs += len(e.graphs)
            torch.testing.assert_close(result, want)
            assert [type(v) for v in result] == [type(v) for v in want]
    assert graphs <= 5 and mine.seen == eager.seen and type(mine.seen) is int


def test_an_integer_that_the_program_asks_for() -> None:
    """Loops and steps need a number: one program each, as before."""

    def fn(x: Tensor, n: int) -> Tensor:
        for i in range(n):
            x = torch.nn.functional.max_pool1d(x, n, stride=1) + i
        return x

    compiled = torchsmith.compile(fn)
    x = seeded(1, 2, 40)
    with torch.inference_mode():
        for n in (2, 3, 4, 5, 3):
            torch.testing.assert_close(run(compiled, (x, n)), fn(x, n))


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        for _ in range(times):
            x = self.linear(x).sin()
        return x


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_forward_behind_a_decorator(mode: Any) -> None:
    """Its signature is (*args, **kwargs), self among them; under no_grad no gradients are needed, whoever calls."""
    module = Decorated()
    compiled = torchsmith.compile(module, fullgraph=True)
    x = seeded(2, 4)
    with mode():
        torch.testing.assert_close(run(compiled, (x,)), module(x))
        torch.testing.assert_close(run(compiled, (x, 3)), module(x, 3))
        with recording() as got:
            torchsmith.compile(module)(x, times=1)
        assert explanation(got).graph_count == 1
        assert not compiled(x).requires_grad


def test_gradients_beside_a_region_without() -> None:
    """Only where all of it is under no_grad are gradients not needed."""
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = linear(x).abs().amax()
        return linear(x) / scale

    x = seeded(2, 4)
    torchsmith.compile(fn)(x).sum().backward()
    got, linear.weight.grad = linear.weight.grad, None
    fn(x).sum().backward()
    torch.testing.assert_close(got, linear.weight.grad)
