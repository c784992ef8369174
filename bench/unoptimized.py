"""The C compiler of a process that runs many small programs once: without optimizations, and one run of it for each library.

What `runtime/build.py` asks to be compiled is kept as text, in place of an object, until the library is linked. Then the host program and
the kernels become one C file, for which gcc's compiler proper, `as` and `ld` are started, and none of the drivers around them: half of the
time of the usual road at -O0 goes into starting twelve programs. Texts that do not go together are compiled apart; other compilers than
gcc take the usual road.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from torchsmith.options import compiler_command
from torchsmith.runtime import build, images
from torchsmith.runtime.toolchain import Toolchain, run_compiler

MARK = "/* a text in place of its object */\n"
KERNEL = re.compile(rf"#define {build.MACRO} (\w+)\n.*?#undef {build.MACRO}\n", re.S)
BEGINNING = re.compile(r"typedef |static |#define ")
ATTRIBUTE = re.compile(r"__attribute__\s*\(\(.*?\)\)+")
NAME = re.compile(r"typedef [^;]*?(\w+)\s*;|#define (\w+)|static [^;={]*?(\w+)\s*[(\[=;]")


@dataclass(frozen=True, slots=True)
class Programs:
    """Of gcc: the compiler proper, the assembler, the linker, and its library of what processors lack."""

    cc1: str
    assembler: str
    linker: str
    libgcc: str


def programs(command: Sequence[str]) -> Programs | None:
    """Those of the compiler `command`; None where it is not gcc."""

    def ask(what: str) -> str:
        return subprocess.run([*command, what], capture_output=True, text=True, check=False).stdout.strip()

    cc1, assembler, linker = (shutil.which(ask(f"-print-prog-name={name}")) for name in ("cc1", "as", "ld"))
    return Programs(cc1, assembler, linker, ask("-print-libgcc-file-name")) if cc1 and assembler and linker else None


def kept(source: Path, name: str | None) -> str:
    """What stands for the object of `source`, a kernel of this name or (None) a host program or several kernels."""
    text = source.read_text(encoding="utf-8", errors="surrogateescape")
    if name is None:
        return MARK + text
    head, opening, body = text.partition(build.OPENING)
    return f"{MARK}{head}\n#define {build.MACRO} {name}{opening}{body}\n#undef {build.MACRO}\n"


def definitions(head: str) -> dict[str, str]:
    """What kernels begin with, by name. Each begins with its line's first column, as the conditions in a function do."""
    found, opened, before = list[str](), 0, ""
    for line in head.splitlines(keepends=True):
        is_within = before.startswith(" ") or before.endswith("{\n")  # a function
        if opened == 0 and (BEGINNING.match(line) or (line.startswith("#if") and not is_within)):
            found.append("")
        opened += line.startswith("#if") - line.startswith("#endif")
        before = line
        if found:
            found[-1] += line
    return {next(filter(None, m.groups())) if (m := NAME.search(ATTRIBUTE.sub("", text))) else text: text for text in found}


def joined(texts: Sequence[str]) -> str:
    """One C file of these: each definition that kernels begin with, and each kernel, once. What means something else in a later text
    than in one before has another name there."""
    groups: list[dict[str, str]] = []
    for text in texts:
        kernels = {m.group(1): m.group() for m in KERNEL.finditer(text)}
        head = KERNEL.sub("", text)
        parts = (definitions(head) if kernels else {"": head}) | kernels
        group = next((g for g in groups if all(g.get(k, v) == v for k, v in parts.items())), None)
        if group is None:
            groups.append(group := {})
        group |= parts
    out = list[str]()
    for k, group in enumerate(groups):
        names = [n for n, text in group.items() if BEGINNING.match(text)] if k else []
        out += [f"#define {n} {n}_{k}" if group[n][0] != "#" else f"#undef {n}" for n in names]
        out += group.values()
        out += [f"#undef {n}" for n in names if group[n][0] != "#"]
    return "\n".join(out)


class Compiler:
    """Stands for `run_compiler`."""

    def __init__(self, command: Sequence[str]) -> None:
        self.programs = programs(command)

    def __call__(self, tools: Toolchain, args: list[str], cwd: Path, what: str) -> None:
        """As run_compiler's; the last -O counts."""
        out = Path(args[args.index("-o") + 1])
        objects = [Path(a) for a in args if a.endswith(".o") and a != str(out)]
        if self.programs is None or not all(map(is_text, objects)):
            run_compiler(tools, [*args, "-O0"], cwd, what)
        elif "-shared" not in args:
            source = Path(args[args.index("-c") + 1])
            name = next((a.partition("=")[2] for a in args if a.startswith(f"-D{build.MACRO}=")), None)
            out.write_text(kept(source, name), encoding="utf-8", errors="surrogateescape")
        else:
            texts = [p.read_text(encoding="utf-8", errors="surrogateescape") for p in objects]
            try:
                self.compile([joined(texts)], self.programs, tools, cwd, out)
            except subprocess.CalledProcessError:
                self.compile(texts, self.programs, tools, cwd, out)

    def compile(self, texts: Sequence[str], gcc: Programs, tools: Toolchain, cwd: Path, out: Path) -> None:
        """The library of these C files."""
        flags, objects = [f for f in tools.flags if f.startswith("-m") or f.startswith("-f")], []
        for k, text in enumerate(texts):
            source, assembly = cwd / f"joined{k}.c", cwd / f"joined{k}.s"
            source.write_text(text, encoding="utf-8", errors="surrogateescape")
            objects.append(str(cwd / f"joined{k}.o"))
            run([gcc.cc1, "-quiet", "-O0", *flags, str(source), "-o", str(assembly)], cwd)
            run([gcc.assembler, str(assembly), "-o", objects[-1]], cwd)
        # What they call of libc and libm is there: Python and torch have them loaded.
        run([gcc.linker, "-shared", "-z", "now", "-z", "muldefs", "-o", str(out), *objects, gcc.libgcc], cwd)


def is_text(file: Path) -> bool:
    with file.open("rb") as f:
        return f.read(len(MARK)) == MARK.encode()


def run(command: Sequence[str], cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, capture_output=True, check=True, stdin=subprocess.DEVNULL)


def use(stack: ExitStack) -> None:
    """From here on this process compiles C so."""
    compiler = Compiler(compiler_command())
    for room in (build, images):
        stack.enter_context(patch.object(room, "run_compiler", compiler))
