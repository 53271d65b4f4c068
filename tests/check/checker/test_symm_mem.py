"""What a host does with a handle of PyTorch's symmetric memory."""

from __future__ import annotations

import pytest

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
