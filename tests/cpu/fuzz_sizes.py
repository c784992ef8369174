"""Run random tensor programs (fuzz_steps.py) compiled, at several sizes in turn, and compare each call with eager.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_sizes.py FIRST LAST STEPS

Sizes that are equal in one call are equal in all, so that operands broadcast as before; 1 is among them. Each wrong seed is one line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import fuzz_harness
import fuzz_steps
import torch
from fuzz_harness import DEVICE, HALF, Draw, check, function, shaken

import torchsmith
from torchsmith.debug.explain import explanation
from torchsmith.events import recording


def resized(args: Sequence[torch.Tensor], r: Draw, zero: bool) -> list[torch.Tensor]:
    """Tensors of the same ranks and dtypes; each size but 1 becomes another one everywhere."""
    sizes = sorted({n for a in args for n in a.shape})
    new = {n: 1 if n == 1 else r.choice([0, 1]) if zero else r.choice([1, 2, 3, 4, 5, 6, 7, 9, 13, 16, 17]) for n in sizes}
    return [torch.randn([new[n] for n in a.shape]).to(a) for a in args]


def compare(seed: int, steps: int, calls: int = 5) -> list[str]:
    """Raises when a call differs from eager's; gives the codes of what did not run natively. Empty tensors come last, or in between."""
    torchsmith.compiler.reset()
    fn, r = function(fuzz_steps.STEPS, seed + 1, steps), Draw(seed)
    torch.manual_seed(seed)
    first = [a.to(DEVICE) for a in fuzz_steps.arguments(seed)]
    compiled, codes = torchsmith.compile(fn), []
    for number in range(calls):
        args = first if number == 0 else resized(first, r, zero=seed % 4 == 0 and number == 2 + seed // 4 % 3)
        before = [a.clone() for a in args]
        try:
            wanted = fn(*args)
        except (RuntimeError, IndexError, ValueError):
            continue  # no program for these sizes
        with recording() as got:
            made = compiled(*args)
        e = explanation(got)
        codes += [f"not native: {x.code} {x.detail[:90]}" for x in (*e.breaks, *e.fallbacks)]
        near = 1.6e-2 if HALF & {x.dtype for x in (*args, *wanted)} else 2e-4
        about = f"call {number}, {[tuple(a.shape) for a in args]}"
        check([*made, *args], [*wanted, *before], near, lambda k, args=args: _again(fn, args, k), about)
    return codes


def _again(fn: Callable[..., Sequence[torch.Tensor]], args: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    given = [shaken(a, seed) for a in args]
    return [*fn(*given), *args]


def main(first: int, last: int, steps: int) -> int:
    with torch.inference_mode():
        return fuzz_harness.run(lambda seed: compare(seed, steps), first, last)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
