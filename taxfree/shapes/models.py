"""Shapes of a model's matmuls and attention, from its Hugging Face config.

The config is a file, or one of `known_models.json`, which holds the fields that are read here of
the `config.json` of each repository that it names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from taxfree.errors import UsageError
from taxfree.shapes.fields import DTYPE_ALIASES
from taxfree.shapes.text import LARGEST, quoted, read_text

_DTYPES = ("dtype", "torch_dtype")  # newer configs have the first
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ALTERNATING = ("gemma2", "gemma3", "gpt_oss")  # layers with and without a window
_CONFIG_HINT = "give the config.json of a Hugging Face decoder model"


@dataclass(frozen=True)
class Model:
    """The dimensions of a decoder, and what its matmuls and attention depend on.

    Args:
        family: its type in Transformers, such as "llama".
        hidden: columns of the residual stream.
        heads, kv_heads, head_dim: of attention; of latent attention, `head_dim` is the values'.
        mlps: widths of the dense MLPs, including shared experts.
        windows: those of the attention layers; 0 is a layer that sees all keys.
        qkv_bias, out_bias: whether the projections of attention have a bias.
        experts: number of routed experts; 0 for a dense model.
        latent_dim: of the keys that a decode of latent attention reads; 0 for other attention.
        has_soft_cap, has_sinks, has_chunks: whether attention caps its logits, has a learned sink,
            or has layers that see a chunk.
        layers, vocabulary: how many there are, and tokens; 0 where the config does not say.
    """

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlps: tuple[int, ...]
    windows: tuple[int, ...] = (0,)
    qkv_bias: bool = False
    out_bias: bool = False
    experts: int = 0
    latent_dim: int = 0
    has_soft_cap: bool = False
    has_sinks: bool = False
    has_chunks: bool = False
    layers: int = 0
    vocabulary: int = 0


# -- configs --


@cache
def known_models() -> dict[str, tuple[str, ...]]:
    """Names of the models that need no config file -> their Hugging Face repositories."""
    return {name: tuple(entry["repositories"]) for name, entry in _known().items()}


@cache
def _known() -> dict[str, Any]:
    text = files("taxfree.shapes").joinpath("known_models.json").read_text(encoding="utf-8")
    known: dict[str, Any] = json.loads(text)
    return known


def read_config(model: str | Path) -> Mapping[str, Any]:
    """Return the part of a config that describes the decoder.

    Args:
        model: path of a config, or of the folder it is in; else the name of a known model or of
            one of its repositories.

    Raises:
        UsageError: there is no such file or model, or the file cannot be read.
    """
    name = str(model)
    if not os.path.exists(name) and not name.endswith(".json"):
        return _known_config(name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(read_text(path, "model config"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model config {quoted(str(path))} is not JSON", _CONFIG_HINT) from error
    if not isinstance(config, dict):
        raise UsageError(f"model config {quoted(str(path))} is not an object", _CONFIG_HINT)
    # A multimodal model keeps its decoder's dimensions one level down, and perhaps not its type.
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        return config
    return {name: config[name] for name in _DTYPES if name in config} | text_config


def _known_config(name: str) -> Mapping[str, Any]:
    wanted = name.lower()
    for known, repositories in known_models().items():
        if wanted == known or wanted in map(str.lower, repositories):
            config: dict[str, Any] = _known()[known]["config"]
            return config
    close = get_close_matches(wanted, known_models(), n=1)
    raise UsageError(
        f"model {quoted(name)} is neither a file nor a known model",
        f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known_models())}",
    )


def model_of(name: str, config: Mapping[str, Any]) -> Model:
    """Return the model that a config describes.

    Raises:
        UsageError: a dimension is missing, or is none; the message names `name`.
    """

    def dimension(field: str, default: int | None = None, least: int = 1) -> int:
        value = config.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            found = "missing" if value is None else quoted(str(value))
            raise UsageError(f"model config {quoted(name)}: {field} is {found}", _CONFIG_HINT)
        return value

    heads = dimension("num_attention_heads")
    hidden = dimension("hidden_size")
    kv_heads = dimension("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UsageError(
            f"model config {quoted(name)}: {heads} heads do not share {kv_heads} kv heads",
            _CONFIG_HINT,
        )
    family = str(config.get("model_type"))
    experts = max(dimension(field, 0, least=0) for field in _EXPERTS)
    latent = dimension("kv_lora_rank", 0)
    return Model(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dimension("v_head_dim" if latent else "head_dim", max(1, hidden // heads)),
        mlps=_mlps(config, dimension) if experts > 1 else (dimension("intermediate_size"),),
        windows=_windows(config, family, dimension("sliding_window", 0, least=0)),
        qkv_bias=family == "qwen2" or config.get("attention_bias") is True,
        out_bias=config.get("attention_bias") is True,
        experts=experts if experts > 1 else 0,
        latent_dim=latent and latent + dimension("qk_rope_head_dim"),
        has_soft_cap=config.get("attn_logit_softcapping") is not None,
        has_sinks=family == "gpt_oss",
        has_chunks=config.get("attention_chunk_size") is not None,
        layers=dimension("num_hidden_layers", 0, least=0),
        vocabulary=dimension("vocab_size", 0, least=0),
    )


def _mlps(config: Mapping[str, Any], dimension: Any) -> tuple[int, ...]:
    """Widths of the dense MLPs and shared experts of a model with routed experts."""
    widths = []
    is_dense_first = dimension("first_k_dense_replace", 0, least=0) > 0
    is_dense_between = dimension("decoder_sparse_step", 1) > 1 or config.get("mlp_only_layers")
    if is_dense_first or is_dense_between:
        widths.append(dimension("intermediate_size"))
    if shared := dimension("n_shared_experts", 0, least=0):
        widths.append(shared * dimension("moe_intermediate_size"))
    if shared := dimension("shared_expert_intermediate_size", 0, least=0):
        widths.append(shared)
    if "intermediate_size_mlp" in config:  # Llama 4, where each routed layer has a shared expert
        widths.append(dimension("intermediate_size"))
        if dimension("interleave_moe_layer_step", 1) > 1:
            widths.append(dimension("intermediate_size_mlp"))
    return tuple(widths)


def _windows(config: Mapping[str, Any], family: str, window: int) -> tuple[int, ...]:
    if not window or config.get("use_sliding_window") is False:
        return (0,)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        sees_all = [kind != "sliding_attention" for kind in kinds]
    else:
        sees_all = [False, family.removesuffix("_text") in _ALTERNATING]
    return tuple(dict.fromkeys(0 if each else window for each in sorted(sees_all, reverse=True)))


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The type in which a model computes; None where the kernels have none for it."""
    dtypes = [config[name] for name in _DTYPES if config.get(name) is not None]
    return str(dtypes[0]) if dtypes and dtypes[0] in DTYPE_ALIASES.values() else None


