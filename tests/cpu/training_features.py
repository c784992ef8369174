"""What training code may use, one small program each, compiled as a whole step and as a model alone; see training_programs.py."""

# ruff: noqa: B905  (programs as users write them)
from __future__ import annotations

import collections
import copy
import dataclasses
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from training_programs import Compile, Program, Watch, data, mlp

FEATURES: dict[str, Program] = {}


class Way:
    """What a program compiles: the step, or the model alone."""

    def __init__(self, c: Compile, whole: bool) -> None:
        self.c, self.whole = c, whole

    def net(self, m: nn.Module) -> Any:
        return m if self.whole else self.c(m)

    def step(self, f: Callable[..., Any]) -> Any:
        return self.c(f) if self.whole else f


def feature(fn: Callable[[Way], Iterator[Any]]) -> Callable[[Way], Iterator[Any]]:
    for whole in (True, False):
        FEATURES[f"{fn.__name__}_{'whole' if whole else 'apart'}"] = lambda c, whole=whole: fn(Way(c, whole))
    return fn


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr, momentum=0.9)


def plain_step(way: Way, model: nn.Module, o: Any, loss_of: Any = F.cross_entropy) -> Any:
    """zero_grad, forward, loss, backward, step."""
    net = way.net(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        o.step()
        return loss

    return step


# ---------------------------------------------------------------- hooks


class Hooked(nn.Module):
    """Its activation has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(6, 8), nn.Linear(8, 4), []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return self.b(h)


@feature
def hook_of_an_activation(way: Way) -> Iterator[Any]:
    model = Hooked()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@feature
def hook_comes_and_goes(way: Way) -> Iterator[Any]:
    model = mlp()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    handle: Any = None
    for i, (x, y) in enumerate(data()):
        if i == 1:
            handle = model[0].weight.register_hook(lambda g: g * 0.1)
        if i == 3:
            handle.remove()
        yield w(step(x, y))


@feature
def module_hook_comes_and_goes(way: Way) -> Iterator[Any]:
    model = mlp()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    handle: Any = None
    for i, (x, y) in enumerate(data()):
        if i == 1:
            handle = model[1].register_forward_hook(lambda m, a, out: out * 0.5)
        if i == 3:
            handle.remove()
            handle = model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        if i == 4:
            handle.remove()
        yield w(step(x, y))


@feature
def pre_hooks_with_keywords(way: Way) -> Iterator[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, scale=2.0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.a(x) * scale

    model = Net()
    model.inner.register_forward_pre_hook(lambda m, a, k: (a, {"scale": k["scale"] + 1}), with_kwargs=True)
    model.inner.register_forward_hook(lambda m, a, k, out: out + k["scale"], with_kwargs=True)
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@feature
def gradients_clipped_by_hooks(way: Way) -> Iterator[Any]:
    model, norms = mlp(), []
    for p in model.parameters():
        p.register_hook(lambda g: torch.where(g.norm() > 0.05, g * (0.05 / g.norm()), g))
        p.register_post_accumulate_grad_hook(lambda q: norms.append(tuple(q.shape)))
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data(times=3):
        yield w(step(x, y), sorted(norms))


@feature
def state_dict_hooks(way: Way) -> Iterator[Any]:
    model, seen = mlp(), []
    model.register_state_dict_post_hook(lambda m, d, prefix, meta: seen.append(len(d)))
    model.register_load_state_dict_post_hook(lambda m, keys: seen.append("loaded"))
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    first = copy.deepcopy(model.state_dict())
    for i, (x, y) in enumerate(data()):
        if i == 2:
            model.load_state_dict(first)
        yield w(step(x, y), list(seen))


@feature
def hooks_of_every_module(way: Way) -> Iterator[Any]:
    model, seen = mlp(), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append(type(m).__name__))
    try:
        o = sgd(model)
        step, w = plain_step(way, model, o), Watch(model, o)
        for i, (x, y) in enumerate(data(times=4)):
            if i == 2:
                handle.remove()
            yield w(step(x, y), list(seen) if way.whole else None)
    finally:
        handle.remove()


# ---------------------------------------------------------------- derivatives


@feature
def gradient_penalty(way: Way) -> Iterator[Any]:
    model = mlp(6, 8, 2)
    o, net = sgd(model, lr=0.01), way.net(model)

    @way.step
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_(True)
        out = net(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = (g.norm(2, dim=1) - 1).pow(2).mean()
        o.zero_grad(set_to_none=False)
        (out.mean() + 10 * penalty).backward()
        o.step()
        return out.mean().detach(), penalty.detach()

    w = Watch(model, o)
    for x, _ in data():
        yield w(*step(x))


@feature
def hessian_vector_products(way: Way) -> Iterator[Any]:
    model = mlp(6, 5, 4)
    o, net, ps = sgd(model), way.net(model), list(model.parameters())

    @way.step
    def step(x: Tensor, y: Tensor, vs: list[Tensor]) -> tuple[Tensor, ...]:
        loss = F.cross_entropy(net(x), y)
        gs = torch.autograd.grad(loss, ps, create_graph=True)
        dot = sum((g * v).sum() for g, v in zip(gs, vs))
        hv = torch.autograd.grad(dot, ps)
        with torch.no_grad():
            for p, g, h in zip(ps, gs, hv):
                p -= 0.1 * g + 0.01 * h
        return loss.detach(), *hv

    w = Watch(model, o)
    for x, y in data():
        yield w(*step(x, y, [torch.randn_like(p) for p in ps]))


@feature
def unused_parameters(way: Way) -> Iterator[Any]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    model = Two()
    net, o, ps = way.net(model), sgd(model), list(model.parameters())

    @way.step
    def step(x: Tensor, y: Tensor) -> tuple[Any, ...]:
        loss = F.cross_entropy(net(x), y)
        gs = torch.autograd.grad(loss, ps, allow_unused=True, retain_graph=True)
        zs = torch.autograd.grad(loss, ps, allow_unused=True, materialize_grads=True)
        for p, g in zip(ps, gs):
            p.grad = g
        o.step()
        return loss.detach(), *gs, *zs

    w = Watch(model, o)
    for x, y in data():
        yield w(*step(x, y))


@feature
def gradients_of_vectors(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model, lr=0.01)

    @way.step
    def step(x: Tensor, v: Tensor) -> Tensor:
        out = net(x)
        o.zero_grad()
        out.backward(gradient=v, retain_graph=True)
        out.backward(v.flip(0))
        o.step()
        return out.detach()

    w = Watch(model, o)
    for x, _ in data():
        yield w(step(x, torch.randn(8, 4)))


@feature
def backward_into_some(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward(inputs=[model[2].weight, model[2].bias])
        o.step()
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@feature
def several_roots_at_once(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        o.zero_grad()
        out = net(x)
        a, b = F.cross_entropy(out, y), out.pow(2).mean()
        torch.autograd.backward([a, b], [torch.tensor(1.0), torch.tensor(0.1)])
        o.step()
        return a.detach(), b.detach()

    w = Watch(model, o)
    for x, y in data():
        yield w(*step(x, y))


@feature
def projected_conflicting_gradients(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o, ps = way.net(model), sgd(model), list(model.parameters())

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        losses = F.cross_entropy(out, y), out.abs().mean()
        one = [g.flatten() for g in torch.autograd.grad(losses[0], ps, retain_graph=True)]
        two = [g.flatten() for g in torch.autograd.grad(losses[1], ps)]
        a, b = torch.cat(one), torch.cat(two)
        dot = a @ b
        a = a - torch.where(dot < 0, dot / (b @ b), torch.zeros(())) * b
        at = 0
        for p in ps:
            p.grad = (a + b)[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        o.step()
        return losses[0].detach()

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@feature
def stopped_target(way: Way) -> Iterator[Any]:
    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = mlp(6, 8, 4), mlp(4, 8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = self.f(x), self.f(y)
            p, q = self.g(a), self.g(b)
            return -(F.cosine_similarity(p, b.detach()).mean() + F.cosine_similarity(q, a.detach()).mean()) * 0.5

    model = Predicts()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net(x, y)
        loss.backward()
        o.step()
        o.zero_grad()
        return loss

    w = Watch(model, o)
    for x, _ in data():
        yield w(step(x, x + 0.1 * torch.randn_like(x)))


@feature
def running_statistics_without_gradients(way: Way) -> Iterator[Any]:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("steps", torch.tensor(0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
                self.steps += 1
            return self.b(torch.tanh(h - self.mean))

    model = Norm()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@feature
def gradients_switched_by_an_argument(way: Way) -> Iterator[Any]:
    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.tune = mlp(6, 8, 8), nn.Linear(8, 4), False

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(self.tune):
                h = self.a(x)
            return self.b(h)

    model = Backbone()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        model.tune = i in (2, 4)
        yield w(step(x, y))


# ---------------------------------------------------------------- checkpoints, functions of one's own


@feature
def checkpointed_sequence(way: Way) -> Iterator[Any]:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.drop, self.head = mlp(6, 8, 8, 8), nn.Dropout(0.3), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
            return checkpoint(lambda t: self.head(self.drop(t)), h, use_reentrant=False)

    model = Deep()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x**3 * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale = inputs
        ctx.save_for_backward(x)
        ctx.scale = scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return g * 3 * x**2 * ctx.scale, None


class InPlaceTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class TopOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = x.max(1)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return values, index

    @staticmethod
    def backward(ctx: Any, g: Any, unused: Any) -> Any:
        assert unused is None
        if g is None:
            return None
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=g.dtype).scatter(1, index.unsqueeze(1), g.unsqueeze(1))


class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, flag: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.flag = flag
        return a * b if flag else a + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        ga = (g * b if ctx.flag else g) if ctx.needs_input_grad[0] else None
        gb = (g * a if ctx.flag else g) if ctx.needs_input_grad[1] else None
        return ga, gb, None


class Repeated(torch.autograd.Function):
    """Keeps its input alone: backward calls the part again. Its weights get their gradients as arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.part = part
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.part(x)
        grad, *grads = torch.autograd.grad(y, [x, *ctx.part.parameters()], g)
        return grad, None, *grads


@feature
def functions_of_ones_own(way: Way) -> Iterator[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.part = mlp(8, 6, 8)
            self.register_buffer("fixed", torch.linspace(0.5, 1.5, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = InPlaceTanh.apply(self.a(x) * 1.0)
            h = h + Repeated.apply(h, self.part, *self.part.parameters())
            h = Mixed.apply(h, self.fixed, True) + Mixed.apply(self.fixed, h, False)
            out = self.c(Cube.apply(self.b(h), 0.1))
            values, index = TopOne.apply(out)
            return out + 0.1 * values.unsqueeze(1), index

    model = Net()
    net, o = way.net(model), sgd(model, lr=0.02)

    @way.step
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, index = net(x)
        loss = F.cross_entropy(out, y)
        o.zero_grad()
        loss.backward()
        o.step()
        return loss.detach(), index

    w = Watch(model, o)
    for x, y in data():
        yield w(*step(x, y))


@feature
def function_whose_gradient_is_wrong_on_purpose(way: Way) -> Iterator[Any]:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            return -ctx.strength * g, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.strength = nn.Linear(6, 8), nn.Linear(8, 4), 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Reverse.apply(self.a(x), self.strength))

    model = Net()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        model.strength = i / 4
        yield w(step(x, y))


# ---------------------------------------------------------------- parametrizations, pruning


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


@feature
def parametrized_weights(way: Way) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrizations.weight_norm(model[2])
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        if i == 3:
            parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=True)
            o = sgd(model)
            step, w = plain_step(way, model, o), Watch(model, o)
        yield w(step(x, y))


@feature
def orthogonal_and_spectral(way: Way) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    parametrizations.orthogonal(model[0], orthogonal_map="cayley")
    parametrizations.spectral_norm(model[2])
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data(times=3):
        yield w(step(x, y))


@feature
def parametrizations_cached(way: Way) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    model[2].weight = model[2].weight
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor) -> Tensor:
        o.zero_grad()
        with parametrize.cached():
            loss = net(net(x)).pow(2).mean()
            loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for x, _ in data():
        yield w(step(x))


@feature
def pruned_while_it_trains(way: Way) -> Iterator[Any]:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        if i == 2:
            prune.random_unstructured(model[0], "weight", amount=0.2)
        yield w(step(x, y))


@feature
def quantised_while_it_trains(way: Way) -> Iterator[Any]:
    class Fake(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
            self.register_buffer("low", torch.tensor(0.0))
            self.register_buffer("high", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            if self.training:
                with torch.no_grad():
                    self.low.copy_(torch.minimum(self.low, h.min()))
                    self.high.copy_(torch.maximum(self.high, h.max()))
            scale = ((self.high - self.low) / 255).clamp(min=1e-8)
            return self.b(torch.fake_quantize_per_tensor_affine(h, scale, torch.zeros((), dtype=torch.int32), 0, 255))

    model = Fake()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


# ---------------------------------------------------------------- optimizers


def _kinds() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    optim = torch.optim
    yield "adam_foreach_maximize", lambda p: optim.Adam(p, 0.01, eps=1e-3, foreach=True, maximize=True, amsgrad=True)
    yield "adam_plain", lambda p: optim.Adam(p, 0.01, eps=1e-3, foreach=False, weight_decay=0.1)
    yield "adamw_fused_amsgrad", lambda p: optim.AdamW(p, 0.01, eps=1e-3, fused=True, amsgrad=True)
    yield "adam_fused_tensor_lr", lambda p: optim.Adam(p, torch.tensor(0.01), eps=1e-3, fused=True)
    yield "sgd_fused_tensor_lr", lambda p: optim.SGD(p, torch.tensor(0.05), momentum=0.9, fused=True)
    yield "adagrad_fused_tensor_lr", lambda p: optim.Adagrad(p, torch.tensor(0.05), fused=True)
    yield "adam_tensor_betas", lambda p: optim.Adam(p, torch.tensor(0.01), betas=(0.8, 0.9), eps=1e-3, foreach=False)
    yield "sgd_differentiable", lambda p: optim.SGD(p, 0.1, momentum=0.5, differentiable=False, weight_decay=0.1, foreach=False)
    yield "sgd_tensor_lr", lambda p: optim.SGD(p, torch.tensor(0.1), momentum=0.9, nesterov=True, foreach=False)
    yield "adagrad_foreach", lambda p: optim.Adagrad(p, 0.05, foreach=True, maximize=True)
    yield "adagrad_fused", lambda p: optim.Adagrad(p, 0.05, fused=True, weight_decay=0.1)
    yield "adadelta", lambda p: optim.Adadelta(p, 1.0, eps=1e-3, maximize=True, weight_decay=0.01, foreach=True)
    yield "adamax", lambda p: optim.Adamax(p, 0.01, eps=1e-3, weight_decay=0.01, foreach=True)
    yield "nadam_decoupled", lambda p: optim.NAdam(p, 0.01, eps=1e-3, decoupled_weight_decay=True, weight_decay=0.1, foreach=True)
    yield "radam", lambda p: optim.RAdam(p, 0.01, eps=1e-3, decoupled_weight_decay=True, weight_decay=0.1, foreach=True)
    yield "asgd", lambda p: optim.ASGD(p, 0.05, t0=2, weight_decay=0.01, foreach=True)
    yield "rprop", lambda p: optim.Rprop(p, 0.01, etas=(0.4, 1.3), foreach=True)
    yield "rmsprop", lambda p: optim.RMSprop(p, 0.01, eps=1e-3, momentum=0.9, centered=True, foreach=True, maximize=True)
    yield "adafactor", lambda p: optim.Adafactor(p, 0.01, weight_decay=0.1, foreach=True)


def _with_optimizer(name: str, make: Callable[[Any], Any]) -> None:
    def program(way: Way) -> Iterator[Any]:
        model = mlp()
        decayed = [p for p in model.parameters() if p.dim() > 1]
        o = make([{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}])
        step, w = plain_step(way, model, o), Watch(model, o)
        for x, y in data(times=4):
            yield w(step(x, y))

    program.__name__ = f"optimizer_{name}"
    feature(program)


for _row in _kinds():
    _with_optimizer(*_row)


@feature
def differentiable_sgd(way: Way) -> Iterator[Any]:
    """One inner step whose result depends on a learned learning rate."""
    model, rate = nn.Linear(6, 4), torch.tensor(0.5, requires_grad=True)
    net, o = way.net(model), torch.optim.SGD([rate], 0.05)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        inner = F.cross_entropy(net(x), y)
        gw, gb = torch.autograd.grad(inner, [model.weight, model.bias], create_graph=True)
        after = F.cross_entropy(F.linear(x, model.weight - rate * gw, model.bias - rate * gb), y)
        o.zero_grad()
        (g,) = torch.autograd.grad(after, [rate])
        rate.grad = g
        o.step()
        return after.detach()

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y), rate.detach().clone())


@feature
def lbfgs_with_closure(way: Way) -> Iterator[Any]:
    model = nn.Linear(6, 4)
    net = way.net(model)
    o = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")

    @way.step
    def step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            o.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        return o.step(closure)

    w = Watch(model)
    for x, y in data(times=3):
        yield w(step(x, y).item())


@feature
def two_optimizers_in_turn(way: Way) -> Iterator[Any]:
    model = mlp()
    a, b = torch.optim.Adam(model[0].parameters(), 0.01, eps=1e-3), torch.optim.RMSprop(model[2].parameters(), 0.01, eps=1e-3)
    net = way.net(model)

    @way.step
    def step(x: Tensor, y: Tensor, which: int) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        for o in (a, b):
            o.zero_grad(set_to_none=False)
        loss.backward()
        (a if which % 2 else b).step()
        return loss

    w = Watch(model, a, b)
    for i, (x, y) in enumerate(data()):
        yield w(step(x, y, i))


@feature
def state_of_an_optimizer_by_hand(way: Way) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.Adam(model.named_parameters(), 0.01, eps=1e-3)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data(times=7)):
        if i == 2:
            o.state[model[0].weight]["exp_avg"].zero_()
        if i == 3:
            del o.state[model[0].bias]
        if i == 4:
            o.param_groups[0]["betas"] = (0.5, 0.9)
            o.param_groups[0]["weight_decay"] = 0.1
        if i == 5:
            o.state = collections.defaultdict(dict)
        if i == 6:
            o.load_state_dict(copy.deepcopy(o.state_dict()))
        yield w(step(x, y))


