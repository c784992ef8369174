"""Run random tensor programs (fuzz_harness.py) compiled, at several sizes in turn, and compare each call with eager.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_sizes.py FIRST LAST STEPS

Sizes that are equal in one call are equal in all, so that operands broadcast as before; 1 is among them. Each wrong seed is one line.
"""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from fuzz_harness import STEPS, program

import torchsmith
from torchsmith.debug.explain import explanation
from torchsmith.events import recording


class Draws:
    """random.Random as plain Python over numbers drawn before, so that a captured program draws the same."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers, self.at = numbers, 0

    def random(self) -> float:
        self.at += 1
        return self.numbers[self.at - 1]

    def randrange(self, n: int) -> int:
        return int(self.random() * n)

    def choice(self, values: Sequence[Any]) -> Any:
        return values[self.randrange(len(values))]


def function(seed: int, steps: int) -> Any:
    """The program of a seed as a function of its tensors."""
    r = random.Random(seed + 1)
    numbers = [r.random() for _ in range(40 * steps)]

    def fn(*given: torch.Tensor) -> list[torch.Tensor]:
        draws: Any = Draws(numbers)
        have = list(given)
        for _ in range(steps):
            made = draws.choice(STEPS)(draws, have)
            if made is not None:
                have.append(made)
        return have[len(given) :] or [given[0] * 2]

    return fn


def resized(args: Sequence[torch.Tensor], r: random.Random, zero: bool) -> list[torch.Tensor]:
    """Tensors of the same ranks and dtypes; each size but 1 becomes another one everywhere."""
    new = {n: 1 if n == 1 else r.choice([0, 1]) if zero else r.choice([1, 2, 3, 4, 5, 6, 7, 9, 13, 16, 17]) for a in args for n in a.shape}
    return [torch.randn([new[n] for n in a.shape]).to(a.dtype) for a in args]


def compare(seed: int, steps: int, calls: int = 4) -> list[str]:
    """Raises when a call differs from eager's; gives the codes of what did not run natively."""
    torchsmith.compiler.reset()
    fn, r = function(seed, steps), random.Random(seed)
    torch.manual_seed(seed)
    first = list(program(seed, steps)[1])
    compiled, codes = torchsmith.compile(fn), []
    for number in range(calls):
        args = first if number == 0 else resized(first, r, zero=number == calls - 1 and seed % 4 == 0)
        before = [a.clone() for a in args]
        try:
            wanted = fn(*args)
        except (RuntimeError, IndexError, ValueError):
            continue  # no program for these sizes
        with recording() as got:
            made = compiled(*args)
        e = explanation(got)
        codes += [f"{x.code} {x.detail[:90]}" for x in (*e.breaks, *e.fallbacks)]
        assert len(made) == len(wanted), (len(made), len(wanted))
        for k, (g, w) in enumerate(zip([*made, *args], [*wanted, *before], strict=True)):
            near = 1.6e-2 if torch.bfloat16 in (w.dtype, *(a.dtype for a in args)) else 2e-4
            at = f"call {number}, result {k}, {[tuple(a.shape) for a in args]}"
            torch.testing.assert_close(g, w, equal_nan=True, rtol=near, atol=near, msg=lambda m, at=at: f"{at}: {m}")  # type: ignore[misc]
    return codes


def main(first: int, last: int, steps: int) -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wrong = 0
    with torch.inference_mode():
        for seed in range(first, last):
            try:
                for code in compare(seed, steps):
                    print(seed, "not native:", code, flush=True)
            except Exception as error:  # whatever is wrong with a seed is its result
                wrong += 1
                at = traceback.extract_tb(error.__traceback__)[-1]
                text = " ".join(str(error).split())[:260]
                print(seed, type(error).__name__, text, f"{at.filename.split('/')[-1]}:{at.lineno}", flush=True)
    print(f"{last - first} programs, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
