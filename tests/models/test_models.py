"""Real models: one graph, no break, every output within 1e-4 of eager's maximum; again with other batches, dtypes and weights."""

from __future__ import annotations

import copy
import importlib
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import torchsmith
from models import MODELS, check_sensitive, inputs_of, make_model, worst_error

LIMIT = 1e-4
REPRESENTATIVE = ("resnet18", "bert_small")
EVERY = [*REPRESENTATIVE, *(pytest.param(n, marks=pytest.mark.models) for n in MODELS if n not in REPRESENTATIVE)]


@cache
def shared_model(name: str) -> nn.Module:
    """One instance for the tests that only read it."""
    return make_model(name)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", EVERY)
def test_one_graph_and_right(name: str, batch: int) -> None:
    model = shared_model(name)
    check_sensitive(model, name)
    inputs = inputs_of(name, batch)
    with torch.no_grad():
        want = model(*inputs)
        e = torchsmith.explain(model)(*inputs)
        assert e.graph_count == 1 and not e.breaks and not e.fallbacks, str(e)
        assert e.graphs[0].road == "native", str(e)
        assert worst_error(want, e.result) <= LIMIT
        assert type(e.result) is type(want)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_second_call_sees_its_own_input(name: str) -> None:
    model = make_model(name)
    compiled = torchsmith.compile(model)
    with torch.inference_mode():
        for seed in range(3):
            inputs = inputs_of(name, 2, seed)
            assert worst_error(model(*inputs), compiled(*inputs)) <= LIMIT


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_other_batches(name: str) -> None:
    model = make_model(name)
    compiled = torchsmith.compile(model)
    with torch.no_grad():
        for batch in (1, 3, 2, 5, 1):
            inputs = inputs_of(name, batch)
            assert worst_error(model(*inputs), compiled(*inputs)) <= LIMIT


def test_other_dtypes() -> None:
    model = make_model("resnet18")
    compiled = torchsmith.compile(model)
    (x,) = inputs_of("resnet18", 1)
    with torch.no_grad():
        for dtype, limit in ((torch.float32, LIMIT), (torch.float64, 1e-11), (torch.bfloat16, 0.15), (torch.float32, LIMIT)):
            model.to(dtype)
            want, got = model(x.to(dtype)), compiled(x.to(dtype))
            assert got.dtype == dtype and worst_error(want, got) <= limit, dtype


def test_token_dtype_and_keywords() -> None:
    model = make_model("bert_small")
    compiled = torchsmith.compile(model)
    (ids,) = inputs_of("bert_small", 2)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        for given in ({"input_ids": ids}, {"input_ids": ids.int()}, {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, :7]}):
            assert worst_error(model(**given), compiled(**given)) <= LIMIT


def python_calls(call: Any) -> list[str]:
    """Python functions and methods entered while `call` runs, its own frame not counted."""
    seen: list[str] = []

    def watch(frame: Any, kind: str, arg: Any) -> None:
        if kind == "call":
            seen.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen[1:]


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.models)])
def test_few_python_calls_per_call(name: str) -> None:
    model, inputs = make_model(name), inputs_of(name)
    compiled = torchsmith.compile(model)
    with torch.no_grad():
        compiled(*inputs)
        compiled(*inputs)
        calls = python_calls(lambda: compiled(*inputs))
    assert len(calls) <= 5, calls


def test_compiled_module_is_a_module() -> None:
    model = make_model("bert_small")
    compiled = torchsmith.compile(model)
    assert isinstance(compiled, nn.Module)
    assert list(compiled.state_dict()) == list(model.state_dict())
    (ids,) = inputs_of("bert_small")
    with torch.no_grad():
        want = model(ids)
        assert worst_error(want, compiled(ids)) <= LIMIT
        twin = copy.deepcopy(compiled)
        assert worst_error(want, twin(ids)) <= LIMIT
        for p in twin.parameters():
            p.mul_(0.5)
        assert worst_error(want, compiled(ids)) <= LIMIT
        zeroed = {n: torch.zeros_like(p) for n, p in compiled.named_parameters()}
        want, got = (torch.func.functional_call(m, zeroed, ids).last_hidden_state for m in (model, compiled))
        torch.testing.assert_close(got, want)


def test_windows_of_a_video() -> None:
    """At batch 2 a product reads its right-hand operand through divisions that no k of the product feels, but the end of its last panel."""
    video = importlib.import_module("torchvision.models.video.swin_transformer")
    torch.manual_seed(0)
    model = video.SwinTransformer3d([2, 4, 4], 384, [2], [3], [8, 7, 7], num_classes=4, stochastic_depth_prob=0.0).eval()
    compiled = torchsmith.compile(model)
    for batch in (1, 2):
        x = torch.randn(batch, 3, 16, 16, 16)
        with torch.inference_mode():
            assert worst_error(model(x), compiled(x)) <= LIMIT
