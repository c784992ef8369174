"""Tracing: a mode in which torch functions run on meta tensors under this package's own shape rules.

In: torch calls made inside `with Tracing(facts)`. Out: meta tensors with the sizes, strides, dtype and view-ness that eager's CPU
kernels would give; a device other than "cpu" is remembered beside the tensor. Autograd is off while tracing unless asked for: then it
watches tracing tensors as it watches any, and what it computes backwards is traced too.

An operator is answered by the first of these that applies: its parts (PARTS); its row in RULES; the meta view kernel (views of known
sizes); its functional form (in-place and out= operators); torch's decomposition; a run on made-up CPU data or the meta kernel (GRA010,
GRA001).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..codes import Unsupported
from ..ir.rows import rows
from ..runtime.values_only import registered_fake
from . import accept, learn, representable
from .autocast import autocast_state, cast_arguments, cast_for, target_dtype
from .layout import (
    Size,
    are_equal,
    format_strides,
    is_certain,
    is_contiguous,
    is_dense,
    is_lazy,
    is_shape,
    is_symbolic,
    same,
    suggest_format,
)
from .schema import GEOMETRY, OpInfo, bind, info, may_draw, may_raise, unbind
from .sizes import SizeFacts, SymTypes, expr_of
from .spec import TensorSpec

Rule = Callable[..., Any]
RULES: dict[OpOverload, Rule] = {}
PARTS: dict[OpOverload, Rule] = {}  # operators written with others; NotImplemented where that does not do
DRAWS: dict[OpOverload, Rule] = {}  # the same of random operators, where the program wants no draws of eager's (rules/draws.py)
FUNCTION_RULES: dict[Any, Rule] = {}  # torch function -> rule(trace, call, *args, **kwargs); `call` runs the function itself

rule = rows(RULES, "shape rule")  # for operators: a function of the operator's own arguments
part = rows(PARTS, "part")
function_rule = rows(FUNCTION_RULES, "function rule")


# ---------------------------------------------------------------- tensors


def make(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tracing tensor, made inside a rule: no mode for operators listens there; one for functions may, where autograd goes backwards."""
    with torch._C.DisableTorchFunction():
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def fresh(shape: Sequence[Any], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """A tracing tensor of this format, as torch allocates one."""
    return make(tuple(shape), format_strides(tuple(shape), memory_format), dtype)


def make_unseen(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tracing tensor, made past whatever modes are on."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def device_of(t: torch.Tensor) -> torch.device:
    """The device a tracing tensor stands for (cpu unless remembered otherwise); a real tensor's own."""
    if not torch._C._dispatch_keys(t).has(torch._C.DispatchKey.Meta):
        return t.device
    return getattr(t, "_ts_device", _CPU)


def spec_of(t: torch.Tensor) -> TensorSpec:
    """What is known of a tracing tensor."""
    with torch._C.DisableTorchFunction():  # no rule is about these
        return TensorSpec(t.dtype, tuple(map(expr_of, t.shape)), tuple(map(expr_of, t.stride())), str(device_of(t)))


_CPU = torch.device("cpu")


def remember_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`t` stands for a tensor on `device`; every Tracing that is under way then looks where results lie."""
    if device != _CPU:
        t._ts_device = device  # type: ignore[attr-defined]
        for trace in _ACTIVE.stack:
            trace.facts.has_devices = True
    return t


def real_device(t: torch.Tensor) -> torch.device:
    """The device of a real tensor; asked past whatever modes are on."""
    return t.device


def symbolic_strides(real: torch.Tensor, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The strides of `real` rewritten over `sizes`: where a stride is the dense product of faster dimensions it becomes that product."""
    strides: list[Size] = list(real.stride())
    order = sorted(range(real.dim()), key=lambda d: (real.stride(d), -d if real.shape[d] == 1 else real.dim() - d))
    known, step = 1, 1
    for d in order:
        if real.stride(d) == 0:
            continue
        if real.stride(d) == known:
            strides[d] = step
        else:
            known, step = real.stride(d), real.stride(d)
        known, step = known * real.shape[d], step * sizes[d]
    return tuple(strides)


def given(t: torch.Tensor) -> torch.Tensor:
    """Mark a tracing tensor that stands for the caller's own: its sizes, strides and memory cannot be changed by replaying a graph."""
    t._ts_given = True  # type: ignore[attr-defined]
    return t


def refuse_change(target: torch.Tensor, what: str) -> None:
    """Before a tensor takes other sizes, strides or memory."""
    if getattr(target, "_ts_given", False):
        raise Unsupported("GRA013", at=current().facts.loc, detail=what)


def at_offset(t: torch.Tensor, offset: Size) -> torch.Tensor:
    """A tracing tensor like `t` that starts `offset` elements into its memory."""
    if type(offset) is int and not offset:
        return t
    shape, strides = tuple(t.shape), tuple(t.stride())
    extent: Any = offset + 1
    for n, step in zip(shape, strides, strict=True):
        extent = extent + (n - 1) * step
    with torch._C.DisableTorchFunction(), no_dispatch():
        return torch.empty_strided((extent,), (1,), dtype=t.dtype, device="meta").as_strided(shape, strides, offset)


def tensor_like(real: torch.Tensor, sizes: tuple[Size, ...] | None = None, facts: SizeFacts | None = None) -> torch.Tensor:
    """The tracing tensor that stands for a real one: its dtype, strides, offset, device (`_ts_device`); `sizes` may hold SymInts."""
    refuse_layout(real, facts)
    shape, steps = (tuple(real.shape), tuple(real.stride())) if sizes is None else (sizes, symbolic_strides(real, sizes))
    with torch._C.DisableTorchFunction(), no_dispatch():  # past whatever modes are on: a real meta tensor is no tracing tensor
        t = torch.empty_strided(shape, steps, dtype=real.dtype, device="meta")
        device = getattr(real, "_ts_device", None) or real_device(real)
    t = at_offset(t, real.storage_offset())
    if is_lazy(real):
        with torch._C.DisableTorchFunction(), no_dispatch():
            t = torch._conj(t) if real.is_conj() else t
            t = torch._neg_view(t) if real.is_neg() else t
    remember_device(t, device)
    return t


def refuse_layout(t: torch.Tensor, facts: SizeFacts | None = None) -> None:
    """Raises Unsupported (GRA011) for an input that is no strided tensor of numbers."""
    what = str(t.layout) if t.layout is not torch.strided else str(t.dtype) if t.is_quantized else ""
    if what:
        raise Unsupported("GRA011", at=facts.loc if facts else "", detail=what)


def refuse_kind(t: torch.Tensor, facts: SizeFacts | None = None) -> None:
    """Raises Unsupported (GRA011) for an input whose memory does not hold its elements as they are."""
    refuse_layout(t, facts)
    if is_lazy(t):
        raise Unsupported("GRA011", at=facts.loc if facts else "", detail="a conjugate or negative view as an input")


_OUTSIDE = "the backward pass leaves the traced function"


def watched(t: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The tracing tensor, known to autograd as `real` is: as a leaf, or as the result of something outside."""
    if not real.requires_grad:
        return t
    with torch._C.DisableTorchFunction(), no_dispatch(), torch.enable_grad():
        t.requires_grad_()
        if real.is_leaf:
            return t
        result: torch.Tensor = torch._C._functions.DelayedError(_OUTSIDE, 1)(t)  # type: ignore[attr-defined]
        result.__dict__.update(t.__dict__)
        return result


def hidden(t: torch.Tensor) -> torch.Tensor:
    """The tracing tensor as a result that requires grad, and does not say of what."""
    with torch._C.DisableTorchFunction(), no_dispatch(), torch.enable_grad():
        return torch._C._functions.DelayedError(_OUTSIDE, 1)(t.requires_grad_())  # type: ignore[attr-defined,no-any-return]


# ---------------------------------------------------------------- the modes


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[Tracing] = []


_ACTIVE = _Active()


def active() -> Tracing | None:
    """The innermost Tracing of this thread, if one is under way."""
    return _ACTIVE.stack[-1] if _ACTIVE.stack else None


def current() -> Tracing:
    """The innermost Tracing of this thread; rules reach facts through it."""
    return _ACTIVE.stack[-1]


class _Operators(TorchDispatchMode):
    """Hands every operator below autograd to `trace.operator`."""

    def __init__(self, trace: Tracing) -> None:
        super().__init__()
        self.trace = trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its own compiler to wrap this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.trace.dispatch(func, args, kwargs or {})


def _is_watched(args: Any, kwargs: dict[str, Any]) -> bool:
    """Would autograd have watched this call, which did not pass through it?"""
    if not torch.is_grad_enabled() or torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality):
        return False
    return any(t.requires_grad for t in tensors_in((args, kwargs)))


# What only tells something of a tensor, and asks no question about sizes: no rule is about these.
READS = frozenset({
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "requires_grad", "is_leaf", "grad_fn")),
    torch.Tensor.dim, torch.Tensor.untyped_storage, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
})  # fmt: skip


def _needs_device(func: Any) -> bool:
    """Is it a factory of torch.ops.prims, which has no default device?"""
    func = getattr(func, "default", None) if isinstance(func, OpOverloadPacket) else func
    return isinstance(func, OpOverload) and any(a.name == "device" and not a.has_default_value() for a in func._schema.arguments)


class _Functions(TorchFunctionMode):
    """Sees torch functions above the dispatcher: those in FUNCTION_RULES, and device properties of tensors."""

    def __init__(self, trace: Tracing) -> None:
        super().__init__()
        self.trace = trace
        self.entered: list[FunctionType] = []  # Python functions being run for this mode, innermost last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            return func(*args)
        self.trace.facts.calls += 1
        try:
            return self.called(func, args, kwargs)
        finally:
            self.trace.facts.calls -= 1

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.trace.note_autocast()
        if self.trace.autocast:
            args, kwargs = self.trace.cast_above(func, args, kwargs or {})
        if not self.trace.has_devices:
            return self.placed(func, args, kwargs or {})
        outer = self.trace.calling_on
        self.trace.calling_on = next((device_of(t) for t in tensors_in((args, kwargs or {})) if device_of(t) != _CPU), _CPU)
        try:
            return self.placed(func, args, kwargs or {})
        finally:
            self.trace.calling_on = outer

    def placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The call, of a rule where there is one; a factory is told where to make its tensor."""
        found = FUNCTION_RULES.get(func)
        call, device = self.plainly(func), kwargs.get("device")
        if found is not None:
            return found(self.trace, call, *args, **kwargs)
        if device is not None:
            return self.trace.made_on(device, partial(call, device=_CPU) if _needs_device(func) else call, args, kwargs)
        if self.trace.parts_on != _CPU and not tensors_in((args, kwargs)):
            return self.trace.made_on(self.trace.parts_on, call, args, kwargs)
        return call(*args, **kwargs)

    def plainly(self, func: Any) -> Any:
        """`func` itself, past this mode; a Python function so that the torch functions it calls still come here."""
        if type(func) is not FunctionType or func in self.entered:
            return func

        def call(*args: Any, **kwargs: Any) -> Any:
            self.entered.append(func)
            try:
                with self:
                    return without_check(func)(*args, **kwargs)
            finally:
                self.entered.pop()

        return call


CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*args: Any) -> bool:
    return False


@cache
def without_check(func: FunctionType) -> FunctionType:
    """The same function in a copy of its globals where torch's question "does a mode want this call?" is answered no."""
    if not any(name in func.__globals__ for name in CHECKS):
        return func
    names = func.__globals__ | dict.fromkeys(CHECKS, _never)
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


@contextmanager
def plain_autograd() -> Iterator[None]:
    """What is traced is no computation of the program: its hooks on saved tensors do not see it, and anomaly mode does not check it."""
    hooks = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    if anomaly[0]:
        torch.set_anomaly_enabled(False)
    try:
        yield
    finally:
        if anomaly[0]:
            torch.set_anomaly_enabled(*anomaly)
        for pair in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


class Tracing(AbstractContextManager["Tracing"]):
    """`with Tracing(facts):` torch functions on tracing tensors give tracing tensors."""

    records = False  # only shapes are asked for
    alive = False  # gradients of what is recorded will be recorded too

    def __init__(self, facts: SizeFacts, grad: bool = False) -> None:
        self.facts, self.grad = facts, grad
        self.autocast: dict[str, torch.dtype] = {}
        self.casts: dict[Any, Any] = {}  # weights that were cast in the autocast region at hand
        self.written: set[int] = set()  # storages that something was written to
        self.statistics: set[int] = set()  # those of running statistics that an operator writes without saying so
        self.writes: list[torch.Tensor] = []  # what was written, write by write: it stays, so that its storage's number means nothing else
        self.counted: dict[int, tuple[torch.Tensor, Size]] = {}  # by id: a tensor and how many of its elements are not zero
        self.numbers: dict[int, tuple[torch.Tensor, Any]] = {}  # by id: a tensor and the symbol of its one element
        self.making_on: torch.device | None = None
        self.calling_on = _CPU  # where the operands of the function above the dispatcher lie: for what its C++ makes beside them
        self.parts_on = _CPU  # where those of the operator lie whose parts are run: for what these make without operands
        self.draws = 0  # operators met that may draw random numbers
        self.inside = 0  # operators written with others that are under way: their parts are not what eager runs
        self.harms = 0  # ... that raise on some values, or ask for them
        self.when_offset_read: Callable[[torch.Tensor], None] = lambda t: None  # told where a storage offset is used as a number
        self._operators, self._functions = _Operators(self), _Functions(self)
        self._guards: list[Any] = []

    @property
    def has_devices(self) -> bool:
        """Does some tensor stand for another device than cpu? All traces of a graph know it together: inputs are made in one of them."""
        return self.facts.has_devices

    @has_devices.setter
    def has_devices(self, value: bool) -> None:
        self.facts.has_devices = value

    def __enter__(self) -> Tracing:
        from . import rules  # noqa: F401  (fills RULES; sits above this file)

        mode = torch.enable_grad() if self.grad else torch.no_grad()
        guards: list[Any] = [torch.inference_mode(False), mode, self._operators, self._functions]
        for g in guards:
            g.__enter__()
        self._guards.append(guards)
        _ACTIVE.stack.append(self)
        self.note_autocast()
        return self

    def __exit__(self, *exc: Any) -> None:
        _ACTIVE.stack.pop()
        for g in reversed(self._guards.pop()):
            g.__exit__(*exc)

    def note_copy(self, source: torch.Tensor, made: torch.Tensor, is_view: Callable[[], bool]) -> None:
        """`made` is a copy of `source` for most sizes, and for others `source` itself (see Recording)."""

    def constant(self, real: torch.Tensor, device: Any = None) -> torch.Tensor:
        """A tensor made of Python data: `_ts_constant` keeps the data and `_ts_loc` the line for whoever records the graph."""
        t = make_unseen(real.shape, real.stride(), real.dtype)
        t._ts_constant = real  # type: ignore[attr-defined]
        t._ts_loc = self.facts.loc  # type: ignore[attr-defined]
        return t if device is None else remember_device(t, self.place(device))

    def place(self, device: Any) -> torch.device:
        """The device that a program names, with its index: "cuda" is the current one, which a guard then holds."""
        named = torch.device(device)
        if named.type != "cuda" or named.index is not None:
            return named
        if not torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("cuda", self.asked(torch.cuda.current_device))

    def asked(self, setting: Callable[[], Any]) -> Any:
        """What a setting is at hand, which a guard then holds."""
        value = setting()
        if self.facts.when_asked is not None:
            self.facts.when_asked(setting, value)
        return value

    def made_on(self, device: Any, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A factory for another device: torch would start that device, so it is told nothing of it."""
        device = self.place(device)
        if device.type == "cpu":
            return call(*args, **kwargs)
        before, self.making_on, self.has_devices = self.making_on, device, True
        try:
            return call(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        finally:
            self.making_on = before

    def known_data(self, t: torch.Tensor) -> torch.Tensor | None:
        """The data of a constant, while nothing has been written to its memory."""
        found = getattr(t, "_ts_constant", None)
        return None if found is None or storage(t) in self.written or device_of(t).type == "meta" else found

    def known_number(self, t: torch.Tensor) -> Any:
        """The integer that a tensor without dimensions was made of, a SymInt where it varies; None where that is not known."""
        number = getattr(t, "_ts_number", None)
        if number is None or storage(t) in self.written:
            data = self.known_data(t)
            return None if data is None or data.dim() or data.dtype is not torch.int64 else data.item()
        return number

    def known_value(self, t: torch.Tensor, method: str) -> Any:
        """What `method` ("item", "tolist", "__bool__" ...) gives of a constant, or of a tensor made of a size; NotImplemented where the
        data is not known."""
        data = self.known_data(t)
        if data is None:
            number = self.known_number(t)
            return NotImplemented if number is None else _READ_SO[method](number) if method in _READ_SO else number
        with torch._C.DisableTorchFunction(), no_dispatch():
            return getattr(data, method)()

    def note_write(self, row: OpInfo, bound: dict[str, Any]) -> None:
        """An operator writes its arguments: what is known of their values holds no more."""
        targets = tensors_in([bound[w] for w in row.writes])
        written = {storage(t) for t in targets}
        self.written |= written
        self.writes += targets
        self.counted = {k: (t, n) for k, (t, n) in self.counted.items() if storage(t) not in written}
        self.numbers = {k: (t, n) for k, (t, n) in self.numbers.items() if storage(t) not in written}

    def fold(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """A scalar computed from numbers and constants, None where it is none: Python may ask for its value later."""
        if func is torch.ops.aten._conj.default and isinstance(args[0], complex):  # autograd's, of a number in the program
            with torch._C.DisableTorchFunction(), no_dispatch():
                return torch.tensor(args[0].conjugate(), dtype=torch.complex128)
        if torch.Tag.pointwise not in func.tags and func not in _ALSO_POINTWISE:
            return None
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags or kwargs.get("device") is not None:
            return None
        tensors = tensors_in((args, kwargs))
        data = {id(t): self.known_data(t) for t in tensors}
        if any(v is None or v.dim() for v in data.values()) or any(type(t) is torch.nn.Parameter for t in tensors):
            return None
        flat = [data[id(a)] if isinstance(a, torch.Tensor) else a for a in args]
        if any(type(a) not in _FOLDED for a in (*flat, *kwargs.values())):
            return None
        with torch._C.DisableTorchFunction(), no_dispatch():
            return func(*flat, **kwargs)  # type: ignore[no-any-return]

    def note_autocast(self) -> None:
        """Remember which devices autocast: inside a dispatch mode torch always reports it off."""
        self.autocast = autocast_state() if torch._C._is_any_autocast_enabled() else {}
        if not self.autocast:
            self.casts.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Arguments of a torch function as autocast casts them."""
        return cast_arguments(value, dtype, self.casts if torch.is_autocast_cache_enabled() else None)

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """The parts of a composite whose operands autocast has cast: eager computes them as they are."""
        noted, self.autocast = self.autocast, {}
        try:
            with torch._C._DisableAutocast():
                yield
        finally:
            self.autocast = noted

    def cast_above(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a torch function whose operator autocast casts: torch compares their dtypes before the operator is reached, and
        autograd has to see the cast."""
        tensors = tensors_in((args, kwargs))
        if not tensors:
            return args, kwargs
        dtype = cast_for(func, device_of(tensors[0]).type, self.autocast)
        return (args, kwargs) if dtype is None else (self.cast(args, dtype), self.cast(kwargs, dtype))

    # -------- one operator
    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator as torch hands it over: cast by autocast where it is on, then answered.

        Called below autograd. A rule that came here past autograd would cut gradients off, so it is refused: it has to call the operator.
        """
        if func in SIZE_QUERIES:
            return SIZE_QUERIES[func](*args)
        if func is not torch.ops.aten.detach.default and _is_watched(args, kwargs):
            raise Unsupported("AUT004", at=self.facts.loc, detail=str(func))
        self.draws += may_draw(func, args, kwargs)
        row = info(func)
        self.harms += row.is_value_needed or row.is_data_shaped or may_raise(func, args, kwargs)
        args, kwargs = representable.ask(func, *pinned(func, args, kwargs))
        if self.autocast:
            tensors = tensors_in((args, kwargs))
            dtype = target_dtype(func, device_of(tensors[0]).type, self.autocast) if tensors else None
            if dtype is not None:
                if self.alive and any(t.requires_grad and t.is_floating_point() and t.dtype is not dtype for t in tensors):
                    raise Unsupported("AUT004", at=self.facts.loc, detail=f"{func} under autocast")  # autograd would not see the cast
                with self._operators:
                    args, kwargs = cast_arguments(args, dtype), cast_arguments(kwargs, dtype)
        known = self.fold(func, args, kwargs)
        if known is not None and not tensors_in((args, kwargs)):
            return self.constant(known)
        if any(type(a) in SymTypes for a in args) and not tensors_in((args, kwargs)) and takes_tensors(func):
            with self._operators:
                args = tuple(as_tensor(a) if type(a) in SymTypes or not i else a for i, a in enumerate(args))
        result = self.operator(func, args, kwargs)
        if known is not None:
            result._ts_constant = known
        elif func in NUMBERS:
            self.note_number(func, args, kwargs, result)
        return result

    def note_number(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        """Remember the integer of a tensor that is made of integers which are known, and some of which vary."""
        numbers = [self.known_number(a) if isinstance(a, torch.Tensor) else a for a in args if type(a) not in (list, tuple)]
        if result.dtype is torch.int64 and not result.dim() and all(type(n) in (int, torch.SymInt) for n in numbers):
            number = NUMBERS[func](*numbers, **kwargs)
            if number is not None and is_certain(number >= -(2**63)) and is_certain(number < 2**63):
                result._ts_number = number  # type: ignore[attr-defined]

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shapes of one operator's results."""
        return self.shapes(func, args, kwargs)

    def shapes(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = self.in_parts(func, args, kwargs)
        if made is not NotImplemented:
            return made
        found = RULES.get(func)
        result = NotImplemented
        if found is not None:
            accept.ask(func, args, kwargs)
            result = found(*args, **kwargs)  # NotImplemented: only for another device
            if func is torch.ops.aten.native_batch_norm.default:
                bound = bind(func, args, kwargs)
                self.statistics |= {storage(bound[name]) for name in info(func).writes if bound["training"] and bound[name] is not None}
        if result is not NotImplemented:
            if not self.inside and not self.has_devices:
                accept.compare(func, args, kwargs, result, self.facts.loc)
        else:
            result = self._without_rule(func, args, kwargs)
        return self._place(args, kwargs, result) if self.has_devices or kwargs.get("device") is not None else result

    def in_parts(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of an operator that is written with others; NotImplemented for one that is not."""
        found = PARTS.get(func) or (DRAWS.get(func) if self.facts.own_draws else None)
        if found is None:
            return NotImplemented
        outer, self.parts_on = self.parts_on, self.device_for(args, kwargs) if self.has_devices else _CPU
        self.inside += 1
        try:
            with self._operators, self._functions:
                result = found(*args, **kwargs)
        finally:
            self.inside -= 1
            self.parts_on = outer
        if result is not NotImplemented and not self.inside and not self.has_devices:
            accept.compare(func, args, kwargs, result, self.facts.loc)
        return result

    def _without_rule(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = info(func)
        if row.is_view:
            if not any(t._has_symbolic_sizes_strides for t in tensors_in((args, kwargs))):
                return func(*args, **kwargs)
            if row.is_composite:
                with self._operators:
                    return func.decompose(*args, **kwargs)
            raise Unsupported("GRA005", at=self.facts.loc, detail=row.name)
        if row.writes:
            return self._mutate(func, row, bind(func, args, kwargs))
        if row.is_composite:
            with self._operators:
                return func.decompose(*args, **kwargs)
        if registered_fake(func) is None and (row.is_value_needed or row.is_data_shaped):
            raise Unsupported("GRA003" if row.is_value_needed else "GRA009", at=self.facts.loc, detail=row.name)
        return self._ask_torch(func, args, kwargs)

    def _mutate(self, func: OpOverload, row: OpInfo, bound: dict[str, Any]) -> Any:
        """Shapes of an operator that writes its arguments: what its functional form gives must fit them."""
        self.note_write(row, bound)
        if func in GEOMETRY:
            return change_geometry(func, bound)
        if func is torch.ops.aten.resize_.default:
            return resize(bound["self"], bound["size"], bound["memory_format"])
        if func is torch.ops.aten.resize_as_.default:
            template = bound["the_template"]
            return resize(bound["self"], template.shape, format_like(template, bound["memory_format"]))
        refuse_overlaps(func, row, bound)
        results: Any = ()
        if row.functional is not None:
            results = self.shapes(row.functional, *unbind(row.functional, bound))  # rules have names of their own
        elif any(r.alias_info is None for r in func._schema.returns):
            results = self._ask_torch(func, (), bound)
        values = list(results) if isinstance(results, (tuple, list)) else [results]
        return finish_write(func, row, bound, values, lambda target, new: None)

    def _ask_torch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Results of an operator without a rule, from the fake that came with it or from torch's kernels."""
        fake = registered_fake(func)
        if fake is not None:
            with self._operators:
                return learn.by_fake(fake, args, kwargs, self.facts)
        return learn.shapes(func, args, kwargs, self.facts, self.device_for(args, kwargs) if self.has_devices else _CPU)

    def device_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """Where an operator's results lie."""
        device = self.making_on or kwargs.get("device")
        if device is not None and torch.device(device).type == "meta" and self.making_on is None:
            device = None  # C++ took it from a tracing tensor; what the program makes there comes through made_on
        if device is None:
            of_operands = (device_of(t) for t in tensors_in((args, kwargs)) if device_of(t) != _CPU)
            device = next(of_operands, self.calling_on if kwargs.get("device") is not None else _CPU)
        return self.place(device)

    def _place(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        device = self.device_for(args, kwargs)
        if device != _CPU:
            self.has_devices = True
            for t in tensors_in(result):
                remember_device(t, device)
        return result


def pinned(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with plain numbers where the operator takes no symbols: the numbers at hand, which are assumed from now on."""
    if not any(map(has_symbols, args)) and not any(map(has_symbols, kwargs.values())):
        return args, kwargs
    row = info(func)
    if row.is_composite and func not in RULES:
        return args, kwargs  # its parts come here
    plain = tuple(a if name in row.symbolic else plain_number(a) for name, a in zip(row.params, args, strict=False))
    return plain, {name: a if name in row.symbolic else plain_number(a) for name, a in kwargs.items()}


@cache
def takes_tensors(func: OpOverload) -> bool:
    return any(str(a.type) == "Tensor" for a in func._schema.arguments)


def has_symbols(value: Any) -> bool:
    return type(value) in SymTypes or (isinstance(value, (list, tuple)) and any(type(v) in SymTypes for v in value))


def plain_number(value: Any) -> Any:
    return learn.specialise(value) if has_symbols(value) else value


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def as_tensor(number: Any) -> Any:
    """A number given for a tensor, as torch makes one of it: of the widest integers, or of the default dtype."""
    floats = torch.get_default_dtype()
    dtype = {bool: torch.bool, int: torch.int64, torch.SymInt: torch.int64, complex: floats.to_complex()}.get(type(number), floats)
    return torch.ops.aten.scalar_tensor.default(number, dtype=dtype)


def _quotient(a: Any, b: Any, rounding_mode: str = "floor") -> Any:
    """None where the divisor may be 0, or which way it is rounded depends on a sign that varies."""
    fits = type(b) is int and (b != 0 if rounding_mode == "floor" else b > 0 and is_certain(a >= 0))
    return a // b if fits else None


# Operators -> what they are of exact integers.
NUMBERS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.scalar_tensor.default: lambda s, **options: s,
    torch.ops.aten.full.default: lambda s, **options: s,  # of no sizes
    torch.ops.aten.add.Tensor: lambda a, b, alpha=1: a + alpha * b,
    torch.ops.aten.sub.Tensor: lambda a, b, alpha=1: a - alpha * b,
    torch.ops.aten.mul.Tensor: lambda a, b: a * b,
    torch.ops.aten.floor_divide.default: _quotient,
    torch.ops.aten.div.Tensor_mode: _quotient,
}  # fmt: skip
_READ_SO: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool, "is_nonzero": bool, "__float__": torch.sym_float, "__complex__": complex,
}  # fmt: skip
_ALSO_POINTWISE = (torch.ops.aten._to_copy.default, torch.ops.aten.floor_divide.default, torch.ops.aten.floor_divide.Scalar)
_FOLDED = frozenset({torch.Tensor, int, float, bool, str, type(None), torch.dtype})


def change_geometry(func: OpOverload, bound: dict[str, Any]) -> torch.Tensor:
    """transpose_, squeeze_ ...: the tensor object itself becomes the view."""
    target = bound["self"]
    shown = RULES[GEOMETRY[func]](**bound)
    if not is_shown_so(target, shown):
        refuse_change(target, str(func))
    return target.as_strided_(shown.shape, shown.stride(), shown.storage_offset())


def refuse_overlaps(func: OpOverload, row: OpInfo, bound: dict[str, Any]) -> None:
    """What eager refuses: reading memory that is written, but at other places. Operators that are not element-wise have rules of their own
    about an out= tensor that shares memory with an operand: that is left to eager."""
    to_others = bool(row.out) and (row.functional is None or torch.Tag.pointwise not in row.functional.tags)
    read = [t for name, v in bound.items() if name not in row.writes for t in tensors_in(v)]
    for name in row.writes:
        for target in tensors_in(bound[name]):
            for t in read:
                if storage(t) == storage(target) and (to_others or (t is not target and _overlap_in_part(target, t))):
                    raise RuntimeError(
                        "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
                        f"location. Please clone() the tensor before performing the operation. ({func})"
                    )


def _overlap_in_part(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Eager's own question: of two dense tensors, do the spans of memory overlap, and are not the same?"""
    if not is_dense(a) or not is_dense(b) or any(n == 0 for n in (*a.shape, *b.shape)):
        return False
    (first, last), (start, end) = _bytes_of(a), _bytes_of(b)
    if same(first, start) and same(last, end):
        return not (a.dim() == b.dim() and is_shape(a.stride(), b.stride()))
    return bool(first < end) and bool(start < last)


def _bytes_of(t: torch.Tensor) -> tuple[Size, Size]:
    width, start = t.element_size(), t.storage_offset()
    return start * width, (start + t.numel()) * width


def is_shown_so(target: torch.Tensor, shown: torch.Tensor) -> bool:
    """Are these the sizes, strides and offset that `target` has?"""
    return is_shape((*target.shape, *target.stride(), target.storage_offset()), (*shown.shape, *shown.stride(), shown.storage_offset()))


# C++ that is not ready for symbols asks for plain numbers: the sizes at hand are assumed.
SIZE_QUERIES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.size.default: lambda t: [int(s) for s in t.shape],
    torch.ops.aten.stride.default: lambda t: [int(s) for s in t.stride()],
    torch.ops.aten.numel.default: lambda t: int(t.numel()),
    torch.ops.aten.sym_size.default: lambda t: t.shape,
    torch.ops.aten.sym_stride.default: lambda t: t.stride(),
    torch.ops.aten.sym_numel.default: lambda t: t.numel(),
    torch.ops.aten.sym_storage_offset.default: lambda t: t.storage_offset(),
    torch.ops.aten.is_same_size.default: lambda t, other: are_equal(t.shape, other.shape),  # asked by forward derivatives
    torch.ops.aten._has_same_storage_numel.default: lambda t, other: bool(_storage_numel(t) == _storage_numel(other)),
}


def _storage_numel(t: torch.Tensor) -> Any:
    return t.untyped_storage().nbytes() // t.element_size()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_in(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    return []


IN_SIXTEENS = frozenset({torch.ops.aten.normal_.default})  # draws otherwise where elements do not lie side by side
REAL_IN_PLACE = frozenset({torch.ops.aten.abs_.default})  # refuse complex numbers, which the functional form takes
OUT_IN_PLACE = frozenset({torch.ops.aten.normal.Tensor_float_out})  # draw into out= as it is, whatever its size


def finish_write(
    func: OpOverload, row: OpInfo, bound: dict[str, Any], values: list[Any], assign: Callable[[torch.Tensor, torch.Tensor], None]
) -> Any:
    """Hand the functional form's results to the arguments that `func` writes; gives what `func` returns.

    `values`: func's own new results, then those of its functional form one per written argument (none where there is no such form).
    """
    targets = [t for w in row.writes for t in (bound[w] if isinstance(bound[w], (tuple, list)) else [bound[w]])]
    fresh = values
    if row.functional is not None:
        fresh = values[: max(0, len(values) - len(targets))]
        for target, new in zip(targets, values[len(fresh) :], strict=True):
            if target is not None:
                if func in REAL_IN_PLACE and target.dtype.is_complex:
                    raise RuntimeError(f"{row.name} of complex numbers is not supported")
                (fit_out if row.out and func not in OUT_IN_PLACE else check_in_place)(target, new)
                if not (is_contiguous(target) if row.out and row.is_random else is_dense(target) or func not in IN_SIXTEENS):
                    raise Unsupported("GRA006", at=current().facts.loc, detail=f"{row.name} into memory of another order")
                assign(target, new)
    new_ones = iter(fresh)
    returned = [next(new_ones) if r.alias_info is None else bound[_who_is(func, r.alias_info)] for r in func._schema.returns]
    return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)


def _who_is(func: OpOverload, alias: Any) -> str:
    """The parameter that a result with this alias mark is."""
    return next(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.before_set == alias.before_set)


def resize(target: torch.Tensor, size: Any, memory_format: Any) -> torch.Tensor:
    """resize_: within the memory it shows other sizes of it; beyond, the new memory's content is anything."""
    if not are_equal(target.shape, size):
        refuse_change(target, "resize_")
        if target._has_symbolic_sizes_strides or is_symbolic(size):
            raise Unsupported("GRA006", at=current().facts.loc, detail="resize_ to another size")
        target.resize_(size) if memory_format is None else target.resize_(size, memory_format=memory_format)
    elif memory_format is not None and not is_shape(target.stride(), format_strides(tuple(size), memory_format)):
        raise Unsupported("GRA006", at=current().facts.loc, detail="resize_ to another memory format")
    return target


def format_like(template: torch.Tensor, memory_format: torch.memory_format | None) -> torch.memory_format | None:
    """The format that resize_as_ is asked for."""
    return suggest_format(template) if memory_format is torch.preserve_format else memory_format


def fit_out(target: torch.Tensor, value: torch.Tensor) -> None:
    """out=: the target takes the result's sizes, as torch resizes it."""
    if value.dtype != target.dtype:  # some operators cast, others refuse
        raise Unsupported("GRA006", at=current().facts.loc, detail="an out= tensor of another dtype")
    if tuple(target.shape) != tuple(value.shape):
        if target.numel():
            raise Unsupported("GRA006", detail="an out= tensor of another shape")
        if not is_contiguous(value):  # some operators give it the result's strides, and some do not
            raise Unsupported("GRA006", at=current().facts.loc, detail="an out= tensor of no elements takes the layout of a result")
        refuse_change(target, "an out= tensor of no elements is resized")
        if getattr(getattr(target, "_ts_value", None), "steps", ()):  # a view: the memory that others see grows
            raise Unsupported("GRA013", at=current().facts.loc, detail="an out= view of no elements is resized")
        target.resize_(value.shape)


def check_in_place(target: torch.Tensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        return
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
    if not are_equal(target.shape, value.shape):
        raise RuntimeError(f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(value.shape)}")


__all__ = [
    "DRAWS", "FUNCTION_RULES", "PARTS", "RULES", "Tracing", "current", "device_of", "function_rule", "make", "part", "rule", "tensor_like",
]  # fmt: skip
