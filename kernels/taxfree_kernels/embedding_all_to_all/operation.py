"""Inputs and the float64 reference of embedding_all_to_all."""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.embedding_all_to_all.problem import EmbeddingAllToAll
from taxfree_kernels.inputs import random_tensor
from taxfree_kernels.variant import Operation


def make_inputs(
    problem: EmbeddingAllToAll, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """The tensors of one rank.

    Random inputs have full bags, because they are timed. Integer inputs have bags of varied
    lengths, powers of two, so that means are exact; some are empty.

    Returns:
        weight [tables of the rank, rows, dim];
        indices int32 [tables, capacity]: row numbers, also beyond the last bag;
        offsets int32 [tables, batch + 1]: bag b of table t is indices[t, offsets[t, b] :
        offsets[t, b + 1]], of which the first begins at 0;
        per_sample_weights float32 [tables, capacity], or None.
    """
    own_seed, dtype = 1000 * seed + rank, getattr(torch, problem.dtype)
    size = (len(problem.tables_of(rank)), problem.rows, problem.dim)
    if integers:
        weight = random_tensor(size, own_seed, device, dtype, integers)
    else:  # tables may fill half of the memory
        generator = torch.Generator(device=device).manual_seed(own_seed)
        weight = torch.randn(size, generator=generator, device=device, dtype=dtype)
    slots = (problem.tables, problem.capacity)
    generator = torch.Generator().manual_seed(own_seed)
    drawn = torch.randint(0, problem.all_rows, slots, generator=generator, device="cpu")
    powers = torch.randint(
        0, problem.bag.bit_length() + 2, (problem.tables, problem.batch), generator=generator,
        device="cpu",
    )  # fmt: skip
    lengths = (1 << powers) // 2 if integers else torch.full_like(powers, problem.bag)
    ends = lengths.cumsum(1)
    ends = torch.where(ends <= problem.capacity, ends, 0).cummax(1).values  # the rest are empty
    offsets = torch.nn.functional.pad(ends, (1, 0))
    weights = None
    if problem.weighted:
        weights = random_tensor(slots, own_seed + 1, device, torch.float32, integers)
    return (
        weight,
        drawn.to(device=device, dtype=torch.int32),
        offsets.to(device=device, dtype=torch.int32),
        weights,
    )


def reference(
    problem: EmbeddingAllToAll, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """float64 [batch, tables, dim] of `rank`, from the inputs of :func:`make_inputs`."""
    _, *bags = make_inputs(problem, rank, seed, device, integers)
    pooled = torch.zeros(
        problem.batch, problem.tables, problem.dim, dtype=torch.float64, device=device
    )
    for owner in range(problem.world_size):
        weight = make_inputs(problem, owner, seed, device, integers)[0]
        add_rows(problem, pooled, owner, weight, *bags)
    return pooled


def add_rows(problem: EmbeddingAllToAll, pooled: torch.Tensor, owner: int, *tensors: Any) -> None:
    """Add an owner's rows to float64 `pooled`; tensors as :func:`make_inputs` returns them."""
    weight, indices, offsets, weights = tensors
    first = owner * problem.rows if problem.shard_dim == 1 else 0
    for place, table in enumerate(problem.tables_of(owner)):
        lengths = offsets[table].diff()
        sample = torch.arange(problem.batch, device=indices.device).repeat_interleave(lengths)
        row = indices[table, : len(sample)].long() - first
        is_own = (row >= 0) & (row < problem.rows)
        found = weight[place, row[is_own]].double()
        if weights is not None:
            found *= weights[table, : len(sample)][is_own].double()[:, None]
        if problem.mode == "mean":
            found /= lengths[sample[is_own]].double()[:, None]
        pooled[:, table].index_add_(0, sample[is_own], found)


def empty_output(problem: EmbeddingAllToAll, device: torch.device) -> torch.Tensor:
    """[batch, tables, dim], uninitialised."""
    size = (problem.batch, problem.tables, problem.dim)
    return torch.empty(size, dtype=getattr(torch, problem.dtype), device=device)


OPERATION = Operation(
    name="embedding_all_to_all",
    problem=EmbeddingAllToAll,
    interpolated_fields=("batch",),
    make_inputs=make_inputs,
    reference=reference,
    empty_output=empty_output,
    first_variants=lambda problem: ("push",),
    family_fields=("tables", "rows", "dim"),
    shared=1,
)
