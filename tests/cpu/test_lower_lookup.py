"""Operators that read at computed places (grids, sorted edges, wide kernels) run natively and equal eager."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from lower_harness import check_native

import torchsmith

FORBID = {"libtorch": "forbid"}
FLOATS = [torch.float32, torch.float64]
NEAR = {torch.float32: {"rtol": 1e-4, "atol": 2e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def near(dtype):
    return NEAR.get(dtype, {})


def randn(*shape, dtype=torch.float32):
    torch.manual_seed(len(shape))
    return torch.randn(shape).to(dtype)


GRIDS = list(itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (0, 1)))


@pytest.mark.parametrize(("mode", "padding", "align"), GRIDS)
def test_grid_sample(mode, padding, align):
    def fn(x, grid):
        return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=bool(align))

    dtype = FLOATS[align]
    grid = randn(2, 4, 6, 2, dtype=dtype) * 1.2
    grid[0, 0, 0], grid[0, 1, 1], grid[1, 2, 1] = math.nan, 1e20, -math.inf
    grid[1, 0, :2] = torch.tensor([[-1.0, 1.0], [0.0, 1.0]], dtype=dtype)
    report = check_native(fn, randn(2, 3, 5, 7, dtype=dtype), grid, **near(dtype))
    assert not report.externs
    check_native(fn, randn(2, 3, 5, 7, dtype=dtype), grid, dynamic=True, **near(dtype))
    if mode != "bicubic":
        check_native(fn, randn(2, 3, 4, 5, 3, dtype=dtype), randn(2, 3, 4, 2, 3, dtype=dtype) * 1.2, **near(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("right", [False, True])
def test_binary_search(dtype, right):
    edges = torch.arange(10).repeat_interleave(2)[:13].to(dtype)
    values = torch.arange(-3, 9).view(3, 4).to(dtype)
    rows = torch.stack([edges[:5], edges[3:8], edges[8:]])
    check_native(lambda e, v: torch.searchsorted(e, v, right=right), edges, values)
    check_native(lambda e, v: torch.searchsorted(e, v, right=right, out_int32=True), rows, values, dynamic=True)
    check_native(lambda e, v: torch.bucketize(v, e, right=right), edges[:0], values)


def test_binary_search_of_what_is_not_sorted():
    values = torch.tensor([math.nan, 1.0, 2.0, math.inf, -math.inf])
    check_native(torch.searchsorted, torch.tensor([0.0, 1.0, math.nan]), values)
    check_native(torch.searchsorted, randn(9), randn(50))
    check_native(torch.searchsorted, torch.arange(5, dtype=torch.float64), torch.tensor([[1], [3]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16])
def test_isin(dtype):
    x, y = torch.arange(12).view(3, 4).to(dtype), torch.tensor([[3, 5], [100, 0]]).to(dtype)
    check_native(lambda x, y: (torch.isin(x, y), torch.isin(x, y, invert=True), torch.isin(x, 3)), x, y)


@pytest.mark.parametrize("dtype", FLOATS)
def test_histc(dtype):
    x = torch.cat([randn(300, dtype=dtype), torch.tensor([1.0, -1.0, 3.0, math.nan], dtype=dtype)])
    check_native(lambda x: (torch.histc(x, 10, -1, 1), torch.histc(x, 7, 0, 3)), x)


@pytest.mark.parametrize("size", [(5, 6), (22, 26), (7, 30), (1, 1)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased(mode, size):
    for dtype in FLOATS:
        check_native(lambda x: F.interpolate(x, size=size, mode=mode, antialias=True), randn(2, 3, 11, 13, dtype=dtype), **near(dtype))
    x = randn(2, 3, 11, 13).to(memory_format=torch.channels_last)
    check_native(lambda x: F.interpolate(x, scale_factor=(0.4, 1.7), mode=mode, antialias=True), x, **near(x.dtype))


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, 3.5, math.inf])
def test_cdist(order):
    for dtype in FLOATS:
        check_native(lambda x, y: torch.cdist(x, y, order), randn(3, 5, 4, dtype=dtype), randn(3, 6, 4, dtype=dtype), **near(dtype))
    check_native(lambda x, y: torch.cdist(x, y, order, "donot_use_mm_for_euclid_dist"), randn(5, 4), randn(3, 36, 4), **near(torch.float32))
    x, y = randn(2, 5), randn(3, 5)
    x[0, 1], y[1, 0] = math.nan, math.inf
    check_native(lambda x, y: torch.cdist(x, y, order, "donot_use_mm_for_euclid_dist"), x, y, **near(torch.float32))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16])
def test_bilinear(dtype):
    w, b = randn(6, 4, 5, dtype=dtype), randn(6, dtype=dtype)
    check_native(F.bilinear, randn(7, 4, dtype=dtype), randn(7, 5, dtype=dtype), w, b, **near(dtype))


@pytest.mark.parametrize("rank", [2, 3])
def test_max_unpool(rank):
    pool, unpool = (F.max_pool2d, F.max_pool3d)[rank - 2], (F.max_unpool2d, F.max_unpool3d)[rank - 2]
    values, indices = pool(randn(2, 3, *[6] * rank), 2, return_indices=True)
    check_native(lambda v, i: unpool(v, i, 2), values, indices)
    check_native(lambda v, i: unpool(v, i, 2, output_size=[7] * rank), values[0], indices[0])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin_loss(p, reduction):
    x, t, w = randn(6, 5), torch.tensor([0, 4, 2, 2, 1, 3]), torch.rand(5)
    check_native(lambda x, t, w: F.multi_margin_loss(x, t, p=p, margin=0.7, weight=w, reduction=reduction), x, t, w)
    check_native(lambda x, t: F.multi_margin_loss(x, t, p=p, reduction=reduction), x[0], t[0])
    x[0, 0], x[1, 1], x[2], x[3] = math.nan, math.inf, -math.inf, math.inf
    check_native(lambda x, t: F.multi_margin_loss(x, t, p=p, reduction=reduction), x, t)


@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 3, 7], [7, 7, 7]])
def test_grouped_products(ends):
    def reference(x, w, e):
        """Row by row; rows behind the last group are 0."""
        group = torch.searchsorted(e, torch.arange(7, dtype=torch.int32), right=True)
        rows = torch.stack([x[i] @ w[min(int(g), 2)] for i, g in enumerate(group)])
        return rows * (group < 3)[:, None]

    x, w, e = randn(7, 20), randn(3, 9, 20).transpose(1, 2), torch.tensor(ends, dtype=torch.int32)
    want = reference(x, w, e)
    for dynamic in (False, True):
        with torch.no_grad():
            run = torchsmith.compile(lambda x, w, e: torch.ops.aten._grouped_mm(x, w, offs=e), dynamic=dynamic, options=FORBID)
            got = run(x, w, e)
        torch.testing.assert_close(got[: ends[-1]], want[: ends[-1]])


def test_grids_and_complex_values_of_any_size_where_libtorch_is_forbidden():
    def fn(x, grid):
        turned = torch.view_as_real(torch.polar(x[:, 0].abs(), x[:, 1]) * torch.view_as_complex(grid))
        return F.grid_sample(x, grid, align_corners=False), turned

    x, grid = randn(2, 3, 40, 40), randn(2, 40, 40, 2)
    with torch.no_grad():
        for dynamic in (False, True):
            got = torchsmith.compile(fn, dynamic=dynamic, options=FORBID)(x, grid)
            torch.testing.assert_close(got, fn(x, grid), rtol=1e-4, atol=1e-5)


def test_grouped_products_of_a_library():
    moe = pytest.importorskip("transformers.integrations.moe")
    given = randn(7, 20), randn(3, 20, 9), torch.tensor([2, 2, 5])
    with torch.no_grad():
        explained = torchsmith.explain(moe._grouped_mm)(*given)
        assert not explained.breaks and not explained.extern_calls
        torch.testing.assert_close(explained.result, torch.ops.transformers.grouped_mm_fallback(*given))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings(mode):
    def bags(w, i, o):
        return F.embedding_bag(i, w, o, mode=mode)

    def weighted(w, i, p):
        return F.embedding_bag(i, w, mode="sum", per_sample_weights=p)

    for dynamic in (False, True):
        assert not check_native(bags, randn(10, 5), torch.randint(10, (7,)), torch.tensor([0, 2, 2, 5]), dynamic=dynamic).externs
        assert not check_native(weighted, randn(10, 5), torch.randint(10, (3, 4)), randn(3, 4), dynamic=dynamic).externs
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"offsets\[0\] has to be 0"):
        torchsmith.compile(bags)(randn(10, 5), torch.randint(10, (4,)), torch.tensor([1, 2]))


@pytest.mark.parametrize("align", [False, True])
def test_affine_grids(align):
    for sizes in ((5, 8), (3, 1, 4)):
        rank = len(sizes)

        def fn(theta, x):
            return F.affine_grid(theta, x.shape, align_corners=align)

        for dynamic in (False, True):
            report = check_native(fn, randn(2, rank, rank + 1), randn(2, 1, *sizes), dynamic=dynamic, rtol=1e-5, atol=1e-6)
            assert not report.externs
        grads = []
        for run in (fn, torchsmith.compile(fn, dynamic=True)):
            theta = torch.linspace(-1, 1, 2 * rank * (rank + 1)).view(2, rank, rank + 1).requires_grad_()
            (run(theta, torch.zeros(2, 1, *sizes)) ** 2).sum().backward()
            grads.append(theta.grad)
        torch.testing.assert_close(*grads)


def test_counts_whose_number_the_data_tell():
    with torch.no_grad():
        for top in (3, 9):
            x = torch.tensor([0, 2, top])
            explained = torchsmith.explain(lambda x: torch.bincount(x, minlength=4).cumsum(0))(x)
            assert not explained.breaks and explained.result.tolist() == torch.bincount(x, minlength=4).cumsum(0).tolist()


def test_margin_loss_of_one_row():
    assert not check_native(F.multi_margin_loss, randn(5), torch.tensor([2])).externs
