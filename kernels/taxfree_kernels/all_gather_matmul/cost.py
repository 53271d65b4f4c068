"""Cost formulas of all_gather_matmul's variants."""

from __future__ import annotations

import math

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.cost.machines import Machine
from taxfree_kernels.cost.pieces import (
    ITEM_BYTES,
    CostModel,
    Formula,
    Piece,
    announced_copy_us,
    barrier_us,
    collective,
    composed,
    copy,
    exchange_us,
    fetched_shards_us,
    launch_us,
    matmul,
    matmul_us,
    own_collective,
    product_us,
    tiles_us,
)
from taxfree_kernels.variant import Config


def _shard_bytes(problem: AllGatherMatmul) -> float:
    return problem.slot_bytes / problem.world_size


def _library(*, registered: bool) -> Formula:
    def formula(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
        shard = _shard_bytes(problem)
        pieces = []
        if registered or (problem.gather_dim == 0 and problem.m % problem.world_size):
            pieces.append(copy(machine, shard, views=True))
        peers = problem.world_size - 1
        pieces.append(collective(machine, peers * shard, peers, registered=registered))
        if problem.gather_dim == 1 and problem.m > 1:
            pieces.append(copy(machine, problem.slot_bytes, views=True))
        return [*pieces, matmul(machine, problem)]

    return formula


def _exchange(machine: Machine, problem: AllGatherMatmul, config: Config) -> float:
    """Time to exchange the shards, by programs that send one chunk each, or SENDERS that loop."""
    world, chunks, shard = problem.world_size, config["CHUNKS"], _shard_bytes(problem)
    to_self = "SENDERS" in config and problem.tiles_mix_ranks(config["BLOCK_M"])
    receivers = world - 1 + to_self
    messages = chunks * receivers
    rounds = math.ceil(messages / min(messages, config.get("SENDERS", messages)))
    block = ITEM_BYTES * config["SEND_BLOCK"]
    return exchange_us(machine, (world - 1) * shard, shard / chunks, block, rounds)


def _one_shot(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
    gather = _exchange(machine, problem, config)
    return [
        own_collective(machine, [gather], 2 * problem.slot_bytes),
        matmul(machine, problem),
    ]


def _push(*, tma: bool) -> Formula:
    def formula(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
        tiles, wave = tiles_us(machine, problem, config, tma=tma)
        send = _exchange(machine, problem, config)
        if problem.gather_dim == 1:  # the first wave computes its own share of K before it waits
            own, peers = wave / problem.world_size, problem.world_size - 1
            waits = -(-peers // config.get("SOURCES_PER_WAIT", 1)) if tma else 1
            computed = _in_turns(own, waits, send, wave - own) + tiles - wave
        elif tma and config["K_PARTS"] > 1:
            computed = _in_turns(0.0, config["K_PARTS"], send, wave) + tiles - wave
        elif problem.tiles_mix_ranks(config["BLOCK_M"]):
            computed = send + tiles
        else:
            computed = _waves_of_rows(machine, problem, tiles, wave, send)
        us = machine.tile_start_us + computed
        return [Piece("fused", us, launch_us(machine, tma=tma))]

    return formula


def _in_turns(begin: float, parts: int, send: float, work: float) -> float:
    """Time until all tiles are finished that wait for `parts` parts of the data."""
    end = begin
    for part in range(1, parts + 1):
        end = max(end, send * part / parts) + work / parts
    return end


def _waves_of_rows(
    machine: Machine, problem: AllGatherMatmul, tiles: float, wave: float, send: float
) -> float:
    """Time until all tiles are finished: own rows first, then the others in order of arrival."""
    world, waves, end = problem.world_size, round(tiles / wave), 0.0
    for done in range(1, waves + 1):
        others = max(0.0, (world * done / waves - 1) / (world - 1))
        arrived = (others > 0) * machine.signal_us + others * (send - machine.signal_us)
        end = max(end, arrived) + wave
    return end


def _push_two_kernel(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
    tiles, _ = tiles_us(machine, problem, config, tma=False)
    send = _exchange(machine, problem, config)
    us = machine.tile_start_us + send + tiles
    return [Piece("fused", us, 2 * machine.host_kernel_us, kernels=2)]


def _pull(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
    tiles, _ = tiles_us(machine, problem, config, tma=False)
    received = (problem.world_size - 1) * _shard_bytes(problem)
    columns = -(-problem.n // config["BLOCK_N"])
    pulled = machine.signal_us + 1e6 * received * columns / machine.pull_bytes_per_s
    return [Piece("fused", machine.tile_start_us + max(tiles, pulled), machine.host_kernel_us)]


def _overlap(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
    """Copy engines gather while the vendor's matmul computes, in parts, the rows already here.

    The last rank is the slowest: with ragged rows it may have none to compute in the meantime.
    """
    world, chunks, rows = problem.world_size, config["CHUNKS"], problem.shard_rows
    received = (world - 1) * _shard_bytes(problem)
    messages = (world - 1) * chunks
    filled = -(-problem.m // rows)  # shards that have rows
    others = filled - (filled == world)
    parts = -(-others * chunks // config["CHUNKS_PER_WAIT"])
    own = matmul_us(machine, rows, problem.n, problem.k) if filled == world else 0.0
    start, gap = machine.kernel_start_us, machine.gap_us

    # After an entry barrier, each stream alternates engine copies and kernels that signal them.
    turns = -(-messages // config["STREAMS"])
    link = turns * announced_copy_us(machine) + 1e6 * received / machine.link_bytes_per_s
    entered = barrier_us(machine) + gap
    multiplied = matmul_us(machine, -(-others * rows // parts), problem.n, problem.k)
    step = start + gap + multiplied + gap  # a kernel waits, then the matmul
    us = max(max(own, entered + link / parts) + parts * step, entered + link + step)
    us += start  # a kernel ends the call
    kernels, ops = 2 + messages + parts, messages + parts + (filled == world)
    host = kernels * machine.host_kernel_us + ops * machine.host_op_us
    host += 2 * config["STREAMS"] * machine.host_stream_us
    return [Piece("fused", us, host, kernels=kernels + ops)]


def _torch_fused(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
    """PyTorch's op: each rank publishes its shard; peers' are fetched and multiplied one by one.

    Copy engines fetch them. Barriers are before and after the publishing copy, and at the end.
    """
    world, shard = problem.world_size, _shard_bytes(problem)
    multiplied = matmul_us(machine, problem.m // world, problem.n, problem.k)
    pipeline = fetched_shards_us(machine, world, shard, multiplied)
    copies = copy(machine, shard).us + copy(machine, ITEM_BYTES * problem.m * problem.n).us
    barriers = 3
    gaps = (barriers + world + 1) * machine.gap_us
    us = barriers * barrier_us(machine) + copies + pipeline + gaps
    ops = 2 * world + 1  # copies of shards, matmuls, the copy of the product
    return [composed(machine, us, ops, barriers, waits=3)]


COST = CostModel(
    vendor_us=product_us,
    variants={
        "baseline": _library(registered=False),
        "registered": _library(registered=True),
        "one_shot": _one_shot,
        "push": _push(tma=False),
        "push_tma": _push(tma=True),
        "push_specialized": _push(tma=True),
        "push_two_kernel": _push_two_kernel,
        "pull": _pull,
        "overlap": _overlap,
        "torch_fused": _torch_fused,
    },
)
