"""Small training programs as users write them, each run eagerly and compiled and compared step by step.

A program is a generator `program(c)`: c is `torchsmith.compile` or the identity. It trains for a few steps and yields after each what can
be seen: losses, and from `Watch` the parameters, gradients, buffers, optimizer state, and whether tensors are the same and were written.
"""

# ruff: noqa: B905  (zip as users write it)
from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Compile = Callable[..., Any]
Program = Callable[[Compile], Iterator[Any]]
PROGRAMS: dict[str, Program] = {}
TIMES = 5


def program(fn: Program) -> Program:
    assert fn.__name__ not in PROGRAMS
    PROGRAMS[fn.__name__] = fn
    return fn


class Watch:
    """What a step left of modules and optimizers, as a list of (name, value)."""

    def __init__(self, *things: Any) -> None:
        self.modules = [t for t in things if isinstance(t, nn.Module)]
        self.optimizers = [t for t in things if isinstance(t, torch.optim.Optimizer)]
        self.rest = [t for t in things if hasattr(t, "state_dict") and not isinstance(t, (nn.Module, torch.optim.Optimizer))]
        self.grads: dict[str, Any] = {}
        self.first = dict(self.tensors())
        self.versions = {n: t._version for n, t in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for i, m in enumerate(self.modules):
            yield from ((f"{i}.{n}", p) for n, p in m.named_parameters())
            yield from ((f"{i}.{n}", b) for n, b in m.named_buffers())

    def __call__(self, *values: Any) -> list[tuple[str, Any]]:
        out: list[tuple[str, Any]] = [(f"value {i}", v) for i, v in enumerate(values)]
        for name, t in self.tensors():
            out += [(name, t), (f"{name} is the same", t is self.first.get(name))]
            out.append((f"{name} was written", t._version > self.versions.get(name, 0)))
            self.versions[name] = t._version
            if isinstance(t, nn.Parameter):
                same = t.grad is not None and t.grad is self.grads.get(name, (None,))[0]
                out += [(f"{name}.grad", t.grad), (f"{name}.grad is the same", same)]
                if same:  # the counter of a gradient that is new says nothing
                    out.append((f"{name}.grad was written", t.grad._version > self.grads[name][1]))  # type: ignore[union-attr]
                self.grads[name] = (t.grad, t.grad._version if t.grad is not None else 0)
        for i, o in enumerate(self.optimizers):
            out.append((f"optimizer {i}", o.state_dict()))
            out.append((f"optimizer {i} calls", getattr(o, "_opt_called", None)))
        out += [(f"rest {i}", r.state_dict()) for i, r in enumerate(self.rest)]
        return [*out, ("generator", torch.get_rng_state())]


def frozen(value: Any) -> Any:
    """A copy of what was seen, which later steps do not change."""
    if isinstance(value, Tensor):
        marks = (tuple(value.stride()), value.requires_grad, value.is_leaf, type(value).__name__)
        return ("tensor", value.detach().clone(), marks)
    if isinstance(value, dict):
        return {k: frozen(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(v) for v in value]
    return value


def run(fn: Program, c: Compile) -> list[Any]:
    torch.manual_seed(0)
    out = []
    for i, seen in enumerate(fn(c)):
        out.append((f"step {i}", frozen(seen)))
    return out


def unlike(ours: Any, eager: Any, rtol: float = 2e-4, atol: float = 2e-5, where: str = "") -> Iterator[str]:
    """Every difference, by its place."""
    if isinstance(eager, tuple) and len(eager) == 3 and eager[0] == "tensor":
        if not (isinstance(ours, tuple) and len(ours) == 3):
            yield f"{where}: {ours} instead of a tensor {tuple(eager[1].shape)}"
            return
        a, b = ours[1], eager[1]
        if ours[2] != eager[2] or a.dtype != b.dtype or a.shape != b.shape:
            yield f"{where}: {ours[2], a.dtype, a.shape} instead of {eager[2], b.dtype, b.shape}"
        elif not torch.allclose(a.double() if a.dtype is not torch.complex64 else a, b.double() if b.dtype is not torch.complex64 else b,
                                rtol=rtol, atol=atol, equal_nan=True):
            yield f"{where}: values differ by {float((a.double() - b.double()).abs().max()):.2e} of {float(b.double().abs().max()):.2e}"
    elif isinstance(eager, dict):
        if not isinstance(ours, dict) or list(ours) != list(eager):
            yield f"{where}: {list(ours) if isinstance(ours, dict) else ours} instead of {list(eager)}"
        else:
            for k in eager:
                yield from unlike(ours[k], eager[k], rtol, atol, f"{where}[{k!r}]")
    elif isinstance(eager, (list, tuple)):
        if not isinstance(ours, (list, tuple)) or len(ours) != len(eager):
            yield f"{where}: {len(ours) if isinstance(ours, (list, tuple)) else ours} instead of {len(eager)} values"
        else:
            for i, (a, b) in enumerate(zip(ours, eager, strict=True)):
                name = b[0] if isinstance(b, (list, tuple)) and b and isinstance(b[0], str) and b[0] != "tensor" else i
                yield from unlike(a, b, rtol, atol, f"{where}/{name}")
    elif isinstance(eager, float):
        if not (isinstance(ours, float) and (abs(ours - eager) <= atol + rtol * abs(eager) or (ours != ours and eager != eager))):
            yield f"{where}: {ours!r} instead of {eager!r}"
    elif where.endswith(" was written/1") and ours is True:
        pass  # fused optimizers do not count what they write; counting it is right too
    elif type(ours) is not type(eager) or ours != eager:
        yield f"{where}: {ours!r} instead of {eager!r}"


def mlp(*sizes: int, act: Any = nn.Tanh) -> nn.Sequential:
    sizes = sizes or (6, 12, 4)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def data(n: int = 8, d: int = 6, k: int = 4, times: int = TIMES) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(times):
        yield torch.randn(n, d), torch.randint(0, k, (n,))


# ---------------------------------------------------------------- optimizers x orders, model compiled and step compiled


def _plain(name: str, make: Callable[..., Any], order: str, whole: bool, tweak: Callable[[nn.Module], None] | None = None) -> None:
    def fn(c: Compile) -> Iterator[Any]:
        model = mlp()
        if tweak is not None:
            tweak(model)
        optimizer = make(model.parameters())
        net = model if whole else c(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            if order == "first":
                optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            if order == "middle":
                optimizer.zero_grad(set_to_none=False)
            if order == "model":
                model.zero_grad()
            loss.backward()
            optimizer.step()
            if order == "last":
                optimizer.zero_grad()
            if order == "each":
                for p in model.parameters():
                    p.grad = None
            if order == "zeros":
                for p in model.parameters():
                    p.grad.zero_()
            if order == "data":
                for p in model.parameters():
                    p.grad.data.fill_(0)
            return loss

        run_step = c(step) if whole else step
        w = Watch(model, optimizer)
        for x, y in data():
            yield w(run_step(x, y))

    fn.__name__ = f"{name}_{order}_{'whole' if whole else 'apart'}"
    program(fn)


_plain("sgd", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), "each", True)
_plain("sgd_maximize", lambda p: torch.optim.SGD(p, 0.01, maximize=True, dampening=0.1, momentum=0.5), "zeros", True)
_plain("adam_amsgrad", lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1, eps=1e-3), "middle", True)
_plain("adamw_tensor_lr", lambda p: torch.optim.AdamW(p, torch.tensor(0.01), eps=1e-3, foreach=False), "model", True)
_plain("adam_capturable", lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, foreach=True), "data", True)
_plain("rmsprop", lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.3, eps=1e-3), "last", True)
_plain("adagrad", lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.1, initial_accumulator_value=0.1), "first", True)
_plain("rprop", lambda p: torch.optim.Rprop(p, 0.01), "first", False)
_plain("nadam", lambda p: torch.optim.NAdam(p, 0.01, eps=1e-3), "last", False)
_plain("sgd_fused", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True), "first", True)
_plain("adam_fused", lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, fused=True), "zeros", False)
_plain("adafactor", lambda p: torch.optim.Adafactor(p, 0.01), "first", True)
_plain("muonlike", lambda p: torch.optim.ASGD(p, 0.01), "each", True)
_plain("frozen", lambda p: torch.optim.Adam(p, 0.01, eps=1e-3), "first", True, lambda m: (m[0].requires_grad_(False), None)[1])
_plain("frozen_bias", lambda p: torch.optim.SGD(p, 0.1), "first", False, lambda m: (m[2].bias.requires_grad_(False), None)[1])


