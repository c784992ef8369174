"""Training programs as users write them: what each step leaves is what it leaves eagerly."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import training_programs
from training_features import FEATURES
from training_programs import PROGRAMS, Program, frozen, unlike

import torchsmith
from torchsmith.events import recording

CHEAP = ("accumulate_every_two", "contrastive_with_queue", "data_written_by_hand", "gan_in_one_step", "optimizer_in_backward",
         "scaler_with_overflow", "sharpness_aware", "unfreeze_after_two")  # fmt: skip
FEW = ("copies_of_a_compiled_model_apart", "error_in_a_hook_whole", "functions_of_ones_own_apart",
       "gradients_switched_by_an_argument_whole", "hidden_state_kept_between_steps_apart", "module_hook_comes_and_goes_whole",
       "optimizer_adam_fused_tensor_lr_whole", "states_loaded_between_steps_whole")  # fmt: skip
# What splits whole steps, or has them run eagerly; the others are one graph.
CODES: dict[str, set[str]] = {
    "anomaly_mode": {"API001"}, "autocast_and_scaler": {"CAP020"},
    "embeddings_of_every_kind": {"CAP021", "GRA011"}, "error_behind_backward": {"CAP006"}, "error_in_a_hook": {"CAP006"},
    "errors_that_are_caught": {"CAP006", "CAP025"},
    "layers_dropped_at_random": {"AUT003", "CAP011", "CAP016", "CAP023"},
    "lbfgs_with_closure": {"CAP020"}, "loss_that_is_not_a_number": {"RUN004"},
    "module_hook_comes_and_goes": {"AUT003", "CAP026"},
}  # fmt: skip
NOTES = {"GRA001", "GRA010"}  # a shape was asked of torch


def check(program: Program) -> set[str]:
    """Returns the codes of what was split or ran eagerly."""
    eager = training_programs.run(program, lambda f: f)
    with warnings.catch_warnings(), recording() as got:
        warnings.simplefilter("ignore")
        ours = training_programs.run(program, torchsmith.compile)
    loose = getattr(program, "loose", False)  # bfloat16: another order of sums is another last bit
    found = list(unlike(ours, eager, *((0.03, 0.01) if loose else ())))
    assert not found, "\n".join(found[:20])
    return {e.fields["code"] for e in got if e.kind in ("fallback", "graph_break")} - NOTES


def check_feature(name: str) -> None:
    codes = check(FEATURES[name])
    if name.endswith("_whole"):
        assert codes == CODES.get(name.removesuffix("_whole"), set())


@pytest.mark.parametrize("name", CHEAP)
def test_programs(name: str) -> None:
    check(PROGRAMS[name])


@pytest.mark.heavy
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in CHEAP])
def test_more_programs(name: str) -> None:
    check(PROGRAMS[name])


@pytest.mark.parametrize("name", FEW)
def test_features(name: str) -> None:
    check_feature(name)


@pytest.mark.heavy
@pytest.mark.parametrize("name", [n for n in FEATURES if n not in FEW])
def test_more_features(name: str) -> None:
    check_feature(name)


def test_what_differs_is_found() -> None:
    p = torch.ones(2, requires_grad=True)
    seen: Any = frozen([("p", p), ("p is the same", True), ("loss", 1.0), ("state", {"lr": 0.1, "m": p * 2})])
    assert not list(unlike(seen, seen))
    others: list[Any] = [
        [["p", frozen(p.detach())], *seen[1:]], [seen[0], ["p is the same", False], *seen[2:]], [*seen[:2], ["loss", 1.1], seen[3]],
        seen[:3], [*seen[:3], ["state", {"lr": 0.1}]], [*seen[:3], ["state", {"lr": 0.1, "m": frozen(p * 3)}]], [["p", None], *seen[1:]],
    ]  # fmt: skip
    for other in others:
        assert list(unlike(other, seen)), other
