"""What a callable or a namespace is to the machine: inlined, one graph node, run natively, or refused.

Tables are made once, on first use, by walking torch's public namespaces; nothing here is keyed to a model.
"""

from __future__ import annotations

import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

Call = TypeVar("Call", bound=Callable[..., Any])

# Namespaces whose functions, classes and modules are taken as they are, without a guard: nobody rebinds them at run time.
_TRUSTED_ROOTS = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "torchsmith", "builtins", "typing_extensions"}


@cache
def is_trusted(module_name: str) -> bool:
    """Whether names of this module are constants to us."""
    return module_name.partition(".")[0] in _TRUSTED_ROOTS and module_name != "__main__"


_STDLIB = sysconfig.get_paths()["stdlib"]
_TORCH_DIR = torch.__path__[0]
_OWN_DIR = __file__.rsplit("/", 2)[0]


@cache
def is_library_file(filename: str) -> bool:
    """Whether Python code of this file may run natively below a C function (the standard library, torch, this package)."""
    if filename.startswith("<"):
        return filename.startswith("<frozen") or filename == "<string>"
    in_stdlib = filename.startswith(_STDLIB) and "site-packages" not in filename
    return in_stdlib or filename.startswith((_TORCH_DIR, _OWN_DIR)) or filename.endswith("/typing_extensions.py")  # it patches typing


INTERPRETS = "_torchsmith_interprets"  # in the __dict__ of a function of the machine: what of the program's it stands for, or NotImplemented


def of_machine(fn: Call, interprets: Any = NotImplemented) -> Call:
    """Mark a function of the machine: it is called as it is, and means nothing outside of a capture."""
    fn.__dict__[INTERPRETS] = interprets
    return fn


def is_of_machine(fn: Any) -> bool:
    return type(fn) is types.FunctionType and INTERPRETS in fn.__dict__


SUBSTITUTED: dict[Any, Any] = {}  # what compiler.substitute_in_graph was told: function -> the Python function that stands for it
SKIPPED: weakref.WeakSet[types.CodeType] = weakref.WeakSet()  # kept from the frame hook (compiler.disable(recursive=False)); what it calls is compiled
EXPORT_FRAME = "<torchsmith export>"  # file name of the function that calls an exported module


def skips_itself_alone(code: types.CodeType) -> bool:
    """Is it PyTorch's wrapper of disable(recursive=False)? It runs as it is, and what it calls may be compiled."""
    return code.co_name == "nonrecursive_disable_wrapper"


OPTIMIZERS = _TORCH_DIR + "/optim/"


def is_torch_file(filename: str) -> bool:
    return filename.startswith(_TORCH_DIR)


# Python functions of torch that are one node. Everything else in torch is inlined like user code.
_NOT_LEAVES = frozenset({
    "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic", "handle_torch_function", "boolean_dispatch",
    "is_tensor", "is_storage", "compile", "vmap", "cond", "while_loop", "load", "save", "typename", "set_default_dtype",
    "set_default_device", "set_default_tensor_type", "get_default_device", "manual_seed", "seed", "initial_seed", "get_rng_state",
    "set_rng_state", "use_deterministic_algorithms", "are_deterministic_algorithms_enabled", "set_warn_always", "is_warn_always_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "set_float32_matmul_precision", "get_float32_matmul_precision", "classproperty",
    "sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_sum", "sym_ite", "sym_sqrt", "sym_fresh_size", "compiled_with_cxx11_abi",
    "set_deterministic_debug_mode", "get_deterministic_debug_mode", "set_printoptions", "typed_storage", "get_file_path",
    "prepare_multiprocessing_environment", "is_available", "unravel_index", "assert_int_or_pair", "import_ir_module",
})  # fmt: skip


@cache
def leaf_functions() -> dict[Any, str]:
    """Callables that are one call_function node, with the name shown."""
    found: dict[Any, str] = {}
    for namespace in (F, torch.functional):
        for name, value in vars(namespace).items():
            if issubclass(type(value), types.FunctionType) and not name.startswith("__") and name not in _NOT_LEAVES:
                if (value.__module__ or "").startswith(("torch.nn.functional", "torch.functional", "torch._jit_internal")):
                    found[value] = name
    for name, value in vars(torch).items():
        if issubclass(type(value), types.FunctionType) and name not in _NOT_LEAVES and not name.startswith("_"):
            if value.__globals__.get("__name__") in ("torch.functional", "torch.nn.functional", "torch._lobpcg", "torch._linalg_utils"):
                found[value] = name
    found[torch.unravel_index] = "unravel_index"
    c: Any = torch._C
    for namespace in (c._VariableFunctions, c._nn, c._special, c._linalg, c._fft, c._nested, c._sparse):
        for name in dir(namespace):
            value = getattr(namespace, name, None)
            if issubclass(type(value), types.BuiltinFunctionType) and not name.startswith("__") and name not in _NOT_LEAVES:
                found[value] = name
    for value in (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer, torch.sparse_coo_tensor,
                  torch.sparse_csr_tensor, torch.sparse_compressed_tensor, torch._C._nn.scaled_dot_product_attention):
        found[value] = value.__name__
    for value in (torch.from_numpy, torch.frombuffer):
        found.pop(value, None)
    return found


@cache
def tensor_functions() -> dict[Any, str]:
    """Python functions and descriptors in Tensor's namespace: calling `Tensor.f(x)` is the method f of x."""
    found: dict[Any, str] = {}
    for cls in (torch.Tensor, torch._C.TensorBase):
        for name, value in vars(cls).items():
            if issubclass(type(value), (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)) and value not in found:
                found[value] = name
    return found


# C functions of these modules are pure on plain arguments (or change only the containers handed to them).
PURE_MODULES = frozenset({
    "builtins", "math", "cmath", "operator", "_operator", "itertools", "_functools", "functools", "_collections", "collections", "_struct",
    "_bisect", "_heapq", "_json", "_string", "unicodedata", "_sre", "_abc", "_contextvars", "numpy", "_weakref", "_statistics",
    "zlib", "binascii", "_hashlib", "_sha512", "_md5", "_sha1", "_sha2", "_copy", "copyreg", "_enum", "_typing", "_opcode",
})  # fmt: skip
# Functions of torch's C++ bindings that only tell what is so.
PURE_BINDINGS = frozenset({"_get_tracing_state", "_is_tracing", "_are_functorch_transforms_active", "_jit_is_script_object"})
# Builtins that reach outside.
IMPURE_BUILTINS = frozenset({"print", "input", "open", "exec", "eval", "compile", "breakpoint", "__import__", "globals", "locals"})

# Methods that change their container.
MUTATING = frozenset({
    "append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "__setitem__", "__delitem__", "update", "setdefault",
    "popitem", "add", "discard", "difference_update", "intersection_update", "symmetric_difference_update", "move_to_end",
    "appendleft", "extendleft", "popleft", "rotate", "__iadd__", "__imul__", "__ior__", "__iand__", "__isub__", "__ixor__", "subtract",
})  # fmt: skip
