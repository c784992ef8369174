"""Convolutions that a GPU's library computes: what it can take along in the same call. FunctionalGraph in, FunctionalGraph out.

    relu(batch_norm(convolution(x, w), mean, var, gamma, beta) + z)
        becomes    s = gamma * rsqrt(var + eps);  convolution_add_relu(x, w * s, z, beta - mean * s)

`fold_batch_norms` comes before the memory format is chosen, `join_activations` after. What is computed of constants alone belongs to
`prepare`, so folded weights are made once. A bias that the call does not take is added by the kernel that reads the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.spec import FunctionalGraph, TensorSpec
from ..ir.expr import const
from ..options import Options
from .contraction import HALF_TYPES, is_own_convolution
from .extern import eager_spec_of
from .layout import channels_last_strides, clone_as, is_library_convolution, same_strides
from .ref import known
from .rewriter import Rewriter, lies

aten = torch.ops.aten
NORMS = frozenset({aten._native_batch_norm_legit_no_training.default})
# What the library has beside the plain call, by what follows it; types that it takes.
FUSED: dict[str, Any] = {"relu": aten.cudnn_convolution_relu.default, "add_relu": aten.cudnn_convolution_add_relu.default}
FEW_CHANNELS = range(1, 5)  # an image's own: its copy in the library's format is read by one convolution
FUSED_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


def fold_batch_norms(fg: FunctionalGraph, options: Options) -> FunctionalGraph:
    """Normalisation by constants goes into constant weights."""
    if not any(is_library_convolution(n) for n in fg.graph.nodes) or not options.layout_optimization:
        return fg
    rewriter = Rewriter(fg)
    changed = False
    for node in rewriter.nodes:
        if node.op == "call_function" and node.target in NORMS and _fold(rewriter, node):
            changed = True
    return rewriter.done() if changed else fg


def _fold(rewriter: Rewriter, norm: fx.Node) -> bool:
    conv, gamma, beta, mean, var, _, eps = norm.args
    if not isinstance(conv, fx.Node) or not is_library_convolution(conv) or len(conv.users) != 1 or conv in rewriter.kept.values():
        return False
    x, w, bias, stride, padding, dilation, transposed, extra, groups = conv.args
    parts = [p for p in (w, bias, gamma, beta, mean, var) if p is not None]
    uses = list(norm.users)
    whole = [u for u in uses if u.args[1] == 0]
    if transposed or not all(p in rewriter.constants for p in parts) or len(uses) != 1 or len(whole) != 1:
        return False
    assert isinstance(w, fx.Node) and isinstance(var, fx.Node) and isinstance(mean, fx.Node)
    ws, vs = w.meta["spec"], var.meta["spec"]
    f32, like = torch.float32, norm
    vector, wide = lies(vs, vs.shape, dtype=f32), lies(ws, ws.shape, dtype=f32)
    tall = lies(vs, (vs.shape[0], 1, 1, 1), (1,) * 4, f32)

    def single(p: Any) -> fx.Node:
        return rewriter.make(aten._to_copy.default, (p,), like, lies(p.meta["spec"], p.meta["spec"].shape, dtype=f32), dtype=f32)

    with rewriter.graph.inserting_before(conv):
        scale = rewriter.make(aten.rsqrt.default, (rewriter.make(aten.add.Tensor, (single(var), eps), like, vector),), like, vector)
        if gamma is not None:
            scale = rewriter.make(aten.mul.Tensor, (scale, single(gamma)), like, vector)
        column = rewriter.make(aten.view.default, (scale, [vs.shape[0], 1, 1, 1]), like, tall)
        weight = rewriter.make(aten.mul.Tensor, (single(w), column), like, wide)
        weight = rewriter.make(aten._to_copy.default, (weight,), like, lies(ws, ws.shape), dtype=ws.dtype)
        centre = single(mean) if bias is None else rewriter.make(aten.sub.Tensor, (single(mean), single(bias)), like, vector)
        shift = rewriter.make(aten.neg.default, (rewriter.make(aten.mul.Tensor, (centre, scale), like, vector),), like, vector)
        if beta is not None:
            shift = rewriter.make(aten.add.Tensor, (shift, single(beta)), like, vector)
        shift = rewriter.make(aten._to_copy.default, (shift,), like, lies(vs, vs.shape, dtype=ws.dtype), dtype=ws.dtype)
        args = (x, weight, shift, stride, padding, dilation, transposed, extra, groups)
        made = rewriter.make(aten.convolution.default, args, conv, conv.meta["spec"])
    rewriter.swap(whole[0], made)
    rewriter.graph.erase_node(norm)
    rewriter.graph.erase_node(conv)
    return True


def join_activations(fg: FunctionalGraph, options: Options) -> FunctionalGraph:
    """A bias, a summand and a relu behind a convolution go into its call where the library has one for them; a bias alone never.

    Where libraries are forbidden, fusion does that."""
    if not any(is_library_convolution(n) for n in fg.graph.nodes) or not options.layout_optimization or options.libtorch == "forbid":
        return fg
    rewriter = Rewriter(fg)
    alone: list[fx.Node] = []
    for node in rewriter.nodes:
        if node.op != "call_function" or not is_library_convolution(node) or node.args[6]:
            continue
        if is_own_convolution(node, options):
            _read_source(rewriter, node)
            continue
        _add_channel(rewriter, node)
        if node.args[2] is not None and not _join(rewriter, node, options):
            alone.append(node)
    for node in alone:
        if node.args[2] is not None:
            _split_bias(rewriter, node)
    for node in list(rewriter.graph.nodes):  # copies into the format in which the joined calls give their results
        last = node.target is aten.clone.default and node.kwargs.get("memory_format") is torch.channels_last
        if last and node not in rewriter.kept.values():
            spec, source = node.meta["spec"], node.args[0]
            is_alike = eager_spec_of(node).strides == eager_spec_of(source).strides  # to calls that read it
            if is_alike and same_strides(spec.shape, source.meta["spec"].strides, spec.strides):
                rewriter.swap(node, source)
    return rewriter.done()


def _source(rewriter: Rewriter, conv: fx.Node) -> fx.Node | None:
    """The image of which the convolution alone reads a copy in the library's format."""
    x = conv.args[0]
    copied = isinstance(x, fx.Node) and x.target is aten.clone.default and x.kwargs.get("memory_format") is torch.channels_last
    return x.args[0] if copied and len(x.users) == 1 and x not in rewriter.kept.values() else None  # type: ignore[union-attr,return-value]


