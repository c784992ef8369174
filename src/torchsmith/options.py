"""Every option, typed and documented; the only reader of environment variables (no torch).

In: the user's `mode` and `options` dictionary, the environment. Out: one frozen Options, passed by value to every room.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .events import warn

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True, "triton.cudagraphs": False},
}


@dataclass(frozen=True, slots=True)
class Options:
    """One compilation's settings. Names follow torch._inductor.config where the meaning is the same ("." becomes "_")."""

    # numerics
    emulate_precision_casts: bool = True  # round to bfloat16/float16 at every operator border, as eager does
    fallback_random: bool = True  # random operators draw eager's numbers; False: own draws, fused into kernels (docs/training.md)
    # code generation
    max_autotune: bool = False  # measure the tilings of contractions in place (tuning.py); remembered per processor
    freezing: bool = False  # believe that parameters are constant even where writes to them cannot be seen: docs/freezing.md
    freezing_discard_parameters: bool = False  # with freezing: free the memory of parameters once they are packed
    libtorch: str = "allow"  # operators without generated code call libtorch; "forbid": they are an error (default ahead of time)
    native_contractions: bool = True  # products with constant weights as generated kernels instead of extern calls
    epilogue_fusion: bool = True  # element-wise operators behind a product join its kernel
    max_fusion_size: int = 64
    layout_optimization: bool = True
    triton_cudagraphs: bool = True  # on a GPU, launches are recorded as CUDA graphs and replayed with the addresses of each call
    cpp_threads: int = 0  # 0: torch.get_num_threads() at call time
    activation_memory_budget: float = 1.0  # 0 to 1: of the bytes that a backward pass keeps by default; less is computed again
    thread_pool: str = "torch"  # whose threads run kernels: "torch" its intra-op pool, "own" torchsmith's; see docs/threads.md
    cpu: str = "native"  # processor that CPU code is made for: this one, "x86-64-v3" and other levels, or a list of features
    cpp_simdlen: int = 0  # most bits of its vectors (128, 256, 512); 0: all it has
    cuda_blocks: int = 0  # the most blocks of eager's random kernels on the device at hand (lower/draws.py); 0: they are called
    cuda_draws: str = "dropout rand bernoulli randint"  # operators known to draw as lower/draws.py computes
    cuda_arch: int = 0  # compute capability (90: sm_90) that GPU code is made for; 0: of the device at hand, 90 where there is none
    # building
    compile_threads: int = 0  # compiler processes at a time; 0: one per core
    force_disable_caches: bool = False
    # behaviour
    suppress_errors: bool = False
    warn_eager: bool = True  # say once of a function that it runs eagerly, why, and what to do
    background: bool = False  # compile in a thread of its own: no call waits, calls run eagerly until the compilation is there
    guard_filter_fn: Any = None
    # debugging
    debug_values: str = "0"  # of each launch at run time: "1" saves what it wrote, "2" prints it, "3" names the kernel (emit/watch.py)
    debug_kernels: str = ""  # only these kernels, separated by commas
    # debugging (none of these changes generated code)
    trace_enabled: bool = False
    check: int = 1  # 0: no verification, 1: verify Programs and the Plan, 2: after every pass
    fuel: int = -1  # of each pass: stop applying optional rewrites after this many; -1: never
    chaos: int = 0  # seed that makes profitability heuristics choose at random; 0: off

    def codegen_key(self) -> tuple[tuple[str, Any], ...]:
        """The part that changes generated code: goes into cache keys."""
        skip = {"compile_threads", "force_disable_caches", "suppress_errors", "guard_filter_fn", "trace_enabled", "check", "warn_eager",
                "background", "cpp_threads", "thread_pool", "freezing_discard_parameters", "triton_cudagraphs"}  # fmt: skip
        return tuple((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in skip)


# Accepted, meaningless here: the incumbent's switches whose effect torchsmith always has or never needs.
ACCEPTED = frozenset({
    "trace.graph_diagram", "coordinate_descent_tuning", "max_autotune_gemm", "max_autotune_pointwise", "max_autotune_gemm_backends",
    "pattern_matcher", "cpp_wrapper", "split_reductions", "memory_planning", "aggressive_fusion", "prologue_fusion", "combo_kernels",
    "coordinate_descent_check_all_directions", "coordinate_descent_search_radius", "max_autotune_conv_backends",
    "max_autotune_gemm_search_space", "autotune_in_subproc", "autotune_local_cache", "autotune_remote_cache", "autotune_fallback_to_aten",
    "autotune_num_choices_displayed", "benchmark_epilogue_fusion",
    "fx_graph_cache", "fx_graph_remote_cache", "deterministic", "dce", "use_dce", "permute_fusion", "group_fusion", "reorder_for_locality",
    "keep_output_stride", "inplace_buffers", "allow_buffer_reuse", "comprehensive_padding", "online_softmax", "conv_1x1_as_mm",
    "joint_graph_constant_folding", "verbose_progress", "disable_progress", "compile_threads_remote", "worker_start_method",
    "loop_ordering_after_fusion", "epilogue_fusion_first", "benchmark_kernel", "benchmark_fusion", "benchmark_combo_kernel",
    "shape_padding", "size_asserts",
    "triton.cudagraph_trees", "triton.unique_kernel_names", "triton.persistent_reductions", "cpp.weight_prepack", "cpp.min_chunk_size",
})  # fmt: skip

# Fields of Options that are for those who work on torchsmith itself.
INTERNAL = frozenset({
    "check", "fuel", "chaos", "debug_values", "debug_kernels", "cuda_arch", "cuda_blocks", "cuda_draws", "native_contractions",
})  # fmt: skip
_DOTTED = {
    "triton_cudagraphs": "triton.cudagraphs", "cpp_threads": "cpp.threads", "cpp_simdlen": "cpp.simdlen", "trace_enabled": "trace.enabled",
}  # fmt: skip
_IGNORED: set[str] = set()  # keys that were said to have no effect
_REFUSED = {
    "use_aoti": "torchsmith.export and torchsmith.aot compile ahead of time",
}
_MODE_HINTS = {"lite": "backend='aot_eager' runs torch's own kernels in one graph"}


def public_options() -> tuple[str, ...]:
    """Names that users pass, dotted as torch.compile's are."""
    return tuple(sorted(_DOTTED.get(f.name, f.name) for f in fields(Options) if f.name not in INTERNAL))


@functools.cache
def incumbent_options() -> Mapping[str, Any]:
    """Options that torch.compile takes -> default (None: not told), from the text of its settings module, which is not imported."""
    found = importlib.util.find_spec("torch")
    path = Path(found.origin or "").parent / "_inductor" / "config.py" if found is not None else None
    if path is None or not path.is_file():
        return {}
    names: dict[str, Any] = {}

    def read(body: Sequence[ast.stmt], prefix: str) -> None:
        for line in body:
            if isinstance(line, ast.ClassDef):
                read(line.body, f"{prefix}{line.name}.")
                bases = tuple(f"{b.id}." for b in line.bases if isinstance(b, ast.Name))
                names.update({f"{prefix}{line.name}.{n.partition('.')[2]}": v for n, v in names.items() if n.startswith(bases)})
            targets = line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
            default = line.value.value if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant) else None
            names.update({prefix + t.id: default for t in targets if isinstance(t, ast.Name)})

    read(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


def _is_plain(value: Any) -> bool:
    """Numbers, texts, and containers of them: what can be a setting, but no code."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _unknown(key: str, value: Any) -> None:
    """An option that we do not have: ignored with a word where it is the incumbent's and asks for speed or reports; else an error."""
    if key in incumbent_options():
        if value and not _is_plain(value):  # code of the user's for one of its passes: nothing here would call it
            raise RuntimeError(f"{key!r} is an inductor option torchsmith does not have: it has no such pass to hand the graph to")
        if value and key not in _IGNORED and value != incumbent_options()[key]:
            _IGNORED.add(key)
            warn(f"torchsmith: {key!r} is an inductor option without a counterpart here; it is ignored")
        return
    if key in _REFUSED:
        raise RuntimeError(f"option {key!r} is not offered; {_REFUSED[key]}")
    names = (*public_options(), *ACCEPTED, *incumbent_options())
    near = difflib.get_close_matches(key, names, 1, 0.75)
    if isinstance(value, Mapping) and value and any(n.startswith(f"{key}.") for n in names):
        near = [f"{key}.{next(iter(value))}"]  # a group of options: their names are dotted
    hint = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(public_options())}"
    raise RuntimeError(f"unknown option {key!r}; {hint}")


