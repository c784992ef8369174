"""The one table of reason codes: graph breaks, fallbacks and refusals, each with an explanation and a hint.

Rooms: CAP capture, GRA graph, AUT autograd, LOW lower, SCH schedule, EMI emit, RUN runtime, API front door, AOT ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """One reason: `explanation` says what happened, `hint` what the user can do next."""

    code: str
    explanation: str
    hint: str


CODES: dict[str, Code] = {}


def define(code: str, explanation: str, hint: str) -> None:
    """Add a row; a code is defined once."""
    if code in CODES:
        raise ValueError(f"{code} is defined twice")
    CODES[code] = Code(code, explanation, hint)


class Unsupported(Exception):
    """A thing torchsmith cannot do (yet) at a place in the user's program.

    code: a key of CODES; at: the user's "file:line"; detail: what exactly was met.
    """

    def __init__(self, code: str, *, at: str = "", detail: str = "") -> None:
        row = CODES[code]
        super().__init__(code, at, detail)
        self.code, self.at, self.detail, self.hint = code, at, detail, row.hint

    def __str__(self) -> str:
        row = CODES[self.code]
        where = f"{self.at}: " if self.at else ""
        what = f" ({self.detail})" if self.detail else ""
        return f"{where}[{self.code}] {row.explanation}{what}. {row.hint}"


# ---------------------------------------------------------------- autograd
define("AUT001", "gradients are needed, so the captured graph runs once under eager autograd",
       "call under torch.no_grad() or torch.inference_mode() for compiled inference")

# ---------------------------------------------------------------- lower
define("LOW001", "a tensor has a dtype that torchsmith does not compute on, so the graph runs eagerly",
       "keep complex, quantised and 16- to 64-bit unsigned tensors out of the compiled function")
define("LOW002", "the functional graph holds an attribute instead of an input", "report this: capture should make every tensor an input")
define("LOW003", "an operator cannot be called from compiled code", "call it outside of the compiled function")
define("LOW004", "the results alias each other in a way that cannot be expressed", "return a clone of one of them")
