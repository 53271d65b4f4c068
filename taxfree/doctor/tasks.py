"""The measured probes: each runs on every rank of a worker group, on its open fabric.

All are collective, and return the same on every rank. Together they take a GPU some two seconds.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from taxfree.doctor.report import (
    BarrierTime,
    MemoryBandwidth,
    PeerBandwidth,
    PeerCopy,
    SignalTime,
    StartOrder,
)
from taxfree.measure import Call, time_together
from taxfree_kernels.device import probes
from taxfree_kernels.errors import KernelError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel

_LAUNCHES = 3  # of the start order
_WAVES = 8


@dataclass(frozen=True)
class _Sizes:
    """How much each probe moves.

    Args:
        peer_bytes: to or from a peer; two of them fit a slot of the fabric's pool.
        local_bytes: within a rank; several times any cache.
        programs, block: of a copying kernel; elements of float32 per step.
        rounds: round trips per launch.
        busy: loads of a program of the start order.
        repetitions: of each measurement.
    """

    peer_bytes: int
    local_bytes: int
    programs: int
    block: int
    rounds: int
    busy: int
    repetitions: int


def _sizes(fabric: Fabric) -> _Sizes:
    if fabric.backend == "interpreter":
        return _Sizes(256 << 10, 16 << 20, 2, 1 << 15, rounds=20, busy=1, repetitions=3)
    programs = 4 * fabric.hardware.compute_units
    return _Sizes(64 << 20, 256 << 20, programs, 4096, rounds=50, busy=20, repetitions=5)


def memory(fabric: Fabric) -> MemoryBandwidth:
    """Copy within each rank's memory."""
    sizes = _sizes(fabric)
    chunk, count = _chunks(sizes, sizes.local_bytes)
    source = torch.ones(count, dtype=torch.float32, device=fabric.device)
    target = torch.zeros_like(source)
    kernel = _transfer(fabric, sizes, pull=False)

    def by_kernel(_: int) -> None:
        kernel(target, source, chunk, fabric.heap_bases, fabric.rank, fabric.rank)

    def by_torch(_: int) -> None:
        target.copy_(source)

    rates = _rates(fabric, [by_kernel, by_torch], 2 * source.nbytes)
    return MemoryBandwidth(*rates)


