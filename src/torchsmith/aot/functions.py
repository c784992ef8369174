"""One compiled function ahead of time: `compiled.aot_compile((args, kwargs))`, kept as a package.

In: what torchsmith.compile was given, and an example call. Out: CompiledFunction, which `save_compiled_function` writes as an ordinary
package: compiler.load_compiled_function, load_package and all other loaders read it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..capture.entries import marks_of
from ..codes import Unsupported, define
from ..options import Options
from ..runtime.files import replace_file
from .archive import write_package
from .dims import Dim, ShapesCollection
from .exporting import export
from .front import Settings, compile_part, entry_of_exported
from .load import PackageError, load_package
from .program import ExportedProgram

define("AOT090", "a function that is compiled ahead of time computes no gradients", "call aot_compile under torch.no_grad()")


class CompiledFunction:
    """Call it as the function it was made of; an argument that does not fit the example's declarations is an error."""

    def __init__(self, write: Callable[[Path], object], name: str = "the package") -> None:
        """write: puts the package at the path that it is given. name: what messages call it."""
        folder = tempfile.TemporaryDirectory(prefix="torchsmith-aot-")
        weakref.finalize(self, folder.cleanup)  # by itself it would go with a ResourceWarning
        self._package = Path(folder.name) / "function.pt2"
        try:
            write(self._package)
            self._model = load_package(self._package)
        except PackageError as error:
            raise PackageError(str(error).replace(str(self._package), name), error.status) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def save_compiled_function(self, path: str | os.PathLike[str], external_data: Any = None) -> None:
        """Write the package. external_data: accepted; a package holds all that it needs."""
        with open(self._package, "rb") as package:
            replace_file(Path(path), lambda file: shutil.copyfileobj(package, file), 0o666)


def load_function(package: Any) -> CompiledFunction:
    """What save_compiled_function wrote, of a path or a file object."""
    if not hasattr(package, "read") and not isinstance(package, str | os.PathLike):
        raise TypeError(f"load_compiled_function takes a path or a binary file object, not {type(package).__name__}")

    def write(path: Path) -> None:
        with contextlib.nullcontext(package) if hasattr(package, "read") else open(package, "rb") as source, open(path, "wb") as file:
            shutil.copyfileobj(source, file)

    return CompiledFunction(write, str(getattr(package, "name", package)))


def compile_function(
    fn: Callable[..., Any], options: Options, dynamic: bool | None, example_inputs: tuple[Sequence[Any], Mapping[str, Any]]
) -> CompiledFunction:
    """`fn` for calls like the example: (args, kwargs). Sizes vary where tensors are marked dynamic, or everywhere under dynamic=True.

    Raises Unsupported for what cannot be captured whole, and where gradients would be needed (AOT090).
    """
    is_pair = isinstance(example_inputs, (tuple, list)) and len(example_inputs) == 2
    if not is_pair or not isinstance(example_inputs[0], (tuple, list)) or not isinstance(example_inputs[1], Mapping):
        raise TypeError("aot_compile takes one example call, a pair of arguments and keyword arguments: aot_compile(((x, y), {}))")
    args, kwargs = tuple(example_inputs[0]), dict(example_inputs[1])
    program = export(fn, args, kwargs, dynamic_shapes=_varying(args, kwargs, dynamic) if dynamic is not False else None)
    if torch.is_grad_enabled() and _needs_gradients(program, (args, kwargs)):
        raise Unsupported("AOT090", detail=program.name)
    with torch.no_grad():
        part = compile_part(entry_of_exported(program), Settings(options))
        return CompiledFunction(lambda path: write_package(path, {"model": part}))


def _needs_gradients(program: ExportedProgram, call: Any) -> bool:
    tensors = [*pytree.tree_leaves(call), *program.state_dict.values(), *program.constants.values()]
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _varying(args: Any, kwargs: Any, dynamic: bool | None) -> ShapesCollection | None:
    """Dimensions that marks name, ours and torch.compile's; all under dynamic=True."""
    shapes, found = ShapesCollection(), False
    for t in pytree.tree_leaves((args, kwargs)):
        if not isinstance(t, torch.Tensor):
            continue
        marked, hints, static = marks_of(t)
        rows: dict[int, Any] = dict.fromkeys(range(t.dim()) if dynamic else sorted(hints), Dim.AUTO)
        rows |= {d: Dim.DYNAMIC(min=low if low > 1 else None, max=high) for d, (low, high) in marked.items()}
        for d in static:
            rows.pop(d, None)
        if rows:
            shapes[t], found = rows, True
    return shapes if found else None
