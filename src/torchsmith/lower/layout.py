"""Choose channels-last strides around convolutions: FunctionalGraph in, FunctionalGraph out.

    y = convolution(x, w)      ->      x1 = clone(x, channels_last); y = convolution(x1, w)    # y now has channels-last strides
    return y                           y1 = clone(y, contiguous); return y1

oneDNN runs a convolution on channels-last input without reordering activations; on row-major input it reorders them both ways at
every call. But it reorders the weight at every call too, and that costs more from channels-last activations: `is_profitable` weighs the
two. The clones are ordinary pointwise stages, so fusion folds them into whatever produces or reads the value.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..graph.spec import FreshOutput, FunctionalGraph, TensorSpec
from ..ir.expr import Const, Expr, const
from ..options import Options
from .contraction import is_native_convolution
from .extern import eager_spec_of
from .ref import contiguous_strides
from .table import LOWERINGS

aten = torch.ops.aten
CONVOLUTIONS = frozenset({aten.convolution.default})
GRADIENTS = frozenset({aten.convolution_backward.default})
DTYPES = frozenset({torch.float32, torch.bfloat16})
LIBRARY_DEVICES = {"cuda"}  # whose library computes convolutions, channels-last
LIBRARY_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def channels_last_strides(shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Strides of a dense (N, C, H, W) tensor stored as N, H, W, C."""
    _, c, h, w = shape
    return (c * h * w, const(1), c * w, c)


def same_strides(shape: tuple[Expr, ...], a: tuple[Expr, ...], b: tuple[Expr, ...]) -> bool:
    """Do strides `a` and `b` address elements alike? Dimensions of one element do not count."""
    return all(x is y or n is const(1) for n, x, y in zip(shape, a, b, strict=True))


def prefer_channels_last(fg: FunctionalGraph, options: Options) -> FunctionalGraph:
    """Rewrite the 2-d convolutions that stay extern calls to run on channels-last activations."""
    if not options.layout_optimization:
        return fg
    candidates = _candidates(fg, options)
    gradients = [n for n in fg.graph.nodes if _is_weight_gradient(n)]
    library_gradients = [n for n in fg.graph.nodes if is_library_gradient(n)]
    if not candidates and not gradients and not library_gradients:
        return fg
    if any(n.target is aten.as_strided.default for n in fg.graph.nodes):
        return fg  # as_strided names memory, not values
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.graph_copy(fg.graph, copies)
    renamed = {old.name: new for old, new in copies.items()}
    kept = {o.node: renamed[o.node] for o in fg.outputs if isinstance(o, FreshOutput)}
    kept |= {name: renamed[name] for _, name in fg.write_backs}
    for node in candidates:
        _rewrite(graph, copies[node])
    for node in gradients:
        _rewrite_gradient(graph, copies[node])
    for node in library_gradients:
        _rewrite_library_gradient(graph, copies[node])
    copied = _drop_copies(graph, kept)
    # What leaves the graph keeps the strides that eager gives it.
    back = {name: node if name in copied else _restore(graph, node) for name, node in kept.items()}
    results = tuple(back.values())
    for node in graph.nodes:
        if node.op == "output":
            graph.erase_node(node)
    graph.output(results)
    outputs = tuple(FreshOutput(back[o.node].name) if isinstance(o, FreshOutput) else o for o in fg.outputs)
    write_backs = tuple((i, back[name].name) for i, name in fg.write_backs)
    return replace(fg, graph=graph, outputs=outputs, write_backs=write_backs)


def _candidates(fg: FunctionalGraph, options: Options) -> list[torch.fx.Node]:
    """Convolutions that stay extern calls and are faster on channels-last activations."""
    return [n for n in fg.graph.nodes if is_library_convolution(n)
            or (_is_plain(n) and not is_native_convolution(n, options) and is_profitable(n))]  # fmt: skip


def _is_library_image(spec: object) -> bool:
    """A non-empty tensor of two-dimensional images or weights, of floats, in which a GPU's library convolves."""
    return (
        isinstance(spec, TensorSpec) and len(spec.shape) == 4 and spec.device.partition(":")[0] in LIBRARY_DEVICES
        and spec.dtype in LIBRARY_TYPES and not any(isinstance(n, Const) and n.value == 0 for n in spec.shape)
    )  # fmt: skip


def is_library_convolution(node: torch.fx.Node) -> bool:
    """A 2-d convolution of non-empty floats that a GPU's library computes: channels-last is its format."""
    return node.op == "call_function" and node.target in CONVOLUTIONS and _is_library_image(node.meta.get("spec"))


def kept_format(spec: TensorSpec) -> TensorSpec | None:
    """How a row-major image of a GPU that only the backward pass reads is kept, where not as it lies: its convolutions read it
    channels-last."""
    if not _is_library_image(spec):
        return None
    last = channels_last_strides(spec.shape)
    is_turned = same_strides(spec.shape, spec.strides, contiguous_strides(spec.shape)) and not same_strides(spec.shape, spec.strides, last)
    return _with_strides(spec, last) if is_turned else None


