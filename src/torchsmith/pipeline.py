"""ONE page: the ordered passes of the road, and the runner that times, verifies and dumps all of them.

In: a captured fx graph, its size facts, options. Out: Compiled(call, guards, report). A new reader starts here.

    captured GraphModule --functionalise--> FunctionalGraph --lower--> Program --attention, fuse--> Program --form_kernels--> Scheduled
        --plan--> Plan --emit--> Source --build--> library --load--> callable
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import events
from .autograd.attach import attach, not_run
from .autograd.joint import Joint
from .capture._frame import Elsewhere
from .codes import Forbidden, Unsupported, define
from .emit.host import describe, emit_host, packing_key
from .emit.printers import PRINTERS, print_kernel
from .graph.eager import eager_callable
from .graph.functionalise import functionalise, goes_backwards
from .graph.host_part import HostPart, take_out
from .graph.lazy import DETACH, plain, turned
from .graph.readable import readable
from .graph.schema import may_draw
from .graph.sizes import SizeFacts
from .graph.spec import FunctionalGraph, ViewOutput, note_unexpected
from .ir.expr import Expr
from .ir.kernel import Kernel, kind_of
from .ir.memo import by_identity, forget
from .ir.plan import Plan
from .ir.print import print_plan, print_program, print_scheduled
from .ir.program import Program
from .ir.target import CPU, Target
from .ir.verify import verify_plan, verify_program, verify_scheduled
from .lower import lower
from .lower.devices import scalars_written, target_of
from .lower.draws import draws_any, known_draws
from .lower.joined_products import join_products
from .lower.layout import kept_format, prefer_channels_last
from .lower.library_convolution import fold_batch_norms, join_activations
from .lower.patches import multiply_patches
from .lower.turned_factors import turn_factors
from .options import Options
from .runtime import build as building
from .runtime import cache, cubins  # noqa: F401  (cubins enters its row)
from .runtime.draws import OWN, generator_states, put_back
from .runtime.images import IMAGE_STARTERS
from .runtime.load import arch_of, load
from .runtime.manifest import Manifest
from .runtime.toolchain import check_runs
from .schedule.formers import form
from .schedule.fusion.drop_masks import drop_masks
from .schedule.fusion.fuse import fuse
from .schedule.fusion.merge_attention import merge_attention
from .schedule.fusion.precision import relax_precision
from .schedule.kernels import NOTHING, Ready, nobody
from .schedule.memory.plan import plan
from .schedule.memory.segment import segment
from .schedule.share import share_kernels
from .tuning import Made, tune

define("AOT020", "operators that only libtorch has remain in the program, and libtorch is forbidden",
       "replace them, or allow libtorch: options={'libtorch': 'allow'}")

Call = Callable[..., Sequence[Any]]

RECORDS = 8  # of each segment on a GPU: one for each stream and set of sizes that return
MACHINE_FAULTS = frozenset({"RUN001", "RUN002", "RUN003", "RUN012"})
NEVER_WHOLE = MACHINE_FAULTS | {"LOW005"}  # errors under fullgraph
_WARNED: set[str] = set()


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one graph, for explain: `road` says who runs it: "native", "captured" (eager) or the backend's name."""

    name: str
    road: str
    code: str | None = None  # why it is not native
    operators: int = 0
    kernels: int = 0
    externs: tuple[str, ...] = ()
    library: str = ""
    cached: bool = False
    extern_at: tuple[str, ...] = ()  # the user's line of each extern call
    segments: tuple[tuple[int, int], ...] = ()  # on a GPU: launches and library calls that go to the device together
    peak: int = -1  # bytes of temporaries, but what extern calls allocate; -1: sizes vary, or not ours


