"""Products on a GPU: which are one call, a sum or a kernel of our own; how attention's result lies; and the same values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_harness import graph_of
from lower_harness import call_eager, to_array

from torchsmith.graph.spec import FreshOutput, FunctionalGraph
from torchsmith.graph.tracing import remember_device
from torchsmith.ir.expr import const
from torchsmith.ir.interpret import run_program
from torchsmith.ir.program import BufArg, Extern, Program, Stage
from torchsmith.ir.verify import verify_program
from torchsmith.lower import lower, turned_factors
from torchsmith.lower.joined_products import join_products
from torchsmith.lower.layout import prefer_channels_last
from torchsmith.lower.library_convolution import join_activations
from torchsmith.lower.patches import multiply_patches
from torchsmith.options import Options
from torchsmith.schedule.deps import lasting
from torchsmith.schedule.fusion.fuse import fuse

CUDA = torch.device("cuda:0")


def graph(fn: Any, *args: torch.Tensor, params: int) -> FunctionalGraph:
    """The last `params` arguments are parameters."""
    there = [remember_device(torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta"), CUDA) for a in args]
    fg = graph_of(fn, *there)
    return replace(fg, roles=("input",) * (len(args) - params) + ("param",) * params)


def program_of(fn: Any, *args: torch.Tensor, params: int) -> Program:
    program = fuse(lower(join_products(graph(fn, *args, params=params), Options()), Options()), Options())
    verify_program(program)
    return program


def check(fn: Any, *args: torch.Tensor, params: int) -> Program:
    """The program, once values are found equal to eager's."""
    program = program_of(fn, *args, params=params)
    got = run_program(program, [to_array(a) for a in args], call_eager)
    want = fn(*args)
    for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(torch.from_numpy(g), w, rtol=1e-4, atol=1e-4)
    return program


def calls(program: Program) -> list[str]:
    return [e.op.split(".")[1] for e in program.body if isinstance(e, Extern)]


def weights(*rows: int, inner: int = 12) -> list[torch.Tensor]:
    torch.manual_seed(len(rows))
    return [t for n in rows for t in (torch.randn(n, inner) * 0.3, torch.randn(n) * 0.1)]


def mixed(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    """Attention between four products, as models write it."""
    q, k, v = (F.linear(x, w[2 * i], w[2 * i + 1]).view(2, 5, 3, 4).transpose(1, 2) for i in range(3))
    return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 12), w[6], w[7])


def test_products_of_one_factor_are_one_call_and_nothing_is_copied_around_attention():
    program = check(mixed, torch.randn(2, 5, 12), *weights(12, 12, 12, 12), params=8)
    assert calls(program) == ["addmm", "scaled_dot_product_attention", "addmm"]
    written = {e.stores[0].buf for e in program.body if isinstance(e, Stage)}
    assert {b for b in written if program.buffers[b].role == "temp"} <= lasting(program)  # the joined weights and biases alone


