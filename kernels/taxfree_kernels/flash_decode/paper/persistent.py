"""One kernel: the last split of some heads to finish merges and pushes them; combiners wait.

Removes the last launch: the parts of heads whose splits are done travel while other splits still
run, and combiners start on compute units as these become free.

Protocol. Splits have the lowest ids and never wait, not even those that merge and push: each
increments a counter, and the last one of a chunk goes on. Combiners wait only for pushing splits,
of this rank (lower ids) and of peers (which never wait). Every row has a combiner, so in each call
every rank signals, and waits for, every peer on every channel, as in ``fused``; or, if `LL`,
sends words to every peer and receives words from it, also as in ``fused``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import CHANNELS, Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import plans, spaces
from taxfree_kernels.flash_decode.attend import Inputs, attend
from taxfree_kernels.flash_decode.exchange import combine, merge_and_push, slot_of_parts
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.spaces import power_of_2, within
from taxfree_kernels.variant import Config, Plan, Space, resized


class Roles(NamedTuple):
    """The roles of programs: ``ROLES: tl.constexpr``.

    Args:
        ATTENDING: number of programs that attend; the others combine.
        COLUMNS: groups of query heads per sequence; each is a column of programs.
        CHUNK_GROUPS: groups whose rows form a chunk.
    """

    ATTENDING: int
    COLUMNS: int
    CHUNK_GROUPS: int


@triton.jit(do_not_specialize=["batch", "capacity", "rank", "rows"])
def _decode(
    inputs, batch, capacity, parts, rank, out_ptr, counters_ptr, inbox, rows, pool,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, ROLES: tl.constexpr,
    EXCHANGE: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    control_ptr, heap_bases = pool
    if sync.TIMELINE != "":
        sync.running_generation(control_ptr)  # traces the start; splits read it at their end
    if program < ROLES.ATTENDING:
        group, splits = attend(program, inputs, batch, capacity, parts, rank, GROUP, HEADS, SPLIT)
        if group >= 0:
            chunk = group // ROLES.CHUNK_GROUPS
            members = _members(chunk, splits, ROLES.COLUMNS, ROLES.CHUNK_GROUPS)
            if sync.arrive(counters_ptr + chunk, members, GROUP):
                generation = sync.running_generation(control_ptr)
                peers = Peers(control_ptr, heap_bases, rank, generation)
                target_ptr, _ = slot_of_parts(inbox, control_ptr, generation, EXCHANGE.PACKED)
                merge_and_push(
                    chunk, parts, target_ptr, inbox.stride_part, rows, peers, GROUP, EXCHANGE, MERGE
                )
    else:
        generation = sync.running_generation(control_ptr)
        peers = Peers(control_ptr, heap_bases, rank, generation)
        tile = program - ROLES.ATTENDING
        slot_ptr, turn = slot_of_parts(inbox, control_ptr, generation, EXCHANGE.PACKED)
        if EXCHANGE.PACKED:
            packets.empty_last_turn(
                control_ptr, inbox.ptr, inbox.stride_slot, turn, GROUP.WORLD * inbox.stride_part,
                tile, tl.num_programs(0) - ROLES.ATTENDING,
            )  # fmt: skip
        combine(tile, slot_ptr, out_ptr, inbox.stride_part, rows, peers, GROUP, EXCHANGE)
    if EXCHANGE.PACKED:
        packets.leave_turn(control_ptr)
    sync.leave(control_ptr)


@triton.jit
def _members(chunk, splits, COLUMNS: tl.constexpr, CHUNK_GROUPS: tl.constexpr):
    """Number of programs that attend for a chunk of groups; a sequence has COLUMNS in a row."""
    first = tl.arange(0, splits.shape[0]) * COLUMNS
    begin = chunk * CHUNK_GROUPS
    within = tl.minimum(first + COLUMNS, begin + CHUNK_GROUPS) - tl.maximum(first, begin)
    return tl.sum(splits * tl.maximum(within, 0), 0)


class PersistentPlan(Plan):
    """One launch."""

    launches = 1

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        self._problem = problem
        self._attention = plans.LocalAttention(problem, fabric, config)
        head_blocks = -(-problem.group_size // config["BLOCK_H"])
        kv_heads = _kv_heads_per_chunk(problem, config)
        self._exchange = plans.PartsExchange(problem, fabric, config, kv_heads * problem.group_size)
        self._roles = Roles(
            self._attention.programs(problem.batch),
            problem.kv_heads * head_blocks,
            kv_heads * head_blocks,
        )
        self._counters = fabric.workspace.counters(self._exchange.chunks)
        self._kernel = Kernel(
            _decode,
            grid=0,
            constants=self._attention.constants
            | self._exchange.constants
            | {"MERGE": self._attention.merging(config["ROWS"]), "ROLES": self._roles},
            options=self._attention.options,
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, size: plans.Size) -> Kernel:
        """A kernel for each batch: programs find their role by a constant."""
        problem = resized(self._problem, batch=size[0], kv_len_per_rank=size[1])
        attending = self._attention.programs(problem.batch)
        inbox, rows, *pool, _ = self._exchange.args(problem)
        return self._kernel.resized(
            attending + self._exchange.combiners(problem),
            (self._counters(), inbox, rows, tuple(pool)),
            ROLES=self._roles._replace(ATTENDING=attending),
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size, self._problem.kv_len_per_rank],)

    def run(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        *inputs, out = tensors
        assert out is not None
        attention, size = self._attention, plans.size_of(inputs)
        self._sized[size](Inputs(*attention.args(inputs)), *attention.last_args(size), out)
        return out


def _kv_heads_per_chunk(problem: FlashDecode, config: Config) -> int:
    """Groups per chunk: from CHUNKS, or more if there were more chunks than channels otherwise.

    One with LL, which needs no signal.
    """
    if config["LL"]:
        return 1
    kv_heads = problem.batch * problem.kv_heads
    return -(-kv_heads // min(config["CHUNKS"], CHANNELS))


class Persistent(plans.ExchangingVariant):
    """Splits, merges and combiners in one kernel."""

    plan_class = PersistentPlan
    searched = False
    slots = 3

    def space(self, problem: FlashDecode, hardware: Hardware) -> Space:
        return {**super().space(problem, hardware), **spaces.words_space(problem)}

    def seed_configs(self, problem: FlashDecode, hardware: Hardware) -> list[dict[str, Any]]:
        """Seed configs with few merging programs, each of which merges about a chunk at once.

        Signals come first: combiners wait while splits run, and polls of all their words would take
        memory bandwidth from the splits.
        """
        space = self.space(problem, hardware)
        configs = super().seed_configs(problem, hardware)
        if hardware.backend == "interpreter":
            return configs
        combined = -(-problem.rows // hardware.compute_units)

        def sized(config: Config) -> dict[str, Any]:
            chunk = _kv_heads_per_chunk(problem, config) * problem.group_size
            return within(space, {**config, "ROWS": power_of_2(chunk, 1), "OUT_ROWS": combined})

        signals_first = sorted(configs, key=lambda config: bool(config["LL"]))
        return spaces.runnable(problem, hardware, [sized(config) for config in signals_first])


VARIANT = Persistent()
