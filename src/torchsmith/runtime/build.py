"""From C texts to one shared library: kernels compiled in parallel to content-addressed objects, short ones several at a time, then
linked with the host program.

In: the host text, kernel texts, options. Out: the path of the library in the private cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from .. import events
from ..codes import Unsupported
from ..ir.target import CPU, Language, Target
from ..options import Options
from . import store
from .files import work_folder, workers
from .images import image_object
from .toolchain import HOST_FLAGS, Toolchain, run_compiler, toolchain

MACRO = "TS_KERNEL"  # what a kernel text calls its function
OPENING = f"\nvoid {MACRO}("  # where a kernel's definitions end: behind it is one function
SHORT, MOST = 16_000, 12  # characters of a kernel that is compiled with others, and how many they are at most
# Units may hold kernels that a library does not need, and two of them may hold the same one: equal names, equal texts.
LINK = ("-Wl,-z,now,-z,defs", "-Wl,-z,muldefs,--gc-sections")
UNIT = b"unit "  # begins a cached object's place that holds the name of its unit's object


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


def build(host_text: str, kernel_texts: Iterable[str], options: Options, target: Target = CPU, anew: bool = False) -> Path:
    """The library of this host program and these kernels (named by kernel_name); compiled only if the cache lacks it, or `anew`: in
    the place of what the cache has."""
    tools = toolchain(options)
    kernels = {kernel_name(text): text for text in kernel_texts}
    caching = not options.force_disable_caches
    key = digest(tools.identity, target.name, host_text, *sorted(kernels))
    library = store.folder("lib") / f"{key}.so"
    if caching and not anew and store.read(library, store.image) is not None:
        return library
    try:
        with work_folder() as work, events.timed("build", kernels=len(kernels)):
            objects = _compile_all(host_text, kernels, Job(tools, work, caching, options, target, together=True, anew=anew))
            out = work / "graph.so"
            link = [*tools.flags, "-shared", *LINK, "-o", str(out), *map(str, objects), "-Wl,--as-needed", "-lm"]
            run_compiler(tools, link, work, "linking")
            content = out.read_bytes()
        if not caching:  # a library of its own, so that nothing written before is loaded
            library = store.folder("lib") / f"{key}-{os.getpid()}-{os.urandom(4).hex()}.so"
        store.put(library, content)
    except OSError as e:
        raise Unsupported("RUN003", detail=str(e)) from e
    return library


def kernel_objects(
    tools: Toolchain, host_text: str, kernel_texts: Iterable[str], work: Path, options: Options, target: Target = CPU,
    archs: tuple[int, ...] = (),
) -> list[Path]:  # fmt: skip
    """Objects of a host program and its kernels in `work`, to be linked by somebody else. `archs`: of a device, what it shall run on."""
    kernels = {kernel_name(text): text for text in kernel_texts}
    return _compile_all(host_text, kernels, Job(tools, work, not options.force_disable_caches, options, target, archs))


@dataclass(frozen=True, slots=True)
class Job:
    """What compiling the kernels of one library has at hand; objects go to `work`."""

    tools: Toolchain
    work: Path
    caching: bool
    options: Options
    target: Target
    archs: tuple[int, ...] = ()  # of a device, beside the target's own: () where the library stays in this process
    together: bool = False  # may several kernels be one object, which a link may leave parts of?
    anew: bool = False  # compile what the cache has, too


Task = tuple[Path, Callable[[], object]]  # an object file, and what makes it


def _units(kernels: Mapping[str, str], together: bool) -> list[tuple[str, ...]]:
    """The names of `kernels`, in units: what one run of the compiler compiles. Short kernels that begin with the same definitions go
    together, since a run costs as much as some of them; the long ones come first."""
    units: dict[str, list[str]] = {}
    for name, text in sorted(kernels.items(), key=lambda kv: -len(kv[1])):
        head, _, body = text.partition(OPENING)
        is_short = 0 < len(body) <= SHORT and "#define" not in body and MACRO not in body
        units.setdefault(head if together and is_short else name, []).append(name)
    return [tuple(names[i : i + MOST]) for names in units.values() for i in range(0, len(names), MOST)]


def _unit_text(texts: Sequence[tuple[str, str]]) -> str:
    """One C file of several kernels that begin alike: what they begin with, then each under its name."""
    out = [texts[0][1].partition(OPENING)[0]]
    for name, text in texts:
        out += [f"#define {MACRO} {name}", f"{OPENING.lstrip()}{text.partition(OPENING)[2]}", f"#undef {MACRO}", ""]
    return "\n".join(out)


def _object(content: bytes) -> bytes:
    """`content`, what the cache holds of one kernel: an object, or the name of its unit's. Raises ValueError for anything else."""
    return content if re.fullmatch(UNIT + b"[0-9a-f]{40}", content) else store.image(content)


