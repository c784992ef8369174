"""Handlers of the opcodes that leave a frame or come back to it: calls, imports, exceptions, `with`, generators."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from ..codes import Unsupported
from . import attributes as at
from . import protocols as pr
from .attributes import Raised
from .bytecode import VERSION, Instr, op
from .opcodes import take
from .protocol import Machine
from .world import NULL, SCALARS

if TYPE_CHECKING:
    from .frame import Frame

YIELD = "yield"

# ---------------------------------------------------------------- calls


@op("KW_NAMES", until=(3, 12))
def op_kw_names(f: Frame, i: Instr) -> None:
    f.kw_names = f.code.code.co_consts[i.arg]


def _call(f: Frame, n: int, kw_names: tuple[str, ...]) -> None:
    args = take(f, n)
    second, first = f.stack.pop(), f.stack.pop()
    if VERSION >= (3, 13):
        fn = first
        if second is not NULL:
            args.insert(0, second)
    elif first is NULL:
        fn = second
    else:
        fn = first
        args.insert(0, second)
    kwargs: dict[str, Any] = {}
    if kw_names:
        k = len(kw_names)
        kwargs = dict(zip(kw_names, args[-k:]))
        del args[-k:]
    f.stack.append(f.machine.call(fn, args, kwargs))


@op()
def op_CALL(f: Frame, i: Instr) -> None:
    names, f.kw_names = f.kw_names, ()
    _call(f, i.arg, names)


@op(since=(3, 13))
def op_CALL_KW(f: Frame, i: Instr) -> None:
    _call(f, i.arg, f.stack.pop())


@op()
def op_CALL_FUNCTION_EX(f: Frame, i: Instr) -> None:
    kwargs = f.stack.pop() if i.arg & 1 else {}
    args = f.stack.pop()
    second, first = f.stack.pop(), f.stack.pop()
    fn = first if VERSION >= (3, 13) else second
    if type(args) in SCALARS and type(args) not in (str, bytes):
        f.machine.native(lambda: fn(*args), [], {}, plain=True)  # Python refuses it before the call
    named = dict(f.machine.mapped(kwargs))
    if any(not issubclass(type(k), str) for k in named):
        raise Raised(TypeError("keywords must be strings"))
    f.stack.append(f.machine.call(fn, pr.as_list(f.machine, args), named))


def _annotations(value: Any) -> Any:
    """Of what lies on the stack: a tuple of names and values in turn, or a dictionary."""
    return dict(zip(value[::2], value[1::2])) if issubclass(type(value), tuple) else value


@op("MAKE_FUNCTION", until=(3, 12))
def op_make_function(f: Frame, i: Instr) -> None:
    code = f.stack.pop()
    closure = f.stack.pop() if i.arg & 8 else None
    annotations = f.stack.pop() if i.arg & 4 else None
    kwdefaults = f.stack.pop() if i.arg & 2 else None
    defaults = f.stack.pop() if i.arg & 1 else None
    fn = types.FunctionType(code, f.globals, code.co_name, defaults, closure)
    fn.__kwdefaults__ = kwdefaults
    fn.__qualname__ = code.co_qualname
    if annotations:
        fn.__annotations__ = _annotations(annotations)
    f.machine.made(fn)
    f.stack.append(fn)


@op("MAKE_FUNCTION", since=(3, 13))
def op_make_function_13(f: Frame, i: Instr) -> None:
    code = f.stack.pop()
    n = len(code.co_freevars)
    fn = types.FunctionType(code, f.globals, code.co_name, None, tuple(types.CellType() for _ in range(n)) if n else None)
    fn.__qualname__ = code.co_qualname
    f.machine.made(fn)
    f.stack.append(fn)


@op(since=(3, 13))
def op_SET_FUNCTION_ATTRIBUTE(f: Frame, i: Instr) -> None:
    fn, value = f.stack.pop(), f.stack.pop()
    if i.arg == 8:
        new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, value)
        new.__kwdefaults__, new.__qualname__ = fn.__kwdefaults__, fn.__qualname__
        f.machine.made(new)
        fn = new
    elif i.arg == 1:
        fn.__defaults__ = value
    elif i.arg == 2:
        fn.__kwdefaults__ = value
    elif i.arg == 4:
        fn.__annotations__ = _annotations(value)
    f.stack.append(fn)


@op()
def op_LOAD_BUILD_CLASS(f: Frame, i: Instr) -> None:
    f.stack.append(f.machine.build_class_function())


@op()
def op_LOAD_ASSERTION_ERROR(f: Frame, i: Instr) -> None:
    f.stack.append(AssertionError)


# ---------------------------------------------------------------- imports


@op()
def op_IMPORT_NAME(f: Frame, i: Instr) -> None:
    names, level = f.stack.pop(), f.stack.pop()
    f.stack.append(f.machine.import_name(f, i.value, names, level))


@op()
def op_IMPORT_FROM(f: Frame, i: Instr) -> None:
    module = f.stack[-1]
    try:
        value = at.load_attr(f.machine, module, i.value)
    except Raised as r:
        value = sys.modules.get(f"{module.__name__}.{i.value}")
        if value is None:
            file = getattr(module, "__file__", None)
            text = f"cannot import name {i.value!r} from {module.__name__!r} ({file or 'unknown location'})"
            raise Raised(ImportError(text, name=module.__name__, path=file)) from r
    f.stack.append(value)


# ---------------------------------------------------------------- exceptions


@op()
def op_RAISE_VARARGS(f: Frame, i: Instr) -> None:
    m = f.machine
    cause: Any = f.stack.pop() if i.arg == 2 else NULL
    if i.arg == 0:
        if m.exc is None:
            raise Raised(RuntimeError("No active exception to reraise"))
        raise Raised(m.exc)
    exc = f.stack.pop()
    if isinstance(exc, type) and issubclass(exc, BaseException):
        exc = m.call(exc, [], {})
    if not isinstance(exc, BaseException):
        raise Raised(TypeError("exceptions must derive from BaseException"))
    _use_exception(f, exc)
    if m.world.of(exc) is not None and cause is not NULL:
        raise Unsupported("CAP012", at=m.loc(), detail="__cause__ of an exception from outside")
    if cause is not NULL:
        exc.__cause__ = m.call(cause, [], {}) if issubclass(type(cause), type) else cause
    raise Raised(exc)


@op()
def op_PUSH_EXC_INFO(f: Frame, i: Instr) -> None:
    m = f.machine
    exc = f.stack.pop()
    f.stack += (m.exc, exc)
    m.exc = exc


@op()
def op_POP_EXCEPT(f: Frame, i: Instr) -> None:
    f.machine.exc = f.stack.pop()


@op()
def op_RERAISE(f: Frame, i: Instr) -> None:
    exc = f.stack.pop()
    if i.arg and type(f.stack[-i.arg]) is int:
        f.lasti = f.stack[-i.arg]
    raise Raised(exc)


def _use_exception(f: Frame, exc: Any) -> None:
    """One that is from outside, or was caught behind a break: what it does depends on its class."""
    track = f.machine.world.of(exc)
    if track is not None:
        f.machine.world.use(track)


@op()
def op_CHECK_EXC_MATCH(f: Frame, i: Instr) -> None:
    kind = f.stack.pop()
    _use_exception(f, f.stack[-1])
    f.stack.append(f.machine.native(lambda: issubclass(type(f.stack[-1]), kind), [], {}))


def _check_plain(f: Frame, exc: BaseException) -> None:
    """Groups are taken apart in C: none of them may be known outside, or have a way of its own to make another."""
    m = f.machine
    if m.world.of(exc) is not None or (isinstance(exc, BaseExceptionGroup) and type(exc) not in (ExceptionGroup, BaseExceptionGroup)):
        raise Unsupported("CAP002", at=m.loc(), detail="except* of an exception from outside, or of a class of groups")
    for inner in exc.exceptions if isinstance(exc, BaseExceptionGroup) else ():
        _check_plain(f, inner)


@op()
def op_CHECK_EG_MATCH(f: Frame, i: Instr) -> None:
    m, kind = f.machine, f.stack.pop()
    exc = f.stack[-1]
    _check_plain(f, exc)
    for k in kind if type(kind) is tuple else (kind,):
        if not (issubclass(type(k), type) and issubclass(k, BaseException)):
            raise Raised(TypeError("catching classes that do not inherit from BaseException is not allowed"))
        if issubclass(k, BaseExceptionGroup):
            raise Raised(TypeError("catching ExceptionGroup with except* is not allowed. Use except instead."))
    match: BaseException | None
    rest: BaseException | None
    if m.native(lambda: issubclass(type(exc), kind), [], {}):
        match, rest = BaseExceptionGroup("", (exc,)), None
    else:
        match, rest = m.native(lambda: exc.split(kind), [], {}) if isinstance(exc, BaseExceptionGroup) else (None, exc)
    if match is None:
        f.stack.append(None)
        return
    m.all_raised += [e for e in (match, rest) if e is not None]
    f.stack[-1:] = [rest, match]
    m.exc = match


@op("PREP_RERAISE_STAR", until=(3, 11))
def op_prepare_reraise(f: Frame, i: Instr) -> None:
    _prepare_reraise(f)


@op("CALL_INTRINSIC_2", since=(3, 12))
def op_intrinsic_2(f: Frame, i: Instr) -> None:
    if i.arg != 1:
        raise Unsupported("CAP002", at=f.machine.loc(), detail=f"intrinsic {i.arg}")
    _prepare_reraise(f)


def _prepare_reraise(f: Frame) -> None:
    """What leaves a `try` with except*: what the handlers raised, and of the group itself what none took or one raised again."""
    held, orig = f.stack.pop(), f.stack.pop()
    if f.machine.world.of(held) is not None:
        raise Unsupported("CAP002", at=f.machine.loc(), detail="except* that began before a break")
    left = [e for e in held if e is not None]
    if not isinstance(orig, BaseExceptionGroup):  # taken by one handler at most
        f.stack.append(left[0] if left else None)
        return
    for e in left:
        _check_plain(f, e)
    again = [e for e in left if isinstance(e, BaseExceptionGroup) and _is_part(e, orig)]
    raised = [e for e in left if all(e is not other for other in again)]
    leaves = {id(e) for group in again for e in _leaves(group)}
    kept = f.machine.native(lambda: orig.split(lambda e: id(e) in leaves)[0], [], {}) if again else None
    if kept is not None:
        f.machine.all_raised.append(kept)
        raised.append(kept)
    f.stack.append(None if not raised else raised[0] if len(raised) == 1 else BaseExceptionGroup("", raised))


def _is_part(e: BaseException, orig: BaseException) -> bool:
    """Does a group come from splitting `orig`? Python looks at these."""
    return e.__traceback__ is orig.__traceback__ and e.__cause__ is orig.__cause__ and e.__context__ is orig.__context__


def _leaves(e: BaseException) -> list[BaseException]:
    return [leaf for inner in e.exceptions for leaf in _leaves(inner)] if isinstance(e, BaseExceptionGroup) else [e]


@op()
def op_BEFORE_WITH(f: Frame, i: Instr) -> None:
    m, manager = f.machine, f.stack.pop()
    leave = m.special_method(manager, "__exit__")
    enter = m.special_method(manager, "__enter__")
    f.stack.append(leave)
    f.stack.append(m.call(enter, [], {}))


@op()
def op_WITH_EXCEPT_START(f: Frame, i: Instr) -> None:
    exc, leave = f.stack[-1], f.stack[-4]
    _use_exception(f, exc)
    f.stack.append(f.machine.call(leave, [type(exc), exc, _TRACEBACK], {}))


def _of_traceback(m: Machine, traceback: Any, name: str) -> Any:
    raise Unsupported("CAP014", at=m.loc(), detail=f"{name} of a traceback")


# What `__exit__` is given: that it is not None is all that is known of it. (A frame of a generator has nobody's frame behind it.)
_TRACEBACK = types.TracebackType(None, (None for _ in ()).gi_frame, 0, 1)  # type: ignore[attr-defined]
at.ATTR_ROWS[types.TracebackType] = _of_traceback


# ---------------------------------------------------------------- generators


@op()
def op_RETURN_GENERATOR(f: Frame, i: Instr) -> None:
    f.stack.append(None)  # what the first send brings


@op()
def op_YIELD_VALUE(f: Frame, i: Instr) -> tuple[str, Any]:
    return YIELD, f.stack.pop()


@op()
def op_SEND(f: Frame, i: Instr) -> None:
    m = f.machine
    value = f.stack.pop()
    it = f.stack[-1]
    try:
        if value is None:
            out = pr.advance(m, it)
        else:
            out = m.call(at.load_attr(m, it, "send"), [value], {})
    except Raised as r:
        if not isinstance(r.exc, StopIteration):
            raise
        if VERSION < (3, 12):
            f.stack[-1] = r.exc.value
        else:
            f.stack.append(r.exc.value)
        f.index = i.value
        return
    f.stack.append(out)


@op(since=(3, 12))
def op_CLEANUP_THROW(f: Frame, i: Instr) -> None:
    exc = f.stack[-1]
    if not isinstance(exc, StopIteration):
        raise Raised(exc)
    del f.stack[-3:]
    f.stack += (None, exc.value)


@op("GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH", "END_ASYNC_FOR")
def op_async(f: Frame, i: Instr) -> None:
    raise Unsupported("CAP002", at=f.machine.loc(), detail="async code")


def _intrinsic_star(f: Frame) -> Any:
    raise Unsupported("CAP002", at=f.machine.loc(), detail="import *")


def _intrinsic_stopiteration(f: Frame) -> Any:
    exc = f.stack.pop()
    if isinstance(exc, StopIteration):
        new = RuntimeError("generator raised StopIteration")
        new.__cause__ = exc
        return new
    return exc


_INTRINSIC_1 = {2: _intrinsic_star, 3: _intrinsic_stopiteration, 5: lambda f: pr.unary(f.machine, "+", f.stack.pop()),
                6: lambda f: tuple(f.machine.listed(f.stack.pop()))}  # fmt: skip


@op(since=(3, 12))
def op_CALL_INTRINSIC_1(f: Frame, i: Instr) -> None:
    row = _INTRINSIC_1.get(i.arg)
    if row is None:
        raise Unsupported("CAP002", at=f.machine.loc(), detail=f"intrinsic {i.arg}")
    f.stack.append(row(f))
