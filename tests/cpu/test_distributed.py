"""Compiled modules in two processes (gloo): under DistributedDataParallel and fully_shard gradients equal eager's, collectives break."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("two_processes.py")


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_two_processes(tmp_path: Path) -> None:
    """All in one pair of processes: starting them is what takes long."""
    place = tmp_path / "meet"
    pipe, command = subprocess.PIPE, [sys.executable, str(WORKER)]
    both = [subprocess.Popen([*command, str(rank), str(place)], stdout=pipe, stderr=pipe, text=True) for rank in range(2)]
    try:
        said = [p.communicate(timeout=1200) for p in both]
    finally:
        for p in both:
            p.kill()
    for out, err in said:
        codes = json.loads(out.splitlines()[-1]) if out else pytest.fail(err[-3000:])
        assert codes["compiled inside of DDP"] == codes["compiled, then sharded"] == [], codes
        assert set(codes["DDP compiled"]) == set(codes["collective"]) == {"CAP014"}, codes
        assert set(codes["sharded, then compiled"]) == {"CAP018"}, codes
