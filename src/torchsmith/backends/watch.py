"""What a backend compiled, watched: its results are held against what the graph gives, and what it raises is named.

In: a call, what its results must be, the same graph by torch's operators. Out: a call. Results are looked at once for each set of sizes.
Where they are wrong, or the call raises, torch runs the graph for these sizes from then on: a warning and an event (BCK003) name backend
and reason. It is an error under fullgraph. Nothing happens twice: what the first call for some sizes wrote and drew is taken back; where
that cannot be, and in later calls that may have written or drawn, the backend's exception reaches the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import events
from ..codes import BackendFailed, Unsupported, keep_as_backends
from ..graph.eager import symbol_values
from ..graph.spec import ASSUMED, FreshOutput, FunctionalGraph, InputOutput, TensorSpec, ViewOutput
from ..graph.tracing import device_of
from ..ir.expr import Const, Expr, Sym
from ..ir.nested import leaves
from ..ir.number import number_of
from ..runtime.draws import generator_states, put_back
from .inplace import Kept

Call = Callable[..., Sequence[Any]]
Tensor = tuple[torch.dtype, tuple[int | Expr, ...], str]  # dtype, sizes, type of device
LIMIT = 4096  # sets of sizes that are remembered


class Undone(RuntimeError):
    """A backend failed before anything was written, so torch may run the graph. The cause is chained."""


@dataclass(frozen=True, slots=True)
class Results:
    """Per result what it must be, None for what is no tensor; `values`: inputs -> the numbers of the symbols."""

    rows: tuple[Tensor | None, ...]
    values: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None  # None: no size varies

    def at(self, inputs: Sequence[Any]) -> list[Any]:
        """For these inputs; a size that only running tells is None."""
        symbols = self.values(inputs) if self.values else {}
        return [row and (row[0], tuple(n if type(n) is int else number_of(n, symbols) for n in row[1]), row[2]) for row in self.rows]  # type: ignore[arg-type, misc]


class Before:
    """What a call may change, as it is now: generators, the inputs that the graph writes (`written`), how often others were written to."""

    def __init__(self, inputs: Sequence[Any], written: Sequence[int]) -> None:
        self.random, self.kept = generator_states(), Kept([inputs[i] for i in written])
        self.inputs, self.versions = inputs, versions(inputs)

    def take_back(self) -> str:
        """All of it as it was. What cannot be, in words; else ""."""
        put_back(self.random)
        return self.kept.put_back() or ("it has written to its inputs" if versions(self.inputs) != self.versions else "")

    def has_drawn(self) -> bool:
        return any(not torch.equal(a, b) for (_, a), (_, b) in zip(self.random, generator_states(), strict=False))


def watched(
    call: Any, results: Results, eager: Call, written: Sequence[int], name: str, fullgraph: bool, writes_last: bool = False
) -> Call:  # fmt: skip
    """`call`, watched. written: numbers of the inputs that the graph writes. writes_last: `call` writes when nothing can fail any more, or
    raises Undone. Raises BackendFailed."""
    if not callable(call):
        raise BackendFailed(f"it returned {type(call).__name__}, not a callable")
    settled: dict[Any, Call] = {}
    drawing: set[Any] = set()  # what draws for these sizes

    def instead(key: Any, inputs: Sequence[Any], why: str, cause: Exception | None) -> Sequence[Any]:
        """Torch's results. What the program itself raises is raised as it is."""
        before = Before(inputs, written) if fullgraph else None
        found = eager(*inputs)
        if before is not None:
            before.take_back()
        if isinstance(cause, Unsupported) and cause.code != "BCK003":  # the graph's fault, not the backend's
            if fullgraph:
                raise cause
            settled[key] = eager
            events.emit("fallback", code=cause.code, at=cause.at, detail=cause.detail)
            return found
        if fullgraph:
            raise BackendFailed(f"backend {name!r} {why}") from cause
        settled[key] = eager
        events.emit("fallback", code="BCK003", at="", detail=f"backend {name!r} {why}")
        events.warn(f"torchsmith: [BCK003] backend {name!r} {why}. The program runs eagerly{' for these sizes' if results.values else ''}.")
        return found

    def run(*inputs: Any) -> Sequence[Any]:
        key = tuple(i.shape if isinstance(i, torch.Tensor) else i for i in inputs) if results.values else ()
        known = settled.get(key)
        before = Before(inputs, () if writes_last else written) if known is None else None
        try:
            if known is not None:
                return known(*inputs)
            found: Any = call(*inputs)
        except Exception as error:
            if known is eager or str(error).startswith(ASSUMED):
                raise
            if before is not None:
                stays = before.take_back()
            else:
                again = isinstance(error, (Undone, Unsupported)) or not (written or key in drawing)
                stays = "" if again else "it may have written to its inputs or drawn random numbers"
            if stays:
                keep_as_backends(error, f"torchsmith: raised by what backend {name!r} compiled; {stays}")
                raise
            cause = error.__cause__ if isinstance(error, Undone) and isinstance(error.__cause__, Exception) else error
            return instead(key, inputs, said(cause), cause)
        assert before is not None
        wrong = difference(found, results.at(inputs))
        if not wrong:
            if len(settled) >= LIMIT:
                settled.clear()
                drawing.clear()
            settled[key] = call
            if before.has_drawn():
                drawing.add(key)
            return found  # type: ignore[no-any-return]
        stays = before.take_back()
        if stays:
            raise BackendFailed(f"backend {name!r} is at fault: {wrong}; {stays}")
        return instead(key, inputs, f"is at fault: {wrong}", None)

    return run