@program
def muon(c: Compile) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 12, bias=False), nn.Tanh(), nn.Linear(12, 4, bias=False))
    o = torch.optim.Muon(model.parameters(), lr=0.01)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss.detach()

    w = Watch(model, o)
    for x, y in data():
        yield [("loss", step(x, y)), *[(n, v) for n, v in w() if "optimizer" not in n and "0" in n]][:1]


# ---------------------------------------------------------------- clipping, schedules, accumulation, averages


@program
def clip_norm_and_cosine(c: Compile) -> Iterator[Any]:
    model = mlp(6, 16, 16, 4)
    o = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    s = torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)

    @c
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        o.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        o.step()
        return loss, norm

    w = Watch(model, o, s)
    for x, y in data():
        yield w(*step(x, y))
        s.step()


@program
def clip_value_inside_apart(c: Compile) -> Iterator[Any]:
    model = mlp()
    net = c(model)
    o = torch.optim.SGD(model.parameters(), 0.1)
    w = Watch(model, o)
    for x, y in data():
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        o.step()
        yield w(loss.item())


@program
def warmup_lambda_and_onecycle(c: Compile) -> Iterator[Any]:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    o = torch.optim.SGD(groups, lr=0.05, momentum=0.8)
    s = torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.2, 0.1], total_steps=10)

    @c
    def step(x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        o.zero_grad()
        loss.backward()
        o.step()
        s.step()
        return loss.item()

    w = Watch(model, o, s)
    for x, y in data():
        yield w(step(x, y), [g["lr"] for g in o.param_groups], s.get_last_lr())


@program
def plateau_and_early_stop(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.5)
    s = torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5)
    best, kept = float("inf"), None

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        loss = step(x, y).item()
        s.step(loss)
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
        yield w(loss, best, kept, o.param_groups[0]["lr"])
    model.load_state_dict(kept)
    yield w(step(x, y))


@program
def accumulate_every_two(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    o.zero_grad()

    @c
    def step(i: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if (i + 1) % 2 == 0:
            o.step()
            o.zero_grad()
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        yield w(step(i, x, y))


@program
def accumulate_in_a_loop(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        total = torch.zeros(())
        for a, b in zip(x.chunk(4), y.chunk(4)):
            loss = F.cross_entropy(model(a), b) / 4
            loss.backward()
            total += loss.detach()
        o.step()
        return total

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@program
def accumulate_apart_then_step_compiled(c: Compile) -> Iterator[Any]:
    model = mlp()
    net, o = c(model), torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    update = c(lambda: o.step())  # noqa: PLW0108
    w = Watch(model, o)
    for x, y in data():
        for a, b in zip(x.chunk(2), y.chunk(2)):
            F.cross_entropy(net(a), b).backward()
        update()
        yield w()
        o.zero_grad()


@program
def ema_copy(c: Compile) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    ema = copy.deepcopy(model).requires_grad_(False)
    o = torch.optim.SGD(model.parameters(), 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters()):
                a.mul_(0.9).add_(b, alpha=0.1)
            for a, b in zip(ema.buffers(), model.buffers()):
                a.copy_(b)
        return loss

    w = Watch(model, ema, o)
    for x, y in data():
        yield w(step(x, y))


@program
def averaged_model_and_swa(c: Compile) -> Iterator[Any]:
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1)
    swa, ema = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    s = SWALR(o, swa_lr=0.01, anneal_epochs=3)
    net = c(model)
    w = Watch(model, swa, ema, o)
    for x, y in data():
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        o.step()
        swa.update_parameters(model)
        ema.update_parameters(model)
        s.step()
        yield w(loss, swa(x))


@program
def lerp_ema_foreach(c: Compile) -> Iterator[Any]:
    model = mlp()
    shadow = [p.detach().clone() for p in model.parameters()]
    o = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        o.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(shadow, list(model.parameters()), 0.1)
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y), shadow)


