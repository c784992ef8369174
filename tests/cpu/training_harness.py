"""Training steps against eager: each compiled step starts from eager's state, and may be twice as far from float64 as eager's own step is.

In: a model, an optimizer over it, `step(model, optimizer, *batch)`. Out: nothing, or an AssertionError that names the tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torchsmith
from torchsmith.events import recording

Step = Callable[..., Any]


def state_of(model: nn.Module, optimizers: list[Any]) -> Iterator[tuple[str, Tensor | None]]:
    """Everything that a step may change, by name."""
    for name, p in model.named_parameters():
        yield name, p.detach()
        yield f"{name}.grad", p.grad
    yield from model.named_buffers()
    for number, optimizer in enumerate(optimizers):
        names = {p: name for name, p in model.named_parameters()}
        for p, row in optimizer.state.items():
            for key, value in row.items():
                if isinstance(value, Tensor):
                    yield f"optimizer {number}: {names.get(p, '?')}.{key}", value


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(_doubled(v) for v in value) if isinstance(value, (tuple, list)) else value


def in_float64(model: nn.Module, optimizers: list[Any]) -> tuple[nn.Module, list[Any]]:
    """A copy that computes in float64."""
    model, optimizers = copy.deepcopy((model, optimizers))
    for p in model.parameters():
        grad, p.grad = p.grad, None
        p.data = p.data.double()
        p.grad = None if grad is None else grad.double()
    for module in model.modules():
        for name, b in module._buffers.items():
            module._buffers[name] = _doubled(b)
    for optimizer in optimizers:
        for row in optimizer.state.values():
            for key, value in row.items():
                row[key] = value if key == "step" else _doubled(value)
    return model, optimizers


def _become(target: tuple[nn.Module, list[Any]], source: tuple[nn.Module, list[Any]]) -> None:
    """The target's tensors take the source's values, in place where both are there."""
    have, want = list(state_of(*target)), list(state_of(*source))
    assert [n for n, _ in have] == [n for n, _ in want], ([n for n, _ in have], [n for n, _ in want])
    with torch.no_grad():
        for (_, a), (_, b) in zip(have, want, strict=True):
            if a is not None and b is not None:
                a.copy_(b)


def check_steps(
    model: nn.Module, make: Callable[[nn.Module], Any], step: Step, batches: list[tuple[Any, ...]], *, slack: float = 2.0, graphs: int = 2,
    native: bool = True, backend: Any = "inductor", seed: int = 0,
) -> Any:  # fmt: skip
    """`make(model)` gives the optimizer, or a list of them. Returns the compiled step. graphs: how many compilations it may take."""
    ours, eager = copy.deepcopy(model), copy.deepcopy(model)

    def made(m: nn.Module) -> list[Any]:
        found = make(m)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    mine, theirs = made(ours), made(eager)
    compiled = torchsmith.compile(step, backend=backend)
    seen: list[Any] = []
    with recording() as got:
        for number, batch in enumerate(batches):
            exact, best = in_float64(eager, theirs)
            _become((ours, mine), (eager, theirs))
            torch.manual_seed(seed + number)
            said = compiled(ours, *mine, *batch)
            after = torch.get_rng_state()
            torch.manual_seed(seed + number)
            want = step(eager, *theirs, *batch)
            assert torch.equal(after, torch.get_rng_state()), "the generator ends elsewhere"
            torch.manual_seed(seed + number)
            truth = step(exact, *best, *_doubled(batch))
            sides = ((ours, mine, said), (eager, theirs, want), (exact, best, truth))
            for (name, a), (other, b), (_, c) in zip(*([*state_of(m, o), *_results(r)] for m, o, r in sides), strict=True):
                assert name == other, (name, other)
                _compare(f"step {number}: {name}", a, b, c, slack)
    seen = [e.fields["report"] for e in got if e.kind == "graph"]
    breaks = [e.fields for e in got if e.kind == "graph_break"]
    assert not breaks, breaks
    if native:
        assert all(r.road == "native" for r in seen), seen
    assert len(seen) <= graphs, [r.name for r in seen]
    return compiled


def _results(value: Any) -> Iterator[tuple[str, Any]]:
    many = value if isinstance(value, (tuple, list)) else (value,)
    for i, v in enumerate(many):
        yield f"result {i}", torch.tensor(v, dtype=torch.float64) if isinstance(v, float) else v


def _compare(name: str, ours: Any, eager: Any, exact: Any, slack: float) -> None:
    if not isinstance(eager, Tensor):
        assert ours == eager, (name, ours, eager)
        return
    assert isinstance(ours, Tensor), f"{name}: {ours} instead of a tensor"
    assert ours.dtype == eager.dtype and ours.shape == eager.shape and ours.requires_grad == eager.requires_grad, name
    assert ours.stride() == eager.stride(), f"{name}: strides {ours.stride()} instead of {eager.stride()}"
    if not eager.is_floating_point():
        assert torch.equal(ours, eager), name
        return
    ours, eager, exact = ours.detach().double(), eager.detach().double(), exact.detach().double()
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    room = slack * float((eager - exact).abs().max()) if exact.numel() else 0.0
    room += 4 * torch.finfo(torch.float32).eps * scale + 1e-12
    far = float((ours - exact).abs().max()) if exact.numel() else 0.0
    same_nan = not torch.isfinite(exact).all() and torch.equal(ours.isnan(), eager.isnan())
    assert far <= room or same_nan, f"{name}: {far:.3e} from float64, allowed {room:.3e}"
