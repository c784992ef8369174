"""A sample of torch's operator database, another one every day: no wrong answer, no crash, no hang (bench/op_db.py measures all of it)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = 30


def test_rotating_sample(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "op_db.py"), "--sample", str(SAMPLE), "--procs", "2", "--out", str(tmp_path / "table")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    result = json.loads((tmp_path / "table.json").read_text())
    figures = result["figures"]
    assert done.returncode == 0 and figures["wrong"] == 0, done.stdout
    assert not [r["name"] for r in result["entries"] if r["verdict"] in ("crash", "timeout")], done.stdout
    assert figures["one graph"] >= SAMPLE // 2, done.stdout
