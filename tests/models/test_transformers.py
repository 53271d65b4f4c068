"""Transformers' models on two ranks: the tokens of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.loading import parallel_model
from tests.ranks import Ranks

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2,
}  # fmt: skip
#: model -> what its config has besides
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 2},
    "Phi3": {"pad_token_id": 0},
    "Glm4": {"head_dim": 8, "pad_token_id": 0},
    "Olmo2": {},
    "GptOss": {
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"],
    },
}
#: model -> kinds of row-parallel layers that its plan has; of others two
ROWWISE = {"Mixtral": 1, "GptOss": 0}
#: model -> what its plan has besides the head, which communicates
OTHERS = {"Mixtral": ["moe_tp_experts MixtralExperts"]}
NEW_TOKENS = 6


def tokens_of(model: Any, **options: Any) -> list[int]:
    import torch

    ids = torch.arange(8).view(1, 8) + 5
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    found: list[int] = tokens[0].tolist()
    return found


def make(fabric: Any, model: str, folder: str) -> list[int]:
    """Save a random model, and generate with it in one process."""
    import torch
    import transformers

    config = getattr(transformers, f"{model}Config")(**SIZES, **MODELS[model])
    torch.manual_seed(3)
    made = getattr(transformers, f"{model}ForCausalLM")(config).bfloat16().eval()
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = 0, None
    if fabric.rank == 0:
        made.save_pretrained(folder)
    torch.distributed.barrier()
    return tokens_of(made)


def generate(fabric: Any, model: str, folder: str, dtype: str) -> Any:
    """Tokens of the saved model on all ranks, what its layers ran, and the kinds of choices."""
    import torch

    import taxfree.hf
    from taxfree.models import report
    from tests.models.records import records_of
    from tests.taxfree.runtime_tasks import runtime_of

    runtime = runtime_of(fabric, *records_of(fabric))
    alone = make(fabric, model, folder)
    taxfree.hf.enable()
    report.clear()
    loaded = parallel_model(fabric, folder, getattr(torch, dtype))
    found = [tokens_of(loaded), tokens_of(loaded, cache_implementation="static")]
    ids = torch.arange(8).view(1, 8) + 5
    with torch.no_grad():
        eager = loaded(ids).logits
        torch.compiler.reset()
        compiled = torch.compile(
            loaded, fullgraph="experts" not in str(MODELS[model]), backend="aot_eager"
        )
        is_same = torch.equal(compiled(ids).logits, eager)
    kinds = {kind for kinds in runtime.stats().values() for kind in kinds}
    return alone, found, is_same, taxfree.report().layers, kinds


@pytest.mark.dealt("model")
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_one_process(ranks: Ranks, tmp_path: Path, model: str) -> None:
    task = f"{__name__}:generate"
    for alone, found, is_same, layers, kinds in ranks.run(
        2, task, model=model, folder=str(tmp_path), dtype="bfloat16"
    ):
        assert len(alone) == 8 + NEW_TOKENS
        assert found == [alone] * 2
        assert is_same
        row = [set(ran) for layer, ran in layers.items() if layer.startswith("rowwise")]
        assert row == [{"matmul_all_reduce"}] * ROWWISE.get(model, 2)
        others = {layer: set(ran) for layer, ran in layers.items() if "rowwise" not in layer}
        assert set(others) == {"colwise_gather_output Linear", *OTHERS.get(model, ())}
        assert all(ran == {"library: no operation does this"} for ran in others.values())
        assert kinds <= {"exact", "neighbour"}
        assert ("exact" in kinds) == (row != [])


def test_what_is_not_served_runs_the_library_and_is_counted(ranks: Ranks, tmp_path: Path) -> None:
    task = f"{__name__}:generate"
    for _, found, _, layers, _ in ranks.run(
        2, task, model="Qwen3", folder=str(tmp_path), dtype="float32"
    ):
        assert found[0] == found[1]
        row = [set(ran) for layer, ran in layers.items() if layer.startswith("rowwise")]
        assert row == [{"library: float32"}] * 2