def _is_plain(node: torch.fx.Node) -> bool:
    """A 2-d convolution of non-empty floats on the CPU."""
    spec = node.meta.get("spec")
    return (
        node.op == "call_function"
        and node.target in CONVOLUTIONS
        and isinstance(spec, TensorSpec)
        and len(spec.shape) == 4
        and spec.device == "cpu"
        and spec.dtype in DTYPES
        and not any(isinstance(s, Const) and s.value == 0 for s in spec.shape)
    )


def is_profitable(conv: torch.fx.Node) -> bool:
    """Is `conv` faster on channels-last activations? May be wrong without harm.

    Measured on 266 layers of torchvision models (AVX-512, 2 threads): with at least as many activations as weights channels-last
    takes 0.15-1.05 of the row-major time, with a tenth as many 1.2-2.7; strided grouped layers 1.1-1.9 whatever the sizes.
    """
    x, w, stride, groups = conv.args[0], conv.args[1], conv.args[3], conv.args[8]
    assert isinstance(x, torch.fx.Node) and isinstance(w, torch.fx.Node) and isinstance(stride, list | tuple)
    sizes = [_count(x.meta["spec"]), _count(conv.meta["spec"]), _count(w.meta["spec"])]
    if any(n is None for n in sizes):
        return True
    before, after, weights = (n or 0 for n in sizes)
    is_depthwise = w.meta["spec"].shape[1] is const(1)
    is_grouped = groups != 1 and not is_depthwise
    strided = any(s not in (1, const(1)) for s in stride)
    return not (is_grouped and strided) and (is_depthwise or before + after >= 0.8 * weights)


def _is_weight_gradient(node: torch.fx.Node) -> bool:
    """The gradient of a 2-d convolution's weight alone, of known sizes, on the CPU, in float32: mostly a call, whose operands our own
    kernels write and read."""
    if node.op != "call_function" or node.target is not aten.convolution_backward.default or list(node.args[-1]) != [False, True, False]:  # type: ignore[arg-type]
        return False
    specs = [a.meta.get("spec") for a in node.args[:3] if isinstance(a, torch.fx.Node)]
    return len(specs) == 3 and all(
        isinstance(s, TensorSpec) and len(s.shape) == 4 and s.device == "cpu" and s.dtype is torch.float32 and _count(s) for s in specs
    )


