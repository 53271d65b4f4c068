"""The gradient of the tables: those of pooled rows travel to the owners, who sum them by row.

It is that of the library, in torch ops, so that it also runs inside compiled code. Owners sort
indices, and add equal ones in float32 in the order of ranks, tables and places: the result is the
same in each run. Indices that are no rows count for nothing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from taxfree_kernels.errors import PlanError
from taxfree_kernels.gradients import Gradients

_NOBODY = -1  # in place of an index whose row another rank holds


def gradient(context: Any, grad: torch.Tensor) -> Gradients:
    """The gradient [tables, rows, dim] of this rank's tables, by that of [batch, tables, dim]."""
    weight, indices, offsets, weights = context.saved_tensors
    *_, shard_dim, mode, group_name = context.arguments
    if context.needs_input_grad[3]:
        raise PlanError("per_sample_weights get no gradient", "detach them")
    if not context.needs_input_grad[0]:
        return (None,)
    capacity, (batch, _, dim), world = indices.shape[1], grad.shape, context.world_size
    parts = [indices, offsets, *([] if weights is None else [weights.view(torch.int32)])]
    asked = _to_owners(torch.cat(parts, 1), shard_dim, context, group_name)
    rows = _to_owners(grad.transpose(0, 1).contiguous(), shard_dim, context, group_name)
    held = len(rows) // world
    index, begins = asked[:, :capacity], asked[:, capacity : capacity + batch + 1].contiguous()
    place = torch.arange(capacity, dtype=torch.int32, device=grad.device).expand(len(asked), -1)
    bag = torch.searchsorted(begins[:, 1:].contiguous(), place.contiguous(), right=True)
    if shard_dim == 1:
        index = index - context.rank * weight.shape[1]
    is_row = (index >= 0) & (index < weight.shape[1]) & (bag < batch)
    bag = bag.clamp(max=batch - 1)
    block = torch.arange(len(asked), device=grad.device)[:, None]
    of_index = rows[block, bag]
    if mode == "mean":
        lengths = begins.diff().clamp(min=1).gather(1, bag)
        of_index = (of_index.float() / lengths[:, :, None]).to(grad.dtype)
    elif weights is not None:
        factors = asked[:, capacity + batch + 1 :].contiguous().view(torch.float32)
        of_index = (of_index.float() * factors[:, :, None]).to(grad.dtype)
    index = torch.where(is_row, index + block % max(held, 1) * weight.shape[1], _NOBODY)
    if grad.device.type == "cpu":  # where equal indices are added in the type of the gradient
        of_index = of_index.float()
    summed = torch.ops.aten.embedding_dense_backward(
        of_index.reshape(-1, dim), index.reshape(-1), weight.shape[0] * weight.shape[1], _NOBODY,
        False,
    )  # fmt: skip
    return (summed.view(weight.shape).to(weight.dtype),)


def _to_owners(
    by_table: torch.Tensor, shard_dim: int, context: Any, group_name: str
) -> torch.Tensor:
    """What all ranks have of this rank's tables, one rank after the other."""
    c10d, world, tables = torch.ops._c10d_functional, context.world_size, len(by_table)
    if shard_dim == 1:
        travelling = c10d.all_gather_into_tensor(by_table, world, group_name)
    else:
        ends = [tables * rank // world for rank in range(world + 1)]
        sent = [end - begin for begin, end in pairwise(ends)]
        received = [sent[context.rank]] * world
        travelling = c10d.all_to_all_single(by_table, received, sent, group_name)
    found: torch.Tensor = c10d.wait_tensor(travelling)
    return found
