"""Kernels of anybody, as the executor meets them."""

import torch
import triton
import triton.language as tl


@triton.jit
def places(out, X: tl.constexpr, Y: tl.constexpr, rank):
    """Each program of a grid [X, Y, z] writes its number."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sizes = tl.num_programs(0) * 100 + tl.num_programs(1) * 10 + tl.num_programs(2)
    tl.store(out + (z * Y + y) * X + x, 1000 * (x + 10 * y + 100 * z) + sizes + rank)


def grid_of_three(world):
    outs = [torch.zeros(24, dtype=torch.int32) for _ in range(world.ranks)]
    world.run(lambda rank: places[lambda meta: (meta["X"], 3, 4)](outs[rank], 2, 3, rank), calls=1)
    for rank, out in enumerate(outs):
        at = torch.arange(24, dtype=torch.int32)
        number = at % 2 + 10 * (at // 2 % 3) + 100 * (at // 6)
        assert torch.equal(out, 1000 * number + 234 + rank)


@triton.jit
def exchange(inboxes, out, peer, call, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.float32))
    tl.store(inbox + lanes, tl.load(out + lanes) + call)


def by_barriers(world):
    """Each call's launches are separated by barriers of hosts."""
    inbox = world.zeros((64,))
    outs = [torch.full((64,), float(rank)) for rank in range(world.ranks)]

    def call(rank, number):
        peer = (rank + 1) % world.ranks
        exchange[(1,)](inbox.bases, outs[rank], peer, number, 64, num_warps=1)
        world.barrier()
        outs[rank].copy_(inbox.local(rank))
        world.barrier()

    def right():
        for rank, out in enumerate(outs):
            assert torch.equal(out, torch.full((64,), float((rank - 3) % world.ranks + 3)))

    world.run(call, check=right)


@triton.jit
def wait_in_vain(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass


def hangs(world):
    flags = world.zeros((1,), torch.int32)
    world.run(lambda rank: wait_in_vain[(1,)](flags.local(rank)), calls=1)


def parts(world):
    """Only one rank comes to a barrier."""
    world.run(lambda rank: world.barrier() if rank == 0 else None, calls=1)


@triton.jit
def double(x):
    at = tl.arange(0, 64)
    tl.store(x + at, (tl.load(x + at).to(tl.float64) * 1.5).to(tl.float32))


def unknown(world):
    xs = [torch.ones(64) for _ in range(world.ranks)]
    world.run(lambda rank: double[(1,)](xs[rank]), calls=1)


def wrong(world):
    inbox = world.zeros((4,))
    assert inbox.local(0)[0] == 1, "it holds 0"


def no_world():
    pass
