"""Every kind of guard: it holds for the call it was made from, and notices the change that would make a stale entry wrong.

Each scenario is checked three ways: the slow evaluator, C's full check, and C's recorded check (the second and later calls).
"""

from __future__ import annotations

import enum
import functools
import gc
import subprocess
import sys
import types
import weakref
from collections import OrderedDict

import pytest
import torch

import torchsmith
from torchsmith import events
from torchsmith.capture import _frame, guards
from torchsmith.capture.guards import Call
from torchsmith.capture.source import Attr, Cell, FixedObject, Global, Guard, Item, Local, TensorGuard, TensorProperty, TypeOf
from torchsmith.ir import dtype as dt
from torchsmith.ir.expr import Const, Sym
from torchsmith.ir.expr import op as expr_op
from torchsmith.runtime import host_torch
from torchsmith.runtime.host_torch import PRECISIONS, SWITCHES

X, SELF = Local("x"), Local("self")


class Call1:
    """One argument `x` (and `self`), own globals, one closure cell `c`; both evaluators asked the same."""

    def __init__(self, rows, x=None, self_=None, *, G=None, cell=None, symbols=None):
        self.rows, self.x, self.self_, self.cell = rows, x, self_, types.CellType(cell)
        self.G = {"__builtins__": {"len": len}} if G is None else G
        self.symbols = symbols or {}
        self.entry = guards.make_entry(
            rows, [], ("const", 1), None, lambda: (), names=("x", "self"), free_names=("c",), symbols=self.symbols
        )

    def check(self):
        call = Call({"x": self.x, "self": self.self_}, self.G, {"c": self.cell})
        slow = guards.first_failure(self.rows, call, self.symbols) is None
        fast = [self.entry.check((self.x, self.self_), self.G, (self.cell,)) for _ in range(3)]
        assert fast == [slow] * 3, (slow, fast, self.entry.failed)
        if not slow:
            failed = guards.first_failure(self.rows, call, self.symbols)
            assert failed is self.rows[self.entry.failed]
            assert guards.explain(failed, call, self.symbols)
        assert all(guards.print_guard(g) for g in self.rows)
        return slow


# ---------------------------------------------------------------- tensors


def tensor_call(t, dynamic=()):
    return Call1([Guard(X, "tensor", guards.tensor_guard(t, dynamic))], t)


TENSORS = {
    "shape": lambda: torch.ones(2, 4),
    "strides": lambda: torch.ones(3, 2).t(),
    "ndim": lambda: torch.ones(2, 3, 1),
    "dtype": lambda: torch.ones(2, 3, dtype=torch.float64),
    "dtype of one size": lambda: torch.ones(2, 3, dtype=torch.int32),
    "device": lambda: torch.ones(2, 3, device="meta"),
    "requires_grad": lambda: torch.ones(2, 3, requires_grad=True),
    "type": lambda: torch.nn.Parameter(torch.ones(2, 3), requires_grad=False),
    "not a leaf": lambda: torch.ones(2, 3, requires_grad=True) * 2,
    "view of a leaf": lambda: torch.ones(4, 3, requires_grad=True)[:2],
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "number": lambda: 3.0,
    "none": lambda: None,
}


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "shim"])
@pytest.mark.parametrize("change", TENSORS)
def test_tensor_metadata(change, raw):
    before = _frame.use_raw(raw)
    try:
        c = tensor_call(torch.ones(2, 3))
        assert c.check()
        c.x = torch.zeros(2, 3)
        assert c.check()
        c.x = TENSORS[change]()
        assert not c.check()
    finally:
        _frame.use_raw(before)


def test_conjugate_negative_and_inference_tensors_differ():
    t = torch.ones(3, dtype=torch.complex64)
    c = tensor_call(t)
    assert c.check()
    c.x = t.conj()
    assert not c.check()
    c = tensor_call(torch.ones(3))
    c.x = torch.ones(3, dtype=torch.complex64).conj().imag
    assert torch.is_tensor(c.x) and not c.check()
    with torch.inference_mode():
        c.x = torch.ones(3)
    assert not c.check()


def test_dynamic_dimensions_are_open():
    c = tensor_call(torch.ones(4, 5, 6), dynamic={1})
    for size in (4, 7, 9):
        c.x = torch.ones(4, size, 6)
        assert c.check()
    c.x = torch.ones(5, 5, 6)
    assert not c.check()


