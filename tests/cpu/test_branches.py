"""torch.cond, map, scan and while_loop just in time."""

from __future__ import annotations

import pytest
import torch
from capturing import same
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as each
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import torchsmith
from torchsmith.codes import Unsupported
from torchsmith.events import recording

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


def test_a_branch_may_write_to_what_it_makes():
    kept = torch.zeros(4), torch.ones(4)

    def one(a):
        y = torch.zeros(3, 4)
        y[1:] = a[1:]
        y[:2].add_(2)
        return torch.add(y, a, out=torch.empty(3, 4))

    for x in (X.detach(), -X.detach() - 9):
        got = torchsmith.compile(lambda x: torch.cond(x.sum() > 0, one, lambda a: a.clone().mul_(3), (x,)), fullgraph=True)(x)
        assert torch.allclose(got, one(x) if x.sum() > 0 else x * 3)
    for fn in (
        lambda a: a.add_(1) * 1,
        lambda a: a.view(-1).mul_(2).view(3, 4) * 1,
        lambda a: a * kept[0].zero_(),
        lambda a: torch.nn.functional.batch_norm(a, *kept, training=True),
    ):
        with pytest.raises(torchsmith.Unsupported, match="CAP033"):
            torchsmith.compile(lambda x, fn=fn: torch.cond(x.sum() > 0, fn, torch.cos, (x,)), fullgraph=True)(-X.detach() - 9)
    assert kept[1].tolist() == [1.0] * 4


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


def test_scans_of_dictionaries_and_of_functions_that_are_not_elementwise():
    """Values and strides are those of torch's own functions; a scan over no tensors gives back what it began with."""
    weight = torch.tensor([[1.0, 2.0], [0.5, -1.0]])

    def rows(a, b):
        return {"x": a["x"] @ weight @ weight.t() + b["x"], "y": [a["y"][0] * b["y"][0]]}

    def running(c, a):
        return {"sum": c["sum"] + a["x"]}, (c["sum"] * a["y"][0], a["x"].sum())

    def f(x, dim, reverse):
        tree = {"x": x, "y": [x + 1]}
        both = associative_scan(rows, tree, dim, reverse=reverse, combine_mode="generic")
        powers = associative_scan(lambda a, b: (a + torch.vmap(torch.square)(b)).expand(a.shape), x, dim, reverse, combine_mode="generic")
        return both, powers, scan(running, {"sum": x.select(dim, 0) * 0}, tree, dim=dim, reverse=reverse), scan(running, x, [])

    def combined(fn, x, dim, reverse):
        """torch's order: pairs of neighbours first."""
        parts = list(x.unbind(dim))[:: -1 if reverse else 1]
        a, b, c = parts
        out = [a, fn(a, b), fn(fn(a, b), c)]
        return torch.stack(out[:: -1 if reverse else 1]).movedim(0, dim)

    compiled = torchsmith.compile(f, fullgraph=True, backend="eager")
    for dim, reverse in ((0, False), (1, True)):
        x = torch.arange(12.0).reshape(3, 2, 2).movedim(0, dim).contiguous() / 7
        (both, powers, (carry, made), nothing) = compiled(x, dim, reverse)
        want = combined(lambda a, b: a @ weight @ weight.t() + b, x, dim, reverse)
        assert torch.equal(both["x"], want) and both["x"].stride() == want.stride()
        assert torch.equal(both["y"][0], combined(torch.mul, x + 1, dim, reverse))
        assert torch.equal(powers, combined(lambda a, b: a + b.square(), x, dim, reverse))
        torch.testing.assert_close(carry["sum"], x.sum(dim))
        steps = torch.stack([torch.zeros(2, 2), *x.unbind(dim)][:3] if not reverse else [x[:, 1] + x[:, 2], x[:, 2], torch.zeros(2, 2)])
        before = steps.cumsum(0) if not reverse else steps
        want = (before * (x + 1).movedim(dim, 0)).movedim(0, dim)
        torch.testing.assert_close(made[0], want)
        assert made[0].stride() == want.contiguous().movedim(dim, 0).contiguous().movedim(0, dim).stride()
        assert nothing[0] is x and nothing[1] == []
        torch.testing.assert_close(made[1], x.sum([d for d in range(3) if d != dim]))


# ---------------------------------------------------------------- where values are finite


def clamped(x, log):
    y = x * 2
    log.append("doubled")
    before = y
    if not torch.isfinite(y).all():
        bound = torch.finfo(y.dtype).max - 1000
        y = torch.clamp(y, min=-bound, max=bound)
        log.append("clamped")
    y = torch.nn.functional.dropout(y, 0.5)
    if y.dtype == torch.float32 and (torch.isinf(y).any() or torch.isnan(y).any()):
        y = torch.nan_to_num(y)
    return y.sqrt(), before


def shared(x, log):
    y = x * 1
    before = y
    if torch.isnan(y).any():
        y = y.nan_to_num()
    y.add_(1)
    return y, before, y is before


def behind_a_break(x, log):
    y = x + 1
    print(end="")
    y.sum().item()
    log.append("asked")
    return clamped(y, log)


@pytest.mark.parametrize("fn", [clamped, shared, behind_a_break], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_values_are_expected_to_be_finite(fn, backend):
    """One graph checks it; where they are not the function runs as it is, and where that happens again and again it is a break."""
    compiled = torchsmith.compile(fn, backend=backend)
    for k in (0, 1, 0, 1, 1, 1, 0):
        found = []
        for graph in (fn, compiled):
            torch.manual_seed(k)
            log, x = [], torch.tensor([1.0, float("nan") if k else 4.0, 9.0], requires_grad=True)
            y, before, *more = graph(x, log)
            y.nan_to_num().sum().backward()
            found.append(((y.detach(), before.detach(), x.grad, torch.rand(1)), (more, log)))
        (values, others), (want, others_want) = found
        torch.testing.assert_close(values, want, equal_nan=True)
        assert others == others_want


def test_a_check_of_finite_values_is_no_break():
    torchsmith.compiler.reset()  # what other tests have met at that line
    compiled = torchsmith.compile(lambda x: clamped(x, []), backend="eager", fullgraph=True)
    with recording() as got:
        for _ in range(3):
            compiled(X + 3)
    assert sum(e.kind == "graph" for e in got) == 1
    with pytest.raises(Unsupported, match="CAP020"):
        torchsmith.export.export(Clamped(), (X,))


class Clamped(torch.nn.Module):
    def forward(self, x):
        if not torch.isfinite(x).all():
            x = torch.clamp(x, -1, 1)
        return x * 2
