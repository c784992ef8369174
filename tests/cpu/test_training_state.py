"""Steps that switch gradients on and off, give parameters other memory, or ask for a module's own state: one graph, and eager's results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_training_programs import check
from torch import nn
from torch.optim import swa_utils
from training_programs import Compile, Watch

import torchsmith
from torchsmith.events import recording


def frozen_by_an_argument(c: Compile):
    m = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    o = torch.optim.SGD(m.parameters(), 0.1)
    watch = Watch(m, o)

    @c
    def step(x, thawed):
        m.requires_grad_(False)
        m[2].requires_grad_(True)
        if thawed:
            m[0].requires_grad_(True)
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        o.step()
        return loss.detach()

    for k in range(4):
        yield watch(step(torch.randn(5, 4), k > 1)), [p.requires_grad for p in m.parameters()]


def discriminator_frozen_for_the_generator(c: Compile):
    g, d = nn.Linear(4, 8), nn.Linear(8, 1)
    og, od = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
    watch = Watch(g, d, og, od)

    @c
    def step(z, real):
        for p in d.parameters():
            p.requires_grad_(True)
        od.zero_grad()
        (F.softplus(-d(real)) + F.softplus(d(g(z).detach()))).mean().backward()
        od.step()
        for p in d.parameters():
            p.requires_grad = False
        og.zero_grad()
        loss = F.softplus(-d(g(z))).mean()
        loss.backward()
        og.step()
        return loss.detach()

    for _ in range(3):
        yield watch(step(torch.randn(5, 4), torch.randn(5, 8))), [p.requires_grad for p in d.parameters()]


def input_that_is_differentiated(c: Compile):
    n = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    o = torch.optim.SGD(n.parameters(), 0.1)
    watch = Watch(n)

    @c
    def step(x):
        x.requires_grad_()
        o.zero_grad()
        u = n(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        (slope[:, :1] - u).square().mean().backward()
        o.step()

    for _ in range(2):
        x = torch.randn(5, 2)
        step(x)
        yield watch(x, x.grad)


def weights_of_unit_length(c: Compile):
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    o = torch.optim.SGD(m.parameters(), 0.1)
    watch = Watch(m)
    old = m[0].weight.detach()

    @c
    def step(x):
        for layer in (m[0], m[2]):
            layer.weight.data = F.normalize(layer.weight.data, dim=1)
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        o.step()
        m[0].bias.data = m[0].bias.data * 0.5
        return loss.detach()

    for _ in range(3):
        yield watch(step(torch.randn(5, 4)), old)


def averaged_model(c: Compile):
    m = nn.Linear(4, 4)
    o = torch.optim.SGD(m.parameters(), 0.1)
    averages = swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    watch = Watch(m, averages)

    @c
    def step(x):
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        o.step()
        averages.update_parameters(m)
        return loss.detach()

    for _ in range(4):
        yield watch(step(torch.randn(5, 4)))


class Switched(nn.Module):
    """As torch.ao's fake quantisers are: buffers of one element say what is on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("watching", torch.tensor([0], dtype=torch.uint8))
        self.register_buffer("rounding", torch.tensor([[1]], dtype=torch.uint8))

    def forward(self, x):
        y = self.linear(x)
        if self.watching[0] == 1:
            return y + 1
        return torch.fake_quantize_per_tensor_affine(y, 0.1, 0, 0, 255) if self.rounding.view(-1)[0] else y


def switches_in_buffers(c: Compile):
    m = Switched()
    o = torch.optim.SGD(m.parameters(), 0.1)
    watch = Watch(m)

    @c
    def step(x):
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        o.step()
        return loss.detach()

    for i in range(4):
        m.watching.fill_(i == 2)
        m.rounding.fill_(i < 3)
        yield watch(step(torch.randn(5, 4)))


