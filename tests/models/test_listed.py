"""What a model runs on each path is what `taxfree shapes --model` lists for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from taxfree_tune.shapes import ShapeRequest, expand, operations
from tests.models import llama
from tests.models.llama import HEADS, HIDDEN, LAYERS, VOCABULARY, WIDTH
from tests.ranks import Ranks

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY, "attention_bias": True, "mlp_bias": True, "dtype": "bfloat16",
}  # fmt: skip


def without_rows(problems: Any) -> set[str]:
    return {re.sub(r"\(m=[0-9.]+, ", "(", str(each)) for each in problems}


@contextmanager
def found_by(runtime: Any) -> Iterator[set[str]]:
    """The problems that a runtime is called with, and those that compiled code asks for."""
    runtime._collect_met()
    found: set[str] = set()
    yield found
    found |= without_rows(runtime._take_met()) | without_rows(runtime.stats())


def plan_of(what: str) -> dict[str, Any]:
    """A plan of "tp", "sequence" (attention is given gathered rows), or "sequence by layer"."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    plan = llama.plan(what != "tp")
    if what == "sequence by layer":
        del plan["blocks.0.attention"]
        by_layer = ColwiseParallel(input_layouts=Shard(1))
        plan |= {f"blocks.0.attention.{name}": by_layer for name in "qkv"}
    return plan


def run_parallel(fabric: Any, plan: str, is_compiled: bool, training: bool) -> Any:
    """The problems of a model that PyTorch parallelised."""
    from torch._inductor import config
    from torch.distributed.tensor.parallel import parallelize_module

    import taxfree
    from tests.models.meshes import new_mesh
    from tests.models.test_compiled import ours_run

    torch.manual_seed(0)
    mesh, model = new_mesh(), llama.Llama(bias=True).bfloat16()
    parallelize_module(model, mesh, plan_of(plan))
    tokens = torch.arange(16).view(1, 16)
    with (
        taxfree.enable(mesh, model) as runtime,
        found_by(runtime) as found,
        torch.set_grad_enabled(training),
        config.patch(fx_graph_cache=False),
    ):
        # the table chooses the library, then ours
        for chosen in (nullcontext(), ours_run())[: 1 + is_compiled]:
            torch.compiler.reset()
            function = torch.compile(model, fullgraph=True) if is_compiled else model
            with chosen:
                y = function(tokens)
                if training:
                    y.float().sum().backward()
        runtime.check()
    return found


def run_transformers(fabric: Any, folder: str) -> Any:
    """The problems of a model of Transformers, eager and compiled."""
    import transformers
    from torch._inductor import config
    from transformers.distributed import DistributedConfig

    import taxfree.hf
    from tests.models.test_compiled import ours_run
    from tests.taxfree.runtime_tasks import runtime_of

    runtime = runtime_of(fabric)
    if fabric.rank == 0:
        given = transformers.AutoConfig.for_model(**CONFIG)
        transformers.AutoModelForCausalLM.from_config(given).bfloat16().save_pretrained(folder)
    torch.distributed.barrier()
    taxfree.hf.enable()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        distributed_config=DistributedConfig(tp_size=fabric.world_size, tp_plan="auto"),
    ).eval()
    ids = torch.arange(8).view(1, 8)
    with found_by(runtime) as found, torch.no_grad(), config.patch(fx_graph_cache=False):
        model(ids)
        for chosen in (nullcontext(), ours_run()):
            torch.compiler.reset()
            with chosen:
                compiled: Any = torch.compile(model, fullgraph=True)
                compiled(ids)
    return found


def run_vllm(fabric: Any, folder: str) -> Any:
    """The problems of vLLM's row-parallel layers of these sizes, alone and before a norm."""
    from tests.integrations.test_vllm import opened
    from tests.integrations.vllm_stand_in import RowParallelLinear

    with mock.patch.dict("os.environ", TAXFREE_LOG=f"{folder}/{fabric.rank}.yaml"):
        module, _ = opened(f"{folder}/tuning.sqlite", mode=3)
        layers = [RowParallelLinear(k, WIDTH, bias=True, params_dtype=torch.bfloat16)
                  for k in (WIDTH, HIDDEN)]  # fmt: skip
        group = module._group()
        with found_by(group.runtime) as found:
            for layer in layers:
                x = torch.zeros(3, layer.weight.shape[1], dtype=torch.bfloat16)
                residual, norm_weight = x.new_zeros(3, WIDTH), x.new_zeros(WIDTH)
                layer(x)
                own = x, layer.weight, layer.bias, residual, norm_weight, 1e-6
                module._row_parallel_rms_norm(*own, group.coordinator.unique_name)
    return found


@pytest.fixture
def listed(tmp_path: Path) -> Any:
    """A function of a path: the problems that are listed for it, on two ranks."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))

    def of(name: Any, is_training: bool = False) -> set[str]:
        request = ShapeRequest(model=path, tp=2, paths=(name,), is_training=is_training)
        return without_rows(p for op in operations(request, "") for p in expand(op, request))

    return of


@pytest.mark.dealt("plan", "compiled", "training")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("plan", ["tp", "sequence", "sequence by layer"])
def test_under_pytorch(
    ranks: Ranks, listed: Any, plan: str, compiled: bool, training: bool
) -> None:
    for found in ranks.run(
        2,
        f"{__name__}:run_parallel",
        plan=plan,
        is_compiled=compiled,
        training=training,
    ):
        assert found
        assert found - listed(plan.partition(" ")[0], training) == set()


def test_under_transformers(ranks: Ranks, listed: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install '.[models]'")
    for found in ranks.run(2, f"{__name__}:run_transformers", folder=str(tmp_path)):
        assert found == listed("tp")


def test_under_vllm(ranks: Ranks, listed: Any, tmp_path: Path) -> None:
    for found in ranks.run(2, f"{__name__}:run_vllm", folder=str(tmp_path)):
        assert {
            each for each in listed("tp") if "residual=True, rms_norm=False" not in each
        } == found
