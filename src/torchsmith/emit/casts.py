"""Conversions between element types as C text, on registers: vectors of lanes or single values.

In: source and target dtype names, the operand's text. Out: a C expression. Booleans are xi32 masks (vectors) or 0/1 ints (scalars).
"""

from __future__ import annotations

from ..codes import Unsupported

HALVES = ("bf16", "f16")
SMALL = ("i16", "i8", "u8")
REGS = {"bf16": "u16", "f16": "u16", "bool": "i32"}


def convert_text(source: str, target: str, vec: bool, a: str) -> str:
    """`a` of dtype `source` converted to `target`, as C does on x86 (out-of-range floats wrap through the wider integer)."""
    if source == target:
        return a
    return _vector(source, target, a) if vec else _scalar(source, target, a)


def _scalar(s: str, t: str, a: str) -> str:
    if s in HALVES:
        return convert_text("f32", t, False, f"f_{s}({a})")
    if t == "bool":
        return f"({a} != 0)"
    if t in HALVES:
        if t == "f16" and s == "f64":
            return f"hd_f16({a})"
        return f"h_{t}({a if s == 'f32' else f'(f32){a}'})"
    if s in ("f32", "f64") and t in SMALL:  # through a wider integer, as the machine does
        return f"(({t})(i32){a})"
    return f"(({REGS.get(t, t)}){a})"


def _up32(s: str, a: str) -> str:
    """A small integer vector as xi32."""
    return {"i8": f"up_xi8({a})", "u8": f"up_xu8({a})", "i16": f"up_xi16({a})"}.get(s, a)


def _vector(s: str, t: str, a: str) -> str:
    if s == "bool":
        if t == "f32":
            return f"(xf32)({a} & 0x3f800000)"
        return convert_text("i32", t, True, f"({a} & 1)")
    if t == "bool":
        if s in HALVES:
            return f"(f_x{s}({a}) != 0.0f)"
        if s in ("i8", "u8"):
            return f"(up_x{s}({a}) != 0)"
        return f"({a} != 0)" if s in ("f32", "i32") else f"CV(({a} != 0), xi32)"
    if s in HALVES:
        return convert_text("f32", t, True, f"f_x{s}({a})")
    if t in HALVES:
        return f"h_x{t}({convert_text(s, 'f32', True, a)})"
    if t in ("i8", "u8"):
        if s in ("i8", "u8"):
            return f"((x{t}){a})"
        return f"down_x{t}({convert_text(s, 'i32', True, a)})"
    if s in SMALL:
        return convert_text("i32", t, True, _up32(s, a)) if t != "i32" else _up32(s, a)
    if t == "i16":
        return f"CV({convert_text(s, 'i32', True, a)}, xi16)"
    if {s, t} == {"f32", "i64"}:
        return f"CV(CV({a}, xf64), xi64)" if s == "f32" else f"CV({a}, xf32)"
    if t in ("i32", "i64", "f32", "f64"):
        return f"CV({a}, x{t})"
    raise Unsupported("EMI001", detail=f"conversion from {s} to {t}")
