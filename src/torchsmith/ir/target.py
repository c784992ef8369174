"""Target: the machine that a Program is compiled for, as one row (no torch).

In: nothing. Out: CPU, cuda(arch), and what keys the tables by which rooms pick their part: `language` for FORMERS (schedule), PRINTERS
(emit) and COMPILERS (runtime), `device` for memory and library calls. A further device is a further row, not a further road.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Language = Literal["c", "triton"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of speed that the schedule reads; none of them changes what a kernel means."""

    processors: int = 1  # units that run blocks of a grid side by side
    threads: int = 1  # of one unit, when it is full
    registers: int = 0  # elements of 4 bytes that one block may hold in a row before it is walked in steps


@dataclass(frozen=True, slots=True)
class Target:
    """`device`: torch's word for the device type. `arch`: the version of its instructions (90: sm_90), 0 where the compiler is asked."""

    name: str
    language: Language
    device: str
    arch: int = 0
    weights: Weights = Weights()


CPU = Target("cpu", "c", "cpu")

# multiprocessors of the largest common chip of an architecture; occupancy is a hint, so a smaller chip is not wrong
PROCESSORS = {70: 80, 75: 68, 80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}
LEAST_ARCH = 80  # bfloat16 arithmetic and asynchronous copies
DEFAULT_ARCH = 90  # where no device is there to ask


def cuda(arch: int = DEFAULT_ARCH) -> Target:
    """An NVIDIA GPU of compute capability `arch` (80, 90, ...)."""
    known = max((a for a in PROCESSORS if a <= arch), default=LEAST_ARCH)
    return Target(f"cuda:sm_{arch}", "triton", "cuda", arch, Weights(PROCESSORS[known], 2048, 16384))


def target_named(name: str) -> Target:
    """The row that printed texts call `name`."""
    if name == CPU.name:
        return CPU
    device, _, arch = name.partition(":sm_")
    if device != "cuda" or not arch.isdigit():
        raise ValueError(f"unknown target {name!r}")
    return cuda(int(arch))