def _read_source(rewriter: Rewriter, conv: fx.Node) -> None:
    """A product of our own reads an image of few channels where it lies."""
    source = _source(rewriter, conv)
    if source is not None and known(source.meta["spec"].shape[1]) in FEW_CHANNELS:
        x = conv.args[0]
        assert isinstance(x, fx.Node)
        conv.replace_input_with(x, source)
        rewriter.graph.erase_node(x)


def _add_channel(rewriter: Rewriter, conv: fx.Node) -> None:
    """Three channels become four, of zeros, where the image is copied anyway: the library's kernels read four numbers at once (measured on
    an H200, 16 images: 11 x 11 windows 71 us and 32, 7 x 7 windows 45 and 31)."""
    source, w = _source(rewriter, conv), conv.args[1]
    assert isinstance(w, fx.Node)
    if source is None or not _is_constant(rewriter, w) or conv.args[-1] != 1:
        return
    spec, weight = source.meta["spec"], w.meta["spec"]
    if known(spec.shape[1]) != 3 or spec.dtype not in HALF_TYPES:
        return
    before = conv.args[0]
    assert isinstance(before, fx.Node)

    def padded(x: fx.Node, lying: TensorSpec) -> fx.Node:
        shape = (lying.shape[0], const(4), *lying.shape[2:])
        made = rewriter.make(aten.constant_pad_nd.default, (x, [0, 0, 0, 0, 0, 1], 0.0), x, lies(lying, shape))
        return clone_as(rewriter.graph, made, torch.channels_last, channels_last_strides(shape))

    with rewriter.graph.inserting_before(conv):
        conv.args = (padded(source, spec), padded(w, weight), *conv.args[2:])
    rewriter.graph.erase_node(before)


def _is_constant(rewriter: Rewriter, node: fx.Node) -> bool:
    """Is it computed of constants alone, in `prepare`?"""
    if node.op != "call_function":
        return node in rewriter.constants
    return node not in rewriter.kept.values() and all(_is_constant(rewriter, x) for x in node.all_input_nodes)


