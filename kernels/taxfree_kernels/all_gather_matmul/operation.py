"""Inputs and the float64 reference of all_gather_matmul."""

from __future__ import annotations

from collections.abc import Callable

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.inputs import random_tensor
from taxfree_kernels.variant import Operation
from taxfree_kernels.vendor import matmul_into


def _shard(
    problem: AllGatherMatmul, rank: int, seed: int, device: torch.device, integers: bool
) -> torch.Tensor:
    size = (problem.rows_of(rank), problem.shard_columns)
    return random_tensor(size, 1000 * seed + rank, device, getattr(torch, problem.dtype), integers)


def make_inputs(
    problem: AllGatherMatmul, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """a_shard [rows_of(rank), shard_columns], weight [k, n], bias [n] or None of one rank."""
    dtype = getattr(torch, problem.dtype)
    own_seed = 1000 * seed + 100 * (rank + 1)  # not the seed of any shard: ranks are below 100
    size = (problem.n, problem.k) if problem.weight_layout == "nk" else (problem.k, problem.n)
    weight = random_tensor(size, own_seed + 1_000_000, device, dtype, integers)
    if problem.weight_layout == "nk":
        weight = weight.t()
    bias = None
    if problem.bias:
        bias = random_tensor((problem.n,), own_seed + 2_000_000, device, dtype, integers)
    return _shard(problem, rank, seed, device, integers), weight, bias


def reference(
    problem: AllGatherMatmul, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """out float64 [m, n] of `rank`, from the same inputs as :func:`make_inputs`."""
    shards = [
        _shard(problem, peer, seed, device, integers).double() for peer in range(problem.world_size)
    ]
    _, weight, bias = make_inputs(problem, rank, seed, device, integers)
    assert weight is not None
    out = torch.cat(shards, dim=problem.gather_dim) @ weight.double()
    return out if bias is None else out + bias.double()


def empty_output(problem: AllGatherMatmul, device: torch.device) -> torch.Tensor:
    """out [m, n], uninitialised."""
    return torch.empty(problem.m, problem.n, dtype=getattr(torch, problem.dtype), device=device)


def vendor_kernel(problem: AllGatherMatmul, device: torch.device) -> Callable[..., torch.Tensor]:
    """The vendor's matmul alone, on a gathered A."""
    a = torch.randn(problem.m, problem.k, device=device).to(getattr(torch, problem.dtype))
    return lambda a_shard, weight, bias, out: matmul_into(out, a, weight, bias)


def first_variants(problem: AllGatherMatmul) -> tuple[str, ...]:
    """By the shipped tables of two, four and eight H200s, and two H100s."""
    if problem.m <= 16:
        return ("push", "push_tma", "push_specialized", "pull")
    if problem.m <= 64:
        return ("push_tma", "push", "one_shot", "push_specialized")
    if problem.m <= 512:
        return ("push_tma", "one_shot", "push_specialized")
    return ("push_tma", "overlap", "one_shot", "torch_fused", "push_specialized")


OPERATION = Operation(
    name="all_gather_matmul",
    problem=AllGatherMatmul,
    interpolated_fields=("m",),
    ignored_fields=("bias", "dtype"),
    make_inputs=make_inputs,
    reference=reference,
    empty_output=empty_output,
    first_variants=first_variants,
    family_fields=("n", "k"),
    vendor_kernel=vendor_kernel,
)
