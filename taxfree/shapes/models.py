"""Shapes of a model's matmuls and attention, from its Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taxfree.errors import UsageError
from taxfree.shapes.fields import DTYPE_ALIASES
from taxfree.shapes.text import LARGEST, quoted, read_text

_DTYPES = ("dtype", "torch_dtype")  # newer configs have the first
_CONFIG_HINT = "give the config.json of a Hugging Face decoder model"


@dataclass(frozen=True)
class Model:
    """The dimensions of a model that its matmuls are made of."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


def read_config(path: Path) -> Mapping[str, Any]:
    """The part of a config that describes the decoder.

    Args:
        path: of the config, or of the folder it is in.

    Raises:
        UsageError: it cannot be read.
    """
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


def model_of(path: Path, config: Mapping[str, Any]) -> Model:
    """The dimensions that a config gives.

    Raises:
        UsageError: one is missing, or is no dimension; the message names `path`.
    """

    def dimension(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            found = "missing" if value is None else quoted(str(value))
            raise UsageError(f"model config {quoted(str(path))}: {name} is {found}", _CONFIG_HINT)
        return value

    heads = dimension("num_attention_heads")
    hidden = dimension("hidden_size")
    kv_heads = dimension("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UsageError(
            f"model config {quoted(str(path))}: {heads} heads do not share {kv_heads} kv heads",
            _CONFIG_HINT,
        )
    return Model(
        hidden=hidden,
        intermediate=dimension("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dimension("head_dim", max(1, hidden // heads)),
    )


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The type in which a model computes; None where the kernels have none for it."""
    dtypes = [config[name] for name in _DTYPES if config.get(name) is not None]
    return str(dtypes[0]) if dtypes and dtypes[0] in DTYPE_ALIASES.values() else None


def split_layers(split: str, model: Model, tp: int) -> list[str]:
    """One rank's shapes of the layers that a model splits over `tp` ranks in one way.

    Args:
        split: "column": the fused QKV projection and the fused gate and up projection, by columns;
            with more ranks than kv heads, each kv head is held by several ranks. "row": the
            attention's output projection and the down projection, by rows. "sequence": attention
            with all heads on every rank. "heads": attention with its own heads on each.

    Raises:
        UsageError: the model does not split over so many ranks.
    """
    if split == "sequence":
        return [f"q_heads={model.heads} kv_heads={model.kv_heads} head_dim={model.head_dim}"]
    _require_split(model, tp)
    heads, intermediate = model.heads // tp, model.intermediate // tp
    kv_heads = max(1, model.kv_heads // tp)
    if split == "heads":
        return [f"q_heads={heads} kv_heads={kv_heads} head_dim={model.head_dim}"]
    if split == "row":
        return [f"n={model.hidden} k={rows}" for rows in (heads * model.head_dim, intermediate)]
    qkv = (heads + 2 * kv_heads) * model.head_dim
    return [f"n={columns} k={model.hidden}" for columns in (qkv, 2 * intermediate)]


def _require_split(model: Model, tp: int) -> None:
    for name, count in (
        ("num_attention_heads", model.heads),
        ("intermediate_size", model.intermediate),
    ):
        if count % tp:
            raise UsageError(
                f"{name} {count} of the model does not split over {tp} ranks", "try another --tp"
            )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise UsageError(
            f"num_key_value_heads {model.kv_heads} of the model neither split over {tp} ranks nor "
            "divide them",
            "try another --tp",
        )
