"""The measured probes: each runs on every rank of a worker group, on its open fabric.

All are collective, and return the same on every rank. Sizes are such that together they keep a GPU
busy for a second or two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from taxfree._runtime.collectives import vote
from taxfree_kernels.device.peers import Group
from taxfree_kernels.errors import KernelError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_tune.doctor.report import (
    BarrierTime,
    Coherence,
    PeerBandwidth,
    Rates,
    SignalTime,
    StartOrder,
)
from taxfree_tune.measuring import probes
from taxfree_tune.measuring.bounds import peaks
from taxfree_tune.measuring.timer import Call, time_together
from taxfree_tune.profiling.clock_sync import compare_with_peers

#: to or from a peer, in one go; a slot of the pool holds what is sent and what is received, or as
#: much for all peers
HOST_PEER_BYTES, GPU_PEER_BYTES = 256 << 10, 64 << 20

_LAUNCHES = 3  # of the start order
_WAVES = 8
_WORDS = 1024  # of int64, that are handed over


@dataclass(frozen=True)
class _Sizes:
    """How much each probe moves.

    Args:
        peer_bytes: to or from a peer; two of them fit a slot of the fabric's pool.
        programs, block: of a copying kernel; elements of float32 per step.
        rounds: round trips per launch.
        busy: loads of a program of the start order.
        repetitions: of each measurement.
    """

    peer_bytes: int
    programs: int
    block: int
    rounds: int
    busy: int
    repetitions: int


def _sizes(fabric: Fabric) -> _Sizes:
    if fabric.backend == "interpreter":
        return _Sizes(HOST_PEER_BYTES, 2, 1 << 15, rounds=20, busy=1, repetitions=3)
    programs = 4 * fabric.hardware.compute_units
    return _Sizes(GPU_PEER_BYTES, programs, 4096, rounds=50, busy=20, repetitions=5)


def rates(fabric: Fabric) -> Rates:
    """Measure what bounds are computed with."""
    dense = peaks(fabric, "bfloat16")
    links = dense.link_bytes_per_s * 1e-9 if fabric.world_size > 1 else None
    return Rates(dense.flops_per_s * 1e-12, dense.memory_bytes_per_s * 1e-9, links)


def order(fabric: Fabric) -> StartOrder:
    """Let programs take tickets on each device; those of a launch fill it several times."""
    resident, options = 1, {}
    if fabric.backend != "interpreter":  # two programs of 1024 threads fill an SM, and a CU
        resident = 2 * fabric.hardware.compute_units
        options = {"num_warps": 1024 // fabric.hardware.warp_size}
    programs, chiplets = _WAVES * resident, fabric.hardware.num_xcds
    constants = {"XCDS": chiplets, "BACKEND": fabric.backend, "BUSY": _sizes(fabric).busy}
    kernel = Kernel(probes.start_order, programs, constants, options)
    counter = torch.zeros(2, dtype=torch.int32, device=fabric.device)
    tickets, places = torch.zeros(2, programs, dtype=torch.int32, device=fabric.device)
    largest = elsewhere = 0
    for _ in range(_LAUNCHES):
        counter.zero_()
        kernel(counter, tickets, places)
        fabric.synchronize()
        largest = max(largest, largest_inversion(tickets.tolist(), chiplets))
        elsewhere = max(elsewhere, off_their_chiplet(places.tolist(), chiplets))
    worst = [max(values) for values in zip(*vote(fabric.group, (largest, elsewhere)), strict=True)]
    return StartOrder(programs, resident, chiplets, *worst)


def off_their_chiplet(places: Sequence[int], chiplets: int) -> int:
    """The number of programs that do not run where round-robin would put them.

    Args:
        places: the chiplet of each program, by any numbers.
    """
    free, kept = set(places), 0
    for chiplet in range(chiplets):
        counts = Counter(core for core in places[chiplet::chiplets] if core in free)
        for core, count in counts.most_common(1):
            free.remove(core)
            kept += count
    return len(places) - kept


def largest_inversion(tickets: Sequence[int], chiplets: int = 1) -> int:
    """The most places by which a program started before its turn.

    Args:
        tickets: by program id, each number once.
        chiplets: to which ids are assigned round-robin; only the order within each counts.
    """
    largest = 0
    for chiplet in range(chiplets):
        own_tickets = tickets[chiplet::chiplets]
        rank_of = {ticket: index for index, ticket in enumerate(sorted(own_tickets))}
        largest = max(
            [largest, *(index - rank_of[ticket] for index, ticket in enumerate(own_tickets))]
        )
    return largest


def barrier(fabric: Fabric) -> BarrierTime:
    """Run the fabric's device barrier, eagerly and captured in a graph."""
    modes = ["eager", "graph"] if fabric.has_graphs else ["eager"]

    def call(_: int) -> None:
        fabric.device_barrier()

    timings = time_together(fabric, [(call, mode) for mode in modes], _sizes(fabric).repetitions)
    fabric.device_barrier.pool.check()
    times = [timing.median_us for timing in timings]
    return BarrierTime(times[0], times[1] if fabric.has_graphs else None)


