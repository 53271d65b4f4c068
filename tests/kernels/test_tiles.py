"""Program order: numbers that are dealt out anew are each there once."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from taxfree_kernels.device.tiles import in_turns, xcd_swizzle


@triton.jit
def _renumber(out_ptr, XCDS: tl.constexpr):
    program = tl.program_id(0)
    number = xcd_swizzle(program, tl.num_programs(0), XCDS)
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


@triton.jit
def _take_turns(out_ptr, count, ahead, every, others, XCDS: tl.constexpr):
    program = tl.program_id(0)
    is_first, number = in_turns(program, count, ahead, every, others, XCDS)
    tl.store(out_ptr + 2 * program, is_first.to(tl.int32))
    tl.store(out_ptr + 2 * program + 1, number)


def roles(programs: int, *sizes: int, chiplets: int = 1) -> list[str]:
    out = torch.full((programs, 2), -1, dtype=torch.int32)
    _take_turns[(programs,)](out, *sizes, XCDS=chiplets)
    return [f"{'ab'[not is_first]}{number}" for is_first, number in out.tolist()]


def test_two_lists_take_turns_and_what_remains_comes_last() -> None:
    assert " ".join(roles(13, 8, 2, 3, 1)) == "a0 a1 a2 a3 a4 b0 a5 a6 a7 b1 b2 b3 b4"
    assert " ".join(roles(9, 5, 2, 2, 1)) == "a0 a1 a2 a3 b0 a4 b1 b2 b3"
    assert " ".join(roles(4, 2, 2, 2, 1)) == "a0 a1 b0 b1"


def test_in_turns_each_number_is_there_once_and_others_come_behind_their_turn() -> None:
    count, every, others = 37, 8, 3
    firsts, seconds = [f"a{number}" for number in range(count)], [f"b{each}" for each in range(20)]
    for ahead, chiplets in product((0, 8, 32, count), (1, 8)):
        found = roles(len(firsts + seconds), count, ahead, every, others, chiplets=chiplets)
        assert sorted(found) == sorted(firsts + seconds)
        for number in range(15):
            group = firsts[number // others * every :][:every]
            assert max(map(found.index, group)) < found.index(f"b{number}")
