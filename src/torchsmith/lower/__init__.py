"""Functional graph -> Program: one table of operators, split by family. Importing the room enters every family's rows."""

from . import (  # noqa: F401
    activation,
    attention,
    bags,
    cat,
    checks,
    complex,
    contraction,
    convert,
    creation,
    draws,
    gather,
    grid,
    indexing,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    product,
    recurrent,
    reduce,
    scan,
    search,
    sort,
    upsample,
    views,
)
from .core import lower
from .table import LOWERINGS

__all__ = ["LOWERINGS", "lower"]