CHOICES: dict[str, tuple[str | int, ...]] = {
    "libtorch": ("allow", "forbid"), "cpp_simdlen": (0, 128, 256, 512), "thread_pool": ("torch", "own"),
    "debug_values": ("0", "1", "2", "3"),
}  # fmt: skip
RANGES: dict[str, tuple[float, float]] = {"activation_memory_budget": (0.0, 1.0), "compile_threads": (0, 1024), "cpp_threads": (0, 1024)}
ALIASES = {"aot_inductor.debug_intermediate_value_printer": "debug_values", "aot_inductor.filtered_kernel_names": "debug_kernels"}


def from_user(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Options:
    """Options of one `compile` call.

    Raises RuntimeError when both are given, or for an unknown mode or option (as torch.compile does), naming it; TypeError where
    `options` is no dictionary.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict, not {type(options).__name__}")
    if mode is not None and options:
        raise RuntimeError("either mode or options can be given, not both")
    if mode is not None and mode not in MODES:
        near = difflib.get_close_matches(str(mode), MODES, 1)
        hint = _MODE_HINTS.get(str(mode)) or (f"did you mean {near[0]!r}?" if near else f"modes are {', '.join(MODES)}")
        raise RuntimeError(f"unknown mode {mode!r}; {hint}")
    given = dict(MODES[mode or "default"]) | dict(options or {})
    known = {f.name: f for f in fields(Options)}
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise TypeError(f"options are named by strings, not by {type(key).__name__} {key!r}")
        if key in ACCEPTED:
            continue
        name = ALIASES.get(key) or key.replace(".", "_").replace("-", "_")
        if key in ALIASES:
            value = "" if value is None else str(value)
        if name not in known:
            _unknown(key, value)
            continue
        default = known[name].default
        if name == "guard_filter_fn" and value is not None and not callable(value):
            raise TypeError(f"guard_filter_fn is a function from guards to truths, not {type(value).__name__}")
        if value is None and key in incumbent_options():
            continue  # torch.compile's way to say: as it is by default
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if name in CHOICES and value not in CHOICES[name]:
            raise RuntimeError(f"option {key!r} is one of {', '.join(map(repr, CHOICES[name]))}, not {value!r}")
        if default is not None and not isinstance(value, type(default)):
            raise RuntimeError(f"option {key!r} takes {type(default).__name__}, not {type(value).__name__} {value!r}")
        if name in RANGES and not RANGES[name][0] <= value <= RANGES[name][1]:
            raise RuntimeError(f"option {key!r} is a number from {RANGES[name][0]:g} to {RANGES[name][1]:g}, not {value!r}")
        changes[name] = value
    return replace(from_environment(), **{**CONFIG.changed_options(), **changes})


class Config:
    """Defaults of later `compile` calls in this process: `compiler.config.warn_eager = False`; what a call is given itself is stronger.

    Names: the options (dots become underscores), and recompile_limit (also cache_size_limit), automatic_dynamic_shapes (False: sizes that
    vary are compiled one by one), assume_static_by_default (False: sizes are symbols from the first call on), dynamic_sources,
    unbacked_sources ("L['x'], L['y']:0": sizes of tensors that are symbols, by their place in messages, or a pattern of it),
    dynamic_values ("1111": so are sizes that have this value); their defaults stand in TORCH_COMPILE_DYNAMIC_SOURCES and so on. What
    torch.compile can switch and is settled here (capture_scalar_outputs: always on) has that one value.
    Raises AttributeError for other names (also for those of torch.compiler.config without a counterpart), TypeError and ValueError.
    """

    _SETTLED = {
        "capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True, "trace_numpy": True, "allow_rnn": True,
        "dynamic_shapes": True, "fail_on_recompile_limit_hit": False, "guard_nn_modules": True, "inline_inbuilt_nn_modules": True,
        "force_parameter_static_shapes": True, "nested_graph_breaks": True, "trace_autograd_ops": True, "specialize_float": False,
    }  # fmt: skip

    _OWN: dict[str, Any] = {
        "recompile_limit": 8, "automatic_dynamic_shapes": True, "assume_static_by_default": True,
        "dynamic_sources": "", "unbacked_sources": "", "dynamic_values": "",
    }  # fmt: skip
    _VARIABLES = {name: f"TORCH_COMPILE_{name.upper()}" for name in ("dynamic_sources", "unbacked_sources", "dynamic_values")}
    _ELSEWHERE = {  # torch.compile's switches that are not here -> what does it
        "error_on_recompile": 'compiler.set_stance("fail_on_recompile")',
        "disable": 'compiler.set_stance("force_eager"), or TORCHSMITH_DISABLE=1',
        "accumulated_recompile_limit": "recompile_limit counts for each compiled callable",
        "reorderable_logging_functions": "printing and logging keep their place in compiled functions",
        "ignore_logger_methods": "printing and logging keep their place in compiled functions",
        "ignore_logging_functions": "printing and logging keep their place in compiled functions",
        "caching_precompile": "compiled.aot_compile, or compiler.save_cache_artifacts",
        "job_id": "no sizes are remembered from earlier processes: mark_dynamic, dynamic_sources",
        "cache_key_tag": "TORCHSMITH_CACHE_DIR: a cache of its own",
        "optimize_ddp": "DistributedDataParallel(torchsmith.compile(block)) for each block: docs/training.md",
        "compiled_autograd": "torchsmith.compile of a step that calls backward() compiles it whole",
        "repro_after": "torchsmith.aot.minify_program",
        "verbose": "errors have the program's line in any case; TORCHSMITH_LOGS, TORCHSMITH_DEBUG tell more",
    }
    _ALIASES = {"cache_size_limit": "recompile_limit"}
    __slots__ = ("_changed",)

    def __init__(self) -> None:
        object.__setattr__(self, "_changed", {})

    def _name(self, name: str) -> str:
        name = self._ALIASES.get(name, name)
        if name not in self._OWN and name not in self._SETTLED and name not in self._defaults():
            near = difflib.get_close_matches(name, (*self._OWN, *self._defaults()), 1, 0.7)
            hint = f": {self._ELSEWHERE[name]}" if name in self._ELSEWHERE else f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"torchsmith.compiler.config has no {name!r}{hint}")
        return name

    @staticmethod
    def _defaults() -> dict[str, Any]:
        return {f.name: f.default for f in fields(Options) if f.name not in INTERNAL}

    def __getattr__(self, name: str) -> Any:
        name = self._name(name)
        if name in self._SETTLED:
            return self._SETTLED[name]
        if name in self._changed:
            return self._changed[name]
        if name in self._OWN:
            return os.environ.get(self._VARIABLES.get(name, ""), self._OWN[name])
        return getattr(from_environment(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        name = self._name(name)
        if name in self._SETTLED:
            if value is not self._SETTLED[name]:
                raise ValueError(f"{name} is always {self._SETTLED[name]} here")
            return
        default = self._OWN.get(name, self._defaults().get(name))
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if default is not None and type(value) is not type(default):
            raise TypeError(f"{name} takes {type(default).__name__}, not {type(value).__name__}")
        if name == "recompile_limit" and value < 1:
            raise ValueError(f"recompile_limit must be a positive integer, not {value!r}")
        if name not in self._OWN:
            try:
                from_user(None, {name: value})  # the checks of options
            except RuntimeError as e:
                raise ValueError(str(e)) from None
        self._changed[name] = value

    def __dir__(self) -> list[str]:
        return sorted({*self._OWN, *self._ALIASES, *self._defaults(), "patch"})

    def __repr__(self) -> str:
        return f"torchsmith.compiler.config({', '.join(f'{name}={getattr(self, name)!r}' for name in dir(self) if name != 'patch')})"

    def changed_options(self) -> dict[str, Any]:
        return {k: v for k, v in self._changed.items() if k not in self._OWN}

    @contextlib.contextmanager
    def patch(self, names: Mapping[str, Any] | str | None = None, to: Any = None, /, **changes: Any) -> Iterator[None]:
        """Other values inside of `with config.patch(name=value):` (or `patch({"name": value})`, `patch("name", value)`), or in the function
        that it decorates."""
        before = dict(self._changed)
        given = {names: to} if isinstance(names, str) else names or {}
        if not isinstance(given, Mapping):
            raise TypeError(f"patch takes names and values (name=value, or a dict), not {type(given).__name__}")
        try:
            for name, value in {**given, **changes}.items():
                setattr(self, name, value)
            yield
        finally:
            self._changed.clear()
            self._changed.update(before)


CONFIG = Config()


def asked_dims(entries: str, source: str, rank: int) -> set[int]:
    """Dimensions of a tensor at `source` that dynamic_sources or unbacked_sources name: "L['x']", "L['x']:0", or a pattern."""
    dims: set[int] = set()
    for entry in filter(None, map(str.strip, entries.split(","))):
        name, colon, number = entry.rpartition(":")
        pattern, chosen = (name, {int(number)}) if colon and number.isdigit() else (entry, set(range(rank)))
        with contextlib.suppress(re.error):  # a place such as L['x'][0] need not be a pattern
            if pattern == source or re.match(pattern, source):
                dims |= chosen
    return {d for d in dims if d < rank}


def asked_values() -> set[int]:
    """Sizes that dynamic_values makes symbols."""
    return {int(word) for word in CONFIG.dynamic_values.replace(",", " ").split() if word.isdigit()}


# Options of the front door: ours whatever the backend.
FRONT_DOOR = frozenset({
    "suppress_errors", "warn_eager", "background", "guard_filter_fn", "trace.enabled", "trace_enabled", "force_disable_caches",
})  # fmt: skip


def is_known(key: str) -> bool:
    """Is it an option of ours, by its own name or another's? Backends of other runtimes leave those alone."""
    name = str(key).replace(".", "_").replace("-", "_")
    return key in FRONT_DOOR or key in ALIASES or key in ACCEPTED or any(f.name == name for f in fields(Options))


def for_backend(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For another backend than ours: the options that we know, and those that it is given (all but the front door's)."""
    known = {f.name for f in fields(Options)}
    ours = {k: v for k, v in options.items() if k in FRONT_DOOR or k in known}
    return ours, {k: v for k, v in options.items() if k not in FRONT_DOOR}


def _flag(*names: str, default: str = "0") -> bool:
    for name in names:
        if name in os.environ:
            return os.environ[name] not in ("", "0", "false", "False")
    return default == "1"


def _whole(name: str, default: int, takes: str, least: int, most: int = 2**62) -> int:
    """A whole number from the environment; unset and empty mean the default."""
    text = os.environ.get(name, "").strip()
    try:
        value = int(text) if text else default
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ValueError(f"{name} takes {takes}, not {text!r}")
    return value


def from_environment() -> Options:
    """Defaults as the environment sets them."""
    return Options(
        freezing=_flag("TORCHINDUCTOR_FREEZING"),
        warn_eager=_flag("TORCHSMITH_WARN_EAGER", default="1"),
        force_disable_caches=_flag(
            "TORCHSMITH_FORCE_DISABLE_CACHES", "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_COMPILE_FORCE_DISABLE_CACHES"
        ),
        trace_enabled=wants_folders() or trace_folder() is not None or not TEXT_LOGS.keys().isdisjoint(logs()),
        check=_whole("TORCHSMITH_CHECK", 1, "0, 1 or 2", 0, 2),
        fuel=_whole("TORCHSMITH_FUEL", -1, "a number of rewrites, or -1 for all", -1),
        chaos=_whole("TORCHSMITH_CHAOS", 0, "a whole number, the seed", 0),
        compile_threads=_whole("TORCHSMITH_COMPILE_THREADS", 0, "a number of processes, or 0 for one per core", 0),
    )


def is_disabled() -> bool:
    """TORCH_COMPILE_DISABLE / TORCHSMITH_DISABLE: `compile` returns its argument."""
    return _flag("TORCHSMITH_DISABLE", "TORCH_COMPILE_DISABLE")


def wants_folders() -> bool:
    """TORCHSMITH_DEBUG / TORCH_COMPILE_DEBUG: a debug folder for each graph."""
    return _flag("TORCHSMITH_DEBUG", "TORCH_COMPILE_DEBUG")


def trace_folder() -> Path | None:
    """TORCHSMITH_TRACE / TORCH_TRACE: a folder for files of events; None: not wanted."""
    given = os.environ.get("TORCHSMITH_TRACE", os.environ.get("TORCH_TRACE"))
    return Path(given) if given else None


# Logs that print what a pass made, whole -> the file of a debug folder that has it.
TEXT_LOGS = {"graph_code": "captured_graph", "aot_graphs": "functional_graph", "output_code": "output_code"}
SHARED_LOGS = frozenset({"autotuning", "graph_breaks", "guards", "recompiles", *TEXT_LOGS})  # PyTorch's names too


def logs() -> frozenset[str]:
    """Artifacts named in TORCHSMITH_LOGS: graph_breaks, recompiles, guards, kernels, times, ...; where it is not set, those that
    TORCH_LOGS names and that mean the same here."""
    own = os.environ.get("TORCHSMITH_LOGS")
    named = {w.strip().lstrip("+") for w in (os.environ.get("TORCH_LOGS", "") if own is None else own).split(",") if w.strip()}
    return frozenset(named & SHARED_LOGS if own is None else named)


def cache_dir() -> Path:
    """Root of the build cache: TORCHSMITH_CACHE_DIR or the platform's user cache directory."""
    given = os.environ.get("TORCHSMITH_CACHE_DIR")
    if given:
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("torchsmith"))


def minifier() -> tuple[bool, int]:
    """TORCHSMITH_MINIFY (DUMP_AOTI_MINIFIER): write a script where compiling ahead of time fails. TORCHSMITH_REPRO_LEVEL
    (AOTINDUCTOR_REPRO_LEVEL): when, and which."""
    level = os.environ.get("TORCHSMITH_REPRO_LEVEL") or os.environ.get("AOTINDUCTOR_REPRO_LEVEL") or "2"
    return _flag("TORCHSMITH_MINIFY", "DUMP_AOTI_MINIFIER"), int(level) if level.isdigit() else 0


def value_printer() -> dict[str, Any]:
    """AOT_INDUCTOR_DEBUG_INTERMEDIATE_VALUE_PRINTER and AOT_INDUCTOR_FILTERED_KERNELS_TO_PRINT, as options of a package."""
    names = {"AOT_INDUCTOR_DEBUG_INTERMEDIATE_VALUE_PRINTER": "debug_values", "AOT_INDUCTOR_FILTERED_KERNELS_TO_PRINT": "debug_kernels"}
    return {option: os.environ[name] for name, option in names.items() if os.environ.get(name)}


def debug_dir() -> Path:
    """Where debug folders are written: TORCHSMITH_DEBUG_DIR, TORCH_COMPILE_DEBUG_DIR or ./torchsmith_debug."""
    return Path(os.environ.get("TORCHSMITH_DEBUG_DIR") or os.environ.get("TORCH_COMPILE_DEBUG_DIR") or "torchsmith_debug")


def compiler_command() -> tuple[str, ...]:
    """The C compiler: TORCHSMITH_CC, then CC, then cc."""
    given = (os.environ.get(name, "").split() for name in ("TORCHSMITH_CC", "CC"))
    return tuple(next((words for words in given if words), ["cc"]))
