"""Accesses that share bytes: parts of synchronisation words, and bytes side by side."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import CheckFailed, World


@triton.jit
def _sets_half(words, rank, WIDE: tl.constexpr):
    """Rank 0 sets the upper half of a pair, which rank 1 reads as one."""
    pair = tl.load(words).to(tl.pointer_type(tl.int32))
    if rank == 0:
        tl.atomic_xchg(pair + 1, 1, sem="release", scope="sys")
    elif WIDE:
        tl.atomic_add(pair.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")
    else:
        while tl.atomic_add(pair + 1, 0, sem="relaxed", scope="sys") == 0:
            pass
        tl.load(pair.to(tl.pointer_type(tl.int64)))


@pytest.mark.parametrize("wide", [False, True])
def test_a_word_that_is_a_part_of_another_access_is_found(wide):
    with World(ranks=2, seeds=4) as world:
        words = world.zeros((1,), torch.int64)
        with pytest.raises(CheckFailed, match=r"unordered accesses of rank 0's words\[0\]"):
            world.run(lambda rank: _sets_half[(1,)](words.bases, rank, wide), calls=1)


@triton.jit
def _stores_bytes(bases, rank, FIRST: tl.constexpr, LANES: tl.constexpr):
    """Each rank stores the bytes after those of the rank before it, on rank 0."""
    lanes = tl.arange(0, LANES)
    bytes = tl.load(bases).to(tl.pointer_type(tl.int8)) + FIRST + rank * LANES
    tl.store(bytes + lanes, lanes.to(tl.int8))


@pytest.mark.parametrize(("first", "lanes"), [(0, 1), (1, 16)])
def test_bytes_side_by_side_are_no_race_at_an_odd_boundary(first, lanes):
    with World(ranks=2, seeds=4) as world:
        x = world.zeros((64,), torch.int8)
        world.run(lambda rank: _stores_bytes[(1,)](x.bases, rank, first, lanes))


def test_the_same_byte_is_a_race():
    with World(ranks=2, seeds=4) as world:
        x = world.zeros((64,), torch.int8)
        with pytest.raises(CheckFailed, match=r"rank 0's x\[1\]"):
            world.run(lambda rank: _stores_bytes[(1,)](x.bases, 0, 1, 1))
