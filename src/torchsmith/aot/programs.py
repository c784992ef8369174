"""Programs that torch.export made or saved, read at the edge: ExportedProgram -> Entry.

In: a torch.export.ExportedProgram or the path of a saved one. Out: Entry, whose graph holds the program's ATen calls on our own tracing
tensors and symbols. Mutations that the exporter turned into extra outputs become writes again; no_grad regions are inlined.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from ..codes import Unsupported, define
from ..graph.functionalise import functionalise
from ..graph.sizes import SizeFacts
from ..graph.spec import FunctionalGraph
from ..graph.tracing import make_unseen, remember_device, spec_of
from .entry import BUFFER, CONSTANT, PARAMETER, Argument, Constant, Entry, same_memory, spec_text

define("AOT001", "a program cannot be read", "export it again with this version of torch")
define("AOT002", "a region of an exported program is not supported", "rewrite the program without this construct")
define("AOT003", "a size of an exported program is not a linear expression of one dimension", "declare the dimension with a Dim of its own")
define("AOT004", "an exported program takes a number that may vary", "pass it as a 0-d tensor, or export it as a constant")

CONSTANT_KINDS = {"PARAMETER": PARAMETER, "BUFFER": BUFFER, "CONSTANT_TENSOR": CONSTANT}
REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def is_torch_program(value: Any) -> bool:
    return type(value).__name__ == "ExportedProgram" and type(value).__module__.startswith("torch.export")


def load_program(path: Any) -> Any:
    """A file that torch.export.save wrote. Raises OSError or ValueError for what is none, before torch says it at length."""
    Path(path).stat()
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an exported program: neither torchsmith.export.save nor torch.export.save wrote it")
    return import_module("torch.export").load(path)


def read_program(program: Any, name: str = "model") -> Entry:
    """ExportedProgram -> Entry. Raises Unsupported with the user's line."""
    return _Reader(program, name).entry()