def test_many_dimensions():
    c = tensor_call(torch.ones(1, 2, 1, 2, 1, 2, 3))
    assert c.check()
    c.x = torch.ones(1, 2, 1, 2, 1, 2, 4)
    assert not c.check()


def test_requires_grad_of_views_follows_the_base():
    base = torch.ones(3)
    view = base[1:]
    c = tensor_call(view)
    assert c.check()
    base.requires_grad_(True)
    assert c.check() == (not view.requires_grad)
    other = torch.ones(3)
    with torch.no_grad():
        v = other.view(3)
    c.x = v[1:]
    assert c.check()


# ---------------------------------------------------------------- parameters reached through modules


class Net(torch.nn.Module):
    scale = 2

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(3, 3)
        self.register_buffer("buf", torch.ones(3))
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        self.flag = 1
        self.config = {"a": 1, 3: "three"}
        self.names = ["u", "v"]
        self.frozen = (1, 2.0, "s")

    def forward(self, x):
        return x


LIN = Attr(SELF, "lin", "module")
WEIGHT = Attr(LIN, "weight", "param")


def net_rows(net):
    return [
        Guard(FixedObject(None), "global_state", guards.global_state()),
        Guard(SELF, "type", Net),
        Guard(Attr(SELF, "flag", "instance"), "equals", 1),
        Guard(Attr(SELF, "training", "instance"), "equals", True),
        Guard(Attr(SELF, "frozen", "instance"), "equals", (1, 2.0, "s")),
        Guard(LIN, "type", torch.nn.Linear),
        Guard(LIN, "missing", "forward"),
        Guard(Attr(LIN, "forward", "type"), "identity", torch.nn.Linear.forward),
        Guard(WEIGHT, "tensor", guards.tensor_guard(net.lin.weight)),
        Guard(Attr(SELF, "buf", "buffer"), "tensor", guards.tensor_guard(net.buf)),
        Guard(Attr(LIN, "_forward_hooks", "instance"), "length", 0),
        Guard(Attr(Attr(SELF, "blocks", "module"), "_modules", "instance"), "dict_keys", ("0", "1")),
        Guard(Attr(Attr(SELF, "blocks", "module"), "1", "module"), "type", torch.nn.Linear),
        Guard(Attr(SELF, "config", "instance"), "type", dict),
        Guard(Item(Attr(SELF, "config", "instance"), "a"), "equals", 1),
        Guard(Item(Attr(SELF, "config", "instance"), 3), "equals", "three"),
        Guard(Attr(SELF, "names", "instance"), "length", 2),
        Guard(Item(Attr(SELF, "names", "instance"), 1), "equals", "v"),
        Guard(Attr(SELF, "scale", "type"), "equals", 2),
        Guard(SELF, "missing", "scale"),
    ]


def set_(obj, name, value):
    setattr(obj, name, value)


def resize(net):
    net.buf.resize_(4)


class OtherLinear(torch.nn.Linear):
    pass


