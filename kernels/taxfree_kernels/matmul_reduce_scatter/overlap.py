"""Copy engines scatter one part of the partial sum while the vendor's matmul computes the next.

Removes most of the bulk-synchronous tax and leaves the compute units to the matmul: peers' shards
first, beginning with the next rank's, this rank's own last, then the sum of all ranks' parts. Costs
two launches per copy, and copies take microseconds to start, so it suits many rows. A matmul of a
shard may leave many compute units without a last tile; so the one before the last may also compute
rows of this rank's own that lie beside its shard.

Protocol. That of :mod:`taxfree_kernels.copies`: each copy of a peer's shard, even of no rows, is
signalled to that peer. The kernel that adds waits for all peers, and comes after all copies of this
rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.copies import COPIED, PeerCopies, rows_of_shard
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.device.sync import wait_for_everybody
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.reduction.fused import with_sources
from taxfree_kernels.reduction.spaces import exchange_unsupported_reason
from taxfree_kernels.spaces import first_streams, per_copy_space
from taxfree_kernels.variant import BLOCK, Config, Plan, Space, Variant, resized
from taxfree_kernels.vendor import multiply_into, try_fp8

_BLOCK, _INTERPRETED_BLOCK = 2048, 64  # elements that a program adds at a time
_PROGRAMS = 4  # adding programs for each compute unit


@triton.jit(do_not_specialize=["channel", "rank", "first", "count", "size"])
def _add(
    partial_ptr, out_ptr, inbox, control_ptr, channel, heap_bases, rank,
    first, count, size, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add all ranks' partial sums of this rank's shard, in rank order.

    Args:
        partial_ptr: this rank's partial sum.
        inbox: a pointer to [WORLD, stride_source], and stride_source.
        channel: of the peers' signals.
        first: start of the shard in the output; `first`, `count`, `size` in units of 16 elements.
        count: part of the shard in rows of the sum; the rest, up to `size`, is zero.
    """
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    wait_for_everybody(peers, channel, GROUP, BUT_SELF=True)
    for start in range(tl.program_id(0) * BLOCK, size * 16, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask, elements = offsets < count * 16, first * 16 + offsets
        total = tl.zeros((BLOCK,), tl.float32)
        total = with_sources(total, offsets, mask, partial_ptr, inbox[0], inbox[1], rank, GROUP)
        total = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + elements, total, mask=offsets < size * 16)


@dataclass(frozen=True)
class _Shard:
    """A rank's shard of this rank's partial sum, and its matmul, unless that has no rows.

    Args:
        rows, columns: of x, and of the weight.
        product: the matmul's output: the shard, but for rows of this rank's own.
        sent: the shard.
        target: its place in the owner's memory; None for this rank's own shard.
    """

    owner: int
    rows: slice
    columns: slice
    product: torch.Tensor
    sent: torch.Tensor
    target: torch.Tensor | None