@dataclass(frozen=True, slots=True)
class Compiled:
    """call(*graph inputs) -> flat sequence of results. `guards`: size conditions the compilers behind it assumed."""

    call: Call
    guards: tuple[Expr, ...]
    report: Report


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one library: the host program and each distinct kernel."""

    host: str
    kernels: tuple[str, ...]
    manifest: Manifest
    origins: tuple[str, ...] = ()  # per kernel: operators and user's lines; beside the text, which is shared by equal kernels
    tuned: tuple[str, ...] = ()  # what max-autotune decided, for explain
    target: Target = CPU


@dataclass(frozen=True, slots=True)
class Pass:
    """One step: `run(value, options) -> value`; `verify(value)` raises when an invariant is broken; `show(value)` prints it."""

    name: str
    run: Callable[[Any, Options], Any]
    verify: Callable[[Any], None] = field(default=lambda value: None)
    show: Callable[[Any], str] | None = None
    level: int = 1  # of options.check from which on it is verified


@by_identity
def text_of(kernel: Kernel) -> str:
    return print_kernel(kernel)


def emit(p: Plan, options: Options) -> Source:
    """Plan -> C text of the host program and of its kernels, and the manifest that the loader reads."""
    if p.target.language not in PRINTERS:
        raise Unsupported("LOW005", detail=p.device)
    kernels = tuple(text_of(k) for k in p.kernels)
    names = tuple(building.kernel_name(text) for text in kernels)
    origins = tuple(f"{name}: {', '.join(k.origins)}" for name, k in zip(names, p.kernels, strict=True))
    host = emit_host(p, names, options.debug_values, options.debug_kernels)
    return Source(host, kernels, Manifest.of(describe(p) | {"packing": packing_key(p, names)}), origins, target=p.target)


def show_source(s: Source) -> str:
    made: dict[str, list[str]] = {}  # kernel text -> where it comes from
    for text, origin in zip(s.kernels, s.origins, strict=True):
        made.setdefault(text, []).append(f"/* {origin.replace('*/', '* /')} */")
    return "\n".join([s.host, *(line for text, origins in made.items() for line in (*origins, text))])


# The road below the functional graph: what a cache hit skips.
FRONT: tuple[Pass, ...] = (
    Pass("norms", fold_batch_norms),
    Pass("layout", prefer_channels_last),
    Pass("patches", multiply_patches),
    Pass("activations", join_activations),
    Pass("products", join_products),
    Pass("factors", turn_factors),
    Pass("lower", lower, verify_program, print_program),
    Pass("attention", merge_attention, verify_program),
    Pass("fuse", fuse, verify_program, print_program),
    Pass("masks", drop_masks, verify_program),
    Pass("precision", relax_precision, verify_program),
)


def back(decided: Mapping[str, str] = NOTHING, ready: Ready = nobody) -> tuple[Pass, ...]:
    """The passes from the fused Program on; `decided`, `ready`: see form_kernels."""
    return (
        Pass("form_kernels", functools.partial(form, decided=decided, ready=ready), verify_scheduled, print_scheduled, level=2),
        Pass("plan", plan, verify_plan),
        Pass("share", share_kernels, verify_plan),
        Pass("segment", segment, verify_plan, print_plan),
        Pass("emit", emit, show=show_source),
    )


# File names of the debug folder, by pass.
ARTIFACTS = {
    "lower": "program_before_fusion.txt", "fuse": "program_after_fusion.txt", "form_kernels": "kernels.txt",
    "segment": "plan.txt", "emit": "output_code.c",
}  # fmt: skip


def run_passes(passes: Sequence[Pass], value: Any, options: Options, name: str) -> Any:
    """Run `passes` in order: each is timed, verified (options.check) and dumped under its own name."""
    for p in passes:
        before = value
        with events.timed(p.name, graph=name):
            value = p.run(value, options)
        if options.check >= p.level and value is not before:
            p.verify(value)
        if p.show is not None and options.trace_enabled:
            events.emit("artifact", graph=name, name=ARTIFACTS[p.name], text=p.show(value))
        if p.name == "segment":  # what explain counts
            for kernel in value.kernels:
                events.emit("kernel", graph=name, name=kernel.name, origins=kernel.origins, what=kind_of(kernel))
    return value


def compile_functional(
    fg: FunctionalGraph, options: Options, name: str, inputs: Sequence[Any] = (), anew: bool = False
) -> tuple[Manifest, str, bool]:
    """FunctionalGraph -> (manifest, library path, was it cached). `inputs` of a call are what max-autotune measures with, if given.
    `anew`: it is compiled, and takes the place of what the cache has."""
    key = cache.graph_key(fg.key_text, options)
    nodes = [(str(n.target), str(n.meta.get("loc") or "")) for n in fg.graph.nodes]
    if not (anew or options.force_disable_caches or options.trace_enabled):
        found = cache.find(key, nodes)
        if found is not None:
            if found.tuned:
                events.emit("tuned", graph=name, lines=found.tuned)
            return found.manifest, found.library, True
    source = compile_source(fg, options, name, inputs)
    library = str(building.build(source.host, source.kernels, options, source.target, anew))
    if not options.force_disable_caches:
        library = cache.keep(key, source.manifest, library, source.tuned, nodes)
    return source.manifest, library, False


def compile_and_load(
    fg: FunctionalGraph, options: Options, name: str, inputs: Sequence[Any], **how: Any
) -> tuple[Call, Manifest, str, bool]:
    """compile_functional's results, for the device at hand, behind the callable that `load` makes of them, told `how`. A library that
    cannot be loaded may be from another machine, or damaged: it is compiled anew, once."""
    options = at_hand(fg, options)
    manifest, library, cached = compile_functional(fg, options, name, inputs)
    for anew in (False, True):
        try:
            with events.timed("load", graph=name):
                call = load(library, manifest, name=name, tail=fg.consts, threads=options.cpp_threads, pool=options.thread_pool,
                            writes=fg.writes, records=RECORDS if options.triton_cudagraphs else 0, **how)  # fmt: skip
            break
        except Unsupported as why:
            if anew or why.code != "RUN003":
                raise
            events.emit("cache", name="damaged", path=library, detail=why.detail)
            manifest, library, cached = compile_functional(fg, options, name, inputs, anew=True)
    if options.libtorch == "forbid":
        refuse_externs(manifest)
    return call, manifest, library, cached


def compile_source(fg: FunctionalGraph, options: Options, name: str, inputs: Sequence[Any] = ()) -> Source:
    """FunctionalGraph -> the texts of a library and their manifest; who links them, and around what, is the caller's affair.

    `inputs` of a call are what max-autotune measures with; without them the defaults are taken.
    """
    try:
        return _compile_source(fg, options, name, inputs)
    finally:
        forget()


def _compile_source(fg: FunctionalGraph, options: Options, name: str, inputs: Sequence[Any]) -> Source:
    target = target_of(fg, options)[0]
    ready = nobody
    if start := IMAGE_STARTERS.get(target.language):
        begin = start(options)

        def ready(kernel: Kernel) -> None:
            begin(text_of(kernel), target.arch)

    program = run_passes(FRONT, fg, options, name)
    decided, lines = tune_program(program, fg, options, name, inputs) if options.max_autotune and inputs else (NOTHING, ())
    source: Source = run_passes(back(decided, ready), program, options, name)
    return dataclasses.replace(source, tuned=lines)


def tune_program(
    program: Program, fg: FunctionalGraph, options: Options, name: str, inputs: Sequence[Any]
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Decisions that were measured (or remembered), and what explain says of them."""

    def make(decided: Mapping[str, str]) -> Made:
        p = plan(form(program, options, decided), options)
        source = emit(p, options)
        library = building.build(source.host, source.kernels, options, source.target)

        def start() -> Call:
            frozen, threads = options.freezing, options.cpp_threads
            return load(library, source.manifest, name=f"{name} (tuning)", frozen=frozen, tail=fg.consts, threads=threads)

        return Made(p, source.manifest, start)

    with events.timed("tune", graph=name):
        decided, lines = tune(make, inputs, options.cpp_threads or torch.get_num_threads(), name)
    events.emit("tuned", graph=name, lines=lines)
    return decided, lines


