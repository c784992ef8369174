"""Every Hugging Face architecture and timm model that can be built from a configuration at a small size: captured, run, held against eager.

    python bench/architectures.py --list                       the names
    python bench/architectures.py --jobs 2                      one model of each family, rows kept in bench/results/architectures.json
    python bench/architectures.py --all                         every name
    python bench/architectures.py --only 'hf:(bert|t5)$' --print
    python bench/architectures.py --road native --sample 40     kernels too, for every n-th name

    python bench/architectures.py --road native --device cuda --dtype float32,float16 --train-every 3 --seconds 400 --jobs 15

Roads: `capture` runs the captured graphs with torch (backend "eager": what is measured is capture, guards and breaks), `native` is the
default backend, kernels included, `train` is `capture` with loss.backward() (gradients are compared too), `generate` is model.generate with
forward compiled (`capture`): greedy and sampling, dynamic and static caches, tokens are compared. float32, weights seeded, every output
compared, caches too: |compiled - eager| <= 1e-5 + 1e-4 |eager| on capture and train, 1e-3 + 1e-3 |eager| on native.

`native train` is forward and backward in training mode with kernels; results, gradients and buffers afterwards are compared. Weights that
are vectors are moved, so that none is 0 or 1. Batch norm of few small images makes rounding large; so it is held against float64, as
doubles.py says, and so are all results of `--device cuda` (TF32 off) and `--device fake`: processor tensors through the driver of
tests/gpu, without dropout; the Triton texts of its kernels become machine code for sm_90, or their interpreter runs them. With several
of `--dtype` the models take them in turn, then the others; with `--train-every N` every n-th model is trained, too.

Each model runs in a process of its own under a time limit; rows are written as they come, and a row that is there is not run again
(`--again`). Status: right, wrong, crash (a signal), hang (the limit), raises (compiled raises where eager does not), asks (so does eager
where torch.compiler.is_compiling() says that it is compiled), random (eager differs from itself), not built.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from doubles import Run, difference, floats, leaves, size_of, wrong  # noqa: E402
from suites.harness import about  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

from models import torchvision_models  # noqa: E402

ROADS = {"capture": (1e-4, 1e-5), "native": (1e-3, 1e-3), "train": (1e-4, 1e-5), "generate": (0.0, 0.0),
         "native train": (1e-3, 1e-3)}  # relative, absolute  # fmt: skip
NATIVE = ("native", "native train")  # the others ask what capture makes of a model
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ORDER = ("wrong", "crash", "hang", "raises", "asks", "random", "right", "not built")
MOST = 200_000_000  # parameters: a model that stays larger than this is not built
MOST_TRAINED = 40_000_000  # there are copies, in float64 too
Row = dict[str, Any]


class Case(NamedTuple):
    name: str
    road: str
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def way(self) -> str:
        """What rows of one table have in common."""
        return self.road if self.device == "cpu" and self.dtype == "float32" else f"{self.road} {self.device} {self.dtype}"

    @property
    def is_judged(self) -> bool:
        """Held against float64."""
        return self.way not in ("capture", "native", "train", "generate")


class NotBuilt(Exception):
    """The model has no small form that this script can make, or eager refuses its inputs."""


# ---------------------------------------------------------------- names

SMALL = ("atto", "femto", "pico", "nano", "xxs", "xx_small", "test", "tiny", "mini", "_s0", "b0", "050", "small", "18", "_s", "")


USED = (  # of Hugging Face, what is downloaded most, by hand
    "bert", "llama", "gpt2", "qwen2", "t5", "vit", "roberta", "mistral", "qwen3", "clip", "whisper", "gemma2", "distilbert", "phi3",
    "wav2vec2", "deberta-v2", "bart", "gemma3_text", "xlm-roberta", "qwen2_moe", "mixtral", "dinov2", "siglip", "gpt_neox", "swin", "opt",
    "electra", "mamba", "detr", "albert", "qwen2_vl", "llava", "gpt_oss", "deepseek_v3", "olmo2", "granite", "falcon", "bloom", "phi",
    "gptj", "mobilebert", "convnext", "segformer", "beit", "deit", "mpnet", "mbart", "m2m_100", "longformer", "layoutlm", "blip",
    "hubert", "wavlm", "stablelm", "starcoder2", "cohere2", "smollm3", "modernbert", "nomic_bert", "esm", "clap", "sam", "depth_anything",
    "vits", "speecht5", "speech_to_text", "data2vec-text", "resnet", "regnet", "mobilenet_v2", "efficientnet", "timesformer", "videomae",
    "owlvit", "table-transformer", "rt_detr", "yolos", "dpt", "mask2former", "maskformer", "upernet", "poolformer", "levit", "cvt",
    "pvt_v2", "bit", "swinv2", "dinov3_vit", "hiera", "ijepa", "aimv2", "siglip2", "qwen2_5_vl", "idefics3", "paligemma", "pixtral",
    "internvl", "gemma3", "llama4_text", "glm4", "jamba", "zamba2", "mamba2", "rwkv", "bamba", "falcon_h1", "xlnet", "funnel", "big_bird",
    "fnet", "nystromformer", "led", "pegasus", "marian", "blenderbot", "prophetnet", "umt5", "mt5", "switch_transformers", "biogpt",
    "xglm", "codegen", "gpt_neo", "gpt_bigcode", "mpt", "persimmon", "cohere", "patchtst", "patchtsmixer", "informer", "autoformer",
    "time_series_transformer", "timesfm", "encodec", "dac", "mimi", "musicgen", "bark", "univnet",
)  # fmt: skip


def names(every: bool) -> list[str]:
    """hf:<model type>, timm:<model>; without `every` one timm model of each family. In an order of no meaning: a run cut short is broad."""
    import timm

    hf = [f"hf:{kind}" for kind in hf_classes()]
    found = []
    for module in timm.list_modules():
        family = timm.list_models(module=module)
        found += [f"timm:{n}" for n in (family if every else sorted(family, key=_size)[:1])]
    both = sorted(hf, key=_mixed), sorted(found, key=_mixed)
    merged = [n for pair in zip(*both, strict=False) for n in pair]
    return merged + [n for n in (*both[0], *both[1]) if n not in set(merged)]


def used_first(chosen: Sequence[str]) -> list[str]:
    """Well-known models first, timm's families between them."""
    known, images = [f"hf:{n}" for n in USED if f"hf:{n}" in set(chosen)], [n for n in chosen if n.startswith("timm:")]
    pairs = [n for pair in zip(known, images, strict=False) for n in pair]
    return [*dict.fromkeys([*pairs, *known, *chosen])]


