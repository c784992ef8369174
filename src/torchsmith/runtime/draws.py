"""Generators of random numbers: where they stand, and how a compiled graph takes numbers from a GPU's, by an own call of the host program.

In: by how much the graph's random operators move the counter. Out: where seed and counter stand, in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

TAKE = "torchsmith.take_draws.default"
STEP = 4  # what one turn of Philox counts in a generator's offset


def generator_of(device: torch.device) -> Any:
    """The default generator of a device."""
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def take_draws(steps: int, device: torch.device, aligned: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and counter as int64, and the generator moves on. aligned: what eager's kernels look at the address of; the host has done that
    (emit/host.py, ADDRESSED). Raises RuntimeError while a stream is captured: the call is then repeated eagerly."""
    generator = generator_of(device)
    offset, seed = generator.get_offset(), generator.initial_seed()
    generator.set_offset(offset + STEP * steps)
    numbers = seed - (1 << 64) if seed >> 63 else seed, offset // STEP
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").unbind()  # type: ignore[return-value]


def generator_states() -> list[tuple[Any, torch.Tensor]]:
    """The generators of the processor and of this process's GPUs, and where they stand. A stream that is captured hides those of GPUs."""
    found: list[Any] = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        found += torch.cuda.default_generators
    return [(g, g.get_state()) for g in found]


def put_back(states: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """The generators stand where they stood."""
    for generator, state in states:
        generator.set_state(state)


# Calls of the host program that are no operators of torch.
OWN: dict[str, Callable[..., Any]] = {TAKE: take_draws}
