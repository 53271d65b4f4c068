"""The vendor's matmul, of factors in 16 bits or in fp8, and the collective library.

When kernels are only compiled, these functions do nothing.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fp8 import fp8_dtype, product
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import is_compiling
from taxfree_kernels.variant import BLOCK, MatmulProblem

_ROWS = (16, 7, 1)  # of matmuls that are tried
_ALIGNED = 4  # float32 scales that are 16 bytes
# torch 2.13 renamed these; earlier versions have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def multiply_into(
    out: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *scales: torch.Tensor,
    is_fast: bool = False,
) -> torch.Tensor:
    """out [m, n] = a [m, k] @ weight [k, n] (+ bias [n]); returns it.

    Args:
        scales: of a and of the weight, if these are fp8.
        is_fast: see `fast_accumulation` of :class:`MatmulProblem`.
    """
    if is_compiling():
        return out
    if not scales:
        if bias is None:
            return torch.mm(a, weight, out=out)
        return torch.addmm(bias, a, weight, out=out)
    return _scaled_matmul_into(out, a, weight, bias, is_fast, *scales)


# With `beside` a collective runs beside what follows, and returns what to wait for.


def all_gather(
    gathered: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, beside: bool = False
) -> Any:
    """All-gather: all ranks' tensors, in rank order, into a contiguous one."""
    if not is_compiling():
        return _all_gather(gathered, shard, group=group, async_op=beside)


