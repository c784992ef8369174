"""Packages under AddressSanitizer and UndefinedBehaviorSanitizer: random models, random right and wrong calls and constants, damaged files.

    PYTHONPATH=src:tests/cpu python tests/cpu/fuzz_packages.py FIRST LAST [CALLS]

Each seed draws a module (dtypes, ranks, sizes that vary, inputs and buffers that are written, constants that are tied, transposed, empty
or of many dimensions), links it with package_fuzz.c, which says what is called and what must hold, and calls it CALLS times. Then its
package and its library are damaged where it matters (directory, members' headers and lengths, names, manifest with a right checksum,
weights' header, code's tail, anywhere, truncated) and loaded by the C header, under the sanitizers, and by Python: each file is a model or
an error with a text, never a crash, a leak or another exception. A wrong seed is one line.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_harness
import torch
from torch import nn

import torchsmith
from torchsmith import aot
from torchsmith.aot import load as loader
from torchsmith.runtime.model_library import paths

DRIVER = Path(__file__).with_name("package_fuzz.c")
FLAGS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize=alignment,signed-integer-overflow", "-fno-sanitize-recover=undefined"]
ENV = {"ASAN_OPTIONS": "detect_leaks=1:exitcode=97:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
DTYPES = (
    torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float16,
    torch.bfloat16,
)  # fmt: skip

READER = r"""
#include "torchsmith/package.h"
int main(int argc, char **argv) { /* FILE...: loads each, twice; prints how many are models */
  int loaded = 0;
  for (int i = 1; i < argc; i++) {
    for (int verify = 0; verify < 2; verify++) {
      torchsmith_options o = {.size = sizeof o, .verify = verify};
      torchsmith_model *m = NULL;
      if (torchsmith_load(argv[i], i % 5 ? "model" : NULL, i % 3 ? &o : NULL, &m)) {
        if (m || !torchsmith_error()[0]) return printf("%s: refused without a text\n", argv[i]), 1;
        continue;
      }
      loaded++;
      torchsmith_free(m);
    }
  }
  printf("%d\n", loaded);
  return 0;
}
"""


def values(r: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    made = torch.tensor([r.randrange(2 if dtype is torch.bool else 4) for _ in range(torch.Size(shape).numel())], dtype=torch.int64)
    return made.view(shape).to(dtype)


class Drawn(nn.Module):
    """A module as the seed says; `args` are inputs for it, `dynamic` says which sizes vary."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        r = random.Random(seed)
        batch = torch.export.Dim("n", min=1, max=96)
        self.kinds = []
        self.args: list[torch.Tensor] = []
        self.dynamic: list[dict[int, Any]] = []
        for i in range(r.randrange(1, 5)):
            shape = [r.choice([1, 2, 3, 4, 7]) for _ in range(r.randrange(4))]
            varies = bool(shape) and r.random() < 0.6
            if varies:
                shape[0] = 5
            dtype = r.choice(DTYPES)
            self.args.append(values(r, shape, dtype))
            self.dynamic.append({0: batch} if varies else {})
            self.register_buffer(f"c{i}", values(r, shape[1:] if varies else shape, r.choice(DTYPES)))
            self.kinds.append((r.choice(["map", "sum", "view", "same", "unused", "size", "none", "matmul"]), r.random() < 0.25))
            if shape and self.kinds[-1][0] == "matmul":
                self.register_parameter(f"w{i}", nn.Parameter(torch.randn(shape[-1] if len(shape) > 1 else shape[0], r.choice([1, 3, 33]))))
        if r.random() < 0.5:
            self.register_buffer("count", torch.zeros(2))
        if r.random() < 0.4:
            self.register_buffer("deep", torch.randn([1] * 15 + [2, 2, 3]).transpose(-1, -3))
        if r.random() < 0.3:
            self.register_buffer("nothing", torch.zeros(0, 3))
        if r.random() < 0.4:
            self.tied = self.c0

    def forward(self, *args: torch.Tensor) -> tuple[Any, ...]:
        made: list[Any] = []
        for i, (x, (kind, writes)) in enumerate(zip(args, self.kinds, strict=True)):
            c = getattr(self, f"c{i}")
            if writes:
                x.copy_(x + x if x.dtype is not torch.bool else x ^ True)
            if kind == "map":
                made.append(x.to(torch.float32) * c + 1)
            elif kind == "sum":
                made.append((x.to(torch.float32) + c).sum(tuple(range(x.dim()))[1:]))
            elif kind == "view":
                made.append(x.unsqueeze(0).transpose(0, -1))
            elif kind == "same":
                made.append(x)
            elif kind == "size":
                made.append(x.shape[0] if x.dim() else 3)
            elif kind == "none":
                made.append(None)
            elif kind == "matmul" and hasattr(self, f"w{i}") and x.dim() > 1:
                made.append(x.to(torch.float32) @ getattr(self, f"w{i}"))
        if hasattr(self, "count"):
            self.count.add_(1)
            made.append(self.count * 2)
        if hasattr(self, "deep"):
            made.append(self.deep.sum((-1, -2)))
        if hasattr(self, "nothing"):
            made.append(self.nothing.sum())
        if hasattr(self, "tied"):
            made.append(self.tied * 1)
        return tuple(made) or (args[0].clone(),)