def versions(inputs: Sequence[Any]) -> list[int]:
    """How often each tensor was written to, as torch counts."""
    return [t._version for t in inputs if isinstance(t, torch.Tensor) and not t.is_inference()]


def said(error: Exception) -> str:
    """What a backend did wrong, as the end of a sentence about it."""
    if isinstance(error, (Undone, BackendFailed)):
        return f"is at fault: {error}"
    return f"failed: {error.detail}" if isinstance(error, Unsupported) else f"raised {type(error).__name__}: {error}"


def difference(results: Any, expected: Sequence[Any]) -> str:
    """What is wrong with a backend's results, "" where nothing is."""
    if not isinstance(results, (tuple, list)):
        return f"what it compiled returned {type(results).__name__}, not a tuple of {len(expected)} results"
    if len(results) != len(expected):
        return f"what it compiled returned {len(results)} results instead of {len(expected)}"
    for i, (value, known) in enumerate(zip(results, expected, strict=True)):
        if known is None:
            continue
        dtype, shape, device = known
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return f"result {i} is {type(value).__name__}, not a tensor"
        if value.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, value.shape, strict=True)):
            planned = tuple(m if n is None else n for n, m in zip(shape, value.shape, strict=True)) if value.dim() == len(shape) else shape
            return f"result {i} has shape {tuple(value.shape)} instead of {planned}"
        if value.dtype != dtype:
            return f"result {i} is {value.dtype} instead of {dtype}"
        if value.device.type != device or value.layout is not torch.strided:
            where = f"lies on {value.device} instead of {device}" if value.device.type != device else f"has the layout {value.layout}"
            return f"result {i} {where}"
    return ""


def of_captured(gm: torch.fx.GraphModule) -> Results:
    """What a captured graph gives."""
    vals = [r.meta.get("val") if isinstance(r, torch.fx.Node) else None for r in leaves(gm.graph.output_node().args[0])]
    given = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    places: dict[str, tuple[int, int | None]] = {}  # symbol -> input, dimension
    for i, val in enumerate(given):
        for d, size in enumerate(val.shape) if isinstance(val, torch.Tensor) else [(None, val)]:
            e = _expr(size)
            if isinstance(e, Sym):
                places.setdefault(e.name, (i, d))

    def values(inputs: Sequence[Any]) -> dict[str, Any]:
        return {name: inputs[i] if d is None else inputs[i].shape[d] for name, (i, d) in places.items()}

    rows = tuple((v.dtype, tuple(map(_expr, v.shape)), device_of(v).type) if isinstance(v, torch.Tensor) else None for v in vals)
    return Results(rows, values if places else None)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def of_functional(fg: FunctionalGraph) -> Results:
    """What a functional graph gives."""
    specs = {n.name: n.meta.get("spec") for n in fg.graph.nodes}

    def known(out: Any) -> Tensor | None:
        spec = specs[out.node] if isinstance(out, FreshOutput) else fg.inputs[out.index] if isinstance(out, InputOutput) else None
        return of_spec(out.spec if isinstance(out, ViewOutput) else spec)

    def values(inputs: Sequence[Any]) -> dict[str, Any]:
        return symbol_values(fg, (*inputs, *fg.consts))

    return Results(tuple(known(out) for out in fg.outputs), values if fg.symbols else None)


def of_spec(spec: Any) -> Tensor | None:
    if not isinstance(spec, TensorSpec):
        return None
    return spec.dtype, tuple(int(e.value) if isinstance(e, Const) else e for e in spec.shape), spec.device.split(":")[0]
