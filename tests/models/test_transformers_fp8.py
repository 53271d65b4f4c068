"""Row-parallel layers of Transformers in fp8 on two ranks: the sum of dequantised factors.

No model is loaded: Transformers loads fp8 on GPUs alone, and the layers' own kernels need one.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.ranks import Ranks

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")

M, N, K = 5, 256, 512  # K over all ranks


def layer_of(name: str, has_bias: bool) -> Any:
    """A layer of Transformers with whole random weights, its weight [n, k] and its scales."""
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
    from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear
    from transformers.integrations.finegrained_fp8 import FP8Linear

    from taxfree_kernels.fp8 import quantised_weight

    scales = {"blocks": "block", "static": "tensor"}.get(name, "channel")
    torch.manual_seed(1)
    weight, scale = quantised_weight(torch.randn(K, N), scales)
    scale = scale.t() if scale.dim() == 2 else scale
    if scales != "channel":
        options = (
            {"block_size": (128, 128)} if name == "blocks" else {"activation_scheme": "static"}
        )
        layer: Any = FP8Linear(K, N, has_bias=has_bias, **options)
        layer.weight_scale_inv.data = scale.reshape(layer.weight_scale_inv.shape).clone()
        if name == "static":
            layer.activation_scale.data.fill_(0.01)
    elif name == "channels":
        layer = CompressedTensorsFP8Linear(K, N, has_bias=has_bias)
        layer.weight_scale.data = scale.t().clone()
    else:
        layer = FbgemmFp8Linear(K, N, has_bias)
        layer.weight_scale.data = scale.clone()
        layer.input_scale_ub.fill_(2.0)
    layer.weight.data = weight.t().contiguous()
    if has_bias:
        layer.bias.data = torch.randn(N).to(torch.float32 if name == "bounded" else torch.bfloat16)
    return layer.requires_grad_(False)


def run(fabric: Any, name: str, has_bias: bool, is_recorded: bool, dtype: str) -> Any:
    """The error of a layer's sum, what it ran, and whether compiled code has the same."""
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    import taxfree.hf
    from taxfree.models import report
    from taxfree_kernels.fp8 import dequantised, quantised
    from taxfree_kernels.vendor import multiplies_fp8
    from tests.taxfree.runtime_tasks import problem_of, record_of, runtime_of

    scales = {"blocks": "block", "static": "tensor"}.get(name, "channel")
    fields = {"n": N, "k": K // 2, "dtype": "bfloat16", "bias": has_bias and name != "bounded"}
    problem = problem_of("matmul_all_reduce", m=M, x_dtype="fp8", scales=scales, **fields)
    runtime = runtime_of(fabric, *([record_of(fabric, problem, "push")] if is_recorded else []))
    taxfree.hf.enable()
    report.clear()
    layer, whole = layer_of(name, has_bias), layer_of(name, has_bias)
    mesh = DeviceMesh.from_group(fabric.group, "cpu")
    style = ALL_PARALLEL_STYLES["rowwise"]
    for parameter in list(layer._parameters):
        if layer._parameters[parameter] is not None and layer._parameters[parameter].dim():
            style.shard_param(layer, parameter, mesh)
    layer._hf_quantized_needs_local_tp = True
    layer.forward = lambda x: x.new_zeros(*x.shape[:-1], N)  # its own kernels need a GPU
    can = mock.create_autospec(multiplies_fp8.__wrapped__, return_value=True)  # for the compiler
    with mock.patch("taxfree.models.scaled.multiplies_fp8", can):
        style.install_forward(layer, mesh)
    torch.manual_seed(2)
    x = 2 * torch.randn(1, M, K).to(getattr(torch, dtype))
    parts, own = x[0].chunk(2, 1), fabric.rank
    total = whole.bias.double() if has_bias else 0
    for rank, part in enumerate(parts):
        static = whole.activation_scale.view(1) if name == "static" else None
        limited = part.clamp(-2, 2) if name == "bounded" else part
        if name == "blocks":
            scale = whole.weight_scale_inv.chunk(2, 1)[rank].t()
        else:
            scale = whole.weight_scale_inv.view(1) if static is not None else whole.weight_scale
            scale = scale.view(1, -1) if static is None else scale
        weight = dequantised(whole.weight.chunk(2, 1)[rank].t(), scale)
        total = total + dequantised(*quantised(limited, scales, static)) @ weight
    with torch.no_grad():
        y = layer(parts[own].unsqueeze(0))
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        is_same = torch.equal(compiled(parts[own].unsqueeze(0)), y)
    error = float((y[0].double() - total).norm() / total.norm())
    runtime.check()
    return error, [set(ran) for ran in taxfree.report().layers.values()], is_same


@pytest.mark.parametrize(
    ("name", "has_bias"),
    [("blocks", False), ("blocks", True), ("static", False), ("channels", True), ("bounded", True)],
)
def test_layers_in_fp8_run_the_operation(ranks: Ranks, name: str, has_bias: bool) -> None:
    arguments = {"name": name, "has_bias": has_bias, "is_recorded": True, "dtype": "bfloat16"}
    for error, ran, is_same in ranks.run(2, f"{__name__}:run", **arguments):
        assert ran == [{"matmul_all_reduce"}]
        assert error < 0.005
        assert is_same


@pytest.mark.parametrize(
    ("is_recorded", "dtype", "reason"),
    [(False, "bfloat16", "no record"), (True, "float32", "the input is float32, of 3 dimensions")],
)
def test_what_is_not_served_runs_the_layers_own_forward(
    ranks: Ranks, is_recorded: bool, dtype: str, reason: str
) -> None:
    arguments = {"name": "blocks", "has_bias": False, "is_recorded": is_recorded, "dtype": dtype}
    for error, ran, _ in ranks.run(2, f"{__name__}:run", **arguments):
        assert error == 1.0
        assert f"library: {reason}" in set.union(*ran)
