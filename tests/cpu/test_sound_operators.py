"""Operators on the arguments that eager broadcasts, refuses, resizes or counts from elsewhere: the result, or the exception, is eager's."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchsmith
from torchsmith.events import recording

Call = tuple[Any, ...]
R = torch.randn
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torchsmith.compiler.reset()


def _copied(args: Call) -> Call:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in args)


def _outcome(fn: Callable[..., Any], args: Call) -> Any:
    try:
        return fn(*args)
    except Exception as e:  # the exception is what is compared
        return e


def check(fn: Callable[..., Any], *calls: Call, dynamic: bool | None = None, exact: bool = False) -> None:
    """The same results, arguments afterwards and types of exception as eager, call after call of one compiled function."""
    compiled = torchsmith.compile(fn, dynamic=dynamic)
    for args in calls:
        mine, theirs = _copied(args), _copied(args)
        want, got = _outcome(fn, theirs), _outcome(compiled, mine)
        if isinstance(want, Exception) or isinstance(got, Exception):
            assert type(got) is type(want), f"{got!r} instead of {want!r}"
            continue
        options = {"rtol": 0.0, "atol": 0.0} if exact else {}
        torch.testing.assert_close(got, want, equal_nan=True, check_stride=True, **options)
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(a, Tensor):
                assert (a.shape, a.stride()) == (b.shape, b.stride())
                torch.testing.assert_close(a, b, equal_nan=True)


# ---------------------------------------------------------------- numbers that vary are no constants


def test_windows_of_convolutions_vary() -> None:
    x, w = torch.arange(8.0).view(1, 1, 8), torch.ones(1, 1, 2)

    def windows(x: Tensor, s: int) -> tuple[Tensor, ...]:
        padded = F.conv1d(x, torch.ones(1, 1, 3), padding=x.shape[-1] // s)
        return F.conv1d(x, w, stride=s), F.conv1d(x, w, dilation=s), F.conv_transpose1d(x, w, stride=s, padding=s - 1), padded

    check(windows, (x, 2), (x, 3), (x, 4))
    check(lambda x: F.conv1d(x, w, padding=x.shape[-1] // 2), (x,), (R(1, 1, 10),), (R(1, 1, 12),))


def test_the_ignored_class_varies() -> None:
    x, t = R(3, 4), torch.tensor([1, 2, 3])
    check(lambda x, t, i: F.cross_entropy(x, t, reduction="none", ignore_index=i), (x, t, 2), (x, t, 3), (x, t, 1))


# ---------------------------------------------------------------- sizes of 1 that are symbols broadcast


@pytest.mark.parametrize("shape", [(1,), (1, 3), (2, 1), (1, 1)])
def test_addmm_broadcasts(shape: tuple[int, ...]) -> None:
    check(torch.addmm, (R(shape), R(2, 4), R(4, 3)), dynamic=True)


@pytest.mark.parametrize("shape", [(1, 4, 3), (5, 1, 3), (5, 4, 1), (1,), (3,)])
def test_baddbmm_broadcasts(shape: tuple[int, ...]) -> None:
    check(torch.baddbmm, (R(shape), R(5, 4, 2), R(5, 2, 3)), dynamic=True)


def test_products_with_a_vector_broadcast() -> None:
    check(torch.addmv, (R(1), R(2, 4), R(4)), dynamic=True)
    check(F.linear, (R(2, 4), R(3, 4), R(3)), (R(2, 4), R(3, 4), R(1)), (R(5, 2, 4), R(3, 4), R(1)))
    check(F.conv2d, (R(1, 3, 5, 5), R(1, 3, 1, 1), R(1)), (R(2, 1, 5, 5), R(4, 1, 3, 3), R(4)), dynamic=True)


def test_index_put_broadcasts() -> None:
    i, j = torch.tensor([0, 2]), torch.tensor([1])

    def put(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        y[i] = v
        return x.index_put((i,), v), y

    check(put, (R(3, 4), R(2, 4)), (R(3, 4), R(1, 4)), (R(3, 4), R(2, 1)), (R(3, 4), R(3, 4)))
    check(lambda x, v, i, j: x.index_put((i, j), v), (R(3, 4), R(2), i, j), dynamic=True)
    mask = torch.tensor([True, False, True])
    check(lambda x, m, v: x.index_put((m,), v), (R(3, 4), mask, R(4)), (R(3, 4), mask, R(1)), (R(3, 4), mask, R(3)), dynamic=True)


def test_windows_larger_than_a_volume_that_varies() -> None:
    compiled = torchsmith.compile(lambda x: F.avg_pool3d(x, 2, 3, 1))
    for n in (5, 3):
        x = R(1, 2, n, 4, 5)
        torch.testing.assert_close(compiled(x), F.avg_pool3d(x, 2, 3, 1))
    with pytest.raises(RuntimeError, match="smaller than kernel"):
        compiled(R(1, 2, 1, 4, 5))


def test_adaptive_pools_to_nothing() -> None:
    x = R(2, 3, 4, 4)
    check(lambda x: (F.adaptive_avg_pool2d(x, (0, 2)), F.adaptive_max_pool2d(x, (0, 2))), (x,), dynamic=True)


# ---------------------------------------------------------------- operands of other sizes are refused


@pytest.mark.parametrize(
    "fn, args",
    [
        (F.linear, (R(2, 4), R(3, 4), R(2))),
        (torch.addmm, (R(2), R(2, 4), R(4, 3))),
        (torch.addmv, (R(3), R(2, 4), R(4))),
        (F.conv2d, (R(1, 3, 5, 5), R(4, 3, 1, 1), R(3))),
        (F.conv_transpose2d, (R(1, 3, 5, 5), R(3, 4, 1, 1), R(3))),
        (lambda x, w: F.layer_norm(x, (4,), w), (R(2, 4), R(3))),
        (torch.gru_cell, (R(2, 3), R(2, 2), R(6, 3), R(6, 2), R(2), R(6))),
        (F.cross_entropy, (R(3, 4), torch.tensor([0, 1, 2]), R(3))),
    ],
)
def test_operands_of_wrong_sizes_are_refused(fn: Any, args: Call) -> None:
    check(fn, args)


# ---------------------------------------------------------------- the caller's tensors change their shape


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, o: torch.add(x, 1, out=o),
        lambda x, o: torch.cat([x, x], out=o),
        lambda x, o: torch.matmul(x, x, out=o) * 2,
        lambda x, o: o.resize_(2, 2).fill_(1) + 1,
        lambda x, o: (x.unsqueeze_(0), x * 2),
        lambda x, o: (x.squeeze_(), x * 2),
        lambda x, o: (x.t_(), x * 2),
        lambda x, o: (x.as_strided_((2,), (1,)), x * 2),
    ],
)
def test_inputs_that_take_another_shape(fn: Any) -> None:
    with torch.no_grad():
        check(fn, (R(3, 3), torch.empty(0)), (R(1, 1), torch.empty(0)))


def test_a_tensor_of_the_program_is_resized() -> None:
    def add(x: Tensor) -> Tensor:
        o = torch.empty(0)
        torch.add(x, 1, out=o)
        return o * 2

    check(add, (R(3),))

    def twice(x: Tensor) -> tuple[Tensor, ...]:
        o = torch.empty(0)
        torch.sin(x, out=o)
        return o * 2, o.sum(), o[1:]  # read by more than one: it has memory of its own

    check(twice, (R(6),))

    def behind(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        w = v.clone()  # out=: views of no elements, behind the end of memory that grows
        return torch.add(x, 1, out=v[2:]), torch.add(x, 1, out=w[2:])

    check(behind, (R(3, 2), R(1, 2)), (R(3, 2), R(5, 2)))


def test_an_empty_out_takes_the_layout_of_the_result() -> None:
    out = lambda fn: lambda x: fn(x, torch.empty(0))
    check(out(lambda x, o: torch.linalg.solve(torch.eye(3) * 2, x, out=o)), (R(3, 4),))
    check(out(lambda x, o: torch.add(x.t(), x.t(), out=o)), (R(3, 4),))
    check(out(lambda x, o: torch.cumsum(x.t(), 0, out=o)), (R(3, 4),))


NORMED = (R(4, 3, 5), R(3), torch.zeros(3), torch.ones(3), torch.zeros(4, 3, 5), torch.zeros(3), torch.zeros(3))
OBSERVED = (R(3, 4), torch.ones(1), torch.ones(1), R(1), R(1), torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, n, o: aten.rrelu_with_noise.out(x, n, 0.1, 0.4, False, out=o) + n, (R(9), R(9), R(9))),
        (
            lambda x, w, m, v, o, a, b: aten._native_batch_norm_legit.out(
                x, w, None, m, v, True, 0.1, 0.1, out=o, save_mean=a, save_invstd=b
            ),
            NORMED,
        ),
        (
            lambda x, on, fq, a, b, s, z, o: aten._fused_moving_avg_obs_fq_helper.out(
                x, on, fq, a, b, s, z, 0.1, 0, 255, 0, out0=o, out1=torch.zeros(3, 4, dtype=torch.bool)
            ),
            OBSERVED,
        ),  # which leaves what its schema says it writes as it was
    ],
    ids=["rrelu", "batch norm", "observer"],
)
def test_out_beside_other_arguments_that_are_written(fn: Any, args: Call) -> None:
    check(fn, args)


# ---------------------------------------------------------------- where views begin


def test_diagonals_beyond_the_matrix() -> None:
    check(lambda x: (x.diagonal(3), x.diagonal(-3)), (R(6, 7),), (R(2, 2),), (R(7, 3),), (R(4, 1),))
    check(lambda x: x.diagonal(-3), (R(2, 2),), dynamic=True)


def test_strided_views_count_from_the_start_of_the_memory() -> None:
    def views(x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[2:].as_strided((2,), (1,), 0).zero_()
        turned = (x * 3).view(4, 6).t()[1:]
        return (x * 2)[1:].as_strided((2,), (1,), 0), (x * 2).view(4, 6)[1].as_strided((2,), (1,), 0), y, turned.as_strided((3,), (2,), 1)

    check(views, (torch.arange(24.0),))


def test_more_of_the_memory_than_a_view_shows() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        part = (x * 2).narrow(0, 4, 2)
        return part, part.as_strided((2, 2), (2, 1), 1)

    check(fn, (torch.arange(8.0),))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.as_strided_copy((x * 2)[1:], (2, 2), (2, 1), 3),
        lambda x: torch.as_strided_copy(torch.split(x * 2, 2)[1], (2, 2), (2, 1), 1),
        lambda x: torch.as_strided_scatter((x * 2)[1:], torch.ones(2, 2), (2, 2), (2, 1), 4),
        lambda x: torch.as_strided_scatter((x * 2)[:, 1:], torch.ones(2, 2), (2, 2), (2, 1), 1),
        lambda x: torch.as_strided_scatter((x * 2)[1:], torch.ones(2, 2), (2, 2), (2, 1)),
    ],
)
def test_copies_count_from_the_start_of_the_memory(fn: Any) -> None:
    x = torch.arange(16.0).view(4, 4)
    torch.testing.assert_close(torchsmith.compile(fn, fullgraph=True)(x), fn(x), check_stride=True)


def test_a_result_shown_otherwise_beside_its_memory() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        z = y.squeeze()
        return y.as_strided_((2, 2), (1, 2)), z

    x = torch.randn(3, 3)
    check(fn, (x,))
    part, whole = torchsmith.compile(fn)(x)
    part.zero_()
    assert whole.flatten()[:4].tolist() == [0.0] * 4


def test_the_offset_of_an_input() -> None:
    fn = lambda x: (x.as_strided((2, 2), (1, 1), 1) + 0, x.storage_offset(), x[1:].as_strided((2,), (1,)) + 0)
    compiled = torchsmith.compile(fn)
    base = torch.arange(24.0)
    for x in (base[3:], base[4:], base, base[5:9]):
        want, got = fn(x), compiled(x)
        torch.testing.assert_close(got, want)

    shown = torchsmith.compile(lambda x: x.as_strided((2,), (2,)))
    for x in (base[3:], base):  # a view that autograd watches
        got = shown(x.detach().requires_grad_())
        assert got.tolist() == [x[0], x[2]] and torch.autograd.grad(got.sum(), got._base)[0].nonzero().flatten().tolist() == [0, 2]
    pairs = torchsmith.compile(lambda x: torch.view_as_complex(x.view(-1, 2)), dynamic=True)
    x = base[2:].detach().requires_grad_()
    (g,) = torch.autograd.grad(pairs(x).real.sum(), x)
    assert g.tolist() == [1, 0] * 11

    for dynamic in (False, True):  # a write, where memory begins earlier
        torchsmith.compiler.reset()
        ours, theirs = torch.arange(12.0).view(2, 3, 2), torch.arange(12.0).view(2, 3, 2)
        write = lambda x: x.as_strided(x.shape, x.stride()).neg_() + 1
        torch.testing.assert_close(torchsmith.compile(write, dynamic=dynamic)(ours[1]), write(theirs[1]))
        assert torch.equal(ours, theirs)


def test_numbers_drawn_into_memory_with_gaps() -> None:
    def drawn(x: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        turned = x[:4].view(2, 2).t()
        drawn = torch.poisson(turned.abs()), F.rrelu(turned, training=True)
        return x[::2].normal_(), torch.normal(x[::2], 1.0, out=x[1::2]), *drawn, torch.rand(2)

    check(drawn, (R(36),), exact=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_normal_draws_into_what_there_is(dynamic: bool) -> None:
    """With a number as deviation out= keeps its size, none too, and the means are spread over it or refused."""

    def drawn(mean: Tensor, deviation: Any, out: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return torch.normal(mean, deviation, out=out), out * 2

    for mean in (torch.tensor(2.0), R(1), R(3)):
        for size in (0, 3):
            check(drawn, (mean, 1.5, torch.zeros(size)), dynamic=dynamic)
    check(drawn, (torch.tensor(2.0), torch.ones(3), torch.zeros(0)), dynamic=dynamic)


# ---------------------------------------------------------------- what eager refuses


@pytest.mark.parametrize("name", ["max", "min", "amax", "amin", "argmax", "argmin", "aminmax"])
def test_extremes_of_nothing(name: str) -> None:
    def of(x: Tensor) -> Any:
        return getattr(torch, name)(x)

    def along(x: Tensor) -> Any:
        return getattr(torch, name)(x, dim=-1)

    for fn in (of, along):
        check(fn, (torch.zeros(3, 0),), (R(3, 2),))


MASK, BYTES, LONGS = torch.tensor([True, False]), torch.zeros(3, dtype=torch.uint8), torch.tensor([0, 1])
REFUSED: list[tuple[Any, Call]] = [
    (lambda m: 1 - m, (MASK,)),
    (lambda x, m: x - m, (R(2), MASK)),
    (lambda x: x - True, (R(2),)),
    (lambda u: u.fill_(300), (BYTES,)),
    (lambda u: torch.full_like(u, 300), (BYTES,)),
    (lambda u: u.clamp(-5, 300), (BYTES,)),
    (lambda x, v: x.index_put_((LONGS,), v), (R(2), torch.ones(2, dtype=torch.float64))),
    (lambda x: x[1:].add_(x[:-1]), (R(5),)),
    (lambda x: x.add_(x.t()), (R(3, 3),)),
    (torch.argmax, (MASK,)),
    (F.cross_entropy, (R(2, 3), R(2))),
    (lambda w, i: F.embedding(i, w), (R(3, 2), R(2))),
    (lambda x, i: x.index_copy(0, i, x), (R(2, 3), R(2))),
    (lambda x, i: x.index_fill(0, i, 1.0), (R(2, 3), R(2))),
    (lambda c, x: torch.where(c, x, x), (R(2, 3), R(2, 3))),
    (lambda x, m: x.masked_fill(m, 1.0), (R(3), BYTES)),
    (lambda x, y: torch.lerp(x, y, 0.5), (R(2), R(2).double())),
    (lambda x, w: F.layer_norm(x, (3,), w), (R(2, 3), R(3).double())),
    (lambda a: torch.add(a, a, alpha=0.5), (LONGS,)),
    (lambda a: F.one_hot(a, 1), (LONGS,)),
    (torch.searchsorted, (R(1, 4).sort()[0], R(3, 3))),
    (lambda q, m: F.scaled_dot_product_attention(q, q, q, m), (R(1, 2, 3, 4), torch.ones(3, dtype=torch.bool))),
    (lambda q, m: F.scaled_dot_product_attention(q, q, q, m), (R(1, 2, 3, 4), R(3, 3).double())),
    (lambda q, m: F.scaled_dot_product_attention(q, q, q, m), (R(2, 3, 4), R(1, 1, 3, 3))),
    (torch.complex, (R(2), R(2).double())),
    (lambda x, i, o: torch.gather(x, 0, i, out=o), (R(2), LONGS, R(2).double())),
    (lambda z: z.abs_(), (torch.ones(2, dtype=torch.complex64),)),
]


@pytest.mark.parametrize("at", range(len(REFUSED)))
def test_what_eager_refuses_is_refused(at: int) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        REFUSED[at][0](*_copied(REFUSED[at][1]))
    check(*REFUSED[at])


FILLS: dict[torch.dtype, list[Tensor]] = {
    torch.uint8: [torch.tensor(v) for v in (300, -1, -255, -256, 200.5, -1.5, math.nan, math.inf)],
    torch.int32: [torch.tensor(v) for v in (2**40, -(2**31), -(2**31) - 1, 2.5, 1e10, -math.inf)],
    torch.float16: [torch.tensor(v) for v in (1e6, 6e4, -math.inf, math.nan, 70000, 7)],
    torch.float32: [torch.tensor(v, dtype=torch.float64) for v in (1e300, 1e30, math.inf)],
}


@pytest.mark.parametrize("dtype", FILLS)
def test_numbers_of_tensors_that_fill_have_to_fit(dtype: torch.dtype) -> None:
    calls = [(torch.ones(4, dtype=dtype), torch.tensor([True, False, True, False]), v) for v in FILLS[dtype]]
    for fill in (Tensor.masked_fill, lambda x, m, v: x.index_fill(0, m.nonzero()[:, 0], v)):
        for given in {v.dtype for v in FILLS[dtype]}:
            check(fill, *(c for c in calls if c[2].dtype is given))


# ---------------------------------------------------------------- values to the last bit, and layouts


def test_values_are_eagers_own() -> None:
    x, n = torch.full((9,), 3.0, dtype=torch.float64), torch.arange(12.0, 21.0, dtype=torch.float64)
    check(lambda x, n: ((x**n).long(), 3.0**n), (x, n), exact=True)
    check(torch.ldexp, (torch.tensor([2e-38, 1.0]), torch.tensor([130, -149])), exact=True)
    check(lambda x: (torch.all(x, ()), torch.any(x, ())), (torch.tensor([1.0, 0.0]),), exact=True)
    check(lambda x: torch.signbit(x.sum(-1)), (torch.tensor(-0.0),))
    check(lambda x: (torch.special.i0e(x), torch.special.i1e(x)), (torch.tensor([1e308, -1e308, 40.0], dtype=torch.float64),))
    far = torch.tensor([[1e-30], [3e38], [-2.0]])
    for order in (2, 3, -2):  # of one element: its absolute value
        check(lambda x, order=order: torch.linalg.vector_norm(x, order, -1), (far,), exact=True)
        check(lambda x, order=order: torch.linalg.vector_norm(x, order, 0), (R(4, 2),), (far[:1],), dynamic=True)
    turned = torch.arange(6).view(2, 3).t()
    assert torchsmith.compile(lambda x: 2**x)(turned).stride() == (2**turned).stride()


def test_values_at_the_ends_of_a_dtype() -> None:
    check(torch.lgamma, (torch.tensor([5e-324, -5e-324, 1e-310, -1e-300, 1e-20, -1e-8, -0.25, 1e305], dtype=torch.float64),))
    check(torch.special.log_ndtr, (torch.tensor([-1.37e154, -1.8e154, -1e300, -1e10, 38.0], dtype=torch.float64),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_beside_half_formats_round_as_in_eager(dtype: torch.dtype) -> None:
    def numbers(h: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        shrunk = F.softshrink(h, 0.3), F.threshold(h, 0.3, 0.1), F.hardshrink(h, 0.3)
        return 2.7 - h, h + 2.7, h * 2.7, 2.7 / h, t * h, h / t, t - h, h**3, h**-2, *shrunk, torch.nextafter(h, -h)

    check(numbers, (torch.linspace(-2, 2, 300).to(dtype), torch.tensor(2.7)), exact=True)

    def stored(h: Tensor, g: Tensor) -> tuple[Tensor, ...]:  # kernels that compute in the format itself
        logs = torch.xlogy(h, g), torch.special.xlog1py(h, g), torch.xlogy(2.5, g), torch.special.xlog1py(h, 2.5), torch.special.entr(h)
        return *logs, torch.logit(h), torch.logit(h, 0.3)

    check(stored, (torch.linspace(-2, 2, 300).to(dtype), torch.linspace(3, -1, 300).to(dtype)), exact=True)

    def constants(x: Tensor) -> tuple[Tensor, ...]:
        filled = torch.full((3,), 0.1, dtype=dtype)
        beside = x % torch.tensor(0.001, dtype=dtype), x.double() * torch.full((3,), 0.1), x * filled
        return *beside, filled.float(), x.new_full((3,), 0.3, dtype=dtype).double(), torch.zeros(3, dtype=dtype).fill_(0.1).float()

    check(constants, (torch.tensor([1.0, 2.0, 3.0]),), exact=True)


# ---------------------------------------------------------------- every number of an operator may vary


def _windows(x: Tensor, n: int) -> tuple[Any, ...]:
    pooled = F.max_pool2d(x, n), F.avg_pool2d(x, n, stride=n), F.lp_pool2d(x, 2.0, n), F.adaptive_avg_pool2d(x, n), F.max_pool1d(x[0], n, n)
    columns = F.unfold(x, n, stride=n), F.unfold(x, 2, padding=n, dilation=n), x.unfold(2, n, n)
    w = torch.ones(4, 4, 2, 2)
    convolved = F.conv2d(x, w, stride=n), F.conv2d(x, w, padding=n, dilation=n), F.conv_transpose2d(x, w, stride=n, padding=n - 1)
    padded = F.pad(x, (n, 0)), F.pad(x, (n, n, 0, 1), mode="reflect"), F.pad(x, (n, 1, 1, 0), mode="replicate")
    return *pooled, *columns, *convolved, *padded, F.interpolate(x, size=(n, n)), F.local_response_norm(x, n)


def _choices(x: Tensor, n: int) -> tuple[Any, ...]:
    parts = *x.split(n, 2), *x.chunk(n, 2), x.narrow(2, n, 2), x.select(2, n), x[:, :, n:], x[:, :, ::n], x[..., : n * 2, None]
    moved = x.diagonal(n, 2, 3), x.roll(n, -1), x.tril(n), x.triu(-n), x.rot90(n, (2, 3)), x.repeat(1, n, 1, 1), x.repeat_interleave(n, 1)
    chosen = x.topk(n)[0], x.kthvalue(n, -1)[0], x.index_fill(0, torch.tensor([1]), n), x.scatter(0, (x[:1] > 9).long(), n)
    embedded = torch.diag_embed(x[0, 0], n), F.one_hot(torch.tensor([0, 1]), n), F.embedding(torch.tensor([0, 1]), x[0, 0], padding_idx=n)
    return *parts, *moved, *chosen, *embedded, torch.as_strided(x, (n, n), (n, 1), n)


def _values(x: Tensor, n: int) -> tuple[Any, ...]:
    made = torch.full((n,), n), torch.eye(n), torch.eye(n, n + 1), torch.linspace(0, 1, n), torch.arange(n, 9, n)
    logs = torch.logspace(0, 1, 5, n), x.renorm(2, 0, n)
    powers = x.abs() ** n, x + n, x * n, n - x, torch.add(x, x, alpha=n), n**x, torch.addcmul(x, x, x, value=n), torch.lerp(x, x * 2, n)
    limits = x.clamp(max=n), F.hardtanh(x, -n, n), F.threshold(x, n, n), F.softplus(x, n, 3 * n), F.elu(x, n), F.celu(x, n)
    folded = x.var(2, correction=n), x.norm(n), x.norm(n, dim=-1), torch.cdist(x[0], x[1], p=n), F.pdist(x[0, 0], p=n), x.histc(n)
    lost = F.huber_loss(x, x * 2, delta=n), F.smooth_l1_loss(x, x * 2, beta=n), F.cross_entropy(x[0, 0], torch.arange(12), ignore_index=n)
    whole = torch.arange(12)
    return *logs, *made, *powers, *limits, *folded, *lost, whole // n, whole % n, whole << n, torch.round(x, decimals=n), x.polygamma(n)


def _floats(x: Tensor, n: int) -> tuple[Any, ...]:
    v = n / 8
    shrunk = F.leaky_relu(x, v), F.softshrink(x, v), F.hardshrink(x, v), F.threshold(x, v, v), F.elu(x, v), F.celu(x, v), F.softplus(x, v)
    limits = x.clamp(-v, v), x.nan_to_num(v), x.abs().clamp(0.1, 0.9).logit(v / 4), torch.lerp(x, x * 2, v), x.abs() ** v, v**x
    stats = torch.zeros(4), torch.ones(4)
    normed = F.layer_norm(x, (12,), eps=v), F.group_norm(x, 2, eps=v), F.normalize(x, eps=v), F.batch_norm(x, *stats, eps=v)
    lost = F.huber_loss(x, x * 2, delta=v), F.smooth_l1_loss(x, x * 2, beta=v), F.triplet_margin_loss(x, x * 2, x * 3, margin=v)
    attended = F.scaled_dot_product_attention(x, x, x, scale=v), F.interpolate(x, scale_factor=v * 4)
    more = torch.full((2,), v), torch.linspace(0, v, 5), F.dropout(x, v, training=False), torch.addcdiv(x, x, x.abs() + 1, value=v)
    return *shrunk, *limits, x.renorm(2, 0, v), *normed, *lost, *more, *attended, x.norm(v), torch.add(x, x, alpha=v)


@pytest.mark.parametrize("fn", [_windows, _choices, _values, _floats])
def test_numbers_of_operators_vary(fn: Any) -> None:
    """Whether they stay symbols or are pinned: no call is computed with another call's number."""
    x = R(2, 4, 12, 12)
    calls = [(x, n) for n in (2, 4, 3)]
    compiled = torchsmith.compile(fn)
    for args in calls:
        for k, (got, want) in enumerate(zip(compiled(*args), fn(*args), strict=True)):
            said = f"result {k}, n = {args[1]}"
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-4, msg=lambda m, said=said: f"{said}: {m}")


