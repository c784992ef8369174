"""torch.cond, map, scan and while_loop just in time."""

from __future__ import annotations

import torch
from capturing import same
from torch._higher_order_ops.map import map as each
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import torchsmith

X = torch.arange(12.0).reshape(3, 4) - 2


def outcome(fn, x):
    x = x.clone().requires_grad_()
    out = fn(x)
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if t.requires_grad]
    grads = torch.autograd.grad([t.sum() for t in leaves], x) if leaves else ()
    return torch.utils._pytree.tree_map(torch.Tensor.detach, out), grads


def loops(x):
    by_count = while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (torch.tensor(0), x.detach()))
    return by_count, each(lambda a, b: a * b, x, torch.ones(4)), scan(lambda c, a: (c + a, c * a), torch.zeros(4), x)


def unrolled(x):
    by_count = torch.tensor(3), x.detach() * 8
    carry, rows = torch.zeros(4), []
    for a in x:
        carry, row = carry + a, carry * a
        rows.append(row)
    return by_count, x * torch.ones(4), (carry, torch.stack(rows))


def branches(x):
    """The derivative of the branch that is not taken is NaN."""
    return torch.cond(x.sum() > 0, lambda a: (a.sin(), a + 1), lambda a: ((-a).sqrt(), a * 2), (x,))


def plain(x):
    return (x.sin(), x + 1) if x.sum() > 0 else ((-x).sqrt(), x * 2)


def test_loops_and_branches_are_part_of_the_graph():
    compiled = torchsmith.compile(lambda x: (loops(x), branches(x)), fullgraph=True, backend=lambda gm, inputs: gm.forward)
    for x in (X, -X - 9):
        same(outcome(compiled, x), outcome(lambda x: (unrolled(x), plain(x)), x))
    native = torchsmith.compile(branches, fullgraph=True)
    for x in (X, -X - 9):
        same(native(x), plain(x))


def test_a_branch_that_may_do_harm_breaks():
    told = []
    for fn in (
        lambda a: a[torch.tensor([7, 0])],
        lambda a: a + torch.rand(4),
        lambda a: a.sum().item() + a,
    ):
        try:
            torchsmith.compile(lambda x, fn=fn: torch.cond(x.sum() > 0, fn, torch.cos, (x,)), fullgraph=True)(X)
        except torchsmith.Unsupported as why:
            told.append(why.code)
    assert told == ["CAP034"] * 3


def test_branches_read_weights_around_them():
    first, second = torch.nn.Linear(4, 4), torch.full((4,), -1.0, requires_grad=True)

    def one(a):
        return first(a)

    def other(a):  # its derivative is NaN where it is taken, and only there
        return second.sqrt() * a + first.bias

    def gradients(fn, x):
        weights = [*first.parameters(), second]
        for w in weights:
            w.grad = torch.zeros_like(w)
        y = fn(x)
        y.sum().backward()
        return y, [w.grad for w in weights]

    for backend in ("eager", "inductor"):
        compiled = torchsmith.compile(lambda x: torch.cond(x.sum() > 0, one, other, (x,)), fullgraph=True, backend=backend)
        for x in (X.detach(), -X.detach() - 9):
            got, want = gradients(compiled, x), gradients(lambda x: one(x) if x.sum() > 0 else other(x), x)
            assert torch.allclose(got[0], want[0], equal_nan=True)
            assert all(torch.allclose(a, b, equal_nan=True) for a, b in zip(got[1], want[1], strict=True))


def test_operators_of_graphs():
    """As the modules of exported programs call them."""

    def f(x):
        (y,) = torch.ops.higher_order.cond(x.sum() > 0, lambda a: (a.sin(),), lambda a: (a.cos(),), (x,))
        (z,) = torch.ops.higher_order.map_impl(lambda a, b: (a * b,), (x,), (y,))
        return y, z

    for x in (X.detach(), -X.detach() - 9):
        y, z = torchsmith.compile(f, fullgraph=True, backend="eager")(x)
        want = x.sin() if x.sum() > 0 else x.cos()
        assert torch.equal(y, want) and torch.equal(z, torch.stack([a * want for a in x]))
