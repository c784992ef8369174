"""Ours under PyTorch's capture: torch.compile(model, backend="torchsmith") against torch.compile's own inductor with freezing off."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

from paired import Protocol, compare, geomean

from .harness import Row, ratio_text, run_by_kind, table_by_kind

KINDS = ("inference", "training")
NOTE = (
    "Inductor's time over ours, both behind torch.compile in one process, freezing off, so above 1 ours is faster. Training is forward and "
    "backward of the sum of the outputs' sines, in train mode, gradients set to None; the optimizer is left out: it is eager's on both "
    "sides. error: of results (inference) or of all gradients together (training) against eager, relative to the maximum; "
    "inductor's error stands beside it."
)


def _outputs(result: Any) -> Any:
    """The tensor that counts: the first of several, a transformer's last hidden state."""
    if isinstance(result, dict):
        return result["last_hidden_state"]
    return result[0] if isinstance(result, (tuple, list)) else result


def calls_of(model: Any, inputs: Any, kind: str) -> tuple[Callable[[], Any], Callable[[], list[Any]]]:
    """A call of the compiled (or plain) model, and what it gave as tensors."""
    import torch

    if kind == "inference":
        return lambda: model(*inputs), lambda: [_outputs(model(*inputs))]
    parameters = list(model.parameters())

    def step() -> None:
        for p in parameters:
            p.grad = None
        _outputs(model(*inputs)).sin().sum().backward()

    def gradients() -> list[Any]:
        torch.manual_seed(1)
        step()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]  # AOT autograd gives zeros for no gradient

    return step, gradients


def difference(got: list[Any], want: list[Any]) -> float:
    scale = max(float(w.abs().max()) for w in want)
    return max(float((g - w).abs().max()) for g, w in zip(got, want, strict=True)) / max(scale, 1e-30)


def run_case(case: dict[str, Any]) -> Row:
    import torch

    from models import inputs_of, make_model

    model = make_model(case["model"])
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # draws differ between compilers
    if hasattr(model, "config") and hasattr(model.config, "attention_probs_dropout_prob"):
        model.config.attention_probs_dropout_prob = 0.0
    model.train(case["kind"] == "training")
    inputs = inputs_of(case["model"], case["batch"])
    with torch.set_grad_enabled(case["kind"] == "training"):
        want = calls_of(copy.deepcopy(model), inputs, case["kind"])[1]()
        calls, errors = {}, {}
        for who in ("torchsmith", "inductor"):
            own = copy.deepcopy(model)
            calls[who], results = calls_of(torch.compile(own, backend=who), inputs, case["kind"])
            errors[who] = difference(results(), want)
        pair = compare(calls["torchsmith"], calls["inductor"], Protocol(**case["protocol"]))
    return {"peers": {"inductor": pair.as_dict()}, "failed": [], "errors": errors}


def suite(args: argparse.Namespace) -> list[Row]:
    return run_by_kind(args, "under", KINDS, lambda kind, model, known: None if known else {"suite": "under"}, table, NOTE)


def table(rows: list[Row]) -> str:
    def cells(r: Row) -> list[str]:
        m, e = r["peers"]["inductor"], r["errors"]
        return [ratio_text(r, "inductor"), f"{m['a_ms']:.1f}", f"{e['torchsmith']:.0e}", f"{e['inductor']:.0e}"]

    def means(found: list[Row]) -> list[str]:
        return [f"{geomean([r['peers']['inductor']['ratio'] for r in found]):.2f}", "", "", ""]

    return table_by_kind(rows, KINDS, ("over inductor", "ours ms", "error", "inductor's error"), cells, means)
