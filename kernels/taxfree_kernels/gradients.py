"""Common parts of the operations' backward formulas.

The gradient of a gather is a reduce-scatter and the reverse, so each formula calls the other's op.
The gradient of the weight needs a gathered matrix. The gradient of the input travels while that of
the weight is computed. Formulas call torch ops only, so that they also run inside compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, ...]


def gather(
    shard: torch.Tensor, dim: int, m: int, world_size: int, group_name: str
) -> Callable[[], torch.Tensor]:
    """Start to gather shards of a matrix with m rows; the result waits for it, and returns it."""
    columns = shard.shape[1]
    if dim == 0:
        shard = torch.nn.functional.pad(shard, (0, 0, 0, -(-m // world_size) - shard.shape[0]))
    travelling = torch.ops._c10d_functional.all_gather_into_tensor(
        shard.contiguous(), world_size, group_name
    )

    def wait() -> torch.Tensor:
        full: torch.Tensor = torch.ops._c10d_functional.wait_tensor(travelling)
        if dim == 0:
            return full[:m]
        by_rank = full.view(world_size, m, columns)
        return by_rank.transpose(0, 1).reshape(m, world_size * columns)

    return wait


def gradients(
    needs: Sequence[bool],
    like: torch.Tensor,
    of_input: Callable[[], Any],
    of_weight: Callable[[], Any],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of the input, which travels, and of the weight; each if it is needed.

    On a GPU the matmul for the weight has a stream of its own: it fills what the operation leaves
    idle. In compiled code they follow one another as in PyTorch's own graphs.

    Args:
        like: an input of both.
    """
    is_traced = torch.compiler.is_compiling() or type(like) is not torch.Tensor
    if not all(needs[:2]) or not like.is_cuda or is_traced:
        grad_weight = of_weight() if needs[1] else None
        return of_input() if needs[0] else None, grad_weight
    current, side = torch.cuda.current_stream(), _side_stream(like.device)
    side.wait_stream(current)  # now; but the operation is launched first
    grad_input = of_input()
    with torch.cuda.stream(side):
        grad_weight = of_weight()
    current.wait_stream(side)
    grad_weight.record_stream(current)
    return grad_input, grad_weight


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
