"""functionalise: the captured graph run once under a recording mode -> FunctionalGraph, ATen on values with no mutation.

In: a captured GraphModule (placeholders carry meta["val"]) and the SizeFacts of its symbols. Out: FunctionalGraph. In-place and
out= operators become their functional forms and rebind what their memory holds; views are replayed on the present value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from ..codes import Unsupported
from ..ir.expr import Expr, Sym, walk
from ..ir.nested import leaves
from ..ir.rows import rows
from ..runtime.values_only import NAMESPACE
from .canonical import emit_graph
from .layout import are_equal, clamp_index, from_front, hint_of, is_shape, overlaps, rank_of
from .outputs import describe_outputs
from .schema import GEOMETRY, KNOWN, OpInfo, bind, info, may_raise, unbind
from .sizes import SizeFacts, SymTypes, expr_of
from .spec import FunctionalGraph, TensorSpec
from .tracing import (
    FUNCTION_RULES,
    RULES,
    Tracing,
    at_offset,
    change_geometry,
    device_of,
    finish_write,
    format_like,
    given,
    make_unseen,
    refuse_kind,
    remember_device,
    resize,
    spec_of,
    storage,
    tensors_in,
    watched,
)
from .values import Node, Root, Step, Twins, Value, part_twins, read, same_layout, write

aten = torch.ops.aten
T = TypeVar("T")


def functionalise(gm: fx.GraphModule, facts: SizeFacts, homes: bool = False) -> FunctionalGraph:
    """Captured dialect -> functional dialect. Raises Unsupported (GRAxxx). homes: there may be more results than the captured graph has,
    behind those (describe_outputs says which).

    Where the program goes backwards itself, autograd watches while it is recorded, and backward is recorded as what it computes.
    """
    recording = Recording(facts, goes_backwards(gm))
    lone = gm.meta.get("stops", False)
    return emit_graph(recording, traced(recording, lambda: describe_outputs(recording, run_captured(gm, recording), homes, lone)))


def traced(recording: Recording, work: Callable[[], T]) -> T:
    """`work` under the recording; whatever torch refuses there is Unsupported."""
    facts = recording.facts
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    cached = torch.is_autocast_cache_enabled()
    facts.when_assumed = recording.check
    with recording:
        try:
            return work()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError, AssertionError) as e:
            # whatever torch or a Python function refuses on tracing tensors; eager then says whether the program is at fault
            detail = f"{type(e).__name__}: {e}".split("\n", 1)[0][:300]
            raise Unsupported("GRA012", at=facts.loc, detail=detail) from e
        finally:  # a graph that fails inside an autocast region must not leave it on
            for device, enabled, dtype in autocast:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(cached)
            facts.when_assumed = None


def goes_backwards(gm: fx.GraphModule) -> bool:
    """Does the captured program compute gradients itself?"""
    ways = (torch.autograd.grad, torch.autograd.backward)
    return any(n.target in ways or getattr(n.target, "goes_backwards", False) for n in gm.graph.nodes)


def run_captured(gm: fx.GraphModule, recording: Recording) -> list[Any]:
    """Run the captured graph on tracing tensors; the recording sees every operator. Gives the graph's outputs, flat."""
    env: dict[fx.Node, Any] = {}
    calls: dict[str, Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]] = {
        "placeholder": lambda n, a, k: recording.input(n.meta["val"], n.meta.get("role") or "input"),
        "get_attr": lambda n, a, k: recording.attribute(_attribute(gm, n.target)),
        "call_function": lambda n, a, k: _function(n.target, recording.alive)(*a, **k),
        "call_method": lambda n, a, k: getattr(a[0], str(n.target))(*a[1:], **k),
        "call_module": lambda n, a, k: _attribute(gm, n.target)(*a, **k),
    }
    for node in gm.graph.nodes:
        recording.facts.loc, recording.facts.region = node.meta.get("loc") or "", node.meta.get("region")
        if node.op == "output":
            outs = leaves(fx.map_arg(node.args[0], env.__getitem__))
            part_twins([recording.value_of(t).root for t in (*outs, *recording.inputs) if isinstance(t, torch.Tensor)])
            return outs
        args, kwargs = (fx.map_arg((node.args, node.kwargs), env.__getitem__)) if node.op != "placeholder" else ((), {})
        recording.note_autocast()
        env[node] = calls[node.op](node, args, kwargs)
    return []