def test_limits_below_0_of_unsigned_numbers_are_refused() -> None:
    compiled = torchsmith.compile(lambda x, n: F.hardtanh(x, n, 3.0), dynamic=True)
    x = torch.arange(6, dtype=torch.uint8)
    for n in (1.0, 2.0):
        assert torch.equal(compiled(x, n), F.hardtanh(x, n, 3.0))
    with pytest.raises(RuntimeError, match="unsigned type with negative limits"):
        compiled(x, -2.0)


def test_no_unknown_number_becomes_zero() -> None:
    """`known(n) or 0` takes a symbol for a constant: in the rooms of operators nobody writes it."""
    root = Path(torchsmith.__file__).parent
    found = []
    for path in (*(root / "lower").glob("*.py"), *(root / "graph").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and any(_asks(v) for v in node.values):
                found.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("int", "float") and any(_asks(v) for v in node.args):
                found.append(f"{path.name}:{node.lineno}")
    assert not found


def _asks(e: ast.AST) -> bool:
    return isinstance(e, ast.Call) and getattr(e.func, "id", getattr(e.func, "attr", "")) in ("known", "const_of", "maybe_as_int")


def test_bytes_that_are_no_bools_stay() -> None:
    def through(x: Tensor) -> tuple[Tensor, ...]:
        return (x + 1).view(torch.bool).view(torch.float32) + 1, (x > 0).view(torch.uint8) + 1

    def written(x: Tensor) -> Tensor:
        x.view(torch.uint8)[0] = 7
        return x.view(torch.uint8) + 1

    a, b = torch.tensor([True, False]), torch.tensor([True, False])
    torch.testing.assert_close(torchsmith.compile(through)(torch.arange(3.0)), through(torch.arange(3.0)))
    assert torchsmith.compile(written)(a).tolist() == written(b).tolist() == [8, 1]
    assert a.view(torch.uint8).tolist() == b.view(torch.uint8).tolist()


def test_bytes_of_bools_that_are_not_written_stay() -> None:
    """A write to a part of an input's bools leaves the others' bytes as they are."""
    def part(x: Tensor) -> Tensor:
        x[:3] = True
        return x.sum()

    def chosen(x: Tensor) -> Tensor:
        x.masked_fill_(x & (torch.arange(len(x)) < 9), False)
        return x.sum()

    for fn in (part, chosen):
        a, b = ((torch.arange(70, dtype=torch.uint8) % 5).view(torch.bool) for _ in range(2))
        assert torch.equal(fn(a), torchsmith.compile(fn, fullgraph=True)(b))
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


BACKWARD = [
    lambda g, x: aten.threshold_backward(g, x, 0.0), aten.hardswish_backward, aten.silu_backward, aten.mse_loss_backward.default,
    lambda g, x: aten._softmax_backward_data(g, x, 1, g.dtype), lambda g, x: aten._log_softmax_backward_data(g, x, 1, g.dtype),
]  # fmt: skip


def test_derivatives_have_eagers_strides_in_dimensions_of_one_element_too() -> None:
    at = [((2, 1, 3), s) for s in ((3, 3, 1), (3, 7, 1), (1, 9, 2), (6, 5, 2))] + [((1, 1, 3), s) for s in ((2, 5, 1), (7, 0, 1))]

    def all_of(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(fn(g, x, x * 2, 0) if fn is aten.mse_loss_backward.default else fn(g, x) for fn in BACKWARD)

    for shape, one in at:
        for two in (s for n, s in at if n == shape):
            g, x = (torch.arange(20.0).sub(9).div(7).as_strided(shape, s) for s in (one, two))
            torchsmith.compiler.reset()
            got = torchsmith.compile(all_of, fullgraph=True, dynamic=False)(g, x)
            torch.testing.assert_close(got, all_of(g, x), check_stride=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_derivatives_of_numbers_that_eager_has_none_for(dtype: torch.dtype) -> None:
    g, x = torch.ones(3, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    for op in (aten._softmax_backward_data, aten._log_softmax_backward_data):
        check(lambda g, x, op=op: op(g, x, 1, g.dtype), (g, x))


@pytest.mark.parametrize("scale", [2.0, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
def test_gradients_of_dropout_are_products_of_what_is_given(dtype: torch.dtype, scale: float) -> None:
    g = (torch.arange(12) % 5).view(4, 1, 3).to(dtype)
    for mask in (torch.tensor([True, False, True]), torch.rand(2, 3) > 0.5, torch.rand(4, 2, 3)):
        check(lambda g, m: aten.native_dropout_backward(g, m, scale), (g, mask))


def test_results_come_in_eagers_containers() -> None:
    """A function rule that writes a composite out gives what torch gives: a tuple stays a tuple, also where sizes vary."""

    def fn(x):
        return torch.gradient(x, spacing=2.0), torch.unbind(x), torch.split(x, 2), torch.meshgrid(x, x, indexing="ij"), torch.max(x, 0)

    x = torch.randn(5)
    for got, want in zip(torchsmith.compile(fn, dynamic=True)(x), fn(x), strict=True):
        assert type(got) is type(want)
        torch.testing.assert_close(tuple(got), tuple(want))


# ---------------------------------------------------------------- eager's own kernels are asked

TYPES: tuple[tuple[Callable[..., Any], Call], ...] = (
    (lambda x: F.softshrink(x, math.nan), (R(5).half(),)),
    (lambda x: F.elu(x, 1e39), (R(5).half(),)),
    (lambda x: x.lerp(x * 2, 1e39), (R(5).half(),)),
    (lambda x, v: torch.addmv(v, x, v, beta=1e39), (R(5, 5).half(), R(5).half())),
    (F.binary_cross_entropy_with_logits, (R(5).half(), torch.ones(5).byte())),
    (F.binary_cross_entropy_with_logits, (R(40000).half(), torch.ones(40000).byte())),
    (F.soft_margin_loss, (R(40000), torch.ones(40000).double())),
    (torch.addr, (torch.tensor(1.0), R(5).half(), R(5).half())),
    (lambda x, i: x.index_select(1, i), (R(2, 3), torch.zeros(3))),
    (lambda x, i: x.index_select(0, i), (torch.tensor(1.0), torch.zeros(0, dtype=torch.int64))),
    (torch.isin, (R(5), torch.ones(3, dtype=torch.bool))),
    (lambda x: torch.norm(x, 0.5, 1), (torch.ones(5, 10, dtype=torch.int32),)),
    (lambda x: x.norm(math.inf), (R(0, 4),)),
    (lambda x: F.interpolate(x, size=3), (R(2, 3, 0),)),
    (lambda x: torch.ops.aten.upsample_nearest1d(x, [2], 0.6), (R(2, 3, 0),)),
    (lambda x: F.interpolate(x, (5, 3), mode="bilinear", antialias=True), (R(1, 2, 3, 4),)),  # by other scales eager reads past the rows
    (lambda x: F.batch_norm(x, None, None, training=True), (R(0, 3, 4),)),
    (lambda x: torch.gradient(x, dim=(1, 1)), (R(5, 4),)),
    (lambda x: F.unfold(x, 2, 2), (R(0, 1, 5, 5),)),
)  # fmt: skip


@pytest.mark.parametrize("dynamic", (False, True))
def test_numbers_and_dtypes_go_together_as_in_eager(dynamic: bool) -> None:
    for fn, args in TYPES:
        torchsmith.compiler.reset()
        check(fn, args, dynamic=dynamic)


def test_a_wrong_rule_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that says another dtype, or another order in memory, than eager's kernel: eager's result, and a code."""
    from torchsmith.events import recording
    from torchsmith.graph import accept
    from torchsmith.graph.tracing import RULES

    x = R(3, 4)
    for op, rule in (
        (torch.ops.aten.sin.default, lambda self: torch.empty_like(self, dtype=torch.float64)),
        (torch.ops.aten.cumsum.default, lambda self, dim, **k: torch.empty((4, 3), device="meta").t()),
    ):
        torchsmith.compiler.reset()
        accept.forget()
        monkeypatch.setitem(RULES, op, rule)
        with recording() as got:
            result = torchsmith.compile(lambda x, op=op: op(x) if op is torch.ops.aten.sin.default else op(x, 0))(x)
        want = x.sin() if op is torch.ops.aten.sin.default else x.cumsum(0)
        assert result.dtype is want.dtype and result.stride() == want.stride() and torch.allclose(result, want)
        assert "GRA014" in {str(e.fields.get("code")) for e in got}
    accept.forget()


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_resampling_by_a_scale_that_is_not_the_sizes_ratio(rank: int) -> None:
    """6 elements times 1.1 are 6: in one and three dimensions nearest goes by the scale, in two it copies; linear copies in all."""
    smooth = ("linear", "bilinear", "trilinear")[rank - 1]

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.interpolate(x, scale_factor=s, mode=mode) for s in (1.1, 2.1) for mode in ("nearest", smooth))

    inf = R(1, 2, *[6] * rank)
    inf.view(-1)[3] = math.inf  # the element beside it has weight 0
    for dynamic in (False, True):
        torchsmith.compiler.reset()
        check(fn, *((R(1, 2, *[n] * rank),) for n in ((6, 13) if dynamic else (6,))), (inf,), dynamic=dynamic)


def test_sizes_of_nothing_stay_compiled() -> None:
    """Nests that never run read nothing outside, and divide by nothing."""
    from torchsmith.events import recording

    for fn, args in (
        (lambda x: F.group_norm(x, 1), (R(0, 0, 0),)), (lambda x, i: x.take(i), (R(0, 0), torch.zeros(0, 2, dtype=torch.int64))),
        (lambda a, b: torch.tensordot(a, b, 2), (R(0, 0, 0), R(0, 0, 0))),
        (torch.matmul, (R(3, 0).bfloat16(), R(0, 5).bfloat16())),
    ):  # fmt: skip
        torchsmith.compiler.reset()
        with recording() as got:
            check(fn, args, dynamic=True)
        assert not [e.fields for e in got if e.kind == "fallback"]


# ---------------------------------------------------------------- values that a kernel on made-up data must not decide

MASK, ROWS = torch.tensor([True, False, True]), torch.tensor([0, 1])


def _put(a: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    a = a.clone()
    a[mask] = values
    return a


@pytest.mark.parametrize("fn, call", [
    (_put, (R(3), MASK, R(2))),
    (lambda a, m, v: a.index_put((m,), v, accumulate=True), (R(3, 4), MASK, R(2, 4))),
    (lambda a, i, m: a[i, m] * 2, (R(2, 3), ROWS, MASK)),
    (lambda a, i, m: a[:, i, m] * 2, (R(5, 2, 3), ROWS, MASK)),
    (lambda a, m, n: a[m, :, n], (R(3, 4, 3), MASK, MASK.roll(1))),
    (lambda a, i, m: a[i.view(2, 1), m], (R(2, 3), ROWS, MASK)),
])  # fmt: skip
def test_masks_choose_as_many_as_go_with_them(fn: Callable[..., Any], call: Call) -> None:
    """How many elements a mask chooses is about values; beside other indices the counts have to agree."""
    for dynamic in (None, True):
        with recording() as got:
            check(fn, call, call, dynamic=dynamic)
        assert not [e.fields for e in got if e.kind in ("fallback", "graph_break")]
    more = tuple(torch.ones_like(a) if isinstance(a, Tensor) and a.dtype is torch.bool else a for a in call)
    check(fn, call, more, call)  # refused as eager refuses it


def test_tensors_of_two_numbers_are_constants() -> None:
    ops = torch.ops.aten

    def fn(x: Tensor, a: Any, b: Any) -> Any:
        return x + 1, ops.add(a, b), torch.mul(b, a), ops.div(a, b, rounding_mode="floor"), torch.div(a, b)

    for dynamic in (None, True):
        calls: list[Call] = [(R(2), a, b) for a, b in ((4, 3.5), (5, 2), (2.5, 2), (7, 3), (8, 3))]
        check(fn, *calls, dynamic=dynamic, exact=True)
    with recording() as got:
        check(fn, (R(2), 4, 3.5))
    assert not [e.fields for e in got if e.kind in ("fallback", "graph_break")]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_large_powers_of_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 120, (40,)).to(dtype)
    with recording() as got:
        check(lambda x: (x**87, (x + 1) ** 127), (x,))
    assert not [e.fields for e in got if e.kind in ("fallback", "graph_break")]