def _c_objects(job: Job, kernels: Mapping[str, str]) -> Iterator[Task]:
    """Objects of all kernels, from the cache where it has them: each has an entry there, its object or the name of its unit's."""
    keys = {name: digest(job.tools.identity, name, text) for name, text in kernels.items()}
    missing: dict[str, str] = {}
    found: dict[str, bytes] = {}  # object file -> content
    for name, text in kernels.items():
        content = store.read(store.folder("obj") / f"{keys[name]}.o", _object) if job.caching and not job.anew else None
        key = name
        if content is not None and content.startswith(UNIT):
            key = content[len(UNIT) :].decode("ascii")
            content = found.get(key) or (store.read(store.folder("obj") / f"{key}.o", store.image) if job.together else None)
        events.emit("cache", name="object hit" if content is not None else "object miss")
        if content is None:
            missing[name] = text
        else:
            found[key] = content

    def compile_unit(names: tuple[str, ...], key: str, out: Path) -> None:
        source, is_one = out.with_suffix(".c"), len(names) == 1
        text = missing[names[0]] if is_one else _unit_text([(name, missing[name]) for name in names])
        source.write_text(text, encoding="utf-8", errors="surrogateescape")
        flags = [f"-D{MACRO}={names[0]}"] if is_one else ["-ffunction-sections"]  # what a library does not need of a unit is left out
        what = names[0] if is_one else f"{names[0]} and {len(names) - 1} more"
        run_compiler(job.tools, [*job.tools.flags, *flags, "-c", str(source), "-o", str(out)], job.work, what)
        if job.caching:
            store.put(store.folder("obj") / f"{key}.o", out.read_bytes())
            for name in names if not is_one else ():
                store.put(store.folder("obj") / f"{keys[name]}.o", UNIT + key.encode())

    for names in _units(missing, job.together):
        key = keys[names[0]] if len(names) == 1 else digest(job.tools.identity, "unit", *names)
        out = job.work / f"{names[0]}.o"
        yield out, functools.partial(compile_unit, names, key, out)
    for key, content in found.items():
        out = job.work / f"{key}.o"
        yield out, functools.partial(out.write_bytes, content)


def _device_objects(job: Job, kernels: Mapping[str, str]) -> Iterator[Task]:
    """One object with the machine code of all kernels."""
    out = job.work / "images.o"
    archs = job.archs or (job.target.arch,)
    yield out, functools.partial(image_object, job.tools, kernels, job.target.language, archs, bool(job.archs), job.options, job.work, out)


COMPILERS: dict[Language, Callable[[Job, Mapping[str, str]], Iterator[Task]]] = {"c": _c_objects, "triton": _device_objects}


def _compile_all(host_text: str, kernels: Mapping[str, str], job: Job) -> list[Path]:
    """Objects of all texts."""
    tools, work, options = job.tools, job.work, job.options

    def host() -> None:
        source = work / "host.c"
        source.write_text(host_text, encoding="utf-8", errors="surrogateescape")
        run_compiler(tools, [*HOST_FLAGS, *tools.host_flags, "-c", str(source), "-o", str(work / "host.o")], work, "host program")

    objects = [work / "host.o"]
    with workers(max(1, options.compile_threads or len(os.sched_getaffinity(0)))) as pool:
        waits: list[Future[object]] = [pool.submit(host)]
        for out, task in COMPILERS[job.target.language](job, kernels):
            waits.append(pool.submit(task))
            objects.append(out)
        for w in waits:
            w.result()
    return objects