def _rewrite_gradient(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Its operands lie channels-last, as our products like to write and read them; where the call itself is slower on those (few
    activations to many weights: oneDNN reorders weights; strides) it alone gets row-major copies.

    Measured, call on row-major / channels-last (ms, AVX-512, one thread): 64 channels at 56 x 56 15.3 / 10.2, 128 at 28 9.0 / 9.4, 256 at
    14 9.8 / 10.0, 512 at 7 10.4 / 26, 64 to 128 with stride 2 5.1 / 7.3, 96 depthwise with stride 2 21.6 / 2.6.
    """
    grad, x, w = node.args[:3]
    assert isinstance(grad, torch.fx.Node) and isinstance(x, torch.fx.Node) and isinstance(w, torch.fx.Node)
    activations, weights = (_count(x.meta["spec"]) or 0) + (_count(grad.meta["spec"]) or 0), _count(w.meta["spec"]) or 0
    strided = any(s not in (1, const(1)) for s in node.args[4])  # type: ignore[union-attr]
    depthwise = w.meta["spec"].shape[1] is const(1)
    suits = depthwise or (not strided and activations >= 0.8 * weights)
    for place, operand in ((0, grad), (1, x)):
        if operand.op == "placeholder" and not suits:
            continue
        last = _turned(graph, operand)
        if not suits:
            _, c, h, width = last.meta["spec"].shape
            with graph.inserting_before(node):
                last = clone_as(graph, last, torch.contiguous_format, (c * h * width, h * width, width, const(1)))
        node.update_arg(place, last)


def is_library_gradient(node: torch.fx.Node) -> bool:
    """Gradients of a 2-d convolution of non-empty floats that a GPU's library computes: channels-last is its format there too."""
    if node.op != "call_function" or node.target not in GRADIENTS:
        return False
    return all(isinstance(a, torch.fx.Node) and _is_library_image(a.meta.get("spec")) for a in node.args[:3])


def _rewrite_library_gradient(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Channels-last operands, and results as the library then gives them: else it would turn every one of them at every call."""
    grad, x, w = node.args[:3]
    assert isinstance(grad, torch.fx.Node) and isinstance(x, torch.fx.Node) and isinstance(w, torch.fx.Node)
    node.update_arg(0, _turned(graph, grad))
    node.update_arg(1, _turned(graph, x))
    node.update_arg(2, _turned_weight(graph, node, w))
    specs = node.meta["spec"]
    image, weight = (s and _with_strides(s, channels_last_strides(s.shape)) for s in specs[:2])
    node.meta["spec"] = type(specs)((image, weight, *specs[2:]))
    for part in list(node.users):
        place = part.args[1]
        if place in (0, 1):
            _set_strides(part, node.meta["spec"][place].strides)


def _turned_weight(graph: torch.fx.Graph, before: torch.fx.Node, w: torch.fx.Node) -> torch.fx.Node:
    """`w` channels-last, for `before` alone: other readers keep the weight. A copy that is there serves again."""
    last = channels_last_strides(w.meta["spec"].shape)
    if same_strides(w.meta["spec"].shape, w.meta["spec"].strides, last):
        return w
    for user in w.users:
        if user.target is aten.clone.default and user.kwargs.get("memory_format") is torch.channels_last and user < before:
            return user
    with graph.inserting_after(w) if w.op != "placeholder" else graph.inserting_before(before):
        return clone_as(graph, w, torch.channels_last, last)


def _set_strides(node: torch.fx.Node, strides: tuple[Expr, ...]) -> None:
    """A value lies so. Readers that are calls get it as before (lower/extern.py)."""
    node.meta["eager_spec"] = eager_spec_of(node)
    node.meta["spec"] = _with_strides(node.meta["spec"], strides)


def _turned(graph: torch.fx.Graph, x: torch.fx.Node) -> torch.fx.Node:
    """`x` channels-last. Readers that follow indices take it too, so that the row-major one need not exist."""
    spec: TensorSpec = x.meta["spec"]
    wanted = channels_last_strides(spec.shape)
    if same_strides(spec.shape, spec.strides, wanted):
        return x
    last = x.args[0] if x.target is aten.clone.default else None  # what forward kept lies so
    if not isinstance(last, torch.fx.Node) or not same_strides(spec.shape, last.meta["spec"].strides, wanted):
        with graph.inserting_after(x):
            last = clone_as(graph, x, torch.channels_last, wanted)
        last.meta["eager_spec"] = eager_spec_of(x)
    x.replace_all_uses_with(last, delete_user_cb=lambda user: user is not last and user.target in LOWERINGS)
    return last


def _count(spec: TensorSpec) -> int | None:
    """Number of elements, if known."""
    return math.prod(int(s.value) for s in spec.shape if isinstance(s, Const)) if all(isinstance(s, Const) for s in spec.shape) else None


def _rewrite(graph: torch.fx.Graph, conv: torch.fx.Node) -> None:
    """Give `conv` a channels-last input and its result channels-last strides."""
    x = conv.args[0]
    assert isinstance(x, torch.fx.Node)
    conv.update_arg(0, _turned(graph, x))
    w = conv.args[1]
    if is_library_convolution(conv) and isinstance(w, torch.fx.Node):  # else the library would turn the weight at every call
        conv.update_arg(1, _turned_weight(graph, conv, w))
    _set_strides(conv, channels_last_strides(conv.meta["spec"].shape))


def _drop_copies(graph: torch.fx.Graph, kept: dict[str, torch.fx.Node]) -> set[str]:
    """A result that is a copy, of what now lies as the copy does, is that value itself. Gives the names of such results."""
    found = set()
    for name, node in kept.items():
        source = node.args[0] if node.target is aten.clone.default else None
        if not isinstance(source, torch.fx.Node) or source.op == "placeholder" or source in kept.values() or "eager_spec" in node.meta:
            continue
        spec = node.meta["spec"]
        ours = (source, *source.users)
        free = all(n.target in LOWERINGS and n.target not in CONVOLUTIONS | GRADIENTS for n in ours)
        if free or same_strides(spec.shape, source.meta["spec"].strides, spec.strides):
            if free:  # our own kernels make it, and read it by index: it may lie anyhow
                _set_strides(source, spec.strides)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            kept[name] = source
            found.add(name)
    return found


def _restore(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """A node with eager's strides for a value that leaves the graph."""
    eager = node.meta.get("eager_spec")
    if eager is None or same_strides(eager.shape, eager.strides, node.meta["spec"].strides):
        return node
    with graph.inserting_after(node):
        return clone_as(graph, node, torch.contiguous_format, eager.strides)


def clone_as(graph: torch.fx.Graph, x: torch.fx.Node, memory_format: torch.memory_format, strides: tuple[Expr, ...]) -> torch.fx.Node:
    clone = graph.call_function(aten.clone.default, (x,), {"memory_format": memory_format})
    clone.meta.update(x.meta)
    clone.meta.pop("eager_spec", None)
    clone.meta["spec"] = _with_strides(x.meta["spec"], strides)
    return clone


def _with_strides(spec: TensorSpec, strides: tuple[Expr, ...]) -> TensorSpec:
    return TensorSpec(spec.dtype, spec.shape, strides, spec.device)
