"""Backends by name: one table of rows, what the user registers, and entry points of installed packages.

In: a name, a callable, or either with options. Out: what `compile(backend=...)` hands to the pipeline: a Choice.

A row says what a backend takes (its dialect):
  native      our own compiler; the pipeline runs it itself
  captured    the captured graph: (GraphModule, example_inputs) -> callable, as torch.compile's custom backends (partners.py)
  functional  ATen on values: (FunctionalGraph, name, **options) -> callable (graph/spec.py); write-backs and aliases are done around it.
              Where gradients flow it gets the forward and the backward graph one after the other; a backend that treats them otherwise
              has attributes `forward` and `backward` of the same signature
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any

from ..options import MODES, is_known

Backend = Callable[..., Any]
OWN, PARTNERS = "torchsmith_backends", "torch_dynamo_backends"  # entry-point groups: written for us, written for torch.compile
DEFAULT: list[Any] = ["inductor"]  # what the name "inductor" stands for in compile(); set_default_backend changes it


class InvalidBackend(RuntimeError):
    """No backend of that name, or its package is not installed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One built-in backend. `at` is "module:function" below this package, imported when the backend is first used."""

    dialect: str
    at: str = ""
    needs: tuple[str, ...] = ()  # modules that must be installed
    install: str = ""  # the command that installs them
    tags: tuple[str, ...] = ()
    options: tuple[str, ...] | None = ()  # names that its `options` may have; None: its package knows


_TENSORRT = "pip install torch-tensorrt"
_IPEX = "pip install intel-extension-for-pytorch"
ROWS: dict[str, Row] = {
    "inductor": Row("native"),
    "torchsmith": Row("native"),
    "eager": Row("captured", tags=("debug",)),
    "aot_eager": Row("functional", "debugging:aot_eager", tags=("debug",)),
    "aot_eager_decomp_partition": Row("functional", "debugging:aot_eager_decomp_partition", tags=("debug",)),
    "cudagraphs": Row("native"),
    "openxla": Row("functional", "xla:compile_xla", ("jax", "torchax"), "pip install jax torchax"),
    "openxla_eval": Row("functional", "xla:compile_xla", ("jax", "torchax"), "pip install jax torchax", ("experimental",)),
    "onnxrt": Row("functional", "onnxrt:compile_onnxrt", ("onnxruntime", "onnxscript"), "pip install onnxruntime onnxscript",
                  options=("providers",)),
    "openvino": Row("functional", "openvino:compile_openvino", ("openvino",), "pip install openvino", options=("device", "config")),
    "tvm": Row("functional", "tvm:compile_tvm", ("tvm",), "pip install apache-tvm", options=("target",)),
    "ipex": Row("captured", "partners:ipex", ("intel_extension_for_pytorch",), _IPEX, options=None),
    "tensorrt": Row("captured", "partners:tensorrt", ("torch_tensorrt",), _TENSORRT, options=None),
    "torch_tensorrt": Row("captured", "partners:tensorrt", ("torch_tensorrt",), _TENSORRT, ("experimental",), None),
}
# torch.compile's names for more ways to run a captured graph by torch itself; here they are one.
SAME_AS = {"eager_debug": "eager", "eager_noexcept": "eager", "pre_dispatch_eager": "eager"}
BACKENDS: dict[str, tuple[Backend, tuple[str, ...]]] = {}


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend as the pipeline takes it: `name` for people, its dialect, the function (None: the pipeline's own), and what the user passed
    to it (`mode` and `options` of compile, forwarded as keywords where they are given)."""

    name: str
    dialect: str
    fn: Backend | None = None
    keywords: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *args: Any, part: str = "__call__") -> Any:
        """What the backend gives; `part` "forward" or "backward" where gradients flow."""
        assert self.fn is not None
        asked = self.fn if part == "__call__" else getattr(self.fn, part, self.fn)
        return asked(*args, **dict(self.keywords))

    def __reduce__(self) -> Any:
        by_name = self.name in ROWS or self.name in BACKENDS
        return _choice_again, (self.name if by_name else self.fn, self.keywords)


def _choice_again(backend: Any, keywords: tuple[tuple[str, Any], ...]) -> Choice:
    made = resolve_backend(backend)
    return Choice(made.name, made.dialect, made.fn, keywords)