def order(fabric: Fabric) -> StartOrder:
    """Let programs take tickets; those of a launch fill the device several times."""
    resident, options = 1, {}
    if fabric.backend != "interpreter":  # two programs of 1024 threads fill an SM, and a CU
        resident = 2 * fabric.hardware.compute_units
        options = {"num_warps": 1024 // fabric.hardware.warp_size}
    programs, chiplets = _WAVES * resident, fabric.hardware.num_xcds
    kernel = Kernel(probes.start_order, programs, {"BUSY": _sizes(fabric).busy}, options)
    counter = torch.zeros(2, dtype=torch.int32, device=fabric.device)
    tickets = torch.zeros(programs, dtype=torch.int32, device=fabric.device)
    largest = 0
    for _ in range(_LAUNCHES):
        counter.zero_()
        kernel(counter, tickets)
        fabric.synchronize()
        largest = max(largest, largest_inversion(tickets.tolist(), chiplets))
    return StartOrder(programs, resident, chiplets, largest)


def largest_inversion(tickets: Sequence[int], chiplets: int = 1) -> int:
    """The most places by which a program started before its turn.

    Args:
        tickets: by program id, each number once.
        chiplets: to which ids are dealt out in turn; only the order within each counts.
    """
    largest = 0
    for chiplet in range(chiplets):
        own = tickets[chiplet::chiplets]
        place = {ticket: index for index, ticket in enumerate(sorted(own))}
        largest = max([largest, *(index - place[ticket] for index, ticket in enumerate(own))])
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


def copies(fabric: Fabric) -> tuple[PeerCopy, ...]:
    """Copy to the peer at each distance by torch, all ranks at once."""
    return tuple(
        PeerCopy(distance, _copy_rate(fabric, distance)) for distance in range(1, fabric.world_size)
    )


def signals(fabric: Fabric) -> tuple[SignalTime, ...]:
    """Play ping-pong between rank 0 and each peer in turn.

    Uses the pool's own signals, with generations of its own: the pool is reset behind it.
    """
    rounds = _sizes(fabric).rounds
    times = []
    for peer in range(1, fabric.world_size):
        call = _ping_pong(fabric, peer, rounds)
        (timing,) = time_together(fabric, [(call, "eager")], _sizes(fabric).repetitions)
        fabric.pool.check()
        times.append(SignalTime(peer, timing.median_us / rounds))
    fabric.pool.reset()
    return tuple(times)


# -- helpers --


def _chunks(sizes: _Sizes, size: int) -> tuple[int, int]:
    """Elements of float32 per program, in whole blocks, and together: about `size` bytes."""
    blocks = max(1, size // 4 // sizes.programs // sizes.block)
    return blocks * sizes.block, blocks * sizes.block * sizes.programs


def _transfer(fabric: Fabric, sizes: _Sizes, *, pull: bool) -> Kernel:
    options = {} if fabric.backend == "interpreter" else {"num_warps": 8}
    constants = {"PULL": pull, "BLOCK": sizes.block}
    return Kernel(probes.transfer, sizes.programs, constants, options)


def _rates(fabric: Fabric, calls: Sequence[Call], size: int) -> list[float]:
    """GB/s of calls that move `size` bytes each."""
    timings = time_together(fabric, [(call, "eager") for call in calls], _sizes(fabric).repetitions)
    return [size / timing.median_us * 1e-3 for timing in timings]


def _peer_rate(fabric: Fabric, distance: int, pull: bool) -> float:
    sizes = _sizes(fabric)
    chunk, count = _chunks(sizes, sizes.peer_bytes)
    peer = (fabric.rank + distance) % fabric.world_size
    kernel = _transfer(fabric, sizes, pull=pull)

    def call(source: torch.Tensor, target: torch.Tensor) -> None:
        kernel(target, source, chunk, fabric.heap_bases, fabric.rank, peer)

    return _checked_rate(fabric, count, call, distance if pull else -distance)


def _copy_rate(fabric: Fabric, distance: int) -> float:
    sizes = _sizes(fabric)
    _, count = _chunks(sizes, sizes.peer_bytes)
    peer = (fabric.rank + distance) % fabric.world_size

    def call(source: torch.Tensor, target: torch.Tensor) -> None:
        _seen_at(fabric, target, peer).copy_(source)

    return _checked_rate(fabric, count, call, -distance)


def _checked_rate(
    fabric: Fabric,
    count: int,
    call: Callable[[torch.Tensor, torch.Tensor], None],
    from_distance: int,
) -> float:
    """GB/s of `call(source, target)`, which fills the target of a rank from a peer's source."""
    both, _ = fabric.pool.slots(2 * count, torch.float32)
    source, target = both[:count], both[count:]
    source.fill_(fabric.rank)
    target.fill_(-1)
    fabric.barrier()
    (rate,) = _rates(fabric, [lambda _: call(source, target)], source.nbytes)
    sender = (fabric.rank + from_distance) % fabric.world_size
    wrong = int((target != sender).sum())
    fabric.barrier()  # nobody fills a target that is still looked at
    if wrong:
        raise KernelError(f"{wrong} of {count} words from rank {sender} arrived wrong")
    return rate


def _seen_at(fabric: Fabric, tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """A peer's copy of a symmetric float32 tensor, as a tensor of this rank."""
    bases = fabric.heap_bases.tolist()
    address = tensor.data_ptr() - bases[fabric.rank] + bases[peer]
    if fabric.backend == "interpreter":
        words = (ctypes.c_float * tensor.numel()).from_address(address)
        return torch.frombuffer(words, dtype=tensor.dtype)
    import torch.distributed._symmetric_memory as symm_mem

    handle = symm_mem.rendezvous(tensor, fabric.group.group_name)  # that of the arena: no exchange
    start = handle.get_buffer(peer, (1,), tensor.dtype).data_ptr()
    offset = (address - start) // tensor.itemsize
    return handle.get_buffer(peer, tuple(tensor.shape), tensor.dtype, offset)


def _ping_pong(fabric: Fabric, peer: int, rounds: int) -> Call:
    """Rounds of rank 0 with `peer`, numbered on from call to call; other ranks do nothing."""
    if fabric.rank not in (0, peer):
        return lambda _: None
    kernel = Kernel(
        probes.ping_pong,
        grid=1,
        constants={"WORLD": fabric.world_size, "BACKEND": fabric.backend},
        options={} if fabric.backend == "interpreter" else {"num_warps": 1},
    )
    first_round = itertools.count(1, rounds)

    def call(_: int) -> None:
        kernel(
            fabric.pool.control,
            fabric.heap_bases,
            fabric.rank,
            peer if fabric.rank == 0 else 0,
            next(first_round),
            rounds,
        )

    return call
