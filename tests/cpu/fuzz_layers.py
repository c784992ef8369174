"""Random chains of layers that are trained: convolutions, pooling, norms, padding, interpolation, attention and recurrent layers, one
behind the other and side by side, in any memory order. A seed is a module, how it is compiled, and a few calls with inputs of other sizes
and layouts and gradients of other layouts. Compared with an eager twin: results, gradients of the input and of all parameters (with their
strides), buffers afterwards; or, for a compiled step, its loss and all parameters.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_layers.py FIRST LAST CALLS
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from typing import Any

import fuzz_harness
import torch
import torch.nn.functional as F
from fuzz_harness import DEVICE, HALF, Draw, check, shaken
from torch import nn

import torchsmith
from torchsmith import events
from torchsmith.graph.layout import is_dense

# ---------------------------------------------------------------- layers


class Besides(nn.Module):
    """Two parts on one input, their results joined or added."""

    def __init__(self, first: nn.Module, second: nn.Module, joins: bool) -> None:
        super().__init__()
        self.first, self.second, self.joins = first, second, joins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x), self.second(x)
        if a.shape != b.shape:
            return a
        return torch.cat([a, b], 1) if self.joins else a + b


class ChannelNorm(nn.Module):
    """A norm over the channels of an image, written with permutations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class Excite(nn.Module):
    """Channels scaled by what their means say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sigmoid(self.inner(x.flatten(2).mean(2)))
        return x * scale.view(*scale.shape, *[1] * (x.dim() - 2))


class Places(nn.Module):
    """A sequence layer on the places of an image."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])


class First(nn.Module):
    """The first result of a layer that returns several."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(*[x] * self.times)[0]


class Turned(nn.Module):
    """A function as a layer."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor], about: str) -> None:
        super().__init__()
        self.fn, self.about = fn, about

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)

    def extra_repr(self) -> str:
        return self.about


def of(n: int, name: str) -> Any:
    """nn.Conv of 2 dimensions is nn.Conv2d."""
    return getattr(nn, f"{name}{n}d")


