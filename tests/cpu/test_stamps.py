"""Equal modules are interpreted once: what is stamped out is what interpreting would have given, node by node and guard by guard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchsmith
from torchsmith.capture import stamps
from torchsmith.capture.asked import Asked
from torchsmith.capture.start import capture
from torchsmith.events import recording


class Block(nn.Module):
    def __init__(self, n: int = 8, **kept: Any) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(n, n), nn.Linear(n, n, bias=False), nn.LayerNorm(n)
        self.register_buffer("scale", torch.rand(n))
        for k, v in kept.items():
            setattr(self, k, v)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.b(F.relu(self.a(x)) * self.scale))


class Numbered(Block):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.number


class Counting(Block):
    def forward(self, x: Any) -> Any:
        self.count = self.count + 1
        return super().forward(x)


class Configured(Block):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y * self.config["factor"] if self.config["on"] else y


class Keeping(Block):
    def forward(self, x: Any, kept: Any) -> Any:
        y = super().forward(x)
        kept.append(y)
        return y


class Viewing(Block):
    def forward(self, x: Any) -> Any:
        return super().forward(x).transpose(0, 1).transpose(0, 1)


class Paired(Block):
    def forward(self, x: Any, pair: Any) -> Any:
        y = super().forward(x) + pair[0]
        return y, (pair[0], y.exp())


class InPlace(Block):
    def forward(self, x: Any) -> Any:
        return F.relu(self.a(x).add_(1.0), inplace=True)


class WritesArgument(Block):
    def forward(self, x: Any) -> Any:
        x.add_(self.scale)
        return self.a(x)


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module], norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.flag = 0

    def forward(self, x: Any) -> Any:
        x = x * 2
        for layer in self.layers:
            x = layer(x)
        return x


class KeepingStack(Stack):
    def forward(self, x: Any) -> Any:
        kept: list[Any] = []
        x = x * 2
        for layer in self.layers:
            x = layer(x, kept)
        return x, kept


class PairedStack(Stack):
    def forward(self, x: Any) -> Any:
        x = x * 2
        pair = (x.sin(), x.cos())
        for layer in self.layers:
            x, pair = layer(x, pair)
        return x, pair


class Switching(Stack):
    """What a layer reads is changed between layers."""

    def forward(self, x: Any) -> Any:
        x = x * 2
        for n, layer in enumerate(self.layers):
            self.layers[0].config["on"] = n % 3 == 0
            x = layer(x)
        return x


class Modes(Stack):
    def forward(self, x: Any) -> Any:
        x = x * 2
        for n, layer in enumerate(self.layers):
            with torch.set_grad_enabled(n % 2 == 0):
                x = layer(x)
        return x


def hooked() -> list[nn.Module]:
    layers = [Block() for _ in range(5)]
    layers[3].register_forward_hook(lambda m, a, out: out * 3)
    return layers


def patched() -> list[nn.Module]:
    layers = [Block() for _ in range(5)]
    layers[3].forward = lambda x: x + 1  # type: ignore[method-assign]
    return layers


def tied() -> list[nn.Module]:
    layers = [Block() for _ in range(5)]
    layers[3].a.weight = layers[1].a.weight
    layers[4].b = layers[2].b
    return layers


def twice() -> list[nn.Module]:
    a, b = Block(), Block()
    return [a, b, a, b, a]


def mixed() -> list[nn.Module]:
    layers = [Block() for _ in range(6)]
    layers[2].norm.eps = 1e-3
    layers[3].a = nn.Linear(8, 8, bias=False)
    layers[4].b.weight.requires_grad_(False)
    layers[5].scale = torch.rand(8, dtype=torch.float64).float()[:8]
    return layers


def shared(on: bool = True) -> list[nn.Module]:
    config = {"factor": 2.0, "on": on}
    return [Configured(config=config) for _ in range(5)]


def own_configs() -> list[nn.Module]:
    return [Configured(config={"factor": 2.0, "on": n != 3}) for n in range(5)]


ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
# program, how many modules at least are stamped out (0: none is)
PROGRAMS: dict[str, tuple[Any, int]] = {
    "equal": (lambda: Stack([Block() for _ in range(5)]), 3),
    "sequential": (lambda: nn.Sequential(*[Block() for _ in range(5)]), 3),
    "nested": (lambda: Stack([nn.Sequential(Block(), Block(), Block()) for _ in range(4)]), 4),
    "numbered": (lambda: Stack([Numbered(number=n) for n in range(2, 7)]), 0),
    "two of a number": (lambda: Stack([Numbered(number=n % 2 + 2) for n in range(6)]), 4),
    "counting": (lambda: Stack([Counting(count=0) for _ in range(4)]), 0),
    "shared configuration": (lambda: Stack(shared()), 3),
    "own configurations": (lambda: Stack(own_configs()), 3),
    "switched between": (lambda: Switching(shared()), 0),
    "kept in a list": (lambda: KeepingStack([Keeping() for _ in range(4)]), 0),
    "views": (lambda: Stack([Viewing() for _ in range(4)]), 0),
    "pairs": (lambda: PairedStack([Paired() for _ in range(5)]), 3),
    "in place": (lambda: Stack([InPlace() for _ in range(5)]), 3),
    "argument written": (lambda: Stack([WritesArgument() for _ in range(4)]), 0),
    "hooked": (lambda: Stack(hooked()), 3),
    "patched": (lambda: Stack(patched()), 3),
    "tied": (lambda: Stack(tied()), 1),
    "called twice": (lambda: Stack(twice()), 1),
    "mixed": (lambda: Stack(mixed()), 1),
    "grad modes": (lambda: Modes([Block() for _ in range(6)]), 2),
    "training dropout": (lambda: nn.TransformerEncoder(ENCODER, 5, enable_nested_tensor=False), 3),
    "batch norm": (lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)]), 0),
}  # fmt: skip


def described(model: nn.Module, x: torch.Tensor, stamp: bool, **options: Any) -> Any:
    got = capture(type(model).forward, (model, x), {}, Asked(stamps=stamp, **options))
    rows = [(str(g.source), g.kind, repr(g.value) if g.kind != "identity" else id(g.value), g.loc) for g in got.guards]
    locs = [(n.name, n.meta.get("loc"), n.meta.get("role"), n.meta.get("source")) for n in got.graph.graph.nodes]
    vals = [n.meta["val"] for n in got.graph.graph.output_node().all_input_nodes]
    shown = [(tuple(map(str, v.shape)), v.stride() if not options else (), v.dtype, v.requires_grad) for v in vals]
    return got.graph.code, sorted(rows, key=str), [str(s) for s in got.inputs], locs, got.finish.text, got.needs_grad, shown


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    write = stamps.Template._write

    def watched(self: Any, values: Any, sources: Any, *rest: Any) -> Any:
        names.append(str(sources[0]))
        return write(self, values, sources, *rest)

    monkeypatch.setattr(stamps.Template, "_write", watched)
    return names


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_interpreted(name: str, grad: bool, counted: list[str]) -> None:
    make, least = PROGRAMS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(3, 8)
    x = x[None] if "training" in name else x
    with torch.set_grad_enabled(grad):
        want = described(model, x, False)
        assert not counted
        got = described(model, x, True)
        assert got == want
        assert len(counted) >= least - grad and (least or not counted), counted  # with gradients the first layer's argument is another kind
        assert described(model, x, True, dynamic=True) == described(model, x, False, dynamic=True)


def test_results_and_gradients() -> None:
    torch.manual_seed(0)
    model, x = Stack([Block() for _ in range(4)]), torch.randn(3, 8)
    want = model(x)
    want.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    got = torchsmith.compile(model, backend="eager")(x)
    got.square().mean().backward()
    torch.testing.assert_close(got, want)
    for p, g in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_backward_inside() -> None:
    """A program that goes backwards itself is captured again without."""
    torch.manual_seed(0)
    model, x = Stack([Block() for _ in range(4)]), torch.randn(3, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    want = step(x)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torchsmith.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)
    for p, g in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_a_stamped_module_that_changes_is_noticed() -> None:
    """The guards of what was stamped are there: another number, another hook, another parameter."""
    torch.manual_seed(0)
    model, x = Stack([Numbered(number=2) for _ in range(5)]), torch.randn(3, 8)
    compiled = torchsmith.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        model.layers[3].number = 5
        torch.testing.assert_close(compiled(x), model(x))
        model.layers[4].b.weight = nn.Parameter(torch.randn(8, 8))
        torch.testing.assert_close(compiled(x), model(x))
        model.layers[2].register_forward_hook(lambda m, a, out: out - 1)
        torch.testing.assert_close(compiled(x), model(x))
        model.layers[1].a = nn.Linear(8, 8, bias=False)
        torch.testing.assert_close(compiled(x), model(x))


class LoopOnData(Stack):
    """A break between layers: what was stamped is handed over."""

    def forward(self, x: Any) -> Any:
        x = x * 2
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                x = x + 1
        return x


def test_breaks_between_stamps() -> None:
    torch.manual_seed(0)
    model, x = LoopOnData([Block() for _ in range(5)]), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(torchsmith.compile(model, backend="eager")(x), model(x))


class LastOnes(Stack):
    """Modules that are given views whose offset changes with a size."""

    def forward(self, x: Any) -> Any:
        return [layer(x[-1:]) for layer in self.layers]


def test_offset_of_a_size() -> None:
    torch.manual_seed(0)
    model = LastOnes([Block() for _ in range(5)])
    compiled = torchsmith.compile(model, backend="eager", dynamic=True, fullgraph=True)
    with torch.no_grad(), recording() as events:
        for n in (3, 5):
            x = torch.randn(n, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert not [e for e in events if e.kind in ("fallback", "recompile")]
