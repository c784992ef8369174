"""The C compiler and the processor: what they are, which flags suit them, and what to say when they fail (no torch).

In: the environment. Out: one Toolchain value, made once per process and compiler command; its `identity` keys caches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..codes import Unsupported, define
from ..ir.target import Target, cpu_with
from ..options import Options, compiler_command
from . import store
from .files import work_folder

define("AOT070", "this processor target is unknown", "use 'native', 'x86-64', 'x86-64-v2', 'x86-64-v3', 'x86-64-v4' or a list of features")
define("RUN012", "this processor lacks instructions that code was asked for",
       "leave the option cpu out, or name a level that this processor has")

# Vector features that generated code may use, as /proc/cpuinfo names them, and the compiler's flag for each.
FEATURES: dict[str, str] = {
    "sse4_2": "-msse4.2", "avx": "-mavx", "avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c", "bmi1": "-mbmi", "bmi2": "-mbmi2",
    "lzcnt": "-mlzcnt", "popcnt": "-mpopcnt", "avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl", "avx512cd": "-mavx512cd", "avx512_vnni": "-mavx512vnni", "avx512_bf16": "-mavx512bf16",
    "avx512_fp16": "-mavx512fp16", "amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16",
}  # fmt: skip
ALIASES = {"abm": "lzcnt"}
_V2 = ("sse4_2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
LEVELS: dict[str, tuple[str, ...]] = {"x86-64": (), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}
# Vector bits that options may limit code to -> the features that are left out.
NARROWER: dict[int, tuple[str, ...]] = {0: (), 512: (), 256: ("avx512", "amx"), 128: ("avx", "fma", "f16c", "amx")}

FLAGS = (
    "-O2", "-ftree-vectorize", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-fno-gnu-unique", "-fno-semantic-interposition",
)  # fmt: skip
HOST_FLAGS = ("-O1", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-fvisibility=hidden")
COMPILE_SECONDS = 300
_REFUSED = re.compile("No space left|Permission denied|Read-only file system|Disk quota exceeded|File too large|File size limit exceeded")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C compiler and the flags it gets. `identity` changes whenever its output might."""

    command: tuple[str, ...]
    version: str
    target: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    host_flags: tuple[str, ...] = ()  # for host programs, besides HOST_FLAGS

    @property
    def identity(self) -> str:
        text = "\n".join((*self.command, self.version, self.target, *self.flags, *HOST_FLAGS))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def cpu_features() -> tuple[str, ...]:
    """Features of this processor that FEATURES knows, sorted as there."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found = re.search(r"^flags\s*:(.*)$", text, re.M)
    words = {ALIASES.get(w, w) for w in found.group(1).split()} if found else set()
    return tuple(f for f in FEATURES if f in words)


def features_of(options: Options) -> tuple[str, ...]:
    """Of the processor that code is made for: options.cpu ("native", an x86-64 level, or features separated by blanks or commas), no wider
    than options.cpp_simdlen bits. Raises Unsupported("AOT070") for a name that nobody knows."""
    if options.cpu in ("", "native"):
        named = cpu_features()
    else:
        named = LEVELS[options.cpu] if options.cpu in LEVELS else tuple(options.cpu.replace(",", " ").split())
    unknown = [f for f in named if f not in FEATURES]
    if unknown:
        raise Unsupported("AOT070", detail=" ".join(unknown))
    return tuple(f for f in FEATURES if f in named and not f.startswith(NARROWER[options.cpp_simdlen] or ("\n",)))


def check_runs(options: Options) -> None:
    """Raises Unsupported("RUN012") where this processor cannot run what options ask for."""
    missing = [f for f in features_of(options) if f not in cpu_features()]
    if missing:
        raise Unsupported("RUN012", detail=f"{options.cpu} needs {' '.join(missing)}")


def target_of(options: Options) -> Target:
    """The row of ir/target.py for that processor."""
    return cpu_with(frozenset(features_of(options)))


def toolchain(options: Options | None = None) -> Toolchain:
    """The compiler that the environment names now, making code for this processor or the one that `options` name."""
    features = cpu_features() if options is None else features_of(options)
    return _identify(compiler_command(), os.environ.get("PATH", ""), features)


@cache
def _identify(command: tuple[str, ...], path: str, features: tuple[str, ...]) -> Toolchain:
    """Who the compiler is: as remembered for this very file, else by asking. Raises Unsupported("RUN001") when it does not answer."""
    found = shutil.which(command[0], path=path or None)
    if found is None:
        why = "is not in PATH" if os.sep not in command[0] else "cannot be executed" if os.path.exists(command[0]) else "does not exist"
        raise Unsupported("RUN001", detail=f"{command[0]} {why}")
    info = os.stat(found)
    facts = (*command, os.path.realpath(found), info.st_size, info.st_mtime_ns, features, FLAGS, platform.machine())
    memory = store.folder("graph") / f"toolchain-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"

    def parse(content: bytes) -> Toolchain:
        row = json.loads(content)
        return Toolchain(command, str(row["version"]), str(row["target"]), tuple(row["features"]), tuple(row["flags"]))

    known = store.read(memory, parse)
    if known is not None:
        return known
    tools = _ask_all(command, features)
    row = {"version": tools.version, "target": tools.target, "features": tools.features, "flags": tools.flags}
    with contextlib.suppress(Unsupported):  # a cache that cannot be written costs time only
        store.put(memory, json.dumps(row).encode())
    return tools


def _ask_all(command: tuple[str, ...], features: tuple[str, ...]) -> Toolchain:
    """Version, target, and which of the flags for this processor it accepts."""
    try:
        version = _ask((*command, "--version"))
        target = _ask((*command, "-dumpmachine")).strip()
        machine = ["-mprefer-vector-width=512"] if "avx512f" in features else []
        if target.split("-", maxsplit=1)[0] in ("x86_64", "amd64") and platform.machine() in ("x86_64", "AMD64"):
            machine += [FEATURES[f] for f in features]
        else:
            machine = []
        return Toolchain(command, version, target, features, tuple(_accepted(command, [*FLAGS, *machine])))
    except (OSError, subprocess.SubprocessError) as e:
        raise Unsupported("RUN001", detail=f"{' '.join(command)}: {e}") from e


def _ask(command: tuple[str, ...]) -> str:
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=True, stdin=subprocess.DEVNULL
    ).stdout


def _accepted(command: tuple[str, ...], flags: list[str]) -> list[str]:
    """All flags if the compiler takes them together, else those it takes one by one (clang and old compilers lack some)."""

    def takes(some: list[str]) -> bool:
        done = subprocess.run(
            (*command, *some, "-x", "c", "-fsyntax-only", "-"), input=b"int x;\n", capture_output=True, timeout=30, check=False
        )
        return done.returncode == 0

    if takes(flags):
        return flags
    return [f for f in flags if takes([f])]


def run_compiler(tools: Toolchain, args: list[str], cwd: Path, what: str) -> None:
    """Run the compiler. Raises Unsupported: RUN001 it is gone, RUN002 it failed (log kept), RUN003 the disk refused."""
    command = [*tools.command, *args]
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILE_SECONDS, check=False,
            stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(cwd)},  # what a compiler that is killed leaves goes with the rest
        )  # fmt: skip
    except FileNotFoundError as e:
        raise Unsupported("RUN001", detail=str(e)) from e
    except subprocess.TimeoutExpired as e:
        raise Unsupported("RUN002", detail=f"{what}: no end after {COMPILE_SECONDS} s; {_keep_log(command, str(e), cwd)}") from e
    except OSError as e:
        raise Unsupported("RUN003", detail=f"{what}: {e}") from e
    if done.returncode == 0:
        return
    if done.returncode == -signal.SIGINT:  # a terminal's Ctrl-C reaches the compiler too
        raise Unsupported("RUN002", detail=f"{what}: interrupted")
    text = done.stdout + done.stderr
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    refused = next(filter(_REFUSED.search, lines), "file size limit exceeded" if done.returncode == -signal.SIGXFSZ else None)
    if refused is not None:
        raise Unsupported("RUN003", detail=f"{what}: {refused}")
    said = next((line for line in lines if re.search(r"\berror\b|undefined reference", line)), lines[0])[:200]
    raise Unsupported("RUN002", detail=f"{what}: exit status {done.returncode}{said and ': ' + said}; {_keep_log(command, text, cwd)}")


def _keep_log(command: list[str], text: str, cwd: Path) -> str:
    """Write the command, its output and its sources where the user can find them; says where."""
    try:
        with work_folder("torchsmith-failed-", kept=True) as folder:
            (folder / "log.txt").write_text(" ".join(command) + "\n\n" + text, encoding="utf-8", errors="surrogateescape")
            for source in cwd.glob("*.c"):
                (folder / source.name).write_bytes(source.read_bytes())
        return f"see {folder / 'log.txt'}"
    except OSError:
        return text[:2000]
