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
    "pdist": (F.pdist, lambda n: (randn(n, 3),)),
    "lu": (lambda x: torch.linalg.lu(x)[2], lambda n: (randn(n, 3, 3),)),
    "lu_unpack": (lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x))[1], lambda n: (randn(n, 4, 3),)),
    "eig": (lambda x: torch.linalg.eigvals(x).abs(), lambda n: (randn(n, 3, 3),)),
    "masked_scatter": (lambda x, y: x.masked_scatter(x > 0, y), lambda n: (randn(n, 3), randn(n, 3))),
    "multilabel_margin": (lambda x: F.multilabel_margin_loss(x, torch.zeros_like(x).long()), lambda n: (randn(n, 3),)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), lambda n: (randn(2, 3, n, n + 1),)),
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
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
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
