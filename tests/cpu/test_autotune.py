"""max-autotune: it measures once per processor, changes no result and no input, and survives a damaged memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import events, tuning
from torchsmith.ir.expr import const
from torchsmith.ir.kernel import Choice
from torchsmith.ir.plan import Launch
from torchsmith.runtime import store, tuned


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    torchsmith.compiler.reset()
    yield tmp_path / "cache"
    torchsmith.compiler.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 200)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu()
        total.add_(y.sum())
        return y


def call(layer: nn.Module, **settings: object) -> tuple[torch.Tensor, torch.Tensor, list[events.Event]]:
    """(result, the input that is written, events) of one first call."""
    torch.manual_seed(0)
    x, total = torch.randn(100, 64), torch.zeros(())
    torchsmith.compiler.reset()
    with torch.no_grad(), events.recording() as got:
        result = torchsmith.compile(layer, **settings)(x, total)
    return result, total, got


def kinds(got: list[events.Event], kind: str) -> list[events.Event]:
    return [e for e in got if e.kind == kind]


def test_measures_once_and_changes_nothing_else(own_cache: Path) -> None:
    layer = Layer().eval()
    want, want_total, got = call(layer)
    assert not kinds(got, "tuning") and not kinds(got, "tuned")

    result, total, got = call(layer, mode="max-autotune")
    torch.testing.assert_close(result, want)
    torch.testing.assert_close(total, want_total)  # the runs that measured wrote to a copy
    assert kinds(got, "tuning"), "something was measured"
    assert "1 of them measured now" in kinds(got, "tuned")[0].fields["lines"][0]

    _, _, got = call(layer, options={"max_autotune": True})  # the same graph: from the cache
    assert not kinds(got, "tuning") and kinds(got, "tuned")[0].fields["lines"]

    for path in (own_cache / "v1" / "graph").glob("*.json"):
        path.unlink()
    _, _, got = call(layer, mode="max-autotune-no-cudagraphs")  # compiled again: from the processor's file
    assert not kinds(got, "tuning")
    assert "0 of them measured now" in kinds(got, "tuned")[0].fields["lines"][0]

    (memory,) = (own_cache / "v1" / "tuned").iterdir()
    for damage in (b"", b"{]", memory.read_bytes()[:-40] + b"x" * 40):
        memory.write_bytes(damage)
        assert tuned.recall() == {}
        for path in (own_cache / "v1" / "graph").glob("*.json"):
            path.unlink()
        result, _, got = call(layer, mode="max-autotune")
        torch.testing.assert_close(result, want)
        assert kinds(got, "tuning") and tuned.recall(), "measured and written again"


def test_what_is_remembered_need_not_make_sense(own_cache: Path) -> None:
    path = tuned._path()
    for content in (b"[]", b'{"a": 1}', b'{"a": {"chosen": "x"}}'):
        store.put(path, content)
        assert tuned.recall() == {}
    tuned.remember({"a": tuned.Tuned("x", 1.5)})
    tuned.remember({"b": tuned.Tuned("y", 1.0)})
    assert tuned.recall() == {"a": tuned.Tuned("x", 1.5), "b": tuned.Tuned("y", 1.0)}
    assert json.loads(store.get(path) or b"")["a"]["chosen"] == "x"


def test_explain_says_what_was_chosen(own_cache: Path) -> None:
    layer = Layer().eval()
    with torch.no_grad():
        text = str(torchsmith.explain(layer, mode="max-autotune")(torch.randn(100, 64), torch.zeros(())))
    assert "max-autotune: 1 tilings" in text


class Graph:
    """Launches that take as long as the table says."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def __call__(self) -> None:
        pass

    def profile(self) -> list[float]:
        return self.seconds


def decide(table: dict[str, dict[str, float]], keys: list[str | None]) -> dict[str, str]:
    """What is decided when candidate c of key k takes table[k][c] seconds."""
    choices = {k: Choice(k, tuple(row)) for k, row in table.items()}

    def make(decided: dict[str, str]) -> SimpleNamespace:
        seconds = [0.5 if k is None else table[k][decided.get(k, next(iter(table[k])))] for k in keys]
        kernels = [SimpleNamespace(choice=None if k is None else choices[k]) for k in keys]
        run = [Launch(i, (), (), const(4), const(1)) for i in range(len(keys))]
        return SimpleNamespace(load=lambda: Graph(seconds), plan=SimpleNamespace(kernels=kernels, run=run))

    found = tuning._Tuner(make, choices, {}, [], "g").decide()
    return {k: t.chosen for k, t in found.items()}


def test_the_fastest_candidate_of_each_decision_wins() -> None:
    table = {"p": {"a": 3.0, "b": 2.0, "c": 1.0}, "q": {"a": 1.0, "b": 2.0}, "r": {"a": 1.0, "b": 0.99}}
    assert decide(table, ["p", None, "q", "p", "r"]) == {"p": "c", "q": "a", "r": "a"}  # 1 % is no gain


def test_foreign_operators_are_not_run_for_their_times() -> None:
    made = SimpleNamespace(manifest=SimpleNamespace(externs=[SimpleNamespace(op="mine.send.default")]))
    assert "mine.send" in tuning._refuses(made, [])
    made.manifest.externs = [SimpleNamespace(op="aten.sort.default")]
    assert tuning._refuses(made, [torch.zeros(2)]) == ""
    assert tuning._refuses(made, [torch.zeros(2, device="meta")])
