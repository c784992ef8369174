"""torchsmith.compiler's names: errors at breaks, artifacts of the cache; PyTorch's exceptions by their names."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import torchsmith
from torchsmith import compiler
from torchsmith.runtime import build as building

X = torch.ones(3)


def breaks(x):
    return x * 2 if x.sum() > 100 else x + 2


def eager(fn):
    return torchsmith.compile(fn, backend="eager")


def test_breaks_are_errors_where_the_program_says_so():
    def lenient(x):
        y = breaks(x)
        with compiler.error_on_graph_break(False):
            return breaks(y) * 2

    def strict(x):
        y = breaks(x)
        with compiler.error_on_graph_break(True):
            z = y * 2
            with compiler.error_on_graph_break(False):
                z = breaks(z)
            return breaks(z) if x.shape[0] == 3 else z

    decorated = compiler.error_on_graph_break(True)(breaks)
    torch.testing.assert_close(eager(lenient)(X), lenient(X))
    torch.testing.assert_close(eager(strict)(torch.ones(2)), strict(torch.ones(2)))
    for fn in (strict, decorated, lambda x: decorated(x * 2) + 1):
        with pytest.raises(torchsmith.Unsupported, match="CAP020"):
            eager(fn)(X)
    torch.testing.assert_close(eager(breaks)(X), breaks(X))


def test_pytorchs_names_catch_ours():
    """In a process of its own: the class is PyTorch's only where its module is loaded."""
    program = """
import torch, torchsmith, sys
def breaks(x):
    return x * 2 if x.sum() > 100 else x + 2
def kind():
    torchsmith.compiler.reset()
    try:
        torchsmith.compile(breaks, fullgraph=True, backend="eager")(torch.ones(3))
    except torchsmith.Unsupported as e:
        return e
assert "torch._dynamo.exc" not in sys.modules and type(kind()) is torchsmith.Unsupported
import torch._dynamo.exc
e = kind()
assert isinstance(e, torch._dynamo.exc.Unsupported) and "CAP020" in str(e) and e.code == "CAP020"
try:
    torchsmith.compile(lambda x: x + 1, fullgraph=True, backend=lambda gm, inputs: 1 / 0)(torch.ones(3))
except torch._dynamo.exc.BackendCompilerFailed as e:
    print("right", type(e.__cause__).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["right", "ZeroDivisionError"], done.stderr


def test_artifacts_go_to_another_machine(tmp_path, monkeypatch):
    """There, nothing is compiled."""

    def fn(x):
        return torch.sin(x) * 2 + x.sum() - 0.12345

    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "a"))
    assert compiler.save_cache_artifacts() is None
    want = torchsmith.compile(fn)(X)
    data, info = compiler.save_cache_artifacts()
    assert set(info.artifacts) >= {"graph", "lib"}
    monkeypatch.setenv("TORCHSMITH_CACHE_DIR", str(tmp_path / "b"))
    assert compiler.load_cache_artifacts(data).artifacts == info.artifacts
    monkeypatch.setattr(building, "build", None)
    compiler.reset()
    told = torchsmith.explain(torchsmith.compile(fn))(X)
    assert told.graphs[0].road == "native" and torch.equal(told.result, want)
    for bad in (b"", data[:-1], data[:40] + b"x" + data[41:], b"PK" + data):
        with pytest.raises(ValueError, match="save_cache_artifacts"):
            compiler.load_cache_artifacts(bad)
