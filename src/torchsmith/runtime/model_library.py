"""From C texts to a model library: the host program, its kernels, the model's description, the engine and its doors, in one file.

In: texts, the processor it is for. Out: bytes of a shared library that needs libc and libm only. The engine's objects are compiled once per
compiler and cached; so are kernels, which the just-in-time road shares where the processor is this one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

from .. import events
from ..codes import Unsupported, define
from ..options import Options
from . import store
from .build import digest, kernel_objects
from .toolchain import FEATURES, FLAGS, Toolchain, cpu_features, run_compiler, toolchain

define("AOT010", "this processor target is unknown", "use 'native', 'x86-64', 'x86-64-v2', 'x86-64-v3', 'x86-64-v4' or a list of features")

_V2 = ("sse4_2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
TARGETS: dict[str, tuple[str, ...]] = {"x86-64": (), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}

ENGINE = ("aot/engine.c", "aot/plain.c", "aot/aoti.c", "aot/weights.c", "aot/cpu.c", "native/workspace.c", "native/pool.c")
ENGINE_FLAGS = (
    "-Os", "-std=gnu11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-fwrapv", "-fno-strict-aliasing", "-ffunction-sections",
    "-fdata-sections", "-fno-asynchronous-unwind-tables", "-w",
)  # fmt: skip
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


def features_of(target: str) -> tuple[str, ...]:
    """"native", an x86-64 level, or features separated by blanks or commas -> their names."""
    if target in ("", "native"):
        return cpu_features()
    named = TARGETS.get(target) or tuple(target.replace(",", " ").split()) if target not in TARGETS else TARGETS[target]
    unknown = [f for f in named if f not in FEATURES]
    if unknown:
        raise Unsupported("AOT010", detail=" ".join(unknown))
    return tuple(f for f in FEATURES if f in named)


def tools_for(features: Sequence[str]) -> Toolchain:
    """The compiler with the flags for these features, binding libc's functions to their old versions."""
    tools = toolchain()
    mine = [flag for flag in tools.flags if flag in FLAGS]
    wide = ["-mprefer-vector-width=512"] if "avx512f" in features else []
    old = ("-include", str(sources() / "aot" / "glibc.h"))
    return replace(tools, features=tuple(features), flags=(*mine, *wide, *(FEATURES[f] for f in features), *old), host_flags=old)


def build_model(host: str, kernels: Sequence[str], model: str, features: Sequence[str], options: Options) -> bytes:
    """The library's bytes."""
    tools = tools_for(features)
    work = Path(tempfile.mkdtemp(prefix="torchsmith-build-"))
    try:
        with events.timed("build", kernels=len(kernels)):
            (work / "model.c").write_text(model)
            with ThreadPoolExecutor(2) as pool:
                engine = pool.submit(_engine_objects, tools, work)
                mine = pool.submit(_compile, tools, work / "model.c", work / "model.o", work)
                objects = kernel_objects(tools, host, kernels, work, options)
                objects += [*engine.result(), mine.result()]
            out = work / "model.so"
            run_compiler(tools, [*LINK_FLAGS, "-o", str(out), *map(str, objects), "-lm"], work, "linking")
        return out.read_bytes()
    except OSError as e:
        raise Unsupported("RUN003", detail=str(e)) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(tools: Toolchain, source: Path, out: Path, work: Path) -> Path:
    folder = sources()
    flags = [*ENGINE_FLAGS, "-include", str(folder / "aot" / "glibc.h"), f"-I{folder}", f"-I{folder / 'include'}", f"-I{folder / 'native'}"]
    run_compiler(tools, [*flags, "-c", str(source), "-o", str(out)], work, source.name)
    return out


def _engine_objects(tools: Toolchain, work: Path) -> list[Path]:
    """The fixed part, from the cache where it has it."""
    folder = sources()
    headers = [p.read_text() for p in sorted(folder.glob("aot/*.h")) + sorted(folder.glob("include/torchsmith/*.h"))]
    headers += [p.read_text() for p in sorted(folder.glob("*.h")) + sorted(folder.glob("native/*.h"))]
    out: list[Path] = []
    for name in ENGINE:
        source = folder / name
        if not source.exists():
            continue
        key = digest(tools.command[0], tools.version, tools.target, *ENGINE_FLAGS, *headers, source.read_text())
        cached = store.folder("obj") / f"{key}.o"
        target = work / f"engine_{source.stem}.o"
        content = store.get(cached)
        if content is None:
            _compile(tools, source, target, work)
            store.put(cached, target.read_bytes())
        else:
            target.write_bytes(content)
        out.append(target)
    return out
