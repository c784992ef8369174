"""Recurrent networks: one Repeat over time, for any length, interpreted and compiled, just in time and in packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lower_harness import check, check_native, program_of
from torch import nn

import torchsmith
from torchsmith import aot, events
from torchsmith.emit.c import emit_kernel
from torchsmith.export import Dim
from torchsmith.ir.kernel import Kernel
from torchsmith.ir.program import Extern, Program, Repeat, Stage
from torchsmith.options import Options
from torchsmith.schedule.fusion.fuse import fuse
from torchsmith.schedule.kernels import form_kernels

KINDS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "num_layers": 2}),
    (nn.LSTM, {"proj_size": 3, "bidirectional": True, "bias": False}),
    (nn.GRU, {"num_layers": 2, "bias": False}),
    (nn.GRU, {"bidirectional": True, "batch_first": True}),
    (nn.RNN, {"num_layers": 2, "bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "bias": False, "batch_first": True}),
]
OPERATORS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}


def operator_of(kind: type[nn.RNNBase], how: dict[str, Any], sizes: tuple[int, ...], dtype: Any = torch.float32) -> tuple[Any, Any]:
    """The module's one operator as a function of (input, states..., parameters...), and such arguments, the states not zero."""
    torch.manual_seed(0)
    m = kind(sizes[-1], 18, **how).eval().requires_grad_(False).to(dtype)
    x = torch.randn(sizes).to(dtype)
    states = m(x)[1]
    given = [torch.randn_like(t) for t in (states if isinstance(states, tuple) else (states,))]
    weights = list(m.parameters())

    def call(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        h, params = rest[: len(given)], list(rest[len(given) :])
        hx = list(h) if m.mode == "LSTM" else h[0]
        return OPERATORS[m.mode](x, hx, params, m.bias, m.num_layers, 0.0, False, m.bidirectional, m.batch_first)  # type: ignore[operator]

    return call, (x, *given, *weights)


@pytest.mark.parametrize("kind, how", KINDS, ids=str)
def test_lowered(kind: type[nn.RNNBase], how: dict[str, Any]) -> None:
    fn, args = operator_of(kind, how, (3, 2, 5))
    for dynamic in (False, True):
        program = check(fn, *args, dynamic=dynamic)
        assert sum(isinstance(e, Repeat) for e in program.body) == how.get("num_layers", 1) * (1 + how.get("bidirectional", False))


@pytest.mark.parametrize("kind, how", KINDS, ids=str)
def test_native(kind: type[nn.RNNBase], how: dict[str, Any]) -> None:
    """More rows and columns than a tile has, and a rest of both."""
    fn, args = operator_of(kind, how, (4, 9, 21))
    assert not check_native(fn, *args, rtol=1e-5, atol=1e-5, dynamic=how.get("batch_first", False)).externs


@pytest.mark.parametrize("dtype, near", [(torch.float64, 1e-9), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
def test_other_dtypes(dtype: Any, near: float) -> None:
    for kind, how in ((nn.LSTM, {"bidirectional": True}), (nn.GRU, {})):
        fn, args = operator_of(kind, how, (7, 2, 20), dtype)
        assert not check_native(fn, *args, rtol=near, atol=near).externs


def loops(fn: Any, args: Any) -> list[Repeat]:
    program, _ = program_of(fn, args)
    return [e for e in form_kernels(fuse(program, Options()), Options()).body if isinstance(e, Repeat)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_one_launch_a_step(kind: type[nn.RNNBase]) -> None:
    """Weights are packed in front of the loop, whether or not they are constants."""
    (found,) = loops(*operator_of(kind, {}, (3, 2, 5)))
    assert [isinstance(k, Kernel) and k.name != "pack" for k in found.body] == [True]


@pytest.mark.parametrize("kind, gates", [(nn.LSTM, 4), (nn.GRU, 3)])
def test_a_step_asks_for_what_its_cell_reads(kind: type[nn.RNNBase], gates: int) -> None:
    """What the inputs give the gates comes from memory, step by step: it is asked for while the sums are taken, also by partial tiles."""
    (found,) = loops(*operator_of(kind, {}, (3, 2, 5)))
    (kernel,) = found.body
    assert isinstance(kernel, Kernel)
    asked = [line for line in emit_kernel(kernel).split("\n") if "__builtin_prefetch(b" in line and ", 0);" in line]
    assert len(asked) >= 2 * gates, asked


def test_what_changes_stays_in_the_loop() -> None:
    (found,) = loops(*operator_of(nn.LSTM, {"proj_size": 3}, (3, 2, 5)))
    assert len(found.body) == 2  # the cell, and the projection of what it gives


def test_dropout_in_training_is_a_call() -> None:
    """It is random; without a layer behind it, or outside of training, there is none."""
    _, (x, h, c, *weights) = operator_of(nn.LSTM, {"num_layers": 2}, (3, 2, 5))

    def body(layers: int, p: float, train: bool) -> Program:
        def call(x: Any, h: Any, c: Any, *w: Any) -> Any:
            return torch.lstm(x, [h, c], list(w), True, layers, p, train, False, False)

        return program_of(call, (x, h[:layers], c[:layers], *weights[: 4 * layers]))[0]

    assert any(isinstance(e, Extern) for e in body(2, 0.5, True).body)
    for layers, p, train in ((2, 0.0, True), (2, 0.5, False), (1, 0.5, True)):
        assert not any(isinstance(e, Extern) for e in body(layers, p, train).body)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_lengths_that_change(kind: type[nn.RNNBase]) -> None:
    """A size that changed once is any size from then on, 1 included."""
    torch.manual_seed(0)
    model = kind(6, 8, batch_first=True).eval()
    compiled = torchsmith.compile(model, fullgraph=True)
    with torch.no_grad(), events.recording() as got:
        for batch, steps in ((2, 5), (2, 9), (3, 5), (1, 1), (7, 30), (3, 1), (1, 40)):
            x = torch.randn(batch, steps, 6)
            torch.testing.assert_close(compiled(x), model(x))
    reports = [e.fields["report"] for e in got if e.kind == "graph"]
    assert len(reports) == 3 and all(r.road == "native" and not r.externs for r in reports)


def test_cells_in_a_loop() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTMCell(4, 6), nn.GRUCell(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = c = x.new_zeros(x.shape[1], 6)
            g = x.new_zeros(x.shape[1], 5)
            for row in x:
                h, c = self.first(row, (h, c))
                g = self.second(h, g)
            return g

    torch.manual_seed(0)
    model = Loop().eval()
    compiled = torchsmith.compile(model, fullgraph=True)
    with torch.no_grad():
        for batch in (1, 3, 2):
            x = torch.randn(4, batch, 4)
            torch.testing.assert_close(compiled(x), model(x))


class Tagger(nn.Module):
    """Embedding, a deep network in both directions, a linear layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.run = kind(8, 16, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(32, 3)

    def forward(self, ids: torch.Tensor) -> Any:
        y, last = self.run(self.words(ids))
        return self.out(y), last


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_package_for_all_lengths(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tagger(kind).eval()
    sizes = {0: Dim("batch", min=1, max=8), 1: Dim("steps", min=1, max=64)}
    program = torchsmith.export.export(model, (torch.randint(0, 50, (3, 7)),), dynamic_shapes=(sizes,))
    path = str(tmp_path / "tagger.pt2")
    aot.compile_and_package(program, package_path=path)
    weights = sum(4 * p.numel() for p in model.parameters())
    assert Path(path).stat().st_size < weights + (1 << 20)
    loaders = [aot.load_package(path), torch._inductor.aoti_load_package(path)]
    with torch.no_grad():
        for batch, steps in ((1, 1), (8, 64), (3, 7), (1, 64), (8, 1)):
            ids = torch.randint(0, 50, (batch, steps))
            want = model(ids)
            for run in loaders:
                torch.testing.assert_close(run(ids), want, rtol=1e-5, atol=1e-5)


def test_steps_are_stages_of_their_own() -> None:
    """What the inputs give is one product over all steps, before the loop."""
    fn, args = operator_of(nn.LSTM, {}, (3, 2, 5))
    program, _ = program_of(fn, args)
    at = next(i for i, e in enumerate(program.body) if isinstance(e, Repeat))
    first = program.body[0]
    assert at > 0 and isinstance(first, Stage) and len(first.axes) == 3


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def test_packed_sequences() -> None:
    """compile runs what packs eagerly and says so; export refuses it by the user's line; a packed argument likewise."""
    model = Packed().eval().requires_grad_(False)
    x = torch.randn(3, 6, 4)
    compiled = torchsmith.compile(model)
    for lengths in (torch.tensor([6, 2, 4]), torch.tensor([1, 6, 3]), torch.tensor([2, 2, 2])):
        torch.testing.assert_close(compiled(x, lengths), model(x, lengths))
    with pytest.raises(torchsmith.Unsupported, match=r"test_recurrent.py:\d+.*GRA009.*_pack_padded_sequence"):
        torchsmith.export.export(model, (x, lengths))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    lstm = nn.LSTM(4, 5, batch_first=True).eval().requires_grad_(False)
    torch.testing.assert_close(torchsmith.compile(lstm)(packed)[0].data, lstm(packed)[0].data)
    with pytest.raises(torchsmith.Unsupported, match="AOT062"):
        torchsmith.export.export(lstm, (packed,))


@pytest.mark.parametrize(
    "kind, settings",
    [
        (nn.LSTM, {"num_layers": 2, "dropout": 0.5, "bidirectional": True, "proj_size": 3}),
        (nn.LSTM, {"bias": False, "proj_size": 3}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
    ],
)  # fmt: skip
def test_training_with_batches_that_change(kind: type[nn.RNNBase], settings: dict[str, Any]) -> None:
    """Torch would unroll for the batch at hand: one more graph for each size."""
    torch.manual_seed(0)
    model = kind(4, 6, **settings)
    compiled = torchsmith.compile(model, fullgraph=True)
    first = settings.get("batch_first", False)
    with events.recording() as got:
        for batch in (2, 3, 5, 4):
            x = torch.randn((batch, 3, 4) if first else (3, batch, 4), requires_grad=True)
            found = []
            for net in (model, compiled):
                torch.manual_seed(1)
                out, last = net(x)
                grads = torch.autograd.grad(out.sin().sum() + sum(h.sum() for h in last), [x, *model.parameters()])
                found.append((out, *last, *grads))
            torch.testing.assert_close(found[1], found[0])
            assert [t.stride() for t in found[1]] == [t.stride() for t in found[0]]
    assert sum(e.kind == "graph" for e in got) == 2


def test_a_hidden_state_of_another_batch() -> None:
    weights = [torch.randn(n, requires_grad=True) for n in ((9, 4), (9, 3))]

    def call(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.gru(x, h, weights, False, 1, 0.0, True, False, False)[0]

    compiled = torchsmith.compile(call, dynamic=True)
    for h in (torch.randn(1, 2, 3), torch.randn(1, 1, 3)):
        results = []
        for fn in (call, compiled):
            try:
                results.append(fn(torch.ones(3, 2, 4), h).detach())
            except RuntimeError as error:
                results.append(str(error))
        if isinstance(results[0], str):
            assert results[0] == results[1]
        else:
            torch.testing.assert_close(results[1], results[0])


def steps_of(name: str, dtype: Any, steps: int = 3, batch: int = 2, size: int = 5) -> tuple[Any, ...]:
    """Arguments of an operator of graph/steps.py."""
    torch.manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    h, all_states = drawn(batch, size), drawn(steps + 1, batch, size)
    if name == "lstm":
        return drawn(steps, batch, 4 * size), h, drawn(batch, size), drawn(4 * size, size)
    if name == "gru":
        return drawn(steps, batch, 3 * size), h, drawn(3 * size, size), drawn(3 * size)
    gates = drawn(steps, batch, 4 * size).sigmoid()
    if name == "lstm_backward":
        return all_states, drawn(steps + 1, batch, size), drawn(steps + 1, batch, size), gates, drawn(4 * size, size)
    return all_states, drawn(steps + 1, batch, size), gates, drawn(3 * size, size)


@pytest.mark.parametrize("name", ["lstm", "lstm_backward", "gru", "gru_backward"])
def test_steps_are_loops(name: str) -> None:
    call = getattr(torch.ops.torchsmith_steps, name).default
    for dynamic in (False, True):
        program = check(call, *steps_of(name, torch.float64), dynamic=dynamic)
        assert sum(isinstance(e, Repeat) for e in program.body) == 1
    assert not check_native(call, *steps_of(name, torch.float32, 4, 9, 18), rtol=1e-5, atol=1e-5).externs


@pytest.mark.parametrize("kind, how", [(nn.LSTM, {"num_layers": 2, "bidirectional": True}), (nn.GRU, {"batch_first": True})], ids=str)
def test_gradients(kind: type[nn.RNNBase], how: dict[str, Any]) -> None:
    """Of the first order by the loop, of the second step by step: inside of what is compiled, and apart."""
    torch.manual_seed(0)
    model = kind(4, 3, **how).double()
    leaves = [*model.parameters()]

    def penalty(x: torch.Tensor, further: bool) -> tuple[torch.Tensor, ...]:
        out, last = model(x)
        total = out.square().sum() + sum(t.sin().sum() for t in (last if isinstance(last, tuple) else (last,)))
        grads = torch.autograd.grad(total, [x, *leaves], create_graph=further)
        return torch.autograd.grad(grads[0].square().sum(), leaves, allow_unused=True) if further else grads

    compiled, apart = torchsmith.compile(penalty, fullgraph=True), torchsmith.compile(model, fullgraph=True)
    for steps in (2, 1):
        x = torch.randn(*((2, steps) if how.get("batch_first") else (steps, 2)), 4, dtype=torch.float64, requires_grad=True)
        for further in (False, True):
            torch.testing.assert_close(compiled(x, further), penalty(x, further))
        pairs = [torch.autograd.grad(net(x)[0].square().sum(), [x, *leaves]) for net in (apart, model)]
        torch.testing.assert_close(*pairs)


def test_a_long_sequence_is_no_longer_graph() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 3)

    def counted(steps: int) -> int:
        def step(x: torch.Tensor) -> None:
            model.zero_grad()
            model(x)[0].square().sum().backward()

        with events.recording() as got:
            torchsmith.compile(step, fullgraph=True)(torch.randn(steps, 2, 4))
        (report,) = (e.fields["report"] for e in got if e.kind == "graph")
        assert report.road == "native" and not report.externs
        return int(report.operators)

    assert counted(4) == counted(300)
