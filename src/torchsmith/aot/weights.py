"""The weights of a model as they lie in a file: header, what prepare computed, constants that are read as they are (aot/model.h).

In: blocks with their offsets. Out: chunks of bytes, in order, without holding all of them at once.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAGIC = b"TSWEIGHT"
VERSION = 1
HEADER = struct.Struct("<8sIIQ16sII16x")  # aot/model.h: ts_weights_header
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
        """The file's content, from header to end. The header holds a checksum of the rest, so weights are read twice."""
        if not self.size:
            return
        crc = 0
        for chunk in self._behind_header():
            crc = zlib.crc32(chunk, crc)
        yield HEADER.pack(MAGIC, VERSION, 0, self.size, self.id, 1, crc)
        yield from self._behind_header()

    def _behind_header(self) -> Iterator[bytes | memoryview]:
        at = HEADER.size
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


def verify_weights(path: str) -> str:
    """What is wrong with the weights that lie in a file; "" where their checksum is right, or where they have none."""
    with open(path, "rb") as f:
        head = f.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            return f"{path} holds no weights"
        _, version, _, whole, _, has_crc, want = HEADER.unpack(head)
        if version != VERSION:
            return f"{path}: weights of another format"
        left, crc = whole - HEADER.size, 0
        while left > 0:
            chunk = f.read(min(left, 1 << 24))
            if not chunk:
                return f"{path} is truncated"
            left, crc = left - len(chunk), zlib.crc32(chunk, crc)
    return f"{path} is damaged: its weights have another checksum" if has_crc and crc != want else ""
