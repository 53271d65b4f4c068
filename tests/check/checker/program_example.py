"""A program as Iris' examples are: torchrun starts it on each rank, and it takes arguments."""

import argparse
import os

import iris
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from iris import DeviceContext


@triton.jit
def produce(context, x, inbox, flags, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Store a block of x into rank 1's inbox, and set its flag."""
    ctx = DeviceContext.initialize(context, rank, world)
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    ctx.put(x + at, inbox + at, to_rank=1)
    ctx.atomic_xchg(flags + program, 1, to_rank=1, sem="release", scope="sys")


@triton.jit
def consume(inbox, flags, out, rank, bases: tl.tensor, BLOCK: tl.constexpr, SEM: tl.constexpr):
    """Wait for a block, and double it."""
    program = tl.program_id(0)
    while iris.atomic_cas(flags + program, 1, 1, rank, rank, bases, sem=SEM, scope="sys") != 1:
        pass
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(inbox + at) * 2)


@triton.jit
def count(counter, rank, bases: tl.tensor):
    """Add one to rank 0's counter."""
    one = tl.full([], 1, dtype=tl.int32)
    iris.atomic_add(counter, one, rank, 0, bases, sem="acq_rel", scope="sys")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1 << 30)
    parser.add_argument("--sem", default="acquire")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="gloo")
    ctx = iris.iris(heap_size=1 << 30)
    rank, world, bases = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_heap_bases()
    assert (rank, world) == (dist.get_rank(), dist.get_world_size())
    x, inbox, out = (ctx.zeros(given.size, dtype=torch.float32) for _ in range(3))
    flags = ctx.zeros(given.size // 16, dtype=torch.int32)
    counter = ctx.zeros(1, dtype=torch.int32)
    expected = torch.arange(given.size, dtype=torch.float32, device="cuda")
    x.copy_(expected)
    ctx.barrier()
    grid = (given.size // 16,)
    if rank == 0:
        produce[grid](ctx.get_device_context(), x, inbox, flags, rank, world, 16)
    else:
        consume[grid](inbox, flags, out, rank, bases, 16, given.sem)
    count[(1,)](counter, rank, bases)
    ctx.barrier()
    if rank == 1:
        torch.testing.assert_close(out, expected * 2, rtol=0, atol=0)
    else:
        assert counter.item() == world
        print("right")
    dist.destroy_process_group()
