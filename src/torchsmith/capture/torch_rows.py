"""Rows for torch functions that are neither graph nodes nor plain Python: state, predicates, mode switches.

In: the machine and the call's arguments. Out: the value; state changes leave nodes in the captured graph.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from ..codes import Unsupported
from ..graph import layout, tracing
from ..graph.region import Region
from ..graph.sizes import SymTypes
from ..ir.rows import rows
from . import attempts, control_flow, flex, guards, overrides, policy
from .attributes import Raised
from .protocol import Machine, Row
from .source import Computed
from .tensor_attrs import ROWS as TENSOR_ROWS
from .world import MISSING, is_constant

ROWS: dict[Any, Row] = {}


_row = rows(ROWS, "row")


def row(*functions: Any) -> Callable[[Row], Row]:
    """What the machine does instead of calling these functions; None: one that this torch lacks."""
    return _row(*(f for f in functions if f is not None))


# Old constructors of tensors, and the dtype they give (None: the default one).
CONSTRUCTORS: dict[Any, torch.dtype | None] = {
    torch.Tensor: None, torch.FloatTensor: torch.float32, torch.DoubleTensor: torch.float64, torch.HalfTensor: torch.float16,
    torch.BFloat16Tensor: torch.bfloat16, torch.LongTensor: torch.int64, torch.IntTensor: torch.int32, torch.ShortTensor: torch.int16,
    torch.CharTensor: torch.int8, torch.ByteTensor: torch.uint8, torch.BoolTensor: torch.bool,
}  # fmt: skip


def _constructs(cls: Any, dtype: torch.dtype | None) -> None:
    def made(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Of lists of numbers what torch.tensor makes of them; sizes, storages and tensors are Python's."""
        args = [_plain_numbers(m.index_key(a)) for a in args]
        if dtype is None and not kwargs and len(args) == 1 and issubclass(type(args[0]), torch.Tensor):
            return overrides.cast(m, args[0], torch.Tensor)
        kinds = (int, float, torch.SymInt, torch.SymFloat) if dtype is None or dtype.is_floating_point else (int, torch.SymInt)
        if kwargs or len(args) != 1 or type(args[0]) not in (list, tuple) or guards.default_device() is not None or not _are_numbers(args[0], kinds):
            raise Unsupported("CAP021", at=m.loc(), detail=f"torch.{cls.__name__} of something else than a list of numbers")
        return m.record("function", torch.tensor, tuple(args), {"dtype": dtype or torch.get_default_dtype()})

    row(cls)(made)


def _plain_numbers(values: Any) -> Any:
    """Scalars of NumPy as Python's numbers; those that are tensors to us stay."""
    if type(values) in (list, tuple):
        return [_plain_numbers(v) for v in values]
    return values.item() if isinstance(values, (np.integer, np.floating)) else values