def without_uncounted(fg: FunctionalGraph, inputs: Sequence[Any]) -> FunctionalGraph:
    """Inference tensors have no version counter, so nothing may be kept of them between calls: they become plain inputs."""
    uncounted = [i for i, (t, role) in enumerate(zip(inputs, fg.roles, strict=False))
                 if role in ("param", "buffer", "const") and isinstance(t, torch.Tensor) and t.is_inference()]  # fmt: skip
    if not uncounted:
        return fg
    roles = tuple("input" if i in uncounted else role for i, role in enumerate(fg.roles))
    return dataclasses.replace(fg, roles=roles, key_text=f"{fg.key_text}\nuncounted {uncounted}")


def refuse_externs(manifest: Manifest) -> None:
    """Where nothing may need libtorch: say which operators do, and where they come from."""
    if manifest.externs:
        found = dict.fromkeys(f"{e.op} at {e.loc or 'an unknown line'}" for e in manifest.externs)
        raise Forbidden("AOT020", at=manifest.externs[0].loc, detail="; ".join(found))


def at_hand(fg: FunctionalGraph, options: Options) -> Options:
    """Options that name the architecture of the device on which the graph will run."""
    if options.cuda_arch:
        return options
    _, device = target_of(fg, options)
    if not device.startswith("cuda"):
        return options
    blocks, draws = known_draws(device) if draws_any(fg) else (0, ())
    return dataclasses.replace(options, cuda_arch=arch_of(device), cuda_blocks=blocks, cuda_draws=" ".join(draws))


