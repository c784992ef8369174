"""Fewer roundings: intermediate results of fused operators keep float32, if options.emulate_precision_casts is off.

In: a Program after fusion. Out: Program; with the option on (the default, as eager rounds at every operator) the same one.

    y = bf16(f32(bf16(exp(f32(x)))) * 2)   ->   y = bf16(exp(f32(x)) * 2)
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.program import Element, Program, Stage
from ...ir.rules import drop_precision_casts
from ...options import Options


def relax_precision(program: Program, options: Options) -> Program:
    """Drop roundings inside expressions; what is stored is rounded."""
    if options.emulate_precision_casts:
        return program

    def relaxed(e: Element) -> Element:
        if not isinstance(e, Stage) or e.scan:
            return e
        lets = tuple((v, drop_precision_casts(x)) for v, x in e.lets)
        return replace(e, lets=lets, stores=tuple(replace(s, value=drop_precision_casts(s.value)) for s in e.stores))

    return replace(program, body=tuple(relaxed(e) for e in program.body))
