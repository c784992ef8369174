"""load_package: a file -> a callable with the original signature; with torch, or with NumPy or DLPack alone.

In: path of a package (.pt2) or of a model library (.so). Out: PackagedModel.
"""

from __future__ import annotations

import difflib
import json
import shutil
import sys
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from ..codes import Unsupported, define
from ..runtime.package import Loaded, PackageError, use_torch
from .tree import Spec, UnknownNode, constant_text, read_spec, unplain

define("AOT041", "constants that the caller keeps (user_managed) are not offered: a package copies and packs what it is given",
       "leave user_managed at False, and load again after a change")

NO_SUCH_NAME = 15  # TSM_ERROR_NAME of csrc/include/torchsmith/model.h

__all__ = ["PackageError", "PackagedModel", "load_package"]


class PackagedModel:
    """A compiled model: call it like the module it was made of. Several threads may call it at once."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.info = info = loaded.info
        self._arguments: list[Any] = info["arguments"]
        self._tensors = [i for i, (_, kind, _) in enumerate(self._arguments) if kind is not None]
        self._constants = [(i, name, constant_text(value)) for i, (name, kind, value) in enumerate(self._arguments) if kind is None]
        self._returned: list[int | None] = info["returned"]
        self._values: list[Any] = [unplain(v) for v in info["outputs"]]
        self._in = _spec(info["in_spec"])
        self._out = _spec(info["out_spec"])
        self._plain = self._positional()
        self._single = info["out_spec"][1]["type"] is None and not any(v is not None for v in self._values)

    def _positional(self) -> int:
        """How many arguments a call has when all of them are positional tensors, or -1."""
        spec = self._in
        if not isinstance(spec, Spec) or self._constants or len(spec.children) != 2 or spec.children[1].children:
            return -1
        flat = all(c.kind is None for c in spec.children[0].children)
        return len(spec.children[0].children) if flat else -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: Sequence[Any] = args if len(args) == self._plain and not kwargs else self._flatten(args, kwargs)
        torch = sys.modules.get("torch")
        if torch is not None and (not tensors or isinstance(tensors[0], torch.Tensor)):
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors if isinstance(t, torch.Tensor)):
                tensors = [t.detach() for t in tensors]
            out = self._loaded.run_torch(tensors) if use_torch() else []
        else:
            if torch is not None:  # arrays and tensors together: DLPack passes negated memory on as it is
                lazy = [i for i, t in enumerate(tensors) if isinstance(t, torch.Tensor) and (t.is_neg() or t.is_conj())]
                if lazy:
                    why = "its memory holds negated or conjugated values: call resolve_neg() or resolve_conj()"
                    raise PackageError(f"input {lazy[0]}: {why}", 1)
            out = self._loaded.run(tensors)
        if self._single:
            return out[0]
        leaves = [self._leaf(o, r, v) for o, r, v in zip(out, self._returned, self._values, strict=True)]
        return self._unflatten(leaves)

    def run_flat(self, tensors: Sequence[Any]) -> list[Any]:
        """Arrays or tensors in the order of info["inputs"] -> the flat results."""
        return self._loaded.run(tensors)

    def _leaf(self, value: Any, returned: int | None, constant: Any) -> Any:
        if returned is None:
            return constant
        if self.info["results"][returned]["kind"] == "number":
            return value.item()
        return value

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if isinstance(self._in, Spec):
            if len(self._in.children) == 2:
                self._check_count(args, kwargs)
            try:
                leaves = list(self._in.flatten((args, kwargs)))
            except ValueError as e:
                raise TypeError(f"{self.info['name']}: the arguments differ from those it was exported with: {e}") from None
        else:
            try:
                leaves = self._in[0]((args, kwargs))
            except ValueError as e:
                raise TypeError(f"{self.info['name']}: the arguments differ from those it was exported with: {e}") from None
        for i, name, text in self._constants:
            if repr(leaves[i]) != text:
                raise ValueError(f"{self.info['name']} was exported with {name}={text}; it cannot be called with {leaves[i]!r}")
        return [leaves[i] for i in self._tensors]

    def _check_count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(self._in, Spec)
        positional, keywords = self._in.children
        n, names = len(positional.children), keywords.keys
        if len(args) != n or set(kwargs) != set(names):
            wanted = ", ".join([f"{n} positional argument{'s' if n != 1 else ''}", *(f"{k}=" for k in names)])
            given = ", ".join([str(len(args)), *(f"{k}=" for k in kwargs)])
            raise TypeError(f"{self.info['name']}: a call takes what it was exported with, {wanted}; it was given {given}")

    def _unflatten(self, leaves: list[Any]) -> Any:
        return self._out.unflatten(iter(leaves)) if isinstance(self._out, Spec) else self._out[1](leaves)

    def get_metadata(self) -> dict[str, Any]:
        """What is known of the model: shapes, ranges, processor, version."""
        return {k: v for k, v in self.info.items() if k not in ("in_spec", "out_spec", "results", "returned", "arguments", "outputs")}

    def get_constant_fqns(self) -> list[str]:
        """Names of the weights and buffers, as in the module."""
        return [c["name"] for c in self.info["constants"]]

    def load_constants(
        self, values: Mapping[str, Any], *, check_full_update: bool = False, user_managed: bool = False, allow_h2d_copy: bool = False
    ) -> None:
        """New weights by name; they are copied. Calls that run meanwhile see all old values or all new ones."""
        if user_managed:
            raise Unsupported("AOT041")
        if not isinstance(values, Mapping):
            raise TypeError(f"load_constants takes a dict from names to tensors or arrays, not {type(values).__name__}")
        known = self.get_constant_fqns()
        if odd := [name for name in values if not isinstance(name, str)]:
            raise TypeError(f"constants are named by strings, not by {odd[0]!r}")
        missing = [n for n in known if n not in values]
        if check_full_update and missing:
            raise PackageError(f"constants are missing for a full update: {', '.join(missing)}", 14)
        try:
            self._loaded.load_constants(values)
        except PackageError as e:
            near = [m for name in values if name not in known for m in difflib.get_close_matches(name, known, 1)]
            if e.status != NO_SUCH_NAME or not near:
                raise
            raise PackageError(f"{e}; did you mean {near[0]}?", e.status) from None


def _spec(given: Any) -> Spec | tuple[Callable[[Any], list[Any]], Callable[[list[Any]], Any]]:
    """Our reader of nested arguments; torch's, where a type is registered with it only."""
    try:
        return read_spec(given)
    except UnknownNode as node:
        try:
            pytree = import_module("torch.utils._pytree")
            spec = pytree.treespec_loads(json.dumps(given))
        except (ImportError, NotImplementedError) as error:
            why = f"arguments or results are of the type {node}, which torch's pytree does not know here: import its library first, "
            raise PackageError(why + "or export a model that takes and returns tuples, lists and dictionaries") from error
        return (lambda value: list(_leaves(pytree, spec, value))), (lambda leaves: pytree.tree_unflatten(leaves, spec))


