"""Read back what text.py and print.py print: expressions and Programs (no torch).

In: text. Out: the same Expr (the very node) or an equal Program; ParseError names line and column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from . import dtype as dt
from .dtype import DTYPES, DType
from .expr import Axis, Cast, Const, Expr, Fold, Load, Op, Sym, Var
from .ops import OPS
from .program import (
    Bind,
    BufArg,
    Buffer,
    Check,
    Cond,
    Enum,
    Extern,
    Fresh,
    InputResult,
    Layout,
    Program,
    Repeat,
    Result,
    SizeResult,
    Stage,
    Store,
    Symbol,
    ViewResult,
)
from .target import CPU, target_named
from .text import INFIX, default_dtype

TOKEN = re.compile(
    r"""\s*(?:(?P<number>-?(?:\d+\.(?!\.)\d*(?:e[+-]?\d+)?|\d+(?:e[+-]?\d+)?|inf\b|nan\b))
        |(?P<name>[A-Za-z_]\w*)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<punct>//|\.\.|<-|->|[-+*%$@#&<>=:;,.(){}\[\]]))""",
    re.VERBOSE,
)
NAMES = {sign: name for name, sign in INFIX.items()}


class ParseError(Exception):
    """The text is not what the printer prints."""


class Reader:
    """Tokens of one line, left to right."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.line, self.at = text, line, 0
        self.named: dict[str, Expr] = {}
        self.kind, self.token = "", ""
        self._end = 0
        self.next()

    def next(self) -> str:
        """The current token; moves on."""
        was = self.token
        self.at = self._end
        match = TOKEN.match(self.text, self._end)
        if match is None:
            if self.text[self._end :].strip():
                raise self.wrong("a token")
            self.kind, self.token = "end", ""
            return was
        self._end = match.end()
        self.kind = str(match.lastgroup)
        self.token = match.group(self.kind)
        return was

    def wrong(self, wanted: str) -> ParseError:
        return ParseError(f"line {self.line}, column {self.at + 1}: expected {wanted}, found {self.token or 'the end'!r} in {self.text!r}")

    def is_next(self, token: str) -> bool:
        return self.token == token and self.kind in ("punct", "name")

    def take(self, token: str) -> bool:
        if self.is_next(token):
            self.next()
            return True
        return False

    def need(self, token: str) -> None:
        if not self.take(token):
            raise self.wrong(repr(token))

    def name(self) -> str:
        if self.kind != "name":
            raise self.wrong("a name")
        return self.next()

    def whole(self) -> int:
        if self.kind != "number":
            raise self.wrong("a number")
        return int(self.next())

    def string(self) -> str:
        if self.kind != "text":
            raise self.wrong("a string")
        return str(json.loads(self.next()))

    def json(self) -> Any:
        """A JSON value starting here."""
        value, end = json.JSONDecoder().raw_decode(self.text, self.at + len(self.text[self.at :]) - len(self.text[self.at :].lstrip()))
        self._end = end
        self.next()
        return value

    def dtype(self) -> DType:
        name = self.name()
        if name not in DTYPES:
            raise self.wrong(f"a dtype instead of {name}")
        return DTYPES[name]

    def done(self) -> None:
        if self.kind != "end":
            raise self.wrong("the end")

    # ------------------------------------------------------------ expressions
    def expr(self) -> Expr:
        if self.is_next("{"):
            self._definitions()
        return self.sum() if self.is_next("(") else self.atom()

    def _definitions(self) -> None:
        self.next()
        while True:
            self.need("@")
            name = self.next()
            self.need("=")
            self.named[name] = self.expr()
            if not self.take(";"):
                break
        self.need("}")

    def sum(self) -> Expr:
        """( a sign b ): sums may chain to the left."""
        self.need("(")
        left = self.expr()
        while not self.is_next(")"):
            if self.kind == "number" and self.token[0] == "-":
                raise self.wrong("an operator")
            sign = self.next()
            if sign not in NAMES:
                raise self.wrong("an operator")
            left = Op(NAMES[sign], dt.index, (left, self.expr()))
        self.need(")")
        return left

    def exprs(self, end: str) -> tuple[Expr, ...]:
        """Comma-separated expressions up to `end` or ";" (not taken)."""
        found = []
        while not (self.is_next(end) or self.is_next(";") or self.is_next("if")):
            found.append(self.expr())
            if not self.take(","):
                break
        return tuple(found)

    def bracket(self) -> tuple[Expr, ...]:
        self.need("[")
        found = self.exprs("]")
        self.need("]")
        return found

    def atom(self) -> Expr:
        if self.kind == "number":
            return self.number()
        if self.take("$"):
            name = self.next()
            return Sym(name, self.dtype() if self.take(":") else dt.index)
        if self.take("%"):
            name = self.name()
            self.need(":")
            return Var(name, self.dtype())
        if self.take("@"):
            return self.named[self.next()]
        name = self.name()
        if name in ("true", "false"):
            return Const(dt.bool_, name == "true")
        if name == "fold" and self.is_next("."):
            return self.fold()
        given = self.dtype() if self.take(":") else None
        if self.take("("):
            args = self.exprs(")")
            self.need(")")
            if name in OPS:
                return Op(name, given or default_dtype(name, args), args)
            if name in DTYPES:
                return Cast(DTYPES[name], args[0])
            raise self.wrong(f"an operator instead of {name}")
        return self.load(name, given) if self.is_next("[") and given is not None else Axis(name)

    def number(self) -> Expr:
        text = self.next()
        if not self.take(":"):
            return Const(dt.index, int(text))
        dtype = self.dtype()
        return Const(dtype, float(text) if dtype.is_float else int(text))

    def load(self, name: str, dtype: DType) -> Expr:
        self.need("[")
        index = self.exprs("]")
        mask = other = None
        if self.take("if"):
            mask = self.expr()
            self.need("else")
            other = self.expr()
        self.need("]")
        return Load(name, dtype, index, mask, other)

    def axes(self, end: str) -> tuple[tuple[Axis, Expr], ...]:
        found = []
        while not self.is_next(end):
            axis = Axis(self.name())
            self.need("<")
            found.append((axis, self.expr()))
            if not self.take(","):
                break
        self.need(end)
        return tuple(found)

    def fold(self) -> Expr:
        self.need(".")
        order: Any = self.name()
        prefix = self.name() if self.take("#") else ""
        self.need("{")
        axes = self.axes("}")
        self.need("(")
        init = self.exprs(";")
        self.need(";")
        update = self.exprs(";")
        self.need(";")
        combine = self.exprs(")")
        self.need(")")
        self.need(".")
        return Fold(axes, init, update, combine, order, self.whole(), prefix)


def parse_expr(text: str) -> Expr:
    """The node that prints as `text`."""
    reader = Reader(text)
    found = reader.expr()
    reader.done()
    return found


# ---------------------------------------------------------------- Program
class _Line:
    def __init__(self, number: int, raw: str) -> None:
        body = raw.lstrip(" ")
        self.depth = (len(raw) - len(body)) // 2
        code, sign, loc = body.partition("  # ")
        self.number, self.text, self.loc = number, code, loc if sign else ""

    def reader(self) -> Reader:
        return Reader(self.text, self.number)


class _Lines:
    def __init__(self, text: str) -> None:
        self.lines = [_Line(n, raw) for n, raw in enumerate(text.splitlines(), 1) if raw.strip()]
        self.at = 0

    def peek(self) -> _Line | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def take(self, start: str) -> str:
        """The rest of the next line, which begins with `start`."""
        line = self.peek()
        if line is None or not line.text.startswith(start):
            raise ParseError(f"expected {start!r}, found {'the end' if line is None else f'line {line.number}: {line.text!r}'}")
        self.at += 1
        return line.text[len(start) :].strip()

    def under(self, depth: int) -> list[_Line]:
        """The following lines that are indented by `depth`, one at a time by the caller's own steps."""
        found = []
        while (line := self.peek()) is not None and line.depth == depth:
            found.append(line)
            self.at += 1
        return found


