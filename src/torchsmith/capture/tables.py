"""Every table of rows, filled: importing this file is what makes calls.ROWS, BY_TYPE, TENSOR_METHODS and torch_rows.ROWS complete."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from typing import Any

from ..codes import Unsupported
from . import (  # noqa: F401  (they fill the tables)
    array_rows,
    autograd_rows,
    builtin_rows,
    call_opcodes,
    calls,
    iteration_rows,
    library_rows,
    torch_rows,
    training_rows,
    transforms,
)
from .protocol import Args, Kwargs, Machine

transforms.fill(torch_rows.ROWS, torch_rows.BY_CODE)

# How many arguments builtin functions take.
_NO_NAMES: frozenset[str] = frozenset()
_MOST: dict[Any, int] = {  # positional arguments at the most; a row reads those that it knows
    **dict.fromkeys((callable, id, hash, bool, len, list, tuple, set, frozenset, reversed, any, all, abs, repr, vars, dir, operator.not_,
                     operator.truth, operator.neg, operator.pos, operator.invert, math.ceil, math.floor, math.trunc, math.sqrt, math.exp), 1),
    **dict.fromkeys((isinstance, issubclass, hasattr, delattr, iter, next, format, divmod, filter, itertools.filterfalse, itertools.takewhile,
                     itertools.dropwhile, itertools.starmap, math.log, math.pow, operator.getitem, operator.delitem, operator.contains), 2),
    **dict.fromkeys((getattr, setattr, functools.reduce, operator.setitem), 3),
}  # fmt: skip
_NAMED: dict[Any, tuple[int, frozenset[str] | None]] = {  # and by which names it takes them; None: by any
    **{fn: (n, _NO_NAMES) for fn, n in _MOST.items()},
    sum: (2, frozenset({"start"})), sorted: (1, frozenset({"key", "reverse"})), round: (2, frozenset({"number", "ndigits"})),
    min: (sys.maxsize, frozenset({"key", "default"})), max: (sys.maxsize, frozenset({"key", "default"})), dict: (1, None),
    itertools.groupby: (2, frozenset({"iterable", "key"})), itertools.accumulate: (2, frozenset({"iterable", "func", "initial"})),
}  # fmt: skip


def _counted(fn: Any, most: int, names: frozenset[str] | None) -> None:
    found = calls.ROWS[fn]

    def counted(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        if len(args) > most or (names is not None and not names.issuperset(kwargs)):  # the exception is the function's own: arguments are counted before all else
            m.native(fn, [None] * len(args), dict.fromkeys(kwargs), plain=True)
            raise Unsupported("CAP014", at=m.loc(), detail=f"{fn.__name__} with {len(args)} arguments")
        return found(m, args, kwargs)

    calls.ROWS[fn] = counted


for _fn, (_most, _names) in _NAMED.items():
    _counted(_fn, _most, _names)