class FirstBatch(nn.Module):
    """Takes its scale from the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.uint8))

    def forward(self, x):
        if not self.seen:
            self.scale.data.copy_(1 / x.std(0))
            self.seen.fill_(1)
        return x * self.scale


def state_set_by_the_first_batch(c: Compile):
    m = nn.Sequential(nn.Linear(4, 4), FirstBatch())
    o = torch.optim.SGD(m.parameters(), 0.1)
    watch = Watch(m)

    @c
    def step(x):
        o.zero_grad()
        loss = (m(x) - 1).square().mean()
        loss.backward()
        o.step()
        return loss.detach()

    for _ in range(3):
        yield watch(step(torch.randn(5, 4)))


def checked_distribution(c: Compile):
    m = nn.Linear(4, 6)
    o = torch.optim.SGD(m.parameters(), 0.1)
    watch = Watch(m)

    @c
    def step(x):
        o.zero_grad()
        h = m(x)
        of = torch.distributions.MultivariateNormal(h[:, :3], torch.eye(3) + torch.diag_embed(h[:, 3:].exp()))
        loss = -of.log_prob(torch.ones(3)).mean()
        loss.backward()
        o.step()
        return loss.detach()

    for _ in range(2):
        yield watch(step(torch.randn(5, 4)))


def short_time_fourier_transform(c: Compile):
    m, w = nn.Linear(32, 32), torch.hann_window(16)
    o = torch.optim.SGD(m.parameters(), 0.1)
    watch = Watch(m)

    @c
    def step(x):
        o.zero_grad()
        bands = torch.stft(m(x), 16, window=w, return_complex=True)
        loss = torch.istft(bands / 2j, 16, window=w, length=32).square().mean()
        loss.backward()
        o.step()
        return loss.detach()

    for _ in range(2):
        yield watch(step(torch.randn(3, 32)))


class Sharp(torch.optim.Optimizer):
    """Two backward passes for each step; between steps the state holds the parameters' own memory."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)

    @torch.no_grad()
    def away(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def back(self):
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.inner.step()
        self.zero_grad()


def state_that_is_the_parameters(c: Compile):
    m = nn.Linear(4, 2)
    o = Sharp(m.parameters())
    watch = Watch(m, o.inner)

    @c
    def step(x):
        loss = m(x).square().mean()
        loss.backward()
        o.away()
        m(x).square().mean().backward()
        o.back()
        return loss.detach()

    for _ in range(4):
        yield watch(step(torch.randn(5, 4))), [o.state[p]["old"].data_ptr() == p.data_ptr() for p in m.parameters()]


def exception_after_the_step(c: Compile):
    m = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)
    watch = Watch(m, o)

    @c
    def step(x):
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        o.step()
        if loss > 1000:
            raise ValueError(f"{loss.item():.3f}")
        return loss.detach()

    for scale in (1.0, 1.0, 1e3, 1.0):
        try:
            with torch.no_grad():
                m[2].bias.mul_(scale)
            yield watch(step(torch.randn(5, 4)))
        except ValueError as e:
            yield watch(torch.zeros(())), str(e)[:3]


SCALE = 2.0


class Outside:
    value = 1.0
    weight = torch.ones(3)


class Scaled(torch.autograd.Function):
    """Reads globals, attributes and a tensor that are no arguments, backwards too."""

    @staticmethod
    def forward(x):
        return x * Outside.weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * SCALE * Outside.value * Outside.weight


def function_that_reads_from_outside(c: Compile):
    globals().update(SCALE=2.0)
    Outside.value, Outside.weight = 1.0, torch.ones(3)
    p = nn.Parameter(torch.ones(3))

    @c
    def step(x):
        p.grad = None
        loss = Scaled.apply(p * x).sum()
        loss.backward()
        return loss.detach()

    @c
    def apart(x):
        return Scaled.apply(p * x).sum()

    for k in range(5):
        if k == 1:
            globals().update(SCALE=5.0)
        if k == 2:
            Outside.value = 3.0
        if k == 3:
            Outside.weight = torch.full((3,), 7.0)
        if k == 4:
            Outside.weight.mul_(2)
        yield step(torch.arange(3.0)), p.grad
        p.grad = None
        apart(torch.arange(3.0)).backward()
        yield p.grad


def function_defined_inside(c: Compile):
    p = nn.Parameter(torch.ones(3))

    @c
    def step(x):
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * 3

        p.grad = None
        loss = Twice.apply(p * x).sum()
        loss.backward()
        return loss.detach()

    for _ in range(3):
        yield step(torch.arange(3.0)), p.grad


def function_of_what_the_step_changed(c: Compile):
    Outside.value, Outside.weight = 1.0, torch.ones(3)
    p = nn.Parameter(torch.ones(3))

    @c
    def step(x):
        Outside.value += 1.0
        p.grad = None
        loss = Scaled.apply(p * x).sum()
        loss.backward()
        return loss.detach()

    for _ in range(3):
        yield step(torch.arange(3.0)), p.grad, Outside.value


def function_that_counts_backwards(c: Compile):
    seen = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(tuple(grad.shape))
            return grad * 2

    p = nn.Parameter(torch.ones(3))
    apart = c(lambda x: Counted.apply(p * x).sum())
    for _ in range(3):
        p.grad = None
        apart(torch.arange(3.0)).backward()
        yield p.grad, list(seen)


WHOLE = [
    function_that_reads_from_outside, function_defined_inside,
    state_that_is_the_parameters,
    frozen_by_an_argument, discriminator_frozen_for_the_generator, input_that_is_differentiated, weights_of_unit_length, averaged_model,
    switches_in_buffers, state_set_by_the_first_batch, checked_distribution, short_time_fourier_transform,
]  # fmt: skip


@pytest.mark.parametrize("program", WHOLE, ids=lambda p: p.__name__)
def test_one_graph(program):
    assert check(program) == set()


@pytest.mark.parametrize("program", [function_of_what_the_step_changed, function_that_counts_backwards], ids=lambda p: p.__name__)
def test_functions_that_autograd_calls_itself(program):
    assert "CAP012" in check(program)


