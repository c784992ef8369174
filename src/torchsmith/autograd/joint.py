"""A captured graph and its derivative, recorded together and cut in two functional graphs.

In: a captured GraphModule whose results autograd has to know, and its size facts. Out: the forward graph, which also returns what the
backward graph needs, and the backward graph: from that and the results' gradients to the inputs' gradients.

What the backward pass keeps and what it computes again is chosen in recompute.py; views and constants are always made again.
"""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from ..codes import Unsupported
from ..graph.canonical import emit_graph
from ..graph.functionalise import Recording, run_captured, traced
from ..graph.layout import is_dense
from ..graph.outputs import FreshNode, InputNumber, Outputs, ViewOf, describe_outputs
from ..graph.schema import draws, may_draw
from ..graph.sizes import SizeFacts
from ..graph.spec import LASTING, FunctionalGraph, TensorSpec
from ..graph.tracing import device_of, make_unseen, remember_device
from ..graph.values import Node, Root, Step, inputs_of, is_kept
from ..ir.expr import Expr, Sym, walk
from ..ir.nested import leaves
from ..ir.program import Symbol
from .recompute import Choice, choose

aten = torch.ops.aten
Orders = tuple[tuple[int, ...] | None, ...] | None


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an input of the backward graph comes from: ("input", i) and ("size", i, dim, scale, shift) of the forward call,
    ("kept", k): its result k, ("tangent", j): the gradient of root j."""

    kind: str
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """`grads`: per leaf, the number of the graph's result, or None where no gradient flows."""

    graph: FunctionalGraph
    slots: tuple[Slot, ...]
    grads: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The first `shown` results of `forward` are the program's own, the others are kept for `backward`.

    roots: results whose gradients come in, leaves: inputs whose gradients go out. again: (result, ("input", i) | ("out", k), view steps
    or None): views that are made anew of what autograd knows, by replaying the program's views, or from the view's own strides.
    old: per input that is written and from whose old value the roots follow, the number of the result that holds that value.
    """

    forward: FunctionalGraph
    shown: int
    roots: tuple[int, ...]
    leaves: tuple[int, ...]
    again: tuple[tuple[int, tuple[str, int], tuple[Step, ...] | None], ...]
    backward: Backward
    draws: bool
    may_draw: bool  # it does, or an operator of the user's does
    written: tuple[int, ...]
    old: dict[int, int] = field(default_factory=dict)
    choice: Choice | None = None  # what backward keeps and computes again
    again_ops: tuple[str, ...] = ()  # operators that backward computes again, views left out


def _forget(roots: dict[int, Root]) -> None:
    """A tensor knows its piece of memory, which knows a tensor: where autograd saved one of them, no garbage collection sees the circle."""
    for root in roots.values():
        del root.tensor


class Joint:
    """One recording of the forward pass, from which backward passes are derived.

    budget: of the bytes that backward keeps by default, 0 to 1 (options.activation_memory_budget). kept_format: how a value that only
    backward reads is kept, where not row-major as eager lays it out (None: as eager does).
    """

    def __init__(
        self, gm: fx.GraphModule, facts: SizeFacts, budget: float = 1.0,
        kept_format: Callable[[TensorSpec], TensorSpec | None] | None = None,
    ) -> None:  # fmt: skip
        self.facts, self.rec = facts, Recording(facts, alive=True)
        weakref.finalize(self, _forget, self.rec.roots).atexit = False
        self.outs, self.outputs = traced(self.rec, lambda: self._forward(gm))
        rec = self.rec
        self.border, self.n_inputs = len(rec.nodes), len(rec.inputs)
        self.spent: tuple[int, ...] = gm.meta.get("spent", ())  # results that a backward pass of the program itself has used up
        self.leaves = tuple(i for i, t in enumerate(rec.inputs) if isinstance(t, torch.Tensor) and t.requires_grad)
        came = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        self.switched = frozenset(i for i in self.leaves if not came[i].requires_grad)  # the program says that these require grad
        self.roots = self._roots()
        self.inner = self._inner()  # roots from which other roots follow
        self.earlier: list[Node] = rec.nodes[: self.border]
        self.kept: dict[int, int] = {}  # id of a node -> number of the forward graph's result
        self.keeping: list[Node] = []
        self.is_cut = False  # the forward graph is made: nothing more can be kept
        self.budget, self.choice = budget, None  # type: float, Choice | None
        self.repeated: dict[int, Node] = {}  # nodes that backward computes again
        self._tangents: dict[int, int] = {}  # id of a placeholder -> the root whose gradient it is
        self._copies: dict[int, Node] = {}
        self._kept_format, self._images = kept_format, None  # type: Any, frozenset[int] | None

    def _forward(self, gm: fx.GraphModule) -> tuple[list[Any], Outputs]:
        outs = run_captured(gm, self.rec)
        for t, fn in self.rec.watched:
            if t.requires_grad and t.grad_fn is not fn:
                raise Unsupported("AUT001", at=self.facts.loc, detail="an input is written where gradients flow")
        outputs = describe_outputs(self.rec, outs, homes=True, lone=gm.meta.get("stops", False))
        outs = [*outs, *outputs.homes]
        rows = list(outputs.results)
        for k, row in enumerate(rows):
            if isinstance(row, ViewOf):
                base = self.rec.inputs[row.of] if isinstance(row.of, int) else outs[row.of[1]]
                rows[k] = replace(row, apart=row.apart or _has_own_derivative(outs[k], base))
        return outs, replace(outputs, results=tuple(rows))

    def _roots(self) -> tuple[int, ...]:
        """Fresh results that require grad, and such parts of memory that is no result itself, each tensor once."""
        found: dict[int, int] = {}
        for k, (row, t) in enumerate(zip(self.outputs.results, self.outs, strict=True)):
            if k in self.spent and isinstance(row, FreshNode):
                continue
            if isinstance(row, (FreshNode, ViewOf)) and t.requires_grad and (isinstance(row, FreshNode) or row.apart):
                if t.is_leaf:  # its gradient goes into its own `grad`
                    raise Unsupported("AUT001", at=self.facts.loc, detail="a leaf that is made inside and returned")
                found.setdefault(id(t), k)
            elif isinstance(row, ViewOf) and isinstance(row.of, tuple) and t.requires_grad and not self.outs[row.of[1]].requires_grad:
                raise Unsupported("AUT001", at=self.facts.loc, detail="a result that requires grad is a view of one that does not")
        return tuple(found.values())

    def _inner(self) -> tuple[int, ...]:
        makers: dict[Any, list[int]] = {}
        for k in self.roots:
            makers.setdefault(self.outs[k].grad_fn, []).append(k)
        found: set[int] = set()
        seen: set[Any] = set()
        todo = list(makers) if len(self.roots) > 1 else []
        while todo:
            for node, _ in todo.pop().next_functions:
                found.update(makers.get(node, ()))
                if node is not None and node not in seen:
                    seen.add(node)
                    todo.append(node)
        return tuple(sorted(found))

    def _again(self) -> tuple[tuple[int, tuple[str, int], tuple[Step, ...] | None], ...]:
        rows = []
        for k, (row, t) in enumerate(zip(self.outputs.results, self.outs, strict=True)):
            if not isinstance(row, ViewOf) or row.apart or not t.requires_grad or t.grad_fn is None:  # made under no_grad: no history
                continue
            steps = self.rec.value_of(t).steps
            plain = not any(isinstance(x, (Expr, Node)) for s in steps for x in leaves(s.args, s.kwargs))
            if isinstance(row.of, int):
                rows.append((k, ("input", row.of), steps if plain else None))
            else:
                rows.append((k, ("out", row.of[1]), None))
        return tuple(rows)

    # ------------------------------------------------------------ backward

    def backward(self, wanted: Sequence[int] | None = None, orders: Orders = None) -> Backward:
        """The derivative for gradients of the roots numbered `wanted` (all of them).

        orders: per such root the order in memory, outermost dimension first, in which its gradient comes; None: the result's own.
        """
        rec, chosen = self.rec, list(range(len(self.roots)) if wanted is None else wanted)
        start = len(rec.nodes)

        def work() -> tuple[Outputs, tuple[Any, ...]]:
            roots = [self.outs[self.roots[j]] for j in chosen]
            tangents = [rec.input(_tangent(t, o), "input") for t, o in zip(roots, orders or (None,) * len(roots), strict=True)]
            self._tangents = {id(rec.placeholders[-len(chosen) + n]): j for n, j in enumerate(chosen)}
            leaves = [rec.inputs[i] for i in self.leaves]
            seen = [rec.value_of(t).root for t in (*rec.inputs, *self.outs) if isinstance(t, torch.Tensor)]
            held = [root.node for root in seen]
            grads = torch.autograd.grad(roots, leaves, tangents, retain_graph=True, allow_unused=True)
            if any(root.node is not node for root, node in zip(seen, held, strict=True)):  # the program sees this memory
                raise Unsupported("AUT001", at=self.facts.loc, detail="the backward pass writes to an input, a result or a gradient")
            return describe_outputs(rec, [g for g in grads if g is not None]), grads

        before = (len(rec.inputs), len(rec.const_nodes))
        try:
            outputs, grads = traced(rec, work)
        finally:
            inputs = rec.placeholders[before[0] :]
            del rec.inputs[before[0] :], rec.placeholders[before[0] :], rec.input_specs[before[0] :], rec.roles[before[0] :]
        count = iter(range(len(grads)))
        numbers = tuple(None if g is None else next(count) for g in grads)
        return self._part(rec.nodes[start:], outputs, numbers, inputs)

    def _part(self, nodes: list[Node], outputs: Outputs, numbers: tuple[int | None, ...], tangents: list[Node]) -> Backward:
        part = _Part(self, tangents)
        needed: set[int] = set()
        rows: list[Any] = []
        for row in outputs.results:
            if isinstance(row, FreshNode):
                needed.add(id(row.node))
        live = []
        for node in reversed(nodes):
            if id(node) in needed or is_kept(node):
                live.append(node)
                needed.update(id(a) for a in inputs_of(node))
        if self.choice is None:
            self._choose(live, outputs)
        for node in reversed(live):
            part.copy(node)
        everything = [*self.rec.placeholders, *tangents]
        for row in outputs.results:
            if isinstance(row, FreshNode):
                rows.append(FreshNode(part.copy(row.node)))
            elif isinstance(row, InputNumber):
                rows.append(InputNumber(part.number(everything[row.index])))
            elif isinstance(row, ViewOf):
                rows.append(replace(row, of=part.number(everything[row.of])) if isinstance(row.of, int) else row)
            else:
                raise Unsupported("AUT004", at=self.facts.loc, detail="a gradient that is a number")
        graph = emit_graph(part.recording(rows), Outputs(tuple(rows), ()), tuple(range(len(rows))))
        return Backward(graph, tuple(part.slots), numbers)

    def _choose(self, live: list[Node], outputs: Outputs) -> None:
        """What the backward pass made of the nodes `live` keeps, and what it computes again."""
        read = [a for n in live for a in inputs_of(n)]
        read += [row.node for row in outputs.results if isinstance(row, FreshNode)]
        earlier = {id(n) for n in self.earlier}
        shown = frozenset(id(r.node) for r in self.outputs.results if isinstance(r, FreshNode))
        saved = set()  # what eager saves: the program may not write it before the backward pass, and may write everything else
        for n in read:
            saved.add(id(n))
            while n.view_of is not None:
                n = n.view_of
                saved.add(id(n))
        exact = set()
        for side in (a for n in live if n.target is aten.eq.Tensor for a in inputs_of(n)):  # "is it the largest?"
            while side.view_of is not None:
                side = side.view_of
            exact.add(id(side))
        loose = {id(n) for n, role in zip(self.rec.placeholders, self.rec.roles, strict=False) if role != "param" and id(n) not in saved}
        needed = {id(n) for n in read if id(n) in earlier}
        self.choice = choose(self.earlier, needed, shown, self.budget, frozenset(loose), frozenset(exact))

    def keep(self, node: Node) -> int:
        """The number of the forward graph's result that holds this node's value."""
        if id(node) not in self.kept:
            if self.is_cut:
                raise Unsupported("AUT004", at=self.facts.loc, detail="a derivative for some results needs what was not kept")
            shown = next((k for k, r in enumerate(self.outputs.results) if isinstance(r, FreshNode) and r.node is node), None)
            if shown is None:
                shown = len(self.outputs.results) + len(self.keeping)
                self.keeping.append(node)
            self.kept[id(node)] = shown
        return self.kept[id(node)]

    def kept_spec(self, node: Node) -> Any:
        """What lies in the result that holds this node's value."""
        number = self.keep(node)
        if number < len(self.outputs.results) or self._kept_format is None or id(node) not in self.images():
            return node.spec
        return self._kept_format(node.spec) or node.spec

    def images(self) -> frozenset[int]:
        """Nodes whose values convolutions of images make or read, or that follow from them channel by channel."""
        if self._images is None:
            found: set[int] = set()
            for n in self.rec.nodes[: self.border]:
                shape = n.spec.shape if isinstance(n.spec, TensorSpec) else None
                if shape is not None and len(shape) != 4:
                    continue
                if n.target is aten.convolution.default:
                    found.add(id(n))
                    found.update(id(a) for a in inputs_of(n)[:1])
                for a in inputs_of(n):
                    known = a.spec.shape if isinstance(a.spec, TensorSpec) else None
                    if id(a) in found and (shape is None or known is None or all(map(operator.is_, shape[:2], known[:2]))):
                        found.add(id(n))
            self._images = frozenset(found)
        return self._images

    def _as_kept(self, node: Node) -> Node:
        spec = self.kept_spec(node)
        if spec is node.spec:
            return node
        copy = Node("call", aten.clone.default, (node,), {"memory_format": torch.channels_last}, spec, node.loc)
        self.earlier.append(copy)
        return copy

    def old_value(self, number: int) -> Node:
        """A copy of an input that the forward graph writes, from before the write."""
        node = self.rec.placeholders[number]
        if number not in self._copies:
            self._copies[number] = Node("call", aten.clone.default, (node,), {}, node.spec, self.facts.loc, effect=True)
            self.earlier.append(self._copies[number])
        return self._copies[number]

    # ------------------------------------------------------------ cut

    def cut(self) -> Cut:
        """Both graphs."""
        nothing = Backward(FunctionalGraph(fx.Graph(), (), (), (), (), ""), (), (None,) * len(self.leaves))
        backward = self.backward() if self.roots else nothing  # results that are views of inputs are made of those
        reached = tuple(i for i, g in zip(self.leaves, backward.grads, strict=True) if g is not None)
        if reached:  # what is only detached, or not read, is no part of eager's graph: its own history is not kept alive, nor run
            self.leaves, backward = reached, replace(backward, grads=tuple(g for g in backward.grads if g is not None))
        old = {number: self.keep(self.old_value(number)) for number in self._written_and_read()}
        self.is_cut = True
        rec = self.rec
        results = (*self.outputs.results, *(FreshNode(self._as_kept(n)) for n in self.keeping))
        shown = SimpleNamespace(
            nodes=self.earlier, inputs=rec.inputs, placeholders=rec.placeholders, roles=rec.roles, input_specs=rec.input_specs,
            facts=self.facts, **_constants(rec, self.earlier, results, self.outputs.write_backs),
        )  # fmt: skip
        passing = tuple(range(len(self.outputs.results), len(results)))
        forward = emit_graph(shown, Outputs(results, self.outputs.write_backs), passing)  # type: ignore[arg-type]
        written = tuple(number for number, _ in self.outputs.write_backs)
        calls = [(n.target, n.args, n.kwargs) for n in self.earlier if isinstance(n.target, torch._ops.OpOverload)]
        random = any(draws(*c) for c in calls), any(may_draw(*c) for c in calls)
        again = tuple(str(n.target).removesuffix(".default") for n in self.repeated.values() if n.view_of is None and n.kind == "call")
        return Cut(
            forward, len(self.outputs.results), self.roots, self.leaves, self._again(), backward, *random, written, old, self.choice,
            again,
        )  # fmt: skip

    def _written_and_read(self) -> list[int]:
        """Inputs that are written, and from whose old value the roots follow: who computes the roots again needs it."""
        written = {id(self.rec.placeholders[number]): number for number, _ in self.outputs.write_backs}
        found, seen, open_ = [], set(), [self.rec.value_of(self.outs[k]).root.node for k in self.roots] if written else []
        while open_:
            node = open_.pop()
            if id(node) not in seen:
                seen.add(id(node))
                found += [written[id(node)]] if id(node) in written else []
                open_ += inputs_of(node)
        return sorted(found)