@feature
def groups_added_and_frozen(way: Way) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data(times=7)):
        if i == 2:
            o.add_param_group({"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1})
        if i == 4:
            model[2].weight.requires_grad_(False)
        if i == 6:
            model[2].weight.requires_grad_(True)
            o.param_groups[1]["lr"] = 0.05
        yield w(step(x, y))


@feature
def states_loaded_between_steps(way: Way) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    o = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    step, w = plain_step(way, model, o), Watch(model, o)
    kept: Any = None
    for i, (x, y) in enumerate(data(times=7)):
        if i == 2:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": o.state_dict()}, file)
            file.seek(0)
            kept = torch.load(file)
        if i == 4:
            model.load_state_dict(kept["model"])
            o.load_state_dict(kept["optimizer"])
        if i == 6:
            model.load_state_dict(kept["model"], assign=True)
            o = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
            step, w = plain_step(way, model, o), Watch(model, o)
        yield w(step(x, y))


@feature
def learning_rate_in_a_tensor(way: Way) -> Iterator[Any]:
    model = mlp()
    o = torch.optim.AdamW(model.parameters(), torch.tensor(0.01), eps=1e-3, foreach=False)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        o.param_groups[0]["lr"].fill_(0.01 / (i + 1))
        if i == 4:
            o.param_groups[0]["lr"] = torch.tensor(0.5)
        yield w(step(x, y))


SCHEDULES = 16


def _with_schedule(number: int) -> None:
    def program(way: Way) -> Iterator[Any]:
        model = nn.Linear(6, 4)
        o = sgd(model)
        s = _schedule(o, number)
        net = way.net(model)
        inside = way.whole and not isinstance(s, lr_scheduler.ReduceLROnPlateau)

        @way.step
        def step(x: Tensor, y: Tensor) -> Tensor:
            o.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            o.step()
            if inside:
                s.step()
            return loss

        w = Watch(model, o)
        for x, y in data():
            loss = step(x, y)
            if not inside:
                s.step(*([loss.item()] if isinstance(s, lr_scheduler.ReduceLROnPlateau) else []))
            yield w(loss, s.get_last_lr(), o.param_groups[0]["lr"])

    program.__name__ = f"schedule_{number}"
    feature(program)


def _schedule(o: Any, number: int) -> Any:
    s = lr_scheduler
    makers: list[Callable[[], Any]] = [
        lambda: s.StepLR(o, 2, 0.5), lambda: s.MultiStepLR(o, [1, 3], 0.5), lambda: s.ExponentialLR(o, 0.9),
        lambda: s.CosineAnnealingLR(o, 4), lambda: s.CosineAnnealingWarmRestarts(o, 2),
        lambda: s.LinearLR(o, 0.3, total_iters=3), lambda: s.ConstantLR(o, 0.5, 2),
        lambda: s.PolynomialLR(o, 4, 2.0), lambda: s.CyclicLR(o, 0.01, 0.1, 2), lambda: s.OneCycleLR(o, 0.2, 8),
        lambda: s.LambdaLR(o, lambda e: 0.9**e), lambda: s.MultiplicativeLR(o, lambda e: 0.95), lambda: swa_utils.SWALR(o, 0.05, 3),
        lambda: s.SequentialLR(o, [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.9)], [2]),
        lambda: s.ChainedScheduler([s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.9)]),
        lambda: s.ReduceLROnPlateau(o, patience=0, factor=0.5),
    ]  # fmt: skip
    return makers[number]()


