"""The one expression node: loop bodies, index arithmetic, symbolic sizes and guards on sizes (no torch).

    Expr = Const(dtype, value)                          a literal
         | Sym(name, dtype=index)                       a run-time scalar of the whole program (a size, a scalar argument)
         | Axis(name)                                   a loop index, dtype index; its extent stands in the Stage or Fold that binds it
         | Var(name, dtype)                             bound inside the Stage: a `let`, or a Fold's state
         | Op(name, dtype, args)                        a row of ir/ops.py
         | Cast(dtype, arg)                             value conversion with C semantics, saturating nowhere
         | Load(buf, dtype, index, mask, other)         one element by logical index; `other` where mask is false
         | Fold(axes, init, update, combine, order, pick)

Invariants
- Nodes are immutable and hash-consed: structural equality is identity, so `is` compares and dictionaries key on them.
- Every node has a dtype. Rules are typed: algebra on `index` never fires on tensor values.
- Fold: `axes` are ((Axis, extent), ...), outermost first. The state is a tuple; `update[i]` gives state i after one element and
  reads the old state through `Var("a0"), Var("a1"), ...`. `combine` (for order "any") merges two partial states, `a*` and `b*`.
  `pick` is the component this node stands for; Folds that differ only in `pick` are one loop. Nested Folds number their
  states by depth: the state variables of a Fold are `Var(f"{prefix}a{i}")` with the Fold's own `prefix`.
- Load.index has one index Expr per dimension of the buffer: logical indices, never addresses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast
from weakref import ref

from . import dtype as dt
from . import memo
from .dtype import DType


class _Ref(ref["Expr"]):
    """A weak reference that knows the key it is filed under."""

    __slots__ = ("key",)
    key: tuple[Any, ...]


_INTERNED: dict[tuple[Any, ...], _Ref] = {}
_GONE: deque[_Ref] = deque()  # of nodes that have died. A callback in Python would swallow a Ctrl-C that arrives in it; append is C


def _forget(gone: _Ref) -> None:
    if _INTERNED.get(gone.key) is gone:
        del _INTERNED[gone.key]


@memo.last
def _sweep() -> None:
    try:
        while True:
            _forget(_GONE.popleft())
    except IndexError:
        pass


# op name -> rewrite applied by `op()` when the node is built; ir/rules.py fills it.
SIMPLIFY: dict[str, Callable[[str, DType, tuple[Expr, ...]], Expr | None]] = {}


class Expr:
    """Base of all nodes. Build through the subclasses or `op`, never by mutating."""

    __slots__ = ("__weakref__", "_below", "_bounds", "_key", "_order", "_terms", "args", "dtype")
    dtype: DType
    args: tuple[Expr, ...]
    _key: tuple[Any, ...]
    _below: tuple[Expr, ...] | None  # every node under this one, once it was walked
    _bounds: Any  # what analyses found of this node alone, kept with it: ir/bounds.py, ir/algebra.py
    _order: Any
    _terms: Any

    @classmethod
    def _intern(cls, key: tuple[Any, ...], dtype: DType, args: tuple[Expr, ...], **fields: Any) -> Any:
        if _GONE:
            _sweep()
        full = (cls, *key)
        known = _INTERNED.get(full)
        if known is not None:
            found = known()
            if found is not None:
                return found
        self = object.__new__(cls)
        put = object.__setattr__
        put(self, "dtype", dtype)
        put(self, "args", args)
        put(self, "_key", full)
        put(self, "_below", None if args else ())
        put(self, "_bounds", None)
        put(self, "_order", None)
        put(self, "_terms", None)
        for name, value in fields.items():
            put(self, name, value)
        mine = _Ref(self, _GONE.append)
        mine.key = full
        while True:  # another thread may have been quicker, and its node may be dying
            filed = _INTERNED.setdefault(full, mine)
            if filed is mine:
                return self
            found = filed()
            if found is not None:
                return found
            _forget(filed)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __reduce__(self) -> Any:
        raise TypeError("Expr is not pickled; print and parse it")

    def rebuild(self, args: tuple[Expr, ...]) -> Expr:
        """The same node over other children; `self` if they are unchanged."""
        return self if args == self.args else self._with(args)  # nodes are equal where they are the same

    def _with(self, args: tuple[Expr, ...]) -> Expr:
        return self

    # index/size arithmetic reads naturally; tensor values use op() with explicit names
    def __add__(self, other: Expr | int) -> Expr:
        return op("add", self, lift(other, self.dtype))

    def __radd__(self, other: int) -> Expr:
        return op("add", lift(other, self.dtype), self)

    def __sub__(self, other: Expr | int) -> Expr:
        return op("sub", self, lift(other, self.dtype))

    def __rsub__(self, other: int) -> Expr:
        return op("sub", lift(other, self.dtype), self)

    def __mul__(self, other: Expr | int) -> Expr:
        return op("mul", self, lift(other, self.dtype))

    def __rmul__(self, other: int) -> Expr:
        return op("mul", lift(other, self.dtype), self)

    def __floordiv__(self, other: Expr | int) -> Expr:
        return op("floordiv", self, lift(other, self.dtype))

    def __mod__(self, other: Expr | int) -> Expr:
        return op("mod", self, lift(other, self.dtype))

    def __neg__(self) -> Expr:
        return op("neg", self)

    def __repr__(self) -> str:
        from .text import print_expr  # the printer sits above this file; only debugging reaches here

        return print_expr(self)


class Const(Expr):
    """A literal of `dtype`; floats compare by bits so that -0.0 and NaN payloads stay apart."""

    __slots__ = ("value",)
    value: float | int | bool

    def __new__(cls, dtype: DType, value: float | int | bool) -> Const:
        if dtype.is_float:
            value = float(value)
            key: Any = "nan" if math.isnan(value) else value.hex()
        elif dtype is dt.bool_:
            value = key = bool(value)
        else:
            value = key = int(value)
        return cast(Const, cls._intern((dtype, key), dtype, (), value=value))


class Sym(Expr):
    """A run-time scalar known to the whole program by name."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str, dtype: DType = dt.index) -> Sym:
        return cast(Sym, cls._intern((name, dtype), dtype, (), name=name))


