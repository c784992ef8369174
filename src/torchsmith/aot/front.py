"""The front door of ahead-of-time compilation: aot_compile, compile_and_package, package.

In: a module with example arguments, or an exported program (ours, torch.export's, or a file of either). Out: paths of what was written.
"""

from __future__ import annotations

import os
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import options as settings
from ..codes import Unsupported, define
from ..emit.model import emit_header
from ..ir.target import LEAST_ARCH
from ..runtime.files import all_or_none, place_of, replace_file, work_folder
from ..runtime.model_library import build_archive, write_sources
from .archive import Part, read_library, write_library, write_package
from .compile import Model, compile_entry
from .entry import BUFFER, CONSTANT, PARAMETER, Argument, Constant, Entry, spec_text
from .exporting import export
from .minify import minify
from .placing import on_device
from .program import ExportedProgram
from .programs import is_torch_program, lifted, load_program, read_program
from .saved import PROGRAM, load

define("AOT050", "this is no program that can be compiled ahead of time",
       "give an nn.Module with example arguments, an ExportedProgram, or the path of a saved one")
define("AOT051", "an option of ahead-of-time compilation is unknown or has a wrong value", "see torchsmith.aot.aot_compile")

PREFIX = "aot_inductor."
MINIFIER = ("dump_aoti_minifier", "repro_level")
KNOWN = frozenset({
    *MINIFIER, "output_path", "package", "cpu", "keep_constants", "model_name", "format", "copy_inputs", "metadata", "device", "cuda_archs",
})  # fmt: skip
SWITCHES = frozenset({"package", "keep_constants", "copy_inputs", "dump_aoti_minifier"})  # True or False
FORMATS = ("so", "a", "c")
# The incumbent's switches whose effect torchsmith always has or never needs.
ACCEPTED = frozenset({
    "debug_compile", "use_runtime_constant_folding", "force_mmap_weights", "embed_kernel_binary",
    "raise_error_on_ignored_optimization", "presets", "compile_wrapper_opt_level", "link_libtorch",
    "package_constants_in_so", "package_constants_on_disk", "allow_stack_allocation", "use_minimal_arrayref_interface",
    "autotune_per_kernel_alloc", "enable_frame_pointer", "enable_line_tables", "serialized_in_spec", "serialized_out_spec",
    "use_consts_asm_build", "dynamic_linkage", "check_lowerbound", "weight_use_caching_allocator", "precompile_headers",
    "emit_multi_arch_kernel", "model_name_for_generated_files", "enable_lto",
})  # fmt: skip
# Those that would have to change something, with what does it here; None, False and empty values ask for nothing.
REFUSED = {
    "package_cpp_only": "options={'format': 'c'} writes sources with a CMake project",
    "compile_standalone": "options={'format': 'a'} or 'c' is linked into a program",
    "package_constants_on_disk_format": "weights lie in the package and are mapped from there",
    "debug_symbols": "libraries are stripped; options={'format': 'c'} gives sources to compile with symbols",
    "custom_ops_to_c_shims": "options={'libtorch': 'allow'} calls custom operators through libtorch's dispatcher",
    "custom_op_libs": "options={'libtorch': 'allow'}; load the library in the process that runs the package",
    "cross_target_platform": "packages are for Linux on the processors of the machine that compiles; 'cpu' names a level",
    "aoti_shim_library": "libtorch is looked up in the process, never linked",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of one call, split: ours, and those of the road."""

    options: settings.Options
    output_path: str | None = None
    package: bool = False
    cpu: tuple[str, ...] = ("native",)
    keep_constants: bool = False
    copy_inputs: bool = False
    format: str = "so"
    dump_aoti_minifier: bool = False
    repro_level: int = 2
    device: str = ""  # "cuda": what was exported on the processor is compiled for a GPU
    cuda_archs: tuple[int, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_settings(given: Mapping[str, Any] | None) -> Settings:
    """{"aot_inductor.output_path": ..., "cpu": ..., "max_autotune": ...} -> Settings. Raises Unsupported("AOT051")."""
    mine: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"options (inductor_configs) are a dict, not {type(given).__name__}")
    for key, value in (given or {}).items():
        name = key.removeprefix(PREFIX)
        if name in KNOWN:
            mine[name] = value
        elif key.startswith(PREFIX) and name in REFUSED:
            if value:
                raise Unsupported("AOT051", detail=f"{key}={value!r} is not offered: {REFUSED[name]}")
        elif not (key.startswith(PREFIX) and name in ACCEPTED):
            rest[key] = value
    cpu = mine.pop("cpu", "native")
    if not isinstance(cpu, str) and not (isinstance(cpu, Sequence) and all(isinstance(c, str) for c in cpu)):
        raise Unsupported("AOT051", detail=f"cpu={cpu!r} is neither the name of a processor nor a list of such names")
    mine["cpu"] = (cpu,) if isinstance(cpu, str) else tuple(cpu)
    for name in SWITCHES & mine.keys():
        if not isinstance(mine[name], bool):
            raise Unsupported("AOT051", detail=f"{name}={mine[name]!r} is neither True nor False")
    if not isinstance(mine.get("output_path"), str | os.PathLike | None):
        raise Unsupported("AOT051", detail=f"output_path={mine['output_path']!r} is no path")
    mine.pop("model_name", None)
    rest = settings.value_printer() | rest
    said = mine.get("metadata") or {}
    if not isinstance(said, Mapping) or any(not isinstance(v, str) for pair in said.items() for v in pair):
        raise Unsupported("AOT051", detail=f"metadata={said!r} is no dictionary of texts")
    mine["metadata"] = dict(said)
    if mine.get("format", "so") not in FORMATS:
        raise Unsupported("AOT051", detail=f"format={mine['format']!r} is none of {', '.join(FORMATS)}")
    rest = {"libtorch": "forbid"} | rest
    if rest["libtorch"] == "allow" and mine.get("format", "so") != "so":
        raise Unsupported("AOT051", detail=f"format={mine['format']!r} has no libtorch: give format 'so' or libtorch='forbid'")
    wanted, level = settings.minifier()
    mine["dump_aoti_minifier"], mine["repro_level"] = mine.get("dump_aoti_minifier", wanted), mine.get("repro_level", level)
    if mine["repro_level"] not in (1, 2, 3, 4):
        raise Unsupported("AOT051", detail=f"repro_level={mine['repro_level']!r} is none of 1, 2, 3, 4")
    mine["cuda_archs"] = read_archs(mine.get("cuda_archs", ()))
    if mine.get("device", "") not in ("", "cpu", "cuda"):
        raise Unsupported("AOT051", detail=f"device={mine['device']!r} is neither 'cpu' nor 'cuda'")
    if not mine["cpu"]:
        raise Unsupported("AOT051", detail="cpu names no processor")
    return Settings(settings.from_user(None, rest), **mine)


def read_archs(given: Any) -> tuple[int, ...]:
    """90, "90", "sm_90", "9.0" or a sequence of such -> (90,). Raises Unsupported("AOT051")."""
    found: list[int] = []
    for one in (given,) if isinstance(given, str | int) else tuple(given):
        text = str(one).removeprefix("sm_").replace(".", "")
        if not text.isdigit() or int(text) < LEAST_ARCH:
            raise Unsupported("AOT051", detail=f"cuda_archs: {one!r} is no compute capability of {LEAST_ARCH} or more")
        found.append(int(text))
    return tuple(sorted(set(found)))


def entry_of(program: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None) -> Entry:
    """Whatever the user has -> Entry."""
    if isinstance(program, torch.nn.Module) and args is not None:
        program = export(program, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    if isinstance(program, str | os.PathLike):
        program = load(program) if is_own_file(program) else load_program(program)
    if is_torch_program(program):
        return read_program(program)
    if isinstance(program, ExportedProgram):
        return entry_of_exported(program)
    raise Unsupported("AOT050", detail=type(program).__name__)


def is_own_file(path: str | os.PathLike[str]) -> bool:
    """Whether torchsmith.export.save wrote it; torch.export.save has the same suffix."""
    try:
        with zipfile.ZipFile(path) as z:
            return PROGRAM in z.namelist()
    except (zipfile.BadZipFile, EOFError, UnicodeDecodeError, NotImplementedError, struct.error):  # for the next reader to say
        return False


TYPES = {"param": PARAMETER, "buffer": BUFFER, "constant": CONSTANT}


def entry_of_exported(program: ExportedProgram) -> Entry:
    """torchsmith's ExportedProgram -> Entry. Raises TypeError where an argument is a module, which a package cannot tell from others."""
    for name, value in zip(program.leaf_names, program.leaves, strict=True):
        if isinstance(value, torch.nn.Module):
            raise TypeError(f"{program.name}: argument {name} is a module: make it a submodule, or give its tensors as arguments")
    fg = program.functional
    rows = list(enumerate(program.inputs))
    specs = {i: r.spec for i, r in rows}
    by_leaf = {r.leaf: i for i, r in rows if r.kind == "user"}
    arguments = [
        Argument(name, by_leaf.get(k), specs[by_leaf[k]] if k in by_leaf else None, None if k in by_leaf else value)
        for k, (name, value) in enumerate(zip(program.leaf_names, program.leaves, strict=True))
    ]
    names: dict[int, list[str]] = {}  # tied weights have several
    for name, t in program.state_dict.items():
        names.setdefault(id(t), []).append(name)
    constants = [
        Constant(tuple(dict.fromkeys([r.name, *names.get(id(t), ())])), t.detach(), TYPES[r.kind], i)
        for i, r in rows if r.kind != "user" for t in [program.tensor_of(r)]
    ]  # fmt: skip
    known = {c.placeholder for c in constants} | set(by_leaf.values())
    constants += [c for c in lifted(fg, len(fg.inputs) - len(fg.consts)) if c.placeholder not in known]
    return Entry(
        program.name, fg, program.facts, tuple(arguments), tuple(constants),
        tuple(r.value if r.kind == "out" else None for r in program.outputs),
        tuple(None if r.kind == "out" else r.value for r in program.outputs),
        spec_text(program.in_spec), spec_text(program.out_spec), dict(program.symbol_names),
    )  # fmt: skip


@contextmanager
def reproduced(entry: Entry, s: Settings, given: Mapping[str, Any] | None) -> Iterator[None]:
    """Around a compilation: under dump_aoti_minifier a failure leaves a script that fails alike (aot/minify.py), its path on stderr.

    repro_level: 1 a script of the whole program where compiling fails, 2 a small one, 3 a script of the whole program always, 4 a small one
    also where the package computes something else than torch.
    """
    options = {k: v for k, v in (given or {}).items() if k.removeprefix(PREFIX) not in (*MINIFIER, "output_path", "package")}

    def write(is_shrunk: bool) -> None:
        file = settings.debug_dir() / "minifier" / f"{''.join(c if c.isalnum() else '_' for c in entry.name)}_repro.py"
        try:
            print(f"torchsmith: a script that fails alike: {minify(entry, file, options=options, is_shrunk=is_shrunk)}", file=sys.stderr)
        except Unsupported as e:
            print(f"torchsmith: no script that fails alike: {e}", file=sys.stderr)

    if not s.dump_aoti_minifier:
        yield
        return
    try:
        yield
    except Exception:
        write(s.repro_level in (2, 4))
        raise
    if s.repro_level >= 3:
        write(s.repro_level == 4)


def compile_model(entry: Entry, s: Settings, cpu: str) -> Model:
    options = replace(s.options, cpu=cpu)
    if s.device:
        entry = on_device(entry, s.device)
    more = {"keep_constants": s.keep_constants, "copy_inputs": s.copy_inputs, "metadata": s.metadata, "archs": s.cuda_archs}
    made = compile_entry(entry, options, **more)  # type: ignore[arg-type]
    if made.archs and s.format != "so":
        raise Unsupported("AOT045", detail=f"format={s.format!r}: a library for a GPU is a shared one")
    return made


def compile_part(entry: Entry, s: Settings) -> Part:
    """One model, for every processor asked for."""
    models: list[tuple[str, Model]] = []
    for cpu in s.cpu:
        models.append((cpu, compile_model(entry, s, cpu)))
    main = models[0][1]
    shared = (main.weights.id, main.weights.state)
    own = {cpu: m.weights for cpu, m in models[1:] if (m.weights.id, m.weights.state) != shared}
    return Part(tuple((cpu, m.library) for cpu, m in models), main.weights, own, main.cpu, metadata=s.metadata, archs=main.archs)


def aot_compile(
    model: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *, dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Compile to one model library, a .so that carries its weights; returns its path.

    options:
      "aot_inductor.output_path": where to write (default: a temporary folder)
      "aot_inductor.package": True: the result is meant for `package`
      "format": "so", "a" (a static library with NAME.h and NAME.weights beside it) or "c" (a folder with its sources)
      "cpu": processor target, such as "native" or "x86-64-v3"
      "device": "cuda": a program that was exported on the CPU is compiled for a GPU, which need not be here
      "cuda_archs": compute capabilities that a library for GPUs has machine code for, such as (80, 90); the least one's text is there
          too, which the driver compiles for other ones (default: 80, and that of the GPU at hand or 90)
      "keep_constants": keep the original weights beside the packed ones, so that some of them can be replaced
      "libtorch": "forbid" (the default: operators without generated code are refused) or "allow": they call the libtorch that has to
          be loaded in the process that runs the model
      "copy_inputs": inputs with other strides than those exported are copied instead of refused
      "aot_inductor.metadata": a dictionary of texts that get_metadata shows
    and every option of torchsmith.compile.
    """
    s = read_settings(options)
    if len(s.cpu) > 1:
        raise Unsupported("AOT051", detail="a library is for one processor; use compile_and_package for several")
    with torch.no_grad(), place_of(s.output_path or None, FILE_NAMES[s.format]) as path:
        entry = entry_of(model, args, kwargs, dynamic_shapes)
        with reproduced(entry, s, options):
            if s.format == "so":
                return write_library(path, compile_part(entry, s))
            compiled = compile_model(entry, s, s.cpu[0])
        return write_linkable(path, compiled, s)


FILE_NAMES = {"so": "model.so", "a": "model.a", "c": "model"}


def write_linkable(path: Path, m: Model, s: Settings) -> str:
    """A static library, or its sources, with NAME.h and NAME.weights beside or inside; every function's name starts with NAME_."""
    name = "".join(c if c.isalnum() else "_" for c in path.stem)
    if not name[:1].isalpha():
        raise Unsupported("AOT051", detail=f"{path.stem!r} is no start of a C name")
    folder = path if s.format == "c" else path.parent
    try:
        return _write_linkable(path, folder, name, m, s)
    except OSError as e:
        raise Unsupported("AOT030", detail=str(e)) from e


def _write_linkable(path: Path, folder: Path, name: str, m: Model, s: Settings) -> str:
    header, weights, options = folder / f"{name}.h", folder / f"{name}.weights", replace(s.options, cpu=s.cpu[0])
    with all_or_none((folder, path, header, weights)):
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text(emit_header(name), encoding="utf-8", errors="surrogateescape")
        if m.weights.size:
            replace_file(weights, lambda file: file.writelines(m.weights.chunks()), 0o666)
        if s.format == "c":
            write_sources(folder, m.texts, options, f"{name}_")
        else:
            library = build_archive(m.texts, options, f"{name}_")
            replace_file(path, lambda file: file.write(library), 0o666)
    return str(path)


def minify_program(program: Any, path: Any = None, *, inputs: Sequence[Any] | None = None, options: Mapping[str, Any] | None = None,
                   isolate: bool = False) -> str:  # fmt: skip
    """Shrink a program that fails to compile, or computes something else than torch, to a script that fails alike; returns its path.

    inputs: flat example arguments; isolate: run candidates in processes of their own, for failures that end the process.
    """
    with torch.no_grad():
        return minify(entry_of(program), path, inputs=inputs, options=options, isolate=isolate)


def compile_and_package(program: Any, *, package_path: Any = None, inductor_configs: Mapping[str, Any] | None = None) -> Any:
    """Compile an exported program and write it as a package; returns its path. `inductor_configs`: options of aot_compile.

    package_path: a path that ends with .pt2, a file object to write to (returned), or None for a temporary folder.
    """
    s = read_settings(inductor_configs)
    if hasattr(package_path, "write"):
        with work_folder("torchsmith-aot-") as folder:
            name = folder / "model.pt2"
            package_path.write(Path(compile_and_package(program, package_path=name, inductor_configs=inductor_configs)).read_bytes())
        return package_path
    if package_path is not None and not os.fspath(package_path).endswith(".pt2"):
        raise Unsupported("AOT051", detail=f"the path of a package ends with .pt2: {os.fspath(package_path)}")
    with torch.no_grad(), place_of(package_path, "model.pt2") as path:
        entry = entry_of(program)
        with reproduced(entry, s, inductor_configs):
            part = compile_part(entry, s)
        return write_package(path, {"model": part})


def package(path: str | os.PathLike[str], models: Mapping[str, Any], *, options: Mapping[str, Any] | None = None) -> str:
    """Write several models into one package. Values: libraries that aot_compile wrote, exported programs, or saved ones."""
    s = read_settings(options)
    if not isinstance(models, Mapping) or not models:
        raise TypeError(f"models is a dict from names to libraries or programs, not {models!r}")
    if not all(isinstance(name, str) for name in models):
        raise TypeError(f"models are named by strings, not by {next(n for n in models if not isinstance(n, str))!r}")
    parts: dict[str, Part] = {}
    for name, value in models.items():
        if isinstance(value, str | os.PathLike) and Path(value).suffix == ".so":
            parts[name] = read_library(value)
        else:
            with torch.no_grad():
                parts[name] = compile_part(entry_of(value), s)
    return write_package(path, parts)

