"""One kernel gathers A over symmetric memory; the vendor's matmul follows.

An engine that uses symmetric memory would do this. The collective's latency shrinks to one signal,
the copy out of the inbox does the re-layout for gather_dim 1, and two launches remain.

Protocol. Sender programs as in ``push``; after them, one program per (source, chunk) waits for its
chunk and copies it from the inbox to its place in A. Every rank waits for every peer in each call,
so the two slots of the pool suffice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.fused import Gather, InputShard, inbox_scales, push_chunk
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.several import GatheringPlan, SeveralWeights
from taxfree_kernels.all_gather_matmul.spaces import send_block
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Memory
from taxfree_kernels.device.tiles import select
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.spaces import nearest_first
from taxfree_kernels.variant import Config, Space, Step, resized
from taxfree_kernels.vendor import multiply_into, try_fp8


class ScaledRows(NamedTuple):
    """Rows in fp8 and the scales that travel with them."""

    ptr: Any
    scale_ptr: Any


@triton.jit
def _place(target_ptr, block_ptr, begin, end, columns, pitch, arrived, BLOCK: tl.constexpr):
    """Copy elements [begin, end) of a block of whole rows to their places in a matrix."""
    for start in range(begin, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < end
        tile = tl.load(block_ptr + offsets, mask=mask)
        if tile.dtype.primitive_bitwidth == 8:
            tile = tl.where(arrived, tile, tl.full((), float("nan"), tl.float32).to(tile.dtype))
        else:
            tile = tl.where(arrived, tile, float("nan"))
        tl.store(target_ptr + offsets // columns * pitch + offsets % columns, tile, mask=mask)


@triton.jit(do_not_specialize=["rank", "own_rows", "m", "shard_rows"])
def _gather(
    a, own_rows, gathered, memory, rank, m, k, shard_rows, shard_columns,
    GROUP: tl.constexpr, GATHER: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(memory, rank)
    senders = GATHER.CHUNKS * (GROUP.WORLD - 1)
    a_ptr, a_scale_ptr, gathered_ptr = a, None, gathered
    if GATHER.SCALE_COLUMNS > 0:
        a_ptr, a_scale_ptr, gathered_ptr = a.ptr, a.scale_ptr, gathered.ptr
    shard = InputShard(a_ptr, own_rows, shard_rows, shard_columns, a_scale_ptr)
    if program < senders:
        push_chunk(program, shard, slot_ptr, peers, GROUP, GATHER)
    else:
        chunk = (program - senders) // GROUP.WORLD
        source = (rank + (program - senders) % GROUP.WORLD) % GROUP.WORLD
        chunk_rows = tl.cdiv(shard_rows, GATHER.CHUNKS)
        first_row = tl.where(GATHER.GATHER_DIM == 0, source * shard_rows, 0)
        begin = chunk * chunk_rows
        end = min(min(begin + chunk_rows, shard_rows), m - first_row)
        arrived = rank >= 0
        if source != rank:
            arrived = sync.wait(peers, chunk, source, GROUP)
        inbox_block_ptr = slot_ptr + source.to(tl.int64) * shard_rows * shard_columns
        block_ptr = select(source == rank, a_ptr, inbox_block_ptr, ALIGNMENT)
        first_column = tl.where(GATHER.GATHER_DIM == 0, 0, source * shard_columns)
        target_ptr = gathered_ptr + first_row.to(tl.int64) * k + first_column
        _place(
            target_ptr, block_ptr, begin * shard_columns, end * shard_columns, shard_columns, k,
            arrived, GATHER.SEND_BLOCK,
        )  # fmt: skip
        if GATHER.SCALE_COLUMNS > 0:
            WIDTH: tl.constexpr = GATHER.SCALE_COLUMNS
            PITCH: tl.constexpr = WIDTH if GATHER.GATHER_DIM == 0 else GROUP.WORLD * WIDTH
            scales_ptr = inbox_scales(slot_ptr, shard, GROUP) + source * shard_rows * WIDTH
            first_scale = tl.where(GATHER.GATHER_DIM == 0, first_row, source) * WIDTH
            _place(
                gathered.scale_ptr + first_scale,
                select(source == rank, a_scale_ptr, scales_ptr, 4 if WIDTH % 4 else 16),
                begin * WIDTH, end * WIDTH, WIDTH, PITCH, arrived, GATHER.SCALE_BLOCK,
            )  # fmt: skip
    sync.leave(memory.control_ptr)


class OneShotPlan(GatheringPlan):
    """Our gather into a buffer, then the vendor's matmul on it."""

    launches = 2

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        dtype = getattr(torch, problem.factor_dtype(fabric.hardware.architecture))
        world, chunks = problem.world_size, config["CHUNKS"]
        self._problem, self._rank = problem, fabric.rank
        try_fp8(problem, fabric.device, problem.bias)
        slots = fabric.pool.slots(problem.inbox_elements, dtype)
        self._memory = Memory(*slots, fabric.pool.control, None, None, fabric.heap_bases)
        sources = world if problem.gather_dim == 1 else 1
        scales = (problem.m, sources * problem.scale_columns)
        self._a = fabric.workspace.scratch(((problem.m, problem.k), dtype), (scales, torch.float32))
        block = send_block(problem, fabric.hardware)
        is_aligned = problem.shard_columns * dtype.itemsize % 16 == 0
        self._gather = Kernel(
            _gather,
            grid=chunks * (2 * world - 1),
            constants={
                "GROUP": Group(world, fabric.backend),
                "GATHER": Gather.of(problem, config, SEND_BLOCK=block),
                "ALIGNMENT": 16 if is_aligned else dtype.itemsize,
            },
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, m: int) -> tuple[torch.Tensor, torch.Tensor, Kernel, int]:
        """Buffers for A and its scales, the kernel for m rows, and this rank's number of rows."""
        problem, (whole, scales) = resized(self._problem, m=m), self._a()
        target: Any = ScaledRows(whole, scales) if problem.scale_columns else whole
        last_args = (
            target, self._memory, self._rank, m, problem.k, problem.shard_rows,
            problem.shard_columns,
        )  # fmt: skip
        kernel = self._gather.resized(self._gather.grid, last_args)
        return whole[:m], scales[:m], kernel, problem.rows_of(self._rank)

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size][2],)

    def gathered(self, a: torch.Tensor, m: int, *scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole, scales, gather, own_rows = self._sized[m]
        if not self._problem.scale_columns:
            gather(a, own_rows)
            return whole, *scale
        gather(ScaledRows(a, *scale), own_rows)
        return whole, scales

    def steps(self, *tensors: Any) -> list[Step]:
        a, weight, bias, *scales, out = tensors
        whole, scale, gather, own_rows = self._sized[out.shape[0]]
        rows: Any = a
        if self._problem.scale_columns:
            rows, scales = ScaledRows(a, scales[0]), [scale, *scales[1:]]
        *args, _, shard_columns = gather.last_args
        without_rows = gather.resized(gather.grid, (*args, 0, shard_columns))
        return [
            Step(
                "gather",
                "collective",
                lambda: gather(rows, own_rows),
                latency_probe=lambda: without_rows(rows, 0),
            ),
            Step(
                "matmul",
                "consumer",
                lambda: multiply_into(
                    out, whole, weight, bias, *scales, is_fast=self._problem.fast_accumulation
                ),
                reads=whole,
                memory_bytes=whole.nbytes,
            ),
        ]


class OneShot(SeveralWeights):
    """Our one-shot gather, then the vendor's matmul."""

    plan_class = OneShotPlan
    fused = False

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        return spaces.unsupported_reason(problem)

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        return {"CHUNKS": spaces.send_space(problem, hardware)["CHUNKS"]}

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        counts = self.space(problem, hardware)["CHUNKS"]
        order = nearest_first(counts, spaces.sending_chunks(problem))
        return [{"CHUNKS": count} for count in order]


VARIANT = OneShot()