CHANGES = {
    "flag": lambda n: set_(n, "flag", 2),
    "flag of another type": lambda n: set_(n, "flag", True),
    "eval": lambda n: n.eval(),
    "tuple": lambda n: set_(n, "frozen", (1, 2, "s")),
    "submodule of another class": lambda n: set_(n, "lin", torch.nn.Identity()),
    "__class__": lambda n: set_(n.lin, "__class__", OtherLinear),
    "shadowed forward": lambda n: set_(n.lin, "forward", lambda x: x),
    "parameter data": lambda n: set_(n.lin.weight, "data", torch.zeros(3, 4)),
    "parameter dtype": lambda n: n.lin.double(),
    "buffer resized": resize,
    "requires_grad_": lambda n: n.lin.weight.requires_grad_(False),
    "parameter replaced": lambda n: set_(n.lin, "weight", torch.nn.Parameter(torch.ones(5, 5))),
    "parameter gone": lambda n: delattr(n.lin, "weight"),
    "buffer replaced": lambda n: set_(n, "buf", torch.ones(4)),
    "hook": lambda n: n.lin.register_forward_hook(lambda *a: None),
    "module list": lambda n: n.blocks.append(torch.nn.Linear(2, 2)),
    "module list item": lambda n: n.blocks.__setitem__(1, torch.nn.ReLU()),
    "dict item": lambda n: n.config.update(a=2),
    "dict integer key": lambda n: n.config.pop(3),
    "dict replaced": lambda n: set_(n, "config", OrderedDict(n.config)),
    "list item": lambda n: n.names.__setitem__(1, "w"),
    "list longer": lambda n: n.names.append("w"),
    "instance shadows class": lambda n: set_(n, "scale", 2),
    "__dict__ replaced": lambda n: object.__setattr__(n, "__dict__", {**n.__dict__, "flag": 5}),
    "object __dict__": lambda n: n.__dict__.__setitem__("flag", 3),
    "_parameters replaced": lambda n: set_(n.lin, "_parameters", {"weight": torch.nn.Parameter(torch.ones(1))}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("calls", [0, 2])
def test_module_state(change, calls):
    net = Net()
    c = Call1(net_rows(net), torch.ones(1), net)
    for _ in range(calls):
        assert c.check()
    CHANGES[change](net)
    assert not c.check()


def test_same_values_again_hold():
    net = Net()
    c = Call1(net_rows(net), torch.ones(1), net)
    assert c.check()
    net.eval()
    assert not c.check()
    net.train()
    assert c.check()
    net.lin = torch.nn.Linear(3, 3)
    assert c.check()
    assert c.entry.recorded["dict"] > 5
    c.self_ = Net()
    assert c.check()
    for i in range(20):  # a counter in the module must not make things wrong, only slower
        net.counter = i
        c.self_ = net
        assert c.check()
    net.lin.weight.data = torch.zeros(3, 4)
    assert not c.check()


def test_rare_changes_do_not_wear_a_record_out():
    net = Net()
    c = Call1(net_rows(net), torch.ones(1), net)
    for i in range(12):
        net.counter = i
        for _ in range(30):
            assert c.entry.check((c.x, net), c.G, (c.cell,))
    assert c.entry.recorded["dict"] > 5 and len(c.entry.evaluated) < 6
    for i in range(12):
        net.counter = -i
        assert c.entry.check((c.x, net), c.G, (c.cell,))
    assert len(c.entry.evaluated) > 6


def test_class_attributes():
    class Mine(Net):
        pass

    net = Mine()
    rows = [Guard(SELF, "type", Mine), Guard(Attr(SELF, "scale", "type"), "equals", 2), Guard(TypeOf(SELF), "missing", "shift")]
    c = Call1(rows, None, net)
    assert c.check()
    Mine.scale = 3
    assert not c.check()
    del Mine.scale
    assert c.check()
    Mine.shift = 1
    assert not c.check()


# ---------------------------------------------------------------- everything else


class Color(enum.Enum):
    RED = 1
    BLUE = 2


EQUALS = [
    (1, True), (1, 1.0), (0.0, -0.0), ("a", "b"), ((1, 2), (1, 2.0)), (None, 0), (Color.RED, Color.BLUE), (b"a", "a"), (2**80, 2**80 + 1),
    (1 + 2j, 1 - 2j), (torch.float32, torch.float64), (torch.Size([1]), torch.Size([2])), ({1, 2}, {1}), (slice(1, 2), slice(1, 3)),
    (float("nan"), 1.0),
]  # fmt: skip


@pytest.mark.parametrize("value, other", EQUALS, ids=str)
def test_equals(value, other):
    c = Call1([Guard(X, "equals", value)], value)
    assert c.check()
    c.x = other
    assert not c.check()


def test_equal_values_that_are_not_the_same_object():
    for a, b in [("".join(["a", "b"]), "".join(["a", "b"])), (float("1.5"), float("1.5")), ((1, ("x",)), (1, ("x",))), (10**30, 10**30)]:
        c = Call1([Guard(X, "equals", a)], b)
        assert c.check()


def test_identity_type_length_keys_missing():
    marker = object()
    c = Call1([Guard(X, "identity", marker)], marker)
    assert c.check()
    c.x = object()
    assert not c.check()
    c = Call1([Guard(X, "type", int)], 1)
    assert c.check()
    c.x = True
    assert not c.check()
    for value, other in [([1], [1, 2]), ((1,), ()), ({1: 2}, {}), ({1}, {1, 2})]:
        c = Call1([Guard(X, "length", 1)], value)
        assert c.check()
        c.x = other
        assert not c.check()
    for cls in (dict, OrderedDict):
        c = Call1([Guard(X, "dict_keys", ("a", "b"))], cls(a=1, b=2))
        assert c.check()
        c.x = cls(b=1, a=2)
        assert not c.check()
        c.x = cls(a=1, c=2)
        assert not c.check()
    moved = OrderedDict(a=1, b=2)
    c = Call1([Guard(X, "dict_keys", ("a", "b"))], moved)
    assert c.check()
    moved.move_to_end("a")
    assert not c.check()
    c = Call1([Guard(X, "missing", "k")], {})
    assert c.check()
    c.x["k"] = 1
    assert not c.check()


def test_weak_identity_of_modules():
    net = Net()
    row = guards.weaken(Guard(SELF, "identity", net))
    c = Call1([row], None, net)
    assert c.check()
    c.self_ = Net()
    assert not c.check()
    del net
    c.self_ = None
    assert not c.check()


def test_globals_builtins_and_cells():
    G = {"a": 1, "__builtins__": {"len": len}}
    c = Call1([Guard(Global("a"), "equals", 1), Guard(Global("len"), "identity", len), Guard(Cell("c"), "equals", 5)], G=G, cell=5)
    assert c.check()
    G["unrelated"] = 3
    assert c.check()
    G["a"] = 2
    assert not c.check()
    G["a"] = 1
    G["len"] = print
    assert not c.check()
    del G["len"]
    assert c.check()
    c.cell.cell_contents = 6
    assert not c.check()
    del c.cell.cell_contents
    assert not c.check()
    del G["a"]
    assert not c.check()
    other = types.ModuleType("other")
    other.v = 7
    c = Call1([Guard(Global("v", FixedObject(other, "other")), "equals", 7)])
    assert c.check()
    other.v = 8
    assert not c.check()


def make_function(k=1, *, j=2):
    def inner(x, a=k, *, b=j):
        return x, make_function

    return inner


def test_functions():
    f = make_function()
    value = (f.__code__, f.__defaults__, dict(f.__kwdefaults__))
    c = Call1([Guard(X, "function", value)], f)
    assert c.check()
    c.x = make_function()
    assert c.check()
    c.x = make_function(k=9)
    assert not c.check()
    c.x = make_function(j=9)
    assert not c.check()
    c.x = lambda x: x
    assert not c.check()
    f.__defaults__ = None
    c.x = f
    assert not c.check()


def test_default_values_are_held_weakly():
    class Thing:
        pass

    def function(j, k):
        def f(x, *, j=j, k=k):
            return x

        f.__defaults__ = (j,)
        return f

    one, two, ref = Thing(), Thing(), weakref.ref(Thing)
    f = function(one, ref)
    c = Call1([guards.weaken(Guard(X, "function", (f.__code__, f.__defaults__, f.__kwdefaults__)))], f)
    assert c.check()
    for j, k in ((two, ref), (one, Thing), (None, ref)):
        c.x = function(j, k)
        assert not c.check()
    c.x, gone = None, weakref.ref(one)
    del f, one, j
    gc.collect()
    assert gone() is None
    c.x = function(None, ref)
    assert not c.check()


def test_alias():
    c = Call1([Guard(X, "alias", SELF)], c1 := [1], c1)
    assert c.check()
    c.x = [1]
    assert not c.check()


def test_no_overlap():
    base = torch.zeros(10)
    rows = [Guard(X, "no_overlap", (X, SELF))]
    c = Call1(rows, base[:5], base[5:])
    assert c.check()
    c.self_ = base[4:]
    assert not c.check()
    c.self_ = base[2:3]
    assert not c.check()
    c.self_ = torch.zeros(10)
    assert c.check()
    c.self_ = base[:0]
    assert c.check()
    c.x, c.self_ = base.view(2, 5).t()[1:], base.view(2, 5)[:, 0]
    assert not c.check()  # byte ranges: interleaved views count as overlapping


def test_shapes():
    s0, s1 = Sym("s0"), Sym("s1")
    symbols = {"s0": TensorProperty(X, "size", 0), "s1": TensorProperty(SELF, "size", 1)}
    two = Const(dt.index, 2)

    def cond(name, *args):
        return expr_op(name, *args)

    for e, good, bad in [
        (cond("eq", s0 + 1, s1), (3, 4), (3, 5)),
        (cond("eq", s0 % two, Const(dt.index, 0)), (4, 1), (5, 1)),
        (cond("ge", s0 * s1, Const(dt.index, 12)), (3, 4), (3, 3)),
        (cond("lt", s0 // two, s1), (5, 3), (6, 3)),
        (cond("ne", s0, s1), (1, 2), (2, 2)),
        (cond("eq", cond("pow", s0, two), s1), (3, 9), (3, 8)),
    ]:
        c = Call1([Guard(FixedObject(None), "shape", e)], torch.ones(good[0], 1), torch.ones(1, good[1]), symbols=symbols)
        assert c.check()
        c.x, c.self_ = torch.ones(bad[0], 1), torch.ones(1, bad[1])
        assert not c.check()


STATES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "function mode": torch.overrides.TorchFunctionMode,
    "torch function off": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("fast", [True, False], ids=["read in C", "read in Python"])
def test_global_state(name, fast):
    before = _frame.use_state(fast)
    try:
        c = Call1([Guard(FixedObject(None), "global_state", guards.global_state())])
        assert c.check()
        with STATES[name]():
            assert not c.check()
            inside = Call1([Guard(FixedObject(None), "global_state", guards.global_state())])
            assert inside.check()
        assert c.check()
        assert not inside.check()
    finally:
        _frame.use_state(before)


# (set, another value), by the name of runtime/host_torch.py
SETTERS = {
    "deterministic_algorithms": (torch.use_deterministic_algorithms, True),
    "deterministic_algorithms_warn_only": (lambda v: torch.use_deterministic_algorithms(False, warn_only=v), True),
    "deterministic_fill_uninitialized_memory": (torch._C._set_deterministic_fill_uninitialized_memory, False),
    **{
        f"cublas_allow_{kind}_reduced_precision_reduction": (lambda v, set_=set_: set_(*v), (False, kind == "fp16"))
        for kind, set_ in (
            ("fp16", torch._C._set_cublas_allow_fp16_reduced_precision_reduction),
            ("bf16", torch._C._set_cublas_allow_bf16_reduced_precision_reduction),
        )
    },
    "flash_sdp_enabled": (torch._C._set_sdp_use_flash, False), "fa3_sdp_enabled": (torch._C._set_sdp_use_fa3, True),
    "mem_efficient_sdp_enabled": (torch._C._set_sdp_use_mem_efficient, False), "math_sdp_enabled": (torch._C._set_sdp_use_math, False),
    "cudnn_sdp_enabled": (torch._C._set_sdp_use_cudnn, False), "overrideable_sdp_enabled": (torch._C._set_sdp_use_overrideable, False),
}


@pytest.fixture(params=["as here", "with a GPU"])
def watch(request, monkeypatch):
    """What this process watches, and what one that sees a GPU watches."""
    if request.param == "with a GPU":
        monkeypatch.setattr(host_torch, "watched", lambda: (SWITCHES, PRECISIONS))
        monkeypatch.setattr(guards, "watched", lambda: (SWITCHES, PRECISIONS))
        guards.setup()
        yield SWITCHES, PRECISIONS
        monkeypatch.undo()
        guards.setup()
    else:
        yield host_torch.watched()


def changes(name, setter, held, other):
    for fast in (True, False):
        before = _frame.use_state(fast)
        c = Call1([Guard(FixedObject(None), "global_state", guards.global_state())])
        assert c.check()
        try:
            setter(other)
            assert not c.check(), name
            assert name in guards.explain(c.rows[0], Call({}, {}, {}))
        finally:
            setter(held)
            _frame.use_state(before)
        assert c.check()


def test_every_switch_of_the_process(watch):
    for name, *_ in watch[0]:
        setter, other = SETTERS.get(name) or (getattr(torch._C, f"_set_{name}"), None)
        held = getattr(torch._C, f"_get_{name}")()
        try:
            setter(not held if other is None else other)
        except RuntimeError as e:  # this processor has no such arithmetic
            assert "not supported" in str(e)
            continue
        setter(held)
        changes(name, setter, held, not held if other is None else other)


def test_every_precision_of_the_process(watch):
    for backend, operation, *_ in watch[1]:
        held = torch._C._get_fp32_precision_getter(backend, operation)
        other = "ieee" if held != "ieee" else "bf16"
        changes(f"{backend}.{operation}", functools.partial(torch._C._set_fp32_precision_setter, backend, operation), held, other)


def test_matmul_precision_by_its_old_name(watch):
    c = Call1([Guard(FixedObject(None), "global_state", guards.global_state())])
    try:
        for level in ("high", "medium"):
            torch.set_float32_matmul_precision(level)
            assert not c.check()
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # from now on torch refuses to say the old name
        assert not c.check() and isinstance(host_torch._modes(), int)
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend in ("cuda", "mkldnn"):
            torch._C._set_fp32_precision_setter(backend, "matmul", "none")
    assert c.check()


def test_threads_are_asked_for_at_the_call():
    """An entry holds for every number of threads: sums are cut the same way, whoever computes them."""
    x = torch.randn(300, 1001)
    with events.recording() as found:
        fn = torchsmith.compile(lambda x: (x.sum(), x.softmax(-1).sum(0)))
        threads, got = torch.get_num_threads(), []
        try:
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                got.append(fn(x))
        finally:
            torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in got[1:] for a, b in zip(got[0], other, strict=True))
    assert sum(e.kind == "graph" for e in found) == 1 and not [e for e in found if e.kind == "recompile"]


def test_settings_of_the_process():
    c = Call1([Guard(FixedObject(None), "global_state", guards.global_state())])
    assert c.check()
    torch.set_default_dtype(torch.float64)
    try:
        assert not c.check()
    finally:
        torch.set_default_dtype(torch.float32)
    assert c.check()
    torch.use_deterministic_algorithms(True)
    try:
        assert not c.check()
    finally:
        torch.use_deterministic_algorithms(False)
    assert c.check()
    torch.set_default_device("meta")
    try:
        assert not c.check()
    finally:
        torch.set_default_device(None)
    assert c.check()


def test_autocast_dtype_matters():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = Call1([Guard(FixedObject(None), "global_state", guards.global_state())])
        assert c.check()
    with torch.autocast("cpu", dtype=torch.float16):
        assert not c.check()


def test_function_modes_are_compared_by_type():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    with Mode():
        c = Call1([Guard(FixedObject(None), "global_state", guards.global_state())])
        assert c.check()
    with torch.overrides.TorchFunctionMode():
        assert not c.check()
    with Mode():
        assert c.check()


def test_raw_fields_were_found_here():
    """Where a probe finds nothing the slow reading answers; on the versions that we measure every probe must find its field."""
    assert guards.PROBED["raw"] and guards.PROBED["state"]
    # this probe looks at live memory and may find nothing in one process, whose guards then read the slow way
    probe = "from torchsmith.capture import guards; raise SystemExit(not guards.PROBED['raw_grad'])"
    found = (subprocess.run([sys.executable, "-c", probe], check=False, timeout=1200).returncode == 0 for _ in range(3))
    assert guards.PROBED["raw_grad"] or torch.__version__ < "2.13" or any(found)


def test_missing_sources_fail():
    sources = [Attr(X, "gone", "instance"), Attr(X, "gone"), Item(X, 3), Item(X, "k"), Attr(X, "w", "param"), TensorProperty(X, "size", 0)]
    for source in sources:
        assert not Call1([Guard(source, "equals", 1)], [1]).check()
    guard = TensorGuard(torch.Tensor, torch.float32, torch.device("cpu"), False, (), (), 0)
    assert not Call1([Guard(X, "tensor", guard)], "x").check()


def test_a_long_path_is_walked_once():
    """Walking each part's base anew would take 2 ** 60 steps."""
    root = node = types.SimpleNamespace()
    source = X
    for _ in range(60):
        node.next = node = types.SimpleNamespace()
        source = Attr(source, "next", "instance")
    assert guards.evaluate(source, Call({"x": root}, {}, {})) is node
    assert guards.evaluate(Attr(Attr(source, "gone", "instance"), "next", "instance"), Call({"x": root}, {}, {})) is guards.MISSING


def test_an_objects_own_dict_is_read_without_asking_its_class():
    asked = []

    class Curious:
        def __getattribute__(self, name):
            asked.append(name)
            return object.__getattribute__(self, name)

    x = Curious()
    x.a = 1
    own = Attr(SELF, "__dict__", "own")
    c = Call1([Guard(own, "type", dict), Guard(own, "missing", "b"), Guard(Item(own, "a"), "equals", 1)], self_=x)
    asked.clear()
    assert c.check() and not asked
    x.b = 2
    assert not c.check()
    x.__dict__ = {"a": 1}
    assert c.check()
    x.__dict__ = {"a": 2}
    assert not c.check()
    c.self_ = 5
    assert not c.check()
