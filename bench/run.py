"""The measuring commands: steady state, contractions, compile time, per-call overhead, operator coverage.

    python bench/run.py --suite seeds          ten models and five others, batch 1 and 8, against four runtimes
    python bench/run.py --suite seeds --layers MODEL    one model layer by layer beside ONNX Runtime and OpenVINO
    python bench/run.py --suite contractions   every distinct contraction, float32 and bfloat16, against ATen's best operator and the peak
    python bench/run.py --suite compile        first call in fresh processes, empty and filled caches
    python bench/run.py --suite overhead       the cost of a call: tiny functions, BERT with a no-op backend
    python bench/run.py --suite training       training steps at batch 8 against eager and torch.compile: ms and peak bytes
    python bench/run.py --suite threads        two Python threads on one model against one thread
    python bench/run.py --suite avx2           code for AVX2 chosen by option, against torch.compile with freezing limited to AVX2
    python bench/run.py --suite loaded         the same calls beside two busy processes
    python bench/run.py --suite pointwise      elementary functions alone, softmax, norms, pooling, copies, against torch
    python bench/run.py --suite aot            packages with varying sizes against AOTInductor, ONNX Runtime, and packages of one size
    python bench/run.py --suite aot-example    the documents' example: compile time, library, start, memory, cost of a call from C
    python bench/run.py --suite op_db          bench/op_db.py, whole
    python bench/run.py --suite xla            the XLA document's tables: openxla against tracing on every call, eager and our own compiler
    python bench/run.py --suite under          torch.compile(backend="torchsmith") against inductor with freezing off, training too

In: --models, --batches, --peers, --only, --threads narrow a run; --quick is a smoke run whose figures mean nothing. Out: a table on stdout
and bench/results/<suite>.json and .md. The suites are in bench/suites, the protocol of every comparison in bench/paired.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from paired import PAIRS  # noqa: E402  (the script's own folder comes first)
from suites import aot, aot_example, avx2, capture, compile, contractions, loaded, overhead, pointwise, seeds, threads, training, under, xla  # noqa: E402

from models import MODELS, OUTSIDE  # noqa: E402

SUITES = {
    "seeds": seeds, "contractions": contractions, "compile": compile, "overhead": overhead, "threads": threads, "loaded": loaded,
    "capture": capture, "pointwise": pointwise, "aot": aot, "aot-example": aot_example, "xla": xla, "under": under, "training": training,
    "avx2": avx2,
}  # fmt: skip
MODELS_OF = {
    "threads": ["resnet18", "mobilenet_v2", "BERT_pytorch"], "loaded": ["resnet18", "resnet50", "BERT_pytorch"], "aot": list(aot.CASES),
}  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--suite", choices=(*SUITES, "op_db"))
    p.add_argument("--models", nargs="+", metavar="MODEL", help="default: ten; of seeds: five more; of threads, loaded: three")
    p.add_argument("--batches", nargs="+", type=int, default=None, help="default: 1 and 8; of contractions: 1")
    p.add_argument("--peers", nargs="+", default=list(seeds.PEER_NAMES), choices=seeds.PEER_NAMES, metavar="PEER")
    p.add_argument("--pairs", type=int, default=PAIRS)
    p.add_argument("--states", nargs="+", default=["cold", "warm"], choices=("cold", "warm"), help="of the compile suite")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the contractions suite")
    p.add_argument("--dtypes", nargs="+", default=list(contractions.DTYPES), choices=contractions.DTYPES + contractions.MORE,
                   help="of the contractions suite")  # fmt: skip
    p.add_argument("--only", default="", metavar="REGEX", help="contractions whose set, origin, dtype or name match")
    p.add_argument("--prepare", action="store_true", help="contractions, aot: no timing; fills the cache for a short quiet run")
    p.add_argument("--quick", action="store_true", help="smoke run: a few short bursts, results in a temporary folder")
    p.add_argument("--resume", action="store_true", help="keep the rows that the last run wrote")
    p.add_argument("--out", type=Path, help="folder of the results; default: bench/results")
    p.add_argument("--device", choices=("cpu", "cuda"), help="of xla; default: a GPU where there is one")
    p.add_argument("--jobs", type=int, default=1, help="of xla, under: so many cases prepare side by side; each GPU measures one at a time")
    p.add_argument("--limit", type=float, default=3600, help="of xla, under: seconds of one case")
    p.add_argument("--seconds", type=float, default=1e9, help="of xla, under: of the whole run; cases that were not reached are left out")
    p.add_argument("--layers", metavar="MODEL", help="of seeds: one model layer by layer, beside ONNX Runtime and OpenVINO")
    p.add_argument("--case", help=argparse.SUPPRESS)
    p.add_argument("--case-out", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.case:
        case = json.loads(args.case)
        args.case_out.write_text(json.dumps(SUITES[case["suite"]].run_case(case)))
        return 0
    if args.suite is None:
        p.error("--suite is needed")
    args.models = args.models or MODELS_OF.get(args.suite) or [*MODELS, *(OUTSIDE if args.suite == "seeds" else ())]
    args.batches = args.batches or ([1] if args.suite == "contractions" else [1, 8])
    if args.out is None:
        args.out = Path(tempfile.gettempdir()) / "torchsmith_bench_quick" if args.quick or args.prepare else HERE / "results"
    if args.suite == "op_db":
        return subprocess.call([sys.executable, str(HERE / "op_db.py"), *(["--sample", "20"] if args.quick else [])])
    SUITES[args.suite].suite(args)
    if args.layers:
        return 0
    print(f"\n{(args.out / f'{args.suite}.md').read_text()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
