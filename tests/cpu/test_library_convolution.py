"""Convolutions that a GPU's library computes: norms in the weights, joined calls, channels-last, and the same values."""

from __future__ import annotations

import math
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
    near = 1e-4 if args[0].dtype is torch.float32 else 1e-2
    for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(torch.from_numpy(g), w, rtol=near, atol=near)
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


def halves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).half() / max(1, math.prod(shape[1:])) ** 0.5 for shape in shapes]


def test_an_image_of_three_channels_gets_a_fourth_for_the_library():
    """Where it is copied anyway and weights are constants; a product of ours reads it as it lies."""
    layer = lambda x, w, b: F.relu(F.conv2d(x, w, b, stride=2, padding=1)).amax((2, 3))
    large = halves((2, 3, 9, 9), (16, 3, 5, 5), (16,))
    for params, channels in ((2, 4), (0, 3)):
        assert check(layer, *large, params=params) == ["cudnn_convolution_relu"]
        program = program_of(layer, *large, params=params)
        (call,) = (e for e in program.body if isinstance(e, Extern))
        shapes = [program.buffers[a.buf].shape for a in call.args[:2]]  # type: ignore[union-attr]
        assert [int(shape[1].value) for shape in shapes] == [channels, channels]  # type: ignore[attr-defined]
    image, _, bias = large
    assert check(lambda x, w, b: (layer(x, w, b), x * 2), image, *halves((16, 3, 3, 3)), bias, params=2) == []


def test_a_summands_bias_goes_into_the_call_that_adds_it():
    def down(x, w, b, v, c):
        return F.relu(F.conv2d(x, w, b, stride=2, padding=1) + F.conv2d(x, v, c, stride=2)).amax((2, 3))

    def before(x, w, b, v, c):
        z = F.conv2d(x, v, c, stride=2)
        return F.relu(z + F.conv2d(x, w, b, stride=2, padding=1)).amax((2, 3))

    def shared(x, w, b, v, c):
        z = F.conv2d(x, v, c, stride=2)
        return F.relu(F.conv2d(x, w, b, stride=2, padding=1) + z).amax((2, 3)), z.sin()

    args = halves((1, 1168, 4, 4), (16, 1168, 3, 3), (16,), (16, 1168, 1, 1), (16,))
    for fn in (down, before, shared):
        assert check(fn, *args, params=4) == ["convolution", "cudnn_convolution_add_relu"]
        program = program_of(fn, *args, params=4)
        plain, joined = (e for e in program.body if isinstance(e, Extern))
        assert (joined.args[2].buf == plain.outs[0]) is (fn is not shared)  # type: ignore[union-attr]
        assert fn is shared or joined.args[4].buf in lasting(program)  # type: ignore[union-attr]
