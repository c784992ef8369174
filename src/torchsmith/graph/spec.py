"""The two fx dialects' records: what a tensor is to the compiler, and what functionalisation leaves behind.

Captured dialect (capture makes it; third-party backends and `eager` receive it): torch.fx.GraphModule over torch-level calls.
  placeholder  one per graph input, in call order; meta["role"] in {"input", "param", "buffer", "const", "kept", "scalar", "sym"},
               meta["source"] (printed source, e.g. "L['x']" or "L['self'].conv1.weight"), meta["val"]
  call_function / call_method  torch functions, Tensor methods, in-place ones included; meta["val"], meta["loc"]
  output       a flat tuple of tensors (and SymInts)
  meta["val"]  a tracing value: a meta-device tensor made by graph/tracing.py (device remembered there), SymInt, number, or a
               tuple/list of them; meta["loc"] the user's "file:line".

Functional dialect (graph/functionalise.py makes it from the first; lower receives it): FunctionalGraph below.
  call_function nodes whose targets are ATen OpOverloads on values, no mutation, no aliasing that anything can observe; a node with several
  results is followed by operator.getitem nodes. node.meta["spec"]: TensorSpec | tuple of them | Expr; node.meta["loc"]; node args
  that are sizes hold ir Exprs (Const for known sizes) or ints.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ..ir.expr import Expr
from ..ir.program import Symbol

# Roles of inputs that are expected at the same address in the next call: tensors that calls share, and what forward kept for backward.
LASTING = frozenset({"param", "buffer", "const"})
STEADY = LASTING | {"kept"}

ASSUMED = "the program takes another way than was compiled:"  # begins the message of a check of a value which decides that
RAISES = f"{ASSUMED} it raises an exception at"  # the other way does nothing else
NOT_FINITE = f"{ASSUMED} values are not finite at"  # which is only expected
UNEXPECTED: Counter[str] = Counter()  # places of such checks -> how often one of their graphs failed
PATIENCE = 3  # failures, after which nothing is expected at a place any more


def is_expected(place: str) -> bool:
    return UNEXPECTED[place] < PATIENCE


def note_unexpected(gm: torch.fx.GraphModule) -> None:
    """A graph failed: one of the checks that were only expected to hold may be why."""
    texts = [str(n.args[1]) for n in gm.graph.nodes if n.target is torch.ops.aten._assert_async.msg]
    UNEXPECTED.update({t.removeprefix(NOT_FINITE).strip() for t in texts if t.startswith(NOT_FINITE)})


def add_node(
    graph: torch.fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None
) -> torch.fx.Node:
    """graph.create_node, which does not look for SymInts among the arguments: the nodes of both dialects hold none."""
    node = graph.create_node(op, target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def assumes(gm: torch.fx.GraphModule) -> bool:
    """Does a captured graph hold such a check?"""
    return any(n.target is torch.ops.aten._assert_async.msg and str(n.args[1]).startswith(ASSUMED) for n in gm.graph.nodes)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of one tensor value before running: sizes and strides are Exprs in elements, `device` like "cpu" or "cuda:0".

    `strides` are what eager would give the result: externs and results must have them, temporaries need not.
    """

    dtype: torch.dtype
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    device: str = "cpu"
    offset: Expr | None = None  # storage offset of an input view; None: 0


@dataclass(frozen=True, slots=True)
class FreshOutput:
    """A new tensor holding node `node` (by fx name) with its spec's strides. requires_grad never (autograd wraps)."""

    node: str


@dataclass(frozen=True, slots=True)
class InputOutput:
    """The very input object number `index` is returned."""

    index: int


@dataclass(frozen=True, slots=True)
class ViewOutput:
    """A view of input `of` (int) or of the fresh output number in `of` (("out", i), which may come later in the list).

    spec.offset counts from the first element of what is viewed.
    """

    of: int | tuple[str, int]
    spec: TensorSpec
    apart: bool = False  # no other result that a program sees shows elements of it


@dataclass(frozen=True, slots=True)
class SizeOutput:
    """A number computed from sizes."""

    value: Expr


Output = FreshOutput | InputOutput | ViewOutput | SizeOutput


@dataclass(frozen=True, slots=True)
class FunctionalGraph:
    """A functional graph and the frozen record of what eager would have done to the world around it.

    inputs: spec per placeholder, in order (None for an unused one, an Expr for a size or scalar), then one per tensor of `consts`:
    the compiled call appends those to what its caller gives.
    write_backs: (input index, fx node name): after the run, input takes this node's value (all of it, in the input's own strides).
    """

    graph: torch.fx.Graph
    inputs: tuple[TensorSpec | Expr | None, ...]
    outputs: tuple[Output, ...]
    write_backs: tuple[tuple[int, str], ...]
    symbols: tuple[Symbol, ...]
    key_text: str  # canonical text: equal text means equal meaning; the first cache level is keyed by it
    consts: tuple[torch.Tensor, ...] = ()  # tensors made of the program's own data; the call appends them to its inputs
    roles: tuple[str, ...] = ()  # per entry of `inputs`: meta["role"] of the captured placeholder; "const" for those of `consts`
    assumed: tuple[Expr, ...] = ()  # what holds of the sizes whenever the compiled call is made: guards, or a package's conditions
    hints: tuple[tuple[str, int], ...] = ()  # example sizes; no part of the meaning
    writes: tuple[int, ...] = ()  # by input, how often eager moves its version counter; the code is the same for all
    passing: tuple[int, ...] = ()  # results that are let go before the next call: gradients, and what the backward graph alone reads
