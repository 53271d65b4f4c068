"""Random inputs that several operations share."""

from __future__ import annotations

import torch

from taxfree_kernels.fp8 import quantised_cache


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