def peers(fabric: Fabric) -> tuple[PeerBandwidth, ...]:
    """Push to, and pull from, the peer at each distance by a kernel, all ranks at once."""
    return tuple(
        PeerBandwidth(distance, *(_peer_rate(fabric, distance, pull) for pull in (False, True)))
        for distance in range(1, fabric.world_size)
    )


def coherence(fabric: Fabric) -> Coherence:
    """Hand words over between running kernels of rank 0 and each peer in turn.

    Uses the pool's signals and a slot: the pool is reset around it.
    """
    rounds, stale = _sizes(fabric).rounds, 0
    fabric.pool.reset()
    for peer in range(1, fabric.world_size):
        stale += _hand_over(fabric, peer, rounds)
        fabric.pool.check()
        fabric.barrier()
    fabric.pool.reset()
    return Coherence(rounds, sum(vote(fabric.group, stale)))


def signals(fabric: Fabric) -> tuple[SignalTime, ...]:
    """Play ping-pong between rank 0 and each peer in turn."""
    compared = compare_with_peers(fabric, _sizes(fabric).rounds)
    return tuple(SignalTime(peer, 2e-3 * clock.error_ns) for peer, clock in enumerate(compared, 1))


# -- helpers --


def _chunks(sizes: _Sizes) -> tuple[int, int]:
    """Elements of float32 per program, in whole blocks, and together: about `peer_bytes`."""
    blocks = max(1, sizes.peer_bytes // 4 // sizes.programs // sizes.block)
    return blocks * sizes.block, blocks * sizes.block * sizes.programs


def _peer_rate(fabric: Fabric, distance: int, pull: bool) -> float:
    sizes = _sizes(fabric)
    chunk, _ = _chunks(sizes)
    source, target = _buffers(fabric)
    peer = (fabric.rank + distance) % fabric.world_size
    options = {} if fabric.backend == "interpreter" else {"num_warps": 8}
    constants = {"PULL": pull, "BLOCK": sizes.block}
    kernel = Kernel(probes.transfer, sizes.programs, constants, options)

    def call(_: int) -> None:
        kernel(target, source, chunk, fabric.heap_bases, fabric.rank, peer)

    return _checked_rate(fabric, call, distance if pull else -distance)


def _buffers(fabric: Fabric) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target, float32, in the symmetric heap; always the same two."""
    _, count = _chunks(_sizes(fabric))
    both, _ = fabric.pool.slots(2 * count, torch.float32)
    return both[:count], both[count:]


def _checked_rate(fabric: Fabric, call: Call, from_distance: int) -> float:
    """GB/s of a call that fills each rank's target from the source of the rank at a distance."""
    source, target = _buffers(fabric)
    source.fill_(fabric.rank)
    target.fill_(-1)
    fabric.barrier()
    (timing,) = time_together(fabric, [(call, "eager")], _sizes(fabric).repetitions)
    sender = (fabric.rank + from_distance) % fabric.world_size
    wrong = int((target != sender).sum())
    fabric.barrier()  # nobody fills a target that is still looked at
    if wrong:
        raise KernelError(f"{wrong} of {len(target)} words from rank {sender} arrived wrong")
    return source.nbytes / timing.median_us * 1e-3


def _hand_over(fabric: Fabric, peer: int, rounds: int) -> int:
    """Stale words that this rank saw in rounds of rank 0 with `peer`."""
    if fabric.rank not in (0, peer):
        return 0
    inbox, _ = fabric.pool.slots(_WORDS, torch.int64)
    stale = torch.zeros(_WORDS, dtype=torch.int64, device=fabric.device)
    other = peer if fabric.rank == 0 else 0
    constants = {"GROUP": Group(fabric.world_size, fabric.backend), "BLOCK": _WORDS}
    options = {} if fabric.backend == "interpreter" else {"num_warps": 1}
    kernel = Kernel(probes.hand_over, 1, constants, options)
    kernel(inbox, stale, fabric.pool.control, fabric.heap_bases, fabric.rank, other, 1, rounds)
    fabric.synchronize()
    return int(stale.sum())
