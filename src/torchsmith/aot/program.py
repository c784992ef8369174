"""ExportedProgram: a module's computation as a value, without the module: functional graph, weights, signature, ranges.

`functional` is the graph.spec.FunctionalGraph that the compiler takes; `inputs` and `outputs` say what its placeholders and results are
to the user. Nothing here is ever written after export, except the contents of `state_dict` tensors that the program itself mutates.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..graph.eager import origin_value, run_functional
from ..graph.sizes import LARGEST, SizeFacts, print_condition
from ..graph.spec import FreshOutput, FunctionalGraph, InputOutput, SizeOutput, TensorSpec
from ..graph.tracing import spec_of
from ..graph.written import as_module, as_python
from ..ir.expr import Const, Expr, Sym, walk
from ..ir.number import number_of
from .entry import children


class SizesDiffer(ValueError, AssertionError):
    """A call's tensors or constants are not those that the program was exported for."""


class StructureDiffers(TypeError, ValueError):
    """A call's arguments are nested in another way than the example's."""


@dataclass(frozen=True, slots=True)
class InputRow:
    """One placeholder of the functional graph. kind: "user" (leaf number `leaf` of the call's arguments), "param", "buffer" or "constant".

    name: the argument's path ("x", "mask[0]") or the tensor's qualified name; spec: what is declared of it.
    """

    kind: str
    name: str
    spec: TensorSpec
    leaf: int = -1
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One leaf of the result: kind "out" (number `value` of functional.outputs) or "const" (a Python scalar)."""

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """Which placeholder is what, by name; `..._to_mutate` maps a functional node to what takes its value."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    non_persistent_buffers: tuple[str, ...]
    constants: tuple[str, ...]
    user_inputs: tuple[str, ...]
    user_outputs: tuple[Any, ...]
    buffers_to_mutate: Mapping[str, str]
    parameters_to_mutate: Mapping[str, str]
    user_inputs_to_mutate: Mapping[str, str]
    inputs_to_parameters: Mapping[str, str]
    inputs_to_buffers: Mapping[str, str]
    inputs_to_lifted_tensor_constants: Mapping[str, str]
    input_rows: tuple[tuple[str, InputRow], ...] = field(repr=False)  # every placeholder, in order
    # (OutputKind, class of the argument, its fields, what takes it)
    output_rows: tuple[tuple[str, str, tuple[Any, ...], str | None], ...] = field(repr=False)
    # what programs here never have
    backward_signature: ClassVar[None] = None
    assertion_dep_token: ClassVar[None] = None
    input_tokens: ClassVar[tuple[str, ...]] = ()
    output_tokens: ClassVar[tuple[str, ...]] = ()
    lifted_custom_objs: ClassVar[tuple[str, ...]] = ()

    @property
    def lifted_tensor_constants(self) -> tuple[str, ...]:
        return self.constants

    @property
    def inputs_to_lifted_custom_objs(self) -> dict[str, str]:
        return {}

    @property
    def input_specs(self) -> list[Any]:
        """torch.export's InputSpec for every placeholder."""
        of = import_module("torch.export.graph_signature")
        kinds = {"user": "USER_INPUT", "param": "PARAMETER", "buffer": "BUFFER", "constant": "CONSTANT_TENSOR"}
        return [
            of.InputSpec(of.InputKind[kinds[r.kind]], of.TensorArgument(node), None if r.kind == "user" else r.name,
                         r.persistent if r.kind == "buffer" else None)
            for node, r in self.input_rows
        ]  # fmt: skip

    @property
    def output_specs(self) -> list[Any]:
        """torch.export's OutputSpec for every value written after the run, then for every leaf of the result."""
        of = import_module("torch.export.graph_signature")
        return [of.OutputSpec(of.OutputKind[kind], getattr(of, arg)(*fields), target) for kind, arg, fields, target in self.output_rows]


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes from lo to hi, both included; hi None: no bound."""

    lo: int
    hi: int | None

    @property
    def lower(self) -> int:
        """lo, as torch names it."""
        return self.lo

    @property
    def upper(self) -> float:
        """hi, as torch names it: infinity where there is no bound."""
        return math.inf if self.hi is None else self.hi

    def __repr__(self) -> str:
        return f"[{self.lo}, {'inf' if self.hi is None else self.hi}]"


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What draft_export had to give up: one text for each declaration that the program contradicts."""

    problems: tuple[str, ...]

    def successful(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if not self.problems:
            return "the program holds for all declared sizes"
        head = f"declarations that do not hold and were left to the program: {len(self.problems)}"
        return "\n".join((head, *(f"- {p}" for p in self.problems)))


@dataclass(frozen=True, slots=True)
class ExportedProgram:
    """What `torchsmith.export` returns.

    leaves: the example's flat arguments, tensors replaced by None, so that constants (numbers, strings) can be checked at a call.
    symbol_names: symbol of the graph -> name of its Dim.
    """

    functional: FunctionalGraph
    facts: SizeFacts
    inputs: tuple[InputRow, ...]
    outputs: tuple[OutputRow, ...]
    in_spec: Any
    out_spec: Any
    leaves: tuple[Any, ...]
    leaf_names: tuple[str, ...]
    state_dict: dict[str, Tensor]
    constants: dict[str, Tensor]
    symbol_names: Mapping[str, str]
    name: str
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    report: DraftReport | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExportedProgram:
        """Tensors of its own; the graph is never written, so it is shared."""
        state, constants = copy.deepcopy((self.state_dict, self.constants), memo)
        return replace(self, state_dict=state, constants=constants)

    # ------------------------------------------------------------ views of it
    @property
    def range_constraints(self) -> dict[str, Range]:
        """Dim name -> the sizes it may take."""
        names = self.symbol_names
        return {names.get(s.sym.name, s.sym.name): Range(s.lo, None if s.hi == LARGEST else s.hi) for s in self.functional.symbols}

    @property
    def conditions(self) -> tuple[tuple[Expr, str], ...]:
        """What must hold of the sizes beyond their ranges, and the user's line that asked: (d0 % 4 == 0, "model.py:7")."""
        return tuple((c, self.facts.locs.get(c, "")) for c in self.facts.beyond_ranges())

    @property
    def graph(self) -> torch.fx.Graph:
        return self.functional.graph

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The functional graph as a module of ATen calls (weights are its first inputs)."""
        return as_module(self.functional)

    @property
    def graph_signature(self) -> GraphSignature:
        by = {k: tuple(r.name for r in self.inputs if r.kind == k) for k in ("param", "buffer", "constant", "user")}
        written = {node: self.inputs[i] for i, node in self.functional.write_backs}
        return GraphSignature(
            by["param"], by["buffer"], tuple(r.name for r in self.inputs if r.kind == "buffer" and not r.persistent),
            by["constant"], by["user"],
            tuple(self._output_name(r) for r in self.outputs), {n: r.name for n, r in written.items() if r.kind == "buffer"},
            {n: r.name for n, r in written.items() if r.kind == "param"}, {n: r.name for n, r in written.items() if r.kind == "user"},
            self._placeholders("param"), self._placeholders("buffer"), self._placeholders("constant"),
            tuple((node.name, r) for r, node in zip(self.inputs, self.functional.graph.nodes, strict=False)), tuple(self._output_rows()),
        )  # fmt: skip

    def _output_rows(self) -> Iterator[tuple[str, str, tuple[Any, ...], str | None]]:
        placeholders = [node.name for node in self.functional.graph.nodes if node.op == "placeholder"]
        for i, node in self.functional.write_backs:
            row = self.inputs[i]
            kind = {"buffer": "BUFFER_MUTATION", "param": "PARAMETER_MUTATION"}.get(row.kind, "USER_INPUT_MUTATION")
            yield kind, "TensorArgument", (node,), row.name
        for r in self.outputs:
            out = None if r.kind == "const" else self.functional.outputs[r.value]
            if out is None:
                yield "USER_OUTPUT", "ConstantArgument", ("", r.value), None
            elif isinstance(out, InputOutput):
                yield "USER_OUTPUT", "TensorArgument", (placeholders[out.index],), None
            else:
                yield "USER_OUTPUT", "SymIntArgument" if isinstance(out, SizeOutput) else "TensorArgument", (self._output_name(r),), None

    @property
    def module_call_graph(self) -> list[Any]:
        """torch.export's entry for the program as a whole; calls of submodules are not kept."""
        of = import_module("torch.export")
        names = list(dict.fromkeys(n.split("[")[0].split(".")[0] for n in self.leaf_names))
        signature = of.ModuleCallSignature(inputs=[], outputs=[], in_spec=self.in_spec, out_spec=self.out_spec, forward_arg_names=names)
        return [of.ModuleCallEntry(fqn="", signature=signature)]

    @property
    def dialect(self) -> str:
        return "ATEN"

    def validate(self) -> None:
        """Raises where the graph is not well formed."""
        self.functional.graph.lint()

    def _placeholders(self, kind: str) -> dict[str, str]:
        """Name of a placeholder -> name of the tensor that fills it."""
        return {node.name: r.name for r, node in zip(self.inputs, self.functional.graph.nodes, strict=False) if r.kind == kind}

    def _output_name(self, row: OutputRow) -> Any:
        if row.kind == "const":
            return row.value
        out = self.functional.outputs[row.value]
        if isinstance(out, FreshOutput):
            return out.node
        return self.inputs[out.index].name if isinstance(out, InputOutput) else f"out{row.value}"

    @property
    def tensor_constants(self) -> dict[str, Tensor]:
        return self.constants

    @property
    def call_spec(self) -> Any:
        """in_spec and out_spec, as torch names them."""
        return _CallSpec(self.in_spec, self.out_spec)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((r.name, self.state_dict[r.name]) for r in self.inputs if r.kind == "param")

    def parameters(self) -> Iterator[Tensor]:
        return (t for _, t in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((r.name, self.tensor_of(r)) for r in self.inputs if r.kind == "buffer")

    def buffers(self) -> Iterator[Tensor]:
        return (t for _, t in self.named_buffers())

    def tensor_of(self, row: InputRow) -> Tensor:
        """The tensor behind a placeholder that is not a user input."""
        return self.state_dict[row.name] if row.name in self.state_dict else self.constants[row.name]

    # ------------------------------------------------------------ running
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("an ExportedProgram is not called itself: call exported_program.module()(...)")

    def module(self) -> nn.Module:
        """An nn.Module that runs the program with torch's own operators, sharing the program's tensors."""
        return ExportedModule(self)

    def run_decompositions(self, decomp_table: Any = None) -> ExportedProgram:
        """The program itself: its graph is functional ATen, and the compiler writes operators out as it needs them.

        Tables of torch's own decompositions, which change no value, are taken and leave the operators as they are. Raises ValueError for
        a function of somebody else's.
        """
        for op, written_out in dict(decomp_table or {}).items():
            if not f"{getattr(getattr(written_out, 'func', written_out), '__module__', '')}.".startswith("torch."):
                raise ValueError(f"run_decompositions: what {op} would become is not torch's function; call it in the model instead")
        return self

    def flat_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call's arguments, in the example's order; StructureDiffers where they are nested in another way."""
        given = dict(kwargs)
        wanted = children(self.in_spec)[1].context
        if set(given) == set(wanted):
            given = {k: given[k] for k in wanted}
        leaves, spec = pytree.tree_flatten((tuple(args), given))
        if spec != self.in_spec:
            try:
                ordered = self.in_spec.flatten_up_to((tuple(args), given))  # dictionaries with their keys in another order
                is_same = all(pytree.tree_is_leaf(x) for x in ordered)
            except ValueError:
                is_same = False
            if not is_same:
                needed, got = _structure(self.in_spec, self.leaf_names), _structure(spec, [type(x).__name__ for x in leaves])
                raise StructureDiffers(f"{self.name}: a call takes what it was exported with, {needed}; it was given {got}")
            return ordered
        return leaves

    def check(self, leaves: Sequence[Any]) -> dict[str, int]:
        """Compare a call's leaves with the program's declaration; the symbols' values. Raises SizesDiffer naming argument and dimension."""
        specs = {r.leaf: r.spec for r in self.inputs if r.kind == "user"}
        for i, (leaf, constant) in enumerate(zip(leaves, self.leaves, strict=True)):
            spec, name = specs.get(i), self.leaf_names[i]
            if spec is not None:
                _check_tensor(self, name, leaf, spec)
            elif not _is_same(leaf, constant):
                why = f"argument {name} was {constant!r} when it was exported; a call with {leaf!r} needs an export of its own"
                raise SizesDiffer(f"{self.name}: {why}")
        given = [leaves[r.leaf] if r.kind == "user" else None for r in self.inputs]
        of_inputs = [s for s in self.functional.symbols if s.origin[0] != "bound"]  # the others are known when their operator has run
        symbols = {s.sym.name: origin_value(s.origin, given) for s in of_inputs}
        for s in of_inputs:
            value = symbols[s.sym.name]
            if value < s.lo or (s.hi is not None and value > s.hi):
                dim = self.symbol_names.get(s.sym.name, s.sym.name)
                raise SizesDiffer(f"{self.name}: {dim} is {value}; it was exported for sizes in {Range(s.lo, s.hi)}")
        for i, spec in specs.items():
            _check_sizes(self, self.leaf_names[i], leaves[i], spec, symbols)
        for cond, loc in self.conditions:
            holds = number_of(cond, symbols)  # None: a division by zero, or of a size that is known only when an operator has run
            if holds is False or (holds is None and all(x.name in symbols for x in walk(cond) if isinstance(x, Sym))):
                where = f", because of {loc}" if loc else ""
                raise SizesDiffer(f"{self.name}: the sizes of the inputs must satisfy {print_size(cond, self.symbol_names)}{where}")
        return symbols

    # ------------------------------------------------------------ printing
    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def text(self) -> str:
        """Readable listing: signature, ranges, the graph with the user's file:line beside each operator."""
        fg = self.functional
        lines = [f"ExportedProgram {self.name}", "  inputs:"]
        for row, node in zip(self.inputs, fg.graph.nodes, strict=False):
            lines.append(f"    {node.name}: {row.kind} {row.name} {print_tensor(row.spec, self.symbol_names)}")
        if self.range_constraints:
            lines.append("  sizes: " + ", ".join(f"{k} in {v}" for k, v in self.range_constraints.items()))
        lines += [f"    where {print_size(c, self.symbol_names)}  # {loc}".rstrip("# ") for c, loc in self.conditions]
        lines.append("  graph:")
        for node in fg.graph.nodes:
            if node.op == "call_function":
                target = "getitem" if node.target is operator.getitem else str(node.target).removeprefix("aten.")
                args = [*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
                note = f"{print_tensor(node.meta['spec'], self.symbol_names)}  {node.meta.get('loc', '')}".rstrip()
                lines.append(f"    {node.name} = {target}({', '.join(args)})  # {note}")
        lines += [f"  after the run: {self.inputs[i].name} takes {node}" for i, node in fg.write_backs]
        lines.append(f"  results: {', '.join(str(self._output_name(r)) for r in self.outputs)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _CallSpec:
    in_spec: Any
    out_spec: Any


class ExportedModule(nn.Module):
    """ExportedProgram.module(): parameters and buffers under their own names; calls are checked against the declaration."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self._program = program
        for row in program.inputs:
            if row.kind in ("param", "buffer"):
                _install(self, row, program.tensor_of(row))
        held = set(self.state_dict())
        for name, tensor in program.state_dict.items():  # tied to one of those, or not used
            if name not in held:
                kind = "param" if isinstance(tensor, nn.Parameter) else "buffer"
                _install(self, InputRow(kind, name, spec_of(tensor)), tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        program = self._program
        leaves = program.flat_arguments(args, kwargs)
        program.check(leaves)
        values = [leaves[r.leaf] if r.kind == "user" else self._tensor(r) for r in program.inputs]
        written_out = _written_out(program, str(id(program.functional))) if torch.compiler.is_compiling() else None
        results = run_functional(program.functional, values) if written_out is None else written_out(*values, *program.functional.consts)
        return pytree.tree_unflatten([results[r.value] if r.kind == "out" else r.value for r in program.outputs], program.out_spec)

    def _tensor(self, row: InputRow) -> Tensor:
        if row.kind == "constant":
            return self._program.constants[row.name]
        *path, last = row.name.split(".")
        found: Any = self
        for part in path:
            found = found._modules[part]
        return found._parameters[last] if row.kind == "param" else found._buffers[last]  # type: ignore[no-any-return]


def _written_out(program: ExportedProgram, which: str) -> Any:
    """What a compiler captures of a call: the graph as Python, a constant of what is captured. which: for this graph only."""
    return as_python(program.functional)


_written_out._torchsmith_constant = True  # type: ignore[attr-defined]  # compiler.assume_constant_result


def _install(root: nn.Module, row: InputRow, tensor: Tensor) -> None:
    *path, last = row.name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    if row.kind == "buffer":
        root.register_buffer(last, tensor, persistent=row.persistent)
    else:
        root.register_parameter(
            last, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=tensor.requires_grad)
        )


def _is_same(leaf: Any, constant: Any) -> bool:
    """Is this argument what the program was exported with?"""
    if leaf is constant:
        return True
    if type(leaf) is not type(constant):
        return False
    if isinstance(leaf, (int, float, complex, str)):
        return repr(leaf) == repr(constant)  # nan is nan, and -0.0 is not 0.0
    return not isinstance(leaf, (Tensor, nn.Module)) and bool(leaf == constant)  # modules that print the same may compute different things


def _check_tensor(program: ExportedProgram, name: str, leaf: Tensor, spec: TensorSpec) -> None:
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{program.name}: argument {name} must be a tensor, not {type(leaf).__name__}")
    if leaf.dtype != spec.dtype:
        raise SizesDiffer(f"{program.name}: argument {name} has dtype {leaf.dtype}; it was exported for {spec.dtype}")
    if leaf.dim() != len(spec.shape):
        raise SizesDiffer(f"{program.name}: argument {name} has {leaf.dim()} dimensions; it was exported for {len(spec.shape)}")
    if str(leaf.device) != spec.device:
        raise SizesDiffer(f"{program.name}: argument {name} is on {leaf.device}; it was exported for {spec.device}")


def _check_sizes(program: ExportedProgram, name: str, leaf: Tensor, spec: TensorSpec, symbols: dict[str, int]) -> None:
    for d, (e, n) in enumerate(zip(spec.shape, leaf.shape, strict=True)):
        want = number_of(e, symbols)
        if want != n:
            text = print_size(e, program.symbol_names)
            needed = str(want) if isinstance(e, Const) else f"{text} = {want}"
            raise SizesDiffer(f"{program.name}: argument {name} has size {n} in dimension {d}; it must be {needed}")


def print_size(e: Any, names: Mapping[str, str]) -> str:
    """A size with Dims for symbols: "2*batch"."""
    text = print_condition(e, names)
    return text.removeprefix("(").removesuffix(")") if text.startswith("(") else text


def print_tensor(spec: Any, names: Mapping[str, str]) -> str:
    if isinstance(spec, TensorSpec):
        return f"{str(spec.dtype)[6:]}[{', '.join(print_size(s, names) for s in spec.shape)}]"
    if isinstance(spec, tuple):
        return f"({', '.join(print_tensor(s, names) for s in spec)})"
    return print_size(spec, names) if spec is not None else "None"


def _argument(v: Any) -> str:
    if isinstance(v, (list, tuple)):
        return f"[{', '.join(map(_argument, v))}]"
    return print_condition(v) if hasattr(v, "dtype") and not isinstance(v, torch.fx.Node) else str(v)


def _structure(spec: Any, leaves: Iterable[str]) -> str:
    """The arguments of a call, nested as `spec` says; leaves: what to call each of them."""
    words = iter(leaves)
    args, kwargs = children(spec)
    positional = [_nested(s, words) for s in children(args)]
    named = [f"{k}={_nested(s, words)}" for k, s in zip(kwargs.context, children(kwargs), strict=True)]
    return f"({', '.join([*positional, *named])})"


def _nested(spec: Any, words: Iterator[str]) -> str:
    if spec.is_leaf():
        return next(words)
    if spec.type is dict:
        return "{" + ", ".join(f"{k!r}: {_nested(s, words)}" for k, s in zip(spec.context, children(spec), strict=True)) + "}"
    inner = ", ".join(_nested(s, words) for s in children(spec))
    return {tuple: f"({inner})", list: f"[{inner}]"}.get(spec.type, f"{getattr(spec.type, '__name__', spec.type)}({inner})")