def test_parts_of_other_widths_and_without_biases():
    def gated(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        u, v = x @ a.t(), x @ b.t()
        return F.silu(u) * v[:, :8]

    assert calls(check(gated, torch.randn(5, 12), torch.randn(8, 12), torch.randn(9, 12), params=2)) == ["mm"]


def test_what_shows_or_changes_is_not_joined():
    def pair(x: torch.Tensor, *w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(x, w[0], w[1]).view(5, 2, 4), F.linear(x, w[2], w[3]).sin()

    x, w = torch.randn(5, 12), weights(8, 8)
    assert calls(check(pair, x, *w, params=4)) == ["addmm", "addmm"]  # a result of the graph lies as eager's

    def inside(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[0], w[1]).sin() + F.linear(x, w[2], w[3]).sin()

    assert calls(check(inside, x, *w, params=4)) == ["addmm"]
    assert calls(check(inside, x, *w, params=0)) == ["addmm", "addmm"]  # weights that may be others in the next call

    def forward(x: torch.Tensor, *w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.cos()
        return F.linear(y, w[0], w[1]).sin() + F.linear(y, w[2], w[3]).sin(), y

    assert calls(check(forward, x, *w, params=4)) == ["addmm", "addmm"]  # y is kept for a backward graph


def test_large_weights_are_not_there_twice():
    def pair(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x @ a.t()).sin() + (x @ b.t()).sin()

    large = [torch.empty(2048, 4096, dtype=torch.float16) for _ in range(2)]
    assert calls(program_of(pair, torch.empty(4, 4096, dtype=torch.float16), *large, params=2)) == ["mm", "mm"]


def test_one_row_is_a_sum_of_our_own_with_what_follows():
    def token(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x + F.relu(F.linear(x, w, b))

    program = check(token, torch.randn(1, 12), *weights(12), params=2)
    assert calls(program) == [] and len(program.body) == 1

    def columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    assert calls(check(columns, torch.randn(1, 12), torch.randn(12, 7), params=1)) == ["mm"]  # whose sums would run across memory
    assert calls(check(columns, torch.randn(1, 9000), torch.randn(3, 9000).t() * 0.01, params=1)) == ["mm"]  # walked in steps
    assert calls(check(columns, torch.randn(2, 12), torch.randn(7, 12).t(), params=1)) == ["mm"]


def test_attention_gives_results_as_they_lie_in_eager():
    def strides(q: torch.Tensor, mask: torch.Tensor | None = None) -> list[int]:
        more = () if mask is None else (mask,)
        fg = graph(lambda q, *m: F.scaled_dot_product_attention(q, q, q, *m), q, *more, params=0)
        (out,) = (o.node for o in fg.outputs if isinstance(o, FreshOutput))
        (spec,) = (n.meta["spec"] for n in fg.graph.nodes if n.name == out)
        return [int(s.value) for s in spec.strides]

    dense = torch.randn(2, 3, 5, 8, dtype=torch.float16)
    turned = torch.randn(2, 5, 3, 8, dtype=torch.float16).transpose(1, 2)
    assert strides(dense) == [120, 40, 8, 1] and strides(turned) == [120, 8, 24, 1]
    assert strides(dense, torch.zeros(5, 5).half()) == [120, 40, 8, 1]
    assert strides(dense.float()) == [120, 8, 24, 1] and strides(dense.double()) == [120, 40, 8, 1]


@pytest.mark.parametrize("size", [(8, 12), (9, 13)])
@pytest.mark.parametrize("bias", [True, False])
def test_windows_that_do_not_overlap_are_a_product(size: tuple[int, int], bias: bool):
    def embed(x: torch.Tensor, w: torch.Tensor, *b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, *b, stride=(4, 2)).flatten(2).transpose(1, 2) * 2

    torch.manual_seed(0)
    x, w = torch.randn(2, 3, *size).half(), torch.randn(16, 3, 4, 2).half()
    more = [torch.randn(16).half()] if bias else []
    fg = multiply_patches(graph(embed, x, w, *more, params=1 + bias), Options())
    program = fuse(lower(fg, Options()), Options())
    verify_program(program)
    (got,) = run_program(program, [to_array(a) for a in (x, w, *more)], call_eager)
    torch.testing.assert_close(torch.from_numpy(got), embed(x, w, *more), rtol=1e-2, atol=1e-2)
    assert calls(program) == ["addmm" if bias else "mm"]


def test_other_windows_stay_convolutions():
    def of(w: torch.Tensor, dtype: torch.dtype = torch.float16, **options: Any) -> list[str]:
        x = torch.empty(2, 4, 8, 8, dtype=dtype)
        fg = graph(lambda x, w: F.conv2d(x, w, **options).sin(), x, w.to(dtype), params=1)
        return calls(lower(multiply_patches(fg, Options()), Options()))

    two = torch.empty(4, 4, 2, 2)
    assert of(two, stride=2) == ["mm"]
    assert of(two, stride=1) == of(two, stride=2, padding=2) == of(two, stride=2, dilation=2) == ["convolution"]
    assert of(torch.empty(4, 2, 2, 2), stride=2, groups=2) == of(torch.empty(4, 4, 1, 1)) == ["convolution"]
    assert of(torch.empty(4, 1, 2, 2), stride=2, groups=4) == []  # a kernel of our own
    assert of(two, torch.float32, stride=2) == ["convolution"]


def test_small_convolutions_of_one_element_are_ours_with_what_follows():
    def of(follow: Any, *more: torch.Tensor, inner: int = 32) -> list[str]:
        x, w = torch.randn(1, inner, 8, 8).half(), torch.randn(48, inner, 1, 1).half() / inner**0.5
        fg = graph(lambda x, w, *b: follow(F.conv2d(x, w, *b)), x, w, *more, params=1 + len(more))
        for step in (prefer_channels_last, multiply_patches, join_activations):
            fg = step(fg, Options())
        program = fuse(lower(fg, Options()), Options())
        verify_program(program)
        if "cudnn_convolution_relu" not in calls(program):
            (got,) = run_program(program, [to_array(a) for a in (x, w, *more)], call_eager)
            torch.testing.assert_close(torch.from_numpy(got), follow(F.conv2d(x, w, *more)), rtol=1e-2, atol=1e-2)
        return calls(program)

    bias = torch.randn(48).half()
    assert of(lambda y: F.relu6(y).sin(), bias) == []  # a kernel of our own
    assert of(lambda y: F.relu6(y).sin()) == of(lambda y: y.sin() * y, bias) == of(lambda y: F.relu(y).sin(), bias) == []
    assert of(lambda y: y.sin() * y) == ["convolution"]  # which takes nothing along
    assert of(lambda y: F.relu(y).sin(), bias, inner=1168) == ["cudnn_convolution_relu"]


@pytest.mark.parametrize(("rows", "inner", "count"), [(64, 96, 0), (8, 96, 1), (64, 768, 0), (257, 768, 1), (64, 760, 1)])
def test_small_products_take_an_activation_along(rows: int, inner: int, count: int):
    w = [torch.randn(64, inner).half() * 0.1, torch.randn(64).half()]
    program = program_of(lambda x, w, b: F.gelu(F.linear(x, w, b)), torch.randn(rows, inner).half(), *w, params=2)
    assert len(calls(program)) == count


@pytest.mark.parametrize("allowed", [True, False])
def test_factors_that_lie_across_the_sum_are_turned(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """In TF32: one copy for all products of a factor, and of a product one factor, that which others have as well or the smaller one."""

    def gradients(x: torch.Tensor, g: torch.Tensor, h: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        g = g * 2
        return g.t() @ x.view(9, 6), h.t() @ x.view(9, 6), g.t() @ wide, g @ g.t()

    for name, value in (("RATE", 1.0), ("BANDWIDTH", 1.0), ("START", 0.0), ("SAVED", 2.0)):
        monkeypatch.setattr(turned_factors, name, value)
    args = [torch.randn(3, 3, 6), torch.randn(9, 5), torch.randn(9, 7), torch.randn(9, 40)]
    monkeypatch.setattr(turned_factors, "is_allowed", lambda: allowed)
    program = lower(turned_factors.turn_factors(graph(gradients, *args, params=0), Options()), Options())
    verify_program(program)
    for got, want in zip(run_program(program, [to_array(a) for a in args], call_eager), gradients(*args), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want)
    factors = [[program.buffers[a.buf] for a in e.args if isinstance(a, BufArg)] for e in program.body if isinstance(e, Extern)]
    along = [[b.layout.strides[k] is const(1) for k, b in zip((1, 0), row, strict=True)] for row in factors]  # type: ignore[union-attr]
    assert along[:3] == ([[True, False], [False, True], [True, False]] if allowed else [[False, False]] * 3)
    assert not allowed or len({b.storage_of or b.name for b in (factors[0][0], factors[2][0])}) == 1
