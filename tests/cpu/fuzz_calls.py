"""Random programs of calls: contractions beside 8-byte values, writes through chains of views, reductions of reductions, results that
share memory with each other and with inputs. Compiled as users compile, called with several sizes, compared with eager: results, inputs
afterwards, and who shares memory with whom.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_calls.py FIRST LAST STEPS
"""

from __future__ import annotations

import math
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import torchsmith
from torchsmith import events


class Draw:
    """Random numbers in Python that can be captured."""

    def __init__(self, seed: int) -> None:
        self.state = (seed * 7919 + 12345) % 2147483647 or 1

    def random(self) -> float:
        self.state = self.state * 48271 % 2147483647
        return self.state / 2147483647

    def randrange(self, *bounds: int) -> int:
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        return low + int(self.random() * (high - low))

    def choice(self, values: Any) -> Any:
        return values[self.randrange(len(values))]


Step = Callable[[Draw, list[torch.Tensor]], torch.Tensor | None]
STEPS: list[Step] = []


def step(fn: Step) -> Step:
    STEPS.append(fn)
    return fn


def pick(r: Draw, have: list[torch.Tensor], wanted: Callable[[torch.Tensor], bool]) -> torch.Tensor | None:
    """One of `have`, the late ones oftener."""
    good = [t for t in have if wanted(t) and 0 < t.numel() < 20000]
    return r.choice(good[-4:] if r.random() < 0.6 else good) if good else None


