"""Functional graph -> Program: one table of operators, split by family."""

from . import pointwise  # noqa: F401  (each family enters its rows on import)
from .core import lower
from .table import LOWERINGS

__all__ = ["LOWERINGS", "lower"]
