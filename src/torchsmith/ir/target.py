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
class Vectors:
    """The vector unit of a processor. A kernel's layouts follow `bytes`, its register tiles `registers`; the rest are choices of speed."""

    bytes: int = 64  # of one register
    registers: int = 32
    masks: bool = True  # are loads and stores of a part of a register one instruction?
    pairs: bool = True  # are bfloat16 products of pairs worth layouts of their own?

    def lanes(self, itemsize: int = 4) -> int:
        """Elements of `itemsize` bytes in one register."""
        return self.bytes // itemsize


@dataclass(frozen=True, slots=True)
class Caches:
    """Of one core, in bytes."""

    near: int = 256 << 10  # of a packed operand that surely stay in the second level
    rows: int = 1 << 20  # of left-hand rows that stay there beside a tile of the packed operand
    line: int = 64
    turn: int = 4096  # after so many bytes the first level takes its sets in turn again
    ways: int = 8  # lines that a set of the first level holds


@dataclass(frozen=True, slots=True)
class Target:
    """`device`: torch's word for the device type. `arch`: the version of its instructions (90: sm_90), 0 where the compiler is asked."""

    name: str
    language: Language
    device: str
    arch: int = 0
    weights: Weights = Weights()
    vectors: Vectors = Vectors()
    caches: Caches = Caches()


CPU = Target("cpu", "c", "cpu")  # AVX-512
AVX2 = Target("cpu:avx2", "c", "cpu", vectors=Vectors(32, 16, masks=False, pairs=False))
PLAIN = Target("cpu:plain", "c", "cpu", vectors=Vectors(16, 16, masks=False, pairs=False))  # 16-byte vectors, as every x86-64 has
# Processors, best first: the row, and the features it needs (as runtime/toolchain.py names them).
CPUS: tuple[tuple[Target, frozenset[str]], ...] = (
    (CPU, frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})), (AVX2, frozenset({"avx2", "fma"})), (PLAIN, frozenset()),
)  # fmt: skip


def cpu_with(features: frozenset[str]) -> Target:
    """The best row that a processor with these features can run."""
    return next(t for t, needs in CPUS if needs <= features)

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
    known = {t.name: t for t, _ in CPUS}
    if name in known:
        return known[name]
    device, _, arch = name.partition(":sm_")
    if device != "cuda" or not arch.isdigit():
        raise ValueError(f"unknown target {name!r}")
    return cuda(int(arch))
