"""What programs of fused kernels do when."""

from __future__ import annotations

import numpy as np
import pytest

from taxfree import timeline
from taxfree.timeline import Activity, activities_of
from taxfree.trial import Candidate
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.device import sync
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import variants

OP = "all_gather_matmul"
PROBLEM = AllGatherMatmul(m=32, n=128, k=64, world_size=2)
STARTED, SENT, BEGAN, ENDED, DONE = (
    event.value for event in (sync.STARTED, sync.SENT, sync.WAIT_BEGAN, sync.WAIT_ENDED, sync.DONE)
)


def activities(events: dict[tuple[int, int, int], float], programs: int) -> list[Activity]:
    """Of one rank of three; events are (program, event, peer) -> time."""
    times = np.full((programs, sync.EVENTS.value, sync.PEERS.value), np.nan)
    for place, time in events.items():
        times[place] = time
    return list(activities_of(1, ~np.isnan(times), times, 3))


class TestActivities:
    def test_a_sender_sends_until_its_last_signal(self):
        events = {(0, STARTED, 0): 1.0, (0, SENT, 0): 5.0, (0, SENT, 2): 4.0, (0, DONE, 0): 6.0}
        assert activities(events, 1) == [Activity(1, 0, "send", 0, 1.0, 5.0)]

    def test_a_tile_computes_and_waits_for_each_source(self):
        events = {(1, STARTED, 0): 1.0, (1, DONE, 0): 9.0}
        events |= {(1, BEGAN, 0): 2.0, (1, ENDED, 0): 3.0, (1, BEGAN, 2): 5.0, (1, ENDED, 2): 7.0}
        assert activities(events, 3) == [
            Activity(1, 1, "compute", None, 1.0, 9.0),
            Activity(1, 1, "wait", 0, 2.0, 3.0),
            Activity(1, 1, "wait", 2, 5.0, 7.0),
        ]

    def test_a_second_launch_notes_over_the_first(self):
        events = {(0, STARTED, 0): 5.0, (0, SENT, 0): 3.0, (0, DONE, 0): 8.0}
        assert activities(events, 1) == [Activity(1, 0, "compute", None, 5.0, 8.0)]


@pytest.fixture(scope="module")
def push() -> tuple[Activity, ...]:
    config = variants(OP)["push"].first_configs(PROBLEM, KNOWN["cpu"])[0]
    return timeline.record(OP, PROBLEM, "host", [Candidate("push", config)])[0]


class TestRecord:
    def test_every_program_of_every_rank_is_there(self, push):
        who = {(each.rank, each.program): each.kind for each in push if each.kind != "wait"}
        kinds = {0: "send", 1: "compute", 2: "compute"}
        assert who == {(rank, p): kind for rank in range(2) for p, kind in kinds.items()}

    def test_waits_end_after_what_they_wait_for_was_sent(self, push):
        sent = {each.rank: each.end_us for each in push if each.kind == "send"}
        waits = [each for each in push if each.kind == "wait"]
        assert {each.peer for each in waits if each.rank == 0} == {1}
        # A signal is noted behind its release, which the peer may have seen by then.
        assert all(wait.end_us > sent[wait.peer] - 20_000 for wait in waits)

    def test_waits_are_within_their_programs(self, push):
        whole = {(each.rank, each.program): each for each in push if each.kind == "compute"}
        for wait in (each for each in push if each.kind == "wait"):
            program = whole[wait.rank, wait.program]
            assert program.begin_us < wait.begin_us < wait.end_us < program.end_us
