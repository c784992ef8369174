"""What the fuzzers share: random numbers that can be captured, the loop that draws a program's steps, the comparison, and the command line.

A step is a function (draw, the tensors so far) -> another tensor, or None where it does not apply. A vocabulary is a list of steps.
"""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
DEVICE = os.environ.get("TORCHSMITH_FUZZ_DEVICE", "cpu")  # where the programs' tensors live
_MADE = re.compile(r"torch\.(tensor|zeros|ones)\(((?:[^()]|\([^()]*\))*)\)")


def placed(text: str) -> str:
    """A program's text with the tensors that it makes on DEVICE."""
    if DEVICE == "cpu":
        return text
    text = _MADE.sub(rf"torch.\1(\2, device={DEVICE!r})", text)
    return text.replace(".numpy()", ".cpu().numpy()").replace("torch.from_numpy(", f"torch.asarray(device={DEVICE!r}, obj=")


class Draw:
    """Random numbers in Python that can be captured."""

    def __init__(self, seed: int) -> None:
        self.state = (seed * 7919 + 12345) % 2147483647 or 1

    def random(self) -> float:
        self.state = self.state * 48271 % 2147483647
        return self.state / 2147483647

    def randrange(self, *bounds: int) -> int:
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        return low + int(self.random() * (high - low))

    def choice(self, values: Any) -> Any:
        return values[self.randrange(len(values))]


Step = Callable[[Draw, list[torch.Tensor]], torch.Tensor | None]


def pick(r: Draw, have: Tensors, wanted: Callable[[torch.Tensor], bool] = lambda t: True) -> torch.Tensor | None:
    """One of `have`, the late ones oftener."""
    good = [t for t in have if wanted(t)]
    return r.choice(good[-4:] if r.random() < 0.6 else good) if good else None


def function(steps: Sequence[Step], seed: int, count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A program of `count` steps: it draws the same ones each time it runs, whatever the sizes, and returns some of what it has."""

    def fn(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        r = Draw(seed)
        have = list(given)
        for _ in range(count):
            made = r.choice(steps)(r, have)
            if made is not None:
                have.append(made)
        made = have[len(given) :]
        return tuple(t for t in have if r.random() < 0.4) or tuple(made[-1:]) or (given[0] * 2,)

    return fn


NEAR = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
HALF = frozenset(NEAR)


def shaken(x: torch.Tensor, seed: int, way: torch.dtype = torch.float32) -> torch.Tensor:
    """`x` with every float moved by about its last digit, its layout kept. way: the shortest floats that it is rounded to on its way."""
    if not x.dtype.is_floating_point:
        return x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x.device)
    step = max([1e-6, *(torch.finfo(d).eps for d in (x.dtype, way) if d in HALF)])
    return torch.empty_like(x).copy_((x.double() * (1 + step * noise)).to(x.dtype))


def check(got: Tensors, want: Tensors, near: float, again: Callable[[int], Tensors], about: str) -> None:
    """Raises where `got` and `want` differ by more than `near` of the largest value and more than eager itself does when its inputs are
    shaken: again(seed) gives what eager makes of shaken inputs. A value that was rounded may lie on the other side of a threshold."""
    assert len(got) == len(want), (len(got), len(want))
    assert [g.device for g in got] == [w.device for w in want], ([g.device for g in got], [w.device for w in want])
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), f"{about}, tensor {k}: {g.dtype} {tuple(g.shape)}, not {w.dtype} {tuple(w.shape)}"
        if torch.allclose(g.double(), w.double(), rtol=near, atol=near, equal_nan=True):
            continue
        others = [again(seed)[k].double() for seed in range(8)]
        a, b = g.double(), w.double()
        spread = torch.stack([(o - b).abs() for o in others]).amax(0)
        largest = 1 + torch.where(b.isfinite(), b.abs(), 0).max()
        is_near = ((a - b).abs() <= near * largest + 10 * spread) | (a == b) | (a.isnan() & b.isnan())
        steady = torch.stack([(o.isfinite() == b.isfinite()) for o in others]).all(0)  # inf and NaN move too
        assert bool((is_near | ~steady).all()), f"{about}, tensor {k}: {_worst(a, b, ~(is_near | ~steady))}"


def _worst(a: torch.Tensor, b: torch.Tensor, wrong: torch.Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} elements of {tuple(a.shape)} differ, at {at} {float(a[at]):.6g}, not {float(b[at]):.6g}"


def shared(tensors: Tensors) -> list[int]:
    """For each tensor the first one that lies in the same storage."""
    homes = [t.untyped_storage()._cdata if t.numel() else -k for k, t in enumerate(tensors)]
    return [homes.index(h) for h in homes]


def run(compare: Callable[[int], Sequence[str]], first: int, last: int) -> int:
    """Each wrong seed is a line, and each thing that compare(seed) says; the exit status."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    wrong = 0
    for seed in range(first, last):
        try:
            for line in compare(seed):
                print(seed, line, flush=True)
        except Exception as error:  # whatever is wrong with a seed is its result
            wrong += 1
            at = traceback.extract_tb(error.__traceback__)[-1]
            print(seed, type(error).__name__, " ".join(str(error).split())[:260], f"{at.filename.split('/')[-1]}:{at.lineno}", flush=True)
    print(f"{last - first} programs, {wrong} wrong")
    return int(wrong > 0)