def parse_program(text: str) -> Program:
    """What print_program printed."""
    lines = _Lines(text)
    name = lines.take("program ")
    lines.take("symbols:")
    symbols = tuple(_symbol(line.reader()) for line in lines.under(1))
    inputs = tuple(json.loads(lines.take("inputs:")))
    consts = tuple(json.loads(lines.take("consts:")))
    line = lines.peek()
    steady = tuple(json.loads(lines.take("steady:"))) if line is not None and line.text.startswith("steady:") else ()
    lines.take("buffers:")
    buffers = {b.name: b for b in (_buffer(line) for line in lines.under(1))}
    lines.take("body:")
    body = _block(lines, 1)
    lines.take("results:")
    results = tuple(_result(line.reader()) for line in lines.under(1))
    lines.take("write_backs:")
    pairs = tuple(_pair(line.reader()) for line in lines.under(1))
    notes = tuple(json.loads(lines.take("notes:")))
    target, device = json.loads(lines.take("target:")) if lines.peek() is not None else (CPU.name, "cpu")
    return Program(name, symbols, inputs, buffers, body, results, pairs, consts, notes, target_named(target), device, steady)


def _symbol(r: Reader) -> Symbol:
    sym = r.expr()
    assert isinstance(sym, Sym)
    r.need("=")
    origin = tuple(r.json())
    r.need("in")
    lo = r.whole()
    r.need("..")
    return Symbol(sym, origin, lo, r.whole() if r.kind == "number" else None)


def _layout(r: Reader) -> Layout:
    strides = r.bracket()
    r.need("offset")
    offset = r.expr()
    splits = tuple(map(tuple, r.json())) if r.take("splits") else ()
    pad = tuple(map(tuple, r.json())) if r.take("pad") else ()
    fill = float(r.next()) if r.take("fill") else None
    return Layout(strides, offset, splits, pad, fill)


def _buffer(line: _Line) -> Buffer:
    r = line.reader()
    name = r.name()
    r.need(":")
    dtype = r.dtype()
    shape = r.bracket()
    role: Any = r.name()
    of = r.name() if r.take("storage_of") else None
    layout = _layout(r) if r.take("layout") else None
    device = r.name() if r.take("on") else "cpu"
    r.done()
    return Buffer(name, dtype, shape, layout, role, of, line.loc, device)


