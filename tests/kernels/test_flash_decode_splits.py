"""How the splits of a batch are dealt out to its sequences, by the lengths on the device."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_kernels.device.peers import Group
from taxfree_kernels.flash_decode.attend import Splits, split_of

BLOCK_N, CAPACITY = 16, 1000


@triton.jit
def _every_split(
    lens_ptr, found_ptr, batch, capacity,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    every = tl.arange(0, SPLIT.BATCH_BLOCK)
    sequence, split, own_splits, begin, end, _ = split_of(
        slot, every, lens_ptr, batch, capacity, 0, GROUP, WINDOW, SPLIT
    )
    tl.store(found_ptr + 5 * slot, sequence)
    tl.store(found_ptr + 5 * slot + 1, split)
    tl.store(found_ptr + 5 * slot + 2, own_splits)
    tl.store(found_ptr + 5 * slot + 3, begin)
    tl.store(found_ptr + 5 * slot + 4, end)


def splits_of(lengths, splits, later=None, window=0):
    """(sequence, split, splits of the sequence, begin, end) of every slot."""
    batch = len(lengths)
    lens = torch.tensor([lengths, later or [0] * batch], dtype=torch.int32)
    found = torch.full((batch * splits, 5), -1, dtype=torch.int32)
    split = Splits(triton.next_power_of_2(batch), splits, BLOCK_H=16, BLOCK_N=BLOCK_N, XCDS=1)
    _every_split[(batch * splits,)](
        lens, found, batch, CAPACITY, Group(2, "interpreter"), window, split
    )
    return found.tolist()


@pytest.mark.parametrize(
    "lengths",
    [[100], [0], [1000, 0, 0], [7, 1000, 333, 16], [0, 0], [5, 5, 5], [1200, 64, 1], [16] * 9],
)
@pytest.mark.parametrize("splits", [1, 4])
def test_every_key_is_in_one_split_and_splits_of_a_sequence_are_in_order(lengths, splits):
    slots = [slot for slot in splits_of(lengths, splits) if slot[0] < len(lengths)]
    for sequence, length in enumerate(lengths):
        own = [slot for slot in slots if slot[0] == sequence]
        assert [slot[1] for slot in own] == list(range(own[0][2]))
        keys = [key for *_, begin, end in own for key in range(begin, end)]
        assert keys == list(range(min(length, CAPACITY)))


def test_equal_lengths_have_equal_splits():
    assert [slot[:3] for slot in splits_of([480] * 3, 5)] == [
        [sequence, split, 5] for sequence in range(3) for split in range(5)
    ]


def test_a_long_sequence_gets_the_splits_that_short_ones_do_not_need():
    slots = splits_of([16, 960, 16, 32], 8)
    longest = max(end - begin for *_, begin, end in slots)
    assert longest <= 3 * BLOCK_N  # with 8 splits for each, it would be 8 blocks


def test_keys_before_the_window_are_in_no_split():
    slots = splits_of([500, 300], 4, later=[100, 0], window=150)
    first, second = ([slot for slot in slots if slot[0] == sequence] for sequence in (0, 1))
    assert (first[0][3], first[-1][4]) == (450, 500)
    assert (second[0][3], second[-1][4]) == (150, 300)
