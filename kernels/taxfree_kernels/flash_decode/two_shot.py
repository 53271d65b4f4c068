"""Like ``fused``, but each rank combines a share of the rows and sends the result to all.

For many rows, where the links are the bottleneck: each of W ranks sends W - 1 parts of all rows in
``fused``, but here about one part of all rows, then its finished share W - 1 times. A row crosses
two links, one after the other.

Protocol. Chunk c belongs to rank c % W. Pushing programs have the lowest ids, never wait, and send
one chunk of this rank's part to its owner. An owner's combiners wait only for pushing programs, and
send their chunk to all; the receivers, which come last, wait only for combiners. A receiver of call
g has heard from an owner that has heard from every rank in call g. So a rank in call g + 1 knows
that all ranks have left call g - 1, and the two payload slots of a pool suffice, although with few
rows not every rank owns a chunk, and then not every rank signals every other. (For calls of this
variant alone, one slot would be enough.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.early import wait_for_the_last
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import spaces
from taxfree_kernels.flash_decode.constants import chunk_rows
from taxfree_kernels.flash_decode.exchange import merge_into_inboxes, wait_for_rows
from taxfree_kernels.flash_decode.local import (
    DecodePlan,
    Exchange,
    ExchangingVariant,
    finishing_options,
)
from taxfree_kernels.flash_decode.merge import merge_ranks
from taxfree_kernels.flash_decode.peers import every_rank, store_at_peers
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.spaces import up_to
from taxfree_kernels.variant import Config, Plan, Space


@triton.jit
def _combine_for_all(
    chunk, slot_ptr, finished_ptr, part_elements, rows, control_ptr, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    SOURCES_BLOCK: tl.constexpr, V_DIM: tl.constexpr, OUT_ROWS: tl.constexpr,
):  # fmt: skip
    """Combine a chunk that this rank owns, send it to all, and signal them."""
    begin = chunk * CHUNK_ROWS
    end = min(begin + CHUNK_ROWS, rows)
    arrived = wait_for_rows(
        begin, end, control_ptr, generation, heap_bases, rank,
        WORLD, BACKEND, CHUNK_ROWS, CHUNK_ROWS,
    )  # fmt: skip
    peer, peer_mask = every_rank(rank, WORLD)
    peer_ptrs = sync.translate(finished_ptr + peer * 0, heap_bases, rank, peer)
    for first in range(begin, end, OUT_ROWS):
        row = first + tl.arange(0, OUT_ROWS)
        row_mask = row < end
        out, _ = merge_ranks(
            row, row_mask, slot_ptr, part_elements, rows, WORLD, SOURCES_BLOCK, V_DIM
        )
        out = tl.where(arrived, out, float("nan"))
        store_at_peers(peer_ptrs, peer_mask, out, row, row_mask, V_DIM)
    sync.signal(
        control_ptr, CHUNKS + chunk, peer, generation, heap_bases, rank, mask=peer_mask,
        WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip


@triton.jit
def _receive(
    chunk, finished_ptr, out_ptr, rows, control_ptr, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy a chunk that its owner has finished from the inbox to the output."""
    arrived = sync.wait(
        control_ptr, CHUNKS + chunk, chunk % WORLD, generation, heap_bases, rank,
        WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip
    BLOCK_V: tl.constexpr = triton.next_power_of_2(V_DIM)
    dv = tl.arange(0, BLOCK_V)
    begin = chunk * CHUNK_ROWS
    end = min(begin + CHUNK_ROWS, rows)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (dv < V_DIM)[None, :]
        at = row[:, None] * V_DIM + dv[None, :]
        tile = tl.load(finished_ptr + at, mask=mask)
        tl.store(out_ptr + at, tl.where(arrived, tile, float("nan")), mask=mask)


@triton.jit(do_not_specialize=["rank", "rows"])
def _two_shot(
    parts_ptr, split_elements, runs_ptr, out_ptr, inbox_ptr, slot_elements, part_elements, rows,
    control_ptr, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, CHUNKS: tl.constexpr, COMBINERS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, Q_HEADS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr,
    SOURCES_BLOCK: tl.constexpr, OUT_ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    slot_ptr = inbox_ptr + (generation % 2) * slot_elements
    finished_ptr = tl.cast(slot_ptr + WORLD * part_elements, out_ptr.dtype)
    wait_for_the_last(BACKEND)
    if program < CHUNKS:
        owner = program % WORLD
        owners = owner + tl.arange(0, 1)
        merge_into_inboxes(
            program, owners, owners >= 0, parts_ptr, split_elements, runs_ptr,
            slot_ptr, part_elements, rows, heap_bases, rank,
            CHUNK_ROWS, Q_HEADS, PARTS, PARTS_BLOCK, V_DIM, ROWS,
        )  # fmt: skip
        sync.signal(
            control_ptr, program, owner, generation, heap_bases, rank, WORLD=WORLD, BACKEND=BACKEND
        )
    elif program < CHUNKS + COMBINERS:
        chunk = (program - CHUNKS) * WORLD + rank
        if chunk < CHUNKS:
            _combine_for_all(
                chunk, slot_ptr, finished_ptr, part_elements, rows,
                control_ptr, generation, heap_bases, rank,
                WORLD, BACKEND, CHUNKS, CHUNK_ROWS, SOURCES_BLOCK, V_DIM, OUT_ROWS,
            )  # fmt: skip
    else:
        _receive(
            program - CHUNKS - COMBINERS, finished_ptr, out_ptr, rows,
            control_ptr, generation, heap_bases, rank,
            WORLD, BACKEND, CHUNKS, CHUNK_ROWS, V_DIM, ROWS,
        )  # fmt: skip
    sync.leave(control_ptr)


class TwoShotPlan(DecodePlan):
    """The splits, then push, combine and receive."""

    launches = 2

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config)
        self._exchange = exchange = Exchange(problem, fabric, config, chunk_rows(problem, config))
        combiners = -(-exchange.chunks // problem.world_size)
        self._kernel = Kernel(
            _two_shot,
            grid=2 * exchange.chunks + combiners,
            constants=exchange.constants
            | self.attention.merging_constants(config["ROWS"])
            | {"CHUNKS": exchange.chunks, "COMBINERS": combiners},
            options=finishing_options(fabric, config),
        )

    def finishing(self, problem: FlashDecode) -> tuple[Kernel, ...]:
        return (self._kernel.resized(self._kernel.grid, self._exchange.args(problem)),)

    def finish(self, out: torch.Tensor, *kernels: Kernel) -> None:
        (kernel,) = kernels
        kernel(*self.attention.parts, out)


class TwoShot(ExchangingVariant):
    """Each rank combines its share, then pushes it."""

    name = "two_shot"

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {**super().space(problem, hardware), **spaces.last_space(hardware)}

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        space = self.space(problem, hardware)
        first, *others = super().first_configs(problem, hardware)
        rows = up_to(max(first["ROWS"] // 4, 1), space["ROWS"])[-1]
        finer = first | {"CHUNKS": space["CHUNKS"][-1], "ROWS": rows}
        combined = [  # one program combines a whole chunk
            config | {"OUT_ROWS": up_to(config["ROWS"], space["OUT_ROWS"])[-1]}
            for config in (first, finer, *others)
        ]
        return spaces.runnable(problem, hardware, combined)

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return TwoShotPlan(problem, fabric, config)


VARIANT = TwoShot()
