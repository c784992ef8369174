"""Script: functionalise every op_db entry at one dtype and compare with eager; prints what differs and a summary.

python tests/cpu/op_db_graph.py [--only GLOB] [--samples N] [--dtype float32] [--inplace] [--layout given] [--dynamic]
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))
from graph_harness import difference, graph_of  # noqa: I001

from torchsmith import events
from torchsmith.codes import Unsupported


LAYOUTS = {
    "given": lambda t: t,
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() >= 2 else t,
    "reversed": lambda t: t.permute(tuple(range(t.dim())[::-1])).contiguous().permute(tuple(range(t.dim())[::-1])),
    "channels_last": lambda t: t.to(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim(), torch.preserve_format)),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0] if t.dim() else t,
}


def try_sample(fn, sample, layout, dynamic: bool) -> str:
    """ "ok", "CODE detail", or what differs."""
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
    tensors = tuple(layout(leaves[i].detach()) for i in at)

    def call(*given):
        filled = list(leaves)
        for i, t in zip(at, given, strict=True):
            filled[i] = t
        first, args, kwargs = pytree.tree_unflatten(filled, tree)
        return fn(first, *args, **kwargs)

    try:
        fg = graph_of(call, *tensors, dynamic=tuple(range(len(tensors))) if dynamic else ())
    except Unsupported as e:
        return f"{e.code} {e.detail}"
    return difference(call, tensors, fg, exact=False) or "ok"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="*")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--inplace", action="store_true")
    parser.add_argument("--layout", default="given", choices=LAYOUTS)
    parser.add_argument("--dynamic", action="store_true")
    options = parser.parse_args()
    from torch.testing._internal import common_methods_invocations as invocations

    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # seeds are the harness's business

    warnings.simplefilter("ignore")
    dtype = getattr(torch, options.dtype)
    tally: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    for op in invocations.op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        fn = op.inplace_variant if options.inplace else op.op
        if "empty" in name or "jiterator" in name:  # nothing to compare; CUDA only
            continue
        if not fnmatch.fnmatch(name, options.only) or dtype not in op.supported_dtypes("cpu") or fn is None:
            continue
        started, found, count = time.perf_counter(), [], 0
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        except Exception as e:  # a generator of samples that this build cannot run is no finding
            print(f"{name}: no samples: {e}")
            continue
        with events.recording() as seen:
            for sample in samples[:: max(1, len(samples) // options.samples)]:
                if options.inplace and getattr(sample, "broadcasts_input", False):
                    continue
                count += 1
                try:
                    result = try_sample(fn, sample, LAYOUTS[options.layout], options.dynamic)
                except Exception as e:  # the script's purpose is to list every kind of failure
                    result = f"{type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}"
                if result != "ok":
                    found.append(result)
        learned = {f"{e.fields['code']} {e.fields['op']}" for e in seen if e.kind == "fallback"}
        codes.update(learned)
        kind = "ok" if not found else "unsupported" if all(f[:3] == "GRA" for f in found) else "WRONG"
        tally[kind] += 1
        if found:
            most = Counter(found).most_common(1)[0][0]
            print(f"{kind} {name}: {len(found)}/{count} {most} [{time.perf_counter() - started:.1f}s]", flush=True)
    print(dict(tally))
    print("learned:", " ".join(sorted(k.split(" ")[1] for k in codes)))


if __name__ == "__main__":
    main()
