"""Functional graph -> Program: one table of operators, split by family."""

from . import activation, cat, convert, creation, gather, loss, norm, pointwise, pool, product, reduce, views  # noqa: F401  (each enters its rows on import)
from .core import lower
from .table import LOWERINGS

__all__ = ["LOWERINGS", "lower"]
