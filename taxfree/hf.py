"""Transformers' tensor parallelism on taxfree.

import taxfree.hf

taxfree.hf.enable()
model = AutoModelForCausalLM.from_pretrained(
    name, distributed_config=DistributedConfig(tp_plan="auto")
)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel

from taxfree._runtime.runtime import Runtime
from taxfree.models import report, rows
from taxfree.models.parallel import runtime_on


def enable() -> None:
    """Let models that are loaded from now on run their row-parallel layers on taxfree.

    These are all layers whose style is ``rowwise``: the output projections of attention and of the
    MLP. The first such layer of a model opens a runtime on the model's group, on all ranks; close
    it with :meth:`taxfree.Runtime.close`, or leave that to the end of the process. What the
    operations do not serve runs Transformers' own forward; :func:`taxfree.report` says what and
    why.
    """
    ALL_PARALLEL_STYLES.register(
        "rowwise", _Rowwise(input_layouts=Shard(-1), output_layouts=Replicate())
    )


class _Rowwise(RowwiseParallel):  # type: ignore[misc]
    """Shards as Transformers' own style does; the matmul and its all-reduce are one operation."""

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        reason = rows.linear_unsupported_reason(module)  # before the style gives it one
        module = super().install_forward(module, mesh)
        runtime = runtime_on(mesh if mesh.ndim == 1 else mesh["tp"])
        module.forward = _forward(module, module.forward, runtime, reason)
        return module


def _forward(
    module: Any,
    library: Callable[..., torch.Tensor],
    runtime: Runtime,
    unsupported_reason: str | None,
) -> Callable[..., torch.Tensor]:
    """The forward of a row-parallel layer, whose input is this rank's columns.

    Args:
        unsupported_reason: the reason why the library always runs, or None.
    """
    name = f"rowwise {type(module).__name__}({module.in_features}, {module.out_features})"

    def forward(x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        reason = unsupported_reason or _unsupported_reason(module, x, runtime)
        if reason is not None:
            report.count(name, f"library: {reason}")
            return library(x, *others, **options)
        report.count(name, "matmul_all_reduce")
        bias = module.bias
        return rows.matmul_all_reduce(
            runtime, x, module.weight.to_local().t(), None if bias is None else bias.to_local()
        )

    return forward


def _unsupported_reason(module: Any, x: torch.Tensor, runtime: Runtime) -> str | None:
    """The reason why Transformers' own forward must run, or None."""
    if runtime.is_closed:
        return "the runtime is closed"
    if getattr(module, "_hf_quantized_needs_local_tp", False):
        return "the layer is quantised"
    if isinstance(x, DTensor) or not isinstance(module.weight, DTensor):
        return "the input is a DTensor, or the weight is not"
    if module.in_features % runtime.world_size:
        return f"{module.in_features} columns are not divisible by {runtime.world_size} ranks"
    return rows.layer_unsupported_reason(x, module.weight._local_tensor, module.bias)
