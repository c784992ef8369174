"""Run random tensor programs (fuzz_harness.py) through part of the road and compare with eager.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz.py FIRST LAST STEPS [lower | fuse | sched | compile] [dynamic]

"lower", "fuse" and "sched" interpret what that pass made (no C compiler); "compile" runs native code. Each wrong seed is one line.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any

import numpy as np
import torch
from fuzz_harness import program
from graph_harness import graph_of
from lower_harness import call_eager, to_array
from road_harness import compiled

from torchsmith.codes import Unsupported
from torchsmith.ir.interpret import run_program, run_scheduled
from torchsmith.ir.verify import verify_program, verify_scheduled
from torchsmith.lower import lower
from torchsmith.options import Options
from torchsmith.schedule.fuse import fuse
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


def compare(seed: int, steps: int, stop: str, dynamic: bool = False) -> None:
    """Raises when the results differ from eager's; half precision anywhere in the program loosens the comparison."""
    fn, args = program(seed, steps)
    wanted = fn(*[x.clone() for x in args])
    if any(w.numel() > 20000 for w in wanted):
        return
    got = run(fn, args, stop, dynamic)
    assert len(got) == len(wanted)
    near = 1.6e-2 if any(x.dtype == torch.bfloat16 for x in args) else 2e-4
    for g, w in zip(got, wanted, strict=True):
        actual = g if isinstance(g, torch.Tensor) else torch.from_numpy(np.array(g)).to(w.dtype)
        tolerance = max(near, 1.6e-2 if w.dtype == torch.bfloat16 else 0)
        torch.testing.assert_close(actual, w, equal_nan=True, rtol=tolerance, atol=tolerance)


def main(first: int, last: int, steps: int, stop: str = "sched", dynamic: str = "") -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wrong = 0
    for seed in range(first, last):
        try:
            compare(seed, steps, stop, bool(dynamic))
        except Unsupported as why:
            print(seed, "refused", str(why)[:150])
        except Exception as error:  # whatever is wrong with a seed is its result
            wrong += 1
            at = traceback.extract_tb(error.__traceback__)[-1]
            print(seed, type(error).__name__, " ".join(str(error).split())[:220], f"{at.filename.split('/')[-1]}:{at.lineno}", flush=True)
    print(f"{last - first} programs, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    a = sys.argv
    sys.exit(main(int(a[1]), int(a[2]), int(a[3]), *a[4:]))