def register_backend(compiler_fn: Backend | None = None, name: str | None = None, tags: Sequence[str] = ()) -> Any:
    """Make `compiler_fn` known by its name; also a decorator, with or without arguments."""
    if compiler_fn is None:
        return lambda fn: register_backend(fn, name, tags)
    if not callable(compiler_fn):
        raise TypeError(f"a backend is callable, not {type(compiler_fn).__name__}")
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"a backend's name is a string of one letter at least, not {name!r}")
    key = name or str(getattr(compiler_fn, "__name__", type(compiler_fn).__name__))
    if key in ROWS or (key in BACKENDS and BACKENDS[key][0] is not compiler_fn):
        raise ValueError(f"backend {key!r} exists already")
    BACKENDS[key] = compiler_fn, tuple(tags)
    return compiler_fn


@dataclass(frozen=True, slots=True)
class AtenBackend:
    """A functional backend made of compilers of ATen graphs (backends/aten.py)."""

    inference_compiler: Backend
    fw_compiler: Backend
    bw_compiler: Backend
    decompositions: tuple[tuple[Any, Callable[..., Any]], ...] = ()
    dialect: str = "functional"

    def _by(self, compiler: Backend, fg: Any, name: str) -> Any:
        return import_module(".aten", __package__).compile_aten(compiler, dict(self.decompositions), fg, name)

    def __call__(self, fg: Any, name: str) -> Any:
        return self._by(self.inference_compiler, fg, name)

    def forward(self, fg: Any, name: str) -> Any:
        return self._by(self.fw_compiler, fg, name)

    def backward(self, fg: Any, name: str) -> Any:
        return self._by(self.bw_compiler, fg, name)


def aot_autograd(
    *, fw_compiler: Backend, bw_compiler: Backend | None = None, inference_compiler: Backend | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> AtenBackend:  # fmt: skip
    """A backend of compilers `(GraphModule, example_inputs) -> callable` that take ATen graphs on values.

    fw_compiler: forward graphs where gradients flow; bw_compiler: their backward graphs; inference_compiler: all others. The last two are
    fw_compiler where not given. decompositions: ATen overload -> Python function that writes it out. Raises TypeError for what cannot be
    called.
    """
    for name, compiler in (("fw_compiler", fw_compiler), ("bw_compiler", bw_compiler), ("inference_compiler", inference_compiler)):
        if not callable(compiler) and (compiler is not None or name == "fw_compiler"):
            raise TypeError(f"{name} is callable, not {type(compiler).__name__}")
    return AtenBackend(inference_compiler or fw_compiler, fw_compiler, bw_compiler or fw_compiler, tuple((decompositions or {}).items()))


@cache
def _from_packages() -> dict[str, EntryPoint]:
    """Backends that installed packages offer, those written for us first."""
    found: dict[str, EntryPoint] = {}
    for group in (OWN, PARTNERS):
        for point in entry_points(group=group):
            found.setdefault(point.name, point)
    return found


def list_backends(exclude_tags: Sequence[str] | None = ("debug", "experimental")) -> list[str]:
    """Names that `backend=` takes, without those carrying one of `exclude_tags`. A listed backend may still need its package: the error
    that its use raises names it."""
    excluded = {exclude_tags} if isinstance(exclude_tags, str) else set(exclude_tags or ())
    names = [n for n in (*ROWS, *SAME_AS) if not excluded.intersection(ROWS[SAME_AS.get(n, n)].tags)]
    names += [n for n, (_, tags) in BACKENDS.items() if not excluded.intersection(tags)]
    return sorted({*names, *(n for n in _from_packages() if n not in ROWS)})


def _known(name: str) -> str:
    return _near(name, list_backends(exclude_tags=None))


def is_installed(row: Row) -> bool:
    return not _missing(row)


def _missing(row: Row) -> list[str]:
    return [m for m in row.needs if m not in sys.modules and importlib.util.find_spec(m) is None]


def with_versions(name: str, error: BaseException) -> str:
    """What to add where a package of a built-in backend lacks what we use of it: the versions, and the command that brings newer ones."""
    row = ROWS.get(name)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (ImportError, AttributeError)):
        cause = cause.__cause__
    if row is None or not row.needs or cause is None:
        return ""
    found = []
    for package in row.needs:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} of no known version")
    return f" (with {', '.join(found)}; other versions may be needed: {row.install.replace('install', 'install -U')})"


@cache
def _from_row(name: str) -> Backend | None:
    row = ROWS[name]
    missing = _missing(row)
    if missing:
        raise InvalidBackend(f"backend {name!r} needs the package{'s' * (len(missing) > 1)} {' and '.join(missing)}: {row.install}")
    if not row.at:
        return None
    module, function = row.at.split(":")
    found: Backend = getattr(import_module(f".{module}", __package__), function)
    return found


