"""Derivatives of functions whose sizes vary: one graph for all sizes but the first, and eager's gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

import torchsmith
from torchsmith.events import recording

SAMPLES = {2: torch.full((1, 2, 2), 0.3), 3: torch.full((1, 2, 3), 0.3)}


def pooled(x: Tensor, rank: int) -> Tensor:
    pool = F.fractional_max_pool2d if rank == 2 else F.fractional_max_pool3d
    return pool(x, 2, output_size=(3,) * rank, _random_samples=SAMPLES[rank].expand(x.shape[0], -1, -1))


def apart(x: Tensor) -> Tensor:
    """How far distributions are apart, whose batches are broadcast."""
    one, other = (torch.distributions.MultivariateNormal(m, scale_tril=torch.eye(3) * 2, validate_args=False) for m in (x, torch.zeros(3)))
    return torch.distributions.kl_divergence(one, other)


def messages(x: Tensor) -> Tensor:
    """Along the edges that a mask keeps, and from each node to itself: backward meets how many were kept in sums only."""
    nodes = torch.arange(x.shape[0])
    edges = torch.stack([nodes, nodes // 2])
    edges = torch.cat([edges[:, edges[0] != edges[1]], nodes.expand(2, -1)], 1)
    return torch.zeros_like(x).index_add(0, edges[1], x.sin()[edges[0]])


def parts(x: Tensor) -> Tensor:
    """Both sides of a mask: backward looks for their places again."""
    out, inside = torch.zeros_like(x), x > 0
    out[~inside] = x[~inside] * 2
    out[inside] = x[inside].sin()
    return out


def groups(x: Tensor) -> Tensor:
    """The largest of each group; how many there are data tell."""
    group = torch.arange(x.shape[0]) // 2
    return torch.zeros(int(group.max()) + 1, 4).scatter_reduce(0, group[:, None].expand_as(x), x.sin(), "amax", include_self=False)


def edged(x: Tensor) -> Tensor:
    """A write to the edge of as many rows as data tell."""
    rows = x[x[:, 0] > -9].cumsum(1)
    rows[..., 0] = -3.0
    return rows


ROWS = {
    "logit": (lambda x: torch.logit(x.sigmoid(), eps=0.3) + torch.logit(x.sigmoid()), lambda n: (randn(n, 3),)),
    "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), lambda n: (randn(n, 2, 4, 8),)),
    "max_unpool3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), lambda n: (randn(n, 2, 4, 4, 4),)),
    "fractional_max_pool2d": (lambda x: pooled(x, 2), lambda n: (randn(n, 2, 7, 7),)),
    "fractional_max_pool3d": (lambda x: pooled(x, 3), lambda n: (randn(n, 2, 5, 5, 5),)),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), lambda n: (randn(n, 4), randn(n, 1))),
    "weight_norm last": (lambda v, g: torch._weight_norm(v, g, 1), lambda n: (randn(4, n), randn(1, n))),
    "gamma": (lambda x: torch._standard_gamma(x.exp()), lambda n: (randn(n, 3),)),
    "dirichlet": (lambda x: torch.distributions.Dirichlet(x.exp(), validate_args=False).rsample(), lambda n: (randn(n, 3),)),
    "a matrix times batches": (lambda w, x: w @ x, lambda n: (randn(3, 4), randn(n, 4, 5))),
    "turned batches times a matrix": (lambda x, w: x.mT @ w, lambda n: (randn(n, 4, 5), randn(4, 3))),
    "pdist": (F.pdist, lambda n: (randn(n, 3),)),
    "lu": (lambda x: torch.linalg.lu(x)[2], lambda n: (randn(n, 3, 3),)),
    "lu_unpack": (lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x))[1], lambda n: (randn(n, 4, 3),)),
    "eig": (lambda x: torch.linalg.eigvals(x).abs(), lambda n: (randn(n, 3, 3),)),
    "segment_reduce": (lambda x: torch.segment_reduce(x, "mean", lengths=torch.arange(2) * (len(x) - 2) + 1), lambda n: (randn(n, 3),)),
    "masked_scatter": (lambda x, y: x.masked_scatter(x > 0, y), lambda n: (randn(n, 3), randn(n, 3))),
    "multilabel_margin": (lambda x: F.multilabel_margin_loss(x, torch.zeros_like(x).long()), lambda n: (randn(n, 3),)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), lambda n: (randn(2, 3, n, n + 1),)),
    "select": (lambda x: x[:, 0] * x[:, -1], lambda n: (randn(n, 4),)),
    "slice": (lambda x: x[1:-1] * x[::2][:2] + x.chunk(2)[1][:1], lambda n: (randn(4, n),)),
    "slice of a varying step": (lambda x: x.flatten()[:: x.shape[0]].sin(), lambda n: (randn(n, 4),)),
    "diagonal": (lambda x: x.diagonal(1).sin(), lambda n: (randn(n, n + 1),)),
    "unfold": (lambda x: x.unfold(1, 4, 2).sin(), lambda n: (randn(n, 8),)),
    "reflection": (lambda x: F.pad(x, (x.shape[-1] - 2, 2), "reflect").sin(), lambda n: (randn(2, 3, n),)),
    "replication": (lambda x: F.pad(x, (x.shape[-1] // 2, 2), "replicate").sin(), lambda n: (randn(2, 3, n),)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 1 / x.shape[0]), lambda n: (randn(n, 4),)),
    "softplus, shrinks": (lambda x: F.softplus(x, len(x) / 3) + F.hardshrink(x, 1 / len(x)) + F.softshrink(x, 1 / len(x)),
                          lambda n: (randn(n, 4),)),
    "embedding": (lambda x: F.embedding(torch.arange(3), x).sin(), lambda n: (randn(n, 4),)),
    "embedding_bag": (lambda x: F.embedding_bag(torch.arange(4).view(2, 2), x).sin(), lambda n: (randn(n, 4),)),
    "einsum of three": (lambda x, y: torch.einsum("bi,ij,bj->b", x, y, x), lambda n: (randn(n, 4), randn(4, 4))),
    "bincount": (lambda x: x * torch.bincount(torch.arange(3), minlength=x.shape[0])[:, None], lambda n: (randn(n, 4),)),
    "padded away": (lambda x: F.pad(F.pad(x.transpose(0, 1), (0, 0, -1, 0)), (0, 0, 1, 0)).sin(), lambda n: (randn(n, 4, 3),)),
    "parts of a complex sum": (lambda x: torch.view_as_real(torch.complex(F.relu(x), x).sum(1)), lambda n: (randn(n, 4),)),
    "divergence": (apart, lambda n: (randn(n, 3),)),
    "messages": (messages, lambda n: (randn(n, 4),)),
    "parts": (parts, lambda n: (randn(n, 4),)),
    "groups": (groups, lambda n: (randn(n, 4),)),
    "edge of chosen rows": (edged, lambda n: (randn(n, 4),)),
    "windows": (lambda x: x * torch.hann_window(x.shape[0]) * torch.hamming_window(5)[1] + torch.fft.fftfreq(4)[1], lambda n: [randn(n)]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_gradients(name):
    fn, make = ROWS[name]
    compiled = torchsmith.compile(fn)
    graphs, codes = 0, set()
    for n in (4, 6, 9):
        torch.manual_seed(n)
        args = [t.requires_grad_() for t in make(n)]
        state = torch.get_rng_state()
        want = torch.autograd.grad(fn(*args).square().sum(), args)
        torch.set_rng_state(state)
        with recording() as got:
            found = torch.autograd.grad(compiled(*args).square().sum(), args)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4, check_stride=True)
        graphs += sum(e.kind == "graph" for e in got)
        codes |= {e.fields["code"] for e in got if e.kind in ("fallback", "graph_break")}
    assert graphs == 2
    assert not codes


def test_a_gradient_that_is_a_view_of_the_one_that_comes():
    """Nothing is computed, and the sizes stand in the result alone."""

    def fn(x):
        y = x.sum()
        y += 1
        return y

    compiled = torchsmith.compile(fn, dynamic=True)
    with recording() as seen:
        for size in ((4, 6), (3, 5)):
            x = torch.arange(float(size[0] * size[1])).reshape(size).requires_grad_() * 1
            (got,) = torch.autograd.grad((compiled(x) ** 2).sum(), [x])
            (want,) = torch.autograd.grad((fn(x) ** 2).sum(), [x])
            torch.testing.assert_close(got, want)
    assert not [e.fields for e in seen if e.kind == "fallback"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_gradients_in_any_order_of_memory(order):
    """Strides of dimensions that vary say which of them lies outside, those of a result as those of the gradient that comes for it."""
    compiled = torchsmith.compile(lambda x: x.sin().permute(order))
    for sizes in ((2, 3, 4), (3, 4, 5), (4, 7, 6)):
        x = randn(sizes, requires_grad=True)
        for come in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1)):
            out = compiled(x)
            back = [come.index(d) for d in range(3)]
            grad = randn([out.shape[d] for d in come]).permute(back)
            (found,) = torch.autograd.grad(out, x, grad)
            torch.testing.assert_close(found, x.cos() * grad.permute([order.index(d) for d in range(3)]))
