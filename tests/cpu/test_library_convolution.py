"""Convolutions that a GPU's library computes: norms in the weights, joined calls, channels-last, and the same values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from graph_harness import graph_of
from lower_harness import call_eager, to_array

from torchsmith.graph.tracing import remember_device
from torchsmith.ir.interpret import run_program
from torchsmith.ir.program import Extern, Program, Stage
from torchsmith.ir.verify import verify_program
from torchsmith.lower import lower
from torchsmith.lower.layout import prefer_channels_last
from torchsmith.lower.library_convolution import fold_batch_norms, join_activations
from torchsmith.options import Options
from torchsmith.schedule.deps import lasting

CUDA = torch.device("cuda:0")


def program_of(fn: Any, *args: torch.Tensor, params: int) -> Program:
    """The last `params` arguments are parameters."""
    there = [remember_device(torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta"), CUDA) for a in args]
    fg = graph_of(fn, *there)
    fg = replace(fg, roles=("input",) * (len(args) - params) + ("param",) * params)
    for step in (fold_batch_norms, prefer_channels_last, join_activations):
        fg = step(fg, Options())
    program = lower(fg, Options())
    verify_program(program)
    return program


def library(x: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What cuDNN's calls mean."""
    if "cudnn" not in x.op:
        return call_eager(x, args, kwargs)
    image, weight, *rest = (torch.from_numpy(a.data.copy()) if hasattr(a, "data") else a for a in args)
    z = rest.pop(0) if "add" in x.op else 0
    if "add" in x.op:
        assert rest.pop(0) is None
    bias, stride, padding, dilation, groups = rest
    return [to_array(torch.relu(F.conv2d(image, weight, bias, stride, padding, dilation, groups) + z))]


def check(fn: Any, *args: torch.Tensor, params: int) -> list[str]:
    """The operators called, once values are found equal to eager's."""
    program = program_of(fn, *args, params=params)
    got = run_program(program, [to_array(a) for a in args], library)
    want = fn(*args)
    for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(torch.from_numpy(g), w, rtol=1e-4, atol=1e-4)
    return [e.op.split(".")[1] for e in program.body if isinstance(e, Extern)]


def layer(channels: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(channels)
    weight = torch.randn(channels, channels, 3, 3)
    return [weight, *(torch.rand(channels) + 0.5 for _ in range(4))]


def block(x: torch.Tensor, w: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    x = F.relu(F.batch_norm(F.conv2d(x, w, None, 1, 1), mean, var, gamma, beta))
    y = F.batch_norm(F.conv2d(x, w, None, 1, 1), mean, var, gamma, beta)
    y += x
    return F.relu(y).mean((2, 3))


def test_a_residual_block_is_two_calls():
    x = torch.randn(2, 6, 8, 8)
    assert check(block, x, *layer(), params=5) == ["cudnn_convolution_relu", "cudnn_convolution_add_relu"]


def test_weights_with_their_norm_are_made_of_constants():
    program = program_of(block, torch.randn(2, 6, 8, 8), *layer(), params=5)
    made = lasting(program)
    for e in program.body:
        if isinstance(e, Extern):
            assert {a.buf for a in (e.args[1], e.args[4 if "add" in e.op else 2])} <= made  # type: ignore[union-attr]
    assert any(isinstance(e, Stage) for e in program.body)


def test_what_is_not_constant_stays():
    """Weights that are inputs, and norms whose convolution somebody else reads."""
    x = torch.randn(2, 6, 8, 8)
    assert check(block, x, *layer(), params=0) == ["convolution", "convolution"]

    def two(x, w, gamma, beta, mean, var):
        y = F.conv2d(x, w)
        return y * 2, F.batch_norm(y, mean, var, gamma, beta)

    assert check(two, x, *layer(), params=5) == ["convolution"]


PLAIN = (torch.randn(2, 6, 8, 8), torch.randn(4, 6, 1, 1), torch.randn(4))


def test_a_bias_alone_is_added_by_who_reads_the_result():
    ops = check(lambda x, w, b: F.hardtanh(F.conv2d(x, w, b), 0, 6), *PLAIN, params=2)
    assert ops == ["convolution"]


def test_results_keep_eagers_strides():
    program = program_of(lambda x, w, b: F.relu(F.conv2d(x, w, b)), *PLAIN, params=2)
    (result,) = program.results
    layout = program.buffers[result.buf].layout  # type: ignore[union-attr]
    assert layout is not None and [int(s.value) for s in layout.strides] == [256, 64, 8, 1]  # type: ignore[attr-defined]