class _Part:
    """The backward graph under construction: copies of nodes, whose inputs are what forward keeps."""

    def __init__(self, joint: Joint, tangents: list[Node]) -> None:
        self.joint, self.made, self.nodes = joint, {}, []  # type: ignore[var-annotated]
        self.tangents = {id(n): j for n, j in ((n, joint._tangents[id(n)]) for n in tangents)}
        self.inputs = {id(n): i for i, n in enumerate(joint.rec.placeholders)}
        self.consts = {id(n) for n in joint.rec.const_nodes}
        self.earlier = {id(n) for n in joint.earlier}
        items = (n for n in joint.earlier if n.target is aten._local_scalar_dense.default)
        self.told = {n.spec.name: n for n in items if isinstance(n.spec, Sym)}  # who reads a number from a tensor: read again here
        self.slots: list[Slot] = []
        self.placeholders: list[Node] = []
        self.written = {number for number, _ in joint.outputs.write_backs}
        self.used_consts: list[Node] = []

    def copy(self, node: Node) -> Node:
        """What stands for a node here. What it is computed from comes first: chains may be longer than Python's stack is deep."""
        made, open_ = self.made, [node]
        while open_:
            missing = [] if id(open_[-1]) in made else [n for n in self._read_by(open_[-1]) if id(n) not in made]
            if missing:
                open_ += reversed(missing)
            elif id(last := open_.pop()) not in made:
                made[id(last)] = self._copied(last)
        return made[id(node)]  # type: ignore[no-any-return]

    def _read_by(self, node: Node) -> list[Node]:
        """The nodes whose copies a node's copy reads; none where something brings its value."""
        brought = id(node) in self.consts or id(node) in self.tangents or id(node) in self.inputs
        if brought or (id(node) in self.earlier and not self._is_repeated(node)):
            return []
        read = [*inputs_of(node), *([] if node.view_of is None else [node.view_of])]
        if self.told:
            told = (node.spec, node.args, tuple(node.kwargs.values()), tuple(n.spec for n in inputs_of(node)))
            seen = {x.name for e in _exprs(told) for x in walk(e) if isinstance(x, Sym)}
            read += [n for name, n in self.told.items() if name in seen and n is not node]
        return read

    def _copied(self, node: Node) -> Node:
        if id(node) in self.consts:
            self.used_consts.append(node)
            return node
        if id(node) in self.tangents:
            return self._input(Slot("tangent", (self.tangents[id(node)],)), node.spec)
        if id(node) in self.inputs:
            number = self.inputs[id(node)]
            if number in self.written:
                return self._input(Slot("kept", (self.joint.keep(self.joint.old_value(number)),)), node.spec)
            return self._input(Slot("input", (number,)), node.spec)
        if id(node) in self.earlier and not self._is_repeated(node):
            return self._brought(node)
        args, kwargs = self._mapped(node.args), {k: self._mapped(v) for k, v in node.kwargs.items()}
        new = Node(node.kind, node.target, args, kwargs, node.spec, node.loc, node.effect, node.raises and id(node) not in self.earlier)
        if node.view_of is not None:
            new.view_of = self.copy(node.view_of)
        self.nodes.append(new)
        return new

    def _brought(self, node: Node) -> Node:
        """What forward kept, laid out as eager lays it out, however it was kept: which kernel a library takes may depend on it."""
        kept = self._input(Slot("kept", (self.joint.keep(node),)), self.joint.kept_spec(node))
        if kept.spec is node.spec:
            return kept
        self.nodes.append(Node("call", aten.clone.default, (kept,), {"memory_format": torch.contiguous_format}, node.spec, node.loc))
        return self.nodes[-1]

    def _is_repeated(self, node: Node) -> bool:
        """Is it computed again instead of kept?"""
        if isinstance(node.spec, Sym) and self.told.get(node.spec.name) is node:
            return True
        choice = self.joint.choice
        if choice is None or id(node) not in choice.again:
            return False
        self.joint.repeated[id(node)] = node
        return True

    def _mapped(self, v: Any) -> Any:
        if isinstance(v, Node):
            return self.copy(v)
        return type(v)(self._mapped(x) for x in v) if type(v) in (list, tuple) else v

    def _input(self, slot: Slot, spec: Any) -> Node:
        node = Node("placeholder", f"in{len(self.slots)}", (), {}, spec)
        self.slots.append(slot)
        self.placeholders.append(node)
        return node

    def _role(self, slot: Slot) -> str:
        """What forward keeps for backward alone, and weights, are expected where they were. What the program sees too it may hold."""
        if slot.kind == "kept":
            return "kept" if slot.at[0] >= len(self.joint.outputs.results) else "input"
        return "kept" if slot.kind == "input" and self.joint.rec.roles[slot.at[0]] in LASTING else "input"

    def number(self, node: Node) -> int:
        """The number of the input that stands for a placeholder."""
        return self.placeholders.index(self.copy(node))

    def recording(self, results: Sequence[Any]) -> Any:
        """What emit_graph reads of a Recording."""
        symbols = self._symbols([r.spec for r in results if isinstance(r, ViewOf)])
        theirs = self.joint.facts
        facts = SimpleNamespace(symbols=symbols, number=theirs.number, guards=theirs.guards, late=theirs.late, hints=theirs.hints)
        specs = [n.spec for n in self.placeholders]
        consts = {id(n): c for n, c in zip(self.joint.rec.const_nodes, self.joint.rec.consts, strict=True)}
        nodes = [Node("placeholder", f"const{k}", (), {}, n.spec) for k, n in enumerate(self.used_consts)]
        swap = dict(zip(map(id, self.used_consts), nodes, strict=True))
        for n in self.nodes:
            n.args, n.kwargs = _swapped(n.args, swap), {k: _swapped(v, swap) for k, v in n.kwargs.items()}
        return SimpleNamespace(
            nodes=self.nodes, placeholders=self.placeholders, roles=[self._role(s) for s in self.slots], input_specs=specs, facts=facts,
            const_nodes=nodes, consts=[consts[id(n)] for n in self.used_consts],
        )  # fmt: skip

    def _symbols(self, shown: Sequence[Any]) -> dict[str, Symbol]:
        """Symbols of the sizes used here, with places among this graph's inputs. shown: what results that are views look like."""
        rows = self.joint.facts.symbols
        used: list[str] = []

        def use(seen: Any) -> None:
            named = (x.name for e in _exprs(seen) for x in walk(e) if isinstance(x, Sym) and x.name in rows)
            used.extend(dict.fromkeys(name for name in named if name not in used))

        for n in (*self.placeholders, *self.nodes):
            use((n.spec, n.args, tuple(n.kwargs.values())))
        use(tuple(shown))
        found: dict[str, Symbol] = {}
        for name in used:  # which grows
            row = rows[name]
            place = _dimension(self.placeholders, row.sym)
            sized = None if place is not None or row.origin[0] in ("size", "scalar") else _dimension(self.joint.earlier, row.sym)
            if sized is not None and name not in self.told:  # a tensor of that size comes along
                brought = self.joint.earlier[sized[0]]
                use(self._input(Slot("kept", (self.joint.keep(brought),)), self.joint.kept_spec(brought)).spec)
                place = _dimension(self.placeholders, row.sym)
            if place is not None:
                found[name] = replace(row, origin=("size", *place))
                continue
            kind, *at = row.origin
            is_here = kind == "bound" and _dimension(self.nodes, row.sym) is not None  # a node of this graph tells it
            if is_here or (name in self.told and id(self.told[name]) in self.made):
                found[name] = row
                continue
            if kind not in ("size", "scalar"):
                raise Unsupported("AUT004", at=self.joint.facts.loc, detail=f"a size that only running tells ({name})")
            slot = Slot("input" if kind == "scalar" else "size", tuple(int(a) for a in at))
            self._input(slot, row.sym)
            found[name] = replace(row, origin=("scalar", len(self.slots) - 1))
        return found


