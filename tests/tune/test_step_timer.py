"""Clock readings in place, on ranks that are processes of this machine."""

from __future__ import annotations

import numpy as np
import pytest

from taxfree_tune.measuring.bounds import Bounds
from taxfree_tune.profiling import clock_sync, step_timer
from taxfree_tune.taxes import accounts

TASKS = "tests.tune.step_timer_tasks"


@pytest.fixture(scope="module")
def late(started) -> step_timer.TimedPipeline:
    return started["host"].run(2, f"{TASKS}:late_rank", seconds=0.05, repetitions=3)[0]


class TestTimeSteps:
    def test_a_rank_that_is_late_is_waited_for(self, late):
        first, last = accounts(late.measurement, Bounds(1.0, 0.0, None))
        waited = {part.name: part.us for part in first.parts}
        assert waited["skew"] == pytest.approx(50_000, rel=0.3)
        assert waited["compute"] < 10_000
        took = {part.name: part.us for part in last.parts}
        assert took["skew"] < 10_000
        assert took["compute"] == pytest.approx(50_000, rel=0.3)

    def test_every_sequence_is_read_in_every_repetition(self, late):
        measured = late.measurement
        for readings in (measured.in_place, measured.latency_probe, measured.hot):
            assert readings.clock_ns.shape == (2, 3, 4)
            assert (np.diff(readings.clock_ns, axis=2) > 0).all()
        assert measured.cold is None
        assert measured.graph_us is None
        assert measured.eager_us.shape == (2, 3)

    def test_spans_are_on_one_clock(self, late):
        assert [span.name for span in late.spans] == 2 * ["compute", "barrier", "sum"]
        barriers = [span for span in late.spans if span.name == "barrier"]
        assert abs(barriers[0].end_us - barriers[1].end_us) < 10_000
        assert barriers[1].begin_us - barriers[0].begin_us > 30_000


GATHER, ALL_REDUCE, SCATTER = "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"
DECODE, EMBEDDING, STENCIL = "flash_decode", "embedding_all_to_all", "stencil"
RAGGED = {"m": 5, "n": 32, "k": 24, "world_size": 2}
ATTENTION = {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "kv_len_per_rank": 40,
             "world_size": 2}  # fmt: skip
DOMAIN = {"rows": 6, "columns": 5, "steps": 3, "norm_every": 3, "world_size": 2}
BAGS = {"batch": 3, "bag": 2, "tables": 3, "rows": 5, "dim": 6, "world_size": 2}
#: operation, fields beside RAGGED, variant, kinds of steps; what is not here is one fused step
PIPELINES = [
    (GATHER, {"gather_dim": 0}, "baseline", ["copy", "collective", "consumer"]),
    (GATHER, {"gather_dim": 1}, "baseline", ["collective", "copy", "consumer"]),
    (GATHER, {"gather_dim": 0}, "one_shot", ["collective", "consumer"]),
    (GATHER, {"gather_dim": 1}, "one_shot", ["collective", "consumer"]),
    (GATHER, {"gather_dim": 0}, "push", ["fused"]),
    (ALL_REDUCE, {}, "baseline", ["producer", "collective"]),
    (ALL_REDUCE, {"residual": True}, "baseline", ["producer", "collective", "copy"]),
    (ALL_REDUCE, {"rms_norm": True}, "baseline", ["producer", "collective", "copy"]),
    (ALL_REDUCE, {"bias": True}, "two_shot", ["producer", "collective"]),
    (SCATTER, {}, "baseline", ["producer", "collective"]),
    (SCATTER, {"scatter_dim": 1}, "baseline", ["producer", "copy", "collective"]),
    (SCATTER, {"scatter_dim": 1}, "one_shot", ["producer", "collective"]),
    (SCATTER, {"n": 96}, "overlap", ["fused"]),
    (DECODE, {}, "baseline", ["producer", "producer", "collective", "consumer"]),
    *(
        (EMBEDDING, {"shard_dim": dim}, "baseline",
         ["copy", "collective", "producer", "collective", "copy"])
        for dim in (0, 1)
    ),
    *((STENCIL, {}, variant, ["fused"]) for variant in ("baseline", "copies", "persistent")),
]  # fmt: skip


@pytest.mark.parametrize(("op", "fields", "variant", "kinds"), PIPELINES)
def test_steps_in_order_are_a_call(ranks, op, fields, variant, kinds):
    problem = {DECODE: ATTENTION, EMBEDDING: BAGS, STENCIL: DOMAIN}.get(op, RAGGED) | fields
    found = ranks.run(2, f"{TASKS}:steps_and_call", op=op, variant=variant, problem=problem)
    assert found == [kinds, kinds]


class TestClocks:
    def test_the_shortest_round_trip_counts(self):
        lower = [(0, 9_000), (20_000, 21_000), (40_000, 49_000)]
        higher = [(1_008_000, 1_008_000), (1_020_400, 1_020_400), (1_041_000, 1_041_000)]
        found = clock_sync.compare(lower, higher)
        assert (found.offset_ns, found.error_ns) == (1_020_400 - 20_500, 500.0)
        assert found.at_ns == 1_020_400

    def test_the_same_clock_is_found_to_be_the_same(self, ranks):
        first, *others = ranks.run(2, f"{TASKS}:clocks", rounds=10)
        assert (first.offset_ns, first.error_ns) == (0, 0.0)
        for other in others:
            assert abs(other.offset_ns) <= other.error_ns
