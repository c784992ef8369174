"""The one table of reason codes: graph breaks, fallbacks and refusals, each with an explanation and a hint.

Rooms: CAP capture, GRA graph, AUT autograd, LOW lower, SCH schedule, EMI emit, RUN runtime, API front door, AOT ahead of time,
BCK other backends.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """One reason: `explanation` says what happened, `hint` what the user can do next."""

    code: str
    explanation: str
    hint: str


CODES: dict[str, Code] = {}


def define(code: str, explanation: str, hint: str) -> None:
    """Add a row; a code is defined once."""
    if code in CODES:
        raise ValueError(f"{code} is defined twice")
    CODES[code] = Code(code, explanation, hint)


class BackendFailed(RuntimeError):
    """A backend raised, or gave something else than the graph's results; the cause, if there is one, is chained."""


def keep_as_backends(error: Exception, note: str) -> None:
    """Mark what a backend's code raised when nothing may run in its place any more; the note says why."""
    error.add_note(note)
    error._torchsmith_of_backend = True  # type: ignore[attr-defined]


def is_of_backend(error: Exception) -> bool:
    """Whether a backend is at fault, and the caller has to know."""
    return isinstance(error, BackendFailed) or getattr(error, "_torchsmith_of_backend", False)


class Unsupported(Exception):
    """A thing torchsmith cannot do (yet) at a place in the user's program.

    code: a key of CODES; at: the user's "file:line"; detail: what exactly was met.
    """

    def __init__(self, code: str, *, at: str = "", detail: str = "") -> None:
        row = CODES[code]
        super().__init__(code, at, detail)
        self.code, self.at, self.detail, self.hint = code, at, detail, row.hint
        self.is_error = False  # the program wants breaks here to be errors
        self.is_of_state = False  # what was asked for is the value of a module's tensor
        self.in_loop = False  # met in a further turn of a loop that the frame was already in when the capture began
        self.step = -1  # the number of the instruction, among those that the outermost frame began

    def __str__(self) -> str:
        row = CODES[self.code]
        where = f"{self.at}: " if self.at else ""
        what = f" ({self.detail})" if self.detail else ""
        return f"{where}[{self.code}] {row.explanation}{what}. {row.hint}"


class Forbidden(Unsupported):
    """What the user's options forbid: always an error, never a reason to run something eagerly."""


# ---------------------------------------------------------------- autograd
define("AUT001", "gradients are needed, so the captured graph runs once under eager autograd",
       "call under torch.no_grad() or torch.inference_mode() for compiled inference")

define("AUT002", "hooks on tensors or gradients are not compiled",
       "call the hook's work in the function itself, or compile without the backward pass")
define("AUT003", "the backward pass goes on into what was computed before the compiled function",
       "compile the whole step, from the parameters to the loss, or call backward() outside")
define("AUT004", "an operator's derivative cannot be traced here", "call backward() outside of the compiled function")

# ---------------------------------------------------------------- lower
define("LOW001", "a tensor has a dtype that torchsmith does not compute on, so the graph runs eagerly",
       "keep complex, quantised and 16- to 64-bit unsigned tensors out of the compiled function")
define("LOW002", "the functional graph holds an attribute instead of an input", "report this: capture should make every tensor an input")
define("LOW003", "an operator cannot be called from compiled code", "call it outside of the compiled function")
define("LOW004", "the results alias each other in a way that cannot be expressed", "return a clone of one of them")
define("LOW005", "a tensor lies on a device that torchsmith has no code for, or beside tensors on another one, so the graph runs eagerly",
       "compile for devices that torchsmith supports, and move what the function reads and returns to one device")
define("LOW006", "a number that varies is used where the program's structure depends on it, so the graph runs eagerly",
       "please report it with the program; a plain number is taken meanwhile")
define("LOW007", "an access of the compiled program could not be proved to stay inside its tensor for all sizes, so it is masked",
       "nothing to do; such accesses are slower")
define("LOW008", "an access of the compiled program lies outside of its tensor, so the graph runs eagerly",
       "please report it with the program; eager's result is taken meanwhile")

define("LOW009", "this torch draws random numbers on the device in another way than is known, so its random operators are called",
       "nothing to do; such calls end a recorded segment")

# ---------------------------------------------------------------- graph
define("GRA001", "an operator has no shape rule of its own, so its shape was asked of torch", "nothing to do; tracing is slower")
define("GRA002", "an operator has neither a shape rule nor a kernel that can tell its shape",
       "move the call out of the compiled function, or write it with other operators")
define("GRA003", "a tensor's value is needed while tracing", "avoid .item(), bool(tensor) and int(tensor) in the compiled function")
define("GRA004", "the program asks about a number that is known only at run time",
       "state what holds of it with torch._check, or choose with torch.where or torch.cond")
define("GRA005", "an operator has no shape rule for sizes that vary, so the sizes at hand are assumed",
       "mark the sizes static or call it outside the compiled function")
define("GRA006", "a tensor is mutated in a way that has no functional form", "use the out-of-place form of the operator")
define("GRA007", "two results overlap in memory and neither contains the other", "clone one of the results")
define("GRA008", "a condition on sizes contradicts what was assumed before", "check the sizes of the inputs")
define("GRA009", "the shape of a result depends on the data in a way that is not supported", "call it outside the compiled function")
define("GRA010", "an operator's shape was learned by running it once on made-up data", "nothing to do; tracing is slower")
define("GRA012", "torch refuses an operation while tracing", "see the detail; if eager accepts it, call it outside the compiled function")
define("GRA013", "the sizes, strides or memory of the caller's own tensor are changed, so the graph runs eagerly",
       "use the operator without the underscore, or an out= tensor of the result's size")