class _Reader:
    def __init__(self, program: Any, name: str) -> None:
        self.program, self.name = program, name
        self.facts = SizeFacts()
        self.facts.reads_data = True
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.made: dict[fx.Node, Any] = {}
        self.symbols: dict[str, Any] = {}  # sympy symbol's name -> SymInt
        self.constants: list[tuple[list[str], torch.Tensor, int, fx.Node]] = []

    def entry(self) -> Entry:
        program, signature = self.program, self.program.graph_signature
        nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        arguments = self.arguments([nodes[s.arg.name] if hasattr(s.arg, "name") and s.arg.name in nodes else s.arg
                                    for s in signature.input_specs if s.kind.name == "USER_INPUT"])  # fmt: skip
        written = {s.target for s in signature.output_specs if s.target} | _mutated(program.graph)
        for s in signature.input_specs:
            if s.kind.name in CONSTANT_KINDS:
                self.constant(nodes[s.arg.name], s, written)
            elif s.kind.name != "USER_INPUT":
                raise Unsupported("AOT002", detail=f"an input of kind {s.kind.name} ({s.target})")
        outputs = self.copy(program.graph, program.graph_module)
        inputs = {name: self.made[n] for name, n in nodes.items() if n in self.made}
        returned, values = self.results(outputs, inputs)
        with torch.no_grad():
            functional = functionalise(fx.GraphModule(self.root, self.graph), self.facts)
        spec = program.call_spec
        users = sum(a.placeholder is not None for a in arguments)
        constants = [Constant(tuple(n), v, t, users + i) for i, (n, v, t, _) in enumerate(self.constants)]
        constants += lifted(functional, users + len(constants))
        return Entry(
            self.name, functional, self.facts, tuple(arguments), tuple(constants),
            tuple(returned), tuple(values), spec_text(spec.in_spec), spec_text(spec.out_spec),
            {str(v.node.expr.name): self.label(k) for k, v in self.symbols.items()},
        )  # fmt: skip

    # -------------------------------------------------- inputs

    def arguments(self, leaves: list[Any]) -> list[Argument]:
        tensors = [n for n in leaves if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)]
        for k, n in enumerate(tensors):
            self.declare(k, n.meta["val"])
        for k, n in enumerate(tensors):  # dimensions such as 2*d, of a d that is no size itself
            self.derive(k, n.meta["val"])
        out: list[Argument] = []
        for n in leaves:
            if not isinstance(n, fx.Node):
                out.append(Argument(str(getattr(n, "name", "")), None, value=getattr(n, "value", None)))
            elif n in tensors:
                made = self.placeholder(n, n.meta["val"], "input", n.name)
                out.append(Argument(n.name, tensors.index(n), spec_of(made.meta["val"])))
            elif isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat):
                raise Unsupported("AOT004", detail=n.name)
            else:
                self.made[n] = n.meta.get("val")
                out.append(Argument(n.name, None, value=n.meta.get("val")))
        return out

    def range_of(self, symbol: Any) -> tuple[int, int | None]:
        found = self.program.range_constraints.get(symbol)
        if found is None:
            return 0, None
        lo, hi = found.lower, found.upper
        return (int(lo) if _is_finite(lo) else 0), (int(hi) if _is_finite(hi) else None)

    def declare(self, number: int, val: torch.Tensor) -> None:
        """Dimensions that are a symbol of their own."""
        for d, size in enumerate(val.shape):
            e = _sympy(size)
            if e is not None and e.is_Symbol and str(e) not in self.symbols:
                self.symbols[str(e)] = self.facts.fresh(_hint(size), ("size", number, d), *self.range_of(e))

    def derive(self, number: int, val: torch.Tensor) -> None:
        for d, size in enumerate(val.shape):
            e = _sympy(size)
            unknown = [s for s in e.free_symbols if str(s) not in self.symbols] if e is not None else []
            if e is None or not unknown:
                continue
            line = _linear(e, unknown[0]) if len(e.free_symbols) == 1 else None
            if line is None:
                raise Unsupported("AOT003", detail=str(e))
            scale, offset = line
            hint = _hint(size)
            own = None if hint is None else (hint - offset) // scale
            self.symbols[str(unknown[0])] = self.facts.fresh(own, ("size", number, d, scale, offset), *self.range_of(unknown[0]))

    def number(self, value: Any) -> Any:
        """A size of the exporter's as one of ours."""
        e = _sympy(value)
        return int(value) if e is None else self.evaluate(e)

    def evaluate(self, e: Any) -> Any:
        if e.is_Symbol:
            if str(e) not in self.symbols:
                raise Unsupported("AOT003", detail=f"{e} is no size of an input")
            return self.symbols[str(e)]
        if e.is_Integer:
            return int(e)
        args = [self.evaluate(a) for a in e.args]
        fold = SYMPY.get(e.func.__name__)
        if fold is None:
            raise Unsupported("AOT003", detail=str(e))
        total = args[0]
        for a in args[1:]:
            total = fold(total, a)
        return total

    def label(self, symbol: str) -> str:
        """The user's name of a dimension."""
        for s, dim in _dims(self.program).items():
            if s == symbol:
                return dim
        return symbol

    def placeholder(self, node: fx.Node, val: torch.Tensor, role: str, name: str) -> fx.Node:
        t = make_unseen([self.number(s) for s in val.shape], [self.number(s) for s in val.stride()], val.dtype)
        made = self.graph.placeholder(name)
        made.meta.update(val=remember_device(t, val.device), role=role, source=name, loc="")
        self.made[node] = made
        return made

    def constant(self, node: fx.Node, spec: Any, written: set[str]) -> None:
        state, extra = self.program.state_dict, self.program.constants
        value = state[spec.target] if spec.target in state else extra.get(spec.target)
        if not isinstance(value, torch.Tensor):
            raise Unsupported("AOT002", detail=f"a constant of type {type(value).__name__} ({spec.target})")
        value = value.detach()
        for names, known, _, made in self.constants:
            if same_memory(known, value) and spec.target not in written and not written & set(names) and node.name not in written:
                names.append(spec.target)
                self.made[node] = made
                return
        made = self.placeholder(node, value, "param" if spec.kind.name == "PARAMETER" else "buffer", node.name)
        self.constants.append(([spec.target], value, CONSTANT_KINDS[spec.kind.name], made))

    # -------------------------------------------------- body

    def copy(self, graph: fx.Graph, owner: fx.GraphModule) -> Any:
        """Copy the calls of `graph`; gives its output's arguments in terms of what was made."""
        for node in graph.nodes:
            if node.op == "placeholder":
                if node not in self.made:
                    raise Unsupported("AOT001", detail=f"input {node.name} has no signature")
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], self.made.__getitem__)
            elif node.op == "get_attr":
                self.attribute(node, owner)
            else:
                self.call(node, owner)
        return ()

    def attribute(self, node: fx.Node, owner: fx.GraphModule) -> None:
        value: Any = owner
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            name = f"_const_{len(self.made)}"
            setattr(self.root, name, value.detach())
            self.made[node] = self.graph.get_attr(name)
        else:
            self.made[node] = value  # the body of a region

    def call(self, node: fx.Node, owner: fx.GraphModule) -> None:
        loc = location(node)
        args, kwargs = cast(tuple[Any, Any], fx.node.map_arg((node.args, node.kwargs), self.made.__getitem__))
        name = getattr(node.target, "__name__", str(node.target))
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            if name not in REGIONS:
                raise Unsupported("AOT002", at=loc, detail=name)
            self.made[node] = self.inline(name, args, loc)
            return
        if node.target is not None and name == "getitem" and not isinstance(args[0], fx.Node):
            self.made[node] = args[0][args[1]]
            return
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            self.made[node] = None  # a dtype that follows from the inputs', which calls check; as an operator it would fix all sizes
            return
        made = self.graph.create_node("call_function", cast(Callable[..., Any], node.target), args, kwargs, name=node.name)
        made.meta["loc"] = loc
        self.made[node] = made

    def inline(self, name: str, args: tuple[Any, ...], loc: str) -> Any:
        """A region whose border means nothing to inference: its calls, in place."""
        at = next(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
        if name == "wrap_with_autocast" and args[1] and args[2]:
            raise Unsupported("AOT002", at=loc, detail="an autocast region")
        body = args[at]
        for node, value in zip((n for n in body.graph.nodes if n.op == "placeholder"), args[at + 1 :], strict=True):
            self.made[node] = value
        return self.copy(body.graph, body)

    # -------------------------------------------------- results

    def results(self, outputs: Any, inputs: dict[str, Any]) -> tuple[list[int | None], list[Any]]:
        """Mutations become writes; the rest is returned."""
        specs = self.program.graph_signature.output_specs
        by_target = {n: made for names, _, _, made in self.constants for n in names}
        flat: list[Any] = []
        returned: list[int | None] = []
        values: list[Any] = []
        writes: list[tuple[Any, Any]] = []
        for spec, value in zip(specs, outputs, strict=True):
            kind = spec.kind.name
            if kind in ("BUFFER_MUTATION", "USER_INPUT_MUTATION"):
                writes.append((by_target[spec.target] if kind == "BUFFER_MUTATION" else inputs[spec.target], value))
            elif isinstance(value, fx.Node):
                returned.append(len(flat))
                values.append(None)
                flat.append(value)
            else:
                returned.append(None)
                values.append(value)
        for target, value in writes:
            self.graph.call_function(torch.ops.aten.copy_.default, (target, value)).meta["loc"] = ""
        self.graph.output(tuple(flat))
        return returned, values


def lifted(functional: FunctionalGraph, first: int) -> list[Constant]:
    """The tensors that functionalisation made of the program's own data: the last placeholders, from number `first`."""
    return [Constant((f"_const{i}",), t, CONSTANT, first + i) for i, t in enumerate(functional.consts)]


# ---------------------------------------------------------------- the exporter's sizes

SYMPY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b, "Mul": lambda a, b: a * b, "FloorDiv": lambda a, b: a // b, "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b, "PythonMod": lambda a, b: a % b, "Max": torch.sym_max, "Min": torch.sym_min, "Pow": lambda a, b: a**b,
}  # fmt: skip