def floats(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point


def rows(t: torch.Tensor) -> bool:
    return floats(t) and t.dim() >= 2


@step
def elementwise(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, floats)
    if x is None:
        return None
    return r.choice(
        [
            lambda: torch.tanh(x),
            lambda: F.gelu(x),
            lambda: x * 0.5 + 1,
            lambda: torch.where(x > 0, x, -x * 0.1),
            lambda: x.to(torch.float64),
            lambda: x.to(torch.bfloat16),
            lambda: x.to(torch.float32),
            lambda: x.clamp(-2, 2),
            lambda: torch.sigmoid(x),
            lambda: x.abs() + 1,
        ]
    )()


@step
def whole_numbers(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    """int64 and float64 values, and indices made of what was computed."""
    x = pick(r, have, lambda t: t.dim() > 0)
    if x is None:
        return None
    n = x.shape[-1]
    k = (x.to(torch.float32).nan_to_num().clamp(-50, 50) * 2).to(torch.int64)
    at = torch.remainder(k, n)
    return r.choice(
        [
            lambda: k,
            lambda: at * 3 - 1,
            lambda: x.gather(-1, at),
            lambda: x + k.to(x.dtype),
            lambda: x.argmax(-1),
            lambda: torch.zeros_like(x).scatter_add(-1, at, x),
            lambda: x.to(torch.float64) * k,
            lambda: (k > 3) & (at < 2),
            lambda: k // 3,
            lambda: x.index_select(-1, at.reshape(-1)[:5]),
            lambda: torch.bucketize(x.to(torch.float32), torch.arange(5.0)),
            lambda: x.masked_fill(k % 2 == 0, 1),
        ]
    )()


@step
def contraction(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    """Products and convolutions, dense, grouped, in 32, 16 and 64 bits, beside 8-byte values."""
    x = pick(r, have, lambda t: rows(t) and t.shape[-1] <= 64)
    if x is None:
        return None
    turn = r.randrange(5) + 0.7

    def weights(*shape: int) -> torch.Tensor:
        return (torch.arange(math.prod(shape)) * turn).sin().view(shape) / 2

    dtype = r.choice([x.dtype, torch.float32, torch.bfloat16, torch.float16, torch.float64])
    a = x.to(dtype).clamp(-4, 4)
    c = r.choice([4, 8, 16])
    w = weights(c, a.shape[-1]).to(dtype)

    def conv(groups: int, channels: int) -> torch.Tensor:
        flat = a.reshape(1, 1, -1, a.shape[-1]).expand(1, channels, -1, -1).contiguous()
        k = weights(channels, channels // groups, 3, 3).to(dtype)
        y = F.conv2d(flat, k, padding=1, groups=groups)
        return y + torch.arange(y.shape[-1]).to(torch.int64) if r.random() < 0.3 else y

    y = r.choice(
        [
            lambda: F.linear(a, w),
            lambda: a @ a.transpose(-1, -2),
            lambda: F.linear(a, w).to(torch.float64) + torch.arange(c),
            lambda: torch.where(F.linear(a, w) > 0, torch.arange(c), -1),
            lambda: conv(1, 4),
            lambda: conv(4, 8),
            lambda: conv(8, 8),
            lambda: conv(2, 32),
            lambda: F.linear(a, w).argmax(-1),
            lambda: F.softmax(F.linear(a, w), -1) @ w,
        ]
    )()
    return y.reshape(-1, y.shape[-1])[:40] if y.dim() > 3 else y


@step
def reductions(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    """A reduction of a reduction."""
    x = pick(r, have, rows)
    if x is None:
        return None
    d, e = r.randrange(x.dim()), r.randrange(x.dim())
    one = r.choice([torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp, torch.var])
    two = r.choice([torch.sum, torch.mean, torch.amax, torch.amin])
    return r.choice(
        [
            lambda: two(one(x, d, keepdim=True) * x, e),
            lambda: two(one(x, d, keepdim=True), e),
            lambda: x - one(x, d, keepdim=True),
            lambda: torch.softmax(x, d).cumsum(e),
            lambda: F.layer_norm(x, x.shape[-1:]).amax(d),
            lambda: two(x.cumsum(d), e),
            lambda: (x - x.mean(d, keepdim=True)).pow(2).mean(e),
            lambda: x.max(d)[0].sum(-1),
            lambda: two(x.max(d, keepdim=True)[1].float(), e),
        ]
    )()


@step
def views(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    x = pick(r, have, lambda t: t.dim() > 0)
    if x is None:
        return None
    d, e = r.randrange(x.dim()), r.randrange(x.dim())
    n = x.shape[d]
    return r.choice(
        [
            lambda: x.transpose(d, e),
            lambda: x.unsqueeze(d),
            lambda: x.narrow(d, n // 2, n - n // 2),
            lambda: x.select(d, n - 1),
            lambda: x[..., ::2],
            lambda: x.reshape(-1),
            lambda: x.flip(d),
            lambda: x.expand(2, *x.shape) if x.dim() < 4 else x,
            x.detach,
            lambda: torch.cat([x, x], d),
            lambda: x.diagonal() if x.dim() == 2 else x,
            lambda: x.split(max(1, n // 2), d)[0],
            lambda: x.view(x.shape),
        ]
    )()


@step
def writes(r: Draw, have: list[torch.Tensor]) -> torch.Tensor | None:
    """A write, perhaps through a chain of views, to whatever it is: an input, a result, a view of either."""
    x = pick(r, have, lambda t: t.dim() > 0 and 0 not in [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1])
    if x is None or x.dtype == torch.bool:
        return None
    y = x
    for _ in range(r.randrange(3)):
        if y.dim():
            d = r.randrange(y.dim())
            n = y.shape[d]
            y = r.choice(
                [
                    lambda d=d, y=y: y.transpose(0, d),
                    lambda d=d, n=n, y=y: y.narrow(d, 0, max(1, n // 2)),
                    lambda d=d, y=y: y.select(d, 0),
                    lambda y=y: y[..., 1:] if y.shape[-1] > 1 else y,
                ]
            )()
    r.choice(
        [
            lambda: y.add_(1),
            lambda: y.mul_(2),
            lambda: y.copy_(y.flip(0) if y.dim() else y),
            lambda: y.fill_(3),
            lambda: y.clamp_(-1, 1),
            lambda: y.sub_(y.clone() if y.dtype == torch.int64 else y.mean().to(y.dtype)),
            y.zero_,
            lambda: y.masked_fill_(y > 1, 0),
            lambda: y.copy_(torch.arange(y.numel()).view(y.shape)),
            lambda: y.index_fill_(0, torch.tensor([0]), 2) if y.dim() else y.add_(2),
        ]
    )()
    return r.choice([y, x])


def program(seed: int, steps: int) -> Callable[..., Any]:
    """The function draws the same steps each time it runs, whatever the sizes."""

    def fn(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        r = Draw(seed)
        have = list(given)
        for _ in range(steps):
            made = r.choice(STEPS)(r, have)
            if made is not None:
                have.append(made)
        made = have[len(given) :]
        return tuple(t for t in have if r.random() < 0.4) or tuple(made[-1:]) or (given[0] * 2,)

    return fn


def arguments(seed: int, turn: int) -> tuple[torch.Tensor, ...]:
    r, g = Draw(seed + 1000003), torch.Generator().manual_seed(seed + turn)
    n = r.randrange(3, 9) + turn * r.choice([0, 1])
    shapes = [(n, 6), (2, n, 5), (7,), (n, 16), (3, 4), (2, 3, n)]
    args = []
    for _ in range(r.randrange(1, 4)):
        shape, kind = r.choice(shapes), r.random()
        x = torch.randn(shape, generator=g)
        args.append(
            (x * 3).to(torch.int64) if kind < 0.2 else x.to(torch.float64) if kind < 0.35 else x.to(torch.bfloat16) if kind < 0.5 else x
        )
    if r.random() < 0.2:
        args[-1] = args[-1].transpose(0, -1)
    return tuple(args)


def shared(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor the first one that lies in the same storage."""
    homes = [t.untyped_storage()._cdata if t.numel() else -k for k, t in enumerate(tensors)]
    return [homes.index(h) for h in homes]


def compare(seed: int, steps: int, calls: int = 3) -> None:
    """Raises when a compiled call differs from eager's in results, inputs afterwards, strides, or shared memory."""
    fn = program(seed, steps)
    compiled = torchsmith.compile(fn)
    for turn in range(calls):
        mine, theirs = ([x.clone(memory_format=torch.preserve_format) for x in arguments(seed, turn)] for _ in range(2))
        with torch.no_grad():
            want = fn(*theirs)
            got = compiled(*mine)
        # half precision is rounded where eager stores it, float32 nowhere else: what follows a half value is as near as that
        near = 5e-2 if any(t.dtype in (torch.bfloat16, torch.float16) for t in (*want, *theirs)) else 1e-3
        for k, (g, w) in enumerate(zip((*got, *mine), (*want, *theirs), strict=True)):
            torch.testing.assert_close(
                g, w, rtol=near, atol=near, equal_nan=True, msg=lambda m, k=k, turn=turn: f"call {turn}, tensor {k}: {m}"
            )
        assert shared([*got, *mine]) == shared([*want, *theirs]), (turn, shared([*got, *mine]), shared([*want, *theirs]))


def main(first: int, last: int, steps: int) -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wrong = 0
    for seed in range(first, last):
        torchsmith.compiler.reset()
        with events.recording() as seen:
            try:
                compare(seed, steps)
            except Exception as error:  # whatever is wrong with a seed is its result
                wrong += 1
                at = traceback.extract_tb(error.__traceback__)[-1]
                print(
                    seed, type(error).__name__, " ".join(str(error).split())[:260], f"{at.filename.split('/')[-1]}:{at.lineno}", flush=True
                )
        for e in seen:
            if e.kind in ("graph_break", "fallback") and e.fields.get("code") not in ("GRA010", "GRA001", "GRA005"):
                print(seed, e.kind, e.fields.get("code"), str(e.fields.get("detail"))[:120], flush=True)
    print(f"{last - first} programs, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
