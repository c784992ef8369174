"""The whole training step as one graph: forward, loss, backward, optimizer and zero_grad equal eager's, step by step."""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_harness import check_steps, state_of

import fresh
import torchsmith
from torchsmith.events import recording

ORDERS = ("first", "between", "last", "never")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(n: int = 3) -> list[tuple[Any, ...]]:
    torch.manual_seed(1)
    return [(torch.randn(5, 8), torch.randint(0, 4, (5,))) for _ in range(n)]


def step_of(order: str) -> Any:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        if order == "first":
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if order == "between":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if order == "last":
            optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name, options", [("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}), ("Adam", {"lr": 0.01})]
)
def test_orders(order: str, name: str, options: dict[str, Any]) -> None:
    check_steps(mlp(), lambda m: getattr(torch.optim, name)(m.parameters(), **options), step_of(order), batches())


def train_model(model: Any, data: Any, target: Any, optimizer: Any) -> Any:
    loss_fn = torch.nn.CrossEntropyLoss()
    pred = model(data)
    loss = loss_fn(pred, target)
    loss.backward()
    optimizer.step()
    return pred


def test_the_documents_step() -> None:
    """As typed, an optimizer of its own for every batch."""
    ours, eager = mlp(), mlp()
    compiled = torchsmith.compile(train_model, fullgraph=True)
    with recording() as got:
        for x, y in batches(4):
            preds = []
            for model, run in ((ours, compiled), (eager, train_model)):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
                preds.append(run(model, x, y, optimizer))
            torch.testing.assert_close(*preds)
            assert preds[0].requires_grad
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(p.grad, q.grad)
    reports = [e.fields["report"] for e in got if e.kind == "graph"]
    assert [r.road for r in reports] == ["native"] * len(reports) and len(reports) <= 2


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "foreach": True}])
def test_a_step_that_makes_the_state_is_not_compiled(options: dict[str, Any]) -> None:
    """It would outdate its own compilation: one graph for all steps. explain shows the one of the first step."""
    ours, eager = mlp(), mlp()
    made = [torch.optim.SGD(m.parameters(), lr=0.1, **options) for m in (ours, eager)]
    step = step_of("last")
    compiled = torchsmith.compile(step, fullgraph=True)
    with recording() as got:
        for x, y in batches(4):
            torch.testing.assert_close(compiled(ours, made[0], x, y), step(eager, made[1], x, y))
    torch.testing.assert_close(dict(state_of(ours, made[:1])), dict(state_of(eager, made[1:])))
    assert [e.kind for e in got if e.kind in ("outdated", "graph", "recompile", "fallback")] == ["outdated", "graph"]
    model = mlp()
    assert torchsmith.explain(step)(model, torch.optim.SGD(model.parameters(), lr=0.1, **options), x, y).graph_count == 1


def test_a_dictionary_that_is_new_in_each_call_is_filled_by_a_graph() -> None:
    """The first call may have outdated its compilation; the second shows that none does."""

    def fill(x: Tensor, out: dict[str, Tensor]) -> Tensor:
        out["twice"] = x * 2
        return x + 1

    compiled = torchsmith.compile(fill)
    with recording() as got:
        for _ in range(4):
            x, out = torch.randn(3), dict[str, Tensor]()
            torch.testing.assert_close((compiled(x, out), out), (x + 1, {"twice": x * 2}))
    assert [e.kind for e in got if e.kind in ("outdated", "graph", "recompile")] == ["outdated", "graph"]


def test_the_loss_as_a_number() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    check_steps(mlp(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), step, batches())


def test_second_backward_is_eagers_error() -> None:
    model = mlp()
    loss = torchsmith.compile(step_of("never"), fullgraph=True)(model, torch.optim.SGD(model.parameters(), lr=0.1), *batches()[0])
    assert loss.requires_grad and not loss.is_leaf
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_nobody_sees_are_not_written() -> None:
    """zero_grad last: none of the gradients leaves the graph."""
    model, args = mlp(), batches()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for order, results in (("last", 1), ("first", 5)):
        with recording() as got:
            torchsmith.compile(step_of(order), fullgraph=True)(model, optimizer, *args)
        (module,) = [e.fields["module"] for e in got if e.kind == "graph"]
        (output,) = [n for n in module.graph.nodes if n.op == "output"]
        assert len(output.args[0]) == results, order
        assert all((p.grad is None) == (order == "last") for p in model.parameters())


