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


def _ordered(t: Tensor, order: int) -> Tensor:
    """The same values in another memory order; 4: expanded, 5: with gaps."""
    orders = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (3, 0, 1, 2))
    if order < len(orders):
        back = sorted(range(4), key=orders[order].__getitem__)
        return t.permute(orders[order]).contiguous().permute(back)
    return t[:, :, :1].expand_as(t) if order == 4 else torch.stack([t, t], -1)[..., 0]


ARGUMENTS: dict[str, Callable[[Tensor, Tensor], tuple[object, ...]]] = {
    "elu": lambda g, x: (g, 1.0, 1.0, 1.0, False, x), "leaky_relu": lambda g, x: (g, x, 0.1, False),
    "threshold": lambda g, x: (g, x, 0.0), "hardtanh": lambda g, x: (g, x, -1.0, 1.0), "softplus": lambda g, x: (g, x, 1.0, 20.0),
    "hardshrink": lambda g, x: (g, x, 0.5), "softshrink": lambda g, x: (g, x, 0.5), "_prelu_kernel": lambda g, x: (g, x, x[:1, :, :1, :1]),
    "log_sigmoid": lambda g, x: (g, x, torch.exp(-x.abs()).contiguous()), "glu": lambda g, x: (g, torch.cat([x, x], 1), 1),
    "_softmax_backward_data": lambda g, x: (g, x, 1, torch.float32), "_log_softmax_backward_data": lambda g, x: (g, x, 3, torch.float32),
    "mse_loss": lambda g, x: (g, x, x * 2, 0), "smooth_l1_loss": lambda g, x: (g, x, x * 2, 0, 1.0),
    "huber_loss": lambda g, x: (g, x, x * 2, 0, 1.0),
    "binary_cross_entropy": lambda g, x: (g, x, x * 0.5, None, 0), "soft_margin_loss": lambda g, x: (g, x, x * 0.5, 0),
    **dict.fromkeys(("gelu", "tanh", "sigmoid", "silu", "mish", "hardsigmoid"), lambda g, x: (g, x)),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_memory_order_is_that_of_the_kernel(name: str) -> None:
    from torchsmith.graph.tracing import PARTS

    import_rules()
    op = getattr(torch.ops.aten, name if name.endswith("_data") else f"{name}_backward").default
    for first in range(6):
        for second in range(6):
            args = ARGUMENTS[name](_ordered(torch.rand(2, 3, 4, 5), first), _ordered(torch.rand(2, 3, 4, 5), second))
            ours, eager = PARTS[op](*args), op(*args)
            for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, eager)), strict=True):
                torch.testing.assert_close(a, b)
                assert a.stride() == b.stride(), (first, second)


@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.bfloat16), (4, torch.float32)])
def test_gradients_of_convolutions_lie_as_their_kernel_does(groups: int, dtype: torch.dtype) -> None:
    """In three dimensions eager picks a kernel by sizes and dtypes, and with it the order of both gradients."""
    model = torch.nn.Conv3d(4, 8, 2, groups=groups, dtype=dtype)
    x = torch.randn(2, 4, 5, 6, 3, dtype=dtype).contiguous(memory_format=torch.channels_last_3d).requires_grad_()

    def gradients(fn: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(fn(x).square().sum(), [x, *model.parameters()])

    with recording() as got:
        torch.testing.assert_close(gradients(torchsmith.compile(model)), gradients(model), check_stride=True, rtol=2e-2, atol=2e-2)
    assert not [e.fields for e in got if e.kind == "fallback"]


VOLUMES: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2), "exact": lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
    "trilinear": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), "max": lambda x: F.max_pool3d(x, 2),
    "adaptive max": lambda x: F.adaptive_max_pool3d(x, 2), "adaptive mean": lambda x: F.adaptive_avg_pool3d(x, 2),
    "adaptive mean of other windows": lambda x: F.adaptive_avg_pool3d(x, 3), "mean": lambda x: F.avg_pool3d(x, 2),
    "reflect": lambda x: F.pad(x, [1] * 6, mode="reflect"), "replicate": lambda x: F.pad(x, [1] * 6, mode="replicate"),
    "circular": lambda x: F.pad(x, [1] * 6, mode="circular"), "constant": lambda x: F.pad(x, [1] * 6),
}  # fmt: skip


