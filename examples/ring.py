"""A kernel in which each rank sends a row to the next one, as one would write it, with its checks.

On a CPU, without GPUs:

    taxfree check examples/ring.py::ring --ranks 2      # the waiting rank acquires: it holds
    taxfree check examples/ring.py::broken --ranks 2    # it does not: a race, and how to mend it
    taxfree check examples/ring.py::ring --ranks 4      # two rows are too few for a longer ring
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree.check import World

COLUMNS = 16


@triton.jit
def push(x, inboxes, flags, out, rank, call, RANKS: tl.constexpr, SEM: tl.constexpr):
    """Store a row into the next rank's inbox, and copy what the previous rank stored into ours.

    Args:
        x, out: [16] float32, of this rank.
        inboxes: [RANKS] addresses of [2, 16] float32; calls alternate between the two rows.
        flags: [RANKS] addresses of an int32, the number of finished calls.
    """
    columns = tl.arange(0, 16)
    row = call % 2 * 16
    peer = (rank + 1) % RANKS
    inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.float32)) + row
    tl.store(inbox + columns, tl.load(x + columns))
    flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, call + 1, sem="release", scope="sys")

    own_flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(own_flag, 0, sem=SEM, scope="sys") < call + 1:
        pass
    own_inbox = tl.load(inboxes + rank).to(tl.pointer_type(tl.float32)) + row
    tl.store(out + columns, tl.load(own_inbox + columns))


def ring(world: World, sem: str = "acquire") -> None:
    """Run the kernel on all ranks and compare its results."""
    inbox, flags = world.empty((2, COLUMNS)), world.zeros((1,), torch.int32)
    xs = [torch.full((COLUMNS,), float(rank)) for rank in range(world.ranks)]
    outs = [torch.empty(COLUMNS) for _ in xs]

    def call(rank: int, number: int) -> None:
        push[(1,)](xs[rank], inbox.bases, flags.bases, outs[rank], rank, number, world.ranks, sem)

    world.run(call)
    for rank, out in enumerate(outs):
        assert torch.equal(out, xs[rank - 1]), f"rank {rank} has another rank's row"


def broken(world: World) -> None:
    """The same with a relaxed wait: the row may be read before it is there."""
    ring(world, "relaxed")


if __name__ == "__main__":
    print(__doc__)
