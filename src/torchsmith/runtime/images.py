"""Machine code for a device inside a library: one object file with all kernels of a graph, for every architecture that is wanted.

In: kernel texts by name, architectures. Out: an object that exports a `ts_device_kernel` (csrc/torchsmith.h) under each kernel's name.
The code lies in one file that the assembler includes whole: hundreds of kernels cost as much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..codes import Unsupported, define
from ..ir.target import Language
from ..options import Options
from .toolchain import HOST_FLAGS, Toolchain, run_compiler

define("RUN011", "a kernel needs device memory of its own, which the host does not give yet", "please report it with the program")

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Image:
    """One kernel for one architecture. `symbol`: its name in `data`; `warps` of 32 threads, `shared` bytes of a block; `ptx`: its text;
    `waits`: it begins with a wait for the kernels before it."""

    data: bytes
    symbol: str
    warps: int
    shared: int
    scratch: int = 0
    ptx: bytes = b""
    waits: bool = False


ImageCompiler = Callable[[Sequence[str], int, Options], tuple[Image, ...]]
IMAGE_COMPILERS: dict[Language, ImageCompiler] = {}  # texts, architecture, options -> an image for each text
# Makes ready what can be while the texts are being written; gives what takes each of them, with its architecture, once it is known.
IMAGE_STARTERS: dict[Language, Callable[[Options], Callable[[str, int], None]]] = {}

# The structures of csrc/torchsmith.h; a test holds them equal.
STRUCTURES = """\
typedef __INT64_TYPE__ int64_t; typedef __INT32_TYPE__ int32_t;
typedef struct ts_image {
  int32_t arch, is_text, threads, shared, waits;
  const char *data;
  int64_t size;
} ts_image;
typedef struct ts_device_kernel {
  const char *name, *symbol;
  const ts_image *images;
  int32_t n_images;
} ts_device_kernel;
"""


def image_object(
    tools: Toolchain, kernels: Mapping[str, str], language: Language, archs: Sequence[int], with_text: bool, options: Options, work: Path,
    out: Path,
) -> None:  # fmt: skip
    """Compile `kernels` (name -> text) for each of `archs` into the object `out`.

    `with_text`: also carry the text for the least of them, which the driver compiles for later ones. Raises Unsupported as compilers do.
    """
    made = {arch: IMAGE_COMPILERS[language](tuple(kernels.values()), arch, options) for arch in archs}
    blob = bytearray()
    rows: dict[str, list[str]] = {name: [] for name in kernels}
    symbols: dict[str, str] = {}

    def place(name: str, image: Image, arch: int, data: bytes, is_text: bool) -> None:
        if image.scratch:
            raise Unsupported("RUN011", detail=name)
        how = f"{arch}, {int(is_text)}, {32 * image.warps}, {image.shared}, {int(image.waits)}"
        rows[name].append(f"{{{how}, ts_images_start + {len(blob)}, {len(data)}}}")
        symbols[name] = image.symbol
        blob.extend(data)
        blob.extend(bytes(-len(blob) % ALIGN))

    for arch in archs:
        for name, image in zip(kernels, made[arch], strict=True):
            place(name, image, arch, image.data, False)
            if with_text and arch == min(archs) and image.ptx:
                place(name, image, arch, image.ptx.rstrip(b"\0") + b"\0", True)
    (work / "images.bin").write_bytes(bytes(blob))
    source = work / "images.c"
    source.write_text(images_text(rows, symbols, work / "images.bin"), encoding="utf-8", errors="surrogateescape")
    run_compiler(tools, [*HOST_FLAGS, "-c", str(source), "-o", str(out)], work, "images")


def images_text(rows: Mapping[str, Sequence[str]], symbols: Mapping[str, str], blob: Path) -> str:
    """The table in C, over the bytes of `blob`."""
    where = str(blob).replace("\\", "\\\\\\\\").replace('"', '\\\\\\"')
    lines = [
        STRUCTURES,
        f'__asm__(".section .rodata\\n.balign {ALIGN}\\nts_images_start:\\n.incbin \\"{where}\\"\\n.byte 0\\n.previous\\n");',
        'extern __attribute__((visibility("hidden"))) const char ts_images_start[];',
    ]
    for name, images in rows.items():
        lines.append(f"static const ts_image images_{name}[] = {{{', '.join(images)}}};")
        lines.append(f'__attribute__((visibility("hidden"))) const ts_device_kernel {name} = '
                     f'{{"{name}", "{symbols[name]}", images_{name}, {len(images)}}};')  # fmt: skip
    return "\n".join((*lines, ""))
