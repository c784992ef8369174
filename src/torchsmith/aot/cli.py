"""`python -m torchsmith aot compile|minify|inspect|run|bench|paths`.

In: command-line arguments. Out: text, files, an exit status: 0 well, 1 the work failed (reason on stderr), 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..codes import Unsupported
from ..runtime.model_library import paths
from ..runtime.package import NEEDS_LIBTORCH, PackageError
from .inspect import inspect_text, verify
from .load import PackagedModel, load_package

NUMPY_TYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8",
    "bool": "bool", "u16": "uint16", "u32": "uint32", "u64": "uint64", "c64": "complex64", "c128": "complex128",
}  # fmt: skip
NOT_NEEDED_TO_RUN = ("torch", "safetensors")


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(list(argv))
    work: Callable[[argparse.Namespace], int] = args.work
    try:
        return work(args)
    except ModuleNotFoundError as e:
        if e.name not in NOT_NEEDED_TO_RUN:
            raise
        print(f"error: {args.command} needs {e.name}, which is not installed (running packages does not)", file=sys.stderr)
        return 1
    except (Unsupported, PackageError, OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Says which commands there are where one is unknown."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"argument (aot|command): invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message)
        if found:
            message = f"unknown command {found[2]!r}; commands are {found[3].replace(chr(39), '')}"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m torchsmith")
    parser.add_argument("--version", action="version", version=f"torchsmith {__version__}")
    aot = parser.add_subparsers(dest="room", metavar="aot", required=True).add_parser("aot", help="packages of compiled models")
    sub = aot.add_subparsers(dest="command", required=True)
    p = sub.add_parser("compile", help="compile a saved exported program to a package or a library")
    p.add_argument("program", help="file that torchsmith.export.save or torch.export.save wrote")
    p.add_argument("-o", "--output", required=True, help="path ending with .pt2, .so or .a; with --option format=c a folder")
    p.add_argument("--cpu", action="append", help="native, x86-64-v3, x86-64-v4, ...; several make variants in one package")
    p.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of torchsmith.compile")
    p.set_defaults(work=_compile)
    p = sub.add_parser("minify", help="shrink a program that fails to compile, or computes something else than torch, to a small script")
    p.add_argument("program", help="file that torchsmith.export.save or torch.export.save wrote")
    p.add_argument("-o", "--output", default="repro.py", help="the script (default: repro.py)")
    p.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option with which it fails")
    p.add_argument("--isolate", action="store_true", help="run candidates in processes of their own: for failures that end the process")
    p.set_defaults(work=_minify)
    p = sub.add_parser("inspect", help="what a package holds; its digests are verified")
    p.add_argument("package")
    p.add_argument("--json", action="store_true")
    p.set_defaults(work=_inspect)
    p = sub.add_parser("run", help="run a model on arrays")
    p.add_argument("package")
    p.add_argument("inputs", nargs="*", help=".npy files in order, or one .npz with the inputs' names")
    p.add_argument("-o", "--output", help=".npz for the results (default: print them)")
    _common(p)
    p.set_defaults(work=_run)
    p = sub.add_parser("bench", help="time calls on random inputs of the smallest and largest sizes, or of --size")
    p.add_argument("package")
    p.add_argument("--size", action="append", default=[], metavar="NAME=N", help="value of a dimension that varies")
    p.add_argument("--seconds", type=float, default=1.0)
    _common(p)
    p.set_defaults(work=_bench)
    p = sub.add_parser("paths", help="where the C headers, the CMake config and the pkg-config file are")
    p.add_argument("what", choices=("include", "cmake", "pkgconfig"))
    p.set_defaults(work=_paths)
    return parser


def _common(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="model", help="name inside the package")
    p.add_argument("--threads", type=int, default=0)


def _load(args: argparse.Namespace) -> PackagedModel:
    def load() -> PackagedModel:
        return load_package(args.package, args.model, run_single_threaded=args.threads == 1)

    try:
        return load()
    except PackageError as e:
        if e.status != NEEDS_LIBTORCH:
            raise
    import_module("torch")  # its operators are part of the model
    return load()


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in args.option:
        name, _, value = text.partition("=")
        options[name] = json.loads(value) if value[:1] in '0123456789-tfn["' else value
    return options


def _minify(args: argparse.Namespace) -> int:
    front = import_module("torchsmith.aot.front")  # needs torch
    print(front.minify_program(args.program, args.output, options=_options(args), isolate=args.isolate))
    return 0


def _compile(args: argparse.Namespace) -> int:
    front = import_module("torchsmith.aot.front")  # needs torch
    options: dict[str, Any] = {"cpu": args.cpu or ["native"], **_options(args)}
    if args.output.endswith(".a"):
        options.setdefault("format", "a")
    if args.output.endswith(".so") or "format" in options:
        options["aot_inductor.output_path"] = args.output
        print(front.aot_compile(args.program, options=options))
    else:
        print(front.compile_and_package(args.program, package_path=args.output, inductor_configs=options))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    found = verify(args.package)
    print(json.dumps(found, indent=1, default=str) if args.json else inspect_text(found))
    return 0 if found["verified"] else 1


def _stored(np: Any, path: str) -> Any:
    """What numpy.save or numpy.savez wrote. Raises ValueError in plain words: NumPy's own advise to load it unsafely."""
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{path} is no file of numbers that numpy.save or numpy.savez wrote") from None