@row(torch.Tensor._make_subclass)
def make_subclass(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The tensor's memory as an instance of a class, detached."""
    given = dict(zip(("cls", "data", "require_grad"), args, strict=False)) | kwargs
    if given.keys() - {"cls", "data", "require_grad"} or m.truth(given.get("require_grad", False)):
        raise Unsupported("CAP021", at=m.loc(), detail="_make_subclass with options")
    with overrides.unseen(m):
        data = m.record("method", "detach", (given["data"],), {})
    return overrides.cast(m, data, given["cls"])


@row(torch.Tensor._make_wrapper_subclass)
def make_wrapper(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Unsupported("CAP021", at=m.loc(), detail=f"{args[0].__name__}, which wraps others")


def _are_numbers(values: Any, kinds: tuple[type, ...]) -> bool:
    return all(_are_numbers(v, kinds) if type(v) in (list, tuple) else issubclass(type(v), kinds) for v in values)


for _cls, _dtype in CONSTRUCTORS.items():
    _constructs(_cls, _dtype)


@row(torch.nn.Parameter)
def parameter(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A leaf that shares the memory of a tensor. Where it leaves the function it has to be of its class: Python makes it then."""
    given: dict[str, Any] = dict(zip(("data", "requires_grad"), args, strict=False)) | kwargs
    data: Any = given.get("data")
    is_tensor = issubclass(type(data), torch.Tensor) and not overrides.is_subclass(m.recorder.info(data).cls)
    if not is_tensor or len(args) > 2 or given.keys() - {"data", "requires_grad"}:
        raise Unsupported("CAP021", at=m.loc(), detail="a Parameter of something else than a plain tensor")
    requires_grad = m.truth(given.get("requires_grad", True))
    with overrides.unseen(m):
        made = m.record("method", "detach", (data,), {})
        if requires_grad:
            made = m.call(m.attr(made, "requires_grad_"), [True], {})
    info = m.recorder.info(made)
    info.cls, info.place = torch.nn.Parameter, (m.frames[0].steps - 1, m.loc())
    return made


def constant(value: Any, *functions: Any) -> None:
    row(*functions)(lambda m, args, kwargs: value)


def _named(*names: str) -> list[Any]:
    """Functions by dotted name below torch; those this version lacks are left out."""
    out = []
    for name in names:
        obj: Any = torch
        for part in name.split("."):
            obj = getattr(obj, part, None)
            if obj is None:
                break
        if obj is not None and obj not in out:
            out.append(obj)
    return out


@row(*_named("compiler.is_compiling", "compiler.is_dynamo_compiling", "_utils.is_compiling"))
def is_compiling(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Not so for optimizers: compiled, they would do their bookkeeping with tensors in float32 instead of with Python's numbers. Nor for
    calls of modules, which would leave out hooks that are always called."""
    return not m.is_in_optimizer() and m.frames[-1].code.code is not torch.nn.Module._call_impl.__code__


@row(*_named("compiler.is_exporting"))
def is_exporting(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return m.is_whole


constant(False, *_named("jit.is_scripting", "jit.is_tracing", "_jit_internal.is_scripting", "onnx.is_in_onnx_export",
                        "fx._symbolic_trace.is_fx_tracing", "fx._symbolic_trace.is_fx_symbolic_tracing",
                        "overrides.is_tensor_method_or_property", "_C._is_tracing"))  # fmt: skip
constant(0, *_named("_C._len_torch_dispatch_stack"))


overrides.rows(row)


constant(False, *_named("nn.modules.activation._is_make_fx_tracing"))
constant(None, *_named("_C._get_tracing_state", "_C._log_api_usage_once", "_C._functorch.peek_interpreter_stack",
                       "_C._functorch.maybe_current_level", "compiler.cudagraph_mark_step_begin"))  # fmt: skip
constant((None, False), *_named("_C._dynamo.compiled_autograd.set_autograd_compiler"))  # the one before, and whether its sizes vary


@row(*_named("nn.modules.transformer._detect_is_causal_mask"))
def is_causal_mask(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A hint for speed beside a mask, which torch would read off the mask's values: without it the mask is used as it is."""
    given = dict(zip(("mask", "is_causal"), args, strict=False)) | kwargs
    return given.get("is_causal") is True


@row(torch.nn.modules.lazy.LazyModuleMixin._infer_parameters)
def infer_parameters(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The first call of a lazy module makes its parameters, and may change its class."""
    raise Unsupported("CAP038", at=m.loc(), detail=f"a call of {type(args[0]).__name__}")


def _as_nested(encoder: Any, out: Any, padding: Any, src: Any) -> Any:
    """`out` as eager gives it under inference, where it takes padding at the sequences' ends out: zeros there, then the last norm."""
    first = encoder.layers[0]
    if not encoder.use_nested_tensor or first.training or src.dim() != 3 or not encoder.mask_check:
        return out
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return out
    if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
        return out
    keep = padding.logical_not()
    holes = torch.logical_and(keep[:, 1:], padding[:, :-1] != 0).any()
    zeros = torch.zeros_like(src)
    fill = zeros if encoder.norm is None else encoder.norm(zeros)
    return torch.where(torch.logical_or(keep, holes).unsqueeze(-1), out, fill)


def transformer_encoder(m: Machine, out: Any, encoder: Any, src: Any, mask: Any, padding: Any, is_causal: Any) -> Any:
    """torch's own code avoids nested tensors while compiling, which changes what stands at padded places."""
    return out if padding is None or mask is not None else m.inline(_as_nested, [encoder, out, padding, src], {})


# What becomes of the results of Python functions that are inlined: function -> fn(machine, result, *the function's arguments)
AFTER: dict[Any, Callable[..., Any]] = {torch.nn.TransformerEncoder.forward: transformer_encoder}


# ---------------------------------------------------------------- grad mode


@row(torch.is_grad_enabled)
def is_grad_enabled(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return m.grad


@row(torch.is_inference_mode_enabled)
def is_inference(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return m.inference


@row(getattr(torch._C, "_infer_size", None))
def infer_size(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What two sizes broadcast to, as distributions of matrices ask."""
    return torch.Size(m.symbolic(layout.broadcast, *args))


@row(torch._C._set_grad_enabled)
def call_set_grad_enabled(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    found = overrides.dispatched(m, "function", torch._C._set_grad_enabled, tuple(args), kwargs) if m.modes else MISSING
    return set_grad_enabled(m, bool(args[0])) if found is MISSING else found


def set_grad_enabled(m: Machine, mode: bool) -> None:
    """In the graph and for what follows."""
    m.recorder.effect(torch._C._set_grad_enabled, (mode,))
    m.grad = mode


def _left(m: Machine, what: str) -> tuple[Any, Any, Any, Any]:
    """The innermost open region; where the frame was split inside of one, Python entered it."""
    if not m.contexts:
        raise Unsupported("CAP039", at=m.loc(), detail=what)
    return m.contexts.pop()  # type: ignore[no-any-return]


@row(torch.inference_mode.__enter__)
def enter_inference(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    self = args[0]
    mode = m.attr(self, "mode")
    node = m.recorder.effect(torch.autograd.grad_mode._enter_inference_mode, (mode,))
    m.contexts.append((None, node, m.grad, m.inference))
    m.inference = bool(mode)
    m.grad = m.grad and not mode
    return None


@row(torch.inference_mode.__exit__)
def exit_inference(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _, node, m.grad, m.inference = _left(m, "inference_mode")
    m.recorder.effect_node(torch.autograd.grad_mode._exit_inference_mode, (node,))
    return None


# ---------------------------------------------------------------- autocast


@row(torch.amp.autocast_mode.autocast.__enter__)
def enter_autocast(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The region is two nodes; torch's own state is set too, for the tracing below. A region that changes nothing leaves none."""
    device, dtype, enabled, cached = (m.attr(args[0], n) for n in ("device", "fast_dtype", "_enabled", "_cache_enabled"))
    if device not in ("cpu", "cuda"):
        raise Unsupported("CAP017", at=m.loc(), detail=f"autocast on {device}")
    node = real = None
    if enabled or m.autocast.get(device, (False, None))[0]:
        values = (device, dtype, enabled, cached)
        node = m.recorder.effect(torch.amp.autocast_mode._enter_autocast, values)
        real = torch.amp.autocast_mode._enter_autocast(*values)
    m.contexts.append((real, node, m.autocast, None))
    m.autocast = {**m.autocast, device: (enabled, dtype)}
    return args[0]


@row(torch.amp.autocast_mode.autocast.__exit__)
def exit_autocast(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    real, node, m.autocast, _ = _left(m, "autocast")
    if node is not None:
        torch.amp.autocast_mode._exit_autocast(real)
        m.recorder.effect_node(torch.amp.autocast_mode._exit_autocast, (node,))
    return False


def leave_regions(m: Machine) -> None:
    """A capture that ended inside an autocast region must not leave it on."""
    while m.contexts:
        real = m.contexts.pop()[0]
        if issubclass(type(real), torch.amp.autocast_mode.autocast):
            torch.amp.autocast_mode._exit_autocast(real)


@row(torch.is_autocast_enabled)
def is_autocast_enabled(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return bool(m.autocast.get(args[0] if args else "cuda", (False, None))[0])


@row(torch.get_autocast_dtype)
def get_autocast_dtype(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    on, dtype = m.autocast.get(args[0], (False, None))
    return dtype if on else m.world.wrap(torch.get_autocast_dtype(args[0]), Computed(torch.get_autocast_dtype, (args[0],), ()))


def _of_device(row: Row, device: str) -> Row:
    return lambda m, args, kwargs: row(m, [device], {})


for _device, _is_on, _type in (("cpu", "is_autocast_cpu_enabled", "get_autocast_cpu_dtype"), ("cuda", "", "get_autocast_gpu_dtype")):
    row(*_named(*filter(None, [_is_on])))(_of_device(is_autocast_enabled, _device))
    row(*_named(_type))(_of_device(get_autocast_dtype, _device))


@row(*_named("_C._is_any_autocast_enabled"))
def is_any_autocast(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return any(on for on, _ in m.autocast.values())


@row(torch.get_default_device)
def get_default_device(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    own = next((x for x in reversed(m.modes) if issubclass(type(x), DeviceContext)), None)
    found = guards.default_device() if own is None else m.attr(own, "device")
    if found is None or found.index is not None or found.type != "cuda":
        return found or torch.device("cpu")
    return torch.device("cuda", m.call(torch.cuda.current_device, [], {}))


# ---------------------------------------------------------------- hooks of saved tensors, switched off

_why_off = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


@row(_why_off)
def why_hooks_are_off(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The message under which they are, or None."""
    was = m.world.wrap(_why_off(), Computed(_why_off, (), ()))
    return next((a[0] if a else None for fn, a, _ in reversed(m.effects) if fn in (_hooks_off, _hooks_on)), was)


@row(*_named("_C._autograd._saved_tensors_hooks_is_enabled"))
def are_hooks_on(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return why_hooks_are_off(m, [], {}) is None


def _switch_hooks(m: Machine, fn: Any, args: list[Any]) -> None:
    """How they are left is replayed; what changes nothing in the end is not."""
    m.effects = [e for e in m.effects if e[0] not in (_hooks_off, _hooks_on)]
    if why_hooks_are_off(m, [], {}) != (args[0] if args else None):
        m.effects.append((fn, args, {}))


_hooks_off, _hooks_on = torch._C._autograd._saved_tensors_hooks_disable, torch._C._autograd._saved_tensors_hooks_enable
row(_hooks_off)(lambda m, args, kwargs: _switch_hooks(m, _hooks_off, args[:1]))
row(_hooks_on)(lambda m, args, kwargs: _switch_hooks(m, _hooks_on, []))


# ---------------------------------------------------------------- values known while capturing

_STATE = _named(
    "get_default_dtype", "get_default_device", "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled",
    "get_num_threads", "get_num_interop_threads", "is_warn_always_enabled", "get_float32_matmul_precision", "is_autocast_cache_enabled", "_C._get_privateuse1_backend_name", "_C._is_autocast_available", "amp.is_autocast_available", "amp.autocast_mode.is_autocast_available",
    "cuda.is_available", "cuda.device_count", "backends.mps.is_available", "xpu.is_available", "distributed.is_available",
    "distributed.is_initialized", "backends.cuda.is_built", "cuda.is_bf16_supported", "cuda.current_device", "cuda.get_device_capability",
    "promote_types", "can_cast", "typename", "compiled_with_cxx11_abi", "_C._get_cudnn_enabled", "_C._get_mkldnn_enabled", "_C._get_flash_sdp_enabled",
    "backends.mkldnn.is_available", "backends.cudnn.is_available", "backends.openmp.is_available", "_C._cuda_isCurrentStreamCapturing",
    "backends.cuda.flash_sdp_enabled", "backends.cuda.math_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled", "backends.cuda.is_flash_attention_available", "version.cuda", "_C._get_math_sdp_enabled",
    "_C._get_mem_efficient_sdp_enabled", "_C._get_cudnn_sdp_enabled", "_C._has_mkldnn", "is_vulkan_available", "_C._has_mkl",
    "mps.is_available", "accelerator.is_available", "accelerator.current_accelerator", "get_device_module", "_C._get_default_device",
    "_C._get_cudnn_allow_tf32", "_C._get_cudnn_deterministic", "_C._get_cudnn_benchmark", "_C._get_deterministic_algorithms",
    "_C._get_deterministic_algorithms_warn_only", "_C._get_onednn_allow_tf32", "_C._get_cublas_allow_tf32", "_C._get_float32_matmul_precision",
    "_C._get_nnpack_enabled",
    "_C._get_fp32_precision_getter", "_C._get_warnAlways", "_C._get_mkldnn_deterministic",
)  # fmt: skip


# What a process cannot change, and what is part of the guarded global state.
_SETTLED = frozenset(_named(
    "get_default_dtype", "get_default_device", "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled",
    "_C._get_deterministic_algorithms", "_C._get_deterministic_algorithms_warn_only", "_C._get_default_device", "is_autocast_cache_enabled",
    "_C._is_autocast_available", "amp.is_autocast_available", "amp.autocast_mode.is_autocast_available", "cuda.is_available",
    "cuda.device_count", "backends.mps.is_available", "xpu.is_available", "distributed.is_available", "backends.cuda.is_built",
    "cuda.is_bf16_supported", "cuda.get_device_capability", "promote_types", "can_cast", "typename", "compiled_with_cxx11_abi",
    "backends.mkldnn.is_available", "backends.cudnn.is_available", "backends.openmp.is_available", "is_vulkan_available", "_C._has_mkl",
    "_C._has_mkldnn", "mps.is_available", "accelerator.is_available", "backends.cuda.is_flash_attention_available", "version.cuda",
    "_C._cuda_isCurrentStreamCapturing", "_C._is_torch_function_enabled", "_C._get_privateuse1_backend_name", "get_device_module",
))  # fmt: skip


def _state(fn: Any) -> Row:
    if fn in _SETTLED:
        return lambda m, args, kwargs: m.native(fn, args, kwargs, plain=True)

    def read(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A switch of the process: asked again before each call."""
        value = m.native(fn, args, kwargs, plain=True)
        return value if kwargs or not all(map(is_constant, args)) else m.world.wrap(value, Computed(fn, tuple(args), ()))

    return read


for _f in _STATE:
    if callable(_f) and _f not in ROWS:
        ROWS[_f] = _state(_f)


@row(torch.is_inference)
def is_inference_tensor(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return m.recorder.is_inference(args[0] if args else kwargs["input"])


@row(torch.is_tensor)
def is_tensor(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return issubclass(type(args[0]), torch.Tensor)


@row(torch.result_type)
def result_type(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return torch.result_type(*args, **kwargs)


def _sym_row(fn: Any) -> Row:
    return lambda m, args, kwargs: m.symbolic(fn, *args)


for _f in _named("sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_ite", "sym_sqrt"):
    ROWS[_f] = _sym_row(_f)


@row(torch.sym_sum)
def sym_sum(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return functools.reduce(lambda a, b: m.call(operator.add, [a, b], {}), m.listed(args[0] if args else kwargs["args"]), 0)


@row(torch._shape_as_tensor)
def shape_as_tensor(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return m.call(torch.tensor, [list(m.attr(args[0] if args else kwargs["self"], "shape"))], {})


@row(*_named("_check", "_check_value", "_check_index", "_check_type", "_check_is_size", "_check_with", "_assert"))
def check(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    cond = args[0] if args else kwargs.get("cond", kwargs.get("b"))
    if issubclass(type(cond), type) and len(args) > 1:
        cond = args[1]
    if issubclass(type(cond), torch.Tensor):
        return None
    if type(cond) is int:
        return None
    if type(cond) is torch.SymInt:  # _check_is_size
        cond = m.symbolic(operator.ge, cond, 0)
    if type(cond) is torch.SymBool and cond.node.hint is None:
        said = next((a for a in (*args[1:], *kwargs.values()) if type(a) is str or callable(a)), None)
        text = m.call(said, [], {}) if callable(said) else said
        m.recorder.assume(cond, text if type(text) is str else "")
        return None
    if not m.truth(cond):
        raise Raised(RuntimeError("Expected cond to be True"))
    return None


_SIZES = "torch.fx.experimental.symbolic_shapes"  # its functions are found by name: importing it takes long


def _is_static(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Is it a number that sizes have no part in?"""
    value = args[0] if args else kwargs["a"]
    if type(value) is torch.SymInt:
        lo, hi = value.node.facts.bound(value.node.expr)
        return lo is not None and lo == hi
    return type(value) not in SymTypes


def _known(wanted: bool, otherwise: bool | None) -> Row:
    """What is known of a truth without asking for it. otherwise: the answer where only running tells; None: that it is not known."""

    def answer(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> bool:
        value = args[0] if args else next(iter(kwargs.values()))
        if type(value) is not torch.SymBool:
            return bool(value) if wanted else not value
        found = value.node.facts.decide(value.node.expr)
        if otherwise is None:
            return found is wanted
        return m.truth(value) if found is not None or value.node.hint is not None else otherwise

    return answer


@row(*_named("compiler.disable"))
def disable(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Unsupported("CAP014", at=m.loc(), detail="torch.compiler.disable")


def _refuse(fn: Any) -> Row:
    def refused(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = f"{getattr(fn, '__module__', None) or 'torch'}.{getattr(fn, '__qualname__', getattr(fn, '__name__', fn))}"
        raise Unsupported("CAP014", at=m.loc(), detail=f"{name}, which changes state or traces on its own")

    return refused


for _f in _named("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "random.fork_rng", "save", "load",
             "cuda.synchronize", "set_default_dtype", "set_default_device", "set_num_threads", "use_deterministic_algorithms",
             "func.linearize", "func.functionalize", "set_printoptions"):  # fmt: skip
    row(_f)(_refuse(_f))


@row(torch.compile)
def compiled_inside(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A function that is compiled inside of a compiled one, and called there, is part of its graph; it means nothing outside."""
    fn = args[0] if args else kwargs.get("model")
    if fn is None:
        return policy.of_machine(lambda f: compiled_inside(m, [f], kwargs))
    if type(fn) is not types.FunctionType or kwargs.get("disable"):
        raise Unsupported("CAP014", at=m.loc(), detail="compile of something else than a function")
    return policy.of_machine(functools.wraps(fn)(lambda *a, **k: m.call(fn, list(a), k)))


_CHECKPOINT_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop")


def checkpoint(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Checkpointing changes what is kept for backward, not what is computed: its operators are marked."""
    if not args or kwargs.get("use_reentrant") is None:
        raise Unsupported("CAP014", at=m.loc(), detail="checkpoint without use_reentrant, which warns")
    context_fn, recorder = kwargs.get("context_fn"), m.recorder
    has_context = "context_fn" in kwargs and getattr(context_fn, "__name__", "") != "noop_context_fn"
    given = {k: v for k, v in kwargs.items() if k not in _CHECKPOINT_OPTIONS}
    reentrant = m.truth(kwargs["use_reentrant"])
    if reentrant:
        _check_reentrant(m, args[1:], kwargs, list(given), has_context)
    elif kwargs.get("determinism_check", "default") not in ("default", "none"):
        raise Unsupported("CAP014", at=m.loc(), detail="checkpoint with an unknown determinism_check")
    recorder.regions.append(Region(_policy(m, context_fn) if has_context else None))
    recorder.has_regions = True
    known, drawn = recorder.versions(), tracing.current().draws
    try:
        result = m.call(args[0], args[1:], given)
    finally:
        recorder.regions.pop()
    if m.grad and tracing.current().draws != drawn and not m.truth(kwargs.get("preserve_rng_state", True)):
        raise Unsupported("CAP014", at=m.loc(), detail="checkpoint with preserve_rng_state=False: eager draws other numbers when it goes backwards")
    if m.grad and recorder.written_since(known):  # running statistics, say
        raise Unsupported("CAP014", at=m.loc(), detail="checkpoint of what writes to tensors: eager writes once more when it goes backwards")
    if reentrant:
        _check_reentrant_results(m, args[1:], result)
    return result


def _check_reentrant(m: Machine, args: list[Any], kwargs: dict[str, Any], others: list[str], has_context: bool) -> None:
    """What eager's reentrant form refuses; it knows of tensors among its arguments only, and warns where none of them requires grad."""
    if others:
        raise Raised(ValueError("Unexpected keyword arguments: " + ",".join(others)))
    if has_context or kwargs.get("debug", False) is not False:
        raise Raised(ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False."))
    if not any(issubclass(type(a), torch.Tensor) and m.recorder.info(a).requires_grad for a in args):
        raise Unsupported("CAP014", at=m.loc(), detail="checkpoint with use_reentrant=True, where no argument requires grad")


def _check_reentrant_results(m: Machine, args: list[Any], result: Any) -> None:
    """Its results are new tensors, and all of them require grad, whatever they were made of."""
    found = result if type(result) is tuple else (result,)
    tensors = [t for t in found if issubclass(type(t), torch.Tensor)]
    known = all(m.recorder.info(t).requires_grad is (m.grad and (t.is_floating_point() or t.is_complex())) for t in tensors)
    plain = all(type(v) in (int, float, bool, str, type(None)) for v in found if not issubclass(type(v), torch.Tensor))
    if not (known and plain) or any(t is a for t in tensors for a in args):
        raise Unsupported("CAP014", at=m.loc(), detail="checkpoint with use_reentrant=True, whose results are not what the function gives")


def _policy(m: Machine, context_fn: Any) -> Callable[..., Any]:
    """Which operators a selective checkpoint keeps. It changes no values, so nothing of it is guarded: it is asked when a graph is made."""
    try:
        first, _ = m.world.canonical(context_fn)()
    except Exception as e:
        raise Unsupported("CAP014", at=m.loc(), detail=f"checkpoint with context_fn, which raised {type(e).__name__}: {e}") from e
    policy, home = getattr(first, "policy_fn", None), sys.modules[type(first).__module__]
    if type(first).__name__ != "_CachingTorchDispatchMode" or policy is None:
        raise Unsupported("CAP014", at=m.loc(), detail="checkpoint with context_fn that is not of create_selective_checkpoint_contexts")
    return functools.partial(policy, home.SelectiveCheckpointContext(is_recompute=False))


def _dynamos_settings(name: str) -> Row:
    """Entering and leaving what patches the settings of PyTorch's compiler, as programs of torch.export do around their checks."""

    def found(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
        kind = type(args[0])
        return None if kind.__name__ == "DynamoConfigPatchProxy" else m.inline(getattr(kind, name), args, kwargs)

    return found


def _dynamos_break(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Unsupported("CAP018", at=m.loc(), detail="graph_break(" + ", ".join(map(repr, (*args, *kwargs.values()))) + ")")


def _choose_kernels(m: Machine, args: list[Any], kwargs: dict[str, Any]) -> None:
    m.recorder.facts.kernels_chosen = True


# Inner functions of torch (decorators' wrappers), by their code: fn(machine, function, args, kwargs).
BY_CODE: dict[types.CodeType, Callable[[Any, Any, list[Any], dict[str, Any]], Any]] = {}
# Functions of modules that must not be imported for their own sake, by (module, name).
BY_NAME: dict[tuple[str, str], Row] = {
    (_SIZES, "has_static_value"): _is_static,
    (_SIZES, "statically_known_true"): _known(True, None), (_SIZES, "statically_known_false"): _known(False, None),
    (_SIZES, "guard_or_false"): _known(True, False), (_SIZES, "guard_or_true"): _known(True, True),
    ("torch._compile", "checkpoint"): checkpoint, ("torch._higher_order_ops.map", "map"): control_flow.map_,
    ("torch._higher_order_ops.scan", "scan"): control_flow.scan, ("torch._higher_order_ops.while_loop", "while_loop"): control_flow.while_loop,
    ("torch._higher_order_ops.cond", "cond"): control_flow.cond,
    ("torch._higher_order_ops.associative_scan", "associative_scan"): control_flow.associative_scan,
    ("torch._higher_order_ops.invoke_subgraph", "invoke_subgraph_placeholder"): lambda m, args, kwargs: m.call(args[0], args[1:], kwargs),
    ("torch.nn.attention.flex_attention", "flex_attention"): flex.flex_attention,
    # which library kernel eager would take: no question of what is computed, unless the kernel draws
    ("torch.nn.attention", "_cur_sdpa_kernel_backends"): lambda m, args, kwargs: [],
    ("torch.nn.attention", "_sdpa_kernel"): _choose_kernels,
    ("torch._dynamo.decorators", "graph_break"): _dynamos_break,
    # its error_on_graph_break is ours
    ("torch._dynamo.utils", "_get_error_on_graph_break"): lambda m, args, kwargs: m.error_mode,
    ("torch._dynamo.utils", "_set_error_on_graph_break"): lambda m, args, kwargs: m.call(attempts.set_error_mode, args, kwargs),
    # what PyTorch's compiler, once used, notes of each module that is made
    ("torch._dynamo.mutation_guard", "tag"): lambda m, args, kwargs: None,
    **{("torch._dynamo.decorators", name): _dynamos_settings(name) for name in ("__enter__", "__exit__")},
}  # fmt: skip
# Operators of graphs, as exported programs call them, by name.
HIGHER_ORDER: dict[str, Row] = {
    "cond": control_flow.cond, "map_impl": control_flow.map_flat, "wrap": lambda m, args, kwargs: m.call(args[0], list(args[1:]), kwargs),
    "strict_mode": lambda m, args, kwargs: m.call(args[0], list(args[1]), {}),
}  # fmt: skip
row(torch.cond)(control_flow.cond)
row(*_named("while_loop"))(control_flow.while_loop)


# ---------------------------------------------------------------- tensors reached natively


class Recording(TorchFunctionMode):
    """Torch calls made by C functions (sum of a list of tensors, math on tensors) are recorded too."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            prop = getattr(func.__self__, "__name__", "")
            if prop in TENSOR_ROWS:
                return TENSOR_ROWS[prop](self.machine, args[0])
        if issubclass(type(func), types.MethodWrapperType):
            raise Unsupported("CAP014", at=self.machine.loc(), detail=f"{func} called from C")
        try:
            return self.machine.call(func, list(args), dict(kwargs or {}))
        except Raised as r:
            raise self.machine.leaving(r.exc) from None


@contextlib.contextmanager
def preserved_state() -> Iterator[None]:
    """Grad mode after capture is what it was."""
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad)


__all__ = ["ROWS", "Recording", "preserved_state", "tracing"]
