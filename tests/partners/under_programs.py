"""Small programs for torch.compile(backend="torchsmith"): what users write beside plain layers.

In: nothing. Out: PROGRAMS, name -> Program. Each is run by torch.compile and eagerly on equal arguments; results, arguments, module state
and gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan


@dataclass(frozen=True)
class Program:
    make: Callable[[], Any]  # the function or module
    calls: Callable[[], list[tuple[Any, ...]]]  # arguments, call by call
    train: bool = False  # gradients of the sum of the results' sines
    dynamic: bool | None = None
    tolerance: float = 1e-4
    heavy: bool = False


PROGRAMS: dict[str, Program] = {}


def program(calls: Callable[[], list[tuple[Any, ...]]], **how: Any) -> Callable[[Any], Any]:
    def add(fn: Any) -> Any:
        make = fn if isinstance(fn, type) else lambda: fn
        PROGRAMS[fn.__name__] = Program(make, calls, **how)
        return fn

    return add


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def g(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def _with_its_end(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x[2:]


# ---------------------------------------------------------------- inference


@program(lambda: [(r(3, 4), r(4, 5))] * 2)
def matmul_softmax(x, w):
    return torch.softmax(x @ w, -1)


@program(lambda: [(r(2, 3, 8, 8),)])
class convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)
        self.eval()

    def forward(self, x):
        return F.max_pool2d(self.b(F.silu(self.n(self.a(x)))), 2)


@program(lambda: [(r(2, 6, 8),)], heavy=True)
class attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


@program(lambda: [(r(2, 6, 8),)], train=True, heavy=True)
class attention_trained(attention):
    pass


@program(lambda: [(r(2, 6, 8),)], train=True)
class parts_trained(nn.Module):
    """Backward is given parts of a memory that no result shows whole."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.layer(x).unflatten(-1, (3, 8)).transpose(0, 2).contiguous().unbind(0)
        return (q * k).sin() * v


@program(lambda: [(r(5, 2, 4),)])
class recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 6)

    def forward(self, x):
        y, (h, c) = self.cell(x)
        return y * 2, h + c


@program(lambda: [(torch.arange(6).view(2, 3),)])
class embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4)

    def forward(self, i):
        return self.norm(self.table(i)).sum(1)


@program(lambda: [(r(4, 5), torch.tensor([1, 0, 3]))])
def indexing(x, i):
    return x[i], x[:, i].t(), x[..., None], x[x > 0].sum(), x.gather(1, i.expand(4, 3))


@program(lambda: [(r(4, 5),)])
def several_dtypes(x):
    return x.to(torch.float64).sum(), x.to(torch.int32), x > 0, x.argmax(-1), x.half() * 2


@program(lambda: [({"a": r(3), "b": [r(3), 2.5]},)])
def nested_arguments(d):
    return {"sum": d["a"] + d["b"][0] * d["b"][1], "pair": (d["a"], [d["b"][1]])}


@program(lambda: [(r(3),), (r(3),)])
def scalars_and_none(x):
    return x * 2, None, 3, "text", x.shape[0]


@program(lambda: [(r(4, 6),)])
def complex_numbers(x):
    z = torch.fft.rfft(x)
    return z.abs(), torch.fft.irfft(z * 2, n=6)


@program(lambda: [(r(3, 3),)])
def linear_algebra(x):
    return torch.linalg.inv(x @ x.t() + torch.eye(3)), torch.linalg.qr(x)[1].abs()


@program(lambda: [(r(7),)])
def sorting(x):
    return torch.sort(x, descending=True), torch.topk(x, 3)[0], x.cumsum(0), x.unique().shape


@program(lambda: [(r(0, 4), r(4, 3)), (r(2, 4), r(4, 3))])
def empty_tensors(x, w):
    return x @ w, x.sum(0), x.reshape(-1)


@program(lambda: [(r(2, 3),)])
def constants_inside(x):
    return x + torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3) + torch.full((2, 1), 4)


@program(lambda: [()] * 2)
def no_arguments():
    return torch.ones(3).cumsum(0) * 2


@program(lambda: [(r(8, 8).t()[::2],)])
def strided_inputs(x):
    return x * 2, x.contiguous().view(-1), x.sum(0)


