"""Opcode handlers: one function per instruction, each `op_NAME(frame, instruction)`, returning None to go on.

RETURN, and YIELD of call_opcodes.py, hand (kind, value) back to whoever runs the frame. Rows carry the versions they exist in; a handler that is
missing for a version makes the frame Unsupported, never wrong.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..codes import Unsupported
from ..graph.spec import NOT_FINITE
from . import attributes as at
from . import control_flow
from . import protocols as pr
from .attributes import Raised
from .bytecode import VERSION, Instr, op
from .resume import Later, Loop, is_missed
from .world import MISSING, NULL, SCALARS

if TYPE_CHECKING:
    from .frame import Frame
    from .protocol import Machine

RETURN = "return"
_LONGEST_RAISE = 200  # instructions that make an exception

# ---------------------------------------------------------------- stack


@op("NOP", "RESUME", "PRECALL", "EXTENDED_ARG", "CACHE")
def op_nothing(f: Frame, i: Instr) -> None: ...


@op()
def op_SETUP_ANNOTATIONS(f: Frame, i: Instr) -> None:
    """Of the body of a class: without a dictionary of its own, names would be noted in the module's."""
    if f.names is not None:
        f.names.setdefault("__annotations__", {})


def _let_go(f: Frame, value: Any) -> None:
    """A split frame lets go of a value: where the program sees that, Python does it."""
    if type(value) is Later and is_missed(value.obj):
        raise Unsupported("CAP012", at=f.machine.loc(), detail="the end of an object that has a __del__ or weak references, or of a generator")


@op()
def op_POP_TOP(f: Frame, i: Instr) -> None:
    if f.machine.later:
        _let_go(f, f.stack[-1])
    f.stack.pop()


@op()
def op_PUSH_NULL(f: Frame, i: Instr) -> None:
    f.stack.append(NULL)


@op()
def op_COPY(f: Frame, i: Instr) -> None:
    f.stack.append(f.stack[-i.arg])


@op()
def op_SWAP(f: Frame, i: Instr) -> None:
    s = f.stack
    s[-1], s[-i.arg] = s[-i.arg], s[-1]


@op()
def op_LOAD_CONST(f: Frame, i: Instr) -> None:
    f.stack.append(i.value)


@op(since=(3, 12))
def op_RETURN_CONST(f: Frame, i: Instr) -> tuple[str, Any]:
    return RETURN, i.value


@op()
def op_RETURN_VALUE(f: Frame, i: Instr) -> tuple[str, Any]:
    return RETURN, f.stack.pop()


# ---------------------------------------------------------------- variables


