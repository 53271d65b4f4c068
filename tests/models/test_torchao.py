"""Row-parallel layers under PyTorch's tensor parallelism whose weights are torchao's Float8Tensor.

torchao is not installed: the stand-in has the attributes that `Float8Tensor` has in pytorch/ao at
0073d60f, in `torchao/quantization/quantize_/workflows/float8/float8_tensor.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map_only

from taxfree_kernels.fp8 import dequantised, quantised, quantised_weight
from tests.ranks import Ranks

M, N, K = 5, 144, 512  # K over all ranks
GRANULARITIES = {"tensor": "PerTensor", "channel": "PerRow", "block": "PerBlock"}


class Float8Tensor(torch.Tensor):
    """[n, k] of elements and their scales; any op of torch sees it dequantised."""

    @staticmethod
    def __new__(cls: Any, qdata: torch.Tensor, *_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.bfloat16)

    def __init__(self, qdata: Any, scale: Any, block_size: Any, act_quant_kwargs: Any) -> None:
        self.qdata, self.scale, self.block_size = qdata, scale, block_size
        self.act_quant_kwargs = act_quant_kwargs

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(each: Any) -> Any:
            scale = each.scale.view(1) if each.scale.numel() == 1 else each.scale
            return dequantised(each.qdata, scale).bfloat16()

        return func(*tree_map_only(cls, plain, args), **(kwargs or {}))


Float8Tensor.__module__ = "torchao.quantization"


def run(fabric: Any, folder: str, scales: str, change: str = "") -> Any:
    """The error of a layer's sum against that of dequantised factors, and what it ran."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    import taxfree
    from taxfree.models import report
    from taxfree_tuning_db import Database
    from tests.models.meshes import new_mesh
    from tests.taxfree.runtime_tasks import problem_of, record_of

    torch.manual_seed(1)
    weights = [quantised_weight(torch.randn(K // 2, N), scales) for _ in range(2)]
    parts = torch.randn(M, K).bfloat16().chunk(2, 1)
    layer, mesh = torch.nn.Linear(K, N, bias=scales == "channel").bfloat16(), new_mesh()
    layer.requires_grad_(False)
    scattered = Shard(0) if change == "scattered" else Replicate()
    parallelize_module(layer, mesh, RowwiseParallel(output_layouts=scattered))
    values, scale = weights[fabric.rank]
    sizes = {"tensor": [N, K // 2], "channel": [1, K // 2], "block": [128, 128]}[scales]
    granularity = type(GRANULARITIES["channel" if change == "rows" else scales], (), {})()
    how = SimpleNamespace(
        granularity=granularity, hp_value_lb=None, hp_value_ub=2.0 if change == "bounded" else None
    )
    scale = scale.t() if scale.dim() == 2 else scale.view(1, 1)
    layer.weight._local_tensor = Float8Tensor(
        values.t(), scale, sizes, None if change == "weight" else how
    )
    fields = {"n": N, "k": K // 2, "dtype": "bfloat16", "bias": scales == "channel"}
    problem = problem_of("matmul_all_reduce", m=M, x_dtype="fp8", scales=scales, **fields)
    path = Path(folder) / "tuning.sqlite"
    if fabric.rank == 0 and change != "no record":
        with Database(path) as database:
            database.put(record_of(fabric, problem, "push"))
    torch.distributed.barrier()
    report.clear()
    database_of_test = mock.patch.dict(os.environ, TAXFREE_DB=str(path))
    with database_of_test, taxfree.enable(mesh, layer) as runtime, torch.no_grad():
        y = layer(parts[fabric.rank])
        runtime.check()
    total = layer.bias.to_local().double() if layer.bias is not None else 0
    for part, weight in zip(parts, weights, strict=True):
        total = total + dequantised(*quantised(part, scales)) @ dequantised(*weight)
    error = None if change == "scattered" else float((y.double() - total).norm() / total.norm())
    return error, taxfree.report().layers


@pytest.mark.parametrize("scales", GRANULARITIES)
def test_weights_in_fp8_run_the_operation(ranks: Ranks, scales: str, tmp_path: Path) -> None:
    for error, layers in ranks.run(2, f"{__name__}:run", folder=str(tmp_path), scales=scales):
        assert layers == {"Linear": {"matmul_all_reduce": 1}}
        assert error < 0.005


@pytest.mark.parametrize(
    ("change", "reason"),
    [("weight", "the weight alone is in fp8"), ("bounded", "the magnitudes of inputs are bounded"),
     ("rows", "scales of the weight are of each block, those of inputs are PerRow"),
     ("scattered", "the weight is in fp8, and the sum is scattered"), ("no record", "no record")],
)  # fmt: skip
def test_what_is_not_served_runs_torchaos_forward(
    ranks: Ranks, change: str, reason: str, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path), "scales": "block", "change": change}
    for error, layers in ranks.run(2, f"{__name__}:run", **arguments):
        assert layers == {"Linear": {f"library: {reason}": 1}}
        assert error is None or error < 0.05