@program(lambda: [(r(2, 3, 4, 4).to(memory_format=torch.channels_last),)])
def channels_last(x):
    return x.relu(), F.avg_pool2d(x, 2), x.mean((2, 3))


# ---------------------------------------------------------------- writes and views


@program(lambda: [(r(3, 4), r(3, 4))] * 2)
def writes_an_input(x, y):
    x.add_(y)
    x[1:].mul_(2)
    return x * y


@program(lambda: [(r(3, 4),)])
def returns_views(x):
    y = x.exp()
    return y.t(), y, y[1:], x, x.view(-1)


@program(lambda: [(r(4, 4),)])
def writes_through_views(x):
    y = x.clone()
    y.diagonal().zero_()
    y[:, 0] = 3
    y.view(-1)[2::3].neg_()
    return y, x


@program(lambda: [(r(4),)] * 3)
class counts_calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x, 0.1)
        return x - self.mean


@program(lambda: [(torch.zeros(5, 3), torch.tensor([0, 2, 0]), r(3, 3))])
def scatters(out, i, x):
    out.index_add_(0, i, x)
    out.index_put_((i,), x, accumulate=True)
    return out.scatter_reduce(0, i[:, None].expand(3, 3), x, "amax")


@program(lambda: [(r(6), r(6))])
def same_storage_twice(x, y):
    z = x[:3]
    z += y[3:]
    return x.sum(), z


@program(lambda: [_with_its_end(r(6))])
def aliased_arguments(x, y):
    y.mul_(2)
    return x + 1, y


# ---------------------------------------------------------------- sizes that vary


@program(lambda: [(r(n, 4), r(4, 3)) for n in (2, 5, 9, 1)], dynamic=True)
def any_rows(x, w):
    return torch.softmax(x @ w, 0), x.sum(0) * x.shape[0], x.reshape(-1)


@program(lambda: [(r(n, 6),) for n in (2, 4, 8)])
def rows_found_dynamic(x):
    return x.view(x.shape[0] // 2, 2, 6).mean(1), torch.arange(x.shape[0])


@program(lambda: [(r(n, m),) for n, m in ((3, 4), (6, 5), (7, 7))], dynamic=True, heavy=True)
def two_sizes(x):
    return torch.cat([x, x.t().reshape(x.shape)], 0), x.new_zeros(x.shape[1], 2 * x.shape[0]), F.pad(x, (1, 2))


@program(lambda: [(r(4), n) for n in (2, 3, 5)])
def numbers_as_arguments(x, n):
    return x * n, x.repeat(n), x.sum() / n


@program(lambda: [(r(4), n) for n in (0.5, 1.5, 2.5)])
def floats_as_arguments(x, n):
    return x * n + n**2


@program(lambda: [(r(1, 3, n, n + 2),) for n in (8, 12, 10)], dynamic=True, heavy=True)
class image_sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)

    def forward(self, x):
        return F.interpolate(self.conv(x), scale_factor=2.0, mode="nearest").mean((2, 3))


@program(lambda: [(r(n, 5),) for n in (3, 8, 2)], dynamic=True, train=True, heavy=True)
class rows_trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x) / x.shape[0]


# ---------------------------------------------------------------- training


@program(lambda: [(r(4, 3, 8, 8),)] * 2, train=True, heavy=True)
class trained_network(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))

    def forward(self, x):
        return self.net(x)


@program(lambda: [(g(3, 4), g(3, 4))], train=True)
def gradients_of_inputs(x, y):
    return (x * y).sin().sum(0), x.exp() * y.detach()


@program(lambda: [(g(3, 4), r(3, 4))], train=True)
def some_results_without_gradient(x, y):
    return x * 2, (x > 0), y + 1, x.argmax(1)


@program(lambda: [(g(4, 4),)], train=True)
def views_with_gradients(x):
    y = x * 2
    return y.t(), y[1:], x.view(-1)


@program(lambda: [(g(5, 4),)], train=True)
def writes_with_gradients(x):
    y = x * 2
    y[1:] *= 3
    y.relu_()
    return y


@program(lambda: [(r(2, 4), r(2, 3), torch.tensor([0, 2]))], train=True)
class shared_weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.c = self.a

    def forward(self, x, y, target):
        z = self.b(self.c(self.a(x).tanh()))
        return F.mse_loss(z, y) + F.cross_entropy(z, target)