# ---------------------------------------------------------------- weights: tied, added, shared, reparametrised


@program
def tied_language_model(c: Compile) -> Iterator[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(20, 16)
            self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, t: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(t.shape[1])
            return self.head(self.body(self.emb(t), src_mask=mask, is_causal=True))

    model = Net()
    o = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-2)

    @c
    def step(t: Tensor) -> Tensor:
        o.zero_grad()
        logits = model(t[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 20), t[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        o.step()
        return loss

    w = Watch(model, o)
    for _ in range(TIMES):
        yield w(step(torch.randint(0, 20, (3, 9))))


@program
def weight_norm_and_spectral_norm(c: Compile) -> Iterator[Any]:
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    model = nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(8, 8)), nn.ELU(), nn.Linear(8, 4))
    net, o = c(model), torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    w = Watch(model, o)
    for x, y in data():
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        o.step()
        yield w(loss)


@program
def unfreeze_after_two(c: Compile) -> Iterator[Any]:
    model = mlp(6, 8, 8, 4)
    model[0].requires_grad_(False)
    o = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        if i == 2:
            model[0].requires_grad_(True)
        if i == 4:
            model[4].weight.requires_grad_(False)
        yield w(step(x, y))


@program
def head_replaced_and_group_added(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.Adam(model[0].parameters(), 0.01, eps=1e-3)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        if i == 1:
            o.add_param_group({"params": model[2].parameters(), "lr": 0.05})
        if i == 3:
            model[2] = nn.Linear(12, 4)
        yield w(step(x, y))


@program
def checkpoint_saved_and_loaded(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    saved: Any = None
    for i, (x, y) in enumerate(data()):
        yield w(step(x, y))
        if i == 1:
            saved = copy.deepcopy((model.state_dict(), o.state_dict()))
        if i == 3:
            model.load_state_dict(saved[0])
            o.load_state_dict(saved[1])


@program
def learning_rate_by_hand(c: Compile) -> Iterator[Any]:
    model = mlp()

    @c
    def step(x: Tensor, y: Tensor, lr: float) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads):
                p -= lr * g
        return loss

    w = Watch(model)
    for i, (x, y) in enumerate(data()):
        yield w(step(x, y, 0.1 / (i + 1)))


@program
def data_written_by_hand(c: Compile) -> Iterator[Any]:
    model = mlp()

    @c
    def step(x: Tensor, y: Tensor) -> float:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
            p.data.clamp_(-0.5, 0.5)
        return float(loss)

    w = Watch(model)
    for x, y in data():
        yield w(step(x, y))


@program
def raw_tensors_of_the_tutorial(c: Compile) -> Iterator[Any]:
    w1, w2 = torch.randn(6, 10, requires_grad=True), torch.randn(10, 4, requires_grad=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (x.mm(w1).clamp(min=0).mm(w2) - y).pow(2).sum()
        loss.backward()
        with torch.no_grad():
            w1.sub_(1e-3 * w1.grad)
            w2.sub_(1e-3 * w2.grad)
            w1.grad.zero_()
            w2.grad.zero_()
        return loss

    step = c(step)
    for _ in range(TIMES):
        yield step(torch.randn(8, 6), torch.randn(8, 4)), w1, w2, w1.grad, w2.grad, w1._version > 0


# ---------------------------------------------------------------- hooks


@program
def gradient_hooks(c: Compile) -> Iterator[Any]:
    model, seen = mlp(), []
    model[0].weight.register_hook(lambda g: g * 0.5)
    model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
    o = torch.optim.SGD(model.parameters(), 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y), list(seen))


@program
def module_hooks(c: Compile) -> Iterator[Any]:
    model, seen = mlp(), []
    model[1].register_forward_hook(lambda m, a, out: seen.append(float(out.detach().mean())))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append(float(go[0].abs().sum())))
    model[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
    net, o = c(model), torch.optim.SGD(model.parameters(), 0.1)
    w = Watch(model, o)
    for x, y in data():
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        o.step()
        yield w(loss, list(seen))


@program
def optimizer_in_backward(c: Compile) -> Iterator[Any]:
    model = mlp()
    made = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def update(p: Tensor) -> None:
        made[p].step()
        made[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    net = c(model)
    w = Watch(model, *made.values())
    for x, y in data():
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        yield w(loss)


@program
def optimizer_hooks(c: Compile) -> Iterator[Any]:
    model, seen = mlp(), []
    o = torch.optim.SGD(model.parameters(), 0.1)
    o.register_step_pre_hook(lambda opt, a, k: seen.append("pre"))
    o.register_step_post_hook(lambda opt, a, k: seen.append("post"))

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y), list(seen))


@program
def activations_kept_by_hooks(c: Compile) -> Iterator[Any]:
    model, kept = mlp(6, 8, 8, 4), {}
    for i in (1, 3):
        model[i].register_forward_hook(lambda m, a, out, i=i: kept.__setitem__(i, out))
    o = torch.optim.SGD(model.parameters(), 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.1 * (kept[1].pow(2).mean() + kept[3].abs().mean())
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y), kept[1].shape)


@program
def retain_grad_of_hidden(c: Compile) -> Iterator[Any]:
    a, b = nn.Linear(6, 8), nn.Linear(8, 4)
    o = torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        o.zero_grad()
        h = torch.tanh(a(x))
        h.retain_grad()
        loss = F.cross_entropy(b(h), y)
        loss.backward()
        o.step()
        return loss, h.grad

    w = Watch(a, b, o)
    for x, y in data():
        yield w(*step(x, y))


# ---------------------------------------------------------------- mixed precision


def _autocast(name: str, whole: bool, inside: bool, cache: bool = True) -> None:
    def fn(c: Compile) -> Iterator[Any]:
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        o = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        net = model if whole else c(model)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            o.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=inside, cache_enabled=cache):
                out = net(x)
                loss = F.cross_entropy(out, y)
            loss.backward()
            o.step()
            return loss, out

        run_step = c(step) if whole else step
        w = Watch(model, o)
        for x, y in data():
            with contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
                found = run_step(x, y)
            yield w(*found)

    fn.__name__ = name
    fn.loose = True  # type: ignore[attr-defined]
    program(fn)


