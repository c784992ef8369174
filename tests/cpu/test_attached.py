"""Compiled forward and backward under eager's autograd: gradients, views, hooks and errors are eager's."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchsmith
from torchsmith import pipeline
from torchsmith.events import recording


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    one = make()
    return one, copy.deepcopy(one)


def same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"gradient of {n}: {m}")
            assert p.grad.stride() == q.grad.stride(), name
    for (name, p), (_, q) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, n=name: f"buffer {n}: {m}")


def compiled_natively(fn: Any) -> Any:
    """The compiled function; `check()` says that every graph so far is native."""
    call = torchsmith.compile(fn, fullgraph=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        with recording() as got:
            out = call(*args, **kwargs)
        assert all(e.fields["report"].road == "native" for e in got if e.kind == "graph"), [e.fields for e in got if e.kind == "graph"]
        return out

    return run


def test_a_model_with_buffers_and_random_numbers() -> None:
    """Running statistics, dropout's draws and accumulated gradients over several steps."""
    model, twin = both(Net)
    run = compiled_natively(model)
    for step in range(3):
        x = torch.randn(4, 3, 8, 8)
        for call in (run, twin):
            torch.manual_seed(step)
            F.cross_entropy(call(x), torch.tensor([0, 1, 2, 3])).backward()
        same(model, twin)
    assert int(model.norm.num_batches_tracked) == 3


def test_gradients_of_inputs_and_grad_mode() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        return torch.tanh(x @ w) / scale + x.detach().sum()

    run = compiled_natively(fn)
    for requires in ((True, False), (False, True), (True, True)):
        x, w = (torch.randn(4, 4, requires_grad=r) for r in requires)
        leaves = [t for t in (x, w) if t.requires_grad]
        got, want = run(x, w), fn(x, w)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
            torch.testing.assert_close(a, b)
    inner, w = torch.randn(4, 4, requires_grad=True), w.detach()
    slopes = [torch.autograd.grad(call(inner * 2, w).sum(), inner)[0] for call in (run, fn)]
    torch.testing.assert_close(*slopes)


def test_several_results() -> None:
    """With and without gradients, unused ones, and an order of backward passes that reaches only some leaves."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.exp(), (x * y).log(), y.argmax(), y.detach() * 2, x

    run = compiled_natively(fn)
    x, y = torch.tensor([0.0, 1.0], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    for used in ((0,), (1,), (0, 1)):
        got, want = run(x, y), fn(x, y)
        assert [t.requires_grad for t in got] == [t.requires_grad for t in want] and got[4] is x
        found = [torch.autograd.grad([r[k].sum() for k in used], (x, y), allow_unused=True) for r in (got, want)]
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, equal_nan=True)


def test_results_that_are_views() -> None:
    """Of inputs and of each other; writing to one is seen by the others, and autograd knows it."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 3
        return x.t()[1:], y, y.view(-1)[2:]

    run = compiled_natively(fn)
    grads = []
    for call in (run, fn):
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        a, b, c = call(x)
        assert a._is_view() and c.data_ptr() == b.data_ptr() + 8
        (a.sum() * 2 + (b * b).sum() + c.prod()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def _parts_of_complex(x: Tensor) -> tuple[Tensor, ...]:
    z = torch.complex(x, x * 2)
    return z, torch.view_as_real(z).flatten(-2), z.imag, z.real[1], z.t().angle()


def _complex_of_pairs(x: Tensor) -> tuple[Tensor, ...]:
    z = torch.stack([x, x * 3], -1)
    return z, torch.view_as_complex(z), z.view(torch.int32)


@pytest.mark.parametrize("fn", [_parts_of_complex, _complex_of_pairs])
def test_results_that_are_views_of_another_dtype(fn: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    gradients = []
    for call in (torchsmith.compile(fn), fn):
        x = torch.arange(1.0, 7).view(2, 3).requires_grad_()
        outs = call(x)
        apart = [torch.view_as_real(t) if t.is_complex() else t for t in outs if t.requires_grad]
        sum(t.sin().sum() for t in apart).backward()  # type: ignore[union-attr]
        gradients.append((x.grad, [(t.dtype, t.stride(), t.storage_offset(), t.requires_grad) for t in outs]))
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    assert gradients[0][1] == gradients[1][1]


def test_results_that_are_views_only() -> None:
    run = compiled_natively(lambda x: (x.t(), x[1:].expand(4, 1, 3)))
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    a, b = run(x)
    (a.sum() + b.sum()).backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1.0] * 3, [5.0] * 3]))


