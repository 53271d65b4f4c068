"""What Transformers builds from configs with the published dimensions of models.

`built.yaml` says what a model has: per block the outputs of the layers on the same rows (b: with a
bias; 4096/512/512: of one layer), the inputs of the layer that sums what is computed from them,
what follows the sum (r: a residual; n: an RMSNorm), and how the block is quantised; heads/kv heads
x columns of its attention; then what else there is.
"""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from taxfree.errors import UsageError
from taxfree_tune.built import built_model
from taxfree_tune.shapes.models import Column, Model, known_entry, known_models, load_model

BUILT: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("built.yaml").read_text())
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
FEW_LAYERS = {"num_hidden_layers": 2, "n_layer": 2, "n_layers": 2}


def outputs(column: Column) -> str:
    return "/".join(str(size) for size, _ in column.parts) + "b" * column.bias


def described(model: Model) -> list[str]:
    """What a model has, as the file says it."""
    blocks = [
        f"{' '.join(map(outputs, each.columns))} > {each.inputs}{'b' * each.bias} "
        f"{'r' * each.adds_residual}{'n' * bool(each.norm)} {each.quantised}".rstrip()
        for each in model.blocks
    ]
    attentions = [
        f"{each.heads}/{each.kv_heads}x{each.head_dim}" + f" last {each.window}" * bool(each.window)
        for each in model.attentions
    ]
    kinds = ("experts", "latent_dim", "has_soft_cap", "has_sinks", "has_alibi", "has_chunks")
    facts = [f"{name} {getattr(model, name)}" for name in kinds if getattr(model, name)]
    return [*blocks, *attentions, *facts, *model.others, *model.notes]


@pytest.mark.parametrize("name", BUILT)
def test_is_what_the_model_has(name: str) -> None:
    entry = BUILT[name]
    sizes = dict(zip(SIZES, entry["sizes"], strict=True)) if "sizes" in entry else {}
    config = FEW_LAYERS | sizes | entry.get("others", {})
    config = {"text_config": config} if entry.get("is_nested") else config
    parts = {f"{part}_config": {"num_hidden_layers": 1} for part in entry.get("parts", ())}
    model = built_model(json.dumps(config | parts | {"model_type": entry["type"]}))
    assert described(model) == entry["has"]


@pytest.mark.parametrize("name", known_models())
def test_models_that_are_known_by_name_are_what_is_built(name: str) -> None:
    known = load_model(name)
    layers = {"num_hidden_layers": 6 if "gemma" in name else 2, "first_k_dense_replace": 1}
    window = {} if "gemma" in name or "gpt-oss" in name else {"sliding_window": None}
    built = built_model(json.dumps({**known_entry(name)["config"], **window, **layers}))
    assert replace(built, layers=known.layers) == known


def test_a_model_without_attention_is_no_model_to_list() -> None:
    config = FEW_LAYERS | {"model_type": "mamba", "hidden_size": 768}
    with pytest.raises(UsageError, match="mamba has no attention heads"):
        built_model(json.dumps(config))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648"),  # a list of their kinds
        ({"hidden_size": 2**31}, "a norm of 2147483648 features"),
        ({"head_dim": 2**31}, "a norm of 2147483648 features"),
    ],
)
def test_sizes_of_no_model_take_no_memory(size: dict[str, int], said: str) -> None:
    config = known_entry("qwen3-8b")["config"] | FEW_LAYERS | size
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, limits[1]))
    try:
        with pytest.raises(UsageError, match=said):
            built_model(json.dumps(config))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_defaults_of_the_process_change_nothing() -> None:
    config = json.dumps({**known_entry("llama-3.2-1b")["config"], **FEW_LAYERS})
    built_model.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = built_model(config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert replace(found, layers=16) == load_model("llama-3.2-1b")
