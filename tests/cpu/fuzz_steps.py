"""Steps of random programs on few small tensors, slow interpreters included: elementwise, reductions, views, indexing, writes to copies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fuzz_harness import Draw, Step, pick

STEPS: list[Step] = []


def step(fn: Step) -> Step:
    STEPS.append(fn)
    return fn


def is_float(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point and t.numel() < 5000


def has_dims(t: torch.Tensor) -> bool:
    return is_float(t) and t.dim() > 0 and t.numel() > 0


UNARY = [
    torch.sin, torch.tanh, torch.sigmoid, torch.abs, torch.neg, torch.relu, F.gelu, F.silu, torch.floor, torch.sign, torch.erf,
    lambda x: x.clamp(-1, 1), lambda x: x * 0.5 + 1, lambda x: torch.where(x > 0, x, x * 0.1), lambda x: torch.exp(-x.abs()),
    lambda x: x.to(torch.bfloat16).to(torch.float32), lambda x: x.double().float(), lambda x: torch.sqrt(x.abs() + 1),
    lambda x: (x > 0).to(x.dtype), lambda x: x.masked_fill(x < -1, 0.5), lambda x: x.pow(2), lambda x: 1 / (x.abs() + 1),
]  # fmt: skip
BINARY = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: a / (b.abs() + 1), torch.atan2,
    lambda a, b: torch.lerp(a, b, 0.3),
]  # fmt: skip


@step
def unary(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, is_float)
    return None if x is None else r.choice(UNARY)(x)


@step
def binary(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    a, b = pick(r, have, is_float), pick(r, have, is_float)
    if a is None or b is None or a.dtype is not b.dtype:
        return None
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return None
    return r.choice(BINARY)(a, b)


@step
def reduction(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, has_dims)
    if x is None:
        return None
    dim, keep = r.randrange(x.dim()), r.random() < 0.5
    fn = r.choice([torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp, torch.prod])
    return fn(x, dim, keepdim=keep)


@step
def whole(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, has_dims)
    return None if x is None else r.choice([torch.sum, torch.mean, torch.amax, lambda x: x.abs().max()])(x)


@step
def normal(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, has_dims)
    if x is None:
        return None
    dim = r.randrange(x.dim())
    n = x.shape[-1]
    return r.choice([
        lambda: torch.softmax(x, dim), lambda: torch.log_softmax(x, dim), lambda: F.layer_norm(x, (n,)), lambda: torch.cumsum(x, dim),
        lambda: torch.var(x, dim, correction=0), lambda: x - x.mean(dim, keepdim=True), lambda: x / (x.norm(dim=dim, keepdim=True) + 1),
        lambda: torch.cummax(x, dim)[0], lambda: x.argmax(dim).to(x.dtype), lambda: x.max(dim)[0],
    ])()  # fmt: skip


@step
def view(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, has_dims)
    if x is None:
        return None
    d, e = r.randrange(x.dim()), r.randrange(x.dim())
    n = x.shape[d]
    return r.choice([
        lambda: x.transpose(d, e), lambda: x.unsqueeze(d), lambda: x.reshape(-1), lambda: x.flip(d), lambda: x.roll(1, d),
        lambda: x.narrow(d, n // 2, n - n // 2), lambda: x.select(d, n - 1), lambda: x[..., ::2], x.squeeze,
        lambda: x.reshape(n, -1) if d == 0 else x.flatten(), lambda: x.expand(2, *x.shape), lambda: x.movedim(d, e),
        lambda: x.repeat_interleave(2, d), lambda: torch.tril(x) if x.dim() > 1 else x.neg(), x.contiguous,
        lambda: x.diagonal() if x.dim() > 1 else x,
    ])()  # fmt: skip


@step
def joined(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, has_dims)
    if x is None:
        return None
    d = r.randrange(x.dim())
    pad = [r.randrange(3), r.randrange(2)]
    return r.choice([
        lambda: torch.cat([x, x * 2], d), lambda: torch.stack([x, x.sin()], d), lambda: F.pad(x, pad), lambda: F.pad(x, pad, value=1.5),
        lambda: torch.cat(torch.chunk(x, 2, d)[::-1], d),
    ])()  # fmt: skip


@step
def indexed(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, has_dims)
    if x is None:
        return None
    d = r.randrange(x.dim())
    index = (x.detach().abs().sum() * 0).long() + torch.arange(x.shape[d], device=x.device).flip(0)
    each = index.view([-1 if k == d else 1 for k in range(x.dim())]).expand(x.shape)
    wide = each // 2
    once = wide if x.device.type == "cpu" else each  # elsewhere any one of several wins
    return r.choice([
        lambda: x.index_select(d, index), lambda: x.gather(d, wide), lambda: torch.zeros_like(x).scatter_add(d, wide, x),
        lambda: x.index_add(d, index // 2, x), lambda: x[index] if d == 0 else x.take(index), lambda: x.scatter(d, once, x),
    ])()  # fmt: skip


@step
def written(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    """In-place work on a copy, and on what others see."""
    x = pick(r, have, has_dims)
    if x is None:
        return None
    y = x.clone()
    r.choice([
        lambda: y.add_(1), lambda: y[0].mul_(2), lambda: y.select(-1, 0).fill_(3), lambda: y.transpose(0, -1).sub_(0.5),
        lambda: y.copy_(x.sin()),
        lambda: y.narrow(0, 0, 1).copy_(x.narrow(0, 0, 1) * 2), y.relu_,
    ])()  # fmt: skip
    return y


@step
def product(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, lambda t: has_dims(t) and t.dim() == 2)
    return None if x is None else x @ x.t()


SHAPES = [(4, 6), (6,), (3, 4, 6), (1, 6), (4, 1), (2, 3, 4), (5, 5)]


def arguments(seed: int) -> tuple[torch.Tensor, ...]:
    r = Draw(seed)
    g = torch.Generator().manual_seed(seed)
    args = tuple(torch.randn(r.choice(SHAPES), generator=g) for _ in range(r.randrange(1, 4)))
    if r.random() < 0.3:
        args = tuple(a.to(torch.bfloat16 if r.random() < 0.5 else torch.float64) if r.random() < 0.5 else a for a in args)
    return args