def _unbound(f: Frame, slot: int) -> Raised:
    """What Python says of a variable that has no value."""
    name = f.code.names[slot]
    if slot >= f.code.size - len(f.code.code.co_freevars):
        return Raised(NameError(f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope", name=name))
    return Raised(UnboundLocalError(f"cannot access local variable '{name}' where it is not associated with a value"))


@op("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_CLOSURE")
def op_load_fast(f: Frame, i: Instr) -> None:
    value = f.fast[i.arg]
    if value is NULL or (type(value) is Later and not f.machine.has_value(value)):
        raise _unbound(f, i.arg)
    f.stack.append(value)


@op()
def op_STORE_FAST(f: Frame, i: Instr) -> None:
    f.fast[i.arg] = f.stack.pop()


@op()
def op_DELETE_FAST(f: Frame, i: Instr) -> None:
    if not f.machine.has_value(f.fast[i.arg]):
        raise _unbound(f, i.arg)
    if f.machine.later:
        _let_go(f, f.fast[i.arg])
    f.fast[i.arg] = NULL


@op(since=(3, 12))
def op_LOAD_FAST_AND_CLEAR(f: Frame, i: Instr) -> None:
    f.stack.append(f.fast[i.arg])
    f.fast[i.arg] = NULL


@op(since=(3, 13))
def op_LOAD_FAST_LOAD_FAST(f: Frame, i: Instr) -> None:
    for k in (i.arg >> 4, i.arg & 15):
        if not f.machine.has_value(f.fast[k]):
            raise _unbound(f, k)
        f.stack.append(f.fast[k])


@op(since=(3, 13))
def op_STORE_FAST_LOAD_FAST(f: Frame, i: Instr) -> None:
    f.fast[i.arg >> 4] = f.stack.pop()
    f.stack.append(f.fast[i.arg & 15])


@op(since=(3, 13))
def op_STORE_FAST_STORE_FAST(f: Frame, i: Instr) -> None:
    f.fast[i.arg >> 4] = f.stack.pop()
    f.fast[i.arg & 15] = f.stack.pop()


@op()
def op_MAKE_CELL(f: Frame, i: Instr) -> None:
    value = f.fast[i.arg]
    f.fast[i.arg] = types.CellType() if value is NULL else types.CellType(value)


@op()
def op_COPY_FREE_VARS(f: Frame, i: Instr) -> None:
    cells = f.fn.__closure__ or ()
    f.fast[len(f.fast) - len(cells) :] = list(cells)


@op()
def op_LOAD_DEREF(f: Frame, i: Instr) -> None:
    value = f.machine.cell_value(f.fast[i.arg])
    if value is NULL:
        raise _unbound(f, i.arg)
    f.stack.append(value)


@op()
def op_STORE_DEREF(f: Frame, i: Instr) -> None:
    f.machine.store_cell(f.fast[i.arg], f.stack.pop())


@op()
def op_DELETE_DEREF(f: Frame, i: Instr) -> None:
    if f.machine.cell_value(f.fast[i.arg]) is NULL:
        raise _unbound(f, i.arg)
    f.machine.store_cell(f.fast[i.arg], NULL)


@op("LOAD_CLASSDEREF", until=(3, 11))
def op_load_classderef(f: Frame, i: Instr) -> None:
    name = f.code.names[i.arg]
    if f.names is not None and name in f.names:
        f.stack.append(f.names[name])
    else:
        f.stack.append(f.machine.load_cell(f.fast[i.arg], name))


@op(since=(3, 12))
def op_LOAD_FROM_DICT_OR_DEREF(f: Frame, i: Instr) -> None:
    names, name = f.stack.pop(), f.code.names[i.arg]
    f.stack.append(names[name] if name in names else f.machine.load_cell(f.fast[i.arg], name))


@op(since=(3, 12))
def op_LOAD_FROM_DICT_OR_GLOBALS(f: Frame, i: Instr) -> None:
    names = f.stack.pop()
    f.stack.append(names[i.value] if i.value in names else f.machine.load_global(f, i.value))


@op(since=(3, 12))
def op_LOAD_LOCALS(f: Frame, i: Instr) -> None:
    f.stack.append(f.names)


@op()
def op_LOAD_GLOBAL(f: Frame, i: Instr) -> None:
    if i.arg & 1 and VERSION < (3, 13):
        f.stack.append(NULL)
    f.stack.append(f.machine.load_global(f, i.value))
    if i.arg & 1 and VERSION >= (3, 13):
        f.stack.append(NULL)


@op()
def op_STORE_GLOBAL(f: Frame, i: Instr) -> None:
    f.machine.store_global(f.globals, i.value, f.stack.pop())


@op()
def op_DELETE_GLOBAL(f: Frame, i: Instr) -> None:
    f.machine.load_global(f, i.value)
    f.machine.store_global(f.globals, i.value, NULL)


@op()
def op_LOAD_NAME(f: Frame, i: Instr) -> None:
    if f.names is not None and i.value in f.names:
        f.stack.append(f.names[i.value])
    else:
        f.stack.append(f.machine.load_global(f, i.value))


@op()
def op_STORE_NAME(f: Frame, i: Instr) -> None:
    assert f.names is not None  # a class's body
    f.names[i.value] = f.stack.pop()


@op()
def op_DELETE_NAME(f: Frame, i: Instr) -> None:
    assert f.names is not None
    if i.value not in f.names:
        raise Raised(NameError(f"name '{i.value}' is not defined"))
    del f.names[i.value]


# ---------------------------------------------------------------- attributes and items


@op()
def op_LOAD_ATTR(f: Frame, i: Instr) -> None:
    value = at.load_attr(f.machine, f.stack.pop(), i.value)
    if VERSION < (3, 12) or not i.arg & 1:
        f.stack.append(value)
    elif VERSION < (3, 13):
        f.stack += (NULL, value)
    else:
        f.stack += (value, NULL)


@op("LOAD_METHOD", until=(3, 11))
def op_load_method(f: Frame, i: Instr) -> None:
    obj = f.stack.pop()
    f.stack.append(NULL)
    f.stack.append(at.load_attr(f.machine, obj, i.value))


@op(since=(3, 12))
def op_LOAD_SUPER_ATTR(f: Frame, i: Instr) -> None:
    obj, cls, sup = f.stack.pop(), f.stack.pop(), f.stack.pop()
    value = at.load_attr(f.machine, f.machine.call(sup, [cls, obj], {}), i.value)
    if not i.arg & 1:
        f.stack.append(value)
    elif VERSION < (3, 13):
        f.stack += (NULL, value)
    else:
        f.stack += (value, NULL)


@op()
def op_STORE_ATTR(f: Frame, i: Instr) -> None:
    obj, value = f.stack.pop(), f.stack.pop()
    at.store_attr(f.machine, obj, i.value, value)


@op()
def op_DELETE_ATTR(f: Frame, i: Instr) -> None:
    at.delete_attr(f.machine, f.stack.pop(), i.value)


@op()
def op_BINARY_SUBSCR(f: Frame, i: Instr) -> None:
    key = f.stack.pop()
    f.stack[-1] = pr.getitem(f.machine, f.stack[-1], key)


@op(since=(3, 12))
def op_BINARY_SLICE(f: Frame, i: Instr) -> None:
    stop, start = f.stack.pop(), f.stack.pop()
    f.stack[-1] = pr.getitem(f.machine, f.stack[-1], slice(start, stop))


@op(since=(3, 12))
def op_STORE_SLICE(f: Frame, i: Instr) -> None:
    stop, start, obj, value = f.stack.pop(), f.stack.pop(), f.stack.pop(), f.stack.pop()
    pr.setitem(f.machine, obj, slice(start, stop), value)


@op()
def op_STORE_SUBSCR(f: Frame, i: Instr) -> None:
    key, obj, value = f.stack.pop(), f.stack.pop(), f.stack.pop()
    pr.setitem(f.machine, obj, key, value)


@op()
def op_DELETE_SUBSCR(f: Frame, i: Instr) -> None:
    key, obj = f.stack.pop(), f.stack.pop()
    pr.delitem(f.machine, obj, key)


# ---------------------------------------------------------------- operators

_BINARY_SIGNS = ("+", "&", "//", "<<", "@", "*", "%", "|", "**", ">>", "-", "/", "^",
                 "+=", "&=", "//=", "<<=", "@=", "*=", "%=", "|=", "**=", ">>=", "-=", "/=", "^=")  # fmt: skip


@op()
def op_BINARY_OP(f: Frame, i: Instr) -> None:
    b = f.stack.pop()
    f.stack[-1] = pr.binary(f.machine, _BINARY_SIGNS[i.arg], f.stack[-1], b)


@op()
def op_COMPARE_OP(f: Frame, i: Instr) -> None:
    b = f.stack.pop()
    out = pr.compare(f.machine, i.value, f.stack[-1], b)
    f.stack[-1] = pr.truth(f.machine, out) if VERSION >= (3, 13) and i.arg & 16 else out


@op()
def op_IS_OP(f: Frame, i: Instr) -> None:
    b, a = f.stack.pop(), f.stack.pop()
    f.stack.append(pr.is_same(f.machine, a, b) != bool(i.arg))


@op()
def op_CONTAINS_OP(f: Frame, i: Instr) -> None:
    b, a = f.stack.pop(), f.stack.pop()
    f.stack.append(pr.contains(f.machine, b, a) != bool(i.arg))


@op()
def op_UNARY_NEGATIVE(f: Frame, i: Instr) -> None:
    f.stack[-1] = pr.unary(f.machine, "-", f.stack[-1])


@op("UNARY_POSITIVE", until=(3, 11))
def op_unary_positive(f: Frame, i: Instr) -> None:
    f.stack[-1] = pr.unary(f.machine, "+", f.stack[-1])


@op()
def op_UNARY_INVERT(f: Frame, i: Instr) -> None:
    f.stack[-1] = pr.unary(f.machine, "~", f.stack[-1])


@op()
def op_UNARY_NOT(f: Frame, i: Instr) -> None:
    f.stack[-1] = not pr.truth(f.machine, f.stack[-1])


@op(since=(3, 13))
def op_TO_BOOL(f: Frame, i: Instr) -> None:
    if issubclass(type(f.stack[-1]), torch.Tensor) and f.code.instrs[i.index + 1].name.startswith("POP_JUMP_IF_"):
        return  # the jump asks
    f.stack[-1] = pr.truth(f.machine, f.stack[-1])


# ---------------------------------------------------------------- jumps


@op("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
def op_jump(f: Frame, i: Instr) -> None:
    if i.value < i.index:
        f.machine.tick()
    f.index = i.value


def only_raises(f: Frame, index: int) -> bool:
    """Does all code from `index` on end in an exception that it raises?"""
    seen: set[int] = set()
    starts = [index]
    while starts:
        k = starts.pop()
        while k not in seen:
            seen.add(k)
            ins = f.code.instrs[k]
            if ins.name == "RAISE_VARARGS":
                break
            if len(seen) > _LONGEST_RAISE or any(word in ins.name for word in ("BACKWARD", "RETURN", "YIELD", "FOR_ITER", "SEND", "RERAISE")):
                return False
            if "JUMP" in ins.name:
                starts.append(ins.value)
                if ins.name == "JUMP_FORWARD":
                    break
            k += 1
    return True


def decide(f: Frame, i: Instr, jumps_if: bool) -> bool:
    """The truth that a jump asks for. Of a tensor's value: where one of the ways only raises, the other is taken and that is checked."""
    value = f.stack.pop()
    if issubclass(type(value), torch.Tensor):
        if only_raises(f, i.value):
            return bool(f.machine.assume(value, not jumps_if))
        if only_raises(f, i.index + 1):
            return bool(f.machine.assume(value, jumps_if))
        wanted = control_flow.where_finite(f.machine, value)
        if wanted is not None:
            return bool(f.machine.assume(value, wanted, NOT_FINITE))
    return pr.truth(f.machine, value)


@op("POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE", until=(3, 11))
@op("POP_JUMP_IF_TRUE", since=(3, 12))
def op_pop_jump_if_true(f: Frame, i: Instr) -> None:
    if decide(f, i, True):
        f.index = i.value


@op("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE", until=(3, 11))
@op("POP_JUMP_IF_FALSE", since=(3, 12))
def op_pop_jump_if_false(f: Frame, i: Instr) -> None:
    if not decide(f, i, False):
        f.index = i.value


@op("POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NONE", until=(3, 11))
@op("POP_JUMP_IF_NONE", since=(3, 12))
def op_pop_jump_if_none(f: Frame, i: Instr) -> None:
    if f.stack.pop() is None:
        f.index = i.value


@op("POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE", until=(3, 11))
@op("POP_JUMP_IF_NOT_NONE", since=(3, 12))
def op_pop_jump_if_not_none(f: Frame, i: Instr) -> None:
    if f.stack.pop() is not None:
        f.index = i.value


@op("JUMP_IF_TRUE_OR_POP", until=(3, 11))
def op_jump_if_true_or_pop(f: Frame, i: Instr) -> None:
    if pr.truth(f.machine, f.stack[-1]):
        f.index = i.value
    else:
        f.stack.pop()


@op("JUMP_IF_FALSE_OR_POP", until=(3, 11))
def op_jump_if_false_or_pop(f: Frame, i: Instr) -> None:
    if not pr.truth(f.machine, f.stack[-1]):
        f.index = i.value
    else:
        f.stack.pop()


# ---------------------------------------------------------------- iteration


@op()
def op_GET_ITER(f: Frame, i: Instr) -> None:
    f.stack[-1] = pr.begin(f.machine, f.stack[-1])
    f.machine.loops.pop(id(f.stack[-1]), None)


@op()
def op_GET_YIELD_FROM_ITER(f: Frame, i: Instr) -> None:
    if type(f.stack[-1]) is not types.GeneratorType:
        f.stack[-1] = pr.begin(f.machine, f.stack[-1])


_AFTER_LOOP = 0 if VERSION < (3, 12) else 1 if VERSION < (3, 13) else 2  # instructions that only drop the finished iterator


@op()
def op_FOR_ITER(f: Frame, i: Instr) -> None:
    m, it = f.machine, f.stack[-1]
    try:
        value = pr.advance(m, it)
    except Raised as r:
        if not isinstance(r.exc, StopIteration):
            raise
        m.loops.pop(id(it), None)
        f.stack.pop()
        f.index = i.value + _AFTER_LOOP
        return
    if f is m.frames[0] or (m.later and id(it) in m.world.tracks):
        loop = m.loops.get(id(it))
        if loop is None:
            loop = m.loops[id(it)] = Loop(m.frames[0].steps - 1, f is m.frames[0])
        loop.turns += 1
    f.stack.append(value)


@op(since=(3, 12))
def op_END_FOR(f: Frame, i: Instr) -> None:
    f.stack.pop()
    if VERSION < (3, 13):
        f.stack.pop()


@op(since=(3, 12))
def op_END_SEND(f: Frame, i: Instr) -> None:
    del f.stack[-2]


@op()
def op_UNPACK_SEQUENCE(f: Frame, i: Instr) -> None:
    values = f.machine.unpack(_unpacked(f), i.arg)
    f.stack += reversed(values)


def _unpacked(f: Frame) -> Any:
    """The value on top, which is an iterable."""
    value = f.stack.pop()
    if not pr.has_items(f.machine, value):
        raise Raised(TypeError(f"cannot unpack non-iterable {at.NUMBERS.get(type(value), type(value)).__name__} object"))
    return value


@op()
def op_UNPACK_EX(f: Frame, i: Instr) -> None:
    m, before, after, values = f.machine, i.arg & 255, i.arg >> 8, []
    rest = pr.begin(m, _unpacked(f))
    for _ in range(before):
        try:
            values.append(pr.advance(m, rest))
        except Raised as r:
            if not isinstance(r.exc, StopIteration):
                raise
            m.take(r.exc)
            break
    else:
        values += pr.as_list(m, rest)  # which asks an iterator in Python for its iterator
    if len(values) < before + after:
        raise Raised(ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(values)})"))
    end = len(values) - after
    f.stack += reversed([*values[:before], values[before:end], *values[end:]])


# ---------------------------------------------------------------- building


def take(f: Frame, n: int) -> list[Any]:
    if n == 0:
        return []
    out = f.stack[-n:]
    del f.stack[-n:]
    return out  # type: ignore[no-any-return]


@op()
def op_BUILD_TUPLE(f: Frame, i: Instr) -> None:
    f.stack.append(tuple(take(f, i.arg)))


@op()
def op_BUILD_LIST(f: Frame, i: Instr) -> None:
    f.stack.append(take(f, i.arg))


@op()
def op_BUILD_SET(f: Frame, i: Instr) -> None:
    f.stack.append(f.machine.native(set, [take(f, i.arg)], {}))


@op()
def op_BUILD_MAP(f: Frame, i: Instr) -> None:
    items = take(f, 2 * i.arg)
    f.stack.append(f.machine.native(dict, [list(zip(items[::2], items[1::2], strict=True))], {}, store=True))


@op()
def op_BUILD_CONST_KEY_MAP(f: Frame, i: Instr) -> None:
    keys = f.stack.pop()
    f.stack.append(dict(zip(keys, take(f, i.arg))))


@op()
def op_BUILD_STRING(f: Frame, i: Instr) -> None:
    f.stack.append("".join(take(f, i.arg)))


@op()
def op_BUILD_SLICE(f: Frame, i: Instr) -> None:
    f.stack.append(slice(*take(f, i.arg)))


@op("LIST_TO_TUPLE", until=(3, 11))
def op_list_to_tuple(f: Frame, i: Instr) -> None:
    f.stack[-1] = tuple(f.machine.listed(f.stack[-1]))


def _filled(f: Frame, container: Any) -> Any:
    """The container that a display or comprehension is making. One that was begun before a break is an object from outside."""
    track = f.machine.world.tracks.get(id(container))
    return container if track is None else f.machine.world.change(track)


@op()
def op_LIST_APPEND(f: Frame, i: Instr) -> None:
    value = f.stack.pop()
    _filled(f, f.stack[-i.arg]).append(value)


@op()
def op_SET_ADD(f: Frame, i: Instr) -> None:
    value = f.stack.pop()
    f.machine.native(set.add, [_filled(f, f.stack[-i.arg]), value], {}, store=True)


@op()
def op_MAP_ADD(f: Frame, i: Instr) -> None:
    value, key = f.stack.pop(), f.stack.pop()
    f.machine.native(operator.setitem, [_filled(f, f.stack[-i.arg]), key, value], {}, store=True)


@op()
def op_LIST_EXTEND(f: Frame, i: Instr) -> None:
    value = f.stack.pop()
    values = pr.as_list(f.machine, value) if type(value) not in SCALARS else f.machine.native(lambda: [*value], [], {}, plain=True)
    _filled(f, f.stack[-i.arg]).extend(values)


@op()
def op_SET_UPDATE(f: Frame, i: Instr) -> None:
    values = pr.filling(f.machine, f.stack.pop())
    f.machine.native(set.update, [_filled(f, f.stack[-i.arg]), values], {}, store=True)


def _mapped(f: Frame, value: Any, unpack: Callable[[Any], Any]) -> dict[Any, Any]:
    """A mapping that is unpacked; of what is none Python says so before it does anything."""
    if type(value) in SCALARS:
        f.machine.native(unpack, [value], {}, plain=True)
    if not issubclass(type(value), dict) and at.attr_or(f.machine, value, "keys", MISSING) is MISSING:
        f.machine.native(unpack, [type(type(value).__name__, (), {})()], {}, plain=True)
    return f.machine.mapped(value)


@op()
def op_DICT_UPDATE(f: Frame, i: Instr) -> None:
    value = f.stack[-1]
    extra = _mapped(f, value, lambda v: {**v})
    f.machine.native(dict.update, [_filled(f, f.stack[-1 - i.arg]), extra], {}, store=True)
    f.stack.pop()


@op()
def op_DICT_MERGE(f: Frame, i: Instr) -> None:
    fn, value = f.stack[-(3 if VERSION < (3, 13) else 4) - i.arg], f.stack[-1]
    target, extra = _filled(f, f.stack[-1 - i.arg]), _mapped(f, value, lambda v: fn(**v))
    f.stack.pop()
    for key in extra:
        if key in target:
            f.machine.native(lambda: fn(**{key: 0}, **{key: 0}), [], {}, plain=True)  # noqa: B023  (refused before it is called)
    target.update(extra)


# ---------------------------------------------------------------- text


def _escaped(text: str) -> str:
    """What ascii() makes of a repr."""
    return text.encode("ascii", "backslashreplace").decode()


@op("FORMAT_VALUE", until=(3, 12))
def op_format_value(f: Frame, i: Instr) -> None:
    spec = f.stack.pop() if i.arg & 4 else ""
    value = f.stack.pop()
    how = i.arg & 3
    if how:
        value = pr.to_str(f.machine, value, "__str__" if how == 1 else "__repr__")
        if how == 3:
            value = _escaped(value)
    f.stack.append(pr.to_str(f.machine, value, "__format__", spec))


@op(since=(3, 13))
def op_CONVERT_VALUE(f: Frame, i: Instr) -> None:
    text = pr.to_str(f.machine, f.stack[-1], "__str__" if i.arg == 1 else "__repr__")
    f.stack[-1] = _escaped(text) if i.arg == 3 else text


@op(since=(3, 13))
def op_FORMAT_SIMPLE(f: Frame, i: Instr) -> None:
    f.stack[-1] = pr.to_str(f.machine, f.stack[-1], "__format__")


@op(since=(3, 13))
def op_FORMAT_WITH_SPEC(f: Frame, i: Instr) -> None:
    spec = f.stack.pop()
    f.stack[-1] = pr.to_str(f.machine, f.stack[-1], "__format__", spec)


# ---------------------------------------------------------------- match


@op()
def op_GET_LEN(f: Frame, i: Instr) -> None:
    f.stack.append(pr.length(f.machine, f.stack[-1]))


_IS_SEQUENCE, _IS_MAPPING, _MATCHES_ITSELF = 1 << 5, 1 << 6, 1 << 22  # flags of classes: what a pattern asks of them


def _has_flag(f: Frame, flag: int) -> bool:
    cls: type = f.machine.call(type, [f.stack[-1]], {})
    return bool(cls.__flags__ & flag)


@op()
def op_MATCH_MAPPING(f: Frame, i: Instr) -> None:
    f.stack.append(_has_flag(f, _IS_MAPPING))


@op()
def op_MATCH_SEQUENCE(f: Frame, i: Instr) -> None:
    f.stack.append(_has_flag(f, _IS_SEQUENCE))


@op()
def op_MATCH_KEYS(f: Frame, i: Instr) -> None:
    m, subject, keys = f.machine, f.stack[-2], f.stack[-1]
    found: list[Any] = []
    nothing = object()
    get = at.load_attr(m, subject, "get") if keys else None
    for k, key in enumerate(keys):
        if any(type(key) in SCALARS and type(other) in SCALARS and key == other for other in keys[:k]):
            raise Raised(ValueError(f"mapping pattern checks duplicate key ({key!r})"))
        value = m.call(get, [key, nothing], {})
        if value is nothing:
            f.stack.append(None)
            return
        found.append(value)
    f.stack.append(tuple(found))


def _places(m: Machine, cls: type, given: int) -> tuple[str, ...] | None:
    """The attributes that so many patterns without a name are about; None: the object itself, as of a number."""
    order = at.attr_or(m, cls, "__match_args__", NULL)
    itself = order is NULL and bool(cls.__flags__ & _MATCHES_ITSELF)
    if order is NULL:
        order = ()
    elif type(order) is not tuple:
        raise Raised(TypeError(f"{cls.__name__}.__match_args__ must be a tuple (got {type(order).__name__})"))
    allowed = 1 if itself else len(order)
    if allowed < given:
        raise Raised(TypeError(f"{cls.__name__}() accepts {allowed} positional sub-pattern{'s' * (allowed != 1)} ({given} given)"))
    return None if itself else order[:given]


@op()
def op_MATCH_CLASS(f: Frame, i: Instr) -> None:
    m = f.machine
    names, cls, subject = f.stack.pop(), f.stack.pop(), f.stack.pop()
    if not issubclass(type(cls), type):
        raise Raised(TypeError("called match pattern must be a class"))
    if not m.call(isinstance, [subject, cls], {}):
        f.stack.append(None)
        return
    places = _places(m, cls, i.arg) if i.arg else ()
    out = [subject] if places is None else []
    seen: set[str] = set()
    for name in (*(places or ()), *names):
        if type(name) is not str:
            raise Raised(TypeError(f"__match_args__ elements must be strings (got {type(name).__name__})"))
        if name in seen:
            raise Raised(TypeError(f"{cls.__name__}() got multiple sub-patterns for attribute {name!r}"))
        seen.add(name)
        value = at.attr_or(m, subject, name, NULL)
        if value is NULL:
            f.stack.append(None)
            return
        out.append(value)
    f.stack.append(tuple(out))