def _sympy(size: Any) -> Any:
    """The exporter's expression of a symbolic size; None for a plain number."""
    if not isinstance(size, torch.SymInt):
        return None
    e = size.node.expr
    return None if e.is_Integer else e


def _hint(size: Any) -> int | None:
    node = size.node
    return int(node.hint) if node.has_hint() else None


def _is_finite(bound: Any) -> bool:
    return bool(getattr(bound, "is_Integer", isinstance(bound, int))) and abs(int(bound)) < 1 << 62


def _linear(e: Any, symbol: Any) -> tuple[int, int] | None:
    """scale, offset of e = scale * symbol + offset."""
    offset, one = e.subs(symbol, 0), e.subs(symbol, 1)
    scale = one - offset
    if not (offset.is_Integer and scale.is_Integer and int(scale) > 0 and e.subs(symbol, 7) == scale * 7 + offset):
        return None
    return int(scale), int(offset)


def _dims(program: Any) -> dict[str, str]:
    """Symbol -> Dim name, where the program remembers it."""
    found: dict[str, str] = {}
    fakes = (n.meta.get("val") for n in program.graph.nodes)
    mode = next((t.fake_mode for t in fakes if getattr(t, "fake_mode", None) is not None), None)
    env = getattr(mode, "shape_env", None)
    symbols = getattr(env, "source_to_var", None) or {}
    for source, name in (getattr(env, "source_name_to_debug_name", None) or {}).items():
        if source in symbols:
            found[str(symbols[source])] = str(name)
    return found


def _mutated(graph: fx.Graph) -> set[str]:
    """Names of placeholders that in-place operators write."""
    names: set[str] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for a in node.args:
            if isinstance(a, fx.Node) and a.op == "placeholder":
                names.add(a.name)
    return names


def location(node: fx.Node) -> str:
    """The user's innermost line, "file:line"; torch's own files only if there is no other."""
    text = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', text)
    own = [f for f in found if "/torch/" not in f[0] and not f[0].startswith("torch/")]
    file, line = (own or found or [("", "")])[-1]
    return f"{file}:{line}" if file else ""
