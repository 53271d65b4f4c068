"""Program order: numbers that are dealt out anew are each there once."""

import pytest
import torch
import triton
import triton.language as tl

from taxfree_kernels.device.tiles import own_chiplet_first


@triton.jit
def _renumber(out_ptr, XCDS: tl.constexpr):
    program = tl.program_id(0)
    number = own_chiplet_first(program, tl.num_programs(0), XCDS)
    tl.store(out_ptr + program, number)


def renumbered(count: int, chiplets: int) -> list[int]:
    out = torch.full((count,), -1, dtype=torch.int32)
    _renumber[(count,)](out, XCDS=chiplets)
    return out.tolist()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 37])
@pytest.mark.parametrize("chiplets", [1, 2, 8])
def test_each_number_is_there_once(count: int, chiplets: int) -> None:
    assert sorted(renumbered(count, chiplets)) == list(range(count))


def test_a_chiplet_gets_neighbours() -> None:
    numbers = renumbered(10, 4)  # program p runs on chiplet p % 4
    assert [numbers[chiplet::4] for chiplet in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_one_chiplet_changes_nothing() -> None:
    assert renumbered(5, 1) == [0, 1, 2, 3, 4]
