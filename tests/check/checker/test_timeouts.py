"""Polls with a timeout: a program that goes on without its signal is reported."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import CheckFailed, Reason, World

pytestmark = pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="Triton is too old")


@triton.jit
def _awaits(inboxes, flags, out, rank, THEN: tl.constexpr):
    """A message to the other rank, and a wait of a bounded time for its own."""
    lanes = tl.arange(0, 16)
    tl.store(tl.load(inboxes + 1 - rank).to(tl.pointer_type(tl.float32)) + lanes, lanes * 1.0)
    flag = tl.load(flags + 1 - rank).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    own = tl.load(inboxes + rank).to(tl.pointer_type(tl.float32)) + lanes
    arrived = tl.atomic_poll(flag, 1, sem="acquire", scope="sys", timeout_ns=1000)
    if THEN == "ignores":
        tl.store(out + lanes, tl.load(own))
    elif THEN == "repeats":
        while not arrived:
            arrived = tl.atomic_poll(flag, 1, sem="acquire", scope="sys", timeout_ns=1000)
        tl.store(out + lanes, tl.load(own))
    else:
        if THEN == "stops":
            tl.device_assert(arrived, "no message")
        if arrived:
            tl.store(out + lanes, tl.load(own))


def _run(then: str) -> None:
    with World(ranks=2, seeds=16) as world:
        inbox, flags = world.empty((16,)), world.zeros((1,), torch.int32)
        outs = [torch.zeros(16) for _ in range(2)]

        def check() -> None:
            assert all((out == torch.arange(16)).all() for out in outs)

        def call(rank: int) -> None:
            _awaits[(1,)](inbox.bases, flags.bases, outs[rank], rank, then)

        world.run(call, calls=1, check=check)


def test_a_timeout_that_is_ignored_is_reported():
    with pytest.raises(CheckFailed) as failed:
        _run("ignores")
    assert failed.value.checked.violation.reason is Reason.TIMEOUT


@pytest.mark.parametrize("then", ["repeats", "gives up", "stops"])
def test_a_timeout_that_is_minded_passes(then):
    _run(then)
