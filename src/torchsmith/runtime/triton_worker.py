"""A process that compiles Triton texts: it imports triton, and neither torch nor torchsmith.

In: one JSON object a line on stdin, {"text", "arch"}. Out: one a line on stdout, {"cubin", "ptx", "symbol", "warps", "shared", "scratch",
"waits"} with bytes in base64, or {"error"}. Run as a script with the name of a folder, which it makes and deletes; runtime/cubins.py
starts it, before it has a text to compile: what the first one needs is loaded by then.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FIRST = """# {"name": "first", "args": [["p", "*fp32"]], "warps": 1, "stages": 1}
import triton, triton.language as tl
@triton.jit
def first(p):
    tl.store(p, tl.load(p) + 1)
"""


def hash_no_installation() -> None:
    """Triton reads all of its files, hundreds of MB, for the keys of its cache; the cache here lives as long as this process."""
    for module in (triton.runtime.cache, triton.compiler.compiler):  # the one or the other, by version
        if hasattr(module, "triton_key"):
            module.triton_key = lambda: "this process"


def compile_text(text: str, arch: int, folder: Path, number: int) -> dict[str, Any]:
    """One text, whose first line says how, as machine code for compute capability `arch`."""
    head = json.loads(text.partition("\n")[0].removeprefix("#"))
    path = folder / f"kernel{number}.py"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["WAITS"] = triton.language.constexpr(arch >= 90)  # older ones have no such instruction
    aligned = {(i,): [["tt.divisibility", 16]] for i, (_, kind) in enumerate(head["args"]) if kind.startswith("*")}
    source = ASTSource(getattr(module, head["name"]), dict(head["args"]), {}, aligned)
    options = {"num_warps": head["warps"], "num_stages": head["stages"], "enable_fp_fusion": False, "enable_reflect_ftz": False}
    options |= {"debug": "tl.device_assert(" in text, "sanitize_overflow": False}  # else assertions are left out
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    meta = made.metadata
    path.unlink()
    return {
        "cubin": base64.b64encode(made.asm["cubin"]).decode(), "ptx": base64.b64encode(made.asm["ptx"].encode()).decode(),
        "symbol": meta.name, "warps": meta.num_warps, "shared": meta.shared, "scratch": getattr(meta, "global_scratch_size", 0) or 0,
        "waits": "griddepcontrol.wait" in made.asm["ptx"],
    }  # fmt: skip


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a compiler prints is no answer
    folder = Path(sys.argv[1])
    folder.mkdir(mode=0o700)
    os.environ |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DISABLE_LINE_INFO": "1"}
    hash_no_installation()
    try:
        with contextlib.suppress(Exception):  # asked for a text, it says what is wrong
            compile_text(FIRST, 90, folder, -1)
        for number, line in enumerate(sys.stdin):
            ask = json.loads(line)
            try:
                answer = compile_text(ask["text"], ask["arch"], folder, number)
            except Exception as e:
                answer = {"error": f"{type(e).__name__}: {e}"}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
