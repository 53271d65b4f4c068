"""Schedules: each tile exactly once, on the chiplet that the schedule promises."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from taxfree_kernels.device.on_host import on_host
from taxfree_kernels.device.schedules import ATTENTION_MAPPINGS, attention_tile
from taxfree_kernels.device.tiles import swizzle2d, xcd_swizzle

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
