"""Inputs and the float64 reference of matmul_all_reduce."""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.variant import Operation

_TERMS = 64  # of a sum of small integers, about: none then comes near 256, where bfloat16 rounds


def random_tensor(
    size: tuple[int, ...],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    integers: bool,
    density: float = 1.0,
) -> torch.Tensor:
    """Normal numbers, or -1, 0, 1, of which all but a share of `density` are made 0."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if not integers:
        return torch.randn(size, generator=generator, device=device).to(dtype)
    values = torch.randint(-1, 2, size, generator=generator, device=device).to(dtype)
    if density < 1:
        values *= torch.rand(size, generator=generator, device=device) < density
    return values


def make_factors(
    problem: Any, rank: int, seed: int, device: torch.device, integers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] and weight [k, n] of one rank; small integers stay exact in narrow partial sums.

    Args:
        problem: of this operation, or another that sums the ranks' products.
    """
    dtype = getattr(torch, problem.dtype)
    own = 1000 * seed + rank
    density = min(1.0, _TERMS / (problem.k * problem.world_size))
    x = random_tensor((problem.m, problem.k), own, device, dtype, integers, density)
    size = (problem.n, problem.k) if problem.weight_layout == "nk" else (problem.k, problem.n)
    weight = random_tensor(size, own + 1_000_000, device, dtype, integers)
    return x, weight.t() if problem.weight_layout == "nk" else weight


def sum_of_products(problem: Any, seed: int, device: torch.device, integers: bool) -> torch.Tensor:
    """float64 [m, n]: the ranks' x @ weight, summed."""
    total = torch.zeros(problem.m, problem.n, dtype=torch.float64, device=device)
    for rank in range(problem.world_size):
        x, weight = make_factors(problem, rank, seed, device, integers)
        total.addmm_(x.double(), weight.double())
    return total


def _addends(
    problem: MatmulAllReduce, seed: int, device: torch.device, integers: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """bias [n] and residual [m, n], each None where the problem has none; the same on all ranks."""
    dtype, bias, residual = getattr(torch, problem.dtype), None, None
    if problem.bias:
        bias = random_tensor((problem.n,), seed + 2_000_000, device, dtype, integers)
    if problem.residual:
        size = (problem.m, problem.n)
        residual = random_tensor(size, seed + 3_000_000, device, dtype, integers)
    return bias, residual


def make_inputs(
    problem: MatmulAllReduce, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """x [m, k], weight [k, n], bias [n] or None, residual [m, n] or None of one rank."""
    factors = make_factors(problem, rank, seed, device, integers)
    return *factors, *_addends(problem, seed, device, integers)


def reference(
    problem: MatmulAllReduce, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """out float64 [m, n], the same on all ranks, from the inputs of :func:`make_inputs`."""
    total = sum_of_products(problem, seed, device, integers)
    for addend in _addends(problem, seed, device, integers):
        if addend is not None:
            total += addend.double()
    return total


def empty_output(problem: MatmulAllReduce, device: torch.device) -> torch.Tensor:
    """out [m, n], uninitialised."""
    return torch.empty(problem.m, problem.n, dtype=getattr(torch, problem.dtype), device=device)


OPERATION = Operation(
    name="matmul_all_reduce",
    problem=MatmulAllReduce,
    near_fields=("m",),
    make_inputs=make_inputs,
    reference=reference,
    empty_output=empty_output,
)
