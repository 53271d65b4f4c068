"""Transformers' tensor parallelism on taxfree.

import taxfree.hf

taxfree.hf.enable()
model = AutoModelForCausalLM.from_pretrained(
    name, distributed_config=DistributedConfig(tp_plan="auto")
)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel

from taxfree._runtime.runtime import Runtime
from taxfree.models import report, rows
from taxfree.models.parallel import runtime_on
from taxfree.models.scaled import Fp8Rowwise, is_fp8_layer, is_whole

#: styles that communicate in a forward, for which there is no operation
_OF_TRANSFORMERS = (
    "all_reduce", "colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise",
    "ep_dispatch_experts", "moe_tp_experts",
)  # fmt: skip


def enable() -> None:
    """Let models that are loaded from now on run their row-parallel layers on taxfree.

    These are all linear layers whose style is ``rowwise``, ``rowwise_split_input`` or
    ``rowwise_rep``: the output projections of attention and of the MLP, also in fp8. The first such
    layer of a model opens a runtime on the model's group, on all ranks; close it with
    :meth:`taxfree.Runtime.close`, or leave that to the end of the process. What the operations do
    not serve, and other styles that communicate, run Transformers' own forward;
    :func:`taxfree.report` says what and why.
    """
    for name in ("rowwise", "rowwise_split_input", "rowwise_rep"):
        style = ALL_PARALLEL_STYLES[name]
        ours = _Rowwise(input_layouts=style.input_layouts, output_layouts=style.output_layouts)
        ALL_PARALLEL_STYLES.register(name, ours)
    for name in set(_OF_TRANSFORMERS).intersection(ALL_PARALLEL_STYLES):
        ALL_PARALLEL_STYLES.register(name, _counted(name, ALL_PARALLEL_STYLES[name]))


def _counted(name: str, style: Any) -> Any:
    """A style of Transformers whose modules count their calls."""
    if "install_forward" in vars(style):
        return style

    def install_forward(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        module = style.install_forward(module, mesh)
        library: Callable[..., Any] = module.forward

        def forward(*args: Any, **options: Any) -> Any:
            report.count(f"{name} {type(module).__name__}", "library: no operation does this")
            return library(*args, **options)

        module.forward = forward
        return module

    counted = copy.copy(style)
    counted.install_forward = install_forward
    return counted


class _Rowwise(RowwiseParallel):  # type: ignore[misc]
    """Shards as Transformers' own style does; the matmul and its all-reduce are one operation."""

    def shard_param(self, module: torch.nn.Module, param: str, mesh: DeviceMesh) -> None:
        if not is_whole(module, param):
            super().shard_param(module, param, mesh)
            return
        whole = module._parameters[param]
        assert whole is not None
        module._parameters[param] = torch.nn.Parameter(
            distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None),
            requires_grad=whole.requires_grad,
        )

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        reason = (
            None if is_fp8_layer(module) else rows.linear_unsupported_reason(module)
        )  # before the style gives it one
        module = super().install_forward(module, mesh)
        mesh = mesh if mesh.ndim == 1 else mesh["tp"]
        is_split = self.input_layouts == Shard(-1)
        module.forward = _forward(module, module.forward, mesh, reason, is_split)
        return module


def _forward(
    module: Any,
    library: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
    unsupported_reason: str | None,
    is_split: bool,
) -> Callable[..., torch.Tensor]:
    """The forward of a row-parallel layer.

    Args:
        unsupported_reason: the reason why the library always runs, or None.
        is_split: whether the input is this rank's columns, not all of them.
    """
    runtime = runtime_on(mesh)
    name = f"rowwise {type(module).__name__}({module.in_features}, {module.out_features})"
    fp8 = None
    if is_fp8_layer(module):
        fp8 = Fp8Rowwise(module, runtime)
        unsupported_reason = fp8.unsupported_reason

    def forward(x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        reason = unsupported_reason or _unsupported_reason(module, x, runtime, fp8)
        if reason is not None:
            report.count(name, f"library: {reason}")
            return library(x, *others, **options)
        report.count(name, "matmul_all_reduce")
        if not is_split:  # as DTensor does it, whose backward gathers
            whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            x = whole.redistribute(placements=[Shard(x.dim() - 1)]).to_local()
        if fp8 is not None:
            return fp8(x)
        bias = module.bias
        return rows.matmul_all_reduce(
            runtime, x, module.weight.to_local().t(), None if bias is None else bias.to_local()
        )

    return forward


def _unsupported_reason(
    module: Any, x: torch.Tensor, runtime: Runtime, fp8: Fp8Rowwise | None
) -> str | None:
    """The reason why Transformers' own forward must run, or None."""
    if runtime.is_closed:
        return "the runtime is closed"
    if fp8 is None and getattr(module, "_hf_quantized_needs_local_tp", False):
        return "the layer is quantised"
    if isinstance(x, DTensor) or not isinstance(module.weight, DTensor):
        return "the input is a DTensor, or the weight is not"
    if module.in_features % runtime.world_size:
        return f"{module.in_features} columns are not divisible by {runtime.world_size} ranks"
    if fp8 is not None:
        return fp8.call_unsupported_reason(x)
    return rows.layer_unsupported_reason(x, module.weight._local_tensor, module.bias)
