"""PyTorch as the host of compiled graphs: the only file of this room that imports torch.

In: a library and its manifest. Out: a `_native.Graph` whose extern calls are bound to torch's C functions or Python operators.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from .. import events
from ..ir.dtype import DTYPE_ROWS
from . import _native
from .discarded import DiscardedParameter, discard
from .externs_torch import DTYPES, bind
from .load import NativeError
from .manifest import Manifest

# torch's numbers of the types of device that graphs run on.
DEVICE_TYPES = {"cpu": 0, "cuda": 1}
NUMBER_KINDS = {"f64": 3, "f32": 3, "bool": 4}  # index and integers: 2


@functools.cache
def setup() -> None:
    """Give the native module what it cannot find by symbol name."""
    base = torch._C.TensorBase
    _native.setup({
        "plain": torch.Tensor, "parameter": torch.nn.Parameter,
        "samples": [torch.zeros(()), torch.nn.Parameter(torch.zeros(2)), torch.zeros(3, dtype=torch.int64)],
        "tensor": base,
        "steal": torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr,
        "as_strided": base.as_strided,
        "view": _view_as,
        "increment_version": _bump_version,
        "is_autocast": functools.partial(torch.is_autocast_enabled, "cpu"),
        "disable_autocast": _enter_no_autocast,
        "modes": _modes,
        "record_begin": _begin,
        "record_end": _end,
        "on_prepare": _on_prepare,
        "storage_ref": _storage_ref,
        "counter": _counter,
        "discard": discard,
        "discarded": DiscardedParameter,
        "error": NativeError,
    })  # fmt: skip


def _view_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory that starts where `tensor` does, as another dtype; the caller gives it sizes and strides."""
    if tensor.element_size() != dtype.itemsize:  # torch would ask for sizes and strides that can be divided
        parts = max(1, dtype.itemsize // tensor.element_size())
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        tensor = tensor.as_strided((parts if room >= parts else 0,), (1,))  # 0: the view has no elements
    return tensor.view(dtype)


def _storage_ref(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    """Lives as long as the tensor's memory. A reference to the tensor itself would forbid torch.utils.swap_tensors."""
    with torch._C.DisableTorchFunction():
        return weakref.ref(tensor.untyped_storage())


def _counter(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written: -1 where that is not counted. Raises where there is no memory (functorch, empty tensors)."""
    with torch._C.DisableTorchFunction():
        if not tensor.data_ptr():
            raise RuntimeError("no memory")
        return -1 if tensor.is_inference() else tensor._version


def _on_prepare(name: str, size: int, original: int) -> None:
    events.emit("prepare", graph=name, bytes=size, original=original)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Recording:
    """What this thread queues on a stream of its own, captured into a graph, and the memory that the graph uses.

    The driver is asked, not torch.cuda.CUDAGraph, which keeps every other thread of the process from drawing random numbers meanwhile.
    """

    THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of other threads are theirs

    def __init__(self, device: int) -> None:
        self.graph = ctypes.c_void_p()
        self.stream = torch.cuda.Stream(device, priority=-1)  # of another pool than the streams that users take: nobody else queues on it
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self.stream))
            self.pool = torch.cuda.MemPool()
            stack.enter_context(torch.cuda.use_mem_pool(self.pool, device))
            self._ask("cuStreamBeginCapture_v2", ctypes.c_void_p(self.stream.cuda_stream), self.THREAD_LOCAL)
            self.open = stack.pop_all()

    def end(self) -> int:
        """The captured graph, as the driver names it. Raises RuntimeError where the capture failed."""
        try:
            self._ask("cuStreamEndCapture", ctypes.c_void_p(self.stream.cuda_stream), ctypes.byref(self.graph))
        finally:
            self.open.close()
            torch._C._cuda_clearCublasWorkspaces()  # those of this stream lie in the capture's memory
        return int(self.graph.value or 0)

    @staticmethod
    def _ask(function: str, *args: Any) -> None:
        if status := getattr(_driver(), function)(*args):
            raise RuntimeError(f"{function} returned {status}")

    def __del__(self) -> None:
        if self.graph.value:
            _driver().cuGraphDestroy(self.graph)


def _record_begin(device: int) -> tuple[Any, int]:
    """Begin to capture what this thread queues; gives a token, which owns what is captured, and the stream to queue on."""
    recording = Recording(device)
    return recording, recording.stream.cuda_stream


# By type of device: how library calls are recorded.
RECORDERS: dict[str, tuple[Callable[[int], tuple[Any, int]], Callable[[Any], int]]] = {"cuda": (_record_begin, Recording.end)}


def _begin(device: int) -> tuple[Any, int]:
    return RECORDERS["cuda"][0](device)


def _end(token: Any) -> int:
    return RECORDERS["cuda"][1](token)


# Switches of the process that operators look at besides their arguments: (`torch._C._get_NAME`, the same reader of at::Context, what looks
# at it). A torch that lacks one has no such state.
SWITCHES = tuple(
    row for row in (
        ("deterministic_algorithms", "23deterministicAlgorithms", "all"),
        ("deterministic_algorithms_warn_only", "31deterministicAlgorithmsWarnOnly", "all"),
        ("deterministic_fill_uninitialized_memory", "36deterministicFillUninitializedMemory", "all"),
        ("mkldnn_enabled", "17userEnabledMkldnn", "cpu"),
        ("mkldnn_deterministic", "19deterministicMkldnn", "cpu"),
        ("nnpack_enabled", "17userEnabledNNPACK", "cpu"),
        ("cpu_allow_fp16_reduced_precision_reduction", "21allowFP16ReductionCPU", "cpu"),
        ("flash_sdp_enabled", "19userEnabledFlashSDP", "all"),
        ("math_sdp_enabled", "18userEnabledMathSDP", "all"),
        ("math_sdp_allow_fp16_bf16_reduction", "29allowFP16BF16ReductionMathSDP", "all"),
        ("fa3_sdp_enabled", "17userEnabledFA3SDP", "cuda"),
        ("mem_efficient_sdp_enabled", "26userEnabledMemEfficientSDP", "cuda"),
        ("cudnn_sdp_enabled", "19userEnabledCuDNNSDP", "cuda"),
        ("overrideable_sdp_enabled", "26userEnabledOverrideableSDP", "cuda"),
        ("cublas_allow_fp16_reduced_precision_reduction", "24allowFP16ReductionCuBLAS", "cuda"),
        ("cublas_allow_bf16_reduced_precision_reduction", "24allowBF16ReductionCuBLAS", "cuda"),
        ("cublas_allow_fp16_accumulation", "27allowFP16AccumulationCuBLAS", "cuda"),
        ("cudnn_enabled", "16userEnabledCuDNN", "cuda"),
        ("cudnn_benchmark", "14benchmarkCuDNN", "cuda"),
        ("cudnn_deterministic", "18deterministicCuDNN", "cuda"),
    ) if hasattr(torch._C, f"_get_{row[0]}")
)  # fmt: skip
# The float32 precisions: (name of the backend, of the operation, torch's numbers for them, what looks at it). `allow_tf32` and
# `float32_matmul_precision` are older names for some of these, and asking by them raises where both ways of setting were used.
PRECISIONS = tuple(
    row for row in (
        ("mkldnn", "matmul", (2, 3), "all"),  # what set_float32_matmul_precision sets; a reading takes 10 ns, so the rest is for GPUs
        ("mkldnn", "conv", (2, 1), "cuda"), ("mkldnn", "rnn", (2, 2), "cuda"),
        ("cuda", "conv", (1, 1), "cuda"), ("cuda", "rnn", (1, 2), "cuda"), ("cuda", "matmul", (1, 3), "cuda"),
    ) if hasattr(torch._C, "_get_fp32_precision_getter")
)  # fmt: skip


@functools.cache
def watched() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The rows of SWITCHES and PRECISIONS that something in this process can look at: reading them is part of every call."""
    kinds = {"all", "cpu"} | ({"cuda"} if torch.backends.cuda.is_built() and torch.cuda.device_count() else set())
    return tuple(row for row in SWITCHES if row[2] in kinds), tuple(row for row in PRECISIONS if row[3] in kinds)


def switches() -> tuple[tuple[str, Any], ...]:
    """The present value of every watched row."""
    plain, precisions = watched()
    found = [(row[0], getattr(torch._C, f"_get_{row[0]}")()) for row in plain]
    return (*found, *((f"{b}.{o}.fp32_precision", torch._C._get_fp32_precision_getter(b, o)) for b, o, *_ in precisions))


_MODES = (
    *(getattr(torch._C, f"_get_{name}") for name, _, kind in SWITCHES if kind != "cpu"),
    *(functools.partial(torch._C._get_fp32_precision_getter, b, o) for b, o, *_ in PRECISIONS if b == "cuda"),
    *(fn for name in ("blas", "linalg") if (fn := getattr(torch._C, f"_get_{name}_preferred_backend", None)) is not None),
)


def _modes() -> int:
    """A number for what cuBLAS, cuDNN and the attentions look at: library calls that were recorded under another one are not replayed."""
    return hash(tuple(fn() for fn in _MODES))


def _enter_no_autocast() -> Any:
    """A guard, entered: extern calls see the dtypes that were captured, whatever autocast region the caller stands in."""
    guard = torch._C._DisableAutocast()
    guard.__enter__()
    return guard


def _bump_version(tensor: torch.Tensor, times: int) -> None:
    """What so many in-place operators do to the counter; inference tensors have none."""
    if not tensor.is_inference():
        torch._C._increment_version([tensor] * times)


def graph(
    library: str, manifest: Manifest, eager: Callable[..., Any] | None, name: str, frozen: bool, tail: Sequence[Any], threads: int,
    pool: str, discard: bool, records: int = 8, writes: Sequence[int] = (),
) -> Callable[..., tuple[Any, ...]]:
    """Load one library as a callable."""
    setup()
    once = [int(bool(row.get("written"))) for row in manifest.inputs[len(writes) :]]
    inputs = [(*_input(row), n) for row, n in zip(manifest.inputs, (*writes, *once), strict=True)]
    results = [_result(row) for row in manifest.results]
    device, _, index = manifest.device.partition(":")
    externs = [bind(row, device) for row in manifest.externs]
    name = name or manifest.name
    if device == "cuda" and torch.cuda.is_available():
        tail = [t.to(manifest.device) for t in tail]
    fallback = None if eager is None else functools.partial(_repeat, eager, name)
    return _native.Graph(
        library, manifest.symbol, inputs, results, externs, fallback, manifest.consts, name, frozen, tuple(tail), threads, pool == "own",
        manifest.packing, discard, DEVICE_TYPES[device], int(index or 0), records,
    )  # fmt: skip


def _repeat(eager: Callable[..., Any], name: str, *inputs: Any) -> Any:
    """Repeat a call whose native run reported an error: the exception, if any, is eager's own."""
    events.emit("fallback", code="RUN004", graph=name, detail=_native.last_error())
    return eager(*inputs)


def _input(row: Mapping[str, Any]) -> tuple[int, int, int, int]:
    if row["kind"] == "number":
        return (NUMBER_KINDS.get(row["dtype"], 2), 0, 0, 0)
    flags = bool(row.get("measured")) | bool(row.get("written")) << 1 | bool(row.get("read", True)) << 2 | bool(row.get("aligned")) << 3
    if row["kind"] == "unused":
        return (0, 0, 0, flags)
    return (1, DTYPE_ROWS.get(row["dtype"], -1), row["ndim"], flags)


def _result(row: Mapping[str, Any]) -> tuple[int, int, int, int, int, Any]:
    kind = row["kind"]
    if kind == "fresh":
        return (0, 0, 0, 0, 0, None)
    if kind == "same":
        return (1, row["of"], 0, 0, 0, None)
    if kind == "input":
        return (2, row["of"], 0, 0, 0, None)
    if kind == "number":
        return (3 + NUMBER_KINDS.get(row["dtype"], 2), 0, 0, row["at"], 0, None)
    where, of = row["of"]
    return (3 if where == "input" else 8 if row["apart"] else 4, of, row["ndim"], row["at"], DTYPE_ROWS[row["dtype"]], DTYPES[row["dtype"]])
