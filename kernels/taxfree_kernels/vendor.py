"""Libraries of others: what the library paths of all operations compute with."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from taxfree_kernels.errors import PlanError

if TYPE_CHECKING:
    import torch.distributed as dist


def matmul_into(
    out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """out [m, n] = a [m, k] @ weight [k, n] (+ bias [n]); returns it."""
    if bias is None:
        return torch.mm(a, weight, out=out)
    return torch.addmm(bias, a, weight, out=out)


def symm_mem_op(name: str, group: dist.ProcessGroup) -> Any:
    """PyTorch's own fused op ``torch.ops.symm_mem.<name>``, made ready for a group; collective.

    Raises:
        PlanError: this torch has none of that name.
    """
    import torch.distributed._symmetric_memory as symm_mem  # registers the ops

    if not hasattr(torch.ops.symm_mem, name):
        raise PlanError(f"this torch has no {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions enable every group
        symm_mem.enable_symm_mem_for_group(group.group_name)
    return getattr(torch.ops.symm_mem, name)
