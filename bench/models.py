"""The ten models of the XLA document and five others, with random weights that make a comparison mean something.

In: a name and a batch size. Out: a module in eval mode and its inputs. Weights are seeded; batch-norm statistics are calibrated on random
input; the affine parameters of every normalisation are perturbed, and biases given values, so that nothing is an identity and another
input moves every output by at least 1e-2 of its maximum (`check_sensitive` refuses a model where it does not).
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MODELS = (
    "resnet18", "resnet50", "resnext50_32x4d", "alexnet", "mobilenet_v2", "mnasnet1_0", "vgg16", "BERT_pytorch", "squeezenet1_1",
    "timm_vision_transformer",
)  # fmt: skip
OUTSIDE = ("densenet121", "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "decoder")  # unknown to whoever tunes for the ten
SEED = 2026
SENSITIVITY = 1e-2
_LIBRARY: list[Any] = []


def torchvision_models() -> Any:
    """torchvision.models, also where torchvision's own extension cannot be loaded (its wheels need the CUDA libraries)."""
    if not _LIBRARY:
        spec = importlib.util.find_spec("torchvision")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError("torchvision is not installed; `make demo` installs it")
        try:
            for extension in sorted(Path(spec.submodule_search_locations[0]).glob("_C*.so")):
                ctypes.CDLL(str(extension), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            # torchvision registers fake kernels for operators of that extension at import, so the names must exist
            _LIBRARY.append(torch.library.Library("torchvision", "DEF"))
            _LIBRARY[0].define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARY[0].define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARY.append(importlib.import_module("torchvision.models"))
    return _LIBRARY[-1]


def _vision(name: str) -> nn.Module:
    module: nn.Module = getattr(torchvision_models(), name)(weights=None)
    return module


def _bert() -> nn.Module:
    torchvision_models()  # transformers and timm import torchvision
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def _bert_small() -> nn.Module:
    torchvision_models()
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128))


def _vit() -> nn.Module:
    torchvision_models()
    import timm

    module: nn.Module = timm.create_model("vit_small_patch16_224", pretrained=False)
    return module


def _decoder() -> nn.Module:
    from decoder import Decoder

    return Decoder()


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "BERT_pytorch": _bert, "bert_small": _bert_small, "timm_vision_transformer": _vit, "decoder": _decoder,
}  # fmt: skip
TOKENS = {"BERT_pytorch": (30522, 128), "bert_small": (1000, 16), "decoder": (8192, 128)}  # vocabulary, length


def inputs_of(name: str, batch: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
    """Positional inputs: images of 224x224, or tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if name in TOKENS:
        vocabulary, length = TOKENS[name]
        return (torch.randint(0, vocabulary, (batch, length), generator=generator),)
    return (torch.randn(batch, 3, 224, 224, generator=generator),)


def make_model(name: str) -> nn.Module:
    """The named model in eval mode, calibrated and perturbed; leaves the global generator as it was."""
    state = torch.get_rng_state()
    try:
        torch.manual_seed(SEED)
        model = FACTORIES[name]() if name in FACTORIES else _vision(name)
        _rescale(model)
        _calibrate(model, inputs_of(name, 4, seed=7))
        _perturb(model)
    finally:
        torch.set_rng_state(state)
    model.bench_key = f"{name}-seed{SEED}"  # type: ignore[assignment]  # names cached exports
    return model.eval()


def _rescale(model: nn.Module) -> None:
    """Weights of plain layers so that signals keep their size through any depth (a default start lets vgg16's die out)."""
    normalised = any(isinstance(m, nn.LayerNorm) for m in model.modules())
    for m in model.modules():
        if isinstance(m, nn.Conv2d | nn.Linear) and not normalised:
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")


def _calibrate(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Batch-norm statistics: the average over a random batch, not the initial 0 and 1."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.momentum = None
        m.reset_running_stats()
    model.train()
    with torch.no_grad():
        model(*inputs)
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum


def _perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm | nn.LayerNorm | nn.GroupNorm):
                m.weight.mul_(torch.empty_like(m.weight).uniform_(0.7, 1.3))
                m.bias.add_(torch.randn_like(m.bias) * 0.1)
            elif isinstance(m, nn.Conv2d | nn.Linear) and m.bias is not None:
                m.bias.add_(torch.randn_like(m.bias) * 0.02)
        for name, p in model.named_parameters():
            if name.endswith("layer_scale"):  # starts at 1e-6: the layers behind it would not show
                p.uniform_(0.3, 0.7)


def tensors_of(result: Any) -> Iterator[Tensor]:
    """The tensors of a model's result, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        for v in result.values():
            yield from tensors_of(v)
    elif isinstance(result, tuple | list):
        for v in result:
            yield from tensors_of(v)


def worst_error(want: Any, got: Any) -> float:
    """max|got - want| / max|want|, the largest over the outputs; no absolute tolerance. NaN anywhere is infinite."""
    worst = 0.0
    for w, g in zip(tensors_of(want), tensors_of(got), strict=True):
        if w.shape != g.shape or w.dtype != g.dtype:
            return float("inf")
        error = float((g.double() - w.double()).abs().max() / w.double().abs().max())
        worst = max(worst, error) if error == error else float("inf")
    return worst


def sensitivity(model: nn.Module, name: str, batch: int = 1) -> float:
    """How far another input moves the output that moves least, as a part of that output's maximum."""
    with torch.no_grad():
        one, two = (list(tensors_of(model(*inputs_of(name, batch, seed)))) for seed in (0, 1))
    return min(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, two, strict=True))


def check_sensitive(model: nn.Module, name: str) -> None:
    moved = sensitivity(model, name)
    if not moved >= SENSITIVITY:
        raise ValueError(f"{name}: another input moves an output by {moved:.2e} of its maximum only; comparing it would prove little")
