"""The weights of a model as they lie in a file: header, what prepare computed, constants that are read as they are (aot/model.h).

In: blocks with their offsets. Out: chunks of bytes, in order, without holding all of them at once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAGIC = b"TSWEIGHT"
VERSION = 1
PAGE = 4096


def align(offset: int, to: int) -> int:
    return -(-offset // to) * to


@dataclass(frozen=True, slots=True)
class Block:
    """One tensor's memory at an offset; `value` is dense or strided memory that belongs to a torch tensor."""

    offset: int
    value: Any

    def content(self) -> memoryview:
        """The memory itself, not a copy (ctypes.string_at would keep 32 bits of the size only)."""
        t = self.value
        if t.numel() == 0:
            return memoryview(b"")
        size = (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()
        return memoryview((ctypes.c_char * size).from_address(t.data_ptr())).cast("B")


@dataclass(frozen=True, slots=True)
class Weights:
    """What one model library maps."""

    id: bytes
    size: int
    state_offset: int
    state_bytes: int
    state: bytes
    blocks: tuple[Block, ...]

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file's content, from header to end."""
        if not self.size:
            return
        yield MAGIC + struct.pack("<IIQ16s24x", VERSION, 0, self.size, self.id)
        at = 64
        rows: list[tuple[int, Callable[[], bytes | memoryview]]] = [(b.offset, b.content) for b in self.blocks]
        if self.state_bytes:
            rows.append((self.state_offset, lambda: self.state))
        for offset, content in sorted(rows, key=lambda r: r[0]):
            yield bytes(offset - at)
            data = content()
            yield data
            at = offset + len(data)
        yield bytes(self.size - at)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights that lie in a file already."""

    path: str
    offset: int
    size: int

    def chunks(self) -> Iterator[bytes]:
        with open(self.path, "rb") as f:
            f.seek(self.offset)
            left = self.size
            while left > 0:
                data = f.read(min(left, 1 << 24))
                if not data:
                    raise OSError(f"{self.path} is truncated")
                left -= len(data)
                yield data
