"""torch.func under capture: each transform is one node, and what it gives is what eager gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from capturing import same
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import torchsmith
from torchsmith.events import recording

torch.manual_seed(0)
X = torch.randn(3, 4)
LINEAR = torch.nn.Linear(4, 2)
MODELS = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)) for _ in range(3)]
STACKED = stack_module_state(MODELS)
MADE_OUTSIDE = vmap(lambda r: r.sin().sum())
GRAD_OUTSIDE = grad(lambda r: (r**2).sum())
PROGRAMS: list[object] = []


def program(fn):
    PROGRAMS.append(pytest.param(fn, id=fn.__name__))
    return fn


@program
def per_sample(x):
    params = dict(LINEAR.named_parameters())
    return vmap(grad(lambda p, r: functional_call(LINEAR, p, (r,)).sum()), in_dims=(None, 0))(params, x)


@program
def ensemble(x):
    return vmap(lambda p, b, x: functional_call(MODELS[0], (p, b), (x,)), in_dims=(0, 0, None))(*STACKED, x)


@program
def outside(x):
    return MADE_OUTSIDE(x) + GRAD_OUTSIDE(x).sum()


@program
def dimensions(x):
    return vmap(lambda a, b: (a + b, {"k": a * b}), in_dims=(1, None), out_dims=(0, {"k": 1}))(x, x[:, 0])


@program
def nested(x):
    return vmap(vmap(lambda a, b, c=None: a * b + c[0, 0], (None, 0)), (0, None))(x[:, 0], x[0], c=x)


@program
def differentiated_twice(x):
    return vmap(vmap(grad(grad(torch.sin))))(x), jvp(grad(lambda a: (a**3).sum()), (x,), (torch.ones_like(x),))[1]


@program
def many_arguments(x):
    g = grad_and_value(lambda a, b: ((a["k"] * b).sum(), a["k"] + 1), argnums=(0, 1), has_aux=True)({"k": x}, x + 1)
    return g, jacrev(lambda a, b: (a.sum(0), {"z": (a * b).sum()}), argnums=(0, 1))(x, x + 1)


@program
def second_order(x):
    return hessian(lambda a: MODELS[0](a).sum())(x[0]), jacfwd(lambda a: (a.sin(), a * 3), has_aux=True)(x[0])


@program
def pulled_back(x):
    out, pull, aux = vjp(lambda a, b: ({"s": a.sin() * b}, a + 1), x, x + 1, has_aux=True)
    return out, pull({"s": torch.ones_like(x)}), pull(out), aux


@program
def inner_state(x):
    seen = []

    def f(r):
        seen.append(tuple(r.shape))
        with torch.no_grad():
            twice = r * len(seen)
        return (r * twice).reshape(2, -1).sum()

    return vmap(grad(f))(x), seen


@program
def written_inside(x):
    def f(r, i):
        r = r.clone()
        r.add_(1)
        r[0] = 5.0
        return torch.where(r > 0, r, r.mean()), r[i]

    return vmap(f, chunk_size=2)(x, torch.tensor([1, 0, 2]))


@program
def a_step(x):
    params = {k: p.detach() for k, p in MODELS[0].named_parameters()}
    g, loss = grad_and_value(lambda p: functional_call(MODELS[0], p, (x,)).pow(2).mean())(params)
    return {k: p - 0.1 * g[k] for k, p in params.items()}, loss


@program
def random_numbers(x):
    return vmap(lambda r: r + torch.randn(4), randomness="different")(x), vmap(lambda r: F.dropout(r, 0.5), randomness="same")(x)


def outcome(fn, x):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out = fn(x)
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    grads = torch.autograd.grad([t.sum() for t in leaves], [x, LINEAR.weight], allow_unused=True) if leaves else ()
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out), grads


class Counting:
    def __init__(self):
        self.graphs = 0

    def __call__(self, gm, inputs):
        self.graphs += 1
        return gm.forward


@pytest.mark.parametrize("fn", PROGRAMS)
def test_a_transform_is_part_of_the_graph(fn):
    """Under autograd too: the captured graph is differentiated through the transforms."""
    counting = Counting()
    compiled = torchsmith.compile(fn, backend=counting, fullgraph=True)
    want = outcome(fn, X)
    same(outcome(compiled, X), want)
    same(outcome(compiled, X), want)
    assert counting.graphs == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_transforms_are_compiled(dynamic):
    def program(x):
        with torch.no_grad():
            return per_sample(x), second_order(x), pulled_back(x), inner_state(x), written_inside(x)

    compiled = torchsmith.compile(program, fullgraph=True, dynamic=dynamic)
    same(compiled(X), program(X))


def test_what_a_transform_refuses_is_eagers_own_error():
    for fn in (
        lambda x: vmap(lambda r: r + torch.randn(4))(x) + 1,
        lambda x: vmap(lambda a, b: a, in_dims=(0, 0))(x, 3),
        lambda x: vmap(lambda r: r * r.sum().item())(x) + 1,
        lambda x: grad(torch.sin)(x) + 1,
        lambda x: grad(lambda a: (a.sum(), 3), has_aux=True)(x)[0],
    ):
        with pytest.raises(Exception) as want:
            fn(X)
        with pytest.raises(type(want.value)) as got:
            torchsmith.compile(fn)(X)
        assert str(got.value) == str(want.value)


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


class New(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Generated(New):
    generate_vmap_rule = True


class Ruled(New):
    @staticmethod
    def vmap(info, in_dims, x):
        return Ruled.apply(x) + info.batch_size, in_dims[0]


class Both(Ruled):
    generate_vmap_rule = True


@pytest.mark.parametrize("cls", [Old, New, Generated, Ruled, Both])
def test_functions_follow_their_rules_for_transforms(cls):
    """A class says how vmap maps it; torch.func refuses those that say nothing, and those whose forward takes ctx."""
    def told(fn):
        try:
            return fn(X).tolist()
        except RuntimeError as error:
            return str(error)

    for fn in (
        vmap(cls.apply), grad(lambda x: cls.apply(x).sum()), vmap(grad(lambda r: cls.apply(r).sum())), jacrev(cls.apply),
        grad(lambda x: x.sum() + cls.apply(X).sum()), vmap(lambda r: r + cls.apply(X[0])),
    ):  # fmt: skip
        assert told(torchsmith.compile(lambda x, fn=fn: fn(x))) == told(fn)


def test_arrays_of_wrapped_tensors_are_eagers_own_error():
    def count(x):
        return x.sum() * x.detach().numpy().shape[0]

    def fixed(x):
        return x.sum() * float(torch.ones(3).numpy().sum())

    for transform in (grad, vmap, jacrev, lambda f: lambda x: vjp(f, x)[0]):
        for body in (count, fixed):
            told, wrapped = [], transform(body)
            for f in (wrapped, torchsmith.compile(lambda x, f=wrapped: f(x))):
                try:
                    told.append(f(X).tolist())
                except RuntimeError as error:
                    told.append(str(error))
            assert told[0] == told[1]


def test_a_body_that_cannot_be_captured_costs_a_break():
    def program(x):
        kept = []

        def f(a):
            kept.append(a * 2)
            return (a if a.sum() > 0 else -a).sum()

        return grad(f)(x + 1) * 2, kept[0].shape

    counting = Counting()
    same(torchsmith.compile(program, backend=counting)(X), program(X))
    assert counting.graphs == 2


def test_flex_attention_is_written_out(monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # eager's own would compile
    q, k, slopes, documents = torch.randn(2, 4, 8, 4), torch.randn(2, 2, 8, 4), torch.randn(4), torch.randint(0, 2, (2, 8))
    window = flex.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 4), None, None, 8, 8, device="cpu")

    def program(q, k):
        by_place = flex.flex_attention(q, k, k, lambda s, b, h, i, j: s + slopes[h] * (j - i), window, enable_gqa=True, return_lse=True)
        by_document = flex.flex_attention(q, q, q, lambda s, b, h, i, j: torch.where(documents[b, i] == documents[b, j], s, -float("inf")))
        with sdpa_kernel(SDPBackend.MATH):
            return by_place, by_document, F.scaled_dot_product_attention(q, q, q)

    same(torchsmith.compile(program, fullgraph=True)(q, k), program(q, k))


def test_forward_derivatives_are_one_graph_for_all_sizes():
    """What autograd asks of sizes there asks for no number; a bias has no derivative, and zeros stand for it."""
    def program(x, t):
        return jvp(lambda a: F.conv1d(F.linear(a * a, LINEAR.weight, LINEAR.bias)[None], torch.ones(2, a.shape[0], 2)).sin(), (x,), (t,))

    compiled = torchsmith.compile(program, fullgraph=True)
    with recording() as got:
        for n in (3, 4, 5, 6):
            x, t = torch.randn(n, 4), torch.randn(n, 4)
            same(compiled(x, t), program(x, t))
    assert sum(e.kind == "graph" for e in got) == 2 and not any(e.kind == "fallback" for e in got)
