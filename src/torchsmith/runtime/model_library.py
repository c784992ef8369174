"""From C texts to a model library: the host program, its kernels, the model's description, the engine and its doors, in one file.

In: texts, the processor it is for. Out: bytes of a shared library that needs libc and libm only; or of a static one, or their sources.
The engine is the same for every model and for every processor of a kind, so setup.py compiles it (prebuild); where these sources, flags
or target differ from what was compiled then, it is compiled here and cached. Kernels are cached always.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .. import events
from ..codes import Unsupported
from ..ir.target import CPU, Target
from ..options import Options
from . import store
from .build import MACRO, digest, kernel_name, kernel_objects
from .files import all_or_none, replace_file, work_folder, workers
from .toolchain import FEATURES, FLAGS, Toolchain, features_of, run_compiler, toolchain

ENGINE = (
    "aot/engine.c", "aot/plain.c", "aot/aoti.c", "aot/weights.c", "aot/cpu.c", "native/workspace.c", "native/pool.c",
    "aot/operators.c", "native/libtorch.c", "native/operator.c", "aot/device.c", "native/cuda.c",
)  # fmt: skip
ENGINE_FLAGS = (
    "-O2", "-std=gnu11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-fwrapv", "-fno-strict-aliasing", "-ffunction-sections",
    "-fdata-sections", "-fno-asynchronous-unwind-tables", "-fno-plt",
)  # fmt: skip
SELDOM = ("aot/aoti.c", "aot/weights.c", "aot/cpu.c", *ENGINE[7:10])  # small rather than quick
LINKED_ENGINE = ENGINE[:2] + ENGINE[3:7]  # of a model that is linked into a program: nothing of libtorch
LINKED = "-DTS_LINKED"
PREBUILT = Path(__file__).resolve().parent / "engine"  # objects that setup.py compiled, named by what they were made of
LINK_FLAGS = (
    "-shared", "-s", "-Wl,-z,now,-z,defs,-z,noseparate-code", "-Wl,--gc-sections", "-Wl,--as-needed", "-Wl,--hash-style=gnu",
    "-Wl,--build-id=none",
)  # fmt: skip


@cache
def sources() -> Path:
    """The folder csrc: beside the package where it is installed, at the root of a checkout."""
    here = Path(__file__).resolve()
    for folder in (here.parent.parent / "csrc", here.parents[3] / "csrc"):
        if (folder / "aot" / "model.h").exists():
            return folder
    raise Unsupported("RUN003", detail="torchsmith's C sources are not installed")


def paths() -> dict[str, Path]:
    """Where users of packages find headers, the CMake config and the pkg-config file."""
    folder = sources()
    return {"include": folder / "include", "cmake": folder / "cmake", "pkgconfig": folder / "pkgconfig"}


def tools_for(options: Options) -> Toolchain:
    """The compiler with the flags for the processor that options name, binding libc's functions to their old versions."""
    tools, features = toolchain(), features_of(options)
    mine = [flag for flag in tools.flags if flag in FLAGS]
    wide = ["-mprefer-vector-width=512"] if "avx512f" in features else []
    old = ("-include", str(sources() / "aot" / "glibc.h"))
    return replace(tools, features=features, flags=(*mine, *wide, *(FEATURES[f] for f in features), *old), host_flags=old)


@dataclass(frozen=True, slots=True)
class Texts:
    """What is generated for one model: the host program, its kernels, the description."""

    host: str
    kernels: tuple[str, ...]
    model: str
    target: Target = CPU
    archs: tuple[int, ...] = ()  # of a GPU: what there is code for


def build_model(texts: Texts, options: Options) -> bytes:
    """The shared library's bytes."""

    def link(tools: Toolchain, objects: list[Path], work: Path) -> bytes:
        out = work / "model.so"
        run_compiler(tools, [*LINK_FLAGS, "-o", str(out), *map(str, objects), "-lm"], work, "linking")
        return out.read_bytes()

    return _build(texts, options, ENGINE, link)


