"""Operators that the host runs, called by their schema. In: a node without a row (or whose row declined); out: an Extern and Refs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .. import events
from ..codes import Unsupported
from ..graph.schema import info
from ..graph.spec import TensorSpec
from ..ir.dtype import DType
from ..ir.expr import Expr, Sym
from ..ir.nested import leaves
from ..ir.program import BufArg, Enum, Extern, ExternArg
from ..runtime.draws import ON_HOST
from .numerics import ir_dtype
from .ref import Ref, contiguous_strides, known, overlaps, same_strides

if TYPE_CHECKING:
    from .core import Builder

# Operators that libtorch exports as aoti_torch_cpu_<name>, and who allocates the result: "planned" ones write into memory that we give.
SHIM: dict[str, str] = {
    "aten.convolution.default": "as_given",
    "aten.addmm.default": "planned",
    "aten.mm.default": "planned",
    "aten.bmm.default": "planned",
    "aten.baddbmm.default": "planned",
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "as_given",
}

# Calls whose operands lie as lower/layout.py chooses; those of all others as in eager.
CHOSEN = frozenset(getattr(torch.ops.aten, name).default for name in (
    "convolution", "convolution_backward", "cudnn_convolution_relu", "cudnn_convolution_add_relu",
))  # fmt: skip

# Operators that do something besides giving a result, and so are kept when nobody reads the result.
EFFECTS = frozenset({"aten._functional_assert_async.msg", "aten._local_scalar_dense.default"})


def has_effect(target: Any) -> bool:
    """Must a call stay although its result is unused? Random operators advance the generator; what may raise checks something."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return str(target) in EFFECTS or info(target).raises or target._schema.is_mutable or is_random(target)


def is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


# Python type of an argument -> its Enum
_ENUMS: dict[type, str] = {
    torch.dtype: "dtype", torch.layout: "layout", torch.device: "device", torch.memory_format: "memory_format",
}  # fmt: skip


def eager_spec_of(node: fx.Node) -> Any:
    """How eager lays out the value of a node, whose own layout a pass may have chosen (`meta["spec"]`)."""
    return node.meta.get("eager_spec") or node.meta.get("spec")


def extern_argument(cx: Builder, value: Any, spec: Any) -> ExternArg:
    """One argument in the IR's terms; a tensor is placed in memory with the strides that eager would have seen."""
    if isinstance(value, Ref):
        strides = spec.strides if isinstance(spec, TensorSpec) else None
        return BufArg(cx.place(value, strides))
    if isinstance(value, (tuple, list)):
        specs = spec if isinstance(spec, (tuple, list)) else (None,) * len(value)
        return tuple(extern_argument(cx, v, s) for v, s in zip(value, specs, strict=True))
    if isinstance(value, Expr):
        constant = known(value) if value.dtype.kind in ("index", "int") else None
        return constant if constant is not None else value
    if value is None or isinstance(value, (bool, int, float, str, DType)):
        return value
    if isinstance(value, complex):
        return Enum("complex", str(value))
    kind = _ENUMS.get(type(value))
    if kind is None:
        raise Unsupported("LOW003", at=cx.loc, detail=f"{cx.origin} takes a {type(value).__name__}")
    return Enum(kind, str(value).removeprefix("torch."))


