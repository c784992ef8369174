"""The runners that a comparison knows: each turns (module, inputs) into a callable of no argument that runs the model once.

In: a module in eval mode and its inputs. Out: a Runner; a peer that is not installed or cannot take the model says so with a reason.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import Tensor, nn

Runner = Callable[[], Any]
PEERS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Runner]] = {}
THREADS = len(os.sched_getaffinity(0))


def peer(name: str) -> Callable[[Any], Any]:
    """Add a row to PEERS; a name is used once."""

    def add(make: Any) -> Any:
        if name in PEERS:
            raise ValueError(f"{name} is there already")
        PEERS[name] = make
        return make

    return add


def _under_no_grad(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Runner:
    def run() -> Any:
        with torch.no_grad():
            return call(*inputs)

    return run


@peer("eager")
def eager(model: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    return _under_no_grad(model, inputs)


@peer("torchsmith")
def torchsmith(model: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    import torchsmith

    torchsmith.compiler.reset()
    return _under_no_grad(torchsmith.compile(model, fullgraph=True), inputs)  # an error, not eager times


@peer("torch.compile")
def torch_compile(model: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    torch.compiler.reset()
    return _under_no_grad(torch.compile(model, dynamic=False), inputs)


@peer("torch.compile freezing")
def torch_compile_freezing(model: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    from torch._inductor import config

    if not config.freezing:  # must be on before the first compile of the process, or a cached graph is used that is not frozen
        raise RuntimeError("run this peer in a process that sets TORCHINDUCTOR_FREEZING=1 at its start")
    return torch_compile(model, inputs)


def cache_folder(model: nn.Module, *packages: str) -> Path:
    """Where what peers make slowly of the models of bench/models.py is kept, by versions; a temporary folder for other models."""
    if getattr(model, "bench_key", None) is None:
        return Path(tempfile.mkdtemp(prefix="torchsmith-bench-"))
    return Path(platformdirs.user_cache_dir("torchsmith-bench")) / "-".join(f"{p}{version(p)}" for p in packages)


def exported(model: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any = None, dynamo: bool = True) -> str:
    """Path of the model as ONNX. Exports are slow: they are kept, by model, seed and input shapes; one with dynamic shapes serves all.

    dynamo False: torch's older exporter; dynamic_shapes has a dict of names for each tensor."""
    sizes = "dynamic" if dynamic_shapes else "_".join("x".join(map(str, t.shape)) for t in inputs)
    path = cache_folder(model, "torch", "onnx", "onnxscript") / f"{getattr(model, 'bench_key', 'model')}-{sizes}" / "model.onnx"
    if not path.exists():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent.parent) as temporary, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            target = str(Path(temporary) / "model.onnx")
            if dynamo:
                torch.onnx.export(model, inputs, target, dynamo=True, verbose=False, dynamic_shapes=dynamic_shapes)
            else:
                names = [f"input{i}" for i in range(len(inputs))]
                axes = dict(zip(names, dynamic_shapes, strict=True))
                torch.onnx.export(model, inputs, target, dynamo=False, input_names=names, dynamic_axes=axes)
            if not path.parent.exists():  # weights may lie in a file beside it
                shutil.copytree(temporary, path.parent)
    return str(path)


@peer("onnxruntime")
def onnxruntime(model: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = THREADS
    session = ort.InferenceSession(exported(model, inputs), settings, providers=["CPUExecutionProvider"])
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}

    def run() -> Any:
        return [torch.from_numpy(a) for a in session.run(None, feed)]

    return run


def openvino_model(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    import openvino as ov

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        converted = ov.convert_model(model, example_input=inputs if len(inputs) > 1 else inputs[0])
        converted.reshape({p: list(t.shape) for p, t in zip(converted.inputs, inputs, strict=True)})
    return converted


@peer("openvino")
def openvino(model: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    import openvino as ov

    converted = openvino_model(model, inputs)
    # float32 as everyone else here: its default would use bfloat16 where the CPU has it
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS}
    compiled = ov.Core().compile_model(converted, "CPU", settings)
    request = compiled.create_infer_request()
    feed = [t.numpy() for t in inputs]

    def run() -> Any:
        result = request.infer(feed, share_inputs=True)
        return [torch.from_numpy(result[o]) for o in compiled.outputs]

    return run