def build_archive(texts: Texts, options: Options, prefix: str) -> bytes:
    """A static library's bytes: every name that it exports starts with `prefix`, so that several models can be linked together."""

    def archive(tools: Toolchain, objects: list[Path], work: Path) -> bytes:
        renames = work / "renames"
        rows = "".join(f"{n} {prefix}{n.removeprefix('tsm_')}\n" for n in _defined(objects))
        renames.write_text(rows, encoding="utf-8", errors="surrogateescape")
        for o in objects:
            _tool("objcopy", [f"--redefine-syms={renames}", str(o)], work)
        out = work / "model.a"
        _tool("ar", ["rcsD", str(out), *map(str, objects)], work)
        return out.read_bytes()

    return _build(texts, options, LINKED_ENGINE, archive)


def write_sources(folder: Path, texts: Texts, options: Options, prefix: str) -> None:
    """The same texts and the engine as a CMake project that makes a static library of them."""

    def names(tools: Toolchain, objects: list[Path], work: Path) -> bytes:
        rows = (f"#define {n} {prefix}{n.removeprefix('tsm_')}\n" for n in _defined(objects))
        return ("/* Several models can be linked together: the names that they define differ. */\n" + "".join(rows)).encode()

    renames = _build(texts, options, LINKED_ENGINE, names)
    tools = tools_for(options)
    root = sources()
    files = {Path("names.h"): renames.decode(), Path("host.c"): texts.host, Path("description.c"): texts.model}
    for k, text in enumerate(dict.fromkeys(texts.kernels)):
        files[Path(f"kernel{k}.c")] = f"#define {MACRO} {kernel_name(text)}\n{text}"
    copied = [*LINKED_ENGINE, "torchsmith.h", "aot/model.h", "aot/operators.h", "aot/device.h", "aot/glibc.h", "include/torchsmith/model.h"]
    copied += [str(p.relative_to(root)) for p in root.glob("native/*.h") if "Python.h" not in p.read_text(encoding="utf-8")]
    for name in copied:
        if (root / name).exists():
            files[Path("engine") / name] = (root / name).read_text(encoding="utf-8")
    kernel_flags = ";".join(f for f in tools.flags if f != "-include" and not f.endswith("glibc.h"))
    files[Path("CMakeLists.txt")] = CMAKE.format(name=prefix.rstrip("_"), kernels=kernel_flags, engine=";".join((*ENGINE_FLAGS, LINKED)))
    folders = sorted({folder / part for file in files for part in file.parents})
    with all_or_none([*folders, *(folder / file for file in files)]):
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8", errors="surrogateescape")


CMAKE = """\
cmake_minimum_required(VERSION 3.16)
project({name} C)
file(GLOB KERNELS ${{CMAKE_CURRENT_SOURCE_DIR}}/kernel*.c)
file(GLOB ENGINE ${{CMAKE_CURRENT_SOURCE_DIR}}/engine/aot/*.c ${{CMAKE_CURRENT_SOURCE_DIR}}/engine/native/*.c)
add_library({name} STATIC host.c description.c ${{KERNELS}} ${{ENGINE}})
set(ENGINE_DIR ${{CMAKE_CURRENT_SOURCE_DIR}}/engine)
target_include_directories({name} PRIVATE ${{ENGINE_DIR}} ${{ENGINE_DIR}}/native ${{ENGINE_DIR}}/include)
target_include_directories({name} PUBLIC ${{CMAKE_CURRENT_SOURCE_DIR}} ${{ENGINE_DIR}}/include)
target_link_libraries({name} PUBLIC m pthread ${{CMAKE_DL_LIBS}})
set_source_files_properties(${{KERNELS}} PROPERTIES COMPILE_OPTIONS "{kernels}")
set_source_files_properties(description.c ${{ENGINE}} PROPERTIES COMPILE_OPTIONS "{engine}")
set_source_files_properties(host.c PROPERTIES COMPILE_OPTIONS "-O1;-fwrapv;-fno-strict-aliasing;-ffp-contract=off")
target_compile_options({name} PRIVATE -include ${{CMAKE_CURRENT_SOURCE_DIR}}/names.h)
"""