@pytest.mark.parametrize("rows", [0, 2])
def test_gradients_that_share_one_number(rows: int) -> None:
    """Those of sums are one number seen in several shapes; one without elements does not hold it."""
    args = tuple(torch.randn(n, 4, requires_grad=True) for n in (rows, 6, 6))

    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (x.sum() + y.sum() + z.sum()) * 2

    got = torch.autograd.grad(torchsmith.compile(fn)(*args), args)
    for g, x in zip(got, args, strict=True):
        assert torch.equal(g, torch.full_like(x, 2))


def test_accumulation_and_unused_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x))

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part, target in zip(x.split(2), y.split(2), strict=True):
            loss = F.cross_entropy(model(part), target) / 3
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    torch.manual_seed(0)
    check_steps(Net(), lambda m: torch.optim.Adam(m.parameters()), step, batches())


def test_an_exception_leaves_nothing() -> None:
    """A label out of range is found in the middle of the run: eager's error, and nothing of the step has happened."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = torchsmith.compile(step_of("first"))
    (x, y), (u, v) = batches(2)
    for _ in range(2):
        compiled(model, optimizer, x, y)
    before = copy.deepcopy([p.detach() for p in model.parameters()]), copy.deepcopy(optimizer.state_dict())
    with pytest.raises((IndexError, RuntimeError)):
        compiled(model, optimizer, u, v + 7)
    for p, q in zip(model.parameters(), before[0], strict=True):
        assert torch.equal(p, q)
    for k, row in optimizer.state_dict()["state"].items():
        assert torch.equal(row["momentum_buffer"], before[1]["state"][k]["momentum_buffer"])
    assert torch.isfinite(compiled(model, optimizer, x, y))


def test_double_backward_inside() -> None:
    """A gradient penalty: autograd.grad(create_graph=True), then backward through it."""

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(torch.tanh(model(x)), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + slope.square().sum()
        total.backward()
        optimizer.step()
        return total.detach()

    check_steps(mlp(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), step, batches())


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_double_backward_of_recurrent_networks_inside(kind: type[nn.RNNBase]) -> None:
    """A gradient that was asked for with create_graph can be differentiated, as in eager."""
    torch.manual_seed(0)
    net, x = kind(3, 4), torch.randn(3, 2, 3)
    twin = copy.deepcopy(net)

    def step(m: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x)[0].sum(), x, create_graph=True)
        slope.square().sum().backward()
        return slope.detach()

    torch.testing.assert_close(torchsmith.compile(step, fullgraph=True)(net, x), step(twin, x))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_hooks_are_not_skipped() -> None:
    model, calls = mlp(), []
    compiled = torchsmith.compile(step_of("first"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batches()[0]
    compiled(model, optimizer, x, y)
    next(model.parameters()).register_hook(lambda g: calls.append(1))
    compiled(model, optimizer, x, y)
    assert calls == [1]
    model[2].weight.register_post_accumulate_grad_hook(lambda p: calls.append(2))
    compiled(model, optimizer, x, y)
    assert calls in ([1, 1, 2], [1, 2, 1])


def _limit(m: nn.Module, log: list[Any]) -> None:
    for p in m.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        p.register_hook(lambda g: g * 2)


def _log(m: nn.Module, log: list[Any]) -> None:
    for name, p in m.named_parameters():
        p.register_hook(lambda g, name=name: log.append((name, g)))
        p.register_post_accumulate_grad_hook(lambda p, name=name: log.append((name, p.grad.norm())))


def _step_at_once(m: nn.Module, log: list[Any]) -> None:
    for p in m.parameters():
        own = torch.optim.Adam([p], 0.01)
        p.register_post_accumulate_grad_hook(lambda p, own=own: own.step())


HOOKS = {"limited": _limit, "logged, in the engine's turns": _log, "an optimizer in the backward pass": _step_at_once}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_parameters_are_part_of_the_step(name: str) -> None:
    def run(c: Any) -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(0)
        model, log = mlp(), []
        HOOKS[name](model, log)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = c(step_of("first"))
        for x, y in batches():
            step(model, optimizer, x, y)
        return model, log

    (ours, log), (eager, wanted) = run(functools.partial(torchsmith.compile, fullgraph=True)), run(lambda f: f)
    assert [n for n, _ in log] == [n for n, _ in wanted]
    torch.testing.assert_close([v for _, v in log], [v for _, v in wanted])
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close((p, p.grad), (q, q.grad))


def test_hooks_of_parameters_that_gradients_are_asked_of() -> None:
    """autograd.grad runs them too, and differentiates through them; those that follow an accumulation do not run."""
    w, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    w.register_hook(lambda g: g * g)
    b.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())

    def f(x: Tensor) -> Any:
        first = torch.autograd.grad((x * w * b).sum().square(), [w, b], create_graph=True)
        return first, torch.autograd.grad(first[0].sum(), b)

    x = torch.randn(4)
    torch.testing.assert_close(torchsmith.compile(f)(x), f(x))


def test_a_hook_that_gives_something_else_is_eagers_error() -> None:
    w = torch.randn(4, requires_grad=True)
    w.register_hook(lambda g: g[0])
    with pytest.raises(RuntimeError, match="hook"):
        torchsmith.compile(lambda x: (x * w).sum().backward())(torch.ones(4))


def _late(h: Tensor, log: list[Any]) -> None:
    for number in range(3):
        h.register_hook(lambda g: g * (number + 1))  # noqa: B023  (when the hooks run, it is 2)


def _counting(h: Tensor, log: list[Any]) -> None:
    count = [0]

    def hook(g: Tensor) -> Tensor:
        count[0] += 1
        return g * count[0]

    h.register_hook(hook)
    h.register_hook(lambda g: g * count[0])


SCALE = torch.linspace(0, 1, 16)
OWN_HOOKS: dict[str, tuple[bool, Any]] = {  # is it one graph?
    "scaled": (True, lambda h, log: h.register_hook(lambda g: g * SCALE)),
    "looked at": (True, lambda h, log: h.register_hook(lambda g: None)),
    "in place": (True, lambda h, log: h.register_hook(lambda g: g.clamp_(-0.001, 0.001))),
    "several": (True, lambda h, log: (h.register_hook(lambda g: g * 2), h.register_hook(lambda g: g + 1))),
    "removed": (True, lambda h, log: h.register_hook(lambda g: g * 2).remove()), "closures": (True, _late),
    "reads what it hangs on": (True, lambda h, log: h.register_hook(lambda g: g * h.detach().sign())),
    "counting": (False, _counting), "logged": (False, lambda h, log: h.register_hook(lambda g: log.append(g.norm()))),
}  # fmt: skip


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", OWN_HOOKS)
def test_hooks_of_tensors_that_the_program_makes(name: str, whole: bool) -> None:
    is_graph, put = OWN_HOOKS[name]

    def run(c: Any) -> Any:
        torch.manual_seed(0)
        first, second, log = nn.Linear(8, 16), nn.Linear(16, 3), []  # type: nn.Module, nn.Module, list[Any]
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

        def step(x: Tensor) -> Tensor:
            h = first(x)
            put(h, log)
            loss = second(h.tanh()).square().mean()
            if whole:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return loss

        compiled = c(step)
        for x, _ in batches():
            loss = compiled(x)
            if not whole:
                loss.backward()
        return [(p, p.grad) for p in (*first.parameters(), *second.parameters())], log

    torch.testing.assert_close(run(functools.partial(torchsmith.compile, fullgraph=is_graph)), run(lambda f: f))


def test_hooks_are_differentiated_and_live_as_long_as_their_handles() -> None:
    w = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)

    def twice(x: Tensor) -> Any:
        h = x @ w
        handle = h.register_hook(lambda g: g * g)
        first = torch.autograd.grad(h.sin().sum(), w, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), w, retain_graph=True)[0]
        handle.remove()
        return first.detach(), second, torch.autograd.grad(h.sum(), w)[0]

    def outside(x: Tensor) -> Tensor:
        h = x @ w
        h.register_hook(lambda g: g * g)
        return h.sin().sum()

    x = batches()[0][0].double()
    torch.testing.assert_close(torchsmith.compile(twice, fullgraph=True)(x), twice(x))
    found = []
    for f in (torchsmith.compile(outside, fullgraph=True), outside):
        (first,) = torch.autograd.grad(f(x), w, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), w)))
    torch.testing.assert_close(*found)


def test_gradients_that_are_retained() -> None:
    first, second = nn.Linear(8, 16), nn.Linear(16, 3)

    def weighted(x: Tensor) -> Any:
        h = first(x)
        h.retain_grad()
        loss = second(h.relu()).max(1)[0].sum()
        loss.backward(retain_graph=True)
        once = h.grad
        loss.backward()
        return once, h.grad, h

    def stopped(x: Tensor) -> Any:
        h = first(x)
        h.retain_grad()
        return torch.autograd.grad(second(h).sum(), second.weight, retain_graph=True)[0], h.grad is None

    def later(x: Tensor) -> Any:
        h = first(x)
        h.retain_grad()
        return second(h).sum(), h

    x = batches()[0][0]
    ours, eager = (torchsmith.compile(weighted, fullgraph=True)(x), weighted(x))
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(ours[2].grad, eager[2].grad)
    torch.testing.assert_close(torchsmith.compile(stopped)(x), stopped(x))
    loss, h = torchsmith.compile(later)(x)
    loss.backward()
    assert h.grad is not None


def test_a_result_behind_what_was_used_up() -> None:
    """Two losses over one forward pass, the first of which is kept: the second pass has used up what the first one lies on."""
    model = mlp()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        z = model(x)
        first, second = z.sum(), z.square().sum()
        first.backward(retain_graph=True)
        second.backward()
        return first, second

    def with_z(x: Tensor) -> tuple[Tensor, Tensor]:
        z = model(x)
        z.square().sum().backward()
        return z.sum(), z

    x = batches()[0][0]
    with recording() as got:
        losses = torchsmith.compile(step, fullgraph=True)(x)
    assert [e.fields["report"].road for e in got if e.kind == "graph"] == ["native"]
    for loss in losses:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    def with_a_leaf(x: Tensor) -> Tensor:
        w = x.clone().requires_grad_()
        w.exp().sum().backward()
        return w

    leaf = torchsmith.compile(with_a_leaf)(x)
    assert leaf.is_leaf and leaf.requires_grad
    torch.testing.assert_close(leaf.grad, x.exp())
    total, z = torchsmith.compile(with_z)(x)
    torch.testing.assert_close(torch.autograd.grad(total, z)[0], torch.ones_like(z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_that_averages_over_all_batches(dtype: torch.dtype) -> None:
    def run(c: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 2)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        compiled = c(step)
        losses = [compiled(torch.randn(5, 6, dtype=dtype)) for _ in range(4)]
        return losses, list(model.state_dict().values())

    torch.testing.assert_close(run(functools.partial(torchsmith.compile, fullgraph=True)), run(lambda f: f))


class Several(nn.Module):
    """One small layer for each optimizer."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2) for _ in range(n)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).square().mean() for layer in self.layers]).sum()


FORMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "plain": [("SGD", {"nesterov": True, "momentum": 0.9}), ("SGD", {"maximize": True}), ("Adam", {"amsgrad": True}), ("AdamW", {}),
              ("Adamax", {}), ("RMSprop", {"momentum": 0.9, "centered": True}), ("Adagrad", {}), ("Adadelta", {}), ("NAdam", {}),
              ("Rprop", {})],
    "foreach": [(n, {}) for n in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "Rprop")],
    "fused": [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("Adagrad", {})],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_optimizers(form: str) -> None:
    rows = FORMS[form]

    def make(m: Any) -> list[Any]:
        options = {} if form == "plain" else {form: True}
        pairs = zip(rows, m.layers, strict=True)
        return [getattr(torch.optim, n)(layer.parameters(), lr=0.01, **kw, **options) for (n, kw), layer in pairs]

    def step(model: nn.Module, *rest: Any) -> Tensor:
        *optimizers, x = rest
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    torch.manual_seed(0)
    check_steps(Several(len(rows)), make, step, [(torch.randn(4, 3),) for _ in range(3)], graphs=3)


def test_clipping_groups_and_a_schedule() -> None:
    """Two groups of parameters, clipped gradients, and a learning rate that changes each step."""

    def make(m: Any) -> Any:
        return torch.optim.Adam([{"params": m[0].parameters(), "weight_decay": 0.1}, {"params": m[2].parameters(), "lr": 1e-3}], lr=1e-2)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, rate: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        return norm

    check_steps(mlp(), make, step, [(*b, 1e-2 / (1 + i)) for i, b in enumerate(batches(5))], graphs=3)


