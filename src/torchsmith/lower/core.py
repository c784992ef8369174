"""Lowering: one functional graph (fx, ATen operators on values) becomes a Program of stages, checks and extern calls.

In: FunctionalGraph, Options. Out: Program. Every node is lowered by its row in LOWERINGS, or becomes an Extern (extern.py). A row gets the
builder `cx` and the operator's arguments in schema order: tensors as Refs, sizes as Exprs or ints. View operators answer with a Ref
that maps indices; all others write one Stage per value over the result's axes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from .. import events
from ..codes import Unsupported
from ..graph.spec import LASTING, STEADY, FreshOutput, FunctionalGraph, InputOutput, Output, SizeOutput, TensorSpec
from ..ir import dtype as dt
from ..ir.bounds import Interval, Ranges
from ..ir.dtype import DType
from ..ir.expr import Axis, Const, Expr, Fold, Load, Sym, Var, convert, op, walk
from ..ir.nested import leaves
from ..ir.program import (
    Bind,
    Buffer,
    Check,
    Element,
    Extern,
    Fresh,
    InputResult,
    Layout,
    Program,
    Result,
    SizeResult,
    Stage,
    Store,
    Symbol,
    ViewResult,
)  # fmt: skip
from ..ir.proofs import is_outside, with_checks
from ..options import Options
from . import extern
from .devices import is_scalar, scalars_written, target_of
from .numerics import IR_DTYPES, boolean, ir_dtype
from .pairs import in_memory, written_back
from .ref import ZERO, Index, Pair, Ref, contiguous_strides, is_small, of_buffer, overlaps, same_strides
from .table import PAIR_LOWERINGS, PLAIN_VIEWS, rule_of

Value = Any  # Ref | Expr | None | tuple of them: what a node stands for


class Builder:
    """The Program under construction, and the node being lowered (`spec`, `loc`, `origin`)."""

    def __init__(self, options: Options, symbols: Sequence[Symbol]) -> None:
        self.options = options
        self.buffers: dict[str, Buffer] = {}
        self.strides: dict[str, tuple[Expr, ...]] = {}  # spec strides of each buffer: what a required layout will be
        self.body: list[Element] = []
        self.top, self.checked = self.body, set[tuple[Any, ...]]()  # what holds of every element below the checks of this list
        self.symbols: list[Symbol] = list(symbols)
        self.bound: set[Sym] = {s.sym for s in symbols if s.origin[0] != "bound"}
        self.notes: list[str] = []
        self.constants: tuple[str, ...] = ()  # input buffers that keep their values from call to call
        self.spec: Any = None
        self.read: frozenset[int] = frozenset()  # which results of the node, if it has several, anybody reads
        self.readers: tuple[fx.Node, ...] = ()  # who reads the node's result, views of it aside
        self.node: Any = None  # the node itself
        self.draws: Extern | None = None  # the call that takes random numbers for the operators at hand (draws.py)
        self.draws_from = 0  # where in `top` another may stand at the earliest: behind torch's own draws
        self.on_host = set[str]()  # buffers that lie in the host's memory whatever the device is
        self.loc = ""
        self.origin = ""
        self.device = "cpu"  # of the graph
        self.count = 0

    def interval(self, n: Expr) -> Interval:
        """Between which numbers a size lies."""
        return Ranges({s.sym: (s.lo, s.hi) for s in self.symbols}).interval(n)

    # ------------------------------------------------------------ the node at hand
    @property
    def out(self) -> TensorSpec:
        """The spec of the node's (first) result."""
        spec = self.spec
        return spec if isinstance(spec, TensorSpec) else spec[0]

    @property
    def dtype(self) -> DType:
        return ir_dtype(self.out.dtype, self.loc)

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.out.shape

    @property
    def is_alone(self) -> bool:
        """May nothing need libtorch?"""
        return self.options.libtorch == "forbid"

    def is_ours(self, *shapes: Sequence[Expr]) -> bool:
        """Where torch's kernel is the faster one: shall ours be used? For few elements, and where nothing may need libtorch."""
        return self.is_alone or all(map(is_small, shapes))

    # ------------------------------------------------------------ names
    def fresh(self, prefix: str = "t") -> str:
        self.count += 1
        return f"{prefix}{self.count - 1}"

    def axes(self, shape: Sequence[Expr]) -> tuple[Axis, ...]:
        """Axes of one Stage. They are bound by that Stage, so every Stage may use the same names."""
        return tuple(Axis(f"i{n}") for n in range(len(shape)))

    # ------------------------------------------------------------ buffers and stages
    def buffer(
        self, dtype: DType, shape: Sequence[Expr], strides: Sequence[Expr] | None = None, *, required: bool = False, role: Any = "temp"
    ) -> str:
        """A new buffer. `required`: it must have these strides; else the schedule chooses until somebody requires them."""
        name = self.fresh()
        given = tuple(strides) if strides is not None else contiguous_strides(shape)
        self.strides[name] = given
        self.buffers[name] = Buffer(name, dtype, tuple(shape), Layout(given, ZERO) if required else None, role, None, self.loc)
        return name

    def ref(self, name: str) -> Ref:
        b = self.buffers[name]
        return of_buffer(name, b.dtype, b.shape, self.strides[name])

    def stage(
        self,
        value: Callable[[Index], Expr],
        shape: Sequence[Expr] | None = None,
        dtype: DType | None = None,
        strides: Sequence[Expr] | None = None,
    ) -> Ref:
        """Write value(index) for every index of `shape` into a new buffer; the shape, dtype and strides default to the node's result."""
        if shape is None:
            if isinstance(self.spec, TensorSpec) and is_scalar(self.spec, self.device):
                number = value(())
                if is_of_host(number) and number.dtype is (dtype or self.dtype):
                    return Ref(number.dtype, (), lambda _: number)
            shape, strides = self.shape, self.out.strides
        dtype = dtype or self.dtype
        name = self.buffer(dtype, shape, strides)
        self.fill(name, value)
        return self.ref(name)

    def stages(self, *values: Callable[[Index], Expr]) -> tuple[Ref, ...]:
        """One stage per result of a node with several results, by its specs."""
        refs = []
        for spec, value in zip(self.spec, values, strict=True):
            refs.append(self.stage(value, spec.shape, ir_dtype(spec.dtype, self.loc), spec.strides))
        return tuple(refs)

    def fill(self, name: str, value: Callable[[Index], Expr]) -> None:
        """Write all of the buffer `name`."""
        b = self.buffers[name]
        if b.dtype.kind == "opaque":
            raise Unsupported("LOW001", at=self.loc, detail=f"{b.dtype} in {self.origin}")
        axes = self.axes(b.shape)
        stored = value(axes)
        if stored.dtype is not b.dtype:
            raise TypeError(f"{self.origin} stores {stored.dtype} into {b.dtype}")
        bound = tuple(zip(axes, b.shape, strict=True))
        self.body.append(Stage(bound, (Store(name, axes, stored),), loc=self.loc, origin=self.origin))

    def fold(
        self, shape: Sequence[Expr], init: Sequence[Expr], step: Callable[[Index, tuple[Expr, ...]], Sequence[Expr]],
        merge: Callable[[tuple[Expr, ...], tuple[Expr, ...]], Sequence[Expr]] | None = None, pick: int = 0,
    ) -> Fold:  # fmt: skip
        """A loop over `shape` inside a value: state' = step(index, state); `merge` makes the order free, else it is sequential.

        Axes and state names are unique in the program, so that inlining one Fold in another captures nothing.
        """
        n = self.count
        self.count += 1
        axes = tuple(Axis(f"r{n}_{k}") for k in range(len(shape)))
        prefix = f"f{n}_"
        old = tuple(Var(f"{prefix}a{k}", e.dtype) for k, e in enumerate(init))
        new = tuple(Var(f"{prefix}b{k}", e.dtype) for k, e in enumerate(init))
        combine = tuple(merge(old, new)) if merge else ()
        order: Any = "any" if merge else "sequential"
        return Fold(tuple(zip(axes, shape, strict=True)), tuple(init), tuple(step(axes, old)), combine, order, pick, prefix)

    # ------------------------------------------------------------ storage for those who need real memory
    def require(self, name: str) -> None:
        """Fix the buffer's layout to its spec's strides."""
        b = self.buffers[name]
        if b.layout is None:
            self.buffers[name] = replace(b, layout=Layout(self.strides[name], ZERO))

    def place(self, ref: Ref, strides: Sequence[Expr] | None = None) -> str:
        """The name of a buffer that holds `ref` with these strides (any, if None): its own, a view of its root, or a copy."""
        s = ref.strided
        if s is not None and (strides is None or same_strides(ref.shape, s.strides, strides)):
            self.require(s.root)
            if ref.whole is not None:
                return ref.whole
            name = self.fresh("v")
            self.strides[name] = s.strides
            layout = Layout(s.strides, s.offset)
            self.buffers[name] = Buffer(name, ref.dtype, ref.shape, layout, self.buffers[s.root].role, s.root, self.loc)
            return name
        return self.copy(ref, strides)

    def copy(self, ref: Ref, strides: Sequence[Expr] | None = None, role: Any = "temp") -> str:
        """Copy `ref` into a new buffer with these strides; overlapping ones become row-major."""
        if ref.dtype.kind == "opaque":
            return extern.copy_opaque(self, ref, strides, role)
        # a result that eager returns expanded is expanded too: elements that share memory are equal
        overlap = role != "output" and strides is not None and overlaps(ref.shape, strides)
        name = self.buffer(ref.dtype, ref.shape, None if overlap else strides, required=True, role=role)
        self.fill(name, ref.load)
        return name

    # ------------------------------------------------------------ checks
    def check_none(self, shape: Sequence[Expr], bad: Callable[[Index], Expr], kind: str, message: str) -> None:
        """Fail the call when bad(index) holds anywhere in `shape`. Values have one definition, so what was asked is not asked again."""
        asked = (tuple(shape), bad(tuple(Axis(f"asked{k}") for k in range(len(shape)))), kind, message)
        if asked in self.checked:
            return
        if self.body is self.top:
            self.checked.add(asked)
        found = self.stage(lambda _: self.any_of(shape, bad), (), dt.bool_, ())
        assert found.whole is not None
        self.require(found.whole)
        self.body.append(Check(op("not", Load(found.whole, dt.bool_, ())), kind, message, self.loc))

    def any_of(self, shape: Sequence[Expr], test: Callable[[Index], Expr]) -> Expr:
        no = Const(dt.bool_, False)
        if not shape:
            return boolean(test(()))
        return self.fold(shape, [no], lambda i, s: [op("or", s[0], boolean(test(i)))], lambda a, b: [op("or", a[0], b[0])])

    def note(self, code: str) -> None:
        if code not in self.notes:
            self.notes.append(code)

    def bind(self, sym: Sym, value: Expr) -> None:
        self.bound.add(sym)
        self.body.append(Bind(sym, value))


