"""The package file: a zip of stored members that PyTorch's loaders and ours both read (no torch).

In: models with their libraries and weights. Out: a .pt2 file, or one model.so with its weights at the end. Layout (format 1):

    <root>/data/aotinductor/<model>/<id>.wrapper.so                 the library, every door
    <root>/data/aotinductor/<model>/<id>.wrapper.cpp                a placeholder that torch 2.11 and 2.12 look for
    <root>/data/aotinductor/<model>/<id>.wrapper_metadata.json
    <root>/data/aotinductor/<model>/<id>.wrapper.weights            starts on a page: mapped from inside the package
    <root>/data/torchsmith/<model>/<n>.<cpu>.so                     other processors' libraries; they share the weights ...
    <root>/data/torchsmith/<model>/<n>.<cpu>.weights                ... unless theirs are packed for other vectors (format 2)
    <root>/extra/torchsmith.json                                    format version, digests
    <root>/archive_format, archive_version, byteorder, .data/version, .data/serialization_id
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from .. import __version__
from ..codes import Unsupported, define
from ..runtime.files import replace_file
from .weights import PAGE, StoredWeights, Weights, align

define("AOT030", "a package cannot be written", "see the detail")
define("AOT031", "a file is not a package of torchsmith", "make it with torchsmith.aot")
define("AOT032", "a package is damaged", "copy it again, or make it anew")
define("AOT033", "a package was made by a newer torchsmith", "install that version, or make the package anew")

FORMAT = 2  # the newest that is read; a package says the oldest that has all it uses
TAIL_MAGIC = b"TSMODEL1"
TAIL = struct.Struct("<QQQII8s")  # aot/model.h: ts_tail
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One model as it goes into a package: libraries (the first one for PyTorch's loaders, the rest best first), weights."""

    libraries: tuple[tuple[str, bytes], ...]  # (cpu target, content)
    weights: Weights | StoredWeights
    own: Mapping[str, Weights] = field(default_factory=dict)  # cpu target -> weights that only its library reads
    cpu: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)  # the user's
    archs: tuple[int, ...] = ()  # compute capabilities that there is code for; (): it runs on the processor


def metadata(cpu: Sequence[str], archs: Sequence[int] = ()) -> dict[str, str]:
    """What PyTorch's loaders read. They compare the ISA text with their own and warn; our library checks for itself."""
    isa = "AVX512" if "avx512f" in cpu else "AVX2" if "avx2" in cpu else ""
    if isa == "AVX512" and "avx512_vnni" in cpu:
        isa = "AVX512 AVX512_VNNI" + " AMX_TILE" * ("amx_tile" in cpu)
    return {
        "AOTI_DEVICE_KEY": "cuda" if archs else "cpu", "AOTI_PLATFORM": "linux",
        "AOTI_MACHINE": platform.machine() or "x86_64", "AOTI_CPU_ISA": isa,
        "AOTI_COMPUTE_CAPABILITY": str(max(archs)) if archs else "",
    }  # fmt: skip


def write_package(path: str | os.PathLike[str], models: Mapping[str, Part]) -> str:
    """One file for all models."""
    target = Path(path)
    _check_names(models)

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as z:
            _Writer(z, file, target.name.removesuffix(".pt2") or "model").write(models)

    _replace_file(target, write, 0o666)
    return str(target)


def _replace_file(target: Path, write: Callable[[BinaryIO], object], mode: int) -> None:
    """AOT030 where it cannot be written."""
    try:
        replace_file(target, write, mode)
    except OSError as e:
        raise Unsupported("AOT030", detail=str(e)) from e


def _check_names(models: Iterable[str]) -> None:
    for name in models:
        if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
            raise Unsupported("AOT030", detail=f"{name!r} is no name for a model: letters, digits and ._- only")


