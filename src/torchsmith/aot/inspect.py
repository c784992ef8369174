"""What a package or a model library holds, with every digest verified (no torch).

In: a path. Out: plain JSON values, or readable text of them. Nothing of the file is run except the description inside the library.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from typing import Any

from ..codes import Unsupported
from ..runtime.package import NEEDS_LIBTORCH, Loaded, PackageError
from .archive import FORMAT, read_library
from .weights import MAGIC, verify_weights


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything known of the file; `verified` is False when a digest differs, with the reasons in `problems`."""
    with open(path, "rb") as f:
        magic = f.read(8)
    is_library = magic.startswith(b"\x7fELF")
    if magic == MAGIC:
        wrong = verify_weights(os.fspath(path))
        problems = [wrong] if wrong else []
        return {"path": os.fspath(path), "kind": "weights", "models": {}, "problems": problems, "verified": not problems}
    if is_library:
        part = read_library(path)
        content = part.libraries[0][1]
        row = {"library": os.fspath(path), "code_bytes": len(content), "weight_bytes": part.weights.size, "cpu": "native"}
        found: dict[str, Any] = {"path": os.fspath(path), "kind": "library", "models": {"model": row}, "problems": []}
    else:
        found = _verify_package(path)
    for name, row in found["models"].items():
        try:
            row["info"] = Loaded(path, name, verify=is_library).info
        except PackageError as e:
            row["info"] = None
            if e.status == NEEDS_LIBTORCH:
                row["needs"] = str(e)
            else:
                found["problems"].append(f"model {name}: {e}")
    found["verified"] = not found["problems"]
    return found


def _verify_package(path: str | os.PathLike[str]) -> dict[str, Any]:
    problems: list[str] = []
    try:
        with zipfile.ZipFile(path) as z:
            names = {i.filename.partition("/")[2]: i for i in z.infolist()}
            if "extra/torchsmith.json" not in names:
                raise Unsupported("AOT031", detail=f"{path} has no extra/torchsmith.json")
            manifest = json.loads(z.read(names["extra/torchsmith.json"]))
            if manifest.get("format", 0) > FORMAT:
                raise Unsupported("AOT033", detail=f"{path} has format {manifest['format']}, this torchsmith reads up to {FORMAT}")
            for name, want in manifest["sha256"].items():
                if name not in names:
                    problems.append(f"{name} is missing")
                elif _sha256(z, names[name]) != want:
                    problems.append(f"{name} has another digest")
            sizes = {n: i.file_size for n, i in names.items()}
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, EOFError, RuntimeError, NotImplementedError) as e:
        if isinstance(e, Unsupported):
            raise
        raise Unsupported("AOT032", detail=f"{path}: {e}") from e
    models = {}
    for name, row in manifest["models"].items():
        models[name] = row | {"code_bytes": sizes.get(row["library"], 0), "weight_bytes": sizes.get(row.get("weights", ""), 0)}
    return {
        "path": os.fspath(path), "kind": "package", "format": manifest["format"], "torchsmith": manifest["torchsmith"],
        "models": models, "problems": problems,
    }  # fmt: skip


def _sha256(z: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    h = hashlib.sha256()
    try:
        with z.open(info) as f:
            while chunk := f.read(1 << 20):
                h.update(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError):  # NotImplementedError: an unknown compression
        return "another checksum"
    return h.hexdigest()


def inspect_text(found: dict[str, Any]) -> str:
    """The report as a person reads it."""
    made = f" (format {found['format']}, torchsmith {found['torchsmith']})" if "format" in found else ""
    lines = [f"{found['kind']} {found['path']}{made}"]
    for name, row in found["models"].items():
        lines.append(f"model {name}: code {row['code_bytes']:,} bytes, weights {row['weight_bytes']:,} bytes")
        info = row["info"]
        if info is None:
            lines += [f"  not opened: {row['needs']}"] * ("needs" in row)
            continue
        lines.append(f"  processor: {' '.join(info['cpu']) or 'any x86-64'}")
        for v in row.get("variants", []):
            lines.append(f"  variant for {v['cpu']}")
        for i in info["inputs"]:
            lines.append(f"  input {i['name']}: {i['dtype']} [{', '.join(map(str, i['shape']))}]")
        for size, (lo, hi) in info["ranges"].items():
            lines.append(f"  size {size}: {lo} to {'any' if hi is None else hi}")
        lines += [f"  {said}" for said in info.get("conditions", ())]
        for i, o in enumerate(info["described_outputs"]):
            lines.append(f"  output {i}: {o}")
        for c in info["constants"]:
            stored = "" if c["stored"] else ", packed"
            lines.append(f"  constant {c['name']}: {c['dtype']} {c['shape']}, {c['bytes']:,} bytes{stored}")
        for k in info["kernels"]:
            lines.append(f"  kernel {k}")
        for o in info.get("operators", ()):
            lines.append(f"  calls libtorch: {o}")
    lines += [f"PROBLEM: {p}" for p in found["problems"]]
    lines.append("all digests are right" if found["verified"] else "NOT verified")
    return "\n".join(lines)