def _run(args: argparse.Namespace) -> int:
    np = import_module("numpy")
    model = _load(args)
    inputs = model.info["inputs"]
    arrays = [_stored(np, p) for p in args.inputs]
    archive = next((p for p, a in zip(args.inputs, arrays, strict=True) if not isinstance(a, np.ndarray)), None)
    if archive is not None and len(arrays) > 1:
        raise ValueError(f"{archive} holds several arrays: give it alone, or a file for each input")
    if archive is not None:
        held = arrays[0]
        missing = [r["name"] for r in inputs if r["name"] not in held]
        if missing:
            raise ValueError(f"{archive} lacks {', '.join(missing)}; it has {', '.join(held)}")
        arrays = [held[r["name"]] for r in inputs]
    outputs = model.run_flat(arrays)
    named = {f"output{i}": np.asarray(o) for i, o in enumerate(outputs) if o is not None}
    kinds = [text.partition(" ")[0] for text in model.info["described_outputs"]]
    for name, value in named.items():
        if kinds[int(name.removeprefix("output"))] == "bf16" and value.dtype.itemsize == 2:  # NumPy has no such type
            named[name] = (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if args.output:
        np.savez(args.output, **named)
    else:
        for name, value in named.items():
            print(f"{name} {value.dtype} {list(value.shape)}\n{value}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    model = _load(args)
    ranges = model.info["ranges"]
    wrong = [t for t in args.size if not t.partition("=")[2].isdigit()]
    if wrong:
        raise ValueError(f"--size takes NAME=N, not {wrong[0]}")
    given = {n: int(v) for n, _, v in (t.partition("=") for t in args.size)}
    unknown = set(given) - set(ranges)
    if unknown:
        raise ValueError(f"no dimension is called {', '.join(sorted(unknown))}; the model has {', '.join(ranges) or 'none'}")
    cases = [given] if given or not ranges else [{}, {n: hi if hi is not None else max(lo, 64) for n, (lo, hi) in ranges.items()}]
    for case in cases:
        sizes = {n: max(lo, 1) for n, (lo, _) in ranges.items()} | case
        arrays = [_random(r, sizes) for r in model.info["inputs"]]
        text = ", ".join(f"{n}={v}" for n, v in sizes.items()) or "fixed sizes"
        try:
            seconds, calls = _time(model, arrays, args.seconds)
        except PackageError as e:
            if case == cases[-1]:
                raise
            print(f"{text}: {e}")
            continue
        print(f"{text}: median {seconds * 1e6:.2f} us a call ({calls} calls)")
    return 0


def _random(row: dict[str, Any], sizes: dict[str, int]) -> Any:
    np = import_module("numpy")
    shape = [n if isinstance(n, int) else int(_evaluate(n, sizes)) for n in row["shape"]]
    kind = np.dtype(NUMPY_TYPES[row["dtype"]])
    if kind.kind in "iu":
        return np.zeros(shape, kind)  # indices: any value but zero may be out of range
    return np.random.default_rng(0).standard_normal(shape).astype(kind)


def _evaluate(text: str, sizes: dict[str, int]) -> int:
    """A derived size such as "(batch * 2)"."""
    words = text.replace("(", " ( ").replace(")", " ) ").split()
    allowed = {"+", "-", "*", "//", "%", "(", ")"}
    if not all(w in allowed or w in sizes or w.lstrip("-").isdigit() for w in words):
        raise ValueError(f"the size {text} needs a value: --size NAME=N")
    return int(eval(" ".join(str(sizes.get(w, w)) for w in words), {"__builtins__": {}}))


def _time(model: PackagedModel, arrays: list[Any], seconds: float) -> tuple[float, int]:
    for _ in range(3):
        model.run_flat(arrays)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        model.run_flat(arrays)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2], len(times)


def _paths(args: argparse.Namespace) -> int:
    print(Path(paths()[args.what]))
    return 0