# ---------------------------------------------------------------- the pass


def lower(fg: FunctionalGraph, options: Options, name: str = "graph") -> Program:
    """fx graph of ATen operators -> Program: `y = sin(x)` becomes `stage i0 < n: t0[i0] = sin(x0[i0])`."""
    target, device = target_of(fg, options)
    if target.language != "c" and options.libtorch != "forbid":  # products are library calls there
        options = replace(options, native_contractions=False)
    cx = Builder(options, fg.symbols)
    cx.device = device
    env: dict[fx.Node, Value] = {}
    inputs = _lower_inputs(cx, fg, env)
    cx.constants = tuple(inputs[i] for i in constant_inputs(fg) if inputs[i])
    wanted = _live_nodes(fg)
    for node in fg.graph.nodes:
        if node.op == "call_function" and node in wanted:
            cx.node, cx.loc, cx.origin, cx.spec = node, node.meta.get("loc", ""), _name_of(node.target), node.meta.get("spec")
            cx.read = frozenset(u.args[1] for u in node.users if u.target is operator.getitem and u in wanted)  # type: ignore[misc]
            cx.readers = tuple(_readers(node))
            env[node] = _lower_node(cx, node, env)
        elif node.op == "get_attr":
            raise Unsupported("LOW002", at=node.meta.get("loc", ""), detail=str(node.target))
    by_name = {n.name: n for n in fg.graph.nodes}
    write_backs = _lower_write_backs(cx, fg, env, by_name, inputs)
    results = (*_lower_results(cx, fg, env, by_name), *_written_scalars(fg, env, by_name, device))
    buffers = {n: b if n in cx.on_host else _on(b, target.device) for n, b in cx.buffers.items()}
    body, notes = tuple(cx.body), tuple(cx.notes)
    steady = [n for n, role in zip(inputs, fg.roles, strict=False) if n and role in STEADY]
    steady += [r.buf for r in (results[k] for k in fg.passing) if isinstance(r, Fresh)]
    program = Program(
        name, tuple(cx.symbols), tuple(inputs), buffers, body, results, write_backs, cx.constants, notes, target, device,
        tuple(dict.fromkeys(steady)),
    )  # fmt: skip
    proved, left = with_checks(program, fg.assumed, dict(fg.hints))
    for doubt in left:
        if is_outside(doubt):
            raise Unsupported("LOW008", at=doubt.stage.loc, detail=str(doubt))
        events.emit("masked", code="LOW007", at=doubt.stage.loc, detail=str(doubt))
    return replace(proved, notes=(*proved.notes, "LOW007")) if left else proved


