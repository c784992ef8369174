"""Integers of the program are exact: what 64 bits do not hold is left to Python, and no division ends the process."""


import pytest
import torch

import fresh
import torchsmith
from torchsmith.codes import Unsupported
from torchsmith.emit.host import size_text
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Sym, const

X = torch.ones(3)
PROGRAMS = {
    "mod": (lambda x, s: (x + 1, s % 2**64), [5, 6, 7]),
    "power": (lambda x, n: (x + 1, n * n * n * n), [5, 6, 2**20, 2**40, 3]),
    "hash": (lambda x, s: (x + 1, s * 6364136223846793005), [5, 6, 7]),
    "hash that fits": (lambda x, s: (x + 1, (s * 2654435761) % 2**32), [5, 6, 63, 2**40]),
    "large constant": (lambda x, s: (x + 1, s + 2**63, s < 2**64), [5, 6, 7]),
    "ends": (lambda x, s: (x + 1, -s, abs(s), s - 1), [5, 6, -(2**63), 2**63 - 1, 2**70]),
    "divided": (lambda x, s: (x + 1, s // -1, s % 7, s / 3), [5, 6, -(2**63), 2**53 + 1, 4]),
    "divisor": (lambda x, s: (x + 1, 100 // s, 100 % s), [5, 6, 0, 3, -1]),
    "tensor": (lambda x, s: x * (s * s), [5, 6, 2**31, 2**32]),
}


def outcome(f, *args):
    try:
        got = f(*args)
    except Exception as e:
        return type(e), str(e)
    return [v.tolist() if isinstance(v, torch.Tensor) else (type(v), v) for v in (got if isinstance(got, tuple) else (got,))]


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_pythons(name: str) -> None:
    f, numbers = PROGRAMS[name]
    compiled = torchsmith.compile(f)
    for n in numbers:
        assert outcome(compiled, X, n) == outcome(f, X, n), n


def test_sizes_of_shapes() -> None:
    compiled = torchsmith.compile(lambda x: (x + 1, x.shape[0] ** 9))
    for n in (5, 6, 300):
        assert compiled(torch.ones(n))[1] == n**9


DIES = r"""
import torch, torchsmith
wide = [torch.ones(1, 1, 1).expand(*s) for s in ((2**21, 1, 1), (1, 2**21, 1), (1, 1, 2**20))]
def f(a, b, c): return (a + b + c).sort(0)[0].sum()
compiled = torchsmith.compile(f, dynamic=True)
for n in (2, 3):
    args = torch.ones(n, 1, 1), torch.ones(1, n + 1, 1), torch.ones(1, 1, n + 2)
    assert torch.equal(compiled(*args), f(*args))
for call in (compiled, f):
    try: call(*wide)
    except RuntimeError as e: pass
    else: raise AssertionError("nothing was said")
pool = torchsmith.compile(lambda x: torch.nn.functional.adaptive_avg_pool2d(x, (0, 3)), dynamic=True)
for n in (5, 7): assert pool(torch.ones(1, 2, n, 6)).shape == (1, 2, 0, 3)
area = torchsmith.compile(lambda x: torch.nn.functional.interpolate(x, scale_factor=0.5, mode="area"), dynamic=True)
area(torch.ones(1, 2, 5))
try: area(torch.ones(1, 2, 1))
except RuntimeError: pass
"""


def test_no_call_ends_the_process() -> None:
    done = fresh.run(DIES)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_constants_that_no_word_holds_are_refused() -> None:
    s = Sym("s0", dt.index)
    assert "ts_mulx" in size_text(s * const(2**62))
    for wrong in (const(2**63), const(-(2**63) - 1)):
        with pytest.raises(Unsupported, match="EMI101"):
            size_text(s + wrong)
