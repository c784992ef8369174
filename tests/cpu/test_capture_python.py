"""Python programs that must capture in one graph and give eager's result, and whose side effects happen once."""

from __future__ import annotations

import copy

import pytest
from capture_programs import PROGRAMS
from capturing import Run, same


@pytest.mark.parametrize(("fn", "args", "kwargs"), PROGRAMS)
def test_program(fn, args, kwargs):
    want_args, want_kwargs = copy.deepcopy((args, kwargs))
    got_args, got_kwargs = copy.deepcopy((args, kwargs))
    want = fn(*want_args, **want_kwargs)
    run = Run(fn, *got_args, **got_kwargs)
    same(run(*got_args, **got_kwargs), want)
    same(got_args, want_args, "arguments")
    same(got_kwargs, want_kwargs, "keywords")
