"""The vendor's matmul, then one kernel of ours that sums over symmetric memory in one step.

What an engine with symmetric memory would do: the collective's latency shrinks to one signal; bias,
residual and normalisation are applied before the sum is stored; two launches remain. Every rank
sends its whole partial sum to every peer, in the problem's own dtype: for few rows.

Protocol. Sender programs have the lowest ids: each stores a chunk of this rank's partial sum into
one peer's inbox, signals that peer, and never waits. The programs above them each wait for a chunk
from all peers and add the partial sums in rank order, so that all ranks get the same bits. When the
sum is normalised, each of these programs handles a row, and waits for the chunks that overlap it.
In every call each chunk, even an empty one, is signalled to every peer, and each chunk that has
elements is waited for from every peer, so the two slots of the pool suffice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.exchange import wait_for_everybody
from taxfree_kernels.device.tiles import copy
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.matmul_all_reduce.problem import ONE_SHOT_ELEMENTS, MatmulAllReduce
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.addends import with_addends
from taxfree_kernels.partial_sums.chunks import (
    bounds_of_chunk,
    chunks_with,
    with_sources,
)
from taxfree_kernels.partial_sums.constants import block_row
from taxfree_kernels.partial_sums.rows import sum_and_normalise
from taxfree_kernels.partial_sums.sizes import padded_elements
from taxfree_kernels.partial_sums.sums import SumPlan
from taxfree_kernels.variant import Config, Plan, Space, Variant


@triton.jit(do_not_specialize=["rank"])
def _one_shot(
    partial_ptr, bias_ptr, residual_ptr, norm_weight_ptr, eps_ptr, out_ptr,
    inbox_ptr, slot_elements, stride_source, control_ptr, heap_bases, rank, sixteens, count, n,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROW: tl.constexpr, CHUNKS: tl.constexpr, REDUCERS: tl.constexpr, SEND_BLOCK: tl.constexpr,
):  # fmt: skip
    """See the module; BLOCK_ROW is 0 when the sum is not normalised, otherwise at least n."""
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    slot_ptr = tl.multiple_of(inbox_ptr + (generation % 2) * slot_elements, 16)
    senders = CHUNKS * (WORLD - 1)
    if program < senders:
        chunk = program // (WORLD - 1)
        peer = (rank + 1 + program % (WORLD - 1)) % WORLD
        begin, end = bounds_of_chunk(chunk, 0, sixteens, CHUNKS)
        own_ptr = slot_ptr + rank.to(tl.int64) * stride_source
        target_ptr = sync.translate(own_ptr, heap_bases, rank, peer)
        copy(target_ptr, partial_ptr, begin * 16, end * 16, SEND_BLOCK)
        sync.signal(
            control_ptr, chunk, peer, generation, heap_bases, rank, WORLD=WORLD, BACKEND=BACKEND
        )
    elif BLOCK_ROW > 0:
        row = program - senders
        chunk, chunk_end = chunks_with(row * n, (row + 1) * n, sixteens, CHUNKS)
        sum_and_normalise(
            row, chunk, chunk_end, partial_ptr, slot_ptr, stride_source, n,
            bias_ptr, residual_ptr, norm_weight_ptr, eps_ptr, out_ptr, count, n,
            control_ptr, generation, heap_bases, rank,
            WORLD, BACKEND, HAS_BIAS, HAS_RESIDUAL, CHUNKS, BLOCK_ROW, BUT_SELF=True,
        )  # fmt: skip
    else:
        chunk = (program - senders) // REDUCERS
        begin, end = bounds_of_chunk(chunk, 0, sixteens, CHUNKS)
        begin, end = bounds_of_chunk((program - senders) % REDUCERS, begin, end, REDUCERS)
        arrived = wait_for_everybody(
            control_ptr, chunk, generation, heap_bases, rank, WORLD, BACKEND, BUT_SELF=True
        )
        for start in range(begin * 16, end * 16, SEND_BLOCK):
            at = start + tl.arange(0, SEND_BLOCK)
            mask = at < end * 16
            total = tl.zeros((SEND_BLOCK,), tl.float32)
            total = with_sources(total, at, mask, partial_ptr, slot_ptr, stride_source, rank, WORLD)
            mask = mask & (at < count)
            total = with_addends(
                total, at % n, mask, at, mask, bias_ptr, residual_ptr, HAS_BIAS, HAS_RESIDUAL
            )
            total = tl.where(arrived, total, float("nan"))
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)
    sync.leave(control_ptr)


class OneShotPlan(SumPlan):
    """Our one-step sum."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, 16 * -(-problem.elements // 16))
        world, self._config = problem.world_size, config
        plane = padded_elements(problem.m, problem.n)
        self._inbox = fabric.pool.slots(world * plane, getattr(torch, problem.dtype))
        self._ranks = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        self._kernel = Kernel(
            _one_shot,
            grid=0,
            constants={
                "WORLD": world,
                "BACKEND": fabric.backend,
                "HAS_BIAS": problem.bias,
                "HAS_RESIDUAL": problem.residual,
                "BLOCK_ROW": block_row(problem),
                "CHUNKS": config["CHUNKS"],
                "REDUCERS": config["REDUCERS"],
                "SEND_BLOCK": config["SEND_BLOCK"],
            },
            options=compile_options(fabric.backend, config),
        )

    def _launch(self, problem: MatmulAllReduce) -> tuple[int, tuple[Any, ...]]:
        chunks = self._config["CHUNKS"]
        reducers = problem.m if problem.rms_norm else chunks * self._config["REDUCERS"]
        plane, sixteens = padded_elements(problem.m, problem.n), -(-problem.elements // 16)
        sizes = (sixteens, problem.elements, problem.n)
        return (
            chunks * (problem.world_size - 1) + reducers,
            (*self._inbox, plane, *self._ranks, *sizes),
        )


class OneShot(Variant):
    """Vendor matmul, one-shot all-reduce of ours."""

    name = "one_shot"
    fused = False

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.elements > ONE_SHOT_ELEMENTS:
            return "all of the partial sum would cross the link to every peer"
        return spaces.refuses_rows(problem)

    def space(self, problem: Any, hardware: Hardware) -> Space:
        reducers: tuple[int, ...] = (1, 2) if hardware.backend == "interpreter" else (1, 2, 4)
        if problem.rms_norm:  # one a row, whatever the chunks are
            reducers = (1,)
        return {**spaces.send_space(hardware, spaces.MOST_SIGNALS), "REDUCERS": reducers}

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        sent = spaces.partial_bytes(problem)
        configs = spaces.first_sends(self.space(problem, hardware), sent, problem.n)
        return [spaces.with_room_for_rows(problem, hardware, config) for config in configs]

    def refuses_config(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        return spaces.refuses_warps(problem, hardware, config)

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return OneShotPlan(problem, fabric, config)


VARIANT = OneShot()