_autocast("autocast_whole", True, True)
_autocast("autocast_apart", False, True)
_autocast("autocast_no_cache", True, True, False)


@program
def scaler_with_overflow(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(o)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(o)
        scaler.update()
        return loss

    w = Watch(model, o, scaler)
    for i, (x, y) in enumerate(data()):
        yield w(step(x * (float("inf") if i == 2 else 1.0), y), scaler.get_scale())


@program
def scaler_apart_with_autocast(c: Compile) -> Iterator[Any]:
    model = mlp()
    net, o = c(model), torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    w = Watch(model, o, scaler)
    for x, y in data():
        o.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(o)
        scaler.update()
        yield w(loss)


scaler_apart_with_autocast.loose = True  # type: ignore[attr-defined]


@program
def half_precision_with_master_weights(c: Compile) -> Iterator[Any]:
    model = mlp().to(torch.bfloat16)
    master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    o = torch.optim.Adam(master, 0.01, eps=1e-2)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        for m, p in zip(master, model.parameters()):
            m.grad = p.grad.float()
            p.grad = None
        o.step()
        with torch.no_grad():
            for m, p in zip(master, model.parameters()):
                p.copy_(m)
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y), master)


half_precision_with_master_weights.loose = True  # type: ignore[attr-defined]


# ---------------------------------------------------------------- several networks


def _gan(name: str, apart: bool, penalty: bool) -> None:
    def fn(c: Compile) -> Iterator[Any]:
        g, d = mlp(4, 12, 6), nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(12, 1))
        og, od = (torch.optim.Adam(m.parameters(), 0.01, betas=(0.5, 0.99), eps=1e-2) for m in (g, d))
        gen, dis = (c(g), c(d)) if apart else (g, d)

        def critic(x: Tensor, z: Tensor) -> Tensor:
            od.zero_grad()
            fake = gen(z).detach()
            loss = F.binary_cross_entropy_with_logits(dis(x), torch.ones(len(x), 1)) + F.binary_cross_entropy_with_logits(
                dis(fake), torch.zeros(len(x), 1))
            if penalty:
                mix = (x + torch.rand(len(x), 1) * (fake - x)).requires_grad_()
                (grad,) = torch.autograd.grad(dis(mix).sum(), mix, create_graph=True)
                loss = loss + 10 * ((grad.norm(2, dim=1) - 1) ** 2).mean()
            loss.backward()
            od.step()
            return loss

        def generator(z: Tensor) -> Tensor:
            og.zero_grad()
            loss = F.binary_cross_entropy_with_logits(dis(gen(z)), torch.ones(len(z), 1))
            loss.backward()
            og.step()
            return loss

        if not apart:
            critic, generator = c(critic), c(generator)
        w = Watch(g, d, og, od)
        for _ in range(TIMES):
            yield w(critic(torch.randn(5, 6), torch.randn(5, 4)), generator(torch.randn(5, 4)))

    fn.__name__ = name
    program(fn)


_gan("gan_whole", False, False)
_gan("gan_apart", True, False)
_gan("gan_with_penalty_whole", False, True)
_gan("gan_with_penalty_apart", True, True)


@program
def gan_in_one_step(c: Compile) -> Iterator[Any]:
    g, d = mlp(4, 12, 6), mlp(6, 12, 1)
    og, od = torch.optim.RMSprop(g.parameters(), 0.01, eps=1e-2), torch.optim.RMSprop(d.parameters(), 0.01, eps=1e-2)

    @c
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.randn(len(x), 4)
        fake = g(z)
        loss_d = d(fake.detach()).mean() - d(x).mean()
        d.zero_grad()
        loss_d.backward()
        od.step()
        for p in d.parameters():
            p.data.clamp_(-0.1, 0.1)
        g.zero_grad()
        loss_g = -d(fake).mean()
        loss_g.backward()
        og.step()
        return loss_d, loss_g

    w = Watch(g, d, og, od)
    for _ in range(TIMES):
        yield w(*step(torch.randn(5, 6)))