def convolution(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    out, k = r.choice((3, 4, 8, 16)), r.choice((1, 2, 3))
    groups = r.choice((1, 1, 1, c))
    out = out if groups == 1 else c * r.choice((1, 2))
    padding, mode = r.choice((0, k // 2, "same", 1)), r.choice(("zeros", "zeros", "zeros", "reflect", "replicate", "circular"))
    stride, dilation, bias = 1 if padding == "same" else r.choice((1, 1, 2)), r.choice((1, 1, 2)), r.random() < 0.6
    return of(n, "Conv")(c, out, k, stride, padding, dilation, groups, bias, mode), out


def transposed(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    out, stride = r.choice((3, 4, 8)), r.choice((1, 2))
    return of(n, "ConvTranspose")(c, out, r.choice((1, 2, 3)), stride=stride, output_padding=stride - 1, bias=r.random() < 0.5), out


def pooling(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    k, ceil = r.choice((2, 3)), r.random() < 0.3
    stride, padding, size = r.choice((1, 2, None)), r.choice((0, 1)), tuple(r.choice((1, 2, 3, 5)) for _ in range(n))
    return r.choice([
        lambda: of(n, "MaxPool")(k, stride, padding, r.choice((1, 1, 2)), ceil_mode=ceil),
        lambda: of(n, "AvgPool")(k, stride, padding, ceil_mode=ceil, count_include_pad=r.random() < 0.5),
        lambda: of(n, "AdaptiveAvgPool")(size), lambda: of(n, "AdaptiveMaxPool")(size), lambda: of(n, "AdaptiveAvgPool")(1),
        lambda: of(n, "LPPool")(2, k, stride, ceil_mode=ceil),
    ])(), c  # fmt: skip


def norm(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    affine = r.random() < 0.7
    return r.choice([
        lambda: of(n, "BatchNorm")(c, affine=affine, track_running_stats=r.random() < 0.8, momentum=r.choice((0.1, 0.3, None))),
        lambda: of(n, "BatchNorm")(c), lambda: nn.GroupNorm(r.choice([g for g in (1, 2, 3, 4) if c % g == 0]), c, affine=affine),
        lambda: of(n, "InstanceNorm")(c, affine=affine, track_running_stats=r.random() < 0.3), lambda: nn.LocalResponseNorm(3),
        lambda: ChannelNorm(c), lambda: nn.GroupNorm(c, c),
    ])(), c  # fmt: skip


def padding(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    sides = [r.choice((0, 1, 2)) for _ in range(2 * n)]
    fill, signed = r.choice((0.0, 1.5)), [s - r.choice((0, 0, 1)) for s in sides]
    return r.choice([
        lambda: of(n, "ReflectionPad")(tuple(sides)), lambda: of(n, "ReplicationPad")(tuple(sides)),
        lambda: of(n, "CircularPad")(tuple(sides)), lambda: of(n, "ConstantPad")(tuple(signed), fill),
    ])(), c  # fmt: skip


def resampling(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    mode = r.choice(("nearest", "nearest-exact", {1: "linear", 2: "bilinear", 3: "trilinear"}[n], "bicubic" if n == 2 else "nearest"))
    align = r.choice((True, False)) if "linear" in mode or mode == "bicubic" else None
    if r.random() < 0.3:
        return nn.Upsample(size=tuple(r.choice((2, 5, 7)) for _ in range(n)), mode=mode, align_corners=align), c
    return nn.Upsample(scale_factor=r.choice((2, 1.5, 0.5)), mode=mode, align_corners=align), c


def activation(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    if c % 2 == 0 and r.random() < 0.1:
        return nn.GLU(1), c // 2
    return r.choice([
        nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.ELU, nn.LeakyReLU, lambda: nn.PReLU(c), nn.Mish, nn.Softplus, nn.Sigmoid, nn.Tanh,
        lambda: nn.Softmax(1), lambda: nn.ReLU(inplace=True), lambda: nn.Hardtanh(-0.5, 0.5), lambda: nn.LogSoftmax(1),
        lambda: nn.Dropout(0.3), lambda: of(n, "Dropout")(0.3),
    ])(), c  # fmt: skip


def moving(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    """Views, copies and channels moved about."""
    if n == 2 and r.random() < 0.3:
        return (nn.PixelShuffle(2), c // 4) if c % 4 == 0 else (nn.PixelUnshuffle(2), c * 4)
    kinds: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("x[..., ::2]", lambda x: x[..., ::2]), ("x.transpose(-1, -2)", lambda x: x.transpose(-1, -2) if x.dim() > 3 else x.flip(-1)),
        ("x.contiguous()", lambda x: x.contiguous()), ("x.roll(1, -1)", lambda x: x.roll(1, -1)), ("x.flip(1)", lambda x: x.flip(1)),
        ("x - mean", lambda x: x - x.mean((0, -1), keepdim=True)), ("x * amax", lambda x: x * x.amax(1, keepdim=True)),
        ("x.cumsum(-1)", lambda x: x.cumsum(-1)), ("normalize", lambda x: F.normalize(x, dim=1)), ("x[:, :, 1:]", lambda x: x[:, :, 1:]),
        ("channels_last", lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.clone()),
        ("x.clone().mul_", lambda x: x.clone().mul_(0.5)), ("where", lambda x: torch.where(x > 0, x, x * x)),
    ]  # fmt: skip
    about, fn = r.choice(kinds)
    return Turned(fn, about), c


def between(r: Draw, c: int, n: int) -> tuple[nn.Module, int]:
    heads = r.choice([h for h in (1, 2, 4) if c % h == 0])
    attention = nn.MultiheadAttention(c, heads, batch_first=True)
    return r.choice([lambda: Excite(c), lambda: Places(sequence_layer(r, c)), lambda: Places(First(attention, 3))])(), c


LAYERS = (
    convolution, convolution, convolution, transposed, pooling, pooling, norm, norm, padding, resampling, activation, activation, moving,
    between,
)  # fmt: skip


def layer(r: Draw, c: int, n: int, depth: int = 0) -> tuple[nn.Module, int]:
    if depth < 2 and r.random() < 0.15:
        first, out = layer(r, c, n, depth + 1)
        second, other = layer(r, c, n, depth + 1)
        if out == other:
            joins = r.random() < 0.3
            return (first, out) if joins else (Besides(first, second, joins), out)
        return first, out
    return r.choice(LAYERS)(r, c, n)


def sequence_layer(r: Draw, c: int) -> nn.Module:
    heads = r.choice([h for h in (1, 2, 4) if c % h == 0])
    return r.choice([
        lambda: nn.Sequential(nn.Linear(c, 12), nn.GELU(), nn.Linear(12, c)), lambda: nn.LayerNorm(c), lambda: nn.RMSNorm(c),
        lambda: nn.Linear(c, c, bias=False), lambda: First(nn.GRU(c, c, batch_first=True)), lambda: First(nn.LSTM(c, c, batch_first=True)),
        lambda: nn.TransformerEncoderLayer(c, heads, 16, dropout=0.0, batch_first=True, norm_first=r.random() < 0.5),
        lambda: nn.Softmax(-1), lambda: Turned(lambda x: x - x.mean(1, keepdim=True), "x - mean"),
        lambda: Turned(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "turned"),
    ])()  # fmt: skip


def drawn(r: Draw) -> tuple[nn.Module, list[int]]:
    """A module and the sizes of an input; a 0 is a size that varies."""
    n = r.choice((0, 1, 2, 2, 2, 2, 3))
    layers: list[nn.Module] = []
    if n == 0:
        c = r.choice((4, 8))
        layers = [sequence_layer(r, c) for _ in range(r.randrange(1, 4))]
        return nn.Sequential(*layers, nn.Linear(c, r.choice((1, 3)))), [0, 0, c]
    c = first = r.choice((1, 3, 4, 8))
    for _ in range(r.randrange(1, 6)):
        made, c = layer(r, c, n)
        layers.append(made)
    if r.random() < 0.3:
        layers += [of(n, "AdaptiveAvgPool")(1), nn.Flatten(), nn.Linear(c, 3)]
    return nn.Sequential(*layers), [0, first, *[0] * n]


# ---------------------------------------------------------------- memory orders


def laid(r: Draw, x: torch.Tensor) -> torch.Tensor:
    """The values of `x` in another order in memory, or an expanded part of them."""
    d = r.randrange(x.dim()) if x.dim() else 0
    ways: list[Callable[[], torch.Tensor]] = [lambda: x, lambda: x]
    if x.dim() >= 4:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        ways += [lambda: x.contiguous(memory_format=last)] * 3 if x.dim() < 6 else []
    if x.dim():
        ways += [
            lambda: torch.stack([x, x], -1)[..., 0], lambda: x.transpose(0, -1).contiguous().transpose(0, -1),
            lambda: torch.cat([x, x], d).narrow(d, x.shape[d], x.shape[d]), lambda: x.narrow(d, 0, min(1, x.shape[d])).expand(x.shape),
            lambda: x.transpose(d, -1).contiguous().transpose(d, -1),
        ]  # fmt: skip
    return r.choice(ways)()


def steps_of(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()


# ---------------------------------------------------------------- the comparison

# Of what is one image to them, whose gradient lies as channels_last, eager's derivatives of these are wrong (docs/notes/limits.md).
BATCHES = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class Plain(torch.autograd.Function):
    """The gradient comes in plain memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.contiguous()


def upright(module: nn.Module) -> nn.Module | None:
    """A copy whose derivatives are right in eager; None where the module's are."""
    module = copy.deepcopy(module)
    found = [m for m in module.modules() if isinstance(m, BATCHES)]
    for m in found:
        m.register_forward_hook(lambda m, given, out: Plain.apply(out))
    return module if found else None


def gradients(module: Any, x: torch.Tensor, come: Callable[[torch.Tensor], torch.Tensor], seed: int) -> list[torch.Tensor | None]:
    """The result and the gradients of the input and of all parameters."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    out = module(x)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [out.detach(), *torch.autograd.grad(out, wanted, come(out), allow_unused=True)]


def same(got: list[Any], want: list[Any], near: float, again: Callable[[int], list[Any]], about: str, has_strides: bool = True) -> None:
    assert [g is None for g in got] == [w is None for w in want], f"{about}: other gradients than eager's are None"
    at = [k for k, w in enumerate(want) if w is not None]
    for k in at:
        g, w = got[k], want[k]
        is_laid = not has_strides or steps_of(g) == steps_of(w)
        assert is_laid, f"{about}, tensor {k}: strides {g.stride()}, not {w.stride()}, {tuple(w.shape)}"
    check([got[k] for k in at], [want[k] for k in at], near, lambda seed: [t for t in again(seed) if t is not None], about)


def one_of(got: list[Any], wants: list[Callable[[], list[Any]]], *how: Any) -> None:
    """`same` as the first, or else, but for strides, as one of the others."""
    try:
        same(got, wants[0](), *how)
    except AssertionError:
        if len(wants) < 2:
            raise
        same(got, wants[1](), *how[:3], has_strides=False)


def optimizer_of(r: Draw) -> Callable[[Any], torch.optim.Optimizer]:
    return r.choice([
        lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, 0.01, eps=0.1), lambda p: torch.optim.AdamW(p, 0.01, eps=0.1, amsgrad=True),
    ])  # fmt: skip


def stepped(
    r: Draw, module: nn.Module, inputs: list[torch.Tensor], near: float, about: str, doing: Callable[[str], None]
) -> None:  # fmt: skip
    """A whole step as one function, called with each input twice: losses, parameters and buffers afterwards."""
    make = optimizer_of(r)
    loss_of = r.choice([lambda y: y.square().mean(), lambda y: y.sum(), lambda y: F.smooth_l1_loss(y, torch.zeros_like(y))])

    def trained(wrap: Callable[[Any], Any], shift: int | None = None, module: nn.Module = module) -> list[Any]:
        torchsmith.compiler.reset()
        mine = copy.deepcopy(module).train()
        optimizer, losses = make(mine.parameters()), []

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(mine(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = wrap(step)
        for k, x in enumerate(inputs):
            for _ in range(2):
                torch.manual_seed(k)
                losses.append(run(x if shift is None else shaken(x, shift)).clone())
        return [*losses, *(p.detach() for p in mine.parameters()), *mine.buffers()]

    doing(f"eager steps of {about}")
    try:
        want = trained(lambda f: f)
    except (RuntimeError, ValueError):
        return
    doing(f"compiled steps of {about}")
    other = upright(module)
    wants = [lambda: want, *([lambda: trained(lambda f: f, module=other)] if other is not None else [])]
    one_of(trained(torchsmith.compile), wants, near, lambda k: trained(lambda f: f, k), f"{about}, steps")


def compare(seed: int, calls: int, doing: Callable[[str], None] = lambda what: None) -> list[str]:
    """Raises what differs; the codes of what did not run natively."""
    torchsmith.compiler.reset()
    r = Draw(seed)
    torch.manual_seed(seed)
    module, sizes = drawn(r)
    is_recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())  # derivatives of inputs in a memory order that no one has
    dtype = r.choice((torch.float32,) * 6 + (torch.float64, torch.bfloat16))
    module.train(r.random() < 0.7).to(DEVICE, dtype)
    if len(sizes) == 4 and r.random() < 0.4:
        module.to(memory_format=torch.channels_last)
    for p in module.parameters():
        p.requires_grad_(r.random() < 0.9)
    mixed, near = r.random() < 0.1, 1e-3
    near = 5e-2 if dtype in HALF or mixed else near
    dynamic = r.choice((None, None, False, True))
    compiled: Any = torchsmith.compile(copy.deepcopy(module), dynamic=dynamic)
    inputs = []
    with events.recording() as recorded:
        for k in range(calls):
            shape = [n or r.choice((1, 2, 3) if d == 0 else (4, 5, 7, 8)) for d, n in enumerate(sizes)]
            x = torch.randn(shape).to(DEVICE, dtype)
            x = x if is_recurrent else laid(r, x)
            layout = r.randrange(1 << 20)

            def come(out: torch.Tensor, layout: int = layout) -> torch.Tensor:
                g = torch.linspace(-1, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
                return laid(Draw(layout), g)

            context = torch.autocast(DEVICE, dtype=torch.bfloat16) if mixed else contextlib.nullcontext()
            with context:
                before = copy.deepcopy(module)
                about = f"{module}\ncall {k} {tuple(x.shape)} strides {x.stride()} {dtype}{' autocast' if mixed else ''}"
                doing(f"eager {about}")
                try:
                    want = gradients(module, x, come, k)
                except (RuntimeError, ValueError):
                    module.load_state_dict(before.state_dict())
                    continue  # a window larger than its image, a norm of one value
                doing(f"compiled {about}")
                got = gradients(compiled, x, come, k)

                def again(shift: int, x: torch.Tensor = x, come: Any = come, before: nn.Module = before, k: int = k) -> list[Any]:
                    other = copy.deepcopy(before)
                    return [*gradients(other, shaken(x, shift), come, k), *other.buffers()]

                # docs/notes/limits.md: sizes of 1 among those that vary; and what comes with gaps, or expanded
                is_steady = dynamic is False or (1 not in shape[2:] and shape[0] > 1)
                has_strides = is_steady and is_dense(x) and is_dense(come(want[0]))
                wants = [lambda want=want: [*want, *module.buffers()]]
                if (other := upright(before)) is not None:
                    wants.append(lambda other=other, x=x, come=come, k=k: [*gradients(other, x, come, k), *other.buffers()])
                one_of([*got, *compiled.buffers()], wants, near, again, about, has_strides)
            inputs.append(x)
        if inputs and not mixed and any(p.requires_grad for p in module.parameters()) and r.random() < 0.35:
            stepped(r, module, inputs[:2], near, str(module), doing)
    seen = [e for e in recorded if e.kind in ("graph_break", "fallback")]
    return [f"{e.kind} {e.fields.get('code')} {str(e.fields.get('detail'))[:600]}" for e in seen]


def main(first: int, last: int, calls: int) -> int:
    return fuzz_harness.run(lambda seed: compare(seed, calls), first, last)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