def _leaves(pytree: Any, spec: Any, value: Any) -> Iterator[Any]:
    """Leaves of `value` in the order of `spec`, as Spec.flatten: ValueError where the types, keys or fields differ."""
    if spec.is_leaf():
        if pytree._get_node_type(value) in pytree.SUPPORTED_NODES:
            raise ValueError(f"one tensor or number expected, got a {type(value).__name__}")
        yield value
        return
    children = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    kind = pytree._get_node_type(value)
    if kind is not spec.type:
        raise ValueError(f"a {spec.type.__name__} expected, got a {type(value).__name__}")
    if kind in (dict, OrderedDict, defaultdict):  # in any order
        keys = spec.context[1] if kind is defaultdict else spec.context
        if set(value) != set(keys):
            wanted, given = (", ".join(map(repr, names)) or "nothing" for names in (keys, value))
            raise ValueError(f"a dictionary of {wanted} expected, got one of {given}")
        parts = [value[k] for k in keys]
    else:
        parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        if context != spec.context or len(parts) != len(children):
            raise ValueError(f"a {kind.__name__} of other parts than the one given was exported: {spec.context!r}, not {context!r}")
    for child, part in zip(children, parts, strict=True):
        yield from _leaves(pytree, child, part)


def load_package(
    path: Any, model_name: str = "model", *, run_single_threaded: bool = False, num_runners: int = 1,
    device_index: int = -1, verify: bool = False,
) -> PackagedModel:  # fmt: skip
    """Load one model of a package, or a model library: of a path, or of a file object that holds a package.

    run_single_threaded: kernels run on the calling thread. num_runners: accepted; a model serves any number of threads. device_index: the
    device that a package for CUDA runs on (-1: the current one). verify: check the weights too, which reads all of them (code and manifest
    are always checked). Raises PackageError.
    """
    if num_runners < 1:
        raise ValueError(f"num_runners must be at least 1, not {num_runners}")
    if device_index < -1:
        raise ValueError(f"device_index must be -1 or the number of a device, not {device_index}")

    def opened(file: Any) -> PackagedModel:
        loaded = Loaded(file, model_name, threads=1 if run_single_threaded else 0, verify=verify, device=device_index + 1)
        return PackagedModel(loaded)

    if hasattr(path, "read"):
        with tempfile.NamedTemporaryFile(prefix="torchsmith-", suffix=".pt2") as file:  # what is mapped of it stays
            shutil.copyfileobj(path, file)
            file.flush()
            return opened(file.name)
    return opened(path)