def _result(r: Reader) -> Result:
    kind = r.name()
    if kind == "fresh":
        return Fresh(r.name())
    if kind == "input":
        return InputResult(r.whole())
    if kind == "size":
        return SizeResult(r.expr())
    of = r.json()
    dtype, shape, strides = r.dtype(), r.bracket(), r.bracket()
    r.need("offset")
    return ViewResult(of, shape, strides, r.expr(), dtype, kind == "part")


def _pair(r: Reader) -> tuple[str, str]:
    target = r.name()
    r.need("<-")
    return target, r.name()


def _block(lines: _Lines, depth: int) -> tuple[Any, ...]:
    found = []
    while (line := lines.peek()) is not None and line.depth == depth:
        r = line.reader()
        word = r.name() if r.kind == "name" else ""
        how = _ELEMENTS.get(word)
        if how is None:
            raise ParseError(f"line {line.number}: {line.text!r} is no element")
        lines.at += 1
        found.append(how(r, line, lines, depth))
    return tuple(found)


def _stage(r: Reader, line: _Line, lines: _Lines, depth: int) -> Stage:
    origin = r.string()
    r.need("[")
    axes = r.axes("]")
    scan = r.take("scan")
    carry, after, lets, stores = [], [], [], []
    for part in lines.under(depth + 1):
        p = part.reader()
        word = p.name()
        if word == "store":
            stores.append(_store(p))
            continue
        var = p.expr()
        assert isinstance(var, Var)
        p.need("=")
        value = p.expr()
        if word == "let":
            lets.append((var, value))
        else:
            carry.append((var, value))
            p.need("then")
            after.append(p.expr())
    return Stage(axes, tuple(stores), tuple(lets), scan, tuple(carry), tuple(after), line.loc, origin)


def _store(r: Reader) -> Store:
    mode: Any = r.name()
    repeated = r.take("repeated")
    buf = r.name()
    index = r.bracket()
    r.need("=")
    value = r.expr()
    return Store(buf, index, value, mode, not repeated, r.expr() if r.take("if") else None)


def _check(r: Reader, line: _Line, lines: _Lines, depth: int) -> Check:
    kind, message = r.string(), r.string()
    return Check(r.expr(), kind, message, line.loc)


def _arg(r: Reader) -> Any:
    if r.take("("):
        found = []
        while not r.take(")"):
            found.append(_arg(r))
            r.need(",")
        return tuple(found)
    if r.take("<"):
        e = r.expr()
        r.need(">")
        return e
    if r.take("&"):
        return BufArg(r.name())
    if r.kind == "text":
        return r.string()
    if r.kind == "number":
        text = r.next()
        return float(text) if any(c in text for c in ".enif") else int(text)
    word = r.name()
    if word == "enum":
        return Enum(r.string(), r.string())
    return r.dtype() if word == "dtype" else _WORDS[word]


_WORDS: dict[str, Any] = {"None": None, "True": True, "False": False}


def _extern(r: Reader, line: _Line, lines: _Lines, depth: int) -> Extern:
    name = r.name()
    while r.take("."):
        name += "." + r.name()
    while r.take(":"):
        name += ":" + r.name()
    r.need("(")
    args, kwargs = [], []
    while not r.take(")"):
        start = (r.kind, r.token, r.at, r._end)
        if r.kind == "name":
            word = r.name()
            if r.take("="):
                kwargs.append((word, _arg(r)))
                r.need(",")
                continue
            r.kind, r.token, r.at, r._end = start
        args.append(_arg(r))
        r.need(",")
    r.need("->")
    outs = tuple(r.json())
    returned: Any = r.name()
    r.need("via")
    via: Any = r.name()
    mutates = tuple(r.json()) if r.take("mutates") else ()
    binds = []
    while r.take("binds"):
        sym = r.expr()
        assert isinstance(sym, Sym)
        binds.append((sym, r.whole(), r.whole()))
    return Extern(name, tuple(args), tuple(kwargs), outs, mutates, tuple(binds), returned, via, line.loc)


def _bind(r: Reader, line: _Line, lines: _Lines, depth: int) -> Bind:
    sym = r.expr()
    assert isinstance(sym, Sym)
    r.need("=")
    return Bind(sym, r.expr())


def _cond(r: Reader, line: _Line, lines: _Lines, depth: int) -> Cond:
    pred = r.expr()
    r.need("then")
    then = _block(lines, depth + 1)
    lines.take("else")
    return Cond(pred, then, _block(lines, depth + 1))


def _repeat(r: Reader, line: _Line, lines: _Lines, depth: int) -> Repeat:
    sym = r.expr()
    assert isinstance(sym, Sym)
    r.need("<")
    count = r.expr()
    r.need("do")
    return Repeat(sym, count, _block(lines, depth + 1))


_ELEMENTS: dict[str, Callable[[Reader, _Line, _Lines, int], Any]] = {
    "stage": _stage,
    "check": _check,
    "extern": _extern,
    "bind": _bind,
    "if": _cond,
    "repeat": _repeat,
}
