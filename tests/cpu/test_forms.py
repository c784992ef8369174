"""Every form of product and convolution: native, without an extern call, equal to eager on random small shapes."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchsmith

F = torch.nn.functional
Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


def check(fn: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
    """One native graph without extern calls; no further from a float64 run than the numerics bar allows; layout as eager's."""
    with torch.no_grad():
        torchsmith.compiler.reset()
        done = torchsmith.explain(fn)(*args)
        want = fn(*args)
        exact = fn(*(a.double() if a.is_floating_point() else a for a in args))
    assert [(g.road, g.externs) for g in done.graphs] == [("native", ())]
    got = done.result
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    if not want.is_floating_point():
        assert torch.equal(got, want)
    elif want.numel():
        error, eager = ((t.double() - exact).abs().max().item() for t in (got, want))
        assert error <= max(2 * eager, 4 * torch.finfo(want.dtype).eps * exact.abs().max().item())


def numbers(rng: random.Random, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(-9, 9, shape, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))).to(dtype)


def convolution(rng: random.Random, dtype: torch.dtype) -> Case:
    """Any rank, groups, stride, padding, dilation."""
    rank = rng.choice((1, 2, 2, 3))
    groups = rng.choice((1, 1, 2, 3, 8))
    ic, oc = groups * rng.choice((1, 1, 2, 4, 5)), groups * rng.choice((1, 2, 4, 8, 17))
    k = [rng.choice((1, 2, 3, 5)) for _ in range(rank)]
    how: dict[str, Any] = {w: tuple(rng.choice(v) for _ in range(rank)) for w, v in (("stride", (1, 1, 2, 3)), ("dilation", (1, 1, 2)))}
    how["padding"] = tuple(rng.choice((0, n // 2, n - 1)) for n in k)
    size = [rng.randint(max(1, d * (n - 1) + 1), d * (n - 1) + 12) for n, d in zip(k, how["dilation"], strict=True)]
    x = numbers(rng, dtype, rng.choice((1, 1, 2)), ic, *size)
    w, b = numbers(rng, dtype, oc, ic // groups, *k), numbers(rng, dtype, oc)
    call = getattr(F, f"conv{rank}d")
    return (lambda x, w, b: call(x, w, b, groups=groups, **how)), (x, w, b)


def transposed(rng: random.Random, dtype: torch.dtype) -> Case:
    rank = rng.choice((1, 2, 2, 3))
    groups = rng.choice((1, 1, 2, 4))
    ic, oc = groups * rng.choice((1, 2, 5)), groups * rng.choice((1, 3, 8))
    k = [rng.choice((1, 2, 3, 4, 5)) for _ in range(rank)]
    stride, dilation = ([rng.choice(v) for _ in range(rank)] for v in ((1, 2, 2, 3), (1, 1, 2, 3)))
    extra = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
    padding = [rng.randint(0, d * (n - 1) // 2) for n, d in zip(k, dilation, strict=True)]
    x = numbers(rng, dtype, rng.choice((1, 2)), ic, *(rng.randint(1, 6) for _ in k))
    w, b = numbers(rng, dtype, ic, oc // groups, *k), numbers(rng, dtype, oc)
    call = getattr(F, f"conv_transpose{rank}d")
    return (lambda x, w, b: call(x, w, b, stride, padding, extra, groups, dilation)), (x, w, b)


def product(rng: random.Random, dtype: torch.dtype) -> Case:
    """Matrices and vectors, batches that broadcast, either operand transposed."""
    m, n, k = (rng.choice((1, 2, 5, 16, 33, 70)) for _ in range(3))
    batch = rng.choice(((), (), (3,), (3, 1), (1, 3)))
    left = numbers(rng, dtype, *batch, k, m).mT if rng.random() < 0.3 else numbers(rng, dtype, *batch, m, k)
    right = numbers(rng, dtype, *(3,) * rng.randint(0, len(batch)), n, k).mT if rng.random() < 0.4 else numbers(rng, dtype, k, n)
    if not batch and rng.random() < 0.3:
        left, right = (left[0], right) if rng.random() < 0.5 else (left, right[:, 0])
    return torch.matmul, (left, right)


def check_seeds(make: Callable[[random.Random, torch.dtype], Case], dtype: torch.dtype, count: int) -> None:
    for seed in range(count):
        fn, args = make(random.Random(f"{make.__name__}{dtype}{seed}"), dtype)
        try:
            check(fn, *args)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {[tuple(a.shape) for a in args]}") from e


@pytest.mark.parametrize("make", [convolution, transposed, product])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_random_forms(make: Callable[[random.Random, torch.dtype], Case], dtype: torch.dtype) -> None:
    check_seeds(make, dtype, 10 if dtype is torch.float32 else 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8])
def test_integer_products(dtype: torch.dtype) -> None:
    check_seeds(product, dtype, 3)


SEEDED = torch.Generator().manual_seed(0)


def R(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=SEEDED)


OTHERS: dict[str, Case] = {
    "same": (lambda x, w: F.conv2d(x, w, padding="same", dilation=2), (R(1, 3, 9, 8), R(4, 3, 4, 3))),
    "unbatched": (lambda x, w: F.conv2d(x, w, padding=1), (R(3, 9, 8), R(4, 3, 3, 3))),
    "empty batch": (lambda x, w: F.conv2d(x, w, padding=1), (R(0, 3, 9, 8), R(4, 3, 3, 3))),
    "empty batch, channels last": (F.conv2d, (R(0, 3, 9, 8), R(4, 3, 3, 3).to(memory_format=torch.channels_last))),
    "circular": (torch.nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (R(1, 3, 8, 8),)),
    "reflect": (torch.nn.Conv1d(3, 5, 3, padding=1, padding_mode="reflect"), (R(1, 3, 8),)),
    "baddbmm": (lambda i, a, b: torch.baddbmm(i, a, b, beta=0.3, alpha=2), (R(2, 5, 7), R(2, 5, 8), R(2, 8, 7))),
    "addmv": (lambda i, a, b: torch.addmv(i, a, b, beta=0.3, alpha=2), (R(5), R(5, 8), R(8))),
    "addr": (lambda i, a, b: torch.addr(i, a, b, beta=0.3, alpha=2), (R(5, 8), R(5), R(8))),
    "one tap a phase": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (R(2, 8, 5, 6), R(8, 20, 2, 2))),
    "dot": (torch.dot, (R(100), R(100))),
    "outer": (torch.outer, (R(10), R(20))),
    "einsum": (lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), (R(2, 5, 3, 8), R(2, 7, 3, 8))),
    "long grouped rows": (lambda x, w: F.conv1d(x, w, padding=1, groups=4), (R(1, 24, 89), R(40, 6, 3))),
    "spread by groups": (lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, groups=4), (R(1, 4, 3), R(4, 8, 5), R(32))),
    "few channels of rows": (lambda x, w, b: F.conv1d(x, w, b, dilation=2), (R(2, 37, 90), R(3, 37, 4), R(3))),
    "few channels of images": (F.conv2d, (R(3, 70, 9, 20), R(5, 70, 1, 1), R(5))),
    "chain": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (R(5, 8), R(8, 9), R(9, 3))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms(name: str) -> None:
    fn, args = OTHERS[name]
    if isinstance(fn, torch.nn.Module):
        done = torchsmith.explain(fn.requires_grad_(False))(*args)
        assert [(g.road, g.externs) for g in done.graphs] == [("native", ())]
        torch.testing.assert_close(done.result, fn(*args))
    else:
        check(fn, *args)


def nearby(rng: random.Random, dtype: torch.dtype) -> Case:
    """Grouped and depthwise convolutions in the layout that a model's middle has: channels last."""
    groups = rng.choice((2, 3, 8, 13, 24))
    ic, oc = groups * rng.choice((1, 2, 4, 8, 16)), groups * rng.choice((1, 2, 4, 8, 16))
    k, stride, dilation = rng.choice((1, 3, 3, 5)), rng.choice((1, 1, 2)), rng.choice((1, 1, 2))
    size = [rng.randint(dilation * (k - 1) + 1, 17) for _ in range(2)]
    x = numbers(rng, dtype, rng.choice((1, 2)), ic, *size).contiguous(memory_format=torch.channels_last)
    w, b, padding = numbers(rng, dtype, oc, ic // groups, k, k), numbers(rng, dtype, oc), rng.choice((0, k // 2))
    return (lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups)), (x, w, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_channels_last(dtype: torch.dtype) -> None:
    check_seeds(nearby, dtype, 10)


@pytest.mark.parametrize(("groups", "ic", "oc"), [(4, 8, 8), (3, 10, 16), (6, 16, 24), (5, 9, 13), (2, 24, 8)])
@pytest.mark.parametrize(("k", "stride", "padding"), [(1, 1, 0), (3, 2, 1), (5, 3, 2), ((2, 3), 1, 0)])
def test_groups_of_few_channels_as_pairs(groups: int, ic: int, oc: int, k: int | tuple[int, int], stride: int, padding: int) -> None:
    """Taps of fewer than 32 channels, even and odd; what is infinite in one group stays there."""
    layer = torch.nn.Conv2d(groups * ic, groups * oc, k, stride, padding, groups=groups, dtype=torch.bfloat16).requires_grad_(False)
    x = R(2, groups * ic, 17, 12).bfloat16().contiguous(memory_format=torch.channels_last)
    for value in (1.0, math.inf):
        x[1, 2, 3, 4] = value
        done = torchsmith.explain(layer)(x)
        assert done.graphs[0].road == "native"
        want = copy.deepcopy(layer).double()(x.double())
        finite = want.isfinite()
        assert (done.result.isfinite() == finite).all()
        assert (done.result.double() - want)[finite].abs().max() <= 4 * 2**-8 * want[finite].abs().max()


def phases(rng: random.Random, dtype: torch.dtype) -> Case:
    """Transposed convolutions whose phases lack taps and whose results are cut, several images, channels last."""
    ic, oc, stride = rng.choice((8, 20)), rng.choice((8, 17)), rng.choice((2, 3))
    k, padding, extra = rng.choice((1, 2, 3, 5)), rng.choice((0, 1)), rng.randrange(stride)
    x = numbers(rng, dtype, rng.choice((1, 3)), ic, rng.randint(2, 9), rng.randint(2, 9)).contiguous(memory_format=torch.channels_last)
    w, b = numbers(rng, dtype, ic, oc, max(k, 2 * padding), k + padding), numbers(rng, dtype, oc)
    return (lambda x, w, b: F.conv_transpose2d(x, w, b, stride, padding, extra)), (x, w, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_phases_channels_last(dtype: torch.dtype) -> None:
    check_seeds(phases, dtype, 10)


def test_a_transposed_convolution_of_stride_1_is_the_kernel_of_a_convolution() -> None:
    """Also over rows of memory: its taps and rows join, though its bounds were written with the taps subtracted. (With padding it is not:
    beside an infinite weight that is left out.)"""
    options = {"force_disable_caches": True}  # what kernels are made is the question
    for taps, p in ((3, 2), (1, 0)):
        x = R(2, 32, 14, 14).contiguous(memory_format=torch.channels_last)
        w, v = torch.nn.Parameter(R(32, 32, taps, taps)), torch.nn.Parameter(R(32, 32, taps, taps))
        with torch.no_grad():
            torchsmith.compiler.reset()
            both = lambda x, p=p, w=w, v=v: (F.conv2d(x, w), F.conv_transpose2d(x, v, padding=p))
            done = torchsmith.explain(both, options=options)(x)
        assert done.graphs[0].kinds.count("contraction") == 1


@pytest.mark.parametrize(("taps", "stride"), [(3, 2), (5, 3), (1, 3), (1, 2)])
def test_results_of_phases_are_stored_where_they_belong(taps: int, stride: int) -> None:
    """Sizes that the stride does not divide are not cut out of larger results by a copy behind the product."""
    x = R(2, 20, 7, 9).contiguous(memory_format=torch.channels_last)
    layer = torch.nn.ConvTranspose2d(20, 24, taps, stride).eval().requires_grad_(False)
    torchsmith.compiler.reset()
    done = torchsmith.explain(layer, options={"force_disable_caches": True})(x)
    assert done.graphs[0].kinds[-1] == "contraction"
    torch.testing.assert_close(done.result, layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("taps", "stride", "padding"), [(3, 1, 1), ((2, 3, 1), 2, 0), (5, 1, (0, 2, 2)), (1, 2, 0)])
def test_tiles_run_along_the_longest_rows(taps: Any, stride: int, padding: Any, dtype: torch.dtype) -> None:
    """Of deep images, whose innermost rows are short."""
    x = R(2, 24, 13, 9, 4).to(dtype).contiguous(memory_format=torch.channels_last_3d)
    for groups in (1, 2):
        w, b = R(40, 24 // groups, *(taps if isinstance(taps, tuple) else (taps,) * 3)).to(dtype), R(40).to(dtype)
        if w.shape[-1] <= 4 + 2 * (padding if isinstance(padding, int) else padding[-1]):
            check(lambda x, w, b, groups=groups: F.conv3d(x, w, b, stride, padding, groups=groups), x, w, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "taps", "padding"), [(7, 3, 1), (9, 3, 0), (8, (1, 5), (0, 2)), (5, (3, 1), (1, 0))])
def test_short_image_rows_are_one_row_of_tiles(size: int, taps: Any, padding: Any, dtype: torch.dtype) -> None:
    """What is computed between them is not stored, and what reads the sums is not read there."""
    for channels in (5, 32):
        layer = torch.nn.Conv2d(channels, 24, taps, padding=padding, dtype=dtype).eval().requires_grad_(False)
        x = R(2, channels, size, size).to(dtype).contiguous(memory_format=torch.channels_last)
        rest = torch.randn_like(layer(x))
        check(lambda x, w, b, r: F.relu(F.conv2d(x, w, b, padding=padding) + r), x, layer.weight, layer.bias, rest)


def test_missing_taps_meet_no_infinity() -> None:
    x = R(2, 8, 5, 6)
    x[0, 3, 2, 2], x[1, 1, 0, 5] = float("inf"), float("nan")
    w = R(8, 17, 3, 3)
    with torch.no_grad():
        got = torchsmith.compile(lambda x, w: F.conv_transpose2d(x, w, stride=2))(x, w)
        want = F.conv_transpose2d(x.double(), w.double(), stride=2)
    assert torch.equal(got.isfinite(), want.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [5, 40])
@pytest.mark.parametrize(("taps", "stride", "padding"), [(3, 1, 1), (4, 2, 1), ((1, 5), 1, 0), ((3, 2), 3, 1)])
def test_padding_of_a_transposed_convolution_meets_no_infinity(
    taps: Any, stride: int, padding: Any, channels: int, dtype: torch.dtype
) -> None:
    """Eager has no NaN where an infinite weight has no input; nor has a row whose neighbours in the tile have one."""
    for outputs in (3, 24):
        layer = torch.nn.ConvTranspose2d(channels, outputs, taps, stride, padding, dtype=dtype).eval().requires_grad_(False)
        layer.weight[0, 0, 0, 0], layer.weight[3, 2, -1, -1] = float("inf"), float("nan")
        for last in (False, True):
            x = R(2, channels, 5, 9).to(dtype)
            x = x.contiguous(memory_format=torch.channels_last) if last else x
            torchsmith.compiler.reset()
            torch.testing.assert_close(torchsmith.compile(layer)(x), layer(x), equal_nan=True)


def windows(rng: random.Random, dtype: torch.dtype) -> Case:
    """Few or odd channels into enough columns for a copy with padding, in either layout; taps beside each other join."""
    ic, oc = rng.choice((1, 2, 3, 3, 5, 13, 16, 20, 33)), rng.choice((3, 16, 17, 40, 64))
    k, stride, dilation = (rng.choice((1, 3, 5, 7)), rng.choice((2, 3, 4))), rng.choice((1, 2, 4)), rng.choice((1, 1, 1, 2))
    size = [rng.randint(dilation * (n - 1) + 1, 40) for n in k]
    x = numbers(rng, dtype, rng.choice((1, 2)), ic, *size)
    if rng.random() < 0.6:
        x = x.contiguous(memory_format=torch.channels_last)
    w, b, padding = numbers(rng, dtype, oc, ic, *k), numbers(rng, dtype, oc), [rng.choice((0, n // 2, n - 1)) for n in k]
    return (lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation)), (x, w, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_windows(dtype: torch.dtype) -> None:
    check_seeds(windows, dtype, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_infinities_stay_in_their_windows(dtype: torch.dtype, last: bool) -> None:
    x, w = R(1, 3, 12, 13), R(20, 3, 3, 3)
    x[0, 1, 5, 5], x[0, 2, 11, 12], x[0, 0, 0, 3] = float("inf"), float("nan"), float("-inf")
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    with torch.no_grad():
        got = torchsmith.compile(lambda x, w: F.conv2d(x, w, padding=1))(x.to(dtype), w.to(dtype))
        want = F.conv2d(x.double(), w.double(), padding=1)
    assert torch.equal(got.isfinite(), want.isfinite())


HALVES: dict[str, Case] = {
    "linear": (F.linear, (R(128, 96), R(80, 96), R(80))),
    "few rows": (F.linear, (R(5, 64), R(40, 64), R(40))),
    "a rest of rows": (F.linear, (R(197, 64), R(33, 64), R(33))),
    "deep": (F.linear, (R(37, 1056), R(16, 1056))),
    "odd pairs": (F.linear, (R(7, 34), R(9, 34))),
    "odd": (F.linear, (R(45, 137), R(50, 137), R(50))),
    "one": (F.linear, (R(19, 1), R(50, 1))),
    "batches": (torch.bmm, (R(3, 40, 64), R(3, 64, 50))),
    "padded": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (R(2, 32, 9, 9), R(48, 32, 3, 3))),
    "image": (lambda x, w: F.conv2d(x, w, stride=2, padding=3), (R(1, 3, 20, 20), R(32, 3, 7, 7))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), (R(1, 32, 9, 9), R(32, 40, 4, 4))),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    fn, args = HALVES[name]
    check(fn, *(a.to(dtype) for a in args))


@pytest.mark.parametrize("columns", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("k", [96, 101, 102])
def test_few_columns_take_several_of_k_in_a_vector(columns: int, k: int) -> None:
    """Of a linear and of a padded convolution; the last step of k reads nothing of the next row or pixel."""
    layers = torch.nn.Linear(k, columns), torch.nn.Conv2d(k, columns, 3, padding=1)
    inputs = R(37, k), R(2, k, 5, 9).contiguous(memory_format=torch.channels_last)
    inputs[0][1::2], inputs[1][1] = float("nan"), float("inf")
    for layer, x in zip(layers, inputs, strict=True):
        with torch.no_grad():
            torchsmith.compiler.reset()
            got, want = torchsmith.compile(layer)(x), layer(x)
            exact = layer.double()(x.double())
        alive = exact.isfinite()
        assert torch.equal(got.isfinite(), alive)
        error, eager = ((t.double() - exact)[alive].abs().max().item() for t in (got, want))
        assert error <= max(2 * eager, 4 * torch.finfo(torch.float32).eps * exact[alive].abs().max().item())


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_output_channel_is_a_column(groups: int, dtype: torch.dtype) -> None:
    layer = torch.nn.Conv2d(40 * groups, groups, 3, padding=1, groups=groups, dtype=dtype).eval().requires_grad_(False)
    x = R(2, 40 * groups, 7, 9).to(dtype).contiguous(memory_format=torch.channels_last)
    torchsmith.compiler.reset()
    done = torchsmith.explain(layer, options={"force_disable_caches": True})(x)
    assert done.graphs[0].kinds[-1] == "contraction"
    check(lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=groups), x, layer.weight, layer.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2, 8, 64])
def test_sums_read_in_eight_bytes(groups: int, dtype: torch.dtype) -> None:
    """What reads the sums computes on vectors of 8-byte elements, of which a register holds half as many."""
    rng = random.Random(0)
    x, w, b = numbers(rng, dtype, 2, 64, 5, 19), numbers(rng, dtype, 64, 64 // groups, 3, 3), numbers(rng, dtype, 64)
    with torch.no_grad():
        for read in (torch.Tensor.double, lambda y: (y * 50).long(), lambda y: torch.special.digamma(y.abs() + 2)):
            fn = lambda x, w, b, read=read: read(F.conv2d(x, w, b, padding=1, groups=groups))
            done, want = torchsmith.explain(fn)(x, w, b), fn(x, w, b)
            assert [(g.road, g.externs) for g in done.graphs] == [("native", ())]
            rtol, atol = 2e-5 if dtype is torch.float32 else 2e-2, 1.01 if want.dtype is torch.int64 else 1e-2
            torch.testing.assert_close(done.result.double(), want.double(), rtol=rtol, atol=atol)
