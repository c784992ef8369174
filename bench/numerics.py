"""How exact compiled code is: the error of every contraction operator and of whole models against a float64 reference, beside eager's.

    python bench/numerics.py [--only REGEX] [--models MODEL ...] [--out FOLDER]

The bar: error <= max(2 x eager's error, 4 eps x max|reference|), the largest element counts. Infinities, NaN and denormals must come out
where eager has them. In: nothing. Out: a table on stdout and bench/results/numerics.md; exit status 1 if something misses the bar.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from suites.harness import about  # noqa: E402

from models import MODELS, inputs_of, make_model, tensors_of  # noqa: E402  (the script's own folder comes first)

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """fn(*activations, *weights): the first `changing` of `sizes` are activations, the rest weights that a module owns."""

    name: str
    fn: Callable[..., Tensor]
    sizes: tuple[Sizes, ...]
    changing: int = 1


CASES = (
    Case("linear", F.linear, ((37, 300), (70, 300), (70,))),
    Case("linear one row", F.linear, ((1, 1000), (130, 1000), (130,))),
    Case("linear long sum", F.linear, ((5, 20000), (33, 20000))),
    Case("mm", torch.mm, ((50, 129), (129, 65))),
    Case("mm of activations", torch.mm, ((50, 129), (129, 65)), 2),
    Case("addmm", lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0), ((33, 64), (64, 48), (48,))),
    Case("mv", torch.mv, ((60, 200), (200,))),
    Case("one row of activations", torch.bmm, ((4, 1, 70), (4, 70, 50)), 2),
    Case("dot", torch.dot, ((5000,), (5000,)), 2),
    Case("bmm", torch.bmm, ((4, 30, 70), (4, 70, 20)), 2),
    Case("baddbmm", lambda x, y, b: torch.baddbmm(b, x, y), ((4, 30, 70), (4, 70, 20), (4, 30, 20)), 2),
    Case("matmul broadcast", torch.matmul, ((2, 3, 20, 40), (40, 50))),
    Case("einsum", lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), ((2, 3, 20, 32), (2, 3, 24, 32)), 2),
    Case("conv1d", lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=3), ((2, 20, 100), (30, 20, 7), (30,))),
    Case("conv2d 1x1", F.conv2d, ((1, 130, 14, 14), (70, 130, 1, 1), (70,))),
    Case("conv2d 3x3", lambda x, w, b: F.conv2d(x, w, b, padding=1), ((1, 64, 15, 15), (48, 64, 3, 3), (48,))),
    Case("conv2d 3x3 stride 2", lambda x, w: F.conv2d(x, w, stride=2, padding=1), ((2, 33, 17, 19), (40, 33, 3, 3))),
    Case("conv2d 7x7 image", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=3), ((1, 3, 40, 40), (64, 3, 7, 7), (64,))),
    Case("conv2d dilated", lambda x, w: F.conv2d(x, w, padding=2, dilation=2), ((1, 24, 20, 20), (24, 24, 3, 3))),
    Case("conv2d grouped", lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=4), ((2, 32, 14, 14), (48, 8, 3, 3), (48,))),
    Case("conv2d depthwise", lambda x, w, b: F.conv2d(x, w, b, padding=2, groups=50), ((1, 50, 14, 14), (50, 1, 5, 5), (50,))),
    Case("conv2d transposed", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1), ((1, 20, 9, 9), (20, 24, 4, 4), (24,))),
    Case("conv3d", lambda x, w: F.conv3d(x, w, padding=1), ((1, 9, 8, 9, 10), (17, 9, 3, 3, 3))),
    Case("attention", F.scaled_dot_product_attention, ((2, 3, 40, 32),) * 3, 3),
    Case("attention, causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ((1, 2, 70, 64),) * 3, 3),
    Case("linear and gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), ((40, 96), (80, 96), (80,))),
    Case("conv2d, batch norm, residual",
         lambda x, w, s, b: F.relu(F.batch_norm(F.conv2d(x, w, padding=1), b, s.abs() + 1, s, b) + x),
         ((1, 32, 14, 14), (32, 32, 3, 3), (32,), (32,))),
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Layer(nn.Module):
    """A case with its weights as parameters."""

    def __init__(self, case: Case, weights: list[Tensor]) -> None:
        super().__init__()
        self.case, self.weights = case, nn.ParameterList(nn.Parameter(w) for w in weights)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.case.fn(*inputs, *self.weights)


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    ours: float
    eager: float
    bar: float
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.ours <= self.bar and not self.detail

    def row(self) -> str:
        cells = [self.name, f"{self.ours:.2e}", f"{self.eager:.2e}", f"{self.bar:.2e}", self.detail or ("ok" if self.holds else "MISSED")]
        return "| " + " | ".join(cells) + " |"


def judge(name: str, ours: Any, eager: Any, reference: Any) -> Outcome:
    """Errors of both against the reference, the output that is worst for us."""
    worst: Outcome | None = None
    for got, usual, want in zip(tensors_of(ours), tensors_of(eager), tensors_of(reference), strict=True):
        if not want.dtype.is_floating_point:
            continue
        if got.shape != want.shape or got.dtype != usual.dtype:
            return Outcome(name, float("inf"), 0.0, 0.0, f"{got.dtype} {tuple(got.shape)}")
        errors = [float((t.double() - want.double()).abs().max()) if t.numel() else 0.0 for t in (got, usual)]
        bar = max(2 * errors[1], 4 * torch.finfo(got.dtype).eps * float(want.abs().max()) if want.numel() else 0.0)
        outcome = Outcome(name, *(e if e == e else float("inf") for e in errors), bar)
        if worst is None or outcome.ours / max(outcome.bar, 1e-300) > worst.ours / max(worst.bar, 1e-300):
            worst = outcome
    assert worst is not None
    return worst


def layer_of(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[Layer, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in case.sizes]
    # Multiples of 2^-16: sums of products are exact in float64, so that eager's float64 result is a reference for itself.
    tensors = [(t * 65536).round() / 65536 if dtype is torch.float64 else t.to(dtype) for t in tensors]
    return Layer(case, tensors[case.changing :]).eval(), tensors[: case.changing]


def compiled(module: nn.Module) -> Callable[..., Any]:
    import torchsmith

    torchsmith.compiler.reset()
    return torchsmith.compile(module)  # type: ignore[no-any-return]


def check_case(case: Case, dtype: torch.dtype) -> Outcome:
    layer, inputs = layer_of(case, dtype)
    exact = copy.deepcopy(layer).double()
    with torch.no_grad():
        reference = exact(*(t.double() for t in inputs)) if dtype is not torch.float64 else layer(*inputs)
        return judge(f"{case.name}, {dtype}".replace("torch.", ""), compiled(layer)(*inputs), layer(*inputs), reference)


def specials(t: Tensor, which: str) -> Tensor:
    """`t` with some elements replaced: "inf", "nan", "huge" (products overflow), "denormal" (everything tiny)."""
    t = t.clone()
    flat = t.view(-1)
    if which == "denormal":
        return t * 1e-20
    if which == "huge":
        return t.abs() * 1e20  # of one sign: else the order of a sum decides whether infinities cancel
    for at, value in ((0, float(which)), (flat.numel() // 2, -float(which))):
        flat[at] = value
    return t


def check_special(case: Case, which: str, where: int) -> Outcome:
    """Operand `where` holds special values (denormal and huge: every operand): NaN and infinities where eager has them."""
    layer, inputs = layer_of(case, torch.float32)
    everywhere = which in ("denormal", "huge")
    inputs = [specials(t, which) if everywhere or i == where else t for i, t in enumerate(inputs)]
    with torch.no_grad():
        for i, w in enumerate(layer.weights):
            if everywhere or i + case.changing == where:
                w.copy_(specials(w, which))
        got, want = compiled(layer)(*inputs), layer(*inputs)
        reference = copy.deepcopy(layer).double()(*(t.double() for t in inputs))
    name = f"{case.name}, {which}" + ("" if everywhere else f" in operand {where}")
    finite = want.isfinite() & got.isfinite() & reference.isfinite()
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        # Where a weight is infinite and the image is padded, eager's kernels do not agree on 0 * inf: either answer is eager's.
        wrong = int(((test(got) != test(want)) & (test(got) != test(reference.float()))).sum())
        if wrong:
            return Outcome(name, float("inf"), 0.0, 0.0, f"{wrong} of {want.numel()} elements differ in being {kind}")
    zero = torch.zeros(())
    return judge(name, *(torch.where(finite, t, zero.to(t.dtype)) for t in (got, want, reference)))


def check_model(name: str, batch: int = 1) -> Outcome:
    model, inputs = make_model(name), inputs_of(name, batch)
    with torch.no_grad():
        eager, ours = model(*inputs), compiled(model)(*inputs)
        exact = copy.deepcopy(model).double()
        reference = exact(*(t.double() if t.is_floating_point() else t for t in inputs))
    return judge(f"{name}, batch {batch}", ours, eager, reference)


def checks(only: str, models: list[str]) -> Iterator[Outcome]:
    def wanted(name: str) -> bool:
        return re.search(only, name) is not None

    for case in CASES:
        if wanted(case.name):
            yield from (check_case(case, dtype) for dtype in DTYPES)
            yield from (check_special(case, which, where) for which in ("inf", "nan") for where in range(min(2, len(case.sizes))))
            yield from (check_special(case, which, 0) for which in ("denormal", "huge"))
    yield from (check_model(name) for name in models if wanted(name))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", metavar="REGEX")
    p.add_argument("--models", nargs="*", default=list(MODELS), metavar="MODEL")
    p.add_argument("--out", type=Path, default=HERE / "results")
    args = p.parse_args()
    rows = ["| what | our error | eager's error | bar | |", "|---|---|---|---|---|"]
    missed = []
    for outcome in checks(args.only, args.models):
        rows.append(outcome.row())
        missed += [] if outcome.holds else [outcome]
        print(outcome.row(), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    summary = f"{len(rows) - 2 - len(missed)} of {len(rows) - 2} hold."
    facts = about() | {"command": " ".join(["python bench/numerics.py", *(f"--only '{args.only}'" for _ in args.only[:1])])}
    header = ["# bench/numerics.py", "", *(f"- {k}: {v}" for k, v in facts.items()), "", summary]
    (args.out / "numerics.md").write_text("\n".join([*header, "", *rows, ""]))
    print(f"\n{summary}")
    print("\n".join(f"missed: {o.row()}" for o in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
