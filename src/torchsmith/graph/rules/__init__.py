"""Shape rules by family; importing this package fills tracing.RULES and FUNCTION_RULES."""

from . import (  # noqa: F401
    attention,
    backward,
    create,
    draws,
    factor,
    functions,
    linear,
    nn,
    optimizers,
    pointwise,
    quantize,
    recurrent,
    reduce,
    select,
    spectral,
    varying,
    views,
)