def test_retain_graph_and_the_second_time() -> None:
    run = compiled_natively(lambda x, w: (x @ w).sigmoid())
    x, w = torch.randn(2, 3), torch.randn(3, 2, requires_grad=True)
    out = run(x, w).sum()
    out.backward(retain_graph=True)
    first = w.grad.clone()
    out.backward()
    torch.testing.assert_close(w.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def test_writing_to_what_backward_needs() -> None:
    run = compiled_natively(lambda x, w: (x @ w).sigmoid())
    w = torch.randn(3, 2, requires_grad=True)
    out = run(torch.randn(2, 3, requires_grad=True), w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = run(torch.randn(2, 3, requires_grad=True), w)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_run_as_in_eager() -> None:
    said: list[list[str]] = []
    for compiled in (True, False):
        model, _ = both(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        seen: list[str] = []
        model[0].weight.register_hook(lambda g, s=seen: s.append(f"hook {g.shape}"))
        model[2].bias.register_post_accumulate_grad_hook(lambda p, s=seen: s.append(f"accumulated {p.grad.shape}"))
        call = torchsmith.compile(model) if compiled else model
        out = call(torch.ones(2, 3))
        out.register_hook(lambda g, s=seen: s.append(f"result {g.shape}"))
        out.sum().backward()
        said.append(sorted(seen))
    assert said[0] == said[1] and len(said[0]) == 3


def test_frozen_parts_and_shared_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.frozen(self.first(x))))

    model, twin = both(Tied)
    run = compiled_natively(model)
    x = torch.randn(5, 4)
    run(x).square().sum().backward()
    twin(x).square().sum().backward()
    same(model, twin)


def test_derivatives_of_derivatives() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x * 2).sum()

    x = torch.randn(5, requires_grad=True)
    found = []
    for call in (torchsmith.compile(fn), fn):
        (slope,) = torch.autograd.grad(call(x), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*found)


class Remembers(nn.Module):
    """Its result follows from the old value of a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("past", torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        out = h @ self.past.clone().t()
        with torch.no_grad():
            self.past.mul_(0.9).add_(h[:4], alpha=0.1)
        return out.logsumexp(1, keepdim=True)


class Renormed(nn.Module):
    """Its embedding writes to the weights whose gradient is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a = nn.Embedding(8, 6, max_norm=0.5), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(x + self.e(torch.arange(len(x)))))


WRITERS: dict[str, Callable[[], nn.Module]] = {
    "running statistics": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)),
    "average of all": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 2)),
    "power iteration": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 2)),
    "memory": Remembers,
    "weights": Renormed,
}


@pytest.mark.parametrize("name", WRITERS)
def test_derivatives_of_derivatives_of_what_writes(name: str) -> None:
    """A gradient penalty around a compiled module that writes to its buffers: they are written once, and read as they were."""
    model, twin = both(WRITERS[name])
    for net, m in ((torchsmith.compile(model), model), (twin, twin)):
        torch.manual_seed(1)
        for _ in range(2):
            m.zero_grad()
            x = torch.randn(8, 6, requires_grad=True)
            out, more = net(x), net(x * 2)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (slope.square().sum() + more.square().sum()).backward()
    same(model, twin)


