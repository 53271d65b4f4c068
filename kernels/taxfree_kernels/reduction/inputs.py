"""Inputs of partial matmuls, their sum in float64, and the vendor's matmul."""

from __future__ import annotations

from collections.abc import Callable

import torch

from taxfree_kernels.inputs import random_tensor
from taxfree_kernels.variant import PartialSum
from taxfree_kernels.vendor import matmul_into

_TERMS = 64  # about, per sum of small integers: keeps sums well below 256, where bfloat16 rounds


def make_factors(
    problem: PartialSum, rank: int, seed: int, device: torch.device, integers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] and weight [k, n] of one rank; small integers stay exact in narrow partial sums."""
    dtype = getattr(torch, problem.dtype)
    own_seed = 1000 * seed + rank
    density = min(1.0, _TERMS / (problem.k * problem.world_size))
    x = random_tensor((problem.m, problem.k), own_seed, device, dtype, integers, density)
    size = (problem.n, problem.k) if problem.weight_layout == "nk" else (problem.k, problem.n)
    weight = random_tensor(size, own_seed + 1_000_000, device, dtype, integers)
    return x, weight.t() if problem.weight_layout == "nk" else weight


def sum_of_products(
    problem: PartialSum, seed: int, device: torch.device, integers: bool
) -> torch.Tensor:
    """float64 [m, n]: the ranks' x @ weight, summed."""
    total = torch.zeros(problem.m, problem.n, dtype=torch.float64, device=device)
    for rank in range(problem.world_size):
        x, weight = make_factors(problem, rank, seed, device, integers)
        total.addmm_(x.double(), weight.double())
    return total


def partial_matmul(problem: PartialSum, device: torch.device) -> Callable[..., torch.Tensor]:
    """The vendor's matmul of one rank, on inputs of either operation."""
    dtype = getattr(torch, problem.dtype)
    partial = torch.empty(problem.m, problem.n, dtype=dtype, device=device)
    return lambda x, weight, *others: matmul_into(partial, x, weight, None)