def run(command: list[Any], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, errors="replace", **more)


def built(program: Any, folder: Path) -> list[str]:
    """The model's C sources and the driver, compiled with sanitizers; the command without seed and count."""
    aot.aot_compile(program, options={"aot_inductor.output_path": str(folder / "net"), "format": "c"})
    flags = f"-DCMAKE_C_FLAGS={' '.join(FLAGS)} -O1"
    for command in (["cmake", "-S", folder / "net", "-B", folder / "build", flags], ["cmake", "--build", folder / "build"]):
        done = run(command)
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1000:]
    includes = [f"-I{folder / 'net'}", f"-I{paths()['include']}"]
    end = [DRIVER, folder / "build" / "libnet.a", "-o", folder / "fuzz", "-lm", "-ldl", "-lpthread"]
    done = run(["cc", "-O1", "-std=gnu11", *FLAGS, *includes, *end])
    assert done.returncode == 0, done.stderr[-1000:]
    return [str(folder / "fuzz"), str(folder / "net" / "net.weights")]


# ---------------------------------------------------------------- damaged files


def rewritten(content: bytes, change: Callable[[dict[str, bytes]], None], folder: Path) -> bytes:
    """The package with other members, every checksum right."""
    source, target = folder / "in.zip", folder / "out.zip"
    source.write_bytes(content)
    with zipfile.ZipFile(source) as z:
        members = {i.filename: z.read(i) for i in z.infolist()}
    change(members)
    with zipfile.ZipFile(target, "w") as z:
        for name, data in members.items():
            z.writestr(name, data)
    return target.read_bytes()


def strange(r: random.Random, value: Any) -> Any:
    """Another JSON value."""
    return r.choice([None, 0, -1, 2**63, 2**70, 1.5, "", "../x", "\x00", "é" * 300, [], {}, [value], {"a": value}, True, [0] * 1000])


def altered(r: random.Random, value: Any) -> Any:
    """The JSON value with one place changed."""
    if isinstance(value, dict) and value and r.random() < 0.9:
        key = r.choice(list(value))
        if r.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: altered(r, value[key])}
    if isinstance(value, list) and value and r.random() < 0.9:
        at = r.randrange(len(value))
        return value[:at] + ([altered(r, value[at])] if r.random() < 0.85 else []) + value[at + 1 :]
    return strange(r, value)


