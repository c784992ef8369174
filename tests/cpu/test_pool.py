"""The thread pool in plain C: every item once, several callers, nested and borrowed threads, fork, stop; also under the sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDS = {"plain": ["-O2"], "threads": ["-O1", "-g", "-fsanitize=thread"], "memory": ["-O1", "-g", "-fsanitize=address,undefined"]}


@pytest.mark.parametrize("build", BUILDS)
def test_pool(build: str, tmp_path: Path) -> None:
    program = tmp_path / "stress"
    sources = [str(ROOT / "tests/cpu/pool_stress.c"), str(ROOT / "csrc/native/pool.c")]
    command = ["cc", "-std=gnu11", *BUILDS[build], f"-I{ROOT / 'csrc'}", *sources, "-lpthread", "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode and "sanitize" in " ".join(command) and "cannot find" in made.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert made.returncode == 0, made.stderr
    few = build == "threads"  # twenty times slower, and a child of fork is more than ThreadSanitizer follows
    rounds = [str(10 if few else 100), *([] if few else ["fork"])]
    environment = {**os.environ, "LD_PRELOAD": ""}
    done = subprocess.run([str(program), *rounds], capture_output=True, text=True, check=False, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_pool_needs_libc_only(tmp_path: Path) -> None:
    """Plain C hosts link it: no libgomp, nothing of Python or torch."""
    out = tmp_path / "libpool.so"
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["cc", *flags, str(ROOT / "csrc/native/pool.c"), "-o", str(out)], check=True)
    text = subprocess.run(["objdump", "-p", str(out)], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[1] for line in text.split("\n") if "NEEDED" in line}
    assert {n for n in needed if not n.startswith("ld-linux")} == {"libc.so.6"}  # thread-local variables belong to the loader
