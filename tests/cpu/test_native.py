"""The native host: results, views, numbers, write-backs, modes, threads, errors."""

import torch
from native_tools import buffer, compile_body, kernel, map_text

from torchsmith.ir.program import Fresh

SIN_COS = map_text("__builtin_sinf(__builtin_cosf(x[i]))")


def sin_cos(n: int = 8):
    x, y = buffer("x", n, role="input"), buffer("y", n, role="output")
    return compile_body([x, y], [kernel("k", [x], [y], n)], [Fresh("y")], {"k": SIN_COS})


def test_one_kernel() -> None:
    x = torch.randn(8)
    (y,) = sin_cos()(x)
    torch.testing.assert_close(y, x.cos().sin())
    assert not y.requires_grad and y.is_contiguous()