def test_an_exception_after_the_step():
    assert check(exception_after_the_step) == {"RUN004"}  # of the call that raises

    eager = torchsmith.compile(adds_and_checks, backend="eager")  # writes before it checks: nothing may be written twice
    total = torch.zeros(2)
    eager(total, torch.ones(2))
    with pytest.raises(ValueError, match="5"):
        eager(total, torch.full((2,), 4.0))
    assert total.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_step_did_in_python_before_it_raised(backend):
    """The partner's graph has written the weights by then; what the program noted before it raised is noted once."""
    w, notes = torch.ones(3), []

    def step(x, i):
        notes.append("in")
        v = w.detach().requires_grad_()
        (grad,) = torch.autograd.grad((x * v).sum(), v)
        w.sub_(grad)
        notes.append("stepped")
        return (x * 2)[i]

    compiled = torchsmith.compile(step, backend=backend)
    compiled(torch.ones(3), torch.tensor([0, 1]))
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(torch.ones(3), torch.tensor([0, 9]))
    assert notes == ["in", "stepped"] * 2 and w.tolist() == [-1.0] * 3


def adds_and_checks(total, x):
    total.add_(x)
    if total.max() > 3:
        raise ValueError(f"{total.max().item()}")


def test_results_that_require_grad_split_in_front_of_the_switch():
    m = nn.Linear(4, 2)

    def forward(x, frozen):
        h = x * 2
        m.bias.requires_grad_(not frozen)
        return m(h)

    compiled = torchsmith.compile(forward)
    with recording() as got:
        for frozen in (True, False, True):
            m.zero_grad()
            compiled(torch.ones(3, 4), frozen).sum().backward()
            assert (m.bias.grad is None) == frozen
            assert m.bias.requires_grad != frozen
            assert torch.equal(m.weight.grad, torch.full((2, 4), 6.0))
    assert {e.fields["code"] for e in got if e.kind == "graph_break"} == {"CAP026"}


def test_matrices_that_are_not_symmetric():
    def density(covariance):
        return torch.distributions.MultivariateNormal(torch.zeros(2), covariance, validate_args=True).log_prob(torch.ones(2))

    compiled = torchsmith.compile(density)
    good = torch.eye(2)
    torch.testing.assert_close(compiled(good), density(good))
    for bad in (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), -torch.eye(2)):
        for fn in (density, compiled):
            with pytest.raises(ValueError, match="PositiveDefinite"):
                fn(bad)


def test_windows_that_overlap_nowhere():
    compiled = torchsmith.compile(lambda z, w: torch.istft(z, 16, window=w, center=False))
    bands = torch.randn(9, 4, dtype=torch.complex64)
    torch.testing.assert_close(compiled(bands, torch.ones(16)), torch.istft(bands, 16, window=torch.ones(16), center=False))
    with pytest.raises(RuntimeError, match="window overlap"):
        compiled(bands, torch.zeros(16))


@pytest.mark.parametrize("more", [False, True])
def test_a_result_keeps_the_gradient_that_comes_from_outside(more):
    weight = torch.randn(3, requires_grad=True)

    def fn(x):
        y = x * weight
        y.retain_grad()
        return (y, y * 2) if more else (y,)

    kept = []
    for graph in (fn, torchsmith.compile(fn, fullgraph=not more)):  # a result that others are made of splits the frame
        out = graph(torch.ones(3))
        sum(t.sin().sum() for t in out).backward()
        kept.append(out[0].grad)
    torch.testing.assert_close(*kept)


def test_forward_of_a_function_runs_without_gradients_whatever_it_reads():
    weight = torch.randn(3, requires_grad=True)

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                y = x * 2
            return y * weight

        @staticmethod
        def backward(ctx, g):
            return g

    def fn(x):
        y = Weighted.apply(x)
        return y, y * weight

    for graph in (fn, torchsmith.compile(fn, fullgraph=True)):
        assert [t.requires_grad for t in graph(torch.ones(3))] == [False, True]


class Repeated(torch.autograd.Function):
    """It calls the part again in backward, and sees whether that is differentiated itself."""

    @staticmethod
    def forward(ctx, x, part, *weights):
        ctx.save_for_backward(x)
        ctx.part = part
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx, g):
        (x,), twice = ctx.saved_tensors, torch.is_grad_enabled()
        with torch.enable_grad():
            x = x if twice else x.detach().requires_grad_()
            y = ctx.part(x)
        grad, *grads = torch.autograd.grad(y, [x, *ctx.part.parameters()], g, create_graph=twice)
        return grad, None, *grads


def test_a_function_given_a_module_is_differentiated_twice():
    part = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def loss(x):
        return Repeated.apply(x * 1.0, part, *part.parameters()).square().sum()

    def twice(loss, x):
        (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, *part.parameters()])

    x = torch.randn(2, 3, requires_grad=True)
    want = twice(loss, x)
    with recording() as got:
        inside = torchsmith.compile(lambda x: twice(loss, x))(x)
        outside = twice(torchsmith.compile(loss), x)
    for found in (inside, outside):
        torch.testing.assert_close(found, want)
    assert {e.fields["code"] for e in got if e.kind in ("graph_break", "fallback")} == {"AUT006"}