def _give_up(*inputs: Any) -> Any:
    """Instead of the captured graph, where the dispatcher runs the function itself: nothing may happen twice."""
    raise Elsewhere


def _instead(gm: torch.fx.GraphModule, eager: Call) -> Call:
    """What is called where the compiled graph fails: `eager`; it is only noted where the dispatcher runs the function itself."""
    if not (gm.meta.get("anew") or gm.meta.get("draws")):
        return eager

    def give_up(*inputs: Any) -> Any:
        note_unexpected(gm)
        return _give_up(*inputs)

    return give_up


def as_drawing(call: Call, fg: FunctionalGraph, manifest: Manifest) -> Call:
    """`call`; if it may draw numbers and is given up, the generators stand where they stood, for the function that is run instead."""
    calls = [n for n in fg.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    names = {*OWN, *(str(n.target) for n in calls if may_draw(n.target, n.args, n.kwargs))}
    if names.isdisjoint(e.op for e in manifest.externs):
        return call

    def drawing(*inputs: Any) -> Sequence[Any]:
        random = generator_states()
        try:
            return call(*inputs)
        except Elsewhere:
            put_back(random)
            raise

    return drawing


def parts_of(fg: FunctionalGraph, options: Options) -> HostPart | None:
    """The host's part of a graph that is not on one device. Raises Unsupported("LOW005") where it can't be taken out of it."""
    try:
        target_of(fg, options)
    except Unsupported:
        if (parts := take_out(fg)) is None:
            raise
        target_of(parts.rest, options)
        return parts
    return None


def behind_host_part(parts: HostPart, rest: Call, eager: Call, name: str) -> Call:
    """Calls of the whole; `eager` makes them where the host's part fails, or `rest` can't be run."""
    nodes = [n for n in parts.part.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    for node in nodes:
        events.emit("extern", graph=name, name=str(node.target), via="host", loc=node.meta.get("loc", ""))
    draws = any(may_draw(n.target, n.args, n.kwargs) for n in nodes)

    def call(*inputs: Any) -> Sequence[Any]:
        random = generator_states() if draws else []
        try:
            values, given = parts.begin(inputs)
        except Exception:
            put_back(random)
            return eager(*inputs)
        try:
            outs = rest(*inputs, *given)
        except Elsewhere:
            put_back(random)
            return eager(*inputs)
        return parts.end(inputs, values, outs)

    return call


def compile_native(gm: torch.fx.GraphModule, facts: SizeFacts, options: Options, name: str, inputs: Sequence[Any] = ()) -> Compiled:
    """The whole road: captured graph -> native callable. Raises Unsupported where some room refuses."""
    check_runs(options)
    with events.timed("functionalise", graph=name):
        facts.own_draws = not options.fallback_random
        whole = fg = functionalise(gm, facts, homes=True)
    eager = _instead(gm, gm.forward)
    parts = parts_of(fg, options)
    if parts is not None:
        fg = parts.rest
    if not options.freezing:
        fg = without_uncounted(fg, inputs)
    if options.trace_enabled:
        events.emit("artifact", graph=name, name="functional_graph.txt", text=fg.key_text)
    call, manifest, library, cached = compile_and_load(
        fg, options, name, () if parts else inputs, eager=_give_up if parts else eager, frozen=options.freezing,
        discard=options.freezing and options.freezing_discard_parameters,
    )  # fmt: skip
    call = as_drawing(call, fg, manifest)
    scalars = scalars_written(fg, manifest.device)
    if scalars:
        call = as_writing(call, scalars, len(fg.outputs))
    if parts is not None:
        call = behind_host_part(parts, call, eager, name)
    call = as_in_eager(call, gm, whole, inputs)
    operators = sum(n.op == "call_function" for n in fg.graph.nodes)
    externs = tuple(e.op for e in manifest.externs)
    report = Report(name, "native", None, operators, manifest.kernels, externs, library, cached, tuple(e.loc for e in manifest.externs),
                    tuple((s[0], s[1]) for s in manifest.segments), manifest.peak)  # fmt: skip
    return Compiled(call, (*facts.guards, *facts.late), report)


_SECOND_TIME = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed). Saved "
    "intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to "
    "backward through the graph a second time or if you need to access saved tensors after calling backward."
)