def lower_extern(cx: Builder, node: fx.Node, bound: Sequence[Any]) -> Any:
    """aten.foo(x, 2) -> Extern("aten.foo.default", (BufArg(x), 2), outs=(t0,)) and the Refs of its results."""
    target = _copying(node.target)
    if target is None or target._schema.is_mutable:
        raise Unsupported("LOW003", at=cx.loc, detail=f"{node.target} mutates or aliases its arguments")
    name = str(target)
    schema = target._schema.arguments
    spec_of = (lambda n: n.meta.get("spec")) if target in CHOSEN else eager_spec_of  # which kernel a library takes may depend on it
    raw_args = fx.node.map_arg(_by_schema(schema, node), spec_of)
    args: list[ExternArg] = []
    kwargs: list[tuple[str, ExternArg]] = []
    for a, value, spec in zip(schema, bound, raw_args, strict=True):
        given = extern_argument(cx, value, spec)
        if a.kwarg_only:
            kwargs.append((a.name, given))
        else:
            args.append(given)
    outs, refs, binds = _results(cx)
    if is_random(target) and cx.device != "cpu" and any(s.device == "cpu" for s in leaves(node.meta["spec"]) if isinstance(s, TensorSpec)):
        names = ",".join(key for key, _ in kwargs)
        args, kwargs, name = [Enum("operator", name), Enum("device", cx.device), names, *args, *(given for _, given in kwargs)], [], ON_HOST
    returned = SHIM.get(name, "as_given")
    via = "shim" if name in SHIM and not binds else "python"
    cx.body.append(
        Extern(name, tuple(args), tuple(kwargs), outs, (), binds, returned if via == "shim" else "as_given", via, cx.loc)  # type: ignore[arg-type]
    )
    if is_random(target):
        cx.draws, cx.draws_from = None, len(cx.top)
    events.emit("extern", name=name, loc=cx.loc)
    return refs


def copy_opaque(cx: Builder, ref: Ref, strides: Sequence[Expr] | None, role: Any) -> str:
    """A copy of a value that only extern calls can read: aten.clone, whose result is dense in the order of the source's strides."""
    if ref.strided is None:
        raise Unsupported("LOW001", at=cx.loc, detail=f"a copy of {ref.dtype} elements that are no plain memory")
    wanted = ref.strided.strides if strides is None else tuple(strides)
    if role != "output" and overlaps(ref.shape, wanted):
        wanted = contiguous_strides(ref.shape)
    name = cx.buffer(ref.dtype, ref.shape, wanted, required=True, role=role)
    source = cx.place(ref, ref.strided.strides)
    ordered = same_strides(ref.shape, wanted, contiguous_strides(ref.shape))
    layout = (("memory_format", Enum("memory_format", "contiguous_format")),) if ordered else ()
    cx.body.append(Extern("aten.clone.default", (BufArg(source),), layout, (name,), loc=cx.loc))
    events.emit("extern", name="aten.clone.default", loc=cx.loc)
    return name


def _copying(target: Any) -> Any:
    """A view operator's twin that allocates (aten.foo -> aten.foo_copy), since a result of ours must not alias an argument."""
    if not any(r.alias_info is not None for r in target._schema.returns):
        return target
    namespace, packet = target.namespace, target._schema.name.split("::")[1]
    twin = getattr(getattr(torch.ops, namespace), f"{packet}_copy", None)
    return None if twin is None else getattr(twin, target._overloadname, None)


def _by_schema(schema: Sequence[Any], node: fx.Node) -> list[Any]:
    """The node's own arguments in schema order; None where a default stands."""
    given = []
    for k, a in enumerate(schema):
        given.append(node.args[k] if k < len(node.args) else node.kwargs.get(a.name))
    return given


def _results(cx: Builder) -> tuple[tuple[str, ...], Any, tuple[tuple[Sym, int, int], ...]]:
    """Output buffers by the node's specs: names ("" for a None result), what the node stands for, sizes that the call defines."""
    several = isinstance(cx.spec, (tuple, list))
    outs: list[str] = []
    refs: list[Ref | None] = []
    binds: list[tuple[Sym, int, int]] = []
    for k, spec in enumerate(cx.spec if several else (cx.spec,)):
        if spec is None:
            outs.append("")
            refs.append(None)
            continue
        if not isinstance(spec, TensorSpec):
            raise Unsupported("LOW003", at=cx.loc, detail=f"{cx.origin} gives a {type(spec).__name__}")
        for d, n in enumerate(spec.shape):
            if isinstance(n, Sym) and n not in cx.bound:
                cx.bound.add(n)
                binds.append((n, k, d))
        strides = None if overlaps(spec.shape, spec.strides) else spec.strides  # a copy instead of a view of an expanded tensor is dense
        buf = cx.buffer(ir_dtype(spec.dtype, cx.loc), spec.shape, strides, required=True)
        outs.append(buf)
        refs.append(cx.ref(buf))
    return tuple(outs), tuple(refs) if several else refs[0], tuple(binds)