@program
def teacher_and_student(c: Compile) -> Iterator[Any]:
    teacher, student = mlp(6, 20, 4).eval(), mlp(6, 8, 4)
    o = torch.optim.SGD(student.parameters(), 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = F.log_softmax(teacher(x) / 2.0, -1)
        out = student(x)
        loss = F.kl_div(F.log_softmax(out / 2.0, -1), soft, log_target=True, reduction="batchmean") * 4 + F.cross_entropy(out, y)
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    w = Watch(teacher, student, o)
    for x, y in data():
        yield w(step(x, y))


@program
def q_learning_with_target(c: Compile) -> Iterator[Any]:
    net, target = mlp(6, 16, 3), mlp(6, 16, 3)
    target.load_state_dict(net.state_dict())
    o = torch.optim.Adam(net.parameters(), 0.01, eps=1e-2)

    @c
    def learn(s: Tensor, a: Tensor, r: Tensor, s2: Tensor, done: Tensor) -> Tensor:
        q = net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.inference_mode(False), torch.no_grad():
            best = net(s2).argmax(1, keepdim=True)
            goal = r + 0.99 * (1 - done.float()) * target(s2).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(q, goal)
        o.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        o.step()
        for t, p in zip(target.parameters(), net.parameters()):
            t.data.copy_(t.data * 0.95 + p.data * 0.05)
        return loss

    w = Watch(net, target, o)
    for _ in range(TIMES):
        yield w(learn(torch.randn(8, 6), torch.randint(0, 3, (8,)), torch.randn(8), torch.randn(8, 6), torch.rand(8) < 0.2))


@program
def policy_gradient(c: Compile) -> Iterator[Any]:
    net = mlp(6, 16, 3)
    o = torch.optim.Adam(net.parameters(), 0.01, eps=1e-2)

    @c
    def learn(s: Tensor, a: Tensor, adv: Tensor, old: Tensor) -> Tensor:
        dist = torch.distributions.Categorical(logits=net(s))
        ratio = (dist.log_prob(a) - old).exp()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() - 0.01 * dist.entropy().mean()
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    w = Watch(net, o)
    for _ in range(TIMES):
        yield w(learn(torch.randn(8, 6), torch.randint(0, 3, (8,)), torch.randn(8), -torch.rand(8)))


@program
def contrastive_with_queue(c: Compile) -> Iterator[Any]:
    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = mlp(6, 12, 8), mlp(6, 12, 8)
            self.k.load_state_dict(self.q.state_dict())
            self.k.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def push(self, keys: Tensor) -> None:
            n, at = keys.shape[0], int(self.ptr)
            self.queue[:, at:at + n] = keys.T
            self.ptr[0] = (at + n) % 16

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            q = F.normalize(self.q(a), dim=1)
            with torch.no_grad():
                for x, y in zip(self.q.parameters(), self.k.parameters()):
                    y.data = y.data * 0.99 + x.data * 0.01
                k = F.normalize(self.k(b), dim=1)
            pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
            neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
            logits = torch.cat([pos, neg], 1) / 0.07
            self.push(k)
            return logits, torch.zeros(len(a), dtype=torch.long)

    model = MoCo()
    o = torch.optim.SGD(model.q.parameters(), 0.01, momentum=0.9)

    @c
    def step(a: Tensor, b: Tensor) -> Tensor:
        logits, labels = model(a, b)
        loss = F.cross_entropy(logits, labels)
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for _ in range(TIMES):
        yield w(step(torch.randn(4, 6), torch.randn(4, 6)))


@program
def simclr(c: Compile) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8))
    net, o = c(model), torch.optim.SGD(model.parameters(), 0.05)

    def loss_of(a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(torch.cat([a, b]), dim=1)
        sim = z @ z.T / 0.5
        sim.fill_diagonal_(float("-inf"))
        n = len(a)
        return F.cross_entropy(sim, torch.cat([torch.arange(n) + n, torch.arange(n)]))

    loss_fn = c(loss_of)
    w = Watch(model, o)
    for _ in range(TIMES):
        o.zero_grad()
        loss = loss_fn(net(torch.randn(6, 6)), net(torch.randn(6, 6)))
        loss.backward()
        o.step()
        yield w(loss)


# ---------------------------------------------------------------- sequences


def _recurrent(name: str, kind: Any, whole: bool, **kw: Any) -> None:
    def fn(c: Compile) -> Iterator[Any]:
        core, head = kind(5, 8, batch_first=True, **kw), nn.Linear(8 * (2 if kw.get("bidirectional") else 1), 3)
        o = torch.optim.Adam([*core.parameters(), *head.parameters()], 0.01, eps=1e-2)
        inner = core if whole else c(core)

        def step(x: Tensor, y: Tensor, h: Any) -> Any:
            o.zero_grad()
            out, h = inner(x, h)
            loss = F.cross_entropy(head(out[:, -1]), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(core.parameters(), 0.5)
            o.step()
            return loss, (tuple(t.detach() for t in h) if isinstance(h, tuple) else h.detach())

        run_step = c(step) if whole else step
        w, h = Watch(core, head, o), None
        for _ in range(TIMES):
            loss, h = run_step(torch.randn(4, 6, 5), torch.randint(0, 3, (4,)), h)
            yield w(loss, h)

    fn.__name__ = name
    program(fn)


_recurrent("lstm_carried_state", nn.LSTM, True)
_recurrent("gru_two_layers_dropout", nn.GRU, True, num_layers=2, dropout=0.3)
_recurrent("rnn_bidirectional_apart", nn.RNN, False, bidirectional=True)
_recurrent("lstm_projected", nn.LSTM, False, num_layers=2)


@program
def lstm_cells_by_hand(c: Compile) -> Iterator[Any]:
    cell, head = nn.LSTMCell(5, 8), nn.Linear(8, 5)
    o = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1)

    @c
    def step(x: Tensor) -> Tensor:
        h = s = torch.zeros(x.shape[1], 8)
        loss = 0.0
        for t in range(x.shape[0] - 1):
            h, s = cell(x[t], (h, s))
            loss = loss + F.mse_loss(head(h), x[t + 1])
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    w = Watch(cell, head, o)
    for i in range(TIMES):
        yield w(step(torch.randn(4 + i % 2, 3, 5)))


@program
def packed_sequences(c: Compile) -> Iterator[Any]:
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    emb, core, head = nn.Embedding(12, 5, padding_idx=0), nn.GRU(5, 8, batch_first=True), nn.Linear(8, 3)
    o = torch.optim.Adam([*emb.parameters(), *core.parameters(), *head.parameters()], 0.01, eps=1e-2)

    @c
    def step(t: Tensor, n: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        packed = pack_padded_sequence(emb(t), n, batch_first=True, enforce_sorted=False)
        out, h = core(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        loss = F.cross_entropy(head(h[-1]) + head(out.sum(1)), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(emb, core, head, o)
    for _ in range(TIMES):
        yield w(step(torch.randint(1, 12, (4, 6)), torch.tensor([6, 3, 4, 1]), torch.randint(0, 3, (4,))))


@program
def teacher_forcing(c: Compile) -> Iterator[Any]:
    emb, core, head = nn.Embedding(12, 8), nn.GRUCell(8, 8), nn.Linear(8, 12)
    o = torch.optim.SGD([*emb.parameters(), *core.parameters(), *head.parameters()], 0.1)

    def step(t: Tensor, forced: bool) -> Tensor:
        h, token, loss = torch.zeros(len(t), 8), t[:, 0], torch.zeros(())
        for i in range(1, t.shape[1]):
            h = core(emb(token), h)
            logits = head(h)
            loss = loss + F.cross_entropy(logits, t[:, i])
            token = t[:, i] if forced else logits.argmax(-1).detach()
        o.zero_grad()
        (loss / t.shape[1]).backward()
        o.step()
        return loss

    step = c(step)
    w = Watch(emb, core, head, o)
    for i in range(TIMES):
        yield w(step(torch.randint(0, 12, (3, 4)), i % 2 == 0))


@program
def ctc(c: Compile) -> Iterator[Any]:
    core, head = nn.Conv1d(5, 8, 3, padding=1), nn.Linear(8, 6)
    o = torch.optim.SGD([*core.parameters(), *head.parameters()], 0.1)

    @c
    def step(x: Tensor, y: Tensor, n: Tensor, m: Tensor) -> Tensor:
        o.zero_grad()
        lp = head(F.relu(core(x)).permute(2, 0, 1)).log_softmax(-1)
        loss = F.ctc_loss(lp, y, n, m, zero_infinity=True)
        loss.backward()
        o.step()
        return loss

    w = Watch(core, head, o)
    for _ in range(TIMES):
        yield w(step(torch.randn(2, 5, 9), torch.randint(1, 6, (2, 3)), torch.tensor([9, 7]), torch.tensor([3, 2])))


# ---------------------------------------------------------------- graphs, bags, experts, diffusion, images


@program
def scatter_graph_net(c: Compile) -> Iterator[Any]:
    class Conv(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.lin, self.att = nn.Linear(a, b), nn.Linear(2 * b, 1)

        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            h = self.lin(x)
            src, dst = e
            s = F.leaky_relu(self.att(torch.cat([h[src], h[dst]], -1))).squeeze(-1)
            top = torch.full((len(x),), float("-inf")).scatter_reduce(0, dst, s, "amax")
            w = (s - top[dst]).exp()
            total = torch.zeros(len(x)).index_add(0, dst, w)
            return torch.zeros_like(h).index_add_(0, dst, h[src] * (w / total[dst]).unsqueeze(-1))

    a, b = Conv(6, 8), Conv(8, 4)
    o = torch.optim.Adam([*a.parameters(), *b.parameters()], 0.01, eps=1e-2)

    @c
    def step(x: Tensor, e: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        o.zero_grad()
        out = b(F.elu(a(x, e)), e)
        loss = F.cross_entropy(out[mask], y[mask])
        loss.backward()
        o.step()
        return loss

    w = Watch(a, b, o)
    for i in range(TIMES):
        n, e = 10, torch.randint(0, 10, (2, 30 + i))
        yield w(step(torch.randn(n, 6), e, torch.randint(0, 4, (n,)), torch.rand(n) < 0.6))


@program
def embedding_bag_with_offsets(c: Compile) -> Iterator[Any]:
    bag, head = nn.EmbeddingBag(30, 8, mode="mean"), nn.Linear(8, 4)
    o = torch.optim.Adagrad([*bag.parameters(), *head.parameters()], 0.05)

    @c
    def step(t: Tensor, off: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(head(bag(t, off)), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(bag, head, o)
    for i in range(TIMES):
        yield w(step(torch.randint(0, 30, (14 + i,)), torch.tensor([0, 3, 3, 9]), torch.randint(0, 4, (4,))))


@program
def sparse_embedding(c: Compile) -> Iterator[Any]:
    emb, head = nn.Embedding(30, 8, sparse=True), nn.Linear(8, 4)
    net, o = c(nn.Sequential(emb, head)), [torch.optim.SparseAdam(emb.parameters(), 0.01), torch.optim.SGD(head.parameters(), 0.1)]
    for _ in range(TIMES):
        for x in o:
            x.zero_grad()
        loss = F.cross_entropy(net(torch.randint(0, 30, (6,))), torch.randint(0, 4, (6,)))
        loss.backward()
        sparse = emb.weight.grad.is_sparse
        for x in o:
            x.step()
        yield loss, sparse, emb.weight, head.weight, head.weight.grad


@program
def renormalised_embedding(c: Compile) -> Iterator[Any]:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(12, 3))
    o = torch.optim.SGD(model.parameters(), 0.5)
    net = c(model)
    w = Watch(model, o)
    for _ in range(TIMES):
        o.zero_grad()
        loss = F.cross_entropy(net(torch.randint(0, 10, (4, 3))), torch.randint(0, 3, (4,)))
        loss.backward()
        o.step()
        yield w(loss)


@program
def mixture_of_experts(c: Compile) -> Iterator[Any]:
    class MoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 4), nn.ModuleList(mlp(6, 8, 6) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            p = self.gate(x).softmax(-1)
            top, which = p.topk(2, -1)
            top = top / top.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for i, e in enumerate(self.experts):
                rows, slot = torch.where(which == i)
                if rows.numel():
                    out.index_add_(0, rows, e(x[rows]) * top[rows, slot, None])
            load = F.one_hot(which[:, 0], 4).float().mean(0)
            return out, 4 * (load * p.mean(0)).sum()

    model = MoE()
    o = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-2)
    net = c(model)
    w = Watch(model, o)
    for _ in range(TIMES):
        x = torch.randn(7, 6)
        o.zero_grad()
        out, aux = net(x)
        loss = F.mse_loss(out, x.roll(1, 0)) + 0.01 * aux
        loss.backward()
        o.step()
        yield w(loss, aux)


@program
def diffusion(c: Compile) -> Iterator[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
            self.down, self.mid, self.up = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.ConvTranspose2d(8, 8, 4, 2, 1)
            self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(9, 1, 3, 1, 1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            f = torch.exp(-torch.arange(4) / 4.0 * 9.2)
            e = t[:, None].float() * f[None]
            e = self.time(torch.cat([e.sin(), e.cos()], -1))
            h = F.silu(self.norm(self.down(x)))
            h = h + F.silu(self.mid(h + e[:, :, None, None]))
            return self.out(torch.cat([self.up(h), x], 1))

    model = Net()
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    o = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-2)
    bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)

    @c
    def step(x: Tensor) -> Tensor:
        t = torch.randint(0, 50, (len(x),))
        noise = torch.randn_like(x)
        a = bar[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        o.zero_grad(set_to_none=True)
        loss.backward()
        o.step()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), model.parameters()):
                p.lerp_(q, 0.01)
        return loss

    w = Watch(model, ema, o)
    for _ in range(TIMES):
        yield w(step(torch.randn(3, 1, 8, 8)))


@program
def variational_autoencoder(c: Compile) -> Iterator[Any]:
    enc, dec = mlp(10, 12, 6), mlp(3, 12, 10)
    o = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 0.01, eps=1e-2)

    @c
    def step(x: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        mu, logvar = enc(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        rec = F.binary_cross_entropy_with_logits(dec(z), x, reduction="sum")
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        o.zero_grad()
        (rec + beta * kl).backward()
        o.step()
        return rec, kl

    w = Watch(enc, dec, o)
    for i in range(TIMES):
        yield w(*step(torch.rand(6, 10), i / 5))


def _images(name: str, whole: bool, layout: Any) -> None:
    def fn(c: Compile) -> Iterator[Any]:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12, momentum=None), nn.Hardswish(inplace=True),
            nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)).to(memory_format=layout)  # fmt: skip
        o = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        net = model if whole else c(model)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            o.zero_grad()
            out = net(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            o.step()
            return loss, (out.argmax(1) == y).float().mean()

        run_step = c(step) if whole else step
        w = Watch(model, o)
        for i in range(TIMES):
            yield w(*run_step(torch.randn(4, 3, 8, 8).to(memory_format=layout), torch.randint(0, 4, (4,))))
            if i == 2:
                model.eval()
                with torch.no_grad():
                    yield net(torch.randn(2, 3, 8, 8).to(memory_format=layout))
                model.train()

    fn.__name__ = name
    program(fn)


_images("images_whole", True, torch.contiguous_format)
_images("images_channels_last_apart", False, torch.channels_last)
_images("images_channels_last_whole", True, torch.channels_last)


@program
def segmentation_with_ignored_pixels(c: Compile) -> Iterator[Any]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8), nn.Conv2d(8, 5, 1),
                          nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False))
    o = torch.optim.SGD(model.parameters(), 0.05)
    net = c(model)
    w = Watch(model, o)
    for _ in range(TIMES):
        y = torch.randint(0, 5, (2, 8, 8))
        y[:, :2] = 255
        o.zero_grad()
        out = net(torch.randn(2, 3, 8, 8))
        p = out.softmax(1)
        dice = 1 - 2 * (p[:, 1] * (y == 1)).sum() / (p[:, 1].sum() + (y == 1).sum() + 1)
        loss = F.cross_entropy(out, y, ignore_index=255, weight=torch.tensor([1.0, 2, 1, 1, 3])) + dice
        loss.backward()
        o.step()
        yield w(loss)


@program
def mixup_and_augmented(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1)

    @c
    def step(x: Tensor, y: Tensor, lam: float) -> Tensor:
        p = torch.randperm(len(x))
        x = lam * x + (1 - lam) * x[p]
        if torch.rand(()) < 0.5:
            x = x.flip(1)
        out = model(x + 0.1 * torch.randn_like(x))
        loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[p])
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        yield w(step(x, y, 0.3 + i / 10))