def _nothing(mode: Any) -> None:
    """Of values, all modes of autograd are one, unless the program goes backwards itself."""


def _without_grad(mode: Any) -> Any:
    """Entering inference mode, of which only this matters to values: gives what leaving it restores."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(before and not mode)
    return before


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    """One of two floats; torch.sym_ite wants two symbols."""
    if type(condition) is not torch.SymBool:
        return a if condition else b
    return torch.SymFloat(condition.node.sym_ite(*(x.node if type(x) is torch.SymFloat else condition.node.wrap_float(x) for x in (a, b))))


_INSTEAD: dict[Any, Any] = {
    torch.sym_ite: _chosen,
    min: torch.sym_min, max: torch.sym_max,  # Python's own would ask which size it is
    torch._C._set_grad_enabled: _nothing,
    torch.autograd.grad_mode._enter_inference_mode: _nothing, torch.autograd.grad_mode._exit_inference_mode: _nothing,
}  # fmt: skip
_ALIVE: dict[Any, Any] = {
    torch._C._set_grad_enabled: torch._C._set_grad_enabled,
    torch.autograd.grad_mode._enter_inference_mode: _without_grad,
    torch.autograd.grad_mode._exit_inference_mode: torch._C._set_grad_enabled,
}


def _function(target: Any, alive: bool) -> Any:
    """What to call for a node. A composite operator's overload (programs of torch.export) would ask for plain sizes in C++: it is called
    as the torch function that has a rule."""
    if isinstance(target, OpOverload) and target.namespace == "aten" and info(target).is_composite:
        name = target._schema.name.removeprefix("aten::")
        found = (getattr(home, name, None) for home in (torch, torch._C._nn, torch.Tensor))
        return next((f for f in found if f in FUNCTION_RULES), target)
    return (_ALIVE if alive and target in _ALIVE else _INSTEAD).get(target, target)


def _attribute(gm: fx.GraphModule, path: Any) -> Any:
    found: Any = gm
    for part in str(path).split("."):
        found = getattr(found, part)
    return found


def _is_tracing(t: torch.Tensor) -> bool:
    """Whether `t` is a tracing tensor; while tracing, t.device is the device it stands for."""
    return torch._C._dispatch_keys(t).has(torch._C.DispatchKey.Meta)


class Recording(Tracing):
    """Tracing that also writes down, on values, what every operator did."""

    records = True

    def __init__(self, facts: SizeFacts, alive: bool = False) -> None:
        """alive: autograd watches, where grad mode is on."""
        super().__init__(facts, alive and torch.is_grad_enabled())
        self.alive = alive
        self.watched: list[tuple[torch.Tensor, Any]] = []  # inputs, and what autograd said of them
        self.nodes: list[Node] = []
        self.inputs: list[Any] = []  # tracing tensors or numbers, in call order
        self.input_specs: list[Any] = []
        self.roles: list[str] = []
        self.placeholders: list[Node] = []
        self.consts: list[torch.Tensor] = []
        self.const_nodes: list[Node] = []
        self.roots: dict[int, Root] = {}  # storage -> memory, for tensors that torch made behind our back
        self.real: dict[int, Value] = {}  # by id: tensors that are no tracing tensors, kept alive by their root
        self.settled = len(facts.symbols)  # those behind it belong to the operator at hand
        self.waiting: list[tuple[Expr, str]] = []
        self.asking = 0  # inside how many operators, whose shapes are asked for

    # -------- building nodes
    def emit(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any, loc: str, kind: str = "call") -> Node:
        node = Node(kind, op, args, kwargs, spec, loc)
        node.region = self.facts.region
        self.nodes.append(node)
        return node

    def input(self, val: Any, role: str) -> Any:
        """A placeholder: a fresh tracing tensor, so that nothing of the captured graph is written."""
        number = len(self.inputs)
        if isinstance(val, torch.Tensor):
            refuse_kind(val, self.facts)
            t = given(remember_device(at_offset(make_unseen(val.shape, val.stride(), val.dtype), val.storage_offset()), device_of(val)))
            self.has_devices = self.has_devices or device_of(val).type != "cpu"
            spec: Any = spec_of(t)
            if self.alive:
                t = watched(t, val)
                self.watched.append((t, t.grad_fn))
            node = Node("placeholder", f"in{number}", (), {}, spec, self.facts.loc)
            self.own(t, node, spec, number)
            val = t
        else:
            spec = expr_of(val) if isinstance(val, (int, float, *SymTypes)) else None
            node = Node("placeholder", f"in{number}", (), {}, spec)
        self.inputs.append(val)
        self.roles.append(role)
        self.input_specs.append(spec)
        self.placeholders.append(node)
        return val

    def attribute(self, value: Any) -> Any:
        return self.constant(value.detach()) if isinstance(value, torch.Tensor) else value

    def own(self, t: torch.Tensor, node: Node, spec: TensorSpec, number: int | None = None) -> Value:
        """`t` is memory of its own that holds `node`."""
        value = Value(Root(node, spec, t, number), overlaps=number is not None and overlaps(t))
        t._ts_value = value  # type: ignore[attr-defined]
        self.roots.setdefault(t.untyped_storage()._cdata, value.root)
        return value

    def value_of(self, t: torch.Tensor) -> Value:
        found = getattr(t, "_ts_value", None)
        if found is not None:
            return found
        if not _is_tracing(t):  # the user's own tensor: nothing is written on it
            return self.real.get(id(t)) or self._constant_value(t, t)
        real = getattr(t, "_ts_constant", None)
        if real is not None:
            return self._constant_value(t, real)
        root = self.roots.get(t.untyped_storage()._cdata)
        if root is None:
            raise Unsupported("GRA006", at=self.facts.loc, detail="a tensor that no recorded operator made")
        offset = t.storage_offset() - root.tensor.storage_offset()
        step = Step(
            aten.as_strided.default, (_exprs(t.shape), _exprs(t.stride()), _expr(offset)), {}, root.spec, spec_of(t), self.facts.loc
        )
        value = Value(root) if spec_of(t) == root.spec and offset == 0 else Value(root, (step,), overlaps(t))
        t._ts_value = value  # type: ignore[attr-defined]
        return value

    def _constant_value(self, t: torch.Tensor, real: torch.Tensor) -> Value:
        """Python data: one number is `full`, more is an extra input that the compiled call appends."""
        spec = TensorSpec(real.dtype, tuple(map(expr_of, real.shape)), tuple(map(expr_of, real.stride())), str(device_of(t)))
        loc = getattr(t, "_ts_loc", "") or self.facts.loc
        if real.numel() == 1 and not real.dtype.is_complex:
            kwargs = {"dtype": real.dtype, "device": torch.device(spec.device)}
            with torch._C.DisableTorchFunction(), no_dispatch():
                number = real.item()
            node = self.emit(aten.full.default, (list(spec.shape), number), kwargs, spec, loc)
        else:
            node = Node("placeholder", f"const{len(self.consts)}", (), {}, spec, loc)
            self.consts.append(real)
            self.const_nodes.append(node)
        if _is_tracing(t):
            return self.own(t, node, spec)
        value = self.real[id(t)] = Value(Root(node, spec, t))
        return value

    def node_of(self, t: torch.Tensor) -> Node:
        value = self.value_of(t)
        return read(self.emit, value.root, value.steps)

    def lower_args(self, value: Any) -> Any:
        """Arguments as the functional graph holds them: nodes for tensors, Exprs for symbolic numbers."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, SymTypes):
            return expr_of(value)
        if isinstance(value, (list, tuple)):
            return [self.lower_args(v) for v in value]
        return value

    # -------- one operator
    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = info(func)
        if row.is_composite and func not in RULES:
            return self.shapes(func, args, kwargs)  # decomposes; its parts come back here
        made = self.in_parts(func, args, kwargs)
        if made is not NotImplemented:
            return made
        if row.writes:
            self.note_write(row, bind(func, args, kwargs))
            special = WRITES.get(func)
            return special(self, func, *args, **kwargs) if special is not None else self.record_write(func, row, args, kwargs)
        if row.is_view:
            return self.record_view(func, args, kwargs)
        return self.record_pure(func, row, args, kwargs)

    def record_pure(self, func: OpOverload, row: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lowered = tuple(self.lower_args(a) for a in args), {k: self.lower_args(v) for k, v in kwargs.items()}
        result = self.shapes_of(func, args, kwargs)
        if "device" in row.params and isinstance(result, torch.Tensor):  # torch may have taken it from a tracing tensor
            lowered[1]["device"] = device_of(result)
        node = self.emit(func, *lowered, None, self.facts.loc)
        node.raises = may_raise(func, args, kwargs)
        if node.region is not None:
            node.again = node.region.is_again(func, args, kwargs, self.facts.loc)
        node.effect = any(device_of(t).type != "cpu" for t in tensors_in(result))  # even unused, eager may refuse it there
        node.effect |= row.is_random or not func._schema.returns or func.namespace not in KNOWN
        node.effect |= func is aten._local_scalar_dense.default and isinstance(result, SymTypes)  # no node has its number as an argument
        self.attach(node, result)
        return result

    def shapes_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.asking += 1
        try:
            return self.shapes(func, args, kwargs)
        finally:
            self.asking -= 1

    def check(self, cond: Expr, loc: str) -> None:
        """A condition on sizes that the data tell: running has to look, as soon as the operator that tells them has run."""
        fresh = list(self.facts.symbols)[self.settled :]
        if any(isinstance(x, Sym) and x.name in fresh for x in walk(cond)):
            self.waiting.append((cond, loc))
            return
        self.emit(aten._assert_scalar.default, (cond, self.facts.unmet(cond, loc)), {}, None, loc).effect = True

    def attach(self, node: Node, result: Any) -> None:
        """Results of a pure operator are memory of their own."""
        if isinstance(result, torch.Tensor):
            node.spec = spec_of(result)
            self.own(result, node, node.spec)
        elif isinstance(result, (tuple, list)):
            node.spec = tuple(spec_of(r) if isinstance(r, torch.Tensor) else None for r in result)
            for i, r in enumerate(result):
                if isinstance(r, torch.Tensor):
                    self.own(r, self.emit(None, (node, i), {}, node.spec[i], node.loc, "item"), node.spec[i])
        elif isinstance(result, SymTypes):
            node.spec = expr_of(result)
        if self.asking:  # part of a rule: the operator that it describes tells the sizes
            return
        fresh = set(list(self.facts.symbols)[self.settled :])
        if fresh:
            told = [n for spec in leaves(node.spec) for n in (spec.shape if isinstance(spec, TensorSpec) else (spec,))]
            sizes = [n for n in told if isinstance(n, Expr)]
            if fresh & {x.name for x in walk(*sizes) if isinstance(x, Sym)} - {n.name for n in sizes if isinstance(n, Sym)}:
                raise Unsupported("GRA009", at=self.facts.loc, detail=f"{node.target}: no size of the result is the number itself")
        self.settled = len(self.facts.symbols)
        waiting, self.waiting = self.waiting, []
        for row in waiting:
            self.check(*row)

    def record_view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = args[0] if args else kwargs["self"]
        result = self.shapes(func, args, kwargs)
        value = self.value_of(base)
        many = result if isinstance(result, (tuple, list)) else (result,)
        for i, r in enumerate(many):
            self.show(r, base, value, func, args, kwargs, i)
        return result

    def show(self, t: torch.Tensor, base: torch.Tensor, value: Value, func: OpOverload, args: Any, kwargs: Any, i: int) -> None:
        """`t` is result number i of the view operator `func` on `base`."""
        if func in SAME_VIEW:
            t._ts_value = Value(value.root, value.steps, value.overlaps)  # type: ignore[attr-defined]
            return
        spell = SPELL_VIEW.get(func)
        if spell is not None:
            op, rest = spell(self, bind(func, args, kwargs), base, t, i)
            options: dict[str, Any] = {}
            if op is aten.as_strided.default:  # counted from the start of the root's memory, whatever view it was asked of
                t._ts_value = self.strided_value(value, rest, t)  # type: ignore[attr-defined]
                return
        else:
            op, rest, options = func, tuple(args[1:]), dict(kwargs)
        if op in NO_PLAIN_MEMORY and value.steps and value.steps[-1].op is op:  # what it turns is turned back
            t._ts_value = Value(value.root, value.steps[:-1], value.overlaps)  # type: ignore[attr-defined]
            return
        step = Step(op, tuple(self.lower_args(a) for a in rest), options, spec_of(base), spec_of(t), self.facts.loc)
        t._ts_value = Value(value.root, (*value.steps, step), value.overlaps or overlaps(t))  # type: ignore[attr-defined]

    def strided_value(self, value: Value, rest: tuple[Any, ...], t: torch.Tensor) -> Value:
        """`t` as a strided view of a whole piece of memory."""
        root = value.root
        step = Step(aten.as_strided.default, tuple(self.lower_args(a) for a in rest), {}, root.spec, spec_of(t), self.facts.loc)
        return Value(root, (step,), value.overlaps or overlaps(t))

    # -------- writes
    def record_write(self, func: OpOverload, row: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if row.functional is None:
            raise Unsupported("GRA006", at=self.facts.loc, detail=row.name)
        bound = bind(func, args, kwargs)
        if row.functional.namespace == NAMESPACE:
            self.refuse_shared(row, bound)
            torch._C._increment_version([bound[name] for name in row.writes])  # as the operator's own kernel does, which does not run
        call = {p: bound[p] for p in info(row.functional).params}
        positional, named = unbind(row.functional, call)
        lowered = tuple(self.lower_args(a) for a in positional), {k: self.lower_args(v) for k, v in named.items()}
        result = self.shapes_of(row.functional, positional, named)
        node = self.emit(row.functional, *lowered, None, self.facts.loc)
        node.effect, node.raises = row.is_random, may_raise(row.functional, positional, named)
        self.attach(node, result)
        values = list(result) if isinstance(result, (tuple, list)) else [result]
        return finish_write(func, row, bound, values, self.assign)

    def note_copy(self, source: torch.Tensor, made: torch.Tensor, is_view: Callable[[], bool]) -> None:
        roots = self.value_of(source).root, self.value_of(made).root
        twins = Twins(roots, is_view, self.facts.loc)
        for root in roots:
            root.twins.append(twins)

    def refuse_shared(self, row: OpInfo, bound: dict[str, Any]) -> None:
        """Where memory that is written is memory of another argument too, copies of both are not what eager sees."""
        for name in row.writes:
            others = tensors_in([v for k, v in bound.items() if k != name])
            if any(storage(bound[name]) == storage(t) for t in others):
                raise Unsupported("GRA006", at=self.facts.loc, detail=f"{row.name}: {name} shares memory with another argument")

    def assign(self, target: torch.Tensor, new: torch.Tensor) -> None:
        """target takes new's value (same shape; cast to target's dtype)."""
        node, loc = self.node_of(new), self.facts.loc
        spec = spec_of(target)
        if new.dtype != target.dtype:
            node = self.emit(aten._to_copy.default, (node,), {"dtype": target.dtype}, spec, loc)
        value = self.value_of(target)
        for twins in list(value.root.twins):
            twins.part()
        if not value.steps and value.root.input is None and value.root.spec.shape != spec.shape:
            value.root.spec = spec  # an out= tensor of no elements was resized
        if read(self.emit, value.root, value.steps) is node:
            return  # the memory holds this already: x[i] += 1 ends with x[i] = x[i]
        if not value.steps and self.nodes[-1:] == [node] and node.kind == "call" and node.target is not aten.empty.memory_format:
            node.spec = value.root.spec  # just computed for this memory: give it this memory's layout
        write(self.emit, value, node, loc)


def span(t: torch.Tensor, offset: int) -> tuple[int, int]:
    """First and one-past-last storage element of a tensor at the hints of its sizes."""
    sizes, strides = [hint_of(n) for n in t.shape], [hint_of(s) for s in t.stride()]
    return offset, offset if 0 in sizes else offset + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def _expr(v: Any) -> Expr | int:
    return expr_of(v) if isinstance(v, SymTypes) else v


def _exprs(values: Any) -> list[Any]:
    return [_expr(v) for v in values]


# ---------------------------------------------------------------- views in few spellings

NO_PLAIN_MEMORY = frozenset({aten._conj.default, aten._neg_view.default})
SAME_VIEW = frozenset({aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift.default})
Spelling = Callable[[Recording, dict[str, Any], torch.Tensor, torch.Tensor, int], tuple[OpOverload, tuple[Any, ...]]]
SPELL_VIEW: dict[OpOverload, Spelling] = {}


_spell = rows(SPELL_VIEW, "spelling")


def _dim(bound: dict[str, Any], base: torch.Tensor) -> int:
    return bound["dim"] % max(base.dim(), 1)


@_spell(aten.split.Tensor, aten.unsafe_split.Tensor)
def spell_split(rec: Recording, bound: dict[str, Any], base: torch.Tensor, t: torch.Tensor, i: int) -> Any:
    d = _dim(bound, base)
    start = i * bound["split_size"]
    return aten.slice.Tensor, (d, start, start + t.shape[d], 1)


@_spell(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def spell_split_sizes(rec: Recording, bound: dict[str, Any], base: torch.Tensor, t: torch.Tensor, i: int) -> Any:
    start: Any = 0
    for s in bound["split_sizes"][:i]:
        start = start + s
    return aten.slice.Tensor, (_dim(bound, base), start, start + bound["split_sizes"][i], 1)


@_spell(aten.unbind.int)
def spell_unbind(rec: Recording, bound: dict[str, Any], base: torch.Tensor, t: torch.Tensor, i: int) -> Any:
    return aten.select.int, (_dim(bound, base), i)


@_spell(aten.slice.Tensor)
def spell_slice(rec: Recording, bound: dict[str, Any], base: torch.Tensor, t: torch.Tensor, i: int) -> Any:
    """Start and end in range, so that nobody has to clamp again."""
    d, n = _dim(bound, base), base.shape[_dim(bound, base)]
    start, step = bound["start"], bound["step"]
    if start is None or (type(start) is int and start == 0):
        start = 0
    else:
        start = clamp_index(start, n)
    if type(step) is int and step == 1:
        return aten.slice.Tensor, (d, start, start + t.shape[d], 1)
    end = bound["end"]
    if end is None or (type(end) is int and end >= 1 << 62):
        end = n
    else:
        end = end + n if end < 0 else end
        end = torch.sym_max(torch.sym_min(end, n), start)
    return aten.slice.Tensor, (d, start, end, step)


@_spell(aten.select.int)
def spell_select(rec: Recording, bound: dict[str, Any], base: torch.Tensor, t: torch.Tensor, i: int) -> Any:
    d, index = _dim(bound, base), bound["index"]
    return aten.select.int, (d, from_front(index, base.shape[d]))


@_spell(aten.view.default, aten._reshape_alias.default, aten._unsafe_view.default)
def spell_view(rec: Recording, bound: dict[str, Any], base: torch.Tensor, t: torch.Tensor, i: int) -> Any:
    return aten.view.default, (list(t.shape),)


@_spell(aten.expand.default)
def spell_expand(rec: Recording, bound: dict[str, Any], base: torch.Tensor, t: torch.Tensor, i: int) -> Any:
    return aten.expand.default, (list(t.shape),)


@_spell(aten.as_strided.default)
def spell_as_strided(rec: Recording, bound: dict[str, Any], base: torch.Tensor, t: torch.Tensor, i: int) -> Any:
    """The offset counts from the start of the memory, of which an input shows an unknown part: there it must stay the base's."""
    value = rec.value_of(base)
    root = value.root
    if t.dtype != root.spec.dtype or any(step.op in NO_PLAIN_MEMORY for step in value.steps):
        raise Unsupported("GRA006", at=rec.facts.loc, detail="as_strided of a view of another dtype")
    offset = t.storage_offset() - root.tensor.storage_offset()
    reach, have = span(t, hint_of(offset)), span(root.tensor, 0)
    if reach[0] < 0 or reach[1] > have[1]:
        raise Unsupported("GRA006", at=rec.facts.loc, detail="as_strided outside of the memory that a tensor shows")
    return aten.as_strided.default, (list(t.shape), list(t.stride()), offset)


# ---------------------------------------------------------------- writes with a meaning of their own

WriteRule = Callable[..., Any]
WRITES: dict[OpOverload, WriteRule] = {}


_writes = rows(WRITES, "write rule")


@_writes(aten.copy_.default)
def write_copy(rec: Recording, func: OpOverload, self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with rec._operators:
        rec.assign(self, src if is_shape(src.shape, self.shape) else src.expand(self.shape))
    return self


@_writes(aten.fill_.Scalar)
def write_fill(rec: Recording, func: OpOverload, self: torch.Tensor, value: Any) -> torch.Tensor:
    with rec._operators:
        rec.assign(self, rec.made_on(device_of(self), torch.full, (self.shape, value), {"dtype": self.dtype}))
    return self


@_writes(aten.fill_.Tensor)
def write_fill_tensor(rec: Recording, func: OpOverload, self: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return write_copy(rec, func, self, value)


@_writes(aten.zero_.default)
def write_zero(rec: Recording, func: OpOverload, self: torch.Tensor) -> torch.Tensor:
    return write_fill(rec, func, self, 0)


@_writes(aten.bernoulli_.float)
def write_bernoulli(rec: Recording, func: OpOverload, self: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> torch.Tensor:
    """In place, eager draws in the order of memory; the functional operator always draws for a contiguous tensor."""
    order = sorted(range(self.dim()), key=lambda d: -rank_of(self.stride(d)))
    back = sorted(range(self.dim()), key=order.__getitem__)
    with rec._operators:
        blank = rec.made_on(device_of(self), torch.empty, ([self.shape[d] for d in order],), {"dtype": self.dtype})
        rec.assign(self, rec.dispatch(aten.bernoulli.p, (blank, p), {"generator": generator}).permute(back))
    return self


@_writes(aten.native_batch_norm.default)
def write_batch_norm(
    rec: Recording,
    func: OpOverload,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Running statistics are written only in training; each form has its own functional operator."""
    rest = (weight, bias, running_mean, running_var)
    if not training:
        op = aten._native_batch_norm_legit_no_training.default
        return rec.record_pure(op, info(op), (input, *rest, momentum, eps), {})
    if running_mean is None or running_var is None:
        op = aten._native_batch_norm_legit.no_stats
        return rec.record_pure(op, info(op), (input, weight, bias, training, momentum, eps), {})
    return rec.record_write(func, info(func), (input, *rest, training, momentum, eps), {})


def _change_geometry(rec: Recording, func: OpOverload, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """transpose_, squeeze_ ...: the object becomes another view of the same memory."""
    op = GEOMETRY[func]
    before, value = spec_of(self), rec.value_of(self)
    bound = bind(func, (self, *args), kwargs)
    old = torch.as_strided(self, self.shape, self.stride(), self.storage_offset())
    if value.root.tensor is self:  # it goes on to show the whole memory
        old._ts_value, value.root.tensor = value, old  # type: ignore[attr-defined]
    change_geometry(func, bound)
    shape = tuple(self.shape)
    is_same = is_shape(old.shape, shape) and same_layout(shape, tuple(self.stride()), tuple(old.stride()))
    if is_same and self.storage_offset() == old.storage_offset():
        return self
    spell = SPELL_VIEW.get(op)
    if spell is not None:
        old._ts_value = value  # type: ignore[attr-defined]
        op, rest = spell(rec, bound | {"self": old}, old, self, 0)
        if op is aten.as_strided.default:
            self._ts_value = rec.strided_value(value, rest, self)  # type: ignore[attr-defined]
            return self
    else:
        rest = (*args, *kwargs.values())
    step = Step(op, tuple(rec.lower_args(a) for a in rest), {}, before, spec_of(self), rec.facts.loc)
    self._ts_value = Value(value.root, (*value.steps, step), value.overlaps or overlaps(self))  # type: ignore[attr-defined]
    return self


_writes(*GEOMETRY)(_change_geometry)


@_writes(aten.resize_.default)
def write_resize(rec: Recording, func: OpOverload, self: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    if not are_equal(self.shape, size):
        raise Unsupported("GRA006", at=rec.facts.loc, detail="resize_ to another size")
    return resize(self, size, memory_format)


@_writes(aten.resize_as_.default)
def write_resize_as(
    rec: Recording, func: OpOverload, self: torch.Tensor, the_template: torch.Tensor, *, memory_format: Any = None
) -> torch.Tensor:
    return write_resize(rec, func, self, the_template.shape, memory_format=format_like(the_template, memory_format))


@_writes(aten.detach_.default)
def write_detach(rec: Recording, func: OpOverload, self: torch.Tensor) -> torch.Tensor:
    return self
