"""Doors between torchsmith and other tools: compiled callables given to exporters, functions exported, logs switched at run time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchsmith
from torchsmith import aot

SCALE = torch.tensor([1.0, 2.0, 3.0])


def scaled(x: torch.Tensor, *, by: int = 2) -> torch.Tensor:
    return (x * SCALE).relu() * by


def test_a_function_ahead_of_time(tmp_path):
    x = torch.randn(4, 3)
    program = torchsmith.export.export(scaled, (x,), {"by": 3}, dynamic_shapes={"x": {0: torchsmith.Dim("n")}, "by": None})
    run = aot.load_package(aot.compile_and_package(program, package_path=tmp_path / "scaled.pt2"))
    for n in (4, 7):
        x = torch.randn(n, 3)
        torch.testing.assert_close(run(x, by=3), scaled(x, by=3))
    compiled = torchsmith.compile(scaled, fullgraph=True)
    torch.testing.assert_close(torchsmith.export.export(compiled, (x,)).module()(x), scaled(x))
    inner = nn.Linear(3, 3)
    torch.testing.assert_close(torchsmith.export.export(inner.forward, (x,)).module()(x), inner(x))
    with pytest.raises(TypeError, match="or a Python function, not int"):
        torchsmith.export.export(3, (x,))


def test_pytorch_exports_what_is_compiled():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), torch.randn(2, 3)
    compiled = torchsmith.compile(model)
    torch.testing.assert_close(torch.export.export(compiled, (x,)).module()(x), model(x))


def test_logs_at_run_time(capfd):
    try:
        torchsmith.compiler.set_logs(recompiles=True, graphs=True, output_code=True)
        fn = torchsmith.compile(lambda x: x.sin() + 1)
        fn(torch.ones(3))
        fn(torch.ones(4))
        said = capfd.readouterr().err
        assert "[torchsmith recompiles]" in said
        assert "[torchsmith graphs]" in said
        assert "[torchsmith output_code]" in said
        torchsmith.compiler.set_logs(recompiles=False)
        torchsmith.compile(lambda x: x.cos() + 1)(torch.ones(3))
        assert not capfd.readouterr().err
        with pytest.raises(ValueError, match="no artifact 'recompile'; did you mean 'recompiles'"):
            torchsmith.compiler.set_logs(recompile=True)
    finally:
        torchsmith.compiler.set_logs()
        torchsmith.compiler.config._changed.pop("trace_enabled", None)