# -- layers --


def split_layers(split: str, model: Model, tp: int) -> list[dict[str, int]]:
    """Return one rank's shapes of the layers that a model splits over `tp` ranks in one way.

    Args:
        split: "column": the fused QKV projection and the fused gate and up projections, by columns;
            with more ranks than kv heads, each kv head is held by several ranks. "row": the
            attention's output projection and the down projections, by rows. "sequence": attention
            with all heads on every rank. "heads": attention with its own heads on each.

    Returns:
        Fields of a problem -> value; fields with the operation's usual value are left out.

    Raises:
        UsageError: the model does not split over so many ranks.
    """
    if split == "sequence":
        if model.latent_dim or model.has_sinks:
            return []
        sizes = {"q_heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
        capped = {"soft_cap": 1} if model.has_soft_cap else {}
        return [sizes | capped | ({"window": window} if window else {}) for window in model.windows]
    _require_split(model, tp)
    heads, mlps = model.heads // tp, [width // tp for width in model.mlps]
    kv_heads = max(1, model.kv_heads // tp)
    if split == "heads":
        if model.latent_dim or model.has_sinks or model.has_soft_cap or 0 not in model.windows:
            return []
        return [{"q_heads": heads, "kv_heads": kv_heads, "head_dim": model.head_dim}]
    if split == "row":
        out = {"n": model.hidden, "k": heads * model.head_dim} | _bias(model.out_bias)
        return [out, *({"n": model.hidden, "k": width} for width in mlps)]
    qkv = {"n": (heads + 2 * kv_heads) * model.head_dim, "k": model.hidden} | _bias(model.qkv_bias)
    gate_up = [{"n": 2 * width, "k": model.hidden} for width in mlps]
    return gate_up if model.latent_dim else [qkv, *gate_up]


def left_out_layers(split: str, model: Model) -> list[str]:
    """Return the layers of a model that no operation of a split serves, each with the reason."""
    found = []
    if split in ("row", "column"):
        if model.experts:
            found.append(f"{model.experts} routed experts: they need grouped matmuls")
        if split == "column" and model.latent_dim:
            found.append("projections of latent attention: every rank has their whole input")
        return found
    if model.latent_dim:
        return [f"latent attention: its keys have {model.latent_dim} columns"]
    if model.has_sinks:
        return ["attention with sinks: the kernels have none"]
    if model.has_chunks:
        found.append("layers that attend within chunks: the kernels have no chunks")
    if split == "heads":
        if model.has_soft_cap:
            return ["attention with capped logits: the kernels for prompts have no cap"]
        found += [
            f"layers with a window of {window}: the kernels for prompts have none"
            for window in model.windows
            if window
        ]
    return found


def _bias(has_bias: bool) -> dict[str, int]:
    return {"bias": 1} if has_bias else {}


def _require_split(model: Model, tp: int) -> None:
    widths = (("intermediate size", width) for width in model.mlps)
    for name, count in (("num_attention_heads", model.heads), *widths):
        if count % tp:
            raise UsageError(
                f"{name} {count} of the model does not split over {tp} ranks",
                "try another --tp or --gpus",
            )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise UsageError(
            f"num_key_value_heads {model.kv_heads} of the model neither split over {tp} ranks nor "
            "divide them",
            "try another --tp or --gpus",
        )
