"""Calling: what each kind of callable means to the machine.

In: the machine, a callable, positional and keyword values. Out: the value, or Raised. Python functions are inlined, torch functions
recorded, C functions run natively when their arguments are plain; rows say what the others do.
"""

from __future__ import annotations

import functools
import operator
import re
import string
import sys
import types
import typing
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..codes import Unsupported
from ..graph.sizes import SymTypes
from ..ir.rows import rows
from . import arrays, attempts, floats, overrides, peers, policy, tensor_methods, tensors, torch_rows
from . import attributes as at
from . import protocols as pr
from .attributes import Raised, find
from .protocol import Args, Kwargs, Machine, Row
from .source import Attr, Computed, FixedObject, PartOf
from .tensor_attrs import TensorMethod
from .world import CONTAINERS, MISSING, PINNED_TYPES, SCALARS, UNCHANGING, container_base, is_binding, is_constant

ROWS: dict[Any, Row] = {}
BY_TYPE: dict[type, Callable[[Any, Any, Args, Kwargs], Any]] = {}
Tensor = torch.Tensor
Function = types.FunctionType


row = rows(ROWS, "row")  # what calling these functions or classes means


by_type = rows(BY_TYPE, "row")


def call(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """fn(*args, **kwargs)."""
    t = type(fn)
    if policy.SUBSTITUTED:
        fn = _substituted(fn)
        t = type(fn)
    found = BY_TYPE.get(t)
    if found is not None:
        return found(m, fn, args, kwargs)
    if issubclass(type(fn), type):
        return _call_class(m, fn, args, kwargs)
    if issubclass(type(fn), (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _record(m, fn, args, kwargs)
    return _call_object(m, fn, args, kwargs)


def _substituted(fn: Any) -> Any:
    try:
        return policy.SUBSTITUTED.get(fn, fn) if type(fn) in (types.BuiltinFunctionType, types.MethodDescriptorType, Function) else fn
    except TypeError:
        return fn


def _call_object(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """An instance whose class defines __call__."""
    t = type(fn)
    if t.__name__ == "Dispatcher" and t.__module__.endswith("_frame"):  # a compiled function: what it compiles is inlined
        return m.call(fn.function, args if fn.__self__ is None else [fn.__self__, *args], kwargs)
    if issubclass(type(fn), torch.nn.Module) and hasattr(t, "_torchsmith_settings"):
        return _call_module(m, m.world.wrap(fn._orig_mod, FixedObject(fn._orig_mod, "compiled module")), args, kwargs)
    f = find(m, t, "__call__")
    if f is _MODULE_CALL:
        at.class_guard(m, t, "__call__", f)
        return _call_module(m, fn, args, kwargs)
    if issubclass(t, torch._ops.HigherOrderOperator) and fn.name() in torch_rows.HIGHER_ORDER:
        return torch_rows.HIGHER_ORDER[fn.name()](m, args, kwargs)
    if t is typing.NewType:
        return args[0]
    if t is types.GenericAlias:  # list[int]() makes a list
        return m.call(fn.__origin__, args, kwargs)
    scripted = getattr(fn, "_torchdynamo_inline", None) if t is torch._C.ScriptFunction else None
    if scripted is not None:  # TorchScript of a Python function; others may wrap its __call__
        track = m.world.tracks.get(id(fn))
        if track is not None and not isinstance(track.source, FixedObject):
            m.world.guard(track.source, "identity", fn)
        return m.call(scripted, args, kwargs)
    if issubclass(type(f), Function):
        at.class_guard(m, t, "__call__", f)
        track = m.world.tracks.get(id(fn))
        if track is not None:
            m.world.use(track)
        return m.call(f, [fn, *args], kwargs)
    if t in (operator.itemgetter, operator.attrgetter, operator.methodcaller):
        return _getter(m, fn, args)
    if t is type(functools.cmp_to_key(max)):  # keeps what it is given
        return fn(*args, **kwargs)
    if f is MISSING:
        at.class_guard(m, t, "__call__", MISSING)
        raise Raised(TypeError(f"'{t.__name__}' object is not callable"))
    name = t.__dict__.get("__qualname__")  # of a function that Cython made, say
    said = f"{name.__get__(fn)}, a " if type(name) is types.GetSetDescriptorType else "a call of "
    raise Unsupported("CAP014", at=m.loc(), detail=f"{said}{t.__module__}.{t.__qualname__}")


def takes_numbers(fn: Any) -> bool:
    """Whether a call of `fn` is tensor code, or Python that may be looked into: what it does with a number can be captured."""
    t = type(fn)
    if t in (TensorMethod, types.MethodType) or issubclass(t, (torch.nn.Module, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if t is Function:
        return not _is_left_alone(fn)
    return issubclass(t, types.BuiltinFunctionType) and fn in policy.leaf_functions()


def _is_left_alone(fn: Any) -> bool:
    top = str(fn.__globals__.get("__name__", "")).partition(".")[0]
    return top in _REFUSED or top in _NATIVE_LIBRARIES or peers.is_disabled(fn)


def _asked(base: tuple[Any, ...]) -> Any:
    """What a getter of the operator module asks for, as a constant."""
    made, params = base[0].__reduce__()[:2]
    return (params, made.args, tuple(made.keywords.items())) if type(made) is functools.partial else params


def _getter(m: Machine, fn: Any, args: Args) -> Any:
    track = m.world.of(fn)
    if track is not None:
        m.world.use(track)
        asked = _asked((fn,))
        if is_constant(asked):
            m.world.guard(PartOf(track.source, "asked", _asked), "equals", asked)
        else:
            m.world.guard(track.source, "identity", fn)
    made, params = fn.__reduce__()[:2]
    if type(fn) is operator.itemgetter:
        out = tuple(pr.getitem(m, args[0], k) for k in params)
        return out if len(params) > 1 else out[0]
    if type(fn) is operator.attrgetter:
        found = []
        for path in params:
            value = args[0]
            for name in path.split("."):
                value = at.load_attr(m, value, name)
            found.append(value)
        return tuple(found) if len(params) > 1 else found[0]
    kwargs: Kwargs = {}
    if type(made) is functools.partial:  # a methodcaller with keywords
        params, kwargs = (*made.args, *params), made.keywords
    return m.call(at.load_attr(m, args[0], params[0]), list(params[1:]), dict(kwargs))


# ---------------------------------------------------------------- nn.Module

_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_MODULE_GLOBALS = torch.nn.modules.module.__dict__
_MODULE_CALL = torch.nn.Module.__call__  # torch's own, whatever a program puts there later
_GLOBAL_HOOKS = ("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_hooks", "_global_forward_pre_hooks")


def _call_module(m: Machine, module: Any, args: Args, kwargs: Kwargs) -> Any:
    """nn.Module.__call__: forward at once where there are no hooks, else all of _call_impl."""
    track = m.world.tracks.get(id(module))
    if track is None:
        return m.inline(torch.nn.Module._call_impl, [module, *args], kwargs)
    if module.__dict__.get("_modules"):
        return m.stamps.call(track, module, args, kwargs, lambda: _interpret_module(m, module, track, args, kwargs))
    return _interpret_module(m, module, track, args, kwargs)


def _interpret_module(m: Machine, module: Any, track: Any, args: Args, kwargs: Kwargs) -> Any:
    d = module.__dict__
    m.world.use(track)
    if d.get("_compiled_call_impl") is not None:
        return m.call(at.load_attr(m, module, "_compiled_call_impl"), args, kwargs)
    hooked = any(_MODULE_GLOBALS[n] for n in _GLOBAL_HOOKS) or (track.attrs and any(h in track.attrs for h in _HOOKS))
    for name in _HOOKS:
        hooks = d[name]
        inner = m.world.tracks.get(id(hooks))
        if hooks or (inner is not None and inner.dirty):
            hooked = True
        elif not hooked:
            m.world.guard(Attr(track.source, name, "instance"), "length", 0)
    if not m.global_hooks_guarded:
        m.global_hooks_guarded = True
        for name in _GLOBAL_HOOKS:
            m.world.guard(FixedObject(_MODULE_GLOBALS[name], name), "length", len(_MODULE_GLOBALS[name]))
    if hooked:
        if d["_backward_hooks"] or d["_backward_pre_hooks"]:
            raise Unsupported("CAP026", at=m.loc(), detail="backward hooks of a module")
        return m.inline(torch.nn.Module._call_impl, [module, *args], kwargs)
    return m.call(at.load_attr(m, module, "forward"), args, kwargs)


# ---------------------------------------------------------------- functions


def _record(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    theirs = sys.modules.get("torch._dynamo.trace_rules")
    if theirs is not None and id(fn) in (theirs._disallowed_callable_ids.function_ids or ()):
        raise Unsupported("CAP018", at=m.loc(), detail=f"{getattr(fn, '__name__', fn)}, which disallow_in_graph names")
    args = [m.index_key(a) for a in args] if m.world.tracks else args
    kwargs = {k: m.index_key(v) for k, v in kwargs.items()} if kwargs else kwargs
    return m.record("function", fn, tuple(args), kwargs)


def has_row(fn: types.FunctionType) -> bool:
    """Is a call of this Python function answered by a row instead of by looking into it?"""
    name = (str(fn.__globals__.get("__name__", "")), fn.__name__)
    return fn in ROWS or fn in torch_rows.ROWS or fn in policy.leaf_functions() or name in torch_rows.BY_NAME or fn.__code__ in torch_rows.BY_CODE


@by_type(types.FunctionType)
def _call_function(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    found = ROWS.get(fn) or torch_rows.ROWS.get(fn)
    if found is not None:
        return found(m, args, kwargs)
    name = policy.leaf_functions().get(fn)
    if (m.modes or m.subclasses) and name is not None and overrides.is_active(m, args, kwargs):
        name = None  # its own code asks for handlers
    if name is not None and _is_recordable(args) and _is_recordable(kwargs.values()):
        return _record(m, fn, args, kwargs)
    if policy.is_of_machine(fn):
        return fn(*args, **kwargs)
    if args and issubclass(type(args[0]), Tensor):
        name = policy.tensor_functions().get(fn)
        if name is not None:
            return tensor_methods.call_method(m, args[0], name, args[1:], kwargs)
    if peers.is_marked(fn):
        own = fn.__dict__.get("_torchdynamo_orig_callable")
        if not peers.is_disabled(fn):
            return m.call(m.attr(fn, "_torchdynamo_orig_callable"), args, kwargs)
        if isinstance(own, types.FunctionType) and policy.skips_itself_alone(fn.__code__):
            policy.SKIPPED.add(own.__code__)
        raise Unsupported("CAP018", at=m.loc(), detail=_disabled(fn))
    if fn.__dict__ and fn.__dict__.get("_dynamo_marked_constant"):
        return m.native(fn, args, kwargs, plain=True)  # its author declares the result constant
    module = str(fn.__globals__.get("__name__", ""))
    if module == "torch._dynamo.eval_frame" and "_torchdynamo_orig_callable" in fn.__dict__ and "_torchdynamo_disable" not in fn.__dict__:
        return m.call(m.attr(fn, "_torchdynamo_orig_callable"), args, kwargs)  # torch.compile(f) inside is f
    found = torch_rows.BY_NAME.get((module, fn.__name__))
    if found is not None:
        return found(m, args, kwargs)
    by_code = torch_rows.BY_CODE.get(fn.__code__)
    if by_code is not None:
        return by_code(m, fn, args, kwargs)
    if module == "torch._compile" and hasattr(fn, "__wrapped__"):  # torch's lazy `disable` around a function of its own
        return m.call(fn.__wrapped__, args, kwargs)
    top = module.partition(".")[0]
    if is_allowed(fn):
        return _record_allowed(m, fn, args, kwargs)
    if top == "torchsmith" or fn.__dict__:
        out = _own_api(m, fn, args, kwargs)
        if out is not MISSING:
            return out
    refused = _REFUSED.get(top)
    if refused is not None:
        raise Unsupported(refused, at=m.loc(), detail=f"{fn.__module__}.{fn.__qualname__}")
    if top == "numpy":
        return arrays.call(m, fn, args, kwargs)
    if top in _NATIVE_LIBRARIES and fn.__name__ not in ("__setattr__", "__delattr__") and not any(_has_attributes_outside(m, a) for a in (*args, *kwargs.values())):
        return m.native(fn, args, kwargs)
    return m.inline(fn, args, kwargs)


def _has_attributes_outside(m: Machine, value: Any) -> bool:
    """Is this an object from outside of a class in Python, of whose attributes guards must tell?"""
    t = type(value)
    if not t.__flags__ & 0x200 or t in UNCHANGING or issubclass(t, (*PINNED_TYPES, Tensor)) or container_base(t) is not None:
        return False
    return id(value) in m.world.tracks and type(getattr(value, "__dict__", None)) is dict


def is_allowed(fn: Any) -> bool:
    """Did the user say that a call of this function is a node of the graph, whatever stands in it? (PyTorch keeps its own list.)"""
    ours = sys.modules.get("torchsmith.compiler")
    theirs = sys.modules.get("torch._dynamo.trace_rules")
    return (ours is not None and fn in ours.ALLOWED) or (theirs is not None and id(fn) in (theirs._allowed_callable_ids.function_ids or ()))


def _record_allowed(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """The function's own code asks for the truth of tensors: no answer is guessed, unlike those that torch's checks want."""
    facts = m.recorder.facts
    before, facts.guesses = facts.guesses, False
    try:
        args, kwargs = [m.index_key(a) for a in args], {k: m.index_key(v) for k, v in kwargs.items()}
        return _record(m, *tensors.with_containers(m, fn, args, kwargs))
    except Unsupported as why:
        if why.code != "CAP024":
            raise
        return m.inline(fn, args, kwargs)  # what a node cannot hold (an object of a dataclass) is taken apart inside
    finally:
        facts.guesses = before


def _disabled(fn: Any) -> str:
    """Who is marked, and where it stands."""
    own = fn.__dict__.get("_torchdynamo_orig_callable") or getattr(fn, "__wrapped__", None) or fn
    code = getattr(own, "__code__", None)
    reason = fn.__dict__.get("_torchsmith_reason") or fn.__dict__.get("_torchdynamo_disable_msg")
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None and code is not torch.nn.Module.__call__.__code__ else ""
    return f"{fn.__qualname__ if own is not fn else getattr(own, '__qualname__', own)} is marked with compiler.disable{where}" + (f": {reason}" if reason else "")


def _own_api(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """torchsmith.compiler's marks on functions, and its own predicates."""
    if fn.__dict__.get("_torchsmith_constant"):
        return m.native(fn, args, kwargs, plain=True)
    if fn is attempts.set_error_mode:
        before, m.error_mode = m.error_mode, m.truth(args[0])
        m.effects.append((fn, args, kwargs))
        return before
    front, compiler = sys.modules.get("torchsmith.api"), sys.modules.get("torchsmith.compiler")
    if front is not None and fn is front.compile:
        return torch_rows.compiled_inside(m, args, kwargs)
    if compiler is None or fn.__globals__ is not compiler.__dict__:
        return MISSING
    if fn.__name__ in ("is_compiling", "is_dynamo_compiling"):
        return True
    if fn.__name__ == "is_exporting":
        return m.is_whole
    if fn.__name__ == "graph_break":
        raise Unsupported("CAP018", at=m.loc(), detail="graph_break(" + ", ".join(map(repr, (*args, *kwargs.values()))) + ")")
    return MISSING


def _is_recordable(values: Any) -> bool:
    """Whether a graph node can hold these arguments (a function that is given others is inlined)."""
    for v in values:
        t = type(v)
        if t in SCALARS or issubclass(type(v), Tensor) or t in _RECORDABLE:
            continue
        if t in (list, tuple):
            if not _is_recordable(v):
                return False
        elif (
            t is Function
            or issubclass(type(v), torch.nn.Module)
            or (t.__flags__ & 0x200 and not issubclass(type(v), (int, float, str, tuple)))
        ):
            return False
    return True


_RECORDABLE = frozenset(
    {torch.dtype, torch.device, torch.Size, torch.SymInt, torch.SymFloat, dict, slice, torch.layout, torch.memory_format}
)


# Python libraries that are entered, not inlined, or not at all.
_REFUSED = {"random": "CAP016", "time": "CAP016", "datetime": "CAP016", "os": "CAP016", "io": "CAP016", "threading": "CAP014",
            "subprocess": "CAP016", "socket": "CAP016", "asyncio": "CAP002", "multiprocessing": "CAP016", "pickle": "CAP016",
            "shutil": "CAP016", "tempfile": "CAP016", "pdb": "CAP016", "traceback": "CAP014"}  # fmt: skip
_NATIVE_LIBRARIES = frozenset({"re", "inspect", "numpy", "textwrap", "string", "json", "fractions", "decimal", "statistics", "enum", "typing",
                               "ast", "tokenize", "linecache", "importlib"})  # fmt: skip


@by_type(types.MethodType)
def _call_method(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    track = m.world.tracks.get(id(fn))
    if track is not None:
        func, self = at.load_attr(m, fn, "__func__"), at.load_attr(m, fn, "__self__")
        return m.call(func, [self, *args], kwargs)
    return m.call(fn.__func__, [fn.__self__, *args], kwargs)


@by_type(TensorMethod)
def _call_tensor_method(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    return tensor_methods.call_method(m, fn.__self__, fn.__name__, args, kwargs)


@by_type(arrays.ArrayMethod)
def _call_array_method(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    return arrays.method(m, fn.__self__, fn.__name__, args, kwargs)


@by_type(np.ufunc, arrays.FUNCTION_TYPE)
def _call_numpy(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    return arrays.call(m, fn, args, kwargs)


@by_type(functools.partial)
def _call_partial(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    func, first, keywords = (at.load_attr(m, fn, n) for n in ("func", "args", "keywords"))
    return m.call(func, [*first, *args], {**m.mapped(keywords), **kwargs})


@by_type(functools._lru_cache_wrapper)
def _call_cached(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function that keeps its results. The cache of one that was made inside is at work; one from outside is looked into once for the
    same arguments, and where its result can be changed it is the cache's own, asked for in each call."""
    if id(fn) in m.world.fresh_pinned:
        return m.native(fn, [m.with_numbers(a) for a in args], {k: m.with_numbers(v) for k, v in kwargs.items()})
    if getattr(fn.__wrapped__, "_dynamo_marked_constant", False):
        return m.native(fn, args, kwargs, plain=True)
    if fn in _COUNTED and m.splits:
        raise Unsupported("CAP016", at=m.loc(), detail=f"{getattr(fn, '__name__', fn)}, a cached function whose calls are counted")
    told = [
        (type(a), a if type(a) in SCALARS else id(a.node.expr if type(a) in SymTypes else m.world.canonical(a)))
        for a in (*args, *kwargs.values())
    ]
    key = (fn, *told, *kwargs)
    if key not in m.cached:
        m.cached[key] = _first_of_cached(m, fn, args, kwargs), args
    return m.cached[key][0]


def _first_of_cached(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    before, changed, nodes = len(m.effects), m.changes(), len(m.recorder.graph.nodes)
    out = m.call(fn.__wrapped__, args, kwargs)
    if changed != m.changes():  # replaying its changes would not fill the cache: they would happen in every call
        raise Unsupported("CAP012", at=m.loc(), detail=f"{fn.__wrapped__.__name__}, a cached function, changes Python objects")
    if len(m.effects) > before:  # a message shown once: by the cache itself
        del m.effects[before:]
        m.effects.append((fn, args, kwargs))
        return out
    plain = not kwargs and not m.is_whole and not m.modes and all(type(a) in SCALARS for a in args)
    if not plain or is_constant(out) or type(out) in SymTypes or issubclass(type(out), PINNED_TYPES):
        return out
    with arrays.really():
        state = torch.get_rng_state()
        kept = fn(*args)
        if not torch.equal(state, torch.get_rng_state()):  # before what the graph draws
            raise Unsupported("CAP016", at=m.loc(), detail=f"{fn.__wrapped__.__name__}, a cached function, draws random numbers")
    for node in reversed(list(m.recorder.graph.nodes)[nodes:]):
        if node.op != "placeholder" and not node.users:
            m.recorder.graph.erase_node(node)
    return m.world.wrap(kept, Computed(fn, tuple(args), ()))


@row(functools._lru_cache_wrapper)
def _cached_inside(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.made(m.native(functools._lru_cache_wrapper, [m.callback(args[0]), *args[1:]], kwargs, plain=True))


# ---------------------------------------------------------------- C functions


@by_type(types.BuiltinFunctionType)
def _call_builtin(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    found = ROWS.get(fn) or torch_rows.ROWS.get(fn)
    if found is not None:
        return found(m, args, kwargs)
    if fn in policy.leaf_functions():
        return _record(m, fn, args, kwargs)
    self = fn.__self__
    if self is None or issubclass(type(self), types.ModuleType):
        return _call_c_function(m, fn, args, kwargs)
    if is_binding(fn):  # C++ code: it may do anything
        if fn.__name__ in policy.PURE_BINDINGS:
            return m.native(fn, args, kwargs)
        owner = f"{type(args[0]).__name__}." if args and type(args[0]).__module__ == fn.__module__ else ""
        raise Unsupported("CAP014", at=m.loc(), detail=f"{fn.__module__}.{owner}{fn.__name__}")
    if issubclass(type(self), Tensor):
        return tensor_methods.call_method(m, self, fn.__name__, args, kwargs)
    if issubclass(type(self), type):
        return _call_class_builtin(m, fn, self, args, kwargs)
    return _call_bound(m, self, fn.__name__, fn, args, kwargs)


BY_TYPE[type(re.compile("").match)] = _call_builtin  # methods in C that know their class have a type of their own


def _substituting(fn: Any) -> Row:
    """A replacement that is a function of Python is interpreted."""

    def run(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        args = [_replacement(m, a) if k == 1 else a for k, a in enumerate(args)]
        return m.native(fn, args, {k: _replacement(m, v) if k == "repl" else v for k, v in kwargs.items()})

    return run


for _fn in (re.sub, re.subn):
    row(_fn)(_substituting(_fn))


def _replacement(m: Machine, repl: Any) -> Any:
    return repl if type(repl) in SCALARS else m.callback(repl)


_STATIC = frozenset({str.maketrans, bytes.maketrans, bytearray.maketrans})  # methods that know neither class nor module


def _call_c_function(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    module = str(getattr(fn, "__module__", None) or getattr(fn.__self__, "__name__", "")).partition(".")[0]
    if fn in _STATIC:
        return m.native(fn, args, kwargs)
    if module == "numpy":
        return arrays.call(m, fn, args, kwargs)
    if module in policy.PURE_MODULES and not (module == "builtins" and fn.__name__ in policy.IMPURE_BUILTINS):
        if module == "math" and (any(map(floats.varies, args)) or (fn in floats.BY_PYTHON and any(type(a) is torch.SymFloat for a in args))):
            return floats.apply(m, fn, args, kwargs)
        return m.native(fn, args, kwargs)
    if module in ("time", "_random", "_io", "posix", "_thread", "_datetime", "select", "_socket"):
        raise Unsupported("CAP016", at=m.loc(), detail=f"{module}.{fn.__name__}")
    if fn.__name__ in policy.IMPURE_BUILTINS:
        raise Unsupported("CAP016", at=m.loc(), detail=fn.__name__)
    raise Unsupported("CAP014", at=m.loc(), detail=f"{module}.{fn.__name__}")


def _call_class_builtin(m: Machine, fn: Any, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """dict.fromkeys, int.from_bytes, object.__new__ ..."""
    if fn.__name__ == "__new__":
        return _new(m, args[0] if args else cls, cls, args[1:], kwargs)
    found = ROWS.get(at.find(m, cls, fn.__name__))
    if found is not None:
        return found(m, [cls, *args], kwargs)
    if cls is dict or issubclass(cls, dict):
        args = [m.listed(args[0]), *args[1:]] if fn.__name__ == "fromkeys" else args
    if cls.__module__.partition(".")[0] == "torch" and fn not in policy.leaf_functions():
        raise Unsupported("CAP014", at=m.loc(), detail=f"{cls.__qualname__}.{fn.__name__}")
    module = cls.__module__.partition(".")[0]
    if module not in policy.PURE_MODULES and not is_python_class(cls) and module != "torch":
        raise Unsupported("CAP016" if module == "datetime" else "CAP014", at=m.loc(), detail=f"{module}.{cls.__qualname__}.{fn.__name__}")
    return m.native(fn, args, kwargs)


def _new(m: Machine, cls: Any, owner: type, args: Args, kwargs: Kwargs) -> Any:
    """owner.__new__(cls, ...) of a C base."""
    if issubclass(cls, Tensor):
        return _tensor_of_class(m, cls, args, kwargs)
    if owner is object:
        if (args or kwargs) and at.is_users(m, cls, "__new__"):
            raise Raised(TypeError("object.__new__() takes exactly one argument (the type to instantiate)"))
        if (args or kwargs) and find(m, cls, "__init__") is object.__init__:
            raise Raised(TypeError(f"{cls.__name__}() takes no arguments"))
        return m.native(object.__new__, [cls], {}, plain=True)
    if owner is tuple and args:
        args = [pr.iterate(m, args[0])]
    return m.native(owner.__new__, [cls, *args], kwargs)


_ITERABLE_FIRST = frozenset({"extend", "update", "union", "intersection", "difference", "issubset", "issuperset", "isdisjoint", "join",
                             "symmetric_difference", "symmetric_difference_update", "extendleft", "difference_update", "intersection_update", "__ior__", "__iadd__"})  # fmt: skip
_STORING = frozenset({"append", "insert", "add", "__setitem__", "setdefault", "appendleft"})


def _call_bound(m: Machine, self: Any, name: str, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A C method of a container, string, iterator ..."""
    t = type(self)
    track = m.world.tracks.get(id(self))
    if t is types.ModuleType:
        return _call_c_function(m, fn, args, kwargs)
    special_row = _METHOD_ROWS.get(name)
    if special_row is not None:
        out = special_row(m, self, t, track, args, kwargs)
        if out is not MISSING:
            return out
    if name == "__hash__" and getattr(fn, "__objclass__", None) is object and (track is not None or m.world.has_own_address(self)):
        raise Unsupported("CAP011", at=m.loc(), detail=f"the address of a {t.__name__}")
    if track is not None:
        if not container_base(t) and track.image is None:
            if t is types.MappingProxyType or t is frozenset:
                pass
            elif name in _IDENTITY_METHODS:
                return m.native(getattr(self, name), args, kwargs, plain=True)
            else:
                code = _REFUSED.get(t.__module__.partition(".")[0].lstrip("_"), "CAP011")  # the generator of random numbers, an open file
                raise Unsupported(code, at=m.loc(), detail=f"{t.__name__}.{name} of {track.source}")
        if name == "__setitem__" and len(args) == 2 and issubclass(t, list):
            return pr.setitem(m, self, *args)
        if name == "append" and t is list and len(args) == 1 and not kwargs:
            return m.world.append(track, args[0])
        if name in ("get", "__getitem__", "__contains__") and track.image is None and args and m.is_key(args[0]):
            return _single_read(m, self, name, args)
        if name in policy.MUTATING and m.is_namespace(track):
            raise Unsupported("CAP012", at=m.loc(), detail=f"{name}() of a module's globals")
        if name in ("copy", "__copy__", "__or__", "__ror__", "__add__", "__mul__", "__rmul__"):
            pr.no_copy_of_class(m, self)
        body = m.world.change(track) if name in policy.MUTATING else m.world.image(track)
        fn = getattr(body, name)
        if name == "copy" and type(body) in CONTAINERS:
            return fn()
        if name == "__iter__":
            return iter(body)
        self = body
    if t is re.Pattern and name in ("sub", "subn") and args:
        args = [_replacement(m, args[0]), *args[1:]]
    if name == "update" and issubclass(type(self), dict) and args and not issubclass(type(args[0]), dict) and hasattr(type(args[0]), "keys"):
        args = [m.mapped(args[0]), *args[1:]]
    if name in _ITERABLE_FIRST and args and not issubclass(type(self), (str, bytes)):
        given = pr.as_list if name == "extend" and issubclass(type(self), list) else pr.snapshot
        args = [a if issubclass(type(a), (dict, set, frozenset)) or type(a) in SCALARS else given(m, a) for a in args]
        if (
            name == "update"
            and issubclass(type(self), dict)
            and args
            and not issubclass(type(args[0]), dict)
            and hasattr(args[0], "__next__")
        ):
            args = [list(map(tuple, map(m.listed, args[0])))]
    elif name == "join" and args and type(args[0]) not in SCALARS:
        args = [pr.as_list(m, pr.begin(m, args[0]))]
    elif name == "__setitem__" and len(args) == 2 and type(args[0]) is slice and issubclass(t, list):
        args = [args[0], m.listed(args[1])]
    elif name == "format" and issubclass(type(self), str) and not all(map(_is_plain_text, (*args, *kwargs.values()))):
        return _formatted(m, self, args, kwargs)
    elif name == "sort" and "key" in kwargs:
        kwargs = {**kwargs, "key": m.callback(kwargs["key"])}
    if t in (int, float, bool, complex):
        args = [m.with_numbers(a) for a in args]
    if issubclass(type(self), Iterator) or t in _SAFE_SELF:
        return m.native(fn, args, kwargs, store=name in _STORING)
    if name in ("__reduce_ex__", "__reduce__", "__sizeof__"):
        raise Unsupported("CAP014", at=m.loc(), detail=f"{t.__name__}.{name}")
    if name == "numel" and t is torch.Size:
        return functools.reduce(lambda a, b: m.symbolic(operator.mul, a, b), self, 1)
    if (
        issubclass(type(self), (dict, list, set, frozenset, tuple, str, bytes, int, float, BaseException))
        or t.__module__ in policy.PURE_MODULES
    ):
        return m.native(fn, args, kwargs, store=name in _STORING)
    if t.__module__.startswith("torch"):
        if t is torch.device and name in ("__enter__", "__exit__"):
            return overrides.default_device(m, self, name)
        if t in _TORCH_VALUES and (name in _IDENTITY_METHODS or t is not torch.device):
            return m.native(fn, args, kwargs)
        raise Unsupported("CAP014", at=m.loc(), detail=f"{t.__module__}.{t.__name__}.{name}")
    if name in _IDENTITY_METHODS or _is_plain_owner(t, name) or t in UNCHANGING:
        return m.native(fn, args, kwargs)
    raise Unsupported("CAP014", at=m.loc(), detail=f"{t.__module__}.{t.__name__}.{name}")


def _is_plain_owner(t: type, name: str) -> bool:
    """Whether a C method that an instance of a Python class inherits is of a class that does nothing but hold values."""
    owner = next((cls for cls in t.__mro__ if name in vars(cls)), None)
    return owner is not None and owner.__module__ in policy.PURE_MODULES


_TORCH_VALUES = (torch.Size, torch.dtype, torch.device, torch.finfo, torch.iinfo)
_IDENTITY_METHODS = frozenset({"__hash__", "__eq__", "__ne__", "__init_subclass__", "__subclasshook__"})


@row(weakref.ref)
def _weakref(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if args[1:] not in ([], [None]):
        raise Unsupported("CAP014", at=m.loc(), detail="a weak reference that calls back")
    return m.native(weakref.ref, args[:1], kwargs, plain=True)


@row(weakref.proxy)
def _proxy(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    raise Unsupported("CAP014", at=m.loc(), detail="a weak proxy, which looks attributes up in its own way")


@by_type(weakref.ref)
def _call_weakref(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    track = m.world.of(fn)
    target = fn()
    if track is None:
        return target
    m.world.use(track)
    return m.world.wrap(target, Attr(track.source, "referent", "referent"))


_SAFE_SELF = (
    CONTAINERS | SCALARS | {tuple, frozenset, range, slice, type({}.keys()), type({}.values()), type({}.items()), bytearray, memoryview, re.Match}
)


def _is_plain_text(value: Any) -> bool:
    return type(value) in SCALARS or type(value) in (list, tuple, dict)


def _formatted(m: Machine, text: str, args: Args, kwargs: Kwargs) -> str:
    """str.format, field by field: attributes, items, conversions and format specifications are the program's own."""
    return _fields(m, text, args, kwargs, 0, False)[0]


def _fields(m: Machine, text: str, args: Args, kwargs: Kwargs, number: int, numbered: bool) -> tuple[str, int, bool]:
    """The text with its fields filled; the number of the next field without a name, and whether a field had a number."""
    out = []
    for literal, field, spec, how in string.Formatter().parse(text):
        out.append(literal)
        if field is None:
            continue
        name = re.match(r"[^.\[]*", field)[0]  # type: ignore[index]
        first: Any = int(name) if name.isdigit() else name
        if (name.isdigit() and number > 0) or (not name and numbered):
            ways = ("manual field specification", "automatic field numbering")
            raise Raised(ValueError("cannot switch from {} to {}".format(*ways[:: -1 if name else 1])))
        if not name:
            first, number = number, number + 1
        numbered = numbered or name.isdigit()
        if first not in (range(len(args)) if type(first) is int else kwargs):  # its error is CPython's
            return str(m.native(str.format, [text, *(None for _ in args)], dict.fromkeys(kwargs))), number, numbered
        value = args[first] if type(first) is int else kwargs[first]
        for attribute, key in re.findall(r"\.([^.\[]+)|\[([^\]]+)\]", field[len(name) :]):
            value = at.load_attr(m, value, attribute) if attribute else pr.getitem(m, value, int(key) if key.isdigit() else key)
        if how:
            value = pr.to_str(m, value, "__str__" if how == "s" else "__repr__")
            value = value.encode("ascii", "backslashreplace").decode() if how == "a" else value
        if spec and "{" in spec:
            spec, number, numbered = _fields(m, spec, args, kwargs, number, numbered)
        out.append(pr.to_str(m, value, "__format__", spec or ""))
    return "".join(out), number, numbered


def _single_read(m: Machine, self: Any, name: str, args: Args) -> Any:
    key, track = args[0], m.world.of(self)
    assert track is not None
    if name == "__getitem__":
        return pr._item_outside(m, track, key)
    if name == "get" and not issubclass(type(self), dict):
        return m.native(m.world.image(track).get, args, {})
    if not issubclass(type(self), dict):
        return pr.contains(m, m.world.image(track), key)
    value = pr._read_key(m, track, key)
    if name == "__contains__":
        return value is not MISSING
    return value if value is not MISSING else (args[1] if len(args) > 1 else None)


_METHOD_ROWS: dict[str, Callable[..., Any]] = {}


def _inits_as_object(t: type) -> bool:
    """Is object.__init__ the first one in C?"""
    inits = (vars(base)["__init__"] for base in t.__mro__ if "__init__" in vars(base))
    return next(f for f in inits if not issubclass(type(f), Function)) is object.__init__


def _items(m: Machine, given: Any) -> Any:
    """What a dictionary is filled with."""
    if issubclass(type(given), dict) and m.world.of(given) is None:
        return given
    return m.mapped(given) if hasattr(given, "keys") else m.listed(given)


def _row_init(m: Machine, self: Any, t: type, track: Any, args: Args, kwargs: Kwargs) -> Any:
    """object.__init__ and the like: nothing to do."""
    owner = find(m, t, "__init__")
    if (args or kwargs) and _inits_as_object(t):
        if owner is not object.__init__ or find(m, t, "__new__") is object.__new__:
            name = "object" if owner is not object.__init__ else t.__name__
            raise Raised(TypeError(f"{name}.__init__() takes exactly one argument (the instance to initialize)"))
    if owner is object.__init__ or not issubclass(type(self), (dict, list, set, deque, BaseException, super)):
        return None
    if issubclass(type(self), dict) and args:
        k = int(issubclass(type(self), defaultdict))  # the factory comes first
        if len(args) == k + 1 and (not k or args[0] is None or callable(args[0])):  # else Python refuses them unseen
            args = [*args[:k], _items(m, args[k])]
    elif issubclass(type(self), (list, set, deque)) and args:
        args = [pr.filling(m, args[0]), *args[1:]] if issubclass(type(self), set) else [m.listed(args[0]), *args[1:]]
    base: Any = next(b for b in (*_C_BASES, BaseException) if issubclass(t, b))
    if track is not None and container_base(t):
        if issubclass(t, (deque, defaultdict)):  # it may have another length or factory from now on
            raise Unsupported("CAP012", at=m.loc(), detail=f"__init__ of a {t.__name__} from outside")
        self = m.world.change(track)
    return m.native(base.__init__, [self, *args], kwargs)


def _c_bases() -> tuple[type, ...]:
    return (OrderedDict, defaultdict, dict, list, set, deque)


_C_BASES = _c_bases()
_METHOD_ROWS["__init__"] = _row_init


def _row_setattr(m: Machine, self: Any, t: type, track: Any, args: Args, kwargs: Kwargs) -> Any:
    at.default_setattr(m, self, t, args[0], args[1])
    return None


def _row_getattribute(m: Machine, self: Any, t: type, track: Any, args: Args, kwargs: Kwargs) -> Any:
    return at.default_getattribute(m, self, t, args[0], fallback=False)


def _row_delattr(m: Machine, self: Any, t: type, track: Any, args: Args, kwargs: Kwargs) -> Any:
    at.default_delattr(m, self, t, args[0])
    return None


_COUNTED: weakref.WeakSet[Any] = weakref.WeakSet()  # cached functions from outside whose counts a program looks at


def _row_cache_info(m: Machine, self: Any, t: type, track: Any, args: Args, kwargs: Kwargs) -> Any:
    """Python calls a cached function whose calls are counted: compiled ones would not be."""
    if t is functools._lru_cache_wrapper and id(self) not in m.world.fresh_pinned:
        _COUNTED.add(self)
        if any(key[0] is self for key in m.cached):
            raise Unsupported("CAP027", at=m.loc(), detail=f"{getattr(self, '__name__', self)}.cache_info() beside its calls")
    return MISSING


_METHOD_ROWS["cache_info"] = _row_cache_info
_METHOD_ROWS["__setattr__"] = _row_setattr
_METHOD_ROWS["__getattribute__"] = _row_getattribute
_METHOD_ROWS["__delattr__"] = _row_delattr


@by_type(types.MethodWrapperType)
def _call_method_wrapper(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    self = fn.__self__
    if issubclass(type(self), Tensor):
        return tensor_methods.call_method(m, self, fn.__name__, args, kwargs)
    if issubclass(type(self), (Function, types.MethodType)) and fn.__name__ in ("__call__", "__get__"):
        if fn.__name__ == "__call__":
            return m.call(self, args, kwargs)
        return m.native(fn, args, kwargs, plain=True)
    if issubclass(type(self), type) and fn.__name__ == "__call__":
        if issubclass(type(find(m, type(self), "__call__")), Function):  # super().__call__ of a metaclass
            return _instantiate(m, self, args, kwargs)
        return m.call(self, args, kwargs)
    if issubclass(type(self), types.GetSetDescriptorType) and fn.__name__ == "__get__" and args and issubclass(type(args[0]), Tensor):
        return m.tensor_attr(args[0], self.__name__)
    return _call_bound(m, self, fn.__name__, fn, args, kwargs)


@by_type(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
def _call_descriptor(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """An unbound C method: list.append(l, x), object.__setattr__(o, n, v), torch.Tensor.add(x, y)."""
    found = ROWS.get(fn) or torch_rows.ROWS.get(fn)
    if found is not None:
        return found(m, args, kwargs)
    if not args:
        return m.native(fn, args, kwargs)
    self = args[0]
    if issubclass(type(self), Tensor):
        return tensor_methods.call_method(m, self, fn.__name__, args[1:], kwargs)
    if type(self) is arrays.ArrayValue:
        return arrays.method(m, self, fn.__name__, args[1:], kwargs)
    if fn.__objclass__ is type and fn.__name__ == "__call__":
        return _instantiate(m, self, args[1:], kwargs)
    if fn.__objclass__ is torch._C.TensorBase:
        return m.record("function", fn, tuple(args), kwargs)
    try:
        bound = fn.__get__(self, type(self))
    except TypeError as e:
        raise Raised(e) from None
    return _call_bound(m, self, fn.__name__, bound, args[1:], kwargs)


# ---------------------------------------------------------------- classes


def is_python_class(cls: Any) -> bool:
    """Whether making an instance runs Python code."""
    return issubclass(type(cls), type) and bool(cls.__flags__ & 0x200)


def _call_class(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Any:
    found = ROWS.get(cls) or torch_rows.ROWS.get(cls)
    if found is not None:
        return found(m, args, kwargs)
    meta = type(cls)
    if meta is not type:
        own = find(m, meta, "__call__")
        if issubclass(type(own), type):  # no method: typing.TypedDict's makes a plain dictionary
            return m.call(own, args, kwargs)
        if issubclass(type(own), Function):
            if policy.is_trusted(meta.__module__) and meta.__module__ in ("enum",):
                made = m.native(cls, args, kwargs)
                return m.made(made) if issubclass(type(made), type) else made
            if not meta.__module__.startswith(("torch", "abc")):
                return m.call(own, [cls, *args], kwargs)
            if issubclass(cls, torch.nn.Parameter):
                raise Unsupported("CAP021", at=m.loc(), detail="a Parameter made during capture")
    return _instantiate(m, cls, args, kwargs)


BY_TYPE[type] = _call_class


def _instantiate(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """type.__call__: __new__, then __init__."""
    if issubclass(cls, torch.UntypedStorage):
        raise Unsupported("CAP021", at=m.loc(), detail=cls.__name__)
    new, init = find(m, cls, "__new__"), find(m, cls, "__init__")
    raw_new = new.__func__ if issubclass(type(new), staticmethod) else new
    if find(m, cls, "__del__") is not MISSING:
        raise Unsupported("CAP014", at=m.loc(), detail=f"making a {cls.__qualname__}, which has a __del__")
    if not is_python_class(cls) and not (issubclass(cls, type) and raw_new in ROWS):
        return _instantiate_c(m, cls, args, kwargs)
    at.class_guard(m, cls, "__new__", new)
    if issubclass(type(raw_new), Function):
        obj = m.call(raw_new, [cls, *args], kwargs)
    elif raw_new is object.__new__:
        if (args or kwargs) and init is object.__init__:
            raise Raised(TypeError(f"{cls.__name__}() takes no arguments"))
        obj = m.native(object.__new__, [cls], {}, plain=True)
    else:
        obj = _c_new(m, cls, raw_new, args, kwargs)
    made = m.recorder.info(obj).cls if issubclass(type(obj), Tensor) else type(obj)
    if cls in made.__mro__:
        if made is not cls:  # `__new__` may make an object of a class that extends this one: its own __init__ is called
            init = find(m, made, "__init__")
        at.class_guard(m, made, "__init__", init)
        if issubclass(type(init), Function):
            said = m.call(init, [obj, *args], kwargs)
            if said is not None:
                raise Raised(TypeError(f"__init__() should return None, not '{type(said).__name__}'"))
        elif init is not object.__init__ and issubclass(type(obj), (dict, list, set)):
            _row_init(m, obj, cls, None, args, kwargs)
    return obj


def _tensor_of_class(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """Tensor.__new__(cls, tensor): the same memory as an instance of a subclass."""
    if kwargs or len(args) != 1 or not issubclass(type(args[0]), Tensor) or not overrides.is_subclass(cls):
        raise Unsupported("CAP021", at=m.loc(), detail=cls.__name__)
    return overrides.cast(m, args[0], cls)


def _c_new(m: Machine, cls: type, new: Any, args: Args, kwargs: Kwargs) -> Any:
    if issubclass(cls, Tensor):
        return _tensor_of_class(m, cls, args, kwargs)
    if issubclass(cls, type) and new in ROWS:
        return ROWS[new](m, [cls, *args], kwargs)
    if issubclass(cls, BaseExceptionGroup):  # it takes the exceptions out of what it is given
        args = [m.listed(a) if container_base(type(a)) is list else a for a in args]
    if issubclass(cls, BaseException):
        return m.native(lambda: cls.__new__(cls, *args), [], {}, plain=True)
    if issubclass(cls, (dict, list, set, torch.autograd.Function)):
        return m.native(new, [cls], {}, plain=True)
    if issubclass(cls, tuple) and len(args) == 1 and (not kwargs or find(m, cls, "__init__") is not object.__init__):
        return m.native(new, [cls, m.listed(args[0])], kwargs)
    if issubclass(cls, (int, float, str, bytes, tuple, frozenset)) or cls.__module__ in policy.PURE_MODULES:
        return m.native(new, [cls, *args], kwargs)
    raise Unsupported("CAP014", at=m.loc(), detail=f"making a {cls.__module__}.{cls.__qualname__}")


def _instantiate_c(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Any:
    module = cls.__module__.partition(".")[0]
    if issubclass(cls, BaseException):
        return m.native(cls, args, kwargs, plain=True)
    if module == "numpy" and issubclass(cls, np.generic):
        return arrays.call(m, cls, args, kwargs)
    if cls is torch.device and m.modes:
        found = overrides.dispatched(m, "function", cls, tuple(args), kwargs)
        if found is not MISSING:
            return found
    if module in policy.PURE_MODULES or cls in (torch.Size, torch.device, torch.finfo, torch.iinfo):
        return m.native(cls, args, kwargs)
    if issubclass(cls, tuple) and hasattr(cls, "n_fields"):  # torch.return_types
        return m.native(cls, [m.listed(args[0])], kwargs, plain=True)
    if cls in UNCHANGING:
        return m.native(cls, args, kwargs)
    if module in ("_thread", "_random", "datetime", "_io"):
        raise Unsupported("CAP016", at=m.loc(), detail=cls.__name__)
    raise Unsupported("CAP014", at=m.loc(), detail=f"making a {cls.__module__}.{cls.__qualname__}")
