"""Lowered operators through the whole road below capture: many rows in one graph, compiled, equal eager."""

from __future__ import annotations

from functools import partial

import pytest
import test_lower_ops as rows
import torch
import torch.nn.functional as F
from graph_harness import captured
from lower_harness import check_native

import torchsmith
from torchsmith.graph.functionalise import functionalise
from torchsmith.graph.sizes import SizeFacts
from torchsmith.options import Options
from torchsmith.pipeline import compile_source

TOLERANCE = {torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3}, torch.float16: {"rtol": 1e-3, "atol": 1e-4}}


def batch(functions, *args, **kwargs):
    """One graph of all functions; native."""
    return check_native(lambda *a: [f(*a) for f in functions], *args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_unary(dtype):
    batch(rows.UNARY, rows.make((7, 36), dtype), **TOLERANCE.get(dtype, {}))


def test_mish_where_it_is_worst():
    """Within 4 units in the last place of float64, at points where a product of two rounded factors was not."""
    x = torch.tensor([-6.876720905303955, -6.786379337310791, -6.769230365753174, -3.2377305030822754])
    with torch.no_grad():
        got, want = torchsmith.compile(F.mish)(x), F.mish(x.double())
    assert ((got.double() - want).abs() <= 4 * 2.0 ** (want.abs().log2().floor() - 23)).all()


def test_silu_gives_no_denormals():
    """As eager's gives none: whatever reads them takes hundreds of cycles for each. Where exp(-x) is infinite the result may be normal."""
    ends = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, -3e38, 3e38])
    x = torch.cat([torch.linspace(-120, 120, 4801), torch.linspace(-92, -86, 4801), ends])
    tiny = torch.finfo(torch.float32).tiny
    got, want = torchsmith.compile(F.silu)(x), F.silu(x.double())
    want = torch.where((want != 0) & (want.abs() < tiny), -0.0, want)
    assert not ((got != 0) & (got.abs() < tiny)).any()
    assert torch.equal(got.signbit(), want.signbit())
    torch.testing.assert_close(got.double(), want, rtol=4 * 2.0**-24, atol=0, equal_nan=True)


PRODUCTS = {"silu": F.silu, "mish": F.mish, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("function", PRODUCTS.values(), ids=PRODUCTS)
def test_products_whose_factor_is_denormal(function):
    """x f(x) is exact to 4 units where it is a normal number, even where f(x) is none."""
    x = torch.cat([torch.linspace(-92, -80, 2001), torch.linspace(-13.2, -9.5, 2001)])
    got, exact = torchsmith.compile(function)(x).double(), x.double()
    want = 0.5 * exact * torch.special.erfc(-exact * 0.5**0.5) if function is F.gelu else exact * exact.exp()
    if isinstance(function, partial):
        want = exact * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3))
    elif function is not F.gelu:
        want = torch.where(exact < -20, want, function(exact))
    normal = want.abs() >= torch.finfo(torch.float32).tiny
    assert ((got - want).abs() <= 4 * 2.0 ** (want.abs().log2().floor() - 23))[normal].all()


def test_neighbours_of_lanes():
    """Indices that stay within a vector are a load and a permutation, others a gather: growing slowly, fast, falling, ragged."""
    x, far = torch.randn(3, 100), torch.randn(3, 2000)

    def resized(mode, scale, one):
        shape = (1, 1, 3, -1) if mode == "bicubic" else (1, 3, -1)
        return lambda *args: F.interpolate(args[one].view(shape), scale_factor=scale, mode=mode)

    functions = [resized(mode, s, one) for mode in ("nearest", "linear", "bicubic") for s in (0.5, 1.0625, 1.7, 3) for one in (0, 1)]
    functions += [lambda x, far: x.flip(1), lambda x, far: far[:, ::37]]
    batch(functions, x, far, rtol=1e-5, atol=1e-3)  # positions are in float32, in eager too


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resizing_has_narrow_indices(mode):
    """Sixteen lanes, and gathers that may be loads: a row of 8-byte indices had eight, read one by one."""
    x, facts = torch.randn(1, 2, 20, 40), SizeFacts()
    graph = captured(lambda x: F.interpolate(x, scale_factor=1.5, mode=mode), (x,), facts)
    (text,) = compile_source(functionalise(graph, facts.freeze()), Options(), "resized").kernels
    assert "permvarsf512" in text
    assert "l < 8" not in text


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_int_unary(dtype):
    batch(rows.INT_UNARY, rows.make((5, 33), dtype))


