"""From C texts to one shared library: kernels compiled in parallel to content-addressed objects, then linked with the host program.

In: the host text, kernel texts, options. Out: the path of the library in the private cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .. import events
from ..codes import Unsupported
from ..ir.target import CPU, Language, Target
from ..options import Options
from . import store
from .images import image_object
from .toolchain import HOST_FLAGS, Toolchain, run_compiler, toolchain

MACRO = "TS_KERNEL"  # what a kernel text calls its function


def digest(*parts: str) -> str:
    """Content address of texts; parts cannot run into each other."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:40]


def kernel_name(text: str) -> str:
    """The C name of a kernel: equal text, equal name."""
    return f"tsk_{digest(text)[:32]}"


def build(host_text: str, kernel_texts: Iterable[str], options: Options, target: Target = CPU) -> Path:
    """The library of this host program and these kernels (named by kernel_name); compiled only if the cache lacks it."""
    tools = toolchain(options)
    kernels = {kernel_name(text): text for text in kernel_texts}
    caching = not options.force_disable_caches
    key = digest(tools.identity, target.name, host_text, *sorted(kernels))
    library = store.folder("lib") / f"{key}.so"
    if caching and store.get(library) is not None:
        return library
    try:
        work = Path(tempfile.mkdtemp(prefix="torchsmith-build-"))
    except OSError as e:
        raise Unsupported("RUN003", detail=str(e)) from e
    try:
        with events.timed("build", kernels=len(kernels)):
            objects = _compile_all(tools, host_text, kernels, work, caching, options, target)
            out = work / "graph.so"
            link = [*tools.flags, "-shared", "-Wl,-z,now,-z,defs", "-o", str(out), *map(str, objects), "-Wl,--as-needed", "-lm"]
            run_compiler(tools, link, work, "linking")
        content = out.read_bytes()
        if not caching:  # a library of its own, so that nothing written before is loaded
            library = store.folder("lib") / f"{key}-{os.getpid()}-{os.urandom(4).hex()}.so"
        store.put(library, content)
    except OSError as e:
        raise Unsupported("RUN003", detail=str(e)) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return library


def kernel_objects(
    tools: Toolchain, host_text: str, kernel_texts: Iterable[str], work: Path, options: Options, target: Target = CPU,
    archs: tuple[int, ...] = (),
) -> list[Path]:  # fmt: skip
    """Objects of a host program and its kernels in `work`, to be linked by somebody else. `archs`: of a device, what it shall run on."""
    kernels = {kernel_name(text): text for text in kernel_texts}
    return _compile_all(tools, host_text, kernels, work, not options.force_disable_caches, options, target, archs)


@dataclass(frozen=True, slots=True)
class Job:
    """What compiling the kernels of one library has at hand; objects go to `work`."""

    tools: Toolchain
    work: Path
    caching: bool
    options: Options
    target: Target
    archs: tuple[int, ...] = ()  # of a device, beside the target's own: () where the library stays in this process


Task = tuple[Path, Callable[[], None]]  # an object file, and what makes it


def _c_objects(job: Job, kernels: Mapping[str, str]) -> Iterator[Task]:
    """One object per kernel, from the cache where it has it."""

    def kernel(name: str, text: str, out: Path) -> None:
        cached = store.folder("obj") / f"{digest(job.tools.identity, name, text)}.o"
        content = store.get(cached) if job.caching else None
        events.emit("cache", name="object hit" if content is not None else "object miss")
        if content is not None:
            out.write_bytes(content)
            return
        source = job.work / f"{name}.c"
        source.write_text(text, encoding="utf-8", errors="surrogateescape")
        run_compiler(job.tools, [*job.tools.flags, f"-D{MACRO}={name}", "-c", str(source), "-o", str(out)], job.work, name)
        if job.caching:
            store.put(cached, out.read_bytes())

    for name, text in sorted(kernels.items(), key=lambda kv: -len(kv[1])):  # the long ones first
        out = job.work / f"{name}.o"
        yield out, functools.partial(kernel, name, text, out)


def _device_objects(job: Job, kernels: Mapping[str, str]) -> Iterator[Task]:
    """One object with the machine code of all kernels."""
    out = job.work / "images.o"
    archs = job.archs or (job.target.arch,)
    yield out, functools.partial(image_object, job.tools, kernels, job.target.language, archs, bool(job.archs), job.options, job.work, out)


COMPILERS: dict[Language, Callable[[Job, Mapping[str, str]], Iterator[Task]]] = {"c": _c_objects, "triton": _device_objects}


def _compile_all(
    tools: Toolchain, host_text: str, kernels: Mapping[str, str], work: Path, caching: bool, options: Options, target: Target,
    archs: tuple[int, ...] = (),
) -> list[Path]:  # fmt: skip
    """Objects of all texts."""

    def host() -> None:
        source = work / "host.c"
        source.write_text(host_text, encoding="utf-8", errors="surrogateescape")
        run_compiler(tools, [*HOST_FLAGS, *tools.host_flags, "-c", str(source), "-o", str(work / "host.o")], work, "host program")

    objects = [work / "host.o"]
    with ThreadPoolExecutor(max(1, options.compile_threads or len(os.sched_getaffinity(0)))) as pool:
        waits = [pool.submit(host)]
        for out, task in COMPILERS[target.language](Job(tools, work, caching, options, target, archs), kernels):
            waits.append(pool.submit(task))
            objects.append(out)
        for w in waits:
            w.result()
    return objects
