"""Training steps against eager: each compiled step starts from eager's state, and may be twice as far from float64 as eager's own step is.

In: a model, an optimizer over it, `step(model, optimizer, *batch)`. Out: nothing, or an AssertionError that names the tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
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


def make_optimizers(make: Callable[[nn.Module], Any], m: nn.Module) -> list[Any]:
    found = make(m)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def triples(
    model: nn.Module, make: Callable[[nn.Module], Any], step: Step, batches: Iterable[tuple[Any, ...]], run: Callable[[nn.Module], Step],
    seed: int = 0,
) -> Iterator[tuple[str, Any, Any, Any]]:  # fmt: skip
    """(name, ours, eager's, float64's) of everything that each step leaves; ours, `run(model)`, starts every step from eager's state."""
    ours, eager = copy.deepcopy(model), copy.deepcopy(model)
    mine, theirs = make_optimizers(make, ours), make_optimizers(make, eager)
    compiled = run(ours)
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
            yield f"step {number}: {name}", a, b, c


def check_steps(
    model: nn.Module, make: Callable[[nn.Module], Any], step: Step, batches: list[tuple[Any, ...]], *, slack: float = 2.0, graphs: int = 2,
    native: bool = True, backend: Any = "inductor", seed: int = 0,
) -> Any:  # fmt: skip
    """`make(model)` gives the optimizer, or a list of them. Returns the compiled step. graphs: how many compilations it may take."""
    compiled = torchsmith.compile(step, backend=backend)
    with recording() as got:
        for name, a, b, c in triples(model, make, step, batches, lambda m: compiled, seed):
            _compare(name, a, b, c, slack)
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


def difference(ours: Any, eager: Any) -> str:
    """What is not as eager has it, values aside."""
    if not isinstance(eager, Tensor):
        return "" if ours == eager else f"{ours} instead of {eager}"
    if not isinstance(ours, Tensor):
        return f"{ours} instead of a tensor"
    for what in ("dtype", "shape", "requires_grad", "is_leaf"):
        if getattr(ours, what) != getattr(eager, what):
            return f"{what} {getattr(ours, what)} instead of {getattr(eager, what)}"
    if ours.stride() != eager.stride():
        return f"strides {ours.stride()} instead of {eager.stride()}"
    if not eager.is_floating_point():
        return "" if torch.equal(ours, eager) else "other values"
    return ""


def _compare(name: str, ours: Any, eager: Any, exact: Any, slack: float) -> None:
    why = difference(ours, eager)
    assert not why, f"{name}: {why}"
    if not isinstance(eager, Tensor) or not eager.is_floating_point():
        return
    ours, eager, exact = ours.detach().double(), eager.detach().double(), exact.detach().double()
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    room = slack * float((eager - exact).abs().max()) if exact.numel() else 0.0
    room += 4 * torch.finfo(torch.float32).eps * scale + 1e-12
    far = float((ours - exact).abs().max()) if exact.numel() else 0.0
    same_nan = not torch.isfinite(exact).all() and torch.equal(ours.isnan(), eager.isnan())
    assert far <= room or same_nan, f"{name}: {far:.3e} from float64, allowed {room:.3e}"
