"""CPU tensors that count as CUDA tensors: the road of a GPU, compile to replay, on a machine without one.

The driver is fake_cuda.c, loaded under the real one's name; a kernel's "machine code" is a shared object made from the same Kernel printed
as C. Only rows of tables are replaced: which target a device has, how kernels are formed and printed, what compiles their texts.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from torchsmith import pipeline
from torchsmith.emit.c import emit_kernel
from torchsmith.emit.host import c_name, size_text
from torchsmith.emit.host_abi import NUMBERS
from torchsmith.emit.printers import PRINTERS
from torchsmith.ir.kernel import Kernel, Scheduled
from torchsmith.ir.program import Cond, Repeat
from torchsmith.ir.target import CPU, cuda
from torchsmith.lower.devices import TARGETS
from torchsmith.options import Options
from torchsmith.runtime import draws, host_torch
from torchsmith.runtime.externs_torch import bind
from torchsmith.runtime.images import IMAGE_COMPILERS, IMAGE_STARTERS, Image
from torchsmith.runtime.toolchain import toolchain
from torchsmith.schedule.formers import FORMERS
from torchsmith.schedule.kernels import form_kernels

FAKE = Path(__file__).with_name("fake_cuda.c")
_KEEP = TemporaryDirectory(prefix="torchsmith-fake-cuda-")


@functools.cache
def driver() -> ctypes.CDLL:
    """The fake driver, found by whoever asks for libcuda.so.1 from now on."""
    out = Path(_KEEP.name) / "libcuda.so.1"
    flags = ["-O1", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *flags, str(FAKE), "-o", str(out)], check=True)
    fake = ctypes.CDLL(str(out), mode=ctypes.RTLD_GLOBAL)
    fake.fake_calls.restype = fake.fake_bytes.restype = ctypes.c_int64
    fake.fake_calls.argtypes = [ctypes.c_char_p]
    fake.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
    fake.fake_stream.restype = fake.fake_end_capture.restype = fake.fake_end_global_capture.restype = ctypes.c_void_p
    fake.fake_get_stream.restype = ctypes.c_void_p
    captures = ("fake_begin_capture", "fake_end_capture", "fake_begin_global_capture", "fake_end_global_capture")
    for name in ("fake_set_stream", "fake_replay", *captures):
        getattr(fake, name).argtypes = [ctypes.c_void_p]
    return fake


def calls(name: str) -> int:
    """How often this function of the driver was called since fake_reset."""
    return int(driver().fake_calls(name.encode()))


def print_wrapped(kernel: Kernel) -> str:
    """The kernel in C, and an entry that takes a GPU launch's parameters."""
    extent = "1"
    for _, e in kernel.grid:
        extent += f" * ({size_text(e)})"
    n, m = len(kernel.params), len(kernel.syms)
    names = "".join(f"  int64_t {c_name(s.name)} = y[{i}]; (void){c_name(s.name)};\n" for i, s in enumerate(kernel.syms))
    return f"""#include <stdint.h>
{NUMBERS}
{emit_kernel(replace(kernel, target=CPU))}
__attribute__((visibility("default"))) const int tsk_params = {n + m}, tsk_pointers = {n}, tsk_waits = WAITS;
__attribute__((visibility("default"))) void tsk(void **p, unsigned grid) {{
  void *b[{n} + 1]; int64_t y[{m} + 1]; int ts_bad = 0;
  for (int i = 0; i < {n}; i++) b[i] = *(void **)p[i];
  for (int i = 0; i < {m}; i++) y[i] = *(int64_t *)p[{n} + i];
{names}  TS_KERNEL(b, y, 0, {extent});
}}
"""


def compile_images(texts: Sequence[str], arch: int, options: Options) -> tuple[Image, ...]:
    """Each text as a shared object."""
    tools = toolchain()

    def one(text: str) -> Image:
        with TemporaryDirectory() as work:
            source, out = Path(work) / "k.c", Path(work) / "k.so"
            source.write_text(text)
            flags = [*tools.flags, "-DTS_KERNEL=tsk_body", f"-DWAITS={int(arch >= 90)}", "-shared"]
            subprocess.run([*tools.command, *flags, str(source), "-o", str(out), "-lm"], check=True)
            return Image(out.read_bytes(), "tsk", 4, 1024, waits=arch >= 90)

    with ThreadPoolExecutor(2) as pool:
        return tuple(pool.map(one, texts))


def form(program: Any, options: Options, decided: Any, ready: Any = None) -> Scheduled:
    """The processor's kernels: the host does not care what is in them."""
    made = form_kernels(program, options, decided)

    def on_device(element: Any) -> Any:
        if isinstance(element, Kernel):
            return replace(element, target=program.target)
        if isinstance(element, Cond):
            return replace(element, then=tuple(map(on_device, element.then)), orelse=tuple(map(on_device, element.orelse)))
        return replace(element, body=tuple(map(on_device, element.body))) if isinstance(element, Repeat) else element

    return replace(made, body=tuple(map(on_device, made.body)))


def _record_begin(device: int) -> tuple[Any, int]:
    fake = driver()
    stream = fake.fake_stream(device)
    before = fake.fake_get_stream()
    fake.fake_set_stream(stream)
    fake.fake_begin_capture(stream)
    return (stream, before), stream


def _record_end(token: Any) -> int:
    stream, before = token
    driver().fake_set_stream(before)
    return int(driver().fake_end_capture(stream))


class Generator:
    """A GPU's generator, as far as compiled graphs ask it."""

    seed, offset = 7, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


generator = Generator()
BLOCKS = 4  # of eager's random kernels


@contextmanager
def pretending(former: Callable[..., Scheduled] = form) -> Iterator[ctypes.CDLL]:
    """Inside, graphs of CPU tensors are compiled for a GPU; gives the driver, its counts at zero."""
    fake = driver()
    fake.fake_reset()
    with ExitStack() as stack:
        stack.enter_context(patch.dict(TARGETS, {"cpu": lambda options: cuda(90)}))
        stack.enter_context(patch.dict(FORMERS, {"triton": former}))
        stack.enter_context(patch.dict(PRINTERS, {"triton": print_wrapped}))
        stack.enter_context(patch.dict(host_torch.RECORDERS, {"cuda": (_record_begin, _record_end)}))
        stack.enter_context(patch.object(host_torch, "bind", lambda row, device: bind(row, "cuda")))
        stack.enter_context(patch.object(pipeline, "at_hand", lambda fg, options: replace(options, cuda_blocks=BLOCKS)))
        stack.enter_context(patch.object(draws, "generator_of", lambda device: generator))
        stack.enter_context(patch.dict(IMAGE_COMPILERS, {"triton": compile_images}))
        stack.enter_context(patch.dict(IMAGE_STARTERS, clear=True))
        yield fake
