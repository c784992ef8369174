"""Run random tensor programs (fuzz_steps.py) through part of the road and compare with eager.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz.py FIRST LAST STEPS [lower | fuse | sched | compile] [dynamic]

"lower", "fuse" and "sched" interpret what that pass made (no C compiler); "compile" runs native code. Each wrong seed is one line.
"""

from __future__ import annotations

import sys
from typing import Any

import fuzz_harness
import fuzz_steps
import numpy as np
import torch
from fuzz_harness import HALF, check, shaken
from graph_harness import graph_of
from lower_harness import call_eager, to_array
from road_harness import compiled

from torchsmith.codes import Unsupported
from torchsmith.ir.interpret import run_program, run_scheduled
from torchsmith.ir.verify import verify_program, verify_scheduled
from torchsmith.lower import lower
from torchsmith.options import Options
from torchsmith.schedule.fusion.fuse import fuse
from torchsmith.schedule.kernels import form_kernels


def run(fn: Any, args: tuple[torch.Tensor, ...], stop: str, dynamic: bool) -> list[Any]:
    """The results of `fn`, computed by what the pass `stop` made."""
    if stop == "compile":
        return list(compiled(fn, args)(*args))
    options = Options()
    fg = graph_of(fn, *args, dynamic=tuple(range(len(args))) if dynamic else ())
    made = lower(fg, options)
    verify_program(made)
    inputs = [to_array(x) for x in (*args, *fg.consts)]
    if stop == "lower":
        return run_program(made, inputs, call_eager)
    made = fuse(made, options)
    verify_program(made)
    if stop == "fuse":
        return run_program(made, inputs, call_eager)
    kernels = form_kernels(made, options)
    verify_scheduled(kernels)
    return run_scheduled(kernels, inputs, call_eager)


def compare(seed: int, steps: int, stop: str, dynamic: bool = False) -> list[str]:
    """Raises when the results differ from eager's; says what was refused."""
    fn, args = fuzz_harness.function(fuzz_steps.STEPS, seed + 1, steps), fuzz_steps.arguments(seed)
    wanted = fn(*[x.clone() for x in args])
    if any(w.numel() > 20000 for w in wanted):
        return []
    try:
        got = run(fn, args, stop, dynamic)
    except Unsupported as why:
        return [f"refused {str(why)[:150]}"]
    tensors = [g if isinstance(g, torch.Tensor) else torch.from_numpy(np.array(g)) for g in got]
    tensors = [g.to(w.dtype) for g, w in zip(tensors, wanted, strict=True)]
    near = 1.6e-2 if HALF & {x.dtype for x in (*args, *wanted)} else 2e-4
    check(tensors, wanted, near, lambda k: fn(*[shaken(x, k) for x in args]), f"{[tuple(x.shape) for x in args]}")
    return []


def main(first: int, last: int, steps: int, stop: str = "sched", dynamic: str = "") -> int:
    return fuzz_harness.run(lambda seed: compare(seed, steps, stop, bool(dynamic)), first, last)


if __name__ == "__main__":
    a = sys.argv
    sys.exit(main(int(a[1]), int(a[2]), int(a[3]), *a[4:]))
