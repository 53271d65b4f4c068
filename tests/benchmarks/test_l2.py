"""The model of L2 caches: known answers on small caches, and what schedules change."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.l2 import H200, L2, MI300X, attention, matmul
from taxfree_kernels.hardware import Hardware

TILE = 64 * 128 * 2  # bytes of a step's K, or V; and of 64 rows of Q


def device(units: int, tiles: int, xcds: int = 1) -> L2:
    """Without jitter; each cache holds this many tiles, all in one set."""
    hardware = Hardware("a device", "hip", "gfx942", units * xcds, 64, 1 << 16, 512, 1 << 34, xcds)
    return dataclasses.replace(
        MI300X, hardware=hardware, caches=xcds, capacity=tiles * TILE, ways=tiles, jitter=0.0
    )


def missed_tiles(l2: L2, length: int) -> float:
    """Of K and V, for one head."""
    traffic = attention(
        l2, "naive_head_first", heads=1, length=length, block_m=64, in_flight=1, simulated=[0]
    )
    blocks = length // 64
    assert traffic.requested == blocks * (2 * blocks + 1) * TILE
    return traffic.missed / TILE - blocks


def test_the_first_read_misses_and_what_fits_stays():
    assert missed_tiles(device(1, tiles=16), length=8 * 64) == 16


def test_least_recently_used_loses_all_of_a_loop_that_is_too_long():
    assert missed_tiles(device(1, tiles=15), length=8 * 64) == 8 * 16


def test_programs_in_step_share_each_tile():
    assert missed_tiles(device(8, tiles=2), length=8 * 64) == 16
    assert missed_tiles(device(4, tiles=2), length=8 * 64) == 2 * 16


def test_queries_of_a_group_share_keys():
    def missed(kv_heads: int) -> int:
        l2 = device(units=16, tiles=64)
        return attention(
            l2, "naive_head_first", heads=8, kv_heads=kv_heads, length=128, block_m=64
        ).missed

    assert missed(8) - missed(2) == 6 * 4 * TILE


def test_causal_programs_read_less():
    l2 = device(1, tiles=1)
    full, causal = (
        attention(l2, "naive_head_first", heads=1, length=512, block_m=64, causal=each).requested
        for each in (False, True)
    )
    assert (full, causal) == ((8 * 16 + 8) * TILE, (8 * 9 + 8) * TILE)


@pytest.mark.parametrize("heads", [8, 32])
def test_a_head_on_one_chiplet_is_read_once(heads):
    """Naive head-first reads each head on all chiplets."""
    l2 = device(units=8, tiles=16, xcds=4)
    naive, swizzled = (
        attention(
            l2, mapping, heads=heads, length=512, block_m=64, in_flight=1, simulated=range(4)
        ).missed
        for mapping in ("naive_head_first", "swizzled_head_first")
    )
    queries = heads * 8 * TILE
    assert swizzled - queries == heads * 16 * TILE
    assert naive - queries == 4 * (swizzled - queries)


def test_balanced_work_per_chiplet():
    l2 = device(units=4, tiles=64, xcds=8)
    swizzled, balanced = (
        attention(l2, mapping, heads=10, length=2048, block_m=64, causal=True).imbalance
        for mapping in ("swizzled_head_first", "balanced_head_first")
    )
    assert swizzled > 1.1
    assert balanced < 1.03


def test_m_tile_reads_weights_once_and_m_split_once_for_each_row_of_tiles():
    m, n, k = 64, 2048, 1024
    weights = n * k * 2

    def missed(group_m: int) -> float:
        l2 = dataclasses.replace(MI300X, jitter=0.0)
        return matmul(l2, m, n, k, xcds=8, group_m=group_m, simulated=range(8)).missed / weights

    activations = m / n
    assert missed(4) == pytest.approx(1 + 8 * activations)
    assert missed(1) == pytest.approx(4 + 8 * activations / 4)


def test_time_is_that_of_compute_or_of_memory():
    def us(flops_per_s: float, memory_bytes_per_s: float) -> float:
        l2 = device(units=8, tiles=2)
        rates = {"flops_per_s": flops_per_s, "memory_bytes_per_s": memory_bytes_per_s}
        sheet = dataclasses.replace(l2.sheet, **rates)
        l2 = dataclasses.replace(l2, sheet=sheet, hit_ns=0.0, memory_ns=0.0, side_ns=0.0)
        return attention(
            l2, "naive_head_first", heads=1, length=512, block_m=64, in_flight=1
        ).us  # fmt: skip

    assert us(1e12, 1e30) == pytest.approx(4 * 512 * 512 * 128 / 1e6)
    assert us(1e30, 1e12) == pytest.approx(16 * TILE / 1e6)


def test_schedules_of_h200_know_no_chiplets():
    naive, swizzled = (
        attention(H200, mapping, heads=16, length=512)
        for mapping in ("naive_head_first", "swizzled_head_first")
    )
    assert naive == swizzled