class _Writer:
    def __init__(self, z: zipfile.ZipFile, file: Any, root: str) -> None:
        self.z, self.file, self.root = z, file, root
        self.digests: dict[str, str] = {}

    def member(self, name: str, chunks: Iterable[bytes | memoryview], to: int = 64) -> None:
        """A stored member whose data starts at a multiple of `to`."""
        info = zipfile.ZipInfo(f"{self.root}/{name}", EPOCH)
        info.external_attr = 0o644 << 16
        zip64 = 20  # bytes that the local header needs for sizes beyond 4 GB
        start = self.file.tell() + 30 + len(info.filename.encode()) + zip64 + 4
        pad = align(start, to) - start
        info.extra = struct.pack("<HH", 0x4246, pad) + bytes(pad)
        h = hashlib.sha256()
        with self.z.open(info, "w", force_zip64=True) as f:
            for chunk in chunks:
                h.update(chunk)
                f.write(chunk)
        self.digests[name] = h.hexdigest()

    def text(self, name: str, content: str) -> None:
        self.member(name, [content.encode()])

    def write(self, models: Mapping[str, Part]) -> None:
        self.text("archive_format", "pt2")
        self.text("archive_version", "0")
        self.text("byteorder", "little")
        self.text(".data/version", "6\n")
        rows: dict[str, Any] = {}
        # PyTorch 2.11 and 2.12 take the last library whose path starts with the wanted name: the longer names come first
        for name, part in sorted(models.items(), key=lambda kv: -len(kv[0])):
            rows[name] = self.model(name, part)
        version = FORMAT if any(p.own for p in models.values()) else 1
        described = {"format": version, "torchsmith": __version__, "models": rows, "sha256": self.digests}
        self.text("extra/torchsmith.json", json.dumps(described, indent=1, sort_keys=True))
        self.text(".data/serialization_id", str(int(hashlib.sha256(repr(self.digests).encode()).hexdigest(), 16))[:40])

    def model(self, name: str, part: Part) -> dict[str, Any]:
        (_, main), *others = part.libraries
        stem = f"data/aotinductor/{name}/{hashlib.sha256(main).hexdigest()[:24]}.wrapper"
        self.member(f"{stem}.so", [main])
        self.text(f"{stem}.cpp", "// The model is compiled: this file is a placeholder that some loaders look for.\n")
        self.text(f"{stem}_metadata.json", json.dumps(dict(part.metadata) | metadata(part.cpu, part.archs)))
        row: dict[str, Any] = {"library": f"{stem}.so", "cpu": part.libraries[0][0], **part.extra}
        if part.weights.size:
            self.member(f"{stem}.weights", part.weights.chunks(), PAGE)
            row["weights"] = f"{stem}.weights"
        row["variants"] = []
        for i, (cpu, library) in enumerate(others):
            stem = f"data/torchsmith/{name}/{i}.{''.join(c if c.isalnum() or c in '-_' else '_' for c in cpu)}"
            self.member(f"{stem}.so", [library])
            variant = {"library": f"{stem}.so", "cpu": cpu}
            if cpu in part.own:
                self.member(f"{stem}.weights", part.own[cpu].chunks(), PAGE)
                variant["weights"] = f"{stem}.weights"
            row["variants"].append(variant)
        return row


def write_library(path: str | os.PathLike[str], part: Part) -> str:
    """One model.so with its weights behind the code, mapped from there."""
    target = Path(path)
    library = part.libraries[0][1]
    start = align(len(library), 64 if part.weights.size < PAGE else PAGE)
    tail = TAIL.pack(len(library), start, part.weights.size, zlib.crc32(library), 0, TAIL_MAGIC)

    def write(f: BinaryIO) -> None:
        f.write(library)
        if part.weights.size:
            f.write(bytes(start - len(library)))
            f.writelines(part.weights.chunks())
        f.write(tail)

    _replace_file(target, write, 0o777)
    return str(target)


def read_library(path: str | os.PathLike[str]) -> Part:
    """A library that write_library wrote, as a part of a package."""
    with open(path, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - TAIL.size))
        tail = read_tail(f.read())
        if tail is None or tail[0] > size or tail[1] + tail[2] > size:
            raise Unsupported("AOT031", detail=f"{path} is truncated, or no model library")
        code, start, length, crc = tail
        f.seek(0)
        content = f.read(code)
    if zlib.crc32(content) != crc:
        raise Unsupported("AOT032", detail=f"{path}: its code has another checksum")
    said = re.search(rb'"cuda_archs": \[([0-9, ]+)\]', content)  # in the text that describes the model
    archs = tuple(int(a) for a in said[1].split(b",")) if said else ()
    return Part((("native", content),), StoredWeights(str(path), start, length), archs=archs)


def read_tail(content: bytes) -> tuple[int, int, int, int] | None:
    """code size, weights offset, weights size, crc of a library's last bytes; None where there are none."""
    if len(content) < TAIL.size:
        return None
    code, start, size, crc, _, magic = TAIL.unpack(content[-TAIL.size :])
    return (code, start, size, crc) if magic == TAIL_MAGIC else None
