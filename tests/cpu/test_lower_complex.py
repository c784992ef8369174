"""Complex arithmetic runs natively, as pairs of real values, and equals eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lower_harness import check, check_native

import torchsmith

KINDS = [torch.complex64, torch.complex128]


def randn(*shape, dtype=torch.complex64):
    torch.manual_seed(len(shape))
    return torch.randn(shape, dtype=dtype)


def native(fn, *args, dynamic=False):
    report = check_native(fn, *args, dynamic=dynamic, rtol=1e-5, atol=1e-5)
    assert dynamic or not report.externs, report.externs  # sizes that vary may be large: torch is the faster one then


ELEMENTS = [
    lambda z, w: z * w, lambda z, w: z + w, lambda z, w: torch.sub(z, w, alpha=2), lambda z, w: -z, lambda z, w: z.conj() * w,
    lambda z, w: z.abs() + w.angle(), lambda z, w: (z.real, w.imag * 2), lambda z, w: z * 2.5 + 1, lambda z, w: z * (1 + 2j),
    lambda z, w: z * w.real, lambda z, w: torch.exp(z), lambda z, w: torch.view_as_real(z + w).flatten(), lambda z, w: z.sum() + w.mean(-1),
    lambda z, w: z.sum(dtype=torch.complex128) + w.mean(dtype=torch.complex64), lambda z, w: w.sum(-1, dtype=torch.complex64),
    lambda z, w: torch.add(z, w, alpha=1j), lambda z, w: (z * w)[..., 1:].transpose(0, -1), lambda z, w: torch.view_as_real(z * w)[..., 1],
    lambda z, w: torch.polar(z.abs(), w.real), lambda z, w: torch.complex(z.real, w.imag), lambda z, w: z.clone() * w.conj().resolve_conj(),
    lambda z, w: (z * w).reshape(-1).unsqueeze(0) * 2, lambda z, w: z / w, lambda z, w: z / 2j + z / 2.5, lambda z, w: w.real / z,
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(ELEMENTS)))
def test_elements(k):
    fn = ELEMENTS[k]
    dtype = KINDS[k % 2]
    native(fn, randn(3, 4, dtype=dtype), randn(3, 4, dtype=dtype))
    native(fn, randn(3, 4, dtype=dtype), randn(1, 4, dtype=dtype), dynamic=True)
    native(fn, randn(4, 3, dtype=dtype).t(), randn(3, 8, dtype=dtype)[:, ::2])
    check(fn, randn(3, 4), randn(3, 4), rtol=1e-5, atol=1e-5)


def test_sizes_beside_complex_numbers():
    """Beside elements of which there may be many, torch's operators take a size that varies as a tensor of one element."""
    def fn(z):
        n, m = z.shape
        return z * n, z / m, z + n, n - z, z / (n / 2)

    report = check_native(fn, randn(3, 4), dynamic=True, rtol=1e-5, atol=1e-5)
    assert set(report.externs) <= {"aten.mul.Tensor", "aten.div.Tensor", "aten.add.Tensor"}


def test_dtypes_and_few_elements():
    native(lambda z, x: (z * x, x * 1j, z + x.sum()), randn(3), torch.randn(3, dtype=torch.float64))
    native(lambda z, n: (z * n, n.to(torch.complex64)), randn(3), torch.arange(3))
    native(lambda z: (z * z, z + 1), randn(0, 3))
    native(lambda z: z * z + 1j, torch.tensor(1 + 2j))


def rotate(x, turns):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding(dtype):
    turns = torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    native(rotate, torch.randn(2, 5, 3, 8).to(dtype), turns)
    native(rotate, torch.randn(2, 5, 3, 8).to(dtype), turns, dynamic=True)
    native(lambda n: torch.polar(torch.ones(n.shape[0], 4), torch.outer(n, torch.arange(4.0))), torch.arange(3.0))


def test_many_elements_are_left_to_torch():
    z = randn(64, 128)
    report = check_native(lambda z: (z * z + 1, (z[:2] * 2j).abs()), z, rtol=1e-5, atol=1e-5)
    assert report.externs


def test_beside_operators_of_torch():
    def fn(x, w):
        return torch.fft.irfft(torch.fft.rfft(x) * w.conj()), torch.fft.fft(w * 2).abs()

    x, w = torch.randn(3, 8), randn(5)
    with torch.no_grad():
        torch.testing.assert_close(torchsmith.compile(fn, fullgraph=True)(x, w), fn(x, w), rtol=1e-5, atol=1e-5)


def test_complex_memory_that_is_written():
    def fn(z, w):
        z.mul_(w)
        z[0] += 1j
        w.real.add_(1)
        return z * 2, w

    given, wanted = [randn(3, 4), randn(3, 4) + 1], [randn(3, 4), randn(3, 4) + 1]
    with torch.no_grad():
        torch.testing.assert_close(torchsmith.compile(fn)(*given), fn(*wanted), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)


def test_quotients_of_numbers_that_are_not_finite():
    parts = [0.0, -0.0, 1.0, -2.5, 1e30, 1e-40, float("inf"), float("nan")]
    numbers = torch.view_as_complex(torch.cartesian_prod(torch.tensor(parts), torch.tensor(parts)))
    for z in numbers[::3]:  # torch's own kernels of single elements
        w = torch.stack([torch.div(z, x) for x in numbers.unbind()])
        with torch.no_grad():
            torch.testing.assert_close(torchsmith.compile(lambda z, x: z / x)(z, numbers), w, equal_nan=True, rtol=1e-5, atol=0)


def test_sums_and_exponentials_of_numbers_that_are_not_finite():
    """Eager multiplies what it adds by 1 + 0j, and divides a mean by n + 0j: infinite parts make the others NaN."""
    ends = (0.0, 1.0, float("inf"), -float("inf"), float("nan"), 3e38)
    z = torch.tensor([complex(a, b) for a in ends for b in ends], dtype=torch.complex64)

    def fn(z):
        return z + z.flip(0), z - z.flip(0).real, 2 - z, z.real + z, torch.exp(z), z.view(6, 6).mean(1), z.view(6, 6).sum(0)

    torch.testing.assert_close(torchsmith.compile(fn, fullgraph=True)(z), fn(z), equal_nan=True)


def test_convolutions_whose_operand_is_an_input_seen_in_another_dtype():
    """A copy with padding, or one that is converted, is made of what is a view of a buffer."""
    z, w = randn(1, 4, 8, 8), randn(4, 4, 3, 3)
    for fn in (F.conv_transpose2d, lambda z, w: F.conv2d(torch.view_as_real(z)[..., 0], w.real, padding=1)):
        check_native(fn, z, w, rtol=1e-4, atol=1e-4)


def test_complex_numbers_given_to_operators_of_torch():
    with torch.no_grad():
        for fn in (lambda z: z**1j, lambda z: z == 1j, lambda z: z.masked_fill(z.real > 0, 2j), lambda z: torch.full((4,), 2j) + z[0]):
            z = randn(3, 4)
            torch.testing.assert_close(torchsmith.compile(fn, fullgraph=True)(z), fn(z))
