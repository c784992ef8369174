"""Accesses that are proved in range, and the programs of old that read outside of their operands, kept as text."""

from __future__ import annotations

import json

import pytest

from torchsmith.ir.expr import Load, walk
from torchsmith.ir.parse import parse_program
from torchsmith.ir.program import Check, Stage
from torchsmith.ir.proofs import doubts, is_outside, with_checks
from torchsmith.ir.verify import verify_program


def program(sizes: str, buffers: str, stages: str):
    """sizes: "n=0.0" for symbol n, size 0 of input 0; at least 1."""
    symbols = [s.split("=") for s in sizes.split()]
    rows = [f'  ${name} = ["size", {", ".join(place.split("."))}] in 1..1073741824' for name, place in symbols]
    names = sorted({line.split(":")[0].strip() for line in buffers.strip().splitlines() if " input " in line})
    text = ["program old", "symbols:", *rows, f"inputs: {json.dumps(names)}", "consts: []", "buffers:"]
    text += [f"  {line.strip()}" for line in buffers.strip().splitlines()] + ["body:"]
    text += [("    " if line.strip().startswith("store") else "  ") + line.strip() for line in stages.strip().splitlines()]
    found = parse_program("\n".join([*text, "results:", "  fresh t0", "write_backs:", "notes: []", ""]))
    verify_program(found)
    return found


