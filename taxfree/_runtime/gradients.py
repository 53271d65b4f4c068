"""Backward formulas of the operations that have gradients.

The gradient of a gather is a reduce-scatter and the reverse, so each formula calls the other's op.
The gradient of the weight needs a gathered matrix: it travels while the gradient of the input is
computed. The latter travels while the gradient of the weight is computed. Formulas call torch ops
only, so that they also run inside compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from taxfree._runtime.runtime import runtime_of
from taxfree_kernels.problem import own_rows

Gradients = tuple[torch.Tensor | None, ...]


def _gather(shard: torch.Tensor, dim: int, m: int, group_name: str) -> Callable[[], torch.Tensor]:
    """Start to gather shards of a matrix with m rows; the result waits for it, and returns it."""
    world_size = runtime_of(group_name).world_size
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
    idle. In compiled code one follows the other.

    Args:
        like: an input of both.
    """
    is_traced = torch.compiler.is_compiling() or type(like) is not torch.Tensor
    if not all(needs[:2]) or not like.is_cuda or is_traced:
        return of_input() if needs[0] else None, of_weight() if needs[1] else None
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


def _all_gather_matmul(context: Any, grad: torch.Tensor) -> Gradients:
    a_shard, weight = context.saved_tensors
    _, _, _, dim, _, group_name = context.arguments
    needs = context.needs_input_grad
    gathered: Any = _gather(a_shard, dim, grad.shape[0], group_name) if needs[1] else None

    def of_shard() -> Any:
        summed = torch.ops.taxfree.matmul_reduce_scatter(grad, weight.t(), dim, group_name)
        return summed[: a_shard.shape[0]]  # the shard of the last ranks may have fewer rows

    both = gradients(needs, grad, of_shard, lambda: gathered().t() @ grad)
    return *both, grad.sum(0) if needs[2] else None, None, None, None


def _matmul_reduce_scatter(context: Any, grad: torch.Tensor) -> Gradients:
    x, weight = context.saved_tensors
    _, _, dim, group_name = context.arguments
    needs, m = context.needs_input_grad, x.shape[0]
    fabric = runtime_of(group_name)._fabric
    shard = grad[: own_rows(m, dim, fabric.world_size, fabric.rank)]  # the others are padding
    gathered: Any = _gather(shard, dim, m, group_name) if needs[1] else None

    def of_input() -> Any:
        own = shard.contiguous()
        return torch.ops.taxfree.all_gather_matmul(own, weight.t(), None, dim, m, group_name)

    return *gradients(needs, grad, of_input, lambda: x.t() @ gathered()), None, None


def _matmul_all_reduce(context: Any, grad: torch.Tensor) -> Gradients:
    """All ranks have the same gradient, since all compute the same from the same sum."""
    x, weight = context.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual, _ = context.needs_input_grad
    return (
        grad @ weight.t() if needs_x else None,
        x.t() @ grad if needs_weight else None,
        grad.sum(0) if needs_bias else None,
        grad if needs_residual else None,
        None,
    )


def _keep(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    """Save the two factors of the product, and what is no tensor."""
    ctx.save_for_backward(*inputs[:2])
    ctx.arguments = [None if isinstance(each, torch.Tensor) else each for each in inputs]


_FORMULAS = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_all_reduce": _matmul_all_reduce,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
}


def register(name: str, library: torch.library.Library) -> bool:
    """Give an op its backward formula; whether there is one."""
    formula = _FORMULAS.get(name)
    if formula is None:
        return False
    torch.library.register_autograd(f"taxfree::{name}", formula, setup_context=_keep, lib=library)
    return True
