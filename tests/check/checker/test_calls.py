"""How many calls a run makes: enough that a ring of slots wraps, or the result says so."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import CheckFailed, Reason, World


@triton.jit
def _sends(inboxes, flags, out, rank, call, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """Messages in a ring of slots; nobody says that a slot has been read."""
    lanes = call % SLOTS * LANES + tl.arange(0, LANES)
    inbox = tl.load(inboxes + 1).to(tl.pointer_type(tl.float32))
    flag = tl.load(flags + 1).to(tl.pointer_type(tl.int32))
    if rank == 0:
        tl.store(inbox + lanes, 1.0)
        tl.atomic_xchg(flag, call + 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < call + 1:
            pass
        tl.store(out + tl.arange(0, LANES), tl.load(inbox + lanes))


def _run(slots: int, calls: int | None = None) -> World:
    with World(ranks=2, seeds=3) as world:
        inbox, flags = world.empty((slots, 16)), world.zeros((1,), torch.int32)
        out = torch.zeros(16)

        def call(rank: int, number: int) -> None:
            _sends[(1,)](inbox.bases, flags.bases, out, rank, number, slots, 16)

        world.run(call, calls)
    return world


@pytest.mark.parametrize("slots", [1, 3, 4, 7])
def test_a_ring_that_nobody_guards_is_reported_when_it_wraps(slots):
    with pytest.raises(CheckFailed) as failed:
        _run(slots)
    assert failed.value.checked.violation.reason is Reason.LIFETIME


def test_a_ring_that_did_not_wrap_is_said():
    (checked,) = _run(4, calls=3).checks
    assert "each of 3 calls stored to symmetric memory where none had stored before" in str(checked)
    (checked,) = _run(32).checks
    assert "each of 16 calls" in checked.note