def lookup_backend(name: str | Backend) -> Backend:
    """The backend of that name as `(GraphModule, example_inputs, **keywords) -> callable`, for backends that hand graphs on. Raises
    InvalidBackend, TypeError."""
    if callable(name):
        return name
    if not isinstance(name, str):
        raise TypeError(f"backend must be a name or a callable, not {type(name).__name__}")
    found = choose(name)
    if found.dialect == "captured" and found.fn is not None:
        return found.fn

    def compiled(gm: Any, example_inputs: Sequence[Any], **keywords: Any) -> Backend:
        made: Backend = import_module("..api", __package__).compile(gm, backend=found, **keywords)
        return made

    compiled.__name__ = name
    return compiled


def choose(name: str) -> Choice:
    """The row, the registered backend or the package's entry point called `name`."""
    if name in BACKENDS:
        return Choice(name, dialect_of(BACKENDS[name][0]), BACKENDS[name][0])
    name = SAME_AS.get(name, name)
    if name in ROWS:
        return Choice(name, ROWS[name].dialect, _from_row(name))
    theirs = getattr(sys.modules.get("torch._dynamo.backends.registry"), "_COMPILER_FNS", {}).get(name)
    if theirs is not None:  # registered with PyTorch's own compiler
        return Choice(name, dialect_of(theirs), theirs)
    point = _from_packages().get(name)
    if point is None:
        known = _known(name)
        end = "" if known.endswith("?") else "."
        raise InvalidBackend(f"unknown backend {name!r}; {known}{end} Register one with torchsmith.compiler.register_backend")
    loaded = _load(point)
    return Choice(name, dialect_of(loaded), loaded)


def _load(point: EntryPoint) -> Backend:
    """What an entry point names. Raises InvalidBackend where a package promises what it does not have."""
    at = f"backend {point.name!r} is the entry point {point.value} of the package {point.dist.name if point.dist else 'that offers it'}"
    try:
        loaded: Backend = point.load()
    except Exception as error:  # a package may raise anything
        raise InvalidBackend(f"{at}, which raised {type(error).__name__}: {error}") from error
    if not callable(loaded):
        raise InvalidBackend(f"{at}, which is of type {type(loaded).__name__} and cannot be called")
    return loaded


def dialect_of(fn: Backend) -> str:
    """A backend written for us says what it takes by an attribute, `fn.dialect = "functional"`."""
    found = getattr(fn, "dialect", "captured")
    return found if found in ("captured", "functional") else "captured"


def resolve_backend(backend: Any, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Choice:
    """What compile() keeps. Raises InvalidBackend now, not at the first call.

    Our own compiler reads mode and options itself; any other backend gets them as keywords, where they are given.
    """
    if isinstance(backend, Choice):
        return backend
    if backend is None or backend == "inductor":
        backend = DEFAULT[0]
    if isinstance(backend, Choice):
        made = backend
    elif isinstance(backend, str):
        made = choose(backend)
    elif callable(backend):
        made = Choice(getattr(backend, "__name__", type(backend).__name__), dialect_of(backend), backend)
    else:
        raise TypeError(f"backend must be a name or a callable, not {type(backend).__name__}")
    if made.dialect == "native":
        return made
    if made.name in ROWS:
        _check(made.name, mode, options or {})
    elif not _takes(made.fn, "options") and (unknown := [k for k in options or {} if not is_known(k)]):
        raise RuntimeError(f"backend {made.name!r} takes no options, and {unknown[0]!r} is none of torchsmith's")
    given = {k: v for k, v in (("mode", mode), ("options", dict(options) if options else None)) if v is not None and _takes(made.fn, k)}
    return Choice(made.name, made.dialect, made.fn, tuple(given.items()))


def _check(name: str, mode: str | None, options: Mapping[str, Any]) -> None:
    """Raises RuntimeError for a mode or an option that a backend of ours does not have."""
    known = ROWS[name].options
    if known is None:
        return
    if mode is not None and mode not in MODES:
        raise RuntimeError(f"unknown mode {mode!r}; {_near(str(mode), MODES)}")
    for key in options:
        if not isinstance(key, str):
            raise TypeError(f"names of options are strings, not {key!r}")
        if key not in known and not is_known(key):
            says = f"its options are {', '.join(known)}" if known else "it has no options of its own"
            raise RuntimeError(f"backend {name!r}: unknown option {key!r}; {_near(key, known, says)}")


def _near(word: str, known: Collection[str], otherwise: str = "") -> str:
    spelt = {n.lower(): n for n in known}
    close = difflib.get_close_matches(word.lower(), spelt, 1)
    return f"did you mean {spelt[close[0]]!r}?" if close else otherwise or f"known: {', '.join(known)}"


def _takes(fn: Any, keyword: str) -> bool:
    """May `fn` be called with this keyword? What does not say is believed to."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is p.VAR_KEYWORD or p.name == keyword for p in parameters)
