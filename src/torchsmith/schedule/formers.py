"""How Stages become Kernels, by the language that the kernels will be printed in.

In: a Program after fusion, its target. Out: Scheduled.
"""

from __future__ import annotations

from collections.abc import Callable

from ..codes import Unsupported
from ..ir.kernel import Scheduled
from ..ir.program import Program
from ..ir.target import Language
from ..options import Options
from .blocks import form_blocks
from .kernels import NOTHING, Decisions, Ready, form_kernels, nobody

Former = Callable[[Program, Options, Decisions, Ready], Scheduled]
FORMERS: dict[Language, Former] = {"c": form_kernels, "triton": form_blocks}


def form(program: Program, options: Options, decided: Decisions = NOTHING, ready: Ready = nobody) -> Scheduled:
    """The former of the program's target. `decided`, `ready`: see form_kernels."""
    former = FORMERS.get(program.target.language)
    if former is None:
        raise Unsupported("LOW005", detail=program.device)
    return former(program, options, decided, ready)
