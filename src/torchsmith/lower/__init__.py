"""Functional graph -> Program: one table of operators, split by family. Importing the room enters every family's rows."""

from . import (  # noqa: F401
    activation,
    attention,
    cat,
    checks,
    contraction,
    convert,
    creation,
    gather,
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
    upsample,
    views,
)
from .core import lower
from .table import LOWERINGS

__all__ = ["LOWERINGS", "lower"]
