"""Backends by name: `(GraphModule, example_inputs) -> callable`, registered here or found through entry points.

In: a name, a callable or a string "module.function". Out: what `compile(backend=...)` hands to the pipeline. The names inductor
(ours), eager and aot_eager belong to the pipeline itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

Backend = Callable[..., Any]
BUILTIN = {"inductor": (), "eager": ("debug",), "aot_eager": ("debug",)}
GROUPS = ("torchsmith_backends", "torch_dynamo_backends")
DEFAULT: list[Any] = ["inductor"]  # what the name "inductor" stands for in compile(); set_default_backend changes it
BACKENDS: dict[str, tuple[Backend, tuple[str, ...]]] = {}


class InvalidBackend(RuntimeError):
    """No backend of that name."""


def register_backend(compiler_fn: Backend | None = None, name: str | None = None, tags: Sequence[str] = ()) -> Any:
    """Make `compiler_fn` known by its name; also a decorator, with or without arguments."""
    if compiler_fn is None:
        return lambda fn: register_backend(fn, name, tags)
    if not callable(compiler_fn):
        raise TypeError(f"a backend is callable, not {type(compiler_fn).__name__}")
    key = name or compiler_fn.__name__
    if key in BUILTIN or (key in BACKENDS and BACKENDS[key][0] is not compiler_fn):
        raise ValueError(f"backend {key!r} exists already")
    BACKENDS[key] = compiler_fn, tuple(tags)
    return compiler_fn


@cache
def _from_packages() -> dict[str, EntryPoint]:
    """Backends that installed packages offer."""
    found: dict[str, EntryPoint] = {}
    for group in GROUPS:
        for point in entry_points(group=group):
            found.setdefault(point.name, point)
    return found


def list_backends(exclude_tags: Sequence[str] | None = ("debug", "experimental")) -> list[str]:
    """Names that `backend=` takes, without those carrying one of `exclude_tags`."""
    excluded = set(exclude_tags or ())
    names = [n for n, tags in BUILTIN.items() if not excluded.intersection(tags)]
    names += [n for n, (_, tags) in BACKENDS.items() if not excluded.intersection(tags)]
    return sorted({*names, *_from_packages()})


def lookup_backend(name: str | Backend) -> Backend:
    """The callable registered under `name`."""
    if callable(name):
        return name
    if name in BACKENDS:
        return BACKENDS[name][0]
    point = _from_packages().get(name)
    if point is None:
        known = ", ".join(list_backends(exclude_tags=None))
        raise InvalidBackend(f"unknown backend {name!r}; known: {known}. Register one with torchsmith.compiler.register_backend")
    loaded: Backend = point.load()
    BACKENDS[name] = loaded, ()
    return loaded


def resolve_backend(backend: Any) -> Any:
    """What compile() keeps: a built-in name as it is, everything else as a callable. Raises InvalidBackend now, not at the first call."""
    if backend == "inductor":
        backend = DEFAULT[0]
    if isinstance(backend, str):
        return backend if backend in BUILTIN else lookup_backend(backend)
    if not callable(backend):
        raise TypeError(f"backend must be a name or a callable, not {type(backend).__name__}")
    return backend