def damaged(r: random.Random, content: bytes, folder: Path) -> bytes:
    raw = bytearray(content)
    is_zip = content[:2] == b"PK"
    how = r.randrange(9)
    if how == 0:
        return bytes(raw[: r.randrange(len(raw))])
    if how == 1:
        raw[r.randrange(len(raw))] ^= 1 << r.randrange(8)
        return bytes(raw)
    if how == 2:
        at, n = r.randrange(len(raw)), r.choice([1, 4, 8, 64, 5000])
        return bytes(raw[:at] + (b"" if r.random() < 0.5 else r.randbytes(n)) + raw[at + n if r.random() < 0.5 else at :])
    if not is_zip:  # the tail says where code and weights lie
        at = len(raw) - 40 + 8 * r.randrange(5) if how < 7 else max(0, bytes(raw).find(b"TSWEIGHT")) + 4 * r.randrange(16)
        number = r.choice([0, 1, len(raw), len(raw) - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, r.randrange(2 * len(raw))])
        raw[at : at + 8] = number.to_bytes(8, "little")
        return bytes(raw)
    if how < 6:  # a number of the directory or of a member's header
        marks = [i for m in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06") for i in places(content, m)]
        at, size = r.choice(marks) + r.randrange(4, 46), r.choice([1, 2, 4])
        number = r.choice([0, 1, 0xFF, 0xFFFF, 0xFFFFFFFF, 0x80000000, len(raw), r.randrange(2**32)]) & ((1 << 8 * size) - 1)
        raw[at : at + size] = number.to_bytes(size, "little")
        return bytes(raw)

    def change(members: dict[str, bytes]) -> None:
        name = r.choice(list(members))
        if how == 6:
            members.pop(name)
        elif how == 7:
            data = members.pop(name)
            members[r.choice([name + "x", "../" + name, "/" + name, name.replace("model", "other"), "x", name.upper(), "x" * 300])] = data
        else:
            name = next(n for n in members if n.endswith("torchsmith.json"))
            members[name] = json.dumps(altered(r, json.loads(members[name]))).encode()

    return rewritten(content, change, folder)


def places(content: bytes, mark: bytes) -> list[int]:
    found, at = [], content.find(mark)
    while at >= 0:
        found.append(at)
        at = content.find(mark, at + 1)
    return found


def load_in_python(path: Path, args: list[torch.Tensor]) -> str:
    """What went otherwise than it may: a model that runs, or a PackageError (OSError where a file cannot be read)."""
    try:
        model = aot.load_package(path, verify=path.stem.endswith("1"))
        model(*[a.clone() for a in args])
    except (loader.PackageError, OSError):
        return ""
    except Exception as e:
        return f"{path.name}: {type(e).__name__}: {e}"
    return ""


# ---------------------------------------------------------------- one seed


def compare(seed: int, calls: int = 3000, files: int = 40) -> list[str]:
    r = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-packages-") as name, torch.no_grad():
        folder = Path(name)
        module = Drawn(seed).eval()
        args = tuple(a.clone() for a in module.args)
        dynamic = (tuple(module.dynamic),) if any(module.dynamic) else None
        program = torchsmith.export(module, args, dynamic_shapes=dynamic)
        done = run([*built(program, folder), seed, calls], env=os.environ | ENV, timeout=900)
        assert done.returncode == 0, f"calls: {done.returncode} {done.stdout[-600:]} {done.stderr[:2500]}"
        aot.compile_and_package(program, package_path=str(folder / "model.pt2"))
        aot.aot_compile(program, options={"aot_inductor.output_path": str(folder / "model.so")})
        (folder / "reader.c").write_text(READER)
        done = run(["cc", "-O1", *FLAGS, f"-I{paths()['include']}", folder / "reader.c", "-o", folder / "reader", "-ldl"])
        assert done.returncode == 0, done.stderr[-1000:]
        changed = []
        for k in range(files):
            kind = r.choice(["pt2", "pt2", "so"])
            changed.append(folder / f"{k}.{kind}")
            changed[-1].write_bytes(damaged(r, (folder / f"model.{kind}").read_bytes(), folder))
        done = run([folder / "reader", *changed], env=os.environ | ENV, timeout=900)
        assert done.returncode == 0, f"files: {done.returncode} {done.stdout[-600:]} {done.stderr[:2500]}"
        for path in changed:
            found = load_in_python(path, module.args)
            assert not found, f"files: {found}"
    return []


def main(first: int, last: int, calls: int = 3000) -> int:
    return fuzz_harness.run(lambda seed: compare(seed, calls), first, last)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
