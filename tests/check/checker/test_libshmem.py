"""Puts and signals of Triton-distributed's libshmem in a world."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import CheckFailed, World
from taxfree_check.checker.conventions import triton_dist

_MODULES = triton_dist.modules()
shmem = _MODULES["triton_dist.language.extra.libshmem_device"]


@triton.jit
def _puts(x, inbox, flag, out, rank, call, HOW: tl.constexpr, BYTES: tl.constexpr):
    """A message to the other rank, in two slots."""
    slot = inbox + call % 2 * 24
    if HOW == "together":
        shmem.putmem_signal_block(
            slot, x, BYTES, flag, call + 1, shmem.NVSHMEM_SIGNAL_SET, 1 - rank
        )
    else:
        shmem.putmem_block(slot, x, BYTES, 1 - rank)
        if HOW == "fence":
            shmem.fence()
        shmem.signal_op(flag, call + 1, shmem.NVSHMEM_SIGNAL_SET, 1 - rank)
    shmem.signal_wait_until(flag, shmem.NVSHMEM_CMP_GE, call + 1)
    for index in range(BYTES // 4):
        tl.store(out + index, tl.load(slot + index))


def _run(how: str) -> None:
    with World(ranks=2, seeds=8) as world:
        x, inbox = torch.arange(24.0), world.empty((48,))
        flags = world.zeros((1,), torch.int32)
        outs = [torch.zeros(24) for _ in range(2)]

        def check() -> None:
            assert all((out == x).all() for out in outs)

        def call(rank: int, number: int) -> None:
            _puts[(1,)](
                x, inbox.local(rank), flags.local(rank), outs[rank], rank, number, how, 96
            )  # fmt: skip

        world.run(call, check=check)


@pytest.mark.parametrize("how", ["together", "fence"])
def test_a_put_and_its_signal_are_ordered(how):
    _run(how)


def test_a_put_is_not_ordered_before_a_signal_of_its_own():
    with pytest.raises(CheckFailed, match="no release"):
        _run("apart")
