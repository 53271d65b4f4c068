"""Inputs and the float64 reference of matmul_all_reduce."""

from __future__ import annotations

import torch

from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.partial_sums.inputs import make_factors, random_tensor, sum_of_products
from taxfree_kernels.variant import Operation


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