class Forces(nn.Module):
    """Energy, forces and virial of a set of atoms: the gradient is taken inside, and trained through outside."""

    def __init__(self, says_so: bool = False) -> None:
        super().__init__()
        self.kind, self.filter, self.says_so = nn.Embedding(4, 8), nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)), says_so
        self.out = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))
        self.register_buffer("centre", torch.linspace(0, 4, 8))

    def forward(self, kind: Tensor, at: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.says_so:
            at.requires_grad_()
        strain = torch.zeros(3, 3, requires_grad=True)
        moved = at + at @ (strain + strain.T) / 2
        d = (moved[j] - moved[i]).norm(dim=-1)
        near = torch.exp(-((d[:, None] - self.centre) ** 2)) * (0.5 * (torch.cos(d * 0.6) + 1) * (d < 5))[:, None]
        x = self.kind(kind)
        x = x + torch.zeros_like(x).index_add(0, i, x[j] * self.filter(near))
        energy = self.out(x).sum()
        force, virial = torch.autograd.grad(energy, [at, strain], create_graph=self.training)
        return energy, -force, -virial


def atoms(seed: int, count: int = 6) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    i, j = torch.triu_indices(count, count, 1)
    return torch.randint(0, 4, (count,)), torch.randn(count, 3) * 2, torch.cat([i, j]), torch.cat([j, i])


@pytest.mark.parametrize("says_so", [False, True])
def test_training_on_forces(says_so: bool) -> None:
    """autograd.grad(create_graph=True) inside, whose results carry gradients: forward and both derivatives are compiled, for any number of
    atoms, whether the caller or the function says that positions require grad."""
    model, twin = both(lambda: Forces(says_so))
    run = torchsmith.compile(model, fullgraph=True)
    with recording() as got:
        for count in (6, 7, 8):
            rows = []
            for net, m in ((run, model), (twin, twin)):
                args = atoms(count, count)
                args[1].requires_grad_(not says_so)
                m.zero_grad()
                out = net(*args)
                sum(t.square().sum() for t in out).backward()
                rows.append((*out, args[1].grad, args[1].requires_grad))
            torch.testing.assert_close(*rows)
            same(model, twin)
    roads = [e.fields["report"].road for e in got if e.kind == "graph"]
    assert len(roads) <= 2 and set(roads) == {"native"} and not any(e.kind == "fallback" for e in got)
    model.eval(), twin.eval()
    (args := atoms(1))[1].requires_grad_()
    torch.testing.assert_close(run(*args), twin(*args))


def residual(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    u = torch.tanh(x[:, None] * w) @ v
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (first + 0.1 * second - u).square().mean()


def adapted(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    for _ in range(2):
        a, b = torch.autograd.grad((torch.sin(x[:, None] * w) @ v).square().mean(), [w, v], create_graph=True)
        w, v = w - 0.1 * a, v - 0.1 * b
    return (torch.sin(x[:, None] * w) @ v).square().mean()


def used_up(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of two results the graph of the first is spent."""
    u = (torch.tanh(x[:, None] * w) @ v).sum()
    (g,) = torch.autograd.grad(u, x)
    return u, g, (g[:, None] * w).sum()


def kept(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    u = (torch.tanh(x[:, None] * w) @ v).sum()
    u.backward(retain_graph=True)
    return u * 2


def with_a_hook(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = x[:, None] * w
    h.register_hook(lambda g: g * 2)
    return torch.autograd.grad((torch.tanh(h) @ v).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("fn", [residual, adapted, used_up, kept, with_a_hook], ids=lambda f: f.__name__)
def test_gradients_inside_and_outside(fn: Any) -> None:
    found = []
    for call in (fn, compiled_natively(fn)):
        torch.manual_seed(2)
        args = [torch.randn(*n, requires_grad=True) for n in ((5,), (4,), (4,))]
        out = call(*args)
        out = out if isinstance(out, tuple) else (out,)
        out[-1].sum().backward(retain_graph=True)
        rows = [*out, *[t.requires_grad for t in out], *[None if t.grad is None else t.grad.clone() for t in args]]
        if fn is used_up:
            with pytest.raises(RuntimeError, match="second time"):
                out[0].backward()
        else:  # once more, as what can be differentiated
            (again,) = torch.autograd.grad(out[-1].square().sum(), args[1], create_graph=True)
            rows.append(torch.autograd.grad(again.sum(), args[2])[0])
        found.append(rows)
    torch.testing.assert_close(*found)


def test_an_input_told_to_require_grad() -> None:
    """Told before anything reads it, it is part of the graph; afterwards, or told the contrary, it is a break. A call that fails tells it
    as eager does."""
    def first(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x.requires_grad_()
        return (x @ w).sin().sum(), x[0], x.t()

    def after(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x * w.sum()
        x.requires_grad_()
        return ((x @ w + y).sin().sum(),)

    def back(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x.requires_grad_()
        y = (x @ w).sum()
        x.requires_grad_(False)
        return (y,)

    def fails(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.linalg.cholesky(w)
        x.requires_grad_()
        return ((x @ y).sum(),)

    w = torch.randn(4, 4, requires_grad=True)
    for fn, breaks in ((first, []), (after, ["CAP026"]), (back, ["CAP026", "CAP026"]), (fails, [])):
        found = []
        with recording() as got:
            for call in (fn, torchsmith.compile(fn)):
                w.grad, x = None, torch.ones(4, 4)
                rows: list[Any] = []
                try:
                    out = call(x, w)
                    sum(t.sum() for t in out).backward()
                    rows = [*out, w.grad]
                except RuntimeError as error:
                    rows = [type(error)]
                found.append([*rows, x.grad, x.requires_grad])
        assert [e.fields["code"] for e in got if e.kind == "graph_break"] == breaks, fn.__name__
        torch.testing.assert_close(*found, msg=lambda m, n=fn.__name__: f"{n}: {m}") if fn is not fails else None
        assert fn is not fails or found[0] == found[1]


def test_a_repeated_graph_is_not_captured_again() -> None:
    """The derivative of a derivative reaches back over a break: the first graph is repeated, once for each pass, in a function that the
    frame hook watches."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x * w.sum()
        torchsmith.compiler.graph_break()
        e = (x @ w * y * 0.1).tanh().sum()
        (g,) = torch.autograd.grad(e, w, create_graph=True)
        return e, g

    found = []
    with recording() as got:
        for call in (fn, torchsmith.compile(fn)):
            torch.manual_seed(0)
            x, w = torch.rand(5, 4), torch.rand(4, 4, requires_grad=True)
            e, g = call(x, w)
            (e + g.sum()).backward()
            found.append((e, g, w.grad))
    torch.testing.assert_close(*found)
    assert sum(e.kind == "graph" for e in got) <= 2 and sum(e.fields.get("code") == "AUT006" for e in got) <= 2


def test_derivatives_of_derivatives_where_one_input_is_made_of_another() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * y)

    found = []
    for call in (fn, torchsmith.compile(fn)):
        x = torch.arange(4.0, requires_grad=True)
        (g,) = torch.autograd.grad(call(x, x * 2).sum(), x, create_graph=True)
        found.append((g, torch.autograd.grad(g.square().sum(), x)[0]))
    torch.testing.assert_close(*found)


def test_a_repetition_of_other_inputs_is_refused() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x @ w + b)

    x, w, b = torch.randn(2, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    out = torchsmith.compile(fn)(x, w, b)
    with torch.no_grad():
        b.add_(1)
    with pytest.raises(RuntimeError, match="changed since"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_saved_tensor_hooks_see_what_is_kept() -> None:
    run = compiled_natively(lambda x, w: (x @ w).sigmoid().log())
    w = torch.randn(3, 2, requires_grad=True)
    x, packed = torch.randn(2, 3), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run(x, w)
    out.sum().backward()
    assert packed
    torch.testing.assert_close(w.grad, torch.autograd.grad((x @ w).sigmoid().log().sum(), w)[0])


def test_shapes_that_vary() -> None:
    model, twin = both(lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)))
    call = torchsmith.compile(model, dynamic=True)
    for n in (3, 5, 9):
        x = torch.randn(n, 4)
        F.cross_entropy(call(x), torch.arange(n) % 3).backward()
        F.cross_entropy(twin(x), torch.arange(n) % 3).backward()
        same(model, twin)


def test_many_backward_passes_use_no_more_memory() -> None:
    """Nothing keeps a finished pass alive: no cycle through what is kept for it."""
    import weakref

    run = compiled_natively(lambda x, w: (x @ w).exp().log1p())
    w = torch.randn(3, 2, requires_grad=True)
    gc.disable()
    try:
        x = torch.randn(2, 3)
        out = run(x, w)
        gone = weakref.ref(out)
        out.sum().backward()
        del out
        assert gone() is None
        out = run(x, w)  # a pass that never goes backwards
        gone = weakref.ref(out)
        del out
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    """The casts of autocast are differentiated: gradients have the weights' dtype, and a weight used twice is cast once."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.one, self.two = nn.Conv2d(2, 4, 3), nn.Linear(4, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
                h = torch.relu(self.one(self.conv(x).mean((2, 3))))
                h = self.two(self.two(h)) + torch.bmm(h.unsqueeze(0), self.two.weight.unsqueeze(0))[0]
                return F.mse_loss(h, torch.ones_like(h))

    model, twin = both(Mixed)
    call, x = torchsmith.compile(model), torch.randn(3, 2, 6, 6)
    found = []
    with recording() as got:
        for run in (call, twin):
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                loss = run(x)
            loss.backward()
            found.append(loss)
    assert [e.fields["report"].road for e in got if e.kind == "graph"] == ["native"], [e.fields for e in got if e.kind == "fallback"]
    assert found[0].dtype == found[1].dtype
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    for (name, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and p.grad.dtype == q.grad.dtype, name
        assert (p.grad - q.grad).norm() <= 4e-2 * q.grad.norm() + 1e-5, name


def test_what_is_cut_off_stays_so() -> None:
    """detach() and .data are views without a gradient, alone, beside other results, of parameters, and carried to the next call."""
    layer = nn.Linear(2, 2)

    def gradient(cut: Any) -> Tensor:
        layer.zero_grad()
        h = layer(torch.ones(1, 2))
        t = cut(h)
        assert not (t[0] if isinstance(t, tuple) else t).requires_grad
        (h * (t[0] if isinstance(t, tuple) else t)).sum().backward()
        return layer.weight.grad.clone()

    for cut in (lambda h: h.detach(), lambda h: h.data, lambda h: h.detach().view(-1), lambda h: (h.detach(), h * 2),
                lambda h: (h.data, h.exp())):  # fmt: skip
        assert torch.equal(gradient(torchsmith.compile(cut)), gradient(cut))
    got = torchsmith.compile(lambda: (layer.weight.detach(), layer.weight.data, layer.weight.t()))()
    assert [t.requires_grad for t in got] == [False, False, True]


def test_truncated_backpropagation_through_time() -> None:
    torch.manual_seed(0)
    cell, state, again = nn.RNNCell(3, 4), torch.zeros(2, 4), torch.zeros(2, 4)
    cut = torchsmith.compile(lambda s: s.detach())
    for _ in range(3):
        out = cell(torch.ones(2, 3), state)
        out.sum().backward()
        state, again = cut(out), out.detach()
    assert torch.equal(state, again) and not state.requires_grad


def mlp_pair() -> tuple[nn.Module, nn.Module]:
    return both(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_a_compiled_module(reentrant: bool) -> None:
    """Also on the call that compiles: what is traced is not saved by the checkpoint's hooks."""
    from torch.utils.checkpoint import checkpoint

    model, twin = mlp_pair()
    for call in (compiled_natively(model), twin):
        x = torch.ones(2, 3).requires_grad_()
        for _ in range(2):
            checkpoint(call, x, use_reentrant=reentrant).square().sum().backward()
    same(model, twin)


def test_hooks_that_move_what_is_saved() -> None:
    model, twin = mlp_pair()
    for call in (compiled_natively(model), twin):
        with torch.autograd.graph.save_on_cpu():
            out = call(torch.ones(2, 3))
        out.square().sum().backward()
    same(model, twin)


def root_of(x: Tensor) -> Tensor:
    return torch.sqrt(x).sum() * 0


def root_inside(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    root_of(x).backward()
    return x.grad


@pytest.mark.parametrize("fn", [root_of, root_inside])
def test_anomaly_mode_is_eagers(fn: Any) -> None:
    """It runs eagerly, and the error names eager's operator; without the mode the function is compiled."""
    run = torchsmith.compile(fn)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="SqrtBackward0"), torch.autograd.detect_anomaly(), recording() as got:
        out = run(torch.zeros(2, requires_grad=True))
        out.backward()
    assert "API001" in [e.fields.get("code") for e in got]
    with recording() as got:
        run(torch.ones(2, requires_grad=True))
    assert [e.fields["report"].road for e in got if e.kind == "graph"] == ["native"]


def test_forward_derivatives_are_eagers() -> None:
    import torch.autograd.forward_ad as forward

    run, x = torchsmith.compile(lambda x: x.sin() * x), torch.arange(3.0)
    run(x)  # compiled already
    with forward.dual_level(), recording() as got:
        tangent = forward.unpack_dual(run(forward.make_dual(x, torch.ones(3)))).tangent
    torch.testing.assert_close(tangent, x.cos() * x + x.sin())
    assert "API001" in [e.fields.get("code") for e in got]


def test_many_gradients_at_once() -> None:
    run, x = compiled_natively(lambda x: x.sin() * x), torch.arange(3.0, requires_grad=True)
    with recording() as got:
        (rows,) = torch.autograd.grad(run(x), x, torch.eye(3), is_grads_batched=True)
    torch.testing.assert_close(rows, torch.diag(x.cos() * x + x.sin()))
    assert "AUT007" in [e.fields.get("code") for e in got]


def test_gradients_have_eagers_strides() -> None:
    """Also where a result's gradient comes in another order than the result has; what is not dense comes in the result's order."""
    def turned(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rot90(x).sin(), (x * y).to(memory_format=torch.channels_last)

    compiled, x, y = torchsmith.compile(turned), *(torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(2))
    first, second = (t.detach() for t in turned(x, y))
    plain = (0, 1, 2, 3)
    with recording() as got_events:
        for orders in ((None, None), (plain, None), (plain, plain), ((3, 2, 1, 0), (1, 0, 2, 3)), (None, (0, 2, 3, 1))):
            grads = [g if o is None else g.permute(o).contiguous().permute(torch.tensor(o).argsort().tolist())
                     for g, o in zip((first, second), orders, strict=True)]  # fmt: skip
            want = torch.autograd.grad(turned(x, y), (x, y), grads)
            got = torch.autograd.grad(compiled(x, y), (x, y), grads)
            assert [g.stride() for g in got] == [w.stride() for w in want]
            torch.testing.assert_close(got, want)
        sums = [sum(t.sum() for t in fn(x, y)) for fn in (turned, compiled)]
        torch.testing.assert_close(torch.autograd.grad(sums[1], (x, y)), torch.autograd.grad(sums[0], (x, y)))
    assert [e.kind for e in got_events if e.kind in ("fallback", "graph_break", "recompile")] == []


@pytest.mark.parametrize("what", ["nothing", "retain_grad", "hook"])
def test_a_result_that_another_result_follows_from(what: str) -> None:
    """It sees the gradients from outside only, and this is said; without a hook nothing is amiss."""
    w = torch.randn(3, 4, requires_grad=True)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x @ w
        return h, h.sin().sum()

    compiled = torchsmith.compile(f)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            h, total = compiled(torch.ones(2, 3))
            if what == "hook":
                total.register_hook(lambda g: None)  # nothing follows from this one
                h.register_hook(lambda g: None)
            elif what == "retain_grad":
                h.retain_grad()
            (total + h.sum()).backward()
    assert len(said) == (what != "nothing") and all("without what comes through the other result" in str(s.message) for s in said)


@pytest.mark.parametrize("inside", [False, True])
def test_the_gradient_of_channels_last_images_through_group_norm(inside: bool) -> None:
    """Eager gives it in the images' order; where it is differentiated again, and beside other gradients, in the order of those."""
    norm, x = nn.GroupNorm(2, 4), torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last).requires_grad_()

    def whole(x: torch.Tensor) -> Any:
        return [
            torch.autograd.grad(norm(x).pow(3).sum(), x)[0], torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)[0].detach(),
            torch.autograd.grad((norm(x) + x.contiguous()).sum(), x)[0],
        ]  # fmt: skip

    def apart(fn: Any) -> Any:
        made = [fn(x) for _ in range(2)]
        grads = [torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)]
        return [torch.autograd.grad(y, x, g)[0] for y, g in zip(made, grads, strict=True)]

    found = []
    for c in (torchsmith.compile, lambda f: f):
        torch.manual_seed(0)
        found.append(c(whole)(x) if inside else apart(c(norm)))
    torch.testing.assert_close(*found)
    assert [g.stride() for g in found[0]] == [g.stride() for g in found[1]]


