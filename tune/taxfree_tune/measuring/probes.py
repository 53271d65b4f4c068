"""Small kernels that measure a machine: copies, signals, and the order of program starts."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync, tiles
from taxfree_kernels.device.peers import Peers, translate


@triton.jit(do_not_specialize=["rank", "peer"])
def transfer(
    target_ptr, source_ptr, chunk, heap_bases, rank, peer, PULL: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy through registers between this rank and `peer`; each program copies one chunk.

    Args:
        target_ptr, source_ptr: tensors of num_programs * chunk elements. The peer's copy of the
            symmetric tensor is used: of the source when PULL, else of the target.
        chunk: elements; a multiple of 16.
    """
    peers = Peers(None, heap_bases, rank, None)
    if PULL:
        source_ptr = translate(source_ptr, peers, peer)
    else:
        target_ptr = translate(target_ptr, peers, peer)
    begin = tl.program_id(0) * chunk
    tiles.copy(target_ptr, source_ptr, begin, begin + chunk, BLOCK)


@triton.jit(do_not_specialize=["rank"])
def spread(
    target_ptr, source_ptr, chunk, heap_bases, rank, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Send to all peers at once: successive programs copy one chunk each to successive peers.

    So each peer receives equally from all ranks at any time, however far apart the ranks run.

    Args:
        target_ptr: symmetric, with as many elements as the source.
        source_ptr: of num_programs * chunk elements.
        chunk: elements; a multiple of 16.
    """
    program = tl.program_id(0)
    peer = (rank + 1 + program % (WORLD - 1)) % WORLD
    target_ptr = translate(target_ptr, Peers(None, heap_bases, rank, None), peer)
    begin = program * chunk
    tiles.copy(target_ptr, source_ptr, begin, begin + chunk, BLOCK)


@triton.jit
def read(maxima_ptr, source_ptr, BLOCK: tl.constexpr):
    """Measure loads: each program stores the maximum of one block, so that none is optimised away.

    Args:
        maxima_ptr: tensor of num_programs elements.
        source_ptr: of num_programs * BLOCK elements of the same dtype.
    """
    program = tl.program_id(0)
    block = tl.load(source_ptr + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(maxima_ptr + program, tl.max(block))


@triton.jit
def _hand_over(inbox_ptr, peers, peer, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    target = translate(inbox_ptr, peers, peer)
    tl.store(target + offsets, tl.zeros((BLOCK,), tl.int64) + peers.generation)
    sync.signal(peers, 0, peer, GROUP)


@triton.jit(do_not_specialize=["rank", "peer", "first_round", "rounds"])
def hand_over(
    inbox_ptr, stale_ptr, control_ptr, heap_bases, rank, peer, first_round, rounds,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ping-pong with `peer` in which each signal follows words for it, always in the same place.

    A round uses its number as the generation; it ends early when a wait times out. Between kernels
    that run concurrently, memory whose caching is not coherent with peers shows words of an earlier
    round.

    Args:
        inbox_ptr: int64 [BLOCK], symmetric.
        stale_ptr: int64 [BLOCK]: how often each word was not that of the current round.
    """
    offsets = tl.arange(0, BLOCK)
    stale = tl.zeros((BLOCK,), tl.int64)
    generation = tl.zeros((), tl.int64) + first_round
    end = generation + rounds
    arrived = rounds > 0
    while (generation < end) & arrived:
        peers = Peers(control_ptr, heap_bases, rank, generation)
        if rank < peer:
            _hand_over(inbox_ptr, peers, peer, GROUP, BLOCK)
        arrived = sync.wait(peers, 0, peer, GROUP)
        stale += (tl.load(inbox_ptr + offsets) != generation).to(tl.int64)
        if rank > peer:
            _hand_over(inbox_ptr, peers, peer, GROUP, BLOCK)
        generation += 1
    tl.store(stale_ptr + offsets, stale)


@triton.jit
def start_order(
    counter_ptr, tickets_ptr, chiplets_ptr,
    XCDS: tl.constexpr, BACKEND: tl.constexpr, BUSY: tl.constexpr,
):  # fmt: skip
    """Each program takes a ticket at its start, and stores it and its chiplet at its id.

    Args:
        counter_ptr: int32, 0 before the launch.
        tickets_ptr, chiplets_ptr: int32 [num_programs].
        BUSY: number of dependent loads that keep a program on its compute unit, long enough that
            all programs of one wave have started before the first of them ends.
    """
    ticket = sync.ticket(counter_ptr)
    seen = ticket
    for _ in range(BUSY):
        # The address depends on the last load; only we know that the offset is always 0.
        seen = tl.load(counter_ptr + (seen < 0).to(tl.int32), volatile=True)
    tl.store(tickets_ptr + tl.program_id(0), ticket)
    tl.store(chiplets_ptr + tl.program_id(0), chiplet_of_program(XCDS, BACKEND))


@triton.jit
def chiplet_of_program(XCDS: tl.constexpr, BACKEND: tl.constexpr):
    """The number of the chiplet that runs this program, int32.

    On AMD it is read from the hardware. Elsewhere it follows from the rule that AMD documents:
    programs are assigned round-robin to XCDS chiplets.
    """
    if BACKEND == "hip":
        register = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID)", "=s", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        chiplet = register & 15
    else:
        chiplet = tl.program_id(0) % XCDS
    return chiplet
