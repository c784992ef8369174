"""The frame extension on every supported Python that is installed here: built in a temporary folder, tested without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
ASK = "import sysconfig; print(sysconfig.get_path('include')); print(sysconfig.get_config_var('EXT_SUFFIX'))"


def interpreter(version: str) -> tuple[str, list[str]] | None:
    """Another installed Python of this version that runs and has headers, and its answers."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return None
    places = [*map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))), shutil.which(f"python{version}")]
    for python in filter(None, places):
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and (Path(asked.stdout.split()[0]) / "Python.h").exists():
            return python, asked.stdout.split()
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_builds_and_passes(version: str, tmp_path: Path) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no other Python {version} with headers here")
    python, (include, suffix) = found
    package = tmp_path / "torchsmith" / "capture"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    sources = sorted(map(str, (ROOT / "csrc" / "frame").glob("*.c")))
    cc = (sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [cc, "-O1", "-g", "-std=gnu11", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{include}", *sources, "-o", str(package / f"_frame{suffix}")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    test = ROOT / "tests" / "pure" / "test_frame_hook.py"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([python, "-X", "faulthandler", str(test)], capture_output=True, text=True, env=env, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
