"""Statements declare their expressions by their fields: what one walker sees, every walker sees."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from torchsmith.ir import blocks
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Axis, Load, Var, const, substitute
from torchsmith.ir.kernel import BODY, BUFFER, OTHER, PARTS, Block, Let, Loop, StoreStmt, expressions, own_expressions, parts_of, rewrite

N = Var("n", dt.index)
PLAIN: dict[str, Any] = {"Var": N, "Axis": Axis("i"), "int": 16, "bool": False, "tuple[int, ...]": (), "StoreMode": "set", "AxisKind": "serial"}


def filled(kind: type[Any]) -> tuple[Any, set[Any]]:
    """A statement of this kind with another expression in every place that can hold one; and those expressions."""
    put: dict[str, Any] = {}
    found: set[Any] = set()

    def one(number: int) -> Any:
        found.add(N * 100 + number)
        return N * 100 + number

    for number, f in enumerate(fields(kind)):
        name, at = str(f.type), 10 * number + 1
        if name == "Load":
            put[f.name] = Load("x", dt.f32, (N * 100 + at,))
            found.add(put[f.name])
        elif name in ("Expr", "Expr | None"):
            put[f.name] = one(at)
        elif name == "tuple[Expr, ...]":
            put[f.name] = (one(at), one(at + 1))
        elif name == "tuple[tuple[Axis, Expr], ...]":
            put[f.name] = ((Axis("t"), one(at)), (Axis("u"), one(at + 1)))
        elif name == "tuple[tuple[Var, Expr, Expr], ...]":
            put[f.name] = ((Var("s", dt.index), one(at), one(at + 1)),)
        elif name == BODY:
            put[f.name] = (Let(Var("inner", dt.index), one(at)),)
        else:
            assert name == BUFFER or name in OTHER, f"{kind.__name__}.{f.name}"
            put[f.name] = "out" if name == BUFFER else PLAIN[name]
    return kind(**put), found


KINDS = (Loop, Let, StoreStmt, *Block.__subclasses__())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_field_is_walked_and_rewritten(kind: type[Any]) -> None:
    s, found = filled(kind)
    assert found and set(expressions(s)) == found
    table: Any = {N: const(7)}
    there = rewrite(s, table, {"out": "elsewhere"})
    assert expressions(there) == tuple(substitute(e, table) for e in expressions(s))
    named = [f.name for f in fields(kind) if str(f.type) == BUFFER]
    assert all(getattr(there, name) == "elsewhere" for name in named)
    if not isinstance(s, Loop):
        assert own_expressions(s) == expressions(s)
    if isinstance(s, Block):
        assert {f.name for f in fields(kind)} >= s.OPEN


def test_blocks_are_known_here() -> None:
    assert {k.__name__ for k in Block.__subclasses__()} >= {n for n in vars(blocks) if n in ("Contract", "Product", "Paired", "Banded")}
    assert set(PARTS).isdisjoint(OTHER)


def test_a_field_of_an_unknown_kind_is_refused() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Odd:
        value: dict[str, Any]

    with pytest.raises(TypeError, match=r"Odd\.value: say in PARTS"):
        parts_of(Odd({}))  # type: ignore[arg-type]
