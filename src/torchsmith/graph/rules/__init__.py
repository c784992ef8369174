"""Shape rules by family; importing this package fills tracing.RULES and FUNCTION_RULES."""

from . import backward, create, draws, factor, functions, linear, nn, optimizers, pointwise, reduce, select, spectral, views  # noqa: F401
