"""The recorder: each torch call becomes one node of the captured graph, run once on tracing tensors.

In: a torch function or method name with the machine's values. Out: the machine's value of the result; nodes carry meta "val",
"loc", placeholders also "role" and "source". A call whose result holds no tensor is a plain Python value and leaves no node.
"""

from __future__ import annotations

import math
import operator
import re
import types
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch.utils._device import _device_constructors
from torch.utils._mode_utils import no_dispatch

from ..codes import Unsupported
from ..graph import tracing
from ..graph.declared import DeclaredSize
from ..graph.region import Region
from ..graph.sizes import LARGEST, SizeFacts, SizeNode, SymTypes
from ..graph.spec import add_node
from ..ir import dtype as dt
from ..ir.expr import Cast, Const, Expr, Op, Sym
from . import attributes as at
from . import floats, overrides, transforms
from .attributes import Raised
from .guards import default_device, tensor_guard
from .protocol import Machine
from .source import ITSELF, Attr, Computed, FixedObject, Guard, Local, Source, TensorGuard, TensorProperty, TypeOf
from .world import MISSING, Momentary, root_of


class Info:
    """What the machine knows of one tracing tensor."""

    __slots__ = ("_make", "_tensor", "cls", "data", "grad_fn", "node", "place", "real", "source", "switched", "version")

    def __init__(self, tensor: torch.Tensor | None, node: torch.fx.Node, source: Source | None, real: torch.Tensor | None, make: Any = None) -> None:
        """make: where there is no tensor yet, makes it."""
        self.node, self.source, self.real, self._make = node, source, real, make
        self.cls: type = type(real) if real is not None else torch.Tensor
        self.data: torch.fx.Node | None = None  # the value that `tensor.data = ...` gave it
        self.switched = False  # the program said whether this input requires grad
        self.place = (-1, "")  # of a Parameter that the program made: the outermost frame's instruction, and the line
        self._tensor: torch.Tensor | None = None
        if tensor is not None:
            self.tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The tracing tensor; of an input that only stamps know it is made now."""
        if self._tensor is None:
            self._make(self)
        return self._tensor  # type: ignore[return-value]

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.grad_fn = tensor.grad_fn if self.real is not None else None  # what an input came with
        self.version = _version(tensor)  # when it became known

    @property
    def is_made(self) -> bool:
        return self._tensor is not None

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad or (self.real is not None and not self.switched and self.real.requires_grad)

    @property
    def leaf(self) -> bool:
        return self.tensor.is_leaf

    @property
    def is_apart(self) -> bool:
        """A view that was made where gradients were off: it requires grad as its base does, and autograd knows no more of it."""
        return self.real is None and self.tensor.grad_fn is None and self.tensor._is_view()

    @property
    def is_differentiated(self) -> bool:
        """An input that autograd has to know more of after the call than before."""
        if self.real is None or not self.is_made or not self.tensor.requires_grad:
            return False
        return not (self.real.requires_grad or self.switched) or self.tensor.grad_fn is not self.grad_fn


_DEEPEST = 150  # expressions inside each other; passes below call themselves for each
_SIZE_OPS: dict[str, Any] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "neg": operator.neg, "min": min, "max": max, "div": operator.truediv, "pow": operator.pow, "eq": operator.eq, "ne": operator.ne,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "sqrt": torch.sym_sqrt, "floor": math.floor,
    "ceil": math.ceil, "trunc": math.trunc, "round": round, "where": torch.sym_ite,
}  # fmt: skip
_FX_LEAVES = frozenset(
    {int, float, bool, str, complex, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class Complex(complex):
    """A complex number whose own text means another one (-0j), or nothing (infj): graphs are printed and read again."""

    def __repr__(self) -> str:
        return f"complex({self.real!r}, {self.imag!r})"


def _reads_back(value: complex) -> bool:
    return all(math.isfinite(part) and (part != 0 or math.copysign(1.0, part) > 0) for part in (value.real, value.imag))


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # Python's types, where torch takes a dtype
_MOVES = frozenset({"to", "cpu", "cuda", "type_as", "as_tensor", "asarray", "copy_"})  # between devices


_EXACT: tuple[tuple[type, Callable[[Any], Any]], ...] = ((int, int.__int__), (float, float.__float__), (str, str.__str__))  # no method of the program's runs


class Recorder:
    """The graph under construction and the tracing tensors it knows."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.loc, self.asked = machine, machine.loc, machine.asked
        self.root = self.graph = torch.fx.Graph()  # the graph of the frame; the one written to (a transform's body has its own)
        self.bodies: list[transforms.Body] = []  # open ones, innermost last
        self.regions: list[Region] = []  # open checkpointed parts of the program, innermost last
        self.has_regions = False  # there was one
        self.infos: dict[int, Info] = {}
        self.inputs: list[Source] = []
        self.real: dict[int, Info] = {}  # id of an outside tensor -> its placeholder
        self.by_memory: dict[int, list[Info]] = {}  # the same placeholders by their tracing tensors' memory, which `keep` keeps
        self.facts = SizeFacts()
        self.facts.sources = {}
        self.facts.reads_data = machine.is_whole or self.asked.reads
        self.facts.is_promise = machine.is_whole
        self.facts.loose = self.asked.loose
        self.size_nodes: dict[
            str, tuple[torch.fx.Node, int, int, int]
        ] = {}  # where a symbol is measured: (size(node, dim) - shift) / scale
        self.exprs: dict[Expr, torch.fx.Node] = {}
        self.last_input: torch.fx.Node | None = None
        self.keep: list[Any] = []
        self.declared_symbols: dict[str, torch.SymInt] = {}
        self.numbers: dict[str, torch.SymInt | torch.SymFloat] = {}  # by source: integers and floats that vary
        self.may_be_caught = False  # some node stands where the program handles exceptions
        self.acts = False  # the program does something outside that is seen although the graph raises
        self.data: set[str] = set()  # numbers that Python computed behind a break: they vary
        self.inference: dict[int, bool] = {}  # by memory: do inference tensors lie in it?

    def let_go(self) -> None:
        """The capture is over: tensors of the program are dropped, whatever tracing tensors live on in the graph."""
        for held in (self.infos, self.real, self.by_memory, self.keep):
            held.clear()

    def tracing(self) -> AbstractContextManager[Any]:
        trace = tracing.Tracing(self.facts, torch.is_grad_enabled())
        trace.when_offset_read = self.offset_read
        return trace

    def offset_read(self, tensor: torch.Tensor) -> None:
        """The program uses the storage offset of a tensor as a number: where it is an input's memory, it must stay what it is."""
        for info in self.by_memory.get(tracing.storage(tensor), ()):
            if info.real is not None and info.source is not None:
                self.machine.world.guard(TensorProperty(info.source, "storage_offset"), "equals", info.real.storage_offset())

    # ------------------------------------------------------------ inputs

    def tensor_input(self, real: torch.Tensor, source: Source, loc: str = "", guard: TensorGuard | None = None) -> torch.Tensor:
        """The tracing tensor of a tensor from outside: one placeholder for each object. loc, guard: the user's line and the condition on
        it, where they are known."""
        with torch._C.DisableTorchFunction():  # its metadata are asked for
            return self._tensor_input(real, source, loc, guard)

    def _tensor_input(self, real: torch.Tensor, source: Source, loc: str, guard: TensorGuard | None) -> torch.Tensor:
        self.machine.world.note("tensor", real, source)
        known = self.real.get(id(real))
        if known is not None:
            if known.source != source and known.source is not None:
                self.machine.world.guard(source, "alias", known.source)
            return known.tensor
        if overrides.is_subclass(type(real)):
            self.machine.subclasses = True
        elif type(real) not in (torch.Tensor, torch.nn.Parameter):
            lazy = issubclass(type(real), torch.nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
            raise Unsupported("CAP038" if lazy else "CAP021", at=self.loc(), detail=f"{type(real).__name__} from {source}")
        if real.layout is not torch.strided or real.is_quantized or real.is_nested:
            raise Unsupported("CAP021", at=self.loc(), detail=f"{real.layout} tensor from {source}")
        place = str(source)
        dims = self._dynamic_dims(real, source, place)
        loc = loc or self.loc()
        self.machine.world.guard(source, "tensor", guard or tensor_guard(real, dynamic=tuple(sorted(dims))), loc)
        node = self._placeholder(placeholder_name(place))
        sizes: list[Any] | None = None
        if dims:
            sizes = list(real.shape)
            declared = self.asked.declared.get(place, {})
            for d in sorted(dims):
                sizes[d] = self._declared_size(declared[d], real.shape[d], node, d) if d in declared else self._fresh_size(real, source, node, d)
                if type(sizes[d].node.expr) is Sym:
                    self.facts.sources[sizes[d].node.expr.name] = TensorProperty(source, "size", d)
        node.meta.update(role=_role(real, source), source=place, loc=loc)
        self.inputs.append(source)
        self.keep.append(real)
        info = self.real[id(real)] = Info(None, node, source, real)
        self._make_input(info, None if sizes is None else tuple(sizes))
        return info.tensor

    def _make_input(self, info: Info, sizes: tuple[Any, ...] | None = None) -> None:
        """The tracing tensor of an input."""
        real = info.real
        assert real is not None
        tensor = tracing.given(tracing.tensor_like(real, sizes, self.facts))
        if not self.machine.is_whole:  # what stands alone is not differentiated
            tensor = tracing.watched(tensor, real)
        info.tensor = info.node.meta["val"] = tensor
        self.inference[tracing.storage(tensor)] = real.is_inference()
        self.infos[id(tensor)] = info
        self.by_memory.setdefault(tracing.storage(tensor), []).append(info)
        self.keep.append(tensor)

    def input_like(self, like: Info, real: torch.Tensor, source: Source, place: str, name: str, guard: TensorGuard | None) -> torch.fx.Node:
        """The placeholder of a tensor for which every guard of `like` holds: its tracing tensor is made when somebody asks for it. place,
        name: the text of its source, and the word for that."""
        known, old = self.real.get(id(real)), like.real
        if known is not None or old is None or (real.storage_offset(), real.is_leaf) != (old.storage_offset(), old.is_leaf) or not like.is_made:
            return self.infos[id(self.tensor_input(real, source, like.node.meta["loc"], guard))].node
        meta = like.node.meta
        self.machine.world.note("tensor", real, source)
        self.machine.world.guard(source, "tensor", guard or tensor_guard(real), meta["loc"])
        node = self._placeholder(name)
        node.meta.update(val=meta["val"], role=meta["role"], source=place, loc=meta["loc"])
        self.inputs.append(source)
        self.keep.append(real)
        self.real[id(real)] = Info(None, node, source, real, self._make_input)
        return node

    def varies(self, source: Source) -> bool:
        """Was this number, or one in this tuple, seen to vary?"""
        return bool(self.asked.dynamic_dims) and ITSELF in self.asked.dynamic_dims.get(str(source), ())

    def number_input(self, value: int | float, source: Source) -> torch.SymInt | torch.SymFloat | None:
        """The symbol of a number from outside that was seen to vary, or that Python computes of one; None where it is a constant. Integers
        nearer to 0 than `least` always are. A symbol is not negative: that of a negative integer stands for its opposite."""
        place = str(source)
        if place in self.numbers:
            self.machine.world.note("number", value, source)
            return self.numbers[place]
        varies = ITSELF in self.asked.dynamic_dims.get(place, ()) or place in self.data or (type(source) is Computed and source.symbols)
        if not varies or ITSELF in self.asked.static_dims.get(place, ()) or self.asked.dynamic is False:
            return None
        if type(value) is float:
            return None if math.isnan(value) else self.float_input(value, source)
        if value < 0:
            opposite = Computed(operator.neg, (Sym("value", dt.index),), (("value", source),))
            found = self.number_input(-value, opposite)
            if not isinstance(found, torch.SymInt):
                return None
            self.machine.world.guard(source, "type", int)
            self.numbers[place] = -found
            return self.numbers[place]
        if not self.asked.least <= value <= LARGEST:
            return None
        node = self._placeholder(placeholder_name(place))
        return self._own_number(node, self.facts.fresh(int(value), (node.name, "scalar"), self.asked.least), source)

    def float_input(self, value: float, source: Source) -> torch.SymFloat:
        """The symbol of a float from outside, or of one that Python computes before the graph runs; itself where it has to be known."""
        if ITSELF in self.asked.static_dims.get(str(source), ()):
            self.machine.world.guard(source, "equals", value)
            return value  # type: ignore[return-value]
        known = self.numbers.get(str(source))
        if known is None:
            node = self._placeholder(placeholder_name(str(source)))
            known = self._own_number(node, self.facts.fresh_float(value, (node.name, "scalar")), source)
        return known  # type: ignore[return-value]

    def _own_number(self, node: torch.fx.Node, number: Any, source: Source) -> Any:
        node.meta.update(val=number, role="scalar", source=str(source), loc=self.loc())
        symbol = number.node.expr
        self.exprs[symbol] = node
        self.facts.sources[symbol.name] = source
        self.inputs.append(source)
        self.machine.world.guard(source, "type", int if type(number) is torch.SymInt else float)
        self.numbers[str(source)] = number
        return number

    def _fresh_size(self, real: torch.Tensor, source: Source, node: torch.fx.Node, d: int) -> torch.SymInt:
        place = str(source), d
        now = None if place in self.asked.unbacked else real.shape[d]
        size = self.facts.fresh(now, (node.name, "size", d), *self.asked.marked.get(place, ()))
        self.size_nodes[size.node.expr.name] = (node, d, 1, 0)
        return size

    def _declared_size(self, row: DeclaredSize, now: int, node: torch.fx.Node, d: int) -> torch.SymInt:
        """scale * symbol + shift. The symbol is measured at the first dimension that is the symbol itself, or else at the first of all."""
        symbol, here = row.symbol, (node, d, row.scale, row.shift)
        known = self.declared_symbols.get(symbol.name)
        origin = (node.name, "size", d) if (row.scale, row.shift) == (1, 0) else (node.name, "size", d, row.scale, row.shift)
        if known is None:
            known = self.declared_symbols[symbol.name] = self.facts.fresh((now - row.shift) // row.scale, origin, symbol.lo, symbol.hi)
            self.size_nodes[known.node.expr.name] = here
            if symbol.kind == "named":
                self.facts.dims[known.node.expr.name] = symbol.name
        name = known.node.expr.name
        if len(origin) == 3 and self.size_nodes[name][2:] != (1, 0):
            self.size_nodes[name] = here
            self.facts.symbols[name] = replace(self.facts.symbols[name], origin=origin)
        return known * row.scale + row.shift

    def _dynamic_dims(self, real: torch.Tensor, source: Source, place: str) -> set[int]:
        """Dimensions that become symbols: all of an argument under dynamic=True, else those asked for. An empty one stays."""
        if self.asked.declared:
            return set(self.asked.declared.get(place, ()))
        if self.asked.dynamic is False:
            return set()
        dims = set(self.asked.dynamic_dims.get(place, ()))
        if self.asked.dynamic and _role(real, source) == "input":
            dims |= set(range(real.dim()))
        if not dims:
            return dims
        dims -= set(getattr(real, "_torchsmith_static", ())) | self.asked.static_dims.get(place, set())
        return {d for d in dims if 0 <= d < real.dim() and (real.shape[d] > (0 if self.asked.ones else 1) or (place, d) in self.asked.unbacked)}

    def _placeholder(self, name: str) -> torch.fx.Node:
        if self.last_input is None:
            first = next(iter(self.root.nodes), None)
            with self.root.inserting_before(first):
                node = self.root.create_node("placeholder", name, name=name)
        else:
            with self.root.inserting_after(self.last_input):
                node = self.root.create_node("placeholder", name, name=name)
        if node.target != node.name:  # an argument of the printed function: names of sources that differ in punctuation only are alike
            node.target = node.name
        self.last_input = node
        return node

    # ------------------------------------------------------------ recording

    def node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Its node in the graph that is written to."""
        info = self.info(tensor)
        return self.here(info.data or info.node)

    def here(self, node: Any) -> Any:
        """`node`, or what stands for it in the body that is written to."""
        if not self.bodies or not issubclass(type(node), torch.fx.Node) or node.graph is self.graph:
            return node
        return self.bodies[-1].lift(node)

    def info(self, tensor: torch.Tensor) -> Info:
        got = self.infos.get(id(tensor))
        if got is None:
            raise Unsupported("CAP022", at=self.loc(), detail="a tensor made by a call that was not recorded")
        graph = got.node.graph
        if graph is not self.graph and graph is not self.root and all(graph is not b.outer for b in self.bodies):
            raise Unsupported("CAP050", at=self.loc(), detail=f"made at {got.node.meta.get('loc')}")
        return got

    def real_tensor(self, tensor: torch.Tensor) -> Any:
        """The tensor from outside that a tracing tensor stands for; itself where there is none."""
        info = self.infos.get(id(tensor))
        return tensor if info is None or info.real is None else info.real

    def is_inference(self, tensor: torch.Tensor) -> bool:
        """Was its memory made under inference mode?"""
        return self.inference[tracing.storage(self.info(tensor).tensor)]

    def refuse_inference(self, since: int) -> None:
        """Eager raises where an inference tensor is written outside of inference mode. since: writes before that number were looked at."""
        if not self.machine.inference and any(self.inference.get(tracing.storage(t)) for t in tracing.current().writes[since:]):
            raise Unsupported("CAP025", at=self.loc(), detail="Inplace update to inference tensor outside InferenceMode is not allowed")

    def results_inference(self, outs: Sequence[Any]) -> bool | None:
        """The inference mode that new results among these nodes are made under; None where it is the caller's mode."""
        caller = self.machine.entered_inference
        owners = {id(i.node): i for i in self.infos.values()}
        given = {tracing.storage(i.tensor) for i in self.real.values() if i.is_made}
        made = [owners[id(n)].tensor for n in outs if id(n) in owners]
        kinds = {self.inference[tracing.storage(t)] for t in made if tracing.storage(t) not in given}
        if len(kinds) > 1:
            raise Unsupported("CAP035", at=self.loc())
        return None if not kinds or kinds == {caller} else kinds.pop()

    def differ(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """The program relied on two arguments being different tensors."""
        x, y = self.infos.get(id(a)), self.infos.get(id(b))
        if x is None or y is None or x.source is None or y.source is None:
            return
        if "input" in (x.node.meta["role"], y.node.meta["role"]):
            self.machine.world.tell_apart(a)

    def size_node(self, e: Expr) -> Any:
        """A node (or number) that computes a size expression when the graph runs."""
        stack = [e]
        while not self._is_ready(e):
            operand = next((a for a in _size_operands(stack[-1]) if not self._is_ready(a)), None)
            if operand is None:
                made = stack.pop()
                self.exprs[made] = self._size_node(made)
            elif len(stack) == _DEEPEST:  # a sum that a loop adds up is as deep as the loop is long
                raise Unsupported("CAP005", at=self.loc(), detail=f"a number made of {_DEEPEST} others and more, one after another")
            else:
                stack.append(operand)
        return self._ready(e)

    def _is_ready(self, e: Expr) -> bool:
        return isinstance(e, Const) or e in self.exprs

    def _ready(self, e: Expr) -> Any:
        return e.value if isinstance(e, Const) else self.here(self.exprs[e])

    def _size_node(self, e: Expr) -> Any:
        """The node of an expression whose operands have theirs."""
        if isinstance(e, Sym):
            if e.name not in self.size_nodes:
                raise Unsupported("GRA009", at=self.loc(), detail="a number that an operator gives, and no size of its results")
            base, dim, scale, shift = self.size_nodes[e.name]
            node = self.graph.call_method("size", (self.here(base), dim))
            if (scale, shift) != (1, 0):
                node = self.graph.call_function(operator.floordiv, (self.graph.call_function(operator.sub, (node, shift)), scale))
        elif isinstance(e, Op) and e.name in _SIZE_OPS:
            # Python divides integers exactly, floats made of them not
            node = self.graph.call_function(_SIZE_OPS[e.name], tuple([self._ready(a) for a in _size_operands(e)]))
        elif isinstance(e, Cast):
            kind = float if e.dtype.name.startswith("f") else int
            node = self.graph.call_function(torch.sym_float if kind is float else torch.sym_int, (self._ready(e.arg),))
        else:
            raise Unsupported("CAP023", at=self.loc(), detail=repr(e))
        node.meta.update(loc=self.loc())
        return node

    def fx(self, value: Any) -> Any:
        """The graph's argument for a machine value."""
        t = type(value)
        if t is complex and not _reads_back(value):
            return Complex(value)
        if t in _FX_LEAVES:
            return value
        if issubclass(type(value), torch.Tensor):
            return self.node_of(value)
        if t is tuple or t is torch.Size:
            return tuple([self.fx(v) for v in value])
        if t is list or t is dict:
            track = self.machine.world.tracks.get(id(value))
            if track is not None and value is not track.image:
                raise Unsupported("CAP011", at=self.loc(), detail=f"{t.__name__} from {track.source} given to a torch function")
            return [self.fx(v) for v in value] if t is list else {k: self.fx(v) for k, v in value.items()}
        if t is slice:
            return slice(self.fx(value.start), self.fx(value.stop), self.fx(value.step))
        if t in SymTypes:
            node = self.size_node(value.node.expr)
            if issubclass(type(node), torch.fx.Node):
                node.meta.setdefault("val", value)
            return node
        if issubclass(type(value), (tuple, int, float, str)):
            track = self.machine.world.tracks.get(id(value))
            if track is not None and value is not track.image:  # of an object from outside only the class is guarded
                raise Unsupported("CAP011", at=self.loc(), detail=f"{t.__name__} from {track.source} given to a torch function")
        if issubclass(type(value), tuple) and not at.speaks_for_itself(self.machine, t):
            return tuple([self.fx(v) for v in value])
        if t is range:
            return list(value)
        if t is type and value in _DTYPES:
            return _DTYPES[value]
        if issubclass(type(value), (types.BuiltinFunctionType, torch._ops.OpOverload, torch.finfo, torch.iinfo)):
            return value
        for plain, exact in _EXACT:
            if issubclass(type(value), plain):  # members of IntEnum and the like
                if issubclass(t, Momentary):
                    self.machine.settle(value)
                return exact(value)
        if t.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            number = value.item()
            is_narrow = type(number) in (bool, complex) and not isinstance(value, complex)
            return float(number.real) if is_narrow else number  # as which torch takes NumPy's flags and complex64
        if overrides.handler_of(self.machine, value):
            raise overrides.Overridden
        raise Unsupported("CAP024", at=self.loc(), detail=f"an argument of type {t.__name__} to a torch function")

    def look_for_handlers(self) -> None:
        """A node is made: would a handler of the program catch what it raises?"""
        if not self.may_be_caught:
            self.may_be_caught = any(f.code.handlers[f.ins.index] is not None for f in self.machine.frames)

    def record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one torch call on tracing tensors and write its node. kind: "function" or "method"."""
        if self.machine.modes or self.machine.subclasses:
            found = overrides.dispatched(self.machine, kind, target, args, kwargs)
            if found is not MISSING:
                return found
        # a flag computed from sizes is a plain bool to torch's functions
        args = tuple([bool(a) if type(a) is torch.SymBool else a for a in args])
        kwargs = {k: bool(v) if type(v) is torch.SymBool else v for k, v in kwargs.items()}
        if "device" not in kwargs and target in _device_constructors():
            device = default_device()
            if device is not None:  # the graph runs when no such mode is on
                kwargs["device"] = device
        if "from" in kwargs:  # a graph's Python cannot write it as a keyword
            args, kwargs = (*args[:1], kwargs["from"], *args[1:]), {k: v for k, v in kwargs.items() if k != "from"}
        self.look_for_handlers()
        try:
            fx_args = tuple([self.fx(a) for a in args])
            fx_kwargs = {k: self.fx(v) for k, v in kwargs.items()}
        except overrides.Overridden:
            found = overrides.dispatched(self.machine, kind, target, args, kwargs)
            if found is MISSING:
                raise Unsupported("CAP061", at=self.loc(), detail="a call that torch refuses") from None
            return found
        loc = self.loc()
        self.facts.loc = loc
        guessed, writes = self.facts.guessed, len(tracing.current().writes)
        try:
            if kind == "method":
                result = getattr(args[0], target)(*args[1:], **kwargs)
            else:
                result = target(*args, **kwargs)
            self.refuse_inference(writes)
        except Unsupported as e:
            if not e.at:
                e.at = loc
            raise
        except Exception as e:  # whatever torch raises on these arguments, eager shall raise to the user
            if not _holds_tensor([*args, *kwargs.values()]):
                raise Raised(_eagers(target, args, kwargs, e)) from None  # made of numbers: the program may catch it
            name = target if issubclass(type(target), str) else getattr(target, "__name__", str(target))
            said = str(e).partition("\nException raised from")[0]  # behind it comes torch's own stack
            # what autograd says of a view it would not say of a compiled graph's result, which is no view to it
            code = "CAP027" if "being modified inplace" in said else "CAP025"
            raise Unsupported(code, at=loc, detail=f"{name}: {type(e).__name__}: {said[:300]}") from e
        is_apart = not _holds_tensor(result) and not (result is None and _holds_tensor([*args, *kwargs.values()]))
        if self.facts.guessed != guessed and (is_apart or id(result) in self.infos):  # no node checks it, or nothing reads that node
            raise Unsupported("GRA003", at=loc, detail=f"{getattr(target, '__name__', target)}()")
        if is_apart:
            return result  # what gives nothing writes its arguments
        if self.facts.has_devices:
            self._refuse_moves(target, args, result)
        if kind == "function":
            target = _nameable(target)
        node = add_node(self.graph, "call_method" if kind == "method" else "call_function", target, fx_args, fx_kwargs)
        node.meta["loc"] = loc
        node.meta["val"] = result
        if self.regions:
            node.meta["region"] = self.regions[-1]
        self._own(result, node)
        return result

    def _refuse_moves(self, target: Any, args: tuple[Any, ...], result: Any) -> None:
        """A graph runs on one device: what leaves it is moved by Python between two graphs, and so is what gradients have to come back for.

        What the host gives to the device is moved before the graph runs (graph/host_part.py), and what is only made on the host meanwhile is
        made on the device instead (lower/devices.py). Raises Unsupported("CAP037").
        """
        if (target not in _MOVES and getattr(target, "__name__", "") not in _MOVES) or not args or not self.machine.splits:
            return
        moved = args[1] if target == "copy_" and len(args) > 1 else args[0]
        if not (issubclass(type(moved), torch.Tensor) and issubclass(type(result), torch.Tensor)):
            return
        here, there = tracing.device_of(moved), tracing.device_of(result)
        if here != there and (here.type != "cpu" or (moved.dim() and moved.requires_grad and self._is_of_inputs(moved))):
            raise Unsupported("CAP037", at=self.loc(), detail=f"from {here} to {there}")

    def _is_of_inputs(self, tensor: torch.Tensor) -> bool:
        """Does some input go into this value?"""
        found, seen = [self.infos[id(tensor)].node], set()
        while found:
            node = found.pop()
            if node.op in ("placeholder", "get_attr"):
                return True
            if node not in seen:
                seen.add(node)
                found += node.all_input_nodes
        return False

    def own_stamped(self, tensor: torch.Tensor, node: torch.fx.Node, inference: bool) -> None:
        """`tensor` is the result of `node`, which was copied."""
        node.meta["val"] = tensor
        self.inference[tracing.storage(tensor)] = inference
        self.infos[id(tensor)] = Info(tensor, node, None, None)
        self.keep.append(tensor)

    def take_in(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        """`tensor` is what an input of a body stands for."""
        self.inference[tracing.storage(tensor)] = self.machine.inference
        self.infos[id(tensor)] = Info(tensor, node, None, None)
        self.keep.append(tensor)

    def record_transformed(self, target: transforms.Transformed, own: Sequence[torch.Tensor], around: Sequence[Any]) -> Any:
        """A transform applied to a body. around: nodes (or numbers) of this graph that the body reads. Gives the results, flat."""
        loc = self.facts.loc = self.loc()
        values = [n.meta["val"] if issubclass(type(n), torch.fx.Node) else n for n in around]
        try:
            result = target(*own, *values)
        except Unsupported as e:
            e.at = e.at or loc
            raise
        except Exception as e:  # eager shall raise it
            raise Unsupported("CAP025", at=loc, detail=f"torch.func.{target.name}: {type(e).__name__}: {str(e)[:300]}") from e
        node = self.graph.call_function(target, (*(self.node_of(t) for t in own), *around))
        node.meta.update(loc=loc, val=result)
        self._own(result, node)
        return result

    def read_number(self, tensor: torch.Tensor) -> Any:
        """tensor.item(): a number that only running tells."""
        number = self.record("method", "item", (tensor,), {})
        if type(number) not in (torch.SymInt, torch.SymFloat) or number.node.expr in self.exprs:
            return number
        node = self.graph.call_method("item", (self.node_of(tensor),))
        node.meta.update(loc=self.loc(), val=number)
        self.exprs[number.node.expr] = node
        return number

    def counted(self, tensor: torch.Tensor) -> Any:
        """The value of a counter: a float tensor without dimensions, from outside or made of a number, to which nothing but numbers was added in place.
        It is read when the call begins, and then computed by Python. None for any other tensor."""
        info = self.info(tensor)
        real, node = info.real, info.node
        if tensor.dim() or tensor.dtype not in _ROUNDED or tensor.requires_grad or info.data is not None or tracing.device_of(tensor).type != "cpu":
            return None
        steps = [_step_of(user) for user in node.users if user.target in _ADDING]
        if None in steps or _version(tensor) - info.version != len(steps):  # it was written otherwise too
            return None
        if real is not None and info.source is not None:
            with torch._C.DisableTorchFunction(), no_dispatch():
                now = real.item()
            source = TensorProperty(info.source, "item")
            value: Any = self.float_input(now, source)
        else:
            value = _made_of(node)
            if value is None:
                return None
        for step in steps:
            if step:
                add = _ROUNDED[tensor.dtype]
                value = add(value, step) if type(value) is float else floats.apply(self.machine, add, [value, step])
        return value

    def state_holds(self, tensor: torch.Tensor) -> bool | None:
        """The truth of a module's one-element tensor on the host, or of its comparison with a number ("are weights averaged yet?"), as it
        is when the call begins: a guard asks again. None for any other tensor, and for one that the program has written."""
        node = self.info(tensor).node
        fn, numbers = _COMPARED.get(node.target), node.args[1:]  # type: ignore[arg-type]
        if fn is None or node.kwargs or any(type(n) not in (int, float) for n in numbers):
            fn, numbers = bool, ()
        else:
            node = node.args[0]  # type: ignore[assignment]
        state = self._state_of(node)
        if state is None:
            return None
        now, where = state
        source = Computed(fn, (Sym("value", dt.f64 if type(now) is float else dt.index), *numbers), (("value", where),))
        holds = bool(fn(now, *numbers))
        self.machine.world.guard(source, "equals", holds)
        return holds

    def state_number(self, tensor: torch.Tensor, read: bool = True) -> Any:
        """The number in a module's one-element tensor on the host as it is when the call begins: what Python makes of any number that a module
        holds. None for any other tensor, and for one that the program has written. read: False only asks whether there is one."""
        state = self._state_of(self.info(tensor).node)
        if state is None or state[0] != state[0]:
            return None
        return self.machine.world.wrap(*state) if read else state[0]

    def _state_of(self, node: torch.fx.Node) -> tuple[int | float | bool, Source] | None:
        """The value of a module's one-element tensor that the program has not written, and where it is read."""
        while node.target in _SAME_ELEMENT and _is_one_element(node.args[0]):
            node = node.args[0]  # type: ignore[assignment]
        info = next((i for i in self.real.values() if i.node is node), None)
        if info is None or info.real is None or info.source is None or info.data is not None or info.node.meta["role"] not in ("buffer", "const"):
            return None
        state = info.tensor
        if state.requires_grad or state.dtype.is_complex or any(n != 1 for n in state.shape) or tracing.device_of(state).type != "cpu":
            return None
        if tracing.storage(state) in tracing.current().written or self.bodies:
            return None
        with torch._C.DisableTorchFunction(), no_dispatch():
            return info.real.item(), TensorProperty(info.source, "item")

    def assume(self, cond: torch.SymBool, said: str = "") -> None:
        """torch._check of numbers that only running tells: known from here on, and checked there. said: the program's own words."""
        self.facts.loc = self.loc()
        expr = cond.node.expr
        if isinstance(expr, Op) and expr.name == "and":
            for part in expr.args:
                self.assume(torch.SymBool(SizeNode(part, None, self.facts, "bool")), said)
            return
        if cond.node.statically_known_true():
            return
        unmet = self.facts.unmet(cond.node.expr, self.facts.loc)
        self.effect(torch.ops.aten._assert_scalar.default, (cond, f"{said} ({unmet})" if said else unmet))
        cond.node.expect_true()

    def effect(self, target: Any, args: tuple[Any, ...], val: Any = None) -> torch.fx.Node:
        """A node that is run for what it does (grad mode, autocast, setitem)."""
        node = self.graph.create_node("call_function", target, tuple([self.fx(a) for a in args]), {})
        node.meta.update(loc=self.loc(), val=val)
        return node

    def has_written_inputs(self) -> bool:
        """Was anything written so far that others than this call can see?"""
        return bool(self.inputs_in(tracing.current().written))

    def inputs_in(self, memory: Set[int]) -> tuple[int, ...]:
        """Numbers of the inputs that lie in one of these storages."""
        given = [n.meta.get("val") for n in self.root.nodes if n.op == "placeholder"]
        return tuple(i for i, t in enumerate(given) if issubclass(type(t), torch.Tensor) and tracing.storage(t) in memory)

    def versions(self) -> dict[int, int]:
        """How often each known tensor was written so far, by its id."""
        return {key: _version(info.tensor) for key, info in self.infos.items()}

    def written_since(self, known: dict[int, int]) -> list[torch.Tensor]:
        """Tensors that were there at that time, or are from outside, and were written since."""
        found = []
        for key, info in list(self.infos.items()):
            then = known.get(key, None if info.real is None else 0)
            if then is not None and _version(info.tensor) != then:
                found.append(info.tensor)
        return found

    def value_at(self, mark: torch.fx.Node, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of what `tensor` held right after the node `mark`, of this graph."""
        with torch.no_grad(), torch._C.DisableTorchFunction(), no_dispatch():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        with self.graph.inserting_after(mark):
            node = self.graph.call_method("clone", (self.node_of(tensor),))
        node.meta.update(loc=self.loc(), val=made)
        tracing.remember_device(made, tracing.device_of(tensor))
        self._own(made, node)
        return made

    def take_back(self, mark: torch.fx.Node | None) -> None:
        """Forget the nodes recorded after `mark`; placeholders stay."""
        self.machine.stamps.forget()
        for node in reversed(list(self.graph.nodes)):
            if node is mark or (mark is None and node.op == "placeholder"):
                break
            if node.op != "placeholder":
                if node in self.exprs.values():
                    self.exprs = {e: n for e, n in self.exprs.items() if n is not node}
                self.graph.erase_node(node)

    def effect_node(self, target: Any, args: tuple[torch.fx.Node, ...]) -> torch.fx.Node:
        """Like effect, for arguments that are nodes already."""
        node = self.graph.create_node("call_function", target, args, {})
        node.meta.update(loc=self.loc(), val=None)
        return node

    def effect_method(self, name: str, tensor: torch.Tensor, args: tuple[Any, ...]) -> torch.fx.Node:
        node = self.graph.create_node("call_method", name, (self.node_of(tensor), *args), {})
        node.meta.update(loc=self.loc(), val=tensor)
        return node

    def last_node(self) -> torch.fx.Node | None:
        """The node recorded last (placeholders do not count)."""
        node = self.graph._root._prev
        return None if node is self.graph._root or node.op == "placeholder" else node

    def _own(self, result: Any, node: torch.fx.Node) -> None:
        """Give every tensor in a result its node."""
        if issubclass(type(result), torch.Tensor):
            if id(result) in self.infos:
                return
            self.inference.setdefault(tracing.storage(result), self.machine.inference)
            self.infos[id(result)] = Info(result, node, None, None)
            self.keep.append(result)
            for d, size in enumerate(result.shape):  # a size that only running tells is measured where it first occurs
                if type(size) is torch.SymInt and size.node.hint is None and type(size.node.expr) is Sym:
                    self.size_nodes.setdefault(size.node.expr.name, (node, d, 1, 0))
        elif issubclass(type(result), (tuple, list)):
            for i, x in enumerate(result):
                if _holds_tensor(x):
                    if issubclass(type(x), torch.Tensor) and id(x) in self.infos:
                        continue
                    item = self.graph.call_function(operator.getitem, (node, i))
                    item.meta.update(loc=node.meta["loc"], val=x)
                    self._own(x, item)
        elif issubclass(type(result), dict):
            for k, x in result.items():
                item = self.graph.call_function(operator.getitem, (node, k))
                item.meta.update(loc=node.meta["loc"], val=x)
                self._own(x, item)


def extent(t: Any) -> tuple[int, int]:
    """First byte and the byte after the last one a strided tensor can touch."""
    first = t.data_ptr()
    span = sum((s - 1) * st for s, st in zip(t.shape, t.stride()))
    return first, first + (span + 1) * t.element_size()


def _eagers(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
    """What eager raises where a call of plain numbers is refused while tracing, whose words may be others."""
    if any(type(a) in (torch.SymInt, torch.SymFloat) for a in (*args, *kwargs.values())):
        return error
    try:
        with torch._C.DisableTorchFunction(), no_dispatch():
            target(*args, **kwargs)
    except Exception as e:
        return e.with_traceback(None)
    return error


_WRAPPED: dict[Any, Any] = {}


def _nameable(fn: Any) -> Any:
    """fx prints torch's C functions as torch.<name>: those that a Python function of that name hides get a wrapper."""
    if type(fn) is not types.BuiltinFunctionType or type(fn.__self__) is not type or fn.__self__.__name__ != "_VariableFunctionsClass":
        return fn
    if getattr(torch, fn.__name__, None) is fn:
        return fn
    if fn not in _WRAPPED:

        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        call.__name__ = call.__qualname__ = f"torch_c_{fn.__name__}"
        _WRAPPED[fn] = call
    return _WRAPPED[fn]


def with_containers(m: Machine, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """A call of the program's own code as a node may hold it: a graph's arguments know neither torch.Size nor named tuples, and its lists
    refuse to be written. Those are made anew in each call, of the tensors and sizes that stand in them."""
    if m.modes or m.subclasses or not any(map(_changes_in_graph, (*args, *kwargs.values()))):
        return fn, args, kwargs
    try:
        for value in (*args, *kwargs.values()):
            m.recorder.fx(value)  # refuses what a graph cannot hold
    except overrides.Overridden:
        return fn, args, kwargs
    held: list[Any] = []

    def stored(value: Any) -> Callable[[Sequence[Any]], Any]:
        t = type(value)
        if issubclass(t, torch.Tensor) or t in SymTypes:
            k = len(held)
            held.append(value)
            return lambda given: given[k]
        if issubclass(t, dict):
            items = {k: stored(v) for k, v in value.items()}
            return lambda given: {k: make(given) for k, make in items.items()}
        if issubclass(t, (tuple, list)):
            makers = [stored(v) for v in value]
            build: Any = getattr(t, "_make", t)
            return lambda given: build([make(given) for make in makers])
        return lambda given: value

    makers, named = [stored(a) for a in args], {k: stored(v) for k, v in kwargs.items()}

    def call(*given: Any) -> Any:
        return fn(*(make(given) for make in makers), **{k: make(given) for k, make in named.items()})

    call.__name__ = call.__qualname__ = getattr(fn, "__name__", "call")
    return call, held, {}


def _changes_in_graph(value: Any) -> bool:
    t = type(value)
    if t is tuple:
        return any(map(_changes_in_graph, value))
    return issubclass(t, (tuple, list, dict))


def _holds_tensor(value: Any) -> bool:
    if issubclass(type(value), torch.Tensor):
        return True
    if issubclass(type(value), (tuple, list)):
        return any(_holds_tensor(v) for v in value)
    return issubclass(type(value), dict) and any(_holds_tensor(v) for v in value.values())


def _role(real: torch.Tensor, source: Source) -> str:
    if issubclass(type(real), torch.nn.Parameter):
        return "param"
    s: Any = source
    while issubclass(type(s), Attr) or hasattr(s, "base"):
        if issubclass(type(s), Attr):
            return "buffer" if s.via == "buffer" else "const"
        s = s.base
    return "input" if isinstance(root_of(source), Local) else "const"


_COMPARED: dict[Any, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{fn: fn for fn in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)},
}  # fmt: skip
_SAME_ELEMENT = frozenset({operator.getitem, "select", "squeeze", "view", "reshape", "flatten"})  # of a tensor of one element
_ROUNDED = {torch.float32: floats.add_float32, torch.float64: floats.add_float64}
_ADDING = frozenset({operator.iadd, "add_", torch._foreach_add_})


def _made_of(node: torch.fx.Node) -> float | None:
    """The number that a tensor without dimensions was made of."""
    while node.target in ("clone", "detach") and len(node.users) <= 1:
        node = node.args[0]  # type: ignore[assignment]
    if node.target in (torch.ones, torch.zeros):
        return float(node.target is torch.ones)
    if node.target in (torch.tensor, torch.as_tensor) and type(node.args[0]) in (int, float):
        return float(node.args[0])  # type: ignore[arg-type]
    return None


def _step_of(user: torch.fx.Node) -> float | None:
    """The number that one of `_ADDING` adds to a counter; None where it is no plain number."""
    if user.kwargs.get("alpha", 1) != 1:
        return None
    step = user.args[1]
    if isinstance(step, torch.fx.Node) and step.target is torch.tensor and len(step.users) <= 1:
        step = step.args[0]
    return float(step) if type(step) in (int, float) else None  # type: ignore[arg-type]


def _size_operands(e: Expr) -> tuple[Expr, ...]:
    """What a size expression is computed of; an exact quotient of integers of the integers."""
    if isinstance(e, Op) and e.name == "div" and all(isinstance(a, Cast) and a.arg.dtype is dt.index for a in e.args):
        return tuple([a.args[0] for a in e.args])
    return e.args if isinstance(e, (Op, Cast)) else ()


_NO_WORD = re.compile(r"[\W_]+")


def word(text: str) -> str:
    """The text with nothing but letters and digits, in small letters."""
    return _NO_WORD.sub("_", text).strip("_").lower()


def placeholder_name(text: str) -> str:
    """A name for the input read from there."""
    out = word(text)
    return out if out and not out[0].isdigit() else f"c_{out}"


def _is_one_element(node: Any) -> bool:
    val: Any = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return issubclass(type(val), torch.Tensor) and all(type(n) is int and n == 1 for n in val.shape)


def _version(t: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return 0 if t.is_inference() else t._version


__all__ = ["FixedObject", "Guard", "Info", "Recorder", "TypeOf"]
