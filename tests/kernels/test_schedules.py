"""Schedules: each tile exactly once, on the chiplet that the schedule promises."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.l2 import on_host
from taxfree_kernels.device.tiles import (
    ATTENTION_MAPPINGS,
    attention_tile,
    rank_rotated,
    stream_k,
    swizzle2d,
    xcd_swizzle,
)
from taxfree_kernels.reduction.spaces import tiles_per_signal
from taxfree_kernels.spaces import ALL_ROWS

sizes = st.integers(1, 40)
chiplets = st.sampled_from([1, 2, 3, 8])


def tiles(blocks: int, heads: int, batch: int, xcds: int, mapping: str) -> np.ndarray:
    """Rows of (sequence, head, block), in the order of program ids."""
    programs = np.arange(blocks * heads * batch)
    return np.stack(on_host(attention_tile)(programs, blocks, heads, batch, xcds, mapping), 1)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 4), chiplets, st.sampled_from(ATTENTION_MAPPINGS))
def test_attention_has_each_tile_once(
    blocks: int, heads: int, batch: int, xcds: int, mapping: str
) -> None:
    found = tiles(blocks, heads, batch, xcds, mapping)
    flat = np.ravel_multi_index(tuple(found.T), (batch, heads, blocks))
    assert sorted(flat) == list(range(blocks * heads * batch))


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 40), chiplets)
def test_a_matmul_has_each_tile_once(tiles_m: int, tiles_n: int, group: int, xcds: int) -> None:
    count = tiles_m * tiles_n
    index = on_host(xcd_swizzle)(np.arange(count), count, xcds)
    tile_m, tile_n = on_host(swizzle2d)(index, tiles_m, tiles_n, group)
    assert sorted(tile_m * tiles_n + tile_n) == list(range(count))


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 200))
def test_stream_k_has_each_iteration_once(tiles: int, steps: int, programs: int) -> None:
    begin, end = on_host(stream_k)(np.arange(programs), programs, tiles * steps)
    runs = [range(*run) for run in zip(begin, end, strict=True)]
    assert [iteration for run in runs for iteration in run] == list(range(tiles * steps))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 8))
def test_stream_k_of_as_many_programs_splits_each(tiles: int, steps: int, split: int) -> None:
    programs = np.arange(tiles * split)
    begin, end = on_host(stream_k)(programs, tiles * split, tiles * steps)
    own_begin, own_end = on_host(stream_k)(programs % split, split, steps)
    assert (begin == programs // split * steps + own_begin).all()
    assert (end == programs // split * steps + own_end).all()


@settings(deadline=None)
@given(sizes, sizes, st.integers(0, 40))
def test_each_rank_has_each_row_of_tiles_once(tiles_m: int, tiles_n: int, first: int) -> None:
    rows, columns = np.divmod(np.arange(tiles_m * tiles_n), tiles_n)
    found = on_host(rank_rotated)(rows, first, tiles_m)
    assert sorted(found * tiles_n + columns) == list(range(tiles_m * tiles_n))
    assert found[0] == first % tiles_m


@settings(deadline=None)
@given(sizes, sizes, chiplets)
def test_all_rows_in_a_group_are_fleets_m_tile(tiles_m: int, per_xcd: int, xcds: int) -> None:
    """Each chiplet has columns of its own, and walks down one after the other."""
    count = tiles_m * per_xcd * xcds
    programs = np.arange(count)
    index = on_host(xcd_swizzle)(programs, count, xcds)
    tile_m, tile_n = on_host(swizzle2d)(index, tiles_m, per_xcd * xcds, ALL_ROWS)
    assert (tile_n // per_xcd == programs % xcds).all()
    assert (tile_m == programs // xcds % tiles_m).all()


@settings(deadline=None)
@given(sizes, chiplets)
def test_as_many_signals_as_chiplets_are_one_for_each(per_xcd: int, xcds: int) -> None:
    """The tiles that share one are those of a chiplet, if the chiplets divide the tiles."""
    programs = np.arange(per_xcd * xcds)
    tile = on_host(xcd_swizzle)(programs, len(programs), xcds)
    assert (tile // tiles_per_signal(len(programs), {"SIGNALS": xcds}) == programs % xcds).all()


@settings(deadline=None)
@given(sizes, st.integers(1, 5), chiplets)
def test_swizzled_head_first_is_the_papers_formula(blocks: int, per_xcd: int, xcds: int) -> None:
    w = np.arange(blocks * per_xcd * xcds)
    head = w % xcds * per_xcd + w // (xcds * blocks)
    block = w % (xcds * blocks) // xcds
    found = tiles(blocks, per_xcd * xcds, 1, xcds, "swizzled_head_first")
    assert (found == np.stack([np.zeros_like(w), head, block], 1)).all()


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.integers(1, 3), chiplets)
def test_swizzled_block_first_keeps_heads_on_their_chiplet(
    blocks: int, per_xcd: int, batch: int, xcds: int
) -> None:
    found = tiles(blocks, per_xcd * xcds, batch, xcds, "swizzled_block_first")
    assert (found[:, 1] // per_xcd == np.arange(len(found)) % xcds).all()


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 4), chiplets)
def test_balanced_chiplets_have_equal_causal_work(
    blocks: int, heads: int, batch: int, xcds: int
) -> None:
    """The work of block b is b + 1."""
    found = tiles(blocks, heads, batch, xcds, "balanced_head_first")
    work = [int((found[chiplet::xcds, 2] + 1).sum()) for chiplet in range(xcds)]
    assert max(work) - min(work) <= 2 * (blocks + 1)


def test_balanced_is_better_balanced_than_swizzled() -> None:
    """Ten causal heads on eight chiplets: the most work of a chiplet, relative to the mean."""

    def longest(mapping: str) -> float:
        block = tiles(64, 10, 1, 8, mapping)[:, 2]
        work = [float((block[chiplet::8] + 1).sum()) for chiplet in range(8)]
        return max(work) / (sum(work) / 8)

    assert longest("swizzled_head_first") > 1.1
    assert longest("balanced_head_first") < 1.01


@triton.jit
def _store_tiles(out_ptr, blocks, heads, batch, XCDS: tl.constexpr, MAPPING: tl.constexpr):
    program = tl.program_id(0)
    sequence, head, block = attention_tile(program, blocks, heads, batch, XCDS, MAPPING)
    tl.store(out_ptr + 3 * program, sequence)
    tl.store(out_ptr + 3 * program + 1, head)
    tl.store(out_ptr + 3 * program + 2, block)


@pytest.mark.parametrize("mapping", ATTENTION_MAPPINGS)
def test_kernels_and_host_agree(mapping: str) -> None:
    out = torch.full((5 * 11 * 2, 3), -1, dtype=torch.int32)
    _store_tiles[(len(out),)](out, 5, 11, 2, XCDS=8, MAPPING=mapping)
    assert (out.numpy() == tiles(5, 11, 2, 8, mapping)).all()
