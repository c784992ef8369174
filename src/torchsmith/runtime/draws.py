"""Generators of random numbers: where they stand, and how a compiled graph on a GPU takes numbers from them, by own calls of the host
program.

In: by how much the graph's random operators move the GPU's counter. Out: where seed and counter stand, in the host's memory. Operators that
draw for tensors in the host's memory use the processor's generator there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

TAKE = "torchsmith.take_draws.default"
ON_HOST = "torchsmith.draw_on_host.default"
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


def draw_on_host(op: Callable[..., Any], device: torch.device, names: str, *args: Any) -> Any:
    """What the random operator `op` draws with the processor's generator, on the device where the graph runs, whose memory its tensors lie
    in. names: of those last arguments that are given by name, with commas between."""
    keys = names.split(",") if names else []
    there = tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
    first = len(there) - len(keys)
    out = op(*there[:first], **dict(zip(keys, there[first:], strict=True)))
    return tree_map_only(torch.Tensor, lambda t: t.to(device), out)


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
OWN: dict[str, Callable[..., Any]] = {TAKE: take_draws, ON_HOST: draw_on_host}
