"""Random modules with what happens to them between calls: other weights (loaded, assigned, written through .data and views), other sizes,
dtypes, memory orders and modes, copies and pickles of the compiled module, threads that call while weights change, calls after a fork.
Every call is compared with an eager twin that lives the same life.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_modules.py FIRST LAST STEPS
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import fuzz_harness
import torch
from fuzz_harness import DEVICE, HALF, Draw, check, shaken
from fuzz_layers import laid
from torch import nn

import torchsmith

CHANNELS = (4, 8, 16, 20)


class Attend(nn.Module):
    """Sequences of 16 features, with a buffer that counts calls."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.inner, self.out = heads, nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        b, n, _ = x.shape
        q, k, v = self.inner(x).view(b, n, 3, self.heads, 16 // self.heads).permute(2, 0, 3, 1, 4)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, 16))


class Twice(nn.Module):
    """One layer used twice: its weights are tied."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.same = inner, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(torch.tanh(self.inner(x))) + x


def image_module(r: Draw) -> tuple[nn.Module, Callable[[Draw], torch.Tensor]]:
    c = first = r.choice((1, 3, 8))
    layers: list[nn.Module] = []
    for _ in range(r.randrange(1, 4)):
        out = r.choice(CHANNELS)
        k = r.choice((1, 3))
        layers.append(
            r.choice([
                lambda c=c, out=out, k=k: nn.Conv2d(c, out, k, padding=k // 2, stride=r.choice((1, 2))),
                lambda c=c, out=out: nn.ConvTranspose2d(c, out, 2, stride=2),
                lambda c=c, k=k: nn.Conv2d(c, c, k, padding=k // 2, groups=c, bias=False),
            ])()
        )  # fmt: skip
        c = layers[-1].out_channels  # type: ignore[assignment]
        norms = [lambda c=c: nn.BatchNorm2d(c), lambda c=c: nn.GroupNorm(2 if c % 2 == 0 else 1, c)]
        layers.append(r.choice([nn.ReLU, nn.SiLU, lambda: nn.MaxPool2d(2, 1), *norms])())
    if r.random() < 0.5:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, r.choice((1, 3, 17)))]

    def made(r: Draw) -> torch.Tensor:
        x = torch.randn(r.choice((1, 1, 2, 3)), first, r.choice((6, 9, 14)), r.choice((6, 9, 14)))
        return laid(r, x)

    return nn.Sequential(*layers), made


def sequence_module(r: Draw) -> tuple[nn.Module, Callable[[Draw], torch.Tensor]]:
    layers = [
        r.choice([
            lambda: Attend(r.choice((1, 2, 4))), lambda: nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16)),
            lambda: Twice(nn.Linear(16, 16)), lambda: nn.Softmax(-1), lambda: nn.Linear(16, 16), lambda: nn.LayerNorm(16),
        ])() for _ in range(r.randrange(1, 4))
    ]  # fmt: skip
    layers.append(nn.Linear(16, r.choice((1, 2, 5, 30)), bias=r.random() < 0.5))

    def made(r: Draw) -> torch.Tensor:
        x = torch.randn(r.choice((1, 1, 2, 3)), r.choice((0, 1, 2, 5, 8, 33)), 16)
        turned = x.transpose(0, 1).contiguous().transpose(0, 1)
        return r.choice([x, turned, x.repeat(1, 1, 2)[..., ::2], x[:1].expand(x.shape)])

    return nn.Sequential(*layers), made


def new_state(module: nn.Module, r: Draw) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(r.randrange(1 << 30))
    state = module.state_dict().items()
    return {k: (torch.rand(v.shape, generator=g) - 0.4).to(v) if v.is_floating_point() else v.clone() for k, v in state}


def happens(r: Draw, twins: Sequence[nn.Module]) -> str:
    """Something that changes both modules in the same way."""
    state, kind, at = new_state(twins[0], r), r.randrange(11), r.randrange(1 << 20)
    for m in twins:
        parameters = list(m.parameters())
        p = parameters[at % len(parameters)]
        with torch.no_grad():
            if kind == 0:
                m.load_state_dict(state)
            elif kind == 1:
                m.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
            elif kind == 2:
                p.data.mul_(-0.5)  # the whole tensor: seen though nothing counts it, but on a device
                if DEVICE != "cpu":
                    torchsmith.refreeze(m)
            elif kind == 3:
                p.data = p.data.clone() + 0.25
            elif kind == 4:
                p.select(0, -1).fill_(0.75)
            elif kind == 5:
                p.numpy().__imul__(0.5) if p.dtype is torch.float32 and p.device.type == "cpu" else p.mul_(0.5)
            elif kind == 6:
                owner = next(x for x in m.modules() if p in set(x.parameters(recurse=False)))
                name = next(n for n, q in owner.named_parameters(recurse=False) if q is p)
                setattr(owner, name, nn.Parameter(p.detach().flip(0)))
            elif kind == 7:
                m.train(not m.training)
            elif kind == 8:
                m.to(memory_format=torch.channels_last) if any(q.dim() == 4 for q in parameters) else m.eval()
            elif kind == 9:
                m.to([torch.float64, torch.bfloat16, torch.float32][at % 3])
            else:
                p.requires_grad_(not p.requires_grad)
    return ["load", "assign", "data", "data set", "view", "numpy", "setattr", "train", "channels last", "dtype", "requires_grad"][kind]


def moved(compiled: Any, r: Draw) -> Any:
    """The compiled module, or a copy of it; what it is compared with stays."""
    how = r.randrange(6)
    if how == 0:
        return copy.deepcopy(compiled)
    if how == 1:
        return pickle.loads(pickle.dumps(compiled))
    if how == 2:
        file = io.BytesIO()
        torch.save(compiled, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    return compiled


def near_of(module: nn.Module, mixed: bool) -> float:
    return 5e-2 if mixed or HALF & {p.dtype for p in module.parameters()} else 1e-3


def forked(compiled: Any, twin: nn.Module, x: torch.Tensor) -> bool:
    """Does the compiled module do in a child of a fork what eager does here? One thread: torch's own kernels wait forever for the threads
    that a child has lost."""
    want = twin(x)
    child = os.fork()
    if child == 0:
        code = 2
        try:
            signal.alarm(1200)
            torch.set_num_threads(1)
            code = 0 if torch.allclose(compiled(x), want, 5e-2, 5e-2, equal_nan=True) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def threaded(twin: nn.Module, compiled: Any, made: Callable[[Draw], torch.Tensor], r: Draw) -> None:
    """Two threads with sizes of their own while a third loads one of two sets of weights: a result is that of weights as they were before a
    call or after it, and, as tensors are copied one by one, perhaps of some of each; once they rest, of the last."""
    inputs = [made(r).to(next(twin.parameters())) for _ in range(2)]
    states, wrong = [new_state(twin, r) for _ in range(2)], list[str]()
    try:
        shapes = [copy.deepcopy(twin)(x).shape for x in inputs]
    except (RuntimeError, ValueError):
        return  # a window larger than its image

    def calls(x: torch.Tensor, shape: torch.Size) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    if compiled(x).shape != shape:
                        wrong.append("shape")
        except Exception as error:  # handed to the main thread
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=calls, args=(x, s)) for x, s in zip(inputs, shapes, strict=True)]
    for t in threads:
        t.start()
    for k in range(10):
        compiled.load_state_dict(states[k % 2])
    for t in threads:
        t.join()
    assert not wrong, wrong[0]
    twin.load_state_dict({k: v.clone() for k, v in compiled.state_dict().items()})
    for x in inputs:
        before = copy.deepcopy(twin)
        check([compiled(x)], [twin(x)], near_of(twin, False), lambda k, x=x, m=before: _again(m, x, k)[:1], "after threads")


def compare(seed: int, steps: int) -> list[str]:
    """Raises when a call differs from the twin's."""
    torchsmith.compiler.reset()
    r = Draw(seed)
    torch.manual_seed(seed)
    module, made = r.choice((image_module, sequence_module))(r)
    module.eval().to(DEVICE)
    twin = copy.deepcopy(module)
    compiled: Any = torchsmith.compile(module)
    story = []
    for _ in range(steps):
        if r.random() < 0.6:
            story.append(happens(r, [compiled, twin]))
        if r.random() < 0.3:
            compiled = moved(compiled, r)
            story.append("moved")
        mixed, grad = r.random() < 0.15, r.random() < 0.1
        x = made(r).to(next(twin.parameters()))
        if twin.training and x.numel() <= x.shape[1]:
            continue
        context = torch.autocast(DEVICE, dtype=torch.bfloat16) if mixed else contextlib.nullcontext()
        with context, torch.enable_grad() if grad else r.choice((torch.no_grad, torch.inference_mode))():
            before = copy.deepcopy(twin)
            try:
                want = twin(x)
            except (RuntimeError, ValueError):
                twin = before
                continue  # a norm without values, a window larger than its image
            got = compiled(x)
            check([got.detach(), *compiled.buffers()], [want.detach(), *twin.buffers()], near_of(twin, mixed),
                  lambda k, x=x, m=before: _again(m, x, k), f"{story}, {tuple(x.shape)}")  # fmt: skip
        story.append("call")
        if r.random() < 0.1 and not mixed and not grad and DEVICE == "cpu":  # CUDA cannot be used behind a fork
            with torch.no_grad():
                assert twin.training or forked(compiled, twin, x), f"{story}, forked"
            compiled.load_state_dict(twin.state_dict())
        if r.random() < 0.1 and not twin.training:
            with torch.no_grad():
                threaded(twin, compiled, made, r)
            story.append("threads")
    return []


def _again(module: nn.Module, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    module = copy.deepcopy(module)
    return [module(shaken(x, seed)).detach(), *module.buffers()]


def main(first: int, last: int, steps: int) -> int:
    return fuzz_harness.run(lambda seed: compare(seed, steps), first, last)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