def test_gradients_that_only_pass_through() -> None:
    """The backward graph reads no gradient, or reads constants besides."""
    def through(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x[[0, 2]]

    x = torch.randn(4, 3, requires_grad=True)
    for fn in (through, chosen):
        compiled = torchsmith.compile(fn, fullgraph=True)
        grad = torch.randn(fn(x).shape)
        for g in (grad, grad.t().contiguous().t()):
            got, want = (torch.autograd.grad(f(x), x, g)[0] for f in (compiled, fn))
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()


def test_a_bug_of_ours_in_the_backward_pass_is_said_and_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = both(lambda: nn.Linear(3, 3))
    compiled, real = torchsmith.compile(b), pipeline.compile_functional

    def broken(fg: Any, options: Any, name: str, inputs: Any = ()) -> Any:
        if name.endswith("_backward"):
            raise IndexError("of ours")
        return real(fg, options, name, inputs)

    monkeypatch.setattr(pipeline, "compile_functional", broken)
    x = torch.randn(2, 3)
    a(x).sum().backward()
    with recording() as got, pytest.warns(UserWarning, match="backward pass; it runs eagerly. IndexError: of ours"):
        compiled(x).sum().backward()
    assert [e.fields["code"] for e in got if e.kind == "fallback"] == ["API005"]
    same(a, b)


def test_the_history_of_what_is_only_detached_is_not_kept() -> None:
    cell = nn.GRUCell(2, 3)

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.state = cell, torch.zeros(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.cell(x, self.state.detach())
            return self.state.sum()

    keeps = Keeps()
    compiled = torchsmith.compile(keeps)
    for _ in range(3):
        compiled(torch.ones(1, 2)).backward()  # a second time through the steps before is eager's error
    parents = [type(p).__name__ for p, _ in keeps.state.grad_fn.next_functions if p is not None]  # type: ignore[union-attr]
    assert set(parents) == {"AccumulateGrad"}, parents


class _Marks(torch.autograd.Function):
    """Its derivative writes to what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone().type(x.type())

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return g * 3


def test_a_backward_pass_that_writes_to_what_the_program_sees():
    def run(fn):
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        x, y = a + 1, b + 1
        grads = torch.autograd.grad(fn(x, y).sum(), (a, b))
        return *grads, x.detach(), y.detach()

    def fn(x, y):
        return x * _Marks.apply(y)

    with recording() as seen:
        got = run(torchsmith.compile(fn))
    assert not [e for e in seen if e.kind == "graph_break"]
    for mine, theirs in zip(got, run(fn), strict=True):
        torch.testing.assert_close(mine, theirs)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class _FirstRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.stack([g * 7, g * 0])


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 5


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def _apart_and_then_a_function(x):
    with torch.no_grad():
        apart = x.detach(), _Same.apply(x)
    return _Same.apply(x), *apart


def _written_by_a_function(x):
    with torch.no_grad():
        return _Doubled.apply(x), x.detach()


def _under_no_grad(x):
    with torch.no_grad():
        return x.view(-1), x.detach(), x[1:]


def _both_ways(x):
    with torch.no_grad():
        apart = x.view(-1)
    return apart, x.view(-1), torch.ops.aten.alias(x), x * 2


def _asks_for_gradients(x):
    seen = x.view(-1)
    seen.requires_grad_(True)
    return seen, x + 1


@pytest.mark.parametrize(
    "fn", [_under_no_grad, _both_ways, _asks_for_gradients, _apart_and_then_a_function, _written_by_a_function]
)
@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_views_have_the_history_that_eager_gives_them(fn, wants, on):
    """A view made under no_grad requires grad as its base does, and nothing flows through it; an alias is another tensor."""

    def said(f):
        x = torch.ones(3, 3, requires_grad=wants)
        with torch.set_grad_enabled(on):
            outs = f(x)
        seen = [(t is x, t.requires_grad, t.is_leaf, t.data_ptr() == x.data_ptr()) for t in outs]
        for t in outs:
            if t.requires_grad:
                (t * 3).sum().backward()
        return seen, x.grad

    mine, theirs = said(torchsmith.compile(fn)), said(fn)
    assert mine[0] == theirs[0]
    assert (mine[1] is None) == (theirs[1] is None)
    if mine[1] is not None:
        torch.testing.assert_close(mine[1], theirs[1])


class _Shaped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any) -> Tensor:
        ctx.shape = shape
        return x * shape.numel()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * (ctx.shape.numel() if isinstance(ctx.shape, torch.Size) else 100), None


class _AsksForClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Any) -> Tensor:
        ctx.n = n
        return x * (n if isinstance(n, (int, float)) else 100)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * (ctx.n if type(ctx.n) in (int, float) else 100), None


class _AsksLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Any) -> Tensor:
        ctx.n = x.shape[0]
        return x * n

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        match ctx.n:
            case int():
                return g * 2, None
        return g * (3 if ctx.n.__class__ is int else 100), None


def test_functions_see_the_classes_of_sizes_that_eager_shows_them():
    for f in (
        lambda x: _Shaped.apply(x, x.shape), lambda x: _AsksForClasses.apply(x, x.shape[0]),
        lambda x: _AsksForClasses.apply(x, x.shape[0] * 0.5), lambda x: _AsksLater.apply(x, 2),
    ):  # fmt: skip
        for dynamic in (None, True):
            compiled = torchsmith.compile(f, fullgraph=True, dynamic=dynamic)
            for n in (2, 3, 4):
                a, b = torch.ones(n, requires_grad=True), torch.ones(n, requires_grad=True)
                mine, theirs = compiled(a), f(b)
                mine.sum().backward()
                theirs.sum().backward()
                assert torch.equal(mine, theirs) and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_that_show_other_memory_through_a_derivative_of_their_own(dynamic: bool) -> None:
    """An autograd.Function gives its argument back, or a part of it: the program's result goes back through its `backward`."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return _Reversed.apply(x), _Reversed.apply(x).view(-1), _FirstRow.apply(x), x.t(), _Reversed.apply(y), y, y[1]

    a, b = (torch.arange(4.0).view(2, 2).requires_grad_() for _ in range(2))
    want, got = f(a), torchsmith.compile(f, fullgraph=True, dynamic=dynamic)(b)
    for p, q in zip(want, got, strict=True):
        assert torch.equal(p, q)
        (g,), (h,) = (torch.autograd.grad(t.sum(), x, retain_graph=True) for t, x in ((p, a), (q, b)))
        assert torch.equal(g, h)
    assert all(got[k].untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for k in range(4))


def test_what_was_recorded_goes_with_the_function() -> None:
    """relu's node saves its result, which knows the recording."""

    def left() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor and o.device.type == "meta" for o in gc.get_objects())

    def compiled_once() -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        torchsmith.compile(model)(torch.ones(4, 3)).sum().backward()

    compiled_once()
    before = left()
    for _ in range(3):
        compiled_once()
    assert left() - before < 10, "five tensors of each"


class Unpacked(torch.autograd.Function):
    """The hook's count of reads is eager's: backward unpacks what forward saved once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


def test_a_backward_that_is_compiled_unpacks_once() -> None:
    reads: list[int] = []

    def unpack(t: Tensor) -> Tensor:
        reads.append(t.dim())
        return t

    def step(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = Unpacked.apply(x)
        torchsmith.compiler.graph_break()
        y.sum().backward()
        return x.grad  # type: ignore[return-value]

    step(torch.ones(3, requires_grad=True))
    eager = len(reads)
    got = torchsmith.compile(step, backend="eager")(torch.ones(3, requires_grad=True))
    assert len(reads) == 2 * eager and torch.equal(got, torch.ones(3))
