"""Random inputs that several operations share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from taxfree_kernels.fp8 import dequantised, fp8_dtype, quantised, quantised_cache, quantised_weight
from taxfree_kernels.variant import PartialSum
from taxfree_kernels.vendor import multiply_into, try_fp8

_TERMS = 64  # about, per sum of small integers: keeps sums well below 256, where bfloat16 rounds
_MOST_IN_FP8 = 16  # e4m3 has all integers up to here, also times a power of two


def random_rows(
    size: tuple[int, ...], seed: int, device: torch.device, dtype: str, integers: bool
) -> torch.Tensor:
    """Normal numbers; or -1 and 1, of which no two long rows are alike."""
    generator = torch.Generator(device=device).manual_seed(seed)
    kind = getattr(torch, dtype)
    if not integers:
        return torch.randn(size, generator=generator, device=device, dtype=kind)
    bits = torch.randint(0, 2, size, generator=generator, device=device, dtype=torch.int8)
    return (2 * bits - 1).to(kind)


def cache_in_fp8(
    cache: torch.Tensor, scales: str, kind: torch.dtype, integers: bool, factor: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values of `random_rows` in fp8, and their scales.

    Integers stay exact: every second scale, from the first on, is `factor`, the others are 1.
    """
    values, scale = quantised_cache(cache, scales, kind)
    if integers:
        values, scale = cache.to(kind), torch.ones_like(scale)
        scale[::2] *= factor
    return values, scale


def random_tensor(
    size: tuple[int, ...],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    integers: bool,
    density: float = 1.0,
) -> torch.Tensor:
    """Normal numbers; or -1, 0 and 1, of which only a share `density` is kept nonzero."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if not integers:
        return torch.randn(size, generator=generator, device=device).to(dtype)
    values = torch.randint(-1, 2, size, generator=generator, device=device).to(dtype)
    if density < 1:
        values *= torch.rand(size, generator=generator, device=device) < density
    return values


# -- partial matmuls, their sum in float64, and the vendor's matmul --


def make_factors(
    problem: PartialSum, rank: int, seed: int, device: torch.device, integers: bool
) -> tuple[torch.Tensor, ...]:
    """x [m, k] and weight [k, n] of one rank, in fp8 also their scales, as plans take them.

    Small integers, times scales of 1 and 2, stay exact in narrow partial sums: in fp8 those of few
    terms.
    """
    dtype = torch.float32 if problem.is_fp8 else getattr(torch, problem.dtype)
    own_seed = 1000 * seed + rank
    density = 1.0 if problem.fp8_wire else min(1.0, _TERMS / (problem.k * problem.world_size))
    x = random_tensor((problem.m, problem.k), own_seed, device, dtype, integers, density)
    if integers and problem.fp8_wire:
        most = _MOST_IN_FP8 // (4 if problem.scales == "block" else 1)  # of terms, times scales
        row, column = (torch.arange(size, device=device) for size in x.shape)
        x *= (row[:, None] + column) % -(-problem.k // most) == 0
    size = (problem.n, problem.k) if problem.weight_layout == "nk" else (problem.k, problem.n)
    weight = random_tensor(size, own_seed + 1_000_000, device, dtype, integers)
    weight = weight.t() if problem.weight_layout == "nk" else weight
    if not problem.is_fp8:
        return x, weight
    kind = fp8_dtype(device)
    x8, x_scale = quantised(x, problem.scales, dtype=kind)
    weight8, weight_scale = quantised_weight(weight, problem.scales, kind)
    if integers:
        x8, weight8 = x.to(kind), weight.to(kind)
        for number, scale in enumerate((x_scale, weight_scale)):
            drawn = random_tensor(tuple(scale.shape), own_seed + number, device, dtype, integers)
            scale.copy_(drawn.abs() + 1)
    return x8, weight8, x_scale, weight_scale


def sum_of_products(
    problem: PartialSum, seed: int, device: torch.device, integers: bool
) -> torch.Tensor:
    """float64 [m, n]: the ranks' x @ weight, summed."""
    total = torch.zeros(problem.m, problem.n, dtype=torch.float64, device=device)
    for rank in range(problem.world_size):
        x, weight, *scales = make_factors(problem, rank, seed, device, integers)
        total.addmm_(*in_float64(x, weight, *scales))
    return total


def in_float64(
    x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the weight in float64, times the scales of both, if given."""
    if not scales:
        return x.double(), weight.double()
    x_scale, weight_scale = scales
    return dequantised(x, x_scale), dequantised(weight, weight_scale)


def partial_matmul(problem: PartialSum, device: torch.device) -> Callable[..., torch.Tensor]:
    """The vendor's matmul of one rank, on inputs of either operation."""
    dtype = getattr(torch, problem.dtype)
    partial = torch.empty(problem.m, problem.n, dtype=dtype, device=device)
    try_fp8(problem, device)
    scales = slice(-3, -1) if problem.is_fp8 else slice(0, 0)  # before the output
    return lambda x, weight, *others: multiply_into(
        partial, x, weight, None, *others[scales], is_fast=problem.fast_accumulation
    )