for _number in range(SCHEDULES):
    _with_schedule(_number)


# ---------------------------------------------------------------- gradients: clipping, accumulating, by hand


@feature
def clipped_by_infinite_norm(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf"))
        nn.utils.clip_grad_value_(model[0].parameters(), 0.01)
        o.step()
        return loss.detach(), total

    w = Watch(model, o)
    for x, y in data():
        yield w(*step(x, y))


@feature
def clipped_in_two_calls(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], 1.0)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
        o.step()
        return loss.detach(), total

    w = Watch(model, o)
    for x, y in data():
        yield w(*step(x, y))


@feature
def accumulated_with_a_rest(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor, update: bool) -> Tensor:
        loss = F.cross_entropy(net(x), y) / 3
        loss.backward()
        if update:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            o.step()
            o.zero_grad(set_to_none=False)
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data(times=8)):
        yield w(step(x, y, i % 3 == 2 or i == 7))


@feature
def gradients_written_by_hand(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
            p.grad += 1e-3 * p.detach()
            p.grad[..., 0] = 0
        model[2].bias.grad = torch.sign(model[2].bias.grad)
        o.step()
        model[0].weight.grad.zero_()
        model[0].bias.grad = None
        return loss

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@feature
def gradients_given_before(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        if i % 2:
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01)
        else:
            o.zero_grad()
        yield w(step(x, y))


@feature
def vectors_of_parameters(way: Way) -> Iterator[Any]:
    model = mlp()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        if i == 2:
            v = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(v.detach() * 0.9, model.parameters())
            w = Watch(model, o)
        yield w(step(x, y))


# ---------------------------------------------------------------- averages


@feature
def averaged_by_ema(way: Way) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    o = sgd(model)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    net = way.net(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        o.step()
        ema.update_parameters(model)
        return loss

    w = Watch(model, o, ema)
    for x, y in data():
        yield w(step(x, y))


@feature
def averaged_and_statistics_again(way: Way) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    o = sgd(model)
    swa, schedule = swa_utils.AveragedModel(model), swa_utils.SWALR(o, 0.05, 2)
    step, w = plain_step(way, model, o), Watch(model, o)
    seen = []
    for i, (x, y) in enumerate(data()):
        loss = step(x, y)
        seen.append(x)
        if i >= 2:
            swa.update_parameters(model)
            schedule.step()
        yield w(loss)
    swa_utils.update_bn(seen, swa)
    yield swa.state_dict(), way.c(swa)(seen[0])


@feature
def lookahead(way: Way) -> Iterator[Any]:
    model = mlp()
    o, slow = sgd(model), [p.detach().clone() for p in model.parameters()]
    net = way.net(model)

    @way.step
    def step(x: Tensor, y: Tensor, sync: bool) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        o.step()
        if sync:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters()):
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        yield w(step(x, y, i % 2 == 1), *slow)


# ---------------------------------------------------------------- precision


@feature
def autocast_and_scaler(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(o)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(o)
        scaler.update()
        return loss

    w = Watch(model, o, scaler)
    for x, y in data():
        yield w(step(x, y))


@feature
def scaler_switched_off(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        with torch.autocast("cpu", enabled=False):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(o)
        scaler.update()
        return loss

    w = Watch(model, o, scaler)
    for x, y in data():
        yield w(step(x, y))


@feature
def double_precision(way: Way) -> Iterator[Any]:
    model = mlp().double()
    o = torch.optim.Adam(model.parameters(), 0.01)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        if i == 3:
            model.float()
            o = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
            step, w = plain_step(way, model, o), Watch(model, o)
        yield w(step(x.double() if i < 3 else x, y))


# ---------------------------------------------------------------- how models are used


@feature
def copies_of_a_compiled_model(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    def steps(net: Any, o: Any) -> Any:
        @way.step
        def step(x: Tensor, y: Tensor) -> Tensor:
            o.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            o.step()
            return loss

        return step

    step, w = steps(net, o), Watch(model, o)
    other: Any = None
    for i, (x, y) in enumerate(data()):
        if i == 2:
            net2 = copy.deepcopy(net)
            o2 = sgd(net2)
            other = steps(net2, o2)
        yield w(step(x, y), other(x * 2, y) if other else None, [p.detach() for p in net2.parameters()] if other else None)


@feature
def pickled_models(way: Way) -> Iterator[Any]:
    model = mlp()
    o = sgd(model)
    step = plain_step(way, model, o)
    for i, (x, y) in enumerate(data()):
        if i == 2:
            model, kept = pickle.loads(pickle.dumps(model)), o.state_dict()
            o = sgd(model)
            o.load_state_dict(kept)
            step = plain_step(way, model, o)
        loss = step(x, y)
        yield loss, [p.detach() for p in model.parameters()], o.state_dict()


@feature
def training_and_evaluation_in_turn(way: Way) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.3), nn.Linear(8, 4))
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        model.train()
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        o.step()
        return loss

    @way.step
    def evaluate(x: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            return net(x).argmax(1)

    @way.step
    @torch.inference_mode()
    def infer(x: Tensor) -> Tensor:
        model.eval()
        return net(x).sum()

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y), evaluate(x), float(infer(x)), model.training)


@feature
def batches_of_many_sizes(way: Way) -> Iterator[Any]:
    layers = nn.Conv1d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 4)
    model = nn.Sequential(*layers)
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for n, length in ((4, 8), (4, 8), (3, 8), (1, 8), (4, 12), (2, 5)):
        yield w(step(torch.randn(n, 3, length), torch.randint(0, 4, (n,))))