FOLD = "fold.any#f1_{{r1_0 < $k}}(0.0:f32; add(%f1_a0:f32, mul({0}, {1})); add(%f1_a0:f32, %f1_b0:f32)).0"
OLD = {
    "addmm": (program(
        "b=0.0 n=1.0 k=1.1 k2=2.0 m=2.1",
        """x0: f32[$b] input layout [1] offset 0
           x1: f32[$n, $k] input layout [$k, 1] offset 0
           x2: f32[$k2, $m] input layout [$m, 1] offset 0
           t0: f32[$n, $m] output layout [$m, 1] offset 0""",
        f"""stage "addmm" [i0 < $n, i1 < $m]
            store set t0[i0, i1] = add({FOLD.format("x1:f32[i0, r1_0]", "x2:f32[r1_0, i1]")}, x0:f32[i1])"""),
        {("x0", 0), ("x2", 0)}),
    "baddbmm": (program(
        "a=0.0 b=0.1 c=0.2 g=1.0 n=1.1 k=1.2 g2=2.0 k2=2.1 m=2.2",
        """x0: f32[$a, $b, $c] input layout [($b * $c), $c, 1] offset 0
           x1: f32[$g, $n, $k] input layout [($n * $k), $k, 1] offset 0
           x2: f32[$g2, $k2, $m] input layout [($k2 * $m), $m, 1] offset 0
           t0: f32[$g, $n, $m] output layout [($m * $n), $m, 1] offset 0""",
        f"""stage "baddbmm" [i0 < $g, i1 < $n, i2 < $m]
            store set t0[i0, i1, i2] = add({FOLD.format("x1:f32[i0, i1, r1_0]", "x2:f32[i0, r1_0, i2]")}, x0:f32[i0, i1, i2])"""),
        {("x0", 0), ("x0", 1), ("x0", 2), ("x2", 0), ("x2", 1)}),
    "index_put": (program(
        "n=0.0 m=0.1 k=1.0 a=2.0 b=2.1",
        """x0: f32[$n, $m] input layout [$m, 1] offset 0
           x1: i64[$k] input layout [1] offset 0
           x2: f32[$a, $b] input layout [$b, 1] offset 0
           t0: f32[$n, $m] output layout [$m, 1] offset 0""",
        """stage "index_put" [i0 < $n, i1 < $m]
           store set t0[i0, i1] = x0:f32[i0, i1]
           stage "index_put" [i0 < $k, i1 < $m]
           store set repeated t0[index(x1:i64[i0]), i1] = x2:f32[i0, i1]"""),
        {("x2", 0), ("x2", 1)}),
    "diagonal beyond the matrix": (program(
        "n=0.0 m=0.1",
        """x0: f32[$n, $m] input layout [$m, 1] offset 0
           t0: f32[] output layout [] offset 0""",
        """stage "diagonal" []
           store set t0[] = fold.any#f1_{r1_0 < min($n, ($m + -3))}(0.0:f32; add(%f1_a0:f32, x0:f32[r1_0, (r1_0 + 3)]); add(%f1_a0:f32, %f1_b0:f32)).0"""),
        {("", -1)}),
    "a shifted read": (program(
        "n=0.0", "x0: f32[$n] input layout [1] offset 0\nt0: f32[$n] output layout [1] offset 0",
        'stage "shift" [i0 < $n]\nstore set t0[i0] = x0:f32[(i0 + 1)]'),
        {("x0", 0)}),
}  # fmt: skip
RIGHT = {
    "transposed and flat": program(
        "n=0.0 m=0.1", "x0: f32[$n, $m] input layout [$m, 1] offset 0\nt0: f32[($n * $m)] output layout [1] offset 0",
        'stage "view" [i0 < ($n * $m)]\nstore set t0[i0] = x0:f32[(i0 % $n), (i0 // $n)]'),
    "diagonal": program(
        "n=0.0 m=0.1", "x0: f32[$n, $m] input layout [$m, 1] offset 0\nt0: f32[max(min($n, ($m + -3)), 0)] output layout [1] offset 0",
        'stage "diagonal" [i0 < max(min($n, ($m + -3)), 0)]\nstore set t0[i0] = x0:f32[i0, (i0 + 3)]'),
    "every second": program(
        "n=0.0", "x0: f32[$n] input layout [1] offset 0\nt0: f32[(($n + 1) // 2)] output layout [1] offset 0",
        'stage "slice" [i0 < (($n + 1) // 2)]\nstore set t0[i0] = x0:f32[(i0 * 2)]'),
    "clamped": program(
        "n=0.0", "x0: f32[$n] input layout [1] offset 0\nt0: f32[($n + 4)] output layout [1] offset 0",
        'stage "pad" [i0 < ($n + 4)]\nstore set t0[i0] = x0:f32[max(min((i0 + -2), ($n + -1)), 0)]'),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_old_programs_are_found(name: str) -> None:
    old, places = OLD[name]
    found = list(doubts(old))
    assert {(d.buf, d.dim) for d in found} == places
    safe, left = with_checks(old)
    verify_program(safe)
    checks = [e for e in safe.body if isinstance(e, Check)]
    assert checks or left
    for d in left:  # what no condition on sizes decides is masked
        stage = next(e for e in safe.body if isinstance(e, Stage))
        loads = [n for s in stage.stores for n in walk(s.value) if isinstance(n, Load) and n.buf == d.buf]
        assert loads and all(n.mask is not None for n in loads)


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_proved(name: str) -> None:
    assert [str(d) for d in doubts(RIGHT[name])] == []


def test_assumptions_prove() -> None:
    old, _ = OLD["addmm"]
    b, _, k, k2, m = (s.sym for s in old.symbols)
    from torchsmith.ir.expr import op

    assert not list(doubts(old, (op("eq", b, m), op("ge", k2, k))))
    assert {d.buf for d in doubts(old, (op("eq", b, m),))} == {"x2"}


def test_a_condition_that_the_example_breaks_is_a_mask() -> None:
    """The remainder is stronger than what is needed: were it checked, every call would fail."""
    old, _ = OLD["addmm"]
    hints = {"b": 1, "n": 3, "k": 4, "k2": 4, "m": 5}
    safe, left = with_checks(old, (), hints)
    assert [d.buf for d in left] == ["x0"] and len([e for e in safe.body if isinstance(e, Check)]) == 1


KNOWN = """t0: f32[6] temp layout [1] offset 0
    x0: f32[{0}] input layout [1] offset 0"""


@pytest.mark.parametrize(("size", "index"), [(0, "i0"), (5, "i0"), (6, "(i0 + 1)"), (6, "(i0 * 2)"), (6, "(i0 + -1)")])
def test_known_sizes_are_proved_too(size: int, index: str) -> None:
    """An index that leaves its buffer for certain is no access that a mask makes right."""
    wrong = program("", KNOWN.format(size), f'stage "read" [i0 < 6]\nstore set t0[i0] = x0:f32[{index}]')
    assert [is_outside(d) for d in with_checks(wrong)[1]] == [True]


@pytest.mark.parametrize("index", ["i0", "(5 - i0)", "((i0 * 2) % 6)", "max((i0 + -1), 0)"])
def test_known_sizes_that_fit(index: str) -> None:
    right = program("", KNOWN.format(6), f'stage "read" [i0 < 6]\nstore set t0[i0] = x0:f32[{index}]')
    assert with_checks(right) == (right, [])


def test_masks_narrow_what_quotients_are_of() -> None:
    """A class token before 14 x 14 patches: the row of patch i is ((i + 13) // 14) - 1, from i = 1 on."""
    text = 'stage "cat" [i0 < 197]\nstore set t0[i0] = x0:f32[(((i0 + 13) // 14) + -1) if ge(i0, 1) else 0.0:f32]'
    assert with_checks(program("", "t0: f32[197] temp layout [1] offset 0\nx0: f32[14] input layout [1] offset 0", text))[1] == []


def test_what_never_runs_reads_nothing() -> None:
    text = 'stage "read" [i0 < 0]\nstore set t0[i0] = x0:f32[0]'
    assert with_checks(program("", KNOWN.format(0), text))[1] == []


def test_a_symbol_of_a_symbol() -> None:
    """A size halved twice is written in two ways: with the first half under its own name, and without."""
    half, again = "(((($n + -4) // 4) + 1) // 2)", "((((($n + -4) // 4) + -1) // 2) + 1)"
    p = program(
        "b=0.0 n=0.1",
        f"""x0: f32[$b, $n] input layout [$n, 1] offset 0
            t1: f32[$b, {half}, 96] temp layout [({half} * 96), 96, 1] offset 0
            t0: f32[($b * {half})] output layout [1] offset 0""",
        f"""stage "norm" [i0 < $b, i1 < {again}, i2 < 96]
            store set t1[i0, i1, i2] = x0:f32[i0, i1]
            stage "view" [i0 < $b, i1 < {again}, i2 < 96]
            store set t0[((i0 * {half}) + i1 + (i2 // 96))] = t1:f32[i0, i1, i2]""",
    )  # fmt: skip
    assert list(doubts(p)) == []