@program
def last_batch_is_smaller(c: Compile) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    o = torch.optim.Adam(model.parameters(), 0.01, eps=1e-2)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for n in (8, 8, 3, 8, 5, 2):
        yield w(step(torch.randn(n, 6), torch.randint(0, 4, (n,))))


@program
def adversarial_inputs(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            F.cross_entropy(model(x + delta), y).backward()
            delta.data = (delta + 0.05 * delta.grad.sign()).clamp(-0.1, 0.1)
            delta.grad.zero_()
        o.zero_grad()
        loss = F.cross_entropy(model((x + delta).detach()), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@program
def sharpness_aware(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, e in zip(model.parameters(), moved):
                p.add_(e)
        o.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved):
                p.sub_(e)
        o.step()
        o.zero_grad()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@program
def meta_learning(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.Adam(model.parameters(), 0.01, eps=1e-2)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, params, (x[:4],)), y[:4])
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads)}
        loss = F.cross_entropy(torch.func.functional_call(model, fast, (x[4:],)), y[4:])
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@program
def activation_checkpointing(c: Compile) -> Iterator[Any]:
    from torch.utils.checkpoint import checkpoint

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3))
    head = nn.Linear(6, 4)
    o = torch.optim.SGD([*blocks.parameters(), *head.parameters()], 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        for b in blocks:
            x = checkpoint(b, x, use_reentrant=False)
        loss = F.cross_entropy(head(x), y)
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    w = Watch(blocks, head, o)
    for x, y in data():
        yield w(step(x, y))


@program
def lora(c: Compile) -> Iterator[Any]:
    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, base.in_features) * 0.1), nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + (x @ self.a.T) @ self.b.T * 2.0

    model = nn.Sequential(LoRA(nn.Linear(6, 8)), nn.GELU(), LoRA(nn.Linear(8, 4)))
    o = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01, eps=1e-2)
    net = c(model)
    w = Watch(model, o)
    for x, y in data():
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        o.step()
        yield w(loss)


