"""standalone_compile: one graph of another capture -> an artifact that is called, saved, and loaded in another process.

In: a torch.fx.GraphModule (ATen or torch calls) and its inputs, real or fake. Out: CompiledArtifact. For servers that capture, guard and
cache themselves: an artifact checks no guards; what was assumed of its sizes is `conditions`.

A saved artifact is a zip of stored members: manifest.json (what a host must know: runtime/manifest.py), library.so, results.json, the
graph's own constants in consts.safetensors; digests.json holds the SHA-256 of each, checked on load. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.functionalise import functionalise
from ..graph.sizes import print_condition
from ..options import Options, from_user
from ..pipeline import compile_functional
from ..runtime import store
from ..runtime.files import replace_file
from ..runtime.load import load as load_library
from ..runtime.manifest import Manifest
from .expected import Expected
from .foreign import Foreign

FORMATS = ("binary", "unpacked")
MEMBERS = ("manifest.json", "library.so", "results.json", "consts.safetensors")


class CompiledArtifact:
    """`artifact(*inputs)` gives the graph's results as a list. Sizes are those it was compiled for; with dynamic_shapes="from_graph" those
    that the graph's symbols allow."""

    def __init__(self, manifest: Manifest, library: bytes, results: Sequence[Sequence[Any]], consts: Sequence[torch.Tensor],
                 expected: Expected, eager: Callable[..., Any] | None = None, options: Options | None = None,
                 reads: Sequence[int] | None = None) -> None:  # fmt: skip
        self.manifest, self.library, self.results, self.consts = manifest, library, [tuple(r) for r in results], tuple(consts)
        self.expected, self.reads = expected, reads
        self.conditions = tuple(print_condition(c) for c in expected.conditions)
        path = store.folder("lib") / f"{hashlib.sha256(library).hexdigest()[:40]}.so"
        if store.read(path, store.image) is None:
            store.put(path, library)
        self._call = load_library(path, manifest, eager=eager, tail=self.consts, threads=0 if options is None else options.cpp_threads)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Raises TypeError, ValueError where an input is not what the graph was compiled for."""
        if self.reads is not None:
            inputs = tuple(inputs[i] for i in self.reads)
        self.expected.check(inputs)
        found = self._call(*inputs)
        return [value if at is None else found[at] for at, value in self.results]

    def save(self, *, path: str | Path, format: str = "binary") -> None:
        """Write the artifact: one file ("binary") or a folder ("unpacked"). Raises ValueError, OSError."""
        if format not in FORMATS:
            raise ValueError(f"format is one of {', '.join(map(repr, FORMATS))}, not {format!r}")
        members = self._members()
        members["digests.json"] = json.dumps({n: hashlib.sha256(m).hexdigest() for n, m in members.items()}).encode()
        target = Path(path)
        if format == "unpacked":
            target.mkdir(parents=True, exist_ok=True)
            for name, member in members.items():
                (target / name).write_bytes(member)
            return

        def write(file: BinaryIO) -> None:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as z:
                for name, member in members.items():
                    z.writestr(name, member)

        replace_file(target, write, 0o666)

    def _members(self) -> dict[str, bytes]:
        tensors = import_module("safetensors.torch")
        firsts = {id(t): i for i, t in reversed(list(enumerate(self.consts)))}  # one that the graph names twice is stored once
        consts = tensors.save({str(i): self.consts[i].detach().clone(memory_format=torch.contiguous_format) for i in firsts.values()})
        numbers = [firsts[id(t)] for t in self.consts]
        said = {"results": self.results, "expected": self.expected.to_json(), "reads": self.reads, "consts": numbers}
        texts = {"manifest.json": self.manifest.to_json(), "results.json": json.dumps(said)}
        return {n: t.encode() for n, t in texts.items()} | {"library.so": self.library, "consts.safetensors": consts}

    @staticmethod
    def load(*, path: str | Path, format: str = "binary") -> CompiledArtifact:
        """Read what `save` wrote. Raises ValueError for a file that is none or was changed, OSError for one that cannot be read."""
        if format not in FORMATS:
            raise ValueError(f"format is one of {', '.join(map(repr, FORMATS))}, not {format!r}")
        source = Path(path)
        try:
            if format == "unpacked":
                members = {n: (source / n).read_bytes() for n in (*MEMBERS, "digests.json")}
            else:
                with zipfile.ZipFile(source) as z:
                    members = {n: z.read(n) for n in (*MEMBERS, "digests.json")}
            digests = json.loads(members["digests.json"])
            if any(digests.get(n) != hashlib.sha256(members[n]).hexdigest() for n in MEMBERS):
                raise ValueError(f"{path}: the artifact was changed or is damaged")
            said = json.loads(members["results.json"])
            expected = Expected.from_json(said["expected"])
            manifest = Manifest.of(json.loads(members["manifest.json"]))
        except (zipfile.BadZipFile, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, NotImplementedError) as e:
            raise ValueError(f"{path} is not a compiled artifact: {e}") from e
        consts = import_module("safetensors.torch").load(members["consts.safetensors"])
        tail = [consts[str(i)] for i in said["consts"]]
        return CompiledArtifact(manifest, members["library.so"], said["results"], tail, expected, reads=said["reads"])


def standalone_compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, dynamic_shapes: str = "from_graph", options: Mapping[str, Any] | None =
    None, aot: bool = False, donate_graph_module: bool = False, fake_mode: Any = None,
) -> CompiledArtifact:  # fmt: skip
    """Compile one graph. dynamic_shapes: "from_graph": sizes vary where the placeholders' fake values are symbolic; "from_example_inputs":
    where the examples are; "from_tracing_context": as "from_graph". options: of torchsmith.compile, also as {"config_patches": {...}}.
    `aot`, `donate_graph_module` and `fake_mode` are accepted: an artifact is ahead of time in any case, and `gm` stays as it is.

    Raises Unsupported where the graph has no native code, TypeError, ValueError.
    """
    if dynamic_shapes not in ("from_graph", "from_example_inputs", "from_tracing_context"):
        raise ValueError(f"dynamic_shapes is from_graph, from_example_inputs or from_tracing_context, not {dynamic_shapes!r}")
    if not isinstance(gm, torch.fx.GraphModule):
        raise TypeError(f"gm is a torch.fx.GraphModule (as torch.fx.symbolic_trace or make_fx make one), not {type(gm).__name__}")
    if isinstance(example_inputs, torch.Tensor) or not isinstance(example_inputs, Sequence):
        raise TypeError(f"example_inputs is a list or tuple of the graph's inputs, not {type(example_inputs).__name__}")
    if isinstance(options, Mapping) and "config_patches" in options:  # how the arguments of torch's compiler of graphs are written
        patches = options["config_patches"]
        if not isinstance(patches, Mapping):
            raise TypeError(f"config_patches is a dict of options, not {type(patches).__name__}")
        options = {**{k: v for k, v in options.items() if k != "config_patches"}, **patches}
    chosen = from_user(None, options)
    with _disable_current_modes(), torch.no_grad():
        foreign = Foreign(gm, example_inputs, prefer_examples=dynamic_shapes == "from_example_inputs")
        fg = functionalise(foreign.module, foreign.facts)
        manifest, library, _ = compile_functional(fg, chosen, "standalone", ())
    names = [n.name for n in foreign.module.graph.nodes if n.op == "placeholder"]
    expected = Expected.of(fg, names, (*foreign.facts.guards, *foreign.facts.late))
    code = Path(library).read_bytes()
    reads = foreign.reads if len(foreign.reads) < len(foreign.names) else None
    return CompiledArtifact(manifest, code, foreign.results, fg.consts, expected, foreign.module.forward, chosen, reads)
