"""What a host does with a handle of PyTorch's symmetric memory."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import CheckFailed, World
from taxfree_check.checker.conventions.symm_mem import rendezvous


def test_barriers_of_different_channels_do_not_meet():
    def run(world: World, *, is_shared: bool) -> None:
        x = world.zeros((16,))
        world.run(
            lambda rank: rendezvous(world, x.local(rank)).barrier(channel=1 if is_shared else rank)
        )

    with World(ranks=2, seeds=2) as world:
        run(world, is_shared=True)
        with pytest.raises(CheckFailed, match=r"deadlock(.|\n)*waits at a barrier of channel 1"):
            run(world, is_shared=False)


@triton.jit
def _copies(source, target, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(target + lanes, tl.load(source + lanes))


def _passes_on(world: World, *, waits: bool, replies: bool = True) -> None:
    """Each rank stores into the next one's memory, and signals on its stream."""
    x, box = world.full((16,), 1.0), world.empty((16,))
    outs = [torch.zeros(16) for _ in range(2)]

    def call(rank: int) -> None:
        handle, peer = rendezvous(world, box.local(rank)), 1 - rank
        theirs = handle.get_remote_tensor(peer, (16,), torch.float32)
        _copies[(1,)](x.local(rank), theirs, 16)
        handle.put_signal(peer)
        if waits:
            handle.wait_signal(peer)
        _copies[(1,)](box.local(rank), outs[rank], 16)
        if replies:
            handle.put_signal(peer, channel=1)
            handle.wait_signal(peer, channel=1)

    def check() -> None:
        assert all((out == 1).all() for out in outs)

    world.run(call, check=check)


def test_signals_of_streams_order_what_they_announce():
    with World(ranks=2, seeds=12) as world:
        _passes_on(world, waits=True)
        with pytest.raises(CheckFailed, match="payload lifetime"):
            _passes_on(world, waits=True, replies=False)


def test_a_signal_that_nobody_waits_for_orders_nothing():
    with World(ranks=2, seeds=12) as world, pytest.raises(CheckFailed, match=r"no wait|lifetime"):
        _passes_on(world, waits=False)


def test_a_signal_that_nobody_sends_is_a_deadlock():
    with World(ranks=2, seeds=2) as world:
        x = world.zeros((16,))
        with pytest.raises(CheckFailed, match=r"stream waits for rank 0's signal pad\[1\]"):
            world.run(lambda rank: rendezvous(world, x.local(rank)).wait_signal(1 - rank))
