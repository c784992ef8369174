"""torch.func in a graph: a transformed function is captured once, as a body of its own, and one node applies torch's transform to it.

In: the machine, a transform's options and the function that it is given. Out: a callable of the machine, whose call records one node
`Transformed(body)(tensors)`. What runs that node (shapes while capturing, ATen while functionalising, backends) runs torch's own transform
on the body's nodes, so batching rules and derivatives are torch's.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..codes import Unsupported, define
from ..graph import tracing
from ..graph.sizes import SymTypes
from . import policy
from .attributes import Raised
from .protocol import Machine
from .world import container_base

define("CAP050", "a tensor made inside of a transformed function is used outside of it", "return it from the function (has_aux=True)")
define("CAP051", "a transform of torch.func is used in a way that has no node", "see the detail; the call runs eagerly")

Tensor = torch.Tensor


# ---------------------------------------------------------------- bodies


class Body:
    """A graph under construction that is run inside of a transform. `lifted`: nodes of the graph around it that it reads."""

    def __init__(self, outer: fx.Graph, is_mapped: bool, wraps: bool) -> None:
        self.outer, self.graph = outer, fx.Graph()
        self.wraps = wraps  # torch.func's transform wraps every tensor in it: none has memory
        self.is_mapped = is_mapped  # by vmap: its tensors have no value of their own
        self.own: list[fx.Node] = []
        self.lifted: dict[fx.Node, fx.Node] = {}

    def placeholder(self, name: str, val: Any, loc: str) -> fx.Node:
        """An input; those come before everything else, own ones before lifted ones."""
        last = next(reversed([*self.own, *self.lifted.values()]), None)
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)) if last is None else self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        node.meta.update(val=val, loc=loc)
        return node

    def lift(self, node: fx.Node) -> fx.Node:
        """What stands for a node from around the body."""
        known = self.lifted.get(node)
        if known is None:
            known = self.lifted[node] = self.placeholder(f"around_{node.name}", node.meta.get("val"), node.meta.get("loc", ""))
        return known


def run_body(graph: fx.Graph, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The body's results on `inputs`, which may be wrapped by transforms."""
    env: dict[fx.Node, Any] = {}
    rest = iter(inputs)
    trace = tracing.active()
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(rest)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            return tuple(args[0])
        if trace is not None:
            trace.facts.loc = node.meta.get("loc") or trace.facts.loc
            trace.note_autocast()
        env[node] = getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" else node.target(*args, **kwargs)
    return ()


class Transformed:
    """The target of a node: `apply(fn, own)` on the first `n` arguments and `extra` more that are the transform's own (tangents); what
    follows goes to the body as it is."""

    def __init__(
        self, name: str, graph: fx.Graph, n: int, apply: Callable[[Callable[..., tuple[Any, ...]], tuple[Any, ...]], Any], extra: int = 0
    ) -> None:
        self.name, self.graph, self.n, self.apply, self.extra = name, graph, n, apply, extra
        self.__name__ = self.__qualname__ = f"transformed_{name}_{id(graph):x}"
        self.goes_backwards = any(
            n.target in (torch.autograd.grad, torch.autograd.backward) or getattr(n.target, "goes_backwards", False) for n in graph.nodes
        )

    def __call__(self, *args: Any) -> Any:
        own, lifted = args[: self.n + self.extra], args[self.n + self.extra :]
        return self.apply(lambda *xs: run_body(self.graph, (*xs, *lifted)), own)


def index_of(m: Machine, key: Any) -> list[Any] | None:
    """In a body that vmap maps: the tensors to index with where the key holds tensors of one integer, which have no value of their own."""
    if not any(b.is_mapped for b in m.recorder.bodies):
        return None
    parts = list(key) if type(key) is tuple else [key]
    single = [
        issubclass(type(k), Tensor) and not k.dim() and not k.is_floating_point() and k.dtype not in (torch.bool, torch.uint8)
        for k in parts
    ]
    if not any(single) or not all(
        s or (type(k) is slice and k == slice(None)) or (issubclass(type(k), Tensor) and k.dtype is torch.int64)
        for s, k in zip(single, parts, strict=True)
    ):
        return None
    return [None if type(k) is slice else k for k in parts]


