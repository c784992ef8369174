"""The Triton texts of compiled graphs, run by Triton's interpreter on what the graphs are called with, beside what they give.

For processes whose tensors are the processor's and count as a GPU's (architectures.py --device fake): what their kernels do as C, their
texts do too. Slow: for small models. TRITON_INTERPRET=1 must be set before triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

CLOSE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest value; else CLOSEST
CLOSEST = 1e-3
Former = Callable[[Any, Any, Any], Any]


def watch(stack: ExitStack, formed: list[Any]) -> list[str]:
    """From here on each call of a graph is checked, whose Scheduled is what compiling it appends to `formed`; gives what is wrong."""
    from lower_harness import to_array
    from triton_harness import run_triton

    from torchsmith import pipeline
    from torchsmith.emit.printers import PRINTERS
    from torchsmith.emit.triton import print_triton

    wrong: list[str] = []
    load = pipeline.compile_and_load

    def compile_and_load(fg: Any, options: Any, name: str, inputs: Any, **how: Any) -> Any:
        del formed[:]
        call, *rest = load(fg, options, name, inputs, **how)
        if not formed:  # it was cached
            return call, *rest
        scheduled = formed[-1]

        def checked(*args: Any) -> Any:
            given = [to_array(a.detach().clone()) for a in (*args, *fg.consts)]
            results = call(*args)
            try:
                with patch.dict(PRINTERS, {"triton": print_triton}):
                    own = run_triton(scheduled, given)
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                return results
            for k, (a, b) in enumerate(zip(own, results, strict=False)):
                if isinstance(b, torch.Tensor) and (apart := _apart(torch.from_numpy(a), b.detach())):
                    wrong.append(f"{name}, result {k}: {apart}")
            return results

        return checked, *rest

    stack.enter_context(patch.object(pipeline, "compile_and_load", compile_and_load))
    return wrong


def _apart(a: torch.Tensor, b: torch.Tensor) -> str:
    from doubles import gap, size_of

    far, size = gap(a.reshape(b.shape), b), size_of(b)
    return f"{far:.3g} of {size:.3g}" if far > CLOSE.get(b.dtype, CLOSEST) * max(size, 1e-3) else ""
