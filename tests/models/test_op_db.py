"""A sample of the operator database, another one for each state of src: no wrong answer, crash or hang (bench/op_db.py has all of it)."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = 30


def test_rotating_sample(tmp_path: Path) -> None:
    src = hashlib.sha256(b"".join(f.read_bytes() for f in sorted((ROOT / "src").rglob("*.py"))))
    sample = ["--sample", str(SAMPLE), "--seed", str(int(src.hexdigest()[:6], 16))]
    command = [sys.executable, str(ROOT / "bench" / "op_db.py"), *sample, "--procs", "2", "--out", str(tmp_path / "table")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    result = json.loads((tmp_path / "table.json").read_text())
    figures = result["figures"]
    assert done.returncode == 0 and figures["wrong"] == 0, done.stdout
    assert not [r["name"] for r in result["entries"] if r["verdict"] in ("crash", "timeout")], done.stdout
    assert figures["one graph"] >= SAMPLE // 2, done.stdout