def test_cosine_schedule() -> None:
    """60 steps of Adam under a scheduler that is stepped outside: two compilations, and eager's weights."""
    ours, eager = mlp(), mlp()
    compiled = torchsmith.compile(step_of("first"))
    with recording() as got:
        for model, run in ((ours, compiled), (eager, step_of("first"))):
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
            for _ in range(15):
                for x, y in batches(4):
                    run(model, optimizer, x, y)
                    schedule.step()
    assert sum(e.kind == "graph" for e in got) <= 2 and not [e for e in got if e.kind == "graph_break"]
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name, most", [("CosineAnnealingLR", 3), ("MultiStepLR", 6)])
def test_schedules_inside_of_the_step(name: str, most: int) -> None:
    """cos of a counter is computed anew in each call; whether it is a milestone is a guard for each of those."""
    arguments = {"CosineAnnealingLR": (20,), "MultiStepLR": ([3, 5],)}[name]

    def trained(compiled: bool) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments)

        def step(x: Tensor, y: Tensor) -> None:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        run = torchsmith.compile(step, fullgraph=True) if compiled else step
        for x, y in batches(8):
            run(x, y)
        return [*model.parameters(), torch.tensor(optimizer.param_groups[0]["lr"])]

    with recording() as got:
        ours = trained(True)
    torch.testing.assert_close(ours, trained(False))
    assert sum(e.kind == "recompile" for e in got) < most


