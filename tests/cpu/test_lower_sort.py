"""Sorting and selecting along a dimension: natively where eager's order of equals is defined, or where there is no torch to call."""

from __future__ import annotations

import math

import pytest
import torch
from lower_harness import check, check_native

import torchsmith

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def rows(n, dtype):
    """[3, n] with many equals, NaN, infinities and both zeros; the least and the greatest of whole numbers."""
    torch.manual_seed(n)
    x = torch.randint(0, 2 if dtype is torch.bool else 7, (3, n)).to(dtype)
    if n > 4 and dtype.is_floating_point:
        x[0, 0], x[0, 1], x[1, 0], x[1, n // 2], x[2, 1], x[2, 3] = -0.0, 0.0, math.nan, math.nan, math.inf, -math.inf
    elif n > 4 and dtype is not torch.bool:
        x[0, 0], x[0, 3] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stable_sort(dtype):
    """A row ranked whole, and one of several blocks that are merged; along the other dimension; of a size that varies."""

    def both(x):
        return torch.sort(x, dim=-1, stable=True), torch.sort(x, dim=-1, stable=True, descending=True)

    for x in (rows(7, dtype), rows(333, dtype), rows(333, dtype).t().contiguous().t()):
        assert not check_native(both, x).externs
    assert not check_native(lambda x: torch.sort(x, dim=0, stable=True), rows(70, dtype).t().contiguous()).externs
    assert not check_native(both, rows(300, dtype), dynamic=True).externs


def test_stable_sort_of_little():
    for shape in ((3, 1), (3, 0), (0, 3), (0, 300), ()):
        check_native(lambda x: torch.sort(x, dim=-1, stable=True), torch.randn(shape))
    check_native(lambda x: (x.topk(0)[0], x[:0].topk(2)[0], x[:, :0].topk(0)[0]), torch.randn(3, 70), libtorch="forbid")
    check(lambda x: torch.sort(x, dim=1, stable=True), rows(70, torch.float32))  # the interpreter


def test_sorts_whose_order_shows_are_eagers():
    """Positions of equals in an unstable order are known to eager alone; values are not affected."""
    x = rows(100, torch.float32)
    for fn in (torch.sort, lambda x: torch.topk(x, 3), lambda x: torch.kthvalue(x, 3), lambda x: torch.median(x, 1)):
        assert len(check_native(fn, x).externs) == 1
        assert not check_native(lambda x, fn=fn: fn(x)[0], x).externs


def same_up_to_equals(fn, x, dim, dynamic=False):
    """Values equal eager's; positions are different ones, and lead to those values."""
    check_native(lambda x: fn(x)[0], x, libtorch="forbid", dynamic=dynamic)

    def found(x):
        values, at = fn(x)
        if at.dim() < x.dim():
            values, at = values.unsqueeze(dim), at.unsqueeze(dim)
        again = x.gather(dim, at)
        same = (again == values) | ((again != again) & (values != values))
        places = torch.sort(at, dim=dim, stable=True)[0]
        return same.all(), (places.diff(dim=dim) > 0).all()

    assert not check_native(found, x, libtorch="forbid", dynamic=dynamic).externs


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.bool], ids=str)
@pytest.mark.parametrize("largest", [False, True])
def test_topk(dtype, largest):
    for n, k in ((8, 2), (64, 64), (300, 5)):
        same_up_to_equals(lambda x, k=k: torch.topk(x, k, 1, largest), rows(n, dtype), 1)
    same_up_to_equals(lambda x: torch.topk(x, 5, 0, largest), rows(90, dtype).t(), 0)
    same_up_to_equals(lambda x: torch.topk(x, 5, 1, largest), rows(90, dtype), 1, dynamic=True)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.bool], ids=str)
def test_one_of_a_row(dtype):
    x = rows(91, dtype)
    for fn in (
        lambda x: torch.kthvalue(x, 7, 1),
        lambda x: torch.kthvalue(x, 91),
        lambda x: torch.median(x, 1, True),
        lambda x: torch.nanmedian(x, 1),
    ):
        same_up_to_equals(fn, x, 1)
    same_up_to_equals(lambda x: torch.median(x, 0), x.t(), 0, dynamic=True)
    check_native(lambda x: (x.median(), x[:0].median(), x[:, 2:].nanmedian()), x, libtorch="forbid", dynamic=True)
    check_native(lambda x: (x.median(), x.nanmedian(), x[0].median(), x[2, 3].median()), x, libtorch="forbid")


def test_what_follows_from_sorting():
    x = torch.randn(3, 200)
    x[0, 3] = math.nan
    for fn in (lambda x: torch.quantile(x, 0.3, dim=1), lambda x: torch.nanquantile(x, 0.7), torch.msort):
        assert not check_native(fn, x).externs
    tests = torch.cat([torch.randn(400), torch.tensor([math.nan, 1.0])])
    assert not check_native(torch.isin, torch.tensor([math.nan, 1.0, 3.0, tests[7]]), tests, libtorch="forbid").externs
    order = x.argsort(-1)
    assert not check_native(lambda e, v, s: torch.searchsorted(e, v, sorter=s), x[1:], torch.randn(2, 5), order[1:]).externs


def test_out_of_range():
    for fn in (lambda x: torch.topk(x, 4), lambda x: torch.topk(x, -1), lambda x: torch.kthvalue(x, 4), lambda x: torch.kthvalue(x, 0)):
        with pytest.raises(RuntimeError, match="out of range"):
            torchsmith.compile(fn)(torch.randn(3))
