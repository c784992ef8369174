"""Programs that torch.export made or saved, read at the edge: ExportedProgram -> Entry.

In: a torch.export.ExportedProgram or the path of a saved one. Out: Entry, whose graph holds the program's ATen calls on our own tracing
tensors and symbols. Mutations that the exporter turned into extra outputs become writes again; regions are written out.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from ..capture.control_flow import LONGEST
from ..codes import Unsupported, define
from ..graph.functionalise import functionalise
from ..graph.layout import is_shape
from ..graph.sizes import SizeFacts
from ..graph.spec import FunctionalGraph
from ..graph.tracing import current, make_unseen, remember_device, spec_of
from .entry import BUFFER, CONSTANT, PARAMETER, Argument, Constant, Entry, same_memory, spec_text

define("AOT001", "a program cannot be read", "export it again with this version of torch")
define("AOT002", "a region of an exported program is not supported", "rewrite the program without this construct")
define("AOT003", "a size of an exported program is not a linear expression of one dimension", "declare the dimension with a Dim of its own")
define("AOT004", "an exported program takes a number that may vary", "pass it as a 0-d tensor, or export it as a constant")

CONSTANT_KINDS = {"PARAMETER": PARAMETER, "BUFFER": BUFFER, "CONSTANT_TENSOR": CONSTANT}


def is_torch_program(value: Any) -> bool:
    return type(value).__name__ == "ExportedProgram" and type(value).__module__.startswith("torch.export")


def load_program(path: Any) -> Any:
    """A file that torch.export.save wrote. Raises OSError or ValueError for what is none, before torch says it at length."""
    Path(path).stat()
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an exported program: neither torchsmith.export.save nor torch.export.save wrote it")
    with zipfile.ZipFile(path) as z:
        if any("/data/aotinductor/" in n for n in z.namelist()) and not any("/models/" in n for n in z.namelist()):
            raise ValueError(f"{path} is compiled already: load it with load_package; what is compiled is a saved exported program")
    return import_module("torch.export").load(path)


def read_program(program: Any) -> Entry:
    """ExportedProgram -> Entry. Raises Unsupported with the user's line."""
    return _Reader(program, "model").entry()


class _Reader:
    def __init__(self, program: Any, name: str) -> None:
        self.program, self.name = program, name
        self.facts = SizeFacts()
        self.facts.reads_data = self.facts.is_promise = True
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.made: dict[fx.Node, Any] = {}
        self.symbols: dict[str, Any] = {}  # sympy symbol's name -> SymInt
        self.lengths: dict[Any, int | None] = {}  # of what the region at hand takes: the first dimension's size, None where it varies
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
            region = REGIONS.get(name)
            if region is None:
                raise Unsupported("AOT002", at=loc, detail=name)
            self.lengths = {self.made[x]: _length(x.meta.get("val")) for x in node.all_input_nodes if x in self.made}
            self.made[node] = region(self, args, loc)
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

    # -------------------------------------------------- regions: graphs within the graph, written out

    def emit(self, target: Any, args: tuple[Any, ...], loc: str) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta["loc"] = loc
        return made

    def inline(self, body: fx.GraphModule, values: Sequence[Any]) -> Any:
        """The calls of a region, in place; what it returns."""
        for node, value in zip((n for n in body.graph.nodes if n.op == "placeholder"), values, strict=True):
            self.made[node] = value
        return self.copy(body.graph, body)

    def grad_region(self, args: tuple[Any, ...], loc: str) -> Any:
        return self.inline(args[1], args[2:])

    def autocast_region(self, args: tuple[Any, ...], loc: str) -> Any:
        device, dtype, enabled, cached, body, *values = args
        entered = self.emit(torch.amp.autocast_mode._enter_autocast, (device, dtype, enabled, cached), loc)
        results = self.inline(body, values)
        self.emit(torch.amp.autocast_mode._exit_autocast, (entered,), loc)
        return results

    def cond_region(self, args: tuple[Any, ...], loc: str) -> Any:
        """Both branches, and a choice (see capture/control_flow.py)."""
        pred, true_body, false_body, operands = args
        if isinstance(pred, bool):
            return self.inline(true_body if pred else false_body, operands)
        refuse_writes((true_body, false_body), loc)
        both = zip(self.inline(true_body, operands), self.inline(false_body, operands), strict=True)
        return [self.chosen(pred, a, b, loc) for a, b in both]

    def chosen(self, pred: fx.Node, a: Any, b: Any, loc: str) -> Any:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self.emit(choose, (pred, a, b), loc)
        if type(a) is type(b) and a == b:
            return a
        raise Unsupported("AOT002", at=loc, detail="the branches of torch.cond return different numbers: return tensors")

    def map_region(self, args: tuple[Any, ...], loc: str) -> Any:
        body, xs, rest = args
        refuse_writes((body,), loc)
        rows = [self.inline(body, (*row, *rest)) for row in self.rows(xs, "map", loc)]
        return [self.emit(torch.stack, (list(column),), loc) for column in zip(*rows, strict=True)]

    def scan_region(self, args: tuple[Any, ...], loc: str) -> Any:
        body, init, xs, rest = args
        refuse_writes((body,), loc)
        carry, rows = list(init), []
        for row in self.rows(xs, "scan", loc):
            results = list(self.inline(body, (*carry, *row, *rest)))
            carry = results[: len(init)]
            rows.append(results[len(init) :])
        return [*carry, *(self.emit(torch.stack, (list(column),), loc) for column in zip(*rows, strict=True))]

    def rows(self, xs: Sequence[fx.Node], name: str, loc: str) -> list[list[fx.Node]]:
        """The elements of each x along its first dimension."""
        n = self.lengths.get(xs[0]) if xs else None
        if n is None or not 0 < n <= LONGEST:
            why = "that varies" if n is None else f"of {n} elements; loops are written out for 1 to {LONGEST}"
            raise Unsupported("AOT002", at=loc, detail=f"{name} over a dimension {why}")
        return [[self.emit(torch.select, (x, 0, i), loc) for x in xs] for i in range(n)]

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


REGIONS: dict[str, Callable[[_Reader, tuple[Any, ...], str], Any]] = {
    "wrap_with_set_grad_enabled": _Reader.grad_region, "wrap_with_autocast": _Reader.autocast_region, "cond": _Reader.cond_region,
    "map_impl": _Reader.map_region, "scan": _Reader.scan_region,
}  # fmt: skip


def _length(val: Any) -> int | None:
    n = val.shape[0] if isinstance(val, torch.Tensor) and val.dim() else None
    return n if type(n) is int else None


def choose(pred: Any, a: Any, b: Any) -> Any:
    """torch.where on values of a tensor, and one of them where a size decides."""
    if isinstance(pred, torch.Tensor):
        if a.dtype != b.dtype or not is_shape(a.shape, b.shape):
            both = f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
            raise Unsupported("AOT002", at=current().facts.loc, detail=f"the branches of torch.cond return different tensors: {both}")
        return torch.where(pred, a, b)
    return a if pred else b


def refuse_writes(bodies: Sequence[fx.GraphModule], loc: str) -> None:
    """A region that is computed although it is not taken, or of which there are several copies, must write to nothing."""
    for body in bodies:
        for node in body.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op == "call_function" and schema is not None and schema.is_mutable:
                raise Unsupported("AOT002", at=location(node) or loc, detail=f"{node.target} writes to a tensor inside of it")


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
    own = [f for f in found if "/torch/" not in f[0] and not f[0].startswith(("torch/", "<eval_with_key>"))]
    file, line = (own or found or [("", "")])[-1]
    return f"{file}:{line}" if file else ""