_VIEWS = re.compile(
    r"(Reshape)?Alias|AsStrided|(Unsafe)?View|T|(Uns|S)queeze|Select|Slice|Split|Unbind|Transpose|Permute|Expand|Diagonal|Unfold|View\w+"
)


def _maker(t: torch.Tensor) -> Any:
    """The node of autograd behind the views through which it knows a tensor."""
    fn = t.grad_fn
    while fn is not None and _VIEWS.fullmatch(re.sub(r"Backward\d*$", "", fn.name())):
        fn = fn.next_functions[0][0]
    return fn


def _has_own_derivative(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Shows `t` memory of `base` as the result of an autograd.Function, which a view made anew would not go back through, or `base` that
    of `t`?"""
    of_t, of_base = _maker(t), _maker(base)
    return of_t is not of_base and any(isinstance(fn, torch.autograd.function.BackwardCFunction) for fn in (of_t, of_base))


def _dimension(nodes: Sequence[Node], size: Sym) -> tuple[int, int] | None:
    """The first of these nodes, and its dimension, that has this size."""
    specs = ((k, n.spec) for k, n in enumerate(nodes))
    return next(((k, d) for k, s in specs if isinstance(s, TensorSpec) for d, n in enumerate(s.shape) if n is size), None)


def _tangent(t: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """A gradient as autograd brings it: dense, like the tensor or in the given order."""
    strides: Any = t.stride()
    if order is not None:
        strides, count = [0] * t.dim(), 1
        for d in reversed(order):
            strides[d], count = count, count * t.shape[d]
    elif not is_dense(t):
        strides = torch.empty_like(t, memory_format=torch.contiguous_format).stride()
    return remember_device(make_unseen(t.shape, strides, t.dtype), device_of(t))


def _exprs(v: Any) -> Iterable[Expr]:
    for x in leaves(v):
        if isinstance(x, Expr):
            yield x
        elif isinstance(x, TensorSpec):
            yield from (*x.shape, *x.strides)


def _swapped(v: Any, swap: dict[int, Node]) -> Any:
    if isinstance(v, Node):
        return swap.get(id(v), v)
    return type(v)(_swapped(x, swap) for x in v) if type(v) in (list, tuple) else v


def _constants(rec: Recording, nodes: list[Node], results: Sequence[Any], write_backs: Sequence[tuple[int, Node]]) -> dict[str, Any]:
    """The constants that these nodes use."""
    used = {id(a) for n in nodes for a in inputs_of(n)}
    used |= {id(r.node) for r in results if isinstance(r, FreshNode)} | {id(n) for _, n in write_backs}
    rows = [(n, c) for n, c in zip(rec.const_nodes, rec.consts, strict=True) if id(n) in used]
    for k, (n, _) in enumerate(rows):
        n.target = f"const{k}"
    return {"const_nodes": [n for n, _ in rows], "consts": [c for _, c in rows]}