SIGNED = "z"  # begins the names of integers that may be negative: values of tensors. All others are sizes


class Axis(Expr):
    """A loop index."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str) -> Axis:
        return cast(Axis, cls._intern((name,), dt.index, (), name=name))


class Var(Expr):
    """A value bound by a Stage's `lets` or by a Fold's state."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str, dtype: DType) -> Var:
        return cast(Var, cls._intern((name, dtype), dtype, (), name=name))


class Op(Expr):
    """An operator of ir/ops.py applied to `args`."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str, dtype: DType, args: tuple[Expr, ...]) -> Op:
        known = _INTERNED.get((cls, name, dtype, args))  # most are there, and this is the shortest way
        found = known() if known is not None else None
        return cast(Op, found if found is not None else cls._intern((name, dtype, args), dtype, args, name=name))

    def _with(self, args: tuple[Expr, ...]) -> Expr:
        return op(self.name, *args, dtype=self.dtype)


class Cast(Expr):
    """Conversion of `arg` to `dtype`."""

    __slots__ = ()

    def __new__(cls, dtype: DType, arg: Expr) -> Cast:
        return cast(Cast, cls._intern((dtype, arg), dtype, (arg,)))

    @property
    def arg(self) -> Expr:
        return self.args[0]

    def _with(self, args: tuple[Expr, ...]) -> Expr:
        return convert(args[0], self.dtype)


class Load(Expr):
    """One element of a buffer. `args` = index, then mask and other when masked."""

    __slots__ = ("buf", "index", "mask", "other")
    buf: str
    index: tuple[Expr, ...]
    mask: Expr | None
    other: Expr | None

    def __new__(
        cls, buf: str, dtype: DType, index: tuple[Expr, ...], mask: Expr | None = None, other: Expr | None = None
    ) -> Load:
        if (mask is None) != (other is None):
            raise ValueError("a masked Load needs both mask and other")
        args = index if mask is None else (*index, mask, cast(Expr, other))
        return cast(Load, cls._intern((buf, dtype, index, mask, other), dtype, args, buf=buf, index=index, mask=mask, other=other))

    def _with(self, args: tuple[Expr, ...]) -> Expr:
        if self.mask is None:
            return Load(self.buf, self.dtype, args)
        if isinstance(args[-2], Const) and args[-2].value:  # it no longer asks anything
            return Load(self.buf, self.dtype, args[:-2])
        return Load(self.buf, self.dtype, args[:-2], args[-2], args[-1])


Order = Literal["any", "sequential"]


class Fold(Expr):
    """A loop that carries a tuple state over `axes` and gives state component `pick`.

    `args` = extents, init, update, combine in that order, so that generic rewriting reaches all of them.
    """

    __slots__ = ("axes", "combine", "extents", "init", "order", "pick", "prefix", "update")
    axes: tuple[Axis, ...]
    extents: tuple[Expr, ...]
    init: tuple[Expr, ...]
    update: tuple[Expr, ...]
    combine: tuple[Expr, ...]
    order: Order
    pick: int
    prefix: str

    def __new__(
        cls,
        axes: tuple[tuple[Axis, Expr], ...],
        init: tuple[Expr, ...],
        update: tuple[Expr, ...],
        combine: tuple[Expr, ...] = (),
        order: Order = "any",
        pick: int = 0,
        prefix: str = "",
    ) -> Fold:
        names, extents = tuple(a for a, _ in axes), tuple(e for _, e in axes)
        args = (*extents, *init, *update, *combine)
        key = (names, extents, init, update, combine, order, pick, prefix)
        return cast(
            Fold,
            cls._intern(
                key, init[pick].dtype, args, axes=names, extents=extents, init=init, update=update,
                combine=combine, order=order, pick=pick, prefix=prefix,
            ),
        )

    def state(self, i: int, side: str = "a") -> Var:
        """The Var through which `update` (side a) or `combine` (sides a, b) reads component i."""
        return Var(f"{self.prefix}{side}{i}", self.init[i].dtype)

    def bound(self) -> set[Expr]:
        """The axes and states whose meaning this Fold gives to its update and combine."""
        return {*self.axes, *(self.state(i, side) for i in range(len(self.init)) for side in "ab")}

    def picking(self, i: int) -> Fold:
        """The same loop, giving component i."""
        return Fold(tuple(zip(self.axes, self.extents, strict=True)), self.init, self.update, self.combine, self.order, i, self.prefix)

    def _with(self, args: tuple[Expr, ...]) -> Expr:
        n, k = len(self.axes), len(self.init)
        return Fold(
            tuple(zip(self.axes, args[:n], strict=True)), args[n : n + k], args[n + k : n + 2 * k], args[n + 2 * k :],
            self.order, self.pick, self.prefix,
        )


# ---------------------------------------------------------------- building


def const(value: int) -> Const:
    """An index literal."""
    return _SMALL[value] if 0 <= value < len(_SMALL) else Const(dt.index, value)


_SMALL = tuple(Const(dt.index, value) for value in range(257))  # most literals, by far


def lift(value: Expr | int | float | bool, dtype: DType) -> Expr:
    """A Python number becomes a Const of `dtype`; an Expr passes."""
    return value if isinstance(value, Expr) else Const(dtype, value)


# Results of these are bool whatever the operands are.
PREDICATES = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "signbit", "and", "or", "not"})
# The last operand of these is an integer beside the value: the result has the first operand's dtype.
FIRST_GIVES = frozenset({"powi", "ldexp"})


def op(name: str, *args: Expr, dtype: DType | None = None) -> Expr:
    """Build `name(args)`, simplified. dtype: bool for predicates, i32 for frexp_e, else that of the last argument unless given."""
    if dtype is None:
        dtype = dt.bool_ if name in PREDICATES else dt.i32 if name == "frexp_e" else args[0 if name in FIRST_GIVES else -1].dtype
    rule = SIMPLIFY.get(name)
    if rule is not None:
        found = rule(name, dtype, args)
        if found is not None:
            return found
    return Op(name, dtype, args)


def convert(e: Expr, dtype: DType) -> Expr:
    """Cast to `dtype`; no node when it already has it; exact constants fold (ir/rules.py)."""
    if e.dtype is dtype:
        return e
    rule = SIMPLIFY.get("cast")
    return (rule("cast", dtype, (e,)) if rule is not None else None) or Cast(dtype, e)


def select(cond: Expr, a: Expr, b: Expr) -> Expr:
    """`cond ? a : b`; both sides are values, neither may fault."""
    return op("where", cond, a, b)


# ---------------------------------------------------------------- walking


def substitute(e: Expr, table: dict[Expr, Expr]) -> Expr:
    """Replace leaves or whole nodes found in `table`, rebuilding (and re-simplifying) what contains them. What a Fold binds is its own:
    a value that is read at a place which it tells itself holds a Fold inside of the same Fold."""
    return _substituted(e, table, dict(table)) if table else e


def _substituted(node: Expr, table: dict[Expr, Expr], done: dict[Expr, Expr]) -> Expr:
    """Not a function inside of the other one: that would be a cycle for each call, and looking for those takes a tenth of a compilation."""
    new = done.get(node)
    if new is None:
        args = []
        for a in node.args:
            known = done.get(a)
            args.append(known if known is not None else _substituted(a, table, done) if a.args else a)
        if isinstance(node, Fold) and not table.keys().isdisjoint(own := node.bound()):
            inside = {k: v for k, v in table.items() if k not in own}
            first = len(node.axes) + len(node.init)
            args[first:] = [substitute(a, inside) for a in node.args[first:]]
        new = done[node] = node.rebuild(tuple(args))
    return new


def rewrite(e: Expr, change: Callable[[Expr], Expr], memo: dict[Expr, Expr]) -> Expr:
    """`e` with every node replaced by what `change` makes of it, children first. `memo` is of this `change` alone."""
    done = memo.get(e)
    if done is None:
        new = e.rebuild(tuple([rewrite(a, change, memo) for a in e.args])) if e.args else e
        done = memo[e] = change(new)
    return done


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node under `roots`, children first."""
    if len(roots) == 1:
        return iter((*_below(roots[0]), roots[0]))
    return iter(dict.fromkeys([n for root in roots for n in (*_below(root), root)]))


def _below(root: Expr) -> tuple[Expr, ...]:
    """Every distinct node under `root` but itself, children first. Kept with the node: passes walk the same few again and again."""
    if root._below is None:
        seen: set[Expr] = set()
        found: list[Expr] = []
        stack: list[Expr | None] = [*reversed(root.args)]
        entered: list[Expr] = []
        while stack:
            node = stack.pop()
            if node is None:  # everything below the last entered node has been found
                found.append(entered.pop())
            elif node not in seen:
                seen.add(node)
                if node.args:
                    entered.append(node)
                    stack.append(None)
                    stack += node.args[::-1]
                else:
                    found.append(node)
        object.__setattr__(root, "_below", tuple(found))
    return root._below  # type: ignore[return-value]
