"""Random changes to a model between calls: the compiled model must always answer as the eager one does."""

from __future__ import annotations

import contextlib
import random
import warnings

import pytest
import torch

import torchsmith

SCALE = 1.0


class Block(torch.nn.Module):
    bias = 0.5

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.options = {"gain": 1.0, "order": [0, 1]}
        self.offset = 0.25

    def forward(self, x):
        for step in self.options["order"]:
            x = self.lin(x) if step == 0 else self.norm(x)
        return x * self.options["gain"] + self.offset + self.bias


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
        self.head = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.hidden = torch.nn.ParameterDict({"p": torch.nn.Parameter(torch.ones(4))})

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.head(x) * self.hidden["p"] * SCALE


def change_global(m, r):
    globals()["SCALE"] = r.choice([1.0, 2.0])


CHANGES = {
    "weight in place": lambda m, r: r.choice(m.blocks).lin.weight.data.mul_(1.5),
    "weight data": lambda m, r: setattr(r.choice(m.blocks).lin.weight, "data", torch.randn(4, 4)),
    "new parameter": lambda m, r: setattr(r.choice(m.blocks).lin, "bias", r.choice([None, torch.nn.Parameter(torch.randn(4))])),
    "mode": lambda m, r: r.choice([m, m.blocks[0], m.blocks[1].norm]).train(r.random() < 0.5),
    "submodule": lambda m, r: setattr(r.choice(m.blocks), "lin", r.choice([torch.nn.Linear(4, 4), torch.nn.Identity()])),
    "list item": lambda m, r: m.blocks.__setitem__(r.randrange(len(m.blocks)), Block()),
    "append": lambda m, r: m.blocks.append(Block()) if len(m.blocks) < 4 else m.blocks.__delitem__(-1),
    "sequential": lambda m, r: m.head.__setitem__(1, r.choice([torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Sigmoid()])),
    "dict": lambda m, r: r.choice(m.blocks).options.update(gain=r.choice([1.0, 2.0])),
    "list": lambda m, r: r.choice(m.blocks).options["order"].__setitem__(slice(None), r.choice([[0], [0, 1], [1, 0], [1]])),
    "attribute": lambda m, r: setattr(r.choice(m.blocks), "offset", r.choice([0.25, 0.5])),
    "shadowed class attribute": lambda m, r: setattr(r.choice(m.blocks), "bias", r.choice([0.5, 0.75])),
    "class attribute": lambda m, r: setattr(Block, "bias", r.choice([0.5, 1.5])),
    "parameter dict": lambda m, r: m.hidden.__setitem__("p", torch.nn.Parameter(torch.randn(4))),
    "requires_grad": lambda m, r: m.blocks[0].lin.weight.requires_grad_(r.random() < 0.5),
    "buffer": lambda m, r: setattr(m.blocks[0].norm, "running_mean", torch.randn(4)),
    "global": change_global,
    "own forward": lambda m, r: m.blocks[0].__dict__.pop("forward", None) or setattr(m.blocks[0], "forward", lambda x: x * 3),
    "hook": lambda m, r: m._handles.pop().remove() if m._handles else m._handles.append(r.choice(m.blocks).register_forward_hook(triple)),
    "load": lambda m, r: m.blocks[0].norm.load_state_dict(torch.nn.BatchNorm1d(4).state_dict()),
    "dtype": lambda m, r: m.double().float(),
}


def triple(module, args, out):
    return out * 3


@pytest.mark.parametrize("seed", range(8))
def test_random_changes(seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    model = Model()
    model._handles = []
    compiled = torchsmith.compile(model, backend="eager", recompile_limit=1000)
    x = torch.randn(5, 4)
    history = []
    with warnings.catch_warnings(), torch.set_grad_enabled(r.random() < 0.5):
        warnings.simplefilter("ignore")
        for _ in range(40):
            name = r.choice(sorted(CHANGES))
            with contextlib.suppress(AttributeError):  # an Identity has no weight to change
                CHANGES[name](model, r)
            history.append(name)
            for _ in range(r.choice([1, 3])):
                stats = {k: v.clone() for k, v in model.state_dict().items()}
                want = model(x)
                after = {k: v.clone() for k, v in model.state_dict().items()}
                with torch.no_grad():
                    for k, v in model.state_dict().items():
                        v.copy_(stats[k])
                got = compiled(x)
                assert torch.equal(got, want) and got.requires_grad == want.requires_grad, history
                assert all(torch.equal(v, after[k]) for k, v in model.state_dict().items()), history
    Block.bias = 0.5
    globals()["SCALE"] = 1.0