def test_the_example_learns(tmp_path: Any) -> None:
    """examples/train in a tiny size: the loss falls, the compiled run follows the eager one, and the picture is drawn."""
    import runpy
    from pathlib import Path

    script = Path(__file__).resolve().parents[2] / "examples" / "train" / "train.py"
    sizes = {"steps": 60, "width": 16, "layers": 1, "context": 8, "batch": 4}
    given = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    found = runpy.run_path(str(script))["main"]([*given, "--picture", str(tmp_path / "curves.svg")])
    (eager, _), (ours, _) = found["eager"], found["compiled"]
    assert ours[-1] < 0.9 * ours[0]
    assert ours == pytest.approx(eager, rel=1e-3)
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 2


AFTER_TORCH_COMPILE = """
import torch, torchsmith
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # from here on PyTorch marks optimizers and notes new modules
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters())

def step(x, y):
    optimizer.zero_grad()
    loss = torch.nn.CrossEntropyLoss()(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

compiled = torchsmith.compile(step, fullgraph=True)
losses = [float(compiled(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))) for _ in range(3)]
assert losses[2] < losses[0], losses
"""


def test_after_torch_compile_was_used() -> None:
    done = fresh.run(AFTER_TORCH_COMPILE)
    assert done.returncode == 0, done.stderr[-2000:]


def test_gradients_reach_past_a_break() -> None:
    """autograd.grad of what was computed before the frame was split: its way to the leaves is eager's, not "unused"."""

    def step(x: Tensor) -> tuple[Any, ...]:
        y = x.exp()
        print(end="")
        z = (y * y).sum()
        print(end="")
        return torch.autograd.grad(z, (x, y), retain_graph=True, allow_unused=True)

    x = torch.arange(3.0, requires_grad=True)
    for got, want in zip(torchsmith.compile(step)(x), step(x), strict=True):
        torch.testing.assert_close(got, want)


def test_optimizers_that_choose_by_their_counters() -> None:
    """RAdam's fifth step takes the other way, and ASGD asks whether it averages yet: counters are read when the call begins."""

    def make(m: Any) -> list[Any]:
        return [torch.optim.RAdam(m.layers[0].parameters(), lr=0.01), torch.optim.ASGD(m.layers[1].parameters(), lr=0.01)]

    def step(model: nn.Module, one: Any, two: Any, x: Tensor) -> Tensor:
        one.zero_grad()
        two.zero_grad()
        loss = model(x)
        loss.backward()
        one.step()
        two.step()
        return loss

    torch.manual_seed(0)
    check_steps(Several(2), make, step, [(torch.randn(4, 3),) for _ in range(7)], graphs=4)


def test_counters_of_all_written_tensors_move() -> None:
    """A later backward pass notices that parameters were written, as after eager's step."""
    model, args = mlp(), batches()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torchsmith.compile(step_of("last"), fullgraph=True)
    compiled(model, optimizer, *args)
    before = [p._version for p in model.parameters()]
    compiled(model, optimizer, *args)
    assert all(p._version > v for p, v in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_move_no_counters(name: str) -> None:
    """As torch's kernels: only the counter of steps is moved, which the optimizer does itself."""
    def run(c: Any) -> list[int]:
        model = mlp()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True)
        step = c(step_of("first"))
        step(model, optimizer, *batches()[0])  # makes the state
        held = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        before = [t._version for t in held]
        step(model, optimizer, *batches()[1])
        return [t._version - v for t, v in zip(held, before, strict=True)]

    assert run(functools.partial(torchsmith.compile, fullgraph=True)) == run(lambda f: f)


