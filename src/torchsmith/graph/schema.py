"""What an operator's schema says: which arguments it writes, whether it makes views, and which operator is its functional form.

In: an OpOverload. Out: OpInfo, computed once per operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ..runtime.values_only import values_only
from .attention import NAMESPACE as ATTENTION
from .steps import NAMESPACE as STEPS

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OpInfo:
    """name "aten.add_.Tensor"; params: schema argument names in order; writes: those written; out: the out= ones among them."""

    name: str
    params: tuple[str, ...]
    defaults: tuple[Any, ...]
    keyword_only: tuple[bool, ...]
    writes: tuple[str, ...]
    out: tuple[str, ...]
    is_view: bool
    functional: OpOverload | None  # the operator without the writes; its results come in the order of `writes`
    is_data_shaped: bool  # the shape of a result depends on the data
    is_value_needed: bool  # the result is a Python number made of the data
    is_random: bool
    is_composite: bool
    symbolic: frozenset[str]  # parameters that may be a number which varies; in all others it is pinned
    raises: bool  # for some values of its tensors, whatever their sizes: it is run even where nobody reads its results


def _signature(op: OpOverload, without: frozenset[str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((a.name, str(a.type)) for a in op._schema.arguments if a.name not in without))


@cache
def overloads(namespace: str, name: str) -> tuple[OpOverload, ...]:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return ()
    found = (getattr(packet, o) for o in packet.overloads())
    return tuple(op for op in found if torch._C._dispatch_has_kernel(op.name()))  # the rest belongs to TorchScript


def _is_mutating(op: OpOverload) -> bool:
    return any(map(_is_written, op._schema.arguments))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


# In-place operators whose functional form has another name.
FUNCTIONAL_NAMES = {
    "normal_": "normal_functional",
    "rrelu_with_noise": "rrelu_with_noise_functional",
    "rrelu_with_noise_": "rrelu_with_noise_functional",
}
FUNCTIONAL_OPS = {
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default: aten._batch_norm_with_update_functional.default,
}


# Views whose schema promises that nobody writes the original; in eager they alias it all the same.
UNSAFE_VIEWS = frozenset({aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default})
# Operators whose results' shapes depend on data although torch does not tag them so: the lengths of packed sequences.
DATA_SHAPED = frozenset({aten._pack_padded_sequence.default, aten._pad_packed_sequence.default})
# In-place operators that change what a tensor shows, not what memory holds -> the view they make.
GEOMETRY = {
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
}


# Parameters that may be symbols, by name: sizes, positions and values that rules and lowerings take as expressions. Every other number
# (strides and dilations of windows, dimensions, orders of norms ...) is structure: one that varies is pinned where it is used.
_SYMBOLIC = """size sizes shape output_size input_size input_sizes start end index storage_offset pad repeats shifts split_size
    split_sizes length steps N C HxW normalized_shape num_samples high low fill_value value other self exponent min max s last_dim_size to
    from mean std"""
SYMBOLIC = frozenset(_SYMBOLIC.split())
SYMBOLIC_OF: dict[str, str] = {
    "add": "alpha", "sub": "alpha", "rsub": "alpha", "lerp": "weight", "leaky_relu": "negative_slope", "topk": "k", "kthvalue": "k",
    "slice": "step", "slice_copy": "step", "slice_scatter": "step", "arange": "step", "eye": "n m", "randperm": "n", "tril": "diagonal",
    "triu": "diagonal", "as_strided": "stride", "as_strided_copy": "stride", "as_strided_scatter": "stride", "_reshape_alias": "stride",
    "empty_strided": "stride", "new_empty_strided": "stride", "reflection_pad1d": "padding", "reflection_pad2d": "padding",
    "reflection_pad3d": "padding", "replication_pad1d": "padding", "replication_pad2d": "padding", "replication_pad3d": "padding",
    "_scaled_dot_product_flash_attention_for_cpu": "scale", "scaled_dot_product_attention": "scale", "threshold": "threshold",
    "hardtanh": "min_val max_val", "softplus": "beta threshold", "hardshrink": "lambd", "softshrink": "lambd", "index_add": "alpha",
    "embedding_dense": "num_weights", "_embedding_bag": "num_weights", "_embedding_bag_dense": "num_weights", "bincount": "minlength",
    "elu": "alpha scale input_scale", "bernoulli": "p",
    "addmm": "beta alpha", "baddbmm": "beta alpha", "addmv": "beta alpha", "addbmm": "beta alpha", "addr": "beta alpha",
}  # fmt: skip
PINNED_OF: dict[str, str] = {"unfold": "size", "unfold_copy": "size", "histc": "min max", "nonzero_static": "fill_value"}


def symbolic_parameters(op: OpOverload) -> frozenset[str]:
    """Which parameters of `op` may be symbols. Operators of other libraries take what their schemas say."""
    if op.namespace != "aten":
        return frozenset(a.name for a in op._schema.arguments)
    name = op._schema.name.split("::")[1].rstrip("_").removesuffix("_backward")  # a derivative takes what its function does
    taken = (SYMBOLIC | set(SYMBOLIC_OF.get(name, "").split())) - set(PINNED_OF.get(name, "").split())
    return frozenset(a.name for a in op._schema.arguments if a.name in taken)


# Operators that look at the values of their tensors and refuse some: positions out of range, integer divisors of 0, probabilities,
# matrices that LAPACK gives up.
_RAISING = """index _unsafe_index index_put _unsafe_index_put index_select index_add index_copy index_fill index_reduce gather take put
    scatter scatter_add scatter_reduce embedding _embedding_bag _embedding_bag_forward_only masked_scatter nll_loss_forward
    nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward binary_cross_entropy _ctc_loss max_unpool2d max_unpool3d bincount
    histc histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors searchsorted repeat_interleave
    segment_reduce multinomial bernoulli normal poisson linspace logspace cholesky linalg_eig _linalg_eigh _linalg_eigvals linalg_eigvals
    _linalg_svd linalg_lstsq linalg_lu_solve lu_solve lu_unpack linalg_ldl_solve linalg_pinv linalg_inv_ex linalg_cholesky_ex
    linalg_ldl_factor_ex linalg_lu_factor_ex linalg_solve_ex _linalg_solve_ex _pack_padded_sequence _pad_packed_sequence"""
_DIVIDING = frozenset({"div", "floor_divide", "remainder", "fmod"})
KNOWN = frozenset({"aten", "prims", "torchvision", ATTENTION, STEPS})  # libraries whose operators do nothing beside giving results
RAISING = frozenset(_RAISING.split()) | _DIVIDING


def may_raise(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """May this call raise for some values of its tensors, shapes being right?"""
    if not info(op).raises:
        return False
    name, bound = op._schema.name.removeprefix("aten::"), bind(op, args, kwargs)
    if name in _DIVIDING:  # of integers alone, and by what may be 0
        values = [bound["self"], bound["other"]]
        floats = any(v.dtype.is_floating_point or v.dtype.is_complex if isinstance(v, torch.Tensor) else type(v) is float for v in values)
        by_number = type(bound["other"]) is int and bound["other"] != 0
        return not (floats or by_number or (name == "div" and bound.get("rounding_mode") is None))
    if name == "index":  # a mask fits or does not
        return any(t is not None and t.dtype not in (torch.bool, torch.uint8) for t in bound["indices"])
    return name != "searchsorted" or bound["sorter"] is not None


def draws(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does this call take random numbers? Attention is tagged for its dropout and dropout for training: without them they draw nothing."""
    if not info(op).is_random:
        return False
    bound = bind(op, args, kwargs)
    rate = bound.get("dropout_p")
    return not (bound.get("train") is False or bound.get("training") is False or (type(rate) in (int, float) and rate == 0))


