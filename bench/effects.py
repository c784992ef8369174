"""What programs do beyond arithmetic, tried through any backend: is the result eager's, and what was refused with which code?

In: a backend. Out: per case an Outcome. tests/partners holds them, bench/backends.py prints them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import torchsmith
from torchsmith import events


@dataclass(frozen=True)
class Outcome:
    """`right`: results, inputs, buffers and gradients are eager's; `codes` of what ran eagerly or in torch."""

    right: bool
    codes: tuple[str, ...]
    said: str = ""

    def __str__(self) -> str:
        found = "right" if self.right else f"WRONG {self.said}"
        return f"{found} ({', '.join(self.codes)})" if self.codes else found


class Counting(nn.Module):
    """Buffers that a call writes, by an operator and by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum(0)
        return self.norm(x) * self.seen


def breaks(x: torch.Tensor, log: list[float]) -> torch.Tensor:
    y = torch.sin(x) * 2
    log.append(float(y.sum()))
    torchsmith.compiler.graph_break()
    return torch.softmax(y, -1)


def autocast(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y, y.float().relu() + x.sum()


Case = tuple[Callable[[], Any], Callable[[], list[tuple[Any, ...]]], float]  # the program, arguments of its calls, tolerance


def _program(fn: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: fn


def _writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1:].mul_(2)
    return x.add_(y) * 3


def _aliases(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.exp()
    return y.t(), x, x[1:], y


def _cell(x: torch.Tensor) -> list[tuple[Any, ...]]:
    return [(x,), (x + 1,)]


CASES: dict[str, Case] = {
    "break": (_program(breaks), lambda: [(torch.randn(3, 5), []), (torch.randn(3, 5), [])], 1e-4),
    "dynamic size": (_program(lambda x, w: torch.relu(x @ w).sum(0) * x.shape[0]),
                     lambda: [(torch.randn(n, 5), torch.randn(5, 4)) for n in (3, 4, 7, 1)], 1e-4),
    "in-place write": (_program(_writes), lambda: [(torch.randn(3, 5), torch.randn(3, 5)) for _ in range(2)], 1e-4),
    "aliasing output": (_program(_aliases), lambda: _cell(torch.randn(3, 5)), 1e-4),
    "mutated buffer": (lambda: Counting().train(), lambda: _cell(torch.randn(4, 5)), 1e-4),
    "dropout": (_program(lambda x: torch.nn.functional.dropout(x.exp(), 0.4, True) + 1), lambda: _cell(torch.randn(8, 5)), 1e-4),
    "autocast": (_program(autocast), lambda: [(torch.randn(4, 8), torch.randn(8, 6)) for _ in range(2)], 2e-2),
    "bfloat16": (_program(lambda x, w: torch.softmax(x @ w, -1) * 2),
                 lambda: [(torch.randn(4, 8).bfloat16(), torch.randn(8, 6).bfloat16()) for _ in range(2)], 2e-2),
    "gradients": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.LayerNorm(4)),
                  lambda: [(torch.randn(3, 5, requires_grad=True),) for _ in range(2)], 1e-4),
}  # fmt: skip


def run_case(backend: Any, name: str, compile: Callable[..., Any] = torchsmith.compile) -> Outcome:
    """One case through `compile(fn, backend=backend)` and eagerly, side by side."""
    make, arguments, tolerance = CASES[name]
    torch.manual_seed(3)
    fn = make()
    other = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
    compiled = compile(other, backend=backend)
    wrong = ""
    with torch.set_grad_enabled(name == "gradients"), events.recording() as got:
        for k, args in enumerate(arguments()):
            theirs = tuple(a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else list(a) for a in args)
            torch.manual_seed(k)
            want = fn(*args)
            torch.manual_seed(k)
            result = compiled(*theirs)
            pairs = [(_flat(result), _flat(want)), (_flat(theirs), _flat(args))]
            if name == "gradients":
                want.sin().sum().backward()
                result.sin().sum().backward()
                pairs += [([a.grad for a in theirs], [a.grad for a in args])]
            if isinstance(fn, nn.Module):
                pairs += [(list(other.state_dict().values()), list(fn.state_dict().values()))]
                pairs += [([p.grad for p in other.parameters()], [p.grad for p in fn.parameters()])]
            for mine, eager in pairs:
                wrong = wrong or _difference(mine, eager, tolerance)
            wrong = wrong or ("aliases differ" if _aliasing(theirs, result) != _aliasing(args, want) else "")
    return Outcome(not wrong, tuple(sorted({e.fields["code"] for e in got if e.kind in ("fallback", "graph_break")})), wrong)


def _flat(v: Any) -> list[Any]:
    return [x for y in v for x in _flat(y)] if isinstance(v, (tuple, list)) else [v]


def _aliasing(inputs: Any, results: Any) -> list[int]:
    """Which tensors lie in one storage: per tensor the number of the first that does."""
    places = [t.untyped_storage().data_ptr() for t in (*_flat(inputs), *_flat(results)) if isinstance(t, torch.Tensor)]
    return [places.index(p) for p in places]


def _difference(mine: list[Any], eager: list[Any], tolerance: float) -> str:
    for a, b in zip(mine, eager, strict=True):
        if not isinstance(b, torch.Tensor):
            if a is not b and (a is None or b is None or abs(a - b) > tolerance * max(1.0, abs(b))):
                return f"{a!r} instead of {b!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
            return f"{tuple(a.shape)} {a.dtype} {a.stride()} instead of {tuple(b.shape)} {b.dtype} {b.stride()}"
        far = float((a.detach().double() - b.detach().double()).abs().max())
        if not far <= tolerance * max(float(b.detach().double().abs().max()), 1e-6):
            return f"off by {far:.1e}"
    return ""
