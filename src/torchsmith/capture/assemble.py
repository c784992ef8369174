"""Code objects for frames that are split: one instruction run by the interpreter, and the rest of a frame from its middle on.

In: a function's code object, an instruction of it and what the frame holds there (slots, stack). Out: code objects whose parameters
are that state: `step` runs the instruction and returns the state behind it, `rest` runs on to the end. File name, lines and columns
are the user's, so that tracebacks, warnings and frames look as they would without us.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType

from .bytecode import _CACHES, VERSION, Code, Instr, decode

HANDLED = "handled exception"  # the state's last value where an exception is being handled

# ---------------------------------------------------------------- what instructions do to the stack

_n = int
# How many entries of the stack an instruction touches. An instruction without a row is not run alone.
TOUCHES: dict[str, int | Callable[[int], int]] = {
    "CALL": lambda n: n + 2, "CALL_KW": lambda n: n + 3, "CALL_FUNCTION_EX": lambda n: 3 + (n & 1), "LOAD_ATTR": 1, "LOAD_METHOD": 1,
    "LOAD_GLOBAL": 0, "LOAD_NAME": 0, "LOAD_DEREF": 0, "LOAD_SUPER_ATTR": 3, "STORE_ATTR": 2, "DELETE_ATTR": 1, "BINARY_SUBSCR": 2, "BINARY_SLICE": 3,
    "STORE_SUBSCR": 3, "STORE_SLICE": 4, "DELETE_SUBSCR": 2, "BINARY_OP": 2, "COMPARE_OP": 2, "IS_OP": 2, "CONTAINS_OP": 2,
    "UNARY_NEGATIVE": 1, "UNARY_POSITIVE": 1, "UNARY_INVERT": 1, "UNARY_NOT": 1, "TO_BOOL": 1, "GET_ITER": 1, "UNPACK_SEQUENCE": 1,
    "UNPACK_EX": 1, "BUILD_TUPLE": _n, "BUILD_LIST": _n, "BUILD_SET": _n, "BUILD_MAP": lambda n: 2 * n, "BUILD_STRING": _n,
    "BUILD_CONST_KEY_MAP": lambda n: n + 1, "BUILD_SLICE": _n, "LIST_TO_TUPLE": 1, "LIST_APPEND": lambda n: n + 1, "SET_ADD": lambda n: n + 1,
    "MAP_ADD": lambda n: n + 2, "LIST_EXTEND": lambda n: n + 1, "SET_UPDATE": lambda n: n + 1, "DICT_UPDATE": lambda n: n + 1,
    "DICT_MERGE": lambda n: n + 3, "FORMAT_VALUE": lambda n: 1 + bool(n & 4), "CONVERT_VALUE": 1, "FORMAT_SIMPLE": 1, "FORMAT_WITH_SPEC": 2,
    "LOAD_BUILD_CLASS": 0, "IMPORT_NAME": 2, "IMPORT_FROM": 1, "RAISE_VARARGS": _n, "RERAISE": 1, "CHECK_EXC_MATCH": 2, "BEFORE_WITH": 1,
    "WITH_EXCEPT_START": 4, "GET_LEN": 1, "MATCH_MAPPING": 1, "MATCH_SEQUENCE": 1, "MATCH_KEYS": 2, "MATCH_CLASS": 3, "STORE_GLOBAL": 1,
    "DELETE_GLOBAL": 0, "STORE_DEREF": 1, "DELETE_DEREF": 0, "LOAD_FAST": 0, "LOAD_FAST_CHECK": 0, "DELETE_FAST": 0, "POP_TOP": 1, "FOR_ITER": 1,
    "POP_JUMP_FORWARD_IF_TRUE": 1, "POP_JUMP_BACKWARD_IF_TRUE": 1, "POP_JUMP_IF_TRUE": 1, "POP_JUMP_FORWARD_IF_FALSE": 1,
    "POP_JUMP_BACKWARD_IF_FALSE": 1, "POP_JUMP_IF_FALSE": 1, "JUMP_IF_TRUE_OR_POP": 1, "JUMP_IF_FALSE_OR_POP": 1, "MAKE_FUNCTION": 4,
    "CHECK_EG_MATCH": 2, "SET_FUNCTION_ATTRIBUTE": 2, "CALL_INTRINSIC_1": 1,
}  # fmt: skip
_SLOT = {"LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_FAST", "LOAD_FAST_CHECK", "DELETE_FAST"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_ALWAYS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
_READS = {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "DELETE_FAST"}
_JUMPS = {dis.opname[i] for i in dis.hasjrel}
AFTER_LOOP = 0 if VERSION < (3, 12) else 1 if VERSION < (3, 13) else 2  # instructions that only drop the finished iterator
# Names by which a program looks at its own frame: a function that has one is not split.
_BUILTIN_READERS = frozenset({"locals", "vars", "dir", "eval", "exec", "breakpoint"})
_FRAME_READERS = frozenset({"_getframe", "currentframe", "set_trace"})


def frame_reader(code: CodeType) -> str | None:
    """The name by which the code looks at its own frame; None: it does not. `vars` and `dir` of an object do not, nor do methods `eval`."""
    names = set(code.co_names)
    if names.isdisjoint(_BUILTIN_READERS | _FRAME_READERS):
        return None
    readers = _BUILTIN_READERS | _FRAME_READERS if "builtins" in names else _FRAME_READERS
    instrs = decode(code).instrs
    for k, ins in enumerate(instrs):
        if ins.name in ("LOAD_GLOBAL", "LOAD_NAME") and ins.value in _BUILTIN_READERS:
            has_argument = instrs[k + 1].name.startswith("LOAD_")
            if not (has_argument and ins.value in ("vars", "dir")):
                return str(ins.value)
        if ins.name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and ins.value in readers:
            return str(ins.value)
    return None


def touches(ins: Instr) -> int | None:
    """How many entries on top of the stack `ins` reads; None: it cannot be run alone."""
    row = TOUCHES.get(ins.name)
    if row is None or (ins.name == "DICT_MERGE" and VERSION >= (3, 13)):  # there a null stands between what it reads
        return None
    if ins.name == "MAKE_FUNCTION":
        return 1 + bin(ins.arg & 15).count("1") if VERSION < (3, 13) else 1
    return row if isinstance(row, int) else row(ins.arg)


def may_be_super(code: CodeType, ins: Instr) -> bool:
    """Could this be `super()`? It reads its frame: the first argument, and the class from a free variable."""
    return ins.name == "CALL" and ins.arg == 0 and "super" in code.co_names and "__class__" in code.co_freevars


def pushes(ins: Instr, *, jumps: bool) -> tuple[bool, ...]:
    """What stands on the stack afterwards in place of what was touched: True for a value, False for a null."""
    n = touches(ins)
    assert n is not None
    with_null = (False, True) if VERSION < (3, 13) else (True, False)
    if ins.name == "LOAD_METHOD" or (ins.name in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and VERSION >= (3, 12) and ins.arg & 1):
        return with_null
    if ins.name == "LOAD_GLOBAL":
        return with_null if ins.arg & 1 else (True,)
    if ins.name == "FOR_ITER":
        return () if jumps else (True, True)
    if ins.name.startswith("POP_JUMP"):
        return ()
    if ins.name.startswith("JUMP_IF"):
        return (True,) if jumps else ()
    if ins.name in _ENDS:
        return ()
    if ins.name.startswith("CALL") and ins.name != "CALL_INTRINSIC_1":
        return (True,)  # 3.11 counts part of a call's effect at PRECALL
    return (True,) * (n + dis.stack_effect(dis.opmap[ins.name], ins.arg if dis.opmap[ins.name] >= dis.HAVE_ARGUMENT else None, jump=False))


# ---------------------------------------------------------------- liveness


@cache
def live(code: CodeType) -> tuple[frozenset[int], ...]:
    """For each instruction, the slots whose values may still be read from there on. Cells always are; free variables are not listed."""
    c = decode(code)
    n_free = c.size - len(code.co_freevars)
    cells = {c.names.index(name) for name in code.co_cellvars}
    if "super" in code.co_names and "__class__" in code.co_freevars:
        cells.add(0)  # super() reads the first argument
    after: list[set[int]] = [set() for _ in c.instrs]
    changed = True
    while changed:
        changed = False
        for ins in reversed(c.instrs):
            now = set(cells)
            if ins.name not in _ENDS and ins.name not in _ALWAYS and ins.index + 1 < len(c.instrs):
                now |= after[ins.index + 1]
            if ins.name in _JUMPS:
                now |= after[min(ins.value, len(c.instrs) - 1)]
            reads, writes = _slots_of(ins)
            now -= set(writes)
            now |= set(reads)
            row = c.handlers[ins.index]
            if row is not None:
                now |= after[row[0]]
            if now != after[ins.index]:
                after[ins.index] = now
                changed = True
    return tuple(frozenset(s for s in slots if s < n_free) for slots in after)


@cache
def overwritten(code: CodeType) -> tuple[frozenset[int], ...]:
    """For each instruction, the slots that it, or one that may follow, gives another value."""
    c = decode(code)
    found: list[set[int]] = [set() for _ in c.instrs]
    changed = True
    while changed:
        changed = False
        for ins in reversed(c.instrs):
            ways = [ins.index + 1] if ins.name not in _ENDS and ins.name not in _ALWAYS else []
            ways += [ins.value] if ins.name in _JUMPS else []
            row = c.handlers[ins.index]
            ways += [] if row is None else [row[0]]
            now = set(_slots_of(ins)[1]).union(*(found[k] for k in ways if k < len(found)))
            if now != found[ins.index]:
                found[ins.index] = now
                changed = True
    return tuple(map(frozenset, found))


@cache
def unbound(code: CodeType) -> tuple[frozenset[int], ...]:
    """For each instruction, the slots that may have no value in front of it. Cells always have one."""
    c = decode(code)
    n_free = c.size - len(code.co_freevars)
    first = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    before: list[set[int] | None] = [None] * len(c.instrs)  # None: nothing leads there
    before[0] = {s for s in range(first, n_free) if c.names[s] not in code.co_cellvars}
    waiting = [0]
    while waiting:
        ins = c.instrs[waiting.pop()]
        now = before[ins.index] or set()
        reads, writes = _slots_of(ins)
        after = (now - {*reads, *writes}) | ({ins.arg} if ins.name in ("DELETE_FAST", "LOAD_FAST_AND_CLEAR") else set())
        ways = [(ins.index + 1, after)] if ins.name not in _ENDS and ins.name not in _ALWAYS else []
        ways += [(ins.value, after)] if ins.name in _JUMPS else []
        row = c.handlers[ins.index]
        ways += [] if row is None else [(row[0], now | after)]
        for target, slots in ways:
            known = before[target] if target < len(before) else slots
            if known is None or not slots <= known:
                before[target] = slots | (known or set())
                waiting.append(target)
    return tuple(frozenset(slots or ()) for slots in before)


def _loops(instrs: Sequence[Instr]) -> list[range]:
    """The instructions of each loop."""
    return [range(end.value, end.index + 1) for end in instrs if end.name in _JUMPS and end.value <= end.index]


@cache
def counters(code: CodeType) -> tuple[frozenset[int], ...]:
    """For each instruction, the slots that a loop around it computes from themselves: `i += 1`. They differ from turn to turn."""
    instrs = decode(code).instrs
    found: list[set[int]] = [set() for _ in instrs]
    for turn in _loops(instrs):
        own = {s for k in turn if instrs[k - 1].name == "BINARY_OP" for s in _slots_of(instrs[k])[1][:1] if _reads(instrs[max(k - 3, 0) : k - 1], s)}
        for k in turn:
            found[k] |= own
    return tuple(map(frozenset, found))


@cache
def carried(code: CodeType) -> tuple[frozenset[int], ...]:
    """For each instruction, other slots that a loop around it hands from turn to turn."""
    instrs, alive = decode(code).instrs, live(code)
    found: list[set[int]] = [set() for _ in instrs]
    for turn in _loops(instrs):
        own = {s for k in turn for s in _slots_of(instrs[k])[1]} & alive[turn[0]]
        for k in turn:
            found[k] |= own
    return tuple(frozenset(own - counted) for own, counted in zip(found, counters(code), strict=True))


def _reads(instrs: Sequence[Instr], slot: int) -> bool:
    return any(slot in _slots_of(ins)[0] for ins in instrs)


def _slots_of(ins: Instr) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if ins.name in _READS:
        return (ins.arg,), ()
    if ins.name == "STORE_FAST":
        return (), (ins.arg,)
    if ins.name == "LOAD_FAST_LOAD_FAST":
        return (ins.arg >> 4, ins.arg & 15), ()
    if ins.name == "STORE_FAST_LOAD_FAST":
        return ((ins.arg & 15,) if ins.arg >> 4 != ins.arg & 15 else ()), (ins.arg >> 4,)
    if ins.name == "STORE_FAST_STORE_FAST":
        return (), (ins.arg >> 4, ins.arg & 15)
    return (), ()


# ---------------------------------------------------------------- encoding


def _units(name: str, arg: int = 0) -> bytes:
    """One instruction with its EXTENDED_ARGs and empty caches."""
    op = dis.opmap[name]
    out = bytearray()
    for shift in (24, 16, 8):
        if arg >> shift:
            out += bytes((dis.opmap["EXTENDED_ARG"], (arg >> shift) & 255))
    out += bytes((op, arg & 255))
    return bytes(out + b"\0\0" * _CACHES[op])


def _varint(n: int) -> bytes:
    out = bytearray()
    while n >= 64:
        out.append(64 | n & 63)
        n >>= 6
    out.append(n)
    return bytes(out)


def _svarint(n: int) -> bytes:
    return _varint((-n << 1) | 1 if n < 0 else n << 1)


def _lines(code: CodeType, ins: Instr, units: int) -> bytes:
    """A line table that says of every unit what the code's own says of `ins`."""
    where = list(code.co_positions())[_own_offset(code, ins) // 2]
    line, end, col, end_col = where
    out = bytearray()
    first = True
    for start in range(0, units, 8):
        n = min(8, units - start)
        delta = (line or code.co_firstlineno) - code.co_firstlineno if first else 0
        if end is None or col is None or end_col is None or line is None:
            out += bytes((0x80 | 13 << 3 | n - 1,)) + _svarint(delta)
        else:
            out += bytes((0x80 | 14 << 3 | n - 1,)) + _svarint(delta) + _varint(end - line) + _varint(col + 1) + _varint(end_col + 1)
        first = False
    return bytes(out)


def _own_offset(code: CodeType, ins: Instr) -> int:
    """Where the instruction itself stands, behind its EXTENDED_ARGs."""
    raw, at = code.co_code, ins.offset
    while raw[at] == dis.opmap["EXTENDED_ARG"]:
        at += 2
    return at


def _entries(code: CodeType, shift: int) -> bytes:
    """The exception table with everything `shift` units later."""

    def number(n: int, first: bool = False) -> bytes:
        parts = [n & 63]
        while n := n >> 6:
            parts.append(n & 63 | 64)
        parts.reverse()
        if first:
            parts[0] |= 128
        return bytes(parts)

    out = b""
    for e in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        out += number(e.start // 2 + shift, True) + number((e.end - e.start) // 2) + number(e.target // 2 + shift)
        out += number(e.depth << 1 | e.lasti)
    return out


def state_names(code: CodeType, slots: Sequence[int], stack: Sequence[bool], handled: bool) -> tuple[str, ...]:
    """Names of the state's values: slots by their variable, what is on the stack by its depth."""
    names = decode(code).names
    return (*(names[s] for s in slots), *(f"stack {k}" for k, real in enumerate(stack) if real), *((HANDLED,) if handled else ()))


def bare(code: CodeType, names: tuple[str, ...]) -> CodeType:
    """A code object that has nothing but parameters, for who asks for a function's signature."""
    return _with_parameters(code, names, code.co_freevars)


def _with_parameters(code: CodeType, names: tuple[str, ...], free: tuple[str, ...]) -> CodeType:
    return code.replace(
        co_argcount=len(names), co_posonlyargcount=0, co_kwonlyargcount=0, co_nlocals=len(names), co_varnames=names, co_cellvars=(),
        co_freevars=free, co_flags=3,
    )  # fmt: skip


# ---------------------------------------------------------------- one instruction


def step(
    code: CodeType, ins: Instr, slots: Sequence[int], stack: Sequence[bool], handled: bool, kept: Sequence[int], kw_names: int | None,
    kept_by_jump: Sequence[int] = (),
) -> CodeType:  # fmt: skip
    """Code that takes the state before `ins`, runs it, and returns the state behind it: a tuple, or a list where it jumped.

    kept: the slots that are still of interest afterwards; kept_by_jump: those where it jumped.
    """
    names = state_names(code, slots, stack, handled)
    n = touches(ins)
    assert n is not None
    place = {s: k for k, s in enumerate(slots)}
    unbound: tuple[str, ...] = ()
    free_name: tuple[str, ...] = ()
    body = _units("RESUME")  # frames have lines, and stand in tracebacks, from here on
    free = decode(code).size - len(code.co_freevars)
    arg, name = ins.arg, ins.name
    if name in _SLOT:
        if arg >= free:
            free_name = (decode(code).names[arg],)
            arg = len(names)
            body = _units("COPY_FREE_VARS", 1) + body
        else:
            arg = place.get(arg, len(names))
            if arg == len(names):  # it has no value: a variable that is no parameter
                unbound = (decode(code).names[ins.arg],)
                name = "LOAD_FAST_CHECK" if name == "LOAD_FAST" and VERSION >= (3, 12) else name
    if may_be_super(code, ins):
        free_name, body = ("__class__",), _units("COPY_FREE_VARS", 1) + body
    at, depth = len(slots), len(stack) - n
    below = b"".join(_units("LOAD_FAST", at + k) for k in range(sum(stack[:depth])))
    is_jump = ins.name in _JUMPS
    if not is_jump:
        body += _loaded(place, kept) + below
    at += sum(stack[:depth])
    for real in stack[depth:]:
        body += _units("LOAD_FAST", at) if real else _units("PUSH_NULL")
        at += real
    exc = _units("LOAD_FAST", at) if handled else b""
    size = max(len(kept), len(kept_by_jump)) + sum(stack[:depth]) + handled
    if name == "LOAD_METHOD":
        name = "LOAD_ATTR"
    elif (name in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and VERSION >= (3, 12)) or name == "LOAD_GLOBAL":
        arg &= ~1
    if name == "LOAD_SUPER_ATTR":
        arg |= 2  # with the class and the object that lie on the stack: super() would look for them in this frame
    if name == "RERAISE":
        arg = 0  # the line is in the traceback already
    if name == "CALL" and VERSION < (3, 13):
        if kw_names is not None:
            body += _units("KW_NAMES", kw_names)
        if VERSION < (3, 12):
            body += _units("PRECALL", arg)
    on, off = sum(pushes(ins, jumps=False)), sum(pushes(ins, jumps=True))
    first = len(names) + len(unbound)  # of the variables in which what the instruction pushed is kept
    pushed = tuple(f"pushed {k}" for k in range(max(on, off))) if is_jump else ()

    def handed_over(build: str, slots: Sequence[int], n: int) -> bytes:
        """The state where the instruction jumped, or did not, and pushed `n` values."""
        out = b"".join(_units("STORE_FAST", first + k) for k in reversed(range(n))) + _loaded(place, slots) + below
        out += b"".join(_units("LOAD_FAST", first + k) for k in range(n))
        return out + exc + _units(build, len(slots) + sum(stack[:depth]) + n + handled) + _units("RETURN_VALUE")

    if is_jump:
        name, onward = name.replace("_BACKWARD_", "_FORWARD_"), handed_over("BUILD_TUPLE", kept, on)
        body += (_units("TO_BOOL") if VERSION >= (3, 13) and name != "FOR_ITER" else b"") + _units(name, len(onward) // 2) + onward
        if name == "FOR_ITER" and VERSION >= (3, 12):
            body += _units("END_FOR") + (_units("POP_TOP") if VERSION >= (3, 13) else b"")
        body += handed_over("BUILD_LIST", kept_by_jump, off)
    else:
        body += _units(name, arg) + exc + _units("BUILD_TUPLE", size + on) + _units("RETURN_VALUE")
    return _with_parameters(code, names, free_name).replace(
        co_varnames=(*names, *unbound, *pushed), co_nlocals=first + len(pushed), co_code=body, co_stacksize=size + n + on + 4, co_exceptiontable=b"", co_linetable=_lines(code, ins, len(body) // 2)
    )


def _loaded(place: dict[int, int], slots: Sequence[int]) -> bytes:
    return b"".join(_units("LOAD_FAST", place[s]) for s in slots)


# ---------------------------------------------------------------- the rest of the frame


def rest(code: CodeType, index: int, slots: Sequence[int], stack: Sequence[bool], values: Sequence[object]) -> CodeType:
    """Code that runs a frame from instruction `index` on. Its parameters are all slots but free variables, in order (unbound ones:
    anything); `values` are the stack's, constants of this one call."""
    c: Code = decode(code)
    free = c.size - len(code.co_freevars)
    names = tuple(c.names[:free])
    prologue = _units("COPY_FREE_VARS", len(code.co_freevars)) if code.co_freevars else b""
    prologue += b"".join(_units("DELETE_FAST", s) for s in range(free) if s not in slots)
    at = len(code.co_consts)
    for real in stack:
        prologue += _units("LOAD_CONST", at) if real else _units("PUSH_NULL")
        at += real
    prologue += _units("JUMP_FORWARD", c.instrs[index].offset // 2)
    n = len(prologue) // 2
    empty = b"".join(bytes((0x80 | 15 << 3 | min(8, n - k) - 1,)) for k in range(0, n, 8))
    return _with_parameters(code, names, code.co_freevars).replace(
        co_code=prologue + code.co_code, co_stacksize=code.co_stacksize + len(stack) + 2, co_exceptiontable=_entries(code, n),
        co_linetable=empty + code.co_linetable, co_consts=(*code.co_consts, *values),
    )  # fmt: skip