define("GRA014", "a shape rule and eager's kernel disagree about an operator's result, so the graph runs eagerly",
       "please report it with the program; eager's result is taken meanwhile")
define("GRA015", "what varies is needed as a constant, and other values of it are compiled already: Python runs the call",
       "nothing to do, or make the number a tensor: compiling for every value would never end")
define("GRA011", "an operator works on a kind of tensor that is not supported", "use dense (strided) tensors")
# ---------------------------------------------------------------- schedule (memory plan)
define("SCH101", "memory is needed before its size is known, so the graph runs eagerly",
       "compute data-dependent sizes outside of branches and loops of the compiled function")
# ---------------------------------------------------------------- emit (host program)
define("EMI101", "the host program cannot compute this expression",
       "please report it with the program; the frame runs eagerly")

# ---------------------------------------------------------------- runtime
define("RUN001", "no C compiler was found",
       "install gcc or clang, or name one in TORCHSMITH_CC (or CC)")
define("RUN002", "the C compiler failed on generated code",
       "the command and its output are in the log file; please report it")
define("RUN003", "the compiled library cannot be written or loaded",
       "set TORCHSMITH_CACHE_DIR to a private, writable directory with free space that allows executing files")
define("RUN004", "compiled code reported an error, so the call was repeated eagerly",
       "an exception that eager raises too is yours; otherwise please report it")
define("RUN005", "an external operator cannot be called",
       "this torch version lacks the operator or its arguments cannot be passed; the frame runs eagerly")
define("RUN010", "the GPU's driver cannot be used",
       "install or update NVIDIA's driver (CUDA 12 or newer); until then what runs on the GPU runs eagerly")
define("RUN006", "Triton is missing, or it failed on generated code", "install triton; if it is there, report the kernel")
# ---------------------------------------------------------------- emit
define("EMI001", "the C printer has no text for this yet",
       "report it; a lowering must not use what ir/ops.py does not mark native")

# ---------------------------------------------------------------- backends
define("BCK001", "the backend compiles for known sizes, and some are told by the data only", "use the default backend for this function")
define("BCK002", "the backend takes none of this graph's operators, so torch runs them", "use the default backend for this function")
define("BCK003", "the backend failed, so the captured graph runs eagerly", "see the detail; fullgraph=True raises it instead")
define("BCK005", "a runtime refuses operators or gives other results, so torch runs them", "please report it to whoever converts them")
define("BCK004", "a graph that another capture made has a number that no input tells", "use torchsmith.compile, which captures itself")
define("BCK007", "a call of a graph that another capture made has inputs of other sizes or strides, so it runs eagerly",
       "use torchsmith.compile, which guards what it was given")
define("BCK006", "a graph that another capture made has an operator of graphs that is not written out",
       "use torchsmith.compile, which captures itself")

# ---------------------------------------------------------------- capture
define("CAP002", "an instruction or language feature is not supported", "move this code out of the compiled function")
define("CAP003", "generator and async functions are not captured as a whole", "compile the functions they call")
define("CAP004", "the calls are nested too deeply to be inlined", "compile a smaller part")
define("CAP005", "a loop runs too long to be unrolled", "compile the body of the loop")
define("CAP006", "the program raises an exception", "call the program with these arguments: what eager raises says more")
define("CAP010", "a C function would call Python code natively", "call the function directly")
define("CAP011", "an object from outside is used in a way that cannot be guarded", "read what is needed of it before the compiled function")
define("CAP012", "an object from outside is changed in a way that cannot be replayed", "change it outside of the compiled function")
define("CAP013", "inputs share memory and one of them is written", "clone one of them")
define("CAP014", "a function is not known to be safe to call while capturing", "call it outside of the compiled function")
define("CAP015", "the result holds an object that cannot be rebuilt", "return tensors, numbers and plain containers of them")
define("CAP016", "input, output, clocks and random numbers of Python are not captured", "do this outside of the compiled function")
define("CAP017", "autocast is not captured yet", "convert dtypes by hand, or leave the frame eager")
define("CAP018", "a function is marked as not to be compiled", "take the mark away where it has to be compiled")
define("CAP020", "Python needs the value of a tensor", "use torch.where or keep the value in a tensor")
define("CAP021", "a kind of tensor that is not captured", "use dense torch.Tensor objects")
define("CAP022", "a tensor was made in a way that cannot be recorded", "please report this")
define("CAP023", "a number that is known only at run time", "keep it in a tensor")
define("CAP024", "an argument of this type cannot be recorded", "pass tensors, numbers or plain containers")
define("CAP025", "a torch function raised an error", "call the program with these arguments: what eager raises says more")
define("CAP026", "changing autograd state of a tensor is not captured", "do this outside of the compiled function")
define("CAP027", "a frame cannot be split here", "the function runs eagerly from its beginning; move what is named out of it")
define("CAP028", "what the frame holds here cannot be handed over", "nothing to do: the frame is split earlier, where it can be")
define("CAP035", "some results are made under inference mode and others are not",
       "make all results of a compiled function under the same mode")  # fmt: skip
define("CAP038", "a lazy module's parameters get their shapes in this call, so it runs eagerly", "nothing to do: the next call is compiled")
define("CAP039", "a context manager ends that was entered before this graph begins",
       "nothing to do: Python leaves it, and the rest is compiled")
define("CAP036", "another thread changed what the function reads while it was captured", "do not change it while others call the function")
define("CAP037", "a tensor moves from one device to another",
       "nothing to do: Python moves it, and the rest is compiled; or move it before or after the compiled function")
define("CAP040", "a builtin is replaced, or another name that torch's code cannot do without", "put it back, then call the function")
define("CAP099", "an error in the bytecode machine", "please report this; the frame runs eagerly")