def as_writing(call: Call, numbers: Sequence[int], results: int) -> Call:
    """`call`, whose last results are new values of these inputs, which lie in the host's memory: it writes them."""

    def writing(*inputs: Any) -> Sequence[Any]:
        outs = call(*inputs)
        if len(outs) > results:  # else the call was repeated eagerly, which wrote them
            with torch.no_grad():
                for i, value in zip(numbers, outs[results:], strict=True):
                    inputs[i].fill_(value)
        return tuple(outs[:results])

    return writing


def as_in_eager(call: Call, gm: torch.fx.GraphModule, fg: FunctionalGraph, inputs: Sequence[Any]) -> Call:
    """`call` of `fg`, which knows values only, whose results are to autograd and inference mode what those of `gm` are."""
    call = as_spent(call, gm)
    call = as_cut_off(call, gm, fg, any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs))
    return under_inference(gm.meta.get("inference"), call)


def under_inference(mode: bool | None, call: Call) -> Call:
    """`call`, whose results are made under inference mode (or out of it), whatever mode the caller is in; None: in the caller's."""
    if mode is None:
        return call

    def made(*args: Any) -> Any:
        with torch.inference_mode(mode):
            return call(*args)

    return made


def as_spent(call: Call, gm: torch.fx.GraphModule) -> Call:
    """`call`, whose results that a backward pass of `gm` has used up require grad as eager's do: going back from them is its error."""
    numbers = gm.meta.get("spent", ())
    if not numbers:
        return call

    def spent(*inputs: Any) -> Sequence[Any]:
        outs = list(call(*inputs))
        if torch.is_grad_enabled():
            for i in numbers:
                outs[i] = torch._C._functions.DelayedError(_SECOND_TIME, 1)(outs[i].requires_grad_())  # type: ignore[attr-defined]
        return tuple(outs)

    return spent


def as_cut_off(call: Call, gm: torch.fx.GraphModule, fg: FunctionalGraph, grads: bool) -> Call:
    """`call`, whose views of inputs that the program cut off from autograd (detach, .data, no_grad) stay cut off where gradients flow, and
    whose results of detach() are no views to autograd. grads: some input requires grad."""
    given: Any = gm.graph.output_node().args[0]
    results = list(given) if isinstance(given, tuple | list) else [given]
    views = [i for i, (row, r) in enumerate(zip(fg.outputs, results, strict=False)) if isinstance(row, ViewOutput)]
    detached = [i for i in views if results[i].target in DETACH]
    if not views or not (grads or detached):
        return call
    numbers = [i for i in views if not getattr(results[i].meta.get("val"), "requires_grad", True)] if grads else ()
    plain = goes_backwards(gm)  # repeated eagerly, it has to go backwards

    def cut_off(*inputs: Any) -> Sequence[Any]:
        with contextlib.nullcontext() if plain or not grads else torch.no_grad():
            outs = list(call(*inputs))
        for i in numbers:
            if outs[i].requires_grad or torch.is_grad_enabled():  # a view made under no_grad could not take a value that requires grad
                outs[i] = outs[i].detach()
        for i in detached:
            outs[i] = outs[i].detach()
        return tuple(outs)

    return cut_off


