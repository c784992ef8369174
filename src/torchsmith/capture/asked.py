"""What one capture is asked for, as data: which sizes and numbers vary, how much of the frame is taken, what may be read or assumed.

Inputs are named by their source ("L['x']"); the number ITSELF (capture/source.py) among dimensions stands for the value of a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ..graph.declared import DeclaredSize
from .resume import Point


@dataclass(frozen=True, slots=True)
class Asked:
    # What varies.
    dynamic: bool | None = None  # True: every size of an argument; False: none, whatever else is said
    dynamic_dims: Mapping[str, set[int]] = field(default_factory=dict)  # by input: dimensions that are symbols
    static_dims: Mapping[str, set[int]] = field(default_factory=dict)  # by input: dimensions that are numbers, whatever else is said
    marked: Mapping[tuple[str, int], tuple[int, int | None]] = field(default_factory=dict)  # (input, dimension) -> its mark's range
    unbacked: Set[tuple[str, int]] = frozenset()  # (input, dimension) whose size at hand answers no question
    declared: Mapping[str, Mapping[int, DeclaredSize]] = field(default_factory=dict)  # by input: what export declares, stronger than the rest
    ones: bool = True  # a size of 1 may be a symbol too
    least: int = 2  # the least integer that may be a symbol
    loose: frozenset[str] = frozenset()  # numbers, by input, of which no value is assumed: what needs one as a constant is GRA015
    growing: Set[str] = frozenset()  # dictionaries of which neither keys nor length are assumed

    # How much of the frame.
    at: Point | None = None  # it goes on there, and the arguments are its state
    stop: int | None = None  # as many instructions are captured; Captured.stop says what follows
    probe: bool = False  # only looks for the last instruction before `stop` in front of which the frame's state can be handed over
    fullgraph: bool = False  # all or nothing
    walks: bool = True  # a frame that goes on in a loop may take what is left of its iterator as constants
    whole_loops: bool = False  # ... all that is left, or nothing

    # What may be read or assumed.
    reads: bool = False  # the values of tensors may be numbers known only when the graph runs
    counts: bool = False  # what optimizers and modules count in tensors is read when the call begins
    error_mode: bool = False  # compiler.error_on_graph_break(True) is entered
    by_code: bool = False  # the function is one of many with this code, and so are those in its cells
    stamps: bool = True  # equal modules are interpreted once


FIRST = Asked()  # of a function that is captured for the first time
