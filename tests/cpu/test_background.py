"""Tiered start: calls run eagerly until what is compiled beside them is there; stances; threads and forks with breaks."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import warnings

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import compiler
from torchsmith.capture import background
from torchsmith.capture.source import Local
from torchsmith.capture.world import World
from torchsmith.events import recording

X = torch.arange(6.0).reshape(2, 3) / 7 - 0.3


class Gate:
    """A backend that compiles only when it may."""

    def __init__(self) -> None:
        self.may, self.graphs, self.runs, self.thread = threading.Event(), 0, 0, None

    def __call__(self, graph, inputs):
        assert self.may.wait(1200)
        self.graphs += 1
        self.thread = threading.current_thread()

        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


def later(fn, gate, **settings):
    return torchsmith.compile(fn, backend=gate, options={"background": True}, **settings)


def test_no_call_waits_and_then_calls_are_compiled():
    gate = Gate()
    compiled = later(lambda x: x.sin() + 1, gate)
    for _ in range(3):
        assert torch.equal(compiled(X), X.sin() + 1)
    assert gate.graphs == 0 and not compiler.wait_for_background(0)
    gate.may.set()
    assert compiler.wait_for_background(1200) and gate.graphs == 1 and gate.thread is not threading.main_thread()
    assert torch.equal(compiled(X), X.sin() + 1) and gate.runs == 1


def test_effects_happen_once_a_call():
    gate, seen = Gate(), []

    def fn(x):
        seen.append(len(seen))
        return x + len(seen)

    compiled = later(fn, gate)
    gate.may.set()
    for n in range(1, 7):
        assert torch.equal(compiled(X), X + n) and len(seen) == n
        assert compiler.wait_for_background(1200)


def test_the_modes_are_those_of_the_call():
    gate = Gate()
    gate.may.set()
    net = nn.Linear(3, 3)
    compiled = later(net, gate)
    with torch.no_grad():
        compiled(X)
        assert compiler.wait_for_background(1200)
        assert not compiled(X).requires_grad and gate.runs == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(X)
        assert compiler.wait_for_background(1200)
        runs = gate.runs
        assert compiled(X).dtype is torch.bfloat16 and gate.runs == runs + 1
    with torch.inference_mode():
        compiled(X)
        assert compiler.wait_for_background(1200)
        assert compiled(X).is_inference()


def test_sizes_that_vary_and_the_limit():
    gate = Gate()
    gate.may.set()
    compiled = later(lambda x: x * x.shape[0], gate)
    for n in (2, 3, 4, 5, 6):
        x = torch.ones(n, 2)
        assert torch.equal(compiled(x), x * n)
        assert compiler.wait_for_background(1200)
    assert gate.graphs == 2  # a symbol from the second size on


def test_breaks_are_compiled_in_parts():
    gate = Gate()
    gate.may.set()

    def fn(x):
        y = x.sin()
        if y.sum() > 0:
            return y + 1
        return y - 1

    compiled = later(fn, gate)
    for _ in range(4):
        for x in (X + 1, -X - 1):
            assert torch.equal(compiled(x), fn(x))
            assert compiler.wait_for_background(1200)
    runs = gate.runs
    compiled(X)
    assert gate.runs == runs + 2 and gate.graphs == 3


def test_what_the_function_raises_is_raised_and_what_compiling_raises_comes_with_a_later_call():
    def broken(graph, inputs):
        raise KeyError("no")

    def raising(x):
        raise ValueError("mine")

    compiled = later(raising, broken)
    for _ in range(3):
        with pytest.raises(ValueError, match="mine"):
            compiled(X)
        assert compiler.wait_for_background(1200)
    compiled = later(lambda x: x + 1, broken, fullgraph=True)
    assert torch.equal(compiled(X), X + 1)
    assert compiler.wait_for_background(1200)
    with pytest.raises(torchsmith.BackendFailed, match="no"):
        compiled(X)

    def parted(x):
        compiler.graph_break()
        return x + 1

    compiled = later(parted, Gate(), fullgraph=True)
    assert torch.equal(compiled(X), X + 1)
    assert compiler.wait_for_background(1200)
    with pytest.raises(torchsmith.Unsupported, match="CAP"):
        compiled(X)


def test_what_changes_while_it_is_compiled():
    """The trace of an old state serves calls in that state only."""
    gate = Gate()
    state = {"scale": 2.0}
    compiled = later(lambda x: x * state["scale"], gate)
    assert torch.equal(compiled(X), X * 2)
    state["scale"] = 3.0
    assert torch.equal(compiled(X), X * 3)
    gate.may.set()
    for scale in (3.0, 2.0, 3.0, 4.0):
        state["scale"] = scale
        assert torch.equal(compiled(X), X * scale)
        assert compiler.wait_for_background(1200)


def test_a_part_of_the_world_that_is_read_twice_and_changes_between():
    """A second look that sees something else is noticed: no trace mixes two states."""

    world = World(lambda: "here:1", lambda t, s: t)
    world.guard(Local("n"), "equals", 1)
    world.guard(Local("n"), "equals", 1)
    with pytest.raises(torchsmith.Unsupported, match="CAP036"):
        world.guard(Local("n"), "equals", 2)
    world.guard(Local("f"), "equals", float("nan"))
    world.guard(Local("f"), "equals", float("nan"))


def test_native_kernels_in_the_background():
    compiled = torchsmith.compile(lambda x: (x.exp() * 2).sum(1), options={"background": True})
    want = (X.exp() * 2).sum(1)
    torch.testing.assert_close(compiled(X), want)
    assert compiler.wait_for_background(1200)
    with recording() as got:
        torch.testing.assert_close(compiled(X), want)
    assert not got


def test_a_forked_child_asks_anew():
    gate = Gate()
    compiled = later(lambda x: x.cos(), gate)
    compiled(X)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(1200)
            gate.may.set()
            compiled(X)
            assert compiler.wait_for_background(1200) and torch.equal(compiled(X), X.cos()) and gate.runs == 1
            code = 0
        finally:
            os._exit(code)
    gate.may.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert compiler.wait_for_background(1200)


def test_a_fork_waits_for_an_import(tmp_path, monkeypatch):
    """Else the child finds a module half made."""
    (tmp_path / "half_made.py").write_text("import builtins\nbuiltins.half.set()\nbuiltins.whole.wait(1200)\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    half, whole = threading.Event(), threading.Event()
    monkeypatch.setattr("builtins.half", half, raising=False)
    monkeypatch.setattr("builtins.whole", whole, raising=False)
    background.submit(lambda: importlib.import_module("half_made"))
    assert half.wait(1200)
    threading.Timer(0.1, whole.set).start()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            code = importlib.import_module("half_made").value - 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert compiler.wait_for_background(1200)


# ---------------------------------------------------------------- stances


def test_eager_then_compile():
    gate = Gate()
    gate.may.set()
    compiled = torchsmith.compile(lambda x: x + 1, backend=gate)
    with compiler.set_stance("eager_then_compile"):
        assert torch.equal(compiled(X), X + 1) and gate.graphs == 0
        assert torch.equal(compiled(X), X + 1) and gate.graphs == 1
        assert torch.equal(compiled(X), X + 1) and gate.runs == 2


# ---------------------------------------------------------------- threads with breaks

THREADS = 8


def broken_in_places(x, log):
    y = x * 2
    log.append(float(y.sum()))
    for i in range(3):
        y = y + i
        if y.max() > 2:
            y = y - 1
    try:
        log.append(int(y.argmax()))
        raise ValueError(len(log))
    except ValueError as e:
        y = y * e.args[0]
    return y.sin()


@pytest.mark.parametrize("background", [False, True])
def test_eight_threads_compile_and_call_functions_with_breaks(background):
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).eval()

    def mixed(x, log):
        return net(broken_in_places(x, log)).relu()

    shared = torchsmith.compile(mixed, backend="eager", options={"background": background})
    gate, failures, codes = threading.Barrier(THREADS), [], []

    def child(x) -> None:
        code = 1
        try:
            torch.set_num_threads(1)
            signal.alarm(1200)
            got, want = [], []
            torch.testing.assert_close(shared(x, got), mixed(x, want))
            assert got == want
            code = 0
        finally:
            os._exit(code)

    def work(i: int) -> None:
        try:
            own = torchsmith.compile(lambda x, log: broken_in_places(x, log) + i, backend="eager", options={"background": background})
            gate.wait(1200)
            for turn in range(4):
                x = torch.full((1 + (i + turn) % 3, 3), 0.3 * i - turn)
                for call, eager in ((shared, mixed), (own, lambda x, log: broken_in_places(x, log) + i)):
                    got, want = [], []
                    torch.testing.assert_close(call(x, got), eager(x, want))
                    assert got == want
                if i == 0 and turn > 1:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        pid = os.fork()
                    if pid == 0:
                        child(x)
                    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(1200)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    assert not failures, failures[0]
    assert codes == [0, 0]
    assert compiler.wait_for_background(1200)
