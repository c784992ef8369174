"""Who may call a compiled thing, and how: threads, a forked child, the profiler, vmap, fake tensors, subclasses, pickle."""

from __future__ import annotations

import io
import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchsmith
from torchsmith import events


def fn(x: Tensor) -> Tensor:
    return torch.softmax(torch.sin(x) * 2, -1)


def test_two_threads_share_one_compiled_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).eval()
    compiled = torchsmith.compile(model)
    xs = [torch.randn(n, 16) for n in (3, 3, 5, 3)]
    failures: list[Any] = []
    gate = threading.Barrier(4)

    def work(x: Tensor) -> None:
        try:
            with torch.no_grad():
                want = model(x)
                gate.wait(1200)
                for _ in range(50):
                    torch.testing.assert_close(compiled(x), want)
        except Exception as e:  # a thread's failure must reach the test
            failures.append(e)

    threads = [threading.Thread(target=work, args=(x,)) for x in xs]
    for t in threads:
        t.start()
    for t in threads:
        t.join(1200)
    assert not failures, failures


def test_forked_child_calls_and_compiles() -> None:
    compiled, x = torchsmith.compile(fn), torch.randn(4, 6)
    want = compiled(x)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # a forked child must not use the parent's OpenMP pool
            other = torch.randn(3, 5, dtype=torch.float64)
            if torch.allclose(compiled(x), want) and torch.allclose(compiled(other), fn(other)):
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_calls_are_named_in_the_profiler() -> None:
    compiled, x = torchsmith.compile(fn), torch.randn(4, 6)
    compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(x)
    assert any("torchsmith" in e.key for e in profile.key_averages()), [e.key for e in profile.key_averages()]


class Tagged(Tensor):
    pass


def runs_eagerly_with_a_code(call: Any) -> Any:
    with events.recording() as got:
        result = call()
    assert any(e.kind in ("graph_break", "fallback") and e.fields.get("code") for e in got), got
    return result


def test_results_of_subclasses_are_of_the_subclass() -> None:
    x = torch.randn(3, 4).as_subclass(Tagged)
    got = torchsmith.compile(fn, fullgraph=True)(x)
    assert type(got) is Tagged
    torch.testing.assert_close(got.as_subclass(Tensor), fn(x.as_subclass(Tensor)))


def test_vmap_runs_eagerly() -> None:
    x = torch.randn(5, 3, 4)
    got = runs_eagerly_with_a_code(lambda: torch.vmap(torchsmith.compile(fn))(x))
    torch.testing.assert_close(got, fn(x))


def test_fake_tensors_run_eagerly() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    compiled = torchsmith.compile(fn)
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(3, 4))
        got = runs_eagerly_with_a_code(lambda: compiled(x))
    assert type(got).__name__ == "FakeTensor" and got.shape == (3, 4)


def test_compiled_module_survives_torch_save() -> None:
    model = nn.Linear(4, 3)
    file = io.BytesIO()
    torch.save(torchsmith.compile(model), file)
    file.seek(0)
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(file, weights_only=False)(x), model(x))


def test_wrapped_by_another_function_and_nested() -> None:
    inner = torchsmith.compile(fn)
    outer, x = torchsmith.compile(lambda x: inner(x) + 1), torch.randn(3, 4)
    torch.testing.assert_close(outer(x), fn(x) + 1)


def test_recompile_limit_warns_once_then_runs_eagerly() -> None:
    compiled = torchsmith.compile(lambda x, k: x * len(k), recompile_limit=2)
    x = torch.ones(3)
    with pytest.warns(UserWarning, match="recompile") as said:
        for k in ("a", "bb", "ccc", "dddd", "a", "eeeee"):
            torch.testing.assert_close(compiled(x, k), x * len(k))
    assert len([w for w in said if "recompile" in str(w.message)]) == 1


def test_torch_compile_works_in_the_same_process() -> None:
    x = torch.randn(4, 6)
    ours, theirs = torchsmith.compile(fn), torch.compile(fn, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(ours(x), fn(x))
        torch.testing.assert_close(theirs(x), fn(x))