def _size(name: str) -> tuple[int, int, str]:
    return next(i for i, s in enumerate(SMALL) if s in name), len(name), name


def _mixed(name: str) -> int:
    """An order that has nothing to do with the alphabet, the same in every run."""
    value = 0
    for c in name.encode():
        value = (value * 1_000_003 + c) % 2_147_483_647
    return value * 48_271 % 2_147_483_647


def hf_classes() -> dict[str, str]:
    """Model type -> name of the class that is built: the base model, else the first with a head."""
    from transformers.models.auto import configuration_auto, modeling_auto

    tables = [modeling_auto.MODEL_MAPPING_NAMES]
    tables += [getattr(modeling_auto, t) for t in dir(modeling_auto) if t.startswith("MODEL_FOR_") and t.endswith("_MAPPING_NAMES")]
    found: dict[str, str] = {}
    for table in tables:
        for kind, classes in table.items():
            if kind in configuration_auto.CONFIG_MAPPING_NAMES:
                found.setdefault(kind, classes if isinstance(classes, str) else classes[0])
    return found


# ---------------------------------------------------------------- small configurations

LAYERS = re.compile(
    r"(^|_)(num|n)?_?(hidden_|encoder_|decoder_|transformer_)?(layers?|blocks)$|^depth$|num_\w*layers$|_layers$|^n_layers?$"
)
WIDTH = {
    "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "projection_dim", "decoder_hidden_size", "encoder_hidden_size",
    "word_embed_proj_dim", "embedding_size", "encoder_embed_dim", "decoder_embed_dim", "vision_embed_dim", "emb_dim", "output_proj_dim",
    "out_hidden_size", "attention_hidden_size", "proj_dim", "output_dim", "shared_projection_dim", "project_dim", "d_embed",
    "text_embed_dim",
}  # fmt: skip
WIDE = re.compile(r"(intermediate|ffn_dim|ffn_hidden|d_ff$|d_inner|n_inner|mlp_dim|feedforward|inner_dim|ffn$|shared_expert_intermediate)")
HEADS = re.compile(r"(num|n)_(attention_|key_value_|kv_|query_|global_key_value_)?heads?$|attention_heads$|^n_head$")
KEPT = {"num_feat_extract_layers", "num_conv_layers", "num_feature_levels", "num_codebooks", "num_stages", "conv_kernel"}
FIXED: dict[str, int] = {
    "vocab_size": 160, "max_position_embeddings": 64, "max_source_positions": 64, "max_target_positions": 64, "n_positions": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4, "head_dim": 8,
    "attention_head_size": 8, "d_kv": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "moe_topk": 2, "moe_k": 2, "global_head_dim": 8, "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 8, "num_queries": 8, "decoder_vocab_size": 160, "codebook_size": 32, "text_vocab_size": 160,
    "num_conv_pos_embeddings": 16, "entity_vocab_size": 40, "max_2d_position_embeddings": 1024, "num_kv_shared_layers": 0,
    "first_k_dense_replace": 1, "image_size": 32, "num_hash_functions": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "input_embed_dim": 32, "num_buckets": 8, "mamba_d_state": 8, "state_size": 8,
    "mamba_n_heads": 8, "mamba_d_head": 8, "n_codes": 32, "num_embeddings": 32, "codebook_dim": 16,
}  # fmt: skip


