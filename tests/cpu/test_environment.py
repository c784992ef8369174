"""Faults around a compilation: C locale, a full disk, Ctrl-C. Nothing is wrong or half written, and the next call works. (Compilers that
fail and processes that share a cache: test_cache.py; stderr: test_messages.py.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_aot import ROOT

START = """
import os, resource, signal, sys, threading, time
import torch, torchsmith
from torchsmith import aot, codes
from torchsmith.events import recording

def fn(x):
    return x.sin() * 3 + 1

def native(x):
    torchsmith.compiler.reset()
    with recording() as got:
        result = torchsmith.compile(fn)(x)
    assert torch.equal(result, fn(x)) or torch.allclose(result, fn(x))
    return not [e for e in got if e.kind == "fallback"], [e.fields.get("code") for e in got if e.kind == "fallback"]

def left(folder):
    return [f for _, _, files in os.walk(folder) for f in files if f.startswith(".new") or f.endswith(".part")]

x, cache = torch.ones(5), os.environ["TORCHSMITH_CACHE_DIR"]
"""


def started(text: str, folder: Path, *args: object, file: str = "program.py", **env: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(START + text, encoding="utf-8")
    more = {"PYTHONPATH": str(ROOT / "src"), "TORCHSMITH_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder), **env}
    command = [sys.executable, str(folder / file), *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | more, encoding="utf-8", errors="replace", process_group=0, **pipes)


def finished(child: subprocess.Popen[str]) -> str:
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, (child.returncode, out[-1000:], (err or "")[-3000:])
    return out


LOCALE = """
def grün(x):  # ä
    return x.sort()[0] + 1

class Gewichte(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.größe = torch.nn.Parameter(torch.ones(3))
    def forward(self, x):
        return x * self.größe

assert native(x)[0]
assert torch.equal(torchsmith.compile(grün)(x), grün(x))
str(torchsmith.explain(grün)(x))
program = torchsmith.export(Gewichte(), (x[:3],))
path = aot.compile_and_package(program, package_path=sys.argv[1] + "/m.pt2")
assert torch.equal(aot.load_package(path)(x[:3]), x[:3])
torchsmith.export.save(program, sys.argv[1] + "/m.tsep")
torchsmith.export.load(sys.argv[1] + "/m.tsep")
"""


def test_c_locale(tmp_path: Path) -> None:
    """Source, names, cache and packages beyond ASCII, where Python takes ASCII for granted."""
    folder = tmp_path / "ordner é"
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TORCHSMITH_LOGS": "all", "TORCHSMITH_DEBUG": "1"}
    finished(started(LOCALE, folder, folder, file="prögramm.py", TORCHSMITH_DEBUG_DIR=str(folder / "dbg"), **env))


FULL = """
hard = resource.getrlimit(resource.RLIMIT_FSIZE)
seen, full = [], sys.argv[1] + "/full"
program = torchsmith.export(torch.nn.Linear(3, 3), (torch.ones(1, 3),))
for limit in (0, 500, 20_000):  # bytes that a file may have: of the source, of the library, of neither
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard[1]))
    seen.append(native(x))
    packaged = lambda: aot.compile_and_package(program, package_path=full + ".pt2")
    for write in (packaged, lambda: torchsmith.export.save(program, full + ".tsep")):
        try:
            write()
            assert limit > 1000, "a package was written to a full disk"
            os.unlink(max(os.scandir(sys.argv[1]), key=lambda f: f.name).path)
        except (OSError, codes.Unsupported) as e:
            assert str(e), e
    resource.setrlimit(resource.RLIMIT_FSIZE, hard)
    assert not left(cache), left(cache)
assert not seen[0][0] and all(c and c.startswith("RUN") for c in seen[0][1]), seen
assert native(x)[0]
assert not [f for f in os.listdir(sys.argv[1])], os.listdir(sys.argv[1])
assert not [f for f in os.listdir(os.environ["TMPDIR"]) if "torchsmith" in f], os.listdir(os.environ["TMPDIR"])
"""


def test_full_disk(tmp_path: Path) -> None:
    """What cannot be written is eager, counted, and leaves nothing; with room again it is compiled."""
    (tmp_path / "out").mkdir()
    finished(started(FULL, tmp_path, tmp_path / "out"))


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with SIGINT ignored

def stop(seconds):
    time.sleep(seconds)
    os.kill(0, signal.SIGINT)  # to the compilers that run as well, as a terminal does

assert native(torch.ones(2, 2))[0]  # what is imported first
slow = torchsmith.compile(lambda x: torch.softmax(x.sin() @ x.cos(), -1).cumsum(0) + x.std())
y, caught = torch.randn(33, 33), 0
for seconds in (0.02, 0.1, 0.3):  # in capture, in lowering, in the C compiler
    torchsmith.compiler.reset()
    threading.Thread(target=stop, args=(seconds,)).start()
    try:
        slow(y)
        time.sleep(30)
    except KeyboardInterrupt:
        caught += 1
assert caught == 3
assert native(x)[0] and not left(cache), left(cache)
torchsmith.compiler.reset()
with recording() as got:
    slow(y)
assert not [e for e in got if e.kind == "fallback"], got
assert not [f for f in os.listdir(os.environ["TMPDIR"]) if "torchsmith" in f], os.listdir(os.environ["TMPDIR"])
"""


@pytest.mark.heavy
def test_interrupts(tmp_path: Path) -> None:
    """At whatever line the signal comes; test_cache.py interrupts every line of those who write files."""
    finished(started(INTERRUPTED, tmp_path))