# ---------------------------------------------------------------- capturing one


def _plain(m: Machine, value: Any) -> Any:
    """A value with images in place of outside containers, so that pytree finds the machine's values."""
    t = type(value)
    track = m.world.tracks.get(id(value))
    if track is not None and container_base(t):
        value = m.world.image(track)
        t = type(value)
    if t is list or t is tuple:
        return t(_plain(m, v) for v in value)
    if issubclass(t, tuple) and hasattr(t, "_fields"):
        return t(*(_plain(m, v) for v in value))
    if issubclass(t, dict) and t in pytree.SUPPORTED_NODES:
        out = value.copy()
        for k, v in value.items():
            out[k] = _plain(m, v)
        return out
    return value


def _like(t: Tensor, without: int | None, watched: bool) -> Tensor:
    """A tracing tensor like `t` with memory of its own, without dimension `without`."""
    keep = [d for d in range(t.dim()) if d != without]
    new = tracing.make_unseen([t.shape[d] for d in keep], [t.stride(d) for d in keep], t.dtype)
    tracing.remember_device(new, tracing.device_of(t))
    return new.requires_grad_() if watched and (t.is_floating_point() or t.is_complex()) else new


@dataclass
class Captured:
    """A body and what it gives: `outs[i]` is a leaf of the result, None for a tensor (the body's next result), else (value,)."""

    graph: fx.Graph
    around: list[Any]  # the values (as nodes of the graph around) that the body reads, in order
    constants: list[Any]
    spec: Any

    def restored(self, tensors: Sequence[Any]) -> Any:
        """The function's result, of one value for each tensor in it."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if c is None else c[0] for c in self.constants], self.spec)

    @property
    def tensors(self) -> int:
        return sum(c is None for c in self.constants)


def like(t: Tensor) -> Tensor:
    """A tracing tensor like `t` with memory of its own, of which autograd knows nothing."""
    return _like(t, None, False)


def capture_body(m: Machine, fn: Any, tensors: list[Tensor], arguments: Any = lambda given: (given, {})) -> Captured:
    """What `fn` does to tensors, without autograd, as a body. arguments: the tensors that stand in it -> what `fn` is given."""
    before, m.grad_mode = m.grad, False
    try:
        return _capture(m, fn, tensors, arguments, False, is_mapped=False)
    finally:
        m.grad_mode = before


def capture_watched(m: Machine, fn: Any, tensors: list[Tensor], arguments: Any) -> Captured:
    """The same where autograd watches, and all of `tensors` require grad that can: a derivative will be taken of it."""
    for t in tensors:
        t.requires_grad_(t.is_floating_point() or t.is_complex())
    return _capture(m, fn, tensors, arguments, True, is_mapped=False)


def _capture(
    m: Machine, fn: Any, tensors: list[Tensor], build: Callable[[list[Tensor]], tuple[list[Any], dict[str, Any]]], grad: bool,
    is_mapped: bool | None = None,
) -> Captured:  # fmt: skip
    """Interpret `fn` on stand-ins of `tensors` (its own inputs) and record what it does as a body. `build`: stand-ins -> arguments."""
    r = m.recorder
    body = Body(r.graph, not grad if is_mapped is None else is_mapped, is_mapped is None)
    before = r.exprs, r.size_nodes, m.grad
    r.exprs, r.size_nodes = dict(r.exprs), dict(r.size_nodes)
    r.bodies.append(body)
    r.graph = body.graph
    try:
        if grad:
            torch._C._set_grad_enabled(True)
        for k, t in enumerate(tensors):
            node = body.placeholder(f"arg{k}", t, m.loc())
            body.own.append(node)
            r.take_in(t, node)
        args, kwargs = build(tensors)
        out, spec = pytree.tree_flatten(_plain(m, m.call(fn, args, kwargs)))
        results = [r.node_of(v) for v in out if issubclass(type(v), Tensor)]
        if any(type(v) in SymTypes for v in out):
            raise Unsupported("CAP051", at=m.loc(), detail="a size as a result")
        body.graph.output(tuple(results))
    finally:
        r.bodies.pop()
        r.graph = body.outer
        r.exprs, r.size_nodes = before[0], before[1]
        torch._C._set_grad_enabled(before[2])
    around = [r.here(node) for node in body.lifted]
    return Captured(body.graph, around, [None if issubclass(type(v), Tensor) else (v,) for v in out], spec)




def _flat(m: Machine, value: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(_plain(m, value))


def _separate(leaves: list[Any]) -> list[int]:
    """The leaves that are tensors."""
    return [k for k, v in enumerate(leaves) if issubclass(type(v), Tensor)]


def _builder(leaves: list[Any], places: list[int], spec: Any) -> Callable[[list[Tensor]], tuple[list[Any], dict[str, Any]]]:
    """Arguments (args, kwargs) with stand-ins at `places`."""

    def build(stand_ins: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        filled = list(leaves)
        for k, t in zip(places, stand_ins, strict=True):
            filled[k] = t
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return list(args), dict(kwargs)

    return build


def _record(m: Machine, target: Transformed, own: list[Tensor], around: list[Any]) -> Any:
    return m.recorder.record_transformed(target, own, around)


# ---------------------------------------------------------------- the transforms


def vmap(m: Machine, func: Any, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", *, chunk_size: Any = None) -> Any:
    """func over a dimension of its arguments."""

    def run(args: list[Any], kwargs: dict[str, Any]) -> Any:
        leaves, spec = _flat(m, (tuple(args), kwargs))
        dims = _dims(m, in_dims, args, kwargs)
        places = _separate(leaves)
        if any(d is not None and k not in places for k, d in enumerate(dims)) or not any(d is not None for d in dims):
            raise Unsupported("CAP051", at=m.loc(), detail="vmap over arguments that are no tensors")
        own = [leaves[k] for k in places]
        own_dims = [dims[k] for k in places]
        if any(d is not None and not -t.dim() <= d < t.dim() for t, d in zip(own, own_dims, strict=True)):
            raise Unsupported("CAP051", at=m.loc(), detail="vmap over a dimension that there is not")
        at = [None if d is None else d % t.dim() for t, d in zip(own, own_dims, strict=True)]
        stand_ins = [_like(t, d, False) for t, d in zip(own, at, strict=True)]
        got = _capture(m, func, stand_ins, _builder(leaves, places, spec), False)
        if got.tensors != len(got.constants):
            raise Unsupported("CAP051", at=m.loc(), detail="vmap of a function that returns something else than tensors")
        outs = pytree.tree_leaves(pytree._broadcast_to_and_flatten(_plain(m, out_dims), got.spec), is_leaf=lambda x: x is None)
        if not got.constants or len(outs) != got.tensors:
            raise Unsupported("CAP051", at=m.loc(), detail="out_dims that do not fit the result")

        def apply(fn: Any, xs: tuple[Any, ...]) -> Any:
            return torch.func.vmap(fn, tuple(at), tuple(outs), randomness, chunk_size=chunk_size)(*xs)

        return got.restored(_record(m, Transformed("vmap", got.graph, len(own), apply), own, got.around))

    return run


def _dims(m: Machine, in_dims: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The dimension of every leaf of (args, kwargs); keywords are not mapped over."""
    given = _plain(m, in_dims)
    spec = pytree.tree_structure(_plain(m, tuple(args)))
    given = tuple(given) if type(given) is list else given
    found = pytree._broadcast_to_and_flatten(given, spec)
    if found is None or any(d is not None and type(d) is not int for d in found):
        raise Unsupported("CAP051", at=m.loc(), detail="in_dims that do not fit the arguments")
    return [*found, *(None for _ in pytree.tree_leaves(_plain(m, kwargs)))]


