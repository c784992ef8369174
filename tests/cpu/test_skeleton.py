"""The walking skeleton: sin(cos(x)) from a Python frame to one native call, with guards, and nothing of torch's own compiler loaded."""

from __future__ import annotations

import torch

import fresh
import torchsmith
from torchsmith import events


def f(x):
    return torch.sin(torch.cos(x))


def test_one_native_graph():
    c = torchsmith.compile(f, fullgraph=True)
    with events.recording() as got:
        for n in (10, 10, 1000):
            x = torch.randn(n)
            torch.testing.assert_close(c(x), f(x))
    reports = [e.fields["report"] for e in got if e.kind == "graph"]
    assert reports and all(r.road == "native" and not r.externs for r in reports)
    with torch.no_grad():
        torch.testing.assert_close(c(x), f(x))
    torch.testing.assert_close(c(x.double()), f(x.double()))


def test_a_module():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    c = torchsmith.compile(net)
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(c(x), net(x))
        with torch.no_grad():
            net[0].weight.mul_(2)
        torch.testing.assert_close(c(x), net(x))
    torch.testing.assert_close(c(x), net(x))
    assert c(x).requires_grad


CODE = """
import sys, torch, torchsmith
print(torchsmith.compile(lambda x: torch.sin(torch.cos(x)), fullgraph=True)(torch.ones(3)).sum().item())
assert not [m for m in sys.modules if m.startswith(("torch._dynamo", "torch._inductor"))], "torch's own compiler was loaded"
"""


def test_torchs_own_compiler_is_not_loaded():
    done = fresh.run(CODE)
    assert done.returncode == 0, done.stderr
