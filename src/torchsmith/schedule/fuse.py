"""Vertical fusion: a producer's value takes the place of its consumers' loads; dead stages and buffers go.

In: a Program. Out: a Program with fewer stages.
"""

from __future__ import annotations

from ..ir.program import Program
from ..options import Options


def fuse(program: Program, options: Options) -> Program:
    """Inline producers into consumers."""
    return program
