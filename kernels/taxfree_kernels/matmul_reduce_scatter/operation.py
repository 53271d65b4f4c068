"""Inputs and the float64 reference of matmul_reduce_scatter."""

from __future__ import annotations

import torch

from taxfree_kernels.inputs import make_factors, partial_matmul, sum_of_products
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Operation


def make_inputs(
    problem: MatmulReduceScatter, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """x [m, k] and weight [k, n] of one rank, and in fp8 their scales."""
    return make_factors(problem, rank, seed, device, integers)


def reference(
    problem: MatmulReduceScatter, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """float64 [shard_rows, shard_columns] of `rank`, from the inputs of :func:`make_inputs`."""
    total = sum_of_products(problem, seed, device, integers)
    if problem.scatter_dim == 1:
        return total[:, rank * problem.shard_columns :][:, : problem.shard_columns]
    shard = total.new_zeros(problem.shard_rows, problem.n)
    rows = problem.rows_of(rank)
    shard[:rows] = total[rank * problem.shard_rows :][:rows]
    return shard


def empty_output(problem: MatmulReduceScatter, device: torch.device) -> torch.Tensor:
    """A full shard, uninitialised."""
    size = (problem.shard_rows, problem.shard_columns)
    return torch.empty(size, dtype=getattr(torch, problem.dtype), device=device)


def first_variants(problem: MatmulReduceScatter) -> tuple[str, ...]:
    """By the shipped tables of two, four and eight H200s, and two H100s."""
    if problem.m <= 256:
        return ("push_lamport", "one_shot", "push", "push_lamport_specialized")
    if problem.m <= 1024:
        return ("push", "overlap", "one_shot")
    return ("overlap", "push", "torch_fused")


OPERATION = Operation(
    name="matmul_reduce_scatter",
    problem=MatmulReduceScatter,
    interpolated_fields=("m",),
    ignored_fields=("dtype",),
    make_inputs=make_inputs,
    reference=reference,
    empty_output=empty_output,
    first_variants=first_variants,
    family_fields=("n", "k"),
    vendor_kernel=partial_matmul,
)
