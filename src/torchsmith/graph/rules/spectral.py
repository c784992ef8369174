"""Shape rules of Fourier transforms, and stft in its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..layout import Size, contiguous_strides, hint_of, strides_in_order
from ..tracing import Tracing, function_rule, make, rule
from .views import axis, copy_strides

aten = torch.ops.aten
Tensor = torch.Tensor


def _transformed(self: Tensor, dims: Sequence[int], shape: Sequence[Size], dtype: torch.dtype, last: bool) -> Tensor:
    """A result in the order in which eager's kernel leaves it. MKL puts the transformed dimensions behind the others, each kind
    in the order of the input's strides (`last`: the last of `dims` stays last); pocketfft's result is contiguous."""
    if not torch.backends.mkl.is_available():
        return make(shape, contiguous_strides(shape), dtype)
    strides = self.stride()

    def in_order(among: Sequence[int]) -> list[int]:
        return sorted(among, key=lambda d: -hint_of(strides[d]))

    dims = [axis(d, self.dim()) for d in dims]
    inner = [*in_order(dims[:-1]), dims[-1]] if last else in_order(dims)
    outer = in_order([d for d in range(self.dim()) if d not in dims])
    return make(shape, strides_in_order(shape, [*outer, *inner][::-1]), dtype)


def _with_size(self: Tensor, dim: int, size: Size) -> list[Size]:
    d = axis(dim, self.dim())
    return [size if i == d else s for i, s in enumerate(self.shape)]


@rule(aten._fft_c2c.default)
def complex_to_complex(self: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    if not dim:
        return make(self.shape, copy_strides(self, None), self.dtype)
    return _transformed(self, dim, self.shape, self.dtype, last=False)


@rule(aten._fft_r2c.default)
def real_to_complex(self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    shape = _with_size(self, dim[-1], self.shape[dim[-1]] // 2 + 1) if onesided else self.shape
    return _transformed(self, dim, shape, self.dtype.to_complex(), last=True)


@rule(aten._fft_c2r.default)
def complex_to_real(self: Tensor, dim: Sequence[int], normalization: int, last_dim_size: Size) -> Tensor:
    if last_dim_size < 1:
        raise RuntimeError(f"Invalid number of data points ({last_dim_size}) specified")
    if len(dim) > 1:
        self = complex_to_complex(self, dim[:-1], normalization, False)
    return _transformed(self, dim[-1:], _with_size(self, dim[-1], last_dim_size), self.dtype.to_real(), last=True)


@function_rule(torch._VF.stft)  # type: ignore[attr-defined]
def stft(
    trace: Tracing, call: Any, input: Tensor, n_fft: int, hop_length: Any = None, win_length: Any = None, window: Any = None,
    normalized: bool = False, onesided: Any = None, return_complex: Any = None, align_to_window: Any = None,
) -> Tensor:  # fmt: skip
    """A signal of unknown length in eager's parts: frames, the window in their middle, a transform. torch's composite asks for plain
    sizes."""
    rest = (hop_length, win_length, window, normalized, onesided, return_complex)
    if not input._has_symbolic_sizes_strides or align_to_window is not None:
        return call(input, n_fft, *rest, **({} if align_to_window is None else {"align_to_window": align_to_window}))  # type: ignore[no-any-return]
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    complex_result = input.is_complex() or (window is not None and window.is_complex()) if return_complex is None else return_complex
    if (window is not None and window.shape[0] != width) or not 0 < width <= n_fft or hop <= 0 or input.dim() > 2:
        return call(input, n_fft, *rest)  # type: ignore[no-any-return]
    if width < n_fft:
        left = (n_fft - width) // 2
        window = torch.ones(width, dtype=input.dtype) if window is None else window
        window = torch.constant_pad_nd(window, [left, n_fft - width - left])
    if n_fft > input.shape[-1]:
        raise RuntimeError(f"stft: expected 0 < n_fft < {input.shape[-1]}, but got n_fft={n_fft}")
    frames = input.unfold(-1, n_fft, hop)
    if window is not None:
        frames = frames * window
    half = not frames.is_complex() if onesided is None else onesided
    if frames.is_complex():
        out = aten._fft_c2c.default(frames, [frames.dim() - 1], int(normalized), True)
    else:
        out = aten._fft_r2c.default(frames, [frames.dim() - 1], int(normalized), half)
    out = out.transpose(-1, -2)
    return out if complex_result else torch.view_as_real(out)