@feature
def errors_that_are_caught(way: Way) -> Iterator[Any]:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.fails = mlp(), False

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            if self.fails:
                raise ValueError("on purpose")
            return out

    model = Picky()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        model.fails = i == 1
        try:
            said: Any = step(x[:, :5] if i == 3 else x, y)
        except (ValueError, RuntimeError) as e:
            said = type(e).__name__
        yield w(said)


@feature
def error_behind_backward(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor, fail: bool) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if fail:
            raise KeyError("between backward and step")
        o.step()
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        try:
            said: Any = step(x, y, i in (1, 3))
        except KeyError:
            said = "KeyError"
        yield w(said)


@feature
def error_in_a_hook(way: Way) -> Iterator[Any]:
    model = mlp()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    fail = [False]

    def hook(g: Tensor) -> None:
        if fail[0]:
            raise ArithmeticError("in the hook")

    model[0].bias.register_hook(hook)
    for i, (x, y) in enumerate(data(times=4)):
        fail[0] = i == 2
        try:
            said: Any = step(x, y)
        except ArithmeticError:
            said = "ArithmeticError"
        if i != 2:  # how far autograd came is not told
            yield w(said) if i < 2 else (said if isinstance(said, Tensor) else None)


@feature
def module_changed_while_it_trains(way: Way) -> Iterator[Any]:
    model = mlp()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data(times=6)):
        if i == 2:
            model[1] = nn.ReLU()
        if i == 3:
            model.append(nn.LayerNorm(4))
            o.add_param_group({"params": model[3].parameters()})
        if i == 4:
            model[0].bias = None
        if i == 5:
            model[2].weight = nn.Parameter(model[2].weight.detach() * 2)
            o = sgd(model)
            step, w = plain_step(way, model, o), Watch(model, o)
        yield w(step(x, y))