def compile_attached(gm: torch.fx.GraphModule, facts: SizeFacts, options: Options, name: str, inputs: Sequence[Any] = ()) -> Compiled:
    """A captured graph whose results autograd has to know: forward and backward compiled apart, the latter when it is first run."""
    with events.timed("joint", graph=name):
        facts.own_draws = not options.fallback_random
        joint = Joint(gm, facts, options.activation_memory_budget, kept_format if options.layout_optimization else None)
        cut = joint.cut()
    if cut.choice is not None:
        events.emit("cut", graph=name, kept=cut.choice.kept, plain=cut.choice.plain, again=cut.again_ops)

    def load_of(fg: FunctionalGraph, which: str, eager: Call, args: Sequence[Any] = ()) -> tuple[Call, Manifest, str, bool]:
        if options.trace_enabled:
            events.emit("artifact", graph=which, name="functional_graph.txt", text=fg.key_text)
        parts = parts_of(fg, options)
        if parts is not None:
            fg = parts.rest
        if not options.freezing:
            fg = without_uncounted(fg, args)
        call, manifest, library, cached = compile_and_load(fg, options, which, () if parts else args, eager=_give_up if parts else eager)
        if scalars_written(fg, manifest.device):
            raise Unsupported("LOW005", detail=f"a write into a tensor on cpu beside tensors on {manifest.device}, with gradients")
        if parts is not None:
            call = behind_host_part(parts, call, eager, which)
        return call, manifest, library, cached

    def backward(fg: FunctionalGraph) -> Call:
        call, manifest, *_ = load_of(fg, f"{name}_backward", eager_callable(fg))
        places = tuple(e.loc for e in manifest.externs)
        operators = sum(n.op == "call_function" for n in fg.graph.nodes)
        events.emit(
            "backward", graph=name, operators=operators, kernels=manifest.kernels, externs=tuple(e.op for e in manifest.externs),
            extern_at=places, peak=manifest.peak,
        )  # fmt: skip
        return call

    forward, manifest, library, cached = load_of(cut.forward, name, _instead(gm, not_run), inputs)
    attached = attach(joint, cut, as_drawing(forward, cut.forward, manifest), gm.forward, backward, not gm.meta.get("grad", True))
    events.emit("attached", graph=name, prepare=attached.prepare)
    if facts.symbols:  # what its compilation assumes of sizes has to be guarded
        attached.prepare()
    operators = sum(n.op == "call_function" for n in cut.forward.graph.nodes)
    externs = tuple(e.op for e in manifest.externs)
    report = Report(name, "native", None, operators, manifest.kernels, externs, library, cached, tuple(e.loc for e in manifest.externs),
                    peak=manifest.peak)  # fmt: skip
    call = under_inference(gm.meta.get("inference"), as_spent(attached, gm))
    return Compiled(call, (*facts.guards, *facts.late), report)


def compile_graph(
    gm: torch.fx.GraphModule,
    facts: SizeFacts,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    backend: Any = "inductor",
    needs_grad: bool = False,
    name: str = "graph",
    fullgraph: bool = False,
) -> Compiled:
    """Compile one captured graph for `backend`.

    Whatever cannot be compiled natively runs as the captured graph, eagerly, and is counted with its code (event "fallback"). Where that is
    the machine's fault (no compiler, a compiler that dies, no room to write) it is also said in a warning; under fullgraph it is an error,
    as is a device that nothing is compiled for, and under options.libtorch == "forbid" any is.
    """
    from .backends.registry import resolve_backend
    from .backends.road import compile_by

    if options.trace_enabled:
        events.emit("artifact", graph=name, name="captured_graph.py", text=readable(gm))
    operators = sum(n.op in ("call_function", "call_method") for n in gm.graph.nodes)
    choice = resolve_backend(backend)
    if choice.dialect != "native":
        with events.timed("backend", graph=name):
            done = compile_by(choice, gm, facts, example_inputs, options, needs_grad, name, fullgraph)
    else:
        try:
            make = compile_attached if needs_grad else compile_native
            lazy = plain(gm)
            if lazy is None:
                done = make(gm, facts, options, name, example_inputs)
            else:
                module, around, bits = lazy
                memory = [t if own is None else turned(t, own) for t, own in zip(example_inputs, bits, strict=False)]
                done = make(module, facts, options, name, memory)
                done = replace(done, call=around(done.call))
        except Unsupported as why:
            if options.libtorch == "forbid":
                raise Forbidden(why.code, at=why.at, detail=why.detail) from why
            if why.code in NEVER_WHOLE and fullgraph:
                raise
            if why.code in MACHINE_FAULTS:
                _warn_once(why)
            done = run_captured(gm, facts, why, operators, name)
    events.emit("graph", name=name, report=done.report, module=gm)
    return done


def _warn_once(why: Unsupported) -> None:
    """One warning per code: every later graph would say the same."""
    if why.code not in _WARNED:
        _WARNED.add(why.code)
        events.warn(f"torchsmith: {why}. The program runs eagerly, which is correct but not faster.")


def run_captured(gm: torch.fx.GraphModule, facts: SizeFacts, why: Unsupported, operators: int, name: str) -> Compiled:
    places = [n.meta["loc"] for n in gm.graph.nodes if n.meta.get("loc")]
    at = why.at or next((p for p in places if not p.startswith(torch.__path__[0])), "")
    events.emit("fallback", code=why.code, graph=name, at=at, detail=why.detail)
    return Compiled(gm.forward, tuple(facts.guards), Report(name, "captured", why.code, operators))
