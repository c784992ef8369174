"""The runners that a comparison knows: each turns (module, inputs) into a callable of no argument that runs the model once.

In: a module in eval mode and its inputs. Out: a Runner; a peer that is not installed or cannot take the model says so with a reason.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Runner = Callable[[], Any]
PEERS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Runner]] = {}
THREADS = os.cpu_count() or 1


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
    return _under_no_grad(torchsmith.compile(model), inputs)


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


@peer("onnxruntime")
def onnxruntime(model: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(model, inputs, path, dynamo=True, verbose=False)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = THREADS
        session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}

    def run() -> Any:
        return [torch.from_numpy(a) for a in session.run(None, feed)]

    return run


@peer("openvino")
def openvino(model: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    import openvino as ov

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        converted = ov.convert_model(model, example_input=inputs if len(inputs) > 1 else inputs[0])
        converted.reshape({p: list(t.shape) for p, t in zip(converted.inputs, inputs, strict=True)})
    # float32 as everyone else here: its default would use bfloat16 where the CPU has it
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS}
    compiled = ov.Core().compile_model(converted, "CPU", settings)
    request = compiled.create_infer_request()
    feed = [t.numpy() for t in inputs]

    def run() -> Any:
        result = request.infer(feed, share_inputs=True)
        return [torch.from_numpy(result[o]) for o in compiled.outputs]

    return run