@program
def trainer_class(c: Compile) -> Iterator[Any]:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.steps, self.running, self.log = model, 0, 0.0, []
            self.optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-2)
            self.train_step = c(self._step)

        def _step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            self.model.train()
            out = self.model(batch["x"])
            loss = F.cross_entropy(out, batch["y"])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.steps += 1
            return {"loss": loss.detach(), "hits": (out.argmax(-1) == batch["y"]).sum()}

    model = mlp()
    t = Trainer(model)
    w = Watch(model, t.optimizer)
    for x, y in data():
        yield w(t.train_step({"x": x, "y": y}), t.steps)


@program
def multi_task_with_learned_weights(c: Compile) -> Iterator[Any]:
    trunk, heads, s = mlp(6, 8, 8), nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 1)}), nn.Parameter(torch.zeros(2))
    o = torch.optim.Adam([*trunk.parameters(), *heads.parameters(), s], 0.01, eps=1e-2)

    @c
    def step(x: Tensor, y: Tensor, only: str | None) -> dict[str, Tensor]:
        h = F.relu(trunk(x))
        losses = {}
        if only != "b":
            losses["a"] = F.cross_entropy(heads["a"](h), y)
        if only != "a":
            losses["b"] = F.huber_loss(heads["b"](h).squeeze(-1), y.float())
        total = sum((-s[i]).exp() * v + s[i] for i, v in enumerate(losses.values()))
        o.zero_grad()
        total.backward()
        o.step()
        return losses

    w = Watch(trunk, heads, o)
    for i, (x, y) in enumerate(data()):
        yield w(step(x, y, (None, "a", "b")[i % 3]), s, s.grad)