def _wanted(m: Machine, argnums: Any, args: list[Any]) -> list[int]:
    """The numbers of the arguments that are differentiated."""
    n = len(args)
    found = [argnums] if type(argnums) is int else list(argnums)
    if not found or any(type(k) is not int or not -n <= k < n for k in found):
        raise Unsupported("CAP051", at=m.loc(), detail="argnums that do not fit the arguments")
    found = [k % n for k in found]
    if len(set(found)) < len(found):
        raise Unsupported("CAP051", at=m.loc(), detail="argnums that repeat")
    return found


@dataclass
class _Split:
    """The tensors of a call: those differentiated first, then the others; and the structure of each differentiated argument."""

    first: list[Tensor]
    own: list[Tensor]
    specs: list[Any]
    got: Captured


def _differentiated(m: Machine, func: Any, argnums: list[int], args: list[Any], kwargs: dict[str, Any]) -> _Split:
    """Capture func for a derivative with respect to the arguments `argnums`, each a tree of tensors."""
    leaves, spec = _flat(m, (tuple(args), kwargs))
    numbers: list[list[int]] = []
    k = 0
    for a in args:
        n = pytree.tree_structure(_plain(m, a)).num_leaves
        numbers.append(list(range(k, k + n)))
        k += n
    first = [k for a in argnums for k in numbers[a]]
    places = _separate(leaves)
    if not first or any(k not in places for k in first):
        raise Unsupported("CAP051", at=m.loc(), detail="a derivative with respect to something else than tensors")
    order = [*first, *(k for k in places if k not in first)]
    own = [leaves[k] for k in order]
    stand_ins = [_like(t, None, k < len(first)) for k, t in enumerate(own)]
    got = _capture(m, func, stand_ins, _builder(leaves, order, spec), True)
    return _Split(own[: len(first)], own, [pytree.tree_structure(_plain(m, args[a])) for a in argnums], got)