# ---------------------------------------------------------------- gradient scaling, LBFGS


def _scaled_step(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss


@pytest.mark.parametrize("name, options, graphs", [("SGD", {"momentum": 0.9}, 3), ("Adam", {}, 3), ("AdamW", {"fused": True}, 1)])
def test_steps_that_a_scaler_skips(name: str, options: dict[str, Any], graphs: int) -> None:
    """Unscaling, clipping, a step that is skipped where gradients are infinite, and the next scale: one graph once the optimizer's state is
    made, and eager's values in every step; the scale grows and falls as eager's."""
    models = [mlp(), mlp()]
    made = [getattr(torch.optim, name)(m.parameters(), lr=1e-2, **options) for m in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in models]
    runs = [torchsmith.compile(_scaled_step), _scaled_step]
    with recording() as got:
        for number, (x, y) in enumerate(batches(7)):
            x = x * float("inf") if number in (3, 4) else x
            before = [p.detach().clone() for p in models[0].parameters()]
            for run, model, optimizer, scaler in zip(runs, models, made, scalers, strict=True):
                run(model, optimizer, scaler, x, y)
            ours, eager = (dict(state_of(m, [o])) for m, o in zip(models, made, strict=True))
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6, equal_nan=True)
            assert scalers[0].state_dict() == scalers[1].state_dict()
            same = all(torch.equal(p, q) for p, q in zip(models[0].parameters(), before, strict=True))
            assert same == (number in (3, 4))
    assert sum(e.kind == "graph" for e in got) == graphs  # momentum and Adam: the first step is split, as it makes the optimizer's state
    assert [e.fields["code"] for e in got if e.kind == "graph_break"] == ["CAP020"] * (graphs > 1)


def test_a_first_step_that_is_skipped_makes_no_state() -> None:
    model, (x, y) = mlp(), next(iter(batches(1)))
    optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu")
    compiled = torchsmith.compile(_scaled_step)
    compiled(model, optimizer, scaler, x * float("inf"), y)
    assert not optimizer.state and scaler.get_scale() == 2.0**15
    compiled(model, optimizer, scaler, x, y)
    assert len(optimizer.state) == len(list(model.parameters()))


def test_lbfgs_breaks_and_says_so_once() -> None:
    models = [mlp(), mlp()]
    made = [torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=3) for m in models]
    x, y = next(iter(batches(1)))

    def step(model: nn.Module, optimizer: Any) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    compiled = torchsmith.compile(step)
    with pytest.warns(UserWarning, match=r"step runs eagerly.*CAP0(18|20)") as said, recording() as got:
        for _ in range(3):
            torch.testing.assert_close(compiled(models[0], made[0]), step(models[1], made[1]))
    assert sum("runs eagerly" in str(w.message) for w in said) == 1
    assert [e.fields["code"] for e in got if e.kind == "graph_break"] in (["CAP020"], ["CAP018"])  # torch.compile marks LBFGS


