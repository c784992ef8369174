"""Whole models captured in one graph: the graph run eagerly gives eager's result, under guards that hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from capturing import Run, same

pytestmark = pytest.mark.models


def vision(name, size=64, **settings):
    import torchvision

    return getattr(torchvision.models, name)(weights=None, **settings).eval(), (torch.randn(1, 3, size, size),), {}


def image(name):
    import timm

    model = timm.create_model(name, pretrained=False).eval()
    return model, (torch.randn(1, *model.default_cfg["input_size"]),), {}


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}


def language(kind, *, config=None, mask=True, **inputs):
    import transformers

    config_class = getattr(transformers, kind.removesuffix("Model").removesuffix("ForCausalLM") + "Config")
    model = getattr(transformers, kind)(config_class(**TINY | (config or {})))
    ids = torch.randint(0, 90, (2, 10))
    if mask:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, 6:] = 0
    return model.eval(), (), {"input_ids": ids, **inputs}


MODELS = {
    "resnet18": lambda: vision("resnet18"),
    "mobilenet_v2": lambda: vision("mobilenet_v2"),
    "vgg11_bn": lambda: vision("vgg11_bn"),
    "squeezenet1_1": lambda: vision("squeezenet1_1"),
    "densenet121": lambda: vision("densenet121"),
    "efficientnet_b0": lambda: vision("efficientnet_b0"),
    "convnext_tiny": lambda: vision("convnext_tiny"),
    "vit_b_16": lambda: vision("vit_b_16", 224),
    "swin_t": lambda: vision("swin_t"),
    "timm vit": lambda: image("vit_tiny_patch16_224"),
    "timm convnext": lambda: image("convnext_atto"),
    "timm mixer": lambda: image("mixer_s32_224"),
    "bert": lambda: language("BertModel", token_type_ids=torch.zeros(2, 10, dtype=torch.long)),
    "bert with hidden states": lambda: language("BertModel", output_hidden_states=True),
    "distilbert": lambda: language("DistilBertModel", config={"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    "llama": lambda: language("LlamaForCausalLM", use_cache=False),
    "gpt2": lambda: language("GPT2Model", config={"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "deberta": lambda: language("DebertaV2Model", config={"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_graph(name):
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    with torch.no_grad():
        run = Run(model, *args, **kwargs)
        same(run(model, *args, **kwargs), model(*args, **kwargs))
        if "hidden" not in name:  # the first call installs hooks
            assert run.failing(model, *args, **kwargs) is None


@pytest.mark.parametrize("name", ["resnet50", "bert"])
def test_capture_is_fast(name):
    """Calls of Python functions are counted: seconds depend on the machine, and on what else it does."""
    if name == "bert":
        model, args, kwargs = language("BertModel", config={"num_hidden_layers": 12})
    else:
        model, args, kwargs = vision(name)
    calls = 0

    def watch(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    with torch.no_grad():
        Run(model, *args, **kwargs)
        sys.setprofile(watch)
        try:
            Run(model, *args, **kwargs)
        finally:
            sys.setprofile(None)
    assert 1_000 < calls < 250_000, calls  # 150,000 are 0.15 s; guards are also evaluated here, slowly