@pytest.mark.parametrize("name", VOLUMES)
def test_gradients_of_volumes_lie_as_their_kernel_leaves_them(name: str) -> None:
    """Some kernels keep the order of channels last, some do not, and not as in two dimensions."""
    x = torch.randn(2, 4, 4, 6, 2).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    fn = VOLUMES[name]
    tangent = torch.randn_like(fn(x))
    with recording() as got:
        ours, eager = (torch.autograd.grad(f(x), x, tangent) for f in (torchsmith.compile(fn), fn))
    torch.testing.assert_close(ours, eager, check_stride=True)
    assert not [e.fields for e in got if e.kind == "fallback"]


def test_a_gradient_that_nobody_asks_for_may_be_given() -> None:
    """Eager's convolution of one dimension in bfloat16 gives that of a frozen weight all the same."""
    model = torch.nn.Conv1d(8, 4, 1, dtype=torch.bfloat16)
    model.weight.requires_grad_(False)
    x = torch.randn(3, 8, 5, dtype=torch.bfloat16).requires_grad_()
    with recording() as got:
        ours, eager = (torch.autograd.grad(fn(x).sum(), [x, model.bias]) for fn in (torchsmith.compile(model), model))
    torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
    assert not [e.fields for e in got if e.kind == "fallback"]


def test_gradients_of_reflections_lie_as_they_do() -> None:
    reflections, tau = torch.geqrf(torch.randn(4, 4))

    def step(a: Tensor, tau: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((torch.ormqr(a, tau, b) @ torch.linalg.householder_product(a, tau)).sum(), (a, tau, b))

    args = [t.requires_grad_() for t in (reflections, tau, torch.randn(4, 4))]
    torch.testing.assert_close(torchsmith.compile(step)(*args), step(*args), check_stride=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_that_overlap_in_narrow_numbers(dynamic: bool) -> None:
    """Gradients of max pools: summed in float32 over the windows that chose an element, rounded once."""
    windows = [(F.max_pool2d, w) for w in ((3, 2, 1), (3, 1, 1), (2, 3, 1, 1, True), ((3, 2), (1, 2), (1, 0)))]

    def run(x: Tensor) -> list[Tensor]:
        found = []
        for pool, window in (*windows, (F.max_pool3d, (3, 2, 1))):
            leaf = x.detach().requires_grad_()
            found.append(torch.autograd.grad(pool(leaf, *window).float().square().sum(), leaf)[0])
        return found

    torch.manual_seed(0)
    compiled = torchsmith.compile(run, dynamic=dynamic)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(2, 3, 13, 11).to(dtype)
        for a, b, c in zip(compiled(x), run(x.float()), run(x), strict=True):
            torch.testing.assert_close(a, b.to(dtype), rtol=0, atol=0)
            assert a.stride() == c.stride()


def import_rules() -> None:
    import torchsmith.graph.rules.backward  # noqa: F401


def test_a_step_of_permuted_and_complex_operands_is_one_graph() -> None:
    """Orders of derivatives, numbers that a decomposition casts, complex numbers that autograd conjugates; sizes vary."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        w = x.detach().requires_grad_()
        heads = w.transpose(1, 2)
        first = F.elu(heads) + 1
        loss = (first * first.sum(2, keepdim=True)).sum() + F.softmax((heads.permute(2, 3, 0, 1) * 2).mul_(0.5), 1).square().sum()
        loss = loss + F.huber_loss(w, w.detach() * 3) + torch.exp(1j * w + 0.5).real.sum() + (w * 2j).imag.sum()
        return torch.autograd.grad(loss, w)

    torch.manual_seed(0)
    compiled = torchsmith.compile(run, dynamic=True, fullgraph=True)
    for shape in ((2, 5, 3, 4), (3, 7, 2, 4)):
        x = torch.randn(shape)
        with recording() as got:
            torch.testing.assert_close(compiled(x), run(x))
        assert not [e.fields for e in got if e.kind == "fallback" and e.fields["code"] not in ("GRA001", "GRA010")]
    assert torchsmith.explain(run, dynamic=True)(x).graphs[0].road == "native"
