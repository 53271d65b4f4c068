"""Inputs and the float64 reference of all_gather_matmul."""

from __future__ import annotations

from collections.abc import Callable

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.fp8 import dequantised, fp8_dtype, quantised, quantised_weight
from taxfree_kernels.inputs import random_tensor
from taxfree_kernels.variant import Operation
from taxfree_kernels.vendor import multiply_into, try_fp8


def _shard(
    problem: AllGatherMatmul, rank: int, seed: int, device: torch.device, integers: bool
) -> torch.Tensor:
    size = (problem.rows_of(rank), problem.shard_columns)
    dtype = torch.float32 if problem.is_fp8 else getattr(torch, problem.dtype)
    return random_tensor(size, 1000 * seed + rank, device, dtype, integers)


def _gathered(
    problem: AllGatherMatmul, seed: int, device: torch.device, integers: bool
) -> tuple[torch.Tensor, ...]:
    """A [m, k] of all ranks; in fp8 also its scales."""
    shards = [_shard(problem, peer, seed, device, integers) for peer in range(problem.world_size)]
    whole = torch.cat(shards, dim=problem.gather_dim)
    if not problem.is_fp8:
        return (whole,)
    values, scale = quantised(whole, problem.scales, dtype=fp8_dtype(device))
    if not integers:
        return values, scale
    return whole.to(values.dtype), _integers_like(scale, 1000 * seed)


def _integers_like(scale: torch.Tensor, seed: int) -> torch.Tensor:
    """Scales of 1 and 2."""
    drawn = random_tensor(tuple(scale.shape), seed, scale.device, scale.dtype, integers=True)
    return torch.empty_like(scale).copy_(drawn.abs() + 1)


def make_inputs(
    problem: AllGatherMatmul, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """The tensors of one rank.

    Returns:
        a_shard [rows_of(rank), shard_columns]; weight [k, n]; bias [n] or None; in fp8 the scales
        of a_shard, or of all of A where all ranks have the same, and those of the weight.
    """
    dtype = getattr(torch, problem.dtype)
    own_seed = 1000 * seed + 100 * (rank + 1)  # not the seed of any shard: ranks are below 100
    size = (problem.n, problem.k) if problem.weight_layout == "nk" else (problem.k, problem.n)
    weight = random_tensor(size, own_seed + 1_000_000, device, dtype, integers)
    if problem.weight_layout == "nk":
        weight = weight.t()
    bias = None
    if problem.bias:
        bias = random_tensor((problem.n,), own_seed + 2_000_000, device, dtype, integers)
    if not problem.is_fp8:
        return _shard(problem, rank, seed, device, integers), weight, bias
    whole, scale = _gathered(problem, seed, device, integers)
    weight8, weight_scale = quantised_weight(weight, problem.scales, whole.dtype)
    if integers:
        weight8 = weight.to(whole.dtype)
        weight_scale = _integers_like(weight_scale, own_seed)
    if problem.scale_columns:
        scale = _of_shard(problem, rank, scale, problem.scale_columns)
    return (
        _of_shard(problem, rank, whole, problem.shard_columns), weight8, bias, scale, weight_scale
    )  # fmt: skip


def _of_shard(
    problem: AllGatherMatmul, rank: int, whole: torch.Tensor, columns: int
) -> torch.Tensor:
    """A rank's rows or `columns` of what is of all of A."""
    if problem.gather_dim == 0:
        return whole[rank * problem.shard_rows :][: problem.rows_of(rank)].clone()
    return whole[:, rank * columns : (rank + 1) * columns].contiguous()


def reference(
    problem: AllGatherMatmul, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """out float64 [m, n] of `rank`, from the same inputs as :func:`make_inputs`."""
    whole, *scale = _gathered(problem, seed, device, integers)
    _, weight, bias, *scales = make_inputs(problem, rank, seed, device, integers)
    assert weight is not None
    out = _in_float64(whole, *scale) @ _in_float64(weight, *scales[1:])
    return out if bias is None else out + bias.double()


def _in_float64(factor: torch.Tensor, *scale: torch.Tensor | None) -> torch.Tensor:
    if scale and scale[0] is not None:
        return dequantised(factor, scale[0])
    return factor.double()


def empty_output(problem: AllGatherMatmul, device: torch.device) -> torch.Tensor:
    """out [m, n], uninitialised."""
    return torch.empty(problem.m, problem.n, dtype=getattr(torch, problem.dtype), device=device)


def vendor_kernel(problem: AllGatherMatmul, device: torch.device) -> Callable[..., torch.Tensor]:
    """The vendor's matmul alone, on a gathered A."""
    a = torch.randn(problem.m, problem.k, device=device)
    try_fp8(problem, device, problem.bias)
    if problem.is_fp8:
        values, scale = quantised(a, problem.scales, dtype=fp8_dtype(device))
        return lambda a_shard, weight, bias, a_scale, weight_scale, out: multiply_into(
            out, values, weight, bias, scale, weight_scale, is_fast=problem.fast_accumulation
        )
    a = a.to(getattr(torch, problem.dtype))
    return lambda a_shard, weight, bias, out: multiply_into(out, a, weight, bias)


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
