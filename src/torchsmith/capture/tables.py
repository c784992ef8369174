"""Every table of rows, filled: importing this file is what makes calls.ROWS, BY_TYPE and torch_rows.ROWS complete."""

from __future__ import annotations

from . import array_rows, autograd_rows, builtin_rows, torch_rows, training_rows, transforms

transforms.fill(torch_rows.ROWS, torch_rows.BY_CODE)

__all__ = ["array_rows", "autograd_rows", "builtin_rows", "torch_rows", "training_rows", "transforms"]
