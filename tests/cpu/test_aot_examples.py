"""The documents' scripts in examples/aoti: Python parts as they stand. Their C++ programs are built by `make examples`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "aoti"


@pytest.mark.parametrize(("folder", "made"), [("package", "model.pt2"), ("library", "model.so")])
def test_model_scripts(tmp_path: Path, folder: str, made: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, EXAMPLES / folder / "model.py"], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / made).stat().st_size < 80_000
