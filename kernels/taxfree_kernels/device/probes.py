"""Small kernels that measure what a machine does: copies, signals, and the order of starts."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync, tiles


@triton.jit(do_not_specialize=["rank", "peer"])
def transfer(
    target_ptr, source_ptr, chunk, heap_bases, rank, peer,
    PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy through registers between this rank and `peer`; each program copies one chunk.

    Args:
        target_ptr, source_ptr: tensors of num_programs * chunk elements. The peer's copy of the
            symmetric one is used: of the source when PULL, else of the target. Where `peer` is
            the own rank, neither has to be symmetric.
        chunk: elements; a multiple of 16.
    """
    if PULL:
        source_ptr = sync.translate(source_ptr, heap_bases, rank, peer)
    else:
        target_ptr = sync.translate(target_ptr, heap_bases, rank, peer)
    begin = tl.program_id(0) * chunk
    tiles.copy(target_ptr, source_ptr, begin, begin + chunk, BLOCK)


@triton.jit(do_not_specialize=["rank", "peer", "first_round", "rounds"])
def ping_pong(
    control_ptr, heap_bases, rank, peer, first_round, rounds,
    WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Send a signal to `peer` and wait for its answer, `rounds` times; the lower rank begins.

    A round uses its number as the generation, so `first_round` goes on where the last launch
    ended. One program; it ends early when a wait times out.
    """
    generation = tl.zeros((), tl.int64) + first_round
    end = generation + rounds
    arrived = rounds > 0
    while (generation < end) & arrived:
        if rank < peer:
            sync.signal(
                control_ptr, 0, peer, generation, heap_bases, rank, WORLD=WORLD, BACKEND=BACKEND
            )
        arrived = sync.wait(
            control_ptr, 0, peer, generation, heap_bases, rank, WORLD=WORLD, BACKEND=BACKEND
        )
        if rank > peer:
            sync.signal(
                control_ptr, 0, peer, generation, heap_bases, rank, WORLD=WORLD, BACKEND=BACKEND
            )
        generation += 1


@triton.jit
def start_order(counter_ptr, tickets_ptr, BUSY: tl.constexpr):
    """Each program takes a ticket at its start, and stores it at its id.

    Args:
        counter_ptr: int32, 0 before the launch.
        tickets_ptr: int32 [num_programs].
        BUSY: loads, one after another, for which a program stays on its compute unit: long enough
            that those of one wave have all started before the first of them ends.
    """
    ticket = sync.ticket(counter_ptr)
    seen = ticket
    for _ in range(BUSY):
        # The address depends on the last load, in a way that only we know to be none.
        seen = tl.load(counter_ptr + (seen < 0).to(tl.int32), volatile=True)
    tl.store(tickets_ptr + tl.program_id(0), ticket)