def _by_argument(values: Sequence[Any], specs: list[Any], single: bool) -> Any:
    """Values for the tensors of the differentiated arguments, as those arguments are built."""
    rest = iter(values)
    built = tuple(pytree.tree_unflatten([next(rest) for _ in range(s.num_leaves)], s) for s in specs)
    return built[0] if single else built


def _result_and_aux(m: Machine, got: Captured, has_aux: bool) -> tuple[Captured, Captured | None]:
    """The part of a function's result that is differentiated, and the rest."""
    if not has_aux:
        return got, None
    children = got.spec.children() if callable(getattr(got.spec, "children", None)) else got.spec.children_specs
    if got.spec.type is not tuple or len(children) != 2:
        raise Unsupported("CAP051", at=m.loc(), detail="has_aux=True and a function that does not return (output, aux)")
    n = children[0].num_leaves
    if any(c is not None for c in got.constants[n:]):
        raise Unsupported("CAP051", at=m.loc(), detail="aux that is no tensor")
    return Captured(got.graph, got.around, got.constants[:n], children[0]), Captured(got.graph, got.around, got.constants[n:], children[1])


def grad_and_value(m: Machine, func: Any, argnums: Any = 0, has_aux: bool = False) -> Any:
    """The gradients of func with respect to some arguments, and (func's result, aux)."""

    def run(args: list[Any], kwargs: dict[str, Any]) -> Any:
        split = _differentiated(m, func, _wanted(m, argnums, args), args, kwargs)
        value, aux = _result_and_aux(m, split.got, has_aux)
        if value.tensors != 1 or len(value.constants) != 1:
            raise Unsupported("CAP051", at=m.loc(), detail="a gradient of a function whose result is not one tensor")
        k, n = len(split.first), len(split.own)

        def apply(fn: Any, xs: tuple[Any, ...]) -> Any:
            def loss(*watched: Any) -> Any:
                out = fn(*watched, *xs[k:])
                return out[0], out[1:]

            grads, (out, rest) = torch.func.grad_and_value(loss, tuple(range(k)), has_aux=True)(*xs[:k])
            return (*grads, out, *rest)

        found = _record(m, Transformed("grad", split.got.graph, n, apply), split.own, split.got.around)
        grads = _by_argument(found[:k], split.specs, type(argnums) is int)
        out = value.restored(found[k : k + 1])
        return grads, (out if aux is None else (out, aux.restored(found[k + 1 :])))

    return run