RENAMED = frozenset(getattr(torch.ops.aten, n).default for n in ("view", "_unsafe_view", "permute", "t"))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target in RENAMED:
            yield from _readers(user)
        else:
            yield user


def _on(b: Buffer, device: str) -> Buffer:
    return b if b.device == device else replace(b, device=device)


def constant_inputs(fg: FunctionalGraph) -> tuple[int, ...]:
    """Inputs that are expected to be the same in the next call: the host checks, and prepares anew when one is not."""
    written = {number for number, _ in fg.write_backs}
    return tuple(i for i, role in enumerate(fg.roles) if role in LASTING and i not in written)


def _name_of(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _lower_inputs(cx: Builder, fg: FunctionalGraph, env: dict[fx.Node, Value]) -> list[str]:
    names = []
    placeholders = [n for n in fg.graph.nodes if n.op == "placeholder"]
    for number, (node, spec) in enumerate(zip(placeholders, fg.inputs, strict=True)):
        if not isinstance(spec, TensorSpec):
            env[node] = spec
            names.append("")
            continue
        if spec.dtype not in IR_DTYPES:
            # an input that only passes through (a returned or viewed one) needs no buffer; any use of it raises
            env[node] = Opaque(spec)
            names.append("")
            continue
        if is_scalar(spec, cx.device):
            env[node] = _element(cx, number, spec)
            names.append("")
            continue
        buf = f"x{number}"
        cx.strides[buf] = spec.strides
        layout = Layout(spec.strides, ZERO)
        cx.buffers[buf] = Buffer(buf, ir_dtype(spec.dtype), spec.shape, layout, "input", None, node.meta.get("loc", ""))
        env[node] = cx.ref(buf)
        names.append(buf)
    return names


def _element(cx: Builder, number: int, spec: TensorSpec) -> Ref:
    """The 0-d tensor in the host's memory that is input `number`: a symbol that the host reads before the run. What is computed of such
    alone stays a number of the host."""
    dtype = ir_dtype(spec.dtype)
    sym = Sym(f"x{number}_value", dt.f64 if dtype.is_float else dt.i64)
    cx.symbols.append(Symbol(sym, ("element", number), -(2**63)))
    cx.bound.add(sym)
    value = convert(sym, dtype)
    return Ref(dtype, (), lambda _: value)


def is_of_host(e: Expr) -> bool:
    """Is this a number that the host can compute before anything runs?"""
    return not any(isinstance(x, Load | Fold) for x in walk(e))


@dataclass(frozen=True, slots=True)
class Opaque:
    """A tensor of a dtype that the IR lacks."""

    spec: TensorSpec


def _live_nodes(fg: FunctionalGraph) -> set[fx.Node]:
    """Nodes that a result, a write-back or an effect needs, and the first ones that have a size which data tell."""
    names = {o.node for o in fg.outputs if isinstance(o, FreshOutput)} | {n for _, n in fg.write_backs}
    live: set[fx.Node] = set()
    stack = [n for n in fg.graph.nodes if n.name in names or (n.op == "call_function" and extern.has_effect(n.target))]
    untold = {s.sym for s in fg.symbols if s.origin == ("bound",)}
    for node in fg.graph.nodes if untold else ():
        sizes = [n for spec in leaves(node.meta.get("spec")) if isinstance(spec, TensorSpec) for n in spec.shape]
        told = untold & set(walk(*sizes))
        stack += [node] if told else []
        untold -= told
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def _lower_node(cx: Builder, node: fx.Node, env: dict[fx.Node, Value]) -> Value:
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return env[source][node.args[1]]
    values = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
    args, kwargs = values
    if not isinstance(node.target, torch._ops.OpOverload):
        return _lower_python(cx, node, args)
    for value in leaves(args, kwargs):
        if isinstance(value, Opaque):
            raise Unsupported("LOW001", at=cx.loc, detail=f"{value.spec.dtype} in {cx.origin}")
    for spec in cx.spec if isinstance(cx.spec, (tuple, list)) else (cx.spec,):
        if isinstance(spec, TensorSpec):
            ir_dtype(spec.dtype, cx.loc)
    bound = bind_arguments(node.target, args, kwargs)
    if _touches_opaque(cx, args, kwargs):
        return _lower_opaque(cx, node, bound)
    rule = rule_of(node.target)
    if rule is not None:
        mark, known_buffers = len(cx.body), len(cx.buffers)
        found = rule(cx, *bound)
        if found is not NotImplemented:
            return found
        del cx.body[mark:]
        for name in list(cx.buffers)[known_buffers:]:
            del cx.buffers[name]
    return extern.lower_extern(cx, node, bound)


def _touches_opaque(cx: Builder, *values: Any) -> bool:
    """Is an operand or a result of a dtype that no expression has?"""
    specs = cx.spec if isinstance(cx.spec, (tuple, list)) else (cx.spec,)
    made = [ir_dtype(s.dtype, cx.loc) for s in specs if isinstance(s, TensorSpec)]
    used = [v.dtype for v in leaves(*values) if isinstance(v, (Pair, Ref))]
    return any(d.kind == "opaque" for d in (*made, *used))


def _lower_opaque(cx: Builder, node: fx.Node, bound: list[Any]) -> Value:
    """Operators on opaque values: complex ones as pairs of real values, views where they are plain memory, else extern calls."""
    pairs, rule = PAIR_LOWERINGS.get(node.target), rule_of(node.target)
    bound = _numbers_in_memory(cx, node, bound)
    if pairs is not None and _is_small_complex(cx, bound):
        found = pairs(cx, *bound)
        if found is not NotImplemented:
            return found
    if rule is not None and node.target in PLAIN_VIEWS:
        if isinstance(bound[0], Pair):
            parts = [rule(cx, part, *bound[1:]) for part in (bound[0].re, bound[0].im)]
            if all(isinstance(p, Ref) for p in parts):
                return Pair(bound[0].dtype, *parts)
        else:
            found = rule(cx, *bound)
            if isinstance(found, Ref) and found.strided is not None:
                return found
    held = fx.node.map_aggregate(bound, lambda v: in_memory(cx, v, None) if isinstance(v, Pair) else v)
    return extern.lower_extern(cx, node, held)


def _numbers_in_memory(cx: Builder, node: fx.Node, bound: list[Any]) -> list[Any]:
    """Numbers that vary, in a tensor's place beside many complex values, become tensors: torch takes those from packages, too."""
    shapes = [v.shape for v in (*bound, cx.out) if isinstance(v, (Ref, Pair, TensorSpec))]
    if cx.is_ours(*shapes) or not any(map(len, shapes)):
        return bound
    kinds = {"index": dt.i64, "int": dt.i64, "float": dt.f64}

    def held(value: Expr) -> Any:
        kind = kinds.get(value.dtype.kind)
        return value if kind is None else cx.stage(lambda _: convert(value, kind), (), kind)

    target: Any = node.target
    is_tensor = [str(a.type) == "Tensor" for a in target._schema.arguments]
    return [held(v) if there and isinstance(v, Expr) else v for v, there in zip(bound, is_tensor, strict=True)]


def _is_small_complex(cx: Builder, bound: list[Any]) -> bool:
    """Interleaved memory is read and written one element at a time: torch does that faster where there are many.

    Complex numbers among the arguments, and what varies in a number's place, cannot be passed to torch: they are computed with here.
    """
    values = [v for v in (*bound, cx.out) if isinstance(v, (Ref, Pair, TensorSpec))]
    return any(isinstance(v, (complex, Expr)) for v in bound) or cx.is_ours(*(v.shape for v in values))


# arithmetic on sizes that the graph kept as nodes
_PYTHON: dict[Any, str] = {getattr(operator, name): name for name in ("add", "sub", "mul", "floordiv", "mod")}


def _lower_python(cx: Builder, node: fx.Node, args: Sequence[Any]) -> Value:
    if isinstance(cx.spec, Expr):
        return cx.spec
    row = _PYTHON.get(node.target)
    if row is None or not all(isinstance(a, (int, Expr)) for a in args):
        raise Unsupported("LOW003", at=cx.loc, detail=cx.origin)
    return op(row, *(a if isinstance(a, Expr) else Const(dt.index, a) for a in args))


def bind_arguments(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in schema order, defaults filled in."""
    bound = []
    for k, a in enumerate(target._schema.arguments):
        if k < len(args):
            bound.append(args[k])
        elif a.name in kwargs:
            bound.append(kwargs[a.name])
        else:
            bound.append(a.default_value if a.has_default_value() else None)
    return bound


# ---------------------------------------------------------------- results


def _as_output(cx: Builder, ref: Ref, spec: TensorSpec, taken: set[str]) -> str:
    """A buffer of role "output" in the spec's layout that holds `ref`: its own buffer if that may be given away, else a copy."""
    name = ref.whole
    if name is not None and name not in taken and ref.strided is not None:
        b = cx.buffers[name]
        if b.role == "temp" and b.storage_of is None and same_strides(ref.shape, cx.strides[name], spec.strides):
            cx.strides[name] = spec.strides  # those of dimensions of one element may be others
            cx.buffers[name] = replace(b, role="output", layout=Layout(spec.strides, ZERO))
            return name
    return cx.copy(ref, spec.strides, role="output")


def _lower_results(cx: Builder, fg: FunctionalGraph, env: dict[fx.Node, Value], by_name: dict[str, fx.Node]) -> tuple[Result, ...]:
    fresh: dict[str, str] = {}  # fx node -> buffer; a node returned twice is one tensor
    taken: set[str] = set()
    for out in fg.outputs:
        if isinstance(out, FreshOutput) and out.node not in fresh:
            node = by_name[out.node]
            cx.loc, cx.origin = node.meta.get("loc", ""), "result"
            ref = env[node]
            if isinstance(ref, Pair):
                fresh[out.node] = cast(str, in_memory(cx, ref, node.meta["spec"].strides, "output").whole)
                taken.add(fresh[out.node])
                continue
            if not isinstance(ref, Ref):
                raise Unsupported("LOW001", at=cx.loc, detail=f"result {out.node}")
            fresh[out.node] = _as_output(cx, ref, node.meta["spec"], taken)
            taken.add(fresh[out.node])
    return tuple(_result_of(fg, out, fresh) for out in fg.outputs)


def _result_of(fg: FunctionalGraph, out: Output, fresh: dict[str, str]) -> Result:
    if isinstance(out, FreshOutput):
        return Fresh(fresh[out.node])
    if isinstance(out, InputOutput):
        return InputResult(out.index)
    if isinstance(out, SizeOutput):
        return SizeResult(out.value)
    of: int | str
    if isinstance(out.of, int):
        of = out.of
    else:
        base = fg.outputs[out.of[1]]
        if not isinstance(base, FreshOutput):
            raise Unsupported("LOW004", detail="a view of a result that is not fresh")
        of = fresh[base.node]
    spec = out.spec
    return ViewResult(of, spec.shape, spec.strides, spec.offset if spec.offset is not None else ZERO, ir_dtype(spec.dtype), out.apart)


def _written_scalars(
    fg: FunctionalGraph, env: dict[fx.Node, Value], by_name: dict[str, fx.Node], device: str
) -> tuple[Result, ...]:
    """Their new values, which the host computes. Raises Unsupported("LOW005") for a value that comes from the device."""
    found = []
    names = dict(fg.write_backs)
    for number in scalars_written(fg, device):
        node = by_name[names[number]]
        ref = env[node]
        value = ref.load(()) if isinstance(ref, Ref) and not ref.shape else None
        if value is None or not is_of_host(value):
            raise Unsupported("LOW005", at=node.meta.get("loc", ""), detail=f"a write into a tensor on cpu beside tensors on {device}")
        found.append(SizeResult(convert(value, dt.f64 if value.dtype.is_float else dt.index)))
    return tuple(found)


def _lower_write_backs(
    cx: Builder, fg: FunctionalGraph, env: dict[fx.Node, Value], by_name: dict[str, fx.Node], inputs: list[str]
) -> tuple[tuple[str, str], ...]:
    """Each written input takes a buffer of its own: a value that is (a view of) an input is copied first, since copies run in order."""
    pairs = []
    for number, node_name in fg.write_backs:
        if number in scalars_written(fg, cx.device):
            continue
        node = by_name[node_name]
        cx.loc, cx.origin = node.meta.get("loc", ""), "write-back"
        ref = env[node]
        if isinstance(ref, Ref) and ref.whole == inputs[number]:
            continue
        if isinstance(ref, (Pair, Ref)) and ref.dtype.kind == "opaque":
            pairs.append(written_back(cx, inputs[number], ref))
            continue
        if not isinstance(ref, Ref):
            raise Unsupported("LOW001", at=cx.loc, detail=f"write-back {node_name}")
        name, shape = ref.whole, cx.buffers[inputs[number]].shape  # equal to that of the value, perhaps in other symbols
        if name is None or cx.buffers[name].role != "temp" or cx.buffers[name].shape != shape:
            held = cx.stage(ref.load, shape, ref.dtype, None)
            name = held.whole
        assert name is not None
        pairs.append((inputs[number], name))
    return tuple(pairs)
