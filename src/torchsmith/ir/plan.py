"""Plan: the host program as data, with two entries, `prepare` and `run` (no torch).

    Plan = (name, symbols, inputs, buffers, kernels, workspace, prepare: Step*, run: Step*, results, state, consts)
    Step = Alloc | Launch | Segment | Call | Free | Bind | Check | PlanCond | PlanRepeat

A Plan is printed once as C (emit/host.py) and linked with its kernels into one shared library, which serves compile() and packages.

Invariants
- Every buffer has exactly one place: Input(i), Arena(offset), ResultPlace(i) (allocated by the host), Given (an as_given extern
  result, live from its Call to its Free) or Taken (a workspace of its own, because its size is known only in the middle of the run).
- A place is the address of element zero of a plain input (its data pointer, storage offset applied) or of byte zero of the memory;
  Layout.offset comes on top.
- Arena places that are live at the same time do not overlap. `workspace` is the arena's size in bytes (64-byte aligned); it and
  the offsets use input symbols only.
- What a launch writes it touches under one name, as the kernel does; in C a result may be written over an operand that dies
  (schedule/memory/in_place.py).
- Launches that write an input (write-backs) come after the last Check, and the last Call of an operator that may refuse its operands,
  unless running them twice does no harm (a scatter that neither reads nor adds): a call that fails is repeated eagerly. A Call behind
  such a launch can only run out of memory, which is raised.
- A symbol's value is one int64 everywhere: index, integer and bool as themselves, f64 by its bits.
- `prepare` runs when constants (inputs that stay the same between calls) change, `run` per call. State places keep what prepare
  computed: run only reads them, prepare's launches write nothing else and use no symbols.
"""

from __future__ import annotations

from dataclasses import dataclass

from .expr import Expr, Sym
from .kernel import Kernel
from .program import Bind, Buffer, Check, Extern, Result, Symbol
from .target import CPU, Target


@dataclass(frozen=True, slots=True)
class Input:
    """The caller's tensor number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Bytes [offset, offset + size) of the call's workspace."""

    offset: Expr


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Allocated by the host as result number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Given:
    """Returned by an extern, owned until Free."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A workspace of `size` bytes of its own from Alloc to Free: the size depends on a symbol bound during the run."""

    size: Expr


@dataclass(frozen=True, slots=True)
class State:
    """Bytes [offset, offset + size) of the block that lives from one prepare to the next."""

    offset: Expr


Place = Input | Arena | ResultPlace | Given | Taken | State


@dataclass(frozen=True, slots=True)
class Alloc:
    """Ask the host for the result buffer `buf`, or for the workspace of a Taken one."""

    buf: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Run kernels[kernel] with `bufs` (plan buffer names in param order) and `syms` (expressions over plan symbols).

    grid: in "c" the flattened range that threads share in pieces of `grain`; in "triton" the number of programs.
    """

    kernel: int
    bufs: tuple[str, ...]
    syms: tuple[Expr, ...]
    grid: Expr
    grain: Expr


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps that are handed to a device together and may be recorded: number `number` of the graph (schedule/memory/segment.py)."""

    number: int
    steps: tuple[Launch | Call | Free, ...]

    @property
    def inner(self) -> tuple[Step, ...]:
        return self.steps


@dataclass(frozen=True, slots=True)
class Call:
    """Run externs in the host."""

    extern: Extern


@dataclass(frozen=True, slots=True)
class Free:
    """Release a Given or Taken buffer."""

    buf: str


@dataclass(frozen=True, slots=True)
class PlanCond:
    """Host branch."""

    pred: Expr
    then: tuple[Step, ...]
    orelse: tuple[Step, ...]

    @property
    def inner(self) -> tuple[Step, ...]:
        return (*self.then, *self.orelse)


@dataclass(frozen=True, slots=True)
class PlanRepeat:
    """Host loop."""

    sym: Sym
    count: Expr
    body: tuple[Step, ...]

    @property
    def inner(self) -> tuple[Step, ...]:
        return self.body


Step = Alloc | Launch | Segment | Call | Free | Bind | Check | PlanCond | PlanRepeat


@dataclass(frozen=True, slots=True)
class Plan:
    """The host program of one graph."""

    name: str
    symbols: tuple[Symbol, ...]
    inputs: tuple[str, ...]
    buffers: dict[str, Buffer]
    places: dict[str, Place]
    kernels: tuple[Kernel, ...]
    workspace: Expr
    prepare: tuple[Step, ...]
    run: tuple[Step, ...]
    results: tuple[Result, ...]
    state: int = 0  # bytes of the State block
    consts: tuple[int, ...] = ()  # inputs that prepare reads
    target: Target = CPU
    device: str = "cpu"  # as Program.device
    steady: tuple[str, ...] = ()  # inputs and results that are expected at the same address in the next call
