"""Inputs of a stencil, the float64 reference, and the steps without an exchange."""

from __future__ import annotations

import torch

from taxfree_kernels.inputs import random_tensor
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Operation


def make_inputs(
    problem: Stencil, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor]:
    """u [rows, columns] or [rows, columns, depth]: the rank's part of the domain, float32."""
    return (random_tensor(problem.shape, 1000 * seed + rank, device, torch.float32, integers),)


def reference(
    problem: Stencil, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """The part after all steps, and behind it, flat, the squared norms if there are any; float64.

    Of integers, the steps are in float32: neighbours are added in one order, so results have no
    other bits.
    """
    parts = [
        make_inputs(problem, peer, seed, device, integers)[0] for peer in range(problem.world_size)
    ]
    down = [parts[row : row + problem.across] for row in range(0, len(parts), problem.across)]
    u = torch.cat([torch.cat(row, dim=1) for row in down])
    u = u if integers else u.double()
    norms = []
    for step in range(1, problem.steps + 1):
        last, u = u, relaxed(u)
        if problem.norm_every and step % problem.norm_every == 0:
            norms.append((u - last).double().square().sum())
    row, column = rank // problem.across, rank % problem.across
    part = u.chunk(problem.down)[row].chunk(problem.across, dim=1)[column].double()
    return torch.cat([part.flatten(), torch.stack(norms)]) if norms else part


def relaxed(u: torch.Tensor) -> torch.Tensor:
    """The domain after a step of plain torch, of its dtype: [rows, columns] or with a depth."""
    inner = tuple(slice(1, -1) for _ in u.shape)
    sides = []
    for dim, size in enumerate(u.shape):
        low, high = ((*inner[:dim], slice(at, size - 2 + at), *inner[dim + 1 :]) for at in (0, 2))
        sides.append(u[low] + u[high])
    total = sides[0] + sides[1]
    if len(sides) == 3:
        total += sides[2]
    after = u.clone()
    after[inner] = total * (1 / (2 * len(sides)))
    return after


def empty_output(problem: Stencil, device: torch.device) -> torch.Tensor:
    """Of the shape of u; or flat, with the squared norms behind it; uninitialised."""
    size = (problem.elements + problem.norms,) if problem.norms else problem.shape
    return torch.empty(size, dtype=torch.float32, device=device)


OPERATION = Operation(
    name="stencil",
    problem=Stencil,
    interpolated_fields=("rows",),
    ignored_fields=("steps", "norm_every"),
    make_inputs=make_inputs,
    reference=reference,
    empty_output=empty_output,
    first_variants=lambda problem: ("pushed", "persistent"),
)