@program(lambda: [(g(4, 6),)], train=True)
def checkpointed(x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda t: (t.sin() @ t.t()).relu(), x, use_reentrant=False)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


@program(lambda: [(g(4),)], train=True)
def own_function(x):
    return Cube.apply(x.sin()) * 2


@program(lambda: [(g(4, 4),)], train=True)
def not_all_used(x):
    with torch.no_grad():
        scale = x.abs().max()
    return (x / scale).cumsum(1), x.new_ones(2)


@program(lambda: [(r(3, 4),)] * 2, train=True)
class frozen_parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.a.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x).relu())


# ---------------------------------------------------------------- autocast, narrow floats, draws


@program(lambda: [(r(4, 8), r(8, 6))], tolerance=2e-2)
def autocast_inside(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y, y.float().relu()


@program(lambda: [(r(4, 8),)] * 2, train=True, tolerance=3e-2, heavy=True)
class autocast_trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(F.gelu(self.a(x)))


@program(lambda: [(r(4, 8).bfloat16(), r(8, 4).bfloat16())], tolerance=2e-2)
def bfloat16(x, w):
    return torch.softmax(x @ w, -1), (x * 2).sum(-1)


@program(lambda: [(torch.randint(0, 9, (4, 5)), torch.randint(1, 5, (4, 5)))])
def integers(x, y):
    return x // y, x % y, x << 1, x & y, (x / y), x.sum(), torch.bitwise_xor(x, y)


# ---------------------------------------------------------------- operators of graphs


@program(lambda: [(r(3, 4), g(4, 2)), (r(3, 4).abs(), g(4, 2))], train=True)
def either_branch(x, w):
    return torch.cond(x.sum() > 0, lambda x: (x @ w).sin(), lambda x: (x @ w).cos() * 2, (x,))


@program(lambda: [(r(5, 4), r(4))])
def maps_and_scans(x, w):
    carry, rows = scan(lambda c, a: (c * 0.5 + a, c + a), torch.zeros(4), x)
    return hop_map(lambda a, b: a.sin() * b, x, w), carry, rows


@torch.compiler.nested_compile_region
def region(x):
    return x.sin() * 2


@program(lambda: [(r(5, 4),)])
def one_region_twice(x):
    return region(x) + region(x + 1)


@torch.library.custom_op("torchsmith_under::accumulate", mutates_args=("x",))
def accumulate(x: torch.Tensor, y: torch.Tensor, *, k: float = 2.0) -> torch.Tensor:
    x.add_(y * k)
    return x.sum(0)


@accumulate.register_fake
def _(x, y, *, k=2.0):
    return x.new_empty(x.shape[1:])


@program(lambda: [(r(n, 3), r(n, 3)) for n in (4, 5, 7)])
def an_operator_that_writes(a, b):
    part, c = a[1:], b.t() * 1
    return accumulate(part, b[1:], k=3.0), accumulate(c, b.t()), part * 2, c


@program(lambda: [(nn.Conv2d(3, 4, 3).weight.detach(), r(n, 3, 8, 8).to(memory_format=torch.channels_last)) for n in (2, 3)], dynamic=True)
def convolutions_of_any_size(w, x):
    return F.conv2d(x, w), x.new_ones(x.shape[0] ** 2, -(-x.shape[2] // 3))


# ---------------------------------------------------------------- Python around it


@program(lambda: [(r(3),)] * 2)
def broken_in_the_middle(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y * 2 + x


@program(lambda: [(r(3),), (-torch.ones(3),)])
def branches_on_data(x):
    if x.sum() > 0:
        return x * 2
    return x - 1


@program(lambda: [(r(3), True), (r(3), False)])
def branches_on_arguments(x, flag):
    return x.sin() if flag else x.cos()


@program(lambda: [(g(3, 4),)] * 2, train=True)
class BackwardReadsWhatForwardWrote(nn.Module):
    """PyTorch's partition would compute the counters' new values again, from values that forward has written."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("scales", torch.ones(2, 4))

    def forward(self, x):
        self.count += 1
        self.scales[1] *= 1.5
        return self.inner(x) * self.count * self.scales.sum(0) * self.scales.view(8)[4:].exp()