def test_explain_shows_forward_backward_and_step() -> None:
    """Operators of each part, gradients that are never written; the backward graph, its externs and bytes, before it was needed."""
    model, args = mlp(), batches()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for order, never in (("last", 4), ("first", 0)):
        found = torchsmith.explain(step_of(order))(model, optimizer, *args)
        step = found.graphs[0].step
        assert step.gradients == 4 and len(step.never_written) == never and len(step.operators) == 2 and min(step.operators) >= 4
        assert f"never written: {never}" in str(found) and "a backward pass" in str(found)
        assert never == 0 or "weight" in str(step.never_written)

    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return torch.linalg.solve(w, torch.tanh(x @ w) * 3)

    found = torchsmith.explain(scaled)(torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
    graph = found.graphs[0]
    assert graph.step is None and graph.backward.kernels > 0 and graph.saved[0] > 0 and graph.backward.peak >= 0
    assert graph.backward.externs and "  backward: operators: " in str(found) and "kept for backward" in str(found)


def test_explain_says_what_runs_under_eager_autograd() -> None:
    def written(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)  # an input, written where gradients flow
        return x.sum()

    found = torchsmith.explain(written)(torch.randn(3), torch.randn(3, requires_grad=True))
    assert found.graphs[0].road == "captured" and found.graphs[0].reason.code == "AUT001"
    assert "an input is written where gradients flow" in str(found) and f"{__file__}:" in str(found.graphs[0].reason)


DATA: dict[str, Any] = {
    "moves": lambda m, k, x: [setattr(b, "data", b.data * 0.9 + a.data * 0.1) for a, b in zip(m.parameters(), k.parameters(), strict=True)],
    "grad": lambda m, k, x: [m(x).sum().backward(), *(setattr(p, "data", p.data - 0.1 * p.grad) for p in m.parameters()), m(x).detach()],
    "then_written": lambda m, k, x: [setattr(k[0].weight, "data", m[0].weight * 2), k[0].weight.data.mul_(3), k[0].bias.add_(1), k(x)],
    "written_behind": lambda m, k, x: [v := m[0].weight.detach() * 2, setattr(k[0].weight, "data", v), v.add_(1), k[0].weight.sum(), k(x)],
    "twice": lambda m, k, x: [*(setattr(k[0].weight, "data", k[0].weight + i) for i in range(2)), k[0].weight, k[0].weight.t()],
    "own": lambda m, k, x: [
        m(x).sum().backward(), *(setattr(p.grad, "data", operator.imul(p.grad.data, 2)) for p in m.parameters()),
        *(setattr(p, "data", operator.isub(p.data, p.grad)) for p in m.parameters()),
        h := x + 1, setattr(h, "data", operator.iadd(h.data, 1)), h,
    ],
    "own_once_moved": lambda m, k, x: [
        setattr(k[0].weight, "data", m[0].weight * 2), setattr(k[0].weight, "data", operator.imul(k[0].weight.data, 3)),
        k(x), k[0].weight.sum(),
    ],
    # these four break
    "shared": lambda m, k, x: [setattr(k[0].weight, "data", m[0].weight.data), m[0].weight.data.add_(1), k(x)],
    "other_strides": lambda m, k, x: [setattr(k[0].weight, "data", m[0].weight.t().contiguous().t()), k[0].weight.stride(), k(x)],
    "saved": lambda m, k, x: [y := m[0](x)[:, :4] * m[2].bias, setattr(m[2].bias, "data", m[2].bias.data + 1), y.sum().backward()],
    "handed_out": lambda m, k, x: [y := m[0](x)[:, :4] * m[2].bias, setattr(m[2].bias, "data", m[2].bias.data + 1), y],
}


@pytest.mark.parametrize("name", DATA)
def test_memory_that_is_replaced(name: str) -> None:
    """`tensor.data = ...`: the object stays, its memory is the new one; what else holds the old memory keeps its values."""
    sides = []
    for wrap in (lambda f: f, torchsmith.compile):
        torch.manual_seed(0)
        m, k = mlp(), mlp().requires_grad_(False)
        before, held = copy.deepcopy(k.state_dict()), k.state_dict()
        fn, seen, codes = wrap(lambda m, k, x, step=DATA[name]: step(m, k, x)), [], []
        for _ in range(2):
            x = torch.randn(3, 8)
            with recording() as got, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = fn(m, k, x)
            codes += [e.fields["code"] for e in got if e.kind == "graph_break"]
            if name == "handed_out":
                out[-1].sum().backward()
            seen += [t.detach().clone() for t in out if isinstance(t, Tensor)]
            seen += [p.detach().clone() for net in (m, k) for p in net.parameters()]
            seen += [p.grad.clone() for p in m.parameters() if p.grad is not None]
            with torch.no_grad():
                seen.append(k(x))
        shares = m[0].weight.untyped_storage().data_ptr() == k[0].weight.untyped_storage().data_ptr()
        keeps = [torch.equal(held[n], before[n]) for n in before]
        sides.append((seen, shares, keeps, codes))
    eager, ours = sides
    assert len(eager[0]) == len(ours[0]) and eager[1:3] == ours[1:3]
    for a, b in zip(ours[0], eager[0], strict=True):
        torch.testing.assert_close(a, b)
    assert bool(ours[3]) == (name in ("shared", "other_strides", "saved", "handed_out")), ours[3]


def test_packed_weights_follow_replaced_memory() -> None:
    model, x = mlp().eval(), batches(1)[0][0]
    net = torchsmith.compile(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(net(x), model(x))
            for p in model.parameters():
                p.data = p.data * 0.5 + 1
