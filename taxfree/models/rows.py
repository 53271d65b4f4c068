"""The operations on inputs of any number of dimensions: the last has columns, the others rows.

Shards of rows may be those of any dimension. Its rows must lie first in the matrix that is
exchanged, so all but the first dimension cost a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from taxfree._runtime.runtime import Runtime
from taxfree_kernels.gradients import gradients
from taxfree_kernels.matmul_all_reduce.signature import LAYER_MATMUL_ALL_REDUCE

_DTYPES = (torch.float16, torch.bfloat16)
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)  # FakeTensor: while code is compiled


def all_gather_matmul(
    runtime: Runtime, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dim: int
) -> torch.Tensor:
    """all_gather(x, dim) @ weight (+ bias), for shards of equal size.

    If the weight needs a gradient, gathered rows are kept for it.

    Args:
        x: [..., k], or [..., k / world_size] if dim is the last one.
        weight: [k, n].
        bias: [n], or None.
        dim: of x, in which it is sharded.

    Returns:
        [..., n].
    """
    if dim % x.dim() == x.dim() - 1:
        y = runtime.all_gather_matmul(x.flatten(0, -2), weight, bias, gather_dim=1)
        return y.view(*x.shape[:-1], y.shape[1])
    x = x.movedim(dim, 0)
    matrix = x.flatten(0, -2)
    if torch.is_grad_enabled() and weight.requires_grad:
        y = _Gathered.apply(matrix, weight, bias, runtime.group_name)  # type: ignore[no-untyped-call]
    else:
        y = runtime.all_gather_matmul(matrix, weight, bias, gather_dim=0)
    return y.view(runtime.world_size * x.shape[0], *x.shape[1:-1], y.shape[1]).movedim(0, dim)


class _Gathered(torch.autograd.Function):
    """all_gather(x) @ weight (+ bias), whose gathered x is kept for the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str
    ) -> torch.Tensor:
        y, gathered = torch.ops.taxfree.all_gather_matmuls(x, [weight], [bias], True, group_name)
        ctx.save_for_backward(gathered, weight)
        ctx.group_name = group_name
        found: torch.Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gathered, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad

        def of_input() -> Any:
            return torch.ops.taxfree.matmul_reduce_scatter(grad, weight.t(), 0, ctx.group_name)

        both = gradients(needs, grad, of_input, lambda: gathered.t() @ grad)
        return *both, grad.sum(0) if needs[2] else None, None


def all_gather_matmuls(
    runtime: Runtime, x: torch.Tensor, weights: list[torch.Tensor], dim: int, returns_a: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]] | None:
    """all_gather(x, dim) @ weight for several weights, and the gathered x, after one exchange.

    Args:
        x: [..., k].
        weights: [k, n] each.
        dim: of x, in which it is sharded; not the last one.
        returns_a: whether the gathered x is wanted.

    Returns:
        The gathered x or None, and [..., n] for each weight; None if the library must run.
    """
    x = x.movedim(dim, 0)
    biases = [None] * len(weights)
    found = runtime._all_gather_matmuls(
        x.flatten(0, -2), weights, biases, returns_a, is_optional=True
    )
    if found is None:
        return None
    rows = (runtime.world_size * x.shape[0], *x.shape[1:-1])
    outs = [each.view(*rows, each.shape[1]).movedim(0, dim) for each in found]
    return (outs.pop() if returns_a else None), outs


def described(weights: int, returns_a: bool) -> str:
    """What one gather is for, as reports say it."""
    what = "1 weight" if weights == 1 else f"{weights} weights"
    return f"{what} and the gathered rows" if returns_a else what


def matmul_reduce_scatter(
    runtime: Runtime, x: torch.Tensor, weight: torch.Tensor, dim: int
) -> torch.Tensor:
    """This rank's shard of the sum of x @ weight; its dimension is divisible by world_size.

    Args:
        x: [..., k].
        weight: [k, n].
        dim: of the sum, in which it is sharded.
    """
    if dim % x.dim() == x.dim() - 1:
        y = runtime.matmul_reduce_scatter(x.flatten(0, -2), weight, scatter_dim=1)
        return y.view(*x.shape[:-1], y.shape[1])
    x = x.movedim(dim, 0)
    y = runtime.matmul_reduce_scatter(x.flatten(0, -2), weight, scatter_dim=0)
    return y.view(x.shape[0] // runtime.world_size, *x.shape[1:-1], y.shape[1]).movedim(0, dim)


def matmul_all_reduce(
    runtime: Runtime, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A layer's sum over all ranks of x @ weight (+ bias): x is [..., k], the result [..., n]."""
    y = runtime._call(LAYER_MATMUL_ALL_REDUCE, (x.flatten(0, -2), weight, bias, None), None)
    return y.view(*x.shape[:-1], y.shape[1])


def unsupported_reason(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """The reason why the operations do not take two local tensors; None if they do."""
    if type(weight) not in _PLAIN:
        return f"the weight is a {type(weight).__name__}"
    if x.dtype != weight.dtype or x.dtype not in _DTYPES:
        return " and ".join(sorted({_name(each.dtype) for each in (x, weight)}))
    if x.dim() < 2:
        return "the input is a vector"
    return None


def layer_unsupported_reason(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """The same, for a layer that is called now."""
    reason = unsupported_reason(x, weight)
    if reason is not None:
        return reason
    if bias is not None and bias.dtype != weight.dtype:
        return f"{_name(weight.dtype)}, with a bias of {_name(bias.dtype)}"
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype:
        return f"{_name(x.dtype)}, under autocast to {_name(torch.get_autocast_dtype(kind))}"
    return None


def linear_unsupported_reason(module: torch.nn.Module) -> str | None:
    """The reason why a module, without its style, does not compute what torch.nn.Linear does."""
    if type(module).forward is torch.nn.Linear.forward and "forward" not in vars(module):
        return None
    return f"{type(module).__name__} has a forward of its own"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
