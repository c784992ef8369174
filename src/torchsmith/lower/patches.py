"""Convolutions that are products, on a GPU: windows that do not overlap. FunctionalGraph in, FunctionalGraph out.

    convolution(x, w, b, stride=(p, q))  with w of (o, c, p, q)
        becomes    addmm(b, patches(x), t(w as (o, c * p * q)))     patches: (n * rows * columns, c * p * q)

The library has no fast kernel for such windows of few channels (16 x 16 of 3: 69 us on an H100, the product 4 us). Patches are copied,
as the image would be for another memory format; results lie channels-last. Windows of one element are left to contraction.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.spec import FunctionalGraph, TensorSpec
from ..options import Options
from .layout import channels_last_strides, is_library_convolution
from .ref import constant, known
from .rewriter import Rewriter, lies

aten = torch.ops.aten
TYPES = frozenset({torch.float16, torch.bfloat16})


def multiply_patches(fg: FunctionalGraph, options: Options) -> FunctionalGraph:
    """Of 16-bit numbers: with float32 convolutions and products follow different switches for TF32."""
    if options.libtorch == "forbid" or not any(map(_is_of_patches, fg.graph.nodes)):
        return fg
    rewriter = Rewriter(fg)
    for node in rewriter.nodes:
        if _is_of_patches(node) and node not in rewriter.kept.values():
            _rewrite(rewriter, node)
    return rewriter.done()


def _is_of_patches(node: fx.Node) -> bool:
    if node.target is not aten.convolution.default or not is_library_convolution(node):
        return False
    x, w, _, stride, padding, dilation, transposed, _, groups = node.args
    spec, weight = x.meta["spec"], w.meta["spec"]  # type: ignore[union-attr]
    window: Any = [known(n) for n in weight.shape[2:]]
    if transposed or groups != 1 or any(padding) or {*dilation} != {1} or list(stride) != window:  # type: ignore[arg-type,call-overload,misc]
        return False
    if spec.dtype not in TYPES or None in map(known, (*spec.shape, *weight.shape)):
        return False
    return window != [1, 1]


def _rewrite(rewriter: Rewriter, conv: fx.Node) -> None:
    x, w, bias, stride = conv.args[:4]
    assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
    spec: TensorSpec = conv.meta["spec"]
    n, channels, *_ = (constant(s) for s in x.meta["spec"].shape)
    _, out, rows, columns = (constant(s) for s in spec.shape)
    p, q = (int(s) for s in stride)  # type: ignore[union-attr,arg-type]
    inner = channels * p * q

    def step(target: Any, source: fx.Node, shape: list[int], *args: Any, **kwargs: Any) -> fx.Node:
        return rewriter.make(target, (source, *args), conv, lies(spec, shape), **kwargs)

    x, w = _source(x), _source(w)
    with rewriter.graph.inserting_before(conv):
        sizes = [constant(s) for s in x.meta["spec"].shape]
        for d, size in ((2, rows * p), (3, columns * q)):
            if sizes[d] != size:  # what no window reaches
                sizes[d] = size
                x = step(aten.slice.Tensor, x, sizes, d, 0, size)
        apart, order = [n, channels, rows, p, columns, q], [0, 2, 4, 1, 3, 5]
        x = step(aten.view.default, x, apart, apart)
        x = step(aten.permute.default, x, [apart[k] for k in order], order)
        x = step(aten.clone.default, x, [apart[k] for k in order], memory_format=torch.contiguous_format)
        x = step(aten.view.default, x, [n * rows * columns, inner], [n * rows * columns, inner])
        flat = step(aten.view.default, w, [out, inner], [out, inner])
        right = rewriter.make(aten.t.default, (flat,), conv, lies(spec, [inner, out], (1, inner)))
        product = lies(spec, (n * rows * columns, out))
        given = (x, right) if bias is None else (bias, x, right)
        made = rewriter.make(aten.mm.default if bias is None else aten.addmm.default, given, conv, product)
        made = step(aten.view.default, made, [n, rows, columns, out], [n, rows, columns, out])
        made = rewriter.make(aten.permute.default, (made, [0, 3, 1, 2]), conv, lies(spec, spec.shape, channels_last_strides(spec.shape)))
    rewriter.swap(conv, made)


def _source(x: fx.Node) -> fx.Node:
    """What was copied for the convolution alone."""
    copied = x.target is aten.clone.default and x.kwargs.get("memory_format") is torch.channels_last and len(x.users) == 1
    return x.args[0] if copied else x  # type: ignore[return-value]
