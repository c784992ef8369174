"""The tiling decision: candidates are possible, distinct, bounded in number, and the default comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchsmith.ir.target import AVX2, CPU, PLAIN, Target
from torchsmith.schedule.templates.tiling import CANDIDATES, Work, candidates, choose_tiling

SIZES = [0, 1, 5, 7, 14, 49, 100, 128, 3136, None]


def work(m: int | None, n: int | None, k: int | None = 64) -> Work:
    return Work(batch=1, outer=1, m=m, n=n, taps=9, k=k, a="f32", b="f32")


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("n", [0, 1, 3, 16, 24, 96, 1000, None])
@pytest.mark.parametrize("target", [CPU, AVX2, PLAIN], ids=lambda t: t.name)
def test_candidates_are_possible_and_few(m: int | None, n: int | None, target: Target) -> None:
    given = replace(work(m, n), target=target)
    found = candidates(given)
    assert 1 <= len(found) <= CANDIDATES and len(set(found)) == len(found)
    assert found[0] == choose_tiling(given)
    for t in found:
        assert t.rows >= 1 and t.vectors >= 1 and (t.rows + 1) * t.vectors < target.vectors.registers
        assert not m or t.rows <= m
        assert not n or t.vectors <= -(-n // target.vectors.lanes())


def test_a_key_names_one_work() -> None:
    keys = {w.key for m in SIZES for n in SIZES for k in SIZES for w in [work(m, n, k)]}
    assert len(keys) == len(SIZES) ** 3
    assert replace(work(1, 2), target=AVX2).key not in keys
    assert all("\n" not in k for k in keys)


def test_small_packed_operands_are_swept_for_every_row_tile() -> None:
    assert choose_tiling(work(3136, 64, 8)).sweep == "rows"
    assert choose_tiling(work(49, 2048, 512)).sweep == "columns"


@pytest.mark.parametrize("m", [49, 196, 12544])
def test_rows_of_a_batch_of_images_are_tiled_as_one_image_is(m: int) -> None:
    """A multiple of a number that is not known: the tile divides it."""
    batch = Work(batch=1, outer=1, m=None, n=512, taps=1, k=64, a="f32", b="f32", multiple=m)
    assert m % choose_tiling(batch).rows == 0
    assert choose_tiling(replace(batch, multiple=1)).rows == 8
