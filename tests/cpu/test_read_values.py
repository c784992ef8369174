"""Values of tensors as numbers of the graph: item(), tensors as indices; where more than the program checks must be known, a break."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import torchsmith
from torchsmith.events import recording

V = torch.arange(5.0)


def checked(v, n):
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= v.shape[0])
    return v[:k] * 2


# program, values of n, graphs that hold everything by default
ROWS = [
    (lambda v, n: (v * n.item() // 2 + n.item() // 2, n.item() * 3 + 1, -n.item(), abs(n.item()), min(n.item(), 4)), (3, -7), True),
    (lambda v, n: (v * 2, type(n.item()), n.item() == 3, int(n.item()), float(n.item()), n.item() / 3), (3.0, -7.5), True),
    (lambda v, n: (v * 2, min(n.item(), 2.5), max(n.item(), 2.5)), (3, 1), False),
    (lambda v, n: (v[: n.item()] * 2, v[-n.item() :] + 1), (3, 0, -2, 9), True),
    (lambda v, n: torch.full((3,), n.item()) * 2, (3, -4), True),
    (checked, (3, 0, 6), True),
    (lambda v, n: v[n] + v[n.item()], (3, -2, 9), True),
    (lambda v, n: v[:n] * 2, (3, -2, 9), True),
    (lambda v, n: torch.zeros(n.item()) + 1, (3, 0, -1), True),
    (lambda v, n: (v.mul_(2), v.__setitem__(n, 5.0), v + 1)[2], (3, -2, 9), True),
    (lambda v, n: v * 2 if n.item() > 2 else v + 1, (3, 1), False),
    (lambda v, n: (f"{n.item()}", v * 2, {n.item(): 1}), (3, 1), False),
]


def outcome(fn, n):
    v = V.clone()
    try:
        return fn(v, torch.tensor(n)), v
    except (RuntimeError, IndexError) as e:
        return type(e), v


@pytest.mark.parametrize("k", range(len(ROWS)))
def test_numbers_read_from_tensors(k):
    fn, values, whole = ROWS[k]
    told = torchsmith.explain(torchsmith.compile(fn))(V.clone(), torch.tensor(values[0]))
    assert (told.graph_break_count == 0) == whole, told
    compiled = torchsmith.compile(fn)
    for n in values:
        want, got = outcome(fn, n), outcome(compiled, n)
        assert str(want) == str(got)


@pytest.mark.parametrize("k", [0, 3, 6, 7, 8, 9])
def test_under_fullgraph_they_never_break(k):
    """What rules take for granted is checked when the graph runs; a negative index into memory is one."""
    fn, values, _ = ROWS[k]
    compiled = torchsmith.compile(fn, fullgraph=True)
    for n in values:
        want, got = outcome(fn, n), outcome(compiled, n)
        assert str(want[0]) == str(got[0]) or (isinstance(want[0], type) and isinstance(got[0], type))


def test_sizes_that_are_never_asked_about():
    """mark_unbacked: one compilation for all sizes, 0 and 1 too; a question is an error, and torch._check an answer."""

    def joined(x, y):
        return torch.cat([x * 2 + y, x]).sum(0) + x.shape[0]

    compiled = torchsmith.compile(joined, fullgraph=True)
    for n in (5, 1, 0, 3):
        x, y = torch.randn(n, 4), torch.randn(4)
        torchsmith.mark_unbacked(x, 0)
        torch.testing.assert_close(compiled(x, y), joined(x, y))
    assert len(compiled.entries) == 1

    def asks(x):
        return x * 2 if x.shape[0] > 3 else x + 1

    def states(x):
        torch._check(x.shape[0] > 3)
        return asks(x)

    with pytest.raises(torchsmith.ConstraintViolation, match=r"torch\._check"):
        x = torch.randn(5, 4)
        torchsmith.mark_unbacked(x, 0)
        torchsmith.compile(asks)(x)
    stated = torchsmith.compile(states)
    assert torch.equal(stated(x), states(x))
    with pytest.raises(RuntimeError, match="Expected cond"):
        stated(torch.randn(2, 4))


def test_numbers_of_tensors_as_keys() -> None:
    """Such a number has no hash while it is a symbol: that is a break, and no exception that a block of the program may swallow."""

    def fn(x: Tensor) -> tuple[Any, ...]:
        n, z = x.argmax().item(), -1
        with contextlib.suppress(TypeError):
            d, s = {n: 1, (n, "z"): 2}, {(n, n), n}
            z = d[n, "z"] + d[n] + len(s)
        return z, x + 1

    compiled = torchsmith.compile(fn, backend="eager")
    for k in range(3):
        x = torch.nn.functional.one_hot(torch.tensor(k), 4).float()
        assert compiled(x)[0] == fn(x)[0] == 5


@pytest.mark.parametrize(
    "fn",
    [
        lambda v, n: v[n[0]].sin() * v[:, n[1]].sum(),
        lambda v, n: v[v.sum(1).argmax()].sin(),
        lambda v, n: torch.stack([v[k] for k in v.mean(1).topk(2)[1]], -1).softmax(-1),
        lambda v, n: v[: n[0]].sin() * n[1].item(),
    ],
)  # fmt: skip
def test_gradients_at_places_that_tensors_tell(fn):
    """One graph for the values of all calls, as for indices that are tensors; the backward graph reads the number again."""
    compiled = torchsmith.compile(fn)
    with recording() as got:
        for sizes in (3, 4, 6):
            v = torch.randn(sizes, 4, requires_grad=True)
            n = torch.randperm(3)
            out, want = compiled(v, n), fn(v, n)
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), v)[0] for o in (out, want)))
    assert sum(e.kind == "graph" for e in got) == 2
    assert not [e for e in got if e.kind in ("graph_break", "fallback")]


class Counting(torch.nn.Module):
    """Chooses by what its buffers hold, and counts in them: activation norms set by the first batch, phases, temperatures."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("initialised", torch.tensor(0, dtype=torch.uint8))
        self.register_buffer("calls", torch.tensor([0]))
        self.register_buffer("heat", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.initialised.item() == 0:
            with torch.no_grad():
                self.weight.copy_(x.std(0))
                self.initialised.fill_(1)
        calls = int(self.calls)
        if calls >= 3:
            x = x * 2
        self.calls += 1
        if float(self.heat) > 0.5:
            x = x / self.heat
        self.heat *= 0.8
        return x * self.weight + calls


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_program_chooses_by_numbers_in_its_buffers(fullgraph):
    eager, ours = Counting(), Counting()
    compiled = torchsmith.compile(ours, fullgraph=fullgraph)
    with recording() as got:
        for seed in range(7):
            torch.manual_seed(seed)
            x = torch.randn(5, 3)
            want, found = eager(x), compiled(x)
            want.sum().backward()
            found.sum().backward()
            torch.testing.assert_close(found, want)
            torch.testing.assert_close([ours.weight.grad, *ours.buffers()], [eager.weight.grad, *eager.buffers()])
    assert not [e.fields for e in got if e.kind in ("graph_break", "fallback")]
    assert sum(e.kind == "graph" for e in got) == 5  # two for the first batch, one for counters as symbols, two beyond the numbers


def test_all_numbers_of_a_tensor_of_some_length():
    def f(v):
        numbers = v.tolist()
        return torch.tensor(sum(numbers)), v * numbers[3]

    compiled = torchsmith.compile(f, fullgraph=True, backend="eager")
    for v in (torch.arange(150), torch.arange(150) * 3):
        assert all(map(torch.equal, compiled(v), f(v)))
