"""What a model runs on each path is what `taxfree shapes --model` lists for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from taxfree._runtime.dispatch import Dispatcher
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import op_of
from taxfree_tune.shapes import ShapeRequest, expand, operations
from taxfree_tuning_db import Table
from tests.models import llama
from tests.models.llama import HEADS, HIDDEN, LAYERS, VOCABULARY, WIDTH
from tests.models.loading import parallel_model
from tests.ranks import Ranks
from tests.taxfree.runtime_tasks import record_of

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY, "attention_bias": True, "mlp_bias": True, "dtype": "bfloat16",
}  # fmt: skip


def without_rows(problems: Any) -> set[str]:
    """Problems without their numbers of rows, sequences and keys."""
    sizes = r"(?<=[( ])(m|batch|length|kv_len_per_rank)=[0-9.]+, "
    return {re.sub(sizes, "", str(each)) for each in problems}


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

    import taxfree.hf
    from tests.models.test_compiled import ours_run
    from tests.taxfree.runtime_tasks import runtime_of

    runtime = runtime_of(fabric)
    if fabric.rank == 0:
        given = transformers.AutoConfig.for_model(**CONFIG)
        transformers.AutoModelForCausalLM.from_config(given).bfloat16().save_pretrained(folder)
    torch.distributed.barrier()
    taxfree.hf.enable()
    model = parallel_model(fabric, folder, torch.bfloat16)
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
                own = x, layer.weight, None, None, layer.bias, residual, norm_weight, 1e-6
                module._row_parallel_rms_norm(*own, group.coordinator.unique_name)
    return found


def run_attention(fabric: Any) -> Any:
    """The problems of an engine that calls attention of prompts, and of a decode, also paged."""
    from tests.taxfree.runtime_tasks import runtime_of

    head_dim, page_size = 16, 16
    runtime = runtime_of(fabric)
    with found_by(runtime) as found:
        prompt = torch.zeros(1, 5, HEADS // fabric.world_size, head_dim).bfloat16()
        runtime.attention(prompt, prompt, prompt, causal=True)
        token = torch.zeros(3, HEADS, head_dim).bfloat16()
        lengths = torch.ones(fabric.world_size, 3, dtype=torch.int32)
        cache = torch.zeros(3, page_size, HEADS, head_dim).bfloat16()
        for table in (None, torch.arange(3, dtype=torch.int32)[:, None]):
            runtime.flash_decode(token, cache, cache, lengths, table)
    return found


@pytest.fixture
def listed(tmp_path: Path) -> Any:
    """A function of a path: the problems that are listed for it, on two ranks."""

    def of(name: Any, is_training: bool = False, **others: int) -> set[str]:
        return without_rows(problems_of(tmp_path, name, is_training, **others))

    return of


def problems_of(folder: Path, name: Any, is_training: bool = False, **others: int) -> list[Any]:
    """The problems that are listed for a path, on two ranks."""
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG | others))
    request = ShapeRequest(model=config, tp=2, paths=(name,), is_training=is_training)
    return [problem for op in operations(request, "") for problem in expand(op, request)]


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


def test_of_an_engine_that_calls_attention(ranks: Ranks, listed: Any) -> None:
    for found in ranks.run(2, f"{__name__}:run_attention"):
        assert found == listed("attention", head_dim=16)


@pytest.mark.parametrize(("path", "least"), [("tp", 1), ("sequence", 8)])
def test_records_of_what_is_listed_serve_any_number_of_rows(
    path: str, least: int, tmp_path: Path
) -> None:
    listed = problems_of(tmp_path, path, is_training=True)
    fabric: Any = SimpleNamespace(hardware=KNOWN["h100"])
    table = Table(shipped=[record_of(fabric, each) for each in listed])
    dispatcher = Dispatcher(table, fabric.hardware)
    for problem in {replace(each, m=1): None for each in listed}:
        for m in (3, 5, 6, 7, 8, 48, 8193, 12345, 20000, 32768):
            if m >= least:
                asked = replace(problem, m=m)
                assert dispatcher.answer(op_of(asked), asked).is_recorded, asked
