"""Debug reads events alone: explain's figures and text, log lines, debug folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from torchsmith import events, options
from torchsmith.debug import logs
from torchsmith.debug.explain import explained
from torchsmith.debug.folders import FolderWriter


@dataclass(frozen=True)
class Report:
    name: str = "g0"
    road: str = "native"
    code: str | None = None
    operators: int = 2
    kernels: int = 1
    externs: tuple[str, ...] = ("aten.mm.default",)
    library: str = "lib.so"
    cached: bool = False
    extern_at: tuple[str, ...] = ("user.py:4",)
    segments: tuple[tuple[int, int], ...] = ()
    peak: int = -1


def compiled(x: int) -> int:
    events.emit("artifact", graph="g0", name="plan.txt", text=lambda: "the plan  # user.py:3\n")
    events.emit("kernel", graph="g0", name="sin_cos", origins=("user.py:3",), what="pointwise")
    events.emit("time", graph="g0", name="lower", wall=0.5, cpu=0.25)
    events.emit("graph", name="g0", report=Report())
    events.emit("guards", name="f", list=["L['x'] is a float32 tensor of shape (8,)"])
    events.emit("graph_break", code="AUT001", loc="user.py:9", detail="because")
    return x + 1


def test_explain_counts_and_prints() -> None:
    e = explained(compiled)(1)
    assert (e.result, e.graph_count, e.graph_break_count, e.kernel_count, e.op_count) == (2, 1, 1, 1, 2)
    assert e.extern_calls == ("aten.mm.default",)
    assert e.guards == ("L['x'] is a float32 tensor of shape (8,)",)
    assert e.times == {"lower": (0.5, 0.25)}
    assert e.graphs[0].kinds == ("pointwise",)
    text = str(e)
    assert "user.py:9: [AUT001]" in text and "aten.mm.default" in text and "lower 0.500" in text


def test_folder_holds_the_artifacts_of_its_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = FolderWriter(tmp_path)
    events.listen(writer)
    try:
        compiled(1)
        compiled(1)
    finally:
        events.unlisten(writer)
    first, second = sorted(tmp_path.iterdir())
    assert (first / "plan.txt").read_text() == "the plan  # user.py:3\n"
    assert "sin_cos from user.py:3" in (second / "report.txt").read_text()
    said = capsys.readouterr().err
    assert str(first) in said and str(second) in said


def test_unwritable_folder_is_said_and_does_not_stop_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    FolderWriter(tmp_path / "file")(events.Event("graph", {"name": "g0", "report": Report()}))
    assert "cannot write the debug folder" in capsys.readouterr().err


def test_logs_print_what_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHSMITH_LOGS", "graph_breaks, kernels,nonsense")
    monkeypatch.setattr(logs, "_started", [])
    logs.start_logs()
    try:
        compiled(1)
    finally:
        events.unlisten(logs._started[0])
    said = capsys.readouterr().err
    assert "user.py:9: [AUT001]" in said and "sin_cos from user.py:3" in said and "'nonsense'" in said
    assert "guards" not in said.replace("known: graph_breaks, recompiles, guards", "")


def test_logs_print_the_texts_of_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By PyTorch's names, in its variable too; graphs are then traced, and no debug folder is asked for."""
    monkeypatch.delenv("TORCHSMITH_LOGS", raising=False)
    monkeypatch.setenv("TORCH_LOGS", "+output_code,dynamo,recompiles")
    monkeypatch.setattr(logs, "_started", [])
    assert options.from_environment().trace_enabled and not options.wants_folders()
    logs.start_logs()
    try:
        events.emit("artifact", graph="g0", name="output_code.c", text=lambda: "int main;")
        events.emit("artifact", graph="g0", name="plan.txt", text="the plan")
    finally:
        events.unlisten(logs._started[0])
    assert capsys.readouterr().err == "[torchsmith output_code] g0:\nint main;\n"


def test_folders_of_traced_graphs_only(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path, always=False)
    writer(events.Event("graph", {"name": "plain", "report": Report()}))
    writer(events.Event("artifact", {"graph": "traced", "name": "plan.txt", "text": "the plan"}))
    writer(events.Event("graph", {"name": "traced", "report": Report()}))
    (folder,) = tmp_path.iterdir()
    assert (folder / "plan.txt").read_text() == "the plan"
