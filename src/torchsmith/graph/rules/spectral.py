"""Shape rules of Fourier transforms; stft, istft, windows and frequencies of unknown sizes in their parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..layout import Size, rank_of, strides_in_order
from ..tracing import Tracing, device_of, fresh, function_rule, make, rule
from .views import axis, copy_strides

aten = torch.ops.aten
Tensor = torch.Tensor


def _transformed(self: Tensor, dims: Sequence[int], shape: Sequence[Size], dtype: torch.dtype, last: bool) -> Tensor:
    """A result in the order in which eager's kernel leaves it. MKL puts the transformed dimensions behind the others, each kind
    in the order of the input's strides (`last`: the last of `dims` stays last); pocketfft's result is contiguous."""
    if not torch.backends.mkl.is_available():
        return fresh(shape, dtype)
    strides = self.stride()

    def in_order(among: Sequence[int]) -> list[int]:
        return sorted(among, key=lambda d: -rank_of(strides[d]))

    dims = [axis(d, self.dim()) for d in dims]
    inner = [*in_order(dims[:-1]), dims[-1]] if last else in_order(dims)
    outer = in_order([d for d in range(self.dim()) if d not in dims])
    return make(shape, strides_in_order(shape, [*outer, *inner][::-1]), dtype)


def _with_size(self: Tensor, dim: int, size: Size) -> list[Size]:
    d = axis(dim, self.dim())
    return [size if i == d else s for i, s in enumerate(self.shape)]


def _is_elsewhere(self: Tensor) -> bool:
    return device_of(self).type != "cpu"


AT_ONCE = 3  # dimensions that cuFFT transforms in one call


def _in_one_call(self: Tensor, dims: Sequence[int], shape: Sequence[Size], dtype: torch.dtype) -> Tensor:
    """A call of cuFFT: the other dimensions in the order of the operand's strides, behind them those transformed, as they are named."""
    strides = self.stride()
    outer = sorted((d for d in range(self.dim()) if d not in dims), key=lambda d: -rank_of(strides[d]))
    return make(shape, strides_in_order(shape, [*outer, *dims][::-1]), dtype)


def _in_calls(self: Tensor, dims: Sequence[int], shape: Sequence[Size]) -> Tensor:
    """Complex to complex, from the fastest dimensions on; each call finds the order in which the one before has left them."""
    left = list(dims)
    while left:
        strides = self.stride()
        left.sort(key=lambda d: -rank_of(strides[d]))
        self = _in_one_call(self, left[-AT_ONCE:], shape, self.dtype)
        del left[-AT_ONCE:]
    return self


def _is_one_call(dims: Sequence[int]) -> bool:
    """Does eager give a transform to or from real numbers to cuFFT as it is?"""
    return len(dims) <= AT_ONCE and tuple(dims[:2]) != (0, 1)


