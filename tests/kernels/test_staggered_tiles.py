"""Tiles of which two programs share the first: all of K is there once, and shares grow."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_kernels.device.tiles import tile_and_share


@triton.jit
def _deal_out(out_ptr, SPLIT_K: tl.constexpr, STAGGERED: tl.constexpr):
    program = tl.program_id(0)
    tile, share = tile_and_share(program, SPLIT_K, STAGGERED)
    tl.store(out_ptr + 2 * program, tile)
    tl.store(out_ptr + 2 * program + 1, share)


def dealt_out(programs: int, split_k: int = 1, staggered: int = 0) -> list[tuple[int, int]]:
    out = torch.full((programs, 2), -1, dtype=torch.int32)
    _deal_out[(programs,)](out, split_k, staggered)
    return [(tile, share) for tile, share in out.tolist()]


@pytest.mark.parametrize("staggered", [1, 3, 7])
def test_the_first_tiles_have_two_programs_the_others_one(staggered):
    shared = [(tile, share) for tile in range(staggered) for share in (0, 1)]
    alone = [(tile, 0) for tile in range(staggered, 9)]
    assert dealt_out(9 + staggered, staggered=staggered) == shared + alone


def test_without_it_every_tile_has_its_splits():
    assert dealt_out(4, split_k=2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert dealt_out(3) == [(0, 0), (1, 0), (2, 0)]
