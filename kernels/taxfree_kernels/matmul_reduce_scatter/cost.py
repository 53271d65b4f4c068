"""Cost formulas of matmul_reduce_scatter's variants."""

from __future__ import annotations

from taxfree_kernels.cost.machines import Machine
from taxfree_kernels.cost.pieces import (
    ITEM_BYTES,
    CostModel,
    Formula,
    Piece,
    announced_copy_us,
    barrier_us,
    composed,
    copy,
    exchange_us,
    fetched_shards_us,
    matmul,
    matmul_us,
    own_collective,
    product_us,
    small,
)
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.reduction.cost import (
    kept_bytes,
    push,
    push_lamport,
    summed,
    then,
)
from taxfree_kernels.variant import Config


def _library(*, registered: bool) -> Formula:
    """The library's matmul, then its reduce-scatter; registered buffers cost a copy out."""

    def formula(machine: Machine, problem: MatmulReduceScatter, config: Config) -> list[Piece]:
        pieces = [matmul(machine, problem)]
        if problem.scatter_dim == 1:
            pieces.append(copy(machine, ITEM_BYTES * problem.elements, views=True))
        pieces.append(summed(machine, problem, registered=registered, rounds=1))
        if registered:
            pieces.append(copy(machine, kept_bytes(problem)))
        return pieces

    return formula


def _one_shot(machine: Machine, problem: MatmulReduceScatter, config: Config) -> Piece:
    """Every rank sends each rank the partial sum of its shard, which is added there."""
    kept, world = kept_bytes(problem), problem.world_size
    block = ITEM_BYTES * config["SEND_BLOCK"]
    sent = exchange_us(machine, (world - 1) * kept, kept / config["CHUNKS"], block)
    return own_collective(machine, [sent], (world + 1) * kept)


def _overlap(machine: Machine, problem: MatmulReduceScatter, config: Config) -> list[Piece]:
    """Copy engines scatter while the vendor's matmul computes, peers' shards first, in parts.

    Then each rank adds.
    """
    world, m, n = problem.world_size, problem.shard_rows, problem.shard_columns
    messages = (world - 1) * config["CHUNKS"]
    parts = -(-messages // config["CHUNKS_PER_WAIT"])
    start, gap = machine.kernel_start_us, machine.gap_us
    shard = float(ITEM_BYTES * m * n)
    link = 1e6 * (world - 1) * shard / machine.link_bytes_per_s
    # The copy of a matmul's result waits for earlier copies on the same stream.
    copied = -(-messages // config["STREAMS"]) * announced_copy_us(machine) + link
    part = matmul_us(machine, -(-(world - 1) * m // parts), n, problem.k) + gap
    turn = parts * part + matmul_us(machine, m, n, problem.k) + gap
    us = max(turn, parts * part + copied / parts, part + copied)
    us += gap + start + 1e6 * (world + 1) * shard / machine.memory_bytes_per_s  # the addition
    us += gap + start  # a kernel ends the call
    kernels, ops = 3 + messages, parts + 1 + messages
    waits = config["STREAMS"] * (parts + 3)
    host = kernels * machine.host_kernel_us + ops * machine.host_op_us
    host += waits * machine.host_stream_us
    return [Piece("fused", us, host, kernels=kernels + ops)]


def _torch_fused(machine: Machine, problem: MatmulReduceScatter, config: Config) -> list[Piece]:
    """PyTorch's op: per shard a matmul, a barrier, a copy from the peer, a barrier; then the sum.

    Its two streams hide copies behind matmuls, but not barriers, because the work of both is short.
    """
    world, kept = problem.world_size, kept_bytes(problem)
    m, n = problem.m, problem.n
    m, n = (m, n // world) if problem.scatter_dim == 1 else (m // world, n)
    multiplied = matmul_us(machine, m, n, problem.k)
    pipeline = fetched_shards_us(machine, world, kept, multiplied)
    barriers = 2 * world
    added = small(machine, (world + 1) * kept).us + copy(machine, kept).us
    gaps = (barriers + 2) * machine.gap_us
    us = pipeline + barriers * barrier_us(machine) + added + gaps
    ops = 2 * world - 1 + 3  # a kernel that sleeps, the sum, the copy of it
    return [composed(machine, us, ops, barriers, waits=2)]


COST = CostModel(
    vendor_us=product_us,
    variants={
        "baseline": _library(registered=False),
        "registered": _library(registered=True),
        "one_shot": then(_one_shot),
        "overlap": _overlap,
        "push": push,
        "push_two_kernel": push,
        "push_lamport": push_lamport,
        "push_lamport_specialized": push_lamport,
        "torch_fused": _torch_fused,
    },
)
