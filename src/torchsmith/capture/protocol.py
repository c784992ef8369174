"""What rows may ask of the machine that interprets a frame: the lowest name of the room, which every table of rows imports.

`machine.Machine` is the one that runs. It imports the rows; so that they need not import it, this is what they see of it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .arrays import ArrayValue
    from .frame import Frame
    from .gradients import Gradients
    from .source import Source
    from .stamps import Stamps
    from .tensors import Recorder
    from .tracks import Track
    from .world import World

Args = list[Any]
Kwargs = dict[str, Any]


class Machine(Protocol):
    """One capture in progress. Values are the program's own objects, or Tracks that stand for them; tensors are tracing tensors."""

    entry: types.FunctionType
    frames: list[Frame]
    recorder: Recorder
    world: World
    gradients: Gradients
    stamps: Stamps
    arrays: dict[int, ArrayValue]
    found: dict[tuple[type, str], Any]
    found_tensor: dict[tuple[type, str], Any]
    data_types: dict[type, bool]
    exc: BaseException | None
    raised: BaseException | None
    raised_at: str
    all_raised: list[BaseException]
    active: bool
    probing: bool
    counts: bool
    later: bool
    may_walk: bool
    turns: dict[int, list[Any]]
    error_mode: bool
    is_whole: bool
    splits: bool
    global_writes: dict[Any, Any]
    class_writes: dict[tuple[type, str], Any]
    cell_sources: dict[int, Source]
    cell_writes: dict[int, tuple[Any, Any]]
    cached: dict[Any, Any]
    effects: list[tuple[Any, list[Any], dict[str, Any]]]
    device_modes: int
    modes: list[Any]
    shown: set[int]
    modes_before: list[Any]
    handlers_off: int
    handlers_before: int
    subclasses: bool
    grad_before: bool
    inference: bool
    entered_inference: bool
    autocast: dict[str, tuple[bool, Any]]
    contexts: list[tuple[Any, Any, Any, Any]]
    context_writes: dict[int, tuple[Any, Any]]
    tensor_attrs: dict[tuple[int, str], Any]
    global_hooks_guarded: bool
    grad: bool
    grad_mode: bool

    def loc(self) -> str: ...
    def is_in_optimizer(self) -> bool: ...
    def taken_up(self, value: Any) -> Any: ...
    def tick(self) -> None: ...

    # ------------------------------------------------------------ names
    def store_global(self, g: dict[str, Any], name: str, value: Any) -> None: ...
    def global_source(self, g: dict[str, Any], name: str) -> Source: ...
    def is_namespace(self, track: Track) -> bool: ...
    def load_cell(self, cell: Any, name: str = "?") -> Any: ...
    def made(self, fn: Any) -> Any: ...
    def function_source(self, fn: types.FunctionType) -> Source | None: ...

    # ------------------------------------------------------------ calls
    def call(self, fn: Any, args: Args, kwargs: Kwargs) -> Any: ...
    def inline(self, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any: ...
    def callback(self, fn: Any) -> Any: ...
    def native(self, fn: Callable[..., Any], args: Args, kwargs: Kwargs, plain: bool = False, store: bool = False) -> Any: ...
    def leaving(self, exc: BaseException) -> BaseException: ...
    def with_numbers(self, value: Any) -> Any: ...
    def take(self, exc: BaseException) -> None: ...
    def has_unfinished(self) -> bool: ...
    def changes(self) -> tuple[int, int, int, int]: ...

    # ------------------------------------------------------------ values
    def symbolic(self, fn: Callable[..., Any], *args: Any) -> Any: ...
    def listed(self, value: Any) -> list[Any]: ...
    def mapped(self, value: Any) -> dict[Any, Any]: ...
    def unpack(self, value: Any, n: int) -> list[Any]: ...
    def is_key(self, key: Any) -> bool: ...
    def has_key(self, track: Track, key: Any) -> None: ...
    def index_key(self, key: Any) -> Any: ...
    def special_method(self, obj: Any, name: str) -> Any: ...
    def attr(self, obj: Any, name: str) -> Any: ...
    def truth(self, value: Any) -> bool: ...

    # ------------------------------------------------------------ tensors
    def record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Any: ...
    def tensor_attr(self, tensor: torch.Tensor, name: str) -> Any: ...
    def tensor_setattr(self, tensor: torch.Tensor, name: str, value: Any) -> None: ...
    def tensor_setitem(self, tensor: torch.Tensor, key: Any, value: Any) -> None: ...
    def tensor_truth(self, tensor: torch.Tensor) -> bool: ...
    def tensor_value(self, tensor: torch.Tensor, method: str, what: str, args: Any = (), kwargs: Any = None) -> Any: ...
    def may_read_numbers(self) -> bool: ...
    def numbers_of(self, tensor: torch.Tensor) -> Any: ...


Row = Callable[[Machine, Args, Kwargs], Any]