def grad(m: Machine, func: Any, argnums: Any = 0, has_aux: bool = False) -> Any:
    both = grad_and_value(m, func, argnums, has_aux)

    def run(args: list[Any], kwargs: dict[str, Any]) -> Any:
        grads, value = both(args, kwargs)
        return (grads, value[1]) if has_aux else grads

    return run


def _jacobian(name: str, transform: Any) -> Any:
    def jacobian(m: Machine, func: Any, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
        """The derivative of every tensor of func's result by every tensor of some arguments."""

        def run(args: list[Any], kwargs: dict[str, Any]) -> Any:
            if kwargs:
                raise Unsupported("CAP051", at=m.loc(), detail=f"{name} with keywords")
            split = _differentiated(m, func, _wanted(m, argnums, args), args, kwargs)
            value, aux = _result_and_aux(m, split.got, has_aux)
            if value.tensors != len(value.constants) or not value.tensors:
                raise Unsupported("CAP051", at=m.loc(), detail=f"{name} of a function that returns something else than tensors")
            k, j = len(split.first), value.tensors

            def apply(fn: Any, xs: tuple[Any, ...]) -> Any:
                def part(*watched: Any) -> Any:
                    out = fn(*watched, *xs[k:])
                    return out[:j], out[j:]

                rows, rest = transform(part, tuple(range(k)), has_aux=True, **options)(*xs[:k])
                return (*(x for row in rows for x in row), *rest)

            found = _record(m, Transformed(name, split.got.graph, len(split.own), apply), split.own, split.got.around)
            single = type(argnums) is int
            rows = [_by_argument(found[i * k : (i + 1) * k], split.specs, single) for i in range(j)]
            out = pytree.tree_unflatten(rows, value.spec)
            return out if aux is None else (out, aux.restored(found[j * k :]))

        return run

    return jacobian


jacrev = _jacobian("jacrev", torch.func.jacrev)
jacfwd = _jacobian("jacfwd", torch.func.jacfwd)


def hessian(m: Machine, func: Any, argnums: Any = 0) -> Any:
    return jacfwd(m, machine_callable(jacrev(m, func, argnums)), argnums)


def jvp(m: Machine, func: Any, primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False) -> Any:
    """(func(*primals), its derivative in the direction of the tangents[, aux])."""
    args = m.listed(primals)
    split = _differentiated(m, func, list(range(len(args))), args, {})
    directions, spec = _flat(m, tuple(m.listed(tangents)))
    fits = spec == pytree.tree_structure(_plain(m, tuple(args))) and all(issubclass(type(v), Tensor) for v in directions)
    value, aux = _result_and_aux(m, split.got, has_aux)
    if not fits or strict or value.tensors != len(value.constants) or not value.tensors:
        raise Unsupported("CAP051", at=m.loc(), detail="jvp of this structure")
    k, j = len(split.own), value.tensors

    def apply(fn: Any, xs: tuple[Any, ...]) -> Any:
        def part(*watched: Any) -> Any:
            out = fn(*watched)
            return out[:j], out[j:]

        found: Any = torch.func.jvp(part, tuple(xs[:k]), tuple(xs[k:]), has_aux=True)
        out, along, rest = found
        return (*out, *along, *rest)

    found = _record(m, Transformed("jvp", split.got.graph, k, apply, extra=k), [*split.own, *directions], split.got.around)
    out = (value.restored(found[:j]), value.restored(found[j : 2 * j]))
    return out if aux is None else (*out, aux.restored(found[2 * j :]))


def vjp(m: Machine, func: Any, *primals: Any, has_aux: bool = False) -> Any:
    """(func(*primals), the function that pulls cotangents back[, aux]). The pulling function computes func anew: equal parts are shared."""
    args = list(primals)
    split = _differentiated(m, func, list(range(len(args))), args, {})
    value, aux = _result_and_aux(m, split.got, has_aux)
    if value.tensors != len(value.constants) or not value.tensors:
        raise Unsupported("CAP051", at=m.loc(), detail="vjp of this structure")
    k, j = len(split.own), value.tensors
    trace = tracing.current()
    drawn = trace.draws
    outs = _record(m, Transformed("primal", split.got.graph, k, lambda fn, xs: fn(*xs)), split.own, split.got.around)
    if trace.draws != drawn:
        raise Unsupported("CAP051", at=m.loc(), detail="vjp of a function that draws random numbers")

    def apply(fn: Any, xs: tuple[Any, ...]) -> Any:
        found: Any = torch.func.vjp(lambda *w: _cut(fn(*w), j), *xs[:k], has_aux=True)
        return tuple(found[1](tuple(xs[k:])))

    def pulled(args: list[Any], kwargs: dict[str, Any]) -> Any:
        given, spec = _flat(m, args[0] if len(args) == 1 else tuple(args))
        if kwargs or spec != value.spec or not all(issubclass(type(v), Tensor) for v in given):
            raise Unsupported("CAP051", at=m.loc(), detail="cotangents of another structure than the result")
        target = Transformed("vjp", split.got.graph, k, apply, extra=j)
        return _by_argument(_record(m, target, [*split.own, *given], split.got.around), split.specs, False)

    out = (value.restored(outs[:j]), machine_callable(pulled))
    return out if aux is None else (*out, aux.restored(outs[j:]))


def _cut(out: tuple[Any, ...], j: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return out[:j], out[j:]


# ---------------------------------------------------------------- as the program calls them


def machine_callable(run: Callable[[list[Any], dict[str, Any]], Any]) -> Callable[..., Any]:
    """`run(args, kwargs)` as a callable of the machine."""

    def transformed(*args: Any, **kwargs: Any) -> Any:
        return run(list(args), kwargs)

    return policy.of_machine(transformed)


_OPTIONS = {
    "vmap": ("in_dims", "out_dims", "randomness", "chunk_size"), "grad": ("argnums", "has_aux"), "grad_and_value": ("argnums", "has_aux"),
    "jacrev": ("argnums", "has_aux", "chunk_size", "_preallocate_and_copy"), "jacfwd": ("argnums", "has_aux", "randomness"),
    "hessian": ("argnums",),
}  # fmt: skip
_MAKERS: dict[str, Any] = {
    "vmap": vmap,
    "grad": grad,
    "grad_and_value": grad_and_value,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
}


def _making(name: str) -> Any:
    public = getattr(torch.func, name)

    def row(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            bound = inspect.signature(public).bind(*args, **kwargs)
        except TypeError as e:
            raise Raised(e) from None
        func, *rest = bound.args
        return machine_callable(_MAKERS[name](m, func, *rest, **bound.kwargs))

    return row


def _made_outside(name: str) -> Any:
    """A transformed function from outside: its options are what its closure holds."""

    def row(m: Machine, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        m.function_source(fn)
        held = {n: m.load_cell(c, n) for n, c in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)}
        options = {n: _plain(m, held[n]) for n in _OPTIONS[name] if n in held and n != "_preallocate_and_copy"}
        if held.get("_preallocate_and_copy"):
            options["_preallocate_and_copy"] = True
        return _MAKERS[name](m, held["func"], **options)(args, kwargs)

    return row


def _at_once(fn: Any) -> Any:
    return lambda m, args, kwargs: fn(m, *args, **kwargs)


def fill(rows: dict[Any, Any], by_code: dict[Any, Any]) -> None:
    """Rows for torch.func's names, and for the functions that they returned outside."""
    for name in _MAKERS:
        for home in (torch.func, torch):
            if home is torch and name != "vmap":
                continue
            rows[getattr(home, name)] = _making(name)
        if name != "hessian":  # which is the others'
            code = getattr(torch.func, name)(operator.neg).__code__
            by_code[code] = _made_outside(name)
    rows[torch.func.jvp] = _at_once(jvp)
    rows[torch.func.vjp] = _at_once(vjp)
