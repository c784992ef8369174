"""What the assembler says of PTX, with no GPU. Needs triton, which brings the assembler."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

BIN = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"


def spilled(ptx: bytes, folder: Path) -> int:
    """Bytes that registers spill, as the assembler that takes this version of PTX says."""
    source = folder / "kernel.ptx"
    source.write_bytes(ptx)
    (chip,) = re.findall(rb"^\.target (\w+)", ptx, re.M)
    for ptxas in BIN.glob("ptxas*"):
        command = [ptxas, "-v", f"--gpu-name={chip.decode()}", source, "-o", folder / "out"]
        said = subprocess.run(command, check=False, capture_output=True, text=True)
        if said.returncode == 0:
            return sum(map(int, re.findall(r"(\d+) bytes spill", said.stderr)))
    raise AssertionError(said.stderr)