@rule(aten._fft_c2c.default)
def complex_to_complex(self: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    if not dim:
        return make(self.shape, copy_strides(self, None), self.dtype)
    if _is_elsewhere(self):
        return _in_calls(self, [axis(d, self.dim()) for d in dim], self.shape)
    return _transformed(self, dim, self.shape, self.dtype, last=False)


@rule(aten._fft_r2c.default)
def real_to_complex(self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    half = _with_size(self, dim[-1], self.shape[dim[-1]] // 2 + 1)
    shape, kind = half if onesided else self.shape, self.dtype.to_complex()
    if not _is_elsewhere(self):
        return _transformed(self, dim, shape, kind, last=True)
    dims = [axis(d, self.dim()) for d in dim]
    if _is_one_call(dims):
        return _in_one_call(self, dims, shape, kind)
    made = _in_calls(_in_one_call(self, dims[-1:], half, kind), dims[:-1], half)
    return made if half[dims[-1]] == shape[dims[-1]] else fresh(shape, kind)  # the other half is filled in, in new memory


@rule(aten._fft_c2r.default)
def complex_to_real(self: Tensor, dim: Sequence[int], normalization: int, last_dim_size: Size) -> Tensor:
    if last_dim_size < 1:
        raise RuntimeError(f"Invalid number of data points ({last_dim_size}) specified")
    shape, kind = _with_size(self, dim[-1], last_dim_size), self.dtype.to_real()
    if not _is_elsewhere(self):
        if len(dim) > 1:
            self = complex_to_complex(self, dim[:-1], normalization, False)
        return _transformed(self, dim[-1:], shape, kind, last=True)
    dims = [axis(d, self.dim()) for d in dim]
    if _is_one_call(dims):
        return _in_one_call(fresh(self.shape, self.dtype), dims, shape, kind)
    return _in_one_call(_in_calls(self, dims[:-1], self.shape), dims[-1:], shape, kind)


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
        window = torch.ones(width, dtype=input.dtype, device=device_of(input)) if window is None else window
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


@function_rule(torch.istft, Tensor.istft)
def istft(
    trace: Tracing, call: Any, input: Tensor, n_fft: int, hop_length: Any = None, win_length: Any = None, window: Any = None,
    center: bool = True, normalized: bool = False, onesided: Any = None, length: Any = None, return_complex: bool = False,
) -> Tensor:  # fmt: skip
    """In eager's parts: back to frames, added where they overlap, divided by what their windows add up to. That none of these sums is zero
    is checked when the graph runs."""
    rest = (hop_length, win_length, window, center, normalized, onesided, length, return_complex)
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    half = input.is_complex() and not return_complex if onesided is None else onesided
    is_usual = input.is_complex() and input.dim() in (2, 3) and not return_complex and (window is None or not window.is_complex())
    if not is_usual or not 0 < hop <= width <= n_fft:
        return call(input, n_fft, *rest)  # type: ignore[no-any-return]
    if input.shape[-2] != (n_fft // 2 + 1 if half else n_fft):
        raise RuntimeError(f"istft: expected {n_fft // 2 + 1 if half else n_fft} frequencies for n_fft={n_fft}, but got {input.shape[-2]}")
    whole = torch.ones(width, dtype=input.dtype.to_real(), device=device_of(input)) if window is None else window
    if width < n_fft:
        left = (n_fft - width) // 2
        whole = torch.constant_pad_nd(whole, [left, n_fft - width - left])
    bands = (input if input.dim() == 3 else input.unsqueeze(0))[:, : n_fft // 2 + 1]
    frames = aten._fft_c2r.default(bands, [1], int(normalized) or 2, n_fft) * whole.unsqueeze(1)
    count = input.shape[-1]
    total = n_fft + hop * (count - 1)

    def added(parts: Tensor) -> Tensor:
        return aten.col2im.default(parts, [1, total], [1, n_fft], [1, 1], [0, 0], [1, hop]).view(parts.shape[0], total)

    signal, weight = added(frames), added((whole * whole)[None, :, None].expand(1, n_fft, count))
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else total - start
    kept = torch.sym_min(end, total)
    signal, weight = signal[:, start:kept], weight[:, start:kept]
    aten._assert_async.msg((weight.abs() >= 1e-11).all(), "istft: the windows overlap nowhere at some place: their sum is zero")
    signal = signal / weight
    if length is not None:
        signal = torch.constant_pad_nd(signal, [0, end - kept])
    return signal if input.dim() == 3 else signal.squeeze(0)


# ---------------------------------------------------------------- windows and frequencies


def _cosines(*weights: float) -> Any:
    """A window that is a sum of cosines: w0 - w1 cos(x) + w2 cos(2 x) over x in [0, 2 pi)."""

    def window(trace: Tracing, call: Any, window_length: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(window_length, torch.SymInt) or len(args) > 1 or "alpha" in kwargs or "beta" in kwargs:
            return call(window_length, *args, **kwargs)  # type: ignore[no-any-return]
        dtype, device = kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device")
        n: Any = window_length
        if n == 1:
            return torch.ones(1, dtype=dtype, device=device)
        is_periodic = args[0] if args else kwargs.get("periodic", True)
        at = torch.arange(n, dtype=dtype, device=device) * (2 * math.pi / (n if is_periodic else n - 1))
        terms = [at.cos() * -w if k == 1 else (at * float(k)).cos() * w for k, w in enumerate(weights) if k]
        total = terms[0] + weights[0]
        for term in terms[1:]:
            total = total + term
        return total

    return window


for _names, _weights in ((torch.hann_window, (0.5, 0.5)), (torch.hamming_window, (0.54, 0.46)), (torch.blackman_window, (0.42, 0.5, 0.08))):
    function_rule(_names)(_cosines(*_weights))


@function_rule(torch.bartlett_window)
def bartlett_window(trace: Tracing, call: Any, window_length: Any, periodic: bool = True, **options: Any) -> Tensor:
    """Up and down again in straight lines."""
    if not isinstance(window_length, torch.SymInt):
        return call(window_length, periodic, **options)  # type: ignore[no-any-return]
    dtype, device = options.get("dtype") or torch.get_default_dtype(), options.get("device")
    n: Any = window_length
    if n == 1:
        return torch.ones(1, dtype=dtype, device=device)
    at = torch.arange(n, dtype=dtype, device=device) * (2.0 / (n if periodic else n - 1))
    return torch.where(at <= 1, at, 2 - at)


def _frequencies(fn: Any, half: bool) -> None:
    def frequencies(trace: Tracing, call: Any, n: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(n, torch.SymInt):
            return call(n, *args, **kwargs)  # type: ignore[no-any-return]
        d = args[0] if args else kwargs.get("d", 1.0)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        size: Any = n
        at = torch.arange(size // 2 + 1 if half else size, dtype=dtype, device=kwargs.get("device"))
        if not half:
            at = torch.where(at < (size + 1) // 2, at, at - size)
        return at * (1.0 / (size * d))

    function_rule(fn)(frequencies)


_frequencies(torch.fft.fftfreq, False)
_frequencies(torch.fft.rfftfreq, True)