@pytest.mark.parametrize("pair", [rows.PAIRS[0], rows.PAIRS[3], rows.PAIRS[6]], ids=str)
def test_binary(pair):
    batch(rows.BINARY, rows.make((3, 34), pair[0]), rows.make((34,), pair[1], 1.0, 4.0), **TOLERANCE.get(torch.promote_types(*pair), {}))


@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_reductions(layout):
    batch([f for k, f in enumerate(rows.REDUCTIONS) if k not in (30, 31, 33)], rows.make((3, 20, 33), layout=layout))


def test_views():
    batch([*rows.VIEWS, *rows.MORE], rows.make((3, 4, 5)))


def test_creation_and_pools():
    batch(rows.CREATION, rows.make((3, 4)))
    batch(rows.POOLS, rows.make((2, 3, 8, 7)))
    # TODO(graph): strides of a global pool in channels-last
    pools = [f for k, f in enumerate(rows.POOLS) if k != 7]
    batch(pools, rows.make((2, 3, 8, 7)).contiguous(memory_format=torch.channels_last))


def test_norms_and_losses():
    x, w, b, m, v = rows.make((4, 6, 5, 10)), rows.make((6,)), rows.make((6,)), rows.make((6,)), rows.make((6,), low=0.5)
    check_native(
        lambda x, w, b, m, v: (
            F.batch_norm(x, m, v, w, b),
            F.batch_norm(x, None, None, w, b, True),
            F.group_norm(x, 3, w, b),
            F.layer_norm(x, (5, 10)),
            F.rms_norm(x, (10,)),
            F.instance_norm(x, weight=w, bias=b),
        ),
        x, w, b, m, v,
    )  # fmt: skip
    batch(rows.LOSSES, rows.make((3, 4)), rows.make((3, 4)).flip(0) * 0.7)


def test_dynamic():
    batch([f for k, f in enumerate(rows.REDUCTIONS) if k not in (30, 31, 33)], rows.make((3, 4, 6)), dynamic=True)
    batch(rows.UNARY, rows.make((3, 4, 6)), dynamic=True)


def test_results_keep_eagers_strides():
    x = rows.make((4, 8))
    batch([lambda x: (x + 1).expand(3, 4, 8), lambda x: (x + 1).sum(1, keepdim=True).expand(4, 8), lambda x: (x + 1).unfold(1, 3, 1)], x)
    batch([lambda x: torch.nonzero(x > 0) * 2, lambda x: x[x > 0].sum(), lambda x: (x + 1)[::2, 1::3], lambda x: x.t() + 1], x)


def test_rows_4_kb_apart_and_a_sum_over_its_operand():
    """Temporaries of 1024 channels have gaps between their rows; a residual sum takes the place of the branch that ends there."""
    torch.manual_seed(0)
    x, down, up = torch.randn(2, 1024, 5, 6), torch.randn(32, 1024, 1, 1) / 32, torch.randn(1024, 32, 1, 1) / 6

    def block(x, down, up):
        y = F.relu(x)
        for _ in range(2):
            y = F.relu(y + F.conv2d(F.relu(F.conv2d(y, down)), up))
        return y, y.mean((2, 3)), y.flatten(1) @ y.flatten(1).T

    check_native(block, x, down, up, rtol=1e-4, atol=1e-3)


def test_rounding_to_bfloat16_is_torchs():
    """Every sign, exponent and leading bits of the mantissa, ties, denormals, infinities and NaN, alone and mixed in one vector."""
    tops = torch.arange(1 << 16, dtype=torch.int32) * 65536
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = tops + low
        mixed = bits[torch.randperm(bits.numel())]
        for x in (bits.view(torch.float32), mixed.view(torch.float32)):
            got, want = torchsmith.compile(lambda x: x.to(torch.bfloat16))(x), x.to(torch.bfloat16)
            nan = want.isnan()
            assert torch.equal(got.isnan(), nan)
            assert torch.equal(got[~nan].view(torch.int16), want[~nan].view(torch.int16))
