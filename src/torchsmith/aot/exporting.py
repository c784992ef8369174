"""export: a module captured whole, for every size that its declarations allow.

In: a module, example arguments, `dynamic_shapes`. Out: ExportedProgram. Each condition on sizes that the capture had to assume is held
against the declared ranges: what the user left open (AUTO, bounds not stated) is narrowed and captured again; what no range says of such
sizes is checked at every call; what the user stated and the program contradicts is an error with the dimension, the line that asked, and
the declaration that would do.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import policy
from ..capture._frame import Dispatcher
from ..capture.whole import capture_whole
from ..codes import Unsupported
from ..graph.declared import DeclaredSymbol
from ..graph.functionalise import functionalise
from ..graph.polynomial import add, expr, poly
from ..graph.sizes import SizeFacts, print_condition
from ..graph.solve import holds_around
from ..graph.spec import TensorSpec
from ..graph.tracing import spec_of
from ..ir import dtype as dt
from ..ir.expr import Expr, Op, Sym, walk
from .dims import Declared, read_shapes
from .entry import BUFFER, CONSTANT, PARAMETER, children
from .program import DraftReport, ExportedProgram, InputRow, OutputRow
from .programs import is_torch_program, load_program, read_program

ROUNDS = 12  # captures until the open bounds have settled


def export(
    mod: nn.Module | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    preserve_module_call_signature: Sequence[str] = (),
    prefer_deferred_runtime_asserts_over_guards: bool = False,
) -> ExportedProgram:
    """Capture `mod(*args, **kwargs)`, a module's or a Python function's, as one graph that holds for all sizes in `dynamic_shapes` (see
    Dim).

    strict: accepted; the capture reads the program's bytecode in either case. preserve_module_call_signature: accepted, not needed.
    prefer_deferred_runtime_asserts_over_guards: what the program needs of several named Dims together is asked of every call, no error.
    Raises TypeError or ValueError for arguments that do not fit (DeclarationError for dimensions that the program narrows), Unsupported
    (with the user's line) for what cannot be captured whole.
    """
    return _exported(mod, args, kwargs, dynamic_shapes, None, prefer_deferred_runtime_asserts_over_guards)


def draft_export(
    mod: nn.Module | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    preserve_module_call_signature: Sequence[str] = (),
    prefer_deferred_runtime_asserts_over_guards: bool = False,
) -> ExportedProgram:
    """export that tells all declarations that do not hold at once: each is left to the program (as Dim.AUTO) and named in
    `program.report`, with what to declare instead. What cannot be captured whole is an error here too."""
    problems: list[str] = []
    program = _exported(mod, args, kwargs, dynamic_shapes, problems, prefer_deferred_runtime_asserts_over_guards)
    return replace(program, report=DraftReport(tuple(problems)))


def _exported(
    given: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any, problems: list[str] | None, defers: bool
) -> ExportedProgram:
    """problems: where to put what is wrong with the declarations; None: it is raised."""
    mod = _as_module(given)
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"export takes the example arguments as a tuple, not {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"export takes example keyword arguments as a dict, not {type(kwargs).__name__}")
    kwargs = dict(kwargs or {})
    declared, names = read_shapes(mod.forward, args, kwargs, dynamic_shapes)
    leaves, in_spec = pytree.tree_flatten((tuple(args), kwargs))
    leaf_names = tuple(names[i] for i in range(len(leaves)))
    _check_hints(declared, leaves, leaf_names)
    run = _Export(mod, leaves, in_spec, leaf_names, declared, defers)
    for _ in range(ROUNDS if problems is None else 4 * ROUNDS):
        try:
            program = run.once(args, kwargs)
        except Unsupported as error:
            if problems is None or not run.refused:
                raise
            problems.append(f"{error.at}: {error.detail}" if error.at else error.detail)
            for row in run.refused:
                row.kind, row.said = "auto", (None, None)
            run.refused = ()
            continue
        if program is not None:
            return program
    raise Unsupported("AOT061", detail="the sizes that the program allows did not settle")


def _as_module(program: Any) -> nn.Module:
    """A function as the forward of a module without parameters: the tensors that it holds or finds are constants."""
    if isinstance(program, nn.Module):
        if type(program).__module__.startswith("torch.jit"):
            raise TypeError("export reads Python, and a TorchScript module has none: give the module that it was made of")
        return program
    function = getattr(program, "__wrapped__", program) if isinstance(program, Dispatcher) else program
    if not isinstance(function, types.FunctionType | types.MethodType):
        raise TypeError(f"export takes an nn.Module or a Python function, not {type(program).__name__}")
    made = type(function.__name__.strip("<>"), (nn.Module,), {})()
    made.forward = function
    return made


def _check_hints(declared: Declared, leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Example sizes must be possible, and equal where Dims are equal."""
    seen: dict[str, tuple[int, str]] = {}
    for number, rows in declared.items():
        for d, size in rows.items():
            now, where = leaves[number].shape[d], f"{names[number]}.shape[{d}]"
            value, rest = divmod(now - size.shift, size.scale)
            symbol = size.symbol
            if rest:
                raise ValueError(f"{where} is {now} in the example, which is no {size.scale}*{symbol.name}{size.shift:+d}")
            first = seen.setdefault(symbol.name, (value, where))
            if first[0] != value:
                raise ValueError(f"Dim {symbol.name} is {first[0]} in {first[1]} and {value} in {where}: give them different Dims")
            low, high = symbol.said
            if (low is not None and value < low) or (high is not None and value > high):
                raise ValueError(f"{where}: the example's {symbol.name} = {value} is outside of its range [{low or 0}, {high or 'inf'}]")
            symbol.lo = min(symbol.lo, value) if low is None else symbol.lo


class DeclarationError(Unsupported, ValueError):
    """The program cannot take all the sizes that were declared for it."""


class _Export:
    """One export: captures until every assumption lies within the declarations."""

    def __init__(
        self, mod: nn.Module, leaves: list[Any], in_spec: Any, names: tuple[str, ...], declared: Declared, defers: bool
    ) -> None:
        self.mod, self.in_spec, self.names, self.declared, self.defers = mod, in_spec, names, declared, defers
        owned = {id(t) for t in (*mod.parameters(), *mod.buffers())}
        self.leaves: list[Any] = []
        for leaf in leaves:  # each argument is a tensor object of its own
            if isinstance(leaf, Tensor):
                if id(leaf) in owned:
                    leaf = leaf.detach().clone()
                owned.add(id(leaf))
            self.leaves.append(leaf)
        self.refused: Sequence[DeclaredSymbol] = ()  # whose declaration the last error is about
        self.tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def once(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ExportedProgram | None:
        """One capture; None when open bounds were narrowed and it must be repeated."""
        declared = {f"L['x{i}']": rows for i, rows in self.declared.items() if rows}
        whole = capture_whole(self._entry(), [self.leaves[i] for i in self.tensors], declared)
        captured, facts, values = whole.captured, whole.captured.facts, whole.values
        fg = functionalise(captured.graph, facts)
        symbols = {symbol: self._declared_symbol(name) for name, symbol in whole.symbols.items()}
        conditions = [(g.value, g.loc) for g in captured.guards if g.kind == "shape"] + [(c, facts.locs.get(c, "")) for c in facts.late]
        narrowed = [self._settle(cond, loc, symbols, facts) for cond, loc in conditions]  # all of them, to save captures
        if any(narrowed):
            return None
        specs = [n.meta["spec"] for n in fg.graph.nodes if n.op == "placeholder"]
        rows = tuple(self._row(*row) for row in zip(captured.inputs, values, specs[: len(values)], strict=True))
        state = dict(self.mod.state_dict(keep_vars=True))
        constants = {r.name: v for r, v in zip(rows, values, strict=True) if r.kind != "user" and r.name not in state}
        outputs = tuple(OutputRow(*row) for row in (captured.finish.recipe or ())[1:])
        return ExportedProgram(
            fg, facts, rows, outputs, self.in_spec, whole.spec, tuple(None if isinstance(x,
            Tensor) else x for x in self.leaves), self.names,
            state, constants, {name: row.name for name, row in symbols.items()}, type(self.mod).__name__, (tuple(args), kwargs),
        )  # fmt: skip

    def _entry(self) -> Any:
        """`def forward(x0, x1): return module(x0, [x1], flag=k)` as a function over the tensor leaves."""
        space: dict[str, Any] = {"module": self.mod, "unflatten": pytree.tree_unflatten}
        texts = []
        for i, leaf in enumerate(self.leaves):
            space[f"k{i}"] = leaf
            texts.append(f"x{i}" if i in self.tensors else f"k{i}")
        args, kwargs = children(self.in_spec)
        given = iter(texts)
        parts = [_spell(s, given, space) for s in children(args)]
        parts += [f"**{{{k!r}: {_spell(s, given, space)}}}" for k, s in zip(kwargs.context, children(kwargs), strict=True)]
        cells = ", ".join(space)
        tensors = ", ".join(f"x{i}" for i in self.tensors)
        text = f"def make({cells}):\n  def forward({tensors}):\n    return module({', '.join(parts)})\n  return forward\n"
        scope: dict[str, Any] = {}
        exec(compile(text, policy.EXPORT_FRAME, "exec"), scope)
        entry = scope["make"](**space)
        entry.__wrapped__ = self.mod.forward  # for messages
        return entry

    def _declared_symbol(self, name: str) -> DeclaredSymbol:
        return next(s.symbol for rows in self.declared.values() for s in rows.values() if s.symbol.name == name)

    def _row(self, source: Any, value: Any, spec: TensorSpec) -> InputRow:
        text = str(source)
        if text.startswith("L['x"):
            leaf = int(text[4:-2])
            return InputRow("user", self.names[leaf], spec, leaf)
        for name, p in self.mod.named_parameters(remove_duplicate=False):
            if p is value:
                return InputRow("param", name, spec)
        persistent = self.mod.state_dict(keep_vars=True)
        for name, b in self.mod.named_buffers(remove_duplicate=False):
            if b is value:
                return InputRow("buffer", name, spec, persistent=name in persistent)
        return InputRow("constant", _constant_name(text), spec)

    # ------------------------------------------------------------ conditions on sizes
    def _settle(self, cond: Expr, loc: str, symbols: dict[str, DeclaredSymbol], facts: SizeFacts) -> bool:
        """Narrow what is open so that `cond` holds; True: capture again. Raises for what was stated."""
        found = list(dict.fromkeys(x.name for x in walk(cond) if isinstance(x, Sym)))
        rows = [symbols[x] for x in found if x in symbols]
        if not rows or not isinstance(cond, Op):
            raise Unsupported("AOT061", at=loc, detail=_spoken(cond, symbols))
        bound = _bound(cond) if len(rows) == 1 else None
        if bound is not None:
            name, value = bound
            row = rows[0]
            if name == "eq":
                return self._specialise(row, value, cond, loc, symbols)
            if name in ("ge", "gt", "ne", "le", "lt"):
                return self._narrow(row, name, value, cond, loc, symbols)
        if len(found) == 1 and (size := facts.hints[found[0]]) is not None and (around := holds_around(cond, size)) is not None:
            low, high = around  # x.chunk(3) has 3 parts from 5 on; it also has for 3, which the range leaves out
            if low is not None and (high is None or (rows[0].hi is not None and rows[0].hi <= high)):
                return self._narrow(rows[0], "ge", low, cond, loc, symbols)
        if cond.name == "eq" and len(rows) == 2 and (same := _same(cond, rows)):
            return self._unify(*same, cond, loc, symbols)
        for name in reversed(found):  # n * m != 1 holds for every n where m is 2 or more
            hint, one = facts.hints[name], symbols.get(name)
            is_open = len(found) > 1 and one is not None and one.lo < 2 <= (hint or 0) and one.said[0] is None
            if one is not None and is_open and _holds_from_two(cond, name, facts):
                return self._narrow(one, "ge", 2, cond, loc, symbols)
        if len(rows) == len(found) and (any(r.kind != "named" for r in rows) or (self.defers and len(rows) > 1)):
            return False  # n % 4 == 0: no range says it, so every call is asked
        for row in rows:  # what a call cannot be asked: as many sizes as are open become those of the example
            if row.kind == "auto":
                return self._drop(row)
        raise self._refusal(rows, cond, loc, symbols)

    def _narrow(self, row: DeclaredSymbol, name: str, value: int, cond: Expr, loc: str, symbols: dict[str, DeclaredSymbol]) -> bool:
        low, high = row.said
        if name == "ne":
            name, value = ("gt", value) if value <= row.lo else ("lt", value)
            if name == "lt" and (row.hi is None or value < row.hi):
                if row.kind != "named":
                    return False  # a gap in the range: asked of every call
                raise self._refusal([row], cond, loc, symbols)
        if name in ("ge", "gt"):
            new = value + (name == "gt")
            if low is not None and new > low:
                raise self._refusal([row], cond, loc, symbols)
            row.lo = max(row.lo, new)
            return True
        new = value - (name == "lt")
        if high is not None and new < high:
            raise self._refusal([row], cond, loc, symbols)
        row.hi = new if row.hi is None else min(row.hi, new)
        return True

    def _specialise(self, row: DeclaredSymbol, value: int, cond: Expr, loc: str, symbols: dict[str, DeclaredSymbol]) -> bool:
        if row.kind == "auto":
            return self._drop(row)
        raise self._refusal([row], cond, loc, symbols)

    def _unify(self, a: DeclaredSymbol, b: DeclaredSymbol, cond: Expr, loc: str, symbols: dict[str, DeclaredSymbol]) -> bool:
        """Two open dimensions that must be equal become one; two Dims of different names are the user's statement that they may differ."""
        if a.kind == b.kind == "named":
            if self.defers:
                return False
            raise self._refusal([a, b], cond, loc, symbols)
        keep, gone = (b, a) if b.kind == "named" else (a, b)
        for rows in self.declared.values():
            for size in rows.values():
                if size.symbol is gone:
                    size.symbol = keep
        return True

    def _drop(self, row: DeclaredSymbol) -> bool:
        for rows in self.declared.values():
            for d in [d for d, s in rows.items() if s.symbol is row]:
                del rows[d]
        return True

    def _refusal(self, rows: Sequence[DeclaredSymbol], cond: Expr, loc: str, symbols: dict[str, DeclaredSymbol]) -> DeclarationError:
        self.refused = rows
        where = [f"{self.names[i]}.shape[{d}]" for i, sizes in self.declared.items() for d, s in sizes.items() if s.symbol in rows]
        what = f"{' and '.join(where)} ({', '.join(r.name for r in rows)}): the program needs {_spoken(cond, symbols)}"
        return DeclarationError("AOT061", at=loc, detail=f"{what}; {_advice(rows, cond)}")


def _spell(spec: Any, given: Any, space: dict[str, Any]) -> str:
    """Python text that builds one argument from its leaves."""
    if spec.is_leaf():
        return next(given)  # type: ignore[no-any-return]
    parts = [_spell(s, given, space) for s in children(spec)]
    if spec.type is tuple:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if spec.type is list:
        return f"[{', '.join(parts)}]"
    if spec.type is dict:
        return "{" + ", ".join(f"{k!r}: {p}" for k, p in zip(spec.context, parts, strict=True)) + "}"
    name = f"t{len(space)}"
    if hasattr(spec.type, "_fields"):
        space[name] = spec.type
        return f"{name}({', '.join(parts)})"
    space[name] = pytree.TreeSpec(spec.type, spec.context, [pytree.treespec_leaf() for _ in parts])  # what it holds is built already
    return f"unflatten([{', '.join(parts)}], {name})"


def _constant_name(source: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in source.removeprefix("C['module']")).strip("_") or "constant"


def _difference(cond: Op) -> dict[tuple[Expr, ...], int]:
    """Left side less right side, as a polynomial."""
    a, b = cond.args if len(cond.args) == 2 else (None, None)
    return add(poly(a), poly(b), -1) if a is not None and b is not None and a.dtype is b.dtype is dt.index else {}


def _holds_from_two(cond: Op, name: str, facts: SizeFacts) -> bool:
    """Does `cond` follow where the symbol `name` is at least 2?"""
    wider = SizeFacts()
    for other, row in facts.symbols.items():
        wider.symbols[other] = replace(row, lo=max(row.lo, 2)) if other == name else row
    return wider.decide(cond) is True


def _bound(cond: Op) -> tuple[str, int] | None:
    """(comparison, number) of a condition `k * symbol + c <comparison> 0`, solved for its one symbol."""
    left = _difference(cond)
    c = left.pop((), 0)
    if len(left) != 1:
        return None
    (atoms, k), name = next(iter(left.items())), cond.name
    if len(atoms) != 1 or not isinstance(atoms[0], Sym):
        return None
    if k < 0:
        k, c, name = -k, -c, {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(name, name)
    value, rest = divmod(-c, k)
    if not rest:
        return name, value
    return None if name in ("eq", "ne") else (name, value + (name in ("ge", "lt")))


def _same(cond: Op, rows: list[DeclaredSymbol]) -> tuple[DeclaredSymbol, DeclaredSymbol] | None:
    """The two symbols of `a == b`: terms of one symbol each, not of what is computed from both."""
    left = _difference(cond)
    is_pair = sorted(left.values()) == [-1, 1] and all(len(m) == 1 and isinstance(m[0], Sym) for m in left)
    return (rows[0], rows[1]) if is_pair else None


def _spoken(cond: Expr, symbols: Mapping[str, DeclaredSymbol]) -> str:
    left = _difference(cond) if isinstance(cond, Op) else {}
    signs = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    names = {name: row.name for name, row in symbols.items()}
    if left and isinstance(cond, Op) and cond.name in signs:
        more, less = {m: c for m, c in left.items() if c > 0}, {m: -c for m, c in left.items() if c < 0}
        return f"{print_condition(expr(more), names)} {signs[cond.name]} {print_condition(expr(less), names)}"
    return print_condition(cond, names)


def _advice(rows: Sequence[DeclaredSymbol], cond: Expr) -> str:
    bound = _bound(cond) if isinstance(cond, Op) and len(rows) == 1 else None
    row = rows[0]
    if bound is None:
        if len(rows) == 2:
            return f"use one Dim for both, or Dim.AUTO, instead of {rows[0].name} and {rows[1].name}"
        return f"use Dim.AUTO or Dim.STATIC for {row.name}, or a derived Dim that fulfils it"
    name, value = bound
    if name == "eq":
        return f"use Dim.STATIC (the size is always {value}) instead of {row.name}"
    if name in ("ge", "gt"):
        return f"declare Dim({row.name!r}, min={value + (name == 'gt')})"
    if name in ("le", "lt"):
        return f"declare Dim({row.name!r}, max={value - (name == 'lt')})"
    return f"declare Dim({row.name!r}, min={value + 1})"


def from_torch(program: Any) -> ExportedProgram:
    """A torch.export.ExportedProgram, or the path of a file that torch.export.save wrote, as ours."""
    program = load_program(program) if isinstance(program, (str, os.PathLike)) else program
    if not is_torch_program(program):
        raise TypeError(f"from_torch takes a program of torch.export or the path of a saved one, not {type(program).__name__}")
    entry = read_program(program)
    rows = {a.placeholder: InputRow("user", a.name, a.spec, leaf) for leaf, a in enumerate(entry.arguments) if a.spec is not None}
    state: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    for c in entry.constants[: len(entry.constants) - len(entry.functional.consts)]:
        kind = _KINDS[c.type]
        rows[c.placeholder] = InputRow(kind, c.names[0], spec_of(c.value))
        (constants if kind == "constant" else state).update(dict.fromkeys(c.names, c.value))
    return ExportedProgram(
        entry.functional, entry.facts, tuple(rows[i] for i in range(len(rows))),
        tuple(OutputRow("const", v) if r is None else OutputRow("out", r) for r, v in zip(entry.returned, entry.values, strict=True)),
        pytree.treespec_loads(entry.in_spec), pytree.treespec_loads(entry.out_spec), tuple(a.value for a in entry.arguments),
        tuple(a.name for a in entry.arguments), state, constants, entry.labels, entry.name,
    )  # fmt: skip


_KINDS = {PARAMETER: "param", BUFFER: "buffer", CONSTANT: "constant"}