def _build(
    texts: Texts, options: Options, engine: Sequence[str],
    finish: Callable[[Toolchain, list[Path], Path], bytes],
) -> bytes:  # fmt: skip
    """Compile everything to objects in a folder of their own, and let `finish` make one file of them."""
    tools = tools_for(options)
    try:
        with work_folder() as work, events.timed("build", kernels=len(texts.kernels)):
            (work / "model.c").write_text(texts.model, encoding="utf-8", errors="surrogateescape")
            with workers(2) as pool:
                mine = pool.submit(_compile, tools, work / "model.c", work / "model.o", work, ENGINE_FLAGS)
                fixed = [pool.submit(_engine_object, tools, name, engine is LINKED_ENGINE, work) for name in engine]
                objects = kernel_objects(tools, texts.host, texts.kernels, work, options, texts.target, texts.archs)
                objects += [*(f.result() for f in fixed), mine.result()]
            return finish(tools, objects, work)
    except OSError as e:
        raise Unsupported("RUN003", detail=str(e)) from e


def _tool(name: str, args: Sequence[str], work: Path) -> str:
    """One of the binary utilities that come with a compiler."""
    try:
        done = subprocess.run(
            [name, *args], cwd=work, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=60
        )
        return done.stdout
    except (OSError, subprocess.SubprocessError) as e:
        detail = getattr(e, "stderr", "") or str(e)
        raise Unsupported("RUN001", detail=f"{name}: {detail.strip()}") from e


def _defined(objects: Sequence[Path]) -> list[str]:
    """Names that the objects define for others."""
    text = _tool("nm", ["-g", "--defined-only", "--format=posix", *map(str, objects)], objects[0].parent)
    return sorted({line.split()[0] for line in text.splitlines() if line and not line.endswith(":")})


def _compile(tools: Toolchain, source: Path, out: Path, work: Path, base: Sequence[str]) -> Path:
    folder = sources()
    flags = [*base, "-include", str(folder / "aot" / "glibc.h"), f"-I{folder}", f"-I{folder / 'include'}", f"-I{folder / 'native'}"]
    run_compiler(tools, [*flags, "-c", str(source), "-o", str(out)], work, source.name)
    return out


def _engine_object(tools: Toolchain, name: str, linked: bool, work: Path, prebuilt: Path | None = None) -> Path:
    """One file of the fixed part as an object in `work`: what setup.py compiled, else from the cache, else compiled now."""
    source, target = sources() / name, work / f"engine_{Path(name).stem}.o"
    text = source.read_text(encoding="utf-8")
    flags = (*ENGINE_FLAGS, *(("-Os",) if name in SELDOM else ()), *((LINKED,) if linked and "TS_LINKED" in text else ()))
    key = digest(*tools.command[1:], tools.target, *flags, _headers(), text)  # objects of all compilers fit together
    known = (prebuilt or PREBUILT) / f"{key}.o"
    cached = store.folder("obj") / f"{key}.o"
    content = known.read_bytes() if known.exists() else store.read(cached, store.image)
    if content is None:
        _compile(tools, source, target, work, flags)
        store.put(cached, target.read_bytes())
    else:
        target.write_bytes(content)
    if prebuilt is not None:
        replace_file(known, lambda file: file.write(target.read_bytes()), 0o666)
        return known
    return target


def _headers() -> str:
    folder = sources()
    found = [p for pattern in ("*.h", "aot/*.h", "native/*.h", "include/torchsmith/*.h") for p in sorted(folder.glob(pattern))]
    return "".join(p.read_text(encoding="utf-8") for p in found)


def prebuild(folder: Path) -> None:
    """Compile the engine into `folder` (PREBUILT of an installation); what does not belong to it any more is deleted. For setup.py."""
    folder.mkdir(parents=True, exist_ok=True)
    with work_folder() as work:
        made = {_engine_object(toolchain(), name, False, work, folder) for name in ENGINE}
    for old in set(folder.glob("*.o")) - made:
        old.unlink()
