"""Code objects as lists of decoded instructions: one table row per CPython version says how an argument is read.

In: types.CodeType. Out: Code (cached): instructions with jump targets as indices, exception handlers by instruction.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

from ..codes import Unsupported

if TYPE_CHECKING:
    from .frame import Frame

VERSION = sys.version_info[:2]
Handler = Callable[["Frame", "Instr"], "tuple[str, Any] | None"]
HANDLERS: dict[str, Handler] = {}


class Instr:
    """One instruction: `arg` raw, `value` what it means (a name, a constant, an index of another instruction)."""

    __slots__ = ("arg", "handler", "index", "line", "name", "offset", "value")

    def __init__(self, name: str, arg: int, value: Any, line: int, offset: int, index: int) -> None:
        self.name, self.arg, self.value, self.line, self.offset, self.index = name, arg, value, line, offset, index
        self.handler = HANDLERS.get(name, unknown)

    def __repr__(self) -> str:
        return f"{self.offset} {self.name} {self.arg} {self.value!r} (line {self.line})"


class Code:
    """A decoded code object, which it does not keep: whoever runs a frame has the function."""

    __slots__ = ("flags", "handlers", "instrs", "names", "ref", "size")

    def __init__(self, code: CodeType) -> None:
        number = id(code)
        self.ref = weakref.ref(code, lambda gone: _BY_ID.pop(number, None))
        self.flags = code.co_flags
        self.instrs = _decode(code)
        by_offset = {i.offset: i.index for i in self.instrs}
        self.size, self.names = _slots(code)
        self.handlers = _handlers(code, self.instrs, by_offset)


    @property
    def code(self) -> CodeType:
        code = self.ref()
        assert code is not None
        return code


_BY_ID: dict[int, Code] = {}


def decode(code: CodeType) -> Code:
    """The decoded form; cached as long as the code object lives."""
    got = _BY_ID.get(id(code))
    if got is None or got.ref() is not code:
        got = _BY_ID[id(code)] = Code(code)
    return got


def op(*names: str, since: tuple[int, int] = (3, 11), until: tuple[int, int] = (3, 99)) -> Callable[[Handler], Handler]:
    """Register a handler called op_<NAME>, for versions since <= v <= until; names beyond the first share it."""

    def register(handler: Handler) -> Handler:
        own = names if names else (handler.__name__.removeprefix("op_"),)
        if not since <= VERSION <= until:
            return handler
        if not any(name in dis.opmap for name in own):
            raise ValueError(f"{own} are no opcodes of Python {VERSION}")
        for name in own:
            if name in HANDLERS:
                raise ValueError(f"{name} has two handlers")
            HANDLERS[name] = handler
        return handler

    return register


def unknown(frame: Frame, ins: Instr) -> NoReturn:
    raise Unsupported("CAP002", at=frame.machine.loc(), detail=ins.name)


_JREL = set(dis.hasjrel)
_NAMED = set(dis.hasname)
_CONST = set(dis.hasconst)
_BACK = {op for name, op in dis.opmap.items() if "BACKWARD" in name}
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_SHIFT = {"LOAD_GLOBAL": 1} | ({"LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2} if VERSION >= (3, 12) else {})
_CMP = dis.cmp_op


def _caches() -> list[int]:
    table = dis._inline_cache_entries  # type: ignore[attr-defined]
    if isinstance(table, dict):  # by name since 3.13
        return [table.get(dis.opname[i], 0) for i in range(256)]
    return list(table) + [0] * (256 - len(table))


_CACHES = _caches()
_SKIP = {dis.opmap[n] for n in ("CACHE",) if n in dis.opmap}


def _compare_value(arg: int) -> str:
    shift = {(3, 11): 0, (3, 12): 4}.get(VERSION, 5)
    return str(_CMP[arg >> shift])


def _decode(code: CodeType) -> list[Instr]:
    raw = code.co_code
    lines: dict[int, int] = {}
    for start, end, line in code.co_lines():
        for offset in range(start, end, 2):
            lines[offset] = line or code.co_firstlineno
    found: list[tuple[int, int, int, int]] = []  # offset of first unit, op, arg, offset after caches
    i, extended, first = 0, 0, -1
    size = len(raw)
    while i < size:
        opcode, arg = raw[i], raw[i + 1] | extended
        start = i if first < 0 else first
        i += 2
        if opcode == _EXTENDED:
            extended, first = arg << 8, start
            continue
        extended, first = 0, -1
        own = i - 2
        i += 2 * _CACHES[opcode]
        if opcode in _SKIP:
            continue
        found.append((start, opcode, arg, i))
        if own != start:
            lines[start] = lines.get(own, code.co_firstlineno)
    index_of = {start: n for n, (start, _, _, _) in enumerate(found)}
    names, consts = code.co_names, code.co_consts
    out: list[Instr] = []
    for n, (start, opcode, arg, after) in enumerate(found):
        name = dis.opname[opcode]
        value: Any = arg
        if opcode in _JREL:
            value = index_of[after - 2 * arg if opcode in _BACK else after + 2 * arg]
        elif name in _SHIFT:
            value = names[arg >> _SHIFT[name]]
        elif opcode in _NAMED:
            value = names[arg]
        elif opcode in _CONST:
            value = consts[arg]
        elif name == "COMPARE_OP":
            value = _compare_value(arg)
        out.append(Instr(name, arg, value, lines.get(start, code.co_firstlineno), start, n))
    return out


def _slots(code: CodeType) -> tuple[int, list[str]]:
    """The frame's fast slots: locals, then cells that are not also locals, then free variables."""
    names = list(code.co_varnames) + [c for c in code.co_cellvars if c not in code.co_varnames] + list(code.co_freevars)
    return len(names), names


def _handlers(code: CodeType, instrs: list[Instr], by_offset: dict[int, int]) -> list[tuple[int, int, bool] | None]:
    """For each instruction, where an exception goes: (index, stack depth, push the raising offset) or None."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    out: list[tuple[int, int, bool] | None] = [None] * len(instrs)
    for e in entries:
        for ins in instrs:
            if e.start <= ins.offset < e.end:
                out[ins.index] = (by_offset[e.target], e.depth, e.lasti)
    return out