def _only_user(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and node not in rewriter.kept.values() else None


def _join(rewriter: Rewriter, conv: fx.Node, options: Options) -> bool:
    """Does the library have a call for the convolution and what follows? It takes their place then."""
    spec: TensorSpec = conv.meta["spec"]
    x, w, bias, stride, padding, dilation, _, _, groups = conv.args
    assert isinstance(w, fx.Node) and isinstance(bias, fx.Node)
    depthwise = groups != 1 and known(w.meta["spec"].shape[1]) == 1  # the library's kernels for these are fast in the plain call alone
    nxt = _only_user(rewriter, conv) if spec.dtype in FUSED_TYPES and not depthwise else None
    if nxt is not None and nxt.target is aten.relu.default and nxt not in rewriter.kept.values() and "relu" in FUSED:
        with rewriter.graph.inserting_before(nxt):
            made = rewriter.make(FUSED["relu"], (x, w, bias, stride, padding, dilation, groups), nxt, spec)
        made.meta["eager_spec"] = eager_spec_of(nxt)
        rewriter.swap(nxt, made)
        rewriter.graph.erase_node(conv)
        return True
    if nxt is not None and nxt.target is aten.add.Tensor and "add_relu" in FUSED and len(nxt.args) == 2 and nxt.kwargs.get("alpha", 1) == 1:
        last, z = _only_user(rewriter, nxt), nxt.args[1] if nxt.args[0] is conv else nxt.args[0]
        fits = isinstance(z, fx.Node) and z is not conv and _lies_like(z, spec)
        if fits and last is not None and last.target is aten.relu.default and last not in rewriter.kept.values():
            with rewriter.graph.inserting_before(last):
                assert isinstance(z, fx.Node)
                bias = _without_bias(rewriter, z, bias, options)
                if not same_strides(spec.shape, z.meta["spec"].strides, spec.strides):
                    z = clone_as(rewriter.graph, z, torch.channels_last, spec.strides)
                args = (x, w, z, None, bias, stride, padding, dilation, groups)
                made = rewriter.make(FUSED["add_relu"], args, last, spec)
                made.meta["eager_spec"] = eager_spec_of(last)
            rewriter.swap(last, made)
            rewriter.graph.erase_node(nxt)
            rewriter.graph.erase_node(conv)
            return True
    return False


def _split_bias(rewriter: Rewriter, conv: fx.Node) -> None:
    """A bias is added by the kernel that reads the result."""
    spec: TensorSpec = conv.meta["spec"]
    x, w, bias, *_ = conv.args
    channels = spec.shape[1]
    with rewriter.graph.inserting_before(conv):
        plain = rewriter.make(aten.convolution.default, (x, w, None, *conv.args[3:]), conv, spec)
        row = lies(spec, (1, channels, 1, 1), (channels, 1, 1, 1))
        column = rewriter.make(aten.view.default, (bias, [1, channels, 1, 1]), conv, row)
        made = rewriter.make(aten.add.Tensor, (plain, column), conv, spec)
    made.meta["eager_spec"] = conv.meta.get("eager_spec")
    rewriter.swap(conv, made)


def _without_bias(rewriter: Rewriter, z: fx.Node, bias: fx.Node, options: Options) -> fx.Node:
    """The bias of a call that adds `z`: if that is a convolution of the library that nobody else reads, with the bias taken from it."""
    if not is_library_convolution(z) or z.args[6] or len(z.users) != 1 or z in rewriter.kept.values() or is_own_convolution(z, options):
        return bias
    more, spec = z.args[2], bias.meta["spec"]
    if not isinstance(more, fx.Node) or not (_is_constant(rewriter, more) and _is_constant(rewriter, bias)):
        return bias
    z.args = (*z.args[:2], None, *z.args[3:])
    single = lies(spec, spec.shape, dtype=torch.float32)
    parts = [rewriter.make(aten._to_copy.default, (b,), z, single, dtype=torch.float32) for b in (bias, more)]
    both = rewriter.make(aten.add.Tensor, tuple(parts), z, single)
    return rewriter.make(aten._to_copy.default, (both,), z, lies(spec, spec.shape), dtype=spec.dtype)


def _lies_like(z: fx.Node, spec: TensorSpec) -> bool:
    other = z.meta.get("spec")
    return isinstance(other, TensorSpec) and other.dtype is spec.dtype and len(other.shape) == len(spec.shape) and all(
        a is b for a, b in zip(other.shape, spec.shape, strict=True)
    )