def may_draw(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """May this call move a generator on? An operator of the user's may, whatever its tags say."""
    return op.namespace not in KNOWN or draws(op, args, kwargs)


def find_functional(op: OpOverload, out: frozenset[str]) -> OpOverload | None:
    """add_.Tensor -> add.Tensor; add.out -> add.Tensor: the overload of the same arguments that writes nothing."""
    if op in FUNCTIONAL_OPS:
        return FUNCTIONAL_OPS[op]
    if out and torch.Tag.generated in op.tags and any(_is_written(a) and not a.is_out for a in op._schema.arguments):
        return None  # torch makes it of the form in place, on copies: what the schema calls written is not
    namespace, name = op.namespace, op._schema.name.split("::")[1]
    want = _signature(op, out)
    names = [FUNCTIONAL_NAMES[name]] if name in FUNCTIONAL_NAMES else []
    names += [name, name.rstrip("_")] if name.endswith("_") else [name, f"{name}_functional"]
    for candidate_name in dict.fromkeys(names):
        for candidate in overloads(namespace, candidate_name):
            if candidate is not op and not _is_mutating(candidate) and _signature(candidate, frozenset()) == want:
                return candidate
    return values_only(op)


@cache
def info(op: OpOverload) -> OpInfo:
    """OpInfo of `op`."""
    schema, tags = op._schema, op.tags
    writes = tuple(a.name for a in schema.arguments if _is_written(a))
    out = tuple(a.name for a in schema.arguments if a.is_out)
    writes = (*out, *(w for w in writes if w not in out))  # as the functional form gives them: what is returned, then what else is written
    if op is aten.native_batch_norm.default:  # the schema keeps silent about the running statistics
        writes = ("running_mean", "running_var")
    return OpInfo(
        name=str(op),
        params=tuple(a.name for a in schema.arguments),
        defaults=tuple(a.default_value if a.has_default_value() else None for a in schema.arguments),
        keyword_only=tuple(a.kwarg_only for a in schema.arguments),
        writes=writes,
        out=out,
        is_view=op in UNSAFE_VIEWS or (not writes and any(r.alias_info is not None for r in schema.returns)),
        functional=find_functional(op, frozenset(out)) if writes else None,
        is_data_shaped=torch.Tag.dynamic_output_shape in tags or op in DATA_SHAPED,
        is_value_needed=torch.Tag.data_dependent_output in tags,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_composite=op._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"),
        symbolic=symbolic_parameters(op),
        raises=op.namespace not in KNOWN or not schema.returns or schema.name.removeprefix("aten::") in RAISING,
    )


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in."""
    row = info(op)
    bound = dict(zip(row.params, row.defaults, strict=True))
    bound.update(zip(row.params, args, strict=False))
    bound.update(kwargs)
    return bound


def unbind(op: OpOverload, bound: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name -> positional and keyword arguments."""
    row = info(op)
    positional = tuple(bound[p] for p, k in zip(row.params, row.keyword_only, strict=True) if not k)
    return positional, {p: bound[p] for p, k in zip(row.params, row.keyword_only, strict=True) if k}
