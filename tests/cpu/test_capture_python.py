"""Python programs that must capture in one graph and give eager's result, and whose side effects happen once."""

from __future__ import annotations

import copy

import pytest
import torch
from capture_programs import PROGRAMS
from capturing import Run, same

import torchsmith


@pytest.mark.parametrize(("fn", "args", "kwargs"), PROGRAMS)
def test_program(fn, args, kwargs):
    want_args, want_kwargs = copy.deepcopy((args, kwargs))
    got_args, got_kwargs = copy.deepcopy((args, kwargs))
    want = fn(*want_args, **want_kwargs)
    run = Run(fn, *got_args, **got_kwargs)
    same(run(*got_args, **got_kwargs), want)
    same(got_args, want_args, "arguments")
    same(got_kwargs, want_kwargs, "keywords")


class Noted:
    """An object from outside."""


NOTED = Noted()


def test_an_attribute_that_is_made_and_deleted():
    def fn(x):
        NOTED.once = 5
        NOTED.kept = x * NOTED.once
        del NOTED.once
        return NOTED.kept, hasattr(NOTED, "once")

    x = torch.ones(2)
    run = Run(fn, x)
    for _ in range(2):
        kept, found = run(x)
        assert torch.equal(kept, x * 5) and not found and vars(NOTED).keys() == {"kept"} and NOTED.kept is kept


def counted(x):
    counted.calls = getattr(counted, "calls", 0) + 1
    return x * counted.calls


def test_attributes_of_functions_are_read_anew():
    x = torch.ones(2)
    compiled = torchsmith.compile(counted, backend="eager")
    assert [compiled(x)[0].item() for _ in range(4)] == [1, 2, 3, 4]
