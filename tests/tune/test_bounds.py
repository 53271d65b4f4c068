"""Bounds from measured rates."""

from __future__ import annotations

import math

import pytest

from taxfree_kernels.variant import Cost
from taxfree_tune.doctor.tasks import GPU_PEER_BYTES, HOST_PEER_BYTES
from taxfree_tune.measuring.bounds import Peaks, bounds, slot_bytes

PEAKS = Peaks(flops_per_s=1e12, memory_bytes_per_s=1e9, link_bytes_per_s=1e8)


def test_the_floor_is_the_longer_of_flops_and_memory():
    assert bounds(Cost(3_000_000, 2_000, 0), PEAKS, None).t_floor_us == pytest.approx(3.0)
    assert bounds(Cost(1_000_000, 2_000, 0), PEAKS, None).t_floor_us == pytest.approx(2.0)


def test_the_bound_is_the_longer_of_floor_and_link():
    found = bounds(Cost(3_000_000, 2_000, 500), PEAKS, 7.0)
    assert found.t_link_us == pytest.approx(5.0)
    assert found.t_bound_us == found.t_link_us
    assert found.t_gemm_us == 7.0


@pytest.mark.parametrize(
    ("fabric", "peer_bytes"), [("host", HOST_PEER_BYTES), ("cuda", GPU_PEER_BYTES)]
)
def test_the_slots_of_the_doctor_hold_what_is_pushed(fabric, peer_bytes):
    assert slot_bytes(fabric) <= 2 * peer_bytes


def test_one_rank_waits_for_no_link():
    alone = Peaks(1e12, 1e9, math.inf)
    assert bounds(Cost(1, 1, 0), alone, None).t_link_us == 0.0
