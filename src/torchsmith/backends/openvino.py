"""openvino: plain ATen graphs -> OpenVINO's model, by its own reader of exported programs -> a compiled model.

In: a FunctionalGraph. Out: a call; OpenVINO reads inputs from the tensors' memory and writes results to that of new ones. What it cannot
take runs in torch between two of its models. Options of the backend: `device` (default "CPU") and `config` (a dict for compile_model).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import fx

from ..graph.spec import FunctionalGraph, TensorSpec
from .exported import export, quietly
from .indices import ROWS
from .partition import specs_of
from .plain import PlainGraph, Run, numbers
from .runtimes import Runtime, is_on_cpu

OURS = (torch.ops.aten.reshape.default,)  # known to the reader, absent from its list
UNKNOWN = (torch.bfloat16, torch.complex64, torch.complex128, torch.float64)  # float64 is computed as float32
aten = torch.ops.aten
PLACES = frozenset({aten.argmax.default, aten.argmin.default, aten.arange.default, aten.arange.start, aten.arange.start_step})


@cache
def core() -> Any:
    return import_module("openvino").Core()


@cache
def operators() -> frozenset[str]:
    """Names of the overloads that OpenVINO's reader knows."""
    support = import_module("openvino.frontend.pytorch.torchdynamo.op_support")
    return frozenset(support.OperatorSupport({})._support_dict)


def takes(node: fx.Node) -> bool:
    known = node.target is operator.getitem or node.target in OURS or f"torch.ops.{node.target}" in operators()
    return known and is_on_cpu(node, lambda dtype: dtype not in UNKNOWN) and not counts(node)


def counts(node: fx.Node) -> bool:
    """Does the node compute with integers? Its processor's kernels have them as int32, saturate, and divide as C does; as places of
    elements they are right."""
    if node.target is operator.getitem:
        return False
    places = {row[0] for row in ROWS[node.target](node)} if node.target in ROWS else set()
    data = [a for a in node.all_input_nodes if a not in places]
    made = [node] if node.target not in PLACES and isinstance(node.meta["spec"], TensorSpec) else []
    specs = [s for n in (*data, *made) for s in specs_of(n) if isinstance(s, TensorSpec)]
    return any(not (s.dtype.is_floating_point or s.dtype is torch.bool) for s in specs)


RUNTIME = Runtime("openvino", takes)


def compile_openvino(
    fg: FunctionalGraph, name: str, options: Mapping[str, Any] | None = None, **keywords: Any
) -> Callable[..., tuple[Any, ...]]:
    """A call of `fg`. Raises Unsupported (BCK001, BCK002, BCK003)."""
    given = dict(options or {})
    device = given.get("device", "CPU")
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()} if device == "CPU" else {}
    if not isinstance(given.get("config", {}), Mapping):
        raise TypeError(f"option 'config' is a dict, not {given['config']!r}")
    config = {"INFERENCE_PRECISION_HINT": "f32", **threads, **given.get("config", {})}
    return RUNTIME.compile(fg, name, lambda plain: model(plain, device, config))


def model(plain: PlainGraph, device: str, config: Mapping[str, Any]) -> Run:
    """One piece as one compiled model, and copies. (A result that is an input would be the same memory to it: it writes to the input.)"""
    vino, numpy = import_module("openvino"), import_module("numpy")
    shapes = [list(numbers(s.shape)) for s in plain.inputs]
    plain, places = without_copies(plain)
    if not plain.results:
        return lambda *inputs: [inputs[at].detach().clone(memory_format=torch.contiguous_format) for _, at in places]
    with RUNTIME.refusing(), quietly():
        made = vino.convert_model(export(plain))
        made.reshape({port: vino.PartialShape(shape) for port, shape in zip(made.inputs, shapes, strict=True)})
        if any(result.input_value(0).get_node().get_type_name() == "Parameter" for result in made.get_results()):
            raise ValueError("a result is an input")
        compiled = core().compile_model(made, device, dict(config))
    made_of = [n.meta["spec"] for n in plain.results]
    free: list[Any] = []  # requests that no call is using

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        kept = [t.detach().contiguous() for t in inputs]
        results = [torch.empty(numbers(s.shape), dtype=s.dtype) for s in made_of]
        try:
            request = free.pop()
        except IndexError:
            request = compiled.create_infer_request()
        for i, t in enumerate(kept):
            request.set_input_tensor(i, vino.Tensor(numpy.from_dlpack(t), shared_memory=True))  # .numpy() pins the size of its storage
        for i, t in enumerate(results):
            request.set_output_tensor(i, vino.Tensor(t.numpy(), shared_memory=True))
        request.infer()
        free.append(request)
        given: list[torch.Tensor] = []
        for is_made, at in places:
            t = results[at] if is_made else kept[at]
            given.append(t if is_made and all(t is not other for other in given) else t.clone())
        return given

    return run


def without_copies(plain: PlainGraph) -> tuple[PlainGraph, list[tuple[bool, int]]]:
    """The graph without `clone`, each of its results once; and where the results of `plain` are: (a result, or an input; its number)."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for n in plain.graph.nodes:
        if n.op != "output":
            made[n] = made[n.args[0]] if n.target is aten.clone.default else graph.node_copy(n, made.__getitem__)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    results = list(dict.fromkeys(made[r] for r in plain.results if made[r].op != "placeholder"))
    graph.output(tuple(results))
    places = [(False, inputs.index(r)) if r.op == "placeholder" else (True, results.index(r)) for r in (made[r] for r in plain.results)]
    return PlainGraph(graph, plain.inputs, plain.name), places
