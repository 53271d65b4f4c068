"""Payload that atomics carry: a chain of relaxed atomics announces it, and orders nothing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import CheckFailed, Reason, World

LANES = 4


@triton.jit
def _reduces(
    sums, flags, out, rank,
    RANKS: tl.constexpr, LANES: tl.constexpr, SEND: tl.constexpr, WAIT: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """Each rank adds, or exchanges its own part, in all memories by relaxed atomics."""
    lanes = tl.arange(0, LANES)
    for peer in range(RANKS):
        theirs = tl.load(sums + peer).to(tl.pointer_type(tl.int32))
        if READ == "exchanged":
            tl.atomic_xchg(theirs + rank * LANES + lanes, 1, sem="relaxed", scope="sys")
        else:
            tl.atomic_add(theirs + lanes, 1, sem="relaxed", scope="sys")
        flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_add(flag, 1, sem=SEND, scope="sys")
    flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(flag, 0, sem=WAIT, scope="sys") < RANKS:
        pass
    own = tl.load(sums + rank).to(tl.pointer_type(tl.int32))
    if READ == "exchanged":
        own += (1 - rank) * LANES
    if READ == "volatile":
        tl.store(out + lanes, tl.load(own + lanes, volatile=True))
    else:
        tl.store(out + lanes, tl.atomic_add(own + lanes, 0, sem="relaxed", scope="sys"))


def _run(send: str, wait: str, read: str = "added") -> None:
    with World(ranks=2, seeds=12) as world:
        sums, flags = world.zeros((2 * LANES,), torch.int32), world.zeros((1,), torch.int32)
        outs = [torch.zeros(LANES, dtype=torch.int32) for _ in range(2)]

        def call(rank: int) -> None:
            _reduces[(1,)](
                sums.bases, flags.bases, outs[rank], rank, 2, LANES, send, wait, read
            )  # fmt: skip

        world.run(call, calls=1)


@pytest.mark.parametrize(
    ("send", "wait", "read", "reason"),
    [
        ("relaxed", "relaxed", "added", Reason.SEVERAL),
        ("relaxed", "relaxed", "exchanged", Reason.SEVERAL),
        ("relaxed", "relaxed", "volatile", Reason.SEVERAL),
        ("relaxed", "acquire", "added", Reason.NO_RELEASE),
        ("release", "relaxed", "added", Reason.NO_ACQUIRE),
    ],
)
def test_payload_of_relaxed_atomics_needs_a_release_and_an_acquire(send, wait, read, reason):
    with pytest.raises(CheckFailed) as failed:
        _run(send, wait, read)
    assert failed.value.checked.violation.reason is reason, str(failed.value)
    assert "sums[" in str(failed.value)


def test_ordered_payload_of_relaxed_atomics_passes():
    _run("release", "acquire")
    _run("release", "acquire", "volatile")


@triton.jit
def _polls_two(flags, rank):
    """Two relaxed flags, polled in the other order than they are set: none is payload."""
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    peer = tl.load(flags + 1 - rank).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(peer, 1, sem="relaxed", scope="sys")
    tl.atomic_xchg(peer + 1, 1, sem="relaxed", scope="sys")
    while tl.atomic_add(own + 1, 0, sem="relaxed", scope="sys") != 1:
        pass
    while tl.atomic_add(own, 0, sem="relaxed", scope="sys") != 1:
        pass
    tl.store(own + 2, 1)


def test_a_poll_that_reads_an_old_value_goes_on():
    with World(ranks=2, seeds=12) as world:
        flags = world.zeros((3,), torch.int32)
        world.run(lambda rank: _polls_two[(1,)](flags.bases, rank), calls=1)