class OverlapPlan(Plan):
    """A matmul per shard, copies that overlap the next one, and one addition.

    Args:
        others: elements that the addition has in the slot behind the inbox.
    """

    def __init__(
        self, problem: MatmulReduceScatter, fabric: Fabric, config: Config, others: int = 0
    ) -> None:
        self._problem, self._fabric = problem, fabric
        try_fp8(replace(problem, n=problem.shard_columns, scatter_dim=0), fabric.device)
        self._copies = PeerCopies(fabric, config["STREAMS"])
        self._own_split = config.get("OWN_SPLIT", 1)  # records of before lack it
        dtype = getattr(torch, problem.dtype)
        shards = problem.world_size * problem.shard_rows * problem.shard_columns
        self._slot, _ = fabric.pool.slots(shards + others, dtype)
        self._shards = fabric.workspace.scratch(((shards,), dtype))
        self._add = self._adder(config)
        self._sized = fabric.workspace.by_size(self._of_size)
        with_rows = sum(problem.rows_of(rank) > 0 for rank in range(problem.world_size))
        self.launches = with_rows + 2 * (problem.world_size - 1) + 3

    def _adder(self, config: Config) -> Kernel:
        """The kernel that adds."""
        fabric = self._fabric
        return Kernel(
            _add,
            grid=0,
            constants={
                "GROUP": Group(fabric.world_size, fabric.backend),
                "BLOCK": _INTERPRETED_BLOCK if fabric.backend == "interpreter" else _BLOCK,
            },
            options=compile_options(fabric.backend, {"num_warps": 4}),
        )

    def _addition(
        self, problem: MatmulReduceScatter, shards: torch.Tensor
    ) -> tuple[torch.Tensor, Kernel]:
        """What it adds of this rank's partial sum, and itself, for a problem of a call's size."""
        fabric, rank, num_vec16 = self._fabric, self._fabric.rank, problem.shard_columns // 16
        size = problem.shard_rows * problem.shard_columns
        last_args = (
            (self._slot, size), fabric.pool.control, COPIED, fabric.heap_bases, rank,
            0, problem.rows_of(rank) * num_vec16, problem.shard_rows * num_vec16,
        )  # fmt: skip
        most = _PROGRAMS * fabric.hardware.compute_units
        grid = min(-(-size // self._add.constants["BLOCK"]), most)
        return shards[rank * problem.shard_rows :], self._add.resized(grid, last_args)

    def _of_size(self, m: int) -> tuple[list[_Shard], torch.Tensor, Kernel]:
        """Peers' shards, the next rank's first, then the own one; the addition."""
        problem, (shards,) = resized(self._problem, m=m), self._shards()
        world, rank = problem.world_size, self._fabric.rank
        rows, columns = problem.shard_rows, problem.shard_columns
        shards = shards[: world * rows * columns].view(world * rows, columns)
        inbox = self._slot[: shards.numel()].view(world, rows, columns)
        beside = (rank - 1) % world if rank or self._own_split == 1 else 1
        owners = [(rank + distance) % world for distance in range(1, world)]
        owners.remove(beside)
        parts = [self._shard(problem, owner, shards, inbox) for owner in (*owners, beside, rank)]
        return self._split(parts, shards), *self._addition(problem, shards)

    def _shard(
        self, problem: MatmulReduceScatter, owner: int, shards: torch.Tensor, inbox: torch.Tensor
    ) -> _Shard:
        rank, width, place = self._fabric.rank, problem.shard_columns, rows_of_shard(problem, owner)
        product = shards[place]
        rows, columns, target = place, slice(0, problem.n), None
        if problem.scatter_dim == 1:  # all shards have the same rows
            rows, columns = slice(0, problem.m), slice(owner * width, (owner + 1) * width)
        if owner != rank:
            target = self._fabric.peer_view(inbox, owner)[rank][: len(product)]
        return _Shard(owner, rows, columns, product, product, target)

    def _split(self, parts: list[_Shard], shards: torch.Tensor) -> list[_Shard]:
        """The same, where the matmul before the last computes own rows, too."""
        *first, beside, own = parts
        early = len(own.product) // self._own_split * (self._own_split - 1)
        if not early:
            return parts
        if beside.owner < own.owner:
            cut = own.rows.start + early
            wider, rest = slice(beside.rows.start, cut), slice(cut, own.rows.stop)
        else:
            cut = own.rows.stop - early
            wider, rest = slice(cut, beside.rows.stop), slice(own.rows.start, cut)
        first.append(replace(beside, rows=wider, product=shards[wider]))
        return [*first, replace(own, rows=rest, product=shards[rest])]

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._add, *self._copies.kernels)

    def run(self, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        *scales, out = rest
        partial, add = self._scatter(x, weight, *scales)
        add(partial, out)
        self._copies.finish(out)
        return out

    def _scatter(
        self, x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
    ) -> tuple[torch.Tensor, Kernel]:
        """Multiply and send; returns the addition."""
        shards, partial, add = self._sized[x.shape[0]]
        self._copies.begin()
        for shard in shards:
            if shard.product.numel():
                self._multiply(shard, x, weight, *scales)
            if shard.target is not None:
                self._copies.follow()
                self._copies.send([shard.target], [shard.sent], shard.owner)
        self._copies.join()
        return partial, add

    def _multiply(
        self, shard: _Shard, x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
    ) -> None:
        rows, columns = shard.rows, shard.columns
        if self._problem.scales in ("channel", "block"):
            of_rows, of_columns = scales
            width = BLOCK if self._problem.scales == "block" else 1
            blocks = slice(columns.start // width, -(-columns.stop // width))
            scales = of_rows[rows], of_columns[:, blocks]
        fast = self._problem.fast_accumulation
        multiply_into(shard.product, x[rows], weight[:, columns], None, *scales, is_fast=fast)


class Overlap(Variant):
    """Copy engines scatter during the vendor's matmul."""

    plan_class = OverlapPlan
    copies = True

    def unsupported_reason(self, problem: MatmulReduceScatter, hardware: Hardware) -> str | None:
        if problem.shard_columns % 16:
            return "shards do not split into parts of aligned rows"
        if problem.scales == "block" and problem.scatter_dim and problem.shard_columns % BLOCK:
            return f"columns of a shard begin within a block of {BLOCK}"
        return exchange_unsupported_reason(problem)

    def space(self, problem: MatmulReduceScatter, hardware: Hardware) -> Space:
        splits = (1,) if problem.scatter_dim else (1, 2, 4)
        return {"STREAMS": per_copy_space(problem), "OWN_SPLIT": splits}

    def seed_configs(
        self, problem: MatmulReduceScatter, hardware: Hardware
    ) -> list[dict[str, Any]]:
        return [
            {"STREAMS": count, "OWN_SPLIT": split}
            for count in first_streams(problem)
            for split in self.space(problem, hardware)["OWN_SPLIT"][:2]
        ]


VARIANT = Overlap()
