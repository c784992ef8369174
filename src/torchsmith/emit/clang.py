"""What clang calls gcc's builtins: kernels use gcc's names, and a text that uses one that clang lacks begins with its meaning there.

In: the text of a kernel. Out: the lines to put before it, between #ifdef __clang__ and #endif; "" where it needs none.
"""

from __future__ import annotations

_TYPES = """\
typedef float ts_vf __attribute__((vector_size(64))); typedef double ts_vd __attribute__((vector_size(64)));
typedef int ts_vi __attribute__((vector_size(64))); typedef long long ts_vl __attribute__((vector_size(64)));
typedef signed char ts_vb __attribute__((vector_size(16))); typedef unsigned char ts_vu __attribute__((vector_size(16)));
typedef int ts_vi8 __attribute__((vector_size(32)));
typedef short ts_vh __attribute__((vector_size(32))); typedef unsigned short ts_vw __attribute__((vector_size(32)));"""


def _pick(element: str, mask: str, value: str, other: str) -> str:
    kind = {"s": ("ps", "ts_vf", "short"), "d": ("pd", "ts_vd", "char"), "i": ("d", "ts_vi", "short"), "q": ("q", "ts_vl", "char")}[element]
    name, vector, bits = kind
    return f"(({vector})__builtin_ia32_select{name}_512((unsigned {bits})({mask}), ({vector})({value}), ({vector})({other})))"


# gcc's builtin, with its parameters, and what it means in clang
CLANG: dict[str, tuple[str, str]] = {
    **{f"__builtin_ia32_{n}p{e}512_mask": ("a, b, w, m, r", _pick(e, "m", f"__builtin_ia32_{n}p{e}512((a), (b), (r))", "w"))
       for n in ("max", "min") for e in "sd"},
    **{f"__builtin_ia32_sqrtp{e}512_mask": ("a, w, m, r", _pick(e, "m", f"__builtin_ia32_sqrtp{e}512((a), (r))", "w")) for e in "sd"},
    "__builtin_ia32_movaps512_mask": ("a, w, m", _pick("s", "m", "a", "w")), "__builtin_ia32_movapd512_mask": ("a, w, m", _pick("d", "m", "a", "w")),
    "__builtin_ia32_movdqa32_512_mask": ("a, w, m", _pick("i", "m", "a", "w")),
    "__builtin_ia32_movdqa64_512_mask": ("a, w, m", _pick("q", "m", "a", "w")),
    "__builtin_ia32_permvarsf512_mask": ("a, i, w, m", _pick("s", "m", "__builtin_ia32_permvarsf512((ts_vf)(a), (ts_vi)(i))", "w")),
    "__builtin_ia32_permvardf512_mask": ("a, i, w, m", _pick("d", "m", "__builtin_ia32_permvardf512((ts_vd)(a), (ts_vl)(i))", "w")),
    "__builtin_ia32_permvarsi512_mask": ("a, i, w, m", _pick("i", "m", "__builtin_ia32_permvarsi512((ts_vi)(a), (ts_vi)(i))", "w")),
    "__builtin_ia32_permvardi512_mask": ("a, i, w, m", _pick("q", "m", "__builtin_ia32_permvardi512((ts_vl)(a), (ts_vl)(i))", "w")),
    "__builtin_ia32_vpermt2varps512_mask": ("i, a, b, m", _pick("s", "m", "__builtin_ia32_vpermi2varps512((ts_vf)(a), (ts_vi)(i), (ts_vf)(b))", "a")),
    "__builtin_ia32_pmovsxbd512_mask": ("a, w, m", _pick("i", "m", "__builtin_convertvector((ts_vb)(a), ts_vi)", "w")),
    "__builtin_ia32_pmovzxbd512_mask": ("a, w, m", _pick("i", "m", "__builtin_convertvector((ts_vu)(a), ts_vi)", "w")),
    "__builtin_ia32_pmovsxwd512_mask": ("a, w, m", _pick("i", "m", "__builtin_convertvector((ts_vh)(a), ts_vi)", "w")),
    "__builtin_ia32_pmovzxwd512_mask": ("a, w, m", _pick("i", "m", "__builtin_convertvector((ts_vw)(a), ts_vi)", "w")),
    "__builtin_ia32_ptestmd512": ("a, b, m", "__builtin_ia32_cmpd512_mask((ts_vi)((a) & (b)), (ts_vi){0}, 4, (unsigned short)(m))"),
    "__builtin_ia32_ptestmd256": ("a, b, m", "__builtin_ia32_cmpd256_mask((ts_vi8)((a) & (b)), (ts_vi8){0}, 4, (unsigned char)(m))"),
    "__builtin_ia32_broadcastf32x4_512": (
        "a, w, m", _pick("s", "m", "__builtin_shufflevector((a), (a), 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3)", "w")),
    "__builtin_ia32_broadcastf64x4_512": ("a, w, m", _pick("d", "m", "__builtin_shufflevector((a), (a), 0, 1, 2, 3, 0, 1, 2, 3)", "w")),
}  # fmt: skip


def clang_names(text: str) -> str:
    """The definitions that `text` needs."""
    used = [f"#define {name}({names}) {meaning}" for name, (names, meaning) in CLANG.items() if f"{name}(" in text]
    lines = ["#ifdef __clang__", _TYPES, *used, "#endif", ""] if used else []
    if "_Float16" in text:  # before version 15 only where the processor computes with it; converting is all that kernels do
        lines += ["#if defined(__clang__) && __clang_major__ < 15 && !defined(__AVX512FP16__)", "#define _Float16 __fp16", "#endif", ""]
    return "\n".join(lines)