def all_gathers(
    gathered: list[torch.Tensor], shards: list[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Several all-gathers of bytes, as one."""
    if not is_compiling():
        with dist._coalescing_manager(group):  # as one launch, on the caller's stream
            for whole, shard in zip(gathered, shards, strict=True):
                _all_gather(whole.view(torch.uint8), shard.view(torch.uint8), group=group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, beside: bool = False) -> Any:
    """All-reduce in place."""
    if not is_compiling():
        return dist.all_reduce(tensor, group=group, async_op=beside)


def reduce_scatter(
    shard: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup, beside: bool = False
) -> Any:
    """Reduce-scatter: this rank's shard of the sum of all ranks' contiguous tensors."""
    if not is_compiling():
        return _reduce_scatter(shard, parts, group=group, async_op=beside)


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_rows: list[int],
    sent_rows: list[int],
    group: dist.ProcessGroup,
) -> None:
    """Send each rank its rows of a contiguous tensor; the lists count rows by rank."""
    if not is_compiling():
        dist.all_to_all_single(received, sent, received_rows, sent_rows, group=group)


def fused_op_unsupported_reason(problem: MatmulProblem, hardware: Hardware) -> str | None:
    """The reason why PyTorch's own fused ops do not serve a problem, or None."""
    if hardware.backend != "cuda":
        return "torch's fused op needs CUDA"
    if problem.world_size == 1:
        return "one rank has no peers"
    if problem.scales == "block":
        return "torch's fused op has scales of tensors and tokens"
    if problem.is_fp8 and (problem.k % 16 or problem.n % 16):
        return "its matmul takes multiples of 16"
    return None


def symm_mem_op(name: str, group: dist.ProcessGroup, workspace_bytes: int = 0) -> Any:
    """PyTorch's own fused op ``torch.ops.symm_mem.<name>``, with its group registered; collective.

    Args:
        workspace_bytes: what its calls need of the group's workspace. A call that finds less makes
            a larger one, in the middle of whatever the caller does, and fails under capture.

    Raises:
        PlanError: this torch has no such op.
    """
    import torch.distributed._symmetric_memory as symm_mem  # registers the ops

    if not hasattr(torch.ops.symm_mem, name):
        raise PlanError(f"this torch has no {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions enable every group
        symm_mem.enable_symm_mem_for_group(group.group_name)
    if workspace_bytes and torch.cuda.is_available():  # on CPUs the ops fall back, and need none
        symm_mem.get_symm_mem_workspace(group.group_name, workspace_bytes)
    return getattr(torch.ops.symm_mem, name)


def _scaled_matmul_into(
    out: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_fast: bool,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> torch.Tensor:
    (k, n), scales = weight.shape, _scales_of(a_scale, weight_scale, weight)
    kind = (a.dtype, out.dtype, bias is not None, is_fast)
    if not multiplies_fp8(scales, k, n % BLOCK, *kind, a.device):
        sums = product(a, a_scale, weight, weight_scale)
        return out.copy_(sums if bias is None else sums + bias)
    return scaled_mm(out, a, weight, bias, a_scale, weight_scale, scales, is_fast)


def _scales_of(a_scale: torch.Tensor, weight_scale: torch.Tensor, weight: torch.Tensor) -> str:
    if a_scale.dim() == 1:
        return "tensor"
    is_of_columns = weight_scale.shape == (1, weight.shape[1])
    return "channel" if is_of_columns and a_scale.shape[1] == 1 else "block"


def scaled_mm(
    out: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    scales: str,
    is_fast: bool,
) -> torch.Tensor:
    """The matmul of fp8 factors, where :func:`multiplies_fp8`; returns `out`."""
    if scales == "block":  # cuBLAS reads the scales of a column by column, each from 16 bytes on
        if beyond := len(a) % _ALIGNED:
            rows = len(a) + _ALIGNED - beyond
            whole = out.new_empty(rows, out.shape[1])
            padded = _padded(a, rows), weight, bias, _padded(a_scale, rows), weight_scale
            scaled_mm(whole, *padded, scales, is_fast)
            return out.copy_(whole[: len(a)])
        if len(weight_scale) % _ALIGNED:
            # and those of a weight's blocks alike; it also takes such of each column, side by side
            weight_scale = weight_scale.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
            weight_scale = weight_scale.contiguous()
        a_scale = a_scale.t().contiguous().t()
    # and by 16 bytes, which what compiled code computes begins at
    if not torch.compiler.is_compiling() and a_scale.data_ptr() % 16:
        a_scale = a_scale.clone()
    return torch._scaled_mm(
        a, weight, a_scale, weight_scale, bias=bias, out_dtype=out.dtype, use_fast_accum=is_fast,
        out=out,
    )  # fmt: skip


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor, and whatever rows behind its own: a row of a product depends on no other."""
    whole = tensor.new_empty(rows, *tensor.shape[1:])
    whole[: len(tensor)] = tensor
    return whole


@cache
def multiplies_fp8(
    scales: str,
    k: int,
    columns: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    has_bias: bool,
    is_fast: bool,
    device: torch.device,
) -> bool:
    """Whether this torch has such an fp8 matmul, for any rows; the first time, it is tried.

    Args:
        columns: of the weight, modulo those of a block.
    """
    if device.type == "meta":
        return False
    n, groups = 2 * BLOCK + columns, -(-k // BLOCK)
    weight = torch.ones(n, k, device=device).to(dtype).t()
    bias = torch.zeros(n, dtype=out_dtype, device=device) if has_bias else None
    for m in _ROWS:
        a, out = torch.ones(m, k, device=device).to(dtype), torch.empty(m, n, device=device)
        of_a, of_weight = {
            "tensor": ((1,), (1,)),
            "channel": ((m, 1), (n, 1)),
            "block": ((m, groups), (-(-n // BLOCK), groups)),
        }[scales]
        factors = _different(of_a, device), _different(of_weight, device).t()
        try:
            found = scaled_mm(out.to(out_dtype), a, weight, bias, *factors, scales, is_fast)
        except (RuntimeError, ValueError):  # NotImplementedError is one, too
            return False
        wanted = product(a, factors[0], weight, factors[1])
        if not bool(((found.float() - wanted).abs() <= wanted / 64).all()):
            return False
    return True


def _different(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Scales of 1/2, 1 and 2, so that one in another's place is seen."""
    powers = torch.arange(math.prod(shape), device=device) % 3 - 1
    return torch.exp2(powers.float()).view(shape)


def try_fp8(problem: MatmulProblem, device: torch.device, has_bias: bool = False) -> None:
    """Find out, before a call may be captured, whether this torch multiplies such operands."""
    if problem.is_fp8:
        kind = fp8_dtype(device), getattr(torch, problem.dtype), has_bias, problem.fast_accumulation
        multiplies_fp8(problem.scales, problem.k, problem.n % BLOCK, *kind, device)