@feature
def branches_chosen_by_python(way: Way) -> Iterator[Any]:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(6, 8)})
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
            self.more = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(8))})
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor, which: str) -> Tensor:
            h = self.experts[which](x) * self.scales["ab".index(which)] + self.more["bias"]
            return self.head(torch.relu(h))

    model = Routed()
    net, o = way.net(model), torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)

    @way.step
    def step(x: Tensor, y: Tensor, which: str) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(net(x, which), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for (x, y), which in zip(data(times=6), "abaabb"):
        yield w(step(x, y, which))


@feature
def layers_dropped_at_random(way: Way) -> Iterator[Any]:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if not self.training or random.random() < 0.6:
                    x = x + torch.tanh(layer(x))
            return self.head(x)

    random.seed(0)
    model = Depth()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data(times=6):
        yield w(step(x, y), random.random())


class Out(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclasses.dataclass
class Result:
    loss: Tensor
    parts: dict[str, Tensor]


@feature
def results_in_containers(way: Way) -> Iterator[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Out:
            h = torch.tanh(self.a(x))
            return Out(self.b(h), h)

    model = Net()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(batch: dict[str, Tensor]) -> Result:
        out = net(batch["x"])
        parts = {"ce": F.cross_entropy(out.logits, batch["y"], label_smoothing=0.1), "l2": 0.01 * out.hidden.pow(2).mean()}
        total = sum(parts.values())
        o.zero_grad()
        total.backward()
        o.step()
        return Result(total.detach(), {k: v.detach() for k, v in parts.items()})

    w = Watch(model, o)
    for x, y in data():
        r = step({"x": x, "y": y})
        yield w(r.loss, r.parts)


def _losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    def target(y: Tensor) -> Tensor:
        return F.one_hot(y, 4).float()

    def focal(ce: Tensor) -> Tensor:
        return ((1 - ce.neg().exp()) ** 2 * ce).mean()

    return {
        "weighted": lambda p, y: F.cross_entropy(p, y, weight=torch.tensor([1.0, 2.0, 0.5, 1.0]), ignore_index=2, label_smoothing=0.1),
        "masked": lambda p, y: (F.cross_entropy(p, y, reduction="none") * (y != 1)).sum() / (y != 1).sum(),
        "soft": lambda p, y: F.cross_entropy(p, (target(y) + 0.1).softmax(1)),
        "kl": lambda p, y: F.kl_div(p.log_softmax(1), (target(y) + 0.1).log_softmax(1), reduction="batchmean", log_target=True),
        "huber": lambda p, y: F.huber_loss(p, target(y), delta=0.3), "smooth": lambda p, y: F.smooth_l1_loss(p, target(y), beta=0.5),
        "bce": lambda p, y: F.binary_cross_entropy(p.sigmoid(), target(y)),
        "logits": lambda p, y: F.binary_cross_entropy_with_logits(p, target(y), pos_weight=torch.arange(1.0, 5.0)),
        "margin": F.multi_margin_loss, "soft_margin": lambda p, y: F.soft_margin_loss(p, target(y) * 2 - 1),
        "multilabel": lambda p, y: F.multilabel_soft_margin_loss(p, target(y)),
        "poisson": lambda p, y: F.poisson_nll_loss(p, target(y), full=True),
        "gaussian": lambda p, y: F.gaussian_nll_loss(p, target(y), p.exp().clamp(0.1, 2)),
        "hinge": lambda p, y: F.hinge_embedding_loss(p, target(y) * 2 - 1),
        "ranking": lambda p, y: F.margin_ranking_loss(p[:, 0], p[:, 1], (y > 1).float() * 2 - 1, 0.1),
        "cosine": lambda p, y: F.cosine_embedding_loss(p, p.flip(0).detach() + 1, (y > 1).float() * 2 - 1, margin=0.1),
        "triplet": lambda p, y: F.triplet_margin_loss(p, p.roll(1, 0), p.roll(3, 0), swap=True),
        "focal": lambda p, y: focal(F.cross_entropy(p, y, reduction="none")),
        "nll2d": lambda p, y: F.nll_loss(p.view(2, 4, 4).log_softmax(1), y[:8].view(2, 4)[:, :4]),
    }  # fmt: skip


@feature
def every_loss(way: Way) -> Iterator[Any]:
    for name, loss_of in _losses().items():
        torch.manual_seed(3)
        model = nn.Linear(6, 4)
        o = sgd(model, lr=0.05)
        step, w = plain_step(way, model, o, loss_of), Watch(model, o)
        for x, y in data(times=2):
            yield name, w(step(x, y))


@feature
def logged_numbers(way: Way) -> Iterator[Any]:
    model, log = mlp(), {"loss": [], "mean": 0.0}
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> float:
        o.zero_grad()
        out = net(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        o.step()
        log["loss"].append(loss.item())
        log["mean"] = 0.9 * log["mean"] + 0.1 * loss.item()
        return (out.argmax(1) == y).float().mean().item()

    w = Watch(model, o)
    for x, y in data():
        yield w(step(x, y), list(log["loss"]), log["mean"])


@feature
def anomaly_mode(way: Way) -> Iterator[Any]:
    model = mlp()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for i, (x, y) in enumerate(data()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(i in (1, 3)):
                yield w(step(x, y))


@feature
def inner_steps(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model, lr=0.05)

    @way.step
    def step(x: Tensor, y: Tensor, k: int) -> list[Tensor]:
        losses = []
        for _ in range(k):
            o.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            o.step()
            losses.append(loss.detach())
        return losses

    w = Watch(model, o)
    for k, (x, y) in zip((1, 3, 2, 1), data()):
        yield w(step(x, y, k))


@feature
def inputs_with_gradients(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(net(x * 2), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        x.requires_grad_(i != 2)
        loss = step(x, y)
        yield w(loss, x.grad)


@feature
def hidden_state_kept_between_steps(way: Way) -> Iterator[Any]:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head, self.h = nn.GRUCell(6, 8), nn.Linear(8, 4), torch.zeros(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.h = self.cell(x, self.h.detach())
            return self.head(self.h)

    model = Cell()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data():
        loss = step(x, y)
        yield w(loss, model.h.detach())


@feature
def padded_transformer(way: Way) -> Iterator[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8, padding_idx=0, scale_grad_by_freq=True)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, t: Tensor) -> Tensor:
            pad = t == 0
            h = self.layer(self.embed(t), src_key_padding_mask=pad)
            return self.head((h * ~pad.unsqueeze(-1)).sum(1) / (~pad).sum(1, keepdim=True))

    model = Net()
    o = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    step, w = plain_step(way, model, o), Watch(model, o)
    for _ in range(4):
        t = torch.randint(1, 11, (4, 5))
        t[1, 3:] = 0
        yield w(step(t, torch.randint(0, 4, (4,))))


@feature
def embeddings_of_every_kind(way: Way) -> Iterator[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse, self.dense = nn.Embedding(20, 4, sparse=True), nn.EmbeddingBag(20, 4, mode="mean", padding_idx=1)
            self.head = nn.Linear(8, 4)

        def forward(self, t: Tensor) -> Tensor:
            return self.head(torch.cat([self.sparse(t).sum(1), self.dense(t)], 1))

    model = Net()
    a = torch.optim.SparseAdam(model.sparse.parameters(), 0.05)
    b = torch.optim.Adagrad([*model.dense.parameters(), *model.head.parameters()], 0.1)
    net = way.net(model)

    @way.step
    def step(t: Tensor, y: Tensor) -> Tensor:
        a.zero_grad()
        b.zero_grad()
        loss = F.cross_entropy(net(t), y)
        loss.backward()
        a.step()
        b.step()
        return loss

    for _ in range(4):
        loss = step(torch.randint(0, 20, (4, 3)), torch.randint(0, 4, (4,)))
        yield loss, [p.detach() for p in model.parameters()], a.state_dict()["state"], b.state_dict()


@feature
def gradients_per_sample(way: Way) -> Iterator[Any]:
    """Differential privacy: each sample's gradient is clipped."""
    model = mlp(6, 5, 4)
    names = [n for n, _ in model.named_parameters()]

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))

    per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))

    @way.c
    def step(x: Tensor, y: Tensor) -> Tensor:
        params = {n: p.detach() for n, p in model.named_parameters()}
        gs = per_sample(params, x, y)
        norms = torch.stack([gs[n].flatten(1).norm(dim=1) for n in names]).norm(dim=0)
        scale = (1 / (norms + 1e-6)).clamp(max=1)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p -= 0.1 * torch.einsum("b,b...->...", scale, gs[n]) / len(x)
        return norms

    w = Watch(model)
    for x, y in data():
        yield w(step(x, y))


@feature
def functional_updates(way: Way) -> Iterator[Any]:
    model = mlp(6, 5, 4)
    params = {n: p.detach().clone() for n, p in model.named_parameters()}

    @way.c
    def step(params: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        def loss_of(ps: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, ps, (x,)), y)

        gs, loss = torch.func.grad_and_value(loss_of)(params)
        return {n: p - 0.1 * gs[n] for n, p in params.items()}, loss

    for x, y in data():
        params, loss = step(params, x, y)
        yield loss, params


@feature
def closures_over_epochs(way: Way) -> Iterator[Any]:
    """A class that holds everything, with counters that grow."""

    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.net = way.net(self.model)
            self.o = torch.optim.AdamW(self.model.parameters(), 0.01, eps=1e-3)
            self.s = lr_scheduler.LambdaLR(self.o, lambda e: 1 / (1 + e))
            self.seen, self.best = 0, float("inf")
            self.train = way.step(self._train)

        def _train(self, x: Tensor, y: Tensor) -> Tensor:
            self.seen += len(x)
            for g in self.o.param_groups:
                g["weight_decay"] = 0.01 * self.seen
            loss = F.cross_entropy(self.net(x), y) * (1 + 0.01 * self.seen)
            self.o.zero_grad()
            loss.backward()
            self.o.step()
            self.s.step()
            return loss.detach()

    t = Trainer()
    w = Watch(t.model, t.o)
    for x, y in data():
        loss = t.train(x, y)
        t.best = min(t.best, float(loss))
        yield w(loss, t.seen, t.best)


@feature
def convolutions_of_every_kind(way: Way) -> Iterator[Any]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.SiLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ConvTranspose2d(4, 3, 2, stride=2), nn.PReLU(3), nn.MaxPool2d(2),
        nn.PixelShuffle(1), nn.Upsample(scale_factor=2), nn.ReflectionPad2d(1), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip
    o = sgd(model, lr=0.02)
    step, w = plain_step(way, model, o), Watch(model, o)
    for _ in range(3):
        yield w(step(torch.randn(3, 2, 8, 8), torch.randint(0, 4, (3,))))


@feature
def written_in_place(way: Way) -> Iterator[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.mul_(2).add_(1)
            h[:, :2] = 0
            h[:, 2:4].tanh_()
            out = torch.zeros(x.shape[0], 4, dtype=x.dtype)
            out += self.b(F.relu(h))
            out.index_add_(0, torch.tensor([0, 0, 1]), out[2:5] * 0.1)
            return out.masked_fill_(out > 5, 0.0)

    model = Net()
    o = sgd(model)
    step, w = plain_step(way, model, o), Watch(model, o)
    for x, y in data():
        yield w(step(x, y))


@feature
def loss_that_is_not_a_number(way: Way) -> Iterator[Any]:
    model = mlp()
    net, o = way.net(model), sgd(model)

    @way.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(net(x), y)
        if torch.isnan(loss):
            return loss.detach()
        loss.backward()
        o.step()
        return loss.detach()

    w = Watch(model, o)
    for i, (x, y) in enumerate(data()):
        yield w(step(x * float("nan") if i == 2 else x, y))


@feature
def update_without_an_optimizer(way: Way) -> Iterator[Any]:
    model, speed = mlp(), {}
    net = way.net(model)

    @way.step
    def step(x: Tensor, y: Tensor, lr: float) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for n, p in model.named_parameters():
                v = speed.get(n)
                v = p.grad if v is None else 0.9 * v + p.grad
                speed[n] = v
                p.sub_(v, alpha=lr)
        return loss

    w = Watch(model)
    for i, (x, y) in enumerate(data()):
        yield w(step(x, y, 0.1 / (i + 1)), {n: v.detach() for n, v in speed.items()})


@feature
def untouched_gradients_are_eagers(way: Way) -> Iterator[Any]:
    """Parameters that one loss does not reach keep their gradients, None or old."""
    model = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})
    o = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    nets = {k: way.net(m) for k, m in model.items()}

    @way.step
    def step(x: Tensor, y: Tensor, which: str) -> Tensor:
        loss = F.cross_entropy(nets[which](x), y)
        loss.backward()
        o.step()
        return loss

    w = Watch(model, o)
    for i, ((x, y), which) in enumerate(zip(data(times=6), "aabbab")):
        if i == 4:
            o.zero_grad(set_to_none=True)
        yield w(step(x, y, which))
