"""How a Kernel is printed, by language.

In: a Kernel. Out: its text.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ir.kernel import Kernel
from ..ir.target import Language
from .c import emit_kernel
from .triton import print_triton

PRINTERS: dict[Language, Callable[[Kernel], str]] = {"c": emit_kernel, "triton": print_triton}


def print_kernel(kernel: Kernel) -> str:
    """The text of `kernel` in its target's language."""
    return PRINTERS[kernel.target.language](kernel)