@program
def custom_function_and_straight_through(c: Compile) -> Iterator[Any]:
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return g * (x.abs() <= 1).to(g.dtype)

    a, b = nn.Linear(6, 8), nn.Linear(8, 4)
    o = torch.optim.Adam([*a.parameters(), *b.parameters()], 0.01, eps=1e-2)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        h = Sign.apply(a(x))
        q = h + (torch.round(h * 4) / 4 - h).detach()
        loss = F.cross_entropy(b(q), y)
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    w = Watch(a, b, o)
    for x, y in data():
        yield w(step(x, y))


@program
def vector_quantised(c: Compile) -> Iterator[Any]:
    class VQ(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.Linear(6, 4), nn.Linear(4, 6)
            self.register_buffer("book", torch.randn(8, 4))
            self.register_buffer("count", torch.ones(8))
            self.register_buffer("total", self.book.clone())

        def forward(self, x: Tensor) -> Tensor:
            z = self.enc(x)
            i = torch.cdist(z, self.book).argmin(1)
            q = self.book[i]
            if self.training:
                with torch.no_grad():
                    hot = F.one_hot(i, 8).float()
                    self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.total.mul_(0.9).add_(hot.T @ z, alpha=0.1)
                    self.book.copy_(self.total / self.count.unsqueeze(1))
            return F.mse_loss(self.dec(z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q.detach())

    model = VQ()
    net, o = c(model), torch.optim.Adam(model.parameters(), 0.01, eps=1e-2)
    w = Watch(model, o)
    for x, _ in data():
        o.zero_grad()
        loss = net(x)
        loss.backward()
        o.step()
        yield w(loss)


@program
def inputs_that_are_trained(c: Compile) -> Iterator[Any]:
    model = mlp().requires_grad_(False).eval()
    image = torch.randn(1, 6).requires_grad_()
    o = torch.optim.Adam([image], 0.1, eps=1e-2)

    @c
    def step() -> Tensor:
        o.zero_grad()
        loss = -model(image)[0, 1] + 0.1 * image.abs().sum()
        loss.backward()
        image.grad.div_(image.grad.std() + 1e-6)
        o.step()
        image.data.clamp_(-1, 1)
        return loss

    for _ in range(TIMES):
        yield step(), image, image.grad, image._version > 0


@program
def gradient_reversal_domains(c: Compile) -> Iterator[Any]:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
            ctx.alpha = alpha
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            return -ctx.alpha * g, None

    f, y_head, d_head = mlp(6, 8, 8), nn.Linear(8, 4), nn.Linear(8, 2)
    o = torch.optim.SGD([*f.parameters(), *y_head.parameters(), *d_head.parameters()], 0.1)

    @c
    def step(x: Tensor, y: Tensor, x2: Tensor, alpha: float) -> Tensor:
        o.zero_grad()
        a, b = f(x), f(x2)
        domain = d_head(Reverse.apply(torch.cat([a, b]), alpha))
        where = torch.cat([torch.zeros(len(a)), torch.ones(len(b))]).long()
        loss = F.cross_entropy(y_head(a), y) + F.cross_entropy(domain, where)
        loss.backward()
        o.step()
        return loss

    w = Watch(f, y_head, d_head, o)
    for i, (x, y) in enumerate(data()):
        yield w(step(x, y, torch.randn(5, 6), i / 5))


@program
def loader_and_epochs(c: Compile) -> Iterator[Any]:
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    o = torch.optim.SGD(model.parameters(), 0.1)
    s = torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
    x, y = torch.randn(20, 6), torch.randint(0, 4, (20,))
    criterion = nn.CrossEntropyLoss()

    @c
    def epoch(loader: Any) -> float:
        model.train()
        total = 0.0
        for a, b in loader:
            o.zero_grad()
            loss = criterion(model(a), b)
            loss.backward()
            o.step()
            total += loss.item() * len(a)
        return total / 20

    w = Watch(model, o)
    for _ in range(3):
        found = epoch(DataLoader(TensorDataset(x, y), 8, shuffle=True))
        s.step()
        yield w(found)
        model.eval()
        with torch.no_grad():
            yield c(model)(x)


@program
def two_losses_retained(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        out = model(x)
        a, b = F.cross_entropy(out, y), out.pow(2).mean()
        a.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        o.zero_grad()
        b.backward()
        with torch.no_grad():
            for p, g in zip(model.parameters(), first):
                dot = (p.grad * g).sum()
                if p.grad is not None:
                    p.grad = p.grad + g - torch.where(dot < 0, dot / (g.pow(2).sum() + 1e-9), torch.zeros(())) * g
        o.step()
        return a

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@program
def gradient_noise_and_centralised(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-3 * sum(p.abs().sum() for p in model.parameters())
        loss.backward()
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@program
def own_optimizer(c: Compile) -> Iterator[Any]:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), wd: float = 0.1) -> None:
            super().__init__(params, {"lr": lr, "betas": betas, "wd": wd})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if len(state) == 0:
                        state["m"] = torch.zeros_like(p)
                    m, (b1, b2) = state["m"], group["betas"]
                    p.mul_(1 - group["lr"] * group["wd"])
                    u = m.mul(b1).add_(p.grad, alpha=1 - b1)
                    p.add_(torch.tanh(u * 100), alpha=-group["lr"])
                    m.mul_(b2).add_(p.grad, alpha=1 - b2)

    model = mlp()
    o = Lion(model.parameters())

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@program
def step_with_closure(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            o.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return o.step(closure)

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@program
def skipped_when_not_finite(c: Compile) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model.parameters(), 0.1)

    @c
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            return loss
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        yield w(step(x * (float("nan") if i == 2 else 1), y))


@program
def complex_weights(c: Compile) -> Iterator[Any]:
    wr = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))
    o = torch.optim.Adam([wr], 0.01, eps=1e-2)

    @c
    def step(x: Tensor) -> Tensor:
        o.zero_grad()
        loss = (torch.fft.irfft(torch.fft.rfft(x) @ wr, n=8)).pow(2).mean()
        loss.backward()
        o.step()
        return loss

    for _ in range(TIMES):
        yield step(torch.randn(3, 8)), wr, wr.grad