def shrunk(config: Any, level: int) -> dict[str, Any]:
    """Arguments for a small configuration of config's class. Level 0: everything small; 1: fewer layers and words; 2: fewer layers;
    3: as it is."""
    sub = getattr(type(config), "sub_configs", {}) or {}
    made: dict[str, Any] = {}
    if level == 3:
        return made
    counts = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = next((v for k, v in vars(config).items() if k in counts and isinstance(v, int)), None)
    for key, value in vars(config).items():
        if key.startswith("_") or key in ("transformers_version", "torch_dtype", "dtype"):
            continue
        if key in sub or hasattr(value, "to_diff_dict"):
            if value is not None:
                small = shrunk(value, level) if not isinstance(value, dict) else value
                made[key] = {**small, "model_type": value.model_type} if hasattr(value, "model_type") else small
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            small = _small(key, value, level)
            if small != value:
                made[key] = small
        elif isinstance(value, (list, tuple)) and value and layers and layers > 2 and len(value) == layers:
            kinds = list(dict.fromkeys(value)) if all(isinstance(v, (str, int)) for v in value) else list(value)
            made[key] = (kinds + kinds)[:2]
        elif key == "depths" and isinstance(value, (list, tuple)):
            made[key] = [1 for _ in value]
        elif key in ("rope_parameters", "rope_scaling"):
            continue
    for key in list(made):  # special tokens lie in the vocabulary
        if key == "vocab_size":
            words = made[key]
            tokens = {k: v for k, v in vars(config).items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
            made.update({k: words - 2 - i for i, k in enumerate(sorted(k for k, v in tokens.items() if v >= words))})
    return made


NEEDED: dict[str, Any] = {"prediction_length": 8}  # what a configuration leaves open


def _small(key: str, value: int, level: int) -> int:
    if key in KEPT:
        return value
    if LAYERS.search(key) and "per_layer" not in key:
        return min(value, 2)
    if level == 2:
        return value
    if key == "vocab_size":
        return min(value, FIXED[key])
    if level == 1:
        return value
    if key in FIXED:
        return min(value, FIXED[key])
    if key in WIDTH:
        return min(value, 32)
    if WIDE.search(key):
        return min(value, 64)
    if HEADS.search(key):
        return min(value, 2 if "key_value" in key or "kv" in key else 4)
    return value


def hf_model(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The smallest form that can be made and that eager runs, with its inputs."""
    import transformers

    name = hf_classes()[kind]
    cls = getattr(transformers, name, None)
    if cls is None:
        raise NotBuilt(f"transformers has no {name}")
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    why = ""
    for level in (0, 1, 2, 3):
        try:
            config = config_class(**shrunk(config_class(), level))
            config.__dict__.update({k: v for k, v in NEEDED.items() if k in vars(config) and not vars(config)[k]})
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in cls(config).parameters())
            except Exception:  # its constructor computes with values: by the configuration, then
                size = 0 if level == 0 else MOST + 1
            if size > MOST:
                raise NotBuilt(f"{size / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = cls(config).eval()
        except Exception as error:  # the next level may do
            why = why or _brief(error)
            continue
        for kwargs in inputs_of(model, config):
            try:
                torch.manual_seed(2)
                with torch.no_grad():
                    model(**kwargs)
                return model, kwargs
            except Exception as error:
                why = why or f"{', '.join(kwargs)}: {_brief(error)}"
        del model
    raise NotBuilt(why or "no input is known for it")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:160]


# ---------------------------------------------------------------- inputs


def _get(config: Any, *wanted: str, default: Any = None) -> Any:
    """The first of the attributes that the configuration or one of its parts has."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "to_diff_dict"))]
    for name in wanted:
        for part in parts:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def _ids(c: Any, length: int = 12) -> torch.Tensor:
    words = _get(c, "vocab_size", default=100)
    words = words if isinstance(words, int) else 100
    return torch.randint(3, max(words - 20, 4), (2, length))


def _pixels(c: Any, size: int | None) -> torch.Tensor:
    side = _get(c, "image_size", default=64) if size is None else size
    side = side if isinstance(side, (list, tuple)) else (side, side)
    channels = _get(c, "num_channels", "in_channels", "in_chans", default=3)
    return torch.randn(2, channels if isinstance(channels, int) else 3, *[int(s) for s in side])


def _mask(c: Any) -> torch.Tensor:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return mask


def _boxes(c: Any) -> torch.Tensor:
    low = torch.randint(0, 400, (2, 12, 2))
    return torch.cat([low, low + torch.randint(1, 90, (2, 12, 2))], -1)


def _features(c: Any) -> torch.Tensor:
    bins = _get(c, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "num_features", default=80)
    time = 2 * _get(c, "max_source_positions", default=32)
    return torch.randn(2, bins, time) if _get(c, "max_source_positions") and _get(c, "num_mel_bins") else torch.randn(2, 64, bins)


MAKERS: dict[str, Callable[..., Any]] = {
    "input_ids": lambda c, s: _ids(c), "attention_mask": lambda c, s: _mask(c), "decoder_input_ids": lambda c, s: _ids(c, 5),
    "pixel_values": _pixels, "input_values": lambda c, s: torch.randn(2, 4000), "input_features": lambda c, s: _features(c),
    "bbox": lambda c, s: _boxes(c), "token_type_ids": lambda c, s: torch.zeros(2, 12, dtype=torch.long),
    "pixel_mask": lambda c, s: torch.ones(2, *_pixels(c, s).shape[-2:], dtype=torch.long),
    "pixel_values_videos": lambda c, s: torch.randn(1, _get(c, "num_frames", default=8), 3, *[s or _get(c, "image_size", default=32)] * 2),
    "past_values": lambda c, s: torch.rand(2, _get(c, "context_length", default=32), _get(c, "num_input_channels", default=1)),
    "inputs_embeds": lambda c, s: torch.randn(2, 12, _get(c, "hidden_size", "d_model", "dim", default=32)),
    "hidden_states": lambda c, s: torch.randn(2, 12, _get(c, "hidden_size", "d_model", "dim", default=32)),
    "inputs": lambda c, s: torch.randn(2, 12, _get(c, "d_model", default=32)), "audio_values": lambda c, s: torch.randn(2, 1, 4000),
    "spectrogram": lambda c, s: torch.randn(2, 20, _get(c, "model_in_dim", "num_mel_bins", default=80)),
    "encoder_hidden_states": lambda c, s: torch.randn(2, 6, _get(c, "hidden_size", default=32)),
}  # fmt: skip
CORE = ("input_ids", "pixel_values", "input_values", "input_features", "past_values", "pixel_values_videos")


def inputs_of(model: torch.nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Sets of inputs to try, likely ones first."""
    params = inspect.signature(model.forward).parameters
    needed = [n for n, p in params.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    main = getattr(model, "main_input_name", "input_ids")
    known = [n for n in params if n in MAKERS and not (n in ("inputs_embeds", "hidden_states") and "input_ids" in params)]
    first = [main] if main in MAKERS else [n for n in CORE if n in params][:1]
    tries = [[*first, "attention_mask"], first, [*first, "attention_mask", "decoder_input_ids"], [*first, "decoder_input_ids"],
             ["input_ids", "pixel_values"], ["input_ids", "pixel_values", "attention_mask"], ["input_ids", "bbox"], ["pixel_values"],
             ["input_ids"], known]  # fmt: skip
    seen = set()
    for size in (None, 32, 64, 224):
        for chosen in tries:
            wanted = tuple(dict.fromkeys([*needed, *(n for n in chosen if n in params)]))
            pictured = any(n.startswith("pixel") for n in wanted)
            if not wanted or (wanted, size) in seen or (size is not None and not pictured) or not all(n in MAKERS for n in wanted):
                continue
            if "attention_mask" in wanted and "input_ids" not in wanted:
                continue
            seen.add((wanted, size))
            torch.manual_seed(1)
            yield {n: MAKERS[n](config, size) for n in wanted}


def build(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model and keyword arguments for it. Raises NotBuilt."""
    where, kind = name.split(":", 1)
    if where == "hf":
        return hf_model(kind)
    import timm

    for size in (64, 96, 128, 224, None):
        try:
            torch.manual_seed(0)
            with torch.device("meta"):
                count = sum(p.numel() for p in timm.create_model(kind).parameters())
            if count > MOST:
                raise NotBuilt(f"{count / 1e6:.0f} million parameters")
            takes = "img_size" if size else None
            try:
                model = timm.create_model(kind, **({takes: size} if takes else {})).eval()
            except TypeError:  # sizes are free
                model = timm.create_model(kind).eval()
            shape = model.default_cfg["input_size"]
            x = torch.randn(2, shape[0], *((size, size) if size else shape[1:]))
            with torch.no_grad():
                model(x)
            return model, {"x": x}
        except NotBuilt:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    raise NotBuilt(why)


# ---------------------------------------------------------------- one case


def run_case(case: Case, stack: ExitStack) -> Row:
    """Build, run eagerly twice, compile, run compiled twice, compare. `stack` ends with the process."""
    import torchsmith
    from torchsmith.debug.explain import explanation
    from torchsmith.events import recording

    torchvision_models()
    warnings.simplefilter("ignore")
    name, road, dtype = case.name, case.road, DTYPES[case.dtype]
    row: Row = {"name": name, "road": case.way}
    start = time.perf_counter()
    try:
        model, kwargs = build(name) if road != "generate" else generator(name)
    except NotBuilt as why:
        return {**row, "status": "not built", "why": str(why)}
    torch.backends.cudnn.allow_tf32 = False
    device = "cpu" if case.device == "fake" else case.device
    model = model._apply(lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device))
    kwargs = tree_map(lambda v: v.to(device, dtype if v.is_floating_point() else None) if isinstance(v, torch.Tensor) else v, kwargs)
    row |= {"parameters": sum(p.numel() for p in model.parameters()), "build_s": time.perf_counter() - start, "inputs": list(kwargs)}
    if road == "native train":
        if row["parameters"] > MOST_TRAINED:
            return {**row, "status": "not built", "why": f"{row['parameters'] / 1e6:.0f} million parameters"}
        move_vectors(model)
    relative, absolute = ROADS[road]
    run = RUNS[road]
    row["class"] = type(model).__name__
    if case.device == "fake":
        without_dropout(model)
    texts, interpreted = pretend_device(stack) if case.device == "fake" else ([], [])
    start = time.perf_counter()
    want = run(model, model.forward, kwargs)
    row["eager_s"] = time.perf_counter() - start
    again = run(model, model.forward, kwargs)
    if is_random(again, want) if case.is_judged else difference(again, want, relative, absolute):
        return {**row, "status": "random", "why": "eager gives another result when called again with the same seed"}
    compiled = torchsmith.compile(model.forward, **({} if road in NATIVE else {"backend": "eager"}))
    start = time.perf_counter()
    with recording() as events:
        try:
            got = run(model, compiled, kwargs)
            row["first_s"] = time.perf_counter() - start
            again = run(model, compiled, kwargs)
            row["second_s"] = time.perf_counter() - start - row["first_s"]
            seen = explanation(events)  # not of what is compiled to judge
            if case.is_judged:
                why = wrong(model, kwargs, [got, again], want, run, dtype, "[1]" if road == "native train" else None)
            else:
                why = difference(got, want, relative, absolute) or difference(again, want, relative, absolute)
            row |= {"status": "wrong" if why else "right", "why": why}
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            row |= {"status": "raises", "why": f"{type(error).__name__}: {str(error)[:300]} ({Path(at.filename).name}:{at.lineno})"}
            seen = explanation(events)
    if row["status"] in ("wrong", "raises") and asks(model, kwargs, run, want):
        row["status"] = "asks"
    row["capture_s"] = seen.times.get("capture", (0.0, 0.0))[1]
    row["stages"] = {k: round(wall, 2) for k, (wall, _) in seen.times.items() if wall > 0.2}
    row |= {"graphs": seen.graph_count, "operators": seen.op_count, "kernels": seen.kernel_count}
    row["recompiles"] = sum(e.kind == "recompile" for e in events)
    row["breaks"] = [[r.code, short(r.loc), r.detail[:200]] for r in seen.breaks]
    row["fallbacks"] = [[r.code, short(r.loc), r.detail[:200]] for r in seen.fallbacks]
    row["calls"] = dict(Counter(c for g in seen.graphs for c in (*g.externs, *(g.backward.externs if g.backward else ()))))
    if interpreted and row["status"] == "right":
        row |= {"status": "wrong", "why": "; ".join(interpreted)[:500]}
    if texts and "TRITON_INTERPRET" not in os.environ:
        row |= made_of(texts)
    return row


def asks(model: torch.nn.Module, kwargs: dict[str, Any], run: Run, want: Any) -> bool:
    """Does eager give something else where it is told that it is compiled? Then the program says what it wants (some masks of
    transformers are left out only where it is not)."""
    with patch.object(torch.compiler, "is_compiling", lambda: True):
        try:
            return is_random(run(model, model.forward, kwargs), want)
        except Exception:
            return True


def is_random(again: Any, want: Any) -> bool:
    """More than an order of additions explains."""
    scale = max(map(size_of, floats(want).values()), default=0.0)
    return bool(difference(again, want, 5e-2, 5e-2 * scale))


def pretend_device(stack: ExitStack) -> tuple[list[str], list[str]]:
    """From here on tensors of the processor are those of a GPU; gives the Triton texts of what is compiled, as they come, and what is
    wrong with the values that these give."""
    import fuzz
    import interpreted
    import pretend
    import unoptimized

    from torchsmith.emit.triton import print_triton
    from torchsmith.ir.kernel import Kernel
    from torchsmith.lower import layout, library_convolution
    from torchsmith.schedule.blocks import form_blocks

    texts: list[str] = []
    formed: list[Any] = []

    def form(program: Any, options: Any, decided: Any, ready: Any) -> Any:
        made = form_blocks(program, options, decided)
        texts.extend(print_triton(k) for k in made.body if isinstance(k, Kernel))
        formed.append(made)
        return pretend.form(program, options, decided)

    wrong = interpreted.watch(stack, formed) if "TRITON_INTERPRET" in os.environ else []
    fuzz.prepared("fake", stack, form)
    stack.enter_context(patch.object(layout, "LIBRARY_DEVICES", {"cuda", "cpu"}))  # channels-last around convolutions, as on a GPU
    stack.enter_context(patch.dict(library_convolution.FUSED, clear=True))  # the processor has no such calls
    unoptimized.use(stack)
    tools = pretend.toolchain()
    stack.enter_context(patch.object(pretend, "toolchain", lambda: replace(tools, flags=(*tools.flags, "-O0"))))
    return texts, wrong


def made_of(texts: Sequence[str]) -> Row:
    """What becomes of Triton texts for sm_90: how many there are, those that are refused, those whose registers spill."""
    from machine_code import spilled

    from torchsmith.codes import Unsupported
    from torchsmith.options import Options
    from torchsmith.runtime.cubins import compile_images

    start, refused, spills = time.perf_counter(), list[str](), dict[str, int]()
    for text in dict.fromkeys(texts):
        try:
            (image,) = compile_images([text], 90, Options())
        except Unsupported as why:
            refused.append(f"{why.detail[-300:]}\n{text}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            if many := spilled(image.ptx, Path(folder)):
                spills[image.symbol] = many
    return {"texts": len(set(texts)), "refused": refused, "spills": spills, "texts_s": time.perf_counter() - start}


def short(loc: str) -> str:
    """file:line from the package on."""
    return re.sub(r"^.*/(site-packages|lib/python3\.\d+)/", "", loc)


def forward(model: torch.nn.Module, call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        return call(**kwargs)


def loss(out: torch.Tensor) -> torch.Tensor:
    """A number that every element moves, each in another way (the sum of squares of a normalised row is a constant)."""
    out = out.abs() if out.is_complex() else out.float() if out.itemsize < 4 else out
    return (out * torch.arange(out.numel(), device=out.device).cos().to(out.dtype).reshape(out.shape)).mean() + out.square().mean()


def backward(model: torch.nn.Module, call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """The result and all gradients, in training mode."""
    model.train()
    model.zero_grad()
    before = {k: v.clone() for k, v in model.named_buffers()}
    torch.manual_seed(3)
    out = call(**kwargs)
    sum(map(loss, (v for _, v in leaves(out) if isinstance(v, torch.Tensor) and v.requires_grad))).backward()  # type: ignore[union-attr]
    after = {k: v.clone() for k, v in model.named_buffers()}
    with torch.no_grad():
        for k, v in model.named_buffers():
            v.copy_(before[k])
    return [v.detach() for _, v in leaves(out) if isinstance(v, torch.Tensor)], {k: p.grad for k, p in model.named_parameters()}, after


def move_vectors(model: torch.nn.Module) -> None:
    """Biases of 0, scales of 1 and scales near 0 become numbers that tell."""
    numbers = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() <= 1 and p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=numbers).to(p), alpha=0.2)


def without_dropout(model: torch.nn.Module) -> None:
    """Nothing is drawn: rates are 0, also those that modules and their configurations keep as numbers."""
    for m in model.modules():
        for where in (m, getattr(m, "config", None)):
            rates = [k for k, v in vars(where).items() if isinstance(v, float) and ("drop" in k or k == "p")] if where is not None else []
            for k in rates:
                setattr(where, k, 0.0)


def generator(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model with a language head."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = name.split(":", 1)[1]
    cls = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if cls is None:
        raise NotBuilt("it does not generate text")
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    try:
        config = config_class(**shrunk(config_class(), 0))
        torch.manual_seed(0)
        model = getattr(transformers, cls)(config).eval()
        if config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
            model.generation_config.decoder_start_token_id = 0
        torch.manual_seed(1)
        ids = _ids(config, 6)
        model.generate(ids, max_new_tokens=2, do_sample=False)
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {str(error)[:160]}") from error
    return model, {"input_ids": ids}


def generate(model: Any, call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Tokens, greedy and drawn, with a dynamic and, where the model takes one, a static cache."""
    found = {}
    before = model.__dict__.get("forward")
    model.forward = call
    try:
        for cache in ("dynamic", "static"):
            for sample in (False, True):
                torch.manual_seed(5)
                try:
                    kept = None if cache == "dynamic" else cache
                    settings = {"max_new_tokens": 8, "do_sample": sample, "disable_compile": True, "cache_implementation": kept}
                    found[cache, sample] = model.generate(kwargs["input_ids"], **settings)
                except (ValueError, NotImplementedError) as error:  # models without a static cache
                    found[cache, sample] = f"{type(error).__name__}: {error}"
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before
    return {f"{cache} {'sampling' if s else 'greedy'}": v for (cache, s), v in found.items()}


RUNS: dict[str, Callable[..., Any]] = {
    "capture": forward, "native": forward, "train": backward, "generate": generate, "native train": backward,
}  # fmt: skip

# ---------------------------------------------------------------- the pool


def cases_of(chosen: Sequence[str], road: str, device: str, dtypes: Sequence[str], train_every: int) -> list[Case]:
    """Each model in one of the dtypes, each of them equally often; then in the others."""
    found = []
    for turn in range(len(dtypes)):
        for k, name in enumerate(chosen):
            case = Case(name, road, device, dtypes[(k + turn) % len(dtypes)])
            found.append(case)
            if train_every and (k + turn) % train_every == 0:
                found.append(case._replace(road="native train"))
    return found


def run_all(cases: Sequence[Case], jobs: int, limit: float, end: float, done: Callable[[Row], None]) -> None:
    """Each case in a forked process: what this process has imported is there already. At the `end` those that run are given up."""
    waiting, running = list(cases), {}
    with tempfile.TemporaryDirectory() as folder:
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < jobs and time.monotonic() < end:
                case = waiting.pop(0)
                out = Path(folder) / f"{len(waiting)}.json"
                pid = os.fork()
                if pid == 0:
                    _child(case, out)
                with suppress(ProcessLookupError, PermissionError):  # the one of us that is first
                    os.setpgid(pid, pid)
                running[pid] = case, out, time.monotonic()
            time.sleep(0.05)
            for pid, (case, out, begun) in list(running.items()):
                over = time.monotonic() > min(begun + limit, end)
                if over:
                    os.killpg(pid, signal.SIGKILL)  # what compiles for it, too
                ended, status = os.waitpid(pid, 0 if over else os.WNOHANG)
                if not ended:
                    continue
                del running[pid]
                head: Row = {"name": case.name, "road": case.way}
                if out.exists():
                    row = json.loads(out.read_text())
                elif over and time.monotonic() < begun + limit:
                    continue
                elif over:
                    row = head | {"status": "hang", "why": f"longer than {limit:.0f} s"}
                else:
                    said = out.with_suffix(".err").read_text(errors="replace").strip().splitlines()[-3:]
                    row = head | {"status": "crash", "why": f"ended with status {os.waitstatus_to_exitcode(status)}; {' / '.join(said)}"}
                done({**row, "seconds": round(time.monotonic() - begun, 2)})


def _child(case: Case, out: Path) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        for to in (1, 2) if "ARCHITECTURES_DEBUG" not in os.environ else (1,):
            os.dup2(os.open(out.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), to)
        with ExitStack() as stack:
            try:
                row = run_case(case, stack)
            except Exception as error:  # eager itself
                at = traceback.extract_tb(error.__traceback__)[-1]
                why = f"{type(error).__name__}: {error}"[:250] + f" ({Path(at.filename).name}:{at.lineno})"
                row = {"name": case.name, "road": case.way, "status": "not built", "why": why}
            out.with_suffix(".part").write_text(json.dumps(row))
            out.with_suffix(".part").rename(out)
        code = 0
    finally:
        os._exit(code)


# ---------------------------------------------------------------- the table


def table(rows: list[Row], names_in_all: int) -> str:
    """The page: counts by road, everything that is not right, breaks by how often, then all rows."""
    lines = ["# Models that can be built from a configuration", ""]
    lines += ["Made by `python bench/architectures.py`, which says what is compared.", ""]
    lines += [f"- {k}: {v}" for k, v in about().items()] + [f"- names: {names_in_all} in all", ""]
    lines += ["| road | names run | built | right | wrong | crash | hang | raises | asks | random | no break |", "|---|" + "---|" * 10]
    for road in dict.fromkeys(r["road"] for r in rows):
        mine = [r for r in rows if r["road"] == road]
        if mine:
            count = Counter(r["status"] for r in mine)
            built = len(mine) - count["not built"]
            free = sum(r["status"] == "right" and not r.get("breaks") for r in mine)
            cells = [road, len(mine), built, *(count[s] for s in ("right", "wrong", "crash", "hang", "raises", "asks", "random"))]
            share = f"{free} ({100 * free / max(built - count['random'] - count['asks'], 1):.0f} %)"
            lines.append("| " + " | ".join(map(str, [*cells, share])) + " |")
    bad = [r for r in rows if r["status"] not in ("right", "not built")]
    lines += ["", "## Not right", "", "| model | road | status | why |", "|---|---|---|---|"]
    bad.sort(key=lambda r: ORDER.index(r["status"]))
    lines += [f"| {r['name']} | {r['road']} | {r['status']} | {_cell(r.get('why'))} |" for r in bad]
    counts: Counter[tuple[str, str, str]] = Counter()
    example: dict[tuple[str, str, str], str] = {}
    for r in rows:
        for code, loc, detail in {tuple(b) for b in r.get("breaks", ())}:
            key = code, loc, detail[:100]
            counts[key] += 1
            example.setdefault(key, r["name"])
    lines += ["", "## Breaks", "", "| models | code | line | what | for example |", "|---|---|---|---|---|"]
    lines += [f"| {n} | {k[0]} | {k[1]} | {_cell(k[2])} | {example[k]} |" for k, n in counts.most_common()]
    lines += refused(rows)
    lines += ["", "## All", ""]
    lines += ["| model | road | status | parameters | graphs | operators | breaks | eager s | first call s | capture s | why |"]
    lines += ["|---|" + "---|" * 10]
    for r in sorted(rows, key=lambda r: (r["road"], r["name"])):
        size = f"{r['parameters'] / 1e6:.2f} M" if "parameters" in r else ""
        cells = [r["name"], r["road"], r["status"], size, r.get("graphs", ""), r.get("operators", "")]
        cells += [len(r["breaks"]) if "breaks" in r else ""]
        cells += [f"{r[k]:.2f}" if k in r else "" for k in ("eager_s", "first_s", "capture_s")]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {_cell(r.get('why'))} |")
    return "\n".join(lines) + "\n"


def refused(rows: list[Row]) -> list[str]:
    """What ran eagerly by reason, calls into torch by how many models have them, compile seconds, machine code that was refused, spills."""
    reasons = Counter(key for r in rows for key in {(f[0], f[2][:120]) for f in r.get("fallbacks", ())})
    calls = Counter(c for r in rows for c in r.get("calls", ()))
    stages: Counter[str] = Counter()
    for r in rows:
        stages.update(r.get("stages", {}))
    slow = sorted((r for r in rows if r["status"] == "right" and "first_s" in r), key=lambda r: -r["first_s"])[:12]
    lines = ["", "## Not compiled", "", "| models | code | what |", "|---|---|---|"]
    lines += [f"| {n} | {k[0]} | {_cell(k[1])} |" for k, n in reasons.most_common(60)]
    lines += ["", "Calls into torch: " + ", ".join(f"{c} {n}" for c, n in calls.most_common(40))]
    lines += ["", "Seconds of stages: " + ", ".join(f"{k} {s:.0f}" for k, s in stages.most_common())]
    lines += ["", "Slowest first calls: " + ", ".join(f"{r['name']} ({r['road']}) {r['first_s']:.1f}" for r in slow)]
    lines += [f"- refused: {r['name']} ({r['road']}): {_cell(t)}" for r in rows for t in r.get("refused", ())]
    lines += [f"- spills: {r['name']} ({r['road']}): {k} {n} bytes" for r in rows for k, n in r.get("spills", {}).items()]
    return lines


def _cell(text: Any) -> str:
    return str(text or "").replace("|", "/").replace("\n", " ")[:200]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true")
    p.add_argument("--all", action="store_true", help="every timm model, not one of each family")
    p.add_argument("--only", default="", metavar="REGEX")
    p.add_argument("--road", choices=tuple(ROADS), default="capture")
    p.add_argument("--sample", type=int, default=0, metavar="N", help="the first N names (of those not run yet)")
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--device", choices=("cpu", "cuda", "fake"), default="cpu")
    p.add_argument("--dtype", default="float32", help=f"one or several of {', '.join(DTYPES)}, with commas between")
    p.add_argument("--interpret", action="store_true", help="fake: Triton's interpreter runs the texts beside the kernels; slow")
    p.add_argument("--train-every", type=int, default=0, metavar="N", help="every n-th of the road native is trained, too")
    p.add_argument("--limit", type=float, default=180, help="seconds for one model")
    p.add_argument("--seconds", type=float, default=1e9, help="for the whole: well-known models come first then, the others are left")
    p.add_argument("--again", action="store_true", help="run rows that are there too")
    p.add_argument("--print", action="store_true", help="print rows, write nothing")
    p.add_argument("--out", type=Path, default=HERE / "results")
    args = p.parse_args()
    end = time.monotonic() + args.seconds
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has asked the driver cannot fork others that use it
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    if args.interpret or args.device == "fake":  # other objects than those in the user's cache
        os.environ["TORCHSMITH_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchsmith-fake-")
    threads = max(1, len(os.sched_getaffinity(0)) // args.jobs)
    if args.device != "cpu":
        os.environ["TORCHSMITH_COMPILE_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    torchvision_models()
    import transformers

    import torchsmith  # noqa: F401  (each case finds it imported)

    if args.device == "fake":  # the tests' driver is made once
        sys.path += [str(HERE.parent / "tests" / "gpu"), str(HERE.parent / "tests" / "cpu")]
        import pretend

        pretend.driver()
    transformers.logging.set_verbosity_error()
    chosen = [n for n in names(args.all) if re.search(args.only, n)]
    if args.seconds < 1e9:
        chosen = used_first(chosen)
    if args.list:
        print("\n".join(chosen))
        return 0
    file = args.out / "architectures.json"
    rows = {(r["name"], r["road"]): r for r in (json.loads(file.read_text())["rows"] if file.exists() else [])}
    made = cases_of(chosen, args.road, args.device, args.dtype.split(","), args.train_every)
    cases = [c for c in made if args.print or args.again or (c.name, c.way) not in rows]

    def done(row: Row) -> None:
        brief = f"{row['status']:9} {row['seconds']:6.1f} s {len(row.get('breaks', ())):2} {row['name']}  {row['road']}"
        print(json.dumps(row, indent=1) if args.print else f"{brief}  {row.get('why', '')}"[:330], flush=True)
        if not args.print:
            rows[row["name"], row["road"]] = row
            text = json.dumps({"about": about(), "rows": list(rows.values())}, indent=0)
            file.with_suffix(".part").write_text(text)
            file.with_suffix(".part").rename(file)

    run_all(cases[: args.sample or None], args.jobs, args.limit, end, done)
    if not args.print:
        (args.out / "architectures.md").write_text(table(list(rows.values()), len(names(True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
